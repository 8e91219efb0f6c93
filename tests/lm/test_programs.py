"""Programs inside text: their answers are right, they are mixed in evenly, and their final states are scored token by token."""

import re

import numpy as np
import pytest
import torch

from ckda.lm import programs
from ckda.lm.data import Sampler, TokenStore
from ckda.lm.models import config_of
from ckda.lm.prepare import load_tokenizer
from ckda.lm.programs import (
    KINDS,
    TIMES,
    Mixed,
    program_tokens,
    questions,
    score,
    split_tokens,
    training_programs,
    write_program,
)
from ckda.lm.tiny import tiny_tokens
from ckda.lm.units import Conditions, Unit, run_unit
from ckda.models import ComplexKDAForCausalLM


def run_repl(text: str) -> str:
    """The last line that Python itself prints."""
    printed: list[str] = []
    scope = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    for line in text.splitlines():
        if line.startswith(">>> "):
            exec(line[4:], scope)
    return printed[-1]


def true_answer(kind: str, text: str) -> str:
    """The answer, found another way than by the writer."""
    if kind in ("repl", "counter"):
        return run_repl(text)
    if kind == "brackets":
        shown = text.splitlines()[0]
        return f" {shown.count('(') - shown.count(')')}"
    if kind == "recall":
        key = re.findall(r"(k\d+)\?", text)[-1]
        return f" {re.findall(rf'{key} = (v[0-9]+)', text)[0]}"
    cups = ["red", "blue", "green", "white", "black"]
    for a, b in re.findall(r"Swap cups (\d) and (\d)", text):
        i, j = int(a) - 1, int(b) - 1
        cups[i], cups[j] = cups[j], cups[i]
    return f" {', '.join(cups)}."


@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_are_right_and_what_is_shown_on_the_way_is_true(kind):
    for seed in range(5):
        for rate in (0.0, 0.5):
            program = write_program(kind, 9, rate, seed)
            assert program.text.endswith(program.answer)
            assert program.answer == true_answer(kind, program.text)
            assert program == write_program(kind, 9, rate, seed)
    plain = write_program(kind, 9).text
    assert kind in ("brackets", "recall") or plain.count("\n") == 9 + (1 if kind == "shell" else 2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tiny_tokens(tmp_path_factory.mktemp("programs") / "tokens")


def test_a_twentieth_of_the_samples_are_programs(tokens):
    folder = program_tokens(tokens, 3000, seed=1)
    assert program_tokens(tokens, 3000, seed=1) == folder
    text, programs = Sampler(TokenStore(tokens), 16, 0), Sampler(TokenStore(folder), 16, 0)
    assert len(programs.store) >= 3000
    mixed, numbers = Mixed(text, programs, 0.05), np.arange(200)
    same = (mixed.batch(numbers) == text.batch(numbers)).all(1)
    assert (~same).sum() == 10
    assert mixed.num_targets(numbers) == 200 * 15
    longer = [{text for text in training_programs(20_000, seed) if len(text) > 150} for seed in (0, 1)]
    assert len(longer[0]) > 20
    assert longer[0].isdisjoint(longer[1])


def test_a_folder_that_came_out_short_is_made_again(tokens, monkeypatch):
    asked = []
    monkeypatch.setattr(
        programs, "training_programs", lambda n, seed: training_programs(asked.append(n) or n // 4, seed)
    )
    assert len(TokenStore(program_tokens(tokens, 2000, seed=7))) >= 2000
    assert len(asked) > 1


def test_exact_answers_are_scored(tokens):
    tokenizer = load_tokenizer(str(tokens / "tokenizer.json"))
    program = write_program("repl", 4)
    context, answer = split_tokens(tokenizer, program)
    assert tokenizer.decode(answer, skip_special_tokens=False).strip() == program.answer
    assert context + answer == tokenizer.encode(program.text, add_special_tokens=False).ids
    asked = questions(tokens / "tokenizer.json", 3)
    assert [(q.kind, q.times) for q in asked] == [(kind, times) for kind in KINDS for times in TIMES]
    torch.manual_seed(0)
    model = ComplexKDAForCausalLM(config_of("tiny:ckda"))
    found = score(model, [q for q in asked if q.times == 1])
    assert model.training
    assert set(found) == set(KINDS)
    assert all(0 <= share["1x"] <= 0.5 for share in found.values())  # an untrained model knows no answer


def test_a_unit_with_programs_is_trained_and_asked(tokens):
    unit = Unit("p", "tiny:kda", "A", 0, (640,), lr=1e-2, batch=2, length=32, warmup=2, programs=0.05)
    at = Conditions(str(tokens), dtype="fp32", eval_tokens=128, look_sequences=1, look_sample=1, tests=1)
    found = run_unit(unit, at)["cells"][0]["programs"]
    assert {kind: list(lengths) for kind, lengths in found.items()} == {kind: ["1x", "2x", "4x"] for kind in KINDS}
