"""``ckda lm ladder --study NAME``: units of our own ladder until the time is over, resumed by unit; or records collected."""

import argparse
import fnmatch
import json
import math
import sys
from pathlib import Path
from typing import Any

from ckda.command import make_folder, pick_device
from ckda.lm.data import TokenStore
from ckda.lm.paired import collect
from ckda.lm.studies import best_settings, plan, study
from ckda.lm.tiny import tiny_tokens
from ckda.lm.units import Conditions, Unit, done_in, read_units, run_all

__all__ = ["chosen", "run_command"]


def chosen(args: argparse.Namespace) -> list[Unit]:
    """The units that the options ask for."""
    settings = best_settings(read_units([args.settings])) if args.settings else None
    budgets = None if args.budgets is None else tuple(args.budgets)
    units = study("toy" if args.smoke else args.study, settings, args.size, args.seeds, budgets)
    if args.only:
        patterns = args.only.split(",")
        units = [unit for unit in units if any(fnmatch.fnmatchcase(unit.name, pattern) for pattern in patterns)]
        if not units:
            raise ValueError(f"--only {args.only}: no unit of the study {args.study} is called so; --plan lists them")
    return units


def run_command(args: argparse.Namespace) -> int:
    """Plan, run or collect; status 3 where units are left."""
    if args.collect:
        return _collect(args)
    units = chosen(args)
    places = [path for path in (*(args.have or []), args.out) if Path(path).exists()]
    have = read_units(places)
    if args.plan:
        return _plan(args, units, have)
    out = make_folder(args.out)
    at = _conditions(args, out)
    _check_data(have, at)
    say = (lambda text: None) if args.json else (lambda text: print(text, file=sys.stderr, flush=True))
    file, left = run_all(units, at, out, have, args.time_limit, say)
    result = {"record": None if file is None else str(file), "done": len(units) - len(left), "left": left}
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['done']} of {len(units)} units are done"
            + (f"; {len(left)} are left: the same command goes on" if left else "")
        )
        if file is not None:
            print(f"in {file}")
    return 3 if left else 0


def _conditions(args: argparse.Namespace, out: Path) -> Conditions:
    device = pick_device(args.device)
    dtype = "bf16" if device == "cuda" else "fp32"
    if args.smoke:
        data = args.data or str(tiny_tokens(out / "tokens"))
        return Conditions(data, device, dtype=dtype, eval_tokens=512, look_sequences=1, look_sample=2, tests=2)
    if args.data is None:
        raise ValueError("name the folder of tokens with --data")
    return Conditions(args.data, device, dtype=dtype)


def _check_data(have: list[dict[str, Any]], at: Conditions) -> None:
    """Units of other tokens do not belong into one study."""
    own = [shard["sha256"] for shard in TokenStore(at.data).shards]
    for one in have:
        if one["data"]["train_sha256"] != own:
            raise ValueError(f"{one['unit']['name']} of --have or --out was trained on other tokens than {at.data}")


def _plan(args: argparse.Namespace, units: list[Unit], have: list[dict[str, Any]]) -> int:
    done = done_in(units, have)
    rows = plan(units, done)
    total = sum(row["seconds"] for row in rows)
    if args.json:
        print(json.dumps({"done": sorted(done), "units": rows, "seconds": round(total, 1)}))
        return 0
    spent = 0.0
    print(f"{'unit':<44} {'updates':>8} {'M tokens':>9} {'minutes':>8} {'in all':>7}")
    for row in rows:
        spent += row["seconds"]
        print(
            f"{row['unit']:<44} {row['updates']:>8} {row['tokens'] / 1e6:>9.1f} {row['seconds'] / 60:>8.2f} {spent / 60:>7.1f}"
        )
    calls = math.ceil(total / args.time_limit) if math.isfinite(args.time_limit) else 1
    print(
        f"{len(rows)} units left, {len(done)} done: about {total / 60:.0f} minutes of an H200, at least {calls} calls"
    )
    print("The minutes are estimates from the recorded speed of the 47M model (results/lm/profile.json).")
    return 0


def _collect(args: argparse.Namespace) -> int:
    """Merge records; a study of factors, of programs and the ladder itself each have a folder of their own."""
    out = make_folder(args.out)
    records = read_units([*args.collect, *([out / "units.json"] if (out / "units.json").is_file() else [])])
    written = collect(records, out)
    print(
        json.dumps([str(path) for path in written])
        if args.json
        else f"{len(records)} units in {out}: " + ", ".join(p.name for p in written)
    )
    return 0
