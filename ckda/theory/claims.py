"""Claims of the paper that check themselves.

A claim is a function that builds the object a theorem speaks of, tries it, and returns the :class:`Evidence`. It raises
:class:`Refuted` with the counterexample where the claim fails, and :class:`Inconclusive` where a search was too weak to
tell. Claims register themselves under the paper's label:

    @claim("prop:axis-test", "A rotation of R^3 is a CKDA transition iff a half-turn sign pattern fits its axis")
    def axis_test(effort: float = 1.0) -> Evidence: ...

`effort` scales the number of random cases; 1.0 is what `ckda theory verify` runs, tests use less.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ckda.theory.labels import LABELS

__all__ = ["CLAIMS", "Claim", "Evidence", "Inconclusive", "Refuted", "claim", "load_claims"]

#: the modules whose import registers claims
MODULES = (
    "ckda.theory.structure",
    "ckda.theory.symbolic",
    "ckda.theory.spectra",
    "ckda.theory.groups",
    "ckda.theory.reduction",
    "ckda.theory.obstructions",
    "ckda.theory.verdicts",
    "ckda.theory.exhaustive",
    "ckda.theory.exactness",
    "ckda.theory.group_figures",  # registers drawings
    "ckda.theory.automata",
)


class Refuted(AssertionError):
    """A claim failed; the message holds the counterexample."""


class Inconclusive(Exception):
    """A search fell short of what the claim says can be reached: nothing is refuted, more effort may find it."""


@dataclass(frozen=True)
class Evidence:
    """What was checked: how many cases, in which arithmetic, and how close the nearest case came to violating it."""

    cases: int
    kind: Literal["exact", "numeric", "search"]  #: `search`: an optimiser tried to violate the claim and could not
    margin: float | None = None  #: distance to violation of the worst case; None where the check is yes or no
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)  #: JSON-able details for tables and figures


@dataclass(frozen=True)
class Claim:
    """A registered claim: the paper's label, one sentence, and the function that checks it."""

    label: str
    statement: str
    check: Callable[..., Evidence]

    @property
    def behind(self) -> str:
        """What stands behind it: arithmetic and coverage, as :mod:`ckda.theory.labels` has them."""
        return str(LABELS.get(self.label, "not labelled"))


CLAIMS: dict[str, Claim] = {}


def claim(label: str, statement: str) -> Callable[[Callable[..., Evidence]], Callable[..., Evidence]]:
    """Register the decorated check under the paper's `label` (suffix `/part` where one label has several checks)."""

    def register(check: Callable[..., Evidence]) -> Callable[..., Evidence]:
        if label in CLAIMS:
            raise ValueError(f"two claims are registered as {label!r}")
        CLAIMS[label] = Claim(label, statement, check)
        return check

    return register


def load_claims() -> dict[str, Claim]:
    """Import every module that registers claims and return them all, in order of registration."""
    for module in MODULES:
        import_module(module)
    return CLAIMS
