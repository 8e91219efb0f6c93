"""Training of the small experiments: Muon and AdamW, one-cycle schedule, curriculum, several seeds as one program."""

from ckda.train.ensemble import Ensemble, Recipe
from ckda.train.optimizers import AdamW, Muon, newton_schulz, one_cycle

__all__ = ["AdamW", "Ensemble", "Muon", "Recipe", "newton_schulz", "one_cycle"]
