"""The files runs/NAME.pt that `ckda track` and `ckda audio` leave: the parameters of all seeds, and what they belong to."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

__all__ = ["places_of", "read_weights"]


def read_weights(path: str | Path, command: str, needs: Iterable[str], device: str = "cpu") -> dict[str, Any]:
    """What the file holds, which must have seeds, parameters [R, ...] by name, and what `needs` names."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        if {"seeds", "parameters", *needs} <= saved.keys():
            return saved
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give a file runs/NAME.pt that `{command}` wrote") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, OSError) as error:
        raise ValueError(f"{path} holds no weights of `{command}`; give a file runs/NAME.pt") from error
    raise ValueError(f"{path} holds no weights of `{command}`; give a file runs/NAME.pt")


def places_of(seeds: Iterable[int], saved: dict[str, Any], path: str | Path) -> list[int]:
    """Where these seeds stand along R.

    Example:
        >>> places_of([9], {"seeds": [3, 9]}, "a.pt")
        [1]
        >>> places_of([0], {"seeds": [3, 9]}, "a.pt")
        Traceback (most recent call last):
        ValueError: a.pt has no seed 0; it has 3, 9
    """
    for seed in seeds:
        if seed not in saved["seeds"]:
            raise ValueError(f"{path} has no seed {seed}; it has {', '.join(map(str, saved['seeds']))}")
    return [saved["seeds"].index(seed) for seed in seeds]
