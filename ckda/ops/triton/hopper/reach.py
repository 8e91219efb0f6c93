"""The gradient of a beta near zero, for which `hopper_gradient_kernel` has not all it takes. A kernel of plain Triton.

beta dbeta is the sum over values of dr y. Where beta is zero that says nothing, and where it is small float16 has no digits of dr.
There dbeta is du . y, and du has a sum over channels, k_back dS: of 256 the gradient kernel holds half at a time.
"""

import triton
import triton.language as tl

from ckda.ops.triton.tile import STATE_UNIT, chunk_place, dot

__all__ = ["reach_kernel"]


@triton.jit
def reach_kernel(
    p_do,  # [B * T, HV, V]
    p_dv,  # [B * T, HV, V]
    p_y,  # [ROWS, HV, V]
    p_y_low,
    p_A,  # [ROWS, HV, C]
    p_G,  # float32 [ROWS, HV, C]
    p_k_back,  # [ROWS, HV, K]
    p_dstates,  # [num_chunks, HV, V, K]
    p_rho,  # float32 [ROWS, HV]
    p_norm2,  # float32 [ROWS, HV]
    p_starts,  # [num_chunks] where PACKED
    p_ends,
    p_dbeta,  # [B * T, HV], of which only those near zero are written
    T,
    NC,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEAST: tl.constexpr,  # the |rho| up to which beta counts as near zero
    BOUNDED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One chunk of a head: du = A^T do - G^T dr + k_back dS, dbeta = du . y / |k|^2 of its tokens whose beta is near zero."""
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    token = begin + tl.arange(0, C)
    o_line = (i_chunk.to(tl.int64) * C + tl.arange(0, C)) * HV + i_hv
    o_token = token * HV + i_hv
    m_token = token < end
    m_near = m_token & (tl.abs(tl.load(p_rho + o_line)) <= LEAST)
    if tl.sum(m_near.to(tl.int32), 0) > 0:
        o_square = o_line[:, None] * C + tl.arange(0, C)[None, :]
        b_A, b_G = tl.trans(tl.load(p_A + o_square)), tl.trans(tl.load(p_G + o_square))
        b_norm2 = tl.load(p_norm2 + o_line)
        b_inverse = 1.0 / tl.sqrt(b_norm2)
        b_du_y = tl.zeros([C], tl.float32)
        for first in range(0, V, BV):
            value = first + tl.arange(0, BV)
            m_value, m_tile = value < V, m_token[:, None] & (value < V)[None, :]
            o_value = o_line[:, None] * V + value[None, :]
            b_y = tl.load(p_y + o_value, mask=m_tile, other=0.0).to(tl.float32)
            b_y += tl.load(p_y_low + o_value, mask=m_tile, other=0.0).to(tl.float32)
            o_value = o_token[:, None] * V + value[None, :]
            b_do = tl.load(p_do + o_value, mask=m_tile, other=0.0)
            b_dr = tl.load(p_dv + o_value, mask=m_tile, other=0.0).to(tl.float32) * b_inverse[:, None]
            b_reach = tl.zeros([C, BV], tl.float32)
            for channel in range(0, K, BK):
                o_channel = channel + tl.arange(0, BK)
                m_channel = o_channel < K
                b_k = tl.load(p_k_back + o_line[:, None] * K + o_channel[None, :], mask=m_channel[None, :], other=0.0)
                o_state = ((i_chunk.to(tl.int64) * HV + i_hv) * V + value[None, :]) * K + o_channel[:, None]
                b_dS = tl.load(p_dstates + o_state, mask=m_channel[:, None] & m_value[None, :], other=0.0)
                b_reach += dot(b_k, b_dS, "tf32x3")
            if BOUNDED:
                b_reach *= 1.0 / (STATE_UNIT * STATE_UNIT)
            b_reach += dot(b_A, b_do, "tf32x3") - dot(b_G, b_dr, "tf32x3")
            b_du_y += tl.sum(b_reach * b_y, 1)
        tl.store(p_dbeta + o_token, (b_du_y / b_norm2).to(p_dbeta.dtype.element_ty), mask=m_near)
