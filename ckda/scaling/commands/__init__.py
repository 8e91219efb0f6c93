"""``ckda scaling``, a file a command: its configuration, ``run(config) -> result``, and the options that fill the configuration."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckda.command import filled

from ..fit import BLOCK, LEVEL, Settings
from ..table import Table

__all__ = ["Effort", "effort_of", "fingerprint", "progress", "tell", "ticks"]

OUT = "runs/scaling"


@dataclass(frozen=True)
class Effort:
    """How hard is tried: starts and replicates an arm, and the level of the intervals."""

    starts: int = 600
    bootstrap: int = 1000  #: replicates; 0: none
    restarts: int = 4  #: random restarts per replicate
    level: float = LEVEL
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"--level {self.level}: it must lie between 0 and 1")
        for name in ("bootstrap", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} {getattr(self, name)}: it must not be negative")
        if self.bootstrap == 1:
            raise ValueError("--bootstrap 1: an interval needs at least two replicates; 0 turns it off")

    def small(self) -> "Effort":
        """For a smoke run."""
        return replace(self, starts=min(self.starts, 40), bootstrap=min(self.bootstrap, 20))


def effort_of(args: argparse.Namespace) -> Effort:
    """The effort that the options ask for."""
    if args.device not in ("auto", "cpu"):
        raise ValueError(f"--device {args.device}: scaling fits run on the CPU; give cpu or auto")
    effort: Effort = filled(Effort, args)
    return effort.small() if args.smoke else effort


def ticks(table: Table, settings: Settings, replicates: int) -> int:
    """How often a fit of this table ticks."""
    blocks = -(-replicates // BLOCK)
    return len(table.arms) + blocks * (1 if settings.roles.shared else len(table.arms))


def fingerprint(table: Table) -> list[Any]:
    """What a resumed fit must agree on."""
    return [table.N.tolist(), table.D.tolist(), table.loss.tolist(), table.group, table.chained.tolist(), table.cell]


def tell(args: argparse.Namespace, result: dict[str, Any], text: str, written: list[Path]) -> int:
    """The result as text, or as JSON alone; where the files are goes to standard error."""
    print(json.dumps(result, allow_nan=False) if args.json else text)
    print("\nwritten: " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error."""
    from rich import progress as rich
    from rich.console import Console

    times = rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), *times
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, completed=total)
