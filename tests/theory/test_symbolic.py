"""The proofs with symbols hold, and a changed formula is refuted."""

import pytest
import sympy

from ckda.theory import symbolic
from ckda.theory.claims import Refuted, load_claims
from ckda.theory.labels import LABELS

CHECKS = [
    symbolic.axis_identities,
    symbolic.planar_identities,
    symbolic.characteristic_signs,
    symbolic.norm_identity,
    symbolic.commutator_entries,
    symbolic.canonical_block,
]
BROKEN = {
    "a rotation of half the angle": lambda: symbolic.axis_identities(
        rotation=lambda q: [
            [x + (i == 0 and j == 1) * q[1] * q[1] for j, x in enumerate(row)]
            for i, row in enumerate(symbolic.rotation_of(q))
        ]
    ),
    "beta = 1 instead of 2": lambda: symbolic.planar_identities(factor=1),
    "without k_i^2": lambda: symbolic.characteristic_signs(
        0.1, formula=lambda n: (symbolic.characteristic_at_gate(n)[0], sympy.Symbol("b"))
    ),
    "beta (1 - beta)": lambda: symbolic.norm_identity(0.1, rate=lambda beta: beta * (1 - beta)),
    "the other sign": lambda: symbolic.commutator_entries(sign=-1),
    "another window": lambda: symbolic.canonical_block(window=lambda b, x: b**2 * x**2 - 2 * (b - 1)),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_claims_hold(check):
    assert check(effort=0.1).kind == "exact"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_refuted(name):
    with pytest.raises(Refuted):
        BROKEN[name]()


def test_every_claim_has_its_two_labels():
    assert set(LABELS) == set(load_claims())
    words = ("all", "exhaustive to", "sampled", "adversary", "certificate", "prose proof")
    for name, label in LABELS.items():
        assert label.arithmetic in ("exact", "float"), name
        assert label.coverage.startswith(words), name
