"""A function with its own backward as one node of autograd, without torch's dispatcher where nobody needs it.

The convolution, the gated norm and SwiGLU are registered as custom ops, so that torch.compile and vmap see them. In eager mode the
op's bookkeeping costs the host several times what launching its kernel does: there the same functions run as a
torch.autograd.Function.

Nodes that do what modules do stand in for modules that nobody hooked, replaced or froze: calling them would do nothing more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ckda.ops.dispatch import is_autocast, is_plain, is_watched, without_transforms

__all__ = ["is_trained_linear", "is_unhooked", "modules_are_seen", "one_node"]


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


def modules_are_seen(x: Tensor) -> bool:
    """Whether more than autograd looks at what modules do to x, or autocast casts for them."""
    return bool(
        is_watched() or is_autocast(x.device) or _has_any_global_hook() or torch._C._get_tracing_state() is not None
    )


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not hooks and "forward" not in module.__dict__ and module._compiled_call_impl is None


def is_trained_linear(module: nn.Module) -> bool:
    """Whether calling the module is a Linear's product, and all its parameters want a gradient."""
    own = module._parameters
    if type(module) is not nn.Linear or not is_unhooked(module) or not {"weight", "bias"} <= own.keys():
        return False
    weight, bias = own["weight"], own["bias"]
    return weight is not None and weight.requires_grad and (bias is None or bias.requires_grad)
