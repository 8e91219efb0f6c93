"""What the three-layer construction simulates: finite groups, DFAs and rational WFAs, each simulated directly too.

Every machine answers the same three questions, in the paper's column-state convention (app:tracking-tasks):
`matrices` (one rational matrix per symbol), `start` (the initial columns) and `trace(word)`, the direct simulation that
the layers are held against.

Example:
    >>> parity = DFA(((0, 1), (1, 0)), accepting=frozenset({0}))
    >>> parity.trace([1, 0, 1]), parity.accepts([1, 0, 1])
    ([0, 1, 1, 0], True)
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flint

from ckda.groups import FiniteGroup, group

__all__ = ["DFA", "WFA", "GroupWords", "Machine", "Permutations", "Word", "group", "map_matrix", "regex_to_dfa"]

Word = Sequence[int]  #: symbols are 0 ... len(matrices) - 1


def map_matrix(images: Sequence[int]) -> flint.fmpq_mat:
    """The deterministic transition M with M e_i = e_{images[i]}.

    Example:
        >>> map_matrix((1, 1)).tolist()
        [[0, 0], [1, 1]]
    """
    n = len(images)
    return flint.fmpq_mat(n, n, [int(images[j] == i) for i in range(n) for j in range(n)])


def unit_column(n: int, i: int) -> flint.fmpq_mat:
    """e_i as a column."""
    return flint.fmpq_mat(n, 1, [int(j == i) for j in range(n)])


@dataclass(frozen=True)
class DFA:
    """A complete deterministic automaton: `delta[q][a]` is the next state."""

    delta: tuple[tuple[int, ...], ...]
    initial: int = 0
    accepting: frozenset[int] = frozenset()
    alphabet: tuple[str, ...] | None = None  #: names of the symbols, where the automaton came from a regular expression

    @property
    def size(self) -> int:
        return len(self.delta)

    @property
    def maps(self) -> list[tuple[int, ...]]:
        """One map of the states per symbol."""
        return [tuple(row[a] for row in self.delta) for a in range(len(self.delta[0]))]

    @property
    def matrices(self) -> list[flint.fmpq_mat]:
        return [map_matrix(images) for images in self.maps]

    @property
    def start(self) -> flint.fmpq_mat:
        return unit_column(self.size, self.initial)

    def trace(self, word: Word) -> list[int]:
        """The state after every prefix, the empty one included."""
        states = [self.initial]
        for a in word:
            states.append(self.delta[states[-1]][a])
        return states

    def accepts(self, word: Word) -> bool:
        return self.trace(word)[-1] in self.accepting

    @staticmethod
    def random(states: int, symbols: int, rng: random.Random) -> "DFA":
        """Transitions and accepting states drawn uniformly."""
        delta = tuple(tuple(rng.randrange(states) for _ in range(symbols)) for _ in range(states))
        return DFA(delta, rng.randrange(states), frozenset(q for q in range(states) if rng.random() < 0.5))


@dataclass(frozen=True)
class WFA:
    """A weighted automaton over Q (eq:wfa-state-output): y_t = final^T M_{a_t} ... M_{a_1} initial."""

    matrices: list[flint.fmpq_mat]
    initial: tuple[flint.fmpq, ...]
    final: tuple[flint.fmpq, ...]

    @property
    def size(self) -> int:
        return len(self.initial)

    @property
    def start(self) -> flint.fmpq_mat:
        return flint.fmpq_mat(self.size, 1, list(self.initial))

    def trace(self, word: Word) -> list[flint.fmpq_mat]:
        """The weighted state p_t after every prefix, the empty one included."""
        states = [self.start]
        for a in word:
            states.append(self.matrices[a] * states[-1])
        return states

    def weight(self, state: flint.fmpq_mat) -> flint.fmpq:
        """y = final^T p."""
        return (flint.fmpq_mat(1, self.size, list(self.final)) * state)[0, 0]

    @staticmethod
    def random(states: int, symbols: int, rng: random.Random, height: int = 3) -> "WFA":
        """Entries p/q with |p| and q up to `height`."""

        def draw() -> flint.fmpq:
            return flint.fmpq(rng.randint(-height, height), rng.randint(1, height))

        def vector() -> tuple[flint.fmpq, ...]:
            return tuple(draw() for _ in range(states))

        matrices = [flint.fmpq_mat(states, states, [draw() for _ in range(states**2)]) for _ in range(symbols)]
        return WFA(matrices, vector(), vector())


@dataclass(frozen=True)
class GroupWords:
    """The word problem of a finite group, all its elements being symbols: it acts on itself from the left.

    Example:
        >>> GroupWords(group("Z3")).trace([2, 2, 2])
        [0, 2, 1, 0]
    """

    group: FiniteGroup

    @property
    def size(self) -> int:
        return self.group.order

    @property
    def matrices(self) -> list[flint.fmpq_mat]:
        return [map_matrix(row) for row in self.group.table.tolist()]

    @property
    def start(self) -> flint.fmpq_mat:
        return unit_column(self.size, self.group.identity)

    def trace(self, word: Word) -> list[int]:
        """The product g_t ... g_1 after every prefix, the empty one included."""
        products = [self.group.identity]
        for g in word:
            products.append(int(self.group.table[g, products[-1]]))
        return products


@dataclass(frozen=True)
class Permutations:
    """A group of permutations of few points, all its elements being symbols: n points instead of |G| states.

    The accumulator then starts from the identity matrix (app:tracking-model) and holds the permutation itself.

    Example:
        >>> swaps = Permutations(((0, 1, 2), (1, 0, 2), (0, 2, 1)))
        >>> swaps.trace([1, 2])
        [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    """

    elements: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.elements[0])

    @property
    def matrices(self) -> list[flint.fmpq_mat]:
        return [map_matrix(images) for images in self.elements]

    @property
    def start(self) -> flint.fmpq_mat:
        return map_matrix(range(self.size))

    def trace(self, word: Word) -> list[tuple[int, ...]]:
        """The permutation g_t ... g_1 after every prefix: where each point went."""
        products: list[tuple[int, ...]] = [tuple(range(self.size))]
        for g in word:
            products.append(tuple(self.elements[g][i] for i in products[-1]))
        return products

    @staticmethod
    def of(group: FiniteGroup) -> "Permutations":
        """A group whose labels are permutations, such as `group("S5")`, on its points.

        Example:
            >>> Permutations.of(group("A5")).size
            5
        """
        return Permutations(group.labels)


Machine = GroupWords | Permutations | DFA | WFA


def regex_to_dfa(pattern: str, alphabet: str) -> DFA:
    """A DFA of a regular expression over the given letters, by the package `greenery` (extra `theory`).

    Example:
        >>> dfa = regex_to_dfa("(ab)*", "ab")
        >>> dfa.size, dfa.accepts([0, 1, 0, 1]), dfa.accepts([0, 1, 0])
        (3, True, False)
    """
    try:
        from greenery import parse
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "regular expressions need the package 'greenery': pip install 'ckda[theory]'", name="greenery"
        ) from error
    try:
        fsm = parse(pattern).to_fsm().reduce()
    except Exception as error:  # the parser raises what it meets: NoMatch, IndexError, ValueError
        raise ValueError(f"regex {pattern!r} cannot be read: {error}") from error
    order = [fsm.initial]
    for q in order:  # grows while it is read: breadth first over the states these letters reach
        order += dict.fromkeys(r for r in (_next(fsm, q, letter) for letter in alphabet) if r not in order)
    index = {q: i for i, q in enumerate(order)}
    delta = tuple(tuple(index[_next(fsm, q, letter)] for letter in alphabet) for q in order)
    accepting = frozenset(index[q] for q in order if q in fsm.finals)
    return DFA(delta, 0, accepting, tuple(alphabet))


def _next(fsm: Any, state: Any, letter: str) -> Any:
    """The next state on one letter: the automaton's symbols are disjoint classes of characters."""
    return next(target for chars, target in fsm.map[state].items() if chars.accepts(letter))
