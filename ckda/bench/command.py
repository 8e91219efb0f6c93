"""``ckda bench``: the operator's speed, ours and flash-linear-attention's in one run; correctness is checked first.

The paper's protocol: 20 warm-up and 50 timed calls, four rounds, projections, optimiser and final state excluded; it reports
throughput, so calls follow each other without waiting. Runs from a plain folder: nothing but torch is needed, and
flash-linear-attention is measured where it can be imported.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.bench import host, sweep
from ckda.bench.options import Shape
from ckda.command import CheckFailed, make_folder, pick_device
from ckda.ops import complex_kda, complex_kda_step
from ckda.record import environment, write_json

__all__ = ["draw", "inputs", "run_command"]


SHAPES = {
    "cuda": [Shape(16, 2048, 16, 128), Shape(4, 8192, 16, 128), Shape(1, 32768, 16, 128), Shape(16, 2048, 32, 64)],
    "cpu": [Shape(2, 512, 4, 64)],
}
SMOKE = Shape(1, 128, 2, 32)
DECODE = (1, 16, 64, 256)
ROUNDS, WARMUP, TIMED = 4, 20, 50
TOLERANCE = 0.02  #: root mean square error against float64 over root mean square, of o and of every gradient

Call = dict[str, Any]
Runner = Callable[[Call], Tensor]


def inputs(shape: Shape, device: str, dtype: torch.dtype, seed: int, gate: str = "signed") -> Call:
    """The raw projections of a layer, gates of both signs and long memory, as leaves."""
    random = torch.Generator(device).manual_seed(seed)
    B, T, H, D = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=device)

    call: Call = {name: normal(B, T, H, D).to(dtype).requires_grad_() for name in ("q", "k", "v")}
    call["g"] = (3 + 2 * normal(B, T, H, D)).to(dtype).requires_grad_()
    call["beta"] = normal(B, T, H).to(dtype).requires_grad_()
    call["A_log"] = torch.zeros(H, device=device).requires_grad_()
    call["dt_bias"] = normal(H * D).requires_grad_()
    return call | {"gate": gate, "beta_range": 2 if gate == "signed" else 1, "normalize_qk": True}


# Who is measured ----------------------------------------------------------------------------------------------------------


def _ours(backend: str) -> Runner:
    return lambda call: complex_kda(**call, backend=backend)[0]


def _fla_kda(keep: bool) -> Runner:
    """FLA's chunk_kda with the bounded gate in the kernel; `keep` stores intermediates instead of recomputing them."""

    def run(call: Call) -> Tensor:
        from fla.ops.kda import chunk_kda

        return chunk_kda(
            q=call["q"],
            k=call["k"],
            v=call["v"],
            g=call["g"],
            beta=call["beta"].float().sigmoid(),
            A_log=call["A_log"],
            dt_bias=call["dt_bias"],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
            disable_recompute=keep,
        )[0]

    return run


def _fla_delta_product(call: Call) -> Tensor:
    """FLA's DeltaProduct_2 without gate: twice the keys and values."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    k, v, beta = (torch.cat([call[name]] * 2, 1) for name in ("k", "v", "beta"))
    return chunk_gated_delta_product(
        q=call["q"],
        k=k,
        v=v,
        g=None,
        beta=2 * beta.sigmoid(),
        num_householder=2,
        use_qk_l2norm_in_kernel=True,
    )[0]


class Peer(NamedTuple):
    """A way to run the operator: its name, its gate and the function."""

    name: str
    gate: str
    run: Runner


def peers(device: str, wanted: list[str] | None) -> list[Peer]:
    """Ours first; flash-linear-attention's where it can be imported."""
    own = "triton" if device == "cuda" else "chunked"
    found = [Peer("ckda", "signed", _ours(own)), Peer("kda", "sigmoid", _ours(own))]
    if device == "cuda" and find_spec("fla") is not None:
        found += [
            Peer("fla kda", "sigmoid", _fla_kda(keep=False)),
            Peer("fla kda, intermediates kept", "sigmoid", _fla_kda(keep=True)),
            Peer("fla deltaproduct2", "sigmoid", _fla_delta_product),
            Peer("ckda over fla (signs absorbed)", "signed", _ours("fla")),
        ]
    if wanted:
        unknown = set(wanted) - {peer.name for peer in found}
        if unknown:
            raise ValueError(
                f"--peer {', '.join(sorted(unknown))}: not here; present: {', '.join(p.name for p in found)}"
            )
        found = [peer for peer in found if peer.name in wanted]
    return found


# Correctness, then time ---------------------------------------------------------------------------------------------------


def _leaves(call: Call) -> list[Tensor]:
    return [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]


def errors(peer: Peer, device: str, dtype: torch.dtype, seed: int, H: int, D: int) -> dict[str, float]:
    """Relative root mean square errors of o and the gradients against the float64 chunk form."""
    call = inputs(Shape(1, 200, H, D), device, dtype, seed, peer.gate)
    o = peer.run(call)
    do = torch.randn_like(o)
    got = [o, *torch.autograd.grad(o, _leaves(call), do)]
    exact_call: Call = {
        n: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for n, x in call.items()
    }
    o = complex_kda(**exact_call, backend="chunked")[0]
    exact = [o, *torch.autograd.grad(o, _leaves(exact_call), do.double())]
    names = ["o", *(f"d{name}" for name, x in call.items() if isinstance(x, Tensor))]
    return {
        name: ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()
        for name, a, b in zip(names, got, exact, strict=True)
    }


def _milliseconds(call: Callable[[], Any], count: int, device: str) -> list[float]:
    """The times of `count` calls; on a GPU from the end of one to the end of the next, and nobody waits before the last."""
    if device != "cuda":
        stamps = [time.perf_counter()]
        for _ in range(count):
            call()
            stamps.append(time.perf_counter())
        return [1e3 * (later - earlier) for earlier, later in pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [earlier.elapsed_time(later) for earlier, later in pairwise(events)]


def measure(call: Callable[[], Any], device: str, smoke: bool) -> dict[str, float]:
    """Milliseconds by the paper's protocol: mean, and p20, p50, p80 over all timed calls; `waited`: the median where every
    call is waited for, so that what the host does before the first kernel counts."""
    rounds, warmup, timed = (1, 1, 3) if smoke else (ROUNDS, WARMUP, TIMED)
    times, waited = [], []
    for _ in range(rounds):
        times += _milliseconds(call, warmup + timed, device)[warmup:]
        waited += [_milliseconds(call, 1, device)[0] for _ in range(3 if smoke else 10)]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return {
        "mean": statistics.mean(times),
        "p20": p20,
        "p50": p50,
        "p80": p80,
        "waited": statistics.median(waited),
    }


def floor_bytes(shape: Shape, itemsize: int) -> dict[str, int]:
    """The fewest bytes: each input read once and each output written once, forward, and forward and backward."""
    B, T, H, D = shape
    u, rate = B * T * H * D * itemsize, B * T * H * itemsize
    return {"forward": 5 * u + rate, "forward+backward": 14 * u + 3 * rate}


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read plus written."""
    x = torch.empty(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = _milliseconds(lambda: y.copy_(x), 10, device)
    return 2 * x.numel() / (1e-3 * statistics.median(times))


def time_peer(peer: Peer, shape: Shape, device: str, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    """Forward, forward+backward and peak memory of one peer at one shape."""
    call = inputs(shape, device, dtype, args.seed, peer.gate)
    do = torch.randn(*call["v"].shape, device=device).to(dtype)
    leaves = _leaves(call)

    def forward() -> None:
        with torch.no_grad():
            peer.run(call)

    def both() -> None:
        used = [x for x in leaves if x.requires_grad]
        torch.autograd.grad(peer.run(call), used, do, allow_unused=True)

    start = time.perf_counter()
    both()
    if device == "cuda":
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        memory = torch.cuda.max_memory_allocated()
    else:
        first, before, memory = time.perf_counter() - start, 0, None
    row: dict[str, Any] = {
        "peer": peer.name,
        "shape": shape._asdict(),
        "first_call_s": first,
        "forward": measure(forward, device, args.smoke),
        "forward+backward": measure(both, device, args.smoke),
        "peak_bytes": memory,
        "inputs_bytes": before,
    }
    for name, count in floor_bytes(shape, dtype.itemsize).items():
        row[name] |= {"floor_bytes": count, "floor_bandwidth": count / (1e-3 * row[name]["mean"])}
    return row


def time_decode(
    batch: int, H: int, D: int, device: str, dtype: torch.dtype, args: argparse.Namespace
) -> dict[str, Any]:
    """One token of decoding, in place; on a GPU as a recorded graph, so that launching does not count."""
    call = {
        n: x.detach() if isinstance(x, Tensor) else x
        for n, x in inputs(Shape(batch, 1, H, D), device, dtype, args.seed).items()
    }
    token = {n: x[:, 0] if n in ("q", "k", "v", "g", "beta") else x for n, x in call.items()}
    state = torch.randn(batch, H, D, D, device=device)

    def step() -> None:
        complex_kda_step(**token, state=state, inplace=True)

    timed: Callable[[], Any] = step
    if device == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        timed = graph.replay
    return {"batch": batch, "heads": H, "head_dim": D, "state_bytes": 2 * state.nbytes} | measure(
        timed, device, args.smoke
    )


# The command --------------------------------------------------------------------------------------------------------------


def _shapes(args: argparse.Namespace, device: str) -> list[Shape]:
    return args.shape or ([SMOKE] if args.smoke else SHAPES[device])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(found: list[Peer], device: str, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The errors of every peer that computes the same function; one that is wrong stops the run."""
    checked = {}
    for peer in found:
        if peer.name == "fla deltaproduct2":
            continue  # another function
        _, _, H, D = _shapes(args, device)[0]
        checked[peer.name] = errors(peer, device, dtype, args.seed, H, D)
        worst = max(checked[peer.name], key=lambda name: checked[peer.name][name])
        _say(f"{peer.name}: largest relative error {checked[peer.name][worst]:.1e} ({worst})")
        if not checked[peer.name][worst] < TOLERANCE:
            raise CheckFailed(f"{peer.name} is wrong: {checked[peer.name]}")
    return checked


def _tell(row: dict, shape: Shape) -> None:
    f, b = row["forward"], row["forward+backward"]
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    both = f"forward+backward {b['mean']:8.3f} ms ({b['waited']:.3f} waited for)"
    _say(f"{shape!s:28} {row['peer']:32} forward {f['mean']:8.3f} ms, {both}{memory}")


def _run_sweep(args: argparse.Namespace, device: str, folder: Path) -> int:
    """Check and time the rows of the sweep; sweep.json, bounds.json and sweep.png."""
    unknown = set(args.row or ()) - {row.name for row in sweep.ROWS}
    if unknown:
        raise ValueError(f"--row {', '.join(sorted(unknown))}: there are {', '.join(row.name for row in sweep.ROWS)}")
    rows = tuple(row for row in sweep.ROWS if not args.row or row.name in (sweep.MAIN.name, *args.row))
    if args.smoke:
        rows = tuple(row._replace(B=1, T=40, K=16, V=16, H=row.H // 8, HV=row.HV // 8) for row in rows)
    count = 2 if args.smoke else 30
    result: dict[str, Any] = {"environment": environment(device), "count": count}

    def keep(found: list[dict[str, Any]]) -> None:
        write_json(folder / "sweep.json", result | {"rows": found})
        write_json(folder / "bounds.json", sweep.bounds(found))

    result["rows"] = found = sweep.sweep(rows, device, count, _say, keep)
    keep(found)
    sweep.draw(found, folder / "sweep.png")
    print(json.dumps(result) if args.json else folder / "sweep.json")
    return 0


def _run_host(args: argparse.Namespace, device: str, folder: Path) -> int:
    """Time the host; host.json."""
    found = host.rows(host.SMOKE if args.smoke else host.Sizes(), device, 2 if args.smoke else host.COUNT)
    result = {"environment": environment(device), "count": host.COUNT} | found | {"bounds": host.bounds(found)}
    for row, parts in found["host_ms"].items():
        _say(f"{row:28} " + ", ".join(f"{part} {ms:.3f} ms" for part, ms in parts.items()))
    if device == "cuda":
        _say(f"first call {found['first_call_s']:.1f} s; a step in a graph, ms by batch: {found['step_in_graph_ms']}")
    write_json(folder / "host.json", result)
    print(json.dumps(result) if args.json else folder / "host.json")
    return 0


def run_command(args: argparse.Namespace) -> int:
    """Check, time, write bench.json and bench.png."""
    device = pick_device(args.device)
    if device == "mps":
        raise ValueError("--device mps: nothing is measured there; cpu or cuda may be named")
    folder = make_folder(args.out)
    if args.sweep:
        return _run_sweep(args, device, folder)
    if args.host:
        return _run_host(args, device, folder)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    found = peers(device, args.peer)
    result: dict[str, Any] = {
        "environment": environment(device),
        "seed": args.seed,
        "dtype": str(dtype).removeprefix("torch."),
        "protocol": {"rounds": ROUNDS, "warmup": WARMUP, "timed": TIMED} if not args.smoke else "smoke",
        "errors": _check(found, device, dtype, args),
        "copy_bytes_per_second": copy_bandwidth(device),
        "rows": [],
        "decode": [],
    }
    for shape in _shapes(args, device):
        for peer in found:
            try:
                row = time_peer(peer, shape, device, dtype, args)
                _tell(row, shape)
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                row = {"peer": peer.name, "shape": shape._asdict(), "failed": str(error)[:300]}
                _say(f"{shape!s:28} {peer.name}: failed, {error!s:.120}")
            result["rows"].append(row)
            write_json(folder / "bench.json", result)  # what is measured is kept, whatever happens next
    heads, D = (SMOKE.H, SMOKE.D) if args.smoke else (16, 128)
    for batch in (1,) if args.smoke or device == "cpu" else DECODE:
        result["decode"].append(time_decode(batch, heads, D, device, dtype, args))
        _say(f"decode, batch {batch}: {result['decode'][-1]['p50']:.4f} ms a token")
    write_json(folder / "bench.json", result)
    figure = draw(result, folder / "bench.png")
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{folder / 'bench.json'}" + (f", {figure}" if figure else " (no figure: matplotlib is not installed)"))
    return 0


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """The bars of every peer at every shape, from the JSON alone; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "failed" not in row]
    shapes = list(dict.fromkeys(tuple(row["shape"].values()) for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.6 + 0.24 * (len(names) + 1) * len(shapes)), sharey=True)
    for axis, part in zip(axes, ("forward", "forward+backward"), strict=True):
        for row in rows:
            place = shapes.index(tuple(row["shape"].values())) * (len(names) + 1) + names.index(row["peer"])
            mean = row[part]["mean"]
            axis.barh(place, mean, color=f"C{names.index(row['peer'])}", height=0.85)
            axis.text(mean, place, f" {mean:.2f}", va="center", fontsize=7)
        axis.set_xlabel(f"{part}, ms")
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    ticks = [i * (len(names) + 1) + (len(names) - 1) / 2 for i in range(len(shapes))]
    axes[0].set_yticks(ticks, [str(Shape(*shape)).replace(", ", ",\n") for shape in shapes], fontsize=8)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))]
    axes[1].legend(handles, names, fontsize=7, frameon=False, loc="lower right")
    figure.suptitle(f"{result['environment']['device']}, {result['dtype']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
