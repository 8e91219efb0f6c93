"""One chunk of the cross-entropy on a GPU: every row of logits is read twice and overwritten once, by its own gradient.

forward    loss = logsumexp(z) - z[y]
gradient   dz = softmax(z) - onehot(y), in the place of z; zero where the label does not count
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import launch

__all__ = ["cross_entropy_rows", "rows_kernel"]

BLOCK, NUM_WARPS = 4096, 8


@triton.jit
def rows_kernel(
    logits,  # [n, V], overwritten by the gradient where NEEDS
    labels,  # [n] int64
    losses,  # [n] float32
    stride,  # between rows of logits
    V,
    IGNORED: tl.constexpr,
    NEEDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row; the maximum and the sum run along, in float32."""
    row = tl.program_id(0).to(tl.int64)
    p_row = logits + row * stride
    label = tl.load(labels + row)
    counts = label != IGNORED
    # before anything is overwritten: the reductions below stand between this read and the writes of other warps
    target = tl.load(p_row + tl.where(counts, label, 0)).to(tl.float32)
    b_max = -float("inf")
    b_sum = 0.0
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_z = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_new = tl.maximum(b_max, tl.max(b_z, 0))
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.sum(tl.exp(b_z - b_new), 0)
        b_max = b_new
    b_lse = b_max + tl.log(b_sum)
    tl.store(losses + row, tl.where(counts, b_lse - target, 0.0))
    if NEEDS:
        tl.debug_barrier()
        for start in range(0, V, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            m_v = o_v < V
            b_z = tl.load(p_row + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
            b_d = tl.exp(b_z - b_lse) - tl.where(o_v == label, 1.0, 0.0)
            tl.store(p_row + o_v, tl.where(counts, b_d, 0.0).to(logits.dtype.element_ty), mask=m_v)


def cross_entropy_rows(logits: Tensor, labels: Tensor, ignored: int, needs: bool) -> tuple[Tensor, Tensor]:
    """Losses [n] in float32 of logits [n, V], and the logits, overwritten by their gradient where it `needs` one."""
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        options: dict[str, Any] = {"IGNORED": ignored, "NEEDS": needs, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
        launch(rows_kernel, (n,), logits, labels, losses, logits.stride(0), V, **options)
    return losses, logits
