"""The training loop: one readable function over one device or many.

An update reads its samples by number (:class:`ckda.lm.data.Sampler`), so a run is the same whatever interrupts it and however
many devices share it. The loop never waits for the device: batches are read and pinned by a thread, losses stay on the device
until a log line is due, and then travel to the host while the next updates run. On one GPU the forward and backward passes are
recorded and replayed (:mod:`ckda.lm.replay`).
"""

import json
import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ckda.command import plural
from ckda.lm import checkpoint
from ckda.lm.data import Sampler, TokenStore
from ckda.lm.log import Log, NotFinite, Row
from ckda.lm.parallel import World, blocks_of, share_time, spread
from ckda.lm.recipe import Recipe
from ckda.lm.replay import Replay
from ckda.models.ladder import flops_per_token
from ckda.models.loss import IGNORED, next_token_labels
from ckda.ops.context import Context
from ckda.record import differing

__all__ = ["NotFinite", "Options", "Outcome", "Trainer", "make_batch", "own_part", "prefetched", "why_eager"]

#: why a run may stop before its end; where ranks differ, the later in this list counts
REASONS = (None, "time limit", "SIGUSR1", "SIGTERM", "SIGINT")

#: what a configuration says about how a model is run, not which one it is
HOW = ("backend", "loss_chunk", "transformers_version", "use_cache", "dtype", "_name_or_path")


@dataclass(frozen=True)
class Options:
    """How a run is carried out; none of it changes what is computed beyond rounding."""

    parallel: str = "auto"  #: "auto" | "none" | "ddp" | "fsdp"
    gather: str = "fp32"  #: the dtype FSDP moves weights in: "fp32" | "bf16"
    context: int = 1  #: neighbouring ranks that share the time axis of their sequences
    compile: bool = False  #: every layer through torch.compile
    graph: bool = True  #: record forward and backward as a CUDA graph where that can be, see :func:`why_eager`
    checkpointing: bool = False  #: recompute activations in the backward pass
    keep: int = 2  #: checkpoints that stay; 0: all
    time_limit: float = math.inf  #: seconds, after which the run saves and ends
    tensorboard: bool = False  #: also write the log for TensorBoard


@dataclass
class Outcome:
    """How a call of :meth:`Trainer.run` ended."""

    stopped: str | None  #: one of REASONS; None: complete
    step: int
    rows: list[Row] = field(default_factory=list)


class Trainer:
    """A model, its data and its recipe, trained, checkpointed and resumed.

    `build` makes the model; it is called under the recipe's seed on every rank. The model takes `input_ids` [B, T], `labels`
    [B, T] (shifted inside) and, for separate documents, `cu_seqlens`, and returns an object with `.loss`.

    Example:
        >>> import tempfile
        >>> from ckda.lm.tiny import tiny_tokens
        >>> from ckda.lm.models import config_of
        >>> from ckda.models import ComplexKDAForCausalLM
        >>> folder = Path(tempfile.mkdtemp())
        >>> recipe = Recipe(steps=2, length=16, batch=2, warmup=1, dtype="fp32", eval_tokens=64)
        >>> world = World(0, 1, torch.device("cpu"))
        >>> build = lambda: ComplexKDAForCausalLM(config_of("tiny:ckda"))
        >>> trainer = Trainer(build, tiny_tokens(folder / "tokens"), recipe, folder / "run", world)
        >>> outcome = trainer.run()
        >>> outcome.step, [sorted(row.as_json())[0] for row in outcome.rows]
        (2, ['held_out_loss', 'grad_norm', 'grad_norm', 'held_out_loss'])
    """

    def __init__(
        self,
        build: Callable[[], Any],
        data: str | Path,
        recipe: Recipe,
        out: str | Path,
        world: World,
        options: Options = Options(),  # noqa: B008 - frozen
    ):
        self.recipe, self.out, self.world, self.options = recipe, Path(out), world, options
        self.context = share_time(world, options.context)
        self.readers, self.reader = world.size // options.context, world.rank // options.context
        self.micro, self.num_micro = recipe.micro_batches(self.readers)
        if recipe.length % options.context:
            raise ValueError(f"context is {options.context}; it must divide the length of a sequence, {recipe.length}")
        self.train_data = Sampler(TokenStore(data), recipe.length, recipe.seed, recipe.documents)
        held_out = TokenStore(data, "held_out")
        if len(held_out) < recipe.length and world.main:
            print(
                f"no validation: {data} holds out {plural(len(held_out), 'token')}, fewer than one sequence of {recipe.length}; "
                "a shorter --length, or `ckda lm prepare --held-out 0.1`, makes room for one",
                file=sys.stderr,
            )
        self.eval_data = (
            Sampler(held_out, recipe.length, 0, recipe.documents, shuffle=False)
            if len(held_out) >= recipe.length
            else None
        )
        devices = [world.device] if world.device.type == "cuda" else []
        if devices:
            torch.cuda.init()  # memory statistics need a context
            torch.cuda.reset_peak_memory_stats(world.device)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(recipe.seed)
            with world.device:
                self.plain: Any = build().to(world.device, torch.float32).train()
        vocab = getattr(self.plain.config, "vocab_size", None)
        if vocab is not None and vocab < self.train_data.store.index["vocab_size"]:
            raise ValueError(
                f"the model has {vocab} tokens, but the data's tokenizer {self.train_data.store.index['vocab_size']}"
            )
        if options.checkpointing:
            self.plain.gradient_checkpointing_enable()
        self.flops_per_token = _flops(self.plain, recipe.length)
        how = options.parallel if options.parallel != "auto" else ("none" if world.size == 1 else "ddp")
        if (how == "none") != (world.size == 1):
            raise ValueError(
                f"parallel is {how!r} with {world.size} ranks; it may be 'auto', 'ddp' or 'fsdp' with several"
            )
        if options.compile:
            for block in blocks_of(self.plain):
                block.compile()
        self.model, self.sync = spread(self.plain, world, how, options.gather)
        self.named = dict(self.plain.named_parameters())
        self.optimizer = _adamw(self.named, recipe, world.device)
        self._eager = why_eager(options, recipe, world.device, how)
        self._replay = None if self._eager else Replay(self._pass, self.named.values(), world.device)
        self.step = 0

    # State ------------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds: weights and both moments, by name."""
        out = {f"model/{name}": p.detach() for name, p in self.named.items()}
        for name, p in self.named.items():
            state = self.optimizer.state[p]
            out |= {f"mean/{name}": state["exp_avg"], f"square/{name}": state["exp_avg_sq"]}
        return out

    def _set_count(self, step: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(float(step))
        self.step = step

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        about = {
            "recipe": asdict(self.recipe),
            "key": self.recipe.key(),
            "config": self._config(),
            "data": self._data_key(),
        }
        folder = self.out / "checkpoints"
        return checkpoint.save(folder, self.step, self.tensors(), about, self.world, self.options.keep)

    def _config(self) -> dict[str, Any]:
        return _jsonable(self.plain.config.to_dict())

    def _data_key(self) -> list[str]:
        return [shard["sha256"] for shard in self.train_data.store.shards]

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of this very run."""
        manifest = checkpoint.read_manifest(path, verify=False)
        if manifest["key"] != self.recipe.key():
            differ = differing(self.recipe.key(), manifest["key"])
            raise ValueError(f"{path} is of another run: {', '.join(differ)}; choose another --out, or --fresh")
        self._load(path, manifest)

    def branch(self, path: Path) -> None:
        """Leave the trunk at one of its checkpoints: same weights, moments, data order; the recipe's own cooldown."""
        manifest = checkpoint.read_manifest(path, verify=False)
        theirs = Recipe.of(manifest["recipe"]).trunk_key()
        differ = differing(self.recipe.trunk_key(), theirs)
        if differ:
            raise ValueError(f"{path} cannot be branched from: {', '.join(differ)}")
        if self.recipe.branch != manifest["step"]:
            raise ValueError(f"branch is {self.recipe.branch}, but {path} is of update {manifest['step']}")
        self._load(path, manifest)

    def _load(self, path: Path, manifest: dict[str, Any]) -> None:
        if manifest["data"] != self._data_key():
            raise ValueError(f"{path} was trained on other tokens than {self.train_data.store.folder}")
        differ = differing(self._config(), manifest["config"], but=HOW)
        if differ:
            raise ValueError(f"{path} is of another model: {', '.join(differ)}; choose another --out, or --fresh")
        checkpoint.load(path, self.tensors(), self.world)
        self._set_count(manifest["step"])

    # Batches ----------------------------------------------------------------------------------------------------------

    def numbers(self, step: int, part: int) -> np.ndarray:
        """The sample numbers of this rank's micro-batch `part` of update `step`; a context's ranks have the same."""
        first = step * self.recipe.batch + (part * self.readers + self.reader) * self.micro
        return np.arange(first, first + self.micro)

    def batches(self, first: int, last: int) -> Iterator[dict[str, Any]]:
        """This rank's micro-batches of the updates from `first` to before `last`, on the CPU."""
        for step in range(first, last):
            total = self.train_data.num_targets(np.arange(self.recipe.batch) + step * self.recipe.batch)
            for part in range(self.num_micro):
                numbers = self.numbers(step, part)
                share = self.train_data.num_targets(numbers) / total
                yield own_part(make_batch(self.train_data, numbers, share), self.context)

    # The loop ---------------------------------------------------------------------------------------------------------

    def forward(self, batch: dict[str, Any], **options: Any) -> Tensor:
        """The mean loss of a micro-batch."""
        inputs = {k: v.to(self.world.device, non_blocking=True) for k, v in batch.items() if k != "share"}
        if self.context is not None:
            options["context"] = self.context
        half = self.recipe.dtype == "bf16"
        with torch.autocast(self.world.device.type, torch.bfloat16) if half else nullcontext():
            return self.model(**inputs, **options).loss

    def _pass(self, batch: dict[str, Any]) -> Tensor:
        """Forward and backward of a micro-batch: its gradients are added, and its part of the mean loss comes back."""
        own = self.forward(batch)
        (own * (batch["share"] * self.world.size)).backward()
        return own.detach().float() * batch["share"]

    @property
    def recorded(self) -> bool:
        """Whether forward and backward are replays of a CUDA graph by now."""
        return self._replay is not None and self._replay.recorded

    @property
    def eager_because(self) -> str | None:
        """Why forward and backward are not, or not yet, recorded; None where they are."""
        if self._replay is None:
            return self._eager
        return None if self.recorded else self._replay.error or "too few updates"

    def update(self, batches: Iterator[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """One update; this rank's part of the mean loss, and the gradient's norm. Nothing is read back."""
        loss = torch.zeros((), device=self.world.device)
        for part in range(self.num_micro):
            batch = next(batches)
            with self.sync(part == self.num_micro - 1):
                loss += self._pass(batch) if self._replay is None else self._replay(batch, first=part == 0)
        norm = nn.utils.clip_grad_norm_(self.named.values(), self.recipe.clip, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * self.recipe.factor(self.step)
        self.optimizer.step()
        if not self.recorded:  # a recording writes its gradients anew
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def run(self, show: Callable[[Row], None] = lambda row: None) -> Outcome:
        """Train to the recipe's end, or until a signal, the time limit or a loss that is no number.

        `show(row)` is called for every log line on the main rank.
        """
        recipe, began, stopped = self.recipe, time.perf_counter(), None
        with (
            closing(Log(self, show)) as log,
            _signals() as signalled,
            prefetched(self.batches(self.step, recipe.steps), self.world.device) as batches,
        ):
            if self.step == 0:
                self._validate(log)
            while self.step < recipe.steps and stopped is None:
                lr = recipe.lr * recipe.factor(self.step)
                log.add(self.step + 1, lr, *self.update(batches))
                late = time.perf_counter() - began > self.options.time_limit
                last = self.step == recipe.steps
                stopped = self._agree(None if last else signalled() or ("time limit" if late else None))
                if log.is_due(self.step):
                    log.send()
                if last or self.step % recipe.eval_every == 0:
                    self._validate(log)
                if stopped or last or self.step % recipe.save_every == 0:
                    with log.paused():
                        self.save()
            log.read_all()
        return Outcome(stopped, self.step, log.rows)

    def _agree(self, reason: str | None) -> str | None:
        """The weightiest reason to stop that any rank has, the same on all."""
        return REASONS[self.world.max(REASONS.index(reason))]

    def _validate(self, log: Log) -> None:
        if self.eval_data is None:
            return
        with log.paused():
            loss = self.evaluate()
        if not math.isfinite(loss):
            raise NotFinite(f"update {self.step}: the held-out loss is {loss}")
        log.write(Row(self.step, self.step * self.recipe.tokens_per_step, held_out_loss=loss), say=True)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the first `eval_tokens` of the held-out split, shared by the ranks."""
        data = self.eval_data
        assert data is not None
        count = max(1, min(len(data), self.recipe.eval_tokens // self.recipe.length))
        parts = [np.arange(i, min(i + self.micro, count)) for i in range(0, count, self.micro)]
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.model.eval()
        for i in range(self.reader, -(-len(parts) // self.readers) * self.readers, self.readers):
            # past the end nothing is counted, but every rank takes part in FSDP's collectives
            numbers = parts[i % len(parts)]
            batch = own_part(make_batch(data, numbers), self.context)
            targets = data.num_targets(numbers) * batch["share"] if i < len(parts) else 0.0
            loss = self.forward(batch, use_cache=False, logits_to_keep=1)
            total += torch.stack([loss.double() * targets, torch.full_like(loss, targets, dtype=torch.float64)])
        self.model.train()
        summed, targets = self.world.sum(total).tolist()
        return summed / targets

    def weights(self) -> dict[str, Tensor]:
        """The whole model's weights on the CPU of the main rank (elsewhere an empty dictionary)."""
        out = {}
        for name, p in self.plain.state_dict().items():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            if self.world.main:
                out[name] = whole.detach().cpu()
        return out


# Parts ----------------------------------------------------------------------------------------------------------------


def why_eager(options: Options, recipe: Recipe, device: torch.device, how: str) -> str | None:
    """Why forward and backward cannot be recorded as a CUDA graph, or None.

    Example:
        >>> why_eager(Options(), Recipe(steps=1), torch.device("cuda"), "none") is None
        True
        >>> why_eager(Options(checkpointing=True), Recipe(steps=1), torch.device("cuda"), "none")
        'recomputed activations cannot be recorded'
    """
    reasons = {
        "not asked for": not options.graph,
        f"the device is {device.type}": device.type != "cuda",
        f"the model is spread by {how}": how != "none",
        "separate documents differ in shape from batch to batch": recipe.documents != "joined",
        "recomputed activations cannot be recorded": options.checkpointing,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def make_batch(data: Sampler, numbers: np.ndarray, share: float = 1.0) -> dict[str, Any]:
    """Tensors for the model: [B, T], or for separate documents one row [1, B T] with `cu_seqlens` and masked first tokens.

    `share` is this micro-batch's part of the update's predicted tokens.
    """
    tokens = torch.from_numpy(data.batch(numbers))
    if data.documents == "joined":
        return {"input_ids": tokens, "labels": tokens, "share": share}
    starts = [
        start + i * data.length
        for i, inner in enumerate(data.boundaries(numbers))
        for start in (0, *(int(b) for b in inner))
    ]
    labels = tokens.reshape(1, -1).clone()
    labels[0, starts] = -100
    cu_seqlens = torch.tensor([*starts, labels.numel()], dtype=torch.int32)
    return {"input_ids": tokens.reshape(1, -1), "labels": labels, "cu_seqlens": cu_seqlens, "share": share}


def own_part(batch: dict[str, Any], context: Context | None) -> dict[str, Any]:
    """A micro-batch's tokens of this rank, where the ranks of `context` share its time axis. Labels are moved by one before they
    are cut: the token after a rank's last is another rank's. `share` becomes that of the rank's own predicted tokens."""
    if context is None:
        return batch
    labels = next_token_labels(batch["labels"], batch.get("cu_seqlens"))
    own = context.part(labels)
    share = batch["share"] * int((own != IGNORED).sum()) / int((labels != IGNORED).sum())
    cut = {"input_ids": context.part(batch["input_ids"]), "shift_labels": own, "share": share}
    return cut if "cu_seqlens" not in batch else cut | {"cu_seqlens": batch["cu_seqlens"]}


@contextmanager
def prefetched(
    source: Iterator[dict[str, Any]], device: torch.device, depth: int = 4
) -> Iterator[Iterator[dict[str, Any]]]:
    """The source, read ahead by a thread; on CUDA in pinned memory, so that copies do not wait."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    done = threading.Event()
    pin = device.type == "cuda"

    def put(item: Any) -> None:
        while not done.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            if pin and device.index is not None:
                torch.cuda.set_device(device)  # a thread starts on device 0
            for batch in source:
                put({k: v.pin_memory() if pin and isinstance(v, Tensor) else v for k, v in batch.items()})
                if done.is_set():
                    return
            put(StopIteration())
        except Exception as error:
            put(error)

    def items() -> Iterator[dict[str, Any]]:
        while True:
            item = ready.get()
            if isinstance(item, StopIteration):
                return
            if isinstance(item, Exception):
                raise item
            yield item

    thread = threading.Thread(target=work, daemon=True, name="batches")
    thread.start()
    try:
        yield items()
    finally:
        done.set()
        thread.join(timeout=10)


@contextmanager
def _signals() -> Iterator[Callable[[], str | None]]:
    """SIGTERM, SIGINT and SIGUSR1 are remembered until the update is over; a second one acts at once."""
    got: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def remember(number: int, frame: object) -> None:
        got.append(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for kind in kinds:
        signal.signal(kind, remember)
    try:
        yield lambda: got[0] if got else None
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _adamw(named: dict[str, nn.Parameter], recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on CUDA; matrices decay, vectors do not. Its state is made now, so that a checkpoint can fill it."""
    decayed = [p for p in named.values() if p.dim() >= 2 and not getattr(p, "_no_weight_decay", False)]
    chosen = {id(p) for p in decayed}
    others = [p for p in named.values() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = device.type == "cuda"
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)
    for p in named.values():
        count = torch.zeros((), dtype=torch.float32, device=device if fused else "cpu")
        optimizer.state[p] = {
            "step": count,
            "exp_avg": torch.zeros_like(p.detach()),
            "exp_avg_sq": torch.zeros_like(p.detach()),
        }
    return optimizer


def _flops(model: nn.Module, length: int) -> float | None:
    try:
        return flops_per_token(model, length)
    except AttributeError:
        return None  # a foreign model whose configuration does not say what its mixers are


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
