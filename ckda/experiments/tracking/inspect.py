"""What a trained tracker does: which head works, how its state moves, and which representation of the group that is.

The states of a head, averaged over all words of equal product, are a function M on the group. If the head tracks, then
``A_x (M_g - C) = M_xg - C``: up to a constant C, which the writes make, its transitions act on the span of M - mean(M)
like a representation. :func:`found_representation` says which one: the share of M's variance in each irreducible part, how
often each occurs among the transitions restricted to that span, and the distance to the nearest exact one.

A head need not be a representation: by quaternions, S -> q S q, it acts like a finite group that is larger (cor:a5-four).
:func:`ckda.experiments.tracking.quaternions.quaternion_heads` finds such heads by their keys and transitions, and
:func:`ckda.experiments.tracking.penalties.inexactness` says how exactly the letters act, whichever group that is.

What is left over is the closure error: the variance of the state among words of equal product. It grows with the length of
the words, for nothing corrects it; once it is as large as the distance of the classes, answers go wrong.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckda import transition
from ckda.command import make_folder
from ckda.experiments.tracking.figures import mechanism_figure, quaternions_figure
from ckda.experiments.tracking.model import Tracker
from ckda.experiments.tracking.penalties import inexactness
from ckda.experiments.tracking.quaternions import QuaternionHead, quaternion_heads, rotations
from ckda.experiments.tracking.representations import irreps, nearest
from ckda.experiments.tracking.run import load_replica
from ckda.experiments.tracking.task import WordProblem
from ckda.record import environment, write_json

__all__ = ["class_states", "exactness", "found_representation", "mechanism", "silenced"]

_NOTICED = 0.02  # a part of the variance below this is not part of the finding
_FAR = 0.5  # from the nearest representation: nothing is near


@torch.no_grad()
def silenced(model: Tracker, task: WordProblem, size: int = 64, length: int = 64) -> list[float]:
    """For each head the accuracy on words of this length with its readout set to zero."""
    tokens, target = task.batch(size, length, torch.Generator(model.embedding.weight.device).manual_seed(7))
    stream = model.embedding(tokens)
    o = model.mixer.read(stream)
    accuracy = []
    for head in range(o.shape[2]):
        quiet = o.clone()
        quiet[:, :, head] = 0
        logits = model.decode(stream + model.mixer.write_out(quiet, stream))[:, 1:]
        accuracy.append(float((logits.argmax(-1) == target).double().mean()))
    return accuracy


@torch.no_grad()
def mechanism(model: Tracker, task: WordProblem) -> dict[str, Any]:
    """Beta of every head and symbol; gates, keys and eigenvalues of the head whose silence costs most (fig:s3_interpretability)."""
    accuracy = silenced(model, task)
    head = min(range(len(accuracy)), key=accuracy.__getitem__)
    x = model.embedding.weight[None, :-1]
    alpha, k, beta = (t[0].float().cpu() for t in model.mixer.transitions(x))
    eigenvalues = transition.eigenvalues(alpha[:, head], k[:, head], beta[:, head])
    meaning = task.meaning or range(task.order)
    keys, explained = _principal(k[:, head])
    return {
        "head": head,
        "silenced": accuracy,
        "symbols": [task.names()[e] for e in meaning],
        "orders": [task.group.orders[e] for e in meaning],
        "beta": beta.tolist(),
        "alpha": alpha[:, head].tolist(),
        "keys": keys,
        "explained": explained,
        "eigenvalues": [[[float(z.real), float(z.imag)] for z in row] for row in eigenvalues],
    }


def _principal(k: Tensor) -> tuple[list[list[float]], list[float]]:
    """The keys [n, K] in their first two principal coordinates, and the share of variance of the first three."""
    centred = k.double() - k.double().mean(0)
    U, S, _ = torch.linalg.svd(centred, full_matrices=False)
    share = S.square() / S.square().sum().clamp_min(1e-30)
    return (U[:, :2] * S[:2]).tolist(), share[:3].tolist()


# The state as a function on the group --------------------------------------------------------------------------------


@torch.no_grad()
def class_states(model: Tracker, task: WordProblem, lengths: tuple[int, ...], size: int = 256) -> dict[str, Any]:
    """Statistics of the states by product: `mean` [n, H, K, V] over the steps up to the first length, and the closure error.

    The closure error of a head in the last quarter of each length is the variance of its state about `mean`, over the
    variance of `mean` itself.
    """
    x, y = task.batch(size, max(lengths), torch.Generator().manual_seed(11))
    n = task.order
    _, cache = model.prefill(x[:, :1])
    shape = cache.state.shape[1:]
    total, count = torch.zeros(n, *shape, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {length: [] for length in lengths}
    for t in range(max(lengths)):
        _, cache = model.mixer.step(model.embedding(x[:, 1 + t]), cache)
        state = cache.state.double()
        if lengths[0] // 4 <= t < lengths[0]:
            total.index_add_(0, y[:, t], state)
            count.index_add_(0, y[:, t], torch.ones(size, dtype=torch.float64))
        for length in lengths:
            if length - 4 <= t < length:  # the last steps of each length
                kept[length].append((y[:, t], state))
    mean = total / count.clamp_min(1).view(-1, 1, 1, 1)
    between = (mean - mean.mean(0)).square().sum((2, 3)).mean(0)  # [H]
    errors = {}
    for length, pairs in kept.items():
        off = torch.stack([(state - mean[label]).square().sum((2, 3)).mean(0) for label, state in pairs]).mean(0)
        errors[str(length)] = (off / between.clamp_min(1e-30)).tolist()
    return {"mean": mean.numpy(), "between": between.tolist(), "closure": errors}


@torch.no_grad()
def found_representation(model: Tracker, task: WordProblem, mean: np.ndarray, head: int) -> dict[str, Any]:
    """Which representation the head's state moves by: shares of variance, multiplicities, distance to the nearest exact one.

    Args:
        mean: [n, H, K, V] of :func:`class_states`.
    """
    n = task.order
    function = mean[:, head].reshape(n, -1)
    function = function - function.mean(0)
    energy = (function**2).sum() + 1e-30
    parts = irreps(task.group)
    shares = [float(((irrep.projector @ function) ** 2).sum() / energy) for irrep in parts]
    used = [(irrep, share) for irrep, share in zip(parts, shares, strict=True) if share > _NOTICED]
    kernel = set(range(n)).intersection(*(set(irrep.kernel) for irrep, _ in used)) if used else set(range(n))
    kept = sum((irrep.projector @ function for irrep, _ in used), np.zeros_like(function))
    columns = kept.reshape(n, *mean.shape[2:]).transpose(1, 0, 2).reshape(mean.shape[2], -1)  # [K, n * V]
    basis = _span(columns)
    A = model.symbols()["A"][:, head].double().numpy()
    restricted = basis.T @ A @ basis
    exact = nearest(restricted, task.group) if not task.meaning and basis.shape[1] else None
    return {
        "head": head,
        "shares": [{"name": irrep.name, "share": share} for irrep, share in zip(parts, shares, strict=True)],
        "told_apart": n // len(kernel),
        "dimension": basis.shape[1],
        "nearest": None if exact is None else exact.summary(),
        "reason": None if exact is not None else "the transitions' traces on that span are no character of the group",
    }


@torch.no_grad()
def exactness(model: Tracker, task: WordProblem) -> list[dict[str, float]]:
    """For each head how far its letters are from acting like a finite group (:class:`.penalties.Inexactness`)."""
    seen = model.symbols()
    errors = inexactness(seen["A"][None], seen["b"][None], seen["start"][None], task.pairs[:, None])
    heads = torch.stack(errors)[:, 0].T.tolist()
    return [dict(zip(errors._fields, head, strict=True)) for head in heads]


def _span(columns: np.ndarray, share: float = 0.99) -> np.ndarray:
    """[K, r] an orthonormal basis of what holds this share of the columns' energy."""
    U, S, _ = np.linalg.svd(columns, full_matrices=False)
    if not S.any():
        return U[:, :0]
    cumulative = np.cumsum(S**2) / (S**2).sum()
    return U[:, : int(np.searchsorted(cumulative, share)) + 1]


# The command ---------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Look, write JSON and figure, print the finding."""
    out = make_folder(args.out) if args.out else Path(args.run).resolve().parent.parent / "inspect"
    result = inspect(args.run, args.seed, args.length)
    which = f".seed{result['seed']}"
    name = Path(args.run).stem.removesuffix(which) + which
    path = write_json(out / f"{name}.json", result)
    mechanism_figure(result["mechanism"]).savefig(out / f"{name}.png", dpi=160)
    if result["quaternions"]:
        quaternions_figure(result).savefig(out / f"{name}.quaternions.png", dpi=160)
    if args.json:
        print(path.read_text(), end="")
    else:
        _print(result, path)
    return 0


def inspect(path: str | Path, seed: int | None, length: int) -> dict[str, Any]:
    """Everything ``ckda inspect track`` says of one run."""
    about, task, model = load_replica(path, seed)
    if "alpha" not in model.symbols() or len(model.symbols()["alpha"]) != task.num_tokens - 1:
        raise ValueError(f"{path} is a {about['mixer']}; only mixers with one gate, key and beta a token can be drawn")
    if length < 32:
        raise ValueError(f"--length is {length}; it must be at least 32")
    seen = mechanism(model, task)
    lengths = tuple(n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= length)
    states = class_states(model, task, lengths)
    found = found_representation(model, task, states["mean"], seen["head"])
    exact = exactness(model, task)
    choices = rotations(task.group)
    by_seed = {each: quaternion_heads(load_replica(path, each)[2], task, choices) for each in about["seeds"]}
    turning = by_seed[about["seed"]]
    return {
        "what": "ckda inspect track",
        "run": Path(path).name,
        **{name: about[name] for name in ("group", "mixer", "recipe", "seed")},
        "mechanism": seen,
        "representation": found,
        "exactness": exact,
        "quaternions": [head.summary() for head in turning],
        "quaternions_by_seed": {str(each): [head.summary() for head in heads] for each, heads in by_seed.items()},
        "picture": turning[0].picture() if turning else None,
        "closure": {n: values[seen["head"]] for n, values in states["closure"].items()},
        "closure_by_head": states["closure"],
        "finding": finding(task, seen, found, exact[seen["head"]], turning),
        "environment": environment(),
    }


def finding(
    task: WordProblem,
    seen: dict[str, Any],
    found: dict[str, Any],
    exact: dict[str, float],
    turning: list[QuaternionHead],
) -> str:
    """One sentence: the head, what its state is a function of, and how nearly its transitions are a representation, turns by
    quaternions, or the action of another finite group."""
    one = next((head for head in turning if head.head == seen["head"]), None)
    if one is not None:
        others = [str(head.head) for head in turning if head is not one]
        also = f"; head{'s' * (len(others) > 1)} {', '.join(others)} likewise" if others else ""
        return (
            f"head {one.head} works by quaternions of the rotations {one.rotations}: a letter turns the state S into q S q, its "
            f"transitions are exact up to {one.error:.2g} and inner products of its keys up to {one.worst:.2g}{also}"
        )
    shares = [s for s in found["shares"] if s["share"] > _NOTICED]
    parts = ", ".join(f"{s['share']:.0%} {s['name']}" for s in shares) or "nothing that depends on the product"
    text = f"head {seen['head']} works: its state's variance is {parts}; that tells {found['told_apart']} of {task.order} apart"
    if found["nearest"] is None or found["nearest"]["worst_error"] > _FAR:
        if exact["near"] > 1 - _NOTICED:
            return f"{text}; its letters act like a finite group up to {exact['unturned'] ** 0.5:.2g}, which is no representation"
        return f"{text}; its transitions are near no representation there"
    near = " + ".join(f"{p['times']} x ({p['name']})" for p in found["nearest"]["parts"])
    return f"{text}; its transitions there are {near} up to {found['nearest']['worst_error']:.2g}"


def _print(result: dict[str, Any], path: Path) -> None:
    from rich.console import Console

    console = Console()
    console.print(result["finding"], highlight=False, soft_wrap=True)
    if result["mechanism"]["head"] not in [head["head"] for head in result["quaternions"]]:  # these have no class means
        errors = ", ".join(f"{n}: {v:.2g}" for n, v in result["closure"].items())
        console.print(f"closure error of that head by length: {errors}", highlight=False, soft_wrap=True)
    console.print(
        f"{path}, and {'figures' if result['quaternions'] else 'the figure'} beside it", highlight=False, soft_wrap=True
    )
