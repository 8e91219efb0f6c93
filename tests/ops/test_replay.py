"""Kept launches: the same arguments with other addresses, one allocation between kernels, and nothing kept that cannot be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from ckda.ops.triton import replay
from ckda.ops.triton.launch import Launch

STREAM = 77


class Recorder:
    """Stands for what Triton compiled: notes what its C function is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.function, self.packed_metadata = 5, (4, 1, 0)
        self.run = SimpleNamespace(
            launch=self._note,
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )

    def _note(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    @property
    def last(self) -> tuple:
        """The kernel's own arguments of the last call: behind grid, stream and nine that are fixed."""
        return self.calls[-1][13:]


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(replay, "enter_context", lambda device: None)


def _launch(*values: Any) -> Launch:
    names = [f"x{i}" for i in range(len(values))]
    return Launch(SimpleNamespace(arg_names=names), (3, 2), dict(zip(names, values, strict=True)), num_warps=4)


def _kept(
    launches: list[Launch], given: list[Tensor | None], made: list[Tensor | None]
) -> tuple[replay.Kept, list[Recorder]]:
    kept: replay.Kept = {}
    recorders = [Recorder() for _ in launches]
    replay.record(kept, "it", list(zip(launches, recorders, strict=True)), given, made)
    return kept, recorders


def test_addresses_are_those_of_the_new_tensors() -> None:
    x, y, between, much = torch.zeros(8), torch.zeros(4), torch.zeros(100), torch.zeros(300)
    launches = [_launch(x[4:], between, 9), _launch(between[50:], much, None, y)]
    kept, (first, second) = _kept(launches, [x, None], [y, None])
    other = torch.zeros(8)
    out, nothing = kept["it"].run([other, None])
    assert nothing is None
    assert out is not None
    assert (out.shape, out.dtype) == (y.shape, y.dtype)
    assert first.calls[-1][:5] == (3, 2, 1, STREAM, 5)
    assert first.last[0] == other.data_ptr() + 16
    assert first.last[2] == 9
    assert second.last[0] == first.last[1] + 200, "what lies between the kernels is the same memory for both"
    assert second.last[1] == first.last[1] + 512, "and one allocation"
    assert second.last[2] is None
    assert second.last[3] == out.data_ptr()
    assert kept["it"].spare == 512 + 1536


def test_what_was_filled_in_is_kept_for_the_same_addresses_only() -> None:
    x = torch.zeros(8)
    kept, (recorder,) = _kept([_launch(x)], [x], [])
    a, b = torch.zeros(8), torch.zeros(8)
    for given in (a, b, a, a):
        kept["it"].run([given])
        assert recorder.last == (given.data_ptr(),)
    assert len(kept["it"].filled) == 2


def test_the_addresses_remembered_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_FILLED", 3)
    x = torch.zeros(8)
    kept, (recorder,) = _kept([_launch(x)], [x], [])
    tensors = [torch.zeros(8) for _ in range(7)]
    for given in tensors:
        kept["it"].run([given])
        assert recorder.last == (given.data_ptr(),)
        assert len(kept["it"].filled) <= 3


def test_what_is_made_like_one_of_those_given_is_a_tensor_of_its_own() -> None:
    x, y = torch.zeros(2, 4, requires_grad=True), torch.ones(2, 4)
    kept, (recorder,) = _kept([_launch(x, y)], [None, x], [y])
    out = kept["it"].run([None, x])[0]
    assert out is not None
    assert (out.shape, out.dtype, out.requires_grad) == (y.shape, y.dtype, False)
    assert recorder.last == (x.data_ptr(), out.data_ptr())
    assert out.data_ptr() not in (x.data_ptr(), y.data_ptr())


@pytest.mark.parametrize("why", ["strided", "misaligned", "overlapping", "interpreted", "scratch"])
def test_what_cannot_be_repeated_is_not_kept(why: str) -> None:
    x = torch.zeros(16)
    given = {"strided": x[::2], "misaligned": x[1:9]}.get(why, x)
    launch, recorder = _launch(given), Recorder()
    if why == "scratch":
        recorder.run.global_scratch_size = 8
    kept: replay.Kept = {}
    both = [given, x[4:8]] if why == "overlapping" else [given]
    replay.record(kept, "it", [(launch, None if why == "interpreted" else recorder)], both, [])
    assert not kept


def test_a_function_of_other_tensors_keeps_its_own() -> None:
    x = torch.zeros(4)
    kept = replay.kept_for("test", [x, None], 1)
    assert replay.kept_for("test", [torch.ones(4), None], 1) is kept
    for other in ([torch.zeros(5), None], [x.double(), None], [x, x]):
        assert replay.kept_for("test", other, 1) is not kept
    assert replay.kept_for("test", [x, None], 2) is not kept
    assert replay.kept_for("another", [x, None], 1) is not kept
    strided = torch.zeros(8)[::2]
    assert replay.kept_for("test", [strided, None], 1) is not replay.kept_for("test", [strided, None], 1)
