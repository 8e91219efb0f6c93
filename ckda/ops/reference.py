"""The recurrence as a loop over :func:`ckda.transition.apply`, up to float64: the oracle. Plain autograd, any order."""

from itertools import pairwise

import torch
from torch import Tensor

from ckda import transition
from ckda.ops.call import Call, Prepared, Raw, at_time, prepare

__all__ = ["forward", "step"]


def _heads_first(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[B, T, HV, ...] -> [B, HV, T, ...]."""
    return None if x is None else x.to(dtype).transpose(1, 2)


def _scan(x: Prepared, S: Tensor) -> tuple[list[Tensor], Tensor]:
    """Run [B, HV, T, .] from the state S [B, HV, K, V]; returns T outputs [B, HV, V] and the last state."""
    # in float64 until after the product: a rounded rate / |k|^2 would drift the same way at every step
    rate = x.rate / x.norm2
    a, w = (rate * x.a).to(x.a.dtype), (rate * x.w).to(x.w.dtype)
    outputs = []
    for q, k, a_t, w_t, alpha in zip(*(y.unbind(2) for y in (x.q, x.k, a, w, x.alpha)), strict=True):
        S = transition.apply(S, alpha, a_t, k, w_t)
        outputs.append((q.unsqueeze(-2) @ S).squeeze(-2))
    return outputs, S


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state [N, HV, K, V]; accumulates in the state's dtype."""
    tensors = (call.q, call.k, call.v, call.g, call.beta, call.sign, call.erase, call.write)
    raw = Raw(*(_heads_first(x, call.state_dtype) for x in tensors))  # type: ignore[arg-type]
    if raw.beta is not None:
        raw = raw._replace(beta=raw.beta.unsqueeze(-1))
    x, _ = prepare(call, raw)
    state = call.start_state()
    if call.cu_seqlens is None:
        outputs, state = _scan(x, state)
        return torch.stack(outputs, 1).to(call.v.dtype), state
    bounds = call.cu_seqlens.tolist()
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(bounds)):
        member = Prepared(*(tensor[:, :, start:end] for tensor in x))
        o, S = _scan(member, state[n : n + 1])
        outputs += o
        states.append(S)
    return torch.stack(outputs, 1).to(call.v.dtype), torch.cat(states)


def step(call: Call, inplace: bool) -> tuple[Tensor, Tensor]:
    """One token, without the time axis: o [B, HV, V] and the next state, in the memory of the given one if `inplace`."""
    o, following = forward(at_time(call))
    if inplace:
        assert call.initial_state is not None
        following = call.initial_state.copy_(following.detach())
    return o.squeeze(1), following
