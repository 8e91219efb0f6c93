"""What cannot be tracked: the certificates hold, and a certificate for something false has a step that fails."""

import pytest

from ckda.groups import group, permutation
from ckda.theory import obstructions
from ckda.theory.claims import Refuted
from ckda.theory.exact import field
from ckda.theory.groups import cube_rotations, realise

CHECKS = [
    obstructions.ico_plane,
    obstructions.a5_three,
    obstructions.planar_rotation_product,
    obstructions.s5_impossibility,
    obstructions.other_groups,
    obstructions.deltaproduct_four,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_claims_hold(check):
    assert check(effort=0.05).cases > 0


def test_the_plane_bound_is_tight_and_a_coplanar_axis_breaks_it():
    axes = [*obstructions.icosahedral_axes(5), *obstructions.icosahedral_axes(3)]
    with pytest.raises(Refuted, match="contains 4"):
        obstructions.check_ico_plane(axes, most=3)
    a, b = axes[0], axes[1]
    with pytest.raises(Refuted, match="more than 4"):
        obstructions.check_ico_plane([*axes, a + b, a + b + b, a + a + b])


def test_the_cube_gives_no_obstruction_in_three_dimensions():
    certificate = obstructions.a5_three_certificate(list(cube_rotations().values()))
    assert not certificate.holds
    assert [step.holds for step in certificate.steps[-2:]] == [False, False]
    with pytest.raises(Refuted, match="sixteen axes"):
        certificate.check()


def test_exponent_five_or_order_three_is_refuted():
    with pytest.raises(Refuted, match="power 5"):
        obstructions.check_planar_product(obstructions.planar_pairs(5, 60), exponent=5)
    with pytest.raises(Refuted, match="power 10"):
        obstructions.check_planar_product(obstructions.planar_pairs(3, 60), exponent=10)


def test_planar_product_wants_planar_rotations_of_one_angle():
    five = obstructions.planar_pairs(5, 1)[0][0]
    with pytest.raises(Refuted, match="not two planar"):
        obstructions.check_planar_product([(five, five @ five)])


def test_the_trace_identity_can_fail():
    assert obstructions.trace_identity()
    assert not obstructions.trace_identity(factor=2)


@pytest.mark.parametrize("t", ["(123)", "(12)(34)", "e"])
def test_an_even_permutation_gives_no_contradiction(t):
    certificate = obstructions.s5_certificate(t="" if t == "e" else t)
    assert not certificate.steps[-1].holds
    assert all(step.holds for step in certificate.steps[:-1])


def test_the_exponent_five_breaks_the_certificate():
    steps = obstructions.s5_certificate(exponent=5).steps
    assert [i for i, step in enumerate(steps, 1) if not step.holds] == [9, 10]


def test_an_element_of_even_order_is_no_start():
    S5 = group("S5")
    c, t = S5.index(permutation("(1234)", 5)), S5.index(permutation("(12)", 5))
    assert not obstructions.spectral_certificate(S5, c, t).holds


@pytest.mark.parametrize("name", ["A5", "S4", "Z15", "Q8", "Z3xZ3", "A5xZ2", "D5xZ3"])
def test_trackable_groups_meet_no_obstruction(name):
    assert obstructions.find_obstruction(group(name)) is None


@pytest.mark.parametrize("name", ["S5", "A6", "S5xZ2"])
def test_the_proof_reaches_beyond_s5(name):
    found = obstructions.find_obstruction(group(name))
    assert found is not None
    assert found.label == "thm:s5-impossibility"
    assert found.certificate is not None
    assert found.certificate.holds


def test_the_proof_fails_on_deltaproduct_where_it_should():
    S5 = group("S5")
    c, t = S5.index(permutation("(12345)", 5)), S5.index(permutation("(12)", 5))
    steps = obstructions.confront(S5, [field().permutation(p) for p in S5.labels], c, t)
    assert [step.holds for step in steps] == [True, False, False, False]


def test_the_proof_goes_through_on_the_a5_head():
    A5, head = group("A5"), realise("A5")
    c, t = A5.index(permutation("(12345)", 5)), A5.index(permutation("(123)", 5))
    assert all(step.holds for step in obstructions.confront(A5, [x.matrix for x in head.transitions], c, t))


def test_one_factor_too_few_is_refuted():
    with pytest.raises(Refuted, match="needs 4 transpositions"):
        obstructions.check_deltaproduct(3)


def test_a_wrong_factor_is_refuted(monkeypatch):
    right = obstructions.transpositions
    monkeypatch.setattr(obstructions, "transpositions", lambda images: right(images)[::-1])
    with pytest.raises(Refuted, match="multiply to"):
        obstructions.check_deltaproduct(4)
