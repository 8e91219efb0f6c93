"""What all tests share: the marker `gpu`, Triton's interpreter where there is no GPU, few threads, a fixed seed."""

import os
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

# no deadline: the machines are shared; no database: a run depends on the code alone
settings.register_profile("ckda", deadline=None, database=None, derandomize=True, max_examples=50)
settings.load_profile("ckda")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which decides once


#: files whose tests take seconds each; single tests elsewhere are marked where they stand
SLOW = (
    "test_triton.py",
    "test_triton_compile.py",
    "test_spectra.py",
    "test_verdicts.py",
    "test_train.py",
    "test_structure.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def assert_refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str], str], None]:
    """`assert_refused(words, told)`: `ckda` with these words ends with status 2 and prints one line, which says `told`."""
    from ckda.cli import main

    def check(words: list[str], told: str) -> None:
        capsys.readouterr()
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("ckda ")
        assert re.search(told, line), line

    return check


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """A fixed seed, and one thread: the shapes are tiny, and waiting threads take the cores from others."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
