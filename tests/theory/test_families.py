"""Every family: in range, shapes, its exact form, and its known members."""

import numpy as np
import pytest
import torch

from ckda import transition
from ckda.theory.families import FAMILIES, delta_product, realify, sfda

COMPLEX = {"SFDA", "complex diagonal", "RoPE", "Selective RoPE", "MDN"}


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_shape_and_the_range(name):
    family, d = FAMILIES[name], 3
    A = family.sample(d, 40)
    n = 2 * d if name in COMPLEX else d
    assert A.shape == (40, n, n)
    assert torch.isfinite(A).all()
    params = family.decode(np.random.default_rng(0).uniform(-1, 1, (40, family.size(d))), d)
    for slot in family.slots:
        value = params[slot.name]
        if "key" in slot.shape:
            assert torch.allclose(value.abs().square().sum(-1), torch.ones(40, dtype=torch.float64))
        else:
            assert slot.low <= value.min()
            assert value.max() <= slot.high


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].exact])
def test_exact_form_is_the_dense_form(name):
    family, d = FAMILIES[name], 3
    raw = np.round(np.random.default_rng(1).uniform(-1, 1, family.size(d)) * 64) / 64
    assert np.allclose(family.rational(raw, d).float(), family.dense(raw[None], d)[0].numpy())


def test_families_without_exact_form_say_so():
    with pytest.raises(ValueError, match="MDN has no exact form"):
        FAMILIES["MDN"].rational(np.zeros(9), 3)


def test_relations_between_families():
    rng = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(6, 4, generator=rng, dtype=torch.float64), dim=-1)
    alpha, beta = (
        torch.rand(6, generator=rng, dtype=torch.float64),
        2 * torch.rand(6, generator=rng, dtype=torch.float64),
    )
    ones = torch.ones(6, 4, dtype=torch.float64)
    gdn = FAMILIES["GDN"].matrix({"alpha": alpha, "k": k, "beta": beta})
    channels = transition.dense(alpha[:, None] * ones, k, beta)
    erase = {"alpha": alpha[:, None] * ones, "k": k, "erase": (alpha * beta)[:, None] * ones}
    assert torch.allclose(gdn, channels)
    assert torch.allclose(gdn, FAMILIES["RWKV-7"].matrix(erase))  # the footnote of tab:theory-summary
    assert torch.allclose(gdn, delta_product(1, gated=True).matrix({"alpha": alpha, "k0": k, "beta0": beta}))
    assert torch.allclose(FAMILIES["DeltaNet"].matrix({"k": k, "beta": beta}), transition.dense(ones, k, beta))
    gdn2 = FAMILIES["GDN-2"].matrix({"alpha": alpha[:, None] * ones, "k": k, "erase": beta[:, None] * ones})
    assert torch.allclose(gdn, gdn2)


def test_sfda_with_real_keys_and_no_phase_is_kda():
    family, k = sfda(), torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    alpha = torch.tensor([[0.5, 0.9]], dtype=torch.float64)
    beta = torch.tensor([0.7], dtype=torch.float64)
    A = family.matrix({"alpha": alpha, "theta": 0 * alpha, "k": k + 0j, "beta": beta})
    assert torch.allclose(A, realify(transition.dense(alpha, k, beta) + 0j))


def test_mdn_block_has_the_product_of_its_gates_as_determinant():
    """On span{k} the block is [[alpha (1 - beta eta), -beta mu], [alpha eta, mu]]: determinant alpha mu, so a pair has
    modulus sqrt(alpha mu), below one."""
    family = FAMILIES["MDN"]
    params = family.decode(np.random.default_rng(2).uniform(-1, 1, (30, family.size(3))), 3)
    values = torch.linalg.eigvals(family.matrix(params))
    pair = values.imag.abs().amax(-1)
    modulus = values.abs().gather(-1, values.imag.abs().argmax(-1, keepdim=True)).squeeze(-1)
    expected = (params["alpha"] * params["mu"]).sqrt()
    assert (pair > 1e-6).any()
    assert torch.allclose(modulus[pair > 1e-6], expected[pair > 1e-6])
