"""Hopper's kernels by the 2x rule: on a CPU by plain torch (tests/ops/gluon.py), and on a GPU."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckda import complex_kda
from ckda.ops.call import Call as OpCall
from tests.ops.common import (
    HARSH,
    Comparison,
    assert_same_bits,
    check_kernels,
    check_scales,
    compare,
    excesses,
    harsh,
    make_call,
    perturbed,
    run,
)
from tests.ops.test_triton import _reflections, check_members

pytest.importorskip("triton")
from triton.experimental import gluon as triton_gluon
from triton.experimental.gluon import language as gl

from ckda.ops.triton import chunk, hopper, plan
from ckda.ops.triton.compile import example
from ckda.ops.triton.hopper import intra, launch, passes
from ckda.ops.triton.hopper.tile import AHEAD, ask, no_weaker, settle, turns
from ckda.ops.triton.launch import Launch
from ckda.ops.triton.portable import launch as portable
from tests.ops import gluon

BF16, FP16 = torch.bfloat16, torch.float16
WIDE: dict[str, Any] = {"K": 256, "V": 256, "dtype": BF16}

#: all gates, both dtypes, every width of tiles, whole and broken chunks, packing, groups
CASES: dict[str, dict[str, Any]] = {
    "signed": {"T": 64, "K": 64, "V": 64, "A_log": True, "dt_bias": True, "initial": True},
    "signed, broken chunk": {"T": 70, "K": 128, "V": 128, "initial": True},
    "softplus": {"T": 64, "K": 64, "V": 128, "gate": "softplus", "A_log": True, "dt_bias": True},
    "given, packed": {"T": 70, "K": 64, "V": 64, "gate": None, "beta_range": None, "cu_seqlens": [0, 0, 33, 34, 70]},
    "heads of 96, groups": {"T": 40, "K": 96, "V": 40, "H": 1, "HV": 2, "dt_bias": True},
    "float32 gates": {"T": 33, "K": 32, "V": 32, "gate_dtype": torch.float32},
    "separate": {"T": 40, "K": 64, "V": 64, "separate": True, "initial": True},
    "values of 256": {"T": 64, "K": 128, "V": 256, "initial": True},
    "float16": {"T": 40, "K": 128, "V": 64, "dtype": FP16, "initial": True},
    "float16, narrow": {"T": 64, "K": 64, "V": 64, "dtype": FP16, "gate": "softplus"},
    "256 x 256": {"T": 96, **WIDE, "A_log": True, "dt_bias": True, "initial": True},
    "256 x 64, softplus": {"T": 64, **WIDE, "V": 64, "gate": "softplus", "A_log": True, "initial": True},
    "256 x 200, broken chunk": {"T": 70, **WIDE, "V": 200, "gate_dtype": torch.float32, "initial": True},
    "256 x 256, packed": {"T": 70, **WIDE, "gate": None, "beta_range": 2, "cu_seqlens": [0, 0, 33, 34, 70]},
    "256 x 192, float16": {"T": 40, **WIDE, "V": 192, "dtype": FP16, "initial": True},
    "256 x 96, separate, groups": {"T": 40, **WIDE, "V": 96, "separate": True, "H": 1, "HV": 2},
    "256 x 128, sigmoid": {"T": 64, **WIDE, "V": 128, "gate": "sigmoid", "beta_range": 1},
    "256 x 256, beta given": {"T": 70, **WIDE, "beta_range": None, "initial": True},
    "256 x 96, beta given, packed": {
        "T": 70, **WIDE, "V": 96, "gate": None, "beta_range": None, "cu_seqlens": [0, 0, 33, 34, 70, 70], "H": 1, "HV": 2
    },
    "256 x 64, beta given, float16": {"T": 64, **WIDE, "V": 64, "dtype": FP16, "beta_range": None, "gate_dtype": torch.float32},
    "16 x 24, packed": {
        "T": 70, "K": 16, "V": 24, "A_log": True, "dt_bias": True, "initial": True, "cu_seqlens": [0, 0, 33, 34, 70]
    },
    "24 x 8, sigmoid, groups": {"T": 64, "K": 24, "V": 8, "gate": "sigmoid", "beta_range": 1, "H": 1, "HV": 2},
}  # fmt: skip

#: channels and values that no kernel takes: filled up
FILLED: dict[str, dict[str, Any]] = {
    "100 x 60": {"T": 64, "K": 100, "V": 60, "A_log": True, "dt_bias": True, "initial": True},
    "100 x 33, given, groups": {
        "T": 70, "K": 100, "V": 33, "gate": None, "beta_range": None, "gate_dtype": torch.float32, "H": 1, "HV": 2, "initial": True
    },
    "5 x 9, softplus, packed": {
        "T": 70, "K": 5, "V": 9, "gate": "softplus", "A_log": True, "dt_bias": True, "initial": True,
        "cu_seqlens": [0, 0, 33, 34, 70, 70],
    },
    "16 x 100, sigmoid": {"T": 33, "K": 16, "V": 100, "gate": "sigmoid", "dt_bias": True, "scale": 0.7},
    "130 x 24, separate, packed": {
        "T": 70, "K": 130, "V": 24, "separate": True, "gate_dtype": torch.float32, "initial": True, "cu_seqlens": [0, 0, 33, 70]
    },
    "130 x 70, given": {"T": 40, "K": 130, "V": 70, "gate": None, "beta_range": None, "initial": True},
    "192 x 160": {"T": 64, "K": 192, "V": 160, "A_log": True, "dt_bias": True, "initial": True, "normalize_qk": False},
    "192 x 130, float16": {"T": 40, "K": 192, "V": 130, "dtype": FP16, "dt_bias": True, "initial": True},
    "100 x 20, float16, softplus": {"T": 40, "K": 100, "V": 20, "dtype": FP16, "gate": "softplus", "initial": True},
    "128 x 256, float16": {"T": 40, "K": 128, "V": 256, "dtype": FP16, "gate": None, "initial": True},
}  # fmt: skip

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available() or not hopper.tried(), reason="for a CPU, and the Triton that they are written for"
)


@pytest.fixture
def emulated() -> Iterator[None]:
    with gluon.on_cpu():
        yield


def _call(settings: dict[str, Any]) -> dict[str, Any]:
    return make_call(**({"B": 1, "H": 1, "dtype": BF16} | settings))


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_keep_the_rule(case: str) -> None:
    check_kernels([compare(_call(CASES[case]), "triton-hopper")])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@on_a_cpu
@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("case", FILLED)
def test_what_is_filled_up_keeps_the_rule(case: str) -> None:
    call = _call(FILLED[case])
    assert hopper.filled(OpCall(**call))
    draw = compare(call, "triton-hopper")
    check_kernels([draw])
    assert all(x.is_contiguous() for x in draw.results.values())


@on_a_cpu
@pytest.mark.usefixtures("emulated", "poisoned")
def test_what_is_filled_up_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk, from and to states that are filled up and cut back."""
    monkeypatch.setattr(plan, "SPLIT_FROM", 3)
    monkeypatch.setattr(plan, "SEGMENT", 1)
    check_kernels([compare(_call({"T": 128, "K": 20, "V": 12, "initial": True}), "triton-hopper")])


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("settings", [{"K": 100, "V": 60}, {"K": 130, "V": 24, "gate": None}], ids=str)
def test_one_node_of_what_is_filled_up(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shapes that torch.compile is told, forward and backward, also of what is saved."""
    monkeypatch.setattr("ckda.ops.triton._interpreted", lambda: True)  # a question that cannot be traced
    call = _call({"T": 40, "dt_bias": True, "initial": True} | settings)
    chosen = OpCall(**call, output_final_state=True, backend="triton-hopper")
    saved, announced = chunk.forward(chosen, {})[2], chunk.saved_like(chosen)
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in announced]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(leaves: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return complex_kda(**leaves, output_final_state=True, backend="triton-hopper")

    assert_same_bits(run(call, compiled), run(call, "triton-hopper"))


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("gate", ["signed", "sigmoid", "softplus", None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_is_filled_up_decays_no_more(dtype: torch.dtype, gate: str | None) -> None:
    """A chunk that is calm stays so: the bits are those of the same call with channels that the caller has filled up."""
    settings = {"T": 64, "K": 28, "V": 16, "dtype": dtype, "gate": gate, "sign": False, "scale": 1.0}
    call = _call(settings)
    mild = {"signed": 8.0, "sigmoid": -8.0, "softplus": -8.0, None: 0.0}[gate]
    call["g"] = torch.full_like(call["g"], mild)
    wide = call | {name: torch.nn.functional.pad(call[name], (0, 4)) for name in ("q", "k")}
    wide["g"] = torch.nn.functional.pad(call["g"], (0, 4), value=mild)
    ours, theirs = (run(x, "triton-hopper") for x in (call, wide))
    cut = {name: x[..., :28] if name in ("dq", "dk", "dg") else x for name, x in theirs.items() if name != "state"}
    assert_same_bits(ours, cut | {"state": theirs["state"][..., :28, :]})


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("gate", ["signed", None])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (BF16, {**WIDE, "V": 80}),
        (BF16, {"K": 96, "V": 40}),
        (FP16, {"K": 256, "V": 80}),
        (FP16, {"K": 96, "V": 40, "cu_seqlens": [0, 0, 33, 34, 70]}),
    ],
    ids=str,
)
def test_the_gradient_of_a_beta_near_zero(dtype: torch.dtype, settings: dict[str, Any], gate: str | None) -> None:
    """Half of the tokens have a beta of zero, a quarter one that leaves float16 no digits; their gradients are as large as any."""
    call = _call({"T": 70, "gate": gate, "beta_range": None, "gate_dtype": torch.float32} | settings | {"dtype": dtype})
    call["beta"][:, ::2] = 0.0
    call["beta"][:, 1::4] = 2.0**-20
    check_kernels([compare(call, "triton-hopper")])


@on_a_cpu
@pytest.mark.usefixtures("emulated")
def test_long_sequences_of_wide_heads_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk: the transitions of those between, [256, 256], come from the same pass."""
    monkeypatch.setattr(plan, "SPLIT_FROM", 3)
    monkeypatch.setattr(plan, "SEGMENT", 1)
    check_kernels([compare(_call({"T": 128, **WIDE, "V": 64, "initial": True}), "triton-hopper")])


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_the_warps_hangs_or_changes_a_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves and the warp that fetches, in turns that are drawn."""
    call = _call({"T": 192, **WIDE, "V": 64, "initial": True})
    wanted = run(call, "triton-hopper")
    monkeypatch.setattr(gluon, "RANDOM", [random.Random(seed)])
    assert_same_bits(run(call, "triton-hopper"), wanted)


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("settings", [{"T": 64, **WIDE, "V": 64}, {"T": 64, "K": 64, "V": 64, "dtype": FP16}])
def test_later_tokens_change_nothing_before(settings: dict[str, Any]) -> None:
    call = _call(settings)
    plain, changed = (run(x, "triton-hopper", gradients=False)["o"] for x in (call, perturbed(call, 40)))
    assert_same_bits({"o": plain[:, :40]}, {"o": changed[:, :40]})
    assert not torch.equal(plain[:, 40:], changed[:, 40:])


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "settings",
    [
        {"K": 64, "V": 64, "HV": 2, "A_log": True, "dt_bias": True},
        {"K": 64, "V": 40, "gate": None, "separate": True},
        {"K": 96, "V": 64, "dtype": FP16, "beta_range": None},
        {"K": 130, "V": 64, "gate": "softplus"},
    ],
    ids=str,
)
def test_packed_sequences_have_the_bits_that_they_have_alone(settings: dict[str, Any]) -> None:
    """Forward and backward: whole chunks, broken ones, a single token, beside no token at all and what is no number."""
    call = _call({"T": 120, "initial": True, "cu_seqlens": [0, 40, 40, 72, 73, 120]} | settings)
    for name in ("q", "v", "g"):
        call[name][:, 73:] = math.nan
    assert check_members(call, "triton-hopper")["o"][:, 73:].isnan().all()


def _calm(settings: dict[str, Any], harsh: dict[int, float]) -> dict[str, Any]:
    """A call whose gates multiply to some 2^-3 a chunk, but for the tokens that have log2|alpha| of their own."""
    call = _call({"gate": None} | settings)
    random_logs = torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
    call["g"] = (-0.06 * random_logs).to(call["g"].dtype)
    for token, log2 in harsh.items():
        call["g"][:, token, :, 1::2] = log2 * math.log(2)
    return call


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "harsh",
    [
        {},
        {0: -30.0},
        {40: -300.0},
        {45: -50.0, 50: -45.0, 60: -40.0},
        {40: -math.inf},
        {41: -math.inf},
        {33: -7.0, 34: -3.0},
    ],
)
def test_calm_chunks_and_others_keep_the_rule(dtype: torch.dtype, harsh: dict[int, float]) -> None:
    call = _calm({"T": 96, "K": 128, "V": 64, "dtype": dtype, "initial": True}, harsh)
    check_kernels([compare(call, "triton-hopper", plain="chunked")])


#: what calm chunks meet beside whole sequences of plain heads
AROUND: dict[str, dict[str, Any]] = {
    "plain": {"T": 96},
    "float32 gates, ragged": {"T": 75, "gate_dtype": torch.float32},
    "one token more": {"T": 33, "beta_range": None},
    "signs, heads of 96": {"T": 96, "K": 96, "sign": True},
    "packed, given": {"T": 110, "beta_range": None, "cu_seqlens": [0, 0, 33, 34, 34, 110]},
    "packed, separate, groups": {"T": 110, "K": 96, "separate": True, "HV": 2, "cu_seqlens": [0, 0, 33, 34, 34, 110]},
    "heads of 256, ragged": {"T": 70, "K": 256, "V": 96},
}


def _near_the_range(settings: dict[str, Any], much: float) -> dict[str, Any]:
    """A call whose chunks decay by 2^-95, or in float16 by 2^-3.6, times `much` in the exponent."""
    call = _call({"gate": None, "K": 64, "V": 64, "initial": True} | settings)
    each = (3.6 if call["v"].dtype == FP16 else 95.0) / 32
    spread = 0.8 + 0.4 * torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
    call["g"] = (-each * much * math.log(2) * spread).to(call["g"].dtype)
    return call


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("much", [0.9, 1.1])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", AROUND)
def test_chunks_near_the_range_of_calm_ones_keep_the_rule(
    case: str, dtype: torch.dtype, much: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks that are just calm, and others that cease to be on their last rows; a token of alpha = 0 too."""
    found: list[torch.Tensor] = []

    def seen(w: plan.Work, *rest: Any) -> Any:
        found.append(w.x.calm.clone())
        return gradients(w, *rest)

    gradients = launch.gradients
    monkeypatch.setattr(launch, "gradients", seen)
    call = _near_the_range(AROUND[case] | {"dtype": dtype}, much)
    draws = [compare(call, "triton-hopper", plain="chunked")]
    check_kernels(draws)
    (rows,) = found
    assert (rows == plan.CHUNK).any() if much < 1 else ((rows > 0) & (rows < plan.CHUNK)).any()
    call["g"][:, 20, :, ::3] = -math.inf
    before = {"o": run(call, "triton-hopper", gradients=False)["o"][:, :20]}
    assert_same_bits({"o": draws[0].results["o"][:, :20]}, before)
    check_kernels([compare(call, "triton-hopper", plain="chunked")])


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("token", [32, 33, 47, 63])
def test_what_follows_does_not_decide_by_which_way_a_row_goes(dtype: torch.dtype, token: int) -> None:
    """A chunk is no longer calm, or has no calm beginning, for a later token's sake: the rows before keep their bits."""
    settings = {"T": 64, "K": 64, "V": 64, "dtype": dtype}
    calm, broken = (run(_calm(settings, x), "triton-hopper", gradients=False)["o"] for x in ({}, {token: -200.0}))
    assert_same_bits({"o": calm[:, :token]}, {"o": broken[:, :token]})
    assert not torch.equal(calm[:, token:], broken[:, token:])


@triton_gluon.jit
def _items_kernel(
    p_calm, p_sorted, p_counts, p_starts, p_ends, p_taken, num_chunks, T, NC,
    HV: gl.constexpr, C: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr, WHICH: gl.constexpr, PLACES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """How often each item is taken, and where its chunk lies: [items, 3], each time one, the first token and how many."""
    first, end = turns(num_chunks, p_counts, T, NC, HV, C, WHICH, PLACES, HALVES)
    turn = first + gl.program_id(0)
    item, begin, num, rows = ask(
        turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
    )
    turn, item, begin, num = settle(
        turn, item, begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
        HV, C, LEAST, MOST, WHICH, PLACES, HALVES, 4,
    )  # fmt: skip
    while turn < end:
        gl.store(p_taken + item * 3, gl.load(p_taken + item * 3) + 1)
        gl.store(p_taken + item * 3 + 1, begin)
        gl.store(p_taken + item * 3 + 2, num)
        turn += gl.num_programs(0)
        item, begin, num, rows = ask(
            turn, end, p_calm, p_sorted, p_starts, p_ends, T, NC, HV, C, LEAST, MOST, WHICH, PLACES, HALVES
        )
        turn, item, begin, num = settle(
            turn, item, begin, num, rows, end, p_calm, p_sorted, p_starts, p_ends, T, NC,
            HV, C, LEAST, MOST, WHICH, PLACES, HALVES, 4,
        )  # fmt: skip


def _placed(lengths: list[int], NC: int, C: int = 32) -> tuple[list[list[int]], int]:
    """The first token and the end of every chunk of packed sequences, zeros for those that nobody needs; how many are full."""
    chunks, begin = [], 0
    for length in lengths:
        chunks += [[at, min(at + C, begin + length)] for at in range(begin, begin + length, C)]
        begin += length
    return chunks + [[0, 0]] * (NC - len(chunks)), sum(length // C for length in lengths)


def _items(
    programs: int, share: float, LEAST: int, MOST: int, WHICH: str, places: str = "packed", HALVES: int = 1
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """A launch of :func:`_items_kernel` over some 200 chunks of which that share is calm, what it should find, and what it
    finds."""
    HV, C, draw = 2, 32, torch.Generator().manual_seed(programs)
    lengths = torch.randint(0, 200, (60,), generator=draw).tolist()
    T, NC = sum(lengths), sum(lengths) // C + len(lengths)
    if places == "ragged":
        T, NC, lengths = 1000, 32, [1000] * 6
    slots = NC if places == "packed" else 6 * NC
    chunks, num_full = _placed(lengths, slots)
    begin, end = torch.tensor(chunks, dtype=torch.int32).unbind(1)
    num = end - begin
    rows = torch.where(
        torch.rand(slots, HV, generator=draw) < share, C, torch.randint(0, C, (slots, HV), generator=draw)
    )
    own = (rows >= LEAST) & (rows <= MOST) & (num > 0)[:, None]
    if WHICH != "any":
        own &= (num == C)[:, None] == (WHICH == "full")
    wanted = torch.stack([torch.where(own, x, 0) for x in (torch.ones(slots, 1), begin[:, None], num[:, None])], -1)
    taken = torch.zeros(slots * HV * HALVES, 3, dtype=torch.int32)
    order = sorted(range(slots), key=lambda i: 0 if num[i] == C else 2 if num[i] == 0 else 1)
    packed = places == "packed"
    arguments = {
        "p_calm": rows.int(),
        "p_sorted": torch.tensor(order, dtype=torch.int32) if packed else None,
        "p_counts": torch.tensor([num_full, int((num > 0).sum())], dtype=torch.int32) if packed else None,
        "p_starts": begin[order].contiguous() if packed else None,
        "p_ends": end[order].contiguous() if packed else None,
        "p_taken": taken,
        "num_chunks": slots,
        "T": T,
        "NC": NC,
        "HV": HV,
        "C": C,
        "LEAST": LEAST,
        "MOST": MOST,
        "WHICH": WHICH,
        "PLACES": places,
        "HALVES": HALVES,
    }
    wanted = wanted.repeat_interleave(HALVES, 1).reshape(-1, 3).int()
    return Launch(_items_kernel, (programs,), arguments, num_warps=4), wanted, taken


@triton_gluon.jit
def _weak_kernel(p_x):
    o_x = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    b_high, b_low = no_weaker(gl.load(p_x + o_x), gl.load(p_x + 256 + o_x))
    gl.store(p_x + 512 + o_x, b_high)
    gl.store(p_x + 768 + o_x, b_low)


def weak_gates() -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """A launch that takes logs below -28 for -28, what it should give and where it writes: high and low, before and after."""
    log = torch.linspace(-60, 0, 256)
    log[:8] = torch.tensor([-28.0, -27.9, -28.07, -28.13, -1e30, -0.0, math.nan, -(2.0**-100)])
    high = log.to(BF16)
    low = (log - high.float()).to(BF16)
    weak = high < -28
    wanted = torch.cat((torch.where(weak, -28.0, high), torch.where(weak, 0.0, low)))
    x = torch.cat((high, low, torch.zeros(512, dtype=BF16)))
    return Launch(_weak_kernel, (1,), {"p_x": x}, num_warps=4), wanted, x[512:]


SHARES = [(LEAST, MOST, WHICH) for LEAST, MOST in ((32, 32), (0, 31), (0, 32)) for WHICH in ("any", "full", "broken")]


@on_a_cpu
@pytest.mark.parametrize("places", ["packed", "ragged"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("programs", [1, 3, 70])
def test_each_item_is_taken_once_by_the_launch_whose_it_is(programs: int, share: float, places: str) -> None:
    for LEAST, MOST, WHICH in SHARES:
        launch, wanted, taken = _items(programs, share, LEAST, MOST, WHICH, places, HALVES=1 + programs % 2)
        gluon.run_launch(launch)
        assert torch.equal(taken, wanted), (LEAST, MOST, WHICH)


@on_a_cpu
def test_chunks_of_another_launch_are_skipped_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each with a load to wait for, they took a launch of none of its own 0.02 ms."""
    asked = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        return load(*given, **named)

    load = gluon.LANGUAGE.load
    monkeypatch.setattr(gluon.LANGUAGE, "load", counted)
    launch, wanted, _ = _items(1, 0.0, 32, 32, "any", "ragged")
    gluon.run_launch(launch)
    assert not wanted.any()
    assert asked <= 3 + len(wanted) / AHEAD.value


@on_a_cpu
@pytest.mark.parametrize("num", [1, 5, 70, 200])
def test_chunks_of_packed_sequences_are_sorted(num: int) -> None:
    """Full ones first, those that nobody needs last, whatever the sequences, more than a program looks at together too."""
    lengths = torch.randint(0, 100, (num,), generator=torch.Generator().manual_seed(num)).tolist()
    lengths[num // 2] = 0
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    call = example(packed=True, T=max(sum(lengths), 1))._replace(cu_seqlens=cu_seqlens)
    p = plan.plan(call)
    memory = torch.full((5 * p.slots + 2 * p.N + 2,), -1, dtype=torch.int32)
    x = plan.Saved(**dict.fromkeys(plan.Saved._fields))._replace(chunks=memory)
    w = plan.Work(call, p, x, plan.find_chunks(p, x))
    for launched in portable.places(w):
        gluon.run_launch(launched)
    chunks, num_full = _placed(lengths, p.slots)
    kinds = [0 if end - begin == 32 else 2 if begin == end else 1 for begin, end in chunks]
    order = sorted(range(p.slots), key=kinds.__getitem__)
    assert w.where.counts.tolist() == [num_full, sum(kind < 2 for kind in kinds)]
    assert w.where.sorted.view(3, -1).T.tolist() == [[i, *chunks[i]] for i in order]
    assert torch.stack((w.where.starts, w.where.ends), 1).tolist() == chunks


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("outputs", ["o", "s"])
@pytest.mark.parametrize("where", HARSH)
def test_small_numbers_keep_their_digits_where_bounded_gates_forget_most(where: str, outputs: str) -> None:
    """Gradients of a loss that is a mean are some 2^-20, and values may be as small."""
    for settings in ({}, {"gate": "sigmoid", "beta_range": None}):
        call = _call({"T": 96, "K": 64, "V": 64, "initial": True} | settings)
        check_scales(harsh(call, where), "triton-hopper", outputs, 2.0**-8)


@on_a_cpu
@pytest.mark.usefixtures("emulated")
def test_A_in_two_parts_is_what_float16_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys at beta = 2: the 32 updates of a chunk nearly cancel in A u, and A's own rounding is what is left."""
    settings = {"T": 1024, "K": 64, "V": 64, "H": 2, "dtype": FP16, "initial": True, "beta_range": 2}
    call = _reflections(_call(settings), signs="equal")
    split = compare(call, "triton-hopper", plain="chunked", gradients=False)
    whole = plan.plan
    monkeypatch.setattr("ckda.ops.triton.chunk.plan", lambda call: whole(call)._replace(A_low=False))
    rounded = split._replace(results=run(call, "triton-hopper", gradients=False))

    def o_of(x: Comparison) -> float:
        return next(e.error for e in excesses([x], FP16) if e.name == "o")

    assert o_of(split) < 0.75 * o_of(rounded)


@on_a_cpu
@pytest.mark.usefixtures("emulated")
def test_G_is_summed_with_rounding_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys at beta = 2: sums that are always cut off, as the matrix unit's are, make every reflection fall short alike."""
    settings = {"T": 2048, "K": 128, "V": 64, "dtype": FP16, "initial": True, "beta_range": 2}
    call = _reflections(_call(settings), signs="equal")
    rounded = compare(call, "triton-hopper", plain="chunked", gradients=False)

    def cut(s_left: gluon.Shared, s_right: gluon.Shared, Q: None, C: int) -> gluon.Value:
        return gluon.LANGUAGE.dot(s_left.load(), s_right.permute((1, 0)).load())

    monkeypatch.setitem(gluon.names_of(intra.__name__), "_rounded_sums", cut)
    short = rounded._replace(results=run(call, "triton-hopper", gradients=False))
    errors = [next(e.error for e in excesses([x], FP16) if e.name == "o") for x in (rounded, short)]
    assert errors[0] < 0.75 * errors[1]


@on_a_cpu
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("warpgroup_mma_wait", lambda outstanding=0, deps=(): deps[0] if len(deps) == 1 else deps, "not awaited"),
        ("tma", gluon.SimpleNamespace(**vars(gluon.TMA) | {"store_wait": lambda n: None}), "on their way out"),
        ("mbarrier", gluon.SimpleNamespace(**vars(gluon.MBARRIER) | {"arrive": lambda bar, count: None}), "waits"),
    ],
)
def test_the_emulation_sees_mistakes(name: str, broken: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU might forgive, or answer by hanging: products read too early, tiles overwritten, barriers never completed."""
    run(_call({"T": 32, "K": 64, "V": 64}), "triton-hopper", gradients=False)
    monkeypatch.setitem(gluon.names_of(passes.__name__), name, broken)
    with pytest.raises(AssertionError, match=told):
        run(_call({"T": 160, "K": 64, "V": 64}), "triton-hopper", gradients=False)


# On a GPU ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [name for name in CASES if name[:2] in ("25", "16", "24")] + ["float16, narrow", *FILLED]
)
def test_by_name_the_kernels_keep_the_rule_on_a_gpu(case: str) -> None:
    settings = (CASES | FILLED)[case]
    settings = settings | {"H": 2, "HV": 2 * settings.get("HV", 1), "device": "cuda"}
    settings |= {} if "cu_seqlens" in settings else {"T": 320, "B": 2}
    check_kernels([compare(_call(settings), "triton-hopper")])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "signs"),
    [
        ({"K": 64, "V": 64, "dtype": FP16}, "equal"),
        ({"K": 64, "V": 64, "dtype": FP16}, "random"),
        ({"K": 256, "V": 64, "dtype": BF16}, "equal"),
    ],
)
def test_by_name_equal_keys_at_beta_two_over_8192_tokens(settings: dict[str, Any], signs: str) -> None:
    call = _call(settings | {"B": 2, "T": 8192, "H": 2, "beta_range": 2, "initial": True, "device": "cuda"})
    check_kernels([compare(_reflections(call, signs=signs), "triton-hopper", plain="chunked")])


@pytest.mark.gpu
def test_by_name_a_long_sequence_of_wide_heads_on_a_gpu() -> None:
    call = _call({"T": 16416, **WIDE, "V": 64, "initial": True, "device": "cuda"})
    check_kernels([compare(call, "triton-hopper", plain="chunked")])
    assert_same_bits(run(call, "triton-hopper"), run(call, "triton-hopper"))
