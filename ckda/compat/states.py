"""States as the functions of :mod:`ckda.compat.fla` take and give them: in either layout, in slots of a pool, between chunks.

What engines ask for is :mod:`ckda.ops.serving`; here FLA's and vLLM's forms of it are read.

`arguments` are those of :func:`ckda.complex_kda` but for the states. Legend of axes as in :mod:`ckda.compat.fla`.
"""

from typing import Any

import torch
from torch import Tensor

from ckda.ops import complex_kda, complex_kda_step, serving

__all__ = ["check_state", "check_written", "on_slots", "recur", "state_in", "state_out", "with_states"]


def state_in(state: Tensor | None, v_first: bool, arguments: dict[str, Any]) -> Tensor | None:
    """FLA's state as the operator's [N, HV, K, V], or a sentence where its shape is another."""
    if state is None:
        return None
    check_state(state, v_first, arguments)
    wide = torch.float64 if arguments["v"].dtype == torch.float64 else torch.float32
    return (state.mT if v_first else state).to(wide).contiguous()


def check_state(state: Tensor, v_first: bool, arguments: dict[str, Any], slots: bool = False) -> None:
    """A sentence where a state, or a pool of any number of slots, does not have FLA's shape."""
    if not isinstance(state, Tensor) or not state.is_floating_point():
        was = state.dtype if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"initial_state is {was}; it must be a floating tensor, or None")
    k, v, cu_seqlens = arguments["k"], arguments["v"], arguments["cu_seqlens"]
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if slots:
        N = state.shape[0] if state.dim() and state.shape[0] else 1  # a pool has any number, but not none
    shape, axes = [N, v.shape[2], k.shape[3], v.shape[3]], "N, HV, K, V"
    if v_first:
        shape[2:], axes = shape[:1:-1], "N, HV, V, K"
    if list(state.shape) != shape:
        other = list(state.shape) == [*shape[:2], *shape[:1:-1]]
        hint = f": this is the layout of state_v_first={not v_first}" if other else ""
        raise ValueError(f"the shape of initial_state is {list(state.shape)}; it must be [{axes}] = {shape}{hint}")
    if state.device != v.device:
        raise ValueError(f"the device of initial_state is {state.device}; it must be that of v, {v.device}")


def state_out(state: Tensor | None, v_first: bool) -> Tensor | None:
    return state.mT.contiguous() if v_first and state is not None else state


def check_written(state: Tensor) -> None:
    """A state that is to be written in place is no leaf of a gradient."""
    if state.requires_grad and torch.is_grad_enabled():
        raise ValueError("initial_state requires a gradient; states that are written in place must not")


def recur(arguments: dict[str, Any], start: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """The operator; one token a sequence goes the way of decoding."""
    v, cu_seqlens = arguments["v"], arguments["cu_seqlens"]
    if start is None or v.shape[:2] != (start.shape[0], 1) or cu_seqlens is not None:
        return complex_kda(**arguments, initial_state=start, output_final_state=final)
    tokens = {name: x[:, 0] for name, x in _tokens(arguments).items()}
    o, state = complex_kda_step(**tokens, **_options(arguments), state=start)
    return o.unsqueeze(1), state if final else None


def on_slots(arguments: dict[str, Any], pool: Tensor, v_first: bool, slots: Tensor, accepted: Tensor | None) -> Tensor:
    """The output of sequences whose states are slots of a pool, which are written; see :func:`ckda.compat.fla.fused_recurrent_kda`.

    With one slot a sequence and as many tokens as sequences, each has one token, or none: then nothing is read back from a GPU.
    """
    v, cu_seqlens = arguments["v"], arguments["cu_seqlens"]
    check_state(pool, v_first, arguments, slots=True)
    check_written(pool)
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if not isinstance(slots, Tensor):
        raise ValueError(f"ssm_state_indices is {type(slots).__name__}; it must be a tensor [N] or [N, W]")
    if slots.dim() == 0 or slots.shape[0] != N or slots.dim() > 2 or (accepted is not None and slots.dim() != 2):
        raise ValueError(
            f"the shape of ssm_state_indices is {list(slots.shape)}; it must be [N] or, with num_accepted_tokens, [N, W], N = {N}"
        )
    tokens, options = _tokens(arguments), _options(arguments) | {"v_first": v_first}
    flat = {name: x.flatten(0, 1) for name, x in tokens.items()}
    if slots.dim() == 1:
        if flat["v"].shape[0] != N or _has_several(cu_seqlens):
            return serving.prefill(**tokens, pool=pool, slots=slots, cu_seqlens=cu_seqlens, **options)
        if cu_seqlens is None:
            return serving.step(**flat, pool=pool, slots=slots, **options).view_as(v)
        slots = slots.unsqueeze(1)
    bounds = torch.arange(N + 1, device=v.device) * v.shape[1] if cu_seqlens is None else cu_seqlens
    o = serving.verify(**flat, pool=pool, slots=slots, cu_seqlens=bounds, accepted=accepted, **options)
    return o.view_as(v)


def _has_several(cu_seqlens: Tensor | None) -> bool:
    """Whether a sequence has more than one token; on a GPU, where that cannot be seen, none has."""
    return cu_seqlens is not None and cu_seqlens.device.type == "cpu" and int(cu_seqlens.diff().max()) > 1


def with_states(
    arguments: dict[str, Any], start: Tensor | None, final: bool, v_first: bool, chunk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, the final state, and the states before each chunk of each sequence, [B, NT, HV, K, V]."""
    if torch.is_grad_enabled():
        raise ValueError("return_intermediate_states is True; it must be used under torch.inference_mode(), as in FLA")
    o, state, states = serving.states_every(**arguments, num_tokens=chunk, initial_state=start)
    states = states.to(arguments["q"].dtype)
    return o, state_out(state, v_first) if final else None, states.mT.contiguous() if v_first else states


def _tokens(arguments: dict[str, Any]) -> dict[str, Any]:
    """What has a time axis."""
    return {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """What has none, but for the lengths."""
    return {name: x for name, x in arguments.items() if name not in ("q", "k", "v", "g", "beta", "cu_seqlens")}
