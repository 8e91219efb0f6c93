"""The tables' claims hold at small effort, and a wrong cell or a wrong family is refuted."""

from dataclasses import replace

import pytest

from ckda.theory import spectra
from ckda.theory.claims import Inconclusive, Refuted
from ckda.theory.families import FAMILIES, Slot

EFFORT = 0.1
CHECKS = [
    spectra.spectrum_ckda,
    spectra.spectrum_mdn,
    spectra.spectrum_sfda,
    spectra.pairs_ckda,
    spectra.pairs_gdn,
    spectra.pairs_delta_product,
    spectra.pairs_rwkv,
    spectra.two_householders,
    spectra.rope_products,
    spectra.parity,
    spectra.delta_product_two,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_claims_hold(check):
    evidence = check(effort=EFFORT)
    assert evidence.cases > 50
    assert evidence.margin is None or evidence.margin >= 0


def widened(name: str, slot: str, low: float, high: float):
    family = FAMILIES[name]
    return replace(family, slots=tuple(Slot(s.name, low, high, s.shape) if s.name == slot else s for s in family.slots))


BROKEN = {
    "beta above 2 expands": lambda: spectra.spectrum_ckda(EFFORT, family=widened("CKDA", "beta", 0, 2.1)),
    "MDN without its constraint": lambda: spectra.spectrum_mdn(EFFORT, family=widened("MDN", "share", 0, 5)),
    "SFDA said to have no isometry": lambda: spectra.spectrum_sfda(
        EFFORT, paper=spectra.PAPER["SFDA"] | {"isometries": "only I"}
    ),
    "CKDA said to be real": lambda: spectra.pairs_ckda(EFFORT, at_most=0),
    "CKDA taken for GDN": lambda: spectra.pairs_gdn(EFFORT, names=("CKDA",)),
    "one DeltaProduct factor too few": lambda: spectra.pairs_delta_product(
        EFFORT, bound=lambda d, k: min(d, k - 1) // 2
    ),
    "CKDA taken for RWKV-7": lambda: spectra.pairs_rwkv(EFFORT, names=("CKDA",)),
    "both betas above 1": lambda: spectra.two_householders(EFFORT, beta=1.9),
    "parity without a reflection": lambda: spectra.parity(EFFORT, beta=1),
    "DeltaProduct with one factor": lambda: spectra.delta_product_two(EFFORT, factors=1),
    "MDN taken for RoPE": lambda: spectra.rope_products(EFFORT, names=("MDN",)),
}


#: the paper (or the family) is changed so that a search would have to find what is not there
SHORT = {
    "gate without sign": lambda: spectra.spectrum_ckda(EFFORT, family=FAMILIES["KDA, beta to 2"]),
    "SFDA said not to commute": lambda: spectra.spectrum_sfda(
        EFFORT, paper=spectra.PAPER["SFDA"] | {"isometries": "non-commuting"}
    ),
    "CKDA said to have two": lambda: spectra.pairs_ckda(EFFORT, at_most=2),
    "min(d, k) forgotten": lambda: spectra.pairs_delta_product(EFFORT, bound=lambda d, k: k // 2),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_search_that_falls_short_refutes_nothing(name):
    with pytest.raises(Inconclusive, match="the search only found"):
        SHORT[name]()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_refuted(name):
    with pytest.raises(Refuted):
        BROKEN[name]()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("KDA", "only I"),
        ("KDA, signed gate", "commuting"),
        ("DeltaNet", "non-commuting"),
        ("RWKV-7", "non-commuting"),
        ("RoPE", "commuting"),
        ("complex diagonal", "commuting"),
    ],
)
def test_the_questions_serve_every_family(name, kind):
    assert spectra.isometries(FAMILIES[name], 2, EFFORT).value == kind
    support = spectra.circle(FAMILIES[name], 2, EFFORT, (0, 90, 180)).value
    assert support == {
        "KDA": (0,),
        "RoPE": (0, 90, 180),
        "complex diagonal": (0, 90, 180),
    }.get(name, (0, 180))
