"""The short causal convolution, with the SiLU behind it, as one node: on a GPU one kernel forward and two backward.

    z_t = sum_s weight[:, s] x_{t-s}, s = 0 ... S - 1,    y = z or silu(z)

In plain operations it was a third of a training step of a language model, more than the recurrence it feeds. With
dz = dy silu'(z), and z computed again rather than kept, the gradients are

    dx_t = sum_s weight[:, s] dz_{t+s},    dweight[:, s] = sum_t dz_t x_{t-s}.

Tokens before the first are those of `past`, or zero; in packed sequences they are zero before each. Sums are in float32.

Legend: B batch, T time, D channels, S taps, N packed sequences.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ckda.layers.node import one_node
from ckda.ops.call import is_exporting, other_derivative
from ckda.ops.context import Context, previous_tails
from ckda.ops.triton import HAS_TRITON

__all__ = [
    "ShortConvolution",
    "backward_together",
    "convolve_parts",
    "convolve_together",
    "forward_together",
    "has_kernel",
    "position_in_sequence",
    "short_convolution",
    "torch_backward",
    "torch_forward",
]


def position_in_sequence(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T] the index of each token inside its own packed sequence.

    Example:
        >>> position_in_sequence(torch.tensor([0, 3, 3, 5]), 5).tolist()
        [0, 1, 2, 0, 1]
    """
    token = torch.arange(T, device=cu_seqlens.device)
    owner = (
        torch.searchsorted(cu_seqlens, token, right=True) - 1
    )  # not in a slice: inductor of torch 2.11 reads it from its base
    return token - cu_seqlens[owner]


def _delayed(x: Tensor, S: int, past: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    """S tensors [B, T, D]: x_t, x_{t-1}, ..., x_{t-S+1}."""
    B, T, D = x.shape
    history = torch.cat([x.new_zeros(B, S - 1, D) if past is None else past, x], 1)
    shifted = [history[:, S - 1 - s : S - 1 - s + T] for s in range(S)]
    if cu_seqlens is None:
        return shifted
    position = position_in_sequence(cu_seqlens, T).unsqueeze(-1)
    return [y if s == 0 else y.where(position >= s, 0) for s, y in enumerate(shifted)]


def torch_forward(x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> Tensor:
    """x [B, T, D], weight [D, S], past [B, S - 1, D], cu_seqlens [N + 1] -> y [B, T, D], in plain operations in x's dtype."""
    weight = weight.to(x.dtype)
    terms = [y * weight[:, s] for s, y in enumerate(_delayed(x, weight.shape[1], past, cu_seqlens))]
    z = terms[0]
    for term in terms[1:]:
        z = z + term
    return silu(z) if activate else z


def torch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool
) -> tuple[Tensor, Tensor]:
    """dx and dweight of :func:`torch_forward`, by the formulas above, in float32 at least."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_, w, dz = x.to(wide), weight.to(wide), dy.to(wide)
    S, T = w.shape[1], x.shape[1]
    delayed = _delayed(x_, S, None if past is None else past.to(wide), cu_seqlens)
    if activate:
        z = torch.stack([y * w[:, s] for s, y in enumerate(delayed)]).sum(0)
        sigma = torch.sigmoid(z)
        dz = dz * sigma * (1 + z * (1 - sigma))
    dweight = torch.stack([(dz * y).sum((0, 1)) for y in delayed], 1)
    position = None if cu_seqlens is None else position_in_sequence(cu_seqlens, T).unsqueeze(-1)
    dx = dz * w[:, 0]
    for s in range(1, min(S, T)):
        later = dz if position is None else dz.where(position >= s, 0)
        dx[:, : T - s] += later[:, s:] * w[:, s]
    return dx.to(x.dtype), dweight.to(weight.dtype)


def has_kernel(x: Tensor) -> bool:
    """Whether the kernels serve an input like x; a compiled program makes its own."""
    compiling = torch.compiler.is_compiling()
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64 and not compiling


def _kernels() -> Any:
    from ckda.layers import convolution_kernels

    return convolution_kernels


def _forward(x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> Tensor:
    if has_kernel(x):
        return _kernels().forward(x, weight, past, cu_seqlens, activate)
    return torch_forward(x, weight, past, cu_seqlens, activate).contiguous()


_forward_op = torch.library.custom_op("ckda::short_convolution", mutates_args=())(_forward)


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool
) -> list[Tensor]:
    """[dx, dweight]."""
    run = _kernels().backward if has_kernel(x) else torch_backward
    return [grad.contiguous() for grad in run(dy, x, weight, past, cu_seqlens, activate)]


_backward_op = torch.library.custom_op("ckda::short_convolution_backward", mutates_args=())(_backward)


@_backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool
) -> list[Tensor]:
    like = torch.contiguous_format
    return [torch.empty_like(x, memory_format=like), torch.empty_like(weight, memory_format=like)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.activate = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, dy: Tensor) -> tuple:
    dx, dweight = torch.ops.ckda.short_convolution_backward(dy, *ctx.saved_tensors, ctx.activate)
    return dx, dweight, None, None, None


torch.library.register_autograd("ckda::short_convolution", _autograd, setup_context=_setup_context)


def _vmap(
    info: Any,
    in_dims: tuple,
    x: Tensor,
    weight: Tensor,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    activate: bool,
) -> tuple[Tensor, int]:
    """The mapped axis becomes part of the channels, each of which has its own taps."""
    R = info.batch_size
    if in_dims[3] is not None:
        raise ValueError("cu_seqlens is mapped by vmap; it must be the same for all")

    def fold(y: Tensor | None, dim: int | None, axis: int) -> Tensor | None:
        if y is None:
            return None
        y = y.unsqueeze(0).expand(R, *y.shape) if dim is None else y.movedim(dim, 0)
        return y.movedim(0, axis).flatten(axis, axis + 1)

    folded = [fold(x, in_dims[0], 2), fold(weight, in_dims[1], 0), fold(past, in_dims[2], 2)]
    return torch.ops.ckda.short_convolution(*folded, cu_seqlens, activate).unflatten(2, (R, -1)), 2


torch.library.register_vmap("ckda::short_convolution", _vmap)
_node = one_node(torch.ops.ckda.short_convolution, _forward, torch.ops.ckda.short_convolution_backward, _backward)


def short_convolution(
    x: Tensor, weight: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None, activate: bool = False
) -> Tensor:
    """y [B, T, D] of x [B, T, D] and weight [D, S] in x's dtype, with the gradients of both, and under vmap.

    Args:
        past: [B, S - 1, D] the tokens before x; it gets no gradient. cu_seqlens: [N + 1], B = 1 and no past then.
        activate: SiLU of the result.

    Example:
        >>> x, weight = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1), torch.tensor([[1.0, 0.5]])
        >>> short_convolution(x, weight).flatten().tolist()
        [1.0, 2.5, 5.0]
        >>> short_convolution(x, weight, cu_seqlens=torch.tensor([0, 2, 3])).flatten().tolist()
        [1.0, 2.5, 4.0]
    """
    if other_derivative():
        return torch_forward(x, weight, past, cu_seqlens, activate)
    return _node(x, weight, past, cu_seqlens, activate)


# Several convolutions as one node: arguments are x of each, weight of each, cu_seqlens, shape of each y, activate of each.


def _parts(*arguments: Any) -> tuple[list[tuple], tuple]:
    """What each of them takes, and the shapes."""
    *tensors, cu_seqlens, shapes, activate = arguments
    num = len(shapes)
    return [(tensors[i], tensors[num + i], None, cu_seqlens, activate[i]) for i in range(num)], shapes


def _flat(x: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """As [B, T, D], from the shape of y."""
    return x.reshape(*shape[:2], weight.shape[0])


def _forward_apart(forward: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    parts, shapes = _parts(*arguments)
    ys = (forward(_flat(x, w, shape), w, *rest) for (x, w, *rest), shape in zip(parts, shapes, strict=True))
    return tuple(y.view(shape) for y, shape in zip(ys, shapes, strict=True))


def _backward_apart(backward: Callable[..., Sequence[Tensor]], *arguments: Any) -> list[Tensor]:
    num = len(arguments[-1])
    parts, shapes = _parts(*arguments[num:])
    dxs, dweights = [], []
    for dy, (x, w, *rest), shape in zip(arguments[:num], parts, shapes, strict=True):
        dx, dweight = backward(_flat(dy, w, shape), _flat(x, w, shape), w, *rest)
        dxs.append(dx.view(x.shape))
        dweights.append(dweight)
    return dxs + dweights


def forward_together(*arguments: Any) -> tuple[Tensor, ...]:
    """y of each."""
    parts, shapes = _parts(*arguments)
    if all(has_kernel(part[0]) for part in parts):
        return tuple(_kernels().forward_all(parts, shapes))
    return _forward_apart(_forward, *arguments)


def backward_together(*arguments: Any) -> list[Tensor]:
    """dx and then dweight of each, from dy of each and the arguments of :func:`forward_together`."""
    if torch.is_grad_enabled():  # the op says that there is no second derivative
        return _backward_apart(torch.ops.ckda.short_convolution_backward, *arguments)
    num = len(arguments[-1])
    parts, shapes = _parts(*arguments[num:])
    alike = {(weight.dtype, weight.shape[1], *shape[:2]) for (_, weight, *_), shape in zip(parts, shapes, strict=True)}
    if len(alike) == 1 and all(has_kernel(part[0]) for part in parts):
        return _kernels().backward_all(arguments[:num], parts)
    return _backward_apart(_backward, *arguments)


_together = one_node(partial(_forward_apart, short_convolution), forward_together, backward_together, backward_together)


def convolve_together(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    shapes: Sequence[Sequence[int]],
    activate: Sequence[bool],
) -> tuple[Tensor, ...]:
    """:func:`short_convolution` of several inputs, without past, as one node where nothing but autograd looks on.

    Args:
        inputs: with the elements of [B, T, D] each, in one shape or another. weights: [D, S] each.
        shapes: [B, T, ...] of each result.

    Example:
        >>> x, weight = torch.ones(3, 4), torch.full((4, 2), 0.5)
        >>> [y.shape for y in convolve_together([x, x], [weight] * 2, None, [(1, 3, 2, 2), (1, 3, 4)], [True, False])]
        [torch.Size([1, 3, 2, 2]), torch.Size([1, 3, 4])]
    """
    return _together(*inputs, *weights, cu_seqlens, tuple(map(tuple, shapes)), tuple(activate))


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over time without bias: ``y_t = sum_s weight[:, s] x_{t-s}``, s = 0 ... size - 1.

    Example:
        >>> conv = ShortConvolution(3, 4)
        >>> x = torch.randn(2, 7, 3)
        >>> y, past = conv(x[:, :5])
        >>> z, _ = conv(x[:, 5:], past)
        >>> torch.allclose(torch.cat([y, z], 1), conv(x)[0], atol=1e-6)
        True
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-(size**-0.5), size**-0.5))

    def forward(
        self, x: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None, *, activate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, D] after `past` [B, size - 1, D] (zeros if None); returns y [B, T, D] and the new past.

        With cu_seqlens nothing crosses from one packed sequence into the next; `activate`: y is the SiLU of the convolution.
        The output keeps x's dtype: under autocast that is the projections', and the operator behind is spared wider inputs
        than it needs.
        """
        return self.convolve(x, past, cu_seqlens, activate), self._last(x, past)

    def convolve(self, x: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, activate: bool) -> Tensor:
        """y alone of :meth:`forward`."""
        if has_kernel(x) and (past is None or not past.requires_grad):
            return short_convolution(x, self.weight, past, cu_seqlens, activate)
        return torch_forward(x, self.weight, past, cu_seqlens, activate)

    def _last(self, x: Tensor, past: Tensor | None) -> Tensor:
        """[B, size - 1, D] the last tokens of `past` and x."""
        B, T, D = x.shape
        kept = self.size - 1
        if not is_exporting() and kept <= T:  # an exported program has no branches: it serves every T
            return x[:, T - kept :]
        return torch.cat([x.new_zeros(B, kept, D) if past is None else past, x], 1)[:, T:]


def convolve_parts(
    convolutions: dict[str, Any],
    inputs: dict[str, Tensor],
    activate: Collection[str],
    context: Context,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """The convolutions of this rank's tokens, [B, T, D] each, where the time axis is spread over the ranks of `context`.

    Every piece is convolved with the last S - 1 tokens of the piece before it in front, its halo, of which the outputs are
    dropped. One exchange brings the halos of all inputs. cu_seqlens is over the tokens of all ranks. An input without a
    convolution stays as it is.
    """
    names = list(convolutions)
    n, S = context.per_rank, next(iter(convolutions.values())).size
    L = context.piece_length(inputs[names[0]].shape[1])
    tails = torch.cat([inputs[name].unflatten(1, (n, L))[:, :, max(0, L - S + 1) :] for name in names], -1)
    halos = previous_tails(tails.flatten(1, 2), S - 1, context).split([inputs[name].shape[-1] for name in names], -1)
    cu = None if cu_seqlens is None else _with_halos(cu_seqlens, context, L, S - 1)
    out = dict(inputs)
    for name, halo in zip(names, halos, strict=True):
        x = torch.cat([halo, inputs[name].unflatten(1, (n, L))], 2)  # [B, n, S - 1 + L, D]
        rows = x.flatten(0, 1) if cu is None else x.flatten(1, 2)
        y, _ = convolutions[name](rows, None, cu, activate=name in activate)
        out[name] = y.reshape(x.shape)[:, :, S - 1 :].flatten(1, 2)
    return out


def _with_halos(cu_seqlens: Tensor, context: Context, L: int, halo: int) -> Tensor:
    """cu_seqlens of all ranks' tokens -> of this rank's pieces laid end to end, each with its halo in front."""
    start = cu_seqlens.new_zeros(1)  # what stands before the first piece belongs to no sequence
    width = halo + L
    bounds = [(cu_seqlens - p * L + halo).clamp(0, width) + i * width for i, p in enumerate(context.pieces)]
    return torch.cat([start, *bounds])
