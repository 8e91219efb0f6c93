"""The operator as an inference engine calls it: states in a pool by slot, several drafts at once, states at interior positions.

    prefill        whole sequences, each from the state in its slot (or from nothing), which is then overwritten
    step           one token a sequence
    verify         a few draft tokens a sequence; the state after each goes to a slot of its own, so that any may be accepted
    states_every   the states before every so many tokens

A pool [S, HV, K, V] holds a state a slot, with `v_first` [S, HV, V, K], in any floating dtype and with any strides. A negative
slot is padding: no state is read or written for it, and its output means nothing. :func:`step` and :func:`verify` read nothing
back from the device. There are no gradients. States are gathered and scattered around the operator's kernels.

`options` are those of :func:`ckda.complex_kda` without the states; `sign`, `erase` and `write` have a row a token, as q has.
Legend: B batch, T time, H query/key heads, HV value heads, K key width, V value width, N sequences, S slots, W slots a sequence.
"""

from typing import Any

import torch
from torch import Tensor

from ckda.ops import complex_kda, complex_kda_step, validate
from ckda.ops.call import Call

__all__ = ["prefill", "states_every", "step", "verify"]


@torch.no_grad()
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    *,
    fresh: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    v_first: bool = False,
    **options: Any,
) -> Tensor:
    """The output [B, T, HV, V] of sequences that start from their slots' states; the states after them are written there.

    Args:
        q, k, v, g, beta: as :func:`ckda.complex_kda` takes them. slots: [N]. fresh: [N] true where a sequence starts from zero.

    Example:
        >>> pool, x = torch.zeros(4, 2, 8, 8), torch.randn(1, 30, 2, 8)
        >>> o = prefill(x, x, x, -x.abs(), x[..., 0], pool, torch.tensor([3, 1]), cu_seqlens=torch.tensor([0, 10, 30]))
        >>> pool.abs().sum((1, 2, 3)) > 0
        tensor([False,  True, False,  True])
    """
    _tokens((q, k, v, g, beta), options)
    N = q.shape[0] if cu_seqlens is None else _whole_numbers("cu_seqlens", cu_seqlens).numel() - 1
    slots = _checked(pool, slots, N, 1, k, v, v_first)
    state = _read(pool, slots, v, v_first)
    if fresh is not None:
        if not isinstance(fresh, Tensor) or fresh.shape != slots.shape or fresh.dtype != torch.bool:
            was = f"{fresh.dtype} {list(fresh.shape)}" if isinstance(fresh, Tensor) else type(fresh).__name__
            raise ValueError(f"fresh is {was}; it must be torch.bool [N] = {list(slots.shape)}")
        state = state.masked_fill(fresh.view(N, 1, 1, 1), 0.0)
    o, following = complex_kda(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, initial_state=state, output_final_state=True, **options
    )
    assert following is not None
    rows = _stand_in(slots >= 0)
    _write(pool, slots, rows, following[rows], v_first)
    return o


@torch.no_grad()
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    *,
    v_first: bool = False,
    **options: Any,
) -> Tensor:
    """The output [N, HV, V] of one token a sequence, q [N, H, K] and so on; the states in `slots` [N] are advanced.

    Example:
        >>> pool, x = torch.zeros(4, 2, 8, 8), torch.randn(3, 2, 8)
        >>> o = step(x, x, x, -x.abs(), x[..., 0], pool, torch.tensor([3, -1, 1]))  # the second row is padding
        >>> pool.abs().sum((1, 2, 3)) > 0
        tensor([False,  True, False,  True])
    """
    tokens, options = _tokens((q, k, v, g, beta), options)
    slots = _checked(pool, slots, q.shape[0], 1, k, v, v_first)
    rows = _stand_in(slots >= 0)
    state = _read(pool, slots[rows], v, v_first)
    o, state = complex_kda_step(**_at(rows, tokens), state=state, **options)
    _write(pool, slots, rows, state, v_first)
    return o


@torch.no_grad()
def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    *,
    cu_seqlens: Tensor,
    accepted: Tensor | None = None,
    v_first: bool = False,
    **options: Any,
) -> Tensor:
    """The output [T, HV, V] of at most W tokens a sequence; the state after token t of a sequence goes to its slot t.

    Args:
        q, k: [T, H, K], all sequences' tokens in a row; v, g and beta likewise. cu_seqlens: [N + 1] where they begin and end.
        slots: [N, W].
        accepted: [N] how many tokens of the last call were accepted, from 1 to W: a sequence goes on from the slot of the last
            of them; None: from its first slot.

    Example:
        >>> pool, x = torch.zeros(4, 2, 8, 8), torch.randn(3, 2, 8)
        >>> slots, bounds = torch.tensor([[3, 1]]), torch.tensor([0, 2])
        >>> _ = verify(x[:2], x[:2], x[:2], -x[:2].abs(), x[:2, :, 0], pool, slots, cu_seqlens=bounds)
        >>> rest = x[2:], x[2:], x[2:], -x[2:].abs(), x[2:, :, 0]  # both were right: go on from slot 1
        >>> verify(*rest, pool, slots, cu_seqlens=torch.tensor([0, 1]), accepted=torch.tensor([2])).shape
        torch.Size([1, 2, 8])
    """
    tokens, options = _tokens((q, k, v, g, beta), options)
    total, N = v.shape[0], _whole_numbers("cu_seqlens", cu_seqlens).numel() - 1
    slots = _checked(pool, slots, N, 2, k, v, v_first)
    W = slots.shape[1]
    _check_lengths(cu_seqlens, total, W)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    first = slots[:, 0] if accepted is None else slots.gather(1, _last(accepted, slots))[:, 0]
    state = _read(pool, first, v, v_first)
    o = v.new_zeros(total + 1, *v.shape[1:])  # the last row takes what belongs to no token
    for t in range(W):
        here = (t < lengths) & (first >= 0)
        slot = torch.where(here, slots[:, t], -1)
        rows = _stand_in(slot >= 0)
        at = (starts + t).clamp(max=total - 1)
        o_t, following = complex_kda_step(**_at(at, tokens), state=state, **options)
        o[torch.where(here, at, total)] = o_t
        _write(pool, slot, rows, following[rows], v_first)
        if t + 1 < W:
            state = torch.where(here.view(N, 1, 1, 1), following, state)
    return o[:total]


@torch.no_grad()
def states_every(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    num_tokens: int,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state [N, HV, K, V], and the states before every `num_tokens` tokens, [B, NT, HV, K, V].

    Of packed sequences (B = 1) the states stand in a row, those of the first sequence first. One call a piece: for looking and for
    keeping prefixes, not for speed; the lengths of packed sequences are read back.

    Example:
        >>> x = torch.randn(1, 10, 2, 8)
        >>> o, state, states = states_every(x, x, x, -x.abs(), x[..., 0], 4)
        >>> states.shape, float(states[:, 0].abs().max())
        (torch.Size([1, 3, 2, 8, 8]), 0.0)
    """
    tokens, others = _tokens((q, k, v, g, beta), options)
    validate(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens!r}; it must be a whole number from 1")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    start = initial_state
    if start is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        start = v.new_zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=wide)
    if cu_seqlens is None:
        return _piece_by_piece(tokens, start, num_tokens, others)
    bounds, parts = cu_seqlens.tolist(), []
    for n in range(N):
        here = _between(bounds[n], bounds[n + 1], tokens)
        parts.append(_piece_by_piece(here, start[n : n + 1], num_tokens, others))
    o, state, states = (torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 0, 1), strict=True))
    return o, state, states


def _piece_by_piece(
    tokens: dict[str, Tensor], state: Tensor, num_tokens: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`states_every` of sequences of one length; nothing for those without tokens."""
    v = tokens["v"]
    outputs, states = [v[:, :0]], [state.unsqueeze(1)[:, :0]]
    for t in range(0, v.shape[1], num_tokens):
        part = _between(t, t + num_tokens, tokens)
        states.append(state.unsqueeze(1))
        o, following = complex_kda(**part, initial_state=state, output_final_state=True, **options)
        assert following is not None
        outputs.append(o)
        state = following
    return torch.cat(outputs, 1), state, torch.cat(states, 1)


# Tokens ---------------------------------------------------------------------------------------------------------------------


#: what `options` may hold
_OPTIONS = tuple(x for x in Call._fields[5:] if x not in ("initial_state", "output_final_state", "cu_seqlens"))


def _tokens(main: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What has a row a token, as many rows each as q, and the other options. What is None stays so."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError(f"there is no option {unknown[0]!r} here; there are {', '.join(_OPTIONS)}")
    tokens = dict(zip(("q", "k", "v", "g", "beta"), main, strict=True))
    tokens |= {name: options[name] for name in ("sign", "erase", "write") if options.get(name) is not None}
    q = tokens["q"]
    for name, x in tokens.items():
        if not isinstance(x, Tensor) and (x is not None or name != "beta"):
            raise ValueError(f"{name} is {type(x).__name__}; it must be a tensor")
        if x is not None and x.shape[0] != q.shape[0]:
            raise ValueError(f"the shape of {name} is {list(x.shape)}; its first axis must be that of q, {q.shape[0]}")
    return tokens, {name: x for name, x in options.items() if name not in tokens}


def _whole_numbers(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in _WHOLE:
        was = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is {was}; it must be a tensor of whole numbers")
    return x


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


def _at(rows: Tensor, tokens: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else x[rows] for name, x in tokens.items()}


def _between(start: int, end: int, tokens: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else x[:, start:end] for name, x in tokens.items()}


def _check_lengths(cu_seqlens: Tensor, total: int, W: int) -> None:
    """Where sequences begin and end, if that can be read without waiting: within the tokens, and no more tokens than slots."""
    if cu_seqlens.device.type != "cpu":
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > total or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.tolist()}; it must be non-decreasing from 0 to at most {total}, the number of tokens"
        )
    if int(lengths.max()) > W:
        raise ValueError(f"slots has {W} slots a sequence; the longest has {int(lengths.max())} tokens")


def _last(accepted: Tensor, slots: Tensor) -> Tensor:
    """[N, 1] the place of the last accepted token's slot."""
    N, W = slots.shape
    if not isinstance(accepted, Tensor) or accepted.shape != (N,) or accepted.is_floating_point():
        was = f"{accepted.dtype} {list(accepted.shape)}" if isinstance(accepted, Tensor) else type(accepted).__name__
        raise ValueError(f"accepted is {was}; it must be whole numbers [N] = [{N}], from 1 to {W}")
    if accepted.device.type == "cpu" and bool(((accepted < 1) | (accepted > W)).any()):
        raise ValueError(f"accepted is {accepted.tolist()}; its entries must be from 1 to the number of slots, {W}")
    return accepted.long().view(N, 1) - 1


# The pool -------------------------------------------------------------------------------------------------------------------


def _checked(pool: Tensor, slots: Tensor, N: int, rank: int, k: Tensor, v: Tensor, v_first: bool) -> Tensor:
    """slots [N] or [N, W] as int64, or a sentence that names what is wrong."""
    for name, x in (("pool", pool), ("slots", slots)):
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] == 0:
            was = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {was}; it must be a tensor with at least one row")
    HV, V, K = v.shape[-2], v.shape[-1], k.shape[-1]
    wanted = [HV, V, K] if v_first else [HV, K, V]
    if list(pool.shape[1:]) != wanted:
        axes = "S, HV, V, K" if v_first else "S, HV, K, V"
        raise ValueError(f"the shape of pool is {list(pool.shape)}; it must be [{axes}] = {['S', *wanted]}")
    if not pool.is_floating_point() or pool.device != v.device:
        raise ValueError(f"pool is {pool.dtype} on {pool.device}; it must be floating numbers on {v.device}")
    if slots.dim() != rank or slots.shape[0] != N:
        raise ValueError(f"the shape of slots is {list(slots.shape)}; it must be {[N] if rank == 1 else [N, 'W']}")
    if _whole_numbers("slots", slots).device != v.device:
        raise ValueError(f"the device of slots is {slots.device}; it must be that of v, {v.device}")
    if slots.device.type == "cpu" and bool((slots >= pool.shape[0]).any()):
        raise ValueError(
            f"slots has the entry {int(slots.max())}; it must be below the number of slots, {pool.shape[0]}"
        )
    return slots.long()


def _read(pool: Tensor, slots: Tensor, v: Tensor, v_first: bool) -> Tensor:
    """The states of these slots as the operator takes them; of a negative one, some state."""
    state = pool.index_select(0, slots.clamp(min=0))
    return (state.mT if v_first else state).to(torch.promote_types(v.dtype, torch.float32)).contiguous()


def _stand_in(valid: Tensor) -> Tensor:
    """[N] a row for every row: itself where valid, elsewhere the first valid one.

    What is padding repeats that row's work and writes the same state to the same slot: no row needs to be left out, which would
    take a look at the values.

    Example:
        >>> _stand_in(torch.tensor([False, True, False, True]))
        tensor([1, 1, 1, 3])
    """
    return torch.where(valid, torch.arange(valid.numel(), device=valid.device), valid.to(torch.uint8).argmax())


def _write(pool: Tensor, slots: Tensor, rows: Tensor, state: Tensor, v_first: bool) -> None:
    """Put the states of :func:`_stand_in`'s rows into their slots; where all are padding the pool stays as it is."""
    kept = pool[:1].clone()  # where all are padding, slot 0 is written for want of another
    pool.index_copy_(0, slots[rows].clamp(min=0), (state.mT if v_first else state).to(pool.dtype))
    pool[:1] = torch.where((slots >= 0).any(), pool[:1], kept)
