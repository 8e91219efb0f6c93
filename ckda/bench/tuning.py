"""Several processes compile what one will measure: Triton keeps what it compiled on the disk, where the latter finds it.

flash-linear-attention tries every configuration of a kernel at its first call. Afterwards each is timed for some 20 ms instead of
100, which is the same choice for less of a GPU's time. The rows of the sweep have no choice; they are run once.

What it chose holds for calls of any length, so that a check on few tokens would choose for what is timed. Before each shape it
is therefore made to choose again (:func:`forget_choices`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from ckda.bench import sweep
from ckda.bench.options import Shape
from ckda.bench.peers import peers

__all__ = ["compile_rows", "compile_side_by_side", "forget_choices", "share_configurations"]

FLA = ("fla.ops.kda", "fla.ops.gated_delta_product")  #: what of flash-linear-attention is timed


def share_configurations(part: int, parts: int) -> None:
    """Of every kernel that is decorated after this, only this part of its configurations, each timed briefly."""
    import triton
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def made(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        make(self, fn, arg_names, configs[part % len(configs) :: parts] if configs else configs, *rest, **options)
        self._do_bench = lambda run, quantiles: triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.__init__ = made


def _tuned_kernels(package: str) -> Iterator[Any]:
    """The kernels of an imported package that choose among configurations."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == package]:
        for kernel in [*vars(module).values()]:
            while isinstance(kernel, KernelInterface):
                if isinstance(kernel, Autotuner):
                    yield kernel
                kernel = getattr(kernel, "fn", None)


def forget_choices(modules: Sequence[str] = FLA) -> None:
    """Let every kernel that these modules' package has choose among its configurations again at its next call, whatever Triton's
    cache has kept. Configurations that FLA reads from files of its own, where FLA_CACHE_MODE asks for that, stay.
    """
    with suppress(ImportError):  # who is not here chooses nothing
        for name in modules:
            import_module(name)
        for kernel in _tuned_kernels(modules[0].split(".")[0]):
            kernel.cache.clear()
            kernel.cache_results = False


def _side_by_side(jobs: int, *words: Any) -> None:
    """So many processes, each its share of what the words name."""
    again = [sys.executable, "-m", "ckda.bench.tuning", str(jobs)]
    silent = subprocess.DEVNULL
    children = [
        subprocess.Popen([*again, str(part), *map(str, words)], stdout=silent, stderr=silent) for part in range(jobs)
    ]
    try:
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.kill()


def compile_side_by_side(jobs: int, shape: Shape) -> None:
    """All of FLA's configurations for heads of that size, by so many processes; this one then times each briefly."""
    _side_by_side(jobs, "fla", *shape)
    share_configurations(0, 1)


def compile_rows(jobs: int, device: str, names: Sequence[str]) -> None:
    """These rows of the sweep, by so many processes at most."""
    _side_by_side(min(jobs, len(names)), "sweep", device, *names)


def _compile_fla(parts: int, part: int, shape: Shape) -> None:
    """What one of those processes does: forward and backward of FLA's peers."""
    share_configurations(part, parts)
    for peer in peers("cuda", None):
        if "fla" in peer.name and "compiled" not in peer.name:
            with suppress(Exception):  # a configuration that does not fit; who measures says so
                peer.bind(
                    peer.draw(shape, "cuda", torch.bfloat16, 0), torch.randn(shape, device="cuda").bfloat16()
                ).both()


def _compile_rows(parts: int, part: int, device: str, names: Sequence[str]) -> None:
    """What one of those processes does: the calls of its rows, once each. The last rows take longest, so they are dealt first."""
    rows = {row.name: row for row in sweep.ROWS}
    for name in names[::-1][part::parts]:
        with suppress(Exception):  # who measures says so
            sweep.run_once(rows[name], device)


if __name__ == "__main__":
    parts, part, what, *words = sys.argv[1:]
    if what == "fla":
        _compile_fla(int(parts), int(part), Shape(*map(int, words)))
    else:
        _compile_rows(int(parts), int(part), words[0], words[1:])
    sys.stdout.flush()
    os._exit(0)  # some of FLA's threads do not end by themselves
