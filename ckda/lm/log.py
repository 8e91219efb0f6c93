"""The log of a training run: a line an update and a line a validation, and the journey of the losses to the host."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckda.lm import checkpoint
from ckda.lm.extras import require
from ckda.lm.recipe import peak_flops
from ckda.record import write_text

if TYPE_CHECKING:
    from ckda.lm.train import Trainer

__all__ = ["Log", "NotFinite", "Row", "read_log"]


_PATIENCE = 5.0  # seconds without a log line


class NotFinite(RuntimeError):
    """The loss or the gradient stopped being a number."""


@dataclass(frozen=True)
class Row:
    """One line of log.jsonl: an update (`loss` and what follows it) or a validation (`held_out_loss`)."""

    step: int
    tokens: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_second: float | None = None  #: this and the two below: of the last update of a log line
    mfu: float | None = None
    memory_gib: float | None = None
    held_out_loss: float | None = None

    def as_json(self) -> dict[str, Any]:
        """What is known of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def as_line(self) -> str:
        """As it stands in the file."""
        return json.dumps(self.as_json()) + "\n"


class Moment:
    """A point in the device's work; taking it waits for nothing."""

    def __init__(self, device: torch.device):
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        self.time = time.perf_counter()

    def wait(self) -> None:
        """Until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Between two points that the device has passed."""
        if self.event is not None:
            return max(1e-9, earlier.event.elapsed_time(self.event) / 1e3)
        return max(1e-9, self.time - earlier.time)


class Log:
    """log.jsonl: a line an update, a line a validation; what is past the step a run resumes from is dropped.

    Losses and norms travel to the host by themselves: :meth:`send` starts the copy of those since the last time, and they are
    read when the next ones are sent, so the host never waits for the update it has just queued.
    """

    def __init__(self, trainer: "Trainer", show: Callable[[Row], None]):
        self.trainer, self.show = trainer, show
        self.world, self.path = trainer.world, trainer.out / "log.jsonl"
        device = self.world.device
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []
        self.sent: list[tuple[list[tuple[int, float]], Tensor, Moment]] = []
        self.rows: list[Row] = []
        self.since, self.step, self.begun = Moment(device), trainer.step, trainer.step
        if not self.world.main:
            return
        trainer.out.mkdir(parents=True, exist_ok=True)
        if trainer.step:
            self.rows = [row for row in read_log(self.path) if row.step <= trainer.step]
        write_text(self.path, "".join(row.as_line() for row in self.rows))
        self.file = open(self.path, "a")  # noqa: SIM115 - closed by close()
        self.board: Any = None
        if trainer.options.tensorboard:
            require("tensorboard", "cluster")
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(trainer.out / "tensorboard"), purge_step=trainer.step)

    def add(self, step: int, lr: float, loss: Tensor, norm: Tensor) -> None:
        """Remember an update; nothing is read."""
        self.pending.append((step, lr, loss, norm))

    def is_due(self, step: int) -> bool:
        """Every `log_every` updates; alone on a CPU, where an update may take long, also after the first and then by the clock."""
        if step % self.trainer.recipe.log_every == 0:
            return True
        if self.world.size > 1 or self.world.device.type != "cpu":
            return False
        return step == self.begun + 1 or time.perf_counter() - self.since.time > _PATIENCE

    def send(self) -> None:
        """Start the way of the pending values to the host, and log those that were sent before."""
        if self.pending:
            losses = self.world.sum(torch.stack([loss.float() for _, _, loss, _ in self.pending]))
            norms = torch.stack([norm.float() for *_, norm in self.pending])
            table = torch.stack([losses, norms]).to("cpu", non_blocking=True)
            self.sent.append(([(step, lr) for step, lr, *_ in self.pending], table, Moment(self.world.device)))
            self.pending = []
        ahead = 1 if self.world.device.type == "cuda" else 0  # elsewhere nothing is queued
        while len(self.sent) > ahead:
            self._read(*self.sent.pop(0))

    def read_all(self) -> None:
        """Log everything up to now."""
        self.send()
        while self.sent:
            self._read(*self.sent.pop(0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not part of the throughput; before it, everything is read and found to be finite."""
        self.read_all()
        yield
        self.since = Moment(self.world.device)

    def _read(self, updates: list[tuple[int, float]], table: Tensor, moment: Moment) -> None:
        moment.wait()
        rows = []
        for (step, lr), loss, norm in zip(updates, *table.tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                have = checkpoint.steps_of(self.trainer.out / "checkpoints")
                kept = f"the last good checkpoint is of update {have[-1]}" if have else "there is no checkpoint yet"
                raise NotFinite(f"update {step}: the loss is {loss}, the gradient's norm {norm}; {kept}")
            tokens = step * self.trainer.recipe.tokens_per_step
            rows.append(Row(step, tokens, loss, norm, lr))
        rows[-1] = replace(rows[-1], **self._speed(rows[-1].step, moment))
        for row in rows:
            self.write(row, say=row is rows[-1])

    def _speed(self, step: int, moment: Moment) -> dict[str, Any]:
        """Tokens a second, MFU and memory since the last reading."""
        trainer, device = self.trainer, self.world.device
        speed = (step - self.step) * trainer.recipe.tokens_per_step / moment.seconds_since(self.since)
        self.step, self.since = step, moment
        flops = trainer.flops_per_token
        mfu = None if self.peak is None or flops is None else speed * flops / (self.peak * self.world.size)
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        return {"tokens_per_second": speed, "mfu": mfu, "memory_gib": memory}

    def write(self, row: Row, say: bool = False) -> None:
        """One line, on the main rank."""
        if not self.world.main:
            return
        self.rows.append(row)
        self.file.write(row.as_line())
        self.file.flush()
        if self.board is not None:
            for name, value in row.as_json().items():
                if name not in ("step", "tokens"):
                    self.board.add_scalar(name, value, row.step)
        if say:
            self.show(row)

    def close(self) -> None:
        """Close the file."""
        if self.world.main:
            self.file.close()
            if self.board is not None:
                self.board.close()


def read_log(path: Path) -> list[Row]:
    """The rows of a log; a line cut off by a crash is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            print(f"{path}: dropping a damaged line", file=sys.stderr)
    return rows
