"""``ckda lm eval``: perplexity on a text of yours, or zero-shot tasks, offline or by lm-eval."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckda.command import every, filled, make_folder, pick_names
from ckda.lm.commands import ModelChoice, choose_model
from ckda.lm.evaluate import HARNESS, OFFLINE, build_requests, evaluate, harness, text_measures
from ckda.lm.figures import tasks_figure
from ckda.lm.prepare import load_tokenizer
from ckda.lm.tiny import tiny_requests
from ckda.record import environment, write_record

__all__ = ["Evaluation", "Scores", "run", "run_command"]


@dataclass(frozen=True)
class Evaluation:
    """Which tasks, and who asks them."""

    text: str | None = None  #: a text file to predict, instead of tasks
    requests: str | None = None  #: a folder of tokenised requests; None: lm-eval
    tasks: tuple[str, ...] | None = None  #: None: all there are
    limit: int = 0  #: documents a task; 0: all
    include: str | None = None  #: lm-eval: a folder of further task files


@dataclass(frozen=True)
class Scores:
    """Measures by task; the file eval.json."""

    by: str
    model: str
    limit: int
    results: dict[str, dict[str, float]]
    seconds: float
    environment: dict[str, Any]


def run(
    choice: ModelChoice, wanted: Evaluation, show: Callable[[str, int, int], None] = lambda task, done, total: None
) -> Scores:
    """The tasks' measures; `show(task, done, total)` counts requests."""
    began, model = time.perf_counter(), choice.load()
    if wanted.text is not None:
        text = Path(wanted.text).read_text(errors="replace")
        by, results = "text", {Path(wanted.text).name: text_measures(model, choice.load_tokenizer(), text, show)}
    elif wanted.requests is not None:
        by, results = "offline requests", evaluate(model, wanted.requests, wanted.tasks, wanted.limit, show=show)
    else:
        names = wanted.tasks or tuple(HARNESS)
        by, results = "lm-eval", harness(model, choice.load_tokenizer(), names, wanted.limit, include=wanted.include)
    seconds = round(time.perf_counter() - began, 2)
    return Scores(by, choice.name, wanted.limit, results, seconds, environment(choice.device))


def run_command(args: argparse.Namespace) -> int:
    """Evaluate, or build the requests for it."""
    if args.build:
        return _build(args)
    out = make_folder(args.out)
    choice = choose_model(args, out)
    requests = str(tiny_requests(out / "requests")) if args.smoke and not args.text else args.requests
    tasks = tuple(args.tasks.split(",")) if args.tasks else None
    scores = run(choice, filled(Evaluation, args, tasks=tasks, requests=requests), counter(args.json))
    result = {"what": "ckda lm eval"} | asdict(scores)
    write_record(out / "eval.json", result)
    tasks_figure(scores).savefig(out / "eval.png", dpi=160)
    if args.json:
        print(json.dumps(result))
        return 0
    for task, measures in scores.results.items():
        measured = {k: v for k, v in measures.items() if "stderr" not in k and k != "documents"}
        shown = "  ".join(f"{k} {v:,.0f}" if k == "tokens" else f"{k} {v:.4f}" for k, v in measured.items())
        print(f"{task:<14} {shown}")
    print(f"in {out / 'eval.json'}")
    return 0


def counter(quiet: bool) -> Callable[[str, int, int], None]:
    """A line every two seconds: what is done, what is left."""
    began, say = time.perf_counter(), every(2, quiet)

    def show(task: str, done: int, total: int) -> None:
        left = (time.perf_counter() - began) / done * (total - done)
        say(f"{task}: {done} of {total} requests, about {left:.0f} s left")

    return show


def _build(args: argparse.Namespace) -> int:
    if not args.requests or not args.tokenizer:
        raise ValueError("--build needs --requests FOLDER and --tokenizer FILE")
    tasks = pick_names(args.tasks or ",".join(OFFLINE), tuple(OFFLINE), {}, "--tasks")
    index = build_requests(Path(args.build), load_tokenizer(args.tokenizer), args.requests, tasks, args.limit)
    for task, entry in index["tasks"].items():
        print(f"{task:<14} {entry['documents']} of {entry['of']} documents")
    return 0
