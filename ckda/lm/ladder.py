"""The ladder's launcher: a cell is a size, an arm and a token budget; cells run here one after the other, or on SLURM."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckda.lm.extras import require
from ckda.models import ladder
from ckda.record import read_json

__all__ = ["Cell", "cells", "run_local", "submit"]


@dataclass(frozen=True)
class Cell:
    """One training of the ladder."""

    size: str
    arm: str
    tokens: int
    seed: int = 0

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"{self.size}-{self.arm}-{_short(self.tokens)}-seed{self.seed}"

    def arguments(self, data: str, out: Path, extra: list[str]) -> list[str]:
        """The arguments of ``ckda`` that train it."""
        own = ["lm", "train", "--data", data, "--model", f"{self.size}:{self.arm}", "--tokens", str(self.tokens)]
        return [*own, "--seed", str(self.seed), "--out", str(out / self.name), *extra]

    def finished(self, out: Path) -> bool:
        """Whether its result is there and complete."""
        path = out / self.name / "train.json"
        try:
            return path.is_file() and read_json(path).get("stopped") is None
        except ValueError:
            return False


def _short(tokens: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if tokens >= unit and tokens % (unit // 10) == 0:
            return f"{tokens / unit:g}{letter}"
    return str(tokens)


def cells(sizes: list[str], arms: list[str], budgets: list[int], seeds: int = 1) -> list[Cell]:
    """Every combination.

    Example:
        >>> [cell.name for cell in cells(["47M"], ["kda", "ckda"], [6 * 10**9])]
        ['47M-kda-6B-seed0', '47M-ckda-6B-seed0']
    """
    for size in sizes:
        if size not in ladder.CONFIGS:
            raise ValueError(f"size is {size!r}; it may be {', '.join(ladder.CONFIGS)}")
    for arm in arms:
        if arm not in ladder.ARMS:
            raise ValueError(f"arm is {arm!r}; it may be {', '.join(ladder.ARMS)}")
    return [
        Cell(size, arm, tokens, seed) for size in sizes for tokens in budgets for arm in arms for seed in range(seeds)
    ]


def run_local(
    todo: list[Cell], data: str, out: Path, extra: list[str], ranks: int = 1, say: Callable[[str], None] = print
) -> dict[str, int]:
    """Train the cells that are not finished, one after the other; returns their exit statuses."""
    statuses = {}
    for number, cell in enumerate(todo, 1):
        if cell.finished(out):
            say(f"{number}/{len(todo)} {cell.name}: finished before")
            statuses[cell.name] = 0
            continue
        say(f"{number}/{len(todo)} {cell.name}")
        statuses[cell.name] = subprocess.run([*_start(ranks), *cell.arguments(data, out, extra)]).returncode
        if statuses[cell.name] in (130, 143):
            break
    return statuses


def _start(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "ckda.cli"]
    run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, "-m", *run, "-m", "ckda.cli"]


def submit(
    todo: list[Cell], data: str, out: Path, extra: list[str], ranks: int, slurm: dict[str, Any], cluster: str = "slurm"
) -> dict[str, str]:
    """Hand the cells to SLURM through submitit, a job each; returns their job numbers.

    A job that SLURM ends before its time gets SIGTERM, saves and is put in the queue again by submitit's checkpointing;
    the same command resumes it. cluster="local" runs the jobs as local processes (for tests).
    """
    require("submitit", "cluster")
    import submitit

    try:
        executor = submitit.AutoExecutor(folder=str(out / "slurm"), cluster=cluster)
        executor.update_parameters(**slurm)
    except (RuntimeError, NameError) as error:  # no SLURM here, or a parameter it does not know
        raise ValueError(f"submitit: {error}") from error
    jobs = {}
    for cell in todo:
        if not cell.finished(out):
            job = executor.submit(Job([*_start(ranks), *cell.arguments(data, out, extra)]))
            jobs[cell.name] = str(job.job_id)
    return jobs


class Job:
    """A command that submitit runs and, when the job's time is over, submits again."""

    def __init__(self, command: list[str]):
        self.command = command

    def __call__(self) -> int:
        """Run the command."""
        return subprocess.run(self.command, check=True).returncode

    def checkpoint(self) -> Any:
        """What submitit puts in the queue again: the command resumes by itself."""
        import submitit

        return submitit.helpers.DelayedSubmission(Job(self.command))
