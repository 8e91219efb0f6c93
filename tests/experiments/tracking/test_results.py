"""What the repository keeps of ``ckda track``: the records, and what is drawn from them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckda.cli import main
from ckda.experiments.tracking.figures import PUBLISHED, groups_figure, mechanism_figure, quaternions_figure
from ckda.experiments.tracking.lottery import lottery
from ckda.experiments.tracking.run import TrackRun, collect, load_replica

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "results/state_tracking"


@pytest.fixture(scope="module")
def kept():
    return collect([KEPT]).runs


def test_kept_table_and_numbers_are_those_of_the_records(tmp_path, capsys):
    assert main(["track", "--collect", str(KEPT), "--out", str(tmp_path)]) == 0
    for name in ("table.md", "track.json"):
        assert (tmp_path / name).read_bytes() == (KEPT / name).read_bytes(), name


def test_kept_records_are_drawn_seed_by_seed(kept):
    panels = groups_figure(collect([KEPT])).axes
    assert [axes.get_title() for axes in panels] == ["A5", "S3"]
    for axes in panels:
        drawn = [list(line.get_ydata()) for line in axes.get_lines()]
        for name, run in kept.items():
            if run.group == axes.get_title():
                lengths = sorted(run.scores)
                for r in range(3):
                    assert [run.scores[n][r] for n in lengths] in drawn, (name, r)


def test_kept_records_hold_three_seeds_and_say_where_from(kept):
    first = {"A5-ckda+theory", "S3-ckda+fast"}
    for name, run in kept.items():
        assert run.seeds == [0, 1, 2], name
        assert "H200" in run.environment["device"], name
        assert run.environment["commit"][:7] == ("30fcceb" if name in first else "a28d1d5"), name


def test_docs_quote_the_kept_scores(kept):
    """The rows of the table in docs/tracking.md, to the digits they give."""
    text = (ROOT / "docs/tracking.md").read_text()
    for recipe in ("fast", "closure", "closure-strong", "closure-alone", "defect"):
        row = re.search(rf"^\| S3,.*`{recipe}` \| \d+ \| (.*)$", text, flags=re.M)
        assert row, recipe
        for length, cell in zip((32, 128, 512, 4096, 65_536), row[1].split(" | "), strict=False):
            said = cell.split(", ")
            for word, value in zip(said, kept[f"S3-ckda+{recipe}"].scores[length], strict=True):
                digits = len(word.partition(".")[2]) or 3
                assert float(word) == pytest.approx(value, abs=0.501 * 10**-digits), (recipe, length)


def test_two_recipes_are_right_at_4096_on_every_seed_and_none_at_65536(kept):
    def on_every_seed(length, least):
        return {r.recipe_name for r in kept.values() if r.group == "S3" and min(r.scores[length]) >= least}

    assert on_every_seed(4096, 0.999) == {"closure", "closure-strong"}
    assert on_every_seed(65_536, 0.9) == set()


@pytest.mark.parametrize("name", ["S3-ckda+fast.seed1", "S3-ckda+closure-strong.seed0"])
def test_kept_findings_can_be_drawn(name):
    seen = json.loads((KEPT / f"inspect/{name}.json").read_text())
    assert seen["representation"]["told_apart"] == 6
    assert f"head {seen['mechanism']['head']} works" in mechanism_figure(seen["mechanism"]).axes[0].get_title()


def test_a5_from_random_keys():
    """What README and docs say of it, from the records: five of twelve seeds right at 32, the best one far beyond."""
    scores = json.loads((KEPT / "a5/runs/A5-ckda+quarters+short+many.json").read_text())["scores"]
    assert [seed for seed, value in enumerate(scores["32"]) if value > 0.999] == [0, 5, 7, 8, 9]
    assert scores["512"][0] > 0.9995
    assert scores["4096"][0] == pytest.approx(0.990, abs=5e-4)
    seen = json.loads((KEPT / "inspect/A5-ckda+quarters+short+many.seed0.json").read_text())
    for seed, value in enumerate(scores["32"]):
        heads = seen["quaternions_by_seed"][str(seed)]
        assert (len(heads) >= 2) == (value > 0.95), seed
        assert len({head["rotations"] for head in heads}) <= 1, seed


def test_the_kept_keys_can_be_drawn():
    seen = json.loads((KEPT / "inspect/A5-ckda+quarters+short+many.seed0.json").read_text())
    left, right = quaternions_figure(seen).axes
    assert "60 keys" in left.get_title()
    exact, learned = right.get_lines()[0].get_data()
    assert len(exact) == 60 * 59 // 2
    assert max(abs(a - b) for a, b in zip(exact, learned, strict=True)) == pytest.approx(
        seen["quaternions"][0]["worst"], rel=1e-3
    )


def test_a_known_commit_is_kept_and_a_copy_s_is_replaced(tmp_path, capsys):
    run = json.loads((KEPT / "ten/runs/S3-ckda.json").read_text())
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
    assert main(["track", "--collect", str(KEPT / "mixers_10k"), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {"1.000", "0.459", "0.884", "-0.036"} <= set(shown.split())


def test_no_two_runs_of_a_panel_look_alike():
    result = collect([KEPT / "mixers_10k"])
    (axes,) = groups_figure(result).axes
    named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert len(named) == len(result.runs) == 17
    assert len({(line.get_color(), line.get_linestyle()) for line in named}) == 17


def test_s4_with_cycled_momentum():
    """What docs, README and LOG say of it, from the records."""
    chances = {"cycled": json.loads((KEPT / "momentum_cycled/seeds.json").read_text())["runs"]["S4-ckda"]}
    for name, folders in {"cycled": ["momentum_cycled"], "constant": ["ranges", "ten"]}.items():
        runs = [TrackRun.from_json(json.loads((KEPT / f"{x}/runs/S4-ckda.json").read_text())) for x in folders]
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
    text = (ROOT / "docs/tracking.md").read_text()
    for one in (cycled, constant):
        said = " to ".join(f"{p:.2f}"[1:] for p in one["found"]["interval"])
        assert f"{one['found']['count'] / one['found']['of']:.2f}"[1:] + ", " + said in text


@pytest.mark.parametrize("seed", [1, 4, 6, 9, 17, 18])
def test_kept_weights_are_read_and_right_at_the_training_length(seed):
    _, task, model = load_replica(KEPT / f"momentum_cycled/weights/S4-ckda.seed{seed}.pt", seed)
    x, y = task.batch(32, 32, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert (model(x)[:, 1:].argmax(-1) == y).double().mean() > 0.99
