"""Word problems of finite groups: read a word of group elements, say its product at every step (sec:exp).

    S3, elements e (23) (12) (123) (132) (13), begin token in front (its prediction is not scored):

    input x_t     begin  (12)  (123)   e    (23)
    target y_t      -    (12)  (13)   (13)  (132)        y_t = x_t y_{t-1}, the newest factor on the left

Groups come by name or by table from :mod:`ckda.groups`. The shell game is the word problem of S_n over swaps of
two cups, with noise tokens in between that mean nothing:

    input x_t     begin  (12)  noise  (23)  noise        which cups were swapped
    target y_t      -    (12)  (12)  (132)  (132)        where the cups are
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckda.experiments.common.closure import closure
from ckda.experiments.tracking.penalties import relations
from ckda.groups import FiniteGroup, cycle_notation, from_table, group
from ckda.record import read_json

__all__ = ["WordProblem", "correct_products", "read_table", "scaled_accuracy", "shell_game", "task_named"]

#: sequences of a batch on which penalties are computed
_PENALTY_WORDS = 256
_SAMPLED_PAIRS = 64  # of letters, of each replica


@dataclass(frozen=True, eq=False)
class WordProblem:
    """The word problem of one group, over all of its elements or over some of them.

    Example:
        >>> task = WordProblem.named("S3")
        >>> x, y = task.batch(2, 5, torch.Generator().manual_seed(0))
        >>> x.shape, y.shape, bool((x[:, 0] == task.begin).all())
        (torch.Size([2, 6]), torch.Size([2, 5]), True)
        >>> int(y[0, 1]) == int(task.table[x[0, 2], y[0, 0]])
        True
    """

    group: FiniteGroup
    letters: tuple[int, ...]  #: the tokens that words are made of
    meaning: tuple[int, ...] = ()  #: the element that each token stands for; empty: token i is element i
    smoothing: float = 0.0  #: of the labels: this share of the probability is asked for on all elements alike
    _on: dict[Any, Any] = field(default_factory=dict, repr=False)  # tensors by device, and sub-problems

    @classmethod
    def named(cls, name: str, letters: tuple[int, ...] | None = None) -> "WordProblem":
        """The problem of the group with this name (Z5, D4, S3, A5, Q8, S3xZ2, ...), by default over all elements."""
        G = group(name)
        return cls(G, tuple(range(G.order)) if letters is None else letters)

    @property
    def order(self) -> int:
        return self.group.order

    @property
    def begin(self) -> int:
        """The begin token, one past the others."""
        return len(self.meaning) or self.group.order

    @property
    def num_tokens(self) -> int:
        """All tokens, the begin token included."""
        return self.begin + 1

    @cached_property
    def table(self) -> Tensor:
        """[n, n] int64, table[a, b] = ab."""
        return torch.from_numpy(self.group.table).long()

    @cached_property
    def pairs(self) -> Tensor:
        """[2, n (n + 1) / 2] the pairs of letters."""
        return torch.combinations(torch.arange(self.begin), with_replacement=True).T.contiguous()

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        """`table`, `pairs`, `letters` or `meaning` on this device, copied there once."""
        if (name, device) not in self._on:
            value = getattr(self, name)
            self._on[name, device] = (value if isinstance(value, Tensor) else torch.tensor(value)).to(device)
        return self._on[name, device]

    def elements(self, x: Tensor) -> Tensor:
        """What tokens stand for."""
        return self._tensor("meaning", x.device)[x] if self.meaning else x

    def names(self) -> list[str]:
        """What the elements are called: cycles for permutations."""
        labels = self.group.labels
        permutations = all(isinstance(x, tuple) and sorted(x) == list(range(len(x))) for x in labels)
        return [cycle_notation(x) if permutations else str(x) for x in labels]

    def over(self, letters: str) -> "WordProblem":
        """The same problem on fewer inputs, by name: "all", "generators" (a small generating set), "involutions" (elements
        of order 1 and 2), or "half" (the largest proper normal subgroup).

        Example:
            >>> task = WordProblem.named("S4")
            >>> [len(task.over(name).letters) for name in ("all", "generators", "involutions", "half")]
            [24, 2, 10, 12]
        """
        if letters not in self._on:
            self._on[letters] = replace(self, letters=self._letters(letters), _on={})
        return self._on[letters]

    def _letters(self, name: str) -> tuple[int, ...]:
        G = self.group
        if name == "all":
            return self.letters
        if name == "generators":
            wanted = set(G.generators)
        elif name == "involutions":
            wanted = {i for i, order in enumerate(G.orders) if order <= 2}
        elif name == "half":
            wanted = set([N for N in G.normal_subgroups if len(N) < G.order][-1])  # they come by size
        else:
            raise ValueError(f"letters is {name!r}; it may be 'all', 'generators', 'involutions' or 'half'")
        chosen = tuple(t for t in self.letters if (self.meaning[t] if self.meaning else t) in wanted)
        if not chosen:
            raise ValueError(f"letters is {name!r}; no input of this problem is one of them")
        return chosen

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x [size, 1 + length] with the begin token in front, and the products y [size, length]; made on its device."""
        device = generator.device
        letters = self._tensor("letters", device)
        x = letters[torch.randint(len(self.letters), (size, length), generator=generator, device=device)]
        begin = torch.full((size, 1), self.begin, device=device)
        return torch.cat([begin, x], 1), self.products(self.elements(x))

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of each replica [R], from logits [R, B, 1 + T, n] and products [R, B, T]."""
        rows = output[:, :, 1:].flatten(0, 2)
        each = cross_entropy(rows, y.flatten(), reduction="none", label_smoothing=self.smoothing)
        return each.view_as(y).mean((1, 2))

    def penalty(self, name: str, trace: dict[str, Tensor], y: Tensor) -> Tensor:
        """[R] one of six, from the model's trace (:meth:`ckda.experiments.tracking.model.Tracker.forward`):

        closure        equal input and product, equal readout (:func:`ckda.experiments.common.closure.closure`), each head
        defect         mean of 1 - alpha^2 plus mean of beta (2 - beta): zero exactly where transitions are orthogonal
        homomorphism   |A_x A_y - A_xy|_F^2 / K over all pairs of elements, mean over heads: zero exactly where the
                       transitions of the elements multiply like the elements
        relations      the letters move the state like a finite group, whichever (:func:`.penalties.relations`)
        sharp          the same by the logarithm of each head's error
        sampled        the same on 64 pairs of letters alone, those that the batch's first words begin with
        """
        if name == "closure":
            o, x, y = (t[:, :_PENALTY_WORDS] for t in (trace["o"], trace["x"], y))
            label = self.elements(x[:, :, 1:]) * self.order + y
            return closure(o[:, :, 1:], label, self.order**2)
        if name == "defect":
            alpha, beta = trace["alpha"], trace["beta"]
            return (1 - alpha.square()).flatten(1).mean(1) + (beta * (2 - beta)).flatten(1).mean(1)
        if name == "homomorphism":
            A = trace["A"].transpose(1, 2)  # [R, H, n, K, K]
            table = self._tensor("table", A.device)
            products = A.unsqueeze(3) @ A.unsqueeze(2)  # [R, H, n, n, K, K]
            images = A.index_select(2, table.flatten()).unflatten(2, table.shape)
            return (products - images).square().sum((-2, -1)).flatten(1).mean(1) / A.shape[-1]
        if name in ("relations", "sharp", "sampled"):
            A, b, start = (trace[part] for part in ("A", "b", "start"))
            pairs = self._tensor("pairs", A.device).unsqueeze(1)
            if name == "sampled":
                pairs = trace["x"][:, :_SAMPLED_PAIRS, 1:3].permute(2, 0, 1)
            return relations(A, b, start, pairs, name != "relations")
        raise ValueError(
            f"there is no penalty {name!r}; there are 'closure', 'defect', 'homomorphism', 'relations', 'sharp' and 'sampled'"
        )

    def key(self) -> dict[str, Any]:
        """The group, its letters and what they mean, and what is asked otherwise than by the paper."""
        more: dict[str, Any] = {"meaning": list(self.meaning)} if self.meaning else {}
        more |= {"smoothing": self.smoothing} if self.smoothing else {}
        return {"group": self.group.name, "letters": list(self.letters)} | more

    def products(self, x: Tensor) -> Tensor:
        """y [..., T] with y_t = x_t ... x_1 of elements x, by doubling: log T rounds of table look-ups."""
        table = self._tensor("table", x.device)
        y, shift = x.clone(), 1
        while shift < x.shape[-1]:
            y[..., shift:] = table[y[..., shift:], y[..., :-shift].clone()]
            shift *= 2
        return y


def shell_game(cups: int, noise: int = 4) -> WordProblem:
    """Swaps of two of `cups` cups among `noise` noise tokens, each token equally likely.

    Example:
        >>> task = shell_game(3)
        >>> task.order, task.num_tokens, [task.names()[e] for e in task.meaning]
        (6, 8, ['(23)', '(12)', '(13)', 'e', 'e', 'e', 'e'])
    """
    G = group(f"S{cups}")
    swaps = [i for i, label in enumerate(G.labels) if sum(a != b for a, b in enumerate(label)) == 2]
    meaning = (*swaps, *[G.identity] * noise)
    return WordProblem(G, tuple(range(len(meaning))), meaning)


def read_table(path: str | Path) -> FiniteGroup:
    """The group whose multiplication table stands in a JSON file, [[...], ...] of numbers from 0 or of names, or {"table": it}.

    table[a][b] is the product ab; a table that is no group is refused with the reason.
    """
    rows = read_json(path)
    if isinstance(rows, dict):  # as `ckda theory compile` reads it
        rows = rows.get("table")
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, list) and len(row) == len(rows) for row in rows)
        or not rows
    ):
        raise ValueError(f"{path} holds no square table; a group is [[...], ...], entry a, b the product of a and b")
    if all(isinstance(v, int) for row in rows for v in row):
        return from_table(rows, name=Path(path).stem)
    names = rows[0]  # with names the first row is that of the identity
    try:
        numbers = [[names.index(v) for v in row] for row in rows]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; with names the first row must list all elements") from error
    return from_table(numbers, Path(path).stem, names)


def task_named(text: str) -> WordProblem:
    """The task of that name; ValueError with what there is otherwise.

    Example:
        >>> [task_named(name).order for name in ("parity", "shell3", "S4", "S4:generators", "Q8", "Z2xZ3")]
        [2, 6, 24, 24, 8, 6]
    """
    name, _, letters = text.partition(":")
    if name == "parity":
        task = WordProblem.named("Z2")
    elif cups := re.fullmatch(r"shell(\d+)", name):
        if not 2 <= int(cups[1]) <= 5:
            raise ValueError(f"{name} has {cups[1]} cups; the shell game is played with 2 to 5, as shell3")
        task = shell_game(int(cups[1]))
    elif name.endswith(".json"):
        try:
            G = read_table(name)
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from error
        task = WordProblem(G, tuple(range(G.order)))
    else:
        task = WordProblem.named(name)
    if task.order < 2:
        raise ValueError(f"{text} has one element; there is nothing to track")
    return task.over(letters) if letters else task


# Scores --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def correct_products(
    model: Callable[[Tensor], Tensor],
    task: WordProblem,
    replicas: int,
    size: int,
    length: int,
    device: str,
    batch: int = 64,
) -> Tensor:
    """[R, size, length] bool: which products a model of R replicas gets right, on words that training did not draw."""
    generator = torch.Generator(device).manual_seed(1_000_000)
    parts = []
    for start in range(0, size, batch):
        x, y = task.batch(min(batch, size - start), length, generator)
        parts.append(model(x.expand(replicas, *x.shape))[:, :, 1:].argmax(-1) == y)
    return torch.cat(parts, 1)


@torch.no_grad()
def correct_in_passing(
    prefill: Callable[[Tensor, Any], tuple[Tensor, Any]],
    task: WordProblem,
    replicas: int,
    size: int,
    length: int,
    device: str,
    segment: int = 512,
) -> Tensor:
    """[R, length] float64: at each step the share of `size` words that are right, the state carried from segment to segment.

    Args:
        prefill: tokens [R, B, t] and a cache (None at first) -> logits [R, B, t, n] and the next cache.
    """
    generator = torch.Generator(device).manual_seed(1_000_000)
    x, y = task.batch(size, length, generator)
    shares, cache = [], None
    bounds = [0, *range(1 + segment, 1 + length, segment), 1 + length]
    for first, last in pairwise(bounds):
        part = x[:, first:last]
        logits, cache = prefill(part.expand(replicas, *part.shape), cache)
        if first == 0:
            logits = logits[:, :, 1:]
        right = logits.argmax(-1) == y[:, max(0, first - 1) : last - 1]
        shares.append(right.double().mean(1))
    return torch.cat(shares, 1)


def scaled_accuracy(correct: Tensor, lengths: tuple[int, ...], order: int) -> dict[int, float]:
    """Accuracy over the last quarter of each length, chance mapped to 0 and perfection to 1 (app:exp_state_tracking).

    Args:
        correct: [..., T] bool (or shares), from one pass to the longest length.
        lengths: each at most T. order: of the group, whose chance is 1 / order.

    Example:
        >>> scaled_accuracy(torch.tensor([True] * 6 + [False] * 2), (4, 8), 2)
        {4: 1.0, 8: -1.0}
    """
    scores = {}
    for length in lengths:
        quarter = correct[..., length - max(1, length // 4) : length].double().mean().item()
        scores[length] = (quarter - 1 / order) / (1 - 1 / order)
    return scores
