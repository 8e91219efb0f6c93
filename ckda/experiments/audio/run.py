"""One-layer models hear half a bar of a groove and go on alone: train them, then ask how long they keep the beat.

    result = run(AudioConfig(arms=("ckda", "gru"), device="cpu"))
    result.runs["ckda"].snr[264]      # signal to noise in dB of every seed

A run is an arm (:data:`.model.ARMS`) and a recipe (:data:`.recipes.RECIPES`). A finished run is kept in the store; the same
config again, or one with more arms, trains only what is missing.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckda.command import pick_device
from ckda.experiments.audio.model import STARTS, Continuer, build
from ckda.experiments.audio.recipes import CURRICULUM, RECIPES, recipe
from ckda.experiments.audio.task import (
    BPM,
    CUE,
    FRAMES,
    LENGTHS,
    Array,
    Continuation,
    Scores,
    best_of,
    cut,
    evaluate,
    groove,
    load_loop,
    playable,
    wav_bytes,
)
from ckda.experiments.common.store import Store, plain, stacked_parameters
from ckda.record import environment, write_bytes
from ckda.train import Ensemble, train
from ckda.train.loop import finite

__all__ = ["COMPARED", "AudioConfig", "AudioResult", "AudioRun", "Window", "run", "title"]

#: the arms that the paper compares
COMPARED = ("kda", "kda-beta2", "kda-signed", "ckda", "deltaproduct2-gated", "gru", "transformer")
_READ_EVERY = 25  # updates between looks at the loss: each look waits for the device
#: the length that the paper tests to, and by which the seed that is shown is chosen
PAPER_LENGTH = 264
SMOKE_STEPS = 8
LOOP = "groove"  #: the loop without --wav, as records call it


@dataclass(frozen=True)
class AudioConfig:
    """What to train, and on which loop."""

    arms: tuple[str, ...] = ("ckda",)
    recipes: tuple[str, ...] = ("paper",)
    first_seed: int = 0
    num_seeds: int = 1
    wav: str | None = None  #: a loop of two bars of one's own, instead of the groove
    bpm: float = BPM
    smoke: bool = False
    device: str = "auto"
    out: str | Path = "runs/audio"
    fresh: bool = False


class Window(NamedTuple):
    """A part of a continuation."""

    first: int  #: its first step
    frames: list[list[float]]  #: [T][samples]


@dataclass(frozen=True, kw_only=True)
class AudioRun:
    """A finished run: what its record runs/NAME.json says, in that order."""

    arm: str
    recipe_name: str
    recipe: dict[str, Any]
    key: dict[str, Any] = field(default_factory=dict)
    seeds: list[int]
    parameters: int = 0
    train_seconds: float | None = 0.0
    updates: int = 0
    losses: dict[str, Any] = field(default_factory=dict)
    mse: dict[int, list[float | None]]  #: mean squared error of every seed by length; None: not finite
    snr: dict[int, list[float | None]]  #: signal to noise in dB
    missing: str = "null: the output is not finite"
    shown: int  #: place of the seed that is shown
    windows: dict[str, Window]
    environment: dict[str, Any]
    parts: list[dict[str, Any]] | None = None  #: of a run whose seeds came from several trainings

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "AudioRun":
        """From a record, of this version or an earlier one."""
        known = {name.name: record[name.name] for name in fields(cls) if name.name in record}
        scores = {name: {int(n): values for n, values in record[name].items()} for name in ("mse", "snr")}
        windows = {name: Window(w["first"], w["frames"]) for name, w in record.get("windows", {}).items()}
        return cls(**known | scores | {"windows": windows})

    def to_json(self) -> dict[str, Any]:
        """The record."""
        record = asdict(self)
        record |= {name: {str(n): values for n, values in record[name].items()} for name in ("mse", "snr")}
        record["windows"] = {name: window._asdict() for name, window in self.windows.items()}
        if self.parts is None:
            del record["parts"]
        return record

    @property
    def recipe_now(self) -> str:
        """The recipe's name in today's vocabulary."""
        return RECIPES.name(self.recipe_name)

    @property
    def is_smoke(self) -> bool:
        """Whether it only showed that everything works."""
        return self.recipe["steps"] == SMOKE_STEPS

    @property
    def is_papers(self) -> bool:
        """Whether it was trained by the paper's protocol."""
        return self.recipe_now == "paper"


@dataclass(frozen=True)
class AudioResult:
    """Runs by name, and the loop they continue."""

    loop: str
    bpm: float
    cue: int
    trained_to: int
    frames: list[list[float]]
    runs: dict[str, AudioRun]
    absent: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  #: arms of the comparison without a run, with the reason
    environment: dict[str, Any] | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As audio.json has it."""
        result: dict[str, Any] = {"what": "ckda audio"}
        result |= {k: getattr(self, k) for k in ("loop", "bpm", "cue", "trained_to", "frames")}
        if self.environment is not None:
            result |= {"environment": self.environment, "seconds": round(self.seconds, 2)}
        else:
            result["absent"] = self.absent
        return result | {"runs": {name: one.to_json() for name, one in self.runs.items()}}

    def target(self, first: int, num: int) -> Any:
        """[num, D] the loop's own frames from step `first` on."""
        frames = np.array(self.frames)
        return frames[np.arange(first, first + num) % len(frames)]


class _Job(NamedTuple):
    """One ensemble to train and score."""

    name: str
    arm: str
    recipe_name: str
    ensemble: Ensemble
    task: Continuation


def title(arm: str, recipe_name: str, smoke: bool = False) -> str:
    """The file name of a run.

    Example:
        >>> title("ckda", "paper"), title("ckda", "steady")
        ('ckda', 'ckda+steady')
    """
    return arm + ("" if recipe_name == "paper" else f"+{recipe_name}") + ("+smoke" if smoke else "")


def stereo_loop(config: AudioConfig) -> Array:
    """[2, n] the loop that is continued; ValueError where it cannot be."""
    if not 20 <= config.bpm <= 400:
        raise ValueError(f"--bpm {config.bpm:g}: it must lie between 20 and 400")
    try:
        return groove() if config.wav is None else load_loop(config.wav, config.bpm)
    except ValueError as error:
        raise ValueError(f"--wav: {error}") from error


def run(config: AudioConfig, quiet: bool = True) -> AudioResult:
    """Train what is missing and score it.

    Args:
        quiet: no progress on standard error.
    """
    began = time.perf_counter()
    device, frames, store = pick_device(config.device), cut(stereo_loop(config)), Store(Path(config.out))
    lengths = LENGTHS[:4] if config.smoke else LENGTHS
    runs = {}
    for arm, text in product(config.arms, config.recipes):
        job = _job(config, arm, RECIPES.name(text), frames, device)
        runs[job.name] = _one(job, store, lengths, config, quiet)
    return AudioResult(
        loop=LOOP if config.wav is None else Path(config.wav).name,
        bpm=config.bpm,
        cue=CUE,
        trained_to=next(iter(runs.values())).recipe["curriculum"][-1],
        frames=np.round(frames, 5).tolist(),
        runs=runs,
        environment=environment(device),
        seconds=time.perf_counter() - began,
    )


# One run -------------------------------------------------------------------------------------------------------------


def _job(config: AudioConfig, arm: str, name: str, frames: Array, device: str) -> _Job:
    change = RECIPES.read(name)
    settings = recipe(name, (12, 16), steps=SMOKE_STEPS, batch=FRAMES) if config.smoke else recipe(name, CURRICULUM)
    _check(arm, name, settings.penalties, bool(change.model))
    task = Continuation(frames, **change.task)
    seeds = tuple(range(config.first_seed, config.first_seed + config.num_seeds))
    ensemble = Ensemble(partial(_build, arm, **change.model), task, settings, seeds, device)
    return _Job(title(arm, name, config.smoke), arm, name, ensemble, task)


def _build(arm: str, start: str | None = None) -> Continuer:
    model = build(arm)
    model.cue = CUE
    return model if start is None else STARTS[start](model)


def _check(arm: str, name: str, penalties: Mapping[str, float], starts: bool) -> None:
    """ValueError where the recipe does not fit the arm."""
    if starts and arm != "ckda":
        raise ValueError(f"recipe {name}: only ckda can start as a clock, not {arm}")
    if penalties and arm == "transformer":
        raise ValueError(f"recipe {name}: the Transformer has no recurrent state to compare")
    if set(penalties) - {"closure"} and arm == "gru":
        raise ValueError(
            f"recipe {name}: the GRU's transition is no matrix; 'penalty=closure' and 'schedule=tail' fit it"
        )


def _one(job: _Job, store: Store, lengths: tuple[int, ...], config: AudioConfig, quiet: bool) -> AudioRun:
    """Train and score one run, or read what it left."""
    ensemble = job.ensemble
    key = plain(ensemble.key() | {"lengths": lengths} | RECIPES.read(job.recipe_name).model)
    known = None if config.fresh else store.known(job.name, key)
    if known is not None:
        return AudioRun.from_json(known)
    began, checkpoint = time.perf_counter(), store.files(job.name).checkpoint
    train({job.name: ensemble}, lambda _: checkpoint, fresh=config.fresh, quiet=quiet, look_every=_READ_EVERY)
    seconds = time.perf_counter() - began
    skeleton: Any = ensemble.skeleton
    skeleton.cue = 0  # tests run the recurrence itself
    scores = evaluate(ensemble, job.task, len(ensemble.seeds), max(lengths), ensemble.device)
    paper = max(n for n in lengths if n <= PAPER_LENGTH)
    shown = best_of([v if math.isfinite(v) else -math.inf for v in scores.snr(paper)])
    result = AudioRun(
        arm=job.arm,
        recipe_name=job.recipe_name,
        recipe=plain(asdict(ensemble.recipe)),
        key=key,
        seeds=list(ensemble.seeds),
        parameters=sum(p[0].numel() for p in ensemble.parameters.values()),
        train_seconds=round(seconds, 2),
        updates=ensemble.recipe.steps,
        losses=ensemble.history,
        mse={n: finite(scores.mse(n)) for n in lengths},
        snr={n: finite(scores.snr(n)) for n in lengths},
        shown=shown,
        windows=_windows(scores, shown, paper, max(lengths)),
        environment=environment(ensemble.device),
    )
    sound = wav_bytes(playable(_heard(scores, job.task, shown)[:paper], config.bpm))
    write_bytes(store.files(job.name).weights.with_suffix(".wav"), sound)
    weights = {"arm": job.arm, "seeds": list(ensemble.seeds), "parameters": stacked_parameters(ensemble)}
    store.finish(job.name, result.to_json(), weights)
    return result


def _heard(scores: Scores, task: Continuation, replica: int) -> np.ndarray:
    """[T, D] what one hears from phase 0: the cue as given, then the continuation."""
    frames = scores.heard[replica].numpy().copy()
    frames[: task.cue] = task.frames[: task.cue]
    return frames


def _windows(scores: Scores, replica: int, paper: int, longest: int) -> dict[str, Window]:
    """The continuation from phase 0 where the paper looks, and at the very end."""
    said = torch.nan_to_num(scores.heard[replica], 0.0, 1.0, -1.0).clamp(-9, 9)
    places = {
        "near": (0, min(24, paper)),
        "far": (max(0, paper - FRAMES), paper),
        "end": (max(0, longest - FRAMES), longest),
    }
    return {
        name: Window(first, [[round(v, 4) for v in frame] for frame in said[first:last].tolist()])
        for name, (first, last) in places.items()
    }
