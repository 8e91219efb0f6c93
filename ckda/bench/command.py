"""``ckda bench``: the operator's speed, ours and others' in one run; correctness is checked first.

The paper's protocol: 20 warm-up and 50 timed calls, four rounds, projections, optimiser and final state excluded; it reports
throughput, so calls follow each other without waiting. Runs from a plain folder: nothing but torch is needed;
flash-linear-attention is measured where it can be imported, cuDNN's kernels where their folder is named. What is in --out
already is not measured again: a run that was cut short goes on where it stopped.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.bench import host, sweep, throughput
from ckda.bench.options import Shape
from ckda.bench.peers import Call, Peer, inputs, label, leaves, legend, peers
from ckda.bench.timing import ROUNDS, TIMED, WARMUP, earlier, measure, milliseconds
from ckda.bench.tuning import compile_rows, compile_side_by_side, forget_choices
from ckda.command import CheckFailed, did_you_mean, make_folder, pick_device, refuse_unread
from ckda.ops import complex_kda, complex_kda_step
from ckda.record import environment, write_json

__all__ = ["draw", "run_command"]


SHAPES = {
    "cuda": [Shape(16, 2048, 16, 128), Shape(4, 8192, 16, 128), Shape(1, 32768, 16, 128), Shape(16, 2048, 32, 64)],
    "cpu": [Shape(2, 512, 4, 64)],
}
SMOKE = Shape(1, 128, 2, 32)
DECODE = (1, 16, 64, 256)
TOLERANCE = 0.02  #: root mean square error against float64 over root mean square, of o and of every gradient

# Correctness, then time ---------------------------------------------------------------------------------------------------


def errors(peer: Peer, device: str, dtype: torch.dtype, seed: int, H: int, D: int) -> dict[str, float]:
    """Relative root mean square errors of o and the gradients against the float64 chunk form."""
    shape = Shape(1, 200, H, D)
    call = peer.draw(shape, device, dtype, seed)
    do = torch.randn(shape, device=device).to(dtype)
    bound = peer.bind(call, do)
    got = [bound.forward().clone(), *bound.both()]
    exact_call: Call = {
        n: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for n, x in call.items()
    }
    o = complex_kda(**exact_call, backend="chunked")[0]
    exact = [o, *torch.autograd.grad(o, leaves(exact_call), do.double())]
    names = ["o", *(f"d{name}" for name, x in call.items() if isinstance(x, Tensor))]
    return {
        name: math.inf if a is None else ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()
        for name, a, b in zip(names, got, exact, strict=True)
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
    times = milliseconds(lambda: y.copy_(x), 10, device)
    return 2 * x.numel() / (1e-3 * statistics.median(times))


def time_peer(peer: Peer, shape: Shape, device: str, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    """Forward, forward+backward and peak memory of one peer at one shape."""
    call = peer.draw(shape, device, dtype, args.seed)
    forward, both = peer.bind(call, torch.randn(shape, device=device).to(dtype))
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
    row = peer.row(shape) | {
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


def _check(
    found: list[Peer], device: str, dtype: torch.dtype, args: argparse.Namespace, shapes: list[Shape]
) -> tuple[list[Peer], dict[str, dict[str, Any]]]:
    """The peers that are timed, and the errors of those that compute the same function: the largest over all sizes of heads.

    One of ours that is wrong stops the run. One with kernels of others is timed all the same, marked as inaccurate: its errors are
    what there is to report of it. One that does not run is not timed, and the errors say why.
    """
    heads = list(dict.fromkeys((shape.H, shape.D) for shape in shapes))
    judged: list[Peer] = []
    checked: dict[str, dict[str, Any]] = {}
    for peer in found:
        if not peer.same:
            judged.append(peer)
            continue
        try:
            each = [errors(peer, device, dtype, args.seed, H, D) for H, D in heads]
            of_peer = {name: max((error[name] for error in each), key=_badness) for name in each[0]}
        except Exception as error:  # whatever foreign code ends with: the others go on
            checked[peer.name] = {"failed": str(error)[:300]}
            _say(f"{peer.name}: failed, {error!s:.120}")
            continue
        words = _inaccuracy(of_peer)
        worst = max(of_peer, key=lambda name: of_peer[name])
        _say(f"{peer.name}: {words or f'largest relative error {of_peer[worst]:.1e} ({worst})'}")
        if words and not peer.foreign:
            raise CheckFailed(f"{peer.name} is wrong: {of_peer}")
        checked[peer.name] = {name: error if math.isfinite(error) else None for name, error in of_peer.items()}
        checked[peer.name] |= {"inaccurate": words} if words else {}
        judged.append(peer._replace(inaccurate=words))
    return judged, checked


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _inaccuracy(found: dict[str, float]) -> str | None:
    """The errors that are too large, in words.

    Example:
        >>> _inaccuracy({"o": 4e-3, "dg": 2.4e-2, "dbeta": math.nan}), _inaccuracy({"o": 4e-3})
        ('inaccurate: dg 2.4e-02, dbeta nan', None)
    """
    wrong = [f"{name} {error:.1e}" for name, error in found.items() if not error < TOLERANCE]
    return f"inaccurate: {', '.join(wrong)}" if wrong else None


def _tell(row: dict, shape: Shape) -> None:
    f, b = row["forward"], row["forward+backward"]
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    both = f"forward+backward {b['mean']:8.3f} ms ({b['waited']:.3f} waited for)"
    _say(f"{shape!s:28} {label(row):32} forward {f['mean']:8.3f} ms, {both}{memory}")


def _sweep_rows(args: argparse.Namespace) -> tuple[sweep.Row, ...]:
    """The rows that are asked for, the main one first."""
    rows: tuple[sweep.Row, ...] = sweep.ROWS
    names = [row.name for row in rows]
    for name in args.row or ():
        if name not in names:
            near = did_you_mean(name, names)
            raise ValueError(f"--row {name!r}: there is none; there are {', '.join(map(repr, names))}{near}")
    if args.row:
        rows = tuple(row for row in rows if row.name in (sweep.MAIN.name, *args.row))
    if args.smoke:
        rows = tuple(map(sweep.smaller, rows))
    return rows


def _mark(args: argparse.Namespace) -> dict[str, Any]:
    """What a record without a protocol of its own says of a smoke run."""
    return {"protocol": "smoke"} if args.smoke else {}


def _say_known(names: list[str]) -> None:
    if names:
        _say(f"measured before, not again (--fresh would): {', '.join(map(repr, names))}")


def _run_sweep(args: argparse.Namespace, device: str) -> int:
    """Check and time the rows of the sweep; sweep.json, bounds.json and sweep.png."""
    rows, count = _sweep_rows(args), 2 if args.smoke else sweep.COUNT
    folder = make_folder(args.out)
    mark = _mark(args)
    result: dict[str, Any] = {"environment": environment(device)} | mark | {"count": count}
    known = earlier(folder / "sweep.json", result["environment"], args.fresh, args.smoke)

    there = {x["row"]["name"] for x in known}
    left = [row.name for row in rows if row.name not in there]
    _say_known([row.name for row in rows if row.name in there])
    if args.jobs > 1 and device == "cuda" and not args.smoke:
        compile_rows(args.jobs, device, left)

    def keep(found: list[dict[str, Any]]) -> None:
        write_json(folder / "sweep.json", result | {"rows": found})
        write_json(folder / "bounds.json", mark | sweep.bounds(found))

    result["rows"] = found = sweep.sweep(rows, device, count, _say, keep, known, args.smoke)
    keep(found)
    sweep.draw(found, folder / "sweep.png", args.smoke)
    if args.host:
        result["host"] = _time_host(args, device, folder)
    print(json.dumps(result) if args.json else folder / "sweep.json")
    return 0


def _time_host(args: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    """Time the host; host.json."""
    sizes, count = (host.SMOKE, 2) if args.smoke else (host.Sizes(), host.COUNT)
    found = host.rows(sizes, device, count)
    result = {"environment": environment(device)} | _mark(args) | {"count": count} | found
    result["bounds"] = host.bounds(found)
    for row, parts in found["host_ms"].items():
        _say(f"{row:28} " + ", ".join(f"{part} {ms:.3f} ms" for part, ms in parts.items()))
    if device == "cuda":
        _say(f"first call {found['first_call_s']:.1f} s; a step in a graph, ms by batch: {found['step_in_graph_ms']}")
    write_json(folder / "host.json", result)
    return result


def _run_host(args: argparse.Namespace, device: str) -> int:
    folder = make_folder(args.out)
    result = _time_host(args, device, folder)
    print(json.dumps(result) if args.json else folder / "host.json")
    return 0


def _run_throughput(args: argparse.Namespace, device: str) -> int:
    """The paper's figure; throughput.json and throughput.png."""
    shapes = args.shape or (throughput.SMOKE if args.smoke else throughput.SHAPES)
    dtype = _dtype(args, device)
    options = {"backend": "eager"} if args.smoke else {}
    found = peers(device, args.peer, args.cudnn, throughput=True, **options)
    folder = make_folder(args.out)
    _prepare(args, device, shapes[0])
    result: dict[str, Any] = {
        "environment": environment(device),
        "seed": args.seed,
        "dtype": _name(dtype),
        "protocol": _protocol(args),
    }
    known = earlier(
        folder / "throughput.json", result["environment"], args.fresh, args.smoke, seed=args.seed, dtype=_name(dtype)
    )
    found, result["errors"] = _check(found, device, dtype, args, shapes)

    def keep(rows: list[dict[str, Any]]) -> None:
        write_json(folder / "throughput.json", result | {"rows": rows})

    result["rows"] = throughput.run(shapes, found, device, dtype, args.seed, args.smoke, known, _say, keep)
    keep(result["rows"])
    throughput.draw(result, folder / "throughput.png")
    print(json.dumps(result) if args.json else folder / "throughput.json")
    return 0


def _dtype(args: argparse.Namespace, device: str) -> torch.dtype:
    return getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _protocol(args: argparse.Namespace) -> Any:
    if args.smoke:
        return "smoke"
    return {
        "rounds": ROUNDS,
        "warmup": WARMUP,
        "timed": TIMED,
        "fla_tuned_briefly": args.jobs > 1,
        "fla_tuned_by_shape": True,
    }


def _prepare(args: argparse.Namespace, device: str, shape: Shape) -> None:
    """With --jobs, FLA's kernels are compiled before anything is measured."""
    if args.jobs > 1 and device == "cuda" and find_spec("fla") is not None:
        compile_side_by_side(args.jobs, shape)


def _print_plan(args: argparse.Namespace) -> int:
    """How many seconds of a GPU the parts are likely to take, without running anything."""
    refuse_unread(args, _READ_BY_ALL + _READ_BY_PLANS, "--plan")
    seconds: dict[str, float] = {}
    if args.sweep:
        seconds |= {f"sweep: {row.name}": sweep.estimate(row, args.jobs) for row in _sweep_rows(args)}
    if args.host:
        seconds["host"] = host.ESTIMATE
    if args.throughput:
        num = len(args.shape or throughput.SHAPES)
        seconds |= {f"throughput: {peer}": num * s for peer, s in throughput.ESTIMATE.items()}
    if not seconds:
        raise ValueError("--plan: name what is planned, of --sweep, --host and --throughput")
    for name, estimate in seconds.items():
        _say(f"{name:50} {estimate:6.0f} s")
    total = sum(seconds.values())
    print(json.dumps({"seconds": seconds, "total": total}) if args.json else f"{total:.0f} s of one H200, estimated")
    return 0


#: what is measured instead of peers at shapes -> the options that it reads besides those of all
_READ = {
    "throughput": ("seed", "peer", "shape", "cudnn", "jobs", "dtype"),
    "sweep": ("row", "jobs", "host"),
    "host": (),
}
_READ_BY_ALL = ("out", "device", "smoke", "json", "fresh", "plan")
_READ_BY_PLANS = ("sweep", "host", "throughput", "row", "jobs", "shape")


def _refuse_unread(args: argparse.Namespace) -> None:
    """Refuse what has no effect: one thing is measured at a time, but for --sweep --host."""
    parts = [part for part in _READ if getattr(args, part)]
    if args.throughput and len(parts) > 1 and not args.plan:
        raise ValueError(f"--throughput goes without {' and '.join(f'--{part}' for part in parts[1:])}")
    if args.row and not args.sweep:
        raise ValueError("--row belongs to --sweep")
    if parts:
        read = set(_READ_BY_ALL).union(parts, *(_READ[part] for part in parts))
        refuse_unread(args, read, " ".join(f"--{part}" for part in parts))


def run_command(args: argparse.Namespace) -> int:
    """Do what is asked for; without another word, check, time, write bench.json and bench.png."""
    _refuse_unread(args)
    if args.plan:
        return _print_plan(args)
    device = pick_device(args.device)
    if device == "mps":
        raise ValueError("--device mps: nothing is measured there; cpu or cuda may be named")
    if args.smoke:  # calls so small take a hundred times as long where threads wait for each other on busy cores
        torch.set_num_threads(1)
    if args.jobs > 1 and device == "cpu":
        _say(f"--jobs {args.jobs}: no effect on a CPU, where nothing is compiled first")
    if args.throughput:
        return _run_throughput(args, device)
    if args.sweep:
        return _run_sweep(args, device)
    return (_run_host if args.host else _run_peers)(args, device)


def _run_peers(args: argparse.Namespace, device: str) -> int:
    """Check, time, write bench.json and bench.png."""
    dtype, shapes = _dtype(args, device), _shapes(args, device)
    found = peers(device, args.peer, args.cudnn)
    folder = make_folder(args.out)
    _prepare(args, device, shapes[0])
    here = environment(device)
    known = earlier(folder / "bench.json", here, args.fresh, args.smoke, seed=args.seed, dtype=_name(dtype))
    done = {(row["peer"], tuple(row["shape"].values())) for row in known}
    found, checked = _check(found, device, dtype, args, shapes)
    result: dict[str, Any] = {
        "environment": here,
        "seed": args.seed,
        "dtype": _name(dtype),
        "protocol": _protocol(args),
        "errors": checked,
        "copy_bytes_per_second": copy_bandwidth(device),
        "rows": known,
        "decode": [],
    }
    for shape in shapes:
        if any(peer.foreign for peer in found):
            forget_choices()
        for peer in found:
            if (peer.name, tuple(shape)) in done:
                continue
            try:
                row = time_peer(peer, shape, device, dtype, args)
                _tell(row, shape)
            except Exception as error:
                row = peer.row(shape) | {"failed": str(error)[:300]}
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
    labels = {row["peer"]: legend(row) for row in rows}
    names = list(labels)
    height = 1.6 + 0.24 * (len(names) + 1) * len(shapes)
    figure, axes = plt.subplots(1, 2, figsize=(11, height), sharey=True)
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
    figure.suptitle(f"{result['environment']['device']}, {result['dtype']}", fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / height, 1, 1))
    figure.legend(handles, [*labels.values()], fontsize=7, frameon=False, loc="lower center", ncol=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
