"""Fits as text: tables in the paper's form, ours above the paper's."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .fit import LEVEL, Fit, Summary
from .reproduce import Check, Entry

if TYPE_CHECKING:
    from .commands.predict import Predictions

__all__ = ["comparison_text", "coverage_text", "fit_text", "prediction_text"]

_COLUMNS = ("E", "A", "alpha", "B", "beta", "k", "c")
_SHORT = {"held-out error": "held out"}
WIDTH = 80  #: of a terminal, in characters; every table fits


def wrapped(text: str) -> str:
    """The text in lines that fit."""
    return "\n".join(textwrap.wrap(text, WIDTH))


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned first column, right-aligned others, two blanks between.

    Example:
        >>> print(grid(["arm", "E"], [["CKDA", "1.2111"]]))
        arm        E
        CKDA  1.2111
    """
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def number(name: str, value: float | None) -> str:
    """A value as the paper prints that column."""
    if value is None:
        return ""
    if name in ("A", "B"):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    digits = {"E": 4, "c": 4, "rmse": 5, "held-out error": 4, "loss": 4}.get(name, 3)
    return f"{value:+.{digits}f}" if name in ("held-out error", "c") else f"{value:.{digits}f}"


def with_interval(name: str, value: float, low: float | None, high: float | None) -> str:
    """value [low, high], or the value alone where it has no interval or is fixed."""
    text = number(name, value)
    return text if low is None or low == high else f"{text} [{number(name, low)}, {number(name, high)}]"


def _text(name: str, summary: Summary | None) -> str:
    return "" if summary is None else with_interval(name, summary.value, summary.low, summary.high)


def fit_text(fitted: Fit, level: float = LEVEL) -> str:
    """A line an arm and parameter with its interval, then RMSE and held-out errors: a table that fits 80 columns."""
    rows = []
    for name, arm in fitted.arms.items():
        errors = {f"error at {cell}": error for cell, error in arm.held_out_errors(level).items()}
        found = {column: arm.parameters(level)[column] for column in _COLUMNS}
        for what, summary in (found | {"RMSE": Summary(arm.rmse)} | errors).items():
            kind = "held-out error" if what in errors else "rmse" if what == "RMSE" else what
            rows.append([name, what, *(number(kind, value) for value in (summary.value, summary.low, summary.high))])
            name = ""
    return grid(["arm", "parameter", "value", "low", "high"], rows)


def comparison_text(title: str, rows: Sequence[Entry], summary: Mapping[str, Check]) -> str:
    """An arm's name, then a line a column, ours beside the paper's; then each column's worst difference and its limit."""
    found = [row for row in rows if row.column in summary]
    lines = []
    for row in found:
        ours = [number(row.column, value) for value in (row.ours, row.low, row.high)]
        theirs = [number(row.column, v) for v in (float(row.paper), *(row.paper_interval or (None, None)))]
        lines.append([f"  {_SHORT.get(row.column, row.column)}", *ours, *theirs])
    header, *body = grid(["", "ours", "low", "high", "paper", "low", "high"], lines).splitlines()
    beside, arm = [header], ""
    for row, line in zip(found, body, strict=True):
        beside += [line] if row.arm == arm else [row.arm, line]
        arm = row.arm
    judged = [
        [
            _SHORT.get(column, column),
            f"{check.worst:.2g} {check.kind}",
            f"{check.limit:g}",
            "yes" if check.within else "NO",
            check.same_digits,
            check.intervals_overlap,
        ]
        for column, check in summary.items()
    ]
    head = ["column", "worst difference", "limit", "within", "same digits", "overlap"]
    return "\n\n".join([wrapped(title), "\n".join(beside), grid(head, judged)])


def prediction_text(result: "Predictions") -> str:
    """Predicted losses per cell, then the compute-optimal splits."""
    parts = []
    if result.cells:
        rows = [[cell.cell, arm, _text("loss", loss)] for cell in result.cells for arm, loss in cell.loss.items()]
        parts.append(grid(["cell", "arm", "loss"], rows))
    if result.compute:
        rows = [
            [*start, what, *(f"{value:{how}}" if value is not None else "" for value in (one.value, one.low, one.high))]
            for best in result.compute
            for arm, found in best.optimal.items()
            for start, what, one, how in (
                ([f"{best.C:.3g}", arm], "optimal N", found["N"], ".3g"),
                (["", ""], "optimal D", found["D"], ".3g"),
                (["", ""], "loss", found["loss"], ".4f"),
            )
        ]
        parts.append(grid(["FLOPs", "arm", "", "value", "low", "high"], rows))
    return "\n\n".join(parts)


def coverage_text(study: Mapping[str, Any]) -> str:
    """How often the intervals hold the truth: a line a quantity, a column a level."""
    inside = study["inside"]
    rows = [[name, *(f"{row[name]:.3f}" for row in inside.values())] for name in next(iter(inside.values()))]
    title = f"coverage of the intervals: {study['datasets']} synthetic tables with noise {study['noise']}"
    return f"{wrapped(title)}\n\n{grid(['nominal', *(f'{float(level):.0%}' for level in inside)], rows)}"
