"""The records of results/lm: each is read back, and its table and figures are drawn from it alone."""

import statistics
from pathlib import Path

from ckda.lm.comparison import Comparison
from ckda.lm.figures import comparison_figure, speed_figure
from ckda.lm.inspect import Inspection, inspect_figure
from ckda.lm.paired import differences, training_gaps
from ckda.lm.units import read_units
from ckda.record import read_json

RECORDS = Path(__file__).parents[2] / "results" / "lm"


def test_the_comparison_gives_its_table_and_figures() -> None:
    found = Comparison.load(RECORDS / "comparison.json")
    assert found.table() == (RECORDS / "table.md").read_text()
    left, right = comparison_figure(found).axes
    assert len(left.lines) == len(found.runs)
    assert [text.get_text() for text in right.get_yticklabels()] == [
        text.get_text() for text in left.get_legend().texts
    ]
    assert len(speed_figure(found).axes[0].patches) == len({run.arm for run in found.runs})


def test_the_inspection_gives_its_figure() -> None:
    found = Inspection.load(RECORDS / "inspect.json")
    assert len(inspect_figure(found).axes) >= 5
    assert len(found.checkpoints[-1].layers) == 12


def test_the_corpus_is_told_as_its_manifest_has_it() -> None:
    page = (RECORDS / "README.md").read_text()
    manifest = read_json(RECORDS / "corpus" / "manifest.json")
    assert manifest["tokens"]["train"] >= 55_000_000
    assert manifest["packed_bytes"] <= 46 * 2**20
    for split, tokens in manifest["tokens"].items():
        assert f"| {manifest['documents'][split]:,} | {tokens:,} |" in page
    told = {name.replace("_", " "): f"{size / 1e6:.1f} MB" for name, size in manifest["text_bytes_by_kind"].items()}
    assert ", ".join(f"{name} {size}" for name, size in told.items()) in page
    assert f"{manifest['dropped']['equal']} equal and {manifest['dropped']['near']:,} near ones" in page
    assert f"{manifest['packed_mib']} MiB" in page
    assert all(row["licence"] and row["version"] for row in manifest["sources"])


def test_the_ladders_numbers_are_those_of_its_units() -> None:
    text, table = (RECORDS / "README.md").read_text(), (RECORDS / "ladder" / "table.md").read_text()
    records = read_units([RECORDS / "ladder" / "units.json"])
    for name, words in (("held_out", "held-out loss"), ("out_of_domain", "out-of-domain loss")):
        (found,) = differences(records, name=name)
        assert len(found.seeds) == 8
        assert found.low is not None
        assert found.high is not None
        means = [
            statistics.fmean(one["cells"][0][name] for one in records if one["unit"]["model"] == f"own-12M:{arm}")
            for arm in ("kda", "ckda")
        ]
        row = [*(f"{mean:.4f}" for mean in means), *(f"{x:+.4f}" for x in (found.mean, found.low, found.high))]
        assert f"| {words} | {' | '.join(row)} |" in text
    for line in table.split("\n\n")[2].splitlines()[2:]:
        _, tokens, _, _, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
        assert f"| {tokens} | {' | '.join(numbers)} |" in text
    (gap,) = training_gaps(records).values()
    tokens, each = max(gap, key=lambda piece: statistics.fmean(piece[1]))
    assert f"widest at {tokens / 1e6:.1f}M tokens ({statistics.fmean(each):.2f})" in " ".join(text.split())
    assert "(95%: 0.050 to 0.151)" in (RECORDS.parents[1] / "README.md").read_text()


def test_the_sweeps_numbers_are_those_of_its_units() -> None:
    text = (RECORDS / "README.md").read_text().replace("**", "")
    losses = {
        (one["unit"]["lr"], one["unit"]["batch"]): one["cells"][0]["held_out"]
        for one in read_units([RECORDS / "sweep" / "units.json"])
    }
    assert min(losses, key=losses.__getitem__) == (0.004, 16)
    for lr in (0.001, 0.002, 0.004):
        assert f"| {lr} | {losses[lr, 16]:.4f} | {losses[lr, 32]:.4f} |" in text


def test_the_start_is_told_as_its_record_has_it() -> None:
    text = (RECORDS / "README.md").read_text()
    half = read_units([RECORDS / "start" / "ckda-half.json"])[0]["curve"]
    ladder = read_units([RECORDS / "ladder" / "units.json"])
    kda, ckda = (
        next(one["curve"] for one in ladder if (one["unit"]["model"], one["unit"]["seed"]) == (f"own-12M:{arm}", 0))
        for arm in ("kda", "ckda")
    )
    for i, tokens in enumerate(kda["tokens"][:6]):
        piece = [place for place, read in enumerate(half["tokens"]) if tokens - 163_840 < read <= tokens]
        loss, norm = (statistics.fmean(half[name][place] for place in piece) for name in ("loss", "grad_norm"))
        losses = [kda["loss"][i], loss, ckda["loss"][i]]
        norms = [kda["grad_norm"][i], norm, ckda["grad_norm"][i]]
        row = [f"{tokens / 1e6:.2f}M", *(f"{x:.3f}" for x in losses), *(f"{x:.2f}" for x in norms)]
        assert f"| {' | '.join(row)} |" in text
