"""Signs for a trained model: KDA with beta to 2, which cannot track S3, is trained, converted and fine-tuned, and tracks it.

python recipes/signs.py [--updates 300] [--more 1000] [--seeds 8] [--out results/compat]

Three arms from the same trained weights: as they are; after more updates without signs; after as many with the sign factor of
ckda.convert. All arms have labels smoothed by 0.1, and further training begins with words of two letters again, so that a gate
that crosses zero helps at once. Scores are scaled accuracies (0 is chance) at the end of words of each length; a seed tracks
when it has 0.95 at 32 letters. The record is signs.json.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckda import ComplexKDA, convert
from ckda.experiments.tracking.model import Tracker, build_tracker
from ckda.experiments.tracking.task import WordProblem, correct_in_passing, scaled_accuracy
from ckda.layers.sign_factor import START, SignFactor
from ckda.record import environment, write_json
from ckda.train import Ensemble, Recipe

LENGTHS = (16, 32, 64, 128)
BASE, FACTOR = "kda-beta2", "kda-beta2-factor"
HEADS, HEAD_DIM, BATCH, SMOOTHING = 12, 8, 64, 0.1
FIRST, AGAIN = (4, 6, 8, 16), (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  #: the lengths of words, first and in further training
TRACKS = 0.95  #: what a seed must reach


def build(mixer: str, task: WordProblem) -> Tracker:
    return build_tracker(mixer, task, heads=HEADS, head_dim=HEAD_DIM)


def trained(mixer: str, task: WordProblem, recipe: Recipe, seeds: tuple[int, ...], start: Any = None) -> Ensemble:
    """All seeds trained as one program, from the parameters of another ensemble where given; new parameters keep their start."""
    ensemble = Ensemble(partial(build, mixer, task), task, recipe, seeds)
    if start is not None:
        new = {name: p.detach().clone() for name, p in ensemble.parameters.items()}
        ensemble.begin_from(new | dict(start.parameters), "trained")
    for _ in range(recipe.steps):
        ensemble.train_step()
    return ensemble


def scores(ensemble: Ensemble, task: WordProblem) -> dict[int, list[float]]:
    """Scaled accuracy of every seed by length."""

    def prefill(tokens: torch.Tensor, cache: Any) -> Any:
        return ensemble.call("prefill", tokens) if cache is None else ensemble.call("prefill", tokens, cache)

    correct = correct_in_passing(prefill, task, len(ensemble.seeds), 256, LENGTHS[-1], "cpu", 512)
    rows = [scaled_accuracy(row, LENGTHS, task.order) for row in correct]
    return {length: [round(row[length], 4) for row in rows] for length in LENGTHS}


def negative_gates(ensemble: Ensemble, task: WordProblem) -> list[float]:
    """The share of gates that a letter makes negative, of every seed."""
    found = []
    for r in range(len(ensemble.seeds)):
        model = ensemble.replica(r, partial(build, FACTOR, task))
        assert isinstance(model, Tracker)
        assert isinstance(model.mixer, SignFactor)
        found.append(float((model.mixer.factors(model.embedding.weight[None]) < 0).float().mean()))
    return found


def deviation(tokens: int = 4096) -> dict[str, float]:
    """How far a layer's output and state are from what they were before conversion, relative to the largest of them.

    Gates of exp(-1e-3) to exp(-1e-4) a token, so that the state remembers all of the sequence.
    """
    torch.manual_seed(0)
    layer = ComplexKDA(64, 4, 16, gate="sigmoid", beta_range=2)
    with torch.no_grad():
        layer.dt_bias.copy_(torch.log(torch.logspace(-4, -3, 64) / 5))
        x = torch.randn(1, tokens, 64)
        before, cache = layer.prefill(x)
        after, cache_after = convert(layer).prefill(x)
    return {
        "tokens": tokens,
        "output": float((after - before).abs().max() / before.abs().max()),
        "state": float((cache_after.state - cache.state).abs().max() / cache.state.abs().max()),
    }


def run(updates: int, more: int, seeds: int, again: tuple[int, ...] = AGAIN, plain: bool = True) -> dict[str, Any]:
    """Train, convert, fine-tune, score; `again` are the lengths of the fine-tuning, `plain` asks for the arm without signs."""
    began, names = time.monotonic(), tuple(range(seeds))
    task = replace(WordProblem.named("S3"), smoothing=SMOOTHING)
    base = trained(BASE, task, Recipe(steps=updates, batch=BATCH, curriculum=FIRST), names)
    fine = Recipe(steps=more, batch=BATCH, curriculum=again)
    found = {"trained without signs": scores(base, task)}
    if plain:
        found["trained on without signs"] = scores(trained(BASE, task, fine, names, base), task)
    signed = trained(FACTOR, task, fine, names, base)
    found["converted and trained on"] = scores(signed, task)
    return {
        "group": "S3",
        "heads": [HEADS, HEAD_DIM],
        "batch": BATCH,
        "smoothing": SMOOTHING,
        "updates": updates,
        "lengths": list(FIRST),
        "more": more,
        "lengths_again": list(again),
        "seeds": list(names),
        "start_of_u": START,
        "scores": found,
        "tracks": {arm: sum(score >= TRACKS for score in of[32]) for arm, of in found.items()},
        "negative_gates": negative_gates(signed, task),
        "deviation": deviation(),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--more", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = run(args.updates, args.more, args.seeds)
    for arm, found in record["scores"].items():
        print(f"{arm:26} tracks on {record['tracks'][arm]} of {args.seeds} seeds: {found}")
    print(f"negative gates {record['negative_gates']}, deviation {record['deviation']}")
    if args.out is not None:
        print(write_json(args.out / "signs.json", record | {"environment": environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
