"""The one-layer models of periodic waveform continuation (app:waveform_continuation_details), at the paper's sizes."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ckda.layers.baselines import GRU, AttentionBlock
from ckda.layers.complex_kda import RANGES, ComplexKDA
from ckda.layers.delta_product import DeltaProduct

__all__ = ["ARMS", "Continuer", "Deaf", "build", "wind"]

#: what is compared: the four range settings, DeltaProduct_2 from near reflections and from the standard start, GRU, Transformer
ARMS = (*RANGES, "deltaproduct2", "deltaproduct2-standard", "gru", "transformer")

WIDTH, HEADS, HEAD_DIM, INNER = 128, 8, 16, 512


class Deaf(nn.Linear):
    """A linear map without bias that does not hear its input's last coordinate: that column is zero and stays zero.

    With a constant 1 there, a blank input writes nothing into the state, while gates, keys and queries still see the 1.

    Example:
        >>> Deaf(3, 2)(torch.tensor([0.0, 0.0, 1.0])).tolist()
        [0.0, 0.0]
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        with torch.no_grad():
            self.weight[:, -1] = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; the dead column gets a zero gradient."""
        return linear(x[..., :-1], self.weight[:, :-1])


class Continuer(nn.Module):
    """Frames to 127 coordinates and a constant 1, one mixer, a two-layer GELU readout back to frames; no norm outside.

    Args:
        mixer: [B, T, width] -> [B, T, width]. residual: add the mixer's input to its output.
        frame: samples a frame.

    Example:
        >>> model = build("ckda")
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(1, 9, 64)).shape
        (182048, torch.Size([1, 9, 64]))
    """

    def __init__(
        self, mixer: nn.Module, residual: bool = True, frame: int = 64, width: int = WIDTH, inner: int = INNER
    ):
        super().__init__()
        self.frame, self.residual = frame, residual
        self.embed = nn.Linear(frame, width - 1, bias=False)
        self.mixer: Any = mixer
        self.readout = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, frame))

    def stream(self, x: Tensor) -> Tensor:
        """What the mixer reads, [B, T, frame] -> [B, T, width]; the last coordinate is 1."""
        return torch.cat([self.embed(x), x.new_ones(*x.shape[:-1], 1)], -1)

    def forward(self, x: Tensor, trace: bool = False) -> Any:
        """x [B, T, frame] -> [B, T, frame]; with `trace` also what a penalty may look at:

        o     [B, T, H, V] the mixer's raw readout, before norm and projection
        A     [H, K, K] its transition on blank input (only of mixers that have one)
        """
        stream = self.stream(x)
        if not trace:
            return self.decode(self.mixer(stream), stream)
        o = self.mixer.read(stream)
        seen = {"o": o}
        if hasattr(self.mixer, "matrices"):
            seen["A"] = self.mixer.matrices(self.blank())[0, 0]
        return self.decode(self.mixer.write_out(o, stream), stream), seen

    def decode(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The mixer's output and its input [..., width] -> frames."""
        return self.readout(stream + mixed if self.residual else mixed)

    def blank(self) -> Tensor:
        """[1, 1, width] the stream of one blank frame."""
        return self.stream(self.embed.weight.new_zeros(1, 1, self.frame))

    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        """Muon takes the matrices inside the mixer; AdamW takes the rest."""
        return parameter.dim() == 2 and name.startswith("mixer")


def build(arm: str, frame: int = 64) -> Continuer:
    """The model of this arm. Signed gates start with gate spread, learning rates up to 2 with beta spread (app:initialization).

    Example:
        >>> {arm: sum(p.numel() for p in build(arm).parameters()) for arm in ("kda", "gru", "transformer")}
        {'kda': 182040, 'gru': 206080, 'transformer': 206592}
    """
    if arm in RANGES:
        gate, beta_range = RANGES[arm]
        mixer: Any = ComplexKDA(
            WIDTH,
            HEADS,
            HEAD_DIM,
            gate=gate,
            beta_range=beta_range,
            gate_init="spread" if gate == "signed" else "standard",
            beta_init="spread" if beta_range == 2 else "standard",
            conv_size=0,
            activate=(),
        )
        mixer.v_proj = Deaf(WIDTH, HEADS * HEAD_DIM)
    elif arm in ("deltaproduct2", "deltaproduct2-standard"):
        mixer = DeltaProduct(WIDTH, HEADS, HEAD_DIM, num_updates=2, reflection=arm == "deltaproduct2")
        mixer.v_proj = Deaf(WIDTH, 2 * HEADS * HEAD_DIM)
    elif arm == "gru":
        mixer = GRU(WIDTH)
    elif arm == "transformer":
        return Continuer(AttentionBlock(WIDTH, HEADS, inner=WIDTH), residual=False, frame=frame)
    else:
        raise ValueError(f"there is no arm {arm!r}; there are {', '.join(ARMS)}")
    return Continuer(mixer, frame=frame)


@torch.no_grad()
def wind(model: Continuer, period: int = 32, turns: tuple[int, ...] = (1, 2, 4, 8)) -> Continuer:
    """Start Complex KDA as a clock: in silence, the heads with the largest learning rates make these many turns a period.

    A head is given beta near 2 and, on two coordinates, gates near -1 and 1 with the key (cos a, sin a) on them: two
    reflections, hence the rotation by 2a (thm:complex_eigenvalues). Only what a blank input meets is set, everything trains
    on, and no parameter is added. One turn a period tells all phases apart; the others tell them apart by more.

    Example:
        >>> model = wind(build("ckda"))
        >>> A = model.mixer.matrices(model.blank())[0, 0]
        >>> turns = torch.linalg.eigvals(A).angle().abs() * 32 / (2 * torch.pi)
        >>> [bool(((turns - n).abs() < 0.1).any()) for n in (1, 2, 4, 8, 3)]
        [True, True, True, True, False]
    """
    mixer = model.mixer
    if getattr(mixer, "gate", None) != "signed" or mixer.beta_range != 2:
        raise ValueError("only Complex KDA can start as a clock; it takes gates in [-1, 1] and learning rates up to 2")
    K = mixer.head_dim
    near_one = 2 * math.atanh(1 - 1e-3)  # |alpha| about exp(-1e-3), the slowest of the standard start
    lead = mixer.b_proj(model.blank())[0, 0].argsort(descending=True)[: len(turns)].sort().values.tolist()
    for head, number in zip(lead, turns, strict=True):
        a = math.pi * number / period
        rows = slice(head * K, (head + 1) * K)
        key = mixer.k_proj.weight[rows, -1]
        size = float(key.norm())
        key.zero_()
        key[0], key[1] = size * math.cos(a), size * math.sin(a)
        mixer.dt_bias[rows][:2] = torch.tensor([-near_one, near_one])
        mixer.f_proj[1].weight[head * K : head * K + 2] *= 0.1
        mixer.b_proj.bias[head] = 5.0 - mixer.b_proj.weight[head, -1]
    return model
