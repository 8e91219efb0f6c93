"""The scripts of recipes/ call commands that there are, with the names of today."""

import re
import shlex
import subprocess
from pathlib import Path

from ckda.command import Parser
from ckda.experiments.audio.model import ARMS
from ckda.experiments.audio.recipes import RECIPES as AUDIO
from ckda.experiments.audio.run import COMPARED
from ckda.experiments.options import add_track
from ckda.experiments.tracking.recipes import RECIPES as TRACKING
from ckda.experiments.tracking.run import title

ROOT = Path(__file__).parents[1]
PIECES = [
    "timing",
    "theory",
    "closure",
    "ranges",
    "momentum",
    "s4",
    "beta2",
    "baselines",
    "regular",
    "mixers",
    "silu",
    "screen",
]
PIECES += ["search", "six", "a5", "counts", "rate", "horizon"]
ECHO = '#!/bin/sh\nshift 2\nprintf "%s\\n" "$*"\n'  # in place of python -m ckda.cli: what it would be called with


def calls(script, tmp_path, *words):
    """The commands that a script gives, none of them run."""
    python = tmp_path / "python"
    python.write_text(ECHO)
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(ROOT / script), str(tmp_path / "out"), *words],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    return ran.stdout


def test_tracking_names_recipes_of_today_and_weights_that_it_leaves(tmp_path):
    printed = calls("recipes/tracking.sh", tmp_path, *PIECES)
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("track ")]
    assert len(commands) > 15
    parser = Parser()
    add_track(parser)
    left = set()
    places = []
    for words in commands:
        args = parser.parse_args(words[1:])  # SystemExit for an option that is not there
        runs = [args.mixer, args.recipe, args.momentum, args.begin, args.suite]
        places += [(args.out, group, *runs) for group in args.group or [None]]
        for recipe in (args.recipe or "paper").split(","):
            assert TRACKING.name(recipe) == recipe
            left |= {Path(args.out) / f"runs/{title(group, 'ckda', recipe)}.pt" for group in args.group}
        if args.begin:
            assert Path(args.begin) in left, args.begin
    assert len(set(places)) == len(places), "two commands would leave a run of the same name in the same folder"


def test_audio_names_recipes_of_today():
    (loop,) = re.findall(r"for recipe in (.*); do", (ROOT / "recipes/audio.sh").read_text())
    named = subprocess.run(
        ["bash", "-c", f"tail=schedule=tail; printf '%s\\n' {loop}"], text=True, capture_output=True, check=True
    ).stdout.split()
    assert len(named) == 9
    pairs = re.findall(r'"([\w-]+) ([\w=+-]+)"', (ROOT / "recipes/audio.sh").read_text())
    assert set(COMPARED) <= {arm for arm, _ in pairs} <= set(ARMS)
    for recipe in (*named, *(recipe for _, recipe in pairs)):
        assert AUDIO.name(recipe) == recipe


def test_one_group_of_a_piece(tmp_path):
    printed = calls("recipes/tracking.sh", tmp_path, "ranges:S4", "counts:S3")
    groups = [line.split()[1] for line in printed.splitlines() if line.startswith("track ")]
    assert groups == ["S4", "S3"]
