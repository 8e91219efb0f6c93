"""Distributed checkpoints of safetensors and JSON: every rank writes its own part, any number of ranks reads it back.

A checkpoint is a folder ``step-00001000`` of safetensors files (torch.distributed.checkpoint's Hugging Face storage: no
pickle anywhere) and ``checkpoint.json``, written last, with the step, the recipe, the model's configuration and the
SHA-256 sum of every file. The folder gets its name when all of it is there.
"""

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.lm.data import file_sum
from ckda.lm.parallel import World
from ckda.record import read_json, write_json

__all__ = ["FORMAT", "load", "newest", "read_manifest", "save", "steps_of"]

FORMAT = "ckda-checkpoint-1"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], about: dict[str, Any], world: World, keep: int = 2
) -> Path:
    """Write `tensors` (plain or sharded) as checkpoint `step`; of older ones the last `keep - 1` stay (0: all)."""
    from torch.distributed import checkpoint as dcp

    target, temporary = folder / _name(step), folder / f".{_name(step)}.tmp"
    if world.main:
        for left in folder.glob(".step-*.tmp"):  # of a save that was cut short
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=world.size == 1)
    names = sorted(p.name for p in temporary.iterdir())
    own = {
        n: {"bytes": (temporary / n).stat().st_size, "sha256": file_sum(temporary / n)}
        for n in names[world.rank :: world.size]
    }
    files = {name: entry for part in world.gather(own) for name, entry in part.items()}
    if world.main:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        manifest = {"format": FORMAT, "step": step, "ranks": world.size, "files": files, "tensors": shapes}
        write_json(temporary / "checkpoint.json", manifest | about)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        if keep:
            for old in steps_of(folder)[:-keep]:
                shutil.rmtree(folder / _name(old), ignore_errors=True)
    world.wait()
    return target


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order."""
    found = [p.name.removeprefix("step-") for p in folder.glob("step-*") if (p / "checkpoint.json").is_file()]
    return sorted(int(name) for name in found if name.isdigit())


def read_manifest(path: Path, verify: bool = True) -> dict[str, Any]:
    """A checkpoint's JSON; damage or a foreign folder is a ValueError that says what is wrong."""
    if not (path / "checkpoint.json").is_file():
        raise ValueError(f"{path} is no checkpoint: it holds no checkpoint.json")
    manifest = read_json(path / "checkpoint.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this library ({FORMAT})")
    for name, entry in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"] or (verify and file_sum(file) != entry["sha256"]):
            raise ValueError(f"{file} is damaged: it does not match the size or checksum in checkpoint.json")
    return manifest


def newest(folder: Path, world: World) -> Path | None:
    """The last checkpoint that is whole; a damaged one is named and passed over."""
    chosen = None
    if world.main:
        for step in reversed(steps_of(folder)):
            try:
                read_manifest(folder / _name(step))
                chosen = str(folder / _name(step))
                break
            except ValueError as error:
                print(f"passing over a checkpoint: {error}", file=sys.stderr)
    name = world.first(chosen)
    return None if name is None else Path(name)


def load(path: Path, tensors: dict[str, Tensor], world: World, verify: bool = True) -> dict[str, Any]:
    """Copy the checkpoint's values into `tensors`, however either is sharded; returns the manifest.

    What does not fit (names, shapes) is a ValueError, and nothing is changed.
    """
    from torch.distributed import checkpoint as dcp

    manifest = read_manifest(path, verify and world.main)
    known = manifest["tensors"]
    for name, tensor in tensors.items():
        if known.get(name) != list(tensor.shape):
            raise ValueError(
                f"{path} is of another model: {name} is {known.get(name)} there and {list(tensor.shape)} here"
            )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        reader = dcp.HuggingFaceStorageReader(str(path))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
    return manifest
