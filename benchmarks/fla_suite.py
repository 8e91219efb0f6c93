"""flash-linear-attention's own tests of KDA, on its kernels or on ours.

python benchmarks/fla_suite.py CHECKOUT [--kernels ours|fla] [--jobs 8] [--one-config] [-k EXPRESSION] [--out results/compat]

CHECKOUT is a checkout of fla-org/flash-linear-attention: the tests are not in its wheels. `ours` puts the functions of
ckda.compat.fla where tests/ops/test_kda.py looks for FLA's, and changes nothing else: tests, tolerances and references stay FLA's.
The tests are dealt to --jobs processes. FLA times every configuration of a kernel for every shape; --one-config takes the first
of each instead, which changes no result but for rounding. Counts and the names of what failed go to fla_suite_{kernels}.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ckda.record import environment, write_json

TESTS = "tests/ops/test_kda.py"
#: where the tests find FLA's functions: module -> names
PLACES = {
    "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda"),
    "fla.ops.kda.fused_recurrent": ("fused_recurrent_kda_fwd",),
    "fla.ops.kda.gate": ("fused_kda_gate",),
}


class Counts:
    """A pytest plugin: takes every jobs-th test, and keeps how each ended."""

    def __init__(self, job: int, jobs: int):
        self.job, self.jobs = job, jobs
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = items[self.job :: self.jobs]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.split("::", 1)[1]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = report.outcome


def replace_functions() -> None:
    """Our functions in the places of FLA's."""
    from importlib import import_module

    from ckda.compat import fla as ours

    for module, names in PLACES.items():
        for name in names:
            setattr(import_module(module), name, getattr(ours, name))


def on_the_cpu() -> None:
    """Where there is no GPU, FLA's tests name one all the same: our functions, which need none, are tested on the CPU."""
    import torch
    from fla import utils

    if not torch.cuda.is_available():
        utils.device, utils.device_torch_lib = "cpu", torch.cpu


def first_configuration_only() -> None:
    """Triton's autotuner without its timing."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def made(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        make(self, fn, arg_names, configs[:1], *rest, **options)

    Autotuner.__init__ = made


def run_job(args: argparse.Namespace, job: int) -> None:
    """This process's share of the tests; the outcomes go to standard output as the last line."""
    import pytest

    os.chdir(args.checkout)
    sys.path.insert(0, str(args.checkout))
    if args.one_config:
        first_configuration_only()
    if args.kernels == "ours":
        on_the_cpu()
        replace_functions()
    counts = Counts(job, args.jobs)
    chosen = ["-k", args.k] if args.k else []
    pytest.main([TESTS, "-q", "-x" if args.first else "-q", "--tb=short", "-p", "no:cacheprovider", *chosen], [counts])
    print("\n" + json.dumps(counts.outcomes))


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every job as a process of its own."""
    start = time.monotonic()
    again = [sys.executable, __file__, *sys.argv[1:]]
    jobs = [subprocess.Popen([*again, "--job", str(i)], stdout=subprocess.PIPE, text=True) for i in range(args.jobs)]
    outcomes: dict[str, str] = {}
    for job in jobs:
        text, _ = job.communicate()
        body, _, last = text.rstrip().rpartition("\n")
        outcomes |= json.loads(last)
        if '"failed"' in last:
            print(body)
    counts = {kind: sum(x == kind for x in outcomes.values()) for kind in ("passed", "failed", "skipped")}
    return {
        "kernels": args.kernels,
        "tests": TESTS,
        "checkout": _commit(args.checkout),
        "one_config": args.one_config,
        "counts": counts,
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(time.monotonic() - start, 1),
    }


def _commit(checkout: Path) -> str | None:
    """The checkout's commit, from git or from a file COMMIT beside its README."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text().strip()
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda text: Path(text).resolve())
    parser.add_argument("--kernels", choices=("ours", "fla"), default="ours")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one-config", action="store_true")
    parser.add_argument("-k", help="pytest's choice of tests")
    parser.add_argument("--first", action="store_true", help="stop a process at its first failure")
    parser.add_argument("--out", type=lambda text: Path(text).resolve())
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.checkout / TESTS).is_file():
        parser.error(f"{args.checkout} has no {TESTS}; it must be a checkout of fla-org/flash-linear-attention")
    if args.job is not None:
        run_job(args, args.job)
        return 0
    record = run_all(args)
    if args.out is not None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(write_json(args.out / f"fla_suite_{args.kernels}.json", record | {"environment": environment(device)}))
    print(f"{args.kernels}: {record['counts']} in {record['seconds']} s")
    return 1 if record["counts"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
