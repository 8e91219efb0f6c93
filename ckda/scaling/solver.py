"""Huber least squares from many starts at once: a Levenberg-Marquardt trust region over a whole batch of problems.

A batch holds R problems of G arms with up to M cells each. Starts and bootstrap replicates are both just members of the
batch: a replicate is the same table under integer weights. Axes: R problems, G arms, M cells, P parameters.

Coordinates inside: log N and log D are centred, so that the prefactors stop mimicking the exponents, and k is log k,
so that it stays positive. A parameter is free in every arm, shared by the arms of a problem, or fixed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .law import PARAMETERS

__all__ = ["Problem", "Roles", "solve"]

Array = NDArray[np.float64]
_E, _A, _ALPHA, _B, _BETA, _K, _C = range(len(PARAMETERS))
_DAMPING_START, _DAMPING_LEAST, _DAMPING_MOST = 1e-2, 1e-12, 1e12
_LARGEST_LOG = 50.0  # exp beyond this is a runaway trial step, refused by its cost
_LARGEST_LOG_K = 20.0  # and so is a k beyond e^20 or below e^-20


@dataclass(frozen=True)
class Roles:
    """Which of :data:`PARAMETERS` are free in every arm and which are shared; all others keep their start's value."""

    free: tuple[int, ...]
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """The table of G arms, [G, M] each; cells beyond an arm's own have weight 0."""

    log_N: Array
    log_D: Array
    loss: Array
    chained: Array
    weight: Array  # [G, M]; 0 where there is no cell
    delta: float  # the Huber scale, in nats

    @property
    def centre(self) -> tuple[float, float]:
        """Weighted means of log N and log D."""
        total = self.weight.sum()
        return float((self.weight * self.log_N).sum() / total), float((self.weight * self.log_D).sum() / total)


def solve(
    problem: Problem,
    theta: Array,  # [R, G, 7] starts, in the order of PARAMETERS
    roles: Roles,
    weight: Array | None = None,  # [R, G, M] one weight per cell and problem; None: the problem's own for all
    loss: Array | None = None,  # [R, G, M] losses per problem, where they differ
    *,
    max_steps: int = 300,
    tolerance: float = 1e-9,
) -> tuple[Array, Array]:
    """Descend from every start until its cost stops falling; returns the end points [R, G, 7] and their costs [R].

    The cost is sum w rho(L - loss) with Huber's rho: r^2/2 up to `delta`, linear beyond. A problem leaves the batch
    when four accepted steps in a row improve its cost by less than `tolerance` of it, or when no damping finds a
    better point. All in float64.

    Example:
        >>> from .law import skaling_loss
        >>> N, D = np.meshgrid([1e8, 3e8, 1e9, 3e9], [1e9, 1e10, 1e11])
        >>> true = np.array([1.2, np.log(2e4), 0.5, np.log(1e4), 0.4, 0.45, 0.0])
        >>> row = lambda values: np.ravel(values)[None]
        >>> loss = row(skaling_loss(true, N, D))
        >>> problem = Problem(row(np.log(N)), row(np.log(D)), loss, 0 * loss, 1 + 0 * loss, delta=0.01)
        >>> start = true + [0.3, 1.0, 0.1, -1.0, 0.1, 0.2, 0.0]
        >>> theta, cost = solve(problem, start[None, None], Roles(free=(0, 1, 2, 3, 4, 5)))
        >>> bool(np.allclose(theta[0, 0], true, atol=1e-4))
        True
    """
    x = _inward(theta, problem.centre)
    weight = np.broadcast_to(problem.weight if weight is None else weight, (len(x), *problem.weight.shape))
    loss = np.broadcast_to(problem.loss if loss is None else loss, weight.shape)
    cost = np.full(len(x), np.inf)
    state = _State(problem, x.copy(), weight, loss, roles)
    alive = np.arange(len(x))
    for _ in range(max_steps):
        done = state.step(tolerance)
        if done.any():
            x[alive[done]], cost[alive[done]] = state.x[done], state.cost[done]
            alive = alive[~done]
            state.keep(~done)
        if not len(alive):
            break
    x[alive], cost[alive] = state.x, state.cost
    return _outward(x, problem.centre), cost


class _State:
    """The problems still descending: points, costs, linearisations and dampings."""

    def __init__(self, problem: Problem, x: Array, weight: Array, loss: Array, roles: Roles):
        self.problem, self.x, self.weight, self.loss, self.roles = problem, x, weight, loss, roles
        mean_N, mean_D = problem.centre
        self.log_N, self.log_D = problem.log_N - mean_N, problem.log_D - mean_D
        self.damping = np.full(len(x), _DAMPING_START)
        self.idle = np.zeros(len(x), int)
        self.residual, self.cost = self._evaluate(x)

    def keep(self, mask: NDArray[np.bool_]) -> None:
        for name in ("x", "weight", "loss", "damping", "idle", "residual", "cost"):
            setattr(self, name, getattr(self, name)[mask])

    def _evaluate(self, x: Array) -> tuple[Array, Array]:
        """Residuals [R, G, M] and Huber costs [R]; a point that overflows costs infinity."""
        _, _, u = self._logs(x)
        log_k = np.clip(x[..., _K, None], -_LARGEST_LOG_K, _LARGEST_LOG_K)
        power = np.exp(np.minimum(np.exp(log_k) * u, _LARGEST_LOG))
        residual = x[..., _E, None] + power + x[..., _C, None] * self.problem.chained - self.loss
        size, delta = np.abs(residual), self.problem.delta
        rho = np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))
        cost = (self.weight * rho).sum((-2, -1))
        inside = np.isfinite(cost) & (np.abs(x[..., _K]) <= _LARGEST_LOG_K).all(-1)
        return residual, np.where(inside, cost, np.inf)

    def _logs(self, x: Array) -> tuple[Array, Array, Array]:
        xn = x[..., _A, None] - x[..., _ALPHA, None] * self.log_N
        xd = x[..., _B, None] - x[..., _BETA, None] * self.log_D
        return xn, xd, np.logaddexp(xn, xd)

    def _jacobian(self) -> Array:
        """d residual / d x, [R, G, M, 7]."""
        xn, xd, u = self._logs(self.x)
        k = np.exp(self.x[..., _K, None])
        power = np.exp(np.minimum(k * u, _LARGEST_LOG))
        jacobian = np.empty((*u.shape, len(PARAMETERS)))
        jacobian[..., _E] = 1.0
        jacobian[..., _A] = k * power * np.exp(xn - u)
        jacobian[..., _ALPHA] = -jacobian[..., _A] * self.log_N
        jacobian[..., _B] = k * power * np.exp(xd - u)
        jacobian[..., _BETA] = -jacobian[..., _B] * self.log_D
        jacobian[..., _K] = k * u * power
        jacobian[..., _C] = self.problem.chained
        return jacobian

    def step(self, tolerance: float) -> NDArray[np.bool_]:
        """One damped Gauss-Newton step of every problem where it lowers the cost; returns who is done."""
        jacobian = self._jacobian()
        clipped = np.clip(self.residual, -self.problem.delta, self.problem.delta)  # rho'
        robust = self.weight / np.maximum(np.abs(self.residual) / self.problem.delta, 1.0)  # w rho'(r) / r
        weighted = (jacobian * robust[..., None]).swapaxes(-1, -2)  # [R, G, 7, M]
        hessian = weighted @ jacobian  # [R, G, 7, 7]
        gradient = (jacobian.swapaxes(-1, -2) @ (self.weight * clipped)[..., None])[..., 0]  # [R, G, 7]
        move = _arrow_solve(hessian, gradient, self.damping, self.roles)
        trial = self.x + move
        residual, cost = self._evaluate(trial)
        expected = -(gradient * move).sum((-2, -1)) - 0.5 * np.einsum("rgi,rgij,rgj->r", move, hessian, move)
        better = cost < self.cost
        small = self.cost - cost <= tolerance * self.cost
        self.idle = np.where(better & ~small, 0, self.idle + better)
        ratio = np.where(better, (self.cost - cost) / np.maximum(expected, 1e-300), 0.0)
        shrink = np.maximum(0.1, 1.0 - (2.0 * np.minimum(ratio, 1.0) - 1.0) ** 3)
        self.damping = np.maximum(self.damping * np.where(better, np.minimum(shrink, 2.0), 4.0), _DAMPING_LEAST)
        self.x = np.where(better[:, None, None], trial, self.x)
        self.residual = np.where(better[:, None, None], residual, self.residual)
        self.cost = np.where(better, cost, self.cost)
        return (self.idle >= 4) | (self.damping > _DAMPING_MOST)


def _arrow_solve(hessian: Array, gradient: Array, damping: Array, roles: Roles) -> Array:
    """Solve (H + damping diag H) move = -g for all free and shared parameters; [R, G, 7].

    Arms meet only in the shared parameters, so H is an arrow: eliminate every arm's own block, solve the small Schur
    complement for the shared ones, substitute back.
    """
    f, s = list(roles.free), list(roles.shared)
    own = _damped(hessian[..., f, :][..., f], damping[:, None])  # [R, G, p, p]
    coupling = hessian[..., f, :][..., s]  # [R, G, p, s]
    right = np.concatenate([gradient[..., f, None], coupling], axis=-1)
    solved = _solve(own, right)  # [R, G, p, 1 + s]
    move = np.zeros_like(gradient)
    move[..., f] = -solved[..., 0]
    if s:
        back = coupling.swapaxes(-1, -2) @ solved  # [R, G, s, 1 + s]
        together = _damped(hessian[..., s, :][..., s].sum(1), damping)
        schur = together - back[..., 1:].sum(1)
        shared = -_solve(schur, (gradient[..., s].sum(1) - back[..., 0].sum(1))[..., None])  # [R, s, 1]
        move[..., f] -= (solved[..., 1:] @ shared[:, None])[..., 0]
        move[..., s] = shared[:, None, :, 0]
    return move


def _damped(matrix: Array, damping: Array) -> Array:
    """matrix + damping * its diagonal, with a floor that keeps a parameter without influence where it is."""
    matrix = matrix.copy()
    i = np.arange(matrix.shape[-1])
    diagonal = matrix[..., i, i]
    floor = 1e-14 * diagonal.max(-1, keepdims=True) + 1e-300
    matrix[..., i, i] = diagonal + damping[..., None] * diagonal + floor
    return matrix


def _solve(matrix: Array, right: Array) -> Array:
    """A batched solve in which a singular member gives a zero step instead of an exception for all."""
    try:
        return np.asarray(np.linalg.solve(matrix, right), float)
    except np.linalg.LinAlgError:
        regular = np.linalg.matrix_rank(matrix, hermitian=True) == matrix.shape[-1]
        out = np.zeros_like(right)
        out[regular] = np.linalg.solve(matrix[regular], right[regular])
        return out


def _inward(theta: Array, centre: tuple[float, float]) -> Array:
    x = np.array(theta, float)
    x[..., _A] -= x[..., _ALPHA] * centre[0]
    x[..., _B] -= x[..., _BETA] * centre[1]
    x[..., _K] = np.log(x[..., _K])
    return x


def _outward(x: Array, centre: tuple[float, float]) -> Array:
    theta = x.copy()
    theta[..., _A] += theta[..., _ALPHA] * centre[0]
    theta[..., _B] += theta[..., _BETA] * centre[1]
    theta[..., _K] = np.exp(theta[..., _K])
    return theta
