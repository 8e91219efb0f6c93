"""Exact fields and matrices against floats and against sympy's own, slower, domain matrices."""

import random
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from sympy import sqrt
from sympy.polys.matrices import DomainMatrix

from ckda import transition
from ckda.theory.exact import EigenvalueCount, Field, Matrix, field, householder_key, real_cyclotomic

FIELDS = [
    field(),
    field(sqrt(2)),
    field(sqrt(5)),
    field(sqrt(2), sqrt(5)),
    real_cyclotomic(7),
    real_cyclotomic(20),
]


def number(F: Field, rng: random.Random):
    return F.element(
        [
            F.domain.dom(rng.randint(-4, 4), rng.randint(1, 3))
            if F.domain.is_Algebraic
            else F(Fraction(rng.randint(-4, 4), rng.randint(1, 3)))
            for _ in range(F.degree)
        ]
    )


def draw(F: Field, rng: random.Random, rows: int, columns: int) -> Matrix:
    return F.matrix([[number(F, rng) for _ in range(columns)] for _ in range(rows)])


@pytest.mark.parametrize("F", FIELDS, ids=str)
def test_matrices_agree_with_sympy(F):
    rng = random.Random(0)
    A, B = draw(F, rng, 3, 3), draw(F, rng, 3, 2)
    slow = [DomainMatrix(M.tolist(), M.shape, F.domain) for M in (A, B)]
    assert (A @ B).tolist() == (slow[0] * slow[1]).to_dense().rep.to_ddm().to_list()
    assert A.charpoly() == slow[0].charpoly()
    assert A.det() == slow[0].det()
    assert (A @ A.inverse()).is_identity()
    assert (A * number(F, rng)).T.T.shape == (3, 3)
    assert (A - A).is_zero()
    assert A**3 == A @ A @ A
    assert A.inverse() == A**-1


@pytest.mark.parametrize("F", FIELDS, ids=str)
def test_floats_signs_and_scalars_agree(F):
    rng = random.Random(1)
    A, x = draw(F, rng, 3, 3), number(F, rng)
    assert np.allclose((A * x).float(), A.float() * F.float(x))
    assert np.allclose((A @ A).float(), A.float() @ A.float())
    for row in A.tolist():
        for y in row:
            assert F.sign(y) == np.sign(F.float(y))
            assert F.float(y) == pytest.approx(float(F.sympy(y).evalf(30)))
    assert F.matrix(A.tolist()) == A
    assert hash(A) == hash(F.matrix(A.tolist()))


def test_sign_of_a_tiny_number():
    """Fibonacci numbers approach the golden ratio: 200 digits do not fool the sign."""
    F, a, b = field(sqrt(5)), 1, 1
    phi = (F.root(5) + 1) / 2
    for step in range(500):
        a, b = b, a + b
        assert F.sign(phi - F(Fraction(b, a))) == (1 if step % 2 else -1)


@pytest.mark.parametrize("n", [3, 4, 5, 7, 12])
def test_rotations_have_their_order(n):
    F = real_cyclotomic(4 * n)
    R = F.rotation(1, n)
    assert R.is_orthogonal()
    assert (R**n).is_identity()
    assert not any((R**j).is_identity() for j in range(1, n))
    assert np.allclose(R.float()[0, 0], np.cos(2 * np.pi / n))


def test_eigenvalue_counts():
    F = field()
    cycle = F.permutation([1, 2, 3, 4, 0])
    assert cycle.eigenvalue_count() == EigenvalueCount(1, 2, 2)
    half = cycle * Fraction(1, 2)
    assert half.eigenvalue_count() == EigenvalueCount(1, 2, 0)
    twice = F.matrix([[0, -1, 1, 0], [1, 0, 0, 1], [0, 0, 0, -1], [0, 0, 1, 0]])  # a Jordan block of a quarter turn
    assert twice.eigenvalue_count() == EigenvalueCount(0, 2, 2)
    assert F.matrix([[2, 1], [1, 1]]).eigenvalue_count() == EigenvalueCount(2, 0, 0)  # z and 1/z, both real
    quadruple = F.matrix([[1, -1, 0, 0], [1, 1, 0, 0], [0, 0, "1/2", "-1/2"], [0, 0, "1/2", "1/2"]])
    assert quadruple.eigenvalue_count() == EigenvalueCount(0, 2, 0)  # z, 1/z off the circle


@pytest.mark.parametrize("F", FIELDS, ids=str)
def test_eigenvalue_counts_agree_with_floats(F):
    rng = random.Random(2)
    for _ in range(4):
        A = draw(F, rng, 4, 4)
        values = np.linalg.eigvals(A.float())
        assert A.eigenvalue_count().pairs == sum(values.imag > 1e-9)
        assert A.rank() == np.linalg.matrix_rank(A.float())


def test_ckda_is_the_transition():
    F = field(sqrt(2))
    alpha, k, beta = [-1, "1/2", F.root(2) / 2], [1, F.root(2), -1], "3/2"
    key = F.vector(k).tensor().squeeze(-1)
    dense = transition.dense(F.vector(alpha).tensor().squeeze(-1), key / key.norm(), 1.5)
    assert torch.allclose(F.ckda(alpha, k, beta).tensor(), dense)


def test_contraction_and_semidefinite():
    F = field()
    assert F.ckda([1, -1, "1/2"], [1, 2, 3], "3/2").is_contraction()
    assert not F.ckda([1, -1], [1, 1], "21/10").is_contraction()
    assert F.diag([0, 1]).is_positive_semidefinite()
    assert not F.diag([1, "-1/1000000"]).is_positive_semidefinite()


def test_householder_key():
    F = field(sqrt(5))
    k = F.vector([1, F.root(5), 2])
    found = householder_key(F.householder(k, 1))
    assert found is not None
    assert F.householder(found, 1) == F.householder(k, 1)
    assert householder_key(F.eye(3)) is None
    assert householder_key(F.permutation([1, 2, 0])) is None


def test_floats_are_refused():
    with pytest.raises(TypeError, match="float"):
        field()(0.5)
    with pytest.raises(ValueError, match="zero"):
        field().householder([0, 0])


def test_sympy_expressions_outside_the_field_are_refused():
    with pytest.raises(sympy.polys.polyerrors.CoercionFailed):
        field(sqrt(2))(sympy.sqrt(3))
