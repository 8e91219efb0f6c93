"""``ckda bench --host``: what issuing a call costs the host, and the first call of all.

The GPU works on while the host prepares the next call; where calls are small the host is what takes the time. So here only the
host is timed: 50 calls are issued without waiting, and the median of several rounds is kept. A round starts on an idle GPU.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.bench import sweep
from ckda.layers import ComplexKDA
from ckda.ops import complex_kda, complex_kda_step

__all__ = ["AIMS", "bounds", "first_call", "host_ms", "rows"]

COUNT, ROUNDS = 50, 7
GRAPH_STEPS = 64  #: of decoding in one recorded graph: a graph of one step is bound by the host that replays it

#: what was aimed at, milliseconds of forward+backward, and seconds
AIMS = {"operator, 1 x 1024": 0.5, "operator, 4 x 8192": 0.5, "layer, 1 x 1024": 2.5, "first_call_s": 15.0}

ESTIMATE = 60.0  #: seconds of an H200: one process that compiles, and one more on an empty cache

Calls = dict[str, Callable[[], Any]]

#: forward and backward without autograd's own thread: what handing over to it costs is the difference
ONE_THREAD = "forward+backward, one thread"


class Sizes(NamedTuple):
    """What is measured; the smoke run takes smaller ones."""

    tokens: tuple[tuple[int, int], ...] = ((1, 1024), (4, 8192))
    heads: int = 16
    head_dim: int = 128
    batches: tuple[int, ...] = (1, 16, 64, 256)


SMOKE = Sizes(((1, 64),), heads=2, head_dim=16, batches=(1,))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_ms(call: Callable[[], Any], device: str, count: int = COUNT, rounds: int = ROUNDS) -> float:
    """Milliseconds to issue one call: the mean over `count`, the median over `rounds` of them after a warm-up."""
    for _ in range(3):
        call()
    means = []
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        means.append(1e3 * (time.perf_counter() - start) / count)
    _wait(device)
    return statistics.median(means)


def in_one_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with the backward in the caller's thread."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            call()

    return run


def operator_calls(B: int, T: int, sizes: Sizes, device: str, **changes: Any) -> Calls:
    """Forward, and forward+backward, of the sweep's main row with B x T tokens."""
    H, D = sizes.heads, sizes.head_dim
    call = sweep.inputs(sweep.MAIN._replace(B=B, T=T, H=H, HV=H, K=D, V=D, **changes), device)
    leaves = [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]
    do = torch.randn_like(call["v"])

    def forward() -> None:
        with torch.no_grad():
            complex_kda(**call)

    def both() -> None:
        torch.autograd.grad(complex_kda(**call)[0], leaves, do)

    return {"forward": forward, "forward+backward": both, ONE_THREAD: in_one_thread(both)}


def layer_calls(sizes: Sizes, device: str, autocast: bool = False) -> Calls:
    """Forward, and forward+backward, of the layer of width heads * head_dim, and one token of decoding.

    In bfloat16; with `autocast`, the parameters in float32 and the products in bfloat16.
    """
    B, T = sizes.tokens[0]
    width = sizes.heads * sizes.head_dim
    dtype = torch.float32 if autocast else torch.bfloat16
    layer = ComplexKDA(width, sizes.heads).to(device, dtype)
    x = torch.randn(B, T, width, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(B, T, width, device=device, dtype=torch.bfloat16)
    leaves = [x, *layer.parameters()]
    cast = torch.autocast(device, torch.bfloat16, enabled=autocast)
    with torch.no_grad(), cast:
        _, cache = layer.prefill(x)

    def forward() -> None:
        with torch.no_grad(), cast:
            layer(x)

    def both() -> None:
        with cast:
            y = layer(x)
        torch.autograd.grad(y, leaves, dy)

    def step() -> None:
        with torch.no_grad(), cast:
            layer.step(x[:, 0], cache)

    return {"forward": forward, "forward+backward": both, ONE_THREAD: in_one_thread(both), "step": step}


def token(batch: int, sizes: Sizes, device: str) -> Callable[[], Any]:
    """One token of decoding by the operator, its state in place."""
    H, D = sizes.heads, sizes.head_dim
    call = sweep.inputs(sweep.MAIN._replace(B=batch, T=1, H=H, HV=H, K=D, V=D), device)
    del call["output_final_state"]
    call = {name: x.detach() if isinstance(x, Tensor) else x for name, x in call.items()}
    call |= {name: call[name][:, 0] for name in ("q", "k", "v", "g", "beta")}
    state = torch.randn(batch, H, D, D, device=device)
    return lambda: complex_kda_step(**call, state=state, inplace=True)


def graph_ms(step: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Milliseconds of the GPU for one step, in a recorded graph of :data:`GRAPH_STEPS` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_STEPS):
            step()
    graph.replay()
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / GRAPH_STEPS)
    return statistics.median(times)


_FIRST = """
import time
start = time.perf_counter()
from ckda.bench.host import Sizes, operator_calls
import torch
calls = operator_calls(1, 1024, Sizes(), "cuda")
calls["forward+backward"]()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call() -> float:
    """Seconds from the start of a fresh process, imports included, to the end of forward and backward, Triton's cache empty."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        changed = os.environ | {"TRITON_CACHE_DIR": folder, "PYTHONPATH": paths}
        told = subprocess.run([sys.executable, "-c", _FIRST], env=changed, check=True, capture_output=True, text=True)
    return float(told.stdout.split()[-1])


def rows(sizes: Sizes, device: str, count: int = COUNT) -> dict[str, Any]:
    """All host times, in milliseconds by row and part; on a GPU also the first call and the time of a step in a graph."""
    layer = f"layer, {sizes.tokens[0][0]} x {sizes.tokens[0][1]}"
    parts: dict[str, Calls] = {f"operator, {B} x {T}": operator_calls(B, T, sizes, device) for B, T in sizes.tokens}
    parts[layer] = layer_calls(sizes, device)
    parts[f"{layer}, autocast"] = layer_calls(sizes, device, autocast=True)
    parts["operator, one token"] = {"step": token(1, sizes, device)}
    found: dict[str, Any] = {
        row: {part: host_ms(call, device, count) for part, call in calls.items()} for row, calls in parts.items()
    }
    if device != "cuda":
        return {"host_ms": found, "first_call_s": None, "step_in_graph_ms": None}
    steps = {str(batch): graph_ms(token(batch, sizes, device)) for batch in sizes.batches}
    return {"host_ms": found, "first_call_s": first_call(), "step_in_graph_ms": steps}


def bounds(found: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Aim and what was reached, milliseconds of forward+backward, and seconds of the first call."""
    reached = {row: parts.get("forward+backward") for row, parts in found["host_ms"].items()}
    reached["first_call_s"] = found["first_call_s"]
    return {row: {"at_most": aim, "reached": reached.get(row)} for row, aim in AIMS.items()}
