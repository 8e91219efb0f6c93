"""The three layers of thm:multilayer through the public operator, in floating point: how long do they stay exact?

Each layer is one call of :func:`ckda.complex_kda` over the whole word. Between the layers stand the same finite lookups
as in exact arithmetic, here to the nearest legal value: the clock's readout to one of 2m numbers, the buffer's to whole
codes, the accumulator's to whole state numbers. The word is followed up to the first wrong lookup.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda import complex_kda
from ckda.record import environment, write_json
from ckda.theory.machines import DFA, WFA, GroupWords, Machine, Permutations, Word, group
from ckda.theory.multilayer import Clock, Step, ThreeLayers, buffer_step, simulate

__all__ = [
    "FloatRun",
    "Lock",
    "clock_horizon",
    "clock_lock",
    "horizon_table",
    "locked_clock",
    "run_clock",
    "run_float",
    "wfa_error",
    "write_horizon_table",
]


@dataclass(frozen=True)
class FloatRun:
    """How far a floating-point run agreed with the direct simulation."""

    length: int  #: tokens asked for
    exact: int  #: leading tokens at which every lookup and the final state were right
    lost_in: str | None  #: the layer that went wrong first
    used: dict[str, float]  #: per layer, the largest error as a share of half the distance to a wrong value (1: lost)


def run_float(
    layers: ThreeLayers,
    word: Word,
    expected: Sequence[Any],
    dtype: torch.dtype = torch.float64,
    unit_keys: bool = True,
    backend: str = "reference",
) -> FloatRun:
    """Run a group or DFA machine through the operator and compare state numbers with the direct simulation.

    Args:
        layers: from :func:`ckda.theory.multilayer.simulate`.
        word: symbols.
        expected: [T] the state (or tuple of images) after every token.
        dtype: of all inputs; the operator keeps its state in float64 if that is float64, else in float32.
        unit_keys: keys of length one as in the paper; False takes the small whole numbers that they are multiples of.

    Example:
        >>> from ckda.theory.machines import DFA
        >>> from ckda.theory.multilayer import simulate
        >>> parity, word = DFA(((0, 1), (1, 0))), [1, 0, 1, 1] * 10
        >>> run_float(simulate(parity), word, parity.trace(word)[1:]).exact
        40
    """
    m, used = layers.m, {}
    readout = run_clock(layers.clock, len(word), dtype, backend)
    truth = torch.arange(1, len(word) + 1) % (2 * m)
    known = torch.tensor([float(o) for o in layers.clock.readouts], dtype=torch.float64)
    good, used["clock"] = _agreement(readout, known[truth], _half_gap(known)[truth])
    lost = "clock" if good < len(word) else None

    steps = [buffer_step(a, int(t), 2 * m) for a, t in zip(word[:good], truth.tolist(), strict=False)]
    codes = _buffer_truth(word[:good], 2 * m)
    readout = _call(steps, torch.zeros(2 * m, 2 * m), dtype, unit_keys, backend)
    kept, used["buffer"] = _agreement(readout, codes, torch.full_like(codes, 0.5))
    good, lost = (kept, "buffer") if kept < good else (good, lost)

    slots = [{i: c for i, c in enumerate(row) if c} for row in codes[:good].int().tolist()]
    steps = [layers.accumulator.step(int(t), row) for t, row in zip(truth[:good].tolist(), slots, strict=True)]
    states = torch.tensor(expected[:good], dtype=torch.float64).view(good, -1)
    readout = _call(steps, _start(layers), dtype, unit_keys, backend)
    kept, used["accumulator"] = _agreement(readout, states, torch.full_like(states, 0.5))
    good, lost = (kept, "accumulator") if kept < good else (good, lost)
    return FloatRun(len(word), good, lost, used)


def run_clock(clock: Clock, length: int, dtype: torch.dtype, backend: str = "reference") -> Tensor:
    """[T, 1] readouts of the clock alone; its key is of length one already and taken as it is."""
    return _call([clock.parameters(None)], torch.tensor([[1.0], [0.0]]), dtype, False, backend, repeat=length)


def clock_horizon(clock: Clock, length: int, dtype: torch.dtype) -> FloatRun:
    """How long the clock alone stays exact.

    Example:
        >>> clock_horizon(Clock(3), 100, torch.float32).exact
        100
    """
    readout, truth = run_clock(clock, length, dtype), torch.arange(1, length + 1) % (2 * clock.m)
    known = torch.tensor([float(o) for o in clock.readouts], dtype=torch.float64)
    good, used = _agreement(readout, known[truth], _half_gap(known)[truth])
    return FloatRun(length, good, "clock" if good < length else None, {"clock": used})


def _by_table(name: str) -> Machine:
    return GroupWords(group(name))


def _on_points(name: str) -> Machine:
    return Permutations.of(group(name))


def _random_dfa(states: int) -> Machine:
    return DFA.random(states, 3, random.Random(states))


class Lock(NamedTuple):
    """From position `start` on the rounded clock repeats itself every `period` steps, bit for bit."""

    start: int
    period: int


def clock_lock(clock: Clock, length: int, dtype: torch.dtype) -> Lock | None:
    """Where the rounded clock falls into an exact cycle of whole turns, or None where it does not within the length.

    The rounded update is a function of the rounded state. Once a state recurs after whole turns, every later readout
    has been seen already: a clock that was right up to there is right at every length.

    Example:
        >>> lock = clock_lock(Clock(2), 100, torch.float64)
        >>> lock.start < 100, lock.period
        (True, 4)
    """
    m = clock.m
    both = [run_clock(Clock(m, query=query), length, dtype) for query in ((1, 0), (0, 1))]
    turns = torch.cat(both, 1)[2 * m - 1 :: 2 * m].tolist()
    seen: dict[tuple[float, ...], int] = {}
    for turn, state in enumerate(map(tuple, turns), start=1):
        if state in seen:
            return Lock(2 * m * seen[state], 2 * m * (turn - seen[state]))
        seen[state] = turn
    return None


def locked_clock(at_least: int, dtype: torch.dtype, length: int = 4000, tries: int = 16) -> tuple[Clock, Lock]:
    """The smallest clock with m >= at_least that locks within the length and is right up to there: right for ever.

    A block may be longer than its program, so any such m serves. Which m lock depends on how a machine rounds.

    Example:
        >>> clock, lock = locked_clock(2, torch.float64)
        >>> clock.m, lock.period
        (2, 4)
    """
    for m in range(at_least, at_least + tries):
        clock = Clock(m)
        lock = clock_lock(clock, length, dtype)
        if lock and clock_horizon(clock, lock.start + lock.period, dtype).lost_in is None:
            return clock, lock
    raise ValueError(
        f"no clock with m from {at_least} to {at_least + tries - 1} locks within {length} steps in {dtype}"
    )


#: rows of the table: name, machine, dtypes
MACHINES: list[tuple[str, Callable[[], Machine], tuple[torch.dtype, ...]]] = [
    *((name, partial(_by_table, name), (torch.float32, torch.float64)) for name in ("S3", "D4", "A4", "S4")),
    *((f"{name} on points", partial(_on_points, name), (torch.float32, torch.float64)) for name in ("S4", "A5", "S5")),
    *((f"DFA, {n} states", partial(_random_dfa, n), (torch.float64,)) for n in (2, 4, 6)),
]


def horizon_table(length: int = 20000, seed: int = 0) -> list[dict[str, Any]]:
    """How long each machine stays exact through the operator with the paper's unit keys, and whether its clock locks.

    Example:
        >>> rows = horizon_table(length=40)
        >>> rows[0]["machine"], rows[0]["dtype"], rows[0]["exact"]
        ('S3', 'float32', 40)
    """
    rows = []
    for name, make, dtypes in MACHINES:
        machine = make()
        word = random.Random(seed).choices(range(len(machine.matrices)), k=length)
        layers, expected = simulate(machine), machine.trace(word)[1:]
        for dtype in dtypes:
            run = run_float(layers, word, expected, dtype)
            lock = clock_lock(layers.clock, length, dtype)
            row = {"machine": name, "m": layers.m, "dtype": str(dtype).removeprefix("torch."), **asdict(run)}
            rows.append({**row, "clock_locks_at": lock.start if lock else None})
    return rows


def write_horizon_table(path: Path, length: int = 20000) -> Path:
    """Measure :func:`horizon_table` and keep it with its environment."""
    return write_json(path, {"rows": horizon_table(length), "environment": environment()})


def wfa_error(wfa: WFA, word: Word, backend: str = "reference") -> Tensor:
    """[T] error of the accumulator's readout in float64, relative to |final| |p_t| where that is not 0.

    The clock and the buffer are taken as exact here: a WFA has no finite set of states to snap to, so this is what
    rounding does to the program of 7n^2 + 3n factors.

    Example:
        >>> import random
        >>> wfa = WFA.random(2, 2, random.Random(0))
        >>> bool(wfa_error(wfa, [0, 1] * 40).max() < 1e-9)
        True
    """
    layers = simulate(wfa)
    size = 2 * layers.m
    slots = [{i: c for i, c in enumerate(row) if c} for row in _buffer_truth(word, size).int().tolist()]
    steps = [layers.accumulator.step(t % size, row) for t, row in enumerate(slots, start=1)]
    readout = _call(steps, _start(layers), torch.float64, True, backend)[:, 0]
    exact = wfa.trace(word)[1:]
    truth = torch.tensor([float(wfa.weight(p)) for p in exact], dtype=torch.float64)
    states = torch.tensor([[float(x) for x in p.entries()] for p in exact], dtype=torch.float64)
    final = torch.tensor([float(x) for x in wfa.final], dtype=torch.float64)
    scale = states.norm(dim=1) * final.norm()
    return (readout - truth).abs() / torch.where(scale > 0, scale, 1.0)


def _agreement(readout: Tensor, truth: Tensor, half_gap: Tensor) -> tuple[int, float]:
    """Leading steps whose nearest legal value is the true one, and the worst share over them."""
    T = len(readout)
    share = ((readout.double() - truth.view(T, -1)).abs() / half_gap.view(T, -1)).amax(1)
    wrong = (~(share < 1)).nonzero()
    good = int(wrong[0]) if len(wrong) else T
    return good, float(share[:good].max()) if good else 0.0


def _half_gap(known: Tensor) -> Tensor:
    """[2m] half the distance from each legal value to its nearest neighbour."""
    distance = (known[:, None] - known).abs()
    return distance.fill_diagonal_(float("inf")).amin(1) / 2


def _buffer_truth(word: Word, size: int) -> Tensor:
    """[T, 2m] the codes that the slots hold after every token."""
    t, slot = torch.arange(1, len(word) + 1)[:, None], torch.arange(size)
    written = t - (t - slot) % size  # the last position up to t that fell into the slot
    tokens = torch.tensor([-1, *word], dtype=torch.float64)
    return tokens[written.clamp_min(0)] + 1


def _start(layers: ThreeLayers) -> Tensor:
    """[K, V] initial state of the accumulator."""
    start = layers.accumulator.start
    S = torch.zeros(layers.accumulator.width, start.ncols(), dtype=torch.float64)
    for i in range(start.nrows()):
        for c in range(start.ncols()):
            S[i, c] = float(start[i, c])
    return S


def _call(
    steps: Sequence[Step], S: Tensor, dtype: torch.dtype, unit_keys: bool, backend: str, repeat: int = 1
) -> Tensor:
    """[T, V] readouts of the first head: one call of the operator with B = H = 1 and scale 1."""
    (K, V), T = S.shape, len(steps)
    q, k, v = torch.zeros(T, K), torch.zeros(T, K), torch.zeros(T, V)
    q, k, v, alpha, beta = q.double(), k.double(), v.double(), torch.ones(T, K).double(), torch.zeros(T).double()
    for t, step in enumerate(steps):
        _fill(q[t], step.queries[0])
        _fill(k[t], step.key)
        _fill(v[t], step.value)
        _fill(alpha[t], step.gate)
        beta[t] = float(step.gamma)
    if unit_keys:
        norm = k.norm(dim=-1)
        k, v, beta = k / norm[:, None], v / norm[:, None], beta * norm**2
    sign = torch.where(alpha < 0, -1, 1).to(torch.int8)

    def shaped(x: Tensor, to: torch.dtype = dtype) -> Tensor:
        return x.repeat_interleave(repeat, 0).to(to)[None, :, None]

    o, _ = complex_kda(
        shaped(q),
        shaped(k),
        shaped(v),
        shaped(alpha.abs().log()),
        shaped(beta),
        sign=shaped(sign, torch.int8),
        scale=1.0,
        initial_state=S.to(torch.float64 if dtype is torch.float64 else torch.float32)[None, None],
        backend=backend,
    )
    return o[0, :, 0]


def _fill(row: Tensor, entries: Any) -> None:
    for i, x in entries.items():
        row[i] = float(x)
