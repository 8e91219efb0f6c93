"""The chunk form on a GPU: shapes, configurations and launches of the seven kernels.

Configurations are chosen by rule from K, V and the dtype; nothing is tuned at run time. Nothing here depends on the batch or on
the number of heads, and there are no atomics: a sequence gives the same bits alone, in a batch, and on every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients
from ckda.ops.triton.chunk_backward import contract_kernel, gradient_kernel, pair_kernel, reverse_kernel
from ckda.ops.triton.chunk_forward import intra_kernel, solver_kernel, state_kernel
from ckda.ops.triton import hopper, hopper_gradient
from ckda.ops.triton.launch import Launch, assemble, contiguous, gate_arguments, power_of_two

__all__ = ["CHUNK", "Plan", "backward", "forward", "launches", "plan", "saved_like"]

CHUNK = 32  # e^5 a step from the middle of 32 tokens stays within e^80, which bfloat16 and float32 hold
FAST = {torch.bfloat16: "bf16"}  # input dtypes whose products take half-precision operands; float16 lacks the range
SEGMENT = 128  # chunks of a segment, where a sequence is split
HOPPER = FUSED = True
OUTPUTS = ("q_forward", "A", "o", "y", "y_low", "states")  # tiles that only the whole state pass needs
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

    @property
    def split(self) -> bool:
        """Whether products take half-precision operands, and what must be exact is kept in two parts, or three (the solver)."""
        return self.dtype in FAST

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
        "BOUNDED": _is_bounded(call),
        "WIDE": not _is_bounded(call) or not p.split,
        "DOT": _dot(p.dtype),
    }


def _keeps_forward(call: Call, p: Plan) -> bool:
    """Whether the forward pass keeps the decays for the backward, which then needs neither the gates nor q and k."""
    return p.split and _is_bounded(call)


def _is_given(call: Call) -> bool:
    """Whether beta is the learning rate itself, which may be zero: its gradient then needs more than dr . y."""
    return not call.beta_range


def _is_bounded(call: Call) -> bool:
    """Whether |alpha| is at least e^-5."""
    return call.gate in ("signed", "sigmoid")


def _is_hopper(call: Call, p: Plan, *tiled: Tensor | None) -> bool:
    """Whether the passes over the chunks are those of ckda/ops/triton/hopper.py: whole chunks, and tiles at 16 bytes."""
    whole = p.split and _is_bounded(call) and not p.packed and p.T % p.C == 0
    return whole and HOPPER and hopper.serves(call.v, p.K, p.V) and all(x is None or x.data_ptr() % 16 == 0 for x in tiled)


def _dot(dtype: torch.dtype) -> str:
    """The precision of products: bfloat16 operands for bfloat16 inputs, three TF32 products otherwise."""
    return FAST.get(dtype, "tf32x3")


class Saved(NamedTuple):
    """What the forward pass leaves for the backward."""

    q_forward: Tensor  #: [B, T, HV, K]
    k_forward: Tensor
    k_back: Tensor
    A: Tensor  #: [B, T, HV, C]
    G: Tensor  #: float32 [B, T, HV, C]; empty where beta is a logit
    solver: Tensor  #: [B, T, HV, C] float32, or its leading digits
    solver_low: Tensor  #: [2, B, T, HV, C] what its rounding left, in two parts; empty where the solver is float32
    rho: Tensor  #: float32 [B, T, HV]
    norms: Tensor  #: float32 [3, B, T, HV]
    forward: Tensor  #: [B, T, HV, K] gamma / gamma_a; empty where the backward pass evaluates the gates again
    start: Tensor  #: float32 [slots, HV, K]
    end: Tensor
    y: Tensor  #: [B, T, HV, V]
    y_low: Tensor  #: what its rounding left; empty where y is float32
    states: Tensor  #: [slots, HV, V, K]
    transitions: (
        Tensor  #: float32 [B, num_segments - 2, HV, K, K] of the segments but the first and the last; may be empty
    )


def _empty_saved(call: Call, p: Plan) -> Saved:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.v.device)

    keys, values, square = ((p.B, p.T, p.HV, n) for n in (p.K, p.V, p.C))
    f32 = torch.float32
    return Saved(
        q_forward=empty(*keys, dtype=p.work_dtype),
        k_forward=empty(*keys, dtype=p.work_dtype),
        k_back=empty(*keys, dtype=p.work_dtype),
        A=empty(*square, dtype=p.work_dtype),
        G=empty(*(square if _is_given(call) else (0,)), dtype=f32),
        solver=empty(*square, dtype=p.work_dtype),
        solver_low=empty(2, *(square if p.split else (0,)), dtype=p.work_dtype),
        rho=empty(p.B, p.T, p.HV, dtype=f32),
        norms=empty(3, p.B, p.T, p.HV, dtype=f32),
        forward=empty(*(keys if _keeps_forward(call, p) else (0,)), dtype=p.work_dtype),
        start=empty(p.slots, p.HV, p.K, dtype=f32),
        end=empty(p.slots, p.HV, p.K, dtype=f32),
        y=empty(*values, dtype=p.work_dtype),
        y_low=empty(*(values if p.split else (0,)), dtype=p.work_dtype),
        states=empty(p.slots, p.HV, p.V, p.K, dtype=p.work_dtype),
        transitions=empty(p.B, max(p.num_segments - 2, 0), p.HV, p.K, p.K, dtype=f32),
    )


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return [*_empty_saved(call, plan(call))]


def _state_arguments(p: Plan, x: Saved, where: _Chunks, call: Call, segments: range) -> dict[str, Any]:
    """What both passes over the chunks read."""
    return {
        "p_q_forward": x.q_forward,
        "p_k_forward": x.k_forward,
        "p_k_back": x.k_back,
        "p_A": x.A,
        "p_solver": x.solver,
        "p_solver_low": x.solver_low[0],
        "p_solver_rest": x.solver_low[1],
        "SPLIT": p.split,
        "p_rho": x.rho,
        "p_norm2": x.norms[2],
        "p_start": x.start,
        "p_end": x.end,
        "BOUNDED": _is_bounded(call),
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
    arguments = _chunk_arguments(call, p) | {"p_starts": where.starts, "p_ends": where.ends, "p_G": G}
    arguments["KEEP"] = _keeps_forward(call, p)
    made = ("q_forward", "k_forward", "k_back", "A", "rho", "norms", "forward", "start", "end")
    outputs = {f"p_{name}": getattr(x, name) for name in made}
    grid = (p.slots, p.HV)
    maxnreg = 168 if p.split and p.K <= 128 else None
    return Launch(intra_kernel, grid, arguments | outputs, num_warps=4, maxnreg=maxnreg)


def _solver(p: Plan, x: Saved, where: _Chunks, G: Tensor) -> Launch:
    arguments = {
        "p_G": G,
        "p_rho": x.rho,
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_solver": x.solver,
        "p_solver_low": x.solver_low[0],
        "p_solver_rest": x.solver_low[1],
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
    V = p.K if summary == "transition" else p.V
    BV = _value_block(p, V)
    segments = segments or p.segments
    arguments = _state_arguments(p, x, where, call, segments) | {
        "p_v": call.v.contiguous(),
        "p_initial": initial,
        "p_o": o,
        "p_y": x.y,
        "p_y_low": x.y_low,
        "p_states": x.states,
        "p_final": final,
        "V": V,
        "BV": BV,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "SUMMARY": summary,
    }
    if _is_hopper(call, p, arguments["p_v"]):
        unused = {"none": (), "offset": OUTPUTS, "transition": ("v", *OUTPUTS)}[summary]
        programs = V // hopper.BV.value * p.HV * p.N * len(segments)
        maxnreg = None if summary == "none" else 128
        return hopper.launch(
            hopper.hopper_state_kernel, arguments | {"STAGES": 3 if summary == "none" else 2}, unused, programs, hopper.BV.value, num_warps=4, maxnreg=maxnreg
        )
    return Launch(state_kernel, (-(-V // BV) * p.HV * p.N * len(segments),), arguments, num_warps=4)


def _carry(matrices: Tensor, offsets: Tensor) -> Tensor:
    """float32 [B, n, HV, K, V]: offsets[:, 0], then matrices[:, s] @ previous + offsets[:, s + 1].

    Carried in float64, which neither TF32 nor autocast reaches, by one product a segment.
    """
    M, states = (x.transpose(0, 1).double().flatten(1, 2) for x in (matrices, offsets))
    for s in range(len(M)):
        states[s + 1].baddbmm_(M[s], states[s])
    return states.float().unflatten(1, (len(offsets), -1)).transpose(0, 1)


def _inner(call: Call, p: Plan) -> Tensor:
    """float32 [B, num_segments - 1, HV, K, V], for all segments but one."""
    return call.v.new_empty(p.B, p.num_segments - 1, p.HV, p.K, p.V, dtype=torch.float32)


def _segment_starts(call: Call, p: Plan, x: Saved, where: _Chunks) -> Tensor:
    """The exact state at the start of every segment [B * num_segments, HV, K, V].

    The first segment's end comes from its own run; the segments after it but the last need their transitions.
    """
    offsets, last = _inner(call, p), p.num_segments - 1
    given, initial = call.start_state(), None
    if call.initial_state is not None:
        initial = _inner(call, p).zero_()
        initial[:, 0] = given
    _state(call, p, x, where, initial, None, offsets, "offset", range(last))()
    if last > 1:
        _state(call, p, x, where, None, None, x.transitions, "transition", range(1, last))()
    return torch.cat([given.unsqueeze(1), _carry(x.transitions, offsets)], 1).flatten(0, 1)


def launches(call: Call) -> list[Launch]:
    """The launches of one forward and backward pass on empty tensors of the call's device: for compiling, not for running."""
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
        _reverse(call, p, x, where, o, state, state, reverse),
        _pair(call, p, x, where, o, o, dv, duy, out),
        _contract(p, x, where, o, dv, x.states, out),
        _gradient(call, p, x, where, out),
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
    BV = _reverse_block(p)
    segments = segments or p.segments
    arguments = _state_arguments(p, x, where, call, segments) | {
        "p_do": do,
        "p_y": x.y,
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
    if _is_hopper(call, p, do) and not _is_given(call):
        unused = () if outputs else ("dv", "dstates")
        programs = p.V // hopper.BV.value * p.HV * p.N * len(segments)
        return hopper.launch(
            hopper.hopper_reverse_kernel, arguments | outputs | {"STAGES": 3}, unused, programs, hopper.BV.value, num_warps=4
        )
    grid = (-(-p.V // BV) * p.HV * p.N * len(segments),)
    num_stages = 3 if p.split and p.K <= 128 else 2  # a third would not fit into the 99 KiB of sm_89 elsewhere
    return Launch(reverse_kernel, grid, arguments | outputs, num_warps=4, num_stages=num_stages)


def _segment_ends(call: Call, p: Plan, x: Saved, where: _Chunks, do: Tensor, dfinal: Tensor | None) -> Tensor:
    """The gradient of the state after every segment, [B * num_segments, HV, K, V]: the adjoint of :func:`_segment_starts`."""
    offsets, given = _inner(call, p), call.zero_state().float() if dfinal is None else dfinal
    if dfinal is not None:
        dfinal = _inner(call, p).zero_()
        dfinal[:, -1] = given
    _reverse(call, p, x, where, do, dfinal, offsets, {}, range(1, p.num_segments))()
    carried = _carry(x.transitions.mT.flip(1), offsets.flip(1)).flip(1)
    return torch.cat([carried, given.unsqueeze(1)], 1).flatten(0, 1)


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
    arguments |= {f"p_{name}": getattr(x, name) for name in ("G", "rho", "norms", "y", "y_low")}
    arguments |= {name: out[name] for name in ("p_D", "p_dA", "p_dA_low", "p_scalars", "p_dbeta")}
    return Launch(pair_kernel, (p.slots, p.HV), arguments, num_warps=1 if p.split else 2)


def _contract(
    p: Plan, x: Saved, where: _Chunks, do: Tensor, dv: Tensor, dstates: Tensor, out: dict[str, Any]
) -> Launch:
    BK, BV, num_warps = _contract_block(p)
    arguments = {
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_rho": x.rho,
        "p_norm2": x.norms[2],
        "p_y": x.y,
        "p_do": do,
        "p_dv": dv,
        "p_states": x.states,
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
    arguments |= {name: out[name] for name in ("p_S_do", "p_S_dr", "p_dS_u", "p_through")}
    maxnreg = 128 if num_warps == 8 else None
    grid = (-(-p.K // BK) * p.slots, p.HV)
    return Launch(contract_kernel, grid, arguments, num_warps=num_warps, maxnreg=maxnreg)


def _gradient(call: Call, p: Plan, x: Saved, where: _Chunks, out: dict[str, Any]) -> Launch:
    recover = _keeps_forward(call, p)
    arguments = _chunk_arguments(call, p, ("q", "k", "beta") if recover else ("beta",))
    for name in ("p_beta", "BETA_RANGE"):
        del arguments[name]
    BK, num_warps = (64, 4) if recover and p.K > 32 else (min(32, power_of_two(p.K)), 2)
    arguments |= {"p_starts": where.starts, "p_ends": where.ends, "BK": BK, "SPLIT": p.split, "RECOVER": recover}
    read = ("rho", "norms", "q_forward", "k_forward", "k_back", "forward", "end")
    arguments |= {f"p_{name}": getattr(x, name) for name in read}
    used = ("p_D", "p_dA", "p_dA_low", "p_scalars", "p_S_do", "p_S_dr", "p_dS_u", "p_through")
    arguments |= {name: out[name] for name in (*used, "p_dq", "p_dk", "p_dg", "p_dlog_rate", "p_dbias")}
    return Launch(gradient_kernel, (-(-p.K // BK) * p.slots, p.HV), arguments, num_warps=num_warps)


def _is_fused(call: Call, p: Plan, *tiled: Tensor) -> bool:
    """Whether one kernel ends the backward (ckda/ops/triton/hopper_gradient.py)."""
    plain = p.H == p.HV and p.V <= 128 and call.g.dtype == p.dtype and not _is_given(call)
    return plain and _is_hopper(call, p, *tiled)


def _fused(call: Call, p: Plan, x: Saved, o: Tensor, do: Tensor, dv: Tensor, dstates: Tensor, out: dict[str, Any]) -> Launch:
    arguments = gate_arguments(call, ("q", "k")) | {"p_v": call.v.contiguous(), "p_o": o, "p_do": do, "p_dv": dv} | out
    read = ("states", "y", "y_low", "q_forward", "k_forward", "k_back", "forward", "rho", "norms")
    arguments |= {f"p_{name}": getattr(x, name) for name in read} | {"p_dstates": dstates}
    arguments |= {"C": p.C, "V": p.V, "num_chunks": p.slots, "num_lines": p.B * p.T * p.HV}
    programs = min(p.slots * p.HV, torch.cuda.get_device_properties(do.device).multi_processor_count)
    return hopper.launch(hopper_gradient.hopper_gradient_kernel, arguments, (), programs, p.V, num_warps=p.K // 16)


def _gradient_outputs(call: Call, p: Plan, between: bool = True) -> dict[str, Any]:
    """Where the last three kernels write, and what they leave for each other; with grouped value heads dq and dk are summed
    over the group afterwards."""
    key_dtype = p.dtype if p.H == p.HV else torch.float32
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
    where, do = _chunks(call, p), do.contiguous()
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
    fused = FUSED and _is_fused(call, p, do, o, call.g)
    out = _gradient_outputs(call, p, between=not fused)
    if fused:
        _fused(call, p, x, o, do, dv, dstates, out)()
    else:
        _pair(call, p, x, where, o, do, dv, duy, out)()
        _contract(p, x, where, do, dv, dstates, out)()
        _gradient(call, p, x, where, out)()
    if dinitial is not None:
        dinitial = dinitial.unflatten(0, (p.N, -1))[:, 0].contiguous()
    return assemble(call, out | {"p_dv": dv.to(call.v.dtype), "p_dinitial": dinitial})
