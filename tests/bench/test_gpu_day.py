"""benchmarks/gpu_day.py on a CPU: tests that a time limit cuts short go on where they stopped, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_day.py"

_TESTS = """
def test_first():
    raise AssertionError("it ran before")

def test_wrong():
    assert 1 + 1 == 3

def test_cut_short():
    pass
"""


def test_a_run_that_was_cut_short_goes_on_with_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(_TESTS)
    day = tmp_path / "day"
    day.mkdir()
    before = [("test_first", "begun"), ("test_first", "passed"), ("test_cut_short", "begun")]
    lines = [json.dumps({"test": f"test_few.py::{name}", "outcome": outcome}) for name, outcome in before]
    (day / "tests.jsonl").write_text("\n".join(lines) + "\n")
    words = [
        "--out",
        str(day),
        "--part",
        "tests",
        "--tests",
        str(tmp_path / "test_few.py"),
        "--marker",
        "",
        "--jobs",
        "1",
    ]
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads((day / "tests.json").read_text())
    assert {name.split("::")[-1]: x["outcome"] for name, x in record["tests"].items()} == {
        "test_first": "passed",
        "test_wrong": "failed",
        "test_cut_short": "passed",
    }
    assert record["counts"] == {"passed": 2, "failed": 1, "skipped": 0, "begun": 0, "not begun": 0}
    assert "1 + 1" in record["tests"]["test_few.py::test_wrong"]["why"]
    assert [x.name for x in day.iterdir()] == ["tests.json"]
