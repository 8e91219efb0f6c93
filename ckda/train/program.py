"""Ensembles that advance together, one update each at a time. On a GPU an update is recorded once and replayed.

An update of a small model is hundreds of short kernels, and launching them one by one takes longer than running them. So
each ensemble has a stream of its own and records its update as a CUDA graph; graphs on different streams run side by side
where the device has room. A recording serves as long as the ensemble's phase (length, inputs, penalties) and its seeds stay
the same; batches, learning rates, momentum and penalty weights are put into their places before each replay.
"""

import sys
from collections.abc import Iterable

import torch

from ckda.train.ensemble import Ensemble

__all__ = ["Program"]

_WARM = 3  # updates of a new phase that run as they are, which compiles and sizes what a recording must find ready


class Program:
    """Ensembles trained side by side.

    Args:
        ensembles: each has its own recipe and stops at its own end.
        record: record and replay updates where the device is a GPU.

    Example:
        >>> from ckda.experiments.tracking.model import build_tracker
        >>> from ckda.experiments.tracking.task import WordProblem
        >>> from ckda.train import Recipe
        >>> from functools import partial
        >>> task, recipe = WordProblem.named("Z2"), Recipe(steps=3, batch=4, curriculum=(4,))
        >>> arms = [Ensemble(partial(build_tracker, name, task), task, recipe, (0, 1)) for name in ("kda", "ckda")]
        >>> program = Program(arms)
        >>> while program.advance():
        ...     pass
        >>> [arm.step for arm in arms]
        [3, 3]
    """

    def __init__(self, ensembles: Iterable[Ensemble], record: bool = True):
        self.ensembles = list(ensembles)
        on_gpu = [torch.device(e.device).type == "cuda" for e in self.ensembles]
        self._replays = [_Replay(e) if gpu and record else None for e, gpu in zip(self.ensembles, on_gpu, strict=True)]

    def advance(self) -> bool:
        """One update of every ensemble that is not at its end; False once all are. On a GPU it waits for nothing until then."""
        active = [i for i, e in enumerate(self.ensembles) if e.step < e.recipe.steps]
        for i in active:
            replay = self._replays[i]
            if replay is None:
                self.ensembles[i].train_step()
            else:
                replay.advance()
        if not active:
            self.wait()
        return bool(active)

    def wait(self) -> None:
        """Until all updates are done: before anything of an ensemble is read."""
        if any(replay is not None for replay in self._replays):
            torch.cuda.synchronize()

    @property
    def recorded(self) -> bool:
        """Whether every ensemble's update could be recorded."""
        return all(replay is not None and replay.can_record for replay in self._replays)


class _Replay:
    """One ensemble on a stream of its own, its update recorded."""

    def __init__(self, ensemble: Ensemble):
        self.ensemble, self.can_record = ensemble, True
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # the ensemble was made there
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple = ()
        self._warm = 0

    def advance(self) -> None:
        ensemble = self.ensemble
        with torch.cuda.stream(self._stream):
            ensemble.prepare()
            key = (ensemble.recipe.phase(ensemble.step), ensemble.seeds)
            if key != self._key:
                self._stream.synchronize()  # a replay may still be running; after this its memory is free
                self._key, self._graph, self._warm = key, None, 0
            if self._graph is None and self._warm >= _WARM and self.can_record:
                self._graph = self._recorded()
            if self._graph is None:
                self._warm += 1
                ensemble.losses = ensemble.update()
            else:
                self._graph.replay()
        ensemble.step += 1

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self.ensemble.losses = self.ensemble.update()
        except RuntimeError as error:
            print(f"updates run kernel by kernel, for they could not be recorded: {error}", file=sys.stderr)
            self.can_record = False
            return None
        return graph
