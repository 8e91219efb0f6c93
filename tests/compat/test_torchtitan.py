"""torchtitan's own command trains a small model of ours on the CPU: one rank, two by FSDP2, two that share time; and goes on.

torchtitan wants an environment of its own (docs/torchtitan.md). There: python -m pytest tests/compat/test_torchtitan.py
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "cup",
    "shell",
    "moves",
    "left",
    "right",
    "under",
    "over",
    "stays",
    "where",
    "is",
    "now",
    "again",
    "not",
]
STEPS = 4

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan 0.3, see docs/torchtitan.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, a tokenizer that knows their words, and the configuration of a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from ckda.models import ComplexKDAConfig

    folder, draw = tmp_path_factory.mktemp("titan"), random.Random(0)
    for name in ("assets", "documents"):
        (folder / name).mkdir()
    vocabulary = {word: i for i, word in enumerate(["<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "assets/tokenizer.json"))
    (folder / "assets/tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 120))) for _ in range(60)]
    (folder / "documents/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
    ComplexKDAConfig(vocab_size=16, **sizes).save_pretrained(folder / "model")
    return folder


def train(folder: Path, out: str, ranks: int, *options: str) -> tuple[list[tuple[int, float, float]], str]:
    """(step, loss, gradient norm) of every update that rank 0 logs, and all that was said."""
    said = {
        "--model": "model",
        "--hf_assets_path": "assets",
        "--dataloader.dataset": "c4_test",
        "--dataloader.dataset_path": "documents",
        "--training.local_batch_size": "2",
        "--training.seq_len": "64",
        "--training.steps": str(STEPS),
        "--training.mixed_precision_param": "float32",
        "--lr_scheduler.warmup_steps": "1",
        "--metrics.log_freq": "1",
        "--debug.seed": "0",
        "--dump_folder": out,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--local-ranks-filter=0", "-m", "ckda.compat.torchtitan.cpu"]
    command += [
        "--module",
        "ckda.compat.torchtitan",
        "--config",
        "train",
        *(x for pair in said.items() for x in pair),
        *options,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    env |= {"HF_HOME": str(folder / f"cache-{out}")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", text)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found], text


def test_ranks_that_share_time_train_as_one_and_go_on(folder: Path) -> None:
    one, said = train(folder, "one", 1)
    assert [step for step, *_ in one] == list(range(1, STEPS + 1)), said
    keep = [
        "--checkpoint.enable",
        "--checkpoint.interval=2",
        "--checkpoint.last_save_in_hf",
        "--checkpoint.last_save_model_only",
    ]
    shared = ["--parallelism.context_parallel_degree=2", *keep]
    two, said = train(folder, "two", 2, *shared)
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=0, atol=2e-4, msg=said)

    from ckda.models import ComplexKDAForCausalLM

    last = folder / "two/checkpoint" / f"step-{STEPS}"
    shutil.copy(folder / "model/config.json", last)
    exported = ComplexKDAForCausalLM.from_pretrained(last)
    fresh = ComplexKDAForCausalLM(exported.config)
    assert not torch.equal(exported.model.norm.weight, fresh.model.norm.weight)  # it was trained, so it was loaded
    weights = {name: p.clone() for name, p in exported.named_parameters()}
    shutil.rmtree(last)
    again, said = train(folder, "two", 2, *shared)
    assert again == two[2:], said
    shutil.copy(folder / "model/config.json", last)
    for name, p in ComplexKDAForCausalLM.from_pretrained(last).named_parameters():
        assert torch.equal(p, weights[name]), name


def test_two_ranks_by_fsdp_with_recomputed_activations(folder: Path) -> None:
    rows, said = train(folder, "fsdp", 2, "activation-checkpoint:full")
    assert [step for step, *_ in rows] == list(range(1, STEPS + 1)), said
    assert rows[-1][1] < rows[0][1]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--parallelism.tensor_parallel_degree=2", "tensor_parallel_degree is above 1; this model has FSDP, HSDP and"),
        ("--parallelism.spmd_backend=full_dtensor", "it must be 'partial_dtensor' for this model"),
        ("--model=47M", "it may be SIZE:ARM as 47M:ckda, or a folder with a config.json"),
    ],
)
def test_what_it_does_not_do_is_a_sentence(folder: Path, option: str, sentence: str) -> None:
    rows, said = train(folder, "refused", 2, option)
    assert not rows
    assert sentence in said
