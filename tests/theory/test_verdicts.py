"""Verdicts on tables: the trackers are checked when they are built, and a broken layer is refuted."""

import doctest
from dataclasses import replace

import numpy as np
import pytest

from ckda.groups import from_elements, group
from ckda.theory import verdicts
from ckda.theory.claims import Refuted
from ckda.theory.obstructions import frobenius, heisenberg
from ckda.theory.verdicts import check_layer, verdict


def test_claims_hold():
    assert verdicts.verdict_consistency(effort=0.1).cases >= 10


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
    ],
)
def test_tracked_under_any_numbering(name, dimensions):
    G = group(name)
    shuffled = G.relabelled(np.random.default_rng(1).permutation(G.order).tolist())
    found = verdict(shuffled)
    assert found.answer == "tracked"
    assert sorted(found.layer.dimensions) == dimensions
    assert set(check_layer(found.layer).values()) == set(range(G.order))


@pytest.mark.parametrize("G", [group("S5"), group("A6"), heisenberg(3), frobenius(7, 3)], ids=lambda G: G.name)
def test_impossible(G):
    found = verdict(G)
    assert (found.answer, found.layer) == ("impossible", None)
    assert found.obstruction.reason in found.reason


def special_linear(p):
    elements = [
        (a, b, c, d) for a in range(p) for b in range(p) for c in range(p) for d in range(p) if (a * d - b * c) % p == 1
    ]

    def multiply(x, y):
        (a, b, c, d), (e, f, g, h) = x, y
        return (a * e + b * g) % p, (a * f + b * h) % p, (c * e + d * g) % p, (c * f + d * h) % p

    return from_elements(f"SL(2,{p})", elements, multiply)


@pytest.mark.parametrize("G", [frobenius(5, 4), special_linear(3)], ids=lambda G: G.name)
def test_undecided_is_said_so(G):
    found = verdict(G)
    assert (found.answer, found.layer, found.obstruction) == ("undecided", None, None)
    assert "SO(3)" in found.reason


def test_a_layer_with_a_wrong_input_is_refuted():
    layer = verdict(group("Q8")).layer
    first = list(layer.inputs[0])
    first[1], first[2] = first[2], first[1]
    with pytest.raises(Refuted, match="reached with the products"):
        check_layer(replace(layer, inputs=(tuple(first), layer.inputs[1])))


def test_a_layer_without_one_of_its_heads_is_refuted():
    layer = verdict(group("D3xD3")).layer
    with pytest.raises(Refuted, match="reached with the products"):
        check_layer(replace(layer, heads=layer.heads[:1], inputs=layer.inputs[:1]))


def test_a_tracker_beside_an_obstruction_is_refuted(monkeypatch):
    excluded = verdict(group("S5")).obstruction
    monkeypatch.setattr(verdicts, "find_obstruction", lambda G: excluded)
    with pytest.raises(Refuted, match="excluded"):
        verdicts.check_no_conflict(group("S4"))


def test_examples():
    assert doctest.testmod(verdicts).failed == 0
