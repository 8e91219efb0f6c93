"""Fits as text: tables in the paper's form, ours above the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["comparison_text", "fit_text", "prediction_text"]

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


def with_interval(name: str, summary: Mapping[str, float | None]) -> str:
    """value [low, high], or the value alone where it has no interval or is fixed."""
    text = number(name, summary["value"])
    if summary["low"] is None or summary["low"] == summary["high"]:
        return text
    return f"{text} [{number(name, summary['low'])}, {number(name, summary['high'])}]"


def fit_text(result: Mapping[str, Any]) -> str:
    """The table of a fit: parameters with intervals, RMSE, held-out errors."""
    cells = list(dict.fromkeys(cell for arm in result["arms"].values() for cell in arm["held_out"]))
    rows = [
        [
            name,
            *(with_interval(c, arm["parameters"][c]) for c in _COLUMNS),
            number("rmse", arm["rmse"]),
            *(
                with_interval("held-out error", arm["held_out"][c]["error"]) if c in arm["held_out"] else ""
                for c in cells
            ),
        ]
        for name, arm in result["arms"].items()
    ]
    return grid(["arm", *_COLUMNS, "RMSE", *(f"error at {c}" for c in cells)], rows)


def comparison_text(title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Two lines per arm, ours and the paper's; then the worst difference of each column against its limit."""
    columns = list(summary)
    by = {(row["arm"], row["column"]): row for row in rows}
    lines: list[list[str]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [by[arm, c] for c in columns]
        ours = [{"value": r["ours"], "low": r["low"], "high": r["high"]} for r in mine]
        lines.append([arm, "ours", *(with_interval(c, o) for c, o in zip(columns, ours, strict=True))])
        lines.append(["", "paper", *(_paper_text(c, r) for c, r in zip(columns, mine, strict=True))])
    judged = [
        [
            c,
            f"{s['worst']:.2g} {s['kind']}",
            f"{s['limit']:g}",
            "yes" if s["within"] else "NO",
            s["same_digits"],
            s["intervals_overlap"],
        ]
        for c, s in summary.items()
    ]
    head = ["column", "worst difference", "limit", "within", "same printed digits", "intervals overlap"]
    return f"{title}\n\n{grid(['arm', '', *columns], lines)}\n\n{grid(head, judged)}"


def _paper_text(column: str, row: Mapping[str, Any]) -> str:
    low, high = row["paper_interval"] or (None, None)
    text = number(column, float(row["paper"]))
    return text if low is None else f"{text} [{number(column, low)}, {number(column, high)}]"


def prediction_text(result: Mapping[str, Any]) -> str:
    """Predicted losses per cell, then the compute-optimal splits."""
    parts = []
    if result["cells"]:
        rows = [[p["cell"], arm, with_interval("loss", s)] for p in result["cells"] for arm, s in p["loss"].items()]
        parts.append(grid(["cell", "arm", "loss"], rows))
    if result["compute"]:
        rows = [
            [f"{p['C']:.3g}", arm, *(_plain(f[q]) for q in ("N", "D")), with_interval("loss", f["loss"])]
            for p in result["compute"]
            for arm, f in p["optimal"].items()
        ]
        parts.append(grid(["FLOPs", "arm", "optimal N", "optimal D", "loss"], rows))
    return "\n\n".join(parts)


def _plain(summary: Mapping[str, float | None]) -> str:
    text = f"{summary['value']:.3g}"
    return text if summary["low"] is None else f"{text} [{summary['low']:.3g}, {summary['high']:.3g}]"
