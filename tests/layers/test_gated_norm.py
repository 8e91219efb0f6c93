"""The gated norm as one node: formulas against autograd, vmap, and its kernels in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from ckda.layers import HeadNorm
from ckda.layers.gated_norm import gated_norm, torch_backward, torch_forward


@pytest.mark.parametrize("gated", [True, False])
def test_gradients(gated):
    o, gate = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    weight = torch.randn(4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in ((o, gate, weight) if gated else (o, weight))]
    call = gated_norm if gated else lambda o, w: gated_norm(o, None, w)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    by_transform = torch.func.grad(lambda *x: call(*x).sum(), tuple(range(len(inputs))))(*(x.detach() for x in inputs))
    torch.testing.assert_close(by_transform, torch.autograd.grad(call(*inputs).sum(), inputs))


def test_it_is_the_head_norm():
    norm = HeadNorm(6)
    with torch.no_grad():
        norm.weight.normal_()
    o, gate = torch.randn(2, 7, 3, 6), torch.randn(2, 7, 3, 6)
    torch.testing.assert_close(gated_norm(o, gate, norm.weight, norm.eps), norm(o, gate))


def test_mapped_over_replicas():
    o, gate = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4, 8)
    weight = torch.randn(3, 8, requires_grad=True)
    o.requires_grad_()
    together = torch.vmap(gated_norm, in_dims=(1, 1, 0))(o.movedim(0, 1), gate.movedim(0, 1), weight)
    apart = torch.stack([gated_norm(o[r], gate[r], weight[r]) for r in range(3)])
    torch.testing.assert_close(together, apart)
    for a, b in zip(
        torch.autograd.grad(together.square().sum(), (o, weight)),
        torch.autograd.grad(apart.square().sum(), (o, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


_IN_INTERPRETER = """
import torch
from ckda.layers.gated_norm import torch_backward, torch_forward
from ckda.layers import gated_norm_kernels
from ckda.layers.gated_norm_kernels import backward, forward
gated_norm_kernels.PROGRAMS = 3  # so that a program takes several blocks
torch.manual_seed(0)
for G, N, V, gated in ((1, 3, 16, True), (2, 130, 16, True), (3, 5, 7, False), (2, 9, 65, True), (1, 11, 300, False)):
    o, gate, dy, weight = torch.randn(G, N, V), torch.randn(G, N, V) if gated else None, torch.randn(G, N, V), torch.randn(G, V)
    torch.testing.assert_close(forward(o, gate, weight, 1e-5), torch_forward(o, gate, weight, 1e-5))
    for a, b in zip(backward(dy, o, gate, weight, 1e-5), torch_backward(dy, o, gate, weight, 1e-5)):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("agree")
"""


_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ckda.layers.gated_norm_kernels import gated_norm_backward_kernel, gated_norm_forward_kernel
for kernel in (gated_norm_forward_kernel, gated_norm_backward_kernel):
    for dtype, V, BN, gated in (("bf16", 64, 32, True), ("fp32", 384, 4, False)):
        fixed = {"V": V, "BN": BN, "BV": triton.next_power_of_2(V), "GATED": gated}
        signature = dict.fromkeys(kernel.arg_names, f"*{dtype}") | {"p_weight": "*fp32", "eps": "fp32", "N": "i32"}
        signature |= {"loops": "i32", "p_dweight": "*fp32"} if "loops" in kernel.arg_names else {}
        source = ASTSource(kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
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
@pytest.mark.parametrize("V", [48, 384, 5000])
def test_kernels_on_a_gpu(dtype, V):
    from ckda.layers.gated_norm_kernels import backward, forward

    o, gate, dy = (torch.randn(3, 1000, V, device="cuda", dtype=dtype) for _ in range(3))
    weight = torch.randn(3, V, device="cuda")
    exact = [t.double() for t in (o, gate, dy, weight)]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    y = torch_forward(exact[0], exact[1], exact[3], 1e-5)
    torch.testing.assert_close(forward(o, gate, weight, 1e-5).double(), y, **tolerance)
    found = backward(dy, o, gate, weight, 1e-5)
    wanted = torch_backward(exact[2], exact[0], exact[1], exact[3], 1e-5)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance)
    torch.testing.assert_close(found[2].double(), wanted[2], rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("gated", [True, False])
def test_no_tokens_have_no_gradient_and_no_launch(gated: bool) -> None:
    kernels = pytest.importorskip("ckda.layers.gated_norm_kernels")
    o, weight = torch.empty(2, 0, 3, 4), torch.ones(4)
    do, dgate, dweight = kernels.backward(o, o, o if gated else None, weight, 1e-5)
    assert do.shape == o.shape
    assert (dgate is None) != gated
    assert torch.equal(dweight, torch.zeros(4))
