"""The kernels of words.py: one program a word and head, the state in registers, rows of tables looked up by symbol.

The formulas are those of :mod:`ckda.ops.triton.recurrent`. What depends on the symbol alone (norms, gates) is in the tables
already, so that a token costs little but its products. A thread holds neighbours along the axis that most sums run over: K in
the forward pass and in the pass from the last token, whose states are held as S^T, and V in the pass from the first.

Everything is float32. Each number is written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import Launch, power_of_two, state_warps
from ckda.ops.triton.recurrent import _head
from ckda.ops.triton.tile import alpha_gate, gate_gradient, learning_rate

__all__ = ["backward", "forward", "launches", "sum_by_symbol", "tables", "tables_backward"]


@triton.jit
def _empty_state(p_any, T, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros [ROWS, COLUMNS], spread over the threads as a tile of memory: four neighbours of a row each.

    They are loaded, from nowhere, for it is loads that this compiler lays out so; zeros it lays out one by one, and then what
    is looked up takes four times as many instructions.
    """
    offset = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(p_any + offset, mask=offset + T < 0, other=0.0)


@triton.jit
def words_kernel(
    p_q,  # [R * H, n, K]
    p_k,
    p_alpha,
    p_v,  # [R * H, n, V]
    p_rho,  # [R * H, n]
    p_tokens,  # [R * B, T]
    p_o,  # out [R * B, T, H, V]
    p_r,  # out [R * B, T, H, V]
    B,
    T,
    n,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One word and head."""
    i_h, i_n = tl.program_id(0) % H, tl.program_id(0) // H
    first = ((i_n // B) * H + i_h) * n
    b_channel, b_value = tl.arange(0, BK), tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    o_v = (i_n.to(tl.int64) * T * H + i_h) * V + b_value
    p_letter = p_tokens + i_n.to(tl.int64) * T
    b_S = _empty_state(p_q, T, BV, BK)
    for t in range(T):
        row = first + tl.load(p_letter + t).to(tl.int32)
        b_q = tl.load(p_q + row * K + b_channel, mask=m_channel, other=0.0)
        b_k = tl.load(p_k + row * K + b_channel, mask=m_channel, other=0.0)
        b_alpha = tl.load(p_alpha + row * K + b_channel, mask=m_channel, other=0.0)
        b_r = tl.load(p_v + row * V + b_value, mask=m_value, other=0.0)
        b_rho = tl.load(p_rho + row)
        b_S *= b_alpha[None, :]
        b_r -= tl.sum(b_S * b_k[None, :], 1)
        b_S += (b_r * b_rho)[:, None] * b_k[None, :]
        tl.store(p_o + o_v, tl.sum(b_S * b_q[None, :], 1), mask=m_value)
        tl.store(p_r + o_v, b_r, mask=m_value)
        o_v += H * V


@triton.jit
def words_backward_kernel(
    p_q,  # [R * H, n, K]
    p_k,
    p_alpha,
    p_rho,  # [R * H, n]
    p_tokens,  # [R * B, T]
    p_r,  # [R * B, T, H, V]
    p_do,  # [R * B, T, H, V]
    p_Eu,  # scratch [R * B, T, H, K]
    p_rows,  # out [R * B, T, W]: dq, dk, dlog|alpha| [H, K] each, dv [H, V], drho [H]
    B,
    T,
    n,
    W,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One word and head: first backwards, then forwards."""
    i_h, i_n = tl.program_id(0) % H, tl.program_id(0) // H
    first = ((i_n // B) * H + i_h) * n
    b_channel, b_value = tl.arange(0, BK), tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    begin = i_n.to(tl.int64) * T
    p_letter = p_tokens + begin
    p_r += (begin * H + i_h) * V
    p_do += (begin * H + i_h) * V
    p_Eu += (begin * H + i_h) * K
    p_dq = p_rows + begin * W + i_h * K
    p_dk = p_dq + H * K
    p_dlog = p_dk + H * K
    p_dv = p_rows + begin * W + 3 * H * K + i_h * V
    p_drho = p_rows + begin * W + 3 * H * K + H * V + i_h
    b_E = _empty_state(p_q, T, BV, BK)
    b_do_next = tl.load(
        p_do + (T - 1) * (H * V) + b_value, mask=m_value, other=0.0
    )  # a token ahead: it comes from afar
    b_r_next = tl.load(p_r + (T - 1) * (H * V) + b_value, mask=m_value, other=0.0)
    for step in range(T):
        t = T - 1 - step
        row = first + tl.load(p_letter + t).to(tl.int32)
        b_q = tl.load(p_q + row * K + b_channel, mask=m_channel, other=0.0)
        b_k = tl.load(p_k + row * K + b_channel, mask=m_channel, other=0.0)
        b_alpha = tl.load(p_alpha + row * K + b_channel, mask=m_channel, other=0.0)
        b_rho = tl.load(p_rho + row)
        b_do, b_r = b_do_next, b_r_next
        o_next = tl.maximum(t - 1, 0) * (H * V) + b_value
        b_do_next = tl.load(p_do + o_next, mask=m_value, other=0.0)
        b_r_next = tl.load(p_r + o_next, mask=m_value, other=0.0)
        # without q do^T, this token's own readout, whose part is added below
        tl.store(p_Eu + t * (H * K) + b_channel, tl.sum(b_E * (b_r * b_rho)[:, None], 0), mask=m_channel)
        b_E += b_do[:, None] * b_q[None, :]
        b_du = tl.sum(b_E * b_k[None, :], 1)
        b_dr = b_du * b_rho
        tl.store(p_drho + t * W, tl.sum(b_du * b_r, 0))
        tl.store(p_dv + t * W + b_value, b_dr, mask=m_value)
        b_E = (b_E - b_dr[:, None] * b_k[None, :]) * b_alpha[None, :]
    b_S = _empty_state(p_q, T, BK, BV)
    b_Z = tl.zeros([BK], tl.float32)
    tl.debug_barrier()  # what the first loop wrote is read by other threads now
    for t in range(T):
        row = first + tl.load(p_letter + t).to(tl.int32)
        b_q = tl.load(p_q + row * K + b_channel, mask=m_channel, other=0.0)
        b_k = tl.load(p_k + row * K + b_channel, mask=m_channel, other=0.0)
        b_alpha = tl.load(p_alpha + row * K + b_channel, mask=m_channel, other=0.0)
        b_do = tl.load(p_do + t * (H * V) + b_value, mask=m_value, other=0.0)
        b_u = tl.load(p_r + t * (H * V) + b_value, mask=m_value, other=0.0) * tl.load(p_rho + row)
        b_dr = tl.load(p_dv + t * W + b_value, mask=m_value, other=0.0)
        b_Eu = tl.load(p_Eu + t * (H * K) + b_channel, mask=m_channel, other=0.0)
        tl.store(p_dlog + t * W + b_channel, b_Z, mask=m_channel)
        b_S *= b_alpha[:, None]
        b_dq = tl.sum(b_S * b_do[None, :], 1)
        b_dk = -tl.sum(b_S * b_dr[None, :], 1)
        b_Z -= b_q * b_dq + b_k * (b_dk - b_Eu)
        b_own = tl.sum(b_u * b_do, 0)
        tl.store(p_dq + t * W + b_channel, b_dq + b_k * b_own, mask=m_channel)
        tl.store(p_dk + t * W + b_channel, b_dk + b_Eu + b_q * b_own, mask=m_channel)
        b_S += b_k[:, None] * b_u[None, :]


# Sums by symbol ---------------------------------------------------------------------------------------------------------


@triton.jit
def words_sum_kernel(
    p_rows,  # [R, N, D]
    p_tokens,  # [R, N]
    p_parts,  # out [R, programs, n, D]
    N,
    size,
    n,
    D: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The sums of each symbol's rows over `size` tokens, BD columns; one after the other."""
    i_d, i_p, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d, b_symbol = i_d * BD + tl.arange(0, BD)[None, :], tl.arange(0, BS)[:, None]
    m_d = o_d < D
    last = tl.minimum((i_p + 1) * size, N)
    b_sum = tl.zeros([BS, BD], tl.float32)
    for begin in range(i_p * size, last, UNROLL):
        for step in tl.static_range(UNROLL):
            inside = begin + step < last
            token = i_r * N + begin + step
            symbol = tl.load(p_tokens + token, mask=inside, other=-1).to(tl.int32)
            b_row = tl.load(p_rows + token * D + o_d, mask=m_d & inside, other=0.0)
            b_sum += (b_symbol == symbol).to(tl.float32) * b_row
    part = (i_r * tl.num_programs(1) + i_p) * n + b_symbol
    tl.store(p_parts + part * D + o_d, b_sum, mask=(b_symbol < n) & m_d)


# Tables -----------------------------------------------------------------------------------------------------------------


@triton.jit
def _unit_rows(b_x, length, NORMALIZE: tl.constexpr):
    """Rows [BN, BK] of unit length times `length`; 1/|x| and |x|^2 as rounded [BN]: as in the recurrence."""
    b_inverse = tl.sum(b_x * 0.0, 1) + 1.0
    b_norm2 = b_inverse
    if NORMALIZE:
        b_square = tl.sum(b_x * b_x, 1)
        b_inverse = tl.where(b_square > 0, 1.0 / tl.sqrt_rn(tl.where(b_square > 0, b_square, 1.0)), 0.0)
        b_x *= (b_inverse * length)[:, None]
        b_wide = b_x.to(tl.float64)
        b_norm2 = tl.sum(b_wide * b_wide, 1)
        b_norm2 = tl.where(b_norm2 > 0, b_norm2, 1.0).to(tl.float32)
    else:
        b_x *= length
    return b_x, b_inverse, b_norm2


@triton.jit
def words_tables_kernel(
    p_q,  # [R, n, H, K]
    p_k,
    p_v,  # [R, n, H, V]
    p_g,  # [R, n, H, K]
    p_beta,  # [R, n, H]
    p_A_log,  # [R, H]
    p_dt_bias,  # [R, H * K]
    p_unit_q,  # out [R * H, n, K]
    p_unit_k,
    p_alpha,
    p_w,  # out [R * H, n, V]
    p_rho,  # out [R * H, n]
    n,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
):
    """All symbols of one replica and head."""
    head = tl.program_id(0)
    b_symbol, b_channel, b_value = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    m_symbol = b_symbol < n
    m_k = m_symbol[:, None] & (b_channel < K)[None, :]
    m_v = m_symbol[:, None] & (b_value < V)[None, :]
    line = ((head // H) * n + b_symbol) * H + head % H
    o_k, o_v = line[:, None] * K + b_channel[None, :], line[:, None] * V + b_value[None, :]
    b_rate, b_bias = _head(p_A_log, p_dt_bias, head, b_channel, b_channel < K, K, HAS_A_LOG, HAS_DT_BIAS)
    b_q, _, _ = _unit_rows(tl.load(p_q + o_k, mask=m_k, other=0.0), scale, NORMALIZE)
    b_k, _, b_norm2 = _unit_rows(tl.load(p_k + o_k, mask=m_k, other=0.0), 1.0, NORMALIZE)
    b_g = tl.load(p_g + o_k, mask=m_k, other=0.0)
    b_beta = tl.load(p_beta + line, mask=m_symbol, other=0.0)
    row = head * n + b_symbol
    o_k_out = row[:, None] * K + b_channel[None, :]
    tl.store(p_unit_q + o_k_out, b_q, mask=m_k)
    tl.store(p_unit_k + o_k_out, b_k, mask=m_k)
    tl.store(p_alpha + o_k_out, alpha_gate(b_g, b_rate, b_bias[None, :], GATE), mask=m_k)
    tl.store(p_w + row[:, None] * V + b_value[None, :], tl.load(p_v + o_v, mask=m_v, other=0.0), mask=m_v)
    tl.store(p_rho + row, learning_rate(b_beta, BETA_RANGE) / b_norm2, mask=m_symbol)


@triton.jit
def words_tables_backward_kernel(
    p_sums,  # [R, n, W] a symbol's gradients, as the backward recurrence lays them
    p_q,  # [R, n, H, K]
    p_k,
    p_g,
    p_beta,  # [R, n, H]
    p_A_log,
    p_dt_bias,
    p_dq,  # out [R, n, H, K]
    p_dk,
    p_dv,  # out [R, n, H, V]
    p_dg,  # out [R, n, H, K]
    p_dbeta,  # out [R, n, H]
    p_dA_log,  # out [R, H], where HAS_A_LOG
    p_ddt_bias,  # out [R, H * K], where HAS_DT_BIAS
    n,
    W,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
):
    """All symbols of one replica and head."""
    head = tl.program_id(0)
    i_h = head % H
    b_symbol, b_channel, b_value = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    m_symbol = b_symbol < n
    m_k = m_symbol[:, None] & (b_channel < K)[None, :]
    m_v = m_symbol[:, None] & (b_value < V)[None, :]
    symbol = (head // H) * n + b_symbol
    line = symbol * H + i_h
    o_k, o_v = line[:, None] * K + b_channel[None, :], line[:, None] * V + b_value[None, :]
    o_sum_k = symbol[:, None] * W + i_h * K + b_channel[None, :]
    o_sum_v = symbol[:, None] * W + 3 * H * K + i_h * V + b_value[None, :]
    b_rate, b_bias = _head(p_A_log, p_dt_bias, head, b_channel, b_channel < K, K, HAS_A_LOG, HAS_DT_BIAS)
    b_q, b_q_inverse, _ = _unit_rows(tl.load(p_q + o_k, mask=m_k, other=0.0), 1.0, NORMALIZE)
    b_k, b_k_inverse, b_norm2 = _unit_rows(tl.load(p_k + o_k, mask=m_k, other=0.0), 1.0, NORMALIZE)
    b_dq = tl.load(p_sums + o_sum_k, mask=m_k, other=0.0) * scale
    b_dk = tl.load(p_sums + o_sum_k + H * K, mask=m_k, other=0.0)
    if NORMALIZE:
        b_dq = (b_dq - b_q * tl.sum(b_q * b_dq, 1)[:, None]) * b_q_inverse[:, None]
        b_dk = (b_dk - b_k * tl.sum(b_k * b_dk, 1)[:, None]) * b_k_inverse[:, None]
    tl.store(p_dq + o_k, b_dq, mask=m_k)
    tl.store(p_dk + o_k, b_dk, mask=m_k)
    tl.store(p_dv + o_v, tl.load(p_sums + o_sum_v, mask=m_v, other=0.0), mask=m_v)
    b_beta = tl.load(p_beta + line, mask=m_symbol, other=0.0)
    o_rho = symbol * W + 3 * H * K + H * V + i_h
    b_dbeta = tl.load(p_sums + o_rho, mask=m_symbol, other=0.0) / b_norm2
    if BETA_RANGE > 0:
        b_dbeta *= learning_rate(b_beta, BETA_RANGE) * learning_rate(-b_beta, 1)
    tl.store(p_dbeta + line, b_dbeta, mask=m_symbol)
    b_dlog = tl.load(p_sums + o_sum_k + 2 * H * K, mask=m_k, other=0.0)
    b_g = tl.load(p_g + o_k, mask=m_k, other=0.0)
    b_dg, b_dlog_rate = gate_gradient(b_dlog, b_g, b_rate, b_bias[None, :], GATE)
    tl.store(p_dg + o_k, b_dg, mask=m_k)
    if HAS_A_LOG:
        tl.store(p_dA_log + head, tl.sum(tl.sum(b_dlog_rate, 1), 0))
    if HAS_DT_BIAS:
        tl.store(p_ddt_bias + head * K + b_channel, tl.sum(b_dg, 0), mask=b_channel < K)


# Launches -------------------------------------------------------------------------------------------------------------


def _arguments(x: Any, tokens: Tensor) -> tuple[dict[str, Any], tuple[int], int]:
    """What both kernels are given, their grid, and their warps."""
    (R, B, T), (heads, n, K), V = tokens.shape, x.q.shape, x.v.shape[-1]
    BK, BV = power_of_two(K), power_of_two(V)
    tables = {"p_q": x.q, "p_k": x.k, "p_alpha": x.alpha, "p_rho": x.rho}
    arguments = {name: table.contiguous() for name, table in tables.items()} | {"p_tokens": tokens.contiguous()}
    arguments |= {"B": B, "T": T, "n": n, "H": heads // R, "K": K, "V": V, "BK": BK, "BV": BV}
    return arguments, (heads * B,), state_warps(BK, BV)


def forward_launch(x: Any, tokens: Tensor, o: Tensor, r: Tensor) -> Launch:
    """The forward pass into o and r."""
    arguments, grid, warps = _arguments(x, tokens)
    return Launch(words_kernel, grid, arguments | {"p_v": x.v.contiguous(), "p_o": o, "p_r": r}, num_warps=warps)


def backward_launch(do: Tensor, r: Tensor, x: Any, tokens: Tensor, rows: Tensor) -> Launch:
    """The backward pass into rows [R, B * T, W]."""
    arguments, grid, warps = _arguments(x, tokens)
    Eu = torch.empty(*r.shape[:-1], x.q.shape[-1], dtype=torch.float32, device=r.device)
    arguments |= {"p_r": r, "p_do": do.contiguous(), "p_Eu": Eu, "p_rows": rows, "W": rows.shape[-1]}
    return Launch(words_backward_kernel, grid, arguments, num_warps=warps)


def _outputs(x: Any, tokens: Tensor) -> list[Tensor]:
    shape = (*tokens.shape, len(x.v) // len(tokens), x.v.shape[-1])
    return [torch.empty(shape, dtype=torch.float32, device=x.v.device) for _ in range(2)]


def _rows(x: Any, tokens: Tensor) -> Tensor:
    from ckda.experiments.tracking.fast.words import width

    R, B, T = tokens.shape
    W = width(len(x.q) // R, x.q.shape[-1], x.v.shape[-1])
    return torch.empty(R, B * T, W, dtype=torch.float32, device=x.q.device)


def forward(x: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.experiments.tracking.fast.words.torch_forward`."""
    o, r = _outputs(x, tokens)
    forward_launch(x, tokens, o, r)()
    return o, r


def backward(do: Tensor, r: Tensor, x: Any, tokens: Tensor) -> Tensor:
    """As :func:`ckda.experiments.tracking.fast.words.torch_backward`, but for what pads a row, which nobody writes."""
    rows = _rows(x, tokens)
    backward_launch(do, r, x, tokens, rows)()
    return rows


def _table_arguments(raw: Any, options: Any) -> dict[str, Any]:
    (_, n, H, K), V = raw.q.shape, raw.v.shape[-1]
    named = {
        "p_q": raw.q,
        "p_k": raw.k,
        "p_g": raw.g,
        "p_beta": raw.beta,
        "p_A_log": raw.A_log,
        "p_dt_bias": raw.dt_bias,
    }
    return {name: None if x is None else x.contiguous() for name, x in named.items()} | {
        "n": n,
        "scale": options.scale,
        "H": H,
        "K": K,
        "V": V,
        "BN": power_of_two(n),
        "BK": power_of_two(K),
        "BV": power_of_two(V),
        "GATE": options.gate or "none",
        "HAS_A_LOG": raw.A_log is not None,
        "HAS_DT_BIAS": raw.dt_bias is not None,
        "NORMALIZE": options.normalize_qk,
        "BETA_RANGE": options.beta_range or 0,
    }


def _tables_launch(raw: Any, options: Any) -> Launch:
    (R, n, H, K), V = raw.q.shape, raw.v.shape[-1]
    widths = {"p_unit_q": (K,), "p_unit_k": (K,), "p_alpha": (K,), "p_w": (V,), "p_rho": ()}
    out = {name: raw.q.new_empty(R * H, n, *width) for name, width in widths.items()}
    arguments = _table_arguments(raw, options) | {"p_v": raw.v.contiguous()} | out
    return Launch(words_tables_kernel, (R * H,), arguments, num_warps=4)


def tables(raw: Any, options: Any) -> list[Tensor]:
    """As :func:`ckda.experiments.tracking.fast.words.torch_tables`."""
    launch = _tables_launch(raw, options)
    launch()
    return [launch.arguments[name] for name in ("p_unit_q", "p_unit_k", "p_alpha", "p_w", "p_rho")]


def _tables_backward_launch(sums: Tensor, raw: Any, options: Any) -> Launch:
    like = {"p_dq": raw.q, "p_dk": raw.k, "p_dv": raw.v, "p_dg": raw.g, "p_dbeta": raw.beta}
    like |= {"p_dA_log": raw.A_log, "p_ddt_bias": raw.dt_bias}
    out = {
        name: None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for name, x in like.items()
    }
    arguments = _table_arguments(raw, options) | {"p_sums": sums.contiguous(), "W": sums.shape[-1]} | out
    R, _, H, _ = raw.q.shape
    return Launch(words_tables_backward_kernel, (R * H,), arguments, num_warps=4)


def tables_backward(sums: Tensor, raw: Any, options: Any) -> list[Tensor | None]:
    """As :func:`ckda.experiments.tracking.fast.words.torch_tables_backward`."""
    launch = _tables_backward_launch(sums, raw, options)
    launch()
    names = ("p_dq", "p_dk", "p_dv", "p_dg", "p_dbeta", "p_dA_log", "p_ddt_bias")
    return [launch.arguments[name] for name in names]


MOST_SYMBOLS = 32  # for whose sums a program has the registers
_PROGRAMS = 384  # pieces of all replicas together, for each block of columns: enough to fill a device


def _sum_launch(rows: Tensor, tokens: Tensor, num_symbols: int) -> Launch:
    R, N, D = rows.shape
    pieces = max(1, min(128, _PROGRAMS // R, N // 32))
    arguments: dict[str, Any] = {"p_rows": rows.contiguous(), "p_tokens": tokens.contiguous()}
    arguments["p_parts"] = rows.new_empty(R, pieces, num_symbols, D)
    BS = max(8, triton.next_power_of_2(num_symbols))
    BD = min(1024 // BS, max(32, triton.next_power_of_2(D)))
    arguments |= {"N": N, "size": -(-N // pieces), "n": num_symbols, "D": D, "BS": BS, "BD": BD, "UNROLL": 8}
    return Launch(words_sum_kernel, (-(-D // BD), pieces, R), arguments, num_warps=1)


def sum_by_symbol(rows: Tensor, tokens: Tensor, num_symbols: int) -> Tensor:
    """As :func:`ckda.experiments.tracking.fast.words.sum_by_symbol`, for at most MOST_SYMBOLS."""
    launch = _sum_launch(rows, tokens, num_symbols)
    launch()
    return launch.arguments["p_parts"].sum(1)


def launches(raw: Any, options: Any, tokens: Tensor) -> list[Launch]:
    """All launches: for compiling, not for running."""
    from ckda.experiments.tracking.fast.words import Tables

    making = _tables_launch(raw, options)
    x = Tables(*(making.arguments[name] for name in ("p_unit_q", "p_unit_k", "p_alpha", "p_w", "p_rho")))
    o, r = _outputs(x, tokens)
    rows = _rows(x, tokens)
    return [
        making,
        forward_launch(x, tokens, o, r),
        backward_launch(o, r, x, tokens, rows),
        _sum_launch(rows, tokens.flatten(1), raw.q.shape[1]),
        _tables_backward_launch(rows[:, : raw.q.shape[1]], raw, options),
    ]
