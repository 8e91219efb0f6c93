"""``ckda inspect horizon``: from short words alone, the length at which a trained tracker goes wrong.

A relator, here letters x and y in turn as often as the product xy has order, changes nothing in the group. It also changes nothing
where letters act by quaternions, S -> q S q. A trained model changes a little when one is inserted into a word: the margin m by
which an answer wins over another one moves to m + d. Its closure error a letter is

    c = median of (d / m)^2 / |relator|        over words u, w of 8 letters, relators r between them, and wrong answers.

Nothing corrects the errors of later letters, and those of random letters add up like a random walk: after T letters (d / m)^2 is
about c T. So the accuracy falls to a half at

    T_half = kappa / c,

with one number kappa for all groups and recipes: what is still right at c T = kappa, the median pair of answers being far from
confused when the nearest ones are. It is fitted here, to the geometric mean, and the error is said: the root mean square of
log2(predicted / measured), a factor.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.experiments.common.show import empty_figure, print_table
from ckda.experiments.tracking.model import Tracker
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.run import load_replica, title
from ckda.experiments.tracking.task import WordProblem, scaled_accuracy
from ckda.record import environment, write_json
from ckda.train.weights import read_weights

__all__ = ["closure_error", "fit", "half_length", "horizon_figure", "inspect", "measured"]

_OUTER = 8  # letters before and after a relator: with it at most 32, which training has seen
_LEAST = 0.5  # the scaled accuracy that a seed must have at length 32 to have a horizon


@torch.no_grad()
def closure_error(model: Tracker, task: WordProblem, num: int = 384, seed: int = 5) -> float:
    """c of the module's formula, from `num` words and relators drawn from this seed; in float64."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    letters = torch.tensor(task.letters)

    def draw(*shape: int) -> Tensor:
        return letters[torch.randint(len(letters), shape, generator=generator)]

    pairs = draw(num, 2)
    elements = task.elements(pairs)
    orders = torch.tensor(task.group.orders)[task.table[elements[:, 1], elements[:, 0]]]
    parts = []
    for order in sorted(set(orders.tolist())):
        relator = pairs[orders == order].repeat(1, order)
        u, w = draw(len(relator), _OUTER), draw(len(relator), _OUTER)
        plain = torch.cat([u, w], 1)
        product = task.products(task.elements(plain))[:, -1:]
        m, moved = (_margins(model, task, word, product) for word in (plain, torch.cat([u, relator, w], 1)))
        wrong = torch.ones_like(m, dtype=torch.bool).scatter(1, product, False)
        parts.append(((moved - m) / m).square()[wrong] / relator.shape[1])
    return float(torch.cat(parts).median())


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
    for a, b in zip(lengths, lengths[1:], strict=False):
        if scores[a] >= _LEAST > scores[b]:
            share = (scores[a] - _LEAST) / (scores[a] - scores[b])
            return 2 ** (math.log2(a) + share * math.log2(b / a))
    return None


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """kappa by the rows that have a measured half length, and how far predictions are off.

    Example:
        >>> found = fit([{"closure": 1e-3, "half": 50.0}, {"closure": 1e-4, "half": 500.0}])
        >>> round(found["kappa"], 3), round(found["factor"], 3), found["of"]
        (0.05, 1.0, 2)
    """
    known = [row for row in rows if row["half"] is not None]
    if not known:
        return {"kappa": None, "factor": None, "within_2": 0, "of": 0, "exponent": None}
    logs = [math.log2(row["half"] * row["closure"]) for row in known]
    mean = sum(logs) / len(logs)
    return {
        "kappa": 2**mean,
        "factor": 2 ** math.sqrt(sum((v - mean) ** 2 for v in logs) / len(logs)),
        "within_2": sum(abs(v - mean) < 1 + 1e-9 for v in logs),
        "of": len(logs),
        "exponent": _slope([math.log2(row["closure"]) for row in known], [math.log2(row["half"]) for row in known]),
    }


def _slope(x: list[float], y: list[float]) -> float | None:
    """Of the least-squares line, which the formula takes to be -1."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mx) ** 2 for a in x)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread > 1e-9 else None


# The command ---------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckda inspect horizon``."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="files runs/NAME.pt that `ckda track` wrote")
    parser.add_argument("--length", type=int, default=4096, help="how far it is measured (default: %(default)s)")
    parser.add_argument("--out", default="runs/horizon", help="folder for JSON and figure (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="only the result as JSON on standard output")


def run_command(args: argparse.Namespace) -> int:
    """Predict, compare, write JSON and figure."""
    try:
        result = inspect(args.runs, args.length)
    except (ValueError, OSError) as error:
        raise SystemExit(f"ckda inspect horizon: {error}") from error
    out = Path(args.out)
    path = write_json(out / "horizon.json", result)
    horizon_figure(result).savefig(out / "horizon.png", dpi=160, metadata={"Software": None})
    if args.json:
        print(path.read_text(), end="")
        return 0
    kappa = result["fit"]["kappa"]
    rows = [
        [row["run"], str(row["seed"]), f"{row['closure']:.2g}", _words(kappa and kappa / row["closure"]), _words(row["half"], row["tested"])]
        for row in result["rows"]
    ]
    print_table("length at which the accuracy falls to a half", ["run", "seed", "closure error a letter", "predicted", "measured"], rows)
    found = result["fit"]
    if kappa is not None:
        print(f"T_half = {kappa:.3g} / c, off by a factor {found['factor']:.2f} (rms of {found['of']}); {path}")
    return 0


def _words(value: float | None, beyond: int | None = None) -> str:
    return f"{value:.0f}" if value is not None else "" if beyond is None else f"> {beyond}"


def inspect(paths: Sequence[str | Path], longest: int = 4096) -> dict[str, Any]:
    """Closure error, prediction and measurement of every seed that has at least a half at length 32."""
    rows = []
    for path in map(Path, paths):
        for seed in read_weights(path, "ckda track", ("group", "mixer"))["seeds"]:
            about, task, model = load_replica(path, seed)
            scores = measured(model, task, longest)
            if scores[32] >= _LEAST:
                run = title(about["group"], about["mixer"], RECIPES.shortest(about["recipe"]))
                found = {"closure": closure_error(model, task), "half": half_length(scores), "tested": max(scores)}
                rows.append({"run": run, "group": about["group"], "seed": seed} | found | {"scores": scores})
    if not rows:
        raise ValueError("no seed of these runs has half of the answers right at length 32; there is nothing to predict")
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


_COLOURS = {"S3": "#d08a2e", "S4": "#16548c", "A5": "#2f7f4f"}


def horizon_figure(result: dict[str, Any]) -> Any:
    """Measured against predicted half length, one point a seed; arrows where the longest test was still right."""
    figure = empty_figure(figsize=(6.0, 5.2))
    axes = figure.subplots()
    rows, found = result["rows"], result["fit"]
    kappa = found["kappa"] or 1.0
    marks: dict[str, str] = {}
    for row in rows:
        mark = marks.setdefault(row["run"], "osD^vP*Xph<>"[len(marks) % 12])
        colour = _COLOURS.get(row["group"], "#5c6b7a")
        known = row["half"] is not None
        x, y = kappa / row["closure"], row["half"] if known else row["tested"]
        first = row is next(r for r in rows if r["run"] == row["run"])
        axes.plot([x], [y], mark, color=colour, fillstyle="full" if known else "none", markersize=6, label=row["run"] if first else None)
        if not known:
            axes.annotate("", (x, y * 1.6), (x, y), arrowprops={"arrowstyle": "->", "color": colour})
    ends = [kappa / row["closure"] for row in rows] + [row["half"] or row["tested"] for row in rows]
    line = [min(ends) / 2, max(ends) * 2]
    axes.plot(line, line, color="#5c6b7a", linewidth=1)
    if found["factor"] is not None:
        axes.fill_between(line, [v / found["factor"] for v in line], [v * found["factor"] for v in line], color="#c5ced8", alpha=0.4)
        axes.set_title(f"T½ = {kappa:.2g} / c, off by a factor {found['factor']:.2f} (rms of {found['of']} seeds)", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="predicted from words of up to 32 letters", ylabel="measured: accuracy falls to a half")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure
