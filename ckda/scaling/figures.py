"""Figures, pure functions of results: loss against compute, advantage by scale, residuals, predictions, beside the paper."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ckda.record import write_bytes

from .fit import LEVEL, Cell, Fit, Summary
from .table import short

if TYPE_CHECKING:
    from .commands.compare import Comparison
    from .commands.predict import Predictions
    from .reproduce import Entry

__all__ = ["advantage", "beside_paper", "frontier", "predictions", "residuals", "save"]

_COLOURS = (
    "#4d4d4d",
    "#999999",
    "#1f77b4",
    "#d62728",
    "#17a2b8",
    "#ff7f0e",
    "#2ca02c",
    "#9467bd",
    "#8c564b",
    "#e377c2",
)


def save(path: str | Path, figure: Figure) -> Path:
    """Write the figure as PNG, whole or not at all."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    return write_bytes(path, buffer.getvalue())


def _colours(fitted: Fit) -> dict[str, str]:
    return {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(fitted.arms)}


def _panels(count: int, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for i in range(count, rows * columns):
        axes.flat[i].set_visible(False)
        axes.flat[i - columns].tick_params(labelbottom=True)  # nothing below it shows the shared ticks
    return figure, list(axes.flat[:count])


def frontier(fitted: Fit, level: float = LEVEL) -> Figure:
    """Loss against training compute: the measured cells, and the fitted compute-optimal frontier with its interval."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (arm, colour) in enumerate(_colours(fitted).items()):
        style = ("-", (0, (4, 2)))[i % 2]  # neighbours often coincide
        cells, curve = fitted.arms[arm].cells, fitted.arms[arm].curve(fitted.budgets(), level)
        left.scatter([c.C for c in cells], [c.loss for c in cells], s=9, color=colour, alpha=0.6, linewidths=0)
        if not curve:
            continue
        C, losses = [C for C, _ in curve], [best["loss"] for _, best in curve]
        left.plot(C, [loss.value for loss in losses], color=colour, lw=1.6, ls=style, label=arm)
        if losses[0].low is not None:
            low, high = ([_edge(loss, name) for loss in losses] for name in ("low", "high"))
            left.fill_between(C, low, high, color=colour, alpha=0.12, lw=0)
        right.plot(C, [best["N"].value for _, best in curve], color=colour, lw=1.6, ls=style)
    left.set(xscale="log", xlabel="training FLOPs, 6ND", ylabel="validation loss (nats)", title="Loss against compute")
    right.set(
        xscale="log", yscale="log", xlabel="training FLOPs, 6ND", ylabel="compute-optimal N", title="Optimal size"
    )
    left.legend(fontsize=8, frameon=False, title="optimal frontier; dots: runs", title_fontsize=8)
    _grid(left, right)
    return figure


def advantage(fitted: Fit, baseline: str, noise: float | None = None) -> Figure:
    """fig:scaling-advantage: loss of the baseline minus that of each other arm at the same cell, by tokens.

    A line a size, dashed its fit; the grey band is the noise (nats), where it is known.
    """
    cells = {name: arm.cells for name, arm in fitted.arms.items()}
    others = [arm for arm in cells if arm != baseline]
    figure, axes = _panels(max(1, len(others)))
    N = {cell.size: cell.N for arm in others for cell in cells[arm]}
    sizes = sorted(N, key=N.__getitem__)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, max(1, len(sizes))))
    for axis, arm in zip(axes, others, strict=False):
        pairs = _pairs(cells[arm], cells[baseline])
        for size, shade in zip(sizes, shades, strict=True):
            mine = sorted((a.D, b.loss - a.loss, b.predicted - a.predicted) for a, b in pairs if a.size == size)
            if mine:
                D, measured, predicted = zip(*mine, strict=True)
                axis.plot(D, measured, "o-", color=shade, ms=3.5, lw=1.3, label=size)
                axis.plot(D, predicted, "--", color=shade, lw=0.9)
        axis.set_title(arm, fontsize=10)
        axis.axhline(0, color="black", lw=0.6)
        if noise is not None:
            axis.axhspan(-noise, noise, color="black", alpha=0.15, lw=0)
        axis.set_xscale("log")
        _token_ticks(axis, [cell.D for cell in cells[arm]])
    figure.supxlabel("training tokens D", fontsize=10)
    figure.supylabel(f"loss of {baseline} minus loss (nats)", fontsize=10)
    if axes[0].lines:
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside right center",
            fontsize=8,
            frameon=False,
            title="size (dashed: fit)",
        )
    _grid(*axes)
    return figure


def residuals(fitted: Fit) -> Figure:
    """Measured minus fitted loss of every cell by compute; crosses are held out; the band is the Huber scale."""
    figure, axes = _panels(len(fitted.arms))
    delta = fitted.settings.delta
    for axis, (arm, colour) in zip(axes, _colours(fitted).items(), strict=True):
        data = fitted.arms[arm]
        axis.axhspan(-1e3 * delta, 1e3 * delta, color="black", alpha=0.05, lw=0)
        axis.axhline(0, color="black", lw=0.6)
        for marker, kind in (("o", "fitted, own run"), ("s", "fitted, chained"), ("X", "held out")):
            mine = [cell for cell in data.cells if _kind(cell) == kind]
            x, y = [cell.C for cell in mine], [1e3 * (cell.loss - cell.predicted) for cell in mine]
            face = "none" if marker == "o" else colour
            edge, area = ("black", 60) if marker == "X" else (colour, 26)
            axis.scatter(
                x, y, area, marker=marker, facecolors=face, edgecolors=edge, lw=0.9, label=kind if mine else None
            )
        axis.set_title(f"{arm}: RMSE {1e3 * data.rmse:.2f} mnat", fontsize=10)
        axis.set_xscale("log")
    axes[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("training FLOPs, 6ND", fontsize=10)
    figure.supylabel("measured minus fitted loss (mnat)", fontsize=10)
    _grid(*axes)
    return figure


def predictions(result: "Predictions") -> Figure:
    """Predicted losses with their intervals, one group per cell or compute budget."""
    groups = [(cell.cell, cell.loss) for cell in result.cells]
    groups += [
        (f"{best.C:.2g} FLOPs,\noptimal", {arm: found["loss"] for arm, found in best.optimal.items()})
        for best in result.compute
    ]
    figure = Figure(figsize=(max(5.0, 1.6 * len(groups) + 3.5), 4.0), layout="constrained")
    axis = figure.subplots()
    arms = list(groups[0][1])
    for i, arm in enumerate(arms):
        x = np.arange(len(groups)) + 0.7 * ((i + 0.5) / len(arms) - 0.5)
        y, low, high = (np.array([_edge(g[arm], name) for _, g in groups]) for name in ("value", "low", "high"))
        error = np.maximum([y - low, high - y], 0.0)
        axis.errorbar(x, y, yerr=error, fmt="o", ms=4, capsize=2, color=_COLOURS[i % len(_COLOURS)], label=arm)
    axis.set_xticks(range(len(groups)), [name for name, _ in groups])
    axis.set(ylabel="predicted loss (nats)")
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _grid(axis)
    return figure


def beside_paper(result: "Comparison") -> Figure:
    """Every printed estimate with its interval, ours above the paper's; one row of panels per treatment."""
    treatments = {name: treatment.beside_paper for name, treatment in result.treatments.items()}
    columns = ["E", "A", "alpha", "B", "beta", "k", "held-out error"]
    arms = list(dict.fromkeys(row.arm for rows in treatments.values() for row in rows))
    figure = Figure(figsize=(2.3 * len(columns), 2.6 * len(treatments)), layout="constrained")
    axes = figure.subplots(len(treatments), len(columns), sharey=True, squeeze=False)
    for line, (name, rows) in zip(axes, treatments.items(), strict=True):
        line[0].set_ylabel(name, fontsize=10)
        for axis, column in zip(line, columns, strict=True):
            _forest(axis, [row for row in rows if row.column == column], arms)
            axis.set_title(column, fontsize=10)
    axes[0, 0].invert_yaxis()
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9, frameon=False
    )
    return figure


def _forest(axis: Axes, rows: "Sequence[Entry]", arms: list[str]) -> None:
    axis.set_yticks(range(len(arms)), arms, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    if not rows:
        axis.text(0.5, 0.5, "pinned", transform=axis.transAxes, ha="center", va="center", fontsize=9, color="0.5")
        axis.set_xticks([])
        return
    if rows[0].column in ("A", "B"):
        axis.set_xscale("log")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(3))
    y = np.array([arms.index(row.arm) for row in rows])
    ours = [(row.ours, row.low, row.high) for row in rows]
    paper = [(float(row.paper), *(row.paper_interval or (None, None))) for row in rows]
    for shift, values, colour, label in ((-0.15, ours, "#d62728", "ours"), (0.15, paper, "#4d4d4d", "paper")):
        axis.plot([v for v, _, _ in values], y + shift, "o", ms=3.5, color=colour, label=label)
        for at, (_, low, high) in zip(y, values, strict=True):
            if low is not None and high is not None:
                axis.plot([low, high], [at + shift] * 2, color=colour, lw=1.2)
    axis.grid(alpha=0.25, lw=0.5, axis="x")


def _token_ticks(axis: Axes, tokens: list[float]) -> None:
    """The budgets themselves as ticks, where they are few."""
    budgets = sorted(set(tokens))
    if len(budgets) <= 6:
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticks(budgets, [short(D) for D in budgets])


def _edge(summary: Summary, name: str) -> float:
    """A value or an end of its interval; the value where it has none."""
    found: float | None = getattr(summary, name)
    return summary.value if found is None else found


def _kind(cell: Cell) -> str:
    return "held out" if cell.held_out else "fitted, chained" if cell.chained else "fitted, own run"


def _pairs(cells: list[Cell], base: list[Cell]) -> list[tuple[Cell, Cell]]:
    """Each cell with the baseline's nearest one: sizes within 5%, tokens within 2%."""
    pairs = []
    for cell in cells:
        near = [b for b in base if abs(np.log(b.N / cell.N)) < 0.05 and abs(np.log(b.D / cell.D)) < 0.02]
        if near:
            pairs.append((cell, min(near, key=lambda b: abs(np.log(b.N / cell.N)))))
    return pairs


def _grid(*axes: Axes) -> None:
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.5, which="major")
        axis.spines[["top", "right"]].set_visible(False)
