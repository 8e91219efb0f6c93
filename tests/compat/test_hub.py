"""The operator as a folder in the layout of Hugging Face's kernels: complete without this package, and loaded by `kernels`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckda.compat import fla
from ckda.compat.hub import write_kernel

#: as `kernels` imports a build: by its path, under the name in its metadata
_ALONE = """
import importlib.util, json, sys
from pathlib import Path
build = Path(sys.argv[1])
sys.path = [place for place in sys.path if not (Path(place or ".") / "ckda").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "ckda" not in repr(finder)]
name = json.loads((build / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
import torch
torch.set_num_threads(1)
x, o = torch.load(sys.argv[2])
found, _ = module.chunk_kda(x, x, x, -x.abs(), x[..., 0], use_qk_l2norm_in_kernel=True)
assert torch.equal(found, o)
assert "ckda" not in sys.modules
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    write_kernel(folder)
    return folder


def test_the_folder_is_complete_without_this_package(kernel, tmp_path):
    x = torch.randn(1, 40, 2, 8)
    o, _ = fla.chunk_kda(x, x, x, -x.abs(), x[..., 0], use_qk_l2norm_in_kernel=True)
    torch.save((x, o), tmp_path / "example.pt")
    build = kernel / "build" / "torch-universal"
    command = [sys.executable, "-c", _ALONE, str(build), str(tmp_path / "example.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_metadata(kernel):
    data = json.loads((kernel / "build" / "torch-universal" / "metadata.json").read_text())
    assert data["name"] == "ckda"
    assert data["id"].isidentifier()


def test_kernels_loads_it(kernel):
    """Beside this package, with gradients; as functions and, for `kernelize`, as layers."""
    kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
    module = kernels.get_local_kernel(kernel)
    x = torch.randn(1, 40, 2, 8, requires_grad=True)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    arguments = (x, x, x, -x.abs(), x[..., 0])
    ours, theirs = fla.chunk_kda(*arguments, **options), module.chunk_kda(*arguments, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    gradients = [torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (ours[0], theirs[0])]
    assert torch.equal(*gradients)
    assert torch.equal(module.complex_kda(*arguments)[0], fla.complex_kda(*arguments)[0])

    @kernels.use_kernel_forward_from_hub("chunk_kda")
    class Slow(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise AssertionError("the kernel did not replace it")

    mapping = {"chunk_kda": {"cpu": kernels.LocalLayerRepository(kernel, layer_name="chunk_kda")}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        layer = kernels.kernelize(Slow(), mode=kernels.Mode.TRAINING, device="cpu")
    assert torch.equal(layer(*arguments, **options)[0], ours[0])


def test_bad_call():
    done = subprocess.run([sys.executable, "-m", "ckda.compat.hub"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: python -m ckda.compat.hub FOLDER" in done.stderr
