"""Other libraries' users: FLA's functions (fla), patches of installed clients (clients), checkpoints (convert), signs (signs)."""

from importlib import import_module
from typing import Any

_PUBLIC = {"accelerate": "clients", "restore": "clients"}

__all__ = ["accelerate", "restore"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ckda.compat' has no attribute {name!r}")
    return getattr(import_module(f"ckda.compat.{_PUBLIC[name]}"), name)
