"""begin=snapped: gates and learning rates near their ends become exact, others and short words stay as they are."""

from functools import partial

import pytest
import torch

from ckda.experiments.tracking.ends import FACTOR, snap, snapped
from ckda.experiments.tracking.model import Tracker, build_tracker
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.task import WordProblem

BUILD = partial(build_tracker, "ckda", WordProblem.named("S3"), heads=3, head_dim=4)


def _tracker() -> Tracker:
    """Head 0 is near its ends with all letters, head 1 with all but one, head 2 with its learning rates alone."""
    torch.manual_seed(0)
    model = BUILD()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(7, 48))
        rates = torch.tensor([[9.0, 9.0, -8.0], [10.0, -9.0, 9.0]]).repeat(3, 1)
        rates[3, 1] = 0.5
        model.mixer.b_proj.weight[:, :6] = rates.T
        model.mixer.f_proj[1].weight.zero_()
        bias = torch.tensor([[7.0, -7.0, 7.0, 8.0], [7.0, -7.0, 7.0, 0.1], [0.0, 0.2, 0.4, 9.0]])
        model.mixer.dt_bias.copy_(bias.flatten())
        model.mixer.A_log.zero_()
    return model


@torch.no_grad()
def test_what_is_near_becomes_exact_and_the_rest_stays() -> None:
    model = _tracker()
    before, read = model.symbols(), model(torch.arange(6).repeat(1, 4))
    assert snap(model) == 3  # two learning rates, one gate
    after = model.symbols()
    assert bool((after["alpha"][:, 0].abs() == 1).all())
    assert not (before["alpha"][:, 0].abs() == 1).any()
    assert torch.equal(after["alpha"][:, 1:], before["alpha"][:, 1:])
    assert bool(((after["beta"][:, [0, 2]] == 2) | (after["beta"][:, [0, 2]] < 1e-20)).all())
    assert not (before["beta"][:, [0, 2]] == 2).any()
    assert torch.equal(after["beta"][:, 1], before["beta"][:, 1])
    assert torch.equal(after["alpha"].sign(), before["alpha"].sign())
    assert (model(torch.arange(6).repeat(1, 4)) - read).abs().max() < 0.05


@torch.no_grad()
def test_a_stack_is_snapped_one_by_one() -> None:
    models = [_tracker(), BUILD()]
    stack = {name: torch.stack([m.state_dict()[name] for m in models]) for name in models[0].state_dict()}
    found = snapped(BUILD, stack)
    assert [snap(m) for m in models] == [3, 3]  # of a standard start all gates are near
    assert torch.allclose(found["mixer.A_log"].exp(), torch.tensor([[FACTOR, 1.0, 1.0], [FACTOR] * 3]))
    for r, model in enumerate(models):
        assert all(torch.equal(found[name][r], p) for name, p in model.state_dict().items())


@pytest.mark.parametrize("mixer", ["kda-softplus", "gru"])
def test_mixers_without_ends_are_refused(mixer: str) -> None:
    with pytest.raises(ValueError, match="begin=snapped"):
        snap(build_tracker(mixer, WordProblem.named("S3"), heads=3, head_dim=4))


def test_settle_closes_from_snapped_weights() -> None:
    change = RECIPES.read("exact+heads=16x4+settle")
    assert change.from_weights == "snapped"
    assert (change.recipe().penalties, change.recipe().penalty_factor(0)) == ({"closure": 1.0}, 1.0)
    assert change.model["heads"] == 16
