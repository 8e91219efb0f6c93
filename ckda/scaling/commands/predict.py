"""``ckda scaling predict``: losses and compute-optimal splits with intervals, from a fit."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckda.command import filled, make_folder
from ckda.record import environment, write_record

from .. import figures, report
from ..fit import LEVEL, Fit, Settings, Summary, fit
from ..published import HELD_OUT, paper_table
from ..store import load_fit
from ..table import parse_cell, parse_number
from . import Effort, effort_of, tell

__all__ = ["Config", "Predictions", "run", "run_command"]


@dataclass(frozen=True)
class Config:
    """What is predicted from which fit."""

    fit: str | None  #: a fit's JSON; None: a quick fit of the paper's table
    cells: tuple[str, ...] = ()  #: such as 7B/1T
    compute: tuple[str, ...] = ()  #: budgets in FLOPs, such as 1e22
    chained: bool = False  #: runs cooled down from a shared trunk
    level: float = LEVEL
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """The loss of every arm at one size and number of tokens."""

    cell: str
    N: float
    D: float
    loss: dict[str, Summary]


@dataclass(frozen=True)
class Budget:
    """Of every arm the best N and D for a budget, and the loss there."""

    C: float
    optimal: dict[str, dict[str, Summary]]


@dataclass(frozen=True)
class Predictions:
    """The file predict.json."""

    fit: str
    level: float
    chained: bool
    cells: list[Cell]
    compute: list[Budget]
    environment: dict[str, Any]


def run(config: Config) -> Predictions:
    """Every cell and budget."""
    if not config.cells and not config.compute:
        raise ValueError("nothing to predict: give cells such as 7B/1T, or --compute 1e22")
    places = [(text, *parse_cell(text)) for text in config.cells]
    budgets = [parse_number(text) for text in config.compute]
    fitted = _quick_fit(config.seed) if config.fit is None else load_fit(config.fit)
    cells = [Cell(text, N, D, fitted.predict(N, D, config.chained, config.level)) for text, N, D in places]
    best = [Budget(C, {name: arm.frontier(C, config.level) for name, arm in fitted.arms.items()}) for C in budgets]
    source = "smoke fit of tab:scaling-data" if config.fit is None else config.fit
    return Predictions(source, config.level, config.chained, cells, best, environment("cpu"))


def _quick_fit(seed: int) -> Fit:
    return fit(paper_table(), Settings(hold_out=(HELD_OUT,), starts=Effort().small().starts, seed=seed))


def run_command(args: argparse.Namespace) -> int:
    """Predict, write, draw, tell."""
    effort_of(args)
    out = Path(args.out)
    path = args.fit or str(out / "fit.json")
    quick = args.smoke and not Path(path).exists()
    lists = {"cells": tuple(args.cells), "compute": tuple(args.compute)}
    result = run(filled(Config, args, fit=None if quick else path, **lists))
    record, out = {"kind": "ckda scaling prediction"} | asdict(result), make_folder(args.out)
    written = [
        write_record(out / "predict.json", record),
        figures.save(out / "predict.png", figures.predictions(result)),
    ]
    return tell(args, record, report.prediction_text(result), written)
