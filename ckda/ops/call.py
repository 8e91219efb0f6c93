"""One call of the operator as data, and the preparation that the torch backends share.

Legend of axes: B batch, T time, H query/key heads, HV value heads, G = HV / H, K key width, V value width, N sequences.
The public layout is [B, T, HV, D]; inside, heads stand before time: [B, HV, T, D].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ckda.ops.gate import beta_from_logit, gate_alpha, gate_backward

__all__ = ["Call", "Gradients", "Norms", "Prepared", "Raw", "prepare", "prepare_backward"]


class Call(NamedTuple):
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
        """The dtype of the state and of the torch backends' arithmetic: float64 if the inputs are, else float32."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def num_sequences(self) -> int:
        """N: the batch, or the members of a packed one."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def zero_state(self) -> Tensor:
        """[N, HV, K, V] of zeros."""
        shape = (self.num_sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3])
        return self.v.new_zeros(shape, dtype=self.state_dtype)

    def start_state(self) -> Tensor:
        """[N, HV, K, V] the initial state in the state's dtype, zeros where none is given."""
        return self.zero_state() if self.initial_state is None else self.initial_state.to(self.state_dtype)


class Raw(NamedTuple):
    """The per-token tensors of a call, heads before time, in the state's dtype."""

    q: Tensor  #: [B, H, T, K]
    k: Tensor  #: [B, H, T, K]
    v: Tensor  #: [B, HV, T, V]
    g: Tensor  #: [B, HV, T, K]
    beta: Tensor | None  #: [B, HV, T, 1]
    sign: Tensor | None  #: [B, HV, T, K]
    erase: Tensor | None  #: [B, HV, T, K]
    write: Tensor | None  #: [B, HV, T, V]


class Prepared(NamedTuple):
    """What the recurrence ``S_t = (I - k a^T) Diag(alpha) S_{t-1} + k w^T, o_t = S_t^T q`` reads, one row a value head."""

    q: Tensor  #: [B, HV, T, K] scaled query
    k: Tensor  #: [B, HV, T, K] key
    a: Tensor  #: [B, HV, T, K] erase key: beta k, or erase * k
    w: Tensor  #: [B, HV, T, V] write value: beta v, or write * v
    alpha: Tensor  #: [B, HV, T, K] signed gate


class Norms(NamedTuple):
    """What normalisation leaves for the backward pass."""

    q: Tensor  #: [B, H, T, 1] 1 / |q|, zero for a zero vector
    k: Tensor  #: [B, H, T, 1] 1 / |k|
    excess: Tensor  #: [B, HV, T, 1] 1 / |k_rounded|^2 - 1


class Gradients(NamedTuple):
    """Gradients of a :class:`Call`, in their arguments' dtypes and layouts; None where the argument is None."""

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
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > 0, norm, torch.inf).reciprocal()


def _excess(k: Tensor) -> Tensor:
    """1 / |k|^2 - 1 of the rounded unit key, [..., 1]; 0 for a zero key. Summed in float64, for it is of rounding size."""
    norm = torch.linalg.vector_norm(k.detach().double(), dim=-1, keepdim=True)
    norm = torch.where(norm > 0, norm, 1)
    return ((1 - norm) * (1 + norm) / (norm * norm)).to(k.dtype)


def _expand_heads(x: Tensor, group: int) -> Tensor:
    """[B, H, T, K] -> [B, HV, T, K]: value head j reads head j // G."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _sum_groups(dx: Tensor, group: int) -> Tensor:
    return dx if group == 1 else dx.unflatten(1, (-1, group)).sum(2)


def _rates(call: Call, raw: Raw) -> tuple[Tensor, Tensor]:
    """The erase and the write gate, broadcastable over [B, HV, T, .]: both are beta unless they are given."""
    if raw.erase is not None and raw.write is not None:
        return raw.erase, raw.write
    assert raw.beta is not None
    beta = raw.beta if call.beta_range is None else beta_from_logit(raw.beta, call.beta_range)
    return beta, beta


def prepare(call: Call, raw: Raw) -> tuple[Prepared, Norms | None]:
    """Norm, gate, learning rate and scale; differentiable."""
    erase, write = _rates(call, raw)
    norms = None
    if call.normalize_qk:
        q_inverse, k_inverse = _inverse_norm(raw.q), _inverse_norm(raw.k)
        q, k = raw.q * (q_inverse * call.scale), raw.k * k_inverse
        excess = _expand_heads(_excess(k), call.group)
        k = _expand_heads(k, call.group)
        # beta / |k|^2, its excess over beta added to the product: rounded into beta it would drift alike at every step
        a = torch.addcmul(erase * k, erase * excess, k)
        w = torch.addcmul(write, write, excess) * raw.v
        norms = Norms(q_inverse, k_inverse, excess)
    else:
        q, k = raw.q * call.scale, _expand_heads(raw.k, call.group)
        a, w = erase * k, write * raw.v
    if call.gate is not None:
        alpha = gate_alpha(call.gate, raw.g, call.A_log, call.dt_bias, head_axis=-3)
    else:
        alpha = raw.g.exp() if raw.sign is None else raw.g.exp() * raw.sign
    return Prepared(_expand_heads(q, call.group), k, a, w, alpha), norms


def _norm_backward(dy: Tensor, y: Tensor, inverse: Tensor, length: float = 1.0) -> Tensor:
    """Gradient of x from that of y = x * inverse * length, inverse = 1 / |x|; overwrites dy."""
    along = torch.linalg.vecdot(y, dy).unsqueeze(-1) * (length**-2 if length else 0.0)
    return dy.addcmul_(y, along, value=-1).mul_(inverse * length)


def _rates_backward(
    call: Call, raw: Raw, x: Prepared, dx: Prepared, norms: Norms | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dbeta, derase, dwrite), None where they are not given."""
    if raw.erase is not None:
        derase, dwrite = dx.a * x.k, dx.w * raw.v
        if norms is not None:
            derase, dwrite = (torch.addcmul(d, d, norms.excess) for d in (derase, dwrite))
        return None, derase, dwrite
    assert raw.beta is not None
    dbeta = (torch.linalg.vecdot(dx.a, x.k) + torch.linalg.vecdot(dx.w, raw.v)).unsqueeze(-1)
    if norms is not None:
        dbeta = torch.addcmul(dbeta, dbeta, norms.excess)
    if call.beta_range is not None:
        dbeta = dbeta * call.beta_range * torch.sigmoid(raw.beta) * torch.sigmoid(-raw.beta)
    return dbeta, None, None


def prepare_backward(
    call: Call, raw: Raw, x: Prepared, norms: Norms | None, dx: Prepared, dlog: Tensor
) -> tuple[Raw, Tensor | None, Tensor | None]:
    """The gradients of :func:`prepare`, by hand: of `raw` (sign: None), A_log and dt_bias.

    Args:
        raw: of which q and k are not read. x, norms: what :func:`prepare` returned; w and alpha are not read.
        dx: gradients of x, overwritten. `dx.alpha` is not read, for backends give dlog [B, HV, T, K], the gradient of
            log|alpha|, which stays finite where alpha is zero.
    """
    dbeta, derase, dwrite = _rates_backward(call, raw, x, dx, norms)
    erase, write = _rates(call, raw)
    if norms is not None:
        erase, write = (torch.addcmul(y, y, norms.excess) for y in (erase, write))
    dq = _sum_groups(dx.q, call.group)
    dk = _sum_groups(dx.k.addcmul_(dx.a, erase), call.group)
    if norms is not None:
        first = slice(None, None, call.group)
        dq = _norm_backward(dq, x.q[:, first], norms.q, call.scale)
        dk = _norm_backward(dk, x.k[:, first], norms.k)
    else:
        dq = dq.mul_(call.scale)
    dg, dA_log, ddt_bias = dlog, None, None
    if call.gate is not None:
        dg, dA_log, ddt_bias = gate_backward(call.gate, dlog, raw.g, call.A_log, call.dt_bias, head_axis=-3)
    return Raw(dq, dk, dx.w * write, dg, dbeta, None, derase, dwrite), dA_log, ddt_bias
