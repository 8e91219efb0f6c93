"""The numbers of results/bench/README.md are those of the records beside it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "results/bench"
TEXT = (FOLDER / "README.md").read_text()
LENGTHS = (2048, 4096, 8192, 16384, 32768)


def table(after: str) -> dict[str, list[str]]:
    """The first table after some words: first cell, without bold and what it opens -> the others."""
    lines = TEXT[TEXT.index(after) :].split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    rows = {}
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        rows[name] = cells
    return rows


def record(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


THROUGHPUT = {
    "Complex KDA, ours": "ckda",
    "KDA, ours": "kda",
    "KDA, FLA": "fla kda",
    "KDA, FLA, intermediates kept": "fla kda, intermediates kept",
    "DeltaProduct_2, FLA": "fla deltaproduct2",
    "Complex KDA over FLA, signs absorbed": "ckda over fla (signs absorbed)",
    "the same without torch.compile": "ckda over fla (signs absorbed), not compiled",
    "KDA, ours, given gates of mean -2.5": "kda, given gates of mean -2.5",
    "KDA, cuDNN, given gates of mean -2.5": "cudnn kda, given gates of mean -2.5",
    "KDA, ours, given gates of mean -0.03": "kda, given gates of mean -0.03",
    "KDA, cuDNN, given gates of mean -0.03 (inaccurate)": "cudnn kda, given gates of mean -0.03",
}


def test_throughput() -> None:
    rates = {
        (row["peer"], row["shape"]["T"]): row["tokens_per_second"]
        for row in record("throughput/throughput.json")["rows"]
    }
    rows = table("## The paper's figure of throughput")
    assert rows.keys() == THROUGHPUT.keys()
    for name, cells in rows.items():
        for T, cell in zip(LENGTHS, cells, strict=True):
            rate = rates.get((THROUGHPUT[name], T))
            assert cell == ("" if rate is None else f"{rate / 1e6:.2f}"), (name, T)


#: row of the table -> peers (the fastest counts), what is timed, the number that is shown
BESIDE_FLA = {
    "forward+backward: Complex KDA": (["ckda"], "forward+backward", "mean"),
    "KDA, our unsigned path": (["kda"], "forward", "mean"),  # the table's second row of that name
    "the peer's KDA, intermediates kept (its fastest)": (["fla kda, intermediates kept"], "forward+backward", "mean"),
    "the peer's KDA, as it comes": (["fla kda"], "forward+backward", "mean"),
    "forward alone: Complex KDA": (["ckda"], "forward", "mean"),
    "the peer's KDA, as it comes (its fastest)": (["fla kda"], "forward", "mean"),
    "forward+backward, every call waited for: Complex KDA": (["ckda"], "forward+backward", "waited"),
    "the peer's KDA, its fastest": (["fla kda", "fla kda, intermediates kept"], "forward+backward", "waited"),
}


@pytest.mark.parametrize("name", BESIDE_FLA)
def test_beside_fla(name: str) -> None:
    peers, what, number = BESIDE_FLA[name]
    rows = record("h200.json")["rows"]
    for T, cell in zip((2048, 8192, 32768), table("## Beside flash-linear-attention")[name], strict=True):
        found = [row[what][number] for row in rows if row["peer"] in peers and row["shape"]["T"] == T]
        assert len(found) == len(peers)
        assert cell == f"{min(found):.2f}"


def test_the_peer_over_ours() -> None:
    text = TEXT[TEXT.index("## Beside flash-linear-attention") :]
    said = re.findall(r"\| its fastest over ours \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)\*\* \|", text)
    rows = record("h200.json")["rows"]
    for line, what in zip(said, ("forward+backward", "forward"), strict=True):
        for T, ratio in zip((2048, 8192, 32768), line, strict=True):
            ms = {row["peer"]: row[what]["mean"] for row in rows if row["shape"]["T"] == T}
            fastest = min(value for peer, value in ms.items() if peer.startswith("fla"))
            assert ratio == f"{fastest / ms['ckda']:.2f}"


def test_the_host() -> None:
    hosts = {"before": record("host/before.json")["host_ms"], "now": record("host/host.json")["host_ms"]}
    names = {
        "operator, 1 x 1024 tokens": "operator, 1 x 1024",
        "operator, 4 x 8192": "operator, 4 x 8192",
        "layer of width 2048, 1 x 1024": "layer, 1 x 1024",
        "the same under autocast": "layer, 1 x 1024, autocast",
    }
    columns = [
        ("before", "forward"),
        ("before", "forward+backward"),
        ("now", "forward"),
        ("now", "forward+backward"),
        ("now", "forward+backward, one thread"),
    ]
    for name, cells in table("## The host").items():
        for (when, part), cell in zip(columns, cells, strict=False):
            assert cell == f"{hosts[when][names[name]][part]:.2f}", (name, when, part)


def test_the_machines() -> None:
    text = TEXT[TEXT.index("Hosts of borrowed machines differ") :]
    now = record("host/host.json")["host_ms"]
    rows = {row["row"]["name"]: row["forward+backward"]["host"] for row in record("sweep/sweep.json")["rows"]}
    names = ("operator, 1 x 1024", "operator, 4 x 8192", "layer, 1 x 1024")
    cells = " | ".join(format(now[name]["forward+backward"], ".2f") for name in names)
    assert f"| this one (b038f73) | {cells} |" in text
    assert f"(3aeda0d) | {rows['1 x 1024 tokens']:.2f} | {rows['main']:.2f} | |" in text


def test_the_sweep() -> None:
    bounds = record("sweep/bounds.json")
    rows = table("## What a change of the call costs")
    (now, aim) = rows.pop("main, ms")[-2:]
    assert now == f"{bounds['main_ms']:.2f}"
    assert float(aim) >= bounds["main_ms"]
    assert rows.keys() == bounds["rows"].keys() - {"main"}
    for name, cells in rows.items():
        found = bounds["rows"][name]
        assert cells[-2] == f"{found['reached']:.2f}", name
        assert cells[-1] == ("" if found["at_most"] is None else str(found["at_most"])), name
