"""What stands around the mixer of a small model, as one node each on a GPU: residual and LayerNorm, bias and GELU.

:func:`norm_of_words` is ``LayerNorm(table[tokens] + y)``, :func:`bias_gelu` is ``GELU(h + bias)``. In plain operations vmapped
over replicas these read and write their tensors some thirty times in a training step.

With x = table[tokens] + y, xhat = (x - mean x) rstd and z = w xhat + b: ``dy = dx = rstd (e - mean e - xhat mean(e xhat))``,
e = w dz. With a = h + bias: ``dh = da = dz (Phi(a) + a phi(a))``, phi and Phi the normal density and its integral.

Legend: R replicas, N tokens of one, D width, n symbols.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from ckda.experiments.tracking.fast.words import fold_mapped, rows_of, sum_by_symbol

__all__ = ["bias_gelu", "norm_of_words", "torch_gelu_backward", "torch_norm_backward"]


def _kernels() -> Any:
    from ckda.experiments.tracking.fast import readout_kernels

    return readout_kernels


def _summed(y: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([rows_of(rows, t) for rows, t in zip(table, tokens, strict=True)]) + y


def torch_norm_backward(
    dz: Tensor, y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """dx [R, N, D], and of the weight and the bias [R, 2, D], by the formulas above."""
    x = _summed(y, table, tokens)
    rstd = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + eps)
    xhat = (x - x.mean(-1, keepdim=True)) * rstd
    e = dz * weight.unsqueeze(1)
    dx = rstd * (e - e.mean(-1, keepdim=True) - xhat * (e * xhat).mean(-1, keepdim=True))
    return dx, torch.stack([(dz * xhat).sum(1), dz.sum(1)], 1)


def torch_gelu_backward(dz: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """dh [R, N, D] and dbias [R, D], by the formulas above."""
    a = h + bias.unsqueeze(1)
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    dh = dz * (0.5 * (1 + torch.erf(a / math.sqrt(2))) + a * density)
    return dh, dh.sum(1)


@torch.library.custom_op("ckda::norm_of_words", mutates_args=())
def _norm(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if y.is_cuda:
        return _kernels().norm(y, table, tokens, weight, bias, eps)
    normed = layer_norm(_summed(y, table, tokens), y.shape[-1:], eps=eps)
    return normed * weight.unsqueeze(1) + bias.unsqueeze(1)


@_norm.register_fake
def _(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@torch.library.custom_op("ckda::norm_of_words_backward", mutates_args=())
def _norm_backward(
    dz: Tensor, y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    run = _kernels().norm_backward if y.is_cuda else torch_norm_backward
    return run(dz, y, table, tokens, weight, eps)


@_norm_backward.register_fake
def _(dz: Tensor, y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(len(y), 2, y.shape[-1])


@torch.library.custom_op("ckda::bias_gelu", mutates_args=())
def _gelu(h: Tensor, bias: Tensor) -> Tensor:
    return _kernels().bias_gelu(h, bias) if h.is_cuda else gelu(h + bias.unsqueeze(1))


@_gelu.register_fake
def _(h: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@torch.library.custom_op("ckda::bias_gelu_backward", mutates_args=())
def _gelu_backward(dz: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return (_kernels().bias_gelu_backward if h.is_cuda else torch_gelu_backward)(dz, h, bias)


@_gelu_backward.register_fake
def _(dz: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    like = torch.contiguous_format
    return torch.empty_like(h, memory_format=like), torch.empty_like(bias, memory_format=like)


class _Norm(torch.autograd.Function):
    """y [R, N, D], table [R, n, D], tokens [R, N], weight and bias [R, D] -> [R, N, D]."""

    @staticmethod
    def forward(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.ops.ckda.norm_of_words(y, table, tokens, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        y, table, tokens, weight, _, ctx.eps = inputs
        ctx.save_for_backward(y, table, tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        y, table, tokens, weight = ctx.saved_tensors
        dx, parts = torch.ops.ckda.norm_of_words_backward(grads[0], y, table, tokens, weight, ctx.eps)
        return dx, sum_by_symbol(dx, tokens, table.shape[1]), None, parts[:, 0], parts[:, 1], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Tensor, int]:
        return _Norm.apply(*fold_mapped(info.batch_size, in_dims, arguments)).unflatten(0, (info.batch_size, -1)), 0


def norm_of_words(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """y [B, T, D], table [n, D], tokens [B, T], weight and bias [D] -> LayerNorm(table[tokens] + y), [B, T, D].

    Example:
        >>> table, tokens, y = torch.randn(3, 4), torch.tensor([[2, 0]]), torch.randn(1, 2, 4)
        >>> norm = torch.nn.LayerNorm(4)
        >>> torch.allclose(norm_of_words(y, table, tokens, norm.weight, norm.bias), norm(table[tokens] + y), atol=1e-6)
        True
    """
    tensors = (y.flatten(0, 1), table, tokens.flatten(), weight, bias)
    return _Norm.apply(*(x.unsqueeze(0) for x in tensors), eps).view(y.shape)


class _Gelu(torch.autograd.Function):
    """h [R, N, D], bias [R, D] -> [R, N, D]."""

    @staticmethod
    def forward(h: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.ckda.bias_gelu(h, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return torch.ops.ckda.bias_gelu_backward(grads[0], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Tensor, int]:
        return _Gelu.apply(*fold_mapped(info.batch_size, in_dims, arguments)).unflatten(0, (info.batch_size, -1)), 0


def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """h [..., D], bias [D] -> GELU(h + bias), the exact one.

    Example:
        >>> h, bias = torch.randn(2, 5, 4), torch.randn(4)
        >>> torch.allclose(bias_gelu(h, bias), gelu(h + bias), atol=1e-6)
        True
    """
    return _Gelu.apply(h.reshape(1, -1, h.shape[-1]), bias.unsqueeze(0)).view(h.shape)
