"""From a machine to layers: a group, a DFA or a rational WFA goes in, a runnable module with a certificate comes out.

Example:
    >>> machine = compile_machine(Compile("S3"))
    >>> machine.config["theorem"], machine.config["dimensions"], machine.answers([0, 1, 1])
    ('prop:planar-groups', [2], [3, 5, 3])
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.resources import files
from math import isfinite, lcm
from pathlib import Path
from typing import Any

import flint
import safetensors.torch
import sympy
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ckda.groups import FiniteGroup, Given, group, read_group
from ckda.record import write_bytes, write_json, write_text
from ckda.theory import certificates, checker
from ckda.theory import factor_programs as programs
from ckda.theory.automata import check_machine, check_program
from ckda.theory.claims import Refuted
from ckda.theory.layers import Layer, Turn, best_query, check_layer, readouts, separation
from ckda.theory.machines import DFA, WFA, Permutations, map_matrix, regex_to_dfa
from ckda.theory.modules import ActionMachine, AutomatonMachine, GroupMachine, WeightedMachine, build, group_tensors
from ckda.theory.multilayer import Accumulator, Clock, by_map, simulate
from ckda.theory.obstructions import find_obstruction, obstructed_letter
from ckda.theory.verdicts import describe, find_layer

__all__ = ["Compile", "Machine", "NoRealisation", "Run", "compile_machine", "load", "run"]

#: a lookup of more maps than this is refused
MOST_MAPS = 5000
FEW_LETTERS = 24  #: with more letters the stand-alone checker, in plain Python, is not run while compiling
LARGEST_WEIGHT = 10**100
LARGEST_DEGREE = (
    100  #: of a number field that exact arithmetic takes in its stride: Z_n and D_n have phi(lcm(4, n)) / 2
)
LOGIT = 200.0  #: tanh and sigmoid of it are one, in every format


class NoRealisation(Exception):
    """No machine comes out: it is impossible, and why, or none is known. `kind`: "impossible" or "unknown"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Compile:
    """What to compile: a group's name, a file, or the data such a file holds."""

    source: str | Path | dict[str, Any]
    letters: str = "generators"  #: of a group: "generators" or "all"
    words: int = 2  #: random words of the self-check through the operator
    length: int = 1000  #: letters of each
    most_maps: int = MOST_MAPS
    layers: int | None = None  #: 1 or 3; None: the fewest known. One layer has no DFA or WFA


@dataclass(frozen=True)
class Run:
    """What to run: a machine (or its folder) on one word."""

    machine: "Machine | str | Path"
    word: Sequence[int]
    exact: bool = False
    device: str = "cpu"
    dtype: torch.dtype | None = None  #: None: float32 for groups, float64 for automata
    backend: str | None = None  #: of the operator


@dataclass(frozen=True, eq=False)
class Machine:
    """A compiled machine: its config, its tensors, its certificate."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    certificate: dict[str, Any]
    checked: dict[str, Any] = field(default_factory=dict)  #: what the self-check has seen

    def module(self, dtype: torch.dtype | None = None, backend: str | None = None) -> nn.Module:
        """The torch module, in float32 for groups and float64 for automata unless told otherwise."""
        default = torch.float32 if self.config["kind"] == "group" else torch.float64
        return build(self.config, self.tensors, backend).to(dtype or default)

    def answers(self, word: Sequence[int]) -> list[Any]:
        """The answer after every letter, through the operator."""
        return run(Run(self, word))

    def save(self, folder: str | Path) -> Path:
        """weights.safetensors, certificate.json and the checker, each written whole; machine.json last: it says all are there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "machine.json").unlink(missing_ok=True)
        write_bytes(
            folder / "weights.safetensors", safetensors.torch.save({k: v.contiguous() for k, v in self.tensors.items()})
        )
        write_text(folder / "certificate.json", certificate_text(self.certificate))
        write_text(folder / "checker.py", (files("ckda.theory") / "checker.py").read_text())
        write_json(folder / "machine.json", {**self.config, "checked": self.checked})
        return folder


def certificate_text(certificate: dict[str, Any]) -> str:
    """The canonical form: one machine has one certificate, byte for byte."""
    return json.dumps(certificate, sort_keys=True, separators=(",", ":")) + "\n"


def load(folder: str | Path) -> Machine:
    """The machine of a folder; ValueError where its files are missing, damaged or of different machines."""
    folder = Path(folder)
    for name in ("machine.json", "weights.safetensors", "certificate.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}: it is no machine of `ckda theory compile`")
    try:
        return _loaded(folder)
    except (ValueError, LookupError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: its files are damaged or of different machines, compile it again ({error})"
        ) from error


def _loaded(folder: Path) -> Machine:
    config, certificate = (json.loads((folder / name).read_text()) for name in ("machine.json", "certificate.json"))
    tensors = safetensors.torch.load_file(folder / "weights.safetensors")
    machine = Machine(config, tensors, certificate, config.pop("checked", {}))
    if any(certificate[key] != config[key] for key in ("kind", "name")) or not config["letters"]:
        raise ValueError("machine.json and certificate.json differ")
    machine.module()
    return machine


# what was given


def read(source: str | Path | dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """A name and the data of a file; data None: a group of that name."""
    if isinstance(source, dict):
        return _name_of(source, "machine"), source
    path = Path(source)
    if path.suffix == ".json" or path.exists():
        if not path.is_file():
            raise ValueError(f"{source}: there is no such file")
        try:
            data = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} is no JSON: {error}") from error
        if isinstance(data, list):  # a bare table, as `ckda track` reads it
            data = {"table": data}
        if not isinstance(data, dict):
            raise ValueError(f'{source} holds neither a table [[...], ...] nor an object such as {{"regex": "(ab)*"}}')
        return _name_of(data, path.stem), data
    return str(source), None


def _name_of(data: dict[str, Any], default: str) -> str:
    name = data.get("name", default)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name is {name!r}; it must be a word or a sentence")
    return name


def kind_of(data: dict[str, Any]) -> str:
    """ "group", "dfa" or "wfa" by the keys of a file.

    Example:
        >>> kind_of({"regex": "a*"}), kind_of({"table": [[0]]})
        ('dfa', 'group')
    """
    if "delta" in data or "regex" in data:
        return "dfa"
    if "initial" in data or "final" in data:
        return "wfa"
    if any(key in data for key in ("generators", "table", "matrices")):
        return "group"
    raise ValueError(
        "the file is neither a group (generators, table, or matrices with modulo), nor a DFA (delta or regex), nor a WFA "
        "(initial, final, matrices)"
    )


#: the keys that a file of a kind may have besides its name
KEYS = {
    "generators": {"generators"},
    "table": {"table"},
    "matrices": {"matrices", "modulo"},
    "regex": {"regex", "alphabet"},
    "delta": {"alphabet", "start", "accept", "delta"},
    "wfa": {"alphabet", "initial", "final", "matrices"},
}


def _refuse_unknown(data: dict[str, Any], kind: str) -> None:
    """A key that the file's kind does not have is a slip, and not passed over."""
    form = "wfa" if kind == "wfa" else next(key for key in KEYS if key in data)
    unknown = sorted(set(data) - KEYS[form] - {"name"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown here; beside {form!r} a file may hold {_listed(KEYS[form], form)}")


def _listed(keys: set[str], form: str) -> str:
    return ", ".join(map(repr, [*sorted(keys - {form}), "name"]))


def compile_machine(config: Compile) -> Machine:
    """The smallest realisation we know, checked exactly and through the operator; :class:`NoRealisation` if there is none."""
    name, data = read(config.source)
    kind = "group" if data is None else kind_of(data)
    if data is not None:
        _refuse_unknown(data, kind)
    if config.layers not in (None, 1, 3) or (kind != "group" and config.layers == 1):
        raise ValueError(f"layers is {config.layers}; groups are compiled to 1 or 3, automata to 3")
    if kind == "group":
        given = _named(name) if data is None else read_group(data, name)
        if config.layers == 3:
            return _compile_action(config, given)
        return _compile_group(config, given, data.get("modulo") if data and "matrices" in data else None)
    assert data is not None
    if kind == "dfa":
        return _compile_dfa(config, name, read_dfa(data))
    wfa, alphabet = read_wfa(data)
    return _compile_wfa(config, name, wfa, alphabet)


def _named(name: str) -> Given:
    G = group(name)
    return Given(G, G.generators or [G.identity])


def read_dfa(data: dict[str, Any]) -> DFA:
    """A DFA from {"alphabet", "start", "accept", "delta"} or {"regex", "alphabet" if not all letters of the pattern}.

    Example:
        >>> read_dfa({"regex": "(ab)*"}).size
        3
    """
    if "regex" in data:
        return _read_regex(data["regex"], data.get("alphabet"))
    delta, alphabet = data["delta"], _alphabet(data.get("alphabet"))
    if not isinstance(delta, list) or not delta:
        raise ValueError(f"delta is {delta!r}; it must be a list with a row for every state")
    n = len(delta)
    for q, row in enumerate(delta):
        if not _states(row, n) or len(row) != len(alphabet):
            raise ValueError(
                f"delta[{q}] is {row}; it must hold one state 0 ... {n - 1} for each of {len(alphabet)} letters"
            )
    start, accept = data.get("start", 0), data.get("accept", [])
    if not _states([start], n) or not _states(accept, n):
        raise ValueError(f"start {start} and accept {accept} must be states 0 ... {n - 1}")
    return DFA(tuple(map(tuple, delta)), start, frozenset(accept), alphabet)


def _read_regex(pattern: Any, alphabet: Any) -> DFA:
    """A pattern over single letters: those of the alphabet, or those of the pattern."""
    if not isinstance(pattern, str):
        raise ValueError(f"regex is {pattern!r}; it must be a pattern such as (a|b)*abba")
    plain = re.sub(r"\{[^}]*\}|\\.", "", pattern)
    if re.search(r"(?<!\[)\^|\$", plain):
        raise ValueError(f"regex {pattern!r}: a pattern is matched against the whole word, leave out ^ and $")
    ranges = [x for part in re.findall(r"\[([^\]]*)\]", plain) for x in re.findall(r"(\w)-(\w)", part)]
    inside = {chr(c) for x, y in ranges for c in range(ord(x), ord(y) + 1)}
    letters = _alphabet(sorted(inside | set(re.findall(r"\w", plain))) if alphabet is None else alphabet)
    if any(len(a) != 1 for a in letters):
        raise ValueError(
            f"regex {pattern!r} with the alphabet {list(letters)}: a pattern over single letters is needed"
        )
    return regex_to_dfa(pattern, "".join(letters))


def _alphabet(given: Any) -> tuple[str, ...]:
    """Names of letters, each once; a string is a list of its letters."""
    letters = list(given) if isinstance(given, (list, str)) else []
    if not letters or not all(isinstance(a, str) and a and not a.isspace() for a in letters):
        raise ValueError(f"alphabet is {given!r}; an automaton needs its alphabet, a list of names such as ['a', 'b']")
    twice = next((a for a in letters if letters.count(a) > 1), None)
    if twice is not None:
        raise ValueError(f"alphabet has the letter {twice!r} twice")
    return tuple(letters)


def _states(given: Any, n: int) -> bool:
    return isinstance(given, list) and all(type(q) is int and 0 <= q < n for q in given)


def read_wfa(data: dict[str, Any]) -> tuple[WFA, list[str]]:
    """A WFA from {"alphabet", "initial", "final", "matrices": {"a": [["1/2", ...], ...]}}, with its letters."""
    matrices = data.get("matrices")
    if not isinstance(matrices, dict) or "initial" not in data or "final" not in data:
        raise ValueError(
            'a WFA needs initial, final and matrices, an object with a matrix for every letter, {"a": [[...]]}'
        )
    alphabet = list(_alphabet(data.get("alphabet", list(matrices))))
    if set(alphabet) != set(matrices):
        raise ValueError(f"a WFA needs a matrix for every letter: alphabet {alphabet}, matrices for {list(matrices)}")
    initial, final = _fractions(data["initial"], "initial"), _fractions(data["final"], "final")
    n, rows = len(initial), []
    for a in alphabet:
        if not isinstance(matrices[a], list):
            raise ValueError(f"the matrix of {a!r} is {matrices[a]!r}; it must be a list of rows")
        rows.append([_fractions(row, f"a row of the matrix of {a!r}") for row in matrices[a]])
    if len(final) != n or any(len(M) != n or any(len(row) != n for row in M) for M in rows):
        raise ValueError(f"initial has {n} entries; final must have as many, and every matrix be {n} x {n}")
    return WFA([flint.fmpq_mat(n, n, [x for row in M for x in row]) for M in rows], initial, final), alphabet


def _fractions(given: Any, what: str) -> tuple[flint.fmpq, ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{what} is {given!r}; it must be a list of fractions that is not empty")
    return tuple(map(_fraction, given))


def _fraction(text: Any) -> flint.fmpq:
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ValueError(f"{text!r}: weights are whole numbers or fractions such as 1/2")
    match = re.fullmatch(r"\s*(-?\d+)\s*(?:/\s*(\d+))?\s*", str(text))
    if not match or (match[2] and not int(match[2])):
        raise ValueError(f"{text!r} is no fraction such as 1/2")
    number = Fraction(int(match[1]), int(match[2] or 1))
    if abs(number) > LARGEST_WEIGHT:
        raise ValueError(f"the weight {text!r} is beyond {float(LARGEST_WEIGHT):.0e}, floats cannot follow it")
    return flint.fmpq(number.numerator, number.denominator)


# groups


def _compile_group(config: Compile, given: Given, modulo: int | None) -> Machine:
    G = given.group
    letters = _letters(config, given)
    layer = _layer_for(G, letters)
    _refuse_large_field(layer)
    try:
        layer = _without_idle_heads(layer) if len(letters) < G.order else layer
        decoded = check_layer(layer)
    except Refuted as refuted:
        raise NoRealisation("unknown", f"{G.name}: its layer is too large to check: {refuted}") from refuted
    names = [G.element_name(a) for a in letters]
    machine, tensors, facts = _group_module(layer, decoded, names)
    certificate = certificates.group_certificate(layer, decoded, names, modulo)
    told = (
        checker.check(certificate)
        if len(letters) <= FEW_LETTERS
        else "left to you: it takes a while for so many letters"
    )
    result = Machine(machine.config | facts, tensors, certificate)
    seen = _check_through_operator(result, config)
    exact = {"exact": f"all {sum(d.pairs for d in decoded)} pairs (state, known before)", "checker": told}
    return Machine(result.config, tensors, certificate, exact | seen)


def _letters(config: Compile, given: Given) -> list[int]:
    if config.letters not in ("generators", "all"):
        raise ValueError(f"letters is {config.letters!r}; it must be 'generators' or 'all'")
    return list(given.letters) if config.letters == "generators" else list(range(given.group.order))


#: what one layer cannot do, or is not known to do, three can
THREE = "three layers track every finite group (thm:multilayer): --layers 3"


def _layer_for(G: FiniteGroup, letters: list[int]) -> Layer:
    """A layer over these letters; NoRealisation with the obstruction, or that none is known."""
    obstruction = find_obstruction(G)
    if obstruction is None:
        layer = find_layer(G)
        if layer is None:
            raise NoRealisation(
                "unknown", f"{G.name}: no realisation by one layer is known here, and no obstruction applies; {THREE}"
            )
        return layer.over(letters)
    if len(letters) == G.order:
        raise NoRealisation(
            "impossible", f"{G.name}: no layer tracks it, by {obstruction.label}: {obstruction.reason}; {THREE}"
        )
    found = obstructed_letter(G, letters)
    if found is not None:
        c, t, label = found
        raise NoRealisation(
            "impossible",
            f"{G.name}: no layer tracks it, by {label}: the letter c = {G.element_name(c)} and "
            f"t = {G.element_name(t)} give the contradiction of its proof; {THREE}",
        )
    raise NoRealisation(
        "unknown",
        f"{G.name}: no layer tracks it with all elements as letters, by {obstruction.label}; whether one does with these "
        f"letters is not known here; {THREE}",
    )


def _refuse_large_field(layer: Layer) -> None:
    """The certificate's numbers lie in a field whose degree grows with n, and so does the time of every check."""
    for n in sorted({t.n for stage in layer.stages for t in stage.transitions if isinstance(t, Turn)}):
        degree = int(sympy.totient(lcm(4, n))) // 2
        if degree > LARGEST_DEGREE:
            raise NoRealisation(
                "unknown",
                f"{layer.group.name}: turns by 2 pi/{n} lie in a number field of degree {degree}; the exact self-check "
                f"ends at {LARGEST_DEGREE}",
            )


def _without_idle_heads(layer: Layer) -> Layer:
    """The layer without heads that words over its letters can do without: few letters may need fewer heads."""
    for i in reversed(range(1, len(layer.stages))):
        fewer = replace(layer, stages=(*layer.stages[:i], *layer.stages[i + 1 :]))
        try:
            check_layer(fewer)
        except Refuted:
            continue
        layer = fewer
    return layer


def _group_module(
    layer: Layer, decoded: Sequence[Any], names: list[str]
) -> tuple[GroupMachine, dict[str, Tensor], dict]:
    """The layer's weights and decoder as a module, its tensors, and what is to be said about it."""
    G, H, K = layer.group, len(layer.stages), max(layer.dimensions)
    signs = [torch.tensor([t.signs for t in stage.transitions], dtype=torch.float64) for stage in layer.stages]
    padded = torch.cat([nn.functional.pad(s, (0, K - s.shape[1]), value=1.0) for s in signs], 1)
    V = max(K, int(torch.linalg.matrix_rank(padded)))
    queries, margin = [], 2.0
    for found in decoded:
        classes = found.label.T
        queries.append(best_query(found.states.matrices, classes))
        margin = min(margin, separation(found.states.matrices, queries[-1], classes))
    if margin < 1e-6:
        raise NoRealisation("unknown", f"{G.name}: no query tried tells the states apart (distance {margin:.1e})")
    config = {
        "kind": "group",
        "name": G.name,
        "letters": names,
        "elements": [G.element_name(a) for a in range(G.order)],
        "identity": G.identity,
        "dimensions": layer.dimensions,
        "head_dim": K,
        "head_v_dim": V,
        "hidden_size": max(len(names), H * V),
        "pairs": [found.pairs for found in decoded],
        "known": [found.label.shape[1] for found in decoded],
        "answers": len(decoded[0].elements),
    }
    machine = GroupMachine(config).double()
    keys = [
        torch.tensor([t.unit_key().tolist() for t in stage.transitions], dtype=torch.float64) for stage in layer.stages
    ]
    group_tensors(machine, keys, signs, [torch.from_numpy(q) for q in queries], LOGIT)
    for h, found in enumerate(decoded):
        _write_decoder(machine, h, found, queries[h])
    machine.answer.copy_(torch.tensor([x for (x,) in decoded[0].elements]))
    facts = {
        "theorem": ", ".join(layer.labels),
        "realisation": f"one layer, {describe(layer).removeprefix('by ')}",
        "layers": 1,
        "heads": H,
        "beta": "2 at every letter (range [0, 2]); gates +1 and -1",
        "lookup": f"a decoder of {sum(found.pairs for found in decoded)} entries after the layer",
        "radius": margin / 2,
    }
    return machine, machine.state_dict(), facts


def _write_decoder(machine: GroupMachine, h: int, found: Any, query: Any) -> None:
    """Candidates of one head, by what is known before: their outputs, directions of length one, and what they tell."""
    outputs = torch.from_numpy(readouts(found.states.matrices, query))
    label = torch.from_numpy(found.label)
    known, state = (label.T >= 0).nonzero(as_tuple=True)
    getattr(machine, f"outputs{h}").copy_(outputs[state])
    getattr(machine, f"labels{h}").copy_(label[state, known])
    counts = torch.bincount(known, minlength=label.shape[1])
    getattr(machine, f"start{h}")[1:].copy_(counts.cumsum(0))


# a group by three layers


def _compile_action(config: Compile, given: Given) -> Machine:
    """A group on its points, or on itself where it has none: the accumulator holds the permutation as a matrix."""
    G = given.group
    chosen = _letters(config, given)
    elements: list[tuple[int, ...]] = [tuple(x) for x in (G.labels if G.of_permutations else G.table.tolist())]
    n, m, letters = len(elements[0]), max(1, len(elements[0]) - 1), [elements[a] for a in chosen]
    if 2 * m > 256 or G.order > config.most_maps:
        raise NoRealisation(
            "unknown",
            f"{G.name}: {n} points need a buffer of width {2 * m}, at most 256, and {G.order} elements a lookup of as many "
            f"rows, at most {config.most_maps}",
        )
    names = [G.element_name(a) for a in chosen]
    dfa = DFA(tuple(tuple(a[x] for a in letters) for x in range(n)), 0, frozenset(), tuple(names))
    program = {f: programs.permutation_program(f) for f in _maps_of_blocks(letters, n, m)}
    for f, factors in program.items():
        check_program(factors, map_matrix(f), programs.CKDA, len(factors), f"the permutation {f}")
    layers = simulate(Permutations(tuple(letters)), m=m)
    check_machine(Permutations(tuple(letters)), random.Random(1).choices(range(len(letters)), k=6 * m), layers)
    numbers = {
        "kind": "action",
        "name": G.name,
        "letters": names,
        "elements": [G.element_name(a) for a in range(G.order)],
        "identity": G.identity,
        "states": n,
        "width": n,
        "columns": n,
        "block": m,
        "maps": G.order,
        "blocks": len(program),
    }
    machine = ActionMachine(numbers)
    _write_lookup(machine, elements, letters, program, layers.accumulator)
    machine.rows.copy_(torch.tensor(elements, dtype=torch.float64)[:, None])
    machine.elements.copy_(torch.tensor(elements))
    machine.start_state.copy_(torch.eye(n))
    facts = {
        "theorem": "thm:multilayer",
        "realisation": f"three layers (clock, buffer, accumulator on {n} points) in blocks of {m}",
        "layers": 3,
        "heads": [1, 1, 1],
        "beta": "2, 1 or 0; gates +1 and -1",
        "lookup": f"{G.order} elements x {len(letters)} letters, {len(program)} programs of {m} factors",
    }
    certificate = certificates.action_certificate(dfa, G.name, m, program, elements)
    return _checked(config, numbers | facts, machine, certificate, f"all {len(program)} permutations of blocks", 6 * m)


def _maps_of_blocks(letters: Sequence[tuple[int, ...]], n: int, m: int) -> list[tuple[int, ...]]:
    """The maps of the words of m letters."""
    maps = {tuple(range(n))}
    for _ in range(m):
        maps = {tuple(a[x] for x in f) for f in maps for a in letters}
    return sorted(maps)


def _write_lookup(
    machine: AutomatonMachine,
    maps: Sequence[tuple[int, ...]],
    letters: Sequence[tuple[int, ...]],
    program: dict[tuple[int, ...], list[programs.Factor]],
    accumulator: Accumulator,
) -> None:
    """The clock, the maps of words and their products with letters, and the factors of every block with their completions."""
    n = len(letters[0])
    _write_clock(machine, machine.m)
    place, where = {f: i for i, f in enumerate(maps)}, {f: i for i, f in enumerate(program)}
    machine.compose.copy_(torch.tensor([[place[tuple(a[x] for x in f)] for f in maps] for a in letters]))
    machine.which.copy_(torch.tensor([where.get(f, 0) for f in maps]))
    for i, factors in enumerate(program.values()):
        block = accumulator.block_of(factors)
        for r, factor in enumerate(block.factors):
            _write_factor(machine.keys[i, r], machine.rates[i], machine.gates[i, r], r, factor)
        dense = [[[float(row.get(j, 0)) for j in range(n)] for row in rows] for rows in block.completions]
        machine.completions[i] = torch.tensor(dense, dtype=torch.float64)


def _checked(
    config: Compile, told: dict[str, Any], module: nn.Module, certificate: dict[str, Any], exact: str, letters: int
) -> Machine:
    """The machine with what its checks have seen: exact arithmetic, the stand-alone checker, the operator."""
    result = Machine(told, module.state_dict(), certificate)
    seen = {"exact": f"{exact}, and every prefix of a word of {letters} letters", "checker": checker.check(certificate)}
    return replace(result, checked=seen | _check_through_operator(result, config))


# automata


def _compile_dfa(config: Compile, name: str, dfa: DFA) -> Machine:
    n, letters = dfa.size, dfa.maps
    if 3 * n > 257:
        raise NoRealisation(
            "unknown",
            f"{name}: {n} states need blocks of 3n/2 = {3 * n // 2} letters and a buffer of width {3 * n // 2 * 2}; the "
            f"operator's widths end at 256, so 85 states are the most",
        )
    maps = _monoid(letters, config.most_maps, name)
    m, program, beta = _block_programs(letters, n)
    for f, factors in program.items():
        check_program(factors, map_matrix(f), programs.CKDA_AUTOMATA, len(factors), f"the map {f}")
    layers = simulate(dfa, m=m, program=by_map(programs.fibre_program))
    check_machine(dfa, random.Random(1).choices(range(len(letters)), k=6 * m), layers, programs.CKDA_AUTOMATA)
    numbers = {
        "kind": "dfa",
        "name": name,
        "letters": list(dfa.alphabet or map(str, range(len(letters)))),
        "states": n,
        "width": n,
        "block": m,
        "maps": len(maps),
        "blocks": len(program),
    }
    machine = AutomatonMachine(numbers)
    _write_lookup(machine, maps, letters, program, layers.accumulator)
    accept = [int(q in dfa.accepting) for q in range(n)]
    machine.rows.copy_(torch.tensor([[list(f), [accept[x] for x in f]] for f in maps], dtype=torch.float64))
    machine.start_state[dfa.initial, 0] = 1.0
    facts = {
        "theorem": "thm:multilayer, prop:automata-factor-counts/fibres",
        "realisation": f"three layers (clock, buffer, accumulator) in blocks of {m}",
        "layers": 3,
        "heads": [1, 1, 2],
        "beta": f"up to {beta}; gates in [-1, 1], 0 included",
        "lookup": f"{len(maps)} maps x {len(letters)} letters, {len(program)} programs of {m} factors",
    }
    certificate = certificates.automaton_certificate(dfa, name, m, program, beta)
    return _checked(config, numbers | facts, machine, certificate, f"all {len(program)} maps of blocks", 6 * m)


def _monoid(letters: Sequence[tuple[int, ...]], most: int, name: str) -> list[tuple[int, ...]]:
    """The maps of all words, the identity first."""
    identity = tuple(range(len(letters[0])))
    found, frontier = {identity: None}, [identity]
    while frontier:
        frontier = [
            h for h in dict.fromkeys(tuple(a[x] for x in f) for f in frontier for a in letters) if h not in found
        ]
        found |= dict.fromkeys(frontier)
        if len(found) > most:
            raise NoRealisation(
                "unknown",
                f"{name}: its words make more than {most} different maps of {len(identity)} states; the lookup between "
                f"the buffer and the accumulator would need a row for each (a larger limit: --most-maps)",
            )
    return list(found)


def _block_programs(
    letters: Sequence[tuple[int, ...]], n: int
) -> tuple[int, dict[tuple[int, ...], list[programs.Factor]], Any]:
    """The block length, a program for every map of a block, and the largest learning rate."""
    m = 1 if n == 1 else max(1, 3 * n // 2)
    program = {f: programs.fibre_program(f) for f in _maps_of_blocks(letters, n, m)}
    rates = [factor.beta for factors in program.values() for factor in factors]
    return m, program, max([*rates, 0])


def _write_clock(machine: Any, m: int) -> None:
    clock = Clock(m)
    machine.clock_key.copy_(torch.tensor([float(clock.key[0]), float(clock.key[1])], dtype=torch.float64))
    machine.readouts.copy_(torch.tensor([float(x) for x in clock.readouts], dtype=torch.float64))


def _write_factor(key: Tensor, rates: Tensor, gate: Tensor, r: int, factor: programs.Factor) -> None:
    """A factor at its unit key, or the identity where its rate is zero."""
    for i, x in factor.key.items():
        key[i] = float(x)
    key /= key.norm()
    rates[r] = float(flint.fmpq(factor.beta))
    gate.fill_(1.0)
    for i, a in factor.gate.items():
        gate[i] = float(a)


def _compile_wfa(config: Compile, name: str, wfa: WFA, alphabet: list[str]) -> Machine:
    n = wfa.size
    m, width = 7 * n * n + 3 * n, 2 * n + 1
    if 2 * m > 256:
        raise NoRealisation(
            "unknown",
            f"{name}: {n} states need blocks of 7n^2 + 3n = {m} letters and a buffer of width {2 * m}; the operator's "
            f"widths end at 256, so four states are the most",
        )
    ones = flint.fmpq_mat(n, n, [1] * (n * n))
    template = certificates.rational_template(n, programs.rational_program(ones))
    check_machine(wfa, random.Random(1).choices(range(len(wfa.matrices)), k=m + 20), None, programs.CKDA_WEIGHTED)
    numbers = {
        "kind": "wfa",
        "name": name,
        "letters": alphabet,
        "states": n,
        "width": width,
        "block": m,
        "scales": [[r, f["scale"], *f["entry"]] for r, f in enumerate(template) if "scale" in f],
    }
    machine = WeightedMachine(numbers)
    _write_clock(machine, m)
    for r, factor in enumerate(programs.rational_program(ones)):
        _write_factor(machine.keys[r], machine.rates, machine.gates[r], r, factor)
    machine.matrices.copy_(
        torch.tensor(
            [[[float(M[i, j]) for j in range(n)] for i in range(n)] for M in wfa.matrices], dtype=torch.float64
        )
    )
    machine.final.copy_(torch.tensor([float(x) for x in wfa.final], dtype=torch.float64))
    machine.start_state[:n, 0] = torch.tensor([float(x) for x in wfa.initial], dtype=torch.float64)
    facts = {
        "theorem": "thm:multilayer, prop:automata-factor-counts/rational",
        "realisation": f"three layers (clock, buffer, accumulator) in blocks of {m}",
        "layers": 3,
        "heads": [1, 1, 1],
        "beta": "1 + |entry of the block's matrix|, unbounded; gates in [-1, 1], 0 included",
        "lookup": f"as a table it would have {len(alphabet)}^{m} rows; the module multiplies the matrices instead",
    }
    certificate = certificates.weighted_certificate(wfa, name, alphabet, m, template)
    return _checked(config, numbers | facts, machine, certificate, "the program for every matrix", m + 20)


# running


def direct(certificate: dict[str, Any], word: Sequence[int]) -> list[Any]:
    """What the machine should answer after every letter, by direct simulation: elements, [state, accepts], fractions."""
    if certificate["kind"] == "group":
        now, answers = certificate["group"]["identity"], []
        for a in word:
            now = certificate["group"]["rows"][a][now]
            answers.append(now)
        return answers
    if certificate["kind"] == "action":
        images, answers, number = list(range(len(certificate["delta"]))), [], _numbers(certificate)
        for a in word:
            images = [certificate["delta"][x][a] for x in images]
            answers.append(number[tuple(images)])
        return answers
    if certificate["kind"] == "dfa":
        q, answers = certificate["start"], []
        for a in word:
            q = certificate["delta"][q][a]
            answers.append([q, int(q in certificate["accept"])])
        return answers
    wfa, _ = read_wfa(certificate)
    return [wfa.weight(p) for p in wfa.trace(word)[1:]]


def _numbers(certificate: dict[str, Any]) -> dict[tuple[int, ...], int]:
    """The number of every element of a group of permutations."""
    return {tuple(x): i for i, x in enumerate(certificate["elements"])}


def _check_through_operator(machine: Machine, config: Compile) -> dict[str, Any]:
    """Random words through the module, every prefix against the direct simulation; Refuted where one differs."""
    rng, kind = random.Random(2), machine.config["kind"]
    length = min(config.length, 150) if kind == "wfa" else config.length
    module, worst = machine.module(), 0.0
    for _ in range(config.words):
        word = rng.choices(range(len(machine.config["letters"])), k=length)
        found = module(torch.tensor([word]))[0].tolist()
        wanted = direct(machine.certificate, word)
        if kind == "wfa":
            worst = max(worst, _weight_error(machine.config["name"], found, wanted))
        elif found != wanted:
            t = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise Refuted(f"{machine.config['name']}: through the operator the answer is wrong after {t + 1} letters")
    if worst > 1e-6:
        raise Refuted(f"{machine.config['name']}: through the operator a weight is off by {worst:.1e} of the largest")
    what = f"{config.words} words of {length} letters, every prefix"
    return {"operator": what if kind != "wfa" else f"{what}; largest error {worst:.1e} of the largest weight"}


def _weight_error(name: str, found: Sequence[float], wanted: Sequence[Any]) -> float:
    """The largest error as a part of the largest weight; NoRealisation where a float overflows on the way."""
    if max(abs(x) for x in wanted) > LARGEST_WEIGHT**3 or not all(map(isfinite, found)):
        raise NoRealisation(
            "unknown",
            f"{name}: its weights grow beyond floats within {len(wanted)} letters, so no module can follow them",
        )
    scale = max(1e-300, max(abs(float(x)) for x in wanted))
    return max(abs(a - float(b)) for a, b in zip(found, wanted, strict=True)) / scale


def run(config: Run) -> list[Any]:
    """The answer after every letter of a word: through the operator, or exactly."""
    machine = config.machine if isinstance(config.machine, Machine) else load(config.machine)
    letters = len(machine.config["letters"])
    bad = next((a for a in config.word if a not in range(letters)), None)
    if bad is not None:
        raise ValueError(f"letter {bad} of the word: this machine's letters are 0 ... {letters - 1}")
    if not config.word:
        return []
    if config.exact:
        return _run_exactly(machine, config.word)
    module = machine.module(config.dtype, config.backend).to(config.device)
    return module(torch.tensor([list(config.word)], device=config.device))[0].tolist()


def _run_exactly(machine: Machine, word: Sequence[int]) -> list[Any]:
    """By exact arithmetic: the heads' states over their fields, or the three layers over Q."""
    certificate = machine.certificate
    if certificate["kind"] == "group":
        return certificates.follow(certificate, word)
    if certificate["kind"] == "action":
        letters, number = zip(*certificate["delta"], strict=True), _numbers(certificate)
        layers = simulate(Permutations(tuple(letters)), m=certificate["block"])
        return [number[tuple(map(int, images))] for (images,) in layers.run(word)]
    if certificate["kind"] == "dfa":
        dfa = read_dfa(certificate)
        layers = simulate(dfa, m=certificate["block"], program=by_map(programs.fibre_program))
        return [[int(q), int(accepts)] for q, accepts in layers.run(word)]
    wfa, _ = read_wfa(certificate)
    return [str(values[0]) for values in simulate(wfa).run(word)]
