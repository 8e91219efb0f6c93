"""How a small model is trained, as data (:class:`Recipe`), and by a name that says what it changes (:class:`Book`).

    paper                                             the protocol itself
    steps=10k                                         one change
    init=orthogonal-quarter+curriculum=from-2         two changes; of two with the same word before the = the later one counts
    closed                                            a combination that matters, with a name of its own
    closed+steps=8k                                   the same with one more change

A subject writes its changes down as a :class:`Book`.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckda.train.optimizers import MOMENTUM, cycled_momentum, one_cycle, warmup_cosine

__all__ = ["Book", "Change", "Phase", "Recipe", "decimal", "number", "steps_word"]


class Phase(NamedTuple):
    """What stays the same from update to update: while it does, a recorded update can be replayed."""

    length: int
    letters: str  #: which inputs words are made of, by a name the task knows; "" for its own
    penalized: bool


@dataclass(frozen=True)
class Recipe:
    """How a small model is trained; the defaults are those of state tracking (app:exp_state_tracking)."""

    steps: int = 60_000
    batch: int = 1024
    curriculum: tuple[int, ...] = (4, 6, 8, 16, 32)  #: lengths, in equal stages unless `switches` says otherwise
    switches: tuple[int, ...] = ()  #: the updates, counted from 1, at which each next length of the curriculum begins
    letters: tuple[str, ...] = ()  #: for each length of the curriculum which inputs it uses (`Task.over`); empty: all
    lr_muon: float = 0.02
    lr_adamw: float = 5e-3
    schedule: str = "one_cycle"  #: of the learning rates: "one_cycle" or "cosine" (:func:`warmup_cosine`)
    momentum: float | str = MOMENTUM  #: of Muon: a number, or "cycled" with "one_cycle" (:func:`cycled_momentum`)
    warmup: float = 0.1
    floor: float = 0.1  #: of "cosine": the factor at its end
    tail: float = 0.0  #: of "cosine": the part of the updates that decays on from there
    clip: float = 1.0
    weight_decay: float = 1e-12
    penalties: dict[str, float] = field(default_factory=dict)  #: names the task knows -> weights
    ramp: tuple[float, float] = (0.0, 0.0)  #: the parts of the training at which penalties begin and are in full force
    cull_at: int = 0  #: the update before which only the best `keep` seeds are kept; 0: never
    keep: int = 0
    block: int = 1  #: updates whose batches are drawn at once

    def __post_init__(self) -> None:
        if self.switches and len(self.switches) != len(self.curriculum) - 1:
            raise ValueError(
                f"there are {len(self.switches)} switches; a curriculum of {len(self.curriculum)} lengths has "
                f"{len(self.curriculum) - 1}"
            )
        if self.letters and len(self.letters) != len(self.curriculum):
            raise ValueError(f"letters has {len(self.letters)} entries; the curriculum has {len(self.curriculum)}")
        if self.schedule not in ("one_cycle", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; it must be 'one_cycle' or 'cosine'")
        if isinstance(self.momentum, str):
            if self.momentum != "cycled" or self.schedule != "one_cycle":
                raise ValueError(
                    f"momentum is {self.momentum!r} with the schedule {self.schedule!r}; it must be a number, or 'cycled' "
                    "with 'one_cycle'"
                )
        elif not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if bool(self.cull_at) != bool(self.keep) or not 0 <= self.cull_at < max(1, self.steps):
            raise ValueError(
                f"cull_at is {self.cull_at} and keep is {self.keep}; both must be 0, or cull_at from 1 to "
                f"{self.steps - 1} and keep at least 1"
            )

    def stage(self, step: int) -> int:
        """Which length of the curriculum this step, counted from 0, has."""
        if self.switches:
            return bisect_right(self.switches, step + 1)
        return min(len(self.curriculum) - 1, step * len(self.curriculum) // self.steps)

    def length(self, step: int) -> int:
        """The training length at this step, counted from 0."""
        return self.curriculum[self.stage(step)]

    def phase(self, step: int) -> Phase:
        """What kind of update this step is."""
        stage = self.stage(step)
        letters = self.letters[stage] if self.letters else ""
        return Phase(self.curriculum[stage], letters, bool(self.penalties) and self.penalty_factor(step) > 0)

    def same_phase(self, step: int, limit: int) -> int:
        """How many updates from this one on, at most `limit`, are of its phase and before the culling.

        Example:
            >>> Recipe(steps=10, curriculum=(4, 8)).same_phase(3, limit=50)
            2
        """
        last = self.cull_at if step < self.cull_at else self.steps
        phase, count = self.phase(step), 1
        while count < limit and step + count < last and self.phase(step + count) == phase:
            count += 1
        return count

    def factor(self, step: int) -> float:
        """What the peak learning rates are multiplied by at this step."""
        if self.schedule == "cosine":
            return warmup_cosine(step, self.steps, self.warmup, self.floor, self.tail)
        return one_cycle(step, self.steps, self.warmup)

    def penalty_factor(self, step: int) -> float:
        """What the penalties' weights are multiplied by at this step.

        Example:
            >>> [Recipe(steps=10, ramp=(0.4, 0.6)).penalty_factor(step) for step in (4, 5, 6)]
            [0.0, 0.5, 1.0]
        """
        begin, full = (part * self.steps for part in self.ramp)
        return float(step >= begin) if full <= begin else min(1.0, max(0.0, (step - begin) / (full - begin)))

    def muon_momentum(self, step: int) -> float:
        """Muon's momentum at this step.

        Example:
            >>> [round(Recipe(steps=1000, momentum=m).muon_momentum(99), 2) for m in (0.9, "cycled")]
            [0.9, 0.85]
        """
        return cycled_momentum(step, self.steps, self.warmup) if isinstance(self.momentum, str) else self.momentum

    def work(self, first: int, last: int | None = None) -> int:
        """Tokens of a sequence, summed over the updates from `first` to `last` (None: the end): what the time grows with.

        Example:
            >>> Recipe(steps=4, curriculum=(4, 8)).work(1)
            20
        """
        last = self.steps if last is None else last
        if self.switches:
            return sum(map(self.length, range(first, last)))
        stages, total = len(self.curriculum), 0
        for i, length in enumerate(self.curriculum):
            begin, end = -(-i * self.steps // stages), -(-(i + 1) * self.steps // stages)
            total += length * max(0, min(last, end) - max(first, begin))
        return total

    def rates(self, step: int) -> tuple[float, float, float, float]:
        """The learning rates of Muon and AdamW, the penalties' factor, and Muon's momentum."""
        factor = self.factor(step)
        return self.lr_muon * factor, self.lr_adamw * factor, self.penalty_factor(step), self.muon_momentum(step)


# Recipes by name -------------------------------------------------------------------------------------------------------

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
    from_weights: str = ""  #: how it begins from trained weights, by a name the subject knows; "": it does not
    goes_on: str = ""  #: the recipe by which its own weights are trained on; "": none

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
            other.goes_on or self.goes_on,
        )

    def settings(self) -> tuple:
        """What it sets, without the words."""
        restarts = self.restarts and self.cull_share
        return self.training, self.model, self.task, self.restarts, restarts, self.from_weights, self.goes_on

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


def decimal(text: str) -> float:
    """A number with a point as it is written in a recipe's name.

    Example:
        >>> decimal("0.95")
        0.95
    """
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no number such as 0.95") from error


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
        counted: word -> what ``word=VALUE`` changes, for values without a list; its docstring is "VALUE: what it does".
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
        forms = {key: (read.__doc__ or "N").strip().partition(": ") for key, read in self.counted.items()}
        return rows + [(f"{key}={form}", text) for key, (form, _, text) in forms.items()]
