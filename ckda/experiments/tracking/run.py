"""Word problems of finite groups: train one-layer models on words, then ask how far beyond the training length they go.

    result = run(TrackConfig(groups=("S3",), recipes=("quick",), device="cpu"))
    result.runs["S3-ckda+quick"].scores[512]      # scaled accuracy of every seed

A run is a group, a mixer (:data:`ckda.layers.MIXERS`) and a recipe (:data:`.recipes.RECIPES`), with some seeds that train as
one program; several runs train side by side. A finished run is kept in the store (:class:`ckda.experiments.common.store.Store`);
the same config again, or one with more runs, trains only what is missing.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.command import pick_device
from ckda.experiments.common.store import Store, collect_records, plain, save_weights, stacked_parameters
from ckda.experiments.tracking import shuffled_objects
from ckda.experiments.tracking.ends import snap, snapped
from ckda.experiments.tracking.model import Tracker, build_tracker
from ckda.experiments.tracking.penalties import check_penalties
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.task import WordProblem, correct_in_passing, scaled_accuracy, task_named
from ckda.layers.mixers import MIXERS
from ckda.record import environment, write_json
from ckda.train import Ensemble, Recipe, TimeUp, train
from ckda.train.loop import loss_words
from ckda.train.recipe import Change, steps_word
from ckda.train.weights import places_of, read_weights

__all__ = [
    "FAR_LENGTHS",
    "LENGTHS",
    "TrackConfig",
    "TrackResult",
    "TrackRun",
    "best_seed",
    "collect",
    "keep_replica",
    "run",
    "title",
]

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
#: what a GPU is asked besides; far words are fewer (:data:`_FAR_WORDS`)
FAR_LENGTHS = (1024, 4096, 16_384, 65_536)
_NEAR, _FAR_WORDS = 512, 32
_SEGMENT = 96  # steps of a near test that are run at once: what training has compiled serves them
_FAR_SEGMENT = {"cuda": 2048, "cpu": 256}  # of a far one; on a CPU 2048 took 13 GB for 24 seeds
_WATCHES = 25  # times that the accuracy at the training length is measured during a training
_SEEDS = 3  # where nobody says how many
_SMOKE: dict[str, Any] = {"steps": 10, "batch": 8, "curriculum": (4, 6), "letters": (), "block": 3}


@dataclass(frozen=True)
class TrackConfig:
    """What to train and to test."""

    groups: tuple[str, ...] = ("S3",)
    mixers: tuple[str, ...] = ("ckda",)
    recipes: tuple[str, ...] = ("paper",)
    first_seed: int = 0
    num_seeds: int | None = None  #: None: three, or with `begin` those of the file
    lengths: tuple[int, ...] | None = None  #: that are tested; None: 8 to 512, on a GPU to 65,536
    words: int = 256  #: of a test; at most 32 beyond length 512
    begin: str | None = None  #: a file runs/NAME.pt to begin from
    together: int | None = None  #: runs trained side by side; None: 1, on a GPU 8
    by_symbol: bool = True  #: project each symbol once, not every token
    smoke: bool = False  #: a run of seconds that only shows that everything works
    device: str = "auto"
    out: str | Path = "runs/track"
    fresh: bool = False  #: train anew, whatever is in `out`
    time_limit: float | None = None  #: seconds


@dataclass(frozen=True, kw_only=True)
class TrackRun:
    """A finished run: what its record runs/NAME.json says, in that order."""

    group: str
    order: int
    mixer: str
    label: str
    recipe_name: str
    about: str = ""
    recipe: dict[str, Any]
    key: dict[str, Any] = field(default_factory=dict)
    seeds: list[int]
    begun_seeds: list[int] = field(default_factory=list)
    parameters: int = 0
    train_seconds: float = 0.0
    trained_together: int = 1
    history: dict[str, Any] = field(default_factory=dict)
    scores: dict[int, list[float]]  #: scaled accuracy of every seed by length
    missing: dict[str, str] = field(default_factory=dict)  #: lengths that were not tested, with the reason
    best: int  #: place of the best seed (:func:`best_seed`)
    shuffled_objects: dict[str, Any] | None = None
    environment: dict[str, Any]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "TrackRun":
        """From a record, of this version or an earlier one."""
        known = {name.name: record[name.name] for name in fields(cls) if name.name in record}
        return cls(**known | {"scores": {int(n): values for n, values in record["scores"].items()}})

    def to_json(self) -> dict[str, Any]:
        """The record."""
        return asdict(self) | {"scores": {str(n): values for n, values in self.scores.items()}}

    @property
    def recipe_now(self) -> str:
        """The recipe's name in today's vocabulary, with what options of earlier versions changed unnamed."""
        name, recipe = RECIPES.name(self.recipe_name), self.recipe
        if "momentum" not in recipe and "momentum=" not in name:
            name += "+momentum=0.95"  # before it could be cycled
        change = RECIPES.read(name)
        named = change.recipe()
        if not self.is_smoke:
            name += "".join(
                f"+{k}={steps_word(recipe[k])}" for k in ("steps", "batch") if recipe[k] != getattr(named, k)
            )
            if recipe["keep"] and not change.restarts:
                name += (
                    f"+keep={recipe['keep']}-of-{len(self.begun_seeds)}-at-{recipe['cull_at'] / recipe['steps']:.3g}"
                )
        return RECIPES.shortest(name)

    @property
    def is_smoke(self) -> bool:
        """Whether it only showed that everything works."""
        return self.recipe["steps"] == _SMOKE["steps"]

    def at(self, length: int) -> float:
        """The best seed's score."""
        return self.scores[length][self.best]


@dataclass(frozen=True)
class TrackResult:
    """Runs by name, and why others are absent."""

    runs: dict[str, TrackRun]
    absent: dict[str, str]
    environment: dict[str, Any]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A summary: all but keys and histories, which the records have."""
        brief = {
            name: {k: v for k, v in one.to_json().items() if k not in ("key", "history")}
            for name, one in self.runs.items()
        }
        return {
            "what": "ckda track",
            "environment": self.environment,
            "seconds": round(self.seconds, 2),
            "runs": brief,
            "absent": self.absent,
        }


class _Job(NamedTuple):
    """One ensemble to train and score."""

    name: str
    group: str
    mixer: str
    recipe_name: str
    ensemble: Ensemble
    task: WordProblem
    goes_on: str = ""  # the recipe by which its weights are trained on, in a run of its own


def title(group: str, mixer: str, recipe: str, smoke: bool = False) -> str:
    """The file name of a run.

    Example:
        >>> title("S3", "ckda", "paper"), title("S4:generators", "kda", "penalty=closure")
        ('S3-ckda', 'S4.generators-kda+penalty=closure')
    """
    name = f"{Path(group).stem if group.endswith('.json') else group.replace(':', '.')}-{mixer}"
    return name + ("" if recipe == "paper" else f"+{recipe}") + ("+smoke" if smoke else "")


def best_seed(scores: dict[int, list[float]]) -> int:
    """Which seed is best at the longest length up to 512 (ties: at the next shorter ones, then at longer ones).

    Example:
        >>> best_seed({32: [1.0, 1.0], 512: [0.4, 0.7], 4096: [0.2, 0.1]})
        1
        >>> best_seed({512: [1.0, 1.0], 4096: [0.2, 0.9]})
        1
    """
    lengths = sorted(scores, key=lambda n: (n > _NEAR, n if n > _NEAR else -n))
    num = len(next(iter(scores.values())))
    return max(range(num), key=lambda r: [scores[n][r] for n in lengths])


# All runs ------------------------------------------------------------------------------------------------------------


def run(config: TrackConfig, quiet: bool = True, advise: Callable[[float], None] | None = None) -> TrackResult:
    """Train what is missing and score it; at the time limit what is not finished stands in `absent`.

    Args:
        quiet: no progress on standard error.
        advise: told once, some seconds after the first training has begun, about how many seconds all of them take.
    """
    began = time.perf_counter()
    device = pick_device(config.device)
    jobs = _jobs(config, device)
    found = _run_jobs(jobs, config, device, quiet, began, advise)
    trained_on = [_trained_on(job, config, device) for job in jobs if job.goes_on and job.name in found]
    found |= _run_jobs(trained_on, config, device, quiet, began)
    jobs = [*jobs, *trained_on]
    return TrackResult(
        {job.name: found[job.name] for job in jobs if job.name in found},
        {job.name: _unfinished(job) for job in jobs if job.name not in found},
        environment(device),
        time.perf_counter() - began,
    )


def _run_jobs(
    jobs: list[_Job],
    config: TrackConfig,
    device: str,
    quiet: bool,
    began: float,
    advise: Callable[[float], None] | None = None,
) -> dict[str, TrackRun]:
    """Train those that are missing and score them, as far as the time limit lets; the finished ones by name."""
    lengths, store = config.lengths or _default_lengths(config, device), Store(Path(config.out))
    found: dict[str, TrackRun] = {}
    missing = []
    for job in jobs:
        known = None if config.fresh else _known(job, store, lengths, config.words)
        if known is None:
            missing.append(job)
        else:
            found[job.name] = known
    if not quiet:
        store.say_known(list(found))
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
            found[job.name] = _finish(job, store, lengths, config.words, seconds, len(part))
    return found


def collect(folders: Sequence[str | Path], groups: Sequence[str] = (), trained_at: str | None = None) -> TrackResult:
    """The records runs/NAME.json of these folders, of these groups (none: all), by group, recipe and mixer as listed here.

    Args:
        trained_at: the commit of records that know none, or a copy's.
    """
    records = collect_records(
        folders, lambda r: "scores" in r and "mixer" in r and (not groups or r["group"] in groups)
    )
    if not records:
        raise ValueError(f"no runs/NAME.json in {', '.join(map(str, folders))}; `ckda track` leaves them in its --out")
    runs = {name: TrackRun.from_json(parts[-1]) for name, parts in records.items()}
    for one in runs.values():
        known = one.environment["commit"]
        if trained_at and (known is None or known.endswith("+")):
            one.environment["commit"] = trained_at
    mixers = list(MIXERS)

    def place(item: tuple[str, TrackRun]) -> tuple:
        one = item[1]
        return (
            one.group,
            one.recipe_now != "paper",
            one.recipe_now,
            mixers.index(one.mixer) if one.mixer in mixers else 99,
        )

    runs = dict(sorted(runs.items(), key=place))
    return TrackResult(runs, {}, next(iter(runs.values())).environment)


def _default_lengths(config: TrackConfig, device: str) -> tuple[int, ...]:
    return LENGTHS[:3] if config.smoke else LENGTHS + (FAR_LENGTHS if device == "cuda" else ())


def _jobs(config: TrackConfig, device: str) -> list[_Job]:
    return [
        _job(config, group, mixer, recipe, device)
        for group, mixer, recipe in product(config.groups, config.mixers, config.recipes)
    ]


def _job(config: TrackConfig, group: str, mixer: str, recipe: str, device: str, called: str = "") -> _Job:
    """One run; `called` is its recipe in the run's name, where that is not the recipe's own name."""
    try:
        change = RECIPES.read(recipe)
        recipe = "+".join(word for word in RECIPES.parts(recipe) if not word.startswith("then=")) or "paper"
        task = replace(task_named(group), **change.task)
        ensemble = _ensemble(config, task, mixer, recipe, device)
        goes_on = "" if change.from_weights else change.goes_on
        if goes_on:
            _check_going_on(config, task, mixer, change, RECIPES.read(f"{recipe}+{goes_on}"))
    except ValueError as error:
        raise ValueError(f"{group} with {mixer} by {recipe}: {error}") from error
    return _Job(title(group, mixer, called or recipe, config.smoke), group, mixer, recipe, ensemble, task, goes_on)


def _trained_on(job: _Job, config: TrackConfig, device: str) -> _Job:
    """The run that begins from the weights of a finished one, by the recipe that its own recipe names."""
    begin = str(Store(Path(config.out)).files(job.name).weights)
    going_on = replace(config, begin=begin, num_seeds=None)
    recipe, called = f"{job.recipe_name}+{job.goes_on}", f"{job.recipe_name}.then={job.goes_on}"
    return _job(going_on, job.group, job.mixer, recipe, device, called)


def _check_going_on(config: TrackConfig, task: WordProblem, mixer: str, first: Change, then: Change) -> None:
    """ValueError now rather than after the first training."""
    if config.begin or first.restarts:
        raise ValueError("then= follows a training from random weights of which no seed is dropped")
    model = build_tracker(mixer, task, **then.model)
    check_penalties(model, then.recipe().penalties, task)
    if then.from_weights == "snapped":
        snap(model)


def _ensemble(config: TrackConfig, task: WordProblem, mixer: str, name: str, device: str) -> Ensemble:
    change = RECIPES.read(name)
    recipe, num_seeds = _recipe(config, name)
    build = partial(build_tracker, mixer, task, by_symbol=config.by_symbol, **change.model)
    if recipe.penalties:
        check_penalties(build(), recipe.penalties, task)
    seeds = tuple(range(config.first_seed, config.first_seed + num_seeds))
    if not config.begin:
        if change.from_weights:
            raise ValueError("this recipe begins from trained weights; --from names them, a file runs/NAME.pt")
        return Ensemble(build, task, recipe, seeds, device)
    if change.restarts:
        raise ValueError("--from begins with trained seeds; there is nothing to restart")
    saved = read_weights(config.begin, "ckda track", (), device)
    if config.num_seeds is None:
        seeds = tuple(seed for seed in saved["seeds"] if seed >= config.first_seed) or seeds
    places = places_of(seeds, saved, config.begin)
    ensemble = Ensemble(build, task, recipe, seeds, device)
    try:
        parameters = {name: p[places] for name, p in saved["parameters"].items()}
        if change.from_weights == "snapped":
            parameters = snapped(build, parameters)
        ensemble.begin_from(parameters, hashlib.sha256(Path(config.begin).read_bytes()).hexdigest()[:16])
    except (RuntimeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{config.begin} holds no weights of this group and mixer") from error
    return ensemble


def _recipe(config: TrackConfig, name: str) -> tuple[Recipe, int]:
    """The recipe, and the number of seeds to begin with."""
    change = RECIPES.read(name)
    if config.smoke:
        culled = {"cull_at": 4, "keep": 1} if change.restarts else {}
        return change.recipe(**_SMOKE, **culled), 3 if change.restarts else config.num_seeds or _SEEDS
    return change.recipe(), change.restarts or config.num_seeds or _SEEDS


# One run -------------------------------------------------------------------------------------------------------------


def _key(job: _Job, lengths: Sequence[int], words: int) -> dict[str, Any]:
    return plain(job.ensemble.key() | {"lengths": lengths, "words": words})


def _known(job: _Job, store: Store, lengths: tuple[int, ...], words: int) -> TrackRun | None:
    """What this very run left, if it did; lengths that were not tested then are tested now, from its weights."""
    record = store.known(job.name, _key(job, lengths, words))
    if record is None:
        return None
    known = TrackRun.from_json(record)
    untested = tuple(n for n in lengths if n not in known.scores and str(n) not in known.missing)
    if not untested:
        return known
    files = store.files(job.name)
    if not files.weights.exists():
        raise ValueError(
            f"{files.record} was not tested at {', '.join(map(str, untested))} letters, and {files.weights.name} is gone; "
            f"--lengths {','.join(map(str, known.scores))} takes it as it is, --fresh trains it anew in its place"
        )
    saved = read_weights(files.weights, "ckda track", (), job.ensemble.device)
    job.ensemble.keep([job.ensemble.seeds.index(seed) for seed in saved["seeds"]])
    job.ensemble.begin_from(saved["parameters"], job.ensemble.began_from)
    scores = dict(sorted((known.scores | _scores(job, untested, words)).items()))
    key = known.key | {"lengths": sorted({*known.key["lengths"], *untested})}
    missing = {str(n): _NO_ATTENTION for n in key["lengths"] if n not in scores}
    scored = TrackRun.from_json(known.to_json() | {"scores": scores, "key": key, "missing": missing})
    write_json(files.record, scored.to_json())
    return scored


_NO_ATTENTION = "attention keeps every token; not tested so far"


def _train(
    part: list[_Job], store: Store, fresh: bool, quiet: bool, left: float | None, advise: Callable[[float], None] | None
) -> float:
    """Train these side by side; the seconds that took."""
    ensembles = {job.name: job.ensemble for job in part}
    began = time.perf_counter()

    def words(name: str) -> str:
        seen = ensembles[name].history.get("accuracy", [])
        return loss_words(ensembles[name]) + (f"  right {max(seen[-1]):.3f}" if seen else "")

    train(
        ensembles,
        lambda name: store.files(name).checkpoint,
        fresh=fresh,
        quiet=quiet,
        look_every=max(1, part[0].ensemble.recipe.steps // 200),
        time_limit=left,
        look=_watch,
        advise=advise,
        words=words,
    )
    return time.perf_counter() - began


def _watch(ensemble: Ensemble) -> None:
    """Now and then: the accuracy of every seed at the last training length, into the history."""
    recipe, history = ensemble.recipe, ensemble.history
    mark = max(1, recipe.steps // _WATCHES)
    watched = history.setdefault("watched", [])
    if ensemble.step // mark > (watched[-1] // mark if watched else 0) or ensemble.step == recipe.steps:
        length = recipe.curriculum[-1]
        correct = _shares(ensemble, ensemble.task, 64, length)  # type: ignore[arg-type]
        watched.append(ensemble.step)
        values = [scaled_accuracy(row, (length,), ensemble.task.order)[length] for row in correct]  # type: ignore[attr-defined]
        history.setdefault("accuracy", []).append([round(v, 4) for v in values])


def _unfinished(job: _Job) -> str:
    """How far a run came that the time limit stopped."""
    recipe, seen = job.ensemble.recipe, job.ensemble.history.get("accuracy")
    words = f"stopped at the time limit, at update {job.ensemble.step} of {recipe.steps}"
    if seen:
        words += f"; then right at length {recipe.curriculum[-1]}: {' '.join(f'{v:.3f}' for v in seen[-1])}"
    return words


def _shares(ensemble: Ensemble, task: WordProblem, size: int, length: int) -> Tensor:
    """[R, length] on the CPU: the share of `size` words that each replica has right at each step."""
    segment = _SEGMENT if length <= _NEAR else _FAR_SEGMENT.get(torch.device(ensemble.device).type, 256)

    def prefill(tokens: Tensor, cache: Any) -> Any:
        return ensemble.call("prefill", tokens) if cache is None else ensemble.call("prefill", tokens, cache)

    return correct_in_passing(prefill, task, len(ensemble.seeds), size, length, ensemble.device, segment).cpu()


def _scores(job: _Job, lengths: tuple[int, ...], words: int) -> dict[int, list[float]]:
    """Scaled accuracy of every seed by length: one pass to 512 (or less), one over fewer words to the longest."""
    scores: dict[int, list[float]] = {}
    for chosen, size in (
        ([n for n in lengths if n <= _NEAR], words),
        ([n for n in lengths if n > _NEAR], min(words, _FAR_WORDS)),
    ):
        if chosen and not (job.mixer == "attention" and chosen[-1] > 4 * _NEAR):
            correct = _shares(job.ensemble, job.task, size, chosen[-1])
            rows = [scaled_accuracy(row, tuple(chosen), job.task.order) for row in correct]
            scores |= {n: [row[n] for row in rows] for n in chosen}
    return scores


def _finish(job: _Job, store: Store, lengths: tuple[int, ...], words: int, seconds: float, together: int) -> TrackRun:
    """Score a trained run and leave its record and weights."""
    ensemble = job.ensemble
    scores = _scores(job, lengths, words)
    result = TrackRun(
        group=job.group,
        order=job.task.order,
        mixer=job.mixer,
        label=MIXERS[job.mixer].label,
        recipe_name=job.recipe_name,
        about=RECIPES.about(job.recipe_name),
        recipe=plain(asdict(ensemble.recipe)),
        key=_key(job, lengths, words),
        seeds=list(ensemble.seeds),
        begun_seeds=list(ensemble.all_seeds),
        parameters=sum(p[0].numel() for p in ensemble.parameters.values()),
        train_seconds=round(seconds, 2),
        trained_together=together,
        history=ensemble.history,
        scores=scores,
        missing={str(n): _NO_ATTENTION for n in lengths if n not in scores},
        best=best_seed(scores),
        shuffled_objects=_questions(job),
        environment=environment(ensemble.device),
    )
    weights: dict[str, Any] = {
        "group": job.group,
        "mixer": job.mixer,
        "recipe": job.recipe_name,
        "seeds": list(ensemble.seeds),
    }
    weights |= {"best": result.best, "model": _model_options(job), "parameters": stacked_parameters(ensemble)}
    store.finish(job.name, result.to_json(), weights)
    return result


@torch.no_grad()
def _questions(job: _Job) -> dict[str, Any] | None:
    """For a shell game: the share of BIG-bench's questions that each seed answers; None where there are none."""
    if not job.group.startswith("shell"):
        return None
    questions = shuffled_objects.read_questions(len(job.task.group.labels[0]))
    if not questions:
        return {"right": None, "reason": "the package bigbench is not installed, or has no questions of this size"}
    x = shuffled_objects.words(job.task, questions).to(job.ensemble.device)
    said = job.ensemble(x.expand(len(job.ensemble.seeds), *x.shape))[:, :, -1].argmax(-1).cpu()
    right = [float(shuffled_objects.answers(job.task, questions, row).double().mean()) for row in said]
    return {"right": right, "questions": len(questions)}


def _model_options(job: _Job) -> dict[str, Any]:
    """Options of :func:`build_tracker` with which these weights can be read again."""
    skeleton: Any = job.ensemble.skeleton
    options = {name: value for name, value in RECIPES.read(job.recipe_name).model.items() if name != "start"}
    if hasattr(skeleton.mixer, "activate"):
        options["activate"] = tuple(sorted(skeleton.mixer.activate))
    return options


def load_replica(path: str | Path, seed: int | None = None) -> tuple[dict[str, Any], WordProblem, Tracker]:
    """What a file runs/NAME.pt of ``ckda track`` is, its task, and the model of this seed (None: the best one)."""
    saved = read_weights(path, "ckda track", ("group", "mixer", "recipe", "best", "model"))
    about = {name: x for name, x in saved.items() if name != "parameters"}
    chosen = about["seeds"][about["best"]] if seed is None else seed
    (place,) = places_of([chosen], saved, path)
    try:
        task = task_named(about["group"])
        model = build_tracker(about["mixer"], task, **about["model"])
        model.load_state_dict({name: p[place] for name, p in saved["parameters"].items()})
    except (RuntimeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} holds no weights of `ckda track`; give a file runs/NAME.pt") from error
    return about | {"seed": chosen}, task, model


def keep_replica(path: str | Path, folder: str | Path, seed: int | None = None) -> Path:
    """Leave one seed (None: the best one) of a file runs/NAME.pt in `folder` as NAME.seedN.pt; returns its path."""
    saved = read_weights(path, "ckda track", ("group", "mixer", "recipe", "best", "model"))
    chosen = saved["seeds"][saved["best"]] if seed is None else seed
    (place,) = places_of([chosen], saved, path)
    one = {name: p[place : place + 1].clone() for name, p in saved["parameters"].items()}
    out = Path(folder) / f"{Path(path).stem}.seed{chosen}.pt"
    save_weights(out, saved | {"seeds": [chosen], "best": 0, "parameters": one})
    return out
