"""The machines simulated directly, and regular expressions against Python's `re`."""

import random
import re
import sys

import flint
import pytest

from ckda.theory.machines import DFA, WFA, GroupWords, Permutations, group, map_matrix, regex_to_dfa


@pytest.mark.parametrize("pattern", ["(ab)*", "a*b?c", "(a|bc)*[^a]", "", "a{2,4}(b|c)*", "[ab]*c?[ab]*"])
def test_regex_agrees_with_re(pattern):
    dfa = regex_to_dfa(pattern, "abc")
    rng = random.Random(0)
    for _ in range(100):
        word = rng.choices(range(3), k=rng.randint(0, 8))
        assert dfa.accepts(word) == bool(re.fullmatch(pattern, "".join("abc"[a] for a in word)))


def test_regex_keeps_only_what_the_letters_reach():
    assert regex_to_dfa("a*|xyz*", "a").size == 2
    assert regex_to_dfa("a*|xyz*", "axyz").size == 5


def test_regex_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "greenery", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ckda\[theory\]'"):
        regex_to_dfa("a*", "a")


def test_matrices_follow_the_trace():
    rng = random.Random(1)
    for machine in (DFA.random(5, 3, rng), GroupWords(group("A4"))):
        word = rng.choices(range(len(machine.matrices)), k=30)
        state = machine.start
        for a, q in zip(word, machine.trace(word)[1:], strict=True):
            state = machine.matrices[a] * state
            assert [i for i in range(machine.size) if state[i, 0]] == [q]


def test_permutations_and_table_tell_the_same_products():
    S4 = group("S4")
    word = random.Random(2).choices(range(24), k=40)
    assert [S4.labels[g] for g in GroupWords(S4).trace(word)] == Permutations.of(S4).trace(word)


def test_wfa_counts():
    """Fibonacci numbers as weights."""
    wfa = WFA([flint.fmpq_mat(2, 2, [1, 1, 1, 0])], (flint.fmpq(1), flint.fmpq(0)), (flint.fmpq(0), flint.fmpq(1)))
    assert [wfa.weight(p) for p in wfa.trace([0] * 8)] == [0, 1, 1, 2, 3, 5, 8, 13, 21]


def test_map_matrix_has_one_hot_columns():
    assert map_matrix((2, 2, 0)).tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]
