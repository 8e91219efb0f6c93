"""RMSNorm, with a gate where there is one, as one node: ``y = o / rms(o) * weight * sigmoid(gate)``, one kernel each way on a GPU.

It serves the heads' outputs (gated) and, without a gate, the blocks of a language model.
In plain operations it reads and writes its tensors some forty times in a training step, more than the recurrence itself.

With xhat = o * rstd, rstd = (mean(o^2) + eps)^-1/2, s = sigmoid(gate), the gradients are
``dgate = dy xhat w s (1 - s)``, ``do = rstd (e - xhat mean(e xhat))`` with e = dy w s, and dw the sum of ``dy xhat s`` over rows.

Legend: G groups of rows with a weight each (the replicas of a vmap), N rows a group, V width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ckda.layers.node import is_trained_linear, is_unhooked, modules_are_seen, one_node
from ckda.ops.call import other_derivative
from ckda.ops.dispatch import is_plain, without_transforms
from ckda.ops.triton import HAS_TRITON

__all__ = ["HeadNorm", "gated_norm", "norm_and_project", "torch_backward", "torch_forward", "torch_gated_norm"]


def torch_gated_norm(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """o, gate [..., V] and a weight that fits them -> y [..., V] in plain operations; the norm in float32 at least."""
    wide = o if o.dtype == torch.float64 else o.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (y if gate is None else y * torch.sigmoid(gate.to(wide.dtype))).to(o.dtype)


def torch_forward(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """o, gate [G, N, V], weight [G, V] -> y [G, N, V]."""
    return torch_gated_norm(o, gate, weight.unsqueeze(-2), eps)


def torch_backward(
    dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """do, dgate, dweight of :func:`torch_forward`, by the formulas above."""
    dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
    o_, dy_, w = o.to(dtype), dy.to(dtype), weight.to(dtype).unsqueeze(-2)
    rstd = torch.rsqrt(o_.square().mean(-1, keepdim=True) + eps)
    xhat = o_ * rstd
    s = torch.ones_like(o_) if gate is None else torch.sigmoid(gate.to(dtype))
    e = dy_ * w * s
    do = rstd * (e - xhat * (e * xhat).mean(-1, keepdim=True))
    dgate = None if gate is None else (e * xhat * (1 - s)).to(gate.dtype)
    return do.to(o.dtype), dgate, (dy_ * xhat * s).sum(-2).to(weight.dtype)


def _kernels() -> Any:
    from ckda.layers import gated_norm_kernels

    return gated_norm_kernels


def _by_kernel(o: Tensor) -> bool:
    return o.is_cuda and HAS_TRITON and o.dtype != torch.float64 and o.shape[-1] <= 8192


def _forward(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if _by_kernel(o):
        return _kernels().forward(o, gate, weight, eps)
    return torch_forward(o, gate, weight, eps).contiguous()


_forward_op = torch.library.custom_op("ckda::gated_norm", mutates_args=())(_forward)


@_forward_op.register_fake
def _(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(o, memory_format=torch.contiguous_format)


def _backward(dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    """[do, dgate (empty without a gate), dweight]."""
    run = _kernels().backward if _by_kernel(o) else torch_backward
    do, dgate, dweight = run(dy, o, gate, weight, eps)
    return [do.contiguous(), o.new_empty(0) if dgate is None else dgate.contiguous(), dweight.contiguous()]


_backward_op = torch.library.custom_op("ckda::gated_norm_backward", mutates_args=())(_backward)


@_backward_op.register_fake
def _(dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    like = torch.contiguous_format
    dgate = o.new_empty(0) if gate is None else torch.empty_like(gate, memory_format=like)
    return [torch.empty_like(o, memory_format=like), dgate, torch.empty_like(weight, memory_format=like)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    o, gate, weight, ctx.eps = inputs
    ctx.save_for_backward(o, gate, weight)


def _autograd(ctx: Any, dy: Tensor) -> tuple:
    o, gate, weight = ctx.saved_tensors
    do, dgate, dweight = torch.ops.ckda.gated_norm_backward(dy, o, gate, weight, ctx.eps)
    return do, None if gate is None else dgate, dweight, None


torch.library.register_autograd("ckda::gated_norm", _autograd, setup_context=_setup_context)


def _vmap(info: Any, in_dims: tuple, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, int]:
    """The mapped axis becomes one more axis of groups."""
    R = info.batch_size

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.unsqueeze(0).expand(R, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    folded = [fold(x, dim) for x, dim in zip((o, gate, weight), in_dims[:3], strict=True)]
    return torch.ops.ckda.gated_norm(*folded, eps).unflatten(0, (R, -1)), 0


torch.library.register_vmap("ckda::gated_norm", _vmap)


def _as_groups(weight: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors [..., V] as [1, N, V]."""
    return [None if x is None else x.reshape(1, -1, weight.shape[-1]) for x in tensors]


def _by_op(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.ckda.gated_norm(*_as_groups(weight, o, gate), weight.unsqueeze(0), eps).view(o.shape)


def _backward_by_op(dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple:
    groups = _as_groups(weight, dy, o, gate)
    do, dgate, dweight = torch.ops.ckda.gated_norm_backward(*groups, weight.unsqueeze(0), eps)
    return do.view(o.shape), None if gate is None else dgate.view(gate.shape), dweight.view(weight.shape)


def _one_group(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """o [..., V], gate of as many elements, weight [V]."""
    if _by_kernel(o):
        return _kernels().forward(o, gate, weight, eps)
    return torch_gated_norm(o, None if gate is None else gate.reshape(o.shape), weight, eps)


def _one_group_backward(dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple:
    if _by_kernel(o):
        return _kernels().backward(dy, o, gate, weight, eps)
    dy_, o_, gate_ = _as_groups(weight, dy, o, gate)
    assert dy_ is not None
    assert o_ is not None
    do, dgate, dweight = torch_backward(dy_, o_, gate_, weight.unsqueeze(0), eps)
    return do.view(o.shape), None if dgate is None or gate is None else dgate.view(gate.shape), dweight.squeeze(0)


_node = one_node(_by_op, _one_group, _backward_by_op, _one_group_backward)


def gated_norm(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """o [..., V], gate of as many elements and weight [V] -> [..., V] in o's dtype, with gradients, and under vmap.

    Example:
        >>> gated_norm(torch.full((1, 4), 3.0), torch.zeros(1, 4), torch.ones(4)).round(decimals=3)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    if other_derivative():
        return torch_gated_norm(o, None if gate is None else gate.reshape(o.shape), weight, eps)
    return _node(o, gate, weight, eps)


def _is_one_node(o: Tensor) -> bool:
    """Elsewhere a compiler, or nothing, makes one kernel of it."""
    return o.is_cuda and not torch.compiler.is_compiling()


class HeadNorm(nn.Module):
    """RMSNorm of each head's output, times the sigmoid of an output gate where there is one. The norm is in float32.

    Example:
        >>> HeadNorm(4)(torch.full((1, 4), 3.0)).round(decimals=3)
        tensor([[1., 1., 1., 1.]], grad_fn=<RoundBackward1>)
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """o [..., V], and gate of as many elements."""
        if _is_one_node(o):
            return gated_norm(o, gate, self.weight, self.eps)
        return torch_gated_norm(o, None if gate is None else gate.reshape(o.shape), self.weight, self.eps)


class _Projected(torch.autograd.Function):
    """The norm and the product behind it."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor | None, scale: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = _one_group(o, gate, scale, eps).flatten(-2)
        ctx.save_for_backward(o, gate, scale, weight, y)
        ctx.eps = eps
        return linear(y, weight)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        o, gate, scale, weight, y = ctx.saved_tensors
        run = _one_group_backward
        if torch.is_grad_enabled():  # create_graph: what was kept of y does not say where it is from
            run, y = _backward_by_op, gated_norm(o, gate, scale, ctx.eps).flatten(-2)
        dout = dout.reshape(-1, weight.shape[0])
        dy = torch.mm(dout, weight).view(o.shape)
        dweight = torch.mm(dout.t(), y.reshape(-1, weight.shape[1]))
        return *run(dy, o, gate, scale, ctx.eps), dweight, None


_projected = without_transforms(_Projected)


def norm_and_project(norm: nn.Module, projection: nn.Module, o: Tensor, gate: Tensor | None) -> Tensor | None:
    """projection(norm(o, gate)) [..., d] of o [..., HV, V] as one node; None where it cannot be one.

    That is where the norm is one node, the projection a plain Linear that is trained, and nothing but autograd looks on.
    """
    if type(norm) is not HeadNorm or not (o.requires_grad and torch.is_grad_enabled() and _is_one_node(o)):
        return None
    if modules_are_seen(o) or not (is_unhooked(norm) and is_trained_linear(projection)):
        return None
    scale, weight = norm._parameters.get("weight"), projection._parameters["weight"]
    if scale is None or projection._parameters["bias"] is not None or not is_plain((o, gate, scale, weight)):
        return None
    return _projected(o, gate, scale, weight, norm.eps)
