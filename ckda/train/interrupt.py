"""Ctrl-C between updates, never inside one: what is saved is always a whole update."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["deferred_interrupt"]


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C is remembered and the yielded function says so; a second one interrupts at once.

    Outside the main thread, where no handler can be set, nothing is deferred.

    Example:
        >>> with deferred_interrupt() as asked:
        ...     asked()
        False
    """
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
