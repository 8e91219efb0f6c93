"""What a steady update costs: tokens a second, MFU, memory, and how much of the time the GPU is busy."""

import os
import time
from typing import Any

import torch

from ckda.lm.recipe import peak_flops
from ckda.lm.replay import WARM
from ckda.lm.train import Trainer, prefetched

__all__ = ["PROFILED", "busy_fraction", "measure", "union"]

PROFILED = 5  #: updates under the profiler


def union(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels on several streams count once.

    Example:
        >>> union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
    """
    total, last = 0.0, float("-inf")
    for first, end in sorted(spans):
        total += max(0.0, end - max(first, last))
        last = max(last, end)
    return total


def busy_fraction(trainer: Trainer, steps: int = PROFILED) -> dict[str, Any]:
    """Of the time from the first kernel to the last over `steps` updates, the part in which some kernel runs.

    Kernels of a CUDA graph count one by one. The profiler slows launches, so the true fraction is no smaller; it stays loaded and
    may go on doing so, so what is to be timed must be timed before. Also the kernels that take longest.
    """
    device = trainer.world.device
    if device.type != "cuda":
        return {"busy": None, "reason": f"the device is {device.type}"}
    os.environ.setdefault(
        "TEARDOWN_CUPTI", "0"
    )  # unloading it while CUDA graphs exist has crashed, says torch.profiler
    try:
        with prefetched(trainer.batches(trainer.step, trainer.step + steps + 1), device) as batches:
            trainer.update(batches)
            return _profiled(trainer, batches, steps)
    except (AttributeError, RuntimeError) as error:  # no profiler on this device, or another one's
        return {"busy": None, "reason": f"{type(error).__name__}: {error}"}


def _profiled(trainer: Trainer, batches: Any, steps: int) -> dict[str, Any]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            trainer.update(batches)
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    by_name: dict[str, float] = {}
    for event in profiler.events():
        note = getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep"))
        if event.device_type == DeviceType.CUDA and not note:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.end - event.time_range.start
    if not spans:
        return {"busy": None, "reason": "the profiler saw no kernel"}
    wall = max(end for _, end in spans) - min(first for first, _ in spans)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:25]
    total = sum(by_name.values())
    return {
        "busy": union(spans) / wall,
        "profiled_step_ms": wall / steps / 1e3,
        "kernels_per_step": len(spans) / steps,
        "kernels": [{"name": name[:120], "share": round(spent / total, 4)} for name, spent in longest],
    }


def measure(trainer: Trainer, warmup: int = WARM + 3, steps: int = 20, profile: bool = True) -> dict[str, Any]:
    """Time `steps` steady updates after a warm-up, without any look at the losses between; then profile a few more.

    `recorded` says whether the timed updates replayed a CUDA graph, `eager_because` why not. The recipe must have room for all of
    them: past its end there is no learning rate.
    """
    needed = trainer.step + warmup + steps + (PROFILED + 1 if profile else 0)
    if needed > trainer.recipe.steps:
        raise ValueError(
            f"the recipe has {trainer.recipe.steps} updates; timing after update {trainer.step} needs {needed}"
        )
    device = trainer.world.device
    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    first = trainer.step
    with prefetched(trainer.batches(first, first + warmup + steps), device) as batches:
        for _ in range(warmup):
            trainer.update(batches)
        wait()
        recorded = trainer.recorded
        began = time.perf_counter()
        for _ in range(steps):
            loss, _ = trainer.update(batches)
        wait()
        seconds = time.perf_counter() - began
    speed = steps * trainer.recipe.tokens_per_step / seconds
    peak = peak_flops(torch.cuda.get_device_name(device)) if cuda else None
    flops = trainer.flops_per_token
    result: dict[str, Any] = {
        "loss": float(loss),
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_second": speed,
        "mfu": None if peak is None or flops is None else speed * flops / peak,
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "recorded": recorded,
        "eager_because": trainer.eager_because,
    }
    return result | (busy_fraction(trainer) if profile and cuda else {})
