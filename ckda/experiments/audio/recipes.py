"""How continuation models are trained, by name: the paper's protocol and what is changed in it (docs/audio.md)."""

import math
from typing import Any

from ckda.command import plural
from ckda.train import Recipe
from ckda.train.recipe import Book, Change, number

__all__ = ["CURRICULUM", "RECIPES", "recipe"]

CURRICULUM = (12, 16, 24, 40, 72, 136)


def _steps(text: str) -> Change:
    """N: updates (2500 in the paper)"""
    return Change(plural(number(text), "update"), {"steps": number(text)})


def _batch(text: str) -> Change:
    """N: sequences an update (64 in the paper)"""
    return Change(f"{number(text)} sequences an update", {"batch": number(text)})


def _late(about: str, **weights: float) -> Change:
    """Penalties that come once the loop is learned."""
    return Change(about, {"ramp": (0.4, 0.6), "penalties": weights})


_CLOSURE = "equal phase, equal readout"
_BASE: dict[str, Any] = {"steps": 2500, "batch": 64, "schedule": "cosine", "lr_muon": 0.02, "lr_adamw": 3e-3}

RECIPES = Book(
    base=Change("the paper's protocol: 2500 updates of 64 sequences, lengths 12 to 136", _BASE),
    changes={
        "init": {
            "clock": Change(
                "four heads start as clocks that make 1, 2, 4 and 8 turns a loop: the start knows the period",
                model={"start": "clock"},
            ),
            "fan": Change(
                "every head starts as a clock, at rates spread from no turn to half a turn a frame: the start knows no period",
                model={"start": "fan"},
            ),
        },
        "schedule": {
            "tail": Change(
                "the learning rates go on to nearly zero, and every batch holds every phase equally often",
                {"tail": 0.3},
                task={"balanced": True},
            )
        },
        "penalty": {
            "closure": Change(_CLOSURE, {"penalties": {"closure": 0.1}, "ramp": (0.0, 0.0)}),
            "closure-late": _late(f"{_CLOSURE}, once the loop is learned", closure=0.1),
            "closure-turn": _late(f"{_CLOSURE}, and a loop of silence is the identity", closure=0.1, turn=0.1),
            "closure-turns": _late(f"{_CLOSURE}, and 1, 4, 16 and 64 loops of silence are", closure=0.1, turns=0.1),
            "closure-turns-strong": _late("the same ten times as strong", closure=1.0, turns=1.0),
        },
    },
    counted={"steps": _steps, "batch": _batch},
    named={
        "steady": (
            "schedule=tail+penalty=closure-turns-strong",
            "equal phase, equal readout, and loops of silence that change nothing: exact clocks where a seed finds one",
        ),
        "even": (
            "schedule=tail+penalty=closure-turns-strong+init=fan+batch=32",
            "the recipe that keeps time: steady from heads that start as clocks of many rates, every phase once an update",
        ),
    },
    old={
        "plain": "paper",
        "closure": "penalty=closure",
        "tail": "schedule=tail",
        "closure-tail": "schedule=tail+penalty=closure-late",
        "turn-tail": "schedule=tail+penalty=closure-turn",
        "turns-tail": "schedule=tail+penalty=closure-turns",
        "turns-tail-strong": "steady",
        "clock": "init=clock",
        "clock-turns": "steady+init=clock",
    },
)


def recipe(name: str, lengths: tuple[int, ...] = CURRICULUM, **more: Any) -> Recipe:
    """The recipe of that name (app:waveform_continuation_details): the lengths grow over the first 40% of the updates.

    Example:
        >>> recipe("paper").switches, recipe("paper").length(833), recipe("paper").length(834)
        ((168, 335, 501, 668, 835), 72, 136)
    """
    change = RECIPES.read(name)
    steps = more.get("steps", change.training["steps"])
    switches = tuple(math.ceil(0.4 * steps * i / len(lengths)) + 1 for i in range(1, len(lengths)))
    return change.recipe(curriculum=lengths, switches=switches, **more)
