"""The paper's fits again, held against what it prints; what its rounding hides; whether the intervals cover."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fit import LEVEL, Fit, Settings, bootstrap, fit, interval, problem_of
from .law import PARAMETERS, skaling_loss
from .published import HELD_OUT, PINNED_E, paper_fits
from .solver import solve
from .table import Table

__all__ = ["TREATMENTS", "Check", "Entry", "checks", "coverage", "entries", "printed_digits", "rounding_spread"]

Array = NDArray[np.float64]

#: treatment -> (settings, label of the table that prints it, column of tab:scaling-holdout)
TREATMENTS: dict[str, tuple[Settings, str, str]] = {
    "isolated": (Settings(hold_out=(HELD_OUT,)), "tab:scaling-holdout-isolated", "isolated"),
    "pinned": (Settings(E=PINNED_E, offset="shared", hold_out=(HELD_OUT,)), "tab:scaling-holdout-pinned", "pinned"),
    "pinned, offset per arm": (Settings(E=PINNED_E, hold_out=(HELD_OUT,)), "tab:scaling-holdout-pinned", "pinned"),
}

#: column -> (what is compared, the largest accepted difference)
LIMITS = {
    "E": ("absolute", 0.002),
    "A": ("relative", 0.03),
    "alpha": ("absolute", 0.002),
    "B": ("relative", 0.03),
    "beta": ("absolute", 0.002),
    "k": ("absolute", 0.002),
    "rmse": ("relative", 0.01),
    "held-out error": ("absolute", 0.0005),
}


@dataclass(frozen=True)
class Entry:
    """One printed number: ours and its interval, the paper's digits and interval, whether they agree."""

    arm: str
    column: str
    ours: float
    low: float | None
    high: float | None
    paper: str
    paper_interval: list[float] | None
    difference: float
    limit: float
    kind: str
    within: bool
    same_digits: bool
    intervals_overlap: bool | None


@dataclass(frozen=True)
class Check:
    """One column of the paper's table against ours."""

    worst: float
    arm: str
    kind: str
    limit: float
    within: bool
    same_digits: str
    intervals_overlap: str


def entries(fitted: Fit, treatment: str, level: float = LEVEL) -> list[Entry]:
    """One entry per arm and printed column: ours, its interval, the paper's digits and interval, whether they agree."""
    _, label, column = TREATMENTS[treatment]
    rows = []
    for arm, result in fitted.arms.items():
        ours = {n: (s.value, s.low, s.high) for n, s in result.parameters(level).items()}
        ours["rmse"] = (result.rmse, None, None)
        error = result.held_out_errors(level)[HELD_OUT]
        ours["held-out error"] = (error.value, error.low, error.high)
        printed = {**paper_fits()[label][arm], "held-out error": paper_fits()["tab:scaling-holdout"][arm][column]}
        rows += [_entry(arm, name, ours[name], printed[name]) for name in LIMITS if name in printed]
    return rows


def _entry(arm: str, name: str, ours: tuple[float, float | None, float | None], printed: dict[str, Any]) -> Entry:
    value, low, high = ours
    paper = float(printed["printed"])
    kind, limit = LIMITS[name]
    difference = abs(value - paper) / (abs(paper) if kind == "relative" else 1.0)
    theirs = printed.get("interval")
    overlap = None if low is None or high is None or theirs is None else low <= theirs[1] and theirs[0] <= high
    same = printed_digits(value, printed["printed"]) == printed["printed"]
    agree = difference, limit, kind, difference <= limit, same, overlap
    return Entry(arm, name, value, low, high, printed["printed"], theirs, *agree)


def printed_digits(value: float, like: str) -> str:
    """`value` with as many digits as the paper prints in `like`.

    Example:
        >>> printed_digits(25683.8, "2.57e4"), printed_digits(1.21105481, "1.2111"), printed_digits(0.00064, "0.0007")
        ('2.57e4', '1.2111', '0.0006')
    """
    mantissa, _, exponent = like.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if not exponent:
        return f"{value:.{decimals}f}"
    left, _, right = f"{value:.{decimals}e}".partition("e")
    return f"{left}e{int(right)}"


def checks(rows: Sequence[Entry]) -> dict[str, Check]:
    """The worst difference per column against its limit, the digits that agree, and the intervals that overlap."""
    out: dict[str, Check] = {}
    for name, (kind, limit) in LIMITS.items():
        mine = [row for row in rows if row.column == name]
        if mine:
            worst = max(mine, key=lambda row: row.difference)
            overlaps = [row.intervals_overlap for row in mine if row.intervals_overlap is not None]
            digits = f"{sum(row.same_digits for row in mine)} of {len(mine)}"
            within, overlap = all(row.within for row in mine), f"{sum(overlaps)} of {len(overlaps)}"
            out[name] = Check(worst.difference, worst.arm, kind, limit, within, digits, overlap)
    return out


def rounding_spread(
    fitted: Fit, draws: int = 200, half_width: float = 5e-5, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Half the width of the central 95% of every parameter as the losses vary within the rounding of the table.

    The paper fitted the losses themselves; we have them to four decimals. What moves more than a printed digit under
    losses + U(-half_width, half_width) cannot be expected to agree in that digit.
    """
    names = list(fitted.arms)
    groups = [names] if fitted.settings.roles.shared else [[name] for name in names]
    spread: dict[str, dict[str, float]] = {}
    for g, group in enumerate(groups):
        rng = np.random.default_rng([seed, 2, g])
        problem = problem_of([fitted.arms[name].train for name in group], fitted.settings)
        theta = np.stack([fitted.arms[name].theta for name in group])
        losses = problem.loss + rng.uniform(-half_width, half_width, (draws, *problem.loss.shape))
        ends, _ = solve(problem, np.repeat(theta[None], draws, 0), fitted.settings.roles, loss=losses)
        for i, name in enumerate(group):
            arm = replace(fitted.arms[name], replicates=ends[:, i])
            summaries = arm.parameters()
            spread[name] = {
                n: (s.high - s.low) / 2 for n, s in summaries.items() if s.high is not None and s.low is not None
            }
    return spread


def coverage(
    truth: Array,
    design: Table,
    *,
    noise: float = 0.002,
    datasets: int = 300,
    replicates: int = 300,
    levels: Sequence[float] = (0.5, LEVEL),
    seed: int = 0,
    tick: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """How often the bootstrap interval holds the truth, for tables on `design` from `truth` [7] plus Gaussian noise.

    Every table is fitted from random starts and bootstrapped by the functions a user calls; one arm, Skaling form,
    offset where the design has chained cells. Besides the parameters, the loss at ten times the largest N and D is
    tried.
    The result's `inside` is the share of the tables by level and quantity.
    """
    clean = skaling_loss(truth, design.N, design.D, design.chained)
    far = (10 * design.N.max(), 10 * design.D.max())
    target = np.append(truth, skaling_loss(truth, *far))  # [8]
    rng = np.random.default_rng([seed, 3])
    inside = np.zeros((len(levels), len(target)))
    for i in range(datasets):
        table = replace(design, loss=clean + noise * rng.standard_normal(len(clean)))
        (arm,) = bootstrap(fit(table, starts=12, seed=i), replicates, restarts=0, seed=i).arms.values()
        draws = np.asarray(arm.replicates)
        draws = np.column_stack([draws, skaling_loss(draws, *far)])
        for j, level in enumerate(levels):
            low, high = interval(draws, level)
            inside[j] += (low <= target) & (target <= high)
        if tick is not None:
            tick()
    names, share = [*PARAMETERS, "loss at 10x"], inside / datasets
    return {
        "noise": noise, "datasets": datasets, "replicates": replicates, "truth": list(map(float, truth)),
        "standard_error": {str(p): float(np.sqrt(p * (1 - p) / datasets)) for p in levels},
        "inside": {str(p): dict(zip(names, row.tolist(), strict=True)) for p, row in zip(levels, share, strict=True)},
    }  # fmt: skip
