"""A micro-batch's forward and backward pass as a CUDA graph: recorded once, then replayed.

A small model's pass is thousands of short kernels, and launching them one by one takes the host longer than the GPU needs to
run them. A recording is launched as a whole. It holds addresses, not values, so batches are copied into buffers that stay, and
the gradients stay where they are: the first micro-batch of an update writes them, later ones add to them (a recording each, in
one pool of memory). Weights are cast for autocast inside the recording, at every replay anew: the cache of casts lives as long
as the autocast context of one forward pass, which begins and ends inside.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replay"]

WARM = 3  #: updates that run kernel by kernel first, which compiles and sizes what a recording must find ready


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings of a device, for cuBLAS keeps room of its own for every stream that it has run on.

    With a stream each, a process kept 64 MiB more with every unit that it had trained (results/lm).
    """
    return torch.cuda.Stream(device)


class Replay:
    """Calls `run(batch)`, recorded where that works.

    `run` takes a dictionary of tensors and "share", a number or a tensor of one, adds to the parameters' gradients and returns
    a scalar; nothing in it may wait for the device. While :attr:`recorded`, the gradients lie where the recording writes them: they
    are attached again where they were set to None between two updates, and must not be within one.
    """

    def __init__(
        self, run: Callable[[dict[str, Any]], Tensor], parameters: Iterable[nn.Parameter], device: torch.device
    ):
        self.run, self.parameters, self.device = run, list(parameters), device
        self.error: str | None = None  #: why recording failed
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._inputs: dict[str, Tensor] = {}
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._grads: list[Tensor | None] = []  # of the parameters, as recorded
        self._updates = 0

    @property
    def recorded(self) -> bool:
        """Whether replays are what runs."""
        return bool(self._graphs)

    def __call__(self, batch: dict[str, Any], first: bool) -> Tensor:
        """`run(batch)`; `first`: of its update."""
        if self.error is not None:
            return self.run(batch)
        self._updates += first
        self._fill(batch)
        if self._updates <= WARM:
            return self._aside()
        if self.recorded:
            self._attach(first)
        if first not in self._graphs and not self._record(first):
            return self.run(batch)
        graph, loss = self._graphs[first]
        graph.replay()
        return loss

    def _attach(self, first: bool) -> None:
        """The gradients that the recordings write to are the parameters' own, whatever was done to these since."""
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                if not first:
                    raise RuntimeError(
                        "a gradient was replaced or set to None between the micro-batches of a recorded update"
                    )
                parameter.grad = grad

    def _aside(self) -> Tensor:
        """What will be recorded, from the same buffers on the same stream, as torch advises for a warm-up."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self.run(self._inputs)
        current.wait_stream(self._stream)
        return loss

    def _fill(self, batch: dict[str, Any]) -> None:
        """The batch into the buffers, which are made the first time."""
        for name, value in batch.items():
            if name not in self._inputs:
                like = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
                self._inputs[name] = torch.empty_like(like, device=self.device)
            if isinstance(value, Tensor):
                self._inputs[name].copy_(value, non_blocking=True)
            else:
                self._inputs[name].fill_(value)

    def _record(self, first: bool) -> bool:
        """Record the pass; after an error everything runs kernel by kernel from here on."""
        current = torch.cuda.current_stream(self.device)
        if first:
            self._drop_gradients()  # the recording makes new ones, in its own pool
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the thread that pins batches may go on calling CUDA meanwhile
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                loss = self.run(self._inputs)
        except RuntimeError as error:
            self._settle(current)
            self._graphs.clear()
            self._grads = []
            self.error = " ".join(str(error).split())[:300]
            print(f"updates run kernel by kernel, for they could not be recorded: {self.error}", file=sys.stderr)
            if first:
                self._drop_gradients()
            return False
        self._graphs[first] = graph, loss
        self._grads = [parameter.grad for parameter in self.parameters]
        return True

    def _settle(self, current: torch.cuda.Stream) -> None:
        """After a recording that failed: its stream is still the current one, and torch's random numbers may still wait for
        its end, which the end of any other recording is to them."""
        torch.cuda.set_stream(current)
        torch.cuda.synchronize(self.device)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(self.device)):
            torch.zeros(1, device=self.device)
        torch.cuda.set_stream(current)

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
