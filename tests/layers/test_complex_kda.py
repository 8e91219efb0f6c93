"""The layer: ranges, decoding, packing, initial states, initialisation, refusals."""

import pytest
import torch

from ckda import ComplexKDA, transition
from ckda.layers import RANGES
from ckda.ops.gate import beta_from_logit

torch.manual_seed(0)


def make(**options):
    torch.manual_seed(1)
    settings = {"num_heads": 2, "head_dim": 8, "gate_init": "standard"} | options
    return ComplexKDA(24, **settings).double()


VARIANTS = {
    "plain": {},
    "no convolution, no silu": {"conv_size": 0, "activate": ()},
    "silu on keys alone": {"activate": ("k",)},
    "grouped values": {"num_v_heads": 6, "head_v_dim": 5},
    "linear output gate": {"output_gate": "linear"},
    "no output gate": {"output_gate": None},
    "learned state": {"initial_state": "learned"},
    "identity state": {"initial_state": torch.eye(8)},
    "spread": {"gate_init": "spread", "beta_init": "spread"},
    "kda": {"gate": "sigmoid", "beta_range": 1},
    "classic kda": {"gate": "softplus", "beta_range": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_equals_the_parallel_form(name):
    layer = make(**VARIANTS[name])
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    whole = layer(x)
    y, cache = layer.prefill(x[:, :9])
    middle, cache = layer.prefill(x[:, 9:14], cache)
    steps = []
    for t in range(14, 21):
        out, cache = layer.step(x[:, t], cache)
        steps.append(out)
    decoded = torch.cat([y, middle, torch.stack(steps, 1)], 1)
    torch.testing.assert_close(decoded, whole, rtol=1e-9, atol=1e-11)


def test_a_cache_keeps_nothing_but_itself():
    """Not the projections of a long prompt, whose last tokens it holds."""
    _, cache = make().prefill(torch.randn(2, 50, 24, dtype=torch.float64))
    for x in (cache.state, *cache.past.values()):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("name", ["plain", "grouped values", "identity state"])
def test_packed_equals_separate(name):
    layer = make(**VARIANTS[name])
    parts = [torch.randn(1, n, 24, dtype=torch.float64) for n in (5, 1, 17)]
    packed = layer(torch.cat(parts, 1), cu_seqlens=torch.tensor([0, 5, 6, 6, 23]))
    separate = torch.cat([layer(part) for part in parts], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_a_gradient(name):
    layer = make(**VARIANTS[name])
    layer(torch.randn(2, 11, 24, dtype=torch.float64)).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_ranges_are_what_they_say():
    x = torch.randn(2, 50, 24)
    for name, (gate, beta_range) in RANGES.items():
        spread = "spread" if gate == "signed" else "standard"
        alpha, k, beta = ComplexKDA(24, 2, 8, gate=gate, beta_range=beta_range, gate_init=spread).transitions(x)
        assert alpha.abs().max() <= 1
        assert ((alpha < 0).any()) == (gate == "signed"), name
        assert 0 <= beta.min() <= beta.max() <= beta_range
        assert (beta.max() > 1) == (beta_range == 2), name
        torch.testing.assert_close(k.norm(dim=-1), torch.ones(k.shape[:-1]))


def test_transitions_are_those_of_the_operator():
    """One step from a random state by `transitions` and ckda.transition equals the layer's own state."""
    layer = make()
    x = torch.randn(1, 1, 24, dtype=torch.float64)
    start = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    _, empty = layer.prefill(x)
    _, cache = layer.prefill(x, empty._replace(state=start, past={}))
    alpha, k, beta = layer.transitions(x)
    v = layer._project(x, {})[0]["v"]
    expected = transition.apply(
        start, alpha[:, 0], beta[:, 0, :, None] * k[:, 0], k[:, 0], beta[:, 0, :, None] * v[:, 0]
    )
    torch.testing.assert_close(cache.state, expected, rtol=1e-5, atol=1e-6)


def test_gate_initialisation():
    """app:initialization: |alpha| = exp(-dt) with dt in [1e-3, 0.1]; spread flips about half of the signs."""
    torch.manual_seed(0)
    for gate in ("signed", "sigmoid", "softplus"):
        layer = ComplexKDA(64, 8, 32, gate=gate)
        layer.f_proj[1].weight.data.zero_()
        alpha = layer.transitions(torch.randn(1, 1, 64)).alpha
        assert 0.99e-3 < -alpha.log().max() < 1.3e-3
        assert 0.07 < -alpha.log().min() < 0.101
    spread = ComplexKDA(64, 8, 32, gate_init="spread")
    assert 0.4 < (spread.dt_bias < 0).float().mean() < 0.6


def test_beta_spread_has_modes_at_a_half_and_three_halves():
    """app:initialization, on unit-variance inputs with torch's default weights."""
    torch.manual_seed(0)
    layer = ComplexKDA(512, 8, 16, beta_init="spread")
    x = torch.randn(4096, 512)
    beta = beta_from_logit(layer.b_proj(x), 2)
    means = beta.mean(0)
    assert sorted((means > 1).tolist()) == [False] * 4 + [True] * 4
    torch.testing.assert_close(means.min(), torch.tensor(0.53), atol=0.03, rtol=0)
    plain = torch.sigmoid(torch.nn.Linear(512, 1, bias=False)(x)).std()
    torch.testing.assert_close(beta.std(0).mean(), plain, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"gate": "tanh"}, "gate is 'tanh'"),
        ({"beta_range": 3}, "beta_range is 3"),
        ({"num_v_heads": 3}, "num_v_heads is 3"),
        ({"output_gate": "full"}, "output_gate is 'full'"),
        ({"activate": ("o",)}, "activate"),
        ({"initial_state": "ones"}, "initial_state is 'ones'"),
        ({"initial_state": torch.eye(3)}, "initial_state"),
        ({"gate_init": "spread", "gate": "sigmoid"}, "gate spread"),
        ({"beta_init": "spread", "beta_range": 1}, "beta_init is 'spread'"),
    ],
)
def test_wrong_options_are_refused(options, names):
    with pytest.raises(ValueError, match=names):
        ComplexKDA(24, **({"num_heads": 2, "head_dim": 8} | options))


def test_prescribed_state_is_no_parameter():
    layer = make(initial_state=torch.eye(8))
    assert "initial_state" not in dict(layer.named_parameters())
    assert "initial_state" in layer.state_dict()


def test_zero_input_has_finite_transitions():
    layer = ComplexKDA(24, 2, 8)
    alpha, k, beta = layer.transitions(torch.zeros(1, 3, 24))
    assert alpha.isfinite().all()
    assert (k == 0).all()
    assert beta.isfinite().all()
