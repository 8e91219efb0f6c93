"""CKDA through flash-linear-attention's chunk_kda, by sign absorption (lem:gauge): an independent peer, GPU only.

With P_t the product of the signs up to t, the state P_t S_t obeys the unsigned recurrence with keys P_t k_t and queries
P_t q_t; the last state is P_T times FLA's. Tolerances are FLA's own.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from ckda.ops.call import Call, unit
from ckda.ops.gate import Gate, beta_from_logit, evaluate_gate

__all__ = ["absorb_signs", "forward", "refuses"]

_HAS_FLA = find_spec("fla") is not None  # looked up once, for torch.compile cannot trace it


def refuses(call: Call) -> str | None:
    """Why FLA cannot serve the call, or None."""
    if call.q.device.type != "cuda":
        return f"flash-linear-attention's kernels need a CUDA device, and q is on {call.q.device.type}"
    if call.q.dtype == torch.float64:
        return "flash-linear-attention has no float64"
    if call.erase is not None:
        return "flash-linear-attention's KDA has no separate erase and write gates"
    if not _HAS_FLA:
        return "flash-linear-attention is not installed: pip install 'ckda[fla]'"
    return None


def absorb_signs(sign: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """P [B, T, HV, K] of +1/-1: the product of the signs from the sequence's start (lem:gauge).

    Example:
        >>> sign = torch.tensor([-1, -1, 1, -1], dtype=torch.int8).view(1, 4, 1, 1)
        >>> absorb_signs(sign).flatten().tolist(), absorb_signs(sign, torch.tensor([0, 3, 4])).flatten().tolist()
        ([-1, 1, 1, -1], [-1, 1, 1, -1])
    """
    if torch.compiler.is_compiling():
        return torch.ops.ckda.absorb_signs(sign, cu_seqlens)
    return _absorb_signs(sign, cu_seqlens)


def _absorb_signs(sign: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """:func:`absorb_signs` in plain operations."""
    flips = (sign < 0).cumsum(1)
    if cu_seqlens is not None:
        token = torch.arange(sign.shape[1], device=sign.device)
        start = cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1].long()
        before = torch.cat([torch.zeros_like(flips[:, :1]), flips], 1)
        flips = flips - before[:, start]
    return (1 - 2 * (flips % 2)).to(sign.dtype).contiguous()


# One op to a compiler. Inductor (torch 2.11) makes one kernel of the sum over time and what stands around it, and from 129 tokens
# on stops with a TypeError where a broadcast is among that, as dt_bias and the norms of q and k are (pytorch/pytorch#180221).
_absorb_op = torch.library.custom_op("ckda::absorb_signs", _absorb_signs, mutates_args=())


@_absorb_op.register_fake
def _(sign: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.empty_like(sign, memory_format=torch.contiguous_format)


def _last_signs(P: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N, HV, K] of the last token of each sequence; +1 for an empty one."""
    if cu_seqlens is None:
        return P[:, -1]
    last = P[0, (cu_seqlens[1:] - 1).clamp_min(0).long()]
    return torch.where((cu_seqlens.diff() > 0)[:, None, None], last, torch.ones_like(last))


def forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """o and the final state (None if not asked for), by FLA's kernels on the absorbed signs; autograd is FLA's.

    A named bounded gate has log|alpha| of at least -5, for which FLA has faster kernels (`safe_gate`).
    """
    from fla.ops.kda import chunk_kda

    given = Gate(call.g, call.sign)
    gate = given if call.gate is None else evaluate_gate(call.gate, call.g, call.A_log, call.dt_bias)
    assert call.beta is not None
    beta = call.beta if call.beta_range is None else beta_from_logit(call.beta, call.beta_range).to(call.beta.dtype)
    q, k = (unit(x).to(x.dtype) if call.normalize_qk else x for x in (call.q, call.k))
    q, k = (x.repeat_interleave(call.group, dim=2) for x in (q, k))
    P = None if gate.sign is None else absorb_signs(gate.sign, call.cu_seqlens)
    if P is not None:
        q, k = q * P, k * P
    o, state = chunk_kda(
        q=q.contiguous(),
        k=k.contiguous(),
        v=call.v.contiguous(),
        g=gate.log.float().contiguous(),
        beta=beta.contiguous(),
        scale=call.q_scale,
        initial_state=None if call.initial_state is None else call.start_state().contiguous(),
        output_final_state=call.output_final_state,
        safe_gate=call.gate in ("signed", "sigmoid"),
        cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens.long(),
    )
    if P is not None and state is not None:
        state = state * _last_signs(P, call.cu_seqlens).unsqueeze(-1)
    return o, state
