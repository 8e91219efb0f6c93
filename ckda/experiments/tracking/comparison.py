"""The table that sets the paper's two figures of word problems beside our records: published, same protocol, best recipe.

Every cell of fig:group_word_problems and fig:group_word_problems_baselines has a row. What is not there says why.
"""

import json
from pathlib import Path
from typing import NamedTuple

from ckda.experiments.tracking.figures import PUBLISHED, PUBLISHED_LENGTHS, best_of_three
from ckda.experiments.tracking.lottery import FOUND
from ckda.experiments.tracking.run import TrackRun

__all__ = ["ROWS", "Row", "comparison", "shown"]

_BEST_LENGTHS = (512, 4096)
_READ_OFF = "the paper gives the figure, no numbers"


class Row(NamedTuple):
    """One group and arm, with records PART/NAME of results/tracking."""

    group: str
    arm: str
    same: str = ""  #: by the paper's protocol; "" where there is none
    best: tuple[str, ...] = ()  #: by the recipe that goes furthest, all seeds that were begun
    why: str = ""  #: what is missing, and why


def _not_run(piece: str, more: str = "") -> str:
    return f"not run: `recipes/tracking.sh OUT {piece}`{more}"


def _baselines(group: str) -> list[Row]:
    why = f"{_READ_OFF}; ours {_not_run(f'baselines:{group}', ' (10,000 updates: mixers)' if group == 'S3' else '')}"
    arms = ("DeltaProduct_2", "GRU", "Transformer", "SiLU on keys", "SiLU on q, k, v")
    return [Row(group, arm, why=why) for arm in arms]


_CONSTANT = "momentum constant"
_SETTLE = "settle/S3-ckda+exact+heads=16x4.then=settle@"
ROWS: tuple[Row, ...] = (
    Row("S3", "kda", "paper/S3-kda+momentum=0.95", why=_CONSTANT),
    Row("S3", "kda-beta2", "paper/S3-kda-beta2"),
    Row("S3", "kda-signed", "paper/S3-kda-signed+momentum=0.95", why=_CONSTANT),
    Row(
        "S3",
        "ckda",
        "paper/S3-ckda",
        tuple(_SETTLE + batch for batch in ("f1bb078.seed0-23", "f1bb078.seed24-47", "38d84d1.seed48-59")),
    ),
    *_baselines("S3"),
    Row("S4", "kda", "paper/S4-kda+momentum=0.95", why=_CONSTANT),
    Row("S4", "kda-beta2", "paper/S4-kda-beta2+momentum=0.95", why=_CONSTANT),
    Row("S4", "kda-signed", "paper/S4-kda-signed+momentum=0.95", why=_CONSTANT),
    Row("S4", "ckda", "paper/S4-ckda", ("counts/S4-ckda+wide+heads=48x4.then=polish",)),
    *_baselines("S4"),
    *(Row("A5", arm, f"paper/A5-{arm}") for arm in ("kda", "kda-beta2", "kda-signed")),
    Row("A5", "ckda", "paper/A5-ckda", ("counts/A5-ckda+wide.then=polish",)),
    Row("A5", "ckda+theory", "horizon/A5-ckda+theory", why="the begin token writes nothing"),
    Row("A5", "ckda+theory+init=quaternions-begin", "paper/A5-ckda+theory+init=quaternions-begin"),
    *_baselines("A5"),
)


def comparison(root: Path) -> tuple[list[str], list[list[str]]]:
    """Head and rows, one number a cell, from the records under `root` (results/tracking).

    Ours by the paper's protocol is the maximum at each length over the first three seeds, as the paper reports; the best recipe
    has its best seed, and how many seeds are right at 32.
    """
    head = ["group", "arm"]
    head += [f"published, {n}" for n in PUBLISHED_LENGTHS] + [f"same protocol, {n}" for n in PUBLISHED_LENGTHS]
    head += ["best recipe", "seeds", "right at 32", *(f"best seed, {n}" for n in _BEST_LENGTHS), "what is missing"]
    return head, [_cells(row, root) for row in ROWS]


def shown(root: Path) -> list[TrackRun]:
    """The runs by the paper's protocol that the table has, as :func:`ckda.experiments.tracking.figures.words_figure` draws them."""
    return [_read(root, row.same) for row in ROWS if row.same]


def _cells(row: Row, root: Path) -> list[str]:
    known = PUBLISHED.get(row.group, {}).get(row.arm)
    published = [f"{value:g}" for value in known] if known else [""] * 3
    same = _read(root, row.same) if row.same else None
    ours = [f"{round(best_of_three(same, n), 3) + 0:.3f}" for n in PUBLISHED_LENGTHS] if same else [""] * 3
    return [row.group, row.arm, *published, *ours, *_beyond([_read(root, name) for name in row.best]), row.why]


def _beyond(runs: list[TrackRun]) -> list[str]:
    """The best recipe, its seeds, how many are right at 32, and the scores of the best one."""
    if not runs:
        return [""] * (3 + len(_BEST_LENGTHS))
    found = sum(value >= FOUND for run in runs for value in run.scores[32])
    best = max(runs, key=lambda run: [run.at(n) for n in _BEST_LENGTHS])
    counts = [str(sum(len(run.seeds) for run in runs)), str(found)]
    return [f"`{best.recipe_now}`", *counts, *(f"{best.at(n):.3f}" for n in _BEST_LENGTHS)]


def _read(root: Path, name: str) -> TrackRun:
    part, _, run = name.partition("/")
    return TrackRun.from_json(json.loads((root / part / "runs" / f"{run}.json").read_text()))
