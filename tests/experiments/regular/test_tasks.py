"""Every generator against its definition, word by word in plain Python."""

import itertools

import pytest
import torch

from ckda.experiments.regular.tasks import TASKS, UNASKED, evaluate, scaled_scores
from ckda.groups import group

SYMBOLS = "01234+-*() "


def draw(name, size=64, shortest=1, longest=33):
    return TASKS[name].words(size, shortest, longest, torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("parity", lambda word: word.count(1) % 2),
        ("even-pairs", lambda word: 1 - sum(a != b for a, b in itertools.pairwise(word)) % 2),
        ("cycle", lambda word: (word.count(1) - word.count(2)) % 5),
    ],
)
def test_answers_after_every_letter(name, answer):
    x, y = draw(name)
    for word, answers in zip(x.tolist(), y.tolist(), strict=True):
        assert answers == [answer(word[: t + 1]) for t in range(len(word))]
    assert set(y.flatten().tolist()) == set(range(TASKS[name].num_classes))


def test_arithmetic_is_what_python_says():
    x, y = draw("arithmetic")
    for word, answers in zip(x.tolist(), y.tolist(), strict=True):
        text = "".join(SYMBOLS[letter] for letter in word)
        for t, answer in enumerate(answers):
            assert answer == eval(text[: t + 1 - t % 2]) % 5, "an operation does not change the value"


def test_bracketed_expressions_are_what_python_says():
    x, y = draw("brackets", 200, 10, 43)
    lengths = set()
    for word, answers in zip(x.tolist(), y.tolist(), strict=True):
        text = "".join(SYMBOLS[letter] for letter in word).rstrip()
        lengths.add(len(text))
        assert [t for t, answer in enumerate(answers) if answer != UNASKED] == [len(text) - 1]
        assert answers[len(text) - 1] == eval(text) % 5
        assert text.count("(") == text.count(")") == sum(text.count(op) for op in "+-*")
    assert lengths == set(range(13, 42, 4))


def test_brackets_nest_on_both_sides():
    x, _ = draw("brackets", 200, 9, 9)
    texts = {
        "".join("d" if c.isdigit() else "o" if c in "+-*" else c for c in (SYMBOLS[i] for i in row))
        for row in x.tolist()
    }
    assert texts == {"((dod)od)", "(do(dod))"}


def test_permutations_move_places():
    x, y = draw("S5", 4, longest=9)
    moves, G = ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0)), group("S5")
    for word, answers in zip(x.tolist(), y.tolist(), strict=True):
        places = list(range(5))
        for letter, answer in zip(word, answers, strict=True):
            places = [moves[letter][p] for p in places]
            assert G.labels[answer] == tuple(places)
    assert len(set(draw("S5", 64, longest=60)[1].flatten().tolist())) == 120


def test_a_trace_prints_what_the_variables_hold():
    x, y = draw("trace", longest=34)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for word, nexts in zip(x.tolist(), y.tolist(), strict=True):
        tokens, held = [*word, nexts[-1]], list(range(5))
        for statement in (tokens[i : i + 3] for i in range(0, 33, 3)):
            kind, a, b = statement
            assert a < 5
            if kind == 10:
                assert a != b
                held[a], held[b] = held[b], held[a]
            else:
                assert (kind, b - 5) == (11, held[a])
    assert TASKS["trace"].scored(y).sum() == (x == 11)[:, :-1].sum()


def test_recall_asks_each_pair_once():
    x, y = draw("recall", longest=30, shortest=8)
    counts = set()
    for word, answers in zip(x.tolist(), y.tolist(), strict=True):
        asked = [t for t, answer in enumerate(answers) if answer != UNASKED]
        N = len(asked)
        counts.add(N)
        pairs = {word[2 * i]: word[2 * i + 1] - 128 for i in range(N)}
        assert asked == list(range(2 * N, 3 * N))
        assert {word[t]: answers[t] for t in asked} == pairs
        assert len(pairs) == N
        assert set(word[3 * N :]) <= {192}
    assert counts == set(range(3, 11))
    with pytest.raises(ValueError, match="3 to 384"):
        draw("recall", longest=2048)


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_asks_what_is_defined(name):
    task = TASKS[name]
    x, y = task.batch(200, 40, torch.Generator().manual_seed(1))
    assert (x[:, 0] == task.num_letters).all()
    assert x[:, 1:].max() < task.num_letters
    asked = (y != UNASKED).sum(1)
    assert (asked >= 1).all()
    if task.whole:
        assert len(set((y != UNASKED).long().argmax(1).tolist())) > 8, "words of many lengths"


@pytest.mark.parametrize(
    ("name", "shortest", "longest"), [("cycle", 40, 64), ("brackets", 9, 41), ("recall", 8, 30), ("trace", 5, 20)]
)
def test_a_model_that_knows_has_one_and_one_that_guesses_has_zero(name, shortest, longest):
    task = TASKS[name]
    x, y = task.words(50, shortest, longest, torch.Generator().manual_seed(1_000_000 + longest))
    truth = torch.nn.functional.one_hot(
        torch.cat([torch.zeros(50, 1).long(), y.clamp_min(0)], 1), task.num_classes
    ).float()

    def oracle(tokens, cache):
        first = cache or 0
        assert torch.equal(tokens[0], task.begun(x)[:, first : first + tokens.shape[2]])
        part = truth[None, :, first : first + tokens.shape[2]]
        return torch.cat([part, torch.roll(part, 1, -1)]), first + tokens.shape[2]

    right, wrong = scaled_scores(
        task, evaluate(oracle, task, 2, 50, shortest, longest, "cpu", segment=7), shortest, longest
    )
    assert right == pytest.approx(1)
    assert wrong == pytest.approx(-task.chance / (1 - task.chance))
