"""``ckda track``: one-layer models read words of group elements and say the product after every letter."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckda.command import (
    add_common_arguments,
    add_run_arguments,
    make_folder,
    pick_device,
    pick_names,
    positive,
    seconds,
)
from ckda.experiments.common.show import markdown_table, print_table, source_line
from ckda.experiments.regular import report as suite_report
from ckda.experiments.regular import run as suite
from ckda.experiments.tracking.figures import groups_figure, published
from ckda.experiments.tracking.lottery import lottery
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.run import TrackConfig, TrackResult, collect, run
from ckda.layers.complex_kda import RANGES
from ckda.layers.mixers import MIXERS
from ckda.page import Page, svg_of
from ckda.record import write_json, write_text
from ckda.train.loop import span_words
from ckda.train.recipe import steps_word

__all__ = ["add_arguments", "markdown", "print_result", "run_command", "table", "write_report"]

_OUT = "runs/track"
_STOPPED = 3  # exit status at the time limit
_LONG, _DAY = 600, 86_400  # seconds from which a training says that it is long, and from which it asks
#: options that change the recipe: they become part of its name, and so of the run's
_CHANGES: dict[str, Callable[[Any], str]] = {
    "steps": steps_word,
    "batch": steps_word,
    "momentum": str,
    "lr_muon": str,
    "lr_adamw": str,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckda track``."""
    add_common_arguments(parser, _OUT)
    add_run_arguments(parser)
    parser.add_argument(
        "group",
        nargs="*",
        help="Z5, D4, S3, A5, Q8, S3xZ2, parity, shell3 (cups), a JSON file with a table; S4:generators for words over few "
        "letters (default: S3)",
    )
    parser.add_argument(
        "--mixer", help=f"one, several with commas, 'ranges' or 'all' (default: ckda): {', '.join(MIXERS)}"
    )
    how = parser.add_argument_group("how it is trained: a recipe, and short forms of changes to it")
    how.add_argument(
        "--recipe", default="paper", help="how it is trained: one or several with commas; --recipes explains them"
    )
    how.add_argument("--recipes", action="store_true", help="explain every recipe and change, train nothing")
    parser.add_argument(
        "--seeds", type=positive, help="how many seeds, from --seed on (default: 3; with --from those of the file)"
    )
    how.add_argument("--steps", type=positive, help="updates: short for +steps=N in the recipe's name")
    how.add_argument("--batch", type=positive, help="words an update: short for +batch=N")
    how.add_argument("--momentum", help="Muon's momentum, a number or 'cycled': short for +momentum=...")
    how.add_argument("--lr-muon", help="Muon's peak learning rate: short for +lr-muon=...")
    how.add_argument("--lr-adamw", help="AdamW's peak learning rate: short for +lr-adamw=...")
    how.add_argument("--from", dest="begin", metavar="RUN", help="begin from the weights in a file runs/NAME.pt")
    parser.add_argument(
        "--suite",
        choices=("regular",),
        help="instead of groups: parity, even pairs, cycle navigation, modular arithmetic, S5, traces, recall; --mixer names arms "
        "(default out: runs/regular, five seeds)",
    )
    test = parser.add_argument_group("what is tested")
    test.add_argument("--lengths", help="what is tested, with commas (default: 8 ... 512, on a GPU to 65536)")
    parser.add_argument(
        "--words", type=positive, default=256, help="words a test (default: %(default)s; 32 beyond 512)"
    )
    parser.add_argument("--together", type=positive, help="runs trained side by side (default: 1, on a GPU 8)")
    parser.add_argument(
        "--by-token",
        action="store_true",
        help="on a GPU: project every token by itself, not each symbol once (two to three times slower)",
    )
    parser.add_argument(
        "--yes", action="store_true", help="go on even if it takes more than a day and no terminal is there"
    )
    parser.add_argument("--time-limit", type=seconds, metavar="SECONDS", help="then stop with a checkpoint, status 3")


def run_command(args: argparse.Namespace) -> int:
    """Train what is missing, evaluate, draw; returns the exit status."""
    if args.recipes:
        for name, text in RECIPES.listing():
            print(f"{name:28s} {text}")
        return 0
    if args.suite:
        return _run_suite(args)
    try:
        if args.collect:
            result = collect(args.collect, args.group, args.trained_at)
            out = make_folder(args.out)
            for name, one in result.runs.items():
                write_json(out / "runs" / f"{name}.json", one.to_json())
        else:
            config = _config(args)
            out = make_folder(args.out)
            result = run(config, quiet=args.json, advise=_adviser(config, args.yes))
    except ValueError as error:
        raise SystemExit(f"ckda track: {error}") from error
    write_report(result, out)
    if args.json:
        print((out / "track.json").read_text(), end="")
    else:
        print_result(result, out)
    return _STOPPED if result.absent else 0


def _run_suite(args: argparse.Namespace) -> int:
    """``--suite regular``: groups are tasks, mixers are arms."""
    arms = tuple(pick_names(args.mixer, tuple(suite.ARMS), {}, "--mixer")) if args.mixer is not None else ()
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
    try:
        result = suite.collect(args.collect, args.trained_at) if args.collect else suite.run(config, quiet=args.json)
    except ValueError as error:
        raise SystemExit(f"ckda track: {error}") from error
    make_folder(str(out))
    for name, one in result.runs.items() if args.collect else ():
        write_json(out / "runs" / f"{name}.json", asdict(one))
    suite_report.write_report(result, out)
    if args.json:
        print((out / "suite.json").read_text(), end="")
    else:
        suite_report.print_result(result, out)
    return _STOPPED if result.absent else 0


def _adviser(config: TrackConfig, yes: bool) -> Callable[[float], None]:
    """What to say, or whether to stop, once it is known how long the training takes."""
    shorter = RECIPES.read("quick").recipe()
    asked = RECIPES.read(config.recipes[0]).recipe()
    share = shorter.batch * shorter.work(0) / (asked.batch * asked.work(0))

    def advise(seconds: float) -> None:
        if config.smoke or seconds < _LONG:
            return
        on = "no GPU: " if pick_device(config.device) == "cpu" else ""
        hint = f"; `--recipe quick` takes about {span_words(seconds * share)}" if share < 0.5 else ""
        print(f"{on}this takes about {span_words(seconds)} here{hint}", file=sys.stderr)
        if seconds > _DAY and not yes and not sys.stderr.isatty():
            raise SystemExit(f"stopped: that is more than a day, and nobody watches. --yes goes on{hint}")

    return advise


def _config(args: argparse.Namespace) -> TrackConfig:
    sets = {"all": tuple(MIXERS), "ranges": tuple(RANGES)}
    return TrackConfig(
        groups=tuple(args.group or ["S3"]),
        mixers=tuple(pick_names("ckda" if args.mixer is None else args.mixer, tuple(MIXERS), sets, "--mixer")),
        recipes=tuple(_recipes(args)),
        first_seed=args.seed,
        num_seeds=args.seeds,
        lengths=_lengths(args.lengths),
        words=args.words,
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
    for text in args.recipe.split(","):
        try:
            names.append(RECIPES.name("+".join([text, *more])))
        except ValueError as error:
            raise SystemExit(f"--recipe {error}") from error
    return list(dict.fromkeys(names))


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        lengths = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError as error:
        raise SystemExit(f"--lengths {text}: it must be whole numbers with commas") from error
    if lengths[0] < 1:
        raise SystemExit(f"--lengths {text}: a length is at least 1")
    return lengths


# What is left beside the records, and what is printed ------------------------------------------------------------------


def write_report(result: TrackResult, out: Path, page: bool = True) -> None:
    """track.json, and where there are runs the figure, the table, the statistics of the seeds, and the page if asked for."""
    write_json(out / "track.json", result.to_json())
    if result.runs:
        groups_figure(result).savefig(out / "track.png", dpi=160, metadata={"Software": None})
        write_text(out / "table.md", markdown(result))
        if page:
            _page(result).write(out / "report.html")
        tested = {name: one for name, one in result.runs.items() if {32, 128, 512} <= set(one.scores)}
        chances = {name: lottery(one, published(one)) for name, one in tested.items()}
        write_json(out / "seeds.json", {"what": "ckda.experiments.tracking.lottery", "runs": chances})


def _columns(result: TrackResult) -> list[int]:
    lengths = {n for run in result.runs.values() for n in run.scores}
    wanted = [n for n in sorted(lengths) if n in (32, 128, 512, 4096, 65_536)]
    return wanted or sorted(lengths)


def middle_length(result: TrackResult) -> int:
    """The longest length up to 512 that the table has: where all seeds are listed."""
    return max((n for n in _columns(result) if n <= 512), default=0)


def table(result: TrackResult) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the best seed's scores beside the published ones, and the other seeds at the longest length."""
    lengths = _columns(result)
    rows = []
    for one in result.runs.values():
        name = f"{one.group} {one.mixer}" + ("" if one.recipe_now == "paper" else f" {one.recipe_now}")
        known = published(one)
        middle = [n for n in lengths if n in one.scores and n <= 512]
        spread = " ".join(f"{v:.2f}" for v in one.scores[middle[-1]]) if middle else ""
        values = [f"{one.at(n):.3f}" if n in one.scores else "-" for n in lengths]
        rows.append([name, *values, spread, " ".join(f"{v:g}" for v in known) if known else ""])
    return ["run", *map(str, lengths), f"all seeds at {middle_length(result)}", "published at 32, 128, 512"], rows


def markdown(result: TrackResult) -> str:
    """:func:`table` for a document."""
    return markdown_table(*table(result))


def print_result(result: TrackResult, out: Path) -> None:
    """The table on the terminal, what is absent, and where everything lies."""
    if result.runs:
        strong = [i for i, run in enumerate(result.runs.values()) if run.mixer == "ckda"]
        print_table("scaled accuracy by word length, best seed (chance is 0)", *table(result), strong)
    for name, why in result.absent.items():
        print(f"{name}: {why}")
    print(f"{result.seconds:.0f} s. Figure, table and numbers: {out}")


def _page(result: TrackResult) -> Page:
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
        "diamonds: the paper's numbers, best of three seeds.",
    )
    page.table(*table(result))
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
