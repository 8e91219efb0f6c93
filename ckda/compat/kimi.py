"""transformers' Kimi-Linear with sign factors: its KDA layer with one more projection, in the same place of the stack.

The layer keeps its parameters and their names; `s_proj` (the factor of alpha) and `t_proj` (that of beta) are added, both zero at
the start. Norms stay Kimi-Linear's. In save_pretrained's folder the configuration says `sign_factor`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as kimi

from ckda.compat.fla import l2norm
from ckda.layers.sign_factor import sign_factor, sign_projection
from ckda.ops import complex_kda

__all__ = ["SignedDeltaAttention", "add_factor", "load"]


class SignedDeltaAttention(kimi.KimiLinearDeltaAttention):
    """Kimi-Linear's KDA with ``alpha = alpha_KDA * s(w x + b)`` and ``beta = beta_KDA * 2 sigmoid(t x)``."""

    s_proj: nn.Linear
    t_proj: nn.Linear

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """x [B, T, d] -> [B, T, d]; attention_mask [B, T] is 0 at padding, on the left."""
        x, heads = kimi.apply_mask_to_padding_states(hidden_states, attention_mask), (-1, self.head_dim)
        q, k, v = (y.unflatten(-1, heads) for y in self._convolved(x, cache_params).split(self.qkv_dim, -1))
        factor = sign_factor(self.s_proj(x).unflatten(-1, heads))
        beta = self.b_proj(x).float().sigmoid() * 2 * self.t_proj(x).float().sigmoid()
        o, state = complex_kda(
            l2norm(q),
            l2norm(k),
            v,
            self.forget_gate(x) + factor.log,
            beta,
            sign=factor.sign,
            initial_state=self._past(cache_params),
            output_final_state=cache_params is not None,
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(state, self.layer_idx)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, heads)
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def _past(self, cache: Any) -> Tensor | None:
        """The state after the tokens seen so far, [B, H, K, V], or None at the beginning."""
        if cache is None or not cache.has_previous_state(self.layer_idx):
            return None
        return cache.layers[self.layer_idx].recurrent_states[0]

    def _convolved(self, x: Tensor, cache: Any) -> Tensor:
        """q, k and v side by side after the short convolution, [B, T, 3 H K]."""
        y = torch.cat([projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)], -1).mT
        options = {"weight": self.conv1d.weight.squeeze(1), "bias": self.conv1d.bias, "activation": self.activation}
        T = x.shape[1]
        if T == 1 and self._past(cache) is not None:
            return kimi.causal_conv1d_update(y, cache.layers[self.layer_idx].conv_states[0], **options).mT
        if cache is not None:
            y = cache.update_conv_state(y, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        return kimi.causal_conv1d_fn(y, **options)[..., -T:].mT


def add_factor(layer: nn.Module) -> SignedDeltaAttention:
    """The layer itself with factors of one, in place."""
    assert isinstance(layer, kimi.KimiLinearDeltaAttention)
    weight = layer.q_proj.weight
    layer.s_proj = sign_projection(layer.hidden_size, layer.qkv_dim).to(weight.device, weight.dtype)
    layer.t_proj = nn.Linear(layer.hidden_size, layer.num_heads, bias=False).to(weight.device, weight.dtype)
    nn.init.zeros_(layer.t_proj.weight)
    layer.__class__ = SignedDeltaAttention
    assert isinstance(layer, SignedDeltaAttention)
    return layer


class _WithFactors(KimiLinearForCausalLM):
    """Kimi-Linear that has its factors before weights are loaded, so that they are among them."""

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in [x for x in self.modules() if isinstance(x, kimi.KimiLinearDeltaAttention)]:
            add_factor(layer)


def load(folder: str | Path) -> Any:
    """Kimi-Linear from a folder, with sign factors: those saved there, or new ones."""
    from ckda.compat.signs import convert

    if not getattr(KimiLinearConfig.from_pretrained(folder), "sign_factor", False):
        return convert(KimiLinearForCausalLM.from_pretrained(folder))
    model: Any = _WithFactors.from_pretrained(folder)
    model.__class__ = KimiLinearForCausalLM
    return model
