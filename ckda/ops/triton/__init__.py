"""The operator as Triton kernels: a recurrence for short sequences and small heads, the chunk form for any GPU and for Hopper,
and one step of decoding. Which form runs a call is decided here and nowhere else; after that the call carries its name."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients, other_derivative
from ckda.ops.triton import hopper

__all__ = [
    "backward",
    "choose_form",
    "forward",
    "refuses",
    "refuses_hopper",
    "refuses_recurrent",
    "refuses_step",
    "saved_like",
    "step",
]

HAS_TRITON = find_spec("triton") is not None  # looked up once, for torch.compile cannot trace it
NO_SEPARATE = "the recurrence has no separate erase and write gates"
SHORT, SMALL_HEAD = 128, 32  # tokens and channels up to which the recurrence beats the chunk form (LOG.md)


def refuses(call: Call) -> str | None:
    """Why no kernel can serve the call, or None: the portable ones serve whatever any of them does."""
    if not HAS_TRITON:
        return "triton is not installed: pip install 'ckda[triton]'"
    if call.q.device.type != "cuda" and not _interpreted():
        return f"the kernels need a CUDA device, and q is on {call.q.device.type}"
    if call.v.dtype == torch.float64:
        return "the kernels have no float64"
    if _widest(call) > 256:
        return f"the kernels hold heads of up to 256 channels, and this one has {_widest(call)}"
    return None


def _interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    import triton

    return triton.knobs.runtime.interpret


def _widest(call: Call) -> int:
    return max(call.q.shape[-1], call.v.shape[-1])


def refuses_recurrent(call: Call) -> str | None:
    """Why the recurrence cannot serve the call, or None."""
    if call.erase is not None:
        return NO_SEPARATE
    if _widest(call) > SMALL_HEAD:
        return f"the recurrence holds the state of up to {SMALL_HEAD} channels, and this head has {_widest(call)}"
    return refuses(call)


def refuses_hopper(call: Call) -> str | None:
    """Why Hopper's kernels cannot serve the call, or None."""
    return refuses(call) or hopper.refuses(call)


def refuses_step(call: Call) -> str | None:
    """Why the kernel for one token cannot serve the call, or None."""
    if call.needs_gradient or other_derivative():
        return "the kernel for one token has no gradient"
    return NO_SEPARATE if call.erase is not None else refuses(call)


def choose_form(call: Call) -> tuple[str, str]:
    """The fastest form for a call that the kernels serve, and why. It depends on device, dtype, T, K and V, never on B or H."""
    if call.q.shape[1] <= SHORT and _widest(call) <= SMALL_HEAD and call.erase is None:
        return (
            "triton-recurrent",
            f"up to {SHORT} tokens of heads of up to {SMALL_HEAD} channels are fastest one by one",
        )
    why = hopper.refuses(call)
    if why is None:
        reason, words = "Hopper's own chunk kernels serve this call, and are the fastest there", hopper.filled(call)
        return "triton-hopper", f"{reason}; {words}" if words else reason
    return "triton-portable", f"the chunk kernels for every GPU, since Hopper's do not serve this call: {why}"


@cache
def _form(backend: str) -> Any:
    """The module that runs it, imported when it is wanted, for Triton may be missing."""
    from ckda.ops.triton import chunk, recurrent

    return recurrent if backend == "triton-recurrent" else chunk


def forward(call: Call, kept: dict[str, Any]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V] where it is asked for, and what :func:`backward` reads again.

    `kept` holds what calls of this kind share: see :mod:`ckda.ops.triton.replay`.
    """
    return _form(call.backend).forward(call, kept)


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None, kept: dict[str, Any]) -> Gradients:
    """The gradients of :func:`forward`."""
    return _form(call.backend).backward(call, saved, do, dfinal, kept)


def step(call: Call, inplace: bool, kept: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One token, without the time axis: o [B, HV, V] and the next state, in the memory of the given one if `inplace`."""
    from ckda.ops.triton import recurrent

    return recurrent.step(call, inplace, kept)


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return _form(call.backend).saved_like(call)
