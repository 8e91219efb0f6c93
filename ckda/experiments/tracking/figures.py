"""Figures of state tracking, each a pure function of the result's JSON."""

import html
import itertools
import math
from typing import Any

__all__ = [
    "ARM_LABELS",
    "PUBLISHED",
    "best_seed",
    "cups_strip",
    "extrapolation_figure",
    "groups_figure",
    "markdown",
    "mechanism_figure",
    "quaternions_figure",
    "table",
]

#: the paper's scaled accuracies at length 32, 128 and 512, best of three seeds (fig:group_word_problems)
PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {
    "S3": {
        "kda": (0.014, 0.003, 0.001),
        "kda-beta2": (1.0, 0.288, 0.154),
        "kda-signed": (1.0, 0.754, 0.211),
        "ckda": (1.0, 0.9995, 0.772),
    },
    "S4": {
        "kda": (0.007, 0.0, 0.001),
        "kda-beta2": (0.068, 0.037, 0.0),
        "kda-signed": (0.181, 0.013, 0.0),
        "ckda": (1.0, 0.985, 0.297),
    },
    "A5": {"ckda+theory": (1.0, 1.0, 1.0)},
}
PUBLISHED_LENGTHS = (32, 128, 512)
_SHORTER = ("paper", "10k", "3k", "fast", "small")  # the protocol and what differs from it in updates or words alone

#: arm -> (label, colour); the ranges of the gate and of beta, as in fig:group_word_problems
ARM_LABELS = {
    "kda": ("KDA   α∈[0,1], β∈[0,1]", "#9aa5b1"),
    "kda-beta2": ("α∈[0,1], β∈[0,2]", "#d08a2e"),
    "kda-signed": ("α∈[-1,1], β∈[0,1]", "#7a4fa3"),
    "ckda": ("Complex KDA   α∈[-1,1], β∈[0,2]", "#16548c"),
}
_CUPS = ("#c8553d", "#2f7f4f", "#2c5f9e", "#b58900", "#6c3fa0")


def _figure(*args: Any, **options: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(*args, layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def extrapolation_figure(result: dict[str, Any]) -> Any:
    """Scaled accuracy against length, one line an arm (fig:group_word_problems)."""
    figure = _figure(figsize=(7.6, 3.8))
    axes = figure.subplots()
    for arm, (label, colour) in ARM_LABELS.items():
        scores = result["arms"][arm]["scores"]
        lengths = sorted(map(int, scores))
        values = [scores[str(length)] for length in lengths]
        width = 2.6 if arm == "ckda" else 1.6
        axes.plot(lengths, values, marker="o", markersize=4, linewidth=width, color=colour, label=label)
    longest = result["recipe"]["curriculum"][-1]
    axes.axvline(longest, color="#5c6b7a", linewidth=1, linestyle="--")
    axes.text(longest * 1.06, 1.07, "trained up to here", color="#5c6b7a", fontsize=8.5, va="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(-0.06, 1.14)
    axes.set_xlabel("word length")
    axes.set_ylabel("scaled accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def published(run: dict[str, Any]) -> tuple[float, float, float] | None:
    """What the paper has for a run of ``ckda track``, if it does."""
    name = run["mixer"] + ("" if run["recipe_name"] in _SHORTER else f"+{run['recipe_name']}")
    return PUBLISHED.get(run["group"], {}).get(name)


def best_seed(scores: dict[str, list[float]]) -> int:
    """Which seed is best at the longest length up to 512 (ties: at the next shorter ones, then at longer ones).

    Example:
        >>> best_seed({"32": [1.0, 1.0], "512": [0.4, 0.7], "4096": [0.2, 0.1]})
        1
        >>> best_seed({"512": [1.0, 1.0], "4096": [0.2, 0.9]})
        1
    """
    lengths = sorted(map(int, scores), key=lambda n: (n > 512, n if n > 512 else -n))
    num = len(next(iter(scores.values())))
    return max(range(num), key=lambda r: [scores[str(n)][r] for n in lengths])


def _columns(result: dict[str, Any]) -> list[int]:
    lengths = {int(n) for run in result["runs"].values() for n in run["scores"]}
    wanted = [n for n in sorted(lengths) if n in (32, 128, 512, 4096, 65_536)]
    return wanted or sorted(lengths)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the best seed's scores beside the published ones, and the other seeds at the longest length."""
    lengths = _columns(result)
    head = ["run", *map(str, lengths), "all seeds", "published"]
    rows = []
    for run in result["runs"].values():
        name = f"{run['group']} {run['mixer']}" + ("" if run["recipe_name"] == "paper" else f" {run['recipe_name']}")
        known = published(run)
        middle = [n for n in lengths if str(n) in run["scores"] and n <= 512]
        spread = " ".join(f"{v:.2f}" for v in run["scores"][str(middle[-1])]) if middle else ""
        values = [f"{run['scores'][str(n)][run['best']]:.3f}" if str(n) in run["scores"] else "-" for n in lengths]
        rows.append([name, *values, spread, " ".join(f"{v:g}" for v in known) if known else ""])
    return head, rows


def markdown(result: dict[str, Any]) -> str:
    """:func:`table` for a document; the last two columns say which lengths they mean."""
    head, rows = table(result)
    middle = max((n for n in _columns(result) if n <= 512), default=0)
    head[-2], head[-1] = f"all seeds at {middle}", "published, 32 / 128 / 512"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def groups_figure(result: dict[str, Any]) -> Any:
    """One panel a group, one colour a run, seeds thin and the best one thick, published points (fig:group_word_problems)."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"].values():
        by_group.setdefault(run["group"], []).append(run)
    figure = _figure(figsize=(4.6 * len(by_group) + 0.8, 4.6))
    panels = figure.subplots(1, len(by_group), squeeze=False, sharey=True)[0]
    for axes, (group, runs) in zip(panels, by_group.items(), strict=True):
        for run, line in zip(runs, _lines(runs), strict=True):
            _draw_run(axes, run, line)
        axes.axvline(runs[0]["recipe"]["curriculum"][-1], color="#5c6b7a", linewidth=1, linestyle="--")
        axes.set(title=group, xlabel="word length", ylim=(-0.06, 1.06))
        axes.set_xscale("log", base=2)
        shown = sorted({int(n) for run in runs for n in run["scores"]})
        shown = [n for n in shown if n in (8, 32, 128, 512, 4096, 65_536)] or shown
        axes.set_xticks(shown, [f"{n:,}" for n in shown])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    panels[0].set_ylabel("scaled accuracy")
    return figure


_MORE = ("#2f7f4f", "#c8553d", "#b58900", "#2c8c99", "#8c564b", "#e377c2", "#000000", "#bcbd22", "#6baed6", "#fb9a99")


def _lines(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Colour and line style of each run: the four ranges in their own colours, the others by turns, dashed the second time."""
    turns = ({"color": colour, "linestyle": style} for style in itertools.cycle(("-", "--", ":")) for colour in _MORE)
    own = [run["mixer"] in ARM_LABELS and run["recipe_name"] in (*_SHORTER, "quick") for run in runs]
    return [{"color": ARM_LABELS[run["mixer"]][1]} if its else next(turns) for run, its in zip(runs, own, strict=True)]


def _draw_run(axes: Any, run: dict[str, Any], line: dict[str, str]) -> None:
    lengths = sorted(map(int, run["scores"]))
    label = run["label"] + ("" if run["recipe_name"] == "paper" else f", {run['recipe_name']}")
    for r in range(len(run["seeds"])):
        values = [run["scores"][str(n)][r] for n in lengths]
        best = r == run["best"]
        style = {"linewidth": 2.4, "label": label, "marker": "o", "markersize": 3.5} if best else {"linewidth": 0.8}
        axes.plot(lengths, values, alpha=1.0 if best else 0.45, **line, **style)
    known = published(run)
    if known is not None:
        axes.plot(PUBLISHED_LENGTHS, known, "D", color=line["color"], fillstyle="none", markersize=7)


def mechanism_figure(mechanism: dict[str, Any]) -> Any:
    """Beta by head; gates, keys in principal coordinates and eigenvalues of the head that works (fig:s3_interpretability)."""
    figure = _figure(figsize=(13.4, 3.6))
    left, middle, plane, right = figure.subplots(1, 4, width_ratios=(1.15, 1.25, 1.0, 1.0))
    names, head = mechanism["symbols"], mechanism["head"]
    beta = mechanism["beta"]  # [symbols][heads]
    for h in range(len(beta[0])):
        values = [row[h] for row in beta]
        colour = "#16548c" if h == head else "#9aa5b1"
        left.plot([h] * len(values), values, "o", color=colour, markersize=4, alpha=0.85)
    left.axhline(2, color="#5c6b7a", linewidth=0.8, linestyle="--")
    left.axhline(1, color="#5c6b7a", linewidth=0.8, linestyle=":")
    left.set_xticks(range(0, len(beta[0]), 1 + len(beta[0]) // 16))
    left.set(xlabel="head", ylabel="β", ylim=(-0.05, 2.15), title=f"β by head (head {head} works)")
    image = middle.imshow(mechanism["alpha"], cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    every = 1 + len(names) // 25
    middle.set_yticks(range(0, len(names), every), names[::every], fontsize=10 if len(names) <= 12 else 6)
    middle.set(xlabel="channel", title=f"gates α of head {head}")
    figure.colorbar(image, ax=middle, shrink=0.8)
    _draw_keys(plane, mechanism)
    circle = [2 * math.pi * i / 200 for i in range(201)]
    right.plot([math.cos(t) for t in circle], [math.sin(t) for t in circle], color="#c5ced8", linewidth=1)
    seen: set[int] = set()
    for order, values in zip(mechanism["orders"], mechanism["eigenvalues"], strict=True):
        label = f"order {order}" if order not in seen else None
        seen.add(order)
        real, imaginary = [v[0] for v in values], [v[1] for v in values]
        colour, mark = _MARKS.get(order, ("#2f7f4f", "D"))
        right.plot(real, imaginary, mark, fillstyle="none", color=colour, label=label, alpha=0.75, markersize=5)
    right.set(title=f"eigenvalues of head {head}", aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
    right.legend(
        frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, handletextpad=0.1
    )
    for axes in (left, plane, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


#: colour and mark of an element by its order
_MARKS = {1: ("#5c6b7a", "s"), 2: ("#d08a2e", "o"), 3: ("#16548c", "^"), 4: ("#2f7f4f", "D"), 5: ("#c8553d", "p")}


def _draw_keys(axes: Any, mechanism: dict[str, Any]) -> None:
    names = mechanism["symbols"] if len(mechanism["symbols"]) <= 8 else [""] * len(mechanism["symbols"])
    for (x, y), order, name in zip(mechanism["keys"], mechanism["orders"], names, strict=True):
        colour, mark = _MARKS.get(order, ("#2f7f4f", "D"))
        axes.plot([x], [y], mark, color=colour, markersize=5)
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7.5)
    share = sum(mechanism["explained"])
    axes.set(title=f"keys, first 2 PCs (3 hold {share:.0%})", xlabel="PC 1", ylabel="PC 2")
    axes.margins(0.2)


def quaternions_figure(result: dict[str, Any]) -> Any:
    """The keys of the most exact quaternion head on the exact ones, in the plane of greatest symmetry, and their inner products.

    Lines join exact ones that are nearest to each other: the edges of the 600-cell for A5.
    """
    figure = _figure(figsize=(10.0, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    picture, orders, first = result["picture"], result["mechanism"]["orders"], result["quaternions"][0]
    _draw_edges(left, picture)
    named: set[int] = set()
    triples = zip(picture["exact"], picture["keys"], orders, strict=True)
    for (x, y), (u, v), order in sorted(triples, key=lambda triple: triple[2]):
        label = f"order {order}" if order not in named else None
        named.add(order)
        left.plot([x, -x], [y, -y], "o", color="#5c6b7a", markerfacecolor="white", markersize=8, markeredgewidth=0.8)
        left.plot([u, -u], [v, -v], "o", color=_MARKS.get(order, ("#2f7f4f", ""))[0], markersize=4.2, label=label)
    left.set(
        title=f"{result['group']}: the {len(orders)} keys of head {first['head']} and their negatives", aspect="equal"
    )
    left.set_axis_off()
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=5, handletextpad=0.1)
    exact, learned = ([abs(v) for v in picture[f"{side}_products"]] for side in ("exact", "keys"))
    right.plot(exact, learned, "o", color="#16548c", markersize=5, alpha=0.35)
    right.plot([0, 1], [0, 1], color="#c5ced8", linewidth=1, zorder=0)
    right.set(
        title=f"|inner products| of two keys (± {first['worst']:.1g})",
        xlabel="exact unit quaternions",
        ylabel="learned",
    )
    right.set_box_aspect(1)
    right.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_edges(axes: Any, picture: dict[str, Any]) -> None:
    pairs = itertools.combinations(picture["exact"], 2)
    nearest = max(map(abs, picture["exact_products"]))
    for (a, b), product in zip(pairs, picture["exact_products"], strict=True):
        if abs(product) > nearest - 1e-3:
            for side in (1, -1):  # the edge and its opposite
                other = math.copysign(1, product) * side
                x, y = ([side * a[axis], other * b[axis]] for axis in (0, 1))
                axes.plot(x, y, color="#c5ced8", linewidth=0.5, zorder=0)


def cups_strip(strip: dict[str, Any]) -> str:
    """A word as moves of cups: the move, the true cups and each model's cups, as SVG; a wrong state is struck through.

    Args:
        strip: {"moves": names, "first": index of the first shown step, "rows": [{"label", "states", "right"}]}, a state
            being a permutation: cup i stands at place state[i].
    """
    cell, gap, left, top = 46, 20, 150, 34
    moves, rows = strip["moves"], strip["rows"]
    cups = len(rows[0]["states"][0])
    row_height = cups * 15 + gap
    width, height = left + cell * len(moves) + 10, top + row_height * len(rows) + 6
    out = [
        f"<svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' font-family='sans-serif' font-size='11'>"
    ]
    out.append(f"<rect width='{width}' height='{height}' fill='#fbfcfd'/>")
    out.append(f"<text x='4' y='20' fill='#5c6b7a'>step {strip['first']} onwards</text>")
    for t, move in enumerate(moves):
        out.append(
            f"<text x='{left + cell * t + cell / 2}' y='20' text-anchor='middle' fill='#1d2733'>{html.escape(move)}</text>"
        )
    for r, row in enumerate(rows):
        y0 = top + r * row_height
        out.append(f"<text x='4' y='{y0 + cups * 7.5 + 4}' fill='#1d2733'>{html.escape(row['label'])}</text>")
        for t, (state, right) in enumerate(zip(row["states"], row["right"], strict=True)):
            x = left + cell * t + cell / 2
            for cup, place in enumerate(state):
                faded = "" if right else " fill-opacity='0.35'"
                out.append(
                    f"<circle cx='{x}' cy='{y0 + 8 + 15 * place}' r='6' fill='{_CUPS[cup % len(_CUPS)]}'{faded}/>"
                )
            if not right:
                out.append(
                    f"<line x1='{x - 11}' y1='{y0 + cups * 15}' x2='{x + 11}' y2='{y0 + 1}' stroke='#1d2733' stroke-width='1.6'/>"
                )
    return "".join(out) + "</svg>"
