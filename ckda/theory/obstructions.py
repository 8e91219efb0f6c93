"""What one CKDA layer cannot track, as certificates that are followed step by step.

A :class:`Certificate` is a list of steps; each says how it was checked: `exact` (all cases, exact arithmetic),
`symbolic` (a polynomial identity), `tried` (an algorithm that proves it case by case, run on examples) or `cited`
(a classical fact the paper cites and we do not check). A step that fails refutes the certificate.

Example:
    >>> certificate = s5_certificate()
    >>> certificate.holds, certificate.steps[0].statement
    (True, 'c = (12345) has order 5, a power of the prime 5')
    >>> find_obstruction(group("A5")) is None, find_obstruction(group("A6")) is None
    (True, False)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from itertools import product as cartesian
from math import gcd, lcm
from typing import Any, Literal

import numpy as np
import sympy

from ckda.groups import (
    FiniteGroup,
    cycle_notation,
    frobenius,
    from_elements,
    group,
    hamilton,
    permutation,
)
from ckda.theory import reduction
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.exact import Matrix, Number, field
from ckda.theory.groups import (
    axis,
    check_homomorphism,
    cube_rotations,
    encoder,
    encoding_identities,
    icosahedral_rotations,
    planar_field,
    planar_rotation,
    reach,
    realise,
    signed_householder_forms,
)

__all__ = [
    "Certificate",
    "Obstruction",
    "Step",
    "a5_three_certificate",
    "confront",
    "deltaproduct_factors",
    "find_obstruction",
    "icosahedral_axes",
    "obstructed_letter",
    "pair_law",
    "s5_certificate",
    "spectral_certificate",
    "wrong_pair",
]

How = Literal["exact", "symbolic", "tried", "cited"]


@dataclass(frozen=True)
class Step:
    """One step of a proof and what its check found."""

    statement: str
    how: How
    holds: bool
    detail: str = ""


@dataclass(frozen=True)
class Certificate:
    """A proof as steps, the last of which is the contradiction."""

    title: str
    steps: tuple[Step, ...]

    @property
    def holds(self) -> bool:
        return all(step.holds for step in self.steps)

    def __str__(self) -> str:
        lines = [self.title]
        for i, step in enumerate(self.steps, 1):
            mark = "-- " if step.how == "cited" else "ok " if step.holds else "NO "
            lines.append(f"  {i}. {mark}[{step.how}] {step.statement}" + (f" ({step.detail})" if step.detail else ""))
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """The steps as JSON."""
        return {"title": self.title, "steps": [asdict(step) for step in self.steps]}

    def check(self) -> "Certificate":
        """Itself; Refuted where a step fails."""
        failed = next((step for step in self.steps if not step.holds), None)
        if failed is not None:
            raise Refuted(f"{self.title}: {failed.statement} ({failed.detail})")
        return self


# the icosahedron


def _direction(v: Matrix) -> tuple[Number, ...]:
    """v scaled so that its first nonzero coordinate is one: the same for every vector of an axis."""
    entries = [x for (x,) in v.tolist()]
    lead = next(x for x in entries if x)
    return tuple(x / lead for x in entries)


def rotation_order(R: Matrix) -> int:
    """The order of a matrix of finite order."""
    power, order = R, 1
    while not power.is_identity():
        power, order = power @ R, order + 1
    return order


@lru_cache(maxsize=4)
def icosahedral_axes(order: int) -> list[Matrix]:
    """The axes of the rotations of this order (5 or 3), read off the sixty rotations.

    Example:
        >>> len(icosahedral_axes(5)), len(icosahedral_axes(3))
        (6, 10)
    """
    F = field(sympy.sqrt(5))
    rotations = [R for R in icosahedral_rotations().values() if rotation_order(R) == order]
    directions = dict.fromkeys(_direction(a) for R in rotations if (a := axis(R)) is not None)
    return [F.vector(d) for d in directions]


def paper_axes() -> tuple[list[Matrix], list[Matrix]]:
    """The representatives V and T of lem:ico-plane."""
    F = field(sympy.sqrt(5))
    phi = (F.root(5) + 1) / 2
    V = [(0, 1, s * phi) for s in (1, -1)] + [(1, s * phi, 0) for s in (1, -1)] + [(phi, 0, s) for s in (1, -1)]
    T = [(1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1)]
    for s in (1, -1):
        T += [(0, phi, s * (phi - 1)), (phi, s * (phi - 1), 0), (phi - 1, 0, s * phi)]
    return [F.vector(v) for v in V], [F.vector(v) for v in T]


def absolute_determinants(axes: Sequence[Matrix]) -> set[sympy.Expr]:
    """|det| of all triples."""
    F = axes[0].field
    values = {a.stack(b, c).det() for a, b, c in combinations(axes, 3)}
    return {sympy.nsimplify(F.sympy(x * F.sign(x)) if F.sign(x) else 0) for x in values}


def plane_counts(axes: Sequence[Matrix]) -> list[int]:
    """How many of the axes lie in each plane that two of them span (any other plane holds at most one)."""
    rows = axes[0].stack(*axes[1:]).T
    return [sum(not x for (x,) in (rows @ _normal(a, b)).tolist()) for a, b in combinations(axes, 2)]


def _normal(a: Matrix, b: Matrix) -> Matrix:
    """The cross product."""
    (a0,), (a1,), (a2,) = a.tolist()
    (b0,), (b1,), (b2,) = b.tolist()
    return a.field.vector([a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0])


def check_ico_plane(axes: Sequence[Matrix], most: int = 4) -> list[int]:
    """No plane through the centre contains more than `most` of the axes."""
    counts = plane_counts(axes)
    if max(counts) > most:
        raise Refuted(f"a plane contains {max(counts)} of the {len(axes)} axes, more than {most}")
    return counts


@claim("lem:ico-plane", "No plane contains more than four of the sixteen axes of order 5 and 3 of an icosahedron")
def ico_plane(effort: float = 1.0) -> Evidence:
    """lem:ico-plane over all planes spanned by two axes, and the table of determinants of its proof."""
    five, three = icosahedral_axes(5), icosahedral_axes(3)
    V, T = paper_axes()
    for found, written in ((five, V), (three, T)):
        if {_direction(a) for a in found} != {_direction(a) for a in written}:
            raise Refuted("the paper's representatives are not the axes of the sixty rotations")
    counts = check_ico_plane([*five, *three])
    r = sympy.sqrt(5)
    tables = absolute_determinants(V), absolute_determinants(T)
    if tables != ({1 + r, 3 + r}, {r - 1, sympy.Integer(2), 1 + r, 2 * r, sympy.Integer(4)}):
        raise Refuted(f"the determinants of lem:ico-plane are {tables}")
    note = f"{len(counts)} planes, the fullest holds {max(counts)} axes; both rows of determinants confirmed"
    return Evidence(len(counts) * 16 + 20 + 120, "exact", margin=4 - max(counts), note=note)


def a5_three_certificate(rotations: Sequence[Matrix] | None = None) -> Certificate:
    """thm:a5-three, no finite-state tracker of A5 in three dimensions, step by step.

    `rotations` are the sixty matrices the hidden group is said to be; the icosahedron of the paper if not given.
    """
    A5, found = group("A5"), list(rotations or icosahedral_rotations().values())
    subgroups = [len(N) for N in A5.normal_subgroups]
    hard = [a for R in found if rotation_order(R) > 2 and (a := axis(R)) is not None]
    axes = [found[0].field.vector(d) for d in dict.fromkeys(_direction(a) for a in hard)]
    fullest = max(plane_counts(axes))
    sign_forms = all(bool(signed_householder_forms(-R)) for R in cube_rotations().values())
    S4 = realise("S4")
    decodes = check_homomorphism(S4, reach(S4), range(24))
    steps = (
        Step("decoders are homomorphisms of the hidden group (lem:finite-tracking-homomorphism)", "tried", decodes > 0),
        Step("A5 is simple, so a normal subgroup of order at most 2 decodes to e", "exact", subgroups == [1, 60]),
        Step(
            "Q -> det(Q) Q keeps signed-Householder matrices signed-Householder: -H_k D = H_k (-D)", "tried", sign_forms
        ),
        Step(
            "finite rotation groups are cyclic, dihedral, or those of the tetrahedron, cube, icosahedron", "cited", True
        ),
        Step("A4 and S4 are too small to map onto A5", "exact", max(group("A4").order, group("S4").order) < 60),
        Step("A5 has no cyclic normal subgroup of index at most two", "exact", _no_cyclic_normal(A5)),
        Step(
            "the sixty rotations have sixteen axes of order above two",
            "exact",
            len(axes) == 16,
            f"{len(axes)} axes",
        ),
        Step(
            "three coordinate planes hold fewer axes than there are (lem:ico-plane, prop:axis-test)",
            "exact",
            3 * fullest < len(axes),
            f"3 x {fullest} < {len(axes)}",
        ),
    )
    return Certificate("thm:a5-three: no finite-state tracker of A5 in dimension three", steps)


def _no_cyclic_normal(G: FiniteGroup) -> bool:
    normal = [N for N in G.normal_subgroups if len(N) * 2 >= G.order]
    return not any(max(G.orders[a] for a in N) == len(N) for N in normal)


def standard_coverage() -> int:
    """Axes of order 5 and 3 that lie in a coordinate plane in the usual position: how near three dimensions come."""
    return sum(not all(a[i, 0] for i in range(3)) for a in [*icosahedral_axes(5), *icosahedral_axes(3)])


@claim("thm:a5-three", "A5 has no finite-state signed-Householder tracker in dimension three")
def a5_three(effort: float = 1.0, certify: Callable[[], Certificate] = a5_three_certificate) -> Evidence:
    """thm:a5-three: the certificate, and how many of the sixteen axes pass the axis test in the usual position."""
    certificate = certify().check()
    reachable = reach(realise("S4")).size
    note = f"{len(certificate.steps)} steps; in the usual position {standard_coverage()} of 16 axes pass"
    cases = len(certificate.steps) + reachable
    return Evidence(cases, "exact", margin=16 - standard_coverage(), note=note, data=certificate.data())


# two planar rotations


def trace_identity(factor: int = 1) -> bool:
    """tr D = [2 - (1-x)^2 (1 - (u.v)^2)]^2 - 1 for the commutator D of rotations by one angle (cosine x) about u, v.

    Polynomials in x, s = sin, w = u.v and y with u = e_3, v = (0, y, w), modulo x^2 + s^2 = 1 and w^2 + y^2 = 1.
    """
    ring, x, s, w, y = sympy.ring("x,s,w,y", sympy.QQ)

    def rotation(u: Sequence) -> list[list]:
        cross = [[0, -u[2], u[1]], [u[2], 0, -u[0]], [-u[1], u[0], 0]]
        return [[x * int(i == j) + (1 - x) * u[i] * u[j] + s * cross[i][j] for j in range(3)] for i in range(3)]

    def times(*factors: list[list]) -> list[list]:
        A = factors[0]
        for B in factors[1:]:
            A = [[sum((A[i][k] * B[k][j] for k in range(3)), ring.zero) for j in range(3)] for i in range(3)]
        return A

    X, Y = rotation([ring.zero, ring.zero, ring.one]), rotation([ring.zero, y, w])
    D = times(X, Y, [list(c) for c in zip(*X, strict=True)], [list(c) for c in zip(*Y, strict=True)])
    gap = D[0][0] + D[1][1] + D[2][2] - ((2 - factor * (1 - x) ** 2 * (1 - w**2)) ** 2 - 1)
    return gap.rem([s**2 + x**2 - 1, y**2 + w**2 - 1]) == 0


def planar_lift_identity() -> bool:
    """H_a H_b is x -> (a b*) x (b* a), both factors with real part a.b: f and f_- keep the angle of the rotation."""
    _, *v = sympy.ring("a0:4,b0:4", sympy.QQ)
    a, b = v[:4], v[4:]
    norms = sum(x * x for x in a), sum(x * x for x in b)
    star = [b[0], -b[1], -b[2], -b[3]]
    left, right = hamilton(a, star), hamilton(star, a)

    def mirror(u: Sequence, norm: Any) -> list[list]:
        return [[int(i == j) * norm - 2 * u[i] * u[j] for j in range(4)] for i in range(4)]

    A, B = mirror(a, norms[0]), mirror(b, norms[1])
    columns = [hamilton(hamilton(left, [int(i == j) for i in range(4)]), right) for j in range(4)]
    product = [[sum(A[i][k] * B[k][j] for k in range(4)) for j in range(4)] for i in range(4)]
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    same = all(product[i][j] == columns[j][i] for i in range(4) for j in range(4))
    return same and left[0] == dot and right[0] == dot


@lru_cache(maxsize=32)
def commutator_orders(q: int) -> frozenset[int]:
    """Orders of X Y X^T Y^T for rotations X, Y of one angle and q-power order in the rotation groups of the solids.

    Example:
        >>> sorted(commutator_orders(5)), sorted(commutator_orders(7)), sorted(commutator_orders(3))
        ([1, 5], [1], [1, 2, 3])
    """
    orders = {1}  # one axis: they commute
    for solid in (cube_rotations().values(), icosahedral_rotations().values()):
        turns = [R for R in solid if _is_power(rotation_order(R), q)]
        for X, Y in combinations(turns, 2):
            if X.trace() == Y.trace():
                orders.add(rotation_order(X @ Y @ X.T @ Y.T))
    return frozenset(orders)


def _is_power(n: int, q: int) -> bool:
    while n % q == 0:
        n //= q
    return n == 1


def planar_exponent(q: int) -> int:
    """m with (R_1 R_2 R_1^T R_2^T)^m = I for planar rotations of one angle and q-power order in a finite group, q odd.

    lem:planar-rotation-product is q = 5, m = 10; its proof gives the others: twice the lcm of the commutator orders in
    three dimensions.

    Example:
        >>> planar_exponent(5), planar_exponent(7), planar_exponent(3)
        (10, 2, 12)
    """
    return 2 * lcm(*commutator_orders(q))


def _is_planar(R: Matrix) -> bool:
    return R.is_orthogonal() and (R - R.field.eye(R.shape[0])).rank() == 2


def check_planar_product(pairs: Iterable[tuple[Matrix, Matrix]], exponent: int = 10) -> dict[int, int]:
    """(R_1 R_2 R_1^T R_2^T)^exponent = I for all pairs of planar rotations of one angle; counts the orders met."""
    counts: dict[int, int] = {}
    for first, second in pairs:
        if not (_is_planar(first) and _is_planar(second) and first.trace() == second.trace()):
            raise Refuted(f"not two planar rotations through one angle: {first}, {second}")
        C = first @ second @ first.T @ second.T
        if not (C**exponent).is_identity():
            raise Refuted(f"the commutator to the power {exponent} is not the identity for {first}, {second}")
        order = rotation_order(C)
        counts[order] = counts.get(order, 0) + 1
    return counts


def planar_pairs(order: int, count: int, seed: int = 0) -> list[tuple[Matrix, Matrix]]:
    """Pairs R, S R S^T with R = g(c), c of this order in A5 and S any of the 7200 states of the A5 head."""
    found, rng = reach(realise("A5")), np.random.default_rng(seed)
    rotations = [R for R in icosahedral_rotations().values() if rotation_order(R) == order]
    pairs = []
    for _ in range(count):
        R = encoder(rotations[rng.integers(len(rotations))]).matrix
        S = found.state(int(rng.integers(found.size)))
        pairs.append((R, S @ R @ S.T))
    return pairs


@claim("lem:planar-rotation-product", "Planar rotations of one angle, order 5 m, in a finite group: commutator^10 = I")
def planar_rotation_product(effort: float = 1.0) -> Evidence:
    """lem:planar-rotation-product: the trace identity, all pairs of the solids, pairs from the hidden group of A5."""
    if not _identities_hold():
        raise Refuted("an identity of the proof fails")
    if planar_exponent(5) != 10:
        raise Refuted(f"the rotation groups of the solids give the exponent {planar_exponent(5)}")
    five = icosahedral_axes(5)
    cosines = {((u.T @ v)[0, 0] ** 2) / ((u.T @ u)[0, 0] * (v.T @ v)[0, 0]) for u, v in combinations(five, 2)}
    if cosines != {five[0].field("1/5")}:
        raise Refuted(f"squared cosines of vertex axes: {cosines}")
    counts = check_planar_product(planar_pairs(5, int(600 * effort) + 10))
    note = "orders of the commutator met in the hidden group of A5: " + ", ".join(
        f"{k} ({counts[k]}x)" for k in sorted(counts)
    )
    return Evidence(
        sum(counts.values()) + 15 + 7, "exact", note=note, data={"orders": {str(k): v for k, v in counts.items()}}
    )


# the spectral obstruction


def exponent_for(order: int, q: int, power: int) -> int:
    """E > 0 divisible by 2 r and congruent to 1 modulo `power` (a power of q), where order = q^a r.

    Example:
        >>> exponent_for(20, 5, 5)
        16
    """
    r = order
    while r % q == 0:
        r //= q
    return next(E for E in range(2 * r, 2 * r * power + 1, 2 * r) if E % power == 1)


def exponents_isolate(q: int, power: int, most: int) -> bool:
    """For every order n <= most divisible by q: an n-th root of unity to the E has q-power order, and (-1)^E = 1."""
    for n in range(q, most + 1, q):
        E = exponent_for(n, q, power)
        if E % 2 or E % power != 1:
            return False
        if not all(_is_power(n // gcd(n, j * E), q) for j in range(n)):
            return False
    return True


@dataclass(frozen=True)
class Obstruction:
    """Why no layer of the kind of thm:s5-impossibility tracks the group."""

    label: str
    reason: str
    certificate: Certificate | None = None


def spectral_certificate(G: FiniteGroup, c: int, t: int, exponent: int | None = None) -> Certificate:
    """The proof of thm:s5-impossibility for any group, an element c of odd prime power order and any t.

    `exponent` is the m of lem:planar-rotation-product, 10 for order five; computed for the prime if not given.
    """
    order = G.orders[c]
    q = min(sympy.primefactors(order), default=1)
    if q <= 2 or not _is_power(order, q):
        return Certificate(
            G.name, (Step(f"c = {G.element_name(c)} has odd prime power order", "exact", False, f"{order}"),)
        )
    m = exponent or planar_exponent(q)
    steps = (*_permutation_steps(G, c, t), *_rotation_steps(q, order), *_contradiction_steps(G, c, t, q, m))
    return Certificate(f"{G.name}: no layer with one non-real pair per head tracks it", steps)


def _permutation_steps(G: FiniteGroup, c: int, t: int) -> list[Step]:
    b = G.conjugate(c, t)
    k = G.commutator(c, b)
    q = min(sympy.primefactors(G.orders[c]))
    return [
        Step(
            f"c = {G.element_name(c)} has order {G.orders[c]}, a power of the prime {q}",
            "exact",
            _is_power(G.orders[c], q),
        ),
        Step(f"b = t c t^-1 = {G.element_name(b)} for t = {G.element_name(t)}", "exact", G.mul(t, c) == G.mul(b, t)),
        Step(f"c b c^-1 b^-1 = {G.element_name(k)}, of order {G.orders[k]}", "exact", G.mul(c, b) == G.mul(k, b, c)),
    ]


def _rotation_steps(q: int, order: int) -> list[Step]:
    tried, top = _reduction_examples(), 60 * q
    reduces = "a tracker reduces to orthogonal heads, spectra kept (prop:independent-head-reduction)"
    isolates = "E even, 1 mod ord(c), 0 mod r exists for ord(A_c) = q^a r; A_c^E keeps only roots of q-power order"
    planar = "so R_1 = A_c^E and R_2 = A_t R_1 A_t^T are 1 or planar rotations of one angle, in each head"
    return [
        Step(reduces, "tried", tried > 0, f"{tried} trackers"),
        Step(
            isolates, "tried", exponents_isolate(q, order, top), f"every order up to {top}; for all: Chinese remainders"
        ),
        Step(planar, "tried", _one_pair_stays_planar(q), "three matrices"),
    ]


def _contradiction_steps(G: FiniteGroup, c: int, t: int, q: int, m: int) -> list[Step]:
    orders = sorted(commutator_orders(q))
    k = G.commutator(c, G.conjugate(c, t))
    lifts = "f, f_-: SO(4) -> SO(3) are homomorphisms, together injective up to sign, and keep planar angles"
    groups = "finite rotation groups are cyclic, dihedral, or those of the tetrahedron, cube, icosahedron"
    commutes = f"there the commutator of two turns of one angle and {q}-power order has order {orders}, dividing {m}/2"
    return [
        Step(lifts, "symbolic", _identities_hold()),
        Step(groups, "cited", True),
        Step(commutes, "exact", all(m % (2 * order) == 0 for order in orders)),
        Step(f"so C = R_1 R_2 R_1^T R_2^T has C^{m} = I in every head", "tried", *_hidden_pairs(q, m)),
        Step(f"but C decodes to {G.element_name(k)}, whose power {m} is not e", "exact", G.power(k, m) != G.identity),
    ]


@lru_cache(maxsize=1)
def _identities_hold() -> bool:
    return all(encoding_identities().values()) and planar_lift_identity() and trace_identity()


@lru_cache(maxsize=64)
def _hidden_pairs(q: int, m: int) -> tuple[bool, str]:
    """C^m = I on planar rotations of order q: pairs of the hidden group of A5, for q > 5 a pair of a dihedral group."""
    F = planar_field(q)
    turn = planar_rotation(F, 1, q)
    pairs = planar_pairs(q, 20) if q <= 5 else [(turn, turn.T)]
    try:
        check_planar_product(pairs, m)
    except Refuted as refuted:
        return False, str(refuted)[:60]
    return True, f"{len(pairs)} pairs"


def _one_pair_stays_planar(q: int) -> bool:
    """Diag(rotation, -1, 1) to a power that isolates q is the identity or a planar rotation: tried in exact numbers."""
    for n in (q, 2 * q, 3 * q if q != 3 else 12):
        F = planar_field(n)
        turn = planar_rotation(F, 1, n)
        A = F.matrix([[*turn.tolist()[0], 0, 0], [*turn.tolist()[1], 0, 0], [0, 0, -1, 0], [0, 0, 0, 1]])
        R = A ** exponent_for(lcm(n, 2), q, q)
        if not (R.is_identity() or _is_planar(R)) or not _is_power(rotation_order(R), q):
            return False
    return True


@lru_cache(maxsize=1)
def _reduction_examples() -> int:
    """Run the reduction on two small trackers; it raises where a step of its proof fails."""
    for names in (["D3"], ["Z2", "Z3"]):
        reduction.reduce_tracker(reduction.disguise(names))
    return 2


def s5_certificate(t: str = "(12)", exponent: int = 10) -> Certificate:
    """thm:s5-impossibility with the paper's elements c = (12345), t = (12), b = (13452) and (142).

    Example:
        >>> print(str(s5_certificate()).splitlines()[3])
          3. ok [exact] c b c^-1 b^-1 = (142), of order 3
    """
    S5 = group("S5")
    return spectral_certificate(S5, S5.index(permutation("(12345)", 5)), S5.index(permutation(t, 5)), exponent)


def find_obstruction(G: FiniteGroup) -> Obstruction | None:
    """A reason why no layer of CKDA (any heads, any decoder, finite reachability) tracks G, or None.

    First the proof of thm:s5-impossibility over all pairs (c, t); then two arguments of docs/theory_proofs.md from the same
    hypotheses: a non-abelian Sylow subgroup for an odd prime (`odd-sylow`, P7), two conjugates of odd prime power order
    that generate the wrong group (`odd-pairs`, P14).

    Example:
        >>> find_obstruction(group("S5")).label, find_obstruction(group("S4"))
        ('thm:s5-impossibility', None)
    """
    if G.is_abelian:
        return None
    pair = next(_spectral_pairs(G), None)
    if pair is not None:
        certificate = spectral_certificate(G, *pair).check()
        c, t = (G.element_name(x) for x in pair)
        reason = f"c = {c} and t = {t} give the contradiction of its proof"
        return Obstruction("thm:s5-impossibility", reason, certificate)
    for q in sympy.primefactors(G.order):
        P = sylow(G, q)
        if q > 2 and not G.subgroup(P).group.is_abelian:
            reason = f"its Sylow {q}-subgroup, of order {len(P)}, is not abelian (docs/theory_proofs.md, P7)"
            return Obstruction("odd-sylow", reason)
    for a in (min(cls) for cls in G.classes):
        wrong = wrong_pair(G, a)
        if wrong is not None:
            b, why = wrong
            reason = (
                f"c = {G.element_name(a)} and t = {G.element_name(b)}: <c, t c t^-1> {why} (docs/theory_proofs.md, P14)"
            )
            return Obstruction("odd-pairs", reason)
    return None


def pair_law(G: FiniteGroup) -> bool:
    """Whether [x, y]^60 = 1 and [x, y]^30 commutes with everything: laws of abelian groups, of 2T and of 2I (P14).

    Example:
        >>> [pair_law(group(name)) for name in ("SL(2,3)", "Dic3", "Dic5", "A4", "Frob21", "SL(2,5)")]
        [True, True, True, True, False, True]
    """
    T, inverse = G.table, G.inverse
    commutators = {int(x) for x in np.unique(T[T, T[inverse[:, None], inverse[None, :]]])}
    if any(60 % G.orders[u] for u in commutators):
        return False
    return all((T[x] == T[:, x]).all() for x in {G.power(u, 30) for u in commutators})


def wrong_pair(G: FiniteGroup, c: int) -> tuple[int, str] | None:
    """t and what is wrong with <c, t c t^-1>, for c of odd prime power order (P14); None where nothing is.

    Example:
        >>> wrong_pair(group("A5"), group("A5").index(permutation("(123)", 5)))
    """
    primes = sympy.primefactors(G.orders[c])
    if len(primes) != 1 or primes[0] == 2:
        return None
    seen = set[int]()
    for t in range(G.order):
        conjugate = G.conjugate(c, t)
        if conjugate in seen:
            continue
        seen.add(conjugate)
        U = G.subgroup(G.generate([c, conjugate])).group
        if U.is_abelian:
            continue
        if primes[0] >= 7:
            return t, "is not abelian"
        if not pair_law(U):
            return t, "breaks the laws [x, y]^60 = 1 and [[x, y]^30, z] = 1"
    return None


def _spectral_pairs(G: FiniteGroup) -> Iterator[tuple[int, int]]:
    """Pairs (c, t) for which the proof of thm:s5-impossibility ends in its contradiction."""
    for q in sympy.primefactors(G.order):
        if q == 2:
            continue
        m = planar_exponent(q)
        for c in (min(cls) for cls in G.classes):
            if G.orders[c] > 1 and _is_power(G.orders[c], q):
                for t in range(G.order):
                    if G.power(G.commutator(c, G.conjugate(c, t)), m) != G.identity:
                        yield c, t
                        break


def obstructed_letter(G: FiniteGroup, letters: Iterable[int]) -> tuple[int, int, str] | None:
    """A letter c of odd prime power order and an element t that exclude the group, and by which argument.

    The proofs of thm:s5-impossibility and of `odd-pairs` use the transition of c alone; t may be any word. So they hold
    for words over some of the elements too.

    Example:
        >>> S5 = group("S5")
        >>> letters = [S5.index(permutation(cycles, 5)) for cycles in ("(12)", "(23)", "(34)", "(45)")]
        >>> obstructed_letter(S5, letters), obstructed_letter(S5, range(120)) is None
        (None, False)
    """
    for c in letters:
        primes = sympy.primefactors(G.orders[c])
        if len(primes) == 1 and primes[0] > 2:
            m = planar_exponent(primes[0])
            for t in range(G.order):
                if G.power(G.commutator(c, G.conjugate(c, t)), m) != G.identity:
                    return c, t, "thm:s5-impossibility"
            wrong = wrong_pair(G, c)
            if wrong is not None:
                return c, wrong[0], "odd-pairs"
    return None


def sylow(G: FiniteGroup, q: int) -> frozenset[int]:
    """A Sylow q-subgroup, grown by elements of its normaliser.

    Example:
        >>> len(sylow(group("S4"), 2))
        8
    """
    P = frozenset({G.identity})
    while (G.order // len(P)) % q == 0:
        new = next(
            a
            for a in range(G.order)
            if a not in P and _is_power(G.orders[a], q) and all(G.conjugate(x, a) in P for x in P)
        )
        P = G.generate([*P, new])
    return P


def confront(G: FiniteGroup, matrices: Sequence[Matrix], c: int, t: int) -> list[Step]:
    """Follow the proof on a proposed orthogonal tracker (one head) and say which of its steps hold for it.

    A tracker of S5 must break the hypothesis: the last step tells whether C^10 = I for these matrices.
    """
    pairs = max(A.eigenvalue_count().unit_pairs for A in matrices)
    order = G.orders[c]
    q = min(sympy.factorint(order))
    R1 = matrices[c] ** exponent_for(lcm(2, rotation_order(matrices[c])), q, order)
    R2 = matrices[t] @ R1 @ matrices[t].T
    C = R1 @ R2 @ R1.T @ R2.T
    return [
        Step("every matrix is orthogonal", "exact", all(A.is_orthogonal() for A in matrices)),
        Step("every matrix has at most one non-real pair", "exact", pairs <= 1, f"up to {pairs}"),
        Step("R_1 and R_2 are planar rotations", "exact", _is_planar(R1) and _is_planar(R2)),
        Step(f"C^{planar_exponent(q)} = I", "exact", (C ** planar_exponent(q)).is_identity()),
    ]


@claim("thm:s5-impossibility", "No layer of non-expansive heads with one non-real unit pair each tracks S5")
def s5_impossibility(effort: float = 1.0, certify: Callable[[], Certificate] = s5_certificate) -> Evidence:
    """thm:s5-impossibility-app: the certificate with the paper's permutations, and that it does not overreach."""
    certificate = certify().check()
    for name in ("A5", "S4", "A4", "D5", "Z15", "Q8"):
        if find_obstruction(group(name)) is not None:
            raise Refuted(f"the obstruction also excludes {name}")
    checked = sum(step.how in ("exact", "symbolic") for step in certificate.steps)
    note = (
        f"{len(certificate.steps)} steps: {checked} checked exactly, the others on examples, 1 cited (classification)"
    )
    return Evidence(len(certificate.steps) + 6, "exact", note=note, data=certificate.data())


@claim("thm:s5-impossibility/other-groups", "Its hypotheses also exclude A6, Frob21, Heis3 and others")
def other_groups(effort: float = 1.0) -> Evidence:
    """The proof of thm:s5-impossibility on other tables, and the argument `odd-sylow`."""
    labels = {}
    for G in [group("S5"), heisenberg(3), frobenius(7, 3), group("A6"), group("S5xZ2")][: 3 if effort < 0.5 else 5]:
        obstruction = find_obstruction(G)
        if obstruction is None:
            raise Refuted(f"no obstruction was found for {G.name}")
        labels[G.name] = obstruction.label
    if not all(cycle_of_blocks_pairs(m, j, 27) >= m - 1 for m in (3, 9) for j in range(27)):
        raise Refuted("a cycle of three blocks with fewer than two non-real pairs")
    note = ", ".join(f"{name}: {label}" for name, label in labels.items())
    return Evidence(len(labels) + 54, "exact", note=note)


@claim(
    "odd-pairs",
    "Two conjugates of odd prime power order in a tracked group generate a group with the laws of 2T and 2I",
)
def odd_pairs(effort: float = 1.0, law: Callable[[FiniteGroup], bool] = pair_law) -> Evidence:
    """Step 3 of P14 on all pairs in 2T, 2O, 2I, step 5 on 2T and 2I; tracked groups keep the laws, two others do not."""
    pairs = sum(check_odd_generated(group(name)) for name in ("SL(2,3)", "2O", "SL(2,5)"))
    for name in ("SL(2,3)", "SL(2,5)"):
        if not law(group(name)):
            raise Refuted(f"{name} breaks the laws")
    tracked = ["A4", "S4", "A5", "SL(2,3)", "Frob20", "A4xZ5", "GL(2,3)", "SL(2,5)"][: 8 if effort >= 1 else 5]
    for G in map(group, tracked):
        if any(wrong_pair(G, min(cls)) for cls in G.classes):
            raise Refuted(f"the argument excludes {G.name}, which is tracked")
    excluded = {
        "Z_4^2 : Z_3": _by_a_matrix(4, [[0, -1], [1, -1]]),
        "Z_2^3 : Z_7": _by_a_matrix(2, [[0, 0, 1], [1, 0, 1], [0, 1, 0]]),
    }
    for name, G in excluded.items():
        obstruction = find_obstruction(G)
        if obstruction is None or obstruction.label != "odd-pairs":
            raise Refuted(f"{name} is not excluded by it")
    return Evidence(
        pairs + 2 + len(tracked) + len(excluded),
        "exact",
        note=f"{pairs} pairs; excludes {' and '.join(excluded)}, none of {', '.join(tracked)}",
    )


#: orders of the groups that two elements of odd order q generate in 2T, 2O or 2I if they do not commute: 2T or 2I
ODD_GENERATED = {3: {24, 120}, 5: {120}}


def check_odd_generated(G: FiniteGroup, allowed: dict[int, set[int]] | None = None) -> int:
    """Step 3 of P14: two elements of one odd prime order commute or generate 2T or 2I; how many pairs there are."""
    count = 0
    for q, orders in (allowed or ODD_GENERATED).items():
        elements = [a for a in range(G.order) if G.orders[a] == q]
        for a in sorted({min(cls) for cls in G.classes} & set(elements)):
            for b in elements:
                count += 1
                found = len(G.generate([a, b]))
                if G.table[a, b] != G.table[b, a] and found not in orders:
                    raise Refuted(f"{G.name}: {a} and {b} of order {q} generate a group of order {found}")
    return count


def _by_a_matrix(n: int, M: Sequence[Sequence[int]]) -> FiniteGroup:
    """Z_n^d : <M>."""
    d, powers = len(M), [np.eye(len(M), dtype=int)]
    while not (len(powers) > 1 and (powers[-1] == powers[0]).all()):
        powers.append(powers[-1] @ np.array(M) % n)
    k = len(powers) - 1

    def multiply(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
        moved = (np.array(x[:d]) + powers[x[d]] @ np.array(y[:d])) % n
        return (*map(int, moved), (x[d] + y[d]) % k)

    return from_elements(f"Z{n}^{d}:Z{k}", list(cartesian(*[range(n)] * d, range(k))), multiply)


def heisenberg(p: int) -> FiniteGroup:
    """Upper unitriangular 3 x 3 matrices modulo p, of order p^3."""
    elements = [(a, b, c) for a in range(p) for b in range(p) for c in range(p)]
    return from_elements(
        f"Heis{p}", elements, lambda x, y: ((x[0] + y[0]) % p, (x[1] + y[1]) % p, (x[2] + y[2] + x[0] * y[1]) % p)
    )


def cycle_of_blocks_pairs(m: int, j: int, n: int) -> int:
    """Non-real pairs of a real matrix that permutes m planes in a cycle, its m-th power turning by 2 pi j / n.

    Its eigenvalues are the m-th roots of e^(+-2 pi i j / n), the roots of unity exp(2 pi i (j + n l) / (n m)).

    Example:
        >>> cycle_of_blocks_pairs(3, 0, 9), cycle_of_blocks_pairs(1, 1, 9)
        (2, 1)
    """
    roots = [(j + n * l) % (n * m) for l in range(m)]
    return sum(2 * r % (n * m) != 0 for r in roots)


# DeltaProduct


def transpositions(images: Sequence[int]) -> list[tuple[int, int]]:
    """Swaps whose product, the right one first, is the permutation; as few as possible.

    Example:
        >>> transpositions((1, 2, 0))
        [(0, 1), (1, 2)]
    """
    left, swaps = list(images), []
    for i in range(len(left)):
        while left[i] != i:
            j = left[i]
            swaps.append((i, j))
            left = [j if x == i else i if x == j else x for x in left]
    return swaps


def deltaproduct_factors(images: Sequence[int], k: int) -> list[Matrix]:
    """The k generalised Householder factors of a permutation matrix, padded with beta = 0; Refuted where k is too few.

    Example:
        >>> len(deltaproduct_factors((1, 2, 3, 4, 0), 4))
        4
    """
    F, n = field(), len(images)
    swaps = transpositions(images)
    if len(swaps) > k:
        raise Refuted(f"{cycle_notation(images)} needs {len(swaps)} transpositions, {k} factors are given")
    keys = [[int(l == i) - int(l == j) for l in range(n)] for i, j in swaps]
    return [F.householder(key) for key in keys] + [F.eye(n)] * (k - len(swaps))


def check_deltaproduct(k: int, n: int = 5) -> int:
    """Products of k factors are the permutation matrices of S_n, and these track S_n: all products; returns |S_n|^2."""
    G, F = group(f"S{n}"), field()
    matrices = []
    for images in G.labels:
        product = F.eye(n)
        for factor in deltaproduct_factors(images, k):
            product = product @ factor
        if product != F.permutation(images):
            raise Refuted(f"the factors of {cycle_notation(images)} multiply to {product}")
        matrices.append(product)
    for a in range(G.order):
        for b in range(G.order):
            if matrices[a] @ matrices[b] != matrices[G.table[a, b]]:
                raise Refuted(f"{a}, {b}: the matrices do not multiply like the permutations")
    return G.order**2


@claim("thm:s5-impossibility/deltaproduct-4", "One head of DeltaProduct with k = 4 factors tracks S5, with 120 states")
def deltaproduct_four(effort: float = 1.0) -> Evidence:
    """The k = 4 tracker of S5 (end of app:s5-spectral-obstruction), and where it leaves the theorem's hypothesis."""
    cases = check_deltaproduct(4)
    S5 = group("S5")
    c, t = S5.index(permutation("(12345)", 5)), S5.index(permutation("(12)", 5))
    steps = confront(S5, [field().permutation(images) for images in S5.labels], c, t)
    if [step.holds for step in steps] != [True, False, False, False]:
        raise Refuted(f"the proof should fail for DeltaProduct_4 at the spectral bound: {steps}")
    return Evidence(
        cases + 120, "exact", note=f"120 states; a five-cycle has {steps[1].detail.split()[-1]} non-real pairs"
    )
