"""From raw projections to gates: (log|alpha|, sign), the ranges of beta, and the paper's initialisations.

Legend of axes: B batch, T time, HV value heads, K key width. Everything here is computed in float32, or in float64 where
the input is, whatever the input's dtype.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "EPS",
    "GATES",
    "Gate",
    "beta_from_logit",
    "beta_spread",
    "evaluate_gate",
    "gate_alpha",
    "gate_backward",
    "init_A_log",
    "init_dt_bias",
    "sigmoid",
]

#: the gates by name: `signed` is CKDA's, `sigmoid` the bounded (safe) one of KDA, `softplus` the classic one
GATES = ("signed", "sigmoid", "softplus")

#: the smallest |alpha| of the bounded gates
EPS = math.exp(-5.0)


class Gate(NamedTuple):
    """A gate in sign-magnitude form: ``alpha = sign * exp(log)``."""

    log: Tensor  #: [B, T, HV, K] log|alpha| <= 0
    sign: Tensor | None  #: int8 of +1/-1, like log; None: all +1

    def alpha(self) -> Tensor:
        """[B, T, HV, K] the signed gate itself.

        Example:
            >>> Gate(torch.tensor([0.0, -torch.inf]), torch.tensor([-1, 1], dtype=torch.int8)).alpha()
            tensor([-1.,  0.])
        """
        alpha = self.log.exp()
        return alpha if self.sign is None else alpha * self.sign


def _affine(A_log: Tensor | None, dt_bias: Tensor | None, g: Tensor, head_axis: int) -> tuple[Tensor, Tensor]:
    """rate = exp(A_log) and shift = rate * dt_bias, broadcastable to g, so that u = shift + g * rate."""
    HV, K = g.shape[head_axis], g.shape[-1]
    between = (1,) * (-head_axis - 2)
    rate = g.new_ones(()) if A_log is None else A_log.to(g.dtype).exp().view(HV, *between, 1)
    if dt_bias is None:
        return rate, g.new_zeros(())
    return rate, rate * dt_bias.to(g.dtype).view(HV, *between, K) + 0.0  # + 0.0: no shift is -0.0, so no u is


def _biased(g: Tensor, dt_bias: Tensor | None, head_axis: int) -> Tensor:
    """g + dt_bias."""
    shape = (g.shape[head_axis], *(1,) * (-head_axis - 2), g.shape[-1])
    return g if dt_bias is None else g + dt_bias.to(g.dtype).view(shape)


def _wide(g: Tensor) -> Tensor:
    return g if g.dtype == torch.float64 else g.float()


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function by exp(-|x|): accurate on both sides, and the same bits wherever in a tensor x stands.

    torch.sigmoid and softplus round the last few numbers of a CPU tensor otherwise than the rest; torch.exp does not.

    Example:
        >>> sigmoid(torch.tensor([-100.0, 0.0, 100.0]))
        tensor([3.7835e-44, 5.0000e-01, 1.0000e+00])
    """
    e = torch.exp(torch.where(x < 0, x, -x))
    return torch.where(x < 0, e, 1) / (1 + e)


def _small_sigmoid(u: Tensor) -> Tensor:
    """sigmoid(-|u|), which keeps the digits of 1 - |alpha|; its gradient at u = 0 is zero."""
    e = torch.exp(torch.copysign(u, -1))
    return e / (1 + e)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0, x) + torch.log1p(torch.exp(torch.where(x < 0, x, -x)))


def _log_signed(u: Tensor) -> Tensor:
    """log(eps + (1 - eps)|tanh(u/2)|), by the form that keeps its digits: log1p far from zero, log near it."""
    far = torch.log1p(-(1 - EPS) * 2 * _small_sigmoid(u))
    near = torch.log(EPS + (1 - EPS) * torch.tanh(u / 2).abs())
    return torch.where(u.abs() > 1, far, near)


def evaluate_gate(
    gate: str, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, head_axis: int = -2
) -> Gate:
    """The gate named `gate` on the raw projection g, with ``u = exp(A_log) * (g + dt_bias)`` (app:gauge).

    ========  =============================================================  ==================================
    signed    log|alpha| = log(eps + (1 - eps)|tanh(u/2)|), eps = e^-5       sign -1 iff u < 0, detached
    sigmoid   log alpha = -5 sigmoid(u)                                      +1
    softplus  log alpha = -exp(A_log) softplus(g + dt_bias)                  +1
    ========  =============================================================  ==================================

    Args:
        g: [B, T, HV, K] (any leading axes) raw projection; with head_axis=-3 it is [B, HV, T, K].
        A_log: [HV] log rate. dt_bias: [HV * K], head-major.

    Example:
        >>> gate = evaluate_gate("signed", torch.tensor([[-30.0, 0.0, 30.0]]))
        >>> gate.alpha().round(decimals=4)
        tensor([[-1.0000,  0.0067,  1.0000]])
    """
    g = _wide(g)
    rate, shift = _affine(A_log, dt_bias, g, head_axis)
    u = torch.addcmul(shift, g, rate)
    if gate == "signed":
        return Gate(_log_signed(u), 1 - 2 * (u < 0).to(torch.int8))
    if gate == "sigmoid":
        return Gate(-5 * sigmoid(u), None)
    if gate == "softplus":
        return Gate(-rate * _softplus(_biased(g, dt_bias, head_axis)), None)
    raise ValueError(f"gate is {gate!r}; it may be one of {', '.join(map(repr, GATES))}")


def gate_alpha(
    gate: str, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, head_axis: int = -2
) -> Tensor:
    """The signed gate itself, ``evaluate_gate(...).alpha()`` to rounding, without the detour over its logarithm.

    Example:
        >>> gate_alpha("signed", torch.tensor([[-30.0, -0.0, 30.0]])).round(decimals=4)
        tensor([[-1.0000,  0.0067,  1.0000]])
    """
    if gate != "signed":
        return evaluate_gate(gate, g, A_log, dt_bias, head_axis).log.exp()
    g = _wide(g)
    rate, shift = _affine(A_log, dt_bias, g, head_axis)
    u = torch.addcmul(shift, g, rate)
    s = _small_sigmoid(u)
    return torch.copysign(torch.rsub(s, 1, alpha=2 * (1 - EPS)), u)


def gate_backward(
    gate: str, dlog: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, head_axis: int = -2
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`evaluate_gate`, by hand: (dg, dA_log, ddt_bias), None where the argument is None.

    Args:
        dlog: [B, T, HV, K] gradient with respect to log|alpha|; the others as in :func:`evaluate_gate`.
    """
    g = g.to(dlog.dtype)
    rate, shift = _affine(A_log, dt_bias, g, head_axis)
    u = torch.addcmul(shift, g, rate)
    if gate == "signed":
        # d log|alpha| / du = sign(u) 2 (1 - eps) s (1 - s) / |alpha|, s = sigmoid(-|u|)
        s = _small_sigmoid(u)
        # |alpha| by the very expression of gate_alpha: dlog holds it as a factor, and near u = 0 its rounding must cancel
        du = torch.addcmul(s, s, s, value=-1).mul_(dlog).mul_(u.sign() * (2 * (1 - EPS)))
        du.div_(torch.rsub(s, 1, alpha=2 * (1 - EPS)))
    elif gate == "sigmoid":
        s = sigmoid(u)
        du = torch.addcmul(s, s, s, value=-1).mul_(dlog).mul_(-5)
    else:
        x = _biased(g, dt_bias, head_axis)
        du = sigmoid(x).mul_(dlog).neg_()
    dg = du * rate
    others = tuple(axis for axis in range(g.dim()) if axis not in (g.dim() + head_axis, g.dim() - 1))
    dA_log = None
    if A_log is not None:
        dlog_rate = -rate * _softplus(x) * dlog if gate == "softplus" else du * u
        dA_log = dlog_rate.sum((*others, -1)).to(A_log.dtype)
    return dg, dA_log, None if dt_bias is None else dg.sum(others).flatten().to(dt_bias.dtype)


def beta_from_logit(logit: Tensor, beta_range: int) -> Tensor:
    """``beta_range * sigmoid(logit)``: a learning rate in [0, 1] or in [0, 2] (app:initialization).

    Example:
        >>> beta_from_logit(torch.tensor([0.0, 40.0]), 2)
        tensor([1., 2.])
    """
    return beta_range * sigmoid(_wide(logit))


# Initialisation (app:initialization) ------------------------------------------------------------------------------


def init_A_log(gate: str, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
    """[HV] log rates: zero for the bounded gates, log U(1, 16) for the classic softplus gate."""
    if gate == "softplus":
        return torch.empty(num_heads).uniform_(1, 16, generator=generator).log()
    return torch.zeros(num_heads)


def _invert_gate(gate: str, dt: Tensor, rate: Tensor) -> Tensor:
    """The positive-alpha preactivation u/rate at which |alpha| = exp(-dt), in float64; dt < 5 for the bounded gates."""
    if gate == "signed":
        r = (torch.exp(-dt) - EPS) / (1 - EPS)
        return 2 * torch.atanh(r) / rate
    if gate == "sigmoid":
        return torch.log(dt / 5) - torch.log1p(-dt / 5)
    return torch.log(torch.expm1(dt / rate))


def init_dt_bias(
    gate: str,
    A_log: Tensor,
    head_dim: int,
    *,
    spread: bool = False,
    generator: torch.Generator | None = None,
    dt_min: float = 1e-3,
    dt_max: float = 0.1,
    dt_floor: float = 1e-4,
) -> Tensor:
    """[HV * K] biases with which a zero projection gives |alpha| = exp(-dt), dt log-uniform (app:initialization).

    `spread` is the paper's gate spread: each channel's sign is flipped with probability one half ("signed" only).

    Example:
        >>> bias = init_dt_bias("signed", torch.zeros(2), 64, spread=True)
        >>> log = evaluate_gate("signed", torch.zeros(2, 64), torch.zeros(2), bias).log
        >>> bool((-log).min() >= 0.99e-3) and bool((-log).max() <= 0.101)
        True
    """
    if spread and gate != "signed":
        raise ValueError(f"gate spread flips signs, so it needs gate='signed', not {gate!r}")
    num = A_log.numel() * head_dim
    rate = A_log.double().exp().repeat_interleave(head_dim)
    uniform = torch.rand(num, generator=generator, dtype=torch.float64)
    dt = torch.exp(uniform * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp_min(dt_floor)
    bias = _invert_gate(gate, dt, rate)
    if spread:
        bias = bias * torch.where(torch.rand(num, generator=generator) < 0.5, -1.0, 1.0)
    return bias.to(A_log.dtype)


def beta_spread(z_std: float) -> tuple[float, float]:
    """Beta spread (app:initialization): (gamma, b0) with which ``2 sigmoid(gamma z - b0)`` has its mode at 0.5.

    z is normal with standard deviation `z_std`; gamma and b0 are such that the standard deviation of
    ``2 sigmoid(gamma z - b0)`` equals that of ``sigmoid(z)``. Half of the heads take -b0: their mode is 1.5.

    The mode m of 2 sigmoid(x), x ~ N(-b0, s^2), solves ``logit(m/2) + b0 = -s^2 (1 - m)``; so for m = 1/2
    ``b0 = log 3 - s^2 / 2``, and s = gamma z_std is found by bisection.

    Example:
        >>> gamma, b0 = beta_spread(3**-0.5)
        >>> round(gamma, 2), round(b0, 2)
        (0.6, 1.04)
    """
    target = _sigmoid_std(0.0, z_std)
    low, high = 0.0, z_std
    for _ in range(60):
        s = (low + high) / 2
        if 2 * _sigmoid_std(math.log(3) - s * s / 2, s) < target:
            low = s
        else:
            high = s
    s = (low + high) / 2
    return s / z_std, math.log(3) - s * s / 2


def _sigmoid_std(shift: float, std: float) -> float:
    """Standard deviation of sigmoid(std * n - shift), n normal, on a fine grid."""
    n = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    weight = torch.softmax(-n * n / 2, 0)
    value = sigmoid(std * n - shift)
    mean = (weight * value).sum()
    return float((weight * (value - mean) ** 2).sum().sqrt())
