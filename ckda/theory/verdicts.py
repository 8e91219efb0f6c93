"""Does one CKDA layer track this group? For any table: a tracker, built and checked, an obstruction, or neither.

The search knows, in this order: a group that one construction tracks (a finite subgroup of SO(3), one of those times
Z_2^m, a binary dihedral group, Z_q : Z_4, Z_n^2 : Z_4, a finite group of unit quaternions), direct products, several
quotients whose kernels meet in e, the same for a larger group that maps onto it (a twist by a cyclic group, or the
product of two normal subgroups that commute), and planar heads for a group with the laws of dihedral groups. What is
tracked is so closed under subgroups, quotients and products (docs/theory_proofs.md).
Groups that it does not find are put to :func:`find_obstruction`; what neither decides is `undecided`.

Example:
    >>> print(verdict(group("S4")))
    S4: tracked by one head of dimension 3 (prop:cube)
    >>> print(verdict(group("SL(2,3)")))
    SL(2,3): tracked by 4 heads of dimensions 4 + 4 + 2 + 2 (quaternion-chain, prop:planar-groups)
    >>> print(verdict(group("S5")).answer)
    impossible
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import combinations, product
from json import loads
from math import comb, isqrt, lcm
from typing import Literal, NamedTuple

import numpy as np
import sympy

from ckda.groups import (
    FiniteGroup,
    Part,
    direct_factors,
    frobenius,
    from_permutations,
    from_table,
    group,
    isomorphism,
    may_be_rotations,
    recognise,
)
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.groups import Head, SignedHouseholder, carry, realise, with_sign_coordinates
from ckda.theory.layers import Layer, check_layer, join, one_head
from ckda.theory.obstructions import Obstruction, find_obstruction, heisenberg
from ckda.theory.planar_heads import planar_heads, search_planar_heads, square_layer, squares_commute
from ckda.theory.quaternions import (
    binary_group,
    chain_identity,
    chain_layer,
    dicyclic_layer,
    dicyclic_places,
    frobenius_layer,
    planar_layer,
)

__all__ = ["SmallGroup", "Verdict", "find_layer", "small_groups", "verdict"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The answer for one group, with its reason: the layer, the obstruction, or what was tried."""

    group: FiniteGroup
    answer: Literal["tracked", "impossible", "undecided"]
    reason: str
    layer: Layer | None = None
    obstruction: Obstruction | None = None

    def __str__(self) -> str:
        return f"{self.group.name}: {self.answer} {self.reason}"


# one construction


def atom(G: FiniteGroup) -> Layer | None:
    """The layer of one construction that tracks G, or None.

    Example:
        >>> [atom(group(name)).dimensions for name in ("A4xZ2", "Z2xZ2xZ2", "Q8", "Frob20", "SL(2,3)")]
        [[3], [3], [2, 2], [4, 4], [4, 4, 2, 2]]
        >>> atom(group("S5"))
    """
    name = recognise(G)
    if name is not None:
        known = planar_layer(int(name[1:]), name[0] == "D") if name[0] in "ZD" else one_head(realise(name))
        return _carried(known, G)
    head = next(_with_signs(G), None)
    if head is not None:
        return one_head(head)
    places = dicyclic_places(G) if G.order % 4 == 0 else None
    if places is not None:
        return dicyclic_layer(G, G.order // 4, places)
    return _special(G)


def _special(G: FiniteGroup) -> Layer | None:
    """The layer of Z_q : Z_4 with q = 1 mod 4, of Z_n^2 : Z_4, or of 2T, 2O, 2I."""
    q = G.order // 4
    if G.order % 4 == 0 and q % 4 == 1 and q <= 37 and sympy.isprime(q) and isomorphism(G, frobenius(q, 4)):
        return _carried(frobenius_layer(q), G)
    n = isqrt(G.order) // 2
    if 4 * n * n == G.order and 3 <= n <= 6 and isomorphism(G, square_layer(n).group):
        return _carried(square_layer(n), G)
    for name, order in (("2T", 24), ("2O", 48), ("2I", 120)):
        if G.order == order and isomorphism(G, binary_group(name)):
            return _carried(chain_layer(name), G)
    return None


def _carried(layer: Layer, G: FiniteGroup) -> Layer:
    images = isomorphism(G, layer.group)
    if images is None:
        raise ValueError(f"{G} is not isomorphic to {layer.group}")
    return join(G, [(layer, images)])


def _with_signs(G: FiniteGroup) -> Iterator[Head]:
    """Heads for G = K x E with K a finite subgroup of SO(3) and E elementary abelian of order 2^m, smallest E first.

    The first has the least dimension: A4, S4 and A5 have no factor Z_2 to spare, and every other K is planar.
    """
    normal = G.normal_subgroups
    for E in normal:
        if len(E) == 1 or any(G.orders[a] > 2 for a in E):
            continue
        for K in normal:
            if len(K) * len(E) != G.order or len(K & E) > 1 or not may_be_rotations([G.orders[a] for a in K]):
                continue
            part = G.subgroup(K)
            name = recognise(part.group)
            if name:
                yield _signed(G, carry(realise(name), part.group), part.members, sorted(E))


def _signed(G: FiniteGroup, core: Head, members: list[int], signs: list[int]) -> Head:
    basis: list[int] = []
    for a in signs:
        if a not in G.generate(basis):
            basis.append(a)
    bits_of = {G.identity: (0,) * len(basis)}
    for i, a in enumerate(basis):
        bits_of |= {G.mul(a, x): (*bits[:i], 1, *bits[i + 1 :]) for x, bits in list(bits_of.items())}
    split = {G.mul(k, e): (i, bits) for i, k in enumerate(members) for e, bits in bits_of.items()}
    first, bits = zip(*(split[a] for a in range(G.order)), strict=True)
    if len(basis) == 1 and core.dimension == 3:  # -R is signed-Householder where R is, and -I no rotation of space
        return _negated(G, core, first, [b for (b,) in bits])
    return with_sign_coordinates(core, G, first, bits)


def _negated(G: FiniteGroup, core: Head, first: Sequence[int], bits: Sequence[int]) -> Head:
    forms = [core.transitions[i] for i in first]
    signs = [tuple((-1) ** bit * s for s in form.signs) for form, bit in zip(forms, bits, strict=True)]
    transitions = tuple(SignedHouseholder(s, form.key) for s, form in zip(signs, forms, strict=True))
    return Head(G, transitions, f"{core.label} with -I")


# several


class Quotient(NamedTuple):
    """A layer that tracks G / kernel."""

    kernel: frozenset[int]
    layer: Layer
    projection: np.ndarray

    @property
    def size(self) -> int:
        """The sum of the dimensions of its heads."""
        return sum(self.layer.dimensions)


def by_quotients(G: FiniteGroup, most: int = 4) -> list[Quotient] | None:
    """Layers for quotients of G whose kernels meet in e; as few as possible, then of the least dimensions.

    Example:
        >>> [found.layer.dimensions for found in by_quotients(group("Dic3"))]
        [[2, 2]]
    """
    useful = [found for N in G.normal_subgroups if len(N) < G.order and (found := _quotient(G, N))]
    smallest = [u for u in useful if not any(v.kernel < u.kernel for v in useful)]
    for count in range(1, most + 1):
        if next(_jointly_faithful(smallest, count), None) is not None:
            choice = useful if comb(len(useful), count) <= 20000 else smallest
            return list(min(_jointly_faithful(choice, count), key=lambda c: sum(u.size for u in c)))
    return None


def _quotient(G: FiniteGroup, N: frozenset[int]) -> Quotient | None:
    Q, projection = G.quotient(N)
    layer = atom(Q)
    return None if layer is None else Quotient(N, layer, projection)


def _jointly_faithful(found: Sequence[Quotient], count: int) -> Iterator[tuple[Quotient, ...]]:
    for choice in combinations(found, count):
        if len(frozenset.intersection(*(u.kernel for u in choice))) == 1:
            yield choice


def covers(G: FiniteGroup, limit: int = 200) -> Iterator[tuple[FiniteGroup, list[int]]]:
    """Groups that map onto G: {(g, z) in G x Z_(p n) : chi(g) = z mod n} for every chi of G onto Z_n, n a power of p.

    Yields the group and a preimage of every element of G. Such a twist can be determined by its quotients where G is
    not: that of Q_8 is a subgroup of D_4 x Z_4.
    """
    for N in G.normal_subgroups:
        n = G.order // len(N)
        primes = sympy.primefactors(n)
        chi = _character(G, N, n) if len(primes) == 1 and G.order * primes[0] <= limit else None
        if chi is not None:
            m = n * primes[0]
            elements = [(g, z) for g in range(G.order) for z in range(m) if z % n == chi[g]]
            place = {x: i for i, x in enumerate(elements)}
            table = [[place[int(G.table[a, b]), (y + z) % m] for b, z in elements] for a, y in elements]
            yield from_table(table, f"{G.name}~Z{m}"), [place[g, int(chi[g])] for g in range(G.order)]


def _character(G: FiniteGroup, N: frozenset[int], n: int) -> np.ndarray | None:
    """A homomorphism of G onto Z_n with kernel N; None where the quotient is not cyclic."""
    Q, projection = G.quotient(N)
    generator = next((a for a in range(n) if Q.orders[a] == n), None)
    if generator is None:
        return None
    value = {Q.power(generator, i): i for i in range(n)}
    return np.array([value[int(x)] for x in projection])


def central_products(G: FiniteGroup) -> Iterator[tuple[Part, Part]]:
    """Proper normal subgroups A, B that commute, with A B = G: then A x B maps onto G.

    Example:
        >>> sorted({tuple(sorted((a.group.order, b.group.order))) for a, b in central_products(group("D4xZ4"))})[:2]
        [(4, 8), (4, 16)]
    """
    normal = [N for N in G.normal_subgroups if 1 < len(N) < G.order]
    for A, B in combinations(normal, 2):
        if len(A) * len(B) == G.order * len(A & B) and A != B:
            a, b = sorted(A), sorted(B)
            if (G.table[np.ix_(a, b)] == G.table[np.ix_(b, a)].T).all():
                yield G.subgroup(A), G.subgroup(B)


def merged_factors(G: FiniteGroup) -> list[Part]:
    """Direct factors of G, put together two by two wherever one head tracks the product.

    Example:
        >>> [part.group.order for part in merged_factors(group("Z2xZ3xA4xZ5"))]
        [12, 30]
    """
    parts = direct_factors(G)
    while True:
        pairs = ((a, b, _together(G, a, b)) for a, b in combinations(parts, 2))
        fit = next(((a, b, both) for a, b, both in pairs if len(parts) > 1 and _by_one_head(both.group)), None)
        if fit is None:
            return sorted(parts, key=lambda part: part.group.order)
        parts = [part for part in parts if part is not fit[0] and part is not fit[1]] + [fit[2]]


def _by_one_head(G: FiniteGroup) -> bool:
    return recognise(G) is not None or next(_with_signs(G), None) is not None


def _together(G: FiniteGroup, a: Part, b: Part) -> Part:
    return G.subgroup({G.mul(x, y) for x in a.members for y in b.members})


def _of_parts(G: FiniteGroup, parts: Sequence[Part], depth: int) -> Layer | None:
    """The layers of commuting subgroups side by side, each fed a component of the input."""
    layers = list[Layer]()
    for part in parts:
        layer = find_layer(part.group, depth)
        if layer is None:
            return None
        layers.append(layer)
    places = product(*(range(part.group.order) for part in parts))
    components = {G.mul(*(p.members[i] for p, i in zip(parts, at, strict=True))): at for at in places}
    fed = [[components[g][f] for g in range(G.order)] for f in range(len(parts))]
    return join(G, list(zip(layers, fed, strict=True)))


def find_layer(G: FiniteGroup, depth: int = 2) -> Layer | None:
    """A layer that tracks G, or None; :func:`check_layer` has not been run on it. `depth`: central products in a row."""
    layer = _of_smaller_groups(G, depth)
    if layer is None:
        return search_planar_heads(G)
    if sum(layer.dimensions) > 4 and G.order <= 32 and squares_commute(G):
        return planar_heads(G, lcm(*G.orders), 2, tries=600) or layer
    return layer


def _of_smaller_groups(G: FiniteGroup, depth: int) -> Layer | None:
    layer = atom(G)
    if layer is not None:
        return layer
    parts = merged_factors(G)
    if len(parts) > 1:
        return _of_parts(G, parts, depth)
    quotients = by_quotients(G)
    if quotients is not None:
        return join(G, [(u.layer, u.projection.tolist()) for u in quotients])
    for pair in central_products(G) if depth else ():
        layer = _of_parts(G, pair, depth - 1)
        if layer is not None:
            return layer
    for cover, lifts in covers(G):
        quotients = by_quotients(cover, 3)
        if quotients is not None:
            return join(G, [(u.layer, u.projection[lifts].tolist()) for u in quotients])
    return None


def verdict(G: FiniteGroup) -> Verdict:
    """Whether one CKDA layer tracks G, every element being a letter, by the paper's results and these constructions.

    Example:
        >>> for name in ("A5xZ2", "Q8", "A6"):
        ...     print(verdict(group(name)))
        A5xZ2: tracked by one head of dimension 5 (cor:a5-four with sign coordinates)
        Q8: tracked by 2 heads of dimensions 2 + 2 (prop:planar-groups)
        A6: impossible by thm:s5-impossibility: c = (23456) and t = (12)(56) give the contradiction of its proof
    """
    obstruction = find_obstruction(G)
    if obstruction is not None:
        return Verdict(G, "impossible", f"by {obstruction.label}: {obstruction.reason}", obstruction=obstruction)
    layer = find_layer(G)
    if layer is not None:
        check_layer(layer)
        return Verdict(G, "tracked", describe(layer), layer)
    reason = "(no construction of this library tracks it, and neither obstruction applies)"
    return Verdict(G, "undecided", reason)


def describe(layer: Layer) -> str:
    """The heads of a layer in words."""
    labels = ", ".join(layer.labels)
    if len(layer.stages) == 1:
        return f"by one head of dimension {layer.dimensions[0]} ({labels})"
    return f"by {len(layer.stages)} heads of dimensions {' + '.join(map(str, layer.dimensions))} ({labels})"


# every group of order up to 63


class SmallGroup(NamedTuple):
    """A group of the list: its order, its number in the SmallGroups library, GAP's description, generators."""

    order: int
    number: int
    description: str
    generators: list[list[int]]

    @property
    def name(self) -> str:
        return f"[{self.order},{self.number}] {self.description}"

    def group(self) -> FiniteGroup:
        """The group of these permutations."""
        return from_permutations(self.generators or [[0]], self.name)


@lru_cache(maxsize=1)
def small_groups() -> tuple[SmallGroup, ...]:
    """The 319 groups of order up to 63, one of each isomorphism type.

    Example:
        >>> len(small_groups()), small_groups()[7].description
        (319, 'C6')
    """
    data = loads((files("ckda.theory") / "small_groups.json").read_text())
    return tuple(SmallGroup(*row) for row in data["groups"])


# claims

ZOO = ("Z1", "Z2", "Z6", "Z2xZ2xZ2", "Z3xZ3", "D4", "D5xZ3", "D3xD3", "A4xZ2", "S4xZ2", "A4xZ5", "Q8", "Dic3", "Dic4")


def check_no_conflict(G: FiniteGroup) -> bool:
    """That no group has both a tracker and an obstruction; returns whether it has either."""
    layer, obstruction = find_layer(G), find_obstruction(G)
    if layer is not None:
        check_layer(layer)
    if layer is not None and obstruction is not None:
        raise Refuted(f"{G.name} is tracked by heads {layer.dimensions} and excluded by {obstruction.label}")
    return layer is not None or obstruction is not None


@claim("thm:main-positive/verdicts", "Trackers and obstructions never meet, on a zoo of tables")
def verdict_consistency(effort: float = 1.0) -> Evidence:
    """Both searches on every table of a zoo: trackers found are checked, and no obstruction excludes one of them."""
    names = ZOO if effort >= 0.5 else ZOO[:8]
    zoo = [group(name) for name in names] + [frobenius(5, 4), frobenius(7, 3), heisenberg(3), group("S5")]
    decided = sum(check_no_conflict(G) for G in zoo)
    return Evidence(len(zoo), "exact", note=f"{decided} of {len(zoo)} groups decided")


@claim("frobenius-four", "Z_q : Z_4 with q = 1 mod 4 is tracked by two heads of dimension four")
def frobenius_four(effort: float = 1.0, build: Callable[[int], Layer] = frobenius_layer) -> Evidence:
    """The decoder on every reachable pair of states and every letter, exactly: q = 5, at full effort 13 too."""
    decoded = {q: check_layer(build(q)) for q in ((5, 13) if effort >= 1 else (5,))}
    pairs = {q: found[0].pairs for q, found in decoded.items()}
    check_layer(square_layer(3))
    note = ", ".join(f"q = {q}: {count} joint states" for q, count in pairs.items()) + "; Z_3^2 : Z_4"
    return Evidence(sum(count * 4 * q for q, count in pairs.items()), "exact", note=note, data={"joint": pairs})


#: groups of order 32 with the laws of dihedral groups and a small layer: their numbers
DIHEDRAL_LAWS = (7, 43, 6)


@claim("planar-heads", "Groups with the laws of dihedral groups are tracked by planar heads, Hol(Z_8) by two")
def planar_only(effort: float = 1.0, build: Callable[[FiniteGroup], Layer | None] = search_planar_heads) -> Evidence:
    """Groups of order 32 that no other construction here tracks: their layers, the decoder on every reachable pair."""
    heads, cases = {}, 0
    for number in DIHEDRAL_LAWS if effort >= 1 else DIHEDRAL_LAWS[:1]:
        G = next(small for small in small_groups() if (small.order, small.number) == (32, number)).group()
        layer = build(G)
        if layer is None or set(layer.dimensions) != {2}:
            raise Refuted(f"{G.name}: no planar heads were found")
        cases += sum(found.pairs for found in check_layer(layer)) * G.order
        heads[G.name] = len(layer.stages)
    note = ", ".join(f"{name}: {count} heads" for name, count in heads.items())
    return Evidence(cases, "exact", note=note, data={"heads": heads})


@claim(
    "quaternion-chain", "Every finite group of unit quaternions is tracked by one layer: 2T, 2O, 2I by chains of heads"
)
def quaternion_chain(effort: float = 1.0, build: Callable[[str], Layer] = chain_layer) -> Evidence:
    """H(af) H(f) x = a x f^-1 a f as polynomials; then every reachable pair of every head, every letter, exactly."""
    if not chain_identity():
        raise Refuted("H(af) H(f) x is not a x f^-1 a f")
    names = ("2T", "2O", "2I") if effort >= 1 else ("2T",)
    cases, heads = 0, {}
    for name in names:
        layer = build(name)
        decoded = check_layer(layer)
        cases += sum(found.pairs for found in decoded) * layer.group.order
        heads[name] = layer.dimensions
    note = ", ".join(f"{name} by {'+'.join(map(str, dims))}" for name, dims in heads.items())
    return Evidence(cases, "exact", note=note, data={"heads": heads})
