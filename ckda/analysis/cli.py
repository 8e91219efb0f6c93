"""``ckda inspect WHAT RUN``: what a trained model does. A table of subjects, each in a module of its own."""

import argparse
from importlib import import_module

#: subject -> (module with `add_arguments(parser)` and `run(args) -> int`, one line of help)
SUBJECTS: dict[str, tuple[str, str]] = {
    "track": (
        "ckda.analysis.tracking",
        "a run of `ckda track`: the head that works, its gates, keys and spectra, and the representation it has learned",
    ),
    "audio": (
        "ckda.analysis.audio",
        "a run of `ckda audio`: spectra on blank input, and life without the complex modes",
    ),
    "lm": (
        "ckda.analysis.lm",
        "a language model: negative gates, learning rates above 1 and complex eigenvalues, by layer and over checkpoints",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a subject."""
    subjects = parser.add_subparsers(dest="subject", metavar="WHAT", required=True)
    for name, (module, text) in SUBJECTS.items():
        import_module(module).add_arguments(subjects.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Hand over to the subject."""
    return int(import_module(SUBJECTS[args.subject][0]).run(args) or 0)
