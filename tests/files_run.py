"""Which files of ckda run: how far one must read to follow a call.

python -m tests.files_run prints them for the operator, up to its first kernel (with TRITON_INTERPRET=1 where there is no GPU).
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ckda

__all__ = ["files_run", "until_first_launch"]

_ROOT = Path(ckda.__file__).parent


def files_run(function: Callable[[], Any]) -> set[str]:
    """The files under ckda/ of which a function runs while `function` does, counted by the interpreter itself (sys.setprofile).

    What runs while a module is imported does not count.

    Example:
        >>> sorted(files_run(lambda: ckda.ops.gate.sigmoid(ckda.ops.gate.torch.zeros(1))))
        ['ops/gate.py']
    """
    found: set[str] = set()
    importing = threading.local()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):  # of functions in C
            return
        depth = getattr(importing, "depth", 0)
        if frame.f_code.co_name == "<module>":
            importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth:
            found.add(frame.f_code.co_filename)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {str(Path(name).relative_to(_ROOT)) for name in found if Path(name).is_relative_to(_ROOT)}


class _LaunchedError(Exception):
    """The first kernel is about to be launched."""


def until_first_launch(function: Callable[[], Any]) -> set[str]:
    """:func:`files_run` up to the first launch of a kernel, which does not happen."""
    from ckda.ops.triton.launch import Launch

    def stop(launch: Launch) -> None:
        raise _LaunchedError

    def run() -> None:
        try:
            function()
        except _LaunchedError:
            return
        raise AssertionError("no kernel was launched")

    launched, Launch.__call__ = Launch.__call__, stop  # type: ignore[method-assign]
    try:
        return files_run(run)
    finally:
        Launch.__call__ = launched  # type: ignore[method-assign]


def main() -> None:
    """Print the files of each form of the kernels."""
    import torch

    x = torch.randn(1, 8, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    for form in ("triton-recurrent", "triton-portable"):
        found = until_first_launch(lambda name=form: ckda.complex_kda(x, x, x, -x.abs(), x[..., 0], backend=name))  # type: ignore[misc]
        print(f"{form}: {len(found)} files: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
