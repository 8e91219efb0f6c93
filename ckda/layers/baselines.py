"""What the recurrence is compared with on small tasks: a GRU and a causal Transformer block, in plain operations.

Both run under :func:`torch.vmap`, so that several seeds train as one program; torch's own GRU has no rule for it.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["GRU", "AttentionBlock"]


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

    def read(self, x: Tensor) -> Tensor:
        """The hidden states [B, T, 1, d], as one head."""
        inputs = linear(x, self.weight_ih, self.bias_ih)
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            reset_in, update_in, new_in = inputs[:, t].chunk(3, -1)
            reset_h, update_h, new_h = linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
            new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
            h = torch.lerp(new, h, torch.sigmoid(update_in + update_h))
            states.append(h)
        return torch.stack(states, 1).unsqueeze(2)

    def write_out(self, o: Tensor, x: Tensor) -> Tensor:
        """The hidden states [B, T, 1, d] as they are."""
        return o.squeeze(2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.write_out(self.read(x), x)


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


def _positions(T: int, d: int, like: Tensor) -> Tensor:
    """[T, d] sines in the first half of the coordinates, cosines in the second, wavelengths 2 pi to 20000 pi."""
    rate = torch.exp(torch.arange(d // 2, device=like.device) * (-math.log(10_000.0) / (d // 2)))
    angle = torch.arange(T, device=like.device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)
