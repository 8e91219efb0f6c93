"""The sign factor: one at the start, exactly; gradients through zero; and the layer that holds it."""

import pytest
import torch

from ckda import ComplexKDA
from ckda.layers import SignFactor
from ckda.layers.sign_factor import START, sign_factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_exactly_one_at_the_start_and_beyond(dtype):
    factor = sign_factor(torch.tensor([START, 2 * START, 100.0], dtype=dtype))
    assert factor.log.eq(0).all()
    assert factor.sign.eq(1).all()
    assert sign_factor(torch.tensor([-START, -50.0], dtype=dtype)).alpha().eq(-1).all()


def test_it_is_odd_and_rises():
    u = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    s = sign_factor(u).alpha()
    assert (s.diff() >= 0).all()
    assert s.abs().max() <= 1
    torch.testing.assert_close(s[u > 0], -s.flip(0)[u > 0])


def test_the_slope_is_the_same_on_both_sides_of_zero():
    u = torch.tensor([-1e-6, 1e-6, -START / 2, START / 2], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(sign_factor(u).alpha().sum(), u)
    torch.testing.assert_close(slope[:2].flip(0), slope[:2])
    assert (slope[:2] > 0.5).all(), "a gate that stands at zero must move"
    torch.testing.assert_close(slope[2], slope[3])


@pytest.mark.parametrize("start", [START, 4 * START])
def test_descent_carries_a_gate_through_zero(start):
    """From the start, where the clamp begins, and from beyond it, where a plain clamp has no gradient."""
    u = torch.full((), start, requires_grad=True)
    optimizer = torch.optim.Adam([u], 0.1)
    for _ in range(400):
        optimizer.zero_grad()
        (sign_factor(u).alpha() + 0.5).square().backward()
        optimizer.step()
    assert abs(float(sign_factor(u.detach()).alpha()) + 0.5) < 0.02


def test_at_the_clamp_no_gradient_asks_for_more():
    u = torch.tensor([START, 2 * START, START / 2], requires_grad=True)
    (du,) = torch.autograd.grad(-sign_factor(u).log.sum(), u)
    assert du.tolist()[:2] == [0, 0]
    assert du[2] < 0


@pytest.mark.parametrize(("gate", "beta_range"), [("sigmoid", 1), ("sigmoid", 2), ("softplus", 1)])
def test_the_layer_is_kda_at_the_start_over_4096_tokens(gate, beta_range):
    """Gates of exp(-1e-3) to exp(-1e-4) a token, which remember: the deviation is rounding, far below 1e-3."""
    kda = ComplexKDA(16, 2, 8, gate=gate, beta_range=beta_range)
    with torch.no_grad():
        dt = torch.logspace(-4, -3, 16, dtype=torch.float64)
        rate = kda.A_log.double().exp().repeat_interleave(8)
        bias = torch.log(dt / 5) if gate == "sigmoid" else torch.log(torch.expm1(dt / rate))
        kda.dt_bias.copy_(bias)
    layer = SignFactor(16, 2, 8, gate=gate, beta_range=beta_range)
    layer.load_state_dict(kda.state_dict(), strict=False)
    x = torch.randn(1, 4096, 16)
    before, cache = kda.prefill(x)
    after, cache_after = layer.prefill(x)
    assert (after - before).abs().max() < 1e-5 * before.abs().max()
    assert (cache_after.state - cache.state).abs().max() < 1e-5 * cache.state.abs().max()


def test_padding_keeps_an_initial_state_whatever_the_signs():
    layer = SignFactor(16, 2, 8, initial_state="learned")
    with torch.no_grad():
        layer.initial_state.normal_()
        layer.s_proj.bias.fill_(-1.0)
    x = torch.randn(1, 5, 16)
    padded = torch.cat([torch.randn(1, 3, 16), x], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(layer(padded, attention_mask=mask)[:, 3:], layer(x))


def test_transitions_hold_the_signs():
    layer = SignFactor(16, 2, 8)
    with torch.no_grad():
        layer.s_proj.bias.fill_(-0.3)
    x = torch.randn(1, 5, 16)
    alpha, _, beta = layer.transitions(x)
    assert (alpha < 0).all()
    assert torch.equal(layer.factors(x) < 0, alpha < 0)
    assert beta.shape == (1, 5, 2)


@pytest.mark.parametrize("options", [{"gate": "signed"}, {"gate_init": "spread"}, {"beta_init": "spread"}])
def test_bad_input(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SignFactor(16, 2, 8, **options)
