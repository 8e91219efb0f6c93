"""``ckda inspect horizon``: from short words alone, the length at which a trained tracker goes wrong.

A relator, here letters x and y in turn three times where xy has order 3, changes nothing in the group. It also changes nothing
where letters act by quaternions, S -> q S q. A trained model changes a little when relators are inserted into a word: the right
answer's margin m over a wrong one moves to m + d. D(n) is the median, over words that are answered right, of the square of the
largest share -d / m that n relators take from any margin. Part of it is there after one relator and stays as it is; what grows is
the closure error a letter,

    c = (D(4) - D(1)) / (3 |relator|),        from words of at most 32 letters.

Nothing corrects the errors of earlier letters, and the accuracy falls to a half at

    T_half = kappa / sqrt(c),

with one number kappa, fitted to the geometric mean. The error is said as a factor: the root mean square of log2(predicted /
measured). A random walk of errors would have T_half = kappa / c; that fits worse, and its error stands beside. The formula holds
within a factor 2 or so for recipes with plain labels; for `wide` (smoothed labels, 48 or 96 heads) it fails
(results/tracking/README.md).
"""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.command import make_folder
from ckda.experiments.tracking.model import Tracker
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.run import load_replica, title
from ckda.experiments.tracking.task import WordProblem, scaled_accuracy
from ckda.page import empty_figure, print_table
from ckda.record import environment, write_json
from ckda.train.weights import read_weights

__all__ = ["closure_error", "fit", "half_length", "horizon_figure", "inspect", "measured"]

_OUTER, _FEW, _MANY = (
    4,
    1,
    4,
)  # letters before and after the relators, and how many of these: 32 letters with four of six
_NO_GROWTH = 1e-30  # in the place of a growth that is not above zero
_LEAST = 0.5  # the scaled accuracy that a seed must have at length 32 to have a horizon


@torch.no_grad()
def closure_error(model: Tracker, task: WordProblem, num: int = 512, seed: int = 5) -> float:
    """c of the module's formula, from `num` words drawn from this seed; in float64."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    letters, relators = torch.tensor(task.letters), _relators(task)

    def draw(pool: Tensor, *shape: int) -> Tensor:
        return pool[torch.randint(len(pool), shape, generator=generator)]

    u, w = draw(letters, num, _OUTER), draw(letters, num, _OUTER)
    product = task.products(task.elements(torch.cat([u, w], 1)))[:, -1:]
    inserted = draw(relators, num, _MANY).flatten(1)
    m = _margins(model, task, torch.cat([u, w], 1), product)
    right = m.scatter(1, product, torch.inf).min(1).values > 0
    lost = []
    for count in (_FEW, _MANY):
        words = torch.cat([u, inserted[:, : count * relators.shape[1]], w], 1)
        share = (1 - _margins(model, task, words, product) / m).scatter(1, product, 0).clamp_min(0)
        lost.append(float(share[right].max(1).values.square().median()))
    return max(_NO_GROWTH, (lost[1] - lost[0]) / ((_MANY - _FEW) * relators.shape[1]))


def _relators(task: WordProblem) -> Tensor:
    """[n, 2 k] the words (x y)^k of letters whose product has order k: 3 where there are such, or else the least one above 1."""
    pairs = torch.cartesian_prod(torch.tensor(task.letters), torch.tensor(task.letters))
    elements = task.elements(pairs)
    orders = torch.tensor(task.group.orders)[task.table[elements[:, 1], elements[:, 0]]]
    order = 3 if bool((orders == 3).any()) else int(orders[orders > 1].min())
    return pairs[orders == order].repeat(1, order)


def _margins(model: Tracker, task: WordProblem, words: Tensor, product: Tensor) -> Tensor:
    """[N, n] by how much the logit of the product [N, 1] is above that of every element, after words [N, T]."""
    begin = torch.full((len(words), 1), task.begin)
    logits = model(torch.cat([begin, words], 1))[:, -1]
    return logits.gather(1, product) - logits


def half_length(scores: dict[int, float]) -> float | None:
    """Where the scaled accuracy falls below a half, by interpolation in log2 of the length; None where it does not.

    Example:
        >>> half_length({32: 1.0, 128: 0.75, 512: 0.25}), half_length({32: 1.0, 512: 0.8})
        (256.0, None)
    """
    lengths = sorted(scores)
    for a, b in pairwise(lengths):
        if scores[a] >= _LEAST > scores[b]:
            share = (scores[a] - _LEAST) / (scores[a] - scores[b])
            return 2 ** (math.log2(a) + share * math.log2(b / a))
    return None


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """kappa by the rows that are not for the check, and how far predictions are off there and on those for the check.

    `random_walk` is the factor with c in the place of its root, `guess` that of one length for all.

    Example:
        >>> found = fit([{"closure": 1e-3, "half": 50.0, "check": False}, {"closure": 1e-5, "half": 500.0, "check": False}])
        >>> round(found["kappa"], 3), round(found["fitted"]["factor"], 3), round(found["fitted"]["guess"], 2)
        (1.581, 1.0, 3.16)
    """
    known = [row for row in rows if row["half"] is not None]
    parts = {
        name: [row for row in known if row["check"] == check] for name, check in (("fitted", False), ("checked", True))
    }
    if not parts["fitted"]:
        return {"kappa": None, "fitted": None, "checked": None}
    kappa, walk, length = (_middle(parts["fitted"], power) for power in (0.5, 1.0, 0.0))

    def errors(part: list[dict[str, Any]]) -> dict[str, Any]:
        logs = [math.log2(kappa / row["closure"] ** 0.5 / row["half"]) for row in part]
        return {
            "of": len(part),
            "within_2": sum(abs(v) < 1 + 1e-9 for v in logs),
            "factor": _factor(logs),
            "random_walk": _factor([math.log2(walk / row["closure"] / row["half"]) for row in part]),
            "guess": _factor([math.log2(length / row["half"]) for row in part]),
        }

    return {"kappa": kappa} | {name: errors(part) if part else None for name, part in parts.items()}


def _middle(rows: Sequence[dict[str, Any]], power: float) -> float:
    """The geometric mean of T_half c^power."""
    return 2 ** (sum(math.log2(row["half"] * row["closure"] ** power) for row in rows) / len(rows))


def _factor(logs: Sequence[float]) -> float:
    return 2 ** math.sqrt(sum(v**2 for v in logs) / len(logs))


# The command ---------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Predict, compare, write JSON and figure."""
    out = make_folder(args.out)
    result = inspect(args.runs, args.check, args.length)
    path = write_json(out / "horizon.json", result)
    horizon_figure(result).savefig(out / "horizon.png", dpi=160, metadata={"Software": None})
    if args.json:
        print(path.read_text(), end="")
        return 0
    kappa, parts = result["fit"]["kappa"], result["fit"]
    rows = [
        [
            row["run"],
            str(row["seed"]),
            f"{row['closure']:.2g}",
            _words(_predicted(kappa, row)),
            _words(row["half"], row["tested"]),
        ]
        for row in result["rows"]
    ]
    print_table(
        "length at which the accuracy falls to a half", ["run", "seed", "closure error", "predicted", "measured"], rows
    )
    for name, part in ((name, parts[name]) for name in ("fitted", "checked") if parts[name]):
        print(
            f"{name}: T_half = {kappa:.3g} / sqrt(c) is off by a factor {part['factor']:.2f}, rms of {part['of']} seeds"
        )
    print(path)
    return 0


def _predicted(kappa: float | None, row: dict[str, Any]) -> float | None:
    return None if kappa is None else kappa / row["closure"] ** 0.5


def _words(value: float | None, beyond: int | None = None) -> str:
    return f"{value:.0f}" if value is not None else "" if beyond is None else f"> {beyond}"


def inspect(paths: Sequence[str | Path], check: Sequence[str | Path] = (), longest: int = 4096) -> dict[str, Any]:
    """Closure error, prediction and measurement of every seed that has at least a half at length 32."""
    rows = []
    for path in map(Path, (*paths, *check)):
        for seed in read_weights(path, "ckda track", ("group", "mixer"))["seeds"]:
            about, task, model = load_replica(path, seed)
            scores = measured(model, task, longest)
            if scores[32] >= _LEAST:
                run = title(about["group"], about["mixer"], RECIPES.shortest(about["recipe"]))
                found: dict[str, Any] = {
                    "closure": closure_error(model, task),
                    "half": half_length(scores),
                    "tested": max(scores),
                }
                found |= {"scores": scores, "check": path in map(Path, check)}
                rows.append({"run": run, "group": about["group"], "seed": seed} | found)
    if not rows:
        raise ValueError(
            "no seed of these runs has half of the answers right at length 32; there is nothing to predict"
        )
    return {"what": "ckda inspect horizon", "rows": rows, "fit": fit(rows), "environment": environment()}


def measured(model: Tracker, task: WordProblem, longest: int, size: int = 64) -> dict[int, float]:
    """Scaled accuracy at 32, 64, 128, ... up to `longest`, or until it is below a half; over the last quarter of each length."""
    generator = torch.Generator().manual_seed(1_000_000)
    x, y = task.batch(size, longest, generator)
    scores: dict[int, float] = {}
    right, cache, done, length = [], None, 0, 32
    with torch.no_grad():
        while length <= longest and (not scores or scores[length // 2] >= _LEAST):
            while done < length + 1:
                last = min(done + 512, length + 1)
                logits, cache = model.prefill(x[:, done:last], cache) if done else model.prefill(x[:, :last])
                said = logits.argmax(-1) if done else logits[:, 1:].argmax(-1)
                right.append((said == y[:, max(0, done - 1) : last - 1]).double().mean(0))
                done = last
            scores |= scaled_accuracy(torch.cat(right), (length,), task.order)
            length *= 2
    return scores


_FARTHEST = 1e6  # where the figure puts predictions beyond it
_MARKS = "osD^vP*Xph<>8dH1234"
_COLOURS = {"S3": "#d08a2e", "S4": "#16548c", "A5": "#2f7f4f"}


def horizon_figure(result: dict[str, Any], later: Sequence[dict[str, Any]] = ()) -> Any:
    """Measured against predicted half length, one point a seed; arrows where the longest test was still right.

    Rows of `later` are a second check, with the kappa of `result`.
    """
    rows, found = [*result["rows"], *later], result["fit"]
    figure = empty_figure(figsize=(6.0, 4.0 + 0.17 * len({row["run"] for row in rows})))
    axes = figure.subplots()
    kappa = found["kappa"] or 1.0
    marks: dict[str, str] = {}
    ends = []
    for row in rows:
        first = row["run"] not in marks
        mark = marks.setdefault(row["run"], _MARKS[len(marks) % len(_MARKS)])
        colour, known = _COLOURS.get(row["group"], "#5c6b7a"), row["half"] is not None
        x, y = min(kappa / row["closure"] ** 0.5, _FARTHEST), row["half"] if known else row["tested"]
        check = " (second check)" if row in later else " (check)" if row["check"] else ""
        label = row["run"] + check if first else None
        axes.plot(
            [x], [y], mark, color=colour, fillstyle="full" if known else "none", markersize=6, linestyle="", label=label
        )
        if not known:
            arrow = {"arrowstyle": "->", "color": colour, "shrinkA": 3, "shrinkB": 0}
            axes.annotate("", (x, y * 2.5), (x, y), arrowprops=arrow)
        ends += [x, y]
    line = [min(ends) / 2, max(ends) * 2]
    axes.plot(line, line, color="#5c6b7a", linewidth=1)
    if found["fitted"] is not None:
        factor = found["fitted"]["factor"]
        axes.fill_between(line, [v / factor for v in line], [v * factor for v in line], color="#c5ced8", alpha=0.4)
        axes.set_title(
            f"T½ = {kappa:.3g} / √c, off by a factor {factor:.2f} (rms of {found['fitted']['of']} seeds)", fontsize=10
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="predicted from words of up to 32 letters",
        ylabel="measured: accuracy falls to a half",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure
