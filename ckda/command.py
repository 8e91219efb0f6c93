"""What commands share: common options, checks of what is typed, the folder and the device. It imports nothing of ours."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

__all__ = [
    "add_common_arguments",
    "add_run_arguments",
    "count",
    "every",
    "filled",
    "make_folder",
    "one_line",
    "pick_device",
    "pick_names",
    "positive",
    "seconds",
]


def add_common_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The manners every verb shares. `out` is the default folder of its results."""
    group = parser.add_argument_group("where and how it runs")
    group.add_argument("--out", default=out, help="folder for JSON, figures and checkpoints (default: %(default)s)")
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    group.add_argument("--seed", type=_seed, default=0)
    group.add_argument("--smoke", action="store_true", help="a run of seconds that only shows that everything works")
    group.add_argument("--json", action="store_true", help="only the result as JSON on standard output")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What experiments with a run store (``ckda.experiments.common``) share besides."""
    group = parser.add_argument_group("finished runs")
    group.add_argument("--fresh", action="store_true", help="train anew, whatever is in --out")
    group.add_argument(
        "--collect", nargs="+", metavar="FOLDER", help="train nothing: bring the runs of these --out folders together"
    )
    group.add_argument(
        "--trained-at", metavar="COMMIT", help="with --collect: the commit, where records know none or a copy's"
    )


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to {2**31 - 1}")
    return value


def positive(text: str) -> int:
    """A whole number from 1 on, as a type of an option.

    Example:
        >>> positive("3")
        3
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def seconds(text: str) -> float:
    """A time from 0 seconds on, as a type of an option."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0 seconds")
    return value


def pick_names(text: str, known: Sequence[str], sets: Mapping[str, Sequence[str]], option: str) -> list[str]:
    """The names in a list with commas, each once; a name of `sets` stands for all of its members.

    Example:
        >>> pick_names("a,all", ["a", "b"], {"all": ["a", "b"]}, "--letter")
        ['a', 'b']
    """
    names = [name for word in text.split(",") for name in sets.get(word, (word,))]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option} {name}: there is none; there are {', '.join((*known, *sets))}")
    return list(dict.fromkeys(names))


def make_folder(path: str) -> Path:
    """The folder of --out, made before any work is done for it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").write_bytes(bytes(4096))  # a full disk takes the name and refuses the bytes
        (folder / ".writable").unlink()
    except OSError as error:
        raise SystemExit(f"--out {path}: {error.strerror}") from error
    return folder


def pick_device(name: str) -> str:
    """`auto` is the best device present; a named one must be there."""
    import torch

    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if present[device])
    if not present[name]:
        raise SystemExit(f"--device {name}: there is none here; present: {', '.join(d for d in present if present[d])}")
    return name


def count(text: str) -> int:
    """A number of tokens or updates, also as 2e6, 20K, 50M or 6B; a type of an option.

    Example:
        >>> count("20K"), count("6B"), count("2e6")
        (20000, 6000000000, 2000000)
    """
    units = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    try:
        value = int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(float(text))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number like 1000, 20K, 2e6, 50M or 6B") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def filled(kind: Callable[..., Any], args: argparse.Namespace, **given: Any) -> Any:
    """A dataclass whose fields are the options of the same names, but for those that are given here."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names} | given)


def one_line(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What the user can mend is one line on standard error and status 2 instead of a traceback."""

    @functools.wraps(command)
    def run(args: argparse.Namespace) -> int:
        words = " ".join(getattr(args, name) for name in ("verb0", "verb1") if getattr(args, name, None))
        try:
            return command(args)
        except (ValueError, OSError) as error:
            print(f"ckda {words}: {' '.join(str(error).split())}", file=sys.stderr)
        except SystemExit as stop:
            if not isinstance(stop.code, str):
                raise
            print(f"ckda {words}: {stop.code}", file=sys.stderr)
        return 2

    return run


def every(seconds: float, quiet: bool = False) -> Callable[[str], None]:
    """Prints a line on standard error, but not more often than that."""
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if not quiet and time.monotonic() - said >= seconds:
            said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return say
