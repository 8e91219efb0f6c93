"""results/: every question has a row in the index, and everything drawn is what its records say."""

import shutil
from pathlib import Path

import pytest

from ckda.results import ABOUT, drawings, index_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def test_the_index_is_fresh() -> None:
    assert (RESULTS / "README.md").read_text() == index_page(RESULTS), "run `make results`"


def test_every_folder_has_a_question() -> None:
    tops = {path.relative_to(RESULTS).as_posix() for path in RESULTS.iterdir() if path.is_dir()}
    inner = {path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("*/*") if path.is_dir()}
    subjects = {name.partition("/")[0] for name in ABOUT if "/" in name}
    assert tops <= subjects | set(ABOUT)
    assert {name for name in inner if name.partition("/")[0] in subjects} == {name for name in ABOUT if "/" in name}


def _redrawn(wanted: list[str], folder: Path) -> list[Path]:
    """Draw these in a copy of results/, and compare every file that is there already."""
    copy = folder / "results"
    shutil.copytree(RESULTS, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for path, draw in drawings(copy):
        if not wanted or path.relative_to(copy).as_posix() in wanted:
            draw(path)
    return [path for path, data in before.items() if path.read_bytes() != data]


def test_figures_and_tables_are_those_of_their_records(tmp_path: Path) -> None:
    chosen = [
        "tracking/random-keys/runs",
        "audio/seeds/runs",
        "demo/extrapolation.png",
        "tracking/random-keys/600_cell.png",
    ]
    assert not _redrawn(chosen, tmp_path)


@pytest.mark.slow
def test_all_figures_and_tables_are_those_of_their_records(tmp_path: Path) -> None:
    assert not _redrawn([], tmp_path)
