"""transformers' Kimi-Linear with sign factors: its KDA layer with one more projection, in the same place of the stack.

The layer keeps its parameters and their names; `s_proj` (the factor of alpha) and `t_proj` (that of beta) are added, both zero at
the start. Norms stay Kimi-Linear's. A saved model has a model_type of its own, so that nothing loads it without its factors.
Importing this module registers the Auto classes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, KimiLinearConfig, KimiLinearForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.kimi_linear import modeling_kimi_linear as kimi

from ckda.compat.fla import l2norm
from ckda.layers.sign_factor import sign_factor, sign_projection
from ckda.ops import complex_kda
from ckda.record import write_text

__all__ = ["SignedDeltaAttention", "SignedKimiLinearConfig", "SignedKimiLinearForCausalLM", "add_factors"]

_AUTO_MAP = {
    "AutoConfig": "modeling_ckda.SignedKimiLinearConfig",
    "AutoModelForCausalLM": "modeling_ckda.SignedKimiLinearForCausalLM",
}
#: the file modeling_ckda.py beside saved weights
_REMOTE = """# This model needs the package ckda (pip install 'ckda[lm]'). After `import ckda.compat.kimi` this file is not read.
from ckda.compat.kimi import SignedKimiLinearConfig, SignedKimiLinearForCausalLM  # noqa: F401
"""


class SignedDeltaAttention(kimi.KimiLinearDeltaAttention):
    """Kimi-Linear's KDA with ``alpha = alpha_KDA * s(w x + b)`` and ``beta = beta_KDA * 2 sigmoid(t x)``."""

    s_proj: nn.Linear
    t_proj: nn.Linear

    # the weight of conv1d is used without its forward, by whose hooks offloaded weights are brought back
    @kimi.force_accelerate_hooks("conv1d")
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


class SignedKimiLinearConfig(KimiLinearConfig):
    """Kimi-Linear's configuration under another name."""

    model_type = "kimi_linear_signed"

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: a saved model refers to this package and carries no copy of its files."""


class SignedKimiLinearForCausalLM(KimiLinearForCausalLM):
    """Kimi-Linear that has its factors before weights are loaded, so that they are among them."""

    config: SignedKimiLinearConfig

    def __init__(self, config: Any):
        super().__init__(config)
        add_factors(self)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: a saved model refers to this package and carries no copy of its files."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, and a short file by which the Auto classes find this package (trust_remote_code=True)."""
        self.config.auto_map = _AUTO_MAP
        super().save_pretrained(save_directory, *args, **kwargs)
        write_text(Path(save_directory) / "modeling_ckda.py", _REMOTE)


def add_factors(model: nn.Module) -> None:
    """Factors of one for every KDA layer of Kimi-Linear, in place; the model and its configuration take their new names."""
    for module in [*model.modules()]:
        if type(module) is kimi.KimiLinearDeltaAttention:
            add_factor(module)
        elif type(module) is KimiLinearForCausalLM:
            module.__class__ = SignedKimiLinearForCausalLM
        config: Any = getattr(module, "config", None)
        if type(config) is KimiLinearConfig:
            config.__class__ = SignedKimiLinearConfig


AutoConfig.register(SignedKimiLinearConfig.model_type, SignedKimiLinearConfig, exist_ok=True)
AutoModelForCausalLM.register(SignedKimiLinearConfig, SignedKimiLinearForCausalLM, exist_ok=True)
# checkpoints keep their own names and shapes on the disk
register_checkpoint_conversion_mapping(
    SignedKimiLinearConfig.model_type,
    get_checkpoint_conversion_mapping(KimiLinearConfig.model_type) or [],
    overwrite=True,
)
