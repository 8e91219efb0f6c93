"""One rank of two: a layer over ranks in one compiled graph, beside the same without. Returns the largest differences."""

import torch
from torch import distributed

from ckda.layers.mixers import build_mixer
from ckda.ops.context import Context
from tests.context.ranks import fork


def main() -> list[float]:
    """Of the output and of the input's gradient."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    context = Context(zigzag=True)
    torch.manual_seed(0)
    layer, x = build_mixer("ckda", 16, 2, 8, conv_size=4), torch.randn(2, 64, 16)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        own = context.part(x).requires_grad_()
        y = run(own, context=context)
        y.square().sum().backward()
        results.append((y.detach(), own.grad))
    distributed.destroy_process_group()
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


if __name__ == "__main__":
    fork(main, 2)
