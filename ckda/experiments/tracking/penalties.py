"""Letters that act exactly: how far the maps of the input symbols are from those of a finite group."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Inexactness", "check_penalties", "inexactness", "relations"]

#: rotations taken so often are looked at: all that S4, A5 and their double covers have
_POWERS = (1, 2, 3, 4, 5, 6, 8, 10)
_NEAR = 0.2  # of the state's energy: a turn by less than 26 degrees counts as none
_DRIFT = 10.0  # its errors add up from letter to letter
_SMALL = 1e-3
_LETTERS = 32  # after which the states are looked at
_RIDGE = 1e-5
_ITERATIONS = 24


class Inexactness(NamedTuple):
    """How far the letters' maps of each head's state, ``S -> A_x S + b_x``, are from an exact action, [R, H] each.

    unturned, drift and shift are relative to the energy of the state about its mean.
    """

    #: Letters x and y in turn, as often as first brings the state near to where it was, bring it there exactly: ``(A_x A_y)^d = I``
    #: on the states, d up to 10. Every finite group of small orders keeps that: a representation of the letters' group, one up to
    #: sign, or the quaternions' S -> q S q (cor:a5-four), which is none. Pairs that come near at no such d are left alone.
    unturned: Tensor
    near: Tensor  #: the share of pairs that come near: 1 where the head acts like a finite group, 0 where it forgets
    #: The maps have a common fixed point C, ``b_x = C - A_x C``: then S - C is only turned, and nothing that is written adds up.
    drift: Tensor
    #: The mean state has settled after 16 letters: what comes later is nothing new to the readout.
    shift: Tensor


def inexactness(A: Tensor, b: Tensor, start: Tensor, pairs: Tensor) -> Inexactness:
    """See :class:`Inexactness`.

    Args:
        A: [R, n, H, K, K] the transition of each letter. b: [R, n, H, K, V] what it writes.
        start: [R, H, K, V] the state that words begin from. pairs: [2, R or 1, number] letters
            x and y.

    Example:
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> A = torch.stack([torch.linalg.matrix_power(turn, i) for i in range(4)]).view(1, 4, 1, 2, 2)  # Z4
        >>> b = (torch.eye(2) - A) @ torch.ones(2, 3)  # about a point that is not the origin
        >>> start, pairs = torch.zeros(1, 1, 2, 3), torch.tensor([[0, 1, 1], [1, 1, 2]]).unsqueeze(1)
        >>> [[f"{float(error):.3f}" for error in inexactness(*maps, start, pairs)] for maps in ((A, b), (0.99 * A, b))]
        [['0.000', '1.000', '0.000', '0.000'], ['0.004', '1.000', '0.000', '0.000']]
    """
    with torch.no_grad():
        spread = _covariance(A, b, start)
        energy = spread.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-12  # [R, H]
        C = _fixed_point(A, b).unsqueeze(1)
    unturned, near = _unturned(A, spread / energy[..., None, None], pairs)
    drift = (b - C + A @ C).square().sum((-2, -1)).mean(1) / energy
    return Inexactness(unturned, near, drift, _shift(A, b, start) / energy)


def relations(A: Tensor, b: Tensor, start: Tensor, pairs: Tensor, sharp: bool = False) -> Tensor:
    """[R] the sum of what :func:`inexactness` finds, mean over heads.

    The drift counts tenfold, and by the share of pairs that are near: heads that forget may write what they like.

    Args:
        sharp: log(1 + error / 0.001) of each head instead: those that are nearly exact are pulled hardest, and those that never
            will be do not drown them.
    """
    x = inexactness(A, b, start, pairs)
    error = x.unturned + _DRIFT * x.near * x.drift + x.shift
    return (torch.log1p(error / _SMALL) if sharp else error).mean(-1)


def _unturned(A: Tensor, spread: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[R, H] the mean over pairs of the error at the first power that is near, and the share of pairs that have one."""
    R, n = A.shape[:2]
    own = pairs + n * torch.arange(R, device=A.device)[:, None]  # places along both axes at once
    x, y = (A.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, (R, -1)) for place in own)
    power = {1: x @ y}
    for d in _POWERS[1:]:
        power[d] = power[d // 2] @ power[d - d // 2]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    errors = torch.stack([((M - eye) @ spread.unsqueeze(1) * (M - eye)).sum((-2, -1)) for M in power.values()])
    near = (errors.detach() < _NEAR).to(errors.dtype)
    first = near * (near.cumsum(0) == 1)  # [powers, R, number, H]
    return (first * errors).sum(0).mean(1), first.sum(0).mean(1)


def _covariance(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """[R, H, K, K] of the states after words of 32 letters, summed over values."""
    mean, square = start, start @ start.mT
    for _ in range(_LETTERS):
        Am = A @ mean.unsqueeze(1)
        cross = Am @ b.mT
        square = (A @ square.unsqueeze(1) @ A.mT + cross + cross.mT + b @ b.mT).mean(1)
        mean = (Am + b).mean(1)
    return square - mean @ mean.mT


def _fixed_point(A: Tensor, b: Tensor) -> Tensor:
    """C [R, H, K, V] with the least sum of ``|b_x - (C - A_x C)|^2``, which then does not change with C to first order.

    The normal equations are solved by Newton's and Schulz' iteration: products alone, as a recorded update needs it.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    left = eye - A
    scale = left.square().sum((-2, -1)).mean(1)[..., None, None] + 1e-12
    N = (left.mT @ left).mean(1) / scale + _RIDGE * eye  # eigenvalues from the ridge to 1
    inverse = eye.expand_as(N)
    for _ in range(_ITERATIONS):
        inverse = inverse @ (2 * eye - N @ inverse)
    return inverse @ (left.mT @ b).mean(1) / scale


def _shift(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """[R, H] the squared distance of the mean state after 16 letters from that after 512."""
    A, b = A.mean(1), b.mean(1)
    for _ in range(4):
        A, b = A @ A, A @ b + b
    early = A @ start + b
    for _ in range(5):
        A, b = A @ A, A @ b + b
    return (A @ start + b - early).square().sum((-2, -1))


_MAPS = ("A", "b", "start")


def check_penalties(model: Any, penalties: Iterable[str], task: Any) -> None:
    """ValueError where a recipe's penalties look at something that this mixer does not have."""
    if not hasattr(model.mixer, "read"):
        raise ValueError("the recipe has penalties, but this mixer has no recurrent state to look at")
    seen = model.symbols()
    needs = {"closure": (), "defect": ("alpha", "beta"), "homomorphism": ("A",), "relations": _MAPS}
    needs |= {"sharp": _MAPS, "sampled": _MAPS}
    for name in penalties:
        missing = [part for part in needs[name] if part not in seen]
        if missing:
            raise ValueError(
                f"the recipe's penalty {name!r} needs {', '.join(missing)} of the transition; this mixer has none"
            )
        if name == "homomorphism" and task.meaning:
            raise ValueError("the recipe's penalty 'homomorphism' needs one token for each element")
