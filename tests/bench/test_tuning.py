"""FLA's configurations shared among processes: each is compiled by one, and none is forgotten."""

import json
from pathlib import Path

import pytest

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


def test_jobs_say_how_a_peer_was_tuned(tmp_path: Path) -> None:
    words = ["bench", "--smoke", "--device", "cpu", "--jobs", "2", "--peer", "ckda", "--out", str(tmp_path)]
    assert main(words) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["protocol"] == "smoke"
