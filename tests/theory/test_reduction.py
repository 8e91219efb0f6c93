"""The orthogonal reduction: it finds what was hidden, and refuses what is no finite non-expansive tracker."""

from dataclasses import replace

import numpy as np
import pytest

from ckda.theory import reduction
from ckda.theory.claims import Refuted
from ckda.theory.reduction import AffineTracker, disguise, reduce_tracker


@pytest.mark.parametrize("check", [reduction.affine_reduction, reduction.independent_reduction])
def test_claims_hold(check):
    assert check(effort=0.3).cases > 0


def with_head(tracker, h, **changes):
    heads = list(tracker.heads)
    heads[h] = replace(heads[h], **changes)
    return AffineTracker(tracker.group, tuple(heads))


def test_a_wrong_transition_is_refuted():
    tracker = disguise(["D3"])
    A = tracker.heads[0].A
    with pytest.raises(Refuted):
        reduce_tracker(with_head(tracker, 0, A=(A[0], A[2], A[1], *A[3:])))


def test_a_wrong_additive_term_is_refuted():
    tracker = disguise(["D3"])
    B = tracker.heads[0].B
    with pytest.raises(Refuted):
        reduce_tracker(with_head(tracker, 0, B=(B[0], B[1] + B[1], *B[2:])))


def test_a_missing_head_is_refuted():
    tracker = disguise(["Z2", "Z3"])
    with pytest.raises(Refuted, match="two products"):
        reduce_tracker(AffineTracker(tracker.group, tracker.heads[:1]))


def test_an_expansive_head_is_refused():
    tracker = disguise(["Z3"])
    with pytest.raises(ValueError, match="norm above one"):
        reduce_tracker(with_head(tracker, 0, A=tuple(A * 2 for A in tracker.heads[0].A)))


def test_wrong_dimensions_are_refuted():
    with pytest.raises(Refuted, match="survive"):
        reduction.check_reduction(disguise(["Z3"]), [3])


def test_a_useless_head_disappears():
    core = disguise(["D3"])
    F = core.heads[0].start.field
    still = reduction.AffineHead((F.zeros(2, 2),) * 6, (F.matrix([[1], [2]]),) * 6, F.matrix([[0], [0]]))
    reduced = reduce_tracker(AffineTracker(core.group, (still, core.heads[0])))
    assert reduced.kept == (1,)
    assert reduced.heads[0].dimension == 2


def test_the_word_merges_registers_and_has_value_e():
    tracker = disguise(["D4"], seed=3)
    reduced = reduce_tracker(tracker)
    before, left, after = reduced.states
    assert before > left == after == 8
    assert tracker.group.mul(*reversed(reduced.word)) == tracker.group.identity


def test_merging_word_of_an_automaton_with_a_reset():
    step = np.array([[1, 0], [2, 0], [0, 0]])  # letter 1 resets
    word = reduction.merging_word(step)
    at = np.arange(3)
    for letter in word:
        at = step[at, letter]
    assert len(set(at.tolist())) == 1
