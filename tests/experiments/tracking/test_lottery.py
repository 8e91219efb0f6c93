"""Best of three as a lottery: intervals against scipy, chances against a count of triples."""

import itertools

import pytest

from ckda.experiments.tracking.lottery import binomial_interval, lottery
from ckda.experiments.tracking.run import TrackRun


def made(seeds, scores):
    """A run with these scores."""
    named = {"group": "S3", "order": 6, "mixer": "ckda", "label": "", "recipe_name": "paper", "recipe": {}}
    return TrackRun(**named, seeds=seeds, scores=scores, best=0, environment={})


@pytest.mark.parametrize(("successes", "trials"), [(0, 24), (2, 10), (7, 24), (24, 24)])
def test_interval_is_clopper_pearson(successes, trials):
    beta = pytest.importorskip("scipy.stats").beta
    low = beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    high = beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
    assert binomial_interval(successes, trials) == pytest.approx((low, high), abs=1e-9)


def test_chances_count_triples():
    scores = {32: [1.0, 1.0, 0.2, 0.9996, 0.3], 128: [0.5, 0.99, 0.1, 0.7, 0.99], 512: [0.4, 0.1, 0.0, 0.1, 0.3]}
    chances = lottery(made([4, 5, 6, 7, 8], scores), (1.0, 0.985, 0.297))["reaches_published"]
    both = [
        t for t in itertools.combinations(range(5), 3) if {1, 4} & set(t) and {0, 4} & set(t) and {0, 1, 3} & set(t)
    ]
    assert chances["by_length"] == len(both) / 10
    assert chances["one_seed"] == 0.0
    assert chances["one_seed_interval"][0] == 0.0
    assert chances["seeds_at_length"]["128"]["seeds"] == [5, 8]


def test_few_seeds_have_no_best_of_three():
    assert "first_three" not in lottery(made([0], {32: [1.0], 128: [1.0], 512: [1.0]}))
