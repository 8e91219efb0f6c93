"""How a small model is trained, as data."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from ckda.train.optimizers import MOMENTUM, cycled_momentum, one_cycle, warmup_cosine

__all__ = ["Phase", "Recipe"]


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
