"""Training of the small experiments: Muon and AdamW, schedules, curriculum, penalties, several seeds as one program."""

from ckda.train.ensemble import Ensemble
from ckda.train.loop import Program, TimeUp, deferred_interrupt, progress, train
from ckda.train.optimizers import AdamW, Muon, cycled_momentum, newton_schulz, one_cycle, warmup_cosine
from ckda.train.recipe import Phase, Recipe

__all__ = [
    "AdamW",
    "Ensemble",
    "Muon",
    "Phase",
    "Program",
    "Recipe",
    "TimeUp",
    "cycled_momentum",
    "deferred_interrupt",
    "newton_schulz",
    "one_cycle",
    "progress",
    "train",
    "warmup_cosine",
]
