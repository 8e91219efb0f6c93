"""One device or many, by the same code: who we are, how the model is spread, and how ranks agree.

``torchrun`` sets the environment this reads; without it there is one rank. Control messages travel between CPUs (gloo),
so that agreeing never waits for a GPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckda.ops.context import Context

__all__ = ["World", "alone", "blocks_of", "join", "share_time", "spread"]


@dataclass(frozen=True)
class World:
    """The ranks of a run and this one's place among them."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def max(self, value: int) -> int:
        """The largest value of any rank, the same on all."""
        if self.size > 1:
            tensor = torch.tensor([value])
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
            return int(tensor[0])
        return value

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on the device the values are on."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(out, value)
        return out

    def first(self, value: Any) -> Any:
        """The main rank's value."""
        return self.gather(value)[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.max(0)

    def leave(self) -> None:
        """End the process group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def alone(device: str) -> World:
    """The only rank there is. Its GPU has a number, for some of torch's functions refuse a device without one.

    Example:
        >>> alone("cuda").device.index, alone("cpu").device.type
        (0, 'cpu')
    """
    return World(0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))


def join(device: str) -> World:
    """Join the ranks that torchrun started, or be the only one."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        return alone(device)
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return World(rank, size, place)


def share_time(world: World, ranks: int) -> Context | None:
    """The context that this rank is in where `ranks` neighbours share the time axis of their sequences; None for one.

    The ranks are a mesh of two axes, ("data", "context"): along the first they read different sequences, along the second
    different parts of the same. Weights are spread over both, see :func:`spread`.
    """
    if ranks < 1 or world.size % ranks:
        raise ValueError(f"context is {ranks}; it must divide the number of ranks, {world.size}")
    if ranks == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    shape = (world.size // ranks, ranks)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "context"))
    return Context(mesh["context"].get_group())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The stack of layers: the longest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard or compile")
    return max(lists, key=len)


def spread(model: nn.Module, world: World, how: str, gather: str = "fp32") -> tuple[nn.Module, Callable[[bool], Any]]:
    """Spread the model over the ranks; returns what to call, and a context `sync(last)` for accumulated gradients.

    how: "none" (one rank), "ddp", or "fsdp" (FSDP2: every layer's weights sharded over the ranks). gather: the dtype in
    which FSDP moves and uses weights, "fp32" (autocast chooses, the numbers of one device) or "bf16" (half the traffic).
    """
    if how == "none":
        return model, lambda last: nullcontext()
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        return wrapped, lambda last: nullcontext() if last else wrapped.no_sync()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = gather == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def sync(last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(last)
        yield

    return sharded, sync
