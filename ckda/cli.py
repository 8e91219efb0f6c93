"""The command ``ckda``: a table of verbs, each in a module of its own that is imported only when it is called."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ckda import __version__


class Verb(NamedTuple):
    """One verb of the command."""

    module: str  #: with `add_arguments(parser)` and `run_command(args) -> int`
    help: str
    extra: str = "demo"  #: the extra that brings what it needs


#: what `ckda inspect` can look at
INSPECT = {
    "track": Verb(
        "ckda.experiments.tracking.inspect",
        "a run of `ckda track`: the head that works, its gates, keys and spectra, and the representation it has learned",
    ),
    "horizon": Verb(
        "ckda.experiments.tracking.horizon",
        "runs of `ckda track`: the length at which each seed goes wrong, predicted from short words, and measured",
    ),
    "audio": Verb(
        "ckda.experiments.audio.inspect",
        "a run of `ckda audio`: spectra on blank input, and life without the complex modes",
    ),
    "lm": Verb(
        "ckda.lm.inspect",
        "a language model: negative gates, learning rates above 1 and complex eigenvalues, by layer and over checkpoints",
        "lm",
    ),
}

#: what `ckda lm` can do
LM = {
    "params": Verb("ckda.lm.commands.params", "the ladder's parameter totals beside the paper's", "lm"),
    "prepare": Verb("ckda.lm.commands.prepare", "text to token shards", "lm"),
    "train": Verb("ckda.lm.commands.train", "train a model, on one device or under torchrun", "lm"),
    "ladder": Verb("ckda.lm.commands.ladder", "train cells of the ladder here or on SLURM", "lm"),
    "eval": Verb("ckda.lm.commands.eval", "zero-shot tasks, offline or by lm-eval", "lm"),
    "generate": Verb("ckda.lm.commands.generate", "text from a prompt, as it comes", "lm"),
}

#: what `ckda scaling` can do
SCALING = {
    "fit": Verb("ckda.scaling.commands.fit", "fit the law to the paper's table or to your runs", "scaling"),
    "predict": Verb(
        "ckda.scaling.commands.predict", "losses and compute-optimal splits with intervals, from a fit", "scaling"
    ),
    "compare": Verb("ckda.scaling.commands.compare", "the paper's three fits again, beside what it prints", "scaling"),
}

#: the verbs; a table in place of a verb is one more word of the command
VERBS: dict[str, Verb | tuple[str, dict[str, Verb]]] = {
    "demo": Verb(
        "ckda.experiments.demo", "train four range settings of KDA on the S3 word problem and draw the report"
    ),
    "track": Verb(
        "ckda.experiments.tracking.command", "word problems of finite groups: how far each mixer keeps tracking"
    ),
    "audio": Verb(
        "ckda.experiments.audio.command",
        "continue a groove after half a bar: CKDA, KDA, DeltaProduct, GRU, Transformer",
    ),
    "inspect": ("what a trained model does: inspect track RUN, horizon RUN ..., audio RUN, lm PATH", INSPECT),
    "lm": ("language models: params, prepare, train, ladder, eval, generate", LM),
    "needle": Verb("ckda.lm.needle", "find a needle in a haystack of 1K to 8K tokens (RULER)", "lm"),
    "bench": Verb("ckda.bench.command", "the operator's speed, ours and flash-linear-attention's in one run", "triton"),
    "theory": Verb(
        "ckda.theory.command",
        "the paper's claims as programs, and a compiler to layers: list, verify, show, table, verdict, compile, run",
        "theory",
    ),
    "scaling": ("fit scaling laws to the paper's table or to your runs", SCALING),
}


def _add_verbs(parser: argparse.ArgumentParser, verbs: Mapping, words: Sequence[str], called: Sequence[str]) -> None:
    """A sub-command each; the options of the one that is called, whose module is imported for them."""
    commands = parser.add_subparsers(dest=f"verb{len(words)}", metavar="VERB" if not words else "WHAT", required=True)
    for name, verb in verbs.items():
        text = verb.help if isinstance(verb, Verb) else verb[0]
        sub = commands.add_parser(name, help=text, description=text)
        if name != (called[0] if called else None):
            continue
        if isinstance(verb, Verb):
            sub.set_defaults(verb=verb)
            import_module(verb.module).add_arguments(sub)
        else:
            _add_verbs(sub, verb[1], [*words, name], called[1:])


def _called(argv: Sequence[str]) -> tuple[list[str], Verb | None]:
    """The words of the command line that name a verb, and the verb if they name one."""
    table: Mapping = VERBS
    words: list[str] = []
    for word in argv:
        if word in table:
            words.append(word)
            if isinstance(table[word], Verb):
                return words, table[word]
            table = table[word][1]
    return words, None


_EPILOG = """\
first:        ckda demo                       two minutes on a CPU, one page with pictures
then:         ckda track S3 --recipe quick    ckda track --recipes    ckda VERB --help
exit status:  0 done, 1 a check failed, 2 wrong use, 3 stopped early (the same command goes on), 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 a check failed, 2 wrong use, 3 stopped early, 130 interrupted.

    A missing package names the extra that brings it. A message of a verb (SystemExit with a sentence) is wrong use.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    words, verb = _called(argv)
    parser = argparse.ArgumentParser(
        prog="ckda",
        description="Complex KDA: operator, layer, experiments, theory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ckda {__version__}")
    try:
        _add_verbs(parser, VERBS, [], words)
        if not argv:
            parser.print_help()
            return 0
        args = parser.parse_args(argv)
        return int(import_module(args.verb.module).run_command(args) or 0)
    except ModuleNotFoundError as error:
        if verb is None or error.name is None or error.name.startswith("ckda"):
            raise
        print(
            f"ckda {' '.join(words)} needs the package {error.name!r}: pip install 'ckda[{verb.extra}]'",
            file=sys.stderr,
        )
        return 2
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            error.code = 2
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
