"""Recorded updates give the losses of updates that are not, on a stand-in for CUDA's graphs that keeps their rules.

Its recording leaves garbage in the gradients it makes and takes back what it added to others; its replay reads and writes the same
memory every time.
"""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckda.lm import replay
from ckda.lm import train as train_module
from ckda.lm.log import read_log
from ckda.lm.parallel import World
from ckda.lm.recipe import Recipe
from ckda.lm.train import Options, Trainer, why_eager

from . import worker


class Stream:
    """Everything happens in order."""

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    """What a recording is bound to: inputs, gradients and result at fixed places."""

    first: bool
    grads: list[torch.Tensor]

    def replay(self) -> None:
        own = Cuda.owner
        attached = [parameter.grad for parameter in own.parameters]  # which a replay neither knows nor changes
        for parameter, grad in zip(own.parameters, self.grads, strict=True):
            parameter.grad = None if self.first else grad
        own._graphs[self.first][1].copy_(own.run(own._inputs))
        for parameter, grad, before in zip(own.parameters, self.grads, attached, strict=True):
            if parameter.grad is not grad:
                grad.copy_(parameter.grad)
            parameter.grad = before
        Cuda.replays += 1


class Record:
    """The context of a recording."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"):
        self.graph, self.settles = graph, pool is None

    def __enter__(self) -> None:
        grads = [] if self.settles else [parameter.grad for parameter in Cuda.owner.parameters]
        self.graph.first = all(grad is None for grad in grads)
        self.before = [None if grad is None else grad.clone() for grad in grads]

    def __exit__(self, *error: object) -> None:
        if self.settles:
            return
        self.graph.grads = [parameter.grad for parameter in Cuda.owner.parameters]
        for grad, before in zip(self.graph.grads, self.before, strict=True):
            grad.fill_(math.nan) if before is None else grad.copy_(before)
        if self.graph.first not in Cuda.records:
            raise RuntimeError("operation not permitted when stream is capturing")


class Cuda:
    """The part of torch.cuda that :mod:`ckda.lm.replay` uses."""

    Stream, CUDAGraph, graph = Stream, Graph, Record
    owner: Any = None
    records: tuple[bool, ...] = (True, False)
    replays = 0
    graph_pool_handle = staticmethod(lambda: "pool")
    current_stream = staticmethod(lambda device=None: Stream())
    stream = device = staticmethod(lambda what: nullcontext())
    set_stream = synchronize = staticmethod(lambda what: None)


class Torch:
    """torch with that in place of torch.cuda."""

    cuda = Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def losses(tokens: Path, out: Path, **recipe: Any) -> tuple[list[float], Trainer]:
    world = World(0, 1, torch.device("cpu"))
    changes = {"steps": 8, "save_every": 100, "eval_every": 6}
    one = Trainer(worker.build, tokens, Recipe(**worker.RECIPE | changes | recipe), out, world, Options())
    Cuda.owner, Cuda.replays = one._replay, 0
    one.run()
    return [row.loss for row in read_log(out / "log.jsonl") if row.loss is not None], one


@pytest.mark.parametrize("micro", [0, 2])
@pytest.mark.parametrize("records", [(True, False), (True,), ()])
def test_recorded_updates_are_the_same(
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    micro: int,
    records: tuple[bool, ...],
) -> None:
    """Also where a recording fails: that of the first micro-batch, or only that of the later ones."""
    plain, one = losses(tokens, tmp_path / "plain", micro=micro)
    assert not one.recorded
    assert one.eager_because == "the device is cpu"
    monkeypatch.setattr(replay, "torch", Torch())
    monkeypatch.setattr(train_module, "why_eager", lambda *a: None)
    monkeypatch.setattr(Cuda, "records", records)
    capsys.readouterr()
    found, one = losses(tokens, tmp_path / "recorded", micro=micro)
    assert found == plain
    said = capsys.readouterr().err
    fails = not records or (micro == 2 and False not in records)
    assert one.recorded != fails
    assert said.count("could not be recorded") == fails
    assert ("not permitted" in (one.eager_because or "")) == fails
    updates, passes = 8 - replay.WARM, 2 if micro else 1
    assert Cuda.replays == (updates * passes if not fails else len(records))


def test_gradients_set_to_none_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two updates; within one it is an error."""
    monkeypatch.setattr(replay, "torch", Torch())
    weight = torch.nn.Parameter(torch.ones(2))

    def run(batch: dict[str, Any]) -> torch.Tensor:
        loss = (weight * batch["x"]).sum()
        loss.backward()
        return loss.detach()

    passes = Cuda.owner = replay.Replay(run, [weight], torch.device("cpu"))
    for step in range(replay.WARM + 3):
        weight.grad = None
        for first in (True, False):
            passes({"x": torch.full((2,), float(step))}, first)
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0 * step] * 2
    assert passes.recorded
    passes({"x": torch.ones(2)}, True)
    weight.grad = None
    with pytest.raises(RuntimeError, match="set to None between the micro-batches"):
        passes({"x": torch.ones(2)}, False)


def test_what_is_not_recorded() -> None:
    recipe, gpu = Recipe(steps=1), torch.device("cuda")
    assert why_eager(Options(), recipe, gpu, "none") is None
    assert why_eager(Options(graph=False), recipe, gpu, "none") == "not asked for"
    assert why_eager(Options(), recipe, gpu, "fsdp") == "the model is spread by fsdp"
    assert "separate documents" in str(why_eager(Options(), Recipe(steps=1, documents="separate"), gpu, "none"))
