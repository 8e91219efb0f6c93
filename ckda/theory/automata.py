"""Claims of appendix D: the clock, the factor programs with their counts, and the three-layer simulation.

The objects live in :mod:`machines`, :mod:`factor_programs` and :mod:`multilayer`; here they are tried. Every `check_*`
raises :class:`Refuted` with the counterexample, and the tests feed each of them something broken.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, permutations, product
from math import lcm, log2
from typing import Any

import flint
import sympy
import torch

from ckda.theory import automata_figures  # noqa: F401  (registers drawings)
from ckda.theory import factor_programs as programs
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.exact import Field, field
from ckda.theory.factor_programs import Factor, Range, map_matrix
from ckda.theory.machines import DFA, WFA, GroupWords, Machine, Permutations, Word, group, regex_to_dfa
from ckda.theory.multilayer import Clock, State, ThreeLayers, by_map, run_layer, simulate
from ckda.theory.multilayer_float import locked_clock, run_float

__all__ = ["check_clock", "check_copy", "check_machine", "check_no_peeking", "check_program", "check_scaled"]


def _scaled(count: int, effort: float) -> int:
    return max(1, round(count * effort))


# the clock


@claim("lem:wfamincount", "One CKDA head with a fixed query counts positions modulo 2m, for every m")
def clock(effort: float = 1.0) -> Evidence:
    """Every m up to 72, and 119: the block length of S5 acting on itself."""
    lengths = [*range(1, _scaled(72, effort) + 1), *([119] if effort >= 1 else [])]
    for m in lengths:
        check_clock(Clock(m))
    note = "rotation by pi/m, 2m distinct readouts under the query (3/5, 4/5), two full turns stepped through"
    return Evidence(len(lengths), "exact", note=note)


def check_clock(clock: Clock) -> None:
    """Unit key, the rotation by pi/m, readouts all different, and two turns that count right (lem:wfamincount).

    Example:
        >>> broken = Clock(3, query=(1, 0))  # the cosine alone
        >>> check_clock(broken)
        Traceback (most recent call last):
        ckda.theory.claims.Refuted: m = 3: positions 2 and 4 have the same readout
    """
    m, F = clock.m, clock.field
    if sum(x * x for x in clock.key.values()) != 1:
        raise Refuted(f"m = {m}: the key is not of length one")
    rotation = ({0: F.cos(2), 1: F.sin(2)}, {0: -F.sin(2), 1: F.cos(2)})
    for j, wanted in enumerate(rotation):
        state = State(2, {(j, 0): F.cos(0)})
        state.apply(clock.parameters(None))
        if any(state.read({i: 1}).get(0, 0) != x for i, x in wanted.items()):
            raise Refuted(f"m = {m}: the transition does not rotate e_{j + 1} by pi/m")
    seen: dict[Any, int] = {}
    for i, o in enumerate(clock.readouts):
        if seen.setdefault(o, i) != i:
            raise Refuted(f"m = {m}: positions {seen[o]} and {i} have the same readout")
    for t, (_, heads) in enumerate(run_layer(clock, iter(range(4 * m))), start=1):
        if clock.position(heads) != t % (2 * m):
            raise Refuted(f"m = {m}: position {t} reads as {clock.position(heads)}")


# factor programs


def check_program(
    program: Sequence[Factor], target: flint.fmpq_mat, family: Range, count: int, what: str = "the program"
) -> None:
    """The factors are `count` many, all of the family, and multiply to the target exactly.

    Example:
        >>> check_program(programs.merge(0, 1)[:1], map_matrix((0, 0)), programs.CKDA_AUTOMATA, 2)
        Traceback (most recent call last):
        ckda.theory.claims.Refuted: the program has 1 factors instead of 2
    """
    if len(program) != count:
        raise Refuted(f"{what} has {len(program)} factors instead of {count}")
    for factor in program:
        if reason := family.violation(factor):
            raise Refuted(f"{what}: {reason}")
    got = programs.product(program, target.nrows())
    if got != target:
        raise Refuted(f"{what} multiplies to {got.tolist()} instead of {target.tolist()}")


def _at_most(count: int, bound: int, what: str) -> None:
    if count > bound:
        raise Refuted(f"{what} takes {count} factors, the bound is {bound}")


@claim("prop:automata-factor-counts/permutation", "Any permutation of n coordinates takes at most n - 1 reflections")
def permutation_counts(effort: float = 1.0) -> Evidence:
    """All permutations of up to 6 coordinates and random ones of up to 12; one transposition is one factor."""
    rng = random.Random(1)
    everything = [p for n in range(1, 7 if effort >= 1 else 5) for p in permutations(range(n))]
    drawn = [rng.sample(range(n), n) for n in range(7, 13) for _ in range(_scaled(10, effort))]
    for images in [*everything, *drawn]:
        n = len(images)
        cycles, _ = programs.cycles_and_trees(images)
        _at_most(n - len(cycles), max(0, n - 1), f"the permutation {images}")
        for family in (programs.CKDA, programs.DELTANET, programs.RWKV7):
            program = programs.permutation_program(images)
            check_program(program, map_matrix(images), family, n - len(cycles), f"the permutation {images}")
    return Evidence(len(everything) + len(drawn), "exact", note="n - (number of cycles) swaps with beta = 2")


#: family -> (primitive, range, factors of the construction, the bound of the table)
COPIES: dict[str, tuple[Callable[[int, int], list[Factor]], Range, int, int]] = {
    "CKDA": (programs.merge, programs.CKDA_AUTOMATA, 2, 2),
    "CKDA, dyadic": (programs.dyadic_merge, Range("CKDA with beta up to 5/2", (0, flint.fmpq(5, 2)), (-1, 1)), 2, 2),
    "DeltaNet/GDN": (programs.deltanet_merge, Range("DeltaNet with beta up to 3", (0, 3)), 3, 4),
    "RWKV-7": (programs.rwkv7_copy, programs.RWKV7, 1, 1),
}


@claim(
    "prop:automata-factor-counts/column-copy", "Column copy: 2 factors for CKDA, 3 (<= 4) for DeltaNet, 1 for RWKV-7"
)
def copy_counts(effort: float = 1.0) -> Evidence:
    """Every ordered pair of up to 6 coordinates, and that one CKDA factor cannot do it."""
    pairs = [(n, s, d) for n in range(2, 7) for s, d in permutations(range(n), 2)]
    for family in COPIES:
        for n, s, d in pairs:
            check_copy(family, n, s, d)
    if not one_ckda_factor_is_too_few():
        raise Refuted("one CKDA factor suffices for a column copy")
    note = (
        "beta up to 3 as in the paper, up to 5/2 with the dyadic keys; one CKDA factor: no solution (Groebner basis 1)"
    )
    return Evidence(len(pairs) * len(COPIES), "exact", note=note)


def check_copy(
    family: str, n: int, s: int, d: int, primitive: Callable[[int, int], list[Factor]] | None = None
) -> None:
    """The primitive of the family (or the one given) sends (x_s, x_d) to (x_s + x_d, 0)."""
    copy, allowed, count, bound = COPIES[family]
    _at_most(count, bound, f"the column copy of {family}")
    images = [s if i == d else i for i in range(n)]
    check_program((primitive or copy)(s, d), map_matrix(images), allowed, count, f"{family}: column copy {d} to {s}")


def one_ckda_factor_is_too_few() -> bool:
    """(I - g u u^T) Diag(a) = [[1, 1], [0, 0]] has no solution, over C even: its equations generate the unit ideal."""
    g, u, w, a, b = sympy.symbols("g u w a b")
    entries = [(1 - g * u * u) * a - 1, -g * u * w * b - 1, -g * u * w * a, (1 - g * w * w) * b]
    return list(sympy.groebner(entries, g, u, w, a, b).exprs) == [sympy.Integer(1)]


@claim(
    "prop:automata-factor-counts/deterministic",
    "Any map of n states: 2n - k - c <= 2n - 2 CKDA factors, at most 4n for DeltaNet, at most n for RWKV-7",
)
def deterministic_counts(effort: float = 1.0) -> Evidence:
    """All maps of up to 5 states and random ones of up to 9; beta stays within [0, 3]."""
    rng = random.Random(2)
    everything = [f for n in range(1, 6 if effort >= 1 else 4) for f in product(range(n), repeat=n)]
    drawn = [rng.choices(range(n), k=n) for n in range(4, 10) for _ in range(_scaled(30, effort))]
    worst: dict[str, int] = {}
    for images in [*everything, *drawn]:
        for family, count in check_deterministic(images).items():
            worst[family] = max(worst.get(family, 0), count)
    return Evidence(len(everything) + len(drawn), "exact", note="2(n - k) + (k - c) factors", data={"longest": worst})


def check_deterministic(images: Sequence[int], copies: dict[str, Any] = COPIES) -> dict[str, int]:
    """The programs of one map for every family: product, range and count; returns the counts."""
    n = len(images)
    cycles, trees = programs.cycles_and_trees(images)
    swaps = sum(map(len, cycles)) - len(cycles)
    counts = {}
    for family, (copy, allowed, per_copy, table) in copies.items():
        count = per_copy * len(trees) + swaps
        bound = {1: n, 2: 2 * n - 2, 4: 4 * n}[table]
        _at_most(count, bound, f"{family}: the map {images}")
        program = programs.deterministic_program(images, copy)
        check_program(program, map_matrix(images), allowed, count, f"{family}: the map {images}")
        counts[family] = count
    return counts


@claim(
    "prop:automata-factor-counts/fibres",
    "Sharper than the table: n + r <= 3n/2 CKDA factors for a map with r fibres of two states or more",
)
def fibre_counts(effort: float = 1.0) -> Evidence:
    """All maps of up to 5 states and random ones of up to 30, in beta within [0, 3]; then DFAs in blocks of 3n/2."""
    rng = random.Random(13)
    everything = [f for n in range(1, 6 if effort >= 1 else 4) for f in product(range(n), repeat=n)]
    drawn = [rng.choices(range(n), k=n) for n in range(5, 11) for _ in range(_scaled(30, effort))]
    drawn += [rng.choices(range(few), k=n) for n in (11, 12, 20, 30) for few in (1, 2, n)]
    for images in [*everything, *drawn]:
        check_fibres(images)
    cases = _scaled(20, effort)
    for length in _words(cases, rng):
        dfa = DFA.random(rng.randint(2, 6), rng.randint(1, 4), rng)
        layers = simulate(dfa, m=3 * dfa.size // 2, program=by_map(programs.fibre_program))
        check_machine(dfa, _word(dfa, length, rng), layers, programs.CKDA_AUTOMATA)
    note = f"and {cases} DFAs in blocks of 3n/2 instead of 2n - 2"
    return Evidence(len(everything) + len(drawn) + cases, "exact", note=note)


def check_fibres(images: Sequence[int], program: Sequence[Factor] | None = None) -> None:
    """The fibre program of one map: product, range, and at most n + r factors (n - 1 for a permutation)."""
    n = len(images)
    r = sum(images.count(j) > 1 for j in set(images))
    program = programs.fibre_program(images) if program is None else program
    _at_most(len(program), n + r if r else n - 1, f"the map {images}")
    check_program(program, map_matrix(images), programs.CKDA_AUTOMATA, len(program), f"the map {images}")


@claim(
    "prop:automata-factor-counts/positive-scale",
    "Some rho M, rho > 0, takes at most max(1, 2n - 2) CKDA factors (3n for DeltaNet) with beta within [0, 2]",
)
def scaled_counts(effort: float = 1.0) -> Evidence:
    """All maps of up to 4 states and random ones of 5 and 6, over Q and the roots of the fibres' sizes."""
    rng = random.Random(3)
    everything = [f for n in range(1, 5 if effort >= 1 else 4) for f in product(range(n), repeat=n)]
    drawn = [rng.choices(range(n), k=n) for n in (5, 6) for _ in range(_scaled(40, effort))]
    longest: dict[int, int] = {}
    for images in [*everything, *drawn]:
        n, F = len(images), root_field(images)
        count = check_scaled(F, images, min(n, max(1, 2 * n - 2)))
        check_scaled(F, images, 3 * n, diagonal_factors=True)
        longest[n] = max(longest.get(n, 0), count)
    note = f"n factors are enough for CKDA; longest program by n: {longest}"
    return Evidence(len(everything) + len(drawn), "exact", note=note, data={"longest": longest})


def root_field(images: Sequence[int]) -> Field:
    """Q with the square roots of the sizes of the map's fibres.

    Example:
        >>> root_field((0, 0, 1)).degree, root_field((0, 0, 0, 0)).degree
        (2, 1)
    """
    roots = {sympy.sqrt(images.count(j)) for j in set(images)}
    return field(*sorted((x for x in roots if not x.is_Integer), key=float))


def check_scaled(
    F: Field, images: Sequence[int], bound: int, diagonal_factors: bool = False, scaled: programs.Scaled | None = None
) -> int:
    """rho > 0, beta in [0, 2], gates in [-1, 1], the exact product rho M, and the count, which is returned."""
    n = len(images)
    rho, program = scaled or programs.scaled_program(F, images, diagonal_factors)
    _at_most(len(program), bound, f"the scaled map {images}")
    result = F.eye(n)
    for alpha, key, beta in program:
        if F.less(beta, 0) or F.less(2, beta) or any(F.less(1, a) or F.less(a, -1) for a in alpha):
            raise Refuted(f"the scaled map {images}: alpha = {alpha}, beta = {beta} is out of range")
        result = F.ckda(alpha, key, beta) @ result
    if F.sign(rho) <= 0 or result != F.matrix(map_matrix(images).tolist()) * rho:
        raise Refuted(f"the scaled map {images}: the product is {result}, rho = {F.sympy(rho)}")
    return len(program)


#: family -> (program, range, number of factors, dimension)
RATIONAL: dict[
    str, tuple[Callable[[flint.fmpq_mat], list[Factor]], Range, Callable[[int], int], Callable[[int], int]]
] = {
    "CKDA": (programs.rational_program, programs.CKDA_WEIGHTED, lambda n: 7 * n * n + 3 * n, lambda n: 2 * n + 1),
    "DeltaNet/GDN": (
        programs.rational_program_deltanet,
        programs.DELTANET_WEIGHTED,
        lambda n: 8 * n * n + 5 * n + 1,
        lambda n: 2 * n + 1,
    ),
    "RWKV-7": (programs.rational_program_rwkv7, programs.RWKV7_WEIGHTED, lambda n: 2 * n, lambda n: 2 * n),
}


@claim(
    "prop:automata-factor-counts/rational",
    "Any rational n x n matrix: 7n^2 + 3n CKDA factors (beta >= 0), 8n^2 + 5n + 1 for DeltaNet, 2n for RWKV-7",
)
def rational_counts(effort: float = 1.0) -> Evidence:
    """Random matrices of n = 1 ... 5 with zero, small, large and negative entries, every program as a whole matrix."""
    rng = random.Random(4)
    drawn = [_random_matrix(n, rng) for n in range(1, 6) for _ in range(_scaled(12, effort))]
    for M in drawn:
        for family in RATIONAL:
            check_rational(family, M)
    note = "the whole product is [[M, 0, 0], [M, 0, 0], [0, 0, 0]] (RWKV-7: [[M, M], [0, 0]])"
    return Evidence(len(drawn) * len(RATIONAL), "exact", note=note)


def _random_matrix(n: int, rng: random.Random) -> flint.fmpq_mat:
    return flint.fmpq_mat(n, n, [flint.fmpq(rng.randint(-9, 9), rng.randint(1, 7)) for _ in range(n * n)])


def check_rational(
    family: str, M: flint.fmpq_mat, program: Callable[[flint.fmpq_mat], list[Factor]] | None = None
) -> None:
    """One matrix: the number of factors, their range and the whole product in the enlarged dimension."""
    build, allowed, count, dimension = RATIONAL[family]
    n = M.nrows()
    target = flint.fmpq_mat(dimension(n), dimension(n))
    for i in range(n):
        for j in range(n):
            target[i, j] = M[i, j]
            place = (i, n + j) if family == "RWKV-7" else (n + i, j)
            target[place] = M[i, j]
    check_program((program or build)(M), target, allowed, count(n), f"{family}: {M.tolist()}")


# three layers


def check_machine(
    machine: Machine,
    word: Word,
    layers: ThreeLayers | None = None,
    allowed: Range | None = None,
    watch: Callable[[State], None] | None = None,
) -> None:
    """The readout at every prefix equals the direct simulation, no token is read early, all factors are in range.

    Example:
        >>> parity = DFA(((0, 1), (1, 0)))
        >>> check_machine(parity, [1, 0, 0, 1])
        >>> check_machine(parity, [1, 0, 0, 1], simulate(parity, program=lambda M: []))  # the block is never applied
        Traceback (most recent call last):
        ckda.theory.claims.Refuted: after 3 tokens of [1, 0, 0, 1]: [0, 0] instead of [1, 0]
    """
    layers = layers or simulate(machine)
    taken = 0

    def tokens() -> Iterator[int]:
        nonlocal taken
        for token in word:
            taken += 1
            yield token

    readouts = chain([layers.before()], layers.run(tokens(), watch))
    for t, want in enumerate(expected_readouts(machine, word)):
        try:
            got = next(readouts)
        except KeyError as error:
            raise Refuted(f"after {t} tokens of {list(word)}: a lookup has no entry for {error}") from error
        if list(got) != want:
            raise Refuted(f"after {t} tokens of {list(word)}: {list(got)} instead of {want}")
        if taken != t:
            raise Refuted(f"the output at {t} came after {taken} tokens")
    for factor in layers.accumulator.factors():
        if allowed and (reason := allowed.violation(factor)):
            raise Refuted(f"the accumulator uses a factor out of range: {reason}")


def expected_readouts(machine: Machine, word: Word) -> list[list[Any]]:
    """What the direct simulation says the readouts are after every prefix, the empty one included."""
    states: Iterable[Any] = machine.trace(word)
    if isinstance(machine, WFA):
        return [[machine.weight(p), *p.entries()] for p in states]
    if isinstance(machine, DFA):
        return [[q, int(q in machine.accepting)] for q in states]
    return [[q] for q in states]


def _words(cases: int, rng: random.Random, longest: int = 300) -> Iterator[int]:
    """Lengths: every other one the longest, the rest anything from 1."""
    for i in range(cases):
        yield longest if i % 2 == 0 else rng.randint(1, longest)


def _word(machine: Machine, length: int, rng: random.Random) -> list[int]:
    return rng.choices(range(len(machine.matrices)), k=length)


#: groups by their tables; the last three also on few points, where the accumulator holds the permutation itself
TABLES = ("Z2", "Z5", "Z7", "D4", "D5", "Q8", "Z2xZ4", "A4", "Dic3", "S4", "Z2xA4", "A5")
POINTS = ("S4", "A5", "S5")


@claim("thm:multilayer/groups", "Three CKDA layers with beta <= 2 solve every finite group word problem, exactly")
def groups(effort: float = 1.0) -> Evidence:
    """50 random words over groups given by their tables and over permutations of few points."""
    rng = random.Random(5)
    tables = [
        GroupWords(group(name).relabelled(rng.sample(range(n), n))) for name in TABLES if (n := group(name).order)
    ]
    machines: list[Machine] = [*tables, *(Permutations.of(group(name)) for name in POINTS)]
    cases = _scaled(50, effort)
    tokens = 0
    for i, length in enumerate(_words(cases, rng)):
        machine = machines[i % len(machines)]
        check_machine(machine, _word(machine, length, rng), allowed=programs.CKDA)
        tokens += length
    note = f"{tokens} prefixes; {', '.join(TABLES)} by table, {', '.join(POINTS)} on points; beta = 2 or 0 throughout"
    return Evidence(cases, "exact", note=note)


@claim("thm:multilayer/dfa", "Three CKDA layers with beta <= 3 track every DFA, exactly")
def dfas(effort: float = 1.0) -> Evidence:
    """200 random DFAs of 2 to 6 states and 1 to 4 symbols; every other one with the dyadic column copy, beta <= 5/2."""
    rng = random.Random(6)
    cases, tokens = _scaled(200, effort), 0
    for i, length in enumerate(_words(cases, rng)):
        dfa = DFA.random(rng.randint(2, 6), rng.randint(1, 4), rng)
        dyadic = i % 4 >= 2
        layers = simulate(dfa, copy=programs.dyadic_merge) if dyadic else simulate(dfa)
        check_machine(dfa, _word(dfa, length, rng), layers, COPIES["CKDA, dyadic" if dyadic else "CKDA"][1])
        tokens += length
    return Evidence(cases, "exact", note=f"{tokens} prefixes, state and acceptance at each")


@claim("thm:multilayer/wfa", "Three CKDA layers with beta >= 0 compute every WFA over Q, in linearly many bits")
def wfas(effort: float = 1.0) -> Evidence:
    """50 random WFAs of 2 or 3 states with small rational entries: the weight and the whole state at every prefix."""
    rng = random.Random(7)
    cases, tokens, per_token = _scaled(50, effort), 0, 0.0
    for length in _words(cases, rng):
        wfa = WFA.random(rng.randint(2, 3), rng.randint(1, 3), rng)
        layers, bits = simulate(wfa), list[int]()
        watch = partial(_record_bits, bits)
        check_machine(wfa, _word(wfa, length, rng), layers, programs.CKDA_WEIGHTED, watch)
        check_bits(wfa, bits, layers.m)
        tokens += length
        per_token = max(per_token, bits[-1] / length if length == 300 else 0)
    note = f"{tokens} prefixes; after 300 tokens the accumulator's longest number has {per_token:.1f} bits per token"
    return Evidence(cases, "exact", note=note, data={"bits_per_token": per_token})


def _record_bits(bits: list[int], state: State) -> None:
    """Append the length of the longest number of the state, numerator and denominator together."""
    numbers = [flint.fmpq(x) for row in state.rows for x in row.values()]
    bits.append(max((int(x.p).bit_length() + int(x.q).bit_length() for x in numbers), default=0))


def check_bits(wfa: WFA, bits: Sequence[int], m: int) -> None:
    """Polynomial precision, here linear: with L the common denominator of the matrices and A the largest row sum of
    the whole matrices L |M|, no number exceeds (log2 L + log2 A) (t + 2m) + 64 bits.
    """
    entries = [[M[i, j] for j in range(wfa.size)] for M in wfa.matrices for i in range(wfa.size)]
    L = lcm(*(int(x.q) for row in entries for x in row))
    A = max(int(sum(abs(x) for x in row) * L) for row in entries)
    rate = log2(L) + log2(max(A, 1))
    for t, length in enumerate(bits, start=1):
        if length > rate * (t + 2 * m) + 64:
            raise Refuted(f"a number of {length} bits after {t} tokens, the bound is {rate * (t + 2 * m) + 64:.0f}")


#: patterns with the letters of their words; Python's `re` decides membership independently
PATTERNS = (("(ab)*", "ab"), ("(a|b)*abb", "ab"), ("a*b?c{2,3}", "abc"), ("(aa|bb|(ab|ba)(aa|bb)*(ab|ba))*", "ab"))


@claim("thm:multilayer/regular-languages", "Three CKDA layers recognise regular expressions at every prefix")
def regular_languages(effort: float = 1.0) -> Evidence:
    """Each pattern as a DFA by `greenery`, run through the layers, against Python's `re` at every prefix."""
    rng, prefixes = random.Random(8), 0
    for pattern, alphabet in PATTERNS:
        dfa = regex_to_dfa(pattern, alphabet)
        for _ in range(_scaled(8, effort)):
            prefixes += check_language(pattern, dfa, rng.choices(range(len(alphabet)), k=rng.randint(1, 60)))
    return Evidence(prefixes, "exact", note=f"prefixes of words over {', '.join(p for p, _ in PATTERNS)}")


def check_language(pattern: str, dfa: DFA, word: Word) -> int:
    """The layers' verdict on every prefix against `re.fullmatch`; returns the number of prefixes."""
    text = "".join((dfa.alphabet or "")[a] for a in word)
    for t, (_, accepted) in enumerate(simulate(dfa).run(word), start=1):
        if bool(accepted) != bool(re.fullmatch(pattern, text[:t])):
            raise Refuted(f"{pattern}: the layers say {bool(accepted)} on {text[:t]!r}")
    return len(word)


@claim("thm:multilayer/no-peeking", "Each layer's parameters at t are a function of that layer's input at t alone")
def no_peeking(effort: float = 1.0) -> Evidence:
    """The inputs of every layer in random order, to a second copy of the layers: the same parameters come out."""
    rng, cases = random.Random(9), 0
    for _ in range(_scaled(6, effort)):
        for machine in (DFA.random(4, 3, rng), WFA.random(2, 2, rng), GroupWords(group("S3"))):
            cases += check_no_peeking(simulate(machine), simulate(machine), _word(machine, 120, rng), rng)
    return Evidence(cases, "exact", note="parameters recomputed out of order by fresh layers")


def check_no_peeking(layers: ThreeLayers, fresh: ThreeLayers, word: Word, rng: random.Random) -> int:
    """Record (input, parameters) of every layer along the word, then ask the fresh layers in random order."""
    stream: list[Any] = list(word)
    cases = 0
    for layer, other in zip(layers.stack, fresh.stack, strict=True):
        seen = [(x, layer.parameters(x)) for x in stream]
        stream = list(run_layer(layer, iter(stream)))
        for x, step in rng.sample(seen, len(seen)):
            if other.parameters(x) != step:
                raise Refuted(f"{type(layer).__name__}: the parameters of one input differ by when it is asked")
            cases += 1
    return cases


@claim("thm:multilayer/fixed-datatype", "The DFA accumulator meets finitely many numbers, whatever the word")
def fixed_datatype(effort: float = 1.0) -> Evidence:
    """All maps of n states: every block starts and ends at a unit vector, and these are all numbers in between."""
    largest = 4 if effort >= 1 else 3
    data = {}
    for name, copy in (("paper", programs.merge), ("dyadic", programs.dyadic_merge)):
        data[name] = [str(x) for x in sorted(accumulator_numbers(largest, copy))]
    maps = sum(n**n for n in range(1, largest + 1))
    note = "; ".join(f"{name} keys: {len(numbers)} numbers" for name, numbers in data.items())
    return Evidence(maps, "exact", note=f"all maps of up to {largest} states; {note}", data=data)


def accumulator_numbers(largest: int, copy: Callable[[int, int], list[Factor]]) -> set[Any]:
    """The entries of every partial product F_r ... F_1 e_q over all maps of up to `largest` states.

    Example:
        >>> sorted(accumulator_numbers(2, programs.dyadic_merge))
        [-1, 0, 1/2, 1]
    """
    numbers = {flint.fmpq(0), flint.fmpq(1)}
    for n in range(1, largest + 1):
        for images in product(range(n), repeat=n):
            state = map_matrix(range(n))
            for factor in programs.deterministic_program(images, copy):
                state = factor.matrix(n) * state
                numbers |= set(state.entries())
            if state != map_matrix(images):
                raise Refuted(f"the block of {images} ends at {state.tolist()}, not at unit vectors")
    return numbers


# floating point, through the operator


def _float_claim(cases: Iterable[tuple[str, Machine, int, bool]], dtype: torch.dtype, seed: int) -> Evidence:
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    for name, machine, length, unit_keys in cases:
        word = _word(machine, length, rng)
        run = run_float(simulate(machine), word, machine.trace(word)[1:], dtype, unit_keys)
        if run.exact < length:
            raise Refuted(f"{name}, {dtype}: the {run.lost_in} is wrong at position {run.exact + 1}")
        used = {layer: float(f"{share:.3g}") for layer, share in run.used.items()}
        rows.append({"machine": name, "length": length, "unit_keys": unit_keys, "used": used})
    worst = max(share for row in rows for share in row["used"].values())
    note = f"words of {max(row['length'] for row in rows)} tokens; the worst layer used {worst:.1e} of its tolerance"
    return Evidence(len(rows), "numeric", margin=1 - worst, note=note, data={"runs": rows})


@claim("thm:multilayer/float64", "Groups and DFAs through the operator in float64 follow every prefix")
def float64(effort: float = 1.0) -> Evidence:
    """Unit keys as in the paper and whole-number keys, words of 2000 tokens."""
    length, rng = _scaled(2000, effort), random.Random(10)
    machines: list[tuple[str, Machine]] = [(f"DFA, {n} states", DFA.random(n, 3, rng)) for n in (2, 4, 6)]
    machines += [("S3", GroupWords(group("S3"))), ("S5 on 5 points", Permutations.of(group("S5")))]
    return _float_claim([(*m, length, unit) for m in machines for unit in (True, False)], torch.float64, 11)


@claim("thm:multilayer/float32", "Groups through the operator in float32 follow every prefix")
def float32(effort: float = 1.0) -> Evidence:
    """Unit keys, words of 2000 tokens; the clock is what drifts (results/theory has the horizons)."""
    length = _scaled(2000, effort)
    machines: list[tuple[str, Machine]] = [(name, GroupWords(group(name))) for name in ("S3", "D4", "A4", "S4")]
    machines += [(f"{name} on points", Permutations.of(group(name))) for name in ("A5", "S5")]
    return _float_claim([(*m, length, True) for m in machines], torch.float32, 12)


@claim("thm:multilayer/float-for-ever", "With a clock that locks, groups in float32 and DFAs in float64 never go wrong")
def float_for_ever(effort: float = 1.0) -> Evidence:
    """A locked clock is right at every length; buffer and accumulator work on small dyadic numbers without rounding."""
    rng, rows = random.Random(14), list[dict[str, Any]]()
    machines: list[tuple[Machine, torch.dtype]] = [(GroupWords(group(name)), torch.float32) for name in ("S3", "A4")]
    machines += [(Permutations.of(group("S5")), torch.float32)]
    machines += [(DFA.random(n, 3, rng), torch.float64) for n in (3, 5)]
    for machine, dtype in machines[: max(2, round(len(machines) * effort))]:
        rows.append(check_for_ever(machine, dtype, _scaled(2000, effort), rng))
    note = f"block lengths {[row['m'] for row in rows]}, locked after {max(row['start'] for row in rows)} steps at most"
    return Evidence(len(rows), "numeric", note=note, data={"runs": rows})


def check_for_ever(machine: Machine, dtype: torch.dtype, length: int, rng: random.Random) -> dict[str, Any]:
    """Find the locked clock, run a word past the lock, and demand an accumulator without any rounding error at all."""
    clock, lock = locked_clock(simulate(machine).m, dtype)
    word = _word(machine, length, rng)
    layers = simulate(machine, m=clock.m, copy=programs.dyadic_merge)
    run = run_float(layers, word, machine.trace(word)[1:], dtype, unit_keys=False)
    if run.exact < length or run.used["buffer"] or run.used["accumulator"]:
        raise Refuted(f"{machine}: not exact in {dtype}: {run}")
    return {"m": clock.m, "start": lock.start, "period": lock.period, "dtype": str(dtype), "length": length}
