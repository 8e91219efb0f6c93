"""The recurrence as a loop over :func:`ckda.transition.apply`, up to float64: the oracle. Plain autograd, any order."""

import torch
from torch import Tensor

from ckda import transition
from ckda.ops.call import Call, Prepared, _expand_heads, prepare

__all__ = ["forward", "step"]


def _scan(x: Prepared, S: Tensor) -> tuple[list[Tensor], Tensor]:
    """Run [B, T, HV, ...] from the state S [B, HV, K, V]; returns T outputs [B, HV, V] and the last state."""
    outputs = []
    for q, k, a, w, alpha in zip(*(tensor.unbind(1) for tensor in x), strict=True):
        S = transition.apply(S, alpha, a, k, w)
        outputs.append((q.unsqueeze(-2) @ S).squeeze(-2))
    return outputs, S


def _expand(call: Call) -> Prepared:
    x = prepare(call)
    return x._replace(q=_expand_heads(x.q, call.group), k=_expand_heads(x.k, call.group))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state [N, HV, K, V]; accumulates in the state's dtype."""
    x = _expand(call)
    state = call.zero_state() if call.initial_state is None else call.initial_state.to(call.state_dtype)
    if call.cu_seqlens is None:
        outputs, state = _scan(x, state)
        return torch.stack(outputs, 1).to(call.v.dtype), state
    bounds = call.cu_seqlens.tolist()
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        member = Prepared(*(tensor[:, start:end] for tensor in x))
        o, S = _scan(member, state[n : n + 1])
        outputs += o
        states.append(S)
    return torch.stack(outputs, 1).to(call.v.dtype), torch.cat(states)


def step(call: Call, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: a call with T = 1 from `state` [B, HV, K, V]; returns o [B, HV, V] and the next state."""
    outputs, state = _scan(_expand(call), state.to(call.state_dtype))
    return outputs[0].to(call.v.dtype), state
