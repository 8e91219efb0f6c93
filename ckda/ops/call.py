"""One call of the operator as data, and the preparation that the torch backends share.

Legend of axes: B batch, T time, H query/key heads, HV value heads, G = HV / H, K key width, V value width, N sequences.
The public layout is [B, T, HV, D]; inside, heads stand before time: [B, HV, T, D].
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ckda.ops.gate import GATES, beta_from_logit, gate_alpha, gate_backward, sigmoid

__all__ = [
    "MAX_WIDTH",
    "NUM_TENSORS",
    "Call",
    "Gradients",
    "Norms",
    "Prepared",
    "Raw",
    "at_time",
    "check_call",
    "check_step",
    "check_values",
    "is_exporting",
    "other_derivative",
    "prepare",
    "prepare_backward",
    "unit",
    "wide_dtype",
]


class Call(NamedTuple):
    """The arguments of :func:`ckda.complex_kda` by the same names, with the same defaults, tensors before options.

    The schema of the custom op is read off these fields, so this and the signature of the function are where they are listed.
    """

    q: Tensor  #: [B, T, H, K]
    k: Tensor  #: [B, T, H, K]
    v: Tensor  #: [B, T, HV, V]
    g: Tensor  #: [B, T, HV, K]
    beta: Tensor | None  #: [B, T, HV]
    sign: Tensor | None = None  #: int8 [B, T, HV, K]
    A_log: Tensor | None = None  #: [HV]
    dt_bias: Tensor | None = None  #: [HV * K]
    erase: Tensor | None = None  #: [B, T, HV, K]
    write: Tensor | None = None  #: [B, T, HV, V]
    initial_state: Tensor | None = None  #: [N, HV, K, V]
    cu_seqlens: Tensor | None = None  #: [N + 1]
    gate: str | None = None
    beta_range: int | None = None
    normalize_qk: bool = False
    scale: float | None = None
    output_final_state: bool = False
    backend: str = "auto"  #: as asked for; once chosen, what runs the call

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that are tensors or None: all before `gate`."""
        return self[:NUM_TENSORS]  # type: ignore[return-value]

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd will want the gradient of any argument."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tensors)

    @property
    def q_scale(self) -> float:
        """What queries are multiplied by: `scale`, or K ** -0.5."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def group(self) -> int:
        """G, the value heads that share one query/key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the state and of the torch backends' arithmetic: float64 if the inputs are, else float32."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def num_sequences(self) -> int:
        """N: the batch, or the members of a packed one."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def zero_state(self) -> Tensor:
        """[N, HV, K, V] of zeros."""
        shape = (self.num_sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3])
        return self.v.new_zeros(shape, dtype=self.state_dtype)

    def start_state(self) -> Tensor:
        """[N, HV, K, V] the initial state in the state's dtype, zeros where none is given."""
        return self.zero_state() if self.initial_state is None else self.initial_state.to(self.state_dtype)


NUM_TENSORS = Call._fields.index("gate")  #: the fields before it are tensors, or None


def is_exporting() -> bool:
    """Whether torch.export traces; under torch.compile, torch.compiler.is_exporting() itself is True in torch 2.11."""
    return torch.compiler._is_exporting_flag


def other_derivative() -> bool:
    """Whether a derivative is being taken that a node with its own backward does not have: in forward mode, or by torch.func.

    Example:
        >>> torch.func.grad(lambda x: x * other_derivative())(torch.tensor(2.0)), other_derivative()
        (tensor(1.), False)
    """
    if torch.compiler.is_compiling():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    only_vmap = all(x.key() == torch._C._functorch.TransformType.Vmap for x in transforms)
    return forward_ad._current_level >= 0 or not only_vmap


class Raw(NamedTuple):
    """The per-token tensors of a call, heads before time, in the state's dtype."""

    q: Tensor  #: [B, H, T, K]
    k: Tensor  #: [B, H, T, K]
    v: Tensor  #: [B, HV, T, V]
    g: Tensor  #: [B, HV, T, K]
    beta: Tensor | None  #: [B, HV, T, 1]
    sign: Tensor | None  #: [B, HV, T, K]
    erase: Tensor | None  #: [B, HV, T, K]
    write: Tensor | None  #: [B, HV, T, V]


class Prepared(NamedTuple):
    """What the recurrence reads, one row a value head: with the prediction error y_t,

    ``y_t = (w_t - (Diag(alpha_t) S_{t-1})^T a_t) / norm2_t``, ``S_t = Diag(alpha_t) S_{t-1} + rate_t k_t y_t^T``,
    ``o_t = S_t^T q_t``. CKDA is a = k, w = v, rate = beta, and norm2 = |k|^2 of the normalised key as rounded (1 without
    normalisation): the division keeps beta = 2 a reflection. Separate gates are a = erase * k, w = write * v, rate = 1.
    """

    q: Tensor  #: [B, HV, T, K] scaled query
    k: Tensor  #: [B, HV, T, K] key
    a: Tensor  #: [B, HV, T, K] erase key
    w: Tensor  #: [B, HV, T, V] write value
    alpha: Tensor  #: [B, HV, T, K] signed gate
    rate: Tensor  #: [B, HV, T, 1]
    norm2: Tensor  #: [B, HV, T, 1], float64 where the device has it


class Norms(NamedTuple):
    """What normalisation leaves for the backward pass: the inverse norms of q and k, zero for a zero vector."""

    q: Tensor  #: [B, H, T, 1]
    k: Tensor  #: [B, H, T, 1]


class Gradients(NamedTuple):
    """Gradients of a :class:`Call`, in their arguments' dtypes and layouts; None where the argument is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    initial_state: Tensor | None


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| over the last axis, kept; zero for a zero vector. Nothing is added under the root."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > 0, norm, torch.inf).reciprocal()


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in float32 at least; a zero vector stays zero.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    x = x if x.dtype == torch.float64 else x.float()
    return x * _inverse_norm(x)


def _norm2(k: Tensor) -> Tensor:
    """|k|^2 of the rounded unit key, [..., 1], in float64, for it differs from 1 by a rounding error; 1 for a zero key."""
    norm2 = torch.linalg.vector_norm(k.detach().to(wide_dtype(k.device)), dim=-1, keepdim=True).square()
    return torch.where(norm2 > 0, norm2, 1)


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: what is repeated at every step must not be off in the same direction each time."""
    return torch.float32 if device.type == "mps" else torch.float64


def _expand_heads(x: Tensor, group: int) -> Tensor:
    """[B, H, T, K] -> [B, HV, T, K]: value head j reads head j // G."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _sum_groups(dx: Tensor, group: int) -> Tensor:
    return dx if group == 1 else dx.unflatten(1, (-1, group)).sum(2)


def _beta(call: Call, raw: Raw) -> Tensor:
    assert raw.beta is not None
    return raw.beta if call.beta_range is None else beta_from_logit(raw.beta, call.beta_range)


def prepare(call: Call, raw: Raw) -> tuple[Prepared, Norms | None]:
    """Norm, gate, learning rate and scale; differentiable."""
    q, k, norms = raw.q * call.q_scale, raw.k, None
    norm2 = torch.ones((), dtype=wide_dtype(k.device), device=k.device).expand(*raw.v.shape[:-1], 1)
    if call.normalize_qk:
        norms = Norms(_inverse_norm(raw.q), _inverse_norm(raw.k))
        q, k = raw.q * (norms.q * call.q_scale), raw.k * norms.k
        norm2 = _expand_heads(_norm2(k), call.group)
    q, k = _expand_heads(q, call.group), _expand_heads(k, call.group)
    if raw.erase is not None and raw.write is not None:
        a, w, rate = raw.erase * k, raw.write * raw.v, torch.ones_like(raw.v[..., :1])
    else:
        a, w, rate = k, raw.v, _beta(call, raw)
    if call.gate is not None:
        alpha = gate_alpha(call.gate, raw.g, call.A_log, call.dt_bias, head_axis=-3)
    else:
        alpha = raw.g.exp() if raw.sign is None else raw.g.exp() * raw.sign
    return Prepared(q, k, a, w, alpha, rate, norm2), norms


def _norm_backward(dy: Tensor, y: Tensor, inverse: Tensor, length: float = 1.0) -> Tensor:
    """Gradient of x from that of y = x * inverse * length, inverse = 1 / |x|; overwrites dy."""
    along = torch.linalg.vecdot(y, dy).unsqueeze(-1) * (length**-2 if length else 0.0)
    return dy.addcmul_(y, along, value=-1).mul_(inverse * length)


def prepare_backward(
    call: Call, raw: Raw, x: Prepared, norms: Norms | None, dx: Prepared
) -> tuple[Raw, Tensor | None, Tensor | None]:
    """The gradients of :func:`prepare`, by hand: of `raw` (sign: None), A_log and dt_bias. Overwrites dx.

    Args:
        raw: of which q and k are not read. x, norms: what :func:`prepare` returned, of which q and k are read.
        dx: gradients of x; dx.alpha is that of log|alpha|, which stays finite where alpha is zero. Where a is k, dx.k
            already holds both gradients. norm2 has none: it is 1 but for rounding.
    """
    dk, dv, derase, dwrite, dbeta = dx.k, dx.w, None, None, None
    if raw.erase is not None and raw.write is not None:
        derase, dwrite = dx.a * x.k, dx.w * raw.v
        dk, dv = dk.addcmul_(dx.a, raw.erase), dx.w * raw.write
    else:
        assert raw.beta is not None
        dbeta = dx.rate
        if call.beta_range is not None:
            dbeta = dbeta * call.beta_range * sigmoid(raw.beta) * sigmoid(-raw.beta)
    dq, dk = _sum_groups(dx.q, call.group), _sum_groups(dk, call.group)
    if norms is not None:
        first = slice(None, None, call.group)
        dq = _norm_backward(dq, x.q[:, first], norms.q, call.q_scale)
        dk = _norm_backward(dk, x.k[:, first], norms.k)
    else:
        dq = dq.mul_(call.q_scale)
    dg, dA_log, ddt_bias = dx.alpha, None, None
    if call.gate is not None:
        dg, dA_log, ddt_bias = gate_backward(call.gate, dg, raw.g, call.A_log, call.dt_bias, head_axis=-3)
    return Raw(dq, dk, dv, dg, dbeta, None, derase, dwrite), dA_log, ddt_bias


# Checks: each failure is a ValueError that names the argument, what it was, what it may be ------------------------------

MAX_WIDTH = 256
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _fail(name: str, was: object, may: str) -> None:
    raise ValueError(f"{name} is {was}; it must be {may}")


def _check_shape(name: str, x: Tensor, axes: str, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        _fail(f"the shape of {name}", list(x.shape), f"[{axes}] = {list(shape)}")


def _check_main(call: Call) -> None:
    """q, k and v: ranks, widths, head counts; the other arguments are measured by them."""
    required = ("q", "k", "v", "g")
    for name, x in zip(call._fields, call.tensors, strict=False):
        if not isinstance(x, Tensor) and (x is not None or name in required):
            _fail(name, type(x).__name__, "a tensor" if name in required else "a tensor or None")
        if name in required and x is not None and x.dim() != 4:
            _fail(f"the rank of {name}", f"{x.dim()} (shape {list(x.shape)})", "4: [B, T, heads, width]")
    B, T, H, K = call.q.shape
    if min(call.q.shape) < 1:
        _fail("the shape of q", list(call.q.shape), "[B, T, H, K] with no axis empty")
    _check_shape("k", call.k, "B, T, H, K", (B, T, H, K))
    HV, V = call.v.shape[2:]
    if tuple(call.v.shape[:2]) != (B, T) or HV < 1 or V < 1:
        _fail("the shape of v", list(call.v.shape), f"[B, T, HV, V] = [{B}, {T}, HV, V]")
    if HV % H:
        _fail("HV, the number of value heads,", HV, f"a multiple of H = {H}")
    for name, width in (("K, the width of q and k,", K), ("V, the width of v,", V)):
        if width > MAX_WIDTH:
            _fail(name, width, f"from 1 to {MAX_WIDTH}")


def _check_shapes(call: Call) -> None:
    B, T, _, K = call.q.shape
    HV, V = call.v.shape[2:]
    wanted = {
        "g": ("B, T, HV, K", (B, T, HV, K)),
        "beta": ("B, T, HV", (B, T, HV)),
        "sign": ("B, T, HV, K", (B, T, HV, K)),
        "erase": ("B, T, HV, K", (B, T, HV, K)),
        "write": ("B, T, HV, V", (B, T, HV, V)),
        "A_log": ("HV", (HV,)),
        "dt_bias": ("HV * K", (HV * K,)),
        "initial_state": ("N, HV, K, V", (call.num_sequences, HV, K, V)),
    }
    for name, (axes, shape) in wanted.items():
        x = getattr(call, name)
        if x is not None:
            _check_shape(name, x, axes, shape)


def _check_options(call: Call) -> None:
    if call.gate is not None and call.gate not in GATES:
        _fail("gate", repr(call.gate), f"None or one of {', '.join(map(repr, GATES))}")
    if call.beta_range is not None and (type(call.beta_range) is not int or call.beta_range not in (1, 2)):
        _fail("beta_range", repr(call.beta_range), "None, 1 or 2")
    if call.scale is not None and (isinstance(call.scale, bool) or not isinstance(call.scale, int | float)):
        _fail("scale", repr(call.scale), "a number, or None for K ** -0.5")
    for name in ("normalize_qk", "output_final_state"):
        if not isinstance(getattr(call, name), bool):
            _fail(name, repr(getattr(call, name)), "True or False")
    if call.gate is not None and call.sign is not None:
        raise ValueError(
            f"sign is given together with gate={call.gate!r}; it must be None, for a named gate makes its own"
        )
    for name in ("A_log", "dt_bias"):
        if call.gate is None and getattr(call, name) is not None:
            raise ValueError(f"{name} is given with gate=None; it must be None, for g is log|alpha| already")
    separate = call.erase is not None or call.write is not None
    if separate and (call.erase is None or call.write is None):
        missing = "erase" if call.erase is None else "write"
        raise ValueError(f"{missing} is None while the other gate is given; erase and write must come together")
    if separate and (call.beta is not None or call.beta_range is not None):
        raise ValueError("beta or beta_range is given together with erase and write; both must be None then")
    if not separate and call.beta is None:
        raise ValueError("beta is None; it must be a tensor [B, T, HV], unless erase and write are given")


def _check_dtypes(call: Call) -> None:
    dtype = call.q.dtype
    if dtype not in _DTYPES:
        _fail("the dtype of q", dtype, "float64, float32, bfloat16 or float16")
    for name in ("k", "v"):
        if getattr(call, name).dtype != dtype:
            _fail(f"the dtype of {name}", getattr(call, name).dtype, f"that of q, {dtype}")
    for name in ("g", "beta", "erase", "write", "A_log", "dt_bias", "initial_state"):
        x = getattr(call, name)
        allowed = {dtype, torch.float32, call.state_dtype}
        if x is not None and x.dtype not in allowed:
            _fail(f"the dtype of {name}", x.dtype, " or ".join(sorted(map(str, allowed))))
    if call.sign is not None and call.sign.dtype != torch.int8:
        _fail("the dtype of sign", call.sign.dtype, "torch.int8")


def _check_devices(call: Call) -> None:
    for name, x in zip(call._fields, call.tensors, strict=False):
        if x is not None and x.device != call.q.device:
            _fail(f"the device of {name}", x.device, f"that of q, {call.q.device}")


def _check_packing(call: Call) -> None:
    cu = call.cu_seqlens
    if cu is None:
        return
    if cu.dtype not in (torch.int32, torch.int64):
        _fail("the dtype of cu_seqlens", cu.dtype, "torch.int32 or torch.int64")
    if cu.dim() != 1 or cu.numel() < 2:
        _fail("the shape of cu_seqlens", list(cu.shape), "[N + 1] with N >= 1")
    if call.q.shape[0] != 1:
        _fail("B, the batch,", call.q.shape[0], "1 with cu_seqlens: packed sequences lie end to end on the time axis")


def check_call(call: Call) -> None:
    """Ranks, shapes, options, dtypes, devices: everything that can be seen without reading a value."""
    _check_main(call)
    _check_options(call)
    _check_packing(call)
    _check_shapes(call)
    _check_dtypes(call)
    _check_devices(call)


def at_time(call: Call) -> Call:
    """One token of decoding, a call without the time axis, as one of T = 1."""

    def timed(name: str) -> Any:
        x = getattr(call, name)
        return x.unsqueeze(1) if isinstance(x, Tensor) else x

    per_token = ("q", "k", "v", "g", "beta", "sign", "erase", "write")
    return call._replace(**{name: timed(name) for name in per_token})


def check_step(call: Call) -> None:
    """:func:`check_call` for one token of decoding, a call without the time axis."""
    for name, rank in (("q", 3), ("k", 3), ("v", 3), ("g", 3), ("initial_state", 4)):
        x, shown = getattr(call, name), "state" if name == "initial_state" else name
        if not isinstance(x, Tensor):
            raise ValueError(f"{shown} is {x!r}; it must be a tensor")
        if x.dim() != rank:
            raise ValueError(f"the rank of {shown} is {x.dim()} (shape {list(x.shape)}); it must be {rank} in one step")
    check_call(at_time(call))


def check_values(call: Call) -> None:
    """The entries of cu_seqlens and sign. On a GPU this synchronises, so the operator does it on CPU tensors only."""
    if call.cu_seqlens is not None:
        bounds, T = call.cu_seqlens.tolist(), call.q.shape[1]
        if bounds[0] != 0 or bounds[-1] != T:
            _fail("cu_seqlens", f"[{bounds[0]}, ..., {bounds[-1]}]", f"[0, ..., T = {T}]")
        if any(a > b for a, b in pairwise(bounds)):
            _fail("cu_seqlens", bounds, "non-decreasing")
    if call.sign is not None and not bool((call.sign.abs() == 1).all()):
        _fail("an entry of sign", int(call.sign[call.sign.abs() != 1][0]), "+1 or -1")
