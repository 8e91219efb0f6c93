"""Cross-entropy of a linear layer's outputs that never holds all logits: chunk by chunk, with the gradients on the way.

For tokens with hidden states h [N, d], weight W [V, d] and labels y [N], with logits z = h W^T,

    loss = sum_i (logsumexp(z_i) - z_i[y_i]) / count,    dz = (softmax(z) - onehot(y)) / count,    dh = dz W,    dW = dz^T h,

so the gradient of the logits is known as soon as the logits are: the forward pass computes dh and dW and drops the chunk.
"""

from typing import Any

import torch
from torch import Tensor

from ckda.layers.attention import autocast_dtype
from ckda.ops.triton import HAS_TRITON

__all__ = ["IGNORED", "linear_cross_entropy", "next_token_labels"]


#: the label of a token that does not count
IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, count: Tensor | float | None = None, chunk: int = 4096
) -> Tensor:
    """The mean cross-entropy of ``hidden @ weight.T`` against `labels`, with O(chunk * V) memory for the logits.

    Products run in hidden's dtype (autocast's where it is on), sums in float32. Nothing is read back from the device.

    Args:
        hidden: [..., d]. weight: [V, d]. labels: int64 [...]; :data:`IGNORED` does not count.
        count: what the sum is divided by (default: the labels that count; none at all gives 0).
        chunk: tokens whose logits exist at the same time.

    Returns:
        A float32 scalar (float64 if hidden is).

    Example:
        >>> hidden, weight, labels = torch.randn(7, 4), torch.randn(9, 4), torch.tensor([1, 2, 3, -100, 8, 0, 4])
        >>> loss = linear_cross_entropy(hidden, weight, labels, chunk=3)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
        True
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"the shape of labels is {list(labels.shape)}; it must be that of hidden without d, {list(hidden.shape[:-1])}"
        )
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    hidden = hidden.to(autocast_dtype(hidden.device) or hidden.dtype)
    if count is None:
        count = (labels != IGNORED).sum().clamp_min(1)
    count = torch.as_tensor(count, device=hidden.device, dtype=_wide(hidden))
    needs = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk, needs) / count


def next_token_labels(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """labels [B, T] moved one to the left: position t is to say token t + 1. The last of each sequence has none.

    Example:
        >>> next_token_labels(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([0, 2, 2, 5])).tolist()
        [[6, -100, 8, 9, -100]]
    """
    T = labels.shape[1]
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    if cu_seqlens is not None:
        ends = (
            cu_seqlens[1:].long() - 1
        ) % T  # an empty first member wraps to the last token, which has no label anyway
        shifted = shifted.index_fill(1, ends, IGNORED)
    return shifted


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses, and with it the gradients of hidden and weight; the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, needs: bool) -> Tensor:
        wide = _wide(hidden)
        narrow = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(hidden) if needs else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            losses, dlogits = _chunk(hidden[rows] @ narrow.T, labels[rows], needs)
            total = total + losses.sum()
            if dhidden is not None and dweight is not None:
                dhidden[rows] = dlogits @ narrow
                dweight += dlogits.T @ hidden[rows]
        if dhidden is not None and dweight is not None:
            ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        (dloss,) = grads
        return dhidden * dloss.to(dhidden.dtype), (dweight * dloss).to(ctx.weight_dtype), None, None, None


def _chunk(logits: Tensor, labels: Tensor, needs: bool) -> tuple[Tensor, Tensor]:
    """Losses [n] and their gradient [n, V] of one chunk's logits [n, V]; the gradient in the logits' dtype.

    On a GPU one kernel does it in place; a compiled program makes its own from the lines below.
    """
    if (
        logits.device.type == "cuda"
        and HAS_TRITON
        and logits.dtype != torch.float64
        and not torch.compiler.is_compiling()
    ):
        from ckda.models.loss_kernel import cross_entropy_rows

        return cross_entropy_rows(logits, labels, IGNORED, needs)
    wide = logits.to(_wide(logits))
    counts = labels != IGNORED
    target = torch.where(counts, labels, 0).unsqueeze(-1)
    lse = torch.logsumexp(wide, -1)
    losses = torch.where(counts, lse - wide.gather(-1, target).squeeze(-1), 0)
    if not needs:
        return losses, logits
    ones = counts.to(wide.dtype).unsqueeze(-1)  # [n, 1]
    dlogits = torch.exp(wide - lse.unsqueeze(-1)) * ones
    return losses, dlogits.scatter_add(-1, target, -ones).to(logits.dtype)
