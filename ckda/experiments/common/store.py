"""Where runs are kept: ``OUT/runs/NAME.json`` and ``NAME.pt`` once finished, ``NAME.checkpoint.pt`` on the way.

A finished run is never replaced unasked. One that was trained otherwise is refused with the difference; one that was scored
otherwise is scored anew from its weights.
"""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckda.record import read_json, set_aside, write_bytes, write_json
from ckda.train import Ensemble

__all__ = ["Files", "Store", "collect_records", "differences", "keep_report", "plain", "save_weights"]


class Files(NamedTuple):
    """The files of one run."""

    record: Path
    weights: Path
    checkpoint: Path


class Store:
    """The runs of one ``--out`` folder.

    Example:
        >>> Store(Path("runs/track")).files("S3-ckda").weights.as_posix()
        'runs/track/runs/S3-ckda.pt'
    """

    def __init__(self, out: Path):
        self.out = out

    def files(self, name: str) -> Files:
        """Where a run's record, weights and checkpoint lie."""
        record, weights, checkpoint = (self.out / "runs" / f"{name}.{end}" for end in ("json", "pt", "checkpoint.pt"))
        return Files(record, weights, checkpoint)

    def known(self, name: str, key: dict[str, Any]) -> dict[str, Any] | None:
        """The record of a finished run that was trained by this very key, its weights there or not; None if there is none.

        ValueError where another run of that name is there, or its record is damaged: it is not overwritten.
        """
        files = self.files(name)
        if not files.record.exists():
            return None
        try:
            record = read_json(files.record)
            found = record["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{files.record} cannot be read ({error}); it stays as it is. --fresh trains {name} anew in its place"
            ) from error
        unlike = differences(found, plain(key))
        if unlike:
            raise ValueError(
                f"{files.record} is a finished run of other settings: {'; '.join(unlike)}. It stays as it is: give another "
                "--out, or --fresh to train anew in its place"
            )
        return record

    def say_known(self, names: Sequence[str]) -> None:
        """On standard error: these runs are finished."""
        if names:
            print(f"finished before, not trained again (--fresh would): {', '.join(names)}", file=sys.stderr)

    def finish(self, name: str, record: dict[str, Any], weights: dict[str, Any]) -> None:
        """Leave record and weights, and drop the checkpoint."""
        files = self.files(name)
        save_weights(files.weights, weights)
        write_json(files.record, record)
        files.checkpoint.unlink(missing_ok=True)


def keep_report(out: Path, record: str, runs: set[str], others: Sequence[str]) -> None:
    """Set the last report of this folder aside if it has runs that the next one, of these runs, would not have.

    Args:
        record: the file with the runs by name, as track.json; `others` are drawn from it.
    """
    try:
        known = set(read_json(out / record)["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if known - runs:
        set_aside(*(out / name for name in (record, *others)))


def save_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write tensors and plain values whole, so that ``torch.load(..., weights_only=True)`` reads them."""
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    write_bytes(path, buffer.getvalue())


def stacked_parameters(ensemble: Ensemble) -> dict[str, Any]:
    """The trained parameters of all seeds, [R, ...] each, on the CPU."""
    return {name: p.detach().cpu() for name, p in ensemble.parameters.items()}


def plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists.

    Example:
        >>> plain({"lengths": (4, 6)})
        {'lengths': [4, 6]}
    """
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """In words, where two keys differ; what only one of them knows counts where it is not how things are scored.

    Example:
        >>> differences({"recipe": {"steps": 60000}, "seeds": [0]}, {"recipe": {"steps": 10}, "seeds": [0]})
        ['recipe.steps is 60000 there and 10 here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [key for key in {**there, **here} if name or key not in ("lengths", "words")]
        return [
            text
            for key in keys
            for text in differences(there.get(key), here.get(key), f"{name}.{key}" if name else str(key))
        ]
    if there == here:
        return []
    short = [text if len(text := str(value)) < 60 else f"{text[:57]}..." for value in (there, here)]
    return [f"{name} differs" if short[0] == short[1] else f"{name} is {short[0]} there and {short[1]} here"]


def collect_records(
    folders: Sequence[str | Path], wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, list[dict[str, Any]]]:
    """The records runs/NAME.json of these folders that are wanted, by name, in the order of the folders."""
    found: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        for path in sorted((Path(folder) / "runs").glob("*.json")):
            record = read_json(path)
            if isinstance(record, dict) and wanted(record):
                found.setdefault(path.stem, []).append(record)
    return found
