"""A small corpus, its tokens and a small model, made once."""

import random
from pathlib import Path

import pytest

from ckda.lm.prepare import Preparation, prepare

WORDS = [
    "the",
    "cup",
    "shell",
    "moves",
    "left",
    "right",
    "under",
    "over",
    "stays",
    "where",
    "is",
    "now",
    "again",
    "not",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of random words as JSON Lines."""
    import json

    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 120))) + "." for _ in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "a.jsonl"


@pytest.fixture(scope="session")
def tokens(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens under a vocabulary trained on it, two shards a split at least."""
    out = tmp_path_factory.mktemp("tokens")
    options = Preparation(tokenizer="train:300", held_out=0.15, workers=1, shard_tokens=1500, piece_bytes=2000)
    prepare([str(corpus)], out, options)
    return out
