"""recipes/lm.sh calls commands that there are, in the order it is told, and tells what is left."""

import shlex
import subprocess
from pathlib import Path

from ckda.command import Parser
from ckda.lm.options import add_ladder

ROOT = Path(__file__).parents[2]
#: in place of python: what it would be called with; with LEFT=3 units of the sweep are left
ECHO = '#!/bin/sh\nprintf "%s\\n" "$*"\ncase "$*" in *"--study sweep"*) exit ${LEFT:-0};; esac\n'


def called(tmp_path: Path, *words: str, **variables: str) -> tuple[int, list[list[str]]]:
    python = tmp_path / "python"
    python.write_text(ECHO)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)} | variables
    script = ["bash", str(ROOT / "recipes/lm.sh"), "packed", str(tmp_path / "out"), *words]
    ran = subprocess.run(script, env=environment, cwd=ROOT, text=True, capture_output=True, check=False, timeout=60)
    return ran.returncode, [shlex.split(line) for line in ran.stdout.splitlines()]


def test_every_part_is_a_command(tmp_path):
    for name in ("sweep", "ladder"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "units-1.json").write_text("{}")
    (tmp_path / "out" / "factors").mkdir()  # a call that finished no unit
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "units.json").write_text("{}")
    parts = ("unpack", "sweep", "factors", "ladder", "tracking", "throughput", "large", "collect", "fit")
    status, calls = called(tmp_path, *parts, LIMIT="500", HAVE=str(tmp_path), ONLY="12M-*")
    assert status == 0
    parser = Parser()
    add_ladder(parser)
    asked = [parser.parse_args(words[4:]) for words in calls if words[2:4] == ["lm", "ladder"]]
    assert [args.study for args in asked] == ["sweep", "factors", "ladder", "tracking", None, None]
    assert all(490 <= args.time_limit <= 500 and args.only == "12M-*" for args in asked[:4])
    assert [args.settings is not None for args in asked[:4]] == [False, True, True, True]
    assert [Path(args.out).name for args in asked[4:]] == ["sweep", "ladder"]
    assert any(words[2:4] == ["scaling", "fit"] for words in calls)
    assert sum(words[0].startswith("recipes/") for words in calls) == 3
    assert called(tmp_path, "nonsense")[0] == 2
    late = called(tmp_path, "sweep", HAVE=str(tmp_path), LIMIT="-1")[1]  # the parts before it took all of the time
    assert parser.parse_args(late[0][4:]).time_limit == 0
    status, calls = called(tmp_path, LEFT="3", HAVE=str(tmp_path))
    assert status == 3
    assert not any("--study" in words and "ladder" in words[words.index("--study") :] for words in calls)
    assert sum("--collect" in words for words in calls) == 4  # of the two folders, twice
