"""What may be typed after ``ckda theory``; nothing heavy is imported, so that a wrong word is refused at once."""

from ckda.command import Parser, above_zero, add_common_arguments, add_device_argument, add_json_argument, positive

__all__ = ["ABOUT", "add_theory"]

ABOUT = {
    "list": "the claims, and how far each is checked: arithmetic; coverage",
    "verify": "check the claims; exit status 1 if one is refuted or broken",
    "show": "explain a claim or a figure and draw it",
    "table": "tab:theory-summary and tab:recurrence-spectrum, each cell with the check behind it",
    "verdict": "whether one layer tracks a group: a tracker, an obstruction, or neither",
    "compile": "a group, a DFA or a rational WFA as layers that run, with a certificate",
    "run": "a compiled machine on a word: the answer after every letter",
}


def add_theory(parser: Parser) -> None:
    """The actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in ABOUT.items():
        action = actions.add_parser(name, help=text, description=text)
        if name == "compile":
            _add_compile(action)
        elif name == "run":
            _add_run(action)
        elif name == "list":
            add_json_argument(action)
        else:  # claims are checked on the CPU, on the same cases every time
            smoke = () if name in ("verify", "table") else ("smoke",)
            add_common_arguments(action, "runs/theory", leave=("device", "seed", *smoke))
        if name == "verify":
            action.add_argument("names", nargs="*", metavar="NAME", help="labels, or beginnings of labels; none: all")
            action.add_argument("--fresh", action="store_true", help="do not resume an interrupted run")
        if name == "show":
            action.add_argument("name", metavar="NAME", help="label of a claim or of a figure")
        if name == "verdict":
            action.add_argument("names", nargs="*", metavar="FILE|NAME", help="groups by name or file")
            more = "every group of order up to this, at most 63"
            action.add_argument("--up-to", type=positive, metavar="ORDER", help=more)
        if name in ("verify", "table"):
            more = "scales the number of cases (default: %(default)s)"
            action.add_argument("--effort", type=above_zero, default=1.0, help=more)


def _add_compile(action: Parser) -> None:
    add = action.add_argument
    add("source", metavar="FILE|NAME", help="a JSON file (docs/theory.md), or a group such as A5 or SL(2,3)")
    add("--fresh", action="store_true", help="write the machine in the place of another")
    add("--out", default="runs/theory/machine", help="folder of the machine (default: %(default)s)")
    add("--letters", choices=("generators", "all"), default="generators", help="of a group (default: %(default)s)")
    add("--layers", type=int, choices=(1, 3), help="of a group: 1, or 3 (default: the fewest known)")
    add("--most-maps", type=positive, default=5000, help="limit of a DFA's lookup (default: %(default)s)")
    add_json_argument(action)


def _add_run(action: Parser) -> None:
    add = action.add_argument
    add("machine", metavar="FOLDER", help="what `ckda theory compile` wrote")
    add("--word", required=True, help='letters by number, such as "0 2 1", or by name')
    add("--exact", action="store_true", help="exact arithmetic instead of the operator; weights as fractions")
    add_device_argument(action)
    add_json_argument(action)
