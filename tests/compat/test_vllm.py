"""vLLM's own kernel for decoding KDA, in Triton's interpreter, against our function called as vLLM calls its own.

Runs where vLLM is installed; its CPU build disables Triton, which is put back here.
"""

import pytest
import torch

from ckda.compat import fla

pytest.importorskip("vllm", reason="vllm is not installed")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _exp(x):
    return tl.exp(x)


@pytest.fixture(scope="module")
def decode():
    """vLLM's function, its kernel compiled by the interpreter."""
    from vllm import triton_utils

    triton_utils.triton, triton_utils.tl, triton_utils.HAS_TRITON = triton, tl, True
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent, kda

    fused_recurrent.exp = _exp  # an alias of tl's own, which the interpreter does not reach
    return kda.fused_recurrent_kda_fwd


CALLS = {
    "a token each": ([0, 1, 2, 3, 4], [5, 1, 3, 8], None),
    "a padded batch": ([0, 1, 2, 2, 2], [5, 1, 0, 0], None),
    "drafts": ([0, 2, 4], [[1, 2], [3, 4]], [2, 1]),
    "drafts and a sequence without": ([0, 2, 2, 4], [[1, 2], [3, 4], [5, 6]], [2, 1, 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_outputs_and_states(name, decode):
    """Slot 0 is vLLM's null block, which nobody reads: it may hold anything."""
    bounds, slots, accepted = (None if x is None else torch.tensor(x) for x in CALLS[name])
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    g, beta, pool = -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2), torch.randn(9, 2, 8, 8)
    used = pool.clone()
    theirs, _ = decode(q, k, v, g, beta, 8**-0.5, pool, True, bounds, slots, accepted, True)
    ours, _ = fla.fused_recurrent_kda(
        q, k, v, g, beta, initial_state=used, inplace_final_state=True, cu_seqlens=bounds, ssm_state_indices=slots,
        num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True, state_v_first=True,
    )  # fmt: skip
    last = int(bounds[-1])
    torch.testing.assert_close(ours[:, :last], theirs[:, :last])
    torch.testing.assert_close(used[1:], pool[1:])
