"""What commands share: common options, checks of what is typed, the folder and the device. It imports nothing of ours."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["add_common_arguments", "add_run_arguments", "make_folder", "pick_device", "pick_names", "positive"]


def add_common_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The manners every verb shares. `out` is the default folder of its results."""
    parser.add_argument("--out", default=out, help="folder for JSON, figures and checkpoints (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("--smoke", action="store_true", help="a run of seconds that only shows that everything works")
    parser.add_argument("--json", action="store_true", help="only the result as JSON on standard output")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What experiments with a run store (``ckda.experiments.common``) share besides."""
    parser.add_argument("--fresh", action="store_true", help="train anew, whatever is in --out")
    parser.add_argument(
        "--collect", nargs="+", metavar="FOLDER", help="train nothing: bring the runs of these --out folders together"
    )
    parser.add_argument(
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
        (folder / ".writable").touch()
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
