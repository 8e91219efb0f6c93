"""The studies of our own ladder as plain lists of units, and what is asked of their records.

========  ==================================================================================================
sweep     learning rate and batch by rung, with KDA (the paper assumes that they hold for every mixer)
factors   why Complex KDA is behind: one change at a time, paired with the ladder's KDA and Complex KDA, three seeds
ladder    rungs x budgets x arms; eight paired seeds at 12M, three at 47M
tracking  text with 5% of programs whose state must be tracked
toy       two rungs, two budgets, two arms and two seeds of seconds on a CPU
========  ==================================================================================================
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckda.lm.units import Unit, estimate
from ckda.models.ladder import CONFIGS, OWN

__all__ = ["BUDGETS", "FACTORS", "STUDIES", "best_settings", "plan", "study"]

BUDGETS = (30_000_000, 60_000_000, 120_000_000)
SHORT = 14_000_000  #: tokens of the sweep
CELL = (30_000_000,)  #: budgets of the factors, so that the ladder's units of these budgets are their base
LADDER_ARMS = ("kda", "ckda", "transformer-qknorm")
HYBRIDS = ("kda-hybrid", "ckda-hybrid")
PAIRED = ("kda", "ckda")
PAIRED_SEEDS = {"12M": 8, "47M": 3}  #: seeds of KDA and Complex KDA; one elsewhere
MOST = 480.0  #: seconds a unit may take on an H200

BASE = "base"
#: what is changed -> (arms, settings of the unit, settings of the model); the base is the ladder's own KDA and Complex KDA
FACTORS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    BASE: (PAIRED, {}, {}),
    "beta from 0.5": (("ckda-half",), {}, {}),
    "beta to 2": (("kda-beta2",), {}, {}),
    "signed gates": (("kda-signed",), {}, {}),
    **{f"lr {lr:g}": (PAIRED, {"lr": lr}, {}) for lr in (1e-3, 2e-3, 8e-3)},
    "warm-up 70": (PAIRED, {"warmup": 70}, {}),
    "gates spread": (("ckda-spread",), {}, {}),
    "SiLU on q, k and v": (("kda-silu", "ckda-silu"), {}, {}),
    "residual outputs flat": (PAIRED, {}, {"residual_init": "flat"}),
    "mixers start as torch's": (PAIRED, {}, {"mixer_init": "torch"}),
}

Settings = dict[str, tuple[float, int]]  #: rung -> learning rate, sequences an update


def rung_of(size: str) -> str:
    """As tables call a size: 12M for own-12M."""
    return size.removeprefix("own-")


def make(
    size: str, arm: str, seed: int, budgets: tuple[int, ...], settings: Settings | None = None, **more: Any
) -> Unit:
    """A unit of a size of our ladder, with the size's learning rate, batch, length and warm-up unless told otherwise.

    The warm-up is as many tokens at any batch: at twice the size's own batch it is half as many updates.
    """
    rung, config = rung_of(size), CONFIGS[size]
    lr, batch = (settings or {}).get(rung, (config.learning_rate[0], config.batch_sequences[0]))
    own = {"lr": lr, "batch": batch, "length": config.context} | more
    own.setdefault("warmup", config.warmup_steps * config.batch_sequences[0] // own["batch"])
    name = own.pop("name", f"{rung}-{arm}-seed{seed}")
    return Unit(name=name, model=f"{size}:{arm}", rung=rung, seed=seed, budgets=budgets, **own)


def ladder(settings: Settings | None = None) -> list[Unit]:
    """Pairs of seed 0 at every rung first, then the Transformer and the hybrids, then the other seeds."""
    units = [make(size, arm, 0, BUDGETS, settings, looks=2) for size in OWN for arm in PAIRED]
    units += [make(size, "transformer-qknorm", 0, BUDGETS, settings) for size in OWN]
    for rung, seeds in PAIRED_SEEDS.items():
        units += [
            make(f"own-{rung}", arm, seed, BUDGETS, settings, looks=2) for seed in range(1, seeds) for arm in PAIRED
        ]
    return units + [make("own-47M", arm, 0, BUDGETS, settings, looks=2) for arm in HYBRIDS]


def sweep(settings: Settings | None = None) -> list[Unit]:
    """Learning rate by batch at every rung."""
    del settings
    grid = [(lr, batch) for batch in (16, 32) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
    return [
        make(
            size,
            "kda",
            0,
            (SHORT,),
            lr=lr,
            batch=batch,
            name=f"{rung_of(size)}-kda-lr{lr:g}-batch{batch}",
            label=f"lr {lr:g}, batch {batch}",
        )
        for size in OWN
        for lr, batch in grid
    ]


def factors(settings: Settings | None = None, size: str = "own-12M", seeds: int = 3) -> list[Unit]:
    """One change at a time; seed by seed, so that a part of the list is still paired."""
    units = []
    for seed in range(seeds):
        for label, (arms, own, changes) in FACTORS.items():
            for arm in arms:
                if label == BASE:
                    units.append(make(size, arm, seed, CELL, settings, looks=2))
                    continue
                unit = make(size, arm, seed, CELL, settings, changes=changes, label=label, looks=2)
                word = label.replace(" ", "_").replace(",", "")
                units.append(replace(unit, name=f"{rung_of(size)}-{arm}-{word}-seed{seed}", **own))
    return units


def tracking(settings: Settings | None = None, size: str = "own-47M") -> list[Unit]:
    """The arms of the 47M rung on text with programs."""
    arms = ("ckda", "kda", "transformer-qknorm", "ckda-hybrid", "kda-hybrid")
    more = {"programs": 0.05, "looks": 2}
    return [
        make(size, arm, 0, (60_000_000,), settings, **more, name=f"{rung_of(size)}-{arm}-programs-seed0")
        for arm in arms
    ]


def toy(settings: Settings | None = None) -> list[Unit]:
    """Everything in small: for tests and `--smoke`."""
    del settings
    shapes: dict[str, dict[str, Any]] = {
        "A": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_heads": 1},
        "B": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    }
    small: dict[str, Any] = {"lr": 1e-2, "batch": 2, "length": 32, "warmup": 2, "looks": 1}
    return [
        Unit(f"{rung}-{arm}-seed{seed}", f"tiny:{arm}", rung, seed, (320, 640), changes=changes, **small)
        for rung, changes in shapes.items()
        for arm in PAIRED
        for seed in range(2)
    ]


STUDIES: dict[str, Callable[..., list[Unit]]] = {
    "sweep": sweep,
    "factors": factors,
    "ladder": ladder,
    "tracking": tracking,
    "toy": toy,
}


def study(
    name: str,
    settings: Settings | None = None,
    size: str | None = None,
    seeds: int | None = None,
    budgets: tuple[int, ...] | None = None,
) -> list[Unit]:
    """The units of a study; `size` is for factors and tracking, `seeds` keeps seeds below it, `budgets` replace the study's own.

    Example:
        >>> unit = study("ladder", budgets=(60_000_000,))[0]
        >>> unit.name, unit.budgets
        ('6M-kda-seed0-60M', (60000000,))
    """
    if name not in STUDIES:
        raise ValueError(f"the study is {name!r}; it may be {', '.join(STUDIES)}")
    sized = {"size": size} if size is not None and name in ("factors", "tracking") else {}
    if size is not None and not sized:
        raise ValueError(f"--size is for the studies factors and tracking, not for {name}")
    units = STUDIES[name](settings, **sized)
    if name == "factors" and budgets is None:
        budgets = CELL  # so that their base has the names of the ladder's units of these budgets
    if seeds is not None and name == "tracking":
        units = [
            replace(unit, seed=s, name=unit.name.replace("seed0", f"seed{s}")) for s in range(seeds) for unit in units
        ]
    if budgets is not None:
        word = "+".join(f"{tokens / 1e6:g}M" for tokens in sorted(budgets))
        units = [replace(unit, budgets=tuple(sorted(budgets)), name=f"{unit.name}-{word}") for unit in units]
    return units if seeds is None else [unit for unit in units if unit.seed < seeds]


def plan(units: list[Unit], done: set[str]) -> list[dict[str, Any]]:
    """Estimated device seconds of every unit that is not done; one of more than eight minutes is a ValueError."""
    rows = []
    for unit in units:
        if unit.name not in done:
            seconds = estimate(unit)
            if seconds > MOST:
                raise ValueError(f"{unit.name} would take {seconds:.0f} s; a unit may take {MOST:.0f}")
            rows.append(
                {
                    "unit": unit.name,
                    "updates": unit.updates,
                    "tokens": unit.updates * unit.tokens_per_step,
                    "seconds": round(seconds, 1),
                }
            )
    return rows


def best_settings(records: list[dict[str, Any]]) -> Settings:
    """Learning rate and batch with the least held-out loss at every rung, from records of the sweep.

    Example:
        >>> unit = {"rung": "6M", "lr": 1e-3, "batch": 16, "label": "lr 0.001, batch 16"}
        >>> better = unit | {"lr": 2e-3, "label": "lr 0.002, batch 16"}
        >>> best_settings([{"unit": unit, "cells": [{"held_out": 4.0}]}, {"unit": better, "cells": [{"held_out": 3.9}]}])
        {'6M': (0.002, 16)}
    """
    best: dict[str, tuple[float, tuple[float, int]]] = {}
    for one in records:
        unit, loss = one["unit"], one["cells"][-1]["held_out"]
        if unit["label"].startswith("lr ") and "batch" in unit["label"]:
            found = (loss, (unit["lr"], unit["batch"]))
            best[unit["rung"]] = min(best.get(unit["rung"], found), found)
    if not best:
        raise ValueError("the records hold no unit of the sweep")
    return {rung: chosen for rung, (_, chosen) in best.items()}
