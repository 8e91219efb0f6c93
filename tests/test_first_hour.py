"""What a newcomer types: wrong words, wrong names, folders that cannot be written, and what is printed on the way."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckda.cli import VERBS, Verb, main
from ckda.command import Parser

ROOT = Path(__file__).parents[1]


def verbs() -> Iterator[tuple[list[str], Verb]]:
    """Every verb with the words that call it."""
    for name, entry in VERBS.items():
        if isinstance(entry, Verb):
            yield [name], entry
        else:
            yield from (([name, word], verb) for word, verb in entry[1].items())


WORDS = [
    [*words, *(["list"] if words == ["theory"] else ["x"] if words[0] == "inspect" else [])] for words, _ in verbs()
]


def parser_of(verb: Verb) -> Parser:
    parser = Parser()
    module, _, function = verb.options.rpartition(".")
    getattr(import_module(module), function)(parser)
    return parser


def test_options_are_known_without_heavy_imports() -> None:
    """A wrong word is refused in a fraction of a second, because torch and the like are not imported for it."""
    modules = sorted({verb.options.rpartition(".")[0] for _, verb in verbs()})
    code = f"import sys; [__import__(m) for m in {modules}]; print([m for m in {HEAVY} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert said.stdout == "[]\n", said.stdout + said.stderr


HEAVY = ["torch", "transformers", "matplotlib", "scipy", "sympy", "triton", "rich"]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_unknown_option_gets_the_verbs_own_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--nosuch"])
    assert stop.value.code == 2
    said, named = capsys.readouterr().err, " ".join(words).removesuffix(" x")
    assert said.startswith(f"usage: ckda {named} ")
    assert said.endswith(f"ckda {named}: error: unknown: --nosuch\n")


def test_defaults_are_those_of_the_library() -> None:
    """The options are written without importing what they fill; their defaults must be the same."""
    from ckda.experiments.audio.task import BPM
    from ckda.experiments.demo import DemoConfig
    from ckda.lm.commands import ModelChoice
    from ckda.lm.commands.generate import Generation
    from ckda.lm.inspect import Question
    from ckda.lm.needle import Haystacks
    from ckda.lm.prepare import Preparation
    from ckda.lm.train import Options
    from ckda.scaling.commands import Effort, compare, fit

    filled: dict[str, tuple[Any, ...]] = {
        "demo": (DemoConfig(),),
        "lm prepare": (Preparation("train:32768"),),
        "lm train": (Options(),),
        "lm generate": (Generation(), ModelChoice("x")),
        "needle": (Haystacks(), ModelChoice("x")),
        "inspect lm": (Question(),),
        "scaling fit": (fit.Config("x"), Effort()),
        "scaling compare": (compare.Config("x"), Effort()),
    }
    by_name = {" ".join(words): verb for words, verb in verbs()}
    assert parser_of(by_name["audio"]).get_default("bpm") == BPM
    for name, wanted in filled.items():
        parser = parser_of(by_name[name])
        asked = {
            action.dest
            for action in parser._actions
            if action.dest not in ("out", "device", "seed", "smoke", "model", "help")
        }
        for one in wanted:
            for field in (f.name for f in fields(one) if f.name in asked):
                default, own = parser.get_default(field), getattr(one, field)
                if isinstance(own, tuple):
                    default = tuple(default.split(",")) if isinstance(default, str) else tuple(default or ())
                    own = tuple(map(str, own))
                assert default == own, (name, field)


@pytest.mark.parametrize("verb", ["track", "audio", "lm train", "lm eval"])
def test_help_names_what_there_is(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    text = capsys.readouterr().out
    assert {"track": "gated-deltaproduct3", "audio": "deltaproduct2", "lm train": "tiny", "lm eval": "piqa"}[
        verb
    ] in text
    assert "--arm " not in text  # the hidden alias of --mixer


@pytest.mark.parametrize("words", [[], *WORDS, ["theory"], ["inspect"], ["lm"], ["scaling"]], ids=" ".join)
def test_help_fits_a_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([word for word in words if word != "x"] + ["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


# Folders --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--smoke"],
        ["track", "--smoke"],
        ["audio", "--smoke"],
        ["bench", "--smoke", "--device", "cpu"],
        ["lm", "params"],
        ["lm", "prepare", "--smoke"],
        ["lm", "train", "--smoke"],
        ["lm", "ladder", "--smoke"],
        ["lm", "eval", "--smoke"],
        ["lm", "generate", "--smoke"],
        ["needle", "--smoke"],
        ["inspect", "lm", "--smoke"],
        ["inspect", "track", "x"],
        ["inspect", "audio", "x"],
        ["theory", "verify", "--smoke"],
        ["theory", "table", "--smoke"],
        ["theory", "show", "fig:" + "alpha_sweep_2d"],
        ["theory", "verdict", "--up-to", "2"],
        ["theory", "compile", "Z2"],
        ["scaling", "fit", "--smoke"],
        ["scaling", "compare", "--smoke"],
    ],
    ids=" ".join,
)
def test_a_folder_that_cannot_be_written_is_told_first_and_alike(
    words: list[str], tmp_path: Path, assert_refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    name = " ".join(word for word in words[:2] if not word.startswith("-") and words[0] not in ("theory", "track"))
    assert_refused([*words, "--out", "file"], rf"^ckda {name}.*: --out file cannot be written: a file is in the way$")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_anything_is_trained(
    tmp_path: Path, assert_refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 40_000}))
    told = r": --out .*: the disk has 0.04 MiB left; results need 8 MiB$"
    for verb in ("track", "demo", "audio"):
        assert_refused([verb, "--smoke", "--device", "cpu", "--out", str(tmp_path / verb)], told)
        assert not list((tmp_path / verb).iterdir())


# Numbers and names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["track", "--seeds", "abc"], "argument --seeds: 'abc' is no whole number"),
        (["track", "--seed", "1.5"], "argument --seed: '1.5' is no whole number"),
        (["track", "--time-limit", "soon"], "argument --time-limit: 'soon' is no number"),
        (["lm", "train", "--lr", "-1"], "argument --lr: -1.0 is not above 0"),
        (["lm", "train", "--cooldown", "2"], "argument --cooldown: 2.0 is not from 0 to 1"),
        (["lm", "train", "--tokens", "20Q"], "argument --tokens: '20Q' is no number like 1000, 20K"),
        (["lm", "ladder", "--tokens", "20Q"], "argument --tokens: '20Q' is no number like 1000, 20K"),
        (["lm", "ladder", "--slurm", "{"], "argument --slurm: '{' is no JSON"),
        (["scaling", "fit", "--level", "high"], "argument --level: 'high' is no number"),
        (["audio", "--bpm", "0"], "argument --bpm: 0.0 is not above 0"),
    ],
)
def test_numbers_are_refused_in_words(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert f"error: {told}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["track", "Foo"], r"^ckda track: 'Foo' is no group known here; try [^F]*$"),
        (["track", "Z2xFoo"], r"^ckda track: 'Z2xFoo': 'Foo' is no group known here"),
        (["track", "shell1"], r"^ckda track: shell1 has 1 cups; the shell game is played with 2 to 5, as shell3$"),
        (["track", "--recipe", "momentum=fast"], r"--recipe momentum=fast: 'fast' is no number such as 0.95$"),
        (["track", "--recipe", "lr-muon=big"], r"--recipe lr-muon=big: 'big' is no number such as 0.95$"),
        (["track", "--arm", "lstm"], r"--mixer lstm: there is none; there are kda"),
        (
            ["lm", "train", "--data", "x", "--steps", "1", "--model", "tiny:foo"],
            r"no model tiny:foo; there are tiny:trans",
        ),
        (
            ["lm", "train", "--data", "x", "--steps", "1", "--model", "foo"],
            r"SIZE:ARM with a size of tiny, 47M.*an arm of",
        ),
        (["lm", "train", "--data", "x", "--model", "tiny:kda"], r"give either --tokens or --steps$"),
        (["needle", "x", "--lengths", "12x"], r"^ckda needle: --lengths 12x: '12x' is no whole number; give whole"),
        (["theory", "compile", "Foo"], r"^ckda theory compile: 'Foo' is no group known here"),
        (["lm", "generate", "nosuch", "--prompt", "hello"], r"^ckda lm generate: nosuch is neither"),
    ],
)
def test_names_that_are_not_there(words: list[str], told: str, assert_refused: Callable, tmp_path: Path) -> None:
    device = [] if words[0] == "theory" else ["--device", "cpu"]
    assert_refused([*words, *device, "--out", str(tmp_path)], told)


def test_recipes_show_how_a_value_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", "--recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = {line.split()[0] for line in lines}
    assert {"smoothing=SHARE", "steps=N", "heads=HxK", "keep=K-of-M", "momentum=M", "lr-muon=RATE"} <= names


# Theory and scaling -----------------------------------------------------------------------------------------------------------


def test_a_bare_table_an_empty_word_and_a_theorem_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two.json").write_text("[[0, 1], [1, 0]]")
    assert main(["theory", "compile", str(tmp_path / "two.json"), "--out", str(tmp_path / "machine")]) == 0
    said = capsys.readouterr().out
    theorems = re.findall(r"(?:prop|thm|lem|cor):[\w-]+", said)
    assert len(theorems) == len(set(theorems)) == 1
    assert main(["theory", "run", str(tmp_path / "machine"), "--word", ""]) == 0
    assert "the word is empty, so there is no answer; letters: 0 = " in capsys.readouterr().out


def test_a_smoke_check_says_what_it_did_and_where_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "verify", "lem:" + "gauge", "--smoke", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads((tmp_path / "verify-some.json").read_text())
    assert f"{record['claims'][0]['cases']} cases" in lines[1]
    assert "at effort 0.05; at effort 1: " in lines[1]
    assert re.fullmatch(
        rf"\d+ claims: \d+ verified, at effort 0.05 of 1; \d+ s. Record: {tmp_path}/verify-some.json", lines[-1]
    )


def test_tables_of_scaling_fit_a_terminal() -> None:
    from ckda.scaling import load_fit
    from ckda.scaling.commands import compare, predict
    from ckda.scaling.report import fit_text, prediction_text

    folder = ROOT / "results/scaling"
    compared = compare.text(compare.Comparison.load(folder / "compare.json"))
    predicted = predict.run(predict.Config(cells=("7B/1T",), compute=("1e22",), fit=str(folder / "fit.json")))
    for text in (compared, fit_text(load_fit(folder / "fit.json")), prediction_text(predicted)):
        assert max(map(len, text.splitlines())) <= 80
    assert "Transformer++ (QK-norm)" in compared
