"""One rank of two on one GPU: the operator over ranks beside one call on the same GPU, both against float64. Returns excesses."""

from typing import Any

import torch
from torch import distributed

from ckda.ops import which_backend
from ckda.ops.context import Context
from tests.context.ranks import fork
from tests.context.worker import build, spread, summed
from tests.ops.common import Comparison, cast, excesses, run

SIZES: dict[str, Any] = {"B": 1, "T": 1024, "H": 2, "initial": True, "device": "cuda"}
CASES: dict[str, dict[str, Any]] = {
    "bfloat16, heads of 128": {"K": 128, "V": 128, "dtype": torch.bfloat16},
    "bfloat16, heads of 64, packed": {
        "K": 64, "V": 64, "dtype": torch.bfloat16, "cu_seqlens": [0, 100, 100, 700, 1024]
    },
    "bfloat16, nothing is forgotten": {
        "K": 64, "V": 64, "dtype": torch.bfloat16, "gate": None, "beta_range": None, "lasting": True
    },
    "float32, grouped heads": {"HV": 4, "K": 32, "V": 64, "dtype": torch.float32},
    "float32, wide heads": {"K": 192, "V": 128, "T": 256, "dtype": torch.float32},
}  # fmt: skip


def main() -> dict[str, Any]:
    """{case: [backend, worst name, its ratio by the 2x rule where the plain code is one call on the same GPU]}."""
    distributed.init_process_group("gloo")
    out = {}
    for name, sizes in CASES.items():
        call = build(**SIZES | sizes)
        oracle, single = run(cast(call, torch.float64), "chunked"), run(call, "auto")
        for zigzag in (False, True):
            context = Context(zigzag=zigzag)
            ours = summed(run(call, spread(context)), context)
            found = excesses([Comparison(call, ours, single, oracle)], sizes["dtype"])
            worst = max(found, key=lambda excess: excess.ratio)
            backend = which_backend(**call).backend.name
            out[name + ", zig-zag" * zigzag] = [backend, worst.name, worst.ratio]
    distributed.destroy_process_group()
    return out


if __name__ == "__main__":
    fork(main, 2)
