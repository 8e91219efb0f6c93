"""The training loop: the same losses whatever interrupts a run and however many ranks share it."""

import json
import math
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckda.lm import checkpoint
from ckda.lm.data import Sampler, TokenStore
from ckda.lm.log import NotFinite, read_log
from ckda.lm.parallel import World
from ckda.lm.recipe import Recipe
from ckda.lm.train import Options, Trainer, make_batch

from . import worker

ALONE = World(0, 1, torch.device("cpu"))


def trainer(tokens: Path, out: Path, **changes: Any) -> Trainer:
    options = changes.pop("options", Options())
    return Trainer(worker.build, tokens, Recipe(**worker.RECIPE | changes), out, ALONE, options)


def launch(job: dict[str, Any], ranks: int = 1, torchrun: bool = False) -> tuple[int, str]:
    """Run worker.py in `ranks` processes, as torchrun would or by it; the worst status, and what they wrote."""
    script, root = str(Path(worker.__file__)), str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    commands = [([sys.executable, script, json.dumps(job)], env)]
    if torchrun:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        commands = [([sys.executable, *run, script, json.dumps(job)], env)]
    elif ranks > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        places = [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        commands = [(commands[0][0], env | place) for place in places]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=place, **pipe) for command, place in commands]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return max(process.returncode for process in processes), "".join(texts)


def losses(out: Path) -> list[float]:
    return [row.loss for row in read_log(out / "log.jsonl") if row.loss is not None]


def held_out(out: Path) -> list[float]:
    return [row.held_out_loss for row in read_log(out / "log.jsonl") if row.held_out_loss is not None]


@pytest.fixture(scope="module")
def unbroken(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run nobody disturbs."""
    out = tmp_path_factory.mktemp("unbroken")
    trainer(tokens, out, options=Options(keep=0)).run()
    return out


def test_the_loss_falls_and_validation_is_logged(unbroken: Path) -> None:
    values = losses(unbroken)
    assert len(values) == 32
    assert np.mean(values[-4:]) < np.mean(values[:4]) - 0.5
    assert len(held_out(unbroken)) == 4
    assert held_out(unbroken)[-1] < held_out(unbroken)[0]


def test_killed_and_resumed_gives_the_same_losses_to_the_bit(unbroken: Path, tokens: Path, tmp_path: Path) -> None:
    at = random.SystemRandom().randint(7, 12)
    status, said = launch({"data": str(tokens), "out": str(tmp_path), "kill_at": at})
    assert status == 9, said
    again = trainer(tokens, tmp_path)
    path = checkpoint.newest(tmp_path / "checkpoints", ALONE)
    assert path is not None
    again.load(path)
    assert 0 < again.step <= at
    again.run()
    assert losses(tmp_path) == losses(unbroken), f"killed at {at}"
    assert held_out(tmp_path) == held_out(unbroken)


def test_two_fsdp_ranks_equal_one_and_resume_as_one(unbroken: Path, tokens: Path, tmp_path: Path) -> None:
    """Two ranks, killed in the middle; the first half equals one process, and one process ends the run."""
    job = {"data": str(tokens), "out": str(tmp_path), "options": {"parallel": "fsdp"}, "term_at": 11}
    _, said = launch(job, ranks=2, torchrun=True)
    assert '"stopped": "SIGTERM"' in said, said
    step = checkpoint.steps_of(tmp_path / "checkpoints")[-1]
    assert step in (12, 13)
    np.testing.assert_allclose(losses(tmp_path), losses(unbroken)[:step], atol=1e-5)
    again = trainer(tokens, tmp_path)
    again.load(tmp_path / "checkpoints" / f"step-{step:08d}")
    again.run()
    np.testing.assert_allclose(losses(tmp_path), losses(unbroken), atol=1e-5)
    np.testing.assert_allclose(held_out(tmp_path), held_out(unbroken), atol=1e-5)


def test_two_ddp_ranks_equal_one_and_resume_from_one(unbroken: Path, tokens: Path, tmp_path: Path) -> None:
    """From one rank's checkpoint to two ranks, with two micro-batches each."""
    (tmp_path / "checkpoints").mkdir()
    first = unbroken / "checkpoints" / "step-00000024"
    (tmp_path / "checkpoints" / first.name).symlink_to(first)
    (tmp_path / "log.jsonl").write_text((unbroken / "log.jsonl").read_text())
    job = {"data": str(tokens), "out": str(tmp_path), "resume": True, "recipe": {"micro": 1}}
    status, said = launch(job, ranks=2)
    assert status == 0, said
    np.testing.assert_allclose(losses(tmp_path), losses(unbroken), atol=1e-5)


def test_sigterm_saves_and_ends(tokens: Path, tmp_path: Path) -> None:
    one = trainer(tokens, tmp_path)
    update = one.update

    def signalled(batches: Any) -> Any:
        if one.step == 4:
            os.kill(os.getpid(), 15)
        return update(batches)

    one.update = signalled  # type: ignore[method-assign]
    outcome = one.run()
    assert outcome.stopped == "SIGTERM"
    assert outcome.step == 5
    assert checkpoint.steps_of(tmp_path / "checkpoints") == [5]
    assert len(losses(tmp_path)) == 5


def test_the_time_limit_saves_and_ends(tokens: Path, tmp_path: Path) -> None:
    outcome = trainer(tokens, tmp_path, options=Options(time_limit=0.0)).run()
    assert (outcome.stopped, outcome.step) == ("time limit", 1)


def test_a_loss_that_is_no_number_names_the_step_and_keeps_the_last_good(tokens: Path, tmp_path: Path) -> None:
    one = trainer(tokens, tmp_path)
    update = one.update

    def poisoned(batches: Any) -> Any:
        if one.step == 8:
            with torch.no_grad():
                next(iter(one.named.values())).fill_(math.nan)
        return update(batches)

    one.update = poisoned  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match=r"update 9: .*last good checkpoint is of update 6"):
        one.run()
    assert checkpoint.steps_of(tmp_path / "checkpoints") == [6]
    checkpoint.read_manifest(tmp_path / "checkpoints" / "step-00000006")
    assert all(math.isfinite(v) for v in losses(tmp_path))


def test_a_cooldown_branched_from_a_trunk_equals_the_whole_run(tokens: Path, tmp_path: Path) -> None:
    whole = trainer(tokens, tmp_path / "whole", steps=15, cooldown=0.2)
    whole.run()
    trunk = trainer(tokens, tmp_path / "trunk", steps=30, schedule="constant", options=Options(keep=0))
    trunk.recipe.__dict__["steps"] = 12  # the trunk is stopped early; its schedule does not know its end
    trunk.run()
    branch = trainer(tokens, tmp_path / "branch", steps=15, branch=12)
    branch.branch(tmp_path / "trunk" / "checkpoints" / "step-00000012")
    branch.run()
    assert losses(tmp_path / "branch") == losses(tmp_path / "whole")[12:]
    with pytest.raises(ValueError, match="cannot be branched from: lr is"):
        trainer(tokens, tmp_path / "x", steps=15, branch=12, lr=1.0).branch(
            tmp_path / "trunk" / "checkpoints" / "step-00000012"
        )


def test_gradient_accumulation_does_not_change_the_run(unbroken: Path, tokens: Path, tmp_path: Path) -> None:
    trainer(tokens, tmp_path, micro=2).run()
    np.testing.assert_allclose(losses(tmp_path), losses(unbroken), atol=1e-5)


def test_separate_documents_predict_nothing_across_a_boundary(tokens: Path, tmp_path: Path) -> None:
    store = TokenStore(tokens)
    data = Sampler(store, 32, seed=0, documents="separate")
    numbers = np.arange(len(data))
    batch = make_batch(data, numbers)
    end = store.index["end_token"]
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    starts = {0, *(int(i) + 1 for i in (ids == end).nonzero()[:, 0]), *range(0, ids.numel(), 32)} - {ids.numel()}
    assert set(batch["cu_seqlens"][:-1].tolist()) == starts
    assert set((labels == -100).nonzero()[:, 0].tolist()) == starts
    assert data.num_targets(numbers) == int((labels != -100).sum())
    one = trainer(tokens, tmp_path, documents="separate", steps=4, micro=2)
    two = trainer(tokens, tmp_path / "b", documents="separate", steps=4)
    one.run()
    two.run()
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "b"), atol=1e-5)


def test_damaged_and_foreign_checkpoints(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer(tokens, tmp_path, steps=12, options=Options(keep=0))
    one.run()
    folder = tmp_path / "checkpoints"
    last = folder / "step-00000012"
    file = next(last.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(last, one.tensors(), ALONE)
    assert checkpoint.newest(folder, ALONE) == folder / "step-00000006"
    assert "passing over" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"another run: lr is .* there and .* here"):
        trainer(tokens, tmp_path, steps=12, lr=0.5).load(folder / "step-00000006")
    with pytest.raises(ValueError, match="no checkpoint"):
        checkpoint.read_manifest(tmp_path)
    other = trainer(tokens, tmp_path, steps=12)
    other.plain.config.mixer = "kda"  # the same shapes
    with pytest.raises(ValueError, match=r"another model: mixer is .* there"):
        other.load(folder / "step-00000006")


def test_recomputed_activations_give_the_same_run(unbroken: Path, tokens: Path, tmp_path: Path) -> None:
    trainer(tokens, tmp_path, options=Options(checkpointing=True)).run()
    assert losses(tmp_path) == losses(unbroken)


def test_old_checkpoints_go(tokens: Path, tmp_path: Path) -> None:
    trainer(tokens, tmp_path, save_every=3, steps=12).run()
    assert checkpoint.steps_of(tmp_path / "checkpoints") == [9, 12]


def test_checkpoints_hold_no_pickle(unbroken: Path) -> None:
    names = {p.suffix for p in (unbroken / "checkpoints").rglob("*") if p.is_file()}
    assert names == {".safetensors", ".json"}


def test_recipes_are_checked() -> None:
    with pytest.raises(ValueError, match="schedule is 'sine'"):
        Recipe(steps=1, schedule="sine")
    with pytest.raises(ValueError, match="does not split evenly over 3"):
        Recipe(steps=1, batch=4).micro_batches(3)
    with pytest.raises(ValueError, match="micro-batches of 3"):
        Recipe(steps=1, batch=8, micro=3).micro_batches(1)
    assert Recipe(steps=1, batch=8, micro=2).micro_batches(2) == (2, 2)


def test_schedules() -> None:
    recipe = Recipe(steps=1000, warmup=100, cooldown=0.2)
    factors = [recipe.factor(s) for s in range(1000)]
    assert factors[0] == 0.01
    assert factors[99:800] == [1.0] * 701
    np.testing.assert_allclose(np.diff(factors[800:]), -1 / 200)
    assert factors[-1] == pytest.approx(1 / 200)
    cosine = Recipe(steps=1000, warmup=100, schedule="cosine", floor=0.1)
    assert cosine.factor(999) == pytest.approx(0.1)
    assert cosine.factor(549) == pytest.approx(0.55)
    assert Recipe(steps=1000, warmup=0, schedule="constant").factor(999) == 1.0
