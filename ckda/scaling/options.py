"""What may be typed after ``ckda scaling fit``, ``predict`` and ``compare``."""

from ckda.command import Parser, add_common_arguments, real, whole

from .fit import LEVEL
from .law import FORMS
from .published import BASELINE, HELD_OUT, NOISE

__all__ = ["add_compare", "add_fit", "add_predict"]


def _add_common(parser: Parser) -> None:
    add_common_arguments(parser, "runs/scaling")
    parser.add_argument("--level", type=real, default=LEVEL, help="of the intervals (default: %(default)s)")


def _add_effort(parser: Parser) -> None:
    """The options of :class:`ckda.scaling.commands.Effort`."""
    add = parser.add_argument_group("how hard it tries").add_argument
    add("--starts", type=whole, default=600, help="random starts per arm (default: %(default)s)")
    add(
        "--bootstrap",
        type=whole,
        default=1000,
        metavar="B",
        help="replicates; 0: none (default: %(default)s)",
    )
    add("--restarts", type=whole, default=4, help="random restarts per replicate (default: %(default)s)")


def add_fit(parser: Parser) -> None:
    """The options of ``ckda scaling fit``."""
    _add_common(parser)
    add = parser.add_argument_group("what is fitted to what").add_argument
    add(
        "--data", nargs="+", default=(), metavar="FILE", help="runs: .csv, .json or .jsonl (default: the paper's table)"
    )
    add("--arms", nargs="+", default=(), metavar="NAME", help="only these groups")
    add("--form", default="skaling", choices=list(FORMS), help="of the law (default: %(default)s)")
    add("--E", default="free", help="free, shared, or a number to pin it to (default: %(default)s)")
    add(
        "--offset",
        choices=["none", "arm", "shared"],
        help="chained-cell offset (default: arm, none without such cells)",
    )
    add("--hold-out", nargs="*", metavar="CELL", help=f"such as {HELD_OUT} (default for the paper's table; else none)")
    add("--huber", type=real, default=0.01, metavar="NATS", help="Huber scale (default: %(default)s)")
    add(
        "--baseline",
        metavar="NAME",
        help=f"the arm advantages are measured against (default: the first; of the paper's table {BASELINE})",
    )
    add(
        "--noise",
        type=real,
        metavar="NATS",
        help=f"how far equal runs lie apart, drawn as a band (default for the paper's table: {NOISE}; else none)",
    )
    _add_effort(parser)


def add_predict(parser: Parser) -> None:
    """The options of ``ckda scaling predict``."""
    _add_common(parser)
    add = parser.add_argument_group("what is predicted").add_argument
    add("cells", nargs="*", metavar="SIZE/TOKENS", help="such as 7B/1T")
    add("--compute", nargs="+", default=[], metavar="FLOPS", help="budgets to split optimally, such as 1e22")
    add("--fit", metavar="FILE", help="a fit's JSON (default: fit.json under --out)")
    add("--chained", action="store_true", help="predict runs cooled down from a shared trunk")


def add_compare(parser: Parser) -> None:
    """The options of ``ckda scaling compare``."""
    _add_common(parser)
    more = "synthetic tables of the coverage study; 0: none (default: %(default)s)"
    parser.add_argument("--coverage", type=whole, default=300, metavar="TABLES", help=more)
    _add_effort(parser)
