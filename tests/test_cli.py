"""The command: exit statuses, the table of verbs, and what it says when a package is missing."""

import argparse
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

import ckda
from ckda import cli, command
from ckda.command import Parser
from ckda.experiments.options import add_audio, add_demo, add_track


def _verb(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int | None]) -> None:
    """A verb `try` whose module is made here."""
    module = types.ModuleType("tried")
    module.add_options = lambda parser: command.add_common_arguments(parser, "runs/try")  # type: ignore[attr-defined]
    module.run_command = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tried", module)
    monkeypatch.setitem(cli.VERBS, "try", cli.Verb("tried", "tried.add_options", "one line of help"))


@pytest.mark.parametrize("argv", [["unknown"], ["--unknown"], ["try", "--unknown"], ["try", "--seed", "x"]])
def test_wrong_words_exit_with_two(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _verb(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: ckda" in capsys.readouterr().err


def test_bare_ckda_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS)
    assert "exit status" in text
    assert max(map(len, text.splitlines())) <= 80


def test_version_and_module() -> None:
    said = subprocess.run([sys.executable, "-m", "ckda", "--version"], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (0, f"ckda {ckda.__version__}\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("--group X9:\nthere is none"), 2), (OSError("it is full"), 2), (command.CheckFailed("wrong"), 1)],
)
def test_what_the_user_can_mend_is_one_line(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    _verb(monkeypatch, run)
    assert cli.main(["try"]) == status
    assert capsys.readouterr().err == f"ckda try: {' '.join(str(error).split())}\n"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS)


def test_help_of_a_verb_shows_the_common_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _verb(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(["try", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--out", "runs/try", "--device", "--seed", "--smoke", "--json"))


@pytest.mark.parametrize(("status", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_the_verbs_status_is_the_commands(status: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int | None:
        seen.append(args)
        return status

    _verb(monkeypatch, run)
    assert cli.main(["try", "--seed", "7", "--smoke"]) == expected
    assert (seen[0].seed, seen[0].smoke, seen[0].json, seen[0].out) == (7, True, False, "runs/try")


def test_a_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    _verb(monkeypatch, run)
    assert cli.main(["try"]) == 2
    message = capsys.readouterr().err
    assert "'rich'" in message
    assert "ckda[demo]" in message
    assert "try" in message


def test_a_module_of_our_own_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'ckda.gone'", name="ckda.gone")

    _verb(monkeypatch, run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])


def test_an_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    _verb(monkeypatch, run)
    assert cli.main(["try"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_devices() -> None:
    assert command.pick_device("cpu") == "cpu"
    assert command.pick_device("auto") in ("cpu", "cuda", "mps")
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda"):
            command.pick_device("cuda")


def test_every_extra_of_a_verb_exists() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    verbs = [
        verb for entry in cli.VERBS.values() for verb in ([entry] if isinstance(entry, cli.Verb) else entry[1].values())
    ]
    assert {verb.extra for verb in verbs} <= set(project["optional-dependencies"])


@pytest.mark.parametrize("add", [add_demo, add_track, add_audio])
def test_updates_are_read_as_in_a_recipe(add: Callable[[Parser], None], capsys: pytest.CaptureFixture[str]) -> None:
    """`--steps 1k`, as in quick+steps=1k; what is no whole number is refused."""
    parser = Parser()
    add(parser)
    read = parser.parse_args(["--steps", "1k", "--batch", "2K"])
    assert (read.steps, read.batch) == (1000, 2000)
    for text in ("1.5", "0", "k", "nan", "inf"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--steps", text])
        assert f"argument --steps: {text} is" in capsys.readouterr().err.replace("'", "")
