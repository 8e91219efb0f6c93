"""The ladder's launcher: a cell is a size, an arm and a token budget; cells run here one after the other, or on SLURM."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckda.lm.extras import require
from ckda.lm.training import Training, TrainResult, recipe_for
from ckda.models import ladder

__all__ = ["cells", "finished", "run_local", "submit"]


def cells(
    base: Training, sizes: Sequence[str], arms: Sequence[str], budgets: Sequence[int], seeds: int = 1, **changes: Any
) -> dict[str, Training]:
    """Every combination by name, a folder under base.out each; `changes` are of the recipe.

    Example:
        >>> from ckda.lm.recipe import Recipe
        >>> list(cells(Training("47M:ckda", "tokens", "runs", Recipe(1)), ["47M"], ["kda", "ckda"], [6 * 10**9]))
        ['47M-kda-6B-seed0', '47M-ckda-6B-seed0']
    """
    for kind, names, known in (("size", sizes, ladder.CONFIGS), ("arm", arms, ladder.ARMS)):
        for name in names:
            if name not in known:
                raise ValueError(f"{kind} is {name!r}; it may be {', '.join(known)}")
    found = {}
    for size, tokens, arm, seed in ((s, t, a, n) for s in sizes for t in budgets for a in arms for n in range(seeds)):
        name = f"{size}-{arm}-{_short(tokens)}-seed{seed}"
        recipe = recipe_for(f"{size}:{arm}", base.device, tokens=tokens, **changes | {"seed": seed})
        found[name] = replace(base, model=f"{size}:{arm}", out=str(Path(base.out) / name), recipe=recipe)
    return found


def _short(tokens: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if tokens >= unit and tokens % (unit // 10) == 0:
            return f"{tokens / unit:g}{letter}"
    return str(tokens)


def finished(cell: Training) -> bool:
    """Whether its result is there and complete."""
    return _stopped(cell) == "not at all"


def _stopped(cell: Training) -> str | None:
    """Why the last call of this cell ended early; "not at all" where it did not, None where there was none."""
    try:
        return TrainResult.load(Path(cell.out) / "train.json").stopped or "not at all"
    except (OSError, ValueError):
        return None


def command(cell: Training, ranks: int) -> list[str]:
    """What another process is started with; the cell itself lies in a file."""
    file = cell.save(Path(cell.out) / "training.json")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *torchrun, "-m", "ckda.cli", "lm", "train", "--config", str(file), "--out", cell.out]


def run_local(todo: dict[str, Training], ranks: int = 1, say: Callable[[str], None] = print) -> dict[str, int]:
    """Train the cells that are not finished, one after the other; returns their exit statuses."""
    statuses = {}
    for number, (name, cell) in enumerate(todo.items(), 1):
        before = finished(cell)
        say(f"{number}/{len(todo)} {name}" + (": finished before" if before else ""))
        statuses[name] = 0 if before else subprocess.run(command(cell, ranks)).returncode
        if statuses[name] == 130 or _stopped(cell) == "SIGTERM":
            break
    return statuses


def submit(todo: dict[str, Training], ranks: int, slurm: dict[str, Any], cluster: str = "slurm") -> dict[str, str]:
    """Hand the cells to SLURM through submitit, a job each; returns their job numbers.

    A job that SLURM ends before its time gets SIGTERM, saves and is put in the queue again by submitit's checkpointing;
    the same command resumes it. cluster="local" runs the jobs as local processes (for tests).
    """
    require("submitit", "cluster")
    import submitit

    left = {name: cell for name, cell in todo.items() if not finished(cell)}
    if not left:
        return {}
    try:
        executor = submitit.AutoExecutor(
            folder=str(Path(next(iter(left.values())).out).parent / "slurm"), cluster=cluster
        )
        executor.update_parameters(**slurm)
    except (RuntimeError, NameError) as error:  # no SLURM here, or a parameter it does not know
        raise ValueError(f"submitit: {error}") from error
    return {name: str(executor.submit(Job(command(cell, ranks))).job_id) for name, cell in left.items()}


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
