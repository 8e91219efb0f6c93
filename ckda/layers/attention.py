"""Softmax attention for language models: rotary positions, normalised q and k, an output gate, a window, packed sequences.

Legend of axes: B batch, T time, S keys in sight (T without a cache), H heads, D head width, N packed sequences.
"""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from ckda.layers.convolution import position_in_sequence
from ckda.layers.gated_norm import gated_norm
from ckda.ops.context import Context, gathered

__all__ = ["Attention", "RMSNorm", "Sight", "autocast_dtype", "fused_kernel_serves", "rotary", "rotate"]


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, in one kernel each way on a GPU, elsewhere by torch's own operator. The sums are in float32.

    Example:
        >>> RMSNorm(4)(torch.full((4,), 3.0)).detach().round(decimals=3)
        tensor([1., 1., 1., 1.])
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width] in x's dtype."""
        if x.is_cuda and not torch.compiler.is_compiling():  # torch's own backward is several times slower
            return gated_norm(x, None, self.weight, self.eps)
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, 1, head_dim / 2] of the rotary angles of positions [..., T], in float32."""
    rate = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim)
    angle = position.unsqueeze(-1).unsqueeze(-1).float() * rate
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] with coordinates i and i + D/2 turned by the i-th angle.

    Example:
        >>> cos, sin = rotary(torch.tensor([1.0]), 2, 10_000.0)
        >>> rotate(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), cos, sin).flatten().round(decimals=3).tolist()
        [0.5400000214576721, 0.8410000205039978]
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Sight(NamedTuple):
    """What each token may look at, the same for all attention layers of one kind in one pass.

    Token t sees keys up to itself, at most `window` of them, those of its own packed sequence, and no padding.
    """

    mask: Tensor | None = None  #: bool [B or 1, 1, T, S]; None: the plain causal order, or everything for one token
    cu_seqlens: Tensor | None = None  #: [N + 1] for the fused kernel; the mask is None then
    window: int | None = None  #: for the fused kernel
    context: Context | None = None  #: the ranks that share the time axis: keys and values come from all of them

    @staticmethod
    def over_ranks(
        T: int, context: Context, *, device: torch.device, window: int | None = None, cu_seqlens: Tensor | None = None
    ) -> "Sight":
        """The sight of this rank's T tokens on those of all ranks of `context`: a mask [1, 1, T, S].

        Args:
            window, cu_seqlens: as of :meth:`causal`, over the tokens of all ranks.
        """
        key = torch.arange(context.piece_length(T) * context.num_pieces, device=device)  # [S]
        query = context.part(key, 0).unsqueeze(-1)  # [T, 1]
        mask = key <= query
        if window is not None:
            mask = mask & (key > query - window)
        if cu_seqlens is not None:
            start = key - position_in_sequence(cu_seqlens, key.numel())
            mask = mask & (context.part(start, 0).unsqueeze(-1) == start)
        return Sight(mask.unsqueeze(0).unsqueeze(0), context=context)

    @staticmethod
    def causal(
        T: int,
        *,
        device: torch.device,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        padding: Tensor | None = None,
        seen: int = 0,
        first: int = 0,
        fused: bool = False,
    ) -> "Sight":
        """The sight of T tokens.

        Args:
            window: tokens in sight, the token's own included; None: all.
            cu_seqlens: [N + 1] of packed sequences. padding: bool [B, seen + T], False where a key is padding.
            seen: tokens before these, in the cache. first: the oldest of them that is still in it.
            fused: whether the attention kernel for packed sequences will serve.

        Example:
            >>> Sight.causal(3, device=torch.device("cpu"), window=2).mask.int()[0, 0].tolist()
            [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        if window is not None and window >= seen + T:
            window = None
        if padding is None and cu_seqlens is None and window is None and (seen == 0 or T == 1):
            return Sight()
        if fused and padding is None and seen == 0:
            return Sight(None, cu_seqlens, window)
        query = torch.arange(seen, seen + T, device=device).unsqueeze(-1)  # [T, 1]
        key = torch.arange(first, seen + T, device=device)  # [S]
        mask = key <= query
        if window is not None:
            mask = mask & (key > query - window)
        if cu_seqlens is not None:
            start = torch.arange(T, device=device) - position_in_sequence(cu_seqlens, T)
            mask = mask & (start.unsqueeze(-1) == start)
        mask = mask.unsqueeze(0).unsqueeze(0)
        if padding is not None:  # a token sees itself, so that no row is empty
            mask = (mask & padding[:, None, None, first:]) | (key == query)
        return Sight(mask)


class Attention(nn.Module):
    """Causal multi-head attention, [B, T, hidden_size] -> [B, T, hidden_size], no biases.

    Args:
        hidden_size: d. num_heads: H. head_dim: D.
        rope: whether q and k are turned by rotary positions. qk_norm: RMSNorm of q and k per head.
        gated: multiply the output by sigmoid(g_proj(x)), as the paper's hybrids do.
        window: tokens in sight, the token's own included; None: all.

    Example:
        >>> layer = Attention(32, 2, 16, rope=False, gated=True)
        >>> x = torch.randn(1, 6, 32)
        >>> torch.allclose(layer(x)[:, :4], layer(x[:, :4]), atol=1e-6)
        True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        rope: bool = True,
        qk_norm: bool = False,
        gated: bool = False,
        window: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        if rope and head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; it must be even for rotary positions")
        self.num_heads, self.head_dim, self.rope, self.window = num_heads, head_dim, rope, window
        d, width = hidden_size, num_heads * head_dim
        self.q_proj = nn.Linear(d, width, bias=False)
        self.k_proj = nn.Linear(d, width, bias=False)
        self.v_proj = nn.Linear(d, width, bias=False)
        self.g_proj = nn.Linear(d, width, bias=False) if gated else None
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.o_proj = nn.Linear(width, d, bias=False)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        sight: Sight | None = None,
        cache: Any = None,
    ) -> Tensor:
        """x [B, T, d] -> [B, T, d].

        Args:
            angles: cos and sin of :func:`rotary`; None: positions from 0 (10,000 is the base then).
            sight: None: the plain causal order, with the layer's window.
            cache: an object with `update(k, v)` that returns all keys and values [B, H, S, D].
        """
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            if angles is None:
                angles = rotary(torch.arange(x.shape[1], device=x.device), self.head_dim, 10_000.0)
            q, k = rotate(q, *angles), rotate(k, *angles)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if sight is None:
            sight = Sight.causal(x.shape[1], device=x.device, window=self.window)
        o = _attend(q, k, v, sight, cache)
        if self.g_proj is not None:
            o = o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}x{self.head_dim}, rope={self.rope}, window={self.window}"


def _attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, cache: Any) -> Tensor:
    """q, k, v [B, T, H, D] -> [B, T, H * D]."""
    if sight.cu_seqlens is not None or (sight.mask is None and sight.window is not None):
        return _attend_packed(q, k, v, sight)
    if sight.context is not None:
        k, v = gathered(torch.cat([k, v], -1), sight.context).chunk(2, -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if cache is not None:
        k, v = cache.update(k, v)
    plain = sight.mask is None and q.shape[2] > 1
    o = scaled_dot_product_attention(q, k, v, attn_mask=sight.mask, is_causal=plain)
    return o.transpose(1, 2).flatten(2)


# The fused kernel for packed sequences and windows --------------------------------------------------------------------

_varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # a torch without it: a mask serves
    _varlen_attn = None
_HAS_WINDOW = _varlen_attn is not None and "window_size" in signature(_varlen_attn).parameters


def fused_kernel_serves(x: Tensor, head_dim: int, window: int | None = None) -> bool:
    """Whether torch's attention for packed sequences takes such heads for an input like x: memory O(T) then."""
    if _varlen_attn is None or x.device.type != "cuda" or head_dim % 8 or head_dim > 256:
        return False
    dtype = autocast_dtype(x.device) or x.dtype
    return dtype in (torch.bfloat16, torch.float16) and (window is None or _HAS_WINDOW)


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """q, k, v [B, T, H, D] -> [B, T, H * D] by torch's kernel for packed sequences; nothing of size T x T is made.

    The longest length is given as T, which is never too short, so that nothing is read back from the device.
    """
    B, T = q.shape[:2]
    bounds = torch.arange(B + 1, device=q.device) * T if sight.cu_seqlens is None else sight.cu_seqlens
    bounds = bounds.to(torch.int32)
    left = -1 if sight.window is None else sight.window - 1
    options: dict[str, Any] = {"window_size": (left, 0)} if _HAS_WINDOW else {"is_causal": True}
    o = _varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, T, T, **options)
    return o.unflatten(0, (B, T)).flatten(2)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast where it is on for this device, or None.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     autocast_dtype(torch.device("cpu")), autocast_dtype(torch.device("meta"))
        (torch.bfloat16, None)
    """
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None
