"""Which chunks begin calm: whether the gates of a chunk's first token are near one. A kernel of plain Triton."""

import triton
import triton.language as tl

from ckda.ops.triton.tile import chunk_place, finite_gate, log_gate

__all__ = ["begins_kernel"]

LEAST_FIRST = tl.constexpr(-4.0)  # log2 of the least gate of such a token


@triton.jit
def begins_kernel(
    p_g,  # [B * T, HV, K]
    p_A_log,
    p_dt_bias,
    p_calm,  # out int32 [num_chunks, HV]
    p_starts,  # [num_chunks] where PACKED
    p_ends,
    T,
    NC,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One chunk of a head. No later token has a say in which way a row goes: the first token decides for the chunk."""
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_channel = tl.arange(0, BK)
    m_channel = (b_channel < K) & (begin < end)
    b_rate, b_bias = 1.0, tl.zeros([BK], tl.float32)
    if HAS_A_LOG:
        b_rate = tl.exp(tl.load(p_A_log + i_hv).to(tl.float32))
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * K + b_channel, mask=b_channel < K, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + (begin.to(tl.int64) * HV + i_hv) * K + b_channel, mask=m_channel, other=0.0)
    b_log, _ = log_gate(finite_gate(b_g.to(tl.float32), GATE), b_rate, b_bias, GATE, False)
    least = tl.min(tl.where(m_channel, b_log, 0.0), 0)
    tl.store(p_calm + i_chunk * HV + i_hv, (least >= LEAST_FIRST).to(tl.int32))
