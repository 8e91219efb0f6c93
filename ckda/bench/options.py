"""What may be typed after ``ckda bench``; nothing heavy is imported, so that a wrong word is refused at once."""

import argparse
from pathlib import Path
from typing import NamedTuple

from ckda.command import Parser, add_common_arguments, positive

__all__ = ["Shape", "add_bench"]


class Shape(NamedTuple):
    """One problem: B sequences of T tokens, H heads of D channels."""

    B: int
    T: int
    H: int
    D: int

    def __str__(self) -> str:
        return f"B{self.B} x T{self.T}, {self.H} heads of {self.D}"


def add_bench(parser: Parser) -> None:
    """The options of ``ckda bench``."""
    add_common_arguments(parser, "runs/bench")
    add = parser.add_argument_group("what is measured").add_argument
    add("--peer", action="append", help="measure only this one; may be repeated")
    add("--shape", action="append", type=_shape, metavar="B,T,H,D", help="only this; may be repeated")
    add("--throughput", action="store_true", help="the paper's figure: tokens a second under torch.compile")
    add("--cudnn", type=Path, metavar="FOLDER", help="NVIDIA's kernels beside ours (benchmarks/cudnn_folder.py)")
    add(
        "--jobs",
        type=positive,
        default=1,
        help="on a GPU so many processes compile first: the rows of --sweep; else flash-linear-attention's configurations, each "
        "of which is then timed briefly (default: 1, its own way, minutes a shape)",
    )
    add("--sweep", action="store_true", help="what each change of a call costs beside the main one")
    add(
        "--host", action="store_true", help="what issuing a call costs the host, and the first call; also after --sweep"
    )
    add("--row", action="append", help="of --sweep, only the main row and this one; may be repeated")
    add("--dtype", default=None, choices=["bfloat16", "float16", "float32"], help="of q, k, v and g")
    add("--fresh", action="store_true", help="measure again what is in --out already")
    add("--plan", action="store_true", help="print how many seconds of a GPU it would take, and stop")


def _shape(text: str) -> Shape:
    try:
        B, T, H, D = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,T,H,D such as 4,8192,16,128") from error
    if min(B, T, H, D) < 1 or D > 256:
        raise argparse.ArgumentTypeError(f"{text!r}: all must be positive, and D at most 256")
    return Shape(B, T, H, D)
