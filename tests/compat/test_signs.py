"""ckda.convert: the model is what it was, its gates may turn negative, and it is loaded as it was saved."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckda
from ckda import ComplexKDA
from ckda.layers import SignFactor

transformers = pytest.importorskip("transformers")
load_file, save_file = (getattr(pytest.importorskip("safetensors.torch"), name) for name in ("load_file", "save_file"))

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "fla_kda"


def tiny(mixer="kda", **options):
    from ckda.models.config import ComplexKDAConfig
    from ckda.models.lm import ComplexKDAForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
    return ComplexKDAForCausalLM(ComplexKDAConfig(**sizes, num_hidden_layers=2, mixer=mixer, **options)).eval()


def kimi():
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "v_head_dim": 8}
    config = transformers.KimiLinearConfig(
        **sizes, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense"] * 3, linear_head_dim=8, linear_num_heads=2, num_key_value_heads=2, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.KimiLinearForCausalLM(config).eval()


def factors(model):
    return [p for name, p in model.named_parameters() if "s_proj" in name or "t_proj" in name]


def shake(model):
    with torch.no_grad():
        for p in factors(model):
            p.add_(torch.randn_like(p))


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


MAKERS = {
    "ours": tiny,
    "ours, softplus gate and beta to 2": lambda: tiny("kda-softplus-beta2"),
    "ours, hybrid": lambda: tiny(hybrid="attention", hybrid_every=2),
    "Kimi-Linear": kimi,
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_model_with_gradients_for_its_factors_saved_and_loaded(name, tmp_path):
    if name == "Kimi-Linear" and importlib.util.find_spec("fla") and not torch.cuda.is_available():
        pytest.skip("transformers takes FLA's GPU kernels where FLA is installed")
    model, tokens = MAKERS[name](), torch.randint(31, (2, 40))
    before = logits(model, tokens)
    written = model.generate(tokens[:, :9], max_new_tokens=8, do_sample=False)
    assert ckda.convert(model) is model
    torch.testing.assert_close(logits(model, tokens), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(tokens[:, :9], max_new_tokens=8, do_sample=False), written)
    model(tokens, labels=tokens).loss.backward()
    assert factors(model)
    assert all(p.grad.abs().sum() > 0 for p in factors(model))
    shake(model)
    changed = logits(model, tokens)
    assert not torch.allclose(changed, before, atol=1e-3)
    assert ckda.convert(model) is model, "what has its factors stays as it is"
    torch.testing.assert_close(logits(model, tokens), changed)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    torch.testing.assert_close(logits(ckda.convert(tmp_path).eval(), tokens), changed)


def experts():
    """Kimi-Linear whose weights have other names and shapes on the disk."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "v_head_dim": 8}
    config = transformers.KimiLinearConfig(
        **sizes, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], kv_lora_rank=8,
        mlp_layer_types=["dense", "sparse"], qk_rope_head_dim=8, qk_nope_head_dim=8,
        moe_intermediate_size=8, num_local_experts=4, num_experts_per_tok=2, n_group=1, linear_head_dim=8, linear_num_heads=2,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return transformers.KimiLinearForCausalLM(config).eval()


@pytest.mark.parametrize("make", [kimi, experts, tiny])
def test_the_auto_classes_load_a_converted_folder_with_its_factors(make, tmp_path):
    """Not as Kimi-Linear without them, into which its weights would fit."""
    model, tokens = ckda.convert(make()), torch.randint(31, (2, 20))
    shake(model)
    expected = logits(model, tokens)
    model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert type(loaded) is type(model)
    torch.testing.assert_close(logits(loaded.eval(), tokens), expected)
    loaded.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(ckda.convert(tmp_path / "again").eval(), tokens), expected)


@pytest.mark.parametrize(
    "load",
    [
        "import transformers; load = transformers.AutoModelForCausalLM.from_pretrained; options = {'trust_remote_code': True}",
        "from ckda.lm.models import load_model as load; options = {}",
    ],
    ids=["auto", "lm"],
)
def test_a_program_that_did_not_import_it_finds_the_model_by_its_folder(load, tmp_path):
    model, tokens = ckda.convert(experts()), torch.randint(31, (2, 20))
    shake(model)
    model.save_pretrained(tmp_path)
    torch.save((tokens, logits(model, tokens)), tmp_path / "example.pt")
    program = f"""
import torch
{load}
model = load("{tmp_path}", **options).eval()
tokens, expected = torch.load("{tmp_path}/example.pt")
with torch.no_grad():
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_of_kimi_linear_that_said_sign_factor_is_still_loaded(tmp_path):
    """As saved before the converted model had a model_type of its own."""
    model, tokens = ckda.convert(kimi()), torch.randint(31, (2, 20))
    shake(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_linear", "sign_factor": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(ckda.convert(tmp_path).eval(), tokens), logits(model, tokens))


def without(name, folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})


def cut(name, folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {name: weights[name][:3].clone()}, path, metadata={"format": "pt"})


def half(name, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize("damage", [without, cut, half])
@pytest.mark.parametrize(("make", "mixer"), [(kimi, "self_attn"), (tiny, "mixer")])
@pytest.mark.parametrize("converted", [False, True])
def test_a_damaged_checkpoint_is_refused(damage, make, mixer, converted, tmp_path):
    """transformers draws missing weights anew, and only reports it."""
    model = make()
    (ckda.convert(model) if converted else model).save_pretrained(tmp_path)
    name = f"model.layers.0.{mixer}.{'s_proj' if converted else 'q_proj'}.weight"
    damage(name, tmp_path)
    said = "the weights in .* cannot be read" if damage is half else "does not hold the weights of its configuration: "
    with pytest.raises(ValueError, match=said + ("" if damage is half else name)):
        ckda.convert(tmp_path)


def test_a_folder_with_factors_beside_signed_gates_is_loaded_as_it_is(tmp_path):
    tiny(layer_mixers=["kda-factor", "ckda"]).save_pretrained(tmp_path)
    assert ckda.convert(tmp_path).config.mixers() == ["kda-factor", "ckda"]


def test_tied_weights_are_not_missing(tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert ckda.convert(tmp_path).config.tie_word_embeddings


def test_parameters_are_the_same_ones_and_as_frozen_as_they_were():
    for name, make in MAKERS.items():
        model = make()
        before = dict(model.named_parameters())
        for p in before.values():
            p.requires_grad_(False)
        before["model.embed_tokens.weight"].requires_grad_(True)
        after = dict(ckda.convert(model).named_parameters())
        assert all(after[key] is p for key, p in before.items()), name
        assert [key for key in before if after[key].requires_grad] == ["model.embed_tokens.weight"]
        assert all(after[key].requires_grad for key in after.keys() - before.keys())


def test_a_layer_that_stands_twice_and_one_that_is_refused():
    layer = ComplexKDA(16, 2, 8, gate="sigmoid")
    twice = ckda.convert(nn.ModuleList([layer, nn.Linear(2, 2), layer]))
    assert type(twice[0]) is SignFactor
    assert twice[0] is twice[2]
    assert ckda.convert(twice[0]) is twice[0]
    mixed = nn.ModuleList([layer, ComplexKDA(16, 2, 8)])
    with pytest.raises(ValueError, match="has signs already"):
        ckda.convert(mixed)
    assert mixed[0] is layer, "what is refused stays as it was"


def test_decoding_of_kimi_linear_with_signs_is_its_forward_pass():
    model, tokens = ckda.convert(kimi()), torch.randint(31, (2, 12))
    shake(model)
    whole = logits(model, tokens)
    with torch.no_grad():
        result = model(tokens[:, :7], use_cache=True)
        steps = [result.logits]
        for t in range(7, 12):
            result = model(tokens[:, t : t + 1], past_key_values=result.past_key_values, use_cache=True)
            steps.append(result.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    layer = model.model.layers[0].self_attn
    assert (layer.s_proj(torch.randn(50, 16)) < 0).any()


def test_kimi_linear_with_signs_whose_weights_are_offloaded():
    """Their place is taken by none until they are needed; that of the convolution, which is used by itself, as well."""
    offload = pytest.importorskip("accelerate").cpu_offload
    model, tokens = ckda.convert(kimi()), torch.randint(31, (2, 12))
    shake(model)
    expected = logits(model, tokens)
    offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(logits(model, tokens), expected)


def test_kimi_linear_with_signs_over_4096_tokens():
    """Against the layer without: rounding, far below 1e-3."""
    from ckda.compat import accelerate

    model, x = kimi(), torch.randn(1, 4096, 16)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        layer.forget_gate.dt_bias.fill_(-9.0)
        with accelerate("kimi_linear", quiet=True):
            before = layer(x)
        ckda.convert(model)
        assert (layer(x) - before).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize("name", ["bounded", "softplus", "hybrid"])
def test_flas_checkpoint(name, tmp_path):
    """FLA's own logits, from its checkpoint with signs."""
    tensors = load_file(DATA / f"{name}.safetensors")
    tokens, expected = tensors.pop("test.ids"), tensors.pop("test.logits")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((DATA / f"{name}.json").read_text())
    model = ckda.convert(tmp_path)
    assert any(isinstance(x, SignFactor) for x in model.modules())
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-3, atol=1e-4)


def test_a_layer_keeps_its_options():
    layer = ComplexKDA(
        16, 2, 8, num_v_heads=4, head_v_dim=6, gate="softplus", beta_range=2, beta_init="spread", conv_size=3,
        activate=("v",), output_gate="linear", initial_state=torch.randn(8, 6), norm_eps=1e-3,
    )  # fmt: skip
    x = torch.randn(2, 20, 16)
    before = layer(x)
    holder = ckda.convert(nn.ModuleDict({"deep": nn.ModuleList([layer])}))
    torch.testing.assert_close(holder["deep"][0](x), before)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="Linear holds no KDA layer"):
        ckda.convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ckda.convert(tmp_path)
    with pytest.raises(ValueError, match="source is int; it must be a model or the folder of one"):
        ckda.convert(3)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        ckda.convert(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"model_type is \[1\]; it must be 'kda'"):
        ckda.convert(tmp_path)
    with pytest.raises(ValueError, match="has signs already"):
        ckda.convert(ComplexKDA(16, 2, 8))


def recipe():
    path = ROOT / "recipes" / "signs.py"
    spec = importlib.util.spec_from_file_location("recipe_of_signs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_trained_model_learns_s3_after_conversion():
    """recipes/signs.py, shorter: gates cross zero, and the model tracks what it did not. (As many updates without: below.)"""
    signs = recipe()
    record = signs.run(updates=200, more=400, seeds=1, again=signs.AGAIN[:8], plain=False)  # up to 16 letters
    before, signed = (record["scores"][arm][16][0] for arm in record["scores"])
    assert before < 0.5
    assert signed > 0.95
    assert record["negative_gates"][0] > 0.02


@pytest.mark.exhaustive
def test_it_learns_on_every_seed():
    """recipes/signs.py as it is recorded, on three seeds: the converted model tracks twice the length of any word before."""
    record = recipe().run(updates=300, more=1000, seeds=3)
    assert list(record["tracks"].values()) == [0, 0, 3]
