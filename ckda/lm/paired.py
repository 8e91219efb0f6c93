"""What the records of a study say: paired differences with their intervals, tables, the cells that scaling fits read, figures."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckda.lm.comparison import markdown
from ckda.lm.extras import require
from ckda.lm.figures import label_of, style_of
from ckda.lm.units import KIND
from ckda.page import empty_figure
from ckda.record import write_json, write_text

__all__ = ["Difference", "cells", "collect", "differences", "interval", "noise", "training_gaps"]

Records = Sequence[dict[str, Any]]
LEVEL = 0.95
_SHOWN = {"negative_gates": "negative gates", "beta_above_1": "beta above 1", "complex": "complex transitions"}
BASE = "kda"


@dataclass(frozen=True)
class Difference:
    """Loss of `arm` minus that of `base`, paired by seed, at one cell."""

    rung: str
    budget: int
    arm: str
    base: str
    seeds: list[int]
    each: list[float]
    mean: float
    low: float | None  #: of the t-interval; None with one seed
    high: float | None


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of Student's t-interval; one value has none.

    Example:
        >>> [round(x, 4) for x in interval([1.0, 2.0, 3.0])]
        [2.0, -0.4841, 4.4841]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    require("scipy", "scaling")
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def _losses(records: Records, name: str) -> dict[tuple[str, int, str, int], float]:
    """(rung, budget, arm, seed) -> loss."""
    found = {}
    for one in records:
        unit = one["unit"]
        for cell in one["cells"]:
            if name in cell:
                found[unit["rung"], cell["budget"], unit["model"].partition(":")[2], unit["seed"]] = cell[name]
    return found


def differences(records: Records, base: str = BASE, name: str = "held_out") -> list[Difference]:
    """Every arm against the base, cell by cell, over the seeds that both have."""
    losses, found = _losses(records, name), []
    for rung, budget, arm in dict.fromkeys(key[:3] for key in losses):
        own = arm.replace("ckda", "kda") if arm.endswith("-hybrid") else base
        pairs = {
            s: loss - losses[rung, budget, own, s]
            for (r, b, a, s), loss in losses.items()
            if (r, b, a) == (rung, budget, arm) and (rung, budget, own, s) in losses
        }
        if arm != own and pairs:
            mean, low, high = interval(list(pairs.values()))
            each = [round(value, 6) for value in pairs.values()]
            found.append(Difference(rung, budget, arm, own, list(pairs), each, mean, low, high))
    return found


Gap = list[tuple[float, list[float]]]  #: tokens read, and the difference of every pair of seeds there


def training_gaps(records: Records, base: str = BASE, pieces: int = 40) -> dict[tuple[str, str], Gap]:
    """(rung, arm) -> along the trunks, (tokens, training loss minus the base's of every seed that both have), in so many pieces.

    Trunks of one seed read the same tokens, so that what is left of the difference is the arm's.
    """
    curves: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for one in records:
        unit = one["unit"]
        curves[unit["rung"], unit["model"].partition(":")[2], unit["seed"]] = one["curve"]
    found: dict[tuple[str, str], Gap] = {}
    for rung, arm in dict.fromkeys(key[:2] for key in curves if key[1] != base):
        pairs = [
            (curve, curves.get((rung, base, seed))) for (r, a, seed), curve in curves.items() if (r, a) == (rung, arm)
        ]
        both = [(mine, other) for mine, other in pairs if other is not None and mine["tokens"] == other["tokens"]]
        if both:
            tokens = both[0][0]["tokens"]
            both = [pair for pair in both if pair[0]["tokens"] == tokens]
            size = max(1, -(-len(tokens) // pieces))
            found[rung, arm] = [
                (statistics.fmean(tokens[i : i + size]), [_apart(mine, other, i, i + size) for mine, other in both])
                for i in range(0, len(tokens), size)
            ]
    return found


def _apart(mine: dict[str, list[float]], other: dict[str, list[float]], first: int, last: int) -> float:
    return statistics.fmean(mine["loss"][first:last]) - statistics.fmean(other["loss"][first:last])


def noise(records: Records) -> float | None:
    """The standard deviation between seeds of one arm, pooled over the cells and arms that have several."""
    groups: dict[tuple[str, int, str], list[float]] = {}
    for (rung, budget, arm, _), loss in _losses(records, "held_out").items():
        groups.setdefault((rung, budget, arm), []).append(loss)
    several = [values for values in groups.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return None
    return (sum(statistics.variance(values) * (len(values) - 1) for values in several) / freedom) ** 0.5


def cells(records: Records) -> str:
    """The runs as the CSV that `ckda scaling fit --data` reads, a row a cell and seed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["num_params", "tokens", "val_loss", "arm", "cell", "seed"])
    for one in records:
        unit = one["unit"]
        for cell in one["cells"]:
            name = f"{unit['rung']}/{cell['budget'] / 1e6:g}MT"
            writer.writerow(
                [
                    one["parameters"],
                    cell["tokens"],
                    cell["held_out"],
                    unit["model"].partition(":")[2],
                    name,
                    unit["seed"],
                ]
            )
    return out.getvalue()


# Tables ---------------------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:+.{digits}f}"


def difference_table(found: Sequence[Difference]) -> str:
    """As Markdown, one number a cell."""
    head = ["rung", "tokens", "arm", "minus", "seeds", "mean", "95% low", "95% high"]
    rows = [
        [
            d.rung,
            f"{d.budget / 1e6:g}M",
            label_of(d.arm),
            label_of(d.base),
            str(len(d.seeds)),
            _number(d.mean),
            _number(d.low),
            _number(d.high),
        ]
        for d in found
    ]
    return markdown(head, rows)


_MARKS = (2e6, 4e6, 6e6, 8e6, 12e6, 16e6, 24e6, 48e6, 96e6)  #: tokens at which the table of gaps stands


def gap_table(gaps: dict[tuple[str, str], Gap]) -> str:
    """The difference of training losses along the trunk, at the piece that is nearest to each mark."""
    rows = []
    for (rung, arm), gap in gaps.items():
        for mark in _MARKS:
            tokens, each = min(gap, key=lambda piece: abs(piece[0] - mark))
            if abs(tokens - mark) < 0.1 * mark:
                numbers = [_number(value, 3) for value in interval(each)]
                rows.append([rung, f"{tokens / 1e6:.1f}M", label_of(arm), str(len(each)), *numbers])
    return markdown(["rung", "tokens read", "arm", "seeds", "training loss minus KDA's", "95% low", "95% high"], rows)


def loss_table(records: Records) -> str:
    """Mean losses by rung, budget and arm."""
    held, far = _losses(records, "held_out"), _losses(records, "out_of_domain")
    rows = []
    for rung, budget, arm in dict.fromkeys(key[:3] for key in held):
        mine = [loss for key, loss in held.items() if key[:3] == (rung, budget, arm)]
        other = [loss for key, loss in far.items() if key[:3] == (rung, budget, arm)]
        rows.append(
            [
                rung,
                f"{budget / 1e6:g}M",
                label_of(arm),
                str(len(mine)),
                f"{statistics.fmean(mine):.4f}",
                f"{statistics.fmean(other):.4f}" if other else "-",
            ]
        )
    return markdown(["rung", "tokens", "arm", "seeds", "held-out loss", "out-of-domain loss"], rows)


def factor_table(records: Records) -> str:
    """A row a change and arm: its mean loss, and the difference to KDA under the same change (else to KDA at the base) by seed.

    Units without a label, as the ladder's are, are the base.
    """
    by: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for one in records:
        unit = one["unit"]
        by.setdefault((unit["label"] or "base", unit["model"].partition(":")[2]), {})[unit["seed"]] = one
    rows = []
    for (label, arm), runs in by.items():
        base = by.get((label, arm.replace("ckda", "kda"))) if arm.startswith("ckda") else None
        base = base or by.get(("base", BASE), {})
        pairs = [_loss(run) - _loss(base[seed]) for seed, run in runs.items() if seed in base and run is not base[seed]]
        mean, low, high = interval(pairs) if pairs else (None, None, None)
        looks = [run["cells"][-1]["look"] for run in runs.values() if run["cells"][-1].get("look")]
        shares = [
            "-" if not looks else f"{100 * statistics.fmean(statistics.fmean(look[name]) for look in looks):.2f}"
            for name in ("negative_gates", "beta_above_1")
        ]
        norms = [statistics.fmean(run["curve"]["grad_norm"]) for run in runs.values()]
        peaks = [max(run["curve"]["grad_norm_max"]) for run in runs.values()]
        losses = statistics.fmean(map(_loss, runs.values()))
        rows.append(
            [
                label,
                label_of(arm),
                str(len(runs)),
                f"{losses:.4f}",
                _number(mean),
                _number(low),
                _number(high),
                f"{statistics.fmean(norms):.3f}",
                f"{max(peaks):.2f}",
                *shares,
            ]
        )
    head = [
        "change",
        "arm",
        "seeds",
        "held-out loss",
        "minus KDA",
        "95% low",
        "95% high",
        "gradient norm",
        "its maximum",
        "negative gates, %",
        "beta above 1, %",
    ]
    return markdown(head, rows)


def _loss(one: dict[str, Any]) -> float:
    loss: float = one["cells"][-1]["held_out"]
    return loss


def program_table(records: Records) -> str:
    """Exact final states by arm, kind and length, in per cent (means over seeds)."""
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for one in records:
        for kind, scores in one["cells"][-1].get("programs", {}).items():
            rows.setdefault((one["unit"]["model"].partition(":")[2], kind), []).append(scores)
    lengths = list(next(iter(rows.values()))[0]) if rows else []
    cells_ = [
        [label_of(arm), kind, str(len(found)), *(f"{100 * statistics.fmean(s[n] for s in found):.1f}" for n in lengths)]
        for (arm, kind), found in rows.items()
    ]
    return markdown(["arm", "program", "seeds", *(f"exact at {n}, %" for n in lengths)], cells_)


# Figures --------------------------------------------------------------------------------------------------------------------


def ladder_figure(records: Records) -> Any:
    """Held-out loss against tokens, a line an arm and rung; the dots are seeds."""
    losses = _losses(records, "held_out")
    rungs = list(dict.fromkeys(key[0] for key in losses))
    figure = empty_figure(figsize=(2.9 * max(2, len(rungs)), 3.6))
    all_axes = figure.subplots(1, len(rungs), squeeze=False)[0]
    for axes, rung in zip(all_axes, rungs, strict=True):
        for arm in dict.fromkeys(key[2] for key in losses if key[0] == rung):
            label, colour, line = style_of(arm)
            points: dict[int, list[float]] = {}
            for (r, budget, a, _), loss in losses.items():
                if (r, a) == (rung, arm):
                    points.setdefault(budget, []).append(loss)
            budgets = sorted(points)
            axes.plot(
                [b / 1e6 for b in budgets],
                [statistics.fmean(points[b]) for b in budgets],
                line,
                color=colour,
                label=label,
                linewidth=1.3,
            )
            axes.plot(
                [b / 1e6 for b in budgets for _ in points[b]],
                [x for b in budgets for x in points[b]],
                ".",
                color=colour,
                markersize=4,
            )
        axes.set(title=rung, xlabel="tokens (millions)", xscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("held-out loss (nats a token)")
    all_axes[-1].legend(frameon=False, fontsize=8)
    return figure


def gap_figure(gaps: dict[tuple[str, str], Gap]) -> Any:
    """Training loss minus KDA's on the same tokens, along the trunk: the mean over seeds with its 95% interval."""
    rungs = list(dict.fromkeys(rung for rung, _ in gaps))
    figure = empty_figure(figsize=(3.4 * max(2, len(rungs)), 3.4))
    all_axes = figure.subplots(1, max(1, len(rungs)), squeeze=False)[0]
    for axes, rung in zip(all_axes, rungs, strict=False):
        axes.axhline(0, color="black", lw=0.6)
        for (r, arm), gap in gaps.items():
            if r == rung:
                label, colour, line = style_of(arm)
                tokens = [tokens / 1e6 for tokens, _ in gap]
                spans = [interval(each) for _, each in gap]
                axes.plot(tokens, [mean for mean, _, _ in spans], line, color=colour, label=label, lw=1.3)
                lows = [mean if low is None else low for mean, low, _ in spans]
                highs = [mean if high is None else high for mean, _, high in spans]
                axes.fill_between(tokens, lows, highs, color=colour, alpha=0.2, lw=0)
        axes.set(title=rung, xlabel="tokens read (millions)")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("training loss minus KDA's (nats)")
    all_axes[-1].legend(frameon=False, fontsize=8)
    return figure


def advantage_figure(found: Sequence[Difference], band: float | None) -> Any:
    """Each arm's loss minus its base's by cell, with 95% intervals; the band is two standard deviations between seeds."""
    arms = list(dict.fromkeys(d.arm for d in found)) or ["ckda"]
    figure = empty_figure(figsize=(3.6 * max(2, len(arms)), 3.4))
    for axes, arm in zip(figure.subplots(1, len(arms), squeeze=False)[0], arms, strict=True):
        mine = [d for d in found if d.arm == arm]
        if band is not None:
            axes.axhspan(-2 * band, 2 * band, color="#9aa5b1", alpha=0.25, lw=0)
        axes.axhline(0, color="black", lw=0.6)
        for place, d in enumerate(mine):
            colour = style_of(arm)[1]
            axes.plot([place], [d.mean], "o", color=colour, markersize=4)
            axes.plot([place] * len(d.each), d.each, "_", color=colour, alpha=0.5)
            if d.low is not None and d.high is not None:
                axes.plot([place, place], [d.low, d.high], color=colour, lw=1.3)
        axes.set_xticks(range(len(mine)), [f"{d.rung}\n{d.budget / 1e6:g}M" for d in mine], fontsize=7)
        axes.set_title(f"{label_of(arm)} minus {label_of(mine[0].base) if mine else ''}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("held-out loss (nats)")
    return figure


def gates_figure(records: Records) -> Any:
    """Shares of negative gates, of beta above 1 and of complex transitions over training, mean over layers; a line a unit."""
    figure = empty_figure(figsize=(10.5, 3.4))
    named: set[str] = set()
    for axes, (name, title) in zip(figure.subplots(1, 3), _SHOWN.items(), strict=True):
        for one in records:
            looks = _looks(one)
            if looks:
                label, colour, line = style_of(one["unit"]["model"].partition(":")[2])
                shown = None if name != "negative_gates" or label in named else label
                named.add(label)
                axes.plot(
                    [look["tokens"] / 1e6 for look in looks],
                    [100 * statistics.fmean(look[name]) for look in looks],
                    line,
                    color=colour,
                    label=shown,
                    lw=1,
                )
        axes.set(title=title, xlabel="tokens (millions)", ylabel="%")
        axes.spines[["top", "right"]].set_visible(False)
        if name == "negative_gates" and named:
            axes.legend(frameon=False, fontsize=7)
    return figure


def layers_figure(one: dict[str, Any]) -> Any:
    """One unit: the three shares by layer and tokens, colours on a square-root scale (fig:signed_kda_interpretability_llm)."""
    from matplotlib.colors import PowerNorm

    looks = _looks(one)
    figure = empty_figure(figsize=(10.5, 3.6))
    for axes, (name, title) in zip(figure.subplots(1, 3), _SHOWN.items(), strict=True):
        values = [[100 * look[name][row] for look in looks] for row in range(len(looks[0]["layers"]))]
        image = axes.imshow(
            values, cmap="viridis", norm=PowerNorm(0.5, vmin=0, vmax=100), aspect="auto", origin="lower"
        )
        axes.set_yticks(range(len(looks[0]["layers"])), looks[0]["layers"], fontsize=7)
        axes.set_xticks(range(len(looks)), [f"{look['tokens'] / 1e6:.3g}" for look in looks], fontsize=7)
        axes.set(title=f"{title} (%)", xlabel="tokens (millions)", ylabel="layer")
        figure.colorbar(image, ax=axes)
    return figure


def _looks(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A unit's inspections in order: of the trunk, and of the model that the longest cooldown left."""
    last = one["cells"][-1].get("look")
    return sorted([*one["looks"], *([last] if last else [])], key=lambda look: look["tokens"])


def _with_base(records: Records) -> Records:
    """A study's records: of the units without a change, which the ladder may have, those of the same sizes and budgets."""
    changed = {(one["unit"]["rung"], tuple(one["unit"]["budgets"])) for one in records if one["unit"]["label"]}
    kept = [one for one in records if (one["unit"]["rung"], tuple(one["unit"]["budgets"])) in changed]
    return kept or records


# All of it ------------------------------------------------------------------------------------------------------------------


def collect(records: Records, out: Path) -> list[Path]:
    """One merged record and everything that is drawn from it; returns the files. Records of different tokens are refused."""
    if not records:
        raise ValueError("there are no units to collect")
    records = _with_base(records)
    data = records[0]["data"]
    for one in records:
        if one["data"]["train_sha256"] != data["train_sha256"]:
            raise ValueError(
                f"{one['unit']['name']} was trained on other tokens than {records[0]['unit']['name']}; collect them apart"
            )
    merged = [{name: value for name, value in one.items() if name != "data"} for one in records]
    written = [write_json(out / "units.json", {"what": KIND, "data": data, "units": merged})]
    if any(one["cells"][-1].get("programs") for one in records):
        written.append(write_text(out / "programs.md", program_table(records)))
    if any(one["unit"]["label"] for one in records):
        written.append(write_text(out / "factors.md", factor_table(records)))
        return [*written, _saved(gates_figure(records), out / "gates.png")]
    found, band, gaps = differences(records), noise(records), training_gaps(records)
    summary = {
        "what": "paired differences of held-out losses",
        "level": LEVEL,
        "noise": band,
        "differences": [asdict(d) for d in found],
    }
    written += [
        write_json(out / "differences.json", summary),
        write_text(out / "cells.csv", cells(records)),
        write_text(out / "table.md", "\n".join([loss_table(records), difference_table(found), gap_table(gaps)])),
        _saved(ladder_figure(records), out / "ladder.png"),
        _saved(advantage_figure(found, band), out / "advantage.png"),
        _saved(gates_figure(records), out / "gates.png"),
    ]
    if gaps:
        written.append(_saved(gap_figure(gaps), out / "gap.png"))
    largest = max(one["parameters"] for one in records)
    for one in records:
        unit = one["unit"]
        arm = unit["model"].partition(":")[2]
        if arm in ("ckda", "ckda-hybrid") and unit["seed"] == 0 and one["parameters"] > 0.9 * largest and _looks(one):
            written.append(_saved(layers_figure(one), out / f"layers-{arm}.png"))
    return written


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return path
