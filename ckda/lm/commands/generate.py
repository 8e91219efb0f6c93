"""``ckda lm generate``: text from a prompt, as it comes."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ckda.command import filled, make_folder
from ckda.lm.commands import ModelChoice, choose_model
from ckda.lm.generate import stream
from ckda.lm.prepare import end_token
from ckda.record import environment, write_record

__all__ = ["Generation", "Text", "run", "run_command"]


@dataclass(frozen=True)
class Generation:
    """A prompt and how tokens are drawn after it."""

    prompt: str = ""
    max_new: int = 200
    temperature: float = 0.8  #: 0: greedy
    top_k: int = 0  #: 0: all
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"max_new": (0, None), "temperature": (0, None), "top_k": (0, None), "top_p": (0, 1)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not value >= low or (high is not None and value > high) or (name == "top_p" and value == 0):
                wanted = "at least 0" if high is None else "above 0 and at most 1"
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")


@dataclass(frozen=True)
class Text:
    """What came; the file generate.json."""

    model: str
    prompt: str
    text: str
    seed: int
    temperature: float
    seconds: float
    environment: dict[str, Any]


def run(choice: ModelChoice, wanted: Generation, show: Callable[[str], None] = lambda piece: None) -> Text:
    """The continuation of the prompt; `show` sees the prompt, then the rest piece by piece."""
    model, tokenizer = choice.load(), choice.load_tokenizer()
    show(wanted.prompt)
    end = tokenizer.token_to_id(end_token(tokenizer))
    began, pieces = time.perf_counter(), []
    for piece in stream(model, tokenizer, **asdict(wanted), end=end):
        pieces.append(piece)
        show(piece)
    seconds = round(time.perf_counter() - began, 2)
    where = environment(choice.device)
    return Text(choice.name, wanted.prompt, "".join(pieces), wanted.seed, wanted.temperature, seconds, where)


def run_command(args: argparse.Namespace) -> int:
    """Read, write, tell."""
    if args.smoke:
        args.max_new, args.prompt = 20, args.prompt or "def "
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    wanted, out = filled(Generation, args, prompt=prompt), make_folder(args.out)
    choice = choose_model(args, out)

    def show(piece: str) -> None:
        if not args.json:
            print(piece, end="", flush=True)

    result = {"what": "ckda lm generate"} | asdict(run(choice, wanted, show))
    write_record(out / "generate.json", result)
    print(json.dumps(result) if args.json else "")
    return 0
