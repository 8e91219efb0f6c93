"""Everything that wants a GPU, in parts that a time limit may cut short: what is in --out already is not done again.

    python benchmarks/gpu_day.py --out day --limit 550                # all parts, as far as the time reaches
    python benchmarks/gpu_day.py --out day --limit 550                # the same words go on where it stopped
    python benchmarks/gpu_day.py --out day --part sweep --part host   # some of them
    python benchmarks/gpu_day.py --out day --plan                     # how long each is likely to take

Each part leaves one JSON file: tests.json (every GPU test by name with its outcome and seconds), sweep.json with bounds.json (the
sweep's rows), host.json, throughput.json, bench.json (the operator beside others, cuDNN's by `--cudnn FOLDER`).
Tests run in several processes, since they mostly compile; what is timed runs alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))  # it runs from a plain folder, where nothing is installed

from ckda.command import positive  # noqa: E402
from ckda.record import environment, read_json, write_json  # noqa: E402

JOBS = 4
SECONDS_A_TEST = 4.0  #: of one process, compiling included; measured: some 300 s for 170 tests in one
#: part -> the words of `ckda bench` that do it, and seconds of an H200
BENCH: dict[str, tuple[list[str], float]] = {
    "sweep": (["--sweep"], 150.0),
    "host": (["--host"], 60.0),
    "throughput": (["--throughput"], 450.0),
    "peers": ([], 150.0),
}
PARTS = ("tests", *BENCH)
LEAST = 20.0  #: seconds that a part must have left to begin


class Outcomes:
    """A plugin of pytest: one line of JSON for every test that begins and for every one that ends, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _tell(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.outcome == "passed" else str(report.longrepr)[-600:]
            self._tell(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why)


class Names:
    """A plugin of pytest: the tests that would run, name -> the word by which pytest finds it from any folder."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self.found = {item.nodeid: f"{item.path}::{item.nodeid.split('::', 1)[1]}" for item in session.items}


def _pytest(words: list[str], plugin: Any) -> None:
    import pytest

    pytest.main([*words, "-q", "-p", "no:cacheprovider", f"--rootdir={_root(words[0])}"], plugins=[plugin])


def _root(test: str) -> Path:
    """The folder that tests are named from, so that a test has one name whichever are asked for, wherever the repository lies."""
    place = Path(test.split("::")[0]).absolute()
    return REPOSITORY if place.is_relative_to(REPOSITORY) else place.parent


def known_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Test -> its last outcome, of earlier runs: from tests.json, and from the lines of a run that was cut short."""
    found = read_json(folder / "tests.json")["tests"] if (folder / "tests.json").exists() else {}
    lines = folder / "tests.jsonl"
    for text in lines.read_text().splitlines() if lines.exists() else ():
        line = json.loads(text)
        if line["outcome"] != "begun" or line["test"] not in found:
            found[line.pop("test")] = line
    return found


def left_over(tests: Iterable[str], known: dict[str, dict[str, Any]]) -> list[str]:
    """The tests that have not ended yet; those that had begun come last, for one of them may never end."""
    tests = [*tests]
    fresh = [name for name in tests if name not in known]
    return fresh + [name for name in tests if known.get(name, {}).get("outcome") == "begun"]


def _words(args: argparse.Namespace) -> list[str]:
    return [*args.tests, *(["-m", args.marker] if args.marker else [])]


def _run_shares(shares: list[list[str]], args: argparse.Namespace, deadline: float) -> None:
    """A process for each share of the tests that is not empty, ended at the deadline."""
    command = [sys.executable, __file__, "--out", str(args.out), "--share"]
    children = [subprocess.Popen([*command, json.dumps(share)], cwd=REPOSITORY) for share in shares if share]
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def run_tests(args: argparse.Namespace, deadline: float) -> bool:
    """The tests that are left, every job its share, those that time something at last and alone; whether all have ended."""
    names, lines = Names(), args.out / "tests.jsonl"
    _pytest([*_words(args), "--collect-only"], names)
    left = [names.found[name] for name in left_over(names.found, known_outcomes(args.out))]
    timed = [test for test in left if "/tests/bench/" in test]
    left = [test for test in left if test not in timed]
    _run_shares([left[i :: args.jobs] for i in range(args.jobs)], args, deadline)
    _run_shares([timed], args, deadline)
    found = known_outcomes(args.out)
    counts = {
        kind: sum(x["outcome"] == kind for x in found.values()) for kind in ("passed", "failed", "skipped", "begun")
    }
    counts["not begun"] = len(set(names.found) - set(found))
    record = {"environment": environment(_device()), "counts": counts, "tests": found}
    write_json(args.out / "tests.json", record)
    lines.unlink(missing_ok=True)
    print(f"tests: {counts}", flush=True)
    return not counts["begun"] and not counts["not begun"]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_bench(part: str, args: argparse.Namespace, deadline: float) -> bool:
    """One part of `ckda bench`; whether it ended. Figures are made from the records afterwards."""
    words = [*BENCH[part][0], "--out", str(args.out), *(["--smoke"] if args.smoke else [])]
    if part == "sweep":
        words += ["--jobs", str(args.jobs)]
    if args.cudnn and part in ("throughput", "peers"):
        words += ["--cudnn", str(args.cudnn)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckda", "bench", *words],
            cwd=REPOSITORY,
            timeout=max(0.0, deadline - time.monotonic()),
            stdout=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        for figure in args.out.glob("*.png"):
            figure.unlink()
    return done.returncode == 0


def plan(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of an H200 that each part is likely to take from its beginning."""
    seconds = {part: estimate for part, (_, estimate) in BENCH.items()}
    names = Names()
    _pytest([*_words(args), "--collect-only"], names)
    seconds["tests"] = SECONDS_A_TEST * len(names.found) / args.jobs
    return {part: seconds[part] for part in args.part or PARTS}


def main() -> int:
    """Run the parts in order until the time is over; 0 if all of them ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=JOBS,
        help="processes that test, or compile the rows of the sweep (default: %(default)s)",
    )
    parser.add_argument("--cudnn", type=Path, help="a folder made by cudnn_folder.py")
    parser.add_argument("--plan", action="store_true", help="print estimates and stop")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="where the tests are")
    parser.add_argument("--marker", default="gpu", help="of the tests; empty for all")
    parser.add_argument("--smoke", action="store_true", help="what is timed is tiny")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(REPOSITORY)
    if args.share:
        _pytest(json.loads(args.share), Outcomes(args.out / "tests.jsonl"))
        return 0
    if args.plan:
        seconds = plan(args)
        for part, estimate in seconds.items():
            print(f"{part:12} {estimate:6.0f} s")
        print(f"{'all':12} {sum(seconds.values()):6.0f} s")
        return 0
    deadline, ended = time.monotonic() + args.limit, True
    for part in args.part or PARTS:
        start = time.monotonic()
        if deadline - start < min(LEAST, args.limit / 2):
            print(f"{part}: not begun, the time is over", flush=True)
            ended = False
            continue
        whole = run_tests(args, deadline) if part == "tests" else run_bench(part, args, deadline)
        ended &= whole
        print(f"{part}: {time.monotonic() - start:.0f} s, {'ended' if whole else 'not ended'}", flush=True)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
