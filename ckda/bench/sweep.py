"""``ckda bench --sweep``: what each legal change of a call costs beside the main one. Rows are data, correctness is checked first.

The main row is dense bfloat16 with the signed gate, 16 heads of 128, 4 x 8192 tokens; every other row changes one thing, and has
as many tokens unless its name says otherwise. Unbounded gates are drawn in two regimes: mild (mean log|alpha| of -0.03) and harsh
(mean -8, one in a hundred zero where the gate can be).
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.ops import complex_kda

__all__ = [
    "COUNT",
    "MAIN",
    "ROWS",
    "Row",
    "bounds",
    "draw",
    "estimate",
    "inputs",
    "measure_row",
    "run_once",
    "smaller",
    "sweep",
]

MEAN_LOG = {"mild": 0.03, "harsh": 8.0}
COUNT = 30  #: timed calls
RAGGED = (
    0.01, 2.2, 0.4, 1.3, 0.7, 1.9, 0.05, 1.1, 0.6, 1.6, 0.9, 1.4, 0.3, 2.0, 0.8, 1.2, 0.2, 1.7, 0.5, 1.5, 1.0, 1.8, 0.1,
)  # fmt: skip


class Row(NamedTuple):
    """One call: B x T tokens, H query and HV value heads of K x V channels."""

    name: str
    B: int = 4
    T: int = 8192
    H: int = 16
    HV: int = 16
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    gate_dtype: str | None = None  #: of g; None: as the rest
    gate: str | None = "signed"
    regime: str = "mild"
    sequences: int = 0  #: packed ones of different lengths; 0: not packed
    states: bool = False  #: with an initial and a final state
    separate: bool = False  #: with erase and write gates instead of beta
    given: bool = False  #: with beta itself instead of its logit
    backend: str = "auto"
    at_most: float | None = None  #: the aim: forward+backward over the main row's
    limit: str | None = None  #: what stands in the way of it, where it was not reached

    @property
    def tokens(self) -> int:
        """B * T."""
        return self.B * self.T


BORDERS = (
    "a chunk that decays by more than 2^-100 goes by five levels of borders in the backward, each an exponential a gate and eight "
    "products of 32 tokens, one after the other; blocks of 8 from their middle, as in the forward pass, do not fit the registers "
    "there, and what spills takes longer than what they save"
)
RANGE = "float16 lacks the range of decays: a chunk that decays by more than 2^-4 goes by five levels of borders"
PORTABLE = (
    "the portable kernels serve it: three TF32 products of float32 tiles, whose operands do not fit the registers"
)
WIDE = "channels are held in two halves, which read the values twice"
NARROW = "tiles have 64 channels, half of them empty, and a chunk's squares are as large as its keys"
MAIN = Row("main")
ROWS = (
    MAIN,
    Row("softplus", gate="softplus", at_most=1.2, limit=BORDERS),
    Row("softplus, harsh", gate="softplus", regime="harsh", at_most=1.4, limit=BORDERS),
    Row("given gates", gate=None, at_most=1.2, limit=BORDERS),
    Row("given gates, harsh", gate=None, regime="harsh", at_most=1.4, limit=BORDERS),
    Row("float16", dtype="float16", at_most=1.1, limit=RANGE),
    Row("float16, 32 heads of 64", H=32, HV=32, K=64, V=64, dtype="float16"),
    Row("float16, harsh", dtype="float16", regime="harsh"),
    Row("float32 gates", gate_dtype="float32", at_most=1.3),
    Row(
        "24 packed sequences",
        B=1,
        T=32768,
        sequences=24,
        at_most=1.1,
        limit="more programs begin and end than for sequences of equal length, and their last chunks leave without the accelerator",
    ),
    Row("2048 packed sequences", B=1, T=32768, sequences=2048),
    Row("16 x 2000 tokens", B=16, T=2000, at_most=1.1),
    Row("8 query heads", H=8, at_most=1.1, limit="dq and dk are summed over their groups by a kernel of its own"),
    Row("states", states=True),
    Row("erase and write gates", separate=True, at_most=1.5),
    Row("8 heads of 256", H=8, HV=8, K=256, V=256, at_most=1.8, limit=WIDE),
    Row("8 heads of 256 x 128", H=8, HV=8, K=256),
    Row("8 heads of 256, beta given", H=8, HV=8, K=256, V=256, given=True),
    Row("8 heads of 256, float16", H=8, HV=8, K=256, V=256, dtype="float16"),
    Row("8 heads of 128 x 256", H=8, HV=8, V=256),
    Row("8 heads of 128 x 256, float16", H=8, HV=8, V=256, dtype="float16"),
    Row("8 heads of 192", H=8, HV=8, K=192, V=192),
    Row("16 heads of 100", K=100, V=100),
    Row("16 heads of 96", K=96, V=96, at_most=1.2),
    Row("64 heads of 32", H=64, HV=64, K=32, V=32, at_most=1.5, limit=NARROW),
    Row("128 heads of 16", H=128, HV=128, K=16, V=16),
    Row("everything float32", dtype="float32", at_most=5.0, limit=PORTABLE),
    Row("float32, softplus, harsh", dtype="float32", gate="softplus", regime="harsh"),
    Row("float32, 8 heads of 256", H=8, HV=8, K=256, V=256, dtype="float32"),
    Row("one sequence", B=1, T=32768),
    Row("1 x 1024 tokens", B=1, T=1024),
)


def _logs(row: Row, random: torch.Generator, device: str) -> Tensor:
    """-log|alpha| [B, T, HV, K] of the regime's mean."""
    shape = (row.B, row.T, row.HV, row.K)
    return MEAN_LOG[row.regime] * torch.empty(shape, device=device).exponential_(generator=random)


def _raw_gate(row: Row, random: torch.Generator, device: str) -> Tensor:
    """g whose gate has these logs; a bounded gate's are cut at 4.9, and its signs are random."""
    x = _logs(row, random, device)
    if row.gate is None:
        zero = torch.rand(x.shape, generator=random, device=device) < 0.01
        return (-x).masked_fill(zero, -math.inf) if row.regime == "harsh" else -x
    if row.gate == "softplus":
        return torch.where(x > 20, x, torch.expm1(x.clamp_min(1e-6)).log())
    alpha = torch.exp(-x.clamp(1e-6, 4.9))
    r = (alpha - math.exp(-5)) / (1 - math.exp(-5))
    sign = 1 - 2 * (torch.rand(x.shape, generator=random, device=device) < 0.5).float()
    return sign * 2 * torch.atanh(r.clamp(1e-6, 1 - 1e-6))


def packed_bounds(row: Row) -> list[int]:
    """cu_seqlens of `row.sequences` sequences of unequal lengths, none of them a whole number of chunks.

    Example:
        >>> packed_bounds(Row("", B=1, T=1000, sequences=3))[::3]
        [0, 1000]
    """
    weights = [RAGGED[i % len(RAGGED)] for i in range(row.sequences)]
    ends = [round(row.T * sum(weights[: i + 1]) / sum(weights)) for i in range(row.sequences)]
    return [0, *(min(row.T, end | 1) for end in ends[:-1]), row.T]


def inputs(row: Row, device: str, seed: int = 0) -> dict[str, Any]:
    """The arguments of the row's call, floating tensors as leaves."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, row.dtype)
    gate_dtype = getattr(torch, row.gate_dtype) if row.gate_dtype else dtype

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=device)

    B, T = row.B, row.T
    call: dict[str, Any] = {
        "q": normal(B, T, row.H, row.K).to(dtype),
        "k": normal(B, T, row.H, row.K).to(dtype),
        "v": normal(B, T, row.HV, row.V).to(dtype),
        "g": _raw_gate(row, random, device).to(gate_dtype),
    }
    if row.separate:
        call |= {
            "erase": torch.sigmoid(normal(B, T, row.HV, row.K)).to(dtype),
            "write": normal(B, T, row.HV, row.V).to(dtype),
        }
    else:
        beta = normal(B, T, row.HV)
        call["beta"] = (2 * torch.sigmoid(beta) if row.given else beta).to(dtype)
    if row.gate is not None:
        call |= {"A_log": torch.zeros(row.HV, device=device), "dt_bias": torch.zeros(row.HV * row.K, device=device)}
    if row.states:
        call["initial_state"] = normal(B, row.HV, row.K, row.V)
    for x in call.values():
        x.requires_grad_()
    if row.sequences:
        call["cu_seqlens"] = torch.tensor(packed_bounds(row), dtype=torch.int32, device=device)
    options = {"gate": row.gate, "normalize_qk": True, "output_final_state": row.states}
    return call | options | ({"beta": None} if row.separate else {"beta_range": None if row.given else 2})


def _leaves(call: dict[str, Any]) -> list[Tensor]:
    return [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]


def errors(row: Row, device: str) -> dict[str, float]:
    """Relative root mean square errors of o and the gradients of a short call of the row's kind, against float64."""
    short = row._replace(B=1, T=160 if row.T % 32 == 0 else 150, sequences=min(row.sequences, 3))
    call = inputs(short, device)
    exact: dict[str, Any] = {
        n: x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in call.items()
    }
    o, p = complex_kda(**call, backend=row.backend)[0], complex_kda(**exact, backend="chunked")[0]
    do = torch.randn_like(o)
    got = [o, *torch.autograd.grad(o, _leaves(call), do)]
    wanted = [p, *torch.autograd.grad(p, _leaves(exact), do.double())]
    names = ["o", *(f"d{name}" for name, x in call.items() if isinstance(x, Tensor) and x.requires_grad)]
    return {
        name: ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()
        for name, a, b in zip(names, got, wanted, strict=True)
    }


def _elapsed(call: Callable[[], Any], count: int, device: str) -> tuple[float, float]:
    """Milliseconds a call, back to back, and the milliseconds that the host took to issue it."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        taken = 1e3 * (time.perf_counter() - start) / count
        return taken, taken
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    first.record()
    for _ in range(count):
        call()
    last.record()
    issued = 1e3 * (time.perf_counter() - start) / count
    last.synchronize()
    return first.elapsed_time(last) / count, issued


def _times(call: Callable[[], Any], device: str, count: int) -> dict[str, float]:
    """Back to back, and waited for (median)."""
    for _ in range(3):
        call()
    mean, _ = _elapsed(call, count, device)
    return {"mean": mean, "waited": statistics.median(_elapsed(call, 1, device)[0] for _ in range(count))}


def _host_time(call: Callable[[], Any], device: str, count: int) -> float:
    """What issuing takes where the GPU does not hold the host up: three calls at a time, the median."""
    for _ in range(3):
        call()
    return statistics.median(_elapsed(call, 3, device)[1] for _ in range(max(count // 3, 1)))


def _calls(row: Row, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward, and forward+backward, of the row."""
    call = inputs(row, device)
    leaves, do = _leaves(call), torch.randn_like(call["v"])

    def forward() -> None:
        with torch.no_grad():
            complex_kda(**call, backend=row.backend)

    def both() -> None:
        torch.autograd.grad(complex_kda(**call, backend=row.backend)[0], leaves, do)

    return forward, both


def run_once(row: Row, device: str) -> None:
    """All that measuring the row calls, once, so that it is compiled."""
    errors(row, device)
    for call in _calls(row, device):
        call()


def measure_row(row: Row, device: str, count: int = COUNT) -> dict[str, Any]:
    """Times of forward and forward+backward, and peak memory; the host's time is taken afterwards (:func:`_measure_host`)."""
    forward, both = _calls(row, device)
    start = time.perf_counter()
    both()
    peak = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    first = time.perf_counter() - start
    both()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "row": row._asdict(),
        "first_call_s": first,
        "forward": _times(forward, device, count),
        "forward+backward": _times(both, device, count),
        "peak_bytes": peak,
    }


def _measure_host(x: dict[str, Any], row: Row, device: str, count: int) -> None:
    """The host's time of a row that was measured, and how busy the host was with other things."""
    forward, both = _calls(row, device)
    x["forward"]["host"] = _host_time(forward, device, count)
    x["forward+backward"]["host"] = _host_time(both, device, count)
    x["host_load"] = os.getloadavg()[0]


def _line(x: dict[str, Any], smoke: bool) -> str:
    both = x["forward+backward"]
    ratio = "" if smoke else f" ({both['mean'] / x['main_ms']:5.2f})"
    return (
        f"{x['row']['name']:28} forward {x['forward']['mean']:7.3f}, forward+backward {both['mean']:7.3f} ms"
        f"{ratio}, waited for {both['waited']:.3f}, error {max(x['errors'].values()):.1e}"
    )


def sweep(
    rows: tuple[Row, ...],
    device: str,
    count: int,
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None],
    known: Sequence[dict[str, Any]] = (),
    smoke: bool = False,
) -> list[dict[str, Any]]:
    """Every row checked and measured but those that are `known`; one that fails says why and the others go on.

    `keep` gets what there is after each. Every row keeps the main row's time, taken just after its own: a GPU that becomes warm
    slows both alike, and rows of several runs make one table. With `smoke`, ratios are left unsaid: they mean nothing.
    """
    found = sorted(known, key=lambda x: x["row"]["name"] != MAIN.name)
    done = {x["row"]["name"] for x in found}
    main = next(row for row in rows if row.name == MAIN.name)
    for row in [row for row in rows if row.name not in done]:
        start = time.perf_counter()
        try:
            x = {"errors": errors(row, device)} | measure_row(row, device, count)
            main_ms = _times(_calls(main, device)[1], device, count)["mean"] if row != main else None
        except Exception as error:  # Triton's own among them: of resources, of compiling
            if row.name == MAIN.name:
                raise
            found.append({"row": row._asdict(), "failed": str(error)[:300]})
            say(f"{row.name:28} failed: {error!s:.120}")
            keep(found)
            continue
        x |= {"main_ms": main_ms or x["forward+backward"]["mean"], "seconds": time.perf_counter() - start}
        say(_line(x, smoke))
        found.append(x)
        keep(found)
    by_name = {row.name: row for row in rows}
    for x in found:
        if "failed" not in x and "host" not in x["forward"] and x["row"]["name"] in by_name:
            _measure_host(x, by_name[x["row"]["name"]], device, count)
            keep(found)
            say(f"{x['row']['name']:28} host {x['forward+backward']['host']:.3f} ms, load {x['host_load']:.1f}")
    return found


def estimate(row: Row, jobs: int = 1) -> float:
    """Seconds of an H200 that a row is likely to take: compiling by so many processes, the check against float64, and its calls."""
    both = 2.2e-3 * {"float32": 8.0}.get(row.dtype, 4.0 if max(row.K, row.V) > 128 else 1.5)
    return 2.3 + 4.5 / min(jobs, 3) + both * (2 * COUNT + COUNT + 20)


def bounds(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What was aimed at and reached: forward+backward of every row over the main row's of the same run."""
    main = next(x for x in found if x["row"]["name"] == MAIN.name)["forward+backward"]["mean"]
    reached = {}
    for x in found:
        ratio, aim, reason = None, x["row"]["at_most"], x.get("failed")
        if reason is None:
            ratio = x["forward+backward"]["mean"] / x.get("main_ms", main)
            reason = x["row"]["limit"] if aim is not None and ratio > aim else None
        reached[x["row"]["name"]] = {"at_most": aim, "reached": ratio, "reason": reason}
    return {"main_ms": main, "rows": reached}


def smaller(row: Row) -> Row:
    """The row in a smoke run: a call of few tokens, and no aim, which is for calls of full size on a GPU."""
    row = row._replace(B=1, T=40, K=16, V=16, H=row.H // 8, HV=row.HV // 8, sequences=min(row.sequences, 3))
    return row._replace(at_most=None, limit=None)


def draw(found: list[dict[str, Any]], path: Path, smoke: bool = False) -> Path | None:
    """The bars of every row, with its aim; with `smoke`, without ratios; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = bounds(found)
    rows = [x for x in found if "failed" not in x]
    figure, axis = plt.subplots(figsize=(8, 0.6 + 0.3 * len(rows)))
    for place, x in enumerate(rows):
        both, aim = x["forward+backward"]["mean"], x["row"]["at_most"]
        axis.barh(place, both, color="C0", height=0.7)
        axis.barh(place, x["forward"]["mean"], color="C1", height=0.7)
        ratio = table["rows"][x["row"]["name"]]["reached"]
        mark = 0.0 if aim is None else aim * table["main_ms"]
        text = f" {both:.2f}" if smoke else f" {both:.2f} ({ratio:.2f})"
        axis.text(max(both, mark), place, text, va="center", fontsize=7)
        if aim is not None:
            axis.plot([mark] * 2, [place - 0.4, place + 0.4], color="black")
    axis.set_yticks(range(len(rows)), [x["row"]["name"] for x in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    more = "; a smoke run" if smoke else " (over the main row's), aim (black)"
    axis.set_xlabel(f"ms: forward (orange), forward+backward{more}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
