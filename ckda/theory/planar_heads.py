"""Groups that planar heads track because they satisfy the laws of dihedral groups, and Z_n^2 : Z_4.

Every element of O(2) is a transition, so heads with states in D_n may be driven by anything (P12 of
docs/theory_proofs.md). Send generators g_1, ..., g_d of G to d-tuples of D_n, one tuple for each head. The images
and the g_i together generate a group of tuples (x_1, ..., x_r, g); if only (1, ..., 1, e) begins with ones, g is a
function of the x's, and any tuple above g may be its letter. Which tuples do is searched for.

Example:
    >>> from ckda.groups import group
    >>> planar_heads(group("Q8"), 4, 2).dimensions
    [2, 2]
"""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import gcd, lcm

import numpy as np

from ckda.groups import FiniteGroup, from_elements
from ckda.theory.claims import Refuted
from ckda.theory.exact import Matrix
from ckda.theory.groups import planar_field
from ckda.theory.layers import Layer, Stage, Turn, join
from ckda.theory.quaternions import hidden_product, in_frame, planar_layer, turned_plane

__all__ = ["few_generators", "planar_heads", "search_planar_heads", "square_layer", "squares_commute"]

Tuple = tuple[tuple[int, bool], ...]  #: elements (turn by 2 pi j / n, after a reflection or not) of D_n


def squares_commute(G: FiniteGroup) -> bool:
    """[x^2, y^2] = 1: a law of all dihedral groups.

    Example:
        >>> from ckda.groups import group
        >>> squares_commute(group("Q8")), squares_commute(group("A4"))
        (True, False)
    """
    squares = np.unique(np.diagonal(G.table))
    products = G.table[np.ix_(squares, squares)]
    return bool((products == products.T).all())


def few_generators(G: FiniteGroup, most: int = 3) -> list[int] | None:
    """The first generating list of the least length up to `most`."""
    for d in range(1, most + 1):
        for chosen in combinations(range(G.order), d):
            if len(G.generate(chosen)) == G.order:
                return list(chosen)
    return None


@lru_cache(maxsize=16)
def tuples_up_to_automorphisms(n: int, d: int) -> tuple[Tuple, ...]:
    """d-tuples of D_n up to its automorphisms: a turn by j becomes one by u j, u prime to n; reflections move along by v.

    Example:
        >>> len(tuples_up_to_automorphisms(8, 2))
        34
    """
    seen, found = set[Tuple](), list[Tuple]()
    for candidate in product([(j, flip) for flip in (False, True) for j in range(n)], repeat=d):
        if candidate not in seen:
            found.append(candidate)
            for u, v in product((u for u in range(n) if gcd(u, n) == 1), range(n)):
                seen.add(tuple(((u * j + v * flip) % n, flip) for j, flip in candidate))
    return tuple(found)


@lru_cache(maxsize=16)
def _dihedral_table(n: int) -> np.ndarray:
    """[2n, 2n] products; the number of (j, flip) is j + n flip."""
    j, flip = np.arange(2 * n) % n, np.arange(2 * n) // n
    turned = np.where(flip[:, None] == 1, j[:, None] - j, j[:, None] + j) % n
    return turned + n * ((flip[:, None] + flip) % 2)


def _generated(tables: Sequence[np.ndarray], generators: Sequence[Sequence[int]], limit: int) -> np.ndarray | None:
    """[N, r + 1] the tuples that the generators make, identities are number 0; None beyond `limit`."""
    weights = np.cumprod([1, *(len(T) for T in tables[:0:-1])])[::-1]
    found, codes, frontier = [np.zeros((1, len(tables)), int)], np.zeros(1, int), np.zeros((1, len(tables)), int)
    while len(frontier):
        new = np.concatenate([np.stack([T[frontier[:, i], g[i]] for i, T in enumerate(tables)], 1) for g in generators])
        numbers, first = np.unique(new @ weights, return_index=True)
        fresh = ~np.isin(numbers, codes)
        frontier = new[first[fresh]]
        found.append(frontier)
        codes = np.concatenate([codes, numbers[fresh]])
        if len(codes) > limit:
            return None
    return np.concatenate(found)


def planar_heads(G: FiniteGroup, n: int, heads: int, tries: int = 4000, limit: int = 20_000) -> Layer | None:
    """A layer of so many planar heads with states in D_n, or None if none is among the choices tried (seeded)."""
    H = G.relabelled([G.identity, *(a for a in range(G.order) if a != G.identity)])
    back = [G.identity, *(a for a in range(G.order) if a != G.identity)]
    generators = few_generators(H)
    if generators is None:
        return None
    tables = [_dihedral_table(n)] * heads + [np.asarray(H.table)]
    for chosen in _choices(tuples_up_to_automorphisms(n, len(generators)), heads, tries):
        letters = [(*(j + n * flip for j, flip in (x[i] for x in chosen)), g) for i, g in enumerate(generators)]
        found = _generated(tables, letters, limit)
        if found is not None and (found[:, :-1].any(1) | (found[:, -1] == 0)).all():
            above = {back[g]: x for *x, g in reversed(found.tolist())}
            return _layer_of(G, n, [above[g] for g in range(G.order)])
    return None


def _choices(candidates: Sequence[Tuple], heads: int, tries: int) -> Iterator[Sequence[Tuple]]:
    """Every set of so many candidates in a random order, or as many random ones as are tried."""
    rng = random.Random(0)
    if len(candidates) ** heads < 10 * tries:
        every = list(combinations(candidates, heads))
        yield from rng.sample(every, len(every))
    else:
        yield from (rng.sample(candidates, heads) for _ in range(tries))


def _layer_of(G: FiniteGroup, n: int, drives: Sequence[Sequence[int]]) -> Layer:
    """Heads in D_n that the letter g drives by the elements drives[g]."""
    whole = planar_layer(n, reflections=True)
    place = {(t.j % n, t.flip): a for a, t in enumerate(whole.stages[0].transitions) if isinstance(t, Turn)}
    parts = [[place[x[i] % n, x[i] >= n] for x in drives] for i in range(len(drives[0]))]
    return join(G, [(whole, images) for images in parts])


def search_planar_heads(G: FiniteGroup, most: int = 4) -> Layer | None:
    """As few planar heads as the search finds, in D_e and D_2e for the exponent e; None where squares do not commute."""
    e = lcm(*G.orders)
    if e > 30 or not squares_commute(G):
        return None
    found = (planar_heads(G, n, heads) for heads in range(2, most + 1) for n in (e, 2 * e))
    return next((layer for layer in found if layer is not None), None)


# Z_n^2 : Z_4


@lru_cache(maxsize=4)
def square_layer(n: int) -> Layer:
    """Z_n^2 : Z_4, t acting by (a, b) -> (-b, a), by four heads of four dimensions (P13).

    The heads are those of `frobenius-four`, each twice, driven by one coordinate of (a, b): two by (R^a, 1) t^s and
    (1, R^b) t^s where s is even and by t^s where it is odd, two the other way round. Their exponents add up.

    Example:
        >>> square_layer(3).group.order, square_layer(3).dimensions
        (36, [4, 4, 4, 4])
    """
    G = from_elements(f"Z{n}^2:Z4", list(product(range(n), range(n), range(4))), hidden_product(n))
    F = planar_field(n)
    e, t = [F.eye(4).column(j) for j in range(4)], F.matrix([[0, 0, 1, 0], [0, 0, 0, -1], [1, 0, 0, 0], [0, 1, 0, 0]])
    frames = [e[1], e[3], e[0] + e[2], e[0] - e[2]], [e[0] + e[2], e[0] - e[2], e[1] + e[3], e[1] - e[3]]

    def matrix(a: int, b: int, s: int) -> Matrix:
        return turned_plane(F, a, n, 0) @ turned_plane(F, b, n, 1) @ t**s

    def head(odd: int, coordinate: int) -> tuple[Layer, list[int]]:
        drives = [(*(x if s % 2 == odd and i == coordinate else 0 for i, x in enumerate(ab)), s) for *ab, s in G.labels]
        images = [G.index(drive) for drive in drives]
        letters = sorted(set(images))
        forms = [in_frame(matrix(*G.labels[a]), frames[odd]) for a in letters]
        if None in forms:
            raise Refuted(f"{G.name}: a transition is not signed-Householder in its frame")
        transitions = tuple(form for form in forms if form is not None)
        stage = Stage(transitions, (G,), tuple((a,) for a in letters), "frobenius-four/squares")
        return Layer(G, tuple(letters), (stage,)), images

    return join(G, [head(odd, coordinate) for odd in (0, 1) for coordinate in (0, 1)])
