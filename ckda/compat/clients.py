"""Installed clients on our kernels: :func:`accelerate` puts the functions of :mod:`ckda.compat.fla` where they look for FLA's.

What is replaced are names in the modules of the clients' layers, never in FLA's own `fla.ops`, so that FLA stays a peer to
compare with (the backend "fla" of :func:`ckda.complex_kda`). transformers' modules hold functions that choose a hub kernel, FLA or
plain torch when they are imported; they are replaced whole, and take those of the model's keywords that ours know, as there.

Their short convolution is replaced where it runs in plain torch, and on a GPU only: there it leaves q, k and v with their channels
side by side, as the operator reads them. On a CPU torch's is faster. The convolution of one token with a cache stays: around its
one kernel ours would need as many copies.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.compat import fla
from ckda.layers.convolution import short_convolution
from ckda.ops.triton import HAS_TRITON

__all__ = ["CLIENTS", "Accelerated", "Replaced", "accelerate", "restore"]

_KDA: dict[str, Callable] = {"chunk_kda": fla.chunk_kda, "fused_recurrent_kda": fla.fused_recurrent_kda}
_GDN: dict[str, Callable] = {
    "chunk_gated_delta_rule": fla.chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": fla.fused_recurrent_gated_delta_rule,
}
_KIMI: dict[str, Callable] = {
    "chunk_kimi_delta_attention": fla.chunk_kda,
    "recurrent_kimi_delta_attention": fla.fused_recurrent_kda,
}
_TORCH_GDN: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": fla.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fla.fused_recurrent_gated_delta_rule,
}


def _model(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


#: client -> its module and what is replaced there; of transformers' models those that the installed version has
CLIENTS: dict[str, tuple[str, dict[str, Callable]]] = {
    "fla.kda": ("fla.layers.kda", _KDA),
    "fla.gated_deltanet": ("fla.layers.gated_deltanet", _GDN),
    "fla.gated_deltaproduct": (
        "fla.layers.gated_deltaproduct",
        {
            "chunk_gated_delta_product": fla.chunk_gated_delta_product,
            "fused_recurrent_gated_delta_rule": fla.fused_recurrent_gated_delta_rule,
        },
    ),
    "kimi_linear": (_model("kimi_linear"), _KIMI),
    "glm5_next": (_model("glm5_next"), _KIMI),
    "olmo_hybrid": (_model("olmo_hybrid"), _TORCH_GDN),
    "qwen3_next": (_model("qwen3_next"), _TORCH_GDN),
    "qwen3_5": (_model("qwen3_5"), _TORCH_GDN),
    "qwen3_5_moe": (_model("qwen3_5_moe"), _TORCH_GDN),
}


#: the convolution of transformers' models, taken from the package causal_conv1d where that is installed
CONVOLUTION = "causal_conv1d_fn"


class Replaced(NamedTuple):
    """One function of a client, and ours in its place."""

    module: str
    name: str
    by: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name} is now ckda.{self.by}"


_ORIGINAL: dict[tuple[str, str], Any] = {}  # (module, name) -> what stood there


class Accelerated:
    """What a call of :func:`accelerate` replaced; as a context manager it puts the client's own functions back at the end."""

    def __init__(self, replaced: list[Replaced], absent: dict[str, str]):
        self.replaced = replaced
        self.absent = absent  #: client -> why it was left

    def __enter__(self) -> "Accelerated":
        if any((one.module, one.name) not in _ORIGINAL for one in self.replaced):
            raise RuntimeError("what this accelerate() replaced was put back already; call accelerate() again")
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.replaced:
            _put_back(one.module, one.name)

    def __str__(self) -> str:
        return "\n".join(map(str, self.replaced)) or "nothing was replaced"


def accelerate(*clients: str, quiet: bool = False, convolution: bool | None = None) -> Accelerated:
    """Make installed clients use our kernels, until :func:`restore`, or to the end of a `with` block.

    Call it before or after the model is built, but before torch.compile. It acts when it is called, not when a block begins,
    and on the whole process, its threads included.

    Args:
        clients: names of :data:`CLIENTS`; none: all that are installed.
        quiet: do not print what was replaced.
        convolution: whether ours also replaces the short convolution of transformers' models on a GPU; None: where theirs is
            plain torch, for want of the package causal_conv1d.

    Example:
        >>> with accelerate("kimi_linear"):
        ...     pass  # build, train, generate
        transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention is now ckda.compat.fla.chunk_kda
        transformers.models.kimi_linear.modeling_kimi_linear.recurrent_kimi_delta_attention is now
        ckda.compat.fla.fused_recurrent_kda
        transformers.models.kimi_linear.modeling_kimi_linear.causal_conv1d_fn is now
        ckda.layers.convolution.short_convolution on a GPU
    """
    unknown = [name for name in clients if not isinstance(name, str) or name not in CLIENTS]
    if unknown:
        raise ValueError(f"there is no client {unknown[0]!r}; there are {', '.join(CLIENTS)}")
    if convolution not in (None, True, False):
        raise ValueError(f"convolution is {convolution!r}; it must be True, False, or None")
    replaced: list[Replaced] = []
    absent: dict[str, str] = {}
    for client in clients or CLIENTS:
        module, functions = CLIENTS[client]
        try:
            replaced += _replace(module, functions, convolution)
        except ImportError as error:
            absent[client] = str(error)
    if clients and absent:
        for one in replaced:
            _put_back(one.module, one.name)
        raise ImportError("; ".join(f"{client}: {why}" for client, why in absent.items()))
    result = Accelerated(replaced, absent)
    if not quiet:
        print(result)
    return result


def restore() -> list[str]:
    """Put back every function that :func:`accelerate` replaced, and say which.

    Example:
        >>> accelerate("kimi_linear", quiet=True).replaced[0].name in restore()[0]
        True
        >>> restore()
        []
    """
    names = [f"{module}.{name}" for module, name in _ORIGINAL]
    for module, name in list(_ORIGINAL):
        _put_back(module, name)
    return names


def _replace(path: str, functions: dict[str, Callable], convolution: bool | None) -> list[Replaced]:
    """Put ours into a module; what is ours already stays."""
    package = path.partition(".")[0]
    if find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    try:
        module = import_module(path)
    except Exception as error:  # a package that is broken here must not keep the others from being served
        raise ImportError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in functions if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{path} has no {missing[0]}: this version of {package} looks its operator up otherwise")
    ours = {
        name: function if package == "fla" else _with_known_keywords(function) for name, function in functions.items()
    }
    by = {name: f"compat.fla.{function.__name__}" for name, function in functions.items()}
    if hasattr(module, CONVOLUTION) and (not _has_convolution() if convolution is None else convolution):
        ours[CONVOLUTION] = _convolution_before(getattr(module, CONVOLUTION))
        by[CONVOLUTION] = "layers.convolution.short_convolution on a GPU"
    replaced = []
    for name, function in ours.items():
        if (path, name) in _ORIGINAL:
            continue
        _ORIGINAL[path, name] = getattr(module, name)
        setattr(module, name, function)
        replaced.append(Replaced(path, name, by[name]))
    return replaced


def _has_convolution() -> bool:
    """Whether transformers takes its convolution from the package causal_conv1d, which it tries to import."""
    try:
        return hasattr(import_module("causal_conv1d"), CONVOLUTION)
    except Exception:  # whatever it is, transformers takes plain torch then
        return False


def _has_kernel(x: Tensor) -> bool:
    """Whether our convolution is a kernel for x, in a compiled program too."""
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64


_NOT_OURS = ("seq_idx", "cu_seqlens", "initial_states", "return_final_states", "final_states_out")


def _convolution_before(original: Callable) -> Callable:
    """Our convolution, and the client's own for what ours has not: no kernel, a bias, another activation, packed sequences, states.

    Their x and y are [B, D, T], views of [B, T, D]; their last tap is that of the token itself, ours is the first.
    """

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        other = bias is not None or any(keywords.get(name) is not None for name in _NOT_OURS)
        if other or activation not in (None, "silu", "swish") or not _has_kernel(hidden_states):
            return original(hidden_states, weight, bias=bias, activation=activation, **keywords)
        y = short_convolution(hidden_states.transpose(1, 2), weight.flip(-1), activate=activation is not None)
        return y.transpose(1, 2)

    return causal_conv1d_fn


def _put_back(path: str, name: str) -> None:
    if (path, name) in _ORIGINAL:
        setattr(import_module(path), name, _ORIGINAL.pop((path, name)))


def _with_known_keywords(function: Callable) -> Callable:
    """transformers hands its models' keywords through; those that the operator does not have are dropped, as it does itself."""
    known = frozenset(signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{name: x for name, x in keywords.items() if name in known})

    return call
