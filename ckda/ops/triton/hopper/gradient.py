"""The end of the backward for Hopper, in Gluon: `pair_kernel`, `contract_kernel` and `gradient_kernel` as one.

Nothing goes to memory between them. One program a multiprocessor takes chunk after chunk, all of whose channels it holds: eight
warps (four for heads of 64) compute, one fetches. A chunk's tiles come in two parts, what lies along the values and what lies along
the channels, each as soon as its room is free: the values of the next chunk while the channels of this one are at work.
Formulas and names are those of ckda/ops/triton/portable/backward.py, layouts those of ckda/ops/triton/hopper/tile.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ckda.ops.triton.hopper.tile import (
    DT,
    by_pairs,
    by_rows,
    head_gate,
    left_operand,
    plus,
    product,
    rest,
    room,
    rounded,
    times,
)
from ckda.ops.triton.tile import gate_gradient, learning_rate

__all__ = ["hopper_gradient_kernel"]


@gluon.jit
def _sums_from(b_x, s_M, K: gl.constexpr, C: gl.constexpr):
    """The sum of x from each token on, begun: x in three parts, by a matrix of 0 and 1."""
    b_high = rounded(b_x)
    b_x -= b_high.to(gl.float32)
    b_middle = rounded(b_x)
    b_sum = plus(times(b_high, s_M, K, C), b_middle, s_M, K, C)
    return plus(b_sum, rest(b_x, b_middle), s_M, K, C)


@gluon.jit
def _store_halves(b_x, s_high, s_low):
    """x as an operand in two parts."""
    b_high = b_x.to(DT)
    s_high.store(b_high)
    s_low.store((b_x - b_high.to(gl.float32)).to(DT))


@gluon.jit
def _fetch(
    t_states, t_dstates, t_do, t_dv, t_v, t_o, t_y, t_keys, t_g,
    p_rho, p_norms, s_S, s_dS, s_values, s_channels, s_scalars, ready, free, num_chunks, TOKENS,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One warp that fetches the chunks of this program."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    b_token = gl.arange(0, C, LINE) * HV
    phase = 0
    for item in range(gl.program_id(0), num_chunks * HV, gl.num_programs(0)):
        chunk, i_hv = item // HV, item % HV
        row = chunk * C
        bar = ready.index(0)
        mbarrier.wait(free.index(0), phase ^ 1)
        mbarrier.expect(bar, 2 * V * (2 * K + 6 * C))
        tma.async_copy_global_to_shared(t_states, [item * V, 0], bar, s_S)
        tma.async_copy_global_to_shared(t_do, [row, i_hv * V], bar, s_values.index(0))
        tma.async_copy_global_to_shared(t_dv, [row, i_hv * V], bar, s_values.index(1))
        tma.async_copy_global_to_shared(t_dstates, [item * V, 0], bar, s_dS)
        tma.async_copy_global_to_shared(t_y, [row, i_hv * V], bar, s_values.index(4))
        tma.async_copy_global_to_shared(t_y, [TOKENS + row, i_hv * V], bar, s_values.index(5))
        tma.async_copy_global_to_shared(t_v, [row, i_hv * V], bar, s_values.index(2))
        tma.async_copy_global_to_shared(t_o, [row, i_hv * V], bar, s_values.index(3))
        o_line = row.to(gl.int64) * HV + i_hv
        async_copy.async_copy_global_to_shared(s_scalars.index(phase * 4), p_rho + o_line + b_token)
        for n in gl.static_range(3):
            async_copy.async_copy_global_to_shared(
                s_scalars.index(phase * 4 + 1 + n), p_norms + TOKENS.to(gl.int64) * (n * HV) + o_line + b_token
            )
        async_copy.mbarrier_arrive(bar, increment_count=False)
        bar = ready.index(1)
        mbarrier.wait(free.index(1), phase ^ 1)
        mbarrier.expect(bar, 2 * C * 5 * K)
        tma.async_copy_global_to_shared(t_keys, [2 * TOKENS + row, i_hv * K], bar, s_channels.index(0))
        tma.async_copy_global_to_shared(t_keys, [TOKENS + row, i_hv * K], bar, s_channels.index(1))
        tma.async_copy_global_to_shared(t_keys, [row, i_hv * K], bar, s_channels.index(2))
        tma.async_copy_global_to_shared(t_g, [row, i_hv * K], bar, s_channels.index(3))
        tma.async_copy_global_to_shared(t_keys, [3 * TOKENS + row, i_hv * K], bar, s_channels.index(4))
        phase ^= 1


@gluon.jit
def _run(
    p_beta, p_A_log, p_dt_bias, t_dq, t_dk, t_dg, p_dbeta, p_dlog_rate, p_dbias,
    s_S, s_dS, s_values, s_channels, s_scalars, s_out, s_D, s_D_low, s_dA, s_dA_low, s_M, s_sums, ready, free, num_chunks, scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr,
    HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    P: gl.constexpr = product(K, C)
    L: gl.constexpr = left_operand(K, C)
    Q: gl.constexpr = by_pairs(K)
    R: gl.constexpr = by_rows(K, V)
    by_token: gl.constexpr = gl.SliceLayout(0, P)
    by_channel: gl.constexpr = gl.SliceLayout(1, P)
    by_row: gl.constexpr = gl.SliceLayout(1, R)
    b_from = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_to = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    s_M.store(gl.where(b_from >= b_to, 1.0, 0.0).to(DT))
    b_channel = gl.arange(0, K, by_channel)
    phase = 0
    for item in range(gl.program_id(0), num_chunks * HV, gl.num_programs(0)):
        chunk, i_hv = item // HV, item % HV
        o_line = (chunk * C + gl.arange(0, C, by_row)).to(gl.int64) * HV + i_hv
        b_beta = gl.load(p_beta + o_line).to(gl.float32)
        b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, K, C, HAS_A_LOG, HAS_DT_BIAS)
        mbarrier.wait(ready.index(0), phase)

        # what the values contract
        b_S = s_S.permute((1, 0)).load(L)
        b_dq = times(b_S, s_values.index(0).permute((1, 0)), K, C)
        b_dk = times(b_S, s_values.index(1).permute((1, 0)), K, C)
        b_dS = s_dS.permute((1, 0)).load(L)
        b_dk_end = times(b_dS, s_values.index(4).permute((1, 0)), K, C)
        b_through = gl.convert_layout(gl.sum(b_S.to(gl.float32) * b_dS.to(gl.float32), 1), by_channel)

        # the products of tokens with tokens
        left: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
        right: gl.constexpr = gl.DotOperandLayout(1, Q, 2)
        b_y = s_values.index(4).permute((1, 0)).load(right)
        b_zero = gl.zeros([C, C], gl.float32, Q)
        b_y_low = s_values.index(5).permute((1, 0)).load(right)
        b_dv, b_do = s_values.index(1).load(left), s_values.index(0).load(left)
        b_D = mma_v2(b_dv, b_y_low, mma_v2(b_dv, b_y, b_zero))
        b_dA = mma_v2(b_do, b_y_low, mma_v2(b_do, b_y, b_zero))
        b_rho = s_scalars.index(phase * 4).load(gl.SliceLayout(0, Q))
        b_length = gl.sqrt(s_scalars.index(phase * 4 + 3).load(gl.SliceLayout(1, Q)))
        m_lower = b_from > b_to
        _store_halves(gl.where(m_lower, b_D / b_length[:, None], 0.0), s_D, s_D_low)
        _store_halves(gl.where(m_lower, b_dA * b_rho[None, :], 0.0), s_dA, s_dA_low)

        # of tokens with themselves
        b_do = s_values.index(0).load(R).to(gl.float32)
        b_dv = s_values.index(1).load(R).to(gl.float32)
        b_y = s_values.index(4).load(R).to(gl.float32) + s_values.index(5).load(R).to(gl.float32)
        b_diagonal = gl.sum(b_do * b_y, 1)
        b_y_dv = gl.sum(b_dv * b_y, 1)
        b_v_dv = gl.sum(b_dv * s_values.index(2).load(R).to(gl.float32), 1)
        b_q_dq = gl.sum(b_do * s_values.index(3).load(R).to(gl.float32), 1)
        b_norm2 = s_scalars.index(phase * 4 + 3).load(by_row)
        b_y_dv = b_y_dv / gl.sqrt(b_norm2)
        s_sums.index(0).store(b_diagonal * s_scalars.index(phase * 4).load(by_row))
        s_sums.index(1).store(b_q_dq)
        s_sums.index(2).store((2.0 * b_y_dv - b_v_dv) / b_norm2)
        gl.store(p_dbeta + o_line, (b_y_dv * learning_rate(-b_beta, 1)).to(p_dbeta.dtype.element_ty))
        fence_async_shared()
        tma.store_wait(0)
        b_dq, b_dk, b_dk_end = warpgroup_mma_wait(0, deps=[b_dq, b_dk, b_dk_end])
        gl.thread_barrier()  # what was written is there, the values are used up, the last chunk's gradients have left
        mbarrier.arrive(free.index(0), count=1)
        b_rho = s_scalars.index(phase * 4).load(by_token)[None, :]
        b_dk *= (-1.0 / gl.sqrt(s_scalars.index(phase * 4 + 3).load(by_token)))[None, :]
        b_dk_end *= b_rho

        # along the channels
        mbarrier.wait(ready.index(1), phase)
        b_kb = s_channels.index(0).permute((1, 0)).load(L)
        b_kf = s_channels.index(1).permute((1, 0)).load(L)
        b_qf = s_channels.index(2).permute((1, 0)).load(L)
        b_key = gl.convert_layout(b_kb, P).to(gl.float32)
        b_key_rho = rounded(b_key * b_rho)
        b_row_D = times(b_key_rho, s_D.permute((1, 0)), K, C)
        b_row_D = plus(b_row_D, b_key_rho, s_D_low.permute((1, 0)), K, C)
        b_column = plus(times(b_kf, s_D, K, C), b_kf, s_D_low, K, C)
        b_qf_dA = times(b_qf, s_dA, K, C)
        b_kb_dA = times(b_kb, s_dA.permute((1, 0)), K, C)
        b_kb_low = times(b_kb, s_dA_low.permute((1, 0)), K, C)
        b_through += gl.sum(b_key * b_dk_end, 1)
        b_row_D, b_column, b_qf_dA, b_kb_dA, b_kb_low = warpgroup_mma_wait(
            0, deps=[b_row_D, b_column, b_qf_dA, b_kb_dA, b_kb_low]
        )
        b_dk -= b_row_D
        b_dk_end += b_qf_dA
        b_dq += b_kb_dA
        b_query = gl.convert_layout(b_qf, P).to(gl.float32)
        b_dlog = gl.convert_layout(b_kf, P).to(gl.float32) * b_dk + b_key_rho.to(gl.float32) * b_column
        b_dlog = b_dlog - b_key * b_dk_end + b_query * b_dq
        b_dlog = _sums_from(b_dlog, s_M, K, C)
        b_dk_end -= b_rho * b_column
        b_dq += b_kb_low

        # queries and keys, from their decayed forms back to the raw ones
        b_forward = s_channels.index(4).permute((1, 0)).load(P).to(gl.float32)
        b_back = 1.0 / b_forward
        b_q, b_k = b_query * b_back, b_key * b_forward
        b_diagonal = s_sums.index(0).load(by_token)[None, :]
        b_dq = b_dq * b_forward + b_diagonal * b_k
        b_dk = b_dk * b_forward + b_dk_end * b_back + b_diagonal * b_q
        if NORMALIZE:
            unscale = gl.where(scale == 0, 0.0, 1.0 / scale)
            b_inverse = s_scalars.index(phase * 4 + 1).load(by_token) * scale
            b_dq = (b_dq - b_q * (s_sums.index(1).load(by_token) * (unscale * unscale))[None, :]) * b_inverse[None, :]
            b_power = s_scalars.index(phase * 4 + 2).load(by_token)
            b_dk = (b_dk - b_k * s_sums.index(2).load(by_token)[None, :]) * b_power[None, :]
        else:
            b_dq *= scale
        s_out.index(0).permute((1, 0)).store(rounded(b_dq))
        s_out.index(1).permute((1, 0)).store(rounded(b_dk))

        # the gate
        b_g = s_channels.index(3).permute((1, 0)).load(P).to(gl.float32)
        b_dlog = warpgroup_mma_wait(0, deps=[b_dlog]) + b_through[:, None]
        b_dg, b_dlog_rate = gate_gradient(b_dlog, b_g, b_rate, b_bias, GATE)
        s_out.index(2).permute((1, 0)).store(rounded(b_dg))
        if HAS_A_LOG:
            gl.store(p_dlog_rate + gl.cast(item, gl.int64) * K + b_channel, gl.sum(b_dlog_rate, 1))
        if HAS_DT_BIAS:
            gl.store(p_dbias + gl.cast(item, gl.int64) * K + b_channel, gl.sum(b_dg, 1))
        fence_async_shared()
        gl.thread_barrier()  # the gradients are written, the channels used up
        mbarrier.arrive(free.index(1), count=1)
        tma.async_copy_shared_to_global(t_dq, [chunk * C, i_hv * K], s_out.index(0))
        tma.async_copy_shared_to_global(t_dk, [chunk * C, i_hv * K], s_out.index(1))
        tma.async_copy_shared_to_global(t_dg, [chunk * C, i_hv * K], s_out.index(2))
        phase ^= 1
    tma.store_wait(0)


@gluon.jit
def hopper_gradient_kernel(
    t_states,  # tiles [V, K] of [B * NC * HV * V, K]
    t_dstates,
    t_do,  # tiles [C, V] of [B * T, HV * V]
    t_dv,
    t_v,
    t_o,
    t_y,  # tiles [C, V] of [2 * B * T, HV * V]: y and what its rounding left
    t_keys,  # tiles [C, K] of [4 * B * T, HV * K]: q_forward, k_forward, k_back, forward
    t_g,  # tiles [C, K] of [B * T, HV * K]
    p_rho,  # [B * T, HV]
    p_norms,  # [3, B * T, HV]
    p_beta,  # [B * T, HV]
    p_A_log,
    p_dt_bias,
    t_dq,  # out, tiles [C, K] of [B * T, HV * K]
    t_dk,
    t_dg,
    p_dbeta,  # out [B * T, HV]
    p_dlog_rate,  # out float32 [B * NC, HV, K], where HAS_A_LOG
    p_dbias,  # out float32 [B * NC, HV, K], where HAS_DT_BIAS
    num_chunks,  # B * NC
    TOKENS,  # B * T
    scale,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    GATE: gl.constexpr,
    HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    NORMALIZE: gl.constexpr,
):
    """All gradients but dv, chunk by chunk."""
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=33)
    mbarrier.init(ready.index(1), count=1)
    mbarrier.init(free.index(0), count=1)
    mbarrier.init(free.index(1), count=1)
    fence_async_shared()
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_scalars = gl.allocate_shared_memory(gl.float32, [8, C], LINE)  # rho, 1 / |q|, power, |k|^2 of two chunks
    s_sums = gl.allocate_shared_memory(gl.float32, [3, C], LINE)
    s_S, s_dS = room(1, V, K).index(0), room(1, V, K).index(0)
    s_values, s_channels, s_out = room(6, C, V), room(5, C, K), room(3, C, K)
    squares = room(5, C, C)
    s_D, s_D_low, s_dA, s_dA_low, s_M = (
        squares.index(0),
        squares.index(1),
        squares.index(2),
        squares.index(3),
        squares.index(4),
    )
    gl.warp_specialize(
        [
            (
                _run,
                (
                    p_beta, p_A_log, p_dt_bias, t_dq, t_dk, t_dg, p_dbeta, p_dlog_rate, p_dbias,
                    s_S, s_dS, s_values, s_channels, s_scalars, s_out, s_D, s_D_low, s_dA, s_dA_low, s_M, s_sums, ready, free,
                    num_chunks, scale, HV, K, V, C, GATE, HAS_A_LOG, HAS_DT_BIAS, NORMALIZE,
                ),
            ),
            (
                _fetch,
                (
                    t_states, t_dstates, t_do, t_dv, t_v, t_o, t_y, t_keys, t_g,
                    p_rho, p_norms, s_S, s_dS, s_values, s_channels, s_scalars, ready, free, num_chunks, TOKENS,
                    HV, K, V, C,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
