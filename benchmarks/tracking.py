"""Milliseconds an update of the state-tracking protocol, by length, for one seed, three seeds, and runs side by side.

python benchmarks/tracking.py [--out results/bench] [--device cuda] [--updates 60]

Claims to check: three seeds cost at most 1.3 times one; 60,000 updates of three seeds take under five minutes.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from ckda.layers import RANGES
from ckda.models.tracker import build_tracker
from ckda.record import environment, write_json
from ckda.tasks.groups import WordProblem
from ckda.train import Ensemble, Program, Recipe

LENGTHS = (4, 6, 8, 16, 32)
#: name -> (groups, mixers, seeds)
CASES = {
    "S3 ckda, 1 seed": (("S3",), ("ckda",), 1),
    "S3 ckda, 3 seeds": (("S3",), ("ckda",), 3),
    "S3 and S4, 4 ranges, 3 seeds": (("S3", "S4"), tuple(RANGES), 3),
}


def milliseconds(case: str, length: int, batch: int, updates: int, device: str, record: bool) -> float:
    """Of one round of updates, after those that compile and record."""
    groups, mixers, seeds = CASES[case]
    recipe = Recipe(steps=updates + 8, batch=batch, curriculum=(length,), block=updates + 8)
    arms = []
    for group in groups:
        task = WordProblem.named(group)
        arms += [
            Ensemble(partial(build_tracker, mixer, task), task, recipe, tuple(range(seeds)), device) for mixer in mixers
        ]
    program = Program(arms, record=record)
    for _ in range(8):
        program.advance()
    wait(device)
    began = time.perf_counter()
    for _ in range(updates):
        program.advance()
    wait(device)
    return (time.perf_counter() - began) / updates * 1e3


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/bench")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1024)
    args = parser.parse_args()
    result: dict = {"what": "benchmarks/tracking.py", "batch": args.batch, "environment": environment(args.device)}
    for case in CASES:
        times = {str(n): round(milliseconds(case, n, args.batch, args.updates, args.device, True), 3) for n in LENGTHS}
        mean = sum(times.values()) / len(times)  # the curriculum's stages are equally long
        result[case] = {"milliseconds": times, "seconds_for_60000": round(60 * mean, 1)}
        print(case, result[case], flush=True)
    plain = milliseconds("S3 ckda, 3 seeds", 32, args.batch, args.updates, args.device, False)
    result["S3 ckda, 3 seeds, length 32, not recorded"] = round(plain, 3)
    one, three = (result[f"S3 ckda, {n}"]["seconds_for_60000"] for n in ("1 seed", "3 seeds"))
    result["three_seeds_over_one"] = round(three / one, 3)
    print("three seeds over one:", result["three_seeds_over_one"])
    print(write_json(Path(args.out) / "tracking.json", result))


if __name__ == "__main__":
    main()
