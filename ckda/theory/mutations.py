"""Random changes of a certificate, to try its checker: what computes something else must be rejected.

:func:`write_shipped` makes the certificates of results/theory again and tries the checker on each.
"""

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import flint

from ckda.record import environment, write_json, write_text
from ckda.theory import checker
from ckda.theory.certificates import follow
from ckda.theory.compiler import KEYS, Compile, Machine, certificate_text, compile_machine
from ckda.theory.horizons import GROUPS

__all__ = ["changes", "try_checker", "write_shipped"]

#: certificates of groups that are shipped; DFAs and WFAs are read from their own shipped certificates
SHIPPED = {
    **{name: Compile(name) for name in (*GROUPS, "D5", "Dic3")},
    **{f"{name}_all": Compile(name, "all") for name in ("A4", "Q8")},
    "S5_layers3": Compile("S5", layers=3),
}

#: what the checker may raise on a certificate that is not one; its command prints each as "rejected"
REJECTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def try_checker(
    certificate: dict[str, Any], count: int, word: Sequence[int] | None = None, seed: int = 0
) -> tuple[Counter[str], Counter[str]]:
    """How many changes were tried that change what the certificate computes, and how many of them were rejected, by kind.

    For a group "computes" means its answers on a word (a random one that meets most states if none is given), for
    automata the products of all programs.
    """
    word = _long_word(certificate) if word is None else word
    before = computed(certificate, word)
    tried, rejected = Counter[str](), Counter[str]()
    for kind, changed in changes(certificate, seed):
        if computed(changed, word) == before:
            continue
        tried[kind] += 1
        try:
            checker.check(changed)
        except REJECTS:
            rejected[kind] += 1
        if tried.total() == count:
            return tried, rejected
    raise AssertionError("changes never end")


def _long_word(certificate: dict[str, Any]) -> list[int]:
    """Letters enough to meet most states of a group's heads."""
    states = max((len(head["decoder"]) for head in certificate.get("heads", ())), default=0)
    letters = len(certificate["letters" if "letters" in certificate else "alphabet"])
    return random.Random(0).choices(range(letters), k=200 + 4 * states)


def computed(certificate: dict[str, Any], word: Sequence[int]) -> Any:
    """What a certificate computes, whether it is right or not; None where it computes nothing."""
    try:
        if certificate["kind"] == "group":
            rows = certificate["group"]["rows"]
            return follow(certificate, word), [[row[x] for x in range(len(row))] for row in rows]
        return [[str(x) for x in step] for step in _products(certificate)]
    except REJECTS:
        return None


def _products(certificate: dict[str, Any]) -> Iterator[list[Any]]:
    """The images of the unit vectors under every program of a DFA, or under the one of a WFA with its entries as symbols."""
    if "delta" in certificate:
        n = len(certificate["delta"])
        for item in certificate["programs"]:
            yield from (checker.product(item["factors"], j, n) for j in range(n))
        yield [certificate["delta"]]
        return
    size = 2 * len(certificate["initial"]) + 1
    yield from (checker.product(certificate["program"], j, size) for j in range(size))


#: what is changed: the part of a certificate that it stands in, and the name of the list of numbers
KINDS = {
    "key": ("heads", "keys"),
    "sign": ("heads", "signs"),
    "decoder entry": ("heads", "decoder"),
    "table entry": ("group", "rows"),
    "transition": ("delta", "delta"),
    "key of a factor": ("programs", "key"),
    "rate of a factor": ("programs", "gamma"),
    "gate of a factor": ("programs", "gate"),
    "key of the program": ("program", "key"),
    "rate of the program": ("program", "gamma"),
    "gate of the program": ("program", "gate"),
    "entry of the program": ("program", "entry"),
}


def changes(certificate: dict[str, Any], seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Endless random changes of one number each, with their kinds, all kinds alike: a key, a sign, a decoder entry, ..."""
    rng, leaves = random.Random(seed), list(_leaves(certificate))
    places = {
        kind: [path for path in leaves if path[0] == part and name in path] for kind, (part, name) in KINDS.items()
    }
    kinds = [kind for kind in KINDS if places[kind]]
    while True:
        kind = rng.choice(kinds)
        changed = copy.deepcopy(certificate)
        *path, last = rng.choice(places[kind])
        at: Any = changed
        for step in path:
            at = at[step]
        at[last] = _other(at[last])
        if kind == "key":
            _set_rate(changed["heads"][path[1]], path[3])
        yield kind, changed


def _set_rate(head: dict[str, Any], letter: int) -> None:
    """The rate that makes a reflection of a changed key, so that it is wrong for what it does and not for its length."""
    modulus = flint.fmpq_poly([flint.fmpq(*_parts(c)) for c in head["field"]["modulus"]])

    def number(coordinates: Sequence[str]) -> flint.fmpq_poly:
        return flint.fmpq_poly([flint.fmpq(*_parts(c)) for c in coordinates])

    keys, weights = (map(number, x) for x in (head["keys"][letter], head["weights"]))
    length, inverse, _ = sum((w * x * x for w, x in zip(weights, keys, strict=True)), number(["0"])).xgcd(modulus)
    if length.degree() == 0:  # it can be inverted; else the checker finds a key of length zero
        rate = (inverse * 2 / length[0]) % modulus
        head["rates"][letter] = [str(rate[i]) for i in range(modulus.degree())]


def _parts(text: str) -> tuple[int, int]:
    fraction = Fraction(text)
    return fraction.numerator, fraction.denominator


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


def write_shipped(folder: str | Path, count: int = 100) -> Path:
    """Compile what is shipped, write its certificates, and record how many changes of each the checker rejects."""
    folder, sources, here = Path(folder), dict(SHIPPED), environment()  # before the certificates are written
    for path in sorted((folder / "certificates").glob("*.json")):
        data = json.loads(path.read_text())
        if data["kind"] in ("dfa", "wfa"):
            form = "wfa" if data["kind"] == "wfa" else "delta"
            sources[path.stem] = Compile({key: data[key] for key in ("name", *KEYS[form])})
    rows = []
    for name, source in sources.items():
        start = time.perf_counter()
        machine = compile_machine(source)
        compiled = round(time.perf_counter() - start, 1)
        stem = name.replace("(", "").replace(")", "").replace(",", "_")
        write_text(folder / "certificates" / f"{stem}.json", certificate_text(machine.certificate))
        rows.append({"certificate": stem} | _tried(machine, count) | {"seconds_to_compile": compiled})
    return write_json(folder / "checker" / "record.json", {"environment": here, "rows": rows})


def _tried(machine: Machine, count: int) -> dict[str, Any]:
    text, start = certificate_text(machine.certificate), time.perf_counter()
    accepted = checker.check(json.loads(text))
    seconds = time.perf_counter() - start
    tried, rejected = try_checker(machine.certificate, count)
    row = {"bytes": len(text), "realisation": machine.config["realisation"], "accepted": accepted}
    row |= {"changes": tried.total(), "rejected": rejected.total(), "kinds": dict(sorted(tried.items()))}
    return row | {"seconds_to_check": round(seconds, 2)}
