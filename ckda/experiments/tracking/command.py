"""``ckda track``: one-layer models read words of group elements and say the product after every letter.

A run is a group, a mixer (:data:`ckda.layers.MIXERS`) and a recipe (:data:`.recipes.RECIPES`), with some seeds that
train as one program; several runs train side by side. A finished run leaves ``NAME.json`` and ``NAME.pt`` under
``--out``/runs; the same command again, or one with more runs, trains only what is missing and draws all it was asked for.
"""

import argparse
import hashlib
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckda.command import add_common_arguments, make_folder, pick_device
from ckda.experiments.tracking import shuffled_objects
from ckda.experiments.tracking.figures import best_seed, groups_figure, markdown, table
from ckda.experiments.tracking.model import Tracker, build_tracker
from ckda.experiments.tracking.recipes import RECIPES, protocol
from ckda.experiments.tracking.task import WordProblem, correct_in_passing, read_table, scaled_accuracy, shell_game
from ckda.layers.complex_kda import RANGES
from ckda.layers.mixers import MIXERS
from ckda.page import Page, svg_of
from ckda.record import environment, read_json, write_bytes, write_json
from ckda.train import Ensemble, Recipe, TimeUp, train
from ckda.train.loop import loss_words
from ckda.train.weights import places_of, read_weights

__all__ = ["add_arguments", "run_command", "task_named"]

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
#: what a GPU is asked besides; far words are fewer (:data:`_FAR_WORDS`)
FAR_LENGTHS = (1024, 4096, 16_384, 65_536)
_NEAR, _FAR_WORDS = 512, 32
_SEGMENT = 96  # steps of a near test that are run at once: what training has compiled serves them
_WATCHES = 25  # times that the accuracy at the training length is measured during a training
_SEEDS = 3  # where --seeds does not say
_STOPPED = 3  # exit status at the time limit


class Run(NamedTuple):
    """One ensemble to train and score."""

    group: str
    mixer: str
    recipe_name: str
    ensemble: Ensemble
    task: WordProblem

    @property
    def title(self) -> str:
        """Its file name."""
        return title(self.group, self.mixer, self.recipe_name)


def title(group: str, mixer: str, recipe: str) -> str:
    """The file name of a run.

    Example:
        >>> title("S3", "ckda", "paper"), title("S4:generators", "kda", "closure")
        ('S3-ckda', 'S4.generators-kda+closure')
    """
    name = f"{Path(group).stem if group.endswith('.json') else group.replace(':', '.')}-{mixer}"
    return name if recipe == "paper" else f"{name}+{recipe}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckda track``."""
    add_common_arguments(parser, "runs/track")
    parser.add_argument(
        "group",
        nargs="*",
        help="Z5, D4, S3, A5, Q8, S3xZ2, parity, shell3 (cups), a JSON file with a table; S4:generators for words over few "
        "letters (default: S3)",
    )
    parser.add_argument(
        "--mixer", default="ckda", help=f"one, several with commas, 'ranges' or 'all': {', '.join(MIXERS)}"
    )
    parser.add_argument(
        "--recipe", default="paper", help=f"one or several with commas; a+b takes both together: {', '.join(RECIPES)}"
    )
    parser.add_argument(
        "--seeds", type=_positive, help="how many seeds, from --seed on (default: 3; with --from those of the file)"
    )
    parser.add_argument("--steps", type=_positive, help="updates, instead of the recipe's")
    parser.add_argument("--batch", type=_positive, help="words an update, instead of the recipe's")
    parser.add_argument("--from", dest="begin", metavar="RUN", help="begin from the weights in a file runs/NAME.pt")
    parser.add_argument("--restarts", type=_positive, help="seeds to begin with, of which --keep go on after --cull-at")
    parser.add_argument("--keep", type=_positive, help="seeds that go on after --cull-at updates")
    parser.add_argument(
        "--cull-at", type=_positive, metavar="STEP", help="when all but the best --keep seeds are dropped"
    )
    parser.add_argument("--lengths", help="what is tested, with commas (default: 8 ... 512, on a GPU to 65536)")
    parser.add_argument(
        "--words", type=_positive, default=256, help="words a test (default: %(default)s; 32 beyond 512)"
    )
    parser.add_argument("--together", type=_positive, help="runs trained side by side (default: 1, on a GPU 8)")
    parser.add_argument(
        "--by-token",
        action="store_true",
        help="on a GPU: project every token by itself, not each symbol once (two to three times slower)",
    )
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="then stop with a checkpoint, status 3")
    parser.add_argument("--fresh", action="store_true", help="train anew, whatever is in --out")
    parser.add_argument(
        "--collect", nargs="+", metavar="FOLDER", help="train nothing: bring the runs of these --out folders together"
    )
    parser.add_argument(
        "--trained-at", metavar="COMMIT", help="with --collect: the commit, where records know none or a copy's"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def task_named(text: str) -> WordProblem:
    """The task of that name; ValueError with what there is otherwise.

    Example:
        >>> [task_named(name).order for name in ("parity", "shell3", "S4", "S4:generators", "Q8", "Z2xZ3")]
        [2, 6, 24, 24, 8, 6]
    """
    name, _, letters = text.partition(":")
    if name == "parity":
        task = WordProblem.named("Z2")
    elif name.startswith("shell") and name[5:].isdigit() and 2 <= int(name[5:]) <= 5:
        task = shell_game(int(name[5:]))
    elif name.endswith(".json"):
        try:
            G = read_table(name)
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from error
        task = WordProblem(G, tuple(range(G.order)))
    else:
        task = WordProblem.named(name)
    return task.over(letters) if letters else task


# The command ---------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Train what is missing, evaluate, draw; returns the exit status."""
    if args.collect:
        return _collect(args)
    began = time.perf_counter()
    device, out = pick_device(args.device), make_folder(args.out)
    lengths = _lengths(args, device)
    runs = _runs(args, device)
    together = args.together or (8 if device == "cuda" else 1)
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for one in runs:
        known = None if args.fresh else _known(one, out, lengths, args.words)
        if known is None:
            missing.append(one)
        else:
            found[one.title] = known
    stopped = False
    for first in range(0, len(missing), together):
        part = missing[first : first + together]
        left = None if args.time_limit is None else args.time_limit - (time.perf_counter() - began)
        try:
            seconds = _train(part, out, args.fresh, args.json, left)
        except TimeUp:
            stopped = True
            break
        for one in part:
            found[one.title] = _finish(one, out, lengths, args.words, seconds, len(part))
    result = {
        "what": "ckda track",
        "environment": environment(device),
        "seconds": round(time.perf_counter() - began, 2),
        "runs": {one.title: found[one.title] for one in runs if one.title in found},
        "absent": {one.title: _unfinished(one) for one in runs if one.title not in found},
    }
    _show(result, out, args.json)
    return _STOPPED if stopped else 0


def _unfinished(one: Run) -> str:
    """How far a run came that the time limit stopped."""
    recipe, seen = one.ensemble.recipe, one.ensemble.history.get("accuracy")
    words = f"stopped at the time limit, at update {one.ensemble.step} of {recipe.steps}"
    if seen:
        words += f"; then right at length {recipe.curriculum[-1]}: {' '.join(f'{v:.3f}' for v in seen[-1])}"
    return words


def _collect(args: argparse.Namespace) -> int:
    """Bring finished runs together: records, table and figures from their JSON alone."""
    out = make_folder(args.out)
    try:
        runs = collected(args.collect, args.group)
    except ValueError as error:
        raise SystemExit(f"--collect: {error}") from error
    for name, one in runs.items():
        known = one["environment"]["commit"]
        if args.trained_at and (known is None or known.endswith("+")):
            one["environment"]["commit"] = args.trained_at
        write_json(out / "runs" / f"{name}.json", one)
    some = next(iter(runs.values()))
    _show(
        {"what": "ckda track", "environment": some["environment"], "seconds": 0.0, "runs": runs, "absent": {}},
        out,
        args.json,
    )
    return 0


def collected(folders: Sequence[str], groups: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The records runs/NAME.json of these folders, of these groups (none: all), by group, recipe and mixer as listed here."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted((Path(folder) / "runs").glob("*.json")):
            one = read_json(path)
            if isinstance(one, dict) and "scores" in one and "mixer" in one and (not groups or one["group"] in groups):
                found[path.stem] = one
    if not found:
        raise ValueError(f"no runs/NAME.json in {', '.join(folders)}; `ckda track` leaves them in its --out")

    def place(item: tuple[str, dict[str, Any]]) -> tuple:
        one = item[1]
        recipes, mixers = list(RECIPES), list(MIXERS)
        recipe = recipes.index(one["recipe_name"]) if one["recipe_name"] in recipes else len(recipes)
        return one["group"], recipe, mixers.index(one["mixer"]) if one["mixer"] in mixers else len(mixers)

    return dict(sorted(found.items(), key=place))


def _lengths(args: argparse.Namespace, device: str) -> tuple[int, ...]:
    if args.lengths is None:
        return LENGTHS[:3] if args.smoke else LENGTHS + (FAR_LENGTHS if device == "cuda" else ())
    try:
        lengths = tuple(sorted({int(text) for text in args.lengths.split(",")}))
    except ValueError as error:
        raise SystemExit(f"--lengths {args.lengths}: it must be whole numbers with commas") from error
    if lengths[0] < 1:
        raise SystemExit(f"--lengths {args.lengths}: a length is at least 1")
    return lengths


def _chosen(text: str, known: tuple[str, ...], sets: dict[str, tuple[str, ...]], option: str) -> list[str]:
    names = [name for word in text.split(",") for name in sets.get(word, (word,))]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option} {name}: there is none; there are {', '.join((*known, *sets))}")
    return list(dict.fromkeys(names))


def _runs(args: argparse.Namespace, device: str) -> list[Run]:
    mixers = _chosen(args.mixer, tuple(MIXERS), {"all": tuple(MIXERS), "ranges": tuple(RANGES)}, "--mixer")
    for word in args.recipe.split(","):
        _chosen(word.replace("+", ","), tuple(RECIPES), {}, "--recipe")
    recipes = list(dict.fromkeys(args.recipe.split(",")))
    runs = []
    for group, mixer, recipe in product(args.group or ["S3"], mixers, recipes):
        try:
            task = task_named(group)
            runs.append(Run(group, mixer, recipe, _ensemble(args, task, mixer, recipe, device), task))
        except ValueError as error:
            raise SystemExit(f"ckda track {group} --mixer {mixer} --recipe {recipe}: {error}") from error
    return runs


def _ensemble(args: argparse.Namespace, task: WordProblem, mixer: str, name: str, device: str) -> Ensemble:
    recipe, num_seeds = _recipe(args, name)
    model: dict[str, Any] = dict(protocol(name).model)
    build = partial(build_tracker, mixer, task, by_symbol=not args.by_token, **model)
    _check_penalties(build(), recipe, task)
    seeds = tuple(range(args.seed, args.seed + num_seeds))
    if not args.begin:
        if protocol(name).afterwards:
            raise ValueError("this recipe begins from trained weights; --from names them, a file runs/NAME.pt")
        return Ensemble(build, task, recipe, seeds, device)
    if args.restarts or protocol(name).restarts:
        raise ValueError("--from begins with trained seeds; there is nothing to restart")
    saved = read_weights(args.begin, "ckda track", (), device)
    if args.seeds is None:
        seeds = tuple(seed for seed in saved["seeds"] if seed >= args.seed) or seeds
    places = places_of(seeds, saved, args.begin)
    ensemble = Ensemble(build, task, recipe, seeds, device)
    try:
        parameters = {name: p[places] for name, p in saved["parameters"].items()}
        ensemble.begin_from(parameters, hashlib.sha256(Path(args.begin).read_bytes()).hexdigest()[:16])
    except (RuntimeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{args.begin} holds no weights of this group and mixer") from error
    return ensemble


def _recipe(args: argparse.Namespace, name: str) -> tuple[Recipe, int]:
    """The recipe with what the command line changes, and the number of seeds to begin with."""
    named = protocol(name)
    more: dict[str, Any] = {
        key: value for key in ("steps", "batch", "keep", "cull_at") if (value := getattr(args, key)) is not None
    }
    restarts = args.restarts or named.restarts
    if args.restarts and not more.get("keep", named.changes.get("keep")):
        raise ValueError("--restarts is given without --keep and --cull-at: how many seeds go on, and from when")
    if args.smoke:
        more |= {"steps": 10, "batch": 8, "curriculum": (4, 6), "letters": (), "block": 3}
        if restarts:
            more |= {"cull_at": 4, "keep": 1}
            restarts = 3
    elif restarts and "steps" in more and "cull_at" not in more:
        more["cull_at"] = max(1, named.changes.get("cull_at", 1) * more["steps"] // named.recipe().steps)
    recipe = named.recipe(**more)
    if restarts and restarts < recipe.keep:
        raise ValueError(f"--restarts is {restarts}; it must be at least --keep, {recipe.keep}")
    return recipe, restarts or args.seeds or _SEEDS


_MAPS = ("A", "b", "start")


def _check_penalties(model: Tracker, recipe: Recipe, task: WordProblem) -> None:
    """Whether the mixer has what the recipe's penalties look at."""
    if not recipe.penalties:
        return
    if not hasattr(model.mixer, "read"):
        raise ValueError("the recipe has penalties, but this mixer has no recurrent state to look at")
    seen = model.symbols()
    needs = {"closure": (), "defect": ("alpha", "beta"), "homomorphism": ("A",), "relations": _MAPS, "sharp": _MAPS}
    for name in recipe.penalties:
        missing = [part for part in needs[name] if part not in seen]
        if missing:
            raise ValueError(
                f"the recipe's penalty {name!r} needs {', '.join(missing)} of the transition; this mixer has none"
            )
        if name == "homomorphism" and task.meaning:
            raise ValueError("the recipe's penalty 'homomorphism' needs one token for each element")


# One run -------------------------------------------------------------------------------------------------------------


def _files(out: Path, name: str) -> tuple[Path, Path, Path]:
    record, weights, checkpoint = (out / "runs" / f"{name}.{end}" for end in ("json", "pt", "checkpoint.pt"))
    return record, weights, checkpoint


def _key(one: Run, lengths: tuple[int, ...], words: int) -> dict[str, Any]:
    return _listed(one.ensemble.key() | {"lengths": lengths, "words": words})


def _listed(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    if isinstance(value, dict):
        return {name: _listed(v) for name, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value


def _known(one: Run, out: Path, lengths: tuple[int, ...], words: int) -> dict[str, Any] | None:
    """What this very run left, if it did."""
    record, weights, _ = _files(out, one.title)
    if not (record.exists() and weights.exists()):
        return None
    try:
        known = read_json(record)
        if known["key"] == _key(one, lengths, words):
            return known
        print(f"{record} is of another run; training {one.title} anew", file=sys.stderr)
    except (ValueError, KeyError, TypeError) as error:
        print(f"{record} cannot be read ({error}); training {one.title} anew", file=sys.stderr)
    return None


def _train(part: list[Run], out: Path, fresh: bool, quiet: bool, left: float | None) -> float:
    """Train these side by side; the seconds that took."""
    ensembles = {one.title: one.ensemble for one in part}
    began = time.perf_counter()

    def words(name: str) -> str:
        ensemble = ensembles[name]
        _watch(ensemble)
        seen = ensemble.history.get("accuracy", [])
        return loss_words(ensemble) + (f"  right {max(seen[-1]):.3f}" if seen else "")

    train(
        ensembles,
        lambda name: _files(out, name)[2],
        fresh=fresh,
        quiet=quiet,
        look_every=max(1, part[0].ensemble.recipe.steps // 200),
        time_limit=left,
        words=words,
    )
    return time.perf_counter() - began


def _watch(ensemble: Ensemble) -> None:
    """Now and then: the accuracy of every seed at the last training length, into the history."""
    recipe, history = ensemble.recipe, ensemble.history
    mark = max(1, recipe.steps // _WATCHES)
    watched = history.setdefault("watched", [])
    if ensemble.step // mark > (watched[-1] // mark if watched else 0) or ensemble.step == recipe.steps:
        length = recipe.curriculum[-1]
        correct = _shares(ensemble, ensemble.task, 64, length)  # type: ignore[arg-type]
        watched.append(ensemble.step)
        values = [scaled_accuracy(row, (length,), ensemble.task.order)[length] for row in correct]  # type: ignore[attr-defined]
        history.setdefault("accuracy", []).append([round(v, 4) for v in values])


def _shares(ensemble: Ensemble, task: WordProblem, size: int, length: int) -> Tensor:
    """[R, length] on the CPU: the share of `size` words that each replica has right at each step."""
    segment = _SEGMENT if length <= _NEAR else 4 * _NEAR

    def prefill(tokens: Tensor, cache: Any) -> Any:
        return ensemble.call("prefill", tokens) if cache is None else ensemble.call("prefill", tokens, cache)

    return correct_in_passing(prefill, task, len(ensemble.seeds), size, length, ensemble.device, segment).cpu()


def _scores(one: Run, lengths: tuple[int, ...], words: int) -> dict[str, list[float]]:
    """Scaled accuracy of every seed by length: one pass to 512 (or less), one over fewer words to the longest."""
    scores: dict[str, list[float]] = {}
    for chosen, size in (
        ([n for n in lengths if n <= _NEAR], words),
        ([n for n in lengths if n > _NEAR], min(words, _FAR_WORDS)),
    ):
        if chosen and not (one.mixer == "attention" and chosen[-1] > 4 * _NEAR):
            correct = _shares(one.ensemble, one.task, size, chosen[-1])
            rows = [scaled_accuracy(row, tuple(chosen), one.task.order) for row in correct]
            scores |= {str(n): [row[n] for row in rows] for n in chosen}
    return scores


def _finish(one: Run, out: Path, lengths: tuple[int, ...], words: int, seconds: float, together: int) -> dict[str, Any]:
    """Score a trained run and leave its record and weights."""
    record, weights, checkpoint = _files(out, one.title)
    ensemble = one.ensemble
    scores = _scores(one, lengths, words)
    result = {
        "group": one.group,
        "order": one.task.order,
        "mixer": one.mixer,
        "label": MIXERS[one.mixer].label,
        "recipe_name": one.recipe_name,
        "about": protocol(one.recipe_name).about,
        "recipe": asdict(ensemble.recipe),
        "key": _key(one, lengths, words),
        "seeds": list(ensemble.seeds),
        "begun_seeds": list(ensemble.all_seeds),
        "parameters": sum(p[0].numel() for p in ensemble.parameters.values()),
        "train_seconds": round(seconds, 2),
        "trained_together": together,
        "history": ensemble.history,
        "scores": scores,
        "missing": {str(n): "attention keeps every token; not tested so far" for n in lengths if str(n) not in scores},
        "best": best_seed(scores),
        "shuffled_objects": _questions(one),
        "environment": environment(ensemble.device),
    }
    write_bytes(weights, _weights(one, result["best"]))
    write_json(record, result)
    checkpoint.unlink(missing_ok=True)
    return result


@torch.no_grad()
def _questions(one: Run) -> dict[str, Any] | None:
    """For a shell game: the share of BIG-bench's questions that each seed answers; None where there are none."""
    if not one.group.startswith("shell"):
        return None
    questions = shuffled_objects.read_questions(len(one.task.group.labels[0]))
    if not questions:
        return {"right": None, "reason": "the package bigbench is not installed, or has no questions of this size"}
    x = shuffled_objects.words(one.task, questions).to(one.ensemble.device)
    said = one.ensemble(x.expand(len(one.ensemble.seeds), *x.shape))[:, :, -1].argmax(-1).cpu()
    right = [float(shuffled_objects.answers(one.task, questions, row).double().mean()) for row in said]
    return {"right": right, "questions": len(questions)}


def _weights(one: Run, best: int) -> bytes:
    """The trained parameters, [R, ...] each, and what a model is built from again."""
    parameters = {name: p.detach().cpu() for name, p in one.ensemble.parameters.items()}
    about: dict[str, Any] = {
        "group": one.group,
        "mixer": one.mixer,
        "recipe": one.recipe_name,
        "seeds": list(one.ensemble.seeds),
    }
    about["best"] = best
    buffer = io.BytesIO()
    torch.save(about | {"model": _model_options(one), "parameters": parameters}, buffer)
    return buffer.getvalue()


def _model_options(one: Run) -> dict[str, Any]:
    """Options of :func:`build_tracker` with which these weights can be read again."""
    skeleton: Any = one.ensemble.skeleton
    options = {name: value for name, value in protocol(one.recipe_name).model.items() if name != "start"}
    if hasattr(skeleton.mixer, "activate"):
        options["activate"] = tuple(sorted(skeleton.mixer.activate))
    return options


# What is shown -------------------------------------------------------------------------------------------------------


def _show(result: dict[str, Any], out: Path, quiet: bool) -> None:
    brief = {
        name: {k: v for k, v in one.items() if k not in ("key", "history")} for name, one in result["runs"].items()
    }
    write_json(out / "track.json", result | {"runs": brief})
    if result["runs"]:
        groups_figure(result).savefig(out / "track.png", dpi=160)
        write_bytes(out / "table.md", markdown(result).encode())
        _page(result).write(out / "report.html")
    if quiet:
        print((out / "track.json").read_text(), end="")
        return
    _print_table(result, out)


def _print_table(result: dict[str, Any], out: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if result["runs"]:
        head, rows = table(result)
        title = "scaled accuracy by word length, best seed (chance is 0)"
        shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for i, name in enumerate(head):  # where the terminal is narrow words wrap and numbers stay whole
            whole = name.isdigit()
            options: dict[str, Any] = {"justify": "left" if i == 0 else "right", "no_wrap": whole, "overflow": "fold"}
            shown.add_column(name, min_width=6 if whole else 9, **options)
        for row in rows:
            shown.add_row(*row, style="bold" if row[0].split()[1:2] == ["ckda"] else None)
        console.print(shown)
    for name, why in result["absent"].items():
        console.print(f"{name}: {why}", highlight=False)
    console.print(f"{result['seconds']:.0f} s. Figure, table and numbers: {out}", highlight=False, soft_wrap=True)


def _page(result: dict[str, Any]) -> Page:
    page = Page(
        "Words of groups",
        "One-layer models read group elements one by one and say the product of all so far. Training saw words up to the "
        "dashed line; beyond it only a state that moves like the group itself stays right.",
    )
    page.section("How far each keeps tracking")
    page.figure(
        svg_of(groups_figure(result)),
        "Scaled accuracy over the last quarter of words of each length; 0 is chance. Thick: the best seed, thin: the others; "
        "diamonds: the paper's numbers, best of three seeds.",
    )
    page.table(*table(result))
    page.section("How they were trained")
    page.table(
        ["run", "what", "parameters", "updates", "seeds", "seconds", "side by side"],
        [
            [
                name,
                one["about"],
                f"{one['parameters']:,}",
                one["recipe"]["steps"],
                len(one["seeds"]),
                one["train_seconds"],
                one["trained_together"],
            ]
            for name, one in result["runs"].items()
        ],
    )
    env = result["environment"]
    page.footer(
        f"ckda {env['versions']['ckda'] or '(source)'}, torch {env['versions']['torch']}, {env['device']}, "
        f"commit {(env['commit'] or 'unknown')[:10]}. The numbers are in track.json."
    )
    return page
