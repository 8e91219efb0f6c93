"""Language models for transformers. Importing this registers the Auto classes (and takes transformers' time)."""

from ckda.models.cache import ModelCache
from ckda.models.config import ComplexKDAConfig
from ckda.models.lm import ComplexKDAForCausalLM, ComplexKDAModel

__all__ = ["ComplexKDAConfig", "ComplexKDAForCausalLM", "ComplexKDAModel", "ModelCache"]
