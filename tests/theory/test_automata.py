"""The examples in the docstrings run, and docs/theory_proofs.md names every claim of appendix D."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from ckda.theory.claims import load_claims

MODULES = ("machines", "factor_programs", "multilayer", "multilayer_float", "automata", "automata_figures")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(import_module(f"ckda.theory.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_claim_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "theory_proofs.md").read_text()
    labels = [c.label for c in load_claims().values() if c.check.__module__ == "ckda.theory.automata"]
    assert len(labels) == 16
    for label in labels:
        family, _, part = label.rpartition("/")
        assert f"`{label}`" in page or (f"`{family}/" in page and f"`/{part}`" in page), label
