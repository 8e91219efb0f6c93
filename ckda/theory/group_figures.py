"""Drawings of the groups: the axes of the cube and the icosahedron against the axis test, and the strip of A5 cups.

Every mark is computed: which axes pass is asked of :func:`ckda.theory.groups.passes_axis_test`, and the labels L and R
of the strip are f and f_- of the exact states that the A5 head goes through.
"""

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from ckda.groups import cycle_notation, permutation
from ckda.theory.exact import Matrix
from ckda.theory.figures import DRAWINGS, save
from ckda.theory.groups import (
    auxiliary_decoder,
    axis,
    cube_rotations,
    decoder,
    encoder,
    icosahedral_rotations,
    passes_axis_test,
)
from ckda.theory.obstructions import rotation_order, s5_certificate

__all__ = ["a5_cups", "certificate_page", "cube_axes", "cups_strip", "icosahedron_axes"]

PASS, FAIL, EDGE = "#2b7a4b", "#b3372f", "0.35"
CUPS = ("#7a6fb0", "#c2714f", "#3f8f8a", "#c9a13b", "#8a8a8a")


def _axes_of(rotations: Sequence[Matrix]) -> list[tuple[np.ndarray, bool]]:
    """Unit axis and result of the axis test for every rotation of order above two, each axis once."""
    found: list[tuple[np.ndarray, bool]] = []
    for R in rotations:
        a = axis(R)
        if a is None:
            continue
        unit = a.float()[:, 0] / np.linalg.norm(a.float())
        if not any(abs(unit @ other) > 1 - 1e-9 for other, _ in found):
            found.append((unit, passes_axis_test(R)))
    return found


def _solid(panel: Any, vertices: np.ndarray, rotations: Sequence[Matrix], title: str) -> None:
    """Edges, coordinate planes and axes of one solid."""
    lengths = {(i, j): np.linalg.norm(vertices[i] - vertices[j]) for i, j in combinations(range(len(vertices)), 2)}
    edge = min(lengths.values())
    for (i, j), length in lengths.items():
        if length < edge * 1.01:
            panel.plot(*vertices[[i, j]].T, color=EDGE, linewidth=0.8, alpha=0.7)
    reach = 1.35
    grid = np.array([[-reach, reach], [-reach, reach]])
    for where in range(3):
        planes = [grid, grid.T]
        planes.insert(where, np.zeros((2, 2)))
        panel.plot_surface(*planes, color="#6f95c4", alpha=0.13, shade=False)
    found = _axes_of(rotations)
    for unit, passes in found:
        line = np.outer((-1.45, 1.45), unit).T
        panel.plot(*line, color=PASS if passes else FAIL, linewidth=1.5, linestyle="-" if passes else (0, (4, 2)))
    good = sum(passes for _, passes in found)
    panel.set_title(f"{title}\n{good} of {len(found)} axes in a coordinate plane", fontsize=10)
    panel.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), zlim=(-1.3, 1.3))
    panel.set_box_aspect((1, 1, 1), zoom=1.4)
    panel.set_axis_off()
    panel.view_init(elev=20, azim=12)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=PASS, linewidth=1.5, label="passes the axis test"),
        Line2D([], [], color=FAIL, linewidth=1.5, linestyle=(0, (4, 2)), label="fails: all three coordinates nonzero"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, fontsize=9)


def cube_axes(path: Path) -> None:
    """prop:cube: the axes of order 4 and 3 of the cube as it stands and turned by 45 degrees."""
    from matplotlib import pyplot as plt

    vertices = np.array(list(product((-1.0, 1.0), repeat=3))) / 3**0.5
    h = 0.5**0.5
    turn = np.array([[h, h, 0], [-h, h, 0], [0, 0, 1]])
    figure, panels = plt.subplots(1, 2, figsize=(8, 4.3), subplot_kw={"projection": "3d"})
    _solid(panels[0], vertices, list(cube_rotations(turned=False).values()), "cube, standard position")
    _solid(panels[1], vertices @ turn.T, list(cube_rotations().values()), "cube turned by 45°: realises $S_4$")
    _legend(figure)
    save(figure, path)


def icosahedron_axes(path: Path) -> None:
    """lem:ico-plane and thm:a5-three: the sixteen axes of order 5 and 3, and the twelve that three planes can hold."""
    from matplotlib import pyplot as plt

    phi = (1 + 5**0.5) / 2
    corners = [np.roll((0, a, b * phi), s) for s in range(3) for a in (1, -1) for b in (1, -1)]
    vertices = np.array(corners) / np.linalg.norm(corners[0])
    figure, panels = plt.subplots(1, 2, figsize=(8, 4.3), subplot_kw={"projection": "3d"})
    for panel, order in zip(panels, (5, 3), strict=True):
        turns = [R for R in icosahedral_rotations().values() if rotation_order(R) == order]
        _solid(panel, vertices, turns, f"icosahedron, order {order}")
    _legend(figure)
    save(figure, path)


def cups_strip(words: Sequence[str] = ("(123)", "(124)", "(14)(23)")) -> list[dict[str, Any]]:
    """The states the A5 head goes through on a word: cups, L = f(Q), R = f_-(Q) (fig:a5-many-to-one-cups).

    Example:
        >>> [(box["L"], box["R"]) for box in cups_strip()]
        [('e', 'e'), ('(123)', '(132)'), ('(14)(23)', '(13)(24)'), ('e', '(12)(34)')]
    """
    rotations = icosahedral_rotations()
    names = {R: label for label, R in rotations.items()}
    Q = encoder(rotations[(0, 1, 2, 3, 4)]).matrix
    strip = [_box(None, Q, names)]
    for word in words:
        Q = encoder(rotations[permutation(word, 5)]).matrix @ Q
        strip.append(_box(word, Q, names))
    return strip


def _box(word: str | None, Q: Matrix, names: dict[Matrix, tuple[int, ...]]) -> dict[str, Any]:
    left, right = names[decoder(Q)], names[auxiliary_decoder(Q)]
    cups = [left.index(position) for position in range(5)]  # the object at each position
    return {
        "input": word,
        "cups": cups,
        "L": cycle_notation(left),
        "R": cycle_notation(right),
        "start": Q.is_identity(),
    }


def _cup(panel: Any, x: float, y: float, color: str, text: str) -> None:
    from matplotlib.patches import Polygon

    shape = np.array([(-0.22, 0.29), (0.22, 0.29), (0.32, -0.29), (-0.32, -0.29)])
    panel.add_patch(
        Polygon(shape + np.array([x, y]), closed=True, facecolor=color + "55", edgecolor=color, linewidth=1.0)
    )
    panel.text(x, y, text, ha="center", va="center", fontsize=9, fontweight="bold")


def a5_cups(path: Path, words: Sequence[str] = ("(123)", "(124)", "(14)(23)")) -> None:
    """cor:a5-four, fig:a5-many-to-one-cups: the cups return, the hidden matrix does not."""
    from matplotlib import pyplot as plt

    strip = cups_strip(words)
    figure, panel = plt.subplots(figsize=(3.1 * len(strip), 2.5))
    for i, box in enumerate(strip):
        x = 4.5 * i
        for position, cup in enumerate(box["cups"]):
            _cup(panel, x + 0.68 * position, 1.55, CUPS[cup], str(cup + 1))
        if box["input"] is not None:
            panel.annotate("", (x - 0.45, 1.55), (x - 1.35, 1.55), arrowprops={"arrowstyle": "-|>", "color": "0.3"})
            panel.text(x - 0.9, 1.78, box["input"], ha="center", fontsize=9, color=PASS)
        state = f"$Q_{i}$" + (" $= I_4$" if box["start"] else f" $= g({box['input']})\\,Q_{i - 1}$")
        panel.text(x + 1.36, 0.78, state, ha="center", fontsize=9)
        panel.text(x + 1.36, 0.38, f"$L$ = {box['L']}", ha="center", fontsize=9, color="#2f5d9b")
        panel.text(x + 1.36, 0.02, f"$R$ = {box['R']}", ha="center", fontsize=9, color="#9a7416")
        frame = plt.Rectangle((x - 0.3, -0.15), 3.32, 1.2, fill=False, edgecolor="0.75", linewidth=0.8)
        panel.add_patch(frame)
    panel.set(xlim=(-0.6, 4.5 * len(strip) - 1.2), ylim=(-0.6, 2.1), aspect="equal")
    same, moved = strip[-1]["L"] == strip[0]["L"], not strip[-1]["start"]
    if same and moved:
        panel.text(2.25 * len(strip) - 0.9, -0.45, "same cups, different hidden states", ha="center", fontsize=9)
    panel.set_axis_off()
    save(figure, path)


def certificate_page(path: Path) -> None:
    """thm:s5-impossibility: the certificate, step by step, with how each step was checked."""
    from matplotlib import pyplot as plt

    lines = str(s5_certificate()).splitlines()
    figure = plt.figure(figsize=(11, 0.27 * len(lines) + 0.3))
    for i, line in enumerate(lines):
        color = FAIL if " NO " in line else "0.45" if "[cited]" in line else "0.1"
        place = 1 - (i + 0.6) / len(lines)
        figure.text(0.01, place, line, family="monospace", fontsize=8, color=color, va="center")
    save(figure, path)


DRAWINGS.update(
    {
        "prop:axis-test": cube_axes,
        "prop:cube": cube_axes,
        "lem:ico-plane": icosahedron_axes,
        "thm:a5-three": icosahedron_axes,
        "cor:a5-four": a5_cups,
        "thm:s5-impossibility": certificate_page,
    }
)
