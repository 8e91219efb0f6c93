"""Every kernel compiled for GPUs that are not there, in a process of its own: Triton decides at import whether it interprets."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import pytest

from ckda.ops import triton

pytest.importorskip("triton")

#: compute capability -> the calls (EXAMPLES of ckda/ops/triton/compile.py) whose kernels are compiled. Those of sm_90 have every
#: kernel, both precisions, gates with and without a bound, and packed sequences; wide heads take the most shared memory.
WANTED = {
    90: [
        "bf16 128x128",
        "bf16 64x64, groups",
        "bf16 32x32 given, packed",
        "fp32 16x16",
        "fp32 128x128",
        "fp32 256x256",
        "bf16 256x256",
        "bf16 256x256 softplus",
        "bf16 200x60 given, packed",
    ],
    80: ["bf16 64x64, groups"],
    89: ["bf16 16x16", "fp32 128x128"],
    100: ["bf16 16x16"],
}

#: bytes that one program may have: 227, 163 and 99 KiB
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}

#: bytes of local memory a thread, for the main kernels on Hopper: below this they stay in the first cache
SPILLS_LIMIT = 256

_PROGRAM = """
import json, sys
from ckda.ops.triton.compile import EXAMPLES, rows
EXAMPLES["bf16 16x16"] = {"K": 16, "V": 16}
EXAMPLES["fp32 256x256"] = EXAMPLES["fp32 128x128"] | {"K": 256, "V": 256}
EXAMPLES["bf16 200x60 given, packed"] = {
    "K": 200, "V": 60, "gate": None, "packed": True, "beta_range": None, "backend": "triton-hopper"
}
EXAMPLES["bf16 32x32 given, packed"] = {"K": 32, "V": 32, "gate": None, "packed": True}
for capability, names in json.loads(sys.argv[1]).items():
    for name, kernel, x in rows(int(capability), names):
        print(json.dumps([int(capability), name, kernel, x._asdict()]), flush=True)
"""


@pytest.fixture(scope="module")
def compiled() -> list[tuple[int, str, str, dict[str, int]]]:
    """(capability, call, kernel, resources) of every launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(WANTED)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    print(f"\n{'sm':>4} {'call':28}{'kernel':28}{'registers':>10}{'spills':>8}{'shared':>8}{'warps':>6}")
    for capability, name, kernel, x in found:
        print(f"{capability:4} {name:28}{kernel:28}{x['registers']:10}{x['spills']:8}{x['shared']:8}{x['warps']:6}")
    return found


def test_every_kernel_compiles(compiled: list[Any]) -> None:
    hopper = import_module("ckda.ops.triton.hopper")
    found = walk_packages(triton.__path__, "ckda.ops.triton.")
    modules = [import_module(x.name) for x in found if hopper.tried() or "hopper" not in x.name]
    defined = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert len(defined) >= 7
    assert {kernel for capability, _, kernel, _ in compiled if capability == 90} == defined
    for capability, names in WANTED.items():
        assert {name for c, name, _, _ in compiled if c == capability} == set(names)


def test_shared_memory_fits_the_chip(compiled: list[Any]) -> None:
    beyond = [row for row in compiled if row[3]["shared"] > SHARED_LIMIT[row[0]]]
    assert not beyond, beyond


def test_products_start_small(compiled: list[Any]) -> None:
    """1.5 * 2^23 as an accumulator cost the count of negative gates its last bit on an H200."""
    large = [row for row in compiled if row[3]["start"] > 2.0**16]
    assert not large, large


def test_the_main_kernels_hardly_spill(compiled: list[Any]) -> None:
    main = [row for row in compiled if row[:2] == (90, "bf16 128x128")]
    assert len(main) >= 7
    main += [row for row in compiled if row[:2] == (90, "bf16 256x256") and row[2].startswith("hopper")]
    assert len(main) >= 11
    if main[0][3]["registers"] < 0:
        pytest.skip("this build of Triton has no cuobjdump to read registers with")
    spilled = {row[2]: row[3]["spills"] for row in main if row[3]["spills"] > SPILLS_LIMIT}
    assert not spilled, spilled


#: places where the warps of a kernel wait for each other, the most of its launches. The compiler sets a barrier between two stores
#: into one allocation, whichever parts of it they are: the gradient kernel had 21 for the 10 it has, and with borders 37 for 16
BARRIERS_LIMIT = {
    ("bf16 128x128", "hopper_intra_kernel"): 8,
    ("bf16 128x128", "hopper_state_kernel"): 9,
    ("bf16 128x128", "hopper_reverse_kernel"): 8,
    ("bf16 128x128", "hopper_gradient_kernel"): 10,
    ("bf16 256x256 softplus", "hopper_gradient_kernel"): 20,
}


def test_warps_wait_for_each_other_no_more_than_they_must(compiled: list[Any]) -> None:
    for (name, kernel), limit in BARRIERS_LIMIT.items():
        counts = [row[3]["barriers"] for row in compiled if row[:3] == (90, name, kernel)]
        assert counts, (name, kernel)
        assert max(counts) <= limit, (name, kernel, counts)


def test_the_passes_of_float32_do_not_spill(compiled: list[Any]) -> None:
    """What made them faster: a warp holds its own channels of the state, and not all of them."""
    passes = {
        (kernel, x["spills"], x["registers"])
        for capability, call, kernel, x in compiled
        if (capability, call) == (90, "fp32 128x128") and kernel.startswith("wide")
    }
    assert {kernel for kernel, *_ in passes} == {"wide_state_kernel", "wide_reverse_kernel"}
    if min(registers for *_, registers in passes) < 0:
        pytest.skip("this build of Triton has no cuobjdump to read registers with")
    assert not [x for x in passes if x[1] > 0], passes


def test_another_triton_takes_the_portable_kernels() -> None:
    """Gluon is experimental: with a version it was not tried on, or without it, nothing of it is imported."""
    program = """
import sys, torch, triton
triton.__version__ = "9.9.0"
sys.modules["triton.experimental.gluon"] = None
from ckda.ops.triton import compile, hopper
call = compile.example()
names = {x.kernel.__name__ for x in compile.launches(call, 90)}
assert "state_kernel" in names and not any(name.startswith("hopper") for name in names), names
torch.cuda.get_device_capability = lambda device: (9, 0)
assert "9.9.0" in hopper._device_refuses(torch.device("cuda"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
