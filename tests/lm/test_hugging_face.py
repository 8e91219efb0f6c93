"""A trained model under transformers as a stranger uses it: Auto classes, pipeline, generate that stops, Trainer, lm-eval."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckda.lm.tiny import tiny_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("hf")) / "model"


def elsewhere(*words: str, **environment: str) -> str:
    """What another process prints; it is offline and knows the package by its path alone."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_it_loads_by_trust(model: Path, tmp_path: Path) -> None:
    """No word about ckda but `trust_remote_code=True`; saving again carries no copy of this package."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A, pipeline\n"
        f"m = A.from_pretrained({str(model)!r}, trust_remote_code=True)\n"
        f"m.save_pretrained({str(tmp_path / 'again')!r})\n"
        f"p = pipeline('text-generation', {str(model)!r}, trust_remote_code=True, device='cpu')\n"
        "print(type(m).__module__, len(p('def ', max_new_tokens=3)[0]['generated_text']) > 4)\n"
    )
    out = elsewhere("-c", code, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert out.split() == ["ckda.models.lm", "True"]
    assert {p.name for p in (tmp_path / "again").iterdir() if p.suffix == ".py"} == {"modeling_ckda.py"}


def test_the_end_token_is_known_and_ends_generation(model: Path) -> None:
    tokenizer, whole = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        stored = json.loads((model / name).read_text())
        assert [stored[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id")] == [end] * 3, name
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert "<|endoftext|>" in tokenizer.all_special_tokens
    assert tokenizer.decode([end, 70], skip_special_tokens=True) == tokenizer.decode([70])
    ids = tokenizer(["def x", "a longer prompt"], padding=True, return_tensors="pt")
    assert ids["attention_mask"][0, 0] == 0  # on the left
    with torch.no_grad():
        whole.lm_head.weight[end] = 50 * whole.model.norm.weight.new_ones(whole.config.hidden_size)
        whole.model.norm.weight.fill_(1)
        whole.lm_head.weight[end] *= torch.sign(whole.model(ids["input_ids"]).last_hidden_state[0, -1])
        out = whole.generate(**ids, max_new_tokens=20, do_sample=False)
    assert (out[0, ids["input_ids"].shape[1] :] == end).all()  # after its end a row is padded


def test_transformers_trainer_trains_it(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(12) + i, "labels": torch.arange(12) + i} for i in range(4)]
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2, "save_steps": 2}
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model), TrainingArguments(str(tmp_path), **options), train_dataset=rows
    )
    assert trainer.train().global_step == 2
    assert (tmp_path / "checkpoint-2" / "modeling_ckda.py").is_file()


def test_lm_eval_runs_it_by_name(model: Path, tmp_path: Path) -> None:
    """lm_eval --model hf on a task of this machine, offline."""
    pytest.importorskip("lm_eval")
    rows = [{"text": f"def f{i}(", "choices": ["self", "x"], "gold": i % 2} for i in range(4)]
    (tmp_path / "toy.json").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": "toy_code", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "toy.json")}}, "doc_to_text": "{{text}}"}
    task |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "toy.yaml").write_text(json.dumps(task))  # JSON is YAML
    chosen = ["--model_args", f"pretrained={model},trust_remote_code=True", "--tasks", "toy_code"]
    words = ["--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "2"]
    out = elsewhere("-m", "lm_eval", "--model", "hf", *chosen, *words, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert "toy_code" in out
    assert "acc" in out
