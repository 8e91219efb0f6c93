"""``ckda scaling fit``: the law fitted to the paper's table or to your runs."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckda.command import filled, make_folder
from ckda.record import environment, set_aside, write_json

from .. import figures, report
from ..fit import Fit, Settings, split
from ..published import BASELINE, HELD_OUT, NOISE, paper_table
from ..store import Resume, describe, resumable_fit, save_replicates
from ..table import Table, read_table
from . import Effort, effort_of, fingerprint, progress, tell, ticks

__all__ = ["Config", "Result", "run", "run_command"]


@dataclass(frozen=True)
class Config:
    """What is fitted to what."""

    out: str
    data: tuple[str, ...] = ()  #: files of runs; none: the paper's table
    arms: tuple[str, ...] = ()  #: only these groups; none: all
    form: str = "skaling"
    E: str = "free"
    offset: str | None = None  #: None: "arm" where cells are chained
    hold_out: tuple[str, ...] | None = None  #: None: the paper's cell of the paper's table
    huber: float = 0.01
    baseline: str | None = None  #: None: the paper's of the paper's table, else the first arm
    noise: float | None = (
        None  #: nats, how far equal runs lie apart; None: the paper's of the paper's table, else not known
    )
    effort: Effort = field(default_factory=Effort)

    def table(self) -> Table:
        """The cells, held-out ones included."""
        table = read_table(self.data) if self.data else paper_table()
        return table.arm(*self.arms) if self.arms else table

    def compared(self, table: Table) -> tuple[str, float | None]:
        """The arm that others are compared with, and the noise of that comparison."""
        of_paper = not self.data
        first = BASELINE if of_paper and BASELINE in table.arms else table.arms[0]
        return self.baseline or first, NOISE if of_paper and self.noise is None else self.noise

    def settings(self, table: Table) -> Settings:
        """What :func:`ckda.scaling.fit` is told."""
        try:
            E = self.E if self.E in ("free", "shared") else float(self.E)
        except ValueError:
            raise ValueError(f"--E {self.E}: it may be free, shared or a number") from None
        hold_out = self.hold_out if self.hold_out is not None else () if self.data else (HELD_OUT,)
        offset: Any = self.offset or ("arm" if table.chained.any() else "none")
        effort = self.effort
        return Settings(self.form, E, offset, hold_out, self.huber, effort.starts, effort.seed)


@dataclass(frozen=True)
class Result:
    """A fit and where it comes from; the file fit.json."""

    fit: Fit
    level: float
    data: str
    baseline: str
    noise: float | None
    restarts: int
    seed: int
    seconds: float
    environment: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The fit's own record and the rest."""
        rest = {name: value for name, value in vars(self).items() if name not in ("fit", "level")}
        return {**describe(self.fit, self.level), **rest}


def run(config: Config, tick: Callable[[], None] = lambda: None) -> Result:
    """Fit and bootstrap; finished arms of an interrupted call are kept. `tick()` is called after every part."""
    began, effort, table = time.perf_counter(), config.effort, config.table()
    settings, (baseline, noise) = config.settings(table), config.compared(table)
    key = [asdict(settings), effort.bootstrap, effort.restarts, fingerprint(table)]
    resume = Resume(Path(config.out) / "fit.partial.json", key)
    fitted = resumable_fit(table, settings, effort.bootstrap, effort.restarts, resume, tick=tick)
    resume.finish()
    source, spent = ", ".join(config.data) or "tab:scaling-data", time.perf_counter() - began
    return Result(
        fitted, effort.level, source, baseline, noise, effort.restarts, effort.seed, spent, environment("cpu")
    )


def draw(result: Result) -> dict[str, Any]:
    """The figures by name; without a second arm there is no advantage to draw."""
    pictures = {"frontier": figures.frontier(result.fit, result.level), "residuals": figures.residuals(result.fit)}
    if len(result.fit.arms) > 1:
        pictures["advantage"] = figures.advantage(result.fit, result.baseline, result.noise)
    return pictures


def run_command(args: argparse.Namespace) -> int:
    """Fit, write, draw, tell."""
    lists = {
        name: None if getattr(args, name) is None else tuple(getattr(args, name))
        for name in ("data", "arms", "hold_out")
    }
    config = filled(Config, args, effort=effort_of(args), **lists)
    table = config.table()
    settings = config.settings(table)
    table.arm(config.compared(table)[0]), split(table, settings)  # what is wrong fails before the fit
    make_folder(args.out)
    with progress("fit", ticks(table, settings, config.effort.bootstrap)) as tick:
        result = run(config, tick)
    out, record = Path(args.out), result.as_json()
    set_aside(out / "fit_replicates.csv", out / "fit.json")
    written = [save_replicates(out / "fit_replicates.csv", result.fit), write_json(out / "fit.json", record)]
    written += [figures.save(out / f"fit_{name}.png", picture) for name, picture in draw(result).items()]
    return tell(args, record, report.fit_text(result.fit, result.level), written)
