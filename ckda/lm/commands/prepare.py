"""``ckda lm prepare``: text to token shards. The work is :func:`ckda.lm.prepare.prepare`."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckda.command import every, filled, plural
from ckda.lm.data import TokenStore
from ckda.lm.prepare import Preparation, prepare
from ckda.lm.tiny import SOURCE
from ckda.train import deferred_interrupt

__all__ = ["run_command"]


def run_command(args: argparse.Namespace) -> int:
    """Prepare, or check what is prepared."""
    if args.check:
        return _check(Path(args.out))
    out = Path(args.out)
    options: Preparation = filled(Preparation, args)
    sources = args.sources
    if args.smoke:
        sources = sources or [str(SOURCE)]
        options = replace(options, tokenizer="train:512", held_out=max(options.held_out, 0.1), workers=1)
    if not sources:
        raise ValueError("name the files, folders or hf:NAME datasets to read")
    with deferred_interrupt() as asked:
        index = prepare(sources, out, options, counter(args.json), asked, every(2, args.json), args.fresh)
    if args.json:
        print(json.dumps({"out": str(out)} | {name: index[name] for name in ("tokens", "counts", "seconds")}))
    else:
        _tell(index, out)
    return 0


def _check(folder: Path) -> int:
    """Compare every file with its checksum; status 1 where one differs."""
    stores = [TokenStore(folder, split) for split in ("train", "held_out")]
    try:
        for store in stores:
            store.verify()
    except ValueError as error:
        print(f"ckda lm prepare: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: every file matches its checksum")
    return 0


def counter(quiet: bool) -> Callable[[dict[str, int], int, float | None], None]:
    """A line every two seconds on standard error: how much is done, how fast, what is left."""
    began, say = time.perf_counter(), every(2, quiet)

    def show(counts: dict[str, int], tokens: int, fraction: float | None) -> None:
        spent = time.perf_counter() - began
        parts = [f"{tokens / 1e6:.1f} M tokens, {tokens / 1e6 / spent:.2f} M/s"]
        if counts["broken"]:
            parts.append(plural(counts["broken"], "broken record"))
        if fraction:
            parts.append(f"about {spent * (1 - fraction) / fraction:.0f} s left")
        say(", ".join(parts))

    return show


def _tell(index: dict[str, Any], out: Path) -> None:
    tokens, counts = index["tokens"], index["counts"]
    documents = plural(counts["documents"], "document")
    print(f"{plural(tokens['train'], 'token')} to train on, {tokens['held_out']:,} held out, from {documents}")
    if not tokens["held_out"]:
        print("nothing is held out: training will have no validation")
    if counts["broken"]:
        print(f"{plural(counts['broken'], 'broken record')} skipped: {out / 'broken.jsonl'}")
    print(f"in {out}, {index['seconds']:.0f} s")
