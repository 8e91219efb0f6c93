"""The end of the backward for Hopper, in Gluon: `pair_kernel`, `contract_kernel` and `gradient_kernel` as one.

Nothing goes to memory between them. One program a multiprocessor takes chunk after chunk, all of whose channels it holds: eight
warps (four for heads of 64) compute, one fetches. A chunk's tiles come in two parts, what lies along the values and what lies along
the channels, each as soon as its room is free: the values of the next chunk while the channels of this one are at work.
Formulas and names are those of ckda/ops/triton/portable/backward.py, layouts those of ckda/ops/triton/hopper/tile.py.

Heads of 256 channels (HALVES = 2) are two items a chunk, one for each half: here channels need nothing of each other. More values
than a tile holds come in two parts, one after the other (`_earlier_values`), and what they contract is added up.
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
    AFTER,
    BORDERS,
    DT_BYTES,
    FETCH_REGISTERS,
    FETCH_WARPS,
    FORWARD,
    K_BACK,
    K_FORWARD,
    LINES_ARRIVE,
    Q_FORWARD,
    THROUGH,
    TILES_ARRIVE,
    USED_ARRIVE,
    across_border,
    as_float,
    as_rounded,
    ask,
    by_pairs,
    by_rows,
    by_warps,
    channel_tile,
    clear_behind,
    fetch_layout,
    fetch_state,
    fetch_tile,
    head_gate,
    held_log,
    left_operand,
    lines,
    lines_apart,
    plus,
    product,
    rest,
    room,
    room_for_one,
    rooms,
    rounded,
    send_tile,
    settle,
    span_sums,
    store_spans,
    times,
    turns,
    warps_of,
)
from ckda.ops.triton.tile import (
    LOG2E,
    STATE_UNIT,
    finite_gate,
    gate_gradient,
    learning_rate,
    log_gate,
    power_of,
    reciprocal,
)

__all__ = ["hopper_gradient_kernel"]

# a chunk's tiles come in two parts, each with its own barriers
VALUES, CHANNELS, PARTS = (gl.constexpr(i) for i in range(3))
# the tiles along the values
DO, DV, V_GIVEN, O, Y, Y_LOW, NUM_VALUES = (gl.constexpr(i) for i in range(7))
STATES = gl.constexpr(2)  # that come with them: S and dS
# the tiles along the channels: the parts of t_keys where BOUNDED, and otherwise q and k
SLOT_K_BACK, SLOT_K_FORWARD, SLOT_Q_FORWARD, SLOT_FORWARD, NUM_DECAYED = (gl.constexpr(i) for i in range(5))
QUERY, KEY, NUM_RAW = (gl.constexpr(i) for i in range(3))
# the matrices [C, C], each in two parts: D and dA where BOUNDED, and otherwise N and dA of each border but the first
D, D_LOW, DA, DA_LOW, NUM_SQUARES = (gl.constexpr(i) for i in range(5))
N, N_LOW = D, D_LOW
FIRST = gl.constexpr(1)  # the borders by products begin here; those between tokens 2m and 2m + 1 go without
NEXT_N, NEXT_DA = (gl.constexpr(i) for i in range(2))
ONWARD = gl.constexpr(0)  # where BOUNDED the only matrix by which logs are summed: from a token on
# lines of a chunk: what is fetched of its tokens, the norms last; and what is found of them: what S dr, dq and dk are multiplied by
# (ROW, Q_OUT, K_OUT), and sums over their values, pairs or channels
RHO, Q_INVERSE, K_POWER, NORM2, SCALARS = (gl.constexpr(i) for i in range(5))
NORMS = gl.constexpr(3)
DIAGONAL, ROW, Q_DQ, K_DK, Q_OUT, K_OUT, DU_Y, REACH, SUMS = (gl.constexpr(i) for i in range(9))
CHUNKS = gl.constexpr(2)  # whose scalars are held: this one's and the next one's
# the gradients on their way out
DQ, DK, DG, OUTPUTS = (gl.constexpr(i) for i in range(4))


@gluon.constexpr_function
def _part(scaled):
    """What states, and their gradients, were multiplied by, inverted."""
    return 1.0 / (STATE_UNIT.value * STATE_UNIT.value) if scaled else 1.0


@gluon.jit
def _exact_sums(b_x, s_M, BK: gl.constexpr, C: gl.constexpr):
    """x M [BK, C], begun: sums of x over tokens, x in three parts, M a matrix of 0 and 1."""
    b_high = rounded(b_x, s_M.dtype)
    b_x -= as_rounded(b_x, s_M.dtype)
    b_middle = rounded(b_x, s_M.dtype)
    b_sum = plus(times(b_high, s_M, BK, C), b_middle, s_M, BK, C)
    return plus(b_sum, rest(b_x, b_middle), s_M, BK, C)


@gluon.jit
def _to_end(b_log, s_M, BK: gl.constexpr, C: gl.constexpr):
    """|Gamma / gamma_i| [BK, C]."""
    b_high = rounded(b_log, s_M.dtype)
    return gl.exp2(warpgroup_mma_wait(0, deps=[span_sums(b_high, rest(b_log, b_high), s_M.index(AFTER), BK, C)]))


@gluon.jit
def _store_halves(b_x, s_high, s_low):
    """x as an operand in two parts."""
    b_high = rounded(b_x, s_high.dtype)
    s_high.store(b_high)
    s_low.store(rest(b_x, b_high))


@gluon.jit
def _head_of(item, HALVES: gl.constexpr):
    """An item's chunk and value head, as chunk * HV + head."""
    if HALVES == 1:
        return item
    else:
        return item // HALVES


@gluon.jit
def _column_of(item, BK: gl.constexpr, HALVES: gl.constexpr):
    """The first of an item's channels."""
    if HALVES == 1:
        return 0
    else:
        return item % HALVES * BK


@gluon.jit
def _fetch(
    t_states, t_dstates, t_do, t_dv, t_v, t_o, t_y, t_q, t_k, t_keys, t_g,
    p_calm, p_sorted, p_counts, p_starts, p_ends, p_rho, p_norms,
    s_S, s_dS, s_values, s_channels, s_g, s_scalars, ready, free, num_chunks, ROWS, T, NC,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    BOUNDED: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """One warp that fetches the chunks of this program."""
    NV: gl.constexpr = (V + BV - 1) // BV
    LINE: gl.constexpr = fetch_layout()
    GATE_BYTES: gl.constexpr = t_g.dtype.primitive_bitwidth // 8
    b_token = gl.arange(0, C, LINE) * HV
    phase = 0
    first, end = turns(num_chunks, p_counts, T, NC, HV, C, WHICH, PLACES, HALVES)
    turn = first + gl.program_id(0)
    item, begin, num, rows = ask(
        turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
    )
    turn, item, begin, _ = settle(
        turn, item, begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
        HV, C, LEAST, MOST, WHICH, PLACES, HALVES, FETCH_WARPS,
    )  # fmt: skip
    while turn < end:
        place = _head_of(item, HALVES)
        column = _column_of(item, BK, HALVES)
        i_hv, row = place % HV, place // HV * C
        turn += gl.num_programs(0)
        next_item, next_begin, num, rows = ask(
            turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
        )
        bar = ready.index(VALUES)
        for v in gl.static_range(NV):
            mbarrier.wait(
                free.index(VALUES), phase ^ 1 if NV == 1 else v ^ 1
            )  # two parts: their phases are always the same
            mbarrier.expect(bar, DT_BYTES * BV * (STATES * BK + NUM_VALUES * C))
            fetch_state(t_states, place, v * BV, column, V, bar, s_S)
            fetch_tile(t_do, i_hv, begin, v * BV, V, bar, s_values.index(DO))
            fetch_tile(t_dv, i_hv, begin, v * BV, V, bar, s_values.index(DV))
            fetch_state(t_dstates, place, v * BV, column, V, bar, s_dS)
            fetch_tile(t_y, i_hv, row, v * BV, V, bar, s_values.index(Y))
            fetch_tile(t_y, i_hv, ROWS + row, v * BV, V, bar, s_values.index(Y_LOW))
            fetch_tile(t_v, i_hv, begin, v * BV, V, bar, s_values.index(V_GIVEN))
            fetch_tile(t_o, i_hv, begin, v * BV, V, bar, s_values.index(O))
            if v == 0:
                o_line = row.to(gl.int64) * HV + i_hv
                async_copy.async_copy_global_to_shared(s_scalars.index(phase * SCALARS + RHO), p_rho + o_line + b_token)
                for n in gl.static_range(NORMS):
                    async_copy.async_copy_global_to_shared(
                        s_scalars.index(phase * SCALARS + Q_INVERSE + n),
                        p_norms + ROWS.to(gl.int64) * (n * HV) + o_line + b_token,
                    )
            async_copy.mbarrier_arrive(bar, increment_count=False)
        bar = ready.index(CHANNELS)
        mbarrier.wait(free.index(CHANNELS), phase ^ 1)
        if BOUNDED:
            mbarrier.expect(bar, C * BK * (NUM_DECAYED * DT_BYTES + GATE_BYTES))
            fetch_tile(t_keys, i_hv, K_BACK * ROWS + row, column, K, bar, s_channels.index(SLOT_K_BACK))
            fetch_tile(t_keys, i_hv, K_FORWARD * ROWS + row, column, K, bar, s_channels.index(SLOT_K_FORWARD))
            fetch_tile(t_keys, i_hv, Q_FORWARD * ROWS + row, column, K, bar, s_channels.index(SLOT_Q_FORWARD))
            fetch_tile(t_keys, i_hv, FORWARD * ROWS + row, column, K, bar, s_channels.index(SLOT_FORWARD))
        else:
            i_h = i_hv // (HV // H)
            mbarrier.expect(bar, C * BK * (NUM_RAW * DT_BYTES + GATE_BYTES))
            fetch_tile(t_q, i_h, begin, column, K, bar, s_channels.index(QUERY))
            fetch_tile(t_k, i_h, begin, column, K, bar, s_channels.index(KEY))
        fetch_tile(t_g, i_hv, begin, column, K, bar, s_g)
        turn, item, begin, _ = settle(
            turn, next_item, next_begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
            HV, C, LEAST, MOST, WHICH, PLACES, HALVES, FETCH_WARPS,
        )  # fmt: skip
        phase ^= 1


@gluon.jit
def _bounded_channels(
    b_dq, b_drow, b_dk, b_through, b_rho, b_end, part, s_channels, s_squares, s_M,
    BK: gl.constexpr, C: gl.constexpr, CALM: gl.constexpr,
):  # fmt: skip
    """dq and dk, as rows and as columns, but for the diagonal pairs, the gates' gradient (begun), what reaches the end, q and k;
    from decayed tiles. b_dq, b_drow, b_dk are S do / part, - S dr, dS u. In a calm chunk k_back reaches to its end, Gamma = b_end.
    """
    P: gl.constexpr = product(BK, C)
    L: gl.constexpr = left_operand(BK, C)
    s_D, s_D_low = s_squares[D].index(0), s_squares[D_LOW].index(0)
    s_dA, s_dA_low = s_squares[DA].index(0), s_squares[DA_LOW].index(0)
    b_kb = s_channels.index(SLOT_K_BACK).permute((1, 0)).load(L)
    b_kf = s_channels.index(SLOT_K_FORWARD).permute((1, 0)).load(L)
    b_qf = s_channels.index(SLOT_Q_FORWARD).permute((1, 0)).load(L)
    b_key = as_float(gl.convert_layout(b_kb, P))
    if CALM:
        b_inverse_end = (1.0 / b_end)[:, None]
        b_key *= b_inverse_end
        b_dk *= b_end[:, None]
        b_through *= b_end
    b_key_rho = rounded(b_key * b_rho, s_M.dtype)
    b_row_D = times(b_key_rho, s_D.permute((1, 0)), BK, C)
    b_row_D = plus(b_row_D, b_key_rho, s_D_low.permute((1, 0)), BK, C)
    b_column = plus(times(b_kf, s_D, BK, C), b_kf, s_D_low, BK, C)
    b_qf_dA = times(b_qf, s_dA, BK, C)
    b_kb_dA = times(b_kb, s_dA.permute((1, 0)), BK, C)
    b_kb_low = times(b_kb, s_dA_low.permute((1, 0)), BK, C)
    b_through += gl.sum(b_key * b_dk, 1)
    b_row_D, b_column, b_qf_dA, b_kb_dA, b_kb_low = warpgroup_mma_wait(
        0, deps=[b_row_D, b_column, b_qf_dA, b_kb_dA, b_kb_low]
    )
    if CALM:
        b_kb_dA *= b_inverse_end
        b_kb_low *= b_inverse_end
    b_drow -= b_row_D
    b_dk += b_qf_dA
    b_dq = b_dq * part + b_kb_dA
    b_query = as_float(gl.convert_layout(b_qf, P))
    b_dlog = as_float(gl.convert_layout(b_kf, P)) * b_drow + as_float(b_key_rho) * b_column
    b_dlog = b_dlog - b_key * b_dk + b_query * b_dq
    b_dlog = _exact_sums(b_dlog, s_M.index(ONWARD), BK, C)
    b_dk -= b_rho * b_column
    b_dq += b_kb_low
    b_forward = as_float(s_channels.index(SLOT_FORWARD).permute((1, 0)).load(P))
    b_back = reciprocal(b_forward)
    return (
        b_dq * b_forward,
        b_drow * b_forward,
        b_dk * b_back,
        b_dlog,
        b_through,
        b_query * b_back,
        b_key * b_forward,
    )


@gluon.jit
def _next_room(C: gl.constexpr):
    """Room for a matrix of which :func:`_load_next` takes the elements beside the diagonal."""
    return gl.allocate_shared_memory(gl.float32, [C, C], gl.SwizzledSharedLayout(1, 1, C, [1, 0]))


@gluon.jit
def _load_next(s_x, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Elements (2m + 1, 2m) [1, C / 2] of a matrix whose element (i, j) lies in column i xor j: these are all in one."""
    s_x = s_x._reinterpret(gl.float32, [C // 2, 2 * C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return s_x.slice(C + 1, 1, 1).permute((1, 0)).load(LAYOUT)


@gluon.jit
def _apart(b_x):
    """Tokens 2m and tokens 2m + 1 [BK, C / 2] of a tile: a thread has both, so nothing moves."""
    return gl.split(gl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))


@gluon.jit
def _together(b_left, b_right, BK: gl.constexpr, C: gl.constexpr):
    """The tile of which these are the tokens 2m and 2m + 1."""
    return gl.convert_layout(gl.reshape(gl.join(b_left, b_right), [BK, C]), product(BK, C))


@gluon.jit
def _neighbours(
    b_dq, b_drow, b_dk, b_dlog, b_q, b_k, b_erase, b_log, s_next, BK: gl.constexpr, C: gl.constexpr, ERASE: gl.constexpr
):  # fmt: skip
    """The gradients with what the pairs across the first border add: each token has one partner, and the left one no decay."""
    b_left, b_right = _apart(b_k.to(gl.float32))
    _, b_query = _apart(b_q.to(gl.float32))
    _, b_decay = _apart(gl.exp2(b_log))
    H: gl.constexpr = b_left.type.layout
    b_N = _load_next(s_next[NEXT_N], C, H)
    b_dA = _load_next(s_next[NEXT_DA], C, H)
    if ERASE:
        _, b_rate = _apart(b_erase)
        b_right *= b_rate
    b_column = (b_query * b_dA - b_right * b_N) * b_decay
    b_row = b_left * b_decay
    b_pair = b_left * b_column
    b_dlog_left, b_dlog_right = _apart(b_dlog)
    b_dlog = _together(b_dlog_left - b_pair, b_dlog_right + b_pair, BK, C)
    b_dq_left, b_dq_right = _apart(b_dq)
    b_dq = _together(b_dq_left, b_dq_right + b_row * b_dA, BK, C)
    b_dk_left, b_dk_right = _apart(b_dk)
    if ERASE:
        b_drow_left, b_drow_right = _apart(b_drow)
        b_drow = _together(b_drow_left, b_drow_right - b_row * b_N, BK, C)
    else:
        b_dk_right -= b_row * b_N
    return b_dq, b_drow, _together(b_dk_left + b_column, b_dk_right, BK, C), b_dlog


@gluon.jit
def _unbounded_channels(
    b_dq, b_drow, b_dk, b_through, b_q, b_k, b_erase, b_log, b_last, s_squares, s_next, s_M,
    levels,
    BK: gl.constexpr, C: gl.constexpr, LEVELS: gl.constexpr, ERASE: gl.constexpr,
):  # fmt: skip
    """The same from q and k as used (rounded, signs included) and the logs, border by border: `_unbounded_gradients`; and the logs
    as operands.

    Without ERASE keys as rows and as columns are one: all of dk is in b_dk, to spare registers. `levels` is LEVELS as a
    number of the run time: a constant would let the compiler unroll the loop, and what then does not fit the registers spills.
    """
    b_token = gl.arange(0, C, gl.SliceLayout(0, product(BK, C)))[None, :]
    b_high = rounded(b_log, s_M.dtype)
    b_low = rest(b_log, b_high)
    b_gamma = span_sums(b_high, b_low, s_M.index(THROUGH), BK, C)
    b_to_end = span_sums(b_high, b_low, s_M.index(AFTER), BK, C)
    b_gamma, b_to_end = warpgroup_mma_wait(0, deps=[b_gamma, b_to_end])
    b_gamma = gl.exp2(b_gamma)
    b_dq *= b_gamma
    b_drow *= b_gamma
    b_dk *= gl.exp2(b_to_end) * b_last[:, None]
    b_dlog = b_q.to(gl.float32) * b_dq + b_k.to(gl.float32) * (b_erase * b_drow - b_dk)
    b_through *= gl.sum(gl.where(b_token == C - 1, b_gamma, 0.0), 1) * b_last
    b_through += gl.sum(b_k.to(gl.float32) * b_dk, 1)
    if not ERASE:
        b_dk += b_drow
    b_dq, b_drow, b_dk, b_dlog = _neighbours(b_dq, b_drow, b_dk, b_dlog, b_q, b_k, b_erase, b_log, s_next, BK, C, ERASE)
    b_sums = span_sums(b_high, b_low, s_M.index(BORDERS), BK, C)
    for n in range(levels):
        b_decay = gl.exp2(warpgroup_mma_wait(0, deps=[b_sums]))
        b_query = rounded(b_q.to(gl.float32) * b_decay, s_M.dtype)
        m_right = (b_token >> (n + FIRST)) % 2 == 1
        b_key = rounded(b_k.to(gl.float32) * gl.where(m_right, b_erase, 1.0) * b_decay, s_M.dtype)
        # right of a border a key is a row of N, left of it a column, and what queries add is zero on the right: one sum for both
        s_N, s_N_low = s_squares[N].index(n), s_squares[N_LOW].index(n)
        s_dA, s_dA_low = s_squares[DA].index(n), s_squares[DA_LOW].index(n)
        b_column = plus(times(b_key, s_N, BK, C), b_key, s_N_low, BK, C)
        b_column = plus(plus(b_column, b_query, s_dA, BK, C), b_query, s_dA_low, BK, C)
        b_row = times(b_key, s_dA.permute((1, 0)), BK, C)
        b_row = plus(b_row, b_key, s_dA_low.permute((1, 0)), BK, C)
        b_sums = span_sums(b_high, b_low, s_M.index(BORDERS + gl.minimum(n + 1, LEVELS - FIRST - 1)), BK, C)
        b_row, b_column = warpgroup_mma_wait(2, deps=[b_row, b_column])
        b_dq += b_decay * b_row
        b_dlog += as_float(b_query) * b_row
        b_dlog -= as_float(b_key) * b_column
        if ERASE:
            b_drow -= gl.where(m_right, b_decay, 0.0) * b_column
            b_dk += gl.where(m_right, 0.0, b_decay) * b_column
        else:
            b_dk += gl.where(m_right, -b_decay, b_decay) * b_column
    b_sums = warpgroup_mma_wait(0, deps=[b_sums])
    return b_dq, b_drow, b_dk, b_dlog, b_through, b_high, b_low


@gluon.jit
def _store_squares(
    b_D, b_dA, b_rho, s_squares, s_next, Q: gl.constexpr, C: gl.constexpr, LEVELS: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    """D and dA as operands in two parts; where not BOUNDED N^T - N, N = D rho, and dA, of each border's pairs, and N and dA as they
    are for the first border. With these signs the gates' gradient takes what keys give by N and what queries give by dA alike.
    """
    b_row = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_column = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    if BOUNDED:
        _store_halves(b_D, s_squares[D].index(0), s_squares[D_LOW].index(0))
        _store_halves(b_dA, s_squares[DA].index(0), s_squares[DA_LOW].index(0))
    else:
        b_N = b_D * b_rho
        s_next[NEXT_N].store(b_N)
        s_next[NEXT_DA].store(b_dA)
        b_N = gl.convert_layout(gl.permute(b_N, (1, 0)), Q) - b_N
        for shift in gl.static_range(FIRST, LEVELS):
            m_pairs = across_border(b_row, b_column, shift)
            m_both = m_pairs | across_border(b_column, b_row, shift)
            _store_halves(
                gl.where(m_both, b_N, 0.0), s_squares[N].index(shift - FIRST), s_squares[N_LOW].index(shift - FIRST)
            )
            _store_halves(
                gl.where(m_pairs, b_dA, 0.0), s_squares[DA].index(shift - FIRST), s_squares[DA_LOW].index(shift - FIRST)
            )


@gluon.jit
def _send_gradients(t_dq, t_dk, t_dg, s_out, head, row, column, K: gl.constexpr):
    """A chunk's gradients on their way."""
    send_tile(t_dq, head, row, column, K, s_out[DQ].index(0))
    send_tile(t_dk, head, row, column, K, s_out[DK].index(0))
    if t_dg is not None:
        send_tile(t_dg, head, row, column, K, s_out[DG].index(0))


@gluon.jit
def _store_part(p_x, s_x, num, column, HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr):
    """The first `num` tokens of a tile, without the accelerator, which would write over the next sequence."""
    R: gl.constexpr = by_rows(BK, BK)
    b_row = gl.arange(0, C, gl.SliceLayout(1, R))[:, None]
    b_channel = gl.arange(0, BK, gl.SliceLayout(0, R))[None, :]
    gl.store(p_x + b_row * (HV * K) + b_channel, s_x.load(R), mask=(b_row < num) & (b_channel + column < K))


@gluon.jit
def _pair_sums(s_values, b_D, b_dA, Q: gl.constexpr):
    """D and dA [C, C] and what these values add to them."""
    left: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, Q, 2)
    b_y = s_values.index(Y).permute((1, 0)).load(right)
    b_y_low = s_values.index(Y_LOW).permute((1, 0)).load(right)
    b_dv, b_do = s_values.index(DV).load(left), s_values.index(DO).load(left)
    b_D = mma_v2(b_dv, b_y_low, mma_v2(b_dv, b_y, b_D))
    return b_D, mma_v2(b_do, b_y_low, mma_v2(b_do, b_y, b_dA))


@gluon.jit
def _token_sums(s_values, R: gl.constexpr):
    """do . y, dv . y, dv . v and do . o [C]."""
    b_do = as_float(s_values.index(DO).load(R))
    b_dv = as_float(s_values.index(DV).load(R))
    b_y = as_float(s_values.index(Y).load(R)) + as_float(s_values.index(Y_LOW).load(R))
    b_diagonal = gl.sum(b_do * b_y, 1)
    b_y_dv = gl.sum(b_dv * b_y, 1)
    b_v_dv = gl.sum(b_dv * as_float(s_values.index(V_GIVEN).load(R)), 1)
    return b_diagonal, b_y_dv, b_v_dv, gl.sum(b_do * as_float(s_values.index(O).load(R)), 1)


@gluon.jit
def _earlier_values(
    s_S, s_dS, s_values, ready, free, num, by_channel: gl.constexpr, R: gl.constexpr, Q: gl.constexpr,
    BK: gl.constexpr, C: gl.constexpr, LOW: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """What the first part of the values contracts, where there are two: sums that the second part is added to."""
    L: gl.constexpr = left_operand(BK, C)
    mbarrier.wait(ready.index(VALUES), 0)
    clear_behind(s_values, DO, O + 1, num, R, PLACES)
    b_S, b_dS = s_S.permute((1, 0)).load(L), s_dS.permute((1, 0)).load(L)
    b_dq = times(b_S, s_values.index(DO).permute((1, 0)), BK, C)
    b_drow = times(b_S, s_values.index(DV).permute((1, 0)), BK, C)
    b_dk = times(b_dS, s_values.index(Y).permute((1, 0)), BK, C)
    if LOW:
        b_dk = plus(b_dk, b_dS, s_values.index(Y_LOW).permute((1, 0)), BK, C)
    b_through = gl.convert_layout(gl.sum(as_float(b_S) * as_float(b_dS), 1), by_channel)
    b_zero = gl.zeros([C, C], gl.float32, Q)
    b_D, b_dA = _pair_sums(s_values, b_zero, b_zero, Q)
    b_diagonal, b_y_dv, b_v_dv, b_q_dq = _token_sums(s_values, R)
    b_dq, b_drow, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_drow, b_dk])
    gl.thread_barrier()  # the values are used up
    mbarrier.arrive(free.index(VALUES), count=USED_ARRIVE)
    return b_dq, b_drow, b_dk, b_through, b_D, b_dA, b_diagonal, b_y_dv, b_v_dv, b_q_dq


@gluon.jit
def _run(
    p_beta, p_sign, p_erase, p_A_log, p_dt_bias, p_A, p_G, p_end, p_calm, p_sorted, p_counts, p_starts, p_ends,
    t_dq, t_dk, t_dg, p_dq, p_dk, p_dg, p_dbeta, p_derase, p_dlog_rate, p_dbias,
    s_S, s_dS, s_values, s_channels, s_g, s_scalars, s_out, s_squares, s_next, s_M, s_sums, ready, free, num_chunks, T, NC, scale,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    GATE: gl.constexpr, SIGNED: gl.constexpr, ERASE: gl.constexpr,
    HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr, NORMALIZE: gl.constexpr, BETA_RANGE: gl.constexpr,
    LEVELS: gl.constexpr, BOUNDED: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    NV: gl.constexpr = (V + BV - 1) // BV
    CALM: gl.constexpr = LEAST > 0
    SCALED: gl.constexpr = BOUNDED and not CALM
    PART: gl.constexpr = _part(SCALED)
    FULL: gl.constexpr = PLACES == "whole" or WHICH == "full"
    WARPS: gl.constexpr = warps_of(BK)
    ENDS: gl.constexpr = "whole" if FULL else PLACES
    DT: gl.constexpr = s_S.dtype
    P: gl.constexpr = product(BK, C)
    L: gl.constexpr = left_operand(BK, C)
    Q: gl.constexpr = by_pairs(BK)
    R: gl.constexpr = by_rows(BK, BV)
    by_token: gl.constexpr = gl.SliceLayout(0, P)
    by_channel: gl.constexpr = gl.SliceLayout(1, P)
    by_row: gl.constexpr = gl.SliceLayout(1, R)
    b_from = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_to = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    if BOUNDED:
        s_M.index(ONWARD).store(gl.where(b_from >= b_to, 1.0, 0.0).to(DT))
    else:
        store_spans(s_M, b_from, b_to, LEVELS, FIRST, False)
    b_channel = gl.arange(0, BK, by_channel)
    b_token = gl.arange(0, C, by_token)[None, :]
    phase = 0
    first, end = turns(num_chunks, p_counts, T, NC, HV, C, WHICH, PLACES, HALVES)
    turn = first + gl.program_id(0)
    item, begin, num, rows = ask(
        turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
    )
    turn, item, begin, num = settle(
        turn, item, begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
        HV, C, LEAST, MOST, WHICH, PLACES, HALVES, WARPS,
    )  # fmt: skip
    while turn < end:
        place = _head_of(item, HALVES)
        column = _column_of(item, BK, HALVES)
        chunk, i_hv = place // HV, place % HV
        b_row = gl.arange(0, C, by_row)
        o_line = (begin + b_row).to(gl.int64) * HV + i_hv
        if BETA_RANGE > 0:
            b_beta = gl.load(p_beta + o_line, mask=b_row < num, other=0.0).to(gl.float32)
        b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, column, K, BK, C, HAS_A_LOG, HAS_DT_BIAS)
        b_end = None
        if CALM:  # from the memory of the card, long before it is used
            b_end = gl.load(p_end + gl.cast(item, gl.int64) * BK + b_channel)
        LOW: gl.constexpr = gl.float16 == DT or GATE == "none"  # whose gradients have the digits for it
        if NV == 2:
            (
                b_dq_before, b_drow_before, b_dk_before, b_through_before, b_D_before, b_dA_before,
                b_diagonal_before, b_y_dv_before, b_v_dv_before, b_q_dq_before,
            ) = _earlier_values(s_S, s_dS, s_values, ready, free, num, by_channel, R, Q, BK, C, LOW, ENDS)  # fmt: skip
        mbarrier.wait(ready.index(VALUES), phase if NV == 1 else 1)
        clear_behind(s_values, DO, O + 1, num, R, ENDS)  # do, dv, v and o

        # what the values contract
        b_S = s_S.permute((1, 0)).load(L)
        if NV == 1:
            b_dq = times(b_S, s_values.index(DO).permute((1, 0)), BK, C)
            b_drow = times(b_S, s_values.index(DV).permute((1, 0)), BK, C)
        else:
            b_dq = plus(b_dq_before, b_S, s_values.index(DO).permute((1, 0)), BK, C)
            b_drow = plus(b_drow_before, b_S, s_values.index(DV).permute((1, 0)), BK, C)
        b_dS = s_dS.permute((1, 0)).load(L)
        if NV == 1:
            b_dk = times(b_dS, s_values.index(Y).permute((1, 0)), BK, C)
        else:
            b_dk = plus(b_dk_before, b_dS, s_values.index(Y).permute((1, 0)), BK, C)
        if LOW:
            b_dk = plus(b_dk, b_dS, s_values.index(Y_LOW).permute((1, 0)), BK, C)
        b_through = gl.convert_layout(gl.sum(as_float(b_S) * as_float(b_dS), 1), by_channel)
        if NV == 2:
            b_through += b_through_before

        # the products of tokens with tokens
        b_zero = gl.zeros([C, C], gl.float32, Q)
        if NV == 1:
            b_D, b_dA = _pair_sums(s_values, b_zero, b_zero, Q)
        else:
            b_D, b_dA = _pair_sums(s_values, b_D_before, b_dA_before, Q)
        b_rho = s_scalars.index(phase * SCALARS + RHO).load(gl.SliceLayout(0, Q))[None, :]
        b_length = gl.sqrt(s_scalars.index(phase * SCALARS + NORM2).load(gl.SliceLayout(1, Q)))
        m_lower = b_from > b_to
        b_D = gl.where(m_lower, b_D * reciprocal(b_length)[:, None], 0.0)
        b_dA_rho = gl.where(m_lower, b_dA * b_rho, 0.0)
        if BETA_RANGE == 0 and not ERASE:  # du . y but for the state's part, less what G has of it
            o_A = ((chunk * C + b_from).to(gl.int64) * HV + i_hv) * C + b_to
            b_du_y = gl.load(p_A + o_A).to(gl.float32) * b_dA - gl.load(p_G + o_A) * b_D
            s_sums[DU_Y].store(gl.sum(b_du_y, 0))
        unit, inverse = 1.0, 1.0  # what else comes out small is found in units of the largest of D and dA
        if SCALED:
            b_each = gl.convert_layout(gl.maximum(gl.abs(b_D), gl.abs(b_dA_rho)), by_warps(C, BK))
            unit, inverse = power_of(gl.max(gl.max(b_each, 1), 0))
            b_D, b_dA_rho = b_D * inverse, b_dA_rho * inverse
        part = inverse * PART
        _store_squares(b_D, b_dA_rho, b_rho, s_squares, s_next, Q, C, LEVELS, BOUNDED)

        # of tokens with themselves
        b_diagonal, b_y_dv, b_v_dv, b_q_dq = _token_sums(s_values, R)
        if NV == 2:
            b_diagonal, b_y_dv = b_diagonal + b_diagonal_before, b_y_dv + b_y_dv_before
            b_v_dv, b_q_dq = b_v_dv + b_v_dv_before, b_q_dq + b_q_dq_before
        b_norm2 = s_scalars.index(phase * SCALARS + NORM2).load(by_row)
        b_inverse_length = reciprocal(gl.sqrt(b_norm2))
        b_y_dv *= b_inverse_length
        s_sums[DIAGONAL].store(b_diagonal * inverse * s_scalars.index(phase * SCALARS + RHO).load(by_row))
        s_sums[ROW].store(b_inverse_length * -part)
        s_sums[K_DK].store((2.0 * b_y_dv - b_v_dv) * inverse / b_norm2)
        if NORMALIZE:
            unscale = gl.where(scale == 0, 0.0, 1.0 / scale)
            s_sums[Q_DQ].store(b_q_dq * (inverse * unscale * unscale))
            s_sums[Q_OUT].store(s_scalars.index(phase * SCALARS + Q_INVERSE).load(by_row) * (scale * unit))
            s_sums[K_OUT].store(s_scalars.index(phase * SCALARS + K_POWER).load(by_row) * unit)
        if BETA_RANGE > 0:
            b_dbeta = b_y_dv * learning_rate(-b_beta, 1)
            m_beta = b_row < num
            if HALVES > 1:  # both halves have it
                m_beta = m_beta & (column == 0)
            gl.store(p_dbeta + o_line, b_dbeta.to(p_dbeta.dtype.element_ty), mask=m_beta)
        fence_async_shared()
        b_dq, b_drow, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_drow, b_dk])
        tma.store_wait(0)  # just before a barrier: else the compiler sets one of its own
        gl.thread_barrier()  # what was written is there, the values are used up, the last chunk's gradients have left
        mbarrier.arrive(free.index(VALUES), count=USED_ARRIVE)
        b_rho = s_scalars.index(phase * SCALARS + RHO).load(by_token)[None, :]
        b_drow *= s_sums[ROW].load(by_token)[None, :]

        # along the channels
        mbarrier.wait(ready.index(CHANNELS), phase)
        if BOUNDED:
            if BETA_RANGE == 0 and not ERASE:
                b_reach = gl.sum(s_channels.index(SLOT_K_BACK).permute((1, 0)).load(P).to(gl.float32) * b_dk, 0) * PART
            b_through *= PART * part
            b_dq, b_drow, b_dk, b_dlog, b_through, b_q, b_k = _bounded_channels(
                b_dq,
                b_drow,
                b_dk * (b_rho * part),
                b_through,
                b_rho,
                b_end,
                part,
                s_channels,
                s_squares,
                s_M,
                BK,
                C,
                CALM,
            )
        else:
            b_inverse, b_power = (
                s_scalars.index(phase * SCALARS + Q_INVERSE).load(by_token),
                s_scalars.index(phase * SCALARS + K_POWER).load(by_token),
            )
            b_q = as_float(s_channels.index(QUERY).permute((1, 0)).load(P)) * (b_inverse * scale)[None, :]
            b_k = as_float(s_channels.index(KEY).permute((1, 0)).load(P)) * b_power[None, :]
            b_g = finite_gate(as_float(s_g.permute((1, 0)).load(P)), GATE)
            b_log, b_negative = log_gate(b_g, b_rate, b_bias, GATE, False)
            b_log = held_log(b_log, DT)
            if not FULL:
                b_q, b_k = gl.where(b_token < num, b_q, 0.0), gl.where(b_token < num, b_k, 0.0)
                b_log = gl.where(b_token < num, b_log, 0.0)
                b_negative = b_negative & (b_token < num)
            b_last = gl.full([BK], 1.0, gl.float32, by_channel)
            if SIGNED == "given":
                b_negative = channel_tile(p_sign, begin, num, i_hv, column, 1, K, BK, C, HV, ENDS) < 0
            if SIGNED != "no":
                b_count = times(gl.where(b_negative, 1.0, 0.0).to(DT), s_M.index(THROUGH), BK, C)
                b_count = warpgroup_mma_wait(0, deps=[b_count])
                b_sign = gl.where(b_count.to(gl.int32) % 2 == 1, -1.0, 1.0)
                b_q, b_k = b_q * b_sign, b_k * b_sign
                b_last = gl.sum(gl.where(b_token == C - 1, b_sign, 0.0), 1)
                b_sign = rounded(b_sign, DT)  # two a register until they are used again
            b_q, b_k = rounded(b_q, DT), rounded(b_k, DT)  # as they were used
            if BETA_RANGE == 0 and not ERASE:
                b_reach = gl.sum(b_k.to(gl.float32) * _to_end(b_log, s_M, BK, C) * b_last[:, None] * b_dk, 0)
            b_erase = gl.full([1, 1], 1.0, gl.float32, P)
            if ERASE:
                b_erase = channel_tile(p_erase, begin, num, i_hv, column, 0.0, K, BK, C, HV, ENDS).to(gl.float32)
            b_dq, b_drow, b_dk, b_dlog, b_through, b_high, b_low = _unbounded_channels(
                b_dq,
                b_drow,
                b_dk * b_rho,
                b_through,
                b_q,
                b_k,
                b_erase,
                b_log,
                b_last,
                s_squares,
                s_next,
                s_M,
                gl.minimum(LEVELS - FIRST, num_chunks + LEVELS),
                BK,
                C,
                LEVELS,
                ERASE,
            )
            b_own = b_dlog
            b_dlog = _exact_sums(b_own, s_M.index(AFTER), BK, C)  # of what comes after each token
            b_q, b_k = b_q.to(gl.float32), b_k.to(gl.float32)
        if ERASE:
            if BOUNDED:
                b_erase = channel_tile(p_erase, begin, num, i_hv, column, 0.0, K, BK, C, HV, ENDS).to(gl.float32)
            o_erase = (gl.cast(begin, gl.int64) * HV + i_hv) * K + column
            p_tile = p_derase + o_erase + (b_token * (HV * K) + b_channel[:, None])
            m_erase = (b_token < num) & (b_channel[:, None] < K)
            gl.store(p_tile, (b_k * b_drow * unit).to(p_derase.dtype.element_ty), mask=m_erase)
            b_dk += b_erase * b_drow
        elif BOUNDED:
            b_dk += b_drow
        b_diagonal = s_sums[DIAGONAL].load(by_token)[None, :]
        b_dq += b_diagonal * b_k
        b_dk += b_diagonal * b_q
        if NORMALIZE:
            b_dq -= b_q * s_sums[Q_DQ].load(by_token)[None, :]
            b_dq *= s_sums[Q_OUT].load(by_token)[None, :]
            b_dk -= b_k * s_sums[K_DK].load(by_token)[None, :]
            b_dk *= s_sums[K_OUT].load(by_token)[None, :]
        else:
            b_dq, b_dk = b_dq * (scale * unit), b_dk * unit
        if SIGNED != "no" and not BOUNDED:
            b_dq, b_dk = b_dq * as_float(b_sign), b_dk * as_float(b_sign)
        s_out[DQ].index(0).permute((1, 0)).store(rounded(b_dq, DT))
        s_out[DK].index(0).permute((1, 0)).store(rounded(b_dk, DT))

        turn += gl.num_programs(0)
        next_item, next_begin, next_num, next_rows = ask(
            turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
        )

        # the gate, read once more: it would take registers all the while
        b_g = finite_gate(as_float(s_g.permute((1, 0)).load(P)), GATE)
        b_dlog = warpgroup_mma_wait(0, deps=[b_dlog]) * unit + (b_through * unit)[:, None]
        if not BOUNDED:
            b_dlog += b_own
        b_dg, b_dlog_rate = gate_gradient(b_dlog, b_g, b_rate, b_bias, GATE)
        if GATE == "softplus" and not BOUNDED:  # the log is a multiple of the rate, and still there to 2^-17 of itself
            b_dlog_rate = b_dlog * ((as_float(b_high) + as_float(b_low)) * (1.0 / LOG2E))
        if not FULL:
            b_dg = gl.where(b_token < num, b_dg, 0.0)
            b_dlog_rate = gl.where(b_token < num, b_dlog_rate, 0.0)
        if t_dg is not None:
            s_out[DG].index(0).permute((1, 0)).store(rounded(b_dg, DT))
        else:
            o_key = ((begin + b_token).to(gl.int64) * HV + i_hv) * K + b_channel[:, None]
            if HALVES > 1:
                o_key += column
            if FULL and K == BK:
                gl.store(p_dg + o_key, b_dg)
            else:
                gl.store(p_dg + o_key, b_dg, mask=(b_token < num) & (b_channel[:, None] < K))
        if HAS_A_LOG:
            gl.store(p_dlog_rate + gl.cast(item, gl.int64) * BK + b_channel, gl.sum(b_dlog_rate, 1))
        if HAS_DT_BIAS:
            gl.store(p_dbias + gl.cast(item, gl.int64) * BK + b_channel, gl.sum(b_dg, 1))
        if BETA_RANGE == 0 and not ERASE:  # a given beta may be zero: the longer way then
            s_sums[REACH].store(b_reach)
            gl.thread_barrier()
            b_rate_used = s_scalars.index(phase * SCALARS + RHO).load(by_row)
            m_some = gl.abs(b_rate_used) > 1e-12
            b_longer = s_sums[DU_Y].load(by_row) + s_sums[REACH].load(by_row)
            b_dbeta = gl.where(m_some, b_y_dv / gl.where(m_some, b_rate_used, 1.0), b_longer) / b_norm2
            gl.store(p_dbeta + o_line, b_dbeta.to(p_dbeta.dtype.element_ty), mask=b_row < num)
        fence_async_shared()
        gl.thread_barrier()  # the gradients are written, the channels used up
        mbarrier.arrive(free.index(CHANNELS), count=USED_ARRIVE)
        if FULL:
            _send_gradients(t_dq, t_dk, t_dg, s_out, i_hv, begin, column, K)
        else:
            if num >= C:
                _send_gradients(t_dq, t_dk, t_dg, s_out, i_hv, begin, column, K)
            else:
                o_head = (gl.cast(begin, gl.int64) * HV + i_hv) * K + column
                _store_part(p_dq + o_head, s_out[DQ].index(0), num, column, HV, K, BK, C)
                _store_part(p_dk + o_head, s_out[DK].index(0), num, column, HV, K, BK, C)
                if t_dg is not None:
                    _store_part(p_dg + o_head, s_out[DG].index(0), num, column, HV, K, BK, C)
        turn, item, begin, num = settle(
            turn, next_item, next_begin, next_num, next_rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
            HV, C, LEAST, MOST, WHICH, PLACES, HALVES, WARPS,
        )  # fmt: skip
        phase ^= 1
    if p_counts is not None and WHICH != "full":  # chunks that nobody needs have parts of the sums too
        unused = end + gl.program_id(0)
        while unused < num_chunks * (HV * HALVES):
            o_channel = gl.cast(unused, gl.int64) * BK + b_channel
            if HAS_A_LOG:
                gl.store(p_dlog_rate + o_channel, gl.zeros([BK], gl.float32, by_channel))
            if HAS_DT_BIAS:
                gl.store(p_dbias + o_channel, gl.zeros([BK], gl.float32, by_channel))
            unused += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def hopper_gradient_kernel(
    t_states,  # tiles [BV, BK] of [num_chunks * HV * V, K]
    t_dstates,
    t_do,  # tiles [C, BV] of [B * T, HV * V]
    t_dv,
    t_v,
    t_o,
    t_y,  # tiles [C, BV] of [2 * ROWS, HV * V]: y and what its rounding left
    t_q,  # tiles [C, BK] of [B * T, H * K], where not BOUNDED
    t_k,
    t_keys,  # tiles [C, BK] of [4 * ROWS, HV * K]: q_forward, k_forward, k_back, forward; where BOUNDED
    t_g,  # tiles [C, BK] of [B * T, HV * K]
    p_A,  # [ROWS, HV, C], where beta is given
    p_G,  # float32 [ROWS, HV, C], where beta is given
    p_rho,  # [ROWS, HV]
    p_norms,  # [3, ROWS, HV]
    p_end,  # [num_chunks, HV, HALVES * BK], of calm chunks
    p_calm,  # int32 [num_chunks, HV] how many rows of a chunk are calm; where all chunks are alike, not read
    p_sorted,  # [num_chunks] the chunks where PLACES is "packed": full ones first, those that nobody needs last
    p_counts,  # [2] how many of them are full, and how many are needed
    p_starts,  # [num_chunks] of the chunks in this order
    p_ends,
    p_beta,  # [B * T, HV]
    p_sign,  # int8 [B * T, HV, K], where signs are given
    p_erase,  # [B * T, HV, K], where ERASE
    p_A_log,
    p_dt_bias,
    t_dq,  # out, tiles [C, BK] of [B * T, HV * K]
    t_dk,
    t_dg,  # None where g is float32
    p_dq,  # out [B * T, HV, K], for chunks of fewer tokens
    p_dk,
    p_dg,
    p_dbeta,  # out [B * T, HV], where not ERASE
    p_derase,  # out [B * T, HV, K], where ERASE
    p_dlog_rate,  # out float32 [num_chunks, HV, HALVES * BK], where HAS_A_LOG
    p_dbias,  # out float32 [num_chunks, HV, HALVES * BK], where HAS_DT_BIAS
    num_chunks,
    ROWS,  # the tokens of all chunks, were they whole
    T,
    NC,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATE: gl.constexpr,
    SIGNED: gl.constexpr,  # "given", "gate" or "no"
    ERASE: gl.constexpr,
    HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    NORMALIZE: gl.constexpr,
    BETA_RANGE: gl.constexpr,
    LEVELS: gl.constexpr,  # log2 of C
    BOUNDED: gl.constexpr,  # whether it works from decayed tiles
    LEAST: gl.constexpr,  # calm rows of the chunks that are this launch's; above zero: their tiles reach to the chunk's end
    MOST: gl.constexpr,  # and how many at most; C: all
    WHICH: gl.constexpr,  # of these the "full" ones, the "broken" ones or "any"
    PLACES: gl.constexpr,  # "whole", "ragged" (T is no multiple of C) or "packed"
    HALVES: gl.constexpr,  # of K, each of BK channels; more than one not where beta is given
):
    """All gradients but dv, chunk by chunk."""
    ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(VALUES), count=LINES_ARRIVE)
    mbarrier.init(ready.index(CHANNELS), count=TILES_ARRIVE)
    mbarrier.init(free.index(VALUES), count=USED_ARRIVE)
    mbarrier.init(free.index(CHANNELS), count=USED_ARRIVE)
    fence_async_shared()
    s_scalars, s_sums = lines(CHUNKS * SCALARS, C), lines_apart(SUMS, C)
    DT: gl.constexpr = t_states.dtype
    s_S, s_dS = room_for_one(BV, BK, DT), room_for_one(BV, BK, DT)
    s_values, s_channels = room(NUM_VALUES, C, BV, DT), room(NUM_DECAYED if BOUNDED else NUM_RAW, C, BK, DT)
    s_g, s_out = room_for_one(C, BK, t_g.dtype), rooms(OUTPUTS - 1 if t_dg is None else OUTPUTS, 1, C, BK, DT)
    s_squares, s_next = rooms(NUM_SQUARES, 1 if BOUNDED else LEVELS - FIRST, C, C, DT), None
    if not BOUNDED:
        s_next = (_next_room(C), _next_room(C))
    s_M = room(1 if BOUNDED else BORDERS + LEVELS - FIRST, C, C, DT)
    gl.warp_specialize(
        [
            (
                _run,
                (
                    p_beta, p_sign, p_erase, p_A_log, p_dt_bias, p_A, p_G, p_end, p_calm, p_sorted, p_counts, p_starts, p_ends,
                    t_dq, t_dk, t_dg, p_dq, p_dk, p_dg, p_dbeta, p_derase, p_dlog_rate, p_dbias,
                    s_S, s_dS, s_values, s_channels, s_g, s_scalars, s_out, s_squares, s_next, s_M, s_sums, ready, free,
                    num_chunks, T, NC, scale,
                    HV, K, V, BK, BV, C, GATE, SIGNED, ERASE,
                    HAS_A_LOG, HAS_DT_BIAS, NORMALIZE, BETA_RANGE, LEVELS, BOUNDED, LEAST, MOST, WHICH,
                    PLACES, HALVES,
                ),
            ),
            (
                _fetch,
                (
                    t_states, t_dstates, t_do, t_dv, t_v, t_o, t_y, t_q, t_k, t_keys, t_g,
                    p_calm, p_sorted, p_counts, p_starts, p_ends, p_rho, p_norms,
                    s_S, s_dS, s_values, s_channels, s_g, s_scalars, ready, free,
                    num_chunks, ROWS, T, NC, H, HV, K, V, BK, BV, C, BOUNDED, LEAST, MOST, WHICH, PLACES, HALVES,
                ),
            ),
        ],
        [FETCH_WARPS],
        [FETCH_REGISTERS],
    )  # fmt: skip
