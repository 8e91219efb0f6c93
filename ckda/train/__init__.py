"""Training of the small experiments: Muon and AdamW, schedules, curriculum, penalties, several seeds as one program."""

from ckda.train.ensemble import Ensemble, Recipe
from ckda.train.interrupt import deferred_interrupt
from ckda.train.optimizers import AdamW, Muon, newton_schulz, one_cycle, warmup_cosine

__all__ = ["AdamW", "Ensemble", "Muon", "Recipe", "deferred_interrupt", "newton_schulz", "one_cycle", "warmup_cosine"]
