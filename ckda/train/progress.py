"""What a training shows while it runs: live bars with an ETA on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from ckda.train.recipe import Recipe

__all__ = ["progress"]

_LINES = 5  # where there is no terminal, as many lines a run


class _Run(Protocol):
    """What is shown: anything with a recipe and a step."""

    recipe: Recipe
    step: int


@contextmanager
def progress(runs: Mapping[str, _Run], quiet: bool = False, title: str = "") -> Iterator[Callable[[str, str], None]]:
    """Show the runs; yields ``show(name, words)``, to be called after some of a run's updates.

    Example:
        >>> class Run:
        ...     recipe, step = Recipe(steps=10), 0
        >>> with progress({"a": Run()}, quiet=True) as show:
        ...     show("a", "loss 1.0")
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda name, words: None
    elif console.is_terminal:
        with _bars(runs, console, title) as show:
            yield show
    else:
        yield _lines(runs)


def _lines(runs: Mapping[str, _Run]) -> Callable[[str, str], None]:
    began = time.perf_counter()
    first = {name: run.step for name, run in runs.items()}
    said = {name: _mark(run) for name, run in runs.items()}

    def say(name: str, words: str) -> None:
        run = runs[name]
        if _mark(run) > said[name]:
            said[name] = _mark(run)
            seconds = time.perf_counter() - began
            left = seconds / max(1, run.step - first[name]) * (run.recipe.steps - run.step)
            print(
                f"{name:24s} update {run.step}/{run.recipe.steps}  {words}  {seconds:.0f} s, {left:.0f} s left",
                file=sys.stderr,
            )

    return say


def _mark(run: _Run) -> int:
    return run.step * _LINES // run.recipe.steps


@contextmanager
def _bars(runs: Mapping[str, _Run], console: object, title: str) -> Iterator[Callable[[str, str], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    width = max(len(name) for name in runs)
    columns = (
        TextColumn("{task.description:<" + str(width) + "}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("length {task.fields[length]:>3}  {task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as display:  # type: ignore[arg-type]
        if title:
            display.console.print(title)
        bars = {
            name: display.add_task(name, total=run.recipe.steps, completed=run.step, length="", words="")
            for name, run in runs.items()
        }

        def show(name: str, words: str) -> None:
            run = runs[name]
            length = run.recipe.length(max(0, run.step - 1))
            display.update(bars[name], completed=run.step, length=length, words=words)

        yield show
