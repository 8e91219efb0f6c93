"""The batched trainer: replicas are independent, a resumed run equals an unbroken one, damaged files change nothing."""

from functools import partial

import pytest
import torch

from ckda.experiments.tracking.model import build_tracker as build
from ckda.experiments.tracking.task import WordProblem, correct_products, scaled_accuracy
from ckda.train import Ensemble, Recipe, cycled_momentum, newton_schulz, one_cycle
from ckda.train.optimizers import AdamW, Muon

TASK = WordProblem.named("S3")
RECIPE = Recipe(steps=12, batch=4, curriculum=(4, 6))


def make(seeds=(0, 1), arm="ckda", recipe=RECIPE):
    return Ensemble(partial(build, arm, TASK), TASK, recipe, seeds)


def run(ensemble, steps):
    return torch.stack([ensemble.train_step() for _ in range(steps)])


def test_a_replica_is_what_its_seed_alone_would_give():
    together, alone = run(make((3, 5)), 4), run(make((5,)), 4)
    torch.testing.assert_close(together[:, 1], alone[:, 0], rtol=1e-4, atol=1e-5)
    assert (together[:, 0] != together[:, 1]).all()


def test_resume_is_exact(tmp_path):
    unbroken = make()
    losses = run(unbroken, 12)
    first = make()
    run(first, 5)
    first.save(tmp_path / "a.pt")
    second = make()
    second.load(tmp_path / "a.pt")
    assert second.step == 5
    assert torch.equal(run(second, 7), losses[5:])
    for name, parameter in unbroken.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


@pytest.mark.parametrize("damage", ["cut", "text", "another seed", "another recipe"])
def test_a_foreign_or_damaged_checkpoint_changes_nothing(tmp_path, damage):
    path = tmp_path / "a.pt"
    source = make((9, 9)) if damage == "another seed" else make(recipe=Recipe(steps=99, batch=4, curriculum=(4, 6)))
    source = source if damage.startswith("another") else make()
    source.save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "text":
        path.write_text("not a checkpoint")
    ensemble = make()
    before = {name: p.clone() for name, p in ensemble.parameters.items()}
    with pytest.raises(ValueError, match=r"a\.pt"):
        ensemble.load(path)
    assert ensemble.step == 0
    assert all(torch.equal(p, before[name]) for name, p in ensemble.parameters.items())


@pytest.mark.slow
def test_learning_lowers_the_loss():
    """Parity is learned within 150 small updates: the loss falls from log 2 to below 0.1."""
    task = WordProblem.named("Z2")
    ensemble = Ensemble(partial(build, "ckda", task), task, Recipe(steps=150, batch=16, curriculum=(4,)), (0,))
    losses = torch.stack([ensemble.train_step() for _ in range(150)])
    assert losses[0] > 0.5
    assert losses[-10:].mean() < 0.1
    correct = correct_products(ensemble, task, 1, 64, 8, "cpu")
    assert scaled_accuracy(correct, (4,), 2)[4] > 0.8


def test_products_are_those_of_the_table():
    x = torch.randint(6, (3, 37))
    y = TASK.products(x)
    running = x[:, 0]
    for t in range(1, 37):
        running = TASK.table[x[:, t], running]
        assert torch.equal(running, y[:, t])


def test_adamw_equals_torch():
    torch.manual_seed(0)
    p, grads = torch.randn(2, 3), [torch.randn(2, 3) for _ in range(5)]
    theirs = p.clone().requires_grad_()
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    ours = p.clone()
    optimizer = AdamW([ours], weight_decay=0.1)
    for g in grads:
        theirs.grad = g.clone()
        reference.step()
        optimizer.step([g], 0.01)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_adamw_in_one_kernel():
    """What a GPU runs, on the CPU, which has that kernel too."""
    start, grads = (
        [torch.randn(2, 3), torch.randn(2, 4, 5)],
        [[torch.randn(2, 3), torch.randn(2, 4, 5)] for _ in range(5)],
    )
    ours, fused = (AdamW([p.clone() for p in start], weight_decay=0.1) for _ in range(2))
    for g in grads:
        ours.step(g, 0.01)
        fused.count += 1
        fused._fused(g, torch.tensor(0.01))
    for a, b in zip(ours.parameters, fused.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_newton_schulz_keeps_the_singular_vectors():
    torch.manual_seed(0)
    G = torch.randn(4, 6, 5, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    core = U.mT @ newton_schulz(G, steps=12) @ Vh.mT
    off = core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-8
    assert (core.diagonal(dim1=-2, dim2=-1) - 1).abs().max() < 0.4


def test_one_cycle_matches_torch():
    """Learning rate and momentum at every step, as torch sets them for an optimiser that has a momentum."""
    steps, recipe = 50, Recipe(steps=50, momentum="cycled")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.95)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        theirs = optimizer.param_groups[0]
        assert one_cycle(step, steps, 0.1) == pytest.approx(theirs["lr"], rel=1e-6, abs=1e-9)
        assert cycled_momentum(step, steps, 0.1) == pytest.approx(theirs["momentum"], abs=1e-12)
        assert recipe.rates(step)[3] == cycled_momentum(step, steps, 0.1)
        optimizer.step()
        if step < steps - 1:
            schedule.step()


def _plain_muon(p, grads, lr, momenta):
    """One matrix, update by update, from the definition."""
    velocity = torch.zeros_like(p)
    for g, momentum in zip(grads, momenta, strict=True):
        velocity = momentum * velocity + g
        p = p - lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * newton_schulz(g + momentum * velocity)
    return p


def test_muon_takes_its_momentum_update_by_update():
    torch.manual_seed(0)
    p, grads = torch.randn(1, 6, 3), [torch.randn(1, 6, 3) for _ in range(6)]
    momenta = [cycled_momentum(step, 6, 0.5) for step in range(6)]
    optimizer = Muon([p.clone()])
    for g, momentum in zip(grads, momenta, strict=True):
        optimizer.step([g], 0.1, torch.tensor(momentum))
    torch.testing.assert_close(optimizer.parameters[0][0], _plain_muon(p[0], [g[0] for g in grads], 0.1, momenta))
    constant = _plain_muon(p[0], [g[0] for g in grads], 0.1, [0.95] * 6)
    assert (optimizer.parameters[0][0] - constant).abs().max() > 1e-3


def test_cycled_momentum_trains_otherwise_than_constant():
    cycled, constant = (make(recipe=Recipe(steps=12, batch=4, curriculum=(4, 6), momentum=m)) for m in ("cycled", 0.95))
    first = [run(ensemble, 1) for ensemble in (cycled, constant)]
    assert torch.equal(*first)  # the first momentum is the same
    losses = [run(ensemble, 11) for ensemble in (cycled, constant)]
    assert (losses[0] - losses[1]).abs().max() > 1e-4


def test_a_checkpoint_from_before_momentum_was_a_field_is_constant(tmp_path):
    path = tmp_path / "a.pt"
    source = make()
    run(source, 2)
    source.save(path)
    assert "momentum" not in torch.load(path, weights_only=True)["key"]["recipe"]
    resumed = make()
    resumed.load(path)
    assert resumed.step == 2
    for momentum in ("cycled", 0.9):
        with pytest.raises(ValueError, match="another run"):
            make(recipe=Recipe(steps=12, batch=4, curriculum=(4, 6), momentum=momentum)).load(path)
