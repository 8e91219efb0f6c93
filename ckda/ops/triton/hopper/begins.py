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
    HEADS: tl.constexpr,  # of a program
):
    """One chunk of some heads. No later token has a say in which way a row goes: the first token decides for the chunk."""
    i_chunk = tl.program_id(0)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    b_channel = tl.arange(0, BK)
    m_head = b_head < HV
    m_gate = m_head[:, None] & (b_channel < K)[None, :]
    m_token = m_gate & (begin < end)
    o_gate = b_head[:, None] * K + b_channel[None, :]
    b_rate = tl.full([HEADS, 1], 1.0, tl.float32)
    b_bias = tl.zeros([HEADS, BK], tl.float32)
    if HAS_A_LOG:
        b_rate *= tl.exp(tl.load(p_A_log + b_head, mask=m_head, other=0.0).to(tl.float32))[:, None]
    if HAS_DT_BIAS:
        b_bias += tl.load(p_dt_bias + o_gate, mask=m_gate, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + begin.to(tl.int64) * (HV * K) + o_gate, mask=m_token, other=0.0)
    b_log, _ = log_gate(finite_gate(b_g.to(tl.float32), GATE), b_rate, b_bias, GATE, False)
    b_least = tl.min(tl.where(m_token, b_log, 0.0), 1)
    tl.store(p_calm + i_chunk * HV + b_head, (b_least >= LEAST_FIRST).to(tl.int32), mask=m_head)
