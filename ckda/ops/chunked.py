"""The WY chunk form in plain torch, with a hand-written backward: any device, any dtype.

With the prediction error y_t (ckda/ops/call.py) the recurrence is S_t = Diag(alpha_t) S_{t-1} + k_t u_t^T, u_t = rate_t y_t.
So inside a chunk that starts from S, with Gamma_i = prod_{l<=i} alpha_l, signed,

    S_i = Gamma_i S + sum_{j<=i} (Gamma_i / Gamma_j) k_j u_j^T,   G_ij = a_i^T Diag(Gamma_i / Gamma_j) k_j  (j < i),
    (Diag(norm2) + G Diag(rate)) y = w - (a * Gamma) S.

G and the triangular inverse are in float64: with equal keys a rounding error of either is the same in every chunk, and an
orthogonal transition never forgets it. Everything else is in the state's dtype. How tokens are
decayed against each other is in ckda/ops/decay.py.

A non-finite token changes nothing before it, as in the recurrence. But 0 * NaN is NaN, so a product with a triangular matrix
carries it to all rows. On a CPU a result that is not finite is therefore computed again with :func:`_careful_product`;
on other devices, where looking at a result would wait for it, a non-finite value may reach the earlier tokens of its chunk.

Legend of axes: R = B * HV rows, NC chunks, C chunk, M = R * NC, K key width, V value width, h half a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients, Norms, Prepared, Raw, prepare, prepare_backward
from ckda.ops.decay import Decayed, DecayedGrads, TokenGrads, decayed, lower_blocks

__all__ = ["backward", "chunk_size", "forward", "saved_like"]

MAX_CHUNK = 32  # 64 is no faster here, and its gradients for equal keys at beta = 2 are twice as far off
SMALL_HEAD, SMALL_CHUNK = 32, 16  # where C x C matrices would outweigh the tensors they are made from
_NARROW = 16
_BASE = 16  # diagonal blocks inverted by forward substitution; larger ones are merged


def chunk_size(T: int, K: int, V: int) -> int:
    """C: 32, 16 for small heads, or the power of two that holds a shorter sequence. Never by B or H: batching changes no bit."""
    return min(SMALL_CHUNK if max(K, V) <= SMALL_HEAD else MAX_CHUNK, 1 << (T - 1).bit_length())


# Layout: [B, T, HV, D] <-> [R, NC, C, D] -----------------------------------------------------------------------------


def _num_chunks(call: Call, C: int) -> int:
    """NC; for packed sequences as many as could ever be needed, known without reading cu_seqlens (no synchronisation)."""
    T = call.q.shape[1]
    return -(-T // C) if call.cu_seqlens is None else T // C + call.num_sequences


class _Layout:
    """Where each token lives. Every sequence starts a chunk; packed sequences are laid end to end, B = 1."""

    def __init__(self, call: Call):
        self.B, self.T, self.HV = call.v.shape[:3]
        self.C = chunk_size(self.T, call.q.shape[-1], call.v.shape[-1])
        self.NC = _num_chunks(call, self.C)
        self.packed = call.cu_seqlens is not None
        if call.cu_seqlens is None:
            return
        cu, device = call.cu_seqlens.long(), call.q.device
        N = cu.numel() - 1
        count = (cu.diff() + self.C - 1) // self.C  # [N] chunks of each sequence
        ends = count.cumsum(0)
        starts = ends - count
        slot = torch.arange(self.NC, device=device)
        self.sequence = torch.searchsorted(ends, slot, right=True).clamp_max(N - 1)  # [NC]
        self.first = slot == starts[self.sequence]  # [NC] bool: the slot starts its sequence
        self.last = slot == ends[self.sequence] - 1
        self.first_slot, self.last_slot, self.empty = starts, ends - 1, count == 0  # [N]
        token = torch.arange(self.T, device=device)
        owner = (torch.searchsorted(cu, token, right=True) - 1).clamp_max(N - 1)
        self.place = starts[owner] * self.C + token - cu[owner]  # [T] where token t lies among the NC * C places

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, HV, D] -> [B, HV, NC * C, D] in `dtype`, contiguous, padded with zeros."""
        B, T, HV, D = x.shape
        out = x.new_empty(B, HV, self.NC * self.C, D, dtype=dtype)
        if self.packed:
            out.zero_()[0, :, self.place] = x[0].transpose(0, 1).to(dtype)
        else:
            out[:, :, :T] = x.transpose(1, 2)
            out[:, :, T:] = 0
        return out

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, HV, NC * C, D] -> [B, T, HV, D] in `dtype`, contiguous."""
        x = x[:, :, self.place] if self.packed else x[:, :, : self.T]
        return x.transpose(1, 2).to(dtype).contiguous()

    def rows(self, *tensors: Tensor) -> "_Carry":
        """[M, ...] each -> [R, NC, ...]; in float64 where values are narrow, for BLAS then sums channels one after the other."""
        dtype = torch.float64 if tensors[0].shape[-1] < _NARROW else tensors[0].dtype
        return _Carry(*(x.to(dtype).unflatten(0, (self.B * self.HV, self.NC)) for x in tensors))

    def fill_padding(self, x: Tensor, value: float) -> Tensor:
        """Set [B, HV, NC * C, D] where no token lies, in place: alpha = 1 there makes the transition the identity."""
        if self.packed:
            free = torch.ones(self.NC * self.C, dtype=torch.bool, device=x.device)
            free[self.place] = False
            return x.masked_fill_(free[:, None], value)
        x[:, :, self.T :] = value
        return x

    def final(self, states: Tensor, initial: Tensor) -> Tensor:
        """States after each chunk [R, NC, K, V] -> one per sequence [N, HV, K, V]; an empty one keeps its initial state."""
        chosen = states[:, self.last_slot.clamp_min(0)].transpose(0, 1)
        return torch.where(self.empty[:, None, None, None], initial, chosen)


# The chunk's matrices ------------------------------------------------------------------------------------------------


def _diagonal_block(A: Tensor, h: int) -> Tensor:
    """A's diagonal blocks of h: [..., C, C] -> view [..., C / h, h, h]."""
    C = A.shape[-1]
    *lead, row, column = A.stride()
    return A.as_strided((*A.shape[:-2], C // h, h, h), (*lead, h * (row + column), row, column), A.storage_offset())


#: of a lower triangular matrix [..., C, C] and rows [..., C, D]
_Product = Callable[[Tensor, Tensor], Tensor]


def _careful_product(L: Tensor, X: Tensor) -> Tensor:
    """L @ X in which a non-finite row of X reaches no row above it; the same bits where all is finite.

    Example:
        >>> _careful_product(torch.eye(3), torch.tensor([1.0, torch.nan, 2.0]).view(3, 1)).flatten()
        tensor([1., nan, nan])
    """
    spoilt = (X * 0).cumsum(-2)  # zero, NaN from the first non-finite row on
    return L @ X.where(X.isfinite(), 0) + spoilt


def _transposed(product: _Product, L: Tensor, X: Tensor) -> Tensor:
    """L^T @ X, for which time runs backwards: read from its end, L^T is lower triangular too."""
    if product is torch.matmul:
        return L.mT @ X
    return product(L.mT.flip(-1, -2), X.flip(-2)).flip(-2)


def _spoilt(x: Tensor) -> bool:
    """Whether there is a non-finite value in x, on a CPU. A sum that overflows counts: then work is done twice for nothing."""
    return x.device.type == "cpu" and not bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())


def _inverse(A: Tensor, product: _Product) -> Tensor:
    """The inverse of a lower triangular A [M, C, C]: forward substitution on blocks of 16, then exact block merges.

    Only the lower triangle of A is read.
    """
    C = A.shape[-1]
    base = min(_BASE, C)
    inverse = torch.zeros_like(A)
    eye = torch.eye(base, dtype=A.dtype, device=A.device)
    blocks = _diagonal_block(A, base)
    _diagonal_block(inverse, base).copy_(torch.linalg.solve_triangular(blocks, eye.expand_as(blocks), upper=False))
    h = base
    while h < C:
        left, right = _diagonal_block(inverse, h).unflatten(-3, (-1, 2)).unbind(-3)
        lower_blocks(inverse, h).copy_(product(right, lower_blocks(A, h) @ left).neg_())
        h *= 2
    return inverse


def _solver(G: Tensor, rate: Tensor, norm2: Tensor, product: _Product) -> Tensor:
    """(Diag(norm2) + G Diag(rate))^-1 [M, C, C] in float64; rate and norm2 [M, C, 1]."""
    A = G * rate.mT.to(G.dtype)
    A.diagonal(dim1=-2, dim2=-1).copy_(norm2.squeeze(-1))
    return _inverse(A, product)


# The state pass ------------------------------------------------------------------------------------------------------


class _Carry(NamedTuple):
    """What the state pass reads, [R, NC, C, .] each."""

    Y: Tensor  #: solver @ w; in the reverse pass the gradient of u inside the chunk
    W: Tensor  #: solver @ (a * P)
    kQ: Tensor  #: keys decayed to the chunk's end
    rate: Tensor  #: [R, NC, C, 1]
    total: Tensor  #: [R, NC, K, 1] decay of the whole chunk


def _state_pass(layout: _Layout, x: _Carry, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [R, NC, C, V], the states at each chunk's start [R, NC, K, V], and the final states [N, HV, K, V]."""
    R, NC, _, K = x.kQ.shape
    states = x.Y.new_empty(R, NC, K, x.Y.shape[-1])
    y = torch.empty_like(x.Y)
    S = initial[0] if layout.packed else initial.flatten(0, 1)
    after = []
    for c in range(NC):
        if layout.packed:  # where a sequence begins, its own initial state
            S = torch.where(layout.first[c], initial[layout.sequence[c]], S)
        states[:, c] = S
        y_c = torch.baddbmm(x.Y[:, c], x.W[:, c], S, alpha=-1)
        y[:, c] = y_c
        S = torch.baddbmm(S * x.total[:, c], x.kQ[:, c].mT, y_c * x.rate[:, c])
        if layout.packed:
            after.append(S)
    final = layout.final(torch.stack(after, 1), initial) if layout.packed else S.unflatten(0, (layout.B, layout.HV))
    return y, states, final


def _reverse_state_pass(layout: _Layout, x: _Carry, dS_local: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of :func:`_state_pass`: du completed, gradients of the states after each chunk and of the initial ones."""
    dafter, dbefore, du = torch.empty_like(dS_local), [], torch.empty_like(x.Y)
    dS = torch.zeros_like(dS_local[:, 0]) if layout.packed else dfinal.flatten(0, 1)
    for c in reversed(range(layout.NC)):
        if layout.packed:
            dS = torch.where(layout.last[c], dfinal[layout.sequence[c]], dS)
        dafter[:, c] = dS
        du_c = torch.baddbmm(x.Y[:, c], x.kQ[:, c], dS)
        du[:, c] = du_c
        dS = torch.addcmul(dS_local[:, c], dS, x.total[:, c])
        dS = torch.baddbmm(dS, x.W[:, c].mT, du_c * x.rate[:, c], alpha=-1)
        dbefore.append(dS)
    if not layout.packed:
        return du, dafter, dS.unflatten(0, (layout.B, layout.HV))
    first = torch.stack(dbefore[::-1], 1)[:, layout.first_slot.clamp_max(layout.NC - 1)].transpose(0, 1)
    return du, dafter, torch.where(layout.empty[:, None, None, None], dfinal, first)


# Forward and backward ------------------------------------------------------------------------------------------------


def _raw(call: Call, layout: _Layout) -> Raw:
    def split(x: Tensor | None) -> Tensor | None:
        return None if x is None else layout.split(x, call.state_dtype)

    beta = None if call.beta is None else call.beta.unsqueeze(-1)
    return Raw(*map(split, (call.q, call.k, call.v, call.g, beta, call.sign, call.erase, call.write)))  # type: ignore[arg-type]


def _chunks(x: Tensor, C: int) -> Tensor:
    """[B, HV, NC * C, D] -> [M, C, D], a view."""
    return x.view(-1, C, x.shape[-1])


def _stateless(call: Call, layout: _Layout) -> bool:
    """One chunk from a zero state: nothing is carried, and only the attention-like part remains."""
    return layout.NC == 1 and call.initial_state is None


class _Saved(NamedTuple):
    """What :func:`_forward` leaves for :func:`_backward`: chunks of :class:`Prepared`, and what was made from them."""

    q: Tensor  #: [M, C, K]
    k: Tensor  #: [M, C, K]
    a: Tensor  #: [M, C, K]; empty where it is k
    v: Tensor  #: [M, C, V] values as given; empty where they are not read again
    alpha: Tensor  #: [M, C, K]
    rate: Tensor  #: [M, C, 1]
    scores: Tensor  #: [M, C, C]
    G: Tensor  #: [M, C, C] of which only the strict lower triangle is set; empty where a is given
    solver: Tensor  #: [M, C, C]
    y: Tensor  #: [M, C, V]
    states: Tensor  #: [R, NC, K, V] at each chunk's start; NC = 0 where none is carried
    q_norm: Tensor  #: [B, H, NC * C, 1], as :class:`Norms`; empty without normalisation
    k_norm: Tensor


def _saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`_forward` saves."""
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    C = chunk_size(T, K, V)
    NC = _num_chunks(call, C)
    M = B * HV * NC
    separate = call.erase is not None
    keys, values, square, none = (M, C, K), (M, C, V), (M, C, C), (0,)
    norm = (B, H, NC * C, 1) if call.normalize_qk else none
    shapes = {
        "q": keys,
        "k": keys,
        "a": keys if separate else none,
        "v": values if separate else none,
        "alpha": keys,
        "rate": (M, C, 1),
        "scores": square,
        "G": none if separate else square,
        "solver": square,
        "y": values,
        "states": (B * HV, NC if NC > 1 or call.initial_state is not None else 0, K, V),
        "q_norm": norm,
        "k_norm": norm,
    }
    return [torch.empty(shapes[name], dtype=call.state_dtype, device=call.v.device) for name in _Saved._fields]


def _is_bounded(call: Call) -> bool:
    return call.gate in ("signed", "sigmoid")


def _forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`_backward` reads again."""
    result = _forward_by(torch.matmul, call)
    return _forward_by(_careful_product, call) if _spoilt(result[0]) else result


def _forward_by(product: _Product, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """:func:`_forward` with this product of triangular matrices."""
    layout = _Layout(call)
    C, dtype, separate = layout.C, call.state_dtype, call.erase is not None
    raw = _raw(call, layout)
    prepared, norms = prepare(call, raw)
    layout.fill_padding(prepared.alpha, 1.0)
    q, k, a, w, alpha, rate, norm2 = (_chunks(t, C) for t in prepared)
    a = a if separate else k
    decay = decayed(q, k, a, alpha, _is_bounded(call))
    scores, G = decay.scores()
    wide = _solver(G, rate, norm2, product)
    solver = wide.to(dtype)
    y = product(solver, w)
    if _stateless(call, layout):
        states = y.new_empty(layout.B * layout.HV, 0, k.shape[-1], y.shape[-1])
        u = y * rate
        o = product(scores, u)
        final = call.zero_state()
        if call.output_final_state:
            final = (decay.kQ.mT @ u).unflatten(0, (layout.B, layout.HV))
    else:
        W = product(wide, decay.aP).to(dtype)
        carry = layout.rows(y, W, decay.kQ, rate, decay.total.unsqueeze(-1))
        y, states, final = (x.to(dtype) for x in _state_pass(layout, carry, call.start_state().to(carry.Y.dtype)))
        y = y.flatten(0, 1)
        o = torch.baddbmm(product(scores, y * rate), decay.qP, states.flatten(0, 1))
    o = layout.join(o.view(layout.B, layout.HV, layout.NC * C, -1), call.v.dtype)
    kept = _Saved(
        q=q,
        k=k,
        a=a if separate else y.new_empty(0),
        v=_chunks(raw.v, C) if separate else y.new_empty(0),
        alpha=alpha,
        rate=rate,
        scores=scores,
        G=y.new_empty(0) if separate else G.to(dtype),
        solver=solver,
        y=y,
        states=states,
        q_norm=y.new_empty(0) if norms is None else norms.q,
        k_norm=y.new_empty(0) if norms is None else norms.k,
    )
    return o, final, [*kept]


def _backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None.

    A non-finite do_t or q_t changes nothing after t, a non-finite v_t nothing before t, as in the recurrence. For that the
    decays must be :class:`ckda.ops.decay.Halves`: the other way sums all tokens of a chunk and takes some away again.
    """
    x, layout = _Saved(*saved), _Layout(call)
    do = _chunks(layout.split(do, call.state_dtype), layout.C)
    found = _backward_by(torch.matmul, _is_bounded(call), call, layout, x, do, dfinal)
    if _spoilt(found.tokens.log_alpha):
        found = _backward_by(_careful_product, False, call, layout, x, do, dfinal)
    return _finish(call, layout, x, *found)


class _ChunkGrads(NamedTuple):
    """Gradients of the prepared chunks."""

    tokens: TokenGrads
    w: Tensor  #: [M, C, V]
    rate: Tensor | None  #: [M, C, 1]
    state: Tensor | None  #: [N, HV, K, V] the initial one


def _backward_by(
    product: _Product, bounded: bool, call: Call, layout: _Layout, x: _Saved, do: Tensor, dfinal: Tensor | None
) -> _ChunkGrads:
    """:func:`_backward` up to :func:`prepare`, with this product of triangular matrices; do [M, C, V]."""
    decay = decayed(x.q, x.k, x.k if call.erase is None else x.a, x.alpha, bounded)
    u = x.y * x.rate
    du = _transposed(product, x.scores, do)
    if _stateless(call, layout):
        du, r, carried, dstate = *_stateless_backward(product, x, decay, u, du, dfinal), None
    else:
        du, r, carried, dstate = _carried_backward(product, call, layout, x, decay, u, du, do, dfinal)
    drate = None
    if call.erase is None:
        drate = torch.linalg.vecdot(du - _transposed(product, x.G.tril(-1), r), x.y).unsqueeze(-1)
    return _ChunkGrads(decay.backward(do @ u.mT, (r @ u.mT).neg_(), carried), r, drate, dstate)


def _stateless_backward(
    product: _Product, x: _Saved, decay: Decayed, u: Tensor, du: Tensor, dfinal: Tensor | None
) -> tuple[Tensor, Tensor, DecayedGrads | None]:
    """du completed by the final state's gradient, r = that of w, and the gradients of what decays to the end."""
    carried = None
    if dfinal is not None:
        dS = dfinal.to(du.dtype).flatten(0, 1)
        du = torch.baddbmm(du, decay.kQ, dS)
        zero = torch.zeros_like(x.k)
        carried = DecayedGrads(zero, zero, u @ dS.mT, torch.zeros_like(zero[:, 0]))
    return du, _transposed(product, x.solver, du * x.rate), carried


def _carried_backward(
    product: _Product,
    call: Call,
    layout: _Layout,
    x: _Saved,
    decay: Decayed,
    u: Tensor,
    du: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, DecayedGrads, Tensor]:
    """:func:`_stateless_backward` with states carried between chunks, and the gradient of the initial states."""
    S, kQ, total = x.states.flatten(0, 1), decay.kQ, decay.total
    W = product(x.solver, decay.aP.to(du.dtype))
    carry = layout.rows(du, W, kQ, x.rate, total.unsqueeze(-1))
    dlast = call.zero_state() if dfinal is None else dfinal.to(du.dtype)
    dS_local = (decay.qP.mT @ do).view_as(x.states)
    reverse = _reverse_state_pass(layout, carry, *(t.to(carry.Y.dtype) for t in (dS_local, dlast)))
    du, dafter, dstate = (t.to(W.dtype) for t in reverse)
    du, dafter = du.flatten(0, 1), dafter.flatten(0, 1)
    r = _transposed(product, x.solver, du * x.rate)
    dtotal = torch.linalg.vecdot(dafter, S)
    return du, r, DecayedGrads(do @ S.mT, (r @ S.mT).neg_(), u @ dafter.mT, dtotal), dstate


def _finish(
    call: Call,
    layout: _Layout,
    x: _Saved,
    tokens: TokenGrads,
    r: Tensor,
    drate: Tensor | None,
    dstate: Tensor | None,
) -> Gradients:
    """From gradients of the prepared chunks to gradients of the call."""

    def heads(t: Tensor) -> Tensor:
        return t.view(layout.B, layout.HV, layout.NC * layout.C, -1)

    def split(t: Tensor | None) -> Tensor | None:
        return None if t is None else layout.split(t, call.state_dtype)

    def join(t: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if t is None or like is None else layout.join(t, like.dtype)

    beta = None if call.beta is None else call.beta.unsqueeze(-1)
    g = call.g if call.gate is None else layout.split(call.g, call.state_dtype)
    v = heads(x.v) if x.v.numel() else x.v
    raw = Raw(x.q, x.k, v, g, split(beta), None, split(call.erase), split(call.write))
    q, k = heads(x.q), heads(x.k)
    prepared = Prepared(q, k, k, v, k, x.rate, x.rate)
    norms = Norms(x.q_norm, x.k_norm) if call.normalize_qk else None
    rate = x.rate if drate is None else drate
    da = tokens.k if tokens.a is None else tokens.a
    dx = Prepared(*map(heads, (tokens.q, tokens.k, da, r, tokens.log_alpha, rate, rate)))
    layout.fill_padding(dx.alpha, 0.0)
    draw, dA_log, ddt_bias = prepare_backward(call, raw, prepared, norms, dx)
    dbeta = join(draw.beta, call.beta)
    return Gradients(
        q=layout.join(draw.q, call.q.dtype),
        k=layout.join(draw.k, call.k.dtype),
        v=layout.join(draw.v, call.v.dtype),
        g=layout.join(draw.g, call.g.dtype),
        beta=None if dbeta is None else dbeta.squeeze(-1),
        A_log=dA_log,
        dt_bias=ddt_bias,
        erase=join(draw.erase, call.erase),
        write=join(draw.write, call.write),
        initial_state=None if call.initial_state is None or dstate is None else dstate.to(call.initial_state.dtype),
    )


# Segments ------------------------------------------------------------------------------------------------------------

# of one tensor of a segment: what is made from it should still be in the cache when it is read again
_SEGMENT_BYTES = 1 << 20
_TIMED = ("q", "k", "v", "g", "beta", "sign", "erase", "write")


def _segments(call: Call) -> list[slice]:
    """Stretches of time, whole chunks but for the rest at the end, that are worked through one after the other.

    How many chunks a segment has changes no bit: chunks are computed alike whichever others stand beside them.
    """
    B, T, HV, V = call.v.shape
    K = call.q.shape[-1]
    C = chunk_size(T, K, V)
    if call.cu_seqlens is not None:
        return [slice(0, T)]
    chunk_bytes = B * HV * C * max(K, V) * call.state_dtype.itemsize
    length = max(1, _SEGMENT_BYTES // chunk_bytes) * C
    whole = T // C * C
    segments = [slice(t, min(t + length, whole)) for t in range(0, whole, length)]
    return [*segments, slice(whole, T)] if whole < T else segments


def _segment(call: Call, time: slice, state: Tensor | None) -> Call:
    tensors = {name: getattr(call, name) for name in _TIMED}
    parts: dict[str, Any] = {name: None if x is None else x[:, time] for name, x in tensors.items()}
    return call._replace(**parts, initial_state=state, output_final_state=True)


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    saved = []
    for i, time in enumerate(_segments(call)):
        saved += _saved_like(_segment(call, time, call.initial_state if i == 0 else call.zero_state()))
    return saved


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    segments = _segments(call)
    if len(segments) == 1:
        return _forward(call)
    outputs, saved, state = [], [], call.initial_state
    for time in segments:
        o, state, kept = _forward(_segment(call, time, state))
        outputs.append(o)
        saved += kept
    assert state is not None
    return torch.cat(outputs, 1), state, saved


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None."""
    segments = _segments(call)
    if len(segments) == 1:
        return _backward(call, saved, do, dfinal)
    width = len(_Saved._fields)
    parts: list[Gradients] = []
    for i in reversed(range(len(segments))):
        kept = saved[width * i : width * (i + 1)]
        start = call.initial_state if i == 0 else call.zero_state()  # not read backwards: only whether there is one
        parts.append(_backward(_segment(call, segments[i], start), kept, do[:, segments[i]], dfinal))
        dfinal = parts[-1].initial_state
    parts.reverse()
    merged = {}
    for name, first in parts[0]._asdict().items():
        pieces = [getattr(part, name) for part in parts]
        if first is None or name == "initial_state":
            merged[name] = first
        else:
            merged[name] = torch.cat(pieces, 1) if name in _TIMED else torch.stack(pieces).sum(0)
    return Gradients(**merged)
