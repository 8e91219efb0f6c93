"""Recurrences of other families, as published: Mamba-2, Mamba-3 and RWKV-7.

Mamba-2 and Mamba-3 run in their quadratic form, which is exact and short: y_t is the sum over s <= t of x_s (C_t . B_s) times
what s weighs at t. RWKV-7 runs token by token. All run under :func:`torch.vmap`. States are [B, H, N, P]: N channels of a key, P
of a value.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize, rms_norm, silu, softplus

from ckda.layers.convolution import ShortConvolution

__all__ = ["RWKV7", "Mamba2", "Mamba3"]


class _Recurrence(nn.Module):
    """What is the same for all: forward and one token are :meth:`prefill`."""

    def prefill(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, d] from a cache (None: from the beginning) -> [B, T, d] and the next cache."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.prefill(x)[0]

    def step(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """One token x [B, d] -> [B, d]."""
        y, cache = self.prefill(x.unsqueeze(1), cache)
        return y.squeeze(1), cache


def _time_bias(num_heads: int, low: float = 1e-3, high: float = 0.1) -> Tensor:
    """[H] with softplus(bias) spread over [low, high] in the logarithm, as Mamba starts."""
    dt = torch.exp(torch.rand(num_heads) * math.log(high / low) + math.log(low))
    return dt + torch.log(-torch.expm1(-dt))


def _read(
    C: Tensor, B: Tensor, x: Tensor, log_decay: Tensor, now: Tensor, later: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay from a zero state: y [b, T, H, P] and the last state [b, H, N, P].

    Args:
        C, B: [b, T, H, N]. x: [b, T, H, P]. log_decay: [b, T, H] of each token, summed here.
        now: [b, T, H], what token s weighs at s; later: [b, T, H], what it weighs besides at every later token.
    """
    total = log_decay.cumsum(1).transpose(1, 2)  # [b, H, T]
    T = x.shape[1]
    past = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~past, -torch.inf).exp()  # [b, H, t, s]
    weight = now.transpose(1, 2).unsqueeze(-2)
    if later is not None:
        weight = weight + later.transpose(1, 2).unsqueeze(-2) * past.tril(-1)
    decay = decay * weight
    y = torch.einsum("bthn,bshn,bhts,bshp->bthp", C, B, decay, x)
    return y, torch.einsum("bshn,bhs,bshp->bhnp", B, decay[:, :, -1], x)


class Mamba2Cache(NamedTuple):
    """The state [B, H, N, P] and the convolution's past."""

    state: Tensor
    past: Tensor


class Mamba2(_Recurrence):
    """Mamba-2 (arXiv 2405.21060), ``S_t = exp(-dt exp(A_log)) S_{t-1} + dt B_t x_t^T``, ``y_t = S_t^T C_t + D x_t``.

    One decay a head and token, positive: it cannot tell even from odd. x, B and C pass a short convolution and SiLU; the output
    is gated by SiLU(z) and normalised.

    Args:
        hidden_size: d. num_heads: H. head_dim: P, and N of the state.

    Example:
        >>> layer = Mamba2(16, 2, 4)
        >>> x = torch.randn(1, 6, 16)
        >>> _, cache = layer.prefill(x[:, :5])
        >>> torch.allclose(layer.step(x[:, 5], cache)[0], layer(x)[:, 5], atol=1e-6)
        True
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, conv_size: int = 4):
        super().__init__()
        self.num_heads, self.head_dim, inner = num_heads, head_dim, num_heads * head_dim
        self.widths = (inner, inner + 2 * head_dim, num_heads)
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.convolution = ShortConvolution(self.widths[1], conv_size)
        self.dt_bias = nn.Parameter(_time_bias(num_heads))
        self.A_log = nn.Parameter(torch.log(torch.empty(num_heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = nn.Parameter(torch.ones(inner))
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)

    def prefill(self, x: Tensor, cache: Mamba2Cache | None = None) -> tuple[Tensor, Mamba2Cache]:
        z, mixed, dt = self.in_proj(x).split(self.widths, -1)
        mixed, past = self.convolution(mixed, None if cache is None else cache.past, activate=True)
        inner, N = self.widths[0], self.head_dim
        values, B, C = mixed.split((inner, N, N), -1)
        values = values.unflatten(-1, (self.num_heads, -1))
        B, C = (t.unsqueeze(2).expand(-1, -1, self.num_heads, -1) for t in (B, C))
        dt = softplus(dt + self.dt_bias)
        log_decay = -dt * self.A_log.exp()
        state = x.new_zeros(x.shape[0], self.num_heads, N, N) if cache is None else cache.state
        if x.shape[1]:
            y, added = _read(C, B, values, log_decay, dt, None)
            kept = log_decay.cumsum(1).exp()  # [B, T, H]
            y = y + kept.unsqueeze(-1) * torch.einsum("bthn,bhnp->bthp", C, state)
            state = added + kept[:, -1, :, None, None] * state
        else:
            y = values
        y = (y + self.D[:, None] * values).flatten(2) * silu(z)
        return self.o_proj(rms_norm(y, y.shape[-1:], self.norm, 1e-5)), Mamba2Cache(state, past.clone())


class Mamba3Cache(NamedTuple):
    """The state [B, H, N, P], and B and x of the last token, which the trapezoidal rule needs again."""

    state: Tensor
    B: Tensor  #: [B, H, N]
    x: Tensor  #: [B, H, P]


class Mamba3(_Recurrence):
    """Mamba-3 (arXiv 2603.15569, one input and output): a complex diagonal transition by the exponential trapezoidal rule.

        S_t = a_t R_t S_{t-1} + (1 - lambda_t) dt_t a_t R_t B_{t-1} x_{t-1}^T + lambda_t dt_t B_t x_t^T,  y_t = S_t^T C_t + D x_t
        a_t = exp(-dt_t softplus(.)), lambda_t = sigmoid(.), R_t rotates pairs of channels by dt_t pi tanh(.)

    The rotation is what a complex eigenvalue does; half of the N channels turn, as in the published layer. Rotations commute, so
    that the layer counts mod n and does not multiply permutations. B and C are normalised and have a bias a head. There is no
    convolution. In the frame that has turned with R the recurrence is a plain decay, which is how it runs here.

    Args:
        hidden_size: d. num_heads: H. head_dim: P, and N of the state, a multiple of 4.

    Example:
        >>> layer = Mamba3(16, 2, 4)
        >>> x = torch.randn(1, 6, 16)
        >>> _, cache = layer.prefill(x[:, :5])
        >>> torch.allclose(layer.step(x[:, 5], cache)[0], layer(x)[:, 5], atol=1e-6)
        True
    """

    least_decay = 1e-4

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        if head_dim % 4:
            raise ValueError(
                f"head_dim is {head_dim}; it must be a multiple of 4, for pairs in half of the channels turn"
            )
        self.num_heads, self.head_dim, inner = num_heads, head_dim, num_heads * head_dim
        H, N = num_heads, head_dim
        self.widths = (inner, inner, N, N, H, H, H, N // 4)  # z, x, B, C, dt, A, lambda, angles
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(_time_bias(num_heads))
        self.B_norm, self.C_norm = nn.Parameter(torch.ones(N)), nn.Parameter(torch.ones(N))
        self.B_bias, self.C_bias = nn.Parameter(torch.ones(H, N)), nn.Parameter(torch.ones(H, N))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)

    def coefficients(self, x: Tensor) -> dict[str, Tensor]:
        """For x [B, T, d]: z and x [B, T, H, P], B and C [B, T, H, N], dt, log_decay and trap [B, T, H], angle [B, T, H, N / 4]."""
        z, values, B, C, dt, A, trap, angle = self.in_proj(x).split(self.widths, -1)
        z, values = (t.unflatten(-1, (self.num_heads, -1)) for t in (z, values))
        B = rms_norm(B, B.shape[-1:], self.B_norm, 1e-5).unsqueeze(2) + self.B_bias
        C = rms_norm(C, C.shape[-1:], self.C_norm, 1e-5).unsqueeze(2) + self.C_bias
        dt = softplus(dt + self.dt_bias)
        return {
            "z": z,
            "x": values,
            "B": B,
            "C": C,
            "dt": dt,
            "log_decay": -dt * softplus(A).clamp_min(self.least_decay),
            "trap": trap.sigmoid(),
            "angle": math.pi * torch.tanh(angle).unsqueeze(2) * dt.unsqueeze(-1),
        }

    def prefill(self, x: Tensor, cache: Mamba3Cache | None = None) -> tuple[Tensor, Mamba3Cache]:
        c = self.coefficients(x)
        if cache is None:
            start = (
                x.new_zeros(x.shape[0], self.num_heads, *rest)
                for rest in ((self.head_dim,) * 2, *((self.head_dim,),) * 2)
            )
            cache = Mamba3Cache(*start)
        if not x.shape[1]:
            return x, cache
        turned = c["angle"].cumsum(1)  # [B, T, H, N / 4]
        B, C = _turn(c["B"], -turned), _turn(c["C"], -turned)
        again = (1 - c["trap"]) * c["dt"]  # what a token weighs at the next one, before that one's decay
        later = torch.cat([again[:, 1:], torch.zeros_like(again[:, :1])], 1)
        y, added = _read(C, B, c["x"], c["log_decay"], c["trap"] * c["dt"], later)
        before = cache.state + again[:, 0, :, None, None] * cache.B.unsqueeze(-1) * cache.x.unsqueeze(-2)
        kept = c["log_decay"].cumsum(1).exp()
        y = y + kept.unsqueeze(-1) * torch.einsum("bthn,bhnp->bthp", C, before)
        state = added + kept[:, -1, :, None, None] * before
        state = _turn(state.transpose(-1, -2), turned[:, -1].unsqueeze(2)).transpose(-1, -2)
        y = (y + self.D[:, None] * c["x"]) * silu(c["z"])
        return self.o_proj(y.flatten(2)), Mamba3Cache(state, c["B"][:, -1], c["x"][:, -1])


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of the first half of x [..., N] rotated by angle [..., N / 4]; the second half stays."""
    turning, rest = x.chunk(2, -1)
    a, b = turning[..., ::2], turning[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2), rest], -1)


class RWKV7Cache(NamedTuple):
    """The state [B, H, N, P] and the last input [B, d], with which the next one is mixed."""

    state: Tensor
    last: Tensor


class RWKV7(_Recurrence):
    """RWKV-7's time mixing (arXiv 2503.14456): ``S_t = (Diag(w_t) - (a_t * kappa_t) kappa_t^T) S_{t-1} + k_t v_t^T``.

    The decay stands beside the erasure, not in front of it, kappa is a unit key of its own, and a in (0, 1) is per channel; the
    decay w = exp(-exp(-1/2) sigmoid(.)) is above 0.545. Inputs of the projections are mixed with the previous token; the readout
    has a norm a head, a bonus (r . rho * k) v for the present token, and a gate. What the published model passes from its first
    layer to the values of others has no place in one layer and is left out.

    Args:
        hidden_size: d. num_heads: H. head_dim: N = P. rank: of the maps behind w, a and the gate.

    Example:
        >>> layer = RWKV7(16, 2, 4)
        >>> x = torch.randn(1, 6, 16)
        >>> _, cache = layer.prefill(x[:, :5])
        >>> torch.allclose(layer.step(x[:, 5], cache)[0], layer(x)[:, 5], atol=1e-6)
        True
        >>> layer.matrices(x).shape
        torch.Size([1, 6, 2, 4, 4])
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, rank: int = 16):
        super().__init__()
        self.num_heads, inner = num_heads, num_heads * head_dim
        self.mix = nn.Parameter(torch.full((6, hidden_size), 0.5))  # of r, w, k, v, a and the gate
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, inner, bias=False) for _ in range(3))
        self.w_down, self.a_down, self.g_down = (nn.Linear(hidden_size, rank, bias=False) for _ in range(3))
        self.w_up, self.a_up = nn.Linear(rank, inner), nn.Linear(rank, inner)
        self.g_up = nn.Linear(rank, inner, bias=False)
        nn.init.zeros_(self.a_up.bias)
        with torch.no_grad():
            self.w_up.bias.copy_(torch.linspace(-6, -1, inner))
        self.kappa_scale = nn.Parameter(torch.full((inner,), 0.85))
        self.replace = nn.Parameter(torch.ones(inner))  # how far the written key is scaled by a
        self.bonus = nn.Parameter(torch.zeros(inner))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.zeros(inner))
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)

    def coefficients(self, x: Tensor, last: Tensor | None = None) -> dict[str, Tensor]:
        """r, w, kappa, k, v, a and gate [B, T, H, N] for x [B, T, d] after the input `last` [B, d] (None: zero)."""
        before = torch.cat([(torch.zeros_like(x[:, :1]) if last is None else last.unsqueeze(1)), x[:, :-1]], 1)[
            :, : x.shape[1]
        ]
        xr, xw, xk, xv, xa, xg = (x + (before - x) * mix for mix in self.mix)
        a = self.a_up(self.a_down(xa)).sigmoid()
        k = self.k_proj(xk)
        flat = {
            "r": self.r_proj(xr),
            "w": torch.exp(-math.exp(-0.5) * self.w_up(torch.tanh(self.w_down(xw))).sigmoid()),
            "kappa": k * self.kappa_scale,
            "k": k * (1 + (a - 1) * self.replace),
            "v": self.v_proj(xv),
            "a": a,
            "gate": self.g_up(self.g_down(xg).sigmoid()),
        }
        heads = {name: t.unflatten(-1, (self.num_heads, -1)) for name, t in flat.items()}
        return heads | {"kappa": normalize(heads["kappa"], dim=-1)}

    def matrices(self, x: Tensor) -> Tensor:
        """[B, T, H, N, N] the transitions on x [B, T, d]."""
        c = self.coefficients(x)
        return torch.diag_embed(c["w"]) - (c["a"] * c["kappa"]).unsqueeze(-1) * c["kappa"].unsqueeze(-2)

    def prefill(self, x: Tensor, cache: RWKV7Cache | None = None) -> tuple[Tensor, RWKV7Cache]:
        c = self.coefficients(x, None if cache is None else cache.last)
        H, N = self.num_heads, c["r"].shape[-1]
        state = x.new_zeros(x.shape[0], H, N, N) if cache is None else cache.state
        reads = []
        for t in range(x.shape[1]):
            w, a, kappa, k, v, r = (c[name][:, t].unsqueeze(-1) for name in ("w", "a", "kappa", "k", "v", "r"))
            erased = kappa.mT @ state  # [B, H, 1, P]
            state = w * state - (a * kappa) * erased + k * v.mT
            reads.append((r.mT @ state).squeeze(-2))
        o = torch.stack(reads, 1) if reads else c["v"]
        o = layer_norm(o, (N,), eps=N * 1e-5)
        o = o.flatten(2) * self.norm_weight + self.norm_bias
        bonus = (c["r"] * c["k"] * self.bonus.view(H, N)).sum(-1, keepdim=True) * c["v"]
        y = self.o_proj((o + bonus.flatten(2)) * c["gate"].flatten(2))
        last = x[:, -1] if x.shape[1] else (x.new_zeros(x.shape[0], x.shape[2]) if cache is None else cache.last)
        return y, RWKV7Cache(state, last)
