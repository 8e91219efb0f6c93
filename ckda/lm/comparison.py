"""Runs of ``ckda lm train`` side by side: one record, its tables, and what its figures are drawn from."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckda.lm.figures import ARM_STYLE, label_of
from ckda.lm.training import TrainResult
from ckda.record import read_json, write_json

__all__ = ["Comparison", "Run", "collect", "markdown"]

_KEPT = ("parameters", "loss", "held_out_loss", "tokens_per_second", "mfu", "memory_gib", "seconds", "flops_per_token")


@dataclass(frozen=True)
class Run:
    """One arm and seed."""

    arm: str
    seed: int
    parameters: int
    loss: float
    held_out_loss: float
    tokens_per_second: float
    mfu: float | None
    memory_gib: float | None
    seconds: float
    flops_per_token: float
    held_out: list[list[float]]  #: [tokens, loss] of every validation
    training: list[list[float]]  #: [tokens, loss] of every tenth update
    tasks: dict[str, dict[str, float]] | None
    recipe: dict[str, Any]
    environment: dict[str, Any]

    @property
    def label(self) -> str:
        """As figures and tables call it."""
        return label_of(self.arm)


@dataclass(frozen=True)
class Comparison:
    """The file comparison.json."""

    size: str
    runs: list[Run]

    @classmethod
    def load(cls, path: str | Path) -> "Comparison":
        """From its file."""
        values = read_json(path)
        return cls(values["size"], [Run(**run) for run in values["runs"]])

    def save(self, path: str | Path) -> Path:
        """To its file."""
        return write_json(path, {"what": "language models side by side"} | asdict(self))

    def table(self) -> str:
        """Losses and costs, and below them the tasks of the runs that were evaluated, as Markdown."""
        head = ["arm", "seed", "parameters", "held-out loss", "tokens/s", "MFU", "GiB"]
        rows = [
            [
                run.label,
                str(run.seed),
                f"{run.parameters / 1e6:.2f} M",
                f"{run.held_out_loss:.4f}",
                f"{run.tokens_per_second:,.0f}",
                "-" if run.mfu is None else f"{100 * run.mfu:.1f}%",
                "-" if run.memory_gib is None else f"{run.memory_gib:.1f}",
            ]
            for run in self.runs
        ]
        scored = [(run.label, run.tasks) for run in self.runs if run.tasks]
        if not scored:
            return markdown(head, rows)
        tasks = list(scored[0][1])
        cells = [[label, *(_measure(found[task]) for task in tasks)] for label, found in scored]
        return markdown(head, rows) + "\n" + markdown(["arm", *tasks], cells)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _measure(measures: dict[str, float]) -> str:
    """Bits a character, or accuracy in per cent (per character where the paper takes acc_norm)."""
    if "bits_per_character" in measures:
        return f"{measures['bits_per_character']:.3f} bits"
    return f"{100 * measures.get('acc_norm', measures['acc']):.1f}"


def collect(folder: Path, size: str) -> Comparison:
    """The complete runs in the folders ARM-seedN of `folder`, with the eval.json beside them."""
    runs = []
    for path in sorted(folder.glob("*-seed*/train.json")):
        result = TrainResult.load(path)
        if result.stopped is None:
            arm, _, seed = path.parent.name.rpartition("-seed")
            tasks = path.parent / "eval.json"
            runs.append(
                Run(
                    arm=arm,
                    seed=int(seed),
                    **{name: getattr(result, name) for name in _KEPT},
                    held_out=[[row.tokens, round(row.held_out_loss or 0.0, 5)] for row in result.validations],
                    training=[[row.tokens, round(row.loss, 4)] for row in result.log if row.loss is not None][::10],
                    tasks=read_json(tasks)["results"] if tasks.is_file() else None,
                    recipe=result.recipe,
                    environment=result.environment,
                )
            )
    order = {arm: place for place, arm in enumerate(ARM_STYLE)}
    return Comparison(size, sorted(runs, key=lambda run: (order.get(run.arm, len(order)), run.arm, run.seed)))
