"""Several delta-rule updates a token, run as sub-steps of the library's own operator: DeltaProduct_n, and CKDA's product."""

from typing import Any

import torch
from torch import Tensor, nn

from ckda import transition
from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.gated_delta import GatedDeltaNet
from ckda.layers.projections import Projections
from ckda.ops.context import Context

__all__ = ["ComplexProduct", "DeltaProduct"]


class _SubSteps(ComplexKDA):
    """A delta rule whose token is n tokens of the operator, of which the last one is read: sub-step i of token t is token
    n t + i, and only the last sub-step has a query."""

    num_updates: int

    def _widths(self) -> dict[str, int]:
        return {name: width * (1 if name == "q" else self.num_updates) for name, width in super()._widths().items()}

    def _num_rates(self) -> int:
        return self.num_updates * self.num_v_heads

    def _substeps(self, y: Tensor) -> Tensor:
        """[B, T, n * H, D] -> [B, n * T, H, D]."""
        return y.unflatten(2, (self.num_updates, -1)).flatten(1, 2)

    def _gate_substeps(self, g: Tensor) -> Tensor:
        """The gates of the sub-steps, [B, n * T, HV, K]."""
        return self._substeps(g)

    def _last(self, y: Tensor) -> Tensor:
        """[B, T, H, K] -> [B, n * T, H, K]: on the last sub-step of each token, zero on the others."""
        rest = [torch.zeros_like(y)] * (self.num_updates - 1)
        return torch.stack([*rest, y], 2).flatten(1, 2)

    def _project(
        self,
        x: Tensor,
        past: dict[str, Tensor] | None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Context | None = None,
        project: Projections | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The operator's arguments on n T sub-steps, for x [B, T, d]."""
        y, new_past = super()._project(x, past, cu_seqlens, attention_mask, context, project)
        beta = self._substeps(y["beta"].unsqueeze(-1)).squeeze(-1)
        k, v = self._substeps(y["k"]), self._substeps(y["v"])
        return {"q": self._last(y["q"]), "k": k, "v": v, "g": self._gate_substeps(y["g"]), "beta": beta}, new_past

    def _run(
        self,
        y: dict[str, Any],
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        cu_seqlens = None if cu_seqlens is None else cu_seqlens * self.num_updates
        o, state = super()._run(y, initial_state, cu_seqlens, output_final_state, context)
        return o[:, self.num_updates - 1 :: self.num_updates], state

    def _run_step(self, y: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(self.num_updates):
            o, state = super()._run_step({name: value[:, i : i + 1] for name, value in y.items()}, state)
        return o, state

    def matrices(self, x: Tensor) -> Tensor:
        """[B, T, HV, K, K] each token's transition, the product of its factors, newest on the left."""
        factors = transition.dense(*self.transitions(x)).unflatten(1, (-1, self.num_updates))
        A = factors[:, :, 0]
        for i in range(1, self.num_updates):
            A = factors[:, :, i] @ A
        return A


class DeltaProduct(_SubSteps, GatedDeltaNet):
    """DeltaProduct_n, [B, T, hidden_size] -> [B, T, hidden_size]; with `forget` Gated DeltaProduct.

    A token's transition is ``A = alpha (I - beta_n k_n k_n^T) ... (I - beta_1 k_1 k_1^T)``, each factor writing its own
    value. That is :func:`ckda.complex_kda` on n T tokens, of which every n-th is read: sub-step i of token t is token
    n t + i, the first one carries the gate alpha and the others 1. With n = 2 and beta = 2 two reflections make a rotation.

    Args:
        hidden_size: d. num_heads: H. head_dim: K, of keys and values.
        num_updates: n. beta_range: 2 or 1.
        forget: whether there is a forget gate alpha in [0, 1] a head.
        reflection: start with every learning rate near its upper end (beta_i = beta_range * sigmoid(4)), at beta = 2
            near reflections; it adds a bias to the projection of beta.
        options: conv_size, activate, output_gate, norm_eps, backend as in :class:`ckda.ComplexKDA`; by default neither
            convolution nor SiLU.

    Example:
        >>> layer = DeltaProduct(32, num_heads=2, head_dim=8, reflection=True)
        >>> x = torch.randn(1, 10, 32)
        >>> layer(x).shape, layer.matrices(x).shape
        (torch.Size([1, 10, 32]), torch.Size([1, 10, 2, 8, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        num_updates: int = 2,
        beta_range: int = 2,
        forget: bool = False,
        reflection: bool = False,
        conv_size: int = 0,
        activate: tuple[str, ...] = (),
        **options: Any,
    ):
        if num_updates < 1:
            raise ValueError(f"num_updates is {num_updates}; it must be at least 1")
        self.num_updates, self.reflection = num_updates, reflection
        settings = {"forget": forget, "beta_range": beta_range, "conv_size": conv_size, "activate": activate}
        super().__init__(hidden_size, num_heads, head_dim, **settings, **options)  # type: ignore[arg-type]

    def _make_rate(self, d: int) -> None:
        self.b_proj = nn.Linear(d, self._num_rates(), bias=self.reflection)
        if self.reflection:
            nn.init.constant_(self.b_proj.bias, 4.0)

    def _gate_substeps(self, g: Tensor) -> Tensor:
        """alpha on the first sub-step, 1 on the others."""
        return torch.stack([g, *[torch.zeros_like(g)] * (self.num_updates - 1)], 2).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"updates={self.num_updates}, {super().extra_repr()}"


class ComplexProduct(_SubSteps):
    """Several Complex KDA factors a token, ``A = (I - beta_n k_n k_n^T) Diag(alpha_n) ... (I - beta_1 k_1 k_1^T) Diag(alpha_1)``.

    A factor has at most one pair of complex eigenvalues (thm:complex_eigenvalues); n of them turn n planes at once. The
    factors share A_log and dt_bias, so that they start with the same signs, and each has its own gate, key, value and beta.

    Args:
        hidden_size: d. num_heads: H. head_dim: K.
        num_updates: n. options: of :class:`ckda.ComplexKDA`, without beta_init.

    Example:
        >>> layer = ComplexProduct(32, num_heads=2, head_dim=8, conv_size=0)
        >>> layer.matrices(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 2, 8, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        *,
        num_updates: int = 2,
        **options: Any,
    ):
        if num_updates < 1:
            raise ValueError(f"num_updates is {num_updates}; it must be at least 1")
        if options.get("beta_init", "standard") != "standard":
            raise ValueError(f"beta_init is {options['beta_init']!r}; ComplexProduct has no choice of it")
        self.num_updates = num_updates
        super().__init__(hidden_size, num_heads, head_dim, **options)

    def _make_gates(self) -> None:
        super()._make_gates()
        d, V, n = self.hidden_size, self.head_v_dim, self.num_updates
        self.f_proj[1] = nn.Linear(V, n * self.num_v_heads * self.head_dim, bias=False)
        self.b_proj = nn.Linear(d, self._num_rates(), bias=False)

    def extra_repr(self) -> str:
        return f"updates={self.num_updates}, {super().extra_repr()}"
