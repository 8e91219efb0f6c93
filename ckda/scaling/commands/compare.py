"""``ckda scaling compare``: the paper's three fits again, beside what it prints."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckda.command import filled, make_folder
from ckda.record import environment, read_json, write_record

from .. import figures, report
from ..fit import Fit, Settings, fit
from ..published import HELD_OUT, paper_table
from ..reproduce import TREATMENTS, Check, Entry, checks, coverage, entries, rounding_spread
from ..store import Resume, describe, resumable_fit
from ..table import Table
from . import Effort, effort_of, fingerprint, progress, tell, ticks

__all__ = ["Comparison", "Config", "Treatment", "run", "run_command"]


@dataclass(frozen=True)
class Config:
    """How hard the paper's fits are tried again."""

    out: str
    effort: Effort = field(default_factory=Effort)
    coverage: int = 300  #: synthetic tables of the coverage study; 0: none
    replicates: int = 300  #: of each of them

    def __post_init__(self) -> None:
        if self.coverage < 0:
            raise ValueError(f"--coverage {self.coverage}: it must not be negative")


@dataclass(frozen=True)
class Treatment:
    """One of the paper's fits, ours beside the printed."""

    fit: dict[str, Any]  #: its record, as fit.json
    beside_paper: list[Entry]
    checks: dict[str, Check]
    rounding_half_width: dict[str, dict[str, float]] | None = None

    def as_json(self) -> dict[str, Any]:
        """The fit's record and the comparison in one."""
        rest = asdict(self)
        return rest.pop("fit") | rest

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Treatment":
        """From its record."""
        rows = [Entry(**row) for row in values["beside_paper"]]
        judged = {name: Check(**check) for name, check in values["checks"].items()}
        fitted: dict[str, Any] = {
            name: values[name] for name in ("kind", "settings", "level", "cost", "arms") if name in values
        }
        return cls(fitted, rows, judged, values.get("rounding_half_width"))


@dataclass(frozen=True)
class Comparison:
    """The file compare.json."""

    level: float
    seed: int
    restarts: int
    treatments: dict[str, Treatment]
    isolated_with_printed_sizes: Treatment
    coverage: dict[str, Any] | None
    timing: dict[str, Any]
    seconds: float
    environment: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As the file has it."""
        fits = {name: treatment.as_json() for name, treatment in self.treatments.items()}
        printed = self.isolated_with_printed_sizes.as_json()
        del printed["rounding_half_width"]
        rest = vars(self) | {"treatments": fits, "isolated_with_printed_sizes": printed}
        return {"kind": "ckda scaling comparison"} | rest

    @classmethod
    def load(cls, path: str | Path) -> "Comparison":
        """From its file."""
        values = {name: value for name, value in read_json(path).items() if name != "kind"}
        values["treatments"] = {name: Treatment.of(one) for name, one in values["treatments"].items()}
        values["isolated_with_printed_sizes"] = Treatment.of(values["isolated_with_printed_sizes"])
        return cls(**values)


def run(config: Config, tick: Callable[[], None] = lambda: None) -> Comparison:
    """All three fits, the rounding of the table, the coverage of the intervals; `tick()` is called after every part."""
    began, effort, table = time.perf_counter(), config.effort, paper_table()
    resume = Resume(Path(config.out) / "compare.partial.json", [asdict(config), fingerprint(table)])

    def fitted(name: str, table: Table, settings: Settings, replicates: int) -> Fit:
        settings = replace(settings, starts=effort.starts, seed=effort.seed)
        return resumable_fit(table, settings, replicates, effort.restarts, resume, name, tick)

    fits = {name: fitted(name, table, settings, effort.bootstrap) for name, (settings, _, _) in TREATMENTS.items()}
    rounded = fitted("rounded", paper_table(printed_sizes=True), TREATMENTS["isolated"][0], 0)
    study = None
    if config.coverage:
        truth, design = fits["isolated"].arms["CKDA"].theta, table.arm("CKDA")
        how: dict[str, Any] = {"datasets": config.coverage, "replicates": config.replicates, "seed": effort.seed}
        study = resume.part("coverage", lambda: coverage(truth, design, **how, tick=tick))
    treatments = {}
    for name, one in fits.items():
        rows = entries(one, name, effort.level)
        spread = rounding_spread(one) if name in ("isolated", "pinned") else None
        treatments[name] = Treatment(describe(one, effort.level), rows, checks(rows), spread)
    rows = entries(rounded, "isolated", effort.level)
    printed, timing = Treatment({}, rows, checks(rows)), _time_starts(table, effort)
    resume.finish()
    spent = time.perf_counter() - began
    numbers = effort.level, effort.seed, effort.restarts
    return Comparison(*numbers, treatments, printed, study, timing, spent, environment("cpu"))


def _time_starts(table: Table, effort: Effort) -> dict[str, Any]:
    """Seconds that one arm's fit takes from all its starts, without the bootstrap."""
    began = time.perf_counter()
    fit(table.arm("CKDA"), hold_out=(HELD_OUT,), starts=effort.starts, seed=effort.seed)
    return {"arm": "CKDA", "starts": effort.starts, "seconds": time.perf_counter() - began}


def text(result: Comparison) -> str:
    """Everything as tables."""
    parts = [
        report.comparison_text(f"{name} ({TREATMENTS[name][1]}; held out: {HELD_OUT})", one.beside_paper, one.checks)
        for name, one in result.treatments.items()
    ]
    if result.coverage is not None:
        parts.append(report.coverage_text(result.coverage))
    timing = result.timing
    parts.append(f"{timing['starts']} starts of one arm: {timing['seconds']:.2f} s; everything: {result.seconds:.0f} s")
    return "\n\n\n".join(parts)


def run_command(args: argparse.Namespace) -> int:
    """Fit, compare, write, draw, tell."""
    config: Config = filled(Config, args, effort=effort_of(args))
    if args.smoke:
        config = replace(config, coverage=min(config.coverage, 3), replicates=20)
    make_folder(args.out)
    table, replicates = paper_table(), config.effort.bootstrap
    total = sum(ticks(table, settings, replicates) for settings, _, _ in TREATMENTS.values())
    with progress("compare", total + len(table.arms) + config.coverage) as tick:
        result = run(config, tick)
    out, record = Path(args.out), result.as_json()
    written = [write_record(out / "compare.json", record)]
    written.append(figures.save(out / "compare.png", figures.beside_paper(result)))
    return tell(args, record, text(result), written)
