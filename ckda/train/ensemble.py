"""Several replicas of one small model trained as one program: stacked parameters, one vmapped forward pass."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ckda.record import write_bytes
from ckda.tasks import Task
from ckda.train.optimizers import AdamW, Muon, one_cycle

__all__ = ["Ensemble", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """How a small model is trained; the defaults are those of state tracking (app:exp_state_tracking)."""

    steps: int = 60_000
    batch: int = 1024
    curriculum: tuple[int, ...] = (4, 6, 8, 16, 32)  #: lengths, in equal stages
    lr_muon: float = 0.02
    lr_adamw: float = 5e-3
    warmup: float = 0.1
    clip: float = 1.0
    weight_decay: float = 1e-12

    def length(self, step: int) -> int:
        """The training length at this step."""
        return self.curriculum[min(len(self.curriculum) - 1, step * len(self.curriculum) // self.steps)]


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

    def __call__(self, x: Tensor) -> Tensor:
        """The models' outputs [R, B, ...] for inputs [R, B, ...]."""

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.skeleton, (parameters, buffers), (x,))

        return vmap(one)(self.parameters, self.buffers, x)

    def draw(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """The next batch of every replica, [R, size, ...]."""
        pairs = [self.task.batch(size, length, generator) for generator in self.generators]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def train_step(self) -> Tensor:
        """One update of every replica; returns their losses [R] before it."""
        x, y = self.draw(self.recipe.batch, self.recipe.length(self.step))
        losses = self.task.losses(self(x), y)
        names = [*self.muon_names, *self.adamw_names]
        grads = list(torch.autograd.grad(losses.sum(), [self.parameters[name] for name in names]))
        self._clip(grads)
        factor = one_cycle(self.step, self.recipe.steps, self.recipe.warmup)
        num = len(self.muon_names)
        self.muon.step(grads[:num], self.recipe.lr_muon * factor)
        self.adamw.step(grads[num:], self.recipe.lr_adamw * factor)
        self.step += 1
        return losses.detach()

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

    def _key(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be resumed."""
        return {"recipe": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.recipe).items()}} | {
            "seeds": list(self.seeds),
            "task": self.task.key(),
            "model": repr(self.skeleton),
        }

    def save(self, path: str | Path) -> None:
        """Write everything an exact resume needs, whole; only tensors, numbers and strings."""
        state = {
            "key": self._key(),
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
        except (
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} is no checkpoint of ckda: {error}") from error
        if key != self._key():
            raise ValueError(f"{path} is of another run: its recipe, seeds, task or model differ from this one's")
        own = self._tensors()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.step = self.adamw.count = step
        for generator, own_state in zip(self.generators, generators, strict=True):
            generator.set_state(own_state)
