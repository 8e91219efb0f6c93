"""thm:multilayer in exact arithmetic: the layers against direct simulation, and broken layers that are refuted."""

import random
from math import cos, isclose, pi, sin

import flint
import pytest

from ckda.theory import automata, factor_programs
from ckda.theory.automata import (
    accumulator_numbers,
    check_bits,
    check_clock,
    check_language,
    check_machine,
    check_no_peeking,
)
from ckda.theory.claims import Refuted
from ckda.theory.factor_programs import CKDA, IDENTITY, householder, merge
from ckda.theory.figures import DRAWINGS
from ckda.theory.machines import DFA, WFA, GroupWords, Permutations, group, regex_to_dfa
from ckda.theory.multilayer import Accumulator, Buffer, Clock, CosineField, Step, ThreeLayers, simulate


@pytest.mark.parametrize(
    "claim",
    [
        automata.clock,
        automata.groups,
        automata.dfas,
        automata.wfas,
        automata.regular_languages,
        automata.no_peeking,
        automata.fixed_datatype,
    ],
)
def test_claim_holds(claim):
    assert claim(effort=0.3).cases > 0


@pytest.mark.parametrize("N", [4, 12, 20, 28])
def test_cosine_field(N):
    F = CosineField(N)
    for j in range(N):
        assert isclose(float(F.cos(j)), cos(2 * pi * j / N), abs_tol=1e-15)
        assert isclose(float(F.sin(j)), sin(2 * pi * j / N), abs_tol=1e-15)
        assert F.cos(j) * F.cos(j) + F.sin(j) * F.sin(j) == 1


# the clock


def test_clock_with_a_flipped_gate_is_refuted():
    clock = Clock(3)
    clock.gate = {}
    with pytest.raises(Refuted, match="does not rotate"):
        check_clock(clock)


def test_clock_with_a_wrong_key_is_refuted():
    clock = Clock(3)
    clock.key = {0: -clock.field.sin(2), 1: clock.field.cos(2)}
    with pytest.raises(Refuted, match="does not rotate"):
        check_clock(clock)
    clock.key = {0: clock.field.sin(1), 1: clock.field.cos(1) * 2}
    with pytest.raises(Refuted, match="length one"):
        check_clock(clock)


def test_clock_with_a_blind_query_is_refuted():
    with pytest.raises(Refuted, match="same readout"):
        check_clock(Clock(4, query=(1, 0)))


# the three layers


def _parity_and_reset() -> DFA:
    return DFA(((1, 0, 2), (0, 1, 2), (2, 2, 0)), 0, frozenset({1}))


WORD = random.Random(0).choices(range(3), k=40)


def test_accumulator_with_a_wrong_column_copy_is_refuted():
    dfa = DFA(((0, 1), (0, 2), (1, 1)))
    word = [a % 2 for a in WORD]
    check_machine(dfa, word)

    def wrong_key(s, d):
        return [householder(flint.fmpq(1, 6), {s: 3, d: -1}), merge(s, d)[1]]

    with pytest.raises(Refuted, match="tokens of"):
        check_machine(dfa, word, simulate(dfa, copy=wrong_key))


def test_accumulator_with_one_factor_too_few_is_refuted():
    dfa = _parity_and_reset()
    layers = simulate(dfa)
    program = layers.accumulator.program
    check_machine(dfa, WORD)
    with pytest.raises(Refuted, match="tokens of"):
        check_machine(dfa, WORD, simulate(dfa, program=lambda M: program(M)[:-1]))


def test_block_shorter_than_the_program_is_an_error():
    S5 = Permutations.of(group("S5"))
    five_cycle = S5.elements.index((1, 2, 3, 4, 0))
    with pytest.raises(ValueError, match="3 steps cannot apply 4 factors"):
        list(simulate(S5, m=3).run([five_cycle, 0, 0, 0]))


class LateBuffer(Buffer):
    """Writes into the slot after the right one."""

    def parameters(self, x):
        token, time = x
        step = super().parameters(x)
        slot = (self.clock.position(time) + 1) % (2 * self.clock.m)
        return step._replace(key={slot: 1}, value={slot: token + 1})


class LazyBuffer(Buffer):
    """Adds to a slot instead of overwriting it: beta = 1/2."""

    def parameters(self, x):
        return super().parameters(x)._replace(gamma=flint.fmpq(1, 2))


class NoCompletion(Accumulator):
    """Reads the current block's prefix off the state without completing the factors still to come."""

    def step(self, position, codes):
        step = super().step(position, codes)
        done = (position - 1) % self.clock.m + 1
        current = tuple(int(codes[(position - back) % (2 * self.clock.m)]) - 1 for back in reversed(range(done)))
        rows = self._functionals_after(current)
        return step._replace(queries=tuple({i: x for i, x in enumerate(row) if x} for row in rows))


@pytest.mark.parametrize("buffer", [LateBuffer, LazyBuffer])
def test_broken_buffer_is_refuted(buffer):
    dfa = _parity_and_reset()
    layers = simulate(dfa)
    broken = ThreeLayers(layers.clock, buffer(layers.clock), layers.accumulator)
    with pytest.raises(Refuted):
        check_machine(dfa, WORD, broken)


def test_without_the_completion_readout_it_is_refuted():
    dfa = _parity_and_reset()
    layers = simulate(dfa)
    whole = layers.accumulator
    partial = NoCompletion(whole.clock, whole.matrices, whole.start, whole.program, whole.functionals, whole.width)
    with pytest.raises(Refuted, match="tokens of"):
        check_machine(dfa, WORD, ThreeLayers(layers.clock, layers.buffer, partial))


def test_group_multiplied_from_the_wrong_side_is_refuted():
    S3 = GroupWords(group("S3"))
    word = random.Random(2).choices(range(6), k=30)
    check_machine(S3, word)
    layers = simulate(S3)
    layers.accumulator.matrices = [factor_programs.map_matrix(column) for column in S3.group.table.T.tolist()]
    with pytest.raises(Refuted, match="tokens of"):
        check_machine(S3, word, layers)


def test_rates_beyond_the_range_are_refuted():
    with pytest.raises(Refuted, match="out of range"):
        check_machine(DFA(((0,), (0,), (1,))), [0] * 20, allowed=CKDA)


def test_wfa_with_a_flipped_sign_is_refuted():
    wfa = WFA([flint.fmpq_mat(2, 2, [1, flint.fmpq(1, 2), 2, -1])], (flint.fmpq(1),) * 2, (flint.fmpq(1),) * 2)

    def flipped(M):
        return [factor_programs.Factor(f.key, f.gamma, {}) for f in factor_programs.rational_program(M)]

    check_machine(wfa, [0] * 80)
    with pytest.raises(Refuted, match="tokens of"):
        check_machine(wfa, [0] * 80, simulate(wfa, program=flipped))


def test_too_many_bits_are_refuted():
    wfa = WFA([flint.fmpq_mat(1, 1, [2])], (flint.fmpq(1),), (flint.fmpq(1),))
    check_bits(wfa, list(range(1, 1000)), 10)
    with pytest.raises(Refuted, match="bits after"):
        check_bits(wfa, [t * t for t in range(1, 1000)], 10)


def test_a_layer_that_remembers_is_refuted():
    class Counting(Clock):
        calls = 0

        def parameters(self, x):
            self.calls += 1
            step = super().parameters(x)
            return step if self.calls < 20 else step._replace(gate={})

    dfa, clock = _parity_and_reset(), Counting(4)
    layers = simulate(dfa)
    with pytest.raises(Refuted, match="when it is asked"):
        check_no_peeking(ThreeLayers(clock, layers.buffer, layers.accumulator), simulate(dfa), WORD, random.Random(1))


def test_reading_ahead_is_refuted():
    class Ahead(ThreeLayers):
        def run(self, word, watch=None):
            return super().run(list(word), watch)

    dfa = _parity_and_reset()
    layers = simulate(dfa)
    with pytest.raises(Refuted, match="came after 40 tokens"):
        check_machine(dfa, WORD, Ahead(layers.clock, layers.buffer, layers.accumulator))


def test_wrong_language_is_refuted():
    dfa = regex_to_dfa("(ab)*", "ab")
    assert check_language("(ab)*", dfa, [0, 1, 0, 1]) == 4
    with pytest.raises(Refuted, match="the layers say"):
        check_language("(ab)+a?", dfa, [0, 1, 0, 1])


def test_padding_and_degenerate_sizes():
    check_machine(GroupWords(group("Z1")), [0] * 5)
    check_machine(DFA(((0, 0),), 0, frozenset({0})), [0, 1, 1, 0])
    check_machine(WFA([flint.fmpq_mat(1, 1, [flint.fmpq(-3, 2)])], (flint.fmpq(2),), (flint.fmpq(1, 7),)), [0] * 50)
    assert IDENTITY.matrix(2) == factor_programs.map_matrix((0, 1))


def test_a_block_longer_than_needed_works():
    check_machine(_parity_and_reset(), WORD, simulate(_parity_and_reset(), m=7))


def test_steps_are_plain_data():
    step = simulate(_parity_and_reset()).clock.parameters("anything")
    assert isinstance(step, Step)
    assert step.gamma == 2


def test_numbers_of_a_broken_accumulator_are_refuted():
    with pytest.raises(Refuted, match="not at unit vectors"):
        accumulator_numbers(2, lambda s, d: merge(s, d)[:1])


@pytest.mark.parametrize("label", ["lem:wfamincount", "thm:multilayer"])
def test_drawings(label, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    DRAWINGS[label](tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
