"""What experiments show alike: an empty figure, a table on the terminal and in a document, where the numbers come from."""

from collections.abc import Sequence
from typing import Any

__all__ = ["empty_figure", "markdown_table", "print_table", "source_line"]


def empty_figure(*args: Any, **options: Any) -> Any:
    """A matplotlib figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(*args, layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a document.

    Example:
        >>> print(markdown_table(["run", "32"], [["S3", "1.000"]]), end="")
        | run | 32 |
        |---|---|
        | S3 | 1.000 |
    """
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], strong: Sequence[int] = ()) -> None:
    """A table on the terminal: on a narrow one words wrap, numbers stay whole; rows `strong` stand out."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        whole = name.isdigit()
        options: dict[str, Any] = {"justify": "left" if i == 0 else "right", "no_wrap": whole, "overflow": "fold"}
        table.add_column(name, min_width=6 if whole else 9, **options)
    for i, row in enumerate(rows):
        table.add_row(*row, style="bold" if i in strong else None)
    Console().print(table)


def source_line(environment: dict[str, Any], *more: str) -> str:
    """The last line of a page: versions, device and commit."""
    versions = environment["versions"]
    words = [
        f"ckda {versions['ckda'] or '(source)'}",
        f"torch {versions['torch']}",
        environment["device"],
        *more,
        f"commit {(environment['commit'] or 'unknown')[:10]}",
    ]
    return ", ".join(words) + "."
