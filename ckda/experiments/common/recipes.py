"""Recipes: how something is trained, by a name that says what it changes in the paper's protocol.

    paper                                             the protocol itself
    steps=10k                                         one change
    init=orthogonal-quarter+curriculum=from-2         two changes; of two with the same word before the = the later one counts
    closed                                            a combination that matters, with a name of its own
    closed+steps=8k                                   the same with one more change

A subject writes its changes down as a :class:`Book`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckda.train import Recipe

__all__ = ["Book", "Change", "number", "steps_word"]

PAPER = "paper"


@dataclass(frozen=True)
class Change:
    """What a recipe changes in the paper's protocol."""

    about: str
    training: dict[str, Any] = field(default_factory=dict)  #: fields of :class:`ckda.train.Recipe`
    model: dict[str, Any] = field(default_factory=dict)  #: options of the subject's model
    task: dict[str, Any] = field(default_factory=dict)  #: options of the subject's task
    restarts: int = 0  #: seeds begun with, of which `keep` go on; 0: those asked for
    cull_share: float = 1 / 3  #: of the updates after which they are chosen
    from_weights: bool = False  #: whether it begins from trained weights

    def then(self, other: "Change") -> "Change":
        """Both together, the other one winning."""
        return Change(
            f"{self.about}; {other.about}" if self.about else other.about,
            self.training | other.training,
            self.model | other.model,
            self.task | other.task,
            other.restarts or self.restarts,
            other.cull_share if other.restarts else self.cull_share,
            other.from_weights or self.from_weights,
        )

    def settings(self) -> tuple:
        """What it sets, without the words."""
        return self.training, self.model, self.task, self.restarts, self.restarts and self.cull_share, self.from_weights

    def recipe(self, **more: Any) -> Recipe:
        """The whole recipe, with further fields of :class:`ckda.train.Recipe`."""
        fields = self.training | more
        if self.restarts and "cull_at" not in fields:
            fields["cull_at"] = max(1, int(self.cull_share * fields.get("steps", Recipe.steps)))
        return Recipe(**fields)


def number(text: str) -> int:
    """A count as it is written in a recipe's name.

    Example:
        >>> number("600"), number("15k")
        (600, 15000)
    """
    found = re.fullmatch(r"([1-9]\d*)(k?)", text)
    if not found:
        raise ValueError(f"{text!r} is no count; write 600 or 15k")
    return int(found[1]) * (1000 if found[2] else 1)


def steps_word(count: int) -> str:
    """The inverse of :func:`number`.

    Example:
        >>> steps_word(600), steps_word(15_000)
        ('600', '15k')
    """
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


@dataclass(frozen=True)
class Book:
    """The recipes of a subject.

    Args:
        base: the paper's protocol.
        changes: word -> value -> what ``word=value`` changes.
        counted: word -> what ``word=VALUE`` changes, for values without a list.
        named: name -> (what it stands for, one sentence).
        old: names of earlier versions -> what they are called now.

    Example:
        >>> book = Book(Change("as published"), {"silu": {"k": Change("SiLU on the keys", model={"activate": ("k",)})}},
        ...             {"steps": lambda text: Change(f"{text} updates", {"steps": number(text)})},
        ...             {"quick": ("steps=600", "a first look")}, {"silu-keys": "silu=k+steps=30k"})
        >>> book.name("silu-keys+steps=5k"), book.read("quick+silu=k").recipe().steps
        ('silu=k+steps=5k', 600)
        >>> book.read("silu=v")
        Traceback (most recent call last):
        ValueError: silu=v: there is none; there are silu=k
    """

    base: Change
    changes: dict[str, dict[str, Change]]
    counted: dict[str, Callable[[str], Change]]
    named: dict[str, tuple[str, str]]
    old: dict[str, str] = field(default_factory=dict)

    def parts(self, name: str) -> list[str]:
        """The recipe's words in today's vocabulary: names first, then each ``word=value`` once, in the book's order."""
        words: list[str] = []
        for word in (new for part in name.split("+") for new in self.old.get(part, part).split("+")):
            if word in self.named:  # a combination wins over what stands before it
                words = [before for before in words if not self._covers(word, before)]
            words.append(word)
        last = {word.partition("=")[0]: i for i, word in enumerate(words)}
        parts = [word for i, word in enumerate(words) if last[word.partition("=")[0]] == i and word != PAPER]
        for word in parts:
            if word not in self.named:
                self._change(word)
        order = [*self.changes, *self.counted]
        place = {word: -1 if word in self.named else order.index(word.partition("=")[0]) for word in parts}
        return sorted(parts, key=place.__getitem__) or [PAPER]

    def _covers(self, combination: str, word: str) -> bool:
        """Whether all that a change sets is set by a combination, too."""
        if "=" not in word:
            return False
        its, whole = self._change(word), Change("")
        for part in self.named[combination][0].split("+"):
            whole = whole.then(self._change(part))
        return bool(its.training) and not its.model and not its.task and set(its.training) <= set(whole.training)

    def name(self, text: str) -> str:
        """The recipe's name in today's vocabulary; ValueError with what there is otherwise."""
        return "+".join(self.parts(text))

    def shortest(self, text: str) -> str:
        """:meth:`name` with the name of a combination in the place of its changes, and without changes that change nothing.

        Example:
            >>> more = {"steps": lambda text: Change("", {"steps": number(text)})}
            >>> book = Book(Change("", {"steps": 9}), {}, more, {"long": ("steps=90k", "ten times as long")})
            >>> book.shortest("steps=9"), book.shortest("steps=90k"), book.shortest("long+steps=90k")
            ('paper', 'long', 'long')
        """
        words = self.parts(text)
        combinations = sorted(
            ((name, self.parts(x)) for name, (x, _) in self.named.items()), key=lambda one: -len(one[1])
        )
        for name, its in combinations:
            if set(its) <= set(words) and not set(words) & set(self.named):
                words = [name, *(word for word in words if word not in its)]
        for word in [word for word in words if "=" in word]:
            without = "+".join(other for other in words if other != word) or PAPER
            if self.read(without).settings() == self.read("+".join(words)).settings():
                words.remove(word)
        return "+".join(words) or PAPER

    def read(self, name: str) -> Change:
        """What the recipe of that name is."""
        whole = self.base
        for part in self.parts(name):
            words = self.named[part][0].split("+") if part in self.named else [part]
            for word in words:
                whole = whole if word == PAPER else whole.then(self._change(word))
        return whole

    def about(self, name: str) -> str:
        """What the recipe is, in words."""
        parts = self.parts(name)
        return "; ".join(self.base.about if word == PAPER else self._about(word) for word in parts)

    def _about(self, word: str) -> str:
        return self.named[word][1] if word in self.named else self._change(word).about

    def _change(self, word: str) -> Change:
        key, equals, value = word.partition("=")
        if equals and key in self.counted:
            try:
                return self.counted[key](value)
            except ValueError as error:
                raise ValueError(f"{word}: {error}") from error
        if equals and key in self.changes:
            if value not in self.changes[key]:
                raise ValueError(
                    f"{word}: there is none; there are {', '.join(f'{key}={v}' for v in self.changes[key])}"
                )
            return self.changes[key][value]
        words = [*(f"{key}=" for key in (*self.changes, *self.counted))]
        raise ValueError(
            f"{word}: there is none; there are {', '.join((PAPER, *self.named))}, and changes {' '.join(words)}"
        )

    def listing(self) -> list[tuple[str, str]]:
        """(name, sentence) of every recipe and change, for a reader."""
        rows = [(PAPER, self.base.about)] + [(name, text) for name, (_, text) in self.named.items()]
        rows += [(f"{key}={value}", x.about) for key, values in self.changes.items() for value, x in values.items()]
        return rows + [(f"{key}=N", (read.__doc__ or "").strip()) for key, read in self.counted.items()]
