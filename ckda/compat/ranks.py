"""FLA's context parallelism as ours: who has which tokens, and where all ranks' sequences begin."""

from typing import Any

import torch
from torch import Tensor

from ckda.ops.context import Context

__all__ = ["from_fla"]


def from_fla(cp_context: Any, num_tokens: int, device: torch.device) -> tuple[Context, Tensor]:
    """Our context, and the `cu_seqlens` of all ranks, from FLA's `FLACPContext` with this rank's sequences alone.

    FLA's layouts are ours: contiguous, or "zigzag" with pieces r and 2 W - 1 - r. Every rank marks the tokens that begin a
    sequence, and the marks are gathered: one more exchange of a byte a token, and the number of sequences is read back.
    Before 0.6 FLA's context had no layout: parts were contiguous.
    """
    if cp_context.group is None:
        raise ValueError("cp_context has no group; it must name the ranks that share the time axis")
    own = cp_context.cu_seqlens
    if own is None:
        raise ValueError("cp_context has no cu_seqlens; build_cp_context makes it with those of all ranks")
    if own.device.type == "cpu" and own[-1] != num_tokens:
        raise ValueError(f"cp_context is for {own[-1]} tokens on this rank; q has {num_tokens}")
    zigzag = getattr(cp_context, "layout", "contiguous") == "zigzag"
    context = Context(cp_context.group, zigzag)
    earlier = cp_context.pre_num_ranks_by_part if zigzag else (cp_context.pre_num_ranks,)
    begins = torch.zeros(1, num_tokens, dtype=torch.uint8, device=device)
    begins[0, own[:-1].long()] = 1
    for piece, ranks in enumerate(earlier):  # a piece's first sequence may have begun on another rank
        begins[0, piece * context.piece_length(num_tokens)] = int(ranks == 0)
    everywhere = context.whole(begins)[0]
    end = torch.full((1,), everywhere.numel(), device=device)
    return context, torch.cat([everywhere.nonzero()[:, 0], end])
