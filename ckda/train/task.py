"""Tasks: each draws batches from a seed and scores predictions."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["PenalizedTask", "Task"]


class Task(Protocol):
    """What the trainer asks of a task."""

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs x [size, ...] and targets y [size, ...], made on the generator's device."""
        ...

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean loss of each replica, [R], from outputs and targets [R, size, ...]."""
        ...

    def key(self) -> dict[str, Any]:
        """What two runs of this task must agree on, JSON-able."""
        ...


@runtime_checkable
class PenalizedTask(Task, Protocol):
    """A task that knows penalties on what a model does inside, by name."""

    def penalty(self, name: str, trace: dict[str, Tensor], y: Tensor) -> Tensor:
        """One penalty of each replica, [R], from the trace of the models' forward pass and the targets."""
        ...
