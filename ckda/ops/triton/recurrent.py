"""The recurrence itself, for short sequences and small heads: one program a sequence and value head, the state in registers.

With D_t = Diag(alpha_t) S_{t-1}, r_t = v_t - D_t^T k_t, u_t = rho_t r_t and rho = beta / |k|^2:

    S_t = D_t + k_t u_t^T,    o_t = S_t^T q_t.

Only r is kept. Backward, from the last token, with E_t the gradient of S_t:

    du = E^T k,    dv = dr = rho du,    drho = du . r,    E_{t-1} = alpha * (E_t - k dr^T) + q_{t-1} do_{t-1}^T,

and then from the first token again, with the states made anew from r: dq = S do, and dk = E u - D dr. The gradient of log|alpha_t|
is Z_{t-1} = sum_V S_{t-1} * dS_{t-1}, which the same pass carries: Z_t = Z_{t-1} - (q * dq - k * (D dr) - k * (E u)), where
the part of dq that token t wrote itself, k (u . do), cancels against the same part of E u and is left out of both. No state is
stored.

Everything is float32, |k|^2 float64. Each gradient is written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.call import Call, Gradients, at_time
from ckda.ops.triton import replay
from ckda.ops.triton.launch import (
    Launch,
    aligned,
    assemble,
    contiguous,
    gate_arguments,
    power_of_two,
    state_warps,
    tidied,
)
from ckda.ops.triton.replay import Kept
from ckda.ops.triton.sums import gate_sums
from ckda.ops.triton.tile import alpha_gate, gate_gradient, learning_rate

__all__ = ["backward", "forward", "launches", "recurrent_backward_kernel", "recurrent_kernel", "saved_like", "step"]


@triton.jit
def _span(p_cu_seqlens, i_n, T, PACKED: tl.constexpr):
    """First token and number of tokens of a sequence."""
    if PACKED:
        begin = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        num = (tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        begin = i_n.to(tl.int64) * T
        num = T
    return begin, num


@triton.jit
def _unit(p_x, o_x, m_channel, length, NORMALIZE: tl.constexpr):
    """A unit key or query [BK] times `length`, in float32; 1/|x|, and |x|^2 as rounded."""
    b_x = tl.load(p_x + o_x, mask=m_channel, other=0.0).to(tl.float32)
    b_inverse = 1.0
    b_norm2 = 1.0
    if NORMALIZE:
        b_square = tl.sum(b_x * b_x, 0)
        b_inverse = tl.where(b_square > 0, 1.0 / tl.sqrt_rn(tl.where(b_square > 0, b_square, 1.0)), 0.0)
        b_x *= b_inverse * length
        b_wide = b_x.to(tl.float64)
        b_norm2 = tl.sum(b_wide * b_wide, 0)
        b_norm2 = tl.where(b_norm2 > 0, b_norm2, 1.0).to(tl.float32)
    else:
        b_x *= length
    return b_x, b_inverse, b_norm2


@triton.jit
def _token(
    p_q, p_k, p_g, p_beta, p_sign, b_rate, b_bias, token, i_hv, b_channel, m_channel, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    GATE: tl.constexpr, SIGNED: tl.constexpr, NORMALIZE: tl.constexpr, BETA_RANGE: tl.constexpr,
):  # fmt: skip
    """One token's (q, k, alpha, rho, g, 1/|q|, 1/|k|, |k|^2, beta as given)."""
    line = token * HV + i_hv
    o_k = (token * H + i_hv // (HV // H)) * K + b_channel
    b_q, b_q_inverse, _ = _unit(p_q, o_k, m_channel, scale, NORMALIZE)
    b_k, b_k_inverse, b_norm2 = _unit(p_k, o_k, m_channel, 1.0, NORMALIZE)
    b_g = tl.load(p_g + line * K + b_channel, mask=m_channel, other=0.0).to(tl.float32)
    b_alpha = alpha_gate(b_g, b_rate, b_bias, GATE)
    if SIGNED:
        b_alpha *= tl.load(p_sign + line * K + b_channel, mask=m_channel, other=1).to(tl.float32)
    b_beta = tl.load(p_beta + line).to(tl.float32)
    b_rho = learning_rate(b_beta, BETA_RANGE) / b_norm2
    return b_q, b_k, b_alpha, b_rho, b_g, b_q_inverse, b_k_inverse, b_norm2, b_beta


@triton.jit
def _head(
    p_A_log, p_dt_bias, i_hv, b_channel, m_channel, K: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr
):
    """The head's rate exp(A_log), a number, and its bias [BK]."""
    b_rate = 1.0
    b_bias = tl.zeros_like(b_channel).to(tl.float32)
    if HAS_A_LOG:
        b_rate = tl.exp(tl.load(p_A_log + i_hv).to(tl.float32))
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * K + b_channel, mask=m_channel, other=0.0).to(tl.float32)
    return b_rate, b_bias


@triton.jit
def recurrent_kernel(
    p_q,  # [B * T, H, K]
    p_k,
    p_v,  # [B * T, HV, V]
    p_g,  # [B * T, HV, K]
    p_beta,  # [B * T, HV]
    p_sign,
    p_A_log,
    p_dt_bias,
    p_initial,  # float32 [N, HV, K, V]
    p_cu_seqlens,
    p_o,  # out [B * T, HV, V]
    p_r,  # out float32 [B * T, HV, V], where SAVE
    p_final,  # out float32 [N, HV, K, V]; may be p_initial
    T,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One sequence, value head and block of BV value columns."""
    i_v, i_hv, i_n = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    begin, num = _span(p_cu_seqlens, i_n, T, PACKED)
    b_channel, b_value = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    m_state = m_channel[:, None] & m_value[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_hv) * (K * V) + b_channel[:, None] * V + b_value[None, :]
    b_rate, b_bias = _head(p_A_log, p_dt_bias, i_hv, b_channel, m_channel, K, HAS_A_LOG, HAS_DT_BIAS)
    b_S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        b_S += tl.load(p_initial + o_state, mask=m_state, other=0.0)
    for t in range(num):
        o_v = ((begin + t) * HV + i_hv) * V + b_value
        b_q, b_k, b_alpha, b_rho, _, _, _, _, _ = _token(
            p_q, p_k, p_g, p_beta, p_sign, b_rate, b_bias, begin + t, i_hv, b_channel, m_channel, scale,
            H, HV, K, GATE, SIGNED, NORMALIZE, BETA_RANGE,
        )  # fmt: skip
        b_r = tl.load(p_v + o_v, mask=m_value, other=0.0).to(tl.float32)
        b_S *= b_alpha[:, None]
        b_r -= tl.sum(b_S * b_k[:, None], 0)
        b_S += b_k[:, None] * (b_r * b_rho)[None, :]
        tl.store(p_o + o_v, tl.sum(b_S * b_q[:, None], 0), mask=m_value)
        if SAVE:
            tl.store(p_r + o_v, b_r, mask=m_value)
    if STORE_FINAL:
        tl.store(p_final + o_state, b_S, mask=m_state)


@triton.jit
def recurrent_backward_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_sign,
    p_A_log,
    p_dt_bias,
    p_initial,
    p_cu_seqlens,
    p_r,  # float32 [B * T, HV, V]
    p_do,  # [B * T, HV, V]
    p_dfinal,  # float32 [N, HV, K, V]
    p_dr,  # scratch float32 [B * T, HV, V]
    p_Eu,  # scratch float32 [B * T, HV, K]
    p_dq,  # out [B * T, HV, K]
    p_dk,
    p_dv,  # out [B * T, HV, V]
    p_dg,  # out [B * T, HV, K]
    p_dbeta,  # out [B * T, HV]
    p_dlog_rate,  # out float32 [N, HV, K] the sequence's part of dA_log, where HAS_A_LOG
    p_dbias,  # out float32 [N, HV, K] the sequence's part of ddt_bias, where HAS_DT_BIAS
    p_dinitial,  # out float32 [N, HV, K, V]
    T,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One sequence and value head: first backwards, then forwards (see the module)."""
    i_hv, i_n = tl.program_id(1), tl.program_id(0)
    begin, num = _span(p_cu_seqlens, i_n, T, PACKED)
    b_channel, b_value = tl.arange(0, BK), tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    m_state = m_channel[:, None] & m_value[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_hv) * (K * V) + b_channel[:, None] * V + b_value[None, :]
    b_rate, b_bias = _head(p_A_log, p_dt_bias, i_hv, b_channel, m_channel, K, HAS_A_LOG, HAS_DT_BIAS)
    b_E = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        b_E += tl.load(p_dfinal + o_state, mask=m_state, other=0.0)
    for step in range(num):
        token = begin + num - 1 - step
        line = token * HV + i_hv
        b_q, b_k, b_alpha, b_rho, _, _, _, b_norm2, b_beta = _token(
            p_q, p_k, p_g, p_beta, p_sign, b_rate, b_bias, token, i_hv, b_channel, m_channel, scale,
            H, HV, K, GATE, SIGNED, NORMALIZE, BETA_RANGE,
        )  # fmt: skip
        b_do = tl.load(p_do + line * V + b_value, mask=m_value, other=0.0).to(tl.float32)
        b_r = tl.load(p_r + line * V + b_value, mask=m_value, other=0.0)
        # without q do^T, this token's own readout, whose part is added below
        tl.store(p_Eu + line * K + b_channel, tl.sum(b_E * (b_r * b_rho)[None, :], 1), mask=m_channel)
        b_E += b_q[:, None] * b_do[None, :]
        b_du = tl.sum(b_E * b_k[:, None], 0)
        b_dr = b_du * b_rho
        b_dbeta = tl.sum(b_du * b_r, 0) / b_norm2
        if BETA_RANGE > 0:
            b_dbeta *= learning_rate(b_beta, BETA_RANGE) * learning_rate(-b_beta, 1)
        tl.store(p_dbeta + line, b_dbeta)
        tl.store(p_dr + line * V + b_value, b_dr, mask=m_value)
        tl.store(p_dv + line * V + b_value, b_dr, mask=m_value)
        b_E = (b_E - b_k[:, None] * b_dr[None, :]) * b_alpha[:, None]
    b_S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        tl.store(p_dinitial + o_state, b_E, mask=m_state)
        b_S += tl.load(p_initial + o_state, mask=m_state, other=0.0)
    b_Z = tl.sum(b_S * b_E, 1)
    b_dlog_rate_sum = tl.zeros([BK], tl.float32)
    b_dbias_sum = tl.zeros([BK], tl.float32)
    tl.debug_barrier()  # what the first loop wrote is read by other threads now
    for t in range(num):
        token = begin + t
        line = token * HV + i_hv
        b_q, b_k, b_alpha, b_rho, b_g, b_q_inverse, b_k_inverse, _, _ = _token(
            p_q, p_k, p_g, p_beta, p_sign, b_rate, b_bias, token, i_hv, b_channel, m_channel, scale,
            H, HV, K, GATE, SIGNED, NORMALIZE, BETA_RANGE,
        )  # fmt: skip
        b_do = tl.load(p_do + line * V + b_value, mask=m_value, other=0.0).to(tl.float32)
        b_u = tl.load(p_r + line * V + b_value, mask=m_value, other=0.0) * b_rho
        b_dr = tl.load(p_dr + line * V + b_value, mask=m_value, other=0.0)
        b_Eu = tl.load(p_Eu + line * K + b_channel, mask=m_channel, other=0.0)
        b_dg, b_dlog_rate = gate_gradient(b_Z, b_g, b_rate, b_bias, GATE)
        tl.store(p_dg + line * K + b_channel, b_dg, mask=m_channel)
        b_dlog_rate_sum += b_dlog_rate
        b_dbias_sum += b_dg
        b_S *= b_alpha[:, None]
        b_dq = tl.sum(b_S * b_do[None, :], 1)
        b_dk = -tl.sum(b_S * b_dr[None, :], 1)
        b_Z -= b_q * b_dq + b_k * (b_dk - b_Eu)
        b_own = tl.sum(b_u * b_do, 0)
        b_dq += b_k * b_own
        b_dk += b_Eu + b_q * b_own
        if NORMALIZE:
            b_unit = b_q * tl.where(scale == 0, 0.0, 1.0 / scale)
            b_dq = (b_dq - b_unit * tl.sum(b_unit * b_dq, 0)) * (b_q_inverse * scale)
            b_dk = (b_dk - b_k * tl.sum(b_k * b_dk, 0)) * b_k_inverse
        else:
            b_dq *= scale
        tl.store(p_dq + line * K + b_channel, b_dq, mask=m_channel)
        tl.store(p_dk + line * K + b_channel, b_dk, mask=m_channel)
        b_S += b_k[:, None] * b_u[None, :]
    o_part = (i_n.to(tl.int64) * HV + i_hv) * K + b_channel
    if HAS_A_LOG:
        tl.store(p_dlog_rate + o_part, b_dlog_rate_sum, mask=m_channel)
    if HAS_DT_BIAS:
        tl.store(p_dbias + o_part, b_dbias_sum, mask=m_channel)


# Launches ---------------------------------------------------------------------------------------------------------------


def _arguments(call: Call) -> dict[str, Any]:
    return gate_arguments(call) | {
        "p_initial": call.initial_state,
        "p_cu_seqlens": contiguous(call.cu_seqlens),
        "V": call.v.shape[3],
        "HAS_INITIAL": call.initial_state is not None,
    }


def forward_launch(call: Call, o: Tensor, r: Tensor | None, final: Tensor | None, BV: int) -> Launch:
    """The forward pass; also one step of decoding, where `final` may be the initial state itself."""
    arguments = _arguments(call)
    arguments |= {
        "p_v": call.v.contiguous(),
        "p_o": o,
        "p_r": r,
        "p_final": final,
        "BV": BV,
        "SAVE": r is not None,
        "STORE_FINAL": final is not None,
    }
    HV, V = call.v.shape[2:]
    grid = (call.num_sequences, HV, -(-V // BV))
    return Launch(recurrent_kernel, grid, arguments, num_warps=state_warps(arguments["BK"], BV))


def _empty(call: Call, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=call.v.device)


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves: r alone."""
    return [_empty(call, *call.v.shape)]


def forward(call: Call, kept: Kept) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V] where it is asked for, and r."""
    call = tidied(call)
    made = replay.rerun(kept, "forward", call.tensors)
    if made is None:
        o, r = torch.empty_like(call.v), _empty(call, *call.v.shape)
        final = torch.empty_like(call.zero_state()) if call.output_final_state else None
        launch = forward_launch(call, o, r, final, power_of_two(call.v.shape[-1]))
        made = [o, final, r]
        replay.record(kept, "forward", [(launch, launch())], call.tensors, made)
    o, final, r = made  # type: ignore[assignment]
    return o, final, [r]


_STEP_BLOCK = 32  # value columns of the state that one program of a decoding step carries


def step_launch(call: Call, o: Tensor, following: Tensor) -> Launch:
    """One token: from `call.initial_state` to `following`, which may be the same memory."""
    launch = forward_launch(call, o, None, following, min(_STEP_BLOCK, power_of_two(call.v.shape[-1])))
    return launch._replace(num_warps=min(2, launch.num_warps))


def step(call: Call, inplace: bool, kept: Kept) -> tuple[Tensor, Tensor]:
    """o [B, HV, V] and the next state; each program reads its part of the state whole before it writes it."""
    state, call = call.initial_state, tidied(call)
    assert state is not None
    direct = inplace and call.initial_state is state
    name = "step in place" if direct else "step"
    made = replay.rerun(kept, name, call.tensors)
    if made is None:
        o, following = torch.empty_like(call.v), state if direct else torch.empty_like(call.start_state())
        launch = step_launch(at_time(call), o, following)
        made = [o, None if direct else following]
        replay.record(kept, name, [(launch, launch())], call.tensors, made)
    o, following = made[0], state if made[1] is None else made[1]  # type: ignore[assignment]
    if inplace and not direct:
        following = state.copy_(following)
    return o, following


def _backward_launch(call: Call, r: Tensor, do: Tensor, dfinal: Tensor | None) -> Launch:
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    N = call.num_sequences
    assert call.beta is not None
    key_dtype = call.q.dtype if H == HV else torch.float32
    arguments = _arguments(call)
    arguments |= {
        "p_r": r,
        "p_do": do,
        "p_dfinal": dfinal,
        "p_dr": _empty(call, B, T, HV, V),
        "p_Eu": _empty(call, B, T, HV, K),
        "p_dq": _empty(call, B, T, HV, K, dtype=key_dtype),
        "p_dk": _empty(call, B, T, HV, K, dtype=key_dtype),
        "p_dv": _empty(call, B, T, HV, V, dtype=call.v.dtype),
        "p_dg": _empty(call, B, T, HV, K, dtype=call.g.dtype),
        "p_dbeta": _empty(call, B, T, HV, dtype=call.beta.dtype),
        "p_dlog_rate": None if call.A_log is None else _empty(call, N, HV, K),
        "p_dbias": None if call.dt_bias is None else _empty(call, N, HV, K),
        "p_dinitial": None if call.initial_state is None else _empty(call, N, HV, K, V),
        "BV": power_of_two(V),
        "HAS_FINAL": dfinal is not None,
    }
    warps = state_warps(arguments["BK"], arguments["BV"])
    return Launch(recurrent_backward_kernel, (N, HV), arguments, num_warps=warps)


def launches(call: Call) -> list[Launch]:
    """The launches of one forward and backward pass: for compiling, not for running."""
    o, r, state = torch.empty_like(call.v), saved_like(call)[0], call.zero_state()
    backward = _backward_launch(call, r, o, state)
    sums = gate_sums(call, backward.arguments)[0]
    return [forward_launch(call, o, r, state, power_of_two(call.v.shape[-1])), backward, *sums]


def step_launches(call: Call) -> list[Launch]:
    """The launch of one step of decoding: for compiling."""
    return [step_launch(call._replace(initial_state=call.zero_state()), torch.empty_like(call.v), call.zero_state())]


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None, kept: Kept) -> Gradients:
    """Gradients of everything :class:`Gradients` names; `saved` is r and o, of which o is not read."""
    tidy, do = tidied(call), aligned(do)
    dfinal = None if dfinal is None else aligned(dfinal.float())
    name, given = "backward" if dfinal is None else "backward with the state's", (*tidy.tensors, saved[0], do, dfinal)
    made = replay.rerun(kept, name, given)
    if made is None:
        launch = _backward_launch(tidy, saved[0], do, dfinal)
        sums, dA_log, ddt_bias = gate_sums(tidy, launch.arguments)
        made = [*(launch.arguments[f"p_d{x}"] for x in ("q", "k", "v", "g", "beta")), dA_log, ddt_bias]
        made.append(launch.arguments["p_dinitial"])
        replay.record(kept, name, [(x, x()) for x in (launch, *sums)], given, made)
    return assemble(call, *made)  # type: ignore[arg-type]
