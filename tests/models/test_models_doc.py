"""docs/models.md is true: its code runs in order, and it names every mixer."""

import re
from pathlib import Path

import torch

from ckda.models.mixers import ATTENTION, RECURRENT

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_its_code_runs(capsys):
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["text"].shape == names["best"].shape == (2, 32)
    assert "1362.26" in capsys.readouterr().out


def test_it_names_every_mixer():
    lists = PAGE.partition("Mixers with a state:")[2].partition("## ")[0]
    assert set(re.findall(r"`([\w-]+)`", lists)) == {*RECURRENT, *ATTENTION}
