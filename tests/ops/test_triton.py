"""The Triton kernels: in the interpreter where there is no GPU, on tiny shapes; on a GPU in bfloat16, at the sizes they are for.

The interpreter has no right bfloat16. Its half-precision path is run with float16 operands and gates mild enough for its range,
and with float32 operands rounded to bfloat16's digits.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ckda import complex_kda, complex_kda_step
from ckda.ops import which_backend
from ckda.ops.call import Call as OpCall
from tests.ops.common import (
    Call,
    Comparison,
    assert_close,
    assert_same_bits,
    check_kernels,
    check_scales,
    compare,
    excesses,
    harsh,
    make_call,
    member,
    perturbed,
    rowwise,
    run,
    slice_batch,
    slice_time,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from ckda.ops import dispatch  # noqa: E402
from ckda.ops import triton as kernels  # noqa: E402
from ckda.ops.triton import chunk, hopper, launch, plan, recurrent, sums, tile  # noqa: E402
from ckda.ops.triton.portable import backward as chunk_backward  # noqa: E402
from ckda.ops.triton.portable import forward as chunk_forward  # noqa: E402

in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the kernels are compiled, and the tests marked gpu run"
)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def _use(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call small enough for the recurrence take it, or none."""
    monkeypatch.setattr(kernels, "SHORT", 0 if form == "chunk" else 10**9)


def _draws(settings: dict[str, Any], outputs: str = "os", num: int = 1) -> list[Comparison]:
    return [compare(make_call(**({"B": 1, "H": 1} | settings), seed=seed), "triton", outputs) for seed in range(num)]


# Every kernel in the interpreter --------------------------------------------------------------------------------------

#: all gates, lengths about one and two chunks of 32, widths that are no powers of two, packing, groups
CHUNK_CASES: dict[str, dict[str, Any]] = {
    "one token": {"T": 1, "K": 5, "V": 3, "initial": True, "dt_bias": True},
    "signed": {"T": 31, "K": 8, "V": 5, "initial": True, "A_log": True, "dt_bias": True},
    "signed, two chunks and a token": {"T": 65, "K": 20, "V": 7},
    "sigmoid": {"T": 32, "K": 5, "V": 20, "gate": "sigmoid", "beta_range": 1, "A_log": True, "initial": True},
    "sigmoid as given": {
        "T": 33, "K": 6, "V": 6, "gate": "sigmoid", "beta_range": None, "normalize_qk": False, "dt_bias": True
    },
    "softplus": {"T": 20, "K": 8, "V": 5, "gate": "softplus", "A_log": True, "dt_bias": True, "initial": True},
    "given": {"T": 33, "K": 3, "V": 5, "gate": None, "beta_range": None, "initial": True},
    "given, unsigned": {"T": 17, "K": 8, "V": 1, "gate": None, "sign": False, "beta_range": 1, "normalize_qk": False},
    "groups": {"T": 20, "H": 2, "HV": 4, "K": 5, "V": 4, "scale": 0.7, "dt_bias": True},
    "packed": {"T": 40, "K": 6, "V": 5, "A_log": True, "initial": True, "cu_seqlens": [0, 0, 34, 35, 40, 40]},
    "packed, given": {"T": 9, "K": 4, "V": 3, "gate": None, "cu_seqlens": [0, 0, 9]},
    "many channels and values": {"T": 33, "K": 70, "V": 40, "initial": True},
    "separate": {"T": 37, "K": 6, "V": 5, "separate": True, "A_log": True, "initial": True},
    "separate, given": {"T": 37, "K": 6, "V": 5, "separate": True, "gate": None, "initial": True, "cu_seqlens": [0, 34, 37]},
    "separate, softplus, groups": {"T": 20, "H": 2, "HV": 4, "K": 5, "V": 4, "separate": True, "gate": "softplus"},
}  # fmt: skip


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CHUNK_CASES]
    + [
        (case, torch.float16)
        for case in ("signed", "sigmoid", "given, unsigned", "groups", "packed", "many channels and values", "separate")
    ],
    ids=str,
)
def test_chunk_form(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _use("chunk", monkeypatch)
    bounded = CHUNK_CASES[case].get("gate", "signed") in ("signed", "sigmoid")
    rule = dtype == torch.float32 and not bounded  # of two draws, since one plain error may be small by luck
    draws = _draws(CHUNK_CASES[case] | {"dtype": dtype}, num=2 if rule else 1)
    check_kernels(draws, rule=not bounded)


RECURRENT_CASES: dict[str, dict[str, Any]] = {
    "one token": {"T": 1, "K": 5, "V": 3, "initial": True, "dt_bias": True},
    "signed": {"T": 9, "K": 8, "V": 5, "initial": True, "A_log": True, "dt_bias": True},
    "sigmoid": {"T": 8, "K": 5, "V": 20, "gate": "sigmoid", "beta_range": 1, "A_log": True},
    "softplus": {"T": 8, "K": 20, "V": 3, "gate": "softplus", "A_log": True, "dt_bias": True, "normalize_qk": False},
    "given": {"T": 9, "K": 3, "V": 5, "gate": None, "beta_range": None, "initial": True},
    "given, unsigned": {"T": 5, "K": 32, "V": 32, "gate": None, "sign": False, "beta_range": 1},
    "groups": {"T": 6, "H": 1, "HV": 2, "K": 5, "V": 4, "scale": 0.7},
    "packed": {"T": 8, "K": 6, "V": 5, "A_log": True, "initial": True, "cu_seqlens": [0, 0, 3, 4, 8, 8]},
}


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", RECURRENT_CASES)
def test_recurrent_form(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _use("recurrent", monkeypatch)
    check_kernels(_draws(RECURRENT_CASES[case] | {"dtype": dtype}, num=2 if dtype == torch.float32 else 1))


@in_interpreter
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("outputs", ["o", "s"])
def test_gradients_of_one_output_alone(outputs: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of float32 gates beside float16 inputs."""
    _use(form, monkeypatch)
    settings = {"T": 5, "K": 4, "V": 3, "initial": True, "dtype": torch.float16, "gate_dtype": torch.float32}
    check_kernels(_draws(settings, outputs))


@in_interpreter
def test_small_gradients_beside_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in float32 keep their digits where those of float16 values lose them: 2^-20 of do gives 2^-20 of them."""
    _use("chunk", monkeypatch)
    settings = {"initial": True, "A_log": True, "dtype": torch.float16, "gate_dtype": torch.float32}
    call = make_call(B=1, T=5, H=1, K=4, V=3, **settings)
    leaves = {name: call[name].requires_grad_() for name in ("beta", "initial_state")}
    o, _ = complex_kda(**(call | leaves), backend="triton")
    do = torch.randint(1, 4, o.shape).to(o.dtype)
    whole, small = (torch.autograd.grad(o, [*leaves.values()], do * c, retain_graph=True) for c in (1.0, 2.0**-20))
    assert_same_bits(
        dict(zip(leaves, (x * 2.0**20 for x in small), strict=True)), dict(zip(leaves, whole, strict=True))
    )


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("settings", "where", "outputs"),
    [
        ({}, "everywhere", "o"),
        ({"gate": "sigmoid", "beta_range": None}, "everywhere", "s"),
        ({"separate": True}, "in half of the channels", "o"),
        ({"HV": 2}, "in first halves or in second ones", "s"),
    ],
    ids=str,
)
def test_small_numbers_keep_their_digits_where_bounded_gates_forget_most(
    settings: dict[str, Any], where: str, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a loss that is a mean are some 2^-20, and values may be as small."""
    _use("chunk", monkeypatch)
    call = make_call(**{"B": 1, "T": 66, "H": 1, "K": 6, "V": 5, "dtype": torch.float32, "initial": True} | settings)
    check_scales(harsh(call, where), "triton", outputs, 1e-5)


def _mild(call: Call, weakest: float = 4.0) -> Call:
    """The same signs with gates near one: at least tanh(weakest / 2), which is 0.96 for 4 and 0.9993 for 8."""
    g = call["g"]
    if call["gate"] is None:
        return call | {"g": g.clamp_min(math.log(math.tanh(weakest / 2)))}
    return call | {"g": torch.where(g < 0, -1, 1).to(g.dtype) * (g.abs() + weakest)}


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("K", "V", "gate"), [(20, 7, "signed"), (80, 70, "signed"), (20, 7, None)])
def test_half_precision_operands(K: int, V: int, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that bfloat16 inputs take: products of half-precision operands, the solver in three parts.

    Over half a chunk mild gates stay within the range of float16.
    """
    _use("chunk", monkeypatch)
    monkeypatch.setitem(plan.FAST, torch.float16, "fp16")
    settings = {"B": 1, "T": 37, "H": 1, "K": K, "V": V, "initial": True, "dtype": torch.float16}
    calls = [make_call(**settings, gate=gate, seed=seed) for seed in range(2 if gate else 1)]
    check_kernels([compare(_mild(call), "triton") for call in calls])


@triton.jit
def _rounded(b_x, DOT: tl.constexpr):
    """x with bfloat16's digits, in float32: round to nearest, ties to even, by the bits."""
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True)
    return ((b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


def _round_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of bfloat16 for float32 inputs."""
    monkeypatch.setitem(plan.FAST, torch.float32, "bf16")
    for module in (tile, chunk_forward, chunk_backward):
        monkeypatch.setattr(module, "operand", _rounded)


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "settings",
    [
        {"T": 70, "K": 20, "V": 7},
        {"T": 37, "K": 64, "V": 24, "gate": "sigmoid", "beta_range": 1},
        {"T": 37, "K": 20, "V": 7, "gate": None, "beta_range": None, "normalize_qk": False},
        {"T": 37, "K": 16, "V": 16, "H": 1, "HV": 2, "gate": "softplus"},
    ],
    ids=str,
)
def test_operands_of_bfloat16_digits(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of bfloat16 with its rounding and its range: gates down to e^-5, and to zero where they have no bound."""
    _use("chunk", monkeypatch)
    _round_operands(monkeypatch)
    found = excesses([compare(_of_bfloat16_digits(**settings), "triton")], torch.bfloat16)
    assert max(x.ratio for x in found) <= 4, found


@in_interpreter
@pytest.mark.parametrize(("gate", "beta_range", "T"), [("signed", None, 512), ("signed", 2, 512), (None, 2, 256)])
def test_a_repeated_transition_of_bfloat16_digits(
    gate: str | None, beta_range: int | None, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of 32 equal keys cancel in the output, in dq and in dk: all take them in two parts.

    The gradient of given gates is not held to the rule here: it is 4 to 6 times the plain error (LOG.md).
    """
    _use("chunk", monkeypatch)
    _round_operands(monkeypatch)
    settings = {"T": T, "K": 64, "V": 64, "gate": gate, "beta_range": beta_range}
    call = _reflections(_of_bfloat16_digits(**settings), signs="equal")
    found = excesses([compare(call, "triton", plain="chunked")], torch.bfloat16)
    assert max(x.ratio for x in found if gate or x.name != "dg") <= 2, found


def _of_bfloat16_digits(**settings: Any) -> Call:
    """A float32 call whose inputs have bfloat16's digits; the initial state keeps its own."""
    call = make_call(**({"B": 1, "H": 1, "initial": True, "dtype": torch.float32} | settings))
    floats = {n: x for n, x in call.items() if isinstance(x, Tensor) and x.is_floating_point() and n != "initial_state"}
    return call | {n: x.bfloat16().float() for n, x in floats.items()}


@in_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("segment", "T", "gate"),
    [(1, 70, "signed"), (2, 140, "signed"), (1, 70, None), (1, 40, "signed"), (1, 100, "signed")],
)
def test_segments(gate: str | None, segment: int, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence split into segments gives what it gives whole, gradients included, and within the same bounds.

    Two segments need no transition: the end of the first is the start of the second, to the bit.
    """
    _use("chunk", monkeypatch)
    call = _mild(
        make_call(B=2 if T == 70 else 1, T=T, H=1, K=6, V=5, gate=gate, dtype=torch.float32, initial=True), 8.0
    )
    whole = run(call, "triton")
    monkeypatch.setattr(plan, "SPLIT_FROM", 2)
    monkeypatch.setattr(plan, "SEGMENT", segment)
    assert plan.plan(OpCall(**call)).num_segments == -(-T // (32 * segment))
    split = compare(call, "triton")
    assert split.results["state"].is_contiguous()  # as its fake is
    assert_close(split.results, whole, 2e-5)
    same = all(torch.equal(split.results[name], x) for name, x in whole.items())
    assert same == (T == 40)
    check_kernels([split], rule=False)  # a product of transitions has roundings of its own


@in_interpreter
def test_autocast_leaves_the_segments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, where states are carried between segments."""
    _use("chunk", monkeypatch)
    monkeypatch.setattr(plan, "SPLIT_FROM", 2)
    monkeypatch.setattr(plan, "SEGMENT", 1)
    call = make_call(B=1, T=70, H=1, K=6, V=5, dtype=torch.float32, initial=True)
    plain = run(call, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(call, "triton"), plain)


@in_interpreter
def test_segments_without_initial_state_or_gradient_of_the_final_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _use("chunk", monkeypatch)
    monkeypatch.setattr(plan, "SPLIT_FROM", 2)
    monkeypatch.setattr(plan, "SEGMENT", 1)
    call = _mild(make_call(B=1, T=70, H=1, K=6, V=5, dtype=torch.float32), 8.0)
    check_kernels([compare(call, "triton", "o")], rule=False)


@in_interpreter
@pytest.mark.parametrize(
    ("form", "T", "K", "V"), [("portable", 33, 8, 5), ("portable", 5, 70, 40), ("recurrent", 5, 8, 5)]
)
@pytest.mark.parametrize("gate", ["signed", None])
def test_what_is_saved_has_the_announced_shapes(gate: str | None, form: str, T: int, K: int, V: int) -> None:
    """torch.compile and the meta device see `saved_like` in place of what the forward pass saves."""
    arguments = make_call(B=1, T=T, H=1, K=K, V=V, gate=gate, dtype=torch.float16)
    call = OpCall(**arguments, output_final_state=True, backend=f"triton-{form}")
    saved, announced = kernels.forward(call, {})[2], kernels.saved_like(call)
    assert [(x.shape, x.dtype, x.stride()) for x in saved] == [(x.shape, x.dtype, x.stride()) for x in announced]


# Laws that hold to the last bit ---------------------------------------------------------------------------------------


@in_interpreter
@pytest.mark.parametrize(
    ("form", "T", "dtype"), [("chunk", 33, torch.float32), ("chunk", 4, torch.float16), ("recurrent", 4, torch.float16)]
)
def test_the_same_bits_alone_in_a_batch_and_again(
    form: str, T: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(form, monkeypatch)
    call = make_call(B=3, T=T, H=1, K=6, V=20, dtype=dtype, initial=True)
    together = rowwise(call, "triton")
    assert_same_bits(rowwise(call, "triton"), together)
    for row in (0, 2):
        alone = rowwise(slice_batch(call, slice(row, row + 1)), "triton", row)
        assert_same_bits({name: x[row : row + 1] for name, x in together.items()}, alone)


@in_interpreter
@pytest.mark.parametrize(
    ("form", "gate", "times"),
    [
        ("chunk", None, (20, 32)),
        ("chunk", "signed", (1, 15, 20, 31, 32, 39)),
        ("half", "signed", (1, 15, 20, 31, 32, 39)),
        ("recurrent", "signed", (1, 5)),
    ],
)
def test_the_future_does_not_leak(form: str, gate: str | None, times: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by rounding: earlier outputs keep their bits, in the half-precision path too."""
    _use("recurrent" if form == "recurrent" else "chunk", monkeypatch)
    dtype = torch.float32
    if form == "half":
        dtype = torch.float16
        monkeypatch.setitem(plan.FAST, dtype, "fp16")
    call = _mild(make_call(B=1, T=times[-1] + 1, H=1, K=6, V=5, gate=gate, dtype=dtype, initial=True), 3.0)
    before = run(call, "triton", gradients=False)["o"]
    for t in times:
        after = run(perturbed(call, t), "triton", gradients=False)["o"]
        assert torch.equal(before[:, :t], after[:, :t]), f"token {t} changes earlier outputs"
        assert not torch.equal(before[:, t:], after[:, t:])


def _pulled_back(call: Call, do: Tensor, dstate: Tensor, backend: str) -> dict[str, Tensor]:
    """o, the state and, of these cotangents, the gradients that belong to a token or a sequence."""
    shared = ("A_log", "dt_bias")  # their gradients are sums over all sequences, which no member has
    leaves = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    o, state = complex_kda(**leaves, output_final_state=True, backend=backend)
    names = [name for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad and name not in shared]
    found = torch.autograd.grad((o, state), [leaves[name] for name in names], (do, dstate))
    return {"o": o.detach(), "state": state.detach()} | {"d" + n: x for n, x in zip(names, found, strict=True)}


def check_members(call: Call, backend: str = "triton") -> dict[str, Tensor]:
    """Packed sequences have the bits that they have alone, forward and backward, but those that are no numbers; what there is."""
    random = torch.Generator().manual_seed(1)
    do, dstate = (torch.randn(call[n].shape, generator=random).to(call[n]) for n in ("v", "initial_state"))
    packed = _pulled_back(call, do, dstate, backend)
    for n, (start, end) in enumerate(pairwise(call["cu_seqlens"].tolist())):
        if start == end:
            assert torch.equal(packed["state"][n], call["initial_state"][n])
            assert torch.equal(packed["dinitial_state"][n], dstate[n])
        elif not call["v"][:, start:end].isnan().any():
            alone = _pulled_back(member(call, n), do[:, start:end], dstate[n : n + 1], backend)
            of_sequence = {name: packed[name][n : n + 1] for name in ("state", "dinitial_state")}
            of_tokens = {name: packed[name][:, start:end] for name in alone.keys() - of_sequence.keys()}
            assert_same_bits(of_sequence | of_tokens, alone)
    return packed


@in_interpreter
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_packed_gives_the_bits_of_separate_sequences(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(form, monkeypatch)
    bounds = [0, 0, 34, 35, 40, 40] if form == "chunk" else [0, 0, 3, 4, 4, 6]
    call = make_call(
        B=1, T=bounds[-1], H=1, K=6, V=5, dtype=torch.float32, initial=True, dt_bias=True, cu_seqlens=bounds
    )
    check_members(call)
    packed = run(call, "triton", gradients=False)
    assert_same_bits(run(call | {"cu_seqlens": call["cu_seqlens"].long()}, "triton", gradients=False), packed)


def _every_other(leaves: Call) -> Call:
    """The same arguments as views of memory with gaps."""
    names = ("A_log", "dt_bias", "cu_seqlens")
    return leaves | {name: torch.stack([leaves[name], torch.zeros_like(leaves[name])], -1)[..., 0] for name in names}


@in_interpreter
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_strided_parameters_and_bounds(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of contiguous ones, gradients included."""
    _use(form, monkeypatch)
    call = make_call(B=1, T=6, H=2, K=5, V=4, dtype=torch.float32, A_log=True, dt_bias=True, cu_seqlens=[0, 1, 4, 6])

    def strided(leaves: Call) -> tuple[Tensor, Tensor]:
        views = _every_other(leaves)
        assert not any(views[name].is_contiguous() for name in ("A_log", "dt_bias", "cu_seqlens"))
        return complex_kda(**views, output_final_state=True, backend="triton")

    assert_same_bits(run(call, strided), run(call, "triton"))


# Edges ----------------------------------------------------------------------------------------------------------------


@in_interpreter
@pytest.mark.parametrize(("form", "T"), [("chunk", 40), ("recurrent", 6)])
def test_zero_gates_and_zero_vectors(form: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """g = -inf forgets all and has no gradient; a zero key writes nothing, a zero query reads nothing."""
    _use(form, monkeypatch)
    call = make_call(B=1, T=T, H=1, K=4, V=3, gate=None, beta_range=None, dtype=torch.float32, initial=True)
    call["g"][:, T // 2] = -math.inf
    call["k"][:, 3] = call["q"][:, 4] = 0
    draw = compare(call, "triton")
    check_kernels([draw])
    assert not draw.results["dg"][:, T // 2].any()
    assert not draw.results["dinitial_state"][0].isnan().any()
    assert not draw.results["o"][:, 4].any()
    assert not draw.results["dv"][:, 3].any()


@in_interpreter
@pytest.mark.parametrize("exponent", [-83, 83])
def test_keys_whose_square_float32_cannot_hold(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the direction of a normalised key matters: the same bits, and a gradient as much larger as the key is smaller."""
    _use("chunk", monkeypatch)
    call = make_call(B=1, T=5, H=1, K=4, V=3, dtype=torch.float32, initial=True)
    scaled = run(call | {"k": call["k"] * 2.0**exponent}, "triton")
    assert_same_bits(scaled | {"dk": scaled["dk"] * 2.0**exponent}, run(call, "triton"))


@in_interpreter
@pytest.mark.parametrize(("gate", "u"), [("sigmoid", 40.0), ("signed", 0.0), ("signed", -0.0), ("signed", -40.0)])
def test_the_ends_of_the_bounded_gates(gate: str, u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """|alpha| = e^-5 at every step, which takes the chunk's factors to e^80, and alpha = -1 at every step."""
    _use("chunk", monkeypatch)
    call = make_call(B=1, T=65, H=1, K=5, V=4, gate=gate, dtype=torch.float32, initial=True)
    draw = compare(call | {"g": torch.full_like(call["g"], u)}, "triton")
    assert_close(draw.results, draw.oracle, 2e-5)
    if u == 0:
        assert not draw.results["dg"].any()


@in_interpreter
@pytest.mark.parametrize("t", [2, 20])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("gate", ["signed", "sigmoid", "softplus", None])
def test_nan_stays_nan(gate: str | None, split: bool, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is not a number is seen in every later output and in the state."""
    _use("chunk", monkeypatch)
    if split:
        _round_operands(monkeypatch)
    call = make_call(B=1, T=34, H=1, K=4, V=3, gate=gate, dtype=torch.float32, initial=True)
    call["g"][:, t] = math.nan
    found = run(call, "triton", gradients=False)
    assert found["o"][:, t:].isnan().all()
    assert found["state"].isnan().all()


def _reflections(call: Call, keys: str = "equal", signs: str = "random") -> Call:
    """beta = 2 and alpha = +-1, so that nothing is ever forgotten; equal keys are the triangular system's worst case.

    `keys` and `signs` are random, or equal at all tokens: then an error of one transition is an error of all, and adds up.
    """
    g, k = call["g"], call["k"]
    sign = torch.where(g < 0, -1, 1) if call["gate"] else call["sign"]
    sign = sign[:, :1].expand_as(sign) if signs == "equal" else sign
    k = k[:, :1].expand_as(k) if keys == "equal" else k
    still = {
        "k": k,
        "beta": torch.full_like(call["beta"], 40.0 if call.get("beta_range") else 2.0),
    }  # sigmoid(40) is one too
    if call["gate"]:
        return call | still | {"g": (40 * sign).to(g.dtype)}  # tanh(20) is one to the last bit of float32
    return call | still | {"g": torch.zeros_like(g), "sign": sign.to(torch.int8)}


@in_interpreter
@pytest.mark.parametrize("gate", ["signed", None])
def test_equal_keys_at_beta_two(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _use("chunk", monkeypatch)
    settings = {
        "B": 1,
        "T": 65 if gate else 33,
        "H": 1,
        "K": 8,
        "V": 8,
        "gate": gate,
        "beta_range": None,
        "initial": True,
    }
    call = _reflections(make_call(**settings, dtype=torch.float32))
    check_kernels([compare(call, "triton")], rule=False)
    still = call | {"v": torch.zeros_like(call["v"]), "initial_state": torch.eye(8).view(1, 1, 8, 8)}
    S = run(still, "triton", gradients=False)["state"][0, 0].double()
    assert (S.mT @ S - torch.eye(8, dtype=torch.float64)).abs().max() < 2e-5


@in_interpreter
@pytest.mark.parametrize(("form", "T"), [("chunk", 129), ("half", 129), ("recurrent", 33)])
def test_a_repeated_transition_in_half_precision(form: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reflection and signs at every token: a rotation, whose angle must not be off by the rounding of a key.

    With half-precision operands the 32 equal keys of a chunk cancel in D: dk has 2.4 times the plain error here, not 2.
    """
    _use("recurrent" if form == "recurrent" else "chunk", monkeypatch)
    if form == "half":
        monkeypatch.setitem(plan.FAST, torch.float16, "fp16")
    settings = {"B": 1, "T": T, "H": 1, "K": 16, "V": 5, "beta_range": None, "initial": True, "dtype": torch.float16}
    draws = [compare(_reflections(make_call(**settings), signs="equal"), "triton")]
    if form == "half":
        assert max(x.ratio for x in excesses(draws, torch.float16)) <= 2.5
    else:
        check_kernels(draws)


@in_interpreter
@pytest.mark.parametrize(
    ("shape", "out"), [((130, 3, 5), (3, 5)), ((130, 3, 5), (3,)), ((1, 70), (70,)), ((65, 2, 128), (2,))]
)
@pytest.mark.parametrize("room", [0, 3])
def test_sums_of_parts(shape: tuple[int, ...], out: tuple[int, ...], room: int) -> None:
    """Over the parts, and over the last axis where the result has none; and where the parts have room for more columns."""
    width = shape[-1]
    parts, result = torch.randn(*shape[:-1], width + room), torch.full(out, math.nan)
    sums.sum_parts(parts, result, width)()
    exact = parts[..., :width].double().sum(0)
    exact = exact if exact.shape == result.shape else exact.sum(-1)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


@in_interpreter
@pytest.mark.parametrize(("num_parts", "HV", "K", "room"), [(130, 3, 5, 0), (1, 1, 70, 3), (65, 2, 128, 0)])
def test_both_sums_of_the_gates_are_one_launch(num_parts: int, HV: int, K: int, room: int) -> None:
    x = torch.zeros(1, 1, HV, K)
    call = OpCall(x, x, x, x, x[..., 0], A_log=torch.zeros(HV), dt_bias=torch.zeros(HV * K), gate="signed")
    out = {name: torch.randn(num_parts, HV, K + room) for name in ("p_dlog_rate", "p_dbias")}
    (launch,), dA_log, ddt_bias = sums.gate_sums(call, out)
    assert dA_log is not None
    assert ddt_bias is not None
    launch()
    exact = {name: parts[..., :K].double().sum(0) for name, parts in out.items()}
    torch.testing.assert_close(dA_log.double(), exact["p_dlog_rate"].sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ddt_bias.double(), exact["p_dbias"].flatten(), rtol=1e-5, atol=1e-5)


# Decoding -------------------------------------------------------------------------------------------------------------


def _token(call: Call, t: int) -> Any:
    """One token of a call, as the operator's own data."""
    per_token = ("q", "k", "v", "g", "beta", "sign")
    return OpCall(
        **{n: x[:, t] if n in per_token and isinstance(x, Tensor) else x for n, x in call.items()},
        output_final_state=True,
    )


@triton.jit
def _pairs_kernel(p_log, p_negative, p_high, p_low, p_sign, C: tl.constexpr):
    o = tl.arange(0, 16)[:, None] * C + tl.arange(0, C)[None, :]
    b_high, b_low, b_sign = tile._sums_in_pairs(tl.load(p_log + o), tl.load(p_negative + o) > 0)
    tl.store(p_high + o, b_high)
    tl.store(p_low + o, b_low)
    tl.store(p_sign + o, b_sign)


@in_interpreter
@pytest.mark.parametrize("scale", [7.21, 0.1, 1e-6])
def test_sums_of_logs_in_pairs(scale: float) -> None:
    """Of bounded gates, with their signs, to 1e-8."""
    random = torch.Generator().manual_seed(0)
    log, negative = -scale * torch.rand(16, 32, generator=random), torch.rand(16, 32, generator=random) < 0.5
    log[0], negative[0] = -scale, True
    high, low, sign = torch.empty_like(log), torch.empty_like(log), torch.empty(16, 32, dtype=torch.int32)
    _pairs_kernel[(1,)](log, negative.int(), high, low, sign, 32)
    assert (high.double() + low.double() - log.double().cumsum(1)).abs().max() < min(1e-8, 1e-5 * scale)
    assert torch.equal(sign < 0, negative.cumsum(1) % 2 == 1)


@triton.jit
def _signed_kernel(p_e, p_log, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_log + o, tile._log2_signed(tl.load(p_e + o)))


@in_interpreter
def test_the_logarithm_of_a_signed_gate() -> None:
    """Of exp(-|u|), u = 0 included, which is e^-5: to a unit or two of float32, and to 3e-7 of itself where the gate is near 1."""
    e = torch.cat([torch.linspace(0, 1, 1 << 15), torch.logspace(-30, 0, 1 << 15)])
    log = torch.empty_like(e)
    _signed_kernel[(1,)](e, log, len(e))
    e = e.double()
    exact = torch.log1p(-2 * (1 - math.exp(-5)) * e / (1 + e)) / math.log(2)
    error = (log.double() - exact).abs()
    assert error.max() < 5e-7
    near = e < 0.2
    assert (error[near] <= 3e-7 * exact[near].abs()).all()


@in_interpreter
@pytest.mark.parametrize(("dtype", "inplace"), [(torch.float32, False), (torch.float16, True)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"A_log": True, "dt_bias": True},
        {"gate": "softplus", "A_log": True, "beta_range": 1},
        {"gate": "sigmoid", "dt_bias": True},
        {"gate": None, "beta_range": None, "normalize_qk": False},
    ],
    ids=str,
)
def test_decoding(inplace: bool, case: dict, dtype: torch.dtype) -> None:
    """Token by token, over two blocks of values, as the recurrence does it."""
    call = make_call(B=2, T=3, H=1, HV=2, K=5, V=40, scale=0.7, initial=True, dtype=dtype, **case)
    draw = compare(call, "reference", gradients=False)
    state, outputs = call["initial_state"].clone(), []
    for t in range(3):
        before = state.clone()
        o, following = kernels.step(_token(call | {"initial_state": state}, t), inplace, {})
        assert (following is state) == inplace
        assert torch.equal(state, before) != inplace
        outputs.append(o)
        state = following
    check_kernels([draw._replace(results={"o": torch.stack(outputs, 1), "state": state})])


@in_interpreter
def test_decoding_in_place_into_a_state_of_any_layout() -> None:
    call = make_call(B=2, T=1, H=2, K=5, V=4, initial=True, dtype=torch.float32)
    o, exact = recurrent.step(_token(call, 0), False, {})
    strided = call["initial_state"].mT.contiguous().mT
    assert not strided.is_contiguous()
    p, state = recurrent.step(_token(call | {"initial_state": strided}, 0), True, {})
    assert state is strided
    assert_same_bits({"o": p, "state": strided}, {"o": o, "state": exact})


def test_the_backward_pass_reads_q_and_k_only_where_it_must() -> None:
    """So that strided ones are not copied in vain: not with a bounded gate."""
    x = torch.empty(1, 40, 2, 16, device="meta")
    for dtype, gate in ((torch.bfloat16, "signed"), (torch.bfloat16, "softplus"), (torch.float32, "signed")):
        y = x.to(dtype)
        *_, last = chunk.launches(OpCall(y, y, y, y, y[..., 0], gate=gate, beta_range=2, normalize_qk=True))
        read = last.arguments["p_q"] is not None and last.arguments["p_k"] is not None
        assert read != (gate == "signed")


# Dispatch -------------------------------------------------------------------------------------------------------------


def test_what_the_kernels_cannot_serve_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert kernels.refuses(OpCall(**make_call(dtype=torch.float32))) is None
    assert "float64" in str(_why(make_call()))
    separate = OpCall(**make_call(T=1, dtype=torch.float32, separate=True))
    assert "erase" in str(kernels.refuses_recurrent(separate))
    assert "erase" in str(kernels.refuses_step(separate))
    assert kernels.choose_form(separate)[0] == "triton-portable"
    monkeypatch.setattr(kernels, "_interpreted", lambda: False)
    assert "CUDA" in str(_why(make_call(dtype=torch.float32)))


def _why(call: Call) -> str:
    device = "cuda" if torch.cuda.is_available() and call["v"].dtype == torch.float64 else "cpu"
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    with pytest.raises(ValueError, match="backend='triton' cannot serve this call") as reason:
        complex_kda(**call, backend="triton")
    return str(reason.value)


def test_auto_never_takes_the_interpreter() -> None:
    assert which_backend(**make_call(dtype=torch.float32)).backend.name == "chunked"


def _form(**settings: Any) -> str:
    return kernels.choose_form(OpCall(**make_call(**({"dtype": torch.bfloat16} | settings))))[0]


def test_the_form_depends_on_length_and_width_alone() -> None:
    short, small = kernels.SHORT, kernels.SMALL_HEAD
    for B, H in ((1, 1), (64, 1), (2, 16)):
        assert _form(B=B, T=short, H=H, K=small, V=small) == "triton-recurrent"
        assert _form(B=B, T=short + 1, H=H, K=4, V=4) == "triton-portable"
        assert _form(B=B, T=8, H=H, K=4, V=small + 1) == "triton-portable"


def test_when_the_kernels_for_hopper_serve_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on such a GPU: never by batch or heads, and every other call has a reason that stands in the choice."""
    monkeypatch.setattr(hopper, "device_refuses", lambda device: None)
    fit: dict[str, Any] = {"T": 64, "K": 64, "V": 128}
    for B, H, HV in ((1, 1, 1), (64, 1, 2), (2, 16, 16)):
        assert _form(**fit, B=B, H=H, HV=HV) == "triton-hopper"
    served: list[dict[str, Any]] = [
        {"T": 65},
        {"gate": "softplus"},
        {"gate": None, "beta_range": None},
        {"cu_seqlens": [0, 64]},
        {"gate_dtype": torch.float32},
        {"V": 256},
        {"T": 160, "K": 32, "V": 32},
        {"K": 96, "V": 40},
        {"dtype": torch.float16, "K": 128},
        {"separate": True},
        {"K": 8, "V": 8, "T": 160},
        {"K": 256, "V": 256, "beta_range": None},
        {"dtype": torch.float16, "K": 256},
    ]
    for changes in served:
        assert _form(**({"B": 1} | fit | changes)) == "triton-hopper"
    others: dict[str, dict[str, Any]] = {
        "whole chunks": {"T": 65, "V": 256},
        "logits of beta": {"beta_range": None, "V": 256},
        "no packing": {"cu_seqlens": [0, 64], "V": 256},
        "K = 64 or 128": {"K": 96, "V": 256},
        "a multiple of 64": {"V": 200},
        "float16 and K above 64": {"dtype": torch.float16, "V": 256},
        "bfloat16 or float16": {"dtype": torch.float32},
    }
    for words, changes in others.items():
        call = OpCall(**make_call(**({"B": 1, "dtype": torch.bfloat16} | fit | changes)))
        form, reason = kernels.choose_form(call)
        assert form == "triton-portable"
        assert words in reason
        assert words in str(hopper.refuses(call))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"K": 64, "V": 40}, []),
        ({"K": 256, "V": 200}, []),
        ({"K": 100, "V": 128}, ["K is filled up from 100 to 104"]),
        ({"K": 5, "V": 60}, ["K is filled up from 5 to 8", "V is filled up from 60 to 64"]),
        ({"K": 129, "V": 250}, ["K is filled up from 129 to 256", "V is filled up from 250 to 256"]),
        ({"K": 192, "V": 192}, ["K is filled up from 192 to 256"]),
        ({"K": 72, "V": 256, "dtype": torch.float16}, ["K is filled up from 72 to 256"]),
    ],
)
def test_the_choice_says_what_is_filled_up(
    changes: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "device_refuses", lambda device: None)
    call = OpCall(**make_call(**({"B": 1, "T": 64, "dtype": torch.bfloat16} | changes)))
    form, reason = kernels.choose_form(call)
    assert form == "triton-hopper"
    assert reason.split("; ")[1:] == ([", ".join(told)] if told else [])


def test_the_question_for_hopper_can_be_compiled() -> None:
    """Device and shape, for lengths that are not known, without a break."""

    def answer(x: Tensor, K: int) -> int:
        k = x[..., :K]
        call = OpCall(k, k, x, k, x[..., 0], gate="signed", beta_range=2)
        fits = 2 * (hopper.device_refuses(x.device) is None) + (hopper.unfit(call) is None)
        return fits + 4 * bool(hopper.filled(call))

    compiled = torch.compile(lambda x, K: x + answer(x, K), fullgraph=True, dynamic=True, backend="eager")
    found = set()
    for T, K in ((64, 64), (65, 64), (96, 64), (130, 64), (96, 60), (65, 130)):
        x = torch.zeros(1, T, 1, 256, dtype=torch.bfloat16)
        found.add((answer(x, K) % 2, answer(x, K) // 4))
        assert torch.equal(compiled(x, K), x + answer(x, K))
    assert found == {(0, 0), (1, 0), (0, 1), (1, 1)}


@in_interpreter
def test_a_form_by_name_runs_or_says_why_not() -> None:
    call = make_call(B=1, T=5, dtype=torch.float32)
    assert which_backend(**call, backend="triton").backend.name == "triton-recurrent"
    found = {form: run(call, f"triton-{form}") for form in ("recurrent", "portable")}
    assert_same_bits(run(call, "triton"), found["recurrent"])
    assert_close(found["portable"], found["recurrent"], 2e-5)
    assert not torch.equal(found["portable"]["o"], found["recurrent"]["o"])
    with pytest.raises(ValueError, match=r"'triton-hopper' cannot serve this call: .*capability 9"):
        complex_kda(**call, backend="triton-hopper")
    with pytest.raises(ValueError, match=r"'triton-recurrent' cannot serve this call: .* 33"):
        complex_kda(**make_call(B=1, T=5, K=33, dtype=torch.float32), backend="triton-recurrent")


@in_interpreter
def test_the_step_is_dispatched_too() -> None:
    x, state = torch.randn(2, 1, 4), torch.randn(2, 1, 4, 4)
    token = (x, x, x, -x.abs(), x[..., 0], state)
    assert which_backend(*token, step=True).backend.name == "reference"  # never the interpreter by itself
    assert str(which_backend(*token, step=True, backend="triton")).startswith("triton-recurrent: ")
    kernel = complex_kda_step(*token, backend="triton")
    named = complex_kda_step(*token, backend="triton-recurrent")
    torch_ = complex_kda_step(*token, backend="reference")
    for a, b, c in zip(kernel, named, torch_, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)
    with pytest.raises(ValueError, match="no gradient"):
        complex_kda_step(*token[:5], state.clone().requires_grad_(), backend="triton")
    with pytest.raises(ValueError, match="backend is 'chunked'"):
        complex_kda_step(*token, backend="chunked")


@pytest.mark.parametrize(("B", "T"), [(70_000, 1), (1, 70_000 * 32)])
def test_grids_fit_for_many_sequences_and_chunks(B: int, T: int) -> None:
    """CUDA takes up to 65,535 programs on the second and third axis."""
    x = torch.empty(B, T, 2, 16, device="meta")
    call = OpCall(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True)
    grids = [found.grid for found in (*chunk.launches(call), *recurrent.launches(call))]
    assert max(n for grid in grids for n in grid[1:]) <= 65_535


class _OnCard1(Tensor):
    """What says that it lies on the second card."""

    is_cuda = True  # type: ignore[assignment]

    def get_device(self) -> int:
        return 1


class _Recorder:
    """A kernel that writes down which card is the current one, and its grid."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple]] = []

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *_, **__: self.calls.append((torch.cuda.current_device(), grid))


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel, there = _Recorder(), torch.zeros(1).as_subclass(_OnCard1)
    launch.Launch(kernel, (3,), {"p_none": None, "p_x": there}, num_warps=1)()
    launch.launch(kernel, (4,), torch.zeros(1), 5)
    assert kernel.calls == [(1, (3,)), (0, (4,))]


# On a GPU -------------------------------------------------------------------------------------------------------------

#: one setting for many tests, so that few kernels are compiled
ON_GPU = {"H": 2, "K": 64, "V": 64, "A_log": True, "dt_bias": True, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        *({"K": K, "V": K} for K in (16, 32, 64, 128, 256)),
        {"K": 64, "V": 128},
        {"K": 128, "V": 64},
        {"gate": "sigmoid", "beta_range": 1},
        {"gate": "softplus"},
        {"gate": None, "beta_range": None, "normalize_qk": False},
        {"gate": None, "sign": False, "K": 128, "V": 128},
        {"HV": 4, "cu_seqlens": [0, 0, 100, 101, 300, 300]},
        # whole chunks, which Hopper has kernels of its own for
        *({"T": 320, "K": K, "V": V} for K in (64, 128) for V in (64, 128)),
        {"T": 320, "HV": 4},
        {"T": 320, "V": 256},
        {"T": 320, "K": 128, "V": 128, "gate": "sigmoid", "beta_range": 1},
        {"T": 320, "normalize_qk": False, "A_log": False, "dt_bias": False},
        {"T": 320, "V": 192},
        {"T": 32, "B": 1, "H": 1},
        {"T": 320, "gate": "softplus"},
        {"T": 320, "gate": "softplus", "K": 128, "V": 128, "HV": 4, "gate_dtype": torch.float32},
        {"T": 320, "gate": None},
        {"T": 320, "gate": None, "K": 128, "V": 128, "sign": False, "beta_range": None, "normalize_qk": False},
        {"T": 320, "gate": None, "K": 128, "V": 64, "beta_range": None},
        {"T": 320, "K": 128, "V": 128, "beta_range": None, "gate_dtype": torch.float32},
        {"T": 320, "gate": None, "V": 192, "beta_range": None},
        # heads narrower than Hopper's tiles
        {"T": 320, "K": 96, "V": 96},
        {"K": 96, "V": 96, "gate": "softplus"},
        {"T": 320, "K": 32, "V": 32, "HV": 4},
        {"K": 32, "V": 104, "gate": None, "beta_range": None, "gate_dtype": torch.float32},
        {"K": 72, "V": 40, "cu_seqlens": [0, 0, 100, 101, 300, 300]},
        # separate erase and write gates
        {"T": 320, "K": 128, "V": 128, "separate": True, "beta_range": None},
        {"separate": True, "beta_range": None, "gate": "softplus", "HV": 4},
        {"K": 96, "V": 64, "separate": True, "beta_range": None, "gate": None, "gate_dtype": torch.float32},
        {"K": 16, "V": 16, "separate": True, "beta_range": None},
        # filled up, and what only a call of that size has
        {"T": 320, "K": 100, "V": 60},
        {"T": 320, "K": 192, "V": 192, "gate": "softplus"},
        {"K": 24, "V": 20, "HV": 4, "cu_seqlens": [0, 0, 100, 101, 300, 300]},
        {"T": 320, "K": 256, "V": 256, "beta_range": None},
        {"K": 256, "V": 128, "gate": None, "beta_range": None, "gate_dtype": torch.float32},
    ],
    ids=str,
)
def test_bfloat16_by_the_double_rule(settings: dict) -> None:
    calls = [
        make_call(
            **(ON_GPU | {"B": 1 if "cu_seqlens" in settings else 4, "T": 300, "initial": True} | settings), seed=s
        )
        for s in (0, 1)
    ]
    check_kernels([compare(call, "triton", plain="chunked") for call in calls])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"T": 320, "K": 128, "V": 128},
        {"T": 320, "gate": "sigmoid", "beta_range": 1, "gate_dtype": torch.float32},
        {"T": 320, "K": 128, "V": 64, "gate": "softplus", "HV": 4},
        {"gate": None, "beta_range": None},
        {"K": 96, "V": 96, "gate": None, "normalize_qk": False},
        {"K": 128, "V": 128, "cu_seqlens": [0, 0, 100, 101, 300, 300]},
        {"separate": True, "beta_range": None},
        {"K": 256, "V": 64},
        {"T": 320, "K": 256, "V": 256, "beta_range": None},
        {"K": 128, "V": 256},
        {"K": 100, "V": 60, "gate": "softplus"},
    ],
    ids=str,
)
def test_float16_by_the_double_rule(settings: dict) -> None:
    B = 1 if "cu_seqlens" in settings else 4
    base = ON_GPU | {"dtype": torch.float16, "B": B, "T": 300, "initial": True}
    calls = [make_call(**(base | settings), seed=seed) for seed in (0, 1)]
    check_kernels([compare(call, "triton", plain="chunked") for call in calls])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gate", "signs", "beta_range", "K", "dtype"),
    [
        ("signed", "random", None, 64, torch.bfloat16),
        ("signed", "equal", None, 64, torch.bfloat16),
        (None, "random", None, 64, torch.bfloat16),
        (None, "equal", 2, 64, torch.bfloat16),
        ("signed", "random", 2, 64, torch.bfloat16),
        ("signed", "equal", 2, 64, torch.bfloat16),
        ("signed", "equal", 2, 128, torch.bfloat16),
        ("signed", "equal", 2, 96, torch.bfloat16),
        ("signed", "equal", 2, 64, torch.float16),
        ("signed", "equal", 2, 128, torch.float16),
        (None, "random", 2, 128, torch.float16),
        ("signed", "equal", 2, 256, torch.float16),
        (None, "random", 2, 256, torch.float16),
        ("signed", "equal", None, 256, torch.bfloat16),
        ("signed", "equal", None, 256, torch.float16),
        ("signed", "equal", 2, 100, torch.bfloat16),
    ],
)
def test_equal_keys_at_beta_two_over_8192_tokens(
    gate: str | None, signs: str, beta_range: int | None, K: int, dtype: torch.dtype
) -> None:
    settings = ON_GPU | {
        "A_log": False,
        "dt_bias": False,
        "gate": gate,
        "beta_range": beta_range,
        "K": K,
        "dtype": dtype,
    }
    call = _reflections(make_call(B=2, T=8192, initial=True, **settings), signs=signs)
    draw = compare(call, "triton", plain="chunked")
    S0 = torch.eye(K, 64, device="cuda").expand(2, 2, K, 64)
    still = call | {"v": torch.zeros_like(call["v"]), "initial_state": S0}
    norms = run(still, "triton", gradients=False)["state"].flatten(2).norm(dim=-1)
    assert (norms / 8 - 1).abs().max() < 0.01
    check_kernels([draw])


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_decoding_4096_tokens_equals_the_parallel_form(inplace: bool) -> None:
    call = make_call(B=2, T=4096, initial=True, **ON_GPU)
    draw = compare(call, "triton", plain="chunked", gradients=False)
    options = {name: call[name] for name in ("gate", "A_log", "dt_bias", "beta_range", "normalize_qk")}
    state, outputs = call["initial_state"].clone(), []
    for t in range(4096):
        token = {name: call[name][:, t] for name in ("q", "k", "v", "g", "beta")}
        o, state = complex_kda_step(**token, state=state, inplace=inplace, **options)
        outputs.append(o)
    decoded = {"o": torch.stack(outputs, 1), "state": state}
    check_kernels([draw._replace(results=decoded)])
    assert_close(decoded, draw.results, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"T": 320},
        {"T": 320, "K": 128},
        {"T": 50, "K": 32},
        {"K": 96},
        {"K": 100},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"K": 128, "gate": "softplus"},
        {"K": 128, "gate": None, "dtype": torch.float16, "beta_range": None},
        {"K": 256},
        {"K": 256, "gate": None, "gate_dtype": torch.float32, "beta_range": None},
        {"HV": 4, "gate": "sigmoid"},
        {"HV": 4, "separate": True, "beta_range": None},
    ],
    ids=str,
)
def test_the_same_bits_alone_in_a_batch_and_again_on_a_gpu(settings: dict[str, Any]) -> None:
    widths = {"K": settings.get("K", 64), "V": settings.get("K", 64)}
    call = make_call(**(ON_GPU | {"B": 5, "T": 300, "initial": True} | settings | widths))
    together = rowwise(call, "triton")
    for _ in range(3):
        assert_same_bits(rowwise(call, "triton"), together)
    for row in (0, 3):
        alone = rowwise(slice_batch(call, slice(row, row + 1)), "triton", row)
        assert_same_bits({name: x[row : row + 1] for name, x in together.items()}, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 100])
def test_packed_sequences_do_not_synchronise(K: int) -> None:
    bounds = [0, 0, 100, 101, 300, 300]
    call = make_call(B=1, T=300, HV=4, initial=True, cu_seqlens=bounds, **(ON_GPU | {"K": K}))
    leaves = {n: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}
    inputs = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]

    def both() -> tuple[Tensor, Tensor]:
        o, state = complex_kda(**leaves, output_final_state=True, backend="triton")
        torch.autograd.grad((o, state), inputs, (torch.ones_like(o), torch.ones_like(state)))
        return o.detach(), state.detach()

    both()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, state = both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            alone = run(member(call, n), "triton", gradients=False)
            assert_close({"o": o[:, start:end], "state": state[n : n + 1]}, alone, torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 100])
def test_packed_calls_as_a_cuda_graph(K: int) -> None:
    """Forward and backward are captured; replayed with other numbers and other borders they give what a call gives."""
    first, other = (
        make_call(B=1, T=300, HV=4, initial=True, cu_seqlens=bounds, **(ON_GPU | {"K": K}), seed=seed)
        for seed, bounds in enumerate(([0, 0, 100, 101, 300, 300], [0, 64, 65, 65, 170, 300]))
    )
    leaves = {n: x.clone() if isinstance(x, Tensor) else x for n, x in first.items()}
    inputs = [x.requires_grad_() for x in leaves.values() if isinstance(x, Tensor) and x.is_floating_point()]
    do = torch.randn_like(leaves["v"])

    def both() -> list[Tensor]:
        o, state = complex_kda(**leaves, output_final_state=True, backend="triton")
        return [o, state, *torch.autograd.grad((o, state), inputs, (do, torch.ones_like(state)))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for name, x in other.items():
            if isinstance(x, Tensor):
                leaves[name].copy_(x)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, both(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K"), [(300, 64), (320, 64), (300, 100)])
def test_one_node_under_compile_on_a_gpu(T: int, K: int) -> None:
    call = make_call(B=4, T=T, initial=True, **(ON_GPU | {"K": K}))

    @torch.compile(fullgraph=True)
    def compiled(leaves: Call) -> tuple[Tensor, Tensor]:
        return complex_kda(**leaves, output_final_state=True, backend="triton")

    assert_same_bits(run(call, compiled), run(call, "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16384 + 44, 16384 + 64])
def test_segments_on_a_gpu(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five segments of up to 4096 tokens: the usual bounds, and where nothing is forgotten at most twice the error of the whole."""
    draw = compare(make_call(B=1, T=T, initial=True, **ON_GPU), "triton", plain="chunked")
    assert plan.plan(OpCall(**draw.call)).num_segments == 5
    check_kernels([draw])
    kept = compare(_reflections(draw.call, keys="random"), "triton", plain="chunked")
    monkeypatch.setattr(plan, "SPLIT_FROM", 10**9)
    whole = run(kept.call, "triton")
    assert not torch.equal(whole["state"], kept.results["state"])
    check_kernels([kept._replace(plain=whole)])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gate": "softplus", "K": 128},
        {"gate": None},
        {"K": 96, "dtype": torch.float16},
        {"K": 256},
        {"K": 256, "gate": "softplus", "beta_range": None},
        {"K": 128, "gate": None, "HV": 4, "dtype": torch.float16},
        {"separate": True, "beta_range": None},
        {"HV": 4, "cu_seqlens": [0, 10, 96]},
        {"gate": "softplus", "cu_seqlens": [0, 10, 96]},
        {"dtype": torch.float32},
        {"gate": None, "dtype": torch.float32},
    ],
    ids=str,
)
def test_the_future_does_not_leak_on_a_gpu(settings: dict[str, Any]) -> None:
    """Not by rounding either: tokens of the same chunk, of its other half, of another sequence, and one token more or less."""
    widths = {"K": settings.get("K", 64), "V": settings.get("K", 64)}
    call = make_call(**(ON_GPU | {"B": 1, "T": 96, "initial": True} | settings | widths))
    before = run(call, "triton", gradients=False)["o"]
    bounds = settings.get("cu_seqlens", [0, 96])
    for t in (5, 15, 40, 63, 95):
        after = run(perturbed(call, t), "triton", gradients=False)["o"]
        end = min(x for x in bounds if x > t)
        assert torch.equal(before[:, :t], after[:, :t]), f"token {t} changes earlier outputs"
        assert torch.equal(before[:, end:], after[:, end:]), f"token {t} changes another sequence"
        assert not torch.equal(before[:, t:end], after[:, t:end])
    whole = {name: x for name, x in call.items() if name != "cu_seqlens"}
    cut = slice_time(whole, slice(0, 75))
    if "cu_seqlens" in call:
        cut["cu_seqlens"] = call["cu_seqlens"].clamp_max(75)
    assert torch.equal(before[:, :75], run(cut, "triton", gradients=False)["o"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"K": 128},
        {"gate": "softplus"},
        {"gate": None, "HV": 4, "separate": True, "beta_range": None},
        {"K": 256},
        {"K": 96, "dtype": torch.float16},
        {"K": 100, "beta_range": None},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_packed_gives_the_bits_of_separate_sequences_on_a_gpu(settings: dict[str, Any]) -> None:
    """Forward and backward, beside a sequence of NaN, and though chunks are not whole."""
    bounds = [0, 70, 70, 102, 103, 230, 300]
    widths = {"K": settings.get("K", 64), "V": settings.get("K", 64)}
    call = make_call(**(ON_GPU | {"B": 1, "T": 300, "initial": True, "cu_seqlens": bounds} | settings | widths))
    for name in ("q", "k", "v", "g", "beta", "erase", "write"):
        if call.get(name) is not None:
            call[name][:, 103:230] = math.nan
    assert check_members(call)["o"][:, 103:230].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"T": 320},
        {"T": 300, "gate": None},
        {"T": 300, "K": 32, "V": 32},
        {"T": 300, "K": 100, "V": 60},
        {"T": 300, "K": 192, "gate": None, "beta_range": None},
    ],
    ids=str,
)
def test_kept_launches_give_the_bits_of_new_ones(settings: dict) -> None:
    """On other tensors than those that they were kept from, also where two arguments are one tensor."""
    first, other = (make_call(B=2, initial=True, **(ON_GPU | settings), seed=seed) for seed in (0, 1))
    dispatch.forget()
    fresh = run(other, "triton")
    dispatch.forget()
    run(first, "triton")
    kept = {name for route in dispatch._ROUTES.values() for name in route.kept}
    assert kept == {"forward", "backward with the state's"}
    assert_same_bits(run(other, "triton"), fresh)
    x = other["k"]
    one = complex_kda(**(other | {"q": x}), backend="triton")[0]
    assert torch.equal(one, complex_kda(**(other | {"q": x.clone()}), backend="triton")[0])


@pytest.mark.gpu
def test_float32_on_a_gpu() -> None:
    calls = [make_call(B=4, T=300, initial=True, **(ON_GPU | {"dtype": torch.float32}), seed=seed) for seed in (0, 1)]
    check_kernels([compare(call, "triton", plain="chunked") for call in calls], rule=False)
