"""The records of results/lm: each is read back, and its table and figures are drawn from it alone."""

from pathlib import Path

from ckda.lm.comparison import Comparison
from ckda.lm.figures import comparison_figure, speed_figure
from ckda.lm.inspect import Inspection, inspect_figure
from ckda.record import read_json

RECORDS = Path(__file__).parents[2] / "results" / "lm"


def test_the_comparison_gives_its_table_and_figures() -> None:
    found = Comparison.load(RECORDS / "comparison.json")
    assert found.table() == (RECORDS / "table.md").read_text()
    left, right = comparison_figure(found).axes
    assert len(left.lines) == len(found.runs)
    assert [text.get_text() for text in right.get_yticklabels()] == [
        text.get_text() for text in left.get_legend().texts
    ]
    assert len(speed_figure(found).axes[0].patches) == len({run.arm for run in found.runs})


def test_the_inspection_gives_its_figure() -> None:
    found = Inspection.load(RECORDS / "inspect.json")
    assert len(inspect_figure(found).axes) >= 5
    assert len(found.checkpoints[-1].layers) == 12


def test_the_corpus_is_told_as_its_manifest_has_it() -> None:
    page = (RECORDS / "README.md").read_text()
    manifest = read_json(RECORDS / "corpus" / "manifest.json")
    assert manifest["tokens"]["train"] >= 55_000_000
    assert manifest["packed_bytes"] <= 46 * 2**20
    for split, tokens in manifest["tokens"].items():
        assert f"| {manifest['documents'][split]:,} | {tokens:,} |" in page
    told = {name.replace("_", " "): f"{size / 1e6:.1f} MB" for name, size in manifest["text_bytes_by_kind"].items()}
    assert ", ".join(f"{name} {size}" for name, size in told.items()) in page
    assert f"{manifest['dropped']['equal']} equal and {manifest['dropped']['near']:,} near ones" in page
    assert f"{manifest['packed_mib']} MiB" in page
    assert all(row["licence"] and row["version"] for row in manifest["sources"])
