"""The kernels of :mod:`ckda.layers.convolution`, whose formulas they compute in float32.

One program takes BT tokens of one sequence and BD channels. Of the inputs only the channels must lie side by side. The gradient
of the weight leaves each program as a partial sum, so that it is the same every time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckda.ops.triton import replay
from ckda.ops.triton.launch import Launch
from ckda.ops.triton.sums import sum_parts

__all__ = [
    "backward",
    "backward_all",
    "convolution_gradient_kernel",
    "convolution_input_kernel",
    "convolution_output_kernel",
    "forward",
    "forward_all",
]

BLOCK_T, BLOCK_D = 32, 128
_VARIES = ("num_cu", "steps")  # from batch to batch


@triton.jit
def _place(T, D, BT: tl.constexpr, BD: tl.constexpr):
    """This program's sequence, its tokens [BT] and its channels [BD]."""
    num = tl.cdiv(T, BT)
    i_b = (tl.program_id(0) // num).to(tl.int64)
    o_t = (tl.program_id(0) % num) * BT + tl.arange(0, BT)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    return i_b, o_t, o_d


@triton.jit
def _first_of(p_cu, o_t, num_cu, steps, BT: tl.constexpr, PACKED: tl.constexpr):
    """[BT] the first token of each token's packed sequence, by bisection: the last of cu_seqlens that is not behind it."""
    b_low = tl.zeros((BT,), tl.int32)
    if PACKED:
        b_high = tl.zeros((BT,), tl.int32) + num_cu
        for _ in range(steps):
            b_middle = (b_low + b_high) // 2
            m_right = tl.load(p_cu + b_middle).to(tl.int32) <= o_t
            b_low = tl.where(m_right, b_middle, b_low)
            b_high = tl.where(m_right, b_high, b_middle)
        b_low = tl.load(p_cu + b_low).to(tl.int32)
    return b_low


@triton.jit
def _delayed(
    p_x, p_past, i_b, o_t, o_d, b_first, s, T, D, x_b, x_t, past_b, past_t, S: tl.constexpr, HAS_PAST: tl.constexpr
):
    """[BT, BD] x_{t-s} in float32, zero before the first token unless there is a past."""
    o_s = o_t - s
    m_d = (o_d < D)[None, :]
    m_x = ((o_s >= b_first) & (o_t < T))[:, None] & m_d
    rows = i_b * x_b + o_s.to(tl.int64) * x_t
    b_x = tl.load(p_x + rows[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    if HAS_PAST:
        m_past = ((o_s < 0) & (o_t < T))[:, None] & m_d
        rows = i_b * past_b + (o_s + S - 1).to(tl.int64) * past_t
        b_x += tl.load(p_past + rows[:, None] + o_d[None, :], mask=m_past, other=0.0).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=_VARIES)
def convolution_output_kernel(
    p_x,  # [B, T, D]
    p_weight,  # [D, S]
    p_past,  # [B, S - 1, D]
    p_cu,  # [num_cu]
    p_y,  # [B, T, D]
    T,
    D,
    x_b,
    x_t,
    past_b,
    past_t,
    num_cu,
    steps,
    S: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ACTIVATE: tl.constexpr,
    HAS_PAST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """y = z or silu(z)."""
    i_b, o_t, o_d = _place(T, D, BT, BD)
    b_first = _first_of(p_cu, o_t, num_cu, steps, BT, PACKED)
    b_z = tl.zeros((BT, BD), tl.float32)
    for s in tl.static_range(S):
        b_w = tl.load(p_weight + o_d * S + s, mask=o_d < D, other=0.0).to(tl.float32)
        b_x = _delayed(p_x, p_past, i_b, o_t, o_d, b_first, s, T, D, x_b, x_t, past_b, past_t, S, HAS_PAST)
        b_z += b_x * b_w[None, :]
    if ACTIVATE:
        b_z = b_z / (1.0 + tl.exp(-b_z))
    rows = (i_b * T + o_t) * D
    mask = (o_t < T)[:, None] & (o_d < D)[None, :]
    tl.store(p_y + rows[:, None] + o_d[None, :], b_z.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARIES)
def convolution_gradient_kernel(
    p_dy,  # [B, T, D]
    p_x,  # [B, T, D]
    p_weight,  # [D, S]
    p_past,  # [B, S - 1, D]
    p_cu,  # [num_cu]
    p_dz,  # [B, T, D], written where ACTIVATE; else dz is dy
    p_dweight,  # [programs along T, D, S] float32, channels of several convolutions side by side
    T,
    D,
    dweight_n,
    dy_b,
    dy_t,
    x_b,
    x_t,
    past_b,
    past_t,
    num_cu,
    steps,
    S: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ACTIVATE: tl.constexpr,
    HAS_PAST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dz = dy silu'(z), with z from x again, and this block's part of dweight."""
    i_b, o_t, o_d = _place(T, D, BT, BD)
    b_first = _first_of(p_cu, o_t, num_cu, steps, BT, PACKED)
    mask = (o_t < T)[:, None] & (o_d < D)[None, :]
    rows = i_b * dy_b + o_t.to(tl.int64) * dy_t
    b_dz = tl.load(p_dy + rows[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ACTIVATE:
        b_z = tl.zeros((BT, BD), tl.float32)
        for s in tl.static_range(S):
            b_w = tl.load(p_weight + o_d * S + s, mask=o_d < D, other=0.0).to(tl.float32)
            b_x = _delayed(p_x, p_past, i_b, o_t, o_d, b_first, s, T, D, x_b, x_t, past_b, past_t, S, HAS_PAST)
            b_z += b_x * b_w[None, :]
        b_sigma = 1.0 / (1.0 + tl.exp(-b_z))
        b_dz = b_dz * b_sigma * (1.0 + b_z * (1.0 - b_sigma))
        rows = (i_b * T + o_t) * D
        tl.store(p_dz + rows[:, None] + o_d[None, :], b_dz.to(p_dz.dtype.element_ty), mask=mask)
    p_part = p_dweight + tl.program_id(0).to(tl.int64) * dweight_n + o_d * S
    for s in tl.static_range(S):
        b_x = _delayed(p_x, p_past, i_b, o_t, o_d, b_first, s, T, D, x_b, x_t, past_b, past_t, S, HAS_PAST)
        tl.store(p_part + s, tl.sum(b_dz * b_x, 0), mask=o_d < D)


@triton.jit(do_not_specialize=_VARIES)
def convolution_input_kernel(
    p_dz,  # [B, T, D]
    p_weight,  # [D, S]
    p_cu,  # [num_cu]
    p_dx,  # [B, T, D]
    T,
    D,
    dz_b,
    dz_t,
    num_cu,
    steps,
    S: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dx_t = sum_s weight[:, s] dz_{t+s}, over the tokens of t's own sequence."""
    i_b, o_t, o_d = _place(T, D, BT, BD)
    b_first = _first_of(p_cu, o_t, num_cu, steps, BT, PACKED)
    b_dx = tl.zeros((BT, BD), tl.float32)
    for s in tl.static_range(S):
        o_s = o_t + s
        m_t = o_s < T
        if PACKED:
            m_t = m_t & (_first_of(p_cu, o_s, num_cu, steps, BT, PACKED) == b_first)
        b_w = tl.load(p_weight + o_d * S + s, mask=o_d < D, other=0.0).to(tl.float32)
        rows = i_b * dz_b + o_s.to(tl.int64) * dz_t
        mask = m_t[:, None] & (o_d < D)[None, :]
        b_dx += tl.load(p_dz + rows[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32) * b_w[None, :]
    rows = (i_b * T + o_t) * D
    mask = (o_t < T)[:, None] & (o_d < D)[None, :]
    tl.store(p_dx + rows[:, None] + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """x with its channels side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Launches(NamedTuple):
    """What the launches of a convolution share."""

    grid: tuple[int, int]
    shared: dict[str, Any]  #: arguments of all kernels
    read: dict[str, Any]  #: those of the kernels that read x and the past
    num_warps: int

    def launch(self, kernel: Any, **arguments: Any) -> Launch:
        return Launch(kernel, self.grid, self.shared | arguments, self.num_warps)


def _launches(x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> _Launches:
    """The kernels' x, weight, past (x where there is none) and cu_seqlens (weight where there are none)."""
    x, weight = _rows(x), weight.contiguous()
    before = x if past is None or cu_seqlens is not None or past.shape[1] == 0 else _rows(past)
    B, T, D = x.shape
    BT = BLOCK_T if T > 1 else 1
    BD = min(BLOCK_D, triton.next_power_of_2(D))
    num_cu = 0 if cu_seqlens is None else cu_seqlens.numel()
    shared = {
        "p_weight": weight,
        "p_cu": weight if cu_seqlens is None else cu_seqlens.contiguous(),
        "T": T,
        "D": D,
        "num_cu": num_cu,
        "steps": num_cu.bit_length(),
        "S": weight.shape[1],
        "BT": BT,
        "BD": BD,
        "PACKED": cu_seqlens is not None,
    }
    read = {"p_x": x, "p_past": before, "x_b": x.stride(0), "x_t": x.stride(1)}
    read |= {"past_b": before.stride(0), "past_t": before.stride(1)}
    read |= {"ACTIVATE": activate, "HAS_PAST": before is not x}
    grid = (B * triton.cdiv(T, BT), triton.cdiv(D, BD))
    return _Launches(grid, shared, read, 8 if BT * BD >= 4096 else 4)


#: of one convolution: x with the elements of [B, T, D], weight, past, cu_seqlens (the same for all), activate
Part = tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]


def _given(parts: Sequence[Part]) -> tuple[list[Tensor | None], tuple[bool, ...]]:
    """The tensors and the options of all."""
    return [*(x for part in parts for x in part[:3]), parts[0][3]], tuple(part[4] for part in parts)


def _at(part: Part, shape: Sequence[int]) -> Part:
    """With x as [B, T, D], from the shape of y."""
    return (part[0].view(*shape[:2], len(part[1])), *part[1:])


def forward_all(parts: Sequence[Part], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """:func:`forward` of several, prepared and launched together; y has the shape [B, T, ...] that is given for it."""
    given, activate = _given(parts)
    kept = replay.kept_for("convolution", given, activate, *shapes)
    made = replay.rerun(kept, "forward", given)
    if made is None:
        xs = [part[0] for part in parts]
        made = [torch.empty(shape, dtype=x.dtype, device=x.device) for x, shape in zip(xs, shapes, strict=True)]
        if not xs[0].numel():
            return made  # type: ignore[return-value]
        run = []
        for part, shape, y in zip(parts, shapes, made, strict=True):
            of = _launches(*_at(part, shape))
            run.append(of.launch(convolution_output_kernel, p_y=y, **of.read))
        replay.record(kept, "forward", [(launch, launch()) for launch in run], given, made)
    return made  # type: ignore[return-value]


def backward_all(dys: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """dx of each in the shape of its x, and dweight of each, from dy [B, T, ...]; the dweight are added up by one launch.

    B, T, and the weights' taps and dtype must be the same for all.
    """
    tensors, activate = _given(parts)
    given = [*dys, *tensors]
    kept = replay.kept_for("convolution", given, activate)
    made = replay.rerun(kept, "backward", given)
    if made is None:
        made = _backward_all(dys, parts, kept, given)
    *dxs, dweights = made
    return [*dxs, *dweights.split_with_sizes([len(part[1]) for part in parts])]  # type: ignore[union-attr, list-item]


def _backward_all(
    dys: Sequence[Tensor], parts: Sequence[Part], kept: replay.Kept, given: list[Tensor | None]
) -> list[Tensor | None]:
    """dx of each, and the dweight one under the other."""
    (x, weight, *_), widths = parts[0], [len(part[1]) for part in parts]
    dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, *_ in parts]
    dweights = torch.empty(sum(widths), weight.shape[1], dtype=weight.dtype, device=weight.device)
    if dys[0].numel() == 0:
        return [*dxs, dweights.zero_()]
    views = [_at(part, dy.shape) for part, dy in zip(parts, dys, strict=True)]
    ofs = [_launches(*part) for part in views]
    sums = torch.empty(ofs[0].grid[0], *dweights.shape, dtype=torch.float32, device=x.device)
    run: list[Launch] = []
    for dy, (x, *_), of, dx, dweight in zip(dys, views, ofs, dxs, sums.split_with_sizes(widths, 1), strict=True):
        run += _backward(dy.reshape(x.shape), of, dx.view(x.shape), dweight)
    run.append(sum_parts(sums, dweights))
    replay.record(kept, "backward", [(launch, launch()) for launch in run], given, [*dxs, dweights])
    return [*dxs, dweights]


def forward(x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> Tensor:
    """As :func:`ckda.layers.convolution.torch_forward`."""
    return forward_all([(x, weight, past, cu_seqlens, activate)], (x.shape,))[0]


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool
) -> tuple[Tensor, Tensor]:
    """As :func:`ckda.layers.convolution.torch_backward`; with SiLU dz passes through memory in x's dtype."""
    dx, dweight = backward_all([dy], [(x, weight, past, cu_seqlens, activate)])
    return dx, dweight


def _backward(dy: Tensor, of: _Launches, dx: Tensor, dweight: Tensor) -> list[Launch]:
    """The launches that write dx and the parts of dweight [programs, D, S], which lie among those of others."""
    dy = _rows(dy)
    dz = torch.empty_like(dx) if of.read["ACTIVATE"] else dy
    places = {"dweight_n": dweight.stride(0), "dy_b": dy.stride(0), "dy_t": dy.stride(1)}
    gradient = of.launch(convolution_gradient_kernel, p_dy=dy, p_dz=dz, p_dweight=dweight, **of.read, **places)
    places = {"dz_b": dz.stride(0), "dz_t": dz.stride(1)}
    return [gradient, of.launch(convolution_input_kernel, p_dz=dz, p_dx=dx, **places)]
