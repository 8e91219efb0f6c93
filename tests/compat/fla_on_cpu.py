"""flash-linear-attention's own KDA model on a CPU: its GPU kernels replaced by its own naive functions and by torch's.

    python tests/compat/fla_on_cpu.py tests/data/fla_kda    # writes the frozen checkpoints of test_convert.py

needs flash-linear-attention (the whole package, not fla-core alone).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: the frozen checkpoints: FLA's configuration of each
CONFIGS: dict[str, dict[str, Any]] = {
    "bounded": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True, "num_v_heads": 4},
    "softplus": {"tie_word_embeddings": True},
    "hybrid": {
        "safe_gate": True,
        "lower_bound": -5.0,
        "attn": {"layers": [1], "num_heads": 2, "num_kv_heads": 2, "window_size": None, "rope_theta": 1000.0},
    },
}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 19,
    "initializer_range": 0.4,
}


def build(name: str) -> Any:
    """FLA's model of that configuration, able to run without a GPU."""
    from fla.layers import attn, kda
    from fla.models.kda import KDAConfig, KDAForCausalLM

    if attn.flash_attn_func is None:
        attn.flash_attn_func = _attention  # the layer only asks whether there is one: its forward is replaced below
    torch.manual_seed(3)
    unfused = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
    model = KDAForCausalLM(KDAConfig(**SIZES, **CONFIGS[name], **unfused)).eval()
    kda.fused_recurrent_kda = kda.chunk_kda = _naive  # what the layer calls
    for block in model.model.layers:
        block.mlp.forward = _swiglu.__get__(block.mlp)
        if not isinstance(block.attn, kda.KimiDeltaAttention):
            block.attn.forward = _attention.__get__(block.attn)
            continue
        block.attn.o_norm.forward = _gated_norm.__get__(block.attn.o_norm)
        for convolution in (block.attn.q_conv1d, block.attn.k_conv1d, block.attn.v_conv1d):
            convolution.forward = _convolve.__get__(convolution)
    return model


def _naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    A_log, dt_bias, bound = options["A_log"], options["dt_bias"], options["lower_bound"]
    gate = naive_kda_gate(g, A_log, dt_bias) if bound is None else naive_kda_lowerbound_gate(g, A_log, dt_bias, bound)
    beta = beta.sigmoid() * (2 if options["allow_neg_eigval"] else 1)
    return naive_recurrent_kda(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate, beta)[0], None


def _convolve(self: Any, x: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The module is a torch Conv1d with padding on both sides; the first T outputs are the causal ones."""
    y = F.conv1d(x.mT, self.weight, padding=self.padding, groups=self.groups)[..., : x.shape[1]].mT
    return F.silu(y), None


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    assert self.activation == "sigmoid"
    return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * gate.sigmoid()


def _swiglu(self: Any, x: Tensor, **_: Any) -> Tensor:
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _attention(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None, None]:
    """Causal attention with the module's own weights and rotary rates, halves paired."""
    heads = (self.num_heads, -1)
    q, k, v = (f(hidden_states).unflatten(-1, heads).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
    width = q.shape[-1]
    rate = self.rotary.base ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(q.shape[2])[:, None] * rate

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    o = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
    return self.o_proj(o.transpose(1, 2).flatten(2)), None, None


@torch.no_grad()
def freeze(folder: Path) -> None:
    """Write weights, tokens and logits of every configuration, and the configurations."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in CONFIGS:
        model = build(name)
        ids = torch.randint(SIZES["vocab_size"], (2, 11))
        weights = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
        frozen = {"ids": ids, "logits": model(ids, use_cache=False).logits}
        save_file({**weights, **{f"test.{k}": v for k, v in frozen.items()}}, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(
            json.dumps(json.loads(model.config.to_json_string()), indent=1, sort_keys=True) + "\n"
        )
    (folder / "names.json").write_text(json.dumps(names_at_1p3b(), indent=1) + "\n")


def names_at_1p3b() -> dict[str, list[int]]:
    """Name -> shape of FLA's model at the paper's 1.3B size, of its first two blocks and the rest."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    config = KDAConfig(hidden_size=2048, num_heads=16, head_dim=128, num_hidden_layers=2, intermediate_size=5440)
    with torch.device("meta"):
        model = KDAForCausalLM(config)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    freeze(Path(sys.argv[1]))
