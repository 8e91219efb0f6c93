"""Random changes of a certificate, to try its checker: what computes something else must be rejected."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ckda.theory import checker

__all__ = ["changes", "try_checker"]

#: what the checker may raise on a certificate that is not one; its command prints each as "rejected"
REJECTS = (checker.Wrong, KeyError, IndexError, ValueError, TypeError, ZeroDivisionError)


def try_checker(
    certificate: dict[str, Any], count: int, word: Sequence[int] | None = None, seed: int = 0
) -> tuple[int, int]:
    """How many changes were tried that change what the certificate computes, and how many of them were rejected.

    For a group "computes" means its answers on a word (the certificate's example if none is given), for automata the
    products of all programs.
    """
    word = certificate["example"]["word"] if word is None else word
    before, tried, rejected = computed(certificate, word), 0, 0
    for changed in changes(certificate, seed):
        if computed(changed, word) == before:
            continue
        tried += 1
        try:
            checker.check(changed)
        except REJECTS:
            rejected += 1
        if tried == count:
            return tried, rejected
    raise AssertionError("changes never end")


def computed(certificate: dict[str, Any], word: Sequence[int]) -> Any:
    """What a certificate computes, whether it is right or not; None where it computes nothing."""
    try:
        if certificate["kind"] == "group":
            rows = certificate["group"]["rows"]
            return checker.follow(certificate, word), [[row[x] for x in range(len(row))] for row in rows]
        return [[str(x) for x in step] for step in _products(certificate)]
    except REJECTS:
        return None


def _products(certificate: dict[str, Any]) -> Iterator[list[Any]]:
    """The images of the unit vectors under every program of a DFA, or under the one of a WFA with its entries as symbols."""
    if certificate["kind"] == "dfa":
        n = len(certificate["delta"])
        for item in certificate["programs"]:
            for j in range(n):
                column = [int(i == j) for i in range(n)]
                for factor in item["factors"]:
                    column = checker.apply(factor, column)
                yield column
        yield [certificate["delta"]]
        return
    n = len(certificate["initial"])
    for j in range(2 * n + 1):
        symbols: list[Any] = [{(): 1} if i == j else {} for i in range(2 * n + 1)]
        for factor in certificate["program"]:
            symbols = checker._apply_symbols(factor, symbols)
        yield symbols


#: parts of a certificate that are changed, and names inside them that are left alone
CHANGED = ("heads", "programs", "program", "group", "delta")
LEFT = frozenset(("field", "elements", "as", "modulo", "order", "scale", "map"))


def changes(certificate: dict[str, Any], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless random changes of one number each: a key, a sign, a table or decoder entry, a factor."""
    rng = random.Random(seed)
    places = [path for path in _leaves(certificate) if path[0] in CHANGED and not LEFT & set(map(str, path))]
    while True:
        changed = copy.deepcopy(certificate)
        *path, last = rng.choice(places)
        at: Any = changed
        for step in path:
            at = at[step]
        old = at[last]
        at[last] = _other(old)
        yield changed


def _other(old: Any) -> Any:
    """Another number of the same kind."""
    if isinstance(old, str):
        return "7/5" if "/" in old else str(int(old) + 1)
    return -old if old in (1, -1) else 1 if old == 0 else old - 1


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the numbers of nested dictionaries and lists."""
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, (*path, key))
    elif data is not None and not isinstance(data, bool):
        yield path
