"""Figures of state tracking, each a pure function of results."""

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import torch

from ckda.experiments.common.show import ARMS
from ckda.experiments.tracking.recipes import SHORTER
from ckda.experiments.tracking.run import TrackResult, TrackRun
from ckda.layers.complex_kda import RANGES, ComplexKDA
from ckda.layers.mixers import MIXERS
from ckda.page import empty_figure

__all__ = [
    "PUBLISHED",
    "best_of_three",
    "cups_strip",
    "extrapolation_figure",
    "groups_figure",
    "initialization_figure",
    "mechanism_figure",
    "published",
    "quaternions_figure",
    "words_figure",
]

#: scaled accuracies at length 32, 128 and 512, the maximum of three seeds at each (fig:group_word_problems); from the authors'
#: repository OpenEuroLLM/ComplexKDA, group_word_problems/reference_state_tracking_metrics.json at 03af970
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
    "A5": {
        "kda": (0.000203, 0.000102, 0.000102),
        "kda-beta2": (0.001119, 0.0, 0.000305),
        "kda-signed": (0.000203, 0.0, 0.000102),
        "ckda": (0.001119, 0.0, 0.000102),
        "ckda+theory": (1.0, 1.0, 1.0),
        "ckda+theory+init=quaternions-begin": (1.0, 1.0, 1.0),  # the same numbers: this start is the authors' own
    },
}
PUBLISHED_LENGTHS = (32, 128, 512)

_CUPS = ("#c8553d", "#2f7f4f", "#2c5f9e", "#b58900", "#6c3fa0")


def extrapolation_figure(scores: Mapping[str, Mapping[int, float]], trained_to: int) -> Any:
    """Scaled accuracy against length, one line an arm (fig:group_word_problems)."""
    figure = empty_figure(figsize=(7.6, 3.8))
    axes = figure.subplots()
    for arm, by_length in scores.items():
        lengths = sorted(by_length)
        values = [by_length[length] for length in lengths]
        width = 2.6 if arm == "ckda" else 1.6
        style = {"linewidth": width, "color": ARMS[arm].colour, "label": ARMS[arm].label}
        axes.plot(lengths, values, marker="o", markersize=4, **style)
    axes.axvline(trained_to, color="#5c6b7a", linewidth=1, linestyle="--")
    axes.text(trained_to * 1.06, 1.07, "trained up to here", color="#5c6b7a", fontsize=8.5, va="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(-0.06, 1.14)
    axes.set_xlabel("word length")
    axes.set_ylabel("scaled accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def initialization_figure(layers: int = 32, tokens: int = 256) -> Any:
    """The gates and learning rates with which Complex KDA starts, standard and spread (fig:initialization).

    Drawn from `layers` layers of the paper's tracker, each on `tokens` inputs with independent normal coordinates.
    """
    figure = empty_figure(figsize=(7.6, 2.8))
    for column, (axes, values) in enumerate(zip(figure.subplots(1, 2), _starts(layers, tokens), strict=True)):
        low, symbol, what = ((-1, "α", "gate"), (0, "β", "learning rate"))[column]
        for (start, numbers), colour in zip(values.items(), ("#9aa5b1", "#16548c"), strict=True):
            axes.hist(numbers, bins=80, range=(low, low + 2), density=True, alpha=0.6, color=colour, label=start)
        axes.set(xlabel=f"{what} {symbol}", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center")
    return figure


@torch.no_grad()
def _starts(layers: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gates and learning rates as numpy arrays, by the start's name."""
    gates: dict[str, Any] = {}
    rates: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for start in ("standard", "spread"):
            options: dict[str, Any] = {"gate_init": start, "beta_init": start, "conv_size": 0, "activate": ()}
            made = [ComplexKDA(48, 12, 16, **options).transitions(torch.randn(1, tokens, 48)) for _ in range(layers)]
            gates[start] = torch.cat([one.alpha.flatten() for one in made]).numpy()
            rates[start] = torch.cat([one.beta.flatten() for one in made]).numpy()
    return gates, rates


def published(run: TrackRun) -> tuple[float, float, float] | None:
    """What the paper has for a run of ``ckda track``, if it does: where it is the protocol, or shorter, or its theory start."""
    if run.is_smoke:
        return None
    named = [word for word in run.recipe_now.split("+") if word.partition("=")[0] not in SHORTER]
    return PUBLISHED.get(run.group, {}).get("+".join([run.mixer, *named]))


_MORE = ("#2f7f4f", "#c8553d", "#b58900", "#2c8c99", "#8c564b", "#e377c2", "#000000", "#bcbd22", "#6baed6", "#fb9a99")


def _more_lines() -> Iterator[dict[str, str]]:
    """Colours and line styles by turns, for runs without a colour of their own: dashed the second time, dotted the third."""
    return ({"color": colour, "linestyle": style} for style in itertools.cycle(("-", "--", ":")) for colour in _MORE)


def best_of_three(run: TrackRun, length: int) -> float:
    """The maximum of the first three seeds, which the paper reports at each length."""
    return max(run.scores[length][:3])


def words_figure(runs: Sequence[TrackRun]) -> Any:
    """The paper's figure of the word problems, one panel a group, one colour an arm (fig:group_word_problems).

    Both ways of taking the best of seeds 0 to 2: dots are the maximum at each length, as in the paper, the line is the one seed
    that is best at 512. All other seeds are thin, diamonds are the published scores.
    """
    groups = list(dict.fromkeys(run.group for run in runs))
    figure = empty_figure(figsize=(4.2 * len(groups) + 0.4, 4.9))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, group in zip(panels, groups, strict=True):
        chosen = [run for run in runs if run.group == group]
        for run in chosen:
            _draw_arm(axes, run)
        _finish_panel(axes, group, chosen, PUBLISHED_LENGTHS[-1])
    panels[0].set_ylabel("scaled accuracy")
    figure.supxlabel("\n".join(_CAPTION), fontsize=8.5)
    return figure


_CAPTION = (
    "dots: the best of seeds 0, 1, 2 at each length, as the paper takes it; line: the one of these seeds that is best at 512",
    "thin: every other seed of the record; diamonds: published",
)


def _draw_arm(axes: Any, run: TrackRun) -> None:
    """One arm of :func:`words_figure`, at lengths up to 512."""
    lengths = [n for n in sorted(run.scores) if n <= PUBLISHED_LENGTHS[-1]]
    colour, label = _arm(run)
    style = {"color": colour, "linestyle": "--" if "constant" in label else "-"}
    best = max(range(3), key=lambda r: [run.scores[n][r] for n in reversed(lengths)])
    for r in range(len(run.seeds)):
        width = {"linewidth": 2.2, "label": label} if r == best else {"linewidth": 0.7, "alpha": 0.4}
        axes.plot(lengths, [run.scores[n][r] for n in lengths], **style, **width)
    axes.plot(lengths, [best_of_three(run, n) for n in lengths], "o", color=colour, markersize=4.5)
    known = published(run)
    if known is not None:
        axes.plot(PUBLISHED_LENGTHS, known, "D", color=colour, fillstyle="none", markersize=8)


def _arm(run: TrackRun) -> tuple[str, str]:
    """Colour and label: what is not the paper's protocol is said."""
    words = run.recipe_now.split("+")
    more = {"momentum=0.95": "constant momentum", "theory": "from the theory", "init=quaternions-begin": "begin key"}
    said = [_label(run), *(more.get(word, word) for word in words if word != "paper"), f"{len(run.seeds)} seeds"]
    return _STARTS.get(words[-1], ARMS[run.mixer].colour), ", ".join(said)


_STARTS = {"theory": "#8c564b", "init=quaternions-begin": "#2f7f4f"}


def _label(run: TrackRun) -> str:
    """What the mixer is called today; records keep what it was called then."""
    return MIXERS[run.mixer].label if run.mixer in MIXERS else run.label


def groups_figure(result: TrackResult) -> Any:
    """One panel a group, one line a mixer and recipe, seeds thin and the best one thick.

    Diamonds are the published scores. Runs of one mixer and recipe are seeds of one line.
    """
    by_group = {
        group: _lines([run for run in result.runs.values() if run.group == group])
        for group in dict.fromkeys(run.group for run in result.runs.values())
    }
    labels = [label for lines in by_group.values() for label in lines]
    width = 6.4 if any(len(label) > _WIDE for label in labels) else 4.6
    rows = max(sum(1 + len(label) // _WRAPPED for label in lines) for lines in by_group.values())
    figure = empty_figure(figsize=(width * len(by_group) + 0.8, 4.2 + 0.17 * rows))
    panels = figure.subplots(1, len(by_group), squeeze=False, sharey=True)[0]
    for axes, (group, lines) in zip(panels, by_group.items(), strict=True):
        for (label, runs), style in zip(lines.items(), _styles(lines), strict=True):
            _draw_line(axes, label, runs, style)
        shown = [run for runs in lines.values() for run in runs]
        _finish_panel(axes, f"{group}, {shown[0].recipe_now}" if _one_recipe(shown) else group, shown)
    panels[0].set_ylabel("scaled accuracy")
    return figure


def _lines(runs: Sequence[TrackRun]) -> dict[str, list[TrackRun]]:
    """The lines of a panel by label; a recipe that all have is said in its title."""
    lines: dict[str, list[TrackRun]] = {}
    for run in runs:
        short = run.recipe_now == "paper" or _one_recipe(runs)
        lines.setdefault(_label(run) + ("" if short else f", {run.recipe_now}"), []).append(run)
    return lines


def _one_recipe(runs: Sequence[TrackRun]) -> bool:
    """Whether several mixers were trained by one recipe, not the paper's."""
    recipes, mixers = ({getattr(run, name) for run in runs} for name in ("recipe_now", "mixer"))
    return len(recipes) == 1 < len(mixers) and recipes != {"paper"}


_WIDE, _WRAPPED = 46, 84  # letters of a label that need a wider panel, and after which it goes on in the next row


def _finish_panel(axes: Any, title: str, runs: list[TrackRun], longest: int = 65_536) -> None:
    axes.axvline(runs[0].recipe["curriculum"][-1], color="#5c6b7a", linewidth=1, linestyle="--")
    axes.set(title=title, xlabel="word length", ylim=(-0.06, 1.06))
    axes.set_xscale("log", base=2)
    shown = sorted({n for run in runs for n in run.scores if n <= longest})
    shown = [n for n in shown if n in (8, 32, 128, 512, 4096, 65_536)] or shown
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _styles(lines: Mapping[str, list[TrackRun]]) -> list[dict[str, str]]:
    """Colour and style of each line: the four ranges in their own colours, dashed with a constant momentum; others by turns."""
    turns = _more_lines()
    styles = []
    for run in (runs[0] for runs in lines.values()):
        words = [word.partition("=")[0] for word in run.recipe_now.split("+")]
        if run.mixer in RANGES and set(words) <= set(SHORTER):
            styles.append({"color": ARMS[run.mixer].colour, "linestyle": "--" if "momentum" in words else "-"})
        else:
            styles.append(next(turns))
    return styles


def _draw_line(axes: Any, label: str, runs: list[TrackRun], style: dict[str, str]) -> None:
    seeds = [{n: values[r] for n, values in run.scores.items()} for run in runs for r in range(len(run.seeds))]
    tested = sorted(set.intersection(*map(set, seeds)), key=lambda n: (n > 512, n if n > 512 else -n))
    best = max(seeds, key=lambda scores: [scores[n] for n in tested])
    for scores in seeds:
        lengths = sorted(scores)
        thick = {"linewidth": 2.4, "label": "\n".join(wrap(label, _WRAPPED)), "marker": "o", "markersize": 3.5}
        thin = {"linewidth": 0.8, "alpha": 0.45}
        axes.plot(lengths, [scores[n] for n in lengths], **style, **(thick if scores is best else thin))
    known = published(runs[0])
    if known is not None:
        axes.plot(PUBLISHED_LENGTHS, known, "D", color=style["color"], fillstyle="none", markersize=7)


def mechanism_figure(mechanism: dict[str, Any]) -> Any:
    """Beta by head; gates, keys in principal coordinates and eigenvalues of the head that works (fig:s3_interpretability)."""
    figure = empty_figure(figsize=(13.4, 3.6))
    left, middle, plane, right = figure.subplots(1, 4, width_ratios=(1.15, 1.25, 1.0, 1.0))
    names, head = mechanism["symbols"], mechanism["head"]
    beta = mechanism["beta"]  # [symbols][heads]
    for h in range(len(beta[0])):
        values = [row[h] for row in beta]
        colour = "#16548c" if h == head else "#9aa5b1"
        left.plot([h] * len(values), values, "o", color=colour, markersize=4, alpha=0.85)
    left.axhline(2, color="#5c6b7a", linewidth=0.8, linestyle="--")
    left.axhline(1, color="#5c6b7a", linewidth=0.8, linestyle=":")
    left.set_xticks(range(0, len(beta[0]), 1 if len(beta[0]) <= 12 else 1 + len(beta[0]) // 9))
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
    figure = empty_figure(figsize=(10.0, 5.2))
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
