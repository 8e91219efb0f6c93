"""Clients that are not ours give the same logits, loss, gradients and tokens with and without `accelerate()`."""

import contextlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from ckda.compat import accelerate, clients, restore
from ckda.compat.clients import CLIENTS
from ckda.ops.triton import HAS_TRITON

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
HAS_KERNEL = clients._has_kernel
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


@pytest.fixture
def convolved(monkeypatch):
    """Our convolution on the CPU too, where it is torch's; how often it was called."""
    calls, ours = [], clients.short_convolution

    def count(*args, **keywords):
        calls.append(None)
        return ours(*args, **keywords)

    monkeypatch.setattr(clients, "_has_kernel", lambda x: True)
    monkeypatch.setattr(clients, "short_convolution", count)
    return calls


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
def test_same_logits_loss_gradients_and_tokens(name, own_path, convolved):
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
    assert len(convolved) == 6, "two layers, with gradients, one prompt and in float64"
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
def test_every_way_of_use(name, use, own_path, convolved):
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
    assert convolved


def in_bfloat16(name, autocast):
    """How far from float32 logits and all gradients together are, by the model's own path and by ours."""
    model, tokens = MODELS[name](), torch.randint(61, (1, 100))
    truth = run(model, tokens)
    model = model if autocast else model.bfloat16()
    errors = []
    for accelerated in (False, True):
        way = accelerate(name, quiet=True) if accelerated else contextlib.nullcontext()
        with way, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = run(model, tokens)
        apart = {key: error(found[key], x) for key, x in truth.items()}
        logits, _ = apart.pop("logits"), apart.pop("loss")
        errors.append([logits, float(torch.tensor([*apart.values()]).square().mean().sqrt())])
    return errors


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name, autocast, own_path, convolved):
    """Over four models no further from float32 than 1.5 times the model's own path; in one, an expert chosen otherwise decides."""
    errors = torch.tensor([in_bfloat16(name, autocast) for _ in range(4)])
    assert not torch.equal(errors[:, 0], errors[:, 1]), "ours was compared with ours"
    theirs, ours = errors.square().mean(0).sqrt().unbind()
    assert (ours <= 1.5 * theirs).all(), errors


@pytest.mark.parametrize("place", ["convolved", "own_path"])
def test_compiled_in_one_graph(place, request):
    """Operator and convolution are one node each: no break in a model whose other parts have none."""
    request.getfixturevalue(place)
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
    assert capsys.readouterr().out.count("modeling_kimi_linear") == 3
    names = ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn"]
    assert [one.name for one in result.replaced] == names
    assert module.chunk_kimi_delta_attention is not original
    with accelerate("kimi_linear", quiet=True) as again:
        assert not again.replaced
    assert module.chunk_kimi_delta_attention is not original, "the inner block put back what it had not replaced"
    assert len(restore()) == 3
    assert module.chunk_kimi_delta_attention is original


def test_a_block_that_would_change_nothing_is_refused():
    """A result is good for one block: the second would run the client's own functions."""
    result = accelerate("kimi_linear", quiet=True)
    with result:
        pass
    for undone in (result, accelerate("olmo_hybrid", quiet=True)):
        restore()
        with pytest.raises(RuntimeError, match="was put back already; call accelerate"), undone:
            pass


def test_an_error_inside_a_block_puts_everything_back():
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    original = module.chunk_kimi_delta_attention
    with pytest.raises(KeyError), accelerate("kimi_linear", quiet=True):
        raise KeyError
    assert module.chunk_kimi_delta_attention is original
    assert restore() == []


def test_the_convolution_stays_where_a_package_serves_it(monkeypatch):
    """Unless ours is asked for; and it is put back."""
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    original = module.causal_conv1d_fn

    def replaced(**options):
        with accelerate("kimi_linear", quiet=True, **options) as result:
            said = "causal_conv1d_fn is now ckda.layers.convolution.short_convolution on a GPU" in str(result)
            assert said == (module.causal_conv1d_fn is not original)
        assert module.causal_conv1d_fn is original
        return said

    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=print))
    assert not replaced()
    assert replaced(convolution=True)
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace())
    assert replaced(), "a package without the function serves nothing"
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)  # cannot be imported
    assert replaced()
    assert not replaced(convolution=False)
    with accelerate("kimi_linear", quiet=True), accelerate("kimi_linear", quiet=True, convolution=True) as again:
        assert not again.replaced


def test_what_our_convolution_has_not_goes_to_theirs(convolved, monkeypatch):
    """A bias, another activation, packed sequences and states; and on the CPU everything, to the bit."""
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    calls = []

    def original(*args, **keywords):
        calls.append(keywords)
        return args[0]

    monkeypatch.setattr(module, "causal_conv1d_fn", original)
    x, weight = torch.randn(1, 5, 6).mT, torch.randn(6, 4)
    others = {
        "bias": torch.zeros(6),
        "activation": "gelu",
        "seq_idx": torch.zeros(1, 5),
        "initial_states": torch.zeros(1),
    }
    others |= {"cu_seqlens": torch.tensor([0, 5]), "return_final_states": True}
    with accelerate("kimi_linear", quiet=True, convolution=True):
        for name, value in others.items():
            module.causal_conv1d_fn(x, weight, **{"activation": "silu", name: value})
            assert calls.pop()[name] is value
        assert not convolved
        for activation in ("silu", "swish", None):
            module.causal_conv1d_fn(x, weight, None, activation, output_attentions=False)
        assert len(convolved) == 3
        assert not calls
        monkeypatch.setattr(clients, "_has_kernel", HAS_KERNEL)
        module.causal_conv1d_fn(x, weight, activation="silu")
        assert len(calls) == 1


def check_convolution(device, dtype):
    """Ours is at most twice as far from float64 as theirs: y, dx, dweight, from x as a view of [B, T, D] and in its own right."""
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    for B, T, D, S, activation in (
        (1, 1, 6, 4, "silu"),
        (2, 3, 5, 4, None),
        (2, 70, 40, 4, "silu"),
        (1, 33, 8, 2, "silu"),
    ):
        rows, weight = torch.randn(B, T, D, dtype=torch.float64), torch.randn(D, S, dtype=torch.float64)
        x, dy = rows.mT.to(dtype), torch.randn(B, D, T).to(dtype)
        weight = weight.to(dtype)

        def results(x, weight, dy, activation=activation):
            leaves = [y.detach().to(device).requires_grad_() for y in (x, weight)]
            y = module.causal_conv1d_fn(*leaves, activation=activation)
            assert y.shape == x.shape
            return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(device))]

        truth, theirs = results(x.double(), weight.double(), dy.double()), results(x, weight, dy)
        with accelerate("kimi_linear", quiet=True, convolution=True):
            for given in (x, x.contiguous()):
                for found, own, exact in zip(results(given, weight, dy), theirs, truth, strict=True):
                    assert found.dtype == dtype
                    assert error(found, exact) <= max(2 * error(own, exact), 4 * torch.finfo(dtype).eps)


def test_our_convolution_is_theirs(convolved):
    check_convolution("cpu", torch.float32)
    assert len(convolved) == 8


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_our_convolution_is_theirs_on_a_gpu(dtype):
    check_convolution("cuda", dtype)


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


def test_packed_sequences_that_a_model_hands_over_stay_apart():
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    accelerate("qwen3_next", quiet=True)
    x = torch.randn(1, 70, 2, 8)
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}

    def operator(x, cu_seqlens=None):
        g, beta = -x[..., 0].abs(), x[..., 1].sigmoid()
        return module.torch_chunk_gated_delta_rule(x, x, x, g=g, beta=beta, cu_seqlens=cu_seqlens, **options)[0]

    packed = operator(x, torch.tensor([0, 30, 70], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([operator(x[:, :30]), operator(x[:, 30:])], 1), rtol=1e-5, atol=1e-5)


def test_bad_input(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"there is no client 'mamba'; there are fla\.kda"):
        accelerate("mamba")
    monkeypatch.setitem(CLIENTS, "none", ("nowhere_to_be_found.layers", {}))
    with pytest.raises(ImportError, match="none: nowhere_to_be_found is not installed"):
        accelerate("none")
    with pytest.raises(ImportError, match="none: nowhere_to_be_found is not installed"):
        accelerate("kimi_linear", "none")
    assert restore() == [], "what is refused replaces nothing"
    with pytest.raises(ValueError, match="convolution is 'ours'; it must be True, False, or None"):
        accelerate("kimi_linear", convolution="ours")
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
