"""Gates and learning rates that are nearly at their ends, moved there: `begin=snapped`, with which the recipe `settle` begins.

A head that turns its state without loss has |alpha| = 1 and beta = 2. Training comes near, to 1.9999 for 2, and what is left
shrinks the state a little at every letter: nothing after 512 of them, everything after 65,536. Closer it does not come, for the
gradient fades with the distance. Both numbers are saturating functions of a logit with a factor of its own for every head
(exp(A_log), the head's row of b_proj). Where the logits of all letters are beyond NEAR, a factor twelve times as large makes the
ends exact in float32, and nothing else of the head changes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ckda.experiments.tracking.model import Tracker

__all__ = ["FACTOR", "NEAR", "snap", "snapped"]

NEAR = 3.0  #: sigmoid(3) = .95: learning rates of at least 1.9 or at most .1, gates of at least .9
FACTOR = 12.0  #: sigmoid(36) is 1 in float32


@torch.no_grad()
def snap(model: Tracker) -> int:
    """Move the ends of the heads that are near them; how many learning rates and gates of heads that were."""
    mixer, letters = model.mixer, model.embedding.weight[:-1]
    if not all(hasattr(mixer, name) for name in ("A_log", "dt_bias", "f_proj", "b_proj")) or mixer.gate == "softplus":
        raise ValueError("begin=snapped moves bounded gates and learning rates to their ends; this mixer has none")
    rates = mixer.b_proj(letters)  # [letters, H]
    raw = (mixer.f_proj(letters) + mixer.dt_bias).unflatten(-1, (mixer.A_log.numel(), -1))  # [letters, H, K]
    gates = raw * mixer.A_log.exp()[:, None]
    sure_rates, sure_gates = rates.abs().amin(0) > NEAR, gates.abs().amin((0, 2)) > NEAR
    mixer.A_log[sure_gates] += math.log(FACTOR)
    for weight in mixer.b_proj.parameters():
        weight[sure_rates] *= FACTOR
    return int(sure_rates.sum() + sure_gates.sum())


def snapped(build: Callable[[], Tracker], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """:func:`snap` of stacked trackers, [R, ...] each."""
    model, found = build(), []
    for r in range(len(next(iter(parameters.values())))):
        model.load_state_dict({name: p[r] for name, p in parameters.items()})
        snap(model)
        found.append({name: p.detach().clone() for name, p in model.state_dict().items()})
    return {name: torch.stack([one[name] for one in found]).to(p.device) for name, p in parameters.items()}
