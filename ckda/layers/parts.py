"""Parts that sequence layers share: the short causal convolution and the gated norm of the heads' outputs."""

import torch
from torch import Tensor, nn

from ckda.layers.convolution import has_kernel, position_in_sequence, short_convolution, torch_forward
from ckda.layers.gated_norm import gated_norm, torch_gated_norm

__all__ = ["HeadNorm", "ShortConvolution", "autocast_dtype", "position_in_sequence"]


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over time without bias: ``y_t = sum_s weight[:, s] x_{t-s}``, s = 0 ... size - 1.

    Example:
        >>> conv = ShortConvolution(3, 4)
        >>> x = torch.randn(2, 7, 3)
        >>> y, past = conv(x[:, :5])
        >>> z, _ = conv(x[:, 5:], past)
        >>> torch.allclose(torch.cat([y, z], 1), conv(x)[0], atol=1e-6)
        True
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-(size**-0.5), size**-0.5))

    def forward(
        self, x: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None, *, activate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, D] after `past` [B, size - 1, D] (zeros if None); returns y [B, T, D] and the new past.

        With cu_seqlens nothing crosses from one packed sequence into the next; `activate`: y is the SiLU of the convolution.
        The output keeps x's dtype: under autocast that is the projections', and the operator behind is spared wider inputs
        than it needs.
        """
        if has_kernel(x) and (past is None or not past.requires_grad):
            y = short_convolution(x, self.weight, past, cu_seqlens, activate)
        else:
            y = torch_forward(x, self.weight, past, cu_seqlens, activate)
        return y, self._last(x, past)

    def _last(self, x: Tensor, past: Tensor | None) -> Tensor:
        """[B, size - 1, D] the last tokens of `past` and x."""
        B, T, D = x.shape
        if self.size - 1 <= T:
            return x[:, T - self.size + 1 :]
        return torch.cat([x.new_zeros(B, self.size - 1, D) if past is None else past, x], 1)[:, T:]


class HeadNorm(nn.Module):
    """RMSNorm of each head's output, times the sigmoid of an output gate where there is one. The norm is in float32.

    Example:
        >>> HeadNorm(4)(torch.full((1, 4), 3.0)).round(decimals=3)
        tensor([[1., 1., 1., 1.]], grad_fn=<RoundBackward1>)
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """o and gate [..., V]."""
        if o.is_cuda and not torch.compiler.is_compiling():  # elsewhere a compiler, or nothing, makes one kernel of it
            return gated_norm(o, gate, self.weight, self.eps)
        return torch_gated_norm(o, gate, self.weight, self.eps)


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
