"""Programs inside text whose state must be tracked: written out in words, mixed into the training, asked for their final state.

    shell      Five cups hold red, blue, green, white, black. / Swap cups 1 and 3. / ... / Now they hold green, blue, ...
    repl       >>> a, b, c, d, e = 0, 1, 2, 3, 4 / >>> a, c = c, a / ... / >>> print(a, b, c, d, e) / 2 1 0 3 4
    counter    >>> x = 0 / >>> x += 1 / >>> x -= 1 / ... / >>> print(x % 5) / 3
    brackets   Brackets: ( ( 3 - 2 ) * ... / Open: 2
    recall     k17 = v42 / k3 = v7 / ... / k3? v7: the control, multi-query associative recall

The letters are those of :mod:`ckda.experiments.regular.tasks` (trace, cycle, brackets, recall). In training a program has from one
to :data:`LONGEST` statements, and some programs show parts of the state on the way, at a rate that is drawn for each; tests show
nothing on the way and have one, two and four times LONGEST statements. An answer counts where all of its tokens come out.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckda.experiments.regular.tasks import TASKS
from ckda.lm.data import Sampler
from ckda.lm.evaluate import loglikelihoods
from ckda.lm.prepare import Preparation, load_tokenizer, prepare
from ckda.record import read_json, write_text

__all__ = [
    "KINDS",
    "LONGEST",
    "TIMES",
    "Mixed",
    "Program",
    "Question",
    "program_tokens",
    "questions",
    "score",
    "write_program",
]

LONGEST = 32  #: statements of a program in training
TIMES = (1, 2, 4)  #: lengths of the tests, in those
RECALLED = 16  #: pairs of a recall in training
RATES = (0.0, 0.1, 0.3)  #: shares of the statements after which training programs show a part of the state
_COLOURS = ("red", "blue", "green", "white", "black")
_NAMES = "abcde"
_SWAP = 10  # among the letters of the task "trace"
_OPEN, _CLOSE = 8, 9  # among those of the task "brackets"
_BRACKETS = [*"01234", "+", "-", "*", "(", ")"]


class Program(NamedTuple):
    """A text whose end is an answer."""

    text: str
    answer: str  #: what the text ends with


class Words:
    """Words of the suite's tasks, drawn in batches of `size`: a word of a task at a length a call."""

    def __init__(self, seed: int | str, size: int = 1):
        self.draw, self.size = random.Random(f"words {seed}"), size
        self._ready: dict[tuple[str, int], list[list[int]]] = {}

    def __call__(self, task: str, length: int) -> list[int]:
        """The next one, exactly so long."""
        ready = self._ready.setdefault((task, length), [])
        if not ready:
            generator = torch.Generator().manual_seed(self.draw.getrandbits(62))
            letters, _ = TASKS[task].words(self.size, length, length, generator)
            ready += letters.tolist()
        return ready.pop()

    def swaps(self, num: int, most: int) -> list[tuple[int, int]]:
        """The first `num` swaps of traces that have `most` or a few more."""
        found: list[tuple[int, int]] = []
        while len(found) < num:
            letters = self("trace", 9 * most + 60)
            statements = zip(letters[::3], letters[1::3], letters[2::3], strict=True)
            found += [(a, b) for word, a, b in statements if word == _SWAP]
        return found[:num]


def _shell(num: int, most: int, rate: float, draw: random.Random, words: Words) -> Program:
    cups = list(_COLOURS)
    lines = [f"Five cups hold {', '.join(cups)}."]
    for a, b in words.swaps(num, most):
        cups[a], cups[b] = cups[b], cups[a]
        lines.append(f"Swap cups {a + 1} and {b + 1}.")
        if draw.random() < rate:
            shown = draw.randrange(5)
            lines.append(f"Cup {shown + 1} holds {cups[shown]}.")
    answer = f" {', '.join(cups)}."
    return Program("\n".join([*lines, "Now they hold"]) + answer, answer)


def _repl(num: int, most: int, rate: float, draw: random.Random, words: Words) -> Program:
    values = list(range(5))
    names = ", ".join(_NAMES)
    lines = [f">>> {names} = 0, 1, 2, 3, 4"]
    for a, b in words.swaps(num, most):
        values[a], values[b] = values[b], values[a]
        lines.append(f">>> {_NAMES[a]}, {_NAMES[b]} = {_NAMES[b]}, {_NAMES[a]}")
        if draw.random() < rate:
            shown = draw.randrange(5)
            lines += [f">>> print({_NAMES[shown]})", str(values[shown])]
    answer = " ".join(map(str, values))
    return Program("\n".join([*lines, f">>> print({names})", answer]), answer)


def _counter(num: int, most: int, rate: float, draw: random.Random, words: Words) -> Program:
    x, lines = 0, [">>> x = 0"]
    for letter in words("cycle", most)[:num]:
        step = (0, 1, -1)[letter]
        x += step
        lines.append((">>> pass", ">>> x += 1", ">>> x -= 1")[letter])
        if draw.random() < rate:
            lines += [">>> print(x % 5)", str(x % 5)]
    answer = str(x % 5)
    return Program("\n".join([*lines, ">>> print(x % 5)", answer]), answer)


def _brackets(num: int, most: int, rate: float, draw: random.Random, words: Words) -> Program:
    letters = words("brackets", 4 * most + 5)[:num]
    depth = letters.count(_OPEN) - letters.count(_CLOSE)
    answer = f" {depth}"
    return Program(f"Brackets: {' '.join(_BRACKETS[letter] for letter in letters)}\nOpen:{answer}", answer)


def _recall(num: int, most: int, rate: float, draw: random.Random, words: Words) -> Program:
    letters = words("recall", 3 * num)
    pairs = list(zip(letters[: 2 * num : 2], letters[1 : 2 * num : 2], strict=True))
    known = dict(pairs)
    lines = [f"k{key} = v{value - 128}" for key, value in pairs]
    asked = letters[2 * num :]
    shown = asked[:-1] if rate else []
    lines += [f"k{key}? v{known[key] - 128}" for key in shown]
    answer = f" v{known[asked[-1]] - 128}"
    return Program("\n".join([*lines, f"k{asked[-1]}?"]) + answer, answer)


#: (statements, at most so many, rate of showing, draws, words) -> program
Writer = Callable[[int, int, float, random.Random, Words], Program]

#: kind -> (what writes it, statements in training)
KINDS: dict[str, tuple[Writer, int]] = {
    "shell": (_shell, LONGEST),
    "repl": (_repl, LONGEST),
    "counter": (_counter, LONGEST),
    "brackets": (_brackets, LONGEST),
    "recall": (_recall, RECALLED),
}


def write_program(kind: str, statements: int, rate: float = 0.0, seed: int | str = 0) -> Program:
    """One program.

    Example:
        >>> program = write_program("counter", 2, seed=1)
        >>> program.text.splitlines()[0], program.text.splitlines()[-2]
        ('>>> x = 0', '>>> print(x % 5)')
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it may be {', '.join(KINDS)}")
    name = f"{kind} {statements} {seed}"
    return KINDS[kind][0](statements, statements, rate, random.Random(name), Words(name))


def training_programs(characters: int, seed: int) -> list[str]:
    """Programs of all kinds in turns, of drawn lengths, until they have so many characters."""
    draw, words, size = random.Random(f"training {seed}"), Words(f"training {seed}", 256), 0
    texts: list[str] = []
    while size < characters:
        for write, longest in KINDS.values():
            text = write(draw.randint(1, longest), longest, draw.choice(RATES), draw, words).text
            texts.append(text)
            size += len(text)
    return texts


def program_tokens(tokens: Path, wanted: int, seed: int) -> Path:
    """A folder of at least `wanted` tokens of training programs under the tokenizer of `tokens`, made once beside it."""
    out = tokens.with_name(f"{tokens.name}-programs-{wanted}-seed{seed}")
    if (out / "index.json").is_file():
        return out
    characters = 3 * wanted
    while True:
        source = out.with_suffix(".jsonl")
        texts = training_programs(characters, seed)
        write_text(source, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        options = Preparation(
            tokenizer=str(tokens / "tokenizer.json"), held_out=0.0, workers=0 if wanted > 10**6 else 1
        )
        found = prepare([str(source)], out, options, fresh=True)["tokens"]["train"]  # in the place of a shorter one
        source.unlink()
        if found >= wanted:
            return out
        characters = int(characters * 1.1 * wanted / found)


@dataclass(frozen=True)
class Mixed:
    """Text in which a share of the samples are programs, evenly spaced; sample i of it is a function of i alone, as a Sampler's is.

    Example:
        >>> class Numbers:
        ...     def __init__(self, first): self.first, self.length, self.documents, self.store = first, 4, "joined", None
        ...     def batch(self, numbers): return self.first + np.repeat(numbers[:, None], 4, 1)
        >>> Mixed(Numbers(0), Numbers(100), 0.25).batch(np.arange(8))[:, 0].tolist()
        [0, 1, 2, 100, 4, 5, 6, 101]
    """

    text: Sampler
    programs: Sampler
    share: float

    @property
    def length(self) -> int:
        """Tokens a sample."""
        return self.text.length

    @property
    def documents(self) -> str:
        """As the text's."""
        return self.text.documents

    @property
    def store(self) -> Any:
        """The text's."""
        return self.text.store

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [B, T]: the tokens of these samples."""
        numbers = np.asarray(numbers, np.int64)
        before = np.floor(numbers * self.share).astype(np.int64)
        chosen = np.floor((numbers + 1) * self.share).astype(np.int64) > before
        out = self.text.batch(numbers)
        if chosen.any():
            out[chosen] = self.programs.batch(before[chosen])
        return out

    def num_targets(self, numbers: np.ndarray) -> int:
        """All but each sample's first token."""
        return len(numbers) * (self.length - 1)


# Questions ------------------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """Programs of one kind and length: context and answer as tokens."""

    kind: str
    times: int
    pairs: list[tuple[list[int], list[int]]]


def split_tokens(tokenizer: Any, program: Program) -> tuple[list[int], list[int]]:
    """The tokens before the answer and those of it; the whole text is encoded at once, as in training."""
    encoded = tokenizer.encode(program.text, add_special_tokens=False)
    start = len(program.text) - len(program.answer)
    first = next(i for i, (_, end) in enumerate(encoded.offsets) if end > start)
    return encoded.ids[:first], encoded.ids[first:]


def questions(tokenizer: str | Path, num: int, seed: int = 1_000_003) -> list[Question]:
    """`num` programs of every kind at every length of the tests, under the tokenizer in that file; the seed is no training's."""
    loaded = load_tokenizer(str(tokenizer))
    found = []
    for kind, (write, longest) in KINDS.items():
        for times in TIMES:
            words, draw, size = Words(f"test {seed} {kind} {times}", num), random.Random(seed), times * longest
            programs = [write(size, size, 0.0, draw, words) for _ in range(num)]
            found.append(Question(kind, times, [split_tokens(loaded, program) for program in programs]))
    return found


def score(model: Any, asked: Sequence[Question]) -> dict[str, dict[str, float]]:
    """kind -> length (as "1x") -> share of the programs whose whole answer is the model's greedy one."""
    was_training = model.training
    model.eval()
    result: dict[str, dict[str, float]] = {}
    try:
        for question in asked:
            greedy = [right for _, right in loglikelihoods(model, question.pairs)]
            result.setdefault(question.kind, {})[f"{question.times}x"] = round(sum(greedy) / len(greedy), 4)
    finally:
        model.train(was_training)
    return result


def about(tokens: str | Path) -> dict[str, Any]:
    """How many tokens programs of each kind have, at the lengths of the tests."""
    tokenizer = Path(tokens) / "tokenizer.json"
    asked = questions(tokenizer, 8)
    vocabulary = read_json(Path(tokens) / "index.json")["vocab_size"]
    longest = {f"{q.kind} {q.times}x": max(len(a) + len(b) for a, b in q.pairs) for q in asked}
    return {"vocabulary": vocabulary, "longest_in_tokens": longest}
