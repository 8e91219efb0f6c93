"""Products of tokens decayed against each other inside a chunk, two ways to make them.

With Gamma_i = prod_{l<=i} alpha_l, signed, a chunk needs q_i^T Diag(Gamma_i / Gamma_j) k_j and a_i^T Diag(Gamma_i / Gamma_j) k_j
for j < i, and q, a, k decayed to its start or end. Signs are part of Gamma and cost nothing (app:gauge). No logarithm
of the gate is taken, so alpha = +-1 is exact.

:class:`Quotients` takes Gamma_i / Gamma_j = Gamma_i * (1 / Gamma_j) literally, in float64, as one matrix product. That is
right while nothing leaves float64's range: |alpha| >= e^-5 over 32 tokens is 1e-70 at the least. So it serves the
bounded gates.

:class:`Halves` serves every gate, alpha = 0 included. For i in the right and j in the left half of a block the quotient is
P_i Q_j, with P_i the product of alpha from the middle to i and Q_j that from j + 1 to the middle. Halves of halves give
every pair once. No factor exceeds one, so nothing overflows however strong the decay, and the gradient of
log|alpha_t| is a sum over exactly those pairs that span t: no cancellation.

Legend of axes: M chunks of all rows, C chunk, K key width, h half a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ckda.ops.call import wide_dtype

__all__ = ["Decayed", "DecayedGrads", "Halves", "Quotients", "decayed"]


class DecayedGrads(NamedTuple):
    """Gradients of what the state pass reads; None where no state is carried."""

    qP: Tensor
    aP: Tensor
    kQ: Tensor
    total: Tensor  #: [M, K]


class TokenGrads(NamedTuple):
    """Gradients [M, C, K] of q, k, a (a part of k's where a is k) and log|alpha|."""

    q: Tensor
    k: Tensor
    a: Tensor | None
    log_alpha: Tensor


class Decayed:
    """q, k, a and alpha [M, C, K] of a chunk. `qP` and `aP` are decayed from the chunk's start, `kQ` to its end."""

    def __init__(self, q: Tensor, k: Tensor, a: Tensor, alpha: Tensor):
        self.q, self.k, self.a, self.alpha = q, k, a, alpha

    @property
    def qP(self) -> Tensor:
        raise NotImplementedError

    @property
    def aP(self) -> Tensor:
        """In the wide dtype."""
        raise NotImplementedError

    @property
    def kQ(self) -> Tensor:
        raise NotImplementedError

    @property
    def total(self) -> Tensor:
        """[M, K] the decay of the whole chunk."""
        raise NotImplementedError

    def scores(self) -> tuple[Tensor, Tensor]:
        """Of q for j <= i, zero above; of a for j < i in the wide dtype, anything above. [M, C, C] each."""
        raise NotImplementedError

    def backward(self, dscores: Tensor, dG: Tensor, carried: DecayedGrads | None) -> TokenGrads:
        """The adjoint of :meth:`scores` and of the four decayed tensors.

        Only j <= i of dscores and j < i of dG are read; both are overwritten.
        """
        raise NotImplementedError

    def _diagonal(self, scores: Tensor) -> None:
        scores.diagonal(dim1=-2, dim2=-1).copy_(torch.linalg.vecdot(self.q, self.k))

    def _diagonal_backward(self, diagonal: Tensor, dq: Tensor, dk: Tensor) -> None:
        """diagonal [M, C, 1]: that of dscores."""
        dq.addcmul_(diagonal, self.k)
        dk.addcmul_(diagonal, self.q)


def decayed(q: Tensor, k: Tensor, a: Tensor, alpha: Tensor, bounded: bool) -> Decayed:
    """The cheaper way that is right for this gate."""
    return (Quotients if bounded and wide_dtype(q.device) == torch.float64 else Halves)(q, k, a, alpha)


class Quotients(Decayed):
    """One matrix product of Gamma-weighted rows and 1/Gamma-weighted columns, in float64; |alpha| >= e^-5."""

    def __init__(self, q: Tensor, k: Tensor, a: Tensor, alpha: Tensor):
        super().__init__(q, k, a, alpha)
        # tensors are widened first: torch multiplies two of different dtypes ten times slower
        self.P = torch.cumprod(alpha.double(), 1)
        self.inverse = self.P.reciprocal()
        wide_k = k.double()
        wide_a = wide_k if a is k else a.double()
        self._qP, self._aP, self.columns = self.P * q.double(), self.P * wide_a, self.inverse * wide_k

    @property
    def qP(self) -> Tensor:
        return self._qP.to(self.q.dtype)

    @property
    def aP(self) -> Tensor:
        return self._aP

    @property
    def kQ(self) -> Tensor:
        return (self.columns * self.P[:, -1:]).to(self.k.dtype)

    @property
    def total(self) -> Tensor:
        return self.P[:, -1].to(self.q.dtype)

    def scores(self) -> tuple[Tensor, Tensor]:
        scores = (self._qP @ self.columns.mT).tril_(-1).to(self.q.dtype)
        self._diagonal(scores)
        return scores, self._aP @ self.columns.mT

    def backward(self, dscores: Tensor, dG: Tensor, carried: DecayedGrads | None) -> TokenGrads:
        diagonal = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
        lower, dG = dscores.double().tril_(-1), dG.double().tril_(-1)
        dqP, daP = lower @ self.columns, dG @ self.columns
        dcolumns = torch.baddbmm(lower.mT @ self._qP, dG.mT, self._aP)
        last = None
        if carried is not None:
            dqP += carried.qP.double()
            daP += carried.aP.double()
            dkQ, total = carried.kQ.double(), self.P[:, -1:]
            last = (carried.total.double() + (self.columns * dkQ).sum(1)) * total.squeeze(1)
            dcolumns.addcmul_(dkQ, total)
        log_P = (self._qP * dqP).addcmul_(self._aP, daP).addcmul_(self.columns, dcolumns, value=-1)
        if last is not None:
            log_P[:, -1] += last
        # log P_i is the sum of log|alpha_t| over t <= i, so that of alpha_t collects all i >= t
        sums = log_P.cumsum(1)
        log_alpha = (log_P + sums[:, -1:]).sub_(sums).to(self.q.dtype)
        dk = dcolumns.mul_(self.inverse)
        da = daP.mul_(self.P)
        if self.a is self.k:
            dk += da
        dq, dk = dqP.mul_(self.P).to(self.q.dtype), dk.to(self.q.dtype)
        self._diagonal_backward(diagonal, dq, dk)
        return TokenGrads(dq, dk, None if self.a is self.k else da.to(self.q.dtype), log_alpha)


def halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """[M, C, D] -> left and right halves of its blocks of 2h, views [M, C / 2h, h, D]."""
    left, right = x.view(x.shape[0], -1, 2, h, x.shape[-1]).unbind(2)
    return left, right


def lower_blocks(A: Tensor, h: int) -> Tensor:
    """The lower left quarters of A's diagonal blocks of 2h: [..., C, C] -> view [..., C / 2h, h, h]."""
    C = A.shape[-1]
    *lead, row, column = A.stride()
    offset = A.storage_offset() + h * row
    return A.as_strided((*A.shape[:-2], C // (2 * h), h, h), (*lead, 2 * h * (row + column), row, column), offset)


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
        (P_left, P_right), (Q_left, _) = halves(P, h), halves(Q, h)
        yield _Level(h, P_right, Q_left)
        Q_left *= P_right[:, :, -1:]
        P_right *= P_left[:, :, -1:]
        h *= 2


class Halves(Decayed):
    """Halves of halves, by multiplications with factors of at most one."""

    def __init__(self, q: Tensor, k: Tensor, a: Tensor, alpha: Tensor):
        super().__init__(q, k, a, alpha)
        self.P, self.Q = alpha.clone(), torch.ones_like(alpha)
        self.levels = [_Level(level.h, level.P.clone(), level.Q.clone()) for level in _climb(self.P, self.Q)]

    @property
    def qP(self) -> Tensor:
        return self.q * self.P

    @property
    def aP(self) -> Tensor:
        return (self.a * self.P).to(wide_dtype(self.q.device))

    @property
    def kQ(self) -> Tensor:
        return self.k * self.Q

    @property
    def total(self) -> Tensor:
        return self.P[:, -1]

    def _pairs(self, level: _Level) -> tuple[Tensor, Tensor]:
        """Rows q and a of the right halves [M * C / 2h, 2h, K], columns k of the left halves [M * C / 2h, h, K]."""
        M, blocks, h, K = level.P.shape
        rows = self.q.new_empty(M, blocks, 2, h, K)
        torch.mul(halves(self.q, h)[1], level.P, out=rows[:, :, 0])
        torch.mul(halves(self.a, h)[1], level.P, out=rows[:, :, 1])
        columns = halves(self.k, h)[0] * level.Q
        return rows.view(-1, 2 * h, K), columns.view(-1, h, K)

    def scores(self) -> tuple[Tensor, Tensor]:
        M, C, _ = self.q.shape
        scores = self.q.new_zeros(M, C, C)
        G = self.q.new_empty(M, C, C, dtype=wide_dtype(self.q.device))
        for level in self.levels:
            h = level.h
            rows, columns = self._pairs(level)
            of_q = torch.bmm(rows[:, :h], columns.mT)
            of_a = torch.bmm(rows[:, h:].to(G.dtype), columns.to(G.dtype).mT)
            lower_blocks(scores, h).copy_(of_q.view(M, -1, h, h))
            lower_blocks(G, h).copy_(of_a.view(M, -1, h, h))
        self._diagonal(scores)
        return scores, G

    def backward(self, dscores: Tensor, dG: Tensor, carried: DecayedGrads | None) -> TokenGrads:
        if carried is None:
            dq, dk, da, log_P, log_Q = (torch.zeros_like(self.q) for _ in range(5))
        else:
            dq, da, dk = carried.qP * self.P, carried.aP * self.P, carried.kQ * self.Q
            log_P, log_Q = (dq * self.q).addcmul_(da, self.a), dk * self.k
            log_P[:, -1] += carried.total * self.P[:, -1]
        if self.a is self.k:
            da = dk.add_(da)
        self._diagonal_backward(dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), dq, dk)
        for level in reversed(self.levels):
            self._level_backward(level, dscores, dG, (dq, dk, da), log_P, log_Q)
        return TokenGrads(dq, dk, None if self.a is self.k else da, log_P)

    def _level_backward(
        self,
        level: _Level,
        dscores: Tensor,
        dG: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        log_P: Tensor,
        log_Q: Tensor,
    ) -> None:
        """One level, downwards: log_P and log_Q hold gradients of the blocks of 2h, then of those of h.

        At blocks of one token log P is log|alpha| itself.
        """
        h, (dq, dk, da) = level.h, grads
        rows, columns = self._pairs(level)
        (p_left, p_right), (q_left, _) = halves(log_P, h), halves(log_Q, h)
        p_left[:, :, -1] += p_right.sum(2)
        p_right[:, :, -1] += q_left.sum(2)
        dblock = torch.stack((lower_blocks(dscores, h), lower_blocks(dG, h)), 2).view(-1, 2 * h, h)
        drows = torch.bmm(dblock, columns).view(*level.P.shape[:2], 2, h, -1)
        dcolumns = torch.bmm(dblock.mT, rows).view_as(level.Q)
        rows = rows.view_as(drows)
        for dx, row in ((dq, 0), (da, 1)):
            halves(dx, h)[1].addcmul_(drows[:, :, row], level.P)
            p_right.addcmul_(drows[:, :, row], rows[:, :, row])
        halves(dk, h)[0].addcmul_(dcolumns, level.Q)
        q_left.addcmul_(dcolumns, columns.view_as(level.Q))
