"""The kernels of :mod:`ckda.layers.swiglu`, whose formulas they compute in float32, BLOCK elements a program."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton import replay
from ckda.ops.triton.launch import Launch

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


def _run(name: str, kernel: Any, given: dict[str, Tensor], out: tuple[str, ...]) -> list[Tensor]:
    """Launch on the tensors given, by the kernel's names; the tensors made, of the same shape."""
    first = next(iter(given.values()))
    num = first.numel()
    if not num:
        return [torch.empty_like(first) for _ in out]
    kept = replay.kept_for("swiglu", [*given.values()])
    made = replay.rerun(kept, name, [*given.values()])
    if made is None:
        tidy = {key: x.contiguous() for key, x in given.items()}
        made = [torch.empty(x.shape, dtype=first.dtype, device=first.device) for x in (first,) * len(out)]
        arguments = tidy | dict(zip(out, made, strict=True)) | {"num": num, "BLOCK": BLOCK}
        launch = Launch(kernel, (triton.cdiv(num, BLOCK),), arguments, num_warps=4)
        replay.record(kept, name, [(launch, launch())], [*given.values()], made)
    return made  # type: ignore[return-value]


def forward(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b."""
    return _run("forward", swiglu_forward_kernel, {"p_a": a, "p_b": b}, ("p_y",))[0]


def backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.layers.swiglu.torch_backward`."""
    da, db = _run("backward", swiglu_backward_kernel, {"p_dy": dy, "p_a": a, "p_b": b}, ("p_da", "p_db"))
    return da, db
