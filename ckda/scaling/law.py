"""The loss as a function of size and data, and the compute-optimal split: closed forms on plain arrays.

The law is the Skaling form of sec:scaling-methodology with the chained-cell offset c,

    L(N, D) = E + (A N^-alpha + B D^-beta)^k + c [chained],

and Chinchilla's is its case k = 1. Seven parameters, always in the order of :data:`PARAMETERS`; A and B are kept as
logarithms, because that is how they are sampled, fitted and averaged.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FLOPS_PER_TOKEN", "FORMS", "PARAMETERS", "compute", "optimal_allocation", "optimal_loss", "skaling_loss"]

Array = NDArray[np.float64]

#: the order of a parameter vector
PARAMETERS = ("E", "log_A", "alpha", "log_B", "beta", "k", "c")

#: form -> the parameters it fixes
FORMS: dict[str, dict[str, float]] = {"skaling": {}, "chinchilla": {"k": 1.0}}

#: training FLOPs per token and parameter: forward 2, backward 4
FLOPS_PER_TOKEN = 6.0


def skaling_loss(theta: ArrayLike, N: ArrayLike, D: ArrayLike, chained: ArrayLike = 0.0) -> Array:
    """L(N, D) of sec:scaling-methodology; `theta` [..., 7] ordered as :data:`PARAMETERS`, the rest broadcast to [...].

    Example:
        >>> theta = [1.2, np.log(2.7e4), 0.52, np.log(1.3e4), 0.42, 0.44, 0.01]
        >>> print(skaling_loss(theta, 1.7e9, 50e9).round(4), skaling_loss(theta, 1.7e9, 50e9, chained=1).round(4))
        2.1287 2.1387
    """
    E, log_A, alpha, log_B, beta, k, c = np.moveaxis(np.asarray(theta, float), -1, 0)
    N, D = np.asarray(N, float), np.asarray(D, float)
    u = np.logaddexp(log_A - alpha * np.log(N), log_B - beta * np.log(D))  # log(A N^-alpha + B D^-beta)
    return E + np.exp(k * u) + c * np.asarray(chained, float)


def compute(N: ArrayLike, D: ArrayLike) -> Array:
    """Training FLOPs of N parameters on D tokens, 6 N D.

    Example:
        >>> print(f"{compute(1e9, 2e10):.1e}")
        1.2e+20
    """
    return FLOPS_PER_TOKEN * np.asarray(N, float) * np.asarray(D, float)


def optimal_allocation(theta: ArrayLike, C: ArrayLike) -> tuple[Array, Array]:
    """The N and D with the least loss among 6 N D = C; `theta` [..., 7], `C` [...].

    Where the loss is least both terms fall at the same rate, alpha A N^-alpha = beta B D^-beta. The outer power k and E
    do not move that point, so this is Chinchilla's split: N = G (C/6)^(beta/(alpha+beta)),
    G = (alpha A / (beta B))^(1/(alpha+beta)).

    Example:
        >>> theta = [1.2, np.log(2.7e4), 0.52, np.log(1.3e4), 0.42, 0.44, 0.0]
        >>> N, D = optimal_allocation(theta, 1e21)
        >>> print(f"{N:.3g} parameters, {D:.3g} tokens")
        2.96e+09 parameters, 5.63e+10 tokens
        >>> bool(skaling_loss(theta, N, D) < skaling_loss(theta, 1.1 * N, D / 1.1))
        True
    """
    _, log_A, alpha, log_B, beta, _, _ = np.moveaxis(np.asarray(theta, float), -1, 0)
    if np.any(alpha <= 0) or np.any(beta <= 0):
        raise ValueError("no compute-optimal point: alpha and beta must be positive")
    log_ND = np.log(np.asarray(C, float) / FLOPS_PER_TOKEN)
    log_G = (np.log(alpha / beta) + log_A - log_B) / (alpha + beta)
    log_N = log_G + beta / (alpha + beta) * log_ND
    return np.exp(log_N), np.exp(log_ND - log_N)


def optimal_loss(theta: ArrayLike, C: ArrayLike) -> Array:
    """The loss on the compute-optimal frontier (a run of its own: no chained offset).

    Example:
        >>> theta = [1.2, np.log(2.7e4), 0.52, np.log(1.3e4), 0.42, 0.44, 0.0]
        >>> print(optimal_loss(theta, [1e20, 1e21]).round(3))
        [2.294 2.064]
    """
    return skaling_loss(theta, *optimal_allocation(theta, C))


def readable(theta: ArrayLike) -> dict[str, float]:
    """A parameter vector [7] as the paper prints it: A and B themselves, not their logarithms."""
    values: Mapping[str, Any] = dict(zip(PARAMETERS, np.asarray(theta, float).tolist(), strict=True))
    return {name.removeprefix("log_"): float(np.exp(v)) if name.startswith("log_") else v for name, v in values.items()}
