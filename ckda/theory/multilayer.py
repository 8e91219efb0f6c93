"""thm:multilayer built for real: clock, buffer, accumulator, as three stacked recurrences in exact arithmetic.

Every layer is ``S_t = (I - beta k k^T) Diag(alpha) S_{t-1} + beta k v^T`` with readout ``S_t^T q_t``. Its parameters at
time t come from :meth:`Layer.parameters`, a function of that layer's input at t and of nothing else; the input of layer
l is the output of layer l - 1, which hands its own input on beside the readout (app:tracking-model). Word positions
count from 1.

- the :class:`Clock` reads nothing and turns a plane: its readout tells t mod 2m (lem:wfamincount);
- the :class:`Buffer` writes the token into slot t mod 2m and reads out the last 2m tokens;
- the :class:`Accumulator` applies factor r of the previous block at the r-th step of a block of m, and its query
  completes the factors still to come and the tokens of the unfinished block (the completion readout).

Keys are not normalised where that keeps the numbers rational: u with rate gamma stands for the unit key u/|u| with
beta = gamma |u|^2.

Example:
    >>> from ckda.theory.machines import DFA
    >>> parity = simulate(DFA(((0, 1), (1, 0))))
    >>> parity.m, [int(o[0]) for o in parity.run([1, 1, 0, 1])]
    (2, [1, 0, 0, 1])
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import flint

from ckda.theory.factor_programs import (
    IDENTITY,
    Factor,
    Rational,
    Sparse,
    deterministic_program,
    merge,
    permutation_program,
    rational_program,
)
from ckda.theory.machines import DFA, WFA, Machine

__all__ = [
    "Accumulator",
    "Buffer",
    "Clock",
    "CosineField",
    "Layer",
    "State",
    "Step",
    "ThreeLayers",
    "by_map",
    "simulate",
]


# numbers of the clock


class CosineField:
    """Q(2 cos(2 pi / N)) as polynomials modulo the minimal polynomial; holds sines too where 4 divides N.

    The clock needs N = 4m, degree 48 at m = 72: flint multiplies there in some 10 microseconds.

    Example:
        >>> F = CosineField(12)
        >>> F.cos(1) * F.cos(1) + F.sin(1) * F.sin(1) == 1, (F.sin(1) * 2) == 1
        (True, True)
    """

    def __init__(self, N: int) -> None:
        if N % 4:
            raise ValueError(f"N = {N}: the sines lie in the field only where 4 divides N")
        self.N = N
        self.modulus = flint.fmpq_poly(flint.fmpz_poly.cos_minpoly(N))
        theta = flint.fmpq_poly([0, 1]) % self.modulus
        chebyshev = [flint.fmpq_poly([2]), theta]
        while len(chebyshev) < N:
            chebyshev.append((theta * chebyshev[-1] - chebyshev[-2]) % self.modulus)
        self._cosines = [Cosine(self, p / 2) for p in chebyshev]

    def cos(self, j: int) -> "Cosine":
        """cos(2 pi j / N)."""
        return self._cosines[j % self.N]

    def sin(self, j: int) -> "Cosine":
        """sin(2 pi j / N)."""
        return self.cos(j - self.N // 4)


class Cosine:
    """An element of a :class:`CosineField`; ints and rationals mix in."""

    __slots__ = ("field", "poly")

    def __init__(self, field: CosineField, poly: flint.fmpq_poly) -> None:
        self.field, self.poly = field, poly

    def _of(self, other: Any) -> Any:
        return other.poly if isinstance(other, Cosine) else other

    def __add__(self, other: Any) -> "Cosine":
        return Cosine(self.field, self.poly + self._of(other))

    def __sub__(self, other: Any) -> "Cosine":
        return Cosine(self.field, self.poly - self._of(other))

    def __neg__(self) -> "Cosine":
        return Cosine(self.field, -self.poly)

    def __mul__(self, other: Any) -> "Cosine":
        return Cosine(self.field, self.poly * self._of(other) % self.field.modulus)

    def __rsub__(self, other: Any) -> "Cosine":
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return bool(self.poly == self._of(other))

    def __hash__(self) -> int:
        return hash(tuple(self.poly.coeffs()))

    def __bool__(self) -> bool:
        return self.poly != 0

    def __repr__(self) -> str:
        return f"Cosine({self.poly} at 2cos(2pi/{self.field.N}))"

    def __float__(self) -> float:
        """The real value, from an enclosure of 256 bits (Horner at 2 cos(2 pi / N))."""
        with flint.ctx.workprec(256):
            theta, value = 2 * (2 * flint.arb.pi() / self.field.N).cos(), flint.arb(0)
            for c in reversed(self.poly.coeffs()):
                value = value * theta + flint.arb(c)
            return float(value.mid())


# recurrences


class Step(NamedTuple):
    """The parameters of one step; vectors are sparse, absent entries of `gate` (alpha) are one, all others zero."""

    key: Sparse
    gamma: Rational
    gate: Sparse
    value: Sparse
    queries: tuple[Sparse, ...]  #: one per head; heads that differ in the query alone share their state


class State:
    """The matrix S of a recurrence over any exact numbers, rows kept sparse.

    Example:
        >>> S = State(2, {(0, 0): 1})
        >>> S.apply(Step({1: 1}, 1, {0: -1}, {0: 7}, ()))
        >>> S.read({0: 1, 1: 10})
        {0: 69}
    """

    def __init__(self, size: int, entries: dict[tuple[int, int], Any]) -> None:
        self.rows: list[dict[int, Any]] = [{} for _ in range(size)]
        for (i, column), x in entries.items():
            if x:
                self.rows[i][column] = x

    def apply(self, step: Step) -> None:
        """S becomes (I - gamma u u^T) Diag(alpha) S + gamma u v^T."""
        for i, a in step.gate.items():
            self.rows[i] = {c: a * x for c, x in self.rows[i].items()} if a else {}
        if not step.gamma:
            return
        move = dict(step.value)
        for c, x in self.read(step.key).items():
            move[c] = move.get(c, 0) - x
        for i, u in step.key.items():
            row = self.rows[i]
            for c, x in move.items():
                row[c] = row.get(c, 0) + u * step.gamma * x
            self.rows[i] = {c: x for c, x in row.items() if x}

    def read(self, query: Sparse) -> dict[int, Any]:
        """S^T q."""
        total: dict[int, Any] = {}
        for i, w in query.items():
            for c, x in self.rows[i].items():
                total[c] = total.get(c, 0) + w * x
        return {c: x for c, x in total.items() if x}


class Layer(Protocol):
    """A recurrent layer: an initial state, and the parameters as a function of the input at this step alone."""

    def initial(self) -> State: ...

    def parameters(self, x: Any) -> Step: ...


def run_layer(
    layer: Layer, inputs: Iterable[Any], watch: Callable[[State], None] | None = None
) -> Iterator[tuple[Any, tuple[dict[int, Any], ...]]]:
    """The outputs of a layer: at every step its input and the readout of each head, S_t^T q_t.

    `watch` is shown the state after every step; nothing it does comes back.
    """
    state = layer.initial()
    for x in inputs:
        step = layer.parameters(x)
        state.apply(step)
        if watch:
            watch(state)
        yield x, tuple(state.read(query) for query in step.queries)


class Clock:
    """Layer 1: the rotation by pi/m, whose readout determines t mod 2m (lem:wfamincount).

    alpha = (1, -1), beta = 2, k = (-sin(pi/2m), cos(pi/2m)), S_0 = e_1. The paper asks for some query that tells the 2m
    points apart; (3/5, 4/5) does for every m, since its angle is no rational multiple of pi.

    Example:
        >>> clock = Clock(3)
        >>> [clock.position(o) for _, o in run_layer(clock, iter("abcdefgh"))]
        [1, 2, 3, 4, 5, 0, 1, 2]
    """

    def __init__(self, m: int, query: tuple[Rational, Rational] = (flint.fmpq(3, 5), flint.fmpq(4, 5))) -> None:
        self.m, self.field = m, CosineField(4 * m)
        self.query = query
        self.gate: Sparse = {1: -1}
        self.key: Sparse = {0: -self.field.sin(1), 1: self.field.cos(1)}

    def initial(self) -> State:
        return State(2, {(0, 0): self.field.cos(0)})

    def parameters(self, x: Any) -> Step:
        return Step(self.key, 2, self.gate, {}, ({i: w for i, w in enumerate(self.query) if w},))

    @cached_property
    def readouts(self) -> list[Any]:
        """q^T c_i for i = 0 ... 2m - 1, c_i = (cos(pi i / m), sin(pi i / m))."""
        a, b = self.query
        return [self.field.cos(2 * i) * a + self.field.sin(2 * i) * b for i in range(2 * self.m)]

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {o: i for i, o in enumerate(self.readouts)}

    def position(self, heads: tuple[dict[int, Any], ...]) -> int:
        """The finite lookup from the readout to t mod 2m."""
        return self._positions[heads[0].get(0, self.field.cos(0) * 0)]


class Buffer:
    """Layer 2: slot t mod 2m is overwritten by the token (key e_slot, beta = 1), and all slots are read out at once.

    Slot i holds code(token) in column i alone, so one query of ones reads the 2m codes side by side; 0 is a slot that
    was never written.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def initial(self) -> State:
        return State(2 * self.clock.m, {})

    def parameters(self, x: Any) -> Step:
        token, time = x
        return buffer_step(token, self.clock.position(time), 2 * self.clock.m)


def buffer_step(token: int, slot: int, size: int) -> Step:
    """The buffer's parameters, from the token and the clock's position."""
    return Step({slot: 1}, 1, {}, {slot: token + 1}, (dict.fromkeys(range(size), 1),))


@dataclass(frozen=True)
class Block:
    """The lookup for one finished block: its factors, and the rows of F_m ... F_{r+1} for every r."""

    factors: list[Factor]
    completions: list[list[Sparse]]  #: [m + 1][n]: row i of the product of the factors after the r-th


@dataclass
class Accumulator:
    """Layer 3: factor r of the previous block at step r of a block, read through the completion of what is missing.

    After step r of a block the state is ``F_r ... F_1 p`` with p the automaton's state where the previous block began;
    the query of a functional w is ``w^T M_{a_r} ... M_{a_1} F_m ... F_{r+1}``, a finite lookup.
    """

    clock: Clock
    matrices: Sequence[flint.fmpq_mat]
    start: flint.fmpq_mat
    program: Callable[[flint.fmpq_mat], list[Factor]]
    functionals: Sequence[Sequence[Rational]]  #: one head each
    width: int  #: rows of the state: n, or 2n + 1 with scratch
    _blocks: dict[tuple[int, ...], Block] = field(default_factory=dict)
    _products: dict[tuple[int, ...], flint.fmpq_mat] = field(default_factory=dict)

    def initial(self) -> State:
        n, columns = self.start.nrows(), self.start.ncols()
        return State(self.width, {(i, c): self.start[i, c] for i in range(n) for c in range(columns)})

    def parameters(self, x: Any) -> Step:
        (_, time), (codes,) = x
        return self.step(self.clock.position(time), codes)

    def step(self, position: int, codes: dict[int, Any]) -> Step:
        """The parameters, from the clock's position and the buffer's codes by slot."""
        m = self.clock.m
        done = (position - 1) % m + 1
        current = tuple(int(codes[(position - back) % (2 * m)]) - 1 for back in reversed(range(done)))
        before = [codes.get((position - done - back) % (2 * m), 0) for back in reversed(range(m))]
        rows = self._functionals_after(current)
        if not all(before):  # the first block: nothing to apply yet, the readout is its prefix alone
            return Step(IDENTITY.key, 0, {}, {}, tuple(_sparse(row) for row in rows))
        block = self.block(tuple(int(code) - 1 for code in before))
        factor = block.factors[done - 1]
        queries = tuple(_combine(row, block.completions[done]) for row in rows)
        return Step(factor.key, _rate(factor), factor.gate, {}, queries)

    def _functionals_after(self, word: tuple[int, ...]) -> list[list[Rational]]:
        """Each functional times the product of the word's matrices."""
        n = self.start.nrows()
        flat = [x for w in self.functionals for x in w]
        product = flint.fmpq_mat(len(self.functionals), n, flat) * self.matrix(word)
        return [[product[i, j] for j in range(n)] for i in range(len(self.functionals))]

    def matrix(self, word: tuple[int, ...]) -> flint.fmpq_mat:
        """M_{a_r} ... M_{a_1}."""
        if word not in self._products:
            n = self.start.nrows()
            eye = flint.fmpq_mat(n, n, [int(i == j) for i in range(n) for j in range(n)])
            self._products[word] = self.matrices[word[-1]] * self.matrix(word[:-1]) if word else eye
        return self._products[word]

    def block(self, word: tuple[int, ...]) -> Block:
        """The factors of a finished block, padded to m, and their completions."""
        if word not in self._blocks:
            self._blocks[word] = self.block_of(self.program(self.matrix(word)))
        return self._blocks[word]

    def block_of(self, factors: list[Factor]) -> Block:
        """These factors, padded to m, and their completions."""
        if len(factors) > self.clock.m:
            raise ValueError(f"a block of {self.clock.m} steps cannot apply {len(factors)} factors")
        factors = factors + [IDENTITY] * (self.clock.m - len(factors))
        completions: list[list[Sparse]] = [[{i: 1} for i in range(self.start.nrows())]]
        for factor in reversed(factors):
            completions.append([factor.pull(row) for row in completions[-1]])
        return Block(factors, completions[::-1])

    def factors(self) -> Iterator[Factor]:
        """The factors of all blocks met so far."""
        return (factor for block in self._blocks.values() for factor in block.factors)


def _rate(factor: Factor) -> Rational:
    """gamma of a factor whose channels share it."""
    return factor.beta / flint.fmpq(factor.norm2)


def _sparse(row: Sequence[Rational]) -> Sparse:
    return {i: x for i, x in enumerate(row) if x}


def _combine(weights: Sequence[Rational], rows: Sequence[Sparse]) -> Sparse:
    """The sum of weight times row."""
    total: dict[int, Rational] = {}
    for w, row in zip(weights, rows, strict=True):
        if w:
            for i, x in row.items():
                total[i] = total.get(i, 0) + w * x
    return {i: x for i, x in total.items() if x}


@dataclass(frozen=True)
class ThreeLayers:
    """Clock, buffer and accumulator, stacked."""

    clock: Clock
    buffer: Buffer
    accumulator: Accumulator

    @property
    def m(self) -> int:
        """The block length."""
        return self.clock.m

    @property
    def stack(self) -> tuple[Layer, Layer, Layer]:
        """The layers from the first to the last."""
        return self.clock, self.buffer, self.accumulator

    def run(self, word: Iterable[int], watch: Callable[[State], None] | None = None) -> Iterator[tuple[Any, ...]]:
        """After every token, one readout per functional: a number, or a tuple where the state has several columns.

        `watch` is shown the accumulator's state after every token.
        """
        stream = run_layer(self.accumulator, run_layer(self.buffer, run_layer(self.clock, word)), watch)
        for _, heads in stream:
            yield self._numbers(heads)

    def before(self) -> tuple[Any, ...]:
        """The readouts before the first token: each functional on the initial state."""
        functionals = (_sparse(row) for row in self.accumulator.functionals)
        return self._numbers(self.accumulator.initial().read(row) for row in functionals)

    def _numbers(self, heads: Iterable[dict[int, Any]]) -> tuple[Any, ...]:
        columns = self.accumulator.start.ncols()
        values = (tuple(head.get(c, 0) for c in range(columns)) for head in heads)
        return tuple(v if columns > 1 else v[0] for v in values)


def simulate(
    machine: Machine, m: int | None = None, copy: Callable[[int, int], list[Factor]] = merge, **parts: Any
) -> ThreeLayers:
    """The three layers of a machine, with the block length of prop:wfamin unless `m` is given.

    Groups: m = max(1, n - 1), beta = 2. DFAs: m = max(1, 2n - 2), beta up to 3. WFAs: m = 7 n^2 + 3 n.
    Readouts: the index of the state (group, DFA; the images of all points for permutations) and, for a DFA, whether
    it accepts; for a WFA the weight y_t, then the entries of p_t. `copy` is the column-copy primitive of a DFA;
    `parts` replaces fields of the accumulator.

    Example:
        >>> from ckda.theory.machines import Permutations, group
        >>> list(simulate(Permutations.of(group("S3"))).run([1, 3]))
        [((0, 2, 1),), ((1, 0, 2),)]
    """
    n = machine.size
    index, program, width = list(range(n)), by_map(permutation_program), n
    budget, functionals = max(1, n - 1), list[Any]([index])
    if isinstance(machine, DFA):
        budget, program = max(1, 2 * n - 2), by_map(lambda images: deterministic_program(images, copy))
        functionals = [index, [int(q in machine.accepting) for q in range(n)]]
    if isinstance(machine, WFA):
        budget, width, program = 7 * n**2 + 3 * n, 2 * n + 1, rational_program
        functionals = [list(machine.final), *([int(i == j) for j in range(n)] for i in range(n))]
    clock = Clock(budget if m is None else m)
    fields: dict[str, Any] = {"program": program, "functionals": functionals, "width": width}
    accumulator = Accumulator(clock, machine.matrices, machine.start, **(fields | parts))
    return ThreeLayers(clock, Buffer(clock), accumulator)


def by_map(program: Callable[[Sequence[int]], list[Factor]]) -> Callable[[flint.fmpq_mat], list[Factor]]:
    """A program of maps as a program of their matrices.

    Example:
        >>> from ckda.theory.machines import map_matrix
        >>> len(by_map(permutation_program)(map_matrix((1, 0))))
        1
    """

    def of_matrix(M: flint.fmpq_mat) -> list[Factor]:
        columns = range(M.ncols())
        return program([next(i for i in range(M.nrows()) if M[i, j]) for j in columns])

    return of_matrix
