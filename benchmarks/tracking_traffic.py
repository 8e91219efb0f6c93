"""Bytes that one update of the state-tracking trainer moves on a GPU, counted without one.

python benchmarks/tracking_traffic.py [--seeds 3] [--length 32] [--batch 1024] [--top 25] [--out results/bench]

The update runs on a few words on the CPU, as a GPU would run it (stacked linear layers, fused norm, Triton recurrence), under a
mode that adds up what each operation reads and writes; what grows with the words is scaled to the whole batch. The operator and
the norm do not run: they count as their tensors read and written once (the backward recurrence reads its inputs twice).
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckda.layers import parts
from ckda.layers.gated_norm import gated_norm
from ckda.models.tracker import build_tracker
from ckda.ops import registry
from ckda.record import write_json
from ckda.tasks.groups import WordProblem
from ckda.train import Ensemble, Recipe
from ckda.train.stacked_linear import stack_linear_layers

#: operations that leave more kernels than one; the sort of the embedding's gradient is an estimate
KERNELS = {"embedding_dense_backward": 12, "baddbmm": 2, "cat": 1, "sum": 1}
FREE = ("empty", "new_empty", "empty_like", "_unsafe_view", "view", "detach", "alias", "lift_fresh")


def size(x: Tensor) -> int:
    """Bytes of a tensor, what is expanded counted once."""
    return x.element_size() * prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)


class Traffic(TorchDispatchMode):
    """Adds up bytes and kernels by operation and by its largest shape."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)
        self.kernels: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        out = self._fake(func, args, kwargs) if name.startswith("ckda::") else func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        short = name.split("::")[1]
        known = {x.untyped_storage()._cdata for x in inputs}
        view = outputs and not func._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in outputs)
        if short in FREE or view or not outputs and not func._schema.is_mutable:
            return out
        moved = sum(map(size, inputs)) + sum(map(size, outputs)) * (1 if outputs else 0)
        if name == "ckda::complex_kda_backward":
            moved += sum(size(x) for x in inputs)
        largest = max([*inputs, *outputs], key=lambda x: x.numel())
        key = f"{short} {list(largest.shape)}"
        self.bytes[key] += moved
        self.kernels[key] += KERNELS.get(short, 1)
        return out

    @staticmethod
    def _fake(func: Any, args: tuple, kwargs: dict) -> Any:
        with FakeTensorMode() as fake:
            args, kwargs = tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), out)


def ensemble_of(group: str, mixer: str, seeds: int, length: int, batch: int) -> Ensemble:
    """As on a GPU, but on the CPU."""
    task = WordProblem.named(group)
    recipe = Recipe(steps=4, batch=batch, curriculum=(length,))
    ensemble = Ensemble(partial(build_tracker, mixer, task), task, recipe, tuple(range(seeds)))
    stack_linear_layers(ensemble.skeleton)
    for layer in ensemble.skeleton.modules():
        if hasattr(layer, "backend"):
            layer.backend = "triton"
    ensemble.muon.groups = [list(range(len(ensemble.muon.parameters)))]
    return ensemble


def count(group: str, mixer: str, seeds: int, length: int, batch: int) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes and kernels by operation of one update."""
    ensemble = ensemble_of(group, mixer, seeds, length, batch)
    ensemble.prepare()
    with Traffic() as traffic:
        ensemble.update()
    return dict(traffic.bytes), dict(traffic.kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", default="S3")
    parser.add_argument("--mixer", default="ckda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--out", help="also write tracking_traffic.json there")
    args = parser.parse_args()
    registry.BACKENDS["triton"] = replace(registry.BACKENDS["triton"], refuses=lambda call: None)
    parts.HeadNorm.forward = lambda layer, o, gate=None: gated_norm(o, gate, layer.weight, layer.eps)  # type: ignore
    small = 64
    moved, kernels = count(args.group, args.mixer, args.seeds, args.length, small)
    table = []
    for key, value in moved.items():
        shape = [int(n) for n in key.split("[")[1][:-1].split(",") if n.strip()]
        grows = prod(shape) >= small * args.length  # the rest is weights
        table.append((key, kernels[key], value / 1e9 * (args.batch / small if grows else 1)))
    table.sort(key=lambda row: -row[2])
    total, number = sum(row[2] for row in table), sum(row[1] for row in table)
    for key, n, gigabytes in table[: args.top]:
        print(f"{gigabytes:8.3f} GB {n:5d}  {key}")
    print(f"{total:8.3f} GB {number:5d}  in all, {total / 4.2:.2f} ms at 4.2 TB/s")
    if args.out:
        rows = [{"operation": k, "kernels": n, "gigabytes": round(g, 4)} for k, n, g in table]
        write_json(Path(args.out) / "tracking_traffic.json", {"arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
