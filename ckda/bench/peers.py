"""Who is timed beside us, each with its inputs prepared outside of what is timed."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckda.bench import cudnn
from ckda.bench.options import Shape
from ckda.ops import complex_kda

__all__ = ["REGIMES", "Bound", "Peer", "compiled", "given_inputs", "inputs", "label", "leaves", "legend", "peers"]

Call = dict[str, Any]
Runner = Callable[[Call], Tensor]

GAUGE = "ckda over fla (signs absorbed)"  #: the paper's gauge over FLA's KDA
REGIMES = (-2.5, -0.03)  #: means of log|alpha|: state that is forgotten at once, and state that is kept


class Bound(NamedTuple):
    """What is timed: a peer on inputs that are ready."""

    forward: Callable[[], Tensor]  #: o, without a graph
    both: Callable[[], Sequence[Tensor | None]]  #: the gradients of the call's leaves, from do


class Peer(NamedTuple):
    """A way to run the operator."""

    name: str
    draw: Callable[[Shape, str, torch.dtype, int], Call]  #: its arguments, from shape, device, dtype and seed
    bind: Callable[[Call, Tensor], Bound]  #: from the arguments and do
    same: bool = True  #: whether it computes the operator, so that it is checked against float64
    foreign: bool = False  #: whether its kernels are others': then it is timed even where it is inaccurate, and says so
    inaccurate: str | None = None  #: what the check found, in words

    def row(self, shape: Shape) -> dict[str, Any]:
        """What a record says of it at a shape before it is timed."""
        row: dict[str, Any] = {"peer": self.name, "shape": shape._asdict()}
        return row if self.inaccurate is None else row | {"inaccurate": self.inaccurate}


def label(row: dict[str, Any]) -> str:
    """How a record's row is called where it is shown: one that is inaccurate never goes without these words.

    Example:
        >>> label({"peer": "cudnn kda"}), label({"peer": "cudnn kda", "inaccurate": "inaccurate: dg 2.4e-02"})
        ('cudnn kda', 'cudnn kda (inaccurate: dg 2.4e-02)')
    """
    return f"{row['peer']} ({row['inaccurate']})" if row.get("inaccurate") else row["peer"]


#: what figures call a peer
_NAMES = {
    "ckda": "Complex KDA, ours",
    "kda": "KDA, ours",
    "fla kda": "KDA, FLA",
    "fla kda, intermediates kept": "KDA, FLA, intermediates kept",
    "fla deltaproduct2": "DeltaProduct\u2082, FLA",
    GAUGE: "Complex KDA over FLA, signs absorbed",
    f"{GAUGE}, not compiled": "the same without torch.compile",
}


def legend(row: dict[str, Any]) -> str:
    """How a record's row is called in a figure.

    Example:
        >>> legend({"peer": "ckda"}), legend({"peer": "fla kda", "inaccurate": "inaccurate: dg 2.4e-02"})
        ('Complex KDA, ours', 'KDA, FLA (inaccurate: dg 2.4e-02)')
    """
    name = row["peer"].replace("given gates of mean", "mean log|alpha|").replace("cudnn kda", "KDA, cuDNN")
    name = f"KDA, ours{name.removeprefix('kda')}" if name.startswith("kda,") else name
    return label(row | {"peer": _NAMES.get(name, name)})


def leaves(call: Call) -> list[Tensor]:
    """The tensors of a call that want a gradient."""
    return [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]


# Inputs -------------------------------------------------------------------------------------------------------------------


def _normal(device: str, seed: int) -> Callable[..., Tensor]:
    random = torch.Generator(device).manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=random, device=device)


def inputs(shape: Shape, device: str, dtype: torch.dtype, seed: int, gate: str = "signed") -> Call:
    """The raw projections of a layer, gates of both signs and long memory, as leaves."""
    normal = _normal(device, seed)
    B, T, H, D = shape
    call: Call = {name: normal(B, T, H, D).to(dtype).requires_grad_() for name in ("q", "k", "v")}
    call["g"] = (3 + 2 * normal(B, T, H, D)).to(dtype).requires_grad_()
    call["beta"] = normal(B, T, H).to(dtype).requires_grad_()
    call["A_log"] = torch.zeros(H, device=device).requires_grad_()
    call["dt_bias"] = normal(H * D).requires_grad_()
    return call | {"gate": gate, "beta_range": 2 if gate == "signed" else 1, "normalize_qk": True}


def _unsigned_inputs(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Call:
    return inputs(shape, device, dtype, seed, "sigmoid")


def given_inputs(mean: float) -> Callable[[Shape, str, torch.dtype, int], Call]:
    """What cuDNN's kernels take: unit keys, beta itself and log|alpha| of that mean, both in float32."""

    def draw(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Call:
        normal = _normal(device, seed)
        B, T, H, D = shape
        call: Call = {name: F.normalize(normal(B, T, H, D), dim=-1).to(dtype) for name in ("q", "k")}
        call["v"] = normal(B, T, H, D).to(dtype)
        call["g"] = 2 * mean * torch.special.ndtr(normal(B, T, H, D))
        call["beta"] = torch.special.ndtr(normal(B, T, H))
        return {name: x.requires_grad_() for name, x in call.items()}

    return draw


def _two_updates(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Call:
    """DeltaProduct_2's: two keys, values and learning rates a token, as two projections would leave them."""
    normal = _normal(device, seed)
    B, T, H, D = shape
    call: Call = {"q": normal(B, T, H, D), "k": normal(B, 2 * T, H, D), "v": normal(B, 2 * T, H, D)}
    call["beta"] = 2 * normal(B, 2 * T, H).sigmoid()
    return {name: x.to(dtype).requires_grad_() for name, x in call.items()}


# Functions ----------------------------------------------------------------------------------------------------------------


def _ours(backend: str) -> Runner:
    return lambda call: complex_kda(**call, backend=backend)[0]


def _fla_kda(keep: bool) -> Runner:
    """FLA's chunk_kda with the bounded gate in the kernel; `keep` stores intermediates instead of recomputing them."""

    def run(call: Call) -> Tensor:
        from fla.ops.kda import chunk_kda

        return chunk_kda(
            q=call["q"],
            k=call["k"],
            v=call["v"],
            g=call["g"],
            beta=call["beta"].float().sigmoid(),
            A_log=call["A_log"],
            dt_bias=call["dt_bias"],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
            disable_recompute=keep,
        )[0]

    return run


def _fla_delta_product(call: Call) -> Tensor:
    """FLA's DeltaProduct_2 without a gate."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    return chunk_gated_delta_product(**call, g=None, num_householder=2, use_qk_l2norm_in_kernel=True)[0]


def _autograd(run: Runner) -> Callable[[Call, Tensor], Bound]:
    """A function with a gradient of its own."""

    def bind(call: Call, do: Tensor) -> Bound:
        used = leaves(call)

        def forward() -> Tensor:
            with torch.no_grad():
                return run(call)

        return Bound(forward, lambda: torch.autograd.grad(run(call), used, do, allow_unused=True))

    return bind


def compiled(run: Runner, **options: Any) -> Callable[[Call, Tensor], Bound]:
    """The same under torch.compile, as the paper times every row; each shape is compiled by itself."""

    def bind(call: Call, do: Tensor) -> Bound:
        torch.compiler.reset()
        return _autograd(torch.compile(run, dynamic=False, **options))(call, do)

    return bind


# The list -----------------------------------------------------------------------------------------------------------------


def peers(
    device: str, wanted: list[str] | None, folder: Path | None = None, throughput: bool = False, **options: Any
) -> list[Peer]:
    """Ours first; flash-linear-attention's where it can be imported; cuDNN's from a folder. With `throughput`, those of the
    paper's figure, compiled with these options of torch.compile, and the gauge as it is too."""
    own = _ours("triton" if device == "cuda" else "chunked")
    has_fla = device == "cuda" and find_spec("fla") is not None
    bind = (lambda run: compiled(run, **options)) if throughput else _autograd
    found = [Peer("ckda", inputs, bind(own)), Peer("kda", _unsigned_inputs, bind(own))]
    if has_fla:
        found += [
            Peer("fla kda", _unsigned_inputs, bind(_fla_kda(keep=False)), foreign=True),
            Peer("fla kda, intermediates kept", _unsigned_inputs, bind(_fla_kda(keep=True)), foreign=True),
            Peer("fla deltaproduct2", _two_updates, bind(_fla_delta_product), same=False, foreign=True),
            Peer(GAUGE, inputs, bind(_ours("fla")), foreign=True),
        ]
        if throughput:  # inductor may not be able to compile it
            found.append(Peer(f"{GAUGE}, not compiled", inputs, _autograd(_ours("fla")), foreign=True))
        else:
            found.append(Peer("ckda over fla, compiled", inputs, compiled(_ours("fla")), foreign=True))
    if folder is not None:
        launches = cudnn.load(folder)
        for mean in REGIMES:
            draw = given_inputs(mean)
            found += [
                Peer(f"kda, given gates of mean {mean}", draw, _autograd(own)),
                Peer(f"cudnn kda, given gates of mean {mean}", draw, launches, foreign=True),
            ]
    if wanted:
        unknown = set(wanted) - {peer.name for peer in found}
        if unknown:
            hint = "" if folder else "; cuDNN's come with --cudnn FOLDER"
            hint += "" if has_fla else "; flash-linear-attention's need a GPU and the package fla-core"
            here = ", ".join(repr(peer.name) for peer in found)
            raise ValueError(f"--peer {', '.join(sorted(unknown))}: not here; present: {here}{hint}")
        found = [peer for peer in found if peer.name in wanted]
    return found
