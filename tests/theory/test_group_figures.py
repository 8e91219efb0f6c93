"""The drawings are made from computed data."""

import matplotlib
import pytest

from ckda.theory import group_figures
from ckda.theory.figures import DRAWINGS

matplotlib.use("Agg")


@pytest.mark.parametrize("label", ["prop:cube", "lem:ico-plane", "cor:a5-four"])
def test_drawings_are_registered_and_written(label, tmp_path):
    DRAWINGS[label](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_strip_is_the_papers():
    boxes = group_figures.cups_strip()
    assert [box["cups"][:4] for box in boxes] == [[0, 1, 2, 3], [2, 0, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
    assert [box["start"] for box in boxes] == [True, False, False, False]
