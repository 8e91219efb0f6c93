"""``ckda demo``: four range settings of KDA learn the S3 word problem side by side, and only one keeps tracking.

S3 is the shell game with three cups: each input symbol permutes them, and the model says after every move where they are.
Words have at most 32 moves in training and up to 512 in the test.
"""

import argparse
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.command import add_common_arguments, make_folder, pick_device
from ckda.experiments.tracking.figures import ARM_LABELS, cups_strip, extrapolation_figure, mechanism_figure
from ckda.experiments.tracking.inspect import mechanism
from ckda.experiments.tracking.model import build_tracker
from ckda.experiments.tracking.task import WordProblem, correct_products, scaled_accuracy
from ckda.layers import RANGES
from ckda.page import Page, svg_of
from ckda.record import environment, write_json
from ckda.train import Ensemble, Recipe, train

LENGTHS = (8, 16, 32, 64, 128, 256, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    add_common_arguments(parser, "runs/demo")
    parser.add_argument("--steps", type=_positive, default=600, help="updates of each arm (default: %(default)s)")
    parser.add_argument("--batch", type=_positive, default=64, help="words an update (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="ignore the checkpoint of an interrupted run")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def run_command(args: argparse.Namespace) -> int:
    """Train, test, draw; returns the exit status."""
    device, out = pick_device(args.device), make_folder(args.out)
    task = WordProblem.named("S3")
    recipe = Recipe(steps=20 if args.smoke else args.steps, batch=8 if args.smoke else args.batch)
    lengths = LENGTHS[:4] if args.smoke else LENGTHS
    arms = {arm: Ensemble(partial(build_tracker, arm, task), task, recipe, (args.seed,), device) for arm in RANGES}
    began = time.perf_counter()
    title = "One layer each, S3 words of up to 32 moves: where are the three cups?"
    train(arms, partial(_checkpoint, out), fresh=args.fresh, quiet=args.json, look_every=10, title=title)
    trained = time.perf_counter() - began
    result = {
        "what": "ckda demo",
        "group": "S3",
        "seed": args.seed,
        "recipe": asdict(recipe),
        "environment": environment(device),
        "train_seconds": round(trained, 2),
        "arms": {
            arm: {
                "scores": _scores(ensemble, task, lengths),
                "losses": [looked[0] for looked in ensemble.history["loss"]],
                "parameters": sum(p[0].numel() for p in ensemble.parameters.values()),
            }
            for arm, ensemble in arms.items()
        },
        "mechanism": mechanism(_model(arms["ckda"], task), task),
        "strip": _strip(arms, task, first=min(4 * recipe.curriculum[-1], max(lengths)) - 12),
    }
    result["seconds"] = round(time.perf_counter() - began, 2)
    write_json(out / "demo.json", result)
    extrapolation_figure(result).savefig(out / "extrapolation.png", dpi=160)
    page = _page(result).write(out / "report.html")
    for arm in arms:
        _checkpoint(out, arm).unlink(missing_ok=True)
    if args.json:
        print((out / "demo.json").read_text(), end="")
    else:
        _print_table(result, page)
    return 0


# Training ------------------------------------------------------------------------------------------------------------


def _checkpoint(out: Path, arm: str) -> Path:
    return out / f"{arm}.checkpoint.pt"


def _scores(ensemble: Ensemble, task: WordProblem, lengths: tuple[int, ...], size: int = 256) -> dict[str, float]:
    """Scaled accuracy by length, from one pass over `size` words of the longest length."""
    correct = correct_products(ensemble, task, 1, size, max(lengths), ensemble.device)
    return {str(length): score for length, score in scaled_accuracy(correct, lengths, task.order).items()}


# What was learned ----------------------------------------------------------------------------------------------------


def _model(ensemble: Ensemble, task: WordProblem) -> Any:
    return ensemble.replica(0, partial(build_tracker, "ckda", task))


def _strip(arms: dict[str, Ensemble], task: WordProblem, first: int, shown: int = 12) -> dict[str, Any]:
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


# What is shown -------------------------------------------------------------------------------------------------------


def _rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [" ".join(ARM_LABELS[arm][0].split()), *(f"{score:.3f}" for score in result["arms"][arm]["scores"].values())]
        for arm in ARM_LABELS
    ]


def _head(result: dict[str, Any]) -> list[str]:
    return ["ranges", *result["arms"]["ckda"]["scores"]]


def _print_table(result: dict[str, Any], page: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="scaled accuracy by word length (chance is 0; trained up to 32)")
    for i, name in enumerate(_head(result)):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for arm, row in zip(ARM_LABELS, _rows(result), strict=True):
        table.add_row(arm, *row[1:], style="bold" if arm == "ckda" else None)
    console = Console()
    console.print(table)
    console.print(f"{result['seconds']:.0f} s. The pictures: {page}", highlight=False, soft_wrap=True)


def _page(result: dict[str, Any]) -> Page:
    recipe, strip = result["recipe"], result["strip"]
    page = Page(
        "One layer that keeps track",
        "Four one-layer models read shuffles of three cups (the group S3) and say after every shuffle where the cups are. "
        "They differ in two ranges only: whether gates may be negative, and whether the learning rate reaches 2.",
    )
    page.section("How far each keeps tracking")
    page.figure(
        svg_of(extrapolation_figure(result)),
        f"Scaled accuracy over the last quarter of words of each length; 0 is chance. Trained for {recipe['steps']} updates "
        f"on words of at most {recipe['curriculum'][-1]} moves. "
        "An accuracy near 0.2 is what the parity of the shuffle alone gives.",
    )
    page.table(_head(result), _rows(result), strong=list(ARM_LABELS).index("ckda"))
    page.section("The shell game, past the training length")
    page.figure(
        cups_strip(strip),
        f"The last moves of a word of {strip['first'] - 1 + len(strip['moves'])}. Colours are cups, heights are places; "
        "a wrong answer is struck through.",
    )
    page.section("What Complex KDA has learned")
    page.figure(
        svg_of(mechanism_figure(result["mechanism"])),
        "From the left: the learning rate of every head, one dot per input symbol; the gates of the head whose removal costs "
        "most accuracy; its keys in their principal coordinates; the eigenvalues of its transitions. "
        "A learning rate near 2 and gates near -1 and 1 make a transition that rotates: "
        "a pair of eigenvalues on the unit circle, at a third of a turn for the 3-cycles.",
    )
    env = result["environment"]
    page.footer(
        f"ckda {env['versions']['ckda']}, torch {env['versions']['torch']}, {env['device']}, seed {result['seed']}, "
        f"{result['seconds']:.0f} s, commit {(env['commit'] or 'unknown')[:10]}. The numbers are in demo.json beside this page."
    )
    return page
