"""Residual and norm, bias and GELU as one node each: gradients, vmap, and their kernels."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from ckda.experiments.tracking.fast.readout import bias_gelu, norm_of_words, torch_gelu_backward, torch_norm_backward


def plain_norm(y, table, tokens, weight, bias):
    return layer_norm(table[tokens] + y, y.shape[-1:], weight, bias)


def draw(R, B, T, D, n, dtype=torch.float64, device="cpu"):
    y, table, weight, bias = (
        torch.randn(*shape, dtype=dtype, device=device) for shape in ((R, B, T, D), (R, n, D), (R, D), (R, D))
    )
    return y, table, torch.randint(n, (R, B, T), device=device), weight, bias


def test_norm_mapped_over_replicas():
    y, table, tokens, weight, bias = draw(3, 4, 5, 6, 7)
    inputs = [x.requires_grad_() for x in (y, table, weight, bias)]
    found = torch.vmap(norm_of_words)(y, table, tokens, weight, bias)
    wanted = torch.stack([plain_norm(*(x[r] for x in (y, table, tokens, weight, bias))) for r in range(3)])
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(z.sin().sum(), inputs) for z in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_gelu_mapped_over_replicas():
    h, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 5, 6), (3, 6)))
    found, wanted = torch.vmap(bias_gelu)(h, bias), gelu(h + bias[:, None, None])
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(z.sin().sum(), [h, bias]) for z in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def check_kernels(device, R, N, D, n):
    """Every kernel against float64."""
    from ckda.experiments.tracking.fast import readout_kernels as kernels

    y, table, tokens, weight, bias = (x[:, 0] if x.dim() > 3 else x for x in draw(R, 1, N, D, n, torch.float32, device))
    tokens = tokens[:, 0]
    dz = torch.randn_like(y)
    exact = [x.double() for x in (dz, y, table, weight, bias)]
    normed = torch.stack([plain_norm(*(x[r] for x in (*exact[1:3], tokens, *exact[3:]))) for r in range(R)])
    pairs = [
        (kernels.norm(y, table, tokens, weight, bias, 1e-5), normed),
        *zip(
            kernels.norm_backward(dz, y, table, tokens, weight, 1e-5),
            torch_norm_backward(*exact[:3], tokens, exact[3], 1e-5),
            strict=True,
        ),
        (kernels.bias_gelu(y, bias), gelu(exact[1] + exact[4][:, None])),
        *zip(kernels.bias_gelu_backward(dz, y, bias), torch_gelu_backward(exact[0], exact[1], exact[4]), strict=True),
    ]
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3 if N > 1000 else 1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
@pytest.mark.parametrize("shape", [(1, 3, 16, 4), (2, 130, 48, 7), (2, 9, 65, 3)])
def test_kernels_in_the_interpreter(shape):
    pytest.importorskip("triton")
    check_kernels("cpu", *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3, 16, 4), (2, 9, 65, 3), (3, 2112, 48, 7), (3, 2112, 192, 25)])
def test_kernels_on_a_gpu(shape):
    check_kernels("cuda", *shape)


_COMPILE = """
import json, torch
from ckda.experiments.tracking.fast.readout_kernels import launches
from ckda.ops.triton.compile import compile_launch, resources
for D in (48, 192):
    y, table, weight = torch.empty(3, 100, D), torch.empty(3, 7, D), torch.empty(3, D)
    for launch in launches(y, table, torch.zeros(3, 100, dtype=torch.long), weight):
        print(json.dumps([launch.kernel.__name__, resources(compile_launch(launch, 90))._asdict()]))
"""


def test_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({name for name, _ in found}) == 4
    assert all(x["spills"] <= 0 for _, x in found), found
