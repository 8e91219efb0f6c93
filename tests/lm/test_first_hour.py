"""The first hour with ``ckda lm``: what a new user does, and gets wrong, on a CPU."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckda.cli import main
from ckda.lm import prepare as preparing
from ckda.lm.data import TokenStore
from ckda.lm.evaluate import text_measures
from ckda.lm.models import config_of, load_model, text_tokenizer
from ckda.lm.tiny import tiny_run, tiny_tokens, tiny_training
from ckda.lm.training import TrainResult, recipe_for


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("first"))


def one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, nothing on standard output, one line that says it."""
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert told in err


def test_warm_up_is_a_share_of_the_run() -> None:
    assert recipe_for("47M:ckda", steps=60).warmup == 3
    assert recipe_for("47M:ckda", steps=10**6).warmup == 2000
    assert recipe_for("47M:ckda", steps=60, warmup=0.5).warmup == 30
    assert recipe_for("47M:ckda", steps=60, warmup=10).warmup == 10
    assert recipe_for("47M:ckda", steps=1).warmup == 1
    with pytest.raises(ValueError, match="--warmup 2000 of 60 updates"):
        recipe_for("47M:ckda", steps=60, warmup=2000)


def test_one_text_file_is_trained_on_and_its_end_held_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then trained from new weights, which is said, from others' weights, and read for its perplexity."""
    text = tmp_path / "tale.txt"
    text.write_text("\n".join(f"line {i} of a tale that goes on and on" for i in range(400)))
    tokens, out = str(tmp_path / "tokens"), str(tmp_path / "run")
    words = ["lm", "prepare", str(text), "--tokenizer", str(run / "tokenizer.json"), "--workers", "1"]
    assert main([*words, "--held-out", "0.05", "--out", tokens]) == 0
    train, held = TokenStore(tokens), TokenStore(tokens, "held_out")
    train.verify()
    held.verify()
    assert len(held) == pytest.approx(0.05 * (len(train) + len(held)), abs=1)
    whole = text_tokenizer(run).encode(text.read_text()).ids
    assert [*train.read(0, len(train)), *held.read(0, len(held) - 1)] == whole
    assert train.ends.tolist() == [len(train)]
    assert held.ends.tolist() == [len(held)]
    short = ["--data", tokens, "--steps", "2", "--length", "32", "--batch", "2", "--device", "cpu", "--out", out]
    assert main(["lm", "train", "--model", str(run / "model"), *short]) == 0
    assert f"new weights in the shape of {run / 'model'}; --init-from" in capsys.readouterr().err
    assert main(["lm", "train", "--init-from", str(run), *short, "--fresh", "--lr", "1e-9", "--length", "64"]) == 0
    assert "starting from the weights" in capsys.readouterr().err
    first = TrainResult.load(Path(out) / "train.json").validations[0].held_out_loss
    ours, theirs = load_model(out).state_dict(), load_model(run).state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())
    assert first is not None
    assert first < 5.8  # new weights are at log 512 = 6.24
    assert main(["lm", "eval", str(run), "--text", str(text), "--device", "cpu", "--out", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["tale.txt"]
    assert found["tokens"] == len(whole)
    assert found["loss"] == pytest.approx(first, abs=0.5)
    assert main(["lm", "eval", str(run), "--text", str(text), "--device", "cpu", "--out", out]) == 0
    assert "was there already; it is kept in" in capsys.readouterr().err
    assert json.loads((Path(out) / "earlier/1/eval.json").read_text())["results"]["tale.txt"] == found
    too_long = [*short[:5], "1000", *short[6:], "--fresh"]
    assert main(["lm", "train", "--init-from", str(run), *too_long]) == 0
    assert "no validation" in capsys.readouterr().err


def test_finished_tokens_are_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other sources, other settings and changed bytes are refused with the difference; --fresh replaces."""
    a, b, tok = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "tok"
    a.write_text("one tale that goes on " * 50)
    b.write_text("another story with other words " * 50)
    words = ["lm", "prepare", "--tokenizer", "train:280", "--workers", "1", "--out", str(tok)]
    assert main([*words, str(a)]) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in tok.iterdir()}
    stay = f"{tok} holds finished tokens of another kind: "
    for more, told in (
        ([str(b)], "the sources are a.txt there and b.txt here. They stay as they are: give another --out, or --fresh"),
        ([str(a), "--held-out", "0.5"], "held_out is 0.01 there and 0.5 here"),
        ([str(a), "--tokenizer", "train:300"], "tokenizer is train:280 there and train:300 here"),
        (["--smoke"], "the sources are a.txt there and __init__.py, checkpoint.py"),
    ):
        one_line([*words, *more], told, capsys)
        assert main([*words, *more]) == 2
        assert stay in capsys.readouterr().err
    assert main([*words, str(a)]) == 0
    said = capsys.readouterr()
    assert said.err == f"{tok} is prepared already, from the same sources and settings (--fresh prepares anew)\n"
    assert "from 1 document\n" in said.out
    a.write_text("ONE" + a.read_text()[3:])  # as long as before
    one_line([*words, str(a)], stay + "a.txt changed since", capsys)
    assert {path.name: path.read_bytes() for path in tok.iterdir()} == before
    assert main([*words, str(b), "--fresh"]) == 0
    assert text_tokenizer(tok).decode(TokenStore(tok).read(0, 7).tolist()).startswith("another story")


def test_tokens_do_not_depend_on_what_the_folder_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer trained on other texts is not used again, and a failed preparation leaves nothing in the way."""
    a, b, empty = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "empty.jsonl"
    a.write_text("one tale that goes on " * 50)
    b.write_text("another story with other words " * 50)
    empty.write_text('{"body": "x"}\n')
    used, clean = tmp_path / "used", tmp_path / "clean"
    words = ["lm", "prepare", "--tokenizer", "train:280", "--workers", "1", "--out"]
    one_line([*words, str(used), str(empty)], "no document in", capsys)
    one_line([*words, str(used), str(empty)], "empty.jsonl:1: no field 'text'", capsys)
    assert not used.exists()
    assert main([*words, str(used), str(a)]) == 0
    trained_on_a = (used / "tokenizer.json").read_bytes()
    for name in ("index.json", "train-00000.bin"):
        (used / name).unlink()
    for out in (used, clean):
        assert main([*words, str(out), str(b)]) == 0
    assert (used / "tokenizer.json").read_bytes() == (clean / "tokenizer.json").read_bytes() != trained_on_a
    assert (used / "train-00000.bin").read_bytes() == (clean / "train-00000.bin").read_bytes()
    before = (used / "tokenizer.json").stat().st_mtime_ns
    (used / "index.json").unlink()  # as if it had been interrupted after the tokenizer
    assert main([*words, str(used), str(b)]) == 0
    assert (used / "tokenizer.json").stat().st_mtime_ns == before


def test_perplexity_is_that_of_the_logits(run: Path) -> None:
    model, tokenizer, text = load_model(run), text_tokenizer(run), "def f(x):\n    return x\n"
    ids = tokenizer.encode(text).ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[0, *ids]])).logits[0, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids)).item()
    measures = text_measures(model, tokenizer, text)
    assert measures["loss"] == pytest.approx(loss, abs=1e-5)
    assert measures["bits_per_byte"] == pytest.approx(loss * len(ids) / len(text) / torch.log(torch.tensor(2.0)).item())


def test_mistakes_in_a_configuration_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(config_of("tiny:ckda").to_json_string())
    for change, told in (
        ({"hybird": "gated-attention"}, "'hybird' is no setting of a model; did you mean 'hybrid'?"),
        ({"mixer": "mamba"}, "a mixer is 'mamba'; it must be one of"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match="config") as error:
            config_of(str(tmp_path / "config.json"))
        assert told in str(error.value)
    words = ["lm", "train", "--data", "x", "--steps", "1", "--model", str(tmp_path / "config.json")]
    one_line([*words, "--device", "cpu", "--out", str(tmp_path / "out")], "hidden_size", capsys)


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", "-1"), ("temperature", "nan"), ("top-p", "3"), ("top-k", "-5"), ("max-new", "-3")],
)
def test_impossible_sampling_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_line(["lm", "generate", "nowhere", f"--{option}", value], f"--{option} is {value}", capsys)


def test_damage_and_places_that_cannot_be_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for path in (run / "model").iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    out = ["--device", "cpu", "--out", str(tmp_path / "out")]
    one_line(["lm", "generate", str(broken), *out], "cannot be read", capsys)
    (tmp_path / "file").write_text("")
    words = ["lm", "train", "--data", str(run / "tokens"), "--model", "tiny:kda", "--steps", "9", "--device", "cpu"]
    one_line([*words, "--out", str(tmp_path / "file" / "below")], "--out", capsys)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    one_line([*words, "--length", "32", "--batch", "2", *out[2:]], "GiB free; checkpoints and the model need", capsys)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_finished_run_is_not_replaced_unasked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "train.json").read_bytes()
    words = ["lm", "train", "--data", str(run / "tokens"), "--model", "tiny:ckda", "--steps", "2", "--device", "cpu"]
    one_line([*words, "--out", str(run)], "steps", capsys)
    assert (run / "train.json").read_bytes() == before


def test_the_training_of_a_tokenizer_speaks_and_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the tokenizer's training would take ten seconds: out within one, status 130."""
    (tmp_path / "a.txt").write_text("words and words")
    monkeypatch.setattr(preparing, "train_tokenizer", lambda texts, size: time.sleep(10))
    monkeypatch.setattr("ckda.lm.commands.prepare.every", lambda seconds, quiet=False: print)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    assert main(["lm", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "tokens")]) == 130
    assert time.monotonic() - began < 2
    assert "training the tokenizer, 0 s" in capsys.readouterr().out
    one_line(["lm", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "train:big"], "train:SIZE", capsys)


def test_a_toy_trains_in_a_moment_and_says_what_it_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is trained, on how many epochs, which loss it is, when it was validated; an unfinished run says that it is one."""
    recipe = recipe_for("tiny:ckda", steps=600)
    assert (recipe.length, recipe.batch) == (256, 8)
    out = str(tmp_path / "run")
    words = ["lm", "train", "--data", str(run / "tokens"), "--model", "tiny:ckda", "--length", "16", "--batch", "2"]
    words += ["--eval-tokens", "64", "--device", "cpu", "--out", out]
    assert main([*words, "--steps", "50", "--time-limit", "0"]) == 3
    said = capsys.readouterr()
    tokens = len(TokenStore(run / "tokens"))
    assert (
        f"50 updates of 2 x 16 tokens, 1,600 in all, {1600 / tokens:.2g} epochs of the {tokens:,} there are" in said.err
    )
    assert "loss 6." in said.out
    assert "(mean of the last 1 updates), held out 6." in said.out
    assert "(at update 0)" in said.out
    assert main(["lm", "generate", out, "--prompt", "def", "--max-new", "2", "--device", "cpu", "--out", out]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("def")
    assert said.err == f"{out} is not finished: this is its checkpoint of update 1 of 50\n"
    one_line([*words, "--steps", "40"], "steps is 50 there and 40 here", capsys)
    done = ["lm", "train", "--config", str(run / "training.json"), "--device", "cpu", "--out", str(run)]
    assert main(done) == 0
    assert capsys.readouterr().err == f"{run} is complete: told again, not trained again (--fresh trains anew)\n"


def test_slow_updates_are_told_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the first update has a log line, and later ones when the last line is some seconds old."""
    from ckda.lm import log
    from ckda.lm.training import run as train

    monkeypatch.setattr(log, "_PATIENCE", 0.0)
    seen: list[int] = []
    tiny = tiny_training(tiny_tokens(tmp_path / "tokens"), tmp_path / "run")
    quick = replace(tiny.recipe, steps=4, length=16, warmup=1, log_every=100)
    train(replace(tiny, recipe=quick), lambda row: seen.append(row.step))
    assert set(seen) == {0, 1, 2, 3, 4}
