"""Bytes that one update of the state-tracking trainer moves on a GPU, counted without one.

python benchmarks/tracking_traffic.py [--seeds 3] [--length 32] [--batch 1024] [--top 25] [--out results/bench]

The update runs on a few words on the CPU, as a GPU would run it (stacked linear layers, fused norm, Triton recurrence), under a
mode that adds up what each operation reads and writes; what grows with the words is scaled to the whole batch. The kernels of
this library do not run: they count as their tensors read and written once, or as often as the kernel does. A product with a
bias counts without the copy of the bias that the library makes first. Caches, idle multiprocessors and arithmetic are not here.
"""

import argparse
from collections import defaultdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckda.experiments.tracking.fast import words as fast
from ckda.experiments.tracking.model import Tracker, build_tracker
from ckda.experiments.tracking.task import WordProblem
from ckda.layers.gated_norm import HeadNorm, gated_norm
from ckda.ops import triton
from ckda.record import write_json
from ckda.train import AdamW, Ensemble, Recipe
from ckda.train.stacked_linear import stack_linear_layers

#: operations that leave more kernels than one; the sort of the embedding's gradient is an estimate
KERNELS = {"embedding_dense_backward": 12, "baddbmm": 2, "sum_by_symbol": 2}
#: the backward recurrences read their inputs twice, and write and read so many more tensors like do on the way
SCRATCH = {"complex_kda_backward": 4, "words_backward": 3}
SMALL = (64, 128)  # words
COPY = 4.2  # TB/s that an H200 copies
FREE = ("empty", "new_empty", "empty_like", "_unsafe_view", "view", "detach", "alias", "lift_fresh")


def size(x: Tensor) -> int:
    """Bytes of a tensor, what is expanded counted once."""
    return x.element_size() * prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)


class Traffic(TorchDispatchMode):
    """Adds up bytes and kernels by operation and by its largest shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        out = self._fake(func, args, kwargs) if name.startswith("ckda::") else func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        short = name.split("::")[1]
        known = {x.untyped_storage()._cdata for x in inputs}
        view = outputs and not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in outputs)
        if short in FREE or view or not (outputs or func._schema.is_mutable):
            return out
        moved = sum(map(size, inputs)) + sum(map(size, outputs))
        if short in SCRATCH:
            moved += sum(map(size, inputs)) + SCRATCH[short] * size(args[0])
        largest = max([*inputs, *outputs], key=lambda x: x.numel())
        key = f"{short} {list(largest.shape)}"
        self.found.append((key, moved, KERNELS.get(short, 1)))
        return out

    @staticmethod
    def _fake(func: Any, args: tuple, kwargs: dict) -> Any:
        with FakeTensorMode() as fake:
            args, kwargs = tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), out)


def _fused_step(optimizer: AdamW, grads: list[Tensor], lr: Tensor) -> None:
    with torch.no_grad():
        optimizer.count += 1
        optimizer._fused(grads, lr.item())


def ensemble_of(group: str, mixer: str, seeds: int, length: int, batch: int, words: bool = True) -> Ensemble:
    """As on a GPU, but on the CPU."""
    task = WordProblem.named(group)
    recipe = Recipe(steps=4, batch=batch, curriculum=(length,))
    ensemble = Ensemble(partial(build_tracker, mixer, task, by_symbol=words), task, recipe, tuple(range(seeds)))
    stack_linear_layers(ensemble.skeleton)
    for layer in ensemble.skeleton.modules():
        if hasattr(layer, "backend"):
            layer.backend = "triton"
    if words:
        Tracker._reads_words = lambda model, _: fast.is_by_symbol(model.mixer)  # type: ignore[method-assign]
    AdamW.step = _fused_step  # type: ignore[method-assign]
    ensemble.muon.groups = [list(range(len(ensemble.muon.parameters)))]
    return ensemble


def count(
    group: str, mixer: str, seeds: int, length: int, batch: int, words: bool = True
) -> list[tuple[str, int, int]]:
    """(operation and its largest shape, bytes, kernels) of one update, in order."""
    ensemble = ensemble_of(group, mixer, seeds, length, batch, words)
    for _ in range(2):  # the first makes what is made once
        ensemble.prepare()
        with Traffic() as traffic:
            ensemble.update()
    return traffic.found


def account(
    group: str, mixer: str, seeds: int, length: int, batch: int, words: bool = True
) -> dict[str, dict[str, float]]:
    """Operation -> its kernels and gigabytes in one update: from two small batches along a straight line."""
    small, more = (count(group, mixer, seeds, length, size, words) for size in SMALL)
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"kernels": 0, "gigabytes": 0.0})
    for (key, low, kernels), (_, high, _) in zip(small, more, strict=True):
        slope = (high - low) / (SMALL[1] - SMALL[0])
        rows[key]["kernels"] += kernels
        rows[key]["gigabytes"] += (low + slope * (batch - SMALL[0])) / 1e9
    return dict(sorted(rows.items(), key=lambda row: -row[1]["gigabytes"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", default="S3")
    parser.add_argument("--mixer", default="ckda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--tokens", action="store_true", help="every token projected, as without kernels for words")
    parser.add_argument("--out", help="also write tracking_traffic.json there")
    args = parser.parse_args()
    triton.refuses = lambda call: None  # as on a GPU
    HeadNorm.forward = lambda layer, o, gate=None: gated_norm(o, gate, layer.weight, layer.eps)  # type: ignore
    rows = account(args.group, args.mixer, args.seeds, args.length, args.batch, not args.tokens)
    total = {what: sum(row[what] for row in rows.values()) for what in ("kernels", "gigabytes")}
    for key, row in [*list(rows.items())[: args.top], ("in all", total)]:
        print(f"{row['gigabytes']:8.3f} GB {row['kernels']:5d}  {key}")
    print(f"{total['gigabytes'] / COPY:.2f} ms at {COPY} TB/s; shapes are those of {SMALL[0]} words")
    if args.out:
        write_json(Path(args.out) / "tracking_traffic.json", {"arguments": vars(args), "total": total, "rows": rows})


if __name__ == "__main__":
    main()
