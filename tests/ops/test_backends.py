"""Every registered backend against the float64 recurrence: outputs, final state and every gradient, by the 2x rule.

The cases cover every pair of settings that can meet, not their product.
"""

from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch

from ckda.ops import BACKENDS, complex_kda, which_backend
from tests.ops.common import (
    FLOAT64_TOLERANCE,
    Call,
    assert_close,
    cast,
    check_double_rule,
    check_kernels,
    compare,
    double_rule,
    make_call,
    run,
    written_out,
)

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)

SETTINGS: dict[str, tuple[Any, ...]] = {
    "T": LENGTHS,
    "widths": ((4, 4), (3, 5), (20, 7), (6, 1), (48, 20)),
    "heads": ((1, 1), (2, 2), (1, 3), (2, 4)),
    "gate": (
        {"gate": None, "sign": False},
        {"gate": None, "sign": True},
        {"gate": "signed"},
        {"gate": "signed", "A_log": True, "dt_bias": True},
        {"gate": "sigmoid", "A_log": True},
        {"gate": "softplus", "dt_bias": True},
        {"gate": "softplus", "A_log": True, "dt_bias": True},
    ),
    "rate": ({"beta_range": None}, {"beta_range": 1}, {"beta_range": 2}, {"separate": True}),
    "normalize_qk": (True, False),
    "initial": (True, False),
    "packing": (None, "edges", "mixed"),
    "outputs": ("os", "o", "s"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "wide_gates": (False, True),
}


def _pairs(case: dict[str, int]) -> set[tuple]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def _covering() -> list[dict[str, Any]]:
    """Few cases in which each pair of settings occurs: greedily, the best of some random cases each time."""
    random = Random(0)
    missing = {
        (a, i, b, j)
        for a, b in combinations(SETTINGS, 2)
        for i in range(len(SETTINGS[a]))
        for j in range(len(SETTINGS[b]))
    }
    cases = []
    while missing:
        seed = dict([next(iter(sorted(missing)))[:2], next(iter(sorted(missing)))[2:]])
        drawn = [{n: seed.get(n, random.randrange(len(SETTINGS[n]))) for n in SETTINGS} for _ in range(60)]
        best = max(drawn, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append({name: SETTINGS[name][index] for name, index in best.items()})
    return cases


def _bounds(packing: str | None, T: int) -> list[int] | None:
    """cu_seqlens with empty and one-token members: first and last, and in the middle."""
    if packing is None:
        return None
    if packing == "edges":
        return [0, 0, 1, max(1, T - 1), T, T]
    return sorted([0, 0, T // 3, T // 3, min(T // 3 + 1, T), T])


def _call(case: dict[str, Any], device: str, seed: int) -> Call:
    (H, HV), (K, V) = case["heads"], case["widths"]
    bounds = _bounds(case["packing"], case["T"])
    many = 8  # enough sequences or heads that the largest plain error is not small by luck
    return make_call(
        B=1 if bounds else many,
        T=case["T"],
        H=H * many if bounds else H,
        HV=HV * many if bounds else HV,
        K=K,
        V=V,
        dtype=case["dtype"],
        gate_dtype=torch.float32 if case["wide_gates"] else None,
        normalize_qk=case["normalize_qk"],
        initial=case["initial"],
        cu_seqlens=bounds,
        device=device,
        seed=seed,
        **case["gate"],
        **case["rate"],
    )


def _name(case: dict[str, Any]) -> str:
    words = []
    for name, value in case.items():
        if isinstance(value, dict):
            words += [str(v) if isinstance(v, str) else k + str(v) for k, v in value.items()]
        elif isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, tuple):
            words.append("x".join(map(str, value)))
        elif value is not None:
            words.append(f"T{value}" if name == "T" else str(value).removeprefix("torch."))
    return "-".join(words)


CASES = _covering()


def _serves(backend: str, call: Call) -> str | None:
    """Why not, or None."""
    try:
        which_backend(**call, backend=backend)
    except ValueError as reason:
        return str(reason)
    return None


#: each backend on each kind of device where it serves any call at all
# (but for the kernels in Triton's interpreter, which is too slow for these sizes: tests/ops/test_triton.py has its own)
ON_CPU = [name for name in BACKENDS if not name.startswith("triton") and _serves(name, make_call(K=16, V=16)) is None]
PLACES = [(name, "cpu") for name in ON_CPU]
PLACES += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in BACKENDS]

#: flash-linear-attention's own tests: root mean square error over root mean square
FLA_TOLERANCE = {"o": 5e-3, "state": 5e-3, "dg": 2e-2, "dbeta": 2e-2, "dA_log": 2e-2, "ddt_bias": 2e-2}


def _assert_rule(calls: list[Call], backend: str, outputs: str = "os") -> None:
    """The draws of one case: the oracle against the contract, float64 to 1e-10, the rest by the 2x rule.

    Two backends have bounds of their own: fla, and the kernels with their rounding on the way.
    """
    first = calls[0]
    if backend == "reference":
        _assert_reference(first, outputs)
    elif backend == "fla":
        got, exact = run(first, backend, outputs), run(cast(first, torch.float64), outputs=outputs)
        for name, x in exact.items():
            error = (got[name].double() - x).square().mean().sqrt()
            assert error <= FLA_TOLERANCE.get(name, 8e-3) * x.square().mean().sqrt() + 1e-6, name
    elif backend.startswith("triton"):
        check_kernels([compare(call, backend, outputs) for call in calls], rule=False)
    elif first["v"].dtype == torch.float64:
        assert_close(run(first, backend, outputs), run(first, outputs=outputs), FLOAT64_TOLERANCE)
    else:
        check_double_rule(calls, backend, outputs)


def _assert_reference(call: Call, outputs: str) -> None:
    """The oracle itself, against the contract written out as dense matrices."""
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in cast(call, torch.float64).items()}
    exact = run(on_cpu, written_out, outputs)
    got = {name: x.cpu() for name, x in run(call, "reference", outputs).items()}
    # below float64 a sanity bound only: the rounding of a float32 recurrence of T steps
    assert_close(got, exact, 1e-11 if call["v"].dtype == torch.float64 else 1e-4)


#: those with an algorithm of their own, and all that have float64
FAST = [name for name in ON_CPU if name != "reference"]
EXACT = ON_CPU


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{_name(case)}" for i, case in enumerate(CASES)])
def test_agrees_with_the_recurrence(index: int, backend: str, device: str) -> None:
    case = CASES[index]
    calls = [_call(case, device, seed) for seed in range(index, index + 40000, 10000)]
    reason = _serves(backend, calls[0])
    if reason is not None:
        pytest.skip(reason)
    _assert_rule(calls, backend, case["outputs"])


@pytest.mark.parametrize(
    ("backend", "device"), [(name, "cpu") for name in FAST] + [pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("K", "V"), [(256, 1), (128, 3), (64, 100)])
def test_widths_up_to_256(K: int, V: int, backend: str, device: str) -> None:
    settings = {"B": 2, "T": 70, "H": 1, "K": K, "V": V, "A_log": True, "dt_bias": True, "initial": True}
    settings["device"] = device
    _assert_rule([make_call(**settings, dtype=torch.float32, seed=seed) for seed in (0, 1)], backend)
    if backend != "triton":  # which has no float64
        _assert_rule([make_call(**settings)], backend)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", [{"gate": "signed"}, {"gate": None}, {"gate": "softplus", "separate": True}], ids=str)
@pytest.mark.parametrize(("K", "V"), [(1, 5), (2, 5), (3, 48), (1, 256), (20, 200)])
def test_few_key_channels(K: int, V: int, case: dict, backend: str) -> None:
    """Where a chunk has many more keys than channels, a chunk form cancels: 10x here, and 1e-10 in float64 all the same."""
    calls = [make_call(B=8, T=65, H=1, K=K, V=V, dtype=torch.float32, initial=True, seed=s, **case) for s in (0, 1)]
    exact, got = (run(cast(calls[0], torch.float64), name) for name in ("reference", backend))
    excesses = double_rule(calls, backend)
    if K == 1:  # a normalised number is its sign: no gradient but rounding, which a small q or k magnifies
        excesses = [excess for excess in excesses if excess.name not in ("dq", "dk")]
        for name in ("q", "k"):
            assert (got["d" + name] * calls[0][name]).abs().max() < 1e-10
            del exact["d" + name]
    assert max(excess.ratio for excess in excesses) <= 10, excesses
    assert_close(got, exact, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("backend", EXACT)
def test_scale_multiplies_the_output_only(backend: str) -> None:
    plain = run(make_call(T=20, initial=True, scale=1.0), backend, "s")
    scaled = run(make_call(T=20, initial=True, scale=0.25), backend, "s")
    default = run(make_call(T=20, initial=True, K=4), backend, "s")
    assert torch.equal(plain["state"], scaled["state"])
    assert_close({"o": plain["o"] * 0.25, "d": default["o"]}, {"o": scaled["o"], "d": plain["o"] / 2}, 1e-15)


@pytest.mark.parametrize("backend", EXACT)
def test_erase_and_write_equal_to_beta_recover_ckda(backend: str) -> None:
    call = make_call(T=20, K=4, V=3, beta_range=None, initial=True)
    separate = dict(call, beta=None, erase=call["beta"][..., None].expand(2, 20, 2, 4))
    separate["write"] = call["beta"][..., None].expand(2, 20, 2, 3)
    one, other = run(call, backend), run(separate, backend)
    assert_close(
        {name: other[name] for name in one if name != "dbeta"}, {n: x for n, x in one.items() if n != "dbeta"}, 1e-12
    )
    assert_close({"dbeta": other["derase"].sum(-1) + other["dwrite"].sum(-1)}, {"dbeta": one["dbeta"]}, 1e-12)


@pytest.mark.parametrize("backend", EXACT)
def test_value_head_j_reads_query_head_j_over_g(backend: str) -> None:
    call = make_call(H=2, HV=6)
    repeated = dict(call, **{name: call[name].repeat_interleave(3, dim=2) for name in ("q", "k")})
    one, other = run(call, backend), run(repeated, backend)
    assert_close(other, {name: one[name] for name in ("o", "state", "dv", "dg", "dbeta")}, 1e-12)
    summed = {name: other[name].unflatten(2, (2, 3)).sum(3) for name in ("dq", "dk")}
    assert_close(summed, {name: one[name] for name in ("dq", "dk")}, 1e-12)


@pytest.mark.parametrize("backend", EXACT)
def test_without_normalisation_the_key_is_taken_literally(backend: str) -> None:
    """A key of length two at beta = 1 gives I - 4 e e^T: expansive, and meant so."""
    e = torch.tensor([0.6, 0.8], dtype=torch.float64)
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    S0 = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    _, state = complex_kda(
        one * e,
        2 * one * e,
        0 * one,
        0 * one * e,
        one[..., 0],
        initial_state=S0[..., :1],
        output_final_state=True,
        backend=backend,
    )
    expected = torch.linalg.matrix_power(torch.eye(2, dtype=torch.float64) - 4 * torch.outer(e, e), 3)[:, :1]
    torch.testing.assert_close(state[0, 0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", EXACT)
def test_beta_has_no_range(backend: str) -> None:
    call = make_call(T=9, beta_range=None, normalize_qk=False)
    call["beta"] = call["beta"] * 4 - 3  # from -3 to 5
    assert_close(run(call, backend), run(call, written_out), 1e-10)
