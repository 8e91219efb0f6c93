"""``ckda lm ladder``: cells of the paper's ladder, here one after the other or on SLURM; or our own ladder by units."""

import argparse
import json
from dataclasses import replace

from ckda.command import Parser, every, make_folder, pick_device, plural
from ckda.lm.commands import study, train
from ckda.lm.ladder import cells, run_local, submit
from ckda.lm.options import add_train
from ckda.lm.tiny import tiny_tokens, tiny_training
from ckda.lm.training import Training
from ckda.record import write_json

__all__ = ["run_command"]


def config(args: argparse.Namespace) -> dict[str, Training]:
    """The cells, each a training by name."""
    if args.data is None and not args.smoke:
        raise ValueError("name the folder of tokens with --data")
    parser = Parser(prog="ckda lm ladder ... --", description="further options of ckda lm train")
    add_train(parser)
    more = parser.parse_args([word for word in args.rest if word != "--"])
    more.model, more.steps, more.data, more.out, more.seed = "47M:ckda", 1, args.data, args.out, args.seed
    if args.smoke:
        more.data = str(tiny_tokens(make_folder(args.out) / "tokens"))
    base = replace(train.config(more, pick_device(args.device)), device=pick_device(args.device))
    said = {name: getattr(more, name) for name in train.RECIPE}
    sizes, arms, seeds = args.sizes.split(","), args.arms.split(","), args.seeds or 1
    found = cells(base, sizes, arms, args.tokens, seeds, **said)
    for tokens in () if args.smoke else args.tokens:
        for name, cell in cells(base, sizes, arms, [tokens], seeds, **said).items():
            train.tell_excess(name, cell.recipe, tokens)
    if args.smoke:
        return {name: tiny_training(base.data, c.out, c.model.partition(":")[2]) for name, c in found.items()}
    return found


def run_command(args: argparse.Namespace) -> int:
    """Train or submit the cells that are not finished; with --study or --collect, the units of our own ladder."""
    if args.study or args.collect:
        return study.run_command(args)
    todo = config(args)
    if args.dry_run:
        for name, cell in todo.items():
            updates = plural(cell.recipe.steps, "update")
            print(f"{name}: {cell.model} on {cell.data}, {updates} of {cell.recipe.tokens_per_step:,} tokens")
        return 0
    out = make_folder(args.out)
    if args.launcher == "slurm":
        jobs: dict[str, int | str] = {**submit(todo, args.ranks, args.slurm)}
    else:
        jobs = {**run_local(todo, args.ranks, every(0))}
    write_json(out / "ladder.json", {"what": "ckda lm ladder", "launcher": args.launcher, "jobs": jobs})
    print(json.dumps(jobs) if args.json else "\n".join(f"{name}: {_words(job)}" for name, job in jobs.items()))
    return max((job for job in jobs.values() if isinstance(job, int)), default=0)


def _words(job: int | str) -> str:
    """An exit status in words, or the name of a SLURM job."""
    return (
        {0: "done", 3: "stopped early", 130: "interrupted"}.get(job, f"failed with status {job}")
        if isinstance(job, int)
        else job
    )
