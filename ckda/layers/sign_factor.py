"""Signs for a layer that was trained without them: KDA whose gates are multiplied by a factor from -1 to 1 that starts at 1."""

from typing import Any

import torch
from torch import Tensor, nn

from ckda.layers.complex_kda import ComplexKDA, Transitions, split, under
from ckda.layers.projections import Projections
from ckda.ops.call import unit
from ckda.ops.gate import EPS, Gate, evaluate_gate, sigmoid

__all__ = ["START", "SignFactor", "sign_factor", "sign_projection"]

#: b, where u stands at the start: near enough to zero that a fine-tuning can reach it
START = 0.5


class _AtMostOne(torch.autograd.Function):
    """min(ratio, 1). Above 1 the gradient passes where it asks for less: a gate at rest can always be set in motion."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ratio: Tensor) -> Tensor:
        return ratio.clamp(max=1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0] < 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (free,) = ctx.saved_tensors
        return torch.where(free | (dy > 0), dy, 0.0)


def sign_factor(u: Tensor, start: float = START) -> Gate:
    """s(u) from -1 to 1 with s(start) = 1 exactly, as (log|s|, sign).

    ``|s| = 1 - (1 - eps)(1 - min(1, |tanh(u/2)| / tanh(start/2)))``, eps = e^-5, with the sign of u: the signed gate of the paper
    (app:gauge), stretched such that it reaches 1 at a finite u and stays there. With tanh alone a layer that starts at u = 8
    would lose half of its memory in a thousand tokens. Through zero s jumps from eps to -eps, and its slope is the same on
    both sides, so that gradients carry a gate from one sign to the other.

    Example:
        >>> gate = sign_factor(torch.tensor([0.5, 9.0, 0.0, -0.5]))
        >>> gate.alpha()
        tensor([ 1.0000,  1.0000,  0.0067, -1.0000])
        >>> float(gate.log[0])
        0.0
    """
    u = u if u.dtype == torch.float64 else u.float()
    # |tanh| of the start by the same function in the same dtype: at the start the ratio is one number over itself
    top = torch.tanh(torch.full((), start / 2, dtype=u.dtype, device=u.device))
    ratio = _AtMostOne.apply(torch.tanh(u / 2).abs() / top)
    return Gate(torch.log1p((1 - EPS) * (ratio - 1)), 1 - 2 * (u < 0).to(torch.int8))


def sign_projection(d: int, num_gates: int) -> nn.Linear:
    """From x [..., d] to u = w x + b, one a gate, with w = 0 and b = START.

    Example:
        >>> sign_projection(8, 3)(torch.randn(8))
        tensor([0.5000, 0.5000, 0.5000], grad_fn=<ViewBackward0>)
    """
    projection = nn.Linear(d, num_gates)
    reset(projection)
    return projection


@torch.no_grad()
def reset(projection: nn.Linear) -> None:
    """w = 0, b = START."""
    projection.weight.zero_()
    projection.bias.fill_(START)


class SignFactor(ComplexKDA):
    """KDA with ``alpha = alpha_KDA * s(w x + b)``, which is KDA at the start (w = 0, s = 1) and has Complex KDA's ranges after.

    Where beta reaches only 1, signs alone rotate nothing; so beta gets a factor too, ``beta = beta_KDA * 2 sigmoid(t x)``, t = 0
    at the start. :func:`ckda.convert` makes this layer from a trained one.

    Args:
        hidden_size, num_heads, head_dim: d, H and K.
        gate: of alpha_KDA: "sigmoid" or "softplus". beta_range: of beta_KDA: 1 or 2.
        options: of :class:`ckda.ComplexKDA`, without gate_init and beta_init.

    Example:
        >>> kda = ComplexKDA(32, 2, 8, gate="softplus", beta_range=1)
        >>> layer, x = SignFactor(32, 2, 8, gate="softplus"), torch.randn(1, 100, 32)
        >>> missing, _ = layer.load_state_dict(kda.state_dict(), strict=False)
        >>> missing, torch.allclose(layer(x), kda(x), atol=1e-6)
        (['s_proj.weight', 's_proj.bias', 't_proj.weight'], True)
    """

    _readers = (*ComplexKDA._readers, "s_proj", "t_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        gate: str = "sigmoid",
        beta_range: int = 1,
        **options: Any,
    ):
        if gate == "signed":
            raise ValueError("gate is 'signed'; it must be 'sigmoid' or 'softplus': the factor brings the signs")
        for name in ("gate_init", "beta_init"):
            if name in options:
                raise ValueError(f"{name} is {options[name]!r}; SignFactor starts as the layer without signs does")
        super().__init__(hidden_size, num_heads, head_dim, gate=gate, beta_range=beta_range, **options)

    def _make_gates(self) -> None:
        super()._make_gates()
        d, HV = self.hidden_size, self.num_v_heads
        self.s_proj = sign_projection(d, HV * self.head_dim)
        self.t_proj = nn.Linear(d, HV, bias=False) if self.beta_range == 1 else None

    @torch.no_grad()
    def init_gates(self) -> None:
        """KDA's gates, and factors of one."""
        if self.o_proj.weight.is_meta:
            return
        super().init_gates()
        reset(self.s_proj)
        if self.t_proj is not None:
            self.t_proj.weight.zero_()

    def _gates(self, project: Projections, dtype: torch.dtype, lead: torch.Size) -> dict[str, Tensor]:
        raw = super()._gates(project, dtype, lead)
        log = evaluate_gate(self.gate, raw["g"], self.A_log, self.dt_bias).log
        factor = self._factor(project, lead)
        assert factor.sign is not None
        beta = self.beta_range * sigmoid(raw["beta"].to(log.dtype))
        if self.t_proj is not None:
            beta = beta * 2 * sigmoid(under(lead, project(self.t_proj)).to(log.dtype))
        return {"g": log + factor.log, "sign": factor.sign, "beta": beta}

    def _project(
        self, x: Tensor, past: dict[str, Tensor] | None, *rest: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        y, new_past = super()._project(x, past, *rest)
        mask = rest[1] if len(rest) > 1 else None
        if mask is not None:
            y["sign"] = y["sign"].masked_fill(mask[..., None, None] == 0, 1)
        return y, new_past

    def _options(self) -> dict[str, Any]:
        return {"normalize_qk": True}

    def _still(self) -> float:
        return 0.0

    def transitions(self, x: Tensor) -> Transitions:
        """What the layer does to its state on x [B, T, d], for looking at."""
        y, _ = self._project(x, {})
        k = unit(y["k"]).repeat_interleave(self.num_v_heads // self.num_heads, dim=2)
        return Transitions(Gate(y["g"], y["sign"]).alpha(), k, y["beta"])

    def factors(self, x: Tensor) -> Tensor:
        """s [B, T, HV, K] on x [B, T, d], for looking at."""
        return self._factor(Projections(x), x.shape[:2]).alpha()

    def _factor(self, project: Projections, lead: torch.Size) -> Gate:
        return sign_factor(split(lead, project(self.s_proj), self.head_dim))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, with a sign factor"
