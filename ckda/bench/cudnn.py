"""NVIDIA's KDA kernels for Hopper (Python package nvidia-cudnn-frontend, 1.32) as a peer: forward and backward, kernels alone.

They are CUDA C++ that NVRTC compiles at the first launch. The package need not be installed: `benchmarks/cudnn_folder.py` unpacks
the few files that are needed into a folder, which may be carried to a machine without network. No host layer is timed, which is
the fairest to the peer. The kernels take heads of 128, unit keys, beta itself, and log|alpha| without signs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["FILES", "bind_launches", "load"]

#: what must lie in the folder
FILES = (
    "cudnn/linear_attention/hopper/cuda_host.py",
    "cudnn/linear_attention/hopper/cuda_bwd_host.py",
    "cudnn/linear_attention/cake/compiler.py",
    "cudnn/frost/device.py",
    "cudnn/_device.py",
    "cuda/bindings",
)
HEAD = 128


def load(folder: Path) -> Callable[[dict[str, Any], Tensor], Any]:
    """What binds a call to the kernels of that folder; a ValueError says what is not there."""
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"--cudnn {folder}: {missing[0]} is not there; python benchmarks/cudnn_folder.py {folder} makes it"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"--cudnn {folder}: its kernels need an NVIDIA GPU, and there is none here")
    torch.zeros(1, device="cuda")  # its own library wants a context to be there
    sys.path.insert(0, str(folder))
    try:
        from cudnn.linear_attention.hopper import cuda_bwd_host, cuda_host
    finally:
        sys.path.remove(str(folder))
    return lambda call, do: bind_launches(cuda_host, cuda_bwd_host, call, do)


def bind_launches(forward_host: Any, backward_host: Any, call: dict[str, Any], do: Tensor) -> Any:
    """The launches of forward, and of forward and backward, on what the call holds; all memory is made beforehand."""
    from ckda.bench.peers import Bound

    B, T, H, D = call["q"].shape
    if HEAD != D or call["v"].shape[-1] != D or call["v"].dtype != torch.bfloat16:
        raise ValueError(f"cuDNN's kernels take bfloat16 heads of {HEAD}, not {call['v'].dtype} of {D}")
    tokens = B * T
    given = [call[name].detach() for name in ("q", "k", "v", "g", "beta")]
    device = given[0].device
    bounds = torch.arange(0, tokens + 1, T, device=device, dtype=torch.int32)
    state = torch.zeros(B, H, D, D, device=device)
    o, final, dfinal = torch.empty_like(given[2]), torch.empty_like(state), torch.zeros_like(state)
    gradients = [torch.empty_like(x) for x in (*given, state)]
    room = torch.empty(backward_host.workspace_bytes(tokens, H, B), device=device, dtype=torch.uint8)
    do = do.contiguous()

    def pointers(*tensors: Tensor) -> list[int]:
        return [x.data_ptr() for x in tensors]

    ahead = pointers(*given, bounds, state, o, final)
    back = pointers(room, do, *given, bounds, state, dfinal, *gradients)

    def forward() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        forward_host.launch(device.index or 0, stream, *ahead, tokens, B, H)
        return o

    def both() -> list[Tensor]:
        forward()
        stream = torch.cuda.current_stream().cuda_stream
        backward_host.launch(device.index or 0, stream, *back, tokens, H, B)
        return gradients[:-1]

    return Bound(forward, both)
