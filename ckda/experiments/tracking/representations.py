"""Which representation of a group a set of matrices is, or nearly is, from the group's table alone.

The isotypic parts of the real regular representation are the eigenspaces of a random symmetric combination of class sums, which
commutes with every translation. An irreducible representation sits in its part as an eigenspace of a random symmetric
combination of translations from the other side. Complex-conjugate pairs count as one real part.

Legend: n the group's order, r the dimension of the matrices looked at, d of an irreducible representation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckda.groups import FiniteGroup

__all__ = ["Irrep", "Nearest", "irreps", "nearest"]

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Irrep:
    """A real irreducible representation by orthogonal matrices."""

    matrices: Array  #: [n, d, d]
    projector: Array  #: [n, n] onto its isotypic part of the functions on the group
    kernel: tuple[int, ...]  #: the elements that act as the identity

    @property
    def dimension(self) -> int:
        return self.matrices.shape[-1]

    @property
    def character(self) -> Array:
        """[n] traces."""
        return np.trace(self.matrices, axis1=1, axis2=2)

    @property
    def name(self) -> str:
        """Its dimension and what it does not see.

        Example:
            >>> from ckda.groups import group
            >>> [irrep.name for irrep in irreps(group("S3"))]
            ['trivial', '1-dimensional, blind to 3 elements', '2-dimensional, faithful']
        """
        if len(self.kernel) == len(self.matrices):
            return "trivial"
        seen = "faithful" if len(self.kernel) == 1 else f"blind to {len(self.kernel)} elements"
        return f"{self.dimension}-dimensional, {seen}"


def irreps(G: FiniteGroup, seed: int = 0) -> list[Irrep]:
    """The real irreducible representations of G, by dimension, the larger kernel first.

    Example:
        >>> from ckda.groups import group
        >>> [irrep.dimension for irrep in irreps(group("S4"))], [irrep.dimension for irrep in irreps(group("Z5"))]
        ([1, 1, 2, 3, 3], [1, 2, 2])
    """
    n, rng = G.order, np.random.default_rng(seed)
    left, right = _translations(G)
    centre = sum(rng.normal() * left[list(c)].sum(0) / len(c) for c in G.classes)
    other = np.tensordot(rng.normal(size=n), right, 1)
    found = []
    for part in _eigenspaces(centre + centre.T):  # [n, m] orthonormal
        within = part.T @ (other + other.T) @ part
        basis = part @ _eigenspaces(within)[0]  # one irreducible subspace, [n, d]
        matrices = np.einsum("gi,xgh,hj->xij", basis, left, basis)
        eye = np.eye(basis.shape[1])
        kernel = tuple(x for x in range(n) if np.abs(matrices[x] - eye).max() < 1e-6)
        found.append(Irrep(matrices, part @ part.T, kernel))
    return sorted(found, key=lambda irrep: (irrep.dimension, -len(irrep.kernel), tuple(-irrep.character.round(6))))


def _translations(G: FiniteGroup) -> tuple[Array, Array]:
    """[n, n, n] each: (left[x] f)(x g) = f(g) and (right[x] f)(g x) = f(g), as permutation matrices."""
    n = G.order
    left, right = np.zeros((n, n, n)), np.zeros((n, n, n))
    for x in range(n):
        left[x, G.table[x], np.arange(n)] = 1
        right[x, G.table[:, x], np.arange(n)] = 1
    return left, right


def _eigenspaces(symmetric: Array, tolerance: float = 1e-6) -> list[Array]:
    """Orthonormal bases of the eigenspaces."""
    values, vectors = np.linalg.eigh(symmetric)
    cuts = np.flatnonzero(np.diff(values) > tolerance * max(1.0, np.abs(values).max())) + 1
    return np.split(vectors, cuts, axis=1)


@dataclass(frozen=True, eq=False)
class Nearest:
    """The exact orthogonal representation nearest to some matrices."""

    parts: list[tuple[Irrep, int]]  #: irreducible representations and how often each occurs
    matrices: Array  #: [n, r, r] the exact representation, in the coordinates of the matrices given
    errors: Array  #: [n] spectral norm of each matrix's distance from it

    def summary(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "parts": [
                {"name": irrep.name, "dimension": irrep.dimension, "times": times} for irrep, times in self.parts
            ],
            "worst_error": float(self.errors.max()),
            "mean_error": float(self.errors.mean()),
            "errors": self.errors.tolist(),
        }


def nearest(matrices: Array, G: FiniteGroup, seed: int = 0) -> Nearest | None:
    """The exact representation nearest to matrices [n, r, r], one per element; None where their traces are no character.

    Multiplicities come from the traces by the orthogonality of characters; the coordinates from averaging a random matrix over
    the group, which intertwines the two up to the matrices' own error, and its polar factor.

    Example:
        >>> from ckda.groups import group
        >>> G = group("S3")
        >>> turned = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
        >>> sign, plane = irreps(G)[1:]
        >>> exact = np.zeros((6, 3, 3))
        >>> exact[:, :1, :1], exact[:, 1:, 1:] = sign.matrices, plane.matrices
        >>> found = nearest(turned @ exact @ turned.T, G)
        >>> [times for _, times in found.parts], bool(found.errors.max() < 1e-6)
        ([1, 1], True)
    """
    n, r = matrices.shape[:2]
    traces = np.trace(matrices, axis1=1, axis2=2)
    parts, blocks = [], []
    for irrep in irreps(G):
        norm = (irrep.character**2).sum() / n  # 1 for real irreps, 2 for pairs of complex ones
        times = round(float((irrep.character * traces).sum() / n / norm))
        if times > 0:
            parts.append((irrep, times))
            blocks += [irrep.matrices] * times
    if sum(irrep.dimension * times for irrep, times in parts) != r:
        return None
    exact, at = np.zeros((n, r, r)), 0
    for block in blocks:
        d = block.shape[-1]
        exact[:, at : at + d, at : at + d] = block
        at += d
    T = np.random.default_rng(seed).normal(size=(r, r))
    for _ in range(5):
        T = np.einsum("gij,jk,glk->il", matrices, T, exact) / n
        U, _, Vh = np.linalg.svd(T)
        T = U @ Vh
    moved = T @ exact @ T.T
    return Nearest(parts, moved, np.linalg.norm(matrices - moved, 2, axis=(1, 2)))
