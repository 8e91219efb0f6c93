"""One layer that tracks a group: heads that are decoded one after the other, checked on every reachable state.

A head need not follow the group by itself (prop:so3-four-dimensional-encoding is one that does). What counts is that
all heads together determine the running product. Here they do so in a cascade: the last head is decoded first, and the
state of a head together with what the heads after it have told determines one thing more. A :class:`Stage` is a head
with the groups whose running products are known once it has been decoded; the first stage knows the group itself.

:func:`check_layer` proves it for all words: it enumerates the pairs (state of the head, what is known already) that can
occur, exactly, labels each by the first word that reaches it, and demands that every update of every pair agrees.

Example:
    >>> from ckda.groups import group
    >>> from ckda.theory.verdicts import find_layer
    >>> layer = find_layer(group("Q8"))
    >>> layer.dimensions, [decoded.pairs for decoded in check_layer(layer)]
    ([2, 2], [16, 4])
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from ckda.groups import FiniteGroup
from ckda.theory.claims import Refuted
from ckda.theory.groups import Head, SignedHouseholder, orbit, planar_field, planar_rotation

__all__ = [
    "Decoded",
    "Layer",
    "Stage",
    "States",
    "Turn",
    "best_query",
    "check_layer",
    "enumerate_states",
    "join",
    "one_head",
    "readouts",
    "separation",
]

STATE_LIMIT = 100_000  #: states of one head, or pairs to follow, beyond which a layer is refused


@dataclass(frozen=True)
class Turn:
    """A planar transition known by its angle: the turn by 2 pi j / n, after a reflection in the first axis if `flip`.

    Angles add: H(a) H(b) is the turn by 2 (a - b) for keys at the angles a and b, for all real a and b
    (prop:planar-groups, proved with symbols). So states of planar heads are counted with whole numbers.

    Example:
        >>> Turn(5, 1).form.matrix == planar_rotation(planar_field(5), 1, 5)
        True
    """

    n: int
    j: int
    flip: bool = False

    @property
    def signs(self) -> tuple[int, int]:
        return (1, 1) if self.flip else (1, -1)

    @property
    def form(self) -> SignedHouseholder:
        """The same with an exact key: H(k) Diag(signs) is the reflection whose mirror has half the angle."""
        F = planar_field(self.n)
        turn = planar_rotation(F, self.j, self.n)
        key = [1 - turn[0, 0], -turn[1, 0]] if self.j % self.n else [0, 1]
        return SignedHouseholder(self.signs, F.vector(key))

    def unit_key(self) -> np.ndarray:
        """[2] float64."""
        half = np.pi * (self.j % self.n) / self.n
        return np.array([np.sin(half), -np.cos(half)])

    def float_lengths(self) -> np.ndarray:
        """[2] ones: the coordinates are orthonormal."""
        return np.ones(2)

    def times(self, j: int, flip: bool) -> tuple[int, bool]:
        """This transition after the state (j, flip)."""
        return (self.j + (-j if self.flip else j)) % self.n, self.flip != flip


Transition = SignedHouseholder | Turn


@dataclass(frozen=True, eq=False)
class Stage:
    """One head: a transition for every letter, and the groups whose running products are known once it is decoded."""

    transitions: tuple[Transition, ...]  #: by letter
    groups: tuple[FiniteGroup, ...]
    images: tuple[tuple[int, ...], ...]  #: by letter: the element of each of these groups that it stands for
    label: str  #: where the head comes from

    @property
    def dimension(self) -> int:
        return len(self.transitions[0].signs)

    def follow(self, others: Sequence[FiniteGroup], images: Sequence[Sequence[int]]) -> "Stage":
        """The same head where the running products of `others` are known before it."""
        if not others:
            return self
        both = tuple((*mine, *theirs) for mine, *theirs in zip(self.images, *images, strict=True))
        return replace(self, groups=(*self.groups, *others), images=both)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer that tracks `group` on words over `letters`; the last stage is decoded first."""

    group: FiniteGroup
    letters: tuple[int, ...]  #: elements of the group
    stages: tuple[Stage, ...]

    @property
    def dimensions(self) -> list[int]:
        return [stage.dimension for stage in self.stages]

    @property
    def labels(self) -> list[str]:
        """Where the heads come from, each source once."""
        return list(dict.fromkeys(stage.label for stage in self.stages))

    def over(self, letters: Sequence[int]) -> "Layer":
        """The same layer for words over some of its letters."""
        where = [self.letters.index(a) for a in letters]

        def kept(stage: Stage) -> Stage:
            transitions = tuple(stage.transitions[i] for i in where)
            return replace(stage, transitions=transitions, images=tuple(stage.images[i] for i in where))

        return Layer(self.group, tuple(letters), tuple(kept(stage) for stage in self.stages))


def one_head(head: Head) -> Layer:
    """The layer of a head that tracks its group by itself."""
    everyone = tuple(range(head.group.order))
    stage = Stage(head.transitions, (head.group,), tuple((a,) for a in everyone), head.label)
    return Layer(head.group, everyone, (stage,))


def join(G: FiniteGroup, parts: Sequence[tuple[Layer, Sequence[int]]]) -> Layer:
    """Layers side by side: part i is fed the element images_i[g] of its group; together they must determine G.

    Nothing is checked here: :func:`check_layer` tells whether they do.
    """
    stages: list[Stage] = []
    for i, (layer, images) in enumerate(parts):
        others = [other.group for other, _ in parts[i + 1 :]]
        later = [list(x) for _, x in parts[i + 1 :]]
        fed = layer.over(images)
        stages += [stage.follow(others, later) for stage in fed.stages]
    everyone = tuple(range(G.order))
    first = replace(stages[0], groups=(G,), images=tuple((g,) for g in everyone))
    return Layer(G, everyone, (first, *stages[1:]))


# states


@dataclass(frozen=True, eq=False)
class States:
    """The reachable states of one head, numbered from S_0 = I: state 0."""

    matrices: np.ndarray  #: [states, d, d] float64, in orthonormal coordinates
    step: np.ndarray  #: [states, letters] next state

    @property
    def size(self) -> int:
        return len(self.step)


def enumerate_states(transitions: Sequence[Transition], limit: int = STATE_LIMIT) -> States:
    """The states a head can be in, exactly: by angles in the plane, else by the orbit of the basis vectors.

    A column of the state moves by the transition alone, so a state is the list of the numbers of its columns in the
    finite orbit of the basis vectors.
    """
    turns = [t for t in transitions if isinstance(t, Turn)]
    if len(turns) == len(transitions) and len({t.n for t in turns}) == 1:
        return _planar_states(turns)
    forms = [t.form if isinstance(t, Turn) else t for t in transitions]
    vectors, moves = orbit([form.matrix for form in forms], limit)
    d = len(forms[0].signs)
    columns, step = _closure(tuple(range(d)), lambda state: map(tuple, moves[:, state].tolist()), limit)
    scale = np.sqrt(forms[0].float_lengths())
    floats = np.concatenate([v.float() for v in vectors], axis=1).T  # [vectors, d]
    matrices = floats[np.array(columns)].transpose(0, 2, 1) / scale[:, None] * scale
    return States(matrices, step)


def _planar_states(turns: Sequence[Turn]) -> States:
    n = turns[0].n
    places, step = _closure((0, False), lambda state: [t.times(*state) for t in turns], 2 * n)
    angle = 2 * np.pi * np.array([j for j, _ in places]) / n
    mirror = np.array([-1.0 if flip else 1.0 for _, flip in places])
    c, s = np.cos(angle), np.sin(angle)
    return States(np.stack([np.stack([c, -s * mirror], 1), np.stack([s, c * mirror], 1)], 1), step)


def _closure(start: Any, images: Callable[[Any], Iterable[Any]], limit: int) -> tuple[list[Any], np.ndarray]:
    """Everything reached from `start` by `images`, breadth first, and the numbers of the images of each."""
    place, found, step = {start: 0}, [start], list[list[int]]()
    while len(step) < len(found):
        row = []
        for image in images(found[len(step)]):
            if image not in place:
                place[image] = len(found)
                found.append(image)
            row.append(place[image])
        if len(found) > limit:
            raise Refuted(f"more than {limit} reachable states")
        step.append(row)
    return found, np.array(step)


def readouts(matrices: np.ndarray, query: np.ndarray) -> np.ndarray:
    """[states, d] the outputs S^T q."""
    return np.einsum("sij,i->sj", matrices, query)


def best_query(matrices: np.ndarray, classes: np.ndarray | None = None) -> np.ndarray:
    """[d] a unit query whose outputs tell states apart as widely as one of a few does (lem:finite-query-readout).

    Args:
        matrices: [states, d, d].
        classes: [known before, states] what a state tells, -1 where it cannot occur; None: every state is to be told.

    Example:
        >>> turns = enumerate_states([Turn(4, 1)])
        >>> round(separation(turns.matrices, best_query(turns.matrices)), 3)
        1.414
    """
    d, large = matrices.shape[1], len(matrices) > 1000 or (classes is not None and len(classes) > 100)
    tries = [(1, 3, 4, 7, 11, 18)[:d], (7, 4, 3, 1, 2, 5)[:d], (1,) * d]
    tries += [] if large else [q for q in product((1, 3, 4, 7), repeat=d) if sum(q) <= 4 * d]
    queries = [np.array(q) / np.linalg.norm(q) for q in tries]
    return max(queries, key=lambda q: round(separation(matrices, q, classes), 9))


def separation(matrices: np.ndarray, query: np.ndarray, classes: np.ndarray | None = None) -> float:
    """The least distance of the outputs of two states that tell different things; 2 where there are none."""
    from scipy.spatial import cKDTree

    outputs, least = readouts(matrices, query), 2.0
    for row in [np.arange(len(matrices))] if classes is None else classes:
        points = outputs[row >= 0]
        labels = row[row >= 0]
        if len(points) < 2:
            continue
        distance, nearest = cKDTree(points).query(points, k=min(len(points), 8))
        other = labels[nearest] != labels[:, None]
        least = min(least, float(np.where(other, distance, 2.0).min()))
    return least


# the check


@dataclass(frozen=True, eq=False)
class Decoded:
    """A checked stage: its states, and what it tells for every pair (state, known before) that can occur."""

    states: States
    label: np.ndarray  #: [states, known before] number of the element known after, -1 where the pair cannot occur
    elements: list[tuple[int, ...]]  #: known after: tuples of elements of the stage's groups
    step: np.ndarray  #: [known after, letters]

    @cached_property
    def pairs(self) -> int:
        """How many pairs can occur."""
        return int((self.label >= 0).sum())


def check_layer(layer: Layer, limit: int = STATE_LIMIT) -> list[Decoded]:
    """The decoder of every stage, in the order of the stages; Refuted where the heads do not determine the product."""
    first = layer.stages[0]
    if (
        len(first.groups) != 1
        or first.groups[0] is not layer.group
        or first.images != tuple((a,) for a in layer.letters)
    ):
        raise Refuted(f"{layer.group.name}: the first head is not said to tell the product of the letters")
    known = np.zeros((1, len(layer.letters)), int)
    decoded: list[Decoded] = []
    for number, stage in reversed(list(enumerate(layer.stages))):
        found = _check_stage(stage, known, limit, f"{layer.group.name}, head {number + 1}")
        decoded.append(found)
        known = found.step
    return decoded[::-1]


def _check_stage(stage: Stage, known: np.ndarray, limit: int, name: str) -> Decoded:
    tables = [G.table for G in stage.groups]

    def products(element: tuple[int, ...]) -> list[tuple[int, ...]]:
        at = [T[:, x] for T, x in zip(tables, element, strict=True)]
        return [tuple(int(column[i]) for column, i in zip(at, image, strict=True)) for image in stage.images]

    elements, step = _closure(tuple(G.identity for G in stage.groups), products, limit)
    states = enumerate_states(stage.transitions, limit)
    label = np.full((states.size, len(known)), -1)
    label[0, 0] = 0
    s, e = np.array([0]), np.array([0])
    while len(s):
        new_s, new_e, value = states.step[s].ravel(), known[e].ravel(), step[label[s, e]].ravel()
        fresh = label[new_s, new_e] < 0
        label[new_s[fresh], new_e[fresh]] = value[fresh]
        wrong = np.flatnonzero(label[new_s, new_e] != value)
        if len(wrong):
            i = wrong[0]
            pair = (elements[label[new_s[i], new_e[i]]], elements[value[i]])
            raise Refuted(f"{name}: one state is reached with the products {pair[0]} and {pair[1]}")
        where = np.unique(new_s[fresh] * len(known) + new_e[fresh])
        s, e = where // len(known), where % len(known)
    return Decoded(states, label, elements, step)
