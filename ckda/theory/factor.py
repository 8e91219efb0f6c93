"""Factoring matrices into CKDA transitions (prop:CKDA-factorization).

Orthogonal matrices are factored exactly over any field: their columns are unit vectors, so Householder QR needs no
square root. Contractions go through a singular value decomposition, exactly where one is given, in float64 otherwise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ckda import transition
from ckda.theory.exact import Field, Matrix, Number

__all__ = [
    "ExactFactor",
    "Factor",
    "cycle_minor",
    "factor_contraction",
    "factor_orthogonal",
    "factor_svd",
    "multiply",
    "multiply_exact",
    "reflection_keys",
]


class ExactFactor(NamedTuple):
    """A CKDA transition over a field: gate, key of any length, learning rate."""

    alpha: list[Number]
    k: Matrix  #: [n, 1]; the transition uses k / |k|
    beta: Number


class Factor(NamedTuple):
    """A CKDA transition in float64: gate [n], unit key [n], learning rate."""

    alpha: np.ndarray
    k: np.ndarray
    beta: float


def multiply_exact(F: Field, factors: Sequence[ExactFactor]) -> Matrix:
    """The product of the transitions, the first one leftmost."""
    product = F.ckda(*factors[0])
    for factor in factors[1:]:
        product = product @ F.ckda(*factor)
    return product


def multiply(factors: Sequence[Factor]) -> np.ndarray:
    """The product of the transitions through `ckda.transition.dense`, the first one leftmost."""
    product = torch.eye(len(factors[0].k), dtype=torch.float64)
    for f in factors:
        product = product @ transition.dense(torch.from_numpy(f.alpha), torch.from_numpy(f.k), f.beta)
    return product.numpy()


def _reflections(Q: Matrix) -> tuple[list[tuple[Matrix, int]], list[Number]]:
    """Q = H_1 ... H_{n-1} S: keys with beta 2 (0: identity padding), and the diagonal signs that are left."""
    F, n = Q.field, Q.shape[0]
    keys: list[tuple[Matrix, int]] = []
    for j in range(n - 1):
        key = Q.column(j) - F.eye(n).column(j)  # sends column j, a unit vector, to e_j; earlier columns are e_i already
        if key.is_zero():
            keys.append((F.eye(n).column(0), 0))
            continue
        Q = F.householder(key) @ Q
        keys.append((key, 2))
    return keys, [Q[i, i] for i in range(n)]


def factor_orthogonal(Q: Matrix) -> list[ExactFactor]:
    """Any orthogonal matrix as max(1, n - 1) CKDA transitions, exactly (prop:CKDA-factorization).

    Example:
        >>> from ckda.theory.exact import field
        >>> cycle = field().permutation([1, 2, 3, 0])
        >>> factors = factor_orthogonal(cycle)
        >>> len(factors), multiply_exact(field(), factors) == cycle
        (3, True)
    """
    F, n = Q.field, Q.shape[0]
    ones = [F(1)] * n
    keys, signs = _reflections(Q)
    if not keys:
        return [ExactFactor(signs, F.eye(1).column(0), F(0))]
    return [ExactFactor(signs if j == n - 2 else ones, k, F(beta)) for j, (k, beta) in enumerate(keys)]


def reflection_keys(Q: Matrix) -> list[Matrix]:
    """Keys of at most n reflections whose product is the orthogonal matrix Q: the factors a DeltaProduct step needs.

    Example:
        >>> from ckda.theory.exact import field
        >>> [len(reflection_keys(field().permutation(p))) for p in ([0, 1, 2], [1, 0, 2], [1, 2, 0])]
        [0, 1, 2]
    """
    keys, signs = _reflections(Q)
    eye = Q.field.eye(Q.shape[0])
    return [k for k, beta in keys if beta] + [eye.column(i) for i, s in enumerate(signs) if Q.field.sign(s) < 0]


def factor_svd(U: Matrix, sigma: Sequence[Number], V: Matrix) -> list[ExactFactor]:
    """U Diag(sigma) V^T as max(1, 2n - 2) CKDA transitions, for orthogonal U, V and 0 <= sigma <= 1.

    Example:
        >>> from ckda.theory.exact import field
        >>> F = field()
        >>> len(factor_svd(F.eye(3), [F(1), F("1/2"), F(0)], F.permutation([1, 2, 0])))
        4
    """
    F, n = U.field, U.shape[0]
    ones = [F(1)] * n
    left, signs_left = _reflections(U)
    right, signs_right = _reflections(V)
    gate = [a * F(s) * b for a, s, b in zip(signs_left, sigma, signs_right, strict=True)]
    if not left:
        return [ExactFactor(gate, F.eye(1).column(0), F(0))]
    factors = [ExactFactor(gate if j == n - 2 else ones, k, F(beta)) for j, (k, beta) in enumerate(left)]
    return factors + [ExactFactor(ones, k, F(beta)) for k, beta in reversed(right)]


def _reflections_float(Q: np.ndarray) -> tuple[list[tuple[np.ndarray, float]], np.ndarray]:
    """:func:`_reflections` in float64, each column sent to the farther of +-e_j, which loses no digits."""
    n, keys = len(Q), []
    for j in range(n - 1):
        key = Q[:, j].copy()
        key[:j] = 0
        key[j] += np.copysign(1.0, key[j])
        key /= np.linalg.norm(key)
        Q = Q - 2 * np.outer(key, key @ Q)
        keys.append((key, 2.0))
    return keys, np.sign(np.diagonal(Q))


def factor_contraction(A: np.ndarray) -> list[Factor]:
    """Any [n, n] matrix of spectral norm at most one as max(1, 2n - 2) CKDA transitions, in float64.

    Example:
        >>> A = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.1, 0.0, 0.2]])
        >>> factors = factor_contraction(A)
        >>> len(factors), bool(np.allclose(multiply(factors), A))
        (4, True)
    """
    n = len(A)
    U, sigma, Vt = np.linalg.svd(A)
    if sigma[0] > 1 + 1e-9:
        raise ValueError(f"factor_contraction: the spectral norm is {sigma[0]:.6g}, it may be at most 1")
    left, signs_left = _reflections_float(U)
    right, signs_right = _reflections_float(Vt.T)
    gate = (signs_left * sigma * signs_right).clip(-1, 1)
    if n == 1:
        return [Factor(gate, np.ones(1), 0.0)]
    factors = [Factor(gate if j == n - 2 else np.ones(n), k, beta) for j, (k, beta) in enumerate(left)]
    return factors + [Factor(np.ones(n), k, beta) for k, beta in reversed(right)]


def cycle_minor(n: int) -> tuple[list[list[str]], bool]:
    """The certificate that an n-cycle C needs n - 1 factors: a minor of C - Diag(d) that no d makes singular.

    Without its first row and last column C - Diag(d) is upper triangular with ones on its diagonal, whatever d is; so
    its rank is at least n - 1, while m CKDA factors give diagonal plus rank at most m.

    Returns:
        The minor as strings in d_1 .. d_n, and whether it is unit upper triangular.

    Example:
        >>> cycle_minor(4)
        ([['1', '-d_2', '0'], ['0', '1', '-d_3'], ['0', '0', '1']], True)
    """
    table = [[f"-d_{i + 1}" if i == j else "1" if i == (j + 1) % n else "0" for j in range(n)] for i in range(n)]
    minor = [row[:-1] for row in table[1:]]
    triangular = all(minor[i][j] == ("1" if i == j else "0") for i in range(n - 1) for j in range(i + 1))
    return minor, triangular
