"""`ckda theory list | verify | show | table`: the paper's claims, checked, explained, drawn and tabulated."""

import argparse
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ckda.command import add_common_arguments
from ckda.record import environment, read_json, write_json, write_text
from ckda.theory import tables
from ckda.theory.claims import CLAIMS, Claim, load_claims
from ckda.theory.figures import DRAWINGS
from ckda.theory.verify import Record, passed, select, verify

__all__ = ["add_arguments", "run_command"]

SMOKE_EFFORT = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    about = {
        "list": "the claims, one line each",
        "verify": "check the claims; exit status 1 if one is refuted or broken",
        "show": "explain a claim or a figure and draw it",
        "table": "tab:theory-summary and tab:recurrence-spectrum, each cell with the check behind it",
    }
    for name, text in about.items():
        action = actions.add_parser(name, help=text, description=text)
        add_common_arguments(action, out="results/theory")
        if name == "verify":
            action.add_argument("names", nargs="*", metavar="NAME", help="labels, or their beginnings; none: all")
            action.add_argument("--fresh", action="store_true", help="do not resume an interrupted run")
        if name == "show":
            action.add_argument("name", metavar="NAME", help="label of a claim or of a figure")
        if name in ("verify", "table"):
            action.add_argument("--effort", type=float, default=1.0, help="scales the number of cases (default: 1)")


def run_command(args: argparse.Namespace) -> int:
    """Run one action; its exit status."""
    if args.device not in ("auto", "cpu"):
        raise SystemExit(f"--device {args.device}: the theory runs on the CPU")
    if args.seed:
        raise SystemExit(f"--seed {args.seed}: the checks draw the same cases every time; more of them: --effort")
    load_claims()
    try:
        return {"list": _list, "verify": _verify, "show": _show, "table": _table}[args.action](args)
    except ValueError as error:
        print(f"ckda theory {args.action}: {error}", file=sys.stderr)
        return 2


def _effort(args: argparse.Namespace) -> float:
    return SMOKE_EFFORT if args.smoke else args.effort


# list


def _list(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([{"label": c.label, "statement": c.statement, "check": _where(c)} for c in CLAIMS.values()]))
        return 0
    width = max(map(len, CLAIMS))
    for claim in CLAIMS.values():
        print(f"{claim.label:<{width}}  {claim.statement}")
    return 0


def _where(claim: Claim) -> str:
    return f"{claim.check.__module__}.{claim.check.__name__}"


# verify


def _verify(args: argparse.Namespace) -> int:
    chosen, effort, out = select(args.names, CLAIMS), _effort(args), Path(args.out)
    partial = out / "verify.partial.json"
    done = {} if args.fresh else _resumable(partial, effort)
    kept: list[Record] = []
    here = environment()
    with _progress(len(chosen), quiet=args.json) as show:

        def report(record: Record) -> None:
            kept.append(record)
            write_json(partial, {"environment": here, "effort": effort, "claims": kept})
            show(record)

        records = verify(chosen, CLAIMS, effort, done, report)
    partial.unlink(missing_ok=True)
    result = _result(records, effort)
    write_json(out / ("verify.json" if not args.names else "verify-some.json"), result)
    if args.json:
        print(json.dumps(result))
    return 0 if passed(records) else 1


def _result(records: list[Record], effort: float) -> dict[str, Any]:
    counts = {status: sum(r["status"] == status for r in records) for status in ("verified", "refuted", "broken")}
    seconds = round(sum(record["seconds"] for record in records), 1)
    return {"environment": environment(), "effort": effort, "seconds": seconds, **counts, "claims": records}


def _resumable(partial: Path, effort: float) -> dict[str, Record]:
    """Records of an interrupted run of the same code at the same effort."""
    if not partial.exists():
        return {}
    before = read_json(partial)
    commit = before["environment"]["commit"]
    same = before["effort"] == effort and commit == environment()["commit"] and not str(commit).endswith("+")
    return {record["label"]: record for record in before["claims"]} if same else {}


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """A bar with ETA on standard error, and one line per claim on standard output (standard error with --json)."""
    console = Console(stderr=True, emoji=False)
    lines = Console(stderr=quiet, highlight=False, soft_wrap=True, emoji=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking", total=total)

        def report(record: Record) -> None:
            lines.print(_line(record), markup=False)
            bar.update(task, advance=1, description=record["label"])

        yield report


def _line(record: Record) -> str:
    head = f"{record['status']:<8}  {record['seconds']:7.1f} s  {record['label']}: {record['statement']}"
    if record["status"] != "verified":
        return f"{head}\n{record['error']}"
    margin = "" if record["margin"] is None else f", margin {record['margin']:.3g}"
    note = f"; {record['note']}" if record["note"] else ""
    return f"{head}\n{'':22}{record['kind']}, {record['cases']} cases{margin}{note}"


# show


def _show(args: argparse.Namespace) -> int:
    name = args.name
    found = select([name], CLAIMS) if name not in DRAWINGS or name in CLAIMS else []
    picture = _draw(name, Path(args.out))
    if args.json:
        described = [{"label": x, "statement": CLAIMS[x].statement, "text": _explain(CLAIMS[x])} for x in found]
        print(json.dumps({"name": name, "claims": described, "picture": picture and str(picture)}))
        return 0
    if not found:
        print(f"{name}\n\n{inspect.getdoc(DRAWINGS[name])}\n")
    for label in found:
        print(f"{label}: {CLAIMS[label].statement}\n\n{_explain(CLAIMS[label])}\n")
    print(f"drawn: {picture}" if picture else "there is no drawing of this one")
    return 0


def _draw(name: str, out: Path) -> Path | None:
    """The picture of a label, or of the label it is part of."""
    for label in (name, name.split("/")[0]):
        if label in DRAWINGS:
            path = out / f"{label.replace(':', '_').replace('/', '_')}.png"
            import matplotlib

            matplotlib.use("Agg")
            DRAWINGS[label](path)
            return path
    return None


def _explain(claim: Claim) -> str:
    """What is checked, where it stands, and the constructions it takes (its arguments that are functions)."""
    parts = [inspect.getdoc(claim.check) or "", f"checked by {_where(claim)}"]
    for parameter in inspect.signature(claim.check).parameters.values():
        made = parameter.default
        if inspect.isfunction(made) and made.__doc__:
            parts.append(f"built by {made.__module__}.{made.__name__}:\n{inspect.getdoc(made)}")
    return "\n\n".join(parts)


# table


def _table(args: argparse.Namespace) -> int:
    out, effort = Path(args.out), _effort(args)
    records = _known(out / "verify.json")
    needed = [
        label for label in tables.labels(list(tables.TABLES.values())) if label in CLAIMS and label not in records
    ]
    if needed:
        print(f"running {len(needed)} checks that {out / 'verify.json'} does not hold", file=sys.stderr)
        with _progress(len(needed), quiet=True) as report:
            records |= {r["label"]: r for r in verify(needed, CLAIMS, effort, report=report)}
    shown = [tables.markdown(table, records) for table in tables.TABLES.values()]
    data = {"environment": environment(), "tables": [tables.as_json(t, records) for t in tables.TABLES.values()]}
    write_json(out / "tables.json", data)
    write_text(out / "tables.md", "\n".join(shown))
    print(json.dumps(data) if args.json else "\n".join(shown))
    return 0


def _known(path: Path) -> dict[str, Record]:
    return {record["label"]: record for record in read_json(path)["claims"]} if path.exists() else {}
