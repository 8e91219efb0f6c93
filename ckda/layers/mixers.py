"""Every mixer that is compared, as data: one more entry of :data:`MIXERS` is one more arm of every experiment.

A mixer maps [B, T, d] to [B, T, d] and has ``prefill(x, cache) -> (y, cache)`` and ``step(x [B, d], cache)`` for decoding.
All delta-rule mixers but RWKV-7 run through :func:`ckda.complex_kda`; they differ in what they give it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ckda.layers.baselines import GRU, SoftmaxAttention
from ckda.layers.complex_kda import RANGES, ComplexKDA
from ckda.layers.delta_product import ComplexProduct, DeltaProduct
from ckda.layers.gated_delta import GatedDeltaNet, SeparateGates
from ckda.layers.sign_factor import SignFactor
from ckda.layers.state_space import RWKV7, Mamba2, Mamba3

__all__ = ["MIXERS", "Mixer", "build_mixer"]


@dataclass(frozen=True)
class Mixer:
    """A layer class and the options that make it this mixer."""

    make: Callable[..., nn.Module]
    label: str  #: how tables and figures call it
    options: dict[str, Any] = field(default_factory=dict)
    sized: bool = True  #: whether it takes num_heads and head_dim
    expand_v: int = 1  #: channels of a value over those of a key

    @property
    def is_delta_rule(self) -> bool:
        """Whether it takes the options of :class:`ckda.ComplexKDA`: conv_size, activate, output_gate, ..."""
        return isinstance(self.make, type) and issubclass(self.make, ComplexKDA)

    @property
    def is_signed(self) -> bool:
        """Whether its gates may be negative, so that gate spread applies."""
        return self.options.get("gate") == "signed"


_RANGE_LABELS = {
    "kda": "KDA",
    "kda-beta2": "KDA, β to 2",
    "kda-signed": "KDA, signed α",
    "ckda": "Complex KDA",
}

MIXERS: dict[str, Mixer] = {
    name: Mixer(ComplexKDA, _RANGE_LABELS[name], {"gate": gate, "beta_range": beta_range})
    for name, (gate, beta_range) in RANGES.items()
} | {
    "kda-softplus": Mixer(ComplexKDA, "KDA, softplus gate", {"gate": "softplus", "beta_range": 1}),
    "kda-softplus-beta2": Mixer(ComplexKDA, "KDA, softplus gate, β to 2", {"gate": "softplus", "beta_range": 2}),
    "kda-factor": Mixer(SignFactor, "KDA, sign factor", {"gate": "sigmoid", "beta_range": 1}),
    "kda-beta2-factor": Mixer(SignFactor, "KDA, β to 2, sign factor", {"gate": "sigmoid", "beta_range": 2}),
    "kda-softplus-factor": Mixer(SignFactor, "KDA, softplus gate, sign factor", {"gate": "softplus", "beta_range": 1}),
    "kda-softplus-beta2-factor": Mixer(
        SignFactor, "KDA, softplus gate, β to 2, sign factor", {"gate": "softplus", "beta_range": 2}
    ),
    "ckda-separate": Mixer(SeparateGates, "Complex KDA, erase and write apart", {"gate": "signed", "erase_range": 2}),
    "gdn2": Mixer(SeparateGates, "GDN-2", {"gate": "sigmoid", "erase_range": 1}),
    "gdn2-erase2": Mixer(SeparateGates, "GDN-2, erase to 2", {"gate": "sigmoid", "erase_range": 2}),
    "deltanet": Mixer(GatedDeltaNet, "DeltaNet", {"forget": False, "beta_range": 1}),
    "deltanet-beta2": Mixer(GatedDeltaNet, "DeltaNet, β to 2", {"forget": False, "beta_range": 2}),
    "gdn": Mixer(GatedDeltaNet, "GDN", {"beta_range": 1}),
    "gdn-beta2": Mixer(GatedDeltaNet, "GDN, β to 2", {"beta_range": 2}),
    "deltaproduct1": Mixer(DeltaProduct, "DeltaProduct₁", {"num_updates": 1}),
    "deltaproduct2-beta1": Mixer(DeltaProduct, "DeltaProduct₂, β to 1", {"num_updates": 2, "beta_range": 1}),
    "deltaproduct2": Mixer(DeltaProduct, "DeltaProduct₂", {"num_updates": 2}),
    "deltaproduct3": Mixer(DeltaProduct, "DeltaProduct₃", {"num_updates": 3}),
    "deltaproduct4": Mixer(DeltaProduct, "DeltaProduct₄", {"num_updates": 4}),
    "deltaproduct2-wide": Mixer(
        DeltaProduct,
        "DeltaProduct₂ as published",
        {"num_updates": 2, "forget": True, "activate": ("q", "k", "v")},
        expand_v=2,
    ),
    "ckda-product2": Mixer(
        ComplexProduct, "Complex KDA, two factors", {"gate": "signed", "beta_range": 2, "num_updates": 2}
    ),
    "gated-deltaproduct2": Mixer(DeltaProduct, "Gated DeltaProduct₂", {"num_updates": 2, "forget": True}),
    "gated-deltaproduct3": Mixer(DeltaProduct, "Gated DeltaProduct₃", {"num_updates": 3, "forget": True}),
    "rwkv7": Mixer(RWKV7, "RWKV-7"),
    "mamba2": Mixer(Mamba2, "Mamba-2"),
    "mamba3": Mixer(Mamba3, "Mamba-3"),
    "attention": Mixer(SoftmaxAttention, "softmax attention"),
    "gru": Mixer(GRU, "GRU", sized=False),
}


def build_mixer(name: str, d_model: int, num_heads: int, head_dim: int, **options: Any) -> nn.Module:
    """The mixer of that name; `options` are further ones of its class (for delta rules those of ``ckda.ComplexKDA``).

    Example:
        >>> layer = build_mixer("gdn", 768, 12, 64, output_gate="linear", conv_size=4, activate=("q", "k", "v"))
        >>> sum(p.numel() for p in layer.parameters())
        2976856
        >>> build_mixer("s4", 8, 1, 8)
        Traceback (most recent call last):
        ValueError: there is no mixer 's4'; there are kda, kda-beta2, kda-signed, ckda, kda-softplus, kda-softplus-beta2,
        kda-factor, kda-beta2-factor, kda-softplus-factor, kda-softplus-beta2-factor, ckda-separate, gdn2, gdn2-erase2,
        deltanet, deltanet-beta2, gdn, gdn-beta2, deltaproduct1, deltaproduct2-beta1, deltaproduct2, deltaproduct3,
        deltaproduct4, deltaproduct2-wide, ckda-product2, gated-deltaproduct2, gated-deltaproduct3, rwkv7, mamba2, mamba3,
        attention, gru
    """
    if name not in MIXERS:
        raise ValueError(f"there is no mixer {name!r}; there are {', '.join(MIXERS)}")
    mixer = MIXERS[name]
    sizes = (num_heads, head_dim) if mixer.sized else ()
    wide = {"head_v_dim": mixer.expand_v * head_dim} if mixer.expand_v != 1 else {}
    return mixer.make(d_model, *sizes, **mixer.options | wide | options)
