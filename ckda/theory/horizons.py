"""How long compiled machines stay right: groups through `ComplexKDA` in float32, automata in float64, rounded states.

Example:
    >>> measured = measure(Horizons(groups=("S3",), length=50, rounded_length=20))
    >>> measured["groups"][0]["right"], measured["groups"][0]["bfloat16 states"]["right"]
    (50, 20)
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckda.record import environment, write_json
from ckda.theory.compiler import Compile, Machine, compile_machine, direct
from ckda.theory.machines import DFA, WFA
from ckda.theory.modules import Blocks, GroupMachine

__all__ = ["GROUPS", "Horizons", "measure", "random_wfa", "write_horizons"]

#: the groups of the paper's tables, and those of `frobenius-four` and `quaternion-chain`
GROUPS = (
    *("Z2", "Z3", "Z7", "Z60", "S3", "D4", "D30", "A4", "S4", "A5"),
    *("Q8", "A4xZ5", "A5xZ2", "Frob20", "SL(2,3)", "2O", "GL(2,3)", "SL(2,5)"),
)
WFA_WRONG = 0.1  #: with rounded states a weight that is off by more than this part of itself counts as wrong


@dataclass(frozen=True)
class Horizons:
    """What to measure."""

    groups: Sequence[str] = GROUPS
    dfas: Sequence[int] = ()  #: sizes of random DFAs of two letters
    wfas: Sequence[int] = ()  #: sizes of random WFAs of two letters
    length: int = 20_000
    rounded_length: int = 20_000
    wfa_length: int = 300
    letters: str = "all"
    seed: int = 0


def measure(config: Horizons) -> dict[str, Any]:
    """Leading prefixes that are right, of one random word each; for WFAs the error of the weight."""
    rng = random.Random(config.seed)
    rows: dict[str, Any] = {"config": asdict(config), "groups": [], "dfas": [], "wfas": []}
    for name in config.groups:
        machine = compile_machine(Compile(name, config.letters, words=1, length=100))
        rows["groups"].append(_group_row(machine, config, rng))
    for size in config.dfas:
        machine = compile_machine(Compile(_dfa_data(size, rng)))
        rows["dfas"].append(_dfa_row(machine, config, rng))
    for size in config.wfas:
        machine = compile_machine(Compile(random_wfa(size, rng)))
        rows["wfas"].append(_wfa_row(machine, config, rng))
    return rows


def _word(machine: Machine, length: int, rng: random.Random) -> list[int]:
    return rng.choices(range(len(machine.config["letters"])), k=length)


def _leading(found: Sequence[Any], wanted: Sequence[Any]) -> int:
    """How many answers are right before the first wrong one."""
    return next((t for t, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), len(wanted))


def _group_row(machine: Machine, config: Horizons, rng: random.Random) -> dict[str, Any]:
    word = _word(machine, config.length, rng)
    wanted = direct(machine.certificate, word)
    row = {key: machine.config[key] for key in ("name", "dimensions", "radius")}
    row["right"] = _leading(machine.module()(torch.tensor([word]))[0].tolist(), wanted)
    row["length"] = len(word)
    short = word[: config.rounded_length]
    module = machine.module()
    assert isinstance(module, GroupMachine)
    rounded = _leading(_rounded_states(module, short), wanted[: len(short)])
    row["bfloat16 states"] = {"right": rounded, "length": len(short)}
    return row


def _rounded_states(module: GroupMachine, word: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """The answers where the state is rounded after every letter; the layer's keys, gates and query stay in float32."""
    layer = module.layer
    letters = module.embed(torch.arange(module.letters)[None])
    alpha, key, beta = (x[0].unsqueeze(-1) for x in layer.transitions(letters))  # [L, H, K, 1] and beta [L, H, 1]
    query = layer.q_proj(letters)[0, 0].view(len(module.dimensions), -1)
    assert layer.initial_state is not None
    S, outputs = layer.initial_state.clone(), []
    for letter in word:
        S = alpha[letter] * S
        S = S - beta[letter].unsqueeze(-1) * key[letter] * (key[letter] * S).sum(-2, keepdim=True)
        S = S.to(dtype).to(alpha.dtype)
        outputs.append(S)
    o = torch.einsum("thkv,hk->thv", torch.stack(outputs), query)
    return module.decode(layer.gated_out(o, None)).tolist()


def _rounded_automaton(machine: Machine, word: Sequence[int]) -> tuple[list[Any], int]:
    """The answers of an automaton whose three states are rounded to bfloat16 after every letter, and how far its clock is right.

    Everything else (keys, gates, queries, lookups) stays in float64.
    """
    module = machine.module()
    assert isinstance(module, Blocks)
    module._run = rounded_run  # type: ignore[method-assign]
    size = 2 * module.m
    clock = _leading(module.positions(len(word)).tolist(), [t % size for t in range(1, len(word) + 1)])
    return module(torch.tensor([word]))[0].tolist(), clock


def rounded_run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """q [T, H, K], k and alpha [T, K], v [T, V], beta [T] -> [T, H, V]: the recurrence, its state in bfloat16 after a letter.

    Example:
        >>> turn = {"k": torch.ones(1, 2) / 2**0.5, "alpha": torch.tensor([[1.0, -1.0]]), "beta": torch.full((1,), 2.0)}
        >>> rounded_run(torch.eye(2)[None], v=torch.zeros(1, 1), start=torch.tensor([[0.8], [0.6]]), **turn)[0, :, 0]
        tensor([ 0.6016, -0.8008])
    """
    S, outputs = start.clone(), []
    for t in range(len(k)):
        S = alpha[t, :, None] * S
        S = S + beta[t] * k[t, :, None] * (v[t] - k[t] @ S)
        S = S.to(torch.bfloat16).to(start.dtype)
        outputs.append(q[t].to(S.dtype) @ S)
    return torch.stack(outputs)


def _dfa_data(size: int, rng: random.Random) -> dict[str, Any]:
    dfa = DFA.random(size, 2, rng)
    accept = sorted(dfa.accepting)
    return {"name": f"DFA {size}", "alphabet": ["a", "b"], "start": dfa.initial, "accept": accept, "delta": _lists(dfa)}


def _lists(dfa: DFA) -> list[list[int]]:
    return [list(row) for row in dfa.delta]


def _dfa_row(machine: Machine, config: Horizons, rng: random.Random) -> dict[str, Any]:
    word = _word(machine, config.length, rng)
    wanted = direct(machine.certificate, word)
    row: dict[str, Any] = {key: machine.config[key] for key in ("name", "states", "block", "maps", "blocks")}
    for dtype in (torch.float64, torch.float32):
        found = machine.module(dtype)(torch.tensor([word]))[0].tolist()
        row[str(dtype).removeprefix("torch.")] = _leading(found, wanted)
    short = word[: config.rounded_length]
    rounded, clock = _rounded_automaton(machine, short)
    row["bfloat16 states"] = {"right": _leading(rounded, wanted[: len(short)]), "clock": clock, "length": len(short)}
    return row | {"length": len(word)}


def random_wfa(size: int, rng: random.Random) -> dict[str, Any]:
    """The file of a random WFA of two letters."""
    wfa = WFA.random(size, 2, rng)
    matrices = [[[str(M[i, j]) for j in range(size)] for i in range(size)] for M in wfa.matrices]
    vectors = {"initial": [str(x) for x in wfa.initial], "final": [str(x) for x in wfa.final]}
    return {
        "name": f"WFA {size}",
        "alphabet": ["a", "b"],
        **vectors,
        "matrices": dict(zip("ab", matrices, strict=True)),
    }


def _wfa_row(machine: Machine, config: Horizons, rng: random.Random) -> dict[str, Any]:
    word = _word(machine, config.wfa_length, rng)
    wanted = [float(x) for x in direct(machine.certificate, word)]
    found = machine.module()(torch.tensor([word]))[0].tolist()
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(found, wanted, strict=True) if b]
    errors.sort()
    row = {key: machine.config[key] for key in ("name", "states", "block")}
    row |= {
        "length": len(word),
        "largest relative error": errors[-1],
        "median relative error": errors[len(errors) // 2],
    }
    rounded, clock = _rounded_automaton(machine, word)
    near = [not b or abs(a - b) <= WFA_WRONG * abs(b) for a, b in zip(rounded, wanted, strict=True)]
    row["bfloat16 states"] = {"right": _leading(near, [True] * len(near)), "clock": clock, "within": WFA_WRONG}
    return row | {"largest weight": max(map(abs, wanted))}


def write_horizons(path: str | Path, config: Horizons) -> Path:
    """Measure and keep with the environment."""
    return write_json(path, {"environment": environment(), **measure(config)})
