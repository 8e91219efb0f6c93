"""Drawings of the theory: `ckda theory show LABEL` looks a label up in :data:`DRAWINGS` and calls the function.

A module that has something to draw adds `DRAWINGS[label] = function`; the function takes the path of the picture.
matplotlib is imported inside, so that registering costs nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckda import transition
from ckda.theory.exact import field
from ckda.theory.factor import factor_orthogonal

__all__ = ["DRAWINGS", "alpha_sweep_2d", "beta_alpha_sweep", "cycle_factors", "rotation_window", "save"]

#: label of the paper -> function that writes a picture to a path
DRAWINGS: dict[str, Callable[[Path], None]] = {}


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure and let go of it."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, bbox_inches="tight")
    plt.close(figure)


def planar_spectrum(alpha: torch.Tensor, beta: float, theta: torch.Tensor) -> np.ndarray:
    """[T, 2] complex eigenvalues of (I - beta k k^T) Diag(alpha), k = (cos theta, sin theta) (eq:kda_alpha_rotation).

    Example:
        >>> planar_spectrum(torch.tensor([-1.0, 1.0]), 2.0, torch.tensor([torch.pi / 4])).imag.round()
        array([[ 1., -1.]])
    """
    k = torch.stack([theta.cos(), theta.sin()], -1).double()
    return transition.eigenvalues(alpha.double(), k, beta).numpy()


def _plane(axis: Any, values: np.ndarray, theta: np.ndarray) -> Any:
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    axis.plot(circle.real, circle.imag, color="0.8", linewidth=0.8, zorder=0)
    axis.axhline(0, color="0.9", linewidth=0.6, zorder=0)
    axis.axvline(0, color="0.9", linewidth=0.6, zorder=0)
    dots = axis.scatter(values.real, values.imag, c=np.broadcast_to(theta[:, None], values.shape), s=5, cmap="viridis")
    axis.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=(), yticks=(), aspect="equal")
    return dots


def alpha_sweep_2d(path: Path, alphas: tuple[float, ...] = (1.0, 0.5, 0.0, -0.25, -0.5, -1.0)) -> None:
    """fig:alpha_sweep_2d: eigenvalues at beta = 2 as theta runs; gate Diag(alpha, 1) above, alpha I below."""
    from matplotlib import pyplot as plt

    theta = torch.linspace(0, torch.pi / 2, 121)
    figure, axes = plt.subplots(2, len(alphas), figsize=(1.9 * len(alphas), 4.1), layout="constrained")
    for row, name in enumerate((r"$D=\mathrm{Diag}(\alpha,1)$", r"$D=\alpha I$")):
        axes[row, 0].set_ylabel(name)
        for axis, alpha in zip(axes[row], alphas, strict=True):
            gate = torch.tensor([alpha, 1.0 if row == 0 else alpha])
            dots = _plane(axis, planar_spectrum(gate, 2.0, theta), theta.numpy())
            axis.set_title(rf"$\alpha={alpha:g}$" if row == 0 else "", fontsize=10)
    figure.colorbar(dots, ax=axes, label=r"$\theta$", shrink=0.7)
    save(figure, path)


def beta_alpha_sweep(
    path: Path,
    betas: tuple[float, ...] = (0.5, 1.0, 1.25, 1.5, 2.0),
    alphas: tuple[float, ...] = (1.0, 0.5, 0.0, -0.5, -1.0),
) -> None:
    """fig:beta_alpha_sweep: eigenvalues for gate Diag(alpha, 1) as theta runs; rows beta, columns alpha."""
    from matplotlib import pyplot as plt

    theta = torch.linspace(0, torch.pi / 2, 121)
    size = (1.7 * len(alphas) + 0.8, 1.7 * len(betas))
    figure, axes = plt.subplots(len(betas), len(alphas), figsize=size, layout="constrained")
    for line, beta in zip(axes, betas, strict=True):
        line[0].set_ylabel(rf"$\beta={beta:g}$")
        for axis, alpha in zip(line, alphas, strict=True):
            dots = _plane(axis, planar_spectrum(torch.tensor([alpha, 1.0]), beta, theta), theta.numpy())
    for axis, alpha in zip(axes[0], alphas, strict=True):
        axis.set_title(rf"$\alpha={alpha:g}$", fontsize=10)
    figure.colorbar(dots, ax=axes, label=r"$\theta$", shrink=0.6)
    save(figure, path)


def rotation_window(path: Path) -> None:
    """The window of prop:CKDA-canonical: rotation angle of the block over (theta, beta), blank where it is real."""
    from matplotlib import pyplot as plt

    theta, beta = torch.meshgrid(torch.linspace(0, torch.pi / 2, 241), torch.linspace(0, 2, 241), indexing="xy")
    k = torch.stack([theta.cos(), theta.sin()], -1).double()
    form = transition.sign_magnitude(torch.tensor([-1.0, 1.0], dtype=torch.float64), k, beta.double())
    angle = np.where(form.rotates.numpy(), form.angle.numpy(), np.nan)
    figure, axis = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
    shown = axis.pcolormesh(theta.numpy(), beta.numpy(), angle, cmap="viridis", vmin=0, vmax=np.pi)
    edge = (beta * (2 * theta).cos()) ** 2 - 4 * (beta - 1)
    axis.contour(theta.numpy(), beta.numpy(), edge.numpy(), levels=[0.0], colors="black", linewidths=0.8)
    axis.set(xlabel=r"$\theta$, angle of $k$ from the negative gates", ylabel=r"$\beta$")
    axis.set_title(r"$\beta^2\cos^2 2\theta<4(\beta-1)$: the block rotates", fontsize=10)
    figure.colorbar(shown, label="rotation angle")
    save(figure, path)


def cycle_factors(path: Path, n: int = 5) -> None:
    """An n-cycle and its n - 1 CKDA factors, the fewest possible (prop:CKDA-factorization)."""
    from matplotlib import pyplot as plt

    F = field()
    cycle = F.permutation([(i + 1) % n for i in range(n)])
    panels = [(f"{n}-cycle", cycle.float())]
    panels += [(f"factor {j + 1}", F.ckda(*f).float()) for j, f in enumerate(factor_orthogonal(cycle))]
    figure, axes = plt.subplots(1, n, figsize=(1.8 * n, 2.1), layout="constrained")
    for axis, (name, A) in zip(axes, panels, strict=True):
        shown = axis.imshow(A, cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set_title(name, fontsize=9)
        axis.set(xticks=(), yticks=())
    figure.colorbar(shown, ax=axes, shrink=0.8)
    save(figure, path)


DRAWINGS.update(
    {
        "fig:alpha_sweep_2d": alpha_sweep_2d,
        "fig:beta_alpha_sweep": beta_alpha_sweep,
        "sec:free": alpha_sweep_2d,
        "eq:kda_alpha_rotation": alpha_sweep_2d,
        "thm:complex_eigenvalues": beta_alpha_sweep,
        "prop:CKDA-canonical": rotation_window,
        "prop:CKDA-factorization": cycle_factors,
    }
)
