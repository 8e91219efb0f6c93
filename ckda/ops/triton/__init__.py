"""The operator as Triton kernels: a chunk form, a recurrence for short sequences and small heads, and one step of decoding."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients

__all__ = ["backward", "forward", "is_short", "refuses", "saved_like", "step"]

HAS_TRITON = find_spec("triton") is not None  # looked up once, for torch.compile cannot trace it
SHORT, SMALL_HEAD = 128, 32  # tokens and channels up to which the recurrence beats the chunk form


def refuses(call: Call) -> str | None:
    """Why the kernels cannot serve the call, or None."""
    if not HAS_TRITON:
        return "triton is not installed: pip install 'ckda[triton]'"
    if call.q.device.type != "cuda" and not _interpreted():
        return f"the kernels need a CUDA device, and q is on {call.q.device.type}"
    if call.v.dtype == torch.float64:
        return "the kernels have no float64"
    if call.erase is not None:
        return "the kernels have no separate erase and write gates"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    if widest > 256:
        return f"the kernels hold heads of up to 256 channels, and this one has {widest}"
    return None


def _interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    import triton

    return triton.knobs.runtime.interpret


def is_short(call: Call) -> bool:
    """Whether the recurrent kernel serves the call: small heads and few tokens (LOG.md has the measured crossover)."""
    T, widest = call.q.shape[1], max(call.q.shape[-1], call.v.shape[-1])
    return T <= SHORT and widest <= SMALL_HEAD


def _form(call: Call) -> Any:
    from ckda.ops.triton import chunk, recurrent

    return recurrent if is_short(call) else chunk


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    return _form(call).forward(call)


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """The gradients of :func:`forward`."""
    return _form(call).backward(call, saved, do, dfinal)


def step(call: Call, inplace: bool) -> tuple[Tensor, Tensor]:
    """One token from `call.initial_state`: o [B, 1, HV, V] and the next state, which is the same memory if `inplace`."""
    from ckda.ops.triton import recurrent

    return recurrent.step(call, inplace)


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return _form(call).saved_like(call)
