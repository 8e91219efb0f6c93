"""torchtitan's command on a machine without an accelerator, to try a run before it goes to the cluster.

    torchrun --nproc-per-node 2 -m ckda.compat.torchtitan.cpu --module ckda.compat.torchtitan --config train ...

torchtitan 0.3 asks torch which accelerator there is and takes CUDA where there is none. Here the answer is the CPU, with gloo
between ranks, and what it asks of a GPU besides (a name, memory) is answered by zeros. It also calls
``torch.distributed.set_timeout``, which torch 2.13 has under another name.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import distributed

__all__ = ["main"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a call that is about a GPU's memory."""


#: what torchtitan calls on torch.cuda and torch.cpu does not have
_ANSWERS = {
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": _nothing,
    "empty_cache": _nothing,
    "current_device": lambda: 0,
}


def main() -> None:
    """Run torchtitan with the CPU as its device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in _ANSWERS.items():
        if name not in vars(torch.cpu) or name == "current_device":
            setattr(torch.cpu, name, answer)
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
