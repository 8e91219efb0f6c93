"""The WY chunk form in plain torch, with a hand-written backward: any device, any dtype, no logarithm of the gate.

With u_t = w_t - (Diag(alpha_t) S_{t-1})^T a_t the recurrence is S_t = Diag(alpha_t) S_{t-1} + k_t u_t^T, so inside a chunk
that starts from S

    S_i = Gamma_i S + sum_{j<=i} (Gamma_i / Gamma_j) k_j u_j^T,   (I + A) u = w - (a * Gamma) S,
    A_ij = a_i^T Diag(Gamma_i / Gamma_j) k_j  (j < i),            Gamma_i = prod_{l<=i} alpha_l, signed.

Gamma_i / Gamma_j is never a quotient. For i in the right and j in the left half of a block it is P_i Q_j, with P_i the
product of alpha from the middle to i and Q_j the product from j + 1 to the middle. Halves of halves give every pair
(i, j) exactly once, as one small matrix product per block: `_climb` builds all P and Q by multiplications alone. So
no factor exceeds one, alpha = 0 and alpha = +-1 are exact, signs cost nothing (app:gauge), nothing overflows
however strong the decay, and the gradient of log|alpha_t| is a sum over exactly those pairs that span t: no cancellation.

Legend of axes: R = B * HV rows, NC chunks, C chunk, M = R * NC, K key width, V value width, h half a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients, Norms, Prepared, Raw, prepare, prepare_backward

__all__ = ["backward", "forward", "saved_like"]

MAX_CHUNK = 64
SMALL_HEAD, SMALL_CHUNK = 32, 16  # where C x C matrices would outweigh the tensors they are made from
_BASE = 16  # diagonal blocks inverted by forward substitution; larger ones are merged


def chunk_size(T: int, K: int, V: int) -> int:
    """C: 64, 16 for small heads, or the power of two that holds a shorter sequence. Never by B or H: batching changes no bit."""
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
        owner = torch.searchsorted(cu[1:], token, right=True).clamp_max(N - 1)
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
        return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)

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
        if not self.packed:
            return states[:, -1].unflatten(0, (self.B, self.HV))
        chosen = states[:, self.last_slot.clamp_min(0)].transpose(0, 1)
        return torch.where(self.empty[:, None, None, None], initial, chosen)


# The chunk's matrices ------------------------------------------------------------------------------------------------


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """[M, C, D] -> left and right halves of its blocks of 2h, views [M, C / 2h, h, D]."""
    left, right = x.view(x.shape[0], -1, 2, h, x.shape[-1]).unbind(2)
    return left, right


def _block(A: Tensor, h: int) -> Tensor:
    """The lower left quarters of A's diagonal blocks of 2h: [..., C, C] -> view [..., C / 2h, h, h]."""
    C = A.shape[-1]
    *lead, row, column = A.stride()
    offset = A.storage_offset() + h * row
    return A.as_strided((*A.shape[:-2], C // (2 * h), h, h), (*lead, 2 * h * (row + column), row, column), offset)


def _diagonal_block(A: Tensor, h: int) -> Tensor:
    """A's diagonal blocks of h: [..., C, C] -> view [..., C / h, h, h]."""
    C = A.shape[-1]
    *lead, row, column = A.stride()
    return A.as_strided((*A.shape[:-2], C // h, h, h), (*lead, h * (row + column), row, column), A.storage_offset())


class _Level(NamedTuple):
    """Decays inside the blocks of 2h: from the middle to i (right half), from j + 1 to the middle (left half)."""

    h: int
    P: Tensor  #: [M, C / 2h, h, K]
    Q: Tensor  #: [M, C / 2h, h, K]


def _climb(P: Tensor, Q: Tensor) -> Iterator[_Level]:
    """The levels from pairs of tokens upwards, as views of P [M, C, K] (alpha at first) and Q (ones at first).

    After the last level P holds the products from the chunk's start and Q those to its end.
    """
    h = 1
    while h < P.shape[1]:
        (P_left, P_right), (Q_left, _) = _halves(P, h), _halves(Q, h)
        yield _Level(h, P_right, Q_left)
        Q_left *= P_right[:, :, -1:]
        P_right *= P_left[:, :, -1:]
        h *= 2


def _decays(alpha: Tensor) -> tuple[list[_Level], Tensor, Tensor]:
    """All levels as copies, and P and Q of the whole chunk."""
    P, Q = alpha.clone(), torch.ones_like(alpha)
    return [_Level(level.h, level.P.clone(), level.Q.clone()) for level in _climb(P, Q)], P, Q


class _Pairs(NamedTuple):
    """Decayed factors of one level: rows q and a from the right half, columns k from the left half."""

    rows: Tensor  #: [M * C / 2h, 2h, K]
    columns: Tensor  #: [M * C / 2h, h, K]


def _pairs(level: _Level, q: Tensor, k: Tensor, a: Tensor) -> _Pairs:
    M, blocks, h, K = level.P.shape
    rows = q.new_empty(M, blocks, 2, h, K)
    torch.mul(_halves(q, h)[1], level.P, out=rows[:, :, 0])
    torch.mul(_halves(a, h)[1], level.P, out=rows[:, :, 1])
    columns = _halves(k, h)[0] * level.Q
    return _Pairs(rows.view(-1, 2 * h, K), columns.view(-1, h, K))


def _scores(q: Tensor, k: Tensor, a: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[M, C, C] each: q_i^T (Gamma_i / Gamma_j) k_j for j <= i, a_i^T (Gamma_i / Gamma_j) k_j for j < i; P and Q."""
    M, C, _ = q.shape
    scores = q.new_empty(2, M, C, C)
    scores[0].zero_()  # of the second only the strict lower triangle is ever read
    P, Q = alpha.clone(), torch.ones_like(alpha)
    for level in _climb(P, Q):
        rows, columns = _pairs(level, q, k, a)
        block = torch.bmm(rows, columns.mT).view(M, -1, 2, level.h, level.h)
        _block(scores, level.h).copy_(block.permute(2, 0, 1, 3, 4))
    torch.linalg.vecdot(q, k, out=scores[0].diagonal(dim1=-2, dim2=-1))
    return scores[0], scores[1], P, Q


def _inverse(A: Tensor) -> Tensor:
    """(I + A)^{-1} for strictly lower A [M, C, C]: forward substitution on blocks of 16, then exact block merges."""
    C = A.shape[-1]
    base = min(_BASE, C)
    inverse = torch.zeros_like(A)
    eye = torch.eye(base, dtype=A.dtype, device=A.device)
    blocks = _diagonal_block(A, base)
    solved = torch.linalg.solve_triangular(blocks, eye.expand_as(blocks), upper=False, unitriangular=True)
    _diagonal_block(inverse, base).copy_(solved)
    h = base
    while h < C:
        left, right = _diagonal_block(inverse, h).unflatten(-3, (-1, 2)).unbind(-3)
        _block(inverse, h).copy_((right @ _block(A, h) @ left).neg_())
        h *= 2
    return inverse


# The state pass ------------------------------------------------------------------------------------------------------


def _enter(layout: _Layout, S: Tensor, initial: Tensor, c: int) -> Tensor:
    """The state [R, K, V] that chunk c starts from: where a packed sequence begins, its own initial state."""
    if not layout.packed:
        return S
    return torch.where(layout.first[c], initial[layout.sequence[c]], S)


class _Carry(NamedTuple):
    """Everything the state pass reads, [R, NC, C, .] each."""

    U: Tensor  #: (I + A)^-1 w
    W: Tensor  #: (I + A)^-1 (a * P)
    kQ: Tensor  #: keys decayed to the chunk's end
    total: Tensor  #: [R, NC, K, 1] decay of the whole chunk


def _state_pass(layout: _Layout, x: _Carry, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u [R, NC, C, V], the states at each chunk's start [R, NC, K, V], and the final states [N, HV, K, V]."""
    R, NC, _, K = x.kQ.shape
    states = x.U.new_empty(R, NC, K, x.U.shape[-1])
    u = torch.empty_like(x.U)
    S = initial[0] if layout.packed else initial.flatten(0, 1)
    after = []
    for c in range(NC):
        S = _enter(layout, S, initial, c)
        states[:, c] = S
        u[:, c] = torch.baddbmm(x.U[:, c], x.W[:, c], S, alpha=-1)
        S = torch.baddbmm(S * x.total[:, c], x.kQ[:, c].mT, u[:, c])
        if layout.packed:
            after.append(S)
    final = layout.final(torch.stack(after, 1), initial) if layout.packed else S.unflatten(0, (layout.B, layout.HV))
    return u, states, final


def _reverse_state_pass(
    layout: _Layout, x: _Carry, dS_local: Tensor, dfinal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of :func:`_state_pass`, with x.U the local part of du: du completed, gradients of the states after each chunk, of the initial ones."""
    NC = layout.NC
    dafter = torch.empty_like(dS_local)
    dbefore = torch.empty_like(dS_local)
    dS = torch.zeros_like(dS_local[:, 0]) if layout.packed else dfinal.flatten(0, 1)
    du = x.U.clone()
    for c in reversed(range(NC)):
        if layout.packed:
            dS = torch.where(layout.last[c], dfinal[layout.sequence[c]], dS)
        dafter[:, c] = dS
        du[:, c] = torch.baddbmm(du[:, c], x.kQ[:, c], dS)
        dS = torch.baddbmm(torch.addcmul(dS_local[:, c], dS, x.total[:, c]), x.W[:, c].mT, du[:, c], alpha=-1)
        dbefore[:, c] = dS
    if not layout.packed:
        return du, dafter, dS.unflatten(0, (layout.B, layout.HV))
    chosen = dbefore[:, layout.first_slot.clamp_max(NC - 1)].transpose(0, 1)
    return du, dafter, torch.where(layout.empty[:, None, None, None], dfinal, chosen)


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
    """What :func:`forward` leaves for :func:`backward`."""

    q: Tensor  #: [M, C, K], as :class:`Prepared`
    k: Tensor  #: [M, C, K]
    a: Tensor  #: [M, C, K]
    v: Tensor  #: [M, C, V]
    alpha: Tensor  #: [M, C, K]
    scores: Tensor  #: [M, C, C]
    inverse: Tensor  #: [M, C, C]
    u: Tensor  #: [M, C, V]
    states: Tensor  #: [B * HV, NC, K, V] at each chunk's start; NC = 0 where none is carried
    q_norm: Tensor  #: [B, H, NC * C, 1], as :class:`Norms`; empty without normalisation
    k_norm: Tensor
    excess: Tensor  #: [B, HV, NC * C, 1]


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves."""
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    C = chunk_size(T, K, V)
    NC = _num_chunks(call, C)
    M = B * HV * NC
    carried = NC > 1 or call.initial_state is not None
    norm = (B, H, NC * C, 1) if call.normalize_qk else (0,)
    excess = (B, HV, NC * C, 1) if call.normalize_qk else (0,)
    keys, values, square = (M, C, K), (M, C, V), (M, C, C)
    states = (B * HV, NC if carried else 0, K, V)
    shapes = _Saved(keys, keys, keys, values, keys, square, square, values, states, norm, norm, excess)  # type: ignore[arg-type]
    return [torch.empty(shape, dtype=call.state_dtype, device=call.v.device) for shape in shapes]  # type: ignore[call-overload]


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    layout = _Layout(call)
    C, NC = layout.C, layout.NC
    raw = _raw(call, layout)
    x, norms = prepare(call, raw)
    layout.fill_padding(x.alpha, 1.0)
    q, k, a, w, alpha = (_chunks(y, C) for y in x)
    scores, A, P, Q = _scores(q, k, a, alpha)
    inverse = _inverse(A)
    u = inverse @ w
    rows = (layout.B * layout.HV, NC)
    if _stateless(call, layout):
        states = u.new_empty(rows[0], 0, q.shape[-1], u.shape[-1])
        o = scores @ u
        final = call.zero_state()
        if call.output_final_state:
            final = ((k * Q).mT @ u).unflatten(0, (layout.B, layout.HV))
    else:
        carry = _Carry(*(y.unflatten(0, rows) for y in (u, inverse @ (a * P), k * Q, P[:, -1].unsqueeze(-1))))
        u, states, final = _state_pass(layout, carry, call.start_state())
        u = u.flatten(0, 1)
        o = torch.baddbmm(scores @ u, q * P, states.flatten(0, 1))
    o = layout.join(o.view(layout.B, layout.HV, NC * C, -1), call.v.dtype)
    kept = norms if norms is not None else [u.new_empty(0) for _ in range(3)]
    return o, final, [*_Saved(q, k, a, _chunks(raw.v, C), alpha, scores, inverse, u, states, *kept)]


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None."""
    x = _Saved(*saved)
    layout = _Layout(call)
    do = _chunks(layout.split(do, call.state_dtype), layout.C)
    levels, P, Q = _decays(x.alpha)
    du = x.scores.mT @ do
    if _stateless(call, layout):
        r, dq, dk, da, p, s, dstate = *_stateless_backward(x, Q, du, dfinal), None
    else:
        r, dq, dk, da, p, s, dstate = _carried_backward(call, layout, x, P, Q, du, do, dfinal)
    dscores, dA = do @ x.u.mT, (r @ x.u.mT).neg_()
    diagonal = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dq.addcmul_(diagonal, x.k)
    dk.addcmul_(diagonal, x.q)
    dlog = _levels_backward(levels, x, dscores, dA, (dq, dk, da), p, s)
    return _finish(call, layout, x, (dq, dk, da, r, dlog), dstate)


def _finish(
    call: Call, layout: _Layout, x: _Saved, dx: tuple[Tensor, ...], dstate: Tensor | None
) -> Gradients:
    """From gradients of the prepared chunks to gradients of the call."""

    def heads(y: Tensor) -> Tensor:
        return y.view(layout.B, layout.HV, layout.NC * layout.C, -1)

    def split(y: Tensor | None) -> Tensor | None:
        return None if y is None else layout.split(y, call.state_dtype)

    def join(y: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if y is None or like is None else layout.join(y, like.dtype)

    beta = None if call.beta is None else call.beta.unsqueeze(-1)
    g = call.g if call.gate is None else layout.split(call.g, call.state_dtype)
    raw = Raw(x.q, x.k, heads(x.v), g, split(beta), None, split(call.erase), split(call.write))
    prepared = Prepared(heads(x.q), heads(x.k), heads(x.a), raw.v, heads(x.alpha))
    norms = Norms(x.q_norm, x.k_norm, x.excess) if call.normalize_qk else None
    grads = Prepared(*map(heads, dx))
    layout.fill_padding(grads.alpha, 0.0)
    draw, dA_log, ddt_bias = prepare_backward(call, raw, prepared, norms, grads, grads.alpha)
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
        initial_state=None
        if call.initial_state is None or dstate is None
        else dstate.to(call.initial_state.dtype),
    )


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _stateless_backward(x: _Saved, Q: Tensor, du: Tensor, dfinal: Tensor | None) -> _Parts:
    """What does not pass through the scores: r = (I + A)^-T du, dq, dk, da, and the gradients of log P and log Q."""
    dq, dk, da, p, s = (torch.zeros_like(x.k) for _ in range(5))
    if dfinal is not None:
        kQ, dS = x.k * Q, dfinal.to(du.dtype).flatten(0, 1)
        du = torch.baddbmm(du, kQ, dS)
        dkQ = x.u @ dS.mT
        dk, s = dkQ * Q, dkQ * kQ
    return x.inverse.mT @ du, dq, dk, da, p, s


def _carried_backward(
    call: Call, layout: _Layout, x: _Saved, P: Tensor, Q: Tensor, du: Tensor, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`_stateless_backward` with states carried between chunks, and the gradient of the initial states."""
    rows = (layout.B * layout.HV, layout.NC)
    qP, aP, kQ, S = x.q * P, x.a * P, x.k * Q, x.states.flatten(0, 1)
    carry = _Carry(*(y.unflatten(0, rows) for y in (du, x.inverse @ aP, kQ, P[:, -1].unsqueeze(-1))))
    dlast = call.zero_state() if dfinal is None else dfinal.to(du.dtype)
    du, dafter, dstate = _reverse_state_pass(layout, carry, (qP.mT @ do).view_as(x.states), dlast)
    r = x.inverse.mT @ du.flatten(0, 1)
    dafter = dafter.flatten(0, 1)
    dqP, daP, dkQ = do @ S.mT, (r @ S.mT).neg_(), x.u @ dafter.mT
    p = qP.mul_(dqP).addcmul_(aP, daP)
    p[:, -1] += torch.linalg.vecdot(dafter, S) * P[:, -1]
    s = kQ.mul_(dkQ)
    return r, dqP.mul_(P), dkQ.mul_(Q), daP.mul_(P), p, s, dstate


def _levels_backward(
    levels: list[_Level],
    x: _Saved,
    dscores: Tensor,
    dA: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    p: Tensor,
    s: Tensor,
) -> Tensor:
    """The adjoint of :func:`_scores` and :func:`_decays`; adds to grads (dq, dk, da) and returns dlog|alpha| [M, C, K].

    p and s [M, C, K] hold the gradients of log P and log Q, first of the whole chunk, then level by level downwards;
    at blocks of one token log P is log|alpha| itself.
    """
    dq, dk, da = grads
    for level in reversed(levels):
        h = level.h
        rows, columns = _pairs(level, x.q, x.k, x.a)
        (p_left, p_right), (s_left, _) = _halves(p, h), _halves(s, h)
        p_left[:, :, -1] += p_right.sum(2)
        p_right[:, :, -1] += s_left.sum(2)
        dblock = torch.stack((_block(dscores, h), _block(dA, h)), 2).view(-1, 2 * h, h)
        drows = torch.bmm(dblock, columns).view(*level.P.shape[:2], 2, h, -1)
        dcolumns = torch.bmm(dblock.mT, rows).view_as(level.Q)
        rows = rows.view_as(drows)
        for dx, row in ((dq, 0), (da, 1)):
            _halves(dx, h)[1].addcmul_(drows[:, :, row], level.P)
            p_right.addcmul_(drows[:, :, row], rows[:, :, row])
        _halves(dk, h)[0].addcmul_(dcolumns, level.Q)
        s_left.addcmul_(dcolumns, columns.view_as(level.Q))
    return p
