"""What is compiled before it is timed, shared among processes: each is compiled by one, and none is forgotten."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ckda.cli import main


@pytest.mark.parametrize(("num", "parts"), [(1, 3), (5, 3), (12, 4)])
def test_every_configuration_is_somebodys(monkeypatch: pytest.MonkeyPatch, num: int, parts: int) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    from ckda.bench.tuning import share_configurations

    shares = []
    for part in range(parts):
        with monkeypatch.context() as patch:
            patch.setattr(autotuner.Autotuner, "__init__", lambda self, fn, names, configs: shares.append(configs))
            share_configurations(part, parts)
            tuner = autotuner.Autotuner(None, [], [*range(num)])
            assert callable(tuner._do_bench)
    assert all(shares), "a process without any could not run the kernel"
    assert {config for share in shares for config in share} == {*range(num)}


def test_a_peer_chooses_again_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel chose on the check's few tokens, in memory or on the disk, is not what is timed."""
    triton = pytest.importorskip("triton")
    from ckda.bench.tuning import forget_choices

    def kernel(x: Any) -> None: ...

    other = types.ModuleType("peer_of_a_test.ops")
    configs = [triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)]
    tuner = triton.autotune(configs, key=["x"])(triton.jit(kernel))
    tuner.cache_results = True
    other.kernel = triton.heuristics({})(tuner)  # type: ignore[attr-defined]
    tuner.cache[("a size",)] = configs[0]
    for name in ("peer_of_a_test", other.__name__):
        monkeypatch.setitem(sys.modules, name, other)
    forget_choices(["no_such_peer.ops"])
    assert tuner.cache
    assert tuner.cache_results
    forget_choices([other.__name__])
    assert not tuner.cache
    assert not tuner.cache_results


def test_every_row_of_the_sweep_is_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckda.bench import sweep, tuning

    run: list[str] = []
    monkeypatch.setattr(sweep, "run_once", lambda row, device: run.append(row.name))
    names = [row.name for row in sweep.ROWS]
    for part in range(4):
        tuning._compile_rows(4, part, "cpu", names)
    assert sorted(run) == sorted(names)


def test_a_row_is_run_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckda.bench import sweep

    row = sweep.MAIN._replace(B=1, T=40, H=2, HV=2, K=16, V=16)
    calls: list[bool] = []
    plain = sweep.complex_kda
    monkeypatch.setattr(sweep, "complex_kda", lambda **call: (calls.append(torch.is_grad_enabled()), plain(**call))[1])
    sweep.run_once(row, "cpu")
    assert calls == [True, True, False, True]  # the check and its float64, forward, forward and backward


def test_jobs_say_how_a_peer_was_tuned(tmp_path: Path) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--jobs", "2", "--peer", "ckda", "--out", str(tmp_path)]
    assert main(words) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["protocol"] == "smoke"
