"""The kernels of :mod:`ckda.layers.swiglu`, whose formulas they compute in float32, BLOCK elements a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import launch

__all__ = ["backward", "forward", "swiglu_backward_kernel", "swiglu_forward_kernel"]

BLOCK = 2048


@triton.jit
def swiglu_forward_kernel(p_a, p_b, p_y, num, BLOCK: tl.constexpr):  # [num] each
    """y = silu(a) b."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_a = tl.load(p_a + o_i, mask=o_i < num, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_i, mask=o_i < num, other=0.0).to(tl.float32)
    tl.store(p_y + o_i, (b_a / (1.0 + tl.exp(-b_a)) * b_b).to(p_y.dtype.element_ty), mask=o_i < num)


@triton.jit
def swiglu_backward_kernel(p_dy, p_a, p_b, p_da, p_db, num, BLOCK: tl.constexpr):  # [num] each
    """da = dy b s (1 + a (1 - s)) and db = dy a s, s = sigmoid(a)."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_dy = tl.load(p_dy + o_i, mask=o_i < num, other=0.0).to(tl.float32)
    b_a = tl.load(p_a + o_i, mask=o_i < num, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + o_i, mask=o_i < num, other=0.0).to(tl.float32)
    b_s = 1.0 / (1.0 + tl.exp(-b_a))
    b_da = b_dy * b_b * b_s * (1.0 + b_a * (1.0 - b_s))
    tl.store(p_da + o_i, b_da.to(p_da.dtype.element_ty), mask=o_i < num)
    tl.store(p_db + o_i, (b_dy * b_a * b_s).to(p_db.dtype.element_ty), mask=o_i < num)


def forward(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b."""
    a, b = a.contiguous(), b.contiguous()
    y, num = torch.empty_like(a), a.numel()
    if num:
        launch(swiglu_forward_kernel, (triton.cdiv(num, BLOCK),), a, b, y, num, BLOCK=BLOCK)
    return y


def backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.layers.swiglu.torch_backward`."""
    dy, a, b = dy.contiguous(), a.contiguous(), b.contiguous()
    da, db, num = torch.empty_like(a), torch.empty_like(b), a.numel()
    if num:
        launch(swiglu_backward_kernel, (triton.cdiv(num, BLOCK),), dy, a, b, da, db, num, BLOCK=BLOCK)
    return da, db
