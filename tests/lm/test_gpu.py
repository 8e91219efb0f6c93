"""What only a GPU shows: bf16 training, losses that come back by themselves, how busy the device is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ckda.lm import checkpoint
from ckda.lm.parallel import World
from ckda.lm.profile import measure
from ckda.lm.recipe import Recipe
from ckda.lm.train import Options, Trainer, read_log

from . import worker

pytestmark = pytest.mark.gpu


def trainer(tokens: Path, out: Path, **options: bool) -> Trainer:
    recipe = Recipe(**worker.RECIPE | {"dtype": "bf16", "length": 64})
    return Trainer(worker.build, tokens, recipe, out, World(0, 1, torch.device("cuda", 0)), Options(keep=0, **options))


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_training_learns_and_resumes(tokens: Path, tmp_path: Path, compiled: bool) -> None:
    one = trainer(tokens, tmp_path / "one", compile=compiled)
    one.run()
    rows = [row for row in read_log(tmp_path / "one" / "log.jsonl") if "loss" in row]
    losses = [row["loss"] for row in rows]
    assert len(losses) == 32
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.5
    assert rows[-1]["memory_gib"] > 0
    two = trainer(tokens, tmp_path / "two", compile=compiled)
    two.load(tmp_path / "one" / "checkpoints" / "step-00000018")
    two.run()
    again = [row["loss"] for row in read_log(tmp_path / "two" / "log.jsonl") if "loss" in row]
    np.testing.assert_allclose(again, losses[18:], atol=0.05)  # sums in another order, in bf16
    assert checkpoint.steps_of(tmp_path / "two" / "checkpoints")[-1] == 32


def test_the_profile_sees_kernels(tokens: Path, tmp_path: Path) -> None:
    result = measure(trainer(tokens, tmp_path), warmup=3, steps=4)
    assert 0 < result["busy"] <= 1
    assert result["kernels_per_step"] > 50
    assert result["tokens_per_second"] > 0
