"""Ensembles that advance together, one update each at a time. On a GPU such a round is recorded once and replayed.

An update of a small model is hundreds of short kernels, and launching them one by one takes longer than running them. So
the round of updates is recorded as one CUDA graph with a branch for every ensemble: branches run side by side where the
device has room. A recording serves as long as no ensemble's phase (length, inputs, penalties) or number of seeds
changes; batches, learning rates and penalty weights are put into their places before each replay.
"""

import sys
from collections.abc import Iterable

import torch

from ckda.train.ensemble import Ensemble

__all__ = ["Program"]

_WARM = 3  # rounds of a new phase that run as they are, which compiles and sizes what a recording must find ready


class Program:
    """Ensembles trained side by side.

    Args:
        ensembles: all on one device; each has its own recipe and stops at its own end.
        record: record and replay rounds where the device is a GPU.

    Example:
        >>> from ckda.models.tracker import build_tracker
        >>> from ckda.tasks.groups import WordProblem
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
        self._record = record and all(torch.device(e.device).type == "cuda" for e in self.ensembles)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple = ()
        self._warm = 0
        self._side_by_side = len(self.ensembles) > 1
        if self._record:
            self._stream = torch.cuda.Stream()
            self._branches = [torch.cuda.Stream() for _ in self.ensembles]

    def advance(self) -> bool:
        """One update of every ensemble that is not at its end; False once all are. Waits for nothing."""
        active = [i for i, e in enumerate(self.ensembles) if e.step < e.recipe.steps]
        if not self._record:
            for i in active:
                self.ensembles[i].train_step()
            return bool(active)
        for i in active:
            self.ensembles[i].prepare()
        self._round_on_gpu(active)
        for i in active:
            self.ensembles[i].step += 1
        return bool(active)

    def _round_on_gpu(self, active: list[int]) -> None:
        if not active:
            return
        members = [(i, self.ensembles[i]) for i in active]
        key = tuple((i, e.recipe.phase(e.step), e.seeds) for i, e in members)
        if key != self._key:
            torch.cuda.synchronize()  # a replay may still be running, and the old recording's memory is free after this
            self._key, self._graph, self._warm = key, None, 0
        if self._graph is None and self._warm >= _WARM:
            self._graph = self._recorded(active)
        if self._graph is not None:
            self._graph.replay()
            return
        self._warm += 1
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            self._round(active)
        here.wait_stream(self._stream)

    def _round(self, active: list[int]) -> None:
        """The updates, each on a stream of its own that leaves the present one and comes back to it."""
        here = torch.cuda.current_stream()
        for i in active:
            branch = self._branches[i] if self._side_by_side else here
            branch.wait_stream(here)
            with torch.cuda.stream(branch):
                self.ensembles[i].losses = self.ensembles[i].update()
        for i in active:
            if self._side_by_side:
                here.wait_stream(self._branches[i])

    def _recorded(self, active: list[int]) -> torch.cuda.CUDAGraph | None:
        """The round as a graph: with branches, without them if that fails, or else not at all; said on standard error."""
        while True:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=self._stream):
                    self._round(active)
                return graph
            except RuntimeError as error:
                how = "one after the other" if self._side_by_side else "kernel by kernel"
                print(f"updates run {how}, for they could not be recorded otherwise: {error}", file=sys.stderr)
                if not self._side_by_side:
                    self._record = False
                    return None
                self._side_by_side = False
