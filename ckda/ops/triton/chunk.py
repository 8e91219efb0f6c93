"""The chunk form on a GPU: shapes, configurations and launches of the portable kernels, or of those for Hopper where they serve.

Configurations are chosen by rule from K, V and the dtype; nothing is tuned at run time. Nothing here depends on the batch or on
the number of heads, and there are no atomics: a sequence gives the same bits alone, in a batch, and on every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients
from ckda.ops.triton.hopper import launch as hopper_kernels
from ckda.ops.triton.launch import Launch, aligned, assemble, contiguous, gate_arguments, power_of_two
from ckda.ops.triton.portable.backward import contract_kernel, gradient_kernel, pair_kernel, reverse_kernel
from ckda.ops.triton.portable.forward import carry_kernel, intra_kernel, solver_kernel, state_kernel

__all__ = ["CHUNK", "Plan", "backward", "forward", "launches", "plan", "saved_like"]

CHUNK = 32  # e^5 a step from the middle of 32 tokens stays within e^80, which bfloat16 and float32 hold
FAST = {torch.bfloat16: "bf16"}  # input dtypes whose products take half-precision operands; float16 lacks the range
SEGMENT = 128  # chunks of a segment, where a sequence is split
KEYS = ("q_forward", "k_forward", "k_back", "forward")
SQUARES = ("A", "solver", "solver_low", "solver_rest")
_PARTS = {"keys": KEYS, "squares": SQUARES, "y": ("y", "y_low")}  # of the tensors that are kept
_PLACE = {name: (field, i) for field, names in _PARTS.items() for i, name in enumerate(names)}
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
    bounded: bool  #: whether |alpha| is at least e^-5

    @property
    def split(self) -> bool:
        """Whether products take half-precision operands, and what must be exact is kept in two parts, or three (the solver)."""
        return self.dtype in FAST

    @property
    def keeps_forward(self) -> bool:
        """Whether the forward pass keeps the decays for the backward, which then needs neither the gates nor q and k."""
        return self.split and self.bounded

    @property
    def segments(self) -> range:
        """The segments of a sequence."""
        return range(self.num_segments)

    @property
    def slots(self) -> int:
        """The chunks of the whole call."""
        return self.NC if self.packed else self.B * self.NC


def plan(call: Call) -> Plan:
    """The call's :class:`Plan`; packed sequences get as many chunks as could ever be needed, without reading cu_seqlens."""
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    packed = call.cu_seqlens is not None
    NC = T // CHUNK + call.num_sequences if packed else -(-T // CHUNK)
    long = not packed and NC >= SPLIT_FROM
    dtype = call.v.dtype
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
        work_dtype=dtype if dtype in FAST else torch.float32,
        bounded=call.gate in ("signed", "sigmoid"),
    )


def _value_block(p: Plan, width: int) -> int:
    """BV of the forward state pass: the columns of the state that one program carries."""
    return min(64 if p.K <= 128 and p.split else 32, power_of_two(width))


def _reverse_block(p: Plan) -> int:
    """BV of the reverse pass, which holds more at a time."""
    return min(32, power_of_two(p.V))


class _Chunks(NamedTuple):
    """Where the chunks of packed sequences lie; None each without packing."""

    starts: Tensor | None  #: [NC] first token
    ends: Tensor | None  #: [NC] end of its tokens
    first: Tensor | None  #: [N] first chunk of each sequence


def _chunks(call: Call, p: Plan) -> _Chunks:
    """By tensor operations alone: no synchronisation."""
    if call.cu_seqlens is None:
        return _Chunks(None, None, None)
    cu = call.cu_seqlens.long()
    count = (cu.diff() + p.C - 1) // p.C
    ends = count.cumsum(0)
    first = ends - count
    slot = torch.arange(p.NC, device=cu.device)
    owner = torch.searchsorted(ends, slot, right=True).clamp_max(p.N - 1)
    begin = torch.minimum(cu[owner] + (slot - first[owner]) * p.C, cu[owner + 1])
    return _Chunks(begin, torch.minimum(begin + p.C, cu[owner + 1]), first)


def _chunk_arguments(call: Call, p: Plan, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the kernels that read the raw inputs share."""
    return gate_arguments(call, unread) | {
        "NC": p.NC,
        "TOKENS": p.B * p.T,
        "C": p.C,
        "LEVELS": p.C.bit_length() - 1,
        "BOUNDED": p.bounded,
        "WIDE": not p.split,
        "DOT": _dot(p.dtype),
    }


def _is_given(call: Call) -> bool:
    """Whether beta is the learning rate itself, which may be zero: its gradient then needs more than dr . y."""
    return not call.beta_range


def _dot(dtype: torch.dtype) -> str:
    """The precision of products: bfloat16 operands for bfloat16 inputs, three TF32 products otherwise."""
    return FAST.get(dtype, "tf32x3")


class Saved(NamedTuple):
    """What the forward pass leaves for the backward. What has one shape lies together: one descriptor of tiles serves it."""

    keys: Tensor  #: [4, B, T, HV, K] q_forward, k_forward, k_back, forward; three where the backward evaluates the gates again
    squares: (
        Tensor  #: [4, B, T, HV, C] A, the solver, and what its rounding left, in two parts; two where it is float32
    )
    G: Tensor  #: float32 [B, T, HV, C]; empty where beta is a logit
    rho: Tensor  #: float32 [B, T, HV]
    norms: Tensor  #: float32 [3, B, T, HV]
    start: Tensor  #: float32 [slots, HV, K]
    end: Tensor
    y: Tensor  #: [2, B, T, HV, V] and what its rounding left; one where it is float32
    states: Tensor  #: [slots, HV, V, K]
    transitions: (
        Tensor  #: float32 [B, num_segments - 2, HV, K, K] of the segments but the first and the last; may be empty
    )

    def arguments(self, *names: str) -> dict[str, Tensor]:
        """The kernels' arguments of these names; anything for what is not there, which they do not read."""
        found = {}
        for name in names:
            field, i = _PLACE.get(name, (name, None))
            x = getattr(self, field)
            found[f"p_{name}"] = x if i is None else x[min(i, len(x) - 1)]
        return found


def _empty_saved(call: Call, p: Plan) -> Saved:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.v.device)

    keys, values, square = ((p.B, p.T, p.HV, n) for n in (p.K, p.V, p.C))
    return Saved(
        keys=empty(4 if p.keeps_forward else 3, *keys, dtype=p.work_dtype),
        squares=empty(4 if p.split else 2, *square, dtype=p.work_dtype),
        G=empty(*(square if _is_given(call) else (0,))),
        rho=empty(p.B, p.T, p.HV),
        norms=empty(3, p.B, p.T, p.HV),
        start=empty(p.slots, p.HV, p.K),
        end=empty(p.slots, p.HV, p.K),
        y=empty(2 if p.split else 1, *values, dtype=p.work_dtype),
        states=empty(p.slots, p.HV, p.V, p.K, dtype=p.work_dtype),
        transitions=empty(p.B, max(p.num_segments - 2, 0), p.HV, p.K, p.K),
    )


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return [*_empty_saved(call, plan(call))]


def _state_arguments(p: Plan, x: Saved, where: _Chunks, call: Call, segments: range) -> dict[str, Any]:
    """What both passes over the chunks read."""
    read = (*KEYS[:3], *SQUARES, "rho", "start", "end")
    return x.arguments(*read) | {
        "p_norm2": x.norms[2],
        "SPLIT": p.split,
        "BOUNDED": p.bounded,
        "p_cu_seqlens": contiguous(call.cu_seqlens),
        "p_first": where.first,
        "T": p.T,
        "NC": p.NC,
        "SEGMENT": p.segment,
        "FIRST_SEGMENT": segments.start,
        "NUM_SEGMENTS": len(segments),
        "HV": p.HV,
        "K": p.K,
        "BK": power_of_two(p.K),
        "C": p.C,
        "DOT": _dot(p.dtype),
        "PACKED": p.packed,
    }


def _G(call: Call, p: Plan, x: Saved) -> Tensor:
    """Where G is written: kept for the backward pass where that reads it."""
    return x.G if _is_given(call) else x.rho.new_empty(p.B, p.T, p.HV, p.C)


def _intra(call: Call, p: Plan, x: Saved, where: _Chunks, G: Tensor) -> Launch:
    if hopper_kernels.serves(call, p):
        return hopper_kernels.intra(call, p, x, G)
    arguments = _chunk_arguments(call, p) | {"p_starts": where.starts, "p_ends": where.ends, "p_G": G}
    arguments["KEEP"] = p.keeps_forward
    outputs = x.arguments(*KEYS, "A", "rho", "norms", "start", "end")
    grid = (p.slots, p.HV)
    maxnreg = 168 if p.keeps_forward and p.K <= 128 else None
    return Launch(intra_kernel, grid, arguments | outputs, num_warps=4, maxnreg=maxnreg)


def _solver(p: Plan, x: Saved, where: _Chunks, G: Tensor) -> Launch:
    arguments = x.arguments("rho", *SQUARES[1:]) | {
        "p_G": G,
        "p_starts": where.starts,
        "p_ends": where.ends,
        "T": p.T,
        "NC": p.NC,
        "HV": p.HV,
        "C": p.C,
        "LEVELS": p.C.bit_length() - 2,
        "SPLIT": p.split,
        "DOT": _dot(p.dtype),
        "PACKED": p.packed,
    }
    return Launch(solver_kernel, (p.slots, p.HV), arguments, num_warps=1)


def _state(
    call: Call,
    p: Plan,
    x: Saved,
    where: _Chunks,
    initial: Tensor | None,
    o: Tensor | None,
    final: Tensor | None,
    summary: str = "none",
    segments: range | None = None,
) -> Launch:
    segments = segments or p.segments
    if hopper_kernels.serves(call, p):
        return hopper_kernels.states(call, p, x, initial, o, final, summary, segments)
    V = p.K if summary == "transition" else p.V
    BV = _value_block(p, V)
    arguments = _state_arguments(p, x, where, call, segments) | x.arguments("y", "y_low", "states")
    arguments |= {
        "p_v": call.v.contiguous(),
        "p_initial": initial,
        "p_o": o,
        "p_final": final,
        "V": V,
        "BV": BV,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "SUMMARY": summary,
    }
    return Launch(state_kernel, (-(-V // BV) * p.HV * p.N * len(segments),), arguments, num_warps=4)


def _carry(p: Plan, x: Saved, given: Tensor | None, offsets: Tensor, reverse: bool = False) -> Launch:
    """From what segments add to a state at zero to the state that each begins with; reverse: gradients, from the last one on."""
    BV = 16
    carried = offsets.new_empty(p.B * p.num_segments, p.HV, p.K, p.V)
    arguments = {
        "p_transitions": x.transitions,
        "p_offsets": offsets,
        "p_given": given,
        "p_carried": carried,
        "NUM_SEGMENTS": p.num_segments,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "BK": power_of_two(p.K),
        "BV": BV,
        "HAS_GIVEN": given is not None,
        "REVERSE": reverse,
    }
    return Launch(carry_kernel, (-(-p.V // BV) * p.HV * p.B,), arguments, num_warps=4)


def _inner(call: Call, p: Plan) -> Tensor:
    """float32 [B, num_segments - 1, HV, K, V], for all segments but one."""
    return call.v.new_empty(p.B, p.num_segments - 1, p.HV, p.K, p.V, dtype=torch.float32)


def _segment_starts(call: Call, p: Plan, x: Saved, where: _Chunks) -> Tensor:
    """The exact state at the start of every segment [B * num_segments, HV, K, V].

    The first segment's end comes from its own run; the segments after it but the last need their transitions.
    """
    offsets, last = _inner(call, p), p.num_segments - 1
    given = initial = None
    if call.initial_state is not None:
        given, initial = call.start_state().contiguous(), _inner(call, p).zero_()
        initial[:, 0] = given
    _state(call, p, x, where, initial, None, offsets, "offset", range(last))()
    if last > 1:
        _state(call, p, x, where, None, None, x.transitions, "transition", range(1, last))()
    carry = _carry(p, x, given, offsets)
    carry()
    return carry.arguments["p_carried"]


def launches(call: Call, hopper: bool = False) -> list[Launch]:
    """The launches of one forward and backward pass on empty tensors of the call's device: for compiling, not for running.

    hopper: also those of the kernels for Hopper, where they fit.
    """
    p = plan(call)
    x, where = _empty_saved(call, p), _chunks(call, p)
    o, state = torch.empty_like(call.v), call.zero_state()
    dv = torch.empty_like(o, dtype=p.work_dtype)
    G, duy = _G(call, p, x), _empty_duy(call, p)
    out = _gradient_outputs(call, p)
    reverse = {"p_dv": dv, "p_duy": duy, "p_dstates": x.states}
    return [
        _intra(call, p, x, where, G),
        _solver(p, x, where, G),
        _state(call, p, x, where, state, o, state),
        _state(call, p, x, where, None, None, x.transitions, "transition"),
        _carry(p, x, state, _inner(call, p)),
        _reverse(call, p, x, where, o, state, state, reverse),
        _pair(call, p, x, where, o, o, dv, duy, out),
        _contract(p, x, where, o, dv, x.states, out),
        _gradient(call, p, x, where, out),
        *(hopper_kernels.launches(call, p, x, o, state, out) if hopper else ()),
    ]


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    p = plan(call)
    x, where = _empty_saved(call, p), _chunks(call, p)
    G = _G(call, p, x)
    _intra(call, p, x, where, G)()
    _solver(p, x, where, G)()
    del G
    initial = None if call.initial_state is None else call.start_state().contiguous()
    if p.num_segments > 1:
        initial = _segment_starts(call, p, x, where)
    final = call.v.new_empty(p.N * p.num_segments, p.HV, p.K, p.V, dtype=torch.float32)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    _state(call, p, x, where, initial, o, final)()
    return o, final.unflatten(0, (p.N, -1))[:, -1].contiguous(), [*x]


def _reverse(
    call: Call,
    p: Plan,
    x: Saved,
    where: _Chunks,
    do: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    outputs: dict[str, Any],
    segments: range | None = None,
) -> Launch:
    segments = segments or p.segments
    if hopper_kernels.serves(call, p):
        dv, dstates = outputs.get("p_dv"), outputs.get("p_dstates")
        return hopper_kernels.reverse(p, x, do, dfinal, dinitial, dv, dstates, segments)
    BV = _reverse_block(p)
    arguments = _state_arguments(p, x, where, call, segments) | x.arguments("y")
    arguments |= {
        "p_do": do,
        "p_dfinal": dfinal,
        "p_dv": None,
        "p_duy": None,
        "p_dstates": None,
        "p_dinitial": dinitial,
        "V": p.V,
        "NV": -(-p.V // BV),
        "BV": BV,
        "HAS_FINAL": dfinal is not None,
        "STORE_INITIAL": dinitial is not None,
        "STORE_DUY": outputs.get("p_duy") is not None,
        "SUMMARY": not outputs,
    }
    grid = (-(-p.V // BV) * p.HV * p.N * len(segments),)
    num_stages = 3 if p.split and p.K <= 128 else 2  # a third would not fit into the 99 KiB of sm_89 elsewhere
    return Launch(reverse_kernel, grid, arguments | outputs, num_warps=4, num_stages=num_stages)


def _segment_ends(call: Call, p: Plan, x: Saved, where: _Chunks, do: Tensor, dfinal: Tensor | None) -> Tensor:
    """The gradient of the state after every segment, [B * num_segments, HV, K, V]: the adjoint of :func:`_segment_starts`."""
    offsets, given = _inner(call, p), dfinal
    if given is not None:
        dfinal = _inner(call, p).zero_()
        dfinal[:, -1] = given
    _reverse(call, p, x, where, do, dfinal, offsets, {}, range(1, p.num_segments))()
    carry = _carry(p, x, given, offsets, reverse=True)
    carry()
    return carry.arguments["p_carried"]


def _empty_duy(call: Call, p: Plan) -> Tensor | None:
    """float32 [B, T, HV, NV] for du . y over each block of values, which the gradient of a given beta takes."""
    if not _is_given(call):
        return None
    return call.v.new_empty(p.B, p.T, p.HV, -(-p.V // _reverse_block(p)), dtype=torch.float32)


def _contract_block(p: Plan) -> tuple[int, int, int]:
    """BK, BV and warps of the contraction: not four warps, see :func:`ckda.ops.triton.tile.in_registers`."""
    if p.K > 64 and p.split:
        return 128, min(128, power_of_two(p.V)), 8
    return min(32, power_of_two(p.K)), min(64 if p.split else 32, power_of_two(p.V)), 2


def _pair(
    call: Call,
    p: Plan,
    x: Saved,
    where: _Chunks,
    o: Tensor,
    do: Tensor,
    dv: Tensor,
    duy: Tensor | None,
    out: dict[str, Any],
) -> Launch:
    assert call.beta is not None
    arguments = {
        "p_v": call.v.contiguous(),
        "p_beta": call.beta.contiguous(),
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_o": o,
        "p_do": do,
        "p_dv": dv,
        "p_duy": duy,
        "T": p.T,
        "NC": p.NC,
        "TOKENS": p.B * p.T,
        "HV": p.HV,
        "V": p.V,
        "NV": -(-p.V // _reverse_block(p)),
        "BV": 64 if p.V > 64 else min(32, power_of_two(p.V)),
        "C": p.C,
        "BETA_RANGE": call.beta_range or 0,
        "SPLIT": p.split,
        "DOT": _dot(p.dtype),
        "PACKED": p.packed,
    }
    arguments |= x.arguments("G", "rho", "norms", "y", "y_low")
    arguments |= {name: out[name] for name in ("p_D", "p_D_low", "p_dA", "p_dA_low", "p_scalars", "p_dbeta")}
    return Launch(pair_kernel, (p.slots, p.HV), arguments, num_warps=1 if p.split else 2)


def _contract(
    p: Plan, x: Saved, where: _Chunks, do: Tensor, dv: Tensor, dstates: Tensor, out: dict[str, Any]
) -> Launch:
    BK, BV, num_warps = _contract_block(p)
    arguments = {
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_norm2": x.norms[2],
        "p_do": do,
        "p_dv": dv,
        "p_dstates": dstates,
        "T": p.T,
        "NC": p.NC,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "BK": BK,
        "BV": BV,
        "C": p.C,
        "DOT": _dot(p.dtype),
        "PACKED": p.packed,
    }
    arguments |= x.arguments("rho", "y", "states")
    arguments |= {name: out[name] for name in ("p_S_do", "p_S_dr", "p_dS_u", "p_through")}
    maxnreg = 128 if num_warps == 8 else None
    grid = (-(-p.K // BK) * p.slots, p.HV)
    return Launch(contract_kernel, grid, arguments, num_warps=num_warps, maxnreg=maxnreg)


def _gradient(call: Call, p: Plan, x: Saved, where: _Chunks, out: dict[str, Any]) -> Launch:
    recover = p.keeps_forward
    arguments = _chunk_arguments(call, p, ("q", "k", "beta") if recover else ("beta",))
    for name in ("p_beta", "BETA_RANGE"):
        del arguments[name]
    BK, num_warps = (64, 4) if p.split and p.K > 32 else (min(32, power_of_two(p.K)), 2)
    arguments |= {"p_starts": where.starts, "p_ends": where.ends, "BK": BK, "SPLIT": p.split, "RECOVER": recover}
    arguments |= x.arguments(*KEYS, "rho", "norms", "end")
    used = ("p_D", "p_D_low", "p_dA", "p_dA_low", "p_scalars", "p_S_do", "p_S_dr", "p_dS_u", "p_through")
    arguments |= {name: out[name] for name in (*used, "p_dq", "p_dk", "p_dg", "p_dlog_rate", "p_dbias")}
    return Launch(gradient_kernel, (-(-p.K // BK) * p.slots, p.HV), arguments, num_warps=num_warps)


def _gradient_outputs(call: Call, p: Plan, between: bool = True) -> dict[str, Any]:
    """Where the last three kernels write, and what they leave for each other; with grouped value heads dq and dk are summed
    over the group afterwards, in float32."""
    key_dtype = p.dtype if p.H == p.HV or not between else torch.float32
    keys = (p.B, p.T, p.HV, p.K)
    assert call.beta is not None
    device = call.v.device

    def parts(given: Tensor | None) -> Tensor | None:
        return None if given is None else torch.empty(p.slots, p.HV, p.K, dtype=torch.float32, device=device)

    def beside(given: Tensor) -> Tensor:
        """What the contraction leaves: in the gradient's own place where its dtype has the range."""
        return given if given.dtype in (torch.bfloat16, torch.float32) else given.new_empty(keys, dtype=torch.float32)

    dq = torch.empty(keys, dtype=key_dtype, device=device)
    dk = torch.empty(keys, dtype=key_dtype, device=device)
    dg = torch.empty(keys, dtype=call.g.dtype, device=device)
    out = {
        "p_dq": dq,
        "p_dk": dk,
        "p_dg": dg,
        "p_dbeta": torch.empty(p.B, p.T, p.HV, dtype=call.beta.dtype, device=device),
        "p_dlog_rate": parts(call.A_log),
        "p_dbias": parts(call.dt_bias),
    }
    if not between:
        return out
    return out | {
        "p_S_do": beside(dq),
        "p_S_dr": beside(dk),
        "p_dS_u": beside(dg),
        "p_through": torch.empty(p.slots, p.HV, p.K, dtype=torch.float32, device=device),
        "p_D": torch.empty(p.B, p.T, p.HV, p.C, dtype=p.work_dtype, device=device),
        "p_D_low": torch.empty((p.B, p.T, p.HV, p.C) if p.split else (0,), dtype=p.work_dtype, device=device),
        "p_dA": torch.empty(p.B, p.T, p.HV, p.C, dtype=p.work_dtype, device=device),
        "p_dA_low": torch.empty((p.B, p.T, p.HV, p.C) if p.split else (0,), dtype=p.work_dtype, device=device),
        "p_scalars": torch.empty(3, p.B, p.T, p.HV, dtype=torch.float32, device=device),
    }


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None.

    The last of `saved` is o.
    """
    *kept, o = saved
    p, x = plan(call), Saved(*kept)
    where, do = _chunks(call, p), aligned(do)
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    if p.num_segments > 1:
        dfinal = _segment_ends(call, p, x, where, do, dfinal)
    dv = torch.empty(
        call.v.shape, dtype=p.work_dtype, device=do.device
    )  # others are made of it: float16 lacks the range
    duy = _empty_duy(call, p)
    dstates = torch.empty_like(x.states)
    dinitial = None
    if call.initial_state is not None:
        dinitial = torch.empty(p.N * p.num_segments, p.HV, p.K, p.V, dtype=torch.float32, device=do.device)
    outputs = {"p_dv": dv, "p_duy": duy, "p_dstates": dstates}
    _reverse(call, p, x, where, do, dfinal, dinitial, outputs)()
    fused = hopper_kernels.serves_gradients(call, p)
    out = _gradient_outputs(call, p, between=not fused)
    if fused:
        hopper_kernels.gradients(call, p, x, o, do, dv, dstates, out)()
    else:
        _pair(call, p, x, where, o, do, dv, duy, out)()
        _contract(p, x, where, do, dv, dstates, out)()
        _gradient(call, p, x, where, out)()
    if dinitial is not None:
        dinitial = dinitial.unflatten(0, (p.N, -1))[:, 0].contiguous()
    return assemble(call, out | {"p_dv": dv.to(call.v.dtype), "p_dinitial": dinitial})
