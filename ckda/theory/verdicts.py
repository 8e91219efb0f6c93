"""Does one CKDA layer track this group? For any table: a tracker, built and checked, an obstruction, or neither.

The search knows, in this order: a finite subgroup of SO(3) (thm:main-positive), one of those times Z_2^m (sign
coordinates), direct products (the heads of the factors side by side), several heads whose quotients together determine
the group, and the same for a larger hidden group that maps onto it. Groups it does not find are put to
:func:`find_obstruction`. A tracker with a many-to-one decoder may exist where neither finds anything: then the verdict
is `undecided`.

Example:
    >>> print(verdict(group("S4")))
    S4: tracked by one head of dimension 3 (prop:cube)
    >>> print(verdict(group("A4xZ5")))
    A4xZ5: tracked by 2 heads of dimensions 2 + 3 (prop:planar-groups, prop:cube)
    >>> print(verdict(group("S5")).answer)
    impossible
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb
from typing import Literal, NamedTuple

import numpy as np
import sympy

from ckda.groups import FiniteGroup, Part, direct_factors, from_table, group, may_be_rotations, recognise
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.groups import Head, SignedHouseholder, carry, reach, realise, with_sign_coordinates
from ckda.theory.obstructions import Obstruction, find_obstruction, frobenius, heisenberg

__all__ = ["Layer", "Verdict", "check_layer", "verdict"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer that tracks `group`: heads, each with a group of its own, and a joint decoder."""

    group: FiniteGroup
    heads: tuple[Head, ...]
    inputs: tuple[tuple[int, ...], ...]  #: [heads][G] the element of the head's group that an input drives
    hidden: int  #: order of the group of reachable tuples of head elements

    @property
    def dimensions(self) -> list[int]:
        return [head.dimension for head in self.heads]


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


def check_layer(layer: Layer) -> dict[tuple[int, ...], int]:
    """The joint decoder of a layer; Refuted where a head or the heads together do not track.

    Each head is checked on its own reachable states; then the tuples of head elements are enumerated and every update
    must agree with the group.
    """
    for head in {id(h): h for h in layer.heads}.values():
        reach(head)
    G, tables = layer.group, [head.group.table for head in layer.heads]
    start = tuple(head.group.identity for head in layer.heads)
    decode, frontier = {start: G.identity}, [start]
    while frontier:
        here = frontier.pop()
        for g in range(G.order):
            parts = zip(tables, layer.inputs, here, strict=True)
            image = tuple(int(table[inputs[g], x]) for table, inputs, x in parts)
            value = int(G.table[g, decode[here]])
            if image not in decode:
                decode[image] = value
                frontier.append(image)
            elif decode[image] != value:
                raise Refuted(f"{G.name}: heads {image} are reached with the products {decode[image]} and {value}")
    return decode


# one head


def single_head(G: FiniteGroup) -> Head | None:
    """A head that tracks G by thm:main-positive, or by it with sign coordinates; of least dimension among these.

    Example:
        >>> single_head(group("A4xZ2")).dimension, single_head(group("Z2xZ2xZ2")).dimension, single_head(group("Q8"))
        (3, 3, None)
    """
    name = recognise(G)
    if name is not None:
        return carry(realise(name), G)
    return next(_with_signs(G), None)


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


# several heads


def several_heads(G: FiniteGroup, most: int = 4) -> list[tuple[Head, np.ndarray]] | None:
    """Heads for quotients of G whose kernels meet in e, with the projections; as few heads as possible.

    Example:
        >>> [head.dimension for head, _ in several_heads(group("Dic3"))]
        [2, 2]
    """
    useful = [quotient for N in G.normal_subgroups if len(N) < G.order and (quotient := _quotient_head(G, N))]
    smallest = [u for u in useful if not any(v.kernel < u.kernel for v in useful)]
    for count in range(1, most + 1):
        if next(_jointly_faithful(smallest, count), None) is not None:
            choice = useful if comb(len(useful), count) <= 20000 else smallest
            best = min(_jointly_faithful(choice, count), key=lambda c: sum(u.head.dimension for u in c))
            return [(u.head, u.projection) for u in best]
    return None


class QuotientHead(NamedTuple):
    """A head that tracks G / kernel."""

    kernel: frozenset[int]
    head: Head
    projection: np.ndarray


def _quotient_head(G: FiniteGroup, N: frozenset[int]) -> QuotientHead | None:
    Q, projection = G.quotient(N)
    head = single_head(Q)
    return None if head is None else QuotientHead(N, head, projection)


def _jointly_faithful(heads: Sequence[QuotientHead], count: int) -> Iterator[tuple[QuotientHead, ...]]:
    for choice in combinations(heads, count):
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


def _layer(G: FiniteGroup, heads: list[tuple[Head, np.ndarray]], lifts: Sequence[int]) -> Layer:
    inputs = tuple(tuple(int(projection[x]) for x in lifts) for _, projection in heads)
    return _checked(Layer(G, tuple(head for head, _ in heads), inputs, 0))


def _checked(layer: Layer) -> Layer:
    return replace(layer, hidden=len(check_layer(layer)))


def merged_factors(G: FiniteGroup) -> list[Part]:
    """Direct factors of G, put together two by two wherever one head tracks the product.

    Example:
        >>> [part.group.order for part in merged_factors(group("Z2xZ3xA4xZ5"))]
        [12, 30]
    """
    parts = direct_factors(G)
    while True:
        pairs = ((a, b, _join(G, a, b)) for a, b in combinations(parts, 2))
        fit = next(((a, b, both) for a, b, both in pairs if len(parts) > 1 and single_head(both.group)), None)
        if fit is None:
            return sorted(parts, key=lambda part: part.group.order)
        parts = [part for part in parts if part is not fit[0] and part is not fit[1]] + [fit[2]]


def _join(G: FiniteGroup, a: Part, b: Part) -> Part:
    return G.subgroup({G.mul(x, y) for x in a.members for y in b.members})


def _product_layer(G: FiniteGroup, parts: Sequence[Part], layers: Sequence[Layer]) -> Layer:
    """The heads of the factors' layers side by side, each fed the component of the input in its factor."""
    components = {G.mul(*(p.members[i] for p, i in zip(parts, at, strict=True))): at for at in _places(parts)}
    heads = [(head, x, f) for f, layer in enumerate(layers) for head, x in zip(layer.heads, layer.inputs, strict=True)]
    inputs = tuple(tuple(x[components[g][f]] for g in range(G.order)) for _, x, f in heads)
    return _checked(Layer(G, tuple(head for head, _, _ in heads), inputs, 0))


def _places(parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    return product(*(range(part.group.order) for part in parts))


def find_layer(G: FiniteGroup) -> Layer | None:
    """A layer that tracks G, built and checked, or None."""
    head = single_head(G)
    if head is not None:
        return _layer(G, [(head, np.arange(G.order))], range(G.order))
    parts = merged_factors(G)
    if len(parts) > 1:
        layers = [find_layer(part.group) for part in parts]
        found = [layer for layer in layers if layer is not None]
        return _product_layer(G, parts, found) if len(found) == len(parts) else None
    for cover, lifts in [(G, list(range(G.order))), *covers(G)]:
        heads = several_heads(cover)
        if heads is not None:
            return _layer(G, heads, lifts)
    return None


def verdict(G: FiniteGroup) -> Verdict:
    """Whether one CKDA layer tracks G, by the paper's results and the constructions of this module.

    Example:
        >>> for name in ("A5xZ2", "Q8", "A6"):
        ...     print(verdict(group(name)))
        A5xZ2: tracked by one head of dimension 5 (cor:a5-four with sign coordinates)
        Q8: tracked by 2 heads of dimensions 2 + 2 (prop:planar-groups), hidden group of order 16
        A6: impossible by thm:s5-impossibility: c = (23456) and t = (12)(56) give the contradiction of its proof
    """
    obstruction = find_obstruction(G)
    layer = None if obstruction else find_layer(G)
    if layer is not None:
        return Verdict(G, "tracked", _describe(layer), layer)
    if obstruction is not None:
        return Verdict(G, "impossible", f"by {obstruction.label}: {obstruction.reason}", obstruction=obstruction)
    reason = (
        "it is no finite subgroup of SO(3), no such group times Z_2^m, not determined by quotients of these kinds, nor "
        "is a twist of it by a cyclic group; and the spectral obstruction does not apply"
    )
    return Verdict(G, "undecided", f"({reason})")


def _describe(layer: Layer) -> str:
    labels = ", ".join(dict.fromkeys(head.label for head in layer.heads))
    hidden = f", hidden group of order {layer.hidden}" if layer.hidden > layer.group.order else ""
    if len(layer.heads) == 1:
        return f"by one head of dimension {layer.dimensions[0]} ({labels}){hidden}"
    dimensions = " + ".join(map(str, layer.dimensions))
    return f"by {len(layer.heads)} heads of dimensions {dimensions} ({labels}){hidden}"


# claims

ZOO = ("Z1", "Z2", "Z6", "Z2xZ2xZ2", "Z3xZ3", "D4", "D5xZ3", "D3xD3", "A4xZ2", "S4xZ2", "A4xZ5", "Q8", "Dic3", "Dic4")


def check_no_conflict(G: FiniteGroup) -> bool:
    """That no group has both a tracker and an obstruction; returns whether it has either."""
    layer, obstruction = find_layer(G), find_obstruction(G)
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
