"""``ckda audio``: one-layer models hear half a bar of a groove and go on alone, and only some keep the beat.

Each run is an arm (:data:`ckda.experiments.audio.model.ARMS`) trained by a recipe (:data:`RECIPES`). A finished run leaves
``NAME.json`` and ``NAME.pt`` under ``--out``/runs; the same command again, or one with more arms, trains only what is
missing and draws everything that is there.
"""

import argparse
import io
import json
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckda.command import add_common_arguments, pick_device
from ckda.experiments.audio.figures import (
    PUBLISHED,
    beyond_figure,
    continuation_figure,
    label,
    markdown,
    plain_part,
    players,
    rows,
)
from ckda.experiments.audio.model import ARMS, Continuer, build, wind
from ckda.experiments.audio.records import collect, write_compact
from ckda.experiments.audio.task import (
    BPM,
    CUE,
    FRAMES,
    LENGTHS,
    RATE,
    Continuation,
    Scores,
    best_of,
    cut,
    evaluate,
    groove,
    load_loop,
    playable,
    wav_bytes,
)
from ckda.page import Page, png_of
from ckda.record import environment, read_json, write_bytes, write_json
from ckda.train import Ensemble, Recipe, train
from ckda.train.loop import finite

#: the arms that the paper compares
COMPARED = tuple(PUBLISHED)


class Variant(NamedTuple):
    """What a recipe changes in the paper's protocol."""

    changes: dict[str, Any] = {}  # noqa: RUF012 - of ckda.train.Recipe; nobody writes to it
    balanced: bool = False  #: every batch holds every phase equally often
    clock: bool = False  #: the model starts as a clock (:func:`ckda.experiments.audio.model.wind`)


#: the penalties come once the loop is learned; the learning rates end near zero
_LATE: dict[str, Any] = {"tail": 0.3, "ramp": (0.4, 0.6)}
RECIPES: dict[str, Variant] = {
    "plain": Variant(),
    "closure": Variant({"penalties": {"closure": 0.1}}),
    "tail": Variant({"tail": 0.3}, balanced=True),
    "closure-tail": Variant(_LATE | {"penalties": {"closure": 0.1}}, balanced=True),
    "turn-tail": Variant(_LATE | {"penalties": {"closure": 0.1, "turn": 0.1}}, balanced=True),
    "turns-tail": Variant(_LATE | {"penalties": {"closure": 0.1, "turns": 0.1}}, balanced=True),
    "turns-tail-strong": Variant(_LATE | {"penalties": {"closure": 1.0, "turns": 1.0}}, balanced=True),
    "clock": Variant(clock=True),
    "clock-turns": Variant(_LATE | {"penalties": {"closure": 1.0, "turns": 1.0}}, balanced=True, clock=True),
}
_LONG = ("windows", "losses", "key")  # what audio.json leaves to runs/NAME.json when runs are collected
_READ_EVERY = 25  # updates between looks at the loss: each look waits for the device


def recipe(
    name: str, steps: int = 2500, batch: int = 64, lengths: tuple[int, ...] = (12, 16, 24, 40, 72, 136)
) -> Recipe:
    """The paper's protocol (app:waveform_continuation_details) with what this recipe changes.

    Example:
        >>> recipe("plain").switches, recipe("plain").length(833), recipe("plain").length(834)
        ((168, 335, 501, 668, 835), 72, 136)
    """
    switches = tuple(math.ceil(0.4 * steps * i / len(lengths)) + 1 for i in range(1, len(lengths)))
    options: dict[str, Any] = {"schedule": "cosine", "lr_muon": 0.02, "lr_adamw": 3e-3}
    return Recipe(steps=steps, batch=batch, curriculum=lengths, switches=switches, **options | RECIPES[name].changes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckda audio``."""
    add_common_arguments(parser, "runs/audio")
    parser.add_argument(
        "--arm", default="ckda", help=f"one, several with commas, or 'all' that the paper has: {', '.join(ARMS)}"
    )
    parser.add_argument(
        "--recipe", default="plain", help=f"one or several with commas: {', '.join(RECIPES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=_positive, default=1, help="how many seeds, from --seed on, trained as one program"
    )
    parser.add_argument("--steps", type=_positive, default=2500, help="updates (default: %(default)s)")
    parser.add_argument("--batch", type=_positive, default=64, help="sequences an update (default: %(default)s)")
    parser.add_argument("--wav", help="your own loop of two bars, a WAV file of any rate, instead of the groove")
    parser.add_argument("--bpm", type=float, default=BPM, help="its tempo (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="train anew, whatever is in --out")
    parser.add_argument(
        "--collect", nargs="+", metavar="FOLDER", help="train nothing: bring the runs of these --out folders together"
    )
    parser.add_argument("--trained-at", metavar="COMMIT", help="with --collect: the commit, where records know none")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _chosen(text: str, known: tuple[str, ...], everything: tuple[str, ...], option: str) -> list[str]:
    names = [name for word in text.split(",") for name in (everything if word == "all" else (word,))]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option} {name}: there is none; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def run_command(args: argparse.Namespace) -> int:
    """Train what is missing, evaluate, draw; returns the exit status."""
    if args.collect:
        return _collect(args)
    device, out = pick_device(args.device), Path(args.out)
    arms = _chosen(args.arm, ARMS, COMPARED, "--arm")
    recipes = _chosen(args.recipe, tuple(RECIPES), tuple(RECIPES), "--recipe")
    if not 20 <= args.bpm <= 400:
        raise SystemExit(f"--bpm {args.bpm:g}: it must lie between 20 and 400")
    try:
        stereo = groove() if args.wav is None else load_loop(args.wav, args.bpm)
    except ValueError as error:
        raise SystemExit(f"--wav: {error}") from error
    frames = cut(stereo)
    lengths = LENGTHS[:4] if args.smoke else LENGTHS
    began = time.perf_counter()
    runs = {}
    for arm in arms:
        for name in recipes:
            settings = recipe(name, 8, FRAMES, (12, 16)) if args.smoke else recipe(name, args.steps, args.batch)
            title = arm if name == "plain" else f"{arm}+{name}"
            task = Continuation(frames, balanced=RECIPES[name].balanced)
            seeds = tuple(range(args.seed, args.seed + args.seeds))
            _check_penalties(arm, name)
            ensemble = Ensemble(partial(_build, arm, RECIPES[name].clock), task, settings, seeds, device)
            runs[title] = _one(title, arm, name, ensemble, task, lengths, args.bpm, out, args.fresh, args.json)
    result = {
        "what": "ckda audio",
        "loop": "groove" if args.wav is None else Path(args.wav).name,
        "bpm": args.bpm,
        "cue": CUE,
        "trained_to": next(iter(runs.values()))["recipe"]["curriculum"][-1],
        "frames": np.round(frames, 5).tolist(),
        "environment": environment(device),
        "runs": runs,
        "seconds": round(time.perf_counter() - began, 2),
    }
    write_json(out / "audio.json", result)
    write_bytes(out / "loop.wav", wav_bytes(stereo, RATE))
    length = lengths[-1] if args.smoke else 264
    write_bytes(out / "target.wav", wav_bytes(playable(np.resize(frames, (length, frames.shape[1])), args.bpm)))
    _draw(result, out)
    page = _page(result).write(out / "report.html")
    if args.json:
        print((out / "audio.json").read_text(), end="")
    else:
        _print_table(result, page)
    return 0


def _draw(result: dict[str, Any], out: Path) -> None:
    """The figures: the paper's two panels, and CKDA's recipes side by side where there are several."""
    continuation_figure(plain_part(result)).savefig(out / "continuation.png", dpi=160)
    if sum(run["arm"] == "ckda" for run in result["runs"].values()) > 1:
        beyond_figure(result).savefig(out / "beyond.png", dpi=160)


def _collect(args: argparse.Namespace) -> int:
    """Bring finished runs together: records, table, figures and the last bars as sound, from their JSON alone."""
    out = Path(args.out)
    try:
        result = collect(args.collect, COMPARED, tuple(RECIPES))
    except ValueError as error:
        raise SystemExit(f"--collect: {error}") from error
    for name, one in result["runs"].items():
        for part in one.get("parts", [one]):
            part["environment"]["commit"] = part["environment"]["commit"] or args.trained_at
        write_compact(out / "runs" / f"{name}.json", one)
    brief = {name: {k: v for k, v in one.items() if k not in _LONG} for name, one in result["runs"].items()}
    write_compact(out / "audio.json", result | {"runs": brief})
    write_bytes(out / "table.md", markdown(result).encode())
    _draw(result, out)
    for name, one in result["runs"].items():
        if one["arm"] == "ckda" and one["windows"]:
            last = list(one["windows"].values())[-1]
            heard, steps = np.array(last["frames"]), np.arange(last["first"], last["first"] + len(last["frames"]))
            write_bytes(
                out / "sound" / f"{name}.{steps[0]}-{steps[-1] + 1}.wav", wav_bytes(playable(heard, result["bpm"]))
            )
            target = np.array(result["frames"])[steps % len(result["frames"])]
            write_bytes(
                out / "sound" / f"target.{steps[0]}-{steps[-1] + 1}.wav", wav_bytes(playable(target, result["bpm"]))
            )
    print(json.dumps(brief) if args.json else markdown(result), end="\n" if args.json else "")
    return 0


def _build(arm: str, clock: bool) -> Continuer:
    return wind(build(arm), FRAMES) if clock else build(arm)


def _check_penalties(arm: str, name: str) -> None:
    if RECIPES[name].clock and arm != "ckda":
        raise SystemExit(f"--recipe {name}: only ckda can start as a clock, not {arm}")
    wanted = set(RECIPES[name].changes.get("penalties", ()))
    if wanted and arm == "transformer":
        raise SystemExit(f"--recipe {name}: the Transformer has no recurrent state to compare")
    if wanted - {"closure"} and arm == "gru":
        raise SystemExit(f"--recipe {name}: the GRU's transition is no matrix; 'closure' and 'tail' fit it")


# One run -------------------------------------------------------------------------------------------------------------


def _one(
    title: str,
    arm: str,
    name: str,
    ensemble: Ensemble,
    task: Continuation,
    lengths: tuple[int, ...],
    bpm: float,
    out: Path,
    fresh: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Train and score one run, or read what it left."""
    folder = out / "runs"
    record, weights, checkpoint = (folder / f"{title}.{end}" for end in ("json", "pt", "checkpoint.pt"))
    start = {"start": "clock"} if RECIPES[name].clock else {}
    key = _listed(ensemble.key() | {"lengths": lengths} | start)
    if not fresh and record.exists() and weights.exists():
        known = read_json(record)
        if known["key"] == key:
            return known
        print(f"{record} is of another run; training {title} anew", file=sys.stderr)
    began = time.perf_counter()
    resumed = ensemble.step
    train({title: ensemble}, lambda _: checkpoint, fresh=fresh, quiet=quiet, look_every=_READ_EVERY)
    seconds = time.perf_counter() - began
    scores = evaluate(ensemble, task, len(ensemble.seeds), max(lengths), ensemble.device)
    paper = max(n for n in lengths if n <= 264)
    ranking = [v if math.isfinite(v) else -math.inf for v in scores.snr(paper)]
    shown = best_of(ranking)
    result = {
        "arm": arm,
        "recipe_name": name,
        "recipe": asdict(ensemble.recipe),
        "key": key,
        "seeds": list(ensemble.seeds),
        "parameters": sum(p[0].numel() for p in ensemble.parameters.values()),
        "train_seconds": round(seconds, 2),
        "updates": ensemble.step - resumed,
        "losses": ensemble.history,
        "mse": {str(n): finite(scores.mse(n)) for n in lengths},
        "snr": {str(n): finite(scores.snr(n)) for n in lengths},
        "missing": "null: the output is not finite",
        "shown": shown,
        "windows": _windows(scores, shown, paper, max(lengths)),
        "environment": environment(ensemble.device),
    }
    write_bytes(folder / f"{title}.wav", wav_bytes(playable(_heard(scores, task, shown)[:paper], bpm)))
    write_bytes(weights, _weights(ensemble, arm))
    write_json(record, result)
    checkpoint.unlink(missing_ok=True)
    return result


def _listed(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    if isinstance(value, dict):
        return {name: _listed(v) for name, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value


def _heard(scores: Scores, task: Continuation, replica: int) -> np.ndarray:
    """[T, D] what one hears from phase 0: the cue as given, then the continuation."""
    frames = scores.heard[replica].numpy().copy()
    frames[: task.cue] = task.frames[: task.cue]
    return frames


def _windows(scores: Scores, replica: int, paper: int, longest: int) -> dict[str, dict[str, Any]]:
    """The continuation from phase 0 where the paper looks, and at the very end."""
    said = scores.heard[replica].nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9)
    places = {
        "near": (0, min(24, paper)),
        "far": (max(0, paper - FRAMES), paper),
        "end": (max(0, longest - FRAMES), longest),
    }
    return {
        name: {"first": first, "frames": [[round(v, 4) for v in frame] for frame in said[first:last].tolist()]}
        for name, (first, last) in places.items()
    }


def _weights(ensemble: Ensemble, arm: str) -> bytes:
    """The trained parameters, [R, ...] each, as torch writes them."""
    buffer = io.BytesIO()
    parameters = {name: p.detach().cpu() for name, p in ensemble.parameters.items()}
    torch.save({"arm": arm, "seeds": list(ensemble.seeds), "parameters": parameters}, buffer)
    return buffer.getvalue()


# What is shown -------------------------------------------------------------------------------------------------------


def _print_table(result: dict[str, Any], page: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    several = any(len(r["seeds"]) > 1 for r in result["runs"].values())
    head, body = rows(result)
    table = Table(title="continuation of the loop" + (", first seed / best seed" if several else ""))
    for i, text in enumerate(head):
        table.add_column(text, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for (name, one), row in zip(result["runs"].items(), body, strict=True):
        table.add_row(name, *row[1:], style="bold" if one["arm"] == "ckda" else None)
    console = Console()
    console.print(table)
    console.print(f"{result['seconds']:.0f} s. Figures and sound: {page}", highlight=False, soft_wrap=True)


def _page(result: dict[str, Any]) -> Page:
    page = Page(
        "Half a bar, and on",
        "One-layer models hear eight sixteenth notes of a two-bar loop, then silence, and go on playing in one forward pass. "
        "To stay in time they must keep its phase in their state.",
    )
    page.section("Near and far")
    some = next(iter(result["runs"].values()))
    page.figure(
        png_of(continuation_figure(result)),
        f"Left: the continuation from phase 0 soon after the cue and far beyond it (best seed); gold the cue, grey the target, "
        f"blue the model. Right: error by length over all {FRAMES} phases, other seeds thin; training saw lengths up to "
        f"{result['trained_to']} (dashed).",
    )
    head, body = rows(result)
    strong = next((i for i, r in enumerate(result["runs"].values()) if r["arm"] == "ckda"), None)
    page.table(head, body, strong=strong)
    page.section("To hear", "Windows of the continuation from phase 0.")
    page.players(*players(result))
    page.section("How it was trained")
    page.table(
        ["run", "parameters", "updates", "seconds", "penalties", "tail"],
        [
            [
                label(r),
                f"{r['parameters']:,}",
                r["recipe"]["steps"],
                r["train_seconds"],
                ", ".join(f"{k} {v:g}" for k, v in r["recipe"]["penalties"].items()),
                r["recipe"]["tail"] or "",
            ]
            for r in result["runs"].values()
        ],
    )
    env = some["environment"]
    page.footer(
        f"ckda {env['versions']['ckda'] or '(source)'}, torch {env['versions']['torch']}, {env['device']}, seeds "
        f"{', '.join(map(str, some['seeds']))}, commit {(env['commit'] or 'unknown')[:10]}. The numbers are in audio.json."
    )
    return page
