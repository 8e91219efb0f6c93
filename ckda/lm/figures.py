"""Figures of the language models, each a pure function of a result."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckda.page import empty_figure

if TYPE_CHECKING:
    from ckda.lm.commands.eval import Scores
    from ckda.lm.comparison import Comparison, Run
    from ckda.lm.needle import Needles
    from ckda.lm.training import TrainResult

__all__ = [
    "ARM_STYLE",
    "comparison_figure",
    "label_of",
    "needle_figure",
    "speed_figure",
    "style_of",
    "tasks_figure",
    "training_figure",
]

#: arm -> (label, colour, line style)
ARM_STYLE = {
    "transformer": ("Transformer++", "#5c6b7a", "-"),
    "transformer-qknorm": ("Transformer++, QK-norm", "#5c6b7a", "-"),
    "kda": ("KDA", "#d08a2e", "-"),
    "ckda": ("CKDA", "#16548c", "-"),
    "ckda-spread": ("CKDA, spread", "#16548c", "--"),
    "ckda-no-key-silu": ("CKDA, no SiLU on keys", "#16548c", ":"),
    "ckda-spread-no-key-silu": ("CKDA, spread, no SiLU on keys", "#5b8fc4", ":"),
    "kda-hybrid": ("KDA + attn 3:1", "#c8553d", "-"),
    "ckda-hybrid": ("CKDA + attn 3:1", "#2f7f4f", "-"),
}


def style_of(arm: str) -> tuple[str, str, str]:
    """Label, colour and line style of an arm."""
    return ARM_STYLE.get(arm, (arm, "#7a4fa3", "-."))


def label_of(arm: str) -> str:
    """An arm as figures and tables call it.

    Example:
        >>> label_of("kda-hybrid"), label_of("something")
        ('KDA + attn 3:1', 'something')
    """
    return style_of(arm)[0]


def training_figure(result: "TrainResult") -> Any:
    """One run: training loss of every update, held-out loss where it was measured, learning rate below."""
    figure = empty_figure(figsize=(7.2, 4.4))
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    rows = [row for row in result.log if row.loss is not None]
    tokens, held = [row.tokens / 1e6 for row in rows], result.validations
    top.plot(tokens, [row.loss for row in rows], color="#9aa5b1", linewidth=0.9, label="training")
    if held:
        losses = [row.held_out_loss for row in held]
        top.plot([row.tokens / 1e6 for row in held], losses, "o-", color="#16548c", label="held out")
    top.set_ylabel("loss (nats a token)")
    top.legend(frameon=False)
    low.plot(tokens, [row.lr for row in rows], color="#5c6b7a")
    low.set(xlabel="tokens (millions)", ylabel="learning rate")
    for axes in (top, low):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curves(axes: Any, runs: "Sequence[Run]", keep: Callable[[float], bool]) -> None:
    named: set[str] = set()
    for run in runs:
        label, colour, style = style_of(run.arm)
        points = [(t / 1e6, loss) for t, loss in run.held_out if keep(t)]
        look = {"color": colour, "linestyle": style, "linewidth": 1.4, "marker": "o", "markersize": 2.5}
        axes.plot(*zip(*points, strict=True), label=None if label in named else label, **look)
        named.add(label)
    axes.set(xlabel="tokens (millions)", ylabel="held-out loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)


def comparison_figure(result: "Comparison") -> Any:
    """Held-out loss against tokens (fig:val_curves): left the whole training, right where each arm's seeds end."""
    runs = [run for run in result.runs if run.held_out]
    figure = empty_figure(figsize=(11.0, 4.4))
    left, right = figure.subplots(1, 2)
    most = max(t for run in runs for t, _ in run.held_out)
    _curves(left, runs, lambda t: t > 0.04 * most)
    left.legend(frameon=False, fontsize=8)
    arms = list(dict.fromkeys(run.arm for run in runs))
    for run in runs:
        place, loss = arms.index(run.arm), run.held_out[-1][1]
        right.plot(loss, place, "o", color=style_of(run.arm)[1], markersize=6)
        right.annotate(f"{loss:.3f}", (loss, place), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    right.set_yticks(range(len(arms)), [label_of(arm) for arm in arms])
    right.set_ylim(len(arms) - 0.4, -0.6)
    right.set_xlabel("held-out loss at the end (nats a token)")
    right.spines[["top", "right"]].set_visible(False)
    return figure


def speed_figure(result: "Comparison") -> Any:
    """Tokens a second and memory, a bar an arm."""
    seen: dict[str, Run] = {}
    for run in result.runs:
        if run.tokens_per_second:
            seen.setdefault(run.arm, run)
    figure = empty_figure(figsize=(8.6, 0.6 + 0.42 * max(2, len(seen))))
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [label_of(arm) for arm in seen]
    colours = [style_of(arm)[1] for arm in seen]
    left.barh(labels, [run.tokens_per_second / 1e6 for run in seen.values()], color=colours)
    left.set_xlabel("million tokens a second")
    right.barh(labels, [run.memory_gib or 0.0 for run in seen.values()], color=colours)
    right.set_xlabel("GiB at most")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def needle_figure(result: "Needles") -> Any:
    """Accuracy by task and length as a heat map (tab:fwedu-1p3b-niah)."""
    tasks, lengths = list(result.accuracy), list(next(iter(result.accuracy.values())))
    values = [[100 * result.accuracy[task][n] for n in lengths] for task in tasks]
    figure = empty_figure(figsize=(1.8 + 0.9 * len(lengths), 1.2 + 0.5 * len(tasks)))
    axes = figure.subplots()
    axes.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if value > 60 else "black"
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_xlabel("tokens")
    axes.set_title(f"{result.model}: needles found (%)", fontsize=10)
    return figure


def tasks_figure(result: "Scores") -> Any:
    """Accuracy of every task that has one (per character where that is measured), with its standard error."""
    rows = []
    for task, measures in result.results.items():
        name = "acc_norm" if "acc_norm" in measures else "acc"
        if name in measures:
            rows.append((task, 100 * measures[name], 100 * measures.get(f"{name}_stderr", 0.0)))
    figure = empty_figure(figsize=(6.4, 0.8 + 0.32 * max(1, len(rows))))
    axes = figure.subplots()
    axes.barh([r[0] for r in rows], [r[1] for r in rows], xerr=[r[2] for r in rows], color="#16548c", ecolor="#5c6b7a")
    axes.invert_yaxis()
    axes.set(xlabel="accuracy (%)", xlim=(0, 100), title=result.model)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
