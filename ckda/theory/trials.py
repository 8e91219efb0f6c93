"""What a user does, timed: compile a file of one's own, check its certificate alone, run it both ways; each a new process."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckda.record import environment, write_json
from ckda.theory.horizons import random_wfa

__all__ = ["FILES", "try_file", "write_trials"]

#: the files of issue and manual: two permutations, matrices modulo 3, a pattern of seven states, a random WFA, S5
FILES: dict[str, dict[str, Any]] = {
    "A5 by two permutations": {"generators": [[1, 2, 0, 3, 4], [0, 1, 3, 4, 2]]},
    "SL(2,3) by matrices": {"matrices": [[[1, 1], [0, 1]], [[1, 0], [1, 1]]], "modulo": 3},
    "a DFA of 7 states by a pattern": {"regex": "(a|b)*abbaab"},
    "a random WFA of 4 states": random_wfa(4, random.Random(0)),
    "S5 by two permutations": {"generators": [[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]]},
}
LETTERS = 300  #: of the word that is run through the operator and exactly


def try_file(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Compile the file; where a machine comes out, check it with nothing of ours imported, and run it both ways."""
    source, out = folder / "mine.json", folder / "machine"
    folder.mkdir(exist_ok=True)
    source.write_text(json.dumps(data))
    compiled, seconds = _ckda("compile", str(source), "--out", str(out), "--json")
    said = json.loads(compiled.stdout)
    row: dict[str, Any] = {"exit": compiled.returncode, "seconds to compile": seconds}
    if compiled.returncode:
        return row | {"answer": said["answer"], "reason": said["reason"]}
    told, seconds = _timed(sys.executable, "-I", str(out / "checker.py"), str(out / "certificate.json"))
    row |= {"realisation": said["realisation"], "checker": told.stdout.strip(), "seconds to check": seconds}
    return row | _run_both_ways(out, len(said["letters"]), weights=said["kind"] == "wfa")


def _run_both_ways(machine: Path, letters: int, weights: bool) -> dict[str, Any]:
    word = random.Random(1).choices(range(letters), k=LETTERS)
    command = ("run", str(machine), "--word", " ".join(map(str, word)), "--json")
    operator, seconds = _ckda(*command, "--device", "cpu")
    exact, _ = _ckda(*command, "--exact")
    found, wanted = (list(json.loads(done.stdout).values())[-1] for done in (operator, exact))
    row: dict[str, Any] = {"letters run": len(word), "seconds to run": seconds}
    if not weights:
        return row | {"operator is exact": found == wanted}
    truth = [_float(x) for x in wanted]
    return row | {"largest relative error": max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True) if b)}


def _float(fraction: str) -> float:
    top, _, bottom = fraction.partition("/")
    return int(top) / int(bottom or 1)


def _ckda(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    return _timed(sys.executable, "-m", "ckda", "theory", *words)


def _timed(*command: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    return done, round(time.perf_counter() - start, 1)


def write_trials(path: str | Path) -> Path:
    """Every file of FILES, kept with the environment."""
    rows = []
    for name, data in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"file": name} | try_file(data, Path(folder)))
    return write_json(path, {"environment": environment(), "rows": rows})
