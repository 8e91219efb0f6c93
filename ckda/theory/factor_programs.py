"""Factor programs of prop:automata-factor-counts: a matrix as a list of transitions that one layer applies one by one.

A :class:`Factor` is ``(I - u (gamma * u)^T) Diag(alpha)`` with a rational, not normalised key u, so that products stay
in Q. At the unit key k = u/|u| its learning rate is beta = gamma |u|^2, rational although k need not be. `gamma` is one
number for CKDA, DeltaNet and GDN and one per channel for RWKV-7 and GDN-2. Every program is listed in the order of
execution: the first factor meets the column state first.

Example:
    >>> program = deterministic_program((1, 1, 0))
    >>> len(program), product(program, 3) == map_matrix((1, 1, 0))
    (4, True)
    >>> max(factor.beta for factor in program)
    3
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from functools import lru_cache
from typing import Any, NamedTuple

import flint

from ckda.theory.exact import Field
from ckda.theory.machines import map_matrix

__all__ = [
    "CKDA",
    "CKDA_AUTOMATA",
    "CKDA_WEIGHTED",
    "DELTANET",
    "DELTANET_WEIGHTED",
    "IDENTITY",
    "RWKV7",
    "RWKV7_WEIGHTED",
    "Factor",
    "Range",
    "Scaled",
    "cycles_and_trees",
    "deltanet_merge",
    "deterministic_program",
    "dyadic_merge",
    "fibre_program",
    "householder",
    "map_matrix",
    "merge",
    "merge_all",
    "permutation_program",
    "product",
    "rational_program",
    "rational_program_deltanet",
    "rational_program_rwkv7",
    "rwkv7_copy",
    "scaled_program",
    "swap",
    "unit_addition",
]

Rational = Any  #: int or flint.fmpq
Sparse = Mapping[int, Rational]  #: coordinate -> entry; what is absent is zero (for a gate: one)


@dataclass(frozen=True)
class Factor:
    """``(I - u (gamma * u)^T) Diag(alpha)``, sparse: absent entries of `key` are 0, of `gate` (alpha) are 1."""

    key: Sparse
    gamma: Sparse  #: on the support of the key
    gate: Sparse = default(default_factory=dict)

    @property
    def norm2(self) -> Rational:
        """|u|^2."""
        return sum(x * x for x in self.key.values())

    @property
    def erase(self) -> Sparse:
        """The erase gate of every channel at the unit key."""
        return {i: g * self.norm2 for i, g in self.gamma.items()}

    @property
    def beta(self) -> Rational:
        """The learning rate at the unit key, where the channels share one."""
        rates = set(self.erase.values())
        if len(rates) != 1:
            raise ValueError(f"the channels have different erase gates: {dict(self.erase)}")
        return rates.pop()

    def matrix(self, n: int) -> flint.fmpq_mat:
        """The dense n x n matrix."""
        entries = [[flint.fmpq(int(i == j)) for j in range(n)] for i in range(n)]
        for i, x in self.key.items():
            for j, y in self.key.items():
                entries[i][j] -= x * self.gamma[j] * y
        flat = [x * self.gate.get(j, 1) for row in entries for j, x in enumerate(row)]
        return flint.fmpq_mat(n, n, flat)

    def pull(self, row: Sparse) -> Sparse:
        """row^T times this matrix, sparse.

        Example:
            >>> swap(0, 1).pull({0: 5, 2: 7})
            {2: 7, 1: 5}
        """
        along = sum(x * self.key[i] for i, x in row.items() if i in self.key)
        result = dict(row)
        if along:
            for j, y in self.key.items():
                result[j] = result.get(j, 0) - along * self.gamma[j] * y
        for j, a in self.gate.items():
            if j in result:
                result[j] *= a
        return {j: x for j, x in result.items() if x}


def householder(gamma: Rational, key: Sparse, gate: Sparse | None = None) -> Factor:
    """``H_gamma(u) Diag(alpha)``, the CKDA factor: the gate first, the generalized Householder second.

    Example:
        >>> householder(flint.fmpq(1, 6), {0: 3, 1: 1}).beta
        5/3
    """
    return Factor(key, dict.fromkeys(key, gamma), gate or {})


#: the padding factor: learning rate zero
IDENTITY = householder(0, {0: 1})


def product(program: Iterable[Factor], n: int) -> flint.fmpq_mat:
    """The matrix of the whole program, F_m ... F_1."""
    result = map_matrix(range(n))
    for factor in program:
        result = factor.matrix(n) * result
    return result


@dataclass(frozen=True)
class Range:
    """What a family of transitions allows: learning rate, gate, and whether channels may differ in either."""

    name: str
    beta: tuple[Rational, Rational | None]  #: at the unit key; None: unbounded
    alpha: tuple[Rational, Rational] = (1, 1)
    channel_erase: bool = False

    def violation(self, factor: Factor) -> str | None:
        """Why the factor is not of the family, or None where it is.

        Example:
            >>> CKDA.violation(householder(3, {0: 1}))
            'CKDA: a learning rate of 3 is outside [0, 2]'
        """
        low, high = self.beta
        if not factor.norm2:
            return f"{self.name}: the key is zero"
        for rate in factor.erase.values():
            if (low is not None and rate < low) or (high is not None and rate > high):
                return f"{self.name}: a learning rate of {rate} is outside [{low}, {high}]"
        if not self.channel_erase and len(set(factor.erase.values())) > 1:
            return f"{self.name}: the channels have different erase gates"
        for a in factor.gate.values():
            if not self.alpha[0] <= a <= self.alpha[1]:
                return f"{self.name}: a gate of {a} is outside [{self.alpha[0]}, {self.alpha[1]}]"
        return None


CKDA = Range("CKDA", (0, 2), (-1, 1))
CKDA_AUTOMATA = Range("CKDA with beta up to 3", (0, 3), (-1, 1))
CKDA_WEIGHTED = Range("CKDA with beta >= 0", (0, None), (-1, 1))
DELTANET = Range("DeltaNet/GDN", (0, 4))
DELTANET_WEIGHTED = Range("DeltaNet/GDN with beta in R", (None, None))
#: decay one, where diag(w) - k (a * k)^T of RWKV-7 and (I - k (a * k)^T) diag(w) of GDN-2 are the same matrix
RWKV7 = Range("RWKV-7/GDN-2", (0, 2), channel_erase=True)
RWKV7_WEIGHTED = Range("RWKV-7/GDN-2, erase >= 0", (0, None), channel_erase=True)


# permutations and deterministic transitions


def swap(i: int, j: int) -> Factor:
    """The transposition of two coordinates, H_1(e_i - e_j): one reflection, beta = 2.

    Example:
        >>> swap(0, 1).matrix(2).tolist(), swap(0, 1).beta
        ([[0, 1], [1, 0]], 2)
    """
    return householder(1, {i: 1, j: -1})


def merge(s: int, d: int, p: int = 3, q: int = 1) -> list[Factor]:
    """The column-copy primitive M_{d -> s} in two CKDA factors: (x_s, x_d) becomes (x_s + x_d, 0).

    The key p e_s + q e_d with p > q > 0 needs the learning rates (p^2 + q^2) / (p (p - q)) and p / q. The paper has
    p, q = 3, 1, rates 5/3 and 3. With p, q = 2, 1 they are 5/2 and 2, and every number is a dyadic fraction.

    Example:
        >>> product(merge(0, 1), 2).tolist(), [factor.beta for factor in merge(0, 1)]
        ([[1, 1], [0, 0]], [5/3, 3])
        >>> product(merge(0, 1, 2), 2).tolist(), [factor.beta for factor in merge(0, 1, 2)]
        ([[1, 1], [0, 0]], [5/2, 2])
    """
    return merge_all(s, [d], p, q)


def merge_all(s: int, others: Sequence[int], p: int = 3, q: int = 1) -> list[Factor]:
    """:func:`merge` of several coordinates into s at once, still two factors.

    The learning rates are (p^2 + |others| q^2) / (p (p - q)) and p / q: with p, q = 3, 1 at most 3 up to nine others.

    Example:
        >>> product(merge_all(0, [1, 2]), 3).tolist(), [factor.beta for factor in merge_all(0, [1, 2])]
        ([[1, 1, 1], [0, 0, 0], [0, 0, 0]], [11/6, 3])
    """
    spread = householder(flint.fmpq(1, p * (p - q)), {s: p, **dict.fromkeys(others, q)})
    return [spread, householder(flint.fmpq(p, q), {s: 1}, dict.fromkeys(others, 0))]


def dyadic_merge(s: int, d: int) -> list[Factor]:
    """:func:`merge` with p, q = 2, 1: learning rates up to 5/2 only, and exact in any binary floating point format."""
    return merge(s, d, 2, 1)


def deltanet_merge(s: int, d: int) -> list[Factor]:
    """The column-copy primitive in three DeltaNet factors: the clear of x_d is a factor of its own.

    Example:
        >>> product(deltanet_merge(0, 1), 2).tolist()
        [[1, 1], [0, 0]]
    """
    spread, scale = merge(s, d)
    return [spread, householder(1, {d: 1}), householder(3, scale.key)]


def rwkv7_copy(s: int, d: int) -> list[Factor]:
    """The column-copy primitive in one RWKV-7/GDN-2 factor: key (e_s - e_d)/sqrt 2, erase gate 2 e_d.

    This is the GDN-2 primitive of app:table-comparison.

    Example:
        >>> [factor] = rwkv7_copy(0, 1)
        >>> factor.matrix(2).tolist(), factor.erase
        ([[1, 1], [0, 0]], {0: 0, 1: 2})
    """
    return [Factor({s: 1, d: -1}, {s: 0, d: 1})]


def permutation_program(images: Sequence[int]) -> list[Factor]:
    """A permutation as swaps, one fewer than the length of every cycle: at most n - 1 factors.

    Example:
        >>> program = permutation_program((1, 2, 0, 3))
        >>> len(program), product(program, 4) == map_matrix((1, 2, 0, 3))
        (2, True)
    """
    cycles, _ = cycles_and_trees(images)
    return [swap(c[i], c[i + 1]) for c in cycles for i in reversed(range(len(c) - 1))]


def deterministic_program(images: Sequence[int], copy: Callable[[int, int], list[Factor]] = merge) -> list[Factor]:
    """A map of states: swaps along the cycles, then one column copy per state outside them, nearest to its cycle first.

    With k states on c cycles that is 2 (n - k) + (k - c) CKDA factors, at most 2n - 2. `copy` is the primitive:
    :func:`merge` (CKDA), :func:`deltanet_merge` or :func:`rwkv7_copy`.

    Example:
        >>> len(deterministic_program((0, 0, 0))), len(deterministic_program((0, 0, 0), rwkv7_copy))
        (4, 2)
    """
    cycles, trees = cycles_and_trees(images)
    on_cycles = permutation_program([images[i] if any(i in c for c in cycles) else i for i in range(len(images))])
    return on_cycles + [factor for i in trees for factor in copy(images[i], i)]


def fibre_program(images: Sequence[int]) -> list[Factor]:
    """A map of states, fibre by fibre: shorter than :func:`deterministic_program` in the worst case.

    Two factors merge a fibre of up to ten states into one representative (nine more states each two factors more, so
    that the learning rates stay within [0, 3]), then swaps carry the representatives to their images. With r fibres of
    two states or more that is at most n + r <= 3n/2 factors, where the paper counts 2n - 2: a fibre of k + 1 states
    takes 2 ceil(k / 9) <= k + 1 factors and leaves k states that need no swap.

    Example:
        >>> chain = (0, 0, 1, 2, 3, 4)
        >>> len(fibre_program(chain)), len(deterministic_program(chain))
        (6, 10)
        >>> product(fibre_program(chain), 6) == map_matrix(chain)
        True
        >>> max(factor.beta for factor in fibre_program((0,) * 30))
        3
    """
    fibres, representative = _fibres(images)
    merges = list[Factor]()
    for j, i in representative.items():
        others = [x for x in fibres[j] if x != i]
        for start in range(0, len(others), 9):
            merges += merge_all(i, others[start : start + 9])
    return merges + permutation_program(_completed({i: j for j, i in representative.items()}, len(images)))


def _fibres(images: Sequence[int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """image -> the states that map to it, and image -> one of them, itself where it can be."""
    fibres = {j: [i for i in range(len(images)) if images[i] == j] for j in sorted(set(images))}
    return fibres, {j: j if j in fibre else fibre[0] for j, fibre in fibres.items()}


def cycles_and_trees(images: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """The cycles of i -> images[i], each in order, and the states off them by rising distance from their cycle.

    Example:
        >>> cycles_and_trees((1, 0, 1, 2))
        ([[0, 1]], [2, 3])
    """
    n = len(images)
    recurrent = set(range(n))
    for _ in range(n):
        recurrent = {images[i] for i in recurrent}
    cycles, seen = [], set[int]()
    for i in sorted(recurrent):
        cycle = []
        while i not in seen:
            seen.add(i)
            cycle.append(i)
            i = images[i]
        if cycle:
            cycles.append(cycle)
    return cycles, sorted(set(range(n)) - recurrent, key=lambda i: _distance(images, i, recurrent))


def _distance(images: Sequence[int], i: int, goal: set[int]) -> int:
    steps = 0
    while i not in goal:
        i, steps = images[i], steps + 1
    return steps


# deterministic transitions up to a positive scale: the learning rate stays within [0, 2]


class Scaled(NamedTuple):
    """rho M as a program of CKDA transitions over a real field; keys are not normalised, beta is at the unit key."""

    rho: Any
    program: list[tuple[list[Any], list[Any], Any]]  #: (alpha, key, beta)


def scaled_program(F: Field, images: Sequence[int], diagonal_factors: bool = False) -> Scaled:
    """rho M for a map M of the states, by its singular value decomposition, which is explicit.

    M M^T is diagonal with the sizes of the fibres f^{-1}(j). One reflection per fibre of two states or more turns its
    indicator onto one representative, a diagonal scales the representatives and clears the rest, and swaps carry the
    representatives to their images: at most n factors, where the paper counts max(1, 2n - 2).
    With `diagonal_factors` the diagonal is not a gate but one generalized Householder per entry (DeltaNet/GDN).

    Args:
        F: a field that holds the square roots of the sizes of the fibres.

    Example:
        >>> import sympy
        >>> from ckda.theory.exact import field
        >>> F = field(sympy.sqrt(2))
        >>> rho, program = scaled_program(F, (1, 1))
        >>> A = F.eye(2)
        >>> for alpha, key, beta in program:
        ...     A = F.ckda(alpha, key, beta) @ A
        >>> A == F.matrix(map_matrix((1, 1)).tolist()) * rho, [beta for _, _, beta in program]
        (True, [2, 0])
    """
    n, one = len(images), F(1)
    fibres, representative = _fibres(images)
    program = [_fibre_reflection(F, n, fibres[j], i) for j, i in representative.items() if len(fibres[j]) > 1]
    rho = one / _root(F, max(map(len, fibres.values())))
    scale = [F(0)] * n
    for j, i in representative.items():
        scale[i] = _root(F, len(fibres[j])) * rho
    if diagonal_factors:
        program += [([one] * n, _dense({i: 1}, n), one - x) for i, x in enumerate(scale) if x != one]
        scale = [one] * n
    swaps = permutation_program(_completed({i: j for j, i in representative.items()}, n))
    if not swaps and scale != [one] * n:
        program.append((scale, _dense({0: 1}, n), 0))
    program += [([one] * n if i else scale, _dense(factor.key, n), 2) for i, factor in enumerate(swaps)]
    return Scaled(rho, program)


@lru_cache(maxsize=256)
def _root(F: Field, size: int) -> Any:
    return F.root(size)


def _fibre_reflection(F: Field, n: int, fibre: list[int], target: int) -> tuple[list[Any], list[Any], Any]:
    """The reflection that exchanges the unit indicator of a fibre with e_target."""
    root = _root(F, len(fibre))
    return [F(1)] * n, [root * int(i == target) - int(i in fibre) for i in range(n)], 2


def _dense(entries: Sparse, n: int) -> list[Rational]:
    return [entries.get(i, 0) for i in range(n)]


def _completed(partial: Mapping[int, int], n: int) -> list[int]:
    """The permutation that extends an injective partial map by closing each of its paths to a cycle.

    Example:
        >>> _completed({0: 1, 3: 3}, 4)
        [1, 0, 2, 3]
    """
    back = {j: i for i, j in partial.items()}
    images = dict(partial)
    for end in range(n):
        if end not in partial:
            start = end
            while start in back:
                start = back[start]
            images[end] = start
    return [images[i] for i in range(n)]


# rational matrices, with n scratch coordinates and one temporary


def unit_addition(s: int, d: int, gate: Sparse | None = None) -> list[Factor]:
    """``I + e_d e_s^T`` (x_d grows by x_s) in three factors, learning rates 4, 1/2 and 5/3; `gate` acts before them.

    Example:
        >>> product(unit_addition(0, 1), 2).tolist()
        [[1, 0], [1, 1]]
    """
    half, third = flint.fmpq(1, 2), flint.fmpq(1, 3)
    return [householder(2, {s: 1, d: 1}, gate), householder(half, {s: 1}), householder(third, {s: 1, d: 2})]


def ckda_scale(j: int, a: Rational) -> Factor:
    """x_j times a, with a learning rate >= 0: a sign in the gate where a > 0.

    Example:
        >>> [str(ckda_scale(0, a).matrix(1)[0, 0]) for a in (flint.fmpq(5, 2), -3, 0)]
        ['5/2', '-3', '0']
    """
    return householder(1 + abs(a), {j: 1}, {j: -1} if a > 0 else None)


def rational_program(M: flint.fmpq_mat) -> list[Factor]:
    """Any rational n x n matrix as 7 n^2 + 3 n CKDA factors in dimension 2n + 1: (x, s, t) becomes (Mx, Mx, 0).

    Clears cost nothing: they ride on the gate of the next factor.

    Example:
        >>> M = flint.fmpq_mat(1, 1, [flint.fmpq(-2, 3)])
        >>> len(rational_program(M)), product(rational_program(M), 3).tolist()
        (10, [[-2/3, 0, 0], [-2/3, 0, 0], [0, 0, 0]])
    """
    n = M.nrows()
    t, program = 2 * n, list[Factor]()
    clear: dict[int, Rational] = dict.fromkeys(range(n, 2 * n + 1), 0)
    for i in range(n):
        for j in range(n):
            program += [*unit_addition(j, t, clear), ckda_scale(t, M[i, j]), *unit_addition(t, n + i)]
            clear = {t: 0}
    clear = {t: 0, **dict.fromkeys(range(n), 0)}
    for i in range(n):
        program += unit_addition(n + i, i, clear)
        clear = {}
    return program


def rational_program_deltanet(M: flint.fmpq_mat) -> list[Factor]:
    """The cited DeltaNet program, 8 n^2 + 5 n + 1 factors with learning rates of either sign: every clear is a factor.

    Example:
        >>> M = flint.fmpq_mat(1, 1, [flint.fmpq(5)])
        >>> program = rational_program_deltanet(M)
        >>> len(program), min(factor.beta for factor in program)
        (14, -4)
    """
    n = M.nrows()
    t = 2 * n

    def clear(j: int) -> Factor:
        return householder(1, {j: 1})

    program = [clear(j) for j in range(n, 2 * n + 1)]
    for i in range(n):
        for j in range(n):
            scale = householder(1 - M[i, j], {t: 1})
            program += [*unit_addition(j, t), scale, *unit_addition(t, n + i), clear(t)]
    program += [clear(j) for j in range(n)]
    return program + [factor for i in range(n) for factor in unit_addition(n + i, i)]


def rational_program_rwkv7(M: flint.fmpq_mat) -> list[Factor]:
    """2n RWKV-7 factors in dimension 2n with decay one: their product is [[M, M], [0, 0]], so (x, 0) becomes (Mx, 0).

    In rows, from the left: n factors write (x M)_i over scratch i, n more copy scratch over x. A column meets them in
    the reverse order. Key (M e_i, -e_i) and erase gate e_i: the gate at the unit key is 1 + |M e_i|^2, never negative.

    Example:
        >>> M = flint.fmpq_mat(1, 1, [5])
        >>> product(rational_program_rwkv7(M), 2).tolist()
        [[5, 5], [0, 0]]
    """
    n = M.nrows()
    rows = list[Factor]()
    for i in range(n):
        key = {j: M[j, i] for j in range(n) if M[j, i]} | {n + i: -1}
        rows.append(Factor(key, {j: int(j == n + i) for j in key}))
    rows += [Factor({n + i: 1, i: -1}, {n + i: 0, i: 1}) for i in range(n)]
    return rows[::-1]
