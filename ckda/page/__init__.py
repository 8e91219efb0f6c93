"""What reports are made of: a self-contained HTML page section by section, figures, tables, where the numbers come from."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckda.record import write_text

__all__ = ["Page", "empty_figure", "markdown_table", "png_of", "print_table", "source_line", "svg_of"]

_STYLE = """
:root { --ink: #1d2733; --soft: #5c6b7a; --line: #dde3ea; --page: #fbfcfd; --accent: #16548c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4eaf0; --soft: #9aa8b5; --line: #33404d; --page: #161c22; --accent: #7db8ea; }
  figure svg, figure img { background: #fbfcfd; border-radius: 6px; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; color: var(--accent); }
p.lead { color: var(--soft); margin: 0 0 1rem; max-width: 46rem; }
figure { margin: 1.2rem 0; }
figure svg, figure img { display: block; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.strong td { font-weight: 650; }
td audio { display: block; width: 15rem; height: 2.2rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; border-top: 1px solid var(--line); padding-top: .8rem; }
code { font-size: .92em; }
@media (max-width: 600px) {
  main { padding: 1.2rem .8rem 2.5rem; }
  h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
  th, td { white-space: normal; padding: .3rem .4rem; font-size: .85rem; min-width: 4.6rem; }
}
"""


class Page:
    """Collects sections and writes one HTML file.

    Example:
        >>> page = Page("A title", "What one sees here.")
        >>> page.section("Numbers", "Two of them.")
        >>> page.table(["what", "value"], [["x", 1], ["y", 2]])
        >>> "<h2>Numbers</h2>" in page.html() and "<td>2</td>" in page.html()
        True
    """

    def __init__(self, title: str, lead: str):
        self.title, self.parts = title, [f"<h1>{html.escape(title)}</h1><p class='lead'>{html.escape(lead)}</p>"]

    def section(self, title: str, text: str = "") -> None:
        """A heading and a paragraph."""
        self.parts.append(f"<h2>{html.escape(title)}</h2>" + (f"<p>{html.escape(text)}</p>" if text else ""))

    def figure(self, svg: str, caption: str) -> None:
        """An inline picture (:func:`svg_of`, :func:`png_of`) with its caption."""
        self.parts.append(
            f"<figure><div class='scroll'>{svg}</div><figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]], strong: int | None = None) -> None:
        """A table; row `strong` stands out."""
        lines = ["<tr>" + "".join(f"<th>{html.escape(str(x))}</th>" for x in head) + "</tr>"]
        for i, row in enumerate(rows):
            mark = " class='strong'" if i == strong else ""
            lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in row) + "</tr>")
        self.parts.append("<div class='scroll'><table>" + "".join(lines) + "</table></div>")

    def players(self, head: Sequence[str], rows: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        """A table of audio players; each row is a label and WAV files, which travel inside the page."""
        lines = ["<tr>" + "".join(f"<th>{html.escape(x)}</th>" for x in head) + "</tr>"]
        for label, files in rows:
            sources = (f"data:audio/wav;base64,{base64.b64encode(data).decode()}" for data in files)
            cells = "".join(f"<td><audio controls preload='none' src='{source}'></audio></td>" for source in sources)
            lines.append(f"<tr><td>{html.escape(label)}</td>{cells}</tr>")
        self.parts.append("<div class='scroll'><table>" + "".join(lines) + "</table></div>")

    def footer(self, text: str) -> None:
        """The last line: where the numbers come from."""
        self.parts.append(f"<footer>{html.escape(text)}</footer>")

    def html(self) -> str:
        """The whole page."""
        return (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><main>{''.join(self.parts)}</main></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page whole."""
        return write_text(path, self.html())


def svg_of(figure: Any) -> str:
    """A matplotlib figure as inline SVG, the same text for the same figure."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ckda", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = buffer.getvalue()
    narrowest = (
        3.2 * figure.get_figwidth()
    )  # on a narrow screen a wide figure is scrolled, not shrunk until nobody can read it
    return text[text.index("<svg") :].replace("<svg", f"<svg style='min-width: {narrowest:.0f}rem'", 1)


def png_of(figure: Any, dpi: int = 160) -> str:
    """A matplotlib figure as an inline PNG, for figures of so many points that SVG would be megabytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None}, bbox_inches="tight")
    return f"<img alt='' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


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


def print_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], strong: Sequence[int] = (), few: Sequence[str] = ()
) -> bool:
    """A table on the terminal: on a narrow one words wrap, numbers stay whole; rows `strong` stand out.

    Where not all columns have a place, only those named in `few` are printed, if there are such; says whether all were.
    """
    from rich.console import Console

    console, table = Console(), _terminal_table(title, head, rows, strong)
    narrow = bool(few) and console.measure(table, options=console.options.update(width=10_000)).minimum > console.width
    if narrow:
        places = [head.index(name) for name in few]
        table = _terminal_table(title, few, [[row[i] for i in places] for row in rows], strong)
    console.print(table)
    return not narrow


def _terminal_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], strong: Sequence[int]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        whole = name.isdigit()
        options: dict[str, Any] = {"justify": "left" if i == 0 else "right", "no_wrap": whole, "overflow": "fold"}
        table.add_column(name, min_width=6 if whole else 9, **options)
    for i, row in enumerate(rows):
        table.add_row(*row, style="bold" if i in strong else None)
    return table


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
