"""What experiments show alike: arms with their labels and colours, an empty figure, tables, where the numbers come from.

An arm is a mixer with the label and the colour under which figures show it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["ARMS", "Arm", "empty_figure", "markdown_table", "more_lines", "print_table", "source_line"]


class Arm(NamedTuple):
    """How an arm is shown."""

    label: str
    colour: str

    @property
    def words(self) -> str:
        """The label as running text.

        Example:
            >>> ARMS["kda"].words
            'KDA α∈[0,1], β∈[0,1]'
        """
        return " ".join(self.label.split())


#: the ranges of the gate and of beta as in fig:group_word_problems, and the baselines that have a colour of their own
ARMS = {
    "kda": Arm("KDA   α∈[0,1], β∈[0,1]", "#9aa5b1"),
    "kda-beta2": Arm("α∈[0,1], β∈[0,2]", "#d08a2e"),
    "kda-signed": Arm("α∈[-1,1], β∈[0,1]", "#7a4fa3"),
    "ckda": Arm("Complex KDA   α∈[-1,1], β∈[0,2]", "#16548c"),
    "deltaproduct2": Arm("DeltaProduct₂, reflection start", "#2f7f4f"),
    "deltaproduct2-standard": Arm("DeltaProduct₂, standard start", "#8ab79a"),
    "gru": Arm("GRU", "#c8553d"),
    "transformer": Arm("Transformer", "#b58900"),
}

_MORE = ("#2f7f4f", "#c8553d", "#b58900", "#2c8c99", "#8c564b", "#e377c2", "#000000", "#bcbd22", "#6baed6", "#fb9a99")


def more_lines() -> Iterator[dict[str, str]]:
    """Colours and line styles by turns, for runs without a colour of their own: dashed the second time, dotted the third."""
    return ({"color": colour, "linestyle": style} for style in itertools.cycle(("-", "--", ":")) for colour in _MORE)


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
