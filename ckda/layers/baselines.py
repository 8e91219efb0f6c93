"""What the recurrence is compared with on small tasks: a GRU, causal attention, a Transformer block, in plain operations.

All run under :func:`torch.vmap`, so that several seeds train as one program; torch's own GRU has no rule for it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["GRU", "AttentionBlock", "AttentionCache", "SoftmaxAttention"]


class GRU(nn.Module):
    """One GRU layer of torch's own parametrisation and initialisation, [B, T, d] -> [B, T, d].

    Example:
        >>> own, torchs = GRU(4), nn.GRU(4, 4, batch_first=True)
        >>> _ = own.load_state_dict({name.removesuffix("_l0"): p for name, p in torchs.state_dict().items()})
        >>> x = torch.randn(2, 5, 4)
        >>> torch.allclose(own(x), torchs(x)[0], atol=1e-6)
        True
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        bound = hidden_size**-0.5

        def start(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        self.weight_ih, self.weight_hh = start(3 * hidden_size, hidden_size), start(3 * hidden_size, hidden_size)
        self.bias_ih, self.bias_hh = start(3 * hidden_size), start(3 * hidden_size)

    def _next(self, inputs: Tensor, h: Tensor) -> Tensor:
        """The hidden state [B, d] after one token whose input part is [B, 3 d]."""
        reset_in, update_in, new_in = inputs.chunk(3, -1)
        reset_h, update_h, new_h = linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
        return torch.lerp(new, h, torch.sigmoid(update_in + update_h))

    def _states(self, x: Tensor, h: Tensor) -> Tensor:
        """[B, 1 + T, d] h [B, d] and the hidden states after it."""
        inputs = linear(x, self.weight_ih, self.bias_ih)
        states = [h]
        for t in range(x.shape[1]):
            h = self._next(inputs[:, t], h)
            states.append(h)
        return torch.stack(states, 1)

    def read(self, x: Tensor) -> Tensor:
        """The hidden states [B, T, 1, d], as one head."""
        return self.prefill(x)[0].unsqueeze(2)

    def write_out(self, o: Tensor, x: Tensor) -> Tensor:
        """The hidden states [B, T, 1, d] as they are."""
        return o.squeeze(2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.write_out(self.read(x), x)

    def prefill(self, x: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`forward` from a hidden state [B, d] (None: zero) and the next one."""
        states = self._states(x, x.new_zeros(x.shape[0], x.shape[2]) if cache is None else cache)
        return states[:, 1:], states[:, -1]

    def step(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """One token x [B, d] -> [B, d]."""
        h = self._next(linear(x, self.weight_ih, self.bias_ih), cache)
        return h, h


class AttentionCache(NamedTuple):
    """What attention carries from one token to the next: everything it has seen."""

    k: Tensor  #: [B, H, T, D]
    v: Tensor  #: [B, H, T, D]


class SoftmaxAttention(nn.Module):
    """Causal multi-head softmax attention after sinusoidal positions, [B, T, d] -> [B, T, d]; no norm, no feed-forward.

    Example:
        >>> layer = SoftmaxAttention(16, num_heads=2, head_dim=4)
        >>> x = torch.randn(1, 6, 16)
        >>> _, cache = layer.prefill(x[:, :5])
        >>> torch.allclose(layer.step(x[:, 5], cache)[0], layer(x)[:, 5], atol=1e-6)
        True
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, num_heads * head_dim, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.prefill(x)[0]

    def prefill(self, x: Tensor, cache: AttentionCache | None = None) -> tuple[Tensor, AttentionCache]:
        """:meth:`forward` after what the cache holds, and the next cache."""
        first = 0 if cache is None else cache.k.shape[2]
        T, d = x.shape[1:]
        x = x + _positions(T, d, x, first)
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
        future = torch.ones(T, first + T, dtype=torch.bool, device=x.device).triu(first + 1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), AttentionCache(k, v)

    def step(self, x: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionCache]:
        """One token x [B, d] -> [B, d]."""
        y, cache = self.prefill(x.unsqueeze(1), cache)
        return y.squeeze(1), cache


class AttentionBlock(nn.Module):
    """Sinusoidal positions, then a pre-norm block of causal multi-head self-attention and a GELU feed-forward layer.

    The block has its own residuals: [B, T, d] -> [B, T, d] replaces the stream.

    Example:
        >>> block = AttentionBlock(16, num_heads=2, inner=16)
        >>> x = torch.randn(1, 6, 16)
        >>> torch.allclose(block(x)[:, :4], block(x[:, :4]), atol=1e-6)
        True
    """

    def __init__(self, hidden_size: int, num_heads: int, inner: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.feed = nn.Sequential(nn.Linear(hidden_size, inner), nn.GELU(), nn.Linear(inner, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        _, T, d = x.shape
        x = x + _positions(T, d, x)
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).movedim(1, -2).unbind(1)
        )  # [B, H, T, D]
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * (d // self.num_heads) ** -0.5).masked_fill(future, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


def _positions(T: int, d: int, like: Tensor, first: int = 0) -> Tensor:
    """[T, d] of positions from `first` on: sines in the first half of the coordinates, cosines in the second, wavelengths
    2 pi to 20000 pi."""
    rate = torch.exp(torch.arange(d // 2, device=like.device) * (-math.log(10_000.0) / (d // 2)))
    angle = torch.arange(first, first + T, device=like.device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)
