"""Fits of the law to tables, their bootstrap, and predictions (sec:scaling-methodology)."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .law import FORMS, PARAMETERS, compute, optimal_allocation, optimal_loss, readable, skaling_loss
from .solver import Problem, Roles, solve
from .table import Table, as_table

__all__ = [
    "LEVEL",
    "ArmFit",
    "Cell",
    "Fit",
    "Settings",
    "Summary",
    "bootstrap",
    "draw_starts",
    "fit",
    "interval",
    "problem_of",
    "split",
]

Array = NDArray[np.float64]
Tick = Callable[[], None]
Offset = Literal["none", "arm", "shared"]

_STEPS = 150  # of a random start; what has not arrived by then creeps along a plateau
#: bootstrap replicates refitted at a time
BLOCK = 200
#: the level of the reported intervals
LEVEL = 0.95
_INDEX = {name: i for i, name in enumerate(PARAMETERS)}
_LN10 = float(np.log(10.0))
#: where starts are drawn: prefactors log-uniform, exponents and E uniform, c at one value
_STARTS = {
    "E": (0.8, 2.2),
    "log_A": (1 * _LN10, 5 * _LN10),
    "alpha": (0.1, 0.8),
    "log_B": (2 * _LN10, 6 * _LN10),
    "beta": (0.1, 0.8),
    "k": (0.2, 0.9),
    "c": (-0.01, -0.01),
}


@dataclass(frozen=True)
class Settings:
    """What is fitted, and how.

    form      "skaling" or "chinchilla"
    E         "free" in every arm, "shared" by all, or a number to pin it to
    offset    the chained-cell offset c: "none", "arm" (one each) or "shared"
    hold_out  cells that are predicted but not fitted
    delta     the Huber scale in nats; the paper's 0.01
    starts    random starts per arm; the paper's 600
    """

    form: str = "skaling"
    E: str | float = "free"
    offset: Offset = "arm"
    hold_out: tuple[str, ...] = ()
    delta: float = 0.01
    starts: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}; it may be {' or '.join(FORMS)}")
        if isinstance(self.E, str) and self.E not in ("free", "shared"):
            raise ValueError(f"E is {self.E!r}; it may be 'free', 'shared' or a number")
        if not isinstance(self.E, str) and not np.isfinite(self.E):
            raise ValueError(f"E is {self.E}; a pinned E must be finite")
        if self.offset not in ("none", "arm", "shared"):
            raise ValueError(f"offset is {self.offset!r}; it may be none, arm or shared")
        if not (np.isfinite(self.delta) and self.delta > 0):
            raise ValueError(f"delta is {self.delta}; the Huber scale must be finite and positive")
        if self.starts < 1:
            raise ValueError(f"starts is {self.starts}; at least one is needed")

    @property
    def fixed(self) -> dict[str, float]:
        """Parameters that are not fitted, with their values."""
        pinned = {} if isinstance(self.E, str) else {"E": float(self.E)}
        return {**FORMS[self.form], **pinned, **({"c": 0.0} if self.offset == "none" else {})}

    @property
    def roles(self) -> Roles:
        """Free and shared parameters as the solver wants them."""
        shared = [n for n, on in (("E", self.E == "shared"), ("c", self.offset == "shared")) if on]
        free = [n for n in PARAMETERS if n not in self.fixed and n not in shared]
        return Roles(tuple(_INDEX[n] for n in free), tuple(_INDEX[n] for n in shared))


@dataclass(frozen=True)
class Summary:
    """An estimate with its interval; `low` and `high` are None before :func:`bootstrap`."""

    value: float
    low: float | None = None
    high: float | None = None


class Cell(NamedTuple):
    """One measured cell and what the fitted law says of it."""

    cell: str
    N: float
    D: float
    C: float  #: training FLOPs
    chained: bool
    loss: float
    predicted: float
    held_out: bool

    @property
    def size(self) -> str:
        """The first part of its name."""
        return self.cell.partition("/")[0]


@dataclass(frozen=True)
class ArmFit:
    """One arm: parameters [7], fitted and held-out cells, and the bootstrap replicates [B, 7] where there are any."""

    theta: Array
    train: Table
    held_out: Table | None
    hits: float  # share of the starts that end at the optimum (relative cost 1e-6)
    replicates: Array | None = None

    @property
    def residuals(self) -> Array:
        """Predicted minus measured loss of the fitted cells."""
        return _errors(self.theta, self.train)

    @property
    def rmse(self) -> float:
        """Root mean square of :attr:`residuals`, in nats."""
        return float(np.sqrt(np.mean(self.residuals**2)))

    @property
    def cells(self) -> list[Cell]:
        """The fitted cells, then the held-out ones."""
        found: list[Cell] = []
        for table, held in ((self.train, False), (self.held_out, True)):
            if table is not None:
                C, predicted = compute(table.N, table.D), table.loss + _errors(self.theta, table)
                columns = (table.N, table.D, C, table.chained, table.loss, predicted)
                rows = zip(table.cell, *(column.tolist() for column in columns), strict=True)
                found += [Cell._make((*row, held)) for row in rows]
        return found

    def parameters(self, level: float = LEVEL) -> dict[str, Summary]:
        """Every parameter as the paper prints it (A and B, not their logarithms), with its percentile interval."""
        values = readable(self.theta)
        if self.replicates is None:
            return {name: Summary(value) for name, value in values.items()}
        draws = self.replicates.copy()
        draws[:, [_INDEX["log_A"], _INDEX["log_B"]]] = np.exp(draws[:, [_INDEX["log_A"], _INDEX["log_B"]]])
        low, high = interval(draws, level)
        return {n: Summary(v, float(low[i]), float(high[i])) for i, (n, v) in enumerate(values.items())}

    def held_out_errors(self, level: float = LEVEL) -> dict[str, Summary]:
        """Predicted minus measured loss of the held-out cells, as in tab:scaling-holdout."""
        if self.held_out is None:
            return {}
        errors = _errors(self.theta, self.held_out)
        if self.replicates is None:
            return {cell: Summary(float(e)) for cell, e in zip(self.held_out.cell, errors, strict=True)}
        low, high = interval(_errors(self.replicates[:, None], self.held_out), level)
        rows = zip(self.held_out.cell, errors, low, high, strict=True)
        return {cell: Summary(float(e), float(a), float(b)) for cell, e, a, b in rows}

    def predict(self, N: float, D: float, chained: bool = False, level: float = LEVEL) -> Summary:
        """The loss at N parameters and D tokens, with the percentile interval of the fitted curve there."""
        return self._summary(lambda theta: skaling_loss(theta, N, D, float(chained)), level)

    def frontier(self, C: float, level: float = LEVEL) -> dict[str, Summary]:
        """Compute-optimal N, D and loss at C FLOPs; replicates without an optimum (exponent <= 0) are left out."""
        rows = self.replicates
        kept = None if rows is None else rows[(rows[:, _INDEX["alpha"]] > 0) & (rows[:, _INDEX["beta"]] > 0)]
        arm = replace(self, replicates=kept)
        return {
            "N": arm._summary(lambda theta: optimal_allocation(theta, C)[0], level),
            "D": arm._summary(lambda theta: optimal_allocation(theta, C)[1], level),
            "loss": arm._summary(lambda theta: optimal_loss(theta, C), level),
        }

    def curve(self, budgets: Sequence[float], level: float = LEVEL) -> list[tuple[float, dict[str, Summary]]]:
        """:meth:`frontier` along compute budgets; empty where an exponent is not positive."""
        if self.theta[_INDEX["alpha"]] <= 0 or self.theta[_INDEX["beta"]] <= 0:
            return []
        return [(C, self.frontier(C, level)) for C in budgets]

    def _summary(self, quantity: Callable[[Array], Array], level: float) -> Summary:
        value = float(quantity(self.theta))
        if self.replicates is None:
            return Summary(value)
        low, high = interval(quantity(self.replicates), level)
        return Summary(value, float(low), float(high))


@dataclass(frozen=True)
class Fit:
    """The arms of one fit and the settings they share."""

    settings: Settings
    arms: Mapping[str, ArmFit]
    cost: float  # the sum of the Huber costs

    def budgets(self, points: int = 25) -> list[float]:
        """Compute from the smallest fitted cell to ten times the largest."""
        C = np.concatenate([compute(arm.train.N, arm.train.D) for arm in self.arms.values()])
        return np.geomspace(C.min(), 10 * C.max(), points).tolist()

    def predict(self, N: float, D: float, chained: bool = False, level: float = LEVEL) -> dict[str, Summary]:
        """:meth:`ArmFit.predict` for every arm."""
        return {name: arm.predict(N, D, chained, level) for name, arm in self.arms.items()}


def interval(draws: Array, level: float = LEVEL) -> tuple[Array, Array]:
    """The central percentiles of the replicates along the first axis.

    Example:
        >>> low, high = interval(np.arange(101.0))
        >>> print(low.round(3), high.round(3))
        2.5 97.5
    """
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(draws, [tail, 100.0 - tail], axis=0)
    return low, high


def draw_starts(rng: np.random.Generator, shape: tuple[int, ...], fixed: Mapping[str, float]) -> Array:
    """Random starts [*shape, 7]; fixed parameters have their value.

    Example:
        >>> draw_starts(np.random.default_rng(0), (600, 1), {"E": 0.9638}).shape
        (600, 1, 7)
    """
    theta = np.empty((*shape, len(PARAMETERS)))
    for name, i in _INDEX.items():
        theta[..., i] = fixed[name] if name in fixed else rng.uniform(*_STARTS[name], shape)
    return theta


def fit(data: Any, settings: Settings | None = None, *, tick: Tick | None = None, **options: Any) -> Fit:
    """Fit the law to every arm of a table (sec:scaling-methodology); `options` are fields of :class:`Settings`.

    Arms that share nothing are fitted one by one, each from `starts` random starts. Arms that share E or c are fitted
    one by one first, then together from the joint of their optima, and each is then tried again from fresh starts at
    the shared values until none improves. The best optimum is polished by scipy's trust-region solver.

    Example:
        >>> from .published import paper_table
        >>> ckda = fit(paper_table().arm("CKDA"), hold_out=("1.7B/50BT",), starts=50).arms["CKDA"]
        >>> print(f"E = {ckda.theta[0]:.3f}, RMSE {ckda.rmse:.4f}, k = {ckda.theta[5]:.3f}")
        E = 1.211, RMSE 0.0027, k = 0.440
    """
    settings = replace(settings or Settings(), **options)
    table = as_table(data)
    settings = _drop_idle_offset(table, settings)
    train, held = split(table, settings)
    if settings.roles.shared:
        theta, hits = _fit_together(train, settings, tick)
    else:
        pairs = [_fit_alone(train.arm(a), settings, tick) for a in train.arms]
        theta, hits = np.stack([t for t, _ in pairs]), [h for _, h in pairs]
    arms = {
        arm: ArmFit(theta[i], train.arm(arm), held.arm(arm) if held and arm in held.arms else None, hits[i])
        for i, arm in enumerate(train.arms)
    }
    cost = sum(_huber(a.residuals, settings.delta) for a in arms.values())
    return Fit(settings, arms, cost)


def bootstrap(
    fitted: Fit, replicates: int = 1000, restarts: int = 4, seed: int | None = None, *, tick: Tick | None = None
) -> Fit:
    """Refit resampled cells, drawn with replacement within each arm, and keep the parameters of every replicate.

    Each replicate starts from the full-data optimum and from `restarts` random points; the lowest cost is kept.
    Replicates are refitted in blocks of `BLOCK`, each with a random stream of its own; `tick` is called after each.
    """
    if replicates < 2:
        raise ValueError(f"replicates is {replicates}; an interval needs at least two")
    seed = fitted.settings.seed if seed is None else seed
    names = list(fitted.arms)
    groups = [names] if fitted.settings.roles.shared else [[name] for name in names]
    drawn: dict[str, Array] = {}
    for group in groups:
        tables = [fitted.arms[name].train for name in group]
        settings = fitted.settings if len(tables) > 1 else _drop_idle_offset(tables[0], fitted.settings)
        problem = problem_of(tables, settings)
        best = np.stack([fitted.arms[name].theta for name in group])
        blocks = []
        for b, start in enumerate(range(0, replicates, BLOCK)):
            rng = np.random.default_rng([seed, 1, _stream("+".join(group)), b])
            size = min(BLOCK, replicates - start)
            blocks.append(_replicate_block(problem, best, settings, size, restarts, rng))
            if tick is not None:
                tick()
        theta = np.concatenate(blocks)  # [B, G, 7]
        drawn |= {name: theta[:, i] for i, name in enumerate(group)}
    return replace(fitted, arms={n: replace(a, replicates=drawn[n]) for n, a in fitted.arms.items()})


def _replicate_block(problem: Problem, best: Array, settings: Settings, size: int, restarts: int, rng: Any) -> Array:
    counts = np.stack([_resample(problem.weight, rng) for _ in range(size)])  # [B, G, M]
    starts = draw_starts(rng, (size, 1 + restarts, len(best)), settings.fixed)
    _equalise(starts, settings.roles)
    starts[:, 0] = best
    flat = starts.reshape(-1, *best.shape)
    theta, cost = solve(problem, flat, settings.roles, np.repeat(counts, 1 + restarts, axis=0), max_steps=_STEPS)
    winner = cost.reshape(size, -1).argmin(1)
    ends: Array = theta.reshape(starts.shape)[np.arange(size), winner]
    return ends


def _resample(weight: Array, rng: np.random.Generator) -> Array:
    """How often each cell is drawn, [G, M]: every arm keeps its number of cells."""
    counts = np.zeros_like(weight)
    for g, row in enumerate(weight):
        cells = np.flatnonzero(row)
        counts[g] = np.bincount(rng.choice(cells, len(cells)), minlength=len(row))
    return counts


def _equalise(theta: Array, roles: Roles) -> None:
    """Give all arms of a problem the first arm's value of a shared parameter, in place; theta [..., G, 7]."""
    for i in roles.shared:
        theta[..., i] = theta[..., :1, i]


def _fit_alone(train: Table, settings: Settings, tick: Tick | None) -> tuple[Array, float]:
    """The best optimum of one arm [7], and the share of the starts that reach it."""
    alone = _drop_idle_offset(train, _unshared(settings))
    problem = problem_of([train], alone)
    rng = np.random.default_rng([settings.seed, 0, _stream(train.group[0])])
    starts = draw_starts(rng, (settings.starts, 1), alone.fixed)
    theta, cost = solve(problem, starts, alone.roles, max_steps=_STEPS)
    best = _polish(problem, theta[cost.argmin()], alone)
    if tick is not None:
        tick()
    return best[0], float(np.mean(cost <= cost.min() * (1 + 1e-6)))


def _fit_together(train: Table, settings: Settings, tick: Tick | None) -> tuple[Array, list[float]]:
    tables = [train.arm(name) for name in train.arms]
    pairs = [_fit_alone(t, settings, tick) for t in tables]
    theta, hits = np.stack([t for t, _ in pairs]), [h for _, h in pairs]
    problem, shared = problem_of(tables, settings), list(settings.roles.shared)
    for _ in range(3):
        theta[:, shared] = theta[:, shared].mean(0)
        theta = _polish(problem, solve(problem, theta[None], settings.roles)[0][0], settings)
        held = replace(settings, seed=settings.seed + 1)
        fixed = {PARAMETERS[i]: float(theta[0, i]) for i in shared}
        if not _improve_each(tables, theta, held, fixed):
            break
    return theta, hits


def _improve_each(tables: Sequence[Table], theta: Array, settings: Settings, fixed: Mapping[str, float]) -> bool:
    """Try every arm again from fresh starts with the shared parameters held; True where one found a lower cost."""
    improved = False
    for i, table in enumerate(tables):
        problem = problem_of([table], settings)
        rng = np.random.default_rng([settings.seed, 0, _stream(table.group[0])])
        starts = draw_starts(rng, (settings.starts, 1), {**settings.fixed, **fixed})
        ends, cost = solve(problem, starts, Roles(settings.roles.free), max_steps=_STEPS)
        if cost.min() < _huber(_errors(theta[i], table), settings.delta) * (1 - 1e-6):
            theta[i], improved = ends[cost.argmin(), 0], True
    return improved


def _polish(problem: Problem, theta: Array, settings: Settings) -> Array:
    """scipy's trust-region least squares from the batch's optimum [G, 7]; kept where it is lower still."""
    from scipy.optimize import least_squares  # half a second that only a fit needs

    roles, num_arms = settings.roles, len(theta)
    free, shared = list(roles.free), list(roles.shared)
    mask = problem.weight > 0

    def unpack(x: Array) -> Array:
        full = theta.copy()
        full[:, free] = x[: num_arms * len(free)].reshape(num_arms, -1)
        full[:, shared] = x[num_arms * len(free) :]
        return full

    def residual(x: Array) -> Array:
        predicted = skaling_loss(unpack(x)[:, None], np.exp(problem.log_N), np.exp(problem.log_D), problem.chained)
        return (predicted - problem.loss)[mask]

    start = np.concatenate([theta[:, free].ravel(), theta[0, shared]])
    with np.errstate(over="ignore"):  # a wild trial step is refused by its cost
        result = least_squares(
            residual, start, jac="3-point", method="trf", loss="huber", f_scale=problem.delta, x_scale="jac",
            ftol=1e-14, xtol=1e-14, gtol=1e-14, max_nfev=50,
        )  # fmt: skip
    lower = result.cost < _huber(residual(start), problem.delta)
    return unpack(result.x) if lower else theta


def problem_of(tables: Sequence[Table], settings: Settings) -> Problem:
    """Arms padded to one width; the padding has weight 0 and harmless values."""
    width = max(map(len, tables))

    def pad(columns: list[Array], value: float) -> Array:
        return np.stack([np.pad(c, (0, width - len(c)), constant_values=value) for c in columns])

    return Problem(
        log_N=pad([np.log(t.N) for t in tables], float(np.log(tables[0].N[0]))),
        log_D=pad([np.log(t.D) for t in tables], float(np.log(tables[0].D[0]))),
        loss=pad([t.loss for t in tables], float(tables[0].loss[0])),
        chained=pad([t.chained.astype(float) for t in tables], 0.0),
        weight=pad([np.ones(len(t)) for t in tables], 0.0),
        delta=settings.delta,
    )


def _unshared(settings: Settings) -> Settings:
    """The same fit with every shared parameter free in each arm."""
    E = "free" if settings.E == "shared" else settings.E
    return replace(settings, E=E, offset="arm" if settings.offset == "shared" else settings.offset)


def split(table: Table, settings: Settings) -> tuple[Table, Table | None]:
    """The cells to fit and the held-out ones; a ValueError where the former cannot determine the parameters.

    Example:
        >>> from .published import paper_table
        >>> train, held = split(paper_table(), Settings(hold_out=("1.7B/50BT",)))
        >>> len(train), len(held)
        (174, 6)
    """
    mask = np.zeros(len(table), bool)
    for cell in settings.hold_out:
        mask |= table.match(cell)
    if mask.all():
        raise ValueError("every cell is held out; nothing is left to fit")
    train = table.where(~mask)
    _check_design(train, settings)
    return train, table.where(mask) if mask.any() else None


def _drop_idle_offset(table: Table, settings: Settings) -> Settings:
    """Without a chained cell there is no offset to fit."""
    return settings if table.chained.any() else replace(settings, offset="none")


def _check_design(train: Table, settings: Settings) -> None:
    """Refuse a table that cannot determine the parameters."""
    for arm in train.arms:
        cells = train.arm(arm)
        names = [PARAMETERS[i] for i in _drop_idle_offset(cells, _unshared(settings)).roles.free]
        if len(cells) < len(names):
            raise ValueError(
                f"arm {arm!r} has {len(cells)} cells for {len(names)} parameters ({', '.join(names)}); "
                "add runs, or fix some: a pinned E, offset none, form chinchilla"
            )
        for column, values in (("N", cells.N), ("D", cells.D), ("loss", cells.loss)):
            if len(np.unique(values)) < 2:
                raise ValueError(
                    f"arm {arm!r} has a single value of {column}, {values[0]:g}; no law can be fitted to it"
                )
        if settings.offset == "arm" and settings.E == "free" and cells.chained.all():
            raise ValueError(f"all cells of arm {arm!r} are chained: its offset cannot be told from E; use offset none")
    if settings.offset == "shared" and isinstance(settings.E, str) and train.chained.all():
        raise ValueError("all cells are chained: the offset cannot be told from E; use offset none")


def _errors(theta: Array, table: Table) -> Array:
    return skaling_loss(theta, table.N, table.D, table.chained) - table.loss


def _huber(residual: Array, delta: float) -> float:
    size = np.abs(residual)
    return float(np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta)).sum())


def _stream(name: str) -> int:
    """A number for an arm's name, so that its random stream does not depend on which other arms are fitted."""
    return zlib.crc32(name.encode())
