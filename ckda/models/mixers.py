"""Token mixers of the language models by name, as data: those of :data:`ckda.layers.MIXERS` with a state, and attention."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ckda.layers.attention import Attention
from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.mixers import MIXERS, Mixer

if TYPE_CHECKING:
    from ckda.models.config import ComplexKDAConfig

__all__ = ["ATTENTION", "RECURRENT", "AttentionKind", "build_mixer"]

#: mixers with a state of fixed size
RECURRENT: dict[str, Mixer] = {name: mixer for name, mixer in MIXERS.items() if mixer.is_delta_rule}


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
    sizes = config.hidden_size, config.num_heads, config.head_dim
    if name in RECURRENT:
        mixer = RECURRENT[name]
        return mixer.make(*sizes, **mixer.options | _recurrent_options(config, mixer))
    kind = ATTENTION[name]
    return Attention(
        *sizes,
        rope=kind.rope,
        gated=kind.gated,
        qk_norm=config.qk_norm,
        window=config.sliding_window if kind.windowed else None,
        norm_eps=config.norm_eps,
    )


def _recurrent_options(config: "ComplexKDAConfig", mixer: Mixer) -> dict[str, Any]:
    """A spread start is taken where it makes sense: of the gates where they are signed, of beta where it reaches 2."""
    options: dict[str, Any] = {
        "num_v_heads": config.num_v_heads,
        "head_v_dim": config.head_v_dim or mixer.expand_v * config.head_dim,
        "conv_size": config.conv_size,
        "activate": tuple(config.activate),
        "output_gate": config.output_gate,
        "norm_eps": config.norm_eps,
        "backend": config.backend,
    }
    if mixer.is_signed:
        options["gate_init"] = config.gate_init
    if mixer.make is ComplexKDA and mixer.options.get("beta_range") == 2:
        options["beta_init"] = config.beta_init
    return options
