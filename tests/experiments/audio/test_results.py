"""Runs brought together (`ckda audio --collect`), and what the repository keeps of them."""

import json
import re
from pathlib import Path

import pytest

from ckda.cli import main
from ckda.experiments.audio.records import collect, write_compact
from ckda.experiments.tracking.lottery import binomial_interval

KEPT = Path(__file__).parents[3] / "results/audio"


def _smoke(folder, *options):
    assert main(["audio", "--smoke", "--device", "cpu", "--json", "--out", str(folder), *options]) == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    _smoke(one, "--arm", "ckda,gru")
    _smoke(two, "--recipe", "plain,turns-tail", "--seed", "1", "--seeds", "2")
    return one, two


def test_runs_of_several_folders_become_one_result(folders, tmp_path, capsys):
    command = ["audio", "--collect", *map(str, folders), "--trained-at", "abc", "--out"]
    assert main([*command, str(tmp_path / "all")]) == 0
    assert "none: no finished run of it was found" in capsys.readouterr().out
    for name in (
        "audio.json",
        "table.md",
        "continuation.png",
        "beyond.png",
        "runs/ckda+schedule=tail+penalty=closure-turns+smoke.json",
    ):
        assert (tmp_path / "all" / name).stat().st_size > 0, name
    result = json.loads((tmp_path / "all/audio.json").read_text())
    assert list(result["runs"]) == ["ckda+smoke", "gru+smoke", "ckda+schedule=tail+penalty=closure-turns+smoke"]
    assert result["absent"]["deltaproduct2-gated"] == {"snr": None, "reason": "no finished run of it was found"}
    ckda = result["runs"]["ckda+smoke"]
    assert ckda["seeds"] == [0, 1, 2]
    assert [part["seeds"] for part in ckda["parts"]] == [[0], [1, 2]]
    parts = [json.loads((folder / "runs/ckda+smoke.json").read_text())["snr"]["40"] for folder in folders]
    assert ckda["snr"]["40"] == parts[0] + parts[1]
    assert ckda["snr"]["40"][ckda["shown"]] == max(ckda["snr"]["40"])
    # what was collected can be collected again, and is the same
    again = ["audio", "--collect", str(tmp_path / "all"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    for name in ("audio.json", "table.md", "runs/ckda+smoke.json", "runs/gru+smoke.json"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_what_cannot_be_brought_together_is_refused(folders, tmp_path, assert_refused):
    assert_refused(["audio", "--collect", str(tmp_path), "--out", str(tmp_path)], r"--collect: no audio.json in")
    (tmp_path / "runs").mkdir()
    record = json.loads((folders[0] / "runs/ckda+smoke.json").read_text())
    record["key"]["recipe"]["steps"] = 9
    (tmp_path / "runs/ckda+smoke.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"records of ckda\+smoke were trained by different protocols"):
        collect([folders[0], tmp_path])
    record["key"]["task"]["frames"] = "another"
    (tmp_path / "runs/ckda+smoke.json").write_text("{}")
    (tmp_path / "runs/kda.json").write_text(json.dumps(record | {"arm": "kda"}))
    with pytest.raises(ValueError, match="different loops"):
        collect([folders[0], tmp_path])


def test_compact_json_is_the_same_json(tmp_path):
    value = {"a": [[1, 2.5], [None, 3]], "b": "a [list, in] words", "c": {"d": []}}
    assert json.loads(write_compact(tmp_path / "x.json", value).read_text()) == value
    value["b"] = "words"
    assert "[1, 2.5]" in write_compact(tmp_path / "x.json", value).read_text()


# What the repository keeps --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept():
    return collect([KEPT / "continuation"]).runs


def test_kept_results_have_the_papers_ordering(kept):
    """The ordering of fig:waveform_continuation holds in what is stored, and CKDA's seed 0 is no worse."""
    assert [kept["ckda"].snr[n][0] >= v for n, v in ((40, 45.6), (136, 42.2), (264, 38.1))] == [True] * 3
    for arm in ("kda", "kda-beta2", "kda-signed"):
        assert max(kept[arm].snr[136]) < 10, arm
    assert max(kept["transformer"].snr[264]) < 5
    plain = {name: max(run.snr[264]) for name, run in kept.items() if run.is_papers}
    assert max(plain, key=plain.__getitem__) == "gru"


def test_kept_results_hold_three_seeds_and_say_where_from(kept):
    for name, run in kept.items():
        assert len(run.seeds) >= 3, name
        for environment in [part["environment"] for part in run.parts] if run.parts else [run.environment]:
            assert environment["commit"], name
            assert "H200" in environment["device"], name


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_kept_models_are_what_their_records_say(seed, tmp_path, capsys):
    """The stored Complex KDA of the paper's protocol, looked at anew: what results/audio/inspect says."""
    path = KEPT / f"continuation/runs/ckda.seed{seed}.pt"
    assert path.stat().st_size < 2**20
    assert main(["inspect", "audio", str(path), "--length", "72", "--out", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (tmp_path / f"ckda.seed{seed}.inspect.png").exists()
    stored = json.loads((KEPT / f"inspect/ckda.seed{seed}.inspect.json").read_text())
    assert seen["seed"] == seed
    assert seen["told_apart"] == stored["told_apart"] == (32 if seed == 0 else 16)
    turns = [[head["turns"] or 0 for head in one["heads"]] for one in (seen, stored)]
    assert turns[0] == pytest.approx(turns[1], abs=1e-3)
    if seed == 0:
        assert seen["ablation"]["ratio"] > 10_000
        assert seen["half_a_loop_older"]["pairs"]["half_a_loop_away"] > 0.99
        assert seen["half_a_loop_older"]["real"]["right"] > 0.99


def test_every_row_of_the_readme_is_that_of_its_record():
    """The tables of results/audio/README.md: one seed a row, dB at four lengths."""
    row = r"^\| \[`[^`]+`\]\(([^)]+\.json)\) \| (\d+) \| (.*) \|$"
    rows = re.findall(row, (KEPT / "README.md").read_text(), flags=re.M)
    records = {path: json.loads((KEPT / path).read_text()) for path, *_ in rows}
    assert set(records) == {str(path.relative_to(KEPT)) for path in KEPT.glob("*/runs/*.json")}
    assert len(rows) == sum(len(record["seeds"]) for record in records.values())
    for path, seed, cells in rows:
        place = records[path]["seeds"].index(int(seed))
        for length, cell in zip(("40", "136", "264", "2048"), cells.split(" | "), strict=True):
            assert float(cell) == pytest.approx(records[path]["snr"][length][place], abs=0.051), (path, seed, length)


@pytest.mark.parametrize("seed", range(4))
def test_the_fan_finds_an_odd_number_of_turns_untold(seed, tmp_path, capsys):
    """The kept weights, trained by the paper's protocol from a start that knows no period."""
    record = json.loads((KEPT / "one-core/runs/ckda+init=fan.json").read_text())
    assert record["recipe"]["penalties"] == {}
    assert record["key"]["task"]["balanced"] is False
    assert record["snr"]["264"][seed] > 35 > 5 > record["snr"]["2048"][seed]
    path = KEPT / f"one-core/runs/ckda+init=fan.seed{seed}.pt"
    assert path.stat().st_size < 2**20
    assert main(["inspect", "audio", str(path), "--length", "72", "--out", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    stored = json.loads((KEPT / f"inspect/ckda+init=fan.seed{seed}.inspect.json").read_text())
    assert [h["turns"] for h in seen["heads"]] == pytest.approx([h["turns"] for h in stored["heads"]], abs=1e-3)
    lasting = [h["turns"] for h in stored["heads"] if h["modulus"] > 0.99]
    assert min(abs(turns % 2 - 1) for turns in lasting) < 0.006
    assert stored["played"][1]["right"] == 1


def test_what_the_guide_says_in_short():
    plain, steady, even, fan = (
        json.loads((KEPT / path).read_text())["snr"]
        for path in (
            "continuation/runs/ckda.json",
            "seeds/runs/ckda+steady.json",
            "even/runs/ckda+even.json",
            "one-core/runs/ckda+init=fan.json",
        )
    )
    text = " ".join((KEPT.parents[1] / "docs/audio.md").read_text().split())
    assert f"({plain['264'][0]:.1f} dB at 264 for 38.1)" in text
    for name, snr in (("steady", steady), ("even", even)):
        kept = [value for value in snr["2048"] if value > 40]
        said = f"by `{name}` {len(kept)} of {len(snr['2048'])} seeds keep time to 2048 frames, the best with {max(kept):.1f} dB"
        assert said in text
    assert f"{sum(value >= 60 for value in even['264'])} of them have 60 dB at 264" in text
    assert f"all four of its seeds have {min(fan['264']):.0f} to {max(fan['264']):.0f} dB at 264" in text
    assert f"at 2048 they have {min(fan['2048']):.1f} to {max(fan['2048']):.1f} dB" in text


def test_counts_of_even_and_steady():
    """results/audio/README.md: how many of eight seeds keep time, and the interval of their share."""
    text, cells = (KEPT / "README.md").read_text(), []
    snr = [
        json.loads((KEPT / path).read_text())["snr"]
        for path in ("even/runs/ckda+even.json", "seeds/runs/ckda+steady.json")
    ]
    for near in (60, -99):
        found = [sum(a >= near and b >= 40 for a, b in zip(one["264"], one["2048"], strict=True)) for one in snr]
        cells.append(" | ".join(map(str, found)))
        ends = [f"{low:.2f} to {high:.2f}" for low, high in (binomial_interval(k, 8) for k in found)]
        cells.append(" | ".join(ends).replace("0.", "."))
    assert f"| at least 60 dB at 264 and 40 dB at 2048 | {cells[0]} |" in text
    assert f"| at least 40 dB at 2048 | {cells[2]} |" in text
    for interval in cells[1::2]:
        assert re.search(rf"^\| its 95% interval.* \| {re.escape(interval)} \|$", text, flags=re.M), interval


def test_the_best_seed_of_even_is_kept(capsys, tmp_path):
    path = KEPT / "even/runs/ckda+even.pt"
    assert path.stat().st_size < 2**20
    assert main(["inspect", "audio", str(path), "--length", "72", "--out", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["seed"] == 1
    for seed in range(8):
        stored = json.loads((KEPT / f"inspect/ckda+even.seed{seed}.inspect.json").read_text())
        assert stored["told_apart"] == 32
        assert stored["played"][1]["right"] == 1
        assert min(abs(head["turns"] % 2 - 1) for head in stored["heads"]) < 1e-6
        if seed == seen["seed"]:
            assert [h["turns"] for h in seen["heads"]] == pytest.approx([h["turns"] for h in stored["heads"]], abs=1e-5)


@pytest.mark.parametrize("folder", ["continuation", "even", "one-core", "seeds"])
def test_every_kept_run_with_a_waveform_can_be_heard(folder):
    runs = collect([KEPT / folder]).runs
    heard = {path.name.split(".")[0] for path in (KEPT / folder / "sound").glob("*.wav")}
    assert heard == {name for name, run in runs.items() if run.windows} | {"target"}
