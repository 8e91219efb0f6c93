"""Counting negative gates, learning rates above 1 and rotating transitions (fig:signed_kda_interpretability_llm, its hybrid
twin fig:signed_kda_interpretability_llm_hybrid and fig:final_layer_stats_llm), on layers whose answer is known."""

import json
from pathlib import Path

import pytest
import torch

from ckda import transition
from ckda.cli import main
from ckda.compat.convert import save_fla
from ckda.lm.inspect import Inspection, gate_use, inspect_figure, rotates
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}


def make(**options) -> ComplexKDAForCausalLM:
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, "initializer_range": 0.3} | SIZES | options
    return ComplexKDAForCausalLM(ComplexKDAConfig(**settings))


def words() -> list[torch.Tensor]:
    return [torch.randint(31, (1, 40)) for _ in range(2)]


def test_a_layer_set_by_hand():
    """Gates of known sign, beta near 2 in one head and near 0 in the other: known shares, and the rotation that follows."""
    model = make(beta_init="spread", num_hidden_layers=1)
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.f_proj[1].weight.zero_()
        mixer.dt_bias.fill_(40.0)
        mixer.dt_bias[[0, 1, 8]] = -40.0  # two of head 0's eight channels, one of head 1's
        mixer.b_proj.weight.zero_()
        mixer.b_proj.bias.copy_(torch.tensor([12.0, -12.0]))
    (use,) = gate_use(model, words(), sample=10)
    assert use.negative_gates == pytest.approx(3 / 16)
    assert use.beta_above_1 == 0.5
    assert use.complex == 0.5  # head 0: gates of both signs and beta = 2; head 1: nearly diagonal
    assert use.transitions_decomposed == 2 * 10 * 2
    assert use.beta_quantiles[0] < 0.01
    assert use.beta_quantiles[-1] > 1.99


@pytest.mark.parametrize("mixer", ["kda", "kda-beta2", "kda-signed", "gdn", "deltanet-beta2"])
def test_without_both_ranges_nothing_rotates(mixer):
    """thm:complex_eigenvalues: it takes gates of both signs and beta above 1."""
    spread = "spread" if mixer == "kda-signed" else "standard"
    for use in gate_use(make(mixer=mixer, gate_init=spread), words(), sample=12):
        assert use.complex == 0
        assert (use.negative_gates > 0) == (mixer == "kda-signed")
        assert (use.beta_above_1 > 0) == mixer.endswith("beta2")


def test_with_both_ranges_or_two_factors_something_rotates():
    assert all(use.complex > 0.1 for use in gate_use(make(gate_init="spread"), words(), sample=12))
    assert all(use.complex > 0.1 for use in gate_use(make(mixer="deltaproduct2"), words(), sample=12))
    assert len(gate_use(make(mixer="gdn2"), words(), sample=4)) == 2


def test_the_criterion_is_the_papers_for_unit_gates():
    """Where |alpha| = 1 a pair is non-real exactly where prop:CKDA-canonical says so."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    alpha = torch.where(torch.rand(300, 6, generator=generator) < 0.4, -1.0, 1.0).double()
    beta = 2 * torch.rand(300, generator=generator, dtype=torch.float64)
    form = transition.sign_magnitude(alpha, k, beta)
    assert torch.equal(rotates(transition.dense(alpha, k, beta)), form.rotates)
    assert 0.1 < form.rotates.double().mean() < 0.9


def test_attention_has_nothing_to_count():
    with pytest.raises(ValueError, match="no layer with a state"):
        gate_use(make(mixer="attention"), words())


def test_the_hooks_are_gone_and_the_mode_is_kept():
    model = make(hybrid="gated-attention", num_hidden_layers=4).train()
    assert [use.layer for use in gate_use(model, words(), sample=2)] == [0, 1, 2]
    assert model.training
    assert not model.model.layers[0].mixer._forward_pre_hooks


@pytest.fixture
def text(tmp_path: Path) -> tuple[Path, Path]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {word: i for i, word in enumerate(["the", "cat", "sat", "on", "a", "mat", "and", "saw", "no", "dog"])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sat on a mat and saw no dog " * 20)
    return tmp_path / "text.txt", tmp_path / "tokenizer.json"


def test_the_command_on_model_folders(tmp_path: Path, text, capsys):
    """Two checkpoints of ours and one in FLA's layout, over a text: JSON, figure, table."""
    first, second = tmp_path / "step-100", tmp_path / "step-200"
    make(mixer="ckda").save_pretrained(first)
    make(mixer="ckda", gate_init="spread").save_pretrained(second)
    save_fla(make(gate_init="spread"), tmp_path / "theirs")
    options = [
        "--text",
        str(text[0]),
        "--tokenizer",
        str(text[1]),
        "--length",
        "48",
        "--sequences",
        "2",
        "--sample",
        "6",
    ]
    out = tmp_path / "out"
    assert main(["inspect", "lm", str(first), str(second), *options, "--out", str(out), "--device", "cpu"]) == 0
    result = json.loads((out / "inspect-lm.json").read_text())
    assert (out / "inspect-lm.png").stat().st_size > 10_000
    assert [c["step"] for c in result["checkpoints"]] == [100, 200]
    assert (result["sequences"], result["length"]) == (2, 48)
    standard, spread = (c["mean"]["negative_gates"] for c in result["checkpoints"])
    assert standard < 0.1 < 0.3 < spread
    assert "decomposed" in capsys.readouterr().out
    again = ["inspect", "lm", str(tmp_path / "theirs"), *options, "--out", str(out), "--json", "--device", "cpu"]
    assert main(again) == 0
    theirs = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert theirs["layers"] == result["checkpoints"][1]["layers"]


def test_the_command_refuses_by_name(tmp_path: Path, text, capsys):
    model = tmp_path / "model"
    other = tmp_path / "other"
    make().save_pretrained(model)
    make(num_hidden_layers=1).save_pretrained(other)
    for arguments, names in (
        ([], "there is no PATH"),
        ([str(tmp_path / "absent"), "--text", str(text[0])], "does not exist"),
        ([str(model)], "exactly one of --tokens and --text"),
        ([str(model), "--text", str(tmp_path / "no.txt"), "--tokenizer", str(text[1])], "no.txt"),
        ([str(model), str(other), "--text", str(text[0]), "--tokenizer", str(text[1])], "has other layers"),
    ):
        assert main(["inspect", "lm", *arguments, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        assert names in capsys.readouterr().err


def test_smoke(tmp_path: Path):
    assert main(["inspect", "lm", "--smoke", "--json", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert len(inspect_figure(Inspection.load(tmp_path / "inspect-lm.json")).axes) == 5


def test_the_command_on_a_run_with_prepared_tokens(tmp_path: Path):
    """All checkpoints of a training run, in the order of their steps, on the held-out tokens."""
    from ckda.lm import checkpoint
    from ckda.lm.parallel import World
    from ckda.lm.prepare import Preparation, prepare

    lines = [f"line {i} of a tale that ends where it began, {'and again ' * (i % 7)}\n" for i in range(200)]
    (tmp_path / "tale.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare(
        [str(tmp_path / "tale.jsonl")], tmp_path / "tokens", Preparation(tokenizer="train:300", held_out=0.2, workers=1)
    )
    alone, run = World(0, 1, torch.device("cpu")), tmp_path / "run"
    for step, gate_init in ((5, "standard"), (40, "spread")):
        model = make(vocab_size=512, gate_init=gate_init)
        tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
        checkpoint.save(run / "checkpoints", step, tensors, {"config": model.config.to_dict()}, alone, keep=0)
    options = ["--tokens", str(tmp_path / "tokens"), "--length", "64", "--sequences", "2", "--sample", "4"]
    assert main(["inspect", "lm", str(run), *options, "--device", "cpu", "--json", "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "inspect-lm.json").read_text())
    assert [c["step"] for c in result["checkpoints"]] == [5, 40]
    standard, spread = (c["mean"]["negative_gates"] for c in result["checkpoints"])
    assert standard < 0.1 < 0.3 < spread
    assert (result["sequences"], result["length"]) == (2, 64)
