"""DeltaProduct_n: several delta-rule updates a token, run as sub-steps of the library's own operator."""

import torch
from torch import Tensor, nn

from ckda import transition
from ckda.layers.parts import HeadNorm
from ckda.ops import complex_kda
from ckda.ops.call import unit
from ckda.ops.gate import beta_from_logit

__all__ = ["DeltaProduct"]


class DeltaProduct(nn.Module):
    """DeltaProduct_n without a forget gate, [B, T, hidden_size] -> [B, T, hidden_size].

    A token's transition is ``A = (I - beta_n k_n k_n^T) ... (I - beta_1 k_1 k_1^T)``, each factor writing its own value.
    That is :func:`ckda.complex_kda` with alpha = 1 on n T tokens, of which every n-th is read: sub-step i of token t is token
    n t + i, and only the last sub-step has a query. Any gate of the operator could stand on the first sub-step
    (Gated DeltaProduct); the comparison here has none. With n = 2 and beta = 2 two reflections make a rotation.

    Args:
        hidden_size: d. num_heads: H. head_dim: K, of keys and values.
        num_updates: n. beta_range: 2 or 1.
        reflection: start with every learning rate near its upper end (beta_i = beta_range * sigmoid(4)), at beta = 2
            near reflections; it adds a bias to the projection of beta.

    Example:
        >>> layer = DeltaProduct(32, num_heads=2, head_dim=8, reflection=True)
        >>> x = torch.randn(1, 10, 32)
        >>> layer(x).shape, layer.matrices(x).shape
        (torch.Size([1, 10, 32]), torch.Size([1, 10, 2, 8, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_updates: int = 2,
        beta_range: int = 2,
        reflection: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__()
        self.num_heads, self.head_dim, self.num_updates = num_heads, head_dim, num_updates
        self.beta_range, self.backend = beta_range, backend
        d, width = hidden_size, num_heads * head_dim
        self.q_proj = nn.Linear(d, width, bias=False)
        self.k_proj = nn.Linear(d, num_updates * width, bias=False)
        self.v_proj: nn.Module = nn.Linear(d, num_updates * width, bias=False)
        self.b_proj = nn.Linear(d, num_updates * num_heads, bias=reflection)
        self.g_proj = nn.Sequential(nn.Linear(d, head_dim, bias=False), nn.Linear(head_dim, width))
        self.o_norm = HeadNorm(head_dim, norm_eps)
        self.o_proj = nn.Linear(width, d, bias=False)
        if reflection:
            nn.init.constant_(self.b_proj.bias, 4.0)

    def _substeps(self, y: Tensor) -> Tensor:
        """[B, T, n * H * D] -> [B, n * T, H, D]."""
        return y.unflatten(-1, (self.num_updates, self.num_heads, -1)).flatten(1, 2)

    def read(self, x: Tensor) -> Tensor:
        """The raw recurrent readout o [B, T, H, K] after each token's last sub-step."""
        k, v = self._substeps(self.k_proj(x)), self._substeps(self.v_proj(x))
        beta = self._substeps(self.b_proj(x)).squeeze(-1)
        q = self.q_proj(x).unflatten(-1, (1, self.num_heads, self.head_dim))
        q = torch.cat([torch.zeros_like(q)] * (self.num_updates - 1) + [q], 2).flatten(1, 2)
        options = {"beta_range": self.beta_range, "normalize_qk": True, "backend": self.backend}
        o, _ = complex_kda(q, k, v, torch.zeros_like(k), beta, **options)  # type: ignore[arg-type]
        return o.unflatten(1, (-1, self.num_updates))[:, :, -1]

    def write_out(self, o: Tensor, x: Tensor) -> Tensor:
        """From the readout o [B, T, H, K] and the layer's input x [B, T, d] to its output [B, T, d]."""
        return self.o_proj(self.o_norm(o, self.g_proj(x).unflatten(-1, (-1, self.head_dim))).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.write_out(self.read(x), x)

    def matrices(self, x: Tensor) -> Tensor:
        """[B, T, H, K, K] each token's transition, the product of its factors, newest on the left."""
        k = self.k_proj(x).unflatten(-1, (self.num_updates, self.num_heads, -1))
        k = unit(k)
        beta = beta_from_logit(self.b_proj(x), self.beta_range).unflatten(-1, (self.num_updates, -1))
        A = transition.dense(torch.ones_like(k[:, :, 0]), k[:, :, 0], beta[:, :, 0])
        for i in range(1, self.num_updates):
            A = transition.dense(torch.ones_like(k[:, :, i]), k[:, :, i], beta[:, :, i]) @ A
        return A

    def extra_repr(self) -> str:
        return f"updates={self.num_updates}, beta_range={self.beta_range}, heads={self.num_heads}x{self.head_dim}"
