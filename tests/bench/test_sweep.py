"""``ckda bench --sweep``: it runs without a GPU, and what was reached on one is recorded with its reasons."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckda.bench import sweep
from ckda.cli import main

RECORD = Path(__file__).parents[2] / "results" / "bench" / "sweep"


def test_a_smoke_run_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.set_num_threads(2)
    assert main(["bench", "--sweep", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["environment"]["threads"] == 1, "threads that wait for each other take longer than the work"
    assert [x["row"]["name"] for x in stored["rows"]] == [row.name for row in sweep.ROWS]
    assert stored["protocol"] == "smoke"
    for x in stored["rows"]:
        assert x["row"]["sequences"] <= 3
        assert x["forward"]["mean"] > 0
        assert max(x["errors"].values()) < 0.02
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    bounds = json.loads((tmp_path / "bounds.json").read_text())
    assert bounds["protocol"] == "smoke"
    assert all(x["at_most"] is None and x["reason"] is None for x in bounds["rows"].values())
    timed = [line for line in capsys.readouterr().err.splitlines() if " waited for " in line]
    assert len(timed) == len(sweep.ROWS)
    assert not any("(" in line for line in timed), "ratios"


def test_a_sweep_that_was_cut_short_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ["bench", "--sweep", "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--row", "softplus"]) == 0
    first = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    measured: list[str] = []
    plain = sweep.measure_row
    monkeypatch.setattr(sweep, "measure_row", lambda row, *more: (measured.append(row.name), plain(row, *more))[1])
    assert main([*words, "--row", "softplus", "--row", "states"]) == 0
    second = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert measured == ["states"]
    assert "measured before, not again (--fresh would): 'main', 'softplus'\n" in capsys.readouterr().err
    assert second[:2] == first
    assert all(x["forward"]["host"] > 0 and x["host_load"] >= 0 for x in second)
    reached = json.loads((tmp_path / "bounds.json").read_text())["rows"]["states"]["reached"]
    assert reached == second[2]["forward+backward"]["mean"] / second[2]["main_ms"]


@pytest.mark.parametrize(
    ("words", "told"), [(["--sweep", "--row", "nothing"], "nothing"), (["--peer", "nobody"], "nobody")]
)
def test_an_unknown_name_is_refused(words: list[str], told: str, tmp_path: Path, refused: Callable) -> None:
    refused(["bench", *words, "--device", "cpu", "--out", str(tmp_path)], told)


def test_an_unknown_row_is_answered_with_names_that_can_be_told_apart(refused: Callable) -> None:
    told = "--row 'sofplus, harsh': there is none; there are 'main', 'softplus', .*; did you mean 'softplus, harsh'"
    refused(["bench", "--sweep", "--plan", "--row", "sofplus, harsh"], told)


def test_the_record_has_or_misses_every_row_by_name_and_a_reason_for_each_miss() -> None:
    record = json.loads((RECORD / "sweep.json").read_text())
    stored = json.loads((RECORD / "bounds.json").read_text())
    assert stored == sweep.bounds(record["rows"])
    missing = set(record["absent"])  # what the time of the run did not suffice for; results/bench/README.md says so
    assert set(stored["rows"]) | missing == {row.name for row in sweep.ROWS}
    assert all(name in (RECORD.parent / "README.md").read_text() for name in missing)
    for name, x in stored["rows"].items():
        assert x["at_most"] is None or x["reached"] <= x["at_most"] or x["reason"], name


@pytest.mark.parametrize("regime", ["mild", "harsh"])
@pytest.mark.parametrize("gate", ["softplus", None])
def test_the_regimes_have_their_means(gate: str | None, regime: str) -> None:
    row = sweep.Row("", B=2, T=64, H=2, HV=2, K=32, V=32, gate=gate, regime=regime, dtype="float32")
    g = sweep.inputs(row, "cpu")["g"].detach()
    log = -torch.nn.functional.softplus(g) if gate else g
    assert abs(log[log.isfinite()].mean() / -sweep.MEAN_LOG[regime] - 1) < 0.05
    assert bool(log.isinf().any()) == (gate is None and regime == "harsh")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["given gates", "softplus", "float32 gates", "16 x 2000 tokens", "24 packed sequences"]
)
def test_what_was_reached_is_kept(name: str) -> None:
    """At most a fifth above the record, over the main row of the same run."""
    reached = json.loads((RECORD / "bounds.json").read_text())["rows"][name]["reached"]
    rows = {row.name: row for row in sweep.ROWS}
    base, other = (sweep.measure_row(rows[n], "cuda", 12)["forward+backward"]["mean"] for n in (sweep.MAIN.name, name))
    assert other / base < 1.2 * reached
