"""Finished runs of ``ckda audio`` brought together: records of several folders become one result, without any training."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckda.experiments.audio.model import ARMS
from ckda.experiments.audio.run import COMPARED, AudioResult, AudioRun
from ckda.experiments.common.store import collect_records
from ckda.record import read_json, write_text

__all__ = ["collect", "merge", "write_compact", "write_summary"]

_NO_RUN = "no finished run of it was found"


def collect(folders: Sequence[str | Path], trained_at: str | None = None) -> AudioResult:
    """One result from the folders' runs/NAME.json, in the order of the paper's arms and of the recipes.

    Runs of one name are merged seed by seed. An arm without a run by the paper's protocol stands in `absent`: null, with the
    reason. Waveform windows are kept where they are drawn or played: of those runs, and of the best other run at the longest
    length. `trained_at` is the commit of records that know none, or a copy's.
    """
    heads = [read_json(path) for folder in folders if (path := Path(folder) / "audio.json").exists()]
    found = collect_records(folders, lambda record: "recipe_name" in record and "snr" in record)
    if not found or not heads:
        missing = "runs/NAME.json" if heads else "audio.json"
        raise ValueError(f"no {missing} in {', '.join(map(str, folders))}; `ckda audio` leaves them in its --out")
    merged = {name: merge(name, parts) for name, parts in found.items()}
    if len({run["key"]["task"]["frames"] for run in merged.values()}) > 1:
        raise ValueError("the runs continue different loops; they cannot stand in one comparison")
    for record in merged.values():
        for part in record.get("parts", [record]):
            commit = part["environment"]["commit"]
            if trained_at and (commit is None or commit.endswith("+")):
                part["environment"]["commit"] = trained_at
    runs = {name: AudioRun.from_json(record) for name, record in merged.items()}

    def place(item: tuple[str, AudioRun]) -> tuple:
        run = item[1]
        return not run.is_papers, run.recipe_now, ARMS.index(run.arm)

    runs = _pruned(dict(sorted(runs.items(), key=place)))
    some = next(iter(runs.values()))
    here = {run.arm for run in runs.values() if run.is_papers}
    return AudioResult(
        **{name: heads[0][name] for name in ("loop", "bpm", "cue", "frames")},
        trained_to=some.recipe["curriculum"][-1],
        absent={arm: {"snr": None, "reason": _NO_RUN} for arm in COMPARED if arm not in here},
        runs=runs,
    )


def merge(name: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Records of one run with different seeds as one; `parts` says which seeds came from which machine and when.

    Example:
        >>> one = {"key": {"seeds": [0], "steps": 9}, "seeds": [0], "mse": {"40": [0.1]}, "snr": {"40": [3.0]}, "shown": 0}
        >>> one |= {"train_seconds": 1.0, "environment": {}, "losses": {"update": [9], "loss": [[0.2]]}, "windows": {}}
        >>> two = one | {"key": {"seeds": [1], "steps": 9}, "seeds": [1], "snr": {"40": [5.0]}}
        >>> both = merge("ckda", [one, two])
        >>> both["seeds"], both["snr"], both["shown"]
        ([0, 1], {'40': [3.0, 5.0]}, 1)
    """
    if len(parts) == 1:
        return parts[0]
    protocols = [{k: v for k, v in part["key"].items() if k != "seeds"} for part in parts]
    if any(protocol != protocols[0] for protocol in protocols):
        raise ValueError(f"the records of {name} were trained by different protocols; give the folder of one of them")
    ranks = [_rank(part) for part in parts]
    best = ranks.index(max(ranks))
    seeds = [seed for part in parts for seed in part["seeds"]]
    shown = sum(len(part["seeds"]) for part in parts[:best]) + parts[best]["shown"]
    scores = {k: {n: [v for part in parts for v in part[k][n]] for n in parts[0][k]} for k in ("mse", "snr")}
    updates = parts[0]["losses"]["update"]
    rows = [part["losses"]["loss"] for part in parts if part["losses"]["update"] == updates]
    whole = len(rows) == len(parts)
    loss = [[v for row in step for v in row] for step in zip(*rows, strict=True)] if whole else None
    return (
        parts[best]
        | {"key": parts[0]["key"] | {"seeds": seeds}, "seeds": seeds, "shown": shown, "train_seconds": None}
        | {"losses": {"update": updates if whole else None, "loss": loss}}
        | {"parts": [{k: part[k] for k in ("seeds", "train_seconds", "environment")} for part in parts]}
        | scores
    )


def _rank(part: dict[str, Any]) -> float:
    """The SNR by which a record chose the seed it shows: at 264, or the longest length below."""
    value = part["snr"][str(max(n for n in map(int, part["snr"]) if n <= 264))][part["shown"]]
    return -math.inf if value is None else float(value)


def _pruned(runs: dict[str, AudioRun]) -> dict[str, AudioRun]:
    """Without the windows that nothing draws or plays."""

    def far(name: str) -> float:
        snr = runs[name].snr
        return max((v for v in snr[max(snr)] if v is not None), default=-math.inf)

    best = max((name for name, run in runs.items() if not run.is_papers), key=far, default=None)
    kept: dict[str, AudioRun] = {}
    for name, run in runs.items():
        names = ("near", "far") if run.is_papers else ("near", "far", "end") if name == best else ()
        kept[name] = replace(run, windows={k: w for k, w in run.windows.items() if k in names})
    return kept


_LONG = ("windows", "losses", "key")  # what audio.json leaves to runs/NAME.json when runs are collected


def write_summary(result: AudioResult, out: Path) -> None:
    """audio.json of collected runs."""
    summary = result.to_json()
    summary["runs"] = {name: {k: v for k, v in one.items() if k not in _LONG} for name, one in summary["runs"].items()}
    write_compact(out / "audio.json", summary)


def write_compact(path: str | Path, value: Any) -> Path:
    """JSON with every list of plain values on one line: what holds thousands of samples stays readable and small."""
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda m: "[" + ", ".join(v.strip() for v in m[0][1:-1].split(",")) + "]", text)
    if json.loads(text) != value:  # a string with a bracket in it would be the reason
        text = json.dumps(value, indent=1, allow_nan=False)
    return write_text(path, text + "\n")
