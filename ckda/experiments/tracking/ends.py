"""Gates and learning rates that are nearly at their ends, moved there: `begin=snapped`.

A head that turns its state without loss has |alpha| = 1 and beta = 2 on every letter. Training comes near, to 1.9999 for 2, and
what is left shrinks the state by as much at every letter: nothing at 512 of them, everything at 65,536. Both are a function that
saturates, of a number that has a factor of its own for every head (exp(A_log), and the head's row of b_proj). Where all letters
have a number beyond NEAR, a twelve times larger factor makes the ends exact in float32; nothing else of the head changes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ckda.experiments.tracking.model import Tracker

__all__ = ["FACTOR", "NEAR", "snap", "snapped"]

NEAR = 3.0  #: sigmoid(3) = .95: a learning rate of at least 1.9 or at most .1, a gate of at least .9
FACTOR = 12.0  #: sigmoid(36) is 1 in float32


@torch.no_grad()
def snap(model: Tracker) -> int:
    """Move the ends of the heads that are near them; how many learning rates and gates of heads that were."""
    mixer, letters = model.mixer, model.embedding.weight[:-1]
    if not all(hasattr(mixer, name) for name in ("A_log", "dt_bias", "f_proj", "b_proj")) or mixer.gate == "softplus":
        raise ValueError("begin=snapped moves bounded gates and learning rates to their ends; this mixer has none")
    rates = mixer.b_proj(letters)  # [letters, H]
    gates = (mixer.f_proj(letters) + mixer.dt_bias).unflatten(-1, (mixer.A_log.numel(), -1)) * mixer.A_log.exp()[
        :, None
    ]
    sure_rates, sure_gates = rates.abs().amin(0) > NEAR, gates.abs().amin((0, 2)) > NEAR
    mixer.A_log[sure_gates] += math.log(FACTOR)
    for weight in mixer.b_proj.parameters():
        weight[sure_rates] *= FACTOR
    return int(sure_rates.sum() + sure_gates.sum())


def snapped(build: Callable[[], Tracker], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of stacked trackers, [R, ...] each."""
    model, found = build(), []
    for r in range(len(next(iter(parameters.values())))):
        model.load_state_dict({name: p[r] for name, p in parameters.items()})
        snap(model)
        found.append({name: p.detach().clone() for name, p in model.state_dict().items()})
    return {name: torch.stack([one[name] for one in found]).to(p.device) for name, p in parameters.items()}
