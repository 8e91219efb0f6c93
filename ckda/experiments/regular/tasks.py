"""The tasks of ``ckda track --suite regular``, each drawn from its definition.

    parity        0 1 1 0 1           how many ones, mod 2                                            -> 1
    even-pairs    0 1 1 0             whether as many 01 as 10 occur, that is, first letter = last    -> 1
    cycle         0 + + - +           where on a circle of five a walk of steps 0, +1, -1 ends        -> 2
    arithmetic    3 - 2 * 4 + 1       its value mod 5, products first                                 -> 1
    brackets      ((3-2)*(4+1))       its value mod 5, a bracket around every operation               -> 0
    S5            (12) (12345) ...    which permutation a swap and a turn of five places make, after every letter
    trace         swap a b print a 2  the next token of a program's trace; scored where it is a value
    recall        a 4 b 7 b a         the value that was paired with the key (MQAR); scored after the pairs

The first five are Delétang et al.'s (arXiv 2207.02098), the first four those of PD-SSM's table (arXiv 2509.22284). There a word is
asked once, at its end. A causal model that is asked at the end of a word does not know what follows, so the answer after every
letter is the answer to a shorter word. Training asks for all of them, as for words of groups, which needs fewer updates than one
answer a word; tests count them all, which is the accuracy at the end over words of all lengths.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckda.experiments.common.closure import closure
from ckda.experiments.tracking.task import WordProblem
from ckda.groups import group

__all__ = ["PUBLISHED_FOUR", "TASKS", "UNASKED", "Task", "evaluate", "scaled_scores"]

SMOOTHING = 0.1  #: of the labels: an answer that is right is still asked to be equally sure after words of any length
UNASKED = -1  #: in the place of an answer where none is asked for
_MODULUS = 5
_PLUS, _MINUS, _TIMES, _OPEN, _CLOSE, _BLANK = range(_MODULUS, _MODULUS + 6)  # tokens after the digits


@dataclass(frozen=True)
class Task(ABC):
    """What a model reads and is asked.

    Example:
        >>> x, y = TASKS["parity"].batch(2, 8, torch.Generator().manual_seed(0))
        >>> x.shape, y.shape
        (torch.Size([2, 9]), torch.Size([2, 8]))
    """

    name: str
    num_letters: int
    num_classes: int
    layers: int = 1
    conv_size: int | tuple[int, ...] = (
        0  #: taps of the short convolutions of delta rules; a tuple has one number a layer
    )
    whole: bool = False  #: whether answers depend on where the word ends, so that each length needs words of its own
    far: bool = True  #: whether there are words of any length
    heads: int = 12  #: of Complex KDA; other arms have as many as make their parameters about equal
    head_dim: int = 16  #: channels a head
    updates: int = 1500  #: of the training
    batch_size: int = 128  #: words an update
    curriculum: tuple[int, ...] = (3, 6, 12, 24, 40)  #: lengths of the training's words
    begins: tuple[float, ...] = ()  #: shares of the training after which each next length begins; (): equal stages
    closure: float = 0.0  #: the weight of :meth:`penalty`, which begins at 30% of the training and is whole at 45%

    @property
    def num_tokens(self) -> int:
        """The letters and the begin token."""
        return self.num_letters + 1

    @abstractmethod
    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Letters [size, longest] of words whose lengths are drawn from `shortest` to `longest` where a length matters, and
        every answer [size, longest] that is defined there, :data:`UNASKED` elsewhere."""

    def taps(self, layer: int) -> int:
        """Of the short convolution of this layer, counted from 0.

        Example:
            >>> [TASKS["arithmetic"].taps(layer) for layer in range(2)]
            [0, 4]
        """
        return self.conv_size if isinstance(self.conv_size, int) else self.conv_size[layer]

    def switches(self, updates: int) -> tuple[int, ...]:
        """The updates, counted from 1, at which each next length begins; () for equal stages.

        Example:
            >>> TASKS["parity"].switches(1500), len(TASKS["arithmetic"].switches(1500))
            ((), 4)
        """
        return tuple(1 + round(share * updates) for share in self.begins)

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1 / self.num_classes

    def scored(self, y: Tensor) -> Tensor:
        """Which answers count for the accuracy."""
        return y != UNASKED

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x [size, 1 + length] with the begin token in front, y [size, length]."""
        x, y = self.words(size, 1, length, generator)
        return self.begun(x), y

    def begun(self, x: Tensor) -> Tensor:
        """Letters [B, T] after the begin token."""
        return torch.cat([x.new_full((len(x), 1), self.num_letters), x], 1)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy over what was asked, [R], from logits [R, B, 1 + T, n] and answers [R, B, T]."""
        asked = y != UNASKED
        rows, labels = output[:, :, 1:].flatten(0, 2), y.flatten()
        each = cross_entropy(rows, labels, reduction="none", ignore_index=UNASKED, label_smoothing=SMOOTHING)
        return each.view_as(y).sum((1, 2)) / asked.sum((1, 2))

    def settled(self, x: Tensor) -> Tensor:
        """After which letters the letter and the answer say all that a model has to know; like x."""
        return torch.ones_like(x, dtype=torch.bool)

    def meaning(self, layer: int, x: Tensor, y: Tensor) -> Tensor:
        """What a readout of this layer, counted from 0, has to be a function of: letter and answer, as one number; UNASKED where
        :meth:`settled` does not say so."""
        return torch.where(self.settled(x) & (y != UNASKED), x * self.num_classes + y, UNASKED)

    def penalty(self, name: str, trace: dict[str, Tensor], y: Tensor) -> Tensor:
        """[R] "closure": equal :meth:`meaning`, equal readout; mean over layers."""
        if name != "closure":
            raise ValueError(f"there is no penalty {name!r}; there is 'closure'")
        none = self.num_letters * max(self.num_letters, self.num_classes)
        errors = []
        for layer, o in enumerate(trace["o"][:, :, 1:].chunk(self.layers, -2)):
            label = self.meaning(layer, trace["x"][:, :, 1:], y)
            asked = label != UNASKED
            errors.append(closure(o * asked[..., None, None], torch.where(asked, label, none), none + 1))
        return torch.stack(errors).mean(0)

    def key(self) -> dict[str, Any]:
        """What two runs must agree on."""
        return {"task": self.name, "layers": self.layers, "conv_size": self.conv_size, "smoothing": SMOOTHING}


def _random(below: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(below, shape, generator=generator, device=generator.device)


def _between(shortest: int, longest: int, size: int, generator: torch.Generator) -> Tensor:
    """[size] whole numbers, both ends included."""
    return shortest + _random(longest - shortest + 1, (size,), generator)


class Parity(Task):
    """The number of ones, mod 2."""

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = _random(2, (size, longest), generator)
        return x, x.cumsum(1) % 2


class EvenPairs(Task):
    """Whether 01 and 10 together occur an even number of times: exactly if the last letter is the first."""

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = _random(2, (size, longest), generator)
        return x, (x == x[:, :1]).long()


class CycleNavigation(Task):
    """Where a walk on a circle of five ends; letters 0, 1, 2 are steps 0, +1, -1."""

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = _random(3, (size, longest), generator)
        return x, torch.where(x == 2, -1, x).cumsum(1) % _MODULUS


def _apply(op: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a op b mod 5."""
    return torch.where(op == _PLUS, a + b, torch.where(op == _MINUS, a - b, a * b)) % _MODULUS


class Arithmetic(Task):
    """Digits and +, -, * by turns, products first: the value of what was read; an operation does not change it.

    Two layers can do it exactly. The first multiplies: 1 to 4 are i^n under multiplication, so a digit turns a pair of channels by
    n quarters, 0 empties it, + and - empty it and write 1 or -1 for the next digit to multiply, * does nothing. No letter has to
    see another one, so this layer has no convolution. The second adds: at + and - it turns a pair by fifths of a circle, as many as
    the finished product says, which stands one letter back: it has one.
    """

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        digits = _random(_MODULUS, (size, (longest + 1) // 2), generator)
        ops = _PLUS + _random(3, (size, longest // 2), generator)
        x = digits.new_empty(size, longest)
        x[:, ::2], x[:, 1::2] = digits, ops
        y = torch.empty_like(x)
        before, term = torch.zeros_like(digits[:, 0]), digits[:, 0]  # the finished terms, and the one that may grow
        y[:, 0] = term
        for i in range(1, digits.shape[1]):
            op, digit = ops[:, i - 1], digits[:, i]
            product = op == _TIMES
            before = torch.where(product, before, before + term)
            term = torch.where(product, term * digit, torch.where(op == _MINUS, -digit, digit)) % _MODULUS
            y[:, 2 * i] = (before + term) % _MODULUS
        y[:, 1::2] = y[:, ::2][:, : longest // 2]
        return x, y

    def settled(self, x: Tensor) -> Tensor:
        """After + and -: a finished product is all in the sum."""
        return (x == _PLUS) | (x == _MINUS)

    def products(self, x: Tensor) -> Tensor:
        """The product that is being made, after every letter: + and - begin it anew, as 1 and -1."""
        term, found = torch.ones_like(x[..., 0]), []
        for letter in x.unbind(-1):
            begun = torch.where(letter == _TIMES, term, torch.where(letter == _MINUS, -1, 1))
            term = torch.where(letter < _MODULUS, term * letter, begun) % _MODULUS
            found.append(term)
        return torch.stack(found, -1)

    def meaning(self, layer: int, x: Tensor, y: Tensor) -> Tensor:
        """In the first layer letter and product, after every letter: the sum is not made there."""
        return super().meaning(layer, x, y) if layer else x * self.num_classes + self.products(x)

    def key(self) -> dict[str, Any]:
        """Also what the penalty asks of the first layer: once letter and answer (no such key), then letters alone."""
        return super().key() | {"first_layer": "products"}


class Brackets(Task):
    """A digit, or (E op E) with two such expressions: n operations make 4 n + 1 letters; asked at the end.

    The split of n - 1 operations between the two sides is uniform.
    """

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        most = (longest - 1) // 4
        num = _between(min(most, (shortest + 2) // 4), most, size, generator)
        x = torch.full((size, longest), _BLANK, device=generator.device)
        y = torch.full_like(x, UNASKED)
        rows = torch.arange(size, device=x.device)
        # what is still to be written, the next on top: n >= 0 an expression of n operations, else a letter as -1 - letter
        todo, height = x.new_zeros(size, most * 3 + 4), torch.ones_like(num)
        todo[:, 0] = num
        values, operations = x.new_zeros(size, most + 2), x.new_zeros(size, most + 2)
        level, depth = (
            torch.zeros_like(num),
            torch.zeros_like(num),
        )  # how many values, and how many operations, are open
        for t in range(4 * most + 1):
            alive = height > 0
            top = todo[rows, (height - 1).clamp_min(0)]
            digit, left, op = (_random(n, (size,), generator) for n in (_MODULUS, 1 << 30, 3))
            open_, number, sign = top > 0, top == 0, top < 0
            letter = torch.where(open_, _OPEN, torch.where(number, digit, -1 - top))
            x[:, t] = torch.where(alive, letter, x[:, t])
            # an opened expression: left side, operation, right side, bracket lie on the stack in its place
            n = left % top.clamp_min(1)
            for i, entry in enumerate((x.new_full((size,), -1 - _CLOSE), top - 1 - n, -1 - (_PLUS + op), n)):
                at = height - 1 + i
                at = torch.where(alive & open_, at, todo.shape[1] - 1)
                todo[rows, at] = torch.where(alive & open_, entry, todo[rows, at])
            height = torch.where(alive, torch.where(open_, height + 3, height - 1), height)
            # values: a digit is put down, a closing bracket makes one of two
            closes = alive & sign & (letter == _CLOSE)
            puts = alive & number
            opens = alive & sign & ~closes
            operations[rows, depth] = torch.where(opens, letter, operations[rows, depth])
            depth = depth + opens.long()
            a, b = (values[rows, (level - i).clamp_min(0)] for i in (2, 1))
            made = _apply(operations[rows, (depth - 1).clamp_min(0)], a, b)
            at = torch.where(closes, (level - 2).clamp_min(0), level)
            values[rows, at] = torch.where(closes, made, torch.where(puts, digit, values[rows, at]))
            level = level + puts.long() - closes.long()
            depth = depth - closes.long()
            y[:, t] = torch.where(alive & (height == 0), values[:, 0], y[:, t])
        return x, y


class Permutations(Task):
    """Words over a swap and a turn of five places, (12) and (12345): which permutation they make, after every letter.

    The turn has two pairs of complex eigenvalues in every faithful representation of S5, and a Complex KDA factor has at most one
    (thm:complex_eigenvalues).
    """

    @cached_property
    def problem(self) -> WordProblem:
        G = group("S5")
        return WordProblem(G, tuple(G.labels.index(p) for p in ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0))))

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = _random(2, (size, longest), generator)
        return x, self.problem.products(torch.tensor(self.problem.letters, device=x.device)[x])


_VARIABLES = 5


class Trace(Task):
    """A program over five variables that begin as 0 to 4: ``swap a b`` or ``print a value``, each as likely; next-token loss.

    Letters: variables 0 to 4, values 5 to 9, swap 10, print 11.
    """

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        num, device = (longest + 3) // 3, generator.device  # one statement more, for the last next token
        swaps = _random(2, (size, num), generator) == 0
        first = _random(_VARIABLES, (size, num), generator)
        second = (first + 1 + _random(_VARIABLES - 1, (size, num), generator)) % _VARIABLES
        value = torch.arange(_VARIABLES, device=device).repeat(size, 1)
        said = torch.empty_like(first)
        for i in range(num):
            a, b = first[:, i : i + 1], second[:, i : i + 1]
            said[:, i] = value.gather(1, a).squeeze(1)
            swapped = value.scatter(1, a, value.gather(1, b)).scatter(1, b, value.gather(1, a))
            value = torch.where(swaps[:, i : i + 1], swapped, value)
        words = (
            torch.where(swaps, 2 * _VARIABLES, 2 * _VARIABLES + 1),
            first,
            torch.where(swaps, second, _VARIABLES + said),
        )
        x = torch.stack(words, 2).flatten(1)
        return x[:, :longest], x[:, 1 : longest + 1]

    @property
    def chance(self) -> float:
        return 1 / _VARIABLES

    def scored(self, y: Tensor) -> Tensor:
        """Where the next token is a value."""
        return (y >= _VARIABLES) & (y < 2 * _VARIABLES)


_KEYS, _VALUES = 128, 64


class Recall(Task):
    """Multi-query associative recall: N pairs of a key and a value, then the N keys in another order, each asked for its value.

    3 N letters: keys 0 to 127, each at most once, values 128 to 191, a blank.
    """

    def words(self, size: int, shortest: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        most, device = longest // 3, generator.device
        if not 1 <= most <= _KEYS:
            raise ValueError(f"there are words of 3 to {3 * _KEYS} letters; {longest} is no such length")
        num = _between(min(most, (shortest + 2) // 3), most, size, generator)[:, None]
        keys = torch.rand((size, _KEYS), generator=generator, device=device).argsort(1)[:, :most]
        values = _random(_VALUES, (size, most), generator)
        order = torch.rand((size, most), generator=generator, device=device)
        order = order.masked_fill(torch.arange(most, device=device) >= num, 2.0).argsort(1)  # of the first num pairs
        t = torch.arange(longest, device=device).expand(size, -1)
        asks = (t >= 2 * num) & (t < 3 * num)
        pair = torch.where(asks, order.gather(1, (t - 2 * num).clamp(0, most - 1)), (t // 2).clamp_max(most - 1))
        key, value = keys.gather(1, pair), values.gather(1, pair)
        x = torch.where(
            asks | ((t < 2 * num) & (t % 2 == 0)), key, torch.where(t < 2 * num, _KEYS + value, _KEYS + _VALUES)
        )
        return x, torch.where(asks, value, UNASKED)


#: letter and answer say all that there is to know: many small heads, and the closure penalty
_CLOSED: dict[str, Any] = {"heads": 16, "head_dim": 4, "updates": 1000, "batch_size": 64, "closure": 1.0}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Parity("parity", 2, 2, **_CLOSED),
        EvenPairs("even-pairs", 2, 2, conv_size=4, **_CLOSED),
        CycleNavigation("cycle", 3, _MODULUS, **_CLOSED),
        Arithmetic(
            "arithmetic",
            8,
            _MODULUS,
            layers=2,
            conv_size=(0, 4),
            heads=6,
            head_dim=8,
            updates=12000,
            batch_size=64,
            curriculum=(4, 8, 16, 24, 40),
            closure=1.0,
            begins=(0.05, 0.45, 0.6, 0.7),
        ),
        Brackets("brackets", 11, _MODULUS, layers=2, conv_size=4, whole=True),
        Permutations("S5", 2, 120),
        Trace("trace", 2 * _VARIABLES + 2, 2 * _VARIABLES + 2, conv_size=4),
        Recall("recall", _KEYS + _VALUES + 1, _VALUES, conv_size=4, whole=True, far=False),
    )
}
PUBLISHED_FOUR = ("parity", "even-pairs", "cycle", "arithmetic")  #: PD-SSM's table


@lru_cache(maxsize=16)  # all arms are asked the same
def _test_words(task: Task, size: int, shortest: int, longest: int, device: str) -> tuple[Tensor, Tensor]:
    return task.words(size, shortest, longest, torch.Generator(device).manual_seed(1_000_000 + longest))


@torch.no_grad()
def evaluate(
    prefill: Any, task: Task, replicas: int, size: int, shortest: int, longest: int, device: str, segment: int = 64
) -> tuple[Tensor, Tensor]:
    """[R, T] how many answers of each replica are right at each step of words of up to `longest` letters, and [T] how many count.

    Args:
        prefill: tokens [R, B, t] and a cache (None at first) -> logits [R, B, t, n] and the next cache.
    """
    x, y = _test_words(task, size, shortest, longest, device)
    counted = task.scored(y)
    tokens, right, cache = task.begun(x), [], None
    for first in range(0, longest + 1, segment):
        part = tokens[:, first : first + segment]
        logits, cache = prefill(part.expand(replicas, *part.shape), cache)
        steps = slice(max(first, 1) - 1, first + part.shape[1] - 1)
        said = logits[:, :, (first == 0) :].argmax(-1)
        right.append(((said == y[:, steps]) & counted[:, steps]).sum(1))
    return torch.cat(right, 1).cpu(), counted.sum(0).cpu()


def scaled_scores(task: Task, counts: tuple[Tensor, Tensor], first: int, last: int) -> list[float]:
    """Of :func:`evaluate`'s counts over steps `first` to `last`, counted from 1: the accuracy, chance at 0 and perfection at 1."""
    right, counted = (part[..., first - 1 : last].sum(-1).double() for part in counts)
    return ((right / counted - task.chance) / (1 - task.chance)).tolist()
