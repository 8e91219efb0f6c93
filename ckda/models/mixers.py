"""Token mixers of the language models by name, as data: a new one is one more entry."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ckda.layers.attention import Attention
from ckda.layers.complex_kda import RANGES, ComplexKDA

if TYPE_CHECKING:
    from ckda.models.config import ComplexKDAConfig

__all__ = ["ATTENTION", "RECURRENT", "build_mixer"]


def _shared(config: "ComplexKDAConfig") -> dict[str, Any]:
    return {
        "num_v_heads": config.num_v_heads,
        "head_v_dim": config.head_v_dim,
        "conv_size": config.conv_size,
        "activate": tuple(config.activate),
        "output_gate": config.output_gate,
        "norm_eps": config.norm_eps,
        "backend": config.backend,
    }


def _complex_kda(gate: str, beta_range: int) -> Callable[["ComplexKDAConfig"], nn.Module]:
    """A spread start is taken where it makes sense: of the gates where they are signed, of beta where it reaches 2."""

    def build(config: "ComplexKDAConfig") -> nn.Module:
        return ComplexKDA(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            gate=gate,
            beta_range=beta_range,
            gate_init=config.gate_init if gate == "signed" else "standard",
            beta_init=config.beta_init if beta_range == 2 else "standard",
            **_shared(config),
        )

    return build


#: mixers with a state: name -> what builds it from the configuration
RECURRENT: dict[str, Callable[["ComplexKDAConfig"], nn.Module]] = {
    **{name: _complex_kda(gate, beta_range) for name, (gate, beta_range) in RANGES.items()},
    "kda-softplus": _complex_kda("softplus", 1),
    "kda-softplus-beta2": _complex_kda("softplus", 2),
}



class AttentionKind(NamedTuple):
    """What tells the attention mixers apart."""

    rope: bool = False  #: rotary positions
    gated: bool = False  #: the output times sigmoid(g_proj(x))
    windowed: bool = False  #: sees the configuration's sliding_window tokens only


#: mixers that look back over all tokens, or over a window of them; "gated-attention" is that of the paper's hybrids
ATTENTION: dict[str, AttentionKind] = {
    "attention": AttentionKind(rope=True),
    "gated-attention": AttentionKind(gated=True),
    "sliding-attention": AttentionKind(rope=True, windowed=True),
}


def build_mixer(config: "ComplexKDAConfig", name: str) -> nn.Module:
    """The mixer of that name, [B, T, hidden_size] -> [B, T, hidden_size]."""
    if name in RECURRENT:
        return RECURRENT[name](config)
    kind = ATTENTION[name]
    return Attention(
        config.hidden_size,
        config.num_heads,
        config.head_dim,
        rope=kind.rope,
        gated=kind.gated,
        qk_norm=config.qk_norm,
        window=config.sliding_window if kind.windowed else None,
        norm_eps=config.norm_eps,
    )
