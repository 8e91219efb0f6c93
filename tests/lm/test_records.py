"""The records of results/lm: each is read back, and its table and figures are drawn from it alone."""

from pathlib import Path

from ckda.lm.comparison import Comparison
from ckda.lm.figures import comparison_figure, speed_figure
from ckda.lm.inspect import Inspection, inspect_figure

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
