"""Smoke runs: a tiny model on this library's own source, which takes seconds on a CPU."""

import json
import lzma
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckda.lm.data import file_sum
from ckda.lm.prepare import OtherTokens, Preparation, prepare
from ckda.lm.recipe import Recipe
from ckda.record import read_json, write_bytes, write_json

if TYPE_CHECKING:
    from ckda.lm.training import Training

__all__ = ["SOURCE", "tiny_requests", "tiny_run", "tiny_tokens", "tiny_training"]

#: text that is always there
SOURCE = Path(__file__).parent


def tiny_tokens(out: Path) -> Path:
    """Tokens of this library's own source under a vocabulary of 512; those of another version of it give way."""
    options = Preparation(tokenizer="train:512", held_out=0.2, workers=1)
    try:
        prepare([str(SOURCE)], out, options)
    except OtherTokens:
        if not _of_the_source(out):
            raise
        prepare([str(SOURCE)], out, options, fresh=True)
    return out


def _of_the_source(tokens: Path) -> bool:
    """Whether the tokens there are of this library's source, wherever it lay."""
    known = next(tokens / name for name in ("index.json", "progress.json") if (tokens / name).is_file())
    files = [Path(file[0]) for file in read_json(known)["key"]["files"]]
    return all(("ckda", "lm") in zip(path.parts, path.parts[1:], strict=False) for path in files)


def tiny_training(data: str | Path, out: str | Path, arm: str = "ckda", seed: int = 0) -> "Training":
    """Twenty updates of a tiny model."""
    from ckda.lm.training import Training

    sizes: dict[str, Any] = {"steps": 20, "length": 64, "batch": 4, "warmup": 5, "lr": 1e-2, "dtype": "fp32"}
    sizes |= {"log_every": 5, "save_every": 10, "eval_every": 10, "eval_tokens": 1024}
    return Training(f"tiny:{arm}", str(data), str(out), Recipe(**sizes, seed=seed), device="cpu")


def tiny_run(out: Path, seed: int = 0) -> Path:
    """A tiny trained model, for smoke runs of what needs one."""
    from ckda.lm.training import run

    run(tiny_training(tiny_tokens(out / "tokens"), out, seed=seed))
    return out


def tiny_requests(out: Path) -> Path:
    """A folder of requests about nothing."""
    from ckda.lm.evaluate import FORMAT

    row = {"shared": True, "gold": 0, "continuation": [[7, 8], [9]], "characters": [4, 2]}
    rows = [row | {"context": [i, 5]} for i in range(4)]
    write_bytes(out / "toy.jsonl.xz", lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    entry = {"file": "toy.jsonl.xz", "sha256": file_sum(out / "toy.jsonl.xz"), "kind": "choice"}
    write_json(out / "index.json", {"format": FORMAT, "tasks": {"toy": entry}})
    return out
