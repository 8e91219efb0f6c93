"""What ``ckda track`` leaves beside the records: summary, table, figure, page; and what it prints."""

from dataclasses import replace
from pathlib import Path

from ckda.experiments.common.show import markdown_table, print_table, source_line
from ckda.experiments.tracking.figures import groups_figure, published
from ckda.experiments.tracking.lottery import lottery
from ckda.experiments.tracking.run import TrackResult
from ckda.page import Page, svg_of
from ckda.record import write_json, write_text

__all__ = ["markdown", "print_result", "table", "write_report"]


def write_report(result: TrackResult, out: Path, page: bool = True) -> None:
    """track.json, and where there are runs the figure, the table, the statistics of the seeds, and the page if asked for."""
    write_json(out / "track.json", result.to_json())
    if result.runs:
        groups_figure(result).savefig(out / "track.png", dpi=160, metadata={"Software": None})
        write_text(out / "table.md", markdown(result))
        if page:
            _page(result).write(out / "report.html")
        tested = {name: one for name, one in result.runs.items() if {32, 128, 512} <= set(one.scores)}
        chances = {name: lottery(one, published(one)) for name, one in tested.items()}
        write_json(out / "seeds.json", {"what": "ckda.experiments.tracking.lottery", "runs": chances})


def _columns(result: TrackResult) -> list[int]:
    lengths = {n for run in result.runs.values() for n in run.scores}
    wanted = [n for n in sorted(lengths) if n in (32, 128, 512, 4096, 65_536)]
    return wanted or sorted(lengths)


def middle_length(result: TrackResult) -> int:
    """The longest length up to 512 that the table has: where all seeds are listed."""
    return max((n for n in _columns(result) if n <= 512), default=0)


def table(result: TrackResult) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the best seed's scores beside the published ones, and the other seeds at the longest length."""
    lengths = _columns(result)
    rows = []
    for run in result.runs.values():
        name = f"{run.group} {run.mixer}" + ("" if run.recipe_now == "paper" else f" {run.recipe_now}")
        known = published(run)
        middle = [n for n in lengths if n in run.scores and n <= 512]
        spread = " ".join(f"{v:.2f}" for v in run.scores[middle[-1]]) if middle else ""
        values = [f"{run.at(n):.3f}" if n in run.scores else "-" for n in lengths]
        rows.append([name, *values, spread, " ".join(f"{v:g}" for v in known) if known else ""])
    return ["run", *map(str, lengths), f"all seeds at {middle_length(result)}", "published at 32, 128, 512"], rows


def markdown(result: TrackResult) -> str:
    """:func:`table` for a document."""
    return markdown_table(*table(result))


def print_result(result: TrackResult, out: Path) -> None:
    """The table on the terminal, what is absent, and where everything lies."""
    if result.runs:
        strong = [i for i, run in enumerate(result.runs.values()) if run.mixer == "ckda"]
        print_table("scaled accuracy by word length, best seed (chance is 0)", *table(result), strong)
    for name, why in result.absent.items():
        print(f"{name}: {why}")
    print(f"{result.seconds:.0f} s. Figure, table and numbers: {out}")


def _page(result: TrackResult) -> Page:
    page = Page(
        "Words of groups",
        "One-layer models read group elements one by one and say the product of all so far. Training saw words up to the "
        "dashed line; beyond it only a state that moves like the group itself stays right.",
    )
    page.section("How far each keeps tracking")
    groups = list(dict.fromkeys(run.group for run in result.runs.values()))
    parts = [{name: run for name, run in result.runs.items() if run.group == group} for group in groups]
    for runs in parts[:-1]:
        page.figure(svg_of(groups_figure(replace(result, runs=runs))), "")
    page.figure(
        svg_of(groups_figure(replace(result, runs=parts[-1]))),
        "Scaled accuracy over the last quarter of words of each length; 0 is chance. Thick: the best seed, thin: the others; "
        "diamonds: the paper's numbers, best of three seeds.",
    )
    page.table(*table(result))
    page.section("How they were trained")
    page.table(
        ["run", "what", "parameters", "updates", "words", "lengths", "seeds", "seconds", "side by side"],
        [
            [
                name,
                one.about,
                f"{one.parameters:,}",
                one.recipe["steps"],
                one.recipe["batch"],
                " ".join(map(str, one.recipe["curriculum"])),
                len(one.seeds),
                one.train_seconds,
                one.trained_together,
            ]
            for name, one in result.runs.items()
        ],
    )
    page.footer(source_line(result.environment) + " The numbers are in track.json.")
    return page
