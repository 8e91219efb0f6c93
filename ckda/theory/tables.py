"""tab:theory-summary and tab:recurrence-spectrum, each cell with the check behind it.

A cell names the claims it rests on and the sources the paper cites for what is not checked here. Its mark comes from
the records of `ckda theory verify`; spectral cells take their text from what the check found, not from the paper.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckda.theory.families import FAMILIES
from ckda.theory.verify import Record

__all__ = ["TABLES", "Cell", "Table", "as_json", "labels", "mark", "markdown"]


@dataclass(frozen=True)
class Cell:
    """What the table says, the claims that check it, and what is only cited."""

    text: str
    checks: tuple[str, ...] = ()
    cited: str = ""
    covers: str = ""  #: what the checks cover, where they are not the whole cell
    found: Callable[[Mapping[str, Any]], str] | None = None  #: text from the cells the first check found


@dataclass(frozen=True)
class Table:
    """A table of the paper: label, columns, and rows of cells."""

    label: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]]


def mark(cell: Cell, records: Mapping[str, Record]) -> str:
    """One word on what stands behind a cell.

    Example:
        >>> mark(Cell("yes", ("a",), "[D7]", "real spectrum"), {"a": {"status": "verified"}})
        'real spectrum checked; rest cited [D7]'
        >>> mark(Cell("yes", ("a",)), {}), mark(Cell("yes", cited="[D7]"), {}), mark(Cell("d real"), {})
        ('not run', 'cited [D7]', 'definition')
    """
    states = [records[label]["status"] if label in records else "not run" for label in cell.checks]
    for bad in ("refuted", "broken", "inconclusive", "not run"):
        if bad in states:
            return {"inconclusive": "inconclusive at this effort", "not run": "not run"}.get(bad, bad.upper())
    if not states:
        return f"cited {cell.cited}" if cell.cited else "definition"
    covers = f"{cell.covers} checked" if cell.covers else "checked"
    return f"{covers}; rest cited {cell.cited}" if cell.cited else covers


def text(cell: Cell, records: Mapping[str, Record]) -> str:
    """The cell's text: from what its first check found where there is a record, else the paper's."""
    record = records.get(cell.checks[0]) if cell.checks else None
    if cell.found is None or record is None or record["status"] != "verified":
        return cell.text
    return cell.found(record["data"]["cells"])


# tab:theory-summary

_MULTI = "thm:multilayer"
_PAIRS = "tab:theory-summary/pairs"
_PARITY = "tab:theory-summary/parity"
_TWO = "tab:theory-summary/deltaproduct-2"
_MAIN = "thm:main-positive"
_S5 = "thm:s5-impossibility"
_COPY = "prop:automata-factor-counts/column-copy"
_MAPS = "prop:automata-factor-counts/deterministic"
_RATIONAL = "prop:automata-factor-counts/rational"


def _most(cells: Mapping[str, Any], prefix: str) -> int:
    return max(cell["value"] for row, cell in cells.items() if row.startswith(prefix))


def _pairs_row() -> tuple[Cell, ...]:
    def ckda(cells: Mapping[str, Any]) -> str:
        without = max(cells[name]["value"] for name in ("KDA, beta to 2", "KDA, signed gate"))
        return f"<= {_most(cells, 'd =')}; {without} if beta <= 1 or alpha >= 0"

    def product(cells: Mapping[str, Any]) -> str:
        return "; ".join(f"{row}: {cell['value']}" for row, cell in cells.items())

    return (
        Cell("<= 1; 0 if beta <= 1 or alpha >= 0", (f"{_PAIRS}/CKDA", "thm:complex_eigenvalues"), found=ckda),
        Cell("0", (f"{_PAIRS}/GDN", "sec:free"), found=lambda cells: str(_most(cells, ""))),
        Cell("<= floor(k/2)", (f"{_PAIRS}/DeltaProduct",), found=product),
        Cell("0", (f"{_PAIRS}/RWKV-7",), found=lambda cells: str(cells["RWKV-7"]["value"])),
    )


def _summary() -> Table:
    real_gdn, real_rwkv = f"{_PAIRS}/GDN", f"{_PAIRS}/RWKV-7"
    columns = ("CKDA", "GDN", "Gated DeltaProduct_4", "RWKV-7")
    rows = {
        "Transition": tuple(Cell(FAMILIES[name].formula) for name in columns),
        "Param. ranges": tuple(Cell(FAMILIES[name].ranges) for name in columns),
        "Complex pairs": _pairs_row(),
        "S_2 (parity)": (
            Cell("yes 1", (_PARITY,)),
            Cell("yes 1", (_PARITY,)),
            Cell("yes 1 (k >= 1)", (_PARITY,)),
            Cell("yes 1", (_PARITY,)),
        ),
        "Z_n, D_n (n > 2)": (
            Cell("yes 1", ("prop:planar-groups", _MAIN)),
            Cell("yes 2, no 1 FP", (real_gdn,), "[D7], [U2]", "real spectrum"),
            Cell("yes 1 (k >= 2)", (_TWO,)),
            Cell("yes 2, no 1 FP", (real_rwkv,), "[D7], [U2]", "real spectrum"),
        ),
        "S_4, A_5": (
            Cell("yes 1", ("prop:cube", "cor:a5-four", _MAIN)),
            Cell("yes 4, no 1 FP", (real_gdn,), "[D1], [U2]", "real spectrum"),
            Cell("yes 1 (k >= 2)", (_TWO,)),
            Cell("yes 4, no 1 FP", (real_rwkv,), "[D1], [U2]", "real spectrum"),
        ),
        "S_n (n >= 5)": (
            Cell("yes 3; no 1 FR", (f"{_MULTI}/groups", _S5)),
            Cell("yes 4, no 1 FP", (real_gdn,), "[D1], [U2]", "real spectrum"),
            Cell(
                "yes 1: k >= n-1; yes 3: 2 <= k <= n-2; no 1 FR: k <= 3",
                (f"{_PAIRS}/DeltaProduct", _S5, f"{_S5}/deltaproduct-4"),
                "[D1]",
                "k = 4 for S_5, and k <= 3,",
            ),
            Cell("yes 4, no 1 FP", (real_rwkv,), "[D1], [U2]", "real spectrum"),
        ),
        "Regular languages": (
            Cell("yes L_q", (), "via [D2]"),
            Cell("yes L_q", (), "[D2]"),
            Cell("yes L_q (k >= 1)", (), "[D2]"),
            Cell("yes L_q", (), "via [D2]"),
        ),
        "  (unstable)": (
            Cell("yes 3, beta > 2", (f"{_MULTI}/dfa", f"{_MULTI}/regular-languages")),
            Cell("yes 4, beta in [0, 4]", (_COPY,), "via [M11]", "copy factors"),
            Cell("yes 3 (k >= 2); 1 (k >= 4q), beta in [0, 4]", (_COPY, _MAPS), "via [RL3, M11]", "4q factors"),
            Cell("yes 4", (_COPY,), "[R3]", "copy factor"),
        ),
        "WFAs over Q (PP)": (
            Cell("yes 3, beta in [0, inf)", (f"{_MULTI}/wfa",)),
            Cell("yes 4, beta real", (_RATIONAL,), "[M11]", "factor count"),
            Cell("yes 3 (k >= 2); 1 (k >= B_q), beta real", (_RATIONAL,), "via [M11, ML12]", "B_q factors"),
            Cell("yes 4, unrestricted", (), "[M6]"),
        ),
    }
    return Table("tab:theory-summary", ("CKDA", "GDN", "Gated DeltaProduct", "RWKV-7 / GDN-2"), rows)


# tab:recurrence-spectrum

_STATE = {1: "d real", 2: "2d real"}
_ISOMETRY = {
    "non-commuting": "exist; need not commute",
    "commuting": "exist; commute",
    "only I": "only I, in the closure",
}


def _support(cells: Mapping[str, Any]) -> str:
    angles = cells["support"]["value"]
    whole = "full circle (every 15 degrees)" if len(angles) == 13 else f"angles {angles} of every 15 degrees"
    narrow = cells.get("support, theta_max = pi/3")
    return whole + (f"; theta_max = pi/3: {narrow['value']} of every 30" if narrow else "")


def _origin(cells: Mapping[str, Any]) -> str:
    found = [
        f"{cell['value']} pairs with {row.split(': ')[1]}" for row, cell in cells.items() if row.startswith("origin")
    ]
    return "; ".join(found)


def _spectrum() -> Table:
    names = ("CKDA", "MDN", "SFDA")

    def row(paper: Sequence[str], found: Callable[[Mapping[str, Any]], str], proof: str = "") -> tuple[Cell, ...]:
        """Each column's search; `proof` is an exact claim that backs CKDA's cell as well."""
        backed = {"CKDA": (proof,) if proof else ()}
        return tuple(
            Cell(words, (f"tab:recurrence-spectrum/{name}", *backed.get(name, ())), found=found)
            for words, name in zip(paper, names, strict=True)
        )

    rows = {
        "Transition": tuple(Cell(FAMILIES[name].formula) for name in names),
        "Recurrence order": (
            Cell("first order"),
            Cell("first in (S, M), generically second in S", ("tab:recurrence-spectrum/MDN",)),
            Cell("first order over C"),
        ),
        "State per value column": row(
            ("d real", "2d real", "m complex = 2m real"), lambda cells: _STATE[round(cells["state"]["value"])]
        ),
        "Ranges": tuple(Cell(FAMILIES[name].ranges) for name in names),
        "Non-real conjugate pairs": row(
            ("<= 1", "<= 1", "up to m"),
            lambda cells: f"<= {cells['pairs']['value']} (width 3)",
            "thm:complex_eigenvalues",
        ),
        "Origin of complex modes": row(
            ("signed gate-delta interaction", "memory-momentum coupling", "explicit phases plus delta"), _origin
        ),
        "Non-real |lambda| = 1 modes": row(
            ("yes, any angle", "none", "yes, undamped phases"),
            lambda cells: ("yes: " if cells["unit modes"]["value"] else "none: ") + cells["unit modes"]["how"],
        ),
        "Unit-circle support": row(
            ("full circle", "only {+1}", "|theta| <= theta_max"), _support, "prop:CKDA-canonical"
        ),
        "Whole-state isometries": row(
            ("orthogonal DPR1, need not commute", "only I in the closure", "diagonal phases, commute"),
            lambda cells: _ISOMETRY[cells["isometries"]["value"]],
            "prop:orthogonal-dplr",
        ),
        "Non-expansive": row(
            ("yes", "not guaranteed", "yes"),
            lambda cells: ("yes: " if cells["norm"]["value"] else "no: ") + cells["norm"]["how"],
            "app:non_expansive_dplr",
        ),
    }
    return Table("tab:recurrence-spectrum", names, rows)


#: label -> table
TABLES: dict[str, Table] = {table.label: table for table in (_summary(), _spectrum())}


def labels(tables: Sequence[Table]) -> list[str]:
    """The claims the cells rest on, each once."""
    cells = (cell for table in tables for row in table.rows.values() for cell in row)
    return list(dict.fromkeys(label for cell in cells for label in cell.checks))


def as_json(table: Table, records: Mapping[str, Record]) -> dict[str, Any]:
    """The table as data: every cell with the paper's words, ours, its mark and its checks."""
    rows = {
        name: [
            {"paper": c.text, "found": text(c, records), "mark": mark(c, records), "checks": list(c.checks)}
            for c in row
        ]
        for name, row in table.rows.items()
    }
    return {"label": table.label, "columns": list(table.columns), "rows": rows}


def markdown(table: Table, records: Mapping[str, Record]) -> str:
    """The table in Markdown; in every cell a mark in brackets, and numbers that lead to the checks listed below it."""
    number = {label: i + 1 for i, label in enumerate(labels([table]))}
    lines = [f"### {table.label}", "", f"| | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    for name, row in table.rows.items():
        shown = []
        for cell in row:
            links = "".join(f" #{number[label]}" for label in cell.checks)
            shown.append(f"{text(cell, records)} [{mark(cell, records)}{links}]".replace("|", "\\|"))
        lines.append(f"| {name} | {' | '.join(shown)} |".replace("|lambda|", "\\|lambda\\|"))
    lines += ["", *(f"#{i} `{label}`: {_line(label, records)}" + "  " for label, i in number.items()), ""]
    return "\n".join(lines)


def _line(label: str, records: Mapping[str, Record]) -> str:
    record = records.get(label)
    if record is None:
        return "not run"
    if record["status"] != "verified":
        return f"{record['status']}: {record['error'].strip().splitlines()[-1]}"
    return (
        f"{record.get('behind', record['kind'])}; {record['cases']} cases, {record['seconds']:.1f} s. {record['note']}"
    )
