"""The CKDA transition ``A = (I - beta k k^T) Diag(alpha)``, written once.

Every other part of the library calls these functions: the reference operator loops over :func:`apply`, the theory
builds its groups from :func:`dense`, the analysis reads :func:`eigenvalues` and :func:`sign_magnitude`.

Legend of axes: K key width, V value width, ``...`` any batch axes, broadcast against each other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SignMagnitude", "apply", "dense", "eigenvalues", "sign_magnitude"]


def apply(S: Tensor, alpha: Tensor, erase_key: Tensor, key: Tensor, write_value: Tensor | None = None) -> Tensor:
    """One step of the recurrence, ``(I - key erase_key^T) Diag(alpha) S + key write_value^T`` (paper, eq. of sec. 2).

    CKDA is ``erase_key = beta k``, ``key = k``, ``write_value = beta v``; GDN-2 and RWKV-7 gate the two separately.

    Args:
        S: [..., K, V] state.
        alpha: [..., K] signed gate.
        erase_key: [..., K] what is read out and erased.
        key: [..., K] where it is written.
        write_value: [..., V] what is written, or None for a pure transition.

    Returns:
        [..., K, V] next state, in the promoted dtype of the arguments.

    Example:
        >>> k = torch.tensor([1.0, 1.0]) / 2**0.5
        >>> apply(torch.eye(2), torch.tensor([-1.0, 1.0]), 2 * k, k).round().abs()  # a quarter turn
        tensor([[0., 1.],
                [1., 0.]])
    """
    S = alpha.unsqueeze(-1) * S
    u = -(erase_key.unsqueeze(-2) @ S)
    if write_value is not None:
        u = u + write_value.unsqueeze(-2)
    return S + key.unsqueeze(-1) * u


def dense(alpha: Tensor, k: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    """The matrix ``(I - beta k k^T) Diag(alpha)`` (eq:kda_alpha_rotation is its planar case).

    Args:
        alpha: [..., K] signed gate.
        k: [..., K] key, taken literally (not normalised).
        beta: [...] learning rate.

    Returns:
        [..., K, K].

    Example:
        >>> dense(torch.tensor([-1.0, 1.0]), torch.tensor([0.6, 0.8]), 2.0)
        tensor([[-0.2800, -0.9600],
                [ 0.9600, -0.2800]])
    """
    beta = torch.as_tensor(beta, dtype=k.dtype, device=k.device)
    shape = torch.broadcast_shapes(alpha.shape, k.shape, (*beta.shape, 1))
    eye = torch.eye(shape[-1], dtype=k.dtype, device=k.device).expand(*shape, shape[-1])
    return apply(eye, alpha, beta.unsqueeze(-1) * k, k)


def eigenvalues(alpha: Tensor, k: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    """Eigenvalues of the transition: at most one of them is a non-real pair (thm:complex_eigenvalues).

    Args:
        alpha, k, beta: as in :func:`dense`.

    Returns:
        [..., K] complex; half precision is computed in float32.

    Example:
        >>> k = torch.tensor([1.0, 1.0], dtype=torch.float64) / 2**0.5
        >>> sorted(eigenvalues(torch.tensor([-1.0, 1.0], dtype=torch.float64), k, 2.0).imag.round().tolist())
        [-1.0, 1.0]
    """
    A = dense(alpha, k, beta)
    return torch.linalg.eigvals(A.float() if A.dtype in (torch.bfloat16, torch.float16) else A)


class SignMagnitude(NamedTuple):
    """The factors of ``A = A_tilde Diag(|alpha|)``, ``A_tilde = (I - beta k k^T) Diag(sign)``."""

    sign: Tensor  #: [..., K] of +1/-1, +1 at zero
    magnitude: Tensor  #: [..., K] = |alpha|
    theta: Tensor  #: [...] angle of k from the coordinates that sign flips, in [0, pi/2]
    block: Tensor  #: [..., 2, 2] = B(beta, theta), the one non-trivial block of A_tilde
    angle: Tensor  #: [...] rotation angle: the argument of B's eigenvalues where they are non-real, else 0
    rotates: Tensor  #: [...] bool: B has a non-real pair, beta^2 cos^2(2 theta) < 4 (beta - 1)


def sign_magnitude(alpha: Tensor, k: Tensor, beta: Tensor | float = 1.0) -> SignMagnitude:
    """Sign-magnitude form of the transition (prop:CKDA-canonical).

    The block acts on span{k_-, k_+}, the parts of the unit key on the negative and on the positive gates; on the rest
    A_tilde is the sign itself. At beta = 2 the block is the rotation by 2 theta.

    Args:
        alpha, k, beta: as in :func:`dense`; k is a unit vector.

    Example:
        >>> k = torch.tensor([1.0, 1.0]) / 2**0.5
        >>> form = sign_magnitude(torch.tensor([-1.0, 1.0]), k, 2.0)
        >>> round(float(form.angle / torch.pi), 4), bool(form.rotates)
        (0.5, True)
    """
    beta = torch.as_tensor(beta, dtype=k.dtype, device=k.device)
    alpha, k = torch.broadcast_tensors(alpha, k)
    sign = torch.where(alpha < 0, -1.0, 1.0).to(alpha.dtype)
    cos = (k * (sign < 0)).norm(dim=-1)
    sin = (k * (sign > 0)).norm(dim=-1)
    theta, beta = torch.broadcast_tensors(torch.atan2(sin, cos), beta)
    cos, sin = theta.cos(), theta.sin()
    row_minus = torch.stack([beta * cos**2 - 1, -beta * sin * cos], -1)
    row_plus = torch.stack([beta * sin * cos, 1 - beta * sin**2], -1)
    # trace and determinant of the block: beta cos(2 theta), beta - 1; cos(2 theta) as a product keeps its digits near pi/4
    half_trace = beta * (cos - sin) * (cos + sin) / 2
    discriminant = half_trace**2 - (beta - 1)
    mixed = ((sign < 0) & (k != 0)).any(-1) & ((sign > 0) & (k != 0)).any(-1)
    rotates = mixed & (discriminant < 0)
    angle = torch.where(rotates, torch.atan2((-discriminant).clamp_min(0).sqrt(), half_trace), 0.0)
    return SignMagnitude(sign, alpha.abs(), theta, torch.stack([row_minus, row_plus], -2), angle, rotates)
