"""The chunk form, backward: four kernels, and one that sums over grouped heads.

The notation is that of ckda/ops/triton/portable/forward.py; r = |k| v - (k * gamma) S.

`reverse_kernel` runs over the chunks backwards, with dS the gradient of the state after the chunk:

    du = A^T do + (k * Gamma / gamma) dS,     dr = (I + G Diag(rho))^-T (rho du),     dv = |k| dr,
    dS' = Gamma dS + (q * gamma)^T do - (k * gamma)^T dr.

`pair_kernel` (parallel over chunks), `contract_kernel` (what is summed over the values) and `gradient_kernel` (parallel over blocks
of channels too) finish everything else. With D_ij = dr_i . y_j (j < i) and dA_ij = do_i . u_j,

    drho_j = dr_j . y_j / rho_j = du_j . y_j - sum_i G_ij D_ij,    X_j = sum_i D_ij Diag(gamma_i / gamma_j) k_i,
    dq_i = gamma_i * (S do_i) + sum_j dA_ij (gamma_i / gamma_j) k_j,
    dk_i = - gamma_i * (S dr_i) - sum_j D_ij rho_j (gamma_i / gamma_j) k_j                      (k_i as a row)
           + sum_l dA_li (gamma_l / gamma_i) q_l - rho_i X_i + (Gamma / gamma_i) * (dS u_i)     (k_i as a column),

and log|alpha_t| gathers what spans token t: rows minus columns of the pairs from t on, the keys before t that reach the chunk's
end, and Gamma . dGamma. The pair i = j has no decay: it is left out there, not cancelled. The backward of the gate, of the
learning rate and of the norm follow on the same tiles, and each gradient is written once.
"""

import triton
import triton.language as tl

from ckda.ops.triton.portable.forward import chunk_gate, head_gate, sequence_place, state_place
from ckda.ops.triton.tile import (
    STATE_UNIT,
    across_border,
    at_token,
    border_decay,
    chunk_decay,
    chunk_place,
    dot,
    dot_left_split,
    dot_split,
    finite_gate,
    gate_gradient,
    in_registers,
    learning_rate,
    operand,
    power_of,
    right_of_border,
    signs_through,
    sums_from,
    widened,
)

__all__ = ["contract_kernel", "gradient_kernel", "group_kernel", "pair_kernel", "reverse_kernel"]


@triton.jit
def reverse_kernel(
    p_do,  # [B * T, HV, V]
    p_y,  # [B * T, HV, V]
    p_q_forward,  # [B * T, HV, K]
    p_k_forward,
    p_k_back,
    p_A,  # [B * T, HV, C]
    p_solver,  # [B * T, HV, C]
    p_solver_low,
    p_solver_rest,
    p_rho,  # [B * T, HV]
    p_norm2,  # [B * T, HV]
    p_start,  # [B * NC, HV, K]
    p_end,
    p_dfinal,  # float32 [N, HV, K, V]
    p_cu_seqlens,
    p_first,
    p_dv,  # out [B * T, HV, V]
    p_duy,  # out float32 [B * T, HV, NV] du . y over each block of values, where STORE_DUY
    p_dstates,  # out [B * NC, HV, V, K] Gamma / gamma_a times that of the state after each chunk, in units twice
    p_dinitial,  # out float32 [N, HV, K, V], where STORE_INITIAL
    T,
    NC,
    SEGMENT,
    FIRST_SEGMENT,
    NUM_SEGMENTS,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    STORE_INITIAL: tl.constexpr,
    STORE_DUY: tl.constexpr,
    SUMMARY: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The gradient of the state from chunk to chunk, backwards; SUMMARY: only that of the segment's initial state is wanted."""
    i_v, i_hv, i_n = state_place(HV, NV)
    begin, end, first, num = sequence_place(
        p_cu_seqlens, p_first, i_n, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, C, PACKED
    )
    b_index = tl.arange(0, C)
    b_channel = tl.arange(0, BK)
    b_value = i_v * BV + tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    m_state = m_value[:, None] & m_channel[None, :]
    o_state = (i_n * HV + i_hv) * (K * V) + b_channel[None, :] * V + b_value[:, None]
    b_dS = tl.zeros([BV, BK], tl.float32)
    if HAS_FINAL:
        b_dS += tl.load(p_dfinal + o_state, mask=m_state, other=0.0)
    b_line = b_index * HV
    b_key_offset = b_line[:, None] * K + b_channel[None, :]
    b_value_offset = b_line[None, :] * V + b_value[:, None]
    b_square_offset = b_line[:, None] * C + b_index[None, :]
    b_slot_offset = b_channel[None, :] + b_value[:, None] * K
    o_decay = ((first + num - 1) * HV + i_hv) * K + b_channel
    unit: tl.constexpr = STATE_UNIT if BOUNDED and DOT != "fp16" else 1.0
    part: tl.constexpr = 1.0 / (unit * unit)
    if BOUNDED:  # the loop carries Gamma / gamma_a dS
        b_dS *= (tl.load(p_end + o_decay, mask=m_channel & (num > 0), other=1.0 / unit) * unit)[None, :]
    for step in range(num):
        c = num - 1 - step
        line = (begin + c * C) * HV + i_hv
        m_token = b_index < (end - begin - c * C).to(tl.int32)
        m_key = m_token[:, None] & m_channel[None, :]
        m_out = m_value[:, None] & m_token[None, :]
        o_key = line * K
        o_value = line * V
        o_square = line * C
        b_k_back = tl.load(p_k_back + o_key + b_key_offset, mask=m_key, other=0.0)
        b_k_forward = tl.load(p_k_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_q_forward = tl.load(p_q_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_A = tl.load(p_A + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver = tl.load(p_solver + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver_low = tl.load(p_solver_low + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver_rest = tl.load(p_solver_rest + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_do = tl.load(p_do + o_value + b_value_offset, mask=m_out, other=0.0)
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
        b_decay = tl.load((p_start if BOUNDED else p_end) + o_decay, mask=m_channel, other=1.0)
        o_decay -= HV * K
        b_next = b_decay
        if BOUNDED:
            # the end of the chunk before, loaded ahead of its use. It is no factor of b_decay: the product of both might underflow.
            b_next = tl.load(p_end + o_decay, mask=m_channel & (c > 0), other=1.0 / unit)
        b_norm2 = tl.load(p_norm2 + line + b_line, mask=m_token, other=1.0)
        b_du = dot(b_do, b_A, DOT) + dot_left_split(b_dS, tl.trans(b_k_back), DOT) * part
        b_dr = dot_split(b_du * b_rho[None, :], b_solver, b_solver_low, b_solver_rest, DOT)
        if not SUMMARY:
            o_slot = ((first + c) * HV + i_hv) * (K * V)
            tl.store(p_dstates + o_slot + b_slot_offset, operand(b_dS, DOT), mask=m_state)
            tl.store(p_dv + o_value + b_value_offset, operand(b_dr * tl.sqrt(b_norm2)[None, :], DOT), mask=m_out)
            if STORE_DUY:
                b_y = tl.load(p_y + o_value + b_value_offset, mask=m_out, other=0.0).to(tl.float32)
                tl.store(p_duy + line * NV + b_line * NV + i_v, tl.sum(b_du * b_y, 0), mask=m_token)
        if BOUNDED:
            b_dS *= part
        else:
            b_dS *= b_decay[None, :]
        b_dS += dot(b_do, b_q_forward, DOT) - dot_left_split(b_dr, b_k_forward, DOT)
        if BOUNDED:
            b_dS = b_dS * b_decay[None, :] * b_next[None, :]
    if STORE_INITIAL:
        tl.store(p_dinitial + o_state, b_dS, mask=m_state)


@triton.jit
def _parts(b_x, DOT: tl.constexpr):
    """x as an operand, and what its rounding left."""
    b_high = operand(b_x, DOT)
    return b_high, operand(b_x - b_high.to(tl.float32), DOT)


@triton.jit
def _times_parts(b_a, b_high, b_low, SPLIT: tl.constexpr, DOT: tl.constexpr):
    """a (high + low), a as rounded; low is left out where high is float32."""
    b_product = dot(b_a, b_high, DOT)
    if SPLIT:
        b_product += dot(b_a, b_low, DOT)
    return b_product


@triton.jit
def _unbounded_gradients(
    b_q,  # [BK, C] float32, signs included, as the next
    b_k,
    b_log,  # [BK, C] float32
    b_erase,  # [BK, C] or [1, 1]
    b_last,  # [BK] the sign of Gamma
    b_dA,  # [C, C] float32, strictly lower
    b_D,
    b_rho,  # [C]
    b_dq,  # [BK, C] S do
    b_drow,  # - S dr
    b_dk,  # dS u
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    """dq, dk of keys as rows and as columns, the gradient of cumulative log|alpha|, and of the keys that reach the chunk's end.

    At one border tokens on the right are rows and those on the left columns, and with N_ij = D_ij rho_j the keys' part of both is
    one product with N + N^T. A pair counts once as a row and once as a column of the gates' gradient: both are made of the
    same rounded factors, so that they cancel in the sum over tokens.
    """
    b_gamma = chunk_decay(b_log, False, C, DOT)
    b_dlog = b_gamma * (b_q * b_dq + b_k * b_erase * b_drow)
    b_dq *= b_gamma
    b_drow *= b_gamma
    b_dk *= chunk_decay(b_log, True, C, DOT) * b_last[:, None]
    b_reach = b_k * b_dk
    b_dlog -= b_reach
    b_N = b_D * b_rho[None, :]
    b_N, b_N_low = _parts(b_N + tl.trans(b_N), DOT)
    b_dA, b_dA_low = _parts(b_dA, DOT)
    for shift in range(LEVELS):  # not unrolled, which would spill
        b_decay = border_decay(b_log, shift, C, DOT)
        m_right = right_of_border(shift, C)
        b_key, b_query = operand(b_k * tl.where(m_right, b_erase, 1.0) * b_decay, DOT), operand(b_q * b_decay, DOT)
        m_pairs = across_border(shift, C)
        m_both = m_pairs | tl.trans(m_pairs)
        b_keys = _times_parts(b_key, tl.where(m_both, b_N, 0.0), tl.where(m_both, b_N_low, 0.0), SPLIT, DOT)
        b_high, b_low = tl.where(m_pairs, b_dA, 0.0), tl.where(m_pairs, b_dA_low, 0.0)
        b_row = _times_parts(b_key, tl.trans(b_high), tl.trans(b_low), SPLIT, DOT)
        b_column = _times_parts(b_query, b_high, b_low, SPLIT, DOT)
        b_side = tl.where(m_right, 1.0, -1.0)
        b_dlog += b_query.to(tl.float32) * b_row - b_key.to(tl.float32) * (b_side * b_keys + b_column)
        b_dq += b_decay * b_row
        b_drow -= b_decay * tl.where(m_right, b_keys, 0.0)
        b_dk += b_decay * tl.where(m_right, 0.0, b_column - b_keys)
    return b_dq, b_drow, b_dk, b_dlog, tl.sum(b_reach, 1)


@triton.jit
def pair_kernel(
    p_v,  # [B * T, HV, V]
    p_beta,  # [B * T, HV]
    p_starts,
    p_ends,
    p_G,  # [B * T, HV, C], where beta is given
    p_rho,  # [B * T, HV]
    p_norms,  # [3, B * T, HV]
    p_o,  # [B * T, HV, V]
    p_y,  # [B * T, HV, V]
    p_y_low,  # [B * T, HV, V] what its rounding left, where SPLIT
    p_do,  # [B * T, HV, V]
    p_dv,  # [B * T, HV, V] |k| dr
    p_duy,  # [B * T, HV, NV], where beta is given
    p_D,  # out [B * T, HV, C] strictly lower
    p_D_low,  # out [B * T, HV, C] what its rounding left, where SPLIT
    p_dA,  # out [B * T, HV, C] strictly lower
    p_dA_low,  # out [B * T, HV, C] what its rounding left, where SPLIT
    p_scalars,  # out float32 [4, B * T, HV] dA_ii, q . dq, k . dk / |k|^2, and what D and dA are divided by
    p_dbeta,  # out [B * T, HV]
    T,
    NC,
    TOKENS,  # B * T
    HV: tl.constexpr,
    V: tl.constexpr,
    NV: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BOUNDED: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The products of a chunk's tokens over the values, and dbeta. Where BOUNDED D and dA are left in units of the largest of them,
    a power of two: small ones would underflow where they meet factors of 2^-115.

    beta dbeta = dr . y, and the gradient of a logit is (1 - beta / BETA_RANGE) times that; a given beta may be zero: the longer way
    then, whose terms cancel where keys repeat.
    What the norms' backward needs is found here too: q . dq = o . do, since o is linear in q, and k . dk = (2 y - |k| v) . dr, of
    which the row gives (y - |k| v) . dr and the column u . du.
    """
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_index = tl.arange(0, C)
    m_token = b_index < (end - begin).to(tl.int32)
    line = begin * HV + i_hv  # the first token's row of [B * T, HV]
    b_line = b_index * HV
    num_lines = tl.cast(TOKENS, tl.int64) * HV
    b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
    b_norm2 = tl.load(p_norms + 2 * num_lines + line + b_line, mask=m_token, other=1.0)
    b_D = tl.zeros([C, C], tl.float32)
    b_dA = tl.zeros([C, C], tl.float32)
    b_q_dq = tl.zeros([C], tl.float32)
    b_v_dv = tl.zeros([C], tl.float32)
    for v in range(0, V, BV):
        b_value = v + tl.arange(0, BV)
        m_out = m_token[:, None] & (b_value < V)[None, :]
        o_value = b_line[:, None] * V + b_value[None, :]
        b_y = tl.load(p_y + line * V + o_value, mask=m_out, other=0.0)
        b_y_low = b_y
        if SPLIT:
            b_y_low = tl.load(p_y_low + line * V + o_value, mask=m_out, other=0.0)
        b_do = tl.load(p_do + line * V + o_value, mask=m_out, other=0.0)
        b_dv = tl.load(p_dv + line * V + o_value, mask=m_out, other=0.0)
        b_o = tl.load(p_o + line * V + o_value, mask=m_out, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + line * V + o_value, mask=m_out, other=0.0).to(tl.float32)
        b_D += dot(b_dv, tl.trans(b_y), DOT)
        b_dA += dot(b_do, tl.trans(b_y), DOT)
        if SPLIT:
            b_D += dot(b_dv, tl.trans(b_y_low), DOT)
            b_dA += dot(b_do, tl.trans(b_y_low), DOT)
        b_q_dq += tl.sum(b_do.to(tl.float32) * b_o, 1)
        b_v_dv += tl.sum(b_dv.to(tl.float32) * b_v, 1)
    m_diagonal = b_index[:, None] == b_index[None, :]
    b_diagonal = tl.sum(tl.where(m_diagonal, b_dA, 0.0), 1)
    b_y_dv = tl.sum(tl.where(m_diagonal, b_D, 0.0), 1)
    m_lower = b_index[:, None] > b_index[None, :]
    o_square = b_line[:, None] * C + b_index[None, :]
    b_length = tl.sqrt(b_norm2)
    b_D = tl.where(m_lower, b_D / b_length[:, None], 0.0)
    b_dA = tl.where(m_lower, b_dA * b_rho[None, :], 0.0)
    unit, inverse = 1.0, 1.0
    if BOUNDED and DOT != "fp16":
        unit, inverse = power_of(tl.max(tl.max(tl.maximum(tl.abs(b_D), tl.abs(b_dA)), 1), 0))
    b_N, b_D, b_dA = b_D, b_D * inverse, b_dA * inverse
    b_D_high = operand(b_D, DOT)
    tl.store(p_D + line * C + o_square, b_D_high, mask=m_token[:, None])
    b_dA_high = operand(b_dA, DOT)
    tl.store(p_dA + line * C + o_square, b_dA_high, mask=m_token[:, None])
    if SPLIT:
        b_dA_low = operand(b_dA - b_dA_high.to(tl.float32), DOT)
        tl.store(p_dA_low + line * C + o_square, b_dA_low, mask=m_token[:, None])
        b_D_low = operand(b_D - b_D_high.to(tl.float32), DOT)
        tl.store(p_D_low + line * C + o_square, b_D_low, mask=m_token[:, None])
    tl.store(p_scalars + line + b_line, b_diagonal * b_rho, mask=m_token)
    tl.store(p_scalars + num_lines + line + b_line, b_q_dq, mask=m_token)
    tl.store(p_scalars + 2 * num_lines + line + b_line, (2.0 * b_y_dv / b_length - b_v_dv) / b_norm2, mask=m_token)
    tl.store(p_scalars + 3 * num_lines + line + b_line, tl.zeros_like(b_norm2) + unit, mask=m_token)

    if BETA_RANGE > 0:
        b_beta = tl.load(p_beta + line + b_line, mask=m_token, other=0.0).to(tl.float32)
        tl.store(p_dbeta + line + b_line, b_y_dv / b_length * learning_rate(-b_beta, 1), mask=m_token)
    elif HAS_BETA:
        b_dbeta = -tl.sum(b_N * tl.load(p_G + line * C + o_square, mask=m_token[:, None], other=0.0), 0)
        for i in tl.static_range(NV):
            b_dbeta += tl.load(p_duy + line * NV + b_line * NV + i, mask=m_token, other=0.0)
        b_some = tl.abs(b_rho) > 1e-12
        b_dbeta = tl.where(b_some, b_y_dv / b_length / tl.where(b_some, b_rho, 1.0), b_dbeta) / b_norm2
        tl.store(p_dbeta + line + b_line, b_dbeta, mask=m_token)


@triton.jit
def block_place(NK: tl.constexpr):
    """A program's chunk, value head and block of channels: the blocks of a chunk are neighbours, then the chunks of a head."""
    return tl.program_id(0) // NK, tl.program_id(1), tl.program_id(0) % NK


@triton.jit
def contract_kernel(
    p_starts,
    p_ends,
    p_rho,  # [B * T, HV]
    p_norm2,  # [B * T, HV]
    p_y,  # [B * T, HV, V]
    p_do,  # [B * T, HV, V]
    p_dv,  # [B * T, HV, V] |k| dr
    p_states,  # [B * NC, HV, V, K]
    p_dstates,  # [B * NC, HV, V, K]
    p_S_do,  # out [B * T, HV, K] S do, the states as they were left, in units
    p_S_dr,  # out [B * T, HV, K] - S dr
    p_dS_u,  # out [B * T, HV, K] dS u
    p_through,  # out float32 [B * NC, HV, K] the diagonal of S dS
    T,
    NC,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The products of the states with a chunk's values, for `gradient_kernel`, which may write the gradients in their place."""
    i_chunk, i_hv, i_k = block_place((K + BK - 1) // BK)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_index = tl.arange(0, C)
    m_token = b_index < (end - begin).to(tl.int32)
    line = begin * HV + i_hv  # the first token's row of [B * T, HV]
    b_line = b_index * HV
    b_channel = i_k * BK + tl.arange(0, BK)
    m_channel = b_channel < K
    o_slot = (i_chunk * HV + i_hv).to(tl.int64)
    b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
    b_length = tl.sqrt(tl.load(p_norm2 + line + b_line, mask=m_token, other=1.0))
    b_dq = tl.zeros([BK, C], tl.float32)
    b_dk = tl.zeros([BK, C], tl.float32)
    b_dk_end = tl.zeros([BK, C], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    for v in range(0, V, BV):
        b_value = v + tl.arange(0, BV)
        m_value = b_value < V
        m_out = m_token[:, None] & m_value[None, :]
        o_value = b_line[:, None] * V + b_value[None, :]
        o_state = b_channel[:, None] + b_value[None, :] * K
        m_state = m_channel[:, None] & m_value[None, :]
        b_S = tl.load(p_states + o_slot * (K * V) + o_state, mask=m_state, other=0.0)
        b_dS = tl.load(p_dstates + o_slot * (K * V) + o_state, mask=m_state, other=0.0)
        b_do = tl.load(p_do + line * V + o_value, mask=m_out, other=0.0)
        b_dv = tl.load(p_dv + line * V + o_value, mask=m_out, other=0.0)
        b_y = tl.load(p_y + line * V + o_value, mask=m_out, other=0.0)
        b_dq += dot(b_S, tl.trans(b_do), DOT)
        b_dk += dot(b_S, tl.trans(b_dv), DOT)
        b_dk_end += dot(b_dS, tl.trans(b_y), DOT)
        b_through += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
    m_tile = m_channel[:, None] & m_token[None, :]
    o_g = line * K + b_line[None, :] * K + b_channel[:, None]
    tl.store(p_S_do + o_g, b_dq, mask=m_tile)
    tl.store(p_S_dr + o_g, b_dk * (-1.0 / b_length)[None, :], mask=m_tile)  # dr = dv / |k|
    tl.store(p_dS_u + o_g, b_dk_end * b_rho[None, :], mask=m_tile)
    tl.store(p_through + o_slot * K + b_channel, b_through, mask=m_channel)


@triton.jit
def _token_scalars(p_scalars, line, b_line, num_lines, m_token):
    """dA_ii, q . dq and k . dk / |k|^2 of each token, as `pair_kernel` left them."""
    b_diagonal = tl.load(p_scalars + line + b_line, mask=m_token, other=0.0)
    b_q_dq = tl.load(p_scalars + num_lines + line + b_line, mask=m_token, other=0.0)
    b_k_dk = tl.load(p_scalars + 2 * num_lines + line + b_line, mask=m_token, other=0.0)
    return b_diagonal, b_q_dq, b_k_dk


@triton.jit
def _token_norms(p_norms, line, b_line, num_lines, m_token):
    """1/|q| and the power of two in the key, of each token."""
    b_inverse = tl.load(p_norms + line + b_line, mask=m_token, other=0.0)
    b_power = tl.load(p_norms + num_lines + line + b_line, mask=m_token, other=0.0)
    return b_inverse, b_power


@triton.jit
def gradient_kernel(
    p_q,  # [B * T, H, K], where not BOUNDED
    p_k,
    p_g,
    p_sign,
    p_erase,  # [B * T, HV, K], where ERASE
    p_A_log,
    p_dt_bias,
    p_starts,
    p_ends,
    p_rho,  # [B * T, HV]
    p_norms,  # [3, B * T, HV]
    p_q_forward,  # [B * T, HV, K]
    p_k_forward,
    p_k_back,
    p_forward,  # [B * T, HV, K] gamma / gamma_a, where BOUNDED
    p_end,  # [B * NC, HV, K]
    p_D,  # [B * T, HV, C]
    p_D_low,  # [B * T, HV, C] what its rounding left, where SPLIT
    p_dA,  # [B * T, HV, C]
    p_dA_low,  # [B * T, HV, C] what its rounding left, where SPLIT
    p_scalars,  # [4, B * T, HV] dA_ii, q . dq, k . dk / |k|^2, and what D and dA are divided by
    p_S_do,  # [B * T, HV, K] by `contract_kernel`; may be p_dq
    p_S_dr,  # may be p_dk
    p_dS_u,  # may be p_dg
    p_through,  # [B * NC, HV, K]
    p_dq,  # out [B * T, HV, K]
    p_dk,  # out [B * T, HV, K]
    p_dg,  # out [B * T, HV, K]
    p_derase,  # out [B * T, HV, K], where ERASE
    p_dlog_rate,  # out float32 [B * NC, HV, K] the chunk's part of dA_log, where HAS_A_LOG
    p_dbias,  # out float32 [B * NC, HV, K] the chunk's part of ddt_bias, where HAS_DT_BIAS
    T,
    NC,
    TOKENS,  # B * T
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    ERASE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 of C
    BOUNDED: tl.constexpr,  # q, k and their decays from what the forward pass kept, not from the raw inputs
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """All gradients of BK channels of a chunk but dv. No channel waits for another.

    The gradient of a key of any length is that of the key as used, less its part along the key, times the power of two: only the
    direction of a normalised key matters.
    """
    i_chunk, i_hv, i_k = block_place((K + BK - 1) // BK)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_index = tl.arange(0, C)
    m_token = b_index < (end - begin).to(tl.int32)
    line = begin * HV + i_hv  # the first token's row of [B * T, HV]
    b_line = b_index * HV
    b_channel = i_k * BK + tl.arange(0, BK)
    m_channel = b_channel < K
    m_tile = m_channel[:, None] & m_token[None, :]
    o_g = b_line[None, :] * K + b_channel[:, None]
    o_slot = (i_chunk * HV + i_hv).to(tl.int64)
    num_lines = tl.cast(TOKENS, tl.int64) * HV

    # everything is read before the first product, so that its ways overlap, and before anything is written in its place; where
    # tiles are float32 and decays kept, what is not written over is read where it is used: it would not stay in registers
    LATE: tl.constexpr = BOUNDED and not SPLIT
    if not LATE:
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
    o_square = b_line[:, None] * C + b_index[None, :]
    b_D = tl.load(p_D + line * C + o_square, mask=m_token[:, None], other=0.0)
    b_dA = tl.load(p_dA + line * C + o_square, mask=m_token[:, None], other=0.0)
    b_dA_low, b_D_low = b_dA, b_D
    if SPLIT:
        b_D_low = tl.load(p_D_low + line * C + o_square, mask=m_token[:, None], other=0.0)
        b_dA_low = tl.load(p_dA_low + line * C + o_square, mask=m_token[:, None], other=0.0)
    b_dq = tl.load(p_S_do + line * K + o_g, mask=m_tile, other=0.0)
    b_drow = tl.load(p_S_dr + line * K + o_g, mask=m_tile, other=0.0)  # of keys as rows, times their decays
    b_dk = tl.load(p_dS_u + line * K + o_g, mask=m_tile, other=0.0)  # of keys as columns
    b_through = tl.load(p_through + o_slot * K + b_channel, mask=m_channel, other=0.0)
    if not LATE:
        b_g = tl.load(p_g + line * K + o_g, mask=m_tile, other=0.0)
    b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, b_channel, K, HAS_A_LOG, HAS_DT_BIAS)
    if not LATE:
        b_diagonal, b_q_dq, b_k_dk = _token_scalars(p_scalars, line, b_line, num_lines, m_token)
    unit = tl.load(p_scalars + 3 * num_lines + line, mask=begin < end, other=1.0)
    if not LATE:
        b_inverse, b_power = _token_norms(p_norms, line, b_line, num_lines, m_token)
    if BOUNDED:
        b_kb = tl.load(p_k_back + line * K + o_g, mask=m_tile, other=0.0)
        b_kf = tl.load(p_k_forward + line * K + o_g, mask=m_tile, other=0.0)
        b_qf = tl.load(p_q_forward + line * K + o_g, mask=m_tile, other=0.0)
        if not LATE:
            b_forward = tl.load(p_forward + line * K + o_g, mask=m_tile, other=0.0)
    else:
        o_k = b_index[None, :] * (H * K) + b_channel[:, None]
        head = (begin * H + i_hv // (HV // H)) * K
        b_q = tl.load(p_q + head + o_k, mask=m_tile, other=0.0).to(tl.float32) * scale
        b_k = tl.load(p_k + head + o_k, mask=m_tile, other=0.0).to(tl.float32)
    b_erase = tl.full([1, 1], 1.0, tl.float32)
    if ERASE:
        b_erase = tl.load(p_erase + line * K + o_g, mask=m_tile, other=0.0).to(tl.float32)
    tl.debug_barrier()
    if LATE:
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)

    b_dq = widened(in_registers(b_dq, m_tile), C, DOT)
    b_drow = widened(in_registers(b_drow, m_tile), C, DOT)
    b_dk = widened(in_registers(b_dk, m_tile), C, DOT)
    if not LATE:
        b_g = widened(in_registers(finite_gate(b_g, GATE), m_tile), C, DOT)
    # all that is found of pairs is in units of D and dA, and what else there is too, until the end
    inverse = 1.0 / unit
    if not LATE:
        b_diagonal, b_q_dq, b_k_dk = b_diagonal * inverse, b_q_dq * inverse, b_k_dk * inverse
    part: tl.constexpr = 1.0 / (STATE_UNIT * STATE_UNIT) if BOUNDED and DOT != "fp16" else 1.0
    b_dq, b_drow, b_dk = b_dq * (part * inverse), b_drow * (part * inverse), b_dk * (part * inverse)
    b_through *= part * (part * inverse)
    if not BOUNDED:
        if NORMALIZE:
            b_q *= b_inverse[None, :]
            b_k *= b_power[None, :]
        b_q = operand(b_q, DOT).to(tl.float32)
        b_log, b_negative = chunk_gate(
            b_g, p_sign, p_A_log, p_dt_bias, line * K, o_g, m_tile, i_hv, b_channel,
            K, GATE, SIGNED, HAS_A_LOG, HAS_DT_BIAS, WIDE,
        )  # fmt: skip
    if BOUNDED:
        # A pair counts once as a row and once as a column of the gates' gradient, and in the sum over tokens the two must cancel:
        # so both are made of the same rounded factors.
        b_kb, b_kf, b_qf = in_registers(b_kb, m_tile), in_registers(b_kf, m_tile), in_registers(b_qf, m_tile)
        b_key, b_row, b_query = widened(b_kb, C, DOT), widened(b_kf, C, DOT), widened(b_qf, C, DOT)
        b_through += tl.sum(b_key * b_dk, 1)
        b_key_rho = operand(b_key * b_rho[None, :], DOT)
        b_drow -= dot(b_key_rho, tl.trans(b_D), DOT)
        b_column = dot(b_kf, b_D, DOT)
        if SPLIT:
            b_drow -= dot(b_key_rho, tl.trans(b_D_low), DOT)
            b_column += dot(b_kf, b_D_low, DOT)
        b_dlog = b_row * b_drow + b_key_rho.to(tl.float32) * b_column
        b_dk += dot(b_qf, b_dA, DOT)
        b_dlog -= b_key * b_dk
        if LATE:  # anew: eight numbers a thread, held through two products, are spilled as they come, one wait after the other
            b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=1.0)
        b_dk -= b_rho[None, :] * b_column
        b_dq += dot(b_kb, tl.trans(b_dA), DOT)
        b_dlog += b_query * b_dq
        if SPLIT:
            # equal keys cancel in dq, which needs the next digits. Not before dlog: its rows and columns cancel, with one dA
            b_dq += dot(b_kb, tl.trans(b_dA_low), DOT)
    else:
        b_dA, b_D = b_dA.to(tl.float32), b_D.to(tl.float32)
        if SPLIT:
            b_dA += b_dA_low.to(tl.float32)
            b_D += b_D_low.to(tl.float32)
        b_sign = signs_through(b_negative, C, DOT)
        b_dq, b_drow, b_dk, b_dlog, b_reach = _unbounded_gradients(
            b_q * b_sign, b_k * b_sign, b_log, b_erase, at_token(b_sign, C - 1, C), b_dA, b_D, b_rho,
            b_dq, b_drow, b_dk, C, LEVELS, SPLIT, DOT,
        )  # fmt: skip
        b_dq, b_drow, b_dk = b_dq * b_sign, b_drow * b_sign, b_dk * b_sign
        b_through = b_through * tl.load(p_end + o_slot * K + b_channel, mask=m_channel, other=0.0) + b_reach

    if LATE:
        b_g = tl.load(p_g + line * K + o_g, mask=m_tile, other=0.0).to(tl.float32)
        b_forward = tl.load(p_forward + line * K + o_g, mask=m_tile, other=0.0)
        b_diagonal, b_q_dq, b_k_dk = _token_scalars(p_scalars, line, b_line, num_lines, m_token)
        b_diagonal, b_q_dq, b_k_dk = b_diagonal * inverse, b_q_dq * inverse, b_k_dk * inverse
        b_inverse, b_power = _token_norms(p_norms, line, b_line, num_lines, m_token)

    # the gate
    b_dlog = (sums_from(b_dlog, C, DOT) + b_through[:, None]) * unit
    b_dg, b_dlog_rate = gate_gradient(b_dlog, b_g, b_rate, b_bias, GATE)
    tl.store(p_dg + line * K + o_g, b_dg, mask=m_tile)
    if HAS_A_LOG:
        tl.store(p_dlog_rate + o_slot * K + b_channel, tl.sum(tl.where(m_tile, b_dlog_rate, 0.0), 1), mask=m_channel)
    if HAS_DT_BIAS:
        tl.store(p_dbias + o_slot * K + b_channel, tl.sum(tl.where(m_tile, b_dg, 0.0), 1), mask=m_channel)

    # queries and keys, from their decayed forms back to the raw ones
    if BOUNDED:
        b_forward = widened(in_registers(b_forward, m_tile), C, DOT)
        b_back = 1.0 / tl.where(m_tile, b_forward, 1.0)
        b_q, b_k = b_query * b_back, b_key * b_forward
        b_dq *= b_forward
        b_drow *= b_forward
        b_dk *= b_back
    if ERASE:
        tl.store(p_derase + line * K + o_g, b_k * b_drow * unit, mask=m_tile)
    b_dk += b_erase * b_drow
    b_dk += b_diagonal[None, :] * b_q
    b_dq += b_diagonal[None, :] * b_k
    if NORMALIZE:
        unscale = tl.where(scale == 0, 0.0, 1.0 / scale)
        b_dq = (b_dq - b_q * (b_q_dq * (unscale * unscale))[None, :]) * (b_inverse * scale)[None, :]
        b_dk = (b_dk - b_k * b_k_dk[None, :]) * b_power[None, :]
    else:
        b_dq *= scale
    tl.store(p_dq + line * K + o_g, b_dq * unit, mask=m_tile)
    tl.store(p_dk + line * K + o_g, b_dk * unit, mask=m_tile)


@triton.jit
def group_kernel(
    p_dq,  # [TOKENS, H * GROUP, K]
    p_dk,
    p_dq_sum,  # out [TOKENS, H, K]
    p_dk_sum,
    LINES,  # TOKENS * H
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of queries and keys that GROUP value heads share: summed in float32, BLOCK lines a program."""
    b_line = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    b_channel = tl.arange(0, BK)[None, :]
    m_line = (b_line < LINES) & (b_channel < K)
    b_dq = tl.zeros([BLOCK, BK], tl.float32)
    b_dk = tl.zeros([BLOCK, BK], tl.float32)
    for i in tl.static_range(GROUP):
        o_line = (b_line * GROUP + i) * K + b_channel
        b_dq += tl.load(p_dq + o_line, mask=m_line, other=0.0).to(tl.float32)
        b_dk += tl.load(p_dk + o_line, mask=m_line, other=0.0).to(tl.float32)
    tl.store(p_dq_sum + b_line * K + b_channel, b_dq, mask=m_line)
    tl.store(p_dk_sum + b_line * K + b_channel, b_dk, mask=m_line)
