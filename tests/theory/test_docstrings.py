"""docs/theory_proofs.md maps every claim of these modules to its function."""

from pathlib import Path

from ckda.theory.claims import load_claims
from ckda.theory.options import ABOUT


def test_every_claim_of_the_structure_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "theory_proofs.md").read_text()
    for claim in load_claims().values():
        module = claim.check.__module__
        if module in ("ckda.theory.structure", "ckda.theory.spectra"):
            family, _, part = claim.label.rpartition("/")
            assert f"`{claim.label}`" in page or (f"`{family}/" in page and f"`/{part}`" in page), claim.label


def test_the_guide_is_short():
    guide = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    assert len(guide.splitlines()) <= 150
    for action in ABOUT:
        assert f"theory {action}" in guide
