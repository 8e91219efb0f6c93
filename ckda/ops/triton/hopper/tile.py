"""What the kernels for Hopper are made of: layouts, products that are begun and awaited later, room in shared memory, barriers.

Heads have K channels and V values, tiles BK >= K and BV >= V of them, powers of two: what the tensor memory accelerator fetches
beyond a head's width is zero, and what it would store there is left out. DT is the dtype of operands, bfloat16 or float16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ckda.ops.triton.hopper import WARP_ROWS
from ckda.ops.triton.tile import ROUND

__all__ = [
    "AFTER",
    "A_LOW",
    "BORDERS",
    "DT_BYTES",
    "FETCH_REGISTERS",
    "FETCH_WARPS",
    "FORWARD",
    "K_BACK",
    "K_FORWARD",
    "LINES_ARRIVE",
    "NUM_KEYS",
    "Q_FORWARD",
    "SOLVER",
    "SOLVER_LOW",
    "SOLVER_REST",
    "THROUGH",
    "TILES_ARRIVE",
    "USED_ARRIVE",
    "A",
    "across_border",
    "as_float",
    "as_rounded",
    "ask",
    "barriers",
    "block_decays",
    "by_pairs",
    "by_rows",
    "by_warps",
    "calm_range",
    "channel_tile",
    "chunk_place",
    "clear_behind",
    "fetch_layout",
    "fetch_state",
    "fetch_tile",
    "head_gate",
    "held_log",
    "left_operand",
    "lines",
    "lines_apart",
    "no_weaker",
    "plus",
    "product",
    "rest",
    "room",
    "room_for_one",
    "rooms",
    "rounded",
    "send_state",
    "send_tile",
    "settle",
    "span_sums",
    "store_spans",
    "tile_layout",
    "times",
    "turns",
    "warps_of",
]

DT_BYTES = gl.constexpr(2)
# parts of t_keys and t_squares, each of ROWS rows: KEYS, SQUARES and A_low of ckda/ops/triton/plan.py
Q_FORWARD, K_FORWARD, K_BACK, FORWARD, NUM_KEYS = (gl.constexpr(i) for i in range(5))
A, SOLVER, SOLVER_LOW, SOLVER_REST, A_LOW = (gl.constexpr(i) for i in range(5))
# the matrices of `store_spans`: logs through a token, after it, and from here on a matrix for the borders of each level; then,
# where there are blocks, those of a token's block through it and through the block's middle
THROUGH, AFTER, BORDERS = (gl.constexpr(i) for i in range(3))
FETCH_WARPS = gl.constexpr(1)  # that fetch the tiles ahead, beside those that compute
FETCH_REGISTERS = gl.constexpr(
    24
)  # a thread of theirs, the fewest that can be set: the warps that compute get the others
# arrivals that a barrier waits for: the accelerator's bytes are one; where lines come too, so are the copies of 32 threads
TILES_ARRIVE, LINES_ARRIVE = gl.constexpr(1), gl.constexpr(33)
USED_ARRIVE = gl.constexpr(1)  # that tiles are used up is said once, by each part of a program that uses them
# by how much, as a log2, a calm chunk decays at most: decays from the chunk's start, and their inverses, then have the range of
# operands
CALM_BF16, CALM_FP16 = gl.constexpr(100.0), gl.constexpr(4.0)
AHEAD = gl.constexpr(64)  # turns that a program looks at together, where it skips those of another launch
LEAST_LOG = gl.constexpr(-256.0)  # the log2 of a decay that is zero in float32, and that float16 holds


@gluon.constexpr_function
def tile_layout(*shape_and_dtype):
    """A tile [rows, columns] in shared memory, or [1, rows, columns] of one head."""
    *shape, dtype = shape_and_dtype
    return gl.NVMMASharedLayout.get_default_for(shape, dtype)


@gluon.constexpr_function
def product(rows, columns):
    """The layout of a product [rows, columns], WARP_ROWS rows a warp."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[rows // WARP_ROWS, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def left_operand(rows, columns):
    """The layout of the left operand of such a product."""
    return gl.DotOperandLayout(operand_index=0, parent=product(rows, columns), k_width=2)


@gluon.constexpr_function
def by_pairs(BK):
    """The layout of a product of tokens with tokens [C, C]: too small for Hopper's instruction."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, BK // WARP_ROWS // 2], instr_shape=[16, 8])


@gluon.constexpr_function
def by_rows(BK, V):
    """The layout of a tile [C, V] whose rows are summed: every row within a warp."""
    return gl.BlockedLayout([1, V * 16 // BK], [512 // BK, BK // 16], [BK // WARP_ROWS, 1], [1, 0])


@gluon.constexpr_function
def by_warps(C, BK):
    """The layout of a product [C, C] that every warp has all of."""
    return gl.BlockedLayout([1, C], [32, 1], [BK // WARP_ROWS, 1], [1, 0])


@gluon.constexpr_function
def fetch_layout():
    """The layout of a line in the warp that fetches."""
    return gl.BlockedLayout([1], [32], [FETCH_WARPS.value], [0])


@gluon.constexpr_function
def ahead_layout(warps):
    """The layout of AHEAD turns of which every warp has all."""
    return gl.BlockedLayout([AHEAD.value // 32], [32], [warps], [0])


@gluon.constexpr_function
def warps_of(BK):
    """The warps that compute a product of that many rows."""
    return BK // WARP_ROWS


@gluon.constexpr_function
def by_heads(t_x):
    """Whether the tiles are of [heads, rows, width]: else of [rows, heads * width], which takes fewer instructions."""
    return len(t_x.block_shape) == 3


@gluon.jit
def _one_head(t_x, s_x):
    """A tile in shared memory as the accelerator sees it where tiles are of heads."""
    return s_x._reinterpret(s_x.dtype, [1, s_x.shape[0], s_x.shape[1]], t_x.layout)


@gluon.jit
def fetch_tile(t_x, head, row, column, width: gl.constexpr, bar, s_x):
    """A tile of a head of that width on its way into shared memory."""
    if by_heads(t_x):
        tma.async_copy_global_to_shared(t_x, [head, row, column], bar, _one_head(t_x, s_x))
    else:
        tma.async_copy_global_to_shared(t_x, [row, head * width + column], bar, s_x)


@gluon.jit
def send_tile(t_x, head, row, column, width: gl.constexpr, s_x):
    """A tile of a head of that width on its way out."""
    if by_heads(t_x):
        tma.async_copy_shared_to_global(t_x, [head, row, column], _one_head(t_x, s_x))
    else:
        tma.async_copy_shared_to_global(t_x, [row, head * width + column], s_x)


@gluon.jit
def fetch_state(t_x, item, row, column, height: gl.constexpr, bar, s_x):
    """A tile of a state of that many values on its way into shared memory."""
    if by_heads(t_x):
        tma.async_copy_global_to_shared(t_x, [item, row, column], bar, _one_head(t_x, s_x))
    else:
        tma.async_copy_global_to_shared(t_x, [item * height + row, column], bar, s_x)


@gluon.jit
def send_state(t_x, item, row, column, height: gl.constexpr, s_x):
    """A tile of a state of that many values on its way out."""
    if by_heads(t_x):
        tma.async_copy_shared_to_global(t_x, [item, row, column], _one_head(t_x, s_x))
    else:
        tma.async_copy_shared_to_global(t_x, [item * height + row, column], s_x)


@gluon.jit
def rounded(b_x, DT: gl.constexpr):
    """x as an operand, two numbers an instruction."""
    if gl.float16 == DT:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=gl.bfloat16, is_pure=True, pack=2
        )


@gluon.jit
def as_float(b_x):
    """An operand's tile in float32, two numbers at a time: the compiler would take them apart first."""
    if gl.bfloat16 == b_x.dtype:
        return gl.inline_asm_elementwise(
            "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;}",
            "=r,=r,r",
            [b_x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return b_x.to(gl.float32)


@gluon.jit
def as_rounded(b_x, DT: gl.constexpr):
    """x as rounded, in float32: from the two numbers that :func:`rounded` makes at once, which stay as they are."""
    if gl.float16 == DT:
        return rounded(b_x, DT).to(gl.float32)
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b32 h; cvt.rn.bf16x2.f32 h, $3, $2; shl.b32 $0, h, 16; and.b32 $1, h, 0xffff0000;}",
            "=r,=r,r,r",
            [b_x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def rest(b_x, b_high):
    """What the rounding of x, which is high, left, as an operand."""
    return rounded(b_x - as_rounded(b_x, b_high.dtype), b_high.dtype)


@gluon.jit
def held_log(b_log, DT: gl.constexpr):
    """log2|alpha| as operands hold it: float16 ends at 65504. NaN stays NaN."""
    if gl.float16 == DT:
        return gl.where(b_log < LEAST_LOG, LEAST_LOG, b_log)
    else:
        return b_log


@gluon.jit
def times(b_a, s_b, rows: gl.constexpr, columns: gl.constexpr):
    """a b [rows, columns], begun."""
    b_zero = gl.zeros([rows, columns], gl.float32, product(rows, columns))
    b_left = gl.convert_layout(b_a, left_operand(rows, columns))
    return warpgroup_mma(b_left, s_b, b_zero, use_acc=False, is_async=True)


@gluon.jit
def plus(b_sum, b_a, s_b, rows: gl.constexpr, columns: gl.constexpr):
    """sum + a b [rows, columns], begun."""
    return warpgroup_mma(gl.convert_layout(b_a, left_operand(rows, columns)), s_b, b_sum, is_async=True)


@gluon.jit
def room(n: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """Room for n tiles."""
    return gl.allocate_shared_memory(dtype, [n, rows, columns], tile_layout(rows, columns, dtype))


@gluon.jit
def room_for_one(rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """Room for one tile."""
    return room(1, rows, columns, dtype).index(0)


@gluon.jit
def rooms(n: gl.constexpr, tiles: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """n rooms apart from each other, each for some tiles. Between two stores into one room, whichever its tiles, the compiler sets
    a barrier; between stores into rooms apart it does not."""
    apart = (room(tiles, rows, columns, dtype),)
    for _ in gl.static_range(n - 1):
        apart = apart + (room(tiles, rows, columns, dtype),)  # type: ignore[assignment]  # noqa: RUF005
    return apart


@gluon.jit
def lines_apart(n: gl.constexpr, length: gl.constexpr):
    """The same of lines, one each."""
    apart = (lines(1, length).index(0),)
    for _ in gl.static_range(n - 1):
        apart = apart + (lines(1, length).index(0),)  # type: ignore[assignment]  # noqa: RUF005
    return apart


@gluon.jit
def lines(n: gl.constexpr, length: gl.constexpr):
    """Room for n lines of float32: one number a token, or a channel."""
    return gl.allocate_shared_memory(gl.float32, [n, length], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_spans(s_M, b_from, b_to, LEVELS: gl.constexpr, BASE: gl.constexpr, BLOCKS: gl.constexpr):
    """The matrices [C, C] by which logs are summed: through token i, after it, with BLOCKS within its block of 2^BASE, and to or
    from the borders of halves of 2^n tokens, n >= BASE.

    See `chunk_decay` and `border_decay` in ckda/ops/triton/tile.py.
    """
    DT: gl.constexpr = s_M.dtype
    s_M.index(THROUGH).store(gl.where(b_from <= b_to, 1.0, 0.0).to(DT))
    s_M.index(AFTER).store(gl.where(b_from > b_to, 1.0, 0.0).to(DT))
    if BLOCKS:
        m_block = (b_from >> BASE) == (b_to >> BASE)
        s_M.index(BORDERS + LEVELS - BASE).store(gl.where(m_block & (b_from <= b_to), 1.0, 0.0).to(DT))
        s_M.index(BORDERS + LEVELS - BASE + 1).store(
            gl.where(m_block & (b_from % (1 << BASE) < (1 << BASE) // 2), 1.0, 0.0).to(DT)
        )
    for shift in gl.static_range(BASE, LEVELS):
        m_right = (b_to >> shift) % 2 == 1
        m_between = ((b_from >> shift) == (b_to >> shift)) & (m_right == (b_from <= b_to))
        s_M.index(BORDERS + shift - BASE).store(gl.where(m_between, 1.0, 0.0).to(DT))


@gluon.jit
def across_border(b_row, b_column, shift):
    """The pairs (i, j) across the borders of halves of 2^shift tokens."""
    return ((b_row >> shift) % 2 == 1) & ((b_row >> shift) == (b_column >> shift) + 1)


@gluon.jit
def span_sums(b_high, b_low, s_M, rows: gl.constexpr, columns: gl.constexpr):
    """(high + low) M, begun."""
    return plus(times(b_high, s_M, rows, columns), b_low, s_M, rows, columns)


@gluon.jit
def no_weaker(b_high, b_low):
    """high + low, or -28 (0xC1E0) where high is less: two numbers of bfloat16 an instruction. NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 least, same; mov.b32 least, 0xC1E0C1E0; max.NaN.bf16x2 $0, $2, least; "
        "set.eq.bf16x2.bf16x2 same, $0, $2; mul.bf16x2 $1, $3, same;}",
        "=&r,=&r,r,r",
        [b_high, b_low],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def block_decays(b_high, b_low, s_block, s_middle, BK: gl.constexpr, C: gl.constexpr):
    """|gamma_i / gamma_m| and its inverse [BK, C], m the middle of i's block: a pair's decay in one block is a product of two.
    high + low is log2|alpha|.

    As `bounded_decays` in ckda/ops/triton/tile.py: gamma_m is rounded to a power of two, so that later tokens change no digit. In
    blocks of 8 tokens bfloat16 has the range for gates of at least 2^-28, and weaker ones count as that: what they let through is
    less than float32's rounding of what they take away.
    """
    b_high, b_low = no_weaker(b_high, b_low)
    b_cum = span_sums(b_high, b_low, s_block, BK, C)
    b_middle = span_sums(b_high, b_low, s_middle, BK, C)
    b_cum, b_middle = warpgroup_mma_wait(0, deps=[b_cum, b_middle])
    b_round, b_middle = b_cum + ROUND, b_middle + ROUND
    b_broken = b_cum - (b_round - ROUND)
    b_shift = (b_round.to(gl.int32, bitcast=True) - b_middle.to(gl.int32, bitcast=True)) << 23
    b_forward = (gl.exp2(b_broken).to(gl.int32, bitcast=True) + b_shift).to(gl.float32, bitcast=True)
    b_back = (gl.exp2(-b_broken).to(gl.int32, bitcast=True) - b_shift).to(gl.float32, bitcast=True)
    return b_forward, b_back


@gluon.jit
def calm_range(DT: gl.constexpr):
    """The log2 of how much a calm chunk decays at most."""
    if gl.float16 == DT:
        return CALM_FP16
    else:
        return CALM_BF16


@gluon.jit
def chunk_place(chunk, p_starts, p_ends, T, NC, C: gl.constexpr, PLACES: gl.constexpr):
    """The first token of a chunk in [B * T], and how many it has: C where PLACES is "whole"."""
    if PLACES == "packed":
        begin = gl.load(p_starts + chunk).to(gl.int32)
        num = gl.load(p_ends + chunk).to(gl.int32) - begin
    elif PLACES == "whole":
        begin, num = chunk * C, C
    else:
        at = chunk % NC * C
        begin = chunk // NC * T + at
        num = gl.minimum(T - at, C)
    return begin, num


@gluon.jit
def turns(
    num_chunks, p_counts, T, NC, HV: gl.constexpr, C: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """The first and the end of the turns in which a launch takes its items: chunks that are "full", "broken" or any, of all heads
    and halves. Where sequences are packed and p_counts is given, full chunks come first and those that nobody needs last."""
    first, end = 0, num_chunks
    if p_counts is not None:
        if WHICH == "broken":
            first = gl.load(p_counts)
        end = gl.load(p_counts + (0 if WHICH == "full" else 1))
    elif WHICH == "full":
        end = num_chunks // NC * (T // C)
    elif WHICH == "broken":
        end = num_chunks // NC
    return first * (HV * HALVES), end * (HV * HALVES)


@gluon.jit
def ask(
    turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
    HV: gl.constexpr, C: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """The item of a turn, where its chunk lies, and how many of its rows are calm where that matters; beyond the end: anything.

    These are loads: asked some time before :func:`settle` looks at them, they are not waited for.
    """
    ITEMS: gl.constexpr = HV * HALVES
    at = gl.maximum(gl.minimum(turn, end - 1), 0)
    place = at // ITEMS
    chunk, item = place, turn
    if p_sorted is not None:
        chunk = gl.load(p_sorted + place)
        item = chunk * ITEMS + at % ITEMS
    elif WHICH == "full" and PLACES == "ragged":
        chunk = place // (T // C) * NC + place % (T // C)
        item = chunk * ITEMS + at % ITEMS
    elif WHICH == "broken" and PLACES == "ragged":
        chunk = place * NC + NC - 1
        item = chunk * ITEMS + at % ITEMS
    begin, num = chunk_place(place if PLACES == "packed" else chunk, p_starts, p_ends, T, NC, C, PLACES)
    if WHICH == "full":
        num = C
    rows = 0
    if LEAST > 0 or MOST < C:
        rows = gl.load(p_calm + (chunk * ITEMS + at % ITEMS) // HALVES)
    return item, begin, num, rows


@gluon.jit
def settle(
    turn, item, begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
    HV: gl.constexpr, C: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr,
    HALVES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The first turn of this program, from this one on, whose chunk is this launch's, as LEAST to MOST of its rows are calm; its
    item, and where the chunk lies. Beyond the end: anything. What :func:`ask` found for the turn is given.

    A program may have a hundred turns of which none is its launch's, so it looks at AHEAD of them together, each warp by itself.
    """
    if LEAST > 0 or MOST < C:  # noqa: SIM102
        if (turn < end) & ((rows < LEAST) | (rows > MOST)):
            turn += gl.num_programs(0)
            b_ahead = gl.arange(0, AHEAD, ahead_layout(WARPS))
            found = AHEAD
            while found == AHEAD:
                b_turn = turn + b_ahead * gl.num_programs(0)
                _, _, _, b_rows = ask(
                    b_turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
                )
                m_other = (b_turn < end) & ((b_rows < LEAST) | (b_rows > MOST))
                found = gl.min(gl.where(m_other, AHEAD, b_ahead), 0)
                turn += found * gl.num_programs(0)
            item, begin, num, _ = ask(
                turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
            )
    return turn, item, begin, num


@gluon.jit
def clear_behind(s_tiles, first, end: gl.constexpr, num, LAYOUT: gl.constexpr, PLACES: gl.constexpr):
    """Zero in some tiles [C, columns] what lies behind a sequence's end: it is another one's, and nothing of it may be seen, not
    even that it is NaN. Few chunks have such tokens; the others need no masks then."""
    if PLACES != "whole":
        C: gl.constexpr = s_tiles.shape[1]
        if num < C:
            m_row = (gl.arange(0, C, gl.SliceLayout(1, LAYOUT)) < num)[:, None]
            for i in gl.static_range(end):
                s_tile = s_tiles.index(first + i)
                s_tile.store(gl.where(m_row, s_tile.load(LAYOUT), 0.0))
            fence_async_shared()
            gl.thread_barrier()


@gluon.jit
def channel_tile(
    p_x, begin, num, i_hv, column, other, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, HV: gl.constexpr, PLACES: gl.constexpr
):  # fmt: skip
    """[BK, C] of [B * T, HV, K]: a chunk's tokens, channels from `column` on, without the accelerator; `other` beyond the ends."""
    b_token = gl.arange(0, C, gl.SliceLayout(0, product(BK, C)))[None, :]
    b_channel = gl.arange(0, BK, gl.SliceLayout(1, product(BK, C)))[:, None]
    p_x += (gl.cast(begin, gl.int64) * HV + i_hv) * K  # offsets in a tile stay in 32 bits
    o_x = b_token * (HV * K) + b_channel + column
    if PLACES == "whole" and K == BK:
        return gl.load(p_x + o_x)
    else:
        return gl.load(p_x + o_x, mask=(b_token < num) & (b_channel < K), other=other)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr, USERS: gl.constexpr):
    """For each stage: whether its tiles have come (that many arrivals, and the bytes), and whether all users are done with them."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=ARRIVALS)
        mbarrier.init(free.index(s), count=USED_ARRIVE * USERS)
    fence_async_shared()
    return ready, free


@gluon.jit
def head_gate(
    p_A_log, p_dt_bias, i_hv, column,
    K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
):  # fmt: skip
    """The head's rate exp(A_log) [1, 1] and bias [BK, 1] of the channels from `column` on."""
    by_channel: gl.constexpr = gl.SliceLayout(1, product(BK, C))
    b_rate = gl.full([1, 1], 1.0, gl.float32, product(BK, C))
    b_bias = gl.zeros([BK], gl.float32, by_channel)[:, None]
    if HAS_A_LOG:
        b_rate *= gl.exp(gl.load(p_A_log + i_hv).to(gl.float32))
    if HAS_DT_BIAS:
        b_channel = gl.arange(0, BK, by_channel)
        b_bias += gl.load(p_dt_bias + i_hv * K + column + b_channel, mask=b_channel < K, other=0.0).to(gl.float32)[
            :, None
        ]
    return b_rate, b_bias
