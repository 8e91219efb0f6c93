"""Models built from the layers: the small ones of the experiments, and the language models for transformers.

The names of the language models are imported on first use: the small models need neither transformers nor its time.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "ComplexKDAConfig": "ckda.models.config",
    "ComplexKDAModel": "ckda.models.lm",
    "ComplexKDAForCausalLM": "ckda.models.lm",
    "ModelCache": "ckda.models.cache",
}

__all__ = ["ComplexKDAConfig", "ComplexKDAForCausalLM", "ComplexKDAModel", "ModelCache"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ckda.models' has no attribute {name!r}")
    import_module("ckda.models.lm")  # which registers the Auto classes
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
