"""The fits: what the paper prints, against scipy, shared parameters, coverage, and designs that cannot be fitted."""

import time
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize_scalar

from ckda.scaling import (
    Settings,
    Table,
    bootstrap,
    fit,
    optimal_allocation,
    optimal_loss,
    paper_fits,
    paper_table,
    skaling_loss,
)
from ckda.scaling.fit import draw_starts, problem_of
from ckda.scaling.published import ARMS, HELD_OUT, PINNED_E
from ckda.scaling.reproduce import TREATMENTS, checks, coverage, entries, rounding_spread
from ckda.scaling.solver import Roles, solve

TRUTH = np.array([1.2, np.log(2.5e4), 0.52, np.log(1.3e4), 0.42, 0.44, 0.008])


@pytest.fixture(scope="module")
def isolated():
    return fit(paper_table(), TREATMENTS["isolated"][0])


@pytest.fixture(scope="module")
def pinned():
    return fit(paper_table(), TREATMENTS["pinned"][0], starts=200)


def _synthetic(noise=0.0, seed=0):
    design = paper_table().arm("CKDA")
    loss = skaling_loss(TRUTH, design.N, design.D, design.chained)
    return replace(design, loss=loss + noise * np.random.default_rng(seed).standard_normal(len(loss)))


@pytest.mark.parametrize("arm", ARMS)
def test_isolated_fits_return_the_papers_parameters(isolated, arm):
    """E, alpha, beta, k to 0.002, A and B to 3%, RMSE to 1%, held-out errors to 0.0005."""
    printed, ours = paper_fits()["tab:scaling-holdout-isolated"][arm], isolated.arms[arm]
    values = {name: summary.value for name, summary in ours.parameters().items()}
    for name in ("E", "alpha", "beta", "k"):
        assert abs(values[name] - float(printed[name]["printed"])) <= 0.002, name
    for name in ("A", "B"):
        assert values[name] == pytest.approx(float(printed[name]["printed"]), rel=0.03), name
    assert ours.rmse == pytest.approx(float(printed["rmse"]["printed"]), rel=0.01)
    error = float(paper_fits()["tab:scaling-holdout"][arm]["isolated"]["printed"])
    assert abs(ours.held_out_errors()[HELD_OUT].value - error) <= 0.0005


def test_pinned_fit_with_the_shared_offset_returns_the_printed_digits(pinned):
    """All 42 entries but one: B of KDA + attn is 7.32e3 for 7.33e3, which the rounding of the losses decides."""
    rows = entries(pinned, "pinned")
    assert [(r.arm, r.column) for r in rows if not r.same_digits] == [("KDA + attn 3:1", "B")]
    (odd,) = [r for r in rows if not r.same_digits]
    assert abs(odd.ours - 7330) < 10
    spread = rounding_spread(pinned, draws=50)["KDA + attn 3:1"]["B"]
    assert odd.ours + spread > 7325
    offsets = {float(arm.theta[6]) for arm in pinned.arms.values()}
    assert len(offsets) == 1
    assert offsets.pop() == pytest.approx(0.0088, abs=5e-5)


def test_an_offset_per_arm_misses_the_pinned_table():
    arm = "Transformer++ (QK-norm)"
    own = fit(paper_table().arm(arm), E=PINNED_E, offset="arm", hold_out=(HELD_OUT,), starts=100).arms[arm]
    assert np.exp(own.theta[3]) == pytest.approx(5.86e3, rel=0.002)
    assert float(paper_fits()["tab:scaling-holdout-pinned"][arm]["B"]["printed"]) == 6.38e3


def test_bootstrap_intervals_overlap_the_papers(isolated):
    rows = entries(bootstrap(isolated, 200, restarts=1), "isolated")
    with_interval = [row for row in rows if row.intervals_overlap is not None]
    assert len(with_interval) == 6 * 7
    assert all(row.intervals_overlap for row in with_interval)
    assert all(check.within for check in checks(rows).values())
    # as wide as the paper's, within the scatter of 200 replicates: no interval is trivially wide or narrow
    for row in with_interval:
        low, high = (np.log(v) if row.column in "AB" else v for v in (row.low, row.high))
        theirs = [np.log(v) if row.column in "AB" else v for v in row.paper_interval]
        assert 0.5 < (high - low) / (theirs[1] - theirs[0]) < 2.0, row


def test_600_starts_of_one_arm_take_under_three_seconds():
    table, seconds = paper_table().arm("CKDA"), []
    for _ in range(3):  # the best of three: other work on the machine is not ours to measure
        began = time.perf_counter()
        arm = fit(table, hold_out=(HELD_OUT,), starts=600).arms["CKDA"]
        seconds.append(time.perf_counter() - began)
        if seconds[-1] < 3.0:
            break
    assert min(seconds) < 3.0
    assert arm.hits > 0.3  # the optimum is no lucky find


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scipy steps into overflow from some starts
def test_the_batched_solver_ends_where_scipy_ends():
    """From the same starts scipy's trust region finds no lower cost, and the same lowest one."""
    table = paper_table().arm("KDA")
    settings = Settings(starts=8)
    problem = problem_of([table], settings)
    starts = draw_starts(np.random.default_rng(3), (8, 1), settings.fixed)
    theta, cost = solve(problem, starts, settings.roles)

    def residual(x):
        return np.nan_to_num(skaling_loss(x, table.N, table.D, table.chained) - table.loss, nan=1e6, posinf=1e6)

    ends = [
        least_squares(residual, s[0], loss="huber", f_scale=0.01, x_scale="jac", ftol=1e-12, xtol=1e-12, max_nfev=1000)
        for s in starts
    ]
    best = min(ends, key=lambda end: end.cost)
    assert cost.min() == pytest.approx(best.cost, rel=1e-6)
    assert theta[cost.argmin(), 0] == pytest.approx(best.x, rel=1e-3)


def test_shared_parameters_minimise_the_joint_cost():
    """The arrow-shaped step against a plain optimiser on the joint problem."""
    table = paper_table().arm("KDA", "CKDA")
    joint = fit(table, E="shared", offset="shared", starts=60)
    a, b = (arm.theta for arm in joint.arms.values())
    assert a[0] == b[0]
    assert a[6] == b[6]

    def residual(x):
        left = np.concatenate([x[:1], x[2:7], x[1:2]])
        right = np.concatenate([x[:1], x[7:12], x[1:2]])
        parts = zip((left, right), (table.arm("KDA"), table.arm("CKDA")), strict=True)
        return np.concatenate([skaling_loss(t, c.N, c.D, c.chained) - c.loss for t, c in parts])

    start = np.concatenate([a[[0, 6]], a[1:6], b[1:6]])
    other = least_squares(
        residual, start * 1.02, loss="huber", f_scale=0.01, x_scale="jac", ftol=1e-13, xtol=1e-13, max_nfev=3000
    )
    assert joint.cost <= other.cost * (1 + 1e-6)


def test_a_fixed_parameter_stays_and_weights_count_cells():
    table = paper_table().arm("CKDA")
    settings = Settings(form="chinchilla", E=1.0)
    theta = fit(table, settings, starts=20).arms["CKDA"].theta
    assert (theta[0], theta[5]) == (1.0, 1.0)
    problem = problem_of([table], Settings())
    weight = np.ones((1, 1, 30))
    weight[0, 0, :5] = 2
    doubled = Table.of(
        *(np.concatenate([c, c[:5]]) for c in (table.N, table.D, table.loss)),
        chained=[*table.chained, *table.chained[:5]],
    )
    start, free = TRUTH[None, None], Roles(tuple(range(7)))
    by_weight = solve(problem, start, free, weight)
    by_copy = solve(problem_of([doubled], Settings()), start, free)
    assert by_weight[1] == pytest.approx(by_copy[1], rel=1e-9)


def test_arms_of_different_length_and_an_arm_without_chained_cells():
    full, short = paper_table().arm("KDA"), paper_table().arm("CKDA")
    short = short.where(~short.chained)
    both = Table.of(
        *(np.concatenate(pair) for pair in ((full.N, short.N), (full.D, short.D), (full.loss, short.loss))),
        group=full.group + short.group,
        chained=np.concatenate([full.chained, short.chained]),
    )
    own = fit(both, starts=60)
    assert own.arms["CKDA"].theta[6] == 0.0
    assert own.arms["KDA"].theta == pytest.approx(fit(full, starts=60).arms["KDA"].theta, rel=1e-6)
    joint = fit(both, E=1.0, offset="shared", starts=60)
    alone = fit(full, E=1.0, offset="arm", starts=60)  # only KDA has chained cells, so the shared offset is its own
    assert joint.arms["KDA"].theta == pytest.approx(alone.arms["KDA"].theta, rel=1e-4)


def test_noiseless_data_give_the_parameters_back():
    arm = fit(_synthetic(), starts=60).arms["CKDA"]
    assert arm.theta == pytest.approx(TRUTH, rel=1e-4)
    assert arm.rmse < 1e-7


def test_huber_ignores_one_outlier():
    table = _synthetic(noise=0.0005)
    table.loss[7] += 0.3
    theta = fit(table, starts=60).arms["CKDA"].theta
    assert theta[[2, 4]] == pytest.approx(TRUTH[[2, 4]], abs=0.03)
    squares = fit(table, starts=60, delta=10.0).arms["CKDA"]
    assert np.abs(squares.residuals).min() > 0
    assert squares.rmse < fit(table, starts=60).arms["CKDA"].rmse  # least squares bends towards the outlier


def test_intervals_cover_the_truth_at_the_nominal_rate():
    """100 tables, noise 0.002: 95% and 50% intervals hold the truth as often as they say (3.5 standard errors)."""
    study = coverage(TRUTH, paper_table().arm("CKDA"), noise=0.002, datasets=100, replicates=150)
    for level, shares in study["inside"].items():
        p = float(level)
        for name, share in shares.items():
            assert abs(share - p) <= 3.5 * np.sqrt(p * (1 - p) / 100), (level, name, share)


def test_bootstrap_is_reproducible_and_independent_of_other_arms():
    table = paper_table().arm("KDA", "CKDA")
    one = bootstrap(fit(table, starts=30), 120, restarts=1)
    two = bootstrap(fit(table.arm("CKDA"), starts=30), 120, restarts=1)
    assert np.array_equal(one.arms["CKDA"].replicates, two.arms["CKDA"].replicates)
    other = bootstrap(fit(table.arm("CKDA"), starts=30), 120, restarts=1, seed=1)
    assert not np.array_equal(one.arms["CKDA"].replicates, other.arms["CKDA"].replicates)
    assert len(np.unique(one.arms["CKDA"].replicates[:, 0])) == 120


def test_optimal_allocation_is_the_minimum_on_the_isoflop_line():
    for C in (1e19, 1e22):
        N, D = optimal_allocation(TRUTH, C)
        assert float(6 * N * D) == pytest.approx(C)
        search = minimize_scalar(
            lambda x, C=C: skaling_loss(TRUTH, np.exp(x), C / 6 / np.exp(x)), bracket=(15, 25), tol=1e-10
        )
        assert np.log(N) == pytest.approx(search.x, abs=1e-4)
        assert optimal_loss(TRUTH, C) == pytest.approx(search.fun, abs=1e-10)
    with pytest.raises(ValueError, match="alpha and beta must be positive"):
        optimal_allocation(TRUTH * [1, 1, -1, 1, 1, 1, 1], 1e20)


def test_predictions_carry_intervals_that_widen_with_distance():
    arm = bootstrap(fit(_synthetic(0.002), starts=30), 100, restarts=0).arms["CKDA"]
    near, far = arm.predict(1.7e9, 50e9), arm.predict(1.7e11, 50e11)
    assert near.low < near.value < near.high
    assert far.high - far.low > 3 * (near.high - near.low)
    assert arm.predict(1.7e9, 50e9, chained=True).value - near.value == pytest.approx(arm.theta[6])
    optimum = arm.frontier(1e21)
    assert 6 * optimum["N"].value * optimum["D"].value == pytest.approx(1e21)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: fit(t.where(np.arange(30) % 6 == 0)), "5 cells for 7 parameters"),
        (lambda t: fit(t.where(np.arange(30) < 5)), "5 cells for 6 parameters"),
        (lambda t: fit(t.where(np.arange(30) < 5), form="chinchilla", E=1.0, offset="none"), "single value of N"),
        (lambda t: fit(t.where(t.chained)), "are chained: its offset cannot be told from E"),
        (lambda t: fit(t.where(t.chained), offset="shared"), "are chained: the offset cannot be told from E"),
        (lambda t: fit(t, hold_out=("3B/50BT",)), "held-out cell '3B/50BT' does not exist"),
        (lambda t: fit(t, hold_out=tuple(t.cell)), "every cell is held out"),
        (lambda t: fit(t, form="kaplan"), "form is 'kaplan'"),
        (lambda t: fit(t, E="tied"), "E is 'tied'"),
        (lambda t: fit(t, E=float("nan")), "must be finite"),
        (lambda t: fit(t, offset="both"), "offset is 'both'"),
        (lambda t: fit(t, delta=0.0), "Huber scale must be finite and positive"),
        (lambda t: fit(t, starts=0), "at least one"),
        (lambda t: bootstrap(fit(t, starts=5), 1), "at least two"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(paper_table().arm("CKDA"))
