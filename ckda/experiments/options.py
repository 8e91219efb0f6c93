"""What may be typed after ``ckda demo``, ``track``, ``audio`` and ``inspect``.

Nothing heavy is imported here, so that a wrong word is refused at once; names to choose from are looked up for ``--help`` alone.
"""

import argparse

from ckda.command import (
    Parser,
    above_zero,
    add_common_arguments,
    add_json_argument,
    add_mixer_argument,
    add_run_arguments,
    count,
    entries,
    not_negative,
    positive,
    seconds,
)

__all__ = ["add_audio", "add_demo", "add_inspect_audio", "add_inspect_horizon", "add_inspect_track", "add_track"]


def add_demo(parser: Parser) -> None:
    """The options of ``ckda demo``."""
    add_common_arguments(parser, "runs/demo")
    parser.add_argument("--steps", type=count, default=1000, help="updates of each arm (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=64, help="words an update (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="train anew, in the place of what is in --out")


def add_track(parser: Parser) -> None:
    """The options of ``ckda track``."""
    add_common_arguments(parser, "runs/track")
    add_run_arguments(parser)
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "group",
        nargs="*",
        help="Z5, D4, S3, A5, Q8, S3xZ2, parity, shell3 (three cups), or a JSON file with a table; S4:generators for words "
        "over few letters (default: S3)",
    )
    add_mixer_argument(what, "one, several with commas, 'ranges' or 'all' (default: ckda); the list is below")
    what.add_argument(
        "--suite",
        choices=("regular",),
        help="instead of groups: parity, even pairs, cycle navigation, modular arithmetic, S5, traces, recall; --mixer names "
        "arms (the list is below), and five seeds go to runs/regular",
    )
    what.add_argument(
        "--seeds", type=positive, help="how many seeds, from --seed on (default: 3; with --from those of the file)"
    )
    how = _recipe_arguments(parser)
    how.add_argument("--batch", type=count, help="words an update: short for +batch=N")
    how.add_argument("--momentum", help="Muon's momentum, a number or 'cycled': short for +momentum=...")
    how.add_argument("--lr-muon", help="Muon's peak learning rate: short for +lr-muon=...")
    how.add_argument("--lr-adamw", help="AdamW's peak learning rate: short for +lr-adamw=...")
    how.add_argument("--from", dest="begin", metavar="RUN", help="begin from the weights in a file runs/NAME.pt")
    test = parser.add_argument_group("what is tested")
    test.add_argument("--lengths", help="of words, with commas (default: 8 ... 512, on a GPU to 65536)")
    test.add_argument("--words", type=positive, help="words a test (default: 256; 32 beyond 512)")
    speed = parser.add_argument_group("how fast")
    speed.add_argument("--together", type=positive, help="runs trained side by side (default: 1, on a GPU 8)")
    speed.add_argument(
        "--by-token",
        action="store_true",
        help="project every token by itself, not each symbol once (two to three times slower)",
    )
    speed.add_argument(
        "--yes", action="store_true", help="go on even if it takes more than a day and no terminal is there"
    )
    speed.add_argument("--time-limit", type=seconds, metavar="SECONDS", help="then stop with a checkpoint, status 3")
    parser.set_defaults(mixer=None, recipe=None)  # a suite has arms of its own, and no recipes
    parser.explain = _mixers


def _recipe_arguments(parser: Parser) -> argparse._ArgumentGroup:
    how = parser.add_argument_group("how it is trained: a recipe, and short forms of changes to it")
    how.add_argument(
        "--recipe",
        default="paper",
        help="one or several with commas, each a name and changes to it as in quick+steps=2k (default: paper)",
    )
    how.add_argument("--recipes", action="store_true", help="explain every recipe and change, train nothing")
    how.add_argument("--steps", type=count, help="updates: short for +steps=N in the recipe's name")
    return how


def _mixers() -> str:
    from ckda.experiments.regular.model import ARMS
    from ckda.layers.complex_kda import RANGES
    from ckda.layers.mixers import MIXERS

    rows = [(f"  {name}", mixer.label) for name, mixer in MIXERS.items()]
    rows += [("  ranges", ", ".join(RANGES)), ("  all", "every one of them")]
    return f"mixers:\n{entries(rows)}\n{entries([('arms of --suite regular:', ', '.join(ARMS))])}"


def add_audio(parser: Parser) -> None:
    """The options of ``ckda audio``."""
    add_common_arguments(parser, "runs/audio")
    add_run_arguments(parser)
    what = parser.add_argument_group("what is trained")
    add_mixer_argument(what, "one, several with commas, or 'all' (default: %(default)s); the list is below")
    what.add_argument("--seeds", type=positive, default=1, help="how many, from --seed on, as one program (default: 1)")
    what.add_argument("--wav", metavar="FILE", help="your own loop of two bars, a WAV file of any rate")
    what.add_argument("--bpm", type=above_zero, default=124.0, help="its tempo (default: %(default)s)")
    how = _recipe_arguments(parser)
    how.add_argument("--batch", type=count, help="sequences an update: short for +batch=N")
    parser.explain = _arms


def _arms() -> str:
    from ckda.experiments.audio.model import ARMS
    from ckda.experiments.audio.run import COMPARED

    compared = f"those that the paper compares: {', '.join(COMPARED)}"
    return entries([("mixers:", ", ".join(ARMS)), ("all:", compared)], indent=8)


def add_inspect_track(parser: Parser) -> None:
    """The options of ``ckda inspect track``."""
    parser.add_argument("run", metavar="RUN", help="a file runs/NAME.pt that `ckda track` wrote")
    parser.add_argument("--seed", type=not_negative, help="which of its seeds (default: the best)")
    parser.add_argument(
        "--length", type=positive, default=512, help="how far the closure error is followed (default: 512)"
    )
    parser.add_argument("--out", help="folder for JSON and figure (default: inspect beside the run)")
    add_json_argument(parser)


def add_inspect_horizon(parser: Parser) -> None:
    """The options of ``ckda inspect horizon``."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="files runs/NAME.pt that `ckda track` wrote")
    parser.add_argument("--check", metavar="RUN", nargs="+", default=[], help="further runs, which do not choose kappa")
    parser.add_argument("--length", type=positive, default=4096, help="how far it is measured (default: %(default)s)")
    parser.add_argument("--out", default="runs/horizon", help="folder for JSON and figure (default: %(default)s)")
    add_json_argument(parser)


def add_inspect_audio(parser: Parser) -> None:
    """The options of ``ckda inspect audio``."""
    parser.add_argument(
        "run", metavar="RUN", help="runs/NAME.pt that `ckda audio` wrote; audio.json lies one folder above"
    )
    parser.add_argument("--seed", type=not_negative, help="of the run (default: the one its record shows as the best)")
    parser.add_argument("--length", type=positive, default=264, help="of the continuation (default: %(default)s)")
    parser.add_argument("--out", help="folder for JSON and figure (default: beside the run)")
    add_json_argument(parser)
