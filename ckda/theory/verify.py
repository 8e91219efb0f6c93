"""Running claims: one record per claim, whatever it does; a claim that crashes is reported and the rest go on."""

import difflib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckda.theory.claims import Claim, Inconclusive, Refuted

__all__ = ["STATUSES", "Record", "check", "passed", "plain", "select", "verify"]

#: label, statement, status (one of STATUSES), seconds, cases, kind, margin, note, data, error
Record = dict[str, Any]

#: what a check can end as; `inconclusive`: its search was too weak at this effort to tell
STATUSES = ("verified", "inconclusive", "refuted", "broken")


def plain(value: Any) -> Any:
    """The value in JSON's own types: arrays and tuples become lists, exact numbers strings, infinities null.

    Example:
        >>> plain({1: (np.float64(0.5), float("inf"), np.bool_(True))})
        {'1': [0.5, None, True]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, np.ndarray)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return str(value)


def select(names: Sequence[str], claims: Mapping[str, Claim]) -> list[str]:
    """The labels meant by `names`: a label with its parts, or else the beginning of several; none: all of them.

    Example:
        >>> here = dict.fromkeys(["a/x", "a/y", "ab", "b"])
        >>> select(["a/"], here), select(["a"], here), select(["b"], here)
        (['a/x', 'a/y'], ['a/x', 'a/y', 'ab'], ['b'])
    """
    if not names:
        return list(claims)
    chosen: dict[str, None] = {}
    for name in names:
        found = [label for label in claims if label == name or label.startswith(f"{name}/")] if name in claims else []
        found = found or [label for label in claims if label.startswith(name)]
        if not found:
            near = difflib.get_close_matches(name, list(claims), n=3, cutoff=0.3)
            raise ValueError(
                f"no claim is called {name!r}; nearest: {', '.join(near) or 'none'} (see `ckda theory list`)"
            )
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def check(claim: Claim, effort: float) -> Record:
    """Run one claim. It never raises: a refutation, a search that fell short and a crash are all recorded."""
    record: Record = {"label": claim.label, "statement": claim.statement, "behind": claim.behind}
    record |= {"status": "verified", "effort": effort}
    start = time.perf_counter()
    try:
        evidence = claim.check(effort=effort)
        record |= {"cases": evidence.cases, "kind": evidence.kind, "margin": plain(evidence.margin)}
        record |= {"note": evidence.note, "data": plain(evidence.data), "error": None}
    except Inconclusive as error:
        record |= {"status": "inconclusive", "error": f"inconclusive at this effort ({effort:g}): {error}"}
    except Refuted as error:
        record |= {"status": "refuted", "error": str(error)}
    except Exception:
        record |= {"status": "broken", "error": traceback.format_exc(limit=-3)}
    return record | {"seconds": round(time.perf_counter() - start, 3)}


def verify(
    labels: Iterable[str],
    claims: Mapping[str, Claim],
    effort: float = 1.0,
    done: Mapping[str, Record] | None = None,
    report: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Check the labels in order, telling `report` after each; records in `done` are taken over as they are."""
    records = []
    for label in labels:
        record = (done or {}).get(label) or check(claims[label], effort)
        records.append(record)
        report(record)
    return records


def passed(records: Iterable[Record]) -> bool:
    """Whether nothing was refuted or broken, nor left open at full effort: a weak search may be inconclusive."""
    return not any(
        record["status"] in ("refuted", "broken") or (record["status"] == "inconclusive" and record["effort"] >= 1)
        for record in records
    )
