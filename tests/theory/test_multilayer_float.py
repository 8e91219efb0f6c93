"""The three layers through the operator: how long they stay exact, and runs that must be called wrong."""

import random

import pytest
import torch

from ckda.theory import automata
from ckda.theory.automata import check_for_ever
from ckda.theory.claims import Refuted
from ckda.theory.machines import DFA, WFA, GroupWords, Permutations, group
from ckda.theory.multilayer import Clock, simulate
from ckda.theory.multilayer_float import clock_horizon, clock_lock, run_float, wfa_error


@pytest.mark.parametrize("claim", [automata.float64, automata.float32, automata.float_for_ever])
def test_claim_holds(claim):
    assert claim(effort=0.05).cases > 0


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_backends_follow_the_same_word(backend):
    S3 = GroupWords(group("S3"))
    word = random.Random(0).choices(range(6), k=200)
    run = run_float(simulate(S3), word, S3.trace(word)[1:], torch.float32, backend=backend)
    assert run.exact == 200
    assert run.lost_in is None


def test_a_wrong_state_is_noticed_where_it_happens():
    S5 = Permutations.of(group("S5"))
    word = random.Random(1).choices(range(120), k=60)
    expected = S5.trace(word)[1:]
    expected[41] = expected[41][::-1]
    run = run_float(simulate(S5), word, expected)
    assert (run.exact, run.lost_in) == (41, "accumulator")


def test_a_clock_that_drifts_is_lost():
    """Half precision keeps eleven bits: 2m = 46 points on a line are soon too close."""
    run = clock_horizon(Clock(23), 2000, torch.bfloat16)
    assert run.lost_in == "clock"
    assert run.exact < 2000


def test_a_clock_with_the_wrong_sign_is_lost_at_once():
    clock = Clock(5)
    clock.gate = {}
    assert clock_horizon(clock, 50, torch.float64).exact < 5


def test_the_claim_is_refuted_where_the_format_is_too_coarse():
    S4 = GroupWords(group("S4"))
    with pytest.raises(Refuted, match="the clock is wrong at position"):
        automata._float_claim([("S4", S4, 300, True)], torch.bfloat16, 0)


def test_lock_is_periodic():
    lock = clock_lock(Clock(2), 200, torch.float32)
    assert lock is not None
    assert lock.period % 4 == 0


def test_for_ever_refuses_rounded_keys(monkeypatch):
    """A column copy with the key 5 e_s + 3 e_d needs a rate of 1/10, which no binary format has."""
    monkeypatch.setattr(automata.programs, "dyadic_merge", lambda s, d: automata.programs.merge(s, d, 5, 3))
    dfa = DFA(((0, 1), (0, 2), (0, 0)))
    with pytest.raises(Refuted, match="not exact"):
        check_for_ever(dfa, torch.float64, 300, random.Random(2))


def test_wfa_error_is_small_but_not_zero():
    wfa = WFA.random(2, 2, random.Random(0))
    error = wfa_error(wfa, random.Random(1).choices(range(2), k=100))
    assert 0 < error.max() < 1e-11
