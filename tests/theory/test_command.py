"""`ckda theory`: verify reports refutations and crashes and goes on; show draws; table links every cell."""

import json

import pytest

from ckda.cli import main
from ckda.theory import command as cli
from ckda.theory import tables
from ckda.theory.claims import CLAIMS, Claim, Evidence, Inconclusive, Refuted, load_claims
from ckda.theory.figures import DRAWINGS
from ckda.theory.verify import check, passed, plain, select, verify

CHEAP = ["eq:diagfactor", "thm:complex_eigenvalues/unit-key"]


def good(effort=1.0):
    """A check that passes."""
    return Evidence(3, "exact", 0.5, "three cases", {"pairs": (1, 2)})


def refuted(effort=1.0):
    raise Refuted("k = (1, 1)")


def broken(effort=1.0):
    raise ZeroDivisionError("a slip")


@pytest.fixture
def registry(monkeypatch):
    """A registry of three claims in place of the paper's."""
    claims = {f.__name__: Claim(f.__name__, "a statement", f) for f in (good, refuted, broken)}
    monkeypatch.setattr(cli, "CLAIMS", claims)
    return claims


def test_records_of_the_three_outcomes(registry):
    records = verify(registry, registry)
    assert [r["status"] for r in records] == ["verified", "refuted", "broken"]
    assert records[0]["data"] == {"pairs": [1, 2]}
    assert records[1]["error"] == "k = (1, 1)"
    assert "ZeroDivisionError" in records[2]["error"]
    assert passed(records[:1])
    assert not passed(records)


def test_verify_reports_everything_and_exits_1(registry, tmp_path, capsys):
    assert main(["theory", "verify", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    for part in (
        "verified",
        "not labelled; 3 cases, margin 0.5; three cases",
        "refuted",
        "k = (1, 1)",
        "ZeroDivisionError",
    ):
        assert part in shown
    result = json.loads((tmp_path / "verify.json").read_text())
    assert (result["verified"], result["refuted"], result["broken"]) == (1, 1, 1)
    assert result["environment"]["versions"]["sympy"]
    assert not (tmp_path / "verify.partial.json").exists()


def test_verify_json_is_alone_on_standard_output(registry, tmp_path, capsys):
    assert main(["theory", "verify", "good", "--json", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["claims"][0]["label"] == "good"
    assert "good" in captured.err


def test_an_interrupted_run_is_resumed(registry, tmp_path, monkeypatch):
    calls = []

    def interrupted(effort=1.0):
        calls.append("interrupted")
        if calls.count("interrupted") == 1:
            raise KeyboardInterrupt
        return Evidence(1, "exact")

    def once(effort=1.0):
        calls.append("once")
        return Evidence(1, "exact")

    claims = {f.__name__: Claim(f.__name__, "", f) for f in (once, interrupted)}
    monkeypatch.setattr(cli, "CLAIMS", claims)
    monkeypatch.setattr(cli, "environment", lambda: {"commit": "abc"})
    assert main(["theory", "verify", "--out", str(tmp_path)]) == 130
    assert main(["theory", "verify", "--out", str(tmp_path)]) == 0
    assert calls.count("once") == 1
    assert main(["theory", "verify", "--fresh", "--out", str(tmp_path)]) == 0
    assert calls.count("once") == 2


def test_unknown_names_say_so(tmp_path, capsys):
    assert main(["theory", "verify", "complex_eigenvalue", "--out", str(tmp_path)]) == 2
    assert "thm:complex_eigenvalues" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["theory list --seed 3", "theory verify --device cuda", "lm params --smoke"])
def test_options_stand_only_where_they_mean_something(words, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert f"unknown: {words.split()[2]}" in capsys.readouterr().err


def test_real_claims_through_the_command(tmp_path):
    assert main(["theory", "verify", *CHEAP, "--smoke", "--out", str(tmp_path)]) == 0


def test_list_names_every_claim(capsys):
    assert main(["theory", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(label in shown for label in CLAIMS)
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["theory", "list", "--json"]) == 0
    assert {entry["label"] for entry in json.loads(capsys.readouterr().out)} == set(CLAIMS)


def test_select():
    labels = dict.fromkeys(["a/x", "a/y", "ab"])
    assert select([], labels) == ["a/x", "a/y", "ab"]
    assert select(["ab", "a"], labels) == ["ab", "a/x", "a/y"]
    assert select(["a/"], labels) == ["a/x", "a/y"]
    assert select(["a"], labels | {"a": None}) == ["a/x", "a/y", "a"]  # a label and its parts, not its namesakes


def test_prefixes_work_on_the_real_labels():
    claims = load_claims()
    assert set(select(["thm:" + "multi"], claims)) == {label for label in claims if label.startswith("thm:multilayer")}
    assert select(["prop:" + "axis"], claims) == ["prop:axis-test", "prop:axis-test/symbolic"]
    assert "prop:orthogonal-dplr/search" in select(["prop:orthogonal-dplr"], claims)


def short(effort=1.0):
    raise Inconclusive("only 3 of 13 angles")


@pytest.mark.parametrize(("effort", "status"), [("0.05", 0), ("1", 1)])
def test_a_search_that_falls_short_is_inconclusive_not_refuted(monkeypatch, tmp_path, capsys, effort, status):
    monkeypatch.setattr(cli, "CLAIMS", {"short": Claim("short", "a statement", short)})
    assert main(["theory", "verify", "--effort", effort, "--out", str(tmp_path)]) == status
    shown = capsys.readouterr().out
    assert "inconclusive at this effort" in shown
    assert "refuted" not in shown
    name = "verify.json" if effort == "1" else "verify-smoke.json"  # less than full effort does not take its place
    assert f"1 claim: 1 inconclusive{'' if effort == '1' else ', at effort 0.05 of 1'}" in shown
    assert shown.rstrip().endswith(f"Record: {tmp_path / name}")
    assert json.loads((tmp_path / name).read_text())["inconclusive"] == 1


def test_results_go_under_runs_by_default(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["theory", "verify", "good"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "theory" / "verify-some.json").exists()


def test_plain_refuses_nothing():
    assert plain({"a": {3}, 2: [float("nan")]}) == {"a": [3], "2": [None]}


OWN_DRAWINGS = ["fig:alpha_sweep_2d", "fig:beta_alpha_sweep", "prop:CKDA-canonical", "prop:CKDA-factorization"]


@pytest.mark.parametrize("label", OWN_DRAWINGS)
def test_show_draws(label, tmp_path, capsys):
    assert main(["theory", "show", label, "--out", str(tmp_path)]) == 0
    assert "drawn:" in capsys.readouterr().out
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 5000


def test_show_explains_without_a_drawing(capsys, tmp_path):
    assert main(["theory", "show", "lem:gauge", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ckda.theory.structure.absorb" in shown
    assert "no drawing" in shown


def test_every_drawing_belongs_to_something():
    load_claims()
    for label in DRAWINGS:
        assert label.startswith("fig:") or select([label], CLAIMS)


def test_every_cell_of_the_tables_is_a_check_a_citation_or_a_definition():
    claims = load_claims()
    missing = [label for label in tables.labels(list(tables.TABLES.values())) if label not in claims]
    assert missing == []
    definitions = {"Transition", "Param. ranges", "Ranges", "Recurrence order"}
    for table in tables.TABLES.values():
        for name, row in table.rows.items():
            assert len(row) == len(table.columns)
            for cell in row:
                assert name in definitions or cell.checks or cell.cited, (table.label, name)


def test_cells_are_what_the_checks_found():
    claim = load_claims()["tab:theory-summary/pairs/GDN"]
    record = check(claim, 0.05)
    (_, gdn, *_) = tables.TABLES["tab:theory-summary"].rows["Complex pairs"]
    records = {record["label"]: record, "sec:free": record}
    assert tables.text(gdn, records) == "0"
    assert tables.mark(gdn, records) == "checked"
    changed = record | {"data": {"cells": {"GDN": {"value": 7}}}}
    assert tables.text(gdn, records | {record["label"]: changed}) == "7"
    short = {record["label"]: {"status": "inconclusive", "error": "found none"}}
    assert tables.mark(gdn, records | short) == "inconclusive at this effort"
    failed = {record["label"]: {"status": "refuted", "error": "found two"}}
    assert tables.mark(gdn, records | failed) == "REFUTED"
    assert "REFUTED" in tables.markdown(tables.TABLES["tab:theory-summary"], records | failed)


def test_table_writes_both_tables(tmp_path, monkeypatch, capsys):
    def stand_in(effort=1.0):
        raise Refuted("not looked at")

    load_claims()
    monkeypatch.setattr(cli, "CLAIMS", {label: Claim(label, "", stand_in) for label in CLAIMS})
    assert main(["theory", "table", "--out", str(tmp_path)]) == 1
    assert "REFUTED" in capsys.readouterr().out
    data = json.loads((tmp_path / "tables.json").read_text())
    assert [t["label"] for t in data["tables"]] == ["tab:theory-summary", "tab:recurrence-spectrum"]
    assert (tmp_path / "tables.md").read_text().count("|---") > 8


def test_another_machine_is_not_replaced_unasked(tmp_path, assert_refused):
    out = ["--out", str(tmp_path / "machine")]
    assert main(["theory", "compile", "Z3", *out]) == 0
    assert main(["theory", "compile", "Z3", *out]) == 0
    before = (tmp_path / "machine/machine.json").read_bytes()
    assert_refused(["theory", "compile", "Z2", *out], r"holds the machine Z3.*--fresh")
    assert (tmp_path / "machine/machine.json").read_bytes() == before
    assert main(["theory", "compile", "Z2", "--fresh", *out]) == 0
