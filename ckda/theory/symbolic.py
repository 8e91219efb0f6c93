"""Claims proved with symbols: identities of polynomials that hold for every angle, gate and key, in a few lines each."""

from collections.abc import Callable
from itertools import product
from typing import Any

import sympy

from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.groups import rotation_of

__all__ = ["characteristic_at_gate", "norm_gap"]


def _equal(left: Any, right: Any, what: str) -> None:
    if sympy.expand(left - right) != 0:
        raise Refuted(f"{what}: {sympy.expand(left)} is not {sympy.expand(right)}")


@claim("prop:axis-test/symbolic", "R D is symmetric for a sign diagonal D of determinant -1 only as the axis test says")
def axis_identities(effort: float = 1.0, rotation: Callable = rotation_of) -> Evidence:
    """R of the quaternion (w, x, y, z): for D = Diag(-1, 1, 1) the skew part of R D is 4xy, 4xz, -4wx, and so on.

    H_k D has determinant -det D, so R = H_k D needs det D = -1. With one -1 (say the first) R D is symmetric iff
    x y = x z = w x = 0: x = 0 (the axis has a zero there) or a half-turn about that axis. With three R is symmetric:
    w = 0 or x = y = z = 0, a half-turn or 1. Conversely such R D is symmetric and orthogonal of determinant -1, and its
    trace is 1 (a reflection) unless it is -1, where another D does.
    """
    _, w, x, y, z = sympy.ring("w,x,y,z", sympy.QQ)
    R = rotation((w, x, y, z))
    v = (x, y, z)
    for i in range(3):
        a, b = (j for j in range(3) if j != i)
        signs = [-1 if j == i else 1 for j in range(3)]
        A = [[R[r][c] * signs[c] for c in range(3)] for r in range(3)]
        skew = {A[i][a] - A[a][i], A[i][b] - A[b][i]}
        if not skew <= {s * 4 * v[i] * v[j] for s in (1, -1) for j in (a, b)} or A[a][b] - A[b][a] not in (
            4 * w * v[i],
            -4 * w * v[i],
        ):
            raise Refuted(f"the skew part of R D with D_{i} = -1 is {skew}, {A[a][b] - A[b][a]}")
    for i, j in ((0, 1), (0, 2), (1, 2)):
        if R[i][j] - R[j][i] not in [s * 4 * w * c for s in (1, -1) for c in v]:
            raise Refuted("the skew part of R is not 4 w times a coordinate")
    return Evidence(12, "exact", note="nine entries for the three single signs, three for -I")


@claim(
    "prop:planar-groups/symbolic",
    "H(a) Diag(1, -1) turns by 2a - pi and products of keys' mirrors add angles, for all angles",
)
def planar_identities(effort: float = 1.0, factor: int = 2) -> Evidence:
    """With key (cos a, sin a): H(a) Diag(1, -1) is the turn by 2a - pi; H(a) H(b) the turn by 2(a - b); R(s) R(t) = R(s + t)."""
    a, b = sympy.symbols("a b", real=True)

    def mirror(t: Any) -> sympy.Matrix:
        k = sympy.Matrix([sympy.cos(t), sympy.sin(t)])
        return sympy.eye(2) - factor * k * k.T

    def turn(t: Any) -> sympy.Matrix:
        return sympy.Matrix([[sympy.cos(t), -sympy.sin(t)], [sympy.sin(t), sympy.cos(t)]])

    identities = {
        "H(a) Diag(1, -1)": mirror(a) * sympy.diag(1, -1) - turn(2 * a - sympy.pi),
        "H(a) H(b)": mirror(a) * mirror(b) - turn(2 * (a - b)),
        "R(a) R(b)": turn(a) * turn(b) - turn(a + b),
        "K R(a) K": sympy.diag(1, -1) * turn(a) * sympy.diag(1, -1) - turn(-a),
    }
    for name, gap in identities.items():
        if any(sympy.simplify(sympy.expand_trig(entry)) != 0 for entry in gap):
            raise Refuted(f"{name} is not what it should be")
    return Evidence(16, "exact", note="so Z_n and D_n are realised for every n")


def characteristic_at_gate(n: int) -> tuple[Any, Any]:
    """p(alpha_0) for p the characteristic polynomial of (I - beta k k^T) Diag(alpha), and what it should be."""
    alpha, k, beta = sympy.symbols(f"a0:{n}"), sympy.symbols(f"k0:{n}"), sympy.Symbol("b")
    column = sympy.Matrix(k)
    A = (sympy.eye(n) - beta * column * column.T) * sympy.diag(*alpha)
    value = (alpha[0] * sympy.eye(n) - A).det(method="berkowitz")
    rest = sympy.prod([alpha[0] - alpha[j] for j in range(1, n)])
    return value, beta * k[0] ** 2 * alpha[0] * rest


@claim(
    "thm:complex_eigenvalues/symbolic",
    "p(alpha_i) = beta k_i^2 alpha_i prod (alpha_i - alpha_j): n - 2 real roots by signs",
)
def characteristic_signs(
    effort: float = 1.0, formula: Callable[[int], tuple[Any, Any]] = characteristic_at_gate
) -> Evidence:
    """The identity with symbols for n = 2 ... 5; for every n it is the determinant lemma.

    Order the gates, all different, no k_i zero (else a factor splits off). Signs of p at neighbouring gates of one sign
    alternate, so each such gap holds a root; there are n - 1 gaps and at most one lies across zero: n - 2 real roots at
    least. If all gates have one sign there is one root more, and with beta |k|^2 <= 1 one between the largest negative
    gate and the smallest positive one, since p(0) = (-1)^n (1 - beta |k|^2) prod alpha: then all roots are real. The
    other cases are limits of these.
    """
    top = 5 if effort >= 1 else 3
    for n in range(2, top + 1):
        _equal(*formula(n), f"n = {n}")
    alpha, k, beta = sympy.symbols("a0:3"), sympy.symbols("k0:3"), sympy.Symbol("b")
    column = sympy.Matrix(k)
    A = (sympy.eye(3) - beta * column * column.T) * sympy.diag(*alpha)
    _equal(A.det(), (1 - beta * sum(x**2 for x in k)) * sympy.prod(alpha), "det A")
    return Evidence(top, "exact", note=f"n = 2 ... {top} with symbols")


def norm_gap(n: int, rate: Any) -> sympy.Matrix:
    """I - A^T A - (I - D^2) - rate D k k^T D for A = (I - beta k k^T) D, where k^T k = 1."""
    alpha, k, beta = sympy.symbols(f"a0:{n}"), sympy.symbols(f"k0:{n}"), sympy.Symbol("b")
    D, column = sympy.diag(*alpha), sympy.Matrix(k)
    A = (sympy.eye(n) - beta * column * column.T) * D
    gap = sympy.eye(n) - A.T * A - (sympy.eye(n) - D * D) - rate(beta) * D * column * column.T * D
    unit = sum(x**2 for x in k) - 1
    return gap.applyfunc(lambda entry: sympy.reduced(sympy.expand(entry), [unit], *k)[1])


@claim(
    "app:non_expansive_dplr/symbolic",
    "I - A^T A = (I - D^2) + beta (2 - beta) D k k^T D for a unit key: never negative",
)
def norm_identity(effort: float = 1.0, rate: Callable[[Any], Any] = lambda beta: beta * (2 - beta)) -> Evidence:
    """Both terms are positive semidefinite for |alpha| <= 1 and 0 <= beta <= 2. (I - beta k k^T)^2 is the whole proof."""
    top = 4 if effort >= 1 else 3
    for n in range(1, top + 1):
        if any(entry != 0 for entry in norm_gap(n, rate)):
            raise Refuted(f"n = {n}: I - A^T A is something else")
    return Evidence(top, "exact", note=f"n = 1 ... {top} with symbols; entry by entry it does not depend on n")


@claim(
    "sec:free/symbolic",
    "Entry (i, j) of the commutator of beta k k^T and Diag(alpha) is beta k_i k_j (alpha_j - alpha_i)",
)
def commutator_entries(effort: float = 1.0, sign: int = 1) -> Evidence:
    """With symbols at n = 4; every entry involves only i and j, so this is every n."""
    alpha, k, beta = sympy.symbols("a0:4"), sympy.symbols("k0:4"), sympy.Symbol("b")
    column = sympy.Matrix(k)
    P, D = beta * column * column.T, sympy.diag(*alpha)
    gap = P * D - D * P
    for i, j in product(range(4), repeat=2):
        _equal(gap[i, j], sign * beta * k[i] * k[j] * (alpha[j] - alpha[i]), f"entry ({i}, {j})")
    return Evidence(16, "exact", note="so they commute iff every beta k_i k_j (alpha_i - alpha_j) is 0")


@claim(
    "prop:CKDA-canonical/symbolic",
    "The block of A_tilde on (k_-, k_+), its trace and its discriminant, for every width",
)
def canonical_block(effort: float = 1.0, window: Callable[[Any, Any], Any] | None = None) -> Evidence:
    """S k_- = -k_-, S k_+ = k_+, k^T k_- = c^2, k^T k_+ = 1 - c^2: two columns of numbers, whatever the width.

    On the complement of both, A_tilde is S. The block has determinant beta - 1 and trace beta cos 2 theta; its
    discriminant beta^2 cos^2 2 theta - 4 (beta - 1) is negative exactly in the window.
    """
    beta, c2 = sympy.symbols("b c")
    images = [(-1 + beta * c2, beta * c2), (-beta * (1 - c2), 1 - beta * (1 - c2))]
    block = sympy.Matrix(images).T
    cos = 2 * c2 - 1
    window = window or (lambda b, x: b**2 * x**2 - 4 * (b - 1))
    _equal(block.trace(), beta * cos, "trace")
    _equal(block.det(), beta - 1, "determinant")
    _equal(block.trace() ** 2 - 4 * block.det(), window(beta, cos), "discriminant")
    return Evidence(3, "exact", note="trace, determinant and discriminant as polynomials in beta and cos^2 theta")
