"""Fits as files: a JSON with everything a figure needs, the replicates as CSV beside it, and resumable runs."""

import csv
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ckda.record import read_json, write_json, write_text

from .fit import LEVEL, ArmFit, Fit, Settings, bootstrap, fit
from .law import PARAMETERS
from .table import Table

__all__ = ["Resume", "describe", "load_fit", "resumable_fit", "save_replicates"]

#: the kind of file :func:`load_fit` accepts
KIND = "ckda scaling fit"


def describe(fitted: Fit, level: float = LEVEL) -> dict[str, Any]:
    """A fit as JSON: settings, and per arm parameters, intervals, RMSE, held-out errors, cells and optimal frontier."""
    budgets = fitted.budgets()
    return {
        "kind": KIND,
        "settings": {**asdict(fitted.settings), "hold_out": list(fitted.settings.hold_out)},
        "level": level,
        "cost": fitted.cost,
        "arms": {name: _describe_arm(arm, budgets, level) for name, arm in fitted.arms.items()},
    }


def _describe_arm(arm: ArmFit, budgets: list[float], level: float) -> dict[str, Any]:
    errors = arm.held_out_errors(level)
    measured = {} if arm.held_out is None else dict(zip(arm.held_out.cell, arm.held_out.loss.tolist(), strict=True))
    return {
        "parameters": {name: asdict(summary) for name, summary in arm.parameters(level).items()},
        "theta": arm.theta.tolist(),
        "rmse": arm.rmse,
        "starts_at_optimum": arm.hits,
        "replicates": 0 if arm.replicates is None else len(arm.replicates),
        "held_out": {cell: {"measured": measured[cell], "error": asdict(e)} for cell, e in errors.items()},
        "cells": [cell._asdict() for cell in arm.cells],
        "frontier": [{"C": C} | {k: asdict(s) for k, s in best.items()} for C, best in arm.curve(budgets, level)],
    }


def save_replicates(path: str | Path, fitted: Fit) -> Path:
    """The replicates of all arms as CSV: arm, then the seven parameters (A and B as logarithms)."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["arm", *PARAMETERS])
    for name, arm in fitted.arms.items():
        rows = [] if arm.replicates is None else arm.replicates.tolist()
        writer.writerows([name, *(f"{value:.10g}" for value in row)] for row in rows)
    return write_text(path, out.getvalue())


def load_fit(path: str | Path) -> Fit:
    """Read a fit back, with the replicates that lie beside it; anything else is a ValueError that names the file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no fit at {path}: run `ckda scaling fit` first, or name one with --fit")
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("kind") != KIND:
        raise ValueError(f"{path} is not a fit of `ckda scaling fit`")
    drawn = _load_replicates(path.with_name(f"{path.stem}_replicates.csv"))
    settings = Settings(**{**stored["settings"], "hold_out": tuple(stored["settings"]["hold_out"])})
    arms = {name: _load_arm(name, arm, drawn.get(name)) for name, arm in stored["arms"].items()}
    short = {
        n: a for n, a in stored["arms"].items() if a["replicates"] != (0 if drawn.get(n) is None else len(drawn[n]))
    }
    if short:
        raise ValueError(f"the replicates beside {path} do not belong to it ({', '.join(short)}); run the fit again")
    return Fit(settings, arms, stored["cost"])


def _load_arm(name: str, stored: dict[str, Any], replicates: Any) -> ArmFit:
    def table(held_out: bool) -> Table | None:
        rows = [c for c in stored["cells"] if c["held_out"] is held_out]
        columns = {key: [row[key] for row in rows] for key in ("N", "D", "loss", "chained", "cell")}
        return Table.of(**columns, group=[name] * len(rows)) if rows else None

    train = table(False)
    if train is None:
        raise ValueError(f"arm {name!r} of the stored fit has no cells")
    return ArmFit(np.array(stored["theta"]), train, table(True), stored["starts_at_optimum"], replicates)


def _load_replicates(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    drawn: dict[str, list[list[float]]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        drawn.setdefault(row["arm"], []).append([float(row[name]) for name in PARAMETERS])
    return {name: np.array(rows) for name, rows in drawn.items()}


class Resume:
    """Finished parts of a run in one file that is rewritten whole; a file of other data or settings is ignored."""

    def __init__(self, path: str | Path, key: Any):
        self.path = Path(path)
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        self.parts: dict[str, Any] = {}
        try:
            stored = read_json(self.path)
            if isinstance(stored, dict) and stored.get("key") == self.key:
                self.parts = stored["parts"]
        except (OSError, ValueError, KeyError):
            self.parts = {}

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """The part, from the file or made now and written."""
        if name not in self.parts:
            self.parts[name] = make()
            write_json(self.path, {"key": self.key, "parts": self.parts})
        return self.parts[name]

    def finish(self) -> None:
        """The run is complete: nothing is left to resume."""
        self.path.unlink(missing_ok=True)


def resumable_fit(
    table: Table,
    settings: Settings,
    replicates: int,
    restarts: int,
    resume: Resume,
    label: str = "fit",
    tick: Callable[[], None] | None = None,
) -> Fit:
    """Fit and bootstrap arm by arm (all arms at once where they share a parameter), keeping finished arms."""
    groups = [table.arms] if settings.roles.shared else [(arm,) for arm in table.arms]
    arms: dict[str, ArmFit] = {}
    cost = 0.0
    for group in groups:
        some = table.arm(*group)

        def make(some: Table = some) -> Any:
            fitted = fit(some, settings, tick=tick)
            return _pack(bootstrap(fitted, replicates, restarts, tick=tick) if replicates else fitted)

        part = _unpack(resume.part(f"{label}/{' + '.join(group)}", make))
        arms |= part.arms
        cost += part.cost
    return Fit(settings, arms, cost)


def _pack(fitted: Fit) -> dict[str, Any]:
    arms = {
        name: {
            "theta": arm.theta.tolist(),
            "starts_at_optimum": arm.hits,
            "cells": [cell._asdict() for cell in arm.cells],
            "replicates": None if arm.replicates is None else arm.replicates.tolist(),
        }
        for name, arm in fitted.arms.items()
    }
    return {
        "settings": {**asdict(fitted.settings), "hold_out": list(fitted.settings.hold_out)},
        "cost": fitted.cost,
        "arms": arms,
    }


def _unpack(stored: dict[str, Any]) -> Fit:
    settings = Settings(**{**stored["settings"], "hold_out": tuple(stored["settings"]["hold_out"])})
    arms = {
        name: _load_arm(name, arm, None if arm["replicates"] is None else np.array(arm["replicates"]))
        for name, arm in stored["arms"].items()
    }
    return Fit(settings, arms, stored["cost"])
