"""Clients that are not ours give the same logits, loss, gradients and tokens with and without `accelerate()`."""

import contextlib
import importlib.util
import sys

import pytest
import torch

pytest.importorskip("transformers")

from ckda.compat import accelerate, restore
from ckda.compat.clients import CLIENTS

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
MIXED = ["linear_attention", "full_attention", "linear_attention"]


def eager(model):
    """Experts one by one: the grouped product has no float64."""
    model.set_experts_implementation("eager")
    return model


def kimi_linear():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        **SIZES, num_hidden_layers=3, layer_types=MIXED, linear_head_dim=16, linear_num_heads=2, moe_intermediate_size=24,
        num_local_experts=4, num_experts_per_tok=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return eager(KimiLinearForCausalLM(config))


def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **SIZES, num_hidden_layers=3, layer_types=MIXED, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=12,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return eager(Qwen3NextForCausalLM(config))


def olmo_hybrid(kinds=MIXED):
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    config = OlmoHybridConfig(
        **SIZES, num_hidden_layers=len(kinds), layer_types=kinds, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=32,
    )  # fmt: skip
    return OlmoHybridForCausalLM(config)


MODELS = {"kimi_linear": kimi_linear, "qwen3_next": qwen3_next, "olmo_hybrid": olmo_hybrid}


@pytest.fixture(autouse=True)
def _put_back():
    yield
    restore()


@pytest.fixture
def own_path():
    """Where FLA is installed transformers takes its kernels, which need a GPU: then there is nothing to compare with on a CPU."""
    if importlib.util.find_spec("fla") and not torch.cuda.is_available():
        pytest.skip("transformers takes FLA's GPU kernels where FLA is installed")


def run(model, tokens):
    """Logits, loss and gradients."""
    model.zero_grad()
    result = model(tokens, labels=tokens)
    result.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), "loss": result.loss.detach()} | gradients


def error(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-9))


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_loss_gradients_and_tokens(name, own_path):
    """To rounding: our distance to the model in float64 is at most twice that of the model's own path."""
    model, tokens = MODELS[name](), torch.randint(61, (1, 100))
    with torch.no_grad():
        before = model.generate(tokens[:, :70], max_new_tokens=6, do_sample=False)
    theirs = run(model, tokens)
    with accelerate(name, quiet=True):
        ours = run(model, tokens)
        with torch.no_grad():
            after = model.generate(tokens[:, :70], max_new_tokens=6, do_sample=False)
        truth = run(model.double(), tokens)
    assert torch.equal(before, after)
    assert set(ours) == set(theirs) == set(truth)
    ours, theirs = ({key: error(found[key], x) for key, x in truth.items()} for found in (ours, theirs))
    for key in ("logits", "loss"):
        assert ours[key] <= max(2 * theirs[key], 1e-6), key
    # some parameters are two numbers, whose error is a matter of luck: all of them together, none far off
    total, own = (torch.tensor([*x.values()]).square().mean().sqrt() for x in (ours, theirs))
    assert total <= 2 * own
    assert max(ours.values()) <= 2 * max(theirs.values())


def padded_batch(model):
    """Three prompts of 90, 70 and 13 tokens, padded on the left: the logits of their tokens, and what is generated."""
    tokens, mask = torch.randint(61, (3, 90)), torch.ones(3, 90, dtype=torch.long)
    mask[1, :20] = mask[2, :77] = 0
    logits = model(tokens, attention_mask=mask).logits[mask.bool()]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    return logits, model.generate(tokens, attention_mask=mask, **options)


def beams(model):
    return model.generate(torch.randint(61, (1, 30)), max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0)


def in_parts(model):
    """Seventy tokens, then nineteen, then one, by a cache."""
    tokens, logits, cache = torch.randint(61, (2, 90)), [], None
    for part in tokens.split([70, 19, 1], 1):
        result = model(part, past_key_values=cache, use_cache=True)
        logits.append(result.logits)
        cache = result.past_key_values
    return torch.cat(logits, 1)


def recomputed_activations(model):
    """The gradients of training with checkpoints in every layer."""
    tokens = torch.randint(61, (2, 70))
    with torch.enable_grad():
        model.train().gradient_checkpointing_enable()
        found = run(model, tokens)
    return torch.cat([x.flatten() for x in found.values()])


@pytest.mark.parametrize("use", [padded_batch, beams, in_parts, recomputed_activations])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_way_of_use(name, use, own_path):
    """To ten float32 roundings of the model's own result; tokens are equal."""
    model = MODELS[name]().eval()
    found = []
    for accelerated in (False, True):
        torch.manual_seed(1)
        with accelerate(name, quiet=True) if accelerated else contextlib.nullcontext():
            result = use(model)
        found.append(result if isinstance(result, tuple) else (result,))
    for ours, theirs in zip(*reversed(found), strict=True):
        if ours.dtype == torch.long:
            assert torch.equal(ours, theirs)
        else:
            assert error(ours, theirs) < 3e-5


def test_compiled_in_one_graph():
    """The operator is one node: no break in a model whose other parts have none."""
    model, tokens = olmo_hybrid(MIXED[:2]), torch.randint(61, (1, 20))
    with accelerate("olmo_hybrid", quiet=True):
        expected = run(model, tokens)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = run(compiled, tokens)
    for key, value in expected.items():
        assert error(found[key if key in found else f"_orig_mod.{key}"], value) < 1e-5, key


def test_it_says_what_it_replaced_and_puts_it_back(capsys):
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    original = module.chunk_kimi_delta_attention
    result = accelerate("kimi_linear")
    assert capsys.readouterr().out.count("modeling_kimi_linear") == 2
    assert [one.name for one in result.replaced] == ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"]
    assert module.chunk_kimi_delta_attention is not original
    with accelerate("kimi_linear", quiet=True) as again:
        assert not again.replaced
    assert module.chunk_kimi_delta_attention is not original, "the inner block put back what it had not replaced"
    assert len(restore()) == 2
    assert module.chunk_kimi_delta_attention is original


def test_all_installed_clients_by_default():
    result = accelerate(quiet=True)
    done = {one.module for one in result.replaced}
    for client, (module, _) in CLIENTS.items():
        assert (module in done) != (client in result.absent), client
    assert {"kimi_linear", "olmo_hybrid", "qwen3_next"} <= CLIENTS.keys() - result.absent.keys()


def test_keywords_of_the_model_that_the_operator_has_not_are_dropped():
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    x = torch.randn(1, 4, 2, 8)
    accelerate("kimi_linear", quiet=True)
    o, _ = module.chunk_kimi_delta_attention(x, x, x, g=-x.abs(), beta=x[..., 0], output_attentions=False)
    assert o.shape == x.shape


def test_bad_input(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"there is no client 'mamba'; there are fla\.kda"):
        accelerate("mamba")
    monkeypatch.setitem(CLIENTS, "none", ("nowhere_to_be_found.layers", {}))
    with pytest.raises(ImportError, match="none: nowhere_to_be_found is not installed"):
        accelerate("none")
    with pytest.raises(ImportError, match="none: nowhere_to_be_found is not installed"):
        accelerate("kimi_linear", "none")
    assert restore() == [], "what is refused replaces nothing"
    with pytest.raises(ValueError, match=r"there is no client \['kimi_linear'\]"):
        accelerate(["kimi_linear"])
    (tmp_path / "broken_client.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(CLIENTS, "broken", ("broken_client", {}))
    with pytest.raises(ImportError, match="broken: broken_client cannot be imported: RuntimeError: no driver"):
        accelerate("broken")
    assert "broken" in accelerate(quiet=True).absent
    restore()
    monkeypatch.setitem(CLIENTS, "other", ("ckda.record", {"chunk_kda": print}))
    with pytest.raises(ImportError, match=r"ckda.record has no chunk_kda"):
        accelerate("other")


def test_flas_own_model():
    """On the CPU, with FLA's Triton kernels beside the operator replaced by torch: its naive KDA against ours."""
    pytest.importorskip("fla.models.kda", reason="flash-linear-attention is not installed")
    sys.path.insert(0, str(__file__).rpartition("/")[0])
    import fla_on_cpu

    for name in fla_on_cpu.CONFIGS:
        model, tokens = fla_on_cpu.build(name), torch.randint(fla_on_cpu.SIZES["vocab_size"], (2, 70))
        expected = run(model, tokens)
        with accelerate("fla.kda", quiet=True):
            found = run(model, tokens)
        for key, value in expected.items():
            assert error(found[key], value) < 1e-4, key  # there the norm has nothing under the root
