"""The predicted horizon: exact models have no closure error, a known error has its known size, and the command."""

import json
import math

import pytest
import torch

from ckda.cli import main
from ckda.experiments.tracking.horizon import closure_error, fit, horizon_figure, measured
from ckda.experiments.tracking.task import WordProblem


class Clock(torch.nn.Module):
    """Z_n by a rotation that is off by `error` radians a step: logits are cosines of the angle to each class."""

    def __init__(self, n, error):
        super().__init__()
        self.n, self.error = n, error

    def forward(self, tokens):
        return self.prefill(tokens)[0]

    def prefill(self, tokens, cache=0.0):
        steps = torch.where(tokens < self.n, 2 * math.pi * tokens.double() / self.n + self.error, 0.0)
        angle = cache + steps.cumsum(1)
        classes = 2 * math.pi * torch.arange(self.n, dtype=torch.float64) / self.n
        return torch.cos(angle.unsqueeze(-1) - classes), angle[:, -1:]


def test_an_exact_model_has_no_closure_error():
    assert closure_error(Clock(5, 0.0), WordProblem.named("Z5")) < 1e-24


def test_the_error_grows_with_the_square_and_the_horizon_is_where_the_angle_is_half_a_step():
    task = WordProblem.named("Z5")
    small, large = (closure_error(Clock(5, error), task) for error in (1e-5, 2e-5))
    assert large / small == pytest.approx(4, rel=0.01)
    scores = measured(Clock(5, 2 * math.pi / 10 / 300), task, 1024)
    assert scores[256] == pytest.approx(1)
    assert scores[512] == pytest.approx(-0.25)
    assert max(scores) == 512, "it stops where it is wrong"


def test_the_fit_says_how_far_it_is_off():
    rows = [{"closure": 1e-3, "half": 100.0}, {"closure": 1e-3, "half": 25.0}, {"closure": 1e-9, "half": None}]
    found = fit(rows)
    assert (found["of"], found["within_2"]) == (2, 2)
    assert found["kappa"] == pytest.approx(0.05)
    assert found["factor"] == pytest.approx(2)


def test_the_command_leaves_record_and_figure(tmp_path, capsys):
    weights = "results/tracking/paper/weights/S4-ckda.seed4.pt"
    assert main(["inspect", "horizon", weights, "--length", "128", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "horizon.json").read_text())
    (row,) = result["rows"]
    assert (row["run"], row["seed"]) == ("S4-ckda", 4)
    assert row["scores"]["32"] > 0.99
    assert 64 < row["half"] < 128
    assert (tmp_path / "horizon.png").stat().st_size > 0
    assert "T_half" in capsys.readouterr().out
    assert len(horizon_figure(result).axes) == 1
