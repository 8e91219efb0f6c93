"""The backends as data. A new one is one more entry of :data:`BACKENDS`, and the same tests run on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ckda.ops import chunked, fla, reference, triton
from ckda.ops.call import Call, Gradients

__all__ = ["BACKENDS", "Backend", "Choice", "choose"]


@dataclass(frozen=True)
class Backend:
    """One way to compute the operator.

    A backend with `backward` is run as one custom op, which saves what `forward` returns as its third value; without
    it, `forward` is plain differentiable torch code that returns (o, state).
    """

    name: str
    refuses: Callable[[Call], str | None]  #: why it cannot serve the call, or None
    forward: Callable[[Call], tuple]
    backward: Callable[[Call, list[Tensor], Tensor, Tensor | None], Gradients] | None = None
    saved_like: Callable[[Call], list[Tensor]] | None = None  #: empty tensors of the shapes that `forward` saves
    reads_output: bool = False  #: whether `backward` wants o as the last of what was saved


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: Backend
    reason: str


def _serves_all(call: Call) -> str | None:
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("reference", _serves_all, reference.forward),
        Backend("chunked", _serves_all, chunked.forward, chunked.backward, chunked.saved_like),
        Backend("triton", triton.refuses, triton.forward, triton.backward, triton.saved_like, reads_output=True),
        Backend("fla", fla.refuses, fla.forward),
    )
}


def _off_gpu(call: Call) -> str | None:
    return triton.refuses(call) if call.q.device.type == "cuda" else "q is not on a CUDA device"


#: what "auto" tries in order, with the reason to refuse it and the reason to take it: never by batch or heads, so that a
#: sequence gives the same bits alone and in a batch
_AUTO = (
    ("triton", _off_gpu, "the Triton kernels are the fastest on a CUDA device"),
    ("chunked", _serves_all, "the chunk form in torch serves every device, dtype and shape"),
)


def choose(name: str, call: Call) -> Choice:
    """The backend of that name, or for "auto" the first that serves the call; ValueError with the reason if none does."""
    if name == "auto":
        for candidate, refuses, reason in _AUTO:
            if refuses(call) is None:
                return Choice(BACKENDS[candidate], reason)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; it must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    why = BACKENDS[name].refuses(call)
    if why is not None:
        raise ValueError(f"backend={name!r} cannot serve this call: {why}")
    return Choice(BACKENDS[name], "named by the caller")
