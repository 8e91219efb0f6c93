"""What only a GPU shows: bf16 training, recorded updates, losses that come back by themselves, how busy the device is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckda.lm import checkpoint
from ckda.lm.log import read_log
from ckda.lm.models import config_of
from ckda.lm.parallel import World
from ckda.lm.profile import measure
from ckda.lm.recipe import Recipe
from ckda.lm.train import Options, Trainer, prefetched
from ckda.lm.units import Conditions, Unit, evaluate_on, run_unit
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM

from . import worker

pytestmark = pytest.mark.gpu


def small() -> ComplexKDAForCausalLM:
    """One layer without attention, whose backward pass torch does not promise to repeat to the bit."""
    sizes = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "head_dim": 16}
    return ComplexKDAForCausalLM(ComplexKDAConfig(num_hidden_layers=1, **sizes))


def trainer(
    tokens: Path,
    out: Path,
    build: Callable[[], Any] = worker.build,
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    values = worker.RECIPE | {"dtype": "bf16", "length": 64} | (recipe or {})
    world = World(0, 1, torch.device("cuda", 0))
    return Trainer(build, tokens, Recipe(**values), out, world, Options(keep=0, **options))


def first_losses(one: Trainer, updates: int) -> list[float]:
    """Of so many updates without validation or checkpoint."""
    with prefetched(one.batches(0, updates), one.world.device) as batches:
        return torch.stack([one.update(batches)[0] for _ in range(updates)]).tolist()


def test_bf16_training_learns_and_resumes(tokens: Path, tmp_path: Path) -> None:
    one = trainer(tokens, tmp_path / "one")
    one.run()
    assert one.recorded, one.eager_because
    rows = [row for row in read_log(tmp_path / "one" / "log.jsonl") if row.loss is not None]
    losses = [row.loss for row in rows]
    assert len(losses) == 32
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.5
    assert rows[-1].memory_gib > 0
    two = trainer(tokens, tmp_path / "two")
    two.load(tmp_path / "one" / "checkpoints" / "step-00000018")
    two.run()
    again = [row.loss for row in read_log(tmp_path / "two" / "log.jsonl") if row.loss is not None]
    np.testing.assert_allclose(again, losses[18:], atol=0.05)  # sums in another order, in bf16
    assert checkpoint.steps_of(tmp_path / "two" / "checkpoints")[-1] == 32


@pytest.mark.parametrize("micro", [0, 2])
def test_recorded_updates_are_the_same(tokens: Path, tmp_path: Path, micro: int) -> None:
    found = {}
    for graph in (True, False):
        one = trainer(tokens, tmp_path, small, {"micro": micro}, graph=graph)
        found[graph] = first_losses(one, 10)
        assert one.recorded == graph, one.eager_because
    assert len(set(found[True])) == 10  # every batch reaches the model
    np.testing.assert_allclose(found[True], found[False], atol=1e-3)


def test_compiled_layers_train(tokens: Path, tmp_path: Path) -> None:
    """Fast: one layer, two updates, which are too few to be recorded."""
    compiled = first_losses(trainer(tokens, tmp_path, small, compile=True), 2)
    plain = first_losses(trainer(tokens, tmp_path, small), 2)
    np.testing.assert_allclose(compiled, plain, atol=0.05)


def test_the_profile_sees_kernels(tokens: Path, tmp_path: Path) -> None:
    """Also those inside a CUDA graph."""
    result = measure(trainer(tokens, tmp_path, small, {"steps": 100}), steps=4)
    assert result["recorded"], result["eager_because"]
    assert 0 < result["busy"] <= 1, result.get("reason")
    assert result["kernels_per_step"] > 50
    assert result["tokens_per_second"] > 0


def test_a_unit_is_recorded_and_its_cooldown_is_the_straight_run(tokens: Path, tmp_path: Path) -> None:
    """The trunk goes on from the kept state although its updates are replays of a CUDA graph."""
    sizes = {"vocab_size": 304, "num_hidden_layers": 1}
    unit = Unit("u", "tiny:ckda", "A", 1, (1280, 2560), lr=1e-2, batch=2, length=64, warmup=4, changes=sizes, looks=1)
    found = run_unit(unit, Conditions(str(tokens), "cuda", eval_tokens=512, look_sequences=1, look_sample=2))
    assert found["eager_because"] is None
    recipe = {"steps": 20, "length": 64, "batch": 2, "warmup": 4, "lr": 1e-2, "seed": 1, "eval_tokens": 512}
    one = trainer(tokens, tmp_path, lambda: ComplexKDAForCausalLM(config_of("tiny:ckda", **sizes)), recipe)
    first_losses(one, 20)
    assert abs(found["cells"][1]["held_out"] - evaluate_on(one, "held_out")) < 0.02
