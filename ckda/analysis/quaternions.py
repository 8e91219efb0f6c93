"""Heads that turn their state by quaternions, S -> q S q (prop:so3-four-dimensional-encoding, cor:a5-four), found from their keys.

With beta = 2 and gates that are all 1 but for one -1 in direction e, a letter acts as the reflection at its key after the
reflection at e. Four dimensions in which e is the number 1 are the quaternions, and the key is q. A homomorphism of the group
into the rotations of three dimensions, with character chi, has unit quaternions q_x up to sign, and since q_y / q_x belongs to
the rotation of x^-1 y and its real part is the cosine of half the angle,

    (q_x . q_y)^2 = (1 + chi(x^-1 y)) / 4.

So keys can be held to the exact ones without choosing coordinates or signs. For A5 these are the 60 axes of the 600-cell.

Legend: n the group's order, K channels of a head.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from ckda.analysis.representations import irreps
from ckda.models.tracker import Tracker
from ckda.tasks.groups import WordProblem
from ckda.theory.finite_groups import FiniteGroup

__all__ = ["QuaternionHead", "Rotations", "coxeter_plane", "inner_products", "quaternion_heads", "rotations"]

Array = np.ndarray
_NEAR = 0.1  # of an inner product of unit keys: farther off nothing is recognised


class Rotations(NamedTuple):
    """A homomorphism of the group into the rotations of three dimensions."""

    name: str
    character: Array  #: [n] traces


class QuaternionHead(NamedTuple):
    """A head whose keys are nearly unit quaternions of the group's elements."""

    head: int
    rotations: str  #: whose quaternions
    worst: float  #: the largest error of an inner product of two keys
    beta: float  #: the smallest over the letters
    gate: float  #: the smallest |alpha| over letters and channels
    one: float  #: the length of the identity's key along the channels whose sign is the rarer one; 1 if exact
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
        >>> from ckda.theory.finite_groups import group
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
                found.append(Rotations(" + ".join(irrep.name for irrep in chosen), character))
    return [_told_apart(found, i) for i in range(len(found))]


def _told_apart(found: list[Rotations], i: int) -> Rotations:
    """The i-th, numbered where several have its name."""
    alike = [j for j, other in enumerate(found) if other.name == found[i].name]
    number = f" ({1 + alike.index(i)} of {len(alike)})" if len(alike) > 1 else ""
    return found[i]._replace(name=found[i].name + number)


def inner_products(G: FiniteGroup, character: Array) -> Array:
    """[n, n] |q_x . q_y| of the unit quaternions of these rotations."""
    one = int(np.flatnonzero((G.table == np.arange(G.order)).all(1))[0])
    inverse = (G.table == one).argmax(1)
    return np.sqrt(np.clip((1 + character[G.table[inverse]]) / 4, 0, 1))


@torch.no_grad()
def quaternion_heads(model: Tracker, task: WordProblem) -> list[QuaternionHead]:
    """The heads that are one within 0.1, with signs that no letter changes, the most exact first.

    Only for words over a whole group, a token an element; of others nothing is said.

    Example:
        >>> from ckda.models.tracker import build_tracker
        >>> task = WordProblem.named("A5")
        >>> model = build_tracker("ckda", task, width=32, heads=4, head_dim=4, beta_init="spread", start="quaternions")
        >>> [(found.head, found.worst < 1e-6) for found in quaternion_heads(model, task)]
        [(0, True), (1, True)]
    """
    if task.meaning:
        return []
    alpha, k, beta = (
        x[0].double().cpu().numpy() for x in model.mixer.transitions(model.embedding.weight[None, : task.order])
    )
    k = k / (np.linalg.norm(k, axis=-1, keepdims=True) + 1e-30)
    ideals = [(choice.name, inner_products(task.group, choice.character)) for choice in rotations(task.group)]
    one = int(np.flatnonzero((task.group.table == np.arange(task.order)).all(1))[0])
    found = []
    for head in range(k.shape[1]):
        keys = k[:, head]
        gram = keys @ keys.T
        near = [(float(np.abs(np.abs(gram) - ideal).max()), name, ideal) for name, ideal in ideals]
        worst, name, ideal = min(near, key=lambda entry: entry[0], default=(1.0, "", gram))
        negative = alpha[one, head] < 0
        if worst > _NEAR or ((alpha[:, head] < 0) != negative).any():
            continue
        rarer = negative if negative.sum() * 2 <= len(negative) else ~negative
        found.append(
            QuaternionHead(
                head,
                name,
                worst,
                float(beta[:, head].min()),
                float(np.abs(alpha[:, head]).min()),
                float(np.linalg.norm(keys[one, rarer])),
                keys,
                _turned(np.sign(gram) * ideal, keys),
            )
        )
    return sorted(found, key=lambda entry: entry.worst)


def _turned(gram: Array, keys: Array) -> Array:
    """Vectors [n, K] in four dimensions with these inner products, turned as near as they come to the keys."""
    values, vectors = np.linalg.eigh(gram)
    points = vectors[:, -4:] * np.sqrt(np.clip(values[-4:], 0, None))
    U, _, Vh = np.linalg.svd(points.T @ keys, full_matrices=False)
    return points @ U @ Vh


def coxeter_plane(points: Array, tries: int = 400) -> Array:
    """[K, 2] the plane that a product of four reflections at the points [n, K] turns by the smallest angle: where they look best.

    For the 600-cell it is the Coxeter plane of H4, with thirty-fold symmetry.
    """
    rng = np.random.default_rng(0)
    U, _, _ = np.linalg.svd(points.T, full_matrices=False)
    basis = U[:, :4]
    inside = points @ basis
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
    return basis @ plane
