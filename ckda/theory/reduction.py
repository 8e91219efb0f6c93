"""From a finite tracker with additive terms and several heads to an orthogonal one without them.

prop:affine-orthogonal-reduction and prop:independent-head-reduction as an algorithm in exact arithmetic. The input is
any :class:`AffineTracker`, ``S <- A_g S + B_g`` per head with ``|A_g| <= 1`` and finitely many reachable states; the
output is a tracker of the same group whose heads move by orthogonal matrices alone, each the restriction of ``A_g`` to
an invariant subspace. Each step of the paper's proof is checked on the way and raises Refuted where it fails.

The paper repeats a word of least Frobenius norm; here the word is found by merging states until no two that are left
can be merged. The end is the same: on what is left every word acts one-to-one, hence (being non-expansive) without
losing length.

Example:
    >>> tracker = disguise(["D3", "Z4"], seed=0)
    >>> reduced = reduce_tracker(tracker)
    >>> [head.A[0].shape[0] for head in tracker.heads], [head.dimension for head in reduced.heads]
    ([4, 4], [2, 2])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from sympy.polys.densearith import dup_rem

from ckda.groups import FiniteGroup, direct_product
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.exact import Field, Matrix
from ckda.theory.groups import Head, encoded, finite_rotation_groups, realise

__all__ = ["AffineHead", "AffineTracker", "OrthogonalHead", "OrthogonalTracker", "disguise", "reduce_tracker"]


@dataclass(frozen=True, eq=False)
class AffineHead:
    """One head S <- A_g S + B_g (eq:tracking-affine-model), by group element."""

    A: tuple[Matrix, ...]  #: [n, n]
    B: tuple[Matrix, ...]  #: [n, m]
    start: Matrix  #: [n, m]


@dataclass(frozen=True, eq=False)
class AffineTracker:
    """Independent heads that are read together."""

    group: FiniteGroup
    heads: tuple[AffineHead, ...]


@dataclass(frozen=True, eq=False)
class OrthogonalHead:
    """A head S <- A_g S in a basis of its invariant subspace.

    The basis is orthogonal only up to its Gram matrix, A_g^T gram A_g = gram, so that no square root leaves the field;
    `orthonormal` gives the same matrices in an orthonormal basis, as floats.
    """

    A: tuple[Matrix, ...]  #: [r, r]
    start: Matrix  #: [r, m]
    basis: Matrix  #: [n, r] in the coordinates of the original head
    gram: Matrix  #: [r, r] = basis^T basis

    @property
    def dimension(self) -> int:
        return self.basis.shape[1]

    def orthonormal(self, g: int) -> np.ndarray:
        """[r, r] float64, orthogonal up to rounding."""
        L = np.linalg.cholesky(self.gram.float())
        return L.T @ self.A[g].float() @ np.linalg.inv(L.T)


@dataclass(frozen=True, eq=False)
class OrthogonalTracker:
    """What the reduction returns: heads (those of dimension zero left out) and what was found on the way."""

    group: FiniteGroup
    heads: tuple[OrthogonalHead, ...]
    kept: tuple[int, ...]  #: which of the original heads these are
    word: tuple[int, ...]  #: z, a word of value e that merges all that can be merged
    states: tuple[int, int, int]  #: reachable before, left after z, reachable in the orthogonal tracker
    hidden: int  #: order of the group Gamma of joint matrices


State = tuple[Matrix, ...]


def explore(tracker: AffineTracker, limit: int = 3000) -> tuple[list[State], np.ndarray, np.ndarray]:
    """Reachable joint states, next state [N, G] and decoder [N]; Refuted where no decoder tracks the group."""
    G, heads = tracker.group, tracker.heads
    states: list[State] = [tuple(head.start for head in heads)]
    place, decode = {states[0]: 0}, [G.identity]
    step: list[list[int]] = []
    while len(step) < len(states):
        here, row = len(step), list[int]()
        for g in range(G.order):
            new = tuple(h.A[g] @ S + h.B[g] for h, S in zip(heads, states[here], strict=True))
            if new not in place:
                place[new] = len(states)
                states.append(new)
                decode.append(int(G.table[g, decode[here]]))
            row.append(place[new])
            if decode[row[-1]] != G.table[g, decode[here]]:
                raise Refuted(f"{G.name}: state {row[-1]} is reached with two products, no decoder tracks the group")
        if len(states) > limit:
            raise Refuted(f"{G.name}: more than {limit} reachable states")
        step.append(row)
    return states, np.array(step), np.array(decode)


def merging_word(step: np.ndarray) -> list[int]:
    """A word after which no two states that are left can be merged by any further word."""
    N, G = step.shape
    by = np.where(np.eye(N, dtype=bool), -2, -1)  # the letter that brings a pair closer to merging; -1 none, -2 merged
    while True:
        found = by.copy()
        for g in range(G):
            better = (found == -1) & (by[np.ix_(step[:, g], step[:, g])] != -1)
            found[better] = g
        if (found == by).all():
            break
        by = found
    word: list[int] = []
    image = np.arange(N)
    while True:
        left = np.unique(image)
        pairs = np.argwhere(by[np.ix_(left, left)] >= 0)
        if not len(pairs):
            return word
        x, y = left[pairs[0]]
        while x != y:
            g = int(by[x, y])
            word.append(g)
            x, y, image = step[x, g], step[y, g], step[image, g]


def _idempotent(step: np.ndarray, word: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """The word repeated until its map on states is a projection, and that map."""
    N = len(step)
    once = reduce(lambda at, g: step[at, g], word, np.arange(N))
    repeated, now = list(word), once
    while not (now[now] == now).all():
        repeated, now = repeated + list(word), once[now]
    return repeated, now


def _column_basis(F: Field, columns: Sequence[Matrix], rows: int) -> Matrix:
    """[rows, r] an independent selection of the columns."""
    chosen: list[Matrix] = []
    for c in columns:
        if not c.is_zero() and _rank([*chosen, c]) > len(chosen):
            chosen.append(c)
    return chosen[0].stack(*chosen[1:]) if chosen else F.zeros(rows, 0)


def _rank(columns: Sequence[Matrix]) -> int:
    return columns[0].stack(*columns[1:]).rank()


def _restrict(head: AffineHead, basis: Matrix, where: str) -> tuple[tuple[Matrix, ...], Matrix]:
    """A_g on the span of the basis: invariance and A^T gram A = gram checked, charpoly a factor of the original's."""
    gram = basis.T @ basis
    solve = gram.inverse() @ basis.T
    restricted = []
    for g, A in enumerate(head.A):
        moved = A @ basis
        small = solve @ moved
        if basis @ small != moved:
            raise Refuted(f"{where}: A_{g} does not preserve the surviving subspace")
        if small.T @ gram @ small != gram:
            raise Refuted(f"{where}: A_{g} loses length on the surviving subspace")
        if dup_rem(A.charpoly(), small.charpoly(), A.field.domain):
            raise Refuted(f"{where}: an eigenvalue of the restriction of A_{g} is not one of A_{g}")
        restricted.append(small)
    return tuple(restricted), gram


def reduce_tracker(tracker: AffineTracker) -> OrthogonalTracker:
    """The orthogonal tracker of prop:independent-head-reduction; with one head, of prop:affine-orthogonal-reduction.

    Example:
        >>> reduced = reduce_tracker(disguise(["Z3"], seed=1))
        >>> reduced.states, reduced.hidden
        ((12, 3, 3), 3)
    """
    for head in tracker.heads:
        if not all(A.is_contraction() for A in head.A):
            raise ValueError("reduce_tracker: a transition has norm above one; the reduction needs |A_g| <= 1")
    states, step, _ = explore(tracker)
    word, project = _idempotent(step, merging_word(step))
    left = np.unique(project)
    if tracker.group.mul(*reversed(word)) != tracker.group.identity:
        raise Refuted(f"the idempotent word {word} does not have value e")
    heads, kept = [], []
    for h, head in enumerate(tracker.heads):
        small = _reduce_head(head, [states[i][h] for i in left], states[project[0]][h], f"head {h}")
        if small is not None:
            heads.append(small)
            kept.append(h)
    reachable, hidden = _verify(tracker.group, heads)
    return OrthogonalTracker(
        tracker.group, tuple(heads), tuple(kept), tuple(word), (len(states), len(left), reachable), hidden
    )


def _reduce_head(head: AffineHead, survivors: list[Matrix], start: Matrix, where: str) -> OrthogonalHead | None:
    """Center the surviving states of one head and restrict to the span of their columns; None for dimension zero."""
    F = start.field
    total = reduce(lambda a, b: a + b, survivors)
    mean = total * (F(1) / F(len(survivors)))
    columns = [(S - mean).column(j) for S in survivors for j in range(S.shape[1])]
    basis = _column_basis(F, columns, start.shape[0])
    if basis.shape[1] == 0:
        return None
    A, gram = _restrict(head, basis, where)
    return OrthogonalHead(A, gram.inverse() @ basis.T @ (start - mean), basis, gram)


def _verify(G: FiniteGroup, heads: Sequence[OrthogonalHead]) -> tuple[int, int]:
    """The tracking law on the reduced states, and p: Gamma -> G a homomorphism; returns |states| and |Gamma|.

    All pairs of Gamma are multiplied where it has at most 60 elements, else sixty evenly spread rows and columns.
    """
    reached = AffineTracker(G, tuple(_homogeneous(head, head.start) for head in heads))
    states, _, _ = explore(reached)
    eyes = tuple(_homogeneous(head, head.A[0].field.eye(head.dimension)) for head in heads)
    gamma, _, p = explore(AffineTracker(G, eyes), limit=20000)
    place = {Q: i for i, Q in enumerate(gamma)}
    some = range(0, len(gamma), -(-len(gamma) // 60))
    for i in some:
        for j in some:
            k = place.get(tuple(a @ b for a, b in zip(gamma[i], gamma[j], strict=True)))
            if k is None or p[k] != G.table[p[i], p[j]]:
                raise Refuted(f"{G.name}: p is no homomorphism on Gamma at {i}, {j}")
    return len(states), len(gamma)


def _homogeneous(head: OrthogonalHead, start: Matrix) -> AffineHead:
    zero = head.A[0].field.zeros(*start.shape)
    return AffineHead(head.A, (zero,) * len(head.A), start)


# trackers to reduce


def disguise(names: Sequence[str], seed: int = 0) -> AffineTracker:
    """A tracker of the direct product of the named groups that hides its orthogonal core.

    Each head runs the paper's realisation, shifted off the origin (an additive term), beside a two-step register of
    past inputs (a nilpotent block), all turned by a random rational reflection.
    """
    rng = np.random.default_rng(seed)
    cores = [realise(name) for name in names]
    G = direct_product(*(core.group for core in cores)) if len(cores) > 1 else cores[0].group
    parts = [[label[h] for label in G.labels] if len(cores) > 1 else list(range(G.order)) for h in range(len(cores))]
    return AffineTracker(G, tuple(_hide(core, part, rng) for core, part in zip(cores, parts, strict=True)))


def _hide(core: Head, part: Sequence[int], rng: np.random.Generator) -> AffineHead:
    F, d = core.field, core.dimension
    n = d + 2
    turn = F.householder([int(x) for x in rng.integers(1, 5, n)])
    shift = F.matrix([[int(rng.integers(-3, 4)) for _ in range(d)] for _ in range(d)] + [[0] * d] * 2)
    A, B = [], []
    for g in part:
        small = core.transitions[g].matrix
        big = _block(F, small, [[0, 1], [0, 0]])
        junk = F.matrix([[0] * d] * (n - 1) + [[int(g == part[0])] * d])
        A.append(turn @ big @ turn)
        B.append(turn @ (shift - big @ shift + junk))
    start = F.matrix([*(row for row in F.eye(d).tolist()), [0] * d, [0] * d])
    return AffineHead(tuple(A), tuple(B), turn @ (start + shift))


def _block(F: Field, A: Matrix, corner: Sequence[Sequence[int]]) -> Matrix:
    d, e = A.shape[0], len(corner)
    return F.matrix([*([*row, *[0] * e] for row in A.tolist()), *([*[0] * d, *row] for row in corner)])


def written(name: str) -> AffineTracker:
    """A genuine CKDA head with writes, S <- H_k D S + beta k v^T: the encoder's head moved off the origin.

    All its gates are D_0 = Diag(-1, 1, 1, 1), which fixes c = (0, 1, 2, 3): (I - H_k D_0) c = 2 k (k^T c) is a write.
    """
    head = encoded(*finite_rotation_groups(0.2)[name])
    F = head.field
    c = F.matrix([[0] * 4, [1, 0, 2, 0], [2, 1, 0, 0], [3, 0, 0, 1]])
    A = tuple(t.matrix for t in head.transitions)
    B = []
    for t in head.transitions:
        norm = F(1) / (t.key.T @ t.key)[0, 0]
        B.append((t.key @ (t.key.T @ c)) * (F(2) * norm))
    return AffineTracker(head.group, (AffineHead(A, tuple(B), F.eye(4) + c),))


# claims


Reduce = Callable[[AffineTracker], OrthogonalTracker]


def check_reduction(tracker: AffineTracker, dimensions: Sequence[int], run: Reduce = reduce_tracker) -> int:
    """Reduce, and compare the dimensions that survive with those that were hidden; returns the updates checked."""
    reduced = run(tracker)
    found = [head.dimension for head in reduced.heads]
    if found != list(dimensions):
        raise Refuted(f"{tracker.group.name}: dimensions {found} survive, {list(dimensions)} were hidden")
    for head in reduced.heads:
        for g in range(tracker.group.order):
            Q = head.orthonormal(g)
            if np.abs(Q.T @ Q - np.eye(len(Q))).max() > 1e-9:
                raise Refuted(f"{tracker.group.name}: A_{g} is not orthogonal in the orthonormal basis")
    return reduced.states[0] * tracker.group.order


@claim("prop:affine-orthogonal-reduction", "A finite non-expansive affine tracker reduces to an orthogonal one")
def affine_reduction(effort: float = 1.0, run: Reduce = reduce_tracker) -> Evidence:
    """prop:affine-orthogonal-reduction on hidden realisations and on a CKDA head with writes."""
    names = ["Z3", "D3", "Z5", "D4", "A4"][: max(2, int(5 * min(effort, 1)))]
    cases = sum(check_reduction(disguise([n], seed), [realise(n).dimension], run) for seed, n in enumerate(names))
    cases += check_reduction(written("D2"), [4], run)
    return Evidence(cases, "exact", note=f"{', '.join(names)} hidden beside registers and shifts; D2 with CKDA writes")


@claim("prop:independent-head-reduction", "The reduction keeps heads apart, and Gamma maps onto G")
def independent_reduction(effort: float = 1.0, run: Reduce = reduce_tracker) -> Evidence:
    """prop:independent-head-reduction on direct products, one head per factor."""
    products = [["Z2", "Z3"], ["D3", "Z2"], ["D3", "Z4"], ["Z2", "Z3", "Z2"]][: max(1, int(4 * min(effort, 1)))]
    cases = sum(check_reduction(disguise(p, seed), [2] * len(p), run) for seed, p in enumerate(products))
    return Evidence(cases, "exact", note=", ".join("x".join(p) for p in products))
