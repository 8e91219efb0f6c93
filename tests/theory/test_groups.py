"""Appendix C, what can be tracked: every claim at small effort, and for each a broken construction that is refuted."""

from dataclasses import replace

import numpy as np
import pytest

from ckda.theory import groups
from ckda.theory.claims import Refuted
from ckda.theory.exact import field
from ckda.theory.groups import SignedHouseholder, reach, realise

EFFORT = 0.05
CHECKS = [
    groups.axis_test,
    groups.planar_groups,
    groups.cube,
    groups.so3_encoding,
    groups.a5_four,
    groups.tracking_homomorphism,
    groups.query_readout,
    groups.main_positive,
    groups.silu,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_claims_hold(check):
    evidence = check(effort=EFFORT)
    assert evidence.cases >= 1
    assert evidence.kind == "exact"


def flipped(head, element=1, coordinate=0):
    """The head with one sign of one gate flipped."""
    old = head.transitions[element]
    signs = tuple(-s if i == coordinate else s for i, s in enumerate(old.signs))
    return with_transition(head, element, SignedHouseholder(signs, old.key))


def with_transition(head, element, transition):
    new = list(head.transitions)
    new[element] = transition
    return replace(head, transitions=tuple(new))


def test_a_wrong_axis_test_is_refuted():
    with pytest.raises(Refuted, match="axis"):  # says that only half-turns pass
        groups.check_axis_test(groups.cube_rotations(turned=True).values(), lambda R: groups.axis(R) is None)
    with pytest.raises(Refuted, match="axis"):  # says that everything passes
        groups.check_axis_test(groups.cube_rotations(turned=False).values(), lambda R: True)


@pytest.mark.parametrize("name", ["Z5", "D4", "A4", "S4"])
def test_a_flipped_sign_is_no_realisation(name):
    with pytest.raises(Refuted, match="not a faithful"):
        groups.check_realisations([flipped(realise(name))], realise(name).dimension)


@pytest.mark.parametrize("name", ["D3", "S4"])
def test_a_wrong_key_does_not_track(name):
    head = realise(name)
    wrong = SignedHouseholder(head.transitions[1].signs, head.transitions[2].key)
    with pytest.raises(Refuted):
        reach(with_transition(head, 1, wrong), limit=500)


def test_a_realisation_in_another_dimension_is_refuted():
    with pytest.raises(Refuted, match="dimension"):
        groups.check_realisations([realise("S4")], 2)


def test_the_cube_as_it_stands_is_refuted():
    G = groups.symmetric(4)
    with pytest.raises(Refuted, match="no CKDA transition"):
        groups._head(G, [groups.cube_rotations(turned=False)[label] for label in G.labels], "standard position")


def test_a_wrong_gate_or_decoder_breaks_the_encoding():
    R = field().permutation([1, 2, 0])
    S = [groups.encoder(R).matrix, field().eye(4)]
    with pytest.raises(Refuted, match="f"):
        groups.check_encoding([R], S, encode=lambda A: SignedHouseholder((1, 1, 1, 1), groups.encoder(A).key))
    with pytest.raises(Refuted, match="f"):
        groups.check_encoding([R], S, decode=groups.auxiliary_decoder)


def test_the_identities_tell_the_two_decoders_apart():
    broken = groups.encoding_identities(lambda S, direction: groups._decode(S, -direction))
    assert broken["g(A) is x -> a x a"]
    assert not any(holds for name, holds in broken.items() if name.startswith(("f", "Q")))


def test_a5_with_a_flipped_sign_or_a_swapped_key_is_refuted():
    head = realise("A5")
    with pytest.raises(Refuted):
        groups.check_a5_four(flipped(head, coordinate=1))
    a, b = head.transitions[1], head.transitions[2]
    with pytest.raises(Refuted):
        groups.check_a5_four(with_transition(with_transition(head, 1, b), 2, a))


def test_a_wrong_decoder_is_no_homomorphism():
    head = realise("S4")
    found = reach(head)
    wrong = replace(found, decode=np.roll(found.decode, 1))
    with pytest.raises(Refuted, match="homomorphism"):
        groups.check_homomorphism(head, wrong, range(3))


def test_a_query_on_a_mirror_does_not_tell_states_apart():
    with pytest.raises(Refuted, match="no query"):
        groups.find_query(reach(realise("S4")), [(1, 0, 0), (0, 0, 1)])


def test_silu_keys_in_the_wrong_order_or_with_a_sign_are_refuted():
    first, second, third = groups.silu_keys()
    with pytest.raises(Refuted, match="faithful"):
        groups.check_nonnegative(groups.silu_head([second, first, third]))
    with pytest.raises(Refuted, match="negative component"):
        groups.check_nonnegative(groups.silu_head([first, second, -third]))


def test_infinite_reachability_is_noticed():
    head = realise("Z3")
    slow = SignedHouseholder((-1, 1), head.field.vector([1, 2]))  # a turn by an angle that is no fraction of a circle
    with pytest.raises(Refuted, match="more than"):
        reach(with_transition(head, 1, slow), limit=300)


def test_a5_has_exactly_7200_states():
    found = reach(realise("A5"))
    assert found.size == 7200
    assert set(np.bincount(found.decode)) == {120}
    assert len(found.vectors) == 120


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="Z_n"):
        realise("S5")
