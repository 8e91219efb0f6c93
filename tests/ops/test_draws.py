"""Random draws from the whole contract against the float64 recurrence: dtype, gate, sizes, packing, grouping, states, layouts.

A draw is a seed. On a GPU the kernels are compiled for what was drawn; in the interpreter the draws are few and small.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ckda import complex_kda
from tests.ops.common import Call, check_kernels, compare, make_call

pytest.importorskip("triton")


def draw_settings(seed: int, gpu: bool) -> dict[str, Any]:
    """Arguments of :func:`make_call`, and `strided`: whether tensors lie with gaps between their numbers."""
    r = random.Random(seed)
    dtypes = [torch.bfloat16] * 3 + [torch.float16, torch.float32] if gpu else [torch.float16, torch.float32]
    widths = [16, 32, 40, 64, 64, 96, 128, 128, 192] if gpu else range(1, 21)
    dtype, H = r.choice(dtypes), r.choice([1, 2])
    T = r.choice([1, 31, 32, 33, 64, 129, 320]) if gpu else r.randint(1, 40)
    gate = r.choice(["signed", "sigmoid", "softplus", None])
    settings: dict[str, Any] = {
        "B": r.choice([1, 3]),
        "T": T,
        "H": H,
        "HV": H * r.choice([1, 1, 2, 3]),
        "K": r.choice(widths),
        "V": r.choice(widths),
        "dtype": dtype,
        "gate_dtype": r.choice([None, torch.float32]),
        "gate": gate,
        "sign": r.random() < 0.5,
        "A_log": r.random() < 0.5,
        "dt_bias": r.random() < 0.5,
        "beta_range": r.choice([None, 1, 2]),
        "normalize_qk": r.random() < 0.7,
        "initial": r.random() < 0.5,
        "scale": r.choice([None, 0.7]),
    }
    if r.random() < 0.4:
        inner = sorted(r.randint(0, T) for _ in range(r.randint(0, 4)))
        settings |= {"B": 1, "cu_seqlens": [0, *inner, T]}
    if r.random() < 0.2:
        settings |= {"separate": True, "beta_range": None}
    return settings | {"strided": r.random() < 0.4}


def _with_gaps(call: Call) -> Call:
    """The same numbers, every other place of memory twice as large."""

    def spread(x: Any) -> Any:
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0] if isinstance(x, Tensor) else x

    return {name: spread(x) for name, x in call.items()}


def _check(seed: int, gpu: bool) -> None:
    settings = draw_settings(seed, gpu)
    strided = settings.pop("strided")

    def kernels(leaves: Call) -> tuple[Tensor, Tensor]:
        used = _with_gaps(leaves) if strided else leaves
        return complex_kda(**used, output_final_state=True, backend="triton")

    device = "cuda" if gpu else "cpu"
    calls = [make_call(**settings, device=device, seed=seed + 1000 * i) for i in range(2)]
    check_kernels([compare(call, kernels, plain="chunked" if gpu else "reference") for call in calls], rule=False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(32))
def test_draws_on_a_gpu(seed: int) -> None:
    _check(seed, gpu=True)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the kernels are compiled, and the draws marked gpu run"
)
@pytest.mark.parametrize("seed", range(6))
def test_draws_in_the_interpreter(seed: int) -> None:
    _check(seed, gpu=False)


def test_the_draws_reach_all_of_the_contract() -> None:
    """Every value of every setting is drawn for a GPU at least once."""
    drawn = [draw_settings(seed, True) for seed in range(32)]
    assert {x["dtype"] for x in drawn} == {torch.bfloat16, torch.float16, torch.float32}
    assert {x["gate"] for x in drawn} == {"signed", "sigmoid", "softplus", None}
    assert {x["beta_range"] for x in drawn} == {None, 1, 2}
    assert {"separate" in x for x in drawn} == {False, True}
    for name in ("initial", "normalize_qk", "strided", "A_log", "dt_bias"):
        assert {x[name] for x in drawn} == {False, True}
    assert {"cu_seqlens" in x for x in drawn} == {False, True}
    assert {x["H"] == x["HV"] for x in drawn} == {False, True}
