"""``ckda lm``, a file a command: its configuration, ``run(config) -> result``, and the options that fill the configuration."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ModelChoice", "choose_model"]


@dataclass(frozen=True)
class ModelChoice:
    """A trained model to use, and how."""

    model: str  #: a model folder, a training run or a checkpoint
    tokenizer: str | None = None  #: a tokenizer file, where none is beside the model
    dtype: str = "fp32"  #: or "bf16"
    backend: str = "auto"  #: of the operator
    device: str = "cpu"

    @property
    def name(self) -> str:
        """As results call it."""
        return Path(self.model).name

    def load(self) -> Any:
        """The model, on its device."""
        import torch

        from ckda.lm.models import load_model

        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        return load_model(self.model, self.device, dtype, backend=self.backend)

    def load_tokenizer(self) -> Any:
        """The tokenizer beside the model, or the one that is named."""
        from ckda.lm.models import text_tokenizer

        return text_tokenizer(self.model, self.tokenizer)


def choose_model(args: argparse.Namespace, out: Path) -> ModelChoice:
    """The model of the options; in a smoke run a tiny one that is trained now."""
    from ckda.command import filled, pick_device
    from ckda.lm.models import unfinished
    from ckda.lm.tiny import tiny_run

    device = pick_device(args.device)
    if args.smoke:
        return filled(ModelChoice, args, model=str(tiny_run(out / "tiny", args.seed)), device=device)
    if args.model is None:
        raise ValueError("name a model folder, a training run or a checkpoint")
    if (note := unfinished(args.model)) is not None:
        print(note, file=sys.stderr)
    return filled(ModelChoice, args, device=device)
