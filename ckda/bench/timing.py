"""How a call is timed: by the paper's protocol, and what is kept of an earlier run in the same folder."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ckda.record import read_json

__all__ = ["ROUNDS", "TIMED", "WARMUP", "earlier", "measure", "milliseconds", "rounds_ms"]

ROUNDS, WARMUP, TIMED = 4, 20, 50


def milliseconds(call: Callable[[], Any], count: int, device: str) -> list[float]:
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


def _counts(smoke: bool) -> tuple[int, int, int]:
    return (1, 1, 3) if smoke else (ROUNDS, WARMUP, TIMED)


def measure(call: Callable[[], Any], device: str, smoke: bool) -> dict[str, float]:
    """Milliseconds by the paper's protocol: mean, and p20, p50, p80 over all timed calls; `waited`: the median where every
    call is waited for, so that what the host does before the first kernel counts."""
    rounds, warmup, timed = _counts(smoke)
    times, waited = [], []
    for _ in range(rounds):
        times += milliseconds(call, warmup + timed, device)[warmup:]
        waited += [milliseconds(call, 1, device)[0] for _ in range(3 if smoke else 10)]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return {
        "mean": statistics.mean(times),
        "p20": p20,
        "p50": p50,
        "p80": p80,
        "waited": statistics.median(waited),
    }


def rounds_ms(call: Callable[[], Any], device: str, smoke: bool) -> list[float]:
    """The mean time of each round."""
    rounds, warmup, timed = _counts(smoke)
    return [statistics.mean(milliseconds(call, warmup + timed, device)[warmup:]) for _ in range(rounds)]


def earlier(path: Path, here: dict[str, Any], fresh: bool, smoke: bool, **asked: Any) -> list[dict[str, Any]]:
    """The rows that were measured before on the same device at the same commit, without those that failed.

    `here` is the environment of this run, `asked` what else must be as in the record. Rows of another commit or device are not
    mixed in, nor those of a smoke run with others: a ValueError says so. What a smoke run left is no reason to refuse others.
    """
    if fresh or not path.exists():
        return []
    record = read_json(path)
    was_smoke = record.get("protocol") == "smoke"
    if was_smoke and not smoke:
        return []
    if smoke and not was_smoke:
        raise ValueError(f"{path} was measured, and this is a smoke run; take another --out, or --fresh to begin anew")
    pairs = {name: (record["environment"][name], here[name]) for name in ("device", "commit")}
    pairs |= {name: (record.get(name), now) for name, now in asked.items()}
    for name, (was, now) in pairs.items():
        if was != now:
            raise ValueError(
                f"{path} was measured with {name} {was}, and this is {now}; take another --out, or --fresh to begin anew"
            )
    return [row for row in record["rows"] if "failed" not in row]
