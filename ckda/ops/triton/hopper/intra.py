"""`intra_kernel` for Hopper, in Gluon: what of a chunk does not depend on the state, one chunk of a value head after the other.

Two programs share a multiprocessor, each of eight warps that compute (four for heads of 64) and one that fetches q, k and g ahead.
Formulas and names are those of ckda/ops/triton/portable/forward.py and tile.py; sums over tokens are products, sums over a token's
channels are taken where its row lies within a warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ckda.ops.triton.hopper.tile import (
    DT,
    barriers,
    by_pairs,
    by_rows,
    head_gate,
    plus,
    product,
    rest,
    room,
    rounded,
    times,
)
from ckda.ops.triton.tile import ROUND, learning_rate, log_gate

__all__ = ["hopper_intra_kernel"]

STAGES = gl.constexpr(2)


@gluon.jit
def _fetch(
    t_q, t_k, t_g, s_in, ready, free, num_chunks,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One warp that fetches the chunks of this program."""
    n = 0
    for item in range(gl.program_id(0), num_chunks * HV, gl.num_programs(0)):
        row, i_hv = (item // HV) * C, item % HV
        i_h = i_hv // (HV // H)
        slot = n % STAGES
        bar = ready.index(slot)
        mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * C * 3 * K)
        tma.async_copy_global_to_shared(t_k, [row, i_h * K], bar, s_in.index(slot * 3 + 1))
        tma.async_copy_global_to_shared(t_q, [row, i_h * K], bar, s_in.index(slot * 3))
        tma.async_copy_global_to_shared(t_g, [row, i_hv * K], bar, s_in.index(slot * 3 + 2))
        n += 1  # noqa: SIM113


@gluon.jit
def _used_norms(b_q, b_k, NORMALIZE: gl.constexpr):
    """1 / |q|, the power of two in the key and |k|^2 of the key as used: `used_queries` and `used_keys`."""
    b_inverse = gl.full([b_q.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, b_q.type.layout))
    b_power, b_norm2 = b_inverse, b_inverse
    if NORMALIZE:
        b_square = gl.sum(b_q * b_q, 1)
        b_inverse = gl.where(b_square > 0, 1.0 / gl.sqrt_rn(gl.where(b_square > 0, b_square, 1.0)), 0.0)
        b_square = gl.sum(b_k * b_k, 1)
        b_exponent = gl.minimum(gl.floor(0.5 - 0.5 * gl.log2(gl.where(b_square > 0, b_square, 1.0))), 126.0)
        b_power = gl.where(b_square > 0, gl.exp2(b_exponent), 0.0)
        b_norm2 = gl.where(b_square > 0, b_square * b_power * b_power, 1.0)
    return b_inverse, b_power, b_norm2


@gluon.jit
def _run(
    p_beta, p_A_log, p_dt_bias, t_keys, p_A, p_G, p_rho, p_norms, p_start, p_end,
    s_in, s_out, s_M, s_lines, ready, free, num_chunks, TOKENS, scale,
    HV: gl.constexpr, K: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr,
    HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr, NORMALIZE: gl.constexpr, BETA_RANGE: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    P: gl.constexpr = product(K, C)
    Q: gl.constexpr = by_pairs(K)
    R: gl.constexpr = by_rows(K, K)
    by_token: gl.constexpr = gl.SliceLayout(0, P)
    by_channel: gl.constexpr = gl.SliceLayout(1, P)
    by_row: gl.constexpr = gl.SliceLayout(1, R)
    b_from = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_to = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    s_M.store(gl.where(b_from <= b_to, 1.0, 0.0).to(DT))
    fence_async_shared()
    gl.thread_barrier()
    b_channel = gl.arange(0, K, by_channel)
    b_token = gl.arange(0, C, by_token)[None, :]
    num_lines = TOKENS.to(gl.int64) * HV
    n = 0
    for item in range(gl.program_id(0), num_chunks * HV, gl.num_programs(0)):
        chunk, i_hv = item // HV, item % HV
        slot, row = n % STAGES, chunk * C
        o_line = (row + gl.arange(0, C, by_row)).to(gl.int64) * HV + i_hv
        b_beta = gl.load(p_beta + o_line).to(gl.float32)
        b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, K, C, HAS_A_LOG, HAS_DT_BIAS)
        mbarrier.wait(ready.index(slot), (n // STAGES) & 1)

        # the gates, and their sums over tokens
        b_g = s_in.index(slot * 3 + 2).permute((1, 0)).load(P).to(gl.float32)
        b_log, b_negative = log_gate(b_g, b_rate, b_bias, GATE, False)
        b_high = rounded(b_log)
        b_cum = plus(times(b_high, s_M, K, C), rest(b_log, b_high), s_M, K, C)
        b_count = times(gl.where(b_negative, 1.0, 0.0).to(DT), s_M, K, C)

        # the norms and the learning rate
        b_q = s_in.index(slot * 3).load(R).to(gl.float32)
        b_k = s_in.index(slot * 3 + 1).load(R).to(gl.float32)
        b_inverse, b_power, b_norm2 = _used_norms(b_q, b_k, NORMALIZE)
        s_lines.index(0).store(b_inverse * scale)
        s_lines.index(1).store(b_power)
        gl.store(p_rho + o_line, learning_rate(b_beta, BETA_RANGE) / b_norm2)
        gl.store(p_norms + o_line, b_inverse)
        gl.store(p_norms + num_lines + o_line, b_power)
        gl.store(p_norms + 2 * num_lines + o_line, b_norm2)
        tma.store_wait(0)
        gl.thread_barrier()  # the lines are written, and the last chunk's tiles have left

        # the decays: `bounded_decays`
        b_cum, b_count = warpgroup_mma_wait(0, deps=[b_cum, b_count])
        b_sign = b_count.to(gl.int32) << 31
        b_round = b_cum + ROUND
        b_broken = b_cum - (b_round - ROUND)
        b_middle = gl.sum(gl.where(b_token == C // 2 - 1, b_cum, 0.0), 1) + ROUND
        b_shift = (b_round.to(gl.int32, bitcast=True) - b_middle.to(gl.int32, bitcast=True)[:, None]) << 23
        b_forward = ((gl.exp2(b_broken).to(gl.int32, bitcast=True) + b_shift) ^ b_sign).to(gl.float32, bitcast=True)
        b_back = ((gl.exp2(-b_broken).to(gl.int32, bitcast=True) - b_shift) ^ b_sign).to(gl.float32, bitcast=True)
        b_end = gl.sum(gl.where(b_token == C - 1, b_forward, 0.0), 1)
        o_slot = gl.cast(item, gl.int64) * K + b_channel
        gl.store(p_start + o_slot, gl.exp2(b_middle - ROUND))
        gl.store(p_end + o_slot, b_end)

        # queries and keys
        s_out.index(3).permute((1, 0)).store(rounded(b_forward))
        b_q = s_in.index(slot * 3).permute((1, 0)).load(P).to(gl.float32) * s_lines.index(0).load(by_token)[None, :]
        s_out.index(0).permute((1, 0)).store(rounded(rounded(b_q).to(gl.float32) * b_forward))
        b_k = s_in.index(slot * 3 + 1).permute((1, 0)).load(P).to(gl.float32) * s_lines.index(1).load(by_token)[None, :]
        s_out.index(1).permute((1, 0)).store(rounded(b_k * b_forward))
        s_out.index(2).permute((1, 0)).store(rounded(b_k * b_back))
        fence_async_shared()
        gl.thread_barrier()  # the tiles are written, and q, k and g used up
        mbarrier.arrive(free.index(slot), count=1)
        for i in gl.static_range(4):
            tma.async_copy_shared_to_global(t_keys, [i * TOKENS + row, i_hv * K], s_out.index(i))

        # the products of tokens with tokens
        left: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
        b_key = s_out.index(2).permute((1, 0)).load(gl.DotOperandLayout(1, Q, 2))
        b_zero = gl.zeros([C, C], gl.float32, Q)
        b_A = mma_v2(s_out.index(0).load(left), b_key, b_zero)
        b_G = mma_v2(s_out.index(1).load(left), b_key, b_zero)
        o_A = ((row + b_from).to(gl.int64) * HV + i_hv) * C + b_to
        gl.store(p_A + o_A, gl.where(b_from >= b_to, b_A, 0.0).to(DT))
        gl.store(p_G + o_A, gl.where(b_from > b_to, b_G, 0.0))
        n += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def hopper_intra_kernel(
    t_q,  # tiles [C, K] of [B * T, H * K]
    t_k,
    t_g,  # tiles [C, K] of [B * T, HV * K]
    p_beta,  # [B * T, HV]
    p_A_log,
    p_dt_bias,
    t_keys,  # out, tiles [C, K] of [4 * B * T, HV * K]: q_forward, k_forward, k_back, forward
    p_A,  # out [B * T, HV, C]
    p_G,  # out float32 [B * T, HV, C]
    p_rho,  # out float32 [B * T, HV]
    p_norms,  # out float32 [3, B * T, HV]
    p_start,  # out float32 [B * NC, HV, K]
    p_end,  # out float32 [B * NC, HV, K]
    num_chunks,  # B * NC
    TOKENS,  # B * T
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    GATE: gl.constexpr,
    HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    NORMALIZE: gl.constexpr,
    BETA_RANGE: gl.constexpr,
):
    """What of a chunk does not depend on the state."""
    ready, free = barriers(STAGES, 1)
    s_in, s_out, s_M = room(STAGES * 3, C, K), room(4, C, K), room(1, C, C).index(0)
    s_lines = gl.allocate_shared_memory(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [
            (
                _run,
                (
                    p_beta, p_A_log, p_dt_bias, t_keys, p_A, p_G, p_rho, p_norms, p_start, p_end,
                    s_in, s_out, s_M, s_lines, ready, free, num_chunks, TOKENS, scale,
                    HV, K, C, GATE, HAS_A_LOG, HAS_DT_BIAS, NORMALIZE, BETA_RANGE,
                ),
            ),
            (_fetch, (t_q, t_k, t_g, s_in, ready, free, num_chunks, H, HV, K, C)),
        ],
        [1],
        [24],
    )  # fmt: skip
