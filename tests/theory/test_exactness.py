"""The constructions through the operator: exact in float64 and float32, and a broken one is noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ckda.theory import exactness
from ckda.theory.claims import Refuted
from ckda.theory.exactness import check_exact, deltaproduct_program, measure, programs


def test_claim_holds():
    assert exactness.operator_exactness(effort=0.03).margin > 0.99


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_backend_keeps_every_group(backend, normalize):
    rows = measure(
        programs(["Z7", "S3", "S4", "A5", "Q8"]), 150, torch.float32, 4, backend=backend, normalize=normalize
    )
    assert check_exact(rows) > 0.99


@pytest.mark.parametrize("change", ["sign", "key", "beta"])
def test_a_broken_program_is_refuted(change):
    (program,) = programs(["S4"])
    if change == "sign":
        broken = replace(program, signs=program.signs * np.where(np.arange(24) == 5, -1, 1)[:, None, None])
    elif change == "key":
        broken = replace(program, keys=program.keys[np.r_[0, 2, 1, 3:24]])
    else:
        broken = replace(program, beta=program.beta * 0.9)
    with pytest.raises(Refuted, match="decodes wrongly"):
        check_exact(measure([broken], 60, torch.float64))


def test_one_factor_too_few_is_refuted():
    program = deltaproduct_program()
    beta = program.beta.copy()
    beta[:, 3] = 0.0
    with pytest.raises(Refuted, match="decodes wrongly"):
        check_exact(measure([replace(program, beta=beta)], 100, torch.float64))


def test_bfloat16_keys_end_it_where_float32_does_not():
    items = programs(["Z60"])
    half = measure(items, 600, torch.bfloat16, words=4)[0]
    single = measure(items, 600, torch.float32, words=4)[0]
    assert half.first_error is not None
    assert single.first_error is None


def test_a_group_without_a_tracker_is_an_error():
    with pytest.raises(ValueError, match="impossible"):
        programs(["S5"])
