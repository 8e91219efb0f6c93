"""How trackers are trained, as named data: the paper's protocol, and what it takes to go beyond it (docs/tracking.md)."""

from dataclasses import dataclass, field
from typing import Any

from ckda.train.recipe import Recipe

__all__ = ["RECIPES", "Protocol", "protocol"]


@dataclass(frozen=True)
class Protocol:
    """What a recipe changes in the paper's protocol (app:exp_state_tracking)."""

    about: str
    changes: dict[str, Any] = field(default_factory=dict)  #: of :class:`ckda.train.Recipe`
    model: dict[str, Any] = field(default_factory=dict)  #: of :func:`ckda.experiments.tracking.model.build_tracker`
    restarts: int = 0  #: seeds begun with, of which `keep` go on; 0: those asked for
    afterwards: bool = False  #: whether it begins from trained weights

    def recipe(self, **more: Any) -> Recipe:
        """The recipe, with what the command line changes.

        Example:
            >>> RECIPES["paper"].recipe(steps=100).curriculum
            (4, 6, 8, 16, 32)
        """
        return Recipe(**{"block": 50} | self.changes | more)


_SHORT = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_CLOSED: dict[str, Any] = {"penalties": {"closure": 0.1, "defect": 0.01}}

RECIPES: dict[str, Protocol] = {
    "paper": Protocol("the paper's protocol: 60,000 updates of 1024 words, lengths 4, 6, 8, 16, 32"),
    "10k": Protocol("the paper's protocol in 10,000 updates", {"steps": 10_000}),
    "3k": Protocol("the paper's protocol in 3000 updates", {"steps": 3000}),
    "small": Protocol("the paper's protocol in 5000 updates of 256 words", {"steps": 5000, "batch": 256}),
    "fast": Protocol("the paper's protocol in 1000 updates: S3 in seconds on a GPU", {"steps": 1000}),
    "quick": Protocol("600 updates of 64 words: S3 in a minute or two on a CPU", {"steps": 600, "batch": 64}),
    "closure": Protocol(
        "equal input and product, equal readout: the rotations learn to close", {"steps": 4000} | _CLOSED
    ),
    "closure-alone": Protocol(
        "the closure penalty without the orthogonality penalty", {"steps": 4000, "penalties": {"closure": 0.1}}
    ),
    "closure-culled": Protocol(
        "the closure penalty alone, eight seeds, of which the best three go on after a quarter of 3600 updates of 128 words",
        {"steps": 3600, "batch": 128, "cull_at": 900, "keep": 3, "penalties": {"closure": 0.1}},
        restarts=8,
    ),
    "closure-strong": Protocol(
        "the closure penalty ten times as strong", {"steps": 4000, "penalties": {"closure": 1.0, "defect": 0.01}}
    ),
    "defect": Protocol("the orthogonality penalty alone", {"steps": 4000, "penalties": {"defect": 0.01}}),
    # what might find S4
    "silu": Protocol("SiLU on q, k and v", {"steps": 30_000}, {"activate": ("q", "k", "v")}),
    "silu-keys": Protocol("SiLU on the keys", {"steps": 30_000}, {"activate": ("k",)}),
    "spread": Protocol(
        "beta spread: half of the heads start with larger learning rates", {"steps": 30_000}, {"beta_init": "spread"}
    ),
    "reflections": Protocol(
        "half of the heads start near orthogonal transitions",
        {"steps": 30_000},
        {"beta_init": "spread", "start": "reflections"},
    ),
    "quarters": Protocol(
        "the same with a quarter of their gates negative, as quaternions have it",
        {"steps": 30_000},
        {"beta_init": "spread", "start": "quarters"},
    ),
    "signs": Protocol(
        "the same with gates whose signs differ from input to input",
        {"steps": 30_000},
        {"beta_init": "spread", "start": "signs"},
    ),
    "short": Protocol("ten stages from length 2 on", {"steps": 30_000, "curriculum": _SHORT}),
    "many": Protocol("48 heads of 4 for 12 of 16, as many channels", {}, {"heads": 48, "head_dim": 4}),
    "generators": Protocol(
        "words over two generators first, then over the whole group",
        {
            "steps": 30_000,
            "curriculum": (4, 8, 16, 32, 4, 8, 16, 32),
            "letters": ("generators",) * 4 + ("all",) * 4,
        },
    ),
    "involutions": Protocol(
        "words over elements of order 1 and 2 first, most of which are reflections, then over the whole group",
        {
            "steps": 30_000,
            "curriculum": (4, 8, 16, 4, 6, 8, 16, 32),
            "letters": ("involutions",) * 3 + ("all",) * 5,
        },
    ),
    "half": Protocol(
        "words over the largest proper normal subgroup first (A4 of S4), then over the whole group",
        {"steps": 30_000, "curriculum": (4, 8, 16, 32, 4, 8, 16, 32), "letters": ("half",) * 4 + ("all",) * 4},
    ),
    "homomorphism": Protocol(
        "the transitions of the elements are pulled towards multiplying like the elements",
        {"steps": 30_000, "penalties": {"homomorphism": 0.1, "closure": 0.1}},
    ),
    "relations": Protocol(
        "once the training is half over, the letters' maps of the state are pulled towards those of a finite group",
        {"ramp": (0.55, 0.65), "penalties": {"relations": 1.0}},
    ),
    "sharpen": Protocol(
        "500 updates of 256 words of length 32 from trained weights (--from), pulled harder the nearer a head is to a finite group",
        {
            "steps": 500,
            "batch": 256,
            "curriculum": (32,),
            "lr_muon": 0.01,
            "lr_adamw": 2.5e-3,
            "ramp": (0.0, 0.0),
            "penalties": {"sharp": 0.1},
        },
        afterwards=True,
    ),
    "closure-late": Protocol(
        "the closure and orthogonality penalties once the training is half over", {"ramp": (0.5, 0.6)} | _CLOSED
    ),
    "culled": Protocol(
        "24 seeds, of which the best three go on after a third of 30,000 updates of 256 words",
        {"steps": 30_000, "batch": 256, "cull_at": 10_000, "keep": 3},
        restarts=24,
    ),
    # A5
    "theory": Protocol(
        "A5 from the paper's construction: two heads of four start as quaternions (app:A5const)",
        {"steps": 3000, "batch": 256, "curriculum": (4, 6, 7, 8, 10, 12, 16, 32)},
        {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": "quaternions"},
    ),
}


def protocol(name: str) -> Protocol:
    """The recipe of that name; several joined by + are taken together, the later ones winning.

    Example:
        >>> both = protocol("silu+culled+closure-late")
        >>> both.model["activate"], both.restarts, both.recipe().ramp
        (('q', 'k', 'v'), 24, (0.5, 0.6))
        >>> protocol("silu+magic")
        Traceback (most recent call last):
        KeyError: 'magic'
    """
    whole = Protocol("")
    for part in (RECIPES[word] for word in name.split("+")):
        whole = Protocol(
            f"{whole.about}; {part.about}" if whole.about else part.about,
            whole.changes | part.changes,
            whole.model | part.model,
            part.restarts or whole.restarts,
            part.afterwards or whole.afterwards,
        )
    return whole
