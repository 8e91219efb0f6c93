"""``ckda bench`` on a machine without a GPU: it checks, times, writes JSON and a figure, and refuses what is not there."""

import json
from pathlib import Path

import pytest
import torch

from ckda.bench import command as bench
from ckda.cli import main


def test_a_smoke_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "--smoke", "--device", "cpu", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert printed["rows"] == stored["rows"]
    assert {row["peer"] for row in stored["rows"]} == {"ckda", "kda"}
    for row in stored["rows"]:
        assert 0 < row["forward"]["p20"] <= row["forward"]["p50"] <= row["forward"]["p80"]
    assert stored["environment"]["versions"]["torch"] == torch.__version__
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_wrong_peer_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = bench.Peer("ckda", "signed", lambda call: bench.complex_kda(**call)[0] * 1.1)
    monkeypatch.setattr(bench, "peers", lambda device, wanted: [wrong])
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert not (tmp_path / "bench.json").exists()


def test_what_was_measured_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "time_decode", stop)
    assert main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2


@pytest.mark.parametrize("words", [["--shape", "1,2"], ["--shape", "1,2,3,300"], ["--dtype", "int8"]])
def test_wrong_arguments(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--smoke", "--device", "cpu", "--out", str(tmp_path), *words])
    assert words[-1] in f"{stop.value.code} {capsys.readouterr().err}"


def test_the_host_is_timed_without_a_gpu_too(tmp_path: Path) -> None:
    assert main(["bench", "--host", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "host.json").read_text())
    assert set(stored["host_ms"]) == {
        "operator, 1 x 64",
        "layer, 1 x 64",
        "layer, 1 x 64, autocast",
        "operator, one token",
    }
    assert all(ms > 0 for parts in stored["host_ms"].values() for ms in parts.values())
    assert stored["first_call_s"] is None
