"""``ckda lm`` and ``ckda needle`` as a user calls them, on a tiny model."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from ckda.cli import main
from ckda.lm import ladder
from ckda.lm.models import config_of, load_model, text_tokenizer
from ckda.lm.recipe import Recipe
from ckda.lm.tiny import tiny_training
from ckda.lm.training import Training, TrainResult


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "train"
    assert main([*train_arguments(tokens), "--out", str(out)]) == 0
    return out


def train_arguments(tokens: Path) -> list[str]:
    own = {"data": tokens, "model": "tiny:ckda-hybrid", "steps": 12, "length": 32, "batch": 4, "warmup": 3, "lr": 0.01}
    own |= {"save-every": 4, "eval-every": 6, "log-every": 3, "device": "cpu", "keep": 0}
    return ["lm", "train", *(word for name, value in own.items() for word in (f"--{name}", str(value)))]


def test_training_leaves_a_result_a_figure_and_a_model(trained: Path) -> None:
    result = json.loads((trained / "train.json").read_text())
    assert result["stopped"] is None
    assert result["step"] == 12
    assert result["held_out_loss"] < 6
    assert result["flops_per_token"] > 0
    assert (trained / "loss.png").stat().st_size > 1000
    assert {p.name for p in (trained / "model").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_run_its_model_and_its_checkpoint_are_one_model(trained: Path) -> None:
    import torch

    ids = torch.tensor([[1, 2, 3, 4]])
    places = (trained, trained / "model", trained / "checkpoints" / "step-00000012")
    logits = [load_model(place)(input_ids=ids).logits for place in places]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert text_tokenizer(places[2]).get_vocab_size() == text_tokenizer(places[0]).get_vocab_size()
    with pytest.raises(ValueError, match="neither a model folder"):
        load_model(trained / "checkpoints")


def test_a_complete_run_is_told_again_and_not_trained(
    trained: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "train.json").stat().st_mtime_ns
    assert main([*train_arguments(tokens), "--out", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 12
    assert (trained / "train.json").stat().st_mtime_ns == before


def test_the_time_limit_stops_and_the_same_command_goes_on(
    trained: Path, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*train_arguments(tokens), "--out", str(tmp_path), "--json"]
    assert main([*command, "--time-limit", "0"]) == 3
    assert json.loads((tmp_path / "train.json").read_text())["stopped"] == "time limit"
    assert main(command) == 0
    ours, theirs = (json.loads((p / "train.json").read_text())["log"] for p in (tmp_path, trained))
    assert [r["loss"] for r in ours if "loss" in r] == [r["loss"] for r in theirs if "loss" in r]
    other = [*command, "--lr", "0.001"]
    assert main(other) == 2
    assert "of another kind: lr is 0.01 there and 0.001 here" in capsys.readouterr().err
    assert main([*other, "--fresh", "--time-limit", "0"]) == 3
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_branch_takes_its_length_from_its_trunk(tokens: Path, tmp_path: Path) -> None:
    trunk = [*train_arguments(tokens), "--schedule", "constant", "--out", str(tmp_path / "trunk"), "--json"]
    assert main(trunk) == 0
    start = tmp_path / "trunk" / "checkpoints" / "step-00000008"
    arguments = train_arguments(tokens)
    del arguments[arguments.index("--steps") : arguments.index("--steps") + 2]
    assert main([*arguments, "--branch", str(start), "--out", str(tmp_path / "b"), "--json"]) == 0
    result = json.loads((tmp_path / "b" / "train.json").read_text())
    assert result["step"] == 10
    assert [round(r["lr"], 5) for r in result["log"] if "loss" in r] == [0.01, 0.005]


def test_mistakes_are_told_in_one_line(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    for words, told in (
        (["lm", "train", *out, "--steps", "1"], "--data"),
        (["lm", "train", *out, "--data", str(tmp_path), "--steps", "1"], "index.json"),
        (["lm", "train", *out, "--data", str(tokens)], "either --tokens or --steps"),
        (["lm", "train", *out, "--data", str(tokens), "--steps", "1", "--model", "5M:ckda"], "no size '5M'"),
        (["lm", "prepare", *out], "name the files"),
        (["lm", "generate", *out, str(tmp_path)], "neither a model folder"),
        (["lm", "eval", *out], "name a model"),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ckda lm {words[1]}: ")
        assert told in line


def test_text_and_needles_from_the_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    words = ["lm", "generate", str(tmp_path / "model"), "--prompt", "the cup", "--max-new", "8", "--out", str(tmp_path)]
    assert main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the cup")
    small = ["--tasks", "S-NIAH-1", "--lengths", "1024", "--samples", "2", "--max-new", "4", "--device", "cpu"]
    assert main(["needle", str(tmp_path / "model"), *small, "--out", str(tmp_path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["accuracy"]["S-NIAH-1"]) == {"1024"}
    assert (tmp_path / "needle.png").stat().st_size > 1000


def test_preparing_tells_what_it_did_and_checks(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lm", "prepare", str(corpus), "--tokenizer", "train:280", "--workers", "1", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["documents"] == 60
    assert main(["lm", "prepare", "--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "train-00000.ends").write_bytes(b"")
    assert main(["lm", "prepare", "--check", "--out", str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_the_launcher_trains_what_is_missing(
    trained: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "calls"
    script = f"import sys; open({str(record)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    monkeypatch.setattr(ladder, "command", lambda cell, ranks: [sys.executable, "-c", script, cell.model, str(ranks)])
    base = Training("47M:ckda", str(tokens), str(tmp_path), Recipe(1))
    todo = ladder.cells(base, ["47M"], ["kda", "ckda"], [6 * 10**9], lr=0.5)
    first, second = todo
    assert todo[second].recipe.lr == 0.5
    assert todo[second].recipe.steps == 6 * 10**9 // (4096 * 32)
    (tmp_path / first).mkdir()
    shutil.copy(trained / "train.json", tmp_path / first)
    assert ladder.run_local(todo, 2) == {first: 0, second: 0}
    assert record.read_text().splitlines() == ["47M:ckda 2"]
    assert list(ladder.submit(todo, 1, {}, cluster="debug")) == [second]
    words = ["lm", "ladder", "--data", "x", "--arms", "kda", "--dry-run", "--out", str(tmp_path)]
    assert main([*words, "--tokens", "20K,2M", "--", "--batch", "1", "--length", "100"]) == 0
    out = capsys.readouterr().out
    assert "47M:kda on x, 200 updates of 100 tokens" in out
    assert "20,000 updates of 100 tokens" in out
    assert main([*words, "--sizes", "48M"]) == 2


def test_the_launcher_starts_the_command_with_the_cell_in_a_file(tokens: Path, tmp_path: Path) -> None:
    """As another process would read it: what is trained is the cell."""
    cell = tiny_training(tokens, tmp_path, "kda")
    words = ladder.command(cell, 1)
    assert words[1:5] == ["-m", "ckda.cli", "lm", "train"]
    assert main([*words[3:], "--json"]) == 0
    assert TrainResult.load(tmp_path / "train.json").key == cell.recipe.key()
    assert ladder.finished(cell)
    assert "--nproc-per-node=3" in ladder.command(cell, 3)


def test_configurations_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_of("tiny:kda").to_json_string())
    assert config_of(str(tmp_path)).mixers() == ["kda"] * 4
    assert config_of("1.3B:ckda", backend="chunked").backend == "chunked"
    with pytest.raises(ValueError, match="SIZE:ARM"):
        config_of("ckda")


def test_a_study_is_planned_run_in_parts_and_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls with records of their own, as on two machines."""
    assert main(["lm", "ladder", "--study", "ladder", "--plan", "--json", "--out", str(tmp_path / "none")]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["done"] == []
    assert planned["seconds"] == pytest.approx(sum(unit["seconds"] for unit in planned["units"]), abs=1)
    assert not (tmp_path / "none").exists()
    assert main(["lm", "ladder", "--study", "ladder", "--only", "nothing", "--out", str(tmp_path / "none")]) == 2
    assert "no unit of the study ladder" in capsys.readouterr().err
    words = ["lm", "ladder", "--study", "toy", "--smoke", "--device", "cpu", "--json", "--budgets", "128"]
    first = ["--only", "A-kda-seed0-*,A-ckda-seed0-*", "--out", str(tmp_path / "one")]
    assert main([*words, *first]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["left"] == []
    data = str(tmp_path / "one" / "tokens")
    second = ["--only", "A-*", "--data", data, "--have", str(tmp_path / "one"), "--out", str(tmp_path / "two")]
    assert main([*words, *second, "--time-limit", "0"]) == 3
    assert len(json.loads(capsys.readouterr().out)["left"]) == 2
    assert main([*words, *second]) == 0
    capsys.readouterr()
    both = ["--collect", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "all")]
    assert main(["lm", "ladder", *both]) == 0
    assert capsys.readouterr().out.startswith("4 units in ")
    assert json.loads((tmp_path / "all" / "differences.json").read_text())["differences"][0]["seeds"] == [0, 1]
