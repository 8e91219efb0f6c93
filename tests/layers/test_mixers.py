"""Every mixer of the registry: decoding equals the parallel form, gradients, parameter counts, what its state does."""

import pytest
import torch

from ckda import transition
from ckda.layers import MIXERS, DeltaProduct, GatedDeltaNet, SeparateGates, build_mixer
from ckda.ops.call import unit

DELTA = [name for name, mixer in MIXERS.items() if mixer.is_delta_rule]
FORMS = {
    "tracking": {"conv_size": 0, "activate": ()},
    "language": {"conv_size": 4, "activate": ("q", "k", "v"), "output_gate": "linear"},
    "some": {"conv_size": 4, "activate": ("v",), "output_gate": None},
}


def make(name, form="tracking"):
    torch.manual_seed(1)
    options = FORMS[form] if MIXERS[name].is_delta_rule else {}
    return build_mixer(name, 24, 2, 8, **options).double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MIXERS)
def test_decoding_equals_the_parallel_form(name, form):
    if form != "tracking" and not MIXERS[name].is_delta_rule:
        pytest.skip("has no such options")
    layer = make(name, form)
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    first, cache = layer.prefill(x[:, :5])
    middle, cache = layer.prefill(x[:, 5:9], cache)
    steps = []
    for t in range(9, 13):
        y, cache = layer.step(x[:, t], cache)
        steps.append(y)
    torch.testing.assert_close(torch.cat([first, middle, torch.stack(steps, 1)], 1), layer(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
def test_every_parameter_gets_a_gradient(name):
    layer = make(name, "language")
    layer(torch.randn(2, 7, 24, dtype=torch.float64)).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", DELTA)
def test_packed_equals_separate(name):
    layer = make(name, "language")
    parts = [torch.randn(1, n, 24, dtype=torch.float64) for n in (5, 1, 6)]
    packed = layer(torch.cat(parts, 1), cu_seqlens=torch.tensor([0, 5, 6, 6, 12]))
    torch.testing.assert_close(packed, torch.cat([layer(part) for part in parts], 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", DELTA)
def test_matrices_are_what_happens_to_the_state(name):
    """From a random state, with values silenced, the next state is the transition times it."""
    layer = make(name)
    layer.v_proj.weight.data.zero_()
    x, state = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 1, 24), (1, 2, 8, layer.head_v_dim)))
    _, cache = layer.prefill(x)
    _, cache = layer.prefill(x, cache._replace(state=state))
    torch.testing.assert_close(cache.state, layer.matrices(x)[:, 0] @ state, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
def test_no_sequences_and_no_tokens(B, T, name):
    """Right shapes, zero gradients, and a cache from which the next tokens go on as from the beginning."""
    layer = make(name, "language")
    x = torch.randn(B, T, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    if MIXERS[name].is_delta_rule:
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    _, cache = layer.prefill(x)
    more = torch.randn(B, 3, 24, dtype=torch.float64)
    first, cache = layer.prefill(more, cache)
    last, _ = layer.step(more[:, 0], cache)
    assert last.shape == (B, 24)
    if T == 0:
        torch.testing.assert_close(first, layer(more), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", DELTA)
def test_padding_changes_nothing(name):
    layer = make(name, "language")
    x, mask = torch.randn(2, 9, 24, dtype=torch.float64), torch.ones(2, 9)
    mask[0, :4], mask[1, 6:] = 0, 0
    y = layer(x, attention_mask=mask)
    torch.testing.assert_close(y[0, 4:], layer(x[:1, 4:])[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(y[1, :6], layer(x[1:, :6])[0], rtol=1e-9, atol=1e-11)


def test_gated_delta_net_has_one_gate_a_head():
    alpha, _, beta = make("gdn").transitions(torch.randn(1, 4, 24, dtype=torch.float64))
    assert (alpha == alpha[..., :1]).all()
    assert ((alpha > 0) & (alpha < 1)).all()
    assert beta.max() < 1 < make("gdn-beta2").transitions(torch.randn(1, 99, 24, dtype=torch.float64)).beta.max()
    assert (make("deltanet").transitions(torch.randn(1, 4, 24, dtype=torch.float64)).alpha == 1).all()


def test_delta_product_is_the_product_of_its_factors():
    layer = make("gated-deltaproduct3")
    x = torch.randn(1, 2, 24, dtype=torch.float64)
    k = unit(layer.k_proj(x).view(1, 2, 3, 2, 8))
    beta = 2 * torch.sigmoid(layer.b_proj(x).view(1, 2, 3, 2))
    factors = [transition.dense(torch.ones_like(k[:, :, i]), k[:, :, i], beta[:, :, i]) for i in range(3)]
    alpha = torch.exp(-layer.A_log.exp() * torch.nn.functional.softplus(layer.a_proj(x) + layer.dt_bias))
    expected = alpha[..., None, None] * factors[2] @ factors[1] @ factors[0]
    torch.testing.assert_close(layer.matrices(x), expected)


def test_equal_separate_gates_are_complex_kda():
    """erase = 2 sigmoid(z), write = sigmoid(z) with one z a head is CKDA with half the value."""
    separate, joint = make("ckda-separate"), make("ckda")
    shared = {name: p for name, p in separate.state_dict().items() if name in joint.state_dict()}
    joint.load_state_dict(joint.state_dict() | shared)
    separate.e_proj.weight.data = joint.b_proj.weight.data.repeat_interleave(8, 0)
    separate.w_proj.weight.data = joint.b_proj.weight.data.repeat_interleave(8, 0)
    separate.v_proj.weight.data = 2 * joint.v_proj.weight.data
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(separate(x), joint(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("gdn", {}, 342.33),
        ("ckda", {}, 344.87),
        ("kda", {}, 344.87),
        ("deltaproduct1", {}, 342.07),  # what the table's figure counts: one factor
        ("deltaproduct2", {}, 375.53),
    ],
)
def test_parameter_totals_of_the_340m_table(name, options, millions):
    """tab:arch_tab: 28 layers of d = 768, 12 heads of 64, SwiGLU of 2816, vocabulary 50,304 untied, linear output gate."""
    settings = {"conv_size": 4, "activate": ("q", "k", "v"), "output_gate": "linear"} | options
    mixer = sum(p.numel() for p in build_mixer(name, 768, 12, 64, **settings).parameters())
    total = 28 * (mixer + 3 * 768 * 2816 + 2 * 768) + 768 + 2 * 50_304 * 768
    assert round(total / 1e6, 2) == millions


def test_tracking_sizes():
    sizes = {}
    for name, mixer in MIXERS.items():
        options = {"conv_size": 0, "activate": ()} if mixer.is_delta_rule else {}
        sizes[name] = sum(p.numel() for p in build_mixer(name, 48, 12, 16, **options).parameters())
    assert sizes["ckda"] == sizes["kda"] == 4 * 48 * 192 + 2 * (48 * 16 + 16 * 192) + 192 + 48 * 12 + 12 + 192 + 16
    assert sizes["gdn"] - sizes["deltanet"] == 48 * 12 + 2 * 12
    assert sizes["gated-deltaproduct2"] - sizes["deltaproduct2"] == 48 * 12 + 2 * 12
    assert sizes["attention"] == 4 * 48 * 192
    assert sizes["gru"] == 6 * 48 * 48 + 6 * 48


@pytest.mark.parametrize(
    ("make_one", "says"),
    [
        (lambda: GatedDeltaNet(8, 1, 8, gate="signed"), "gate is 'signed'"),
        (lambda: SeparateGates(8, 1, 8, beta_range=2), "beta_range is 2"),
        (lambda: SeparateGates(8, 1, 8, erase_range=3), "erase_range is 3"),
        (lambda: DeltaProduct(8, 1, 8, num_updates=0), "num_updates is 0"),
        (lambda: build_mixer("lstm", 8, 1, 8), "no mixer 'lstm'"),
    ],
)
def test_wrong_options_are_refused(make_one, says):
    with pytest.raises(ValueError, match=says):
        make_one()
