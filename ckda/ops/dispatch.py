"""The backends as data, and which of them runs a call.

A new backend is one more entry of :data:`BACKENDS`, and the same tests run on it.

The choice is made once a call, here, from device, dtype and shape: never by batch or heads, so that a sequence gives the same bits
alone and in a batch. The name of what was chosen then travels with the call (:attr:`ckda.ops.call.Call.backend`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ckda.ops import chunked, fla, reference, triton
from ckda.ops.call import Call, Gradients

__all__ = ["BACKENDS", "STEPS", "Backend", "Choice", "choose", "choose_step"]


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
