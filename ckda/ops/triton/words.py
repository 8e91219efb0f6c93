"""The kernels of :mod:`ckda.ops.words`: one program a word and head, the state in registers, rows of tables looked up by symbol.

The formulas are those of :mod:`ckda.ops.triton.recurrent`. What depends on the symbol alone (norms, gates) is in the tables
already, so that a token costs little but its products. In the forward pass and in the pass from the last token the sums run
over K, and a thread holds many channels of one column; in the pass from the first token they run over V, and it holds S^T.

Everything is float32. Each number is written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import Launch, power_of_two

__all__ = ["backward", "forward", "launches", "words_backward_kernel", "words_kernel"]


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
    b_S = tl.zeros([BK, BV], tl.float32)
    for t in range(T):
        row = first + tl.load(p_letter + t).to(tl.int32)
        b_q = tl.load(p_q + row * K + b_channel, mask=m_channel, other=0.0)
        b_k = tl.load(p_k + row * K + b_channel, mask=m_channel, other=0.0)
        b_alpha = tl.load(p_alpha + row * K + b_channel, mask=m_channel, other=0.0)
        b_r = tl.load(p_v + row * V + b_value, mask=m_value, other=0.0)
        b_rho = tl.load(p_rho + row)
        b_S *= b_alpha[:, None]
        b_r -= tl.sum(b_S * b_k[:, None], 0)
        b_S += b_k[:, None] * (b_r * b_rho)[None, :]
        tl.store(p_o + o_v, tl.sum(b_S * b_q[:, None], 0), mask=m_value)
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
    b_E = tl.zeros([BK, BV], tl.float32)
    for step in range(T):
        t = T - 1 - step
        row = first + tl.load(p_letter + t).to(tl.int32)
        b_q = tl.load(p_q + row * K + b_channel, mask=m_channel, other=0.0)
        b_k = tl.load(p_k + row * K + b_channel, mask=m_channel, other=0.0)
        b_alpha = tl.load(p_alpha + row * K + b_channel, mask=m_channel, other=0.0)
        b_rho = tl.load(p_rho + row)
        b_do = tl.load(p_do + t * (H * V) + b_value, mask=m_value, other=0.0)
        b_r = tl.load(p_r + t * (H * V) + b_value, mask=m_value, other=0.0)
        # without q do^T, this token's own readout, whose part is added below
        tl.store(p_Eu + t * (H * K) + b_channel, tl.sum(b_E * (b_r * b_rho)[None, :], 1), mask=m_channel)
        b_E += b_q[:, None] * b_do[None, :]
        b_du = tl.sum(b_E * b_k[:, None], 0)
        b_dr = b_du * b_rho
        tl.store(p_drho + t * W, tl.sum(b_du * b_r, 0))
        tl.store(p_dv + t * W + b_value, b_dr, mask=m_value)
        b_E = (b_E - b_k[:, None] * b_dr[None, :]) * b_alpha[:, None]
    b_S = tl.zeros([BV, BK], tl.float32)
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
        b_S *= b_alpha[None, :]
        b_dq = tl.sum(b_S * b_do[:, None], 0)
        b_dk = -tl.sum(b_S * b_dr[:, None], 0)
        b_Z -= b_q * b_dq + b_k * (b_dk - b_Eu)
        b_own = tl.sum(b_u * b_do, 0)
        tl.store(p_dq + t * W + b_channel, b_dq + b_k * b_own, mask=m_channel)
        tl.store(p_dk + t * W + b_channel, b_dk + b_Eu + b_q * b_own, mask=m_channel)
        b_S += b_u[:, None] * b_k[None, :]


# Launches -------------------------------------------------------------------------------------------------------------


def _num_warps(BK: int, BV: int) -> int:
    """About eight numbers of the state a thread."""
    return min(4, max(1, BK * BV // 512))


def _arguments(x: Any, tokens: Tensor) -> tuple[dict[str, Any], tuple[int], int]:
    """What both kernels are given, their grid, and their warps."""
    (R, B, T), (heads, n, K), V = tokens.shape, x.q.shape, x.v.shape[-1]
    BK, BV = power_of_two(K), power_of_two(V)
    tables = {"p_q": x.q, "p_k": x.k, "p_alpha": x.alpha, "p_rho": x.rho}
    arguments = {name: table.contiguous() for name, table in tables.items()} | {"p_tokens": tokens.contiguous()}
    arguments |= {"B": B, "T": T, "n": n, "H": heads // R, "K": K, "V": V, "BK": BK, "BV": BV}
    return arguments, (heads * B,), _num_warps(BK, BV)


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
    from ckda.ops.words import width

    R, B, T = tokens.shape
    W = width(len(x.q) // R, x.q.shape[-1], x.v.shape[-1])
    return torch.empty(R, B * T, W, dtype=torch.float32, device=x.q.device)


def forward(x: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.ops.words.torch_forward`."""
    o, r = _outputs(x, tokens)
    forward_launch(x, tokens, o, r)()
    return o, r


def backward(do: Tensor, r: Tensor, x: Any, tokens: Tensor) -> Tensor:
    """As :func:`ckda.ops.words.torch_backward`, but for what pads a row, which nobody writes."""
    rows = _rows(x, tokens)
    backward_launch(do, r, x, tokens, rows)()
    return rows


def launches(x: Any, tokens: Tensor) -> list[Launch]:
    """Both launches: for compiling, not for running."""
    o, r = _outputs(x, tokens)
    return [forward_launch(x, tokens, o, r), backward_launch(o, r, x, tokens, _rows(x, tokens))]
