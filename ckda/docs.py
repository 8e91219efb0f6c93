"""The paper's formulas in the code: ``python -m ckda.docs`` writes docs/formulas.md from the labels in the docstrings.

A docstring that names a label of the paper (``prop:CKDA-canonical``, ``lem:gauge``, ...) says that the object is that
formula or stands on it. The table lists label, object, and the test files that name the label too. It is made from the
source text alone: nothing is imported, so optional packages need not be there.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ckda.record import write_text

__all__ = ["LABEL", "formulas_page", "labels_in_package", "labels_in_tests"]

#: how a label of the paper looks
LABEL = re.compile(r"\b(?:app|appsec|cor|def|eq|fig|lem|prop|sec|tab|th|thm):[A-Za-z0-9][\w-]*")

_HEAD = """\
# Formulas

Where each labelled statement of the paper lives in the code, and which tests name it.
Made from the docstrings by `python -m ckda.docs`; a test fails when it is stale.

| label | function | tests |
|---|---|---|
"""


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a module and of everything in it that has one."""

    def walk(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[tuple[str, str]]:
        yield name, ast.get_docstring(node) or ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from walk(child, f"{name}.{child.name}")

    yield from walk(ast.parse(path.read_text()), module)


def labels_in_package(root: Path) -> dict[str, list[str]]:
    """Label -> the dotted names of what names it, for the package `ckda` under `root`, both sorted.

    Example:
        >>> root = Path(__file__).parents[1]
        >>> labels_in_package(root)["prop:CKDA-canonical"][-1]
        'ckda.transition.sign_magnitude'
    """
    found: dict[str, set[str]] = {}
    for path in sorted((root / "ckda").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module == "ckda.docs":  # whose labels are examples
            continue
        for name, text in _docstrings(path, module):
            for label in LABEL.findall(text):
                found.setdefault(label, set()).add(name)
    return {label: sorted(found[label]) for label in sorted(found)}


def labels_in_tests(root: Path) -> dict[str, list[str]]:
    """Label -> the test files under `root` that name it, both sorted; the test of this module tests no formula."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        if path.name == "test_docs.py":
            continue
        for label in LABEL.findall(path.read_text()):
            found.setdefault(label, set()).add(path.relative_to(root).as_posix())
    return {label: sorted(found[label]) for label in sorted(found)}


def formulas_page(root: Path) -> str:
    """The text of docs/formulas.md."""
    tests = labels_in_tests(root)
    rows = []
    for label, names in labels_in_package(root).items():
        objects = "<br>".join(f"`{name}`" for name in names)
        files = "<br>".join(f"`{name}`" for name in tests.get(label, []))
        rows.append(f"| `{label}` | {objects} | {files or 'none'} |\n")
    return _HEAD + "".join(rows)


def main() -> int:
    """Write docs/formulas.md of the source tree that this module stands in."""
    root = Path(__file__).parents[1]
    print(write_text(root / "docs" / "formulas.md", formulas_page(root)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
