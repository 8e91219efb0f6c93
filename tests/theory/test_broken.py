"""Every claim, as `ckda theory verify` runs it, refutes a broken variant of what it checks."""

from dataclasses import replace

import numpy as np
import pytest

from ckda.groups import group
from ckda.theory import automata, exactness, exhaustive, groups, obstructions, reduction, verdicts
from ckda.theory.claims import Refuted, load_claims
from ckda.theory.groups import SignedHouseholder, realise
from ckda.theory.multilayer import Clock
from ckda.theory.verdicts import verdict

from . import test_spectra, test_structure, test_symbolic

EFFORT = 0.05
load_claims()


def flipped(name, wrong):
    """The head of a group; that of `wrong` with one sign of one gate flipped."""
    head = realise(name)
    if name != wrong:
        return head
    old = head.transitions[1]
    signs = (*old.signs[:-1], -old.signs[-1])
    return replace(head, transitions=(head.transitions[0], SignedHouseholder(signs, old.key), *head.transitions[2:]))


def wrong_letters(machine, real=automata.simulate, **options):
    """Three layers whose accumulator takes the letters in the opposite order."""
    layers = real(machine, **options)
    layers.accumulator.matrices = list(reversed(layers.accumulator.matrices))
    return layers


def forgetful(machine, real=automata.simulate):
    """Three layers whose clock turns no more after it was asked twenty times."""

    class Tired(Clock):
        calls = 0

        def parameters(self, x):
            self.calls += 1
            step = super().parameters(x)
            return step if self.calls < 20 else step._replace(gate={})

    layers = real(machine)
    return type(layers)(Tired(layers.m), layers.buffer, layers.accumulator)


def shorter(build):
    """A construction without its last factor."""
    return lambda *given: build(*given)[:-1]


def first_of(table, family="CKDA"):
    """A table of constructions with that of one family cut short."""
    build, *rest = table[family]
    return {**table, family: (shorter(build), *rest)}


def slow(program):
    return replace(program, beta=program.beta * 0.9)


#: label -> (what is called, what is replaced before: (module, name, stand-in))
BROKEN = {
    "prop:axis-test": (lambda: groups.axis_test(EFFORT, test=lambda R: True),),
    "prop:planar-groups": (groups.planar_groups, (groups, "realise", lambda name: flipped(name, "Z3"))),
    "prop:cube": (groups.cube, (groups, "realise", lambda name: flipped(name, "S4"))),
    "prop:so3-four-dimensional-encoding": (lambda: groups.so3_encoding(EFFORT, decode=groups.auxiliary_decoder),),
    "cor:a5-four": (groups.a5_four, (groups, "realise", lambda name: flipped(name, "A5"))),
    "lem:finite-tracking-homomorphism": (
        groups.tracking_homomorphism,
        (groups, "reach", lambda head, real=groups.reach: replace(real(head), decode=np.roll(real(head).decode, 1))),
    ),
    "lem:finite-query-readout": (
        groups.query_readout,
        (
            groups,
            "find_query",
            lambda found, real=groups.find_query: real(found, [(1, *[0] * (found.columns.shape[1] - 1))]),
        ),
    ),
    "thm:main-positive": (groups.main_positive, (groups, "realise", lambda name: flipped(name, "D3"))),
    "app:silu": (lambda: groups.silu(EFFORT, build=lambda: groups.silu_head(groups.silu_keys()[::-1])),),
    "prop:affine-orthogonal-reduction": (
        lambda: reduction.affine_reduction(EFFORT, run=lambda tracker: reduction.reduce_tracker(swapped(tracker))),
    ),
    "prop:independent-head-reduction": (
        lambda: reduction.independent_reduction(EFFORT, run=lambda tracker: reduction.reduce_tracker(alone(tracker))),
    ),
    "lem:ico-plane": (
        obstructions.ico_plane,
        (obstructions, "check_ico_plane", lambda axes, real=obstructions.check_ico_plane: real(axes, most=3)),
    ),
    "thm:a5-three": (
        lambda: obstructions.a5_three(
            certify=lambda: obstructions.a5_three_certificate(list(groups.cube_rotations().values()))
        ),
    ),
    "lem:planar-rotation-product": (
        obstructions.planar_rotation_product,
        (obstructions, "planar_pairs", lambda order, count, real=obstructions.planar_pairs: real(3, count)),
    ),
    "thm:s5-impossibility": (
        lambda: obstructions.s5_impossibility(certify=lambda: obstructions.s5_certificate(t="(123)")),
    ),
    "thm:s5-impossibility/other-groups": (
        obstructions.other_groups,
        (obstructions, "planar_exponent", lambda q: 5040),  # every commutator of these groups is 1 to this power
        (obstructions, "sylow", lambda G, q: frozenset({G.identity})),
        (obstructions, "pair_law", lambda G: True),
    ),
    "odd-pairs": (lambda: obstructions.odd_pairs(EFFORT, law=lambda G: G.is_abelian),),
    "thm:s5-impossibility/deltaproduct-4": (
        obstructions.deltaproduct_four,
        (obstructions, "transpositions", lambda images, real=obstructions.transpositions: real(images)[::-1]),
    ),
    "thm:main-positive/verdicts": (
        verdicts.verdict_consistency,
        (verdicts, "find_obstruction", lambda G: obstructions.find_obstruction(group("S5"))),
    ),
    "frobenius-four": (
        lambda: verdicts.frobenius_four(EFFORT, build=lambda q: without_a_head(verdicts.frobenius_layer(q))),
    ),
    "planar-heads": (
        lambda: verdicts.planar_only(EFFORT, build=lambda G: without_a_head(verdicts.search_planar_heads(G))),
    ),
    "quaternion-chain": (
        lambda: verdicts.quaternion_chain(EFFORT, build=lambda name: without_a_head(verdicts.chain_layer(name))),
    ),
    "thm:main-positive/brute-force": (
        lambda: exhaustive.brute_force(EFFORT, judge=lambda G: replace(verdict(G), answer="impossible", layer=None)),
    ),
    "thm:main-positive/operator": (
        exactness.operator_exactness,
        (exactness, "programs", lambda names, real=exactness.programs: [slow(item) for item in real(names)]),
    ),
    "lem:wfamincount": (automata.clock, (automata, "Clock", lambda m: Clock(m, query=(1, 0)))),
    "prop:automata-factor-counts/permutation": (
        automata.permutation_counts,
        (automata.programs, "permutation_program", shorter(automata.programs.permutation_program)),
    ),
    "prop:automata-factor-counts/column-copy": (automata.copy_counts, (automata, "COPIES", first_of(automata.COPIES))),
    "prop:automata-factor-counts/deterministic": (
        automata.deterministic_counts,
        (automata.programs, "deterministic_program", shorter(automata.programs.deterministic_program)),
    ),
    "prop:automata-factor-counts/fibres": (
        automata.fibre_counts,
        (automata.programs, "fibre_program", shorter(automata.programs.fibre_program)),
    ),
    "prop:automata-factor-counts/positive-scale": (
        automata.scaled_counts,
        (
            automata.programs,
            "scaled_program",
            lambda *given, real=automata.programs.scaled_program: real(*given)._replace(
                program=real(*given).program[1:]
            ),
        ),
    ),
    "prop:automata-factor-counts/rational": (
        automata.rational_counts,
        (automata, "RATIONAL", first_of(automata.RATIONAL)),
    ),
    "thm:multilayer/groups": (automata.groups, (automata, "simulate", wrong_letters)),
    "thm:multilayer/dfa": (automata.dfas, (automata, "simulate", wrong_letters)),
    "thm:multilayer/wfa": (automata.wfas, (automata, "simulate", wrong_letters)),
    "thm:multilayer/regular-languages": (automata.regular_languages, (automata, "simulate", wrong_letters)),
    "thm:multilayer/no-peeking": (automata.no_peeking, (automata, "simulate", forgetful)),
    "thm:multilayer/fixed-datatype": (
        automata.fixed_datatype,
        (automata.programs, "merge", shorter(automata.programs.merge)),
    ),
    "thm:multilayer/float64": (automata.float64, (automata, "simulate", wrong_letters)),
    "thm:multilayer/float32": (automata.float32, (automata, "simulate", wrong_letters)),
    "thm:multilayer/float-for-ever": (automata.float_for_ever, (automata, "simulate", wrong_letters)),
}


def swapped(tracker):
    """A tracker whose first head takes letters 1 and 2 for one another."""
    first, *rest = tracker.heads
    order = [0, 2, 1, *range(3, len(first.A))]
    return replace(tracker, heads=(replace(first, A=tuple(first.A[i] for i in order)), *rest))


def alone(tracker):
    """The first head of several."""
    return replace(tracker, heads=tracker.heads[:1])


def without_a_head(layer):
    """Its first head told the product."""
    return replace(layer, stages=layer.stages[1:])


@pytest.mark.parametrize("label", BROKEN)
def test_a_broken_variant_is_refuted(label, monkeypatch):
    check, *replaced = BROKEN[label]
    for module, name, stand_in in replaced:
        monkeypatch.setattr(module, name, stand_in)
    with pytest.raises(Refuted):
        check(effort=EFFORT) if replaced else check()


def test_every_claim_has_a_broken_variant():
    """The others stand beside their claims, as functions that call the claim with something broken."""
    beside = [lambda_ for test in (test_spectra, test_structure, test_symbolic) for lambda_ in test.BROKEN.values()]
    called = {name for lambda_ in beside for name in lambda_.__code__.co_names}
    missing = [
        label for label, claim in load_claims().items() if label not in BROKEN and claim.check.__name__ not in called
    ]
    assert missing == []
