"""The chunk form for Hopper (H100, H200), in Triton's lower-level dialect (Gluon): when its kernels serve a call."""

from functools import cache

import torch

from ckda.ops.call import Call
from ckda.ops.triton.plan import CHUNK

__all__ = ["BV", "FLOAT16_UNIT", "MAX_WIDTH", "NARROW", "WARP_ROWS", "filled", "refuses", "sizes", "tried", "unfit"]

BV = 64  # the value columns of one program
NARROW, MAX_WIDTH = 64, 128  # of heads, whose tiles have 64 or 128 channels
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


def sizes(call: Call) -> tuple[int, int]:
    """The channels and values that a call has for the kernels: its own, or more, where `fit.py` fills up.

    In float16 the kernels for 256 channels also take more than half a tile of channels with more than a tile of values.
    """
    K, V = (-(-x.shape[3] // STEP) * STEP for x in (call.q, call.v))
    if K > MAX_WIDTH or (K > NARROW and V > MAX_WIDTH and call.v.dtype == torch.float16):
        K = WIDE
    return K, V


def filled(call: Call) -> str:
    """What is filled up so that the kernels take the call, in words; none where it fits as it is."""
    ours = {"K": call.q.shape[3], "V": call.v.shape[3]}
    theirs = dict(zip(ours, sizes(call), strict=True))
    return ", ".join(
        f"{name} is filled up from {ours[name]} to {theirs[name]}" for name in ours if ours[name] != theirs[name]
    )


def unfit(call: Call) -> str | None:
    """Why the kernels do not serve such a call, whatever the device, or None.

    The reasons hold no size, which torch.compile would have to fix. Rows of tiles are counted in 32 bits: enough, for a call with
    more of them would need 275 GB.
    """
    if call.v.dtype not in (torch.bfloat16, torch.float16):
        return "q, k and v must be bfloat16 or float16"
    K, V = sizes(call)
    if K <= MAX_WIDTH < V and not _fits_many_values(call):
        return (
            f"up to {MAX_WIDTH} channels with more values than that take bfloat16, K = {NARROW} or {MAX_WIDTH}, V a multiple of "
            f"{BV}, whole chunks, no packing and logits of beta; or float16 and K above {NARROW}"
        )
    return None


def _fits_many_values(call: Call) -> bool:
    """Whether the passes for up to 128 channels take it as it is. Filling up would cost what they gain: the portable kernels end
    the backward either way."""
    T, K, V = call.q.shape[1], call.q.shape[3], call.v.shape[3]
    plain = call.v.dtype == torch.bfloat16 and call.cu_seqlens is None and call.beta_range
    return bool(plain and K in (NARROW, MAX_WIDTH) and V % BV == 0 and T % CHUNK == 0)


def refuses(call: Call) -> str | None:
    """Why the kernels cannot serve the call, or None: by device, dtype and shape, never by the batch or the number of heads."""
    return device_refuses(call.q.device) or unfit(call)
