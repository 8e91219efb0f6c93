"""The paper's numbers as data.

Losses (tab:scaling-data), downstream averages (tab:downstream-avg9), sizes (tab:ladder-configs) and the printed fits
(tab:scaling-holdout-isolated, tab:scaling-holdout-pinned, tab:scaling-holdout).
"""

import csv
import json
from functools import cache
from importlib.resources import files
from typing import Any

from .table import Table

__all__ = [
    "ARMS",
    "BASELINE",
    "HELD_OUT",
    "NOISE",
    "PINNED_E",
    "downstream",
    "paper_fits",
    "paper_table",
    "parameters",
    "reference_losses",
]

#: the six architectures, in the paper's order
ARMS = ("Transformer++", "Transformer++ (QK-norm)", "KDA", "CKDA", "KDA + attn 3:1", "CKDA + attn 3:1")
#: the arm over which fig:scaling-advantage shows advantages
BASELINE = "Transformer++ (QK-norm)"
#: nats by which two identical configurations of the ladder differed: the grey band of that figure
NOISE = 0.002
#: the cell the paper leaves out of every fit
HELD_OUT = "1.7B/50BT"
#: the irreducible loss of the reference ladder, to which tab:scaling-holdout-pinned pins E
PINNED_E = 0.9638


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((files(__package__) / "paper" / name).read_text().splitlines()))


def parameters(printed: bool = False) -> dict[tuple[str, str], float]:
    """N of (arm, size): the exact totals of the ladder, or the millions that tab:ladder-configs prints (two decimals).

    The paper's text says non-embedding parameters; only the totals return its fits, and only the exact ones return the
    last printed digit. The QK-norm arm takes Transformer++'s total.

    Example:
        >>> parameters()["CKDA", "1.7B"], parameters(printed=True)["CKDA", "1.7B"]
        (1709707520.0, 1709710000.0)
    """
    rows = _rows("parameters.csv")
    return {
        (r["arm"], r["size"]): round(float(r["printed_million"]) * 1e6) * 1.0 if printed else float(r["total"])
        for r in rows
    }


def paper_table(printed_sizes: bool = False) -> Table:
    """tab:scaling-data: 30 cells of six arms, with the cells cooled down from a shared trunk marked as chained.

    Example:
        >>> table = paper_table()
        >>> len(table), table.arms[3], table.arm("CKDA").loss[-1].item()
        (180, 'CKDA', 2.1061)
    """
    N, rows = parameters(printed_sizes), _rows("losses.csv")
    cells = [(arm, row) for arm in ARMS for row in rows]
    return Table.of(
        N=[N[arm, row["size"]] for arm, row in cells],
        D=[float(row["tokens_billion"]) * 1e9 for _, row in cells],
        loss=[float(row[arm]) for arm, row in cells],
        group=[arm for arm, _ in cells],
        chained=[row["chained"] == "1" for _, row in cells],
        cell=[f"{row['size']}/{row['tokens_billion']}BT" for _, row in cells],
    )


def reference_losses() -> dict[str, float | None]:
    """The last column of tab:scaling-data, by cell; None where the paper prints a dash.

    Example:
        >>> reference_losses()["1.7B/50BT"], reference_losses()["1.7B/6BT"]
        (2.1353, None)
    """
    return {
        f"{r['size']}/{r['tokens_billion']}BT": float(r["reference"]) if r["reference"] else None
        for r in _rows("losses.csv")
    }


def downstream() -> dict[tuple[str, str], float]:
    """tab:downstream-avg9: mean accuracy over nine tasks in per cent, by (arm, cell).

    Example:
        >>> downstream()["CKDA", "1.7B/50BT"]
        57.21
    """
    return {
        (arm, f"{r['size']}/{r['tokens_billion']}BT"): float(r[arm]) for r in _rows("downstream.csv") for arm in ARMS
    }


@cache
def paper_fits() -> dict[str, Any]:
    """The printed fits by table label, arm and column: `printed` (the digits as text) and `interval`.

    Example:
        >>> paper_fits()["tab:scaling-holdout-isolated"]["CKDA"]["E"]
        {'printed': '1.2111', 'interval': [0.9258, 1.3227]}
    """
    fits: dict[str, Any] = json.loads((files(__package__) / "paper" / "fits.json").read_text())
    return fits
