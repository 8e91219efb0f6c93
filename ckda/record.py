"""Results as data: JSON written whole, with the environment it came from. Figures are made from these files."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

__all__ = [
    "differing",
    "environment",
    "read_json",
    "set_aside",
    "write_bytes",
    "write_json",
    "write_record",
    "write_text",
]

_PACKAGES = ("ckda", "torch", "triton", "numpy", "scipy", "sympy", "transformers", "fla-core")


def environment(device: Any = "cpu") -> dict[str, Any]:
    """What a result depends on besides its recipe: device, versions, commit, time.

    Example:
        >>> sorted(environment())
        ['commit', 'date', 'device', 'platform', 'python', 'threads', 'versions']
    """
    import torch

    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": f"{device.type} ({name})",
        "platform": platform.system(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree the package is run from, with '+' where files differ; None outside a checkout."""
    try:
        here = Path(__file__).parent
        git = ["git", "-C", str(here)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write the file whole: to a temporary name in the same folder, then rename. A reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # a full disk does not say by itself what could not be written
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: str | Path, text: str) -> Path:
    """:func:`write_bytes` for text, in UTF-8."""
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    """:func:`write_text` for JSON. NaN and infinity are refused: a missing value is null, with a reason beside it."""
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def set_aside(*paths: str | Path) -> Path | None:
    """Move the files that are there already, all of one folder, to earlier/N beside them, N the next free number.

    What a command measured before is thus never replaced by what it measures now. Returns earlier/N, or None if there was
    nothing to move.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for loss in (3, 2):
        ...     aside = set_aside(folder / "eval.json")
        ...     _ = write_json(folder / "eval.json", {"loss": loss})
        >>> aside.relative_to(folder).as_posix(), read_json(aside / "eval.json"), read_json(folder / "eval.json")
        ('earlier/1', {'loss': 3}, {'loss': 2})
    """
    there = [path for path in map(Path, paths) if path.exists()]
    if not there:
        return None
    earlier = there[0].parent / "earlier"
    aside = next(place for n in count(1) if not (place := earlier / str(n)).exists())
    aside.mkdir(parents=True)
    for path in there:
        path.rename(aside / path.name)
    print(f"{there[0]} was there already; it is kept in {aside}", file=sys.stderr)
    return aside


def write_record(path: str | Path, value: Any) -> Path:
    """:func:`write_json`; a record of that name which is there already is set aside, not replaced."""
    set_aside(path)
    return write_json(path, value)


def differing(ours: dict[str, Any], theirs: dict[str, Any], but: Sequence[str] = ()) -> list[str]:
    """What is not the same, each with both values.

    Example:
        >>> differing({"lr": 0.1, "steps": 30}, {"lr": 0.1, "steps": 60})
        ['steps is 60 there and 30 here']
    """
    names = [name for name, value in ours.items() if name not in but and theirs.get(name) != value]
    return [f"{name} is {theirs.get(name)} there and {ours[name]} here" for name in names]


def read_json(path: str | Path) -> Any:
    """Read a result; a damaged or foreign file is a ValueError that names it."""
    try:
        return json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file of ckda: {error}") from error
