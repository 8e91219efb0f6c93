"""What a family's spectrum can do: the rows of tab:recurrence-spectrum and "complex pairs" of tab:theory-summary.

Nothing here knows the answers. A question searches the family; where the search succeeds its end point is the witness,
recounted in exact arithmetic where the family has an exact form; where it fails, the answer says how near it came.
The claims then compare the answers with the paper's cells.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np

from ckda.groups import group
from ckda.theory.claims import Evidence, Inconclusive, Refuted, claim
from ckda.theory.exact import field
from ckda.theory.factor import reflection_keys
from ckda.theory.families import FAMILIES, Family, delta_product, sfda
from ckda.theory.groups import cube_rotations, icosahedral_rotations, realise
from ckda.theory.search import climb, extra_pair, unit_circle_mode

__all__ = ["Answer", "circle", "fixed", "isometries", "most_pairs", "nonexpansive", "unit_pairs_below"]

#: imaginary parts below this may be a real double or triple eigenvalue in rounding
VISIBLE = 1e-3
#: a search that ends this near a target has reached it
REACHED = 1e-5


@dataclass(frozen=True)
class Answer:
    """An answer: its value, the cases tried, how near the failed search came (None: it succeeded), and how in words."""

    value: object
    cases: int
    margin: float | None
    how: str
    effort: Literal["raises", "lowers", "changes nothing"] = "raises"  #: what more effort can do to the value


#: kinds of whole-state isometries, each more than the one before
ISOMETRIES = ("only I", "commuting", "non-commuting")


def _budget(effort: float) -> tuple[int, int]:
    return max(16, round(96 * effort)), max(120, round(400 * min(1.0, 0.4 + 0.6 * effort)))


def fixed(family: Family, **values: float) -> Family:
    """The sub-family with these parameters held.

    Example:
        >>> int(most_pairs(fixed(FAMILIES["CKDA"], beta=1.0), 3, effort=0.1).value)
        0
    """
    slots = tuple(replace(s, low=values[s.name], high=values[s.name]) if s.name in values else s for s in family.slots)
    return replace(family, slots=slots)


def most_pairs(family: Family, d: int, effort: float = 1.0) -> Answer:
    """The largest number of non-real pairs found at width d, and how far a search for one more stayed from it.

    Example:
        >>> most_pairs(FAMILIES["CKDA"], 4, effort=0.1).value
        1
    """
    starts, steps = _budget(effort)
    n, cases = family.sample(d, 1).shape[-1], 0
    for bound in range(n // 2):
        found = family.search(partial(extra_pair, bound=bound), d, starts, steps, seed=bound)
        cases += found.evaluations
        nearest = found.best
        exact = [family.rational(x, d).eigenvalue_count().pairs for x in found.points[:4]] if family.exact else []
        cases += len(exact)
        if nearest <= VISIBLE and max(exact, default=0) <= bound:
            return Answer(bound, cases, max(0.0, -nearest), f"one more stayed {nearest:.1e}; exact recounts {exact}")
    return Answer(n // 2, cases, None, "every eigenvalue can be non-real")


def nonexpansive(family: Family, d: int, effort: float = 1.0) -> Answer:
    """Whether the spectral norm stays at most one, which every family here attains: no margin, the norm is in `how`."""
    starts, steps = _budget(effort)
    found = family.search(lambda A: np.linalg.norm(A, 2, axis=(-2, -1)) - 1, d, starts, steps)
    stays = found.best < 1e-9
    return Answer(stays, found.evaluations, None, f"largest norm found 1 {found.best:+.1e}", "lowers")


def circle(family: Family, d: int, effort: float = 1.0, degrees: tuple[int, ...] = tuple(range(0, 181, 15))) -> Answer:
    """Which points of the unit circle are eigenvalues: the reached angles; margin: the nearest of the others."""
    starts, steps = _budget(effort)
    distance, cases = {}, 0
    for angle in degrees:
        found = family.search(partial(unit_circle_mode, angle=math.radians(angle)), d, starts, steps + 200, seed=angle)
        distance[angle], cases = -found.best, cases + found.evaluations
    reached = tuple(a for a in degrees if distance[a] < REACHED)
    rest = [distance[a] for a in degrees if a not in reached]
    return Answer(reached, cases, min(rest, default=None), f"{len(reached)} of {len(degrees)} angles reached")


def unit_pairs_below(family: Family, d: int, effort: float = 1.0, imaginary: float = 0.1) -> Answer:
    """The largest modulus of an eigenvalue whose imaginary part is at least `imaginary`."""
    starts, steps = _budget(effort)

    def score(A: np.ndarray) -> np.ndarray:
        values = np.linalg.eigvals(A)
        return (np.abs(values) - 10 * (imaginary - values.imag).clip(0)).max(-1)

    found = family.search(score, d, starts, steps)
    return Answer(
        found.best, found.evaluations, abs(1 - found.best), f"largest modulus {found.best:.6f} at Im >= {imaginary:g}"
    )


def isometries(family: Family, d: int, effort: float = 1.0) -> Answer:
    """The whole-state isometries: "only I", "commuting" or "non-commuting"; margin: defect of the next kind.

    Example:
        >>> isometries(FAMILIES["MDN"], 2, effort=0.1).value
        'only I'
    """
    starts, steps = _budget(effort)
    cases = 0
    kinds: tuple[tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]], ...] = (
        ("commuting", lambda A, B: _norm(A - np.eye(A.shape[-1]))),
        ("non-commuting", lambda A, B: _norm(A @ B - B @ A)),
    )
    value = "only I"
    for kind, distance in kinds:
        found = _search_pair(family, d, starts, 2 * steps, distance)
        cases += found[1]
        if found[0] > 1e-3:
            return Answer(value, cases, found[0], f"nearest {kind} isometry has defect {found[0]:.4f}")
        value = kind
    return Answer(value, cases, None, "two isometries that do not commute were found")


def held_to(paper: object, answer: Answer, what: str) -> Answer:
    """The answer, if it is what the paper says; less than the paper says is a search that fell short, no refutation."""
    if answer.value == paper:
        return answer
    if answer.effort != "changes nothing" and _is_less(*_order(answer.effort, paper, answer.value)):
        raise Inconclusive(f"{what}: the paper says {paper}, the search only found {answer.value} ({answer.how})")
    raise Refuted(f"{what}: the paper says {paper}, found {answer.value} ({answer.how})")


def _order(effort: str, paper: Any, found: Any) -> tuple[Any, Any]:
    """What must be less than what, for more effort to lead from the value found to the paper's."""
    return (found, paper) if effort == "raises" else (paper, found)


def _is_less(a: Any, b: Any) -> bool:
    """Whether a search that found a may still find b.

    Example:
        >>> _is_less(2, 3), _is_less(3, 3), _is_less((0,), (0, 15)), _is_less((0, 30), (0, 15)), _is_less(False, True)
        (True, False, True, False, True)
        >>> _is_less("commuting", "non-commuting")
        True
    """
    if isinstance(a, str):
        return ISOMETRIES.index(a) < ISOMETRIES.index(b)
    return set(a) < set(b) if isinstance(a, tuple) else bool(a < b)


def _norm(A: np.ndarray) -> np.ndarray:
    return np.linalg.norm(A, axis=(-2, -1))


def _search_pair(
    family: Family, d: int, starts: int, steps: int, distance: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, int]:
    """Smallest isometry defect of two transitions A, B that are `distance` at least 1/2 apart."""
    size = family.size(d)

    def score(raw: np.ndarray) -> np.ndarray:
        A, B = family.dense(raw[:, :size], d).numpy(), family.dense(raw[:, size:], d).numpy()
        eye = np.eye(A.shape[-1])
        defect = _norm(A.swapaxes(-1, -2) @ A - eye) + _norm(B.swapaxes(-1, -2) @ B - eye)
        return -defect - (0.5 - distance(A, B)).clip(0)

    found = climb(score, 2 * size, starts, steps)
    return -found.best, found.evaluations


# the claims

ANGLES = tuple(range(0, 181, 15))

#: tab:recurrence-spectrum as the paper prints it, in the terms of the questions above
PAPER: dict[str, dict[str, object]] = {
    "CKDA": {
        "state": 1,
        "pairs": 1,
        "unit modes": True,
        "support": ANGLES,
        "isometries": "non-commuting",
        "norm": True,
    },
    "MDN": {"state": 2, "pairs": 1, "unit modes": False, "support": (0,), "isometries": "only I", "norm": False},
    "SFDA": {"state": 2, "pairs": 3, "unit modes": True, "support": ANGLES, "isometries": "commuting", "norm": True},
}


def column(family: Family, d: int = 3, effort: float = 1.0) -> Iterator[tuple[str, Answer]]:
    """The answers of one column of tab:recurrence-spectrum at width d, the quick ones first.

    Example:
        >>> next(column(FAMILIES["MDN"]))
        ('state', Answer(value=2.0, cases=1, margin=None, how='6 real numbers at width 3', effort='changes nothing'))
    """
    n = family.sample(d, 1).shape[-1]
    yield "state", Answer(n / d, 1, None, f"{n} real numbers at width {d}", "changes nothing")
    yield "norm", nonexpansive(family, d, effort)
    yield "unit modes", _reached(unit_pairs_below(family, d, effort))
    yield "pairs", most_pairs(family, d, effort)
    yield "isometries", isometries(family, d, effort)
    yield "support", circle(family, 2, effort)


def _reached(modulus: Answer) -> Answer:
    """Whether a modulus of one was reached, from :func:`unit_pairs_below`."""
    reached = modulus.margin is not None and modulus.margin < REACHED
    return replace(modulus, value=reached, margin=None if reached else modulus.margin)


def _hold_column(name: str, family: Family, effort: float, paper: dict[str, object]) -> dict[str, Answer]:
    return {row: held_to(paper[row], answer, f"{name}, {row}") for row, answer in column(family, 3, effort)}


def _evidence(answers: dict[str, Answer], note: str = "real eigenvalues collide but stay real") -> Evidence:
    """All answers as one piece of evidence; a margin of 0 means that the bound is touched."""
    margins = [a.margin for a in answers.values() if a.margin is not None]
    cells = {row: {"value": a.value, "how": a.how, "margin": a.margin} for row, a in answers.items()}
    cases = sum(a.cases for a in answers.values())
    return Evidence(cases, "search", min(margins, default=None), note, {"cells": cells})


@claim(
    "tab:recurrence-spectrum/CKDA", "CKDA: one pair, any angle on the circle, non-commuting isometries, non-expansive"
)
def spectrum_ckda(
    effort: float = 1.0, family: Family = FAMILIES["CKDA"], paper: dict[str, object] = PAPER["CKDA"]
) -> Evidence:
    """Column CKDA of tab:recurrence-spectrum; the pair needs both extended ranges (its row "origin")."""
    answers = _hold_column("CKDA", family, effort, paper)
    without_sign, without_beta = FAMILIES["KDA, beta to 2"], FAMILIES["KDA, signed gate"]
    answers["origin: gate >= 0"] = held_to(0, most_pairs(without_sign, 3, effort), "pairs with alpha >= 0")
    answers["origin: beta <= 1"] = held_to(0, most_pairs(without_beta, 3, effort), "pairs with beta <= 1")
    return _evidence(answers, "the pair vanishes without the sign and without beta > 1")


@claim(
    "tab:recurrence-spectrum/MDN", "MDN: one pair, never on the unit circle, support {1}, no isometry but I, expansive"
)
def spectrum_mdn(
    effort: float = 1.0, family: Family = FAMILIES["MDN"], paper: dict[str, object] = PAPER["MDN"]
) -> Evidence:
    """Column MDN of tab:recurrence-spectrum, over the closure of its quadrant-constrained range."""
    answers = _hold_column("MDN", family, effort, paper)
    answers["origin: no coupling"] = held_to(0, most_pairs(fixed(family, share=0.0), 3, effort), "pairs at beta = 0")
    coupling = family.sample(3, 200)[:, :3, 3:].numpy()
    invertible = bool((np.abs(np.linalg.det(coupling)) > 0).mean() > 0.5)
    answers["order"] = held_to(
        True, Answer(invertible, 200, None, "momentum can be eliminated", "changes nothing"), "second order in S"
    )
    return _evidence(answers, "the pair vanishes without memory-momentum coupling")


@claim("tab:recurrence-spectrum/SFDA", "SFDA: m pairs, phases up to theta_max, isometries are commuting phases")
def spectrum_sfda(
    effort: float = 1.0, family: Family | None = None, paper: dict[str, object] = PAPER["SFDA"]
) -> Evidence:
    """Column SFDA of tab:recurrence-spectrum, at theta_max = pi and, for the support, at pi / 3."""
    family = family or sfda()
    answers = _hold_column("SFDA", family, effort, paper)
    narrow = circle(sfda(math.pi / 3), 2, effort, tuple(range(0, 181, 30)))
    answers["support, theta_max = pi/3"] = held_to((0, 30, 60), narrow, "support at theta_max = pi/3")
    answers["origin: no phase"] = held_to(0, most_pairs(fixed(family, theta=0.0), 3, effort), "pairs without phase")
    answers["origin: no delta"] = held_to(3, most_pairs(fixed(family, beta=0.0), 3, effort), "pairs without delta")
    rank = _correction_rank(family)
    answers["rank"] = held_to(
        2, Answer(rank, 50, None, "real rank of the delta correction", "changes nothing"), "rank of the correction"
    )
    return _evidence(answers, "phases alone give the pairs")


def _correction_rank(family: Family) -> int:
    """The largest real rank of A - Lambda over samples of SFDA."""
    raw = np.random.default_rng(0).uniform(-1, 1, (50, family.size(3)))
    gap = family.dense(raw, 3) - fixed(family, beta=0.0).dense(raw, 3)
    return int(np.linalg.matrix_rank(gap.numpy(), tol=1e-9).max())


@claim("tab:theory-summary/pairs/CKDA", "CKDA has at most one non-real pair, none if beta <= 1 or alpha >= 0")
def pairs_ckda(effort: float = 1.0, at_most: int = 1) -> Evidence:
    """Row "complex pairs" of tab:theory-summary, widths 2 to 6."""
    answers = {f"d = {d}": most_pairs(FAMILIES["CKDA"], d, effort) for d in (2, 3, 4, 6)}
    for d, answer in answers.items():
        held_to(at_most, answer, f"pairs of CKDA at {d}")
    for name in ("KDA", "KDA, beta to 2", "KDA, signed gate"):
        answers[name] = held_to(0, most_pairs(FAMILIES[name], 4, effort), f"pairs of {name}")
    return _evidence(answers)


@claim("tab:theory-summary/pairs/GDN", "GDN and DeltaNet have a real spectrum, the scalar gate signed or not")
def pairs_gdn(effort: float = 1.0, names: tuple[str, ...] = ("DeltaNet", "GDN", "GDN, signed gate")) -> Evidence:
    """Row "complex pairs" of tab:theory-summary for scalar gates."""
    return _evidence({n: held_to(0, most_pairs(FAMILIES[n], 4, effort), f"pairs of {n}") for n in names})


@claim(
    "tab:theory-summary/pairs/DeltaProduct",
    "Gated DeltaProduct_k has at most floor(min(d, k) / 2) pairs, and attains it",
)
def pairs_delta_product(
    effort: float = 1.0, bound: Callable[[int, int], int] = lambda d, k: min(d, k) // 2
) -> Evidence:
    """Row "complex pairs" of tab:theory-summary; app:table-comparison gives the bound with min(d, k)."""
    answers = {}
    for d, k in ((3, 1), (4, 2), (5, 3), (3, 4), (6, 4), (6, 5)):
        answer = most_pairs(delta_product(k, gated=True), d, effort)
        answers[f"d = {d}, k = {k}"] = held_to(bound(d, k), answer, f"pairs of DeltaProduct_{k} at d = {d}")
    return _evidence(answers)


@claim(
    "tab:theory-summary/pairs/RWKV-7", "RWKV-7 and GDN-2 with nonnegative gates have a real spectrum; both can expand"
)
def pairs_rwkv(effort: float = 1.0, names: tuple[str, ...] = ("RWKV-7", "GDN-2")) -> Evidence:
    """Row "complex pairs" of tab:theory-summary, and its footnote on expansive transitions."""
    answers = {}
    for name in names:
        answers[name] = held_to(0, most_pairs(FAMILIES[name], 4, effort), f"pairs of {name}")
        answers[f"{name}, norm"] = held_to(False, nonexpansive(FAMILIES[name], 4, effort), f"{name} non-expansive")
    return _evidence(answers)


@claim(
    "app:complex_eigenvalues/two-householders",
    "A product of two Householder factors is real unless both betas exceed 1",
)
def two_householders(effort: float = 1.0, beta: float = 1.0) -> Evidence:
    """The requirement the paper cites beside thm:complex_eigenvalues, for DeltaProduct_2 with one beta held."""
    answers = {}
    for held in (0.0, 0.5 * beta, beta):
        answer = most_pairs(fixed(delta_product(2), beta0=held), 4, effort)
        answers[f"beta_1 = {held:g}"] = held_to(0, answer, f"pairs at beta_1 = {held:g}")
    return _evidence(answers)


@claim("sec:dplr/rope", "Products of (Selective) RoPE transitions stay in the same fixed planes; those of CKDA do not")
def rope_products(effort: float = 1.0, names: tuple[str, ...] = ("RoPE", "Selective RoPE")) -> Evidence:
    """The contrast that closes section 3: off-plane entries of long products are exactly zero, and factors commute."""
    count, d = max(20, round(400 * effort)), 3
    outside = 1 - np.tile(np.eye(d), (2, 2))
    for name in names:
        A, B = FAMILIES[name].sample(d, count, 1).numpy(), FAMILIES[name].sample(d, count, 2).numpy()
        product = np.linalg.multi_dot(list(A[:20]))
        if (product * outside).any() or not np.allclose(A @ B, B @ A, atol=1e-12):
            raise Refuted(f"{name}: a product leaves the planes or does not commute: {product}")
    found = isometries(FAMILIES["CKDA"], 3, effort)
    held_to("non-commuting", found, "isometries of CKDA")
    return Evidence(2 * count + found.cases, "numeric", None, "products of 20 factors, all pairs commute")


@claim(
    "tab:theory-summary/parity",
    "All four families hold parity in one coordinate: a reflection for one, the identity for zero",
)
def parity(effort: float = 1.0, beta: int = 2) -> Evidence:
    """Row S_2 of tab:theory-summary at width one, exactly: each family's transition for a bit, over random words."""
    F, rng, cases = field(), random.Random(0), max(20, round(200 * effort))
    one = Fraction(1)
    steps = {
        "CKDA": lambda x: {"alpha": [one], "k": [one], "beta": [beta * x * one]},
        "GDN": lambda x: {"alpha": [one], "k": [one], "beta": [beta * x * one]},
        "Gated DeltaProduct_1": lambda x: {"alpha": [one], "k0": [one], "beta0": [beta * x * one]},
        "RWKV-7": lambda x: {"alpha": [one], "k": [one], "erase": [beta * x * one]},
    }
    for name, parameters in steps.items():
        exact = FAMILIES[name].exact
        assert exact is not None
        turn = [exact(F, parameters(x)) for x in (0, 1)]
        for _ in range(cases):
            word = [rng.randint(0, 1) for _ in range(rng.randint(0, 60))]
            state = F.eye(1)
            for x in word:
                state = turn[x] @ state
            if state[0, 0] != (-1) ** sum(word):
                raise Refuted(f"{name}: state {state[0, 0]} after {word}")
    return Evidence(4 * cases, "exact", None, "words up to length 60")


@claim("tab:theory-summary/deltaproduct-2", "DeltaProduct_2 realises Z_n and D_n in the plane, A4, S4 and A5 in space")
def delta_product_two(effort: float = 1.0, factors: int = 2) -> Evidence:
    """Column DeltaProduct, rows Z_n, D_n and S_4, A_5: every element is a product of two reflections, the set is closed."""
    largest, cases = max(4, round(12 * min(1.0, effort))), 0
    sets = {f"{kind}{n}": [t.matrix for t in realise(f"{kind}{n}").transitions] for kind in "ZD" for n in (3, largest)}
    sets |= {"S4": list(cube_rotations(turned=False).values()), "A5": list(icosahedral_rotations().values())}
    for name, matrices in sets.items():
        F, members = matrices[0].field, set(matrices)
        if len(members) != group(name).order or not {a @ b for a in members for b in members} <= members:
            raise Refuted(f"{name}: the matrices are not a faithful representation")
        for A in members:
            keys, product = reflection_keys(A), F.eye(A.shape[0])
            for k in keys:
                product = product @ F.householder(k)
            if len(keys) > factors or product != A:
                raise Refuted(f"{name}: {len(keys)} reflections for {A}")
        cases += len(members) ** 2
    return Evidence(cases, "exact", None, f"{', '.join(sets)}; A4 is a subgroup of S4")
