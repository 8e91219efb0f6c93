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


def test_its_code_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["pool"].abs().sum((1, 2, 3)).nonzero().flatten().tolist() == [0, 3, 5]
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
    before, without, signed = (found["scores"][arm]["32"] for arm in found["scores"])
    for row in (before, without, signed):
        assert ", ".join(f"{value:.2f}" for value in row) in TEXT
    assert max(found["negative_gates"]) > 0.02
