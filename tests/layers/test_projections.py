"""The projections of one input as one node: the same as by the modules, wherever it is taken; and where it is not."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ckda import ComplexKDA
from ckda.layers import MIXERS, build_mixer, gated_norm
from ckda.layers import complex_kda as layer_module
from ckda.layers.projections import project_together

DELTA = [name for name, mixer in MIXERS.items() if mixer.is_delta_rule]
OPTIONS = {
    "plain": {},
    "widths that eight does not divide": {"head_dim": 5, "head_v_dim": 3, "num_v_heads": 6},
    "biases": {"beta_init": "spread", "output_gate": "linear"},
    "no gate, no convolution": {"output_gate": None, "conv_size": 0},
}


@pytest.fixture(params=["as on a CPU", "as on a GPU"], autouse=True)
def way(request, monkeypatch):
    """On a GPU the convolutions are in the projections' node, and the norm is in one with the output's projection."""
    if request.param == "as on a GPU":
        for module, name in ((layer_module, "has_kernel"), (gated_norm, "_is_one_node")):
            monkeypatch.setattr(module, name, lambda x: not torch.compiler.is_compiling())
    return request.param


def make(dtype=torch.float64, **options):
    torch.manual_seed(1)
    return ComplexKDA(24, **({"num_heads": 2, "head_dim": 8} | options)).to(dtype)


def an_input(dtype=torch.float64, B=2, T=9):
    torch.manual_seed(2)
    return torch.randn(B, T, 24, dtype=dtype, requires_grad=True)


def counts(y):
    """How often autograd's nodes stand in the graph of y, by name."""
    seen, front = set(), [y.grad_fn]
    while front:
        node = front.pop()
        if node is not None and node not in seen:
            seen.add(node)
            front += [before for before, _ in node.next_functions]
    return Counter(node.name() for node in seen)


def is_taken(y):
    return counts(y)["TogetherBackward"] == 1


@pytest.fixture
def by_modules(monkeypatch):
    """A function's result with every projection by its module."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(layer_module, "project_together", lambda *_: {})
            patch.setattr(layer_module, "norm_and_project", lambda *_: None)
            return function()

    return run


def both_ways(layer, x, use=None):
    """The output and the gradients of x and of all parameters that are trained."""
    y = layer(x) if use is None else use(layer, x)
    leaves = [z for z in (x, *layer.parameters()) if z.requires_grad]
    torch.manual_seed(3)
    return y, torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype), allow_unused=True)


def assert_same(layer, x, by_modules, taken=True, use=None, **tolerance):
    y, found = both_ways(layer, x, use)
    z, wanted = by_modules(lambda: both_ways(layer, x, use))
    assert (is_taken(y), is_taken(z)) == (taken, False)
    assert torch.equal(y, z)
    torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_the_modules(name, dtype, by_modules):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    layer, x = make(dtype, **OPTIONS[name]), an_input(dtype)
    assert_same(layer, x, by_modules, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("packed", [False, True])
def test_every_layer_of_the_kind(name, packed, by_modules):
    torch.manual_seed(1)
    layer, x = build_mixer(name, 24, 2, 8, conv_size=4).double(), an_input(B=1)
    options = {"cu_seqlens": torch.tensor([0, 4, 4, 9])} if packed else {"attention_mask": torch.ones(1, 9)}
    assert_same(layer, x, by_modules, use=lambda layer, x: layer(x, **options), rtol=1e-10, atol=1e-12)


USES = {
    "the readout alone": lambda layer, x: layer.read(x),
    "padding": lambda layer, x: layer(x, attention_mask=torch.ones(2, 9).tril(5)),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "kept elsewhere": lambda layer, x: _kept_elsewhere(layer, x),
    "other parameters": lambda layer, x: _with_parameters(layer, x),
    "no tokens": lambda layer, x: layer(x[:, :0]),
}


def _kept_elsewhere(layer, x):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return layer(x)


def _with_parameters(layer, x):
    return torch.func.functional_call(layer, {name: 2 * p for name, p in layer.named_parameters()}, (x,))


@pytest.mark.parametrize("use", USES)
def test_uses(use, by_modules):
    assert_same(make(), an_input(), by_modules, use=USES[use], rtol=1e-10, atol=1e-12)


def test_reentrant_checkpoint_tied_weights_and_gradients_that_add_up(by_modules):
    layer = make()
    layer.k_proj.weight = layer.q_proj.weight
    layer.v_proj = layer.q_proj

    def run():
        layer.zero_grad()
        x = an_input()
        for _ in range(2):
            checkpoint(layer, x, use_reentrant=True).sin().sum().backward()
        y = layer(x).sin().sum()
        y.backward(retain_graph=True)
        y.backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    torch.testing.assert_close(run(), by_modules(run), rtol=1e-10, atol=1e-12)


def test_second_derivatives(by_modules, way):
    """Of the layer by the backend that has them, of the pairs too; and of the node alone by finite differences.

    Convolution and norm have none on a GPU: their gradients can have a graph, which says so when it is used.
    """
    layer = make(backend="reference", output_gate="lowrank", beta_init="spread")
    if way == "as on a GPU":
        layer, x = make(), an_input()

        def twice():
            leaves = [x, *layer.parameters()]
            first = torch.autograd.grad(layer(x).sin().sum(), leaves, create_graph=True)
            with pytest.raises(RuntimeError, match=r"no autograd formula|no second derivative"):
                first[0].sum().backward(retain_graph=True)
            second = torch.autograd.grad(first[-1].square().sum(), leaves[-1], retain_graph=True)  # of o_proj alone
            return *first, *second

        torch.testing.assert_close(twice(), by_modules(twice), rtol=1e-10, atol=1e-12)
        return

    def run():
        x = an_input(B=1, T=4)
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(run(), by_modules(run), rtol=1e-8, atol=1e-10)
    modules = [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2, bias=False))]
    shapes = [nn.Sequential(*modules).double()]
    names = [name for name, _ in shapes[0].named_parameters()]

    def call(x, *parameters):
        with torch.nn.utils.stateless._reparametrize_module(shapes[0], dict(zip(names, parameters, strict=True))):
            return tuple(project_together(x, modules).values())

    inputs = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True), *shapes[0].parameters()]
    assert call(*inputs)[0].grad_fn.name() == "TogetherBackward"
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_the_gradient_of_x_is_rounded_once():
    """In bfloat16, and by modules once a projection and once a sum."""
    layer, x = make(torch.bfloat16), an_input(torch.bfloat16, B=4, T=32)
    modules = [layer.q_proj, layer.k_proj, layer.v_proj, layer.f_proj[0], layer.b_proj, layer.g_proj[0]]
    dys = [torch.randn(128, m.out_features).bfloat16() for m in modules]
    exact = sum(dy.double() @ m.weight.double() for dy, m in zip(dys, modules, strict=True))
    together = list(project_together(x, modules).values())
    apart = [m(x.view(-1, 24)) for m in modules]
    errors = [(torch.autograd.grad(ys, x, dys)[0].view(-1, 24).double() - exact).norm() for ys in (together, apart)]
    assert errors[0] < 0.7 * errors[1]
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_fewer_products_and_nodes(by_modules, way):
    layer, x = make(num_heads=8, head_dim=8), an_input()

    def run():
        with torch.profiler.profile() as profile:
            y, _ = both_ways(layer, x)
        ops = Counter(event.name for event in profile.events())
        nodes = counts(y)
        return ops["aten::mm"] + ops["aten::addmm"], nodes["MmBackward0"] + nodes["AddmmBackward0"], nodes["TBackward0"]

    of_output = int(way == "as on a CPU")  # the output's projection has nodes of its own there
    assert run() == (17, of_output, of_output)
    assert by_modules(run) == (27, 9, 9)


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Own(torch.Tensor):
    """A parameter of another kind than torch's own."""


class _OwnLinear(nn.Linear):
    pass


def _hook(register, module="q_proj"):
    def change(layer):
        getattr(layer.get_submodule(module), register)(lambda *arguments: None)

    return change


def _own_parameter(layer):
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.data.as_subclass(_Own))


def _own_forward(layer):
    layer.v_proj.forward = partial(nn.Linear.forward, layer.v_proj)


def _own_module(layer):
    layer.b_proj.__class__ = _OwnLinear


#: what is done to a layer, and how many of its six projections are made together still
CHANGES = {
    "a hook before": (_hook("register_forward_pre_hook"), 5),
    "a hook behind": (_hook("register_forward_hook", "f_proj"), 5),
    "a hook on the second of a pair": (_hook("register_forward_hook", "f_proj.1"), 5),
    "a hook on the gradient": (_hook("register_full_backward_hook"), 5),
    "a hook before the gradient": (_hook("register_full_backward_pre_hook", "g_proj.0"), 5),
    "a forward of its own": (_own_forward, 5),
    "a class of its own": (_own_module, 5),
    "a parametrization": (lambda layer: parametrizations.weight_norm(layer.k_proj), 5),
    "a frozen weight": (lambda layer: layer.q_proj.requires_grad_(False), 5),
    "all frozen": (lambda layer: layer.requires_grad_(False), 0),
    "one left": (lambda layer: [m.requires_grad_(False) for m in layer.children() if m is not layer.q_proj], 0),
    "parameters of another kind": (_own_parameter, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_are_called_as_they_are(change, by_modules):
    layer, x = make(), an_input()
    change, num = CHANGES[change]
    change(layer)
    made = project_together(x, [layer._modules[name] for name in layer._readers])
    assert len(made) == num
    assert_same(layer, x, by_modules, taken=num > 0, rtol=1e-10, atol=1e-12)


def _freeze(name):
    return lambda layer: layer.get_submodule(name).requires_grad_(False)


#: what is done behind the recurrence, and whether norm and projection are one node still
CHANGES_OF_OUTPUT = {
    "none": (lambda layer: None, True),
    "a hook on the norm": (_hook("register_forward_hook", "o_norm"), False),
    "a hook on the projection": (_hook("register_forward_hook", "o_proj"), False),
    "a frozen norm": (_freeze("o_norm"), True),
    "a frozen projection": (_freeze("o_proj"), False),
    "a bias": (lambda layer: setattr(layer, "o_proj", nn.Linear(16, 24).double()), False),
    "a parametrization": (lambda layer: parametrizations.weight_norm(layer.o_proj), False),
}


@pytest.mark.parametrize("change", CHANGES_OF_OUTPUT)
@pytest.mark.parametrize("output_gate", ["lowrank", None])
def test_norm_and_projection_of_the_output(change, output_gate, by_modules, way):
    layer, x = make(output_gate=output_gate), an_input()
    change, taken = CHANGES_OF_OUTPUT[change]
    change(layer)
    assert counts(layer(x))["_ProjectedBackward"] == int(taken and way == "as on a GPU")
    assert_same(layer, x, by_modules, rtol=1e-10, atol=1e-12)


def test_convolutions_that_are_tied_or_frozen(by_modules):
    layer, x = make(), an_input()
    layer.convolutions["k"] = layer.convolutions["q"]
    layer.convolutions["v"].requires_grad_(False)
    assert_same(layer, x, by_modules, rtol=1e-10, atol=1e-12)


def test_a_hook_may_change_what_it_sees():
    layer, x = make(), an_input()
    y = layer(x)
    layer.g_proj[1].register_forward_hook(lambda module, inputs, gate: gate - 100)
    assert is_taken(layer(x))
    assert layer(x).abs().max() < 1e-9 < y.abs().max()


def test_what_is_watched_takes_the_modules(by_modules):
    layer, x = make(), an_input()
    wanted = by_modules(lambda: both_ways(layer, x))
    assert not is_taken(layer(x.detach()))
    assert not is_taken(layer(an_input(B=9, T=2).transpose(0, 1)))
    with _Watching():
        assert not is_taken(layer(x))
    with forward_ad.dual_level():
        assert not is_taken(layer(x))
    with torch.no_grad():
        assert layer(x).grad_fn is None
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    assert not is_taken(layer(x))
    handle.remove()
    mapped = torch.vmap(layer)(torch.stack([x, x]))
    torch.testing.assert_close(mapped[0], wanted[0])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(both_ways(compiled, x), wanted)
    plain = make(backend="reference")
    by_transform = torch.func.grad(lambda z: plain(z).sum())(x.detach())
    torch.testing.assert_close(by_transform, torch.autograd.grad(layer(x).sum(), x)[0])
    assert is_taken(layer(x))


def test_autocast_and_shapes_alone(by_modules):
    layer, x = make(torch.float32), an_input(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_taken(layer(x))
        assert_same(layer, x, by_modules, taken=False, rtol=0, atol=0)
    assert is_taken(layer(x))
    assert not project_together(x.to("meta"), [m.to("meta") for m in (nn.Linear(24, 3), nn.Linear(24, 3))])


def test_wrong_inputs_are_refused_as_before(by_modules):
    layer = make()
    for x in (an_input(torch.float32), an_input()[..., :20].contiguous()):
        with pytest.raises((RuntimeError, ValueError)) as found:
            layer(x)
        with pytest.raises(found.type) as wanted:
            by_modules(partial(layer, x))
        assert str(found.value) == str(wanted.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, by_modules):
    """The output has the bits of the modules'; no gradient is further than theirs from float32's, but for a fifth."""
    torch.manual_seed(1)
    layer = ComplexKDA(256, 3, 48, num_v_heads=6, head_v_dim=40).cuda()  # 6 rates: zeros beside the gradients
    x = torch.randn(2, 200, 256, device="cuda", requires_grad=True)
    dy = torch.randn(2, 200, 256, device="cuda")

    def run():
        y = layer(x)
        return y, torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))

    _, exact = by_modules(run)
    layer.to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    (y, found), (z, wanted) = run(), by_modules(run)
    assert is_taken(y)
    assert torch.equal(y, z)
    for a, b, c in zip(found, wanted, exact, strict=True):
        assert (a.float() - c).norm() <= 1.2 * (b.float() - c).norm() + 1e-4 * c.norm()


def test_convolutions_are_taken_by_name():
    layer, x = make(), an_input()
    y = layer(x)
    for name in ("v", "q"):
        layer.convolutions[name] = layer.convolutions.pop(name)
    assert [*layer.convolutions] == ["k", "v", "q"]
    assert torch.equal(layer(x), y)
    assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], torch.autograd.grad(make()(x).sum(), x)[0])


def test_parameters_that_are_plain_tensors_are_read_by_their_modules(by_modules):
    layer, x = make(beta_init="spread"), an_input()
    for module, name in ((layer.b_proj, "bias"), (layer.o_norm, "weight")):
        value = module._parameters.pop(name).detach() + 0.5
        setattr(module, name, value)
    torch.testing.assert_close(layer(x), by_modules(lambda: layer(x)))
