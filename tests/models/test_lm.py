"""The language models: one pass, cached, padded, packed, saved, beamed and checkpointed runs must agree. Tiny, float32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ComplexKDAModel, ModelCache
from ckda.models.mixers import ATTENTION, RECURRENT

V = 29
#: every mixer alone, the paper's hybrid, and a pattern by hand with a window
MODELS: dict[str, dict] = {
    **{name: {"mixer": name} for name in (*RECURRENT, *ATTENTION)},
    "qk-norm": {"mixer": "attention", "qk_norm": True},
    "no-silu": {"activate": [], "gate_init": "spread", "beta_init": "spread"},
    "no-convolution": {"conv_size": 0, "output_gate": "linear", "num_heads": 1, "num_v_heads": 2, "head_v_dim": 4},
    "hybrid": {"hybrid": "gated-attention", "num_hidden_layers": 4},
    "pattern": {"layer_mixers": ["sliding-attention", "gdn", "ckda"], "num_hidden_layers": 3},
}
#: those that differ in more than a range or a number of factors
DIFFERENT = [
    name
    for name in MODELS
    if name not in ("kda-beta2", "kda-signed", "kda-softplus-beta2", "gdn2-erase2", "ckda-separate", "deltanet-beta2")
    and name not in ("gdn-beta2", "deltaproduct1", "deltaproduct2-beta1", "deltaproduct3", "gated-deltaproduct3")
]


def make(name: str = "ckda", **options) -> ComplexKDAForCausalLM:
    """A model whose weights are large enough to tell positions and tokens apart."""
    settings = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "sliding_window": 12,
        "initializer_range": 0.3,
        "loss_chunk": 5,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    return ComplexKDAForCausalLM(ComplexKDAConfig(**settings | MODELS[name] | options)).eval()


def words(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model: ComplexKDAForCausalLM, ids: Tensor, **options) -> Tensor:
    return model(ids, use_cache=False, **options).logits


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


# Generation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_cached_greedy_generation_is_the_full_pass(name):
    """200 tokens: every one is the argmax of the pass over all of them at once, and so are the logits it was chosen by."""
    model, prompt = make(name), words(1, 9)
    out = model.generate(prompt, max_new_tokens=200, do_sample=False, return_dict_in_generate=True, output_logits=True)
    full = logits(model, out.sequences)[:, 8:-1]
    assert out.sequences.shape == (1, 209)
    assert torch.equal(full.argmax(-1), out.sequences[:, 9:])
    close(torch.stack(out.logits, 1), full)
    assert len(set(out.sequences[0, 9:].tolist())) > 3, "a constant continuation would show nothing"


@pytest.mark.parametrize("name", DIFFERENT)
def test_left_padding_changes_nothing(name):
    """Logits and 20 tokens of generation, for prompts of different lengths in one batch against each alone."""
    model, ids, lengths = make(name), words(3, 14), (14, 5, 1)
    mask = torch.stack([torch.arange(14) >= 14 - n for n in lengths]).long()
    padded = ids.clone()
    padded[mask == 0] = 7
    together = logits(model, padded, attention_mask=mask)
    generated = model.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for i, n in enumerate(lengths):
        alone = ids[i : i + 1, 14 - n :]
        close(together[i, 14 - n :], logits(model, alone)[0])
        assert torch.equal(generated[i, 14:], model.generate(alone, max_new_tokens=20, do_sample=False)[0, n:])


@pytest.mark.parametrize("name", ["ckda", "attention", "hybrid", "pattern", "deltaproduct2"])
@pytest.mark.parametrize("grad", [True, False])
def test_right_padding_changes_nothing(name, grad):
    """As a tokenizer pads by default: a plain call has the logits of each sequence alone, and no cache that would be wrong."""
    model, ids, lengths = make(name), words(3, 14), (14, 5, 1)
    mask = torch.stack([torch.arange(14) < n for n in lengths]).long()
    padded = torch.where(mask == 1, ids, 7)
    with torch.set_grad_enabled(grad):
        together = model(input_ids=padded, attention_mask=mask)
        assert together.past_key_values is None
        assert model(input_ids=padded, attention_mask=torch.ones_like(mask)).past_key_values is not None
        for more in ({"use_cache": True}, {"past_key_values": ModelCache(model.config)}):
            with pytest.raises(
                ValueError, match=r"on the left \(a tokenizer's padding_side\), or pass use_cache=False"
            ):
                model(input_ids=padded, attention_mask=mask, **more)
    for i, n in enumerate(lengths):
        close(together.logits[i, :n], logits(model, ids[i : i + 1, :n])[0])


def test_generation_goes_on_from_a_cache_and_from_embeddings():
    model, ids = make("hybrid"), words(1, 9)
    options = {"do_sample": False, "max_new_tokens": 5}
    cache = ModelCache(model.config)
    first = model.generate(ids, past_key_values=cache, **options)
    whole = model.generate(ids, do_sample=False, max_new_tokens=10)
    assert torch.equal(model.generate(first, past_key_values=cache, **options), whole)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), first[:, 9:])
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **options), first)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids, assistant_model=model, **options)


@pytest.mark.parametrize("name", ["ckda", "hybrid", "pattern", "deltaproduct2"])
def test_a_prompt_in_pieces_is_the_prompt(name):
    model, ids = make(name), words(2, 40)
    cache = ModelCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=False).logits for part in ids.split([17, 1, 20, 2], 1)]
    close(torch.cat(parts, 1), logits(model, ids))
    assert cache.get_seq_length() == 40
    assert cache.batch_size in (2, -1)


@pytest.mark.parametrize("name", ["ckda", "gdn2", "hybrid", "pattern"])
def test_beams_reorder_the_cache(name):
    """Beam search with a cache finds what beam search by full passes finds, left padding included."""
    model, ids = make(name), words(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, use_cache=True, **options), model.generate(ids, use_cache=False, **options))


def test_the_cache_of_a_recurrent_model_does_not_grow():
    sizes = []
    for mixer in ("ckda", "attention", "sliding-attention"):
        model, cache = make(mixer), ModelCache(make(mixer).config)
        with torch.no_grad():
            model(words(1, 30), past_key_values=cache)
            early = cache.num_bytes()
            model(words(1, 30), past_key_values=cache)
        sizes.append(cache.num_bytes() / early)
    assert sizes == [1, 2, 1]


def test_the_cache_is_selected_repeated_and_reset():
    model, ids = make("hybrid"), words(3, 8)
    cache = ModelCache(model.config)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rest = model(ids[[2, 2, 0, 0], 6:], past_key_values=cache).logits
    close(rest, logits(model, ids)[[2, 2, 0, 0], 6:])
    cache.reset()
    assert cache.layers[0].carried is None
    with pytest.raises(NotImplementedError, match="turned back"):
        cache.layers[0].crop(-1)


# Packed sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
def test_packed_is_separate(name):
    """Logits and the loss's gradient of four packed sequences, one empty, one of one token, against each alone."""
    model, ids = make(name), words(1, 31)
    cu = torch.tensor([0, 13, 13, 14, 31])
    members = [ids[:, a:b] for a, b in ((0, 13), (13, 14), (14, 31))]
    close(logits(model, ids, cu_seqlens=cu), torch.cat([logits(model, part) for part in members], 1))
    model.train()
    packed = torch.autograd.grad(model(ids, labels=ids, cu_seqlens=cu).loss, list(model.parameters()))
    total = sum(model(part, labels=part, num_items_in_batch=12 + 0 + 16).loss for part in members)
    for a, b in zip(packed, torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# Training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ckda", "hybrid", "pattern"])
def test_gradient_checkpointing_gives_equal_gradients(name):
    model, ids = make(name).train(), words(2, 21)
    plain = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    calls = []
    handle = model.model.layers[0].mixer_norm.register_forward_hook(lambda *_: calls.append(1))
    again = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    handle.remove()
    assert len(calls) == 2, "the block was not run again"
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_loss_is_that_of_the_logits():
    model, ids = make().train(), words(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    out = model(ids, labels=labels)
    assert out.logits is None
    assert out.past_key_values is None
    z = logits(model, ids)
    expected = torch.nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    model.eval()
    evaluated = model(ids, labels=labels, logits_to_keep=1)
    assert evaluated.logits.shape == (2, 1, V)
    torch.testing.assert_close(evaluated.loss, expected)


@pytest.mark.parametrize("name", ["ckda", "hybrid"])
def test_the_model_learns(name):
    """A few steps of AdamW bring the loss on one batch far below chance."""
    model, ids = make(name, initializer_range=0.02).train(), words(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.0


def test_every_parameter_gets_a_gradient():
    for name in ("ckda", "gdn2", "deltaproduct2", "hybrid", "qk-norm"):
        model, ids = make(name).train(), words(2, 12)
        model(ids, labels=ids).loss.backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.slow
def test_training_is_one_graph():
    """Without a break, so nothing is read back from the device: packed and plain batches, loss and gradients included."""
    model, ids = make("hybrid", hybrid_every=2, num_hidden_layers=2).train(), words(1, 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for options in ({}, {"cu_seqlens": torch.tensor([0, 8, 20])}):
        expected = torch.autograd.grad(model(ids, labels=ids, **options).loss, list(model.parameters()))
        got = torch.autograd.grad(compiled(ids, labels=ids, **options).loss, list(model.parameters()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_trainer_of_transformers(tmp_path: Path):
    """Trains with gradient checkpointing and padding, saves, and evaluates to a loss."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    row = {"input_ids": words(12), "labels": words(12), "attention_mask": (torch.arange(12) > 2).long()}
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "gradient_checkpointing": True}
    options = TrainingArguments(str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=2, **settings)
    trainer = Trainer(make("hybrid"), options, train_dataset=[row] * 4)
    assert trainer.train().global_step == 2
    assert 0 < trainer.evaluate([row] * 2)["eval_loss"] < 20
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


# Files and initialisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path: Path, tied):
    model = make("hybrid", tie_word_embeddings=tied, beta_init="spread", gate_init="spread")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "complex_kda"
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is ComplexKDAForCausalLM
    assert again.config.mixers() == model.config.mixers()
    assert set(again.state_dict()) == set(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    ids = words(2, 9)
    assert torch.equal(logits(again, ids), logits(model, ids))
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is ComplexKDAModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is ComplexKDAConfig


def test_half_precision_keeps_the_gates_in_float32(tmp_path: Path):
    make().save_pretrained(tmp_path)
    model = ComplexKDAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer = model.model.layers[0].mixer
    assert mixer.q_proj.weight.dtype == torch.bfloat16
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32


@pytest.mark.parametrize("part", ["q_proj.weight", "dt_bias", "b_proj.bias"])
def test_a_checkpoint_without_one_parameter_keeps_the_others(tmp_path: Path, part):
    """What is missing is drawn anew, as at the start; what was loaded is not."""
    from safetensors.torch import load_file, save_file

    model = make(gate_init="spread", beta_init="spread")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = f"model.layers.0.mixer.{part}"
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = ComplexKDAForCausalLM.from_pretrained(tmp_path).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, again[key]) == (key != missing), key
    assert again[missing].isfinite().all()
    assert again[missing].abs().max() < 3 * model.state_dict()[missing].abs().max()


def test_initialisation():
    """app:initialization: matrices at 0.02; spread gates half negative; beta's two modes; the convolution's own start."""
    options = {"hidden_size": 256, "num_heads": 8, "head_dim": 32, "initializer_range": 0.02}
    model = make(gate_init="spread", beta_init="spread", **options)
    mixer = model.requires_grad_(False).model.layers[0].mixer
    assert mixer.q_proj.weight.std() == pytest.approx(0.02, rel=0.02)
    assert mixer.f_proj[1].weight.std() == pytest.approx(0.002, rel=0.05)
    assert model.model.embed_tokens.weight.std() == pytest.approx(0.02, rel=0.05)
    assert 0.35 < (mixer.dt_bias < 0).float().mean() < 0.65
    assert sorted((mixer.b_proj.bias > 0).tolist()) == [False] * 4 + [True] * 4
    assert 0.4 < mixer.convolutions["q"].weight.abs().max() <= 0.5
    assert make(conv_init=0.02, **options).model.layers[0].mixer.convolutions["q"].weight.std() < 0.03
    standard = make(**options).model.layers[0].mixer
    assert (standard.dt_bias > 0).all()
    assert standard.b_proj.bias is None


def test_the_vocabulary_grows():
    """Rows are added to embedding and head; the old tokens' logits stay."""
    for tied in (True, False):
        model, ids = make(tie_word_embeddings=tied), words(1, 7)
        before = logits(model, ids)
        model.resize_token_embeddings(V + 3)
        close(logits(model, ids)[..., :V], before)
        assert model.config.vocab_size == V + 3
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_positions():
    """Rotary positions count from 0 where none are given, and only differences matter."""
    model, ids = make("attention"), words(2, 11)
    plain, position = logits(model, ids), torch.arange(11).expand(2, -1)
    assert torch.equal(logits(model, ids, position_ids=position), plain)
    close(logits(model, ids, position_ids=position + 5), plain)
    assert (logits(model, ids, position_ids=position * 2) - plain).abs().max() > 0.1


def test_hidden_states():
    model, ids = make(), words(1, 7)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    as_tuple = model(ids, return_dict=False)
    assert torch.equal(as_tuple[0], out.logits)


def test_patterns():
    config = ComplexKDAConfig(num_hidden_layers=8, hybrid="gated-attention")
    assert [i for i, mixer in enumerate(config.mixers()) if mixer == "gated-attention"] == [3, 7]
    config = ComplexKDAConfig(num_hidden_layers=4, hybrid="sliding-attention", hybrid_every=2)
    assert config.mixers() == ["ckda", "sliding-attention"] * 2
    assert ComplexKDAConfig(rope_theta=500_000).rope_theta == 500_000


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mixer": "mamba"}, "a mixer is 'mamba'"),
        ({"hybrid": "gru"}, "a mixer is 'gru'"),
        ({"layer_mixers": ["ckda"]}, "layer_mixers has 1"),
        ({"activate": ["o"]}, "activate is"),
        ({"gate_init": "wide"}, "gate_init is 'wide'"),
        ({"output_gate": "full"}, "output_gate is 'full'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"loss_chunk": 0}, "loss_chunk is 0"),
    ],
)
def test_wrong_configurations_are_refused(options, names):
    with pytest.raises(Exception, match=names):
        ComplexKDAConfig(**options)


def test_wrong_calls_are_refused():
    model, ids = make("hybrid"), words(2, 6)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(TypeError, match="unexpected argument 'cu_seqlen'"):
        model(ids, cu_seqlen=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="B must be 1"):
        model(ids, cu_seqlens=torch.tensor([0, 6]), use_cache=False)
    with pytest.raises(ValueError, match="packed sequences are for one pass"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 6]), use_cache=True)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    trained = make("hybrid").train()
    trained.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="given with gradient checkpointing"):
        trained(ids, past_key_values=ModelCache(trained.config))
    with pytest.raises(ValueError, match="shape of attention_mask"):
        model(ids, attention_mask=torch.ones(2, 5))
    right = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad(), pytest.raises(ValueError, match="it must be on the left"):
        model(ids, attention_mask=right, use_cache=True)
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    close(logits(model, ids, attention_mask=right)[0, :4], logits(model, ids[:1, :4])[0])  # harmless in one pass


@pytest.mark.slow
def test_small_models_need_no_transformers():
    code = "import sys, ckda.experiments.tracking.model, ckda.experiments.audio.model; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ckda", "attention", "gated-attention", "sliding-attention", "hybrid"])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_half_precision_on_a_gpu(name, how):
    """Training in both ways of bfloat16: near float32's loss, and packed equals separate through the fused attention."""
    options = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "sliding_window": 40, "initializer_range": 0.1}
    model, ids = make(name, **options).cuda().train(), words(1, 200).cuda()
    cu = torch.tensor([0, 70, 70, 71, 200], device="cuda", dtype=torch.int32)
    exact = model(ids, labels=ids, cu_seqlens=cu).loss
    if how == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        packed = model(ids, labels=ids, cu_seqlens=cu)
        parts = [
            model(ids[:, a:b], labels=ids[:, a:b], num_items_in_batch=69 + 128).loss for a, b in ((0, 70), (71, 200))
        ]
    packed.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(packed.loss.float(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(sum(parts).float(), packed.loss.float(), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ckda", "hybrid", "pattern"])
def test_generation_on_a_gpu(name):
    """float32, the backend that "auto" takes there: cached generation against the full pass, left padding included."""
    model, ids = make(name).cuda(), words(2, 9).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=60, do_sample=False)
    for row, start in ((0, 3), (1, 0)):
        full = logits(model, out[row : row + 1, start:])
        assert torch.equal(full[0, 8 - start : -1].argmax(-1), out[row, 9:])


@pytest.mark.gpu
def test_compiled_blocks_on_a_gpu():
    """Inductor, autocast and packed sequences: as near to the loss and gradients in float32 as without it, by a factor of two."""
    options = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "hybrid_every": 2, "num_hidden_layers": 2}
    model, ids = make("hybrid", initializer_range=0.1, **options).cuda().train(), words(1, 200).cuda()
    cu = torch.tensor([0, 70, 200], device="cuda", dtype=torch.int32)

    def gradients(half: bool = True) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(ids, labels=ids, cu_seqlens=cu).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    exact, eager = gradients(half=False), gradients()
    for block in model.model.layers:
        block.compile(fullgraph=True)
    for a, b, x in zip(gradients(), eager, exact, strict=True):
        assert (b - x).norm() <= 0.3 * x.norm() + 1e-5
        assert (a - x).norm() <= 2 * (b - x).norm() + 0.02 * x.norm() + 1e-5
