"""Drawings of appendix D: the clock and its query, and the three layers at work on a word. Every mark is computed."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ckda.theory.figures import DRAWINGS, save
from ckda.theory.machines import DFA, Word
from ckda.theory.multilayer import Clock, State, run_layer, simulate

__all__ = ["clock_and_query", "layers_at_work", "three_layers"]

#: ends in "abb", over the letters a and b
ENDS_IN_ABB = DFA(((1, 0), (1, 2), (1, 3), (1, 0)), 0, frozenset({3}), ("a", "b"))


def clock_and_query(path: Path, m: int = 4) -> None:
    """lem:wfamincount: the 2m positions of the clock, and their readouts along the query (3/5, 4/5), all different."""
    from matplotlib import pyplot as plt

    clock = Clock(m)
    points = np.array([[float(clock.field.cos(2 * i)), float(clock.field.sin(2 * i))] for i in range(2 * m)])
    query = np.array([float(Fraction(str(x))) for x in clock.query])
    shadows = np.outer([float(o) for o in clock.readouts], query)
    figure, panel = plt.subplots(figsize=(4.5, 4.5))
    panel.axline((0, 0), (float(query[0]), float(query[1])), color="0.6", linewidth=0.8)
    for i, (point, shadow) in enumerate(zip(points, shadows, strict=True)):
        panel.plot(*np.stack([point, shadow]).T, color="0.8", linewidth=0.7)
        panel.annotate(str(i), 1.12 * point, ha="center", va="center")
    panel.plot(*points.T, "o", color="#3f6fb0")
    panel.plot(*shadows.T, "|", color="#b3372f", markersize=9)
    panel.set(
        aspect="equal",
        xlim=(-1.3, 1.3),
        ylim=(-1.3, 1.3),
        title=f"position modulo {2 * m}: one number along (3/5, 4/5)",
    )
    panel.axis("off")
    save(figure, path)


def layers_at_work(dfa: DFA, word: Word) -> dict[str, Any]:
    """What the layers hold after every token: positions, slots, the accumulator's columns, the two readouts.

    Example:
        >>> found = layers_at_work(ENDS_IN_ABB, [0, 1, 1, 0])
        >>> found["accepted"], found["clock"]
        ([0, 0, 1, 0], [1, 2, 3, 4])
    """
    layers = simulate(dfa)
    positions = [layers.clock.position(o) for _, o in run_layer(layers.clock, word)]
    slots = [codes for _, (codes,) in run_layer(layers.buffer, run_layer(layers.clock, word))]
    columns: list[list[float]] = []

    def keep(state: State) -> None:
        columns.append([float(Fraction(str(row.get(0, 0)))) for row in state.rows])

    readouts = list(layers.run(word, keep))
    return {
        "m": layers.m,
        "clock": positions,
        "buffer": np.array([[codes.get(i, 0) for i in range(2 * layers.m)] for codes in slots]),
        "accumulator": np.array(columns),
        "state": [int(q) for q, _ in readouts],
        "accepted": [int(y) for _, y in readouts],
    }


def three_layers(path: Path) -> None:
    """thm:multilayer: clock, buffer, accumulator and completed readout of a four-state DFA on a word of 30 letters."""
    from matplotlib import pyplot as plt

    word = [int(letter == "b") for letter in "abbababbabbbaabbabaabbbabbaabb"]
    found = layers_at_work(ENDS_IN_ABB, word)
    T, steps = len(word), np.arange(1, len(word) + 1)
    figure, panels = plt.subplots(
        4, 1, figsize=(9, 7), sharex=True, height_ratios=[1, 2, 1.2, 1.2], layout="constrained"
    )
    panels[0].step(steps, found["clock"], where="mid", color="#3f6fb0")
    panels[1].imshow(
        found["buffer"].T, aspect="auto", cmap="Purples", extent=(0.5, T + 0.5, 2 * found["m"] - 0.5, -0.5)
    )
    panels[2].imshow(
        found["accumulator"].T, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, extent=(0.5, T + 0.5, 3.5, -0.5)
    )
    panels[3].step(steps, found["state"], where="mid", color="0.3")
    accepted = [t for t, y in zip(steps, found["accepted"], strict=True) if y]
    panels[3].plot(accepted, [3] * len(accepted), "o", color="#2b7a4b")
    for panel, name in zip(panels, ("clock: t mod 2m", "buffer: slots", "accumulator", "state, accepted"), strict=True):
        panel.set_ylabel(name, fontsize=8)
        for boundary in range(found["m"], T, found["m"]):
            panel.axvline(boundary + 0.5, color="0.5", linewidth=0.6, linestyle=":")
    panels[3].set_xticks(steps, ["ab"[a] for a in word])
    figure.suptitle(f"words that end in abb: blocks of m = {found['m']} letters")
    save(figure, path)


DRAWINGS.update({"lem:wfamincount": clock_and_query, "thm:multilayer": three_layers})
