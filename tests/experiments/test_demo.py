"""The demo as a user runs it: a smoke run, its files, an interruption, wrong arguments."""

import json
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from ckda import cli
from ckda.experiments.demo import LENGTHS, DemoResult
from ckda.experiments.tracking.figures import cups_strip
from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.run import load_replica
from ckda.experiments.tracking.task import WordProblem, scaled_accuracy
from ckda.layers import RANGES
from ckda.train import Ensemble, Recipe, train

KEPT = Path(__file__).parents[2] / "results/demo"


@pytest.mark.slow
def test_smoke_run_writes_everything(tmp_path, capsys):
    assert cli.main(["demo", "--smoke", "--device", "cpu", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "demo.json").read_text())
    assert set(printed["arms"]) == {"kda", "kda-beta2", "kda-signed", "ckda"}
    assert all(set(arm["scores"]) == {"8", "16", "32", "64"} for arm in printed["arms"].values())
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"<script|<link|(src|href)=.http|@import", page), "the page fetches something"
    assert (tmp_path / "extrapolation.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*.checkpoint.pt"))
    about, task, model = load_replica(tmp_path / "ckda.pt")
    assert (about["mixer"], about["seed"], task.group.name) == ("ckda", 0, "S3")
    assert sum(p.numel() for p in model.parameters()) == printed["arms"]["ckda"]["parameters"]


@pytest.mark.slow
def test_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    arguments = ["demo", "--smoke", "--device", "cpu", "--out", str(tmp_path), "--json"]
    assert cli.main([*arguments[:-2], str(tmp_path / "whole"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    original, calls = Ensemble.train_step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 33:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C would, in the middle of an update
        return original(self)

    monkeypatch.setattr(Ensemble, "train_step", interrupted)
    assert cli.main(arguments) == 130
    assert len(list(tmp_path.glob("*.checkpoint.pt"))) == 4
    assert cli.main(arguments) == 0
    again = capsys.readouterr()
    assert "resuming" in again.err
    scores = {arm: values["scores"] for arm, values in json.loads(again.out)["arms"].items()}
    assert scores == {arm: values["scores"] for arm, values in whole["arms"].items()}


def test_resume_where_one_arm_is_done(tmp_path):
    """An interruption in the last round leaves some arms finished and others not."""
    task = WordProblem.named("S3")
    recipe = Recipe(steps=4, batch=4, curriculum=(4,))
    arms = {arm: Ensemble(partial(build_tracker, arm, task), task, recipe, (0,)) for arm in ("kda", "ckda")}
    for _ in range(4):
        arms["kda"].train_step()
    train(arms, lambda arm: tmp_path / f"{arm}.checkpoint.pt", fresh=True, quiet=True, look_every=10)
    assert arms["kda"].history["loss"] == []
    assert len(arms["ckda"].history["loss"]) == 1


def test_an_unusable_folder_is_said_before_training(tmp_path, assert_refused):
    (tmp_path / "file").write_text("")
    assert_refused(["demo", "--smoke", "--out", str(tmp_path / "file")], "--out")


@pytest.mark.parametrize(
    "wrong", [["--steps", "0"], ["--batch", "x"], ["--device", "tpu"], ["--seed", "-1"], ["--nonsense"]]
)
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *wrong])
    assert stop.value.code == 2
    assert wrong[-1] in capsys.readouterr().err or wrong[0] in capsys.readouterr().err


def test_strip_marks_wrong_answers():
    strip = {
        "first": 1,
        "moves": ["(12)"],
        "rows": [{"label": "model", "states": [[1, 0, 2]], "right": [False]}],
    }
    drawn = cups_strip(strip)
    assert drawn.count("<circle") == 3
    assert drawn.count("<line") == 1


@pytest.mark.parametrize("arm", RANGES)
@pytest.mark.parametrize("seed", [0, 1])
def test_kept_weights_give_the_accuracies_of_their_record(seed, arm):
    """The record's own words, of which the first 64 letters are read."""
    path = KEPT / f"seed{seed}/{arm}.pt"
    assert path.stat().st_size < 2**20
    about, task, model = load_replica(path)
    assert (about["mixer"], about["seed"]) == (arm, seed)
    generator = torch.Generator().manual_seed(1_000_000)
    words = [task.batch(64, max(LENGTHS), generator) for _ in range(4)]
    x, y = (torch.cat(parts) for parts in zip(*words, strict=True))
    with torch.no_grad():
        right = model(x[:, :65])[:, 1:].argmax(-1) == y[:, :64]
    record = DemoResult.from_json(json.loads((KEPT / f"seed{seed}.json").read_text())).arms[arm].scores
    found = scaled_accuracy(right, LENGTHS[:4], task.order)
    assert found == pytest.approx({n: record[n] for n in LENGTHS[:4]}, abs=3e-3)
