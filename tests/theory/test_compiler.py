"""From a file to layers: compiled machines answer as the direct simulation does, and say why where there is none."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckda.cli import main
from ckda.groups import group
from ckda.theory import checker, horizons, trials
from ckda.theory.compiler import Compile, Machine, NoRealisation, Run, compile_machine, direct, load, run
from ckda.theory.machines import WFA
from ckda.theory.mutations import try_checker

A5 = {"name": "mine", "generators": [[1, 2, 0, 3, 4], [0, 1, 3, 4, 2]]}
SL23 = {"name": "sl", "matrices": [[[1, 1], [0, 1]], [[1, 0], [1, 1]]], "modulo": 3}
DFA7 = {"name": "abbaab", "regex": "(a|b)*abbaab"}
PARITY = {"alphabet": ["0", "1"], "start": 0, "accept": [0], "delta": [[0, 1], [1, 0]]}
WFA2 = {
    "name": "fib",
    "alphabet": ["f", "h"],
    "initial": [1, 0],
    "final": ["0", "1"],
    "matrices": {"f": [["1", "1"], ["1", "0"]], "h": [["1/2", "0"], ["-1/3", "2"]]},
}
SOURCES = {"A5": A5, "SL(2,3)": SL23, "Frob20": "Frob20", "Q8": "Q8", "DFA": DFA7, "parity": PARITY, "WFA": WFA2}


@pytest.fixture(scope="module")
def machines():
    return {name: compile_machine(Compile(source, words=1, length=200)) for name, source in SOURCES.items()}


def word_for(machine, length, seed=0):
    return random.Random(seed).choices(range(len(machine.config["letters"])), k=length)


@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_those_of_the_direct_simulation(machines, name):
    machine = machines[name]
    word = word_for(machine, 60)
    wanted = direct(machine.certificate, word)
    assert run(Run(machine, word, exact=True)) == ([str(x) for x in wanted] if name == "WFA" else wanted)
    found = machine.answers(word)
    if name == "WFA":
        assert found == pytest.approx([float(x) for x in wanted], rel=1e-9, abs=1e-9)
    else:
        assert found == wanted


def test_a_group_is_a_layer_of_complex_kda_with_exact_gates():
    machine = compile_machine(Compile("SL(2,3)", "all", words=1, length=50))
    assert machine.config["dimensions"] == [4, 4, 2, 2]
    module = machine.module()
    alpha, key, beta = module.layer.transitions(module.embed(torch.arange(24)[None]))
    assert set(alpha.unique().tolist()) == {-1.0, 1.0}
    assert beta.unique().tolist() == [2.0]
    assert torch.allclose(key.norm(dim=-1), torch.ones(()), atol=1e-6)
    word = word_for(machine, 2000)
    assert module(torch.tensor([word]))[0].tolist() == direct(machine.certificate, word)


def test_the_elements_are_the_users_own():
    machine = compile_machine(Compile(A5, words=1, length=50))
    assert machine.config["elements"][machine.config["identity"]] == "e"
    assert machine.config["letters"] == ["(123)", "(345)"]
    (after,) = machine.answers([0])
    assert machine.config["elements"][after] == "(123)"


@pytest.mark.parametrize("name", ["A5", "DFA", "WFA"])
def test_a_saved_machine_runs_as_before(machines, name, tmp_path):
    machine = machines[name]
    folder = machine.save(tmp_path / "machine")
    again = load(folder)
    word = word_for(machine, 40, 1)
    assert isinstance(again, Machine)
    assert again.answers(word) == machine.answers(word)
    assert again.checked == machine.checked
    told = subprocess.run(
        [sys.executable, "-I", str(folder / "checker.py"), str(folder / "certificate.json")],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout
    assert told.stdout.startswith("accepted")


def test_certificates_are_canonical(machines, tmp_path):
    first = machines["Q8"].save(tmp_path / "a")
    second = compile_machine(Compile("Q8", words=1, length=50)).save(tmp_path / "b")
    assert (first / "certificate.json").read_bytes() == (second / "certificate.json").read_bytes()


@pytest.mark.parametrize("name", ["Q8", "SL(2,3)", "parity", "WFA"])
def test_the_checker_rejects_what_computes_something_else(machines, name):
    certificate = machines[name].certificate
    assert checker.check(certificate)
    word = word_for(machines[name], 120, 3)
    tried, rejected = try_checker(certificate, 10, word)
    assert tried == rejected
    assert tried.total() == 10


SHIPPED = sorted((Path(__file__).parents[2] / "results" / "theory" / "certificates").glob("*.json"))


def test_shipped_certificates_are_accepted():
    assert len(SHIPPED) >= 20
    for path in SHIPPED[:: max(1, len(SHIPPED) // 6)]:
        if path.stat().st_size < 60_000:
            assert checker.check(json.loads(path.read_text())), path


def _by_time(path):
    """Some take up to a minute: with `pytest -m exhaustive`."""
    slow = path.stem in ("SL2_5", "D30", "Z60", "Frob20", "GL2_3", "A5xZ2", "wfa4", "S5_layers3")
    return pytest.param(path, id=path.stem, marks=[pytest.mark.exhaustive] if slow else [])


@pytest.mark.slow
@pytest.mark.parametrize("path", [_by_time(path) for path in SHIPPED])
def test_shipped_certificates_are_accepted_and_no_change_of_them_is(path):
    certificate = json.loads(path.read_text())
    assert checker.check(certificate)
    tried, rejected = try_checker(certificate, 100)
    assert tried == rejected
    assert tried.total() == 100


def test_s5_is_refused_with_the_theorem():
    with pytest.raises(NoRealisation, match="thm:s5-impossibility") as refused:
        compile_machine(Compile({"generators": [[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]]}))
    assert refused.value.kind == "impossible"
    with pytest.raises(NoRealisation, match="these letters is not known") as refused:
        compile_machine(Compile({"generators": [[1, 0, 2, 3, 4], [0, 2, 1, 3, 4], [0, 1, 3, 2, 4], [0, 1, 2, 4, 3]]}))
    assert refused.value.kind == "unknown"


def test_s5_by_three_layers(tmp_path, capsys):
    out = str(tmp_path / "machine")
    assert main(["theory", "compile", "S5", "--out", out]) == 1
    assert "--layers 3" in capsys.readouterr().out
    assert main(["theory", "compile", "S5", "--layers", "3", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 3
    machine = load(out)
    word = word_for(machine, 60)
    wanted = direct(machine.certificate, word)
    assert machine.answers(word) == wanted == run(Run(machine, word, exact=True))
    S5 = group("S5")
    letters, now = [S5.index(S5.labels[S5.generators[a]]) for a in word], S5.identity
    assert [now := S5.mul(g, now) for g in letters] == wanted
    assert machine.config["elements"][wanted[0]] == machine.config["letters"][word[0]]
    tried, rejected = try_checker(machine.certificate, 20)
    assert tried == rejected
    with pytest.raises(ValueError, match="automata to 3"):
        compile_machine(Compile(PARITY, layers=1))
    with pytest.raises(NoRealisation, match="at most 256"):
        compile_machine(Compile("Z130", layers=3))


def test_rounded_states_of_automata_are_measured():
    config = horizons.Horizons(groups=(), dfas=(3,), wfas=(1,), length=200, rounded_length=100, wfa_length=60)
    measured = horizons.measure(config)
    (dfa,), (wfa,) = measured["dfas"], measured["wfas"]
    assert dfa["bfloat16 states"] == {"right": 100, "clock": 100, "length": 100}
    assert wfa["bfloat16 states"]["right"] == 60


def test_limits_give_their_reason():
    with pytest.raises(NoRealisation, match="more than 10 different maps"):
        compile_machine(Compile(DFA7, most_maps=10))
    wfa = WFA.random(5, 1, random.Random(0))
    data = {
        "initial": [1] * 5,
        "final": [1] * 5,
        "matrices": {"a": [[str(wfa.matrices[0][i, j]) for j in range(5)] for i in range(5)]},
    }
    with pytest.raises(NoRealisation, match="256"):
        compile_machine(Compile(data))


DFA1 = {"alphabet": ["a"], "delta": [[0]]}
WFA1 = {"initial": [1], "final": [1], "matrices": {"a": [[1]]}}
WRONG = {
    "generators is \\[\\]": {"generators": []},
    "generator 0 is 3": {"generators": [3]},
    "generator 0 is \\[1.0": {"generators": [[1.0, 0.0]]},
    "generator 0 is \\[True": {"generators": [[True, False]]},
    "images of 0 ... 2, each once": {"generators": [[0, 0, 1]]},
    "'foo' is unknown here": {"generators": [[1, 0]], "foo": 3},
    "'acept' is unknown here": {**DFA1, "acept": [0]},
    "differ in length": {"table": [[0, 1], [1]]},
    "associativity": {"table": [[0, 1, 2], [1, 0, 2], [2, 2, 0]]},
    "matrix 0 is 5": {"matrices": [5], "modulo": 3},
    "not invertible modulo 3": {"matrices": [[[1, 1], [0, 0]]], "modulo": 3},
    "more than 1000 elements": {"matrices": [[[1, 1], [0, 1]], [[1, 0], [1, 1]]], "modulo": 101},
    "name is 5": {"name": 5, "table": [[0]]},
    "delta is \\[\\]": {"alphabet": ["a"], "delta": []},
    "accept 3 must be states": {**DFA1, "accept": 3},
    "delta\\[0\\] is \\[0.0": {"alphabet": ["a"], "delta": [[0.0]]},
    "the letter 'a' twice": {"alphabet": ["a", "a"], "delta": [[0, 0]]},
    "cannot be read": {"regex": "(a"},
    "'\\[a' cannot be read": {"regex": "[a"},
    "leave out": {"regex": "^a$"},
    "regex is 5": {"regex": 5},
    "alphabet is 5": {"regex": "a", "alphabet": 5},
    "'1/0' is no fraction": {**WFA1, "initial": ["1/0"]},
    "initial is '11'": {**WFA1, "initial": "11"},
    "initial is \\[\\]": {"initial": [], "final": [], "matrices": {"a": []}},
    "alphabet is \\[\\]": {**WFA1, "matrices": {}},
    "a matrix for every letter: alphabet": {**WFA1, "alphabet": ["b"]},
    "beyond 1e\\+100": {**WFA1, "matrices": {"a": [["1" + "0" * 101]]}},
    "neither a group": {"states": 3},
    "must hold one state": {"alphabet": ["a"], "delta": [[1], [2]]},
    "must be states": {"alphabet": ["a"], "delta": [[0]], "start": 4},
    "needs its alphabet": {"delta": [[0]]},
    "no fraction": {"initial": ["x"], "final": [1], "matrices": {"a": [[1]]}},
    "whole numbers or fractions": {"initial": [0.5], "final": [1], "matrices": {"a": [[1]]}},
    "1 x 1": {"initial": [1], "final": [1], "matrices": {"a": [[1, 2]]}},
    "a WFA needs": {"initial": [1], "final": [1]},
}


def test_small_and_odd_machines_are_right():
    assert compile_machine(Compile("Z1", words=1, length=20)).answers([0, 0]) == [0, 0]
    ranges = compile_machine(Compile({"regex": "[a-c]*d"}, words=1, length=20))
    assert ranges.config["letters"] == ["a", "b", "c", "d"]
    assert [accepts for _, accepts in ranges.answers([1, 3])] == [0, 1]
    names = compile_machine(Compile("Frob22", words=1, length=20)).config
    assert names["elements"][1] == "(1, 0)"  # a label, no permutation


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({**WFA1, "matrices": {"a": [["1" + "0" * 40]]}}, "beyond floats"),
        ({"regex": "(a{90})*"}, "85 states are the most"),
        ("Z211", "degree 210"),
    ],
)
def test_what_is_too_large_gives_its_limit(source, why):
    with pytest.raises(NoRealisation, match=why) as refused:
        compile_machine(Compile(source))
    assert refused.value.kind == "unknown"


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_file_says_why(why):
    with pytest.raises(ValueError, match=why):
        compile_machine(Compile(WRONG[why]))


def test_through_the_command(tmp_path, capsys):
    source = tmp_path / "a5.json"
    source.write_text(json.dumps(A5))
    out = str(tmp_path / "machine")
    assert main(["theory", "compile", str(source), "--out", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["layers"], result["theorem"]) == (1, "cor:a5-four")
    assert main(["theory", "run", out, "--word", "0 1 1", "--json", "--device", "cpu"]) == 0
    operator = json.loads(capsys.readouterr().out)["element"]
    assert main(["theory", "run", out, "--word", "0 1 1", "--json", "--exact"]) == 0
    assert json.loads(capsys.readouterr().out)["element"] == operator
    assert main(["theory", "run", out, "--word", "0 7"]) == 2
    assert "'7' is no letter" in capsys.readouterr().err
    assert main(["theory", "compile", "S5", "--out", out]) == 1
    assert "thm:s5-impossibility" in capsys.readouterr().out
    source.write_text("{")
    assert main(["theory", "compile", str(source)]) == 2
    assert main(["theory", "run", str(tmp_path), "--word", "0"]) == 2
    assert "no machine of" in capsys.readouterr().err


def test_letters_by_name(tmp_path, capsys):
    out = str(tmp_path / "machine")
    (tmp_path / "dfa.json").write_text(json.dumps({"regex": "(ab)*"}))
    assert main(["theory", "compile", str(tmp_path / "dfa.json"), "--out", out, "--json"]) == 0
    capsys.readouterr()
    assert main(["theory", "run", out, "--word", "abab", "--json", "--device", "cpu"]) == 0
    assert [accepts for _, accepts in json.loads(capsys.readouterr().out)["state, accepted"]] == [0, 1, 0, 1]


def test_damaged_and_mixed_machines_are_refused(machines, tmp_path, assert_refused):
    machines["Q8"].save(tmp_path / "q8")
    machines["parity"].save(tmp_path / "parity")
    word = ["--word", "0"]
    for name, text in (("machine.json", b"{"), ("machine.json", b"{}"), ("weights.safetensors", b"x")):
        folder = machines["Q8"].save(tmp_path / "damaged")
        (folder / name).write_bytes(text)
        assert_refused(["theory", "run", str(folder), *word], "damaged or of different machines")
    mixed = machines["Q8"].save(tmp_path / "mixed")
    (mixed / "weights.safetensors").write_bytes((tmp_path / "parity" / "weights.safetensors").read_bytes())
    assert_refused(["theory", "run", str(mixed), *word], "damaged or of different machines")
    for bad in ("x", "01", "-1", "²", "0 9"):
        assert_refused(["theory", "run", str(tmp_path / "q8"), f"--word={bad}"], "is no letter")


def test_names_that_are_numbers(tmp_path, capsys):
    """Of an automaton they are names, with or without spaces."""
    turned = {"alphabet": ["1", "0"], "accept": [1], "delta": [[1, 0], [0, 1]]}
    folder = str(compile_machine(Compile(turned, words=1, length=20)).save(tmp_path / "machine"))
    for word in ("1 0 0", "100"):
        assert main(["theory", "run", folder, "--word", word, "--json", "--device", "cpu"]) == 0
        assert json.loads(capsys.readouterr().out)["word"] == [0, 1, 1]


def test_an_interrupted_compile_leaves_what_was_there(tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / "machine")]
    assert main(["theory", "compile", "Z3", *out]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "machine").iterdir()}
    assert main(["theory", "compile", "Z3", "--letters", "all", *out]) == 2  # of the same name, not the same machine
    monkeypatch.setattr("ckda.theory.compiler.check_layer", lambda layer: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["theory", "compile", "Z2", "--fresh", *out]) == 130
    assert {path.name: path.read_bytes() for path in (tmp_path / "machine").iterdir()} == before


def test_a_machine_that_fails_its_check_is_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ckda.theory.compiler.direct", lambda certificate, word: [None] * len(word))
    assert main(["theory", "compile", "Z3", "--out", str(tmp_path)]) == 1
    assert "nothing is written" in capsys.readouterr().err
    assert not (tmp_path / "machine.json").exists()


def test_a_users_own_files_are_tried(tmp_path, monkeypatch, capsys):
    """In this process, for speed; the record is made with new ones."""

    def here(*words):
        return SimpleNamespace(returncode=main(["theory", *words]), stdout=capsys.readouterr().out), 0.0

    monkeypatch.setattr(trials, "_ckda", here)
    row = trials.try_file(trials.FILES["a DFA of 7 states by a pattern"], tmp_path)
    assert (row["exit"], row["operator is exact"]) == (0, True)
    assert row["checker"].startswith("accepted")
    row = trials.try_file(trials.FILES["a random WFA of 4 states"], tmp_path / "wfa")
    assert row["largest relative error"] < 1e-9


def test_verdicts_through_the_command(tmp_path, capsys):
    assert main(["theory", "verdict", "Q8", "S5", "--up-to", "6", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tracked"], result["impossible"]) == (9, 1)
    assert main(["theory", "verdict"]) == 2
    assert main(["theory", "verdict", "--up-to", "64"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.exhaustive] if x == "SL(2,5)" else []) for x in horizons.GROUPS]
)
def test_every_group_of_the_table_follows_20000_letters(name):
    machine = compile_machine(Compile(name, "all", words=1, length=100))
    word = word_for(machine, 20_000)
    assert machine.module()(torch.tensor([word]))[0].tolist() == direct(machine.certificate, word)
    assert machine.config["elements"][machine.config["identity"]] is not None
    assert group(name).order == len(machine.config["elements"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["S3", "A5", "Frob20", "SL(2,3)", "GL(2,3)"])
def test_groups_run_on_a_gpu(name):
    machine = compile_machine(Compile(name, "all", words=1, length=50))
    word = word_for(machine, 5000)
    assert run(Run(machine, word, device="cuda")) == direct(machine.certificate, word)
