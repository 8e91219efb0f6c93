"""The one-layer model of the state-tracking experiments (app:exp_state_tracking), and how it may start."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ckda.experiments.tracking.fast import words as fast
from ckda.experiments.tracking.fast.readout import bias_gelu, norm_of_words
from ckda.groups import FiniteGroup, from_table, hamilton, isomorphism
from ckda.layers.mixers import MIXERS, build_mixer
from ckda.train.stacked_linear import product

if TYPE_CHECKING:
    from ckda.experiments.tracking.task import WordProblem

__all__ = ["STARTS", "Tracker", "build_tracker", "icosahedral_quaternions"]


class Tracker(nn.Module):
    """Embedding, one mixer with a residual around it, LayerNorm, a two-layer GELU readout to the group's elements.

    Args:
        mixer: [B, T, width] -> [B, T, width].
        num_tokens: the group's order and one for the begin token. num_classes: the group's order.

    Attributes:
        by_symbol: project each symbol once instead of every token, where the mixer can.

    Example:
        >>> from ckda import ComplexKDA
        >>> model = Tracker(ComplexKDA(48, 12, 16, conv_size=0, activate=()), num_tokens=7, num_classes=6)
        >>> model(torch.zeros(2, 9, dtype=torch.long)).shape
        torch.Size([2, 9, 6])
    """

    by_symbol = True

    def __init__(self, mixer: nn.Module, num_tokens: int, num_classes: int, width: int = 48, inner: int = 192):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.mixer: Any = mixer
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Sequential(nn.Linear(width, inner), nn.GELU())
        self.classifier = nn.Linear(inner, num_classes)

    def forward(self, tokens: Tensor, trace: bool = False) -> Any:
        """tokens [B, T] -> logits [B, T, num_classes]; with `trace` also what a penalty may look at:

        x             [B, T] the tokens
        o             [B, T, H, V] the mixer's raw readout, before norm and projection
        alpha, beta   [n, H, K] and [n, H] on each input symbol (only of mixers that have them)
        A, b          [n, H, K, K] and [n, H, K, V]: an input symbol maps the state S to A S + b (likewise)
        start         [H, K, V] the state after the begin token (likewise)
        """
        if self._reads_words(tokens):
            o = fast.read_words(self.mixer, self.embedding.weight, tokens)
            logits = self._decode_words(o, tokens)
        else:
            x = self.embedding(tokens)
            if not trace:
                return self.decode(x + self.mixer(x))
            o = self.mixer.read(x)
            logits = self.decode(x + self.mixer.write_out(o, x))
        return (logits, {"x": tokens, "o": o} | self.symbols()) if trace else logits

    def _reads_words(self, tokens: Tensor) -> bool:
        """Whether the mixer is given a table and letters rather than a row a token."""
        return self.by_symbol and fast.serves(self.mixer, tokens, self.embedding.num_embeddings)

    def symbols(self) -> dict[str, Tensor]:
        """alpha, beta, A, b and start of :meth:`forward`'s trace: what each input symbol does to the state."""
        seen: dict[str, Tensor] = {}
        x = self.embedding.weight[None, :-1]
        if hasattr(self.mixer, "transitions"):
            try:
                alpha, _, beta = self.mixer.transitions(x)
                seen |= {"alpha": alpha[0], "beta": beta[0]}
            except NotImplementedError:
                pass
        if hasattr(self.mixer, "matrices"):
            writes = self.mixer.writes(self.embedding.weight[None])[0]
            seen |= {"A": self.mixer.matrices(x)[0], "b": writes[:-1], "start": writes[-1]}
        return seen

    def prefill(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """:meth:`forward` from a cache of the mixer (None: from the beginning) and the next one."""
        x = self.embedding(tokens)
        y, cache = self.mixer.prefill(x, cache)
        return self.decode(x + y), cache

    def decode(self, x: Tensor) -> Tensor:
        """From the residual stream [..., width] to logits."""
        return self.classifier(self.readout(self.norm(x)))

    def _decode_words(self, o: Tensor, tokens: Tensor) -> Tensor:
        """:meth:`decode` after the mixer's readout o [B, T, H, V]; on a GPU in fewer and larger kernels."""
        table, first = self.embedding.weight, self.readout[0]
        assert isinstance(first, nn.Linear)
        y = fast.write_out_words(self.mixer, o, table, tokens)
        if not tokens.is_cuda:
            return self.decode(fast.rows_of(table, tokens) + y)
        z = norm_of_words(y, table, tokens, self.norm.weight, self.norm.bias, self.norm.eps)
        return self.classifier(bias_gelu(product(z, first.weight), first.bias))

    def uses_muon(self, name: str, parameter: Tensor) -> bool:
        """Muon takes every matrix but the embedding and the classifier; AdamW takes the rest."""
        return parameter.dim() == 2 and not name.startswith(("embedding", "classifier"))


def build_tracker(
    mixer: str,
    task: "WordProblem",
    *,
    width: int = 48,
    heads: int = 12,
    head_dim: int = 16,
    activate: Collection[str] | None = None,
    beta_init: str = "standard",
    start: str = "random",
    by_symbol: bool = True,
) -> Tracker:
    """The tracker of app:exp_state_tracking with this mixer: no convolution, spread signed gates.

    Args:
        mixer: a name of :data:`ckda.layers.MIXERS`. activate: which of q, k, v have SiLU (None: as the mixer has it, or none).
        beta_init: "standard" or "spread" (where beta reaches 2).
        start: a name of :data:`STARTS`. by_symbol: see :class:`Tracker`.

    Example:
        >>> from ckda.experiments.tracking.task import WordProblem
        >>> model = build_tracker("ckda", WordProblem.named("S3"))
        >>> sum(p.numel() for p in model.parameters())
        56530
    """
    options: dict[str, Any] = {}
    if MIXERS[mixer].is_delta_rule if mixer in MIXERS else False:
        its_own = MIXERS[mixer].options.get("activate", ())
        options = {"conv_size": 0, "activate": tuple(its_own if activate is None else activate)}
        if MIXERS[mixer].is_signed:
            options["gate_init"] = "spread"
        if beta_init != "standard":
            options["beta_init"] = beta_init
    layer = build_mixer(mixer, width, heads, head_dim, **options)
    model = Tracker(layer, task.num_tokens, task.order, width, 4 * width)
    model.by_symbol = by_symbol
    if start not in STARTS:
        raise ValueError(f"start is {start!r}; it may be one of {', '.join(map(repr, STARTS))}")
    STARTS[start](model, task)
    return model


# Starts --------------------------------------------------------------------------------------------------------------


def _random(model: Tracker, task: "WordProblem") -> None:
    """As the layers are made."""


@torch.no_grad()
def _near_orthogonal(model: Tracker, task: "WordProblem", logit: float = 4.0, gate: float = 8.0) -> None:
    """The heads with the larger learning rates start near orthogonal transitions: beta near 2, gates near -1 and 1."""
    mixer = model.mixer
    _need_two_spreads(mixer, "orthogonal-half")
    for head in _leading(mixer):
        rows = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
        mixer.b_proj.bias[head] = logit
        mixer.dt_bias[rows] = torch.copysign(torch.full((mixer.head_dim,), gate), mixer.dt_bias[rows])


@torch.no_grad()
def _quarters(model: Tracker, task: "WordProblem") -> None:
    """:func:`_near_orthogonal` with a quarter of those heads' gates negative.

    In the four-dimensional encoding of rotations (prop:so3-four-dimensional-encoding) the signs are the same for all inputs, one
    negative in four, and only keys differ: quaternions, whose real part has a quarter of the energy on average over SO(3).
    """
    _near_orthogonal(model, task)
    mixer = model.mixer
    K = mixer.head_dim
    for head in _leading(mixer):
        signs = torch.where(torch.randperm(K) < K // 4, -1.0, 1.0)
        rows = mixer.dt_bias[head * K : (head + 1) * K]
        rows.copy_(rows.abs() * signs)


@torch.no_grad()
def _signs(model: Tracker, task: "WordProblem") -> None:
    """:func:`_near_orthogonal` with gates whose signs differ from input to input, not only from channel to channel.

    S4 acts on three dimensions by (I - 2 k k^T) D where both k and the signs D depend on the element: in the basis (1, -1, 0),
    (1, 1, 0), (0, 0, 1) every element has such a factorisation, and no fixed D serves all of them.
    """
    _near_orthogonal(model, task)
    mixer = model.mixer
    K = mixer.head_dim
    for head in _leading(mixer):
        rows = slice(head * K, (head + 1) * K)
        gate = mixer.dt_bias[rows].abs().mean()
        u = mixer.f_proj(model.embedding.weight)[:, rows]
        mixer.f_proj[1].weight[rows] *= (gate / u.std(0))[:, None]
        mixer.dt_bias[rows] = 0


def _leading(mixer: Any) -> list[int]:
    """The heads that beta spread starts with the larger learning rates."""
    return (mixer.b_proj.bias > 0).nonzero().flatten().tolist()


@torch.no_grad()
def _quaternions(
    model: Tracker, task: "WordProblem", heads: int = 2, logit: float = 12.0, begin_key: bool = False
) -> None:
    """Two heads start as the paper's tracker of A5 (app:A5const): ``A_g = (I - 2 q_g q_g^T) Diag(-1, 1, 1, 1)``.

    The embedding holds the quaternion and a 1 (the begin token two ones), the keys of those heads read the quaternion, their
    gates and learning rates stand at their ends. All the rest is random, everything trains. Nothing has to be written at
    the beginning: a value v = C^T q, C with first row zero, makes ``S_t - C = A_g (S_{t-1} - C)``, so that the state runs
    through C - A C from zero. With `begin_key` the begin token keeps the random key that it has, as in the authors' code.
    """
    mixer = model.mixer
    _need_two_spreads(mixer, "quaternions")
    if mixer.head_dim != 4:
        raise ValueError(f"start 'quaternions' needs heads of 4, not of {mixer.head_dim}")
    embedding = model.embedding.weight
    embedding.zero_()
    embedding[:-1, :4] = torch.from_numpy(icosahedral_quaternions(task.group)).float()
    embedding[:, 4], embedding[-1, 5] = 1.0, 1.0
    for head in range(heads):
        rows = slice(4 * head, 4 * head + 4)
        begin = mixer.k_proj.weight[rows, 5].clone()
        mixer.k_proj.weight[rows] = torch.eye(4, mixer.hidden_size)
        if begin_key:
            mixer.k_proj.weight[rows, 5] = begin
        mixer.f_proj[1].weight[rows] = 0
        mixer.dt_bias[rows] = torch.tensor([-logit, logit, logit, logit])
        mixer.b_proj.weight[head] = 0
        mixer.b_proj.bias[head] = logit


def _need_two_spreads(mixer: Any, start: str) -> None:
    if getattr(mixer, "gate", None) != "signed" or getattr(mixer, "beta_init", None) != "spread":
        raise ValueError(f"start {start!r} needs Complex KDA with beta spread")


#: how a tracker starts, by name
STARTS: dict[str, Callable[[Tracker, "WordProblem"], None]] = {
    "random": _random,
    "orthogonal-half": _near_orthogonal,
    "orthogonal-quarter": _quarters,
    "orthogonal-by-input": _signs,
    "quaternions": _quaternions,
    "quaternions-begin": partial(_quaternions, begin_key=True),
}


def icosahedral_quaternions(G: FiniteGroup) -> np.ndarray:
    """[60, 4] a unit quaternion for every element of a group isomorphic to A5, with q_a q_b = +- q_ab (app:A5const).

    Example:
        >>> from ckda.groups import group
        >>> G = group("A5")
        >>> q = icosahedral_quaternions(G)
        >>> ab = np.array(hamilton(q[7], q[11]))
        >>> bool(np.isclose(abs(ab @ q[G.table[7, 11]]), 1))
        True
    """
    phi = (1 + 5**0.5) / 2
    generators = [np.array([phi, 0, phi - 1, 1]) / 2, np.array([1, 1, 1, 1]) / 2]
    found = [np.array([1.0, 0, 0, 0])]
    for q in found:  # grows while it is walked: each class up to sign once
        for g in generators:
            new = np.array(hamilton(list(g), list(q)))
            if np.abs(np.stack(found) @ new).max() < 0.999:
                found.append(new)
    Q = np.stack(found)
    products = np.stack([np.array(hamilton(list(a), list(Q.T))).T for a in Q])  # [60, 60, 4]
    images = isomorphism(G, from_table(np.abs(products @ Q.T).argmax(-1), "2I / +-1"))
    if images is None:
        raise ValueError(f"{G.name} is not isomorphic to A5; only A5 starts from quaternions")
    return Q[images]
