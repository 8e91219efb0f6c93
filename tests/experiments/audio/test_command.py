"""``ckda audio`` and ``ckda inspect audio`` from the outside."""

import json
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch

from ckda.cli import main
from ckda.experiments.audio.model import build
from ckda.experiments.audio.recipes import recipe as settings
from ckda.experiments.audio.task import Continuation, cut, groove, wav_bytes
from ckda.train import Ensemble


def test_smoke_run_leaves_everything_and_is_read_back(tmp_path, capsys, assert_refused):
    command = [
        "audio",
        "--smoke",
        "--arm",
        "ckda,transformer",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["runs"]) == ["ckda+smoke", "transformer+smoke"]
    assert result["runs"]["ckda+smoke"]["parameters"] == 182_048
    assert len(result["runs"]["ckda+smoke"]["snr"]["40"]) == 2
    for name in (
        "audio.json",
        "continuation.png",
        "report.html",
        "target.wav",
        "loop.wav",
        "runs/ckda+smoke.wav",
        "runs/ckda+smoke.pt",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    page = (tmp_path / "report.html").read_text()
    assert page.count("<audio controls") == 9
    assert "data:audio/wav;base64," in page
    stamp = (tmp_path / "runs/ckda+smoke.json").stat().st_mtime_ns
    assert main(command) == 0
    assert (tmp_path / "runs/ckda+smoke.json").stat().st_mtime_ns == stamp  # nothing was trained again
    said = capsys.readouterr().out
    assert "ckda+smoke " in said
    assert "published" not in said + page  # the paper's numbers do not stand beside those of a smoke run
    assert main(["inspect", "audio", str(tmp_path / "runs/ckda+smoke.pt"), "--length", "24", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert len(seen["heads"]) == 8
    assert seen["ablation"]["mse"] > 0
    assert_refused(["inspect", "audio", str(tmp_path / "runs/transformer+smoke.pt")], "is a transformer")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--arm", "lstm"], "--mixer lstm: there is none"),
        (["--recipe", "magic"], "--recipe magic: there is none"),
        (["--wav", "nothing.wav"], "does not exist"),
        (["--arm", "transformer", "--recipe", "closure"], "no recurrent state"),
        (["--bpm", "3"], "between 20 and 400"),
        (["--arm", "gru", "--recipe", "clock"], "only ckda can start as a clock"),
        (["--arm", ""], "--mixer : there is none"),
        (["--arm", "gru", "--recipe", "turns-tail"], "the GRU's transition is no matrix"),
        (["--arm", "ckda,", "--recipe", "plain"], "--mixer : there is none"),
    ],
)
def test_mistakes_get_a_clear_message(tmp_path, options, says, assert_refused):
    assert_refused(["audio", "--smoke", "--device", "cpu", "--out", str(tmp_path), *options], says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "--wav: .* no WAV file"),
        (b"RIFFnonsense", "--wav: .* no WAV file"),
        (wav_bytes(np.zeros(0), 8000), "--wav: .* holds no samples"),
        (wav_bytes(0.1 * np.ones(8000), 8000), "--wav: .* lasts 1.000 s; two bars at 124 BPM last 3.871 s"),
        (wav_bytes(np.zeros(30_968), 8000), "--wav: .* is silent"),
    ],
)
def test_a_bad_wav_ends_the_command_before_any_training(tmp_path, content, says, assert_refused):
    (tmp_path / "loop.wav").write_bytes(content)
    assert_refused(
        ["audio", "--smoke", "--device", "cpu", "--out", str(tmp_path), "--wav", str(tmp_path / "loop.wav")], says
    )
    assert not (tmp_path / "runs").exists()


def test_a_loop_of_ones_own_at_its_tempo(tmp_path, capsys, assert_refused):
    seconds = 480 / 96
    tone = 0.3 * np.sin(2 * np.pi * 55 * np.arange(round(seconds * 11_025)) / 11_025 * (1 + np.arange(55_125) / 9e5))
    (tmp_path / "own.wav").write_bytes(wav_bytes(tone, 11_025))
    command = [
        "audio",
        "--smoke",
        "--device",
        "cpu",
        "--json",
        "--out",
        str(tmp_path),
        "--wav",
        str(tmp_path / "own.wav"),
    ]
    assert_refused(command, r"--bpm 96\.0")
    assert main([*command, "--bpm", "96"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["loop"], result["bpm"]) == ("own.wav", 96.0)


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--steps", "-1"], ["--seeds", "two"]])
def test_numbers_that_make_no_sense_are_refused(tmp_path, options, capsys, assert_refused):
    with pytest.raises(SystemExit):
        main(["audio", "--smoke", "--device", "cpu", "--out", str(tmp_path), *options])
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("paper", "ckda"),
        ("turns-tail", "ckda+schedule=tail+penalty=closure-turns"),
        ("init=clock", "ckda+init=clock"),
    ],
)
def test_ctrl_c_leaves_a_checkpoint_and_the_same_command_goes_on_exactly(tmp_path, monkeypatch, capsys, recipe, name):
    name = f"{name}+smoke"
    command = ["audio", "--smoke", "--recipe", recipe, "--device", "cpu", "--json", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    step = Ensemble.train_step

    def stopped(self):
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Ensemble, "train_step", stopped)
    assert main([*command, str(tmp_path / "halves")]) == 130
    assert (tmp_path / f"halves/runs/{name}.checkpoint.pt").exists()
    monkeypatch.setattr(Ensemble, "train_step", step)
    assert main([*command, str(tmp_path / "halves")]) == 0
    assert f"resuming {name} at update 6" in capsys.readouterr().err
    whole, halves = (torch.load(tmp_path / part / f"runs/{name}.pt") for part in ("whole", "halves"))
    for part, parameter in whole["parameters"].items():
        assert torch.equal(parameter, halves["parameters"][part]), part
    assert not (tmp_path / f"halves/runs/{name}.checkpoint.pt").exists()


def test_the_plain_recipe_is_the_papers():
    plain = settings("paper")
    assert plain.switches == (168, 335, 501, 668, 835)
    assert [plain.length(n - 1) for n in (167, 168, 834, 835, 2500)] == [12, 16, 72, 136, 136]
    assert plain.factor(249) == 1.0
    assert plain.factor(2499) == pytest.approx(0.1)
    assert (plain.steps, plain.batch, plain.lr_muon, plain.lr_adamw, plain.clip) == (2500, 64, 0.02, 3e-3, 1.0)


def test_a_balanced_batch_of_32_is_one_of_64():
    """Every phase twice or once: the same loss, penalties and gradient."""
    seen = []
    for batch in (64, 32):
        task = Continuation(cut(groove()), balanced=True)
        ensemble = Ensemble(partial(build, "ckda"), task, settings("steady", (12,), steps=10, batch=batch), (0,))
        ensemble.step = 9
        _, total = ensemble._losses(*ensemble.draw(batch, 40))
        seen.append((total, torch.autograd.grad(total.sum(), list(ensemble.parameters.values()))))
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-5, atol=0)
    for one, other in zip(seen[0][1], seen[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()) + 1e-7)
