"""What the repository keeps of its measurements: ``python -m ckda.results`` draws every figure again and writes the index.

Records (JSON) are never touched. Beside them lie summaries, tables and figures, which are functions of the records alone:
:func:`redraw` makes them anew. results/README.md lists every question with its records, devices and commits.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckda.record import read_json, write_text

__all__ = ["ABOUT", "drawings", "index_page", "main", "redraw"]

#: folder of results/ -> the question it answers
ABOUT = {
    "audio/continuation": "How long does each arm keep the beat, by the paper's protocol and by others?",
    "audio/even": "How often does a start with clocks of many rates keep time?",
    "audio/inspect": "Which modes of the state keep time?",
    "audio/one-core": "What do a fan of clocks at the start, without being told the period, and the published DeltaProduct_2 give?",
    "audio/one-seed": "What does one seed of each arm give? (the summary of a run whose records were not kept)",
    "audio/seeds": "How often does the steady recipe keep time?",
    "bench": "How fast is the operator, beside flash-linear-attention?",
    "compat": "What do clients of other libraries gain, and do FLA's own tests pass?",
    "demo": "How far does each range setting track after three minutes on a CPU?",
    "lm": "How do language models with and without signs train, and how fast?",
    "regular": "Which arm learns which regular task, how far, and at what cost?",
    "scaling": "Do our fits return the paper's scaling laws?",
    "theory": "Which claims of the paper are checked, and how?",
    "tracking/cost": "What does an update cost?",
    "tracking/counts": "On how many of 24 seeds are S3, S4 and A5 learned, and how far do they go?",
    "tracking/find-s4": "Which start, curriculum or penalty finds S4 in 5000 small updates?",
    "tracking/finish": "How far do trained models go after penalties on relations and a finishing step?",
    "tracking/horizon": "At which length does a trained model go wrong, by what short words say?",
    "tracking/inspect": "What has a trained model learned?",
    "tracking/mixers": "How far do other mixers track S3 after 10,000 updates?",
    "tracking/mixers-small": "How far do other mixers track S3 after 5000 small updates?",
    "tracking/paper": "What does the paper's own protocol give?",
    "tracking/penalties": "Do penalties make S3's rotations close?",
    "tracking/random-keys": "Are S4 and A5 found from random keys?",
    "tracking/settle": "On how many of 60 seeds does S3 stay right to 65,536 letters, no seed dropped?",
    "tracking/short": "What do the four range settings give in fewer updates?",
    "tracking/smoothing": "Do smoothed labels carry S3 further?",
}


# Figures -------------------------------------------------------------------------------------------------------------


def _save(path: Path, figure: Any) -> None:
    figure.savefig(path, dpi=160, metadata={"Software": None})


def _tracking(folder: Path) -> None:
    from ckda.experiments.tracking.command import write_report
    from ckda.experiments.tracking.run import collect

    write_report(collect([folder]), folder, page=False)


def _words(path: Path) -> None:
    """The paper's figure of the word problems: the runs of its protocol that stand in the comparison."""
    from ckda.experiments.tracking.comparison import shown
    from ckda.experiments.tracking.figures import words_figure

    _save(path, words_figure(shown(path.parents[1])))


def _initialization(path: Path) -> None:
    from ckda.experiments.tracking.figures import initialization_figure

    _save(path, initialization_figure())


def _horizon(path: Path) -> None:
    from ckda.experiments.tracking.horizon import horizon_figure

    first, later = (read_json(path.with_name(name)) for name in ("horizon.json", "wide.json"))
    _save(path, horizon_figure(first, later["rows"]))


def _regular(folder: Path) -> None:
    from ckda.experiments.regular.report import write_report
    from ckda.experiments.regular.run import collect

    write_report(collect([folder]), folder)


def _mechanism(path: Path) -> None:
    from ckda.experiments.tracking.figures import mechanism_figure

    _save(path, mechanism_figure(read_json(path.with_suffix(".json"))["mechanism"]))


def _quaternions(path: Path) -> None:
    from ckda.experiments.tracking.figures import quaternions_figure

    _save(path, quaternions_figure(read_json(path.with_name(path.name.replace(".quaternions.png", ".json")))))


def _600_cell(path: Path) -> None:
    from ckda.experiments.tracking.figures import quaternions_figure

    _save(path, quaternions_figure(read_json(path.parents[1] / "inspect/A5-ckda+wide.then=polish.seed22.json")))


def _audio(folder: Path) -> None:
    from ckda.experiments.audio.records import collect, write_summary
    from ckda.experiments.audio.report import draw, markdown

    result = collect([folder])
    write_summary(result, folder)
    write_text(folder / "table.md", markdown(result))
    draw(result, folder)


def _audio_modes(path: Path) -> None:
    from ckda.experiments.audio.inspect import inspect_figure

    _save(path, inspect_figure(read_json(path.with_suffix(".json"))))


def _demo(path: Path) -> None:
    from ckda.experiments.demo import DemoResult
    from ckda.experiments.tracking.figures import extrapolation_figure

    result = DemoResult.from_json(read_json(path.with_name("seed0.json")))
    _save(path, extrapolation_figure(result.scores(), result.recipe["curriculum"][-1]))


def _bench(path: Path) -> None:
    from ckda.bench.command import draw

    draw(read_json(path.with_suffix(".json")), path)


def _throughput(path: Path) -> None:
    from ckda.bench.throughput import draw

    draw(read_json(path.with_suffix(".json")), path)


def _sweep(path: Path) -> None:
    from ckda.bench.sweep import draw

    draw(read_json(path.with_suffix(".json"))["rows"], path)


def _lm(path: Path) -> None:
    from ckda.lm import figures
    from ckda.lm.comparison import Comparison

    draw = {"val_curves.png": figures.comparison_figure, "speed.png": figures.speed_figure}[path.name]
    _save(path, draw(Comparison.load(path.with_name("comparison.json"))))


def _lm_units(path: Path) -> None:
    from ckda.lm.paired import collect
    from ckda.lm.units import read_units

    collect(read_units([path]), path.parent)


def _lm_inspect(path: Path) -> None:
    from ckda.lm.inspect import Inspection, inspect_figure

    _save(path, inspect_figure(Inspection.load(path.with_suffix(".json"))))


def _scaling(path: Path) -> None:
    from ckda.scaling import figures, load_fit
    from ckda.scaling.commands.compare import Comparison

    if path.name == "compare.png":
        picture = figures.beside_paper(Comparison.load(path.with_suffix(".json")))
    else:
        fitted, stored = load_fit(path.with_name("fit.json")), read_json(path.with_name("fit.json"))
        pictures: dict[str, Callable[[], Any]] = {
            "frontier": lambda: figures.frontier(fitted),
            "residuals": lambda: figures.residuals(fitted),
            "advantage": lambda: figures.advantage(fitted, stored["baseline"], stored["noise"]),
        }
        picture = pictures[path.stem.removeprefix("fit_")]()
    figures.save(path, picture)


#: pattern under results/ -> what draws a path that fits; a folder's drawing makes summary, table and figures together
_DRAW: dict[str, Callable[[Path], None]] = {
    "tracking/*/runs": lambda path: _tracking(path.parent),
    "tracking/paper/words.png": _words,
    "tracking/horizon/horizon.png": _horizon,
    "tracking/paper/initialization.png": _initialization,
    "regular/runs": lambda path: _regular(path.parent),
    "tracking/random-keys/600_cell.png": _600_cell,
    "tracking/inspect/*.quaternions.png": _quaternions,
    "tracking/inspect/*.png": _mechanism,
    "audio/*/runs": lambda path: _audio(path.parent),
    "audio/inspect/*.png": _audio_modes,
    "demo/extrapolation.png": _demo,
    "lm/*/units.json": _lm_units,
    "bench/h200.png": _bench,
    "bench/sweep/sweep.png": _sweep,
    "bench/throughput/throughput.png": _throughput,
    "lm/inspect.png": _lm_inspect,
    "lm/*.png": _lm,
    "scaling/compare.png": _scaling,
    "scaling/fit_frontier.png": _scaling,
    "scaling/fit_residuals.png": _scaling,
    "scaling/fit_advantage.png": _scaling,
}


def drawings(results: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """(path, function that draws it) of everything under results/ that is drawn here."""
    seen: set[Path] = set()
    for pattern, draw in _DRAW.items():
        for path in sorted(results.glob(pattern)):
            if path not in seen:
                seen.add(path)
                yield path, draw


def redraw(results: Path) -> None:
    """Draw every figure, and write every summary and table, from the records."""
    for path, draw in drawings(results):
        draw(path)
        print(path.relative_to(results), file=sys.stderr)


# Index ---------------------------------------------------------------------------------------------------------------


def _environments(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "commit" in value and "device" in value:
            yield value
        for part in value.values():
            yield from _environments(part)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for part in value:
            yield from _environments(part)


def index_page(results: Path) -> str:
    """The text of results/README.md: one row a question."""
    rows = []
    for name, question in ABOUT.items():
        records = [path for path in sorted((results / name).rglob("*.json")) if path.name not in _SUMMARIES]
        found = [environment for path in records for environment in _environments(read_json(path))]
        devices = sorted({environment["device"] for environment in found})
        commits = sorted({_commit(environment["commit"]) for environment in found})
        rows.append(
            f"| [{name}]({name}/) | {question} | {len(records)} | {', '.join(devices)} | {', '.join(commits)} |\n"
        )
    return _HEAD + "".join(rows)


def _commit(text: str | None) -> str:
    """Seven letters; what is no commit is a sentence that the record has."""
    return text[:7] if text and re.fullmatch(r"[0-9a-f]{7,40}\+?", text) else "see there" if text else "unknown"


_SUMMARIES = ("track.json", "audio.json", "seeds.json", "suite.json")
_HEAD = """\
# Results

Every measurement that the documents quote, one folder a question. Records are JSON with device, versions, commit and seed, and
are never changed; tables and figures beside them are made from them. `python -m ckda.results` (or `make results`) draws them
again and writes this page; a test fails when it is stale. GPU tests that were run: [gpu_tests.json](gpu_tests.json).

| folder | question | records | devices | commits |
|---|---|---|---|---|
"""


def main() -> int:
    """Draw everything and write the index, in the source tree that this module stands in."""
    results = Path(__file__).parents[1] / "results"
    redraw(results)
    print(write_text(results / "README.md", index_page(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
