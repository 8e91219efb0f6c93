"""``ckda track`` from the outside."""

import argparse
import hashlib
import json
import signal

import pytest
import torch

from ckda.cli import main
from ckda.experiments.tracking.command import _adviser, _quick_hint
from ckda.experiments.tracking.run import TrackConfig, run
from ckda.layers import MIXERS
from ckda.train import Ensemble

SMOKE = ["track", "--smoke", "--device", "cpu"]


@pytest.mark.slow
def test_smoke_run_leaves_everything_and_is_read_back(tmp_path, capsys):
    command = [*SMOKE, "S3", "parity", "--mixer", "ckda,gdn2", "--seeds", "2", "--out", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["runs"]) == ["S3-ckda+smoke", "S3-gdn2+smoke", "parity-ckda+smoke", "parity-gdn2+smoke"]
    assert len(result["runs"]["S3-ckda+smoke"]["scores"]["32"]) == 2
    assert result["runs"]["S3-ckda+smoke"]["parameters"] == 56_530
    for name in (
        "track.json",
        "track.png",
        "table.md",
        "report.html",
        "seeds.json",
        "runs/S3-ckda+smoke.json",
        "runs/S3-ckda+smoke.pt",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert not list(tmp_path.glob("runs/*.checkpoint.pt"))
    stamp = (tmp_path / "runs/S3-ckda+smoke.json").stat().st_mtime_ns
    assert main(command) == 0
    assert (tmp_path / "runs/S3-ckda+smoke.json").stat().st_mtime_ns == stamp  # nothing was trained again
    assert "S3 ckda" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["all"])
def test_every_mixer_trains(tmp_path, mixer, capsys):
    assert main([*SMOKE, "Z2", "--mixer", mixer, "--seeds", "1", "--out", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["mixer"] for run in runs.values()} == set(MIXERS)
    assert all(run["scores"]["32"][0] is not None for run in runs.values())


@pytest.mark.slow
def test_every_recipe_runs(tmp_path, capsys):
    plain = ["S3", "--recipe", "paper,closure,homomorphism,silu+short+culled,generators,half,silu-keys"]
    assert main([*SMOKE, *plain, "--seeds", "1", "--out", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    name = "S3-ckda+curriculum=from-2+silu=qkv+steps=30k+batch=256+keep=3-of-24+momentum=0.95+smoke"
    assert len(runs[name]["begun_seeds"]) == 3
    assert len(runs[name]["seeds"]) == 1
    assert main([*SMOKE, "A5", "--recipe", "theory", "--seeds", "1", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["A5-ckda+theory+smoke"]["recipe"]["steps"] == 10


def test_settings_are_part_of_the_name(tmp_path, capsys):
    command = [*SMOKE, "Z2", "--recipe", "paper,quarters", "--seeds", "1", "--out", str(tmp_path), "--json"]

    def recipes(*options):
        assert main([*command, *options]) == 0
        return {name: run["recipe"] for name, run in json.loads(capsys.readouterr().out)["runs"].items()}

    plain = recipes()
    assert {name: recipe["momentum"] for name, recipe in plain.items()} == {
        "Z2-ckda+smoke": "cycled",
        "Z2-ckda+init=orthogonal-quarter+steps=30k+momentum=0.95+smoke": 0.95,
    }
    changed = recipes("--momentum", "0.95", "--lr-muon", "0.005", "--lr-adamw", "0.001")
    assert list(changed) == [
        "Z2-ckda+momentum=0.95+lr-muon=0.005+lr-adamw=0.001+smoke",
        "Z2-ckda+init=orthogonal-quarter+steps=30k+momentum=0.95+lr-muon=0.005+lr-adamw=0.001+smoke",
    ]
    for recipe in changed.values():
        assert (recipe["lr_muon"], recipe["lr_adamw"], recipe["momentum"]) == (0.005, 0.001, 0.95)
    assert recipes("--momentum", "cycled").keys() == {
        "Z2-ckda+momentum=cycled+smoke",
        "Z2-ckda+init=orthogonal-quarter+steps=30k+momentum=cycled+smoke",
    }


@pytest.mark.slow
def test_training_goes_on_from_weights(tmp_path, capsys, assert_refused):
    first = [*SMOKE, "S3", "--recipe", "relations", "--seeds", "2", "--out", str(tmp_path / "first"), "--json"]
    assert main(first) == 0
    weights = tmp_path / "first/runs/S3-ckda+penalty=relations+momentum=0.95+smoke.pt"
    again = ["--recipe", "sharpen", "--from", str(weights), "--out", str(tmp_path / "on"), "--json"]
    assert main([*SMOKE, "S3", *again, "--seeds", "1", "--seed", "1"]) == 0
    record = json.loads((tmp_path / "on/runs/S3-ckda+finish+smoke.json").read_text())
    assert len(record["key"]["began_from"]) == 16
    capsys.readouterr()
    assert main([*SMOKE, "S3", *again, "--fresh"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["S3-ckda+finish+smoke"]["seeds"] == [0, 1]
    assert main([*SMOKE, "S3", *again, "--fresh", "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["S3-ckda+finish+smoke"]["seeds"] == [1]
    assert_refused([*SMOKE, "S3", *again, "--seed", "5"], "has no seed 5; it has 0, 1")
    assert_refused([*SMOKE, "S3", *again, "--recipe", "culled+sharpen"], "nothing to restart")
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(weights.read_bytes()[:1000])
    assert_refused([*SMOKE, "S3", "--recipe", "sharpen", "--from", str(damaged)], "holds no weights")
    assert_refused([*SMOKE, "S3", *again, "--seeds", "3"], "has no seed 2; it has 0, 1")
    assert_refused([*SMOKE, "S4", *again, "--seeds", "1"], "no weights of this group and mixer")


def test_one_command_trains_and_goes_on_from_its_own_weights(tmp_path, capsys, assert_refused):
    """A run of its own each: the first may be there already, and the second begins from its very weights."""
    command = [*SMOKE, "Z3", "--seeds", "2", "--lengths", "8", "--out", str(tmp_path), "--json", "--recipe"]
    assert main([*command, "quick+smoothing=0.1"]) == 0
    first, second = "Z3-ckda+quick+smoothing=0.1+smoke", "Z3-ckda+quick+smoothing=0.1.then=polish+smoke"
    stamp = (tmp_path / f"runs/{first}.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main([*command, "quick+smoothing=0.1+then=polish"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == [first, second]
    assert (tmp_path / f"runs/{first}.json").stat().st_mtime_ns == stamp
    record = json.loads((tmp_path / f"runs/{second}.json").read_text())
    weights = (tmp_path / f"runs/{first}.pt").read_bytes()
    assert record["key"]["began_from"] == hashlib.sha256(weights).hexdigest()[:16]
    assert record["seeds"] == [0, 1]
    assert record["key"]["task"]["smoothing"] == 0.1
    assert record["recipe"]["penalties"] == {"sampled": 0.1}
    assert main([*command, "quick+then=polish", "--time-limit", "0"]) == 3
    assert list(json.loads(capsys.readouterr().out)["absent"]) == ["Z3-ckda+quick+smoke"]
    assert_refused([*command, "closed+then=finish"], "of which no seed is dropped")
    assert_refused([*command, "quick+then=closed"], "there are then=finish, then=polish")
    assert_refused([*command, "quick+then=polish", "--mixer", "gru"], "needs A, b, start of the transition")
    assert_refused([*command, "quick+then=settle", "--mixer", "kda-softplus"], "begin=snapped moves bounded gates")
    assert main([*command, "quick+smoothing=0.1+then=settle"]) == 0
    settled = json.loads((tmp_path / f"runs/{second.replace('polish', 'settle')}.json").read_text())
    assert settled["recipe"]["penalties"] == {"closure": 1.0}
    assert settled["key"]["began_from"] == record["key"]["began_from"]


def without_times(result):
    return {
        name: {k: v for k, v in run.items() if k not in ("train_seconds", "environment")}
        for name, run in result["runs"].items()
    }


@pytest.mark.parametrize("recipe", ["paper", "reflections+culled+closure-late"])
def test_a_killed_run_ends_as_an_unbroken_one(tmp_path, monkeypatch, capsys, recipe):
    command = [*SMOKE, "S3", "--recipe", recipe, "--seeds", "2", "--json", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    whole = json.loads(capsys.readouterr().out)
    original, calls = Ensemble.update, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C would, in the middle of an update
        return original(self)

    monkeypatch.setattr(Ensemble, "update", interrupted)
    assert main([*command, str(tmp_path / "broken")]) == 130
    assert len(list((tmp_path / "broken/runs").glob("*.checkpoint.pt"))) == 1
    assert main([*command, str(tmp_path / "broken")]) == 0
    again = capsys.readouterr()
    assert "resuming" in again.err
    assert without_times(json.loads(again.out)) == without_times(whole)
    names = [path.name for path in (tmp_path / "whole/runs").glob("*.pt")]
    for name in names:
        a, b = (torch.load(tmp_path / folder / "runs" / name, weights_only=True) for folder in ("whole", "broken"))
        assert all(torch.equal(p, b["parameters"][k]) for k, p in a["parameters"].items())


def test_the_time_limit_stops_with_status_three(tmp_path, capsys):
    command = [*SMOKE, "S3", "--out", str(tmp_path), "--json"]
    assert main([*command, "--time-limit", "0"]) == 3
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["runs"] == {}
    assert stopped["absent"]["S3-ckda+smoke"].startswith(
        "stopped at the time limit, at update 1 of 10; then right at length 6: "
    )
    assert main(command) == 0
    assert "resuming S3-ckda+smoke at update 1" in capsys.readouterr().err


def test_a_damaged_record_stays_until_asked(tmp_path, capsys, assert_refused):
    command = [*SMOKE, "Z2", "--seeds", "1", "--out", str(tmp_path), "--json"]
    assert main(command) == 0
    record = tmp_path / "runs/Z2-ckda+smoke.json"
    record.write_text("{")
    assert_refused(command, r"cannot be read .* --fresh")
    assert record.read_text() == "{"
    assert main([*command, "--fresh"]) == 0
    assert json.loads(record.read_text())["order"] == 2


def test_a_finished_run_of_other_settings_is_refused(tmp_path, capsys, assert_refused):
    command = [*SMOKE, "Z2", "--out", str(tmp_path), "--json"]
    assert main([*command, "--seeds", "1"]) == 0
    weights = (tmp_path / "runs/Z2-ckda+smoke.pt").read_bytes()
    assert_refused([*command, "--seeds", "2"], r"seeds is \[0\] there and \[0, 1\] here.*--fresh")
    assert (tmp_path / "runs/Z2-ckda+smoke.pt").read_bytes() == weights


def test_new_lengths_are_scored_from_the_weights(tmp_path, monkeypatch, capsys):
    command = [*SMOKE, "Z2", "--recipe", "culled", "--out", str(tmp_path), "--json"]
    assert main([*command, "--lengths", "8,16"]) == 0
    first = json.loads(capsys.readouterr().out)["runs"]
    monkeypatch.setattr(Ensemble, "update", None)  # nothing is trained
    assert main([*command, "--lengths", "16,32"]) == 0
    (then,), (now,) = first.values(), json.loads(capsys.readouterr().out)["runs"].values()
    assert set(then["scores"]) == {"8", "16"}
    assert set(now["scores"]) == {"8", "16", "32"}
    assert now["scores"]["16"] == then["scores"]["16"]
    assert (tmp_path / "table.md").read_text().startswith("| run | 16 | 32 | all seeds at 32 |")
    (name,) = first
    assert set(json.loads((tmp_path / f"runs/{name}.json").read_text())["scores"]) == {"8", "16", "32"}


def test_recipes_are_explained(capsys):
    assert main(["track", "--recipes"]) == 0
    text = capsys.readouterr().out
    assert "init=orthogonal-quarter" in text
    assert all(len(line) < 170 for line in text.splitlines())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mixer", "lstm"], "--mixer lstm: there is none"),
        (["--mixer", ""], "--mixer : there is none"),
        (["--recipe", "magic"], "--recipe magic: there is none"),
        (["X9"], "X9.*no group known"),
        (["Z1"], "Z1 has one element"),
        (["nothing.json"], "nothing.json: No such file"),
        (["S3:vowels"], "letters is 'vowels'"),
        (["--lengths", "8,x"], "whole numbers"),
        (["--lengths", "0"], "at least 1"),
        (["--recipe", "silu=qkv+magic"], "--recipe magic: there is none"),
        (["--recipe", "silu=v"], "there are silu=k, silu=qv, silu=qkv"),
        (["--recipe", "heads=4"], "written as 48x4"),
        (["--steps", "10", "--momentum", "2"], "at least 0 and below 1"),
        (["--mixer", "attention", "--recipe", "closure"], "no recurrent state"),
        (["--mixer", "gru", "--recipe", "homomorphism"], "needs A of the transition"),
        (["--mixer", "gdn2", "--recipe", "closure"], "needs alpha, beta"),
        (["shell3", "--recipe", "homomorphism"], "one token for each element"),
        (["--recipe", "theory"], "not isomorphic to A5"),
        (["--mixer", "kda", "--recipe", "reflections"], "beta_init is 'spread'|needs Complex KDA"),
        (["--recipe", "keep=4-of-3"], "3-of-24"),
        (["--from", "nothing.pt"], "nothing.pt does not exist"),
        (["--recipe", "quarters+sharpen"], "--from names them"),
    ],
)
def test_mistakes_get_a_clear_message(tmp_path, options, says, assert_refused):
    assert_refused([*SMOKE, "--out", str(tmp_path), *options], says)


def test_a_long_training_says_so_and_stops_unwatched(monkeypatch, capsys):
    """Half a day goes on with a word; more than a day without a terminal stops with status 2, unless --yes."""
    words = argparse.Namespace(device="cpu", smoke=False, yes=False)
    advise = _adviser(words, _quick_hint(TrackConfig(device="cpu")))
    advise(300)
    assert capsys.readouterr().err == ""
    advise(43_200)
    said = capsys.readouterr().err
    assert "no GPU: this takes about 12 h here" in said
    assert said.endswith(". It goes on; Ctrl-C leaves a checkpoint\n")
    assert "`--recipe quick` takes about" in said
    with pytest.raises(ValueError, match=r"no GPU: this takes about 3 days here; .* Stopped, .*: --yes goes on$"):
        advise(300_000)
    assert capsys.readouterr().err == ""
    words.yes = True
    advise(300_000)


def test_a_suite_says_how_long_all_of_it_takes(tmp_path, monkeypatch, capsys):
    """Two arms take twice one arm's time; more than a day of them stops, before anything is finished."""
    monkeypatch.setattr("ckda.train.loop._ADVISE_AFTER", 0.0)
    monkeypatch.setattr("ckda.train.loop._seconds_left", lambda *_: 50_000)
    words = ["track", "parity", "--suite", "regular", "--mixer", "ckda,kda", "--steps", "30", "--batch", "2"]
    assert main([*words, "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no GPU: this takes about 28 h here; one task and arm, as" in said
    assert "takes about 14 h" in said
    assert "--yes goes on" in said
    assert not list(tmp_path.glob("runs/*.json"))


def test_a_report_of_other_runs_is_kept(tmp_path, capsys):
    """A smaller run into the same folder writes its own report and moves the larger one aside."""
    both = [*SMOKE, "Z2", "--seeds", "1", "--lengths", "8", "--out", str(tmp_path)]
    assert main([*both, "--mixer", "ckda,gru"]) == 0
    before = {name: (tmp_path / name).read_bytes() for name in ("track.json", "table.md", "report.html")}
    capsys.readouterr()
    assert main([*both, "--mixer", "ckda"]) == 0
    said = capsys.readouterr().err
    assert "finished before, not trained again (--fresh would): Z2-ckda+smoke" in said
    assert f"it is kept in {tmp_path}/earlier/1" in said
    assert {name: (tmp_path / "earlier/1" / name).read_bytes() for name in before} == before
    assert main([*both, "--mixer", "ckda,gru"]) == 0  # nothing is lost from a report that has all runs of the last one
    assert [path.name for path in (tmp_path / "earlier").iterdir()] == ["1"]


def test_the_time_left_is_known_early(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ckda.train.loop._ADVISE_AFTER", 0.0)
    told = []
    run(TrackConfig(groups=("Z2",), smoke=True, device="cpu", out=tmp_path, num_seeds=1), advise=told.append)
    assert len(told) == 1
    assert 0 < told[0] < 600


def test_an_interrupted_run_of_other_settings_is_refused(tmp_path, capsys, assert_refused):
    command = [*SMOKE, "Z2", "--out", str(tmp_path), "--json"]
    assert main([*command, "--seeds", "1", "--time-limit", "0"]) == 3
    (checkpoint,) = tmp_path.glob("runs/*.checkpoint.pt")
    kept = checkpoint.read_bytes()
    assert_refused([*command, "--seeds", "2"], r"is of another run.*--fresh")
    assert checkpoint.read_bytes() == kept
