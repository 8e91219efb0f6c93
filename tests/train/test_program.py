"""Ensembles side by side, batches drawn in blocks, culling, recorded updates on a GPU."""

from functools import partial

import pytest
import torch

from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem
from ckda.train import Ensemble, Muon, Program, Recipe, TimeUp, train

TASK = WordProblem.named("S3")


def make(seeds=(0, 1), mixer="ckda", device="cpu", **changes):
    recipe = Recipe(**{"steps": 12, "batch": 4, "curriculum": (4, 6), "block": 5} | changes)
    return Ensemble(partial(build_tracker, mixer, TASK), TASK, recipe, seeds, device)


def run(ensemble, steps):
    return [ensemble.train_step() for _ in range(steps)]


def test_side_by_side_is_one_by_one():
    alone = make()
    run(alone, 12)
    together = [make(), make(mixer="kda", steps=7)]
    program = Program(together)
    while program.advance():
        pass
    assert [e.step for e in together] == [12, 7]
    for name, parameter in alone.parameters.items():
        assert torch.equal(parameter, together[0].parameters[name]), name


@pytest.mark.parametrize("stop", [3, 5, 6, 8, 11])
def test_resume_in_the_middle_of_a_block(tmp_path, stop):
    """Blocks end where the length changes: updates 0-4, 5, 6-10, 11."""
    unbroken = make()
    run(unbroken, 12)
    first, second = make(), make()
    run(first, stop)
    first.save(tmp_path / "a.pt")
    second.load(tmp_path / "a.pt")
    run(second, 12 - stop)
    for name, parameter in unbroken.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


def test_culling_keeps_the_best_as_they_would_have_been():
    """The kept replicas, their optimisers and their batches are those of an ensemble of them alone."""
    ensemble = make(seeds=(0, 1, 2, 3), cull_at=6, keep=2)
    run(ensemble, 6)
    losses = ensemble.test_losses(6)
    run(ensemble, 6)
    best = sorted(losses.argsort()[:2].tolist())
    assert ensemble.seeds == tuple(best)
    assert ensemble.all_seeds == (0, 1, 2, 3)
    alone = make(seeds=ensemble.seeds)
    run(alone, 12)
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(parameter, ensemble.parameters[name], rtol=2e-3, atol=2e-4, msg=name)


def test_a_diverged_seed_is_culled():
    ensemble = make(seeds=(0, 1, 2), cull_at=3, keep=2)
    with torch.no_grad():
        ensemble.parameters["classifier.bias"][1] = torch.nan
    run(ensemble, 4)
    assert ensemble.seeds == (0, 2)


@pytest.mark.parametrize("stop", [4, 6, 9])
def test_resume_around_a_culling(tmp_path, stop):
    options = {"seeds": (0, 1, 2), "cull_at": 6, "keep": 1}
    unbroken = make(**options)
    run(unbroken, 12)
    first, second = make(**options), make(**options)
    run(first, stop)
    first.save(tmp_path / "a.pt")
    second.load(tmp_path / "a.pt")
    run(second, 12 - stop)
    assert second.seeds == unbroken.seeds
    for name, parameter in unbroken.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


def test_letters_of_the_curriculum():
    ensemble = make(curriculum=(4, 4), letters=("generators", "all"), batch=64)
    allowed = set(TASK.over("generators").letters)
    for step in range(12):
        ensemble.train_step()
        seen = set(ensemble.x[:, :, 1:].unique().tolist())
        assert seen <= allowed if step < 6 else seen == set(range(6))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"letters": ("all",)}, "letters has 1 entries"),
        ({"cull_at": 3}, "cull_at is 3 and keep is 0"),
        ({"cull_at": 60, "keep": 1}, "cull_at is 60"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        make(**changes)


def test_the_time_limit_leaves_a_checkpoint(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(TimeUp):
        train({"a": make()}, lambda _: path, quiet=True, time_limit=0.0)
    resumed = make()
    resumed.load(path)
    assert resumed.step == 1
    train({"a": resumed}, lambda _: path, quiet=True, look_every=4)
    assert resumed.history["update"] == [4, 8, 12]


def test_muon_pads_to_one_group():
    """What a GPU does, all shapes in one batch, against shape by shape."""
    torch.manual_seed(0)
    shapes = [(2, 12, 5), (2, 5, 12), (2, 3, 12), (2, 12, 5)]
    start, grads = [torch.randn(s) for s in shapes], [[torch.randn(s) for s in shapes] for _ in range(3)]
    apart, padded = (Muon([p.clone() for p in start], weight_decay=0.1) for _ in range(2))
    assert len(apart.groups) == 3
    padded.groups = [[0, 1, 2, 3]]
    for g in grads:
        apart.step(g, 0.1)
        padded.step(g, torch.tensor(0.1))
    for a, b in zip(apart.parameters, padded.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_recorded_updates_are_the_same_updates():
    """Two arms with penalties, culling, two lengths and a momentum that cycles: replayed graphs against plain launches."""
    options = {
        "device": "cuda",
        "momentum": "cycled",
        "steps": 40,
        "block": 8,
        "penalties": {"closure": 0.1},
        "ramp": (0.5, 0.6),
    }
    plain, recorded = ([make(mixer=m, **options) for m in ("ckda", "kda")] for _ in range(2))
    for arms, record in ((plain, False), (recorded, True)):
        program = Program(arms, record=record)
        while program.advance():
            pass
        assert program.recorded == record
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a.losses, b.losses, rtol=1e-2, atol=1e-3)
        for name, parameter in a.parameters.items():
            torch.testing.assert_close(parameter, b.parameters[name], rtol=2e-2, atol=5e-3, msg=name)


@pytest.mark.gpu
def test_an_advance_does_not_wait():
    program = Program([make(device="cuda", steps=60, curriculum=(4,))])
    for _ in range(8):
        program.advance()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            program.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert program.recorded
    assert program.ensembles[0].step == 28
