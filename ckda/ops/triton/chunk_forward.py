"""The chunk form, forward: two kernels.

With gamma_i the signed product of the chunk's gates up to token i, Gamma that of the whole chunk, rho = beta / |k|^2 and S the
state at the chunk's start (ckda/ops/chunked.py has the derivation):

    A_ij = q_i^T Diag(gamma_i / gamma_j) k_j  (j <= i),     G_ij = k_i^T Diag(gamma_i / gamma_j) k_j  (j < i),
    (I + G Diag(rho)) y = v - (k * gamma) S,    u = rho y,    o = (q * gamma) S + A u,
    S' = Gamma S + (k * Gamma / gamma)^T u.

`intra_kernel` (parallel over chunks) makes from the raw inputs what does not depend on the state: the decayed q and k, A, and
the inverse of I + G Diag(rho) in float32. `state_kernel` runs over the chunks of a sequence, one program a value head and block
of BV value columns. The sign needs no extra pass: it is part of gamma.

Factors gamma_i / gamma_a and gamma_a / gamma_j from the chunk's middle token a keep the bounded gates (at most e^5 a step) within
e^80 for C = 32. Gates without a bound take the difference of every pair instead (BOUNDED = False).
"""

import triton
import triton.language as tl

from ckda.ops.triton.tile import (
    at_row,
    chunk_place,
    cumulative_decay,
    dot,
    dot_right_split,
    dot_split,
    inverse_norm,
    learning_rate,
    log_gate,
)

__all__ = ["intra_kernel", "load_chunk", "state_kernel"]


@triton.jit
def load_chunk(
    p_q,  # [B * T, H, K]
    p_k,  # [B * T, H, K]
    p_g,  # [B * T, HV, K]
    p_sign,  # int8 [B * T, HV, K], or anything where SIGNED is false
    p_A_log,  # [HV]
    p_dt_bias,  # [HV, K]
    b_token,  # [C] of [B * T]
    m_token,  # [C]
    i_hv,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    scale,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The tiles of one chunk, from the raw inputs: q and k as used, the raw gate, the cumulative log2 decay and its sign.

    Returns (q, k, 1/|q|, 1/|k|, |k|^2, g, rate, bias, cum, sign); where no token lies q = k = 0 and alpha = 1.
    """
    b_channel = tl.arange(0, BK)
    m_channel = b_channel < K
    m_tile = m_token[:, None] & m_channel[None, :]
    o_k = b_token[:, None] * (H * K) + (i_hv // (HV // H)) * K + b_channel[None, :]
    o_g = b_token[:, None] * (HV * K) + i_hv * K + b_channel[None, :]
    b_q = tl.load(p_q + o_k, mask=m_tile, other=0.0)
    b_k = tl.load(p_k + o_k, mask=m_tile, other=0.0)
    b_g = tl.load(p_g + o_g, mask=m_tile, other=0.0).to(tl.float32)
    dtype = b_k.dtype
    b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_q_inverse = tl.full([C], 1.0, tl.float32)
    b_k_inverse = tl.full([C], 1.0, tl.float32)
    b_norm2 = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        b_q_inverse, b_k_inverse = inverse_norm(b_q), inverse_norm(b_k)
        b_q, b_k = b_q * (b_q_inverse * scale)[:, None], b_k * b_k_inverse[:, None]
    else:
        b_q = b_q * scale
    b_q, b_k = b_q.to(dtype).to(tl.float32), b_k.to(dtype).to(tl.float32)
    if NORMALIZE:
        b_wide = b_k.to(tl.float64) if WIDE else b_k
        b_norm2 = tl.sum(b_wide * b_wide, 1)
        b_norm2 = tl.where(b_norm2 > 0, b_norm2, 1.0)
    b_rate = tl.full([1, 1], 1.0, tl.float32)
    b_bias = tl.zeros([1, BK], tl.float32)
    if HAS_A_LOG:
        b_rate = tl.exp(tl.load(p_A_log + i_hv).to(tl.float32)) * b_rate
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * K + b_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    b_log, b_negative = log_gate(b_g, b_rate, b_bias, GATE, WIDE)
    if SIGNED:
        b_negative = tl.load(p_sign + o_g, mask=m_tile, other=1) < 0
    b_cum, b_sign = cumulative_decay(tl.where(m_tile, b_log, 0.0), m_tile & b_negative)
    return b_q, b_k, b_q_inverse, b_k_inverse, b_norm2, b_g, b_rate, b_bias, b_cum, b_sign


@triton.jit
def _pairwise_products(b_q, b_k, b_cum, b_sign, C: tl.constexpr):
    """A and G (both triangles' worth of pairs i >= j) by the difference of every pair: never a positive exponent."""
    b_row = tl.arange(0, C)
    b_A = tl.zeros([C, C], tl.float32)
    b_G = tl.zeros([C, C], tl.float32)
    for j in range(C):
        b_later = b_row[:, None] >= j
        b_decay = tl.exp2(tl.where(b_later, b_cum - at_row(b_cum, j, C)[None, :], 0.0).to(tl.float32))
        b_key = tl.where(b_later, b_decay * b_sign, 0.0) * (at_row(b_sign, j, C) * at_row(b_k, j, C))[None, :]
        b_column = b_row[None, :] == j
        b_A = tl.where(b_column, tl.sum(b_q * b_key, 1)[:, None], b_A)
        b_G = tl.where(b_column, tl.sum(b_k * b_key, 1)[:, None], b_G)
    return b_A, b_G


@triton.jit
def _unit_triangular_inverse(b_N, C: tl.constexpr):
    """(I + N)^-1 for a strictly lower triangular N [C, C], by forward substitution."""
    b_row = tl.arange(0, C)
    b_inverse = -b_N
    for i in range(2, C):
        b_new = at_row(b_inverse, i, C)
        b_new += tl.sum(b_new[:, None] * b_inverse, 0)
        b_inverse = tl.where(b_row[:, None] == i, b_new[None, :], b_inverse)
    return b_inverse + tl.where(b_row[:, None] == b_row[None, :], 1.0, 0.0)


@triton.jit
def intra_kernel(
    p_q,  # [B * T, H, K]
    p_k,  # [B * T, H, K]
    p_g,  # [B * T, HV, K]
    p_beta,  # [B * T, HV]
    p_sign,
    p_A_log,
    p_dt_bias,
    p_starts,  # [NC] first token of each chunk, packed sequences only
    p_ends,
    p_q_start,  # out [B * T, HV, K] q * gamma
    p_k_start,  # out [B * T, HV, K] k * gamma
    p_k_end,  # out [B * T, HV, K] k * Gamma / gamma
    p_A,  # out [B * T, HV, C]
    p_solver,  # out float32 [B * T, HV, C]
    p_rho,  # out float32 [B * T, HV]
    p_total,  # out float32 [B * NC, HV, K] Gamma
    T,
    NC,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    BOUNDED: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What of a chunk does not depend on the state."""
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_row = tl.arange(0, C)
    b_token = begin + b_row
    m_token = b_token < end
    b_q, b_k, _, _, b_norm2, _, _, _, b_cum, b_sign = load_chunk(
        p_q, p_k, p_g, p_sign, p_A_log, p_dt_bias, b_token, m_token, i_hv,
        H, HV, K, BK, C, scale, GATE, SIGNED, HAS_A_LOG, HAS_DT_BIAS, NORMALIZE, WIDE,
    )  # fmt: skip
    b_beta = tl.load(p_beta + b_token * HV + i_hv, mask=m_token, other=0.0).to(tl.float32)
    b_rho = tl.where(m_token, learning_rate(b_beta, BETA_RANGE), 0.0) / b_norm2
    b_rho = b_rho.to(tl.float32)
    tl.store(p_rho + b_token * HV + i_hv, b_rho, mask=m_token)

    b_channel = tl.arange(0, BK)
    m_tile = m_token[:, None] & (b_channel < K)[None, :]
    o_g = b_token[:, None] * (HV * K) + i_hv * K + b_channel[None, :]
    b_gamma = tl.exp2(b_cum.to(tl.float32)) * b_sign
    tl.store(p_q_start + o_g, b_q * b_gamma, mask=m_tile)
    tl.store(p_k_start + o_g, b_k * b_gamma, mask=m_tile)
    b_last, b_last_sign = at_row(b_cum, C - 1, C), at_row(b_sign, C - 1, C)
    b_to_end = tl.exp2((b_last[None, :] - b_cum).to(tl.float32)) * (b_sign * b_last_sign[None, :])
    tl.store(p_k_end + o_g, b_k * b_to_end, mask=m_tile)
    p_total += (i_chunk * HV + i_hv).to(tl.int64) * K
    tl.store(p_total + b_channel, tl.exp2(b_last.to(tl.float32)) * b_last_sign, mask=b_channel < K)

    if BOUNDED:
        b_from_middle = (b_cum - at_row(b_cum, C // 2 - 1, C)[None, :]).to(tl.float32)
        b_forward = tl.exp2(b_from_middle) * b_sign
        b_back = b_k * (tl.exp2(-b_from_middle) * b_sign)
        b_A = dot(b_q * b_forward, tl.trans(b_back), DOT)
        b_G = dot(b_k * b_forward, tl.trans(b_back), DOT)
    else:
        b_A, b_G = _pairwise_products(b_q, b_k, b_cum, b_sign, C)
    m_lower = b_row[:, None] > b_row[None, :]
    b_N = tl.where(m_lower, b_G * b_rho[None, :], 0.0)
    b_solver = _unit_triangular_inverse(b_N, C)
    o_A = (b_token * HV + i_hv)[:, None] * C + b_row[None, :]
    tl.store(p_A + o_A, tl.where(b_row[:, None] >= b_row[None, :], b_A, 0.0), mask=m_token[:, None])
    tl.store(p_solver + o_A, b_solver, mask=m_token[:, None])


@triton.jit
def state_kernel(
    p_v,  # [B * T, HV, V]
    p_q_start,  # [B * T, HV, K]
    p_k_start,
    p_k_end,
    p_A,  # [B * T, HV, C]
    p_solver,  # [B * T, HV, C]
    p_rho,  # [B * T, HV]
    p_total,  # [B * NC, HV, K]
    p_initial,  # float32 [N, HV, K, V]
    p_cu_seqlens,  # [N + 1], packed sequences only
    p_first,  # [N] first chunk of each sequence, packed only
    p_o,  # out [B * T, HV, V]
    p_y,  # out [B * T, HV, V], where SAVE
    p_states,  # out [B * NC, HV, K, V] at each chunk's start, where SAVE
    p_final,  # out float32 [N, HV, K, V], where STORE_FINAL
    T,
    NC,
    SEGMENT,  # chunks of a segment
    NUM_SEGMENTS,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    SUMMARY: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The state from chunk to chunk, and the outputs.

    A segment of a sequence is one row of p_initial and p_final. SUMMARY: only the final state is wanted, and "transition" starts
    from the identity with no values (V = K), which gives the segment's K x K transition; "offset" starts from zero.
    """
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if PACKED:
        begin = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        end = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
        first = tl.load(p_first + i_n).to(tl.int64)
        num = ((end - begin + C - 1) // C).to(tl.int32)
    else:
        i_b, i_segment = i_n // NUM_SEGMENTS, (i_n % NUM_SEGMENTS).to(tl.int32)
        num = tl.minimum(SEGMENT, NC - i_segment * SEGMENT)
        first = i_b * NC + i_segment * SEGMENT
        begin, end = i_b * T + i_segment * SEGMENT * C, (i_b + 1) * T
    b_row = tl.arange(0, C)
    b_channel = tl.arange(0, BK)
    b_value = i_v * BV + tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    m_state = m_channel[:, None] & m_value[None, :]
    o_state = (i_n * HV + i_hv) * (K * V) + b_channel[:, None] * V + b_value[None, :]
    b_S = tl.zeros([BK, BV], tl.float32)
    if SUMMARY == "transition":
        b_S += tl.where((b_channel[:, None] == b_value[None, :]) & m_state, 1.0, 0.0)
    elif HAS_INITIAL:
        b_S += tl.load(p_initial + o_state, mask=m_state, other=0.0)
    for c in range(num):
        b_token = begin + c * C + b_row
        m_token = b_token < end
        b_line = b_token * HV + i_hv
        m_key = m_token[:, None] & m_channel[None, :]
        m_out = m_token[:, None] & m_value[None, :]
        o_key = b_line[:, None] * K + b_channel[None, :]
        o_value = b_line[:, None] * V + b_value[None, :]
        o_square = b_line[:, None] * C + b_row[None, :]
        b_k_start = tl.load(p_k_start + o_key, mask=m_key, other=0.0)
        b_k_end = tl.load(p_k_end + o_key, mask=m_key, other=0.0)
        b_solver = tl.load(p_solver + o_square, mask=m_token[:, None], other=0.0)
        b_rho = tl.load(p_rho + b_line, mask=m_token, other=0.0)
        i_slot = first + c
        b_total = tl.load(p_total + (i_slot * HV + i_hv) * K + b_channel, mask=m_channel, other=1.0)
        if SUMMARY == "transition":
            b_rest = -dot_right_split(b_k_start, b_S, DOT)
        else:
            b_v = tl.load(p_v + o_value, mask=m_out, other=0.0).to(tl.float32)
            b_rest = b_v - dot_right_split(b_k_start, b_S, DOT)
        b_y = dot_split(b_solver, b_rest, DOT)
        b_u = b_y * b_rho[:, None]
        if SUMMARY == "none":
            if SAVE:
                o_slot = (i_slot * HV + i_hv) * (K * V) + b_channel[:, None] * V + b_value[None, :]
                tl.store(p_states + o_slot, b_S, mask=m_state)
                tl.store(p_y + o_value, b_y, mask=m_out)
            b_q_start = tl.load(p_q_start + o_key, mask=m_key, other=0.0)
            b_A = tl.load(p_A + o_square, mask=m_token[:, None], other=0.0)
            b_o = dot(b_q_start, b_S, DOT) + dot(b_A, b_u, DOT)
            tl.store(p_o + o_value, b_o, mask=m_out)
        b_S = b_S * b_total[:, None] + dot_right_split(tl.trans(b_k_end), b_u, DOT)
    if STORE_FINAL:
        tl.store(p_final + o_state, b_S, mask=m_state)
