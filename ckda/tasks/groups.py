"""Word problems of finite groups: read a word of group elements, say its product at every step (sec:exp).

    S3, elements e (23) (12) (123) (132) (13), begin token in front (its prediction is not scored):

    input x_t     begin  (12)  (123)   e    (23)
    target y_t      -    (12)  (13)   (13)  (132)        y_t = x_t y_{t-1}, the newest factor on the left

Groups come by name or by table from :mod:`ckda.theory.finite_groups`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckda.theory.finite_groups import FiniteGroup, cycle_notation, group

__all__ = ["WordProblem", "correct_products", "scaled_accuracy"]


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
    letters: tuple[int, ...]  #: the elements that words are made of

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
        """The begin token, one past the elements."""
        return self.group.order

    @property
    def table(self) -> Tensor:
        """[n, n] int64, table[a, b] = ab."""
        return torch.from_numpy(self.group.table).long()

    def names(self) -> list[str]:
        """What the elements are called: cycles for permutations."""
        labels = self.group.labels
        permutations = all(isinstance(x, tuple) and sorted(x) == list(range(len(x))) for x in labels)
        return [cycle_notation(x) if permutations else str(x) for x in labels]

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x [size, 1 + length] with the begin token in front, and the products y [size, length]; made on its device."""
        device = generator.device
        letters = torch.tensor(self.letters, device=device)
        x = letters[torch.randint(len(self.letters), (size, length), generator=generator, device=device)]
        begin = torch.full((size, 1), self.begin, device=device)
        return torch.cat([begin, x], 1), self.products(x)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of each replica [R], from logits [R, B, 1 + T, n] and products [R, B, T]."""
        logits = output[:, :, 1:]
        return cross_entropy(logits.flatten(0, 2), y.flatten(), reduction="none").view_as(y).mean((1, 2))

    def key(self) -> dict[str, Any]:
        """The group and its letters."""
        return {"group": self.group.name, "letters": list(self.letters)}

    def products(self, x: Tensor) -> Tensor:
        """y [..., T] with y_t = x_t ... x_1, by doubling: log T rounds of table look-ups."""
        table = self.table.to(x.device)
        y, shift = x.clone(), 1
        while shift < x.shape[-1]:
            y[..., shift:] = table[y[..., shift:], y[..., :-shift].clone()]
            shift *= 2
        return y


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


def scaled_accuracy(correct: Tensor, lengths: tuple[int, ...], order: int) -> dict[int, float]:
    """Accuracy over the last quarter of each length, chance mapped to 0 and perfection to 1 (app:exp_state_tracking).

    Args:
        correct: [..., T] bool, from one pass to the longest length.
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
