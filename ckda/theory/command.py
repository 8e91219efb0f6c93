"""`ckda theory`: the paper's claims checked, explained and tabulated; groups and automata compiled to layers and run."""

import argparse
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ckda.command import CheckFailed, entries, make_folder, pick_device, plural
from ckda.groups import group, read_group
from ckda.record import environment, read_json, write_json, write_text
from ckda.theory import tables
from ckda.theory.claims import CLAIMS, Claim, Refuted, load_claims
from ckda.theory.figures import DRAWINGS
from ckda.theory.verify import STATUSES, Record, passed, plain, select, verify

if TYPE_CHECKING:
    from ckda.theory.compiler import Machine

__all__ = ["run_command"]

SMOKE_EFFORT = 0.05


def run_command(args: argparse.Namespace) -> int:
    """Run one action; its exit status."""
    actions = {"list": _list, "verify": _verify, "show": _show, "table": _table}
    if args.action in ("compile", "run", "verdict"):
        return {"compile": _compile, "run": _run, "verdict": _verdict}[args.action](args)
    load_claims()
    return actions[args.action](args)


# compile, run, verdict


def _compile(args: argparse.Namespace) -> int:
    """0: a machine was written; 1: none exists, or none is known (the sentence says which)."""
    from ckda.theory.compiler import Compile, NoRealisation, compile_machine

    out = make_folder(args.out)
    try:
        machine = compile_machine(Compile(args.source, args.letters, most_maps=args.most_maps, layers=args.layers))
    except NoRealisation as none:
        print(json.dumps({"answer": none.kind, "reason": str(none)}) if args.json else f"{none.kind}: {none}")
        return 1
    except Refuted as refuted:
        raise CheckFailed(f"the machine failed its own check, nothing is written: {refuted}") from refuted
    config = machine.config
    if not args.fresh:
        _refuse_another(out, machine)
    folder = machine.save(out)
    if args.json:
        shown = ("name", "kind", "theorem", "realisation", "layers", "heads", "beta", "lookup", "letters")
        print(json.dumps({key: config[key] for key in shown} | {"checked": machine.checked, "folder": str(folder)}))
        return 0
    print(f"{config['name']}: {config['realisation']}")
    known = config["theorem"] in config["realisation"]
    lines = ({} if known else {"theorem": config["theorem"]}) | {"beta": config["beta"], "lookup": config["lookup"]}
    lines["letters"] = ", ".join(f"{i} = {name}" for i, name in enumerate(config["letters"][:12]))
    lines |= {f"checked ({how})": text for how, text in machine.checked.items()}
    for name, text in lines.items():
        print(f"  {name}: {text}")
    print(f"written: {folder} (check it with: python {folder}/checker.py {folder}/certificate.json)")
    return 0


def _refuse_another(folder: Path, machine: "Machine") -> None:
    """A machine in that folder with another certificate is not replaced unasked."""
    from ckda.theory.compiler import certificate_text

    if not (folder / "machine.json").exists():
        return
    place = folder / "certificate.json"
    if not place.exists() or place.read_text() != certificate_text(machine.certificate):
        there = read_json(folder / "machine.json").get("name")
        raise ValueError(
            f"{folder} holds the machine {there}, another one; give another --out, or --fresh to write "
            f"{machine.config['name']} in its place"
        )


def _run(args: argparse.Namespace) -> int:
    from ckda.theory.compiler import Run, load, run

    machine = load(args.machine)
    word = _word(args.word, machine.config["letters"], machine.config["kind"] in ("dfa", "wfa"))
    device = "cpu" if args.exact else pick_device(args.device)
    answers = run(Run(machine, word, args.exact, device))
    named = {"group": "element", "action": "element", "dfa": "state, accepted", "wfa": "weight"}[machine.config["kind"]]
    how = "exact" if args.exact else f"operator, {device}"
    if args.json:
        print(json.dumps({"machine": machine.config["name"], "how": how, "word": word, named: plain(answers)}))
        return 0
    if not word:
        letters = ", ".join(f"{i} = {name}" for i, name in enumerate(machine.config["letters"][:12]))
        print(f"the word is empty, so there is no answer; letters: {letters}")
    elements = machine.config.get("elements")
    for letter, answer in zip(word, answers, strict=True):
        shown = f"{answer} = {elements[answer]}" if elements else answer
        print(f"{machine.config['letters'][letter]}: {shown}")
    return 0


def _word(text: str, letters: list[str], names_first: bool) -> list[int]:
    """Letters by number or by name, with spaces between; a word of one-letter names may be written without.

    Where a name is a number too, it means the name of an automaton's letter, and the number of a group's.
    """
    parts, names = text.split(), {name: i for i, name in enumerate(letters)}
    if len(parts) == 1 and parts[0] not in names and all(c in names for c in parts[0]):
        parts = list(parts[0])
    numbers = {str(i): i for i in range(len(letters))}
    known = numbers | names if names_first else names | numbers
    unknown = next((part for part in parts if part not in known), None)
    if unknown is not None:
        there = ", ".join(f"{i} = {name}" for i, name in enumerate(letters[:12]))
        raise ValueError(f"--word: {unknown!r} is no letter; there are {there}{' ...' if len(letters) > 12 else ''}")
    return [known[part] for part in parts]


def _verdict(args: argparse.Namespace) -> int:
    from ckda.theory.compiler import read
    from ckda.theory.verdicts import small_groups, verdict

    if not args.names and args.up_to is None:
        raise ValueError("name a group or a file, or give --up-to ORDER")
    if args.up_to is not None and not 1 <= args.up_to <= 63:
        raise ValueError(f"--up-to {args.up_to}: the list of groups holds the orders 1 to 63")
    out = make_folder(args.out) if args.up_to is not None else None
    groups = []
    for name, data in map(read, args.names):
        groups.append(group(name) if data is None else read_group(data, name).group)
    groups += [small.group() for small in small_groups() if small.order <= (args.up_to or 0)]
    rows, counts = [], dict.fromkeys(("tracked", "impossible", "undecided"), 0)
    for G in groups:
        found = verdict(G)
        counts[found.answer] += 1
        heads = found.layer.dimensions if found.layer else None
        rows.append({"group": G.name, "order": G.order, "answer": found.answer, "heads": heads, "reason": found.reason})
        if not args.json:
            print(found)
    result = {"environment": environment(), **counts, "groups": rows}
    if out is not None:
        write_json(out / "verdicts.json", result)
    print(json.dumps(result) if args.json else ", ".join(f"{n} {answer}" for answer, n in counts.items()))
    return 0


def _effort(args: argparse.Namespace) -> float:
    return SMOKE_EFFORT if args.smoke else args.effort


# list


def _list(args: argparse.Namespace) -> int:
    if args.json:
        keys = ("label", "statement", "behind")
        print(json.dumps([{k: getattr(c, k) for k in keys} | {"check": _where(c)} for c in CLAIMS.values()]))
        return 0
    print(entries([(claim.label, f"{claim.statement} [{claim.behind}]") for claim in CLAIMS.values()], indent=4))
    return 0


def _where(claim: Claim) -> str:
    return f"{claim.check.__module__}.{claim.check.__name__}"


# verify


def _verify(args: argparse.Namespace) -> int:
    chosen, effort, out = select(args.names, CLAIMS), _effort(args), make_folder(args.out)
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
    path = write_json(out / _record_name(args.names, effort), result)
    if args.json:
        print(json.dumps(result))
    else:
        print(_closing(result, path))
    return 0 if passed(records) else 1


def _record_name(names: list[str], effort: float) -> str:
    """Only a whole run at full effort is verify.json: a smaller one does not take its place."""
    return "verify-some.json" if names else "verify.json" if effort >= 1 else "verify-smoke.json"


def _closing(result: dict[str, Any], path: Path) -> str:
    """The last line: how many ended how, at which effort, and where it is written."""
    counts = ", ".join(f"{result[status]} {status}" for status in STATUSES if result[status])
    less = "" if result["effort"] >= 1 else f", at effort {result['effort']:g} of 1"
    return f"{plural(len(result['claims']), 'claim')}: {counts}{less}; {result['seconds']:.0f} s. Record: {path}"


def _result(records: list[Record], effort: float) -> dict[str, Any]:
    counts = {status: sum(r["status"] == status for r in records) for status in STATUSES}
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
    head = f"{record['status']:<12}  {record['seconds']:7.1f} s  {record['label']}: {record['statement']}"
    if record["status"] != "verified":
        return f"{head}\n{record['error']}"
    margin = "" if record["margin"] is None else f", margin {record['margin']:.3g}"
    note = f"; {record['note']}" if record["note"] else ""
    tried = f"{record['cases']} cases{margin}{note}"
    if record["effort"] < 1:  # what stands behind a claim is said of a full run
        return f"{head}\n{'':26}{tried}, at effort {record['effort']:g}; at effort 1: {record['behind']}"
    return f"{head}\n{'':26}{record['behind']}; {tried}"


# show


def _show(args: argparse.Namespace) -> int:
    name = args.name
    found = select([name], CLAIMS) if name not in DRAWINGS or name in CLAIMS else []
    picture = _draw(name, make_folder(args.out))
    if args.json:
        described = [{"label": x, "statement": CLAIMS[x].statement, "text": _explain(CLAIMS[x])} for x in found]
        print(json.dumps({"name": name, "claims": described, "picture": picture and str(picture)}))
        return 0
    if not found:
        text = inspect.getdoc(DRAWINGS[name]) or ""
        print(f"{text}\n" if text.startswith(name) else f"{name}\n\n{text}\n")
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
    out, effort = make_folder(args.out), _effort(args)
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
    return (
        0 if passed(records[label] for label in tables.labels(list(tables.TABLES.values())) if label in records) else 1
    )


def _known(path: Path) -> dict[str, Record]:
    return {record["label"]: record for record in read_json(path)["claims"]} if path.exists() else {}
