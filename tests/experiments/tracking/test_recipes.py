"""Recipes by name: combinations, changes, and the names of earlier versions."""

import pytest

from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.recipes import RECIPES
from ckda.experiments.tracking.task import WordProblem


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("paper", "paper"),
        ("10k", "steps=10k"),
        ("closure-culled", "closed"),
        ("quarters+sharpen", "finish+init=orthogonal-quarter"),
        (
            "quarters+culled+relations",
            "init=orthogonal-quarter+penalty=relations+steps=30k+batch=256+keep=3-of-24+momentum=0.95",
        ),
        ("closed+steps=8k", "closed+steps=8k"),
    ],
)
def test_old_names_are_read(old: str, new: str) -> None:
    assert RECIPES.name(old) == new


def test_what_stands_later_wins() -> None:
    assert RECIPES.read("quarters+sharpen").recipe().steps == 500
    assert RECIPES.read("sharpen+steps=800").recipe().steps == 800
    assert RECIPES.read("closed").recipe().cull_at == 900
    assert RECIPES.read("culled").recipe().cull_at == 10_000
    assert RECIPES.read("paper").recipe().momentum == "cycled"


@pytest.mark.parametrize(
    ("mixer", "recipe", "activate"),
    [
        ("deltaproduct2-wide", "paper", {"q", "k", "v"}),
        ("deltaproduct2-wide", "silu=qv", {"q", "v"}),
        ("ckda", "paper", set()),
        ("ckda", "silu=k", {"k"}),
    ],
)
def test_where_silu_is(mixer: str, recipe: str, activate: set[str]) -> None:
    """The paper's DeltaProduct_2 has it on q, k and v, on A5 not on the keys (app:silu)."""
    model = build_tracker(mixer, WordProblem.named("S3"), **RECIPES.read(recipe).model)
    assert set(model.mixer.activate) == activate


@pytest.mark.parametrize("name", [*RECIPES.old, *RECIPES.named])
def test_every_name_is_a_recipe_with_a_sentence(name: str) -> None:
    assert RECIPES.read(name).recipe().steps >= 500
    assert len(RECIPES.about(name)) > 10
