"""Linear layers of stacked replicas on a GPU.

A weight's gradient is a small matrix summed over all tokens. A batched product of the replicas likely gives each such matrix to
one or two multiprocessors and leaves the others idle: three seeds took 5.55 times as long as one on an H200. Here the tokens are
cut into pieces whose products fill the device, and the pieces are summed: 2.27 times.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["product", "stack_linear_layers", "stacked_linear"]

_PIECES = 64  # at most; each replica's tokens are cut into so many


def stack_linear_layers(model: nn.Module) -> None:
    """Make every nn.Linear of a model compute by :func:`stacked_linear` when it is mapped over replicas."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return _Linear.apply(x, layer.weight, layer.bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., d], weight [e, d] -> x weight^T, [..., e]; mapped over replicas by :func:`stacked_linear`.

    Example:
        >>> x, weight = torch.randn(4, 2), torch.randn(3, 2)
        >>> torch.equal(product(x, weight), x @ weight.T)
        True
    """
    return _Linear.apply(x, weight, None)


class _Linear(torch.autograd.Function):
    """x W^T + b; mapped by vmap it is :func:`stacked_linear`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (dy,) = grads
        x, weight, bias = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        return dy @ weight, flat.mT @ x.reshape(-1, x.shape[-1]), None if bias is None else flat.sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        def stacked(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        by_replica = None if bias is None else stacked(bias, in_dims[2])
        return stacked_linear(stacked(x, in_dims[0]), stacked(weight, in_dims[1]), by_replica), 0


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, ..., d], weight [R, e, d], bias [R, e] or None -> [R, ..., e], each replica by its own weight.

    Example:
        >>> x, weight = torch.randn(3, 4, 5, 2), torch.randn(3, 6, 2)
        >>> torch.allclose(stacked_linear(x, weight, None)[1], x[1] @ weight[1].T)
        True
    """
    return _Stacked.apply(x.flatten(1, -2), weight, bias).unflatten(1, x.shape[1:-1])


class _Stacked(torch.autograd.Function):
    """:func:`stacked_linear` on x [R, N, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        R, N, _ = x.shape
        pieces = _PIECES
        while N % pieces:
            pieces //= 2
        parts = (t.reshape(R * pieces, N // pieces, -1) for t in (dy, x))
        dy_parts, x_parts = parts
        dweight = torch.bmm(dy_parts.mT, x_parts)
        dweight = dweight if pieces == 1 else dweight.unflatten(0, (R, pieces)).sum(1)
        return torch.bmm(dy, weight), dweight, dy.sum(1) if ctx.has_bias else None
