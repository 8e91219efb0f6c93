"""Which finite groups one CKDA head realises or tracks, built in exact arithmetic and checked on every state.

At ``|alpha| = 1`` and ``beta = 2`` a CKDA transition is a signed Householder matrix ``H_k Diag(sign)``; the paper calls
the set of them SH_d. A :class:`Head` names one such transition for every element of a group, and :func:`reach`
enumerates the states it can be in (from ``S_0 = I``, exactly) and checks the tracking law
``p(A_h S) = h p(S)`` (def:sh-tracking) on every state and input.

Example:
    >>> head = realise("S4")
    >>> head.dimension, reach(head).size, is_realisation(head)
    (3, 24, True)
    >>> tracker = realise("A5")
    >>> tracker.dimension, reach(tracker).size, is_realisation(tracker)
    (4, 7200, False)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import lcm
from typing import Any

import numpy as np
import sympy

from ckda.groups import (
    FiniteGroup,
    alternating,
    cycle_notation,
    cyclic,
    dihedral,
    from_elements,
    group,
    hamilton,
    isomorphism,
    symmetric,
)
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.exact import Field, Matrix, field, householder_key, real_cyclotomic

__all__ = [
    "Head",
    "Reached",
    "SignedHouseholder",
    "auxiliary_decoder",
    "axis",
    "cube_rotations",
    "decoder",
    "encoder",
    "find_query",
    "icosahedral_rotations",
    "is_realisation",
    "nonnegative_form",
    "passes_axis_test",
    "reach",
    "realise",
    "signed_householder_forms",
    "with_sign_coordinates",
]


# transitions


@dataclass(frozen=True)
class SignedHouseholder:
    """An orthogonal CKDA transition H_k Diag(signs): beta = 2, |alpha| = 1, the unit key key / |key|."""

    signs: tuple[int, ...]
    key: Matrix  #: [d, 1] direction of the key, not normalised, so that no square root is needed
    lengths: tuple[Any, ...] = ()  #: numbers n_j > 0 of the field: the key is key_j / sqrt(n_j); none: all are one

    @cached_property
    def matrix(self) -> Matrix:
        """[d, d], exact; with `lengths` in the coordinates sqrt(n_j) x_j, where no square root is left."""
        F = self.key.field
        if not self.lengths:
            return F.ckda(self.signs, self.key)
        dual = F.vector([x / n for (x,), n in zip(self.key.tolist(), self.lengths, strict=True)])
        norm2 = (dual.T @ self.key)[0, 0]
        return (F.eye(len(self.signs)) - (self.key @ dual.T) * (F(2) / norm2)) @ F.diag(self.signs)

    def unit_key(self) -> np.ndarray:
        """[d] float64."""
        direction = self.key.float()[:, 0] / np.sqrt(self.float_lengths())
        return direction / np.linalg.norm(direction)

    def float_lengths(self) -> np.ndarray:
        """[d] float64 the numbers n_j."""
        F = self.key.field
        return np.array([F.float(n) for n in self.lengths] or [1.0] * len(self.signs))


def signed_householder_forms(A: Matrix) -> list[SignedHouseholder]:
    """Every way to write A as H_k D, over all 2^d sign diagonals: empty where A is no orthogonal CKDA transition.

    Example:
        >>> F = field()
        >>> [form.signs for form in signed_householder_forms(F.matrix([[0, -1], [1, 0]]))]  # a quarter turn
        [(1, -1), (-1, 1)]
        >>> signed_householder_forms(F.matrix([[0, 0, 1], [1, 0, 0], [0, 1, 0]]))  # a turn about (1, 1, 1)
        []
    """
    forms = []
    for signs in product((1, -1), repeat=A.shape[0]):
        reflection = A @ A.field.diag(signs)
        key = householder_key(reflection)
        if key is not None and reflection.is_orthogonal():
            forms.append(SignedHouseholder(signs, key))
    return forms


def axis(R: Matrix) -> Matrix | None:
    """The axis of a rotation of R^3 whose angle is neither 0 nor pi; None for those two.

    Example:
        >>> axis(field().permutation([1, 2, 0])).tolist()
        [[1], [1], [1]]
    """
    skew = R.field.vector([R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]])
    return None if skew.is_zero() else skew


def passes_axis_test(R: Matrix) -> bool:
    """prop:axis-test, prop:axis-test-app: the identity, a half-turn, or a rotation whose axis has a zero coordinate.

    Example:
        >>> passes_axis_test(field().permutation([1, 2, 0]))
        False
    """
    a = axis(R)
    return a is None or not all(a[i, 0] for i in range(3))


# heads and their reachable states


@dataclass(frozen=True, eq=False)
class Head:
    """One CKDA head that is meant to track `group`: a transition for every element, S_0 = I, no additive term."""

    group: FiniteGroup
    transitions: tuple[SignedHouseholder, ...]  #: by element number
    label: str  #: where in the paper it comes from

    @property
    def dimension(self) -> int:
        return len(self.transitions[0].signs)

    @property
    def field(self) -> Field:
        return self.transitions[0].key.field


@dataclass(frozen=True, eq=False)
class Reached:
    """The reachable states of a head and its decoder, numbered from the initial state 0.

    A column of the state moves by the transition alone, so a state is kept as the numbers of its columns in the finite
    orbit of the basis vectors; no rounding, and one step is a table lookup.
    """

    vectors: list[Matrix]  #: the orbit of the basis vectors
    columns: np.ndarray  #: [states, d] numbers of the columns
    decode: np.ndarray  #: [states] element of the group
    step: np.ndarray  #: [states, G] next state

    @property
    def size(self) -> int:
        return len(self.columns)

    def state(self, i: int) -> Matrix:
        """[d, d] state number i."""
        first, *rest = (self.vectors[v] for v in self.columns[i])
        return first.stack(*rest)


@lru_cache(maxsize=32)
def reach(head: Head, limit: int = 20000) -> Reached:
    """Enumerate the reachable set of a head and check the tracking law on every state and input (def:sh-tracking).

    The decoder is not assumed: a state is labelled by the product of the first word that reaches it, and each of the
    |R| |G| updates must then agree. Raises Refuted with the state and input where two words disagree, and where more
    than `limit` states (or vectors) appear.

    Example:
        >>> reach(realise("D4")).decode.tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    vectors, moves = orbit([t.matrix for t in head.transitions], limit)
    table = head.group.table
    place = {tuple(range(head.dimension)): 0}
    columns, decode = [tuple(range(head.dimension))], [head.group.identity]
    step: list[list[int]] = []
    while len(step) < len(columns):
        here = len(step)
        images = list(map(tuple, moves[:, columns[here]].tolist()))
        wanted = table[:, decode[here]]
        for image, value in zip(images, wanted, strict=True):
            if image not in place:
                place[image] = len(columns)
                columns.append(image)
                decode.append(int(value))
        if len(columns) > limit:
            raise Refuted(f"{head.group.name}: more than {limit} reachable states")
        step.append([place[image] for image in images])
    found = Reached(vectors, np.array(columns), np.array(decode), np.array(step))
    _check_tracking_law(head, found)
    return found


def orbit(matrices: Sequence[Matrix], limit: int) -> tuple[list[Matrix], np.ndarray]:
    """The orbit of the basis vectors, these first, and [letters, vectors] the numbers of the images."""
    F, d = matrices[0].field, matrices[0].shape[0]
    vectors = [F.eye(d).column(j) for j in range(d)]
    place = {v: i for i, v in enumerate(vectors)}
    moves: list[list[int]] = []
    while len(moves) < len(vectors):
        images = [A @ vectors[len(moves)] for A in matrices]
        for v in images:
            if v not in place:
                place[v] = len(vectors)
                vectors.append(v)
        if len(vectors) > limit:
            raise Refuted(f"the columns of the state visit more than {limit} vectors")
        moves.append([place[v] for v in images])
    return vectors, np.array(moves).T


def _check_tracking_law(head: Head, found: Reached) -> None:
    table = head.group.table
    wrong = np.argwhere(found.decode[found.step] != table[:, found.decode].T)
    if len(wrong):
        s, h = wrong[0]
        raise Refuted(
            f"{head.group.name}: state {s} decodes to {found.decode[s]}, after input {h} the state decodes to "
            f"{found.decode[found.step[s, h]]} and not to {table[h, found.decode[s]]}"
        )


def is_realisation(head: Head) -> bool:
    """Whether h -> A_h is a faithful representation (def:sh-realization): all products, all distinct.

    Example:
        >>> is_realisation(realise("Z5"))
        True
    """
    matrices = [t.matrix for t in head.transitions]
    table = head.group.table
    distinct = len(set(matrices)) == len(matrices)
    return distinct and all(
        a @ b == matrices[table[i, j]] for i, a in enumerate(matrices) for j, b in enumerate(matrices)
    )


def find_query(found: Reached, candidates: Iterable[Sequence[int]] | None = None) -> tuple[list[int], np.ndarray]:
    """A whole-number query q for which S -> S^T q is injective on the reachable states (lem:finite-query-readout).

    Returns:
        q [d], and the outputs [states, d] in float64; they are told apart exactly, not by their floats.

    Example:
        >>> query, outputs = find_query(reach(realise("S4")))
        >>> query, len(outputs)
        ([1, 1, 1], 24)
    """
    d = found.columns.shape[1]
    for query in candidates or sorted(product((1, 3, 4, 7), repeat=d), key=sum):
        row = found.vectors[0].field.matrix([list(query)])
        values = [(row @ v).key for v in found.vectors]
        ids = {value: i for i, value in enumerate(dict.fromkeys(values))}
        outputs = np.array([ids[value] for value in values])[found.columns]
        if len(np.unique(outputs, axis=0)) == found.size:
            floats = np.array([(row @ v).float()[0, 0] for v in found.vectors])
            return list(query), floats[found.columns]
    raise Refuted(f"no query tried tells the {found.size} states apart")


# the plane


def planar_field(n: int) -> Field:
    """The field of cos(2 pi / n) and sin(2 pi / n)."""
    return real_cyclotomic(lcm(4, n))


def planar_rotation(F: Field, j: int, n: int) -> Matrix:
    """The rotation by 2 pi j / n over `planar_field(n)`."""
    N = lcm(4, n)
    c, s = F.cos(j * N // n, N), F.cos(j * N // n - N // 4, N)
    return F.matrix([[c, -s], [s, c]])


def _planar_matrices(n: int, reflections: bool) -> list[Matrix]:
    F = planar_field(n)
    turn = planar_rotation(F, 1, n)
    turns = [turn**j for j in range(n)]
    return turns + ([turn @ F.diag([1, -1]) for turn in turns] if reflections else [])


# the cube and the icosahedron


@lru_cache(maxsize=8)
def cube_rotations(turned: bool = True) -> dict[tuple[int, ...], Matrix]:
    """The 24 rotations of the cube by the permutation of its four diagonals, turned by 45 degrees as in prop:cube.

    Example:
        >>> rotations = cube_rotations()
        >>> sum(passes_axis_test(R) for R in rotations.values())
        24
        >>> sum(passes_axis_test(R) for R in cube_rotations(turned=False).values())
        16
    """
    F = field(sympy.sqrt(2))
    h = F.root(2) / 2
    turn = F.matrix([[h, h, 0], [-h, h, 0], [0, 0, 1]]) if turned else F.eye(3)
    diagonals = [F.vector(v) for v in ((1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1))]
    found = {}
    for images in permutations(range(3)):
        for signs in product((1, -1), repeat=3):
            R = F.diag(signs) @ F.permutation(images)
            if R.det() == F(1):
                moved = [R @ v for v in diagonals]
                where = tuple(next(i for i, w in enumerate(diagonals) if v in (w, -w)) for v in moved)
                found[where] = turn @ R @ turn.T
    return found


def rotation_of(a: Sequence[Any]) -> list[list]:
    """The rotation x -> a x a^-1 of the quaternion a (w, x, y, z), times |a|^2: entries are polynomials in a.

    Example:
        >>> rotation_of((1, 1, 0, 0))
        [[2, 0, 0], [0, 0, -2], [0, 2, 0]]
    """
    conjugate = [a[0], *(-x for x in a[1:])]
    units = [[int(i == j) for i in range(4)] for j in (1, 2, 3)]
    images = [hamilton(hamilton(a, unit), conjugate)[1:] for unit in units]
    return [list(row) for row in zip(*images, strict=True)]


def rotation_matrix(F: Field, a: Sequence[Any]) -> Matrix:
    """The rotation of the quaternion a, of any nonzero norm, over F."""
    a = [F(x) for x in a]
    return F.matrix(rotation_of(a)) * (F(1) / sum((x * x for x in a), F(0)))


@lru_cache(maxsize=1)
def icosahedral_rotations() -> dict[tuple[int, ...], Matrix]:
    """The 60 rotations of the icosahedron with vertices (0, +-1, +-phi) and so on, by an even permutation of 1 ... 5.

    Example:
        >>> R = icosahedral_rotations()
        >>> a, b = (1, 2, 0, 3, 4), (0, 1, 3, 4, 2)  # (123) and (345)
        >>> R[a] @ R[b] == R[tuple(a[i] for i in b)]
        True
    """
    F = field(sympy.sqrt(5))
    phi = (F.root(5) + 1) / 2
    five, three = rotation_matrix(F, [phi, 0, phi - 1, 1]), rotation_matrix(F, [1, 1, 1, 1])
    rotations, frontier = {F.eye(3)}, [F.eye(3)]
    while frontier:
        new = {A @ R for A in (five, three) for R in frontier} - rotations
        rotations |= new
        frontier = list(new)
    ordered: list[Any] = sorted(rotations, key=lambda R: R.key)
    found = from_elements("icosahedron", ordered, lambda A, B: A @ B)
    images = isomorphism(found, alternating(5))
    if images is None:
        raise Refuted(f"the rotations generated are {found}, not A5")
    return {alternating(5).labels[image]: found.labels[i] for i, image in enumerate(images)}


# four dimensions


def encoder(R: Matrix) -> SignedHouseholder:
    """g of prop:so3-four-dimensional-encoding (eq:so3-encoding): (I - 2 a a^T) Diag(-1, 1, 1, 1), a = (cos t/2, sin t/2 u).

    4 a a^T is affine in the entries of R, so the encoder needs no angle, no axis and no square root.

    Example:
        >>> encoder(field().permutation([1, 2, 0])).key.tolist()
        [[1/4], [1/4], [1/4], [1/4]]
    """
    t = R.trace()
    w = [R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]]
    block = [[R[i, j] + R[j, i] + ((1 - t) if i == j else 0) for j in range(3)] for i in range(3)]
    outer = R.field.matrix([[1 + t, *w], *([w[i], *block[i]] for i in range(3))]) * R.field("1/4")
    key = next(outer.column(j) for j in range(4) if not outer.column(j).is_zero())
    return SignedHouseholder((-1, 1, 1, 1), key)


def _blocks(S: Sequence[Sequence]) -> tuple:
    return S[0][0], list(S[0][1:]), [row[0] for row in S[1:]], [list(row[1:]) for row in S[1:]]


def _decode(S: Sequence[Sequence], direction: int) -> list[list]:
    """alpha C - s r^T - direction * C [r]_x on nested lists over any commutative ring."""
    a, r, s, C = _blocks(S)
    cross = [[0, -r[2], r[1]], [r[2], 0, -r[0]], [-r[1], r[0], 0]]
    turn = [[sum(C[i][k] * cross[k][j] for k in range(3)) for j in range(3)] for i in range(3)]
    return [[a * C[i][j] - s[i] * r[j] - direction * turn[i][j] for j in range(3)] for i in range(3)]


def decoder(S: Matrix) -> Matrix:
    """f of prop:so3-four-dimensional-encoding (eq:so3-explicit-decoder): SO(4) -> SO(3), with f(g(A) S) = A f(S).

    Example:
        >>> R = field().permutation([1, 2, 0])
        >>> decoder(encoder(R).matrix) == R
        True
    """
    return S.field.matrix(_decode(S.tolist(), 1))


def auxiliary_decoder(S: Matrix) -> Matrix:
    """f_- (eq:so3-auxiliary-decoder), with f_-(g(A) S) = A^-1 f_-(S); f and f_- together give S up to sign.

    Example:
        >>> R = field().permutation([1, 2, 0])
        >>> auxiliary_decoder(encoder(R).matrix) == R.T
        True
    """
    return S.field.matrix(_decode(S.tolist(), -1))


# heads by name


def _head(G: FiniteGroup, matrices: Sequence[Matrix], label: str) -> Head:
    """The head with these transition matrices, written as signed Householder matrices."""
    forms = [signed_householder_forms(A) for A in matrices]
    bad = next((i for i, form in enumerate(forms) if not form), None)
    if bad is not None:
        raise Refuted(f"{G.name}: the matrix of element {G.labels[bad]} is no CKDA transition: {matrices[bad]}")
    return Head(G, tuple(form[0] for form in forms), label)


def encoded(G: FiniteGroup, rotations: Sequence[Matrix], label: str = "cor:a5-four") -> Head:
    """The four-dimensional head that tracks a group of rotations (prop:so3-four-dimensional-encoding)."""
    return Head(G, tuple(encoder(R) for R in rotations), label)


@lru_cache(maxsize=128)
def realise(name: str) -> Head:
    """The paper's head for Z_n, D_n (d = 2, prop:planar-groups), A4, S4 (d = 3, prop:cube) or A5 (d = 4, cor:a5-four).

    Example:
        >>> [realise(name).dimension for name in ("Z7", "D5", "S3", "A4", "S4", "A5")]
        [2, 2, 2, 3, 3, 4]
    """
    if name in ("S4", "A4"):
        G = symmetric(4) if name == "S4" else alternating(4)
        return _head(G, [cube_rotations()[label] for label in G.labels], "prop:cube")
    if name == "A5":
        return encoded(alternating(5), [icosahedral_rotations()[label] for label in alternating(5).labels])
    if name in ("S1", "S2", "S3", "A1", "A2", "A3"):
        target = {"S1": "Z1", "S2": "Z2", "S3": "D3", "A1": "Z1", "A2": "Z1", "A3": "Z3"}[name]
        return carry(realise(target), group(name))
    if name[0] not in "ZD" or not name[1:].isdigit() or int(name[1:]) < 1:
        raise ValueError(f"{name!r}: the paper realises Z_n, D_n, A4, S4 and tracks A5")
    n = int(name[1:])
    G = cyclic(n) if name[0] == "Z" else dihedral(n)
    return _head(G, _planar_matrices(n, name[0] == "D"), "prop:planar-groups")


def carry(head: Head, G: FiniteGroup) -> Head:
    """The same head for an isomorphic group G, its elements renamed by an isomorphism that is found."""
    images = isomorphism(G, head.group)
    if images is None:
        raise ValueError(f"{G} is not isomorphic to {head.group}")
    return Head(G, tuple(head.transitions[i] for i in images), head.label)


def with_sign_coordinates(head: Head, G: FiniteGroup, first: Sequence[int], bits: Sequence[Sequence[int]]) -> Head:
    """A head for G that runs `head` on the image `first` of each input and flips one more coordinate per bit.

    A coordinate where the key is zero multiplies by its sign, so one head tracks K x Z_2^m in dimension d + m whenever
    it tracks K in d. The paper does not say so; it is checked by :func:`reach` like every other head.

    Example:
        >>> G = group("S3xZ2")
        >>> first, bits = zip(*G.labels)
        >>> reach(with_sign_coordinates(realise("S3"), G, first, [(b,) for b in bits])).size
        12
    """
    transitions = []
    for image, extra in zip(first, bits, strict=True):
        form = head.transitions[image]
        key = form.key.field.vector([x for (x,) in form.key.tolist()] + [0] * len(extra))
        transitions.append(SignedHouseholder((*form.signs, *((-1) ** b for b in extra)), key))
    return Head(G, tuple(transitions), f"{head.label} with sign coordinates")


def nonnegative_form(A: Matrix) -> SignedHouseholder | None:
    """A form H_k D of A whose key has no negative component (app:silu), or None.

    Example:
        >>> F = field()
        >>> nonnegative_form(F.householder([1, -1])).key.tolist()
        [[1], [1]]
    """
    for form in signed_householder_forms(A):
        signs = {A.field.sign(x) for (x,) in form.key.tolist()}
        if -1 not in signs:
            return form
        if 1 not in signs:
            return SignedHouseholder(form.signs, -form.key)
    return None


# claims


def _random_quaternion(rng: np.random.Generator, zeros: int) -> list[int]:
    """Whole numbers (w, x, y, z), w = 0 allowed, with `zeros` of x, y, z zero."""
    vector = [int(x) for x in rng.integers(1, 9, 3) * rng.choice((-1, 1), 3)]
    for i in rng.permutation(3)[:zeros]:
        vector[i] = 0
    return [int(rng.integers(-6, 7)), *vector]


def check_axis_test(rotations: Iterable[Matrix], test: Callable[[Matrix], bool] = passes_axis_test) -> int:
    """Compare the axis test with the search over all eight sign diagonals; returns the number of rotations."""
    rotations = list(rotations)
    for R in rotations:
        if test(R) != bool(signed_householder_forms(R)):
            raise Refuted(f"axis {axis(R)}: the test says {test(R)}, the search over sign diagonals the opposite; {R}")
    return len(rotations)


@claim("prop:axis-test", "A rotation of R^3 is signed-Householder iff it is 1, a half-turn, or its axis has a zero")
def axis_test(effort: float = 1.0, test: Callable[[Matrix], bool] = passes_axis_test) -> Evidence:
    """prop:axis-test on the cube in both orientations, the icosahedron and random rational rotations."""
    rng = np.random.default_rng(0)
    draws = [_random_quaternion(rng, zeros=i % 3) for i in range(int(900 * effort))]
    solids = [*cube_rotations(True).values(), *cube_rotations(False).values(), *icosahedral_rotations().values()]
    cases = check_axis_test([*solids, *(rotation_matrix(field(), a) for a in draws)], test)
    return Evidence(cases, "exact", note="against the search over all 8 sign diagonals")


def check_realisations(heads: Iterable[Head], dimension: int) -> int:
    """Every head is a faithful representation by CKDA transitions in this dimension; returns the products checked."""
    cases = 0
    for head in heads:
        if head.dimension != dimension:
            raise Refuted(f"{head.group.name} was realised in dimension {head.dimension}, not {dimension}")
        if not is_realisation(head):
            raise Refuted(f"{head.group.name}: h -> A_h is not a faithful representation")
        cases += head.group.order**2
    return cases


@claim("prop:planar-groups", "Every Z_n and D_n has a signed-Householder realisation in the plane")
def planar_groups(effort: float = 1.0) -> Evidence:
    """prop:planar-groups for n up to 16 (effort 1), in the field of cos(2 pi / n) and sin(2 pi / n)."""
    top = max(4, int(16 * min(effort, 1)))
    heads = [realise(f"{kind}{n}") for n in range(1, top + 1) for kind in "ZD"]
    return Evidence(check_realisations(heads, 2), "exact", note=f"all products of Z_n and D_n, n <= {top}")


@claim("prop:cube", "S4 and A4 are realised in three dimensions by the cube turned by 45 degrees")
def cube(effort: float = 1.0) -> Evidence:
    """prop:cube: all products, the seven axes after the turn, and the eight failures of the standard orientation."""
    cases = check_realisations([realise("S4"), realise("A4")], 3)
    standard = cube_rotations(turned=False).values()
    failures = sum(not signed_householder_forms(R) for R in standard)
    if failures != 8:
        raise Refuted(f"standard orientation: {failures} rotations fail, the paper's four diagonals give 8")
    return Evidence(cases + 24, "exact", note="in the standard orientation the 8 turns of order 3 fail")


def _ring_matrix(rows: Callable[[list], list]) -> list[list]:
    units = [[int(i == j) for i in range(4)] for j in range(4)]
    return [list(row) for row in zip(*(rows(unit) for unit in units), strict=True)]


def _matmul(A: Sequence[Sequence], B: Sequence[Sequence]) -> list[list]:
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*B, strict=True)] for row in A]


def _skew_span(x: Sequence, direction: int) -> list[list]:
    """J(x) for direction 1, K(x) for direction -1."""
    d = direction
    return [
        [0, x[0], x[1], x[2]],
        [-x[0], 0, d * x[2], -d * x[1]],
        [-x[1], -d * x[2], 0, d * x[0]],
        [-x[2], d * x[1], -d * x[0], 0],
    ]


def encoding_identities(decode: Callable[[Sequence[Sequence], int], list[list]] = _decode) -> dict[str, bool]:
    """The identities behind prop:so3-four-dimensional-encoding as polynomials in two quaternions p, q.

    They are eq:g-block-form, eq:J-action, eq:f-homomorphism, eq:f-on-g, eq:so3-auxiliary-decoder and eq:fminus-on-g.

    Every matrix of SO(4) is x -> p x q / (|p| |q|) (classical), so an identity in p and q holds on all of SO(4).

    Example:
        >>> all(encoding_identities().values())
        True
    """
    _, *v = sympy.ring("p0:4,q0:4,x0:3", sympy.QQ)
    p, q, x = v[:4], v[4:8], v[8:]
    norm_p, norm_q = sum(a * a for a in p), sum(a * a for a in q)
    S = _ring_matrix(lambda unit: hamilton(hamilton(p, unit), q))
    transposed = [list(column) for column in zip(*S, strict=True)]
    plus, minus = decode(S, 1), decode(S, -1)
    conjugate = [q[0], -q[1], -q[2], -q[3]]
    reflect = [[int(i == j) * norm_p - 2 * p[i] * p[j] for j in range(4)] for i in range(4)]
    g = [[-row[0], *row[1:]] for row in reflect]

    def scaled(A: list[list], s: Any) -> list[list]:
        return [[s * entry for entry in row] for row in A]

    def acts(decoded: list[list], direction: int) -> bool:
        moved = _matmul(_matmul(S, _skew_span(x, direction)), transposed)
        image = [sum(a * b for a, b in zip(row, x, strict=True)) for row in decoded]
        return moved == _skew_span(image, direction)

    return {
        "g(A) is x -> a x a": g == _ring_matrix(lambda unit: hamilton(hamilton(p, unit), p)),
        "f(x -> p x q) = R_p |q|^2": plus == scaled(rotation_of(p), norm_q),
        "f_-(x -> p x q) = R_q^-1 |p|^2": minus == scaled(rotation_of(conjugate), norm_p),
        "Q J(x) Q^T = J(f(Q) x) (eq:J-action)": acts(plus, 1),
        "Q K(x) Q^T = K(f_-(Q) x)": acts(minus, -1),
    }


def check_encoding(
    rotations: Sequence[Matrix],
    states: Sequence[Matrix],
    encode: Callable[[Matrix], SignedHouseholder] = encoder,
    decode: Callable[[Matrix], Matrix] = decoder,
) -> int:
    """f(g(A) S) = A f(S) and f_-(g(A) S) = A^-1 f_-(S) for all the given A and S; returns the number of pairs."""
    for R in rotations:
        A = encode(R).matrix
        for S in states:
            if decode(A @ S) != R @ decode(S):
                raise Refuted(f"f(g(A) S) is not A f(S) for A = {R}, S = {S}")
            if auxiliary_decoder(A @ S) != R.T @ auxiliary_decoder(S):
                raise Refuted(f"f_-(g(A) S) is not A^-1 f_-(S) for A = {R}, S = {S}")
    return len(rotations) * len(states)


def finite_rotation_groups(effort: float = 1.0) -> dict[str, tuple[FiniteGroup, list[Matrix]]]:
    """The finite rotation groups of R^3 by name, as matrices: Z_n and D_n about the third axis, A4, S4, A5."""
    found: dict[str, tuple[FiniteGroup, list[Matrix]]] = {}
    for n in range(1, 3 + int(6 * min(effort, 1))):
        for kind, G in (("Z", cyclic(n)), ("D", dihedral(n))):
            planar = _planar_matrices(n, kind == "D")
            found[f"{kind}{n}"] = G, [_lift_to_space(A) for A in planar]
    for name, rotations in (("A4", cube_rotations()), ("S4", cube_rotations()), ("A5", icosahedral_rotations())):
        G = group(name)
        found[name] = G, [rotations[label] for label in G.labels]
    return found


def _lift_to_space(A: Matrix) -> Matrix:
    """A plane orthogonal matrix as a rotation of space: Diag(A, det A)."""
    return A.field.matrix([[A[0, 0], A[0, 1], 0], [A[1, 0], A[1, 1], 0], [0, 0, A.det()]])


@claim("prop:so3-four-dimensional-encoding", "f(g(A) S) = A f(S) on SO(4), and |Gamma_H| <= 2 |H|^2 for finite H")
def so3_encoding(
    effort: float = 1.0,
    encode: Callable[[Matrix], SignedHouseholder] = encoder,
    decode: Callable[[Matrix], Matrix] = decoder,
) -> Evidence:
    """prop:so3-four-dimensional-encoding: polynomial identities, random rational pairs, |Gamma_H| of finite groups."""
    failed = [name for name, holds in encoding_identities().items() if not holds]
    if failed:
        raise Refuted(f"polynomial identities that fail: {failed}")
    rng, F = np.random.default_rng(1), field()
    rotations = [rotation_matrix(F, _random_quaternion(rng, i % 3)) for i in range(int(24 * effort) + 2)]
    embedded = [F.matrix([[1, 0, 0, 0], *([0, *row] for row in R.tolist())]) for R in rotations]
    states = [encoder(R).matrix @ E for R, E in zip(rotations, reversed(embedded), strict=True)]
    cases = check_encoding(rotations, states, encode, decode)
    sizes = {}
    for name, (G, matrices) in finite_rotation_groups(effort).items():
        sizes[name] = reach(encoded(G, matrices)).size
        if sizes[name] > 2 * G.order**2:
            raise Refuted(f"|Gamma| = {sizes[name]} > 2 |H|^2 for {name}")
    note = "5 polynomial identities on all of SO(4); reachable states " + ", ".join(
        f"{k} {v}" for k, v in sizes.items()
    )
    return Evidence(cases + len(sizes) + 5, "exact", note=note, data={"reachable": sizes})


def check_a5_four(head: Head, stride: int = 1) -> Reached:
    """cor:a5-four for a head of A5: the law on every state and input, and f evaluated on every `stride`-th state."""
    found = reach(head)
    rotations = icosahedral_rotations()
    gates = {t.signs for t in head.transitions}
    if gates != {(-1, 1, 1, 1)}:
        raise Refuted(f"the gates are {gates}, not Diag(-1, 1, 1, 1) for every input")
    for i in range(0, found.size, stride):
        if decoder(found.state(i)) != rotations[head.group.labels[found.decode[i]]]:
            raise Refuted(f"f disagrees with the running product on state {i}: {found.state(i)}")
    return found


@claim("cor:a5-four", "One CKDA head of dimension four tracks A5, many-to-one, with at most 7200 states")
def a5_four(effort: float = 1.0) -> Evidence:
    """cor:a5-four: the reachable set, the tracking law on all of it, f on its states, and the fibres of the decoder."""
    stride = max(1, int(1 / effort))
    found = check_a5_four(realise("A5"), stride)
    fibres = np.bincount(found.decode, minlength=60)
    if found.size > 7200 or fibres.min() < 2:
        raise Refuted(f"{found.size} states with fibres from {fibres.min()} to {fibres.max()}")
    note = f"{found.size} reachable states, {fibres.min()} to {fibres.max()} per group element"
    data = {"states": found.size, "fibre": int(fibres.max()), "columns": len(found.vectors)}
    return Evidence(found.step.size + found.size // stride, "exact", note=note, data=data)


SAMPLE = (
    "Z1",
    "Z2",
    "Z3",
    "Z7",
    "Z12",
    "D2",
    "D3",
    "D4",
    "D5",
    "D6",
    "A4",
    "S4",
    "A5",
)  #: heads the lemmas are tried on


def check_homomorphism(head: Head, found: Reached, rows: Iterable[int]) -> int:
    """p(Q_1 Q_2) = p(Q_1) p(Q_2), and Q_1 Q_2 reachable, for the states Q_1 in `rows` and all Q_2."""
    place = {tuple(columns): i for i, columns in enumerate(found.columns.tolist())}
    cases = 0
    for s in rows:
        matrix = found.state(s)
        lookup = {v: i for i, v in enumerate(found.vectors)}
        images = np.array([lookup.get(matrix @ v, -1) for v in found.vectors])
        products = [place.get(tuple(columns), -1) for columns in images[found.columns].tolist()]
        if -1 in products:
            raise Refuted(f"{head.group.name}: state {s} times state {products.index(-1)} is not reachable")
        wanted = head.group.table[found.decode[s], found.decode]
        if (found.decode[products] != wanted).any():
            raise Refuted(f"{head.group.name}: the decoder is no homomorphism at state {s}")
        cases += found.size
    return cases


@claim("lem:finite-tracking-homomorphism", "The reachable set is a group and the decoder a surjective homomorphism")
def tracking_homomorphism(effort: float = 1.0) -> Evidence:
    """lem:finite-tracking-homomorphism on every head of the paper; bijective exactly for the realisations."""
    cases, rng = 0, np.random.default_rng(2)
    for name in SAMPLE:
        head = realise(name)
        found = reach(head)
        rows = range(found.size) if found.size <= 100 else rng.integers(0, found.size, int(40 * effort) + 1).tolist()
        cases += check_homomorphism(head, found, rows)
        if set(found.decode.tolist()) != set(range(head.group.order)):
            raise Refuted(f"{name}: the decoder is not surjective")
        if (found.size == head.group.order) != is_realisation(head):
            raise Refuted(f"{name}: {found.size} states, but realisation is {is_realisation(head)}")
    return Evidence(cases, "exact", note=f"{len(SAMPLE)} heads; all pairs, for A5 a sample of rows")


@claim("lem:finite-query-readout", "One fixed query q tells all reachable states apart through S^T q")
def query_readout(effort: float = 1.0) -> Evidence:
    """lem:finite-query-readout: a whole-number query for every head; the smallest distance of two outputs."""
    from scipy.spatial import cKDTree

    cases, distances = 0, {}
    for name in SAMPLE:
        found = reach(realise(name))
        query, outputs = find_query(found)
        cases += found.size
        if found.size > 1:
            unit = outputs / np.linalg.norm(query)
            distances[name] = float(cKDTree(unit).query(unit, k=2)[0][:, 1].min())
    worst = min(distances, key=lambda name: distances[name])
    note = f"nearest outputs of a unit query: {distances[worst]:.3g} ({worst})"
    return Evidence(cases, "exact", margin=distances[worst], note=note, data={"separation": distances})


@claim("thm:main-positive", "One head realises Z_n, D_n (d = 2), A4, S4 (d = 3) and tracks A5 (d = 4)")
def main_positive(effort: float = 1.0) -> Evidence:
    """thm:main-positive: the tracking law on every reachable state of each head, and its dimension."""
    cases, dimensions = 0, {"Z": 2, "D": 2, "A4": 3, "S4": 3, "A5": 4}
    for name in SAMPLE:
        head = realise(name)
        if head.dimension != dimensions.get(name, dimensions.get(name[0])):
            raise Refuted(f"{name} has dimension {head.dimension}")
        cases += reach(head).step.size
    return Evidence(cases, "exact", note=f"{len(SAMPLE)} groups, every reachable state and input")


def silu_keys() -> list[Matrix]:
    """The three nonnegative keys of app:silu."""
    F = field(sympy.sqrt(3))
    half, root = F("1/2"), F.root(3) / 2
    return [F.vector([root, 0, half]), F.vector([half, 0, root]), F.vector([0, 0, 1])]


def silu_head(keys: Sequence[Matrix] | None = None) -> Head:
    """S3 = D3 in three dimensions from the nonnegative keys of app:silu; the two turns reuse the first two keys.

    Example:
        >>> is_realisation(silu_head())
        True
    """
    first, second, third = keys or silu_keys()
    turns = [
        SignedHouseholder((1, 1, -1), third),
        SignedHouseholder((-1, 1, 1), second),
        SignedHouseholder((1, 1, -1), first),
    ]
    mirrors = [
        SignedHouseholder((1, 1, 1), third),
        SignedHouseholder((-1, 1, -1), second),
        SignedHouseholder((1, 1, 1), first),
    ]
    return Head(dihedral(3), tuple(turns + mirrors), "app:silu")


def check_nonnegative(head: Head) -> int:
    """A realisation whose keys have no negative component."""
    for element, transition in zip(head.group.labels, head.transitions, strict=True):
        if any(head.field.sign(x) < 0 for (x,) in transition.key.tolist()):
            raise Refuted(f"the key of {element} has a negative component: {transition.key}")
    return check_realisations([head], head.dimension)


@claim("app:silu", "At beta = 2 three nonnegative keys realise S3; every Z_n and D_n has nonnegative keys in the plane")
def silu(effort: float = 1.0, build: Callable[[], Head] = silu_head) -> Evidence:
    """app:silu: the paper's three keys, and beyond it every planar group; the turned cube needs mixed signs."""
    cases = check_nonnegative(build())
    top = max(4, int(12 * min(effort, 1)))
    for n in range(1, top + 1):
        for A in _planar_matrices(n, True):
            if nonnegative_form(A) is None:
                raise Refuted(f"no nonnegative key for {A} of D{n}")
            cases += 1
    mixed = [label for label, R in cube_rotations().items() if nonnegative_form(R) is None]
    if not mixed:
        raise Refuted("every rotation of the turned cube has a nonnegative key, the paper says mixed signs are used")
    note = f"D_n, n <= {top}; {len(mixed)} of 24 rotations of the turned cube need a key of mixed signs"
    return Evidence(cases + 24, "exact", note=note, data={"cube_mixed": [cycle_notation(p) for p in mixed]})
