"""Text to token shards: text files, JSON Lines, parquet or a Hugging Face dataset, in parallel, resumable.

The main process reads records and hands pieces of about a megabyte to workers, which parse and tokenise them; results come
back in order, so the tokens depend on the sources alone: not on the number of workers, on interruptions, or on what the
folder held before (finished tokens of other sources stay, a tokenizer trained on others is not used again). A document
goes to the held-out split by a hash of its text: copies of one text are never on both sides.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ckda.command import make_folder
from ckda.lm.data import FORMAT, TokenStore, file_sum
from ckda.lm.extras import require
from ckda.record import differing, read_json, write_bytes, write_json, write_text

__all__ = ["BrokenRecord", "OtherTokens", "Preparation", "end_token", "load_tokenizer", "prepare", "train_tokenizer"]


def _open_zst(raw: IO[bytes], mode: str) -> Any:
    import zstandard

    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))


_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zst}
_TEXT = (".txt", ".md", ".rst", ".tex", ".html", ".py")
_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
_SHOWN = 10  # broken records that are printed; all are written to broken.jsonl


class BrokenRecord(ValueError):
    """A record that is no document, met under `strict`."""


@dataclass(frozen=True)
class Preparation:
    """How text becomes tokens; part of what a resumed preparation must agree on."""

    tokenizer: str  #: a tokenizers JSON file, a folder with one, a name on the Hugging Face hub, or "train:SIZE"
    held_out: float = 0.01  #: share of the documents
    field: str = "text"  #: of a JSON or parquet record
    end_token: str | None = None  #: closes every document; None: the tokenizer's own
    shard_tokens: int = 1 << 26  #: a shard is closed when it has this many
    piece_bytes: int = 1 << 20  #: of text handed to a worker at once
    seed: int = 0  #: of the held-out split
    strict: bool = False  #: a broken record ends the preparation
    workers: int = 0  #: processes; 0: one a core

    def __post_init__(self) -> None:
        for name, low in (("shard_tokens", 1), ("piece_bytes", 1), ("workers", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it must be from 0 to less than 1")


class OtherTokens(ValueError):
    """The folder holds tokens of other sources or settings, finished or begun."""


class Record(NamedTuple):
    """One record as read: where it stands, and its raw line or its text."""

    place: str
    raw: bytes | str
    kind: str  #: "json" | "text"


# Reading --------------------------------------------------------------------------------------------------------------


def expand(sources: Iterable[str]) -> list[str]:
    """Files of the sources, folders walked in order; a name that is nothing is a ValueError."""
    files = []
    for source in sources:
        path = Path(source)
        if source.startswith("hf:"):
            files.append(source)
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) is not None)
            if not inside:
                raise ValueError(f"{source} holds no text, JSON Lines or parquet file")
            files += map(str, inside)
        elif path.is_file():
            files.append(source)
        else:
            raise ValueError(f"{source} is neither a file nor a folder; a Hugging Face dataset is written hf:NAME")
    return files


def _check_readers(files: Iterable[str]) -> None:
    """What the files need beyond Python's own modules is there."""
    needs = {".parquet": "pyarrow", ".zst": "zstandard"}
    for name in files:
        package = "datasets" if name.startswith("hf:") else needs.get(Path(name).suffix)
        if package is not None:
            require(package, "lm-data")


def _kind(path: Path) -> str | None:
    suffixes = [s for s in path.suffixes if s not in _OPEN]
    last = suffixes[-1] if suffixes else ""
    known = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
    return known.get(last, "text" if last in _TEXT else None)


class Reading:
    """How far the files have been read, for an estimate of what is left."""

    def __init__(self, files: Iterable[str]):
        self.sizes = {name: 0 if name.startswith("hf:") else Path(name).stat().st_size for name in files}
        self.before = 0
        self.raw: IO[bytes] | None = None

    @contextmanager
    def opened(self, path: Path) -> Iterator[IO[bytes]]:
        """The file, decompressed."""
        with open(path, "rb") as raw:
            self.raw = raw
            if path.suffix in _OPEN:
                with _OPEN[path.suffix](raw, "rb") as file:
                    yield file
            else:
                yield raw
        self.raw = None

    def finished(self, name: str) -> None:
        """This file is over."""
        self.before += self.sizes[name]
        self.raw = None

    @property
    def fraction(self) -> float | None:
        """Of all bytes; None where the size of a source is not known before."""
        total = sum(self.sizes.values())
        if not total or not all(self.sizes.values()):
            return None
        return (self.before + (self.raw.tell() if self.raw is not None else 0)) / total


def records(files: Iterable[str], field: str, reading: Reading | None = None) -> Iterator[Record]:
    """All records of the files, in order; a file that cannot be read is one broken record."""
    files = list(files)
    reading = reading or Reading(files)
    for name in files:
        try:
            yield from _records_of(name, field, reading)
        except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
            yield Record(name, f"the file cannot be read: {error}", "broken")
        reading.finished(name)


def _records_of(name: str, field: str, reading: Reading) -> Iterator[Record]:
    if name.startswith("hf:"):
        yield from _hub_records(name, field)
        return
    path = Path(name)
    kind = _kind(path) or "text"
    if kind == "parquet":
        from pyarrow import parquet

        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield Record(f"{path.name}:{number}", text, "text")
        return
    with reading.opened(path) as file:
        if kind == "text":
            yield Record(path.name, file.read(), "text")
        else:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Record(f"{path.name}:{number}", line, "json")


def _hub_records(name: str, field: str) -> Iterator[Record]:
    """hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, streamed."""
    from datasets import load_dataset

    dataset, *rest = name.removeprefix("hf:").split(":")
    config, split = (None, *rest)[-2:] if rest else (None, "train")
    for number, row in enumerate(load_dataset(dataset, config, split=split, streaming=True)):
        yield Record(f"{name}:{number}", row.get(field), "text")


def pieces(source: Iterator[Record], size: int) -> Iterator[list[Record]]:
    """Records in lists of about `size` bytes."""
    piece: list[Record] = []
    total = 0
    for record in source:
        piece.append(record)
        total += len(record.raw) if isinstance(record.raw, bytes | str) else 0
        if total >= size:
            yield piece
            piece, total = [], 0
    if piece:
        yield piece


def document(record: Record, field: str) -> str:
    """A record's text; what is none is a ValueError that says why."""
    raw: Any = record.raw
    if record.kind == "broken":
        raise ValueError(raw)
    if record.kind == "json":
        row = json.loads(raw)
        if not isinstance(row, dict) or field not in row:
            raise ValueError(f"no field {field!r}")
        raw = row[field]
    if isinstance(raw, bytes):
        raw = raw.decode()
    if not isinstance(raw, str):
        raise ValueError(f"its text is {type(raw).__name__}, not a string")
    if not raw.strip():
        raise ValueError("its text is empty")
    return raw


# Tokenizers -----------------------------------------------------------------------------------------------------------


def load_tokenizer(name: str) -> Any:
    """A `tokenizers.Tokenizer` from its JSON file, a folder that holds it, or a name on the Hugging Face hub."""
    from tokenizers import Tokenizer

    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is no tokenizer: {error}") from error
    if path.suffix == ".json" or (os.sep in name and name.count("/") > 1):
        raise ValueError(f"the tokenizer {name} is not there")
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(f"the tokenizer {name!r} is neither a file here nor to be had: {error}") from error


def train_tokenizer(texts: Iterator[str], size: int) -> Any:
    """A byte-level BPE of `size` tokens trained on the texts; token 0 ends documents.

    Example:
        >>> tokenizer = train_tokenizer(iter(["the cat sat on the mat " * 20]), 270)
        >>> tokenizer.decode(tokenizer.encode("the mat").ids)
        'the mat'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        raise ValueError(f"a byte-level vocabulary has at least 257 tokens, not {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_token(tokenizer: Any, wanted: str | None = None) -> str:
    """The token that closes documents: the one wanted, or the first of the usual ones that the tokenizer has.

    Example:
        >>> end_token(train_tokenizer(iter(["a b"]), 260))
        '<|endoftext|>'
    """
    for token in [wanted] if wanted else _END_TOKENS:
        if tokenizer.token_to_id(token) is not None:
            return token
    tried = wanted or ", ".join(_END_TOKENS)
    raise ValueError(f"the tokenizer has no token {tried} to close documents with: name one with --end-token")


def _tokenizer_for(
    key: dict[str, Any], files: list[str], out: Path, say: Callable[[str], None], stop: Callable[[], bool]
) -> Any:
    """A tokenizer trained on the sources; one that lies in `out` is used where it was trained on just these."""
    place, about = out / "tokenizer.json", out / "tokenizer.trained.json"
    trained_on = {name: key[name] for name in ("tokenizer", "field", "files")}
    try:
        if read_json(about) == trained_on | {"sha256": file_sum(place)}:
            return load_tokenizer(str(place))
    except (OSError, ValueError):
        pass  # there is none, or only a part of it
    size = int(key["tokenizer"].removeprefix("train:"))
    texts = _sample(files, key["field"])
    trained = _watched(lambda: train_tokenizer(texts, size), "training the tokenizer", say, stop)
    write_text(place, trained.to_str())
    write_json(about, trained_on | {"sha256": file_sum(place)})
    return trained


def _given_tokenizer(options: Preparation, say: Callable[[str], None], stop: Callable[[], bool]) -> Any:
    """The tokenizer that is named, found to have its end token; None where one is to be trained."""
    name = options.tokenizer
    if not name.startswith("train:"):
        looking = f"looking for the tokenizer {name!r}, here and on the Hugging Face hub"
        tokenizer = _watched(lambda: load_tokenizer(name), looking, say, stop)
        end_token(tokenizer, options.end_token)
        return tokenizer
    if not name.removeprefix("train:").isdigit():
        raise ValueError(f"the tokenizer is {name!r}; it may be train:SIZE, as train:32768")
    return None


def _watched(work: Callable[[], Any], what: str, say: Callable[[str], None], stop: Callable[[], bool]) -> Any:
    """What `work` returns, from a thread: meanwhile this one says how long it takes and hears Ctrl-C."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # it is raised below
            found.append(error)

    thread, began = threading.Thread(target=run, daemon=True), time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        say(f"{what}, {time.monotonic() - began:.0f} s")
        if stop():
            raise KeyboardInterrupt
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _sample(files: list[str], field: str, characters: int = 100_000_000) -> Iterator[str]:
    """The first hundred million characters."""
    for record in records(files, field):
        try:
            text = document(record, field)
        except ValueError:
            continue
        yield text
        characters -= len(text)
        if characters < 0:
            return


# Workers --------------------------------------------------------------------------------------------------------------

_state: dict[str, Any] = {}


class Piece(NamedTuple):
    """What a worker makes of a piece: per split the tokens and the documents' lengths, and what was broken."""

    tokens: dict[str, bytes]
    lengths: dict[str, list[int]]
    broken: list[tuple[str, str]]
    size: int


def _start_process(*arguments: Any) -> None:
    """A worker leaves Ctrl-C to the main process and threads to the other workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _start_worker(*arguments)


def _start_worker(tokenizer_file: str, end: int, dtype: str, options: Preparation) -> None:
    _state.update(tokenizer=load_tokenizer(tokenizer_file), end=end, dtype=dtype, options=options)


def _tokenise(piece: list[Record]) -> Piece:
    options: Preparation = _state["options"]
    texts, broken, size = [], [], 0
    for record in piece:
        try:
            texts.append(document(record, options.field))
            size += len(texts[-1])
        except ValueError as error:  # JSON and Unicode errors are ValueErrors
            broken.append((record.place, str(error)[:200]))
    tokens: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    lengths: dict[str, list[int]] = {"train": [], "held_out": []}
    for text, encoding in zip(
        texts, _state["tokenizer"].encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        split = "held_out" if _held_out(text, options) else "train"
        tokens[split].append(np.array([*encoding.ids, _state["end"]], _state["dtype"]))
        lengths[split].append(len(tokens[split][-1]))
    joined = {s: b"".join(t.astype(t.dtype.newbyteorder("<")).tobytes() for t in parts) for s, parts in tokens.items()}
    return Piece(joined, lengths, broken, size)


def _held_out(text: str, options: Preparation) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=str(options.seed).encode())
    return int.from_bytes(digest.digest(), "little") < options.held_out * 2.0**64


def _results(work: Iterator[list[Record]], workers: int, arguments: tuple[Any, ...]) -> Iterator[Piece]:
    """The pieces' results in order, at most three a worker in flight."""
    if workers == 1:
        _start_worker(*arguments)
        yield from map(_tokenise, work)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_process, initargs=arguments) as pool:
        waiting: list[Future[Piece]] = []
        try:
            for piece in work:
                waiting.append(pool.submit(_tokenise, piece))
                if len(waiting) > 3 * workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# Writing --------------------------------------------------------------------------------------------------------------


class _Writer:
    """Collects tokens of the splits and closes them as shards, all splits at once, together with the journal."""

    def __init__(self, out: Path, dtype: str, key: dict[str, Any]):
        self.out, self.dtype, self.key = out, np.dtype(dtype), key
        self.journal = out / "progress.json"
        self.splits: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
        self.counts = {"pieces": 0, "documents": 0, "broken": 0, "characters": 0}
        self.broken: list[tuple[str, str]] = []
        self._clear()

    def _clear(self) -> None:
        self.tokens: dict[str, list[bytes]] = {name: [] for name in self.splits}
        self.lengths: dict[str, list[int]] = {name: [] for name in self.splits}

    def resume(self) -> int:
        """The number of pieces an interrupted preparation had finished; 0 where there is none that agrees."""
        if not self.journal.is_file():
            return 0
        try:
            known = read_json(self.journal)
            if _unlike(self.key, known["key"]):
                return 0
            for name, shard in ((n, s) for n in self.splits for s in known["splits"][n]):
                if file_sum(self.out / shard["file"]) != shard["sha256"]:
                    print(f"{shard['file']} of the split {name} is damaged: starting anew", file=sys.stderr)
                    return 0
        except (ValueError, KeyError, TypeError, OSError):
            return 0
        self.splits, self.counts = known["splits"], known["counts"]
        self.broken = [tuple(b) for b in known["broken"]]
        return int(self.counts["pieces"])

    def add(self, piece: Piece) -> None:
        for name in self.splits:
            self.tokens[name].append(piece.tokens[name])
            self.lengths[name] += piece.lengths[name]
        self.counts["pieces"] += 1
        self.counts["documents"] += sum(map(len, piece.lengths.values()))
        self.counts["characters"] += piece.size
        self.counts["broken"] += len(piece.broken)
        self.broken += piece.broken

    @property
    def open_tokens(self) -> int:
        return sum(sum(lengths) for lengths in self.lengths.values())

    def close_shards(self) -> None:
        """Write what is open as one shard a split, then the journal: an interruption loses at most open shards."""
        for name, shards in self.splits.items():
            data = b"".join(self.tokens[name])
            if not data:
                continue
            ends = np.cumsum(self.lengths[name]).astype("<u8").tobytes()
            stem = f"{name}-{len(shards):05d}"
            write_bytes(self.out / f"{stem}.bin", data)
            write_bytes(self.out / f"{stem}.ends", ends)
            shards.append(
                {
                    "file": f"{stem}.bin",
                    "tokens": len(data) // self.dtype.itemsize,
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "ends": f"{stem}.ends",
                    "documents": len(self.lengths[name]),
                    "ends_sha256": hashlib.sha256(ends).hexdigest(),
                }
            )
        self._clear()
        state = {"key": self.key, "splits": self.splits, "counts": self.counts, "broken": self.broken}
        write_json(self.journal, state)

    def hold_out_tail(self, share: float) -> None:
        """Where one document, or few, all went to one split: the end of the last shard is held out instead."""
        full = "train" if self.splits["train"] else "held_out"
        *shards, last = self.splits[full]
        tokens, ends = np.fromfile(self.out / last["file"], self.dtype), np.fromfile(self.out / last["ends"], "<u8")
        total = sum(shard["tokens"] for shard in self.splits[full])
        cut = len(tokens) - min(len(tokens) // 2, math.ceil(share * total))
        before, after = ends[ends < cut], ends[ends > cut] - cut
        for shard in [*shards, last]:  # under the name of the split they belong to
            for key in ("file", "ends"):
                old, shard[key] = shard[key], shard[key].replace(full, "train")
                os.replace(self.out / old, self.out / shard[key])
        self.splits = {"train": shards, "held_out": []}
        for name, data, places in (("train", tokens[:cut], [*before, cut]), ("held_out", tokens[cut:], after)):
            self.tokens[name] = [data.tobytes()]
            self.lengths[name] = np.diff(np.asarray([0, *places], np.int64)).tolist()
        self.close_shards()


def prepare(
    sources: Iterable[str],
    out: str | Path,
    options: Preparation,
    show: Callable[[dict[str, int], int, float | None], None] = lambda counts, tokens, fraction: None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Tokenise the sources into `out` and return its index; an interrupted call goes on where its last shard ended.

    What is finished is not done again; tokens of other sources or settings in `out` are an :class:`OtherTokens` error, unless
    `fresh` puts these in their place.

    `show(counts, tokens, fraction)` is called after every piece, with the part of the sources that was read; where `stop()` is
    true the open shard is closed and KeyboardInterrupt raised. `say(text)` hears of what is done before the first piece.
    """
    out, files = Path(out), expand(sources)
    _check_readers(files)
    _check_documents(files, options.field)
    tokenizer = _given_tokenizer(options, say, stop)
    key = {k: v for k, v in asdict(options).items() if k not in ("workers", "strict")}
    key["files"] = _watched(lambda: [_identity(name) for name in files], "reading the sources' checksums", say, stop)
    if tokenizer is not None:
        key["tokenizer_sha256"] = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    if not fresh and (known := _finished(out, key)) is not None:
        print(f"{out} is prepared already, from the same sources and settings (--fresh prepares anew)", file=sys.stderr)
        return known
    make_folder(str(out))
    if fresh:
        _clear(out)
    if tokenizer is None:
        tokenizer = _tokenizer_for(key, files, out, say, stop)
    else:
        write_text(out / "tokenizer.json", tokenizer.to_str())
    end = tokenizer.token_to_id(end_token(tokenizer, options.end_token))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    key["tokenizer_sha256"] = tokenizer_sum = file_sum(out / "tokenizer.json")
    writer = _Writer(out, dtype, key)
    done = writer.resume()
    began = time.perf_counter()
    reading = Reading(files)
    work = islice(pieces(records(files, options.field, reading), options.piece_bytes), done, None)
    workers = options.workers or os.cpu_count() or 1
    arguments = (str(out / "tokenizer.json"), end, dtype, options)
    told = 0
    for piece in _results(work, workers, arguments):
        for place, reason in piece.broken:
            if options.strict:
                raise BrokenRecord(f"{place}: {reason}")
            if told < _SHOWN:
                print(f"skipped {place}: {reason}", file=sys.stderr)
            told += 1
        writer.add(piece)
        show(writer.counts, _written(writer) + writer.open_tokens, reading.fraction)
        if writer.open_tokens >= options.shard_tokens or stop():
            writer.close_shards()
        if stop():
            raise KeyboardInterrupt
    writer.close_shards()
    if not writer.counts["documents"]:
        raise ValueError(_no_document(files, writer.broken))
    if options.held_out and not all(writer.splits.values()):
        writer.hold_out_tail(options.held_out)
    index = {
        "format": FORMAT,
        "key": key,
        "dtype": dtype,
        "vocab_size": vocab,
        "end_token": end,
        "tokenizer": {"file": "tokenizer.json", "sha256": tokenizer_sum},
        "splits": writer.splits,
        "tokens": {name: sum(s["tokens"] for s in shards) for name, shards in writer.splits.items()},
        "counts": writer.counts,
        "options": asdict(options),
        "seconds": round(time.perf_counter() - began, 2),
    }
    write_text(out / "broken.jsonl", "".join(json.dumps({"place": p, "why": w}) + "\n" for p, w in writer.broken))
    write_json(out / "index.json", index)
    writer.journal.unlink(missing_ok=True)
    return index


def _check_documents(files: list[str], field: str) -> None:
    """There is a document somewhere: else nothing is begun."""
    broken = []
    for record in records(files, field):
        try:
            document(record, field)
            return
        except ValueError as error:
            broken.append((record.place, str(error)[:200]))
    raise ValueError(_no_document(files, broken))


def _no_document(files: list[str], broken: list[tuple[str, str]]) -> str:
    why = f" ({broken[0][0]}: {broken[0][1]})" if broken else ""
    return f"there was no document in {_listed(files)}{why}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _finished(out: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The index of an equal preparation that is already there, whole; one of another kind, finished or begun, is an error."""
    known, state = out / "index.json", "finished"
    if not known.is_file():
        known, state = out / "progress.json", "unfinished"
        if not known.is_file():
            return None
    try:
        index = read_json(known)
        begun = any(index["splits"].values())
        unlike = _unlike(key, {"tokenizer": index.get("options", {}).get("tokenizer")} | index["key"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OtherTokens(
            f"{known} is not of ckda lm prepare, or damaged ({error!r}); it stays as it is. --fresh prepares anew in its place"
        ) from error
    if unlike and begun:
        raise OtherTokens(
            f"{out} holds {state} tokens of another kind: {'; '.join(unlike)}. They stay as they are: give another --out, or "
            "--fresh to prepare anew in their place"
        )
    return index if state == "finished" and not unlike and _whole(out, index) else None


def _whole(out: Path, index: dict[str, Any]) -> bool:
    """Whether the shards and the tokenizer that the index names are there."""
    try:
        stores = [TokenStore(out, split) for split in index["splits"]]
        tokenizer = index["tokenizer"]
        return bool(stores) and file_sum(out / tokenizer["file"]) == tokenizer["sha256"]
    except (ValueError, KeyError, TypeError, OSError):
        return False


def _unlike(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """How a preparation differs from one that is there, in words. A tokenizer to be trained has a size, any other a checksum."""
    settings = {name: ours[name] for name in ours if name not in ("files", "tokenizer", "tokenizer_sha256")}
    found = differing(settings, theirs)
    kind = "tokenizer_sha256" if "tokenizer_sha256" in ours else "tokenizer"
    if ours[kind] != theirs.get(kind):
        found += differing({"tokenizer": ours["tokenizer"]}, theirs) or ["the tokenizer has changed since"]
    names = [[Path(file[0]).name for file in files] for files in (ours["files"], theirs["files"])]
    if names[0] != names[1]:
        return [*found, f"the sources are {_listed(names[1])} there and {_listed(names[0])} here"]
    changed = [
        name
        for name, mine, other in zip(names[0], ours["files"], theirs["files"], strict=True)
        if mine[1 : len(other)] != other[1:]  # older indices have no checksum
    ]
    return [*found, f"{_listed(changed)} changed since"] if changed else found


def _clear(out: Path) -> None:
    """Remove what a preparation writes, the index first: what is left after an interruption is no index of nothing."""
    for name in ("index.json", "progress.json", "broken.jsonl", "tokenizer.json", "tokenizer.trained.json"):
        (out / name).unlink(missing_ok=True)
    for split in ("train", "held_out"):
        for path in [*out.glob(f"{split}-?????.bin"), *out.glob(f"{split}-?????.ends")]:
            path.unlink()


def _written(writer: _Writer) -> int:
    return sum(shard["tokens"] for shards in writer.splits.values() for shard in shards)


def _identity(name: str) -> list[Any]:
    """What a source is recognised by: its name, its size and its bytes' checksum."""
    if name.startswith("hf:"):
        return [name]
    try:
        return [name, Path(name).stat().st_size, file_sum(Path(name))]
    except OSError:  # it will be a broken record
        return [name, None, None]
