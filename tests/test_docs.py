"""docs/formulas.md is what the docstrings say, and they name only labels that the paper has; LOG.md keeps its form."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ckda.docs import LABEL, formulas_page, labels_in_package, labels_in_tests

ROOT = Path(__file__).parents[1]
PAPER = set((ROOT / "tests" / "data" / "labels.txt").read_text().split())


def test_the_table_of_formulas_is_fresh() -> None:
    written = (ROOT / "docs" / "formulas.md").read_text()
    assert written == formulas_page(ROOT), "docs/formulas.md is stale: run `python -m ckda.docs`"


@pytest.mark.parametrize("find", [labels_in_package, labels_in_tests])
def test_every_label_is_one_of_the_papers(find) -> None:
    unknown = {label: names for label, names in find(ROOT).items() if label not in PAPER}
    assert not unknown, f"the paper has no such labels: {unknown}"


def test_the_pattern_knows_every_label_of_the_paper() -> None:
    assert PAPER
    assert all(LABEL.fullmatch(label) for label in PAPER)


def test_labels_are_found_in_modules_classes_functions_and_tests(tmp_path: Path) -> None:
    (tmp_path / "ckda" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "ckda" / "__init__.py").write_text('"""As lem:one says."""\n')
    (tmp_path / "ckda" / "deep" / "code.py").write_text(
        'class A:\n    """(thm:two_x)"""\n    def f(self):\n        """prop:a-b, and lem:one."""\n    # eq:comment\n'
    )
    (tmp_path / "tests" / "deep" / "test_code.py").write_text("# thm:two_x\n")
    assert labels_in_package(tmp_path) == {
        "lem:one": ["ckda", "ckda.deep.code.A.f"],
        "prop:a-b": ["ckda.deep.code.A.f"],
        "thm:two_x": ["ckda.deep.code.A"],
    }
    assert labels_in_tests(tmp_path) == {"thm:two_x": ["tests/deep/test_code.py"]}
    page = formulas_page(tmp_path)
    assert "| `thm:two_x` | `ckda.deep.code.A` | `tests/deep/test_code.py` |" in page
    assert "| `prop:a-b` | `ckda.deep.code.A.f` | none |" in page


def test_central_formulas_are_found_and_tested() -> None:
    tested = labels_in_tests(ROOT)
    for label, name in {
        "prop:CKDA-canonical": "ckda.transition.sign_magnitude",
        "thm:complex_eigenvalues": "ckda.transition.eigenvalues",
        "lem:gauge": "ckda.ops.fla.absorb_signs",
        "app:gauge": "ckda.ops.gate.evaluate_gate",
    }.items():
        assert name in labels_in_package(ROOT)[label]
        assert label in tested, f"no test names {label}"


def test_the_log_is_newest_first_and_every_entry_has_its_verdict() -> None:
    lines = (ROOT / "LOG.md").read_text().splitlines()
    assert not [line for line in lines if len(line) > 140]
    headings = [line for line in lines if line.startswith("## ")]
    found = [re.fullmatch(r"## (\d{4}-\d\d-\d\d) (\S.*) \((kept|dropped|open)\)", line) for line in headings]
    assert len(found) > 40
    assert all(found), [line for line, one in zip(headings, found, strict=True) if not one]
    dates = [one[1] for one in found if one]
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("name", ["tracking", "audio"])
def test_a_guide_is_short_and_names_what_is_there(name) -> None:
    text = (ROOT / f"docs/{name}.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    heads = [line[3:] for line in lines if line.startswith("## ")]
    order = ["The question", "What to run", "What you will see", "How it works", "Where the numbers are", "Glossary"]
    assert heads == order
    named = re.findall(r"`((?:ckda|recipes)/[\w/.]+)|\]\((\.\./[^)]+)\)", text)
    paths = [one or two.removeprefix("../") for one, two in named]
    assert len(paths) > 5
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("subject", ["tracking", "audio"])
def test_recipes_of_a_guide_are_known(subject) -> None:
    book = import_module(f"ckda.experiments.{subject}.recipes").RECIPES
    text = (ROOT / f"docs/{subject}.md").read_text()
    named = re.findall(r"--recipe (\S+)", text) + re.findall(r"`((?:init|penalty|schedule|steps)=[^`\s]+)`", text)
    assert len(named) > 3
    for name in named:
        assert book.name(name) == name
    first = next(part for part in text.split("\n\n") if part.startswith("| recipe"))
    cells = [line.split("|")[1] for line in first.splitlines()[2:]]
    assert all(book.name(name) == name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    assert set(book.named) <= {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
