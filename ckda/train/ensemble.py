"""Several replicas of one small model trained as one program: stacked parameters, one vmapped forward pass."""

import copy
import io
import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ckda.record import write_bytes
from ckda.tasks import PenalizedTask, Task
from ckda.train.optimizers import AdamW, Muon, one_cycle, warmup_cosine

__all__ = ["Ensemble", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """How a small model is trained; the defaults are those of state tracking (app:exp_state_tracking)."""

    steps: int = 60_000
    batch: int = 1024
    curriculum: tuple[int, ...] = (4, 6, 8, 16, 32)  #: lengths, in equal stages unless `switches` says otherwise
    switches: tuple[int, ...] = ()  #: the updates, counted from 1, at which each next length of the curriculum begins
    lr_muon: float = 0.02
    lr_adamw: float = 5e-3
    schedule: str = "one_cycle"  #: of the learning rates: "one_cycle" or "cosine" (:func:`warmup_cosine`)
    warmup: float = 0.1
    floor: float = 0.1  #: of "cosine": the factor at its end
    tail: float = 0.0  #: of "cosine": the part of the updates that decays on from there
    clip: float = 1.0
    weight_decay: float = 1e-12
    penalties: dict[str, float] = field(default_factory=dict)  #: names the task knows -> weights
    ramp: tuple[float, float] = (0.0, 0.0)  #: the parts of the training at which penalties begin and are in full force

    def __post_init__(self) -> None:
        if self.switches and len(self.switches) != len(self.curriculum) - 1:
            raise ValueError(
                f"there are {len(self.switches)} switches; a curriculum of {len(self.curriculum)} lengths has "
                f"{len(self.curriculum) - 1}"
            )
        if self.schedule not in ("one_cycle", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; it must be 'one_cycle' or 'cosine'")

    def length(self, step: int) -> int:
        """The training length at this step, counted from 0."""
        if self.switches:
            return self.curriculum[bisect_right(self.switches, step + 1)]
        return self.curriculum[min(len(self.curriculum) - 1, step * len(self.curriculum) // self.steps)]

    def factor(self, step: int) -> float:
        """What the peak learning rates are multiplied by at this step."""
        if self.schedule == "cosine":
            return warmup_cosine(step, self.steps, self.warmup, self.floor, self.tail)
        return one_cycle(step, self.steps, self.warmup)

    def penalty_factor(self, step: int) -> float:
        """What the penalties' weights are multiplied by at this step.

        Example:
            >>> [Recipe(steps=10, ramp=(0.4, 0.6)).penalty_factor(step) for step in (4, 5, 6)]
            [0.0, 0.5, 1.0]
        """
        begin, full = (part * self.steps for part in self.ramp)
        return float(step >= begin) if full <= begin else min(1.0, max(0.0, (step - begin) / (full - begin)))


class Ensemble:
    """R seeds of one model on one task. Replica r is what its seed alone would give, but for rounding.

    Args:
        build: makes one model; called once per seed, with torch's generator seeded by it.
        task: what to learn. recipe: how to train. seeds: one per replica.

    Example:
        >>> from ckda import ComplexKDA
        >>> from ckda.models.tracker import Tracker
        >>> from ckda.tasks.groups import WordProblem
        >>> task = WordProblem.named("S3")
        >>> build = lambda: Tracker(ComplexKDA(48, 2, 4, conv_size=0, activate=()), 7, 6)
        >>> ensemble = Ensemble(build, task, Recipe(steps=4, batch=8, curriculum=(4,)), seeds=(0, 1))
        >>> ensemble.train_step().shape
        torch.Size([2])
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        task: Task,
        recipe: Recipe,
        seeds: tuple[int, ...],
        device: str = "cpu",
    ):
        self.task, self.recipe, self.seeds, self.device, self.step = task, recipe, seeds, device, 0
        models = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                models.append(build().to(device))
        uses_muon: Any = models[0].uses_muon
        muon = {name for name, p in models[0].named_parameters() if uses_muon(name, p)}
        self.parameters, self.buffers = stack_module_state(models)
        self.skeleton = copy.deepcopy(models[0]).to("meta")
        self.muon_names = [name for name in self.parameters if name in muon]
        self.adamw_names = [name for name in self.parameters if name not in muon]
        decay = recipe.weight_decay
        self.muon = Muon([self.parameters[name] for name in self.muon_names], weight_decay=decay)
        self.adamw = AdamW([self.parameters[name] for name in self.adamw_names], weight_decay=decay)
        self.generators = [torch.Generator(device).manual_seed(10_000 + seed) for seed in seeds]

    def __call__(self, x: Tensor, trace: bool = False) -> Any:
        """The models' outputs [R, B, ...] for inputs [R, B, ...]; with `trace` also what their penalties look at."""
        options = {"trace": True} if trace else {}

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
            return functional_call(self.skeleton, (parameters, buffers), (x,), options)

        return vmap(one)(self.parameters, self.buffers, x)

    def draw(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """The next batch of every replica, [R, size, ...]."""
        pairs = [self.task.batch(size, length, generator) for generator in self.generators]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def train_step(self) -> Tensor:
        """One update of every replica; returns their losses [R] before it, without the penalties."""
        x, y = self.draw(self.recipe.batch, self.recipe.length(self.step))
        losses, total = self._losses(x, y)
        names = [*self.muon_names, *self.adamw_names]
        grads = list(torch.autograd.grad(total.sum(), [self.parameters[name] for name in names]))
        self._clip(grads)
        factor = self.recipe.factor(self.step)
        num = len(self.muon_names)
        self.muon.step(grads[:num], self.recipe.lr_muon * factor)
        self.adamw.step(grads[num:], self.recipe.lr_adamw * factor)
        self.step += 1
        return losses.detach()

    def _losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The task's losses [R], and what is minimised: those and the recipe's penalties."""
        factor = self.recipe.penalty_factor(self.step)
        if not self.recipe.penalties or not factor:
            losses = self.task.losses(self(x), y)
            return losses, losses
        if not isinstance(self.task, PenalizedTask):
            raise ValueError(f"the recipe has penalties, but {type(self.task).__name__} defines none")
        output, trace = self(x, trace=True)
        losses = total = self.task.losses(output, y)
        for name, weight in self.recipe.penalties.items():
            total = total + factor * weight * self.task.penalty(name, trace, y)
        return losses, total

    def _clip(self, grads: list[Tensor]) -> None:
        """Scale each replica's gradient to norm at most `clip`."""
        squares = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
        factor = (self.recipe.clip / (squares.sqrt() + 1e-6)).clamp_max(1.0)
        for g in grads:
            g.mul_(factor.view(-1, *(1,) * (g.dim() - 1)))

    def replica(self, r: int, build: Callable[[], nn.Module]) -> nn.Module:
        """A plain module with replica r's weights."""
        model = build().to(self.device)
        own = {name: p[r].detach() for name, p in {**self.parameters, **self.buffers}.items()}
        model.load_state_dict(own)
        return model

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        parts = {"parameter": self.parameters, "muon": self.muon.tensors(), "adamw": self.adamw.tensors()}
        return {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    def key(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be resumed."""
        return {"recipe": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.recipe).items()}} | {
            "seeds": list(self.seeds),
            "task": self.task.key(),
            "model": repr(self.skeleton),
        }

    def save(self, path: str | Path) -> None:
        """Write everything an exact resume needs, whole; only tensors, numbers and strings."""
        state = {
            "key": self.key(),
            "step": self.step,
            "tensors": {name: t.detach().cpu() for name, t in self._tensors().items()},
            "generators": [g.get_state() for g in self.generators],
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_bytes(path, buffer.getvalue())

    def load(self, path: str | Path) -> None:
        """Resume from :meth:`save`; a damaged, foreign or different run's file is a ValueError and changes nothing."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            key, step, tensors, generators = (state[k] for k in ("key", "step", "tensors", "generators"))
            own = self._tensors()
            fits = all(tensors[name].shape == tensor.shape for name, tensor in own.items())
            restored = [torch.Generator(self.device) for _ in self.generators]
            for generator, generator_state in zip(restored, generators, strict=True):
                generator.set_state(generator_state)
        except (
            pickle.UnpicklingError,
            RuntimeError,
            OSError,
            EOFError,
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} is no checkpoint of ckda for this run: {error}") from error
        if key != self.key() or not fits or not isinstance(step, int) or not 0 <= step <= self.recipe.steps:
            raise ValueError(f"{path} is of another run: its recipe, seeds, task or model differ from this one's")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.step = self.adamw.count = step
        self.generators = restored
