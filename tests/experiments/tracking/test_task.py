"""Word problems: letters, tables, the shell game, penalties, tests that carry their state."""

import json
from itertools import permutations, product

import numpy as np
import pytest
import torch

from ckda import transition
from ckda.experiments.common.closure import closure
from ckda.experiments.tracking import shuffled_objects
from ckda.experiments.tracking.model import build_tracker, icosahedral_quaternions
from ckda.experiments.tracking.task import (
    WordProblem,
    correct_in_passing,
    correct_products,
    read_table,
    scaled_accuracy,
    shell_game,
)
from ckda.groups import group, hamilton


def test_the_shell_game_is_what_happens_to_cups():
    task = shell_game(4, noise=2)
    x, y = task.batch(8, 30, torch.Generator().manual_seed(1))
    assert task.num_tokens == 6 + 2 + 1
    for word, said in zip(x[:, 1:].tolist(), y.tolist(), strict=True):
        cups = [0, 1, 2, 3]  # cups[i]: the place of cup i
        for token, element in zip(word, said, strict=True):
            if token < 6:
                a, b = (i for i, image in enumerate(task.group.labels[task.meaning[token]]) if image != i)
                cups = [{a: b, b: a}.get(place, place) for place in cups]
            assert tuple(cups) == task.group.labels[element]


@pytest.mark.parametrize(("name", "generated"), [("S4", 24), ("A5", 60), ("Q8", 8), ("Z2xZ3", 6)])
def test_generators_generate(name, generated):
    task = WordProblem.named(name)
    assert len(task.group.generate(task.over("generators").letters)) == generated


def test_unknown_letters_are_refused():
    with pytest.raises(ValueError, match="letters is 'vowels'"):
        WordProblem.named("S3").over("vowels")


def test_tables(tmp_path):
    path = tmp_path / "klein.json"
    path.write_text(
        json.dumps([["e", "a", "b", "c"], ["a", "e", "c", "b"], ["b", "c", "e", "a"], ["c", "b", "a", "e"]])
    )
    G = read_table(path)
    assert G.order == 4
    assert G.orders == [1, 2, 2, 2]
    assert WordProblem(G, (0, 1, 2, 3)).names() == ["e", "a", "b", "c"]
    path.write_text("[[0, 1], [1, 1]]")
    with pytest.raises(ValueError, match="inverses"):
        read_table(path)
    path.write_text("[[0, 1]]")
    with pytest.raises(ValueError, match="no square table"):
        read_table(path)
    path.write_text('[["e", "a"], ["a", "x"]]')
    with pytest.raises(ValueError, match="first row must list"):
        read_table(path)


def test_carrying_the_state_changes_no_answer():
    torch.manual_seed(0)
    task = WordProblem.named("S3")
    model = build_tracker("ckda", task)

    def prefill(x, cache):
        logits, cache = model.prefill(x[0], cache)
        return logits[None], cache

    whole = correct_products(lambda x: model(x[0])[None], task, 1, 16, 40, "cpu")
    carried = correct_in_passing(prefill, task, 1, 16, 40, "cpu", segment=7)
    assert torch.equal(whole.double().mean(1), carried)
    assert scaled_accuracy(carried[0], (40,), 6) == scaled_accuracy(whole[0], (40,), 6)


def test_closure_against_the_definition():
    torch.manual_seed(0)
    o, label = torch.randn(2, 5, 6, 3, 4), torch.randint(7, (2, 5, 6))
    expected = []
    for r in range(2):
        heads = []
        for h in range(3):
            inside = sum(((v := o[r, :, :, h][label[r] == c]) - v.mean(0)).square().sum() for c in label[r].unique())
            heads.append(inside / o[r, :, :, h].square().sum())
        expected.append(torch.stack(heads).mean())
    torch.testing.assert_close(closure(o, label, 7), torch.stack(expected))


def test_penalties_vanish_where_they_should():
    """A model of Z2 by hand: the transition is -1 or 1, the readout the product."""
    task = WordProblem.named("Z2")
    x, y = task.batch(4, 9, torch.Generator().manual_seed(0))
    x, y = x[None], y[None]
    readout = torch.where(y == 1, -1.0, 1.0)[..., None, None]
    trace = {
        "x": x,
        "o": torch.cat([torch.ones(1, 4, 1, 1, 1), readout], 2),
        "A": torch.tensor([1.0, -1.0]).view(1, 2, 1, 1, 1),
        "b": torch.tensor([0.0, 3.0]).view(1, 2, 1, 1, 1),
        "start": torch.zeros(1, 1, 1, 1),
        "alpha": torch.tensor([1.0, -1.0]).view(1, 2, 1, 1),
        "beta": torch.tensor([0.0, 2.0]).view(1, 2, 1),
    }
    names = ("closure", "defect", "homomorphism", "relations", "sharp", "sampled")
    for name in names:
        least = {"relations": 1e-8, "sharp": 1e-4, "sampled": 1e-4}.get(name, 1e-10)
        assert float(task.penalty(name, trace, y)) < least, name
    broken = trace | {
        "o": trace["o"] * torch.rand(1, 4, 10, 1, 1),
        "A": 0.9 * trace["A"],
        "alpha": 0.9 * trace["alpha"],
    }
    for name in names:
        assert float(task.penalty(name, broken, y)) > 1e-3, name
    with pytest.raises(ValueError, match="no penalty 'beauty'"):
        task.penalty("beauty", trace, y)


def test_relations_hold_for_quaternions_and_not_for_their_neighbours():
    """S -> q S q is exact and no representation; other keys, smaller gates or other values break it."""
    task = WordProblem.named("A5")
    q = torch.from_numpy(icosahedral_quaternions(task.group))
    signs = torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64)
    C = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    C[0] = 0

    def trace(q, v, alpha=signs):
        b = 2 * q.unsqueeze(-1) * v.unsqueeze(-2)
        A = transition.dense(alpha, q, 2.0)
        return {"A": A[None, :, None], "b": b[None, :, None], "start": torch.zeros(1, 1, 4, 3, dtype=torch.float64)}

    noise = 0.01 * torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(1, 1, 1, dtype=torch.long)
    exact = trace(q, q @ C)
    assert float(task.penalty("relations", exact, y)) < 1e-6
    assert float(task.penalty("homomorphism", exact, y)) > 0.1
    turned = torch.nn.functional.normalize(q + noise, dim=-1)
    for broken in (trace(turned, turned @ C), trace(q, q @ C + noise[:, :3]), trace(q, q @ C, 0.99 * signs)):
        assert float(task.penalty("relations", broken, y)) > 1e-5


def test_sampled_relations_are_those_of_the_words_first_letters():
    """Each replica has its own pairs; where the words begin with all pairs, nothing differs."""
    task = WordProblem.named("Z3")
    x = torch.zeros(2, 6, 3, dtype=torch.long)
    x[..., 1:] = torch.stack([task.pairs.T, task.pairs.T.flip(0)])
    generator = torch.Generator().manual_seed(0)
    shapes = {"A": (2, 3, 4, 5, 5), "b": (2, 3, 4, 5, 2), "start": (2, 4, 5, 2)}
    trace = {name: torch.randn(shape, generator=generator) / 30 for name, shape in shapes.items()} | {"x": x}
    trace["A"] = 0.9 * torch.eye(5) + trace["A"]
    y = torch.zeros(2, 6, 2, dtype=torch.long)
    torch.testing.assert_close(task.penalty("sampled", trace, y), task.penalty("sharp", trace, y))
    x[1, :, 1:] = 0
    sampled, sharp = (task.penalty(name, trace, y) for name in ("sampled", "sharp"))
    torch.testing.assert_close(sampled[0], sharp[0])
    assert sampled[1] != sharp[1]


def test_quaternions_multiply_like_a5():
    G = group("A5")
    q = icosahedral_quaternions(G)
    products = np.stack([np.array(hamilton(list(a), list(q.T))).T for a in q])
    assert np.abs((products * q[G.table]).sum(-1)).min() > 1 - 1e-12
    with pytest.raises(ValueError, match="not isomorphic to A5"):
        icosahedral_quaternions(group("S3"))


def test_the_quaternion_start_tracks_a5():
    """From zero the state runs through C - A C: with values C^T q it is the same function of the word at any length."""
    torch.manual_seed(0)
    task = WordProblem.named("A5")
    options = {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": "quaternions"}
    model = build_tracker("ckda", task, **options).double()
    A = model.symbols()["A"][:, 0]
    q = torch.from_numpy(icosahedral_quaternions(task.group))
    flip = torch.diag(torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    expected = (torch.eye(4) - 2 * q[:, :, None] * q[:, None]) @ flip
    assert (A - expected).abs().max() < 1e-4
    C = torch.randn(4, 4, dtype=torch.float64)
    C[0] = 0
    with torch.no_grad():
        model.mixer.v_proj.weight[:4] = 0
        model.mixer.v_proj.weight[:4, :4] = C.T
    x, _ = task.batch(1, 20, torch.Generator().manual_seed(0))
    _, cache = model.prefill(x)
    state = torch.eye(4, dtype=torch.float64)
    for letter in x[0, 1:]:
        state = A[letter] @ state
    torch.testing.assert_close(cache.state[0, 0], C - state @ C, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("start", "negative"), [("orthogonal-half", None), ("orthogonal-quarter", 4)])
def test_orthogonal_starts(start, negative):
    """Half of the heads: beta near 2 and gates near their ends on every input; the other half as before."""
    torch.manual_seed(0)
    model = build_tracker("ckda", WordProblem.named("S4"), beta_init="spread", start=start)
    seen = model.symbols()
    lead = model.mixer.b_proj.bias == 4.0
    assert int(lead.sum()) == 6
    alpha, beta = seen["alpha"][:, lead], seen["beta"][:, lead]
    assert alpha.abs().min() > 0.99
    assert beta.min() > 1.8
    assert seen["beta"][:, ~lead].max() < 1.8
    counts = (alpha < 0).sum(-1)
    assert (counts == counts[:1]).all()
    assert negative is None or (counts == negative).all()


def test_signs_that_differ_from_input_to_input():
    torch.manual_seed(0)
    model = build_tracker("ckda", WordProblem.named("S4"), beta_init="spread", start="orthogonal-by-input")
    lead = model.mixer.b_proj.bias == 4.0
    alpha = model.symbols()["alpha"][:, lead]  # [24, 6, 16]
    assert (alpha.abs() > 0.9).float().mean() > 0.6
    share = (alpha < 0).float().mean(0)
    assert share.min() > 0.05
    assert share.max() < 0.95


def test_s4_is_reflections_times_signs_in_three_dimensions():
    """What the start 'signs' is for: each of the 24 matrices is (I - 2 k k^T) D or D, and no D serves all."""
    basis = torch.tensor([[1, -1, 0], [1, 1, 0], [0, 0, 2**0.5]], dtype=torch.float64) / 2**0.5
    signs = [torch.tensor(s, dtype=torch.float64) for s in product((1, -1), repeat=3)]
    eye = torch.eye(3, dtype=torch.float64)
    elements = [eye[list(p)] * s for p in permutations(range(3)) for s in signs if s.prod() == 1]
    serving = []
    for A in elements:
        rest = [eye - basis @ A @ basis.T * s for s in signs]
        serving.append({i for i, R in enumerate(rest) if torch.linalg.matrix_rank(R, atol=1e-9) <= 1})
    assert len(elements) == 24
    assert all(serving)
    assert not set.intersection(*serving)


def test_questions_of_bigbench():
    """As many as the package has; a question made here otherwise."""
    text = (
        "Alice, Bob, and Claire are playing a game. At the start of the game, they are each holding a ball: Alice has a orange "
        "ball, Bob has a white ball, and Claire has a blue ball. \n\nAs the game progresses, pairs of players trade balls. "
        "First, Alice and Bob swap balls. Then, Bob and Claire swap balls. Finally, Alice and Bob swap balls. At the end of "
        "the game, Alice has the "
    )
    made = [shuffled_objects.parse(text, {"orange ball.": 0, "white ball.": 0, "blue ball.": 1})]
    task = shell_game(3)
    for questions in (made, shuffled_objects.read_questions(3) or made):
        x = shuffled_objects.words(task, questions)
        y = task.products(task.elements(x[:, 1:]))[:, -1]
        assert shuffled_objects.answers(task, questions, y).all()
        assert not shuffled_objects.answers(task, questions, torch.zeros_like(y)).all()
    with pytest.raises(ValueError, match="no question"):
        shuffled_objects.parse("Once upon a time.", {"a": 1})
