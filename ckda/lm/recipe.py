"""What a training run is: a recipe of plain numbers, its learning-rate schedule, and what a device can do at most."""

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PEAK_FLOPS", "Recipe", "peak_flops"]

#: dense bf16 tensor-core peak by device name, FLOP/s (vendors' data sheets, without sparsity)
PEAK_FLOPS = {"H200": 989.4e12, "H100 PCIe": 756e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}

#: what may change between an interrupted run and its continuation without changing the run
_FREE = ("micro", "log_every", "save_every", "eval_every", "eval_tokens")


@dataclass(frozen=True)
class Recipe:
    """One training run. The defaults are the paper's ladder (tab:ladder-configs) at its smallest batch.

    Example:
        >>> recipe = Recipe(steps=100, warmup=10, cooldown=0.2)
        >>> [round(recipe.factor(s), 2) for s in (0, 9, 50, 80, 90, 99)]
        [0.1, 1.0, 1.0, 1.0, 0.5, 0.05]
        >>> Recipe(steps=100, warmup=10, schedule="cosine", floor=0.1).factor(99) < 0.11
        True
    """

    steps: int
    length: int = 4096  #: tokens a sequence, T
    batch: int = 32  #: sequences an update, over all devices
    micro: int = 0  #: sequences a device takes at once; 0: batch / devices
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  #: of matrices; vectors have none
    clip: float = 1.0  #: of the global gradient norm
    schedule: str = "wsd"  #: "wsd" | "cosine" | "constant" (a trunk: warm-up, then stable)
    warmup: int = 2000
    cooldown: float = 0.2  #: share of the updates, "wsd" only: linear to zero
    floor: float = 0.1  #: where "cosine" ends, as a share of lr
    branch: int | None = None  #: the update at which a cooldown leaves its trunk
    seed: int = 0
    documents: str = "joined"  #: or "separate": the state is reset between documents
    dtype: str = "bf16"  #: "bf16": autocast over float32 weights; "fp32"
    log_every: int = 10
    save_every: int = 1000
    eval_every: int = 500
    eval_tokens: int = 1 << 20  #: of the held-out split

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("length", 2), ("batch", 1), ("micro", 0), ("warmup", 0), ("log_every", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        choices = {"schedule": ("wsd", "cosine", "constant"), "dtype": ("bf16", "fp32")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be {', '.join(known)}")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown is {self.cooldown}; it must be from 0 to 1")

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Recipe":
        """From its JSON."""
        return cls(**values | {"betas": tuple(values["betas"])})

    @property
    def tokens_per_step(self) -> int:
        """Tokens read an update."""
        return self.batch * self.length

    @property
    def decay_start(self) -> int:
        """The first update of the cooldown ("wsd")."""
        return self.steps - round(self.cooldown * self.steps) if self.branch is None else self.branch

    def factor(self, step: int) -> float:
        """The share of the peak learning rate at update `step` (from 0); never negative, and at its last value past the end."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant":
            return rising
        if self.schedule == "wsd":
            start = self.decay_start
            return rising if step < start else rising * max(0, self.steps - step) / max(1, self.steps - start)
        progress = min(1.0, max(0.0, (step + 1 - self.warmup) / max(1, self.steps - self.warmup)))
        return rising * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2)

    def micro_batches(self, devices: int) -> tuple[int, int]:
        """(sequences a device takes at once, how many such batches a device has an update)."""
        if self.batch % devices:
            raise ValueError(f"a batch of {self.batch} sequences does not split evenly over {devices} devices")
        own = self.batch // devices
        micro = min(self.micro or own, own)
        if own % micro:
            raise ValueError(f"a device's {own} sequences do not split into micro-batches of {micro}")
        return micro, own // micro

    def key(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be continued."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in _FREE}
        return values

    def trunk_key(self) -> dict[str, Any]:
        """What a cooldown must share with the trunk it branches from."""
        own = ("steps", "schedule", "cooldown", "floor", "branch")
        return {k: v for k, v in self.key().items() if k not in own}


def peak_flops(name: str) -> float | None:
    """The bf16 peak of a device by its name, where it is known.

    Example:
        >>> peak_flops("NVIDIA H200"), peak_flops("x86_64")
        (989400000000000.0, None)
    """
    return next((value for key, value in PEAK_FLOPS.items() if key in name), None)
