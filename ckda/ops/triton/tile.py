"""What every kernel is made of: where a chunk lies, norm, gate, cumulative decay, products in the right precision.

Names in the kernels: b_ a tile in registers, p_ pointers, m_ a mask; i_ an index of this program. A tile is [C, BK] or
[C, BV]: C tokens of one value head, BK >= K and BV >= V powers of two.

Two precisions. With half-precision inputs (WIDE = False) logs are float32 and products take bfloat16 operands (float16
inputs: TF32), accumulated in float32. With float32 inputs, or gates without a bound, logs and their sums are float64
(WIDE = True).
"""

import triton
import triton.language as tl

__all__ = [
    "at_row",
    "chunk_place",
    "cumulative_decay",
    "dot",
    "dot_left_split",
    "dot_right_split",
    "dot_split",
    "gate_gradient",
    "inverse_norm",
    "learning_rate",
    "log_gate",
]

LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(0.006737946999085467)  # e^-5
ZERO_GATE = tl.constexpr(-1.0e5)  # log2 of alpha = 0: any difference to it is zero after exp2, and float64 keeps the rest


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
def at_row(b_x, row, C: tl.constexpr):
    """[C, D] -> [D], one row of a tile."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == row, b_x, 0.0), 0)


@triton.jit
def inverse_norm(b_x):
    """[C, D] -> [C]: 1 / |x|, zero for a zero vector; nothing is added under the root."""
    b_square = tl.sum(b_x * b_x, 1)
    return tl.where(b_square > 0, 1.0 / tl.sqrt_rn(tl.where(b_square > 0, b_square, 1.0)), 0.0)


@triton.jit
def _log1m(b_x):
    """log(1 - x), 0 <= x < 1, float32, with the digits of a small x kept: a series of atanh below 1/4."""
    b_z = b_x / (2.0 - b_x)
    b_z2 = b_z * b_z
    b_small = -2.0 * b_z * (1.0 + b_z2 * (1.0 / 3 + b_z2 * (1.0 / 5 + b_z2 * (1.0 / 7 + b_z2 * (1.0 / 9)))))
    return tl.where(b_x < 0.25, b_small, tl.log(1.0 - b_x))


@triton.jit
def _log1p_small(b_e):
    """log(1 + e), 0 <= e <= 1: a small e is its own logarithm but for its square."""
    return tl.where(b_e < 1e-5, b_e - 0.5 * b_e * b_e, tl.log(1.0 + b_e))


@triton.jit
def log_gate(b_g, b_rate, b_bias, GATE: tl.constexpr, WIDE: tl.constexpr):
    """log2|alpha| and whether alpha < 0 (ckda.ops.gate.evaluate_gate) from the raw projection [C, BK].

    b_rate is exp(A_log), b_bias dt_bias, broadcastable to g. GATE "none": g is log|alpha| itself, and not negative.
    """
    if WIDE:
        b_g, b_rate, b_bias = b_g.to(tl.float64), b_rate.to(tl.float64), b_bias.to(tl.float64)
    if GATE == "none":
        b_log = tl.maximum(b_g * LOG2E, ZERO_GATE)
        b_negative = b_g > float("inf")
    elif GATE == "signed":
        b_u = b_rate * (b_g + b_bias)
        b_e = tl.exp(-tl.abs(b_u))
        b_x = 2.0 * (1.0 - EPS) * (b_e / (1.0 + b_e))
        b_log = (tl.log(1.0 - b_x) if WIDE else _log1m(b_x)) * LOG2E
        b_negative = b_u < 0
    elif GATE == "sigmoid":
        b_u = b_rate * (b_g + b_bias)
        b_e = tl.exp(-tl.abs(b_u))
        b_log = -5.0 * LOG2E * tl.where(b_u < 0, b_e, 1.0) / (1.0 + b_e)
        b_negative = b_u > float("inf")
    else:
        b_x = b_g + b_bias
        b_e = tl.exp(-tl.abs(b_x))
        b_log = -b_rate * (tl.maximum(b_x, 0.0) + _log1p_small(b_e)) * LOG2E
        b_log = tl.maximum(b_log, ZERO_GATE)
        b_negative = b_x > float("inf")
    return b_log, b_negative


@triton.jit
def gate_gradient(b_dlog, b_g, b_rate, b_bias, GATE: tl.constexpr):
    """dg and the gradient of log(rate) [C, BK] from that of log|alpha| (natural), as in ckda.ops.gate.gate_backward."""
    if GATE == "none":
        b_dg = tl.where(b_g == float("-inf"), 0.0, b_dlog)
        b_drate = b_dg
    elif GATE == "signed":
        b_u = b_rate * (b_g + b_bias)
        b_e = tl.exp(-tl.abs(b_u))
        b_s = b_e / (1.0 + b_e)
        b_du = b_dlog * 2.0 * (1.0 - EPS) * (b_s - b_s * b_s) / (1.0 - 2.0 * (1.0 - EPS) * b_s)
        b_du = tl.where(b_u == 0, 0.0, tl.where(b_u < 0, -b_du, b_du))
        b_dg, b_drate = b_du * b_rate, b_du * b_u
    elif GATE == "sigmoid":
        b_u = b_rate * (b_g + b_bias)
        b_e = tl.exp(-tl.abs(b_u))
        b_du = -5.0 * b_dlog * b_e / ((1.0 + b_e) * (1.0 + b_e))
        b_dg, b_drate = b_du * b_rate, b_du * b_u
    else:
        b_x = b_g + b_bias
        b_e = tl.exp(-tl.abs(b_x))
        b_softplus = tl.maximum(b_x, 0.0) + _log1p_small(b_e)
        b_dg = -b_dlog * b_rate * tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)
        b_drate = -b_dlog * b_rate * b_softplus
    return b_dg, b_drate


@triton.jit
def cumulative_decay(b_log, b_negative):
    """The inclusive sum of log2|alpha| over the chunk's tokens and the sign of their product, +1 or -1 in float32."""
    b_cum = tl.cumsum(b_log, 0)
    b_flips = tl.cumsum(b_negative.to(tl.int32), 0)
    return b_cum, 1.0 - 2.0 * (b_flips & 1).to(tl.float32)


@triton.jit
def learning_rate(b_beta, BETA_RANGE: tl.constexpr):
    """beta, or BETA_RANGE * sigmoid(beta)."""
    if BETA_RANGE == 0:
        return b_beta
    b_e = tl.exp(-tl.abs(b_beta))
    return BETA_RANGE * tl.where(b_beta < 0, b_e, 1.0) / (1.0 + b_e)


# Products. DOT is the operands' precision: "bf16", or a precision of tl.dot for float32 operands -----------------------


@triton.jit
def dot(b_a, b_b, DOT: tl.constexpr):
    """a b, both rounded to the operands' precision, accumulated in float32."""
    if DOT == "bf16":
        return tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16))
    return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision=DOT)


@triton.jit
def dot_right_split(b_a, b_b, DOT: tl.constexpr):
    """a b with a as rounded and b kept to 16 bits: its high and low halves are multiplied one after the other."""
    if DOT == "bf16":
        b_high = b_b.to(tl.bfloat16)
        b_low = (b_b - b_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_a.to(tl.bfloat16), b_low, tl.dot(b_a.to(tl.bfloat16), b_high))
    return tl.dot(b_a.to(tl.float32), b_b, input_precision=DOT)


@triton.jit
def dot_left_split(b_a, b_b, DOT: tl.constexpr):
    """a b with b as rounded and a kept to 16 bits."""
    if DOT == "bf16":
        b_high = b_a.to(tl.bfloat16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_low, b_b.to(tl.bfloat16), tl.dot(b_high, b_b.to(tl.bfloat16)))
    return tl.dot(b_a, b_b.to(tl.float32), input_precision=DOT)


@triton.jit
def dot_split(b_a, b_b, DOT: tl.constexpr):
    """a b with both kept to 16 bits; the product of the low halves is left out."""
    if DOT == "bf16":
        b_high = b_a.to(tl.bfloat16)
        b_low = (b_a - b_high.to(tl.float32)).to(tl.bfloat16)
        b_right = b_b.to(tl.bfloat16)
        b_rest = (b_b - b_right.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_high, b_right, tl.dot(b_high, b_rest, tl.dot(b_low, b_right)))
    return tl.dot(b_a, b_b, input_precision=DOT)
