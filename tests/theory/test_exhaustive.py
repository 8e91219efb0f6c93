"""The brute force finds what is there, nothing else, and refutes a wrong verdict."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckda.groups import group
from ckda.theory import exhaustive
from ckda.theory.claims import Refuted
from ckda.theory.exhaustive import compare, cube, icosahedron, planar, search, signed_permutations
from ckda.theory.verdicts import verdict


def test_universes_are_groups_with_the_right_letters():
    for universe, order, letters in ((planar(5), 10, 10), (signed_permutations(3), 48, 32), (cube(), 48, 48)):
        table = universe.table
        assert (len(table), len(universe.letters)) == (order, letters)
        assert (table[table][:, :, :5] == table[:, table[:, :5]]).all()
        assert (np.sort(table, 1) == np.arange(order)).all()
    assert len(icosahedron().letters) < 120  # thm:a5-three


@pytest.mark.parametrize(
    ("name", "universes", "found"),
    [
        ("S4", [cube], True),
        ("S4", [lambda: signed_permutations(3)], False),  # prop:cube: the standard position fails
        ("A5", [icosahedron], False),
        ("Q8", [lambda: planar(8)], False),
        ("Q8", [lambda: planar(4), lambda: planar(4)], True),
    ],
)
def test_search(name, universes, found):
    result = search(group(name), [make() for make in universes])
    assert result.found is found
    assert len(result.letters) == (group(name).order if found else 0)


def test_letters_that_are_found_track_the_group():
    """Multiply them out along random words: equal states, equal products."""
    G, universes = group("Q8"), [planar(4), planar(4)]
    letters = search(G, universes).letters
    order = [G.identity, *(a for a in range(G.order) if a != G.identity)]
    rng, seen = np.random.default_rng(0), {}
    state, now = (0, 0), G.identity
    for g in rng.integers(0, G.order, 2000):
        state = tuple(int(u.table[a, s]) for u, a, s in zip(universes, letters[int(g)], state, strict=True))
        now = G.mul(order[g], now)
        assert seen.setdefault(state, now) == now


def test_a_wrong_verdict_is_refuted():
    with pytest.raises(Refuted, match="the verdict is"):
        compare(group("S3"), judge=lambda G: replace(verdict(G), answer="impossible", layer=None))
    with pytest.raises(Refuted, match="track it in dimension 2"):
        compare(group("Z4"), judge=lambda G: replace(verdict(G), layer=verdict(group("Q8")).layer))
    with pytest.raises(Refuted, match="Heis3: tracked"):
        exhaustive.check_excluded("Heis3", judge=lambda G: replace(verdict(G), answer="tracked"))


def test_the_records_agree():
    """The brute force and the verdicts, each as it was recorded, on every group up to the order of the search."""
    folder = Path(__file__).parents[2] / "results" / "theory" / "small_groups"
    searched, judged = (json.loads((folder / name).read_text()) for name in ("brute_force.json", "verdicts.json"))
    verdicts = {row["group"]: row for row in judged["groups"]}
    assert len(verdicts) == 319
    assert len(searched["groups"]) == sum(row["order"] <= searched["order"] for row in judged["groups"])
    for row in searched["groups"]:
        said = verdicts[row["group"]]
        assert (row["verdict"], row["dimensions"]) == (said["answer"], sum(said["heads"]))
        assert row["search"][0] == row["dimensions"] if row["search"] else row["dimensions"] > 4
    assert {row["group"] for row in searched["excluded"]} == {"Frob21", "Heis3", "[48,3]"}


def test_the_claim_holds():
    assert exhaustive.brute_force(effort=0.1).cases >= 14
