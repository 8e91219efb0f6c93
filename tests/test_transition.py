"""The transition against numpy on random matrices, and the paper's statements about it as properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckda.transition import apply, dense, eigenvalues, sign_magnitude


def _draw(seed: int, K: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """alpha in [-1, 1] with some entries of exactly 0 and +-1, a unit key with some zeros, beta in [0, 2]."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    alpha = 2 * uniform(*batch, K) - 1
    alpha = torch.where(uniform(*batch, K) < 0.3, alpha.sign(), alpha).masked_fill(uniform(*batch, K) < 0.1, 0.0)
    k = torch.randn(*batch, K, generator=random, dtype=torch.float64).masked_fill(uniform(*batch, K) < 0.15, 0.0)
    k[..., 0] += 1e-3
    return alpha, k / k.norm(dim=-1, keepdim=True), 2 * uniform(*batch)


def _matrix(alpha: Tensor, k: Tensor, beta: Tensor | float) -> np.ndarray:
    """The definition, by numpy."""
    k_, beta_ = k.numpy(), float(beta)
    return (np.eye(len(k_)) - beta_ * np.outer(k_, k_)) @ np.diag(alpha.numpy())


draws = given(seed=st.integers(0, 10**6), K=st.integers(1, 9))


@draws
def test_dense_is_the_definition(seed: int, K: int) -> None:
    alpha, k, beta = _draw(seed, K)
    np.testing.assert_allclose(dense(alpha, k, beta).numpy(), _matrix(alpha, k, beta), atol=1e-14)
    np.testing.assert_allclose(dense(alpha, 3 * k).numpy(), _matrix(alpha, 3 * k, 1.0), atol=1e-13)  # taken literally


@draws
def test_apply_is_the_matrix_and_the_write(seed: int, K: int) -> None:
    alpha, k, beta = _draw(seed, K)
    S, v = torch.randn(K, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    expected = _matrix(alpha, k, beta) @ S.numpy()
    np.testing.assert_allclose(apply(S, alpha, beta * k, k).numpy(), expected, atol=1e-13)
    written = expected + float(beta) * np.outer(k.numpy(), v.numpy())
    np.testing.assert_allclose(apply(S, alpha, beta * k, k, beta * v).numpy(), written, atol=1e-13)


def test_apply_with_separate_erase_and_write_keys() -> None:
    alpha, k, _ = _draw(0, 5)
    erased = torch.randn(5, dtype=torch.float64)
    S = torch.randn(5, 3, dtype=torch.float64)
    expected = (np.eye(5) - np.outer(k.numpy(), erased.numpy())) @ np.diag(alpha.numpy()) @ S.numpy()
    np.testing.assert_allclose(apply(S, alpha, erased, k).numpy(), expected, atol=1e-13)


@draws
def test_eigenvalues_are_numpys(seed: int, K: int) -> None:
    """As sets: by their power sums, which do not depend on an order."""
    alpha, k, beta = _draw(seed, K)
    ours, theirs = eigenvalues(alpha, k, beta).numpy(), np.linalg.eigvals(_matrix(alpha, k, beta))
    for power in range(1, K + 1):
        assert abs((ours**power).sum() - (theirs**power).sum()) < 1e-10


@draws
def test_at_most_one_non_real_pair(seed: int, K: int) -> None:
    """thm:complex_eigenvalues: one pair at most, and only with beta > 1 and a negative gate."""
    alpha, k, beta = _draw(seed, K)
    values = np.linalg.eigvals(_matrix(alpha, k, beta))
    # a double real eigenvalue splits by the root of the rounding error
    complex_values = values[np.abs(values.imag) > 1e-6]
    assert len(complex_values) in (0, 2)
    if len(complex_values):
        assert beta > 1
        assert alpha.min() < 0
    assert np.abs(values).max() <= 1 + 1e-12


@draws
def test_sign_magnitude_factors(seed: int, K: int) -> None:
    """prop:CKDA-canonical: A = A_tilde Diag(|alpha|), A_tilde is its block on span{k_-, k_+} and the sign elsewhere."""
    alpha, k, beta = _draw(seed, K)
    form = sign_magnitude(alpha, k, beta)
    assert torch.equal(form.sign * form.magnitude, alpha)
    assert set(form.sign.tolist()) <= {1.0, -1.0}
    assert torch.equal(form.sign[alpha == 0], torch.ones_like(form.sign[alpha == 0]))
    tilde = dense(form.sign, k, beta)
    torch.testing.assert_close(tilde * form.magnitude, dense(alpha, k, beta), rtol=0, atol=1e-14)
    minus, plus = k * (form.sign < 0), k * (form.sign > 0)
    assert float(minus.norm()) == pytest.approx(math.cos(float(form.theta)), abs=1e-12)
    assert float(plus.norm()) == pytest.approx(math.sin(float(form.theta)), abs=1e-12)
    if minus.norm() > 0 and plus.norm() > 0:
        basis = torch.stack([minus / minus.norm(), plus / plus.norm()])  # [2, K]
        torch.testing.assert_close(basis @ tilde @ basis.T, form.block, rtol=0, atol=1e-12)
        x = torch.randn(K, dtype=torch.float64)
        x = x - basis.T @ (basis @ x)
        torch.testing.assert_close(tilde @ x, form.sign * x, rtol=0, atol=1e-12)


@given(
    theta=st.floats(0.01, math.pi / 2 - 0.01),
    beta=st.floats(0, 2),
    gate=st.sampled_from([(-1.0, 1.0), (1.0, 1.0), (-1.0, -1.0)]),
)
def test_rotation_criterion(theta: float, beta: float, gate: tuple[float, float]) -> None:
    """prop:CKDA-canonical: non-real eigenvalues exactly when the signs differ and beta^2 cos^2(2 theta) < 4 (beta - 1)."""
    margin = beta**2 * math.cos(2 * theta) ** 2 - 4 * (beta - 1)
    if abs(margin) < 1e-9:
        return
    k = torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
    alpha = torch.tensor(gate, dtype=torch.float64)
    form = sign_magnitude(alpha, k, beta)
    expected = margin < 0 and gate == (-1.0, 1.0)
    assert bool(form.rotates) == expected
    values = np.linalg.eigvals(_matrix(alpha, k, beta))
    assert (np.abs(values.imag).max() > 1e-10) == expected
    angle = float(np.abs(np.angle(values)).max()) if expected else 0.0
    assert float(form.angle) == pytest.approx(angle, abs=1e-7)


@given(theta=st.floats(0.01, math.pi / 2 - 0.01))
def test_beta_two_is_the_rotation_by_twice_theta(theta: float) -> None:
    """prop:CKDA-canonical and eq:kda_alpha_rotation at beta = 2."""
    k = torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
    form = sign_magnitude(torch.tensor([-1.0, 1.0], dtype=torch.float64), k, 2.0)
    c, s = math.cos(2 * theta), math.sin(2 * theta)
    np.testing.assert_allclose(form.block.numpy(), [[c, -s], [s, c]], atol=1e-14)
    assert float(form.angle) == pytest.approx(2 * theta, abs=1e-12)


def test_one_sided_keys_do_not_rotate() -> None:
    for alpha in ([-1.0, -1.0, 1.0], [1.0, 1.0, -1.0]):
        form = sign_magnitude(torch.tensor(alpha), torch.tensor([0.6, 0.8, 0.0]), 2.0)
        assert not form.rotates
        assert form.angle == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_batches_and_dtypes(dtype: torch.dtype) -> None:
    """Batch axes broadcast, and every row is what it would be alone."""
    alpha, k, beta = (x.to(dtype) for x in _draw(3, 4, (5, 2)))
    one = _draw(4, 4)[0].to(dtype)
    tolerance = torch.finfo(dtype).eps * 8
    A, form, values = dense(alpha, k, beta), sign_magnitude(alpha, k, beta), eigenvalues(alpha, k, beta)
    assert (A.dtype, A.shape, form.block.shape, form.angle.shape) == (dtype, (5, 2, 4, 4), (5, 2, 2, 2), (5, 2))
    assert values.shape == (5, 2, 4)
    assert values.dtype == (torch.complex128 if dtype == torch.float64 else torch.complex64)
    torch.testing.assert_close(A[3, 1], dense(alpha[3, 1], k[3, 1], beta[3, 1]), rtol=0, atol=tolerance)
    assert torch.equal(form.rotates[3, 1], sign_magnitude(alpha[3, 1], k[3, 1], beta[3, 1]).rotates)
    assert dense(one, k, beta).shape == (5, 2, 4, 4)
    assert dense(one, k[0, 0], beta).shape == (5, 2, 4, 4)
    S = torch.randn(5, 2, 4, 3).to(dtype)
    assert apply(S, one, k, k, torch.ones(3, dtype=dtype)).dtype == dtype
    torch.testing.assert_close(
        apply(S, alpha, beta[..., None] * k, k).double(), A.double() @ S.double(), rtol=0, atol=tolerance * 4
    )


def test_the_transition_is_differentiable() -> None:
    alpha, k, beta = (x.requires_grad_() for x in _draw(5, 3))
    S = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: apply(x[0], x[1], x[3] * x[2], x[2]), (S, alpha, k, beta))
