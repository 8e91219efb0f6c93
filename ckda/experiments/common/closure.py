"""Equal meaning, equal state: how far what a model reads from its state is from a function of what the state should mean."""

import torch
from torch import Tensor

__all__ = ["closure"]


def closure(o: Tensor, label: Tensor, num_labels: int) -> Tensor:
    """[R] the variance of o [R, B, T, H, V] among steps of equal label [R, B, T], over its energy; mean over heads.

    Labels are the phase of a periodic signal, or a pair of input and product in a word problem. It is zero exactly where
    each head's readout is a function of the label: then equal states stay equal, for any length.

    Example:
        >>> label = torch.arange(8).view(1, 1, 8) % 4
        >>> o = torch.randn(4, 2, 3)[label]
        >>> bool(closure(o, label, 4) < 1e-12), bool(closure(o * torch.arange(8).view(8, 1, 1), label, 4) > 0.01)
        (True, True)
    """
    R, _, _, H, V = o.shape
    flat = o.reshape(-1, H * V)  # [R * N, H * V]
    place = (label.reshape(R, -1) + num_labels * torch.arange(R, device=o.device)[:, None]).flatten()
    count = o.new_zeros(R * num_labels).index_add(0, place, torch.ones_like(flat[:, 0]))
    total = o.new_zeros(R * num_labels, H * V).index_add(0, place, flat)
    mean = total / count.clamp_min(1)[:, None]
    inside = (flat - mean.index_select(0, place)).square().view(R, -1, H, V).sum((1, 3))
    return (inside / (flat.square().view(R, -1, H, V).sum((1, 3)) + 1e-12)).mean(-1)
