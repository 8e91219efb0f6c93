"""BIG-bench's tracking_shuffled_objects as words of swaps, read from the package `bigbench` where it is installed.

    Alice, Bob, and Claire ... First, Alice and Bob swap balls. Then, Bob and Claire swap balls. ... At the end, Alice has the

is the word (12) (23) ... of the shell game without noise, and the question is which of the things at the start is now
Alice's. Models trained on :func:`ckda.experiments.tracking.task.shell_game` are asked these questions; they see swaps, not English.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ckda.experiments.tracking.task import WordProblem
from ckda.record import read_json

__all__ = ["Question", "answers", "folder", "parse", "read_questions"]

_SIZES = {3: "three", 5: "five", 7: "seven"}


class Question(NamedTuple):
    """One example: swaps of two places, the place asked about, and whose thing lies there in the end."""

    swaps: tuple[tuple[int, int], ...]
    asked: int
    answer: int


def folder() -> Path | None:
    """Where the package keeps the task; None where it is not installed."""
    spec = find_spec("bigbench")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "benchmark_tasks" / "tracking_shuffled_objects"
    return path if path.is_dir() else None


def parse(text: str, choices: dict[str, int]) -> Question:
    """A question from its English text and its choices, which stand in the order of the people.

    Example:
        >>> parse("Alice, Bob, and Claire ... they each: Alice has a red ball, Bob has a pink ball, and Claire has a "
        ...       "blue ball. First, Claire and Alice swap balls. Finally, Bob and Alice swap balls. At the end of the "
        ...       "game, Bob has the ", {"red ball.": 0, "pink ball.": 0, "blue ball.": 1})
        Question(swaps=((2, 0), (1, 0)), asked=1, answer=2)
    """
    swaps = re.findall(r"(?:First|Then|Finally), (\w+) and (\w+) ", text)
    asked = re.search(r"At the end of the \w+, (\w+) ", text)
    people = re.findall(r"[A-Z]\w+", text.split(" are ")[0].split(" ...")[0])
    right = [i for i, score in enumerate(choices.values()) if score == 1]
    if not swaps or asked is None or len(people) != len(choices) or len(right) != 1:
        raise ValueError(f"this is no question about shuffled objects: {text[:80]!r}")
    place = {name: i for i, name in enumerate(people)}
    return Question(tuple((place[a], place[b]) for a, b in swaps), place[asked[1]], right[0])


def read_questions(objects: int) -> list[Question]:
    """All questions with this many objects (3, 5 or 7); empty where the package is not installed or has none."""
    root = folder()
    if root is None or objects not in _SIZES:
        return []
    examples = read_json(root / f"{_SIZES[objects]}_objects" / "task.json")["examples"]
    return [parse(example["input"], example["target_scores"]) for example in examples]


def words(task: WordProblem, questions: list[Question]) -> Tensor:
    """[N, 1 + T] the questions' swaps as tokens of the shell game, all of one length, the begin token in front."""
    labels = task.group.labels
    n = len(labels[0])

    def token(a: int, b: int) -> int:
        images = list(range(n))
        images[a], images[b] = b, a
        return task.meaning.index(labels.index(tuple(images)))

    return torch.tensor([[task.begin, *(token(a, b) for a, b in q.swaps)] for q in questions])


def answers(task: WordProblem, questions: list[Question], elements: Tensor) -> Tensor:
    """[N] bool: whether the group elements [N] that a model says after the last swap answer the questions.

    Element p moves the thing of person i to place p[i].
    """
    right = [task.group.labels[int(p)].index(q.asked) == q.answer for p, q in zip(elements, questions, strict=True)]
    return torch.tensor(right)
