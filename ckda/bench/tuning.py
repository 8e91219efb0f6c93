"""flash-linear-attention tries every configuration of a kernel at its first call. Here several processes compile them first.

Triton keeps what it compiled on the disk, so the process that measures afterwards finds it there. It then times each configuration
for some 20 ms instead of 100, which is the same choice for less of a GPU's time.
"""

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import torch

from ckda.bench.options import Shape
from ckda.bench.peers import peers

__all__ = ["compile_side_by_side", "share_configurations"]


def share_configurations(part: int, parts: int) -> None:
    """Of every kernel that is decorated after this, only this part of its configurations, each timed briefly."""
    import triton
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def made(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        make(self, fn, arg_names, configs[part % len(configs) :: parts] if configs else configs, *rest, **options)
        self._do_bench = lambda run, quantiles: triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.__init__ = made


def compile_side_by_side(jobs: int, shape: Shape) -> None:
    """All of FLA's configurations for heads of that size, by so many processes; this one then times each briefly."""
    again = [sys.executable, "-m", "ckda.bench.tuning", *map(str, shape), str(jobs)]
    silent = subprocess.DEVNULL
    children = [subprocess.Popen([*again, str(part)], stdout=silent, stderr=silent) for part in range(jobs)]
    try:
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.kill()
    share_configurations(0, 1)


def _compile_share(shape: Shape, parts: int, part: int) -> None:
    """What one of those processes does: forward and backward of FLA's peers."""
    share_configurations(part, parts)
    for peer in peers("cuda", None):
        if "fla" in peer.name and "compiled" not in peer.name:
            with suppress(Exception):  # a configuration that does not fit; who measures says so
                peer.bind(
                    peer.draw(shape, "cuda", torch.bfloat16, 0), torch.randn(shape, device="cuda").bfloat16()
                ).both()


if __name__ == "__main__":
    B, T, H, D, jobs, share = map(int, sys.argv[1:])
    _compile_share(Shape(B, T, H, D), jobs, share)
    sys.stdout.flush()
    os._exit(0)  # some of FLA's threads do not end by themselves
