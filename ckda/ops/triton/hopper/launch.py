"""When the kernels for Hopper serve a call, and their launches."""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from ckda.ops.call import Call
from ckda.ops.triton.launch import Launch, aligned, gate_arguments

TRIED = triton.__version__.startswith("3.6.")  # Gluon changes from version to version
if TRIED:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ckda.ops.triton.hopper.gradient import hopper_gradient_kernel
    from ckda.ops.triton.hopper.intra import hopper_intra_kernel
    from ckda.ops.triton.hopper.passes import hopper_reverse_kernel, hopper_state_kernel
    from ckda.ops.triton.hopper.tile import tile_layout

if TYPE_CHECKING:
    from ckda.ops.triton.chunk import Plan, Saved

__all__ = ["gradients", "intra", "launches", "reverse", "serves", "serves_gradients", "states"]

BV = 64  # the value columns of one program
GATE_ARGUMENTS = (
    *("p_beta", "p_sign", "p_A_log", "p_dt_bias", "scale", "H", "HV", "K", "GATE", "SIGNED", "HAS_A_LOG", "HAS_DT_BIAS"),
    *("NORMALIZE", "BETA_RANGE"),
)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the kernels run there: Gluon has no interpreter, and an AMD card may call itself 9.x too."""
    if device.type != "cuda" or torch.version.hip is not None or not TRIED or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _fit(call: Call, p: "Plan") -> bool:
    """Whether the kernels are made for such a call: bfloat16, whole chunks, heads of 64 or 128, rows of 32 bits.

    The gradient of a given beta needs the end of the backward that is made for it.
    """
    whole = p.split and not p.packed and p.T % p.C == 0 and (bool(call.beta_range) or p.V <= 128)
    return whole and p.K in (64, 128) and p.V % BV == 0 and max(4 * p.B * p.T, p.slots * p.HV * p.V) < 2**31


def _fit_gradients(call: Call, p: "Plan") -> bool:
    """Whether the end of the backward is: values of up to 128 channels."""
    return p.V <= 128 and _fit(call, p)


def serves(call: Call, p: "Plan") -> bool:
    """Whether the forward and the passes over the chunks run here."""
    return _is_hopper(call.v.device) and _fit(call, p)


def serves_gradients(call: Call, p: "Plan") -> bool:
    """Whether the end of the backward does."""
    return _is_hopper(call.v.device) and _fit_gradients(call, p)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return tile_layout(rows, columns, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def _tiles(x: Tensor, width: int, rows: int, columns: int) -> "TensorDescriptor":
    """Tiles [rows, columns] of a contiguous tensor seen as a matrix of that width.

    Without the checks of the constructor: for the many of a call they take longer than a launch.
    """
    assert x.is_contiguous()
    assert x.data_ptr() % 16 == 0
    tiles = object.__new__(TensorDescriptor)
    tiles.base, tiles.shape, tiles.strides = x, [x.numel() // width, width], [width, 1]
    tiles.block_shape, tiles.layout, tiles.padding = [rows, columns], _tile_layout(rows, columns, x.dtype), "zero"
    return tiles


def intra(call: Call, p: "Plan", x: "Saved", G: Tensor) -> Launch:
    """What does not depend on the state, two programs a multiprocessor."""
    given = gate_arguments(call, ("q", "k", "g"))
    arguments = {name: given[name] for name in GATE_ARGUMENTS} | {
        "t_q": _tiles(aligned(call.q), p.H * p.K, p.C, p.K),
        "t_k": _tiles(aligned(call.k), p.H * p.K, p.C, p.K),
        "t_g": _tiles(aligned(call.g), p.HV * p.K, p.C, p.K),
        "t_keys": _tiles(x.keys, p.HV * p.K, p.C, p.K),
        "p_A": x.squares,
        "p_G": G,
        "p_rho": x.rho,
        "p_norms": x.norms,
        "p_start": x.start,
        "p_end": x.end,
        "num_chunks": p.slots,
        "TOKENS": p.B * p.T,
        "C": p.C,
        "LEVELS": p.C.bit_length() - 1,
        "BOUNDED": p.bounded,
    }
    programs = min(p.slots * p.HV, 2 * _multiprocessors(call.v.device))
    return Launch(hopper_intra_kernel, (programs,), arguments, num_warps=p.K // 16, maxnreg=80)


def _pass_arguments(p: "Plan", x: "Saved", segments: range) -> dict[str, Any]:
    """What both passes over the chunks take."""
    return {
        "t_keys": _tiles(x.keys, p.HV * p.K, p.C, p.K),
        "t_squares": _tiles(x.squares, p.HV * p.C, p.C, p.C),
        "p_rho": x.rho,
        "p_norm2": x.norms[2],
        "p_start": x.start,
        "p_end": x.end,
        "TOKENS": p.B * p.T,
        "NC": p.NC,
        "SEGMENT": p.segment,
        "FIRST_SEGMENT": segments.start,
        "NUM_SEGMENTS": len(segments),
        "HV": p.HV,
        "K": p.K,
        "C": p.C,
        "BOUNDED": p.bounded,
    }


def states(
    call: Call,
    p: "Plan",
    x: "Saved",
    initial: Tensor | None,
    o: Tensor | None,
    final: Tensor | None,
    summary: str,
    segments: range,
) -> Launch:
    """The state pass; with a summary two programs share a multiprocessor, for there nothing but their chains takes time."""
    V = p.K if summary == "transition" else p.V
    outputs, width = summary == "none", p.HV * p.V
    arguments = _pass_arguments(p, x, segments) | {
        "t_v": None if summary == "transition" else _tiles(aligned(call.v), width, p.C, BV),
        "p_initial": initial,
        "t_o": _tiles(o, width, p.C, BV) if outputs and o is not None else None,
        "t_y": _tiles(x.y, width, p.C, BV) if outputs else None,
        "t_states": _tiles(x.states, p.K, BV, p.K) if outputs else None,
        "p_final": final,
        "V": V,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "SUMMARY": summary,
        "STAGES": 3 if outputs else 2,
    }
    grid = (V // BV * p.HV * p.N * len(segments),)
    return Launch(hopper_state_kernel, grid, arguments, num_warps=4, maxnreg=None if outputs else 128)


def reverse(
    p: "Plan",
    x: "Saved",
    do: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    dv: Tensor | None,
    dstates: Tensor | None,
    segments: range,
) -> Launch:
    """The reverse pass; a summary where dv and dstates are None."""
    width = p.HV * p.V
    arguments = _pass_arguments(p, x, segments) | {
        "t_do": _tiles(do, width, p.C, BV),
        "p_dfinal": dfinal,
        "t_dv": None if dv is None else _tiles(dv, width, p.C, BV),
        "t_dstates": None if dstates is None else _tiles(dstates, p.K, BV, p.K),
        "p_dinitial": dinitial,
        "V": p.V,
        "HAS_FINAL": dfinal is not None,
        "STORE_INITIAL": dinitial is not None,
        "SUMMARY": dv is None,
        "STAGES": 3,
    }
    return Launch(hopper_reverse_kernel, (p.V // BV * p.HV * p.N * len(segments),), arguments, num_warps=4)


def gradients(
    call: Call, p: "Plan", x: "Saved", o: Tensor, do: Tensor, dv: Tensor, dstates: Tensor, out: dict[str, Any]
) -> Launch:
    """The end of the backward, as many programs as there are multiprocessors."""
    keys, values = p.HV * p.K, p.HV * p.V
    given = gate_arguments(call, ("q", "k", "g"))
    arguments = {name: given[name] for name in GATE_ARGUMENTS} | {
        "t_states": _tiles(x.states, p.K, p.V, p.K),
        "t_dstates": _tiles(dstates, p.K, p.V, p.K),
        "t_do": _tiles(do, values, p.C, p.V),
        "t_dv": _tiles(dv, values, p.C, p.V),
        "t_v": _tiles(aligned(call.v), values, p.C, p.V),
        "t_o": _tiles(aligned(o), values, p.C, p.V),
        "t_y": _tiles(x.y, values, p.C, p.V),
        "t_q": None if p.bounded else _tiles(aligned(call.q), p.H * p.K, p.C, p.K),
        "t_k": None if p.bounded else _tiles(aligned(call.k), p.H * p.K, p.C, p.K),
        "t_keys": _tiles(x.keys, keys, p.C, p.K) if p.bounded else None,
        "t_g": _tiles(aligned(call.g), keys, p.C, p.K),
        "p_A": None if call.beta_range else x.squares,
        "p_G": None if call.beta_range else x.G,
        "p_rho": x.rho,
        "p_norms": x.norms,
        "t_dq": _tiles(out["p_dq"], keys, p.C, p.K),
        "t_dk": _tiles(out["p_dk"], keys, p.C, p.K),
        "t_dg": _tiles(out["p_dg"], keys, p.C, p.K) if call.g.dtype == p.dtype else None,
        "p_dg": None if call.g.dtype == p.dtype else out["p_dg"],
        "p_dbeta": out["p_dbeta"],
        "p_dlog_rate": out["p_dlog_rate"],
        "p_dbias": out["p_dbias"],
        "num_chunks": p.slots,
        "TOKENS": p.B * p.T,
        "V": p.V,
        "C": p.C,
        "LEVELS": p.C.bit_length() - 1,
        "BOUNDED": p.bounded,
    }
    programs = min(p.slots * p.HV, _multiprocessors(do.device))
    return Launch(hopper_gradient_kernel, (programs,), arguments, num_warps=p.K // 16)


def launches(call: Call, p: "Plan", x: "Saved", o: Tensor, state: Tensor, out: dict[str, Any]) -> list[Launch]:
    """Those of one forward and backward pass, for compiling; none where they do not fit, or for another Triton."""
    if not TRIED or not _fit(call, p):
        return []
    ends = [gradients(call, p, x, o, o, o, x.states, out)] if _fit_gradients(call, p) else []
    return [
        intra(call, p, x, x.rho),
        states(call, p, x, state, o, state, "none", p.segments),
        states(call, p, x, state, None, state, "offset", p.segments),
        states(call, p, x, None, None, x.transitions, "transition", p.segments),
        reverse(p, x, o, state, state, o, x.states, p.segments),
        reverse(p, x, o, state, state, None, None, p.segments),
        *ends,
    ]
