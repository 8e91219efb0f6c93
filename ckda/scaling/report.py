"""Fits as text: tables in the paper's form, ours above the paper's."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .fit import LEVEL, Fit, Summary
from .reproduce import Check, Entry

if TYPE_CHECKING:
    from .commands.predict import Predictions

__all__ = ["comparison_text", "coverage_text", "fit_text", "prediction_text"]

_COLUMNS = ("E", "A", "alpha", "B", "beta", "k", "c")


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
    """Two lines per arm, ours and the paper's; then the worst difference of each column against its limit."""
    by = {(row.arm, row.column): row for row in rows}
    lines: list[list[str]] = []
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [by[arm, column] for column in summary]
        lines.append([arm, "ours", *(with_interval(r.column, r.ours, r.low, r.high) for r in mine)])
        theirs = [(r.column, float(r.paper), *(r.paper_interval or (None, None))) for r in mine]
        lines.append(["", "paper", *(with_interval(*one) for one in theirs)])
    judged = [
        [
            column,
            f"{check.worst:.2g} {check.kind}",
            f"{check.limit:g}",
            "yes" if check.within else "NO",
            check.same_digits,
            check.intervals_overlap,
        ]
        for column, check in summary.items()
    ]
    head = ["column", "worst difference", "limit", "within", "same printed digits", "intervals overlap"]
    return f"{title}\n\n{grid(['arm', '', *summary], lines)}\n\n{grid(head, judged)}"


def prediction_text(result: "Predictions") -> str:
    """Predicted losses per cell, then the compute-optimal splits."""
    parts = []
    if result.cells:
        rows = [[cell.cell, arm, _text("loss", loss)] for cell in result.cells for arm, loss in cell.loss.items()]
        parts.append(grid(["cell", "arm", "loss"], rows))
    if result.compute:
        rows = [
            [f"{best.C:.3g}", arm, *(_plain(found[q]) for q in ("N", "D")), _text("loss", found["loss"])]
            for best in result.compute
            for arm, found in best.optimal.items()
        ]
        parts.append(grid(["FLOPs", "arm", "optimal N", "optimal D", "loss"], rows))
    return "\n\n".join(parts)


def coverage_text(study: Mapping[str, Any]) -> str:
    """How often the intervals hold the truth, by level and quantity."""
    names = list(next(iter(study["inside"].values())))
    rows = [[f"{float(level):.0%}", *(f"{row[n]:.3f}" for n in names)] for level, row in study["inside"].items()]
    title = f"coverage of the intervals: {study['datasets']} synthetic tables with noise {study['noise']}"
    return f"{title}\n\n{grid(['nominal', *names], rows)}"


def _plain(summary: Summary) -> str:
    text = f"{summary.value:.3g}"
    return text if summary.low is None else f"{text} [{summary.low:.3g}, {summary.high:.3g}]"
