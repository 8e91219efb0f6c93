"""States as the functions of :mod:`ckda.compat.fla` take and give them: in either layout, in slots of a pool, between chunks.

`arguments` are those of :func:`ckda.complex_kda` but for the states. Legend of axes as in :mod:`ckda.compat.fla`.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ckda.ops import complex_kda, complex_kda_step

__all__ = ["on_slots", "recur", "state_in", "state_out", "with_states", "written"]


def state_in(state: Tensor | None, v_first: bool, arguments: dict[str, Any], slots: bool = False) -> Tensor | None:
    """FLA's state as the operator's [N, HV, K, V], or a sentence where its shape is another; a pool has any number of slots."""
    if state is None:
        return None
    k, v, cu_seqlens = arguments["k"], arguments["v"], arguments["cu_seqlens"]
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    shape = [state.shape[0] if slots else N, v.shape[2], k.shape[3], v.shape[3]]
    axes = "N, HV, K, V"
    if v_first:
        shape[2:], axes = shape[:1:-1], "N, HV, V, K"
    if list(state.shape) != shape:
        other = list(state.shape) == [*shape[:2], *shape[:1:-1]]
        hint = f": this is the layout of state_v_first={not v_first}" if other else ""
        raise ValueError(f"the shape of initial_state is {list(state.shape)}; it must be [{axes}] = {shape}{hint}")
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    return (state.mT if v_first else state).to(wide).contiguous()


def state_out(state: Tensor | None, v_first: bool) -> Tensor | None:
    return state.mT.contiguous() if v_first and state is not None else state


def written(pool: Tensor, slots: Tensor | None, state: Tensor) -> Tensor:
    """The states written into the pool, all of it or these slots."""
    if pool.requires_grad and torch.is_grad_enabled():
        raise ValueError("initial_state requires a gradient; states that are written in place must not")
    state = state.detach().to(pool.dtype)
    return pool.copy_(state) if slots is None else pool.index_copy_(0, slots, state)


def recur(arguments: dict[str, Any], start: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
    """The operator; one token a sequence goes the way of decoding."""
    v, cu_seqlens = arguments["v"], arguments["cu_seqlens"]
    if start is None or v.shape[:2] != (start.shape[0], 1) or cu_seqlens is not None:
        return complex_kda(**arguments, initial_state=start, output_final_state=final)
    o, state = _step(arguments, start, lambda x: x[:, 0])
    return o.unsqueeze(1), state if final else None


_TOKENS = ("q", "k", "v", "g", "beta")


def _step(arguments: dict[str, Any], state: Tensor, pick: Any) -> tuple[Tensor, Tensor]:
    """One token of each sequence: `pick` takes it out of what has a time axis."""
    rest = {name: x for name, x in arguments.items() if name not in (*_TOKENS, "cu_seqlens")}
    return complex_kda_step(**{name: pick(arguments[name]) for name in _TOKENS}, state=state, **rest)


def on_slots(arguments: dict[str, Any], pool: Tensor, v_first: bool, slots: Tensor, accepted: Tensor | None) -> Tensor:
    """The output of sequences whose states are slots of a pool, which are written.

    Nothing is read back from a GPU where every sequence has one token, as in decoding; else the lengths are.
    """
    k, cu_seqlens = arguments["k"], arguments["cu_seqlens"]
    state_in(pool[:1], v_first, arguments, slots=True)
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if slots.shape[0] != N or slots.dim() > 2 or (accepted is not None and slots.dim() != 2):
        raise ValueError(
            f"the shape of ssm_state_indices is {list(slots.shape)}; it must be [N] or, with num_accepted_tokens, [N, W], N = {N}"
        )
    if slots.device.type == "cpu" and bool((slots < 0).any()):
        raise ValueError("ssm_state_indices has a negative entry; it must name a slot of initial_state")
    table = slots.long().view(N, -1)
    first = table[:, 0] if accepted is None else table.gather(1, accepted.long().view(N, 1) - 1)[:, 0]
    state = state_in(pool.index_select(0, first), v_first, arguments, slots=True)
    assert state is not None
    flat = arguments | {name: arguments[name].flatten(0, 1) for name in _TOKENS}
    if flat["v"].shape[0] == N:
        o, state = _step(flat, state, lambda x: x)
        written(pool, table[:, 0], state_out(state, v_first))  # type: ignore[arg-type]
        return o.view(arguments["v"].shape)
    return _token_by_token(flat, pool, v_first, table, state, cu_seqlens).view(arguments["v"].shape)


def _token_by_token(
    flat: dict[str, Any], pool: Tensor, v_first: bool, table: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """:func:`on_slots` for several tokens a sequence: token t of each at once, each to its slot."""
    N, (total, device) = table.shape[0], (flat["v"].shape[0], table.device)
    bounds = [n * (total // N) for n in range(N + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    if table.shape[1] > 1 and max(lengths) > table.shape[1]:
        raise ValueError(
            f"ssm_state_indices has {table.shape[1]} slots a sequence; the longest has {max(lengths)} tokens"
        )
    o = torch.empty_like(flat["v"])
    for t in range(max(lengths)):
        here = [n for n in range(N) if t < lengths[n]]
        at = torch.tensor([bounds[n] + t for n in here], device=device)
        rows = torch.tensor(here, device=device)
        o_t, following = _step(flat, state[rows], lambda x, at=at: x[at])
        o[at], state[rows] = o_t, following
        slot = table[rows, min(t, table.shape[1] - 1)]
        written(pool, slot, state_out(following, v_first))  # type: ignore[arg-type]
    return o


def with_states(
    arguments: dict[str, Any], start: Tensor | None, final: bool, v_first: bool, chunk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, the final state, and the states before each chunk of each sequence, [B, NT, HV, K, V]."""
    if torch.is_grad_enabled():
        raise ValueError("return_intermediate_states is True; it must be used under torch.inference_mode(), as in FLA")
    q, v, cu_seqlens = arguments["q"], arguments["v"], arguments["cu_seqlens"]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    if start is None:
        start = v.new_zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=wide)
    if cu_seqlens is None:
        o, states, state = _chunk_by_chunk(arguments, start, chunk)
    else:
        bounds, parts = cu_seqlens.tolist(), []
        for n in range(N):
            here = {name: arguments[name][:, bounds[n] : bounds[n + 1]] for name in _TOKENS}
            parts.append(_chunk_by_chunk(arguments | here | {"cu_seqlens": None}, start[n : n + 1], chunk))
        o, states, state = (torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 1, 0), strict=True))
    states = states.to(q.dtype)
    return o, state_out(state, v_first) if final else None, states.mT.contiguous() if v_first else states


def _chunk_by_chunk(arguments: dict[str, Any], state: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """o, the states before each chunk [B, NT, HV, K, V], and the last one; nothing for a sequence without tokens."""
    T, outputs, states = arguments["v"].shape[1], [], []
    for t in range(0, T, chunk):
        here = {name: arguments[name][:, t : t + chunk] for name in _TOKENS}
        states.append(state)
        o, following = complex_kda(**arguments | here, initial_state=state, output_final_state=True)
        assert following is not None
        outputs.append(o)
        state = following
    if not outputs:
        return arguments["v"], state.unsqueeze(1)[:, :0], state
    return torch.cat(outputs, 1), torch.stack(states, 1), state
