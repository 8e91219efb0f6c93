"""Section 3 and appendix A: every claim at small effort, and for each a broken construction that must be refuted."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from ckda import transition
from ckda.theory import factor, structure
from ckda.theory.claims import Refuted
from ckda.theory.exact import field

EFFORT = 0.05
CHECKS = [
    structure.orthogonal_dplr,
    structure.orthogonal_dplr_search,
    structure.canonical,
    structure.canonical_is_not_the_whole,
    structure.commutation,
    structure.scalar_gate,
    structure.planar_transition,
    structure.diagonal_factors,
    structure.complex_eigenvalues,
    structure.complex_eigenvalues_search,
    structure.unit_key_is_needed,
    structure.persistent_pairs,
    structure.non_expansive,
    structure.factorization,
    structure.cycle_needs,
    structure.two_needed,
    structure.gauge,
    structure.gauge_operator,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_claims_hold(check):
    evidence = check(effort=EFFORT)
    assert evidence.cases >= 1
    assert evidence.margin is None or evidence.margin >= 0


def flipped_sign(d, u, v):
    found = structure.signed_householder(d, u, v)
    return found._replace(sign=[-found.sign[0], *found.sign[1:]])


def key_without_denominator(d, u, v):
    return structure.signed_householder(d, u, v)._replace(k=u)


def flipped_block(beta, cos2):
    (a, b), (c, d) = structure.sign_blocks(beta, cos2)
    return [[a, -b], [-c, d]]


def closed_window(beta, cos2):
    return beta**2 * (2 * cos2 - 1) ** 2 <= 4 * (beta - 1)


def one_factor_too_few(Q):
    factors = factor.factor_orthogonal(Q)
    return factors[1:] or factors


def padded(Q):
    F = Q.field
    return [*factor.factor_orthogonal(Q), factor.ExactFactor([F(1)] * Q.shape[0], F.eye(Q.shape[0]).column(0), F(0))]


def wrong_gate(U, sigma, V):
    factors = factor.factor_svd(U, sigma, V)
    return [factors[0]._replace(alpha=[-a for a in factors[0].alpha]), *factors[1:]]


def wrong_key(A):
    factors = factor.factor_contraction(A)
    return [factors[0]._replace(k=np.roll(factors[0].k, 1), beta=2.0), *factors[1:]]


def signs_not_cumulated(signs, x):
    return signs * x


def signs_one_late(signs, x):
    return torch.cat([torch.ones_like(signs[:1]), signs[:-1]]).cumprod(0) * x


BROKEN = {
    "recovery: a sign flipped": lambda: structure.orthogonal_dplr(EFFORT, recover=flipped_sign),
    "recovery: the key is u itself": lambda: structure.orthogonal_dplr(EFFORT, recover=key_without_denominator),
    "recovery: rank two": lambda: structure.orthogonal_dplr_search(EFFORT, rank=2),
    "canonical: block turned the other way": lambda: structure.canonical(EFFORT, block=flipped_block),
    "canonical: boundary counted in": lambda: structure.canonical(EFFORT, window=closed_window),
    "canonical: the window is A's": lambda: structure.canonical_is_not_the_whole(EFFORT, scales=("1", "1")),
    "commutation: zero keys forgotten": lambda: structure.commutation(
        EFFORT, criterion=lambda alpha, k, beta: beta == 0 or len(set(alpha)) == 1
    ),
    "commutation: gates only": lambda: structure.commutation(EFFORT, criterion=lambda alpha, k, beta: False),
    "scalar gate: channel-wise": lambda: structure.scalar_gate(EFFORT, spread=1),
    "planar: sign of an entry": lambda: structure.planar_transition(EFFORT, sign=+1),
    "diagonal factors: beta = alpha": lambda: structure.diagonal_factors(EFFORT, rate=lambda a: a),
    "pairs: none allowed": lambda: structure.complex_eigenvalues(EFFORT, at_most=0),
    "pairs: need all gates negative": lambda: structure.complex_eigenvalues(
        EFFORT, needs=lambda alpha, k, beta: all(a < 0 for a in alpha)
    ),
    "pairs: need beta = 2": lambda: structure.complex_eigenvalues(EFFORT, needs=lambda alpha, k, beta: beta == 2),
    "pairs, search: none allowed": lambda: structure.complex_eigenvalues_search(EFFORT, at_most=0),
    "unit key: short enough": lambda: structure.unit_key_is_needed(EFFORT, beta=Fraction(1, 2)),
    "persistent: one fewer": lambda: structure.persistent_pairs(EFFORT, slack=-1),
    "persistent: one more": lambda: structure.persistent_pairs(EFFORT, slack=1),
    "non-expansive: beta above 2": lambda: structure.non_expansive(EFFORT, beta_max=Fraction(201, 100)),
    "non-expansive: gate above 1": lambda: structure.non_expansive(EFFORT, gate_max=Fraction(101, 100)),
    "factors: one too few": lambda: structure.factorization(EFFORT, orthogonal=one_factor_too_few),
    "factors: one too many": lambda: structure.factorization(EFFORT, orthogonal=padded),
    "factors: a gate flipped": lambda: structure.factorization(EFFORT, svd=wrong_gate),
    "factors: a wrong key": lambda: structure.factorization(EFFORT, contraction=wrong_key),
    "cycle: with all its factors": lambda: structure.cycle_needs(EFFORT, missing=0),
    "two factors: a matrix that needs one": lambda: structure.two_needed(EFFORT, corner=Fraction(0)),
    "gauge: signs not cumulated": lambda: structure.gauge(EFFORT, change=signs_not_cumulated),
    "gauge, operator: signs not cumulated": lambda: structure.gauge_operator(EFFORT, change=signs_not_cumulated),
    "gauge: signs one step late": lambda: structure.gauge(EFFORT, change=signs_one_late),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_refuted(name):
    with pytest.raises(Refuted):
        BROKEN[name]()


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_recovery_from_the_dense_matrix(n):
    rng = torch.Generator().manual_seed(n)
    for zeros in range(n):
        k = torch.randn(n, generator=rng, dtype=torch.float64)
        k[:zeros] = 0
        sign = torch.where(torch.rand(n, generator=rng) < 0.5, -1.0, 1.0).double()
        A = transition.dense(sign, k / k.norm(), 2.0).numpy()
        found, key, residual = structure.signed_householder_of(A)
        assert residual < 1e-12
        assert set(found.tolist()) <= {-1.0, 1.0}
        assert np.isclose(np.linalg.norm(key), 1)


def test_recovery_reports_what_it_cannot_recover():
    assert structure.signed_householder_of(np.roll(np.eye(4), 1, 0))[2] > 0.4


def test_factor_contraction_refuses_expansion():
    with pytest.raises(ValueError, match="spectral norm is 2"):
        factor.factor_contraction(2 * np.eye(3))


def test_zero_matrix_and_width_one():
    assert np.allclose(factor.multiply(factor.factor_contraction(np.zeros((3, 3)))), 0)
    F = field()
    for x in (-1, 1):
        (only,) = factor.factor_orthogonal(F.diag([x]))
        assert F.ckda(*only) == F.diag([x])
    (only,) = factor.factor_svd(F.diag([-1]), [F("1/3")], F.eye(1))
    assert F.ckda(*only) == F.diag(["-1/3"])
