"""The paper's printed parameter totals (tab:ladder-configs, tab:model-configs) from the models themselves."""

import json
from pathlib import Path

import pytest
import torch

from ckda.cli import main
from ckda.layers.complex_kda import ComplexKDA
from ckda.lm.models import config_of
from ckda.models import ComplexKDAConfig, ComplexKDAForCausalLM, ladder

TOTALS = {(t.size, t.arm): t for t in ladder.totals()}
LADDER = ("47M", "124M", "302M", "588M", "983M", "1.7B", "1.3B")


def test_all_21_totals_of_the_ladder():
    """Seven sizes; KDA and CKDA, and their hybrids, have the same total."""
    distinct = {(size, TOTALS[size, arm].paper) for size in LADDER for arm in ladder.CONFIGS[size].paper}
    assert len(distinct) == 21
    for size in LADDER:
        assert list(ladder.CONFIGS[size].paper) == ["transformer", "kda", "ckda", "kda-hybrid", "ckda-hybrid"]
        for arm, paper in ladder.CONFIGS[size].paper.items():
            assert round(TOTALS[size, arm].parameters / 1e6, 2) == paper, (size, arm)


def test_the_four_totals_of_the_340m_table():
    """DeltaProduct's printed total is the count with one factor; with both there are about 375.5 M."""
    for arm, paper in {
        "transformer": 341.55,
        "gdn": 342.33,
        "deltaproduct1": 342.07,
        "kda": 344.87,
        "ckda": 344.87,
    }.items():
        assert round(TOTALS["340M", arm].parameters / 1e6, 2) == TOTALS["340M", arm].paper == paper, arm
    assert TOTALS["340M", "deltaproduct2"].parameters / 1e6 == pytest.approx(375.5, abs=0.05)
    stated = TOTALS["340M-65k", "ckda"]
    assert stated.paper is None
    assert stated.parameters - TOTALS["340M", "ckda"].parameters == 2 * (65536 - 50304) * 768


def test_the_formula_of_the_sizes():
    """What the totals are made of, by hand, for one hybrid."""
    d, L, H, dh, V, m = 896, 20, 14, 64, 50304, 3456
    mixer = 4 * d * H * dh + (d * dh + dh * H * dh) + (d * dh + dh * H * dh + H * dh) + d * H + H + H * dh + dh
    mixer += 3 * 4 * H * dh
    attention = 5 * d * H * dh
    expected = V * d + 15 * mixer + 5 * attention + L * (3 * d * m + 2 * d) + d
    assert TOTALS["302M", "ckda-hybrid"].parameters == expected


def test_arms_and_sizes_build():
    """Every arm at the smallest size; the choices that differ by column."""
    for arm in ladder.ARMS:
        assert ladder.num_parameters(ladder.build("47M", arm, num_hidden_layers=4)) > 0, arm
    for size in ladder.CONFIGS:  # SiLU is a matter of the size, never of the arm
        wanted = ["q", "k", "v"] if size.startswith("340M") else []
        for arm in ("kda", "ckda", "kda-hybrid", "ckda-hybrid"):
            assert ladder.build(size, arm).activate == wanted, (size, arm)
    assert ladder.build("47M", "ckda-silu").activate == ladder.build("47M", "kda-silu").activate == ["q", "k", "v"]
    assert ladder.build("1.3B", "ckda").head_dim == 128
    assert not ladder.build("1.3B", "ckda").tie_word_embeddings
    assert ladder.build("340M", "ckda-spread-both").beta_init == "spread"
    with pytest.raises(ValueError, match="size is '7B'"):
        ladder.build("7B", "ckda")
    with pytest.raises(ValueError, match="arm is 'mamba'"):
        ladder.build("47M", "mamba")


def test_the_table_says_all_of_it():
    text = ladder.parameter_table()
    assert "1.3B      ckda-hybrid            1362.26   1362.26" in text
    assert "count with one factor" in text


def test_our_own_rungs_are_alike_in_all_arms():
    for size, wanted in zip(ladder.OWN, (6e6, 12e6, 25e6, 47e6), strict=True):
        rung = ladder.CONFIGS[size]
        counted = [ladder.num_parameters(ladder.build(size, arm)) for arm in ladder.OWN_ARMS]
        assert rung.vocab_size == 16384
        assert all(abs(total / wanted - 1) < 0.08 for total in counted), (size, counted)
        assert max(counted) / min(counted) < 1.025, (size, counted)
        assert ladder.build(size, "ckda").residual_init == ladder.build(size, "transformer").residual_init == "scaled"


def test_residual_outputs_and_mixers_start_as_the_configuration_says():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_heads": 2,
        "head_dim": 32,
    }
    torch.manual_seed(0)
    for arm in ("ckda", "transformer-qknorm"):
        flat = ComplexKDAForCausalLM(ComplexKDAConfig(**sizes | ladder.ARMS[arm]))
        scaled = ComplexKDAForCausalLM(
            ComplexKDAConfig(**sizes | ladder.ARMS[arm], residual_init="scaled", mixer_init="torch")
        )
        for model, std in ((flat, 0.02), (scaled, 0.02 / 4)):
            block = model.model.layers[3]
            assert abs(float(block.mlp.down_proj.weight.detach().std()) / std - 1) < 0.05
            assert abs(float(block.mlp.up_proj.weight.detach().std()) / 0.02 - 1) < 0.05
            if arm != "ckda":
                assert abs(float(block.mixer.o_proj.weight.detach().std()) / std - 1) < 0.05
    with_torch = ComplexKDAForCausalLM(ComplexKDAConfig(**sizes, mixer_init="torch")).model.layers[0].mixer
    assert abs(float(with_torch.q_proj.weight.detach().std()) * (3 * 64) ** 0.5 - 1) < 0.05


def test_beta_may_start_at_a_half():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_heads": 2,
        "head_dim": 32,
    }
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    for beta_init, mean in (("standard", 1.0), ("half", 0.5)):
        mixer = ComplexKDAForCausalLM(ComplexKDAConfig(**sizes, beta_init=beta_init)).model.layers[0].mixer
        beta = mixer.transitions(x).beta
        assert abs(float(beta.detach().mean()) - mean) < 0.05
    with pytest.raises(ValueError, match="beta_init is 'half'; that needs beta_range=2"):
        ComplexKDA(32, beta_range=1, beta_init="half")


def test_the_toy_is_among_the_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a laptop user looks for in `ckda lm params`."""
    assert main(["lm", "params", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "parameters in millions"
    assert lines[2].split()[:2] == ["tiny", "transformer"]
    rows = json.loads((tmp_path / "params.json").read_text())["totals"]
    toy = next(row for row in rows if (row["size"], row["arm"]) == ("tiny", "ckda"))
    assert toy["parameters"] == sum(p.numel() for p in ComplexKDAForCausalLM(config_of("tiny:ckda")).parameters())
