"""The backends as data, which of them runs a call, and how it runs: as one node (:func:`apply`).

A new backend is one more entry of :data:`BACKENDS`, and the same tests run on it.

The choice is made once a call, here, from device, dtype and shape: never by batch or heads, so that a sequence gives the same bits
alone and in a batch. The name of what was chosen then travels with the call (:attr:`ckda.ops.call.Call.backend`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ckda.ops import chunked, fla, reference, triton
from ckda.ops.call import Call, Gradients, is_exporting, other_derivative

__all__ = ["BACKENDS", "STEPS", "Backend", "Choice", "apply", "choose", "choose_step", "full_precision"]


@dataclass(frozen=True)
class Backend:
    """One way to compute the operator.

    A backend with `backward` is run as one custom op, which saves what `forward` returns as its third value; without
    it, `forward` is plain differentiable torch code that returns (o, state).
    """

    name: str
    refuses: Callable[[Call], str | None]  #: why it cannot serve the call, or None
    forward: Callable[..., tuple]
    backward: Callable[[Call, list[Tensor], Tensor, Tensor | None], Gradients] | None = None
    saved_like: Callable[[Call], list[Tensor]] | None = None  #: empty tensors of the shapes that `forward` saves
    reads_output: bool = False  #: whether `backward` wants o as the last of what was saved


class Choice(NamedTuple):
    """A backend and the reason it was taken; as a string, a sentence."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name}: {self.reason}"


def _serves_all(call: Call) -> str | None:
    return None


def _triton(form: str, refuses: Callable[[Call], str | None]) -> Backend:
    return Backend(form, refuses, triton.forward, triton.backward, triton.saved_like, reads_output=True)


def _by_name(*backends: Backend) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends}


#: what runs complex_kda
BACKENDS = _by_name(
    Backend("reference", _serves_all, reference.forward),
    Backend("chunked", _serves_all, chunked.forward, chunked.backward, chunked.saved_like),
    _triton("triton-hopper", triton.refuses_hopper),
    _triton("triton-portable", triton.refuses),
    _triton("triton-recurrent", triton.refuses_recurrent),
    Backend("fla", fla.refuses, fla.forward),
)

#: what runs complex_kda_step; `forward` takes the call, and whether to write into its state
STEPS = _by_name(
    Backend("reference", _serves_all, reference.step), Backend("triton-recurrent", triton.refuses_step, triton.step)
)


def _named(call: Call, table: dict[str, Backend]) -> Choice:
    if call.backend not in table:
        names = ", ".join(map(repr, ("triton", *table)))
        raise ValueError(f"backend is {call.backend!r}; it must be 'auto' or one of {names}")
    why = table[call.backend].refuses(call)
    if why is not None:
        raise ValueError(f"backend={call.backend!r} cannot serve this call: {why}")
    return Choice(table[call.backend], "named by the caller")


def _without_triton(call: Call, refuses: Callable[[Call], str | None]) -> str | None:
    """Why a call for "auto" or "triton" does not run Triton's kernels, or None; an error for "triton"."""
    if call.backend == "auto" and call.q.device.type != "cuda":
        return "q is not on a CUDA device"
    why = refuses(call)
    if why is not None and call.backend == "triton":
        raise ValueError(f"backend='triton' cannot serve this call: {why}")
    return why


def choose(call: Call) -> Choice:
    """What runs the call: the backend of its name, for "triton" the fastest form of the kernels that serves it, for "auto" that
    on a GPU and the chunk form in torch elsewhere. ValueError with the reason where a name cannot serve the call."""
    if call.backend not in ("auto", "triton"):
        return _named(call, BACKENDS)
    why = _without_triton(call, triton.refuses)
    if why is not None:
        return Choice(
            BACKENDS["chunked"], f"the chunk form in torch serves every call, the Triton kernels not this: {why}"
        )
    form, reason = triton.choose_form(call)
    return Choice(BACKENDS[form], reason)


def choose_step(call: Call) -> Choice:
    """:func:`choose` for one token of decoding."""
    if call.backend not in ("auto", "triton"):
        return _named(call, STEPS)
    why = _without_triton(call, triton.refuses_step)
    if why is not None:
        return Choice(
            STEPS["reference"], f"the recurrence in torch serves every call, the Triton kernel not this: {why}"
        )
    return Choice(STEPS["triton-recurrent"], "one token is one kernel on a CUDA device")


# The operator as one node ----------------------------------------------------------------------------------------------
#
# A registered custom op with fake, autograd and vmap rules; the backend is one of its arguments. Plain tensors outside
# torch.compile, vmap and dispatch modes take the same functions without the dispatcher (:class:`_Direct`), whose bookkeeping
# costs the host some 0.3 ms a call.


def _in_schema(kind: Any) -> str:
    """A field's type as torch spells it: `Tensor | None` is Tensor?."""
    names = [x.__name__ for x in (get_args(kind) or (kind,)) if x is not NoneType]
    return names[0] + "?" * (len(get_args(kind)) == 2)


_SCHEMA = ", ".join(f"{_in_schema(kind)} {name}" for name, kind in get_type_hints(Call).items())
_TENSORS = Call._fields[: Call._fields.index("gate")]


#: asked once: torch.compile cannot trace the question
_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def full_precision(device: torch.device) -> AbstractContextManager:
    """Autocast is for the caller's projections; the recurrence keeps its own precision, backward too."""
    if device.type in _AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _empty_state(call: Call) -> Tensor:
    return call.v.new_empty(0, dtype=call.state_dtype)


def _forward(*arguments: Any) -> list[Tensor]:
    """[o, state or empty, *saved]."""
    *fields, save = arguments
    call = Call(*fields)
    o, state, saved = BACKENDS[call.backend].forward(call)
    return [o, state if call.output_final_state else _empty_state(call), *(saved if save else ())]


_forward_op = torch.library.custom_op(
    "ckda::complex_kda", _forward, mutates_args=(), schema=f"({_SCHEMA}, bool save) -> Tensor[]"
)


@_forward_op.register_fake
def _forward_fake(*arguments: Any) -> list[Tensor]:
    *fields, save = arguments
    call = Call(*fields)
    saved_like = BACKENDS[call.backend].saved_like
    assert saved_like is not None
    state = call.zero_state() if call.output_final_state else _empty_state(call)
    return [
        torch.empty_like(call.v, memory_format=torch.contiguous_format),
        state,
        *(saved_like(call) if save else ()),
    ]


def _backward(do: Tensor, dstate: Tensor | None, saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The gradients that are not None, in the order of :class:`Gradients`."""
    call = Call(*arguments)
    backward = BACKENDS[call.backend].backward
    assert backward is not None
    with full_precision(do.device):
        return [grad for grad in backward(call, saved, do, dstate) if grad is not None]


_backward_op = torch.library.custom_op(
    "ckda::complex_kda_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dstate, Tensor[] saved, {_SCHEMA}) -> Tensor[]",
)


def _differentiable(call: Call) -> list[str]:
    """The names of :class:`Gradients` whose arguments are given."""
    return [name for name in Gradients._fields if getattr(call, name) is not None]


@_backward_op.register_fake
def _backward_fake(do: Tensor, dstate: Tensor | None, saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    call = Call(*arguments)
    return [
        torch.empty_like(getattr(call, name), memory_format=torch.contiguous_format) for name in _differentiable(call)
    ]


def _refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "complex_kda has no second derivative in this backend; backend='reference' differentiates to any order"
    )


def _nothing_to_save(ctx: Any, inputs: tuple, output: Any) -> None:
    """The second derivative is refused, so nothing is kept for it."""


torch.library.register_autograd("ckda::complex_kda_backward", _refuse_second_derivative, setup_context=_nothing_to_save)


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *fields, ctx.has_saved = inputs
    call, num = Call(*fields), len(_TENSORS)
    ctx.set_materialize_grads(False)
    read_again = output[:1] if BACKENDS[call.backend].reads_output else ()
    ctx.save_for_backward(*call.tensors, *output[2:], *read_again)
    ctx.options = call[num:]


def _autograd(ctx: Any, grads: Sequence[Tensor | None], run: Callable = torch.ops.ckda.complex_kda_backward) -> tuple:
    num = len(_TENSORS)
    kept = ctx.saved_tensors  # read once: gradient checkpointing allows no second time
    tensors, saved = kept[:num], list(kept[num:])
    call = Call(*tensors, *ctx.options)
    if not ctx.has_saved:
        again = _forward if run is _backward else torch.ops.ckda.complex_kda  # a compiler sees the op, not its kernels
        with torch.no_grad():
            saved = [*again(*call, True)[2:], *saved]
    do, dstate = grads[0], grads[1]
    if do is None:
        do = torch.zeros_like(call.v)
    results = run(do.contiguous(), dstate, saved, *call)
    by_name = dict(zip(_differentiable(call), results, strict=True))
    return *(by_name.get(name) for name in _TENSORS), *(None for _ in ctx.options), None


torch.library.register_autograd("ckda::complex_kda", _autograd, setup_context=_setup_context)


def _vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[list[Tensor], list[int | None]]:
    """A mapped axis R becomes part of the head axis, where A_log and dt_bias can differ: one larger call."""
    *rest, _ = arguments
    num, R = len(_TENSORS), info.batch_size
    folded = {}
    for name, x, dim in zip(_TENSORS, rest[:num], in_dims[:num], strict=True):
        folded[name] = None if x is None else _fold(name, x, dim, R)
    outputs = torch.ops.ckda.complex_kda(*folded.values(), *rest[num:], Call(*rest).needs_gradient)
    o, state = outputs[0].unflatten(2, (R, -1)), outputs[1]
    state_dim = None
    if state.numel():
        state, state_dim = state.unflatten(1, (R, -1)), 1
    return [o, state, *outputs[2:]], [2, state_dim, *(None for _ in outputs[2:])]


def _fold(name: str, x: Tensor, dim: int | None, R: int) -> Tensor:
    if name == "cu_seqlens":
        if dim is not None:
            raise ValueError("cu_seqlens is mapped by vmap; it must be the same for all")
        return x
    x = x.unsqueeze(0).expand(R, *x.shape) if dim is None else x.movedim(dim, 0)
    axis = {"A_log": 0, "dt_bias": 0, "initial_state": 1}.get(name, 2)
    return x.movedim(0, axis).flatten(axis, axis + 1)


torch.library.register_vmap("ckda::complex_kda", _vmap)


def _is_tracked(x: Tensor) -> bool:
    """Whether x carries a tangent, or is an argument of torch.func.grad or jvp."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _refuse_other_derivatives(call: Call) -> None:
    if other_derivative() and any(_is_tracked(x) for x in call.tensors if x is not None):
        raise NotImplementedError(
            "complex_kda has no derivative in forward mode or by torch.func in this backend; backend='reference' has both"
        )


class _Direct(torch.autograd.Function):
    """The same node without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        outputs = _forward(*arguments)
        _setup_context(ctx, arguments, outputs)
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        twice = torch.is_grad_enabled()  # create_graph: the op says that there is no second derivative
        return _autograd(ctx, grads, torch.ops.ckda.complex_kda_backward if twice else _backward)


def _is_plain(call: Call) -> bool:
    """Whether nothing watches or replaces the tensors: no compiler, no transform, no mode, no subclass, no shape alone."""
    return (
        not torch.compiler.is_compiling()
        and not call.q.is_meta
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in call.tensors if x is not None)
    )


def apply(call: Call, backend: Backend) -> tuple[Tensor, Tensor]:
    """o and the final state (which may be empty unless asked for), by the backend that was chosen."""
    fields: list[Any] = [*call]
    fields[-1] = backend.name
    call = Call(*fields)
    with full_precision(call.q.device):
        if backend.backward is None:
            return backend.forward(call)
        _refuse_other_derivatives(call)
        # how many tensors are saved depends on T, which an exported program may leave open: it computes them again
        needed = call.needs_gradient and not is_exporting()
        if not _is_plain(call):
            outputs = torch.ops.ckda.complex_kda(*call, needed)
        elif needed:
            outputs = _Direct.apply(*call, True)
        else:
            outputs = _forward(*call, False)
    return outputs[0], outputs[1]
