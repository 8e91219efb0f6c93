"""docs/architecture.md names files and functions that are there, and the kernels that an H100 would run."""

import re
from pathlib import Path

import pytest
import torch

from ckda.ops.call import Call
from ckda.ops.triton import hopper

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def test_it_is_short():
    lines = PAGE.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 140


def test_its_files_are_there():
    paths = set(re.findall(r"`((?:ckda|tests)/[\w/.]+)`", PAGE))
    assert len(paths) > 30
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_its_functions_are_there():
    named = re.findall(r"`(ckda/[\w/]+\.py)`\s+`(\w+)`", PAGE)
    assert len(named) > 25
    missing = [
        (path, name)
        for path, name in named
        if not re.search(rf"^(?:(?:def|class) )?{name}\b|^{name}\b", (ROOT / path).read_text(), flags=re.M)
    ]
    assert not missing


def _call(T=2048, dtype=torch.bfloat16, gate="signed", beta_range=2, packed=False, width=128, separate=False):
    x = torch.empty(1, T, 2, width, dtype=dtype, device="meta")
    cu = torch.tensor([0, 100, T]) if packed else None
    if separate:
        return Call(x, x, x, x, None, erase=x, write=x, gate=gate)
    return Call(x, x, x, x, x[..., 0], cu_seqlens=cu, gate=gate, beta_range=beta_range)


@pytest.mark.parametrize(
    ("row", "call"),
    [
        ("signed gate, logit of beta, T = 2048", _call()),
        ("the same, packed sequences (`cu_seqlens`)", _call(packed=True)),
        ("the same, T = 2000, no multiple of 32", _call(T=2000)),
        ("the same in float16", _call(dtype=torch.float16)),
        ("the same in float32", _call(dtype=torch.float32)),
        ("the same with heads of 96", _call(width=96)),
        ("the same with heads of 100, filled up to 104 (`ckda/ops/triton/hopper/fit.py` `fit`)", _call(width=100)),
        ("the same with separate erase and write gates", _call(separate=True)),
        (r"log\|alpha\| and beta given (`gate=None`, `beta_range=None`)", _call(gate=None, beta_range=None)),
    ],
)
def test_the_table_says_what_an_h100_runs(row, call):
    (form,) = re.findall(rf"^\| {re.escape(row)} \| (\S+) \|$", PAGE, flags=re.M)
    assert form == ("triton-portable" if hopper.unfit(call) else "triton-hopper")
