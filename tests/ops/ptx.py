"""Kernels as Triton compiles them for compute capability 9, run on a CPU: an interpreter of their PTX.

tests/ops/gluon.py runs a kernel's Python and knows nothing of layouts; here the compiled text is what runs, so registers, swizzled
shared memory, descriptors of the matrix unit and of the tensor memory accelerator (TMA) are those of the card. A warp is a vector
of 32 lanes. Which warp goes on, and for how many instructions, is drawn.

Seen as errors: a hang, an address outside of a tensor or of shared memory, a register that nobody set, and (in `complaints`)
- a race in shared memory: two accesses of different warps, or of TMA, one of them a write, that no barrier orders (vector clocks);
- what a warp wrote and TMA or the matrix unit reads without a fence of the asynchronous proxy on the way.
Copies in flight come as late as their barrier allows, products read their operands when they are awaited.

Not modelled: times, registers' number, the matrix unit's rounding, lanes of one warp that race with each other, global memory
between programs.
"""

import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ckda.ops.triton.compile import compile_launch
from ckda.ops.triton.launch import Launch

U8, U16, U32, U64, F32, F64 = np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64
LANES = np.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4  # of a lane, in the matrix unit's layouts
ROOM = 232448  # bytes of shared memory
SMALLEST = F32(2.0**-126)
SWIZZLES = {0: 0, 1: 0x10, 2: 0x30, 3: 0x70}  # of TMA; bits of an address that are changed
SPANS = {1: (128, 0x70), 2: (64, 0x30), 3: (32, 0x10)}  # of the matrix unit: bytes of a row, and the same
DESCRIPTORS = 0xD0 << 40  # where descriptors of tiles are said to lie


# The text ---------------------------------------------------------------------------------------------------------------


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if x.strip()]


@cache
def _parsed(ptx: str) -> tuple[list[tuple[str | None, bool, str, list[str]]], dict[str, int], dict[str, list[str]]]:
    """(predicate, whether it is negated, operation, operands) of each instruction; labels; tables of branches."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".visible .entry") :])
    body = re.split(r"\n\s*\.(?:section|file)\b", body[body.index("\n{") + 2 :])[0]
    body = re.sub(r"\.(?:loc|reg|pragma)\b[^;\n]*[;\n]", "\n", body)
    tables = {name: _split(rest) for name, rest in re.findall(r"(\$\w+):\s*\.branchtargets([^;]*);", body)}
    body = re.sub(r"\$\w+:\s*\.branchtargets[^;]*;", "", body)
    body = re.sub(r"(\$?\w+):\s", r";\1:;", body)
    code, labels = [], {}
    for line in body.split(";"):
        line = re.sub(r"^[\s{}]*(?=[\w@$])", "", line.strip())
        if re.fullmatch(r"\$?\w+:", line):
            labels[line[:-1]] = len(code)
        elif found := re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]+)\s*(.*)", line, re.S):
            negated, predicate, operation, operands = found.groups()
            if predicate != "complete":  # the loop around a barrier's question: to ask is to wait here
                code.append((predicate, bool(negated), operation, _split(operands)))
    return code, labels, tables


# One program ------------------------------------------------------------------------------------------------------------


class Tiles:
    """A tensor as TMA sees it."""

    def __init__(self, given: Any, meta: dict[str, Any]) -> None:
        self.shape, self.strides, self.block = given.shape, given.strides, meta["block_size"]
        self.size, self.swizzle = meta["elem_size"], SWIZZLES[meta["swizzle"]]
        self.bytes = given.base.view(-1).view(torch.uint8).numpy()

    def places(self, corner: list[int], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a tile's elements: where they lie in the tensor, whether they do, and where in shared memory."""
        at, inside = np.zeros(self.block, np.int64), np.ones(self.block, bool)
        for axis, (start, width) in enumerate(zip(corner, self.block, strict=True)):
            line = (start + np.arange(width)).reshape([-1 if a == axis else 1 for a in range(len(corner))])
            at, inside = at + line * self.strides[axis], inside & (line >= 0) & (line < self.shape[axis])
        place = first + np.arange(at.size) * self.size
        return np.where(inside, at, 0).ravel(), inside.ravel(), place ^ ((place >> 3) & self.swizzle)


def _bytes(first: np.ndarray, size: int) -> np.ndarray:
    return (first[:, None] + np.arange(size)).ravel()


class Program:
    """One block of threads: its shared memory, barriers and warps, and who knows of whose accesses."""

    def __init__(
        self, ptx: str, given: dict[str, Any], place: tuple[int, ...], grid: tuple[int, ...], seed: int
    ) -> None:
        self.code, self.labels, self.tables = _parsed(ptx)
        self.parameters, self.tiles, self.tensors = given["parameters"], given["tiles"], given["tensors"]
        self.place, self.grid, self.random = place, grid, random.Random(seed)
        self.size = given["shared"]
        self.memory = np.full(ROOM, 0xFF, U8)
        self.unfenced = np.zeros(ROOM, bool)
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
        num = self.num = self.threads // 32
        # clocks: what each warp knows of each other one's, TMA last; of each two bytes the last write, and each warp's last read
        self.known = np.zeros((num, num + 1), np.int64)
        self.known[np.arange(num), np.arange(num)] = 1
        self.copies = 0
        self.writer, self.written = np.full(ROOM // 2, -1), np.zeros(ROOM // 2, np.int64)
        self.at, self.read_at = np.zeros(ROOM // 2, int), np.zeros((ROOM // 2, num), np.int64)
        self.barriers: dict[int, dict[str, Any]] = {}
        self.meetings: dict[int, dict[str, Any]] = {}
        self.flying: list[Callable[[], None]] = []  # copies that may come at any time
        self.complaints: set[str] = set()
        self.warps = [Warp(self, i) for i in range(num)]

    def run(self) -> None:
        live = list(self.warps)
        while live:
            able = [w for w in live if w.waits is None or w.waits()]
            if self.flying and (not able or self.random.random() < 0.3):
                self.flying.pop(self.random.randrange(len(self.flying)))()
                continue
            assert able, f"all wait: {[(w.index, self.code[w.at - 1][2:]) for w in live]}"
            warp = self.random.choice(able)
            warp.waits = None
            warp.go(self.random.choice([3, 30, 300, 3000]))
            live = [w for w in live if not w.done]

    # who knows of what
    def _unordered(self, cells: np.ndarray, who: int, known: np.ndarray) -> np.ndarray:
        writer = self.writer[cells]
        return (writer >= 0) & (writer != who) & (self.written[cells] > known[writer])

    def reads(self, warp: "Warp", cells: np.ndarray, known: np.ndarray | None = None) -> None:
        """A read of cells of two bytes, by what was known when it was begun."""
        late = self._unordered(cells, warp.index, self.known[warp.index] if known is None else known)
        if late.any():
            cell = cells[late][0]
            self.complaints.add(f"race: {warp.here()} reads what warp {self.writer[cell]} writes at {self.at[cell]}")
        self.read_at[cells, warp.index] = self.known[warp.index, warp.index]

    def writes(self, warp: "Warp", cells: np.ndarray, copied: np.ndarray | None = None) -> None:
        """A write by a warp; or, with what was known when it was begun, by TMA."""
        who, known = (warp.index, self.known[warp.index]) if copied is None else (self.num, copied)
        late = self._unordered(cells, who, known) & ((self.at[cells] != warp.at) | (who == self.num))
        before = self.read_at[cells] > known[: self.num]
        if copied is None:
            before[:, who] = False
        if late.any() or before.any():
            self.complaints.add(f"race: {warp.here()} writes what others use")
        self.writer[cells], self.at[cells] = who, warp.at
        self.written[cells] = self.copies if copied is not None else known[who]

    def tell(self, warp: "Warp", clock: np.ndarray) -> None:
        np.maximum(clock, self.known[warp.index], out=clock)
        self.known[warp.index, warp.index] += 1

    def learn(self, warp: "Warp", clock: np.ndarray) -> None:
        np.maximum(self.known[warp.index], clock, out=self.known[warp.index])

    def asynchronous(self, warp: "Warp", places: np.ndarray) -> np.ndarray:
        """The cells of bytes that TMA or the matrix unit will read; what a warp knows now."""
        assert (places < self.size).all(), "beyond shared memory"
        if self.unfenced[places].any():
            self.complaints.add(f"no fence: {warp.here()} reads what was written just so")
        self.reads(warp, places // 2)
        return self.known[warp.index].copy()

    # barriers
    def meet(self, warp: "Warp", name: int, count: int) -> Callable[[], bool]:
        m = self.meetings.setdefault(
            name, {"here": 0, "round": 0, "clock": np.zeros(self.num + 1, np.int64), "clocks": []}
        )
        turn = m["round"]
        m["here"] += 32
        self.tell(warp, m["clock"])
        if m["here"] >= count:
            m["clocks"].append(m["clock"])
            m |= {"here": 0, "round": turn + 1, "clock": np.zeros(self.num + 1, np.int64)}

        def over() -> bool:
            if m["round"] > turn:
                self.learn(warp, m["clocks"][turn])
            return m["round"] > turn

        return over

    def settle(self, barrier: dict[str, Any]) -> None:
        assert barrier["left"] >= 0, "more arrivals than the barrier counts"
        if barrier["left"] == barrier["bytes"] == 0:
            barrier |= {"phase": barrier["phase"] ^ 1, "left": barrier["count"], "done": barrier["clock"].copy()}

    def tensor(self, addresses: np.ndarray, size: int) -> tuple[int, np.ndarray]:
        """The first address and the bytes of the tensor that all these lie in."""
        for first, memory in self.tensors:
            if first <= addresses.min() < first + len(memory):
                assert addresses.max() + size <= first + len(memory), "beyond a tensor"
                return first, memory
        raise AssertionError("an address of no tensor")


class Warp:
    """32 lanes, their registers, and what they have begun."""

    def __init__(self, program: Program, index: int) -> None:
        self.program, self.index, self.at, self.done = program, index, 0, False
        self.registers: dict[str, np.ndarray] = {}
        self.waits: Callable[[], bool] | None = None
        # begun and not yet in a group, and groups: of products, of tiles that leave, of copies without TMA
        self.open: dict[str, list] = {"product": [], "tile": [], "copy": []}
        self.groups: dict[str, list] = {"product": [], "tile": [], "copy": []}
        self.apart: list[tuple[int, np.ndarray]] = []  # lanes that branched otherwise, and where they are
        self.active: np.ndarray | None = None

    def here(self) -> str:
        return f"warp {self.index} at {self.at} ({self.program.code[self.at - 1][2]})"

    def go(self, steps: int) -> None:
        code = self.program.code
        for _ in range(steps):
            if self.apart:
                self._together()
            predicate, negated, operation, operands = code[self.at]
            self.at += 1
            mask = None
            if predicate is not None:
                mask = self.flag(predicate) ^ negated
            try:
                if operation.startswith("bra"):
                    self._branch(self.program.labels[operands[0]], mask)
                else:
                    if self.active is not None:
                        mask = self.active if mask is None else mask & self.active
                    kind = operation.split(".")[0]
                    if mask is None or mask.any():
                        _RUN[kind](self, operation, operands, mask)
                    elif kind == "ld":  # no lane loads
                        for name in _names(operands[0]):
                            self.registers.setdefault(name, np.full(32, -1, np.int64).astype(_kind(operation)))
            except Exception as error:
                raise RuntimeError(f"{self.here()} {operands}: {error!r}") from error
            if self.done or self.waits is not None:
                return

    def _branch(self, target: int, mask: np.ndarray | None) -> None:
        active = np.ones(32, bool) if self.active is None else self.active
        taken = active if mask is None else mask & active
        if taken.any() and (active & ~taken).any():
            self.apart.append((target, taken))
            self.active = active & ~taken
        elif taken.any():
            self.at = target

    def _together(self) -> None:
        """Those who are furthest behind go on, with all who are at the same place."""
        everyone = [*self.apart, (self.at, self.active)]
        self.at = min(at for at, _ in everyone)
        self.active = np.logical_or.reduce([lanes for at, lanes in everyone if at == self.at])
        self.apart = [(at, lanes) for at, lanes in everyone if at != self.at]
        if not self.apart:
            self.active = None

    # operands
    def bits(self, x: str, kind: Any = U32) -> np.ndarray:
        """An operand's bits as whole numbers of that type."""
        if x in self.registers:
            return self.registers[x].astype(kind)
        if found := re.fullmatch(r"global_smem(?:\+(\d+))?", x):
            return np.full(32, int(found[1] or 0), kind)
        if found := re.fullmatch(r"%(tid|ctaid|nctaid)\.([xyz])", x):
            axis = "xyz".index(found[2])
            special = {
                "tid": LANES + 32 * self.index,
                "ctaid": self.program.place[axis],
                "nctaid": self.program.grid[axis],
            }
            return np.full(32, special[found[1]]).astype(kind)
        if found := re.fullmatch(r"\w+_param_(\d+)", x):
            return np.full(32, DESCRIPTORS + int(found[1]), kind)
        assert x[0] != "%", f"{x} was never set"
        number = int(x[2:], 16) if x[:2] in ("0f", "0d") else int(x.rstrip("U"), 0)
        return np.full(32, number & (2 ** (8 * np.dtype(kind).itemsize) - 1), kind)

    def number(self, x: str, kind: str) -> np.ndarray:
        """An operand as numbers of PTX's type."""
        if kind == "bf16":
            return (self.bits(x, U16).astype(U32) << U32(16)).view(F32)
        views = {"f16": np.float16, "f32": F32, "f64": F64, "s16": np.int16, "s32": np.int32, "s64": np.int64}
        return self.bits(x, _kind(kind)).view(views.get(kind, _kind(kind)))

    def flag(self, x: str) -> np.ndarray:
        return self.registers[x] if x in self.registers else np.full(32, int(x) != 0)

    def set(self, name: str, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        if value.dtype != bool:
            value = value.view(f"u{value.dtype.itemsize}")
        if mask is not None and not mask.all():
            value = np.where(mask, value, self.registers.get(name, np.zeros_like(value)))
        self.registers[name] = value

    def addresses(self, x: str) -> np.ndarray:
        name, offset = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", x).groups()  # type: ignore[union-attr]
        return self.bits(name, U64).astype(np.int64) + int(offset or "0", 0)

    def finish(self, what: str, left: int) -> None:
        """Wait until no more than so many groups are on their way."""
        while len(self.groups[what]) > left:
            for end in self.groups[what].pop(0):
                end()


# Instructions -----------------------------------------------------------------------------------------------------------

_RUN: dict[str, Callable[..., None]] = {}


def _runs(*kinds: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(function: Callable[..., None]) -> Callable[..., None]:
        _RUN.update(dict.fromkeys(kinds, function))
        return function

    return keep


def _kind(operation: str) -> Any:
    """The type of an operation's bits."""
    bits = re.search(r"(8|16|32|64)$", operation)
    return {"8": U8, "16": U16, "32": U32, "64": U64}[bits[1]]  # type: ignore[index]


def _names(x: str) -> list[str]:
    return _split(x.strip("{} "))


@_runs("mov", "cvta")
def _mov(w: Warp, op: str, x: list[str], mask: Any) -> None:
    if op.endswith("pred"):
        w.set(x[0], w.flag(x[1]), mask)
    elif "{" in x[0] + x[1]:  # the halves of a register
        whole = _kind(op)
        half, shift = {U32: (U16, 16), U64: (U32, 32)}[whole]
        if "{" in x[1]:
            low, high = (w.bits(name, half).astype(whole) for name in _names(x[1]))
            w.set(x[0], low | high << whole(shift), mask)
        else:
            for name, place in zip(_names(x[0]), (0, shift), strict=True):
                w.set(name, (w.bits(x[1], whole) >> whole(place)).astype(half), mask)
    else:
        w.set(x[0], w.bits(x[1], _kind(op)), mask)


@_runs("and", "or", "xor", "not")
def _logic(w: Warp, op: str, x: list[str], mask: Any) -> None:
    made = [w.flag(a) if op.endswith("pred") else w.bits(a, _kind(op)) for a in x[1:]]
    do = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[op.split(".")[0]]
    w.set(x[0], do(*made), mask)


@_runs("shl", "shr")
def _shift(w: Warp, op: str, x: list[str], mask: Any) -> None:
    kind = op.split(".")[1]
    value, width = w.number(x[1], kind if kind[0] == "s" else f"u{kind[1:]}"), 8 * np.dtype(_kind(op)).itemsize
    count = w.bits(x[2])
    moved = (np.left_shift if op[:3] == "shl" else np.right_shift)(
        value, np.minimum(count, width - 1).astype(value.dtype)
    )
    w.set(x[0], np.where((count >= width) & (kind[0] != "s"), 0, moved).astype(value.dtype), mask)


@_runs("bfe")
def _field(w: Warp, op: str, x: list[str], mask: Any) -> None:
    kind, first, num = _kind(op), int(x[2]), int(x[3])
    value = (w.bits(x[1], kind) >> kind(first)) & kind(2**num - 1)
    if ".s" in op:
        value = np.where(value >> kind(num - 1), value | ~kind(2**num - 1), value)
    w.set(x[0], value, mask)


@_runs("prmt")
def _permute(w: Warp, op: str, x: list[str], mask: Any) -> None:
    both, choice = w.bits(x[1]).astype(U64) | w.bits(x[2]).astype(U64) << U64(32), w.bits(x[3]).astype(U64)
    made = np.zeros(32, U64)
    for i in range(4):
        one = choice >> U64(4 * i)
        byte = (both >> ((one & U64(7)) * U64(8))) & U64(0xFF)
        byte = np.where(one & U64(8), np.where(byte & U64(0x80), U64(0xFF), U64(0)), byte)  # its sign alone
        made |= byte << U64(8 * i)
    w.set(x[0], made.astype(U32), mask)


@_runs("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max")
def _arithmetic(w: Warp, op: str, x: list[str], mask: Any) -> None:
    do, *_, kind = op.split(".")
    if kind == "bf16x2":
        _of_pairs(w, op, x, mask)
        return
    if ".wide" in op:
        a, b = (w.number(name, kind).astype(np.int64) for name in x[1:3])
        w.set(x[0], (a * b).view(U64) + (w.bits(x[3], U64) if do == "mad" else U64(0)), mask)
        return
    given = [w.number(name, kind) for name in x[1:]]
    a, b = given[:2]
    if ".hi" in op:
        made = (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)
    elif do in ("fma", "mad"):
        made = (a.astype(F64) * b + given[2]).astype(a.dtype) if kind[0] == "f" else a * b + given[2]
    elif do in ("div", "rem"):
        made = np.fix(a.astype(F64) / b).astype(a.dtype) if kind[0] != "f" else a / b
        made = a - made * b if do == "rem" else made
    elif do in ("min", "max"):
        ordinary = {"min": np.fmin, "max": np.fmax}[do]
        made = (getattr(np, f"{do}imum") if ".NaN" in op else ordinary)(a, b)
    else:
        made = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[do](a, b)
    w.set(x[0], made, mask)


@_runs("set")
def _of_pairs(w: Warp, op: str, x: list[str], mask: Any) -> None:
    """Two numbers of bfloat16 at a time."""
    do = {
        "max.NaN.bf16x2": np.maximum,
        "mul.bf16x2": np.multiply,
        "set.eq.bf16x2.bf16x2": lambda a, b: (a == b).astype(F32),
    }[op]
    pairs = [w.bits(name) for name in x[1:]]
    low, high = (
        _half(do(*[(p << U32(16 - shift) & U32(0xFFFF0000)).view(F32) for p in pairs]), "bf16").astype(U32)
        for shift in (0, 16)
    )
    w.set(x[0], low | high << U32(16), mask)


@_runs("abs", "neg")
def _sign(w: Warp, op: str, x: list[str], mask: Any) -> None:
    if op.endswith(("f16", "f32", "f64")):
        kind = _kind(op)
        top = kind(2 ** (8 * np.dtype(kind).itemsize - 1))
        w.set(x[0], w.bits(x[1], kind) & ~top if op[:3] == "abs" else w.bits(x[1], kind) ^ top, mask)
    else:
        w.set(x[0], -w.number(x[1], op.split(".")[-1]), mask)


@_runs("rcp", "ex2", "lg2", "sqrt")
def _function(w: Warp, op: str, x: list[str], mask: Any) -> None:
    value = w.number(x[1], op.split(".")[-1])
    do = {"rcp": np.reciprocal, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt}[op.split(".")[0]]
    flush = ".ftz.f32" in op
    if flush:
        value = np.where(np.abs(value) < SMALLEST, F32(0) * value, value)
    made = do(value.astype(F64)).astype(value.dtype)
    w.set(x[0], np.where(np.abs(made) < SMALLEST, F32(0) * made, made) if flush else made, mask)


def _half(value: np.ndarray, kind: str) -> np.ndarray:
    """float32 rounded to half precision, its bits."""
    made = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    return made.view(torch.int16).numpy().view(U16)


@_runs("cvt")
def _convert(w: Warp, op: str, x: list[str], mask: Any) -> None:
    *how, to, source = op.split(".")[1:]
    if to in ("bf16x2", "f16x2"):
        high, low = (_half(w.number(name, "f32"), to[:-2]).astype(U32) for name in x[1:])
        made = low | high << U32(16)
    elif to in ("bf16", "f16"):
        made = _half(w.number(x[1], source), to)
    elif to == "tf32":
        made = (w.bits(x[1]) + U32(0x1000)) & U32(0xFFFFE000)
    elif "s8" in (to, source):
        made = w.bits(x[1], U8).view(np.int8).astype(np.int16)
    else:
        value = w.number(x[1], source)
        value = np.floor(value) if "rmi" in how else np.trunc(value) if "rzi" in how else value
        kinds = {"f32": F32, "f64": F64, "s32": np.int32, "s64": np.int64, "u16": U16, "u32": U32, "u64": U64}
        made = value.astype(kinds[to])
    w.set(x[0], made, mask)


@_runs("selp")
def _select(w: Warp, op: str, x: list[str], mask: Any) -> None:
    w.set(x[0], np.where(w.flag(x[3]), w.bits(x[1], _kind(op)), w.bits(x[2], _kind(op))), mask)


@_runs("setp")
def _compare(w: Warp, op: str, x: list[str], mask: Any) -> None:
    _, how, *_, kind = op.split(".")
    a, b = (w.number(name, kind.replace("b", "u") if kind[0] == "b" and kind != "bf16" else kind) for name in x[1:])
    unordered = np.isnan(a) | np.isnan(b) if "f" in kind else np.zeros(32, bool)
    do = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    if how in ("num", "nan"):
        made = unordered if how == "nan" else ~unordered
    else:
        made = do[how[:2]](a, b) & ~unordered | (unordered & (len(how) == 3))
    w.set(x[0], made, mask)


@_runs("shfl", "redux", "elect")
def _exchange(w: Warp, op: str, x: list[str], mask: Any) -> None:
    name, *flag = x[0].split("|")
    if op.startswith("elect"):
        w.set(name, np.zeros(32, U32))
        w.set(flag[0], LANES == 0)
        return
    value = w.bits(x[1])
    if op.startswith("redux.sync.add"):
        made = np.full(32, value.sum(dtype=U64)).astype(U32)
    elif op.startswith("redux.sync.min.s32"):
        made = np.full(32, value.view(np.int32).min())
    else:
        by = w.bits(x[2]).astype(int)
        source = {"bfly": LANES ^ by, "idx": by & 31, "up": LANES - by}[op.split(".")[2]]
        made = np.where(source >= 0, value[source], value)
        if flag:
            w.set(flag[0], source >= 0)
    w.set(name, made, mask)


@_runs("setmaxnreg")
def _nothing(w: Warp, op: str, x: list[str], mask: Any) -> None:
    pass


@_runs("ret")
def _return(w: Warp, op: str, x: list[str], mask: Any) -> None:
    assert not w.open["product"], "products that nobody awaited"
    assert not w.groups["product"], "products that nobody awaited"
    w.finish("tile", 0)
    w.done = True


@_runs("brx")
def _table(w: Warp, op: str, x: list[str], mask: Any) -> None:
    w.at = w.program.labels[w.program.tables[x[1]][int(w.bits(x[0])[0])]]


@_runs("bar", "barrier")
def _barrier(w: Warp, op: str, x: list[str], mask: Any) -> None:
    if ".warp" not in op:
        w.waits = w.program.meet(w, int(x[0]), int(x[1]) if len(x) > 1 else w.program.threads)


@_runs("fence")
def _fence(w: Warp, op: str, x: list[str], mask: Any) -> None:
    """What this warp wrote, or knows to be written, may be read by TMA and the matrix unit."""
    p = w.program
    places = np.nonzero(p.unfenced)[0]
    writer, written = p.writer[places // 2], p.written[places // 2]
    p.unfenced[places[(writer == w.index) | (written <= p.known[w.index][writer])]] = False


@_runs("ld", "st")
def _access(w: Warp, op: str, x: list[str], mask: Any) -> None:
    p, load = w.program, op[:2] == "ld"
    if ".param" in op:
        w.set(x[0], np.full(32, p.parameters[int(re.search(r"param_(\d+)", x[1])[1])]).astype(_kind(op)))  # type: ignore[index]
        return
    place, names = (x[1], _names(x[0])) if load else (x[0], _names(x[1]))
    kind, lanes = _kind(op), np.ones(32, bool) if mask is None else mask
    size, at = np.dtype(kind).itemsize, w.addresses(place)[lanes]
    assert (at % (size * len(names)) == 0).all(), "not aligned"
    if ".shared" in op:
        first, memory = 0, p.memory
        assert (at + size * len(names) <= p.size).all(), "beyond shared memory"
        places = _bytes(at, size * len(names))
        (p.reads if load else p.writes)(w, places // 2)
        if not load:
            p.unfenced[places] = True
    else:
        first, memory = p.tensor(at, size * len(names))
    view = memory[: len(memory) // size * size].view(kind)
    for i, name in enumerate(names):
        cells = (at - first) // size + i
        if load:
            made = np.zeros(32, kind)
            made[lanes] = view[cells]
            if kind is U8:
                made = made.view(np.int8).astype(np.int16) if ".s8" in op else made.astype(U16)
            w.set(name, made, mask)
        else:
            view[cells] = w.bits(name, kind)[lanes]


def _matrices(w: Warp, op: str, place: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Where each lane's two elements of each matrix [8, 8] lie, in units of two bytes."""
    num = int(re.search(r"\.x(\d)", op)[1])  # type: ignore[index]
    rows = w.addresses(place)[: 8 * num]
    assert (rows % 16 == 0).all() and (rows + 16 <= w.program.size).all()  # noqa: PT018
    (w.program.reads if op[:2] == "ld" else w.program.writes)(w, _bytes(rows, 16) // 2)
    found = []
    for row in rows.reshape(num, 8) // 2:
        if ".trans" in op:
            found.append((row[2 * MEMBER] + GROUP, row[2 * MEMBER + 1] + GROUP))
        else:
            found.append((row[GROUP] + 2 * MEMBER, row[GROUP] + 2 * MEMBER + 1))
    return found


@_runs("ldmatrix", "stmatrix")
def _matrix(w: Warp, op: str, x: list[str], mask: Any) -> None:
    memory, load = w.program.memory.view(U16), op[:2] == "ld"
    names, place = (_names(x[0]), x[1]) if load else (_names(x[1]), x[0])
    for name, (low, high) in zip(names, _matrices(w, op, place), strict=True):
        if load:
            w.set(name, memory[low].astype(U32) | memory[high].astype(U32) << U32(16))
        else:
            memory[low], memory[high] = w.bits(name).astype(U16), (w.bits(name) >> U32(16)).astype(U16)
            w.program.unfenced[_bytes(np.concatenate([low, high]) * 2, 2)] = True


# Copies -----------------------------------------------------------------------------------------------------------------


def _bulk_tile(w: Warp, x: str, mask: Any) -> tuple[Tiles, list[int], int]:
    """The tensor and the corner of a tile, and the lane that asks."""
    lane = 0 if mask is None else int(np.argmax(mask))
    tiles, corner = re.fullmatch(r"\[(\S+), \{(.*)\}\]", x).groups()  # type: ignore[union-attr]
    found = w.program.tiles[int(w.bits(tiles, U64)[lane]) - DESCRIPTORS]
    return found, [int(w.number(name, "s32")[lane]) for name in _split(corner)][::-1], lane


def _fetch_tile(w: Warp, x: list[str], mask: Any) -> None:
    p = w.program
    tiles, corner, lane = _bulk_tile(w, x[1], mask)
    at, inside, places = tiles.places(corner, int(w.addresses(x[0])[lane]))
    assert (places < p.size).all(), "beyond shared memory"
    barrier, known = p.barriers[int(w.addresses(x[2])[lane])], p.known[w.index].copy()

    def come() -> None:
        p.copies += 1
        cells = _bytes(places, tiles.size)
        p.writes(w, cells // 2, known)
        p.memory[cells] = np.where(
            inside[:, None], tiles.bytes[_bytes(at * tiles.size, tiles.size)].reshape(-1, tiles.size), 0
        ).ravel()
        p.unfenced[cells] = False
        barrier["clock"][-1] = p.copies
        barrier["bytes"] -= len(cells)
        p.settle(barrier)

    p.flying.append(come)


def _send_tile(w: Warp, x: list[str], mask: Any) -> None:
    p = w.program
    tiles, corner, lane = _bulk_tile(w, x[0], mask)
    at, inside, places = tiles.places(corner, int(w.addresses(x[1])[lane]))
    cells = _bytes(places, tiles.size)
    known = p.asynchronous(w, cells)

    def leave() -> None:
        p.reads(w, cells // 2, known)
        tiles.bytes[_bytes(at[inside] * tiles.size, tiles.size)] = p.memory[_bytes(places[inside], tiles.size)]

    w.open["tile"].append(leave)


@_runs("cp")
def _copy(w: Warp, op: str, x: list[str], mask: Any) -> None:
    p, what = w.program, "tile" if ".bulk" in op else "copy"
    if "commit_group" in op:
        w.groups[what].append(w.open[what])
        w.open[what] = []
    elif "wait_group" in op:
        w.finish(what, int(x[0], 0))
    elif ".shared::cluster" in op:
        _fetch_tile(w, x, mask)
    elif ".bulk.tensor" in op:
        _send_tile(w, x, mask)
    elif ".mbarrier" in op:  # arrive when the copies so far have come
        barrier, copies = p.barriers[int(w.addresses(x[0])[0])], w.open["copy"]
        clock = np.zeros(p.num + 1, np.int64)
        p.tell(w, clock)
        w.open["copy"] = []

        def come() -> None:
            for copy in copies:
                copy(True)
            barrier["clock"][-1] = p.copies
            np.maximum(barrier["clock"], clock, out=barrier["clock"])
            barrier["left"] -= 32
            p.settle(barrier)

        p.flying.append(come)
    else:
        lanes = np.ones(32, bool) if mask is None else mask
        size, target, source = int(x[2], 0), w.addresses(x[0]), w.addresses(x[1])
        num = w.bits(x[3]).astype(int) if len(x) > 3 else np.full(32, size)

        known = p.known[w.index].copy()

        def write(by_barrier: bool = False) -> None:
            for lane in np.nonzero(lanes)[0]:
                data = np.zeros(size, U8)
                if num[lane]:
                    first, memory = p.tensor(source[lane : lane + 1], num[lane])
                    data[: num[lane]] = memory[source[lane] - first :][: num[lane]]
                p.memory[target[lane] : target[lane] + size] = data
            p.copies += 1
            p.writes(w, _bytes(target[lanes], size) // 2, known if by_barrier else None)

        w.open["copy"].append(write)


@_runs("mbarrier")
def _phase_barrier(w: Warp, op: str, x: list[str], mask: Any) -> None:
    p, lanes = w.program, np.ones(32, bool) if mask is None else mask
    lane = int(np.argmax(lanes))
    if ".init" in op:
        count, clock = int(x[1]), np.zeros(p.num + 1, np.int64)
        made = {"count": count, "left": count, "bytes": 0, "phase": 0, "clock": clock, "done": clock}
        p.barriers[int(w.addresses(x[0])[lane])] = made
    elif ".try_wait" in op:
        barrier, parity = p.barriers[int(w.addresses(x[1])[0])], int(w.bits(x[2])[0]) & 1

        def over() -> bool:
            if barrier["phase"] != parity:
                p.learn(w, barrier["done"])
            return barrier["phase"] != parity

        w.waits = over
    else:
        barrier = p.barriers[int(w.addresses(x[1])[lane])]
        p.tell(w, barrier["clock"])
        if ".expect_tx" in op:
            barrier["bytes"] += int(w.bits(x[2])[lane])
        barrier["left"] -= int(lanes.sum()) * (int(w.bits(x[2])[lane]) if ".expect_tx" not in op and len(x) > 2 else 1)
        p.settle(barrier)


# Products ---------------------------------------------------------------------------------------------------------------


def _pairs(bits: np.ndarray, kind: str) -> np.ndarray:
    """[2, 32]: the two numbers of each register."""
    halves = np.stack([bits & U32(0xFFFF), bits >> U32(16)])
    return (halves << U32(16)).view(F32) if kind == "bf16" else halves.astype(U16).view(np.float16).astype(F32)


def _cut(bits: np.ndarray) -> np.ndarray:
    """float32 as the matrix unit reads TF32."""
    return (bits & U32(0xFFFFE000)).view(F32)


def _numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Elements in shared memory."""
    if kind == "tf32":
        return _cut(bits)
    return (bits.astype(U32) << U32(16)).view(F32) if kind == "bf16" else bits.view(np.float16).astype(F32)


def _left(w: Warp, names: list[str], kind: str) -> np.ndarray:
    """The warp's 16 rows of a left operand in registers."""
    depth = 8 if kind == "tf32" else 16
    made = np.zeros((16, depth), F32)
    for i, name in enumerate(names):
        row, column = GROUP + 8 * (i % 2), depth // 2 * (i // 2)
        if kind == "tf32":
            made[row, column + MEMBER] = _cut(w.bits(name))
        else:
            made[row, column + 2 * MEMBER], made[row, column + 2 * MEMBER + 1] = _pairs(w.bits(name), kind)
    return made


def _accumulators(num: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The row and the column of each lane's i-th of so many accumulators."""
    for i in range(num):
        yield i, GROUP + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * MEMBER + i % 2


def _sum_in(w: Warp, names: list[str]) -> np.ndarray:
    made = np.zeros((16, 2 * len(names)), F32)
    for i, row, column in _accumulators(len(names)):
        made[row, column] = w.number(names[i], "f32")
    return made


def _sum_out(w: Warp, names: list[str], made: np.ndarray) -> None:
    for i, row, column in _accumulators(len(names)):
        w.set(names[i], made[row, column].astype(F32))


@_runs("mma")
def _product(w: Warp, op: str, x: list[str], mask: Any) -> None:
    kind = op.split(".")[-2]
    target, left, right, start = map(_names, x)
    a, b = _left(w, left, kind), np.zeros((8 if kind == "tf32" else 16, 8), F32)
    for i, name in enumerate(right):
        if kind == "tf32":
            b[MEMBER + 4 * i, GROUP] = _cut(w.bits(name))
        else:
            b[2 * MEMBER + 8 * i, GROUP], b[2 * MEMBER + 8 * i + 1, GROUP] = _pairs(w.bits(name), kind)
    _sum_out(w, target, _sum_in(w, start) + a.astype(F64) @ b)


def _described(descriptor: int, lines: np.ndarray, depth: np.ndarray, size: int, transposed: bool) -> np.ndarray:
    """Where elements of an operand in shared memory lie, by the matrix unit's descriptor; `lines` are rows of a, columns of b."""
    first, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span, swizzle = SPANS[descriptor >> 62]
    if transposed:
        at = lines * size % span + lines * size // span * leading + depth % 8 * span + depth // 8 * stride
    else:
        at = lines % 8 * span + lines // 8 * stride + depth * size
    at = at + first
    return at ^ ((at >> 3) & swizzle)


@_runs("wgmma")
def _group_product(w: Warp, op: str, x: list[str], mask: Any) -> None:
    """The rows of one warp, which need nothing of the others'."""
    if ".fence" in op:
        return
    if ".commit_group" in op:
        w.groups["product"].append(w.open["product"])
        w.open["product"] = []
        return
    if ".wait_group" in op:
        w.finish("product", int(x[0]))
        return
    p, kind = w.program, op.split(".")[-1]
    width, depth = map(int, re.search(r"n(\d+)k(\d+)", op).groups())  # type: ignore[union-attr]
    target, size = _names(x[0]), 4 if kind == "tf32" else 2
    turned = [int(n) for n in x[6:]]  # of a, where that is in shared memory, and b
    view = p.memory.view(U32 if kind == "tf32" else U16)
    if x[1].startswith("{"):
        a = _left(w, _names(x[1]), kind)
    else:
        lines, steps = np.meshgrid(16 * (w.index % 4) + np.arange(16), np.arange(depth), indexing="ij")
        at = _described(int(w.bits(x[1], U64)[0]), lines, steps, size, bool(turned[0]))
        p.asynchronous(w, _bytes(at.ravel(), size))
        a = _numbers(view[at // size], kind)
    steps, lines = np.meshgrid(np.arange(depth), np.arange(width), indexing="ij")
    at = _described(int(w.bits(x[2], U64)[0]), lines, steps, size, bool(turned[-1:] and turned[-1]))
    cells, added = _bytes(at.ravel(), size), bool(w.flag(x[3])[0])
    known = p.asynchronous(w, cells)

    def end() -> None:
        p.reads(w, cells // 2, known)
        _sum_out(w, target, (_sum_in(w, target) if added else 0.0) + a.astype(F64) @ _numbers(view[at // size], kind))

    if not added:
        for name in target:
            w.set(name, np.full(32, np.nan, F32))
    w.open["product"].append(end)


# Launches ---------------------------------------------------------------------------------------------------------------


def run_launch(launch: Launch, complaints: set[str], seed: int = 0) -> None:
    """Compile a launch for compute capability 9 and run it, program after program."""
    compiled = compile_launch(launch, 90)
    metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    parameters: list[int] = []
    tiles: dict[int, Tiles] = {}
    tensors: list[tuple[int, np.ndarray]] = []
    fixed = {x.name for x in launch.kernel.params if x.is_constexpr}
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        if name in fixed or value is None:
            continue
        if hasattr(value, "block_shape"):
            tiles[len(parameters)] = Tiles(value, metas.pop(0))
            parameters += [0, *value.shape, *value.strides]
        elif isinstance(value, torch.Tensor):
            parameters.append(value.data_ptr())
            if value.numel():
                tensors.append((value.data_ptr(), value.detach().reshape(-1).view(torch.uint8).numpy()))
        else:
            parameters.append(int(np.array(value, F32).view(U32)) if isinstance(value, float) else value & 0xFFFFFFFF)
    given = {"parameters": [*parameters, 0, 0], "tiles": tiles, "tensors": tensors, "shared": compiled.metadata.shared}
    grid = (*launch.grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for place in itertools.product(*map(range, grid)):
            program = Program(compiled.asm["ptx"], given, place, grid, seed)
            program.run()
            complaints |= {f"{launch.kernel.fn.__name__}: {x}" for x in program.complaints}


@contextmanager
def on_cpu(seed: int = 0) -> Iterator[set[str]]:
    """Within it every launch is compiled and run here, on CPU tensors; the complaints."""
    from ckda.ops import dispatch
    from tests.ops import gluon

    complaints: set[str] = set()
    portable = replace(dispatch.BACKENDS["triton-portable"], refuses=lambda call: None)
    with (
        gluon.on_cpu(),
        patch.object(Launch, "__call__", lambda launch: run_launch(launch, complaints, seed)),
        patch("ckda.ops.triton.refuses", lambda call: None),
        patch.dict(dispatch.BACKENDS, {portable.name: portable}),
    ):
        yield complaints


def main(backend: str, settings: dict[str, Any], seed: int) -> None:
    """One call by the 2x rule, forward and backward."""
    from tests.ops.common import check_kernels, compare, make_call

    call = make_call(**settings)
    with on_cpu(seed) as complaints:
        found = compare(call, backend)
    check_kernels([found])
    assert not complaints, "\n".join(sorted(complaints)[:20])


if __name__ == "__main__":
    main(sys.argv[1], eval(sys.argv[2], {"torch": torch}), int(sys.argv[3]))
