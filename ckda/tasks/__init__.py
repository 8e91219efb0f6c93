"""Tasks: each draws batches from a seed and scores predictions."""

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Task"]


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
