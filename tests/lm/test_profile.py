"""What a steady update costs is measured at a learning rate that there is."""

import pytest
import torch

from ckda.lm.models import config_of
from ckda.lm.parallel import World
from ckda.lm.profile import measure
from ckda.lm.recipe import Recipe
from ckda.lm.tiny import tiny_tokens
from ckda.lm.train import Trainer
from ckda.models import ComplexKDAForCausalLM


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_no_schedule_is_ever_negative(schedule):
    recipe = Recipe(steps=20, warmup=10, schedule=schedule)
    factors = [recipe.factor(step) for step in range(60)]
    assert min(factors) >= 0, factors
    assert max(factors) <= 1


def test_timing_past_the_end_of_a_recipe_is_refused(tmp_path):
    data = tiny_tokens(tmp_path / "tokens")
    recipe = Recipe(steps=20, length=16, batch=2, warmup=1, dtype="fp32", eval_tokens=64)
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(lambda: ComplexKDAForCausalLM(config_of("tiny:ckda")), data, recipe, tmp_path / "run", world)
    with pytest.raises(ValueError, match="the recipe has 20 updates; timing after update 0 needs 21"):
        measure(trainer, warmup=1, steps=20, profile=False)
    measured = measure(trainer, warmup=1, steps=2, profile=False)
    assert measured["tokens_per_second"] > 0
    assert trainer.step == 3
