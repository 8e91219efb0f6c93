"""``ckda audio``: one-layer models hear half a bar of a groove and go on alone, and only some keep the beat."""

import argparse
from pathlib import Path

import numpy as np

from ckda.command import entries, make_folder, pick_names
from ckda.experiments.audio.model import ARMS
from ckda.experiments.audio.recipes import RECIPES
from ckda.experiments.audio.records import collect, write_compact, write_summary
from ckda.experiments.audio.report import draw, markdown, page_of, print_result
from ckda.experiments.audio.run import COMPARED, PAPER_LENGTH, AudioConfig, AudioResult, run, stereo_loop
from ckda.experiments.audio.task import LENGTHS, RATE, playable, wav_bytes
from ckda.experiments.common.store import keep_report
from ckda.record import write_bytes, write_json, write_text
from ckda.train.recipe import steps_word

__all__ = ["run_command"]


def run_command(args: argparse.Namespace) -> int:
    """Train what is missing, evaluate, draw; returns the exit status."""
    if args.recipes:
        print(entries(RECIPES.listing()))
        return 0
    return _collect(args) if args.collect else _train(args)


def _config(args: argparse.Namespace) -> AudioConfig:
    more = [f"{key}={steps_word(value)}" for key in ("steps", "batch") if (value := getattr(args, key)) is not None]
    try:
        recipes = [RECIPES.name("+".join([text, *more])) for text in args.recipe.split(",")]
    except ValueError as error:
        raise ValueError(f"--recipe {error}") from error
    return AudioConfig(
        arms=tuple(pick_names(args.mixer, ARMS, {"all": COMPARED}, "--mixer")),
        recipes=tuple(dict.fromkeys(recipes)),
        first_seed=args.seed,
        num_seeds=args.seeds,
        wav=args.wav,
        bpm=args.bpm,
        smoke=args.smoke,
        device=args.device,
        out=Path(args.out),
        fresh=args.fresh,
    )


def _train(args: argparse.Namespace) -> int:
    config = _config(args)
    stereo = stereo_loop(config)
    out = make_folder(args.out)
    result = run(config, quiet=args.json)
    keep_report(out, "audio.json", set(result.runs), ("table.md", "report.html"))
    write_json(out / "audio.json", result.to_json())
    write_bytes(out / "loop.wav", wav_bytes(stereo, RATE))
    length = LENGTHS[3] if args.smoke else PAPER_LENGTH
    write_bytes(out / "target.wav", wav_bytes(playable(result.target(0, length), args.bpm)))
    draw(result, out)
    page = page_of(result).write(out / "report.html")
    if args.json:
        print((out / "audio.json").read_text(), end="")
    else:
        print_result(result, page)
    return 0


def _collect(args: argparse.Namespace) -> int:
    """Bring finished runs together: records, table, figures and the last bars as sound, from their JSON alone."""
    try:
        result = collect(args.collect, args.trained_at)
    except ValueError as error:
        raise ValueError(f"--collect: {error}") from error
    out = make_folder(args.out)
    for name, one in result.runs.items():
        write_compact(out / "runs" / f"{name}.json", one.to_json())
    write_summary(result, out)
    write_text(out / "table.md", markdown(result))
    draw(result, out)
    _write_sound(result, out)
    print((out / "audio.json").read_text() if args.json else markdown(result), end="")
    return 0


def _write_sound(result: AudioResult, out: Path) -> None:
    """The last window of every run that has one, and the loop itself at those steps."""
    for name, one in result.runs.items():
        if one.windows:
            last = list(one.windows.values())[-1]
            steps = f"{last.first}-{last.first + len(last.frames)}"
            pairs = {name: np.array(last.frames), "target": result.target(last.first, len(last.frames))}
            for title, frames in pairs.items():
                write_bytes(out / "sound" / f"{title}.{steps}.wav", wav_bytes(playable(frames, result.bpm)))
