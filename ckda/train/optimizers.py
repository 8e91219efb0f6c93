"""Muon and AdamW on stacked parameters, and the schedule.

Parameters are [R, ...]: R replicas (seeds) of one model, trained as one program. Every operation is per replica. The
learning rate is an argument of `step`, so that a schedule is a pure function and a checkpoint holds tensors alone.
"""

import math

import torch
from torch import Tensor

__all__ = ["AdamW", "Muon", "newton_schulz", "one_cycle", "warmup_cosine"]


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to G [..., m, n], roughly: quintic Newton-Schulz in G's own precision.

    Example:
        >>> X = newton_schulz(torch.randn(3, 4, 8))
        >>> bool(((torch.linalg.svdvals(X) - 1).abs() < 0.4).all())
        True
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.shape[-2] > G.shape[-1]
    X = G.mT if tall else G
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


class Muon:
    """Momentum orthogonalised by Newton-Schulz, for stacked matrices [R, m, n]; scaled by sqrt(max(1, m / n))."""

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.0):
        self.parameters, self.momentum, self.weight_decay = parameters, momentum, weight_decay
        self.velocity = [torch.zeros_like(p) for p in parameters]
        self.groups: dict[torch.Size, list[int]] = {}  # equal shapes are orthogonalised together
        for i, p in enumerate(parameters):
            self.groups.setdefault(p.shape, []).append(i)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float) -> None:
        """One update by the gradients, in the order of the parameters."""
        for shape, members in self.groups.items():
            nesterov = []
            for i in members:
                velocity = self.velocity[i].mul_(self.momentum).add_(grads[i])
                nesterov.append(torch.add(grads[i], velocity, alpha=self.momentum))
            updates = newton_schulz(torch.stack(nesterov)).mul_(math.sqrt(max(1.0, shape[-2] / shape[-1])))
            for i, update in zip(members, updates, strict=True):
                self.parameters[i].mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name; copying into these restores the optimiser."""
        return {f"velocity.{i}": v for i, v in enumerate(self.velocity)}


class AdamW:
    """Adam with decoupled weight decay on stacked parameters; `count` is the number of steps taken."""

    def __init__(
        self,
        parameters: list[Tensor],
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.parameters, self.betas, self.eps, self.weight_decay = parameters, betas, eps, weight_decay
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float) -> None:
        """One update by the gradients, in the order of the parameters."""
        self.count += 1
        b1, b2 = self.betas
        torch._foreach_lerp_(self.mean, grads, 1 - b1)
        torch._foreach_mul_(self.square, b2)
        torch._foreach_addcmul_(self.square, grads, grads, 1 - b2)
        denominator = torch._foreach_sqrt(self.square)
        torch._foreach_div_(denominator, math.sqrt(1 - b2**self.count))
        torch._foreach_add_(denominator, self.eps)
        torch._foreach_mul_(self.parameters, 1 - lr * self.weight_decay)
        torch._foreach_addcdiv_(self.parameters, self.mean, denominator, -lr / (1 - b1**self.count))

    def tensors(self) -> dict[str, Tensor]:
        """As :meth:`Muon.tensors`."""
        names = {f"mean.{i}": m for i, m in enumerate(self.mean)}
        return names | {f"square.{i}": s for i, s in enumerate(self.square)}


def one_cycle(step: int, num_steps: int, warmup: float = 0.1) -> float:
    """The one-cycle factor of the peak learning rate: cosine from 1/25 to 1 over the warm-up, then to 4e-6.

    Example:
        >>> [round(one_cycle(s, 101, 0.1), 3) for s in (0, 9, 100)]
        [0.04, 1.0, 0.0]
    """
    start, end = 1 / 25, 1 / 25 * 1e-4
    peak = max(1.0, warmup * num_steps - 1)
    if step <= peak:
        return start + (1 - start) * (1 - math.cos(math.pi * step / peak)) / 2
    progress = min(1.0, (step - peak) / max(1.0, num_steps - 1 - peak))
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def warmup_cosine(
    step: int, num_steps: int, warmup: float = 0.1, floor: float = 0.1, tail: float = 0.0, end: float = 1e-5
) -> float:
    """The factor of the peak learning rate: linear over the warm-up, then cosine to `floor`.

    With a `tail`, that part of the updates comes last and decays geometrically from `floor` to `end`: the noise that a
    constant learning rate leaves in the weights shrinks with it.

    Example:
        >>> [round(warmup_cosine(s, 2500), 3) for s in (0, 249, 2499)]
        [0.004, 1.0, 0.1]
        >>> [round(warmup_cosine(s, 2500, tail=0.2), 6) for s in (1999, 2499)]
        [0.1, 1e-05]
    """
    rising, last = warmup * num_steps, num_steps * (1 - tail)
    if step + 1 <= rising:
        return (step + 1) / rising
    if step + 1 > last:
        return floor * (end / floor) ** min(1.0, (step + 1 - last) / (num_steps - last))
    progress = (step + 1 - rising) / max(1.0, last - rising)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
