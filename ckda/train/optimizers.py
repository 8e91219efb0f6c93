"""Muon and AdamW on stacked parameters, and the schedule.

Parameters are [R, ...]: R replicas (seeds) of one model, trained as one program. Every operation is per replica. The
learning rate and Muon's momentum are arguments of `step`, so that a schedule is a pure function and a checkpoint holds
tensors alone. Nothing here reads a value back from the device, so that an update can be recorded as a CUDA graph.
"""

import math

import torch
from torch import Tensor

__all__ = ["MOMENTUM", "AdamW", "Muon", "cycled_momentum", "newton_schulz", "one_cycle", "warmup_cosine"]

MOMENTUM = 0.95  #: Muon's, where it is constant


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
    X = (X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)).reshape(-1, *X.shape[-2:])
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    X = X.view(*G.shape[:-2], *X.shape[-2:])
    return X.mT if tall else X


class Muon:
    """Momentum orthogonalised by Newton-Schulz, for stacked matrices [R, m, n]; scaled by sqrt(max(1, m / n)).

    Equal shapes are orthogonalised together. On a GPU all shapes are, laid on their side and padded with zeros to the largest
    (:class:`_Padding`): Newton-Schulz keeps the zeros, and a few larger products take less time there than many small ones.
    """

    def __init__(self, parameters: list[Tensor], weight_decay: float = 0.0):
        self.parameters, self.weight_decay = parameters, weight_decay
        self.velocity = [torch.zeros_like(p) for p in parameters]
        self._paddings: dict[tuple, _Padding] = {}  # by shapes: made on the stream that this optimiser's updates run on
        self.groups: list[list[int]] = []
        for i, p in enumerate(parameters):
            home = next((g for g in self.groups if p.is_cuda or parameters[g[0]].shape == p.shape), None)
            if home is None:
                self.groups.append([i])
            else:
                home.append(i)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float | Tensor, momentum: float | Tensor = MOMENTUM) -> None:
        """One update by the gradients, in the order of the parameters; lr and momentum may be tensors on their device."""
        if not self.parameters:
            return
        torch._foreach_mul_(self.velocity, momentum)
        torch._foreach_add_(self.velocity, grads)
        nesterov = torch._foreach_mul(self.velocity, momentum)
        torch._foreach_add_(nesterov, grads)
        updates: dict[int, Tensor] = {}
        for members in self.groups:
            updates |= zip(members, self._orthogonal([nesterov[i] for i in members], lr), strict=True)
        torch._foreach_mul_(self.parameters, 1 - lr * self.weight_decay)
        torch._foreach_sub_(self.parameters, [updates[i] for i in range(len(self.parameters))])

    def _orthogonal(self, matrices: list[Tensor], lr: float | Tensor) -> list[Tensor]:
        """lr * sqrt(max(1, m / n)) * :func:`newton_schulz` of each [R, m, n], as one batch."""
        shapes = tuple(G.shape for G in matrices)
        if len(set(shapes)) == 1:
            scale = _scale(matrices[0])
            return list((newton_schulz(torch.stack(matrices)) * (lr * scale)).unbind(0))
        if shapes not in self._paddings:
            self._paddings[shapes] = _Padding(matrices)
        padding = self._paddings[shapes]
        return padding.split(newton_schulz(padding.join(matrices)) * (padding.scales * lr))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name; copying into these restores the optimiser."""
        return {f"velocity.{i}": v for i, v in enumerate(self.velocity)}

    def keep(self, parameters: list[Tensor], replicas: Tensor) -> None:
        """Go on with these of the replicas, whose parameters are given."""
        self.parameters, self.velocity = parameters, [v[replicas] for v in self.velocity]


def _scale(G: Tensor) -> float:
    return math.sqrt(max(1.0, G.shape[-2] / G.shape[-1]))


class _Padding:
    """Matrices [R, m_i, n_i] of different shapes as one batch, and back: one kernel each way by a list of places.

    Example:
        >>> G = [torch.randn(2, 3, 8), torch.randn(2, 6, 2)]
        >>> padding = _Padding(G)
        >>> X = padding.join(G)
        >>> X.shape, torch.equal(X[1, :, :2, :6], G[1].mT), torch.equal(padding.split(X)[1], G[1])
        (torch.Size([2, 2, 3, 8]), True, True)
    """

    def __init__(self, matrices: list[Tensor]):
        sizes = [G.numel() for G in matrices]
        places = torch.arange(sum(sizes)).split(sizes)
        shaped = [place.view(G.shape) for place, G in zip(places, matrices, strict=True)]
        wide = [G.mT if G.shape[-2] > G.shape[-1] else G for G in shaped]
        m, n = (max(G.shape[axis] for G in wide) for axis in (-2, -1))
        padded = torch.full((len(wide), wide[0].shape[0], m, n), sum(sizes))  # the place of a zero
        for place, G in zip(padded, wide, strict=True):
            place[:, : G.shape[-2], : G.shape[-1]] = G
        flat = padded.flatten()
        back = torch.empty(sum(sizes), dtype=torch.long)
        filled = flat < sum(sizes)
        back[flat[filled]] = filled.nonzero().flatten()
        device, dtype = matrices[0].device, matrices[0].dtype
        self.shape, self._shapes, self._sizes = padded.shape, [G.shape for G in matrices], sizes
        self._there, self._back = (x.to(device, torch.int32) for x in (flat, back))
        self._zero = torch.zeros(1, device=device, dtype=dtype)
        self.scales = torch.tensor([_scale(G) for G in matrices], device=device, dtype=dtype).view(-1, 1, 1, 1)

    def join(self, matrices: list[Tensor]) -> Tensor:
        """[matrices, R, m, n]: each on its longer side, zeros around it."""
        return torch.cat([*(G.flatten() for G in matrices), self._zero]).index_select(0, self._there).view(self.shape)

    def split(self, X: Tensor) -> list[Tensor]:
        """What of X lies where the matrices were, in their shapes."""
        parts = X.flatten().index_select(0, self._back).split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class AdamW:
    """Adam with decoupled weight decay on stacked parameters; `count`, a tensor, is the number of steps taken."""

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
        self.count = torch.zeros((), device=parameters[0].device if parameters else None)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float | Tensor) -> None:
        """One update by the gradients, in the order of the parameters; lr may be a tensor on their device."""
        if not self.parameters:
            return
        self.count += 1
        b1, b2 = self.betas
        if self.parameters[0].is_cuda:
            self._fused(grads, lr)
            return
        correction1, correction2 = (-torch.expm1(self.count * math.log(b)) for b in (b1, b2))  # 1 - b ** count
        torch._foreach_lerp_(self.mean, grads, 1 - b1)
        torch._foreach_mul_(self.square, b2)
        torch._foreach_addcmul_(self.square, grads, grads, 1 - b2)
        denominator = torch._foreach_sqrt(self.square)
        torch._foreach_div_(denominator, correction2.sqrt())
        torch._foreach_add_(denominator, self.eps)
        update = torch._foreach_div(self.mean, denominator)
        torch._foreach_mul_(update, lr / correction1)
        torch._foreach_mul_(self.parameters, 1 - lr * self.weight_decay)
        torch._foreach_sub_(self.parameters, update)

    def _fused(self, grads: list[Tensor], lr: float | Tensor) -> None:
        """The same in one kernel: what torch.optim.AdamW(fused=True) runs."""
        torch._fused_adamw_(
            self.parameters,
            grads,
            self.mean,
            self.square,
            [],
            [self.count] * len(grads),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """As :meth:`Muon.tensors`."""
        names = {f"mean.{i}": m for i, m in enumerate(self.mean)} | {"count": self.count}
        return names | {f"square.{i}": s for i, s in enumerate(self.square)}

    def keep(self, parameters: list[Tensor], replicas: Tensor) -> None:
        """As :meth:`Muon.keep`."""
        self.parameters = parameters
        self.mean, self.square = ([x[replicas] for x in part] for part in (self.mean, self.square))


def one_cycle(step: int, num_steps: int, warmup: float = 0.1) -> float:
    """The one-cycle factor of the peak learning rate: cosine from 1/25 to 1 over the warm-up, then to 4e-6.

    Example:
        >>> [round(one_cycle(s, 101, 0.1), 3) for s in (0, 9, 100)]
        [0.04, 1.0, 0.0]
    """
    return _there_and_back(step, num_steps, warmup, 1 / 25, 1.0, 1 / 25 * 1e-4)


def cycled_momentum(step: int, num_steps: int, warmup: float = 0.1, high: float = MOMENTUM, low: float = 0.85) -> float:
    """The momentum of the one-cycle schedule: cosine from `high` to `low` while the learning rate rises, then back.

    It is what torch's OneCycleLR does to an optimiser that has a momentum, unless it is told not to.

    Example:
        >>> [round(cycled_momentum(s, 1000), 3) for s in (0, 99, 400, 600, 999)]
        [0.95, 0.85, 0.875, 0.909, 0.95]
    """
    return _there_and_back(step, num_steps, warmup, high, low, high)


def _there_and_back(step: int, num_steps: int, warmup: float, start: float, middle: float, end: float) -> float:
    """Cosine from `start` to `middle` over the warm-up, then to `end`."""
    peak = max(1.0, warmup * num_steps - 1)
    if step <= peak:
        return start + (middle - start) * (1 - math.cos(math.pi * step / peak)) / 2
    progress = min(1.0, (step - peak) / max(1.0, num_steps - 1 - peak))
    return end + (middle - end) * (1 + math.cos(math.pi * progress)) / 2


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
