"""Linear layers of stacked replicas against the plain ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem
from ckda.train import Ensemble, Recipe
from ckda.train.stacked_linear import stack_linear_layers


@pytest.mark.parametrize("shape", [(5,), (8, 3), (128, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_mapped_over_replicas(shape, bias):
    layer = nn.Linear(4, 6, bias=bias).double()
    plain = nn.Linear(4, 6, bias=bias).double()
    stack_linear_layers(layer)
    names = [name for name, _ in layer.named_parameters()]
    parameters = {
        n: torch.randn(3, *p.shape, dtype=torch.float64, requires_grad=True) for n, p in layer.named_parameters()
    }
    x = torch.randn(3, *shape, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (layer, plain):
        y = vmap(partial(functional_call, module))(parameters, x)
        grads = torch.autograd.grad(y.sin().sum(), [x, *(parameters[n] for n in names)])
        results.append([y, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_unmapped_and_shared_inputs():
    layer, plain = nn.Linear(4, 6).double(), nn.Linear(4, 6).double()
    plain.load_state_dict(layer.state_dict())
    stack_linear_layers(layer)
    x = torch.randn(7, 4, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters())),
        torch.autograd.grad(plain(x).sin().sum(), list(plain.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    weights = {n: torch.stack([p, 2 * p]) for n, p in plain.named_parameters()}
    shared = [vmap(lambda w, m=m: functional_call(m, w, (x,)))(weights) for m in (layer, plain)]
    torch.testing.assert_close(*shared)


def test_an_ensemble_trains_the_same():
    """As on a GPU, where the layers are stacked, but here on the CPU."""
    task, recipe = WordProblem.named("S3"), Recipe(steps=4, batch=8, curriculum=(4,))
    plain, stacked = (Ensemble(partial(build_tracker, "ckda", task), task, recipe, (0, 1)) for _ in range(2))
    stack_linear_layers(stacked.skeleton)
    for _ in range(4):
        torch.testing.assert_close(plain.train_step(), stacked.train_step(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        plain.call("prefill", plain.x)[0], stacked.call("prefill", plain.x)[0], rtol=1e-3, atol=1e-3
    )
    assert plain.key() == stacked.key()
