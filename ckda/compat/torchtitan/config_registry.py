"""What ``--config`` names: a function that returns a whole run, of which the command line changes single values."""

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from ckda.compat.torchtitan.model import RunConfig, model_spec

__all__ = ["train"]


def train() -> RunConfig:
    """Pre-training on text by AdamW with the ladder's schedule shape; 47M unless --model says otherwise."""
    return RunConfig(
        model_spec=model_spec("47M:ckda"),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=2e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_ratio=0.2, decay_type="linear"),
        training=TrainingConfig(local_batch_size=8, seq_len=2048, steps=1000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=None,
    )
