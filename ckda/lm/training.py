"""One run of training, from a configuration to a result: tokens checked, resumed or begun, trained, exported, recorded."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckda.command import make_folder, pick_device, plural
from ckda.lm import checkpoint, memory
from ckda.lm.data import TokenStore
from ckda.lm.figures import training_figure
from ckda.lm.log import Row
from ckda.lm.memory import bytes_words
from ckda.lm.models import config_of, export, load_model
from ckda.lm.parallel import World, join
from ckda.lm.prepare import load_tokenizer
from ckda.lm.recipe import Recipe
from ckda.lm.train import HOW, Options, Trainer
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ladder
from ckda.record import differing, environment, read_json, write_bytes, write_json

__all__ = ["TrainResult", "Training", "recipe_for", "run"]

#: without another word, one update in so many warms up, and no more than the size's own number
WARMUP = 20

#: what a toy trains with, unless it is told otherwise: an update takes a moment on a CPU
TINY_RECIPE: dict[str, Any] = {"length": 256, "batch": 8, "eval_tokens": 1 << 14}

Show = Callable[[Row], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """Which model is trained on which tokens by which recipe, how, and where it goes."""

    model: str  #: SIZE:ARM of the ladder, or a JSON configuration
    data: str  #: a folder of ``ckda lm prepare``
    out: str
    recipe: Recipe
    options: Options = field(default_factory=Options)
    device: str = "auto"
    backend: str = "auto"  #: of the operator
    branch: str | None = None  #: a checkpoint of a trunk to cool down from
    init_from: str | None = None  #: a trained model whose weights are the start
    fresh: bool = False  #: start anew, whatever is in `out`
    verify: bool = True  #: compare the tokens with their checksums first

    def save(self, path: str | Path) -> Path:
        """As JSON, for another process or another day."""
        options = {name: value for name, value in asdict(self.options).items() if value != float("inf")}
        return write_json(path, asdict(self) | {"options": options})

    @classmethod
    def load(cls, path: str | Path) -> "Training":
        """What :meth:`save` wrote."""
        values = read_json(path)
        try:
            nested = {"recipe": Recipe.of(values["recipe"]), "options": Options(**values["options"])}
            return cls(**values | nested)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path} is no training.json of ckda lm train: {error}") from error


@dataclass(frozen=True)
class TrainResult:
    """How a run went; the file train.json."""

    model: str
    parameters: int
    stopped: str | None  #: why it ended before its time; None: it is complete
    step: int
    recipe: dict[str, Any]
    key: dict[str, Any]  #: what a continuation must agree on
    config: dict[str, Any]
    options: dict[str, Any]
    recorded: bool
    eager_because: str | None
    ranks: int
    flops_per_token: float | None
    seconds: float
    updates: int  #: of this call
    loss: float | None  #: mean of the last ten updates
    held_out_loss: float | None
    tokens_per_second: float | None  #: median over the second half of the log lines (the first compiles kernels)
    mfu: float | None
    memory_gib: float | None
    log: tuple[Row, ...]
    environment: dict[str, Any]

    @property
    def validations(self) -> list[Row]:
        """The rows with a held-out loss."""
        return [row for row in self.log if row.held_out_loss is not None]

    def as_json(self, log: bool = True) -> dict[str, Any]:
        """As train.json has it."""
        values: dict[str, Any] = {"what": "ckda lm train"} | asdict(self) | {"log": [row.as_json() for row in self.log]}
        return values if log else {name: value for name, value in values.items() if name != "log"}

    @classmethod
    def load(cls, path: Path) -> "TrainResult":
        """From train.json; a file of something else is a ValueError."""
        values = read_json(path)
        try:
            values["log"] = tuple(Row(**row) for row in values["log"])
            return cls(**{name: value for name, value in values.items() if name != "what"})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path} is no result of ckda lm train: {error}") from error


def recipe_for(
    model: str,
    device: str = "cpu",
    *,
    tokens: int | None = None,
    steps: int | None = None,
    branch: str | None = None,
    **changes: Any,
) -> Recipe:
    """The recipe: what `changes` say (None says nothing), else the trunk's where one is left, else the size's own.

    Example:
        >>> recipe = recipe_for("47M:ckda", tokens=10**9, batch=64)
        >>> recipe.steps, recipe.batch, recipe.lr, recipe.warmup, recipe.schedule
        (3814, 64, 0.002, 191, 'wsd')
    """
    rung = ladder.CONFIGS.get(model.partition(":")[0])
    own: dict[str, Any] = {"dtype": "bf16" if device == "cuda" else "fp32"}
    if rung is not None:
        own |= {"length": rung.context, "batch": rung.batch_sequences[0], "lr": rung.learning_rate[0]}
        own |= {"warmup": rung.warmup_steps, "schedule": rung.schedule}
    elif model.partition(":")[0] == "tiny":
        own |= TINY_RECIPE
    else:
        own |= _sizes_of_run(Path(model))
    if branch is not None:
        trunk = checkpoint.read_manifest(Path(branch), verify=False)
        own |= {name: trunk["recipe"][name] for name in ("length", "batch", "lr", "warmup")}
        own |= {"schedule": "wsd", "branch": trunk["step"]}
    said = {name: value for name, value in changes.items() if value is not None}
    warmup = said.pop("warmup", None)
    recipe = Recipe(steps=1, **own | said)
    if tokens is not None and steps is None:
        steps = max(1, tokens // recipe.tokens_per_step)
    elif steps is None and recipe.branch is not None:
        steps = round(recipe.branch / (1 - recipe.cooldown))  # it leaves its trunk at 1 - cooldown of the budget
    elif steps is None or tokens is not None:
        raise ValueError("give either --tokens or --steps")
    if warmup is None:
        warmup = recipe.warmup if branch else min(recipe.warmup, -(-steps // WARMUP))
    elif 0 < warmup < 1:
        warmup = round(warmup * steps)
    if warmup >= steps > 1:
        raise ValueError(
            f"--warmup {warmup} of {steps} updates never reaches the learning rate; give fewer, or a share as 0.05"
        )
    return replace(recipe, steps=steps, warmup=int(warmup))


def _sizes_of_run(model: Path) -> dict[str, Any]:
    """Length, batch and validation of the run that `model` is, or is the model or a checkpoint of; of a model alone its length."""
    owner = model.parent if model.name == "model" else model.parent.parent
    for folder in (model, owner):
        if model.is_dir() and (folder / "training.json").is_file():
            recipe = Training.load(folder / "training.json").recipe
            return {name: getattr(recipe, name) for name in ("length", "batch", "eval_tokens")}
    if (model / "config.json").is_file():
        longest = read_json(model / "config.json").get("max_position_embeddings", Recipe.length)
        return {"length": min(longest, Recipe.length)}
    return {}


def run(
    training: Training, show: Show = lambda row: None, say: Say = lambda text: None, world: World | None = None
) -> TrainResult | None:
    """Train, resume or find complete what is asked for. The result is the main rank's; the others have None.

    `show(row)` sees every log line, `say(text)` what happens besides. Without a `world` the ranks that torchrun started are joined.
    """
    if world is None:
        world = join(pick_device(training.device))
        try:
            return run(training, show, say, world)
        finally:
            world.leave()
    out, config = Path(training.out), config_of(training.model, backend=training.backend)
    if not training.fresh and (known := _known(out, training.recipe, config)) is not None:
        if world.main:
            say(f"{out} is complete: this is its result, nothing is trained (--fresh trains anew)")
        return known if world.main else None
    store = TokenStore(training.data)
    _check_memory(training, config, world)
    if training.verify and world.main:
        store.verify()
    trainer = Trainer(_builder(config, training, say), training.data, training.recipe, out, world, training.options)
    if world.main:
        _check_room(out, trainer)
        make_folder(training.out)
    world.wait()
    tokenizer = store.folder / "tokenizer.json"
    if world.main:
        training.save(out / "training.json")
    if world.main and tokenizer.is_file():
        write_bytes(out / "tokenizer.json", tokenizer.read_bytes())
    _begin(trainer, training, say if world.main else lambda text: None)
    if world.main:
        say(_opening(training, trainer, len(store)))
        if (note := _unused(config, store.index["vocab_size"])) is not None:
            say(note)
    began, first = time.perf_counter(), trainer.step
    outcome = trainer.run(show if world.main else lambda row: None)
    seconds = time.perf_counter() - began
    weights = trainer.weights() if outcome.stopped is None else {}
    if not world.main:
        return None
    if outcome.stopped is None:
        export(out / "model", config, weights, load_tokenizer(str(tokenizer)) if tokenizer.is_file() else None)
    result = TrainResult(
        model=training.model,
        parameters=sum(p.numel() for p in trainer.plain.parameters()),
        stopped=outcome.stopped,
        step=outcome.step,
        recipe=asdict(training.recipe),
        key=training.recipe.key(),
        config=json.loads(config.to_json_string()),
        options={k: v for k, v in asdict(training.options).items() if v != float("inf")},
        recorded=trainer.recorded,
        eager_because=trainer.eager_because,
        ranks=world.size,
        flops_per_token=trainer.flops_per_token,
        seconds=round(seconds, 2),
        updates=outcome.step - first,
        **summary(outcome.rows),
        log=tuple(thinned(outcome.rows)),
        environment=environment(world.device),
    )
    write_json(out / "train.json", result.as_json())
    training_figure(result).savefig(out / "loss.png", dpi=160)
    return result


def _opening(training: Training, trainer: Trainer, tokens: int) -> str:
    """The first line: what is trained, on how much, and how often it sees each token."""
    recipe, size = training.recipe, sum(p.numel() for p in trainer.plain.parameters())
    asked = recipe.steps * recipe.tokens_per_step
    return (
        f"{training.model}, {size / 1e6:.2f} M parameters: {plural(recipe.steps, 'update')} of {recipe.batch} x {recipe.length} "
        f"tokens, {asked:,} in all, {asked / tokens:.2g} epochs of the {tokens:,} there are"
    )


def _unused(config: ComplexKDAConfig, entries: int) -> str | None:
    """A sentence where most of a model's vocabulary is never met."""
    if config.vocab_size < 4 * entries:
        return None
    idle = (config.vocab_size - entries) * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return (
        f"the tokenizer has {entries:,} entries and the model {config.vocab_size:,}: {idle / 1e6:.1f} M parameters are of tokens "
        "that never come; a larger vocabulary (`ckda lm prepare --tokenizer train:32768`) or a smaller model fits better"
    )


def _check_memory(training: Training, config: ComplexKDAConfig, world: World) -> None:
    """One update fits into what the device has free; else it is refused before anything is made."""
    recipe, options = training.recipe, training.options
    micro, parts = recipe.micro_batches(max(1, world.size // options.context))
    memory.check(
        training.model,
        config,
        sequences=micro * parts,
        micro=micro,
        length=recipe.length // options.context,
        device=world.device,
        ranks=world.size,
        dtype=recipe.dtype,
        checkpointing=options.checkpointing,
    )


def _known(out: Path, recipe: Recipe, config: ComplexKDAConfig) -> TrainResult | None:
    """The result of an equal run that is already complete; a complete run of something else is not to be replaced."""
    try:
        known = TrainResult.load(out / "train.json")
    except (OSError, ValueError):
        return None
    if known.stopped is not None or not (out / "model").is_dir():
        return None
    differ = differing(recipe.key(), known.key) + differing(json.loads(config.to_json_string()), known.config, but=HOW)
    if differ:
        raise ValueError(
            f"{out} holds a complete run of another kind: {', '.join(differ)}; choose another --out, "
            "or --fresh to replace it"
        )
    return known


def _builder(config: ComplexKDAConfig, training: Training, say: Say) -> Callable[[], Any]:
    """What makes the model: new weights, or those of `init_from`."""
    if training.init_from is None:
        if Path(training.model).is_dir():
            say(f"new weights in the shape of {training.model}; --init-from {training.model} would start from its own")
        return lambda: ComplexKDAForCausalLM(config)
    weights = load_model(training.init_from).state_dict()
    say(f"starting from the weights of {training.init_from}")

    def build() -> Any:
        model = ComplexKDAForCausalLM(config)
        own = model.state_dict()
        odd = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
        if odd or len(own) != len(weights):
            raise ValueError(
                f"{training.init_from} is of another model than {training.model}: {', '.join(odd[:3])} differ"
            )
        model.load_state_dict(weights)
        return model

    return build


def _check_room(out: Path, trainer: Trainer) -> None:
    """Weights and both moments, twice while a checkpoint takes another's place, and the model at the end."""
    need = 28 * sum(p.numel() for p in trainer.plain.parameters())
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise ValueError(f"{out} has {bytes_words(free)} free; checkpoints and the model need {bytes_words(need)}")


def _begin(trainer: Trainer, training: Training, say: Say) -> None:
    """From the newest checkpoint, from the trunk's, or from the start."""
    folder = trainer.out / "checkpoints"
    if training.fresh and trainer.world.main:
        shutil.rmtree(folder, ignore_errors=True)
    trainer.world.wait()
    path = checkpoint.newest(folder, trainer.world)
    if path is not None:
        trainer.load(path)
        say(f"resuming at update {trainer.step}")
    elif training.branch is not None:
        trainer.branch(Path(training.branch))
        say(f"cooling down from update {trainer.step} of {training.branch}")


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """The last losses, and speed, MFU and memory over the second half of the log lines."""
    losses = [row.loss for row in rows if row.loss is not None][-10:]
    held = [row.held_out_loss for row in rows if row.held_out_loss is not None]
    late = rows[len(rows) // 2 :]
    speeds = sorted(row.tokens_per_second for row in late if row.tokens_per_second is not None)
    mfus = sorted(row.mfu for row in late if row.mfu is not None)
    return {
        "loss": sum(losses) / len(losses) if losses else None,
        "held_out_loss": held[-1] if held else None,
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "mfu": mfus[len(mfus) // 2] if mfus else None,
        "memory_gib": max((row.memory_gib for row in rows if row.memory_gib is not None), default=None),
    }


def thinned(rows: Sequence[Row], most: int = 2000) -> list[Row]:
    """All validations and at most about `most` updates, evenly spaced and with the last one; log.jsonl has them all.

    Example:
        >>> [row.step for row in thinned([Row(s, s, loss=1.0) for s in range(1, 8)], most=3)]
        [1, 4, 7]
    """
    updates = [row for row in rows if row.loss is not None]
    kept = {row.step for row in [*updates[:: max(1, -(-len(updates) // most))], *updates[-1:]]}
    return [row for row in rows if row.loss is None or row.step in kept]
