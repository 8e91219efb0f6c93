"""Sums of what programs leave as parts, so that no atomics are needed: a gradient of a parameter is the same every time."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.call import Call
from ckda.ops.triton.launch import Launch, power_of_two

__all__ = ["gate_sums", "gate_sums_kernel", "sum_kernel", "sum_parts"]

BLOCK_P, BLOCK_C = 64, 32


@triton.jit
def _column_sums(p_parts, num_parts, M, columns, m_c, BP: tl.constexpr, BC: tl.constexpr):
    """[BC] the sums over parts [num_parts, M] of these columns."""
    b_sum = tl.zeros((BP, BC), tl.float32)
    for first in range(0, num_parts, BP):
        o_p = first + tl.arange(0, BP)
        mask = (o_p < num_parts)[:, None] & m_c[None, :]
        b_sum += tl.load(p_parts + o_p.to(tl.int64)[:, None] * M + columns[None, :], mask=mask, other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=["num_parts"])
def sum_kernel(
    p_parts,  # float32 [num_parts, M]
    p_out,  # [M / STRIDE, WIDTH], or [M / STRIDE] where TOTAL
    num_parts,
    M,
    STRIDE: tl.constexpr,  # columns of a program
    WIDTH: tl.constexpr,  # those that count
    BP: tl.constexpr,
    BC: tl.constexpr,
    TOTAL: tl.constexpr,
):
    """The sum over parts; TOTAL: and over the program's columns."""
    o_c = tl.arange(0, BC)
    columns = tl.program_id(0) * STRIDE + o_c
    m_c = (o_c < WIDTH) & (columns < M)
    b_column = _column_sums(p_parts, num_parts, M, columns, m_c, BP, BC)
    if TOTAL:
        tl.store(p_out + tl.program_id(0), tl.sum(b_column, 0))
    else:
        tl.store(p_out + tl.program_id(0) * WIDTH + o_c, b_column, mask=m_c)


@triton.jit(do_not_specialize=["num_parts"])
def gate_sums_kernel(
    p_dlog_rate,  # float32 [num_parts, HV, W]
    p_dbias,  # float32 [num_parts, HV, W]
    p_dA_log,  # [HV]
    p_ddt_bias,  # [HV, K]
    num_parts,
    HV,
    W: tl.constexpr,
    K: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Both sums in one launch, a head each program: dA_log, of the channels too, then ddt_bias."""
    i, o_c = tl.program_id(0), tl.arange(0, BC)
    columns, m_c = i % HV * W + o_c, o_c < K
    if i < HV:
        b_column = _column_sums(p_dlog_rate, num_parts, HV * W, columns, m_c, BP, BC)
        tl.store(p_dA_log + i, tl.sum(b_column, 0))
    else:
        b_column = _column_sums(p_dbias, num_parts, HV * W, columns, m_c, BP, BC)
        tl.store(p_ddt_bias + (i - HV) * K + o_c, b_column, mask=m_c)


def sum_parts(parts: Tensor, out: Tensor, width: int | None = None) -> Launch:
    """From float32 [P, ..., W] to its sum over P in `out`, which may be of fewer axes: then over the last one too.

    Of the W columns only the first `width` count, where that is given.
    """
    M, W = parts[0].numel(), parts.shape[-1]
    total = out.numel() * W == M > out.numel()
    stride, width = (W, width or W) if total or width not in (None, W) else (BLOCK_C, BLOCK_C)
    arguments = {
        "p_parts": parts,
        "p_out": out,
        "num_parts": parts.shape[0],
        "M": M,
        "STRIDE": stride,
        "WIDTH": width,
        "BP": BLOCK_P,
        "BC": power_of_two(stride),
        "TOTAL": total,
    }
    return Launch(sum_kernel, (-(-M // stride),), arguments, num_warps=8 if total else 4)


def _both_sums(dlog_rate: Tensor, dbias: Tensor, dA_log: Tensor, ddt_bias: Tensor, K: int) -> Launch:
    num_parts, HV, W = dbias.shape
    arguments = {
        "p_dlog_rate": dlog_rate,
        "p_dbias": dbias,
        "p_dA_log": dA_log,
        "p_ddt_bias": ddt_bias,
        "num_parts": num_parts,
        "HV": HV,
        "W": W,
        "K": K,
        "BP": BLOCK_P,
        "BC": power_of_two(W),
    }
    return Launch(gate_sums_kernel, (2 * HV,), arguments, num_warps=8)


def gate_sums(call: Call, out: dict[str, Any]) -> tuple[list[Launch], Tensor | None, Tensor | None]:
    """dA_log [HV] and ddt_bias [HV * K] from the parts that a backward kernel leaves, and the launches that write them."""
    sums, K = [], call.q.shape[3]
    dA_log, ddt_bias = (None if x is None else torch.empty_like(x) for x in (call.A_log, call.dt_bias))
    if dA_log is not None and ddt_bias is not None:
        return [_both_sums(out["p_dlog_rate"], out["p_dbias"], dA_log, ddt_bias, K)], dA_log, ddt_bias
    if dA_log is not None:
        sums.append(sum_parts(out["p_dlog_rate"], dA_log, K))
    if ddt_bias is not None:
        sums.append(sum_parts(out["p_dbias"], ddt_bias, K))
    return sums, dA_log, ddt_bias
