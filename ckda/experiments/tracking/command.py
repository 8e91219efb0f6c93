"""``ckda track``: one-layer models read words of group elements and say the product after every letter."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckda.command import entries, make_folder, pick_device, pick_names, pick_whole, refuse_unread
from ckda.experiments.common.store import keep_report
from ckda.experiments.regular import report as suite_report
from ckda.experiments.regular import run as suite
from ckda.experiments.tracking.figures import groups_figure, published
from ckda.experiments.tracking.lottery import lottery
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.run import TrackConfig, TrackResult, collect, run
from ckda.experiments.tracking.task import task_named
from ckda.layers.complex_kda import RANGES
from ckda.layers.mixers import MIXERS
from ckda.page import Page, markdown_table, print_table, source_line, svg_of
from ckda.record import write_json, write_text
from ckda.train.loop import lengthy, span_words
from ckda.train.recipe import steps_word

__all__ = ["markdown", "print_result", "run_command", "table", "write_report"]

Lengths = tuple[int, ...] | None  # those of --lengths; None: what the table shows by itself
_OUT = "runs/track"  # where nobody says otherwise
_STOPPED = 3  # exit status at the time limit
_DAY = 86_400  # seconds from which a training asks
#: options that change the recipe: they become part of its name, and so of the run's
_CHANGES: dict[str, Callable[[Any], str]] = {
    "steps": steps_word,
    "batch": steps_word,
    "momentum": str,
    "lr_muon": str,
    "lr_adamw": str,
}


def run_command(args: argparse.Namespace) -> int:
    """Train what is missing, evaluate, draw; returns the exit status."""
    if args.recipes:
        print(entries(RECIPES.listing()))
        return 0
    if args.suite:
        return _run_suite(args)
    if args.collect:
        result = collect(args.collect, args.group, args.trained_at)
        out = make_folder(args.out)
        for name, one in result.runs.items():
            write_json(out / "runs" / f"{name}.json", one.to_json())
        lengths = None
    else:
        config = _config(args)
        out, lengths = make_folder(args.out), config.lengths
        result = run(config, quiet=args.json, advise=_adviser(args, _quick_hint(config)))
    write_report(result, out, lengths=lengths)
    if args.json:
        print((out / "track.json").read_text(), end="")
    else:
        print_result(result, out, lengths)
    return _STOPPED if result.absent else 0


def _run_suite(args: argparse.Namespace) -> int:
    """``--suite regular``: groups are tasks, mixers are arms."""
    _refuse_unread(args)
    known = tuple(suite.ARMS)
    arms = tuple(pick_names(args.mixer, known, {}, "--suite regular --mixer")) if args.mixer is not None else ()
    tasks = tuple(pick_names(",".join(args.group) or "all", tuple(suite.TASKS), {"all": tuple(suite.TASKS)}, "task"))
    out = Path("runs/regular" if args.out == _OUT else args.out)
    sizes = {"steps": args.steps, "batch": args.batch, "first_seed": args.seed, "num_seeds": args.seeds or 5}
    config = suite.SuiteConfig(
        tasks,
        arms,
        **sizes,
        together=args.together,
        smoke=args.smoke,
        device=args.device,
        out=out,
        fresh=args.fresh,
        time_limit=args.time_limit,
    )
    make_folder(str(out))
    advise = _adviser(args, _one_run_hint(config))
    result = suite.collect(args.collect, args.trained_at) if args.collect else suite.run(config, args.json, advise)
    for name, one in result.runs.items() if args.collect else ():
        write_json(out / "runs" / f"{name}.json", asdict(one))
    suite_report.write_report(result, out)
    if args.json:
        print((out / "suite.json").read_text(), end="")
    else:
        suite_report.print_result(result, out)
    return _STOPPED if result.absent else 0


#: what a suite reads: always, where it trains, where it trains all of its updates, where it brings runs together
_SUITE_READS = ("suite", "out", "json")
_SUITE_TRAINS = ("group", "mixer", "seed", "seeds", "device", "together", "smoke", "fresh", "yes", "time_limit")
_SUITE_SIZES = ("steps", "batch")
_SUITE_COLLECTS = ("collect", "trained_at")


def _refuse_unread(args: argparse.Namespace) -> None:
    """Refuse the options of groups that have no effect on a suite."""
    if args.collect:
        refuse_unread(args, _SUITE_READS + _SUITE_COLLECTS, "--suite regular --collect")
    elif args.smoke:
        refuse_unread(args, _SUITE_READS + _SUITE_TRAINS, "--suite regular --smoke")
    else:
        refuse_unread(args, _SUITE_READS + _SUITE_TRAINS + _SUITE_SIZES + ("collect",), "--suite regular")


def _adviser(args: argparse.Namespace, hint: Callable[[float], str]) -> Callable[[float], None]:
    """What to say, or whether to stop, once it is known how long all trainings take; `hint(seconds)` says what is shorter."""

    def advise(seconds: float) -> None:
        line = lengthy(seconds, pick_device(args.device), hint(seconds))
        if args.smoke or line is None:
            return
        if seconds > _DAY and not args.yes and not sys.stderr.isatty():
            raise ValueError(f"{line}. Stopped, for that is more than a day and nobody watches: --yes goes on")
        print(f"{line}. It goes on; Ctrl-C leaves a checkpoint", file=sys.stderr)

    return advise


def _quick_hint(config: TrackConfig) -> Callable[[float], str]:
    """How long the recipe `quick` would take, where it is much shorter."""
    shorter, asked = RECIPES.read("quick").recipe(), RECIPES.read(config.recipes[0]).recipe()
    share = shorter.batch * shorter.work(0) / (asked.batch * asked.work(0))

    def hint(seconds: float) -> str:
        return f"; `--recipe quick` takes about {span_words(seconds * share)}" if share < 0.5 else ""

    return hint


def _one_run_hint(config: suite.SuiteConfig) -> Callable[[float], str]:
    """How long one arm of one task takes, where there are several."""
    num = len(suite.pairs(config))

    def hint(seconds: float) -> str:
        one = "parity --suite regular --mixer ckda"
        return f"; one task and arm, as `{one}`, takes about {span_words(seconds / num)}" if num > 1 else ""

    return hint


def _config(args: argparse.Namespace) -> TrackConfig:
    sets = {"all": tuple(MIXERS), "ranges": tuple(RANGES)}
    return TrackConfig(
        groups=_groups(args.group or ["S3"]),
        mixers=tuple(pick_names("ckda" if args.mixer is None else args.mixer, tuple(MIXERS), sets, "--mixer")),
        recipes=tuple(_recipes(args)),
        first_seed=args.seed,
        num_seeds=args.seeds,
        lengths=None if args.lengths is None else pick_whole(args.lengths, "--lengths"),
        words=TrackConfig.words if args.words is None else args.words,
        begin=args.begin,
        together=args.together,
        by_symbol=not args.by_token,
        smoke=args.smoke,
        device=args.device,
        out=Path(args.out),
        fresh=args.fresh,
        time_limit=args.time_limit,
    )


def _recipes(args: argparse.Namespace) -> list[str]:
    """The recipes by their names of today, with what the other options change."""
    more = [
        f"{key.replace('_', '-')}={spell(value)}"
        for key, spell in _CHANGES.items()
        if (value := getattr(args, key)) is not None
    ]
    names = []
    for text in ("paper" if args.recipe is None else args.recipe).split(","):
        try:
            names.append(RECIPES.name("+".join([text, *more])))
        except ValueError as error:
            raise ValueError(f"--recipe {error}") from error
    return list(dict.fromkeys(names))


def _groups(names: Sequence[str]) -> tuple[str, ...]:
    """The groups by name or file; one that is not there is named alone, before anything else is looked at."""
    for name in names:
        task_named(name)
    return tuple(names)


# What is left beside the records, and what is printed ------------------------------------------------------------------


def write_report(result: TrackResult, out: Path, page: bool = True, lengths: Lengths = None) -> None:
    """track.json, and where there are runs the figure, the table, the statistics of the seeds, and the page if asked for."""
    keep_report(out, "track.json", set(result.runs), ("seeds.json", "table.md", "track.png", "report.html"))
    write_json(out / "track.json", result.to_json())
    if result.runs:
        groups_figure(result).savefig(out / "track.png", dpi=160, metadata={"Software": None})
        write_text(out / "table.md", markdown(result, lengths))
        if page:
            _page(result, lengths).write(out / "report.html")
        tested = {name: one for name, one in result.runs.items() if {32, 128, 512} <= set(one.scores)}
        chances = {name: lottery(one, published(one)) for name, one in tested.items()}
        write_json(out / "seeds.json", {"what": "ckda.experiments.tracking.lottery", "runs": chances})


def _columns(result: TrackResult, asked: Lengths = None) -> list[int]:
    """The lengths that were asked for by name; else those of the paper and the long ones; else all."""
    if asked is not None:
        return list(asked)
    lengths = {n for run in result.runs.values() for n in run.scores}
    wanted = [n for n in sorted(lengths) if n in (32, 128, 512, 4096, 65_536)]
    return wanted or sorted(lengths)


def middle_length(result: TrackResult, asked: Lengths = None) -> int:
    """The longest length up to 512 that the table has: where all seeds are listed."""
    return max((n for n in _columns(result, asked) if n <= 512), default=0)


def table(result: TrackResult, asked: Lengths = None) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the best seed's scores beside the published ones, and the other seeds at the longest length up to 512."""
    lengths = _columns(result, asked)
    rows = []
    for one in result.runs.values():
        name = f"{one.group} {one.mixer}" + ("" if one.recipe_now == "paper" else f" {one.recipe_now}")
        known = published(one)
        middle = [n for n in lengths if n in one.scores and n <= 512]
        spread = " ".join(f"{v:.2f}" for v in one.scores[middle[-1]]) if middle else ""
        values = [f"{one.at(n):.3f}" if n in one.scores else "-" for n in lengths]
        rows.append([name, *values, spread, " ".join(f"{v:g}" for v in known) if known else ""])
    head = ["run", *map(str, lengths), f"all seeds at {middle_length(result, asked)}", "published at 32, 128, 512"]
    beside = any(row[-1] for row in rows)
    return (head, rows) if beside else (head[:-1], [row[:-1] for row in rows])


def markdown(result: TrackResult, asked: Lengths = None) -> str:
    """:func:`table` for a document."""
    return markdown_table(*table(result, asked))


def print_result(result: TrackResult, out: Path, asked: Lengths = None) -> None:
    """The table on the terminal, what is absent, and where everything lies."""
    if result.runs:
        strong = [i for i, run in enumerate(result.runs.values()) if run.mixer == "ckda"]
        print_table("scaled accuracy by word length, best seed (chance is 0)", *table(result, asked), strong)
    for name, why in result.absent.items():
        print(f"{name}: {why}")
    print(f"{result.seconds:.0f} s. Figure, table and numbers: {out}")


def _page(result: TrackResult, asked: Lengths = None) -> Page:
    page = Page(
        "Words of groups",
        "One-layer models read group elements one by one and say the product of all so far. Training saw words up to the "
        "dashed line; beyond it only a state that moves like the group itself stays right.",
    )
    page.section("How far each keeps tracking")
    groups = list(dict.fromkeys(run.group for run in result.runs.values()))
    parts = [{name: run for name, run in result.runs.items() if run.group == group} for group in groups]
    for runs in parts[:-1]:
        page.figure(svg_of(groups_figure(replace(result, runs=runs))), "")
    page.figure(
        svg_of(groups_figure(replace(result, runs=parts[-1]))),
        "Scaled accuracy over the last quarter of words of each length; 0 is chance. Thick: the best seed, thin: the others; "
        "diamonds: the paper's numbers, the best of three seeds at each length.",
    )
    page.table(*table(result, asked))
    page.section("How they were trained")
    page.table(
        ["run", "what", "parameters", "updates", "words", "lengths", "seeds", "seconds", "side by side"],
        [
            [
                name,
                one.about,
                f"{one.parameters:,}",
                one.recipe["steps"],
                one.recipe["batch"],
                " ".join(map(str, one.recipe["curriculum"])),
                len(one.seeds),
                one.train_seconds,
                one.trained_together,
            ]
            for name, one in result.runs.items()
        ],
    )
    page.footer(source_line(result.environment) + " The numbers are in track.json.")
    return page
