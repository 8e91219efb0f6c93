"""The operator on words over a small alphabet: against the operator itself, its kernels against plain torch, and in training."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
import torch

from ckda import complex_kda
from ckda.experiments.tracking.fast import words
from ckda.experiments.tracking.fast.words import (
    MOST_ROWS,
    Options,
    RawTables,
    Tables,
    _by_kernel,
    complex_kda_words,
    rows_of,
    sum_by_symbol,
    torch_backward,
    torch_forward,
    torch_sum_by_symbol,
    torch_tables,
    torch_tables_backward,
)
from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem
from ckda.layers import ComplexKDA
from ckda.train import Ensemble, Recipe

GATES = [("signed", 2, True), ("sigmoid", 1, True), ("softplus", 2, True), (None, None, False)]


def draw(R, n, H, K, V, gate, dtype=torch.float64, device="cpu"):
    """Raw tables, gates given as logarithms if not by name."""
    normal = partial(torch.randn, dtype=dtype, device=device)
    g = normal(R, n, H, K) if gate else -normal(R, n, H, K).abs()
    named = (normal(R, H), normal(R, H * K)) if gate else (None, None)
    return RawTables(normal(R, n, H, K), normal(R, n, H, K), normal(R, n, H, V), g, normal(R, n, H), *named)


@pytest.mark.parametrize(("gate", "beta_range", "normalize"), GATES)
def test_it_is_the_operator_on_the_rows(gate, beta_range, normalize):
    """Values and gradients of three replicas at once, in float64, against the recurrence one by one."""
    torch.manual_seed(0)
    raw = draw(3, 5, 2, 8, 6, gate)
    tensors = [x.requires_grad_() for x in raw if x is not None]
    tokens = torch.randint(5, (3, 4, 9))
    options = {"gate": gate, "beta_range": beta_range, "normalize_qk": normalize}

    def by_words(q, k, v, g, beta, tokens, *named):
        named = dict(zip(("A_log", "dt_bias"), named, strict=False))
        return complex_kda_words(q, k, v, g, beta, tokens, **options, **named)

    def by_rows(q, k, v, g, beta, tokens, *named):
        named = dict(zip(("A_log", "dt_bias"), named, strict=False))
        rows = (x[tokens] for x in (q, k, v, g, beta))
        return complex_kda(*rows, **options, **named, backend="reference")[0]

    arguments = [*tensors[:5], tokens, *tensors[5:]]
    found = torch.vmap(by_words)(*arguments)
    wanted = torch.stack([by_rows(*(x[r] for x in arguments)) for r in range(3)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(by_words(*(x[1] for x in arguments)), wanted[1])
    weight = torch.randn_like(wanted)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), tensors) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_words_are_cut_where_the_states_are_many(monkeypatch):
    """One word at a time: the same numbers, and the same sums but for rounding."""
    torch.manual_seed(0)
    x = Tables(*(torch.randn(6, 5, size, dtype=torch.float64) for size in (4, 4, 4, 3)), torch.rand(6, 5).double())
    tokens = torch.randint(5, (2, 7, 9))
    whole = torch_forward(x, tokens)
    gradient = torch_backward(*whole, x, tokens)
    monkeypatch.setattr(words, "_STATE_NUMBERS", 1)
    assert all(torch.equal(a, b) for a, b in zip(torch_forward(x, tokens), whole, strict=True))
    torch.testing.assert_close(torch_backward(*whole, x, tokens), gradient)


def test_rows_are_an_embedding():
    table, tokens = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True), torch.randint(6, (2, 5, 13))
    found = torch.vmap(rows_of)(table, tokens)
    wanted = torch.stack([t[i] for t, i in zip(table, tokens, strict=True)])
    assert torch.equal(found, wanted)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), [table]) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    shared = torch.vmap(rows_of, in_dims=(0, None))(table, tokens[0])
    torch.testing.assert_close(shared[1], table[1][tokens[0]])


def test_sums_are_the_same_bits_again():
    rows, tokens = torch.randn(2, 640, 48), torch.randint(7, (2, 640))
    assert torch.equal(sum_by_symbol(rows, tokens, 7), sum_by_symbol(rows, tokens, 7))
    exact = torch.stack(
        [torch.zeros(7, 48).double().index_add(0, t, x.double()) for x, t in zip(rows, tokens, strict=True)]
    )
    torch.testing.assert_close(sum_by_symbol(rows, tokens, 7).double(), exact, rtol=1e-5, atol=1e-4)


# Kernels ----------------------------------------------------------------------------------------------------------------


def check_kernels(device, R, B, T, H, n, K, V, gate, beta_range, normalize):
    """Every kernel against the plain operations in float64."""
    from ckda.experiments.tracking.fast import words_kernels as kernels

    torch.manual_seed(0)
    raw = draw(R, n, H, K, V, gate, torch.float32, device)
    exact = RawTables(*(None if x is None else x.double() for x in raw))
    options = Options(gate, beta_range, normalize, K**-0.5)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_dtype=False)
    wanted_tables = torch_tables(exact, options)
    tables = kernels.tables(raw, options)
    for a, b in zip(tables, wanted_tables, strict=True):
        close(a, b)
    if not normalize:  # keys of length 1, or the state grows
        tables[1] /= tables[1].norm(dim=-1, keepdim=True)
    x = Tables(*(y.double() for y in tables))
    tokens = torch.randint(n, (R, B, T), device=device)
    o, r = kernels.forward(Tables(*tables), tokens)
    wanted_o, wanted_r = torch_forward(x, tokens)
    close(o, wanted_o)
    close(r, wanted_r)
    do, num = torch.randn_like(o), H * (3 * K + V + 1)
    found = sum_by_symbol(kernels.backward(do, r, Tables(*tables), tokens), tokens.flatten(1), n)[..., :num]
    close(found, torch_backward(do.double(), wanted_r, x, tokens)[..., :num], atol=1e-3)
    rows = torch.randn(R, 70, 50, device=device)
    letters = torch.randint(n, (R, 70), device=device)
    close(kernels.sum_by_symbol(rows, letters, n), torch_sum_by_symbol(rows.double(), letters, n))
    sums = torch.randn(R, n, kernels._rows(x, tokens).shape[-1], device=device)
    parts = kernels.tables_backward(sums, raw, options)
    for a, b in zip(parts, torch_tables_backward(sums.double(), exact, options), strict=True):
        assert (a is None) == (b is None)
        if a is not None:  # dlog is no gradient of a real loss here: where alpha is small that of g is large
            close(a, b, rtol=1e-3, atol=1e-3)


SHAPES = [(2, 3, 5, 2, 4, 16, 16), (1, 2, 9, 3, 20, 5, 12), (2, 1, 4, 1, 3, 32, 20)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("gate", "beta_range", "normalize"), [GATES[0], GATES[1], GATES[3]])
def test_kernels_in_the_interpreter(shape, gate, beta_range, normalize):
    pytest.importorskip("triton")
    check_kernels("cpu", *shape, gate, beta_range, normalize)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (3, 64, 33, 12, 25, 16, 16)])
@pytest.mark.parametrize(("gate", "beta_range", "normalize"), GATES)
def test_kernels_on_a_gpu(shape, gate, beta_range, normalize):
    check_kernels("cuda", *shape, gate, beta_range, normalize)


# Training ---------------------------------------------------------------------------------------------------------------


def trained(words, mixer="ckda", device="cpu", seeds=(0, 1), **changes):
    """Losses of some updates, words looked up by symbol or every token projected."""
    task = WordProblem.named("S3")
    recipe = Recipe(**{"steps": 6, "batch": 8, "curriculum": (5,)} | changes)
    ensemble = Ensemble(partial(build_tracker, mixer, task, by_symbol=words), task, recipe, seeds, device)
    return torch.stack([ensemble.train_step() for _ in range(6)])


@pytest.mark.parametrize("mixer", ["ckda", "kda", "gdn", "deltanet"])
def test_training_is_the_same(mixer):
    found, wanted = (trained(words, mixer) for words in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_training_with_a_penalty_is_the_same():
    found, wanted = (trained(words, penalties={"closure": 0.1}) for words in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


class OnCard(torch.Tensor):
    """What says that it lies on a GPU."""

    is_cuda = True


def test_the_kernels_take_float32_alone():
    pytest.importorskip("triton")
    narrow, wide = (torch.zeros(2, 3, dtype=x).as_subclass(OnCard) for x in (torch.float32, torch.float64))
    assert _by_kernel(narrow, None)
    assert not _by_kernel(narrow, wide)
    assert not _by_kernel(torch.zeros(2, 3))


def test_who_reads_words():
    """Layers whose tokens stand for themselves, of an alphabet that the kernels hold."""
    tokens = torch.zeros(2, 5, dtype=torch.long)
    there = tokens.as_subclass(OnCard)
    task = WordProblem.named("S3")
    by_symbol = {}
    for name in ("ckda", "gdn", "ckda-separate", "deltaproduct2"):
        mixer = build_tracker(name, task).mixer
        by_symbol[name] = words.is_by_symbol(mixer)
        for where in (tokens, there):
            assert not words.serves(mixer, where, MOST_ROWS + 1)
            assert words.serves(mixer, where, MOST_ROWS) == by_symbol[name]
    assert by_symbol == {"ckda": True, "gdn": True, "ckda-separate": False, "deltaproduct2": False}
    assert not words.is_by_symbol(ComplexKDA(8, 1, 4))  # its convolution looks back
    assert not words.is_by_symbol(ComplexKDA(8, 1, 4, conv_size=0, initial_state="learned"))
    assert not words.serves(ComplexKDA(8, 1, 4, conv_size=0, backend="reference"), tokens, 7)
    assert not words.serves(ComplexKDA(8, 1, 4, conv_size=0).double(), tokens, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["ckda", "gdn"])
def test_training_on_a_gpu_is_the_same(mixer):
    options = {"device": "cuda", "seeds": (0, 1, 2), "batch": 64, "curriculum": (16,)}
    found, wanted = (trained(words, mixer, **options) for words in (True, False))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


_COMPILE = """
import json, torch
from ckda.experiments.tracking.fast.words import Options, RawTables
from ckda.experiments.tracking.fast.words_kernels import launches
from ckda.ops.triton.compile import compile_launch, resources
x, per_head, bias = torch.empty(3, 7, 2, 16), torch.empty(3, 2), torch.empty(3, 32)
raw = RawTables(x, x, x, x, x[..., 0], per_head, bias)
for launch in launches(raw, Options("signed", 2, True, 0.25), torch.zeros(3, 4, 33, dtype=torch.long)):
    print(json.dumps([launch.kernel.__name__, resources(compile_launch(launch, 90))._asdict()]))
"""


def test_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    defined = {
        name for name in vars(import_module("ckda.experiments.tracking.fast.words_kernels")) if name.endswith("_kernel")
    }
    assert {name for name, _ in found} == defined
    assert all(x["shared"] <= 227 << 10 for _, x in found), found
