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
    A_LOW,
    AFTER,
    BORDERS,
    DT_BYTES,
    FETCH_REGISTERS,
    FETCH_WARPS,
    FORWARD,
    K_BACK,
    K_FORWARD,
    NUM_KEYS,
    Q_FORWARD,
    THROUGH,
    TILES_ARRIVE,
    USED_ARRIVE,
    across_border,
    as_float,
    as_rounded,
    ask,
    barriers,
    block_decays,
    by_pairs,
    by_rows,
    calm_range,
    channel_tile,
    clear_behind,
    fetch_tile,
    head_gate,
    held_log,
    lines_apart,
    product,
    rest,
    room,
    rooms,
    rounded,
    send_tile,
    settle,
    span_sums,
    store_spans,
    times,
    warps_of,
)
from ckda.ops.triton.tile import ROUND, STATE_UNIT, finite_gate, learning_rate, log_gate

__all__ = ["hopper_intra_kernel"]

STAGES = gl.constexpr(2)
# tiles that come, or are multiplied, in pairs; the tiles that leave are the parts of t_keys
QUERY, KEY, PAIR = (gl.constexpr(i) for i in range(3))
TURNS = gl.constexpr(2)  # pairs that take turns in the room of the tiles that leave
K_INVERSE = NUM_KEYS  # the room of one more tile, of calm chunks, that does not leave
STEP = gl.constexpr(16)  # channels that one matrix instruction adds up
# lines of a chunk's tokens: what q and k are multiplied by, and q k of each token
Q_LENGTH, K_POWER, DIAGONAL, LINES = (gl.constexpr(i) for i in range(4))


@gluon.jit
def _fetch(
    t_q, t_k, t_g, p_calm, p_starts, p_ends, s_in, s_g, ready, free, num_chunks, T, NC,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr,
    GATE_BYTES: gl.constexpr, PLACES: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """One warp that fetches the chunks of this program."""
    n = 0
    num_items = num_chunks * HV
    turn = gl.program_id(0)
    item, row, num, rows = ask(
        turn, num_items, p_calm, None, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, "any", PLACES, 1
    )
    turn, item, row, _ = settle(
        turn, item, row, num, rows, num_items, p_calm, None, p_starts, p_ends, T, NC,
        HV, C, LEAST, MOST, "any", PLACES, 1, FETCH_WARPS,
    )  # fmt: skip
    while turn < num_items:
        turn += gl.num_programs(0)
        next_item, next_row, num, rows = ask(
            turn, num_items, p_calm, None, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, "any", PLACES, 1
        )
        i_hv = item % HV
        i_h = i_hv // (HV // H)
        slot = n % STAGES
        bar = ready.index(slot)
        mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, C * BK * (PAIR * DT_BYTES + GATE_BYTES))
        fetch_tile(t_g, i_hv, row, 0, K, bar, s_g.index(slot))
        fetch_tile(t_k, i_h, row, 0, K, bar, s_in.index(slot * PAIR + KEY))
        fetch_tile(t_q, i_h, row, 0, K, bar, s_in.index(slot * PAIR + QUERY))
        n += 1
        turn, item, row, _ = settle(
            turn, next_item, next_row, num, rows, num_items, p_calm, None, p_starts, p_ends, T, NC,
            HV, C, LEAST, MOST, "any", PLACES, 1, FETCH_WARPS,
        )  # fmt: skip


@gluon.jit
def _used_norms(b_q, b_k, NORMALIZE: gl.constexpr):
    """1 / |q|, the power of two in the key and |k|^2 of the key as used: `_used_norms` of portable/forward.py."""
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
def _tiles_that_leave(s_rooms):
    """The parts of t_keys, and of calm chunks one more: each in a room of its own, or all in one, where they take turns with the
    borders' tiles. There the barriers between the stores also keep the compiler from holding more than fits the registers."""
    ONE: gl.constexpr = len(s_rooms) == 1
    NUM: gl.constexpr = s_rooms[0].shape[0] if ONE else len(s_rooms)
    s_out = (s_rooms[0].index(0),)
    for i in gl.static_range(1, NUM):
        s_out = s_out + (s_rooms[0].index(i) if ONE else s_rooms[i].index(0),)  # type: ignore[assignment]  # noqa: RUF005
    return s_out


@gluon.jit
def _bounded_tiles(b_q, b_k, b_erase, b_cum, b_count, s_out, p_start, p_end, o_slot, C: gl.constexpr):
    """Decays from the chunk's middle (`bounded_decays`): the four tiles that are kept, the chunk's start and end."""
    b_token = gl.arange(0, C, gl.SliceLayout(0, b_q.type.layout))[None, :]
    b_sign = b_count.to(gl.int32) << 31
    b_round = b_cum + ROUND
    b_broken = b_cum - (b_round - ROUND)
    b_middle = gl.sum(gl.where(b_token == C // 2 - 1, b_cum, 0.0), 1) + ROUND
    b_shift = (b_round.to(gl.int32, bitcast=True) - b_middle.to(gl.int32, bitcast=True)[:, None]) << 23
    b_forward = ((gl.exp2(b_broken).to(gl.int32, bitcast=True) + b_shift) ^ b_sign).to(gl.float32, bitcast=True)
    b_back = ((gl.exp2(-b_broken).to(gl.int32, bitcast=True) - b_shift) ^ b_sign).to(gl.float32, bitcast=True)
    gl.store(p_start + o_slot, gl.exp2(b_middle - ROUND) * STATE_UNIT)
    gl.store(p_end + o_slot, gl.sum(gl.where(b_token == C - 1, b_forward, 0.0), 1) * STATE_UNIT)
    s_out[FORWARD].permute((1, 0)).store(rounded(b_forward, s_out[0].dtype))
    s_out[Q_FORWARD].permute((1, 0)).store(rounded(b_q * b_forward, s_out[0].dtype))
    s_out[K_FORWARD].permute((1, 0)).store(rounded(b_k * b_erase * b_forward, s_out[0].dtype))
    s_out[K_BACK].permute((1, 0)).store(rounded(b_k * b_back, s_out[0].dtype))


@gluon.jit
def _calm_tiles(b_q, b_k, b_erase, b_cum, b_count, s_out, p_start, p_end, p_calm, item, o_slot, C: gl.constexpr):
    """Decays from the chunk's start: the four tiles that are kept, and keys over their decays; and how many rows are calm.

    Of the tokens that are not calm keys over their decays, and with them k_back, may be infinite or NaN. No calm row reads such a
    key; k_back and the other rows of A and G are written again by the launch that comes after.
    """
    b_line = gl.arange(0, C, gl.SliceLayout(0, b_q.type.layout))
    b_token = b_line[None, :]
    b_sign = b_count.to(gl.int32) << 31
    b_forward = (gl.exp2(b_cum).to(gl.int32, bitcast=True) ^ b_sign).to(gl.float32, bitcast=True)
    b_inverse = (gl.exp2(-b_cum).to(gl.int32, bitcast=True) ^ b_sign).to(gl.float32, bitcast=True)
    b_end = gl.sum(gl.where(b_token == C - 1, b_forward, 0.0), 1)
    gl.store(p_start + o_slot, gl.zeros_like(b_end) + 1.0)
    gl.store(p_end + o_slot, b_end)
    gl.store(p_calm + item, gl.min(gl.where(gl.min(b_cum, 0) < -calm_range(s_out[0].dtype), b_line, C), 0))
    s_out[FORWARD].permute((1, 0)).store(rounded(b_forward, s_out[0].dtype))
    s_out[Q_FORWARD].permute((1, 0)).store(rounded(b_q * b_forward, s_out[0].dtype))
    s_out[K_FORWARD].permute((1, 0)).store(rounded(b_k * b_erase * b_forward, s_out[0].dtype))
    b_inverse *= b_k
    s_out[K_INVERSE].permute((1, 0)).store(rounded(b_inverse, s_out[0].dtype))
    s_out[K_BACK].permute((1, 0)).store(rounded(b_inverse * b_end[:, None], s_out[0].dtype))


@gluon.jit
def _unbounded_tiles(
    b_q, b_k, b_erase, b_gamma, b_to_end, b_last, fresh, s_out, p_start, p_end, o_slot, C: gl.constexpr
):
    """Decays from the chunk's start and to its end: three tiles, or the last alone where the others are written already. b_last is
    the sign of Gamma [BK], signs are in q and k too."""
    b_token = gl.arange(0, C, gl.SliceLayout(0, b_q.type.layout))[None, :]
    s_out[K_BACK].permute((1, 0)).store(rounded(b_k.to(gl.float32) * b_to_end * b_last[:, None], s_out[0].dtype))
    if fresh:
        gl.store(p_start + o_slot, gl.zeros_like(b_last) + 1.0)
        gl.store(p_end + o_slot, gl.sum(gl.where(b_token == C - 1, b_gamma, 0.0), 1) * b_last)
        s_out[Q_FORWARD].permute((1, 0)).store(rounded(b_q.to(gl.float32) * b_gamma, s_out[0].dtype))
        s_out[K_FORWARD].permute((1, 0)).store(rounded(b_k.to(gl.float32) * b_erase * b_gamma, s_out[0].dtype))


@gluon.jit
def _rounded_sums(s_left, s_right, Q: gl.constexpr, C: gl.constexpr):
    """left right^T [C, C] of tiles [C, BK]: the matrix instruction cuts its sums off, always towards zero, and what is added
    outside of it is rounded."""
    b_zero = gl.zeros([C, C], gl.float32, Q)
    b_sum = b_zero
    for n in gl.static_range(s_left.shape[1] // STEP):
        b_left = s_left.slice(n * STEP, STEP, 1).load(gl.DotOperandLayout(0, Q, 2))
        b_right = s_right.slice(n * STEP, STEP, 1).permute((1, 0)).load(gl.DotOperandLayout(1, Q, 2))
        b_sum += mma_v2(b_left, b_right, b_zero)
    return b_sum


@gluon.jit
def _pair_products(s_query, s_key, Q: gl.constexpr, C: gl.constexpr):
    """query^T key and key^T key [C, C] of tiles [C, BK] in shared memory; the left operand of the second is s_key[1]."""
    left: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
    b_key = s_key[0].permute((1, 0)).load(gl.DotOperandLayout(1, Q, 2))
    b_zero = gl.zeros([C, C], gl.float32, Q)
    b_query_key = mma_v2(s_query.load(left), b_key, b_zero)
    if gl.float16 == s_query.dtype:
        return b_query_key, _rounded_sums(s_key[1], s_key[0], Q, C)
    else:
        return b_query_key, mma_v2(s_key[1].load(left), b_key, b_zero)


@gluon.jit
def _border_products(
    b_q, b_k, b_erase, b_high, b_low, b_diagonal, s_out, s_M,
    Q: gl.constexpr, C: gl.constexpr, LEVELS: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """A and G: pairs within blocks first, then border by border (`_unbounded_products`). A border's decayed tiles lie in shared
    memory, in two places that are used in turn."""
    b_token = gl.arange(0, C, gl.SliceLayout(0, b_q.type.layout))[None, :]
    BK: gl.constexpr = b_q.shape[0]
    b_row = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_column = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    b_A = gl.where(b_row == b_column, b_diagonal[:, None], 0.0)
    b_G = gl.zeros([C, C], gl.float32, Q)
    if BASE > 0:
        b_forward, b_back = block_decays(
            b_high, b_low, s_M.index(BORDERS + LEVELS - BASE), s_M.index(BORDERS + LEVELS - BASE + 1), BK, C
        )
        s_query, s_row, s_key = s_out.index(Q_FORWARD), s_out.index(K_FORWARD), s_out.index(K_BACK)
        s_query.permute((1, 0)).store(rounded(b_q.to(gl.float32) * b_forward, s_M.dtype))
        s_row.permute((1, 0)).store(rounded(b_k.to(gl.float32) * b_erase * b_forward, s_M.dtype))
        s_key.permute((1, 0)).store(rounded(b_k.to(gl.float32) * b_back, s_M.dtype))
        gl.thread_barrier()
        b_query_key, b_key_key = _pair_products(s_query, (s_key, s_row), Q, C)
        m_pairs = (b_row > b_column) & ((b_row >> BASE) == (b_column >> BASE))
        b_A = gl.where(m_pairs, b_query_key, b_A)
        b_G = gl.where(m_pairs, b_key_key, b_G)
        gl.thread_barrier()  # the tiles are used up
    b_sums = span_sums(b_high, b_low, s_M.index(BORDERS), BK, C)
    for shift in range(BASE, LEVELS):
        b_decay = gl.exp2(warpgroup_mma_wait(0, deps=[b_sums]))
        b_sums = span_sums(b_high, b_low, s_M.index(BORDERS + gl.minimum(shift + 1, LEVELS - 1) - BASE), BK, C)
        turn = shift % TURNS * PAIR
        s_query, s_key = s_out.index(turn + QUERY), s_out.index(turn + KEY)
        s_query.permute((1, 0)).store(rounded(b_q.to(gl.float32) * b_decay, s_M.dtype))
        b_row_erase = gl.where((b_token >> shift) % 2 == 1, b_erase, 1.0)  # right of a border a key is a row of G
        s_key.permute((1, 0)).store(rounded(b_k.to(gl.float32) * b_row_erase * b_decay, s_M.dtype))
        gl.thread_barrier()  # this border's tiles are written, and the last but one's used up
        b_query_key, b_key_key = _pair_products(s_query, (s_key, s_key), Q, C)
        m_pairs = across_border(b_row, b_column, shift)
        b_A = gl.where(m_pairs, b_query_key, b_A)
        b_G = gl.where(m_pairs, b_key_key, b_G)
    b_sums = warpgroup_mma_wait(0, deps=[b_sums])
    return b_A, b_G


@gluon.jit
def _run(
    p_beta, p_sign, p_erase, p_A_log, p_dt_bias, t_keys, p_A, p_G, p_rho, p_norms, p_start, p_end,
    p_calm, p_starts, p_ends, s_in, s_g, s_rooms, s_M, s_lines, ready, free, num_chunks, ROWS, T, NC, scale,
    HV: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr,
    GATE: gl.constexpr, SIGNED: gl.constexpr, ERASE: gl.constexpr,
    HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr, NORMALIZE: gl.constexpr, BETA_RANGE: gl.constexpr,
    LEVELS: gl.constexpr, BASE: gl.constexpr, BOUNDED: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, PLACES: gl.constexpr,
    SPLIT_A: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    DT: gl.constexpr = s_M.dtype
    CALM: gl.constexpr = LEAST > 0
    BORDERED: gl.constexpr = not BOUNDED and not CALM
    WARPS: gl.constexpr = warps_of(BK)
    P: gl.constexpr = product(BK, C)
    Q: gl.constexpr = by_pairs(BK)
    R: gl.constexpr = by_rows(BK, BK)
    by_token: gl.constexpr = gl.SliceLayout(0, P)
    by_channel: gl.constexpr = gl.SliceLayout(1, P)
    by_row: gl.constexpr = gl.SliceLayout(1, R)
    TILES: gl.constexpr = NUM_KEYS - 1 if BORDERED else NUM_KEYS  # without forward
    s_out = _tiles_that_leave(s_rooms)
    b_from = gl.arange(0, C, gl.SliceLayout(1, Q))[:, None]
    b_to = gl.arange(0, C, gl.SliceLayout(0, Q))[None, :]
    if not BORDERED:
        s_M.index(THROUGH).store(gl.where(b_from <= b_to, 1.0, 0.0).to(DT))
    else:
        store_spans(s_M, b_from, b_to, LEVELS, BASE, BASE > 0)
    fence_async_shared()
    gl.thread_barrier()
    b_channel = gl.arange(0, BK, by_channel)
    b_token = gl.arange(0, C, by_token)[None, :]
    num_lines = ROWS.to(gl.int64) * HV
    n = 0
    num_items = num_chunks * HV
    turn = gl.program_id(0)
    item, begin, num, rows = ask(
        turn, num_items, p_calm, None, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, "any", PLACES, 1
    )
    turn, item, begin, num = settle(
        turn, item, begin, num, rows, num_items, p_calm, None, p_starts, p_ends, T, NC,
        HV, C, LEAST, MOST, "any", PLACES, 1, WARPS,
    )  # fmt: skip
    while turn < num_items:
        chunk, i_hv = item // HV, item % HV
        slot, row = n % STAGES, chunk * C
        calm_rows = 0
        if BORDERED:
            calm_rows = gl.load(p_calm + item)  # what there is of them is written already
        fresh = calm_rows == 0
        b_row = gl.arange(0, C, by_row)
        o_line = (row + b_row).to(gl.int64) * HV + i_hv
        b_beta = gl.full([C], 1.0, gl.float32, by_row)
        b_erase = gl.full([1, 1], 1.0, gl.float32, P)
        if ERASE:
            b_erase = channel_tile(p_erase, begin, num, i_hv, 0, 0.0, K, BK, C, HV, PLACES).to(gl.float32)
        else:
            b_beta = gl.load(p_beta + (begin + b_row).to(gl.int64) * HV + i_hv, mask=b_row < num, other=0.0).to(
                gl.float32
            )
        b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, 0, K, BK, C, HAS_A_LOG, HAS_DT_BIAS)
        mbarrier.wait(ready.index(slot), (n // STAGES) & 1)
        clear_behind(s_in, slot * PAIR, PAIR, num, R, PLACES)

        # the gates, and their sums over tokens
        b_g = finite_gate(as_float(s_g.index(slot).permute((1, 0)).load(P)), GATE)
        b_log, b_negative = log_gate(b_g, b_rate, b_bias, GATE, False)
        b_log = held_log(b_log, DT)
        if SIGNED == "given":
            b_negative = channel_tile(p_sign, begin, num, i_hv, 0, 1, K, BK, C, HV, PLACES) < 0
        if (
            PLACES != "whole"
        ):  # what lies behind a sequence is another one's: nothing of it may be seen, not even that it is NaN
            b_log = gl.where(b_token < num, b_log, 0.0)
            b_negative = b_negative & (b_token < num)
        if CALM and BK > K:
            b_log = gl.where(b_channel[:, None] < K, b_log, 0.0)
        b_high = rounded(b_log, DT)
        b_low = rest(b_log, b_high)
        if not BORDERED:
            b_cum = span_sums(b_high, b_low, s_M.index(THROUGH), BK, C)
        b_count = times(gl.where(b_negative, 1.0, 0.0).to(DT), s_M.index(THROUGH), BK, C)

        # the norms and the learning rate
        b_q = as_float(s_in.index(slot * PAIR + QUERY).load(R))
        b_k = as_float(s_in.index(slot * PAIR + KEY).load(R))
        b_inverse, b_power, b_norm2 = _used_norms(b_q, b_k, NORMALIZE)
        s_lines[Q_LENGTH].store(b_inverse * scale)
        s_lines[K_POWER].store(b_power)
        if BORDERED:
            b_q = as_rounded(b_q * (b_inverse * scale)[:, None], DT)
            s_lines[DIAGONAL].store(gl.sum(b_q * b_k, 1) * b_power)
        b_rho = b_beta / b_norm2
        if not ERASE:
            b_rho = learning_rate(b_beta, BETA_RANGE) / b_norm2
        if PLACES != "whole":
            b_rho = gl.where(b_row < num, b_rho, 0.0)
        if fresh:
            gl.store(p_rho + o_line, b_rho)
            gl.store(p_norms + o_line, b_inverse)
            gl.store(p_norms + num_lines + o_line, b_power)
            gl.store(p_norms + 2 * num_lines + o_line, b_norm2)
        tma.store_wait(0)
        gl.thread_barrier()  # the lines are written, and the last chunk's tiles have left

        # queries and keys with their decays
        if BORDERED:
            b_count = warpgroup_mma_wait(0, deps=[b_count])
        else:
            b_cum, b_count = warpgroup_mma_wait(0, deps=[b_cum, b_count])
        b_q = as_float(s_in.index(slot * PAIR + QUERY).permute((1, 0)).load(P))
        b_q *= s_lines[Q_LENGTH].load(by_token)[None, :]
        b_k = as_float(s_in.index(slot * PAIR + KEY).permute((1, 0)).load(P))
        b_k *= s_lines[K_POWER].load(by_token)[None, :]
        o_slot = gl.cast(item, gl.int64) * BK + b_channel
        if BOUNDED:
            _bounded_tiles(as_rounded(b_q, DT), b_k, b_erase, b_cum, b_count, s_out, p_start, p_end, o_slot, C)
        elif CALM:
            _calm_tiles(
                as_rounded(b_q, DT), b_k, b_erase, b_cum, b_count, s_out, p_start, p_end, p_calm, item, o_slot, C
            )
        else:
            b_last = gl.full([BK], 1.0, gl.float32, by_channel)
            if SIGNED != "no":
                b_sign = gl.where(b_count.to(gl.int32) % 2 == 1, -1.0, 1.0)
                b_q, b_k = b_q * b_sign, b_k * b_sign  # a pair's sign is the product of both
                b_last = gl.sum(gl.where(b_token == C - 1, b_sign, 0.0), 1)
            b_diagonal = s_lines[DIAGONAL].load(gl.SliceLayout(1, Q))
            b_q, b_k = rounded(b_q, DT), rounded(b_k, DT)  # a key in bfloat16 times a power of two is as it was
            b_A, b_G = _border_products(
                b_q, b_k, b_erase, b_high, b_low, b_diagonal, s_rooms[0], s_M, Q, C, LEVELS, BASE
            )
            b_gamma = span_sums(b_high, b_low, s_M.index(THROUGH), BK, C)
            b_to_end = span_sums(b_high, b_low, s_M.index(AFTER), BK, C)
            b_gamma, b_to_end = warpgroup_mma_wait(0, deps=[b_gamma, b_to_end])
            b_gamma, b_to_end = gl.exp2(b_gamma), gl.exp2(b_to_end)
            gl.thread_barrier()  # the borders' tiles are used up
            _unbounded_tiles(b_q, b_k, b_erase, b_gamma, b_to_end, b_last, fresh, s_out, p_start, p_end, o_slot, C)
        turn += gl.num_programs(0)
        next_item, next_begin, next_num, next_rows = ask(
            turn, num_items, p_calm, None, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, "any", PLACES, 1
        )
        fence_async_shared()
        gl.thread_barrier()  # the tiles are written, and q, k and g used up
        mbarrier.arrive(free.index(slot), count=USED_ARRIVE)
        for i in gl.static_range(TILES):
            if fresh or i == K_BACK:
                send_tile(t_keys, i_hv, i * ROWS + row, 0, K, s_out[i])

        # the products of tokens with tokens
        if not BORDERED:
            s_key = s_out[K_INVERSE if CALM else K_BACK]
            b_A, b_G = _pair_products(s_out[Q_FORWARD], (s_key, s_out[K_FORWARD]), Q, C)
        o_A = ((row + b_from).to(gl.int64) * HV + i_hv) * C + b_to
        m_rows = None
        if BORDERED:
            m_rows = (b_from >= calm_rows) & (b_to < C)
        b_A = gl.where(b_from >= b_to, b_A, 0.0)
        gl.store(p_A + o_A, b_A.to(DT), mask=m_rows)
        if SPLIT_A:
            gl.store(p_A + A_LOW * num_lines * C + o_A, (b_A - b_A.to(DT).to(gl.float32)).to(DT), mask=m_rows)
        gl.store(p_G + o_A, gl.where(b_from > b_to, b_G, 0.0), mask=m_rows)
        turn, item, begin, num = settle(
            turn, next_item, next_begin, next_num, next_rows, num_items, p_calm, None, p_starts, p_ends, T, NC,
            HV, C, LEAST, MOST, "any", PLACES, 1, WARPS,
        )  # fmt: skip
        n += 1
    tma.store_wait(0)


@gluon.jit
def hopper_intra_kernel(
    t_q,  # tiles [C, BK] of [B * T, H * K]
    t_k,
    t_g,  # tiles [C, BK] of [B * T, HV * K]
    p_starts,  # [num_chunks] where PLACES is "packed"
    p_ends,
    p_beta,  # [B * T, HV]
    p_sign,  # int8 [B * T, HV, K], where signs are given
    p_erase,  # [B * T, HV, K], where ERASE: the rate of each channel, and beta = 1
    p_A_log,
    p_dt_bias,
    t_keys,  # out, tiles [C, BK] of [4 * ROWS, HV * K]: q_forward, k_forward, k_back and, of calm chunks or where BOUNDED, forward
    p_A,  # out [ROWS, HV, C], first of the squares
    p_G,  # out float32 [ROWS, HV, C]
    p_rho,  # out float32 [ROWS, HV]
    p_norms,  # out float32 [3, ROWS, HV]
    p_start,  # out float32 [num_chunks, HV, BK], where BOUNDED in units, as the next
    p_end,  # out float32 [num_chunks, HV, BK]
    p_calm,  # int32 [num_chunks, HV], where not BOUNDED: whether a chunk begins calm; out: how many of its rows are calm
    num_chunks,
    ROWS,  # num_chunks * C: what is left for others has room for whole chunks
    T,
    NC,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    BK: gl.constexpr,
    C: gl.constexpr,
    GATE: gl.constexpr,
    SIGNED: gl.constexpr,  # "given", "gate" or "no"
    ERASE: gl.constexpr,
    HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    NORMALIZE: gl.constexpr,
    BETA_RANGE: gl.constexpr,
    LEVELS: gl.constexpr,  # log2 of C
    BASE: gl.constexpr,  # that of a block, where not BOUNDED; 0: borders alone
    BOUNDED: gl.constexpr,
    LEAST: gl.constexpr,  # calm rows of the chunks that are this launch's; above zero: it takes all their rows for calm
    MOST: gl.constexpr,  # and how many at most; C: all
    PLACES: gl.constexpr,  # "whole", "ragged" (T is no multiple of C) or "packed"
    SPLIT_A: gl.constexpr,  # whether what A's rounding left is written too
):
    """What of a chunk does not depend on the state."""
    ready, free = barriers(STAGES, TILES_ARRIVE, 1)
    DT: gl.constexpr = t_keys.dtype
    s_in, s_g = room(STAGES * PAIR, C, BK, DT), room(STAGES, C, BK, t_g.dtype)
    s_rooms = (room(NUM_KEYS, C, BK, DT),)
    if BOUNDED or LEAST > 0:
        s_rooms = rooms(K_INVERSE + (LEAST > 0), 1, C, BK, DT)
    GATE_BYTES: gl.constexpr = t_g.dtype.primitive_bitwidth // 8
    s_M = room(1 if BOUNDED or LEAST > 0 else BORDERS + LEVELS + (2 - BASE if BASE > 0 else 0), C, C, DT)
    s_lines = lines_apart(LINES, C)
    gl.warp_specialize(
        [
            (
                _run,
                (
                    p_beta, p_sign, p_erase, p_A_log, p_dt_bias, t_keys, p_A, p_G, p_rho, p_norms, p_start, p_end,
                    p_calm, p_starts, p_ends, s_in, s_g, s_rooms, s_M, s_lines, ready, free, num_chunks, ROWS, T, NC, scale,
                    HV, K, BK, C, GATE, SIGNED, ERASE, HAS_A_LOG, HAS_DT_BIAS, NORMALIZE, BETA_RANGE, LEVELS, BASE, BOUNDED,
                    LEAST, MOST, PLACES, SPLIT_A,
                ),
            ),
            (
                _fetch,
                (
                    t_q, t_k, t_g, p_calm, p_starts, p_ends, s_in, s_g, ready, free, num_chunks, T, NC,
                    H, HV, K, BK, C, GATE_BYTES, PLACES, LEAST, MOST,
                ),
            ),
        ],
        [FETCH_WARPS],
        [FETCH_REGISTERS],
    )  # fmt: skip
