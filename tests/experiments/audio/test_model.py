"""The continuation models: sizes, the deaf column, causality, traces."""

import numpy as np
import pytest
import torch

from ckda.experiments.audio.inspect import spectra, told_apart
from ckda.experiments.audio.model import ARMS, build, fan, wind
from ckda.experiments.audio.task import Continuation, cut, groove
from ckda.train import Ensemble, Recipe

SIZES = {
    "kda": 182_040,
    "kda-beta2": 182_048,
    "kda-signed": 182_040,
    "ckda": 182_048,
    "deltaproduct2-gated": 224_800,
    "gru": 206_080,
    "transformer": 206_592,
}


@pytest.mark.parametrize(("arm", "size"), SIZES.items())
def test_parameter_counts_are_the_papers(arm, size):
    assert sum(p.numel() for p in build(arm).parameters()) == size


@pytest.mark.parametrize("arm", ARMS)
def test_causal_and_blank_input_writes_nothing(arm):
    torch.manual_seed(0)
    model = build(arm)
    x = torch.randn(2, 12, 64)
    y = model(x)
    torch.testing.assert_close(model(x[:, :9]), y[:, :9], atol=1e-5, rtol=1e-4)
    if hasattr(model.mixer, "v_proj"):
        assert torch.count_nonzero(model.mixer.v_proj(model.blank())) == 0


@pytest.mark.parametrize("arm", ["ckda", "deltaproduct2", "deltaproduct2-gated"])
def test_deaf_column_stays_zero_under_muon(arm):
    task = Continuation(cut(groove()))
    ensemble = Ensemble(lambda: build(arm), task, Recipe(steps=4, batch=4, curriculum=(12,)), seeds=(0, 1))
    before = ensemble.parameters["mixer.v_proj.weight"].detach().clone()
    for _ in range(2):
        ensemble.train_step()
    after = ensemble.parameters["mixer.v_proj.weight"].detach()
    assert torch.count_nonzero(after[:, :, -1]) == 0
    assert not torch.equal(before, after)


@pytest.mark.parametrize("arm", ["kda", "ckda", "deltaproduct2", "deltaproduct2-gated"])
def test_trace_transition_is_what_silence_does_to_the_readout(arm):
    """o_t = q^T A^n S, so with A diagonalisable the readouts obey A's characteristic polynomial (Cayley-Hamilton)."""
    torch.manual_seed(1)
    model = build(arm).double()
    x = torch.randn(1, 40, 64, dtype=torch.float64)
    x[:, 8:] = 0
    o = model.mixer.read(model.stream(x))
    _, trace = model(x, trace=True)
    assert torch.equal(o, trace["o"])
    for h in range(2):
        A = trace["A"][h].double()
        polynomial = torch.from_numpy(np.poly(A.detach().numpy()))  # leading coefficient first
        window = o[0, 12 : 12 + 17, h].flip(0)
        combination = (polynomial[:, None] * window).sum(0)
        assert combination.abs().max() < 2e-6 * polynomial.abs().max() * o[0, :, h].abs().max()


def test_delta_product_is_its_two_reflections():
    """A token of DeltaProduct_2 multiplies the state by the product of its factors, with both writes."""
    from ckda.layers import DeltaProduct

    torch.manual_seed(0)
    layer = DeltaProduct(6, num_heads=2, head_dim=3, reflection=True).double()
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    o = layer.read(x)
    k = torch.nn.functional.normalize(layer.k_proj(x).unflatten(-1, (2, 2, 3)), dim=-1)
    v = layer.v_proj(x).unflatten(-1, (2, 2, 3))
    beta = 2 * layer.b_proj(x).sigmoid().unflatten(-1, (2, 2))
    q = torch.nn.functional.normalize(layer.q_proj(x).unflatten(-1, (2, 3)), dim=-1) * 3**-0.5
    S = torch.zeros(2, 3, 3, dtype=torch.float64)
    for t in range(5):
        for i in range(2):
            key, rate = k[0, t, i], beta[0, t, i, :, None]
            S = S + (rate * key)[:, :, None] * (v[0, t, i] - torch.einsum("hk,hkv->hv", key, S))[:, None]
        torch.testing.assert_close(o[0, t], torch.einsum("hk,hkv->hv", q[0, t], S), atol=1e-6, rtol=1e-5)


def test_the_published_delta_product_starts_as_it_says():
    """Two factors I - 1.998 k k^T and a gate of .9999 a head, whatever the frame."""
    torch.manual_seed(0)
    model = build("deltaproduct2-gated")
    alpha, k, beta = model.mixer.transitions(model.stream(torch.randn(2, 5, 64)))
    assert beta.flatten().tolist() == pytest.approx([1.998] * beta.numel(), abs=1e-5)
    first, second = alpha.unflatten(1, (5, 2)).unbind(2)
    assert first.flatten().tolist() == pytest.approx([0.9999] * first.numel(), abs=1e-6)
    assert (second == 1).all()
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(k.shape[:-1]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_clock_turns_as_it_is_wound(seed):
    """Four heads start with 1, 2, 4 and 8 turns a loop: 32 phases apart, moduli near 1, no parameter more."""
    torch.manual_seed(seed)
    plain, model = build("ckda"), wind(build("ckda"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    heads = spectra(model, 32)
    lasting = [head for head in heads if head["modulus"] is not None and head["modulus"] > 0.98]
    assert sorted(round(head["turns"]) for head in lasting) == [1, 2, 4, 8]
    assert all(abs(head["turns"] - round(head["turns"])) < 0.05 for head in lasting)
    assert told_apart(heads, 32) == 32
    assert torch.count_nonzero(model.mixer.v_proj(model.blank())) == 0
    with pytest.raises(ValueError, match="only Complex KDA"):
        wind(build("kda-beta2"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fan_has_one_rate_in_each_part_of_the_range(seed):
    torch.manual_seed(seed)
    heads = spectra(fan(build("ckda")), 32)
    assert all(head["modulus"] > 0.98 for head in heads)
    assert sorted(int(head["turns"] / 2) for head in heads) == list(range(8))
    assert any(abs(head["turns"] - round(head["turns"])) > 0.05 for head in heads), "nothing in it knows the loop"


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("arm", ["ckda", "deltaproduct2-gated"])
def test_silence_by_powers_is_the_recurrence(trace, arm):
    torch.manual_seed(0)
    model = (fan(build(arm)) if arm == "ckda" else build(arm)).double()
    x = torch.randn(3, 50, 64, dtype=torch.float64)
    x[:, 8:] = 0
    plain = model(x, trace=True)
    model.cue = 8
    fast = model(x, trace=trace)
    torch.testing.assert_close(fast[0] if trace else fast, plain[0], rtol=1e-7, atol=1e-9)
    gradients = []
    for cue in (0, 8):
        model.cue = cue
        gradients.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    if trace:
        torch.testing.assert_close(fast[1]["o"], plain[1]["o"], rtol=1e-7, atol=1e-9)


def test_an_unknown_arm_is_named():
    with pytest.raises(ValueError, match="there is no arm 'lstm'"):
        build("lstm")
