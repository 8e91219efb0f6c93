"""``ckda lm params``: the ladder's parameter totals beside the paper's."""

import argparse
import json

from ckda.command import make_folder
from ckda.models.ladder import Total, parameter_table, totals
from ckda.record import write_json

__all__ = ["run", "run_command"]


def run() -> list[Total]:
    """Every size and arm: parameters counted on the model, and what the paper prints."""
    return totals()


def run_command(args: argparse.Namespace) -> int:
    """Count, write, print."""
    out = make_folder(args.out)
    rows = [total._asdict() for total in run()]
    write_json(out / "params.json", {"what": "ckda lm params", "totals": rows})
    print(json.dumps(rows) if args.json else parameter_table())
    return 0
