"""Calls of sizes that Hopper's kernels do not take: filled up to sizes that they take, and what comes of them cut back.

A channel whose query and key are zero adds nothing to a norm or to a product, and its row of the state stays zero. Its gate is near
one, so that a chunk decays no more than it did, and has no gradient. A value that is zero has no output.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.call import Call
from ckda.ops.triton.hopper import sizes
from ckda.ops.triton.launch import Launch, power_of_two

__all__ = ["Resize", "fit", "resize_kernel"]

NEAR_ONE = {"signed": 64, "sigmoid": -64, "softplus": -64, None: 0}  # the g of such a gate
NUMBERS = 4096  # of a program


@triton.jit
def resize_kernel(
    p_x,  # [N, ROWS, WIDTH]
    p_out,  # out [N, ROWS_OUT, WIDTH_OUT]
    num_lines,  # N * ROWS_OUT
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_OUT: tl.constexpr,
    WIDTH_OUT: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
    BW: tl.constexpr,
):
    """x without what lies beyond the new sizes, and FILL where these are larger."""
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, m_line = line % ROWS_OUT, line < num_lines
    b_column = tl.arange(0, BW)[None, :]
    o_x = (line // ROWS_OUT * ROWS + row).to(tl.int64)[:, None] * WIDTH + b_column
    m_x = (m_line & (row < ROWS))[:, None] & (b_column < WIDTH)
    b_x = tl.load(p_x + o_x, mask=m_x, other=FILL)
    o_out = line.to(tl.int64)[:, None] * WIDTH_OUT + b_column
    tl.store(p_out + o_out, b_x, mask=m_line[:, None] & (b_column < WIDTH_OUT))


class Resize:
    """Makes tensors of other sizes, by launches that it collects."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, x: Any, *ends: int, fill: int = 0) -> Any:
        """x [..., width] or [..., rows, width] with these last sizes; itself where it has them, or is None."""
        if x is None or x.shape[-len(ends) :] == ends:
            return x
        out = x.new_empty(*x.shape[: -len(ends)], *ends)
        rows, rows_out = (1, 1) if len(ends) == 1 else (x.shape[-2], ends[0])
        width, width_out = x.shape[-1], ends[-1]
        num_lines, BW = out.numel() // width_out, power_of_two(max(width, width_out))
        block = NUMBERS // BW
        arguments = {
            "p_x": x,
            "p_out": out,
            "num_lines": num_lines,
            "ROWS": rows,
            "WIDTH": width,
            "ROWS_OUT": rows_out,
            "WIDTH_OUT": width_out,
            "FILL": fill,
            "BLOCK": block,
            "BW": BW,
        }
        self.launches.append(Launch(resize_kernel, (-(-num_lines // block),), arguments, num_warps=4))
        return out


def fit(call: Call, resize: Resize, first: int = 0) -> Call:
    """The call as Hopper's kernels take it; for other kernels as it is.

    Of its fields before the `first`, which nobody will read, only the shapes are right.
    """
    K, V = sizes(call)
    if call.backend != "triton-hopper" or (call.q.shape[3] == K and call.v.shape[3] == V):
        return call
    q, k = (_shape_alone(x, K) if n < first else resize(x, K) for n, x in enumerate((call.q, call.k)))
    bias = call.dt_bias
    if bias is not None:
        bias = resize(bias.view(-1, call.q.shape[3]), K).view(-1)
    return call._replace(
        q=q,
        k=k,
        v=resize(call.v, V),
        g=resize(call.g, K, fill=NEAR_ONE[call.gate]),
        sign=resize(call.sign, K, fill=1),
        dt_bias=bias,
        erase=resize(call.erase, K),
        initial_state=resize(call.initial_state, K, V),
        scale=call.q_scale,
    )


def _shape_alone(x: Tensor, width: int) -> Tensor:
    """What has the shape of x but for its width, and no memory."""
    return x.new_empty(()).expand(*x.shape[:-1], width)
