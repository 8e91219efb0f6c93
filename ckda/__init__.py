"""Complex KDA: the delta rule with signed channel-wise gates.

The public names are imported on first use, so that ``import ckda`` costs nothing beyond Python itself.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "complex_kda": "ckda.ops",
    "complex_kda_step": "ckda.ops",
    "ComplexKDA": "ckda.layers",
    "convert": "ckda.compat.signs",
    "compat": "ckda",
    "transition": "ckda",
    "ops": "ckda",
    "layers": "ckda",
}

__all__ = [
    "ComplexKDA",
    "__version__",
    "compat",
    "complex_kda",
    "complex_kda_step",
    "convert",
    "layers",
    "ops",
    "transition",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ckda' has no attribute {name!r}")
    home = _PUBLIC[name]
    return import_module(f"ckda.{name}") if home == "ckda" else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
