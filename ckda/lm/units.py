"""Units of work of our own ladder: one trunk with its cooldowns, evaluation and inspection, trained in memory in minutes.

A unit trains at a constant rate; where a token budget needs it, the state is kept, the rate falls linearly to zero over the last
fifth of the budget, the model is evaluated and looked at, and the trunk goes on from the kept state. Nothing is written before
the unit is complete, and a unit is the smallest thing that is resumed. Units of one seed read the same tokens in the same order,
whatever their arm.
"""

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.layers.complex_kda import ComplexKDA
from ckda.lm.data import Sampler, TokenStore
from ckda.lm.inspect import SHARES, gate_use
from ckda.lm.models import config_of
from ckda.lm.parallel import alone
from ckda.lm.recipe import Recipe
from ckda.lm.train import NotFinite, Options, Trainer, prefetched
from ckda.models import ComplexKDAForCausalLM
from ckda.models.ladder import num_parameters
from ckda.record import environment, read_json, write_json

__all__ = [
    "KIND",
    "Conditions",
    "OutOfTime",
    "Unit",
    "done_in",
    "estimate",
    "new_record",
    "read_units",
    "run_all",
    "run_unit",
]

#: what a record says it is
KIND = "ckda lm units"

POINTS = 160  #: of a curve in a record

#: of the record results/lm/profile.json: tokens a second of 47M:ckda on an H200, and that model's sizes
MEASURED = {"tokens_per_second": 680_271.0, "layers": 12, "width": 384, "vocabulary": 50304}
FASTEST = 2.5e6  #: tokens a second that no estimate exceeds: an update is then bound by its launches
OVERHEAD = 8.0  #: seconds of a unit besides its updates: building, compiling, recording
LOOK = 1.5  #: seconds of an evaluation and inspection


class OutOfTime(Exception):
    """The time was over before a unit was."""


@dataclass(frozen=True)
class Unit:
    """One trunk and its cooldowns. Two units are the same where all of it is."""

    name: str
    model: str  #: SIZE:ARM
    rung: str  #: as tables call the size
    seed: int
    budgets: tuple[int, ...]  #: tokens, smallest first; a cooldown ends at each
    lr: float
    batch: int  #: sequences an update
    length: int = 2048
    warmup: int = 200  #: updates
    cooldown: float = 0.2  #: share of each budget
    changes: dict[str, Any] = field(default_factory=dict)  #: of the model's configuration
    label: str = ""  #: what is changed, in a study of factors
    programs: float = 0.0  #: share of the sequences that are programs (ckda.lm.programs)
    looks: int = 0  #: inspections of the trunk on the way, evenly spaced

    def __post_init__(self) -> None:
        if not self.budgets or list(self.budgets) != sorted(set(self.budgets)):
            raise ValueError(f"budgets is {self.budgets}; it must be token counts, smallest first")

    @property
    def arm(self) -> str:
        """What its model is compared as."""
        return self.model.partition(":")[2]

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update."""
        return self.batch * self.length

    @property
    def ends(self) -> list[tuple[int, int]]:
        """(update at which a cooldown leaves the trunk, update at which it ends) of every budget."""
        ends = [max(1, tokens // self.tokens_per_step) for tokens in self.budgets]
        return [(end - round(self.cooldown * end), end) for end in ends]

    @property
    def updates(self) -> int:
        """Of the trunk to its last branch, and of all branches."""
        return max(leave for leave, _ in self.ends) + sum(end - leave for leave, end in self.ends)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Unit":
        """From its JSON."""
        return cls(**values | {"budgets": tuple(values["budgets"])})

    def as_json(self) -> dict[str, Any]:
        """What is written, and what a record is recognised by."""
        return asdict(self) | {"budgets": list(self.budgets)}


@dataclass(frozen=True)
class Conditions:
    """On what and how units are trained."""

    data: str
    device: str = "cpu"
    backend: str = "auto"
    micro: int = 0
    dtype: str = "bf16"
    eval_tokens: int = 1 << 20
    look_sequences: int = 2
    look_sample: int = 8  #: tokens a sequence whose eigenvalues are taken
    tests: int = 128  #: programs a kind and length


def speed_of(unit: Unit) -> float:
    """Estimated tokens a second on an H200, from the record of 47M: its blocks' part scales with layers and width, the rest
    with vocabulary and width."""
    config = config_of(unit.model, **unit.changes)
    blocks = config.num_hidden_layers * config.hidden_size / (MEASURED["layers"] * MEASURED["width"])
    head = config.vocab_size * config.hidden_size / (MEASURED["vocabulary"] * MEASURED["width"])
    return min(FASTEST, MEASURED["tokens_per_second"] / (0.85 * blocks + 0.15 * head))


def estimate(unit: Unit) -> float:
    """Seconds that the unit takes on an H200."""
    looks = len(unit.budgets) + unit.looks
    return unit.updates * unit.tokens_per_step / speed_of(unit) + OVERHEAD + LOOK * looks


# A unit ---------------------------------------------------------------------------------------------------------------------


def run_unit(
    unit: Unit, at: Conditions, deadline: float = math.inf, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train, cool down, evaluate and inspect; everything that is known of the unit, as JSON.

    Raises OutOfTime where `deadline` (of time.monotonic) comes first, NotFinite where a loss is no number.
    """
    began = time.monotonic()
    trunk = Recipe(
        steps=unit.ends[-1][1],
        length=unit.length,
        batch=unit.batch,
        micro=at.micro,
        lr=unit.lr,
        warmup=unit.warmup,
        schedule="constant",
        cooldown=unit.cooldown,
        seed=unit.seed,
        dtype=at.dtype,
        eval_tokens=at.eval_tokens,
    )
    config = config_of(unit.model, backend=at.backend, **unit.changes)
    world = alone(at.device)
    trainer = Trainer(lambda: ComplexKDAForCausalLM(config), at.data, trunk, Path(at.data), world, Options())
    questions = _mix(trainer, unit, at)
    journal = Journal(unit.tokens_per_step)
    cells, looked = [], [_look(trainer, at)]
    stops = _stops(unit)
    for stop, budget in stops:
        _advance(trainer, stop, journal, deadline)
        if budget is None:
            looked.append(_look(trainer, at))
            continue
        kept = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        own = Journal(unit.tokens_per_step)
        end = dict(zip(unit.budgets, unit.ends, strict=True))[budget][1]
        trainer.recipe = replace(trunk, schedule="wsd", steps=end, branch=stop)
        _advance(trainer, end, own, deadline)
        cells.append(_cell(trainer, budget, own, at, questions))
        say(f"{unit.name}: {budget:,} tokens, held out {cells[-1]['held_out']:.4f}")
        for name, tensor in trainer.tensors().items():
            tensor.copy_(kept[name])
        trainer._set_count(stop)
        trainer.recipe = trunk
    cuda = world.device.type == "cuda"
    found = {
        "unit": unit.as_json(),
        "parameters": sum(p.numel() for p in trainer.plain.parameters()),
        "cells": cells,
        "curve": journal.curve(),
        "looks": [look for look in looked if look is not None],
        "tokens_per_second": journal.speed(),
        "memory_gib": round(torch.cuda.max_memory_allocated(world.device) / 2**30, 2) if cuda else None,
        "eager_because": trainer.eager_because,
        "seconds": round(time.monotonic() - began, 1),
    }
    del trainer
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def _stops(unit: Unit) -> list[tuple[int, int | None]]:
    """Where the trunk pauses, in order: (update, the budget that is cooled down to, or None for a look)."""
    last = unit.ends[-1][0]
    looks = [(round(last * (i + 1) / (unit.looks + 1)), None) for i in range(unit.looks)]
    branches = [(leave, budget) for (leave, _), budget in zip(unit.ends, unit.budgets, strict=True)]
    return sorted([*looks, *branches], key=lambda stop: (stop[0], stop[1] or 0))


class Journal:
    """Losses and gradient norms of updates, on the device until they are asked for; and the speed."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.steps: list[int] = []
        self.pairs: list[Tensor] = []
        self.spans: list[tuple[int, float]] = []

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """One update's."""
        self.steps.append(step)
        self.pairs.append(torch.stack([loss.detach().float(), norm.detach().float()]))

    def values(self) -> list[list[float]]:
        """[loss, norm] of every update, on the host; a value that is no number is a NotFinite."""
        found: list[list[float]] = torch.stack(self.pairs).cpu().tolist() if self.pairs else []
        for step, pair in zip(self.steps, found, strict=True):
            if not all(map(math.isfinite, pair)):
                raise NotFinite(f"update {step}: loss and gradient norm are {pair}")
        return found

    def curve(self) -> dict[str, list[float]]:
        """Means of the loss and means and maxima of the gradient norm over at most POINTS pieces."""
        found = self.values()
        size = max(1, -(-len(found) // POINTS))
        pieces = [found[i : i + size] for i in range(0, len(found), size)]
        ends = [self.steps[min(i + size, len(found)) - 1] for i in range(0, len(found), size)]
        return {
            "tokens": [end * self.tokens_per_step for end in ends],
            "loss": [round(sum(pair[0] for pair in piece) / len(piece), 4) for piece in pieces],
            "grad_norm": [round(sum(pair[1] for pair in piece) / len(piece), 4) for piece in pieces],
            "grad_norm_max": [round(max(pair[1] for pair in piece), 4) for piece in pieces],
        }

    def speed(self) -> float | None:
        """Tokens a second over the spans but the first, which compiles, where there are others."""
        spans = self.spans[1:] or self.spans
        seconds = sum(spent for _, spent in spans)
        return round(sum(updates for updates, _ in spans) * self.tokens_per_step / seconds) if seconds else None


def _advance(trainer: Trainer, until: int, journal: Journal, deadline: float, every: int = 25) -> None:
    """Updates up to number `until`; the clock is read every few of them."""
    cuda = trainer.world.device.type == "cuda"
    with prefetched(trainer.batches(trainer.step, until), trainer.world.device) as batches:
        while trainer.step < until:
            began, first = time.monotonic(), trainer.step
            while trainer.step < min(until, first + every):
                loss, norm = trainer.update(batches)
                journal.add(trainer.step, loss.clone(), norm)
            if cuda:
                torch.cuda.synchronize()
            journal.spans.append((trainer.step - first, time.monotonic() - began))
            if time.monotonic() > deadline:
                raise OutOfTime


def _cell(trainer: Trainer, budget: int, own: Journal, at: Conditions, questions: Any) -> dict[str, Any]:
    """What is known at the end of a cooldown."""
    last = own.values()[-20:]
    cell: dict[str, Any] = {
        "tokens": trainer.step * trainer.recipe.tokens_per_step,
        "budget": budget,
        "training_loss": round(sum(loss for loss, _ in last) / len(last), 5) if last else None,
        "held_out": round(evaluate_on(trainer, "held_out"), 6),
        "look": _look(trainer, at),
    }
    if "out_of_domain" in trainer.train_data.store.index["splits"]:
        cell["out_of_domain"] = round(evaluate_on(trainer, "out_of_domain"), 6)
    if questions is not None:
        from ckda.lm.programs import score

        with _as_trained(trainer):
            cell["programs"] = score(trainer.plain, questions)
    return cell


def evaluate_on(trainer: Trainer, split: str) -> float:
    """The mean loss over the first `eval_tokens` of a split."""
    before = trainer.eval_data
    trainer.eval_data = Sampler(
        TokenStore(trainer.train_data.store.folder, split), trainer.recipe.length, 0, shuffle=False
    )
    try:
        return trainer.evaluate()
    finally:
        trainer.eval_data = before


def _look(trainer: Trainer, at: Conditions) -> dict[str, Any] | None:
    """Shares of negative gates, of beta above 1 and of complex transitions, and medians, by layer; None without a state."""
    if not any(isinstance(block.mixer, ComplexKDA) for block in trainer.plain.model.layers):
        return None
    store = TokenStore(trainer.train_data.store.folder, "held_out")
    length = min(trainer.recipe.length, len(store))
    count = min(at.look_sequences, len(store) // length)
    rows = [torch.from_numpy(store.read(i * length, length))[None].to(at.device) for i in range(count)]
    with _as_trained(trainer):
        layers = gate_use(trainer.plain, rows, at.look_sample)
    shares = {name: [round(getattr(layer, name), 5) for layer in layers] for name in SHARES}
    medians = {
        "alpha_median": [round(layer.alpha_quantiles[2], 4) for layer in layers],
        "beta_median": [round(layer.beta_quantiles[2], 4) for layer in layers],
    }
    tokens = trainer.step * trainer.recipe.tokens_per_step
    return {"tokens": tokens, "layers": [layer.layer for layer in layers]} | shares | medians


def _as_trained(trainer: Trainer) -> AbstractContextManager[Any]:
    """The precision of the training, so that no other kernels are compiled for looking and asking."""
    half = trainer.recipe.dtype == "bf16"
    return torch.autocast(trainer.world.device.type, torch.bfloat16) if half else nullcontext()


def _mix(trainer: Trainer, unit: Unit, at: Conditions) -> Any:
    """Mix programs into the text where the unit asks for them; the questions that are asked at the end, or None."""
    if not unit.programs:
        return None
    from ckda.lm.programs import Mixed, program_tokens, questions

    wanted = int(1.05 * unit.programs * unit.budgets[-1])
    folder = program_tokens(Path(at.data), wanted, unit.seed)
    store = TokenStore(folder)
    programs = Sampler(store, unit.length, unit.seed)
    trainer.train_data = Mixed(trainer.train_data, programs, unit.programs)  # type: ignore[assignment]
    return questions(Path(at.data) / "tokenizer.json", at.tests)


# Many units -----------------------------------------------------------------------------------------------------------------


def read_units(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The units of record files, or of all of them in folders; each unit once, the first that is met.

    A folder's other files are passed over; a file that is named must be a record.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in map(Path, paths):
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        for file in inside:
            record = read_json(file)
            if not isinstance(record, dict) or record.get("what") != KIND:
                if path.is_dir():
                    continue
                raise ValueError(f"{file} is no record of units")
            for one in record["units"]:
                about = {name: record[name] for name in ("data", "environment") if name in record}
                found.setdefault(_key(one["unit"]), about | one)
    return list(found.values())


def _key(unit: dict[str, Any]) -> str:
    return repr(sorted(unit.items(), key=lambda item: item[0]))


def done_in(units: Sequence[Unit], records: Sequence[dict[str, Any]]) -> set[str]:
    """Names of the units that the records hold; a unit of the same name that differs is a ValueError."""
    known = {one["unit"]["name"]: one["unit"] for one in records}
    done = set()
    for unit in units:
        if unit.name in known:
            mine = unit.as_json()
            differ = [name for name, value in mine.items() if known[unit.name].get(name) != value]
            if differ:
                raise ValueError(
                    f"the record has another unit {unit.name}: {', '.join(differ)} differ; use another folder"
                )
            done.add(unit.name)
    return done


def new_record(at: Conditions) -> dict[str, Any]:
    """An empty record of one call."""
    index = TokenStore(at.data).index
    shards = [shard["sha256"] for shard in index["splits"]["train"]]
    return {
        "what": KIND,
        "data": {"tokens": index["tokens"], "train_sha256": shards},
        "environment": environment(at.device),
        "failed": [],
        "units": [],
    }


def run_all(
    units: Sequence[Unit],
    at: Conditions,
    out: Path,
    have: Sequence[dict[str, Any]] = (),
    limit: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Path | None, list[str]]:
    """Run the units that no record holds until the time is over; one record file of this call, rewritten after every unit.

    A unit that would not fit into what is left of `limit` seconds is passed over. Returns the file (None: nothing was run) and the
    names of the units that are left. SIGTERM and Ctrl-C end the call; the unit under way is lost, what was finished is not.
    """
    began = time.monotonic()
    done = done_in(units, have)
    todo, left, pace = [unit for unit in units if unit.name not in done], [], Pace()
    record, file = new_record(at), None
    with _terminated():
        for number, unit in enumerate(todo, 1):
            wanted = pace.seconds(unit)
            if time.monotonic() - began + wanted > limit:
                left.append(unit.name)
                continue
            say(f"{number}/{len(todo)} {unit.name}, about {wanted:.0f} s")
            try:
                found = run_unit(unit, at, began + limit, say)
            except OutOfTime:
                say(f"{unit.name}: the time was over; it will be begun again")
                left.append(unit.name)
                continue
            except NotFinite as error:
                say(f"{unit.name} failed: {error}")
                record["failed"].append({"unit": unit.name, "why": str(error)})
                left.append(unit.name)
            else:
                pace.learn(unit, found["seconds"])
                record["units"].append(found)
            file = file or _free_name(out)
            write_json(file, record)
    return file, left


class Pace:
    """How long units take here, against the estimate: of the same model where one ran, else of any."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}

    def learn(self, unit: Unit, seconds: float) -> None:
        """What one took."""
        self.ratios[unit.model] = self.ratios[""] = seconds / estimate(unit)

    def seconds(self, unit: Unit) -> float:
        """What the next will take."""
        return estimate(unit) * self.ratios.get(unit.model, self.ratios.get("", 1.0))


def _free_name(out: Path) -> Path:
    """A name of this process alone: calls side by side may begin their records in the same second."""
    stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    names = (out / f"units-{stamp}{suffix}.json" for suffix in ("", *(f"-{i}" for i in range(1, 100))))
    return next(name for name in names if not name.exists())


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that what is open is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def total_parameters(unit: Unit) -> int:
    """Of the unit's model, counted without memory for it."""
    return num_parameters(config_of(unit.model, **unit.changes))
