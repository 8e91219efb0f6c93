"""How trackers are trained, by name: the paper's protocol, and what it takes to go beyond it (docs/tracking.md)."""

import re
from collections.abc import Callable
from typing import Any

from ckda.command import plural
from ckda.train.recipe import Book, Change, decimal, number

__all__ = ["RECIPES", "SHORTER"]

_STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "from-2": ("ten stages, from length 2 on", {"curriculum": (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)}),
    "long-from-2": (
        "twelve stages, from length 2 on, lengths 4 to 6 twice as long: there groups are found",
        {"curriculum": (2, 3, 4, 4, 5, 5, 6, 6, 8, 12, 16, 32)},
    ),
    "generators-first": (
        "words over two generators first, then over the whole group",
        {"curriculum": (4, 8, 16, 32, 4, 8, 16, 32), "letters": ("generators",) * 4 + ("all",) * 4},
    ),
    "involutions-first": (
        "words over elements of order 1 and 2 first, then over the whole group",
        {"curriculum": (4, 8, 16, 4, 6, 8, 16, 32), "letters": ("involutions",) * 3 + ("all",) * 5},
    ),
    "subgroup-first": (
        "words over the largest proper normal subgroup first (A4 of S4), then over the whole group",
        {"curriculum": (4, 8, 16, 32, 4, 8, 16, 32), "letters": ("half",) * 4 + ("all",) * 4},
    ),
    "theory": ("eight stages, as the paper trains A5", {"curriculum": (4, 6, 7, 8, 10, 12, 16, 32)}),
}
_STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "beta-spread": ("half of the heads start with larger learning rates", {"beta_init": "spread"}),
    "orthogonal-half": (
        "half of the heads start near orthogonal transitions: beta near 2, gates near 1 and -1, half of them negative",
        {"beta_init": "spread", "start": "orthogonal-half"},
    ),
    "orthogonal-quarter": (
        "the same with a quarter of those gates negative, as quaternions have it",
        {"beta_init": "spread", "start": "orthogonal-quarter"},
    ),
    "orthogonal-by-input": (
        "the same with gates whose signs differ from input to input",
        {"beta_init": "spread", "start": "orthogonal-by-input"},
    ),
    "quaternions": (
        "two heads start as the paper's construction for A5 (app:A5const)",
        {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": "quaternions"},
    ),
    "quaternions-begin": (
        "the same, and the begin token keeps a random key in them, as in the authors' code",
        {"width": 32, "heads": 4, "head_dim": 4, "beta_init": "spread", "start": "quaternions-begin"},
    ),
}
_PENALTIES = {
    "closure": ("equal input and product, equal readout: the rotations learn to close", {"closure": 0.1}),
    "closure-orthogonal": ("the closure penalty and a small one on orthogonality", {"closure": 0.1, "defect": 0.01}),
    "closure-strong": ("the same with the closure penalty ten times as strong", {"closure": 1.0, "defect": 0.01}),
    "orthogonal": ("transitions are pulled towards orthogonal ones", {"defect": 0.01}),
    "homomorphism": (
        "the transitions of the elements are pulled towards multiplying like the elements",
        {"homomorphism": 0.1, "closure": 0.1},
    ),
}


def _steps(text: str) -> Change:
    """N: updates (600, 15k)"""
    return Change(plural(number(text), "update"), {"steps": number(text)})


def _batch(text: str) -> Change:
    """N: words an update"""
    return Change(f"{number(text)} words an update", {"batch": number(text)})


def _heads(text: str) -> Change:
    """HxK: H heads of K channels (12x16 in the paper)"""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError("heads are written as 48x4, 48 heads of 4 channels")
    return Change(f"{found[1]} heads of {found[2]}", model={"heads": int(found[1]), "head_dim": int(found[2])})


def _keep(text: str) -> Change:
    """K-of-M: begin with M seeds, the best K go on after a third of the updates (or 3-of-8-at-0.25: after a quarter)"""
    found = re.fullmatch(r"([1-9]\d*)-of-([1-9]\d*)(?:-at-(0\.\d+))?", text)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError("it is written as 3-of-24, the best 3 of 24 seeds go on, or 3-of-8-at-0.25")
    share = float(found[3]) if found[3] else 1 / 3
    when = f"{share:.0%} of the updates" if found[3] else "a third of the updates"
    about = f"{found[2]} seeds, of which the best {found[1]} go on after {when}"
    return Change(about, {"keep": int(found[1])}, restarts=int(found[2]), cull_share=share)


def _rate(field: str, optimizer: str) -> Callable[[str], Change]:
    def read(text: str) -> Change:
        if not decimal(text) > 0:
            raise ValueError("a learning rate is above 0")
        return Change(f"{optimizer}'s learning rate {decimal(text):g}", {field: decimal(text)})

    read.__doc__ = f"RATE: {optimizer}'s peak learning rate"
    return read


def _momentum(text: str) -> Change:
    """M: Muon's momentum, a number from 0 to below 1, or `cycled` as the authors' code has it (.95, .85, .95)"""
    value = text if text == "cycled" else decimal(text)
    if isinstance(value, float) and not 0 <= value < 1:
        raise ValueError("a momentum is at least 0 and below 1, or cycled")
    return Change(f"Muon's momentum {text}", {"momentum": value})


def _smoothing(text: str) -> Change:
    """SHARE: labels smoothed by it, as 0.1: a right answer must stay equally sure after words of any length"""
    if not 0 < float(text) < 1:
        raise ValueError("a share is above 0 and below 1")
    return Change(f"labels smoothed by {float(text):g}", task={"smoothing": float(text)})


def _then(text: str) -> Change:
    """RECIPE: then train on from these weights by finish, polish or settle, as a run of its own"""
    if text not in _FROM_WEIGHTS:
        raise ValueError(f"there are {', '.join(f'then={name}' for name in _FROM_WEIGHTS)}")
    return Change(f"then {text}: {_FROM_WEIGHTS[text][1]}", goes_on=text)


def _penalties() -> dict[str, Change]:
    made = {
        name: Change(text, {"penalties": weights, "ramp": (0.0, 0.0)}) for name, (text, weights) in _PENALTIES.items()
    }
    about = "the letters' maps of the state are pulled towards those of a finite group"
    late: dict[str, Any] = {"penalties": {"closure": 0.1, "defect": 0.01}, "ramp": (0.5, 0.6)}
    strong: dict[str, Any] = {"penalties": {"closure": 1.0}, "ramp": (0.3, 0.5)}
    return made | {
        "closure-strong-late": Change(
            "the closure penalty alone, ten times as strong, from 30% of the training on, in full force at half", strong
        ),
        "closure-late": Change("the closure and orthogonality penalties once the training is half over", late),
        "relations": Change(
            f"once the training is half over, {about}", {"penalties": {"relations": 1.0}, "ramp": (0.55, 0.65)}
        ),
        "relations-sharp": Change(
            f"{about}, harder the nearer a head is to it", {"penalties": {"sharp": 0.1}, "ramp": (0.0, 0.0)}
        ),
        "relations-sampled": Change(
            "the same on 64 pairs of letters an update, which is cheaper",
            {"penalties": {"sampled": 0.1}, "ramp": (0.0, 0.0)},
        ),
    }


_FINISH = Change(
    "500 updates of 256 words of length 32 from trained weights (--from)",
    {"steps": 500, "batch": 256, "curriculum": (32,), "lr_muon": 0.01, "lr_adamw": 2.5e-3},
    from_weights="trained",
)
_SNAPPED = Change(
    "1600 updates of 64 words of length 32 with a strong closure penalty from trained weights (--from), in which gates and "
    "learning rates near their ends are moved there first",
    {"steps": 1600, "batch": 64, "curriculum": (32,), "penalties": {"closure": 1.0}, "ramp": (0.0, 0.0)},
    from_weights="snapped",
)

_FROM_WEIGHTS = {
    "finish": (
        "begin=trained+penalty=relations-sharp+momentum=0.95",
        "500 updates from trained weights (--from) that make nearly exact heads exact",
    ),
    "polish": (
        "begin=trained+penalty=relations-sampled+steps=1k+momentum=0.95",
        "1000 updates from trained weights (--from) to the same end, cheap with many heads and letters",
    ),
    "settle": (
        "begin=snapped",
        "trained weights (--from): gates and learning rates near their ends are moved there, then the rotations learn to close",
    ),
}

RECIPES = Book(
    base=Change(
        "the paper's protocol: 60,000 updates of 1024 words, lengths 4, 6, 8, 16, 32",
        {"block": 50, "momentum": "cycled"},
    ),
    changes={
        "begin": {"trained": _FINISH, "snapped": _SNAPPED},
        "curriculum": {name: Change(text, training) for name, (text, training) in _STAGES.items()},
        "init": {name: Change(text, model=model) for name, (text, model) in _STARTS.items()},
        "silu": {
            "k": Change("SiLU on the keys", model={"activate": ("k",)}),
            "qv": Change("SiLU on queries and values, not on keys", model={"activate": ("q", "v")}),
            "qkv": Change("SiLU on queries, keys and values", model={"activate": ("q", "k", "v")}),
        },
        "penalty": _penalties(),
    },
    counted={
        "steps": _steps,
        "batch": _batch,
        "heads": _heads,
        "keep": _keep,
        "momentum": _momentum,
        "smoothing": _smoothing,
        "then": _then,
        "lr-muon": _rate("lr_muon", "Muon"),
        "lr-adamw": _rate("lr_adamw", "AdamW"),
    },
    named={
        "fast": ("steps=1k", "the paper's protocol in 1000 updates: S3 in seconds on a GPU"),
        "quick": ("steps=600+batch=64", "600 updates of 64 words: S3 in a few minutes on a CPU"),
        "closed": (
            "penalty=closure+steps=3600+batch=128+keep=3-of-8-at-0.25+momentum=0.95",
            "the closure penalty, the best three of eight seeds: S3 far beyond the training length",
        ),
        "exact": (
            "penalty=closure-strong-late+smoothing=0.1+heads=8x4+steps=2k+batch=64",
            "smoothed labels, then a strong closure penalty, eight small heads: S3 far beyond the training length, no seed dropped",
        ),
        "orthogonal": (
            "init=orthogonal-quarter+curriculum=from-2+heads=48x4+steps=15k+batch=256+momentum=0.95",
            "48 small heads that start near orthogonal transitions: finds S4, and A5 from random keys",
        ),
        "theory": (
            "init=quaternions+curriculum=theory+steps=3k+batch=256",
            "A5 from the paper's construction: two heads of four start as quaternions (app:A5const)",
        ),
        "wide": (
            "init=orthogonal-quarter+curriculum=long-from-2+heads=96x4+steps=18k+batch=256+momentum=0.95+smoothing=0.1+then=polish",
            "96 small heads that start near orthogonal transitions, smoothed labels, then polish: for A5 from random keys",
        ),
        **_FROM_WEIGHTS,
    },
    old={
        "10k": "steps=10k",
        "3k": "steps=3k",
        "small": "steps=5k+batch=256",
        "closure": "penalty=closure-orthogonal+steps=4k+momentum=0.95",
        "closure-alone": "penalty=closure+steps=4k+momentum=0.95",
        "closure-culled": "closed",
        "closure-strong": "penalty=closure-strong+steps=4k+momentum=0.95",
        "closure-late": "penalty=closure-late+momentum=0.95",
        "defect": "penalty=orthogonal+steps=4k+momentum=0.95",
        "silu": "silu=qkv+steps=30k",
        "silu-keys": "silu=k+steps=30k",
        "spread": "init=beta-spread+steps=30k+momentum=0.95",
        "reflections": "init=orthogonal-half+steps=30k+momentum=0.95",
        "quarters": "init=orthogonal-quarter+steps=30k+momentum=0.95",
        "signs": "init=orthogonal-by-input+steps=30k+momentum=0.95",
        "short": "curriculum=from-2+steps=30k+momentum=0.95",
        "many": "heads=48x4+momentum=0.95",
        "generators": "curriculum=generators-first+steps=30k+momentum=0.95",
        "involutions": "curriculum=involutions-first+steps=30k+momentum=0.95",
        "half": "curriculum=subgroup-first+steps=30k+momentum=0.95",
        "homomorphism": "penalty=homomorphism+steps=30k+momentum=0.95",
        "relations": "penalty=relations+momentum=0.95",
        "sharpen": "finish",
        "culled": "keep=3-of-24+steps=30k+batch=256+momentum=0.95",
    },
)

#: recipes and changes that leave the paper's protocol but for the number of updates or words and the momentum: the published
#: scores stand beside them
SHORTER = ("paper", "fast", "quick", "steps", "batch", "momentum")
