"""One kernel launch as data, and what every launch shares."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ckda.ops.call import NUM_TENSORS, Call, Gradients

__all__ = [
    "Launch",
    "aligned",
    "are_tidy",
    "assemble",
    "compile_together",
    "contiguous",
    "enter_context",
    "gate_arguments",
    "launch",
    "power_of_two",
    "state_warps",
    "tidied",
]


def state_warps(BK: int, BV: int) -> int:
    """Warps that carry a state [BK, BV]: about eight of its numbers a thread."""
    return min(4, max(1, BK * BV // 512))


class Launch(NamedTuple):
    """A kernel, its grid and its arguments, so that it can also be compiled without a device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    maxnreg: int | None = None  #: registers a thread may take, where more programs at a time are worth a few spills

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __call__(self) -> Any:
        """Run it; what was compiled for arguments of the same kind is taken at once, which spares half of the host's time.

        Returns what Triton compiled, None where it interprets.
        """
        with _on_device(self.arguments.values()):
            if not isinstance(self.kernel, JITFunction):  # interpreted
                self.kernel[self.grid](**self.arguments, **self.options)
                return None
            enter_context(torch.cuda.current_device())
            arguments, key = self._ordered(), self._key()
            compiled = _COMPILED.get(key)
            if compiled is not None:
                compiled[(*self.grid, 1, 1)[:3]](*arguments)
                return compiled
            if len(_COMPILED) > 4096:  # lengths without end
                _COMPILED.clear()
            with _LOADING:
                compiled = _COMPILED[key] = self.kernel[self.grid](**self.arguments, **self.options)
            return compiled

    def _ordered(self) -> list[Any]:
        """The arguments in the kernel's order."""
        return [self.arguments[name] for name in self.kernel.arg_names]

    def _key(self) -> tuple:
        """What the compiled kernel depends on."""
        options = (self.num_warps, self.num_stages, self.maxnreg, torch.cuda.current_device())
        return (id(self.kernel), *options, *map(_kind, self._ordered()))


def compile_together(launches: Sequence[Launch]) -> None:
    """Compile what was never run side by side: Triton's compiler works outside of Python's lock, and so does the assembler.

    Nothing where Triton interprets or cannot do it; then each is compiled when it is run.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or not all(isinstance(x.kernel, JITFunction) for x in launches):
        return
    with _on_device(launches[0].arguments.values()):
        new = [x for x in launches if x._key() not in _COMPILED]
        if len(new) < 2:
            return
        device = torch.cuda.current_device()
        with ThreadPoolExecutor(len(new)) as threads:
            with mode(threads, ignore_errors=True):  # an error comes again when it is run
                futures = [x.kernel.run(grid=x.grid, warmup=True, **x.arguments, **x.options) for x in new]
            found = [future.result(True) if hasattr(future, "result") else future for future in futures]
            _load([kernel for kernel in found if kernel is not None], threads, device)


def _load(kernels: Sequence[Any], threads: ThreadPoolExecutor, device: int) -> None:
    """Compile the C functions that launch these kernels, side by side, and put all onto the device, one after the other.

    These functions' modules have one name. When Python loads a file again it fills the module of that name that it loaded last,
    which may be one that another thread has just loaded and not yet read: a kernel would get another kernel's function.
    """

    kernels = [kernel for kernel in kernels if getattr(kernel, "_run", None) is None]  # the others are there

    def build(kernel: Any) -> None:
        with suppress(Exception), torch.cuda.device(device):  # an error comes again when it is loaded
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # for the file that it leaves

    list(threads.map(build, kernels))
    with _LOADING:
        for kernel in kernels:
            _ = kernel.run


_LOADING = threading.RLock()  # what launches kernels is loaded by one thread at a time
_COMPILED: dict[tuple, Any] = {}  # kernel, options, device and kinds of arguments -> what Triton made of them


def _kind(x: Any) -> Any:
    """What of an argument a compiled kernel depends on, or more than that: Triton does not look at all of a whole number."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else x


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](...), as :class:`Launch` does it: on the device of the first tensor among the arguments."""
    with _on_device(arguments):
        kernel[grid](*arguments, **options)


_HERE = nullcontext()
_THREAD = threading.local()


def enter_context(device: int) -> None:
    """Make the device's context this thread's: describing tiles needs it, and a thread of autograd's may have none yet."""
    if getattr(_THREAD, "device", None) != device:
        torch.cuda.mem_get_info(
            device
        )  # any question that goes to the device; this one may be asked while a graph is recorded
        _THREAD.device = device


def _on_device(arguments: Iterable[Any]) -> AbstractContextManager:
    """Triton launches on the current device: another one where the first tensor lies elsewhere."""
    first = next(x for x in arguments if isinstance(x, Tensor))
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        return torch.cuda.device(first.get_device())
    return _HERE


def power_of_two(n: int) -> int:
    """The tile that holds n channels: a power of two, at least 16.

    Example:
        >>> power_of_two(3), power_of_two(64), power_of_two(65)
        (16, 64, 128)
    """
    return max(16, 1 << (n - 1).bit_length())


def are_tidy(tensors: Iterable[Tensor | None]) -> bool:
    """Whether kernels can read all where they lie: contiguous, and beginning at multiples of 16 bytes."""
    return not [x for x in tensors if x is not None and (x.data_ptr() % 16 or not x.is_contiguous())]


def contiguous(x: Tensor | None) -> Tensor | None:
    """x as the kernels read it, which know no strides."""
    return None if x is None else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """x contiguous and beginning at 16 bytes, as tiles of it must."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


_RAW = ("q", "k", "g", "beta", "sign", "A_log", "dt_bias")


def gate_arguments(call: Call, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    """The raw inputs but v, None for those that are not read, and the flags that say how they are read."""
    _, T, H, K = call.q.shape
    return {f"p_{name}": None if name in unread else contiguous(getattr(call, name)) for name in _RAW} | {
        "T": T,
        "scale": call.q_scale,
        "H": H,
        "HV": call.v.shape[2],
        "K": K,
        "BK": power_of_two(K),
        "GATE": call.gate or "none",
        "SIGNED": call.sign is not None,
        "HAS_A_LOG": call.A_log is not None,
        "HAS_DT_BIAS": call.dt_bias is not None,
        "NORMALIZE": call.normalize_qk,
        "BETA_RANGE": call.beta_range or 0,
        "PACKED": call.cu_seqlens is not None,
    }


def assemble(
    call: Call,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor | None,
    dA_log: Tensor | None,
    ddt_bias: Tensor | None,
    dinitial: Tensor | None,
    derase: Tensor | None = None,
) -> Gradients:
    """What backward kernels wrote, as :class:`Gradients`: grouped heads summed, in the arguments' dtypes.

    dinitial is [N, HV, K, V], or [N * num_segments, HV, K, V], of which the first of each sequence counts.
    """
    H = call.q.shape[2]
    if dq.shape[2] > H:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3, dtype=torch.float32).to(call.q.dtype) for x in (dq, dk))
    dwrite = None
    if call.write is not None:  # dv is that of write * v
        dwrite, dv = (dv * call.v).to(call.write.dtype), dv * call.write
    if dv.dtype != call.v.dtype:
        dv = dv.to(call.v.dtype)
    if call.initial_state is not None and dinitial is not None:
        dinitial = dinitial.unflatten(0, (call.num_sequences, -1))[:, 0].to(call.initial_state.dtype).contiguous()
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, derase, dwrite, dinitial)


def tidied(call: Call, first: int = 0) -> Call:
    """The call as kernels read it, which know no strides: tensors contiguous, at multiples of 16 bytes, the state in float32.

    Itself where that is so, as it mostly is. Fields before the `first` are not read, and stay as they are.
    """
    state, read = call.initial_state, call.tensors[first:]
    if (state is None or state.dtype == torch.float32) and are_tidy(read):
        return call
    if state is not None:
        call = call._replace(initial_state=state.float())
    tidy: list[Any] = [*call]
    tidy[first:NUM_TENSORS] = (None if x is None else aligned(x) for x in call.tensors[first:])
    return Call(*tidy)
