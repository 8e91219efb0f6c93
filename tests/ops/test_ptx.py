"""The kernels as compiled for compute capability 9, by the 2x rule and without a race, on a CPU: tests/ops/ptx.py.

In processes of their own, for a process in which Triton interprets compiles nothing.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from ckda.ops.triton import hopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available() or not hopper.tried(), reason="for a CPU, and the Triton of the kernels"
    ),
]

ONE = '"B": 1, "H": 1, "initial": True'
BF16, FP16, FP32 = ('"dtype": torch.' + kind for kind in ("bfloat16", "float16", "float32"))
#: backend and arguments of make_call; more chunks than a program's stages, every layout of the gradient kernel
CASES = {
    "signed": ("triton-hopper", f'{ONE}, {BF16}, "T": 160, "K": 64, "V": 64, "A_log": True, "dt_bias": True'),
    "softplus": ("triton-hopper", f'{ONE}, {BF16}, "T": 100, "K": 128, "V": 128, "gate": "softplus", "A_log": True'),
    "given, packed, float16, groups": (
        "triton-hopper",
        f'{ONE}, {FP16}, "HV": 2, "T": 70, "K": 96, "V": 40, "gate": None, "beta_range": None, '
        '"cu_seqlens": [0, 0, 33, 34, 70]',
    ),
    "wide, separate": (
        "triton-hopper",
        f'{ONE}, {BF16}, "T": 70, "K": 256, "V": 200, "gate": "sigmoid", "separate": True',
    ),
    "filled up, beta given": (
        "triton-hopper",
        f'{ONE}, {BF16}, "T": 70, "K": 130, "V": 60, "beta_range": None, "dt_bias": True, "cu_seqlens": [0, 0, 33, 70]',
    ),
    "heads of 16": ("triton-hopper", f'{ONE}, {BF16}, "T": 70, "K": 16, "V": 24, "A_log": True, "dt_bias": True'),
    "portable, float32": (
        "triton-portable",
        f'{ONE}, {FP32}, "T": 40, "K": 64, "V": 24, "A_log": True, "dt_bias": True',
    ),
    # passes of four warps, a block of channels each; the last one is not full
    "portable, float32, blocks": (
        "triton-portable",
        f'{ONE}, {FP32}, "T": 40, "K": 100, "V": 20, "gate": "sigmoid", "separate": True',
    ),
    "portable, bfloat16": ("triton-portable", f'{ONE}, {BF16}, "T": 40, "K": 24, "V": 24, "gate": "softplus"'),
}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_keep_the_rule_in_any_order_of_warps(case: str) -> None:
    backend, settings = CASES[case]
    done = _python("-m", "tests.ops.ptx", backend, f"{{{settings}}}", str(list(CASES).index(case)))
    assert done.returncode == 0, done.stderr[-4000:]


_ITEMS = """
import torch
from tests.ops import ptx
from tests.ops.test_hopper import SHARES, _items
for programs, share, places in ((1, 0.02, "packed"), (3, 0.5, "ragged"), (70, 0.02, "packed")):
    for LEAST, MOST, WHICH in SHARES:
        launch, wanted, taken = _items(programs, share, LEAST, MOST, WHICH, places, HALVES=1 + programs % 2)
        ptx.run_launch(launch, set())
        print(torch.equal(taken, wanted), programs, share, LEAST, MOST, WHICH)
"""


def test_compiled_programs_find_their_items() -> None:
    done = _python("-c", _ITEMS)
    lines = done.stdout.splitlines()
    assert len(lines) == 27, done.stderr[-4000:]
    assert all(line.startswith("True") for line in lines), lines


_WEAK = """
from tests.ops import ptx
from tests.ops.test_hopper import weak_gates
launch, wanted, found = weak_gates()
ptx.run_launch(launch, set())
print(((found == wanted) | (found.isnan() & wanted.isnan())).all().item(), (wanted == -28).sum().item() > 9)
"""


def test_weak_gates_within_blocks_are_taken_for_less_weak_ones() -> None:
    done = _python("-c", _WEAK)
    assert done.stdout.split() == ["True", "True"], done.stderr[-4000:]


_WITHOUT = """
import re, torch
from tests.ops import ptx
from tests.ops.common import make_call, run
parsed = ptx._parsed
for without, complaint in (("fence.proxy", "no fence: "), ("bar.sync", "race: ")):
    def less(text):
        code, labels, tables = parsed(text)
        kept = [("0", False, *x[2:]) if x[2].startswith(without) else x for x in code]
        return kept, labels, tables
    ptx._parsed = less
    with ptx.on_cpu() as complaints:
        run(make_call(1, 64, 1, None, 64, 64, dtype=torch.bfloat16), "triton-hopper")
    print(without, any(complaint in x for x in complaints))
"""


def test_a_missing_fence_or_barrier_is_seen() -> None:
    done = _python("-c", _WITHOUT)
    assert done.stdout.splitlines() == ["fence.proxy True", "bar.sync True"], done.stderr[-4000:]
