"""Weights to and from flash-linear-attention's KDA layout: names, shapes, logits.

tests/data/fla_kda holds checkpoints that FLA 0.6.0's own model class wrote, with the logits that it computed on a CPU
(tests/models/fla_on_cpu.py); where FLA is installed, its model is run anew.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckda.compat.convert import config_from_fla, config_to_fla, from_fla, load_fla, save_fla, to_fla
from ckda.models import ComplexKDAForCausalLM, ladder

DATA = Path(__file__).parents[1] / "data" / "fla_kda"
NAMES = ("bounded", "softplus", "hybrid")


def frozen(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the checkpoint out in a folder as FLA would save it; its test's tokens and logits."""
    tensors = load_file(DATA / f"{name}.safetensors")
    ids, logits = tensors.pop("test.ids"), tensors.pop("test.logits")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((DATA / f"{name}.json").read_text())
    return ids, logits


@pytest.mark.parametrize("name", NAMES)
def test_equal_logits_with_flas_own_model(name, tmp_path: Path):
    ids, expected = frozen(name, tmp_path)
    model = load_fla(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-4)
    assert expected.std() > 0.5, "logits that hardly differ would show nothing"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name, tmp_path: Path):
    frozen(name, tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    again = to_fla(from_fla(theirs))
    assert set(again) == set(theirs)
    assert all(torch.equal(again[key], theirs[key]) for key in theirs)
    model = load_fla(tmp_path)
    saved = load_file(save_fla(model, tmp_path / "again") / "model.safetensors")
    for key in saved:
        assert torch.equal(saved[key], theirs[key]), key
    assert set(theirs) - set(saved) <= {"lm_head.weight"}
    assert load_fla(tmp_path / "again").config.to_dict() == model.config.to_dict() | {
        "layer_mixers": model.config.mixers()
    }


def test_the_frozen_table_of_names_and_shapes():
    """Of FLA's model at 1.3B: what our model of that size is called there."""
    table = json.loads((DATA / "names.json").read_text())
    config = ladder.build("1.3B", "ckda", num_hidden_layers=2)
    with torch.device("meta"):
        model = ComplexKDAForCausalLM(config)
    ours = {name: list(tensor.shape) for name, tensor in to_fla(model.state_dict()).items()}
    assert ours == table


def test_what_fla_cannot_say_survives(tmp_path: Path):
    """Signed gates, removed SiLUs, a bias of b_proj and gated attention."""
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "intermediate_size": 24, "vocab_size": 19}
    config = ladder.build("47M", "ckda-hybrid", num_hidden_layers=4, activate=["q"], beta_init="spread", **options)
    model = ComplexKDAForCausalLM(config).eval()
    again = load_fla(save_fla(model, tmp_path))
    ids = torch.randint(19, (1, 9))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.mixers() == model.config.mixers()
    assert config_to_fla(config)["allow_neg_eigval"]
    # a checkpoint of the authors': FLA's keys alone, the mixer named by whoever loads it
    written = json.loads((tmp_path / "config.json").read_text())
    del written["ckda"], written["attn"]
    named = config_from_fla(written, mixer="ckda", activate=["q"], layer_mixers=config.mixers())
    assert (named.mixer, named.activate) == ("ckda", ["q"])


def test_foreign_and_damaged_folders_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_fla(tmp_path)
    frozen("bounded", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not hold the weights"):
        load_fla(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read"):
        load_fla(tmp_path)
    for change, names in (
        ({"model_type": "gla"}, "model_type is 'gla'"),
        ({"lower_bound": -3.0}, "lower_bound is -3"),
        ({"attnres_block_size": 4}, "attnres_block_size is 4"),
        ({"attn": {"layers": [0], "num_heads": 1}}, "attn has 1 heads of 16"),
    ):
        theirs = json.loads((DATA / "bounded.json").read_text()) | change
        with pytest.raises(ValueError, match=names):
            config_from_fla(theirs)
    with pytest.raises(ValueError, match="holds one range setting of KDA"):
        config_to_fla(ladder.build("47M", "gdn"))
    with pytest.raises(ValueError, match="output_gate is 'linear'"):
        config_to_fla(ladder.build("340M", "ckda"))


def _has_fla_models() -> bool:
    return importlib.util.find_spec("fla") is not None and importlib.util.find_spec("fla.models") is not None


@pytest.mark.skipif(not _has_fla_models(), reason="flash-linear-attention's model classes are not installed")
@pytest.mark.parametrize("name", NAMES)
def test_flas_model_run_anew(name, tmp_path: Path):
    sys.path.insert(0, str(Path(__file__).parent))
    from fla_on_cpu import build

    theirs = build(name)
    save_file({k: v.contiguous().clone() for k, v in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(theirs.config.to_json_string())
    ids = torch.randint(19, (3, 40))
    with torch.no_grad():
        expected, got = theirs(ids, use_cache=False).logits, load_fla(tmp_path)(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
