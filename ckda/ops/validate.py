"""Checks of the operator's arguments. Each failure is a ValueError that names the argument, what it was, what it may be."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ckda.ops.call import Call
from ckda.ops.gate import GATES

__all__ = ["MAX_WIDTH", "check_call", "check_values"]

MAX_WIDTH = 256
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _fail(name: str, was: object, may: str) -> None:
    raise ValueError(f"{name} is {was}; it must be {may}")


def _check_shape(name: str, x: Tensor, axes: str, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        _fail(f"the shape of {name}", list(x.shape), f"[{axes}] = {list(shape)}")


def _check_main(call: Call) -> None:
    """q, k and v: ranks, widths, head counts; the other arguments are measured by them."""
    required = ("q", "k", "v", "g")
    for name, x in zip(call._fields, call.tensors, strict=False):
        if not isinstance(x, Tensor) and (x is not None or name in required):
            _fail(name, type(x).__name__, "a tensor" if name in required else "a tensor or None")
        if name in required and x is not None and x.dim() != 4:
            _fail(f"the rank of {name}", f"{x.dim()} (shape {list(x.shape)})", "4: [B, T, heads, width]")
    B, T, H, K = call.q.shape
    if min(call.q.shape) < 1:
        _fail("the shape of q", list(call.q.shape), "[B, T, H, K] with no axis empty")
    _check_shape("k", call.k, "B, T, H, K", (B, T, H, K))
    HV, V = call.v.shape[2:]
    if tuple(call.v.shape[:2]) != (B, T) or HV < 1 or V < 1:
        _fail("the shape of v", list(call.v.shape), f"[B, T, HV, V] = [{B}, {T}, HV, V]")
    if HV % H:
        _fail("HV, the number of value heads,", HV, f"a multiple of H = {H}")
    for name, width in (("K, the width of q and k,", K), ("V, the width of v,", V)):
        if width > MAX_WIDTH:
            _fail(name, width, f"from 1 to {MAX_WIDTH}")


def _check_shapes(call: Call) -> None:
    B, T, _, K = call.q.shape
    HV, V = call.v.shape[2:]
    wanted = {
        "g": ("B, T, HV, K", (B, T, HV, K)),
        "beta": ("B, T, HV", (B, T, HV)),
        "sign": ("B, T, HV, K", (B, T, HV, K)),
        "erase": ("B, T, HV, K", (B, T, HV, K)),
        "write": ("B, T, HV, V", (B, T, HV, V)),
        "A_log": ("HV", (HV,)),
        "dt_bias": ("HV * K", (HV * K,)),
        "initial_state": ("N, HV, K, V", (call.num_sequences, HV, K, V)),
    }
    for name, (axes, shape) in wanted.items():
        x = getattr(call, name)
        if x is not None:
            _check_shape(name, x, axes, shape)


def _check_options(call: Call) -> None:
    if call.gate is not None and call.gate not in GATES:
        _fail("gate", repr(call.gate), f"None or one of {', '.join(map(repr, GATES))}")
    if call.beta_range is not None and (type(call.beta_range) is not int or call.beta_range not in (1, 2)):
        _fail("beta_range", repr(call.beta_range), "None, 1 or 2")
    if call.scale is not None and (isinstance(call.scale, bool) or not isinstance(call.scale, int | float)):
        _fail("scale", repr(call.scale), "a number, or None for K ** -0.5")
    for name in ("normalize_qk", "output_final_state"):
        if not isinstance(getattr(call, name), bool):
            _fail(name, repr(getattr(call, name)), "True or False")
    if call.gate is not None and call.sign is not None:
        raise ValueError(
            f"sign is given together with gate={call.gate!r}; it must be None, for a named gate makes its own"
        )
    for name in ("A_log", "dt_bias"):
        if call.gate is None and getattr(call, name) is not None:
            raise ValueError(f"{name} is given with gate=None; it must be None, for g is log|alpha| already")
    separate = call.erase is not None or call.write is not None
    if separate and (call.erase is None or call.write is None):
        missing = "erase" if call.erase is None else "write"
        raise ValueError(f"{missing} is None while the other gate is given; erase and write must come together")
    if separate and (call.beta is not None or call.beta_range is not None):
        raise ValueError("beta or beta_range is given together with erase and write; both must be None then")
    if not separate and call.beta is None:
        raise ValueError("beta is None; it must be a tensor [B, T, HV], unless erase and write are given")


def _check_dtypes(call: Call) -> None:
    dtype = call.q.dtype
    if dtype not in _DTYPES:
        _fail("the dtype of q", dtype, "float64, float32, bfloat16 or float16")
    for name in ("k", "v"):
        if getattr(call, name).dtype != dtype:
            _fail(f"the dtype of {name}", getattr(call, name).dtype, f"that of q, {dtype}")
    for name in ("g", "beta", "erase", "write", "A_log", "dt_bias", "initial_state"):
        x = getattr(call, name)
        allowed = {dtype, torch.float32, call.state_dtype}
        if x is not None and x.dtype not in allowed:
            _fail(f"the dtype of {name}", x.dtype, " or ".join(sorted(map(str, allowed))))
    if call.sign is not None and call.sign.dtype != torch.int8:
        _fail("the dtype of sign", call.sign.dtype, "torch.int8")


def _check_devices(call: Call) -> None:
    for name, x in zip(call._fields, call.tensors, strict=False):
        if x is not None and x.device != call.q.device:
            _fail(f"the device of {name}", x.device, f"that of q, {call.q.device}")


def _check_packing(call: Call) -> None:
    cu = call.cu_seqlens
    if cu is None:
        return
    if cu.dtype not in (torch.int32, torch.int64):
        _fail("the dtype of cu_seqlens", cu.dtype, "torch.int32 or torch.int64")
    if cu.dim() != 1 or cu.numel() < 2:
        _fail("the shape of cu_seqlens", list(cu.shape), "[N + 1] with N >= 1")
    if call.q.shape[0] != 1:
        _fail("B, the batch,", call.q.shape[0], "1 with cu_seqlens: packed sequences lie end to end on the time axis")


def check_call(call: Call) -> None:
    """Ranks, shapes, options, dtypes, devices: everything that can be seen without reading a value."""
    _check_main(call)
    _check_options(call)
    _check_packing(call)
    _check_shapes(call)
    _check_dtypes(call)
    _check_devices(call)


def check_values(call: Call) -> None:
    """The entries of cu_seqlens and sign. On a GPU this synchronises, so the operator does it on CPU tensors only."""
    if call.cu_seqlens is not None:
        bounds, T = call.cu_seqlens.tolist(), call.q.shape[1]
        if bounds[0] != 0 or bounds[-1] != T:
            _fail("cu_seqlens", f"[{bounds[0]}, ..., {bounds[-1]}]", f"[0, ..., T = {T}]")
        if any(a > b for a, b in pairwise(bounds)):
            _fail("cu_seqlens", bounds, "non-decreasing")
    if call.sign is not None and not bool((call.sign.abs() == 1).all()):
        _fail("an entry of sign", int(call.sign[call.sign.abs() != 1][0]), "+1 or -1")
