"""What a language model does with its extended ranges: negative gates, learning rates above 1, transitions that rotate.

Per layer and over checkpoints, as in fig:signed_kda_interpretability_llm, fig:signed_kda_interpretability_llm_hybrid and
fig:final_layer_stats_llm. A transition counts as rotating if its spectrum has a non-real pair (thm:complex_eigenvalues), which
is decided by its eigenvalues in float64, on a sample of tokens; gates and learning rates are counted on all of them.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda import transition
from ckda.command import every, filled, make_folder, pick_device
from ckda.layers.complex_kda import ComplexKDA
from ckda.layers.delta_product import DeltaProduct
from ckda.layers.gated_delta import SeparateGates
from ckda.lm.data import TokenStore
from ckda.lm.models import config_of, load_model, text_tokenizer
from ckda.models import ComplexKDAForCausalLM
from ckda.page import empty_figure
from ckda.record import environment, read_json, write_record

__all__ = ["Checkpoint", "Inspection", "Layer", "LayerUse", "Question", "gate_use", "inspect_figure", "rotates", "run"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SHARES = ("negative_gates", "beta_above_1", "complex")
_TITLES = {"negative_gates": "α < 0", "beta_above_1": "β > 1", "complex": "transitions with complex eigenvalues"}
_AT_ONCE = 64  # matrices whose eigenvalues one thread computes in one go


@dataclass(frozen=True)
class Layer:
    """What one layer does: shares of its gates, learning rates and transitions, and quantiles of the first two."""

    layer: int
    mixer: str
    negative_gates: float
    beta_above_1: float
    complex: float
    transitions_decomposed: int
    alpha_quantiles: list[float]
    beta_quantiles: list[float]


@dataclass(frozen=True)
class Checkpoint:
    """One model on the way, and its layers with a state."""

    path: str
    step: int | None
    layers: list[Layer]
    mean: dict[str, float]  #: of the shares over the layers


@dataclass(frozen=True)
class Inspection:
    """The file inspect-lm.json."""

    sequences: int
    length: int
    sample: int
    seed: int
    data: str
    quantiles: list[float]
    checkpoints: list[Checkpoint]
    environment: dict[str, Any]

    @classmethod
    def load(cls, path: str | Path) -> "Inspection":
        """From its file."""
        values = read_json(path)
        values["checkpoints"] = [
            Checkpoint(**c | {"layers": [Layer(**layer) for layer in c["layers"]]}) for c in values["checkpoints"]
        ]
        return cls(**{name: value for name, value in values.items() if name != "what"})


def rotates(A: Tensor, tolerance: float = 1e-7) -> Tensor:
    """Whether the spectrum of A [..., K, K] has a non-real pair, bool [...]. In float64.

    `tolerance` is for the imaginary part relative to the largest modulus: rounding splits a double real eigenvalue into a pair
    of about 1e-8.

    Example:
        >>> k = torch.tensor([1.0, 1.0]) / 2**0.5
        >>> [bool(rotates(transition.dense(torch.tensor([a, 1.0]), k, beta))) for a, beta in ((-1, 2), (-1, 1), (0.9, 2))]
        [True, False, False]
    """
    values = _eigenvalues(A.double())
    return (values.imag.abs() > tolerance * values.abs().amax(-1, keepdim=True)).any(-1)


def _eigenvalues(A: Tensor) -> Tensor:
    """[..., K] of A [..., K, K], on the CPU and over its cores: LAPACK takes one matrix at a time, and a GPU is slower at it."""
    parts = A.flatten(0, -3).cpu().split(_AT_ONCE) if A.dim() > 2 else (A.cpu(),)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        values = list(pool.map(torch.linalg.eigvals, parts))
    return torch.cat(values).unflatten(0, A.shape[:-2]) if A.dim() > 2 else values[0]


class LayerUse:
    """Counts of one layer, batch by batch.

    Args:
        mixer: a delta-rule layer. sample: tokens of each batch whose transitions are decomposed.
    """

    def __init__(self, mixer: ComplexKDA, sample: int, generator: torch.Generator):
        self.mixer, self.sample, self.generator = mixer, sample, generator
        self.negative, self.above, self.rotating = [], [], []  # type: ignore[var-annotated]
        self.alpha: list[Tensor] = []
        self.beta: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """x [B, T, d], the layer's input."""
        T = x.shape[1]
        chosen = torch.randperm(T, generator=self.generator)[: self.sample].sort().values.to(x.device)
        if isinstance(self.mixer, SeparateGates):  # which has no single beta: erasure per channel
            y, _ = self.mixer._project(x, {})
            alpha, beta = self.mixer._alpha(y["g"]), y["erase"]
            self._rotating(self.mixer.matrices(x[:, : len(chosen)]))
        else:
            alpha, k, beta = self.mixer.transitions(x)
            self._rotating(_sampled(self.mixer, alpha, k, beta, chosen))
        self.negative.append((alpha < 0).double().mean())
        self.above.append((beta > 1).double().mean())
        few = torch.randperm(alpha.shape[1], generator=self.generator)[: self.sample].to(x.device)
        self.alpha.append(alpha[:, few].flatten().float().cpu())
        self.beta.append(beta[:, few].flatten().float().cpu())

    def _rotating(self, A: Tensor) -> None:
        self.rotating.append(rotates(A).flatten().double())

    def result(self, layer: int, mixer: str) -> Layer:
        """Shares, quantiles, and how many transitions were decomposed."""
        rotating, q = torch.cat(self.rotating), torch.tensor(QUANTILES)
        return Layer(
            layer,
            mixer,
            negative_gates=float(torch.stack(self.negative).mean()),
            beta_above_1=float(torch.stack(self.above).mean()),
            complex=float(rotating.mean()),
            transitions_decomposed=rotating.numel(),
            alpha_quantiles=torch.quantile(_thin(torch.cat(self.alpha)), q).tolist(),
            beta_quantiles=torch.quantile(_thin(torch.cat(self.beta)), q).tolist(),
        )


def _thin(x: Tensor, most: int = 1_000_000) -> Tensor:
    """At most so many numbers, evenly taken: quantiles of more are no better."""
    return x[:: -(-x.numel() // most)]


def _sampled(mixer: ComplexKDA, alpha: Tensor, k: Tensor, beta: Tensor, tokens: Tensor) -> Tensor:
    """The transitions [B, n, HV, K, K] of the chosen tokens; of several updates a token, their product, newest on the left."""
    n = mixer.num_updates if isinstance(mixer, DeltaProduct) else 1
    A: Tensor | None = None
    for i in range(n):
        at = tokens * n + i
        factor = transition.dense(alpha[:, at].double(), k[:, at].double(), beta[:, at].double())
        A = factor if A is None else factor @ A
    assert A is not None
    return A


@torch.no_grad()
def gate_use(
    model: Any, batches: list[Tensor], sample: int = 32, seed: int = 0, tell: Callable[[int], None] = lambda done: None
) -> list[Layer]:
    """What each recurrent layer of a causal LM does on token ids [B, T]; one entry a layer, attention left out.

    Example:
        >>> from ckda.models import ComplexKDAConfig
        >>> config = ComplexKDAConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        ...                           num_heads=2, head_dim=8, gate_init="spread")
        >>> use = gate_use(ComplexKDAForCausalLM(config), [torch.randint(11, (2, 32))], sample=8)
        >>> [layer.mixer for layer in use], use[0].transitions_decomposed, 0.2 < use[0].negative_gates < 0.8
        (['ckda', 'ckda'], 32, True)
    """
    generator = torch.Generator().manual_seed(seed)
    uses: dict[int, LayerUse] = {}
    handles = []
    for i, block in enumerate(model.model.layers):
        if isinstance(block.mixer, ComplexKDA):
            uses[i] = LayerUse(block.mixer, sample, generator)
            handles.append(block.mixer.register_forward_pre_hook(lambda _, args, use=uses[i]: use.add(args[0])))
    if not uses:
        raise ValueError("the model has no layer with a state; there is nothing to look at")
    was_training = model.training
    try:
        model.eval()
        for done, ids in enumerate(batches):
            model.model(ids, use_cache=False)
            tell(done + 1)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    mixers = model.config.mixers()
    return [use.result(i, mixers[i]) for i, use in uses.items()]


# Looking at models ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """Which models are looked at, on which tokens."""

    paths: tuple[str, ...] = ()  #: none: a tiny model on random tokens
    tokens: str | None = None  #: a folder of ``ckda lm prepare``
    split: str | None = None  #: of the tokens; None: held_out where there is one
    text: str | None = None  #: a text file instead
    tokenizer: str | None = None  #: for the text
    length: int = 4096
    sequences: int = 4
    sample: int = 32  #: tokens a sequence whose eigenvalues are taken
    mixer: str | None = None  #: for weights in flash-linear-attention's layout
    device: str = "cpu"
    seed: int = 0


def run(wanted: Question, show: Callable[[float], None] = lambda fraction: None) -> Inspection:
    """Every model's layers on the same tokens; `show(fraction)` says how much is done."""
    found = [place for path in wanted.paths for place in _expand(Path(path))]
    places: list[Path | None] = [*found] or [None]
    checkpoints: list[Checkpoint] = []
    batches: list[Tensor] = []
    for number, place in enumerate(places):
        model = (_tiny(wanted.seed) if place is None else _load(place, wanted.mixer)).to(wanted.device)
        if not batches:
            vocab = model.config.vocab_size
            ids = _random_tokens(wanted, vocab) if place is None else _tokens(wanted, place, vocab)
            batches = [row.unsqueeze(0).to(wanted.device) for row in ids]
        first, total = number * len(batches), len(places) * len(batches)
        tell = lambda done, first=first, total=total: show((first + done) / total)  # noqa: E731
        layers = gate_use(model, batches, wanted.sample, wanted.seed, tell)
        if checkpoints and [one.layer for one in checkpoints[0].layers] != [one.layer for one in layers]:
            raise ValueError(f"{place} has other layers than {places[0]}; models to compare over time must be alike")
        mean = {name: sum(getattr(layer, name) for layer in layers) / len(layers) for name in SHARES}
        path = "a tiny model" if place is None else str(place)
        checkpoints.append(Checkpoint(path, _step(place), layers, mean))
        del model
    return Inspection(
        sequences=len(batches),
        length=batches[0].shape[1],
        sample=wanted.sample,
        seed=wanted.seed,
        data=wanted.tokens or wanted.text or "random tokens",
        quantiles=list(QUANTILES),
        checkpoints=checkpoints,
        environment=environment(wanted.device),
    )


def _expand(path: Path) -> list[Path]:
    """A run's checkpoints in order (then its final model), or the path itself."""
    steps = sorted((p for p in (path / "checkpoints").glob("step-*") if (p / "checkpoint.json").is_file()), key=_number)
    if steps:
        return steps
    return [path / "model"] if (path / "model" / "config.json").is_file() else [path]


def _number(path: Path) -> int:
    found = re.findall(r"\d+", path.name)
    return int(found[-1]) if found else -1


def _step(place: Path | None) -> int | None:
    """The step in a checkpoint's name."""
    found = None if place is None else re.fullmatch(r"(?:step|checkpoint)[-_]?(\d+)", place.name)
    return None if found is None else int(found[1])


def _load(place: Path, mixer: str | None) -> Any:
    from ckda.compat.convert import load_fla

    if not place.exists():
        raise ValueError(f"{place} does not exist")
    config = place / "config.json"
    if config.is_file() and read_json(config).get("model_type") == "kda":
        return load_fla(place, **({} if mixer is None else {"mixer": mixer}))
    return load_model(place)


def _tokens(wanted: Question, place: Path, vocab_size: int) -> Tensor:
    """int64 [sequences, length], evenly taken from the data."""
    if (wanted.tokens is None) == (wanted.text is None):
        raise ValueError("exactly one of --tokens and --text must be given")
    if wanted.text is None:
        assert wanted.tokens is not None
        splits = [wanted.split] if wanted.split else ["held_out", "train"]
        store = next((s for s in (_store(wanted.tokens, split) for split in splits) if s is not None and len(s)), None)
        store = store or TokenStore(wanted.tokens, splits[-1])
        total, read = len(store), store.read
    else:
        try:
            text = Path(wanted.text).read_text(errors="replace")
        except OSError as error:
            raise ValueError(f"--text {wanted.text}: {error.strerror}") from error
        ids = torch.tensor(text_tokenizer(place, wanted.tokenizer).encode(text).ids)
        total, read = len(ids), lambda start, count: ids[start : start + count].numpy()
    length = min(wanted.length, total)
    if length < 1:
        raise ValueError(f"{wanted.tokens or wanted.text} holds no tokens")
    number = min(wanted.sequences, total // length)
    rows = torch.stack([torch.from_numpy(read(i * (total // number), length)) for i in range(number)])
    if int(rows.max()) >= vocab_size:
        raise ValueError(f"the data has the token {int(rows.max())}; the model's vocabulary has {vocab_size}")
    return rows


def _store(folder: str, split: str) -> Any:
    index = Path(folder) / "index.json"
    if not index.is_file() or split not in read_json(index).get("splits", {}):
        return None
    return TokenStore(folder, split)


def _tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return ComplexKDAForCausalLM(config_of("tiny:ckda-hybrid"))


def _random_tokens(wanted: Question, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(wanted.seed)
    return torch.randint(vocab_size, (wanted.sequences, wanted.length), generator=generator)


def inspect_figure(result: Inspection) -> Any:
    """Above: the three shares by layer and checkpoint, colours on a square-root scale (for one checkpoint, bars).
    Below: quantiles of gates and learning rates by layer at the last checkpoint."""
    from matplotlib.colors import PowerNorm

    figure = empty_figure(figsize=(11, 6.6))
    grid = figure.add_gridspec(2, 6)
    checkpoints = result.checkpoints
    last = checkpoints[-1].layers
    names = [layer.layer for layer in last]
    for column, share in enumerate(SHARES):
        axes = figure.add_subplot(grid[0, 2 * column : 2 * column + 2])
        axes.set_title(_TITLES[share], fontsize=10)
        if len(checkpoints) == 1:
            axes.bar(range(len(last)), [getattr(layer, share) for layer in last], color="#16548c")
            axes.set(xlabel="layer", ylim=(0, None))
            axes.set_xticks(range(len(last)), [str(name) for name in names], fontsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            continue
        values = [[getattr(one.layers[i], share) for one in checkpoints] for i in range(len(last))]
        top = max(max(row) for row in values) or 1.0
        image = axes.imshow(values, aspect="auto", origin="lower", cmap="viridis", norm=PowerNorm(0.5, 0, top))
        axes.set_yticks(range(len(last)), [str(name) for name in names], fontsize=7)
        steps = [str(i if one.step is None else one.step) for i, one in enumerate(checkpoints)]
        every = -(-len(steps) // 6)
        axes.set_xticks(range(0, len(steps), every), steps[::every], fontsize=7)
        axes.set(xlabel="step", ylabel="layer" if column == 0 else "")
        figure.colorbar(image, ax=axes)
    for column, (key, title) in enumerate((("alpha_quantiles", "gate α"), ("beta_quantiles", "learning rate β"))):
        axes = figure.add_subplot(grid[1, 3 * column : 3 * column + 3])
        _bands(axes, names, [getattr(layer, key) for layer in last])
        axes.set(title=f"{title} at the last checkpoint: median, middle 50% and 90%", xlabel="layer")
        axes.title.set_fontsize(10)
    return figure


def _bands(axes: Any, layers: Sequence[int], quantiles: Sequence[list[float]]) -> None:
    low, lower, middle, upper, high = (list(column) for column in zip(*quantiles, strict=True))
    axes.fill_between(layers, low, high, color="#16548c", alpha=0.18, linewidth=0)
    axes.fill_between(layers, lower, upper, color="#16548c", alpha=0.35, linewidth=0)
    axes.plot(layers, middle, "o-", color="#16548c", markersize=3)
    axes.set_xticks(layers, [str(layer) for layer in layers], fontsize=7)
    axes.axhline(0, color="#9aa5b1", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


# The command ----------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Look, write, draw, tell."""
    if args.smoke:
        args.length, args.sequences, args.sample = min(args.length, 64), 1, 4
    elif not args.paths:
        raise ValueError("there is no PATH; give a model folder, a checkpoint or a run")
    out, began, say = make_folder(args.out), time.monotonic(), every(2, args.json)

    def show(fraction: float) -> None:
        left = (time.monotonic() - began) * (1 - fraction) / fraction
        say(f"{fraction:.0%} looked at, about {left:.0f} s left")

    found = run(filled(Question, args, paths=tuple(args.paths), device=pick_device(args.device)), show)
    written = write_record(out / "inspect-lm.json", {"what": "ckda inspect lm"} | asdict(found))
    inspect_figure(found).savefig(out / "inspect-lm.png", dpi=160)
    if args.json:
        print(written.read_text(), end="")
    else:
        _print(found, written)
    return 0


def _print(result: Inspection, path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    last = result.checkpoints[-1]
    table = Table(title=f"{last.path}: {result.sequences} x {result.length} tokens")
    for name in ("layer", "mixer", "α < 0", "β > 1", "complex", "decomposed", "median α", "median β"):
        table.add_column(name, justify="right")
    for layer in last.layers:
        shares = (f"{getattr(layer, name):.2%}" for name in SHARES)
        medians = (f"{values[len(QUANTILES) // 2]:.3f}" for values in (layer.alpha_quantiles, layer.beta_quantiles))
        table.add_row(str(layer.layer), layer.mixer, *shares, str(layer.transitions_decomposed), *medians)
    table.add_row("mean", "", *(f"{last.mean[name]:.2%}" for name in SHARES), "", "", "")
    console = Console()
    console.print(table)
    console.print(str(path), highlight=False, soft_wrap=True)
