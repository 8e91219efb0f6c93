"""What ``ckda audio`` leaves beside the records: table, figures, page; and what it prints."""

from pathlib import Path

from ckda.experiments.audio.figures import PUBLISHED, beyond_figure, continuation_figure, label, paper_part, players
from ckda.experiments.audio.run import LOOP, AudioResult, AudioRun
from ckda.experiments.audio.task import FRAMES
from ckda.experiments.common.show import ARMS
from ckda.page import Page, png_of, print_table, source_line

__all__ = ["draw", "markdown", "page_of", "print_result", "published", "rows"]


def draw(result: AudioResult, out: Path) -> None:
    """The figures: the paper's two panels, and Complex KDA's recipes side by side where there are several."""
    continuation_figure(paper_part(result)).savefig(out / "continuation.png", dpi=160, metadata={"Software": None})
    if sum(run.arm == "ckda" for run in result.runs.values()) > 1:
        beyond_figure(result).savefig(out / "beyond.png", dpi=160, metadata={"Software": None})


def published(result: AudioResult, run: AudioRun) -> tuple[float, ...]:
    """The paper's numbers, where they stand for the same: its loop, its protocol, no smoke run."""
    same = result.loop == LOOP and run.is_papers and not run.is_smoke
    return PUBLISHED.get(run.arm, ()) if same else ()


def rows(result: AudioResult, lengths: tuple[int, ...] = (40, 136, 264, 2048)) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: SNR in dB at the lengths there are, first seed / best seed, and as published."""
    runs = result.runs.values()
    there = [n for n in lengths if all(n in run.snr for run in runs)] or [max(run.snr) for run in runs][:1]
    body = []
    for run in runs:
        cells = [label(run)]
        for n in there:
            values = run.snr[n]
            known = [v for v in values if v is not None]
            first = "diverged" if values[0] is None else f"{values[0]:.1f}"
            cells.append(first if len(values) == 1 else f"{first} / {max(known):.1f}" if known else first)
        cells.append(" ".join(f"{v:.1f}" for v in published(result, run)))
        body.append(cells)
    for arm in result.absent:
        name = ARMS[arm].words
        body.append([name, *("-" for _ in there), " ".join(f"{v:.1f}" for v in PUBLISHED[arm])])
    head = ["SNR in dB", *(f"length {n}" for n in there), "published 40 136 264"]
    beside = any(row[-1] for row in body)
    return (head, body) if beside else (head[:-1], [row[:-1] for row in body])


def markdown(result: AudioResult, lengths: tuple[int, ...] = (40, 136, 264, 2048)) -> str:
    """The same table with every seed: best seed first, all in brackets, in the order of the seeds."""
    lines = [f"| SNR in dB | seeds | {' | '.join(map(str, lengths))} | published 40 / 136 / 264 |"]
    lines.append("|---|---|" + "---|" * (len(lengths) + 1))
    for run in result.runs.values():
        cells = []
        for n in lengths:
            values = run.snr.get(n, [None] * len(run.seeds))
            every = ", ".join("-" if v is None else f"{v:.1f}" for v in values)
            known = [v for v in values if v is not None]
            cells.append(f"**{max(known):.1f}** ({every})" if known else f"- ({every})")
        seeds = ", ".join(map(str, run.seeds))
        cells.append(" / ".join(f"{v:.1f}" for v in published(result, run)))
        lines.append(f"| {label(run)} | {seeds} | {' | '.join(cells)} |")
    for arm, why in result.absent.items():
        name = ARMS[arm].words
        paper = " / ".join(f"{v:.1f}" for v in PUBLISHED[arm])
        lines.append(f"| {name} | none: {why['reason']} | {' | '.join('-' for _ in lengths)} | {paper} |")
    return "\n".join(lines) + "\n"


def print_result(result: AudioResult, page: Path) -> None:
    """The table on the terminal, and where everything lies."""
    several = any(len(run.seeds) > 1 for run in result.runs.values())
    strong = [i for i, run in enumerate(result.runs.values()) if run.arm == "ckda"]
    head, body = rows(result)
    title = "continuation of the loop" + (", first seed / best seed" if several else "")
    names = [[name, *row[1:]] for name, row in zip(result.runs, body, strict=True)]
    print_table(title, head, names, strong)
    print(f"{result.seconds:.0f} s. Figures and sound: {page}")


def page_of(result: AudioResult) -> Page:
    """The report of all runs, with players."""
    page = Page(
        "Half a bar, and on",
        "One-layer models hear eight sixteenth notes of a two-bar loop, then silence, and go on playing in one forward pass. "
        "To stay in time they must keep its phase in their state.",
    )
    page.section("Near and far")
    some = next(iter(result.runs.values()))
    page.figure(
        png_of(continuation_figure(result)),
        f"Left: the continuation from phase 0 soon after the cue and far beyond it (best seed); gold the cue, grey the target, "
        f"blue the model. Right: error by length over all {FRAMES} phases, other seeds thin; training saw lengths up to "
        f"{result.trained_to} (dashed).",
    )
    head, body = rows(result)
    strong = next((i for i, r in enumerate(result.runs.values()) if r.arm == "ckda"), None)
    page.table(head, body, strong=strong)
    page.section("To hear", "Windows of the continuation from phase 0.")
    page.players(*players(result))
    page.section("How it was trained")
    page.table(
        ["run", "parameters", "updates", "seconds", "penalties", "tail"],
        [
            [
                label(r),
                f"{r.parameters:,}",
                r.recipe["steps"],
                r.train_seconds,
                ", ".join(f"{k} {v:g}" for k, v in r.recipe["penalties"].items()),
                r.recipe["tail"] or "",
            ]
            for r in result.runs.values()
        ],
    )
    seeds = f"seeds {', '.join(map(str, some.seeds))}"
    page.footer(source_line(some.environment, seeds) + " The numbers are in audio.json.")
    return page
