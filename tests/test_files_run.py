"""How many files one reads to follow the operator from the call to the first kernel."""

from typing import Any

import pytest
import torch

from ckda import complex_kda
from ckda.cli import main
from tests.files_run import files_run, until_first_launch

MOST = 12


def _call(T: int = 8, **options: Any) -> Any:
    x = torch.randn(1, T, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    options = {"gate": "signed", "beta_range": 2, "normalize_qk": True} | options
    return lambda: complex_kda(x.clone().requires_grad_(), x, x, x, x[..., 0], **options)


@pytest.mark.parametrize("form", ["triton", "triton-recurrent", "triton-portable"])
@pytest.mark.parametrize("T", [8, 140])
def test_from_the_call_to_the_first_kernel(T: int, form: str) -> None:
    pytest.importorskip("triton")
    found = until_first_launch(_call(T, backend=form))
    assert {"ops/__init__.py", "ops/dispatch.py", "ops/triton/__init__.py"} <= found
    assert len(found) <= MOST, sorted(found)


def test_only_functions_count() -> None:
    found = files_run(_call(backend="chunked"))
    assert "ops/chunked.py" in found
    assert "ops/reference.py" not in found  # imported, but not run
    assert files_run(lambda: None) == set()


def test_what_does_not_launch_a_kernel_is_an_error() -> None:
    pytest.importorskip("triton")
    with pytest.raises(AssertionError, match="no kernel"):
        until_first_launch(_call(backend="reference"))


#: one file a step: command, names of recipes, store, task, model, projections, letters by symbol, operator, training, table,
#: figure, page
MOST_OF_TRACK = 28


@pytest.mark.slow
def test_from_the_command_track_to_its_figure(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = files_run(lambda: main(["track", "S3", "--smoke", "--device", "cpu", "--out", str(tmp_path)]))
    assert {"experiments/tracking/run.py", "experiments/tracking/figures.py"} <= found
    assert len(found) <= MOST_OF_TRACK, sorted(found)
