"""``ckda scaling fit | predict | compare``: scaling laws from the paper's table or from your own runs."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckda.command import add_common_arguments
from ckda.record import environment, write_json

from . import figures, report
from .fit import BLOCK, LEVEL, Fit, Settings, fit, split
from .law import FORMS
from .published import HELD_OUT, paper_table
from .reproduce import TREATMENTS, checks, coverage, entries, rounding_spread
from .store import Resume, describe, load_fit, resumable_fit, save_replicates
from .table import Table, parse_cell, parse_number, read_table

__all__ = ["add_arguments", "run_command"]

_OUT = "runs/scaling"
_SMOKE_STARTS, _SMOKE_REPLICATES, _SMOKE_DATASETS = 40, 20, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-verbs and their options."""
    actions = parser.add_subparsers(dest="action", metavar="{fit,predict,compare}", required=True)
    one = actions.add_parser("fit", help="fit the law to the paper's table or to your runs")
    add_common_arguments(one, _OUT)
    one.add_argument(
        "--data", nargs="+", metavar="FILE", help="runs as .csv, .json or .jsonl (default: the paper's table)"
    )
    one.add_argument("--arms", nargs="+", metavar="NAME", help="only these groups")
    one.add_argument("--form", default="skaling", choices=list(FORMS))
    one.add_argument("--E", default="free", help="free, shared, or a number to pin it to (default: %(default)s)")
    one.add_argument(
        "--offset",
        choices=["none", "arm", "shared"],
        help="chained-cell offset (default: arm, none without such cells)",
    )
    one.add_argument(
        "--hold-out", nargs="*", metavar="CELL", help=f"such as {HELD_OUT} (default for the paper's table; else none)"
    )
    one.add_argument("--huber", type=float, default=0.01, metavar="NATS", help="Huber scale (default: %(default)s)")
    one.add_argument("--baseline", metavar="NAME", help="the arm advantages are measured against (default: the first)")
    _add_effort(one)
    two = actions.add_parser("predict", help="losses and compute-optimal splits with intervals, from a fit")
    add_common_arguments(two, _OUT)
    two.add_argument("cells", nargs="*", metavar="SIZE/TOKENS", help="such as 7B/1T")
    two.add_argument(
        "--compute", nargs="+", default=[], metavar="FLOPS", help="budgets to split optimally, such as 1e22"
    )
    two.add_argument("--fit", metavar="FILE", help="a fit's JSON (default: fit.json under --out)")
    two.add_argument("--chained", action="store_true", help="predict runs cooled down from a shared trunk")
    two.add_argument("--level", type=float, default=LEVEL, help="of the intervals (default: %(default)s)")
    three = actions.add_parser("compare", help="the paper's three fits again, beside what it prints")
    add_common_arguments(three, _OUT)
    three.add_argument(
        "--coverage", type=int, default=300, metavar="TABLES", help="synthetic tables of the coverage study; 0: none"
    )
    _add_effort(three)


def _add_effort(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=600, help="random starts per arm (default: %(default)s)")
    parser.add_argument(
        "--bootstrap", type=int, default=1000, metavar="B", help="replicates per arm; 0: none (default: %(default)s)"
    )
    parser.add_argument("--restarts", type=int, default=4, help="random restarts per replicate (default: %(default)s)")
    parser.add_argument("--level", type=float, default=LEVEL, help="of the intervals (default: %(default)s)")


def run_command(args: argparse.Namespace) -> int:
    """Dispatch; what the user got wrong is one line on standard error and status 2."""
    try:
        _check(args)
        result = {"fit": _fit, "predict": _predict, "compare": _compare}[args.action](args)
    except (ValueError, OSError) as error:
        print(f"ckda scaling {args.action}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.device not in ("auto", "cpu"):
        raise ValueError(f"--device {args.device}: scaling fits run on the CPU; give cpu or auto")
    if not 0 < args.level < 1:
        raise ValueError(f"--level {args.level}: it must lie between 0 and 1")
    for name in ("bootstrap", "restarts", "coverage"):
        if getattr(args, name, 0) < 0:
            raise ValueError(f"--{name} {getattr(args, name)}: it must not be negative")
    if getattr(args, "bootstrap", 0) == 1:
        raise ValueError("--bootstrap 1: an interval needs at least two replicates; 0 turns it off")
    if args.smoke and args.action != "predict":
        args.starts, args.bootstrap = min(args.starts, _SMOKE_STARTS), min(args.bootstrap, _SMOKE_REPLICATES)
        args.coverage = min(getattr(args, "coverage", 0), _SMOKE_DATASETS)


def _fit(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    table, settings, source = _inputs(args)
    baseline = args.baseline or table.arms[0]
    table.arm(baseline), split(table, settings)  # what is wrong with the input fails before the fit, not during it
    out = Path(args.out)
    resume = Resume(out / "fit.partial.json", [asdict(settings), args.bootstrap, args.restarts, _fingerprint(table)])
    with _progress("fit", _ticks(table, args.bootstrap, bool(settings.roles.shared))) as tick:
        fitted = resumable_fit(table, settings, args.bootstrap, args.restarts, resume, tick=tick)
    result = {
        **describe(fitted, args.level),
        "data": source,
        "baseline": baseline,
        "restarts": args.restarts,
        "seed": args.seed,
    }
    result |= {"seconds": time.perf_counter() - began, "environment": environment("cpu")}
    written = [save_replicates(out / "fit_replicates.csv", fitted), write_json(out / "fit.json", result)]
    written += _draw(out, result, baseline)
    resume.finish()
    _say(args, report.fit_text(result), written)
    return result


def _inputs(args: argparse.Namespace) -> tuple[Table, Settings, str]:
    """The table, the settings and a word on where the table comes from."""
    table = read_table(args.data) if args.data else paper_table()
    if args.arms:
        table = table.arm(*args.arms)
    hold_out = args.hold_out if args.hold_out is not None else [] if args.data else [HELD_OUT]
    settings = Settings(
        form=args.form, E=_irreducible(args.E), offset=args.offset or ("arm" if table.chained.any() else "none"),
        hold_out=tuple(hold_out), delta=args.huber, starts=args.starts, seed=args.seed,
    )  # fmt: skip
    return table, settings, ", ".join(args.data) if args.data else "tab:scaling-data"


def _irreducible(text: str) -> str | float:
    if text in ("free", "shared"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--E {text}: it may be free, shared or a number") from None


def _predict(args: argparse.Namespace) -> dict[str, Any]:
    if not args.cells and not args.compute:
        raise ValueError("nothing to predict: give cells such as 7B/1T, or --compute 1e22")
    cells = [(text, parse_cell(text)) for text in args.cells]
    budgets = [parse_number(text) for text in args.compute]
    out = Path(args.out)
    path = Path(args.fit) if args.fit else out / "fit.json"
    fitted = _smoke_fit(args.seed) if args.smoke and not path.exists() else load_fit(path)
    result = {
        "kind": "ckda scaling prediction",
        "fit": "smoke fit of tab:scaling-data" if args.smoke and not path.exists() else str(path),
        "level": args.level,
        "chained": args.chained,
        "cells": [
            {
                "cell": text,
                "N": N,
                "D": D,
                "loss": {a: asdict(s) for a, s in fitted.predict(N, D, args.chained, args.level).items()},
            }
            for text, (N, D) in cells
        ],
        "compute": [{"C": C, "optimal": _optimal(fitted, C, args.level)} for C in budgets],
        "environment": environment("cpu"),
    }
    written = [write_json(out / "predict.json", result), figures.save(out / "predict.png", figures.predictions(result))]
    _say(args, report.prediction_text(result), written)
    return result


def _optimal(fitted: Fit, C: float, level: float) -> dict[str, Any]:
    return {name: {q: asdict(s) for q, s in arm.frontier(C, level).items()} for name, arm in fitted.arms.items()}


def _smoke_fit(seed: int) -> Fit:
    return fit(paper_table(), Settings(hold_out=(HELD_OUT,), starts=_SMOKE_STARTS, seed=seed))


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    out, table = Path(args.out), paper_table()
    key = [args.starts, args.bootstrap, args.restarts, args.seed, args.coverage, args.smoke, _fingerprint(table)]
    resume = Resume(out / "compare.partial.json", key)
    ticks = sum(_ticks(table, args.bootstrap, bool(s.roles.shared)) for s, _, _ in TREATMENTS.values())
    with _progress("compare", ticks + len(table.arms) + args.coverage) as tick:
        fits = {
            name: resumable_fit(table, _effort(settings, args), args.bootstrap, args.restarts, resume, name, tick)
            for name, (settings, _, _) in TREATMENTS.items()
        }
        isolated = _effort(TREATMENTS["isolated"][0], args)
        rounded = resumable_fit(paper_table(printed_sizes=True), isolated, 0, 0, resume, "rounded", tick)
        spreads = {name: rounding_spread(fits[name]) for name in ("isolated", "pinned")}
        study = _coverage_study(args, fits["isolated"], table, resume, tick)
        timing = _time_starts(table, args)
    result = {
        "kind": "ckda scaling comparison",
        "level": args.level,
        "seed": args.seed,
        "restarts": args.restarts,
        "treatments": {
            name: {**describe(f, args.level), **_beside(f, name, args.level), "rounding_half_width": spreads.get(name)}
            for name, f in fits.items()
        },
        "isolated_with_printed_sizes": _beside(rounded, "isolated", args.level),
        "coverage": study,
        "timing": timing,
        "seconds": time.perf_counter() - began,
        "environment": environment("cpu"),
    }
    picture = figures.beside_paper(result)
    written = [write_json(out / "compare.json", result), figures.save(out / "compare.png", picture)]
    resume.finish()
    _say(args, _compare_text(result), written)
    return result


def _effort(settings: Settings, args: argparse.Namespace) -> Settings:
    return replace(settings, starts=args.starts, seed=args.seed)


def _beside(fitted: Fit, treatment: str, level: float) -> dict[str, Any]:
    rows = entries(fitted, treatment, level)
    return {"beside_paper": rows, "checks": checks(rows)}


def _compare_text(result: dict[str, Any]) -> str:
    titles = {name: f"{name} ({label}; held out: {HELD_OUT})" for name, (_, label, _) in TREATMENTS.items()}
    parts = [
        report.comparison_text(titles[name], t["beside_paper"], t["checks"]) for name, t in result["treatments"].items()
    ]
    timing = result["timing"]
    clock = f"{timing['starts']} starts of one arm: {timing['seconds']:.2f} s; everything: {result['seconds']:.0f} s"
    return "\n\n\n".join([*parts, *_coverage_text(result["coverage"]), clock])


def _coverage_study(
    args: argparse.Namespace, fitted: Fit, table: Table, resume: Resume, tick: Callable[[], None]
) -> Any:
    if not args.coverage:
        return None
    truth = fitted.arms["CKDA"].theta
    replicates = 300 if not args.smoke else _SMOKE_REPLICATES
    return resume.part(
        "coverage",
        lambda: coverage(
            truth, table.arm("CKDA"), datasets=args.coverage, replicates=replicates, seed=args.seed, tick=tick
        ),
    )


def _time_starts(table: Table, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that one arm's fit takes from all its starts, without the bootstrap."""
    began = time.perf_counter()
    fit(table.arm("CKDA"), hold_out=(HELD_OUT,), starts=args.starts, seed=args.seed)
    return {"arm": "CKDA", "starts": args.starts, "seconds": time.perf_counter() - began}


def _coverage_text(study: Any) -> list[str]:
    if study is None:
        return []
    names = list(next(iter(study["inside"].values())))
    rows = [[f"{float(level):.0%}", *(f"{row[n]:.3f}" for n in names)] for level, row in study["inside"].items()]
    title = f"coverage of the intervals: {study['datasets']} synthetic tables with noise {study['noise']}"
    return [f"{title}\n\n{report.grid(['nominal', *names], rows)}"]


def _draw(out: Path, result: dict[str, Any], baseline: str) -> list[Path]:
    """The three figures; without a second arm there is no advantage to draw."""
    pictures = {"frontier": figures.frontier(result), "residuals": figures.residuals(result)}
    if len(result["arms"]) > 1:
        pictures["advantage"] = figures.advantage(result, baseline)
    return [figures.save(out / f"fit_{name}.png", picture) for name, picture in pictures.items()]


def _ticks(table: Table, replicates: int, together: bool) -> int:
    blocks = -(-replicates // BLOCK)
    return len(table.arms) + blocks * (1 if together else len(table.arms))


def _fingerprint(table: Table) -> list[Any]:
    return [table.N.tolist(), table.D.tolist(), table.loss.tolist(), table.group, table.chained.tolist(), table.cell]


def _say(args: argparse.Namespace, text: str, written: list[Path]) -> None:
    if not args.json:
        print(text)
    print("\nwritten: " + ", ".join(map(str, written)), file=sys.stderr)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, completed=total)
