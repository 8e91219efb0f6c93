"""A language model of ours in the shape that torchtitan's trainer expects, and how it is spread over ranks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, get_fsdp_reshard_after_forward_policy
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ladder
from ckda.models.lm import Block
from ckda.ops.context import Context

__all__ = ["Adapter", "Model", "RunConfig", "configuration", "model_spec", "parallelize"]


def configuration(name: str) -> ComplexKDAConfig:
    """SIZE:ARM of the ladder, or a folder with the config.json of a model."""
    if Path(name).is_dir():
        return ComplexKDAConfig.from_pretrained(name)
    size, colon, arm = name.partition(":")
    if not colon:
        raise ValueError(f"the model is {name!r}; it may be SIZE:ARM as 47M:ckda, or a folder with a config.json")
    return ladder.build(size, arm)


class Model(BaseModel):
    """:class:`ckda.models.ComplexKDAForCausalLM` as torchtitan calls it: tokens [B, T] -> logits [B, T, V].

    Documents of a packed sequence are joined: `positions`, which start again at each, are not read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The model by name; the run's own --model takes its place."""

        name: str = "47M:ckda"

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """What the trainer's configuration says about the model."""
            self.name = config.model_spec.flavor = config.model

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Parameters, and the FLOPs of a trained token."""
            return ladder.num_parameters(model.hf.config), int(ladder.flops_per_token(model.hf, seq_len))

    def __init__(self, config: Config):
        super().__init__()
        self.hf = ComplexKDAForCausalLM(configuration(config.name))
        self.context: Context | None = None  #: the ranks that share the time axis
        self._skip_lm_head = False  #: set by the trainer where the loss applies the head, chunk by chunk

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, which torchtitan wraps one by one."""
        return self.hf.model.layers

    @property
    def lm_head(self) -> nn.Linear:
        """The output layer."""
        return self.hf.lm_head

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        """Logits, or hidden states where the loss applies the head."""
        hidden = self.hf.model(tokens, use_cache=False, context=self.context).last_hidden_state
        return hidden if self._skip_lm_head else self.hf.lm_head(hidden)

    def verify_module_protocol(self) -> None:
        """Nothing: modules of transformers are plain ones, and :meth:`init_states` initialises them."""

    def to_empty(self, *args: Any, **kwargs: Any) -> "Model":
        """As torch does it; what was one matrix for input and output is one again."""
        super().to_empty(*args, **kwargs)
        if self.hf.config.tie_word_embeddings:
            self.hf.lm_head.weight = self.hf.model.embed_tokens.weight
        return self

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise as the library does: each part whole on the CPU, then spread. No rank holds more than a block of it."""
        config, inner = self.hf.config, self.hf.model
        d, V = config.hidden_size, config.vocab_size
        self._fill(inner.embed_tokens, nn.Embedding(V, d))
        for index, block in enumerate(inner.layers):
            self._fill(block, Block(config, index))
        nn.init.ones_(inner.norm.weight)
        if not config.tie_word_embeddings:
            self._fill(self.hf.lm_head, nn.Linear(d, V, bias=False))

    def _fill(self, module: nn.Module, fresh: nn.Module) -> None:
        """Give a module, sharded or not, the weights of its like on the CPU, once those are initialised."""
        fresh.apply(self.hf._init_weights)
        whole = dict(fresh.named_parameters())
        for name, parameter in module.named_parameters():
            value = whole.pop(name).to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        assert not whole, f"{', '.join(whole)} found no place"


class Adapter(StateDictAdapter):
    """Between torchtitan's checkpoints and a folder as transformers reads it: the names differ by a prefix, and a matrix that
    is both embedding and head is kept once there."""

    @property
    def tied(self) -> bool:
        """Whether one matrix is embedding and head."""
        return configuration(self.model_config.name).tie_word_embeddings

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our model's names."""
        out = {name.removeprefix("hf."): value for name, value in state_dict.items()}
        if self.tied:
            out.pop("lm_head.weight", None)
        return out

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The names in :class:`Model`."""
        out = {f"hf.{name}": value for name, value in hf_state_dict.items()}
        if self.tied:
            out["hf.lm_head.weight"] = out["hf.model.embed_tokens.weight"]
        return out


def parallelize(
    model: Model,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Model:
    """Context parallelism, activation checkpointing, compilation, FSDP2 (or HSDP), in this order, as asked for."""
    _refuse(parallel_dims, parallelism)
    if parallel_dims.cp_enabled:
        zigzag = parallelism.context_parallel_load_balancer == "headtail"
        model.context = Context(parallel_dims.get_mesh("cp").get_group(), zigzag)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    policy = MixedPrecisionPolicy(
        TORCH_DTYPE_MAP[training.mixed_precision_param],
        TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": parallel_dims.get_mesh(axes), "mp_policy": policy}
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp_enabled=False)
    for block in model.layers:
        fully_shard(block, **options, reshard_after_forward=reshard)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    if options["mesh"].device_type == "cpu":  # gloo can only add
        for module in (*model.layers, model):
            module.set_force_sum_reduction_for_comms(True)
    return model


def _refuse(parallel_dims: Any, parallelism: Any) -> None:
    """What this model does not do, each in a sentence."""
    if parallel_dims.tp_enabled:
        raise ValueError("tensor_parallel_degree is above 1; this model has FSDP, HSDP and context parallelism")
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(f"spmd_backend is {parallelism.spmd_backend!r}; it must be 'partial_dtensor' for this model")
    if parallel_dims.cp_enabled and parallelism.context_parallel_load_balancer not in ("headtail", None):
        raise ValueError(
            "context_parallel_load_balancer must be 'headtail' (zig-zag) or None (contiguous parts) for this model"
        )


def model_spec(name: str) -> ModelSpec:
    """What torchtitan needs to know of a model."""
    return ModelSpec(
        name="ckda",
        flavor=name,
        model=Model.Config(name=name),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Adapter,
    )


class Run(Trainer):
    """torchtitan's trainer; its configuration says which of our models is trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A run of torchtitan, and which model."""

        model: str = field(default="47M:ckda")
        """SIZE:ARM of the ladder, or a folder with the config.json of a model"""


RunConfig = Run.Config
