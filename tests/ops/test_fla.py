"""Sign absorption, which needs no GPU: the signed recurrence is an unsigned one on signed keys and queries."""

import pytest
import torch

from ckda import complex_kda
from ckda.ops.call import Call
from ckda.ops.fla import absorb_signs, refuses
from tests.ops.common import assert_close, make_call


@pytest.mark.parametrize("bounds", [None, [0, 0, 7, 8, 20, 20]])
def test_absorbed_signs_give_the_same_outputs(bounds: list[int] | None) -> None:
    """lem:gauge: with P_t the product of the signs, keys P k and queries P q, all gates positive; the state is P_T times it."""
    call = make_call(B=1, T=20, H=2, K=4, V=3, gate=None, beta_range=None, normalize_qk=False, cu_seqlens=bounds)
    o, state = complex_kda(**call, output_final_state=True, backend="reference")
    P = absorb_signs(call["sign"], call.get("cu_seqlens")).double()
    flipped = {"q": call["q"] * P, "k": call["k"] * P, "sign": None}
    p, unsigned = complex_kda(**(call | flipped), output_final_state=True, backend="reference")
    ends = [20] if bounds is None else bounds[1:]
    starts = [0] if bounds is None else bounds[:-1]
    last = [P[0, e - 1] if e > s else torch.ones_like(P[0, 0]) for s, e in zip(starts, ends, strict=True)]
    assert_close({"o": p, "state": torch.stack(last).unsqueeze(-1) * unsigned}, {"o": o, "state": state}, 1e-12)


def test_what_fla_cannot_serve_has_a_reason() -> None:
    assert "CUDA" in str(refuses(Call(**make_call())))
