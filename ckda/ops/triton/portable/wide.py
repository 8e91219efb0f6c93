"""The two passes over the chunks where products are three TF32 products: float32, and float16 but for Hopper.

The sums are those of `state_kernel` and `reverse_kernel` (portable/forward.py, portable/backward.py), cut otherwise. There each
warp takes some tokens of a product over channels and reads the whole state for it; of float32 that is a high and a low part, half
of all registers, and one chain of 48 matrix instructions that wait for each other. Here the state is [W, BV, BW], W blocks of up
to 32 channels, a warp each. A product over channels is one product a block, in which a warp takes its part of the state from the
registers where it has it, in four independent sums; then the blocks are added up.
"""

import triton
import triton.language as tl

from ckda.ops.triton.portable.forward import sequence_place, state_place
from ckda.ops.triton.tile import STATE_UNIT, dot, dot_apart, rounded_product

__all__ = ["BLOCK", "wide_reverse_kernel", "wide_state_kernel"]

BLOCK = 32  # channels of a warp


@triton.jit
def _in_blocks(b_x, W: tl.constexpr, N: tl.constexpr, BW: tl.constexpr):
    """[W, N, BW] with channels 2 t + e of each eight in the order t + 4 e, t < 4, e < 2.

    What a product leaves with one thread as channels 2 t and 2 t + 1 the next one's operand has there as channels t and t + 4. A
    sum over channels may take them in any order, if both operands do: so no number of the state changes its place.
    """
    b_x = tl.permute(tl.reshape(b_x, [W, N, BW // 8, 4, 2]), (0, 1, 2, 4, 3))
    return tl.reshape(b_x, [W, N, BW])


@triton.jit
def _blocks_added(b_x, W: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """[W, N, C] -> [N, C], W = 1, 2, 4 or 8; by halves, always in the same order."""
    if W == 1:
        return tl.reshape(b_x, [N, C])
    else:
        b_x = tl.permute(b_x, (1, 2, 0))
        if W == 8:
            b_even, b_odd = tl.split(tl.reshape(b_x, [N, C, 4, 2]))
            b_x = b_even + b_odd
        if W >= 4:
            b_even, b_odd = tl.split(tl.reshape(b_x, [N, C, 2, 2]))
            b_x = b_even + b_odd
        b_even, b_odd = tl.split(b_x)
        return b_even + b_odd


@triton.jit
def _over_channels(b_S, b_keys, W: tl.constexpr, N: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """S keys^T [N, C] of a state [W, N, BW] and keys [W, C, BW]."""
    b_keys = tl.permute(_in_blocks(b_keys, W, C, BW), (0, 2, 1))
    return _blocks_added(dot(_in_blocks(b_S, W, N, BW), b_keys, DOT), W, N, C)


@triton.jit
def _over_tokens(b_x, b_keys, W: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """x keys [W, N, BW] of x [1, N, C] and keys [W, C, BW]."""
    return dot(tl.broadcast_to(b_x, [W, N, C]), b_keys, DOT)


@triton.jit
def wide_state_kernel(
    p_v,  # [B * T, HV, V]
    p_q_forward,  # float32 [B * T, HV, K], as the next two
    p_k_forward,
    p_k_back,
    p_A,  # float32 [B * T, HV, C]
    p_solver,  # float32 [B * T, HV, C]
    p_rho,  # [B * T, HV]
    p_norm2,  # [B * T, HV]
    p_start,  # [B * NC, HV, K]
    p_end,
    p_initial,  # float32 [N, HV, K, V]
    p_cu_seqlens,  # [N + 1], packed sequences only
    p_first,  # [N] first chunk of each sequence, packed only
    p_o,  # out [B * T, HV, V]; this and the next two where SUMMARY is "none"
    p_y,  # out float32 [B * T, HV, V]
    p_states,  # out float32 [B * NC, HV, V, K] gamma_a times the state at each chunk's start, in units twice
    p_final,  # out float32 [N, HV, K, V], where STORE_FINAL
    T,
    NC,
    SEGMENT,  # chunks of a segment
    FIRST_SEGMENT,  # of each sequence that is run
    NUM_SEGMENTS,  # that are run
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    SUMMARY: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`state_kernel`: the state from chunk to chunk, and the outputs; W blocks of BW channels, one a warp."""
    i_v, i_hv, i_n = state_place(HV, (V + BV - 1) // BV)
    begin, end, first, num = sequence_place(
        p_cu_seqlens, p_first, i_n, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, C, PACKED
    )
    b_index = tl.arange(0, C)
    b_value = i_v * BV + tl.arange(0, BV)
    m_value = b_value < V
    b_channel = tl.arange(0, W)[:, None] * BW + tl.arange(0, BW)[None, :]
    m_channel = b_channel < K
    m_state = m_value[None, :, None] & m_channel[:, None, :]
    o_state = (i_n * HV + i_hv) * (K * V) + b_channel[:, None, :] * V + b_value[None, :, None]
    b_S = tl.zeros([W, BV, BW], tl.float32)
    if SUMMARY == "transition":
        b_S += tl.where((b_channel[:, None, :] == b_value[None, :, None]) & m_state, 1.0, 0.0)
    elif HAS_INITIAL:
        b_S += tl.load(p_initial + o_state, mask=m_state, other=0.0)
    b_line = b_index * HV
    b_key_offset = (b_line * K)[None, :, None] + b_channel[:, None, :]
    b_value_offset = b_line[None, :] * V + b_value[:, None]
    b_square_offset = b_line[:, None] * C + b_index[None, :]
    b_slot_offset = b_channel[:, None, :] + b_value[None, :, None] * K
    o_decay = (first * HV + i_hv) * K + b_channel
    unit: tl.constexpr = STATE_UNIT if BOUNDED else 1.0
    part: tl.constexpr = 1.0 / (unit * unit)
    for c in range(num):
        line = (begin + c * C) * HV + i_hv
        m_token = b_index < (end - begin - c * C).to(tl.int32)
        m_key = m_token[None, :, None] & m_channel[:, None, :]
        m_out = m_value[:, None] & m_token[None, :]
        o_key = line * K
        o_value = line * V
        o_square = line * C
        b_k_forward = tl.load(p_k_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_solver = tl.load(p_solver + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
        if (
            BOUNDED
        ):  # S*, by two factors, for the product of both might underflow; loaded for a product, they are loaded ahead
            b_end = tl.load(p_end + o_decay - HV * K, mask=m_channel & (c > 0), other=unit)  # of the chunk before
            b_start = tl.load(p_start + o_decay, mask=m_channel, other=1.0)
            b_S = rounded_product(b_S * b_end[:, None, :], b_start[:, None, :])
        else:
            b_end = tl.load(p_end + o_decay, mask=m_channel, other=1.0)
        o_decay += HV * K
        b_rest = _over_channels(b_S, b_k_forward, W, BV, BW, C, DOT) * -part
        b_o = tl.zeros([BV, C], tl.float32)
        if SUMMARY == "none":  # beside the product above, for neither waits for the other
            b_q_forward = tl.load(p_q_forward + o_key + b_key_offset, mask=m_key, other=0.0)
            b_o = _over_channels(b_S, b_q_forward, W, BV, BW, C, DOT) * part
        if SUMMARY != "transition":
            b_length = tl.sqrt(tl.load(p_norm2 + line + b_line, mask=m_token, other=1.0))
            b_v = tl.load(p_v + o_value + b_value_offset, mask=m_out, other=0.0).to(tl.float32)
            b_rest += b_v * b_length[None, :]
        b_y = dot_apart(b_rest, tl.trans(b_solver))
        b_u = b_y * b_rho[None, :]
        if SUMMARY == "none":
            o_slot = ((first + c) * HV + i_hv) * (K * V)
            tl.store(p_states + o_slot + b_slot_offset, b_S, mask=m_state)
            tl.store(p_y + o_value + b_value_offset, b_y, mask=m_out)
            b_A = tl.load(p_A + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
            b_o += dot_apart(b_u, tl.trans(b_A))
            tl.store(p_o + o_value + b_value_offset, b_o, mask=m_out)
        if BOUNDED:
            b_S *= part
        else:
            b_S *= b_end[:, None, :]
        b_k_back = tl.load(p_k_back + o_key + b_key_offset, mask=m_key, other=0.0)
        b_S += _over_tokens(b_u[None, :, :], b_k_back, W, BV, C, DOT)
    if BOUNDED:
        b_S *= tl.load(p_end + o_decay - HV * K, mask=m_channel & (num > 0), other=unit)[:, None, :] * (1.0 / unit)
    if STORE_FINAL:
        tl.store(p_final + o_state, b_S, mask=m_state)


@triton.jit
def wide_reverse_kernel(
    p_do,  # [B * T, HV, V]
    p_y,  # float32 [B * T, HV, V]
    p_q_forward,  # float32 [B * T, HV, K], as the next two
    p_k_forward,
    p_k_back,
    p_A,  # float32 [B * T, HV, C]
    p_solver,  # float32 [B * T, HV, C]
    p_rho,  # [B * T, HV]
    p_norm2,  # [B * T, HV]
    p_start,  # [B * NC, HV, K]
    p_end,
    p_dfinal,  # float32 [N, HV, K, V]
    p_cu_seqlens,
    p_first,
    p_dv,  # out float32 [B * T, HV, V]
    p_duy,  # out float32 [B * T, HV, NV] du . y over each block of values, where STORE_DUY
    p_dstates,  # out float32 [B * NC, HV, V, K] Gamma / gamma_a times that of the state after each chunk, in units twice
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
    W: tl.constexpr,
    BW: tl.constexpr,
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
    """`reverse_kernel`: the gradient of the state from chunk to chunk, backwards."""
    i_v, i_hv, i_n = state_place(HV, NV)
    begin, end, first, num = sequence_place(
        p_cu_seqlens, p_first, i_n, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, C, PACKED
    )
    b_index = tl.arange(0, C)
    b_value = i_v * BV + tl.arange(0, BV)
    m_value = b_value < V
    b_channel = tl.arange(0, W)[:, None] * BW + tl.arange(0, BW)[None, :]
    m_channel = b_channel < K
    m_state = m_value[None, :, None] & m_channel[:, None, :]
    o_state = (i_n * HV + i_hv) * (K * V) + b_channel[:, None, :] * V + b_value[None, :, None]
    b_dS = tl.zeros([W, BV, BW], tl.float32)
    if HAS_FINAL:
        b_dS += tl.load(p_dfinal + o_state, mask=m_state, other=0.0)
    b_line = b_index * HV
    b_key_offset = (b_line * K)[None, :, None] + b_channel[:, None, :]
    b_value_offset = b_line[None, :] * V + b_value[:, None]
    b_square_offset = b_line[:, None] * C + b_index[None, :]
    b_slot_offset = b_channel[:, None, :] + b_value[None, :, None] * K
    o_decay = ((first + num - 1) * HV + i_hv) * K + b_channel
    unit: tl.constexpr = STATE_UNIT if BOUNDED else 1.0
    part: tl.constexpr = 1.0 / (unit * unit)
    for step in range(num):
        c = num - 1 - step
        line = (begin + c * C) * HV + i_hv
        m_token = b_index < (end - begin - c * C).to(tl.int32)
        m_key = m_token[None, :, None] & m_channel[:, None, :]
        m_out = m_value[:, None] & m_token[None, :]
        o_key = line * K
        o_value = line * V
        o_square = line * C
        b_k_back = tl.load(p_k_back + o_key + b_key_offset, mask=m_key, other=0.0)
        b_A = tl.load(p_A + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver = tl.load(p_solver + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_do = tl.load(p_do + o_value + b_value_offset, mask=m_out, other=0.0)
        # once more, for what is loaded ahead has one layout
        b_do_block = tl.load(p_do + o_value + b_value_offset[None, :, :], mask=m_out[None, :, :], other=0.0)
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
        b_end = tl.load(p_end + o_decay, mask=m_channel, other=1.0)
        if BOUNDED:  # Gamma / gamma_a dS, by two factors, for the product of both might underflow
            b_start = tl.load(p_start + o_decay + HV * K, mask=m_channel & (step > 0), other=unit)  # of the chunk after
            b_dS = rounded_product(b_dS * b_start[:, None, :], b_end[:, None, :])
        o_decay -= HV * K
        b_norm2 = tl.load(p_norm2 + line + b_line, mask=m_token, other=1.0)
        b_rho = tl.where(b_norm2 == 0, 0.0, b_rho)  # never so; but what leads to a product is loaded ahead
        b_du = _over_channels(b_dS, b_k_back, W, BV, BW, C, DOT) * part + dot_apart(b_do.to(tl.float32), b_A)
        b_dr = dot_apart(b_du * b_rho[None, :], b_solver)
        if not SUMMARY:
            o_slot = ((first + c) * HV + i_hv) * (K * V)
            tl.store(p_dstates + o_slot + b_slot_offset, b_dS, mask=m_state)
            tl.store(p_dv + o_value + b_value_offset, b_dr * tl.sqrt(b_norm2)[None, :], mask=m_out)
            if STORE_DUY:
                b_y = tl.load(p_y + o_value + b_value_offset, mask=m_out, other=0.0).to(tl.float32)
                tl.store(p_duy + line * NV + b_line * NV + i_v, tl.sum(b_du * b_y, 0), mask=m_token)
        if BOUNDED:
            b_dS *= part
        else:
            b_dS *= b_end[:, None, :]
        b_q_forward = tl.load(p_q_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_dS += _over_tokens(b_do_block, b_q_forward, W, BV, C, DOT)
        b_k_forward = tl.load(p_k_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_dS -= _over_tokens(b_dr[None, :, :], b_k_forward, W, BV, C, DOT)
    if BOUNDED:
        b_dS *= tl.load(p_start + o_decay + HV * K, mask=m_channel & (num > 0), other=unit)[:, None, :] * (1.0 / unit)
    if STORE_INITIAL:
        tl.store(p_dinitial + o_state, b_dS, mask=m_state)
