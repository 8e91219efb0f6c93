"""The page for students against the reference, in float64: signs, gates at and near zero, lengths that are no whole chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from ckda import complex_kda
from ckda.ops.naive import by_chunks, recurrence

FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrence": recurrence,
    "chunks of 1": lambda *x: by_chunks(*x, C=1),
    "chunks of 7": lambda *x: by_chunks(*x, C=7),
    "chunks of 16": by_chunks,
    "one chunk": lambda *x: by_chunks(*x, C=1000),
}
GATES = ("mild", "near zero", "zero", "one")


def _inputs(T: int, K: int = 5, V: int = 3, gate: str = "mild", seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    k = normal(T, K)
    g = -0.3 * normal(T, K).abs()
    if gate == "one":
        g = torch.zeros_like(g)
    elif gate != "mild":
        g[normal(T, K) > 1] = -torch.inf if gate == "zero" else -40.0
    return {
        "q": normal(T, K),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(T, V),
        "g": g,
        "sign": torch.where(normal(T, K) < 0, -1.0, 1.0).double(),
        "beta": 2 * torch.sigmoid(2 * normal(T)),
        "S": normal(K, V),
    }


def _reference(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tokens: dict[str, Any] = {name: x[name][None, :, None] for name in ("q", "k", "v", "g", "beta")}
    sign, start = x["sign"][None, :, None].to(torch.int8), x["S"][None, None]
    options = {"initial_state": start, "output_final_state": True, "scale": 1.0, "backend": "reference"}
    o, state = complex_kda(**tokens, sign=sign, **options)
    assert state is not None
    return o[0, :, 0], state[0, 0]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [1, 16, 33])
@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_the_reference(form: str, T: int, gate: str) -> None:
    x = _inputs(T, gate=gate)
    for got, exact in zip(FORMS[form](*x.values()), _reference(x), strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)


def test_signs_change_the_result() -> None:
    """So that the agreement above says something about them."""
    x = _inputs(20)
    unsigned = x | {"sign": torch.ones_like(x["sign"])}
    for got, exact in zip(by_chunks(*unsigned.values()), _reference(x), strict=True):
        assert (got - exact).abs().max() > 0.1


def test_autograd_goes_through_the_chunks() -> None:
    x = _inputs(6, K=3, V=2)
    leaves = [y.requires_grad_(name != "sign") for name, y in x.items()]
    assert gradcheck(lambda *y: by_chunks(*y, C=4), leaves)
