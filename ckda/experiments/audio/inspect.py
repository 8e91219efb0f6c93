"""What a trained continuation model does in silence: the spectra of its transitions, and the same without their complex modes.

After the cue every input is blank and writes nothing, so each head applies one fixed matrix A to its state. Its modes are A's
eigenvectors; at most one pair of them is non-real (thm:complex_eigenvalues). The ablation takes the state right after the cue
and removes from every head its component in the span of the non-real pair, S <- (I - Pi) S, with Pi the spectral projector
of that pair. Pi commutes with A, so the modes stay removed; weights, gates, keys and readout are untouched. The control
keeps nothing but those modes, S <- Pi S.

A pair that makes n turns a loop tells two phases apart unless n times their distance is a multiple of the period, so all
pairs together tell apart P / gcd(P, n_1, n_2, ...) of the P phases (:func:`told_apart`). With even numbers alone, both halves
of the loop look the same to them.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckda.command import make_folder
from ckda.experiments.audio.model import Continuer, build
from ckda.experiments.audio.task import Continuation
from ckda.layers import LayerCache
from ckda.layers.complex_kda import RANGES
from ckda.page import empty_figure
from ckda.record import environment, read_json, write_json
from ckda.train.weights import places_of, read_weights

__all__ = ["ablate", "complex_projector", "load_replica", "played", "spectra", "told_apart", "who_counts"]


def complex_projector(A: Tensor, tolerance: float = 1e-6) -> Tensor:
    """The spectral projector [..., K, K] onto A's non-real modes: zero where the spectrum is real. In float64.

    Example:
        >>> A = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
        >>> complex_projector(A).round().diagonal().tolist()
        [1.0, 1.0, 0.0]
    """
    values, vectors = torch.linalg.eig(A.double())
    keep = (values.imag.abs() > tolerance).to(vectors.dtype)
    return (vectors @ (keep.unsqueeze(-1) * torch.linalg.inv(vectors))).real


def load_replica(path: str | Path, seed: int | None = None) -> tuple[str, int, Continuer]:
    """Arm, seed and model from the weights that ``ckda audio`` left; the first seed unless one is named."""
    saved = read_weights(path, "ckda audio", ("arm",))
    arm, parameters = saved["arm"], saved["parameters"]
    chosen = saved["seeds"][0] if seed is None else seed
    (place,) = places_of([chosen], saved, path)
    try:
        model = build(arm, parameters["embed.weight"].shape[-1])
        model.load_state_dict({name: p[place] for name, p in parameters.items()})
    except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} holds no weights of `ckda audio`; give a file runs/NAME.pt") from error
    return arm, chosen, model


@torch.no_grad()
def spectra(model: Continuer, period: int) -> list[dict[str, Any]]:
    """Each head's transition on blank input: eigenvalues, the non-real pair's modulus and angle, gates, learning rate.

    The angle is in turns a loop: an integer closes after one period.
    """
    blank = model.blank()
    alpha, _, beta = (x[0, 0] for x in model.mixer.transitions(blank))
    A = model.mixer.matrices(blank)[0, 0].double()
    heads = []
    for h, values in enumerate(torch.linalg.eigvals(A)):
        pair = values[values.imag.abs() > 1e-6]
        heads.append(
            {
                "beta": float(beta[h]),
                "alpha": alpha[h].tolist(),
                "eigenvalues": [[float(z.real), float(z.imag)] for z in values],
                "modulus": float(pair[0].abs()) if len(pair) else None,
                "turns": float(pair[0].angle().abs()) * period / (2 * math.pi) if len(pair) else None,
                "slowest_real": max((float(z.abs()) for z in values if abs(z.imag) <= 1e-6), default=None),
            }
        )
    return heads


def told_apart(heads: list[dict[str, Any]], period: int, modulus: float = 0.9) -> int:
    """How many of the loop's phases the heads' lasting pairs tell apart: P / gcd(P, their turns a loop, rounded).

    Example:
        >>> turns = lambda *numbers: [{"modulus": 1.0, "turns": n} for n in numbers]
        >>> told_apart(turns(8.003, 2.0), 32), told_apart(turns(8.003, 2.0, 10.99), 32), told_apart([], 32)
        (16, 32, 1)
    """
    lasting = [round(head["turns"]) for head in heads if head["modulus"] is not None and head["modulus"] > modulus]
    return period // math.gcd(period, *lasting)


@torch.no_grad()
def played(model: Continuer, task: Continuation, first: int, last: int) -> dict[str, float]:
    """Shares of the steps from `first` to `last`, over all phases, whose output is nearest to the right frame, to the frame
    half a loop away, and to any other."""
    x, phase = task.at(torch.arange(task.period), last)
    return {"first": first, "last": last} | _shares(
        task, task.waveform(model(x.to(model.embed.weight.dtype)))[:, first:], phase[:, first:]
    )


def _shares(task: Continuation, said: Tensor, phase: Tensor) -> dict[str, float]:
    """What frames [B, T, D] are nearest to, seen from their phases [B, T]."""
    distance = torch.cdist(said.reshape(-1, said.shape[-1]), torch.from_numpy(task.frames))
    off = (distance.argmin(-1) - phase.reshape(-1)) % task.period
    right, half = (float((off == n).double().mean()) for n in (0, task.period // 2))
    return {"right": right, "half_a_loop_away": half, "other": 1 - right - half}


@torch.no_grad()
def who_counts(model: Continuer, task: Continuation, length: int) -> dict[str, dict[str, float]]:
    """What is played up to `length` if half a loop of silence passes for some modes of the state after the cue, and not for
    the others: the modes that carry the half of the loop play its other half. `real`: only the real modes age; `pairs`:
    only the non-real ones; `all`: both."""
    x, phase = task.at(torch.arange(task.period), length)
    stream = model.stream(x.to(model.embed.weight.dtype))
    rest = stream[:, task.cue :]
    _, cache = model.mixer.prefill(stream[:, : task.cue])
    A = model.mixer.matrices(model.blank())[0, 0].double()
    half = torch.linalg.matrix_power(A, task.period // 2)
    turning = complex_projector(A) @ cache.state.double()
    still = cache.state.double() - turning
    aged = {"real": turning + half @ still, "pairs": half @ turning + still, "all": half @ (turning + still)}
    result = {}
    for name, state in aged.items():
        mixed, _ = model.mixer.prefill(rest, LayerCache(state.to(cache.state.dtype), cache.past))
        result[name] = _shares(task, task.waveform(model.decode(mixed, rest)), phase[:, task.cue :])
    return result


@torch.no_grad()
def ablate(model: Continuer, task: Continuation, length: int) -> dict[str, Any]:
    """Error up to `length` over all phases as trained, without the complex modes (all heads, each head), with them alone."""
    x, phase = task.at(torch.arange(task.period), length)
    stream = model.stream(x.to(model.embed.weight.dtype))
    cue, rest = stream[:, : task.cue], stream[:, task.cue :]
    _, cache = model.mixer.prefill(cue)
    target = torch.from_numpy(task.frames)[phase[:, task.cue :]]
    Pi = complex_projector(model.mixer.matrices(model.blank())[0, 0])  # [H, K, K]

    def error(state: Tensor) -> float:
        mixed, _ = model.mixer.prefill(rest, LayerCache(state.to(cache.state.dtype), cache.past))
        return float((task.waveform(model.decode(mixed, rest)) - target).square().mean())

    S = cache.state.double()
    turning = Pi @ S
    heads = []
    for h in range(S.shape[1]):
        without = S.clone()
        without[:, h] -= turning[:, h]
        heads.append(error(without))
    full, energy = error(S), S.square().sum((0, 2, 3))
    return {
        "length": length,
        "mse": full,
        "without_complex_modes": error(S - turning),
        "complex_modes_alone": error(turning),
        "ratio": error(S - turning) / max(full, 1e-30),
        "without_by_head": heads,
        "complex_share_by_head": (turning.square().sum((0, 2, 3)) / energy.clamp_min(1e-30)).tolist(),
        "signal": float(target.square().mean()),
    }


# The verb ------------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """Look, write, draw; returns the exit status."""
    path = Path(args.run)
    out = make_folder(args.out) if args.out else path.parent
    result = _inspect(path, args.seed, args.length)
    name = path.stem if args.seed is None else f"{path.stem}.seed{args.seed}"
    written = write_json(out / f"{name}.inspect.json", result)
    inspect_figure(result).savefig(out / f"{name}.inspect.png", dpi=160)
    if args.json:
        print(written.read_text(), end="")
    else:
        _print(result, written)
    return 0


def _inspect(path: Path, seed: int | None, length: int) -> dict[str, Any]:
    run, alone = _of_one_seed(path)
    record_path, frames_path = path.with_name(f"{run}.json"), path.parent.parent / "audio.json"
    for needed in (record_path, frames_path):
        if not needed.exists():
            raise ValueError(f"{needed} is not there; it comes with the run")
    record, frames = read_json(record_path), np.array(read_json(frames_path)["frames"])
    shown = record["seeds"][record["shown"]] if alone is None else alone
    arm, seed, model = load_replica(path, shown if seed is None else seed)
    if arm not in RANGES:
        raise ValueError(f"{path} is a {arm}; spectra and modes are of the range settings {', '.join(RANGES)}")
    task = Continuation(frames)
    if length <= task.cue:
        raise ValueError(f"--length is {length}; it must exceed the cue of {task.cue}")
    heads, trained = spectra(model, task.period), record["recipe"]["curriculum"][-1]
    return {
        "what": "ckda inspect audio",
        "arm": arm,
        "seed": seed,
        "recipe_name": record["recipe_name"],
        "snr": {n: v[record["seeds"].index(seed)] for n, v in record["snr"].items()},
        "period": task.period,
        "told_apart": told_apart(heads, task.period),
        "played": [played(model, task, *ends) for ends in ((task.cue, trained), (trained, 2 * trained - task.cue))],
        "half_a_loop_older": who_counts(model, task, min(72, length)),
        "heads": heads,
        "ablation": ablate(model, task, length),
        "environment": environment(),
    }


def _of_one_seed(path: Path) -> tuple[str, int | None]:
    """The run's name, and the seed where a file NAME.seedN.pt holds one alone.

    Example:
        >>> _of_one_seed(Path("runs/ckda.seed2.pt")), _of_one_seed(Path("runs/ckda.pt"))
        (('ckda', 2), ('ckda', None))
    """
    name, _, seed = path.stem.partition(".seed")
    return name, int(seed) if seed.isdecimal() else None


def inspect_figure(result: dict[str, Any]) -> Any:
    """Eigenvalues of every head on the circle of 32nds of a turn; error as trained, without and with only the complex modes."""
    figure = empty_figure(figsize=(11, 4.2))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    circle = np.linspace(0, 2 * np.pi, 361)
    left.plot(np.cos(circle), np.sin(circle), color="#c5ced8", linewidth=1)
    for j in range(32):
        spoke = np.exp(2j * np.pi * j / 32)
        left.plot(
            [0.96 * spoke.real, 1.04 * spoke.real],
            [0.96 * spoke.imag, 1.04 * spoke.imag],
            color="#c5ced8",
            linewidth=0.8,
        )
    colours = ["#16548c", "#c8553d", "#2f7f4f", "#d08a2e", "#7a4fa3", "#5c6b7a", "#b58900", "#00838f"]
    for h, head in enumerate(result["heads"]):
        values = np.array(head["eigenvalues"])
        left.plot(
            values[:, 0], values[:, 1], "o", fillstyle="none", markersize=5, color=colours[h % 8], label=f"head {h}"
        )
    left.set(title="eigenvalues on blank input", aspect="equal", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    left.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    heads = range(len(result["heads"]))
    beta, modulus = [h["beta"] for h in result["heads"]], [h["modulus"] or 0.0 for h in result["heads"]]
    middle.bar([h - 0.2 for h in heads], beta, 0.4, color="#16548c", label="β")
    middle.bar([h + 0.2 for h in heads], modulus, 0.4, color="#d08a2e", label="modulus of the pair")
    for h in heads:
        turns = result["heads"][h]["turns"]
        middle.text(h, 2.06, "real" if turns is None else f"{turns:.3f}", ha="center", fontsize=7)
    middle.set(title="by head (above: turns a loop)", xlabel="head", ylim=(0, 2.25), xticks=list(heads))
    middle.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    ablation = result["ablation"]
    names = ("as\ntrained", "without\ncomplex\nmodes", "complex\nmodes\nalone", "silence")
    errors = [ablation[k] for k in ("mse", "without_complex_modes", "complex_modes_alone", "signal")]
    right.bar(names, errors, color=["#16548c", "#c8553d", "#2f7f4f", "#9aa5b1"])
    right.set_yscale("log")
    right.tick_params(axis="x", labelsize=7.5)
    right.set(title=f"mean squared error to length {ablation['length']}")
    for axes in (middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _print(result: dict[str, Any], path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['arm']}, {result['recipe_name']}, seed {result['seed']}: each head in silence")
    for name in (
        "head",
        "β",
        "negative gates",
        "pair's modulus",
        "turns a loop",
        "share of the state",
        "error without it",
    ):
        table.add_column(name, justify="right")
    ablation = result["ablation"]
    for h, head in enumerate(result["heads"]):
        pair = ("-", "-") if head["modulus"] is None else (f"{head['modulus']:.6f}", f"{head['turns']:.5f}")
        ratio = ablation["without_by_head"][h] / max(ablation["mse"], 1e-30)
        negative = sum(a < 0 for a in head["alpha"])
        share = f"{ablation['complex_share_by_head'][h]:.3f}"
        table.add_row(str(h), f"{head['beta']:.4f}", f"{negative}/{len(head['alpha'])}", *pair, share, f"{ratio:.3g}x")
    console = Console()
    console.print(table)
    beyond = result["played"][-1]
    console.print(
        f"the pairs tell {result['told_apart']} of {result['period']} phases apart; steps {beyond['first']} to {beyond['last']}: "
        f"{beyond['right']:.1%} the right frame, {beyond['half_a_loop_away']:.1%} the one half a loop away\n"
        "half a loop of ageing moves the music by half a loop in this share of the steps: "
        + ", ".join(f"{k} modes {v['half_a_loop_away']:.1%}" for k, v in result["half_a_loop_older"].items()),
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"without all complex modes the error to length {ablation['length']} is {ablation['ratio']:,.0f} times as large. {path}",
        highlight=False,
        soft_wrap=True,
    )
