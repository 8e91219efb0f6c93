"""The chunk form on a GPU: forward and backward as a sequence of launches, of the portable kernels or of those for Hopper.

Both sets of kernels have the same four doors, `intra`, `states`, `reverse` and `gradients`; the call carries which of them runs it.
"""

from types import ModuleType

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients
from ckda.ops.triton import replay
from ckda.ops.triton.hopper import launch as hopper
from ckda.ops.triton.launch import Launch, aligned, assemble
from ckda.ops.triton.plan import OUTPUTS, Passed, Plan, Saved, Work, empty_saved, find_chunks, plan
from ckda.ops.triton.portable import launch as portable

__all__ = ["backward", "forward", "launches", "saved_like"]


def _kernels(call: Call) -> ModuleType:
    return hopper if call.backend == "triton-hopper" else portable


def _work(call: Call, p: Plan, x: Saved) -> Work:
    return Work(call, p, x, find_chunks(p, x))


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return [*empty_saved(call, plan(call))]


def _written(call: Call) -> Call:
    """The call with values as they are written: a write gate is multiplied in beforehand, an erase gate in the kernels."""
    return call if call.write is None else call._replace(v=(call.write * call.v).to(call.v.dtype), write=None)


def _G(w: Work) -> Tensor:
    """Where G is written: kept for the backward pass where that reads it."""
    return w.x.G if w.p.given else w.x.rho.new_empty(w.p.rows, w.p.HV, w.p.C)


def _inner(w: Work) -> Tensor:
    """float32 [B, num_segments - 1, HV, K, V], for all segments but one."""
    return w.x.rho.new_empty(w.p.B, w.p.num_segments - 1, w.p.HV, w.p.K, w.p.V)


def _segment_starts(w: Work) -> Tensor:
    """The exact state at the start of every segment [B * num_segments, HV, K, V].

    The first segment's end comes from its own run; the segments after it but the last need their transitions.
    """
    kernels, offsets, last = _kernels(w.call), _inner(w), w.p.num_segments - 1
    given = initial = None
    if w.call.initial_state is not None:
        given, initial = w.call.start_state().contiguous(), _inner(w).zero_()
        initial[:, 0] = given
    kernels.states(w, initial, None, offsets, "offset", range(last))()
    if last > 1:
        kernels.states(w, None, None, w.x.transitions, "transition", range(1, last))()
    carry = portable.carry(w, given, offsets)
    carry()
    return carry.arguments["p_carried"]


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    call = _written(call)
    p, given = plan(call), call.tensors
    key, tape = replay.find("forward", call, given) if p.num_segments == 1 else (None, None)
    if tape is not None:
        o, final, *saved = tape.run(given)
        return o, final, saved  # type: ignore[return-value]
    w, kernels = _work(call, p, empty_saved(call, p)), _kernels(call)
    G = _G(w)
    launches = [*portable.places(w), kernels.intra(w, G), portable.solver(w, G)]
    run = [(launch, launch()) for launch in launches]
    del G
    initial = None if call.initial_state is None else call.start_state().contiguous()
    if p.num_segments > 1:
        initial = _segment_starts(w)
    final = w.x.rho.new_empty(p.N * p.num_segments, p.HV, p.K, p.V)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    launch = kernels.states(w, initial, o, final, "none", p.segments)
    replay.record(key, [*run, (launch, launch())], given, (o, final, *w.x))
    return o, final.unflatten(0, (p.N, -1))[:, -1].contiguous(), [*w.x]


def _segment_ends(w: Work, do: Tensor, dfinal: Tensor | None) -> Tensor:
    """The gradient of the state after every segment, [B * num_segments, HV, K, V]: the adjoint of :func:`_segment_starts`."""
    offsets, given = _inner(w), dfinal
    if given is not None:
        dfinal = _inner(w).zero_()
        dfinal[:, -1] = given
    _kernels(w.call).reverse(w, do, dfinal, offsets, None, range(1, w.p.num_segments))()
    carry = portable.carry(w, given, offsets, reverse=True)
    carry()
    return carry.arguments["p_carried"]


def _empty_passed(w: Work) -> Passed:
    dv = w.x.rho.new_empty(w.call.v.shape, dtype=w.p.work_dtype)
    return Passed(dv, portable.empty_duy(w), torch.empty_like(w.x.states))


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None.

    The last of `saved` is o.
    """
    *kept, o = saved
    outer, call = call, _written(call)
    p, do = plan(call), aligned(do)
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    given = (*call.tensors, *saved, do, dfinal)
    key, tape = replay.find("backward", call, given) if p.num_segments == 1 else (None, None)
    if tape is not None:
        made = tape.run(given)
        return _assemble(outer, made[0], made[1], dict(zip(OUTPUTS, made[2:], strict=True)))
    w, kernels = _work(call, p, Saved(*kept)), _kernels(call)
    if p.num_segments > 1:
        dfinal = _segment_ends(w, do, dfinal)
    passed, dinitial = _empty_passed(w), None
    if call.initial_state is not None:
        dinitial = w.x.rho.new_empty(p.N * p.num_segments, p.HV, p.K, p.V)
    reverse = kernels.reverse(w, do, dfinal, dinitial, passed, p.segments)
    run = [(reverse, reverse())]
    ends, out = kernels.gradients(w, o, do, passed)
    sums, out = portable.group_sums(w, out)
    run += [(launch, launch()) for launch in (*ends, *sums)]
    replay.record(key, run, given, (passed.dv, dinitial, *(out[name] for name in OUTPUTS)))
    if dinitial is not None:
        dinitial = dinitial.unflatten(0, (p.N, -1))[:, 0].contiguous()
    return _assemble(outer, passed.dv, dinitial, out)


def _assemble(call: Call, dv: Tensor | None, dinitial: Tensor | None, out: dict[str, Tensor | None]) -> Gradients:
    assert dv is not None
    dwrite = None
    if call.write is not None:
        dwrite, dv = (dv * call.v).to(call.write.dtype), dv * call.write
    return assemble(call, out | {"p_dv": dv.to(call.v.dtype), "p_dwrite": dwrite, "p_dinitial": dinitial})


def launches(call: Call) -> list[Launch]:
    """The launches of one forward and backward pass on empty tensors of the call's device: for compiling, not for running."""
    call = _written(call)
    p = plan(call)
    w, kernels = _work(call, p, empty_saved(call, p)), _kernels(call)
    o, state, G, passed, segments = torch.empty_like(call.v), call.zero_state(), _G(w), _empty_passed(w), w.p.segments
    ends, out = kernels.gradients(w, o, o, passed)
    sums, _ = portable.group_sums(w, out)
    return [
        *portable.places(w),
        kernels.intra(w, G),
        portable.solver(w, G),
        kernels.states(w, state, o, state, "none", segments),
        kernels.states(w, state, None, state, "offset", segments),
        kernels.states(w, None, None, w.x.transitions, "transition", segments),
        portable.carry(w, state, _inner(w)),
        kernels.reverse(w, o, state, state, passed, segments),
        kernels.reverse(w, o, state, state, None, segments),
        *ends,
        *sums,
    ]
