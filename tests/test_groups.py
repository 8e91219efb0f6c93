"""Tables: every axiom is checked with a clear message, and a group is recognised however its elements are numbered."""

import numpy as np
import pytest

from ckda.groups import (
    NotAGroup,
    cycle_notation,
    direct_factors,
    from_table,
    group,
    isomorphism,
    permutation,
    read_group,
    recognise,
)

BROKEN = {
    "shape": [[0, 1]],
    "entries": [[0.0, 1.0], [1.0, 0.0]],
    "closure": [[0, 1], [1, 2]],
    "identity": [[1, 0], [1, 0]],
    "associativity": [  # a loop of order five that is no group
        [0, 1, 2, 3, 4],
        [1, 0, 3, 4, 2],
        [2, 4, 0, 1, 3],
        [3, 2, 4, 0, 1],
        [4, 3, 1, 2, 0],
    ],
    "inverses": [[0, 1], [1, 1]],
}


def test_too_many_normal_subgroups_are_refused(monkeypatch):
    assert len(group("Z2xZ2xZ2xZ2").normal_subgroups) == 67
    monkeypatch.setattr("ckda.groups.MAX_NORMAL", 60)
    with pytest.raises(ValueError, match="more than 60 normal subgroups"):
        _ = group("Z2xZ2xZ2xZ2").normal_subgroups


@pytest.mark.parametrize("axiom", BROKEN)
def test_a_broken_table_names_its_axiom(axiom):
    with pytest.raises(NotAGroup, match=axiom):
        from_table(BROKEN[axiom])


def test_one_wrong_entry_is_found():
    table = group("S4").table.copy()
    table[5, 7], table[5, 8] = table[5, 8], table[5, 7]
    with pytest.raises(NotAGroup, match="associativity"):
        from_table(table)


@pytest.mark.parametrize("name", ["Z1", "Z12", "D2", "D7", "A4", "S4", "A5"])
def test_recognised_under_any_numbering(name):
    G = group(name)
    shuffled = G.relabelled(np.random.default_rng(0).permutation(G.order).tolist())
    assert recognise(shuffled) == name
    images = isomorphism(shuffled, G)
    assert images is not None
    moved = np.array(images)
    assert (moved[shuffled.table] == G.table[np.ix_(moved, moved)]).all()


def test_names_that_are_one_group():
    assert [recognise(group(n)) for n in ("S2", "S3", "A3", "Z2xZ3", "Z2xZ2", "D1")] == [
        "Z2",
        "D3",
        "Z3",
        "Z6",
        "D2",
        "Z2",
    ]


@pytest.mark.parametrize("name", ["Q8", "S5", "A6", "Z2xZ4", "Dic3", "Z2xA4"])
def test_others_are_not_taken_for_subgroups_of_so3(name):
    assert recognise(group(name)) is None


@pytest.mark.parametrize(
    ("name", "factors"),
    [("Z6", ["Z2", "Z3"]), ("D6", ["D3", "Z2"]), ("Z2xS4xZ3", ["S4", "Z2", "Z3"]), ("Q8", [None]), ("A5", ["A5"])],
)
def test_direct_factors(name, factors):
    parts = direct_factors(group(name))
    assert sorted(str(recognise(p.group)) for p in parts) == sorted(map(str, factors))
    assert np.prod([p.group.order for p in parts]) == group(name).order


def test_products_compose_from_right_to_left():
    S3 = group("S3")
    a, b = (S3.index(permutation(c, 3)) for c in ("(12)", "(23)"))
    assert S3.labels[S3.mul(a, b)] == permutation("(123)", 3)
    assert S3.labels[S3.mul(b, a)] == permutation("(132)", 3)


def test_normal_subgroups_and_quotients():
    S4 = group("S4")
    Q, projection = S4.quotient(S4.normal_subgroups[1])
    assert recognise(Q) == "D3"
    assert (projection[S4.table] == Q.table[projection[:, None], projection[None, :]]).all()
    with pytest.raises(ValueError, match="not normal"):
        S4.quotient(S4.generate([S4.index(permutation("(12)", 4))]))


@pytest.mark.parametrize("name", ["X3", "Z0", "S9", "", "Z2x"])
def test_unknown_or_too_large_names(name):
    with pytest.raises(ValueError, match=r"no group known|at most"):
        group(name)


def test_cycles_from_ten_points_on():
    swap = permutation("(1 10)", 12)
    assert cycle_notation(swap) == "(1 10)"
    images = permutation("(1 11 2)(10,12)", 12)
    assert (images[0], images[10], images[1], images[9], images[11]) == (10, 1, 0, 11, 9)
    assert permutation(cycle_notation(images), 12) == images
    with pytest.raises(ValueError, match="with spaces"):
        permutation("(12)", 12)  # one point, or two?
    for wrong in ("(1 1)", "(12)(23)", "(16)", "12", "(1 2"):
        with pytest.raises(ValueError, match="cycles"):
            permutation(wrong, 5)


def test_every_permutation_is_read_as_it_is_written():
    rng = np.random.default_rng(0)
    for n in (1, 5, 9, 10, 13):
        for _ in range(20):
            images = tuple(rng.permutation(n).tolist())
            assert permutation(cycle_notation(images), n) == images


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("SL(2,3)", 24),
        ("GL(2,3)", 48),
        ("SL(2,5)", 120),
        ("GL(3,2)", 168),
        ("Frob20", 20),
        ("2O", 48),
        ("SL(2,3)xZ2", 48),
    ],
)
def test_names(name, order):
    assert group(name).order == order


def test_small_isomorphisms_between_names():
    assert isomorphism(group("SL(2,2)"), group("S3")) is not None
    assert isomorphism(group("Frob6"), group("S3")) is not None
    assert isomorphism(group("GL(2,3)"), group("2O")) is None  # both are double covers of S4


def test_one_group_three_ways():
    by_matrices = read_group({"matrices": [[[1, 1], [0, 1]], [[1, 0], [1, 1]]], "modulo": 2})
    by_generators = read_group({"generators": [[1, 0, 2], [0, 2, 1]]})
    by_table = read_group({"table": group("S3").table.tolist()})
    for given in (by_matrices, by_generators, by_table):
        assert isomorphism(given.group, group("S3")) is not None
        assert len(given.group.generate(given.letters)) == 6
    assert by_generators.group.labels[by_generators.letters[1]] == (0, 2, 1)


BAD = {
    "a group is": {"generator": [[0]]},
    "each once": {"generators": [[0, 0]]},
    "images of 0": {"generators": [[0, 1], [0, 1, 2]]},
    "not empty": {"generators": []},
    "modulo": {"matrices": [[[1]]]},
    "square table": {"matrices": [[[1, 0]]], "modulo": 3},
    "not invertible": {"matrices": [[[0, 0], [0, 0]]], "modulo": 3},
    "one size": {"matrices": [[[1]], [[1, 0], [0, 1]]], "modulo": 3},
    "shape": {"table": [[0, 1]]},
    "more than 1000": {"generators": [[1, 2, 3, 4, 5, 6, 0], [1, 0, 2, 3, 4, 5, 6]]},
    "prime": "SL(2,4)",
}


@pytest.mark.parametrize("why", BAD)
def test_a_file_that_is_no_group_says_why(why):
    with pytest.raises(ValueError, match=why):
        group(BAD[why]) if isinstance(BAD[why], str) else read_group(BAD[why])
