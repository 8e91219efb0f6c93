"""``silu(a) * b`` as one node, one kernel each way on a GPU; only a and b are kept.

With s = sigmoid(a), the gradients are ``da = dy b s (1 + a (1 - s))`` and ``db = dy a s``, in float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ckda.layers.node import one_node
from ckda.ops.call import other_derivative
from ckda.ops.triton import HAS_TRITON

__all__ = ["swiglu", "torch_backward"]


def torch_backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """da and db by the formulas above, in plain operations."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    a_, dy_ = a.to(wide), dy.to(wide)
    s = torch.sigmoid(a_)
    return (dy_ * b.to(wide) * s * (1 + a_ * (1 - s))).to(a.dtype), (dy_ * a_ * s).to(b.dtype)


def _kernels(a: Tensor) -> Any:
    """The kernels' module where they serve an input like a, or None."""
    if not (a.is_cuda and HAS_TRITON and a.dtype != torch.float64):
        return None
    from ckda.layers import swiglu_kernels

    return swiglu_kernels


def _forward(a: Tensor, b: Tensor) -> Tensor:
    kernels = _kernels(a)
    return (silu(a) * b).contiguous() if kernels is None else kernels.forward(a, b)


_forward_op = torch.library.custom_op("ckda::swiglu", mutates_args=())(_forward)


@_forward_op.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _backward(dy: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """[da, db]."""
    kernels = _kernels(a)
    run = torch_backward if kernels is None else kernels.backward
    return [grad.contiguous() for grad in run(dy, a, b)]


_backward_op = torch.library.custom_op("ckda::swiglu_backward", mutates_args=())(_backward)


@_backward_op.register_fake
def _(dy: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, dy: Tensor) -> tuple:
    return tuple(torch.ops.ckda.swiglu_backward(dy, *ctx.saved_tensors))


torch.library.register_autograd("ckda::swiglu", _autograd, setup_context=_setup_context)


def _vmap(info: Any, in_dims: tuple, *tensors: Tensor) -> tuple[Tensor, int]:
    """Element by element: one more axis."""
    moved = [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]
    return torch.ops.ckda.swiglu(*moved), 0


torch.library.register_vmap("ckda::swiglu", _vmap)
_node = one_node(torch.ops.ckda.swiglu, _forward, torch.ops.ckda.swiglu_backward, _backward)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b`` of two tensors of one shape and dtype; a compiled program makes its own kernel of it.

    Example:
        >>> swiglu(torch.tensor([0.0, 1.0, 50.0]), torch.tensor([5.0, 1.0, 2.0]))
        tensor([  0.0000,   0.7311, 100.0000])
    """
    fits = a.is_cuda and a.dtype == b.dtype and a.shape == b.shape
    if fits and not torch.compiler.is_compiling() and not other_derivative():
        return _node(a, b)
    return silu(a) * b
