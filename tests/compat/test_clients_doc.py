"""docs/clients.md is true: its code runs in order, its numbers are those of the records, its files are there."""

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
TEXT = " ".join(PAGE.split())


def record(name):
    return json.loads((ROOT / "results" / "compat" / f"{name}.json").read_text())


def tiny_kimi():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense"] * 2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return KimiLinearForCausalLM(config)


def test_its_code_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny_kimi().save_pretrained("kimi-linear")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["pool"].abs().sum((1, 2, 3)).nonzero().flatten().tolist() == [3, 5]
    assert type(names["model"].model.layers[0].self_attn).__name__ == "SignedDeltaAttention"
    assert (tmp_path / "ckda-kernel" / "build" / "torch-universal" / "metadata.json").exists()


def test_it_names_what_is_there():
    paths = re.findall(r"`((?:ckda|tests)/[\w/.]+)`|python ((?:benchmarks|recipes)/\w+\.py)", PAGE)
    assert len(paths) > 3
    assert not [path for pair in paths for path in pair if path and not (ROOT / path).exists()]
    assert max(map(len, PAGE.splitlines())) <= 140


def test_the_suite():
    counts = record("fla_suite_ours")["counts"]
    assert f"{counts['passed']} pass, {counts['failed']} fail and {counts['skipped']} are skipped" in TEXT


def test_kimi_linear_on_the_cpu():
    found = record("kimi")
    assert found["same_tokens"]
    assert found["tokens"] == [1, 1024]
    for part, name in (("operator", "the operator"), ("model", "a tiny model")):
        assert f"{name} {found[part]['ratio']:.0f} times" in TEXT
        assert f"{found[part]['processor_ratio']:.0f} by processor time" in TEXT


def test_signs():
    found = record("signs")
    for name in ("output", "state"):
        assert found["deviation"][name] < 1e-3
        assert f"{found['deviation'][name]:.0e}" in TEXT
    for arm, scores in found["scores"].items():
        at = [f"{min(scores[length]):.2f}" for length in ("32", "64")]
        assert f"| {arm} | {found['tracks'][arm]} | {at[0]} | {at[1]} |" in PAGE
    assert len(found["seeds"]) == 8
    heads = "({} heads of {})".format(*found["heads"])
    assert f"beta to 2 {heads} learns words of S3 for {found['updates']} updates, and for {found['more']} more" in TEXT
    assert f"smoothed by {found['smoothing']}" in TEXT
    assert f"{found['seconds'] / 60:.0f} minutes" in TEXT
    longest = [max(found[name]) for name in ("lengths", "lengths_again")]
    assert "the words have up to {} letters, then up to {}".format(*longest) in TEXT
    far = found["scores"]["converted and trained on"]["128"]
    above = f"{sum(score > 0.95 for score in far)} of the {len(far)} converted seeds"
    assert f"At 128 letters {above} are above 0.95 and the worst has {min(far):.2f}" in TEXT
    assert min(found["negative_gates"]) > 0.02


def gains(found, what):
    """The rows of a table of times on the H200; the sentence before it says of which model."""
    size, (batch, length) = found["parameters"] / 1e6, found["tokens"]
    assert f"of {size:.0f}M parameters ({what.format(**found['layers'])}, {batch} x {length} tokens)" in TEXT
    rows = {
        "the operator alone, forward and backward": f"{found['operator']['ratio']:.2f}",
        "KDA's part of an update": f"{found['operator in the update']['ratio']:.1f}",
        "a whole update: forward, backward, AdamW": f"{found['update']['ratio']:.2f}",
    }
    return "".join(f"| {name} | {times} |\n" for name, times in rows.items())


def test_models_on_a_gpu():
    """KDA's part was to be twice as fast, a whole update 1.2 times."""
    whole = record("clients_gpu")
    assert "H200" in whole["environment"]["device"]
    kimi, own = whole["parts"]["kimi_linear"], whole["parts"]["fla kda"]
    without = kimi["update"]["before"] / (
        kimi["operator in the update"]["update without it"] + kimi["operator in the update"]["after"]
    )
    assert (
        gains(kimi, "{of KDA} of {all} layers KDA")
        + f"| the same with their short convolution, computed | {without:.2f} |"
        in PAGE
    )
    assert gains(own, "{of KDA} layers KDA") in PAGE
    for found in (kimi, own):
        assert found["operator in the update"]["ratio"] >= 2
        assert found["update"]["ratio"] >= 1.2


def test_the_weights_of_a_sign_factor():
    """About a quarter more in a layer."""
    from ckda.layers import ComplexKDA, SignFactor

    for d, heads in ((1024, 8), (2048, 16)):
        with torch.device("meta"):
            layers = (kind(d, heads, 128, gate="softplus", beta_range=1) for kind in (ComplexKDA, SignFactor))
            before, after = (sum(p.numel() for p in layer.parameters()) for layer in layers)
        assert after / before == pytest.approx(1.25, abs=0.03)
    assert "about a quarter more weights in a KDA layer" in TEXT


def test_agreement_is_that_of_the_record():
    parts = record("clients_gpu_untuned")["parts"]
    found = parts["fla agreement"]
    assert found["by"] == {"before": "fla.ops.kda.chunk.chunk_kda", "after": "ckda.compat.fla.chunk_kda"}
    ours, theirs = (found[name] for name in ("after", "before"))
    for key in ("logits", "gradients", "loss"):
        assert ours[key] < theirs[key]
    far = {key: f"{ours[key]:.1%} and {theirs[key]:.1%}" for key in ("logits", "gradients")}
    assert f"logits {far['logits']}, all gradients together {far['gradients']}, the loss" in TEXT
    assert f"the loss {ours['loss']:.0e} and {theirs['loss']:.0e})".replace("e-0", "e-") in TEXT
    assert parts["fla tokens"]["same_tokens"]
