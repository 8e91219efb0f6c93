"""The chunk form for Hopper (H100, H200), in Triton's lower-level dialect (Gluon): when its kernels serve a call."""

from functools import cache

import torch

from ckda.ops.call import Call
from ckda.ops.triton.plan import CHUNK

__all__ = ["BV", "FLOAT16_UNIT", "MAX_WIDTH", "WARP_ROWS", "refuses", "tried", "unfit", "unmeasured"]

BV = 64  # the value columns of one program
MIN_WIDTH, MAX_WIDTH = 32, 128  # of heads, whose tiles have 64 or 128 channels
WIDE = 256  # channels of heads whose passes hold them in two halves
STEP = 8  # heads lie at whole multiples of 16 bytes
FLOAT16_UNIT = (
    64.0  # what the solver is multiplied by in float16: so its last part is no smaller than the smallest number
)
WARP_ROWS = 16  # the rows of a product that one warp holds


def tried() -> bool:
    """Whether the kernels were tried with this Triton: Gluon changes from version to version."""
    import triton

    return triton.__version__.startswith("3.6.")


@cache
def _device_refuses(device: torch.device) -> str | None:
    """Why the kernels do not run there, or None. An AMD card may call itself 9.x too."""
    import triton

    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return "the device is no NVIDIA GPU of compute capability 9"
    if not tried():
        return f"they are written for Triton 3.6, and this is {triton.__version__}"
    return "Triton interprets, and they have no interpreter" if triton.knobs.runtime.interpret else None


def device_refuses(device: torch.device) -> str | None:
    """:func:`_device_refuses`; torch.compile does not look inside."""
    return _device_refuses(device)


# torch.compiler.assume_constant_result, which would import the compiler
device_refuses._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unfit(call: Call) -> str | None:
    """Why the kernels are not made for such a call, whatever the device, or None.

    The reasons hold no size, which torch.compile would have to fix. Rows of tiles are counted in 32 bits: enough, for a call with
    more of them would need 275 GB.
    """
    T, K, V = call.q.shape[1], call.q.shape[3], call.v.shape[3]
    if call.v.dtype not in (torch.bfloat16, torch.float16):
        return "q, k and v must be bfloat16 or float16"
    if not (MIN_WIDTH <= K <= MAX_WIDTH or K == WIDE) or V < MIN_WIDTH or K % STEP or V % STEP:
        return f"heads must have K from {MIN_WIDTH} to {MAX_WIDTH} or {WIDE}, and V from {MIN_WIDTH} on, multiples of {STEP}"
    if K == WIDE:
        given = call.beta is not None and not call.beta_range
        return (
            f"{WIDE} channels take logits of beta, or separate gates, and up to {WIDE} values"
            if given or V > WIDE
            else None
        )
    if V > MAX_WIDTH and (
        K not in (64, 128)
        or V % BV
        or T % CHUNK
        or call.v.dtype != torch.bfloat16
        or call.cu_seqlens is not None
        or not call.beta_range
    ):
        return (
            f"more than {MAX_WIDTH} values take bfloat16, K = 64, 128 or {WIDE}, V a multiple of {BV}, "
            "whole chunks, no packing and logits of beta"
        )
    return None


def unmeasured(call: Call) -> str | None:
    """Why kernels that serve the call are not chosen by themselves, only by name, or None: no GPU has shown yet that they are right
    and faster. `ckda bench --sweep --candidates` and `pytest -m gpu tests/ops/test_hopper.py` on one decide."""
    if call.v.dtype == torch.float16 and call.q.shape[3] > MAX_WIDTH:
        return f"with float16 heads of {WIDE} channels equal keys at beta = 2 were not tried on a GPU yet"
    return None


def refuses(call: Call) -> str | None:
    """Why the kernels cannot serve the call, or None: by device, dtype and shape, never by the batch or the number of heads."""
    return device_refuses(call.q.device) or unfit(call)
