"""The one-layer models of periodic waveform continuation (app:waveform_continuation_details), at the paper's sizes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from ckda.layers.baselines import GRU, AttentionBlock
from ckda.layers.complex_kda import RANGES, ComplexKDA
from ckda.layers.delta_product import DeltaProduct
from ckda.ops.call import unit

__all__ = ["ARMS", "STARTS", "Continuer", "Deaf", "build", "fan", "wind"]

#: what is compared: the four range settings, DeltaProduct_2 as published, and without a forget gate from near reflections and from
#: the standard start, GRU, Transformer
ARMS = (*RANGES, "deltaproduct2-gated", "deltaproduct2", "deltaproduct2-standard", "gru", "transformer")

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

    Attributes:
        cue: frames that are looked at. After them Complex KDA takes silence for granted and reads its state by powers of one
            matrix (:meth:`_silent`), which a CPU does several times as fast; 0, the default: every frame is looked at.

    Example:
        >>> model = build("ckda")
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(1, 9, 64)).shape
        (182048, torch.Size([1, 9, 64]))
    """

    cue = 0

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
        if not trace and not self._by_powers(x):
            return self.decode(self.mixer(stream), stream)
        o = self._silent(stream) if self._by_powers(x) else self.mixer.read(stream)
        if not trace:
            return self.decode(self.mixer.write_out(o, stream), stream)
        seen = {"o": o}
        if hasattr(self.mixer, "matrices"):
            seen["A"] = self.mixer.matrices(self.blank())[0, 0]
        return self.decode(self.mixer.write_out(o, stream), stream), seen

    def _by_powers(self, x: Tensor) -> bool:
        return 0 < self.cue < x.shape[1] and isinstance(self.mixer, ComplexKDA)

    def _silent(self, stream: Tensor) -> Tensor:
        """The mixer's raw readout [B, T, H, V] where all frames after the cue are blank.

        With S the state after the cue, A the transition and q the query of a blank frame, the n-th of them reads
        ``S^T (A^T)^n q``, q of length K^-1/2 as in the operator. The vectors (A^T)^n q are the same for the whole batch; each
        doubling of n is one product.
        """
        mixer, blank, num = self.mixer, self.blank(), stream.shape[1] - self.cue
        heard = stream[:, : self.cue]
        state = mixer.prefill(heard)[1].state  # [B, H, K, V]
        power = mixer.matrices(blank)[0, 0].double().mT  # [H, K, K]
        query = unit(mixer.q_proj(blank).view(mixer.num_heads, mixer.head_dim)).double() * mixer.head_dim**-0.5
        read = power @ query.unsqueeze(-1)  # [H, K, n]
        while read.shape[-1] < num:
            read = torch.cat([read, power @ read], -1)
            power = power @ power
        read = read[..., :num].to(state.dtype)
        return torch.cat([mixer.read(heard), torch.einsum("hkt,bhkv->bthv", read, state)], 1)

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
    elif arm == "deltaproduct2-gated":
        mixer = DeltaProduct(WIDTH, HEADS, HEAD_DIM, num_updates=2, forget=True, output_gate="linear")
        mixer.v_proj = Deaf(WIDTH, 2 * HEADS * HEAD_DIM)
        _start_as_reflections(mixer)
    elif arm == "gru":
        mixer = GRU(WIDTH)
    elif arm == "transformer":
        return Continuer(AttentionBlock(WIDTH, HEADS, inner=WIDTH), residual=False, frame=frame)
    else:
        raise ValueError(f"there is no arm {arm!r}; there are {', '.join(ARMS)}")
    return Continuer(mixer, frame=frame)


@torch.no_grad()
def _start_as_reflections(mixer: DeltaProduct) -> None:
    """Whatever is heard, every learning rate is 1.998 and every forget gate .9999, as the published baseline starts."""
    mixer.b_proj.weight.zero_()
    mixer.b_proj.weight[:, -1] = math.log(0.999 / 0.001)
    mixer.a_proj.weight.zero_()
    mixer.A_log.copy_((-math.log(0.9999) / softplus(mixer.dt_bias)).log())


@torch.no_grad()
def wind(model: Continuer, period: int = 32, turns: tuple[int, ...] = (1, 2, 4, 8)) -> Continuer:
    """Start Complex KDA as a clock: in silence, the heads with the largest learning rates make these many turns a period.

    One turn a period tells all phases apart; the others tell them apart by more.

    Example:
        >>> model = wind(build("ckda"))
        >>> A = model.mixer.matrices(model.blank())[0, 0]
        >>> turns = torch.linalg.eigvals(A).angle().abs() * 32 / (2 * torch.pi)
        >>> [bool(((turns - n).abs() < 0.1).any()) for n in (1, 2, 4, 8, 3)]
        [True, True, True, True, False]
    """
    _need_rotations(model)
    rates = model.mixer.b_proj(model.blank())[0, 0]
    lead = rates.argsort(descending=True)[: len(turns)].sort().values.tolist()
    for head, number in zip(lead, turns, strict=True):
        _turn(model, head, number / period)
    return model


@torch.no_grad()
def fan(model: Continuer) -> Continuer:
    """Start every head of Complex KDA as a clock of its own rate; the start knows no period.

    The range from no turn to half a turn a frame is cut into as many equal parts as there are heads, and each head draws its rate
    from one of them. Without it the keys are random directions, half of whose energy lies on negative gates: a quarter turn a
    frame for every head (eq:kda_alpha_rotation), which is a whole number of turns in four frames and tells few phases apart.

    Example:
        >>> model = fan(build("ckda"))
        >>> values = torch.linalg.eigvals(model.mixer.matrices(model.blank())[0, 0])  # one non-real pair a head
        >>> turns = torch.where(values.imag > 1e-4, values.angle(), 0).amax(-1) / (2 * torch.pi)
        >>> len(set((turns * 1000).int().tolist())) == model.mixer.num_heads
        True
    """
    _need_rotations(model)
    heads = model.mixer.num_heads
    rates = (torch.randperm(heads) + torch.rand(heads)) / (2 * heads)
    for head, rate in enumerate(rates.tolist()):
        _turn(model, head, rate)
    return model


def _need_rotations(model: Continuer) -> None:
    mixer = model.mixer
    if getattr(mixer, "gate", None) != "signed" or mixer.beta_range != 2:
        raise ValueError("only Complex KDA can start as a clock; it takes gates in [-1, 1] and learning rates up to 2")


def _turn(model: Continuer, head: int, rate: float) -> None:
    """In silence this head makes `rate` turns a frame.

    It is given beta near 2 and, on two coordinates, gates near -1 and 1 with the key (cos a, sin a) on them: two reflections,
    hence the rotation by 2a (thm:complex_eigenvalues). Only what a blank input meets is set, everything trains on, and no
    parameter is added.
    """
    mixer, a = model.mixer, math.pi * rate
    K = mixer.head_dim
    near_one = 2 * math.atanh(1 - 1e-3)  # |alpha| about exp(-1e-3), the slowest of the standard start
    rows = slice(head * K, (head + 1) * K)
    key = mixer.k_proj.weight[rows, -1]
    size = float(key.norm())
    key.zero_()
    key[0], key[1] = size * math.cos(a), size * math.sin(a)
    mixer.dt_bias[rows][:2] = torch.tensor([-near_one, near_one])
    mixer.f_proj[1].weight[head * K : head * K + 2] *= 0.1
    mixer.b_proj.bias[head] = 5.0 - mixer.b_proj.weight[head, -1]


#: how Complex KDA may start besides as its layer is made
STARTS: dict[str, Callable[[Continuer], Continuer]] = {"clock": wind, "fan": fan}
