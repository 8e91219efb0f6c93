"""What the repository keeps of ``ckda track``: the records, and what is drawn from them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckda.cli import main
from ckda.experiments.tracking.comparison import ROWS, comparison, shown
from ckda.experiments.tracking.figures import (
    PUBLISHED,
    _starts,
    groups_figure,
    initialization_figure,
    mechanism_figure,
    published,
    quaternions_figure,
    words_figure,
)
from ckda.experiments.tracking.lottery import binomial_interval, lottery
from ckda.experiments.tracking.quaternions import quaternion_heads, rotations
from ckda.experiments.tracking.run import TrackRun, collect, keep_replica, load_replica, title
from ckda.layers.mixers import MIXERS
from ckda.page import markdown_table

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "results/tracking"


@pytest.fixture(scope="module")
def kept():
    return collect([KEPT / "penalties"]).runs


def test_collecting_leaves_records_as_they_are(tmp_path, capsys):
    assert main(["track", "--collect", str(KEPT / "penalties"), "--out", str(tmp_path)]) == 0
    records = sorted((KEPT / "penalties/runs").glob("*.json"))
    assert len(records) == 11
    for path in [*records, KEPT / "penalties/table.md", KEPT / "penalties/track.json"]:
        assert (tmp_path / path.relative_to(KEPT / "penalties")).read_bytes() == path.read_bytes(), path


def test_kept_records_are_drawn_seed_by_seed(kept):
    panels = groups_figure(collect([KEPT / "penalties"])).axes
    assert [axes.get_title() for axes in panels] == ["A5", "S3"]
    for axes in panels:
        drawn = [list(line.get_ydata()) for line in axes.get_lines()]
        for name, run in kept.items():
            if run.group == axes.get_title():
                lengths = sorted(run.scores)
                for r in range(3):
                    assert [run.scores[n][r] for n in lengths] in drawn, (name, r)


def test_kept_records_hold_three_seeds_and_say_where_from(kept):
    for name, run in kept.items():
        assert run.seeds == [0, 1, 2], name
        assert "H200" in run.environment["device"], name
        assert name == run_name(run) or name == f"{run_name(run)}@{run.environment['commit'][:7]}", name


def run_name(run):
    """What the record of a run is called."""
    return title(run.group, run.mixer, run.recipe_now)


@pytest.mark.parametrize(
    "question", ["paper", "short", "mixers", "mixers-small", "penalties", "find-s4", "random-keys"]
)
def test_records_are_named_by_what_they_hold(question):
    for name, run in collect([KEPT / question]).runs.items():
        assert name.partition("@")[0] == run_name(run)


ROW = r"^\| (\w+) \| \[`[^`]+`\]\(([^)]+\.json)\) \| (.*) \|$"


def test_every_row_of_the_readme_is_that_of_its_record():
    """The tables of results/tracking/README.md: updates, seeds, seeds right at 32, the best seed by length, the lowest ones."""
    rows = re.findall(ROW, (KEPT / "README.md").read_text(), flags=re.M)
    said = {path for _, path, _ in rows}
    assert said == {str(path.relative_to(KEPT)) for path in KEPT.glob("*/runs/*.json")}
    for group, path, cells in rows:
        run = TrackRun.from_json(json.loads((KEPT / path).read_text()))
        score = [run.at(n) if n in run.scores else None for n in (32, 128, 512, 4096, 65_536)]
        many = len(run.seeds) > 1
        lowest = [min(run.scores[n]) if many and n in run.scores else None for n in (512, 4096)]
        found = sum(value >= 0.999 for value in run.scores[32])
        expected = [run.recipe["steps"], len(run.seeds), found, *score, *lowest]
        values = [float(cell) if cell.strip() else None for cell in cells.split(" | ")]
        assert group == run.group
        assert len(values) == len(expected), path
        for value, wanted in zip(values, expected, strict=True):
            assert (value is None) == (wanted is None), path
            assert value is None or value == pytest.approx(wanted, abs=5.01e-4), path


def test_two_recipes_are_right_at_4096_on_every_seed_and_none_at_65536(kept):
    def on_every_seed(length, least):
        first = [r for name, r in kept.items() if name.endswith("@a28d1d5")]
        return {r.recipe_name for r in first if min(r.scores[length]) >= least}

    assert on_every_seed(4096, 0.999) == {"closure", "closure-strong"}
    assert on_every_seed(65_536, 0.9) == set()


@pytest.mark.parametrize(
    "name", ["S3-ckda+fast+momentum=0.95.seed1", "S3-ckda+penalty=closure-strong+steps=4k+momentum=0.95.seed0"]
)
def test_kept_findings_can_be_drawn(name):
    seen = json.loads((KEPT / f"inspect/{name}.json").read_text())
    assert seen["representation"]["told_apart"] == 6
    assert f"head {seen['mechanism']['head']} works" in mechanism_figure(seen["mechanism"]).axes[0].get_title()


def test_a5_from_random_keys():
    """What README and docs say of it, from the records: five of twelve seeds right at 32, the best one far beyond."""
    scores = json.loads((KEPT / "random-keys/runs/A5-ckda+orthogonal.json").read_text())["scores"]
    assert [seed for seed, value in enumerate(scores["32"]) if value > 0.999] == [0, 5, 7, 8, 9]
    assert scores["512"][0] > 0.9995
    assert scores["4096"][0] == pytest.approx(0.990, abs=5e-4)
    seen = json.loads((KEPT / "inspect/A5-ckda+orthogonal.seed0.json").read_text())
    for seed, value in enumerate(scores["32"]):
        heads = seen["quaternions_by_seed"][str(seed)]
        assert (len(heads) >= 2) == (value > 0.95), seed
        assert len({head["rotations"] for head in heads}) <= 1, seed


def test_the_600_cell_is_that_of_kept_weights():
    """The drawn head is the best of the record, and its keys are those of the kept file."""
    name = "A5-ckda+wide.then=polish.seed22"
    seen = json.loads((KEPT / f"inspect/{name}.json").read_text())
    _, task, model = load_replica(KEPT / f"counts/weights/{name}.pt")
    head = quaternion_heads(model, task, rotations(task.group))[0]
    best = seen["quaternions"][0]
    assert (head.head, head.rotations) == (best["head"], best["rotations"])
    assert (head.worst, head.error) == pytest.approx((best["worst"], best["error"]), rel=1e-2)
    left, right = quaternions_figure(seen).axes
    assert "60 keys" in left.get_title()
    exact, learned = right.get_lines()[0].get_data()
    assert len(exact) == 60 * 59 // 2
    assert max(abs(a - b) for a, b in zip(exact, learned, strict=True)) == pytest.approx(
        seen["quaternions"][0]["worst"], rel=1e-3
    )


def test_a_known_commit_is_kept_and_a_copy_s_is_replaced(tmp_path, capsys):
    run = json.loads((KEPT / "paper/runs/S3-ckda+momentum=0.95@4590aa4.json").read_text())
    for name, commit in (("S3-ckda", "abc"), ("S3-kda", "abc+"), ("S4-ckda", None)):
        group, mixer = name.split("-", 1)
        one = run | {"group": group, "mixer": mixer, "environment": run["environment"] | {"commit": commit}}
        path = tmp_path / f"a/runs/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))
    assert main(["track", "--collect", str(tmp_path / "a"), "--trained-at", "def", "--out", str(tmp_path / "b")]) == 0
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "b/runs").glob("*.json")}
    commits = {name: one["environment"]["commit"] for name, one in found.items()}
    assert commits == {"S3-ckda": "abc", "S3-kda": "def", "S4-ckda": "def"}


def test_the_table_keeps_its_numbers_on_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["track", "--collect", str(KEPT / "mixers"), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {"1.000", "0.459", "0.884", "-0.036"} <= set(shown.split())


def test_no_two_runs_of_a_panel_look_alike():
    result = collect([KEPT / "mixers"])
    (axes,) = groups_figure(result).axes
    named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert len(named) == len(result.runs) == 17
    assert len({(line.get_color(), line.get_linestyle()) for line in named}) == 17
    assert axes.get_title() == "S3, steps=10k+momentum=0.95"
    assert {line.get_label() for line in named} <= {mixer.label for mixer in MIXERS.values()}


@pytest.mark.parametrize("folder", ["mixers", "mixers-small"])
def test_which_mixers_have_no_run(folder):
    section = (KEPT / "README.md").read_text().partition(f"## {folder}:")[2].partition("## ")[0]
    tried = {run.mixer for run in collect([KEPT / folder]).runs.values()}
    missing = ", ".join(f"`{name}`" for name in MIXERS if name not in tried)
    assert f"Of the {len(MIXERS)} mixers these have no run here: {missing}." in " ".join(section.split())


def test_s4_with_cycled_momentum():
    """What docs, README and LOG say of it, from the records."""
    chances = {"cycled": json.loads((KEPT / "paper/seeds.json").read_text())["runs"]["S4-ckda"]}
    paper = collect([KEPT / "paper"]).runs
    for name in ("cycled", "constant"):
        wanted = "paper" if name == "cycled" else "momentum=0.95"
        runs = [run for run in paper.values() if (run.group, run.mixer, run.recipe_now) == ("S4", "ckda", wanted)]
        runs.sort(key=lambda run: run.seeds)
        assert all(run.recipe.get("momentum", 0.95) == ("cycled" if name == "cycled" else 0.95) for run in runs)
        seeds = [seed for run in runs for seed in run.seeds]
        scores = {n: [v for run in runs for v in run.scores[n]] for n in (32, 128, 512)}
        found = lottery(replace(runs[0], seeds=seeds, scores=scores), PUBLISHED["S4"]["ckda"])
        assert found == chances.setdefault(name, found)
    cycled, constant = (chances[name] for name in ("cycled", "constant"))
    assert cycled["found"]["seeds"] == [1, 4, 6, 9, 17, 18]
    assert constant["found"]["seeds"] == [6, 7]
    assert cycled["reaches_published"]["seeds_with_all"]["seeds"] == [1, 6, 17, 18]
    for way in ("one_seed", "by_length"):
        assert cycled["first_three"][way] == pytest.approx([1, 0.999, 0.510], abs=5e-4)
        assert cycled["reaches_published"][way] == pytest.approx(0.44, abs=5e-3)
        assert constant["reaches_published"][way] == 0
    text = (KEPT / "README.md").read_text()
    both = [one["found"] for one in (cycled, constant)]
    for head, cells in {
        "seeds": [str(one["of"]) for one in both],
        "seeds that find it": [str(one["count"]) for one in both],
        "which": [", ".join(map(str, one["seeds"])) for one in both],
        "their share": [f"{one['count'] / one['of']:.2f}"[1:] for one in both],
        "its 95% interval (Clopper and Pearson)": [
            " to ".join(f"{p:.2f}"[1:] for p in one["interval"]) for one in both
        ],
    }.items():
        assert f"| {head} | {' | '.join(cells)} |" in text


def test_counts_of_24_seeds():
    """results/tracking/README.md: how many seeds have a score at a length, and the interval of their share."""
    text, runs = (KEPT / "README.md").read_text(), collect([KEPT / "counts"]).runs
    assert len(runs) == 5
    for name, run in runs.items():
        assert run.seeds == run.begun_seeds == list(range(24))
        for least in (0.999, 0.99, 0.9):
            cells = []
            for n in (32, 512, 4096, 65_536):
                found = sum(value >= least for value in run.scores.get(n, []))
                low, high = binomial_interval(found, 24)
                cells += [str(found), f"{low:.2f} to {high:.2f}"] if n in run.scores else ["", ""]
            assert f"| `{name}` | {least} | {' | '.join(cells)} |" in text, (name, least)
    near = sum(value >= 0.998 for value in runs["A5-ckda+wide.then=polish"].scores[32])
    assert f"| {near} after `polish`" in text


def test_counts_of_settled_seeds():
    """results/tracking/README.md: S3 at 65,536 letters before and after `settle`, on the seeds it was made on and on fresh ones."""
    text, runs = (KEPT / "README.md").read_text(), list(collect([KEPT / "settle"]).runs.values())
    after = [run for run in runs if "settle" in run.recipe_name]
    assert sorted(seed for run in after for seed in run.seeds) == list(range(60))
    for part in (*([run] for run in runs), after):
        seeds = sum(len(run.seeds) for run in part)
        found = [sum(score >= 0.999 for run in part for score in run.scores[n]) for n in (32, 512, 4096, 65_536)]
        low, high = binomial_interval(found[-1], seeds)
        assert f"| {seeds} | {' | '.join(map(str, found))} | {low:.2f} to {high:.2f} |" in text


@pytest.mark.parametrize("path", sorted((KEPT / "counts/weights").glob("*.pt")), ids=lambda path: path.stem)
def test_weights_of_the_best_of_24_seeds(path):
    about, task, model = load_replica(path)
    assert path.stat().st_size < 2**20
    run = TrackRun.from_json(json.loads((KEPT / f"counts/runs/{path.stem.rpartition('.')[0]}.json").read_text()))
    assert about["seed"] == run.seeds[run.best]
    x, y = task.batch(16, 32, torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert (model(x)[:, 1:].argmax(-1) == y).double().mean() > 0.99


@pytest.mark.parametrize(
    "name",
    [
        "A5-ckda+theory+init=quaternions-begin.seed2",
        "S3-ckda.seed1",
        *(f"S4-ckda.seed{seed}" for seed in (1, 4, 6, 9, 17, 18)),
    ],
)
def test_kept_weights_are_read_and_right_at_the_training_length(name):
    seed = int(name.rpartition("seed")[2])
    _, task, model = load_replica(KEPT / f"paper/weights/{name}.pt", seed)
    x, y = task.batch(32, 32, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert (model(x)[:, 1:].argmax(-1) == y).double().mean() > 0.99


def test_one_seed_of_a_run_is_kept(tmp_path):
    path = KEPT / "paper/weights/S4-ckda.seed18.pt"
    saved = torch.load(path, weights_only=True)
    two = {name: torch.cat([torch.zeros_like(p), p]) for name, p in saved["parameters"].items()}
    torch.save(saved | {"seeds": [3, 18], "best": 1, "parameters": two}, tmp_path / "S4-ckda.pt")
    kept = keep_replica(tmp_path / "S4-ckda.pt", tmp_path / "kept")
    assert kept.name == "S4-ckda.seed18.pt"
    for (_, _, one), (_, _, other) in [(load_replica(kept), load_replica(path))]:
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert keep_replica(tmp_path / "S4-ckda.pt", tmp_path, 3).name == "S4-ckda.seed3.pt"


def test_spreads_are_what_the_paper_says():
    """Half of the gates negative; learning rates with two modes near .5 and 1.5 (app:initialization, fig:initialization)."""
    gates, rates = _starts(4, 64)
    assert (gates["standard"] > 0).all()
    assert (gates["spread"] < 0).mean() == pytest.approx(0.5, abs=0.1)
    assert abs(rates["standard"] - 1).mean() < 0.3
    low = rates["spread"] < 1
    assert rates["spread"][low].mean() == pytest.approx(0.5, abs=0.2)
    assert rates["spread"][~low].mean() == pytest.approx(1.5, abs=0.2)
    assert len(initialization_figure(2, 8).axes) == 2


def test_the_paper_s_figure_shows_the_best_of_three_both_ways():
    """Dots: the maximum at each length, as published; the thick line: the one seed that is best at 512; the rest is thin."""
    runs = shown(KEPT)
    figure = words_figure(runs)
    assert [axes.get_title() for axes in figure.axes] == ["S3", "S4", "A5"]
    for axes in figure.axes:
        chosen = [run for run in runs if run.group == axes.get_title()]
        lines = axes.get_lines()
        for run in chosen:
            three = lottery(run, published(run))["first_three"]
            (dots,) = [
                line for line in lines if line.get_marker() == "o" and line.get_ydata()[-1] == three["by_length"][-1]
            ]
            drawn = dict(zip(dots.get_xdata(), dots.get_ydata(), strict=True))
            assert [drawn[n] for n in (32, 128, 512)] == three["by_length"]
            thick = [line for line in lines if line.get_linewidth() > 2 and line.get_color() == dots.get_color()]
            assert [line.get_ydata()[-1] for line in thick] == [three["one_seed"][-1]]
        assert len(lines) == sum(len(run.seeds) + 2 for run in chosen) + 1
    assert all(run.recipe.get("momentum") == "cycled" for run in runs if run.group == "A5")


def test_the_paper_s_figures_beside_our_records():
    """Every cell of fig:group_word_problems and fig:group_word_problems_baselines is in the README, or why it is not."""
    head, rows = comparison(KEPT)
    assert markdown_table(head, rows) in (KEPT / "README.md").read_text()
    assert {(row.group, row.arm) for row in ROWS} >= {(group, arm) for group in PUBLISHED for arm in PUBLISHED[group]}
    for row, cells in zip(ROWS, rows, strict=True):
        assert all(cells[2:8]) or row.why, "an empty cell says why"
