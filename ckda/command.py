"""What commands share: common options, checks of what is typed, the folder and the device. It imports nothing of ours."""

import argparse
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

__all__ = [
    "CheckFailed",
    "Parser",
    "above_zero",
    "add_common_arguments",
    "add_device_argument",
    "add_json_argument",
    "add_mixer_argument",
    "add_run_arguments",
    "count",
    "did_you_mean",
    "entries",
    "every",
    "filled",
    "make_folder",
    "not_negative",
    "pick_device",
    "pick_names",
    "pick_whole",
    "plural",
    "positive",
    "real",
    "refuse_unread",
    "seconds",
    "share",
    "whole",
]


class CheckFailed(Exception):
    """A check of ours came out wrong: exit status 1."""


class Parser(argparse.ArgumentParser):
    """A parser that the parsed options know, so that a word that does not fit is answered with the verb's own usage.

    `explain()`, where it is set, is what ``--help`` ends with; nothing is imported for it before that.
    """

    explain: Callable[[], str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def format_help(self) -> str:
        """The usage and the options, and what there is to choose from."""
        text = super().format_help()
        return f"{text}\n{self.explain()}\n" if self.explain else text

    def spelled(self) -> dict[str, str]:
        """What may be typed: name among the parsed options -> how it is written, without what is not shown."""
        shown = [action for action in self._actions if argparse.SUPPRESS not in (action.help, action.default)]
        return {action.dest: (action.option_strings or [action.dest])[0] for action in shown}


def add_common_arguments(parser: argparse.ArgumentParser, out: str, leave: Sequence[str] = ()) -> None:
    """The manners every verb shares. `out` is the default folder of its results; `leave` out what means nothing to it."""
    group = parser.add_argument_group("where and how it runs")
    group.add_argument("--out", default=out, help="folder for JSON, figures and checkpoints (default: %(default)s)")
    if "device" not in leave:
        add_device_argument(group)
    if "seed" not in leave:
        group.add_argument("--seed", type=_seed, default=0, help="of everything that is drawn (default: %(default)s)")
    if "smoke" not in leave:
        group.add_argument(
            "--smoke", action="store_true", help="a run of seconds that only shows that everything works"
        )
    add_json_argument(group)


def add_device_argument(parser: argparse._ActionsContainer) -> None:
    """Where it runs."""
    kinds = ["auto", "cpu", "cuda", "mps"]
    parser.add_argument("--device", default="auto", choices=kinds, help="(default: auto, the best that is here)")


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """For programs that read the result."""
    parser.add_argument("--json", action="store_true", help="only the result as JSON on standard output")


def add_mixer_argument(parser: argparse._ActionsContainer, help: str) -> None:
    """Which mixers are trained; `--arm`, as one experiment called it once, still works and is not shown."""
    parser.add_argument("--mixer", default="ckda", help=help)
    parser.add_argument("--arm", dest="mixer", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


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


# Numbers: each is the type of an option -----------------------------------------------------------------------------------


def whole(text: str) -> int:
    """A whole number.

    Example:
        >>> whole("-3")
        -3
        >>> whole("abc")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: 'abc' is no whole number
    """
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error


def real(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error


def _checked(value: Any, fits: bool, wanted: str) -> Any:
    if not fits:
        raise argparse.ArgumentTypeError(f"{value} is not {wanted}")
    return value


def _seed(text: str) -> int:
    value = whole(text)
    return _checked(value, 0 <= value < 2**31, f"from 0 to {2**31 - 1}")


def positive(text: str) -> int:
    """A whole number from 1 on.

    Example:
        >>> positive("3")
        3
    """
    value = whole(text)
    return _checked(value, value >= 1, "at least 1")


def not_negative(text: str) -> int:
    """A whole number from 0 on."""
    value = whole(text)
    return _checked(value, value >= 0, "at least 0")


def above_zero(text: str) -> float:
    """A number above 0, as a learning rate."""
    value = real(text)
    return _checked(value, 0 < value < math.inf, "above 0")


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = real(text)
    return _checked(value, 0 <= value <= 1, "from 0 to 1")


def seconds(text: str) -> float:
    """A time from 0 seconds on."""
    value = real(text)
    return _checked(value, value >= 0, "at least 0 seconds")


# What is named ------------------------------------------------------------------------------------------------------------


def pick_whole(text: str, option: str) -> tuple[int, ...]:
    """The numbers from 1 on in a list with commas, in order, each once.

    Example:
        >>> pick_whole("64,8,8", "--lengths")
        (8, 64)
    """
    try:
        return tuple(sorted({positive(word) for word in text.split(",")}))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} {text}: {error}; give whole numbers with commas") from error


def pick_names(text: str, known: Sequence[str], sets: Mapping[str, Sequence[str]], option: str) -> list[str]:
    """The names in a list with commas, each once; a name of `sets` stands for all of its members.

    Example:
        >>> pick_names("a,all", ["a", "b"], {"all": ["a", "b"]}, "--letter")
        ['a', 'b']
    """
    names = [name for word in text.split(",") for name in sets.get(word, (word,))]
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name}: there is none; there are {', '.join((*known, *sets))}")
    return list(dict.fromkeys(names))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: the known one that it resembles, if there is one.

    Example:
        >>> did_you_mean("sofplus", ["softplus", "states"]), did_you_mean("x", ["softplus"])
        ("; did you mean 'softplus'?", '')
    """
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def refuse_unread(args: argparse.Namespace, read: Collection[str], what: str) -> None:
    """Refuse options that were given a value of their own and would have no effect: `what` reads those of these names alone.

    Example:
        >>> parser = Parser()
        >>> _ = [parser.add_argument(option) for option in ("--row", "--peer")]
        >>> refuse_unread(parser.parse_args(["--row", "main", "--peer", "kda"]), {"row"}, "--sweep")
        Traceback (most recent call last):
        ValueError: --peer: no effect with --sweep, which reads --row
    """
    spelled = args.parser.spelled()
    given = [name for name in spelled if getattr(args, name) not in (args.parser.get_default(name), [])]
    unread = [name for name in given if name not in read]
    if unread:
        known = ", ".join(option for name, option in spelled.items() if name in read and option not in what.split())
        raise ValueError(f"{', '.join(spelled[name] for name in unread)}: no effect with {what}, which reads {known}")


def make_folder(path: str) -> Path:
    """The folder of --out, made before any work is done for it; refused where results of some size would not fit."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").write_bytes(bytes(4096))  # a full disk takes the name and refuses the bytes
        (folder / ".writable").unlink()
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if in_the_way else (error.strerror or str(error)).lower()
        raise ValueError(f"--out {path} cannot be written: {why}") from error
    if (free := shutil.disk_usage(folder).free) < _ROOM:
        raise ValueError(f"--out {path}: the disk has {free / 2**20:.2f} MiB left; results need {_ROOM >> 20} MiB")
    return folder


_ROOM = 8 << 20  # bytes: weights, a checkpoint, figures and a page of a small experiment


def pick_device(name: str) -> str:
    """`auto` is the best device present; a named one must be there."""
    import torch

    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if present[device])
    if not present[name]:
        raise ValueError(f"--device {name}: there is none here; present: {', '.join(d for d in present if present[d])}")
    return name


def count(text: str) -> int:
    """A number of tokens or updates, also as 2e6, 20K, 50M or 6B; a type of an option.

    Example:
        >>> count("1k"), count("1.5M"), count("6B"), count("2e6")
        (1000, 1500000, 6000000000, 2000000)
        >>> count("1.5")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: 1.5 is no whole number
    """
    units = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    try:
        value = Decimal(text[:-1]) * units[text[-1]] if text[-1:] in units else Decimal(text)
        number = int(value)
    except (ArithmeticError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number like 1000, 20K, 2e6, 50M or 6B") from error
    if number != value:
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return _checked(number, number >= 1, "at least 1")


def entries(rows: Sequence[tuple[str, str]], indent: int = 26) -> str:
    """Names with what they are, wrapped to the terminal; a long name has the line to itself.

    Example:
        >>> print(entries([("quick", "few updates"), ("a-name-of-many-letters", "so it is alone")], indent=12))
        quick       few updates
        a-name-of-many-letters
                    so it is alone
    """
    wide = max(40, shutil.get_terminal_size().columns - 1 - indent)
    lines = []
    for name, text in rows:
        first, *rest = textwrap.wrap(text, wide) or [""]
        alone = len(name) >= indent
        lines += [name, " " * indent + first] if alone else [f"{name:<{indent}}{first}"]
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def plural(number: int, one: str, many: str | None = None) -> str:
    """A number of things in words.

    Example:
        >>> plural(1, "update"), plural(2000, "update"), plural(2, "entry", "entries")
        ('1 update', '2,000 updates', '2 entries')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def filled(kind: Callable[..., Any], args: argparse.Namespace, **given: Any) -> Any:
    """A dataclass whose fields are the options of the same names, but for those that are given here."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names} | given)


def every(seconds: float, quiet: bool = False) -> Callable[[str], None]:
    """Prints a line on standard error, but not more often than that."""
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if not quiet and time.monotonic() - said >= seconds:
            said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return say
