"""The WY chunk form in plain torch, with a hand-written backward: any device, any dtype, no logarithm of the gate.

With u_t = w_t - (Diag(alpha_t) S_{t-1})^T a_t the recurrence is S_t = Diag(alpha_t) S_{t-1} + k_t u_t^T, so inside a chunk
that starts from S

    S_i = Gamma_i S + sum_{j<=i} (Gamma_i / Gamma_j) k_j u_j^T,   (I + A) u = w - (a * Gamma) S,
    A_ij = a_i^T Diag(Gamma_i / Gamma_j) k_j  (j < i),            Gamma_i = prod_{l<=i} alpha_l, signed.

Gamma_i / Gamma_j is never a quotient. For i in the right and j in the left half of a block it is P_i Q_j, with P_i the
product of alpha from the middle to i and Q_j the product from j + 1 to the middle. Halves of halves give every pair
(i, j) exactly once, as one small matrix product per block: `_decays` builds all P and Q by multiplications alone. So
no factor exceeds one, alpha = 0 and alpha = +-1 are exact, signs cost nothing (app:gauge), nothing overflows
however strong the decay, and the gradient of log|alpha_t| is a sum over exactly those pairs that span t: no cancellation.

Legend of axes: R = B * HV rows, NC chunks, C chunk, M = R * NC, K key width, V value width, h half a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import Call, Gradients, Prepared, _expand_heads, prepare, prepare_backward

__all__ = ["backward", "forward", "saved_like"]

MAX_CHUNK = 64
_BASE = 16  # diagonal blocks inverted by forward substitution; larger ones are merged


def chunk_size(T: int) -> int:
    """C: 64, or the power of two that holds a shorter sequence. It depends on T alone, so batching changes no bit."""
    return min(MAX_CHUNK, 1 << (T - 1).bit_length())


# Layout: [B, T, HV, D] <-> [R, NC, C, D] -----------------------------------------------------------------------------


class _Layout:
    """Where each token lives. Every sequence starts a chunk; packed sequences are laid end to end, B = 1."""

    def __init__(self, call: Call):
        self.B, self.T, self.HV = call.v.shape[:3]
        self.C = chunk_size(self.T)
        self.packed = call.cu_seqlens is not None
        if call.cu_seqlens is None:
            self.NC = -(-self.T // self.C)
            return
        # As many chunk slots as could ever be needed: known without reading cu_seqlens, so there is no synchronisation
        cu, device = call.cu_seqlens.long(), call.q.device
        N = cu.numel() - 1
        self.NC = self.T // self.C + N
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

    def split(self, x: Tensor, pad: float = 0.0) -> Tensor:
        """[B, T, HV, D] -> [R, NC, C, D], contiguous, padded."""
        B, T, HV, D = x.shape
        out = x.new_empty(B, HV, self.NC * self.C, D)
        if self.packed:
            out.fill_(pad)
            out[0, :, self.place] = x[0].transpose(0, 1)
        else:
            out[:, :, :T] = x.transpose(1, 2)
            out[:, :, T:] = pad
        return out.view(B * HV, self.NC, self.C, D)

    def join(self, x: Tensor) -> Tensor:
        """[R, NC, C, D] -> [B, T, HV, D]."""
        x = x.view(self.B, self.HV, self.NC * self.C, -1)
        x = x[:, :, self.place] if self.packed else x[:, :, : self.T]
        return x.transpose(1, 2)

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


def _decays(alpha: Tensor) -> tuple[list[_Level], Tensor, Tensor]:
    """All levels, and for the whole chunk P [M, C, K] from its start and Q [M, C, K] to its end."""
    P, Q = alpha.clone(), torch.ones_like(alpha)
    levels = []
    h = 1
    while h < alpha.shape[1]:
        (P_left, P_right), (Q_left, _) = _halves(P, h), _halves(Q, h)
        levels.append(_Level(h, P_right.clone(), Q_left.clone()))
        right_total = levels[-1].P[:, :, -1:]
        P_right *= P_left[:, :, -1:]
        Q_left *= right_total
        h *= 2
    return levels, P, Q


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


def _scores(levels: list[_Level], q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """[M, C, C] each: q_i^T (Gamma_i / Gamma_j) k_j for j <= i, and a_i^T (Gamma_i / Gamma_j) k_j for j < i."""
    M, C, _ = q.shape
    A = q.new_zeros(2, M, C, C)
    for level in levels:
        rows, columns = _pairs(level, q, k, a)
        scores = torch.bmm(rows, columns.mT).view(M, -1, 2, level.h, level.h)
        _block(A, level.h).copy_(scores.permute(2, 0, 1, 3, 4))
    A[0].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return A[0], A[1]


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


class _Chunks(NamedTuple):
    """Everything the state pass reads, [R, NC, C, .] each."""

    U: Tensor  #: (I + A)^-1 w
    W: Tensor  #: (I + A)^-1 (a * P)
    kQ: Tensor  #: keys decayed to the chunk's end
    total: Tensor  #: [R, NC, K, 1] decay of the whole chunk


def _state_pass(layout: _Layout, x: _Chunks, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u [R, NC, C, V], the states at each chunk's start [R, NC, K, V], and the final states [N, HV, K, V]."""
    R, NC, _, K = x.kQ.shape
    states = x.U.new_empty(R, NC + 1, K, x.U.shape[-1])
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
    return u, states[:, :NC], final


def _reverse_state_pass(
    layout: _Layout, x: _Chunks, du: Tensor, dS_local: Tensor, dfinal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of :func:`_state_pass`: du completed, gradients of the states after each chunk, of the initial ones."""
    NC = layout.NC
    dafter = torch.empty_like(dS_local)
    dbefore = torch.empty_like(dS_local)
    dS = torch.zeros_like(dS_local[:, 0]) if layout.packed else dfinal.flatten(0, 1)
    du = du.clone()
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


def _split(call: Call, layout: _Layout) -> Prepared:
    """The prepared tensors as chunks [R, NC, C, .]; padding is the identity transition that writes nothing."""
    x = prepare(call)
    q, k = (layout.split(_expand_heads(y, call.group)) for y in (x.q, x.k))
    return Prepared(q, k, layout.split(x.a), layout.split(x.w), layout.split(x.alpha, pad=1.0))


def _stateless(call: Call, layout: _Layout) -> bool:
    """One chunk from a zero state: nothing is carried, and only the attention-like part remains."""
    return layout.NC == 1 and call.initial_state is None


def saved_like(call: Call) -> list[Tensor]:
    """Empty tensors of the shapes that :func:`forward` saves: scores, inverse, u, states."""
    layout_C = chunk_size(call.q.shape[1])
    B, T, HV, V = call.v.shape
    NC = -(-T // layout_C) if call.cu_seqlens is None else T // layout_C + call.num_sequences
    like = {"dtype": call.state_dtype, "device": call.v.device}
    M, K = B * HV * NC, call.q.shape[-1]
    square = torch.empty(M, layout_C, layout_C, **like)
    carried = NC > 1 or call.initial_state is not None
    states = torch.empty(B * HV, NC if carried else 0, K, V, **like)
    return [square, torch.empty_like(square), torch.empty(B * HV, NC, layout_C, V, **like), states]


def forward(call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, HV, V], the final state [N, HV, K, V], and what :func:`backward` reads again."""
    layout = _Layout(call)
    x = _split(call, layout)
    R, NC, C, K = x.q.shape
    q, k, a, alpha = (y.flatten(0, 1) for y in (x.q, x.k, x.a, x.alpha))
    levels, P, Q = _decays(alpha)
    scores, A = _scores(levels, q, k, a)
    del levels
    inverse = _inverse(A)
    U = (inverse @ x.w.flatten(0, 1)).view(R, NC, C, -1)
    if _stateless(call, layout):
        u, states = U, U.new_empty(R, 0, K, U.shape[-1])
        o = scores @ u.flatten(0, 1)
        final = call.zero_state()
        if call.output_final_state:
            final = ((k * Q).mT @ u.flatten(0, 1)).unflatten(0, (layout.B, layout.HV))
    else:
        chunks = _Chunks(U, (inverse @ (a * P)).view_as(x.a), (k * Q).view_as(x.k), P[:, -1].view(R, NC, K, 1))
        initial = call.zero_state() if call.initial_state is None else call.initial_state.to(call.state_dtype)
        u, states, final = _state_pass(layout, chunks, initial)
        o = torch.baddbmm(scores @ u.flatten(0, 1), q * P, states.flatten(0, 1))
    return layout.join(o).to(call.v.dtype), final, [scores, inverse, u, states]


def backward(call: Call, saved: list[Tensor], do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients of everything :class:`Gradients` names, from do [B, T, HV, V] and dfinal [N, HV, K, V] or None."""
    scores, inverse, u, states = saved
    layout = _Layout(call)
    x = _split(call, layout)
    R, NC, C, K = x.q.shape
    q, k, a, alpha = (y.flatten(0, 1) for y in (x.q, x.k, x.a, x.alpha))
    do = layout.split(do.to(call.state_dtype)).flatten(0, 1)
    u = u.flatten(0, 1)
    levels, P, Q = _decays(alpha)
    du = scores.mT @ do
    dstate = None
    if _stateless(call, layout):
        dq, dk, da, p, qq = (torch.zeros_like(q) for _ in range(5))
        if dfinal is not None:
            kQ, dS = k * Q, dfinal.to(du.dtype).flatten(0, 1)
            du = torch.baddbmm(du, kQ, dS)
            dkQ = u @ dS.mT
            dk.addcmul_(dkQ, Q)
            qq.addcmul_(dkQ, kQ)
        r = inverse.mT @ du
    else:
        qP, aP, kQ = q * P, a * P, k * Q
        S = states.flatten(0, 1)
        chunks = _Chunks(du, (inverse @ aP).view_as(x.a), kQ.view_as(x.k), P[:, -1].view(R, NC, K, 1))
        dlast = call.zero_state() if dfinal is None else dfinal.to(du.dtype)
        du, dafter, dstate = _reverse_state_pass(
            layout, chunks, du.view(R, NC, C, -1), (qP.mT @ do).view_as(states), dlast
        )
        r = inverse.mT @ du.flatten(0, 1)
        dafter = dafter.flatten(0, 1)
        dqP, daP, dkQ = do @ S.mT, (r @ S.mT).neg_(), u @ dafter.mT
        dq, da, dk = dqP * P, daP * P, dkQ * Q
        p, qq = (qP * dqP).addcmul_(aP, daP), kQ * dkQ
        p[:, -1] += (dafter * S).sum(-1) * P[:, -1]
    dscores, dA = do @ u.mT, (r @ u.mT).neg_()
    diagonal = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dq.addcmul_(diagonal, k)
    dk.addcmul_(diagonal, q)
    dlog = _levels_backward(levels, q, k, a, dscores, dA, (dq, dk, da), p, qq)
    join = lambda y: layout.join(y.view(R, NC, C, -1))  # noqa: E731
    grad = Prepared(join(dq), join(dk), join(da), join(r), dlog)
    return prepare_backward(call, grad, join(dlog), dstate)


def _levels_backward(
    levels: list[_Level],
    q: Tensor,
    k: Tensor,
    a: Tensor,
    dscores: Tensor,
    dA: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    p: Tensor,
    qq: Tensor,
) -> Tensor:
    """The adjoint of :func:`_scores` and :func:`_decays`; adds to grads (dq, dk, da) and returns dlog|alpha| [M, C, K].

    p and qq [M, C, K] hold the gradients of log P and log Q, first of the whole chunk, then level by level downwards;
    at blocks of one token log P is log|alpha| itself.
    """
    dq, dk, da = grads
    for level in reversed(levels):
        h = level.h
        rows, columns = _pairs(level, q, k, a)
        (p_left, p_right), (qq_left, _) = _halves(p, h), _halves(qq, h)
        p_left[:, :, -1] += p_right.sum(2)
        p_right[:, :, -1] += qq_left.sum(2)
        dblock = torch.stack((_block(dscores, h), _block(dA, h)), 2).view(-1, 2 * h, h)
        drows = torch.bmm(dblock, columns).view(*level.P.shape[:2], 2, h, -1)
        dcolumns = torch.bmm(dblock.mT, rows).view_as(level.Q)
        rows = rows.view_as(drows)
        for dx, row in ((dq, 0), (da, 1)):
            _halves(dx, h)[1].addcmul_(drows[:, :, row], level.P)
            p_right.addcmul_(drows[:, :, row], rows[:, :, row])
        _halves(dk, h)[0].addcmul_(dcolumns, level.Q)
        qq_left.addcmul_(dcolumns, columns.view_as(level.Q))
    return p
