"""``ckda bench --throughput``: the paper's figure of kernel throughput, forward+backward in tokens a second.

32,768 tokens a step in sequences of different lengths, 16 heads of 128, bfloat16; every row under torch.compile, 20 warm-up and
50 timed calls a round, the mean over four rounds. FLA's KDA, the signs absorbed into q and k over it (the paper's gauge)
and DeltaProduct_2 without a gate stand beside our two rows; the gauge is timed without torch.compile too, a row that says so;
cuDNN's kernels, which are no torch program, beside ours on the same given gates. A peer of others that the check found inaccurate
is timed, and its rows and its bars say so.
"""

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ckda.bench.options import Shape
from ckda.bench.peers import GAUGE, Peer, label, legend
from ckda.bench.timing import rounds_ms
from ckda.bench.tuning import forget_choices

__all__ = ["LENGTHS", "SHAPES", "SMOKE", "draw", "run"]

TOKENS, HEADS, HEAD = 32768, 16, 128
LENGTHS = (2048, 4096, 8192, 16384, 32768)
SHAPES = [Shape(TOKENS // T, T, HEADS, HEAD) for T in LENGTHS]
#: seconds of an H200 a shape, with --jobs 8: compiling, tuning FLA's kernels, and 280 calls
ESTIMATE = {
    "ckda": 6.0,
    "kda": 6.0,
    "fla kda": 12.0,
    "fla kda, intermediates kept": 12.0,
    "fla deltaproduct2": 12.0,
    GAUGE: 16.0,
    f"{GAUGE}, not compiled": 16.0,
}
SMOKE = [Shape(2, 32, 2, 16), Shape(1, 64, 2, 16)]


def _measure(peer: Peer, shape: Shape, device: str, dtype: torch.dtype, seed: int, smoke: bool) -> dict[str, Any]:
    call = peer.draw(shape, device, dtype, seed)
    do = torch.randn(shape, device=device).to(dtype)
    both = peer.bind(call, do).both
    both()
    times = rounds_ms(both, device, smoke)
    rates = [1e3 * shape.B * shape.T / ms for ms in times]
    spread = statistics.stdev(rates) if len(rates) > 1 else None
    return {"rounds_ms": times, "tokens_per_second": statistics.mean(rates), "spread": spread}


def run(
    shapes: list[Shape],
    found: list[Peer],
    device: str,
    dtype: torch.dtype,
    seed: int,
    smoke: bool,
    known: list[dict[str, Any]],
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Every peer at every shape but those of `known`; `keep` gets what there is after each. One that fails says why."""
    rows = [*known]
    done = {(row["peer"], tuple(row["shape"].values())) for row in rows}
    for shape in shapes:
        if any(peer.foreign for peer in found):
            forget_choices()
        for peer in found:
            if (peer.name, tuple(shape)) in done:
                continue
            row = peer.row(shape)
            try:
                row |= _measure(peer, shape, device, dtype, seed, smoke)
                say(f"{shape!s:28} {label(row):40} {row['tokens_per_second'] / 1e6:8.2f} million tokens/s")
            except Exception as error:  # whatever foreign code ends with: the others go on
                row["failed"] = str(error)[:300]
                say(f"{shape!s:28} {peer.name}: failed, {error!s:.120}")
            rows.append(row)
            keep(rows)
    return rows


_GIVEN = "given gates"  #: in the name of a peer that takes log|alpha| itself


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Bars of tokens a second, a group for each length, from the JSON alone; None without matplotlib.

    On the left the gate is computed inside the call; on the right log|alpha| is given, as cuDNN's kernels take it.
    """
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "failed" not in row]
    sides = {"gate inside": [row for row in rows if _GIVEN not in row["peer"]]}
    sides["log|alpha| given"] = [row for row in rows if _GIVEN in row["peer"]]
    sides = {title: side for title, side in sides.items() if side}
    figure, axes = plt.subplots(1, len(sides), figsize=(6.5 * len(sides), 5.2), sharey=True, squeeze=False)
    for axis, (title, side) in zip(axes[0], sides.items(), strict=True):
        _bars(axis, side)
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes[0, 0].set_ylabel("million tokens a second, forward+backward")
    figure.suptitle(f"{result['environment']['device']}, {result['dtype']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _bars(axis: Any, rows: list[dict[str, Any]]) -> None:
    """One bar a peer and length."""
    lengths = sorted({row["shape"]["T"] for row in rows})
    labels = {row["peer"]: legend(row) for row in rows}
    width = 0.85 / len(labels)
    for i, (name, words) in enumerate(labels.items()):
        mine = [row for row in rows if row["peer"] == name]
        places = [lengths.index(row["shape"]["T"]) + (i - (len(labels) - 1) / 2) * width for row in mine]
        rates = [row["tokens_per_second"] / 1e6 for row in mine]
        spreads = [(row["spread"] or 0.0) / 1e6 for row in mine]
        axis.bar(places, rates, width, yerr=spreads, label=words, color=f"C{i}", error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(lengths)), [f"{T}" for T in lengths])
    axis.set_xlabel("tokens of a sequence")
    axis.spines[["top", "right"]].set_visible(False)
