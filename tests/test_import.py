"""What an import costs and what it needs: nothing for `import ckda`, torch alone for the operator."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: as if the packages beside torch were not installed: no finder finds them
BLOCK = """
import sys
ABSENT = {"numpy", "scipy", "rich", "matplotlib", "triton", "fla", "einops"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    names = "torch", "numpy", "rich", "matplotlib", "triton"
    assert _python(f"import sys, ckda; print([n for n in {names!r} if n in sys.modules])").strip() == "[]"


def test_a_folder_of_the_same_name_hides_nothing(tmp_path: Path) -> None:
    """A script beside the clone, which is a folder named ckda, imports the library (as installed: `pip install -e`)."""
    (tmp_path / "ckda" / "docs").mkdir(parents=True)
    code = "import ckda; print(ckda.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.strip() == "0.1.0", done.stderr


def test_public_names_come_on_first_use() -> None:
    code = "import ckda, sys; ckda.complex_kda; print('torch' in sys.modules, ckda.complex_kda is ckda.ops.complex_kda)"
    assert _python(code).split() == ["True", "True"]
    assert "complex_kda_step" in _python("import ckda; print(dir(ckda))")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import ckda

    with pytest.raises(AttributeError, match="nothing"):
        _ = ckda.nothing


def test_the_operator_needs_torch_alone() -> None:
    code = (
        BLOCK
        + """
import torch
from ckda import complex_kda, complex_kda_step
x = torch.randn(1, 70, 2, 4, requires_grad=True)
o, state = complex_kda(x, x, x, x, x[..., 0], gate="signed", beta_range=2, normalize_qk=True, output_final_state=True)
(o.sum() + state.sum()).backward()
complex_kda_step(x[:, 0], x[:, 0], x[:, 0], x[:, 0], x[:, 0, :, 0], state, gate="signed")
assert x.grad.isfinite().all()
assert not ABSENT & set(sys.modules)
print("works")
"""
    )
    assert _python(code).strip() == "works"


@pytest.mark.slow
def test_the_import_of_the_operator_costs_little_beside_torch() -> None:
    """At most 0.2 s more than torch: medians of alternating runs, and the spread of torch's own times on a busy machine."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        _python(code)
        return time.perf_counter() - start

    seconds("import torch, ckda.ops")  # compiled files and caches
    plain, ours = [], []
    for _ in range(3):
        plain.append(seconds("import torch"))
        ours.append(seconds("import torch, ckda.ops"))
    spread = max(plain) - min(plain)
    assert statistics.median(ours) - statistics.median(plain) <= 0.2 + spread
