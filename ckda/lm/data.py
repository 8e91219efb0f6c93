"""Token shards on disk, and the order in which training reads them.

A folder of tokens holds ``index.json``, ``tokenizer.json`` and, for each split (``train``, ``held_out``), shards: a file
``train-00000.bin`` of tokens (uint16 or uint32, little endian, every document closed by the end token) and a file
``train-00000.ends`` of the document boundaries (uint64: the place after each document's last token). The index has their
lengths and SHA-256 sums.

The order of the samples is a function of the seed and of a sample's number in the whole run, nothing else: neither the
number of devices nor an interruption changes it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckda.record import read_json

__all__ = ["FORMAT", "Sampler", "TokenStore", "file_sum", "shuffled"]

FORMAT = "ckda-tokens-1"
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def file_sum(path: Path, block: int = 1 << 22) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(block):
            digest.update(data)
    return digest.hexdigest()


class TokenStore:
    """One split of a folder of tokens, memory-mapped: nothing is read until it is asked for.

    Example:
        >>> import tempfile
        >>> from ckda.lm.prepare import Preparation, prepare
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("to be or not to be " * 40)
        >>> options = Preparation(tokenizer="train:300", held_out=0.0, workers=1)
        >>> _ = prepare([str(folder / "a.txt")], folder / "tokens", options)
        >>> store = TokenStore(folder / "tokens")
        >>> store.read(0, 4).shape, len(store.ends), int(store.ends[-1]) == len(store)
        ((4,), 1, True)
    """

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split = Path(folder), split
        if not (self.folder / "index.json").is_file():
            raise ValueError(f"{folder} holds no index.json: make it with ckda lm prepare")
        index = read_json(self.folder / "index.json")
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ValueError(f"{self.folder / 'index.json'} is no index of tokens ({FORMAT})")
        if split not in index["splits"]:
            raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(index['splits'])}")
        self.index: dict[str, Any] = index
        self.shards: list[dict[str, Any]] = index["splits"][split]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.starts = np.cumsum([0, *(shard["tokens"] for shard in self.shards)])
        self._maps = [self._map(shard) for shard in self.shards]

    def _map(self, shard: dict[str, Any]) -> np.ndarray:
        path = self.folder / shard["file"]
        wanted = shard["tokens"] * self.dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size != wanted:
            found = "it is missing" if size is None else f"it has {size}"
            raise ValueError(f"{path} should have {wanted} bytes, but {found}: prepare the tokens again")
        return np.memmap(path, self.dtype, "r") if wanted else np.zeros(0, self.dtype)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def ends(self) -> np.ndarray:
        """The place after each document, counted over the whole split."""
        if not hasattr(self, "_ends"):
            parts = [
                np.fromfile(self.folder / shard["ends"], "<u8") + start
                for shard, start in zip(self.shards, self.starts[:-1].astype(np.uint64), strict=True)
            ]
            self._ends = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        return self._ends

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the tokens from `start` on, across shards."""
        if not 0 <= start <= start + count <= len(self):
            raise ValueError(f"tokens {start} to {start + count} of {len(self)} were asked for")
        out = np.empty(count, np.int64)
        done = 0
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < count:
            offset = start + done - int(self.starts[shard])
            part = self._maps[shard][offset : offset + count - done]
            out[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return out

    def verify(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Compare every file with its checksum; a difference is a ValueError that names the file."""
        for shard in self.shards:
            for name, known in ((shard["file"], shard["sha256"]), (shard["ends"], shard["ends_sha256"])):
                say(name)
                path = self.folder / name
                found = file_sum(path) if path.is_file() else "missing"
                if found != known:
                    raise ValueError(
                        f"{path} is damaged: its SHA-256 is {found[:16]}..., the index says {known[:16]}...; "
                        "prepare the tokens again"
                    )


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """A 64-bit mixing function (splitmix64's finaliser) of x under a key."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(key & 0xFFFFFFFFFFFFFFFF)) * np.uint64(0x9E3779B97F4A7C15) & _MASK
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) & _MASK
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) & _MASK
        return x ^ (x >> np.uint64(31))


def shuffled(places: np.ndarray, num: int, seed: int) -> np.ndarray:
    """Where a random permutation of 0 ... num - 1 sends `places`, without storing the permutation.

    A Feistel network of six rounds on the next power of four, walked until it lands inside.

    Example:
        >>> sorted(shuffled(np.arange(10), 10, seed=3).tolist()) == list(range(10))
        True
    """
    half = max(1, (max(1, num - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half), x & low
        for turn in range(6):
            left, right = right, left ^ (_mix(right, seed * 0x1000003 + turn * 0x9E3779B1 + num) & low)
        return (left << np.uint64(half)) | right

    x = once(np.asarray(places, np.uint64))
    while (outside := x >= num).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


@dataclass(frozen=True)
class Sampler:
    """Sample number i of a run: a window of `length` tokens of the store, every window once an epoch.

    documents: "joined" lets a sequence run over document boundaries; "separate" resets the state there and predicts
    no document's first token from another document.

    Example:
        >>> import tempfile
        >>> from ckda.lm.prepare import Preparation, prepare
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("to be or not to be " * 400)
        >>> options = Preparation(tokenizer="train:300", held_out=0.0, workers=1)
        >>> _ = prepare([str(folder / "a.txt")], folder / "tokens", options)
        >>> sampler = Sampler(TokenStore(folder / "tokens"), length=16, seed=0)
        >>> sampler.batch(np.arange(4)).shape
        (4, 16)
    """

    store: TokenStore
    length: int
    seed: int
    documents: str = "joined"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.documents not in ("joined", "separate"):
            raise ValueError(f"documents is {self.documents!r}; it may be 'joined' or 'separate'")
        if len(self) < 1:
            raise ValueError(
                f"the split {self.store.split!r} of {self.store.folder} has {len(self.store)} tokens, "
                f"fewer than one sequence of {self.length}"
            )

    def __len__(self) -> int:
        """Windows in the store."""
        return len(self.store) // self.length

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """The window of each sample number."""
        numbers = np.asarray(numbers, np.int64)
        epochs, places = np.divmod(numbers, len(self))
        if not self.shuffle:
            return places
        out = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = shuffled(places[chosen], len(self), self.seed * 1_000_003 + int(epoch))
        return out

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [B, T]: the tokens of these samples."""
        return np.stack([self.store.read(int(w) * self.length, self.length) for w in self.windows(numbers)])

    def boundaries(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Per sample, where documents start inside its window (without place 0)."""
        ends, out = self.store.ends, []
        for w in self.windows(numbers):
            first = int(w) * self.length
            lo, hi = np.searchsorted(ends, (first, first + self.length - 1), side="right")
            out.append(np.unique(ends[lo:hi] - first))
        return out

    def num_targets(self, numbers: np.ndarray) -> int:
        """How many tokens of these samples are predicted: all but each sequence's (and document's) first."""
        inner = sum(len(b) for b in self.boundaries(numbers)) if self.documents == "separate" else 0
        return len(numbers) * (self.length - 1) - inner
