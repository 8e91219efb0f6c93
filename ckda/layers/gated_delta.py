"""Delta-rule layers with other gates than Complex KDA's: a gate per head or none (GDN, DeltaNet), separate erase and write.

All of them are :class:`ckda.layers.ComplexKDA` but for what stands in `g` and `beta`, and run through the same operator.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ckda import transition
from ckda.layers.complex_kda import ComplexKDA, Transitions, split, under
from ckda.layers.projections import Projections
from ckda.ops.call import unit
from ckda.ops.gate import evaluate_gate, init_A_log, init_dt_bias, sigmoid

__all__ = ["GatedDeltaNet", "SeparateGates"]


class GatedDeltaNet(ComplexKDA):
    """GDN, ``A = alpha (I - beta k k^T)`` with one gate alpha in [0, 1] a head; without `forget` DeltaNet, alpha = 1.

    Args:
        hidden_size, num_heads, head_dim: d, H and K.
        forget: whether there is a forget gate, ``log alpha = -exp(A_log) softplus(a_proj(x) + dt_bias)``.
        beta_range: 1 or 2.
        options: num_v_heads, head_v_dim, conv_size, activate, output_gate, initial_state, norm_eps and backend of
            :class:`ckda.ComplexKDA`. The output gate "linear" has no bias here.

    Example:
        >>> layer = GatedDeltaNet(768, 12, 64, output_gate="linear")
        >>> sum(p.numel() for p in layer.parameters())  # 28 of these, and 342.33 M with the rest of the 340M table's model
        2976856
    """

    _readers = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
    linear_gate_bias = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        forget: bool = True,
        beta_range: int = 1,
        **options: Any,
    ):
        self.forget = forget
        for name in ("gate", "gate_init", "beta_init"):
            if name in options:
                raise ValueError(f"{name} is {options[name]!r}; {type(self).__name__} has no choice of it")
        super().__init__(hidden_size, num_heads, head_dim, gate="softplus", beta_range=beta_range, **options)

    def _num_rates(self) -> int:
        """How many learning rates a token has: one a value head."""
        return self.num_v_heads

    def _make_gates(self) -> None:
        d, HV = self.hidden_size, self.num_v_heads
        if self.forget:
            self.a_proj = nn.Linear(d, HV, bias=False)
            self.A_log = nn.Parameter(torch.empty(HV))
            self.dt_bias = nn.Parameter(torch.empty(HV))
        self._make_rate(d)

    def _make_rate(self, d: int) -> None:
        self.b_proj = nn.Linear(d, self._num_rates(), bias=False)

    @torch.no_grad()
    def init_gates(self) -> None:
        """Initialise the forget gate (app:initialization)."""
        if self.forget:
            self.A_log.copy_(init_A_log("softplus", self.num_v_heads))
            self.dt_bias.copy_(init_dt_bias("softplus", self.A_log, 1))

    def _log_alpha(self, project: Projections, dtype: torch.dtype, lead: torch.Size) -> Tensor:
        """log alpha [B, T, HV, K], in float32 at least: one number a head."""
        HV, K = self.num_v_heads, self.head_dim
        if not self.forget:
            return project.x.new_zeros(*lead, HV, K, dtype=dtype)
        log = evaluate_gate("softplus", split(lead, project(self.a_proj), 1), self.A_log, self.dt_bias).log
        return log.expand(*log.shape[:-1], K)

    def _gates(self, project: Projections, dtype: torch.dtype, lead: torch.Size) -> dict[str, Tensor]:
        return {"g": self._log_alpha(project, dtype, lead), "beta": under(lead, project(self.b_proj).to(dtype))}

    def _options(self) -> dict[str, Any]:
        return {"beta_range": self.beta_range, "normalize_qk": True}

    def _still(self) -> float:
        return 0.0

    def _alpha(self, g: Tensor) -> Tensor:
        return g.exp()

    def extra_repr(self) -> str:
        return f"forget={self.forget}, beta_range={self.beta_range}, heads={self.num_heads}x{self.head_dim}"


class SeparateGates(ComplexKDA):
    """Erasing and writing gated apart, ``S_t = (I - k (e * k)^T) Diag(alpha) S_{t-1} + k (w * v)^T``, e and w per channel.

    GDN-2 with a positive gate (the bounded one here); RWKV-7 writes the same with its gate beside the erasure. With
    gate="signed" and erase_range=2 it is Complex KDA with separate gates, which the paper leaves to future work. Such a
    transition can expand: ``I - k (e * k)^T`` has norm 1 only where e is constant over the key's channels.

    Args:
        hidden_size, num_heads, head_dim: d, H and K.
        erase_range: 1 or 2; e = erase_range * sigmoid(e_proj(x)) per channel of k, w = sigmoid(w_proj(x)) per channel of v.
        options: of :class:`ckda.ComplexKDA`, without beta_range and beta_init.

    Example:
        >>> layer = SeparateGates(32, 2, 8, gate="signed", erase_range=2)
        >>> layer(torch.randn(1, 5, 32)).shape, layer.matrices(torch.randn(1, 5, 32)).shape
        (torch.Size([1, 5, 32]), torch.Size([1, 5, 2, 8, 8]))
    """

    _readers = ("q_proj", "k_proj", "v_proj", "f_proj", "e_proj", "w_proj", "g_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        gate: str = "sigmoid",
        erase_range: int = 1,
        **options: Any,
    ):
        for name in ("beta_range", "beta_init"):
            if name in options:
                raise ValueError(f"{name} is {options[name]!r}; SeparateGates has no beta, see erase_range")
        if erase_range not in (1, 2):
            raise ValueError(f"erase_range is {erase_range!r}; it must be 1 or 2")
        self.erase_range = erase_range
        super().__init__(hidden_size, num_heads, head_dim, gate=gate, **options)

    def _make_gates(self) -> None:
        d, HV, K, V = self.hidden_size, self.num_v_heads, self.head_dim, self.head_v_dim
        self.f_proj = nn.Sequential(nn.Linear(d, V, bias=False), nn.Linear(V, HV * K, bias=False))
        self.e_proj = nn.Linear(d, HV * K, bias=False)
        self.w_proj = nn.Linear(d, HV * V, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV * K))

    def _gates(self, project: Projections, dtype: torch.dtype, lead: torch.Size) -> dict[str, Tensor]:
        """The raw gate, erase [B, T, HV, K] and write [B, T, HV, V]."""
        g = split(lead, project(self.f_proj).to(dtype), self.head_dim)
        erase = self.erase_range * sigmoid(project(self.e_proj)).to(dtype)
        write = sigmoid(project(self.w_proj)).to(dtype)
        return {"g": g, "erase": split(lead, erase, self.head_dim), "write": split(lead, write, self.head_v_dim)}

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        del options["beta_range"]
        return options | {"beta": None}

    def transitions(self, x: Tensor) -> Transitions:
        """There is no single beta here; :meth:`matrices` has the transitions."""
        raise NotImplementedError("SeparateGates has no single beta; matrices(x) gives its transitions")

    def matrices(self, x: Tensor) -> Tensor:
        """[B, T, HV, K, K] the transitions on x [B, T, d]."""
        y, _ = self._project(x, {})
        k = unit(y["k"]).repeat_interleave(self.num_v_heads // self.num_heads, dim=2)
        alpha = self._alpha(y["g"])
        eye = torch.eye(self.head_dim, dtype=k.dtype, device=k.device).expand(*k.shape, -1)
        return transition.apply(eye, alpha, y["erase"] * k, k)

    def extra_repr(self) -> str:
        return f"gate={self.gate}, erase_range={self.erase_range}, heads={self.num_heads}x{self.head_dim}"
