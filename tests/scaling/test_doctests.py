"""Every example in the docstrings runs."""

import doctest
import importlib

import pytest

MODULES = ("", ".law", ".solver", ".table", ".published", ".fit", ".reproduce", ".report")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"ckda.scaling{name}"))
    assert result.attempted > 0
    assert result.failed == 0
