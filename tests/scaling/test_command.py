"""The command: files, figures, manners, resumption, and one-line errors."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from ckda.cli import main
from ckda.command import Parser
from ckda.scaling import Settings, figures, fit, load_fit, options, paper_table, store
from ckda.scaling.commands.compare import Comparison


def _scaling(*words):
    return main(["scaling", *map(str, words)])


def test_smoke_fit_writes_json_figures_and_replicates_then_predicts(tmp_path, capsys):
    assert _scaling("fit", "--smoke", "--arms", "Transformer++", "CKDA", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "CKDA" in out
    assert "error at 1.7B/50BT" in out
    assert "written" in err
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"fit.json", "fit_replicates.csv", "fit_frontier.png", "fit_residuals.png", "fit_advantage.png"}
    for name in names:
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "fit.json").read_text())
    assert stored["environment"]["versions"]["numpy"]
    assert stored["arms"]["CKDA"]["replicates"] == 20
    assert stored["arms"]["CKDA"]["parameters"]["E"]["value"] == pytest.approx(1.2111, abs=0.002)

    assert _scaling("predict", "7B/1T", "--compute", "1e22", "--out", tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    loss = result["cells"][0]["loss"]["CKDA"]
    assert loss["low"] < loss["value"] < loss["high"]
    assert loss["value"] == pytest.approx(load_fit(tmp_path / "fit.json").arms["CKDA"].predict(7e9, 1e12).value)
    best = result["compute"][0]["optimal"]["CKDA"]
    assert 6 * best["N"]["value"] * best["D"]["value"] == pytest.approx(1e22)
    assert (tmp_path / "predict.png").exists()


def test_compare_smoke_prints_only_json_and_meets_the_limits(tmp_path, capsys):
    assert _scaling("compare", "--smoke", "--coverage", 0, "--out", tmp_path, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "compare.json").read_text())
    for name in ("isolated", "pinned"):
        assert all(check["within"] for check in result["treatments"][name]["checks"].values())
    assert not result["treatments"]["pinned, offset per arm"]["checks"]["B"]["within"]
    assert {path.name for path in tmp_path.iterdir()} == {"compare.json", "compare.png"}


def test_own_runs_from_a_csv_without_groups(tmp_path, capsys):
    table = paper_table().arm("KDA")
    rows = [f"{n},{d},{l}" for n, d, l in zip(table.N, table.D, table.loss, strict=True)]
    data = tmp_path / "runs.csv"
    data.write_text("\n".join(["params,tokens,val_loss", *rows]))
    out = tmp_path / "out"
    assert (
        _scaling("fit", "--data", data, "--smoke", "--bootstrap", 0, "--hold-out", "1.71B/50BT", "--out", out, "--json")
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert list(result["arms"]) == ["all"]
    assert result["settings"]["offset"] == "none"
    assert list(result["arms"]["all"]["held_out"]) == ["1.71B/50BT"]
    assert result["arms"]["all"]["parameters"]["E"]["low"] is None
    assert not (out / "fit_advantage.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--data", "nowhere.csv"], "cannot read nowhere.csv"),
        (["fit", "--hold-out", "3B/50BT"], "held-out cell '3B/50BT' does not exist"),
        (["fit", "--arms", "RNN"], "no arm 'RNN'"),
        (["fit", "--baseline", "RNN"], "no arm 'RNN'"),
        (["fit", "--E", "tied"], "it may be free, shared or a number"),
        (["fit", "--starts", "0"], "at least one"),
        (["fit", "--bootstrap", "1"], "at least two"),
        (["fit", "--bootstrap", "-1"], "must not be negative"),
        (["fit", "--level", "1.5"], "between 0 and 1"),
        (["fit", "--huber", "0"], "Huber scale"),
        (["fit", "--device", "cuda"], "run on the CPU"),
        (["predict"], "nothing to predict"),
        (["predict", "7B/1T"], "run `ckda scaling fit` first"),
        (["predict", "7B"], "expected SIZE/TOKENS"),
        (["predict", "--compute", "much"], "is not a number"),
    ],
)
def test_mistakes_are_one_line_and_status_two(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _scaling(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_foreign_or_torn_fit_is_refused(tmp_path, capsys):
    path = tmp_path / "fit.json"
    for text, message in (("{", "not a JSON file"), ("[]", "is not a fit")):
        path.write_text(text)
        assert _scaling("predict", "7B/1T", "--out", tmp_path) == 2
        assert message in capsys.readouterr().err
    assert _scaling("fit", "--smoke", "--arms", "KDA", "--out", tmp_path) == 0
    lines = (tmp_path / "fit_replicates.csv").read_text().splitlines()
    (tmp_path / "fit_replicates.csv").write_text("\n".join(lines[:-3]))
    assert _scaling("predict", "7B/1T", "--out", tmp_path) == 2
    assert "do not belong to it (KDA)" in capsys.readouterr().err


def test_an_interrupted_run_resumes_and_gives_the_same_result(tmp_path, monkeypatch, capsys):
    words = ["fit", "--smoke", "--arms", "KDA", "CKDA", "--json", "--out"]
    assert _scaling(*words, tmp_path / "whole") == 0
    whole = json.loads(capsys.readouterr().out)
    fitted, real = [], store.fit

    def interrupted(table, *args, **kwargs):
        if table.arms == ("CKDA",) and "again" not in fitted:
            raise KeyboardInterrupt
        fitted.append(table.arms[0])
        return real(table, *args, **kwargs)

    monkeypatch.setattr(store, "fit", interrupted)
    assert _scaling(*words, tmp_path / "torn") == 130
    assert "interrupted" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "torn").iterdir()] == ["fit.partial.json"]
    fitted.append("again")
    assert _scaling(*words, tmp_path / "torn") == 0
    assert fitted == ["KDA", "again", "CKDA"]  # KDA came from the file
    torn = json.loads(capsys.readouterr().out)
    assert torn["arms"] == whole["arms"]
    assert not (tmp_path / "torn" / "fit.partial.json").exists()


def test_a_checkpoint_of_other_settings_is_ignored(tmp_path):
    first = store.Resume(tmp_path / "x.json", ["a"])
    assert first.part("one", lambda: 1) == 1
    assert store.Resume(tmp_path / "x.json", ["a"]).part("one", lambda: 2) == 1
    assert store.Resume(tmp_path / "x.json", ["b"]).part("one", lambda: 2) == 2
    (tmp_path / "x.json").write_text("{torn")
    assert store.Resume(tmp_path / "x.json", ["a"]).part("one", lambda: 3) == 3


def test_a_stored_fit_comes_back(tmp_path):
    settings = Settings(hold_out=("1.7B/50BT",), starts=20)
    resume = store.Resume(tmp_path / "p.json", 0)
    fitted = store.resumable_fit(paper_table().arm("KDA"), settings, 30, 0, resume)
    direct = fit(paper_table().arm("KDA"), settings)
    assert np.array_equal(fitted.arms["KDA"].theta, direct.arms["KDA"].theta)
    store.write_json(tmp_path / "fit.json", store.describe(fitted))
    store.save_replicates(tmp_path / "fit_replicates.csv", fitted)
    back = load_fit(tmp_path / "fit.json")
    assert back.settings == fitted.settings
    assert back.arms["KDA"].replicates == pytest.approx(fitted.arms["KDA"].replicates, rel=1e-9)
    assert (
        back.arms["KDA"].held_out_errors()["1.7B/50BT"].value == fitted.arms["KDA"].held_out_errors()["1.7B/50BT"].value
    )


def test_smoke_prediction_needs_no_fit(tmp_path, capsys):
    assert _scaling("predict", "7B/1T", "--smoke", "--out", tmp_path, "--json") == 0
    assert "smoke" in json.loads(capsys.readouterr().out)["fit"]


def test_help_names_the_sub_verbs(capsys):
    with pytest.raises(SystemExit) as stop:
        _scaling("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("fit", "predict", "compare"))


def test_every_command_of_the_documentation_parses():
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    lines = [line.partition("#")[0] for line in text.splitlines() if line.startswith("ckda scaling ")]
    assert len(lines) >= 6
    for line in lines:
        _, _, action, *words = shlex.split(line)
        parser = Parser()
        getattr(options, f"add_{action}")(parser)
        parser.parse_args(words)


def test_a_negative_seed_is_refused_by_the_command_itself(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["scaling", "fit", "--seed", "-1"])
    assert stop.value.code == 2
    assert "-1 is not from 0" in capsys.readouterr().err


def test_the_stored_records_give_their_figures():
    folder = Path(__file__).parents[2] / "results" / "scaling"
    fitted = load_fit(folder / "fit.json")
    stored = json.loads((folder / "fit.json").read_text())
    described = store.describe(fitted, stored["level"])["arms"]["CKDA"]
    for name in ("rmse", "theta"):
        assert described[name] == pytest.approx(stored["arms"]["CKDA"][name])
    assert [cell["cell"] for cell in described["cells"]] == [cell["cell"] for cell in stored["arms"]["CKDA"]["cells"]]
    assert described["frontier"][3]["loss"]["low"] == pytest.approx(
        stored["arms"]["CKDA"]["frontier"][3]["loss"]["low"]
    )
    assert len(figures.frontier(fitted).axes) == 2
    assert len(figures.advantage(fitted, stored["baseline"], stored["noise"]).axes[:5]) == 5
    compared = Comparison.load(folder / "compare.json")
    assert compared.as_json() == json.loads((folder / "compare.json").read_text())
    assert len(figures.beside_paper(compared).axes) == 21


def test_constant_losses_are_refused_in_one_line(tmp_path, capsys):
    rows = [f"{n},{d},2.5" for n in (1e8, 2e8, 4e8) for d in (1e9, 2e9, 4e9)]
    (tmp_path / "runs.csv").write_text("\n".join(["params,tokens,loss", *rows]))
    assert _scaling("fit", "--data", tmp_path / "runs.csv", "--out", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a single value of loss, 2.5" in line
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_written_is_told_before_the_fit(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert _scaling("fit", "--smoke", "--out", tmp_path / "file" / "below") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out" in line
