"""The operator as Triton kernels: a chunk form, a recurrence for short sequences and small heads, and one step of decoding."""

from importlib.util import find_spec

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients

__all__ = ["backward", "forward", "refuses", "saved_like"]


def refuses(call: Call) -> str | None:
    """Why the kernels cannot serve the call, or None."""
    if find_spec("triton") is None:
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


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    from ckda.ops.triton import chunk

    return chunk.forward(call)


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    from ckda.ops.triton import chunk

    return chunk.backward(call, saved, do, dfinal)


def saved_like(call: Call) -> list[Tensor]:
    from ckda.ops.triton import chunk

    return chunk.saved_like(call)
