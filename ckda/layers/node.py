"""A function with its own backward as one node of autograd, without torch's dispatcher where nobody needs it.

The convolution, the gated norm and SwiGLU are registered as custom ops, so that torch.compile and vmap see them. In eager mode the
op's bookkeeping costs the host several times what launching its kernel does: there the same functions run as a
torch.autograd.Function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckda.ops.dispatch import is_plain, without_transforms

__all__ = ["one_node"]


def _num_tensors(arguments: tuple) -> int:
    """How many of them come before the options."""
    return sum(x is None or isinstance(x, Tensor) for x in arguments)


def one_node(
    op: Callable[..., Any],
    forward: Callable[..., Any],
    backward_op: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
) -> Callable[..., Any]:
    """`op(*tensors, *options)`, or the same by its own functions.

    Args:
        forward: from tensors, some of them None, and options to a tensor or a tuple of them.
        backward_op, backward: from its gradients and the same arguments to the gradients of the first of them.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            num = _num_tensors(arguments)
            ctx.save_for_backward(*arguments[:num])
            ctx.options = arguments[num:]
            return forward(*arguments)

        @staticmethod
        def backward(ctx: Any, *dys: Tensor) -> Any:
            run = backward_op if torch.is_grad_enabled() else backward  # the op says that there is no second derivative
            tensors = ctx.saved_tensors
            grads = run(*dys, *tensors, *ctx.options)
            return *grads, *(None for _ in range(len(tensors) + len(ctx.options) - len(grads)))

    direct = without_transforms(Direct)

    def call(*arguments: Any) -> Any:
        tensors = arguments[: _num_tensors(arguments)]
        if not is_plain(tensors):
            return op(*arguments)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return direct(*arguments)
        return forward(*arguments)

    return call
