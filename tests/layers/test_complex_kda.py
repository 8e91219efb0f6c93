"""The layer: ranges, decoding, packing, initial states, initialisation, refusals."""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import Node

from ckda import ComplexKDA, transition
from ckda.layers import RANGES, ShortConvolution
from ckda.layers import complex_kda as layer_module
from ckda.layers.convolution import short_convolution
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
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"num_v_heads": 0}, "num_v_heads is 0"),
        ({"head_v_dim": 0}, "head_v_dim is 0"),
        ({"conv_size": -1}, "conv_size is -1"),
        ({"num_heads": 5, "head_dim": None}, "num_heads is 5; alone it must divide hidden_size = 24"),
        ({"num_heads": None, "head_dim": 7}, "head_dim is 7; alone it must divide hidden_size = 24"),
    ],
)
def test_wrong_options_are_refused(options, names):
    with pytest.raises(ValueError, match=names):
        ComplexKDA(24, **({"num_heads": 2, "head_dim": 8} | options))


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        ((256,), (2, 128)),
        ((192,), (3, 64)),
        ((24,), (3, 8)),
        ((24, 2), (2, 12)),
        ((24, None, 4), (6, 4)),
        ((24, 2, 5), (2, 5)),
    ],
)
def test_default_heads(arguments, heads):
    layer = ComplexKDA(*arguments)
    assert (layer.num_heads, layer.head_dim) == heads
    assert layer(torch.randn(1, 3, arguments[0])).shape == (1, 3, arguments[0])


def test_a_width_without_default_heads():
    with pytest.raises(ValueError, match="num_heads and head_dim are None; a hidden_size of 33 needs one"):
        ComplexKDA(33)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda layer, x: layer(x[0]), r"the shape of x is \[5, 24\]; it must be \[B, T, d\] = \[B, T, 24\]"),
        (lambda layer, x: layer(x[..., :20]), r"the shape of x is \[2, 5, 20\]"),
        (lambda layer, x: layer.prefill(x[0]), r"the shape of x is \[5, 24\]"),
        (lambda layer, x: layer.step(x, layer.prefill(x)[1]), r"the shape of x is \[2, 5, 24\]; it must be \[B, d\]"),
        (lambda layer, x: layer(x, attention_mask=torch.ones(2, 4)), r"attention_mask is \[2, 4\]; .* = \[2, 5\]"),
        (
            lambda layer, x: layer(x[:1], attention_mask=torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5])),
            "cu_seqlens and attention_mask are given",
        ),
        (
            lambda layer, x: layer.prefill(x, attention_mask=torch.tensor([[1, 1, 1, 1, 0]] * 2)),
            "padding right of a token",
        ),
    ],
)
def test_wrong_inputs_are_refused(use, says):
    layer, x = make(), torch.randn(2, 5, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match=says):
        use(layer, x)


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("name", ["plain", "no convolution, no silu", "learned state", "identity state", "classic kda"])
def test_padding_changes_nothing(name, padding):
    """Outputs and gradients of sequences of 7, 12 and 3 tokens in one padded batch are those of each alone."""
    layer = make(**VARIANTS[name])
    if name == "learned state":
        torch.nn.init.normal_(layer.initial_state)
    lengths, T = (7, 12, 3), 12 if padding != "both" else 20
    x = torch.randn(3, T, 24, dtype=torch.float64)
    mask = torch.zeros(3, T, dtype=torch.long)
    parts = []
    for b, n in enumerate(lengths):
        first = {"left": T - n, "right": 0, "both": 2 + b}[padding]
        mask[b, first : first + n] = 1
        parts.append(x[b : b + 1, first : first + n])
    y = layer(x.masked_fill(mask[..., None] == 0, torch.nan), attention_mask=mask)
    alone = torch.cat([layer(part)[0] for part in parts])
    torch.testing.assert_close(y[mask == 1], alone, rtol=1e-9, atol=1e-11)
    assert (y[mask == 0] == 0).all()
    parameters = list(layer.parameters())
    do = torch.randn_like(alone)
    expected = torch.autograd.grad(alone, parameters, do)
    torch.testing.assert_close(torch.autograd.grad(y[mask == 1], parameters, do), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["plain", "learned state"])
def test_decoding_after_padding_on_the_left(name):
    """A prompt with padding in front, in two parts, then one token: as without the padding."""
    layer = make(**VARIANTS[name])
    if name == "learned state":
        torch.nn.init.normal_(layer.initial_state)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    mask = torch.ones(2, 10)
    mask[0, :6] = 0  # the first part holds no token of this sequence
    _, cache = layer.prefill(x[:, :5], attention_mask=mask[:, :5])
    _, cache = layer.prefill(x[:, 5:9], cache, attention_mask=mask[:, 5:9])
    y, _ = layer.step(x[:, 9], cache, attention_mask=mask[:, 9])
    torch.testing.assert_close(y[0], layer(x[:1, 6:])[0, -1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(y[1], layer(x[1:])[0, -1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("conv_size", [4, 0])
def test_a_non_finite_token_changes_nothing_before_it(conv_size):
    layer, x = make(conv_size=conv_size), torch.randn(2, 40, 24, dtype=torch.float64)
    y = layer(x)
    x[0, 30] = torch.inf
    z = layer(x)
    assert torch.equal(y[0, :30], z[0, :30])
    assert torch.equal(y[1], z[1])
    assert not z[0, 30:].isfinite().any()


@pytest.mark.parametrize("graph", ["with gradients", "without"])
def test_export_with_any_length(graph):
    """torch.export with open B and T through the operator's fake implementation; the program can still be trained."""
    layer = make().float()
    sizes = {"x": {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("T", min=2, max=4096)}}
    with torch.set_grad_enabled(graph == "with gradients"):
        program = torch.export.export(layer, (torch.randn(2, 40, 24),), dynamic_shapes=sizes).module()
    assert sum("complex_kda" in str(node.target) for node in program.graph.nodes) == 1
    for B, T in ((1, 2), (3, 77)):
        x = torch.randn(B, T, 24, requires_grad=True)
        y, z = layer(x), program(x)
        torch.testing.assert_close(z, y)
        do = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(z, x, do), torch.autograd.grad(y, x, do))


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


def _nodes(y: torch.Tensor) -> Counter[str]:
    """How often autograd's nodes stand in the graph of y, by name."""
    assert y.grad_fn is not None
    seen: set[Node] = set()
    front = [y.grad_fn]
    while front:
        node = front.pop()
        if node not in seen:
            seen.add(node)
            front += [before for before, _ in node.next_functions if before is not None]
    return Counter(node.name() for node in seen)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_one_node_convolves_with_the_bits_of_three(name, packed, monkeypatch):
    """In the way of a GPU, by plain functions in the kernels' place: results and gradients, dx too."""
    layer, x = make(**VARIANTS[name]), torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    options = {"cu_seqlens": torch.tensor([0, 4, 5, 9])} if packed else {}

    def run():
        y = layer(x, **options)
        return _nodes(y), [y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])]

    plain, _ = run()
    with monkeypatch.context() as patch:
        patch.setattr(ShortConvolution, "convolve", lambda self, x, *rest: short_convolution(x, self.weight, *rest))
        three, wanted = run()
    monkeypatch.setattr(layer_module, "has_kernel", lambda x: True)
    one, found = run()
    layer.k_proj.register_forward_hook(lambda *arguments: None)  # then the convolutions have a node of their own
    apart, again = run()
    with_convolution = int(bool(layer.convolutions))
    num = [counts["DirectBackward"] for counts in (three, apart, one)]
    assert num == [3 * with_convolution, with_convolution, 0]
    assert [counts["TogetherBackward"] for counts in (three, apart, one)] == [1, 1, 1]
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(again[0], wanted[0])
    torch.testing.assert_close(again, wanted)
    views = {counts["ViewBackward0"] + counts["UnsafeViewBackward0"] for counts in (three, plain)}
    assert one["ViewBackward0"] + one["UnsafeViewBackward0"] == min(views) - 6 * with_convolution
    assert one["UnsafeViewBackward0"] == 0


def test_the_input_is_made_rows_once_and_only_where_nothing_looks_on():
    """The projections see rows in eager mode; mapped, with strides of its own, or cast as a leaf x keeps its axes."""
    layer, x = make(output_gate="linear"), torch.randn(2, 5, 24, dtype=torch.float64)
    seen = []
    for projection in (layer.q_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        projection.register_forward_hook(lambda module, inputs, y: seen.append(tuple(inputs[0].shape)))
    width = layer.o_proj.in_features
    layer(x)
    assert seen == [(10, 24)] * 3 + [(10, width)]
    seen.clear()
    torch.vmap(layer)(x.unsqueeze(1))
    assert seen == [(1, 5, 24)] * 3 + [(1, 5, width)]
    seen.clear()
    apart = torch.randn(5, 2, 24, dtype=torch.float64).transpose(0, 1)
    layer(apart)
    assert seen[:3] == [(2, 5, 24)] * 3
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(x.float().requires_grad_())
        assert seen[:3] == [(2, 5, 24)] * 3
        layer(x.float())
        assert seen[4:7] == [(10, 24)] * 3
