"""Groups that one layer tracks although no head does: Z_q : Z_4, and the finite groups of unit quaternions.

**Wrong letters.** A head may be driven by a transition that is wrong for it, as long as all heads together tell the
running product: :func:`frobenius_layer` (claim `frobenius-four`).

**Quaternion chains.** x -> a x b with b = f^-1 a f is H(af) H(f) for unit quaternions a and f (:func:`chain_identity`).
In an orthonormal frame that contains f, H(f) flips one sign, so this is a CKDA transition for every a, and f may be
chosen for each letter anew. The head's state is x -> A x B with A the running product of the a, so it tells A as soon as
B is known; and conj(B) is the running product of the conj(b), which the next head tracks. Frames are chosen such that
the last conj(b) lie in a binary dihedral group, which two planar heads track (claim `quaternion-chain`).

Example:
    >>> layer = chain_layer("2T")
    >>> layer.dimensions, layer.group.order
    ([4, 4, 2, 2], 24)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import flint
import numpy as np
import sympy

from ckda.groups import FiniteGroup, cyclic, dihedral, frobenius, from_elements, hamilton
from ckda.theory.claims import Refuted
from ckda.theory.exact import Field, Matrix, field, householder_key
from ckda.theory.groups import SignedHouseholder, planar_field, planar_rotation
from ckda.theory.layers import Layer, Stage, Turn, join

__all__ = [
    "binary_group",
    "chain_identity",
    "chain_layer",
    "dicyclic_layer",
    "dicyclic_places",
    "frobenius_layer",
    "hidden_product",
    "in_frame",
    "planar_layer",
    "turned_plane",
]

Quaternion = tuple[Any, ...]  #: (w, x, y, z), numbers of a field


# planar heads by angles


@lru_cache(maxsize=256)
def planar_layer(n: int, reflections: bool = False) -> Layer:
    """Z_n, or D_n with `reflections`, by one planar head (prop:planar-groups).

    Example:
        >>> planar_layer(7).dimensions, planar_layer(4, True).group
        ([2], FiniteGroup(D4, order 8))
    """
    G = dihedral(n) if reflections else cyclic(n)
    turns = tuple(Turn(n, *((label[0], bool(label[1])) if reflections else (label,))) for label in G.labels)
    everyone = tuple(range(G.order))
    return Layer(G, everyone, (Stage(turns, (G,), tuple((a,) for a in everyone), "prop:planar-groups"),))


def dicyclic_layer(G: FiniteGroup, n: int, place: Sequence[tuple[int, int]]) -> Layer:
    """Dic_n by D_2n and Z_4: a^j x^e turns the first plane by pi j / n, reflected if e, and the second by a quarter e times.

    Args:
        G: a group isomorphic to Dic_n.
        place: (j, e) of every element of G.
    """
    D, Z = planar_layer(2 * n, True), planar_layer(4)
    first = [D.group.index((j % (2 * n), e)) for j, e in place]
    return join(G, [(D, first), (Z, [e for _, e in place])])


# Z_q : Z_4


def in_frame(A: Matrix, frame: Sequence[Matrix]) -> SignedHouseholder | None:
    """A signed Householder form of an orthogonal matrix in the coordinates of an orthogonal frame; None if it has none."""
    F, d = A.field, A.shape[0]
    T = frame[0].stack(*frame[1:])
    lengths = tuple((f.T @ f)[0, 0] for f in frame)
    back = F.diag([F(1) / n for n in lengths]) @ T.T
    for signs in product((1, -1), repeat=d):
        u = householder_key(A @ T @ F.diag(signs) @ back)
        if u is not None:
            key = F.vector([(f.T @ u)[0, 0] for f in frame])
            return SignedHouseholder(signs, key, lengths)
    return None


@lru_cache(maxsize=8)
def frobenius_layer(q: int) -> Layer:
    """Z_q : Z_4, q = 1 mod 4 a prime, by two heads of four dimensions on R^2 + R^2.

    With R the turn by 2 pi / q, K = diag(1, -1), c = (R, R^i) and t(x, y) = (K y, x): t c t^-1 = c^i, i^2 = -1. Head 1 is
    driven by (R^j, 1) t^s for even s and by t^s for odd s, head 2 by t^s for even s and by c^j t^s "on one plane" for odd
    s. If (R^a, R^b) t^s are the two states, c^(a1 + i b1 + a2 + i b2) t^s is the running product.

    Example:
        >>> frobenius_layer(5).dimensions
        [4, 4]
    """
    G, F = frobenius(q, 4), planar_field(q)
    unit = G.labels[G.conjugate(G.index((1, 0)), G.index((0, 1)))][0]  # t c t^-1 = c^unit
    eye, e = F.eye(4), [F.eye(4).column(j) for j in range(4)]
    t = F.matrix([[0, 0, 1, 0], [0, 0, 0, -1], [1, 0, 0, 0], [0, 1, 0, 0]])
    powers = [eye, t, t @ t, t @ t @ t]
    first, second = ([turned_plane(F, j, q, plane) for j in range(q)] for plane in (0, 1))
    inverse = pow(unit, -1, q)
    frames = [e[1], e[3], e[0] + e[2], e[0] - e[2]], [e[0] + e[2], e[0] - e[2], e[1] + e[3], e[1] - e[3]]
    drives: tuple[list[Matrix], list[Matrix]] = ([], [])
    for j, s in G.labels:
        drives[0].append(first[j] @ powers[s] if s % 2 == 0 else powers[s])
        drives[1].append({0: eye, 2: eye, 1: first[j], 3: second[j * inverse % q]}[s] @ powers[s])
    return Layer(G, tuple(range(G.order)), tuple(_frobenius_stages(G, drives, frames, q)))


def turned_plane(F: Field, j: int, q: int, plane: int) -> Matrix:
    """The turn by 2 pi j / q of the first or the second plane of R^4."""
    R, rows = planar_rotation(F, j % q, q).tolist(), F.eye(4).tolist()
    for a, b in product(range(2), repeat=2):
        rows[2 * plane + a][2 * plane + b] = R[a][b]
    return F.matrix(rows)


def _frobenius_stages(
    G: FiniteGroup, drives: Sequence[Sequence[Matrix]], frames: Sequence[Sequence[Matrix]], q: int
) -> Iterator[Stage]:
    """The two heads: the second tells its own hidden group, (a, b, s) for the state (R^a, R^b) t^s."""
    hidden = from_elements(f"hidden{q}", list(product(range(q), range(q), range(4))), hidden_product(q))
    inverse = pow(_unit(G), -1, q)
    images = [(_hidden_label(j, s, inverse, q),) for j, s in G.labels]
    known = [((g,) for g in range(G.order)), ((hidden.index(label),) for (label,) in images)]
    for groups, image, matrices, frame in zip(((G,), (hidden,)), known, drives, frames, strict=True):
        forms = [in_frame(A, frame) for A in matrices]
        if None in forms:
            raise Refuted(f"{G.name}: a transition is not signed-Householder in its frame")
        yield Stage(tuple(f for f in forms if f is not None), groups, tuple(image), "frobenius-four")


def _unit(G: FiniteGroup) -> int:
    return int(G.labels[G.conjugate(G.index((1, 0)), G.index((0, 1)))][0])


def _hidden_label(j: int, s: int, inverse: int, q: int) -> tuple[int, int, int]:
    """What head 2 is driven by for c^j t^s, as (a, b, s)."""
    return {0: (0, 0, 0), 2: (0, 0, 2), 1: (j, 0, 1), 3: (0, j * inverse % q, 3)}[s]


def hidden_product(q: int) -> Callable[[tuple[int, int, int], tuple[int, int, int]], tuple[int, int, int]]:
    """(R^a, R^b) t^s times (R^c, R^d) t^r: t (R^c, R^d) t^-1 = (R^-d, R^c), since K R K = R^-1."""

    def multiply(x: tuple[int, int, int], y: tuple[int, int, int]) -> tuple[int, int, int]:
        (a, b, s), (c, d, r) = x, y
        for _ in range(s):
            c, d = -d % q, c
        return (a + c) % q, (b + d) % q, (s + r) % 4

    return multiply


# quaternions


def chain_identity() -> bool:
    """H(af) H(f) x = a x f^-1 a f, as polynomials in a and f, times the norms |a|^2 |f|^2 and |f|^2.

    Example:
        >>> chain_identity()
        True
    """
    _, *v = sympy.ring("a0:4,f0:4,x0:4", sympy.QQ)
    a, f, x = v[:4], v[4:8], v[8:]
    af = hamilton(a, f)
    once = _mirror(f, x)  # times |f|^2
    twice = _mirror(af, once)  # times |a|^2 |f|^2 more
    right = hamilton(hamilton(a, x), hamilton(hamilton(_conjugate(f), a), f))  # times |f|^2
    norm = sum(y * y for y in f)
    return all(p == q * norm for p, q in zip(twice, right, strict=True))


def _mirror(u: Sequence[Any], x: Sequence[Any]) -> list[Any]:
    """|u|^2 H(u) x."""
    norm, along = sum(y * y for y in u), sum(y * z for y, z in zip(u, x, strict=True))
    return [norm * z - 2 * along * y for y, z in zip(u, x, strict=True)]


def _conjugate(a: Sequence[Any]) -> list[Any]:
    return [a[0], *(-x for x in a[1:])]


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return sum((x * y for x, y in zip(a[1:], b[1:], strict=True)), a[0] * b[0])


def _carried(a: Sequence[Any], f: Sequence[Any]) -> Quaternion:
    """f^-1 a f."""
    norm = _dot(f, f)
    return tuple(x / norm for x in hamilton(hamilton(_conjugate(f), a), f))


def _group_of(name: str, F: Field, generators: Sequence[Quaternion]) -> FiniteGroup:
    """The finite group of unit quaternions that these generate; its labels are tuples of numbers of F."""
    left = [F.matrix([list(row) for row in zip(*_columns(a), strict=True)]) for a in generators]
    one = F.vector([1, 0, 0, 0])
    found, frontier = {one: None}, [one]
    while frontier:
        frontier = [v for v in dict.fromkeys(L @ x for x in frontier for L in left) if v not in found]
        found |= dict.fromkeys(frontier)
        if len(found) > 1000:
            raise Refuted(f"{name}: the quaternions generate more than 1000 elements")
    elements = list(found)
    matrices = {v: F.matrix([list(row) for row in zip(*_columns(_entries(v)), strict=True)]) for v in elements}
    G = from_elements(name, elements, lambda a, b: matrices[a] @ b)
    return FiniteGroup(name, G.table, tuple(_entries(v) for v in elements), G.identity, G.inverse)


def _columns(a: Sequence[Any]) -> list[list[Any]]:
    """The columns of x -> a x."""
    return [hamilton(a, [int(i == j) for i in range(4)]) for j in range(4)]


def _entries(v: Matrix) -> Quaternion:
    return tuple(x for (x,) in v.tolist())


@lru_cache(maxsize=4)
def binary_group(name: str) -> FiniteGroup:
    """2T = SL(2,3), 2O or 2I = SL(2,5) as unit quaternions (w, x, y, z) over Q, Q(sqrt 2) or Q(sqrt 5).

    Example:
        >>> [binary_group(name).order for name in ("2T", "2O", "2I")]
        [24, 48, 120]
    """
    F = _base(name)
    half = F("1/2")
    omega = (half,) * 4
    if name == "2T":
        more = (F(0), F(1), F(0), F(0))
    elif name == "2O":
        h = F.root(2) / 2
        more = (h, h, F(0), F(0))
    else:
        phi = (F.root(5) + 1) / 2
        more = (phi / 2, F(0), (phi - 1) / 2, half)
    return _group_of(name, F, [omega, more])


def _base(name: str) -> Field:
    return field(*{"2T": (sympy.sqrt(5),), "2O": (sympy.sqrt(2),), "2I": (sympy.sqrt(5),)}[name])


Frame = list[Quaternion]
Lift = Callable[[Any], Any]


def _frames(name: str) -> tuple[Field, Lift, list[Frame], Frame]:
    """The frames of a chain: those over the group's own field, and the last one, over a field that `lift` leads to."""
    F = _base(name)
    z, one = F(0), F(1)
    real = (one, z, z, z)
    units: Frame = [(z, one, z, z), (z, z, one, z), (z, z, z, one)]
    if name == "2T":
        phi = (F.root(5) + 1) / 2
        c = [one / 2, phi / 2, (1 - phi) / 2]  # 1/phi = phi - 1
        return F, lambda x: x, [[real, *units]], [real, *((z, *c[3 - s :], *c[: 3 - s]) for s in range(3))]
    if name == "2O":
        L = field(sympy.sqrt(2), sympy.sqrt(3))
        about_z: Frame = [real, units[2], (z, one, one, z), (z, one, -one, z)]
        about_x: Frame = [real, units[0], (z, z, one, one), (z, z, one, -one)]
        lift = _lift(F, L, L.root(2))
        return L, lift, [about_z, about_x], _bisectors(L, [0, 0, 1, 0], [0, 1, 1, 1], L.root(3))
    s = sympy.sqrt(sympy.Rational(3, 2) - 3 * sympy.sqrt(5) / 10)  # |v| / |u|, s^2 = 3 (5 - sqrt 5) / 10
    L = field(s)
    ratio = L(s)
    root = 5 - ratio * ratio * L("10/3")
    phi = (root + 1) / 2
    base_phi = (F.root(5) + 1) / 2
    turned = [_rotated_units(F, base_phi, k) for k in (1, 2)]
    frames = [[real, *units], *([real, *axes] for axes in turned)]
    return L, _lift(F, L, root), frames, _bisectors(L, [0, 0, 1, phi], [0, 1, 1, 1], ratio)


def _lift(F: Field, L: Field, root: Any) -> Lift:
    """The embedding of F = Q(root) into L."""
    generator = F.float(F.element([flint.fmpq(0), flint.fmpq(1)]))
    scale = round(L.float(root) / generator)
    if abs(scale * generator - L.float(root)) > 1e-9:
        raise ValueError("the generator of the field is not the root")
    image = root / scale

    def lift(x: Any) -> Any:
        low, high = F.coordinates(x)
        return L(sympy.QQ(int(low.p), int(low.q))) + L(sympy.QQ(int(high.p), int(high.q))) * image

    return lift


def _rotated_units(F: Field, phi: Any, power: int) -> Frame:
    """The three coordinate axes turned by a rotation of order five of the icosahedron, to this power."""
    five = (phi / 2, F(0), (phi - 1) / 2, F("1/2"))
    turn: Quaternion = (F(1), F(0), F(0), F(0))
    for _ in range(power):
        turn = tuple(hamilton(turn, five))
    units = [tuple(F(int(i == j)) for i in range(4)) for j in (1, 2, 3)]
    return [_carried(unit, turn) for unit in units]


def _bisectors(L: Field, u: Sequence[Any], v: Sequence[Any], ratio: Any) -> Frame:
    """1, the two bisectors of the axes of u and v, and their normal; ratio = |v| / |u|."""
    u, v = [L(x) for x in u], [L(x) for x in v]
    normal = [L(0), u[2] * v[3] - u[3] * v[2], u[3] * v[1] - u[1] * v[3], u[1] * v[2] - u[2] * v[1]]
    plus, minus = ([y + s * ratio * x for x, y in zip(u, v, strict=True)] for s in (1, -1))
    return [tuple(L(int(i == 0)) for i in range(4)), tuple(plus), tuple(minus), tuple(normal)]


@lru_cache(maxsize=4)
def chain_layer(name: str) -> Layer:
    """2T, 2O or 2I by a chain of four-dimensional heads that ends in two planar ones.

    Example:
        >>> chain_layer("2O").dimensions
        [4, 4, 4, 2, 2]
    """
    G = binary_group(name)
    L, lift, frames, last = _frames(name)
    choices = _choose(G, _base(name), frames, L, last)
    letters, stages, known = [list(label) for label in G.labels], list[Stage](), G
    for h, frame in enumerate([*frames, last]):
        if h == len(frames):
            letters = [[lift(x) for x in a] for a in letters]
        chosen = [choice[h] for choice in choices]
        F = L if h == len(frames) else _base(name)
        stages.append(_chain_stage(F, letters, frame, chosen, known, _images(known, letters, lift, h == len(frames))))
        letters = [_conjugate(_carried(a, frame[i])) for a, i in zip(letters, chosen, strict=True)]
        known = _group_of(f"{name}.{h + 1}", F, list(dict.fromkeys(map(tuple, letters))))
    end = dicyclic_layer(known, known.order // 4, _places(known))
    fed = end.over([known.labels.index(tuple(a)) for a in letters])
    return Layer(G, tuple(range(G.order)), (*stages, *fed.stages))


def _images(G: FiniteGroup, letters: Sequence[Sequence[Any]], lift: Lift, lifted: bool) -> list[int]:
    place = {tuple(lift(x) for x in label) if lifted else label: i for i, label in enumerate(G.labels)}
    return [place[tuple(a)] for a in letters]


def _chain_stage(
    F: Field,
    letters: Sequence[Sequence[Any]],
    frame: Frame,
    chosen: Sequence[int],
    known: FiniteGroup,
    images: Sequence[int],
) -> Stage:
    """The head x -> a x f^-1 a f in the coordinates of the frame: key a f, the sign of f flipped."""
    lengths, transitions = tuple(_dot(f, f) for f in frame), []
    for a, i in zip(letters, chosen, strict=True):
        af = hamilton(a, frame[i])
        key = F.vector([_dot(af, f) for f in frame])
        transitions.append(SignedHouseholder(tuple(-1 if j == i else 1 for j in range(4)), key, lengths))
    return Stage(tuple(transitions), (known,), tuple((x,) for x in images), "quaternion-chain")


def _choose(G: FiniteGroup, F: Field, frames: Sequence[Frame], L: Field, last: Frame) -> list[tuple[int, ...]]:
    """For every element which member of each frame carries it on, such that all end in one binary dihedral group.

    Searched in floats, over all choices; that they do end there is checked exactly afterwards.
    """
    floats = [np.array([[F.float(x) for x in f] for f in frame]) for frame in frames]
    floats.append(np.array([[L.float(x) for x in f] for f in last]))
    axis, found, start = _dihedral_axis(len(frames), L, last), list[tuple[int, ...]](), None
    for label in G.labels:
        a = np.array([F.float(x) for x in label])
        for choice in product(range(4), repeat=len(floats)):
            end = _carry_floats(a, floats, choice)
            if _ends_well(end, axis, start, {"2T": 3, "2O": 12, "2I": 15}[G.name]):
                found.append(choice)
                start = end[1:] if start is None and not _is_along(end, axis) else start
                break
        else:
            raise Refuted(f"{G.name}: no choice of frames carries {label} into the dihedral group")
    return found


def _dihedral_axis(frames: int, L: Field, last: Frame) -> np.ndarray:
    """The axis that all rotations end at: (1, 1, 1) for 2T, else u, which is half the sum of the bisectors' difference."""
    if frames == 1:
        return np.ones(3) / 3**0.5
    plus, minus = (np.array([L.float(x) for x in f[1:]]) for f in last[1:3])
    return (plus - minus) / np.linalg.norm(plus - minus)


def _carry_floats(a: np.ndarray, frames: Sequence[np.ndarray], choice: Sequence[int]) -> np.ndarray:
    for frame, i in zip(frames, choice, strict=True):
        f = frame[i] / np.linalg.norm(frame[i])
        a = np.array(_conjugate(hamilton(hamilton(_conjugate(f.tolist()), a.tolist()), f.tolist())))
    return a


def _is_along(a: np.ndarray, axis: np.ndarray) -> bool:
    return bool(abs(np.linalg.norm(a[1:]) - abs(a[1:] @ axis)) < 1e-9)


def _ends_well(a: np.ndarray, axis: np.ndarray, start: np.ndarray | None, n: int) -> bool:
    """A turn about the axis, or a half-turn at right angles to it, a multiple of pi / n away from the first of these."""
    if _is_along(a, axis):
        return True
    if abs(a[1:] @ axis) > 1e-9 or abs(a[0]) > 1e-9:
        return False
    start = a[1:] if start is None else start
    steps = np.arctan2(np.cross(start, a[1:]) @ axis, start @ a[1:]) * n / np.pi
    return bool(abs(steps - round(steps)) < 1e-6)


def _places(G: FiniteGroup) -> list[tuple[int, int]]:
    places = dicyclic_places(G)
    if places is None:
        raise Refuted(f"{G.name} of order {G.order} is not binary dihedral")
    return places


def dicyclic_places(G: FiniteGroup) -> list[tuple[int, int]] | None:
    """(j, e) with every element a^j x^e, x^2 = a^n, x a = a^-1 x; None for a group that is not Dic_n.

    Example:
        >>> from ckda.groups import group
        >>> dicyclic_places(group("Q8")) is None, dicyclic_places(group("D4")) is None
        (False, True)
    """
    n = G.order // 4
    for a in (i for i in range(G.order) if G.order == 4 * n and G.orders[i] == 2 * n):
        powers = {G.power(a, j): j for j in range(2 * n)}
        x = next(i for i in range(G.order) if i not in powers)
        if G.power(a, n) == G.mul(x, x) and G.mul(x, a) == G.mul(G.power(a, -1), x):
            place = {**{g: (j, 0) for g, j in powers.items()}, **{G.mul(g, x): (j, 1) for g, j in powers.items()}}
            return [place[g] for g in range(G.order)]
    return None
