"""What every kernel is made of: where a chunk lies, norm, gate, cumulative decay, products in the right precision.

Names in the kernels: b_ a tile in registers, p_ pointers, o_ offsets, m_ a mask; i_ an index of this program. A tile is
[BK, C] or [BV, C]: the channels of one value head by C tokens, BK >= K and BV >= V powers of two. Channels come first so that the
large products have at least 64 rows, the height of Hopper's matrix instruction, and so that one product's accumulators
are the next one's left operand without leaving the registers.

Two precisions. With bfloat16 inputs logs and their sums are float32 and products take bfloat16 operands, accumulated in float32;
what is repeated from chunk to chunk is kept to 16 bits by splitting an operand in two, the solver to 24 in three. With other
inputs (WIDE) products are three TF32 products, keys' lengths are float64, and the sums of bounded gates' logs two float32 numbers.
"""

import triton
import triton.language as tl

__all__ = [
    "across_border",
    "alpha_gate",
    "at_token",
    "border_decay",
    "bounded_decays",
    "chunk_decay",
    "chunk_place",
    "dot",
    "dot_apart",
    "dot_left_split",
    "dot_split",
    "finite_gate",
    "gate_gradient",
    "in_registers",
    "learning_rate",
    "log_gate",
    "operand",
    "power_of",
    "reciprocal",
    "right_of_border",
    "rounded_product",
    "signs_through",
    "sums_from",
    "token_sums",
    "widened",
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(0.006737946999085467)  # e^-5
# log2 of alpha = 0: any difference to it is zero after exp2, and float64 keeps the rest
ZERO_GATE = tl.constexpr(-1.0e5)
NO_GATE = tl.constexpr(-6.0e4)  # a log|alpha| that every dtype has, of an alpha that is zero in all of them
# What the start and the end of a chunk with bounded gates, which may be 2^-115, are multiplied by: states and their gradients are
# kept 2^40 times as large, and those of 2^-40 do not underflow
STATE_UNIT = tl.constexpr(2.0**20)
# 1.5 * 2^23: a small float32 added to it is rounded to a whole number, which its last bits then hold
ROUND = tl.constexpr(12582912.0)
# 2 log2(e) atanh(z) / z for |z| <= 0.2, in powers of z^2, to 3e-9
SERIES_0, SERIES_1 = tl.constexpr(2.885390075), tl.constexpr(0.9618021953)
SERIES_2, SERIES_3 = tl.constexpr(0.5763955775), tl.constexpr(0.4390777286)
MULTIPLE = tl.constexpr(24576.0)  # 1.5 * 2^14, likewise: to a multiple of 2^-9


@triton.jit
def chunk_place(i_chunk, p_starts, p_ends, T, NC, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk and the end of its tokens, in the flattened [B * T]."""
    if PACKED:
        begin = tl.load(p_starts + i_chunk).to(tl.int64)
        end = tl.load(p_ends + i_chunk).to(tl.int64)
    else:
        i_b = (i_chunk // NC).to(tl.int64)
        begin = i_b * T + (i_chunk % NC) * C
        end = tl.minimum(begin + C, (i_b + 1) * T)
    return begin, end


@triton.jit
def power_of(b_largest):
    """The power of two next below a float32, from 2^-60 to 2^60, and its inverse."""
    b_some = tl.minimum(tl.maximum(b_largest, 2.0**-60), 2.0**60)
    b_bits = b_some.to(tl.int32, bitcast=True) & 0x7F800000  # the exponent; that of 1.0, twice, is 0x7F000000
    return b_bits.to(tl.float32, bitcast=True), (0x7F000000 - b_bits).to(tl.float32, bitcast=True)


@triton.jit
def at_token(b_x, token, C: tl.constexpr):
    """[D, C] -> [D], one token of a tile."""
    return tl.sum(tl.where(tl.arange(0, C)[None, :] == token, b_x, 0.0), 1)


@triton.jit
def _exp_minus(b_x):
    """exp(-|x|)."""
    return tl.exp2(-LOG2E * tl.abs(b_x))


@triton.jit
def _log2(b_x):
    """log2(x) to 1.6e-7 around 1, by the card's own instruction; exact at 1. The gate that it is taken of is rounded by as much."""
    if INTERPRETED:
        return tl.log2(b_x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(b_x):
    """1 / x to the last digit, where neither is near the ends of float32's range: what a division there takes is six
    instructions, and this is one."""
    if INTERPRETED:
        return 1.0 / b_x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def rounded_product(b_x, b_y):
    """x y as a number of its own: the compiler would compute what is left of it when it is rounded to fewer digits from the product
    before its rounding, and the sum of both parts would be another number than what is stored."""
    if INTERPRETED:
        return b_x * b_y
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [b_x, b_y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _log1p(b_x):
    """log(1 + x) for -1 < x <= 1, to the last digits also where x is small: the rounding of 1 + x is divided out again."""
    b_sum = 1.0 + b_x
    b_rounded = b_sum - 1.0
    b_some = tl.where(b_rounded == 0.0, 1.0, b_rounded)
    return tl.where(b_rounded == 0.0, b_x, tl.log(b_sum) * (b_x / b_some))


@triton.jit
def _exp2_flushed(b_x):
    """2^x, zero where that is below 2^-126: without the three instructions around the card's own that small results take."""
    if INTERPRETED:
        return tl.exp2(b_x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _log2_signed(b_e):
    """log2|alpha| of a signed gate, n / d with n = 1 - e + 2 EPS e, d = 1 + e, e = exp(-|u|): to 4e-7, near 1 to the last digits.

    With p the power of two next to alpha it is log2(p) + 2 log2(e) atanh(z), z = (n - p d) / (n + p d), at most 0.2: four terms.
    n - p d is (1 - p) (1 - e) - (2 p - 2 EPS) e, in which nothing cancels at p = 1. p is chosen without a division: 1 / d is a
    line, to 6%.
    """
    b_less, b_d = 1.0 - b_e, 1.0 + b_e
    b_n = b_less + 2.0 * EPS * b_e
    b_about = b_n * (1.4134 - 0.4711 * b_d)
    b_bits = (b_about.to(tl.int32, bitcast=True) + 0x4AFB0D) & 0x7F800000  # from sqrt(1/2) on it is 1
    b_p = b_bits.to(tl.float32, bitcast=True)
    b_z = ((1.0 - b_p) * b_less - (2.0 * b_p - 2.0 * EPS) * b_e) * reciprocal(b_n + b_p * b_d)
    b_square = b_z * b_z
    b_terms = ((SERIES_3 * b_square + SERIES_2) * b_square + SERIES_1) * b_square + SERIES_0
    # the exponent of p as a number: into the last bits of 1.5 * 2^23, from which 1.5 * 2^23 and 127 are taken again
    b_exponent = ((b_bits >> 23) + 0x4B400000).to(tl.float32, bitcast=True) - (ROUND + 127.0)
    return b_exponent + b_z * b_terms


@triton.jit
def _log2_above(b_e):
    """log2(1 + e), 0 <= e <= 1, to 5e-6 of itself: four terms of the series where e is small, else the card's own instruction."""
    b_series = b_e * (LOG2E + b_e * (-LOG2E / 2 + b_e * (LOG2E / 3 - b_e * (LOG2E / 4))))
    return tl.where(b_e < 0.03, b_series, _log2(1.0 + b_e))


@triton.jit
def log_gate(b_g, b_rate, b_bias, GATE: tl.constexpr, EXACT: tl.constexpr):
    """log2|alpha| and whether alpha < 0 (ckda.ops.gate.evaluate_gate) from the raw projection [BK, C], in float32.

    b_rate is exp(A_log), b_bias dt_bias, broadcastable to g. GATE "none": g is log|alpha| itself, and not negative. EXACT: all
    digits of a logarithm near zero; else to the rounding of alpha.
    """
    if GATE == "none":
        b_log = tl.maximum(b_g * LOG2E, ZERO_GATE, propagate_nan=tl.PropagateNan.ALL)
        b_negative = b_g > float("inf")
    elif GATE == "signed":
        b_u = b_rate * (b_g + b_bias)
        if EXACT:
            b_log = _log2_signed(_exp2_flushed(-LOG2E * tl.abs(b_u)))
        else:
            b_e = _exp_minus(b_u)
            b_log = _log2((1.0 - (1.0 - 2.0 * EPS) * b_e) * reciprocal(1.0 + b_e))
        b_negative = b_u < 0
    elif GATE == "sigmoid":
        b_u = b_rate * (b_g + b_bias)
        b_e = _exp_minus(b_u)
        b_log = -5.0 * LOG2E * tl.where(b_u < 0, b_e, 1.0) * reciprocal(1.0 + b_e)
        b_negative = b_u > float("inf")
    else:
        b_x = b_g + b_bias
        b_e = _exp_minus(b_x)
        b_log = -b_rate * (tl.maximum(b_x, 0.0) * LOG2E + (_log1p(b_e) * LOG2E if EXACT else _log2_above(b_e)))
        b_log = tl.maximum(b_log, ZERO_GATE, propagate_nan=tl.PropagateNan.ALL)
        b_negative = b_x > float("inf")
    return b_log, b_negative


@triton.jit
def finite_gate(b_g, GATE: tl.constexpr):
    """g as loaded, with a finite logarithm of alpha = 0: -inf times the zeros of a product is not a number."""
    if GATE == "none":
        return tl.where(b_g < NO_GATE, NO_GATE, b_g.to(tl.float32)).to(b_g.dtype)
    else:
        return b_g


@triton.jit
def alpha_gate(b_g, b_rate, b_bias, GATE: tl.constexpr):
    """The signed gate alpha itself, float32, without the detour over its logarithm (ckda.ops.gate.gate_alpha)."""
    if GATE == "none":
        b_alpha = tl.exp(b_g)
    elif GATE == "signed":
        b_u = b_rate * (b_g + b_bias)
        b_e = _exp_minus(b_u)
        b_alpha = 1.0 - 2.0 * (1.0 - EPS) * (b_e / (1.0 + b_e))
        b_alpha = tl.where(b_u < 0, -b_alpha, b_alpha)
    elif GATE == "sigmoid":
        b_u = b_rate * (b_g + b_bias)
        b_e = _exp_minus(b_u)
        b_alpha = tl.exp(-5.0 * tl.where(b_u < 0, b_e, 1.0) / (1.0 + b_e))
    else:
        b_x = b_g + b_bias
        b_alpha = tl.exp(-b_rate * (tl.maximum(b_x, 0.0) + _log1p(_exp_minus(b_x))))
    return b_alpha


@triton.jit
def gate_gradient(b_dlog, b_g, b_rate, b_bias, GATE: tl.constexpr):
    """dg and the gradient of log(rate) [BK, C] from that of log|alpha| (natural), as in ckda.ops.gate.gate_backward."""
    if GATE == "none":
        b_dg = tl.where(b_g < 0.5 * NO_GATE, 0.0, b_dlog)
        b_drate = b_dg
    elif GATE == "signed":
        b_u = b_rate * (b_g + b_bias)
        b_e = _exp_minus(b_u)
        b_du = b_dlog * (2.0 * (1.0 - EPS) * b_e) * reciprocal((1.0 + b_e) * (1.0 - (1.0 - 2.0 * EPS) * b_e))
        b_du = tl.where(b_u == 0, 0.0, tl.where(b_u < 0, -b_du, b_du))
        b_dg, b_drate = b_du * b_rate, b_du * b_u
    elif GATE == "sigmoid":
        b_u = b_rate * (b_g + b_bias)
        b_e = _exp_minus(b_u)
        b_du = -5.0 * b_dlog * b_e * reciprocal((1.0 + b_e) * (1.0 + b_e))
        b_dg, b_drate = b_du * b_rate, b_du * b_u
    else:
        b_x = b_g + b_bias
        b_e = _exp_minus(b_x)
        b_softplus = tl.maximum(b_x, 0.0) + _log2_above(b_e) / LOG2E
        b_dg = -b_dlog * b_rate * tl.where(b_x < 0, b_e, 1.0) * reciprocal(1.0 + b_e)
        b_drate = -b_dlog * b_rate * b_softplus
    return b_dg, b_drate


@triton.jit
def learning_rate(b_beta, BETA_RANGE: tl.constexpr):
    """beta, or BETA_RANGE * sigmoid(beta)."""
    if BETA_RANGE == 0:
        return b_beta
    else:
        b_e = _exp_minus(b_beta)
        return BETA_RANGE * tl.where(b_beta < 0, b_e, 1.0) / (1.0 + b_e)


# Products. DOT is the operands' precision: "bf16" (or "fp16", for tests), or "tf32x3", three products of float32 operands -----


@triton.jit
def operand(b_x, DOT: tl.constexpr):
    """x rounded as an operand."""
    if DOT == "bf16":
        return b_x.to(tl.bfloat16)
    elif DOT == "fp16":
        return b_x.to(tl.float16)
    else:
        return b_x.to(tl.float32)


@triton.jit
def _nearest(b_x):
    """float32 rounded to TF32's eleven digits: the first of those that are cleared is added to the bits."""
    return ((b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _three_products(b_a, b_b):
    """a b of float32 by three TF32 products, the same sums as Triton's "tf32x3" in two thirds of the instructions.

    Triton asks of every number whether it is finite, so that an infinity stays one where the product of both low parts is not a
    number. Here it becomes NaN, as NaN does: what is not finite stays so.
    """
    b_a_high, b_b_high = _nearest(b_a), _nearest(b_b)
    b_small = tl.dot(b_a - b_a_high, b_b_high, input_precision="tf32")
    b_small = tl.dot(b_a_high, b_b - b_b_high, b_small, input_precision="tf32")
    return tl.dot(b_a_high, b_b_high, b_small, input_precision="tf32")


@triton.jit
def dot_apart(b_a, b_b):
    """The same three products in sums of their own, where one would be a chain of instructions that wait for each other.

    Both low parts are negative, for the compiler makes a sum of products one chain again, but not a difference.
    """
    b_a_high, b_b_high = _nearest(b_a), _nearest(b_b)
    b_left = tl.dot(b_a_high - b_a, b_b_high, input_precision="tf32")
    b_right = tl.dot(b_a_high, b_b_high - b_b, input_precision="tf32")
    return (tl.dot(b_a_high, b_b_high, input_precision="tf32") - b_left) - b_right


@triton.jit
def dot(b_a, b_b, DOT: tl.constexpr):
    """a b, both rounded to the operands' precision, accumulated in float32."""
    if DOT == "bf16" or DOT == "fp16":
        return tl.dot(operand(b_a, DOT), operand(b_b, DOT))
    else:
        return _three_products(b_a.to(tl.float32), b_b.to(tl.float32))


@triton.jit
def in_registers(b_x, m_tile):
    """x [D, C] as loaded, zero outside the mask already: the needless choice keeps it out of the matrix unit's reach.

    A left operand that comes from memory as it is, channels first, is read by Hopper's instruction from shared memory, transposed;
    Triton 3.6 gets that wrong for four warps (LOG.md). One that was computed comes from registers.
    """
    return tl.where(m_tile, b_x, 0.0)


@triton.jit
def widened(b_x, C: tl.constexpr, DOT: tl.constexpr):
    """x [D, C] in float32, laid out like a product: half precision goes through one with the identity, which is exact and spares
    the detour by which Triton would bring a loaded tile into that layout. x is :func:`in_registers`."""
    if (DOT == "bf16" and b_x.dtype == tl.bfloat16) or (DOT == "fp16" and b_x.dtype == tl.float16):
        b_one = tl.where(tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :], 1.0, 0.0)
        return tl.dot(b_x, operand(b_one, DOT))
    else:
        return b_x.to(tl.float32)


@triton.jit
def _rest(b_x, b_high, DOT: tl.constexpr):
    """The low half of x: what its rounding left."""
    return operand(b_x - b_high.to(tl.float32), DOT)


@triton.jit
def dot_left_split(b_a, b_b, DOT: tl.constexpr):
    """a b with b as rounded and a kept to twice the digits: its high and low halves are multiplied one after the other."""
    if DOT == "bf16" or DOT == "fp16":
        b_high = operand(b_a, DOT)
        return tl.dot(_rest(b_a, b_high, DOT), operand(b_b, DOT), tl.dot(b_high, operand(b_b, DOT)))
    else:
        return dot(b_a, b_b, DOT)


@triton.jit
def dot_split(b_a, b_high, b_low, b_rest, DOT: tl.constexpr):
    """a (high + low + rest) with a kept to twice the digits; low and rest are left out where high is float32.

    A matrix that is the same in every chunk (equal keys) is off by the same in every chunk: it needs its last digits.
    """
    if DOT == "bf16" or DOT == "fp16":
        b_left = operand(b_a, DOT)
        b_product = tl.dot(b_left, b_high, tl.dot(b_left, b_low, tl.dot(b_left, b_rest)))
        return tl.dot(_rest(b_a, b_left, DOT), b_high, b_product)
    else:
        return dot(b_a, b_high, DOT)


# Sums over a chunk's tokens, as products with a matrix of 0 and +-1 ----------------------------------------------------


@triton.jit
def _leading(b_x, DOT: tl.constexpr):
    """x with the digits that one product keeps: rounded to half precision, or cut to TF32's eleven."""
    if DOT == "bf16" or DOT == "fp16":
        return operand(b_x, DOT)
    else:
        return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def token_sums(b_x, b_M, DOT: tl.constexpr, EXACT: tl.constexpr):
    """x M [D, C] for a float32 x and M [C, C] of 0 and +-1: no scan, no reduction.

    In half precision x keeps 16 bits, or 24 where EXACT; with TF32 all of them.
    """
    b_M = operand(b_M, DOT)
    b_high = _leading(b_x, DOT)
    b_x -= b_high.to(tl.float32)
    b_middle = _leading(b_x, DOT)
    b_sum = tl.dot(b_middle, b_M, tl.dot(b_high, b_M, input_precision="tf32"), input_precision="tf32")
    if EXACT or b_M.dtype == tl.float32:
        b_low = _leading(b_x - b_middle.to(tl.float32), DOT)
        b_sum = tl.dot(b_low, b_M, b_sum, input_precision="tf32")
    return b_sum


@triton.jit
def sums_from(b_x, C: tl.constexpr, DOT: tl.constexpr):
    """[D, C]: the sum of x from each token on. Three TF32 products would lose two of float32's 24 bits, a scan loses none."""
    if DOT == "bf16" or DOT == "fp16":
        b_from, b_to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        return token_sums(b_x, tl.where(b_from >= b_to, 1.0, 0.0), DOT, True)
    else:
        return tl.cumsum(b_x, 1, reverse=True)


@triton.jit
def parity_bit(b_negative, b_M, DOT: tl.constexpr):
    """int32 [D, C]: the sign bit of the product of the gates that M selects. Counts up to C are exact in any precision.

    Nothing is added to the count to read its last bit: the compiler makes a number added to a product the accumulator it starts
    from, and Hopper's keeps fewer than float32's 24 bits.
    """
    b_count = tl.dot(operand(tl.where(b_negative, 1.0, 0.0), DOT), operand(b_M, DOT), input_precision="tf32")
    return b_count.to(tl.int32) << 31


# Decay factors, signed, float32 -----------------------------------------------------------------------------------------


@triton.jit
def sign_through(b_negative, C: tl.constexpr, DOT: tl.constexpr):
    """int32 [BK, C]: the sign bit of gamma_i, also where gamma_i underflows."""
    b_from, b_to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return parity_bit(b_negative, tl.where(b_from <= b_to, 1.0, 0.0), DOT)


@triton.jit
def _sums_in_pairs(b_log, b_negative):
    """(high, low, sign): the sums of up to 32 bounded gates' logs through each token as high + low, and int32 their signs' bits.

    Multiples of 2^-9 above -256 and 512 for every negative gate are summed in float32 without rounding, in any order; what is left
    of a log is at most 2^-10, and its sum is off by 1e-9. No float64, and no product for the signs.
    """
    b_high = (b_log + MULTIPLE) - MULTIPLE
    b_low = tl.cumsum(b_log - b_high, 1)
    b_sum = tl.cumsum(b_high + tl.where(b_negative, 512.0, 0.0), 1)
    b_count = b_sum + 512.0 * ROUND
    return b_sum - (b_count - 512.0 * ROUND), b_low, b_count.to(tl.int32, bitcast=True) << 31


@triton.jit
def bounded_decays(b_log, b_negative, C: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr):
    """All decays of a chunk by way of its middle, for gates of at least e^-5: (forward, back, start, end).

    With m the whole number next to log2|gamma_a|, a the middle token: forward, back [BK, C] are gamma_i / 2^m, 2^m / gamma_i, and
    start, end [BK] are 2^m and Gamma / 2^m, in units: gamma_i = forward_i start and Gamma / gamma_i = back_i end, signs included.

    m depends on tokens after i, but a power of two changes no digit: later tokens do not change earlier outputs, not even by
    rounding. Hence only the broken part of an exponent is raised, and the whole part added to the bits of the result.
    """
    if WIDE:
        b_cum, b_low, b_sign = _sums_in_pairs(b_log, b_negative)
    else:
        b_from, b_to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        b_cum = token_sums(b_log, tl.where(b_from <= b_to, 1.0, 0.0), DOT, False)
        b_sign = sign_through(b_negative, C, DOT)
    b_round = b_cum + ROUND
    b_broken = b_cum - (b_round - ROUND)
    if WIDE:
        b_broken += b_low
    b_middle = at_token(b_cum, C // 2 - 1, C) + ROUND
    b_shift = (b_round.to(tl.int32, bitcast=True) - b_middle.to(tl.int32, bitcast=True)[:, None]) << 23
    if WIDE:  # sums of NaN alone have no shift among each other, but a scan has numbers before the first NaN
        b_shift = tl.where(b_broken == b_broken, b_shift, 0)
    b_power = _exp2_flushed(b_broken) if WIDE else tl.exp2(b_broken)  # near 1, but the compiler does not know
    b_inverse = _exp2_flushed(-b_broken) if WIDE else tl.exp2(-b_broken)
    b_forward = ((b_power.to(tl.int32, bitcast=True) + b_shift) ^ b_sign).to(tl.float32, bitcast=True)
    b_back = ((b_inverse.to(tl.int32, bitcast=True) - b_shift) ^ b_sign).to(tl.float32, bitcast=True)
    unit: tl.constexpr = STATE_UNIT if DOT != "fp16" else 1.0
    return b_forward, b_back, tl.exp2(b_middle - ROUND) * unit, at_token(b_forward, C - 1, C) * unit


@triton.jit
def chunk_decay(b_log, TO_END: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """|gamma_i| [BK, C] from the chunk's start through token i, or where TO_END |Gamma / gamma_i|.

    The exponents are sums of the logs in between and nothing else: no difference of large sums, so gates of any size lose no digit.
    """
    b_from, b_to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    m_between = (b_from > b_to) if TO_END else (b_from <= b_to)
    return tl.exp2(token_sums(b_log, tl.where(m_between, 1.0, 0.0), DOT, False))


@triton.jit
def border_decay(b_log, shift, C: tl.constexpr, DOT: tl.constexpr):
    """|decay| [BK, C] between token i and the border in the middle of its block, of two halves of 2^shift tokens.

    From the border through i in the right half, from i to the border in the left half. Two of them make the decay of a pair across
    the border. Neither is above one, so their product underflows only where the decay does.
    """
    b_from, b_to = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    m_right = (b_to >> shift) % 2 == 1
    m_between = (b_from >> shift == b_to >> shift) & (m_right == (b_from <= b_to))
    return tl.exp2(token_sums(b_log, tl.where(m_between, 1.0, 0.0), DOT, False))


@triton.jit
def across_border(shift, C: tl.constexpr):
    """The pairs (i, j) [C, C] across such borders, i right and j left of one. Halves of 1, 2, ..., C/2 tokens give all i > j."""
    b_row, b_column = tl.arange(0, C)[:, None] >> shift, tl.arange(0, C)[None, :] >> shift
    return (b_row % 2 == 1) & (b_row == b_column + 1)


@triton.jit
def right_of_border(shift, C: tl.constexpr):
    """[1, C]: the tokens right of such a border."""
    return ((tl.arange(0, C) >> shift) % 2 == 1)[None, :]


@triton.jit
def signs_through(b_negative, C: tl.constexpr, DOT: tl.constexpr):
    """The sign of gamma_i [BK, C], 1.0 or -1.0."""
    return tl.where(sign_through(b_negative, C, DOT) < 0, -1.0, 1.0)
