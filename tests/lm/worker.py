"""One rank of a training run, started by the tests through torchrun or alone: options as JSON on the command line."""

import json
import os
import signal
import sys
from typing import Any

import torch

from ckda.lm.parallel import join
from ckda.lm.recipe import Recipe
from ckda.lm.train import Options, Trainer
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM

RECIPE: dict[str, Any] = {
    "steps": 32,
    "length": 16,
    "batch": 4,
    "warmup": 4,
    "lr": 1e-2,
    "dtype": "fp32",
    "log_every": 4,
    "save_every": 6,
    "eval_every": 12,
    "eval_tokens": 160,
}


def build() -> ComplexKDAForCausalLM:
    """A hybrid of two layers."""
    return ComplexKDAForCausalLM(
        ComplexKDAConfig(
            vocab_size=304,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_heads=2,
            head_dim=8,
            hybrid="gated-attention",
            hybrid_every=2,
        )
    )


def main(job: dict[str, Any]) -> None:
    """Train; with "kill_at" the process ends itself after that update as a crash would, with "term_at" by SIGTERM."""
    torch.set_num_threads(1)
    world = join("cpu")
    trainer = Trainer(
        build,
        job["data"],
        Recipe(**RECIPE | job.get("recipe", {})),
        job["out"],
        world,
        Options(**job.get("options", {})),
    )
    if job.get("resume"):
        from ckda.lm import checkpoint

        path = checkpoint.newest(trainer.out / "checkpoints", world)
        assert path is not None
        trainer.load(path)
    update = trainer.update

    def watched(batches: Any) -> Any:
        if trainer.step == job.get("kill_at", -1):
            os._exit(9)
        if trainer.step == job.get("term_at", -1):
            os.kill(os.getpid(), signal.SIGTERM)
        return update(batches)

    trainer.update = watched  # type: ignore[method-assign]
    outcome = trainer.run()
    if world.main:
        print(json.dumps({"stopped": outcome.stopped, "step": outcome.step}))
    world.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
