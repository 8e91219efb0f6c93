"""The command ``ckda``: a table of verbs, each in a module of its own that is imported only when it is called."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

#: verb -> (module with `add_arguments(parser)` and `run(args) -> int`, the extra it needs, one line of help)
VERBS: dict[str, tuple[str, str, str]] = {
    "demo": ("ckda.demo", "demo", "train four range settings of KDA on the S3 word problem and draw the report"),
    "track": ("ckda.track", "demo", "word problems of finite groups: how far each mixer keeps tracking"),
    "audio": ("ckda.audio", "demo", "continue a groove after half a bar: CKDA, KDA, DeltaProduct, GRU, Transformer"),
    "inspect": ("ckda.analysis.cli", "demo", "what a trained model does: inspect track RUN, audio RUN, lm PATH"),
    "lm": ("ckda.lm.cli", "lm", "language models: params, prepare, train, ladder, eval, generate"),
    "needle": ("ckda.lm.needle", "lm", "find a needle in a haystack of 1K to 8K tokens (RULER)"),
    "bench": ("ckda.bench", "triton", "the operator's speed, ours and flash-linear-attention's in one run"),
    "theory": ("ckda.theory.cli", "theory", "the paper's claims as programs: list, verify, show, table"),
    "scaling": ("ckda.analysis.scaling.cli", "scaling", "fit scaling laws to the paper's table or to your runs"),
}


def add_common_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The manners every verb shares. `out` is the default folder of its results."""
    parser.add_argument("--out", default=out, help="folder for JSON, figures and checkpoints (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("--smoke", action="store_true", help="a run of seconds that only shows that everything works")
    parser.add_argument("--json", action="store_true", help="only the result as JSON on standard output")


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to {2**31 - 1}")
    return value


def make_folder(path: str) -> Path:
    """The folder of --out, made before any work is done for it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise SystemExit(f"--out {path}: {error.strerror}") from error
    return folder


def pick_device(name: str) -> str:
    """`auto` is the best device present; a named one must be there."""
    import torch

    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if present[device])
    if not present[name]:
        raise SystemExit(f"--device {name}: there is none here; present: {', '.join(d for d in present if present[d])}")
    return name


def _parser(verb: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckda", description="Complex KDA: operator, layer, experiments, theory.")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, _, text) in VERBS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == verb:
            import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status; a missing package names the extra that brings it."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in argv if word in VERBS), None)
    try:
        args = _parser(verb).parse_args(argv)
        return int(import_module(VERBS[args.verb][0]).run(args) or 0)
    except ModuleNotFoundError as error:
        if verb is None or error.name is None or error.name.startswith("ckda"):
            raise
        extra = VERBS[verb][1]
        print(f"ckda {verb} needs the package {error.name!r}: pip install 'ckda[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
