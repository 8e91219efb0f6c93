"""What the README shows is true: its code runs, its files exist."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_code_runs():
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for block in blocks:
        names: dict = {}
        exec(block, names)
        assert names["o"].shape == (2, 100, 4, 64)
        assert names["q"].grad.abs().sum() > 0
        assert names["y1"].shape == (2, 256)


def test_its_files_exist():
    named = set(re.findall(r"\((results/[^)]+)\)|(docs/\w+\.md)|^(ckda/\S+)", README, flags=re.M))
    paths = [path for group in named for path in group if path]
    assert len(paths) > 8
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing
