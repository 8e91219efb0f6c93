"""The language models side by side at the 47M rung: same tokens in the same order, equal budgets (fig:val_curves in small).

    python recipes/lm_corpus.py --out corpus
    python recipes/lm_comparison.py train      --data corpus/tokens
    python recipes/lm_comparison.py throughput --data corpus/tokens    # all arms at 2048 and 8192
    python recipes/lm_comparison.py profile    --data corpus/tokens    # at one length
    python recipes/lm_comparison.py large      --data corpus/tokens

`train` trains the runs that are missing, one after the other, evaluates each on the folder --requests where it is given
(docs/lm.md), and draws; called again it goes on where it was stopped, also by --time-limit. `collect` only draws, from the files
train.json and eval.json of the runs in --out. `profile` and `throughput` measure throughput, MFU and how busy the GPU is, arm by
arm in turns and for every backend of the operator that is there. `large` trains the 1.3B model for twenty updates at sequence
4096 and times the ones that follow.
"""

import argparse
import gc
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ckda.command import add_common_arguments, count, make_folder, pick_device
from ckda.lm.commands import ModelChoice, eval
from ckda.lm.comparison import collect
from ckda.lm.figures import comparison_figure, speed_figure
from ckda.lm.models import config_of
from ckda.lm.parallel import join
from ckda.lm.profile import busy_fraction, measure
from ckda.lm.recipe import Recipe
from ckda.lm.tiny import tiny_tokens, tiny_training
from ckda.lm.train import Options, Trainer, prefetched
from ckda.lm.training import Training, recipe_for, run
from ckda.models import ComplexKDAForCausalLM
from ckda.ops import BACKENDS
from ckda.record import environment, write_json, write_text

#: arm -> seeds
RUNS = {
    "ckda": (0, 1),
    "kda": (0, 1),
    "transformer": (0,),
    "ckda-hybrid": (0,),
    "kda-hybrid": (0,),
    "ckda-spread": (0,),
    "ckda-no-key-silu": (0,),
}


def training(args: argparse.Namespace, arm: str, seed: int, out: Path, seconds: float) -> Training:
    """One run of the comparison."""
    if args.smoke:
        return tiny_training(args.data, out, arm, seed)
    model, device = f"{args.size}:{arm}", pick_device(args.device)
    names = ("tokens", "length", "batch", "micro", "lr", "warmup", "eval_every", "eval_tokens", "save_every")
    recipe = recipe_for(model, device, schedule="wsd", seed=seed, **{name: getattr(args, name) for name in names})
    options = Options(compile=args.compile, graph=args.graph, keep=0, time_limit=seconds)
    return Training(model, args.data, str(out), recipe, options, device, args.backend, verify=False)


def train(args: argparse.Namespace, out: Path) -> None:
    """Every run that is missing, until the time is over; then the table and the figures of what is there."""
    began, device = time.perf_counter(), pick_device(args.device)
    arms = args.arms.split(",") if args.arms else list(RUNS)
    chosen = [(arm, seed) for arm in arms for seed in RUNS.get(arm, (0,))[: args.seeds]]
    for number, (arm, seed) in enumerate(chosen, 1):
        left = args.time_limit - (time.perf_counter() - began)
        if left < 20:
            print("the time is over; the same command goes on from here", file=sys.stderr)
            break
        print(f"{number}/{len(chosen)} {arm}, seed {seed}", file=sys.stderr)
        folder = out / f"{arm}-seed{seed}"
        result = run(training(args, arm, seed, folder, left - 10))
        if result is not None and result.stopped is None:
            print(f"  held out {result.held_out_loss}, {result.tokens_per_second} tokens/s", file=sys.stderr)
            if args.requests and seed == 0 and not (folder / "eval.json").is_file():
                dtype = "bf16" if device == "cuda" else "fp32"
                choice = ModelChoice(str(folder), dtype=dtype, backend=args.backend, device=device)
                write_json(folder / "eval.json", asdict(eval.run(choice, eval.Evaluation(args.requests))))
        free_memory()
    draw(args, out)


def draw(args: argparse.Namespace, out: Path) -> None:
    """comparison.json, its table and its figures from the runs' own files."""
    found = collect(out, args.size)
    if not found.runs:
        return
    found.save(out / "comparison.json")
    comparison_figure(found).savefig(out / "val_curves.png", dpi=160)
    speed_figure(found).savefig(out / "speed.png", dpi=160)
    write_text(out / "table.md", found.table())
    print(found.table())


# Throughput -----------------------------------------------------------------------------------------------------------


def free_memory() -> None:
    """Of trainers that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trainer_of(args: argparse.Namespace, data: str, model: str, backend: str, out: Path, **recipe: Any) -> Trainer:
    """A trainer whose updates are timed."""
    device = pick_device(args.device)
    values: dict[str, Any] = {"steps": 10**6, "dtype": "bf16" if device == "cuda" else "fp32", "lr": 1e-4, "warmup": 10}
    values |= {"length": args.length, "batch": args.batch, "micro": args.micro} | recipe
    options = Options(compile=args.compile, graph=args.graph, checkpointing=args.checkpointing)
    config = config_of(model, backend=backend)
    return Trainer(lambda: ComplexKDAForCausalLM(config), data, Recipe(**values), out, join(device), options)


#: arm and backend of every variant whose throughput is measured
VARIANTS = [
    *((arm, "auto") for arm in ("ckda", "kda", "transformer-qknorm", "ckda-hybrid", "kda-hybrid")),
    ("ckda", "fla"),
    ("kda", "fla"),
]


def profile(args: argparse.Namespace, out: Path) -> None:
    """Throughput at one length."""
    write_json(out / "profile.json", profile_at(args, out))


def throughput(args: argparse.Namespace, out: Path) -> None:
    """All arms at every length of --lengths, as many tokens an update at each, in one run; the record is rewritten after each."""
    tokens, found = args.length * args.batch, {}
    for length in args.lengths:
        args.length, args.batch = length, max(1, tokens // length)
        found[str(length)] = profile_at(args, out)
        write_json(out / "throughput.json", {"what": "throughput of training by length", "lengths": found})
        free_memory()


def profile_at(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Variants in turns, several rounds, so that a drifting clock hits all alike; medians and ratios.

    How busy the GPU is comes last: a profiler that has run once may go on slowing launches.
    """
    device, began = pick_device(args.device), time.perf_counter()
    size = "tiny" if args.smoke else args.size
    wanted = VARIANTS
    variants: dict[str, dict[str, Any]] = {}
    trainers, skipped = {}, {}
    for arm, backend in wanted:
        name = arm if backend == "auto" else f"{arm} on {backend}"
        if args.arms and arm not in args.arms.split(","):
            continue
        if backend != "auto" and backend not in BACKENDS:
            skipped[name] = "no such backend"
            continue
        before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0  # of the trainers that wait
        try:
            trainer = trainer_of(args, args.data, f"{size}:{arm}", backend, out)
            first = measure(trainer, steps=args.steps, profile=False)
        except (ValueError, RuntimeError, ImportError) as error:
            skipped[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name}: {skipped[name]}", file=sys.stderr)
            continue
        if first["memory_gib"] is not None:
            first["memory_gib"] -= before
        variants[name], trainers[name] = first | {"rounds_tokens_per_second": []}, trainer
        how = "recorded" if first["recorded"] else f"kernel by kernel ({first['eager_because']})"
        print(f"{name}: {first['tokens_per_second']:,.0f} tokens/s, {how}", file=sys.stderr)
        free_memory()
    for number in range(args.rounds):
        for name, trainer in trainers.items():
            again = measure(trainer, warmup=2, steps=args.steps, profile=False)
            variants[name]["rounds_tokens_per_second"].append(again["tokens_per_second"])
        print(f"round {number + 1} of {args.rounds}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    for name, one in variants.items():
        one |= busy_fraction(trainers[name])
        median = statistics.median(one["rounds_tokens_per_second"] or [one["tokens_per_second"]])
        one["median_tokens_per_second"] = median
        one["median_mfu"] = None if one["mfu"] is None else one["mfu"] * median / one["tokens_per_second"]

    def ratio(a: str, b: str) -> float | None:
        have = a in variants and b in variants
        return variants[a]["median_tokens_per_second"] / variants[b]["median_tokens_per_second"] if have else None

    result = {
        "what": "throughput of training",
        **{name: getattr(args, name) for name in ("size", "length", "batch", "compile", "graph")},
        "seconds": round(time.perf_counter() - began, 1),
        "variants": variants,
        "skipped": skipped,
        "ckda_over_kda": ratio("ckda", "kda"),
        "ckda_over_ckda_on_fla": ratio("ckda", "ckda on fla"),
        "environment": environment(device),
    }
    print(f"sequences of {args.length}:")
    for name, one in variants.items():
        busy = "-" if one.get("busy") is None else f"{100 * one['busy']:.1f}%"
        mfu = "-" if one["median_mfu"] is None else f"{100 * one['median_mfu']:.1f}%"
        how = "recorded" if one["recorded"] else "kernel by kernel"
        print(f"{name:<20} {one['median_tokens_per_second']:>12,.0f} tokens/s  MFU {mfu}  GPU busy {busy}  {how}")
    print(f"CKDA / KDA {result['ckda_over_kda']}, CKDA / CKDA on FLA {result['ckda_over_ckda_on_fla']}")
    return result


def large(args: argparse.Namespace, out: Path) -> None:
    """Twenty updates of the 1.3B model on real text: tokens of a vocabulary of at most 32,000."""
    device = pick_device(args.device)
    model = f"{'tiny' if args.smoke else '1.3B'}:{args.arm}"
    # twenty updates warm up and stay; the timed ones follow at the same rate, so the schedule must not end before them
    trainer = trainer_of(args, args.data, model, args.backend, out, lr=4e-4, schedule="constant")
    losses, began = [], time.perf_counter()
    with prefetched(trainer.batches(0, 20), trainer.world.device) as batches:
        for _ in range(20):
            loss, norm = trainer.update(batches)
            losses.append([float(loss), float(norm)])
    seconds = time.perf_counter() - began
    speed = measure(trainer, warmup=2, steps=5) if args.steps else {}
    result = {
        "what": "1.3B for twenty updates",
        "model": model,
        **{name: getattr(args, name) for name in ("length", "batch", "micro", "checkpointing")},
        "parameters": sum(p.numel() for p in trainer.plain.parameters()),
        "losses": [loss for loss, _ in losses],
        "grad_norms": [norm for _, norm in losses],
        "seconds": round(seconds, 2),
        "steady": speed,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "environment": environment(device),
    }
    write_json(out / "large.json", result)
    print({k: v for k, v in result.items() if k not in ("environment", "steady", "grad_norms")})
    print({k: v for k, v in speed.items() if k != "kernels"})


def lengths(text: str) -> list[int]:
    """Numbers with commas."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """One of the modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "runs/lm/comparison")
    add = parser.add_argument
    add("mode", choices=["train", "collect", "profile", "throughput", "large"])
    add("--data", help="folder that ckda lm prepare wrote")
    add("--requests", help="folder of offline tasks (ckda lm eval --build)")
    add("--size", default="47M")
    add("--arms", help=f"with commas (default for train: {','.join(RUNS)})")
    add("--seeds", type=int, help="at most so many an arm (default: two of CKDA and KDA, else one)")
    add("--tokens", type=count, default="24M", help="of each run (default: %(default)s)")
    add("--length", type=int, help="tokens a sequence (default: 2048, large: 4096)")
    add("--batch", type=int, help="sequences an update (default: 16, large: 8)")
    add("--micro", type=int, help="sequences at once (default: all, large: 4)")
    add("--lr", type=float, default=2e-3)
    add("--warmup", type=int, default=70, help="updates; the paper's 2000 are for budgets of billions of tokens")
    add("--eval-every", type=int, default=60)
    add("--eval-tokens", type=int, default=480 * 2048, help="held-out tokens (default: %(default)s)")
    add("--save-every", type=int, default=10**9, help="updates between checkpoints that stay")
    add("--backend", default="auto")
    add("--compile", action="store_true")
    add("--no-graph", dest="graph", action="store_false", help="launch kernels one by one")
    add("--time-limit", type=float, default=float("inf"), help="seconds of the whole call")
    add("--steps", type=int, default=20, help="profile: timed updates a round; large: 0 skips the timing")
    add("--rounds", type=int, default=3, help="profile: further rounds in turns")
    add("--lengths", type=lengths, default="2048,8192", help="throughput: tokens a sequence (default: %(default)s)")
    add("--arm", default="ckda", help="large: which 1.3B model")
    add("--checkpointing", action="store_true", help="large: recompute activations")
    args = parser.parse_args()
    out, is_large = make_folder(args.out), args.mode == "large"
    usual = {"length": 4096, "batch": 8, "micro": 4} if is_large else {"length": 2048, "batch": 16, "micro": 0}
    if args.smoke:
        usual = {"length": 64, "batch": 4, "micro": 0}
        args.steps, args.rounds, args.lengths = 2, 1, [32, 64]
        args.data = args.data or str(tiny_tokens(out / "tokens"))
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    {"train": train, "collect": draw, "profile": profile, "throughput": throughput, "large": large}[args.mode](
        args, out
    )


if __name__ == "__main__":
    main()
