"""One call of the operator as data, and the preparation that every backend shares.

Legend of axes: B batch, T time, H query/key heads, HV value heads, G = HV / H, K key width, V value width, N sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ckda.ops.gate import Gate, beta_from_logit, evaluate_gate, gate_backward

__all__ = ["Call", "Gradients", "Prepared", "prepare", "prepare_backward"]


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`ckda.complex_kda`, checked; tensors as the user gave them, options resolved."""

    q: Tensor  #: [B, T, H, K]
    k: Tensor  #: [B, T, H, K]
    v: Tensor  #: [B, T, HV, V]
    g: Tensor  #: [B, T, HV, K]
    beta: Tensor | None  #: [B, T, HV]
    sign: Tensor | None  #: int8 [B, T, HV, K]
    A_log: Tensor | None  #: [HV]
    dt_bias: Tensor | None  #: [HV * K]
    erase: Tensor | None  #: [B, T, HV, K]
    write: Tensor | None  #: [B, T, HV, V]
    initial_state: Tensor | None  #: [N, HV, K, V]
    cu_seqlens: Tensor | None  #: [N + 1]
    gate: str | None
    beta_range: int | None
    normalize_qk: bool
    scale: float
    output_final_state: bool

    @property
    def group(self) -> int:
        """G, the value heads that share one query/key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the state and of all arithmetic outside the GPU kernels: float64 if the inputs are, else float32."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def num_sequences(self) -> int:
        """N: the batch, or the members of a packed one."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def zero_state(self) -> Tensor:
        """[N, HV, K, V] of zeros."""
        shape = (self.num_sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3])
        return self.v.new_zeros(shape, dtype=self.state_dtype)


class Prepared(NamedTuple):
    """What the recurrence ``S_t = (I - k a^T) Diag(alpha) S_{t-1} + k w^T, o_t = S_t^T q`` reads, one row per value head."""

    q: Tensor  #: [B, T, H, K] scaled query
    k: Tensor  #: [B, T, H, K] key
    a: Tensor  #: [B, T, HV, K] erase key: beta k, or erase * k
    w: Tensor  #: [B, T, HV, V] write value: beta v, or write * v
    alpha: Tensor  #: [B, T, HV, K] signed gate


class Gradients(NamedTuple):
    """Gradients of a :class:`Call`, in their arguments' dtypes; None where the argument is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    initial_state: Tensor | None


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| over the last axis, kept; zero for a zero vector. Nothing is added under the root."""
    norm2 = x.square().sum(-1, keepdim=True)
    return torch.where(norm2 > 0, norm2, 1).rsqrt() * (norm2 > 0)


def _unit(x: Tensor) -> Tensor:
    return x * _inverse_norm(x)


def _inverse_square(k: Tensor) -> Tensor:
    """1 / |k|^2 of the rounded key, [..., 1] in float64, so that beta = 2 stays a reflection; 1 for a zero key."""
    norm2 = k.detach().double().square().sum(-1, keepdim=True)
    return torch.where(norm2 > 0, norm2, 1).reciprocal()


def _rate(call: Call) -> Tensor:
    """beta as [B, T, HV, 1] in the state's dtype."""
    assert call.beta is not None
    if call.beta_range is None:
        return call.beta.to(call.state_dtype).unsqueeze(-1)
    return beta_from_logit(call.beta, call.beta_range).to(call.state_dtype).unsqueeze(-1)


def _gate(call: Call) -> Gate:
    if call.gate is None:
        return Gate(call.g.to(call.state_dtype), call.sign)
    gate = evaluate_gate(call.gate, call.g, call.A_log, call.dt_bias)
    return Gate(gate.log.to(call.state_dtype), gate.sign)


def _expand_heads(x: Tensor, group: int) -> Tensor:
    """[B, T, H, K] -> [B, T, HV, K]: value head j reads head j // G."""
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def prepare(call: Call) -> Prepared:
    """Norm, gate, learning rate and scale, in the state's dtype; differentiable."""
    dtype = call.state_dtype
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if call.normalize_qk:
        q, k = _unit(q), _unit(k)
    wide = _expand_heads(k, call.group)
    per_norm = _inverse_square(wide) if call.normalize_qk else None
    if call.erase is not None:
        assert call.write is not None
        erase, write = call.erase.to(dtype), call.write.to(dtype)
    else:
        erase = write = _rate(call)
    if per_norm is not None:
        # in float64 until after the product: a rounded 1/|k|^2 would drift the same way at every step
        a = (erase.double() * per_norm * wide.double()).to(dtype)
        w = write * per_norm.to(dtype) * v
    else:
        a, w = erase * wide, write * v
    return Prepared(q * call.scale, k, a, w, _gate(call).alpha())


def _norm_backward(dunit: Tensor, x: Tensor) -> Tensor:
    inverse = _inverse_norm(x)
    unit = x * inverse
    return (dunit - unit * (unit * dunit).sum(-1, keepdim=True)) * inverse


def _sum_groups(dx: Tensor, group: int) -> Tensor:
    return dx if group == 1 else dx.unflatten(2, (-1, group)).sum(3)


def prepare_backward(call: Call, grad: Prepared, dlog: Tensor, dstate: Tensor | None) -> Gradients:
    """The gradients of :func:`prepare`, by hand.

    Args:
        grad: gradients of the prepared tensors; q and k are [B, T, HV, K] here, one per value head. `grad.alpha` is
            not read: backends give the gradient of log|alpha| itself, which stays finite where alpha is zero.
        dlog: [B, T, HV, K]. dstate: [N, HV, K, V] or None.
    """
    dtype = call.state_dtype
    k = call.k.to(dtype)
    unit = _unit(k) if call.normalize_qk else k
    wide = _expand_heads(unit, call.group)
    v = call.v.to(dtype)
    per_norm = _inverse_square(wide).to(dtype) if call.normalize_qk else 1.0
    derase = grad.a * wide * per_norm
    dwrite = grad.w * v * per_norm
    dbeta = None
    if call.erase is not None:
        assert call.write is not None
        erase, write = call.erase.to(dtype), call.write.to(dtype)
    else:
        assert call.beta is not None
        erase = write = _rate(call)
        dbeta = derase.sum(-1) + dwrite.sum(-1)
        if call.beta_range is not None:
            dbeta = dbeta * erase.squeeze(-1) * torch.sigmoid(-call.beta.to(dtype))
    dk = _sum_groups(grad.k + grad.a * erase * per_norm, call.group)
    dq = _sum_groups(grad.q, call.group) * call.scale
    if call.normalize_qk:
        dq, dk = _norm_backward(dq, call.q.to(dtype)), _norm_backward(dk, k)
    if call.gate is None:
        dg, dA_log, ddt_bias = dlog, None, None
    else:
        dg, dA_log, ddt_bias = gate_backward(call.gate, dlog, call.g, call.A_log, call.dt_bias)
    return Gradients(
        q=dq.to(call.q.dtype),
        k=dk.to(call.k.dtype),
        v=(grad.w * write * per_norm).to(call.v.dtype),
        g=dg.to(call.g.dtype),
        beta=None if dbeta is None or call.beta is None else dbeta.to(call.beta.dtype),
        A_log=dA_log,
        dt_bias=ddt_bias,
        erase=None if call.erase is None else derase.to(call.erase.dtype),
        write=None if call.write is None else dwrite.to(call.write.dtype),
        initial_state=None
        if call.initial_state is None or dstate is None
        else dstate.to(call.initial_state.dtype),
    )
