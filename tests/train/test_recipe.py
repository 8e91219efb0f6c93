"""Schedules, curricula and penalties of the small trainer."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from ckda.train import Ensemble, Recipe, warmup_cosine


def test_schedule_never_jumps():
    for options in ({}, {"tail": 0.3}):
        factors = [warmup_cosine(step, 1000, **options) for step in range(1000)]
        assert max(factors) == 1.0
        assert all(a / b < 1.04 for a, b in pairwise(factors[100:]))
    assert factors[-1] == pytest.approx(1e-5)


def test_a_recipe_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 switches; a curriculum of 2 lengths has 1"):
        Recipe(curriculum=(4, 8), switches=(3, 5))
    with pytest.raises(ValueError, match="schedule is 'linear'"):
        Recipe(schedule="linear")
    for options in ({"momentum": "falling"}, {"momentum": "cycled", "schedule": "cosine"}):
        with pytest.raises(ValueError, match="it must be a number, or 'cycled' with 'one_cycle'"):
            Recipe(**options)
    with pytest.raises(ValueError, match=r"momentum is 1\.0"):
        Recipe(momentum=1.0)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, trace=False):
        y = x * self.weight
        return (y, {"weight": self.weight}) if trace else y

    def uses_muon(self, name, parameter):
        return False


class _Task:
    def batch(self, size, length, generator):
        return torch.ones(size, 2), torch.ones(size, 2)

    def losses(self, output, y):
        return (output - y).square().mean((1, 2))

    def key(self):
        return {}


class _Penalized(_Task):
    def penalty(self, name, trace, y):
        return trace["weight"].square().sum(-1)


def test_penalties_act_from_their_ramp_on():
    recipe = Recipe(steps=4, batch=3, curriculum=(1,), penalties={"size": 1.0}, ramp=(0.5, 0.5))
    ensemble = Ensemble(_Model, _Penalized(), recipe, seeds=(0,))
    weights = []
    for _ in range(4):
        assert ensemble.train_step().shape == (1,)
        weights.append(ensemble.parameters["weight"].detach().clone())
    assert torch.equal(weights[0], torch.ones(1, 2))
    assert torch.equal(weights[1], weights[0])
    assert (weights[3] < weights[1]).all()
    with pytest.raises(ValueError, match="_Task defines none"):
        Ensemble(_Model, _Task(), Recipe(steps=2, batch=1, penalties={"size": 1.0}), seeds=(0,)).train_step()
