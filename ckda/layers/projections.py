"""The projections of one input as one node of autograd: a product each forward, and two for all of them backward.

As a module a projection is two nodes and two products backward, and the gradients of x are added up behind them: on a GPU's host
that was most of a layer's backward. For y_i = x W_i^T + b_i, with the dy_i side by side as dy and the W_i one under the other as W,

    dW = dy^T x,    dx = dy W,

so dx is summed over all projections before it is rounded. A pair is two projections in a row, as the low-rank gates are:
y = h U^T + c with h = x W_i^T + b_i, dU = dy^T h, and dh = dy U stands for dy_i above.

The short convolutions of q, k and v may be in the same node: a node less, and autograd need not look at what lies between.

Legend: N rows, d channels of x, D of a projection, S taps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ckda.layers.convolution import backward_together, forward_together
from ckda.layers.node import is_trained_linear, is_unhooked, modules_are_seen
from ckda.ops.dispatch import is_plain, without_transforms

__all__ = ["Convolutions", "Projections", "project_together"]


class Convolutions(NamedTuple):
    """What the first projections go through: arguments of :func:`ckda.layers.convolution.convolve_together`."""

    weights: Sequence[Tensor]  #: [D, S] each
    cu_seqlens: Tensor | None
    shapes: tuple[tuple[int, ...], ...]
    activate: tuple[bool, ...]


class Plan(NamedTuple):
    """What stands in a node, and so what its parameters are: W of all and U of the pairs, b of all and c of the pairs (None
    where there is none), then the weights of the convolutions."""

    num: int  #: projections, those that are convolved first, the pairs last
    pairs: int
    shapes: tuple[tuple[int, ...], ...] = ()
    activate: tuple[bool, ...] = ()

    def parameters(self, given: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]]:
        """Weights, biases and the convolutions' weights."""
        num = self.num + self.pairs
        return given[:num], given[num : 2 * num], given[2 * num :]


class Together(torch.autograd.Function):
    """Of x [..., d]: y of each projection, [N, D] or in the shape of its convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, cu_seqlens: Tensor | None, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases, taps = plan.parameters(parameters)
        num, few, alone = plan.num, len(taps), plan.num - plan.pairs
        ys = _products(x, num, weights, biases)
        raw, hs = ys[:few], ys[alone:]
        heads = forward_together(*raw, *taps, cu_seqlens, plan.shapes, plan.activate) if few else ()
        ctx.plan = plan
        ctx.save_for_backward(x, cu_seqlens, *raw, *hs, *parameters)
        return *heads, *ys[few:alone], *map(linear, hs, weights[num:], biases[num:])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        num, few, alone = plan.num, len(plan.shapes), plan.num - plan.pairs
        x, cu_seqlens, *saved = ctx.saved_tensors
        weights, biases, taps = plan.parameters(saved[few + plan.pairs :])
        raw, hs = saved[:few], saved[few : few + plan.pairs]
        if torch.is_grad_enabled():  # create_graph: what was kept does not say where it is from
            ys = _products(x, num, weights, biases)
            raw, hs = ys[:few], ys[alone:]
        dtaps: list[Tensor] = []
        ends = [*dys[:alone], *map(torch.mm, dys[alone:], weights[num:]), *dys[alone:]]
        if few:
            found = backward_together(*dys[:few], *raw, *taps, cu_seqlens, plan.shapes, plan.activate)
            ends[:few], dtaps = found[:few], found[few:]
        dus = [torch.mm(dy.t(), h) for dy, h in zip(dys[alone:], hs, strict=True)]
        dbs = [None if b is None else end.sum(0) for b, end in zip(biases, ends, strict=True)]
        widths = [w.shape[0] for w in weights[:num]]
        rest = -sum(widths) % 8  # zeros: cuBLAS is fast with rows of whole 16 bytes
        dy = _joined(ends[:num], 1, rest)
        dx = torch.mm(dy, _joined(weights[:num], 0, rest)).view(x.shape)
        dws = torch.mm(dy.t(), _rows(x)).split_with_sizes([*widths, rest])
        return dx, None, None, *dws[:num], *dus, *dbs, *dtaps


_together = without_transforms(Together)


def _rows(x: Tensor) -> Tensor:
    """[..., d] -> [N, d]."""
    return x.view(-1, x.shape[-1])


def _products(x: Tensor, num: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x W^T + b [N, D] of the first `num`."""
    rows = _rows(x)
    return [linear(rows, w, b) for w, b in zip(weights[:num], biases[:num], strict=True)]


def _joined(parts: Sequence[Tensor], axis: int, rest: int) -> Tensor:
    """Matrices along an axis, and so many zeros behind them."""
    zeros = [parts[0].new_zeros((len(parts[0]), rest) if axis else (rest, parts[0].shape[1]))] if rest else []
    return torch.cat([*parts, *zeros], axis)


class Projections:
    """The projections of an input x: of a module it gives module(x), which may have been made with others before."""

    def __init__(self, x: Tensor, made: dict[nn.Module, Tensor] | None = None, convolved: bool = False):
        self.x = x
        self.convolved = convolved  #: whether what was made of the first modules is behind their convolutions
        self._made = made or {}

    def __call__(self, module: nn.Module) -> Tensor:
        """What was made is given away once, so that nothing here keeps it longer than it is needed."""
        return self._made.pop(module) if module in self._made else module(self.x)


def project_together(
    x: Tensor, modules: Sequence[nn.Module], convolutions: Convolutions | None = None
) -> dict[nn.Module, Tensor]:
    """module(x) of those modules that can be one node: a plain Linear each, or two in a row, all of whose parameters are trained.

    None where x needs no gradient, where something else than autograd looks on, and under autocast, whose cache of casts a node
    would go around. With `convolutions` the first modules' come convolved; none where they cannot be.

    Example:
        >>> x, a, b = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 5))
        >>> {y.grad_fn.name(): y.shape for y in project_together(x, [a, b, nn.Identity()]).values()}
        {'TogetherBackward': torch.Size([2, 5])}
    """
    if not (x.requires_grad and torch.is_grad_enabled() and x.is_contiguous()) or modules_are_seen(x):
        return {}
    single: list[nn.Module] = []
    pairs: list[tuple[nn.Module, ...]] = []
    for module in dict.fromkeys(modules):
        if is_trained_linear(module):
            single.append(module)
        elif pair := _trained_pair(module):
            pairs.append((module, *pair))
    few, cu_seqlens, plan = 0, None, Plan(len(single) + len(pairs), len(pairs))
    linears = [*single, *(pair[1] for pair in pairs), *(pair[2] for pair in pairs)]
    parameters: list[Tensor | None] = [m._parameters["weight"] for m in linears]
    parameters += [m._parameters["bias"] for m in linears]
    if convolutions is not None:
        few, cu_seqlens = len(convolutions.weights), convolutions.cu_seqlens
        plan = plan._replace(shapes=convolutions.shapes, activate=convolutions.activate)
        parameters += convolutions.weights
    if plan.num < 2 or single[:few] != [*modules[:few]] or not is_plain((x, cu_seqlens, *parameters)):
        return {}
    made = _together(x, plan, cu_seqlens, *parameters)
    return dict(zip((*single, *(pair[0] for pair in pairs)), made, strict=True))


def _trained_pair(module: nn.Module) -> tuple[nn.Module, ...]:
    """The two Linears in a row that calling the module is, where it is nothing more."""
    linears = tuple(module._modules.values()) if type(module) is nn.Sequential and is_unhooked(module) else ()
    return linears if len(linears) == 2 and all(map(is_trained_linear, linears)) else ()
