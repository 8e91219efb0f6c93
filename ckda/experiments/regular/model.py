"""The models of ``ckda track --suite regular``: the tracker of the paper's groups, with as many layers as a task needs.

Arms are compared at about equal numbers of parameters: Complex KDA has the task's heads (12 of 16 channels unless said) and a
stream of 48, and every other arm the number of heads (for a GRU the width) that comes nearest to its count (:func:`matched_size`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckda.experiments.regular.tasks import TASKS, Task
from ckda.experiments.tracking.fast import words as fast
from ckda.experiments.tracking.model import Tracker
from ckda.layers.mixers import MIXERS, build_mixer

__all__ = ["ARMS", "SuiteArm", "build_model", "matched_size"]

_WIDTH = 48


class SuiteArm(NamedTuple):
    """A mixer and how many layers of it (None: as many as the task says)."""

    mixer: str
    label: str
    layers: int | None = None


#: the arms of every task, then those that S5 is asked of besides
ARMS: dict[str, SuiteArm] = {
    "ckda": SuiteArm("ckda", "Complex KDA"),
    "kda": SuiteArm("kda", "KDA"),
    "deltaproduct2": SuiteArm("deltaproduct2-wide", "DeltaProduct₂"),
    "gru": SuiteArm("gru", "GRU"),
    "transformer": SuiteArm("attention", "Transformer"),
    "ckda-2-layers": SuiteArm("ckda", "Complex KDA, two layers", 2),
    "ckda-2-factors": SuiteArm("ckda-product2", "Complex KDA, two factors a token"),
    "deltaproduct4": SuiteArm("deltaproduct4", "DeltaProduct₄"),
}


class Layers(nn.Module):
    """Several mixers as one: [B, T, d] -> what all of them add to the stream. Between two stands a GELU layer of width 4 d.

    Example:
        >>> layers = Layers([build_mixer("kda", 16, 2, 4, conv_size=0) for _ in range(2)], 16)
        >>> x = torch.randn(1, 6, 16)
        >>> _, cache = layers.prefill(x[:, :4])
        >>> torch.allclose(layers.prefill(x[:, 4:], cache)[0], layers(x)[:, 4:], atol=1e-5)
        True
    """

    def __init__(self, mixers: Sequence[nn.Module], width: int):
        super().__init__()
        self.mixers = nn.ModuleList(mixers)
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in mixers[1:]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in mixers[1:])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        return self.trace(x)[0]

    def trace(self, x: Tensor, first: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`forward`, and what the mixers read from their states, [B, T, H, V] with all heads in a row (:func:`traced`).

        Args:
            first: what :func:`traced` gives for the first mixer, if it is known.
        """
        added, o = traced(self.mixers[0], x) if first is None else first
        read = [o]
        for mixer, feed, norm in zip(self.mixers[1:], self.feeds, self.norms, strict=True):
            added = added + feed(x + added)
            more, o = traced(mixer, norm(x + added))
            added = added + more
            read.append(o)
        return added, torch.cat(read, -2)

    def prefill(self, x: Tensor, cache: Any = None) -> tuple[Tensor, tuple]:
        """:meth:`forward` from the mixers' caches (None: from the beginning) and the next ones."""
        first: Any = self.mixers[0]
        added, new = first.prefill(x, *(() if cache is None else (cache[0],)))
        caches = [new]
        for i, (feed, norm) in enumerate(zip(self.feeds, self.norms, strict=True), 1):
            mixer: Any = self.mixers[i]
            added = added + feed(x + added)
            more, new = mixer.prefill(norm(x + added), *(() if cache is None else (cache[i],)))
            added = added + more
            caches.append(new)
        return added, tuple(caches)


def traced(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A mixer's output [B, T, d], and its raw readout [B, T, H, V]; of a mixer without one the output again, as one head."""
    if isinstance(mixer, Layers):
        return mixer.trace(x)
    if not hasattr(mixer, "read"):
        y = mixer(x)
        return y, y.unsqueeze(-2)
    o = mixer.read(x)
    return mixer.write_out(o, x), o


class SuiteTracker(Tracker):
    """The tracker, whose trace serves mixers of any kind and several layers."""

    def forward(self, tokens: Tensor, trace: bool = False) -> Any:
        """tokens [B, T] -> logits [B, T, n]; with `trace` also the tokens x and the layers' readouts o [B, T, H, V]."""
        layers = self.mixer if isinstance(self.mixer, Layers) else None
        if layers is None and not trace:
            return super().forward(tokens)
        x, first = self.embedding(tokens), None
        mixer = self.mixer if layers is None else layers.mixers[0]
        if self.by_symbol and fast.serves(mixer, tokens, self.embedding.num_embeddings):
            o = fast.read_words(mixer, self.embedding.weight, tokens)
            first = fast.write_out_words(mixer, o, self.embedding.weight, tokens), o
        added, o = (first or traced(mixer, x)) if layers is None else layers.trace(x, first)
        logits = self.decode(x + added)
        return (logits, {"x": tokens, "o": o}) if trace else logits


def build_model(arm: str, task: str, size: int | None = None) -> SuiteTracker:
    """The model of this arm on this task; `size` is the number of heads (a GRU's width), by default the matched one.

    Example:
        >>> sum(p.numel() for p in build_model("ckda", "parity").parameters())
        24134
    """
    size = matched_size(arm, task) if size is None else size
    problem, (mixer, _, _) = TASKS[task], ARMS[arm]
    width = _WIDTH if MIXERS[mixer].sized else size
    layers = range(num_layers(arm, problem))
    made = [build_mixer(mixer, width, size, problem.head_dim, **_options(mixer, problem.taps(i))) for i in layers]
    layer = made[0] if len(made) == 1 else Layers(made, width)
    return SuiteTracker(layer, problem.num_tokens, problem.num_classes, width, 4 * width)


def num_layers(arm: str, task: Task) -> int:
    """How many mixers stand on each other."""
    return ARMS[arm].layers or task.layers


def _options(mixer: str, taps: int) -> dict[str, Any]:
    kind = MIXERS[mixer]
    if not kind.is_delta_rule:
        return {}
    options: dict[str, Any] = {"conv_size": taps, "activate": kind.options.get("activate", ())}
    return options | ({"gate_init": "spread"} if kind.is_signed else {})


@lru_cache
def matched_size(arm: str, task: str) -> int:
    """The size at which this arm's model has about as many parameters as Complex KDA's with the task's layers.

    Example:
        >>> matched_size("ckda", "parity"), matched_size("gru", "parity")
        (16, 48)
    """
    heads = TASKS[task].heads
    if arm == "ckda":
        return heads
    wanted, best, size = _count("ckda", task, heads), 1, 1
    while (count := _count(arm, task, size)) < 2 * wanted:
        if abs(count - wanted) < abs(_count(arm, task, best) - wanted):
            best = size
        size += 1
    return best


@lru_cache
def _count(arm: str, task: str, size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(arm, task, size).parameters())
