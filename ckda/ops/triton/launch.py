"""One kernel launch as data, and what every launch shares."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from ckda.ops.call import Call, Gradients

__all__ = ["Launch", "aligned", "assemble", "contiguous", "gate_arguments", "launch", "power_of_two", "state_warps"]


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
            arguments = [self.arguments[name] for name in self.kernel.arg_names]
            options = (self.num_warps, self.num_stages, self.maxnreg, torch.cuda.current_device())
            key = (id(self.kernel), *options, *map(_kind, arguments))
            compiled = _COMPILED.get(key)
            if compiled is not None:
                compiled[(*self.grid, 1, 1)[:3]](*arguments)
                return compiled
            if len(_COMPILED) > 4096:  # lengths without end
                _COMPILED.clear()
            compiled = _COMPILED[key] = self.kernel[self.grid](**self.arguments, **self.options)
            return compiled


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


def assemble(call: Call, out: dict[str, Any]) -> Gradients:
    """What a backward kernel wrote, as :class:`Gradients`: grouped heads and the sequences' or chunks' parts summed."""
    dq, dk, H = out["p_dq"], out["p_dk"], call.q.shape[2]
    if dq.shape[2] > H:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3, dtype=torch.float32).to(call.q.dtype) for x in (dq, dk))
    K = call.q.shape[3]  # the chunks' parts may have room for more
    dA_log = None if call.A_log is None else out["p_dlog_rate"][..., :K].sum((0, 2)).to(call.A_log.dtype)
    ddt_bias = None if call.dt_bias is None else out["p_dbias"][..., :K].sum(0).flatten().to(call.dt_bias.dtype)
    dinitial = None if call.initial_state is None else out["p_dinitial"].to(call.initial_state.dtype)
    gates = out.get("p_derase"), out.get("p_dwrite")
    return Gradients(dq, dk, out["p_dv"], out["p_dg"], out["p_dbeta"], dA_log, ddt_bias, *gates, dinitial)
