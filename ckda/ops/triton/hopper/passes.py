"""The two passes over the chunks for Hopper, in Triton's lower-level dialect (Gluon): the sums of `state_kernel` and
`reverse_kernel`, for bfloat16 and float16.

Few programs run at a time here, each a long chain of small products, so what counts is how long one chunk takes. One warp fetches
the tiles of the next chunks by the tensor memory accelerator, four warps compute, and results leave by the accelerator too. A
product is begun as soon as its operands are there; its result is awaited only where it is read, and the next product is
begun before. Between products everything stays in registers: shared memory holds what comes and what leaves. Tiles are
transposed, [values, channels] or [values, tokens]: 64 value columns are the height of the matrix instruction.

Heads of 256 channels (HALVES = 2): eight warps compute, four for each half of the state's channels. Columns of the state never
meet, rows do, in two sums over channels a chunk: k_forward S and q_forward S (backwards k_back dS). Each half adds its part of
them and hands it to the other by shared memory (`_with_other_half`); after that both compute y and u, which are the same bits, and
each its own channels. The first half writes o (dv), the second y.

Names as in ckda/ops/triton/tile.py, pieces in hopper/tile.py; t_ is a tensor of which tiles are taken, s_ a tile in shared
memory, [STAGES, ...] those of the next chunks too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ckda.ops.triton.hopper import BV as VALUE_COLUMNS
from ckda.ops.triton.hopper import FLOAT16_UNIT, WARP_ROWS
from ckda.ops.triton.hopper.tile import (
    A_LOW,
    DT_BYTES,
    FETCH_REGISTERS,
    FETCH_WARPS,
    K_BACK,
    K_FORWARD,
    LINES_ARRIVE,
    Q_FORWARD,
    SOLVER,
    SOLVER_LOW,
    SOLVER_REST,
    USED_ARRIVE,
    A,
    as_float,
    barriers,
    fetch_layout,
    fetch_tile,
    left_operand,
    lines,
    plus,
    product,
    rest,
    room,
    room_for_one,
    rounded,
    send_state,
    send_tile,
    times,
)
from ckda.ops.triton.tile import STATE_UNIT

__all__ = ["hopper_reverse_kernel", "hopper_state_kernel"]

BV = gl.constexpr(VALUE_COLUMNS)
SOLVER_UNIT = gl.constexpr(FLOAT16_UNIT)
# lines of a chunk that are fetched beside its tiles: of its tokens, of its channels
RHO, NORM2, SCALARS = (gl.constexpr(i) for i in range(3))
DECAY, NEXT, DECAYS = (gl.constexpr(i) for i in range(3))
# of a sum over channels that the other half has a part of: turns, and within one the halves' parts
TURNS, HALVES_TOLD = gl.constexpr(2), gl.constexpr(2)
HALF_WARPS = gl.constexpr(VALUE_COLUMNS // WARP_ROWS)
HALF_REGISTERS = gl.constexpr(240)  # a thread of the second half's warps; the first half's get as many


@gluon.constexpr_function
def _unit(bounded):
    """What starts and ends are multiplied by: the loops carry states times its square."""
    return STATE_UNIT.value if bounded else 1.0


@gluon.jit
def _times_solver(b_r, s_high, s_low, s_rest, C: gl.constexpr):
    """r (high + low + rest), begun."""
    b_high = rounded(b_r, s_high.dtype)
    b_y = plus(plus(times(b_high, s_rest, BV, C), b_high, s_low, BV, C), b_high, s_high, BV, C)
    return plus(b_y, rest(b_r, b_high), s_high, BV, C)


@gluon.jit
def _half(s_x, slot, half: gl.constexpr, HALVES: gl.constexpr):
    """The half's tile or line of a slot."""
    if HALVES == 1:
        return s_x.index(slot)
    else:
        return s_x.index(slot * HALVES + half)


@gluon.jit
def _hand_over(b_x, s_parts, told, step, half: gl.constexpr):
    """Give this half's part of a sum to the other half.

    Parts and barriers take turns: a half that gives its part for the next but one time has got the other's of the time between,
    which the other gave after it had read this one.
    """
    at = step % TURNS * HALVES_TOLD + half
    s_parts.index(at).store(b_x)
    gl.thread_barrier()
    mbarrier.arrive(told.index(at), count=USED_ARRIVE)


@gluon.jit
def _with_other_half(b_x, s_parts, told, step, half: gl.constexpr):
    """x and the other half's part of it: the same bits in both halves, for a + b = b + a."""
    at = step % TURNS * HALVES_TOLD + 1 - half
    mbarrier.wait(told.index(at), (step // TURNS) & 1)
    return b_x + s_parts.index(at).load(b_x.type.layout)


@gluon.jit
def _told():
    """Whether each half has given its part, for both turns."""
    told = gl.allocate_shared_memory(gl.int64, [TURNS * HALVES_TOLD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TURNS * HALVES_TOLD):
        mbarrier.init(told.index(i), count=USED_ARRIVE)
    fence_async_shared()
    return told


@gluon.jit
def _parts_room(n: gl.constexpr, C: gl.constexpr):
    """Room for n parts [BV, C] of sums, in float32."""
    return gl.allocate_shared_memory(gl.float32, [n, BV, C], gl.SwizzledSharedLayout(2, 1, 16, [1, 0]))


@gluon.jit
def _place(
    p_cu_seqlens, p_first, p_order, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS,
    HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """A program's block of values, value head and segment; of the segment its first chunk, how many chunks it has, its first token,
    and how many tokens there are from there to the end of the sequence."""
    i = gl.program_id(0)
    NV: gl.constexpr = (V + BV - 1) // BV
    i_v, i_hv, i_n = i % NV, (i // NV) % HV, i // (NV * HV)
    if PLACES == "packed":  # the longest first, so that all end at about the same time
        i_n = gl.load(p_order + i_n).to(gl.int32)
        begin = gl.load(p_cu_seqlens + i_n).to(gl.int32)
        length = gl.load(p_cu_seqlens + i_n + 1).to(gl.int32) - begin
        first = gl.load(p_first + i_n).to(gl.int32)
        num = (length + C - 1) // C
    else:
        i_b, i_segment = i_n // NUM_SEGMENTS, FIRST_SEGMENT + i_n % NUM_SEGMENTS
        first = i_b * NC + i_segment * SEGMENT
        num = gl.minimum(SEGMENT, NC - i_segment * SEGMENT)
        begin, length = first * C, num * C
        if PLACES == "ragged":
            begin, length = i_b * T + i_segment * SEGMENT * C, T - i_segment * SEGMENT * C
    return i_v, i_hv, i_n, first, num, begin, length


@gluon.jit
def _store_part(p_x, b_x, row, i_hv, i_v, left, HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr):
    """x [BV, C] of a chunk of fewer tokens, `left` of them, to [B * T, HV, V]."""
    b_value = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, product(BV, C)))[:, None]
    b_token = gl.arange(0, C, gl.SliceLayout(0, product(BV, C)))[None, :]
    o_x = ((row + b_token).to(gl.int64) * HV + i_hv) * V + b_value
    gl.store(p_x + o_x, b_x.to(p_x.dtype.element_ty), mask=(b_token < left) & (b_value < V))


@gluon.jit
def _send(t_x, s_x, i_hv, row, i_v, left, V: gl.constexpr, C: gl.constexpr, PLACES: gl.constexpr):
    """A tile on its way, if all of its tokens belong to the sequence."""
    if PLACES == "whole":
        send_tile(t_x, i_hv, row, i_v * BV, V, s_x)
    else:
        if left >= C:
            send_tile(t_x, i_hv, row, i_v * BV, V, s_x)


@gluon.jit
def _state_offsets(
    i_v, i_hv, i_n, half: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Where a program's state [BV, BK] lies in float32 [N, HV, K, V], which of it there is; its values and channels."""
    b_value = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, product(BV, BK)))
    b_channel = gl.arange(0, BK, gl.SliceLayout(0, product(BV, BK)))
    if half > 0:
        b_channel += half * BK
    o_state = (i_n.to(gl.int64) * HV + i_hv) * (K * V) + b_channel[None, :] * V + b_value[:, None]
    return o_state, (b_channel < K)[None, :] & (b_value < V)[:, None], b_value, b_channel


@gluon.jit
def _fetch_slot(t_x, head, row, column, width, bar, s_x, slot, BK: gl.constexpr, STAGES: gl.constexpr):
    """A tile, or the tiles of both halves, on their way into a slot."""
    HALVES: gl.constexpr = s_x.shape[0] // STAGES
    for half in gl.static_range(HALVES):
        fetch_tile(t_x, head, row, column + half * BK, width, bar, _half(s_x, slot, half, HALVES))


@gluon.jit
def _fetch(
    tiles,  # of (tensor, head, its first row, column, the head's width, tile)
    p_rho, p_norm2, p_decay, p_next, s_scalars, s_decays, ready, free, first, num, i_hv,
    HV: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr, REVERSED: gl.constexpr,
    BOUNDED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """One warp that fetches the chunks in order: their tiles, rho and |k|^2 of their tokens, their decay, and where BOUNDED that of
    the next chunk."""
    LINE: gl.constexpr = fetch_layout()
    b_token = gl.arange(0, C, LINE) * HV + i_hv
    b_channel = gl.arange(0, BK, LINE) + i_hv * (BK * HALVES)
    for step in range(num):
        slot = step % STAGES
        chunk, following = first + step, first + gl.minimum(step + 1, num - 1)
        if REVERSED:
            chunk, following = first + num - 1 - step, first + gl.maximum(num - 2 - step, 0)
        bar = ready.index(slot)
        mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        for n in gl.static_range(len(tiles)):
            t_x, head, row, column, width, s_x = tiles[n]
            _fetch_slot(t_x, head, row + chunk * C, column, width, bar, s_x, slot, BK, STAGES)
        o_line = chunk.to(gl.int64) * (C * HV)
        async_copy.async_copy_global_to_shared(s_scalars.index(slot * SCALARS + RHO), p_rho + o_line + b_token)
        async_copy.async_copy_global_to_shared(s_scalars.index(slot * SCALARS + NORM2), p_norm2 + o_line + b_token)
        for half in gl.static_range(HALVES):
            o_decay = b_channel + half * BK
            async_copy.async_copy_global_to_shared(
                _half(s_decays, slot * DECAYS + DECAY, half, HALVES),
                p_decay + chunk.to(gl.int64) * (HV * BK * HALVES) + o_decay,
            )
            if BOUNDED:
                async_copy.async_copy_global_to_shared(
                    _half(s_decays, slot * DECAYS + NEXT, half, HALVES),
                    p_next + following.to(gl.int64) * (HV * BK * HALVES) + o_decay,
                )
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _run_states(
    half: gl.constexpr, p_initial, p_start, p_final, t_o, p_o, t_y, t_states, shared, place, ROWS,
    HALVES: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    HAS_INITIAL: gl.constexpr, STORE_FINAL: gl.constexpr, SUMMARY: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
    PLACES: gl.constexpr, SPLIT_A: gl.constexpr,
):  # fmt: skip
    """The four warps of `hopper_state_kernel` that compute, or four of the eight: those of one half of the channels."""
    s_k_forward, s_k_back, s_q_forward, s_v, s_A, s_solver, s_solver_low, s_solver_rest = shared[0]
    s_scalars, s_decays, s_S, s_y, s_y_low, s_o, s_A_low, s_r, s_qS, told, ready, free = shared[1]
    i_v, i_hv, i_n, first, num, begin, length = place
    DT: gl.constexpr = s_k_back.dtype
    OUTPUTS: gl.constexpr = SUMMARY == "none"
    VALUES: gl.constexpr = SUMMARY != "transition"
    STORE_O: gl.constexpr = OUTPUTS and half == 0
    STORE_Y: gl.constexpr = OUTPUTS and half == HALVES - 1
    LOW: gl.constexpr = gl.float16 == DT  # whether o has the digits for what the state's rounding left
    PENDING: gl.constexpr = 2 if STORE_Y else 0  # tiles on their way, of y, when the state has left
    UNIT: gl.constexpr = _unit(BOUNDED)
    PART: gl.constexpr = 1.0 / (UNIT * UNIT)
    by_token: gl.constexpr = gl.SliceLayout(0, product(BV, C))
    by_channel: gl.constexpr = gl.SliceLayout(0, product(BV, BK))
    o_state, m_state, b_value, b_channel = _state_offsets(i_v, i_hv, i_n, half, HV, K, BK, V)
    b_S = gl.zeros([BV, BK], gl.float32, product(BV, BK))
    if SUMMARY == "transition":
        b_S += gl.where(b_channel[None, :] == b_value[:, None], 1.0, 0.0)
    elif HAS_INITIAL:
        b_S += gl.load(p_initial + o_state, mask=m_state, other=0.0)
    if BOUNDED:  # the loop carries S*
        m_some = b_channel < gl.where(num > 0, BK * HALVES, 0)
        o_first = (first.to(gl.int64) * HV + i_hv) * (BK * HALVES)
        b_S *= (gl.load(p_start + o_first + b_channel, mask=m_some, other=1.0 / UNIT) * UNIT)[None, :]
    for step in range(num):
        slot = step % STAGES
        row = (first + step) * C
        token, left = begin + step * C, length - step * C
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        s_kf = _half(s_k_forward, slot, half, HALVES).permute((1, 0))
        b_high = rounded(b_S, DT)
        b_r = times(b_high, s_kf, BV, C)
        b_r = plus(b_r, rest(b_S, b_high), s_kf, BV, C)
        if OUTPUTS:
            s_qf = _half(s_q_forward, slot, half, HALVES).permute((1, 0))
            b_o = times(b_high, s_qf, BV, C)
            if LOW and not STORE_O:
                b_o = plus(b_o, rest(b_S, b_high), s_qf, BV, C)
            s_S.index(half).store(b_high)
            fence_async_shared()
            tma.store_wait(0)
            gl.thread_barrier()  # the state is written, and the last chunk's y and o have left
            send_state(t_states, (first + step) * HV + i_hv, i_v * BV, half * BK, V, s_S.index(half))
        b_rho = s_scalars.index(slot * SCALARS + RHO).load(by_token)
        if VALUES:
            b_length = gl.sqrt(s_scalars.index(slot * SCALARS + NORM2).load(by_token))
            b_v = as_float(s_v.index(slot).permute((1, 0)).load(product(BV, C)))
        if OUTPUTS and not STORE_O:  # this half's part of q_forward S goes to the half that writes o
            b_r, b_o = warpgroup_mma_wait(0, deps=[b_r, b_o])
            s_qS.index(step % TURNS).store(b_o)
        else:
            b_r = warpgroup_mma_wait(1 if OUTPUTS else 0, deps=[b_r])
        if HALVES > 1:
            _hand_over(b_r, s_r, told, step, half)
            b_r = _with_other_half(b_r, s_r, told, step, half)
        b_r *= -PART
        if VALUES:
            b_r += b_v * b_length[None, :]
            if PLACES != "whole":  # what lies behind the sequence is another one's
                b_r = gl.where(gl.arange(0, C, by_token)[None, :] < left, b_r, 0.0)
        s_high = s_solver.index(slot).permute((1, 0))
        s_low, s_rest = s_solver_low.index(slot).permute((1, 0)), s_solver_rest.index(slot).permute((1, 0))
        b_y = _times_solver(b_r, s_high, s_low, s_rest, C)
        if LOW and STORE_O:  # begun here, it runs while u is made of y, and not before the solver's products
            b_o = plus(b_o, rest(b_S, rounded(b_S, DT)), s_qf, BV, C)
        b_y = warpgroup_mma_wait(1 if LOW and STORE_O else 0, deps=[b_y])
        if gl.float16 == DT:
            b_y *= 1.0 / SOLVER_UNIT
        b_u = b_y * b_rho[None, :]
        b_high = rounded(b_u, DT)
        b_low = rest(b_u, b_high)
        s_kb = _half(s_k_back, slot, half, HALVES)
        if STORE_O:  # first, so that o is made and stored while the state is summed
            s_A_t = s_A.index(slot).permute((1, 0))
            b_Au = plus(times(b_high, s_A_t, BV, C), b_low, s_A_t, BV, C)
            if SPLIT_A:
                b_Au = plus(b_Au, b_high, s_A_low.index(slot).permute((1, 0)), BV, C)
        b_added = plus(times(b_high, s_kb, BV, BK), b_low, s_kb, BV, BK)
        if STORE_Y:
            b_high = rounded(b_y, DT)
            s_y.permute((1, 0)).store(b_high)
            s_y_low.permute((1, 0)).store(rest(b_y, b_high))
            fence_async_shared()
            gl.thread_barrier()
            send_tile(t_y, i_hv, row, i_v * BV, V, s_y)
            send_tile(t_y, i_hv, ROWS + row, i_v * BV, V, s_y_low)
        b_end = _half(s_decays, slot * DECAYS + DECAY, half, HALVES).load(by_channel)
        b_next = b_end
        if BOUNDED:
            b_next = _half(s_decays, slot * DECAYS + NEXT, half, HALVES).load(by_channel)
            b_next = gl.where(step + 1 < num, b_next, 1.0 / UNIT)
        if STORE_O:
            b_o, b_Au = warpgroup_mma_wait(2, deps=[b_o, b_Au])
            if HALVES > 1:
                b_o += s_qS.index(step % TURNS).load(product(BV, C))
            b_o = b_o * PART + b_Au
            s_o.permute((1, 0)).store(rounded(b_o, DT))
            if PLACES != "whole":  # noqa: SIM102
                if left < C:
                    _store_part(p_o, b_o, token, i_hv, i_v, left, HV, V, C)
        b_added = warpgroup_mma_wait(0, deps=[b_added])
        if OUTPUTS:
            fence_async_shared()
            tma.store_wait(PENDING)  # just before a barrier: else the compiler sets one of its own
        gl.thread_barrier()  # all are done with this chunk's tiles, o is written, and the state has left
        mbarrier.arrive(free.index(slot), count=USED_ARRIVE)
        if STORE_O:
            _send(t_o, s_o, i_hv, token, i_v, left, V, C, PLACES)
        if BOUNDED:  # noqa: SIM108
            b_S = (b_S * PART + b_added) * b_end[None, :] * b_next[None, :]
        else:
            b_S = b_S * b_end[None, :] + b_added
    if OUTPUTS:
        tma.store_wait(0)
    if STORE_FINAL:
        gl.store(p_final + o_state, b_S, mask=m_state)


@gluon.jit
def hopper_state_kernel(
    t_v,  # tiles [C, BV] of [B * T, HV * V]
    t_keys,  # tiles [C, BK] of [4 * ROWS, HV * K]: q_forward, k_forward, k_back
    t_squares,  # tiles [C, C] of [4 * ROWS, HV * C]: A, the solver in three parts; where SPLIT_A fifth what A's rounding left
    p_rho,  # [ROWS, HV]
    p_norm2,
    p_start,  # [chunks, HV, HALVES * BK]
    p_end,
    p_cu_seqlens,  # [N + 1], where PLACES is "packed"
    p_first,  # [N] the first chunk of each sequence, there too
    p_order,  # [N] the sequences by length, there too
    p_initial,  # float32 [N, HV, K, V]
    t_o,  # out, tiles [C, BV] of [B * T, HV * V]
    p_o,  # the same, for chunks of fewer tokens
    t_y,  # out, tiles [C, BV] of [2 * ROWS, HV * V]: y and what its rounding left
    t_states,  # out, tiles [BV, BK] of [chunks * HV * V, K]
    p_final,  # out float32 [N, HV, K, V]
    ROWS,  # the tokens of all chunks, were they whole
    T,
    NC,
    SEGMENT,
    FIRST_SEGMENT,
    NUM_SEGMENTS,
    HV: gl.constexpr,
    K: gl.constexpr,
    BK: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    STORE_FINAL: gl.constexpr,
    SUMMARY: gl.constexpr,
    STAGES: gl.constexpr,
    BOUNDED: gl.constexpr,
    PLACES: gl.constexpr,
    HALVES: gl.constexpr,  # of K, each of BK channels
    SPLIT_A: gl.constexpr,  # whether A comes in two parts
):
    """`state_kernel`: the state from chunk to chunk, and the outputs."""
    place = _place(p_cu_seqlens, p_first, p_order, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, HV, V, C, PLACES)
    i_v, i_hv, _, first, num, begin, _ = place
    DT: gl.constexpr = t_keys.dtype
    behind = begin - first * C  # from a chunk's place among whole ones to that of its first token
    ready, free = barriers(STAGES, LINES_ARRIVE, HALVES)
    s_scalars, s_decays = lines(STAGES * SCALARS, C), lines(STAGES * DECAYS * HALVES, BK)
    s_k_forward, s_k_back = room(STAGES * HALVES, C, BK, DT), room(STAGES * HALVES, C, BK, DT)
    s_solver, s_solver_low, s_solver_rest = room(STAGES, C, C, DT), room(STAGES, C, C, DT), room(STAGES, C, C, DT)
    tiles = (
        (t_keys, i_hv, K_FORWARD * ROWS, 0, K, s_k_forward),
        (t_squares, i_hv, SOLVER_REST * ROWS, 0, C, s_solver_rest),
        (t_squares, i_hv, SOLVER_LOW * ROWS, 0, C, s_solver_low),
        (t_squares, i_hv, SOLVER * ROWS, 0, C, s_solver),
        (t_keys, i_hv, K_BACK * ROWS, 0, K, s_k_back),
    )
    s_v, s_q_forward, s_A, s_S, s_y, s_y_low, s_o = s_k_back, s_k_back, s_k_back, s_k_back, s_k_back, s_k_back, s_k_back
    if SUMMARY != "transition":
        s_v = room(STAGES, C, BV, DT)
        tiles = tiles + ((t_v, i_hv, behind, i_v * BV, V, s_v),)  # type: ignore[assignment]  # noqa: RUF005
    if SUMMARY == "none":
        s_q_forward, s_A = room(STAGES * HALVES, C, BK, DT), room(STAGES, C, C, DT)
        tiles = tiles + ((t_keys, i_hv, Q_FORWARD * ROWS, 0, K, s_q_forward), (t_squares, i_hv, A * ROWS, 0, C, s_A))  # type: ignore[assignment]  # noqa: RUF005
        s_S = room(HALVES, BV, BK, DT)
        s_y, s_y_low, s_o = room_for_one(C, BV, DT), room_for_one(C, BV, DT), room_for_one(C, BV, DT)
    s_A_low = s_A
    if SPLIT_A and SUMMARY == "none":
        s_A_low = room(STAGES, C, C, DT)
        tiles = tiles + ((t_squares, i_hv, A_LOW * ROWS, 0, C, s_A_low),)  # type: ignore[assignment]  # noqa: RUF005
    s_r, s_qS, told = s_scalars, s_scalars, ready  # what the halves hand each other
    if HALVES > 1:
        s_r, told = _parts_room(TURNS * HALVES, C), _told()
        if SUMMARY == "none":
            s_qS = _parts_room(TURNS, C)
    more: gl.constexpr = 1 if SUMMARY == "none" else 0
    squares: gl.constexpr = 3 + more + (1 if SPLIT_A and SUMMARY == "none" else 0)
    columns: gl.constexpr = (2 + more) * BK * HALVES + squares * C + (0 if SUMMARY == "transition" else BV)
    shared = (
        (s_k_forward, s_k_back, s_q_forward, s_v, s_A, s_solver, s_solver_low, s_solver_rest),
        (s_scalars, s_decays, s_S, s_y, s_y_low, s_o, s_A_low, s_r, s_qS, told, ready, free),
    )  # fmt: skip
    if HALVES == 1:
        gl.warp_specialize(
            [
                (_run_states, (
                    0, p_initial, p_start, p_final, t_o, p_o, t_y, t_states, shared, place, ROWS,
                    HALVES, HV, K, BK, V, C, HAS_INITIAL, STORE_FINAL, SUMMARY, STAGES, BOUNDED, PLACES, SPLIT_A,
                )),
                (_fetch, (
                    tiles, p_rho, p_norm2, p_end, p_start, s_scalars, s_decays, ready, free, first, num, i_hv,
                    HV, BK, C, DT_BYTES * C * columns, STAGES, False, BOUNDED, HALVES,
                )),
            ],
            [FETCH_WARPS],
            [FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_run_states, (
                    0, p_initial, p_start, p_final, t_o, p_o, t_y, t_states, shared, place, ROWS,
                    HALVES, HV, K, BK, V, C, HAS_INITIAL, STORE_FINAL, SUMMARY, STAGES, BOUNDED, PLACES, SPLIT_A,
                )),
                (_run_states, (
                    1, p_initial, p_start, p_final, t_o, p_o, t_y, t_states, shared, place, ROWS,
                    HALVES, HV, K, BK, V, C, HAS_INITIAL, STORE_FINAL, SUMMARY, STAGES, BOUNDED, PLACES, SPLIT_A,
                )),
                (_fetch, (
                    tiles, p_rho, p_norm2, p_end, p_start, s_scalars, s_decays, ready, free, first, num, i_hv,
                    HV, BK, C, DT_BYTES * C * columns, STAGES, False, BOUNDED, HALVES,
                )),
            ],
            [HALF_WARPS, FETCH_WARPS],
            [HALF_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _run_gradients(
    half: gl.constexpr, p_dfinal, p_end, p_dinitial, t_dv, p_dv, t_dstates, shared, place,
    HALVES: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    HAS_FINAL: gl.constexpr, STORE_INITIAL: gl.constexpr, SUMMARY: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """The four warps of `hopper_reverse_kernel` that compute, or those of one half of the channels."""
    s_k_forward, s_k_back, s_q_forward, s_do, s_A, s_solver, s_solver_low, s_solver_rest = shared[0]
    s_scalars, s_decays, s_dS, s_dv, s_du, told, ready, free = shared[1]
    i_v, i_hv, i_n, first, num, begin, length = place
    DT: gl.constexpr = s_k_back.dtype
    by_token: gl.constexpr = gl.SliceLayout(0, product(BV, C))
    by_channel: gl.constexpr = gl.SliceLayout(0, product(BV, BK))
    STORE_DV: gl.constexpr = half == 0 and not SUMMARY
    UNIT: gl.constexpr = _unit(BOUNDED)
    PART: gl.constexpr = 1.0 / (UNIT * UNIT)
    o_state, m_state, _, b_channel = _state_offsets(i_v, i_hv, i_n, half, HV, K, BK, V)
    b_dS = gl.zeros([BV, BK], gl.float32, product(BV, BK))
    if HAS_FINAL:
        b_dS += gl.load(p_dfinal + o_state, mask=m_state, other=0.0)
    if BOUNDED:  # the loop carries Gamma / gamma_a dS, in units as the states
        m_some = b_channel < gl.where(num > 0, BK * HALVES, 0)
        o_last = ((first + num - 1).to(gl.int64) * HV + i_hv) * (BK * HALVES)
        b_dS *= (gl.load(p_end + o_last + b_channel, mask=m_some, other=1.0 / UNIT) * UNIT)[None, :]
    for step in range(num):
        slot, chunk = step % STAGES, first + num - 1 - step
        token, left = begin + (num - 1 - step) * C, length - (num - 1 - step) * C
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        b_do = s_do.index(slot).permute((1, 0)).load(left_operand(BV, C))
        if PLACES != "whole":  # what lies behind the sequence is another one's
            b_token = gl.arange(0, C, gl.SliceLayout(0, left_operand(BV, C)))[None, :]
            b_do = gl.where(b_token < left, b_do, 0.0)
        s_kb = _half(s_k_back, slot, half, HALVES).permute((1, 0))
        b_high = rounded(b_dS, DT)
        b_du = times(b_high, s_kb, BV, C)
        b_du = plus(b_du, rest(b_dS, b_high), s_kb, BV, C)
        b_Ado = times(b_do, s_A.index(slot), BV, C)
        b_added = times(b_do, _half(s_q_forward, slot, half, HALVES), BV, BK)
        if not SUMMARY:
            s_dS.index(half).store(b_high)
            fence_async_shared()
            tma.store_wait(0)
            gl.thread_barrier()  # dS is written, and the last chunk's dv has left
            send_state(t_dstates, chunk * HV + i_hv, i_v * BV, half * BK, V, s_dS.index(half))
        b_rho = s_scalars.index(slot * SCALARS + RHO).load(by_token)
        b_length = gl.sqrt(s_scalars.index(slot * SCALARS + NORM2).load(by_token))
        b_du, b_Ado = warpgroup_mma_wait(1, deps=[b_du, b_Ado])
        if HALVES > 1:
            _hand_over(b_du, s_du, told, step, half)
            b_du = _with_other_half(b_du, s_du, told, step, half)
        b_du = (b_Ado + b_du * PART) * b_rho[None, :]
        b_dr = _times_solver(b_du, s_solver.index(slot), s_solver_low.index(slot), s_solver_rest.index(slot), C)
        b_added = warpgroup_mma_wait(4, deps=[b_added])
        if BOUNDED:
            b_dS *= PART
        else:
            b_dS *= _half(s_decays, slot * DECAYS + DECAY, half, HALVES).load(by_channel)[None, :]
        b_dS += b_added
        b_dr = warpgroup_mma_wait(0, deps=[b_dr])
        if gl.float16 == DT:
            b_dr *= 1.0 / SOLVER_UNIT
        s_kf = _half(s_k_forward, slot, half, HALVES)
        b_high = rounded(b_dr, DT)
        b_taken = plus(times(b_high, s_kf, BV, BK), rest(b_dr, b_high), s_kf, BV, BK)
        if STORE_DV:
            b_dr *= b_length[None, :]
            s_dv.permute((1, 0)).store(rounded(b_dr, DT))
            if PLACES != "whole":  # noqa: SIM102
                if left < C:
                    _store_part(p_dv, b_dr, token, i_hv, i_v, left, HV, V, C)
        if BOUNDED:
            b_decay = _half(s_decays, slot * DECAYS + DECAY, half, HALVES).load(by_channel)
            b_next = _half(s_decays, slot * DECAYS + NEXT, half, HALVES).load(by_channel)
            b_next = gl.where(step + 1 < num, b_next, 1.0 / UNIT)
        b_taken = warpgroup_mma_wait(0, deps=[b_taken])
        if not SUMMARY:
            fence_async_shared()
            tma.store_wait(0)
        gl.thread_barrier()  # all are done with this chunk's tiles, dv is written, and dS has left
        mbarrier.arrive(free.index(slot), count=USED_ARRIVE)
        if STORE_DV:
            _send(t_dv, s_dv, i_hv, token, i_v, left, V, C, PLACES)
        b_dS -= b_taken
        if BOUNDED:
            b_dS = b_dS * b_decay[None, :] * b_next[None, :]
    if not SUMMARY:
        tma.store_wait(0)
    if STORE_INITIAL:
        gl.store(p_dinitial + o_state, b_dS, mask=m_state)


@gluon.jit
def hopper_reverse_kernel(
    t_do,  # tiles [C, BV] of [B * T, HV * V]
    t_keys,  # as in `hopper_state_kernel`
    t_squares,
    p_rho,  # [ROWS, HV]
    p_norm2,
    p_start,  # [chunks, HV, HALVES * BK]
    p_end,
    p_cu_seqlens,
    p_first,
    p_order,
    p_dfinal,  # float32 [N, HV, K, V]
    t_dv,  # out, tiles [C, BV] of [B * T, HV * V]
    p_dv,  # the same, for chunks of fewer tokens
    t_dstates,  # out, tiles [BV, BK] of [chunks * HV * V, K]
    p_dinitial,  # out float32 [N, HV, K, V]
    ROWS,
    T,
    NC,
    SEGMENT,
    FIRST_SEGMENT,
    NUM_SEGMENTS,
    HV: gl.constexpr,
    K: gl.constexpr,
    BK: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    HAS_FINAL: gl.constexpr,
    STORE_INITIAL: gl.constexpr,
    SUMMARY: gl.constexpr,
    STAGES: gl.constexpr,
    BOUNDED: gl.constexpr,
    PLACES: gl.constexpr,
    HALVES: gl.constexpr,
):
    """`reverse_kernel`: the gradient of the state from chunk to chunk, backwards."""
    place = _place(p_cu_seqlens, p_first, p_order, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, HV, V, C, PLACES)
    i_v, i_hv, _, first, num, begin, _ = place
    DT: gl.constexpr = t_keys.dtype
    behind = begin - first * C  # from a chunk's place among whole ones to that of its first token
    ready, free = barriers(STAGES, LINES_ARRIVE, HALVES)
    s_scalars, s_decays = lines(STAGES * SCALARS, C), lines(STAGES * DECAYS * HALVES, BK)
    s_k_forward, s_k_back = room(STAGES * HALVES, C, BK, DT), room(STAGES * HALVES, C, BK, DT)
    s_q_forward = room(STAGES * HALVES, C, BK, DT)
    s_solver, s_solver_low, s_solver_rest = room(STAGES, C, C, DT), room(STAGES, C, C, DT), room(STAGES, C, C, DT)
    s_A, s_do = room(STAGES, C, C, DT), room(STAGES, C, BV, DT)
    s_dS, s_dv = s_k_back, s_do  # not used where SUMMARY
    if not SUMMARY:
        s_dS, s_dv = room(HALVES, BV, BK, DT), room_for_one(C, BV, DT)
    s_du, told = s_scalars, ready  # what the halves hand each other
    if HALVES > 1:
        s_du, told = _parts_room(TURNS * HALVES, C), _told()
    tiles = (
        (t_do, i_hv, behind, i_v * BV, V, s_do),
        (t_keys, i_hv, K_BACK * ROWS, 0, K, s_k_back),
        (t_squares, i_hv, A * ROWS, 0, C, s_A),
        (t_keys, i_hv, Q_FORWARD * ROWS, 0, K, s_q_forward),
        (t_squares, i_hv, SOLVER_REST * ROWS, 0, C, s_solver_rest),
        (t_squares, i_hv, SOLVER_LOW * ROWS, 0, C, s_solver_low),
        (t_squares, i_hv, SOLVER * ROWS, 0, C, s_solver),
        (t_keys, i_hv, K_FORWARD * ROWS, 0, K, s_k_forward),
    )
    columns: gl.constexpr = 3 * BK * HALVES + 4 * C + BV
    shared = (
        (s_k_forward, s_k_back, s_q_forward, s_do, s_A, s_solver, s_solver_low, s_solver_rest),
        (s_scalars, s_decays, s_dS, s_dv, s_du, told, ready, free),
    )  # fmt: skip
    if HALVES == 1:
        gl.warp_specialize(
            [
                (_run_gradients, (
                    0, p_dfinal, p_end, p_dinitial, t_dv, p_dv, t_dstates, shared, place,
                    HALVES, HV, K, BK, V, C, HAS_FINAL, STORE_INITIAL, SUMMARY, STAGES, BOUNDED, PLACES,
                )),
                (_fetch, (
                    tiles, p_rho, p_norm2, p_start if BOUNDED else p_end, p_end, s_scalars, s_decays, ready, free, first, num, i_hv,
                    HV, BK, C, DT_BYTES * C * columns, STAGES, True, BOUNDED, HALVES,
                )),
            ],
            [FETCH_WARPS],
            [FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_run_gradients, (
                    0, p_dfinal, p_end, p_dinitial, t_dv, p_dv, t_dstates, shared, place,
                    HALVES, HV, K, BK, V, C, HAS_FINAL, STORE_INITIAL, SUMMARY, STAGES, BOUNDED, PLACES,
                )),
                (_run_gradients, (
                    1, p_dfinal, p_end, p_dinitial, t_dv, p_dv, t_dstates, shared, place,
                    HALVES, HV, K, BK, V, C, HAS_FINAL, STORE_INITIAL, SUMMARY, STAGES, BOUNDED, PLACES,
                )),
                (_fetch, (
                    tiles, p_rho, p_norm2, p_start if BOUNDED else p_end, p_end, s_scalars, s_decays, ready, free, first, num, i_hv,
                    HV, BK, C, DT_BYTES * C * columns, STAGES, True, BOUNDED, HALVES,
                )),
            ],
            [HALF_WARPS, FETCH_WARPS],
            [HALF_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
