"""The launches of the kernels for Hopper. Functions and names are those of ckda/ops/triton/portable/launch.py."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckda.ops.triton.hopper import BV, MAX_WIDTH, NARROW, WARP_ROWS, tried
from ckda.ops.triton.hopper.begins import begins_kernel
from ckda.ops.triton.hopper.reach import reach_kernel
from ckda.ops.triton.launch import Launch, aligned, contiguous, gate_arguments, power_of_two
from ckda.ops.triton.plan import Passed, Plan, Work, gradient_outputs
from ckda.ops.triton.portable import launch as portable

if tried():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ckda.ops.triton.hopper.gradient import hopper_gradient_kernel
    from ckda.ops.triton.hopper.intra import hopper_intra_kernel
    from ckda.ops.triton.hopper.passes import hopper_reverse_kernel, hopper_state_kernel
    from ckda.ops.triton.hopper.tile import tile_layout

__all__ = ["gradients", "intra", "reverse", "states"]

# registers a thread, so that more programs than one fit on a multiprocessor; NARROW: heads of up to so many channels
INTRA_REGISTERS, NARROW_INTRA_REGISTERS, PAIR_REGISTERS = 80, 64, 128
WIDE_INTRA_REGISTERS = 96  # one program of 16 warps that compute
BEGIN_HEADS = 16  # of whose chunks one program looks at the first token: some thousands of gates
PASS_WARPS = BV // WARP_ROWS
BASE = (
    3  # log2 of the blocks within which unbounded gates are taken from the middle, in the forward pass and in bfloat16
)
# the beta / |k|^2 up to which dr is no way to dbeta: what float16 cannot hold, and what `hopper_gradient_kernel` takes for zero
NEAR_ZERO = {"bf16": 1e-12, "fp16": 2.0**-8}
_GATE = ("beta", "sign", "A_log", "dt_bias")
_GATE_FLAGS = ("scale", "H", "HV", "K", "GATE", "HAS_A_LOG", "HAS_DT_BIAS", "NORMALIZE", "BETA_RANGE")


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return tile_layout(*block, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def _described(x: Tensor, shape: list[int], strides: list[int], block: tuple[int, ...]) -> "TensorDescriptor":
    """Tiles of a tensor seen in that shape.

    Without the checks of the constructor: for the many of a call they take longer than a launch.
    """
    assert x.is_contiguous()
    assert x.data_ptr() % 16 == 0
    tiles = object.__new__(TensorDescriptor)
    tiles.base, tiles.shape, tiles.strides = x, shape, strides
    tiles.block_shape, tiles.layout, tiles.padding = [*block], _layout(block, x.dtype), "zero"
    return tiles


def _tiles(x: Tensor, rows: int, columns: int) -> "TensorDescriptor":
    """Tiles [rows, columns] of the heads of a contiguous tensor [..., heads, width]; columns beyond the width are zero."""
    heads, width = x.shape[-2:]
    num = x.numel() // (heads * width)
    if width % columns == 0:
        return _described(x, [num, heads * width], [heads * width, 1], (rows, columns))
    return _described(x, [heads, num, width], [width, heads * width, 1], (1, rows, columns))


def _state_tiles(x: Tensor, rows: int, columns: int) -> "TensorDescriptor":
    """Tiles [rows, columns] of states [..., V, K]; what is beyond them is zero."""
    V, K = x.shape[-2:]
    num = x.numel() // (V * K)
    if V % rows == 0 and K % columns == 0:
        return _described(x, [num * V, K], [K, 1], (rows, columns))
    return _described(x, [num, V, K], [V * K, K, 1], (1, rows, columns))


def _gate_arguments(w: Work) -> dict[str, Any]:
    """The raw inputs that are no tiles, and the flags that say how all are read."""
    call, p = w.call, w.p
    given = gate_arguments(call, ("q", "k", "g"))
    signed = "given" if call.sign is not None else "gate" if call.gate == "signed" else "no"
    kept = {f"p_{name}": given[f"p_{name}"] for name in _GATE} | {name: given[name] for name in _GATE_FLAGS}
    bounded = {"LEVELS": p.C.bit_length() - 1, "BOUNDED": p.bounded}
    erase = {"p_erase": contiguous(call.erase), "ERASE": call.erase is not None}
    return kept | bounded | erase | {"SIGNED": signed, "BK": p.width, "C": p.C}


def _place_arguments(w: Work) -> dict[str, Any]:
    """Where the chunks lie, for the kernels that take them one by one."""
    p, where = w.p, w.where
    return {
        "p_starts": where.starts,
        "p_ends": where.ends,
        "num_chunks": p.slots,
        "ROWS": p.rows,
        "T": p.T,
        "NC": p.NC,
        "PLACES": p.places,
    }


def _shares(w: Work) -> list[dict[str, Any]]:
    """How the chunks are shared among the launches of a kernel: LEAST and MOST calm rows of those that are each one's. Where gates
    are bounded all chunks are one launch's."""
    C = w.p.C
    return [{"LEAST": C, "MOST": C}, {"LEAST": 0, "MOST": C - 1}] if w.p.mixed else [{"LEAST": 0, "MOST": C}]


def begins(w: Work) -> list[Launch]:
    """Which chunks begin calm; nothing where gates are bounded."""
    call, p, x, where = w
    if not p.mixed:
        return []
    given = gate_arguments(call, ("q", "k", "beta"))
    names = ("p_g", "p_A_log", "p_dt_bias", "HV", "K", "GATE", "HAS_A_LOG", "HAS_DT_BIAS")
    arguments = {name: given[name] for name in names} | {
        "p_calm": x.calm,
        "p_starts": where.starts,
        "p_ends": where.ends,
        "T": p.T,
        "NC": p.NC,
        "C": p.C,
        "BK": p.width,
        "PACKED": p.packed,
        "HEADS": min(BEGIN_HEADS, power_of_two(p.HV)),
    }
    grid = (p.slots, -(-p.HV // arguments["HEADS"]))
    return [Launch(begins_kernel, grid, arguments, num_warps=4)]


def intra(w: Work, G: Tensor) -> list[Launch]:
    """What does not depend on the state: chunks that begin calm, then what they left and the others; or all."""
    return [*begins(w), *(_intra(w, G, share | {"LEAST": min(share["LEAST"], 1)}) for share in _shares(w))]


def _intra(w: Work, G: Tensor, share: dict[str, Any]) -> Launch:
    """Two programs a multiprocessor, or three or four where heads have up to 64 channels."""
    call, p, x, _ = w
    arguments = _gate_arguments(w) | _place_arguments(w)
    arguments |= {f"t_{name}": _tiles(aligned(getattr(call, name)), p.C, p.width) for name in ("q", "k", "g")}
    arguments |= {
        "t_keys": _tiles(x.keys, p.C, p.width),
        "p_A": x.squares,
        "p_G": G,
        "p_rho": x.rho,
        "p_norms": x.norms,
        "p_start": x.start,
        "p_end": x.end,
        "p_calm": x.calm if p.mixed else None,
        "BASE": 0 if p.bounded or p.dot == "fp16" else BASE,
        "SPLIT_A": p.A_low,
    }
    arguments |= share
    at_a_time, maxnreg = 2, INTRA_REGISTERS
    if _halves(p) > 1:
        at_a_time, maxnreg = 1, WIDE_INTRA_REGISTERS
    elif p.width == NARROW:
        at_a_time, maxnreg = (4, NARROW_INTRA_REGISTERS) if p.bounded else (3, INTRA_REGISTERS)
    programs = min(p.slots * p.HV, at_a_time * _multiprocessors(call.v.device))
    return Launch(hopper_intra_kernel, (programs,), arguments, num_warps=p.width // WARP_ROWS, maxnreg=maxnreg)


def _pass_arguments(w: Work, segments: range) -> dict[str, Any]:
    """What both passes over the chunks take."""
    p, x = w.p, w.x
    return {
        "t_keys": _tiles(x.keys, p.C, min(p.width, MAX_WIDTH)),
        "t_squares": _tiles(x.squares, p.C, p.C),
        "p_rho": x.rho,
        "p_norm2": x.norms[2],
        "p_start": x.start,
        "p_end": x.end,
        "p_cu_seqlens": contiguous(w.call.cu_seqlens),
        "p_first": w.where.first,
        "p_order": w.where.order,
        "ROWS": p.rows,
        "T": p.T,
        "NC": p.NC,
        "PLACES": p.places,
        "SEGMENT": p.segment,
        "FIRST_SEGMENT": segments.start,
        "NUM_SEGMENTS": len(segments),
        "HV": p.HV,
        "K": p.K,
        "BK": min(p.width, MAX_WIDTH),
        "HALVES": _halves(p),
        "C": p.C,
        "BOUNDED": p.bounded,
    }


def _halves(p: Plan) -> int:
    """The parts of a head's channels that the passes hold in warps of their own."""
    return -(-p.width // MAX_WIDTH)


def _value_blocks(V: int) -> int:
    return -(-V // BV)


def states(
    w: Work, initial: Tensor | None, o: Tensor | None, final: Tensor | None, summary: str, segments: range
) -> Launch:
    """The state pass; with a summary two programs share a multiprocessor, for there nothing but their chains takes time."""
    call, p, x, _ = w
    V = p.K if summary == "transition" else p.V
    outputs = summary == "none"
    arguments = _pass_arguments(w, segments) | {
        "t_v": None if summary == "transition" else _tiles(aligned(call.v), p.C, BV),
        "p_initial": initial,
        "t_o": _tiles(o, p.C, BV) if outputs and o is not None else None,
        "p_o": o if p.padded else None,
        "t_y": _tiles(x.y, p.C, BV) if outputs else None,
        "t_states": _state_tiles(x.states, BV, min(p.width, MAX_WIDTH)) if outputs else None,
        "p_final": final,
        "V": V,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "SUMMARY": summary,
        "SPLIT_A": p.A_low,
        "STAGES": 3 if outputs and _halves(p) == 1 else 2,
    }
    grid = (_value_blocks(V) * p.HV * p.N * len(segments),)
    maxnreg = None if (outputs and p.width > NARROW) or _halves(p) > 1 else PAIR_REGISTERS
    return Launch(hopper_state_kernel, grid, arguments, num_warps=PASS_WARPS, maxnreg=maxnreg)


def reverse(
    w: Work, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, passed: Passed | None, segments: range
) -> Launch:
    """The reverse pass; without `passed` a summary."""
    p = w.p
    arguments = _pass_arguments(w, segments) | {
        "t_do": _tiles(do, p.C, BV),
        "p_dfinal": dfinal,
        "t_dv": None if passed is None else _tiles(passed.dv, p.C, BV),
        "p_dv": None if passed is None or not p.padded else passed.dv,
        "t_dstates": None if passed is None else _state_tiles(passed.dstates, BV, min(p.width, MAX_WIDTH)),
        "p_dinitial": dinitial,
        "V": p.V,
        "HAS_FINAL": dfinal is not None,
        "STORE_INITIAL": dinitial is not None,
        "SUMMARY": passed is None,
        "STAGES": 3 if _halves(p) == 1 else 2,
    }
    grid = (_value_blocks(p.V) * p.HV * p.N * len(segments),)
    maxnreg = None if p.width > NARROW else PAIR_REGISTERS
    return Launch(hopper_reverse_kernel, grid, arguments, num_warps=PASS_WARPS, maxnreg=maxnreg)


def gradients(w: Work, o: Tensor, do: Tensor, passed: Passed) -> tuple[list[Launch], dict[str, Any]]:
    """The end of the backward; the portable kernels for what Hopper's does not hold."""
    p = w.p
    if p.V > MAX_WIDTH and _halves(p) == 1:
        return portable.gradients(w, o, do, passed)
    out = gradient_outputs(w, p.dtype)
    shares = [share | {"WHICH": which} for share in _shares(w) for which in _kinds(p, share)]
    return [*(_gradient(w, o, do, passed, out, share) for share in shares), *_reach(w, do, passed, out)], out


def _reach(w: Work, do: Tensor, passed: Passed, out: dict[str, Any]) -> list[Launch]:
    """dbeta where beta is near zero, in float16 and of 256 channels; elsewhere the gradient kernel has it."""
    p, x, where = w.p, w.x, w.where
    if not p.given or not (p.dot == "fp16" or _halves(p) > 1):
        return []
    arguments = x.arguments("y", "y_low", "A", "G", "k_back", "rho") | {
        "p_do": do,
        "p_dv": passed.dv,
        "p_dstates": passed.dstates,
        "p_norm2": x.norms[2],
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_dbeta": out["p_dbeta"],
        "T": p.T,
        "NC": p.NC,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "C": p.C,
        "BK": 32,
        "BV": 16,
        "LEAST": NEAR_ZERO[p.dot],
        "BOUNDED": p.bounded,
        "PACKED": p.packed,
    }
    return [Launch(reach_kernel, (p.slots, p.HV), arguments, num_warps=2, maxnreg=PAIR_REGISTERS)]  # most leave at once


def _kinds(p: Plan, share: dict[str, Any]) -> list[str]:
    """The kinds of chunks that get a launch of their own: full ones need no masks, which take a fifth of the time."""
    some_full = p.packed or p.T > p.C
    return ["full", "broken"] if p.padded and some_full and share["MOST"] == p.C else ["any"]


def _gradient(w: Work, o: Tensor, do: Tensor, passed: Passed, out: dict[str, Any], share: dict[str, Any]) -> Launch:
    """One program a multiprocessor, or two where heads have up to 64 channels. Calm chunks go from the decayed tiles that the
    forward pass left, as all do where gates are bounded."""
    call, p, x, where = w
    tiles = p.bounded or share["LEAST"] > 0
    width, channels = 64 if p.V <= 64 else 128, min(p.width, MAX_WIDTH)
    values = {"do": do, "dv": passed.dv, "v": aligned(call.v), "o": aligned(o), "y": x.y}
    raw = {"q": call.q, "k": call.k}
    arguments = _gate_arguments(w) | _place_arguments(w)
    arguments |= {f"t_{name}": _tiles(value, p.C, width) for name, value in values.items()}
    arguments |= share | {"BOUNDED": tiles, "p_sorted": None, "p_counts": where.counts}
    if (
        where.sorted is not None
    ):  # the full chunks are one launch's, the broken ones another's: each has its own side by side
        arguments |= zip(("p_sorted", "p_starts", "p_ends"), where.sorted.split(p.slots), strict=True)
    arguments |= {f"t_{n}": None if tiles else _tiles(aligned(value), p.C, channels) for n, value in raw.items()}
    arguments |= {
        "t_states": _state_tiles(x.states, width, channels),
        "t_dstates": _state_tiles(passed.dstates, width, channels),
        "t_keys": _tiles(x.keys, p.C, channels) if tiles else None,
        "p_end": x.end if tiles and not p.bounded else None,
        "p_calm": x.calm if p.mixed else None,
        "t_g": _tiles(aligned(call.g), p.C, channels),
        "p_A": x.squares if p.given else None,
        "p_G": x.G if p.given else None,
        "p_rho": x.rho,
        "p_norms": x.norms,
        "t_dq": _tiles(out["p_dq"], p.C, channels),
        "t_dk": _tiles(out["p_dk"], p.C, channels),
        "t_dg": _tiles(out["p_dg"], p.C, channels) if call.g.dtype == p.dtype else None,
        "p_dq": out["p_dq"] if p.padded else None,
        "p_dk": out["p_dk"] if p.padded else None,
        "p_dg": out["p_dg"] if p.padded or call.g.dtype != p.dtype else None,
        "p_dbeta": out["p_dbeta"],
        "p_derase": out["p_derase"],
        "p_dlog_rate": out["p_dlog_rate"],
        "p_dbias": out["p_dbias"],
        "V": p.V,
        "BK": channels,
        "BV": width,
        "HALVES": _halves(p),
    }
    at_a_time, maxnreg = (2, PAIR_REGISTERS) if p.width == NARROW else (1, None)
    programs = min(p.slots * p.HV * _halves(p), at_a_time * _multiprocessors(do.device))
    return Launch(hopper_gradient_kernel, (programs,), arguments, num_warps=channels // WARP_ROWS, maxnreg=maxnreg)
