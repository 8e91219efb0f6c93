"""What the kernels of the chunk form share: the plan of a call, where its chunks lie, and what the forward keeps for the backward.

Configurations are chosen by rule from K, V and the dtype; nothing is tuned at run time. Nothing here depends on the batch or on
the number of heads, and there are no atomics: a sequence gives the same bits alone, in a batch, and on every run.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call

__all__ = [
    "CHUNK",
    "KEYS",
    "SQUARES",
    "Chunks",
    "Passed",
    "Plan",
    "Saved",
    "Work",
    "empty_saved",
    "find_chunks",
    "gradient_outputs",
    "is_bounded",
    "open_saved",
    "plan",
]

CHUNK = 32  # e^5 a step from the middle of 32 tokens stays within e^80, which bfloat16 and float32 hold
# input dtypes whose products take half-precision operands, in all kernels and in Hopper's. float16 lacks the range of decays from
# the chunk's middle: there every gate goes by borders, whose factors are at most one
FAST = {torch.bfloat16: "bf16"}
FAST_ON_HOPPER = FAST | {torch.float16: "fp16"}
SEGMENT = 128  # chunks of a segment, where a sequence is split
KEYS = ("q_forward", "k_forward", "k_back", "forward")
SQUARES = ("A", "solver", "solver_low", "solver_rest")
_PARTS = {"keys": KEYS, "squares": (*SQUARES, "A_low"), "y": ("y", "y_low")}  # of the tensors that are kept
_PLACE = {name: (field, i) for field, names in _PARTS.items() for i, name in enumerate(names)}
ALIGNMENT = 512  # bytes, of each tensor that is kept
SPLIT_FROM = 512  # chunks from which a sequence is split: shorter ones fill the card by their batch


class Plan(NamedTuple):
    """What is known of a call without its values."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    NC: int  #: chunks of a sequence; of the whole call where sequences are packed
    N: int  #: sequences
    packed: bool
    segment: int  #: chunks of a segment
    num_segments: int
    dtype: torch.dtype  #: of q, k and v
    work_dtype: torch.dtype  #: of what one kernel leaves for another: decayed q and k, A, y, the states
    #: whether |alpha| is at least e^-5: decays are taken from the chunk's middle and kept for the backward, which then needs
    #: neither the gates nor q and k
    bounded: bool
    dot: str  #: the precision of products: operands of half precision, or three TF32 products
    width: int  #: channels of a tile of decays: K, or on Hopper the power of two that holds them
    padded: bool  #: whether what kernels leave for each other has room for whole chunks: Hopper's, where chunks are not
    given: (
        bool  #: whether beta is the learning rate itself, which may be zero: its gradient then needs more than dr . y
    )
    #: whether o is made of A in two parts: where it is float16, and heads repeat their keys, the rounding of A alone is as large
    #: as that of o
    A_low: bool
    #: whether chunks that decay little (calm ones) go another way than the others: on Hopper, where gates are not bounded
    mixed: bool

    @property
    def split(self) -> bool:
        """Whether products take half-precision operands, and what must be exact is kept in two parts, or three (the solver)."""
        return self.dot in ("bf16", "fp16")

    @property
    def segments(self) -> range:
        """The segments of a sequence."""
        return range(self.num_segments)

    @property
    def slots(self) -> int:
        """The chunks of the whole call."""
        return self.NC if self.packed else self.B * self.NC

    @property
    def rows(self) -> int:
        """The tokens for which kernels leave something to each other."""
        return self.slots * self.C if self.padded else self.B * self.T

    @property
    def places(self) -> str:
        """How the chunks lie: "whole", "ragged" (T is no multiple of C) or "packed"."""
        return "packed" if self.packed else "ragged" if self.T % self.C else "whole"


def is_bounded(call: Call) -> bool:
    """Whether |alpha| is at least e^-5, and operands have the range for it: Hopper's in float16 do not."""
    float16 = call.backend == "triton-hopper" and call.v.dtype == torch.float16
    return call.gate in ("signed", "sigmoid") and not float16


def plan(call: Call) -> Plan:
    """The call's :class:`Plan`; packed sequences get as many chunks as could ever be needed, without reading cu_seqlens."""
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    packed = call.cu_seqlens is not None
    NC = T // CHUNK + call.num_sequences if packed else -(-T // CHUNK)
    long = not packed and NC >= SPLIT_FROM
    dtype, hopper = call.v.dtype, call.backend == "triton-hopper"
    dot = (FAST_ON_HOPPER if hopper else FAST).get(dtype, "tf32x3")
    return Plan(
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        C=CHUNK,
        NC=NC,
        N=call.num_sequences,
        packed=packed,
        segment=SEGMENT if long else NC,
        num_segments=-(-NC // SEGMENT) if long else 1,
        dtype=dtype,
        work_dtype=torch.float32 if dot == "tf32x3" else dtype,
        bounded=is_bounded(call),
        dot=dot,
        width=(64 if K <= 64 else 128 if K <= 128 else 256) if hopper else K,
        padded=hopper and (packed or T % CHUNK > 0),
        given=call.beta is not None and not call.beta_range,
        A_low=dot == "fp16" and K <= 128,
        mixed=hopper and not is_bounded(call),
    )


class Chunks(NamedTuple):
    """Where the chunks of packed sequences lie; None each without packing."""

    starts: Tensor | None  #: int32 [NC] first token
    ends: Tensor | None  #: int32 [NC] end of its tokens
    first: Tensor | None  #: int32 [N] first chunk of each sequence
    order: Tensor | None  #: int32 [N] the sequences, the longest first
    #: int32 [3 * NC] the chunks, full ones first and those that nobody needs last, then their first tokens, then their ends
    sorted: Tensor | None
    counts: Tensor | None  #: int32 [2] how many chunks are full, and how many are needed


def find_chunks(p: Plan, x: "Saved") -> Chunks:
    """Where the chunks lie, as `places_kernel` has written it."""
    if not p.packed:
        return Chunks(None, None, None, None, None, None)
    return Chunks(*x.chunks.split([p.slots, p.slots, p.N, p.N, 3 * p.slots, 2]))


class Saved(NamedTuple):
    """What the forward pass leaves for the backward. What has one shape lies together: one descriptor of tiles serves it."""

    keys: Tensor  #: [4, rows, HV, K] q_forward, k_forward, k_back, forward; three where the backward evaluates all gates again
    #: [4, rows, HV, C] A, the solver, and what its rounding left, in two parts; two where it is float32; fifth, where A_low, what
    #: A's rounding left
    squares: Tensor
    G: Tensor  #: float32 [rows, HV, C]; empty where beta is a logit
    rho: Tensor  #: float32 [rows, HV]
    norms: Tensor  #: float32 [3, rows, HV]
    start: Tensor  #: float32 [slots, HV, width]
    end: Tensor
    y: Tensor  #: [2, rows, HV, V] and what its rounding left; one where it is float32
    states: Tensor  #: [slots, HV, V, K]
    transitions: (
        Tensor  #: float32 [B, num_segments - 2, HV, K, K] of the segments but the first and the last; may be empty
    )
    calm: Tensor  #: int32 [slots, HV] how many rows of a chunk are calm, where mixed; else empty
    chunks: (
        Tensor  #: int32 [5 * slots + 2 * N + 2] where the chunks of packed sequences lie: :class:`Chunks`; may be empty
    )

    def arguments(self, *names: str) -> dict[str, Tensor]:
        """The kernels' arguments of these names; anything for what is not there, which they do not read."""
        found = {}
        for name in names:
            field, i = _PLACE.get(name, (name, None))
            x = getattr(self, field)
            found[f"p_{name}"] = x if i is None else x[min(i, len(x) - 1)]
        return found


class _Room:
    """Tensors side by side in one piece of memory; without memory, how much of it they need."""

    def __init__(self, memory: Tensor | None = None) -> None:
        self.memory, self.used = memory, 0  #: uint8; bytes

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        first, size = self.used, math.prod(shape) * dtype.itemsize
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return None if self.memory is None else self.memory[first : first + size].view(dtype).view(shape)


def _lay_out(p: Plan, empty: _Room) -> Saved:
    keys, values, square = ((p.rows, p.HV, n) for n in (p.K, p.V, p.C))
    return Saved(
        keys=empty(4 if p.bounded or p.mixed else 3, *keys, dtype=p.work_dtype),
        squares=empty(4 + p.A_low if p.split else 2, *square, dtype=p.work_dtype),
        G=empty(*(square if p.given else (0,))),
        rho=empty(p.rows, p.HV),
        norms=empty(3, p.rows, p.HV),
        start=empty(p.slots, p.HV, p.width),
        end=empty(p.slots, p.HV, p.width),
        y=empty(2 if p.split else 1, *values, dtype=p.work_dtype),
        states=empty(p.slots, p.HV, p.V, p.K, dtype=p.work_dtype),
        transitions=empty(p.B, max(p.num_segments - 2, 0), p.HV, p.K, p.K),
        calm=empty(p.slots if p.mixed else 0, p.HV, dtype=torch.int32),
        chunks=empty(5 * p.slots + 2 * p.N + 2 if p.packed else 0, dtype=torch.int32),
    )


def empty_saved(call: Call, p: Plan) -> Tensor:
    """Room for what the forward pass leaves: one allocation, uint8, for the host pays for each."""
    room = _Room()
    _lay_out(p, room)
    return torch.empty(room.used, dtype=torch.uint8, device=call.v.device)


def open_saved(p: Plan, memory: Tensor) -> Saved:
    """What lies where in that room."""
    return _lay_out(p, _Room(memory))


class Work(NamedTuple):
    """A call with all that its launches are made from."""

    call: Call
    p: Plan
    x: Saved
    where: Chunks


class Passed(NamedTuple):
    """What the reverse pass over the chunks leaves for the end of the backward."""

    dv: Tensor  #: [B, T, HV, V] in the work dtype: others are made of it, and float16 lacks the range
    duy: Tensor | None  #: float32 [B, T, HV, NV], du . y over each block of values, where beta is given
    dstates: Tensor  #: [slots, HV, V, K]


def gradient_outputs(w: Work, grouped: torch.dtype) -> dict[str, Any]:
    """Where the end of the backward writes; with grouped value heads dq and dk are summed over the group afterwards: `grouped` is
    the dtype of what is summed."""
    call, p, x, _ = w
    key_dtype = p.dtype if p.H == p.HV else grouped
    keys = (p.B, p.T, p.HV, p.K)

    def parts(given: Tensor | None) -> Tensor | None:
        return None if given is None else torch.empty_like(x.start)

    return {
        "p_dq": x.rho.new_empty(keys, dtype=key_dtype),
        "p_dk": x.rho.new_empty(keys, dtype=key_dtype),
        "p_dg": x.rho.new_empty(keys, dtype=call.g.dtype),
        "p_dbeta": None if call.beta is None else x.rho.new_empty(p.B, p.T, p.HV, dtype=call.beta.dtype),
        "p_derase": None if call.erase is None else x.rho.new_empty(keys, dtype=call.erase.dtype),
        "p_dlog_rate": parts(call.A_log),
        "p_dbias": parts(call.dt_bias),
    }
