"""Letters that act like the group: how far the maps of the input symbols are from keeping the group's relations."""

import torch
from torch import Tensor

__all__ = ["drift", "relations", "unturned"]

_ROUNDS = 24  # each at least halves what is left to the fixed point, where letters act by quaternions


def relations(A: Tensor, b: Tensor, pairs: dict[int, Tensor]) -> Tensor:
    """[R] how far the letters' maps of the state, ``S -> A_x S + b_x``, are from an exact action; mean over heads.

    Two things are asked of a head, and their errors added. (1) Letters x and y taken in turn, ord(xy) times, turn nothing:
    ``(A_x A_y)^ord(xy) = I``. Transitions that multiply like the elements keep that, and so do those by quaternions, S -> q S q
    (cor:a5-four), which are no representation of the group. (2) The maps have a common fixed point C, ``b_x = C - A_x C``: then
    S - C is only turned, and nothing that is written adds up.

    A head's error r counts as r / (1 + r): heads that are far off, whose states forget, are hardly pulled.

    Args:
        A: [R, n, H, K, K] the transition of each element. b: [R, n, H, K, V] what it writes.
        pairs: order of xy -> [2, number] such x and y. Of xy and yx, which are conjugate, one is enough.

    Example:
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> A = torch.stack([torch.linalg.matrix_power(turn, i) for i in range(4)]).view(1, 4, 1, 2, 2)  # Z4
        >>> b = (torch.eye(2) - A) @ torch.randn(2, 3)  # about a point that is not the origin
        >>> pairs = {4: torch.tensor([[0, 1], [1, 2]]), 2: torch.tensor([[1], [1]])}
        >>> [bool(relations(*maps, pairs) < 1e-10) for maps in ((A, b), (0.9 * A, b), (A, b + 1))]
        [True, False, False]
    """
    error = unturned(A, pairs) + drift(A, b)
    return (error / (1 + error)).mean(-1)


def unturned(A: Tensor, pairs: dict[int, Tensor]) -> Tensor:
    """[R, H] the mean of ``|(A_x A_y)^ord(xy) - I|_F^2``."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    errors = []
    for order, (x, y) in pairs.items():
        power = _power(A.index_select(1, x) @ A.index_select(1, y), order)
        errors.append((power - eye).square().sum((-2, -1)))
    return torch.cat(errors, 1).mean(1)


def _power(x: Tensor, exponent: int) -> Tensor:
    if exponent == 1:
        return x
    half = _power(x, exponent // 2)
    return half @ half @ x if exponent % 2 else half @ half


def drift(A: Tensor, b: Tensor) -> Tensor:
    """[R, H] ``|b_x - (C - A_x C)|^2`` over the energy of b, with C where the mean of all maps leads to from anywhere.

    C is taken as given: its own gradient vanishes where the maps do have a common fixed point.
    """
    with torch.no_grad():
        A_mean, b_mean = A.mean(1), b.mean(1)
        C = b_mean
        for _ in range(_ROUNDS):
            C = A_mean @ C + b_mean
        C = C.unsqueeze(1)
    return (b - C + A @ C).square().sum((1, 3, 4)) / (b.square().sum((1, 3, 4)) + 1e-12)
