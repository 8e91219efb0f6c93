"""Our language models in torchtitan 0.3: its trainer, checkpoints, FSDP2 and activation checkpointing, our context parallelism.

    torchrun --nproc-per-node 8 -m torchtitan.train --module ckda.compat.torchtitan --config train --model 1.3B:ckda ...

torchtitan imports the function named by --config from :mod:`ckda.compat.torchtitan.config_registry`, and builds what its
model spec names: :class:`ckda.compat.torchtitan.model.Model`. Nothing else of the library imports this room, which needs
``pip install torchtitan==0.3.0``.
"""
