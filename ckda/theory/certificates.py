"""Certificates: what a compiled machine does, in exact numbers, as JSON that :mod:`ckda.theory.checker` checks alone.

Numbers are strings: "3/5" is a fraction, a list of such strings the coordinates of an algebraic number. Keys of the
JSON are sorted, so that one machine has one certificate, byte for byte.
"""

import random
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np

from ckda.groups import FiniteGroup
from ckda.theory import checker
from ckda.theory.exact import Field
from ckda.theory.factor_programs import Factor
from ckda.theory.groups import SignedHouseholder
from ckda.theory.layers import Decoded, Layer, Turn
from ckda.theory.machines import DFA, WFA

__all__ = [
    "FORMAT",
    "action_certificate",
    "automaton_certificate",
    "follow",
    "group_certificate",
    "weighted_certificate",
]

FORMAT = "ckda-certificate-3"
EXAMPLE = 200  #: letters of the example that every certificate holds; 24 where answers are fractions


def group_certificate(
    layer: Layer, decoded: Sequence[Decoded], letters: Sequence[str], modulo: int | None = None
) -> dict[str, Any]:
    """The certificate of a layer that :func:`ckda.theory.layers.check_layer` has decoded."""
    G = layer.group
    group = _group(G, layer.letters, modulo)
    word = _word(len(letters), EXAMPLE)
    now, answers = G.identity, []
    for a in word:
        now = int(G.table[layer.letters[a], now])
        answers.append(now)
    return {
        "format": FORMAT,
        "kind": "group",
        "name": G.name,
        "letters": list(letters),
        "group": group,
        "heads": [_head(layer.stages[i].transitions, found) for i, found in enumerate(decoded)],
        "answer": [element for (element,) in decoded[0].elements],
        "example": {"word": word, "answers": answers},
    }


def follow(certificate: dict[str, Any], word: Sequence[int]) -> list[int]:
    """The decoded element after every letter of a word, by exact arithmetic on the states of a group's heads."""
    heads, letters = certificate["heads"], len(certificate["letters"])
    decoders = [(checker.states(head, letters), [dict(row) for row in head["decoder"]]) for head in heads]
    states, answers = [0] * len(heads), []
    for letter in word:
        states = [step[s][letter] for s, (step, _) in zip(states, decoders, strict=True)]
        known = 0
        for s, (_, decoder) in reversed(list(zip(states, decoders, strict=True))):
            known = decoder[s][known]
        answers.append(certificate["answer"][known])
    return answers


def _group(G: FiniteGroup, letters: Sequence[int], modulo: int | None) -> dict[str, Any]:
    """The part of the table that the letters need, with the elements where their product can be computed again."""
    kind = "matrices" if modulo else "permutations" if G.of_permutations else "table"
    return {
        "as": kind,
        "identity": G.identity,
        "letters": [int(a) for a in letters],
        "rows": [G.table[a].tolist() for a in letters],
        "elements": [list(x) for x in G.labels] if kind != "table" else [str(x) for x in G.labels],
        "modulo": modulo,
    }


def _head(transitions: Sequence[SignedHouseholder | Turn], found: Decoded) -> dict[str, Any]:
    forms = [t.form if isinstance(t, Turn) else t for t in transitions]
    F, d = forms[0].key.field, len(forms[0].signs)
    weights = [F(1) / n for n in forms[0].lengths or [F(1)] * d]
    keys = [[x for (x,) in form.key.tolist()] for form in forms]
    rates = [F(2) / sum((w * x * x for w, x in zip(weights, key, strict=True)), F(0)) for key in keys]
    decoder = [[[e, int(value)] for e, value in enumerate(row) if value >= 0] for row in found.label]
    return {
        "field": _field(F),
        "weights": [_number(F, w) for w in weights],
        "signs": [list(form.signs) for form in forms],
        "keys": [[_number(F, x) for x in key] for key in keys],
        "rates": [_number(F, rate) for rate in rates],
        "columns": _count_columns(found.states.matrices),
        "step": found.step.tolist(),
        "decoder": decoder,
    }


def _count_columns(matrices: np.ndarray) -> int:
    """How many different vectors the columns of these matrices are."""
    columns = matrices.swapaxes(1, 2).reshape(-1, matrices.shape[1])
    return len(np.unique(columns.round(6) + 0.0, axis=0))


def _field(F: Field) -> dict[str, Any]:
    return {"modulus": [str(c) for c in reversed(F.modulus)], "root": F.float(F.element(_generator(F)))}


def _generator(F: Field) -> list[flint.fmpq]:
    return [flint.fmpq(int(i == 1)) for i in range(F.degree)]


def _number(F: Field, x: Any) -> list[str]:
    return [str(c) for c in F.coordinates(x)]


def _word(letters: int, length: int) -> list[int]:
    return random.Random(0).choices(range(letters), k=length)


def automaton_certificate(
    dfa: DFA, name: str, block: int, programs: dict[tuple[int, ...], list[Factor]], beta: Any
) -> dict[str, Any]:
    """The certificate of a DFA: the factors of every map that a block of letters can make."""
    word = _word(len(dfa.delta[0]), EXAMPLE)
    return _blocks(dfa, name, block, programs, beta) | {
        "kind": "dfa",
        "start": dfa.initial,
        "accept": sorted(dfa.accepting),
        "example": {"word": word, "answers": [[q, q in dfa.accepting] for q in dfa.trace(word)[1:]]},
    }


def action_certificate(
    points: DFA, name: str, block: int, programs: dict[tuple[int, ...], list[Factor]], elements: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The certificate of a group of permutations: that of the automaton of its points, and what the elements are."""
    word, number = _word(len(points.delta[0]), EXAMPLE), {tuple(x): i for i, x in enumerate(elements)}
    now, answers = tuple(range(points.size)), []
    for a in word:
        now = tuple(points.delta[x][a] for x in now)
        answers.append(number[now])
    return _blocks(points, name, block, programs, 2) | {
        "kind": "action",
        "elements": [list(x) for x in elements],
        "example": {"word": word, "answers": answers},
    }


def _blocks(
    dfa: DFA, name: str, block: int, programs: dict[tuple[int, ...], list[Factor]], beta: Any
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": name,
        "alphabet": list(dfa.alphabet or ()),
        "delta": [list(row) for row in dfa.delta],
        "block": block,
        "query": ["3/5", "4/5"],
        "beta": str(beta),
        "programs": [{"map": list(f), "factors": [_factor(x) for x in programs[f]]} for f in sorted(programs)],
    }


def weighted_certificate(
    wfa: WFA, name: str, alphabet: Sequence[str], block: int, template: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The certificate of a WFA: its matrices and the program that applies any matrix."""
    n, word = wfa.size, _word(len(wfa.matrices), 24)
    matrices = {
        a: [[str(M[i, j]) for j in range(n)] for i in range(n)] for a, M in zip(alphabet, wfa.matrices, strict=True)
    }
    return {
        "format": FORMAT,
        "kind": "wfa",
        "name": name,
        "alphabet": list(alphabet),
        "initial": [str(x) for x in wfa.initial],
        "final": [str(x) for x in wfa.final],
        "matrices": matrices,
        "block": block,
        "query": ["3/5", "4/5"],
        "program": list(template),
        "example": {"word": word, "answers": [str(wfa.weight(p)) for p in wfa.trace(word)[1:]]},
    }


def _factor(factor: Factor) -> dict[str, Any]:
    """A factor whose channels share one rate, its zeros left out."""
    return {
        "key": [[i, str(x)] for i, x in sorted(factor.key.items())],
        "gamma": str(factor.beta / flint.fmpq(factor.norm2)),
        "gate": [[i, str(a)] for i, a in sorted(factor.gate.items())],
    }


def rational_template(n: int, program: Sequence[Factor]) -> list[dict[str, Any]]:
    """The program of an n x n matrix with the entries as symbols, from the program of any one matrix."""
    entries = [(i, j) for i in range(n) for j in range(n)]
    scales = {7 * k + 3: entry for k, entry in enumerate(entries)}  # three factors, the scale, three factors
    return [
        {"scale": 2 * n, "entry": list(scales[r])} if r in scales else _factor(factor)
        for r, factor in enumerate(program)
    ]
