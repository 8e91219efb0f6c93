"""``ckda track --suite regular``: every arm on every task, then one table and one figure.

A run is a task and an arm (:data:`.tasks.TASKS`, :data:`.model.ARMS`) with its seeds as one program; several runs
train side by side. A finished run is kept in the store (:class:`ckda.experiments.common.store.Store`), and the same command goes
on from there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.command import pick_device
from ckda.experiments.common.store import Store, collect_records, plain, stacked_parameters
from ckda.experiments.regular.model import ARMS, build_model, num_layers
from ckda.experiments.regular.tasks import PUBLISHED_FOUR, TASKS, Task, evaluate, scaled_scores
from ckda.record import environment
from ckda.train import Ensemble, Program, Recipe, TimeUp, train
from ckda.train.recipe import steps_word

__all__ = [
    "ARMS",
    "RANGE",
    "SOLVED",
    "TASKS",
    "SuiteConfig",
    "SuiteResult",
    "SuiteRun",
    "average",
    "collect",
    "pairs",
    "run",
]

RANGE = (40, 256)  #: lengths over which PD-SSM's table averages; training has words up to the first of them
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)  #: the accuracy over the last quarter of each stands beside it
SOLVED = 0.99  #: scaled accuracy over :data:`RANGE` from which a seed counts as having the task
_FIVE = ("ckda", "kda", "deltaproduct2", "gru", "transformer")
_NEAR, _WORDS, _FAR_WORDS = 256, 128, 32  # words a test up to that length, and beyond
_WARM, _TIMED = 5, 12  # updates before time is taken, and those whose mean counts on a GPU
_TIMED_ALONE = 3  # on a CPU, of which the fastest counts: other programs run there too
_BASE: dict[str, Any] = {"momentum": "cycled", "block": 200}
_SMOKE: dict[str, Any] = {"steps": 4, "batch": 4, "curriculum": (8, 12), "switches": (), "block": 2}


@dataclass(frozen=True)
class SuiteConfig:
    """What to train and to test."""

    tasks: tuple[str, ...] = tuple(TASKS)
    arms: tuple[str, ...] = ()  #: () for those of each task
    num_seeds: int = 5
    first_seed: int = 0
    steps: int | None = None  #: None: the task's
    batch: int | None = None  #: None: the task's
    together: int | None = None  #: runs trained side by side; None: 1, on a GPU 8
    smoke: bool = False  #: a run of seconds that only shows that everything works
    device: str = "auto"
    out: str | Path = "runs/regular"
    fresh: bool = False
    time_limit: float | None = None  #: seconds


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A finished run: what its record runs/NAME.json says."""

    task: str
    arm: str
    label: str
    layers: int
    parameters: int
    recipe: dict[str, Any]
    key: dict[str, Any]
    seeds: list[int]
    scores: dict[
        str, list[float]
    ]  #: scaled accuracy of every seed over lengths "40-256", and in the last quarter of others
    missing: dict[str, str]  #: lengths that were not tested, with the reason
    train_seconds: float
    trained_together: int
    update_ms: float  #: an update of all seeds, alone in this process
    history: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any]

    @property
    def main(self) -> list[float]:
        """The scores over PD-SSM's lengths."""
        return self.scores["-".join(map(str, RANGE))]

    @property
    def solved(self) -> int:
        """How many seeds have the task."""
        return sum(score >= SOLVED for score in self.main)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "SuiteRun":
        return cls(**{name.name: record[name.name] for name in fields(cls)})


@dataclass(frozen=True)
class SuiteResult:
    """Runs by name, and why others are absent."""

    runs: dict[str, SuiteRun]
    absent: dict[str, str]
    environment: dict[str, Any]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A summary: all but keys and histories, which the records have."""
        runs = {
            name: {k: v for k, v in asdict(one).items() if k not in ("key", "history")}
            for name, one in self.runs.items()
        }
        averages = {arm: average(self, arm) for arm in _FIVE}
        return {
            "what": "ckda track --suite regular",
            "environment": self.environment,
            "seconds": round(self.seconds, 2),
            "averages": averages,
            "runs": runs,
            "absent": self.absent,
        }


class _Job(NamedTuple):
    name: str
    task: Task
    arm: str
    ensemble: Ensemble


def pairs(config: SuiteConfig) -> list[tuple[str, str]]:
    """Tasks and arms: the same five everywhere, and on S5, which one layer of one factor cannot track, three more.

    Example:
        >>> [arm for task, arm in pairs(SuiteConfig(tasks=("S5",)))][5:]
        ['ckda-2-layers', 'ckda-2-factors', 'deltaproduct4']
    """
    found = []
    for task in config.tasks:
        own = config.arms or (tuple(ARMS) if task == "S5" else _FIVE)
        found += [(task, arm) for arm in own]
    return found


def average(result: SuiteResult, arm: str, length: str = "-".join(map(str, RANGE))) -> dict[str, float] | None:
    """Over PD-SSM's four tasks, in percent: of the seeds' means, and of the best seeds; None where one is missing."""
    runs = [result.runs.get(f"{task}-{arm}") for task in PUBLISHED_FOUR]
    if any(one is None or length not in one.scores for one in runs):
        return None
    scores = [one.scores[length] for one in runs if one is not None]
    return {"mean": 100 * fmean(map(fmean, scores)), "best": 100 * sum(map(max, scores)) / len(scores)}


def run(config: SuiteConfig, quiet: bool = True, advise: Callable[[float], None] | None = None) -> SuiteResult:
    """Train what is missing and score it; at the time limit what is not finished stands in `absent`.

    Args:
        advise: told once, some seconds after the first training has begun, about how many seconds all of them take.
    """
    began, device, store = time.perf_counter(), pick_device(config.device), Store(Path(config.out))
    jobs = [_job(config, task, arm, device) for task, arm in pairs(config)]
    found: dict[str, SuiteRun] = {}
    for job in jobs:
        known = None if config.fresh else store.known(job.name, plain(job.ensemble.key()))
        if known is not None:
            found[job.name] = SuiteRun.from_json(known)
    if not quiet:
        store.say_known(list(found))
    missing = [job for job in jobs if job.name not in found]
    together = config.together or (8 if device == "cuda" else 1)
    for first in range(0, len(missing), together):
        part = missing[first : first + together]
        left = None if config.time_limit is None else config.time_limit - (time.perf_counter() - began)
        try:
            rest = len(missing) / len(part)  # as many such parts, this one included
            told = None if advise is None or first else lambda seconds, rest=rest: advise(seconds * rest)
            seconds = _train(part, store, config.fresh, quiet, left, told)
        except TimeUp:
            break
        for job in part:
            found[job.name] = _finish(job, store, config, seconds, len(part))
    steps = {job.name: f"stopped at update {job.ensemble.step} of {job.ensemble.recipe.steps}" for job in jobs}
    return SuiteResult(
        {job.name: found[job.name] for job in jobs if job.name in found},
        {name: why for name, why in steps.items() if name not in found},
        environment(device),
        time.perf_counter() - began,
    )


def collect(folders: Sequence[str | Path], trained_at: str | None = None) -> SuiteResult:
    """The records of these folders, tasks and arms in the order of their lists."""
    records = collect_records(folders, lambda record: "task" in record and "arm" in record)
    if not records:
        raise ValueError(f"no runs/NAME.json of the suite in {', '.join(map(str, folders))}")
    runs = {name: SuiteRun.from_json(parts[-1]) for name, parts in records.items()}
    for one in runs.values():
        if trained_at and (one.environment["commit"] is None or one.environment["commit"].endswith("+")):
            one.environment["commit"] = trained_at
    places = {f"{task}-{arm}": i for i, (task, arm) in enumerate((t, a) for t in TASKS for a in ARMS)}
    runs = dict(
        sorted(runs.items(), key=lambda item: (places[f"{item[1].task}-{item[1].arm}"], item[1].recipe["steps"]))
    )
    return SuiteResult(runs, {}, next(iter(runs.values())).environment)


def _job(config: SuiteConfig, name: str, arm: str, device: str) -> _Job:
    task = TASKS[name]
    changes = {k: v for k in ("steps", "batch") if (v := getattr(config, k)) is not None}
    steps = changes.get("steps", task.updates)
    own: dict[str, Any] = {"batch": task.batch_size, "curriculum": task.curriculum, "switches": task.switches(steps)}
    own |= {"penalties": {"closure": task.closure}, "ramp": (0.3, 0.45)} if task.closure else {}
    recipe = Recipe(**_BASE | own | {"steps": steps} | (_SMOKE if config.smoke else changes))
    seeds = tuple(range(config.first_seed, config.first_seed + config.num_seeds))
    ensemble = Ensemble(partial(build_model, arm, name), task, recipe, seeds, device)
    words = ["smoke"] if config.smoke else [f"{k}={steps_word(v)}" for k, v in changes.items()]
    return _Job("+".join([f"{name}-{arm}", *words]), task, arm, ensemble)


def _train(
    part: list[_Job], store: Store, fresh: bool, quiet: bool, left: float | None, advise: Callable[[float], None] | None
) -> float:
    began = time.perf_counter()
    train(
        {job.name: job.ensemble for job in part},
        lambda name: store.files(name).checkpoint,
        fresh=fresh,
        quiet=quiet,
        look_every=max(1, part[0].ensemble.recipe.steps // 40),
        time_limit=left,
        advise=advise,
    )
    return time.perf_counter() - began


def _finish(job: _Job, store: Store, config: SuiteConfig, seconds: float, together: int) -> SuiteRun:
    """Score a trained run and leave its record and weights."""
    ensemble = job.ensemble
    scores, missing = _scores(job, config.smoke)
    result = SuiteRun(
        task=job.task.name,
        arm=job.arm,
        label=ARMS[job.arm].label,
        layers=num_layers(job.arm, job.task),
        parameters=sum(p[0].numel() for p in ensemble.parameters.values()),
        recipe=plain(asdict(ensemble.recipe)),
        key=plain(ensemble.key()),
        seeds=list(ensemble.seeds),
        scores=scores,
        missing=missing,
        train_seconds=round(seconds, 2),
        trained_together=together,
        update_ms=_update_ms(job),
        history=ensemble.history,
        environment=environment(ensemble.device),
    )
    weights = {"task": job.task.name, "arm": job.arm, "seeds": list(ensemble.seeds)}
    store.finish(job.name, asdict(result), weights | {"parameters": stacked_parameters(ensemble)})
    return result


def _scores(job: _Job, smoke: bool) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Over :data:`RANGE`, and over the last quarter of each of :data:`LENGTHS`."""
    ensemble, device = job.ensemble, job.ensemble.device

    def prefill(tokens: Tensor, cache: Any) -> Any:
        return ensemble.call("prefill", tokens) if cache is None else ensemble.call("prefill", tokens, cache)

    def counts(shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        size = (_WORDS if longest <= _NEAR else _FAR_WORDS) if not smoke else 2
        return evaluate(prefill, job.task, len(ensemble.seeds), size, shortest, longest, device)

    tested = [n for n in LENGTHS if n <= (64 if smoke else LENGTHS[-1]) and (job.task.far or n <= RANGE[1])]
    windows = {"-".join(map(str, RANGE)): RANGE} | {str(n): (n - n // 4 + 1, n) for n in tested}
    if job.task.whole:
        scores = {name: scaled_scores(job.task, counts(*window), *window) for name, window in windows.items()}
    else:
        near, far = counts(1, _NEAR), counts(1, tested[-1]) if tested[-1] > _NEAR else None
        scores = {
            name: scaled_scores(job.task, near if far is None or window[1] <= _NEAR else far, *window)
            for name, window in windows.items()
        }
    missing = {str(n): "the task has no words of this length" for n in LENGTHS if n not in tested and not job.task.far}
    return scores, missing


def _update_ms(job: _Job) -> float:
    """Milliseconds of one update of all seeds at the last training length, nothing else in this process running."""
    trained = job.ensemble
    last = {"curriculum": trained.recipe.curriculum[-1:], "switches": ()}
    recipe = Recipe(**asdict(trained.recipe) | {"steps": _WARM + max(_TIMED, _TIMED_ALONE)} | last)
    other = Ensemble(partial(build_model, job.arm, job.task.name), job.task, recipe, trained.seeds, trained.device)
    program = Program([other])
    _seconds(program, _WARM)
    on_gpu = torch.device(trained.device).type == "cuda"
    together, times = (_TIMED, 1) if on_gpu else (1, _TIMED_ALONE)
    return round(1000 * min(_seconds(program, together) for _ in range(times)) / together, 3)


def _seconds(program: Program, updates: int) -> float:
    began = time.perf_counter()
    for _ in range(updates):
        program.advance()
    program.wait()
    return time.perf_counter() - began
