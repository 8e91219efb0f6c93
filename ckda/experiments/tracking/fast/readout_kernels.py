"""The kernels of :mod:`ckda.experiments.tracking.fast.readout`, whose formulas they compute in float32.

One program takes BN rows of one replica; gradients of weights and biases leave each program as partial sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import Launch

__all__ = ["bias_gelu", "bias_gelu_backward", "launches", "norm", "norm_backward"]


@triton.jit
def _rows(N, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Rows [BN] and columns [BD] of this program, offsets and mask [BN, BD]."""
    i_r = tl.program_id(1).to(tl.int64)
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    mask = (o_n < N)[:, None] & (o_d < D)[None, :]
    return i_r * N + o_n, o_d, (i_r * N + o_n)[:, None] * D + o_d[None, :], mask, o_n < N


@triton.jit
def _normed(p_y, p_table, p_tokens, n, N, eps, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Offsets, mask, columns, xhat [BN, BD] and rstd [BN, 1] of this program's rows."""
    row, o_d, offset, mask, m_n = _rows(N, D, BN, BD)
    b_symbol = tl.load(p_tokens + row, mask=m_n, other=0) + tl.program_id(1) * n
    b_x = tl.load(p_table + b_symbol[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    b_x += tl.load(p_y + offset, mask=mask, other=0.0)
    b_x = tl.where(mask, b_x - tl.sum(b_x, 1)[:, None] / D, 0.0)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
    return offset, mask, o_d, b_x * b_rstd, b_rstd


@triton.jit
def norm_kernel(
    p_y,  # [R, N, D]
    p_table,  # [R, n, D]
    p_tokens,  # [R, N]
    p_weight,  # [R, D]
    p_bias,  # [R, D]
    p_z,  # out [R, N, D]
    n,
    N,
    eps,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    offset, mask, o_d, b_xhat, _b_rstd = _normed(p_y, p_table, p_tokens, n, N, eps, D, BN, BD)
    b_w = tl.load(p_weight + tl.program_id(1) * D + o_d, mask=o_d < D, other=0.0)[None, :]
    b_b = tl.load(p_bias + tl.program_id(1) * D + o_d, mask=o_d < D, other=0.0)[None, :]
    tl.store(p_z + offset, b_xhat * b_w + b_b, mask=mask)


@triton.jit
def norm_backward_kernel(
    p_dz,  # [R, N, D]
    p_y,  # [R, N, D]
    p_table,  # [R, n, D]
    p_tokens,  # [R, N]
    p_weight,  # [R, D]
    p_dx,  # out [R, N, D]
    p_parts,  # out [R, programs, 2, D] of the weight and the bias
    n,
    N,
    eps,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    offset, mask, o_d, b_xhat, b_rstd = _normed(p_y, p_table, p_tokens, n, N, eps, D, BN, BD)
    b_w = tl.load(p_weight + tl.program_id(1) * D + o_d, mask=o_d < D, other=0.0)[None, :]
    b_dz = tl.load(p_dz + offset, mask=mask, other=0.0)
    b_e = b_dz * b_w
    b_dx = b_e - tl.sum(b_e, 1)[:, None] / D - b_xhat * (tl.sum(b_e * b_xhat, 1)[:, None] / D)
    tl.store(p_dx + offset, b_dx * b_rstd, mask=mask)
    part = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2 * D + o_d
    tl.store(p_parts + part, tl.sum(b_dz * b_xhat, 0), mask=o_d < D)
    tl.store(p_parts + part + D, tl.sum(b_dz, 0), mask=o_d < D)


@triton.jit
def bias_gelu_kernel(
    p_h,  # [R, N, D]
    p_bias,  # [R, D]
    p_z,  # out [R, N, D]
    N,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    _row, o_d, offset, mask, _m_n = _rows(N, D, BN, BD)
    b_a = tl.load(p_bias + tl.program_id(1) * D + o_d, mask=o_d < D, other=0.0)[None, :]
    b_a += tl.load(p_h + offset, mask=mask, other=0.0)
    tl.store(p_z + offset, 0.5 * b_a * (1.0 + tl.erf(b_a * 0.7071067811865476)), mask=mask)


@triton.jit
def bias_gelu_backward_kernel(
    p_dz,  # [R, N, D]
    p_h,  # [R, N, D]
    p_bias,  # [R, D]
    p_dh,  # out [R, N, D]
    p_parts,  # out [R, programs, D] of the bias
    N,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    _row, o_d, offset, mask, _m_n = _rows(N, D, BN, BD)
    b_a = tl.load(p_bias + tl.program_id(1) * D + o_d, mask=o_d < D, other=0.0)[None, :]
    b_a += tl.load(p_h + offset, mask=mask, other=0.0)
    b_slope = 0.5 * (1.0 + tl.erf(b_a * 0.7071067811865476)) + b_a * 0.3989422804014327 * tl.exp(-0.5 * b_a * b_a)
    b_dh = tl.load(p_dz + offset, mask=mask, other=0.0) * b_slope
    tl.store(p_dh + offset, b_dh, mask=mask)
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_parts + part * D + o_d, tl.sum(b_dh, 0), mask=o_d < D)


# Launches -------------------------------------------------------------------------------------------------------------


def _launch(kernel: Any, x: Tensor, arguments: dict[str, Any]) -> Launch:
    """A program for each 4096 numbers of x [R, N, D]; what lies there contiguous."""
    (R, N, D), BD = x.shape, triton.next_power_of_2(x.shape[-1])
    BN = max(1, min(triton.next_power_of_2(N), 4096 // BD))
    placed = {name: t.contiguous() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    if "p_parts" in placed:
        placed["p_parts"] = x.new_empty(R, triton.cdiv(N, BN), *placed["p_parts"])
    return Launch(kernel, (triton.cdiv(N, BN), R), placed | {"N": N, "D": D, "BN": BN, "BD": BD}, num_warps=4)


def _norm_launch(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Launch:
    named = {"p_y": y, "p_table": table, "p_tokens": tokens, "p_weight": weight, "p_bias": bias}
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    return _launch(norm_kernel, y, named | {"p_z": out, "n": table.shape[1], "eps": eps})


def norm(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm(table[tokens] + y) of each replica."""
    launch = _norm_launch(y, table, tokens, weight, bias, eps)
    launch()
    return launch.arguments["p_z"]


def _norm_backward_launch(dz: Tensor, y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, eps: float) -> Launch:
    named = {"p_dz": dz, "p_y": y, "p_table": table, "p_tokens": tokens, "p_weight": weight}
    out = {"p_dx": torch.empty_like(y, memory_format=torch.contiguous_format), "p_parts": (2, y.shape[-1])}
    return _launch(norm_backward_kernel, y, named | out | {"n": table.shape[1], "eps": eps})


def norm_backward(
    dz: Tensor, y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.experiments.tracking.fast.readout.torch_norm_backward`."""
    launch = _norm_backward_launch(dz, y, table, tokens, weight, eps)
    launch()
    return launch.arguments["p_dx"], launch.arguments["p_parts"].sum(1)


def _gelu_launch(h: Tensor, bias: Tensor) -> Launch:
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    return _launch(bias_gelu_kernel, h, {"p_h": h, "p_bias": bias, "p_z": out})


def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """GELU(h + bias) of each replica."""
    launch = _gelu_launch(h, bias)
    launch()
    return launch.arguments["p_z"]


def _gelu_backward_launch(dz: Tensor, h: Tensor, bias: Tensor) -> Launch:
    out = {"p_dh": torch.empty_like(h, memory_format=torch.contiguous_format), "p_parts": (h.shape[-1],)}
    return _launch(bias_gelu_backward_kernel, h, {"p_dz": dz, "p_h": h, "p_bias": bias} | out)


def bias_gelu_backward(dz: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.experiments.tracking.fast.readout.torch_gelu_backward`."""
    launch = _gelu_backward_launch(dz, h, bias)
    launch()
    return launch.arguments["p_dh"], launch.arguments["p_parts"].sum(1)


def launches(y: Tensor, table: Tensor, tokens: Tensor, weight: Tensor) -> list[Launch]:
    """All launches: for compiling, not for running."""
    return [
        _norm_launch(y, table, tokens, weight, weight, 1e-5),
        _norm_backward_launch(y, y, table, tokens, weight, 1e-5),
        _gelu_launch(y, weight),
        _gelu_backward_launch(y, y, weight),
    ]
