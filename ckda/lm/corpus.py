"""Documents to one folder of tokens that travels: duplicates dropped, splits by document, shards compressed and unpacked again."""

import hashlib
import json
import lzma
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckda.lm.data import FORMAT, TokenStore, file_sum
from ckda.lm.prepare import OtherTokens, Preparation, prepare
from ckda.record import read_json, write_bytes, write_json, write_text

__all__ = ["SPLITS", "Document", "Filter", "is_held_out", "pack", "tokenise", "unpack"]

#: the splits of a corpus; the last is a kind of text that the training never sees
SPLITS = ("train", "held_out", "out_of_domain")

WINDOW = 48  #: bytes of a shingle
KEPT = 32  #: of so many shingles one is kept, by its hash, so that the same text always keeps the same ones
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
#: two bytes a token, so the coder looks at the parity of a position and at no bits of the byte before
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Document:
    """A text, and where it is from."""

    source: str  #: the package
    kind: str  #: "prose" | "dialogue" | "documentation" | "code" | ...
    path: str  #: of the file in the package: parts of one file go to one split
    text: str


def shingles(text: str) -> np.ndarray:
    """Hashes (uint64) of a sample of the text's windows of :data:`WINDOW` bytes; letters' case and blanks do not count.

    Example:
        >>> text = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 3
        >>> one, other = set(shingles(text).tolist()), set(shingles("  " + text.upper()).tolist())
        >>> one == other
        True
    """
    squeezed = "".join(text.split()).lower().encode()
    data = np.frombuffer(squeezed, np.uint8).astype(np.uint64)
    if len(data) < WINDOW:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        h = np.zeros(len(data) - WINDOW + 1, np.uint64)
        for i in range(WINDOW):
            h = (h + data[i : i + len(h)]) * _FACTOR
            h ^= h >> np.uint64(29)
    return np.unique(h[h % np.uint64(KEPT) == 0])


@dataclass
class Filter:
    """Drops copies: equal documents, documents most of whose windows stood in earlier ones, and long paragraphs seen before.

    Example:
        >>> words = "one of the swift brown foxes that jumped over a lazy dog in the middle of the night".split()
        >>> text = " ".join(f"{a} {b}" for a in words for b in words)
        >>> first, near = Document("a", "prose", "1", text), Document("b", "prose", "2", text.replace("fox", "wolf", 1))
        >>> sieve = Filter()
        >>> [document.path for document in sieve([first, near, first])], sieve.dropped
        (['1'], {'equal': 1, 'near': 1, 'short': 0})
    """

    overlap: float = 0.5  #: share of a document's windows in earlier documents from which on it is a copy
    paragraph: int = 160  #: characters from which on a paragraph that stood before is dropped
    least: int = 200  #: characters of a document
    dropped: dict[str, int] = field(default_factory=lambda: {"equal": 0, "near": 0, "short": 0})
    _texts: set[bytes] = field(default_factory=set, repr=False)
    _windows: set[int] = field(default_factory=set, repr=False)
    _paragraphs: set[bytes] = field(default_factory=set, repr=False)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents that are new, without the paragraphs that are not."""
        for document in documents:
            name = _digest(document.text)
            if name in self._texts:
                self.dropped["equal"] += 1
                continue
            self._texts.add(name)
            own = shingles(document.text).tolist()
            known = sum(window in self._windows for window in own)
            if own and known >= self.overlap * len(own):
                self.dropped["near"] += 1
                continue
            self._windows.update(own)
            text = self._without_known(document.text)
            if len(text) < self.least:
                self.dropped["short"] += 1
                continue
            yield Document(document.source, document.kind, document.path, text)

    def _without_known(self, text: str) -> str:
        kept = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= self.paragraph:
                name = _digest(paragraph)
                if name in self._paragraphs:
                    continue
                self._paragraphs.add(name)
            kept.append(paragraph)
        return "\n\n".join(kept).strip()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).digest()


def is_held_out(document: Document, share: float) -> bool:
    """Whether its file is held out: a hash of the name decides, so all parts of a file are on the same side.

    Example:
        >>> parts = [Document("a", "prose", "novel.txt", text) for text in ("first part", "second part")]
        >>> len({is_held_out(part, 0.5) for part in parts})
        1
    """
    name = f"{document.source}/{document.path}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < share * 2**64


def tokenise(files: dict[str, Path], out: Path, tokenizer: str, workers: int = 0) -> dict[str, Any]:
    """One folder of tokens with a split for each JSON Lines file; the tokenizer is trained on "train" where it is train:SIZE.

    Called again it goes on: finished splits are kept.
    """
    parts = out.with_name(f".{out.name}.parts")
    own = parts / "train" / "tokenizer.json"
    indices = {}
    for split in sorted(files, key=lambda name: name != "train"):
        name = tokenizer if split == "train" else str(own)
        options = Preparation(tokenizer=name, held_out=0.0, shard_tokens=1 << 40, workers=workers)
        try:
            indices[split] = prepare([str(files[split])], parts / split, options)
        except OtherTokens:  # what an interrupted call left of other texts
            indices[split] = prepare([str(files[split])], parts / split, options, fresh=True)
    splits: dict[str, list[dict[str, Any]]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for split, index in indices.items():
        splits[split] = []
        for shard in index["splits"]["train"]:
            names = {kind: shard[kind].replace("train-", f"{split}-") for kind in ("file", "ends")}
            for kind, name in names.items():
                shutil.copyfile(parts / split / shard[kind], out / name)
            splits[split].append(shard | names)
    write_bytes(out / "tokenizer.json", own.read_bytes())
    kept = {
        name: indices["train"][name]
        for name in ("format", "dtype", "vocab_size", "end_token")
        if name in indices["train"]
    }
    whole = (
        indices["train"] | kept | {"splits": splits, "tokens": {name: _tokens(found) for name, found in splits.items()}}
    )
    whole.pop("counts", None)
    write_json(out / "index.json", whole)
    shutil.rmtree(parts)
    return whole


def _tokens(shards: list[dict[str, Any]]) -> int:
    return sum(shard["tokens"] for shard in shards)


def pack(tokens: Path, out: Path, limit: int | None = None) -> int:
    """Compress a folder of tokens into files that travel: returns their bytes; more than `limit` is a ValueError."""
    index = read_json(tokens / "index.json")
    out.mkdir(parents=True, exist_ok=True)
    names = [shard[kind] for shards in index["splits"].values() for shard in shards for kind in ("file", "ends")]
    for name in names:
        if not (out / f"{name}.xz").is_file():
            write_bytes(out / f"{name}.xz", _compressed(tokens / name))
    for name in ("index.json", "tokenizer.json"):
        write_bytes(out / f"{name}.xz", lzma.compress((tokens / name).read_bytes(), preset=9))
    size = sum((out / f"{name}.xz").stat().st_size for name in (*names, "index.json", "tokenizer.json"))
    if limit is not None and size > limit:
        raise ValueError(f"{out} has {size} bytes; it must have at most {limit}: take fewer megabytes of text")
    return size


def _compressed(path: Path) -> bytes:
    if path.suffix != ".ends":
        return lzma.compress(path.read_bytes(), filters=_XZ)
    lengths = np.diff(np.fromfile(path, "<u8"), prepend=np.uint64(0)).astype("<u4")
    return lzma.compress(lengths.tobytes(), preset=9)


def unpack(folder: Path, out: Path) -> dict[str, Any]:
    """What :func:`pack` compressed, whole and compared with its checksums; the index is written last. Returns the index."""
    if not (folder / "index.json.xz").is_file():
        raise ValueError(f"{folder} holds no index.json.xz: it is no folder that was packed")
    index: dict[str, Any] = json.loads(lzma.decompress((folder / "index.json.xz").read_bytes()))
    if index.get("format") != FORMAT:
        raise ValueError(f"{folder}/index.json.xz is no index of tokens ({FORMAT})")
    for shards in index["splits"].values():
        for shard in shards:
            _restore(folder, out, shard["file"], shard["sha256"])
            _restore(folder, out, shard["ends"], shard["ends_sha256"])
    write_bytes(out / "tokenizer.json", lzma.decompress((folder / "tokenizer.json.xz").read_bytes()))
    write_text(out / "index.json", json.dumps(index, indent=1))
    for split in index["splits"]:
        TokenStore(out, split)
    return index


def _restore(folder: Path, out: Path, name: str, wanted: str) -> None:
    if (out / name).is_file() and file_sum(out / name) == wanted:
        return
    data = lzma.decompress((folder / f"{name}.xz").read_bytes())
    if name.endswith(".ends"):
        data = np.cumsum(np.frombuffer(data, "<u4").astype("<u8"), dtype="<u8").tobytes()
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ValueError(f"{folder / name}.xz is damaged: its SHA-256 is not that of the index")
    write_bytes(out / name, data)
