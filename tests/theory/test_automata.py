"""docs/theory_proofs.md names every claim of appendix D."""

from pathlib import Path

from ckda.theory.claims import load_claims


def test_every_claim_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "theory_proofs.md").read_text()
    labels = [c.label for c in load_claims().values() if c.check.__module__ == "ckda.theory.automata"]
    assert len(labels) == 16
    for label in labels:
        family, _, part = label.rpartition("/")
        assert f"`{label}`" in page or (f"`{family}/" in page and f"`/{part}`" in page), label
