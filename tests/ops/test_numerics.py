"""What bites in long, orthogonal or strongly decaying recurrences, and the laws that hold to the last bit."""

import math

import pytest
import torch
from torch import Tensor

from ckda import complex_kda, complex_kda_step
from ckda.ops import BACKENDS, which_backend
from ckda.ops.gate import (
    EPS,
    GATES,
    beta_from_logit,
    beta_spread,
    evaluate_gate,
    gate_alpha,
    gate_backward,
    init_A_log,
    init_dt_bias,
)
from tests.ops.common import (
    FLOAT64_TOLERANCE,
    Call,
    assert_close,
    assert_same_bits,
    cast,
    check_double_rule,
    double_rule,
    make_call,
    member,
    perturbed,
    rowwise,
    run,
    slice_batch,
    slice_time,
    written_out,
)

#: those that any machine runs
BOTH = [name for name in BACKENDS if name in ("reference", "chunked")]
FAST = [name for name in BOTH if name != "reference"]

# Orthogonal transitions never forget ----------------------------------------------------------------------------------


def _orthogonal_call(T: int, K: int, keys: str, signs: str, dtype: torch.dtype = torch.float32) -> Call:
    """beta = 2, alpha = +-1, no writes, from the identity: every transition is a reflection times signs."""
    random = torch.Generator().manual_seed(K)
    shape = (1, 1 if keys == "equal" else T, 1, K)
    k = torch.randn(shape, generator=random).to(dtype).expand(1, T, 1, K)
    many = 1 if signs == "equal" else T
    sign = 1 - 2 * torch.randint(0, 2, (1, many, 1, K), generator=random, dtype=torch.int8)
    zero = torch.zeros(1, T, 1, K, dtype=dtype)
    return {
        "q": k,
        "k": k,
        "v": zero,
        "g": zero,
        "beta": torch.full((1, T, 1), 2.0, dtype=dtype),
        "sign": sign.expand(1, T, 1, K),
        "gate": None,
        "normalize_qk": True,
        "initial_state": torch.eye(K, dtype=torch.float32).view(1, 1, K, K),
    }


def orthogonality_defect(call: Call, backend: str) -> float:
    """max|S^T S - I| of the final state."""
    S = complex_kda(**call, output_final_state=True, backend=backend)[1][0, 0].double()
    return (S.mT @ S - torch.eye(S.shape[-1], dtype=torch.float64)).abs().max().item()


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("K", [4, 16, 128])
@pytest.mark.parametrize(("keys", "signs"), [("equal", "equal"), ("equal", "random"), ("random", "random")])
def test_orthogonal_for_long(keys: str, signs: str, K: int, backend: str) -> None:
    """16,384 steps stay within 1e-3; the loop is run for an eighth of them and held to an eighth of that."""
    T, bound = (16384, 1e-3) if backend != "reference" else (2048, 1e-3 / 8)
    assert orthogonality_defect(_orthogonal_call(T, K, keys, signs), backend) < bound


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_orthogonal_for_long_from_half_precision_keys(dtype: torch.dtype, backend: str) -> None:
    assert orthogonality_defect(_orthogonal_call(16384, 16, "equal", "equal", dtype), backend) < 1e-3


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 40)])
def test_equal_keys_at_beta_two_have_gradients(K: int, V: int, backend: str) -> None:
    """All keys equal, beta = 2, alpha = +-1: the triangular system's worst case, forward and backward."""
    calls = []
    for seed in (0, 1):
        call = make_call(
            B=2, T=150, H=2, K=K, V=V, gate=None, beta_range=None, initial=True, dtype=torch.float32, seed=seed
        )
        call.update(k=call["k"][:, :1].expand(2, 150, 2, K), g=torch.zeros_like(call["g"]))
        calls.append(dict(call, beta=torch.full_like(call["beta"], 2.0)))
    broken = [e for e in double_rule(calls, backend) if e.ratio > 2]
    assert not broken, broken
    exact = cast(calls[0], torch.float64)
    assert_close(run(exact, backend), run(exact), FLOAT64_TOLERANCE)


# Strong decay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("decay", [5.0, 50.0, 1000.0])
@pytest.mark.parametrize("channels", ["all", "some"])
def test_strong_decay_at_every_step(channels: str, decay: float, backend: str) -> None:
    settings = {"B": 2, "T": 300, "H": 2, "K": 6, "V": 5, "gate": None, "initial": True}
    calls = []
    for seed in (0, 1):
        call = make_call(**settings, dtype=torch.float32, seed=seed)
        g = torch.full_like(call["g"], -decay)
        calls.append(dict(call, g=g if channels == "all" else torch.where(torch.arange(6) < 3, g, call["g"])))
    check_double_rule(calls, backend)
    exact = cast(calls[0], torch.float64)
    assert_close(run(exact, backend), run(exact), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("backend", FAST)
def test_the_strongest_bounded_gates_over_hundreds_of_steps(backend: str) -> None:
    """sigmoid at u = +40 is log alpha = -5; signed at u = 0 is |alpha| = e^-5."""
    for gate, u in (("sigmoid", 40.0), ("signed", 0.0)):
        call = make_call(B=2, T=300, H=1, K=5, V=4, gate=gate, initial=True)
        call["g"] = torch.full_like(call["g"], u)
        assert_close(run(call, backend), run(call), FLOAT64_TOLERANCE)
        check_double_rule([cast(call, torch.float32)], backend)


@pytest.mark.parametrize("backend", BOTH)
def test_zero_gate_forgets_all_and_has_no_gradient(backend: str) -> None:
    """g = -inf is alpha = 0: history before it does not matter, whatever its sign says, and dg = 0 there."""
    call = make_call(B=1, T=40, H=1, K=4, V=3, gate=None, beta_range=None, initial=True)
    call["g"] = torch.full_like(call["g"], -0.1)
    call["g"][:, 20] = -math.inf
    got = run(call, backend)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert torch.equal(got["dg"][:, 20], torch.zeros_like(got["dg"][:, 20]))
    assert got["dg"][:, 19].abs().max() > 0  # outputs before the zero still depend on their gates
    assert_close(got, run(call, written_out), FLOAT64_TOLERANCE)
    flipped = dict(call, sign=call["sign"].clone())
    flipped["sign"][:, 20] *= -1
    assert_close(run(flipped, backend), got, 1e-14)
    fresh = run(
        slice_time({n: x for n, x in call.items() if n != "initial_state"}, slice(20, 40)), backend, gradients=False
    )
    assert_close(got, {"state": fresh["state"]}, 1e-12)
    assert_close({"o": got["o"][:, 20:]}, {"o": fresh["o"]}, 1e-12)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_gates_zero(dtype: torch.dtype, backend: str) -> None:
    call = make_call(B=1, T=70, H=1, K=4, V=3, gate=None, dtype=dtype, initial=True)
    call["g"] = torch.full_like(call["g"], -math.inf)
    got = run(call, backend)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert not got["dg"].any()
    assert not got["dinitial_state"].any()
    check_double_rule([call], backend)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("sign", [1, -1])
def test_gates_of_exactly_one(sign: int, backend: str) -> None:
    """alpha = +-1 without erasing or writing keeps the state exactly, signs aside."""
    call = make_call(B=1, T=33, H=1, K=4, V=3, gate=None, beta_range=None, dtype=torch.float32, initial=True)
    call["g"], call["beta"] = torch.zeros_like(call["g"]), torch.zeros_like(call["beta"])
    call["sign"] = torch.full_like(call["sign"], sign)
    assert torch.equal(run(call, backend, gradients=False)["state"], sign * call["initial_state"])


# Norms and gates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BOTH)
def test_zero_vectors_stay_zero_under_normalisation(backend: str) -> None:
    call = make_call(B=1, T=20, H=1, K=4, V=3, dtype=torch.float32, initial=True)
    call["k"][:, 3] = 0
    call["q"][:, 5] = 0
    got = run(call, backend)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert not got["o"][:, 5].any()
    without = dict(call, v=call["v"].clone())
    without["v"][:, 3] += 1  # a zero key writes nothing
    assert_same_bits(run(without, backend, gradients=False), {name: got[name] for name in ("o", "state")})


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_normalisation_has_no_floor_and_no_ceiling(size: float, backend: str) -> None:
    """Nothing is added under the root, and |x|^2 neither underflows nor overflows in float32."""
    call = make_call(B=1, T=20, H=1, K=4, V=3, dtype=torch.float32)
    scaled = dict(call, q=call["q"] * size, k=call["k"] * size)
    results = run(call, backend, gradients=False)
    assert_close(run(scaled, backend, gradients=False), results, 1e-5)


def test_beta_is_divided_by_the_length_of_the_rounded_key() -> None:
    """One step at beta = 2 is a reflection to float32 rounding for every key; without the division it is off by more."""
    random = torch.Generator().manual_seed(0)
    k = torch.randn(1, 256, 1, 16, generator=random)
    zero, two = torch.zeros(256, 1, 16), torch.full((256, 1), 2.0)
    eye = torch.eye(16).expand(256, 1, 16, 16)
    _, S = complex_kda_step(k[0], k[0], zero, zero, two, eye, normalize_qk=True)
    unit = k[0, :, 0].double() / k[0, :, 0].double().norm(dim=-1, keepdim=True)
    exact = torch.eye(16, dtype=torch.float64) - 2 * unit[:, :, None] * unit[:, None, :]
    assert (S[:, 0] - exact).abs().max() < 3e-7


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_signed_gate_at_zero_is_plus_epsilon_without_gradient(zero: float) -> None:
    for dt_bias in (None, torch.zeros(1), torch.full((1,), -0.0)):
        g = torch.full((1, 1), zero, requires_grad=True)
        gate = evaluate_gate("signed", g, torch.full((1,), 0.3), dt_bias)
        assert gate.sign is not None
        assert gate.sign.item() == 1
        assert gate.alpha().item() == pytest.approx(EPS, rel=1e-6)
        alpha = gate_alpha("signed", g, torch.full((1,), 0.3), dt_bias)
        assert alpha.item() == pytest.approx(EPS, rel=1e-4)
        dg, _, _ = gate_backward("signed", torch.ones(1, 1), g.detach(), torch.full((1,), 0.3), dt_bias)
        assert dg.item() == 0


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_signed_gate_at_zero_inside_the_operator(zero: float, backend: str) -> None:
    """One step on the state with beta = 0 reads alpha off: +eps at u = +-0, and dg is exactly zero."""
    one = torch.ones(1, 1, 1, 2)
    g = torch.full((1, 1, 1, 2), zero, requires_grad=True)
    S0 = torch.ones(1, 1, 2, 2)
    _, state = complex_kda(
        one,
        one,
        one,
        g,
        torch.zeros(1, 1, 1),
        gate="signed",
        initial_state=S0,
        output_final_state=True,
        backend=backend,
    )
    torch.testing.assert_close(state, EPS * S0, rtol=1e-4, atol=0.0)
    state.sum().backward()
    assert g.grad is not None
    assert torch.equal(g.grad, torch.zeros_like(g))


#: raw projections where the two forms of the signed gate meet and where each loses its digits
U = torch.tensor(
    [1e-30, 1e-8, 1e-4, 0.01, 0.3, 0.999, 1.0, 1.001, 3.0, 8.0, 15.0, 17.0, 30.0, 80.0], dtype=torch.float64
)


def _log_alpha(gate: str, u: Tensor) -> Tensor:
    """log|alpha| by identities that lose no digits in float64, other than those the library uses.

    signed: eps + (1 - eps) tanh(u/2) = 1 - 2 (1 - eps) / (e^u + 1) = (eps (e^u + 1) + (1 - eps) (e^u - 1)) / (e^u + 1).
    """
    if gate == "sigmoid":
        return -5 / (1 + torch.exp(-u))
    if gate == "softplus":
        return -torch.logaddexp(u, torch.zeros_like(u))
    u = u.abs()
    near = torch.log(EPS * (torch.exp(-u) + 1) - (1 - EPS) * torch.expm1(-u)) - torch.log1p(torch.exp(-u))
    return torch.where(u > 2, torch.log1p(-2 * (1 - EPS) / (torch.exp(u) + 1)), near)


@pytest.mark.parametrize("gate", GATES)
def test_gate_formulas(gate: str) -> None:
    """app:gauge: each gate by another expression of the same function, in float64, and float32 to its rounding."""
    u = torch.cat([-U.flip(0), U])[None]  # one head
    exact = _log_alpha(gate, u)
    got = evaluate_gate(gate, u)
    torch.testing.assert_close(got.log, exact, rtol=1e-13, atol=1e-300)
    low = evaluate_gate(gate, u.float())
    torch.testing.assert_close(low.log.double(), _log_alpha(gate, u.float().double()), rtol=1e-6, atol=1e-37)
    if gate == "signed":
        assert got.sign is not None
        assert torch.equal(got.sign, torch.where(u < 0, -1, 1).to(torch.int8))
        assert got.log.min() >= -5 * (1 + 1e-15)
        torch.testing.assert_close(gate_alpha(gate, u), u.sign() * exact.exp(), rtol=1e-13, atol=0.0)
    else:
        assert got.sign is None
        torch.testing.assert_close(gate_alpha(gate, u), exact.exp(), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_gate_parameters_and_gradients(gate: str, given: tuple[bool, bool]) -> None:
    """u = exp(A_log) (g + dt_bias), dt_bias head-major; the hand-written gradient is autograd's."""
    g = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    A_log = 0.3 * torch.randn(4, dtype=torch.float64) if given[0] else None
    dt_bias = torch.randn(20, dtype=torch.float64) if given[1] else None
    rate = torch.ones(4, 1, dtype=torch.float64) if A_log is None else A_log.exp()[:, None]
    x = g if dt_bias is None else g + dt_bias.view(4, 5)
    exact = rate * _log_alpha(gate, x) if gate == "softplus" else _log_alpha(gate, rate * x)
    torch.testing.assert_close(evaluate_gate(gate, g, A_log, dt_bias).log, exact, rtol=1e-12, atol=1e-14)
    moved = evaluate_gate(gate, g.transpose(1, 2), A_log, dt_bias, head_axis=-3).log
    torch.testing.assert_close(moved.transpose(1, 2), exact, rtol=1e-12, atol=1e-14)
    leaves = [t.clone().requires_grad_() for t in (g, A_log, dt_bias) if t is not None]
    named = iter(leaves)
    arguments = [next(named) if t is not None else None for t in (g, A_log, dt_bias)]
    dlog = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(evaluate_gate(gate, *arguments).log, leaves, dlog)
    got = [t for t in gate_backward(gate, dlog, g, A_log, dt_bias) if t is not None]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_beta_ranges() -> None:
    logit = torch.linspace(-30, 30, 61, dtype=torch.float64)
    for beta_range in (1, 2):
        beta = beta_from_logit(logit, beta_range)
        torch.testing.assert_close(beta, beta_range / (1 + torch.exp(-logit)), rtol=1e-14, atol=0.0)
        assert beta_from_logit(logit.bfloat16(), beta_range).dtype == torch.float32


@pytest.mark.parametrize("gate", GATES)
def test_initial_gates_decay_as_drawn(gate: str) -> None:
    """app:initialization: at a zero projection |alpha| = exp(-dt), dt log-uniform in [1e-3, 0.1]; spread flips signs."""
    A_log = init_A_log(gate, 8, torch.Generator().manual_seed(0))
    bias = init_dt_bias(gate, A_log, 64, generator=torch.Generator().manual_seed(1))
    got = evaluate_gate(gate, torch.zeros(8, 64), A_log, bias)
    dt = -got.log
    assert dt.min() >= 0.999e-3
    assert dt.max() <= 0.1001
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.2)  # the middle of the logarithmic range
    assert got.sign is None or bool((got.sign == 1).all())
    if gate != "signed":
        with pytest.raises(ValueError, match=gate):
            init_dt_bias(gate, A_log, 64, spread=True)
        return
    assert not A_log.any()
    spread = init_dt_bias(gate, A_log, 64, spread=True, generator=torch.Generator().manual_seed(1))
    signs = evaluate_gate(gate, torch.zeros(8, 64), A_log, spread)
    torch.testing.assert_close(signs.log, got.log)
    assert signs.sign is not None
    assert abs(signs.sign.float().mean().item()) < 0.15  # half of 512 flipped, to three standard deviations


@pytest.mark.parametrize(("z_std", "gamma", "b0"), [(3**-0.5, 0.604, 1.038), (0.02 * 768**0.5, 0.608, 1.042)])
def test_beta_spread(z_std: float, gamma: float, b0: float) -> None:
    """app:initialization: the published constants, and that they do what they are for."""
    got = beta_spread(z_std)
    assert got == pytest.approx((gamma, b0), abs=1e-3)
    z = z_std * torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread, plain = 2 * torch.sigmoid(got[0] * z - got[1]), torch.sigmoid(z)
    assert spread.std().item() == pytest.approx(plain.std().item(), rel=0.01)
    counts = torch.histc(spread, 50, 0, 2)
    assert 0.04 * (counts.argmax().item() + 0.5) == pytest.approx(0.5, abs=0.1)  # the mode


# No leaks, no batch effects -------------------------------------------------------------------------------------------


SHAPES = [(16, 4, 4), (50, 16, 8), (130, 40, 33), (200, 8, 64)]


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(("T", "K", "V"), SHAPES)
@pytest.mark.parametrize("gate", ["signed", None])
def test_the_future_does_not_leak(gate: str | None, T: int, K: int, V: int, backend: str) -> None:
    call = make_call(B=2, T=T, H=2, K=K, V=V, dtype=torch.float32, gate=gate, initial=True)
    before = run(call, backend, gradients=False)["o"]
    for t in sorted({1, 7, T // 2, 15, 63, 64, 65, T - 1} & set(range(T))):
        after = run(perturbed(call, t), backend, gradients=False)["o"]
        assert torch.equal(before[:, :t], after[:, :t]), f"token {t} changes earlier outputs"
        assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("backend", BOTH)
def test_the_future_does_not_leak_in_packed_sequences(backend: str) -> None:
    bounds = [0, 0, 20, 21, 21, 90, 130, 130]
    call = make_call(B=1, T=130, H=2, K=8, V=40, dtype=torch.float32, initial=True, cu_seqlens=bounds)
    before = run(call, backend, gradients=False)
    for t in (0, 19, 20, 21, 50, 89, 90, 129):
        after = run(perturbed(call, t), backend, gradients=False)
        own = max(n for n, bound in enumerate(bounds[:-1]) if bound <= t)
        others = torch.ones(130, dtype=torch.bool)
        others[t : bounds[own + 1]] = False
        assert torch.equal(before["o"][:, others], after["o"][:, others]), f"token {t} changes other outputs"
        rest = [n for n in range(len(bounds) - 1) if n != own]
        assert torch.equal(before["state"][rest], after["state"][rest])


#: a decay of each kind, one call without a state and one with separate gates
SPOILT_CASES = [
    {"gate": "signed", "initial": True},
    {"gate": None, "beta_range": None},
    {"gate": "softplus", "separate": True, "initial": True},
]


def _spoilt(call: Call, name: str, t: int, value: float) -> Call:
    """The first sequence's `name` at time t set to `value`."""
    x = call[name].clone()
    x[0, t] = value
    return call | {name: x}


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("case", SPOILT_CASES, ids=str)
def test_a_non_finite_value_changes_nothing_before_it(case: dict, backend: str) -> None:
    """To the last bit, in both halves of a chunk; and nothing in the other sequence of the batch."""
    call = make_call(B=2, T=75, H=2, K=40, V=5, dtype=torch.float32, **case)
    before = run(call, backend, gradients=False)
    for name in ("q", "k", "v", "g", "beta", "erase", "write"):
        for t, value in ((5, math.nan), (30, math.nan), (62, math.inf)):
            if call.get(name) is None:
                continue
            after = run(_spoilt(call, name, t, value), backend, gradients=False)
            assert torch.equal(before["o"][0, :t], after["o"][0, :t]), f"{name} = {value} at {t} reaches back"
            assert_same_bits({n: x[1] for n, x in after.items()}, {n: x[1] for n, x in before.items()})
            if math.isnan(value):
                assert after["o"][0, t].isnan().any()
                assert after["o"][0, t + 1 :].isnan().any() == (name != "q")  # a query is read once


@pytest.mark.parametrize("backend", BOTH)
def test_a_non_finite_value_stays_in_its_packed_sequence(backend: str) -> None:
    call = make_call(B=1, T=80, H=1, K=40, V=5, dtype=torch.float32, cu_seqlens=[0, 20, 50, 80])
    before, after = (run(x, backend, gradients=False)["o"] for x in (call, _spoilt(call, "v", 40, math.nan)))
    rest = [*range(40), *range(50, 80)]
    assert torch.equal(before[:, rest], after[:, rest])
    assert after[:, 40:50].isnan().all()


def _gradients(call: Call, do: Tensor, backend: str) -> Call:
    names = [n for n in ("q", "k", "v", "g", "beta", "erase", "write") if call.get(n) is not None]
    leaves = call | {n: call[n].clone().requires_grad_() for n in names}
    o, _ = complex_kda(**leaves, backend=backend)
    return dict(zip(names, torch.autograd.grad(o, [leaves[n] for n in names], do), strict=True))


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("case", SPOILT_CASES, ids=str)
@pytest.mark.parametrize("name", ["do", "q", "v"])
def test_gradients_beside_a_non_finite_value(name: str, case: dict, backend: str) -> None:
    """By the chain rule do_t and q_t reach the tokens up to t and none after, v_t (for a given do) those from t and none before."""
    call, t = make_call(B=1, T=75, H=1, K=40, V=5, dtype=torch.float32, **case), 40
    do = torch.randn(call["v"].shape, generator=torch.Generator().manual_seed(0))
    spoilt_call, spoilt_do = (call, do.clone()) if name == "do" else (_spoilt(call, name, t, math.nan), do)
    if name == "do":
        spoilt_do[0, t] = math.nan
    before, after = _gradients(call, do, backend), _gradients(spoilt_call, spoilt_do, backend)
    clean = slice(0, t) if name == "v" else slice(t + 1, 75)
    assert_close({n: x[:, clean] for n, x in after.items()}, {n: x[:, clean] for n, x in before.items()}, 1e-5)
    assert after["k"][:, t].isnan().any()


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"gate": "signed", "initial": True},
        {"gate": "sigmoid", "beta_range": 1},
        {"gate": "softplus", "beta_range": 2},
        {"gate": None, "separate": True},
        {"gate": None, "beta_range": None, "initial": True},
    ],
    ids=str,
)
def test_the_same_bits_alone_and_in_a_batch(case: dict, dtype: torch.dtype, backend: str) -> None:
    """Outputs, final state and the gradients of one sequence, on two threads where matrices are large enough for them."""
    torch.set_num_threads(1 if backend == "reference" else 2)
    for T, K, V in ((1, 3, 5), *SHAPES):
        call = make_call(B=7, T=T, H=2, HV=4, K=K, V=V, dtype=dtype, **case)
        together = rowwise(call, backend)
        for row in (0, 3, 6):
            alone = rowwise(slice_batch(call, slice(row, row + 1)), backend, row)
            assert_same_bits({name: x[row : row + 1] for name, x in together.items()}, alone)


def test_auto_never_chooses_by_batch_or_heads() -> None:
    chosen = {which_backend(**make_call(B=B, T=20, H=H, HV=2 * H)).backend.name for B in (1, 2, 64) for H in (1, 3, 16)}
    assert len(chosen) == 1


# The same numbers by other roads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(
    "case",
    [
        {"gate": "signed", "A_log": True, "dt_bias": True},
        {"gate": None, "beta_range": None, "normalize_qk": False},
        {"gate": "softplus", "separate": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_decoding_equals_the_parallel_form(inplace: bool, case: dict, backend: str) -> None:
    call = make_call(B=2, T=20, H=2, HV=4, K=5, V=3, initial=True, scale=0.7, **case)
    exact = run(call, backend, gradients=False)
    state = call["initial_state"].clone()
    whole = ("gate", "A_log", "dt_bias", "beta_range", "normalize_qk", "scale", "initial_state")
    options = {name: call[name] for name in whole[:-1] if name in call}
    outputs = []
    for t in range(20):
        token = {n: None if x is None else x[:, t] for n, x in call.items() if n not in whole}
        o, following = complex_kda_step(**token, **options, state=state, inplace=inplace)
        assert (following is state) == inplace
        assert torch.equal(following, state) == inplace
        outputs.append(o)
        state = following
    assert_close({"o": torch.stack(outputs, 1), "state": state}, exact, 1e-12)


def test_one_step_keeps_dtypes() -> None:
    call = make_call(B=2, T=1, dtype=torch.bfloat16, initial=True)
    token = {n: call[n][:, 0] for n in ("q", "k", "v", "g", "beta")}
    o, state = complex_kda_step(**token, state=call["initial_state"], gate="signed", beta_range=2, normalize_qk=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = run(call, "reference", gradients=False)
    assert_same_bits({"o": o[:, None], "state": state}, exact)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("split", [1, 16, 33])
def test_two_halves_chained_through_the_state_equal_one_pass(split: int, backend: str) -> None:
    """Outputs, final state and every gradient, which flows back through the state in the middle."""
    call = make_call(B=2, T=50, H=2, K=6, V=4, initial=True, A_log=True, dt_bias=True)

    def chained(leaves: Call) -> tuple[Tensor, Tensor]:
        parts = [slice_time(leaves, s) for s in (slice(0, split), slice(split, 50))]
        first, middle = complex_kda(**parts[0], output_final_state=True, backend=backend)
        second, state = complex_kda(**(parts[1] | {"initial_state": middle}), output_final_state=True, backend=backend)
        return torch.cat([first, second], 1), state

    assert_close(run(call, chained), run(call, backend), 1e-11)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("initial", [True, False])
def test_packed_equals_separate(initial: bool, backend: str) -> None:
    bounds = [0, 0, 17, 18, 18, 60, 61, 61]
    call = make_call(B=1, T=61, H=2, K=6, V=4, initial=initial, A_log=True, dt_bias=True, cu_seqlens=bounds)
    packed = run(call, backend, gradients=False)
    for n in range(len(bounds) - 1):
        start, end = bounds[n], bounds[n + 1]
        if start == end:  # an empty member keeps its state
            kept = call["initial_state"][n] if initial else torch.zeros(2, 6, 4, dtype=torch.float64)
            assert torch.equal(packed["state"][n], kept)
            continue
        alone = run(member(call, n), backend, gradients=False)
        assert_close({"o": packed["o"][:, start:end], "state": packed["state"][n : n + 1]}, alone, 1e-11)


@pytest.mark.parametrize("backend", BOTH)
def test_cu_seqlens_of_either_integer_type(backend: str) -> None:
    call = make_call(B=1, T=30, initial=True, cu_seqlens=[0, 11, 30])
    assert_same_bits(run(dict(call, cu_seqlens=call["cu_seqlens"].long()), backend), run(call, backend))
