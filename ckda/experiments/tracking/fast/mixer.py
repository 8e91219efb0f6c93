"""A mixer of trackers on words over a small alphabet: each symbol is projected once, not every token."""

from typing import Any

import torch
from torch import Tensor

from ckda.experiments.tracking.fast.words import MOST_ROWS, complex_kda_words, rows_of
from ckda.layers.attention import autocast_dtype
from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.gated_delta import GatedDeltaNet
from ckda.ops.triton import HAS_TRITON, SHORT, SMALL_HEAD

__all__ = ["is_by_symbol", "read_words", "serves", "write_out_words"]


def is_by_symbol(mixer: Any) -> bool:
    """Whether what a token gives to the recurrence is a function of its symbol alone, and the state begins at zero."""
    return (
        type(mixer) in (ComplexKDA, GatedDeltaNet)
        and not mixer.convolutions
        and mixer.initial_state is None
        and mixer.num_heads == mixer.num_v_heads
    )


def serves(mixer: Any, tokens: Tensor, num_symbols: int) -> bool:
    """Whether :func:`read_words` serves tokens [B, T] of so many symbols: on a GPU, in float32, what its kernels hold."""
    return (
        tokens.is_cuda
        and is_by_symbol(mixer)
        and not torch.compiler.is_compiling()
        and autocast_dtype(tokens.device) is None
        and mixer.backend in ("auto", "triton")
        and mixer.o_proj.weight.dtype == torch.float32
        and HAS_TRITON
        and num_symbols <= MOST_ROWS
        and max(mixer.head_dim, mixer.head_v_dim) <= SMALL_HEAD
        and tokens.shape[-1] <= SHORT
    )


def read_words(mixer: Any, table: Tensor, tokens: Tensor) -> Tensor:
    """``mixer.read`` of the rows table [n, d] at tokens [B, T]: everything before the recurrence is done once a symbol."""
    y, _ = mixer._project(table.unsqueeze(0), {})
    return complex_kda_words(**{name: x.squeeze(0) for name, x in y.items()}, tokens=tokens, **mixer._options())


def write_out_words(mixer: Any, o: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    """``mixer.write_out`` for the rows of a table."""
    return mixer.gated_out(o, None if mixer.g_proj is None else rows_of(mixer.g_proj(table), tokens))
