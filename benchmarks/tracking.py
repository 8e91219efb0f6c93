"""Milliseconds an update of the state-tracking protocol, by length: one seed, three seeds, a search of 24, runs side by side.

python benchmarks/tracking.py [--out results/bench] [--device cuda] [--updates 60]
python benchmarks/tracking.py --quick --out runs/bench            # three cases at two lengths, each with its kernels: under 40 s
python benchmarks/tracking.py --quick --by-token --out runs/bench1  # the same with every token projected by itself

On a GPU the kernels of an update are listed too, by name, from torch's profiler: after all timings, for a profiler that has
run once may go on slowing launches. Claims to check: three seeds cost at most 1.3 times one; 60,000 updates of three seeds take
under five minutes.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem
from ckda.layers import RANGES
from ckda.record import environment, write_json
from ckda.train import Ensemble, Program, Recipe

LENGTHS = (4, 6, 8, 16, 32)
WARM = 8  # updates that compile and record
PROFILED = 4  # updates under the profiler
TOP = 25  # kernels listed


class Case(NamedTuple):
    """What trains side by side."""

    groups: tuple[str, ...]
    mixers: tuple[str, ...]
    seeds: int
    batch: int = 0  #: words; 0: --batch


CASES = {
    "S3 ckda, 1 seed": Case(("S3",), ("ckda",), 1),
    "S3 ckda, 3 seeds": Case(("S3",), ("ckda",), 3),
    "S3 ckda, 24 seeds, 256 words": Case(("S3",), ("ckda",), 24, 256),
    "S3 and S4, 4 ranges, 3 seeds": Case(("S3", "S4"), tuple(RANGES), 3),
}
QUICK, QUICK_LENGTHS = list(CASES)[:3], (8, 32)


def warm_program(
    build: Callable[..., nn.Module], case: Case, length: int, batch: int, updates: int, device: str, record: bool = True
) -> Program:
    """The case after the updates that compile and record, with some left to do."""
    steps = updates + WARM
    recipe = Recipe(steps=steps, batch=case.batch or batch, curriculum=(length,), block=steps)
    arms = []
    for group in case.groups:
        task = WordProblem.named(group)
        seeds = tuple(range(case.seeds))
        arms += [Ensemble(partial(build, mixer, task), task, recipe, seeds, device) for mixer in case.mixers]
    program = Program(arms, record=record)
    advance(program, WARM, device)
    return program


def measure(program: Program, updates: int, device: str) -> dict[str, float]:
    """Milliseconds of one round of updates, and microseconds a word."""
    began = time.perf_counter()
    advance(program, updates, device)
    milliseconds = (time.perf_counter() - began) / updates * 1e3
    words = sum(len(arm.seeds) * arm.recipe.batch for arm in program.ensembles)
    return {"milliseconds": round(milliseconds, 3), "microseconds_a_word": round(1e3 * milliseconds / words, 4)}


def advance(program: Program, updates: int, device: str) -> None:
    for _ in range(updates):
        program.advance()
    if device == "cuda":
        torch.cuda.synchronize()


def kernels(program: Program) -> dict[str, Any]:
    """Kernels of one update: how many, their time, and the longest by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        advance(program, PROFILED, "cuda")
    rows = [row for row in profiler.key_averages() if row.device_type == DeviceType.CUDA]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    return {
        "kernels": sum(row.count for row in rows) / PROFILED,
        "kernel_microseconds": round(total / PROFILED, 1),
        "longest": [
            {
                "kernel": row.key[:120],
                "count": row.count / PROFILED,
                "microseconds": round(row.self_device_time_total / PROFILED, 2),
                "share": round(row.self_device_time_total / total, 4) if total else 0.0,
            }
            for row in rows[:TOP]
        ],
    }


def show(case: str, length: int, found: dict[str, Any]) -> None:
    if "kernels" not in found:
        print(f"{case}, length {length}: {found['milliseconds']} ms", flush=True)
        return
    print(f"{case}, length {length}: {found['kernels']:g} kernels of {found['kernel_microseconds']} us", flush=True)
    for row in found["longest"][:8]:
        print(f"    {row['microseconds']:9.1f} us {row['count']:6g} x {row['kernel'][:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/bench")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases (default: all)")
    parser.add_argument("--quick", action="store_true", help="one, three and 24 seeds at lengths 8 and 32 alone")
    parser.add_argument("--by-token", action="store_true", help="project every token by itself, not every symbol once")
    args = parser.parse_args()
    build = partial(build_tracker, by_symbol=not args.by_token)
    names, lengths = (QUICK, QUICK_LENGTHS) if args.quick else (list(CASES)[: args.cases], LENGTHS)
    result: dict = {"what": "benchmarks/tracking.py", "batch": args.batch, "by_symbol": not args.by_token}
    result["environment"] = environment(args.device)
    for case in names:
        found = {}
        for n in lengths:
            program = warm_program(build, CASES[case], n, args.batch, args.updates, args.device)
            found[str(n)] = measure(program, args.updates, args.device)
            show(case, n, found[str(n)])
        times = {n: one["milliseconds"] for n, one in found.items()}
        result[case] = {"milliseconds": times, "by_length": found}
        if lengths == LENGTHS:  # the curriculum's stages are equally long
            result[case]["seconds_for_60000"] = round(60 * sum(times.values()) / len(times), 1)
        write_json(Path(args.out) / "tracking.json", result)
    if not args.quick:
        program = warm_program(
            build, CASES["S3 ckda, 3 seeds"], 32, args.batch, args.updates, args.device, record=False
        )
        plain = measure(program, args.updates, args.device)
        result["S3 ckda, 3 seeds, length 32, not recorded"] = plain["milliseconds"]
    if {"S3 ckda, 1 seed", "S3 ckda, 3 seeds"} <= set(names):
        one, three = (result[f"S3 ckda, {n}"]["milliseconds"] for n in ("1 seed", "3 seeds"))
        result["three_seeds_over_one_by_length"] = {n: round(three[n] / one[n], 3) for n in one}
        result["three_seeds_over_one"] = round(sum(three.values()) / sum(one.values()), 3)
        print("three seeds over one:", result["three_seeds_over_one"], result["three_seeds_over_one_by_length"])
    write_json(Path(args.out) / "tracking.json", result)
    for case in names if args.device == "cuda" else ():
        for n in QUICK_LENGTHS:
            found = kernels(warm_program(build, CASES[case], n, args.batch, PROFILED, args.device))
            result[case].setdefault("kernels_by_length", {})[str(n)] = found
            show(case, n, found)
    print(write_json(Path(args.out) / "tracking.json", result))


if __name__ == "__main__":
    main()
