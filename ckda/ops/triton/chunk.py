"""The chunk form on a GPU: forward and backward as a sequence of launches, of the portable kernels or of those for Hopper.

Both modules of launches have the same four functions, `intra`, `states`, `reverse` and `gradients`; `call.backend` says which.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ckda.ops.call import NUM_TENSORS, Call, Gradients
from ckda.ops.triton import replay
from ckda.ops.triton.hopper import launch as hopper
from ckda.ops.triton.hopper.fit import Resize, fit
from ckda.ops.triton.launch import Launch, aligned, assemble, compile_together, tidied
from ckda.ops.triton.plan import Passed, Plan, Work, empty_saved, find_chunks, is_bounded, open_saved, plan
from ckda.ops.triton.portable import launch as portable
from ckda.ops.triton.replay import Kept
from ckda.ops.triton.sums import gate_sums

__all__ = ["backward", "forward", "launches", "saved_like"]


def _kernels(call: Call) -> ModuleType:
    return hopper if call.backend == "triton-hopper" else portable


def _work(call: Call, p: Plan, memory: Tensor) -> Work:
    x = open_saved(p, memory)
    return Work(call, p, x, find_chunks(p, x))


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    return [empty_saved(call, plan(fit(call, Resize())))]


class _Run:
    """Launches as they are run, with what Triton compiled for each: what a tape is made of."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, Any]] = []

    def __call__(self, *launches: Launch) -> None:
        if launches:
            compile_together(launches)
        self.launches += [(launch, launch()) for launch in launches]


def _written(call: Call) -> Call:
    """The call with values as they are written: a write gate is multiplied in beforehand, an erase gate in the kernels."""
    return call if call.write is None else call._replace(v=(call.write * call.v).to(call.v.dtype), write=None)


def _G(w: Work) -> Tensor:
    """Where G is written: kept for the backward pass where that reads it."""
    return w.x.G if w.p.given else w.x.rho.new_empty(w.p.rows, w.p.HV, w.p.C)


def _beginning(w: Work, G: Tensor) -> list[Launch]:
    """What does not depend on the state."""
    return [*portable.places(w), *_kernels(w.call).intra(w, G), portable.solver(w, G)]


def _inner(w: Work) -> Tensor:
    """float32 [B, num_segments - 1, HV, K, V], for all segments but one."""
    return w.x.rho.new_empty(w.p.B, w.p.num_segments - 1, w.p.HV, w.p.K, w.p.V)


def _segment_starts(w: Work, run: _Run) -> Tensor:
    """The exact state at the start of every segment [B * num_segments, HV, K, V].

    The first segment's end comes from its own run; the segments after it but the last need their transitions.
    """
    kernels, offsets, last = _kernels(w.call), _inner(w), w.p.num_segments - 1
    given = initial = None
    if w.call.initial_state is not None:
        given, initial = w.call.start_state().contiguous(), _inner(w).zero_()
        initial[:, 0] = given
    launches = [kernels.states(w, initial, None, offsets, "offset", range(last))]
    if last > 1:
        launches.append(kernels.states(w, None, None, w.x.transitions, "transition", range(1, last)))
    carry = portable.carry(w, given, offsets)
    run(*launches, carry)
    return carry.arguments["p_carried"]


def forward(call: Call, kept: Kept) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V] where it is asked for, and what :func:`backward` reads again.

    `kept` is for calls of this kind alone: launches are kept there, and taken from there.
    """
    call = _written(tidied(call))
    made = replay.rerun(kept, "forward", call.tensors)
    if made is None:
        made = _forward(call, kept)
    o, final, memory = made
    assert o is not None
    assert memory is not None
    if final is not None:
        final = final.unflatten(0, (call.num_sequences, -1))[:, -1].contiguous()
    return o, final, [memory]


def _forward(call: Call, kept: Kept) -> list[Tensor | None]:
    """o, the final state of every segment or None, and the memory of what is saved."""
    fill, cut = Resize(), Resize()
    fitted = fit(call, fill)
    p = plan(fitted)
    memory = empty_saved(call, p)
    w, kernels, run = _work(fitted, p, memory), _kernels(call), _Run()
    G = _G(w)
    launches, initial = [*fill.launches, *_beginning(w, G)], fitted.initial_state
    if p.num_segments > 1:
        run(*launches)
        launches, initial = [], _segment_starts(w, run)
    final = w.x.rho.new_empty(p.N * p.num_segments, p.HV, p.K, p.V)
    o, (K, V) = torch.empty_like(fitted.v), (call.q.shape[3], call.v.shape[3])
    states = kernels.states(w, initial, o, final, "none", p.segments)
    made = [cut(o, V), cut(final, K, V) if call.output_final_state else None, memory]
    run(*launches, states, *cut.launches)
    if p.num_segments == 1 or call.initial_state is None:  # else it was copied into place, which is no launch of ours
        replay.record(kept, "forward", run.launches, call.tensors, made)
    return made


def _segment_ends(w: Work, do: Tensor, dfinal: Tensor | None, run: _Run) -> Tensor:
    """The gradient of the state after every segment, [B * num_segments, HV, K, V]: the adjoint of :func:`_segment_starts`."""
    offsets, given = _inner(w), dfinal
    if given is not None:
        dfinal = _inner(w).zero_()
        dfinal[:, -1] = given
    carry = portable.carry(w, given, offsets, reverse=True)
    run(_kernels(w.call).reverse(w, do, dfinal, offsets, None, range(1, w.p.num_segments)), carry)
    return carry.arguments["p_carried"]


def _empty_passed(w: Work) -> Passed:
    dv = w.x.rho.new_empty(w.call.v.shape, dtype=w.p.work_dtype)
    return Passed(dv, portable.empty_duy(w), torch.empty_like(w.x.states))


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None, kept: Kept) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None.

    `saved` are the memory that :func:`forward` left, and o.
    """
    first = 2 if is_bounded(call) else 0  # decayed q and k were saved
    tidy, do, name = _written(tidied(call, first)), aligned(do), "backward"
    given = [*tidy.tensors[first:], *map(aligned, saved), do]
    if dfinal is not None:
        name = "backward with the state's"
        given.append(aligned(dfinal.float()))
    made = replay.rerun(kept, name, given)
    if made is None:
        made = _backward(tidy, given, kept, name)
    return assemble(call, *made)  # type: ignore[arg-type]


def _backward(call: Call, given: list[Tensor | None], kept: Kept, name: str) -> list[Tensor | None]:
    """The arguments of :func:`assemble`; given are the tensors of the call, the memory of what was saved, o, do, and dfinal."""
    first = 2 * is_bounded(call)
    memory, o, do, dfinal = (*given[NUM_TENSORS - first :], None)[:4]
    assert memory is not None
    assert o is not None
    assert do is not None
    state_gradient = dfinal is not None
    fill, cut = Resize(), Resize()
    fitted = fit(call, fill, first)
    p = plan(fitted)
    o, do, dfinal = fill(o, p.V), fill(do, p.V), fill(dfinal, p.K, p.V)
    launches = fill.launches
    w, kernels, run = _work(fitted, p, memory), _kernels(call), _Run()
    if p.num_segments > 1:
        run(*launches)
        launches, dfinal = [], _segment_ends(w, do, dfinal, run)
    passed, dinitial = _empty_passed(w), None
    if call.initial_state is not None:
        dinitial = w.x.rho.new_empty(p.N * p.num_segments, p.HV, p.K, p.V)
    reverse = kernels.reverse(w, do, dfinal, dinitial, passed, p.segments)
    ends, out = kernels.gradients(w, o, do, passed)
    groups, out = portable.group_sums(w, out)
    sums, dA_log, ddt_bias = gate_sums(call, out)
    K, V = call.q.shape[3], call.v.shape[3]
    made = [
        cut(out["p_dq"], K),
        cut(out["p_dk"], K),
        cut(passed.dv, V),
        cut(out["p_dg"], K),
        out["p_dbeta"],
        dA_log,
        ddt_bias,
        cut(dinitial, K, V),
        cut(out["p_derase"], K),
    ]
    run(*launches, reverse, *ends, *groups, *sums, *cut.launches)
    if p.num_segments == 1 or not state_gradient:  # else it was copied into place, which is no launch of ours
        replay.record(kept, name, run.launches, given, made)
    return made


def launches(call: Call) -> list[Launch]:
    """The launches of one forward and backward pass on empty tensors of the call's device: for compiling, not for running."""
    call, fill, cut = _written(call), Resize(), Resize()
    fitted = fit(call, fill)
    p = plan(fitted)
    w, kernels = _work(fitted, p, empty_saved(call, p)), _kernels(call)
    o, state, G, passed, segments = torch.empty_like(fitted.v), fitted.zero_state(), _G(w), _empty_passed(w), p.segments
    ends, out = kernels.gradients(w, o, o, passed)
    groups, out = portable.group_sums(w, out)
    cut(o, call.v.shape[3])
    return [
        *fill.launches,
        *_beginning(w, G),
        kernels.states(w, state, o, state, "none", segments),
        kernels.states(w, state, None, state, "offset", segments),
        kernels.states(w, None, None, w.x.transitions, "transition", segments),
        portable.carry(w, state, _inner(w)),
        kernels.reverse(w, o, state, state, passed, segments),
        kernels.reverse(w, o, state, state, None, segments),
        *ends,
        *groups,
        *gate_sums(call, out)[0],
        *cut.launches,
    ]
