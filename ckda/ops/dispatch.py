"""The backends as data, which of them runs a call, and how it runs: as one node (:func:`apply`).

A new backend is one more entry of :data:`BACKENDS`, and the same tests run on it.

The choice is made once a call, here, from device, dtype and shape: never by batch or heads, so that a sequence gives the same bits
alone and in a batch. The name of what was chosen then travels with the call (:attr:`ckda.ops.call.Call.backend`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ckda.ops import chunked, fla, reference, triton
from ckda.ops.call import (
    NUM_TENSORS,
    Call,
    Gradients,
    check_call,
    check_step,
    check_values,
    is_exporting,
    other_derivative,
)

__all__ = [
    "BACKENDS",
    "STEPS",
    "Backend",
    "Choice",
    "Route",
    "apply",
    "check",
    "choose",
    "choose_step",
    "find_step",
    "forget",
    "full_precision",
    "is_autocast",
    "is_plain",
    "is_watched",
    "signature",
    "without_transforms",
]


@dataclass(frozen=True)
class Backend:
    """One way to compute the operator.

    A backend with `backward` is run as one custom op, which saves what `forward` returns as its third value; without
    it, `forward` is plain differentiable torch code that returns (o, state). One that `keeps` gets a dictionary as the last
    argument of both, for what calls of one signature share.
    """

    name: str
    refuses: Callable[[Call], str | None]  #: why it cannot serve the call, or None
    forward: Callable[..., tuple]
    backward: Callable[..., Gradients] | None = (
        None  #: of the call, what was saved, do, and the state's gradient or None
    )
    saved_like: Callable[[Call], list[Tensor]] | None = None  #: empty tensors of the shapes that `forward` saves
    reads_output: bool = False  #: whether `backward` wants o as the last of what was saved
    keeps: bool = False

    def kept(self, kept: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """The last argument of `forward` and `backward`, if there is one."""
        return (kept,) if self.keeps else ()


class Choice(NamedTuple):
    """A backend and the reason it was taken; as a string, a sentence."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name}: {self.reason}"


def _serves_all(call: Call) -> str | None:
    return None


def _triton(form: str, refuses: Callable[[Call], str | None]) -> Backend:
    return Backend(form, refuses, triton.forward, triton.backward, triton.saved_like, reads_output=True, keeps=True)


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

#: what runs complex_kda_step; `forward` takes the call, without the time axis, and whether to write into its state
STEPS = _by_name(
    Backend("reference", _serves_all, reference.step),
    Backend("triton-recurrent", triton.refuses_step, triton.step, keeps=True),
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


class Route(NamedTuple):
    """How calls of one signature run: by what, what that keeps of one call for the next, and what else they share."""

    backend: Backend
    kept: dict[str, Any]
    needs_gradient: bool
    plain: bool  #: :func:`is_plain`


_ROUTES: dict[tuple, Route] = {}
MAX_ROUTES = 1024  # lengths without end
_PLAIN = (Tensor, torch.nn.Parameter)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_saved_otherwise = torch._C._autograd._top_saved_tensors_default_hooks  #: hooks on what autograd keeps, or None


def signature(call: Call) -> tuple | None:
    """What checks, choice and launches depend on: calls of one signature differ in values, strides and addresses alone.

    None where an argument is not what it should be, or more than a plain tensor. The options' types count, for True is 1.
    """
    kinds: list[Any] = []
    for x in call.tensors:
        if x is None:
            kinds.append(None)
        elif type(x) in _PLAIN and not _is_wrapped(x):
            kinds += (x.shape, x.dtype, x.device)
        else:
            return None
    options = call[NUM_TENSORS:]
    return (*kinds, *options, *map(type, options))


def find_route(call: Call) -> Route:
    """How the call runs, once it is checked."""
    return _route(check, choose, call)


def find_chosen(call: Call) -> Route:
    """The same for a call that carries the name of what was chosen."""
    return _route(_is_checked, _chosen, call)


def find_step(call: Call) -> Route:
    """The same for one token of decoding, a call without the time axis."""
    if is_watched():
        check_step(call)
        return _new_route(call, choose_step)
    return _route(check_step, choose_step, call)


def _route(check: Callable[[Call], Any], choice: Callable[[Call], Choice], call: Call) -> Route:
    """A signature is checked and chosen for once, where the host's time counts."""
    key = signature(call) if _is_hurried(call) else None
    key = None if key is None else (choice, call.needs_gradient, *key)
    try:
        route = None if key is None else _ROUTES.get(key)
    except TypeError:  # an option without a hash is a wrong one
        key = route = None
    if route is None:
        check(call)
        route = _new_route(call, choice)
        if key is not None:
            if len(_ROUTES) >= MAX_ROUTES:
                _ROUTES.clear()
            _ROUTES[key] = route
    return route


def _new_route(call: Call, choice: Callable[[Call], Choice]) -> Route:
    return Route(choice(call).backend, {}, call.needs_gradient, is_plain(call.tensors))


def _is_hurried(call: Call) -> bool:
    """Whether the host's time counts: on a GPU, which works on meanwhile."""
    return isinstance(call.q, Tensor) and call.q.is_cuda


def check(call: Call) -> None:
    """All that can be seen without waiting for a GPU."""
    check_call(call)
    if call.q.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_mapped(call):
        check_values(call)


def _is_checked(call: Call) -> None:
    pass


def _chosen(call: Call) -> Choice:
    return Choice(BACKENDS[call.backend], "chosen before")


def _is_mapped(call: Call) -> bool:
    """Whether vmap is at work, so that values cannot be read."""
    return any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in call.tensors)


def forget() -> None:
    """Drop all that was kept of earlier calls."""
    _ROUTES.clear()


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
_TENSORS = Call._fields[:NUM_TENSORS]


#: asked once: torch.compile cannot trace the question
_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on there."""
    return device.type in _AUTOCAST and torch.is_autocast_enabled(device.type)


_AS_IT_IS = nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager:
    """Autocast is for the caller's projections; the recurrence keeps its own precision, backward too."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else _AS_IT_IS


def _empty_state(call: Call) -> Tensor:
    return call.v.new_empty(0, dtype=call.state_dtype)


def run_forward(call: Call, route: Route) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """o, the final state (None, where the backend does not make one unasked), and what the backward pass reads again."""
    with full_precision(call.q.device):
        return route.backend.forward(call, *route.backend.kept(route.kept))


def run_backward(call: Call, route: Route, saved: list[Tensor], do: Tensor, dstate: Tensor | None) -> Gradients:
    """The gradients of :func:`run_forward`."""
    backend = route.backend
    assert backend.backward is not None
    with full_precision(do.device):
        return backend.backward(call, saved, do, dstate, *backend.kept(route.kept))


def _forward(*arguments: Any) -> list[Tensor]:
    """[o, state or empty, *saved]."""
    *fields, save = arguments
    call = Call(*fields)
    o, state, saved = run_forward(call, find_chosen(call))
    if state is None or not call.output_final_state:
        state = _empty_state(call)
    return [o, state, *(saved if save else ())]


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
    return [grad for grad in run_backward(call, find_chosen(call), saved, do, dstate) if grad is not None]


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


def _kept_by(ctx: Any) -> tuple[Call, list[Tensor]]:
    """The call and what was saved for its backward pass."""
    kept = ctx.saved_tensors  # read once: gradient checkpointing allows no second time
    return Call._make((*kept[:NUM_TENSORS], *ctx.options)), list(kept[NUM_TENSORS:])


def _autograd(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    call, saved = _kept_by(ctx)
    if not ctx.has_saved:
        with torch.no_grad():  # by the op: a compiler does not look at its kernels
            saved = [*torch.ops.ckda.complex_kda(*call, True)[2:], *saved]
    do, dstate = grads[0], grads[1]
    if do is None:
        do = torch.zeros_like(call.v)
    results = torch.ops.ckda.complex_kda_backward(do.contiguous(), dstate, saved, *call)
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
    """The same node without the dispatcher, on the tensors of a call that also comes whole, and the route it takes.

    There is a second output, the final state, only where it is asked for.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, route: Route, *tensors: Tensor | None) -> Any:
        o, state, saved = run_forward(call, route)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved, *((o,) if route.backend.reads_output else ()))
        ctx.options, ctx.has_saved = call[NUM_TENSORS:], True
        ctx.route = (
            None if _saved_otherwise(False) else route
        )  # a hook may give back other tensors: they are looked at again
        return (o, state) if call.output_final_state else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():  # create_graph: the op says that there is no second derivative
            return None, None, *_autograd(ctx, (do, dstate))[:NUM_TENSORS]
        call, saved = _kept_by(ctx)
        if do is None:
            do = torch.zeros_like(call.v)
        x = run_backward(call, ctx.route or find_chosen(call), saved, do.contiguous(), dstate)
        rest = (x.A_log, x.dt_bias, x.erase, x.write, x.initial_state)
        return None, None, x.q, x.k, x.v, x.g, x.beta, None, *rest, None


def is_watched() -> bool:
    """Whether a compiler, a transform, a mode or a derivative in forward mode looks on: then the op itself must be seen."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing watches or replaces the tensors: no compiler, no transform, no mode, no subclass, no shape alone."""
    return not is_watched() and all(x is None or _is_itself(x) for x in tensors)


def _is_itself(x: Tensor) -> bool:
    return type(x) in _PLAIN and not x.is_meta and not _is_wrapped(x)


def without_transforms(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for plain tensors: what torch does before it for torch.func's transforms costs as much as the node."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


_direct = without_transforms(_Direct)


def apply(call: Call) -> tuple[Tensor, Tensor | None]:
    """o and the final state (which may be missing or empty unless asked for), by the backend that is chosen."""
    if is_watched():
        check(call)
        route = _new_route(call, choose)
    else:
        route = find_route(call)
    backend = route.backend
    call = Call(*call[:-1], backend.name)
    if backend.backward is None:
        with full_precision(call.q.device):
            return backend.forward(call)
    # how many tensors are saved depends on T, which an exported program may leave open: it computes them again
    needed = route.needs_gradient and not is_exporting()
    if not route.plain:
        _refuse_other_derivatives(call)
        with full_precision(call.q.device):
            outputs = torch.ops.ckda.complex_kda(*call, needed)
    elif not needed:
        outputs = run_forward(call, route)
    elif call.output_final_state:
        outputs = _direct(call, route, *call.tensors)
    else:
        return _direct(call, route, *call.tensors), None
    return outputs[0], outputs[1]
