"""The command ``ckda``: a table of verbs, each in a module of its own that is imported only when it is called."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from ckda import __version__
from ckda.command import CheckFailed, Parser


class Verb(NamedTuple):
    """One verb of the command."""

    module: str  #: with `run_command(args) -> int`
    options: str  #: the function that adds its options to a parser; its module is light, so that a wrong word is refused at once
    help: str
    extra: str = "demo"  #: the extra that brings what it needs


#: what `ckda inspect` can look at
INSPECT = {
    "track": Verb(
        "ckda.experiments.tracking.inspect",
        "ckda.experiments.options.add_inspect_track",
        "a run of `ckda track`: the head that works, its gates, keys and spectra, and the representation it has learned",
    ),
    "horizon": Verb(
        "ckda.experiments.tracking.horizon",
        "ckda.experiments.options.add_inspect_horizon",
        "runs of `ckda track`: the length at which each seed goes wrong, predicted from short words, and measured",
    ),
    "audio": Verb(
        "ckda.experiments.audio.inspect",
        "ckda.experiments.options.add_inspect_audio",
        "a run of `ckda audio`: spectra on blank input, and life without the complex modes",
    ),
    "lm": Verb(
        "ckda.lm.inspect",
        "ckda.lm.options.add_inspect",
        "a language model: negative gates, learning rates above 1 and complex eigenvalues, by layer and over checkpoints",
        "lm",
    ),
}

#: what `ckda lm` can do
LM = {
    "params": Verb(
        "ckda.lm.commands.params",
        "ckda.lm.options.add_params",
        "the ladder's parameter totals beside the paper's",
        "lm",
    ),
    "prepare": Verb("ckda.lm.commands.prepare", "ckda.lm.options.add_prepare", "text to token shards", "lm"),
    "train": Verb(
        "ckda.lm.commands.train", "ckda.lm.options.add_train", "train a model, on one device or under torchrun", "lm"
    ),
    "ladder": Verb(
        "ckda.lm.commands.ladder", "ckda.lm.options.add_ladder", "train cells of the ladder here or on SLURM", "lm"
    ),
    "eval": Verb("ckda.lm.commands.eval", "ckda.lm.options.add_eval", "zero-shot tasks, offline or by lm-eval", "lm"),
    "generate": Verb(
        "ckda.lm.commands.generate", "ckda.lm.options.add_generate", "text from a prompt, as it comes", "lm"
    ),
}

#: what `ckda scaling` can do
SCALING = {
    "fit": Verb(
        "ckda.scaling.commands.fit",
        "ckda.scaling.options.add_fit",
        "fit the law to the paper's table or to your runs",
        "scaling",
    ),
    "predict": Verb(
        "ckda.scaling.commands.predict",
        "ckda.scaling.options.add_predict",
        "losses and compute-optimal splits with intervals, from a fit",
        "scaling",
    ),
    "compare": Verb(
        "ckda.scaling.commands.compare",
        "ckda.scaling.options.add_compare",
        "the paper's three fits again, beside what it prints",
        "scaling",
    ),
}

#: the verbs; a table in place of a verb is one more word of the command
VERBS: dict[str, Verb | tuple[str, dict[str, Verb]]] = {
    "demo": Verb(
        "ckda.experiments.demo",
        "ckda.experiments.options.add_demo",
        "train four range settings of KDA on the S3 word problem and draw the report",
    ),
    "track": Verb(
        "ckda.experiments.tracking.command",
        "ckda.experiments.options.add_track",
        "word problems of finite groups: how far each mixer keeps tracking",
    ),
    "audio": Verb(
        "ckda.experiments.audio.command",
        "ckda.experiments.options.add_audio",
        "continue a groove after half a bar: CKDA, KDA, DeltaProduct, GRU, Transformer",
    ),
    "inspect": ("what a trained model does: inspect track RUN, horizon RUN ..., audio RUN, lm PATH", INSPECT),
    "lm": ("language models: params, prepare, train, ladder, eval, generate", LM),
    "needle": Verb(
        "ckda.lm.needle", "ckda.lm.options.add_needle", "find a needle in a haystack of 1K to 8K tokens (RULER)", "lm"
    ),
    "bench": Verb(
        "ckda.bench.command",
        "ckda.bench.options.add_bench",
        "the operator's speed, ours and flash-linear-attention's in one run",
        "triton",
    ),
    "theory": Verb(
        "ckda.theory.command",
        "ckda.theory.options.add_theory",
        "the paper's claims as programs, and a compiler to layers: list, verify, show, table, verdict, compile, run",
        "theory",
    ),
    "scaling": ("fit scaling laws to the paper's table or to your runs", SCALING),
}


def _add_verbs(parser: Parser, verbs: Mapping, words: Sequence[str], called: Sequence[str]) -> None:
    """A sub-command each; the options of the one that is called."""
    commands = parser.add_subparsers(dest=f"verb{len(words)}", metavar="VERB" if not words else "WHAT", required=True)
    for name, verb in verbs.items():
        text = verb.help if isinstance(verb, Verb) else verb[0]
        sub = commands.add_parser(
            name, help=text, description=_wrapped(text), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name != (called[0] if called else None):
            continue
        if isinstance(verb, Verb):
            sub.set_defaults(verb=verb)
            module, _, function = verb.options.rpartition(".")
            getattr(import_module(module), function)(sub)
        else:
            _add_verbs(sub, verb[1], [*words, name], called[1:])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, shutil.get_terminal_size().columns - 2)


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
first:        ckda demo       a few minutes on a CPU, one page with pictures
then:         ckda track S3 --recipe quick
              ckda track --recipes
              ckda VERB --help
exit status:  0 done, 1 a check failed, 2 wrong use, 130 interrupted,
              3 stopped early (the same command goes on)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 a check failed, 2 wrong use, 3 stopped early, 130 interrupted.

    What the user can mend (a ValueError, an OSError) is one line on standard error and status 2;
    `python -X dev -m ckda` shows the traceback as well. A missing package names the extra that brings it.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    words, verb = _called(argv)
    parser = Parser(
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
        args, unknown = parser.parse_known_args(argv)
        words = args.parser.prog.split()[1:]  # with the action of a verb that has some
        if unknown:
            args.parser.error(f"unknown: {' '.join(unknown)}")
        return int(import_module(args.verb.module).run_command(args) or 0)
    except ModuleNotFoundError as error:
        if verb is None or error.name is None or error.name.startswith("ckda"):
            raise
        _say(words, f"it needs the package {error.name!r}: pip install 'ckda[{verb.extra}]'")
        return 2
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        _say(words, str(error))
        return 2
    except CheckFailed as error:
        _say(words, str(error))
        return 1
    except KeyboardInterrupt:
        _say(words, "interrupted")
        return 130


def _say(words: Sequence[str], text: str) -> None:
    """One line on standard error, with the verb before it."""
    print(f"{' '.join(['ckda', *words])}: {' '.join(text.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
