"""Our kernels run on a CPU by plain torch, those in Gluon included, for which Triton has no interpreter.

A kernel is a Python function over `gl` or `tl`: here it is run as that, with stand-ins for both modules. Numbers have the digits
they have on a GPU, bfloat16 and float16 alike (Triton's interpreter gets bfloat16 wrong). Products are summed as Hopper's matrix
unit does, 16 terms and the sum so far cut to two bits more than the largest of them has in float32, their sum cut to float32; of
float32 operands, three TF32 products, 8 terms at a time. What a GPU does at the same time is done in the order that shows mistakes:

- the warps that fetch run ahead as far as barriers let them; waiting for one that nobody will complete is an error;
- a tile leaves shared memory as late as `store_wait` allows, and arrives as soon as it is asked for;
- a product that was begun may not be read before it was awaited;
- shared memory is NaN at first; reading or writing outside of a tensor is an error.

Layouts and races between threads of one warp group are not seen.
"""

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product as grid_of
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor

from ckda.ops.triton.launch import Launch

__all__ = ["names_of", "on_cpu", "run_launch"]


class Dtype:
    """A dtype by Triton's names."""

    def __init__(self, kind: torch.dtype) -> None:
        self.kind, self.primitive_bitwidth, self.element_ty = kind, 8 * kind.itemsize, self


_KINDS = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64")
DTYPES = {name: Dtype(getattr(torch, name)) for name in _KINDS}
_BY_KIND = {x.kind: x for x in DTYPES.values()} | {torch.bool: Dtype(torch.bool)}


class Value:
    """A tile or a number of a program. `pending`: a product that nobody has awaited yet."""

    def __init__(self, x: Tensor, pending: bool = False) -> None:
        self.raw, self.pending = x, pending

    @property
    def x(self) -> Tensor:
        if self.pending:
            raise AssertionError("a product is read that was not awaited")
        return self.raw

    @property
    def dtype(self) -> Dtype:
        return _BY_KIND[self.raw.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.raw.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Dtype, bitcast: bool = False) -> "Value":
        return Value(self.x.view(dtype.kind) if bitcast else self.x.to(dtype.kind))

    def __getitem__(self, key: Any) -> "Value":
        return Value(self.x[key])

    def __index__(self) -> int:
        return int(self.x)

    def __bool__(self) -> bool:
        return bool(self.x)

    def __neg__(self) -> "Value":
        return Value(-self.x)


def _plain(x: Any) -> Any:
    return x.x if isinstance(x, Value) else x


def _quotient(a: Any, b: Any) -> Any:
    """Whole numbers as on a GPU, towards zero; all of ours are positive."""
    return (
        torch.div(a, b, rounding_mode="trunc")
        if isinstance(a, Tensor)
        else torch.div(torch.tensor(a), b, rounding_mode="trunc")
    )


def _operator(name: str, change: Callable[[Any, Any], Any] | None = None) -> None:
    plain = getattr(Tensor, f"__{name}__")

    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return Value((change or plain)(self.x, _plain(other)))

    def reflected(self: Value, other: Any) -> Value:
        left = torch.tensor(other, dtype=self.x.dtype if isinstance(other, int) else torch.float32)
        return Value((change or plain)(left, self.x))

    setattr(Value, f"__{name}__", method)
    setattr(Value, f"__r{name}__", reflected)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "mod",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    _operator(_name)
_operator("floordiv", _quotient)


class Pointer:
    """Addresses in a tensor."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset, self.dtype = base, offset, _BY_KIND[base.dtype]

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.base, self.offset + other)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Where to read or write, and what of it counts."""
        at = torch.as_tensor(_plain(self.offset)).long()
        m = torch.as_tensor(True if mask is None else _plain(mask))
        at, m = torch.broadcast_tensors(at, m)
        wrong = m & ((at < 0) | (at >= self.base.numel()))
        if wrong.any():
            raise IndexError(f"address {at[wrong][0].item()} of {self.base.numel()}")
        return torch.where(m, at, 0), m


def _load(p: Pointer, mask: Any = None, other: Any = 0.0) -> Value:
    at, m = p.places(mask)
    if not m.any():
        return Value(torch.full(at.shape, other).to(p.base.dtype))
    return Value(torch.where(m, p.base.reshape(-1)[at], torch.tensor(other).to(p.base.dtype)))


def _store(p: Pointer, value: Any, mask: Any = None) -> None:
    at, m = p.places(mask)
    flat = p.base.view(-1)
    x = torch.as_tensor(_plain(value)).to(flat.dtype).broadcast_to(at.shape)
    flat[at[m]] = x[m]


class Shared:
    """Tiles in shared memory. `phases`: element (i, j) lies in column j xor i % phases."""

    def __init__(self, x: Tensor, phases: int = 1) -> None:
        self.x, self.dtype, self.shape, self.phases = x, _BY_KIND[x.dtype], list(x.shape), phases

    def index(self, i: Any) -> "Shared":
        i = int(i)
        assert 0 <= i < self.x.shape[0]
        return Shared(self.x[i], self.phases)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.x.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        assert 0 <= start <= start + length <= self.x.shape[dim]
        return Shared(self.x.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Value:
        return Value(self.x.clone() if self.phases == 1 else self.x.gather(1, self.columns()))

    def store(self, value: Value) -> None:
        assert value.dtype is self.dtype, "a tile is stored in another dtype"
        assert value.shape == self.shape
        if self.phases == 1:
            self.x.copy_(value.x)
        else:
            self.x.scatter_(1, self.columns(), value.x)

    def columns(self) -> Tensor:
        """Where the elements of each row lie."""
        rows, columns = map(torch.arange, self.shape)
        return columns ^ rows[:, None] % self.phases

    def _reinterpret(self, dtype: Dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.x.view(shape))


# The warps of one program ------------------------------------------------------------------------------------------------


class Warps:
    """One of the parts of a program that run side by side; `told` is what a part that is waited for has done."""

    def __init__(self, program: "Program", body: Callable[[], None]) -> None:
        self.program, self.body = program, body
        self.go, self.ready, self.done = threading.Event(), lambda: True, False
        self.products: list[Value] = []  # begun, the oldest first
        self.leaving: list[Callable[[], None]] = []  # tiles on their way out, the oldest first

    def run(self) -> None:
        self.go.wait()
        try:
            if self.program.error is None:
                self.body()
                assert not self.leaving, "a program ends with tiles on their way out"
        except BaseException as error:
            self.program.error = self.program.error or error
        self.done = True
        self.program.switch(self)


class Program:
    """The parts of a program take turns; one goes on until it must wait."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.place, self.grid = place, grid
        self.parts: list[Warps] = []
        self.error: BaseException | None = None
        self.over = threading.Event()

    def switch(self, current: Warps) -> None:
        """Hand over to another part that can go on."""
        if self.error is not None:
            for part in self.parts:
                part.go.set()
        able = [part for part in self.parts if not part.done and part.ready()]
        if self.error is None and not able and not all(part.done for part in self.parts):
            self.error = AssertionError("every part of the program waits for another")
            for part in self.parts:
                part.go.set()
        if all(part.done for part in self.parts):
            self.over.set()
        if able and self.error is None:
            later = [part for part in able if part is not current]
            chosen = RANDOM[0].choice(able) if RANDOM else (later or able)[-1]
            if chosen is current:
                return
            current.go.clear()
            chosen.go.set()
        if not current.done:
            current.go.wait()
            if self.error is not None:
                raise RuntimeError("another part of the program failed")

    def pause(self) -> None:
        """Let others go first, where turns are drawn."""
        if RANDOM and self.parts:
            self.switch(_HERE.part)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        part = _HERE.part
        self.pause()
        while not ready():
            part.ready = ready
            self.switch(part)
        part.ready = lambda: True

    def specialize(self, bodies: list[Callable[[], None]]) -> None:
        """Run all of them, the last first: those that fetch."""
        self.parts = [Warps(self, body) for body in bodies]

        def start(part: Warps) -> None:
            _HERE.program, _HERE.part = self, part
            with torch.no_grad():  # which a thread has to say for itself
                part.run()

        threads = [threading.Thread(target=start, args=(part,), daemon=True) for part in self.parts]
        for thread in threads:
            thread.start()
        self.parts[-1].go.set()
        self.over.wait()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


_HERE = threading.local()
RANDOM: list[random.Random] = []  # with one in it, who goes on is drawn at every wait and every arrival


class Barrier:
    """An mbarrier: it completes a phase when all have arrived and all bytes have come."""

    def init(self, count: Any) -> None:
        self.count = self.left = int(count)
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than the barrier counts"
        self.settle()

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count

    def index(self, i: Any) -> "Barrier":
        return self


class Barriers:
    def __init__(self, num: int) -> None:
        self.all = [Barrier() for _ in range(num)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def _expect(bar: Barrier, count: Any) -> None:
    bar.bytes += int(count)
    bar.arrive()


def _wait(bar: Barrier, phase: Any) -> None:
    _HERE.program.wait_until(lambda: bar.phase != int(phase))


def _arrive(bar: Barrier, count: Any = 1) -> None:
    bar.arrive(int(count))
    _HERE.program.pause()


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barriers",
    init=lambda bar, count: bar.init(count),
    wait=_wait,
    expect=_expect,
    arrive=_arrive,
)


# Copies and products ------------------------------------------------------------------------------------------------------


class Tiles:
    """A tensor of which tiles are taken: triton's TensorDescriptor on a CPU tensor."""

    def __init__(self, given: Any) -> None:
        self.base, self.sizes, self.strides = given.base, given.shape, given.strides
        self.block_shape, self.layout, self.dtype = given.block_shape, None, _BY_KIND[given.base.dtype]

    def places(self, corner: list[Any]) -> tuple[Tensor, Tensor]:
        at, m = torch.zeros(self.block_shape, dtype=torch.long), torch.ones(self.block_shape, dtype=torch.bool)
        for axis, (first, size, stride, width) in enumerate(
            zip(corner, self.sizes, self.strides, self.block_shape, strict=True)
        ):
            line = (int(first) + torch.arange(width)).view([-1 if a == axis else 1 for a in range(len(corner))])
            at, m = at + line * stride, m & (line >= 0) & (line < size)
        return torch.where(m, at, 0), m


def _fetch(t: Tiles, corner: list[Any], bar: Barrier, s: Shared) -> None:
    at, m = t.places(corner)
    assert s.dtype is t.dtype
    s.x.copy_(torch.where(m, t.base.reshape(-1)[at], torch.zeros((), dtype=t.base.dtype)))
    bar.bytes -= s.x.numel() * s.x.element_size()
    bar.settle()


def _send(t: Tiles, corner: list[Any], s: Shared) -> None:
    at, m = t.places(corner)
    assert s.dtype is t.dtype

    def leave() -> None:
        t.base.view(-1)[at[m]] = s.x.view(at.shape)[m]

    _HERE.part.leaving.append(leave)


def _store_wait(pending: Any) -> None:
    leaving = _HERE.part.leaving
    while len(leaving) > int(pending):
        leaving.pop(0)()


TMA = SimpleNamespace(async_copy_global_to_shared=_fetch, async_copy_shared_to_global=_send, store_wait=_store_wait)


def _copy_line(s: Shared, p: Pointer, mask: Any = None) -> None:
    s.store(_load(p, mask))


ASYNC_COPY = SimpleNamespace(
    async_copy_global_to_shared=_copy_line, mbarrier_arrive=lambda bar, increment_count: bar.arrive(32)
)


EXTRA_BITS = 2  # beyond float32's that the matrix unit keeps of the terms of a sum


def _summed(a: Tensor, b: Tensor, acc: Tensor, step: int = 16) -> Tensor:
    """acc + a b as the matrix unit sums: some terms at a time, all cut off and never rounded."""
    a, b = a.double(), b.double()
    for first in range(0, a.shape[1], step):
        terms = a[:, first : first + step, None] * b[None, first : first + step]
        start = acc.double()
        largest = torch.maximum(terms.abs().amax(1), start.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24 - EXTRA_BITS)
        made = (torch.trunc(terms / unit[:, None]).sum(1) + torch.trunc(start / unit)) * unit
        acc = (made.view(torch.int64) & -(1 << 29)).view(torch.float64).float()
    return acc


def _tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def _begin_product(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    left = a.x if isinstance(a, Value | Shared) else a
    assert left.dtype == b.x.dtype
    start = acc.raw if use_acc else torch.zeros(left.shape[0], b.x.shape[1])
    value = Value(_summed(left, b.x, start), pending=is_async)
    if is_async:
        _HERE.part.products.append(value)
    return value


def _await_products(outstanding: int = 0, deps: Any = ()) -> Any:
    products = _HERE.part.products
    while len(products) > outstanding:
        products.pop(0).pending = False
    return deps[0] if len(deps) == 1 else tuple(deps)


def _product_v2(a: Value, b: Value, acc: Value) -> Value:
    return Value(_summed(a.x, b.x, acc.x))


def _dot(a: Value, b: Value, acc: Value | None = None, input_precision: str | None = None) -> Value:
    left, right = a.x, b.x
    made = torch.zeros(left.shape[0], right.shape[1])
    if left.dtype != torch.float32:
        return Value(_summed(left, right, made if acc is None else acc.x))
    highs = _tf32(left), _tf32(right)
    lows = _tf32(left - highs[0]), _tf32(right - highs[1])
    for one, other in ((lows[0], highs[1]), (highs[0], lows[1]), highs):
        made = _summed(one, other, made, step=8)
    return Value(made if acc is None else made + acc.x)


def _inline_asm(text: str, constraints: str, args: list[Value], dtype: Any, is_pure: bool, pack: int) -> Any:
    if text.startswith("cvt.rn."):
        return args[0].to(dtype)
    if text.startswith("rcp.approx"):
        return 1.0 / args[0]
    if text.startswith("{shl"):
        return args[0].to(dtype)
    if "max.NaN.bf16x2" in text:
        high, low = (x.x for x in args)
        least = high.clamp_min(-28.0)  # NaN stays
        return Value(least), Value(torch.where(least == high, low, 0 * low))
    if text.startswith("{.reg"):
        return args[0].to(DTYPES["bfloat16"]).to(dtype)
    assert text.startswith("lg2.approx")
    return Value(args[0].x.log2())


# The two modules ----------------------------------------------------------------------------------------------------------


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda *given, **_: Value(function(*[torch.as_tensor(_plain(x)) for x in given]))


def _where(m: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(torch.as_tensor(_plain(m)), _plain(a), _plain(b)))


def _sum(x: Value, axis: int) -> Value:
    return Value(x.x.sum(axis, dtype=x.x.dtype))


def _least(x: Value, axis: int) -> Value:
    return Value(x.x.amin(axis))


def _most(x: Value, axis: int) -> Value:
    return Value(x.x.amax(axis))


def _cumsum(x: Value, axis: int, reverse: bool = False) -> Value:
    return Value(x.x.flip(axis).cumsum(axis).flip(axis) if reverse else x.x.cumsum(axis))


def _full(shape: Any, value: float, dtype: Dtype, layout: Any = None) -> Value:
    return Value(torch.full([int(n) for n in shape], value, dtype=dtype.kind))


def _cast(x: Any, dtype: Dtype) -> Value:
    return Value(torch.as_tensor(_plain(x)).to(dtype.kind))


def _allocate(dtype: Dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape[0])
    fill = math.nan if dtype.kind.is_floating_point else 0
    return Shared(torch.full([int(n) for n in shape], fill, dtype=dtype.kind), layout if isinstance(layout, int) else 1)


def _specialize(parts: list[tuple[Callable[..., None], tuple]], warps: list[int], registers: list[int]) -> None:
    _HERE.program.specialize([partial(body, *given) for body, given in parts])


def _range(*given: Any) -> Iterator[Value]:
    return (Value(torch.tensor(i, dtype=torch.int32)) for i in range(*map(int, given)))


def _nothing(*_: Any, **__: Any) -> None:
    pass


_SAME: dict[str, Any] = DTYPES | {
    "constexpr": tl.constexpr,
    "load": _load,
    "store": _store,
    "where": _where,
    "sum": _sum,
    "min": _least,
    "max": _most,
    "cumsum": _cumsum,
    "full": _full,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "zeros_like": lambda x: Value(torch.zeros_like(x.x)),
    "arange": lambda first, end, layout=None: Value(torch.arange(first, end, dtype=torch.int32)),
    "cast": _cast,
    "minimum": _elementwise(torch.minimum),
    "maximum": _elementwise(torch.maximum),
    "PropagateNan": SimpleNamespace(ALL=None),
    "exp": _elementwise(torch.exp),
    "exp2": _elementwise(torch.exp2),
    "log": _elementwise(torch.log),
    "log2": _elementwise(torch.log2),
    "sqrt": _elementwise(torch.sqrt),
    "sqrt_rn": _elementwise(torch.sqrt),
    "floor": _elementwise(torch.floor),
    "abs": _elementwise(torch.abs),
    "trans": lambda x: Value(x.x.T),
    "permute": lambda x, order: Value(x.x.permute(order)),
    "convert_layout": lambda x, layout: x,
    "reshape": lambda x, shape: Value(x.x.reshape(shape)),
    "split": lambda x: tuple(map(Value, x.x.unbind(-1))),
    "join": lambda a, b: Value(torch.stack((a.x, b.x), -1)),
    "dot": _dot,
    "inline_asm_elementwise": _inline_asm,
    "static_range": range,
    "program_id": lambda axis: Value(torch.tensor((*_HERE.program.place, 0, 0)[axis], dtype=torch.int32)),
    "num_programs": lambda axis: Value(torch.tensor((*_HERE.program.grid, 1, 1)[axis], dtype=torch.int32)),
    "thread_barrier": _nothing,
    "debug_barrier": _nothing,
    "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize,
    "SliceLayout": _nothing,
    "DotOperandLayout": _nothing,
    "SwizzledSharedLayout": lambda vec, per_phase, max_phase, order: max_phase,
}
LANGUAGE = SimpleNamespace(**_SAME)


def _stand_ins() -> dict[int, Any]:
    """Triton's objects, by identity, and what stands in for them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    pairs = [
        (tl, LANGUAGE),
        (gl, LANGUAGE),
        (async_copy, ASYNC_COPY),
        (mbarrier, MBARRIER),
        (tma, TMA),
        (mma_v2, _product_v2),
        (warpgroup_mma, _begin_product),
        (warpgroup_mma_wait, _await_products),
        (fence_async_shared, _nothing),
    ]
    return {id(real): other for real, other in pairs}


class _Functions:
    """Kernels and what they are made of as plain functions."""

    def __init__(self) -> None:
        self.stand_ins, self.modules = _stand_ins(), dict[str, dict[str, Any]]()

    def plain(self, value: Any) -> Any:
        if id(value) in self.stand_ins:
            return self.stand_ins[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        body = getattr(value, "fn", None)
        if isinstance(body, FunctionType) and hasattr(value, "arg_names"):
            made = FunctionType(body.__code__, self.names(body.__module__), body.__name__, body.__defaults__)
            self.stand_ins[id(value)] = made
            return made
        return value

    def names(self, module: str) -> dict[str, Any]:
        if module not in self.modules:
            made = self.modules[module] = {"range": _range}
            found: ModuleType = sys.modules[module]
            made |= {name: self.plain(value) for name, value in vars(found).items()}
        return self.modules[module]


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer(value)
    if hasattr(value, "block_shape"):
        return Tiles(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return Value(torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32))


@cache
def _functions() -> _Functions:
    return _Functions()


def names_of(module: str) -> dict[str, Any]:
    """The names that functions of a module see when they run here."""
    return _functions().names(module)


@torch.no_grad()
def run_launch(launch: Launch) -> None:
    """Run a launch, program after program."""
    kernel = _functions().plain(launch.kernel)
    body = launch.kernel.fn
    fixed = {name for name, kind in body.__annotations__.items() if kind is tl.constexpr}
    given = {name: value if name in fixed else _argument(value) for name, value in launch.arguments.items()}
    for place in grid_of(*map(range, launch.grid)):
        program = Program(place, launch.grid)
        _HERE.program, _HERE.part = program, Warps(program, _nothing)
        kernel(**{name: given[name] for name in launch.kernel.arg_names})


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it every launch is run here, on CPU tensors."""
    from ckda.ops.triton import hopper

    with (
        patch.object(Launch, "__call__", run_launch),
        patch("ckda.ops.triton.chunk.compile_together", _nothing),
        patch.object(hopper, "device_refuses", lambda device: None),
    ):
        yield
