"""prop:automata-factor-counts: the programs multiply to what they should, and broken ones are refuted."""

import random

import flint
import pytest

from ckda.theory import automata, factor_programs
from ckda.theory.automata import (
    COPIES,
    RATIONAL,
    check_copy,
    check_deterministic,
    check_fibres,
    check_program,
    check_rational,
    check_scaled,
    root_field,
)
from ckda.theory.claims import Refuted
from ckda.theory.factor_programs import Factor, householder, map_matrix


@pytest.mark.parametrize(
    "claim",
    [
        automata.permutation_counts,
        automata.copy_counts,
        automata.deterministic_counts,
        automata.fibre_counts,
        automata.scaled_counts,
        automata.rational_counts,
    ],
)
def test_claim_holds(claim):
    assert claim(effort=0.1).cases > 0


def test_sparse_and_dense_products_agree():
    rng = random.Random(0)
    for _ in range(50):
        support = rng.sample(range(5), rng.randint(1, 3))
        key = {i: flint.fmpq(rng.randint(-3, 3), 2) for i in support}
        gamma = {i: flint.fmpq(rng.randint(-3, 3), 3) for i in support}
        factor = Factor(key, gamma, {rng.randrange(5): flint.fmpq(rng.randint(-2, 2), 2)})
        row = [flint.fmpq(rng.randint(-3, 3)) for _ in range(5)]
        pulled = factor.pull({i: x for i, x in enumerate(row) if x})
        assert [pulled.get(i, 0) for i in range(5)] == (flint.fmpq_mat(1, 5, row) * factor.matrix(5)).entries()


def test_permutation_with_one_swap_too_few_is_refuted():
    program = factor_programs.permutation_program((1, 2, 3, 0))
    target = map_matrix((1, 2, 3, 0))
    check_program(program, target, factor_programs.CKDA, 3)
    with pytest.raises(Refuted, match="2 factors instead of 3"):
        check_program(program[:2], target, factor_programs.CKDA, 3)
    with pytest.raises(Refuted, match="multiplies to"):
        check_program(program[:2], target, factor_programs.CKDA, 2)
    with pytest.raises(Refuted, match="multiplies to"):
        check_program(program[::-1], target, factor_programs.CKDA, 3)


def _wrong_key(s: int, d: int) -> list[Factor]:
    """The paper's merge with the key 3 e_s - e_d."""
    return [householder(flint.fmpq(1, 6), {s: 3, d: -1}), factor_programs.merge(s, d)[1]]


def _no_clear(s: int, d: int) -> list[Factor]:
    """The paper's merge without the zero in the gate."""
    return [factor_programs.merge(s, d)[0], householder(3, {s: 1})]


@pytest.mark.parametrize("broken", [_wrong_key, _no_clear])
def test_broken_column_copy_is_refuted(broken):
    with pytest.raises(Refuted, match="multiplies to"):
        check_copy("CKDA", 3, 0, 2, broken)


def test_column_copy_out_of_range_is_refuted():
    with pytest.raises(Refuted, match="outside"):
        check_copy("CKDA, dyadic", 2, 0, 1, factor_programs.merge)
    with pytest.raises(Refuted, match="gate of 0"):
        check_program(factor_programs.merge(0, 1), map_matrix((0, 0)), factor_programs.DELTANET, 2)
    with pytest.raises(Refuted, match="different erase gates"):
        check_program(factor_programs.rwkv7_copy(0, 1), map_matrix((0, 0)), factor_programs.CKDA, 1)


def test_column_copy_bounds_of_the_table():
    assert {family: bound for family, (_, _, _, bound) in COPIES.items()} == {
        "CKDA": 2,
        "CKDA, dyadic": 2,
        "DeltaNet/GDN": 4,
        "RWKV-7": 1,
    }


def test_deterministic_program_in_the_wrong_order_is_refuted():
    def farthest_first(images):
        _, trees = factor_programs.cycles_and_trees(images)
        return [factor for i in reversed(trees) for factor in factor_programs.merge(images[i], i)]

    chain = (0, 0, 1, 2)
    check_deterministic(chain)
    with pytest.raises(Refuted, match="multiplies to"):
        check_program(farthest_first(chain), map_matrix(chain), factor_programs.CKDA_AUTOMATA, 6)


def test_deterministic_counts_reach_the_bounds():
    assert check_deterministic((0, 0, 1, 2, 3))["CKDA"] == 2 * 5 - 2
    assert check_deterministic((1, 2, 3, 4, 0))["CKDA"] == 4


def test_fibre_program_with_a_factor_missing_is_refuted():
    images = (1, 1, 0, 0)
    program = factor_programs.fibre_program(images)
    check_fibres(images, program)
    for i in range(len(program)):
        with pytest.raises(Refuted):
            check_fibres(images, program[:i] + program[i + 1 :])


def test_scaled_program_broken_is_refuted():
    images = (0, 0, 1)
    F = root_field(images)
    rho, program = factor_programs.scaled_program(F, images)
    assert check_scaled(F, images, 3) == len(program)
    flipped = [([-a for a in alpha], key, beta) for alpha, key, beta in program[:1]] + program[1:]
    wide = [(alpha, key, beta + 1) for alpha, key, beta in program]
    for broken in (flipped, wide, program[:-1]):
        with pytest.raises(Refuted):
            check_scaled(F, images, 3, scaled=factor_programs.Scaled(rho, broken))
    with pytest.raises(Refuted, match="bound is 1"):
        check_scaled(F, images, 1)


@pytest.mark.parametrize("family", sorted(RATIONAL))
def test_rational_program_broken_is_refuted(family):
    M = flint.fmpq_mat(2, 2, [flint.fmpq(5, 2), -1, 0, flint.fmpq(1, 3)])
    build = RATIONAL[family][0]
    check_rational(family, M)
    with pytest.raises(Refuted, match="factors instead of"):
        check_rational(family, M, lambda M: build(M)[:-1])
    with pytest.raises(Refuted):
        check_rational(family, M, lambda M: [*build(M)[1:], factor_programs.IDENTITY])
    with pytest.raises(Refuted, match="multiplies to"):
        check_rational(family, M, lambda M: build(M.transpose()))


def test_ckda_scaling_keeps_the_rate_nonnegative_where_deltanet_does_not():
    M = flint.fmpq_mat(1, 1, [3])
    with pytest.raises(Refuted, match="outside"):
        check_program(
            factor_programs.rational_program_deltanet(M),
            flint.fmpq_mat(3, 3, [3, 0, 0, 3, 0, 0, 0, 0, 0]),
            factor_programs.DELTANET,
            14,
        )
