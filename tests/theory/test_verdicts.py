"""Verdicts on tables: the trackers are checked when they are built, and a broken layer is refuted."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ckda.groups import frobenius, group
from ckda.theory import verdicts
from ckda.theory.claims import Refuted
from ckda.theory.layers import check_layer
from ckda.theory.obstructions import (
    check_odd_generated,
    find_obstruction,
    heisenberg,
    odd_pairs,
    sylow,
)
from ckda.theory.planar_heads import search_planar_heads
from ckda.theory.quaternions import chain_layer, frobenius_layer
from ckda.theory.verdicts import small_groups, verdict


@pytest.mark.parametrize("check", [verdicts.verdict_consistency, verdicts.frobenius_four, verdicts.quaternion_chain])
def test_claims_hold(check):
    assert check(effort=0.1).cases >= 10


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("Z9", [2]),
        ("D5", [2]),
        ("A4", [3]),
        ("S4", [3]),
        ("A5", [4]),
        ("S4xZ2", [3]),
        ("A5xZ2", [5]),
        ("Z2xZ2xZ2", [3]),
        ("Z3xZ3", [2, 2]),
        ("D3xD3", [2, 2]),
        ("A4xZ5", [2, 3]),
        ("Dic3", [2, 2]),
        ("Q8", [2, 2]),
        ("Q8xQ8", [2, 2, 2, 2]),
        ("Frob20", [4, 4]),
        ("SL(2,3)", [2, 2, 4, 4]),
        ("2O", [2, 2, 4, 4, 4]),
        ("GL(2,3)", [2, 2, 2, 4, 4, 4]),
    ],
)
def test_tracked_under_any_numbering(name, dimensions):
    G = group(name)
    shuffled = G.relabelled(np.random.default_rng(1).permutation(G.order).tolist())
    found = verdict(shuffled)
    assert found.answer == "tracked"
    assert sorted(found.layer.dimensions) == dimensions
    first = check_layer(found.layer)[0]
    assert {x for (x,) in first.elements} == set(range(G.order))


def test_trackers_follow_random_words_in_floats():
    """An independent check: multiply the transitions themselves, decode by the nearest state, compare the products."""
    rng = np.random.default_rng(0)
    for layer in (chain_layer("2T"), frobenius_layer(5), verdict(group("Q8")).layer):
        decoded = check_layer(layer)
        word = rng.integers(0, layer.group.order, 200)
        known = np.zeros(200, int)
        product = layer.group.identity
        truth = [product := layer.group.mul(int(g), product) for g in word]
        for stage, found in reversed(list(zip(layer.stages, decoded, strict=True))):
            A = np.array(
                [np.eye(stage.dimension) - 2 * np.outer(t.unit_key(), t.unit_key()) for t in stage.transitions]
            )
            A = A * np.array([t.signs for t in stage.transitions])[:, None, :]
            S, here = np.eye(stage.dimension), []
            for g in word:
                S = A[g] @ S
                here.append(int(np.abs(found.states.matrices - S).max((1, 2)).argmin()))
            known = found.label[here, known]
        assert [decoded[0].elements[e][0] for e in known] == truth


@pytest.mark.parametrize("G", [group("S5"), group("A6"), heisenberg(3), frobenius(7, 3)], ids=lambda G: G.name)
def test_impossible(G):
    found = verdict(G)
    assert (found.answer, found.layer) == ("impossible", None)
    assert found.obstruction.reason in found.reason


def small(order, number):
    return next(S for S in small_groups() if (S.order, S.number) == (order, number)).group()


def test_undecided_is_said_so(monkeypatch):
    monkeypatch.setattr(verdicts, "find_layer", lambda G: None)
    found = verdict(group("S3"))
    assert (found.answer, found.layer, found.obstruction) == ("undecided", None, None)


@pytest.mark.parametrize(("key", "dimensions"), [((16, 8), [2, 2]), ((32, 7), [2, 2]), ((36, 9), [4, 4, 4, 4])])
def test_groups_of_newer_constructions(key, dimensions):
    found = verdict(small(*key))
    assert (found.answer, found.layer.dimensions) == ("tracked", dimensions)


@pytest.mark.parametrize("key", [(48, 3), (56, 11)])
def test_two_conjugates_of_odd_order(key):
    found = verdict(small(*key))
    assert (found.answer, found.obstruction.label) == ("impossible", "odd-pairs")


def test_broken_laws_and_heads_are_refuted():
    with pytest.raises(Refuted, match="breaks the laws"):
        odd_pairs(0.1, law=lambda G: G.is_abelian)
    with pytest.raises(Refuted, match="of order 3 generate a group of order 24"):
        check_odd_generated(group("SL(2,5)"), {3: {120}})
    with pytest.raises(Refuted, match="no planar heads"):
        verdicts.planar_only(0.1, build=lambda G: None)
    with pytest.raises(Refuted, match="reached with the products"):
        verdicts.planar_only(0.1, build=lambda G: broken_input(search_planar_heads(G), 0, 1, 2))
    assert odd_pairs(0.1).cases >= 10


def test_small_groups_are_all_there():
    counts = Counter(S.order for S in small_groups())
    assert len(counts) == 63
    assert (counts[16], counts[32], counts[48], counts[60]) == (14, 51, 52, 13)
    assert all(S.group().order == S.order for S in small_groups() if S.order <= 24)


def answers_up_to(order):
    """How often each verdict is given; non-Abelian odd Sylow subgroups always have an obstruction."""
    answers = Counter()
    for S in small_groups():
        if S.order > order:
            continue
        G = S.group()
        answers[verdict(G).answer] += 1
        odd = [q for q in (3, 5, 7) if S.order % q == 0 and not G.subgroup(sylow(G, q)).group.is_abelian]
        assert not odd or find_obstruction(G) is not None
    return answers


def test_every_group_of_order_up_to_23():
    assert answers_up_to(23)["undecided"] == 0


@pytest.mark.exhaustive
def test_every_group_of_order_up_to_63():
    answers = answers_up_to(63)
    assert answers == {"tracked": 302, "impossible": 17}


def broken_input(layer, stage=0, a=1, b=2):
    """The layer with the transitions of two letters exchanged in one head."""
    old = layer.stages[stage]
    moved = list(old.transitions)
    moved[a], moved[b] = moved[b], moved[a]
    stages = list(layer.stages)
    stages[stage] = replace(old, transitions=tuple(moved))
    return replace(layer, stages=tuple(stages))


@pytest.mark.parametrize(
    "make", [lambda: verdict(group("Q8")).layer, lambda: frobenius_layer(5), lambda: chain_layer("2T")]
)
def test_a_layer_with_a_wrong_input_is_refuted(make):
    with pytest.raises(Refuted, match="reached with the products"):
        check_layer(broken_input(make()))


def test_a_layer_without_one_of_its_heads_is_refuted():
    layer = verdict(group("D3xD3")).layer
    with pytest.raises(Refuted, match="reached with the products"):
        check_layer(replace(layer, stages=layer.stages[:1]))


def test_broken_constructions_are_refuted():
    with pytest.raises(Refuted):
        verdicts.frobenius_four(0.1, build=lambda q: broken_input(frobenius_layer(q), 1, 6, 7))
    with pytest.raises(Refuted):
        verdicts.quaternion_chain(0.1, build=lambda name: broken_input(chain_layer(name), 1, 2, 5))


def test_a_tracker_beside_an_obstruction_is_refuted(monkeypatch):
    excluded = verdict(group("S5")).obstruction
    monkeypatch.setattr(verdicts, "find_obstruction", lambda G: excluded)
    with pytest.raises(Refuted, match="excluded"):
        verdicts.check_no_conflict(group("S4"))
