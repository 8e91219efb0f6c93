"""The configuration of the language models: one class for Complex KDA, its relatives, attention and hybrids of them."""

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ckda.command import did_you_mean
from ckda.models.mixers import ATTENTION, RECURRENT

__all__ = ["ComplexKDAConfig"]

#: what transformers hands to a configuration besides its fields
_OF_TRANSFORMERS = ("attn_implementation", "auto_map", "experts_implementation", "tokenizer_class")


@strict
class ComplexKDAConfig(PreTrainedConfig):
    """A pre-norm decoder: every block is a token mixer and a SwiGLU, each behind an RMSNorm, each with a residual.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: V, d, the width of the SwiGLU, the number of blocks.
        mixer: the token mixer of every block: a name of :data:`ckda.models.mixers.RECURRENT` or of
            :data:`~ckda.models.mixers.ATTENTION`.
        hybrid: None, or the mixer that takes every `hybrid_every`-th block instead (block i with (i + 1) % hybrid_every == 0).
        layer_mixers: the mixer of every block by name, instead of the pattern of the two lines above.
        num_heads, head_dim: H and K of every mixer. num_v_heads, head_v_dim: HV and V of the recurrent ones (default: H, K).
        gate_init, beta_init: "standard" or "spread" (app:initialization), for mixers with signed gates and with beta to 2;
            beta_init may be "half": beta starts at 0.5 on average.
        conv_size: taps of the short convolutions; 0 for none. activate: which of "q", "k", "v" pass through SiLU.
        output_gate: of the recurrent mixers: "lowrank", "linear" (full rank) or None.
        qk_norm: RMSNorm of q and k per head in attention. rope_theta: base of the rotary positions of "attention" and
            "sliding-attention". sliding_window: tokens that "sliding-attention" sees, its own included.
        norm_eps: of all norms. initializer_range: standard deviation of matrices and embeddings at the start.
        residual_init: "flat", or "scaled": the SwiGLU's down projection and attention's output projection start at
            initializer_range / sqrt(2 num_hidden_layers), as in Megatron. mixer_init: of the matrices in recurrent mixers:
            "normal", at initializer_range, or "torch", as torch starts a Linear.
        conv_init: standard deviation of the convolutions at the start; None: uniform in +-size^-1/2, as torch's.
        tie_word_embeddings: one matrix for the embedding and the output. loss_chunk: tokens a chunk of the loss.
        backend: of :func:`ckda.complex_kda`.

    Example:
        >>> config = ComplexKDAConfig(num_hidden_layers=8, mixer="ckda", hybrid="gated-attention")
        >>> config.mixers()[2:5]
        ['ckda', 'gated-attention', 'ckda']
    """

    model_type = "complex_kda"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers declares it as a class variable)
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012

    vocab_size: int = 50304
    hidden_size: int = 384
    intermediate_size: int = 1472
    num_hidden_layers: int = 12
    num_heads: int = 6
    head_dim: int = 64
    num_v_heads: int | None = None
    head_v_dim: int | None = None
    mixer: str = "ckda"
    hybrid: str | None = None
    hybrid_every: int = 4
    layer_mixers: list[str] | None = None
    gate_init: str = "standard"
    beta_init: str = "standard"
    conv_size: int = 4
    activate: list[str] | tuple[str, ...] = ("q", "k", "v")
    output_gate: str | None = "lowrank"
    qk_norm: bool = False
    rope_theta: float | int = 10_000.0
    sliding_window: int = 2048
    max_position_embeddings: int = 4096
    norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    conv_init: float | int | None = None
    residual_init: str = "flat"
    mixer_init: str = "normal"
    tie_word_embeddings: bool = True
    loss_chunk: int = 4096
    backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _OF_TRANSFORMERS and not name.startswith("_") and not hasattr(type(self), name):
                hint = did_you_mean(name, [f.name for f in fields(self)])
                raise ValueError(f"{name!r} is no setting of a model{hint}")
        self.activate = list(self.activate)
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: a saved model refers to this package and carries no copy of its files."""

    def mixers(self) -> list[str]:
        """The mixer of every block."""
        if self.layer_mixers is not None:
            return list(self.layer_mixers)
        every = self.hybrid_every
        return [
            self.hybrid if self.hybrid is not None and (i + 1) % every == 0 else self.mixer
            for i in range(self.num_hidden_layers)
        ]

    def validate_architecture(self) -> None:
        """Part of the strict configuration's own checks."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_heads", "head_dim"):
            _at_least(self, name, 1)
        for name in ("hybrid_every", "loss_chunk", "sliding_window"):
            _at_least(self, name, 1)
        _at_least(self, "conv_size", 0)
        known = (*RECURRENT, *ATTENTION)
        if self.layer_mixers is not None and len(self.layer_mixers) != self.num_hidden_layers:
            raise ValueError(
                f"layer_mixers has {len(self.layer_mixers)} names; it must have num_hidden_layers = {self.num_hidden_layers}"
            )
        for mixer in self.mixers():
            if mixer not in known:
                raise ValueError(f"a mixer is {mixer!r}; it must be one of {', '.join(map(repr, known))}")
        choices: dict[str, tuple[object, ...]] = {
            "gate_init": ("standard", "spread"),
            "beta_init": ("standard", "spread", "half"),
            "residual_init": ("flat", "scaled"),
            "mixer_init": ("normal", "torch"),
            "output_gate": ("lowrank", "linear", None),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, allowed))}"
                )
        if not set(self.activate) <= {"q", "k", "v"}:
            raise ValueError(f"activate is {self.activate}; it may hold 'q', 'k' and 'v'")


def _at_least(config: ComplexKDAConfig, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
