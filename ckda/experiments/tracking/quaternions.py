"""Heads that turn their state by quaternions, S -> q S q (prop:so3-four-dimensional-encoding, cor:a5-four).

With beta = 2 and gates that are 1 but for -1 along e, a letter acts as the reflection at its key after the reflection at e.
Four dimensions in which e is the number 1 are the quaternions, the key is q, and the letter's transition is S -> q S q. A
homomorphism of the group into the rotations of three dimensions, with character chi, has unit quaternions q_x up to sign.
Since q_y / q_x belongs to the rotation of x^-1 y, and its real part is the cosine of half the angle,

    (q_x . q_y)^2 = (1 + chi(x^-1 y)) / 4.

So a head's keys can be held to the exact ones without choosing coordinates or signs; for A5 these are the 60 axes of the
600-cell. Once the exact ones lie as near to the keys as they come, the head's transitions are compared with theirs.

Legend: n the group's order, K channels of a head.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from ckda.experiments.tracking.model import Tracker
from ckda.experiments.tracking.representations import irreps
from ckda.experiments.tracking.task import WordProblem
from ckda.groups import FiniteGroup

__all__ = ["QuaternionHead", "Rotations", "coxeter_plane", "quaternion_heads", "rotations"]

Array = np.ndarray
_NEAR = 0.1  # of inner products of unit keys, and
_NEAR_TURN = 0.25  # of a transition, in the spectral norm: farther off nothing is recognised


class Rotations(NamedTuple):
    """A homomorphism of the group into the rotations of three dimensions."""

    name: str
    products: Array  #: [n, n] |q_x . q_y| of its unit quaternions


class QuaternionHead(NamedTuple):
    """A head that nearly turns its state by unit quaternions of the group's elements."""

    head: int
    rotations: str  #: whose quaternions
    worst: float  #: the largest error of an inner product of two keys
    error: (
        float  #: the largest distance of a letter's transition, where the keys are, from the exact one; spectral norm
    )
    keys: Array  #: [n, K] unit keys
    exact: Array  #: [n, K] the exact ones, turned as near to them as they come

    def summary(self) -> dict[str, Any]:
        """For a result file: all but the keys."""
        return {name: x for name, x in self._asdict().items() if name not in ("keys", "exact")}

    def picture(self) -> dict[str, Any]:
        """For a figure: keys and exact ones in the Coxeter plane, and the inner products of all pairs."""
        plane = coxeter_plane(self.exact)
        above = np.triu_indices(len(self.keys), 1)
        sides = {"keys": self.keys, "exact": self.exact}
        places = {name: (points @ plane).tolist() for name, points in sides.items()}
        products = {f"{name}_products": (points @ points.T)[above].tolist() for name, points in sides.items()}
        return places | products


def rotations(G: FiniteGroup) -> list[Rotations]:
    """The homomorphisms of G into the rotations of three dimensions, up to coordinates, but for the trivial one.

    Example:
        >>> from ckda.groups import group
        >>> [found.name for found in rotations(group("A5"))]
        ['3-dimensional, faithful (1 of 2)', '3-dimensional, faithful (2 of 2)']
    """
    parts = [irrep for irrep in irreps(G) if irrep.dimension <= 3]
    found = []
    for number in (1, 2, 3):
        for chosen in itertools.combinations_with_replacement(parts, number):
            if sum(irrep.dimension for irrep in chosen) != 3 or all(irrep.name == "trivial" for irrep in chosen):
                continue
            determinants = np.prod([np.linalg.det(irrep.matrices) for irrep in chosen], axis=0)
            if np.allclose(determinants, 1):
                character = np.sum([irrep.character for irrep in chosen], axis=0)
                products = np.sqrt(np.clip((1 + character[G.table[G.inverse]]) / 4, 0, 1))
                found.append(Rotations(" + ".join(irrep.name for irrep in chosen), products))
    return [_told_apart(found, i) for i in range(len(found))]


def _told_apart(found: list[Rotations], i: int) -> Rotations:
    """The i-th, numbered where several have its name."""
    alike = [j for j, other in enumerate(found) if other.name == found[i].name]
    number = f" ({1 + alike.index(i)} of {len(alike)})" if len(alike) > 1 else ""
    return found[i]._replace(name=found[i].name + number)


@torch.no_grad()
def quaternion_heads(model: Tracker, task: WordProblem, choices: list[Rotations] | None = None) -> list[QuaternionHead]:
    """The heads that are one, up to 0.1 in inner products of keys and 0.25 in transitions, those with the most exact keys first.

    None are found unless words run over the whole group, a token an element, and heads have at least four channels.

    Args:
        model: its mixer has one key, gate and beta a token (:meth:`ckda.ComplexKDA.transitions`).
        choices: :func:`rotations` of the group, where they are known already.

    Example:
        >>> from ckda.experiments.tracking.model import build_tracker
        >>> task = WordProblem.named("A5")
        >>> model = build_tracker("ckda", task, width=32, heads=4, head_dim=4, beta_init="spread", start="quaternions")
        >>> [(found.head, found.worst < 1e-6, found.error < 1e-3) for found in quaternion_heads(model, task)]
        [(0, True, True), (1, True, True)]
    """
    if task.meaning or len(task.letters) != task.order:
        return []
    letters = model.embedding.weight[None, : task.order]
    k = model.mixer.transitions(letters)[1][0].double().cpu().numpy()
    A = model.mixer.matrices(letters)[0].double().cpu().numpy()
    choices = rotations(task.group) if choices is None else choices
    if k.shape[-1] < 4 or not choices:
        return []
    k = k / (np.linalg.norm(k, axis=-1, keepdims=True) + 1e-30)
    found = [_recognised(task.group, h, k[:, h], A[:, h], choices) for h in range(k.shape[1])]
    return sorted((head for head in found if head is not None), key=lambda head: head.worst)


def _recognised(G: FiniteGroup, head: int, keys: Array, A: Array, choices: list[Rotations]) -> QuaternionHead | None:
    """The head with unit keys [n, K] and transitions A [n, K, K], if it turns by quaternions."""
    gram = keys @ keys.T
    errors = [float(np.abs(np.abs(gram) - choice.products).max()) for choice in choices]
    best = int(np.argmin(errors))
    if errors[best] > _NEAR:
        return None
    exact = _turned(np.sign(gram) * choices[best].products, keys)
    if exact is None:
        return None
    error = _distance(A, exact, G.identity)
    if error > _NEAR_TURN:
        return None
    return QuaternionHead(head, choices[best].name, errors[best], error, keys, exact)


def _turned(gram: Array, keys: Array) -> Array | None:
    """Vectors [n, K] that span four dimensions and have these inner products, turned as near to the keys as they come, if any."""
    values, vectors = np.linalg.eigh(gram)
    if len(values) < 4 or values[-4] < 1e-6 or np.abs(values[:-4]).max(initial=0.0) > 1e-6:
        return None
    points = vectors[:, -4:] * np.sqrt(values[-4:])
    U, _, Vh = np.linalg.svd(points.T @ keys, full_matrices=False)
    return points @ U @ Vh


def _distance(A: Array, exact: Array, one: int) -> float:
    """How far transitions [n, K, K] are, on the span of the exact keys, from the reflections at those keys after the identity's."""
    span = np.linalg.svd(exact, full_matrices=False)[2][:4].T  # [K, 4]
    q = exact @ span
    reflections = np.eye(4) - 2 * q[:, :, None] * q[:, None, :]
    turns = span @ (reflections @ reflections[one])  # [n, K, 4]
    moved = A @ span
    return float(min(np.linalg.norm(moved - sign * turns, 2, axis=(1, 2)).max() for sign in (1, -1)))


def coxeter_plane(points: Array, tries: int = 400) -> Array:
    """[K, 2] the plane that a product of four reflections at the points [n, K] turns by the smallest angle: where they look best.

    The points span four dimensions. For the 600-cell it is the Coxeter plane of H4, with thirty-fold symmetry.
    """
    rng = np.random.default_rng(0)
    span = np.linalg.svd(points, full_matrices=False)[2][:4].T
    inside = points @ span
    inside /= np.linalg.norm(inside, axis=1, keepdims=True)
    best, plane = np.inf, np.eye(4)[:, :2]
    for _ in range(tries):
        turn = np.eye(4)
        for point in inside[rng.choice(len(inside), 4, replace=False)]:
            turn = turn @ (np.eye(4) - 2 * np.outer(point, point))
        values, vectors = np.linalg.eig(turn)
        angles = np.where(values.imag > 1e-6, np.angle(values), np.inf)
        if angles.min() < best - 1e-6:
            best, vector = angles.min(), vectors[:, angles.argmin()]
            plane = np.stack([vector.real, vector.imag], 1) * np.sqrt(2)
    return span @ plane
