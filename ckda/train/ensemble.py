"""Several replicas of one small model trained as one program: stacked parameters, one vmapped forward pass.

An update (:meth:`Ensemble.update`) reads its batch, learning rates, momentum and penalty factor from tensors at fixed places
and reads nothing back, so that :class:`ckda.train.Program` can record it once as a CUDA graph and replay it.
"""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ckda.record import write_bytes
from ckda.train.optimizers import MOMENTUM, AdamW, Muon
from ckda.train.recipe import Recipe
from ckda.train.stacked_linear import stack_linear_layers
from ckda.train.task import PenalizedTask, Task

__all__ = ["Ensemble"]

_CULL_WORDS, _CULL_BATCHES = 128, 4  # what seeds are compared on before all but the best are dropped


class Ensemble:
    """R seeds of one model on one task. Replica r is what its seed alone would give, but for rounding.

    Args:
        build: makes one model; called once per seed, with torch's generator seeded by it.
        task: what to learn. recipe: how to train. seeds: one per replica.

    Example:
        >>> from ckda import ComplexKDA
        >>> from ckda.experiments.tracking.model import Tracker
        >>> from ckda.experiments.tracking.task import WordProblem
        >>> from ckda.train import Recipe
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
        self.task, self.recipe, self.device, self.step = task, recipe, device, 0
        self.all_seeds = self.seeds = tuple(seeds)  #: those begun with, and those still trained
        self.began_from = ""  #: which trained parameters it began from, if any
        models = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                models.append(build().to(device))
        uses_muon: Any = models[0].uses_muon
        muon = {name for name, p in models[0].named_parameters() if uses_muon(name, p)}
        self.parameters, self.buffers = stack_module_state(models)
        self.skeleton = copy.deepcopy(models[0]).to("meta")
        if torch.device(device).type == "cuda":
            stack_linear_layers(self.skeleton)
        self.muon_names = [name for name in self.parameters if name in muon]
        self.adamw_names = [name for name in self.parameters if name not in muon]
        decay = recipe.weight_decay
        self.muon = Muon([self.parameters[name] for name in self.muon_names], weight_decay=decay)
        self.adamw = AdamW([self.parameters[name] for name in self.adamw_names], weight_decay=decay)
        self.generators = [torch.Generator(device).manual_seed(10_000 + seed) for seed in seeds]
        self.history: dict[str, list] = {"update": [], "loss": []}  #: what the loop has looked at; kept in checkpoints
        self.losses = torch.full((len(seeds),), torch.nan, device=device)  #: [R] of the last update
        rates = [recipe.rates(step) for step in range(recipe.steps)]
        self._schedule = torch.tensor(rates, dtype=torch.float32).to(device)  # [steps, 4]
        self._rates = torch.zeros(4, device=device)  # as Recipe.rates has them
        self._order: Tensor | None = None  # of the gradients: from replica by replica to parameter by parameter
        self._block: tuple[Tensor, Tensor] | None = None
        self._block_start, self._block_states = 0, [g.get_state() for g in self.generators]
        self.x: Tensor | None = None  # [R, B, ...] the batch of the present update
        self.y: Tensor | None = None

    def __call__(self, x: Tensor, trace: bool = False) -> Any:
        """The models' outputs [R, B, ...] for inputs [R, B, ...]; with `trace` also what their penalties look at."""
        return self.call(None, x, **({"trace": True} if trace else {}))

    def call(self, method: str | None, *args: Any, **options: Any) -> Any:
        """A method of the models (None: their forward pass) on arguments with a replica axis R in front, as pytrees."""
        skeleton = self.skeleton if method is None else _Method(self.skeleton, method)
        prefix = "" if method is None else "model."

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], args: tuple) -> Any:
            named = {prefix + name: p for name, p in {**parameters, **buffers}.items()}
            return functional_call(skeleton, named, args, options)

        return vmap(one)(self.parameters, self.buffers, args)

    # Batches ---------------------------------------------------------------------------------------------------------

    def draw(self, size: int, length: int, letters: str = "") -> tuple[Tensor, Tensor]:
        """The next batch of every replica, [R, size, ...]."""
        task: Any = self.task
        task = task.over(letters) if letters else task
        pairs = [task.batch(size, length, generator) for generator in self.generators]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def _fill_block(self) -> None:
        """Draw the batches of the next updates, [count, R, B, ...]."""
        count = self.recipe.same_phase(self.step, self.recipe.block)
        self._block_start, self._block_states = self.step, [g.get_state() for g in self.generators]
        phase = self.recipe.phase(self.step)
        x, y = self.draw(count * self.recipe.batch, phase.length, phase.letters)
        self._block = (x.unflatten(1, (count, -1)).transpose(0, 1), y.unflatten(1, (count, -1)).transpose(0, 1))

    def prepare(self) -> None:
        """Put the present update's batch and rates (:meth:`Recipe.rates`) where :meth:`update` reads them."""
        if self.step == self.recipe.cull_at and self.recipe.keep and len(self.seeds) > self.recipe.keep:
            self.cull(self.recipe.keep)
        place = self.step - self._block_start
        if self._block is None or place >= len(self._block[0]):
            self._fill_block()
            place = 0
        assert self._block is not None
        x, y = (part[place] for part in self._block)
        if self.x is None or self.y is None or self.x.shape != x.shape:
            self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.x.copy_(x)
        self.y.copy_(y)
        self._rates.copy_(self._schedule[self.step])

    # Training --------------------------------------------------------------------------------------------------------

    def train_step(self) -> Tensor:
        """One update of every replica; returns their losses [R] before it, without the penalties."""
        self.prepare()
        self.losses = self.update()
        self.step += 1
        return self.losses

    def update(self) -> Tensor:
        """The update that was prepared; all on the device. Returns the losses [R] before it."""
        assert self.x is not None
        assert self.y is not None
        losses, total = self._losses(self.x, self.y)
        names = [*self.muon_names, *self.adamw_names]
        grads = self._clip(list(torch.autograd.grad(total.sum(), [self.parameters[name] for name in names])))
        num = len(self.muon_names)
        self.muon.step(grads[:num], self._rates[0], self._rates[3])
        self.adamw.step(grads[num:], self._rates[1])
        return losses.detach()

    def _losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The task's losses [R], and what is minimised: those and the recipe's penalties."""
        if not self.recipe.phase(self.step).penalized:
            losses = self.task.losses(self(x), y)
            return losses, losses
        if not isinstance(self.task, PenalizedTask):
            raise ValueError(f"the recipe has penalties, but {type(self.task).__name__} defines none")
        output, trace = self(x, trace=True)
        losses = total = self.task.losses(output, y)
        for name, weight in self.recipe.penalties.items():
            total = total + self._rates[2] * weight * self.task.penalty(name, trace, y)
        return losses, total

    def _clip(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients with each replica's scaled to norm at most `clip`, contiguous: few kernels here and in what follows."""
        flat = torch.cat([g.flatten(1) for g in grads], 1)
        if self._order is None or self._order.numel() != flat.numel():
            places = torch.arange(flat.numel(), dtype=torch.int32).view_as(flat).split([g[0].numel() for g in grads], 1)
            self._order = torch.cat([part.flatten() for part in places]).to(flat.device)
        flat = flat * (self.recipe.clip / (torch.linalg.vector_norm(flat, dim=1) + 1e-6)).clamp_max(1.0)[:, None]
        parts = flat.flatten().index_select(0, self._order).split([g.numel() for g in grads])
        return [part.view(g.shape) for part, g in zip(parts, grads, strict=True)]

    # Some of the seeds -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def test_losses(self, length: int) -> Tensor:
        """[R] the mean loss of each replica on the same words of this length, drawn from a seed of their own."""
        generator = torch.Generator(self.device).manual_seed(2_000_000)
        total = torch.zeros(len(self.seeds), device=self.device)
        for _ in range(_CULL_BATCHES):
            x, y = self.task.batch(_CULL_WORDS, length, generator)
            shape = (len(self.seeds), *(-1,) * x.dim())
            total += self.task.losses(self(x.expand(shape)), y.expand((len(self.seeds), *(-1,) * y.dim())))
        return total / _CULL_BATCHES

    def cull(self, keep: int) -> None:
        """Go on with the `keep` seeds of lowest loss at the curriculum's last length; a diverged one counts as worst."""
        losses = self.test_losses(self.recipe.curriculum[-1]).nan_to_num(torch.inf)
        best = sorted(sorted(range(len(self.seeds)), key=losses.tolist().__getitem__)[:keep])
        self.keep(best)

    def keep(self, replicas: Sequence[int]) -> None:
        """Drop every replica but these, with their optimisers' states and generators."""
        index = torch.tensor(list(replicas), device=self.device)
        for name, p in self.parameters.items():
            self.parameters[name] = p.detach()[index].requires_grad_()
        self.buffers = {name: b[index] for name, b in self.buffers.items()}
        self.muon.keep([self.parameters[name] for name in self.muon_names], index)
        self.adamw.keep([self.parameters[name] for name in self.adamw_names], index)
        self.generators = [self.generators[r] for r in replicas]
        self._block_states = [self._block_states[r] for r in replicas]
        self.seeds = tuple(self.seeds[r] for r in replicas)
        self.losses, self._block, self.x, self.y = self.losses[index], None, None, None

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
        """What a checkpoint must agree on to be resumed.

        A constant momentum of 0.95 is not named: nor is it in what was written when there was no other.
        """
        recipe = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.recipe).items()}
        if recipe["momentum"] == MOMENTUM:
            del recipe["momentum"]
        key = {
            "recipe": recipe,
            "seeds": list(self.all_seeds),
            "task": self.task.key(),
            "model": repr(self.skeleton),
        }
        return key | ({"began_from": self.began_from} if self.began_from else {})

    @torch.no_grad()
    def begin_from(self, parameters: dict[str, Tensor], name: str) -> None:
        """Put trained parameters, [R, ...] each, in the place of the initial ones; `name` tells them from others."""
        for key, p in self.parameters.items():
            p.copy_(parameters[key])
        self.began_from = name

    def save(self, path: str | Path) -> None:
        """Write everything an exact resume needs, whole; only tensors, numbers and strings."""
        midway = self._block is not None and self.step < self._block_start + len(self._block[0])
        state = {
            "key": self.key(),
            "step": self.step,
            "seeds": list(self.seeds),
            "history": self.history,
            "tensors": {name: t.detach().cpu() for name, t in self._tensors().items()},
            # batches drawn and not yet used are drawn again: from where the generators were before
            "block_start": self._block_start if midway else self.step,
            "generators": self._block_states if midway else [g.get_state() for g in self.generators],
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_bytes(path, buffer.getvalue())

    def load(self, path: str | Path) -> None:
        """Resume from :meth:`save`; a damaged, foreign or different run's file is a ValueError and changes nothing."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            names = ("key", "step", "seeds", "history", "tensors", "generators", "block_start")
            key, step, seeds, history, tensors, generators, start = (state[k] for k in names)
            alive = [self.seeds.index(seed) for seed in seeds]
            own = self._tensors()
            shapes = {name: (len(alive), *t.shape[1:]) if t.dim() else () for name, t in own.items()}
            fits = all(tuple(tensors[name].shape) == shape for name, shape in shapes.items())
            restored = [torch.Generator(self.device) for _ in seeds]
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
        sane = isinstance(step, int) and isinstance(start, int) and 0 <= start <= step <= self.recipe.steps
        if key != self.key() or not fits or not sane:
            raise ValueError(f"{path} is of another run: its recipe, seeds, task or model differ from this one's")
        if len(alive) < len(self.seeds):
            self.keep(alive)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[name])
        self.generators, self.history, self._block = restored, history, None
        self.step = start
        if start < step:
            self._fill_block()
        self.step = step


class _Method(nn.Module):
    """Makes a method of a module its forward pass, for functional_call."""

    def __init__(self, model: nn.Module, method: str):
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **options: Any) -> Any:
        return getattr(self.model, self.method)(*args, **options)
