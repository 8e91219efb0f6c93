"""How long each construction stays exact when the operator runs it in floating point.

The constructions are exact over a number field (app:tracking-precision); floats round the keys and every update. Here a
random word is fed to `ckda.complex_kda` and the output of one fixed query (lem:finite-query-readout) is decoded by the
nearest exact output at every step. A construction is exact up to t when every prefix up to t decodes to the state that
exact arithmetic gives. All heads run as rows of one batch, padded with coordinates that nothing touches.

Example:
    >>> row, = measure(programs(["S3"]), length=50, dtype=torch.float32, words=4)
    >>> row.name, row.first_error, row.worst < 1e-5
    ('S3', None, True)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree

from ckda import complex_kda
from ckda.groups import group
from ckda.record import environment, write_json
from ckda.theory.claims import Evidence, Refuted, claim
from ckda.theory.layers import Stage, best_query, enumerate_states, readouts
from ckda.theory.obstructions import transpositions
from ckda.theory.verdicts import verdict

__all__ = [
    "GROUPS",
    "Measured",
    "Program",
    "as_markdown",
    "deltaproduct_program",
    "exactness_table",
    "measure",
    "programs",
    "write_table",
]

GROUPS = ("Z2", "Z3", "Z7", "Z60", "S3", "D4", "D30", "A4", "S4", "A5", "Q8", "A4xZ5", "A5xZ2")  #: rows of the table
SEGMENT = 2000  #: tokens per call of the operator


@dataclass(frozen=True, eq=False)
class Program:
    """What one head is fed: for every input m small steps (key, sign, beta), a query, and the exact outputs."""

    name: str  #: the group of the layer
    step: np.ndarray  #: [G, states] the next state of the head
    keys: np.ndarray  #: [G, m, K]
    signs: np.ndarray  #: [G, m, K]
    beta: np.ndarray  #: [G, m]
    query: np.ndarray  #: [K] a unit vector
    outputs: np.ndarray  #: [states, K]


@dataclass(frozen=True)
class Measured:
    """One row of the table: how far the words stayed exact, and the largest distance from an exact output."""

    name: str
    dimensions: list[int]
    dtype: str
    length: int
    words: int
    normalize: bool  #: whether the operator normalised the keys (normalize_qk), which keeps beta = 2 a reflection
    first_error: int | None  #: the first prefix (over all words) that decodes wrongly; None: none up to `length`
    worst: float  #: largest distance of an output from the nearest exact one
    radius: float  #: half the smallest distance of two exact outputs: beyond it decoding is no longer sure


def stage_program(name: str, stage: Stage) -> Program:
    """The program of a CKDA head: one step per input, beta = 2."""
    states = enumerate_states(stage.transitions)
    unit = best_query(states.matrices)
    keys = np.array([t.unit_key() for t in stage.transitions])[:, None]
    signs = np.array([t.signs for t in stage.transitions])[:, None]
    beta = np.full((len(keys), 1), 2.0)
    return Program(name, states.step.T, keys, signs, beta, unit, readouts(states.matrices, unit))


def programs(names: Sequence[str]) -> list[Program]:
    """The programs of the layers that :func:`ckda.theory.verdicts.verdict` builds for these groups, head by head."""
    found = []
    for name in names:
        G = group(name)
        layer = verdict(G).layer
        if layer is None:
            raise ValueError(f"{name}: {verdict(G)}")
        found += [stage_program(name, stage) for stage in layer.stages]
    return found


def deltaproduct_program(n: int = 5) -> Program:
    """S_n by DeltaProduct with n - 1 factors: that many steps of the operator per input, no signs."""
    G = group(f"S{n}")
    keys, beta = np.zeros((G.order, n - 1, n)), np.zeros((G.order, n - 1))
    keys[:, :, 0] = 1.0
    for g, images in enumerate(G.labels):
        for step, (i, j) in enumerate(reversed(transpositions(images))):
            keys[g, step] = (np.arange(n) == i) * 0.5**0.5 - (np.arange(n) == j) * 0.5**0.5
            beta[g, step] = 2.0
    query = np.arange(1.0, n + 1) / np.linalg.norm(np.arange(1.0, n + 1))
    outputs = np.array([query[list(images)] for images in G.labels])
    return Program(f"S{n} (DeltaProduct_{n - 1})", G.table, keys, np.ones(keys.shape), beta, query, outputs)


def _padded(x: np.ndarray, width: int, value: float) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])], constant_values=value)


class _Rows:
    """The batch: `words` rows for every program, all with the same number m of small steps per input."""

    def __init__(self, items: Sequence[Program], words: int, dtype: torch.dtype, seed: int) -> None:
        self.items, self.words, self.dtype = items, words, dtype
        self.width = max(p.keys.shape[-1] for p in items)
        self.rngs = {p.name: np.random.default_rng(seed) for p in items}
        self.sizes = np.array([p.step.shape[1] for p in items])
        self.offset = np.cumsum([0, *(p.step.size for p in items[:-1])])
        self.table = np.concatenate([p.step.ravel() for p in items])
        self.place = np.zeros((len(items), words), int)  # the state each row is in
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.state = torch.eye(self.width, dtype=wide).expand(len(items) * words, 1, -1, -1).contiguous()
        self.trees = [cKDTree(p.outputs) for p in items]

    def draw(self, tokens: int) -> list[np.ndarray]:
        """For each program [words, tokens] of inputs; heads of one layer see the same word."""
        words = {p.name: self.rngs[p.name].integers(0, len(p.step), (self.words, tokens)) for p in self.items}
        return [words[p.name] for p in self.items]

    def feed(self, inputs: list[np.ndarray], backend: str, normalize: bool) -> np.ndarray:
        """Run the operator; outputs [programs, words, tokens, K] after the last small step of every token."""
        steps = self.items[0].keys.shape[1]
        W, (words, tokens) = self.width, inputs[0].shape
        key = np.concatenate([_padded(p.keys, W, 0.0)[x] for p, x in zip(self.items, inputs, strict=True)])
        sign = np.concatenate([_padded(p.signs, W, 1.0)[x] for p, x in zip(self.items, inputs, strict=True)])
        beta = np.concatenate([p.beta[x] for p, x in zip(self.items, inputs, strict=True)])
        query = np.concatenate([np.tile(_padded(p.query, W, 0.0), (words, 1)) for p in self.items])
        shape = (len(key), tokens * steps, 1, W)
        k = torch.from_numpy(key.reshape(shape)).to(self.dtype)
        q = torch.from_numpy(query)[:, None, None].to(self.dtype).expand(shape).contiguous()
        o, state = complex_kda(
            q,
            k,
            torch.zeros_like(k),
            torch.zeros_like(k),
            torch.from_numpy(beta.reshape(shape[:3])).to(self.dtype),
            sign=torch.from_numpy(sign.reshape(shape)).to(torch.int8),
            normalize_qk=normalize,
            scale=1.0,
            initial_state=self.state,
            output_final_state=True,
            backend=backend,
        )
        assert state is not None
        self.state = state
        return o[:, steps - 1 :: steps, 0].double().numpy().reshape(len(self.items), words, tokens, W)

    def truth(self, inputs: list[np.ndarray]) -> np.ndarray:
        """The states [programs, words, tokens], all programs in one flat table."""
        x = self.offset[:, None, None] + np.stack(inputs) * self.sizes[:, None, None]
        found = np.empty(x.shape, int)
        for t in range(x.shape[2]):
            self.place = found[:, :, t] = self.table[x[:, :, t] + self.place]
        return found


def measure(
    items: Sequence[Program],
    length: int,
    dtype: torch.dtype,
    words: int = 8,
    seed: int = 0,
    backend: str = "reference",
    normalize: bool = False,
) -> list[Measured]:
    """Run random words through the operator and report, per group, the first prefix decoded wrongly.

    All programs must take the same number of small steps per input. A layer of several heads is exact while each of its
    heads is.
    """
    rows = _Rows(items, words, dtype, seed)
    first: list[int | None] = [None] * len(items)
    worst = [0.0] * len(items)
    with torch.no_grad():
        for start in range(0, length, SEGMENT):
            inputs = rows.draw(min(SEGMENT, length - start))
            outputs, truth = rows.feed(inputs, backend, normalize), rows.truth(inputs)
            for i, p in enumerate(items):
                o = np.nan_to_num(outputs[i][..., : p.outputs.shape[1]], nan=1e30, posinf=1e30, neginf=-1e30)
                distance, nearest = rows.trees[i].query(o)
                worst[i] = max(worst[i], float(distance.max()))
                wrong = np.flatnonzero((nearest != truth[i]).any(axis=0))
                if len(wrong) and first[i] is None:
                    first[i] = start + int(wrong[0]) + 1
    run = {"dtype": str(dtype).removeprefix("torch."), "length": length, "words": words, "normalize": normalize}
    return _by_layer(items, first, worst, run)


def _by_layer(
    items: Sequence[Program], first: list[int | None], worst: list[float], run: dict[str, Any]
) -> list[Measured]:
    found = []
    for name in dict.fromkeys(p.name for p in items):
        mine = [i for i, p in enumerate(items) if p.name == name]
        errors = [e for i in mine if (e := first[i]) is not None]
        radii = [_radius(items[i].outputs) for i in mine]
        dimensions = [items[i].keys.shape[-1] for i in mine]
        largest = max(worst[i] for i in mine)
        error = min(errors, default=None)
        found.append(Measured(name, dimensions, first_error=error, worst=largest, radius=min(radii), **run))
    return found


def _radius(outputs: np.ndarray) -> float:
    """Half the smallest distance of two outputs; 1 where there is only one."""
    return 1.0 if len(outputs) < 2 else float(cKDTree(outputs).query(outputs, k=2)[0][:, 1].min()) / 2


#: dtype, normalize_qk, tokens of one run of the table
RUNS = (
    ("float64", False, 200_000),
    ("float32", False, 500_000),
    ("float32", True, 500_000),
    ("bfloat16", False, 20_000),
    ("bfloat16", True, 20_000),
)


def exactness_table(
    runs: Sequence[tuple[str, bool, int]] = RUNS, words: int = 2, names: Sequence[str] = GROUPS
) -> list[Measured]:
    """The table: every group, and S5 by DeltaProduct_4 on a quarter of the tokens (four steps each).

    Example:
        >>> [row.name for row in exactness_table([("float32", True, 40)], names=["S4"])]
        ['S4', 'S5 (DeltaProduct_4)']
    """
    items, delta = programs(names), [deltaproduct_program()]
    rows = []
    for dtype, normalize, length in runs:
        kind = getattr(torch, dtype)
        rows += measure(items, length, kind, words, normalize=normalize)
        rows += measure(delta, max(1, length // 4), kind, words, normalize=normalize)
    return rows


def as_markdown(rows: Sequence[Measured]) -> str:
    r"""The table for a document: a row per group, a column per run; the drift where all of a run was exact.

    Example:
        >>> table = as_markdown(exactness_table([("float64", False, 20)], names=["Z2"]))
        >>> print(table.splitlines()[0], table.splitlines()[2][:18], sep="\n")
        | group | d | radius | float64, 20 |
        | Z2 | 2 | 1 | all
    """
    delta = deltaproduct_program().name
    runs = list(dict.fromkeys((r.dtype, r.normalize, r.length) for r in rows if r.name != delta))
    heads = [f"{dtype}{' normalised' if normalize else ''}, {length}" for dtype, normalize, length in runs]
    lines = ["| group | d | radius | " + " | ".join(heads) + " |", "|---" * (3 + len(runs)) + "|"]
    for name in dict.fromkeys(r.name for r in rows):
        mine = [r for r in rows if r.name == name]
        title = f"{name}, a quarter of the tokens" if name == delta else name
        cells = [title, "+".join(map(str, mine[0].dimensions)), f"{mine[0].radius:.2g}"]
        cells += [f"all ({r.worst:.0e})" if r.first_error is None else f"{r.first_error - 1}" for r in mine]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(path: str | Path, runs: Sequence[tuple[str, bool, int]] = RUNS) -> Path:
    """Measure the table and write it as JSON with its environment."""
    rows = [asdict(row) for row in exactness_table(runs)]
    return write_json(path, {"environment": environment(), "backend": "reference", "rows": rows})


def check_exact(rows: Sequence[Measured]) -> float:
    """No word was decoded wrongly; returns the least fraction of the radius that was left."""
    for row in rows:
        if row.first_error is not None:
            raise Refuted(f"{row.name} in {row.dtype}: prefix {row.first_error} decodes wrongly")
    return min(1 - row.worst / row.radius for row in rows)


@claim(
    "thm:main-positive/operator", "The constructions, run by ckda.complex_kda in float64 and float32, decode exactly"
)
def operator_exactness(effort: float = 1.0) -> Evidence:
    """Every head of the table through the operator: 4000 steps in float64 and float32 at effort 1, all prefixes."""
    length, names = max(100, int(4000 * effort)), GROUPS if effort >= 0.5 else ("Z7", "S3", "S4", "A5", "Q8")
    items = programs(names)
    rows = [row for dtype in (torch.float64, torch.float32) for row in measure(items, length, dtype, words=4)]
    rows += [
        row for dtype in (torch.float64, torch.float32) for row in measure([deltaproduct_program()], length // 4, dtype)
    ]
    margin = check_exact(rows)
    drift = {dtype: max(row.worst for row in rows if row.dtype == dtype) for dtype in ("float64", "float32")}
    note = f"{length} steps; largest drift {drift['float64']:.1e} (float64), {drift['float32']:.1e} (float32)"
    return Evidence(sum(row.length * row.words for row in rows), "numeric", margin=margin, note=note)
