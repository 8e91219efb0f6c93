"""Random draws from the whole contract against the float64 recurrence: dtype, gate, sizes, packing, grouping, states, layouts.

A draw is a seed. On a GPU the kernels are compiled for what was drawn. Where there is none, a few small draws go to Triton's
interpreter, whose bfloat16 is wrong, and a few to Hopper's kernels by plain torch (tests/ops/gluon.py).

The oracle is the loop. Beyond :data:`LOOP` tokens, each of which it takes a millisecond for, it is the chunk form in torch, in
float64 as well; tests/ops/test_backends.py and tests/ops/test_numerics.py hold that to the loop.
"""

import random
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ckda import complex_kda
from ckda.bench import sweep
from ckda.ops.call import Call as OpCall
from tests.ops.common import FLOAT32_TOLERANCE, Call, Comparison, check_kernels, compare, make_call

pytest.importorskip("triton")
from ckda.ops import triton as kernels
from ckda.ops.triton import hopper
from tests.ops import gluon

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOOP = 1000  # tokens
GATES = ("signed", "sigmoid", "softplus", None)
LAYOUTS = ("gaps", "heads first", "side by side", "shifted")


class Place(NamedTuple):
    """What is drawn where; what stands there twice is drawn twice as often."""

    first: int  #: seed, chosen so that the draws reach what the last test here asks for
    draws: int
    values: int  #: sets of them for one draw; of a long one, two
    backends: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]  #: of a sequence: from, to
    members: tuple[tuple[int, int], ...]  #: of one of packed sequences; the last of them is long
    most: int  #: of them but the last
    rows: tuple[int, ...]  #: sequences that are not packed, and query heads


ON_A_GPU = Place(
    first=550,
    draws=48,
    values=4,
    backends=("triton", "triton", "triton", "triton", "triton-portable"),
    dtypes=(BF16, BF16, BF16, BF16, FP16, FP16, FP32),
    widths=(16, 24, 32, 40, 60, 64, 64, 96, 100, 128, 128, 130, 192, 256, 256),
    lengths=((1, 1), (2, 62), (63, 65), (63, 65), *[(66, 400)] * 5, (2000, 5000), (2000, 5000), (16385, 17000)),
    members=((0, 0), (1, 1), (2, 70), (100, 700)),
    most=7,
    rows=(1, 2, 3),
)
BY_PLAIN_TORCH = ON_A_GPU._replace(
    draws=8,
    values=2,
    backends=("triton-hopper",),
    dtypes=(BF16, BF16, FP16),
    lengths=((1, 1), (2, 62), (63, 65), (66, 150)),
    members=((0, 0), (1, 1), (2, 40), (66, 100)),
    most=3,
    rows=(1,),
)
INTERPRETED = BY_PLAIN_TORCH._replace(
    draws=6,
    values=1,
    backends=("triton-portable",),
    dtypes=(FP16, FP32),
    widths=tuple(range(1, 21)),
    lengths=((1, 1), (63, 65), (66, 100)),
)
ONE_BY_ONE = INTERPRETED._replace(
    draws=4, backends=("triton-recurrent",), lengths=((1, 1), (2, 12)), members=((0, 0), (1, 1), (2, 6))
)


def draw_settings(seed: int, place: Place) -> dict[str, Any]:
    """Arguments of :func:`make_call`, and what is made of the call: see :func:`draw_call` and :func:`draw`."""
    r = random.Random(place.first + seed)
    T, K = r.randint(*r.choice(place.lengths)), r.choice(place.widths)
    rows = (1,) if T >= LOOP else place.rows
    H, beta_range = r.choice(rows), r.choice([None, 1, 2])
    settings: dict[str, Any] = {
        "B": r.choice(rows),
        "T": T,
        "H": H,
        "HV": H * r.choice([1, 1, 2, 3]),
        "K": K,
        "V": K if r.random() < 0.4 else r.choice(place.widths),
        "dtype": r.choice(place.dtypes),
        "gate_dtype": r.choice([None, FP32]),
        "gate": GATES[seed % 4],
        "sign": r.random() < 0.5,
        "A_log": r.random() < 0.5,
        "dt_bias": r.random() < 0.5,
        "beta_range": beta_range,
        "separate": r.random() < 0.2,
        "normalize_qk": r.random() < 0.7,
        "initial": r.random() < 0.5,
        "scale": r.choice([None, 0.7]),
    }
    if T < LOOP and r.random() < 0.4:
        lengths = [r.randint(*r.choice(place.members)) for _ in range(r.randint(1, place.most))]
        bounds = [0, *accumulate([*lengths, r.randint(*place.members[-1])])]
        settings |= {"B": 1, "T": bounds[-1], "cu_seqlens": bounds}
    backend = r.choice(place.backends)
    if K <= hopper.MAX_WIDTH < settings["V"] and (backend == "triton-hopper" or r.random() < 0.7):
        settings["V"] = K  # few such calls are Hopper's
    if backend == "triton" and max(K, settings["V"]) <= kernels.SMALL_HEAD and r.random() < 0.7:
        backend = "triton-recurrent"  # by name, since by itself it is for few tokens
    if backend == "triton-recurrent":
        settings["separate"] = False
    regime = (None, "mild", "harsh")[(seed + seed // 4) % 3]
    if regime == "harsh":
        settings["scale"] = (
            1.0  # else o is so much smaller than the state that the last token's gradients are all there is
        )
    return settings | {
        "backend": backend,
        "regime": regime,
        "layout": r.choice([None, *LAYOUTS]),
        "outputs": r.choice(["os", "o"] if regime == "harsh" else ["os", "os", "o", "s"]),
    }


def draw_call(settings: dict[str, Any], device: str, seed: int) -> Call:
    """The arguments; with a regime, gates of its mean (:data:`sweep.MEAN_LOG`), some of them zero where they are given."""
    own = ("backend", "regime", "layout", "outputs")
    call = make_call(**{name: x for name, x in settings.items() if name not in own}, device=device, seed=seed)
    if settings["regime"] is not None:
        sizes = {name: settings[name] for name in ("B", "T", "H", "HV", "K", "gate", "regime")}
        drawn = sweep.inputs(sweep.Row("", V=1, dtype="float32", **sizes), device, seed)
        call["g"] = drawn["g"].detach().to(call["g"].dtype)
    return call


def _with_gaps(x: Tensor) -> Tensor:
    """Every other place of memory twice as large."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


def _shifted(x: Tensor) -> Tensor:
    """One number further on, where addresses are no multiples of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _side_by_side(call: Call) -> Call:
    """q, k and v as parts of one tensor."""
    heads = {name: call[name].shape[2:] for name in ("q", "k", "v")}
    parts = torch.cat([call[name].flatten(2) for name in heads], -1).split([h.numel() for h in heads.values()], -1)
    return call | {name: x.unflatten(2, heads[name]) for name, x in zip(heads, parts, strict=True)}


def _run(call: Call, backend: str, layout: str | None) -> tuple[Tensor, Tensor]:
    """The same numbers elsewhere in memory, those of the cotangents too."""
    lay = {"gaps": _with_gaps, "heads first": _heads_first, "shifted": _shifted}.get(layout or "", lambda x: x)
    call = {name: lay(x) if isinstance(x, Tensor) else x for name, x in call.items()}
    if layout == "side by side":
        call = _side_by_side(call)
    o, state = complex_kda(**call, output_final_state=True, backend=backend)
    return lay(o), lay(state)


def draw(seed: int, place: Place, device: str = "cpu") -> list[Comparison]:
    """A draw with some sets of values; on a GPU those after the first take what was kept of it.

    Of a token or two there are more sets: whether a few dot products cancel is luck.
    """
    settings = draw_settings(seed, place)
    T, few = settings["T"], 16 // (settings["B"] * settings["T"] * settings["HV"])

    def kernels(leaves: Call) -> tuple[Tensor, Tensor]:
        return _run(leaves, settings["backend"], settings["layout"])

    plain, num = ("reference", max(place.values, few)) if T <= LOOP else ("chunked", min(place.values, 2))
    calls = [draw_call(settings, device, seed + 1000 * i) for i in range(num)]
    return [compare(call, kernels, settings["outputs"], plain) for call in calls]


def check(seed: int, place: Place, device: str = "cpu") -> None:
    """By the rule. Where gates forget all they can, few terms make dA_log: in float32 it is as exact as dg then."""
    with pytest.MonkeyPatch.context() as patch:
        if draw_settings(seed, place)["regime"] == "harsh":
            patch.setitem(FLOAT32_TOLERANCE, "dA_log", FLOAT32_TOLERANCE["dg"])
        check_kernels(draw(seed, place, device), rule=False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(ON_A_GPU.draws))
def test_draws_on_a_gpu(seed: int) -> None:
    check(seed, ON_A_GPU, "cuda")


on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the draws marked gpu run")


@on_a_cpu
@pytest.mark.parametrize("seed", range(INTERPRETED.draws))
def test_draws_in_the_interpreter(seed: int) -> None:
    check(seed, INTERPRETED)


@on_a_cpu
@pytest.mark.parametrize("seed", range(ONE_BY_ONE.draws))
def test_draws_one_by_one_in_the_interpreter(seed: int) -> None:
    check(seed, ONE_BY_ONE)


@on_a_cpu
@pytest.mark.skipif(not hopper.tried(), reason="for the Triton that Hopper's kernels are written for")
@pytest.mark.parametrize("seed", range(BY_PLAIN_TORCH.draws))
def test_draws_by_plain_torch(seed: int) -> None:
    """As on a Hopper card."""
    with gluon.on_cpu():
        check(seed, BY_PLAIN_TORCH)


def _form(settings: dict[str, Any]) -> tuple[str, bool]:
    """What runs the draw on a Hopper card, and whether it is filled up for that."""
    packed, separate = "cu_seqlens" in settings, settings["separate"]
    q, v = (
        torch.empty(1, settings["T"], 1, settings[width], dtype=settings["dtype"], device="meta")
        for width in ("K", "V")
    )
    call = OpCall(q, q, v, q, None if separate else v[..., 0], beta_range=None if separate else settings["beta_range"])
    call = call._replace(erase=q if separate else None, cu_seqlens=v if packed else None)
    form = kernels.choose_form(call)[0] if settings["backend"] == "triton" else settings["backend"]
    return form, form == "triton-hopper" and bool(hopper.filled(call))


def test_the_draws_reach_all_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting's values are drawn for a GPU, and for Hopper's kernels whatever they have code of their own for."""
    monkeypatch.setattr(hopper, "device_refuses", lambda device: None)
    drawn = [draw_settings(seed, ON_A_GPU) for seed in range(ON_A_GPU.draws)]
    assert {x["K"] for x in drawn} | {x["V"] for x in drawn} == set(ON_A_GPU.widths)
    assert {x["gate"] for x in drawn} == set(GATES)
    assert {x["layout"] for x in drawn} == {None, *LAYOUTS}
    assert {x["outputs"] for x in drawn} == {"os", "o", "s"}
    assert {x["beta_range"] for x in drawn} == {None, 1, 2}
    for name in ("initial", "normalize_qk", "A_log", "dt_bias", "separate", "sign"):
        assert {x[name] for x in drawn} == {False, True}
    for name in ("scale", "gate_dtype"):
        assert len({x[name] for x in drawn}) > 1
    for first, last in ON_A_GPU.lengths:
        assert any(first <= x["T"] <= last and "cu_seqlens" not in x for x in drawn)

    forms = {(_form(x)[0], x["dtype"]) for x in drawn}
    assert forms >= {("triton-hopper", BF16), ("triton-hopper", FP16), ("triton-recurrent", BF16)}
    assert forms >= {("triton-portable", dtype) for dtype in (BF16, FP16, FP32)}
    ours = [x for x in drawn if _form(x)[0] == "triton-hopper"]
    assert {(x["gate"], x["dtype"]) for x in ours} == {(gate, dtype) for gate in GATES for dtype in (BF16, FP16)}
    assert {(x["gate"], x["regime"]) for x in ours} >= {
        (gate, regime) for gate in GATES for regime in ("mild", "harsh")
    }
    assert {x["layout"] for x in ours} == {None, *LAYOUTS}
    assert {(x["K"] > 128, x["V"] > 128) for x in ours} >= {(False, False), (True, True), (True, False)}
    assert {_form(x)[1] for x in ours} == {False, True}
    assert {x["separate"] for x in ours} == {x["H"] < x["HV"] for x in ours} == {False, True}
    assert any(x["T"] > 2000 for x in ours)
    assert any(x["T"] > 16384 for x in ours)
    assert any(x["T"] > 33 and x["gate"] == "softplus" and x["dtype"] == BF16 for x in ours)
    packed = [x for x in ours if "cu_seqlens" in x]
    lengths = {end - begin for x in packed for begin, end in pairwise(x["cu_seqlens"])}
    assert lengths > {0, 1}
    assert max(lengths) > 64
    assert {x["gate"] for x in packed} == set(GATES)
