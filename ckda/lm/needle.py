"""``ckda needle``: RULER's needles in a haystack (S-NIAH-1, 2, 3 and MK-NIAH-1) from 1K to 8K tokens.

A sentence "One of the special magic numbers for KEY is: VALUE." is hidden in a text of given length, and the model, decoding
greedily, must name the value. S-NIAH-1 hides a number in a repeated sentence, S-NIAH-2 a number in running text, S-NIAH-3 a
UUID in running text, and MK-NIAH-1 hides four needles and asks for one. With lm-eval, nltk and wonderwords installed the
prompts are lm-eval's own; elsewhere this module writes prompts of the same form, with running text from a file of yours.
"""

import argparse
import json
import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckda.command import every, filled, make_folder, pick_names, pick_whole
from ckda.lm.commands import ModelChoice, choose_model
from ckda.lm.extras import require
from ckda.lm.figures import needle_figure
from ckda.record import environment, write_record

__all__ = ["KINDS", "Haystacks", "Needles", "Sample", "answer", "make_samples", "run"]

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = ("quiet", "bright", "hollow", "ancient", "gentle", "brisk", "crimson", "distant", "eager", "golden")
_NOUNS = ("harbor", "lantern", "meadow", "pebble", "quarry", "ribbon", "saddle", "thimble", "valley", "willow")


class Kind(NamedTuple):
    """One task of RULER: what the haystack is, what is hidden, how many."""

    text: bool  #: running text, else the repeated sentence
    value: str  #: "numbers" | "uuids"
    needles: int
    harness: str  #: lm-eval's name


KINDS = {
    "S-NIAH-1": Kind(False, "numbers", 1, "niah_single_1"),
    "S-NIAH-2": Kind(True, "numbers", 1, "niah_single_2"),
    "S-NIAH-3": Kind(True, "uuids", 1, "niah_single_3"),
    "MK-NIAH-1": Kind(True, "numbers", 4, "niah_multikey_1"),
}


class Sample(NamedTuple):
    """A prompt, with the start of the answer, and the value that must come."""

    prompt: str
    value: str
    depth: float  #: of the needle, 0 at the start


def _value(kind: str, draw: random.Random) -> str:
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _prompt(kind: Kind, units: list[str], draw: random.Random) -> Sample:
    """Hide the needles between the units and ask for one."""
    keys: list[str] = []
    while len(keys) < kind.needles:
        key = f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"
        if key not in keys:
            keys.append(key)
    values = [_value(kind.value, draw) for _ in keys]
    places = sorted(draw.sample(range(len(units) + 1), min(kind.needles, len(units) + 1)))
    order = list(range(kind.needles))
    draw.shuffle(order)
    asked = draw.randrange(kind.needles)
    pieces, depth, last = [], 0.0, 0
    for place, needle in zip(places, order, strict=True):
        pieces += units[last:place]
        pieces.append(f"One of the special magic {kind.value} for {keys[needle]} is: {values[needle]}.")
        depth = place / max(1, len(units)) if needle == asked else depth
        last = place
    pieces += units[last:]
    context = (" " if kind.text else "\n").join(pieces)
    one = kind.value[:-1]
    prompt = (
        f"A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"{one} afterwards.\n{context}\nWhat is the special magic {one} for {keys[asked]} mentioned in the provided text? "
        f"The special magic {one} for {keys[asked]} mentioned in the provided text is"
    )
    return Sample(prompt, values[asked], depth)


class _Cell:
    """Prompts of one task and length: built from a number of haystack units, measured in tokens."""

    def __init__(self, name: str, length: int, tokenizer: Any, text: str | None, seed: int, room: int):
        self.name, self.kind, self.length, self.room = name, KINDS[name], length, room
        self.tokenizer, self.seed = tokenizer, seed
        if self.kind.text and not text:
            raise ValueError(f"{name} hides its needle in running text: name a file with --text")
        self.sentences = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text or "")) if self.kind.text else [GRASS]

    def build(self, number: int, index: int) -> Sample:
        """Prompt `index` with so many units."""
        draw = random.Random(f"{self.seed}/{self.name}/{self.length}/{index}")
        offset = draw.randrange(len(self.sentences)) if self.kind.text else 0
        units = [self.sentences[(offset + i) % len(self.sentences)] for i in range(number)]
        return _prompt(self.kind, units, draw)

    def fits(self, sample: Sample) -> bool:
        ids = self.tokenizer.encode(sample.prompt, add_special_tokens=False).ids
        return len(ids) <= self.length - self.room

    def check(self, count: int) -> None:
        """Every prompt fits at its shortest."""
        if not all(self.fits(self.build(self.kind.needles, index)) for index in range(count)):
            raise ValueError(f"{self.name} does not fit into {self.length} tokens with {self.room} for the answer")

    def longest(self, index: int) -> Sample:
        """Prompt `index` with as many units as fit."""
        low, high = self.kind.needles, self.length
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(self.build(middle, index)) else (low, middle)
        return self.build(low, index)


def make_samples(
    name: str, length: int, count: int, tokenizer: Any, text: str | None = None, seed: int = 0, room: int = 128
) -> list[Sample]:
    """`count` prompts of at most length - room tokens, each as long as whole haystack units allow.

    Example:
        >>> from ckda.lm.prepare import train_tokenizer
        >>> tokenizer = train_tokenizer(iter([GRASS]), 300)
        >>> sample = make_samples("S-NIAH-1", 1024, 1, tokenizer, room=32)[0]
        >>> sample.value in sample.prompt, len(tokenizer.encode(sample.prompt).ids) <= 1024 - 32
        (True, True)
    """
    cell = _Cell(name, length, tokenizer, text, seed, room)
    cell.check(count)
    return [cell.longest(index) for index in range(count)]


def harness_samples(name: str, length: int, count: int, tokenizer: Any, text: str | None) -> list[Sample]:
    """The same from lm-eval's own builder (its essays need a network; a text given takes their place)."""
    for package in ("lm_eval", "nltk", "wonderwords"):
        require(package, "lm-eval")
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    kind = KINDS[name]

    class Counter:
        """What the builder asks of a tokenizer."""

        def __call__(self, words: str) -> Any:
            class Ids:
                input_ids = tokenizer.encode(words, add_special_tokens=False).ids

            return Ids

    if kind.text:
        haystack = re.sub(r"\s+", " ", text).split(" ") if text else prepare_niah.get_haystack("essay")
    else:
        haystack = prepare_niah.get_haystack("repeat")
    try:
        rows = _harness_rows(prepare_niah, niah_utils, kind, haystack, Counter(), length, count)
    except LookupError as error:
        raise ValueError(
            f"lm-eval's builder needs nltk's sentences: python -m nltk.downloader punkt_tab ({name})"
        ) from error
    found = []
    for row in rows:
        prompt, value = f"{row['input']} {row['gen_prefix']}", row["outputs"][0]
        found.append(Sample(prompt, value, prompt.find(value) / len(prompt)))
    return found


def _harness_rows(
    prepare_niah: Any, niah_utils: Any, kind: Kind, haystack: Any, counter: Any, length: int, count: int
) -> list[dict[str, Any]]:
    return prepare_niah.generate_samples(
        haystack,
        counter,
        max_seq_length=length,
        type_haystack="essay" if kind.text else "repeat",
        type_needle_k="words",
        type_needle_v=kind.value,
        template=niah_utils.TEMPLATE,
        num_samples=count,
        num_needle_k=kind.needles,
    )


@torch.no_grad()
def answer(model: Any, tokenizer: Any, samples: list[Sample], max_new: int = 128, batch: int = 8) -> list[bool]:
    """Whether greedy decoding names each sample's value within `max_new` tokens (RULER's string match)."""
    device = model.get_output_embeddings().weight.device
    right: list[bool] = []
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        ids = [tokenizer.encode(sample.prompt, add_special_tokens=False).ids for sample in part]
        width = max(map(len, ids))
        tokens = torch.zeros(len(ids), width, dtype=torch.long)
        mask = torch.zeros(len(ids), width, dtype=torch.long)
        for b, row in enumerate(ids):
            tokens[b, width - len(row) :] = torch.tensor(row)
            mask[b, width - len(row) :] = 1
        out = model.generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new,
            do_sample=False,
            pad_token_id=0,
        )
        for sample, row in zip(part, out[:, width:].tolist(), strict=True):
            right.append(sample.value in tokenizer.decode(row))
    return right


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Haystacks:
    """What is asked, how often, of how long a text."""

    tasks: tuple[str, ...] = tuple(KINDS)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    samples: int = 500  #: prompts a cell
    max_new: int = 128  #: tokens the model may answer with
    batch: int = 8
    text: str | None = None  #: running text for the haystack (not for S-NIAH-1)
    builder: str = "own"  #: or "lm-eval"
    seed: int = 0


@dataclass(frozen=True)
class Needles:
    """The share of the needles found, by task and length; the file needle.json."""

    model: str
    builder: str
    samples: int
    seed: int
    trained_length: int | None
    accuracy: dict[str, dict[str, float]]
    environment: dict[str, Any]


def run(
    choice: ModelChoice, wanted: Haystacks, show: Callable[[str, int, float, float], None] | None = None
) -> Needles:
    """Ask and score; `show(task, length, accuracy, fraction)` sees every cell and how much of the work is done."""
    tokenizer = choice.load_tokenizer()
    if wanted.builder == "own":
        _check(wanted, tokenizer)
    model = choice.load()
    cells: dict[str, dict[str, float]] = {name: {} for name in wanted.tasks}
    done, total = 0, len(wanted.tasks) * sum(wanted.lengths)
    for name in wanted.tasks:
        for length in wanted.lengths:
            if wanted.builder == "lm-eval":
                samples = harness_samples(name, length, wanted.samples, tokenizer, wanted.text)
            else:
                options = wanted.samples, tokenizer, wanted.text, wanted.seed, wanted.max_new
                samples = make_samples(name, length, *options)
            right = answer(model, tokenizer, samples, wanted.max_new, wanted.batch)
            cells[name][str(length)] = sum(right) / len(right)
            done += length
            if show is not None:
                show(name, length, cells[name][str(length)], done / total)
    trained = getattr(model.config, "max_position_embeddings", None)
    where = environment(choice.device)
    return Needles(choice.name, wanted.builder, wanted.samples, wanted.seed, trained, cells, where)


def _check(wanted: Haystacks, tokenizer: Any) -> None:
    """Every prompt of every cell can be made; known before the first is answered."""
    for name in wanted.tasks:
        for length in wanted.lengths:
            _Cell(name, length, tokenizer, wanted.text, wanted.seed, wanted.max_new).check(wanted.samples)


def run_command(args: argparse.Namespace) -> int:
    """Ask, score, draw, tell."""
    out, text = make_folder(args.out), Path(args.text).read_text(errors="replace") if args.text else None
    if args.smoke:
        args.lengths, args.samples, args.max_new, text = "1024", 2, 8, text or GRASS
    tasks = tuple(pick_names(args.tasks, tuple(KINDS), {}, "--tasks"))
    wanted = filled(Haystacks, args, tasks=tasks, lengths=pick_whole(args.lengths, "--lengths"), text=text)
    began, say = time.perf_counter(), every(0, args.json)

    def show(task: str, length: int, accuracy: float, fraction: float) -> None:
        left = (time.perf_counter() - began) * (1 - fraction) / fraction
        say(f"{task} {length}: {100 * accuracy:.1f}%   about {left:.0f} s left")

    found = run(choose_model(args, out), wanted, show)
    result = {"what": "ckda needle"} | asdict(found)
    write_record(out / "needle.json", result)
    needle_figure(found).savefig(out / "needle.png", dpi=160)
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{'task':<11}" + "".join(f"{n:>8}" for n in wanted.lengths))
    for name, cells in found.accuracy.items():
        print(f"{name:<11}" + "".join(f"{100 * value:>7.1f}%" for value in cells.values()))
    print(f"The table and the heat map: {out}")
    return 0
