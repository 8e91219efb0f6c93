"""Adversaries: a batched random hill climb that tries to violate a claim, and the scores it climbs.

A score is larger the closer a matrix comes to violating a bound, and positive once it does. The climb runs many starts
at once on raw parameters in [-1, 1]^P; clipping keeps the corners of a range reachable, where extremes often sit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Climb", "climb", "extra_pair", "unit_circle_mode"]

Array = np.ndarray


@dataclass(frozen=True)
class Climb:
    """The end of a search: every start's last point, best first, with its score."""

    points: Array  #: [starts, P]
    scores: Array  #: [starts], descending
    evaluations: int

    @property
    def best(self) -> float:
        return float(self.scores[0])


def climb(score: Callable[[Array], Array], size: int, starts: int, steps: int, seed: int = 0) -> Climb:
    """Maximise `score` over [-1, 1]^size from `starts` random points at once, each with its own adaptive step.

    Args:
        score: [N, size] -> [N].
        size: number of raw parameters.
        starts, steps: the search's budget; a step tries one proposal for every start.
        seed: of the random numbers.

    Example:
        >>> found = climb(lambda x: -np.abs(x - 0.25).sum(-1), size=3, starts=8, steps=400)
        >>> bool(found.best > -1e-3), found.evaluations
        (True, 3208)
    """
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.2, 1.2, (starts, size)).clip(-1, 1)
    value = score(x)
    width = np.full(starts, 0.3)
    for _ in range(steps):
        moved = rng.random((starts, size)) < rng.choice([0.3, 1.0], (starts, 1))
        trial = (x + width[:, None] * moved * rng.standard_normal((starts, size))).clip(-1, 1)
        new = score(trial)
        better = new > value
        x[better], value[better] = trial[better], new[better]
        width = np.where(better, width * 1.5, width * 0.93).clip(1e-7, 0.8)
    order = np.argsort(-value)
    return Climb(x[order], value[order], starts * (steps + 1))


def extra_pair(A: Array, bound: int, tolerance: float = 1e-9) -> Array:
    """How near [N, n, n] matrices are to more than `bound` non-real pairs.

    The imaginary part of pair number bound + 1 where there is one; else minus the gap of the real eigenvalues that
    would have to meet to form it.

    Example:
        >>> turn = np.array([[0.0, -1.0], [1.0, 0.0]])
        >>> extra_pair(turn[None], bound=0), extra_pair(np.diag([1.0, 3.0])[None], bound=0)
        (array([1.]), array([-2.]))
    """
    values = np.linalg.eigvals(A)
    far = 1e3 * (1 + np.arange(A.shape[-1]))
    real = np.where(np.abs(values.imag) > tolerance, far, values.real)
    gaps = np.diff(np.sort(real, -1), axis=-1)
    upper = np.where(values.imag > tolerance, values.imag, -1e9)
    return -np.partition(-np.concatenate([upper, -gaps], -1), bound, axis=-1)[:, bound]


def unit_circle_mode(A: Array, angle: float) -> Array:
    """Minus the distance from exp(i angle) to the spectrum of [N, n, n] matrices.

    Example:
        >>> unit_circle_mode(np.eye(2)[None], 0.0)
        array([-0.])
    """
    return -np.abs(np.linalg.eigvals(A) - np.exp(1j * angle)).min(-1)
