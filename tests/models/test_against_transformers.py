"""The attention models against transformers' own of the same equations and weights: Llama, Qwen3 (q and k normalised), Mistral
(a window). An oracle that shares no code with ours."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM

THEIRS = {
    "attention": (LlamaConfig, LlamaForCausalLM, {}),
    "qk-norm": (Qwen3Config, Qwen3ForCausalLM, {}),
    "sliding-attention": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
}
NAMES = {"mixer_norm": "input_layernorm", "mixer": "self_attn", "mlp_norm": "post_attention_layernorm"}


@pytest.mark.parametrize("kind", THEIRS)
def test_equal_logits_and_generation(kind):
    torch.manual_seed(0)
    make_config, make_model, more = THEIRS[kind]
    shared = {
        "vocab_size": 23,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "head_dim": 8,
        **more,
    }
    shared |= {"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    mixer = "attention" if kind == "qk-norm" else kind
    ours = ComplexKDAForCausalLM(ComplexKDAConfig(**shared, num_heads=3, mixer=mixer, qk_norm=kind == "qk-norm")).eval()
    for p in ours.parameters():
        if p.dim() == 1:  # norms that are not all ones
            torch.nn.init.uniform_(p, 0.5, 1.5)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": ours.config.norm_eps}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    theirs = make_model(make_config(**shared, **heads, **rope)).eval()
    weights = {".".join(NAMES.get(part, part) for part in name.split(".")): p for name, p in ours.state_dict().items()}
    theirs.load_state_dict(weights)
    ids = torch.randint(23, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        a, b = (model(ids, attention_mask=mask).logits for model in (ours, theirs))
    torch.testing.assert_close(a[mask == 1], b[mask == 1], rtol=1e-4, atol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    ours.train(), theirs.train()
    torch.testing.assert_close(ours(ids, labels=ids).loss, theirs(ids, labels=ids).loss, rtol=1e-4, atol=1e-4)
