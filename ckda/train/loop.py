"""The loop around a :class:`Program`: resume, look now and then, save now and then, stop in good order."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ckda.train.ensemble import Ensemble
from ckda.train.interrupt import deferred_interrupt
from ckda.train.program import Program
from ckda.train.progress import progress

__all__ = ["TimeUp", "finite", "loss_words", "train"]

_SAVE_EVERY = 30.0  # seconds between checkpoints


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
    words: Callable[[str], str] | None = None,
    title: str = "",
) -> None:
    """Train all runs to their ends, side by side.

    A run whose checkpoint is there goes on from it, unless `fresh`. Every `look_every` updates its losses are read into
    `history`. Ctrl-C (KeyboardInterrupt) and the time limit in seconds (:class:`TimeUp`) leave checkpoints.

    Args:
        checkpoint: where a run's checkpoint is, by the run's name.
        look: what else is read into `history` then.
        words: what the display says of a run (default: its losses).
    """
    if not fresh:
        for name, ensemble in runs.items():
            _resume(name, ensemble, checkpoint(name))
    words = words or (lambda name: loss_words(runs[name]))
    program = Program(runs.values())
    began = saved = time.perf_counter()
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


def _due(ensemble: Ensemble, look_every: int) -> bool:
    return ensemble.step % look_every == 0 or ensemble.step == ensemble.recipe.steps


def _resume(name: str, ensemble: Ensemble, path: Path) -> None:
    if path.exists():
        try:
            ensemble.load(path)
            print(f"resuming {name} at update {ensemble.step}", file=sys.stderr)
        except ValueError as error:
            print(f"starting {name} anew: {error}", file=sys.stderr)


def _look(ensemble: Ensemble) -> None:
    ensemble.history["update"].append(ensemble.step)
    ensemble.history["loss"].append(finite([float(f"{v:.6g}") for v in ensemble.losses.tolist()]))
