"""Context parallelism: one sequence over several ranks, each with a part of the time axis.

Over a piece of the sequence the recurrence is affine in the state it starts from, ``S_end = M S_start + A``, and so is what is
read, ``o_t = o_t(from zero) + R_t S_start``. K further value columns that start from the identity and write nothing show M (at
the end) and R (as outputs), exactly: columns of the state never mix. So each rank

    1. runs its pieces with V + K columns, which gives A [K, V], M [K, K] and R [T, K] a head;
    2. sends (M, A) of each piece and receives those of all: the one exchange;
    3. folds ``S_{p+1} = M_p S_p + A_p`` up to its own pieces, in float64 (P small products);
    4. runs its pieces from those states: the outputs, by the same kernels and with the same rounding as on one device.

The loss reaches the state at the end of piece p through all later pieces, ``D_{p-1} = E_p + M_p^T D_p``, where
``E_p = sum_t R_t^T do_t`` is what piece p itself asks of the state it starts from. In the backward pass each rank sends E of its
pieces ([K, V] a head: M is known already), folds D in reverse, and hands it to step 4 as the gradient of its final state; the
operator's own backward does the rest, once.

Packed sequences: a piece that holds the start of a sequence does not depend on what came before it, and its M and R are zero
there by themselves. So each piece has one (M, A), that of the sequence which leaves it.

What is the same on all ranks (initial_state, A_log, dt_bias) gets its gradient in parts: their sum over the ranks is the
gradient, as with weights. A final state is the same on all ranks, and its gradients from all ranks count.

Legend: W ranks, P pieces, n pieces a rank (1, zig-zag 2), L tokens a piece, N sequences, C states that leave a piece (the
batch; 1 with cu_seqlens); B, T, HV, K, V as elsewhere, T the tokens of this rank.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from ckda.ops.call import MAX_WIDTH, Call, check_call, wide_dtype
from ckda.ops.dispatch import apply, choose, full_precision

__all__ = ["Context", "complex_kda_context", "exchanged_bytes", "gathered", "previous_tails"]


@dataclass(frozen=True)
class Context:
    """The ranks that share the time axis, and who has which tokens.

    The axis is cut into equal pieces: as many as ranks, rank r has piece r; or zig-zag, twice as many, rank r has pieces r and
    2 W - 1 - r, end to end (which gives causal attention beside this layer equal work on all ranks).

    Args:
        group: a process group (None: all ranks). zigzag: two pieces a rank.

    Example:
        >>> [Context.owned(rank, 4, zigzag=True) for rank in range(4)]
        [(0, 7), (1, 6), (2, 5), (3, 4)]
    """

    group: Any = None
    zigzag: bool = False

    @staticmethod
    def owned(rank: int, size: int, zigzag: bool) -> tuple[int, ...]:
        """The pieces of a rank, in its order."""
        return (rank, 2 * size - 1 - rank) if zigzag else (rank,)

    @property
    def size(self) -> int:
        """W."""
        if not distributed.is_initialized():
            raise ValueError(
                "there is no process group; start with torchrun, or call torch.distributed.init_process_group"
            )
        size = distributed.get_world_size(self.group)
        if size < 1:
            raise ValueError(
                "the context's group does not hold this rank; every rank that makes the call must be in it"
            )
        return size

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return distributed.get_rank(self.group)

    @property
    def per_rank(self) -> int:
        """n."""
        return 2 if self.zigzag else 1

    @property
    def num_pieces(self) -> int:
        """P."""
        return self.size * self.per_rank

    @property
    def pieces(self) -> tuple[int, ...]:
        """This rank's pieces."""
        return self.owned(self.rank, self.size, self.zigzag)

    def piece_length(self, T: int) -> int:
        """L, of T tokens on a rank."""
        if T % self.per_rank:
            raise ValueError(f"T is {T}; it must be even: in zig-zag order a rank holds two pieces of equal length")
        return T // self.per_rank

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor along its time axis."""
        T, P = x.shape[dim], self.num_pieces
        if T % P:
            raise ValueError(f"the time axis has {T} tokens; it must be a multiple of the {P} pieces of equal length")
        return torch.cat([x.narrow(dim, p * (T // P), T // P) for p in self.pieces], dim)

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] of this rank's pieces -> [P, ...] of all, in order. No gradient."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x, group=self.group)
        owners = [self.owned(rank, self.size, self.zigzag) for rank in range(self.size)]
        held = {p: piece for own, part in zip(owners, parts, strict=True) for p, piece in zip(own, part, strict=True)}
        return torch.stack([held[p] for p in range(self.num_pieces)])

    def own(self, x: Tensor) -> Tensor:
        """[P, ...] -> [n, ...], those of this rank's pieces."""
        return torch.stack([x[p] for p in self.pieces])

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks. No gradient."""
        x = x.contiguous().clone()
        distributed.all_reduce(x, group=self.group)
        return x

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor from every rank's part, the inverse of :meth:`part`. No gradient."""
        pieces = torch.stack(x.detach().chunk(self.per_rank, dim))
        return torch.cat([*self.gather(pieces)], dim)


def exchanged_bytes(HV: int, K: int, V: int, itemsize: int = 4, backward: bool = False) -> int:
    """What a rank sends for one piece of one sequence: M and A forward, E backward.

    Example:
        >>> exchanged_bytes(16, 128, 128), exchanged_bytes(16, 128, 128, backward=True)  # 2 MiB and 1 MiB
        (2097152, 1048576)
    """
    return HV * K * (V if backward else K + V) * itemsize


# Checks ----------------------------------------------------------------------------------------------------------------


def _check(call: Call, context: Context) -> None:
    """What the operator refuses, and what ranks must agree on. On a CPU ranks tell each other, so that all stop together; a
    compiled program does not ask."""
    if torch.compiler.is_compiling():
        check_call(call)
        return
    try:
        _check_own(call, context)
        refused = None
    except ValueError as error:
        refused = str(error)
    if all(x.device.type == "cpu" for x in call.tensors if isinstance(x, Tensor)):
        refused = _check_others(call, context, refused)
    if refused is not None:
        raise ValueError(refused)


def _check_own(call: Call, context: Context) -> None:
    check_call(call)
    whole = context.piece_length(call.q.shape[1]) * context.num_pieces
    if call.cu_seqlens is None or call.cu_seqlens.device.type != "cpu":
        return
    bounds = call.cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != whole:
        raise ValueError(
            f"cu_seqlens is [{bounds[0]}, ..., {bounds[-1]}]; it must be [0, ..., {whole}], over the tokens of all ranks"
        )
    if any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens is {bounds}; it must be non-decreasing")


def _check_others(call: Call, context: Context, refused: str | None) -> str | None:
    """Why this rank must stop, or None, after hearing the others: a few numbers, and sentences only where one refuses."""
    sizes = {} if refused is not None else _sizes(call, context)
    numbers = torch.tensor([[*sizes.values()] or [-1] * _NUM_SIZES])
    parts = [torch.empty_like(numbers) for _ in range(context.size)]
    distributed.all_gather(parts, numbers, group=context.group)
    said = torch.cat(parts)
    if bool((said[:, 0] < 0).any()):
        return _first_refusal(context, refused)
    for rank, theirs in enumerate(said.tolist()):
        for (name, value), other in zip(sizes.items(), theirs, strict=True):
            if value != other:
                rule = "every part must have the same length" if name == "T" else "it must be the same on all ranks"
                return f"{name} is {value} here but {other} on rank {rank} of the context; {rule}"
    return None


def _sizes(call: Call, context: Context) -> dict[str, int]:
    """What must be the same on all ranks."""
    (B, T, _, K), (HV, V) = call.q.shape, call.v.shape[2:]
    sizes = {"T": T, "B": B, "HV": HV, "K": K, "V": V, "N": call.num_sequences, "pieces a rank": context.per_rank}
    bounds = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    options = (call.gate, call.beta_range, call.normalize_qk, call.scale, call.erase is None)
    return sizes | {
        "bytes a number": call.v.element_size(),
        "the number of initial states": 0 if call.initial_state is None else len(call.initial_state),
        "output_final_state": int(call.output_final_state),
        "the checksum of cu_seqlens": crc32(repr(bounds).encode()),
        "the checksum of gate, beta_range, normalize_qk, scale and erase": crc32(repr(options).encode()),
    }


_NUM_SIZES = 12


def _first_refusal(context: Context, refused: str | None) -> str:
    sentences: list[Any] = [None] * context.size
    distributed.all_gather_object(sentences, refused, group=context.group)
    rank = next(rank for rank, sentence in enumerate(sentences) if sentence is not None)
    return refused or f"rank {rank} of the context refuses its part: {sentences[rank]}"


# Who holds what --------------------------------------------------------------------------------------------------------


class _Spans(NamedTuple):
    """How sequences lie over pieces, bool [P, N] each (N = B without cu_seqlens), made without reading a value."""

    enters: Tensor  #: the sequence comes from the piece before
    leaves: Tensor  #: it goes on in the piece after
    ends: Tensor  #: its final state is that of this piece; an empty one's of piece 0

    @staticmethod
    def of(call: Call, context: Context) -> "_Spans":
        P, device = context.num_pieces, call.q.device
        L = context.piece_length(call.q.shape[1])
        piece = torch.arange(P, device=device).unsqueeze(-1)
        if call.cu_seqlens is None:
            piece = piece.expand(P, call.num_sequences)
            return _Spans(piece > 0, piece < P - 1, piece == P - 1)
        first, last = call.cu_seqlens[:-1], call.cu_seqlens[1:]
        start, end = piece * L, (piece + 1) * L
        return _Spans(
            (first < start) & (start < last),
            (first < end) & (end < last),
            torch.where(first == last, piece == 0, (start < last) & (last <= end)),
        )


def _passes(spans: _Spans, packed: bool) -> Tensor:
    """bool [P, C, 1, 1, 1]: whether what leaves a piece is what entered it, so that M carries on."""
    both = spans.enters & spans.leaves
    return (both.any(-1, keepdim=True) if packed else both)[..., None, None, None]


def _where(mask: Tensor, x: Tensor, other: Tensor | float = 0.0) -> Tensor:
    """x [n, N, HV, K, D] where mask [n, N]."""
    return torch.where(mask[..., None, None, None], x, other)


def _chosen(mask: Tensor, x: Tensor, packed: bool) -> Tensor:
    """x [n, N, ...] -> [n, C, ...]: of packed sequences the one (or none: zero) of mask [n, N], else all."""
    x = _where(mask, x)
    return x.sum(1, keepdim=True) if packed else x


def _local(call: Call, context: Context) -> Call:
    """The rank's tokens as a call of the operator whose sequences do not cross pieces.

    Without cu_seqlens pieces become rows, [B n, L, ...]. With it every piece holds all N sequences, most of them empty.
    """
    n, L = context.per_rank, context.piece_length(call.q.shape[1])
    if call.cu_seqlens is not None:
        cu = call.cu_seqlens
        bounds = [(cu - p * L).clamp(0, L) + i * L for i, p in enumerate(context.pieces)]
        return call._replace(cu_seqlens=torch.cat([bounds[0], *(x[1:] for x in bounds[1:])]))
    if n == 1:
        return call
    rows: dict[str, Any] = {
        name: None if x is None else x.unflatten(1, (n, L)).flatten(0, 1)
        for name, x in call._asdict().items()
        if name in ("q", "k", "v", "g", "beta", "sign", "erase", "write")
    }
    return call._replace(**rows)


def _by_piece(x: Tensor, n: int, packed: bool) -> Tensor:
    """States of :func:`_local` [rows, ...] -> [n, N, ...]."""
    return x.unflatten(0, (n, -1)) if packed else x.unflatten(0, (-1, n)).transpose(0, 1)


def _by_row(x: Tensor, packed: bool) -> Tensor:
    """The inverse of :func:`_by_piece`."""
    return x.flatten(0, 1) if packed else x.transpose(0, 1).flatten(0, 1)


# The passes ------------------------------------------------------------------------------------------------------------


def _run(call: Call) -> tuple[Tensor, Tensor]:
    """o and the final state, which is always asked for."""
    o, state = apply(call._replace(output_final_state=True))
    assert state is not None
    return o, state


def _with_columns(call: Call, start: Tensor) -> Call:
    """The call with K more value columns that write nothing; start [rows, HV, K, V + K]."""
    K = call.q.shape[-1]
    v = torch.cat([call.v, call.v.new_zeros(*call.v.shape[:-1], K)], -1)
    write = None if call.write is None else torch.cat([call.write, call.write.new_zeros(*call.v.shape[:-1], K)], -1)
    return call._replace(v=v, write=write, initial_state=start, output_final_state=True)


def _responses(call: Call, start: Tensor) -> tuple[Tensor, Tensor]:
    """Step 1: R [rows, L, HV, K], and the states at the end [rows, HV, K, V + K] of such states at the start.

    In one call where the backend that serves V columns serves V + K, else in two.
    """
    K, V = call.q.shape[-1], call.v.shape[-1]
    if V + K <= MAX_WIDTH:
        both = _with_columns(call, start)
        if choose(both).backend is choose(call).backend:
            o, end = _run(both)
            return o[..., V:].contiguous(), end
    values = call._replace(initial_state=start[..., :V].contiguous(), output_final_state=True)
    nothing = call.v.new_zeros(*call.v.shape[:-1], K)
    write = None if call.write is None else nothing.to(call.write.dtype)
    R, M = _run(values._replace(v=nothing, write=write, initial_state=start[..., V:].contiguous()))
    return R, torch.cat([_run(values)[1], M], -1)


def _fold(M: Tensor, A: Tensor, passes: Tensor) -> Tensor:
    """Step 3: M [P, C, HV, K, K], A [P, C, HV, K, V] -> the states that enter the pieces, [P, C, HV, K, V] in float64."""
    wide = wide_dtype(A.device)
    entering = [torch.zeros_like(A[0], dtype=wide)]
    for p in range(len(A) - 1):
        carried = M[p].to(wide) @ entering[-1]
        entering.append(torch.where(passes[p], carried, 0) + A[p].to(wide))
    return torch.stack(entering)


def _fold_back(M: Tensor, E: Tensor, passes: Tensor) -> Tensor:
    """The gradients of the states that leave the pieces, [P, C, HV, K, V] in float64."""
    wide = wide_dtype(E.device)
    leaving = [torch.zeros_like(E[0], dtype=wide)]
    for p in range(len(E) - 1, 0, -1):
        carried = M[p].mT.to(wide) @ leaving[-1]
        leaving.append(torch.where(passes[p], carried, 0) + E[p].to(wide))
    return torch.stack(leaving[::-1])


class _Known(NamedTuple):
    """What the backward pass reads again."""

    R: Tensor  #: [rows, L, HV, K] what is read of each unit of the state that enters
    M: Tensor  #: [n, N, HV, K, K] of this rank's sequences, zero where nothing enters
    M_all: Tensor  #: [P, C, HV, K, K] of all pieces
    passes: Tensor  #: [P, C, 1, 1, 1]
    enters: Tensor  #: [n, N]
    leaves: Tensor
    ends: Tensor


class _Close(torch.autograd.Function):
    """After step 4: hands o on, sums the final states over the ranks, and in reverse makes the final states' gradient."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, end: Tensor, context: Context, packed: bool, want: bool, *known: Tensor) -> Any:
        """o [rows, L, HV, V], end [n, N, HV, K, V] -> o, and the final states [N, HV, K, V] if wanted."""
        ctx.save_for_backward(*known)
        ctx.context, ctx.packed, ctx.want = context, packed, want
        final = context.sum(_where(_Known(*known).ends, end).sum(0)) if want else end.new_empty(0)
        return o.view_as(o), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> Any:
        x, context = _Known(*ctx.saved_tensors), ctx.context
        dtype, n = x.M.dtype, context.per_rank
        with full_precision(do.device):
            R, do_ = (_pieces_first(y.to(dtype), n, ctx.packed) for y in (x.R, do))
            E = torch.einsum("nbthk,nbthv->nbhkv", R, do_)
            dend = x.M.new_zeros(*x.M.shape[:-1], do.shape[-1])
            if ctx.want:
                dend = _where(x.ends, context.sum(dfinal.to(dtype)).expand_as(dend))
                E = E + _chosen(x.enters, x.M.mT @ dend, ctx.packed)
            leaving = context.own(_fold_back(x.M_all, context.gather(E), x.passes)).to(dtype)
            dend = dend + _where(x.leaves, leaving.expand_as(dend))
        return do, dend, *(None,) * (3 + len(x))


def _pieces_first(x: Tensor, n: int, packed: bool) -> Tensor:
    """[rows, L, ...] of :func:`_local` -> [n, C, L, ...]."""
    return x.unflatten(1, (n, -1)).transpose(0, 1) if packed else _by_piece(x, n, packed)


@torch.no_grad()
def _enter(call: Call, local: Call, context: Context) -> tuple[Tensor, _Known]:
    """Steps 1 to 3: the states [n, C, HV, K, V] that enter this rank's pieces."""
    n, packed, (K, V) = context.per_rank, call.cu_seqlens is not None, (call.q.shape[-1], call.v.shape[-1])
    spans = _Spans.of(call, context)
    own, passes = _Spans(*map(context.own, spans)), _passes(spans, packed)
    begin, eye = call.start_state(), torch.eye(K, dtype=call.state_dtype, device=call.q.device)
    entered = torch.cat([torch.zeros_like(begin), eye.expand(*begin.shape[:-1], K)], -1)
    fresh = torch.cat([begin, torch.zeros_like(entered[..., V:])], -1)
    start = _where(own.enters, entered, fresh)
    R, end = _responses(local, _by_row(start, packed))
    ends = _by_piece(end, n, packed)
    every = context.gather(_chosen(own.leaves, ends, packed))
    M_all = every[..., V:].contiguous()
    with full_precision(call.q.device):
        entering = context.own(_fold(M_all, every[..., :V], passes)).to(call.state_dtype)
    return entering, _Known(R, ends[..., V:].contiguous(), M_all, passes, *own)


def complex_kda_context(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, *, context: Context, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """:func:`ckda.complex_kda` on a sequence whose time axis is spread over the ranks of `context`.

    Every rank calls it with its own tokens, T = n L of them, and gets their outputs; gradients as on one device. All ranks
    must make the call, and its backward, in the same order.

    Args:
        q, k, v, g, beta and options: as of :func:`ckda.complex_kda`, for this rank's tokens; but
        initial_state: [N, HV, K, V] of the whole sequences, the same on all ranks; its gradient comes in parts (see above).
        cu_seqlens: [N + 1] over the tokens of all ranks, 0 ... P L, the same on all ranks.

    Returns:
        o [B, T, HV, V], and the final state of the whole sequences, the same on all ranks, or None. It takes one more exchange.

    Example:
        >>> x = torch.zeros(1, 8, 2, 4)
        >>> complex_kda_context(x, x, x, x, x[..., 0], context=Context())
        Traceback (most recent call last):
        ValueError: there is no process group; start with torchrun, or call torch.distributed.init_process_group
    """
    if not isinstance(context, Context):
        raise ValueError(f"context is {type(context).__name__}; it must be a ckda.ops.context.Context")
    unknown = [name for name in options if name not in Call._fields]
    if unknown:
        raise ValueError(f"there is no argument {unknown[0]}; there are those of complex_kda, and context")
    call = Call(q, k, v, g, beta, **options)
    n, packed, want = context.per_rank, call.cu_seqlens is not None, call.output_final_state
    _check(call, context)
    if context.num_pieces == 1:
        o, state = _run(call)
        return o, state if want else None
    local = _local(call, context)._replace(initial_state=None)
    entering, known = _enter(call, local, context)
    begin = call.start_state()
    start = _where(known.enters, entering.expand(n, *begin.shape), begin)
    o, end = _run(local._replace(initial_state=_by_row(start, packed), output_final_state=True))
    o, final = _Close.apply(o, _by_piece(end, n, packed), context, packed, want, *known)
    return o.reshape(call.v.shape), final if want else None


# The halo of a short convolution ---------------------------------------------------------------------------------------


class _Shift(torch.autograd.Function):
    """Every piece's rows to the piece after it; in reverse, their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _shifted(x, context, later=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        return _shifted(dx, ctx.context, later=False), None


def _shifted(x: Tensor, context: Context, later: bool) -> Tensor:
    """[n, ...] -> [n, ...]: what the piece before has, `later`, or the piece after; zero outside."""
    every = context.gather(x)
    outside = torch.zeros_like(every[:1])
    return context.own(torch.cat([outside, every[:-1]] if later else [every[1:], outside]))


def previous_tails(x: Tensor, size: int, context: Context) -> Tensor:
    """[B, n, size, D]: the last `size` tokens of the piece before each piece of x [B, T, D]; zeros before the first.

    Differentiable: every rank must call it, and its backward, in the same order.
    """
    n, L = context.per_rank, context.piece_length(x.shape[1])
    if size > L:
        raise ValueError(
            f"a piece has {L} tokens; it must have at least {size}, which the convolution of the next one reads"
        )
    if size == 0:
        return x.new_empty(x.shape[0], n, 0, x.shape[2])
    tails = x.unflatten(1, (n, L))[:, :, L - size :].transpose(0, 1)
    return _Shift.apply(tails, context).transpose(0, 1)


# All tokens on every rank, for attention ---------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """The whole of a tensor from its parts; in reverse, the sum of all ranks' gradients of the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.whole(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:
        return ctx.context.part(ctx.context.sum(dx)), None


def gathered(x: Tensor, context: Context) -> Tensor:
    """[B, T, ...] of this rank -> [B, P L, ...] of all ranks, in order, with gradients.

    Every rank must call it, and its backward, in the same order.
    """
    return _Gather.apply(x, context)
