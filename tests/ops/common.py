"""One generator of calls, one runner, one rule: what every test of the operator is made of.

A call is a dictionary of the arguments of `complex_kda`. The oracle is the reference backend on the same, already rounded,
arguments in float64.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ckda import complex_kda

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "erase", "write", "initial_state")
FLOAT64_TOLERANCE = 1e-10

Call = dict[str, Any]
Results = dict[str, Tensor]


def make_call(
    B: int = 2,
    T: int = 17,
    H: int = 2,
    HV: int | None = None,
    K: int = 4,
    V: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    gate_dtype: torch.dtype | None = None,
    gate: str | None = "signed",
    sign: bool = True,
    A_log: bool = False,
    dt_bias: bool = False,
    beta_range: int | None = 2,
    separate: bool = False,
    normalize_qk: bool = True,
    initial: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Call:
    """The arguments of one call, drawn in float64 and rounded to their dtypes.

    The transitions are non-expansive (to rounding) but include the hard values: given gates of exactly +-1, 0 and e^-30,
    a signed gate at u = 0, a repeated key, beta = 0 and 2. `gate_dtype` is that of g, beta, erase, write (default: dtype).
    """
    HV = H if HV is None else HV
    gate_dtype = dtype if gate_dtype is None else gate_dtype
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    def rare(*shape: int) -> Tensor:
        return uniform(*shape) < 0.1

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    k[:, 1::5] = k[:, ::5][:, : k[:, 1::5].shape[1]]
    # as a unit key rounded to half precision would be, a little below one
    k = 3 * k if normalize_qk else 0.97 * k / k.norm(dim=-1, keepdim=True)
    call: Call = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    shape = (B, T, HV, K)
    if gate is None:
        g = torch.where(rare(*shape), -30.0, -0.3 * normal(*shape).abs())
        g = g.masked_fill(rare(*shape), 0.0).masked_fill(rare(*shape), -math.inf)
    else:
        g = (2 * normal(*shape)).masked_fill(rare(*shape), 0.0)
    call["g"] = g.to(gate_dtype)
    if gate is None and sign:
        call["sign"] = (1 - 2 * (uniform(*shape) < 0.5).to(torch.int8)).to(torch.int8)
    if gate is not None and A_log:
        call["A_log"] = (0.3 * normal(HV)).to(state_dtype)
    if gate is not None and dt_bias:
        call["dt_bias"] = normal(HV * K).to(state_dtype)
    call["gate"] = gate
    if separate:
        call["beta"] = None
        call["erase"], call["write"] = uniform(*shape).to(gate_dtype), normal(B, T, HV, V).to(gate_dtype)
    elif beta_range is None:
        beta = 2 * uniform(B, T, HV)
        call["beta"] = beta.masked_fill(rare(B, T, HV), 2.0).masked_fill(rare(B, T, HV), 0.0).to(gate_dtype)
    else:
        call["beta"] = (2 * normal(B, T, HV)).to(gate_dtype)
        call["beta_range"] = beta_range
    call["normalize_qk"] = normalize_qk
    if scale is not None:
        call["scale"] = scale
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial:
        call["initial_state"] = normal(N, HV, K, V).to(state_dtype)
    if cu_seqlens is not None:
        call["cu_seqlens"] = torch.tensor(list(cu_seqlens), dtype=torch.int32)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


def cast(call: Call, dtype: torch.dtype) -> Call:
    """The same call with every floating tensor in `dtype`: no value changes when `dtype` is wider."""
    return {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}


def slice_batch(call: Call, rows: slice) -> Call:
    """Some sequences of a batch."""
    shared = ("A_log", "dt_bias")
    return {n: x[rows] if isinstance(x, Tensor) and n not in shared else x for n, x in call.items()}


def slice_time(call: Call, times: slice) -> Call:
    """Some tokens of a call; the initial state stays as it is."""
    shared = ("A_log", "dt_bias", "initial_state")
    return {n: x[:, times] if isinstance(x, Tensor) and n not in shared else x for n, x in call.items()}


def member(call: Call, n: int) -> Call:
    """The n-th sequence of a packed call, as a call of its own."""
    start, end = call["cu_seqlens"].tolist()[n : n + 2]
    alone = slice_time({name: x for name, x in call.items() if name != "cu_seqlens"}, slice(start, end))
    if "initial_state" in alone:
        alone["initial_state"] = alone["initial_state"][n : n + 1]
    return alone


def perturbed(call: Call, t: int) -> Call:
    """Another token at time t: every tensor of the token changed a lot."""
    changed = dict(call)
    for name in ("q", "k", "v", "g", "beta", "sign", "erase", "write"):
        if changed.get(name) is not None:
            x = changed[name].clone()
            x[:, t] = -x[:, t] if name == "sign" else (x[:, t] * -7 + 3 if name != "g" or call["gate"] else x[:, t] - 9)
            changed[name] = x
    return changed


def _loss(o: Tensor, state: Tensor, outputs: str, seed: int) -> Tensor:
    """A random linear form of o and the final state, with coefficients that half precision holds exactly."""
    random = torch.Generator().manual_seed(seed)

    def weight(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=random).bfloat16().to(x.device, x.dtype)

    do, dstate = weight(o), weight(state)
    loss = state.new_zeros(())
    if "o" in outputs:
        loss = loss + (o * do).to(state.dtype).sum()
    if "s" in outputs:
        loss = loss + (state * dstate).sum()
    return loss


def run(
    call: Call,
    backend: str | Callable[[Call], tuple[Tensor, Tensor]] = "reference",
    outputs: str = "os",
    gradients: bool = True,
    seed: int = 1,
) -> Results:
    """o, state, and dX for every floating argument X, of a random linear form of `outputs` (o, the state s, or both).

    `backend` is a name, or a function of the call.
    """
    leaves = dict(call)
    for name in DIFFERENTIABLE:
        if leaves.get(name) is not None:
            leaves[name] = leaves[name].detach().clone().requires_grad_(gradients)
    if callable(backend):
        o, state = backend(leaves)
    else:
        o, state = complex_kda(**leaves, output_final_state=True, backend=backend)
    results = {"o": o.detach(), "state": state.detach()}
    if gradients:
        names = [name for name in DIFFERENTIABLE if leaves.get(name) is not None]
        inputs = [leaves[name] for name in names]
        grads = torch.autograd.grad(_loss(o, state, outputs, seed), inputs, allow_unused=True)
        for name, x, grad in zip(names, inputs, grads, strict=True):
            results["d" + name] = torch.zeros_like(x) if grad is None else grad
    return results


def rowwise(call: Call, backend: str, first_row: int = 0) -> Results:
    """As `run`, with the cotangents of a sequence determined by its row in the batch."""
    leaves = {
        name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    o, state = complex_kda(**leaves, output_final_state=True, backend=backend)
    rows = range(first_row, first_row + o.shape[0])

    def weight(x: Tensor) -> Tensor:
        draws = [torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(row)) for row in rows]
        return torch.stack(draws).to(x.device, x.dtype)

    shared = ("A_log", "dt_bias")  # their gradients are sums over the batch
    names = [name for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad and name not in shared]
    grads = torch.autograd.grad((o, state), [leaves[n] for n in names], (weight(o), weight(state)))
    return {"o": o.detach(), "state": state.detach()} | {"d" + n: x for n, x in zip(names, grads, strict=True)}


class Excess(NamedTuple):
    """An error by the 2x rule: `ratio` is error / (plain + floor / 2), so that the rule is ratio <= 2."""

    name: str
    ratio: float
    error: float
    plain: float
    floor: float


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _size(name: str, exact: Results) -> float:
    """The largest entry, or a millionth of the largest of all: what has decayed below that counts as zero."""
    return max(_largest(exact[name]), 1e-6 * max(map(_largest, exact.values())))


class Comparison(NamedTuple):
    """One call by a backend, by plain code in the same dtypes, and in float64 on the same values."""

    call: Call
    results: Results
    plain: Results
    oracle: Results


def compare(
    call: Call,
    backend: str | Callable[[Call], tuple[Tensor, Tensor]],
    outputs: str = "os",
    plain: str = "reference",
    gradients: bool = True,
) -> Comparison:
    """The same call three times. `plain` names the backend of the other two: the recurrence, or where that takes too long
    the chunk form in torch, which every test holds to the recurrence."""
    oracle = run(cast(call, torch.float64), plain, outputs, gradients)
    return Comparison(call, run(call, backend, outputs, gradients), run(call, plain, outputs, gradients), oracle)


def _rounding(dtype: torch.dtype, inputs: torch.dtype | None) -> float:
    return max(torch.finfo(dtype).eps, 0.0 if inputs is None else torch.finfo(inputs).eps)


def _floors(x: Comparison, rounded: torch.dtype | None) -> dict[str, float]:
    """What two correct results may differ by, whatever made them: one rounding of the largest entry to the own dtype.

    dA_log and ddt_bias are sums over the whole call, often a single number whose plain error may vanish by luck: their
    floor is two roundings of a typical partial sum, the root of the sum of the squared terms.
    """
    call, oracle = x.call, x.oracle
    eps = {name: _rounding(x.results[name].dtype, rounded) for name in oracle}
    floors = {name: eps[name] * _size(name, oracle) for name in oracle}
    if {"dA_log", "ddt_bias"} & set(oracle):
        dg, g = oracle["dg"].double(), call["g"].double()
        HV, K = dg.shape[2:]
        u = g + call["dt_bias"].double().view(HV, K) if call.get("dt_bias") is not None else g
        along = softplus(u) / torch.sigmoid(u) if call["gate"] == "softplus" else u  # dA_log is the sum of dg * along
        terms = {"ddt_bias": dg.square().sum((0, 1)), "dA_log": (dg * along).square().sum((0, 1, 3))}
        for name in terms.keys() & oracle.keys():
            floors[name] = max(floors[name], 2 * eps[name] * _largest(terms[name].sqrt()))
    return floors


def excesses(draws: Sequence[Comparison], rounded: torch.dtype | None = None) -> list[Excess]:
    """The errors of some draws of one case by the 2x rule (:func:`double_rule`).

    `rounded` is a dtype to which the backend rounds on the way, which makes it the rounding of float32 results too.
    """
    measured: dict[str, list[tuple[float, float, float]]] = {}
    for x in draws:
        floors = _floors(x, rounded)
        for name, exact in x.oracle.items():
            got, base = x.results[name], x.plain[name]
            assert got.dtype == base.dtype, f"{name} is {got.dtype}, and {base.dtype} in the reference"
            assert got.shape == exact.shape, f"{name} is {list(got.shape)}, and {list(exact.shape)} in the reference"
            assert torch.isfinite(got).all(), f"{name} is not finite"
            errors = (_largest(got.double() - exact), _largest(base.double() - exact), floors[name])
            measured.setdefault(name, []).append(errors)
    found = []
    for name, rows in measured.items():
        error, reference, floor = (math.hypot(*column) / math.sqrt(len(rows)) for column in zip(*rows, strict=True))
        allowed = reference + floor / 2
        found.append(Excess(name, error / allowed if allowed else math.inf if error else 0.0, error, reference, floor))
    return found


def double_rule(calls: Sequence[Call], backend: str, outputs: str = "os") -> list[Excess]:
    """The 2x rule for every output and gradient: max|x - oracle| <= 2 max|plain - oracle| + floor.

    `plain` is the reference with float32 state, the oracle the reference in float64 on the same values. The calls are
    draws of one case, and the rule is on the root mean square over the draws: one plain error may be small by luck.
    """
    return excesses([compare(call, backend, outputs) for call in calls])


def check_double_rule(calls: Sequence[Call], backend: str, outputs: str = "os", factor: float = 2) -> None:
    """Hold the backend to the 2x rule on some draws of a case."""
    broken = [excess for excess in double_rule(calls, backend, outputs) if excess.ratio > factor]
    assert not broken, f"the 2x rule is broken: {broken}"


def relative_errors(results: Results, exact: Results) -> dict[str, float]:
    """max|got - exact| / max|exact| of every tensor of `exact`, less one rounding where the result's dtype is narrower."""
    errors = {}
    for name, x in exact.items():
        got = results[name]
        assert got.shape == x.shape, f"{name} is {list(got.shape)}; it should be {list(x.shape)}"
        error = (got.double() - x.double()).abs().max().item() if x.numel() else 0.0
        size = _size(name, exact)
        rounding = 0.0 if got.dtype == torch.float64 else torch.finfo(got.dtype).eps
        errors[name] = max(0.0, (error / size if size else error) - rounding) if math.isfinite(error) else math.inf
    return errors


#: the kernels on float32, relative to the largest entry: 2e-5, but for the gates' gradients. They are differences of sums over all
#: later tokens, which the signed gate magnifies up to 74 times where |alpha| is near e^-5; the parameters' are sums that cancel.
FLOAT32_TOLERANCE = {"dg": 5e-5, "dA_log": 5e-6, "ddt_bias": 1e-4}  # dA_log: of the sum of its terms' sizes
FEW_CHANNELS = 16


def terms_of_A_log(x: Comparison) -> float:
    """The sum of the sizes of the terms that add up to A_log's gradient, the largest of all heads.

    One number is a sum over all tokens and channels; where the terms cancel (74 times seen), an error that is small beside
    every term is large beside the sum, and whether it passes is up to the rounding of the machine.
    """
    g, dg = x.call["g"].double(), x.oracle["dg"].double()
    raw = g if x.call.get("dt_bias") is None else g + x.call["dt_bias"].double().view(g.shape[-2:])
    by_log = torch.nn.functional.softplus(raw) / torch.sigmoid(raw) if x.call["gate"] == "softplus" else raw
    terms = dg * by_log
    torch.testing.assert_close(terms.sum((0, 1, 3)), x.oracle["dA_log"].double(), rtol=1e-9, atol=1e-12)
    return terms.abs().sum((0, 1, 3)).max().item()


def check_kernels(draws: Sequence[Comparison], rule: bool = True) -> None:
    """Hold the Triton kernels to their bounds on some draws of a case.

    Half precision: the 2x rule for what has the inputs' dtype. Queries, decayed keys and the chunks' states may be rounded to it on
    the way: float32 results (the state, its gradient, those of the parameters and of float32 gates) may have three such roundings.
    Where a chunk has more keys than channels, the chunk form cancels: 5x with few channels.

    float32: FLOAT32_TOLERANCE and, of what is no gate's gradient, the 2x rule. `rule` is false for the chunk form with bounded
    gates: its decays are exp2 of float32 logs of up to 115 from the chunk's middle, good to 5e-6 each, where the
    recurrence multiplies gates (11 times the plain error was seen).
    """
    first = draws[0]
    dtype, found = first.call["v"].dtype, excesses(draws, first.call["v"].dtype)
    if dtype == torch.float32:
        for x in draws:
            errors = relative_errors(x.results, x.oracle)
            if "dA_log" in errors:
                errors["dA_log"] *= _size("dA_log", x.oracle) / terms_of_A_log(x)
            wrong = {name: error for name, error in errors.items() if error > FLOAT32_TOLERANCE.get(name, 2e-5)}
            assert not wrong, f"relative errors: {wrong}"
        broken = [x for x in found if rule and x.name not in FLOAT32_TOLERANCE and x.ratio > 2]
    else:
        own = 2.0 if first.call["k"].shape[-1] >= FEW_CHANNELS else 5.0
        factors = {name: own if x.dtype == dtype else 6.0 for name, x in first.results.items()}
        broken = [x for x in found if x.ratio > factors[x.name]]
    assert not broken, f"the 2x rule is broken: {broken}"


def assert_close(results: Results, exact: Results, tolerance: float) -> None:
    """Every tensor of `exact` within a relative tolerance and its own rounding."""
    broken = {name: error for name, error in relative_errors(results, exact).items() if error > tolerance}
    assert not broken, f"relative errors above {tolerance}: {broken}"


def assert_same_bits(results: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Every tensor of `exact` equal to the last bit."""
    different = [name for name, x in exact.items() if not torch.equal(results[name], x)]
    assert not different, f"these differ in bits: {different}"


# Small numbers and bounded gates that forget as much as they can ------------------------------------------------------

#: where in chunks of 32 tokens |alpha| is near e^-5; elsewhere it is near one
HARSH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "everywhere": lambda token, channel: token >= 0,
    "in half of the channels": lambda token, channel: (token >= 0) & (channel % 2 == 0),
    "in first halves or in second ones": lambda token, channel: token % 32 // 16 == channel % 2,
    "in first halves": lambda token, channel: (token % 32 < 16) & (channel >= 0),
    "in second halves": lambda token, channel: (token % 32 >= 16) & (channel >= 0),
}


def harsh(call: Call, where: str) -> Call:
    """A call of a bounded gate without parameters whose gates are near e^-5 at some places and near one at the others."""
    g = call["g"]
    token, channel = torch.arange(g.shape[1], device=g.device), torch.arange(g.shape[3], device=g.device)
    m_harsh = HARSH[where](token[:, None, None], channel)
    near, far = (0.02 * g, 8.0 + 0.1 * g) if call["gate"] == "signed" else (9.0 + 0.1 * g, -8.0 + 0.1 * g)
    return call | {"g": torch.where(m_harsh, near, far)}


#: what values with the initial state, and the cotangents, are multiplied by
SCALES = ((2.0**-20, 1.0), (1.0, 2.0**-20), (1.0, 2.0**-40), (2.0**-20, 2.0**-20), (2.0**8, 1.0), (1.0, 2.0**12))


def check_scales(call: Call, backend: str, outputs: str, tolerance: float) -> None:
    """By the 2x rule, and linear: all results of small or large values and cotangents are those of any others, scaled.

    The operator is linear in values and initial state, and its gradients in the cotangents; powers of two change no digit.
    """
    draw = compare(call, backend, outputs)
    check_kernels([draw], rule=False)
    for values, cotangents in SCALES:
        small = call | {name: call[name] * values for name in ("v", "initial_state") if name in call}

        def scaled(call: Call, c: float = cotangents) -> tuple[Tensor, Tensor]:
            o, state = complex_kda(**call, output_final_state=True, backend=backend)
            return o * c, state * c

        factors = {"dv": cotangents, "dinitial_state": cotangents}
        found = run(small, scaled, outputs).items()
        made = {name: x.double() / factors.get(name, cotangents * values) for name, x in found}
        assert_close(made, {name: x.double() for name, x in draw.results.items()}, tolerance)


# The recurrence, written out ------------------------------------------------------------------------------------------


def _written_out_gate(call: Call, HV: int, K: int) -> Tensor:
    """alpha by the formulas of the contract, in the plainest form."""
    g, gate = call["g"], call["gate"]
    if gate is None:
        alpha = torch.exp(g)
        return alpha if call.get("sign") is None else alpha * call["sign"]
    rate = call["A_log"].exp().view(HV, 1) if call.get("A_log") is not None else g.new_ones(HV, 1)
    x = g + call["dt_bias"].view(HV, K) if call.get("dt_bias") is not None else g
    u = rate * x
    if gate == "signed":
        eps = math.exp(-5)
        return torch.where(u < 0, -1.0, 1.0) * (eps + (1 - eps) * torch.tanh(u / 2).abs())
    if gate == "sigmoid":
        return torch.exp(-5 / (1 + torch.exp(-u)))
    return torch.exp(-rate * torch.log1p(torch.exp(x)))


def written_out(call: Call) -> tuple[Tensor, Tensor]:
    """The contract as dense matrices, one sequence and token at a time: what the reference itself is held to."""
    q, k, v = call["q"], call["k"], call["v"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if call["normalize_qk"]:
        q, k = (torch.where(x.norm(dim=-1, keepdim=True) > 0, x / x.norm(dim=-1, keepdim=True), x) for x in (q, k))
    alpha = _written_out_gate(call, HV, K)
    beta = call["beta"]
    if call.get("beta_range") is not None:
        beta = call["beta_range"] / (1 + torch.exp(-beta))
    scale = call["scale"] if call.get("scale") is not None else 1 / math.sqrt(K)
    spans = [(0, T)] if call.get("cu_seqlens") is None else list(pairwise(call["cu_seqlens"].tolist()))
    start = call.get("initial_state")
    if start is None:
        start = q.new_zeros(B * len(spans), HV, K, V)
    heads = [j // (HV // H) for j in range(HV)]
    eye = torch.eye(K, dtype=q.dtype)
    outputs, states = [], []
    for b in range(B):
        for begin, end in spans:
            S = start[len(states)]  # [HV, K, V]
            for t in range(begin, end):
                key, value = k[b, t, heads], v[b, t]
                if beta is None:
                    erased, written = call["erase"][b, t] * key, call["write"][b, t] * value
                else:
                    erased, written = beta[b, t, :, None] * key, beta[b, t, :, None] * value
                transition = (eye - key[:, :, None] * erased[:, None, :]) @ torch.diag_embed(alpha[b, t])
                S = transition @ S + key[:, :, None] * written[:, None, :]
                outputs.append(scale * (S.mT @ q[b, t, heads][:, :, None]).squeeze(-1))
            states.append(S)
    return torch.stack(outputs).view(B, T, HV, V), torch.stack(states)
