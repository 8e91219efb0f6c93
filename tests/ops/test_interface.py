"""The front door: every refusal, what "auto" takes, one node under torch.compile, vmap, derivatives, dtypes and layouts."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.func import vmap

import ckda.ops
from ckda import complex_kda, complex_kda_step
from ckda.ops import BACKENDS, dispatch, validate, which_backend
from ckda.ops.call import Call as OpCall
from ckda.ops.call import check_call
from tests.ops.common import DIFFERENTIABLE, Call, assert_close, make_call, run

BOTH = [name for name in BACKENDS if name in ("reference", "chunked")]

# Bad input ------------------------------------------------------------------------------------------------------------

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6


def _call(**changes: Any) -> Call:
    """A good call [2, 5, 2 of 4 heads, 3 x 6] in float32 with some arguments replaced, or left out where Ellipsis."""
    call = make_call(B, T, H, HV, K, V, dtype=torch.float32, gate=None, beta_range=None, sign=False) | changes
    return {name: x for name, x in call.items() if x is not ...}


def _packed(bounds: list[int], **changes: Any) -> Call:
    call = make_call(1, T, H, HV, K, V, dtype=torch.float32, cu_seqlens=[0, T])
    return call | {"cu_seqlens": torch.tensor(bounds)} | changes


ones = torch.ones

#: what is wrong -> (the call, words the message must hold: the argument first)
BAD: dict[str, tuple[Callable[[], Call], tuple[str, ...]]] = {
    "q rank": (lambda: _call(q=ones(T, H, K)), ("rank of q", "3", "4")),
    "k rank": (lambda: _call(k=ones(B, T, H, K, 1)), ("rank of k", "5", "4")),
    "v rank": (lambda: _call(v=ones(B, T)), ("rank of v", "2", "4")),
    "g rank": (lambda: _call(g=ones(B, T, HV)), ("rank of g", "3", "4")),
    "q not a tensor": (lambda: _call(q=[1.0]), ("q", "list", "tensor")),
    "v not a tensor": (lambda: _call(v=None), ("v", "NoneType", "tensor")),
    "k batch": (lambda: _call(k=ones(B + 1, T, H, K)), ("shape of k", "[3, 5, 2, 3]", "[2, 5, 2, 3]")),
    "k width": (lambda: _call(k=ones(B, T, H, K + 1)), ("shape of k", "[2, 5, 2, 4]")),
    "v time": (lambda: _call(v=ones(B, T + 1, HV, V)), ("shape of v", "[2, 6, 4, 6]")),
    "g heads": (lambda: _call(g=ones(B, T, H, K)), ("shape of g", "[2, 5, 2, 3]", "[2, 5, 4, 3]")),
    "g width": (lambda: _call(g=ones(B, T, HV, V)), ("shape of g",)),
    "beta shape": (lambda: _call(beta=ones(B, T, H)), ("shape of beta", "[2, 5, 2]", "[2, 5, 4]")),
    "beta rank": (lambda: _call(beta=ones(B, T, HV, 1)), ("shape of beta", "[2, 5, 4, 1]")),
    "beta missing": (lambda: _call(beta=None), ("beta", "None", "[B, T, HV]")),
    "sign shape": (lambda: _call(sign=ones(B, T, HV, V, dtype=torch.int8)), ("shape of sign",)),
    "A_log shape": (lambda: _call(gate="signed", A_log=ones(H)), ("shape of A_log", "[2]", "[4]")),
    "dt_bias shape": (lambda: _call(gate="signed", dt_bias=ones(HV, K)), ("shape of dt_bias", "[4, 3]", "[12]")),
    "erase shape": (
        lambda: _call(beta=None, erase=ones(B, T, HV, V), write=ones(B, T, HV, V)),
        ("shape of erase", "[2, 5, 4, 6]", "[2, 5, 4, 3]"),
    ),
    "write shape": (
        lambda: _call(beta=None, erase=ones(B, T, HV, K), write=ones(B, T, HV, K)),
        ("shape of write", "[2, 5, 4, 3]", "[2, 5, 4, 6]"),
    ),
    "state shape": (
        lambda: _call(initial_state=ones(B, HV, V, K)),
        ("shape of initial_state", "[2, 4, 6, 3]", "[2, 4, 3, 6]"),
    ),
    "state batch": (lambda: _call(initial_state=ones(1, HV, K, V)), ("shape of initial_state", "[1, 4, 3, 6]")),
    "state of packed": (
        lambda: _packed([0, 2, T], initial_state=ones(1, HV, K, V)),
        ("shape of initial_state", "[1, 4, 3, 6]", "[2, 4, 3, 6]"),
    ),
    "heads": (lambda: _call(v=ones(B, T, 3, V)), ("HV", "3", "multiple of H = 2")),
    "no time": (lambda: _call(q=ones(B, 0, H, K)), ("shape of q", "[2, 0, 2, 3]")),
    "no batch": (lambda: _call(q=ones(0, T, H, K)), ("shape of q", "[0, 5, 2, 3]")),
    "K = 0": (lambda: _call(q=ones(B, T, H, 0)), ("shape of q", "[2, 5, 2, 0]")),
    "V = 0": (lambda: _call(v=ones(B, T, HV, 0)), ("shape of v", "[2, 5, 4, 0]")),
    "K = 257": (lambda: _call(q=ones(B, T, H, 257), k=ones(B, T, H, 257)), ("K", "257", "1 to 256")),
    "V = 257": (lambda: _call(v=ones(B, T, HV, 257)), ("V", "257", "1 to 256")),
    "gate name": (lambda: _call(gate="tanh"), ("gate", "'tanh'", "'signed'", "'sigmoid'", "'softplus'")),
    "beta_range 3": (lambda: _call(beta_range=3), ("beta_range", "3", "1 or 2")),
    "beta_range True": (lambda: _call(beta_range=True), ("beta_range", "True", "1 or 2")),
    "sign with gate": (
        lambda: _call(gate="signed", sign=ones(B, T, HV, K, dtype=torch.int8)),
        ("sign", "gate='signed'", "None"),
    ),
    "A_log without gate": (lambda: _call(A_log=ones(HV)), ("A_log", "gate=None")),
    "dt_bias without gate": (lambda: _call(dt_bias=ones(HV * K)), ("dt_bias", "gate=None")),
    "erase alone": (lambda: _call(beta=None, erase=ones(B, T, HV, K)), ("write", "None", "together")),
    "write alone": (lambda: _call(beta=None, write=ones(B, T, HV, V)), ("erase", "None", "together")),
    "beta with erase": (lambda: _call(erase=ones(B, T, HV, K), write=ones(B, T, HV, V)), ("beta", "erase", "None")),
    "beta_range with erase": (
        lambda: _call(beta=None, beta_range=2, erase=ones(B, T, HV, K), write=ones(B, T, HV, V)),
        ("beta_range", "erase", "None"),
    ),
    "q dtype": (lambda: _call(q=ones(B, T, H, K, dtype=torch.int64)), ("dtype of q", "int64", "float32")),
    "k dtype": (lambda: _call(k=ones(B, T, H, K, dtype=torch.float64)), ("dtype of k", "float64", "float32")),
    "v dtype": (lambda: _call(v=ones(B, T, HV, V, dtype=torch.bfloat16)), ("dtype of v", "bfloat16", "float32")),
    "g dtype": (lambda: _call(g=ones(B, T, HV, K, dtype=torch.float16)), ("dtype of g", "float16", "float32")),
    "beta dtype": (lambda: _call(beta=ones(B, T, HV, dtype=torch.int32)), ("dtype of beta", "int32", "float32")),
    "A_log dtype": (
        lambda: _call(gate="signed", A_log=ones(HV, dtype=torch.float64)),
        ("dtype of A_log", "float64", "float32"),
    ),
    "state dtype": (
        lambda: _call(initial_state=ones(B, HV, K, V, dtype=torch.float64)),
        ("dtype of initial_state", "float64", "float32"),
    ),
    "sign dtype": (lambda: _call(sign=ones(B, T, HV, K)), ("dtype of sign", "float32", "int8")),
    "sign value": (
        lambda: _call(sign=torch.zeros(B, T, HV, K, dtype=torch.int8)),
        ("sign", "0", "+1 or -1"),
    ),
    "k device": (lambda: _call(k=ones(B, T, H, K, device="meta")), ("device of k", "meta", "cpu")),
    "g device": (lambda: _call(g=ones(B, T, HV, K, device="meta")), ("device of g", "meta", "cpu")),
    "beta device": (lambda: _call(beta=ones(B, T, HV, device="meta")), ("device of beta", "meta", "cpu")),
    "state device": (
        lambda: _call(initial_state=ones(B, HV, K, V, device="meta")),
        ("device of initial_state", "meta", "cpu"),
    ),
    "cu_seqlens device": (
        lambda: _packed([], cu_seqlens=ones(3, dtype=torch.int32, device="meta")),
        ("device of cu_seqlens", "meta", "cpu"),
    ),
    "cu_seqlens dtype": (lambda: _packed([], cu_seqlens=ones(3)), ("dtype of cu_seqlens", "float32", "int32", "int64")),
    "cu_seqlens rank": (lambda: _packed([], cu_seqlens=torch.tensor([[0, T]])), ("shape of cu_seqlens", "[1, 2]")),
    "cu_seqlens length": (lambda: _packed([0]), ("shape of cu_seqlens", "[1]", "N + 1")),
    "cu_seqlens order": (lambda: _packed([0, 4, 2, T]), ("cu_seqlens", "[0, 4, 2, 5]", "non-decreasing")),
    "cu_seqlens start": (lambda: _packed([1, T]), ("cu_seqlens", "1", "[0, ..., T = 5]")),
    "cu_seqlens end": (lambda: _packed([0, T - 1]), ("cu_seqlens", "4", "[0, ..., T = 5]")),
    "cu_seqlens batch": (lambda: _call(cu_seqlens=torch.tensor([0, T])), ("B", "2", "1 with cu_seqlens")),
    "backend name": (lambda: _call(backend="cuda"), ("backend", "'cuda'", "'auto'", "'reference'", "'chunked'")),
    "fla on the CPU": (lambda: _call(backend="fla"), ("backend='fla'", "CUDA", "cpu")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(ValueError, match=r".") as error:
        complex_kda(**call())
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{str(error.value)!r} does not hold {missing}"


def _is_seen_without_values(call: Call) -> bool:
    """Whether a bad call is refused for something other than what is in its tensors."""
    try:
        check_call(OpCall(**call))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_after_good_calls_of_nearly_its_kind(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a signature is checked once; nothing that the checks see may be missing from it."""
    monkeypatch.setattr(dispatch, "_is_hurried", lambda call: isinstance(call.q, Tensor))
    dispatch.forget()
    bad = BAD[case][0]()
    for good in (_call(), _call(sign=torch.ones(B, T, HV, K, dtype=torch.int8)), _call(gate="signed"), _packed([0, T])):
        for changes in ({}, {"beta_range": 1}, {"scale": 1}, {"normalize_qk": True}, {"output_final_state": True}):
            complex_kda(**(good | changes))
    assert len(dispatch._ROUTES) > 10
    if _is_seen_without_values(bad):
        with pytest.raises(ValueError, match=r"."):
            complex_kda(**bad)
    dispatch.forget()


#: what is not a tensor where one belongs
NOT_TENSORS = {"beta": 2.0, "sign": 1, "A_log": 0.0, "dt_bias": [0.0], "initial_state": 0, "cu_seqlens": [0, T]}


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_what_is_not_a_tensor_is_named(name: str) -> None:
    call = _call(**{name: NOT_TENSORS[name]}, gate="signed" if name in ("A_log", "dt_bias") else None)
    with pytest.raises(ValueError, match=rf"{name} is .*tensor"):
        complex_kda(**call)


def test_good_calls_pass_all_checks() -> None:
    """The calls that the bad ones are made of; so each of those fails for its own reason."""
    complex_kda(**_call())
    complex_kda(**_packed([0, 2, 2, T]))


def test_validate_reads_values_and_runs_nothing() -> None:
    validate(**_packed([0, 2, T]), backend="chunked")
    with pytest.raises(ValueError, match="non-decreasing"):
        validate(**_packed([0, 4, 2, T]))


def test_nothing_is_read_from_tensors_of_other_devices() -> None:
    """Off the CPU shapes are checked and values are not: here on meta tensors, which have none."""
    call = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in _packed([0, 4, 2, T]).items()}
    o, state = complex_kda(**call, output_final_state=True)
    assert o.shape == (1, T, HV, V)
    assert state is not None
    assert state.shape == (3, HV, K, V)
    with pytest.raises(ValueError, match="shape of k"):
        complex_kda(**(call | {"k": call["k"][:, 1:]}))


STEP_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 1])}, "cu_seqlens"),
    "initial_state": ({"initial_state": ones(B, HV, K, V)}, "initial_state"),
    "output_final_state": ({"output_final_state": True}, "output_final_state"),
    "backend": ({"backend": "chunked"}, "backend is 'chunked'; it must be 'auto' or one of"),
    "q rank": ({"q": ones(B, 1, H, K)}, "rank of q"),
    "state rank": ({"state": ones(HV, K, V)}, "rank of state"),
    "state shape": ({"state": ones(B, HV, V, K)}, "state"),
    "inplace gradient": (
        {"state": ones(B, HV, K, V, requires_grad=True), "inplace": True},
        "state requires a gradient",
    ),
}


@pytest.mark.parametrize("case", STEP_BAD)
def test_bad_input_of_one_step(case: str) -> None:
    changes, words = STEP_BAD[case]
    token = {"q": ones(B, H, K), "k": ones(B, H, K), "v": ones(B, HV, V), "g": -ones(B, HV, K), "beta": ones(B, HV)}
    complex_kda_step(**token, state=ones(B, HV, K, V))
    with pytest.raises(ValueError, match=words):
        complex_kda_step(**(token | {"state": ones(B, HV, K, V)} | changes))


def test_which_backend_says_what_and_why() -> None:
    choice = which_backend(**_call())
    assert choice.backend is BACKENDS["chunked"]
    assert choice.reason
    named = which_backend(**_call(), backend="reference")
    assert named.backend is BACKENDS["reference"]
    assert str(named) == "reference: named by the caller"
    with pytest.raises(ValueError, match=r"fla.*CUDA"):
        which_backend(**_call(), backend="fla")


def test_the_arguments_are_listed_alike() -> None:
    """The function's signature and :class:`ckda.ops.call.Call`: the same names with the same defaults."""
    listed = {name: x.default for name, x in signature(complex_kda).parameters.items()}
    assert {name: x for name, x in listed.items() if x is not Parameter.empty} == OpCall._field_defaults
    assert set(listed) == set(OpCall._fields)
    assert all(isinstance(x, Tensor) or x is None for x in OpCall(**_call()).tensors)


def test_every_argument_arrives_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are handed on by position: with a value of its own for each, none may change places."""
    given = {name: object() for name in OpCall._fields}
    seen: list[OpCall] = []

    def note(call: OpCall) -> None:
        seen.append(call)
        raise InterruptedError

    monkeypatch.setattr(ckda.ops.dispatch, "check_call", note)
    with pytest.raises(InterruptedError):
        complex_kda(**given)  # type: ignore[arg-type]
    assert seen[0]._asdict() == given


def test_tensors_come_before_options() -> None:
    assert OpCall._fields[len(OpCall(**_call()).tensors)] == "gate"


def test_auto_runs_what_which_backend_says() -> None:
    call = make_call(T=20, dtype=torch.float32)
    named = which_backend(**call).backend.name
    for name, x in run(call, "auto").items():
        assert torch.equal(x, run(call, named)[name])


# torch.compile --------------------------------------------------------------------------------------------------------


def _counting(counts: list[tuple[str, int]]) -> Any:
    """A compiler that runs the graphs as they are and notes how often the operator's nodes stand in them."""

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        for op in ("complex_kda", "complex_kda_backward"):
            target = getattr(torch.ops.ckda, op).default
            counts.append((op, sum(node.target is target for node in graph.graph.nodes)))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def test_one_node_under_compile() -> None:
    counts: list[tuple[str, int]] = []
    call = make_call(B=1, T=9, dtype=torch.float32, initial=True, A_log=True, dt_bias=True)
    compiled = torch.compile(complex_kda, fullgraph=True, backend=_counting(counts))

    def function(leaves: Call) -> tuple[Tensor, Tensor]:
        return compiled(**leaves, output_final_state=True)

    results = run(call, function)
    assert counts == [("complex_kda", 1), ("complex_kda_backward", 0), ("complex_kda", 0), ("complex_kda_backward", 1)]
    for name, x in run(call, "auto").items():
        torch.testing.assert_close(results[name], x, rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_once_for_all_lengths(packed: bool) -> None:
    counts: list[tuple[str, int]] = []
    compiled = torch.compile(complex_kda, fullgraph=True, dynamic=True, backend=_counting(counts))
    for T in (70, 9, 33):
        call = make_call(B=1, T=T, K=5, cu_seqlens=[0, 4, T] if packed else None)
        got = compiled(**call, output_final_state=True)
        exact = complex_kda(**call, output_final_state=True)
        assert_close(dict(zip("os", got, strict=True)), dict(zip("os", exact, strict=True)), 1e-14)
    assert counts.count(("complex_kda", 1)) == 1, "a new length compiles again"


@pytest.mark.parametrize("case", [{"initial": True}, {"separate": True, "gate": None}], ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_custom_op_is_registered_as_it_should_be(contiguous: bool, case: dict) -> None:
    """torch's own checks: schema, autograd registration, fake tensors with the shapes and strides of the real ones."""
    call = make_call(B=2, T=5, H=2, HV=4, K=2, V=3, **case)
    fields = (*DIFFERENTIABLE[:5], "sign", "A_log", "dt_bias", "erase", "write", "initial_state", "cu_seqlens")
    tensors = [call.get(name) for name in fields]
    if not contiguous:
        tensors = [x if x is None else x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]
    leaves = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
    options = (call["gate"], call.get("beta_range"), True, 0.5, True, "chunked")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.ckda.complex_kda.default, (*leaves, *options, True), test_utils=checks)
    outputs = torch.ops.ckda.complex_kda(*tensors, *options, True)
    o, state, *saved = (x.detach() for x in outputs)
    backward = torch.ops.ckda.complex_kda_backward.default
    torch.library.opcheck(backward, (o, state, saved, *tensors, *options), test_utils=checks[::2])


# vmap and derivatives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["all", "parameters", "inputs"])
def test_vmap_is_a_loop(mapped: str) -> None:
    calls = [
        make_call(B=2, T=11, H=1, HV=2, K=3, V=4, initial=True, A_log=True, dt_bias=True, seed=seed)
        for seed in (0, 1, 2)
    ]
    parameters = ("A_log", "dt_bias", "initial_state")
    names = [name for name in DIFFERENTIABLE if name in calls[0]]
    if mapped != "all":
        names = [name for name in names if (name in parameters) == (mapped == "parameters")]
    rest = {name: x for name, x in calls[0].items() if name not in names}
    leaves = {name: torch.stack([call[name] for call in calls]).requires_grad_() for name in names}

    def one(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        o, state = complex_kda(**tensors, **rest, output_final_state=True)
        assert state is not None
        return o, state

    o, state = vmap(one)(leaves)
    looped = [one({name: x[i] for name, x in leaves.items()}) for i in range(3)]
    expected = tuple(torch.stack(x) for x in zip(*looped, strict=True))
    weights = torch.randn_like(o), torch.randn_like(state)
    got = dict(zip(names, torch.autograd.grad((o, state), list(leaves.values()), weights), strict=True))
    exact = dict(zip(names, torch.autograd.grad(expected, list(leaves.values()), weights), strict=True))
    assert_close(got | {"o": o, "state": state}, exact | {"o": expected[0], "state": expected[1]}, 1e-12)


def test_vmap_without_a_final_state_and_over_another_axis() -> None:
    call = make_call(B=2, T=7, H=1, K=3, V=4)
    q = torch.randn(2, 7, 1, 5, 3, dtype=torch.float64)
    got = vmap(lambda q: complex_kda(**(call | {"q": q}))[0], in_dims=3, out_dims=1)(q)
    exact = torch.stack([complex_kda(**(call | {"q": q[:, :, :, i]}))[0] for i in range(5)], 1)
    assert_close({"o": got}, {"o": exact}, 1e-13)


def _scalar_call() -> tuple[Call, list[str]]:
    call = make_call(B=1, T=3, H=1, K=2, V=2, initial=True, A_log=True, dt_bias=True)
    return call, [name for name in DIFFERENTIABLE if name in call]


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "case",
    [{"gate": "signed"}, {"gate": "softplus", "separate": True, "normalize_qk": False}, {"gate": None}],
    ids=str,
)
def test_gradients_are_derivatives(case: dict, backend: str) -> None:
    """Finite differences in float64. Zero is left out: the gates are not differentiable at u = 0 and at alpha = 0."""
    call = make_call(B=1, T=5, H=1, HV=2, K=2, V=3, initial=True, A_log=True, dt_bias=True, **case)
    call["g"] = torch.where(call["g"].isfinite() & (call["g"] > -9), call["g"], -0.5) - 0.05
    names = [name for name in DIFFERENTIABLE if call.get(name) is not None]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, state = complex_kda(
            **(call | dict(zip(names, tensors, strict=True))), output_final_state=True, backend=backend
        )
        assert state is not None
        return o, state

    torch.autograd.gradcheck(function, [call[name].clone().requires_grad_() for name in names], fast_mode=True)


def test_the_second_derivative_is_refused_clearly() -> None:
    call = make_call(B=1, T=3, H=1, K=2, V=2)
    q = call["q"].requires_grad_()
    o, _ = complex_kda(**(call | {"q": q}), backend="chunked")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivative.*reference"):
        torch.autograd.grad(dq.sum(), q)


def test_the_reference_has_second_derivatives() -> None:
    call = make_call(B=1, T=3, H=1, K=2, V=2, initial=True)
    call["g"] = call["g"] + 0.1
    names = [name for name in DIFFERENTIABLE if call.get(name) is not None]

    def function(*tensors: Tensor) -> Tensor:
        return complex_kda(**(call | dict(zip(names, tensors, strict=True))), backend="reference")[0]

    leaves = [call[name].clone().requires_grad_() for name in names]
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


# dtypes, layouts, memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("wide_gates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_layouts_of_results(dtype: torch.dtype, wide_gates: bool, backend: str) -> None:
    """o like v, gradients like their inputs, the state float64 if the inputs are and float32 otherwise."""
    gate_dtype = torch.float32 if wide_gates else None
    call = make_call(B=2, T=19, HV=4, dtype=dtype, gate_dtype=gate_dtype, initial=True, A_log=True, dt_bias=True)
    results = run(call, backend)
    assert (results["o"].dtype, results["o"].shape) == (dtype, call["v"].shape)
    assert results["o"].is_contiguous()
    assert results["state"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert results["state"].shape == (2, 4, 4, 3)
    for name in DIFFERENTIABLE:
        if call.get(name) is not None:
            assert (results["d" + name].dtype, results["d" + name].shape) == (call[name].dtype, call[name].shape)


@pytest.mark.parametrize("backend", BOTH)
def test_non_contiguous_inputs(backend: str) -> None:
    call = make_call(B=2, T=19, H=2, HV=4, K=5, V=3, gate=None, initial=True)
    strange = dict(call)
    for name, x in call.items():
        if isinstance(x, Tensor) and x.dim() > 1:
            strange[name] = x.transpose(0, -1).contiguous().transpose(0, -1)
            assert not strange[name].is_contiguous()
    strange["v"] = torch.stack([call["v"], call["v"]], -1)[..., 0]
    leaves = {name: x.requires_grad_() for name, x in strange.items() if name in DIFFERENTIABLE}
    o, state = complex_kda(**(strange | leaves), output_final_state=True, backend=backend)
    grads = torch.autograd.grad((o.sum(), state.sum()), list(leaves.values()))
    plain = {name: call[name].clone().requires_grad_() for name in leaves}
    expected = complex_kda(**(call | plain), output_final_state=True, backend=backend)
    exact = torch.autograd.grad((expected[0].sum(), expected[1].sum()), list(plain.values()))
    assert_close({"o": o, "state": state}, dict(zip(("o", "state"), expected, strict=True)), 1e-14)
    assert_close(dict(zip(leaves, grads, strict=True)), dict(zip(leaves, exact, strict=True)), 1e-13)


@pytest.mark.parametrize("backend", BOTH)
def test_expanded_inputs_get_their_own_gradients(backend: str) -> None:
    """One key for all tokens, as a stride-0 view: the gradient of the key is the sum over its uses."""
    call = make_call(B=1, T=12, H=1, K=3, V=2, initial=True)
    key = call["k"][:, :1].clone().requires_grad_()
    o, _ = complex_kda(**(call | {"k": key.expand(1, 12, 1, 3)}), backend=backend)
    many = key.detach().expand(1, 12, 1, 3).clone().requires_grad_()
    p, _ = complex_kda(**(call | {"k": many}), backend=backend)
    (dkey,), (dmany,) = torch.autograd.grad(o.sum(), key), torch.autograd.grad(p.sum(), many)
    assert_close({"d": dkey}, {"d": dmany.sum(1, keepdim=True)}, 1e-12)


@pytest.mark.parametrize("backend", BOTH)
def test_without_gradients_nothing_is_kept(backend: str) -> None:
    call = make_call(B=1, T=20, dtype=torch.float32)
    v = call["v"].requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        with torch.no_grad():
            o, state = complex_kda(**(call | {"v": v}), output_final_state=True, backend=backend)
        assert not kept
        assert state is not None
        assert not o.requires_grad
        assert not state.requires_grad
        o, state = complex_kda(**(call | {"v": v.detach()}), output_final_state=True, backend=backend)
        assert not kept
        assert not o.requires_grad
        complex_kda(**(call | {"v": v}), backend=backend)
        assert kept  # so that the hook is known to see what is kept


@pytest.mark.parametrize("backend", BOTH)
def test_gradients_only_where_they_are_asked_for(backend: str) -> None:
    """One argument at a time, from the output alone and from the state alone."""
    call = make_call(B=1, T=9, H=1, K=3, V=2, initial=True, A_log=True, dt_bias=True)
    for outputs in ("o", "s"):
        whole = run(call, backend, outputs)
        for name in DIFFERENTIABLE:
            if call.get(name) is None:
                continue
            leaf = call[name].clone().requires_grad_()
            o, state = complex_kda(**(call | {name: leaf}), output_final_state=True, backend=backend)
            random = torch.Generator().manual_seed(1)
            do, ds = (torch.randn(x.shape, generator=random).bfloat16().double() for x in (o, state))
            loss = (o * do).sum() if outputs == "o" else (state * ds).sum()
            grad = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
            grad = torch.zeros_like(leaf) if grad is None else grad
            assert_close({"d": grad, "scale": whole["dv"]}, {"d": whole["d" + name], "scale": whole["dv"]}, 1e-12)


def test_no_final_state_unless_asked() -> None:
    call = make_call(B=1, T=5)
    for backend in BOTH:
        assert complex_kda(**call, backend=backend)[1] is None


@pytest.mark.parametrize("backend", BOTH)
def test_inputs_are_left_alone(backend: str) -> None:
    call = make_call(B=1, T=20, initial=True, A_log=True, dt_bias=True)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    leaves = {name: x.requires_grad_() for name, x in call.items() if name in DIFFERENTIABLE}
    o, state = complex_kda(**(call | leaves), output_final_state=True, backend=backend)
    (o.sum() + state.sum()).backward()
    for name, x in before.items():
        assert torch.equal(x, call[name].detach()), name


def test_step_refuses_what_is_no_tensor_or_no_option() -> None:
    x, state = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match="beta is float"):
        complex_kda_step(x, x, x, x, 2.0, state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state is None"):
        complex_kda_step(x, x, x, x, x[..., 0], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale is 'x'"):
        complex_kda_step(x, x, x, x, x[..., 0], state, scale="x")


def test_vmap_over_signs() -> None:
    x = torch.randn(1, 9, 2, 4)
    signs = (torch.randint(2, (3, 1, 9, 2, 4)) * 2 - 1).to(torch.int8)

    def one(sign: torch.Tensor) -> torch.Tensor:
        return complex_kda(x, x, x, -x.abs(), x[..., 0], sign=sign, normalize_qk=True)[0]

    mapped = torch.func.vmap(one)(signs)
    torch.testing.assert_close(mapped, torch.stack([one(sign) for sign in signs]))


def _kda(x: torch.Tensor, backend: str) -> torch.Tensor:
    return complex_kda(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True, backend=backend)[0].sin()


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x.expand(2, *x.shape)),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x.expand(2, *x.shape)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_that_only_the_reference_has(derivative: str) -> None:
    """They are refused, not zero."""
    x = torch.randn(1, 5, 2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="backend='reference' has both"):
        DERIVATIVES[derivative](lambda x: _kda(x, "chunked"), x)
    found = DERIVATIVES[derivative](lambda x: _kda(x, "reference"), x)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(_kda(leaf, "chunked").sum(), leaf)
    if derivative == "jvp":
        torch.testing.assert_close(found.sum(), grad.sum())
    else:
        torch.testing.assert_close(found, grad.expand_as(found))


def test_what_has_no_tangent_is_not_refused() -> None:
    x = torch.randn(1, 5, 2, 4)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(_kda(x, "chunked"), _kda(x, "chunked"))
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode"):
            _kda(dual, "chunked")


def test_autocast_leaves_the_recurrence_alone() -> None:
    x = torch.randn(2, 9, 2, 4)
    plain = complex_kda(x, x, x, -x.abs(), x[..., 0], normalize_qk=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = complex_kda(x, x, x, -x.abs(), x[..., 0], normalize_qk=True)[0]
    assert torch.equal(plain, cast)


def test_autocast_leaves_the_backward_pass_alone() -> None:
    """Also where backward() is called inside it."""
    x = torch.randn(2, 70, 2, 8, requires_grad=True)
    o = complex_kda(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True, backend="chunked")[0]
    (plain,) = torch.autograd.grad(o.sum(), x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (cast,) = torch.autograd.grad(o.sum(), x)
    assert torch.equal(plain, cast)


def test_a_compiled_call_takes_another_length() -> None:
    compiled = torch.compile(
        lambda x: complex_kda(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True)[0],
        fullgraph=True,
        backend="aot_eager",
    )
    for T in (10, 100, 33):
        x = torch.randn(2, T, 2, 8, requires_grad=True)
        plain = complex_kda(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True)[0]
        torch.testing.assert_close(compiled(x), plain)
        (grad,) = torch.autograd.grad(compiled(x).sin().sum(), x)
        (expected,) = torch.autograd.grad(plain.sin().sum(), x)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(("option", "value"), [("beta_range", 2.0), ("normalize_qk", "no"), ("output_final_state", 1)])
def test_options_of_another_type_are_refused(option: str, value: object) -> None:
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ValueError, match=option):
        complex_kda(x, x, x, x, x[..., 0], **{option: value})  # type: ignore[arg-type]


def test_softplus_with_a_vanishing_rate_is_finite() -> None:
    x = torch.randn(1, 5, 2, 4, requires_grad=True)
    o, _ = complex_kda(x, x, x, x, x[..., 0], gate="softplus", A_log=torch.full((2,), -110.0), normalize_qk=True)
    (grad,) = torch.autograd.grad(o.sum(), x)
    assert o.isfinite().all()
    assert grad.isfinite().all()
