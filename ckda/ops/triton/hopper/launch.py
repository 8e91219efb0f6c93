"""The launches of the kernels for Hopper. Doors and names are those of ckda/ops/triton/portable/launch.py."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckda.ops.triton.hopper import BV, WARP_ROWS, tried
from ckda.ops.triton.launch import Launch, aligned, contiguous, gate_arguments
from ckda.ops.triton.plan import Passed, Work, gradient_outputs
from ckda.ops.triton.portable import launch as portable

if tried():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ckda.ops.triton.hopper.gradient import hopper_gradient_kernel
    from ckda.ops.triton.hopper.intra import hopper_intra_kernel
    from ckda.ops.triton.hopper.passes import hopper_reverse_kernel, hopper_state_kernel
    from ckda.ops.triton.hopper.tile import tile_layout

__all__ = ["gradients", "intra", "reverse", "states"]

INTRA_REGISTERS, SUMMARY_REGISTERS = 80, 128  # a thread, so that two programs fit on a multiprocessor
PASS_WARPS = BV // WARP_ROWS
GATE_ARGUMENTS = (
    *(
        "p_beta",
        "p_sign",
        "p_A_log",
        "p_dt_bias",
        "scale",
        "H",
        "HV",
        "K",
        "GATE",
        "SIGNED",
        "HAS_A_LOG",
        "HAS_DT_BIAS",
    ),
    *("NORMALIZE", "BETA_RANGE"),
)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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


def intra(w: Work, G: Tensor) -> Launch:
    """What does not depend on the state, two programs a multiprocessor."""
    call, p, x, _ = w
    given = gate_arguments(call, ("q", "k", "g"))
    arguments = (
        {name: given[name] for name in GATE_ARGUMENTS}
        | _place_arguments(w)
        | {
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
            "C": p.C,
            "LEVELS": p.C.bit_length() - 1,
            "BOUNDED": p.bounded,
        }
    )
    programs = min(p.slots * p.HV, 2 * _multiprocessors(call.v.device))
    return Launch(hopper_intra_kernel, (programs,), arguments, num_warps=p.K // WARP_ROWS, maxnreg=INTRA_REGISTERS)


def _pass_arguments(w: Work, segments: range) -> dict[str, Any]:
    """What both passes over the chunks take."""
    p, x = w.p, w.x
    return {
        "t_keys": _tiles(x.keys, p.HV * p.K, p.C, p.K),
        "t_squares": _tiles(x.squares, p.HV * p.C, p.C, p.C),
        "p_rho": x.rho,
        "p_norm2": x.norms[2],
        "p_start": x.start,
        "p_end": x.end,
        "p_cu_seqlens": contiguous(w.call.cu_seqlens),
        "p_first": w.where.first,
        "ROWS": p.rows,
        "T": p.T,
        "NC": p.NC,
        "PLACES": p.places,
        "SEGMENT": p.segment,
        "FIRST_SEGMENT": segments.start,
        "NUM_SEGMENTS": len(segments),
        "HV": p.HV,
        "K": p.K,
        "C": p.C,
        "BOUNDED": p.bounded,
    }


def states(
    w: Work, initial: Tensor | None, o: Tensor | None, final: Tensor | None, summary: str, segments: range
) -> Launch:
    """The state pass; with a summary two programs share a multiprocessor, for there nothing but their chains takes time."""
    call, p, x, _ = w
    V = p.K if summary == "transition" else p.V
    outputs, width = summary == "none", p.HV * p.V
    arguments = _pass_arguments(w, segments) | {
        "t_v": None if summary == "transition" else _tiles(aligned(call.v), width, p.C, BV),
        "p_initial": initial,
        "t_o": _tiles(o, width, p.C, BV) if outputs and o is not None else None,
        "p_o": o if p.padded else None,
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
    maxnreg = None if outputs else SUMMARY_REGISTERS
    return Launch(hopper_state_kernel, grid, arguments, num_warps=PASS_WARPS, maxnreg=maxnreg)


def reverse(
    w: Work, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, passed: Passed | None, segments: range
) -> Launch:
    """The reverse pass; without `passed` a summary."""
    p = w.p
    width = p.HV * p.V
    arguments = _pass_arguments(w, segments) | {
        "t_do": _tiles(do, width, p.C, BV),
        "p_dfinal": dfinal,
        "t_dv": None if passed is None else _tiles(passed.dv, width, p.C, BV),
        "p_dv": None if passed is None or not p.padded else passed.dv,
        "t_dstates": None if passed is None else _tiles(passed.dstates, p.K, BV, p.K),
        "p_dinitial": dinitial,
        "V": p.V,
        "HAS_FINAL": dfinal is not None,
        "STORE_INITIAL": dinitial is not None,
        "SUMMARY": passed is None,
        "STAGES": 3,
    }
    grid = (p.V // BV * p.HV * p.N * len(segments),)
    return Launch(hopper_reverse_kernel, grid, arguments, num_warps=PASS_WARPS)


def gradients(w: Work, o: Tensor, do: Tensor, passed: Passed) -> tuple[list[Launch], dict[str, Any]]:
    """The end of the backward, as many programs as there are multiprocessors; the portable kernels for what it does not hold."""
    call, p, x, _ = w
    if p.V > 128:
        return portable.gradients(w, o, do, passed)
    out = gradient_outputs(w, p.dtype)
    keys, values = p.HV * p.K, p.HV * p.V
    given = gate_arguments(call, ("q", "k", "g"))
    arguments = (
        {name: given[name] for name in GATE_ARGUMENTS}
        | _place_arguments(w)
        | {
            "t_states": _tiles(x.states, p.K, p.V, p.K),
            "t_dstates": _tiles(passed.dstates, p.K, p.V, p.K),
            "t_do": _tiles(do, values, p.C, p.V),
            "t_dv": _tiles(passed.dv, values, p.C, p.V),
            "t_v": _tiles(aligned(call.v), values, p.C, p.V),
            "t_o": _tiles(aligned(o), values, p.C, p.V),
            "t_y": _tiles(x.y, values, p.C, p.V),
            "t_q": None if p.bounded else _tiles(aligned(call.q), p.H * p.K, p.C, p.K),
            "t_k": None if p.bounded else _tiles(aligned(call.k), p.H * p.K, p.C, p.K),
            "t_keys": _tiles(x.keys, keys, p.C, p.K) if p.bounded else None,
            "t_g": _tiles(aligned(call.g), keys, p.C, p.K),
            "p_A": x.squares if p.given else None,
            "p_G": x.G if p.given else None,
            "p_rho": x.rho,
            "p_norms": x.norms,
            "t_dq": _tiles(out["p_dq"], keys, p.C, p.K),
            "t_dk": _tiles(out["p_dk"], keys, p.C, p.K),
            "t_dg": _tiles(out["p_dg"], keys, p.C, p.K) if call.g.dtype == p.dtype else None,
            "p_dq": out["p_dq"] if p.padded else None,
            "p_dk": out["p_dk"] if p.padded else None,
            "p_dg": out["p_dg"] if p.padded or call.g.dtype != p.dtype else None,
            "p_dbeta": out["p_dbeta"],
            "p_dlog_rate": out["p_dlog_rate"],
            "p_dbias": out["p_dbias"],
            "V": p.V,
            "C": p.C,
            "LEVELS": p.C.bit_length() - 1,
            "BOUNDED": p.bounded,
        }
    )
    programs = min(p.slots * p.HV, _multiprocessors(do.device))
    return [Launch(hopper_gradient_kernel, (programs,), arguments, num_warps=p.K // WARP_ROWS)], out
