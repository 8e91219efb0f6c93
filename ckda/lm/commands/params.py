"""``ckda lm params``: the ladder's parameter totals beside the paper's."""

import argparse
import json

from ckda.command import make_folder
from ckda.lm.models import config_of
from ckda.models.ladder import CONFIGS, Total, num_parameters, parameter_table, totals
from ckda.record import write_json

__all__ = ["run", "run_command"]


def run() -> list[Total]:
    """Every size and arm, the toy first: parameters counted on the model, and what the paper prints."""
    arms = CONFIGS["47M"].paper
    return [*(Total("tiny", arm, num_parameters(config_of(f"tiny:{arm}")), None) for arm in arms), *totals()]


def table(rows: list[Total]) -> str:
    """As text: the ladder's own table with the toy before it."""
    head, *rest = parameter_table().splitlines()
    toy = [f"{row.size:<9} {row.arm:<20} {row.parameters / 1e6:>9.2f} {'-':>9}" for row in rows if row.size == "tiny"]
    return "\n".join(["parameters in millions", head, *toy, *rest, "tiny: a toy for a CPU"])


def run_command(args: argparse.Namespace) -> int:
    """Count, write, print."""
    out, found = make_folder(args.out), run()
    rows = [total._asdict() for total in found]
    write_json(out / "params.json", {"what": "ckda lm params", "totals": rows})
    print(json.dumps(rows) if args.json else table(found))
    return 0
