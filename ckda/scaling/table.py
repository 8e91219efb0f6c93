"""Tables of runs (N, D, loss[, group, chained, cell]) from CSV, JSON, training logs or a DataFrame; checked."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "Table", "as_table", "read_table"]

Array = NDArray[np.float64]
Record = Mapping[str, Any]

#: column -> the names it may have in a file, the preferred one first
COLUMNS: dict[str, tuple[str, ...]] = {
    "N": ("N", "num_parameters", "num_params", "total_parameters", "parameters", "params"),
    "D": ("D", "tokens", "num_tokens", "total_tokens", "tokens_seen"),
    "loss": ("val_loss", "validation_loss", "valid_loss", "eval_loss", "loss"),
    "group": ("group", "arm", "model", "name"),
    "chained": ("chained",),
    "cell": ("cell",),
}
_TRUE, _FALSE = {"1", "true", "yes", "1.0"}, {"0", "false", "no", "", "0.0", "none"}


@dataclass(frozen=True)
class Table:
    """n runs: parameters N, tokens D, final loss in nats, the arm each belongs to, chained or not, and a name each.

    Example:
        >>> table = Table.of(N=[1e8, 1e9], D=[1e10, 1e10], loss=[2.9, 2.5])
        >>> table.cell, table.arms
        (('100M/10BT', '1B/10BT'), ('all',))
    """

    N: Array
    D: Array
    loss: Array
    group: tuple[str, ...]
    chained: NDArray[np.bool_]
    cell: tuple[str, ...]

    @classmethod
    def of(
        cls,
        N: Sequence[float] | Array,
        D: Sequence[float] | Array,
        loss: Sequence[float] | Array,
        group: Sequence[str] | None = None,
        chained: Sequence[bool] | None = None,
        cell: Sequence[str] | None = None,
    ) -> "Table":
        """Columns in, a checked table out; a value that no run can have is a ValueError that names its row."""
        N, D, loss = (np.asarray(column, float).reshape(-1) for column in (N, D, loss))
        columns = {"N": N, "D": D, "loss": loss}
        lengths = {name: len(column) for name, column in columns.items()}
        lengths |= {n: len(c) for n, c in (("group", group), ("chained", chained), ("cell", cell)) if c is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the columns differ in length: {lengths}")
        if not len(N):
            raise ValueError("the table has no rows")
        for name, column in columns.items():
            bad = np.flatnonzero(~(np.isfinite(column) & (column > 0)))
            if len(bad):
                raise ValueError(
                    f"row {bad[0] + 1}: {name} is {column[bad[0]]:g}; it must be finite and positive"
                    + (f" ({len(bad)} such rows)" if len(bad) > 1 else "")
                )
        names = tuple(cell) if cell is not None else tuple(cell_name(n, d) for n, d in zip(N, D, strict=True))
        arms = tuple(str(g) for g in group) if group is not None else ("all",) * len(N)
        flags = np.zeros(len(N), bool) if chained is None else np.asarray(chained, bool)
        return cls(N, D, loss, arms, flags, names)

    def __len__(self) -> int:
        return len(self.N)

    @property
    def arms(self) -> tuple[str, ...]:
        """The groups, in order of appearance."""
        return tuple(dict.fromkeys(self.group))

    def where(self, mask: NDArray[np.bool_]) -> "Table":
        """The rows of `mask`."""
        rows = np.flatnonzero(mask)
        group, cell = tuple(self.group[i] for i in rows), tuple(self.cell[i] for i in rows)
        return Table(self.N[rows], self.D[rows], self.loss[rows], group, self.chained[rows], cell)

    def arm(self, *names: str) -> "Table":
        """The rows of these groups."""
        for name in names:
            if name not in self.arms:
                raise ValueError(f"no arm {name!r} in the table; there are: {', '.join(self.arms)}")
        return self.where(np.array([g in names for g in self.group]))

    def match(self, cell: str) -> NDArray[np.bool_]:
        """Rows of the cell: by its name, or by size and tokens ('1.7B/50BT', to 2%) where no name is equal."""
        mask = np.array([name == cell for name in self.cell])
        if not mask.any():
            N, D = parse_cell(cell)
            mask = (np.abs(np.log(self.N / N)) < 0.02) & (np.abs(np.log(self.D / D)) < 0.02)
        if not mask.any():
            known = ", ".join(dict.fromkeys(self.cell))
            raise ValueError(f"held-out cell {cell!r} does not exist; the table has: {known}")
        return mask


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_cell(text: str) -> tuple[float, float]:
    """'1.7B/50BT' -> (1.7e9, 50e9): parameters, then tokens.

    Example:
        >>> parse_cell("302M/6BT")
        (302000000.0, 6000000000.0)
    """
    size, slash, tokens = text.strip().partition("/")
    if not slash:
        raise ValueError(f"cell {text!r}: expected SIZE/TOKENS, such as 1.7B/50BT")
    return parse_number(size), parse_number(
        tokens.strip().removesuffix("T") if tokens.strip()[-2:-1].isalpha() else tokens
    )


def parse_number(text: str) -> float:
    """A positive number with an optional K, M, B or T: '1.7B', '6e9', '983M'.

    Example:
        >>> parse_number("1.7B"), parse_number("6e9")
        (1700000000.0, 6000000000.0)
    """
    text = text.strip()
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        value = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a number such as 1.7B, 983M or 6e9") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} must be finite and positive")
    return value


def cell_name(N: float, D: float) -> str:
    """The name a run gets when it brings none.

    Example:
        >>> cell_name(1713736000, 5e10)
        '1.71B/50BT'
    """
    return f"{short(N)}/{short(D)}T"


def short(value: float) -> str:
    """A count in three digits.

    Example:
        >>> short(1713736000), short(6e9)
        ('1.71B', '6B')
    """
    for unit in ("T", "B", "M", "K"):
        if value >= _UNITS[unit]:
            return f"{float(f'{value / _UNITS[unit]:.3g}'):g}{unit}"
    return f"{value:g}"


def as_table(data: Any) -> Table:
    """A :class:`Table` from a Table, a path, records, a mapping of columns or a DataFrame (anything with `to_dict`).

    Example:
        >>> len(as_table([{"params": 1e8, "tokens": 1e9, "val_loss": 3.0}]))
        1
        >>> len(as_table({"N": [1e8, 1e9], "D": [1e9, 1e9], "loss": [3.0, 2.8], "arm": ["a", "a"]}))
        2
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        return read_table([data])
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("records")
    if isinstance(data, Mapping):
        keys = list(data)
        data = [dict(zip(keys, row, strict=True)) for row in zip(*data.values(), strict=True)]
    return _table_of(_normalise(list(data), "data"))


def read_table(paths: Iterable[str | Path]) -> Table:
    """Runs from files: .csv; .json (a list, an object with "cells" or "runs", or one run); .jsonl (an object a line).

    Records with a `step` are a training log: a line without N or group takes those of the line before it (a log's
    header), and only the last line with a loss counts, per run. Records without `step` are finished runs, one each.
    """
    records: list[dict[str, Any]] = []
    for path in map(Path, paths):
        try:
            raw = _read(path)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not {path.suffix.removeprefix('.') or 'a table'}: {error}") from None
        records += _normalise(raw, str(path))
    return _table_of(records)


def _read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    if path.suffix == ".jsonl":
        raw: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
    elif path.suffix == ".json":
        raw = json.loads(text)
    else:
        raise ValueError(f"{path}: unknown kind of file; give .csv, .json or .jsonl")
    if isinstance(raw, dict):
        raw = next((raw[key] for key in ("cells", "runs") if isinstance(raw.get(key), list)), [raw])
    if not isinstance(raw, list) or not all(isinstance(record, dict) for record in raw):
        raise ValueError(f"{path}: expected a list of objects, or an object with a list 'cells' or 'runs'")
    return [_flat(record) for record in raw]


def _flat(record: Record) -> dict[str, Any]:
    """Bring the fields of nested objects ({"config": {...}, "result": {...}}) to the top; an outer name wins."""
    inner = {k: v for value in record.values() if isinstance(value, dict) for k, v in _flat(value).items()}
    return inner | {k: v for k, v in record.items() if not isinstance(v, dict)}


def _normalise(records: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Rename the columns to ours and reduce a training log to its end points."""
    if not records:
        raise ValueError(f"{source} has no rows")
    present = {key for record in records for key in record}
    names = {ours: next((a for a in aliases if a in present), None) for ours, aliases in COLUMNS.items()}
    for column in ("N", "D", "loss"):
        if names[column] is None:
            raise ValueError(f"{source}: no column for {column}; it may be called {', '.join(COLUMNS[column])}")
    ours = [{c: record.get(name) for c, name in names.items() if name is not None} for record in records]
    if "step" in present:
        ours = _end_points(ours, [record.get("run") for record in records])
    for row in ours:
        row["source"] = source
    return ours


def _end_points(rows: list[dict[str, Any]], runs: list[Any]) -> list[dict[str, Any]]:
    last: dict[Any, dict[str, Any]] = {}
    carried: dict[str, Any] = {}
    for row, run in zip(rows, runs, strict=True):
        carried |= {c: row[c] for c in ("N", "group", "chained", "cell") if row.get(c) is not None}
        if row.get("loss") is not None and row.get("D") is not None:
            filled = carried | {c: v for c, v in row.items() if v is not None}
            last[run, filled.get("N"), filled.get("group")] = filled
    return list(last.values())


def _table_of(rows: list[dict[str, Any]]) -> Table:
    numbers = {c: [_number(row, c, i) for i, row in enumerate(rows)] for c in ("N", "D", "loss")}
    group = [str(row["group"]) if row.get("group") not in (None, "") else "all" for row in rows]
    chained = [_flag(row, i) for i, row in enumerate(rows)]
    cell = [
        str(row["cell"]) if row.get("cell") not in (None, "") else cell_name(n, d) if n > 0 and d > 0 else "?"
        for row, n, d in zip(rows, numbers["N"], numbers["D"], strict=True)
    ]
    return Table.of(**numbers, group=group, chained=chained, cell=cell)


def _number(row: Record, column: str, i: int) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        place = f"{row.get('source', 'data')}, row {i + 1}"
        raise ValueError(f"{place}: {column} is {row.get(column)!r}, not a number") from None


def _flag(row: Record, i: int) -> bool:
    text = str(row.get("chained", "")).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{row.get('source', 'data')}, row {i + 1}: chained is {row['chained']!r}; it may be 0 or 1")
