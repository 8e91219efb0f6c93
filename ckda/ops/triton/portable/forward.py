"""The chunk form, forward: three kernels, and one between the segments of long sequences.

With gamma_i the signed product of the chunk's gates up to token i, Gamma that of the whole chunk, rho = beta / |k|^2 and S the
state at the chunk's start (ckda/ops/chunked.py has the derivation):

    A_ij = q_i^T Diag(gamma_i / gamma_j) k_j  (j <= i),     G_ij = k_i^T Diag(gamma_i / gamma_j) k_j  (j < i),
    (I + G Diag(rho)) y = |k| v - (k * gamma) S,    u = rho y,    o = (q * gamma) S + A u,
    S' = Gamma S + (k * Gamma / gamma)^T u.

k is the key as given but for a power of two (:func:`_used_norms`), and |k| = 1 here without normalisation. With separate gates
(ERASE) k_i as a row, in G and before S, is erase_i * k_i, beta is 1, and v is write * v already.

`intra_kernel` (parallel over chunks) makes from the raw inputs what does not depend on the state: the decayed q and k, A and G.
`solver_kernel` inverts I + G Diag(rho) in float32. `state_kernel` runs over the chunks of a sequence, one program a
value head and block of BV value columns. The sign needs no extra pass: it is part of gamma.

Decays are taken from the chunk's middle token a, by way of gamma_a rounded to a power of two (written gamma_a all the same): with
factors gamma_i / gamma_a and gamma_a / gamma_j bounded gates (at most e^5 a step) stay within e^81 for C = 32, and the chunk reads

    S* = gamma_a S,    r = |k| v - (k * gamma / gamma_a) S*,    S' = Gamma / gamma_a (S* + (k * gamma_a / gamma)^T u).

gamma_a and Gamma / gamma_a may be 2^-115, and a small S times that would underflow before it meets a factor of 2^115. So both are
kept in units, times STATE_UNIT, and S* (backwards Gamma / gamma_a dS) is held times its square.

Gates without a bound (BOUNDED = False) would overflow so. There every pair goes by the border between its two tokens where these
first part ways, in halves of 32, 16, 8, 4 or 2 tokens: both factors are at most one, and the pairs of one level are one product of
matrices. No factor depends on a token after i. The state is taken at the chunk's start, gamma_a = 1.
"""

import triton
import triton.language as tl

from ckda.ops.triton.tile import (
    STATE_UNIT,
    across_border,
    at_token,
    border_decay,
    bounded_decays,
    chunk_decay,
    chunk_place,
    dot,
    dot_left_split,
    dot_split,
    finite_gate,
    in_registers,
    learning_rate,
    log_gate,
    operand,
    reciprocal,
    right_of_border,
    signs_through,
    widened,
)

__all__ = [
    "carry_kernel",
    "chunk_gate",
    "head_gate",
    "intra_kernel",
    "places_kernel",
    "sequence_place",
    "solver_kernel",
    "state_kernel",
    "state_place",
]


@triton.jit
def places_kernel(
    p_cu_seqlens,  # [N + 1]
    p_starts,  # out int32 [NC] first token of each chunk
    p_ends,  # out int32 [NC] end of its tokens; its start for a chunk that nobody needs
    p_first,  # out int32 [N] first chunk of each sequence
    p_order,  # out int32 [N] the sequences, the longest first and equal ones as they lie
    p_sorted,  # out int32 [3, NC] the chunks, full ones first and those that nobody needs last; and their first tokens and ends
    p_counts,  # out int32 [2] how many of them are full, and how many are needed
    N,
    NC,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the chunks of packed sequences lie: BLOCK chunks a program, which looks at all sequences, BLOCK at a time.

    Where sequences come in the order of their lengths: BLOCK of them a program too. There are at least as many chunks as sequences.
    """
    b_slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_start = tl.zeros([BLOCK], tl.int32)
    b_end = tl.zeros([BLOCK], tl.int32)
    b_sorted = tl.zeros([BLOCK], tl.int32)  # how many of its kind are before it
    before = tl.zeros([], tl.int32)  # chunks of the sequences before
    full = tl.zeros([], tl.int32)  # and how many of them are full
    m_some = b_slot < N  # as a sequence
    b_length = tl.load(p_cu_seqlens + b_slot + 1, mask=m_some, other=0).to(tl.int32)
    b_length -= tl.load(p_cu_seqlens + b_slot, mask=m_some, other=0).to(tl.int32)
    b_rank = tl.zeros([BLOCK], tl.int32)
    for n in range(0, N, BLOCK):
        b_n = n + tl.arange(0, BLOCK)
        b_begin = tl.load(p_cu_seqlens + b_n, mask=b_n < N, other=0).to(tl.int32)
        b_stop = tl.load(p_cu_seqlens + b_n + 1, mask=b_n < N, other=0).to(tl.int32)
        b_num = (b_stop - b_begin + C - 1) // C
        b_after = before + tl.cumsum(b_num, 0)
        b_first = b_after - b_num
        tl.store(p_first + b_n, b_first, mask=(b_n < N) & (tl.program_id(0) == 0))
        m_own = (b_slot[:, None] >= b_first[None, :]) & (b_slot[:, None] < b_after[None, :])
        b_place = b_begin[None, :] + (b_slot[:, None] - b_first[None, :]) * C
        b_start += tl.sum(tl.where(m_own, b_place, 0), 1)
        b_end += tl.sum(tl.where(m_own, tl.minimum(b_place + C, b_stop[None, :]), 0), 1)
        before += tl.sum(b_num, 0)
        b_num_full = (b_stop - b_begin) // C
        b_full_before = full + tl.cumsum(b_num_full, 0) - b_num_full
        full += tl.sum(b_num_full, 0)
        b_within = b_slot[:, None] - b_first[None, :]
        b_kind_before = tl.where(
            b_within < b_num_full[None, :], b_full_before[None, :] + b_within, (b_first - b_full_before)[None, :]
        )
        b_sorted += tl.sum(tl.where(m_own, b_kind_before, 0), 1)
        b_other = (b_stop - b_begin)[None, :]
        m_equal = (b_other == b_length[:, None]) & (b_n[None, :] < b_slot[:, None])
        m_before = (b_n < N)[None, :] & ((b_other > b_length[:, None]) | m_equal)
        b_rank += tl.sum(tl.where(m_before, 1, 0), 1)
    tl.store(p_order + b_rank, b_slot, mask=m_some)
    tl.store(p_starts + b_slot, b_start, mask=b_slot < NC)
    tl.store(p_ends + b_slot, b_end, mask=b_slot < NC)
    b_sorted = tl.where(b_slot < before, tl.where(b_end - b_start == C, b_sorted, full + b_sorted), b_slot)
    tl.store(p_sorted + b_sorted, b_slot, mask=b_slot < NC)
    tl.store(p_sorted + NC + b_sorted, b_start, mask=b_slot < NC)
    tl.store(p_sorted + 2 * NC + b_sorted, b_end, mask=b_slot < NC)
    tl.store(p_counts, full)
    tl.store(p_counts + 1, before)


@triton.jit
def head_gate(p_A_log, p_dt_bias, i_hv, b_channel, K: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr):
    """The head's rate exp(A_log) [1, 1] and bias [BK, 1] of the channels."""
    b_rate = tl.full([1, 1], 1.0, tl.float32)
    b_bias = tl.zeros_like(b_channel).to(tl.float32)[:, None]
    if HAS_A_LOG:
        b_rate = tl.exp(tl.load(p_A_log + i_hv).to(tl.float32)) * b_rate
    if HAS_DT_BIAS:
        b_bias = tl.load(p_dt_bias + i_hv * K + b_channel, mask=b_channel < K, other=0.0).to(tl.float32)[:, None]
    return b_rate, b_bias


@triton.jit
def chunk_gate(
    b_g,  # [BK, C] the raw gate
    p_sign,  # int8 [B * T, HV, K], or anything where SIGNED is false
    p_A_log,  # [HV]
    p_dt_bias,  # [HV, K]
    start,  # where the chunk begins in p_sign
    o_g,  # [BK, C] the tile, from there
    m_tile,  # [BK, C]
    i_hv,
    b_channel,  # [BK]
    K: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """log2|alpha| and whether alpha < 0, of some channels of a chunk; alpha = 1 where no token lies."""
    b_rate, b_bias = head_gate(p_A_log, p_dt_bias, i_hv, b_channel, K, HAS_A_LOG, HAS_DT_BIAS)
    b_log, b_negative = log_gate(b_g.to(tl.float32), b_rate, b_bias, GATE, WIDE)
    if SIGNED:
        b_negative = tl.load(p_sign + start + o_g, mask=m_tile, other=1) < 0
    return tl.where(m_tile, b_log, 0.0), m_tile & b_negative


@triton.jit
def _squares(b_q, b_k, WIDE: tl.constexpr):
    """|q|^2 and |k|^2 [C] of some channels, the keys' in float64 where WIDE."""
    b_wide = b_k.to(tl.float64) if WIDE else b_k
    return tl.sum(b_q * b_q, 0), tl.sum(b_wide * b_wide, 0)


@triton.jit
def _all_squares(p_q, p_k, b_row, m_token, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """The same of all channels, the keys' in float64; a token's row begins at b_row. Threads sum what they have first."""
    b_q_squares = tl.zeros([BK, C], tl.float32)
    b_k_squares = tl.zeros([BK, C], tl.float64)
    for k in tl.static_range(0, K, BK):  # unrolled, so that all loads are on their way at once
        b_channel = k + tl.arange(0, BK)
        o_k = b_row[None, :] + b_channel[:, None]
        m_tile = (b_channel < K)[:, None] & m_token[None, :]
        b_q = tl.load(p_q + o_k, mask=m_tile, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_k, mask=m_tile, other=0.0).to(tl.float64)
        b_q_squares += b_q * b_q
        b_k_squares += b_k * b_k
    return tl.sum(b_q_squares, 0), tl.sum(b_k_squares, 0)


@triton.jit
def _used_norms(b_q_square, b_k_square, NORMALIZE: tl.constexpr):
    """Of each token 1 / |q|, the power of two that brings its key near length 1, and |k|^2 of the key times that power.

    Rounding a unit key would turn a repeated reflection a little at every step; a power of two changes no digit. The length
    that is left goes into the learning rate, rho = beta / |k|^2, and into the value, |k| v. Nothing is added under a root.
    """
    b_inverse = tl.zeros_like(b_q_square) + 1.0
    b_power, b_norm2 = b_inverse, b_inverse.to(b_k_square.dtype)
    if NORMALIZE:
        b_some = tl.where(b_q_square > 0, b_q_square, 1.0)
        b_inverse = tl.where(b_q_square > 0, 1.0 / tl.sqrt_rn(b_some), 0.0)
        b_some = tl.where(b_k_square > 0, b_k_square, 1.0)
        if (
            b_k_square.dtype == tl.float64
        ):  # of the square as it is, whose range float32 may lack: half of its exponent's bits
            b_exponent = -(((b_some.to(tl.int64, bitcast=True) >> 52) - 1022) >> 1).to(tl.int32)
            b_exponent = tl.maximum(tl.minimum(b_exponent, 126), -126)
            b_length = ((b_exponent + 127) << 23).to(tl.float32, bitcast=True)
        else:
            b_length = tl.exp2(tl.minimum(tl.floor(0.5 - 0.5 * tl.log2(b_some)), 126.0))
        b_power = tl.where(b_k_square > 0, b_length, 0.0)
        b_norm2 = tl.where(b_k_square > 0, b_k_square * b_power * b_power, 1.0)
    return b_inverse, b_power, b_norm2


@triton.jit
def _rates(p_beta, line, b_line, m_token, ERASE: tl.constexpr, BETA_RANGE: tl.constexpr):
    """beta [C]; 1 with separate gates."""
    b_rate = tl.where(m_token, 1.0, 0.0)
    if not ERASE:
        b_beta = tl.load(p_beta + line + b_line, mask=m_token, other=0.0).to(tl.float32)
        b_rate = tl.where(m_token, learning_rate(b_beta, BETA_RANGE), 0.0)
    return b_rate


@triton.jit
def _store_lines(
    b_rate, b_inverse, b_power, b_norm2, p_rho, p_norms, line, b_line, m_token, TOKENS, HV: tl.constexpr
):  # fmt: skip
    """What is one number a token: rho = beta / |k|^2 and the norms."""
    p_line = p_rho + line + b_line
    if b_norm2.dtype == tl.float64:  # by one step of Newton's, without the branches of a division; to 2^-44
        b_guess = reciprocal(b_norm2.to(tl.float32)).to(tl.float64)
        b_rho = b_rate * (b_guess * (2.0 - b_norm2 * b_guess))
    else:
        b_rho = b_rate / b_norm2
    tl.store(p_line, b_rho.to(tl.float32), mask=m_token)
    num_lines = tl.cast(TOKENS, tl.int64) * HV
    tl.store(p_norms + line + b_line, b_inverse, mask=m_token)
    tl.store(p_norms + num_lines + line + b_line, b_power, mask=m_token)
    tl.store(p_norms + 2 * num_lines + line + b_line, b_norm2, mask=m_token)


@triton.jit
def _unbounded_products(b_q, b_k, b_erase, b_log, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr):
    """A and G of gates without a bound, border by border (:func:`ckda.ops.triton.tile.border_decay`); signs are in q and k.

    Right of a border a key is a row of G, and takes its erase gate.
    """
    m_same = tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]
    b_A = tl.where(m_same, dot(tl.trans(b_q), b_k, DOT), 0.0)
    b_G = tl.zeros([C, C], tl.float32)
    for shift in range(LEVELS):  # not unrolled, which would spill
        b_decay = border_decay(b_log, shift, C, DOT)
        b_key = operand(b_k * tl.where(right_of_border(shift, C), b_erase, 1.0) * b_decay, DOT)
        m_pairs = across_border(shift, C)
        b_A = tl.where(m_pairs, dot(tl.trans(b_q * b_decay), b_key, DOT), b_A)
        b_G = tl.where(m_pairs, dot(tl.trans(b_key), b_key, DOT), b_G)
    return b_A, b_G


@triton.jit
def _inverse(b_N, H: tl.constexpr, LEVELS: tl.constexpr):
    """(I + N)^-1 of a strictly lower triangular N [H, H], H = 2^LEVELS, in float32.

    The diagonal blocks of size h are inverted, starting at h = 1; two neighbours and the block E below them merge exactly:
    the inverse of the pair is X - X E X. All pairs of a level merge in one product. Every intermediate is the inverse of a
    block of the matrix, never a power of N, so it is bounded where the transitions are non-expansive.
    """
    b_row, b_column = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    b_X = tl.where(b_row == b_column, 1.0, 0.0) - tl.where((b_row == b_column + 1) & (b_row % 2 == 1), b_N, 0.0)
    for level in tl.static_range(1, LEVELS):
        h = 1 << level
        m_E = (b_row // (2 * h) == b_column // (2 * h)) & (b_row % (2 * h) >= h) & (b_column % (2 * h) < h)
        b_EX = tl.dot(tl.where(m_E, b_N, 0.0), b_X, input_precision="tf32x3")
        b_X -= tl.dot(b_X, b_EX, input_precision="tf32x3")
    return b_X


@triton.jit
def _store_inverse(
    b_X, p_solver, p_solver_low, p_solver_rest, o_X, m_X, SPLIT: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """A block of the inverse: float32, or where SPLIT in three parts."""
    b_high = operand(b_X, DOT)
    tl.store(p_solver + o_X, b_high, mask=m_X)
    if SPLIT:
        b_X -= b_high.to(tl.float32)
        b_low = operand(b_X, DOT)
        tl.store(p_solver_low + o_X, b_low, mask=m_X)
        tl.store(p_solver_rest + o_X, operand(b_X - b_low.to(tl.float32), DOT), mask=m_X)


@triton.jit
def solver_kernel(
    p_G,  # float32 [B * T, HV, C] strictly lower triangular
    p_rho,  # float32 [B * T, HV]
    p_starts,
    p_ends,
    p_solver,  # out [B * T, HV, C] the inverse of I + G Diag(rho): float32, or where SPLIT its leading digits
    p_solver_low,  # out [B * T, HV, C] the next ones
    p_solver_rest,  # out [B * T, HV, C] and the last ones
    T,
    NC,
    HV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 of C / 2
    UNIT: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """UNIT (I + N)^-1, N = G Diag(rho), in float32, one chunk a program of a single warp.

    With X and Y the inverses of the two diagonal halves and E the block below, the rest is - Y E X.
    """
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    H: tl.constexpr = C // 2
    num = (end - begin).to(tl.int32)
    b_row, b_column = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    line = begin * HV + i_hv
    o_X = line * C + b_row * (HV * C) + b_column  # the upper left block
    o_low = o_X + H * HV * C  # below it
    m_X, m_Y = b_row < num, b_row + H < num
    b_rho = tl.load(p_rho + line + b_column * HV, mask=b_column < num, other=0.0)
    b_rho_Y = tl.load(p_rho + line + (b_column + H) * HV, mask=b_column + H < num, other=0.0)
    b_N = tl.load(p_G + o_X, mask=m_X, other=0.0) * b_rho
    b_E = tl.load(p_G + o_low, mask=m_Y, other=0.0) * b_rho
    b_M = tl.load(p_G + o_low + H, mask=m_Y, other=0.0) * b_rho_Y
    b_X = _inverse(b_N, H, LEVELS)
    b_Y = _inverse(b_M, H, LEVELS)
    b_EX = tl.dot(b_E, b_X, input_precision="tf32x3")
    b_below = -tl.dot(b_Y, b_EX, input_precision="tf32x3")
    _store_inverse(UNIT * b_X, p_solver, p_solver_low, p_solver_rest, o_X, m_X, SPLIT, DOT)
    _store_inverse(tl.zeros([H, H], tl.float32), p_solver, p_solver_low, p_solver_rest, o_X + H, m_X, SPLIT, DOT)
    _store_inverse(UNIT * b_below, p_solver, p_solver_low, p_solver_rest, o_low, m_Y, SPLIT, DOT)
    _store_inverse(UNIT * b_Y, p_solver, p_solver_low, p_solver_rest, o_low + H, m_Y, SPLIT, DOT)


@triton.jit
def intra_kernel(
    p_q,  # [B * T, H, K]
    p_k,  # [B * T, H, K]
    p_g,  # [B * T, HV, K]
    p_beta,  # [B * T, HV], where not ERASE
    p_sign,
    p_erase,  # [B * T, HV, K], where ERASE: the rate of each channel, and beta = 1
    p_A_log,
    p_dt_bias,
    p_starts,  # [NC] first token of each chunk, packed sequences only
    p_ends,
    p_q_forward,  # out [B * T, HV, K] q * gamma / gamma_a
    p_k_forward,  # out [B * T, HV, K] erase * k * gamma / gamma_a
    p_k_back,  # out [B * T, HV, K] k * gamma_a / gamma; k * Gamma / gamma where not BOUNDED
    p_A,  # out [B * T, HV, C]
    p_G,  # out float32 [B * T, HV, C] strictly lower
    p_rho,  # out float32 [B * T, HV]
    p_norms,  # out float32 [3, B * T, HV] 1/|q|, the power of two in the key, |k|^2 of the key as used
    p_forward,  # out [B * T, HV, K] gamma / gamma_a, where BOUNDED
    p_start,  # out float32 [B * NC, HV, K] gamma_a in units; 1 where not BOUNDED
    p_end,  # out float32 [B * NC, HV, K] Gamma / gamma_a in units; Gamma where not BOUNDED
    T,
    NC,
    TOKENS,  # B * T
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    SIGNED: tl.constexpr,
    ERASE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BETA_RANGE: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 of C
    BOUNDED: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What of a chunk does not depend on the state, BK channels at a time: wide tiles of float32 do not fit the registers."""
    i_chunk, i_hv = tl.program_id(0), tl.program_id(1)
    begin, end = chunk_place(i_chunk, p_starts, p_ends, T, NC, C, PACKED)
    b_index = tl.arange(0, C)
    m_token = b_index < (end - begin).to(tl.int32)
    line = begin * HV + i_hv  # the first token's row of [B * T, HV]
    b_line = b_index * HV
    head = (begin * H + i_hv // (HV // H)) * K  # offsets of tiles stay in 32 bits
    b_q_square = tl.zeros([C], tl.float32)
    b_k_square = tl.zeros([C], tl.float64 if WIDE else tl.float32)
    if BK < K:
        b_rate = _rates(p_beta, line, b_line, m_token, ERASE, BETA_RANGE)  # before anything waits
        if NORMALIZE:
            b_q_square, b_k_square = _all_squares(p_q + head, p_k + head, b_index * (H * K), m_token, K, BK, C)
        b_inverse, b_power, b_norm2 = _used_norms(b_q_square, b_k_square, NORMALIZE)
        _store_lines(b_rate, b_inverse, b_power, b_norm2, p_rho, p_norms, line, b_line, m_token, TOKENS, HV)
    b_A = tl.zeros([C, C], tl.float32)
    b_G = tl.zeros([C, C], tl.float32)
    for k in range(0, K, BK):
        b_channel = k + tl.arange(0, BK)
        m_channel = b_channel < K
        m_tile = m_channel[:, None] & m_token[None, :]
        o_g = b_line[None, :] * K + b_channel[:, None]
        o_k = b_index[None, :] * (H * K) + b_channel[:, None]
        b_q = tl.load(p_q + head + o_k, mask=m_tile, other=0.0)  # all loads before the first reduction
        b_k = tl.load(p_k + head + o_k, mask=m_tile, other=0.0)
        b_g = tl.load(p_g + line * K + o_g, mask=m_tile, other=0.0)
        b_q = widened(in_registers(b_q, m_tile), C, DOT)
        b_k = widened(in_registers(b_k, m_tile), C, DOT)
        b_g = widened(in_registers(finite_gate(b_g, GATE), m_tile), C, DOT)
        if BK >= K:
            if NORMALIZE:
                b_q_square, b_k_square = _squares(b_q, b_k, WIDE)
            b_inverse, b_power, b_norm2 = _used_norms(b_q_square, b_k_square, NORMALIZE)
        b_q = operand(b_q * (b_inverse * scale)[None, :], DOT).to(tl.float32)
        b_k *= b_power[None, :]
        b_log, b_negative = chunk_gate(
            b_g, p_sign, p_A_log, p_dt_bias, line * K, o_g, m_tile, i_hv, b_channel,
            K, GATE, SIGNED, HAS_A_LOG, HAS_DT_BIAS, WIDE,
        )  # fmt: skip
        if BK >= K:
            m_line = m_token & (k == 0)
            b_rate = _rates(p_beta, line, b_line, m_line, ERASE, BETA_RANGE)
            _store_lines(b_rate, b_inverse, b_power, b_norm2, p_rho, p_norms, line, b_line, m_line, TOKENS, HV)
        b_erase = tl.full([1, 1], 1.0, tl.float32)
        if ERASE:
            b_erase = tl.load(p_erase + line * K + o_g, mask=m_tile, other=0.0).to(tl.float32)
        if BOUNDED:
            b_forward, b_back, b_start, b_end = bounded_decays(b_log, b_negative, C, DOT, WIDE)
            tl.store(p_forward + line * K + o_g, operand(b_forward, DOT), mask=m_tile)
            b_query, b_row, b_key = b_q * b_forward, b_k * b_erase * b_forward, b_k * b_back
            b_A += dot(tl.trans(b_query), b_key, DOT)
            b_G += dot(tl.trans(b_row), b_key, DOT)
        else:
            b_sign = signs_through(b_negative, C, DOT)
            b_q, b_k = b_q * b_sign, b_k * b_sign  # a pair's sign is the product of both
            b_more, b_more_keys = _unbounded_products(b_q, b_k, b_erase, b_log, C, LEVELS, DOT)
            b_A += b_more
            b_G += b_more_keys
            b_gamma = chunk_decay(b_log, False, C, DOT)
            b_query, b_row = b_q * b_gamma, b_k * b_erase * b_gamma
            b_last = at_token(b_sign, C - 1, C)
            b_key = b_k * chunk_decay(b_log, True, C, DOT) * b_last[:, None]
            b_end = at_token(b_gamma, C - 1, C) * b_last
            b_start = tl.full([BK], 1.0, tl.float32)
        tl.store(p_q_forward + line * K + o_g, operand(b_query, DOT), mask=m_tile)
        tl.store(p_k_forward + line * K + o_g, operand(b_row, DOT), mask=m_tile)
        tl.store(p_k_back + line * K + o_g, operand(b_key, DOT), mask=m_tile)
        o_slot = (i_chunk * HV + i_hv).to(tl.int64) * K + b_channel
        tl.store(p_start + o_slot, b_start, mask=m_channel)
        tl.store(p_end + o_slot, b_end, mask=m_channel)
    o_A = b_line[:, None] * C + b_index[None, :]
    b_A = tl.where(b_index[:, None] >= b_index[None, :], b_A, 0.0)
    tl.store(p_A + line * C + o_A, operand(b_A, DOT), mask=m_token[:, None])
    tl.store(p_G + line * C + o_A, tl.where(b_index[:, None] > b_index[None, :], b_G, 0.0), mask=m_token[:, None])


@triton.jit
def sequence_place(
    p_cu_seqlens, p_first, i_n, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, C: tl.constexpr, PACKED: tl.constexpr
):
    """Of a sequence, or of a segment of one: its first token and end, its first chunk, and how many chunks it has."""
    if PACKED:
        begin = tl.load(p_cu_seqlens + i_n).to(tl.int64)
        end = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
        first = tl.load(p_first + i_n).to(tl.int64)
        num = ((end - begin + C - 1) // C).to(tl.int32)
    else:
        i_b, i_segment = i_n // NUM_SEGMENTS, FIRST_SEGMENT + (i_n % NUM_SEGMENTS).to(tl.int32)
        num = tl.minimum(SEGMENT, NC - i_segment * SEGMENT)
        first = i_b * NC + i_segment * SEGMENT
        begin, end = i_b * T + i_segment * SEGMENT * C, (i_b + 1) * T
    return begin, end, first, num


@triton.jit
def state_place(HV: tl.constexpr, NV: tl.constexpr):
    """A program's block of values, value head and sequence: the blocks of a head are neighbours, then the heads of a sequence.

    All on the first axis of the grid, for the others end at 65,535.
    """
    i = tl.program_id(0).to(tl.int64)
    return i % NV, (i // NV) % HV, i // (NV * HV)


@triton.jit
def state_kernel(
    p_v,  # [B * T, HV, V]
    p_q_forward,  # [B * T, HV, K]
    p_k_forward,
    p_k_back,
    p_A,  # [B * T, HV, C]
    p_solver,  # [B * T, HV, C]
    p_solver_low,
    p_solver_rest,
    p_rho,  # [B * T, HV]
    p_norm2,  # [B * T, HV]
    p_start,  # [B * NC, HV, K]
    p_end,
    p_initial,  # float32 [N, HV, K, V]
    p_cu_seqlens,  # [N + 1], packed sequences only
    p_first,  # [N] first chunk of each sequence, packed only
    p_o,  # out [B * T, HV, V]; this and the next three where SUMMARY is "none"
    p_y,  # out [B * T, HV, V]
    p_y_low,  # out [B * T, HV, V] what its rounding left
    p_states,  # out [B * NC, HV, V, K] gamma_a times the state at each chunk's start, in units twice
    p_final,  # out float32 [N, HV, K, V], where STORE_FINAL
    T,
    NC,
    SEGMENT,  # chunks of a segment
    FIRST_SEGMENT,  # of each sequence that is run
    NUM_SEGMENTS,  # that are run
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    SUMMARY: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The state from chunk to chunk, transposed [BV, BK], and the outputs.

    A segment of a sequence is one row of p_initial and p_final. SUMMARY: only the final state is wanted, and "transition" starts
    from the identity with no values (V = K), which gives the segment's K x K transition; "offset" starts as "none" does.
    """
    i_v, i_hv, i_n = state_place(HV, (V + BV - 1) // BV)
    begin, end, first, num = sequence_place(
        p_cu_seqlens, p_first, i_n, T, NC, SEGMENT, FIRST_SEGMENT, NUM_SEGMENTS, C, PACKED
    )
    b_index = tl.arange(0, C)
    b_channel = tl.arange(0, BK)
    b_value = i_v * BV + tl.arange(0, BV)
    m_channel, m_value = b_channel < K, b_value < V
    m_state = m_value[:, None] & m_channel[None, :]
    o_state = (i_n * HV + i_hv) * (K * V) + b_channel[None, :] * V + b_value[:, None]
    b_S = tl.zeros([BV, BK], tl.float32)
    if SUMMARY == "transition":
        b_S += tl.where((b_channel[None, :] == b_value[:, None]) & m_state, 1.0, 0.0)
    elif HAS_INITIAL:
        b_S += tl.load(p_initial + o_state, mask=m_state, other=0.0)
    b_line = b_index * HV
    b_key_offset = b_line[:, None] * K + b_channel[None, :]
    b_value_offset = b_line[None, :] * V + b_value[:, None]
    b_square_offset = b_line[:, None] * C + b_index[None, :]
    b_slot_offset = b_channel[None, :] + b_value[:, None] * K
    o_decay = (first * HV + i_hv) * K + b_channel
    unit: tl.constexpr = STATE_UNIT if BOUNDED and DOT != "fp16" else 1.0
    part: tl.constexpr = 1.0 / (unit * unit)
    if BOUNDED:  # the loop carries S*
        b_S *= (tl.load(p_start + o_decay, mask=m_channel & (num > 0), other=1.0 / unit) * unit)[None, :]
    for c in range(num):
        line = (begin + c * C) * HV + i_hv
        m_token = b_index < (end - begin - c * C).to(tl.int32)
        m_key = m_token[:, None] & m_channel[None, :]
        m_out = m_value[:, None] & m_token[None, :]
        o_key = line * K
        o_value = line * V
        o_square = line * C
        b_k_forward = tl.load(p_k_forward + o_key + b_key_offset, mask=m_key, other=0.0)
        b_k_back = tl.load(p_k_back + o_key + b_key_offset, mask=m_key, other=0.0)
        b_solver = tl.load(p_solver + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver_low = tl.load(p_solver_low + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_solver_rest = tl.load(p_solver_rest + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
        b_rho = tl.load(p_rho + line + b_line, mask=m_token, other=0.0)
        b_end = tl.load(p_end + o_decay, mask=m_channel, other=1.0)
        o_decay += HV * K
        b_next = b_end
        if BOUNDED:  # the next chunk's start, ahead of its use; apart, for the product of both might underflow
            b_next = tl.load(p_start + o_decay, mask=m_channel & (c + 1 < num), other=1.0 / unit)
        b_rest = dot_left_split(b_S, tl.trans(b_k_forward), DOT) * -part
        if SUMMARY != "transition":
            b_length = tl.sqrt(tl.load(p_norm2 + line + b_line, mask=m_token, other=1.0))
            b_v = tl.load(p_v + o_value + b_value_offset, mask=m_out, other=0.0).to(tl.float32)
            b_rest += b_v * b_length[None, :]
        b_y = dot_split(b_rest, tl.trans(b_solver), tl.trans(b_solver_low), tl.trans(b_solver_rest), DOT)
        b_u = b_y * b_rho[None, :]
        if SUMMARY == "none":
            o_slot = ((first + c) * HV + i_hv) * (K * V)
            tl.store(p_states + o_slot + b_slot_offset, operand(b_S, DOT), mask=m_state)
            b_y_high = operand(b_y, DOT)
            tl.store(p_y + o_value + b_value_offset, b_y_high, mask=m_out)
            b_y_low = operand(b_y - b_y_high.to(tl.float32), DOT)
            tl.store(p_y_low + o_value + b_value_offset, b_y_low, mask=m_out)
            b_q_forward = tl.load(p_q_forward + o_key + b_key_offset, mask=m_key, other=0.0)
            b_A = tl.load(p_A + o_square + b_square_offset, mask=m_token[:, None], other=0.0)
            b_o = dot(b_S, tl.trans(b_q_forward), DOT) * part + dot_left_split(b_u, tl.trans(b_A), DOT)
            tl.store(p_o + o_value + b_value_offset, b_o, mask=m_out)
        if BOUNDED:
            b_S = (b_S * part + dot_left_split(b_u, b_k_back, DOT)) * b_end[None, :] * b_next[None, :]
        else:
            b_S = b_S * b_end[None, :] + dot_left_split(b_u, b_k_back, DOT)
    if STORE_FINAL:
        tl.store(p_final + o_state, b_S, mask=m_state)


@triton.jit
def carry_kernel(
    p_transitions,  # float32 [B, NUM_SEGMENTS - 2, HV, K, K] of the segments but the first and the last
    p_offsets,  # float32 [B, NUM_SEGMENTS - 1, HV, K, V] what each segment but the last adds; the first one's is its end
    p_given,  # float32 [B, HV, K, V], where HAS_GIVEN
    p_carried,  # out float32 [B, NUM_SEGMENTS, HV, K, V]
    NUM_SEGMENTS,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states that the segments begin with, one block of values of a head a program.

    REVERSE: the gradients of the states that they end with, by the transposed transitions, from the last segment to the first; the
    offsets then are those of all but the first.
    """
    i_v, i_hv, i_b = state_place(HV, (V + BV - 1) // BV)
    b_row, b_inner = tl.arange(0, BK), tl.arange(0, 16)
    b_value = i_v * BV + tl.arange(0, BV)
    m_state = (b_row < K)[:, None] & (b_value < V)[None, :]
    o_state = b_row[:, None] * V + b_value[None, :]
    m_inner = (b_value < V)[None, :]
    o_inner = b_inner[:, None] * V + b_value[None, :]
    b_S = tl.zeros([BK, BV], tl.float32)
    if HAS_GIVEN:
        b_S += tl.load(p_given + (i_b * HV + i_hv) * (K * V) + o_state, mask=m_state, other=0.0)
    last = NUM_SEGMENTS - 1
    place = i_b * NUM_SEGMENTS + (last if REVERSE else 0)
    tl.store(p_carried + (place * HV + i_hv) * (K * V) + o_state, b_S, mask=m_state)
    for step in range(last):
        segment = last - 1 - step if REVERSE else step
        b_S = tl.load(p_offsets + ((i_b * last + segment) * HV + i_hv) * (K * V) + o_state, mask=m_state, other=0.0)
        if step > 0:
            tl.debug_barrier()  # what the last step has written is read by others
            o_last = (place * HV + i_hv) * (K * V)
            o_transition = ((i_b * (last - 1) + (segment if REVERSE else segment - 1)) * HV + i_hv) * (K * K)
            for k in range(0, K, 16):
                m_k = k + b_inner < K
                b_last = tl.load(p_carried + o_last + k * V + o_inner, mask=m_k[:, None] & m_inner, other=0.0)
                o_M = b_row[:, None] * (1 if REVERSE else K) + (k + b_inner)[None, :] * (K if REVERSE else 1)
                b_M = tl.load(p_transitions + o_transition + o_M, mask=(b_row < K)[:, None] & m_k[None, :], other=0.0)
                b_S += tl.dot(b_M, b_last, input_precision="ieee")
        place = i_b * NUM_SEGMENTS + (segment if REVERSE else step + 1)
        tl.store(p_carried + (place * HV + i_hv) * (K * V) + o_state, b_S, mask=m_state)
