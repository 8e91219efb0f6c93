"""Between this library's weights and flash-linear-attention's KDA layout, which the authors' checkpoints share.

The two differ in names and in the convolutions: here tap s of [D, size] weighs the input s tokens back, there the kernel is
[D, 1, size] and its last tap is the present token. Everything else is the same tensor under another name. FLA's
configuration has no word for signed gates and removed SiLUs: name them when converting (mixer="ckda", activate=[...]).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.models.config import ComplexKDAConfig
from ckda.models.mixers import ATTENTION
from ckda.record import read_json, write_json

__all__ = ["config_from_fla", "config_to_fla", "from_fla", "load_fla", "save_fla", "to_fla"]

#: our name -> FLA's, as parts of a dotted name
_NAMES = {"embed_tokens": "embeddings", "mixer_norm": "attn_norm", "mixer": "attn"}
_CONVOLUTION = re.compile(r"\bconvolutions\.([qkv])\.weight$")
_CONV1D = re.compile(r"\b([qkv])_conv1d\.weight$")
#: FLA's gate and range -> our mixer; the signed ones have no such words there
_MIXERS = {
    (True, False): "kda",
    (True, True): "kda-beta2",
    (False, False): "kda-softplus",
    (False, True): "kda-softplus-beta2",
}
_BOUND = -5.0


def to_fla(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict with FLA's names and shapes.

    Example:
        >>> name = "model.layers.0.mixer.convolutions.q.weight"
        >>> {name: tuple(x.shape) for name, x in to_fla({name: torch.zeros(8, 4)}).items()}
        {'model.layers.0.attn.q_conv1d.weight': (8, 1, 4)}
    """
    out = {}
    for name, tensor in weights.items():
        if _CONVOLUTION.search(name):
            name, tensor = _CONVOLUTION.sub(r"\1_conv1d.weight", name), tensor.flip(-1).unsqueeze(1)
        out[_rename(name, _NAMES)] = tensor.contiguous()
    return out


def from_fla(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`to_fla`.

    Example:
        >>> weights = {"model.layers.3.mixer.convolutions.v.weight": torch.randn(8, 4), "model.norm.weight": torch.ones(2)}
        >>> again = from_fla(to_fla(weights))
        >>> all(torch.equal(weights[name], again[name]) for name in weights)
        True
    """
    back = {theirs: ours for ours, theirs in _NAMES.items()}
    out = {}
    for name, tensor in weights.items():
        if _CONV1D.search(name):
            name, tensor = _CONV1D.sub(r"convolutions.\1.weight", name), tensor.squeeze(1).flip(-1)
        out[_rename(name, back)] = tensor.contiguous()
    return out


def _rename(name: str, table: dict[str, str]) -> str:
    return ".".join(table.get(part, part) for part in name.split("."))


def config_from_fla(config: Mapping[str, Any], **overrides: Any) -> ComplexKDAConfig:
    """From FLA's KDA configuration as a dictionary (its config.json); `overrides` win.

    Example:
        >>> theirs = {"model_type": "kda", "hidden_size": 64, "num_heads": 2, "head_dim": 32, "safe_gate": True,
        ...           "lower_bound": -5.0, "allow_neg_eigval": True, "num_hidden_layers": 3}
        >>> ours = config_from_fla(theirs, mixer="ckda")
        >>> ours.mixers(), ours.intermediate_size, config_from_fla(theirs).mixer
        (['ckda', 'ckda', 'ckda'], 256, 'kda-beta2')
    """
    if config.get("model_type", "kda") != "kda":
        raise ValueError(f"model_type is {config['model_type']!r}; it must be 'kda', flash-linear-attention's KDA")
    for name in ("attnres_block_size",):
        if config.get(name) is not None:
            raise ValueError(f"{name} is {config[name]!r}; it must be null: there is nothing like it here")
    if config.get("hidden_act", "swish") != "swish":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}; it must be 'swish'")
    bound = config.get("lower_bound")
    if bound is not None and bound != _BOUND:
        raise ValueError(f"lower_bound is {bound}; it must be {_BOUND:g} or null")
    d, heads, width = config.get("hidden_size", 2048), config.get("num_heads", 16), config.get("head_dim", 128)
    layers = config.get("num_hidden_layers", 24)
    mixer = overrides.pop("mixer", _MIXERS[bound is not None, bool(config.get("allow_neg_eigval", False))])
    settings: dict[str, Any] = {
        "hidden_size": d,
        "num_heads": heads,
        "head_dim": width,
        "num_v_heads": config.get("num_v_heads"),
        "head_v_dim": int(width * config.get("expand_v", 1.0)),
        "num_hidden_layers": layers,
        "intermediate_size": _intermediate(config, d),
        "vocab_size": config.get("vocab_size", 32000),
        "norm_eps": config.get("norm_eps", 1e-6),
        "conv_size": config.get("conv_size", 4) if config.get("use_short_conv", True) else 0,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "mixer": mixer,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
    }
    attention = config.get("attn")
    if attention:
        settings |= _attention_from_fla(attention, d, heads, width)
        kind = "sliding-attention" if attention.get("window_size") else "attention"
        settings["layer_mixers"] = [kind if i in attention["layers"] else mixer for i in range(layers)]
    return ComplexKDAConfig(**settings | overrides)


def _intermediate(config: Mapping[str, Any], d: int) -> int:
    """FLA's own rule where the width is not given: two thirds of hidden_ratio d, up to a multiple of 256."""
    given = config.get("intermediate_size")
    if given is not None:
        return int(given)
    return 256 * -(-int(d * (config.get("hidden_ratio") or 4) * 2 / 3) // 256)


def _attention_from_fla(attention: Mapping[str, Any], d: int, heads: int, width: int) -> dict[str, Any]:
    theirs = attention.get("num_heads", heads)
    if attention.get("num_kv_heads", theirs) not in (None, theirs):
        raise ValueError(f"attn.num_kv_heads is {attention['num_kv_heads']}; it must be attn.num_heads = {theirs}")
    if theirs != heads or d // theirs != width:
        raise ValueError(
            f"attn has {theirs} heads of {d // theirs}; they must be the mixer's {heads} of {width}: a model has one head size here"
        )
    if attention.get("qkv_bias", False):
        raise ValueError("attn.qkv_bias is true; it must be false")
    settings: dict[str, Any] = {"rope_theta": float(attention.get("rope_theta", 10_000.0))}
    if attention.get("window_size"):
        settings["sliding_window"] = int(attention["window_size"])
    return settings


def config_to_fla(config: ComplexKDAConfig) -> dict[str, Any]:
    """FLA's KDA configuration as a dictionary. What FLA cannot say (signed gates, removed SiLUs, gated attention) is kept
    under the key "ckda", which FLA ignores."""
    mixers = config.mixers()
    recurrent = {mixer for mixer in mixers if mixer not in ATTENTION}
    bounded = {"kda", "kda-beta2", "kda-signed", "ckda"}
    if len(recurrent) != 1 or not recurrent <= bounded | {"kda-softplus", "kda-softplus-beta2"}:
        raise ValueError(f"the mixers are {sorted(set(mixers))}; FLA's KDA layout holds one range setting of KDA")
    (mixer,) = recurrent
    if config.output_gate != "lowrank":
        raise ValueError(f"output_gate is {config.output_gate!r}; FLA's KDA has 'lowrank'")
    attention = [i for i, name in enumerate(mixers) if name in ATTENTION]
    windowed = any(ATTENTION[mixers[i]].windowed for i in attention)
    return {
        "model_type": "kda",
        "architectures": ["KDAForCausalLM"],
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_v_heads": config.num_v_heads,
        "expand_v": (config.head_v_dim or config.head_dim) / config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "use_short_conv": config.conv_size > 0,
        "conv_size": config.conv_size or 4,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "safe_gate": mixer in bounded,
        "lower_bound": _BOUND if mixer in bounded else None,
        "allow_neg_eigval": mixer == "ckda" or mixer.endswith("beta2"),
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "attn": {
            "layers": attention,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_heads,
            "window_size": config.sliding_window if windowed else None,
            "rope_theta": config.rope_theta,
        }
        if attention
        else None,
        "ckda": {
            "mixer": mixer,
            "layer_mixers": mixers,
            "activate": list(config.activate),
            "qk_norm": config.qk_norm,
            "gate_init": config.gate_init,
            "beta_init": config.beta_init,
        },
    }


def load_fla(folder: str | Path, **overrides: Any) -> Any:
    """The causal LM from a folder with FLA's config.json and safetensors; nothing is unpickled.

    Args:
        overrides: of :class:`ComplexKDAConfig`, for what FLA's configuration cannot say: mixer="ckda", activate=[...].
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ckda.models.lm import ComplexKDAForCausalLM

    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        raise ValueError(f"{folder} has no config.json with *.safetensors beside it")
    theirs = read_json(folder / "config.json")
    try:
        weights = from_fla({name: tensor for file in files for name, tensor in load_file(file).items()})
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    overrides = theirs.get("ckda", {}) | overrides
    if "beta_init" not in overrides and "model.layers.0.mixer.b_proj.bias" in weights:
        overrides["beta_init"] = "spread"  # which is what gives b_proj a bias
    with torch.device("meta"):
        model = ComplexKDAForCausalLM(config_from_fla(theirs, **overrides))
    if model.config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not hold the weights of its configuration: {error}") from error
    model.tie_weights()
    return model.eval()


def save_fla(model: Any, folder: str | Path) -> Path:
    """Write the model as FLA would: config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = to_fla(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    temporary = folder / ".model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")
    write_json(folder / "config.json", config_to_fla(model.config))
    return folder
