"""``ckda lm train``: the options of :func:`ckda.lm.training.run`, and its display."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ckda.command import every, filled, make_folder, pick_device, plural
from ckda.lm.log import NotFinite, Row
from ckda.lm.models import config_of
from ckda.lm.parallel import World, join
from ckda.lm.recipe import Recipe
from ckda.lm.tiny import tiny_tokens, tiny_training
from ckda.lm.train import Options
from ckda.lm.training import Training, TrainResult, recipe_for, run
from ckda.train.loop import lengthy

__all__ = ["RECIPE", "config", "run_command"]

RECIPE = tuple(f.name for f in fields(Recipe) if f.name not in ("steps", "branch", "betas", "eps"))


def config(args: argparse.Namespace, device: str) -> Training:
    """What the options ask for."""
    if args.config is not None:
        return replace(Training.load(args.config), out=args.out)
    if args.data is None:
        raise ValueError("name the folder of tokens with --data (ckda lm prepare makes it)")
    args.model = args.model or args.init_from or "47M:ckda"
    said = {name: getattr(args, name) for name in RECIPE}
    recipe = recipe_for(args.model, device, tokens=args.tokens, steps=args.steps, branch=args.branch, **said)
    if args.tokens is not None:
        tell_excess("--tokens", recipe, args.tokens)
    return filled(Training, args, recipe=recipe, options=filled(Options, args))


def tell_excess(what: str, recipe: Recipe, tokens: int) -> None:
    """A line where one update, the least there is, has more tokens than were asked for."""
    if (taken := recipe.tokens_per_step) > tokens:
        print(
            f"{what}: one update is {recipe.batch} x {recipe.length} = {taken:,} tokens, more than the {tokens:,} asked for; a "
            "smaller --batch or --length takes fewer",
            file=sys.stderr,
        )


def smoke(args: argparse.Namespace, world: World) -> Training:
    """A run of seconds with the same options of how it is run."""
    data, arm = args.data or str(Path(args.out) / "tokens"), (args.model or "").partition(":")[2] or "ckda"
    config_of(f"tiny:{arm}")  # refused before anything is made for it
    if args.data is None and world.main:
        make_folder(args.out)
        tiny_tokens(Path(data))
    world.wait()
    tiny = tiny_training(data, args.out, arm, args.seed)
    return replace(tiny, options=filled(Options, args), backend=args.backend, fresh=args.fresh)


def run_command(args: argparse.Namespace) -> int:
    """Train and tell."""
    world = join(pick_device(args.device))
    quiet = args.json or not world.main
    try:
        training = smoke(args, world) if args.smoke else config(args, world.device.type)
        with progress(training.recipe.steps, quiet) as show:
            watch = _adviser(training, world.device.type, show, every(0, quiet))
            result = run(training, watch, every(0, quiet), world)
    except NotFinite as error:
        if world.main:
            print(f"stopped: {error}", file=sys.stderr)
        return 3
    finally:
        world.leave()
    if result is None:
        return 0
    if args.json:
        print(json.dumps(result.as_json(log=False)))
    else:
        _tell(result, Path(args.out))
    return status(result.stopped)


def _adviser(
    training: Training, device: str, show: Callable[[Row], None], say: Callable[[str], None]
) -> Callable[[Row], None]:
    """`show`, and once it is known how fast the updates are, a line where they take long."""
    told = False

    def watch(row: Row) -> None:
        nonlocal told
        show(row)
        if row.tokens_per_second and not told:
            told = True
            left = (training.recipe.steps - row.step) * training.recipe.tokens_per_step / row.tokens_per_second
            toy = training.model.partition(":")[0] == "tiny"
            hint = "" if toy else "; `--model tiny:ckda` is a toy that takes minutes"
            if (line := lengthy(left, device, hint)) is not None:
                say(line)

    return watch


def status(stopped: str | None) -> int:
    """The exit status: 0 done, 3 stopped early, 130 interrupted."""
    return 0 if stopped is None else 130 if stopped == "SIGINT" else 3


def _tell(result: TrainResult, out: Path) -> None:
    parts = [f"{result.model}: {result.parameters / 1e6:.2f} M parameters, update {result.step}"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4f} (mean of the last {plural(min(10, result.step), 'update')})")
    if result.held_out_loss is not None:
        then = result.validations[-1].step
        parts.append(f"held out {result.held_out_loss:.4f}" + ("" if then == result.step else f" (at update {then})"))
    if result.tokens_per_second:
        parts.append(f"{result.tokens_per_second:,.0f} tokens/s")
    if result.mfu:
        parts.append(f"MFU {100 * result.mfu:.1f}%")
    print(", ".join(parts))
    if result.stopped:
        print(f"stopped by {result.stopped}; the same command goes on from here")
    print(f"in {out}")


@contextmanager
def progress(steps: int, quiet: bool) -> Iterator[Callable[[Row], None]]:
    """A bar with an ETA on a terminal, lines elsewhere, nothing if quiet."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield _lines(steps, quiet)
        return
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]}  held out {task.fields[held]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=steps, loss="-", held="-", speed="")

        def show(row: Row) -> None:
            known: dict[str, Any] = {
                "loss": row.loss and f"{row.loss:.4f}",
                "held": row.held_out_loss and f"{row.held_out_loss:.4f}",
                "speed": row.tokens_per_second and f"{row.tokens_per_second:,.0f} tokens/s",
            }
            bars.update(bar, completed=row.step, **{name: text for name, text in known.items() if text})

        yield show


def _lines(steps: int, quiet: bool) -> Callable[[Row], None]:
    """A line every five seconds, and one a validation."""
    began, now, seldom = time.perf_counter(), every(0, quiet), every(5, quiet)
    first: list[int] = []

    def show(row: Row) -> None:
        first.append(row.step)
        done, say = row.step - first[0], now if row.step == steps or row.held_out_loss is not None else seldom
        parts = [f"update {row.step}/{steps}"]
        if row.loss is not None:
            parts.append(f"loss {row.loss:.4f}")
        if row.held_out_loss is not None:
            parts.append(f"held out {row.held_out_loss:.4f}")
        if row.tokens_per_second:
            parts.append(f"{row.tokens_per_second:,.0f} tokens/s")
        if done:
            parts.append(f"about {(time.perf_counter() - began) / done * (steps - row.step):.0f} s left")
        say("  ".join(parts))

    return show
