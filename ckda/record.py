"""Results as data: JSON written whole, with the environment it came from. Figures are made from these files."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment", "read_json", "write_bytes", "write_json", "write_text"]

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
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: str | Path, text: str) -> Path:
    """:func:`write_bytes` for text, in UTF-8."""
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    """:func:`write_text` for JSON. NaN and infinity are refused: a missing value is null, with a reason beside it."""
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a result; a damaged or foreign file is a ValueError that names it."""
    try:
        return json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file of ckda: {error}") from error
