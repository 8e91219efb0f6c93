"""The memory that one update takes, estimated before it is tried, and what the device has free."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ckda.models import ComplexKDAConfig, ladder
from ckda.models.mixers import ATTENTION

__all__ = ["Need", "bytes_words", "check", "free_memory", "need"]

#: numbers that the backward pass keeps, by token and layer, as multiples of the width d: (recurrent mixer, attention). Measured:
#: on a CPU the peak of one update at 47M and tiny, on CUDA results/lm; the SwiGLU's three rows come on top.
_KEPT = {"cpu": (50, 25), "cuda": (28, 10)}
_FACTOR = 0.3  # of a recurrent mixer's, for each further factor a token
_LOGITS = 2  # float32 copies of a chunk's logits
_SURE = 0.7  # of what is free, for what is proposed: the estimate may be too low


@dataclass(frozen=True)
class Need:
    """Bytes of one update on one device."""

    states: int  #: weights, gradients and both moments
    activations: int  #: what the backward pass keeps of a micro-batch
    logits: int  #: of a chunk of the loss

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.states + self.activations + self.logits


def need(
    config: ComplexKDAConfig,
    tokens: int,
    device: str = "cpu",
    dtype: str = "fp32",
    checkpointing: bool = False,
    parameters: int | None = None,
) -> Need:
    """What an update with so many tokens at once takes, within a third or so. `parameters` are counted where they are not given.

    Example:
        >>> found = need(ladder.build("47M", "ckda"), tokens=2048)  # 3.7 GiB were measured
        >>> bytes_words(found.total), bytes_words(found.states)
        ('3.6 GiB', '733 MiB')
    """
    recurrent, attention = _KEPT["cuda" if device == "cuda" else "cpu"]
    kept = []
    for mixer in config.mixers():
        factors = int(found[1]) if (found := re.search(r"product(\d)", mixer)) else 1
        width = attention if mixer in ATTENTION else recurrent * (1 + _FACTOR * (factors - 1))
        kept.append(width * config.hidden_size + 3 * config.intermediate_size)
    size = 2 if device == "cuda" and dtype == "bf16" else 4
    numbers = max(kept) + config.num_hidden_layers * config.hidden_size if checkpointing else sum(kept)
    return Need(
        states=16 * (ladder.num_parameters(config) if parameters is None else parameters),
        activations=round(size * tokens * numbers),
        logits=_LOGITS * 4 * min(tokens, config.loss_chunk) * config.vocab_size,
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that a process may still take there; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device if device.index is not None else None)[0])
    if device.type != "cpu":
        return None
    known = [_available(), _group_limit()]
    return min((value for value in known if value is not None), default=None)


def _available() -> int | None:
    """What the machine could hand out without swapping; where the system does not say, all it has."""
    table = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.is_file() else None
    if found is not None:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _group_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves (control groups, version 2); the cache of files can be given back and counts as free."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        found = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # there is none, or it is "max"
        return None
    return limit - used + (int(found[1]) if found else 0)


def check(
    name: str,
    config: ComplexKDAConfig,
    *,
    sequences: int,
    micro: int,
    length: int,
    device: torch.device,
    ranks: int = 1,
    dtype: str = "fp32",
    checkpointing: bool = False,
    free: int | None = None,
) -> None:
    """Refuse an update that the device has no memory for, with what would fit.

    Args:
        sequences: of a device's share of an update. micro: those taken at once. length: tokens of a sequence on this device.
        ranks: that share the memory (on a CPU). free: bytes; by default what :func:`free_memory` says.
    """
    free = free_memory(device) if free is None else free
    if free is None:
        return
    # elsewhere memory that is short is an error in words: only what cannot be is refused
    room = free / ranks if device.type == "cpu" else 1.5 * free

    parameters = ladder.num_parameters(config)

    def total(at_once: int) -> int:
        return need(config, at_once * length, device.type, dtype, checkpointing, parameters).total

    if (wanted := total(micro)) <= room:
        return
    fits = next((n for n in range(micro - 1, 0, -1) if sequences % n == 0 and total(n) <= _SURE * room), None)
    other = "a smaller --batch or --length, or --model tiny:ckda"
    if fits is None:
        hint = (
            f"even one takes {bytes_words(total(1))}: give a smaller --length or a smaller model, as --model tiny:ckda"
        )
    else:
        hint = f"give --micro {fits} (the same update in {sequences // fits} parts, about {bytes_words(total(fits))}), {other}"
    raise ValueError(
        f"an update of {name} with {micro} x {length} tokens at once takes about {bytes_words(wanted)} of memory, and "
        f"{bytes_words(free)} are free here: {hint}"
    )


def bytes_words(number: float) -> str:
    """Bytes in words.

    Example:
        >>> bytes_words(1000), bytes_words(30_000), bytes_words(1.7e6), bytes_words(5e9), bytes_words(5e11)
        ('1000 bytes', '29 KiB', '1.6 MiB', '4.7 GiB', '466 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}" if number < 10 * size else f"{number / size:.0f} {unit}"
    return f"{number:.0f} bytes"
