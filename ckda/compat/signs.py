"""Signs for an existing model: :func:`convert` gives the gates of a KDA checkpoint a factor from -1 to 1 that starts at 1.

The function at the start is the old one, over any length: s is exactly 1, so that a state decays as it did. A fine-tuning may then
turn gates negative (:mod:`ckda.layers.sign_factor`), and with them learn what positive gates cannot hold.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.mixers import MIXERS
from ckda.layers.sign_factor import SignFactor
from ckda.record import read_json

__all__ = ["convert", "with_sign_factor"]

#: layers that have their factors: ours and Kimi-Linear's
_CONVERTED = ("SignFactor", "SignedDeltaAttention")


def convert(source: Any) -> Any:
    """The model with a sign factor on every KDA layer: in place for a model, loaded first for a folder.

    Args:
        source: a model that holds KDA layers, ours (:class:`ckda.ComplexKDA` with a positive gate) or transformers' Kimi-Linear;
            or the folder of one: FLA's KDA (config.json with model_type "kda"), Kimi-Linear's, or ours. A folder that was saved
            after conversion is loaded with its factors; a model that has them stays as it is. Of a folder that lacks weights
            nothing is drawn anew: it is refused.

    Example:
        >>> layers = nn.Sequential(ComplexKDA(32, 2, 8, gate="sigmoid", beta_range=1), nn.Linear(32, 32))
        >>> x = torch.randn(1, 50, 32)
        >>> before = layers(x)
        >>> torch.allclose(convert(layers)(x), before, atol=1e-6), type(layers[0]).__name__
        (True, 'SignFactor')
    """
    if isinstance(source, nn.Module):
        return _converted(source)
    if not isinstance(source, str | PathLike):
        raise ValueError(f"source is {type(source).__name__}; it must be a model or the folder of one")
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; it must be the folder of a KDA checkpoint, or a model")
    config = read_json(folder / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else config
    if kind == "kda":
        from ckda.compat.convert import load_fla

        return _converted(load_fla(folder))
    if kind == "complex_kda":
        from ckda.models.lm import ComplexKDAForCausalLM

        model = _whole(ComplexKDAForCausalLM, folder)
        return model if any(isinstance(x, SignFactor) for x in model.modules()) else _converted(model)
    if kind in ("kimi_linear", "kimi_linear_signed"):
        from transformers import KimiLinearForCausalLM

        from ckda.compat.kimi import SignedKimiLinearForCausalLM

        signed = kind == "kimi_linear_signed" or config.get("sign_factor", False)  # as older folders say it
        return _converted(_whole(SignedKimiLinearForCausalLM if signed else KimiLinearForCausalLM, folder))
    raise ValueError(f"model_type is {kind!r}; it must be 'kda' (FLA's), 'kimi_linear' or 'complex_kda' (ours)")


def _whole(kind: Any, folder: Path) -> Any:
    """A model from its folder, or a sentence where weights are missing or damaged, in whose place transformers draws new ones."""
    from safetensors import SafetensorError

    try:
        model, found = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    wrong = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if wrong:
        raise ValueError(
            f"{folder} does not hold the weights of its configuration: {', '.join(wrong[:3])} ({len(wrong)})"
        )
    return model


def _converted(model: nn.Module) -> nn.Module:
    """Every KDA layer of the model with a sign factor, and its configuration, where it has one, with the mixers' new names."""
    if isinstance(model, ComplexKDA):
        return model if isinstance(model, SignFactor) else with_sign_factor(model)
    places = [(name, x) for name, x in model.named_modules(remove_duplicate=False) if type(x) is ComplexKDA]
    new = {layer: with_sign_factor(layer) for _, layer in places}  # all before any takes its place: one may be refused
    for name, layer in places:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[layer])
    kimi = any(type(x).__name__ == "KimiLinearDeltaAttention" for x in model.modules())
    if kimi:
        from ckda.compat.kimi import add_factors

        add_factors(model)
    if not places and not kimi and any(type(x).__name__ in _CONVERTED for x in model.modules()):
        return model
    if not places and not kimi:
        raise ValueError(f"{type(model).__name__} holds no KDA layer; it must hold ckda.ComplexKDA or Kimi-Linear's")
    config: Any = getattr(model, "config", None)
    if places and hasattr(config, "layer_mixers"):
        config.layer_mixers = [f"{name}-factor" if f"{name}-factor" in MIXERS else name for name in config.mixers()]
        inner: Any = getattr(model, "model", model)
        inner.mixers = config.mixers()
    return model


@torch.no_grad()
def with_sign_factor(layer: ComplexKDA) -> SignFactor:
    """A KDA layer's weights in a layer with a sign factor.

    Example:
        >>> with_sign_factor(ComplexKDA(32, 2, 8))
        Traceback (most recent call last):
        ValueError: the layer's gate is 'signed'; it must be 'sigmoid' or 'softplus': this one has signs already
    """
    if layer.gate == "signed":
        raise ValueError("the layer's gate is 'signed'; it must be 'sigmoid' or 'softplus': this one has signs already")
    new = SignFactor(
        layer.hidden_size, layer.num_heads, layer.head_dim, num_v_heads=layer.num_v_heads, head_v_dim=layer.head_v_dim,
        gate=layer.gate, beta_range=layer.beta_range, conv_size=_conv_size(layer), activate=tuple(layer.activate),
        output_gate=_output_gate(layer), initial_state=_initial_state(layer), norm_eps=layer.o_norm.eps,
        backend=layer.backend,
    )  # fmt: skip
    new.b_proj = nn.Linear(layer.hidden_size, layer.num_v_heads, bias=layer.b_proj.bias is not None)
    weight, learned = layer.q_proj.weight, {name: p.requires_grad for name, p in layer.named_parameters()}
    new.to(weight.device, weight.dtype).load_state_dict(layer.state_dict(keep_vars=True), strict=False, assign=True)
    for name, wanted in learned.items():
        new.get_parameter(name).requires_grad_(wanted)
    return new.train(layer.training)


def _conv_size(layer: ComplexKDA) -> int:
    weights = [x.get_parameter("weight") for x in layer.convolutions.values()]
    return weights[0].shape[-1] if weights else 0


def _output_gate(layer: ComplexKDA) -> str | None:
    if layer.g_proj is None:
        return None
    return "linear" if isinstance(layer.g_proj, nn.Linear) else "lowrank"


def _initial_state(layer: ComplexKDA) -> Any:
    if layer.initial_state is None:
        return "zero"
    return "learned" if isinstance(layer.initial_state, nn.Parameter) else layer.initial_state
