"""The kernels of :mod:`ckda.layers.gated_norm`, whose formulas they compute in float32.

A program takes BN rows of one group at a time, in the backward pass so many blocks of them that no more than PROGRAMS partial
sums of the weight's gradient are left to add.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton import replay
from ckda.ops.triton.launch import Launch
from ckda.ops.triton.sums import sum_parts

__all__ = ["backward", "forward"]

PROGRAMS = 1024  # of a backward pass: a few for each of a large GPU's processors


@triton.jit
def _normed(
    p_o, p_gate, p_weight, i_n, eps, N, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr
):
    """Offsets and mask [BN, BV], channels [BV], xhat, rstd [BN, 1], s and w of block i_n of this program's group."""
    i_g = tl.program_id(1).to(tl.int64)
    o_n, o_v = i_n * BN + tl.arange(0, BN), tl.arange(0, BV)
    mask = (o_n < N)[:, None] & (o_v < V)[None, :]
    offset = (i_g * N + o_n)[:, None] * V + o_v[None, :]
    b_o = tl.load(p_o + offset, mask=mask, other=0.0).to(tl.float32)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_o * b_o, 1)[:, None] / V + eps)
    b_w = tl.load(p_weight + i_g * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    if GATED:
        b_s = 1.0 / (1.0 + tl.exp(-tl.load(p_gate + offset, mask=mask, other=0.0).to(tl.float32)))
    else:
        b_s = tl.full((BN, BV), 1.0, tl.float32)
    return offset, mask, o_v, b_o * b_rstd, b_rstd, b_s, b_w


@triton.jit
def gated_norm_forward_kernel(
    p_o,  # [G, N, V]
    p_gate,  # [G, N, V]
    p_weight,  # [G, V]
    p_y,  # [G, N, V]
    eps,
    N,
    V: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    GATED: tl.constexpr,
):
    offset, mask, _o_v, b_x, _b_rstd, b_s, b_w = _normed(
        p_o, p_gate, p_weight, tl.program_id(0), eps, N, V, BN, BV, GATED
    )
    tl.store(p_y + offset, (b_x * b_w * b_s).to(p_y.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_backward_kernel(
    p_dy,  # [G, N, V]
    p_o,  # [G, N, V]
    p_gate,  # [G, N, V]
    p_weight,  # [G, V]
    p_do,  # [G, N, V]
    p_dgate,  # [G, N, V]
    p_dweight,  # [programs, G, V] float32
    eps,
    N,
    loops,
    V: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    GATED: tl.constexpr,
):
    b_dw = tl.zeros((BN, BV), tl.float32)
    for i in range(loops):
        i_n = tl.program_id(0) * loops + i
        offset, mask, _o_v, b_x, b_rstd, b_s, b_w = _normed(p_o, p_gate, p_weight, i_n, eps, N, V, BN, BV, GATED)
        b_dy = tl.load(p_dy + offset, mask=mask, other=0.0).to(tl.float32)
        b_e = b_dy * b_w * b_s
        b_do = b_rstd * (b_e - b_x * (tl.sum(b_e * b_x, 1)[:, None] / V))
        tl.store(p_do + offset, b_do.to(p_do.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(p_dgate + offset, (b_e * b_x * (1.0 - b_s)).to(p_dgate.dtype.element_ty), mask=mask)
        b_dw += b_dy * b_x * b_s
    o_v = tl.arange(0, BV)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_dweight + part * V + o_v, tl.sum(b_dw, 0), mask=o_v < V)


def _arguments(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[int, int, dict[str, Any], int]:
    """The blocks of a group, the groups, what both kernels take, and the warps."""
    V = o.shape[-1]
    G = weight.numel() // V
    N = o.numel() // weight.numel()
    BV = triton.next_power_of_2(V)
    BN = max(1, min(triton.next_power_of_2(N), 2048 // BV))
    o = o.contiguous()
    arguments = {
        "p_o": o,
        "p_gate": o if gate is None else gate.contiguous(),
        "p_weight": weight.contiguous(),
        "eps": eps,
        "N": N,
        "V": V,
        "BN": BN,
        "BV": BV,
        "GATED": gate is not None,
    }
    return triton.cdiv(N, BN), G, arguments, 8 if BV >= 4096 else 4


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def forward(o: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """As :func:`ckda.layers.gated_norm.torch_forward`; also o, gate [..., V] and weight [V]."""
    given = (o, gate, weight)
    kept = replay.kept_for("gated norm", given, eps)
    made = replay.rerun(kept, "forward", given)
    if made is None:
        made = [_empty_like(o)]
        blocks, G, arguments, num_warps = _arguments(o, gate, weight, eps)
        launch = Launch(gated_norm_forward_kernel, (blocks, G), arguments | {"p_y": made[0]}, num_warps)
        replay.record(kept, "forward", [(launch, launch())], given, made)
    return made[0]  # type: ignore[return-value]


def backward(
    dy: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As :func:`ckda.layers.gated_norm.torch_backward`."""
    if not o.numel():
        return torch.empty_like(o), None if gate is None else torch.empty_like(gate), torch.zeros_like(weight)
    given = (dy, o, gate, weight)
    kept = replay.kept_for("gated norm", given, eps)
    made = replay.rerun(kept, "backward", given)
    if made is None:
        do, dgate, dweight = made = [None if x is None else _empty_like(x) for x in (o, gate, weight)]
        blocks, G, arguments, num_warps = _arguments(o, gate, weight, eps)
        loops = max(1, triton.cdiv(blocks * G, PROGRAMS))
        programs = triton.cdiv(blocks, loops)
        parts = torch.empty(programs, *weight.shape, dtype=torch.float32, device=o.device)
        arguments |= {"p_dy": dy.contiguous(), "p_do": do, "p_dgate": do if dgate is None else dgate}
        arguments |= {"p_dweight": parts, "loops": loops}
        assert dweight is not None
        run = [Launch(gated_norm_backward_kernel, (programs, G), arguments, num_warps), sum_parts(parts, dweight)]
        replay.record(kept, "backward", [(launch, launch()) for launch in run], given, made)
    do, dgate, dweight = made
    assert do is not None
    assert dweight is not None
    return do, dgate, dweight
