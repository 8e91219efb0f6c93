"""The adversary must be strong enough to find what is there."""

import numpy as np

from ckda.theory.search import climb, extra_pair, unit_circle_mode


def test_climb_reaches_corners_and_interior_maxima():
    corner = climb(lambda x: x.sum(-1), size=5, starts=16, steps=200)
    assert corner.best == 5.0
    inner = climb(lambda x: -((x - 0.3) ** 2).sum(-1), size=5, starts=16, steps=500)
    assert inner.best > -1e-6
    assert (np.diff(inner.scores) <= 0).all()


def test_climb_finds_two_pairs_where_they_exist():
    """A general 4 x 4 matrix has two non-real pairs; the score that is zero at a collision leads there."""
    found = climb(lambda x: extra_pair(x.reshape(-1, 4, 4), 1), size=16, starts=32, steps=100)
    assert found.best > 0.1


def test_extra_pair_counts():
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    both = np.kron(np.diag([1.0, 0.5]), turn)
    assert np.isclose(extra_pair(both[None], 0)[0], 1.0)
    assert np.isclose(extra_pair(both[None], 1)[0], 0.5)
    one = np.diag([0.0, 0.0, 3.0, 3.5])
    one[:2, :2] = turn
    assert np.isclose(extra_pair(one[None], 1)[0], -0.5)


def test_unit_circle_mode():
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    assert abs(unit_circle_mode(turn[None], np.pi / 2)[0]) < 1e-12
    assert unit_circle_mode(turn[None] / 2, np.pi / 2)[0] < -0.49
