"""Structure and spectrum of one CKDA transition, and of products of them (paper, section 3 and appendix A).

The constructions come first: recovering a signed Householder matrix, the blocks of the sign-magnitude form, the
commutation criterion. The claims follow; each takes the construction it checks as an argument, so that a broken one can
be put in its place and must be refuted.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import sympy
import torch
from scipy.optimize import least_squares

from ckda import complex_kda, transition
from ckda.theory.claims import Evidence, Inconclusive, Refuted, claim
from ckda.theory.exact import Field, Matrix, Number, field
from ckda.theory.factor import (
    ExactFactor,
    Factor,
    cycle_minor,
    factor_contraction,
    factor_orthogonal,
    factor_svd,
    multiply,
    multiply_exact,
)
from ckda.theory.families import FAMILIES, Family, Slot
from ckda.theory.search import climb, extra_pair
from ckda.theory.spectra import most_pairs

__all__ = [
    "SignedHouseholder",
    "commutes",
    "rotates",
    "sign_blocks",
    "signed_householder",
    "signed_householder_of",
]


class SignedHouseholder(NamedTuple):
    """(I - 2 k k^T / (k^T k)) Diag(sign)."""

    sign: list[int]
    k: Matrix  #: [n, 1], of any length


def signed_householder(d: Sequence[Number], u: Matrix, v: Matrix) -> SignedHouseholder:
    """Key and signs of an orthogonal Diag(d) + u v^T, by the paper's proof, exactly (prop:orthogonal-dplr).

    Args:
        d: n numbers of a field.
        u, v: [n, 1] over that field.

    Example:
        >>> F = field()
        >>> d, u, v = [F("1/2"), F("-13/11")], F.vector([1, "-8/11"]), F.vector(["-11/10", "-4/5"])
        >>> A = F.diag(d) + u @ v.T
        >>> found = signed_householder(d, u, v)
        >>> found.sign, A.is_orthogonal(), F.ckda(*found) == A
        ([1, -1], True, True)
    """
    F, n = u.field, u.shape[0]
    A = F.diag(d) + u @ v.T
    if all(not A[i, j] for i in range(n) for j in range(n) if i != j):
        sign = [F.sign(A[i, i]) for i in range(n)]
        return SignedHouseholder([-sign[0], *sign[1:]], F.eye(n).column(0))
    sign = [-F.sign(u[i, 0] * v[i, 0]) if u[i, 0] else F.sign(d[i]) for i in range(n)]
    return SignedHouseholder(sign, F.vector([u[i, 0] / (1 + d[i] * sign[i]) for i in range(n)]))


def signed_householder_of(A: np.ndarray, tolerance: float = 1e-9) -> tuple[np.ndarray, np.ndarray, float]:
    """Signs [n], unit key [n] and residual of the signed Householder matrix nearest in pattern to an [n, n] matrix.

    Only A is given, not its split into diagonal and rank one: A_ij A_ji has the sign of s_i s_j where it is not zero.

    Example:
        >>> A = transition.dense(torch.tensor([-1.0, 1.0]), torch.tensor([0.6, 0.8]), 2.0).double().numpy()
        >>> sign, k, residual = signed_householder_of(A)
        >>> sign.tolist(), bool(residual < 1e-6)
        ([-1.0, 1.0], True)
    """
    off = A - np.diag(np.diagonal(A))
    row = int(np.abs(off).sum(1).argmax())
    if np.abs(off).max() < tolerance:
        sign = np.sign(np.diagonal(A))
        sign[0] *= -1
        return sign, np.eye(len(A))[0], float(np.abs(np.abs(A) - np.eye(len(A))).max())
    product = off[row] * off[:, row]
    linked = np.abs(product) > tolerance**2
    candidates = []
    for first in (1.0, -1.0):
        sign = np.where(linked, first * np.sign(product), np.sign(np.diagonal(A)))
        sign[row] = first
        gap = np.eye(len(A)) - A * sign
        k = gap[:, np.abs(gap).sum(0).argmax()]
        k = k / max(np.linalg.norm(k), 1e-300)
        residual = np.abs((np.eye(len(A)) - 2 * np.outer(k, k)) * sign - A).max()
        candidates.append((sign, k, float(residual)))
    return min(candidates, key=lambda c: c[2])


def rotates(beta: Fraction, cos2: Fraction) -> bool:
    """Whether the block B(beta, theta) has a non-real pair, from cos(theta)^2 (prop:CKDA-canonical).

    Example:
        >>> rotates(Fraction(2), Fraction(1, 3)), rotates(Fraction(5, 4), Fraction(9, 10))  # the second is the boundary
        (True, False)
    """
    return beta**2 * (2 * cos2 - 1) ** 2 < 4 * (beta - 1)


def sign_blocks(beta: Fraction, cos2: Fraction) -> list[list[Fraction]]:
    """A_tilde on (k_-, k_+): column j holds the image of basis vector j in that basis (prop:CKDA-canonical).

    This is B(beta, theta) in the basis k_-, k_+ instead of its normalisation, which needs no square root.

    Example:
        >>> sign_blocks(Fraction(2), Fraction(1, 2))
        [[Fraction(0, 1), Fraction(-1, 1)], [Fraction(1, 1), Fraction(0, 1)]]
    """
    sin2 = 1 - cos2
    return [[beta * cos2 - 1, -beta * sin2], [beta * cos2, 1 - beta * sin2]]


def commutes(alpha: Sequence[Fraction], k: Sequence[Fraction], beta: Fraction) -> bool:
    """Whether I - beta k k^T and Diag(alpha) commute: beta k_i k_j (alpha_i - alpha_j) = 0 for all i, j (sec:free).

    Example:
        >>> one, two = Fraction(1), Fraction(2)
        >>> commutes([one, two], [one, one], one), commutes([one, two, two], [one * 0, one, one], one)
        (False, True)
    """
    n = len(k)
    return all(not beta * k[i] * k[j] * (alpha[i] - alpha[j]) for i in range(n) for j in range(i))


# random exact cases


def _fraction(rng: random.Random, low: int = -1, high: int = 1, denominator: int = 8) -> Fraction:
    return Fraction(rng.randint(low * denominator, high * denominator), denominator)


def _key(rng: random.Random, n: int) -> list[Fraction]:
    """A nonzero vector of small integers with some zeros."""
    k = [Fraction(rng.choice((0, 1, 1, 2, 3)) * rng.choice((-1, 1))) for _ in range(n)]
    return k if any(k) else _key(rng, n)


def _gate(rng: random.Random, n: int) -> list[Fraction]:
    """Entries of [-1, 1] with some at -1, 0, 1 and some equal."""
    pool = [Fraction(-1), Fraction(0), Fraction(1), _fraction(rng), _fraction(rng)]
    return [rng.choice(pool) for _ in range(n)]


def _orthogonal(F: Field, rng: random.Random, n: int) -> Matrix:
    """A product of random reflections and signs."""
    Q = F.diag([rng.choice((-1, 1)) for _ in range(n)])
    for _ in range(rng.randint(0, n)):
        Q = F.householder(_key(rng, n)) @ Q
    return Q


def _cases(effort: float, base: int) -> int:
    return max(12, round(base * effort))


# prop:orthogonal-dplr

Recover = Callable[[Sequence[Number], Matrix, Matrix], SignedHouseholder]


def _split(F: Field, rng: random.Random, n: int) -> tuple[list[Number], Matrix, Matrix]:
    """A random orthogonal Diag(d) + u v^T; where the rank-one part leaves the diagonal free, it is moved."""
    k, sign = _key(rng, n), [rng.choice((-1, 1)) for _ in range(n)]
    A, norm2 = F.ckda(sign, k), sum(x * x for x in k)
    d, u = [F(s) for s in sign], F.vector([-2 * x / norm2 for x in k])
    v = F.vector([s * x for s, x in zip(sign, k, strict=True)])
    support = [i for i in range(n) if k[i]]
    if len(support) == 1:  # A is diagonal: any split of that entry will do
        u = u * Fraction(2, 3)
    if len(support) == 2:  # (A_ii - d_i)(A_jj - d_j) = A_ij A_ji leaves one number free
        i, j = support
        u = F.vector([x[0] * (rng.choice((2, 3)) if l == i else 1) for l, x in enumerate(u.tolist())])
        v = F.vector([A[j, i] / u[j, 0] if l == i else A[i, j] / u[i, 0] if l == j else 0 for l in range(n)])
    d = [A[l, l] - u[l, 0] * v[l, 0] if l in support else d[l] for l in range(n)]
    scale = Fraction(rng.choice((-3, 1, 2)), 2)
    return d, u * scale, v * (1 / scale)


@claim(
    "prop:orthogonal-dplr",
    "Key and signs of an orthogonal Diag(d) + u v^T are recovered exactly, on matrices of the theorem's form",
)
def orthogonal_dplr(effort: float = 1.0, recover: Recover = signed_householder) -> Evidence:
    """Random exact orthogonal DPR1 matrices, scaled and split in every way their support allows, are recovered."""
    F, rng, cases = field(), random.Random(0), _cases(effort, 2000)
    for _ in range(cases):
        n = rng.randint(2, 6)
        d, u, v = _split(F, rng, n)
        A = F.diag(d) + u @ v.T
        if not A.is_orthogonal():
            raise AssertionError(f"the test's own matrix is not orthogonal: {A}")
        found = recover(d, u, v)
        if F.ckda(*found) != A or not set(found.sign) <= {-1, 1}:
            raise Refuted(f"d = {d}, u = {u}, v = {v}: recovered {found}")
        if A.eigenvalue_count().pairs > 1:
            raise Refuted(f"more than one pair: {A}")
    return Evidence(cases, "exact", None, "widths 2 to 6, over Q; at most one pair in each")


@claim("prop:orthogonal-dplr/search", "No orthogonal Diag(d) + u v^T is found that is not a signed Householder matrix")
def orthogonal_dplr_search(effort: float = 1.0, rank: int = 1) -> Evidence:
    """Least squares drives random Diag(d) + U V^T to orthogonality; each end must be a signed Householder matrix."""
    rng, starts, worst, reached = np.random.default_rng(0), _cases(effort, 240), 0.0, 0
    for _ in range(starts):
        n = int(rng.integers(2, 6))
        A = _solve_orthogonal(rng, n, rank)
        if A is None:
            continue
        reached += 1
        worst = max(worst, signed_householder_of(A)[2])
        if worst > 1e-5:
            raise Refuted(f"orthogonal, diagonal plus rank {rank}, but {worst:.3g} away from signed Householder: {A}")
    if reached < starts // 4:
        raise Inconclusive(f"only {reached} of {starts} starts became orthogonal: the search is too weak to tell")
    return Evidence(
        reached, "search", 1e-5 - worst, f"{reached} of {starts} starts reached an orthogonal matrix", {"worst": worst}
    )


def _solve_orthogonal(rng: np.random.Generator, n: int, rank: int) -> np.ndarray | None:
    """A matrix Diag(d) + U V^T with A^T A = I to 1e-10; None where least squares from a random start ends elsewhere."""

    def build(x: np.ndarray) -> np.ndarray:
        U, V = x[n:].reshape(2, n, rank)
        return np.diag(x[:n]) + U @ V.T

    def defect(x: np.ndarray) -> np.ndarray:
        A = build(x)
        return (A.T @ A - np.eye(n))[np.triu_indices(n)]

    solution = least_squares(defect, rng.standard_normal(n * (1 + 2 * rank)), xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return build(solution.x) if np.abs(solution.fun).max() < 1e-10 else None


# prop:CKDA-canonical


@claim(
    "prop:CKDA-canonical",
    "A_tilde is B(beta, theta) on span{k_-, k_+} and the sign elsewhere; it rotates in the window",
)
def canonical(
    effort: float = 1.0,
    block: Callable[[Fraction, Fraction], list[list[Fraction]]] = sign_blocks,
    window: Callable[[Fraction, Fraction], bool] = rotates,
) -> Evidence:
    """Exact images of k_-, k_+ and of their complement; the window against exact counts, boundary included."""
    F, rng, cases = field(), random.Random(1), _cases(effort, 2000)
    boundary = [(Fraction(5, 4), [3, 1]), (Fraction(5, 4), [1, 3]), (Fraction(2), [1, 0]), (Fraction(1), [1, 1])]
    for case in range(cases):
        n = 2 if case < len(boundary) else rng.randint(2, 6)
        beta, k = boundary[case] if case < len(boundary) else (_fraction(rng, 0, 2), _key(rng, n))
        sign = [-1, 1] if case < len(boundary) else [rng.choice((-1, 1)) for _ in range(n)]
        _check_blocks(F, sign, [Fraction(x) for x in k], beta, block, window)
    worst = _block_agrees(effort)
    return Evidence(cases, "exact", None, f"transition.sign_magnitude agrees to {worst:.1e}", {"float": worst})


def _check_blocks(
    F: Field, sign: list[int], k: list[Fraction], beta: Fraction, block: Callable, window: Callable
) -> None:
    A = F.ckda(sign, k, beta)
    minus = F.vector([x if s < 0 else 0 for s, x in zip(sign, k, strict=True)])
    plus = F.vector([x if s > 0 else 0 for s, x in zip(sign, k, strict=True)])
    cos2 = sum((x * x for s, x in zip(sign, k, strict=True) if s < 0), Fraction(0)) / sum(x * x for x in k)
    case = f"sign {sign}, k {k}, beta {beta}"
    B = block(beta, cos2)
    for j, vector in enumerate((minus, plus)):
        if not vector.is_zero() and A @ vector != minus * B[0][j] + plus * B[1][j]:
            raise Refuted(f"{case}: wrong image of k_{'-+'[j]}")
    S, outside = F.diag(sign), F.eye(len(k)) - _projector(minus) - _projector(plus)
    if A @ outside != S @ outside:
        raise Refuted(f"{case}: A_tilde is not the sign outside span{{k_-, k_+}}")
    mixed = not minus.is_zero() and not plus.is_zero()
    count = A.eigenvalue_count()
    if count.pairs != int(mixed and window(beta, cos2)):
        raise Refuted(f"{case}: {count.pairs} non-real pairs, the window says {mixed and window(beta, cos2)}")
    if mixed and beta == 2 and (B[0][0] != 2 * cos2 - 1 or B[0][0] != B[1][1] or count.unit_pairs != 1):
        raise Refuted(f"{case}: at beta = 2 the block is not the rotation by 2 theta")


def _projector(vector: Matrix) -> Matrix:
    """Onto the line of an [n, 1] vector, or zero."""
    F, n = vector.field, vector.shape[0]
    return F.zeros(n, n) if vector.is_zero() else F.eye(n) - F.householder(vector, 1)


def _block_agrees(effort: float) -> float:
    """Largest gap between the block of transition.sign_magnitude and A_tilde in the orthonormal basis, in float64."""
    rng, count = torch.Generator().manual_seed(0), _cases(effort, 400)
    k = torch.nn.functional.normalize(torch.randn(count, 5, generator=rng, dtype=torch.float64), dim=-1)
    alpha = torch.rand(count, 5, generator=rng, dtype=torch.float64) * 2 - 1
    alpha[:, 0], alpha[:, 1] = -alpha[:, 0].abs(), alpha[:, 1].abs()
    beta = 2 * torch.rand(count, generator=rng, dtype=torch.float64)
    form = transition.sign_magnitude(alpha, k, beta)
    basis = torch.stack([torch.where(form.sign == s, k, 0) for s in (-1, 1)], -1)
    basis = basis / basis.norm(dim=-2, keepdim=True)
    A = transition.dense(form.sign, k, beta)
    worst = float((basis.mT @ A @ basis - form.block).abs().max())
    whole = (transition.dense(alpha, k, beta) - A * form.magnitude.unsqueeze(-2)).abs().max()
    if max(worst, float(whole)) > 1e-12:
        raise Refuted(f"transition.sign_magnitude: block off by {worst:.3g}, product by {float(whole):.3g}")
    return max(worst, float(whole))


@claim(
    "prop:CKDA-canonical/not-the-whole", "The window is that of A_tilde: scaling by |alpha| can open and close a pair"
)
def canonical_is_not_the_whole(effort: float = 1.0, scales: tuple[str, str] = ("2/13", "0")) -> Evidence:
    """Two exact witnesses that the criterion of prop:CKDA-canonical decides A_tilde, not A."""
    F, opened, closed = field(), Fraction(scales[0]), Fraction(scales[1])
    real, turning = ([-1, 1], [2, 1], Fraction(11, 10)), ([-1, 1], [1, 1], Fraction(2))
    counts = [
        (F.ckda(*real).eigenvalue_count().pairs, F.ckda([-1, opened], *real[1:]).eigenvalue_count().pairs),
        (F.ckda(*turning).eigenvalue_count().pairs, F.ckda([-1, closed], *turning[1:]).eigenvalue_count().pairs),
    ]
    if counts != [(0, 1), (1, 0)]:
        raise Refuted(f"pairs before and after scaling by |alpha|: {counts}")
    return Evidence(2, "exact", None, f"k = (2,1), beta = 11/10, alpha = (-1, {opened}): A rotates, A_tilde does not")


# sec:free


@claim(
    "sec:free", "I - beta k k^T and Diag(alpha) commute iff beta k_i k_j (alpha_i - alpha_j) = 0, iff A is symmetric"
)
def commutation(effort: float = 1.0, criterion: Callable[..., bool] = commutes) -> Evidence:
    """The criterion, the entries of the commutator, and the scalar gates that factor out of a product, exactly."""
    F, rng, cases = field(), random.Random(2), _cases(effort, 2000)
    agreed = {True: 0, False: 0}
    for _ in range(cases):
        n = rng.randint(2, 5)
        alpha, k, beta = _gate(rng, n), _key(rng, n), rng.choice((Fraction(0), Fraction(2), _fraction(rng, 0, 2)))
        H, D, A = F.householder(k, beta), F.diag(alpha), F.ckda(alpha, k, beta)
        verdict = criterion(alpha, k, beta)
        agreed[verdict] += 1
        if verdict != (H @ D == D @ H) or verdict != A.is_symmetric():
            raise Refuted(f"alpha {alpha}, k {k}, beta {beta}: the criterion says {verdict}")
    return Evidence(cases, "exact", None, f"{agreed[True]} commute, {agreed[False]} do not")


@claim("sec:free/scalar-gate", "Scalar gates factor out of a product of GDN transitions, which are symmetric")
def scalar_gate(effort: float = 1.0, spread: int = 0) -> Evidence:
    """prod alpha_t (I - beta_t k_t k_t^T) with the gates in front, exactly; `spread` > 0 makes gates channel-wise."""
    F, rng, cases = field(), random.Random(3), _cases(effort, 400)
    for _ in range(cases):
        n, scale = rng.randint(2, 4), Fraction(1)
        gated, plain = F.eye(n), F.eye(n)
        for _ in range(rng.randint(1, 6)):
            a, k, beta = _fraction(rng), _key(rng, n), _fraction(rng, 0, 2)
            A = F.ckda([a + (i * spread) for i in range(n)], k, beta)
            if not A.is_symmetric():
                raise Refuted(f"not symmetric: gate {a}, k {k}, beta {beta}")
            gated, plain, scale = A @ gated, F.householder(k, beta) @ plain, scale * a
        if gated != plain * scale:
            raise Refuted("the scalar gates do not factor out")
    return Evidence(cases, "exact", None, "products of up to 6 transitions")


@claim(
    "eq:kda_alpha_rotation",
    "The planar transition, its discriminant (1-alpha)^2 cos^2(2 theta) + 4 alpha, modulus sqrt(-alpha)",
)
def planar_transition(effort: float = 1.0, sign: int = -1) -> Evidence:
    """Symbolically in alpha and theta; `sign` is that of the upper right entry."""
    alpha, theta = sympy.symbols("alpha theta", real=True)
    k = sympy.Matrix([sympy.cos(theta), sympy.sin(theta)])
    A = (sympy.eye(2) - 2 * k * k.T) * sympy.diag(alpha, 1)
    c, s = sympy.cos(2 * theta), sympy.sin(2 * theta)
    paper = sympy.Matrix([[-alpha * c, sign * s], [-alpha * s, c]])
    gaps = {
        "matrix": sympy.simplify(A - paper),
        "discriminant": sympy.simplify(A.trace() ** 2 - 4 * A.det() - (1 - alpha) ** 2 * c**2 - 4 * alpha),
        "determinant": sympy.simplify(A.det() + alpha),
        "rotation at -1": sympy.simplify(A.subs(alpha, -1) - sympy.Matrix([[c, -s], [s, c]])),
    }
    wrong = [name for name, gap in gaps.items() if gap not in (0, sympy.zeros(2, 2))]
    if wrong:
        raise Refuted(f"{wrong[0]} differs from the paper's by {gaps[wrong[0]]}")
    return Evidence(len(gaps), "exact", None, "identities in alpha and theta")


@claim(
    "eq:diagfactor", "Diag(alpha) is the product of n axis-aligned Householder transitions with beta_i = 1 - alpha_i"
)
def diagonal_factors(effort: float = 1.0, rate: Callable[[sympy.Expr], sympy.Expr] = lambda a: 1 - a) -> Evidence:
    """Symbolically for n up to 6, in both orders (diagonal factors commute)."""
    for n in range(1, 7):
        alpha = sympy.symbols(f"alpha_1:{n + 1}")
        product = sympy.eye(n)
        for i, a in enumerate(alpha):
            e = sympy.eye(n)[:, i]
            product = product * (sympy.eye(n) - rate(a) * e * e.T)
        if (product - sympy.diag(*alpha)).expand() != sympy.zeros(n, n):
            raise Refuted(f"n = {n}: the product is {product}")
    return Evidence(6, "exact", None, "identities in alpha, n = 1 to 6")


# thm:complex_eigenvalues


def straddles(alpha: Sequence[Fraction], k: Sequence[Fraction], beta: Fraction) -> bool:
    """What a non-real pair needs: beta > 1, and the key on a negative and on a positive gate.

    Sharper than thm:complex_eigenvalues, which asks for a negative gate only.

    Example:
        >>> one = Fraction(1)
        >>> straddles([-one, -one], [one, one], 2 * one), straddles([-one, one], [one, one], 2 * one)
        (False, True)
    """
    signs = {(a > 0) - (a < 0) for a, x in zip(alpha, k, strict=True) if x}
    return beta > 1 and {-1, 1} <= signs


@claim("thm:complex_eigenvalues", "At most one non-real pair, and only if beta > 1 and a gate entry is negative")
def complex_eigenvalues(effort: float = 1.0, needs: Callable[..., bool] = straddles, at_most: int = 1) -> Evidence:
    """Exact counts by Sturm on random rational transitions; the edges of the window by witnesses just inside it."""
    F, rng, cases, seen = field(), random.Random(4), _cases(effort, 3000), 0
    for _ in range(cases):
        n = rng.randint(2, 6)
        alpha, k, beta = _gate(rng, n), _key(rng, n), rng.choice((Fraction(2), _fraction(rng, 0, 2)))
        pairs = F.ckda(alpha, k, beta).eigenvalue_count().pairs
        seen += pairs
        if pairs > at_most or (pairs and not needs(alpha, k, beta)):
            raise Refuted(f"alpha {alpha}, k {k}, beta {beta}: {pairs} pairs")
    tiny = Fraction(1, 10**6)
    for low, rate in ((Fraction(-1), 1 + tiny), (-tiny, Fraction(2))):
        if F.ckda([low, 1], [1, 1], rate).eigenvalue_count().pairs != 1:
            raise Refuted(f"alpha ({low}, 1), beta {rate}: no pair, though the window is said to open here")
    return Evidence(cases + 2, "exact", None, f"{seen} pairs seen; the window opens at beta = 1 + 1e-6, alpha = -1e-6")


@claim(
    "thm:complex_eigenvalues/search", "An adversary finds no second pair, for real gates and learning rates of any size"
)
def complex_eigenvalues_search(effort: float = 1.0, at_most: int = 1) -> Evidence:
    """The theorem names no ranges: the search runs over alpha in [-4, 4], beta in [-3, 6] too. A control shows that the
    same search does find two pairs when the rank-one term need not be symmetric."""
    ckda = FAMILIES["CKDA"]
    wide = replace(ckda, slots=(Slot("alpha", -4, 4, "vector"), ckda.slots[1], Slot("beta", -3, 6)))
    cases, how = 0, []
    for family, d in ((ckda, 4), (ckda, 5), (wide, 4), (wide, 6)):
        answer = most_pairs(family, d, effort)
        cases += answer.cases
        how.append(answer.how)
        if answer.value != at_most:
            raise Refuted(f"{answer.value} pairs at d = {d}, the bound is {at_most} ({answer.how})")
    control = most_pairs(_dpr1(), 4, effort)
    if control.value != 2:
        raise Inconclusive(f"the search is too weak: {control.value} pairs of an unrestricted Diag(d) + u v^T")
    gap = _second_collision(max(24, round(96 * effort)), max(200, round(800 * min(1.0, effort))))
    if gap <= 0:
        raise Refuted(f"a second pair with distinct gates and a key on all of them: imaginary part {-gap:.3g}")
    note = (
        f"gates 0.1 apart, |k_i| >= 0.1: the next two real eigenvalues stay {gap:.3g} apart, else they touch but stay "
    )
    note += "real; control: two pairs for an unrestricted u v^T"
    return Evidence(cases + control.cases, "search", gap, note, {"searches": how, "gap": gap})


def _second_collision(starts: int, steps: int, d: int = 4, apart: float = 0.1) -> float:
    """Beside one non-real pair, the smallest gap of two real eigenvalues; negative: imaginary part of a second pair.

    Equal gates, or zeros of the key, give double eigenvalues for a trivial reason and are kept out.
    """
    family = FAMILIES["CKDA"]

    def score(raw: np.ndarray) -> np.ndarray:
        p = family.decode(raw, d)
        gates = p["alpha"].sort(-1).values.diff(dim=-1).amin(-1)
        short = (apart - gates).clamp_min(0) + (apart - p["k"].abs().amin(-1)).clamp_min(0)
        return extra_pair(family.matrix(p).numpy(), 1) - 10 * short.numpy()

    return -climb(score, family.size(d), starts, steps, seed=3).best


def _dpr1(rank: int = 1) -> Family:
    """Diag(d) + U V^T without any symmetry: what CKDA is not."""

    def matrix(p: Mapping[str, torch.Tensor]) -> torch.Tensor:
        U, V = (torch.stack([p[f"{name}{j}"] for j in range(rank)], -1) for name in "uv")
        return torch.diag_embed(p["d"]) + U @ V.mT

    slots = [Slot("d", -1, 1, "vector")]
    for j in range(rank):
        slots += [Slot(f"u{j}", -1, 1, "vector"), Slot(f"v{j}", -1, 1, "vector")]
    return Family(f"DPR{rank}", "Diag(d) + U V^T", "entries in [-1, 1]", tuple(slots), matrix)


@claim("thm:complex_eigenvalues/unit-key", "The condition beta > 1 is for unit keys; in general it is beta |k|^2 > 1")
def unit_key_is_needed(effort: float = 1.0, beta: Fraction = Fraction(9, 10)) -> Evidence:
    """The theorem's statement does not ask for a unit key: beta = 9/10, k = (1, 1), alpha = (-1, 1) has a pair."""
    F = field()
    k = F.vector([1, 1])
    pairs = ((F.eye(2) - k @ k.T * beta) @ F.diag([-1, 1])).eigenvalue_count().pairs
    if pairs != 1:
        raise Refuted(f"beta {beta}, k (1, 1), alpha (-1, 1): {pairs} pairs")
    return Evidence(1, "exact", None, f"beta = {beta} < 1, k = (1, 1), alpha = (-1, 1): a pair")


# app:non_expansive_dplr


@claim(
    "thm:dplr-persistent-pairs-app",
    "A non-expansive diagonal plus rank r has at most r non-real pairs on the unit circle",
)
def persistent_pairs(effort: float = 1.0, slack: int = 0) -> Evidence:
    """Exact: r planar rotations attain r, rank(A - A^T) <= 2r. Search: pair number r + 1 stays inside the circle."""
    F, rng, cases = field(), random.Random(5), _cases(effort, 100)
    for _ in range(cases):
        r = rng.randint(1, 3)
        A, correction = _rotations(F, rng, r)
        count = A.eigenvalue_count().unit_pairs
        if not A.is_contraction() or correction > r or (A - A.T).rank() > 2 * r or count != r + slack:
            raise Refuted(f"rank {r}: {count} pairs on the circle, correction of rank {correction}: {A}")
    starts, steps = max(16, round(64 * effort)), max(200, round(1500 * min(1.0, effort)))
    best = {f"r = {r}, n = {n}": _outermost_pair(n, r, r + slack, starts, steps) for r, n in ((1, 4), (1, 5), (2, 6))}
    margin = min(1 - value for value in best.values())
    if margin < 1e-4:
        raise Refuted(f"largest modulus of pair number r + 1 (imaginary part at least 0.1): {best}")
    control = _outermost_pair(4, 1, 0, starts, steps)
    if control < 1 - 1e-2:
        raise Inconclusive(f"the search is too weak: the first pair only reached modulus {control:.4f}")
    note = f"pair r + 1 stays {margin:.3f} inside the circle; the first one reached {control:.4f}"
    return Evidence(cases + 4 * starts * steps, "search", margin, note, {"outermost": best, "control": control})


def _rotations(F: Field, rng: random.Random, r: int) -> tuple[Matrix, int]:
    """A non-expansive Diag(d) + R with r planar rotations and a contracting rest, and the rank of R."""
    n = 2 * r + rng.randint(0, 2)
    A, D = F.eye(n), F.eye(n)
    for j in range(r):
        sign = [-1 if i == 2 * j else 1 for i in range(n)]
        key = [rng.randint(1, 4) if i in (2 * j, 2 * j + 1) else 0 for i in range(n)]
        A, D = F.ckda(sign, key) @ A, F.diag(sign) @ D
    rest = F.diag([1 if i < 2 * r else _fraction(rng) for i in range(n)])
    return A @ rest, (A @ rest - D @ rest).rank()


def _outermost_pair(n: int, rank: int, index: int, starts: int, steps: int) -> float:
    """Largest modulus found of the pair number `index` (from 0, by modulus) among those with imaginary part >= 0.1."""
    family = _dpr1(rank)

    def score(raw: np.ndarray) -> np.ndarray:
        A = family.dense(raw, n).numpy()
        A = A / np.linalg.norm(A, 2, axis=(-2, -1)).clip(1e-9)[:, None, None]  # still diagonal plus rank r
        values = np.linalg.eigvals(A)
        outward = np.where(values.imag > 1e-9, np.abs(values) - (0.1 - values.imag).clip(0), -1.0)
        return -np.partition(-outward, index, axis=-1)[:, index]

    return climb(score, family.size(n), starts, steps, seed=n + index).best


@claim("app:non_expansive_dplr", "Every CKDA transition is non-expansive; beta > 2 or |alpha| > 1 is not")
def non_expansive(effort: float = 1.0, beta_max: Fraction = Fraction(2), gate_max: Fraction = Fraction(1)) -> Evidence:
    """I - A^T A is positive semidefinite, decided exactly, corners of the range included."""
    F, rng, cases = field(), random.Random(6), _cases(effort, 2000)
    for _ in range(cases):
        n = rng.randint(1, 5)
        alpha = [a * gate_max for a in _gate(rng, n)]
        k, beta = _key(rng, n), rng.choice((beta_max, _fraction(rng, 0, 1) * beta_max))
        if not F.ckda(alpha, k, beta).is_contraction():
            raise Refuted(f"alpha {alpha}, k {k}, beta {beta}: the norm exceeds one")
    return Evidence(cases, "exact", None, "widths 1 to 5; the bound is attained")


# prop:CKDA-factorization

FactorOrthogonal = Callable[[Matrix], list[ExactFactor]]


@claim(
    "prop:CKDA-factorization",
    "A contraction is a product of at most max(1, 2n-2) CKDA transitions, an orthogonal matrix of n-1",
)
def factorization(
    effort: float = 1.0,
    orthogonal: FactorOrthogonal = factor_orthogonal,
    svd: Callable[..., list[ExactFactor]] = factor_svd,
    contraction: Callable[[np.ndarray], list[Factor]] = factor_contraction,
) -> Evidence:
    """Orthogonal matrices and given SVDs exactly; random contractions in float64 through `ckda.transition.dense`."""
    F, rng, cases = field(), random.Random(7), _cases(effort, 300)
    for _ in range(cases):
        n = rng.randint(1, 6)
        Q, V = _orthogonal(F, rng, n), _orthogonal(F, rng, n)
        sigma = [F(_fraction(rng, 0, 1)) for _ in range(n)]
        _check_factors(F, Q, orthogonal(Q), max(1, n - 1))
        _check_factors(F, Q @ F.diag(sigma) @ V.T, svd(Q, sigma, V), max(1, 2 * n - 2))
    worst = _factor_floats(cases, contraction)
    return Evidence(3 * cases, "exact", 1e-10 - worst, f"float64 contractions to {worst:.1e}", {"float": worst})


def _check_factors(F: Field, A: Matrix, factors: list[ExactFactor], at_most: int) -> None:
    if len(factors) > at_most:
        raise Refuted(f"{len(factors)} factors, at most {at_most} are allowed: {A}")
    if multiply_exact(F, factors) != A:
        raise Refuted(f"the factors do not multiply to {A}")
    for alpha, _, beta in factors:
        if not 0 <= beta <= 2 or any(abs(a) > 1 for a in alpha):
            raise Refuted(f"a factor is out of range: alpha {alpha}, beta {beta}")


def _factor_floats(cases: int, contraction: Callable[[np.ndarray], list[Factor]]) -> float:
    """Largest entry of product minus matrix over random contractions up to n = 12, singular ones included."""
    rng, worst = np.random.default_rng(8), 0.0
    for _ in range(cases):
        n = int(rng.integers(1, 13))
        A = rng.standard_normal((n, n))
        A[:, rng.random(n) < 0.2] = 0
        A = A / max(1e-9, float(np.linalg.norm(A, 2))) * rng.choice((1.0, 0.3))
        factors = contraction(A)
        worst = max(worst, float(np.abs(multiply(factors) - A).max()))
        if len(factors) > max(1, 2 * n - 2) or worst > 1e-10:
            raise Refuted(f"n = {n}: {len(factors)} factors, error {worst:.3g}: {A}")
    return worst


@claim("prop:CKDA-factorization/cycle", "An n-cycle needs n - 1 CKDA factors")
def cycle_needs(effort: float = 1.0, missing: int = 1) -> Evidence:
    """The certificate: a minor of C - Diag(d) that is unit triangular for every d, and products of m factors that are
    diagonal plus rank at most m. The adversary: n - 1 - missing factors stay away from the cycle, n - 1 reach it."""
    F, rng, cases = field(), random.Random(9), _cases(effort, 60)
    for n in range(2, 13):
        if not cycle_minor(n)[1]:
            raise Refuted(f"n = {n}: the minor is not unit triangular: {cycle_minor(n)[0]}")
    for _ in range(cases):
        n, m = rng.randint(3, 6), rng.randint(1, 3)
        A, D = F.eye(n), F.eye(n)
        for _ in range(m):
            gate = _gate(rng, n)
            A, D = F.ckda(gate, _key(rng, n), _fraction(rng, 0, 2)) @ A, F.diag(gate) @ D
        if (A - D).rank() > m:
            raise Refuted(f"a product of {m} factors is not diagonal plus rank {m}: {A}")
    starts, steps = max(24, round(48 * effort)), max(800, round(2000 * min(1.0, effort)))
    nearest = {n: _nearest_to_cycle(n, n - 1 - missing, starts, steps) for n in (3, 4)}
    if min(nearest.values()) < 1e-3:
        raise Refuted(f"distance of products with {missing} factors too few to the n-cycle: {nearest}")
    control = _nearest_to_cycle(3, 2, starts, steps)
    if control > 0.05:
        raise Inconclusive(f"the search is too weak: two factors stayed {control:.3f} away from the 3-cycle")
    note = f"one factor too few stays {min(nearest.values()):.3f} away; with n - 1 the search came to {control:.1e}"
    return Evidence(
        11 + cases + 3 * starts * steps,
        "search",
        min(nearest.values()),
        note,
        {"nearest": {str(n): x for n, x in nearest.items()}},
    )


@claim(
    "prop:CKDA-factorization/n=2",
    "At n = 2 the bound 2n - 2 for contractions is sharp: [[1/2, 1/2], [0, 1/2]] needs two",
)
def two_needed(effort: float = 1.0, corner: Fraction = Fraction(1, 2)) -> Evidence:
    """The equations for one factor, (1 - b k_1^2) a_1 = A_11 and so on, generate 1: no solution, real or complex."""
    A = np.array([[float(corner), 0.5], [0, 0.5]])
    a1, a2, b, k1, k2 = sympy.symbols("a1 a2 b k1 k2")
    entries = [(1 - b * k1**2) * a1, -b * k1 * k2 * a2, -b * k1 * k2 * a1, (1 - b * k2**2) * a2]
    half = sympy.Rational(1, 2)
    target = [sympy.Rational(corner.numerator, corner.denominator), half, 0, half]
    basis = sympy.groebner([entry - x for entry, x in zip(entries, target, strict=True)], a1, a2, b, k1, k2)
    if basis.exprs != [1]:
        raise Refuted(f"one factor may do: {basis.exprs}")
    factors = factor_contraction(A)
    if len(factors) != 2 or not np.allclose(multiply(factors), A):
        raise Refuted("two factors do not give the matrix")
    return Evidence(1, "exact", None, "Groebner basis 1 for one factor; two are given")


def _nearest_to_cycle(n: int, factors: int, starts: int, steps: int) -> float:
    """Smallest spectral distance found between a product of CKDA transitions and the n-cycle."""
    family, cycle = FAMILIES["CKDA"], np.roll(np.eye(n), 1, 0)
    size = family.size(n)

    def score(raw: np.ndarray) -> np.ndarray:
        product = family.dense(raw[:, :size], n)
        for j in range(1, factors):
            product = product @ family.dense(raw[:, j * size : (j + 1) * size], n)
        return -np.linalg.norm(product.numpy() - cycle, 2, axis=(-2, -1))

    return -climb(score, factors * size, starts, steps, seed=n).best


# lem:gauge


def absorb(signs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """P_t x_t, with P_t = S_1 ... S_t the cumulated signs (lem:gauge).

    Args:
        signs: [T, K] of +1/-1.
        x: [T, K] queries or keys.

    Example:
        >>> absorb(torch.tensor([[-1.0, 1.0], [-1.0, -1.0]]), torch.ones(2, 2)).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]
    """
    return signs.cumprod(0) * x


@claim(
    "lem:gauge", "Signs cumulated into keys and queries turn the signed recurrence into an unsigned one, bit for bit"
)
def gauge(effort: float = 1.0, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = absorb) -> Evidence:
    """Both recurrences through `ckda.transition.apply` in float64: outputs and states agree in every bit."""
    cases, T, K, V = _cases(effort, 40), 50, 5, 3
    for seed in range(cases):
        rng = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(T, width, generator=rng, dtype=torch.float64) for width in (K, K, V))
        alpha = torch.rand(T, K, generator=rng, dtype=torch.float64) * 2 - 1
        beta = 2 * torch.rand(T, 1, generator=rng, dtype=torch.float64)
        k = k / k.norm(dim=-1, keepdim=True)
        signs, H0 = torch.where(alpha < 0, -1.0, 1.0).double(), torch.randn(K, V, generator=rng, dtype=torch.float64)
        alpha[torch.rand(T, K, generator=rng) < 0.05] = 0.0  # the sign of a zero gate is arbitrary
        signed = _run(q, k, v, alpha, beta, H0)
        plain = _run(change(signs, q), change(signs, k), v, alpha.abs(), beta, H0)
        P = signs.cumprod(0).unsqueeze(-1)
        if not torch.equal(signed[1], P * plain[1]) or not torch.equal(signed[0], plain[0]):
            gap = float((signed[0] - plain[0]).abs().max())
            raise Refuted(f"seed {seed}: outputs differ by {gap:.3g}")
    return Evidence(cases * T, "numeric", None, f"{cases} sequences of {T} tokens, equal in every bit")


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, V] and states [T, K, V] of the recurrence."""
    outputs, states = [], []
    for t in range(len(q)):
        H = transition.apply(H, alpha[t], beta[t] * k[t], k[t], beta[t] * v[t])
        outputs.append((H * q[t].unsqueeze(-1)).sum(0))
        states.append(H)
    return torch.stack(outputs), torch.stack(states)


@claim(
    "lem:gauge/operator", "The operator with signs equals the operator without, on keys and queries that absorbed them"
)
def gauge_operator(
    effort: float = 1.0, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = absorb
) -> Evidence:
    """Through `complex_kda` in float64, the backend it picks by itself; the final state is turned back by P_T."""
    cases, T, K, V, worst = _cases(effort, 40), 70, 6, 4, 0.0
    for seed in range(cases):
        rng = torch.Generator().manual_seed(seed)
        q, k, g = (torch.randn(T, K, generator=rng, dtype=torch.float64) for _ in range(3))
        v, beta = torch.randn(T, V, generator=rng, dtype=torch.float64), 2 * torch.rand(T, generator=rng).double()
        k, g = k / k.norm(dim=-1, keepdim=True), -g.abs() / 4
        signs = torch.where(torch.rand(T, K, generator=rng) < 0.5, -1.0, 1.0).double()
        outputs, state = _operator(q, k, v, g, beta, signs)
        plain, turned = _operator(change(signs, q), change(signs, k), v, g, beta, None)
        P = signs.prod(0).unsqueeze(-1)
        worst = max(worst, float((outputs - plain).abs().max()), float((state - P * turned).abs().max()))
        if worst > 1e-11:
            raise Refuted(f"seed {seed}: the two differ by {worst:.3g}")
    return Evidence(cases * T, "numeric", 1e-11 - worst, f"{cases} sequences of {T} tokens, to {worst:.1e}")


def _operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, signs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of one head through the operator: outputs [T, V], final state [K, V]."""
    one = (x[None, :, None] for x in (q, k, v, g, beta))
    sign = None if signs is None else signs.to(torch.int8)[None, :, None]
    outputs, state = complex_kda(*one, sign=sign, output_final_state=True)
    return outputs[0, :, 0], state[0, 0]
