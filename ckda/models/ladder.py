"""The paper's model sizes as data (tab:ladder-configs, tab:model-configs), our own small ladder, and their parameter totals.

SiLU on q, k and v is a matter of the size, never of the arm: the authors' ladder and 1.3B runs have it in no recurrent arm, their
340M table has it in all of them. An arm that differs says so in its name.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ckda.models.config import ComplexKDAConfig
from ckda.models.mixers import ATTENTION

__all__ = [
    "ARMS",
    "CONFIGS",
    "OWN",
    "OWN_ARMS",
    "Rung",
    "Total",
    "build",
    "flops_per_token",
    "num_parameters",
    "parameter_table",
    "totals",
]

#: what is compared: arm -> what it sets in the configuration. The spreads and SiLU choices are those of tab:lm_res; "-silu" is with
#: all three where the size has none.
ARMS: dict[str, dict[str, Any]] = {
    "transformer": {"mixer": "attention"},
    "transformer-qknorm": {"mixer": "attention", "qk_norm": True},
    "kda": {"mixer": "kda"},
    "ckda": {"mixer": "ckda"},
    "kda-hybrid": {"mixer": "kda", "hybrid": "gated-attention"},
    "ckda-hybrid": {"mixer": "ckda", "hybrid": "gated-attention"},
    "kda-beta2": {"mixer": "kda-beta2"},
    "kda-beta2-no-key-silu": {"mixer": "kda-beta2", "activate": ["q", "v"]},
    "kda-signed": {"mixer": "kda-signed"},
    "kda-signed-spread": {"mixer": "kda-signed", "gate_init": "spread"},
    "kda-silu": {"mixer": "kda", "activate": ["q", "k", "v"]},
    "ckda-silu": {"mixer": "ckda", "activate": ["q", "k", "v"]},
    "ckda-half": {"mixer": "ckda", "beta_init": "half"},
    "ckda-spread": {"mixer": "ckda", "gate_init": "spread"},
    "ckda-no-key-silu": {"mixer": "ckda", "activate": ["q", "v"]},
    "kda-no-silu": {"mixer": "kda", "activate": []},
    "ckda-no-silu": {"mixer": "ckda", "activate": []},
    "ckda-spread-no-key-silu": {"mixer": "ckda", "gate_init": "spread", "activate": ["q", "v"]},
    "ckda-spread-both": {"mixer": "ckda", "gate_init": "spread", "beta_init": "spread"},
    "gdn": {"mixer": "gdn"},
    "gdn-beta2": {"mixer": "gdn-beta2"},
    "deltanet": {"mixer": "deltanet"},
    "deltaproduct1": {"mixer": "deltaproduct1"},
    "deltaproduct2": {"mixer": "deltaproduct2-beta1"},
    "deltaproduct2-beta2": {"mixer": "deltaproduct2"},
    "gdn2": {"mixer": "gdn2"},
}


@dataclass(frozen=True)
class Rung:
    """One column of the tables: sizes, what the training of it was, and the printed totals in millions by arm."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    intermediate: dict[str, int]  #: by arm; the key "" is for all others
    context: int
    learning_rate: tuple[float, ...]
    batch_sequences: tuple[int, ...]
    warmup_steps: int
    schedule: str  #: "wsd" (the last fifth decays) or "cosine" (to a tenth)
    output_gate: str = "lowrank"
    activate: tuple[str, ...] = (
        "q",
        "k",
        "v",
    )  #: which of them pass through SiLU, in every recurrent arm that names no other
    residual_init: str = "flat"  #: of :class:`ComplexKDAConfig`
    paper: dict[str, float] = field(default_factory=dict)  #: printed total in millions
    note: str = ""


def _column(
    hidden: int,
    layers: int,
    heads: int,
    widths: tuple[int, int, int],
    printed: tuple[float, float, float],
    **other: Any,
) -> Rung:
    """A column of tab:ladder-configs; widths and totals of Transformer++, of KDA and CKDA, and of the hybrids.

    The paper does not say how matrices start; its ladder was trained in Megatron, which scales residual outputs.
    """
    dense, recurrent, hybrid = widths
    settings: dict[str, Any] = {
        "head_dim": 64,
        "vocab_size": 50304,
        "tie_word_embeddings": True,
        "context": 4096,
        "warmup_steps": 2000,
        "schedule": "wsd",
        "activate": (),
        "residual_init": "scaled",
        **other,
    }
    return Rung(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=heads,
        intermediate={
            "transformer": dense,
            "transformer-qknorm": dense,
            "kda-hybrid": hybrid,
            "ckda-hybrid": hybrid,
            "": recurrent,
        },
        paper={
            "transformer": printed[0],
            "kda": printed[1],
            "ckda": printed[1],
            "kda-hybrid": printed[2],
            "ckda-hybrid": printed[2],
        },
        **settings,
    )


def _small(vocab_size: int, note: str, paper: dict[str, float]) -> Rung:
    """tab:model-configs under one reading of its vocabulary."""
    return Rung(
        hidden_size=768,
        num_hidden_layers=28,
        num_heads=12,
        head_dim=64,
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        intermediate={"transformer": 3072, "transformer-qknorm": 3072, "": 2816},
        context=2048,
        learning_rate=(5e-4,),
        batch_sequences=(64,),
        warmup_steps=2000,
        schedule="wsd",
        output_gate="linear",
        paper=paper,
        note=note,
    )


def _own(hidden: int, layers: int, widths: tuple[int, int, int], batch: tuple[int, ...] = (16,), **other: Any) -> Rung:
    """A rung of our own ladder: the paper's proportions under a vocabulary of 16,384, sequences of 2048 tokens."""
    settings: dict[str, Any] = {"vocab_size": 16384, "context": 2048, "warmup_steps": 200, "learning_rate": (2e-3,)}
    rung = _column(hidden, layers, hidden // 64, widths, (0, 0, 0), batch_sequences=batch, **settings | other)
    return replace(rung, paper={}, note="our own ladder; the total is for a vocabulary of 16,384")


#: the arms of our own ladder
OWN_ARMS = ("transformer-qknorm", "kda", "ckda", "kda-hybrid", "ckda-hybrid")

#: the sizes of our own ladder, smallest first
OWN = ("own-6M", "own-12M", "own-25M", "own-47M")

#: the sizes by name
CONFIGS: dict[str, Rung] = {
    "47M": _column(
        384, 12, 6, (1536, 1472, 1408), (47.64, 48.03, 47.27), learning_rate=(2e-3,), batch_sequences=(32, 64)
    ),
    "124M": _column(
        576, 18, 9, (2304, 2240, 2176), (124.55, 125.45, 124.14), learning_rate=(1e-3,), batch_sequences=(64,)
    ),
    "302M": _column(
        896, 20, 14, (3584, 3520, 3456), (302.01, 303.66, 302.96), learning_rate=(1e-3,), batch_sequences=(64, 128)
    ),
    "588M": _column(
        1280,
        20,
        20,
        (5120, 4992, 4928),
        (588.73, 586.32, 587.75),
        learning_rate=(5e-4, 1e-3),
        batch_sequences=(64, 128, 256),
    ),
    "983M": _column(
        1536,
        24,
        24,
        (6144, 6016, 5952),
        (983.31, 980.00, 984.36),
        learning_rate=(5e-4,),
        batch_sequences=(64, 128, 256, 512),
    ),
    "1.7B": _column(
        2048,
        24,
        32,
        (8192, 8064, 7936),
        (1713.74, 1709.71, 1712.29),
        learning_rate=(5e-4,),
        batch_sequences=(64, 128, 256, 512),
    ),
    "1.3B": _column(
        2048,
        24,
        16,
        (5632, 5440, 5312),
        (1364.30, 1362.63, 1362.26),
        head_dim=128,
        vocab_size=32000,
        tie_word_embeddings=False,
        learning_rate=(4e-4,),
        batch_sequences=(128,),
        warmup_steps=1908,
        schedule="cosine",
        residual_init="flat",
        note="FineWeb-Edu; no SiLU on q, k and v in any arm, as in the authors' code (the paper's text: CKDA without it on keys)",
    ),
    "340M": _small(
        50304,
        "the vocabulary with which the printed totals come out; that of deltaproduct is the count with one factor",
        {
            "transformer": 341.55,
            "gdn": 342.33,
            "deltaproduct1": 342.07,
            "deltaproduct2": 342.07,
            "kda": 344.87,
            "ckda": 344.87,
        },
    ),
    "340M-65k": _small(
        65536, "the vocabulary that the paper's text and table state; the printed totals are not of it", {}
    ),
    "own-6M": _own(192, 5, (768, 704, 704)),
    "own-12M": _own(256, 8, (1024, 960, 960)),
    "own-25M": _own(384, 8, (1536, 1472, 1408)),
    "own-47M": _own(448, 12, (1792, 1728, 1664)),
}


def build(size: str, arm: str, **overrides: Any) -> ComplexKDAConfig:
    """The configuration of that size and arm.

    Args:
        size: a name of :data:`CONFIGS`. arm: a name of :data:`ARMS`. overrides: of :class:`ComplexKDAConfig`.

    Example:
        >>> config = build("47M", "ckda-hybrid")
        >>> config.hidden_size, config.intermediate_size, config.mixers().count("gated-attention")
        (384, 1408, 3)
    """
    if size not in CONFIGS:
        raise ValueError(f"size is {size!r}; it must be one of {', '.join(map(repr, CONFIGS))}")
    if arm not in ARMS:
        raise ValueError(f"arm is {arm!r}; it must be one of {', '.join(map(repr, ARMS))}")
    rung = CONFIGS[size]
    settings: dict[str, Any] = {
        "hidden_size": rung.hidden_size,
        "num_hidden_layers": rung.num_hidden_layers,
        "num_heads": rung.num_heads,
        "head_dim": rung.head_dim,
        "vocab_size": rung.vocab_size,
        "tie_word_embeddings": rung.tie_word_embeddings,
        "intermediate_size": rung.intermediate.get(arm, rung.intermediate[""]),
        "max_position_embeddings": rung.context,
        "output_gate": rung.output_gate,
        "activate": list(rung.activate),
        "residual_init": rung.residual_init,
    }
    return ComplexKDAConfig(**settings | ARMS[arm] | overrides)


def num_parameters(config: ComplexKDAConfig) -> int:
    """Parameters of the causal LM, shared ones once, counted on the model itself without memory for it.

    Example:
        >>> num_parameters(build("47M", "transformer"))
        47637888
    """
    from ckda.models.lm import ComplexKDAForCausalLM

    with torch.device("meta"):
        model = ComplexKDAForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def flops_per_token(model: Any, length: int) -> float:
    """Model FLOPs of one trained token, forward and backward: 6 a matmul weight, plus what the mixers do with tokens.

    Attention counts 6 H dh T a layer (its causal half, or its window), a recurrent layer three times its 7 K V a head in the
    recurrent form (decay, read, write, read out), whatever a chunked kernel spends. The embedding's look-up is free; the
    output head counts, tied or not.

    Example:
        >>> from ckda.models import ComplexKDAForCausalLM
        >>> with torch.device("meta"):
        ...     model = ComplexKDAForCausalLM(build("47M", "ckda"))
        >>> round(flops_per_token(model, 2048) / 1e6)
        294
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)
    head = model.get_output_embeddings().weight
    weights += head.numel() if id(head) in tables else 0
    config = model.config
    width, mixing = config.num_heads * config.head_dim, 0
    for mixer in config.mixers():
        if mixer in ATTENTION:
            seen = min(length, 2 * config.sliding_window) if ATTENTION[mixer].windowed else length
            mixing += 6 * width * seen
        else:
            updates = config.num_updates if "product" in mixer else 1
            mixing += 21 * width * (config.head_v_dim or config.head_dim) * updates
    return float(6 * weights + mixing)


class Total(NamedTuple):
    """One number of the tables."""

    size: str
    arm: str
    parameters: int  #: counted
    paper: float | None  #: printed, in millions; None where the paper has none


def totals(arms: tuple[str, ...] | None = None) -> list[Total]:
    """The totals of every size for the arms that its table has, or for the arms named, beside the printed ones.

    Example:
        >>> [f"{t.parameters / 1e6:.2f} {t.paper}" for t in totals() if t.size == "124M"]
        ['124.55 124.55', '125.45 125.45', '125.45 125.45', '124.14 124.14', '124.14 124.14']
    """
    rows = []
    for size, rung in CONFIGS.items():
        table = OWN_ARMS if size in OWN else rung.paper or CONFIGS["340M"].paper
        for arm in arms or table:
            rows.append(Total(size, arm, _count(size, arm), rung.paper.get(arm)))
    return rows


@cache
def _count(size: str, arm: str) -> int:
    return num_parameters(build(size, arm))


def parameter_table() -> str:
    """:func:`totals` as text, in millions, with the sizes' notes below."""
    lines = [f"{'size':<9} {'arm':<20} {'counted':>9} {'paper':>9}"]
    for total in totals():
        paper = "-" if total.paper is None else f"{total.paper:.2f}"
        lines.append(f"{total.size:<9} {total.arm:<20} {total.parameters / 1e6:>9.2f} {paper:>9}")
    lines += [f"{size}: {rung.note}" for size, rung in CONFIGS.items() if rung.note]
    return "\n".join(lines)
