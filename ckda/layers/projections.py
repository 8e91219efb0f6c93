"""The projections of one input as one node of autograd: a product each forward, and two for all of them backward.

As a module a projection is two nodes and two products backward, and the gradients of x are added up behind them: on a GPU's host
that was most of a layer's backward. For y_i = x W_i^T + b_i, with the dy_i side by side as dy and the W_i one under the other as W,

    dW = dy^T x,    dx = dy W,

so dx is summed over all projections before it is rounded. A pair is two projections in a row, as the low-rank gates are:
y = h U^T + c with h = x W_i^T + b_i, dU = dy^T h, and dh = dy U stands for dy_i above.

Legend: N rows, d channels of x, D of a projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from ckda.ops.dispatch import is_autocast, is_plain, is_watched, without_transforms

__all__ = ["Projections", "project_together"]


class Together(torch.autograd.Function):
    """Of x [..., d] and `num` projections, the pairs last: y [N, D] of each.

    The parameters are W of all and U of the pairs, then b of all and c of the pairs, None where there is none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = _halves(parameters)
        ys = _products(x, num, weights, biases)
        ctx.num, ctx.alone = num, 2 * num - len(weights)
        hs = ys[ctx.alone :]
        ctx.save_for_backward(x, *parameters, *hs)
        return *ys[: ctx.alone], *map(linear, hs, weights[num:], biases[num:])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        num, alone = ctx.num, ctx.alone
        x, *saved = ctx.saved_tensors
        weights, biases = _halves(saved[: len(saved) - num + alone])
        hs = saved[len(saved) - num + alone :]
        if torch.is_grad_enabled():  # create_graph: what was kept of h does not say where it is from
            hs = _products(x, num, weights, biases)[alone:]
        dus = [torch.mm(dy.t(), h) for dy, h in zip(dys[alone:], hs, strict=True)]
        ends = [*dys[:alone], *map(torch.mm, dys[alone:], weights[num:]), *dys[alone:]]
        dbs = [None if b is None else end.sum(0) for b, end in zip(biases, ends, strict=True)]
        widths = [len(w) for w in weights[:num]]
        rest = -sum(widths) % 8  # zeros: cuBLAS is fast with rows of whole 16 bytes
        dy = _joined(ends[:num], 1, rest)
        dx = torch.mm(dy, _joined(weights[:num], 0, rest)).view(x.shape)
        dws = torch.mm(dy.t(), _rows(x)).split([*widths, rest])
        return dx, None, *dws[:num], *dus, *dbs


_together = without_transforms(Together)


def _halves(parameters: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights and biases."""
    half = len(parameters) // 2
    return parameters[:half], parameters[half:]


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

    def __init__(self, x: Tensor, made: dict[nn.Module, Tensor] | None = None):
        self.x = x
        self._made = made or {}

    def __call__(self, module: nn.Module) -> Tensor:
        """What was made is given away once, so that nothing here keeps it longer than it is needed."""
        return self._made.pop(module) if module in self._made else module(self.x)


def project_together(x: Tensor, modules: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """module(x) of those modules that can be one node: a plain Linear each, or two in a row, all of whose parameters are trained.

    None where x needs no gradient, where something else than autograd looks on, and under autocast, whose cache of casts a node
    would go around.

    Example:
        >>> x, a, b = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 5))
        >>> {y.grad_fn.name(): y.shape for y in project_together(x, [a, b, nn.Identity()]).values()}
        {'TogetherBackward': torch.Size([2, 5])}
    """
    if is_watched() or not (x.requires_grad and torch.is_grad_enabled() and x.is_contiguous()):
        return {}
    if is_autocast(x.device) or _has_any_global_hook() or torch._C._get_tracing_state():
        return {}
    chains = {module: linears for module in modules if (linears := _linears(module))}
    order = sorted(chains, key=lambda module: len(chains[module]))
    linears = [chains[module][0] for module in order] + [m for module in order for m in chains[module][1:]]
    parameters = [m._parameters[name] for name in ("weight", "bias") for m in linears]
    if len(order) < 2 or not is_plain((x, *parameters)):
        return {}
    return dict(zip(order, _together(x, len(order), *parameters), strict=True))


def _linears(module: nn.Module) -> list[nn.Module]:
    """The one or two Linears that calling the module is, where it is nothing more and they are trained; else none."""
    linears = [*module] if type(module) is nn.Sequential and _is_unhooked(module) else [module]
    return linears if len(linears) <= 2 and all(map(_is_trained_linear, linears)) else []


def _is_trained_linear(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not _is_unhooked(module):
        return False
    weight, bias = map(module._parameters.get, ("weight", "bias"))
    return weight is not None and weight.requires_grad and (bias is None or bias.requires_grad)


def _is_unhooked(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not hooks and "forward" not in module.__dict__ and module._compiled_call_impl is None
