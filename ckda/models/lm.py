"""Language models for transformers: a stack of blocks with any token mixer, and the head that makes it a causal LM.

Importing this module registers the Auto classes. Legend of axes: B batch, T time, d width, V vocabulary, N packed sequences.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ckda.layers.attention import Attention, RMSNorm, Sight, autocast_dtype, fused_kernel_serves, rotary
from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.convolution import ShortConvolution, position_in_sequence
from ckda.layers.gated_norm import HeadNorm
from ckda.layers.swiglu import swiglu
from ckda.models.cache import ModelCache
from ckda.models.config import ComplexKDAConfig
from ckda.models.loss import linear_cross_entropy, next_token_labels
from ckda.models.mixers import ATTENTION, build_mixer
from ckda.ops.context import Context
from ckda.record import write_text

__all__ = ["Block", "ComplexKDAForCausalLM", "ComplexKDAModel", "SwiGLU"]

_AUTO_MAP = {
    "AutoConfig": "modeling_ckda.ComplexKDAConfig",
    "AutoModel": "modeling_ckda.ComplexKDAModel",
    "AutoModelForCausalLM": "modeling_ckda.ComplexKDAForCausalLM",
}
#: the file modeling_ckda.py beside saved weights
_REMOTE = """# This model needs the package ckda (pip install 'ckda[lm]'). After `import ckda.models` this file is not read.
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ComplexKDAModel  # noqa: F401
"""


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(GradientCheckpointingLayer):
    """A token mixer and a SwiGLU, each behind an RMSNorm, each added to its input."""

    def __init__(self, config: ComplexKDAConfig, index: int):
        super().__init__()
        self.index = index
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: Any = build_mixer(config, config.mixers()[index])
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        for out in (self.mlp.down_proj, *([self.mixer.o_proj] if isinstance(self.mixer, Attention) else [])):
            out.writes_residual = True  # type: ignore[assignment]  # what residual_init is about

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
        sight: Sight | None = None,
        past_key_values: ModelCache | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """x [B, T, d] -> [B, T, d].

        Args:
            cu_seqlens: [N + 1] of packed sequences, B = 1.
            attention_mask: bool [B, T], False at padding, for a recurrent mixer. angles, sight: for attention.
            context: the ranks that share the time axis.
        """
        y = self.mixer_norm(x)
        layer: Any = None if past_key_values is None else past_key_values.layers[self.index]
        if isinstance(self.mixer, Attention):
            y = self.mixer(y, angles, sight, layer)
        elif layer is None:
            y = self.mixer(y, cu_seqlens=cu_seqlens, attention_mask=attention_mask, context=context)
        else:
            y = layer.run(self.mixer, y, attention_mask)
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


class ComplexKDAPreTrainedModel(PreTrainedModel):
    """Initialisation and what transformers wants to know."""

    config_class = ComplexKDAConfig
    config: ComplexKDAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias"}  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # a recurrent state cannot be turned back: no assisted generation

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: a saved model refers to this package and carries no copy of its files."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, and a short file by which the Auto classes find this package (trust_remote_code=True)."""
        self.config.auto_map = _AUTO_MAP
        super().save_pretrained(save_directory, *args, **kwargs)
        write_text(Path(save_directory) / "modeling_ckda.py", _REMOTE)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Matrices and embeddings normal, norms one, then the mixers' own gates on top (app:initialization).

        Called on the parts before the whole, and by `from_pretrained` on what a checkpoint lacks.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            scaled = self.config.residual_init == "scaled" and getattr(module, "writes_residual", False)
            depth = (2 * self.config.num_hidden_layers) ** -0.5 if scaled else 1.0
            nn.init.normal_(module.weight, std=self.config.initializer_range * depth)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm | HeadNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, ShortConvolution):
            if self.config.conv_init is None:
                nn.init.uniform_(module.weight, -(module.size**-0.5), module.size**-0.5)
            else:
                nn.init.normal_(module.weight, std=self.config.conv_init)
        elif isinstance(module, ComplexKDA):
            if self.config.mixer_init == "torch":
                _start_as_torch(module)
            loaded = {n: p.clone() for n, p in module.named_parameters() if getattr(p, "_is_hf_initialized", False)}
            module.init_gates()
            for name, value in loaded.items():
                module.get_parameter(name).copy_(value)


def _start_as_torch(mixer: nn.Module) -> None:
    """Every matrix of a mixer that no checkpoint filled, as torch starts a Linear; biases zero."""
    for module in mixer.modules():
        if isinstance(module, nn.Linear) and not getattr(module.weight, "_is_hf_initialized", False):
            nn.init.kaiming_uniform_(module.weight, a=5**0.5)


class ComplexKDAModel(ComplexKDAPreTrainedModel):
    """Embedding, blocks, norm: token ids [B, T] -> hidden states [B, T, d].

    Example:
        >>> config = ComplexKDAConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        ...                           num_heads=2, head_dim=8)
        >>> ComplexKDAModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    def __init__(self, config: ComplexKDAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.mixers = config.mixers()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As every model of transformers, and cu_seqlens [N + 1] for packed sequences (B = 1).

        Args:
            attention_mask: [B, S] with S the tokens so far (in the cache and here); 0 is padding, with a cache on the left of
                the tokens.
            position_ids: [B, T] for the rotary positions; by default counted from each sequence's first token.
            past_key_values: a cache to carry on with, whatever use_cache says.
            use_cache: make a new one; by default only outside training, as the configuration says, and where no padding is
                right of a token: no cache could go on from there.
            context: the ranks that share the time axis; the tokens are this rank's part then, cu_seqlens is over all of them.
        """
        _refuse_unknown(kwargs)
        if context is not None:
            self._check_context(past_key_values, use_cache, attention_mask)
            use_cache = False
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x.to(autocast_dtype(x.device) or x.dtype)
        cache = self._cache(past_key_values, use_cache, cu_seqlens, attention_mask)
        arguments = self._arguments(x, attention_mask, position_ids, cache, cu_seqlens, context)
        hidden: list[Any] = []
        for mixer, layer in zip(self.mixers, self.layers, strict=True):
            if output_hidden_states:
                hidden.append(x)
            own = arguments[mixer in ATTENTION and ATTENTION[mixer].windowed]
            x = layer(x, past_key_values=cache, context=context, **own)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )

    def _cache(
        self,
        given: ModelCache | None,
        use_cache: bool | None,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
    ) -> ModelCache | None:
        """The cache to carry on with, a new one, or None."""
        checkpointing = self.gradient_checkpointing and self.training
        if given is None:
            if use_cache is None:
                wanted = self.config.use_cache and not self.training and cu_seqlens is None
                use_cache = wanted and not (attention_mask is not None and _padded_right(attention_mask))
            if not use_cache or checkpointing:
                return None
        elif checkpointing:
            raise ValueError("past_key_values is given with gradient checkpointing, which would run every token twice")
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with a cache; packed sequences are for one pass without one")
        if given is not None and not isinstance(given, ModelCache):
            raise ValueError(f"past_key_values is a {type(given).__name__}; it must be a ModelCache of ckda.models")
        return ModelCache(self.config) if given is None else given

    def _check_context(
        self, past_key_values: ModelCache | None, use_cache: bool | None, attention_mask: Tensor | None
    ) -> None:
        """Refuse what cannot be spread over ranks."""
        if past_key_values is not None or use_cache:
            raise ValueError("context is given with a cache; ranks share one pass over the whole sequence, without one")
        attention = sorted({mixer for mixer in self.mixers if mixer in ATTENTION})
        if attention and attention_mask is not None:
            raise ValueError(
                f"context and attention_mask are given, but {', '.join(attention)} would need all ranks' masks"
            )

    def _arguments(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: ModelCache | None,
        cu_seqlens: Tensor | None,
        context: Context | None,
    ) -> dict[bool, dict[str, Any]]:
        """The blocks' arguments, for those without and those with a window."""
        B, T = x.shape[:2]
        seen = 0 if cache is None else cache.get_seq_length()
        if cu_seqlens is not None and (attention_mask is not None or B != 1):
            raise ValueError(f"cu_seqlens is given; attention_mask must be None then, and B must be 1 (it is {B})")
        padding = None if attention_mask is None else _padding(attention_mask, B, seen + T, cache is not None)
        shared: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        if padding is not None:
            shared["attention_mask"] = padding[:, seen:]
        kinds = {ATTENTION[mixer] for mixer in self.mixers if mixer in ATTENTION}
        if any(kind.rope for kind in kinds):
            if position_ids is None and context is not None:
                whole = context.piece_length(T) * context.num_pieces
                position_ids = context.part(_positions(whole, 0, x.device, None, cu_seqlens))
            elif position_ids is None:
                position_ids = _positions(T, seen, x.device, padding, cu_seqlens)
            shared["angles"] = rotary(position_ids, self.config.head_dim, self.config.rope_theta)
        result = {False: shared, True: shared}
        for windowed in {kind.windowed for kind in kinds}:
            window = self.config.sliding_window if windowed else None
            if context is not None:
                sight = Sight.over_ranks(T, context, device=x.device, window=window, cu_seqlens=cu_seqlens)
                result[windowed] = shared | {"sight": sight}
                continue
            sight = Sight.causal(
                T,
                device=x.device,
                window=window,
                cu_seqlens=cu_seqlens,
                padding=padding,
                seen=seen,
                first=max(seen - window + 1, 0) if window is not None else 0,
                fused=cache is None and fused_kernel_serves(x, self.config.head_dim, window),
            )
            result[windowed] = shared | {"sight": sight}
        return result


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    """What transformers may send along and this model has no use for passes; a misspelt argument does not."""
    for name, value in kwargs.items():
        if name not in ("output_attentions", "cache_position", "token_type_ids", "is_first_iteration"):
            raise TypeError(f"forward() got an unexpected argument {name!r}")
        if name == "output_attentions" and value:
            raise ValueError("output_attentions is True; the attention weights never exist here")


def _padding(attention_mask: Tensor, B: int, S: int, cached: bool) -> Tensor | None:
    """bool [B, S], False at padding; None where there is none (read back with a cache, or outside training and compilation)."""
    if attention_mask.shape != (B, S):
        raise ValueError(
            f"the shape of attention_mask is {list(attention_mask.shape)}; it must be [B, S] = {[B, S]}, with S the tokens "
            "in the cache and in the input"
        )
    padding = attention_mask.bool()
    if cached and _padded_right(padding):
        raise ValueError(
            "attention_mask has padding right of a token; with a cache it must be on the left (a tokenizer's padding_side), "
            "or pass use_cache=False"
        )
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return padding
    return None if bool(padding.all()) else padding


def _padded_right(attention_mask: Tensor) -> bool:
    """Whether padding is right of a token; read back, and so not looked at under compilation."""
    if torch.compiler.is_compiling():
        return False
    present = attention_mask != 0
    return bool((present[:, :-1] & ~present[:, 1:]).any())


def _positions(T: int, seen: int, device: torch.device, padding: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[B or 1, T] each token's index from the first token of its own sequence."""
    if cu_seqlens is not None:
        return position_in_sequence(cu_seqlens, T).unsqueeze(0)
    if padding is not None:
        return (padding.long().cumsum(1) - 1).clamp_min(0)[:, seen:]
    return torch.arange(seen, seen + T, device=device).unsqueeze(0)


class ComplexKDAForCausalLM(ComplexKDAPreTrainedModel, GenerationMixin):
    """:class:`ComplexKDAModel` with a head: token ids [B, T] -> logits [B, T, V], or the loss without them.

    Example:
        >>> config = ComplexKDAConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        ...                           num_heads=2, head_dim=8)
        >>> model = ComplexKDAForCausalLM(config).eval()
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape
        torch.Size([1, 8])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ComplexKDAConfig):
        super().__init__(config)
        self.model = ComplexKDAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """The logits, and with labels the loss.

        Args:
            labels: [B, T], like input_ids: they are moved by one here, within each packed sequence. -100 does not count.
            shift_labels (by name, among kwargs: transformers' Trainer takes every argument called labels for required):
                labels that are moved already, instead.
            num_items_in_batch: what the summed loss is divided by (default: the labels that count).
            logits_to_keep: only the last so many positions (0: all), or the positions named.
            context: the ranks that share the time axis, see :meth:`ComplexKDAModel.forward`; labels must be shift_labels then, for
                the next token may be another rank's. The loss is the mean over this rank's tokens.

        Returns:
            In training with labels the logits are None: the loss is computed chunk by chunk and they never exist at once.
        """
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        _refuse_unknown(kwargs)
        if context is not None and labels is not None:
            raise ValueError("labels are given with a context; give shift_labels: the next token may be another rank's")
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            context=context,
        )
        hidden = out.last_hidden_state
        loss: Any = None
        logits: Any = None
        if labels is not None or shift_labels is not None:
            if shift_labels is None:
                assert labels is not None
                shift_labels = next_token_labels(labels, cu_seqlens)
            count, chunk = num_items_in_batch, self.config.loss_chunk
            loss = linear_cross_entropy(hidden, self.lm_head.weight, shift_labels, count=count, chunk=chunk)
        if loss is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` starts with this model's own cache."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; it must be None: the model brings its "
                "own cache"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = ModelCache(self.config)


AutoConfig.register(ComplexKDAConfig.model_type, ComplexKDAConfig, exist_ok=True)
AutoModel.register(ComplexKDAConfig, ComplexKDAModel, exist_ok=True)
AutoModelForCausalLM.register(ComplexKDAConfig, ComplexKDAForCausalLM, exist_ok=True)
