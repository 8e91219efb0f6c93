"""How much of a best-of-three score is luck: counts of seeds that find a task, and what three of them would show."""

import itertools
from collections.abc import Callable
from math import comb
from typing import Any

from ckda.experiments.tracking.run import TrackRun

__all__ = ["FOUND", "binomial_interval", "lottery"]

#: the scaled accuracy at length 32 from which a seed has found its task
FOUND = 0.999
_LENGTHS = (32, 128, 512)
_ROUNDING = 5e-4  # published numbers have three or four digits


def binomial_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a success probability.

    Example:
        >>> [round(p, 3) for p in binomial_interval(2, 10)]
        [0.025, 0.556]
    """
    tail = (1 - level) / 2

    def at_least(k: int, p: float) -> float:
        return sum(comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(k, trials + 1))

    low = 0.0 if successes == 0 else _root(lambda p: at_least(successes, p) - tail)
    high = 1.0 if successes == trials else _root(lambda p: at_least(successes + 1, p) - (1 - tail))
    return low, high


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def lottery(run: TrackRun, published: tuple[float, ...] | None = None) -> dict[str, Any]:
    """What the seeds of a run say: scores at 32, 128 and 512, how many find the task, best of three.

    Best of three is given both ways: one seed (the best at 512), and the maximum at each length. The probability that three
    seeds reach the published scores is the share of all triples of these seeds that do. For one seed with all scores there
    is also an interval, from that of the number of such seeds.

    """
    rows = list(zip(*(run.scores[n] for n in _LENGTHS), strict=True))
    result: dict[str, Any] = {
        "scores": {str(seed): list(row) for seed, row in zip(run.seeds, rows, strict=True)},
        "found": _count([row[0] >= FOUND for row in rows], run.seeds),
    }
    if len(rows) < 3:
        return result
    best = max(rows[:3], key=lambda row: row[::-1])
    result["first_three"] = {
        "one_seed": list(best),
        "by_length": [max(column) for column in zip(*rows[:3], strict=True)],
    }
    if published is not None:
        result["published"] = list(published)
        result["reaches_published"] = _chances(rows, run.seeds, published)
    return result


def _count(hits: list[bool], seeds: list[int]) -> dict[str, Any]:
    interval = binomial_interval(sum(hits), len(hits))
    which = [seed for seed, hit in zip(seeds, hits, strict=True) if hit]
    return {"seeds": which, "count": sum(hits), "of": len(hits), "interval": list(interval)}


def _chances(rows: list[tuple[float, ...]], seeds: list[int], published: tuple[float, ...]) -> dict[str, Any]:
    """How often three of these seeds reach every published score, by either way of taking the best."""
    reached = [[value >= least - _ROUNDING for value, least in zip(row, published, strict=True)] for row in rows]
    triples = list(itertools.combinations(reached, 3))
    alone = _count([all(row) for row in reached], seeds)
    return {
        "by_length": sum(all(map(any, zip(*triple, strict=True))) for triple in triples) / len(triples),
        "one_seed": sum(any(map(all, triple)) for triple in triples) / len(triples),
        "one_seed_interval": [1 - (1 - p) ** 3 for p in alone["interval"]],
        "seeds_with_all": alone,
        "seeds_at_length": {str(n): _count([row[i] for row in reached], seeds) for i, n in enumerate(_LENGTHS)},
    }
