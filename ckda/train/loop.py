"""The loop around a :class:`Program`: resume, look now and then, save now and then, stop in good order."""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from ckda.train.ensemble import Ensemble
from ckda.train.recipe import Recipe

__all__ = [
    "Program",
    "TimeUp",
    "deferred_interrupt",
    "finite",
    "lengthy",
    "loss_words",
    "progress",
    "span_words",
    "train",
]

_SAVE_EVERY = 30.0  # seconds between checkpoints
_ADVISE_AFTER = 4.0  # seconds after which the time left is estimated
_SHOW_EVERY = 1.0  # seconds between two looks of the display at where a run is


class TimeUp(Exception):
    """The time limit was reached; a checkpoint is left."""


def finite(values: list[float]) -> list[float | None]:
    """As JSON takes them: a number that is none is null.

    Example:
        >>> finite([1.0, float("nan")])
        [1.0, None]
    """
    return [v if math.isfinite(v) else None for v in values]


def loss_words(ensemble: Ensemble) -> str:
    """The losses of the last look, for the display."""
    looks = ensemble.history["loss"]
    return "loss " + " ".join("diverged" if v is None else f"{v:.2e}" for v in looks[-1]) if looks else ""


def train(
    runs: Mapping[str, Ensemble],
    checkpoint: Callable[[str], Path],
    *,
    fresh: bool = False,
    quiet: bool = False,
    look_every: int = 25,
    time_limit: float | None = None,
    look: Callable[[Ensemble], None] | None = None,
    advise: Callable[[float], None] | None = None,
    words: Callable[[str], str] | None = None,
    title: str = "",
) -> None:
    """Train all runs to their ends, side by side.

    A run whose checkpoint is there goes on from it, unless `fresh`. Every `look_every` updates its losses are read into
    `history`. Ctrl-C (KeyboardInterrupt) and the time limit in seconds (:class:`TimeUp`) leave checkpoints.

    Args:
        checkpoint: where a run's checkpoint is, by the run's name.
        advise: told once, after some seconds, about how many seconds are left.
        look: what else is read into `history` then.
        words: what the display says of a run (default: its losses).
    """
    if not fresh:
        for name, ensemble in runs.items():
            _resume(name, ensemble, checkpoint(name))
    words = words or (lambda name: loss_words(runs[name]))
    program = Program(runs.values())
    began = clock = saved = shown = time.perf_counter()
    first: dict[str, int] = {}  # where the clock of the estimate begins: after one update, which may compile
    with deferred_interrupt() as asked, progress(runs, quiet, title) as show:
        while True:
            active = [name for name, ensemble in runs.items() if ensemble.step < ensemble.recipe.steps]
            if not program.advance():
                return
            due = [name for name in active if _due(runs[name], look_every)]
            now = time.perf_counter()
            out_of_time = time_limit is not None and now - began > time_limit
            save = asked() or out_of_time or now - saved > _SAVE_EVERY
            if due or save:
                program.wait()
            if not first:
                program.wait()
                first, clock = {name: one.step for name, one in runs.items()}, time.perf_counter()
            elif advise is not None and now - clock > _ADVISE_AFTER:
                program.wait()
                advise(_seconds_left(runs, first, time.perf_counter() - clock))
                advise = None
            if now - shown > _SHOW_EVERY:
                shown = now
                for name in active:
                    show(name, words(name))
            for name in due:
                _look(runs[name])
                if look is not None:
                    look(runs[name])
                show(name, words(name))
            if save:
                for name, ensemble in runs.items():
                    ensemble.save(checkpoint(name))
                saved = time.perf_counter()
            if asked() or out_of_time:
                folder = checkpoint(next(iter(runs))).parent
                print(f"\nstopped; the same command goes on from here (checkpoints in {folder})", file=sys.stderr)
                raise KeyboardInterrupt if asked() else TimeUp


def _seconds_left(runs: Mapping[str, Ensemble], first: Mapping[str, int], seconds: float) -> float:
    """By the tokens that were trained in so many seconds and those that are left."""
    done = sum(one.recipe.work(first[name], one.step) * one.recipe.batch for name, one in runs.items())
    left = sum(one.recipe.work(one.step) * one.recipe.batch for one in runs.values())
    return seconds * left / max(1, done)


def _due(ensemble: Ensemble, look_every: int) -> bool:
    return ensemble.step % look_every == 0 or ensemble.step == ensemble.recipe.steps


def _resume(name: str, ensemble: Ensemble, path: Path) -> None:
    if path.exists():
        try:
            ensemble.load(path)
            print(f"resuming {name} at update {ensemble.step}", file=sys.stderr)
        except ValueError as error:
            raise ValueError(
                f"{error}. It stays as it is: give another --out, or --fresh to train {name} anew in its place"
            ) from error


def _look(ensemble: Ensemble) -> None:
    ensemble.history["update"].append(ensemble.step)
    ensemble.history["loss"].append(finite([float(f"{v:.6g}") for v in ensemble.losses.tolist()]))


# Ctrl-C between updates, never inside one: what is saved is always a whole update ------------------------------------


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C is remembered and the yielded function says so; a second one interrupts at once.

    Outside the main thread, where no handler can be set, nothing is deferred.

    Example:
        >>> with deferred_interrupt() as asked:
        ...     asked()
        False
    """
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


# What a training shows while it runs ----------------------------------------------------------------------------------

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
    """A line a run soon after its start, and at every fifth of its updates."""
    began = time.perf_counter()
    first = {name: run.step for name, run in runs.items()}
    said = {name: _mark(run) for name, run in runs.items()}
    early = dict.fromkeys(runs, False)

    def say(name: str, words: str) -> None:
        run, seconds = runs[name], time.perf_counter() - began
        soon = not early[name] and seconds > _ADVISE_AFTER
        if _mark(run) > said[name] or soon:
            said[name], early[name] = _mark(run), True
            done, left = run.recipe.work(first[name], run.step), run.recipe.work(run.step)
            time_left = span_words(seconds * left / max(1, done))
            place = f"update {run.step}/{run.recipe.steps}"
            print(f"{name:24s} {place}  {words}  {seconds:.0f} s, {time_left} left", file=sys.stderr)

    return say


def span_words(seconds: float) -> str:
    """A time in words.

    Example:
        >>> span_words(8), span_words(260), span_words(40_000), span_words(300_000)
        ('8 s', '4 min', '11 h', '3 days')
    """
    for name, size, least in (("days", 86_400, 2.0), ("h", 3600, 2.0), ("min", 60, 2.0)):
        if seconds >= least * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def lengthy(seconds: float, device: str, hint: str = "") -> str | None:
    """A sentence for a training of more than ten minutes, with a hint at its end; None for a shorter one.

    Example:
        >>> lengthy(7_200, "cpu", "; `--recipe quick` takes about 4 min"), lengthy(500, "cpu")
        ('no GPU: this takes about 2 h here; `--recipe quick` takes about 4 min', None)
    """
    if seconds < 600:
        return None
    on = "no GPU: " if device == "cpu" else ""
    return f"{on}this takes about {span_words(seconds)} here{hint}"


def _mark(run: _Run) -> int:
    return run.step * _LINES // run.recipe.steps


@contextmanager
def _bars(runs: Mapping[str, _Run], console: object, title: str) -> Iterator[Callable[[str, str], None]]:
    from rich.progress import BarColumn, Progress, TextColumn

    width = max(len(name) for name in runs)
    columns = (
        TextColumn("{task.description:<" + str(width) + "}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[left]:>7} left"),
        TextColumn("length {task.fields[length]:>3}  {task.fields[words]}"),
    )
    with Progress(*columns, console=console) as display:  # type: ignore[arg-type]
        if title:
            display.console.print(title)
        bars = {
            name: display.add_task(name, total=run.recipe.steps, completed=run.step, left="?", length="", words="")
            for name, run in runs.items()
        }
        first = {name: (time.perf_counter(), run.step) for name, run in runs.items()}

        def show(name: str, words: str) -> None:
            run = runs[name]
            began, start = first[name]
            done, left = run.recipe.work(start, run.step), run.recipe.work(run.step)
            words_left = span_words((time.perf_counter() - began) * left / done) if done else "?"
            length = run.recipe.length(max(0, run.step - 1))
            display.update(bars[name], completed=run.step, left=words_left, length=length, words=words)

        yield show


# Updates recorded and replayed -----------------------------------------------------------------------------------------

_WARM = 3  # updates of a new phase that run as they are, which compiles and sizes what a recording must find ready


class Program:
    """Ensembles trained side by side.

    An update of a small model is hundreds of short kernels, and launching them one by one takes longer than running them. So
    each ensemble has a stream of its own and records its update as a CUDA graph; graphs on different streams run side by side
    where the device has room. A recording serves as long as the ensemble's phase (length, inputs, penalties) and its seeds
    stay the same; batches, learning rates, momentum and penalty weights are put into their places before each replay.

    Args:
        ensembles: each has its own recipe and stops at its own end.
        record: record and replay updates where the device is a GPU.

    Example:
        >>> from ckda.experiments.tracking.model import build_tracker
        >>> from ckda.experiments.tracking.task import WordProblem
        >>> from ckda.train import Recipe
        >>> from functools import partial
        >>> task, recipe = WordProblem.named("Z2"), Recipe(steps=3, batch=4, curriculum=(4,))
        >>> arms = [Ensemble(partial(build_tracker, name, task), task, recipe, (0, 1)) for name in ("kda", "ckda")]
        >>> program = Program(arms)
        >>> while program.advance():
        ...     pass
        >>> [arm.step for arm in arms]
        [3, 3]
    """

    def __init__(self, ensembles: Iterable[Ensemble], record: bool = True):
        self.ensembles = list(ensembles)
        on_gpu = [torch.device(e.device).type == "cuda" for e in self.ensembles]
        self._replays = [_Replay(e) if gpu and record else None for e, gpu in zip(self.ensembles, on_gpu, strict=True)]

    def advance(self) -> bool:
        """One update of every ensemble that is not at its end; False once all are. On a GPU it waits for nothing until then."""
        active = [i for i, e in enumerate(self.ensembles) if e.step < e.recipe.steps]
        for i in active:
            replay = self._replays[i]
            if replay is None:
                self.ensembles[i].train_step()
            else:
                replay.advance()
        if not active:
            self.wait()
        return bool(active)

    def wait(self) -> None:
        """Until all updates are done: before anything of an ensemble is read."""
        if any(replay is not None for replay in self._replays):
            torch.cuda.synchronize()

    @property
    def recorded(self) -> bool:
        """Whether every ensemble's update could be recorded."""
        return all(replay is not None and replay.can_record for replay in self._replays)


class _Replay:
    """One ensemble on a stream of its own, its update recorded."""

    def __init__(self, ensemble: Ensemble):
        self.ensemble, self.can_record = ensemble, True
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # the ensemble was made there
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple = ()
        self._warm = 0

    def advance(self) -> None:
        ensemble = self.ensemble
        with torch.cuda.stream(self._stream):
            ensemble.prepare()
            key = (ensemble.recipe.phase(ensemble.step), ensemble.seeds)
            if key != self._key:
                self._stream.synchronize()  # a replay may still be running; after this its memory is free
                self._key, self._graph, self._warm = key, None, 0
            if self._graph is None and self._warm >= _WARM and self.can_record:
                self._graph = self._recorded()
            if self._graph is None:
                self._warm += 1
                ensemble.losses = ensemble.update()
            else:
                self._graph.replay()
        ensemble.step += 1

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self.ensemble.losses = self.ensemble.update()
        except RuntimeError as error:
            print(f"updates run kernel by kernel, for they could not be recorded: {error}", file=sys.stderr)
            self.can_record = False
            return None
        return graph
