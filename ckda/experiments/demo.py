"""``ckda demo``: four range settings of KDA learn the S3 word problem side by side, and only one keeps tracking.

S3 is the shell game with three cups: each input symbol permutes them, and the model says after every move where they are.
Words have at most 32 moves in training and up to 512 in the test.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.command import make_folder, pick_device
from ckda.experiments.common.show import ARMS
from ckda.experiments.common.store import save_weights, stacked_parameters
from ckda.experiments.tracking.figures import cups_strip, extrapolation_figure, mechanism_figure
from ckda.experiments.tracking.inspect import mechanism
from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem, correct_products, scaled_accuracy
from ckda.layers import RANGES
from ckda.page import Page, print_table, source_line, svg_of
from ckda.record import environment, read_json, write_json
from ckda.train import Ensemble, Recipe, train

__all__ = ["DemoArm", "DemoConfig", "DemoResult", "run", "run_command"]

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
#: of the labels, in every arm: a right answer must stay equally sure, which keeps transitions exact beyond the training length
SMOOTHING = 0.1


@dataclass(frozen=True)
class DemoConfig:
    """How much is trained, and where."""

    steps: int = 1000
    batch: int = 64
    seed: int = 0
    smoke: bool = False
    device: str = "auto"
    out: str | Path = "runs/demo"
    fresh: bool = False  #: ignore the checkpoint of an interrupted run, and replace a finished one

    def recipe(self) -> Recipe:
        """The recipe of every arm: few updates of few words, momentum constant at 0.95. Labels are smoothed (:data:`SMOOTHING`)."""
        return Recipe(20, 8) if self.smoke else Recipe(self.steps, self.batch)


@dataclass(frozen=True)
class DemoArm:
    """What one arm has learned."""

    scores: dict[int, float]  #: scaled accuracy by length
    losses: list[float | None]
    parameters: int


@dataclass(frozen=True)
class DemoResult:
    """Four arms, what Complex KDA does inside, and a strip of moves."""

    seed: int
    recipe: dict[str, Any]
    arms: dict[str, DemoArm]
    mechanism: dict[str, Any]  #: of :func:`ckda.experiments.tracking.inspect.mechanism`
    strip: dict[str, Any]  #: of :func:`ckda.experiments.tracking.figures.cups_strip`
    environment: dict[str, Any]
    train_seconds: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As demo.json has it."""
        arms = {
            name: asdict(arm) | {"scores": {str(n): v for n, v in arm.scores.items()}}
            for name, arm in self.arms.items()
        }
        return {"what": "ckda demo", "group": "S3"} | asdict(self) | {"arms": arms}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "DemoResult":
        """From what :meth:`to_json` gave."""
        arms = {
            name: DemoArm({int(n): v for n, v in arm["scores"].items()}, arm["losses"], arm["parameters"])
            for name, arm in found["arms"].items()
        }
        return cls(**{field.name: found[field.name] for field in fields(cls)} | {"arms": arms})

    def scores(self) -> dict[str, dict[int, float]]:
        """By arm and length."""
        return {name: self.arms[name].scores for name in RANGES}


def run(config: DemoConfig, quiet: bool = True) -> DemoResult:
    """Train the four arms side by side and test them.

    Example:
        >>> import tempfile
        >>> result = run(DemoConfig(smoke=True, device="cpu", out=tempfile.mkdtemp()))
        >>> sorted(result.arms), sorted(result.arms["ckda"].scores)
        (['ckda', 'kda', 'kda-beta2', 'kda-signed'], [8, 16, 32, 64])
    """
    device, out, recipe = pick_device(config.device), Path(config.out), config.recipe()
    task = replace(WordProblem.named("S3"), smoothing=SMOOTHING)
    lengths = LENGTHS[:4] if config.smoke else LENGTHS
    arms = {arm: Ensemble(partial(build_tracker, arm, task), task, recipe, (config.seed,), device) for arm in RANGES}
    began = time.perf_counter()
    title = "One layer each, S3 words of up to 32 moves: where are the three cups?"
    train(arms, partial(_checkpoint, out), fresh=config.fresh, quiet=quiet, look_every=10, title=title)
    trained = time.perf_counter() - began
    result = DemoResult(
        seed=config.seed,
        recipe=asdict(recipe) | {"smoothing": SMOOTHING},
        arms={arm: _tested(ensemble, task, lengths) for arm, ensemble in arms.items()},
        mechanism=mechanism(_model(arms["ckda"], task), task),
        strip=_strip(arms, task, first=min(4 * recipe.curriculum[-1], max(lengths)) - 12),
        environment=environment(device),
        train_seconds=round(trained, 2),
        seconds=round(time.perf_counter() - began, 2),
    )
    for arm, ensemble in arms.items():
        about = {"group": "S3", "mixer": arm, "recipe": "demo", "seeds": [config.seed], "best": 0, "model": {}}
        save_weights(out / f"{arm}.pt", about | {"parameters": stacked_parameters(ensemble)})
        _checkpoint(out, arm).unlink(missing_ok=True)
    return result


def _checkpoint(out: Path, arm: str) -> Path:
    return out / f"{arm}.checkpoint.pt"


def _tested(ensemble: Ensemble, task: WordProblem, lengths: tuple[int, ...], size: int = 256) -> DemoArm:
    """Scaled accuracy by length, from one pass over `size` words of the longest length."""
    correct = correct_products(ensemble, task, 1, size, max(lengths), ensemble.device)
    losses = [looked[0] for looked in ensemble.history["loss"]]
    parameters = sum(p[0].numel() for p in ensemble.parameters.values())
    return DemoArm(scaled_accuracy(correct, lengths, task.order), losses, parameters)


def _model(ensemble: Ensemble, task: WordProblem) -> Any:
    return ensemble.replica(0, partial(build_tracker, "ckda", task))


def _strip(arms: Mapping[str, Ensemble], task: WordProblem, first: int, shown: int = 12) -> dict[str, Any]:
    """The last moves of one long word: true cups, and where CKDA and KDA say they are."""
    generator = torch.Generator(arms["ckda"].device).manual_seed(3)
    x, y = task.batch(1, first + shown, generator)

    def states(elements: Tensor) -> list[list[int]]:
        return [list(task.group.labels[int(e)]) for e in elements[0, first:]]

    rows = [{"label": "true cups", "states": states(y), "right": [True] * shown}]
    for arm, label in (("ckda", "Complex KDA says"), ("kda", "KDA says")):
        with torch.no_grad():
            said = arms[arm](x[None])[0, :, 1:].argmax(-1)
        right = (said == y)[0, first:].tolist()
        rows.append({"label": label, "states": states(said), "right": right})
    names = task.names()
    return {"first": first + 1, "moves": [names[int(e)] for e in x[0, 1 + first :]], "rows": rows}


# The command ---------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Train, test, draw; returns the exit status."""
    out = make_folder(args.out)
    config = DemoConfig(args.steps, args.batch, args.seed, args.smoke, args.device, out, args.fresh)
    known = None if config.fresh else _known(config)
    result = known or run(config, quiet=args.json)
    write_json(out / "demo.json", result.to_json())
    figure = extrapolation_figure(result.scores(), config.recipe().curriculum[-1])
    figure.savefig(out / "extrapolation.png", dpi=160)
    page = _page(result).write(out / "report.html")
    if args.json:
        print((out / "demo.json").read_text(), end="")
    else:
        print_table("scaled accuracy by word length (chance is 0; trained up to 32)", _head(result), _rows(result), [3])
        print(f"{result.seconds:.0f} s{' when it was trained' if known else ''}. The pictures: {page}")
    return 0


def _known(config: DemoConfig) -> DemoResult | None:
    """A finished demo of these settings; one of other settings is not replaced unasked."""
    path = Path(config.out) / "demo.json"
    if not path.exists():
        return None
    try:
        known = DemoResult.from_json(read_json(path))
        there = known.recipe["steps"], known.recipe["batch"], known.seed
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); it stays as it is. --fresh makes it anew") from error
    here = config.recipe().steps, config.recipe().batch, config.seed
    if there != here:
        raise ValueError(
            f"{path} is a finished demo of {there[0]} updates of {there[1]} words, seed {there[2]}; asked for are {here[0]} of "
            f"{here[1]}, seed {here[2]}. It stays as it is: give another --out, or --fresh to train anew in its place"
        )
    return known


def _rows(result: DemoResult) -> list[list[str]]:
    return [[ARMS[arm].words, *(f"{v:.3f}" for v in scores.values())] for arm, scores in result.scores().items()]


def _head(result: DemoResult) -> list[str]:
    return ["ranges", *map(str, result.arms["ckda"].scores)]


def _page(result: DemoResult) -> Page:
    strip, trained_to = result.strip, result.recipe["curriculum"][-1]
    page = Page(
        "One layer that keeps track",
        "Four one-layer models read shuffles of three cups (the group S3) and say after every shuffle where the cups are. "
        "They differ in two ranges only: whether gates may be negative, and whether the learning rate reaches 2.",
    )
    page.section("How far each keeps tracking")
    page.figure(
        svg_of(extrapolation_figure(result.scores(), trained_to)),
        f"Scaled accuracy over the last quarter of words of each length; 0 is chance. Trained for {result.recipe['steps']} "
        f"updates on words of at most {trained_to} moves. An accuracy near 0.2 is what the parity of the shuffle alone gives.",
    )
    page.table(_head(result), _rows(result), strong=list(RANGES).index("ckda"))
    page.section("The shell game, past the training length")
    page.figure(
        cups_strip(strip),
        f"The last moves of a word of {strip['first'] - 1 + len(strip['moves'])}. Colours are cups, heights are places; "
        "a wrong answer is struck through.",
    )
    page.section("What Complex KDA has learned")
    page.figure(
        svg_of(mechanism_figure(result.mechanism)),
        "From the left: the learning rate of every head, one dot per input symbol; the gates of the head whose removal costs "
        "most accuracy; its keys in their principal coordinates; the eigenvalues of its transitions. "
        "A learning rate near 2 and gates near -1 and 1 make a transition that rotates: "
        "a pair of eigenvalues on the unit circle, at a third of a turn for the 3-cycles.",
    )
    more = f"seed {result.seed}", f"{result.seconds:.0f} s"
    page.footer(source_line(result.environment, *more) + " The numbers are in demo.json beside this page.")
    return page
