"""The launches of the portable kernels, and what they leave for each other."""

from typing import Any

import torch
from torch import Tensor

from ckda.ops.triton.hopper import FLOAT16_UNIT
from ckda.ops.triton.launch import Launch, contiguous, gate_arguments, power_of_two
from ckda.ops.triton.plan import KEYS, SQUARES, Passed, Plan, Work, gradient_outputs
from ckda.ops.triton.portable.backward import (
    contract_kernel,
    gradient_kernel,
    group_kernel,
    pair_kernel,
    reverse_kernel,
)
from ckda.ops.triton.portable.forward import carry_kernel, intra_kernel, places_kernel, solver_kernel, state_kernel
from ckda.ops.triton.portable.wide import BLOCK, wide_reverse_kernel, wide_state_kernel

__all__ = ["carry", "empty_duy", "gradients", "group_sums", "intra", "places", "reverse", "solver", "states"]

# a thread, so that more programs run at a time: worth a few spills
INTRA_REGISTERS, CONTRACT_REGISTERS, SOLVER_REGISTERS = 168, 128, 128
WIDE_CHANNELS, WIDE_VALUES = 32, 16  # of float32 at a time, where more would spill, or take the place of other programs


def _value_block(p: Plan, width: int) -> int:
    """BV of the forward state pass: the columns of the state that one program carries."""
    return min((64 if p.K <= 128 else 32) if p.split else 16, power_of_two(width))


def _reverse_block(p: Plan) -> int:
    """BV of the reverse pass, which holds more at a time."""
    return min(32 if p.split else 16, power_of_two(p.V))


def _place_arguments(w: Work) -> dict[str, Any]:
    """Where the chunks lie, and in which precision products are: what the kernels of one chunk a program share."""
    return {
        "p_starts": w.where.starts,
        "p_ends": w.where.ends,
        "T": w.p.T,
        "NC": w.p.NC,
        "HV": w.p.HV,
        "C": w.p.C,
        "DOT": w.p.dot,
        "PACKED": w.p.packed,
    }


def _gate_arguments(w: Work, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the kernels that read the raw inputs share."""
    bounded = {"BOUNDED": w.p.bounded, "LEVELS": w.p.C.bit_length() - 1, "WIDE": not w.p.split}
    erase = {"p_erase": contiguous(w.call.erase), "ERASE": w.call.erase is not None}
    return _place_arguments(w) | gate_arguments(w.call, unread) | bounded | erase | {"TOKENS": w.p.B * w.p.T}


def _pass_arguments(w: Work, segments: range) -> dict[str, Any]:
    """What both passes over the chunks read."""
    call, p, x, where = w
    BK = power_of_two(p.K)
    tiles = {"BK": BK} if p.split else {"W": max(1, BK // BLOCK), "BW": min(BK, BLOCK)}
    return (
        x.arguments(*KEYS[:3], *(SQUARES if p.split else SQUARES[:2]), "rho", "start", "end")
        | tiles
        | {
            "p_norm2": x.norms[2],
            "BOUNDED": p.bounded,
            "p_cu_seqlens": contiguous(call.cu_seqlens),
            "p_first": where.first,
            "T": p.T,
            "NC": p.NC,
            "SEGMENT": p.segment,
            "FIRST_SEGMENT": segments.start,
            "NUM_SEGMENTS": len(segments),
            "HV": p.HV,
            "K": p.K,
            "C": p.C,
            "DOT": p.dot,
            "PACKED": p.packed,
        }
    )


def _pass_warps(p: Plan) -> int:
    """Of both passes; in float32 one a block of channels."""
    return 4 if p.split else max(1, power_of_two(p.K) // BLOCK)


def places(w: Work) -> list[Launch]:
    """Where the chunks of packed sequences lie; Hopper has no other. Nothing without packing."""
    p, where = w.p, w.where
    if not p.packed:
        return []
    arguments = {
        "p_cu_seqlens": contiguous(w.call.cu_seqlens),
        "p_starts": where.starts,
        "p_ends": where.ends,
        "p_first": where.first,
        "p_order": where.order,
        "p_sorted": where.sorted,
        "p_counts": where.counts,
        "N": p.N,
        "NC": p.NC,
        "C": p.C,
        "BLOCK": 64,
    }
    return [Launch(places_kernel, (-(-p.NC // 64),), arguments, num_warps=4)]


def intra(w: Work, G: Tensor) -> list[Launch]:
    """What does not depend on the state."""
    p = w.p
    outputs = w.x.arguments(*KEYS, "A", "rho", "norms", "start", "end")
    arguments = _gate_arguments(w) | outputs | {"p_G": G}
    if not p.split:
        arguments["BK"] = min(WIDE_CHANNELS, power_of_two(p.K))
    maxnreg = INTRA_REGISTERS if p.bounded and p.split and p.K <= 128 else None
    num_warps = 4 if p.split else 2  # A and G have room for two warps of such products: more would repeat them
    return [Launch(intra_kernel, (p.slots, p.HV), arguments, num_warps=num_warps, maxnreg=maxnreg)]


def solver(w: Work, G: Tensor) -> Launch:
    """The triangular inverse of every chunk; Hopper has no other."""
    p = w.p
    arguments = _place_arguments(w) | w.x.arguments("rho", *SQUARES[1:])
    if p.padded:
        arguments |= {"p_starts": None, "p_ends": None, "T": p.rows, "NC": p.slots, "PACKED": False}
    arguments |= {"p_G": G, "LEVELS": p.C.bit_length() - 2, "SPLIT": p.split}
    float16 = w.call.backend == "triton-hopper" and p.dot == "fp16"
    arguments["UNIT"] = FLOAT16_UNIT if float16 else 1.0
    return Launch(solver_kernel, (p.slots, p.HV), arguments, num_warps=1, maxnreg=SOLVER_REGISTERS if p.split else None)


def states(
    w: Work, initial: Tensor | None, o: Tensor | None, final: Tensor | None, summary: str, segments: range
) -> Launch:
    """The state from chunk to chunk with the outputs; or a summary of segments, their "offset" or their "transition"."""
    p = w.p
    V = p.K if summary == "transition" else p.V
    BV = _value_block(p, V)
    arguments = _pass_arguments(w, segments) | w.x.arguments("y", *(["y_low"] if p.split else []), "states")
    arguments |= {
        "p_v": w.call.v.contiguous(),
        "p_initial": initial,
        "p_o": o,
        "p_final": final,
        "V": V,
        "BV": BV,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "SUMMARY": summary,
    }
    kernel = state_kernel if p.split else wide_state_kernel
    return Launch(kernel, (-(-V // BV) * p.HV * p.N * len(segments),), arguments, num_warps=_pass_warps(p))


def carry(w: Work, given: Tensor | None, offsets: Tensor, reverse: bool = False) -> Launch:
    """From what segments add to a state at zero to the state that each begins with; reverse: gradients, from the last one on."""
    p = w.p
    BV = 16
    carried = offsets.new_empty(p.B * p.num_segments, p.HV, p.K, p.V)
    arguments = {
        "p_transitions": w.x.transitions,
        "p_offsets": offsets,
        "p_given": given,
        "p_carried": carried,
        "NUM_SEGMENTS": p.num_segments,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "BK": power_of_two(p.K),
        "BV": BV,
        "HAS_GIVEN": given is not None,
        "REVERSE": reverse,
    }
    return Launch(carry_kernel, (-(-p.V // BV) * p.HV * p.B,), arguments, num_warps=4)


def reverse(
    w: Work, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, passed: Passed | None, segments: range
) -> Launch:
    """The gradient of the state from chunk to chunk, backwards; without `passed` a summary of segments."""
    p = w.p
    dv, duy, dstates = passed or (None, None, None)
    BV = _reverse_block(p)
    arguments = _pass_arguments(w, segments) | w.x.arguments("y")
    arguments |= {
        "p_do": do,
        "p_dfinal": dfinal,
        "p_dv": dv,
        "p_duy": duy,
        "p_dstates": dstates,
        "p_dinitial": dinitial,
        "V": p.V,
        "NV": -(-p.V // BV),
        "BV": BV,
        "HAS_FINAL": dfinal is not None,
        "STORE_INITIAL": dinitial is not None,
        "STORE_DUY": duy is not None,
        "SUMMARY": passed is None,
    }
    grid = (-(-p.V // BV) * p.HV * p.N * len(segments),)
    num_stages = 3 if p.split and p.K <= 128 else 2  # a third would not fit into the 99 KiB of sm_89 elsewhere
    kernel = reverse_kernel if p.split else wide_reverse_kernel
    return Launch(kernel, grid, arguments, num_warps=_pass_warps(p), num_stages=num_stages)


def empty_duy(w: Work) -> Tensor | None:
    """float32 [B, T, HV, NV] for du . y over each block of values, which the gradient of a given beta takes."""
    p = w.p
    return w.x.rho.new_empty(p.B, p.T, p.HV, -(-p.V // _reverse_block(p))) if p.given else None


def _contract_block(p: Plan) -> tuple[int, int, int]:
    """BK, BV and warps of the contraction: not four warps, see :func:`ckda.ops.triton.tile.in_registers`."""
    if p.K > 64 and p.split:
        return 128, min(128, power_of_two(p.V)), 8
    return min(32, power_of_two(p.K)), min(64 if p.split else WIDE_VALUES, power_of_two(p.V)), 2


def _pair(w: Work, o: Tensor, do: Tensor, passed: Passed, out: dict[str, Any]) -> Launch:
    call, p, x, _ = w
    arguments = _place_arguments(w) | {
        "p_v": call.v.contiguous(),
        "p_beta": contiguous(call.beta),
        "p_o": o,
        "p_do": do,
        "p_dv": passed.dv,
        "p_duy": passed.duy,
        "TOKENS": p.B * p.T,
        "V": p.V,
        "NV": -(-p.V // _reverse_block(p)),
        "BV": (64 if p.V > 64 else min(32, power_of_two(p.V))) if p.split else WIDE_VALUES,
        "BETA_RANGE": call.beta_range or 0,
        "HAS_BETA": call.beta is not None,
        "BOUNDED": p.bounded,
        "SPLIT": p.split,
    }
    arguments |= x.arguments("G", "rho", "norms", "y", "y_low")
    arguments |= {name: out[name] for name in ("p_D", "p_D_low", "p_dA", "p_dA_low", "p_scalars", "p_dbeta")}
    return Launch(pair_kernel, (p.slots, p.HV), arguments, num_warps=1 if p.split else 2)


def _contract(w: Work, do: Tensor, passed: Passed, out: dict[str, Any]) -> Launch:
    p, x = w.p, w.x
    BK, BV, num_warps = _contract_block(p)
    arguments = _place_arguments(w) | {
        "p_norm2": x.norms[2],
        "p_do": do,
        "p_dv": passed.dv,
        "p_dstates": passed.dstates,
        "K": p.K,
        "V": p.V,
        "BK": BK,
        "BV": BV,
    }
    arguments |= x.arguments("rho", "y", "states")
    arguments |= {name: out[name] for name in ("p_S_do", "p_S_dr", "p_dS_u", "p_through")}
    maxnreg = CONTRACT_REGISTERS if num_warps == 8 else None
    grid = (-(-p.K // BK) * p.slots, p.HV)
    return Launch(contract_kernel, grid, arguments, num_warps=num_warps, maxnreg=maxnreg)


def _gradient(w: Work, out: dict[str, Any]) -> Launch:
    p = w.p
    arguments = _gate_arguments(w, ("q", "k", "beta") if p.bounded else ("beta",))
    for name in ("p_beta", "BETA_RANGE"):
        del arguments[name]
    BK, num_warps = (64, 4) if p.K > 32 else (min(32, power_of_two(p.K)), 2)
    arguments |= {"BK": BK, "SPLIT": p.split}
    arguments |= w.x.arguments(*KEYS, "rho", "norms", "end")
    used = ("p_D", "p_D_low", "p_dA", "p_dA_low", "p_scalars", "p_S_do", "p_S_dr", "p_dS_u", "p_through")
    arguments |= {name: out[name] for name in (*used, "p_dq", "p_dk", "p_dg", "p_derase", "p_dlog_rate", "p_dbias")}
    return Launch(gradient_kernel, (-(-p.K // BK) * p.slots, p.HV), arguments, num_warps=num_warps)


def _between(w: Work, out: dict[str, Any]) -> dict[str, Tensor]:
    """What the last three kernels leave for each other; in a gradient's own place where its dtype has the range."""
    p, x = w.p, w.x
    square = (p.rows, p.HV, p.C)

    def beside(given: Tensor) -> Tensor:
        return given if given.dtype in (torch.bfloat16, torch.float32) else torch.empty_like(given, dtype=torch.float32)

    def halves(name: str) -> dict[str, Tensor]:
        low = square if p.split else (0,)
        return {name: x.y.new_empty(square), f"{name}_low": x.y.new_empty(low)}

    contracted = {"p_S_do": beside(out["p_dq"]), "p_S_dr": beside(out["p_dk"]), "p_dS_u": beside(out["p_dg"])}
    lines = {"p_through": torch.empty_like(x.start), "p_scalars": x.norms.new_empty(4, p.rows, p.HV)}
    return contracted | halves("p_D") | halves("p_dA") | lines


def gradients(w: Work, o: Tensor, do: Tensor, passed: Passed) -> tuple[list[Launch], dict[str, Any]]:
    """The end of the backward: all gradients but dv, and where they are written."""
    out = gradient_outputs(w, torch.float32)
    used = out | _between(w, out)
    return [_pair(w, o, do, passed, used), _contract(w, do, passed, used), _gradient(w, used)], out


def group_sums(w: Work, out: dict[str, Any]) -> tuple[list[Launch], dict[str, Any]]:
    """dq and dk summed over the value heads that share them, and where all gradients lie then; Hopper has no other."""
    p = w.p
    if p.H == p.HV:
        return [], out
    sums = {name: out[name].new_empty(w.call.q.shape, dtype=p.dtype) for name in ("p_dq", "p_dk")}
    lines, block = p.B * p.T * p.H, 16
    arguments = {
        "p_dq": out["p_dq"],
        "p_dk": out["p_dk"],
        "p_dq_sum": sums["p_dq"],
        "p_dk_sum": sums["p_dk"],
        "LINES": lines,
        "GROUP": p.HV // p.H,
        "K": p.K,
        "BK": power_of_two(p.K),
        "BLOCK": block,
    }
    return [Launch(group_kernel, (-(-lines // block),), arguments, num_warps=4)], out | sums
