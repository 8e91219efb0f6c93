"""Waveform continuation shown: figures and players, each a pure function of results."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckda.experiments.audio.run import AudioResult, AudioRun
from ckda.experiments.audio.task import playable, wav_bytes
from ckda.experiments.common.show import ARMS
from ckda.page import empty_figure

__all__ = ["PUBLISHED", "beyond_figure", "continuation_figure", "label", "paper_part", "players"]

#: SNR in dB at lengths 40, 136 and 264 as published: seed 0, of audio_toys/reference_periodic_waveform_metrics.json of
#: OpenEuroLLM/ComplexKDA at commit 03af970. The paper's text has two of them, Complex KDA's and the Transformer's at 264.
PUBLISHED = {
    "kda": (5.2, 1.8, -2.7),
    "kda-beta2": (5.8, 2.9, 2.1),
    "kda-signed": (8.1, 3.2, -0.7),
    "ckda": (45.6, 42.2, 38.1),
    "deltaproduct2-gated": (40.8, 32.6, 19.3),
    "deltaproduct2-standard": (5.0, 1.7, 1.3),
    "gru": (72.8, 73.0, 73.1),
    "transformer": (39.8, 39.8, 2.8),
}
_INK, _SOFT, _GOLD, _GREY, _BLUE = "#1d2733", "#5c6b7a", "#d9a520", "#b3bcc6", "#16348c"


def label(run: AudioRun) -> str:
    """What a run is called: its arm, and its recipe where that is not the paper's."""
    return ARMS[run.arm].words if run.is_papers else f"{ARMS[run.arm].words}, {run.recipe_now}"


def paper_part(result: AudioResult) -> AudioResult:
    """The result with the runs by the paper's protocol alone, or with all where there are none of those."""
    papers = {name: run for name, run in result.runs.items() if run.is_papers}
    return replace(result, runs=papers or result.runs)


def _draw_waves(panel: Any, result: AudioResult) -> None:
    """Panel (a): near and far, one row a run; gold the cue, grey the target, dark blue the continuation."""
    runs = list(result.runs.values())
    grid = panel.subplots(len(runs), 2, sharey=True, squeeze=False)
    limit = 1.15 * np.abs(result.frames).max()
    for i, (row, run) in enumerate(zip(grid, runs, strict=True)):
        for axes, where in zip(row, ("near", "far"), strict=True):
            first, frames = run.windows[where].first, np.array(run.windows[where].frames)
            samples = frames.shape[1]
            t = first + np.arange(frames.size) / samples
            axes.plot(t, result.target(first, len(frames)).reshape(-1), color=_GREY, linewidth=1.6)
            heard = t >= result.cue
            axes.plot(t[heard], frames.reshape(-1)[heard], color=_BLUE, linewidth=0.6)
            if not heard.all():
                axes.plot(t[~heard], result.target(first, len(frames)).reshape(-1)[~heard], color=_GOLD, linewidth=0.8)
            axes.set_ylim(-limit, limit)
            axes.set_yticks([])
            axes.margins(x=0.01)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(labelsize=7)
            if i < len(runs) - 1:
                axes.set_xticklabels([])
        row[0].set_title(label(run), fontsize=7.5, loc="left", color=_INK, pad=2)
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=8)


def _draw_errors(axes: Any, result: AudioResult) -> None:
    """Panel (b): mean squared error of the waveform by length; the seed that is shown, and the others thin."""
    lengths: list[int] = []
    for run in result.runs.values():
        lengths = sorted(run.mse)
        values = [run.mse[n] for n in lengths]
        colour = ARMS[run.arm].colour
        shown = [v[run.shown] for v in values]
        style = {
            "color": colour,
            "linewidth": 2.4 if run.arm == "ckda" else 1.5,
            "linestyle": "-" if run.is_papers else "--",
        }
        axes.plot(lengths, [np.nan if v is None else v for v in shown], label=label(run), **style)
        for seed in range(len(run.seeds)):
            if seed != run.shown:
                thin = [np.nan if v[seed] is None else v[seed] for v in values]
                axes.plot(lengths, thin, color=colour, linewidth=0.7, alpha=0.6)
    axes.axvline(result.trained_to, color=_SOFT, linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = [n for n in (16, 32, 64, 136, 264, 512, 1024, 2048) if n <= max(lengths)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel("sequence length")
    axes.set_ylabel("mean squared error of the waveform")
    axes.spines[["top", "right"]].set_visible(False)


def continuation_figure(result: AudioResult) -> Any:
    """The paper's two panels (fig:waveform_continuation): waveforms near and far, error by length."""
    drawn = {name: run for name, run in result.runs.items() if {"near", "far"} <= set(run.windows)}
    result = replace(result, runs=drawn)
    num = len(drawn)
    figure = empty_figure(figsize=(11.5, max(4.2, 0.75 * num + 1.0)))
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    _draw_waves(left, result)
    axes = right.subplots()
    _draw_errors(axes, result)
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def beyond_figure(result: AudioResult, arm: str = "ckda") -> Any:
    """SNR by length for every recipe of one arm, a panel each: every seed thin, the best at 264 thick; the GRU dashed."""
    runs = [run for run in result.runs.values() if run.arm == arm]
    gru = result.runs.get("gru")
    columns = min(4, len(runs))
    lines = -(-len(runs) // columns)
    figure = empty_figure(figsize=(2.9 * columns + 0.6, 2.5 * lines + 0.5))
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_axis_off()
    words = [
        "thick: the best seed at 264",
        "thin: the other seeds",
        "dashed: the best GRU",
        "dotted: longest in training",
    ]
    if len(runs) % columns:
        note = grid.flat[len(runs)]
        note.text(
            0.05, 0.9, "\n".join(words), transform=note.transAxes, va="top", fontsize=8, color=_SOFT, linespacing=1.7
        )
    for i, (axes, run) in enumerate(zip(grid.flat, runs, strict=False)):
        lengths = sorted(run.snr)
        colour = ARMS[arm].colour
        if gru is not None:
            values = [gru.snr[n][gru.shown] for n in lengths if n in gru.snr]
            axes.plot(lengths[: len(values)], values, color=ARMS["gru"].colour, linewidth=1, linestyle="--")
        for seed in range(len(run.seeds)):
            values = [run.snr[n][seed] for n in lengths]
            best = seed == run.shown
            axes.plot(
                lengths,
                [np.nan if v is None else v for v in values],
                color=colour,
                linewidth=2.6 if best else 0.9,
                alpha=1.0 if best else 0.55,
            )
        axes.axvline(result.trained_to, color=_SOFT, linewidth=0.8, linestyle=":")
        shown = [run.snr.get(n, [None] * len(run.seeds))[run.shown] for n in (264, lengths[-1])]
        text = ", ".join(
            "-" if v is None else f"{v:.1f} at {n}" for v, n in zip(shown, (264, lengths[-1]), strict=True)
        )
        axes.set_title(f"{run.recipe_now}\n\n", fontsize=9, loc="left", color=_INK, fontweight="bold")
        axes.text(0, 1.03, f"{_weights(run)}\nbest {text}", transform=axes.transAxes, fontsize=6.5, color=_SOFT)
        axes.set_xscale("log", base=2)
        ticks = [n for n in (16, 64, 264, 1024) if n <= lengths[-1]]
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", color="#e6eaee", linewidth=0.6)
        axes.tick_params(labelsize=7.5, labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
        if i % columns == 0:
            axes.set_ylabel("SNR in dB", fontsize=8)
        if i >= len(runs) - columns:
            axes.set_xlabel("sequence length", fontsize=8)
    return figure


def _weights(run: AudioRun) -> str:
    """What a run's recipe adds to the paper's protocol, in a few words."""
    words = [f"{name} {weight:g}" for name, weight in run.recipe["penalties"].items()]
    return ", ".join(words + ["tail"] * (run.recipe["tail"] > 0)) or "the paper's"


def players(result: AudioResult) -> tuple[list[str], list[tuple[str, list[bytes]]]]:
    """Head and rows of players: the target, then each run's windows, as WAV files."""
    bpm = result.bpm
    some = max((run.windows for run in result.runs.values()), key=len)
    head = ["", *(f"steps {w.first} to {w.first + len(w.frames)}" for w in some.values())]
    target = [wav_bytes(playable(result.target(w.first, len(w.frames)), bpm)) for w in some.values()]
    lines = [("the groove itself", target)]
    for run in (run for run in result.runs.values() if run.windows):
        lines.append((label(run), [wav_bytes(playable(np.array(w.frames), bpm)) for w in run.windows.values()]))
    return head, lines
