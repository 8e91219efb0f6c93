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
from ckda.lm import memory
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
    one_line(["lm", "generate", str(broken), "--device", "cpu", "--out", str(tmp_path)], "cannot be read", capsys)
    (tmp_path / "file").write_text("")
    words = ["lm", "train", "--data", str(run / "tokens"), "--model", "tiny:kda", "--steps", "9", "--device", "cpu"]
    one_line([*words, "--out", str(tmp_path / "file" / "below")], "--out", capsys)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    one_line(
        [*words, "--length", "32", "--batch", "2", *out[2:]],
        "1000 bytes free; checkpoints and the model need 1.",
        capsys,
    )
    assert not (tmp_path / "out").exists()


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
    assert "(mean of the last 1 update), held out 6." in said.out
    assert "(at update 0)" in said.out
    assert main(["lm", "generate", out, "--prompt", "def", "--max-new", "2", "--device", "cpu", "--out", out]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("def")
    assert said.err == f"{out} is not finished: this is its checkpoint of update 1 of 50\n"
    one_line([*words, "--steps", "40"], "steps is 50 there and 40 here", capsys)
    done = ["lm", "train", "--config", str(run / "training.json"), "--device", "cpu", "--out", str(run)]
    assert main(done) == 0
    assert (
        capsys.readouterr().err == f"{run} is complete: this is its result, nothing is trained (--fresh trains anew)\n"
    )


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


def test_refused_trainings_leave_no_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong model, missing tokens, too short a text: one sentence, and nothing is made for it."""
    out, data = tmp_path / "out", str(run / "tokens")
    words = ["lm", "train", "--steps", "1", "--device", "cpu", "--out", str(out)]
    one_line(
        [*words, "--data", data, "--model", "huge:ckda"],
        "there is no size 'huge' for a model; there are tiny, ",
        capsys,
    )
    one_line([*words, "--data", data, "--model", "tiny:huge"], "there are tiny:transformer, ", capsys)
    one_line([*words, "--data", str(tmp_path / "none"), "--model", "tiny:ckda"], "holds no index.json", capsys)
    one_line([*words, "--data", data, "--model", "tiny:ckda", "--length", "1M"], "tokens", capsys)
    one_line(
        ["lm", "train", "--smoke", "--model", "tiny:huge", "--device", "cpu", "--out", str(out)],
        "there are tiny:tr",
        capsys,
    )
    cells = ["lm", "ladder", "--device", "cpu", "--out", str(out)]
    one_line([*cells, "--data", data, "--sizes", "huge"], "size is 'huge'", capsys)
    assert main([*cells, "--data", data, "--arms", "kda", "--tokens", "20K", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out == f"47M-kda-20000-seed0: 47M:kda on {data}, 1 update of 131,072 tokens\n"
    assert "47M-kda-20000-seed0: one update is 32 x 4096 = 131,072 tokens, more than the 20,000 asked for" in said.err
    assert not out.exists()


def test_an_update_that_does_not_fit_is_refused_with_what_would(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first thing many type, 47M on a laptop of 16 GiB; and the micro-batch that is proposed fits."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 16 << 30)
    words = [
        "lm",
        "train",
        "--data",
        str(run / "tokens"),
        "--steps",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*words, "--model", "47M:ckda"]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert len(told.splitlines()) == 1
    assert "47M:ckda with 32 x 4096 tokens at once takes about" in told
    assert "16 GiB are free here: give --micro 2 (the same update in 16 parts" in told
    assert "a smaller --batch or --length, or --model tiny:ckda" in told
    sizes = {"sequences": 32, "length": 4096, "device": torch.device("cpu")}
    memory.check("47M:ckda", config_of("47M:ckda"), micro=2, **sizes)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 << 30)
    with pytest.raises(ValueError, match=r"even one takes \S+ GiB: give a smaller --length or a smaller model"):
        memory.check("47M:ckda", config_of("47M:ckda"), micro=2, **sizes)
    memory.check("tiny:ckda", config_of("tiny:ckda"), micro=8, **sizes | {"length": 256})
    assert not (tmp_path / "x").exists()


def test_the_estimate_of_memory_is_about_what_was_measured() -> None:
    """CUDA: the runs in results/lm. CPU: peaks of one update, measured with resource.getrusage at these shapes."""
    measured = {
        ("47M:ckda", 2048): 3.71,
        ("47M:ckda", 4096): 6.42,
        ("47M:transformer", 1024): 1.74,
        ("47M:deltaproduct2", 1024): 2.49,
    }
    for (name, tokens), gib in (measured | {("tiny:ckda", 32768): 0.91}).items():
        assert memory.need(config_of(name), tokens).total / 2**30 == pytest.approx(gib, rel=0.3), name
    results = Path(__file__).parents[2] / "results/lm"
    for one in json.loads((results / "comparison.json").read_text())["runs"]:
        tokens = one["recipe"]["batch"] * one["recipe"]["length"]
        total = memory.need(config_of(f"47M:{one['arm']}"), tokens, "cuda", "bf16").total
        assert total / 2**30 == pytest.approx(one["memory_gib"], rel=0.3), one["arm"]
    large = json.loads((results / "large.json").read_text())
    total = memory.need(config_of(large["model"]), large["micro"] * large["length"], "cuda", "bf16").total
    assert total / 2**30 == pytest.approx(large["memory_gib"], rel=0.3)
    assert (memory.free_memory(torch.device("cpu")) or 0) > 1 << 20


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    for name, value in (("max", "8000"), ("current", "5000"), ("stat", "anon 1\ninactive_file 1500\n")):
        (tmp_path / f"memory.{name}").write_text(value)
    assert memory._group_limit(tmp_path) == 4500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._group_limit(tmp_path) is None


def test_a_long_training_says_how_long_and_a_short_one_does_not() -> None:
    from ckda.lm.commands.train import _adviser
    from ckda.lm.log import Row

    tiny = tiny_training("tokens", "out")
    for steps, model, told in ((10**6, "47M:ckda", 1), (10**6, "tiny:ckda", 1), (20, "47M:ckda", 0)):
        said: list[str] = []
        training = replace(tiny, model=model, recipe=replace(tiny.recipe, steps=steps))
        watch = _adviser(training, "cpu", lambda row: None, said.append)
        for step in (0, 1, 2):
            watch(Row(step, step, loss=1.0, tokens_per_second=256.0 if step else None))
        assert len(said) == told
        assert all("no GPU: this takes about 12 days here" in line for line in said)
        assert all(("tiny:ckda" in line) == (model != "tiny:ckda") for line in said)


def test_a_shape_from_a_run_trains_with_the_run_s_sizes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with 32 x 4096 tokens; and a vocabulary far larger than the tokenizer's is told."""
    checkpoint = next((run / "checkpoints").glob("step-*"))
    for model in (run, run / "model", checkpoint):
        recipe = recipe_for(str(model), steps=1)
        assert (recipe.length, recipe.batch, recipe.eval_tokens) == (64, 4, 1024)
    assert recipe_for(str(run / "model"), steps=1, batch=2).batch == 2
    shape = tmp_path / "shape"
    shape.mkdir()
    values = json.loads((run / "model/config.json").read_text()) | {"max_position_embeddings": 128, "vocab_size": 4096}
    (shape / "config.json").write_text(json.dumps(values))
    assert recipe_for(str(shape), steps=1).length == 128
    words = ["lm", "train", "--data", str(run / "tokens"), "--model", str(shape), "--steps", "1", "--batch", "1"]
    assert main([*words, "--eval-tokens", "128", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "1 update of 1 x 128 tokens" in said
    assert "the tokenizer has 512 entries and the model 4,096: 0.1 M parameters are of tokens that never come" in said


def test_needles_that_do_not_fit_are_found_before_the_first_answer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("a sentence that goes on " * 300)
    words = [
        "needle",
        str(run),
        "--tasks",
        "S-NIAH-1,S-NIAH-2",
        "--lengths",
        "1024",
        "--text",
        str(tmp_path / "one.txt"),
    ]
    words += ["--samples", "1", "--max-new", "1", "--device", "cpu", "--out", str(tmp_path)]
    one_line(words, "S-NIAH-2 does not fit into 1024 tokens with 1 for the answer", capsys)
