"""silu(a) * b as one node: formulas against autograd, vmap, its kernels interpreted and built for sm_90."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from ckda.layers.swiglu import swiglu

node = torch.ops.ckda.swiglu


def test_gradients():
    a, b = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(node, (a, b))
    torch.testing.assert_close(node(a, b), silu(a) * b)


def test_mapped_over_replicas():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4)
    torch.testing.assert_close(torch.vmap(node, in_dims=(1, None))(a, b), (silu(a) * b[:, None]).movedim(1, 0))


_IN_INTERPRETER = """
import torch
from ckda.layers.swiglu import torch_backward
from ckda.layers.swiglu_kernels import backward, forward
torch.manual_seed(0)
for shape in ((3, 5), (2, 1025), (0, 4)):
    a, b, dy = (3 * torch.randn(shape[::-1]).T for _ in range(3))
    torch.testing.assert_close(forward(a, b), torch.nn.functional.silu(a) * b)
    for x, y in zip(backward(dy, a, b), torch_backward(dy, a, b)):
        torch.testing.assert_close(x, y)
print("agree")
"""

_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ckda.layers.swiglu_kernels import BLOCK, swiglu_backward_kernel, swiglu_forward_kernel
for kernel in (swiglu_forward_kernel, swiglu_backward_kernel):
    for dtype in ("bf16", "fp32"):
        signature = {name: f"*{dtype}" for name in kernel.arg_names} | {"num": "i32", "BLOCK": "constexpr"}
        built = triton.compile(ASTSource(kernel, signature, {"BLOCK": BLOCK}), target=GPUTarget("cuda", 90, 32))
        assert built.asm["cubin"]
print("built")
"""


@pytest.mark.parametrize(("code", "interpret", "said"), [(_IN_INTERPRETER, "1", "agree"), (_FOR_HOPPER, "0", "built")])
def test_kernels_in_the_interpreter_and_for_hopper(code, interpret, said):
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == said, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    """Against float64: no further away than twice the plain operations in the same dtype."""
    a, b = (torch.randn(3, 1001, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(a)
    results = []
    for call, wide in ((swiglu, False), (lambda a, b: silu(a) * b, False), (lambda a, b: silu(a) * b, True)):
        inputs = [x.detach().double().requires_grad_() for x in (a, b)] if wide else [a, b]
        y = call(*inputs)
        results.append((y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))))
    for ours, plain, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= 2 * (plain.double() - exact).norm() + 1e-6 * exact.norm()
