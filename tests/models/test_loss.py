"""The chunked cross-entropy against torch's on the whole logits: value, gradients, what does not count, precision."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from ckda.models.loss import IGNORED, linear_cross_entropy, next_token_labels


def draw(N: int = 23, V: int = 37, d: int = 8, dtype: torch.dtype = torch.float64):
    hidden = torch.randn(N, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, d, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (N,))
    labels[::5] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 7, 22, 23, 24, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_plain_cross_entropy(chunk, dtype):
    hidden, weight, labels = draw(dtype=dtype)
    ours = (
        linear_cross_entropy(hidden, weight, labels, chunk=chunk) * 3
    )  # a factor, so that the gradient's scale is seen
    plain = cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED) * 3
    torch.testing.assert_close(ours, plain)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_numerical_gradient():
    hidden, weight, labels = draw(N=5, V=6, d=3)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, chunk=2), (hidden, weight))


def test_large_logits_stay_finite():
    hidden, weight, labels = draw(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, labels, chunk=4)
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad.isfinite().all()


def test_count_and_nothing_that_counts():
    hidden, weight, labels = draw()
    whole = linear_cross_entropy(hidden, weight, labels)
    counted = (labels != IGNORED).sum()
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, count=10), whole * counted / 10)
    none = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    none.backward()
    assert none == 0
    assert hidden.grad.abs().sum() == 0


def test_leading_axes_and_wrong_shapes():
    hidden, weight, labels = draw(N=24)
    shaped = linear_cross_entropy(hidden.view(2, 12, 8), weight, labels.view(2, 12), chunk=5)
    torch.testing.assert_close(shaped, linear_cross_entropy(hidden, weight, labels))
    with pytest.raises(ValueError, match="the shape of labels"):
        linear_cross_entropy(hidden, weight, labels[:-1])


def test_one_of_both_frozen():
    hidden, weight, labels = draw()
    (only,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), hidden)
    both, _ = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(only, both)


def test_all_logits_never_exist(monkeypatch):
    """No tensor of more than chunk x V numbers is made on the way (but for the weight's own gradient)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else (out,)) if torch.is_tensor(x))
            return out

    hidden, weight, labels = draw(N=200, V=50, d=4)
    with Watch():
        linear_cross_entropy(hidden, weight, labels, chunk=10).backward()
    assert max(sizes) <= max(10 * 50, 200 * 4)


def test_shifting_stops_at_the_ends_of_packed_sequences():
    labels = torch.arange(10, 17).unsqueeze(0)
    assert next_token_labels(labels)[0].tolist() == [11, 12, 13, 14, 15, 16, IGNORED]
    cu = torch.tensor([0, 0, 3, 3, 4, 7], dtype=torch.int32)
    assert next_token_labels(labels, cu)[0].tolist() == [11, 12, IGNORED, IGNORED, 15, 16, IGNORED]


@pytest.mark.gpu
@pytest.mark.parametrize("V", [50304, 1001])
def test_on_a_gpu(V):
    """bfloat16 with float32 sums: value and gradients near float64's of the same rounded inputs, and little memory."""
    hidden, weight, labels = (x.cuda() for x in draw(N=3000, V=V, d=256, dtype=torch.float32))
    h16, w16 = ((x.detach() * 0.3).bfloat16().requires_grad_() for x in (hidden, weight))
    h64, w64 = (x.detach().double().requires_grad_() for x in (h16, w16))
    ours = linear_cross_entropy(h16, w16, labels, chunk=1024)
    plain = cross_entropy(h64 @ w64.T, labels, ignore_index=IGNORED)
    torch.testing.assert_close(ours.double(), plain, rtol=2e-3, atol=0)
    for a, b in zip(torch.autograd.grad(ours, (h16, w16)), torch.autograd.grad(plain, (h64, w64)), strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


KERNEL = """
import torch
from ckda.models.loss_kernel import cross_entropy_rows, rows_kernel
torch.manual_seed(0)
for V, dtype, tolerance in ((37, torch.float32, 1e-5), (4096, torch.float16, 2e-3), (9001, torch.float32, 1e-5)):
    z = (torch.randn(5, V + 3) * 4).to(dtype)[:, :V]  # rows that do not lie end to end
    labels = torch.tensor([0, V - 1, -100, 5, V // 2])
    exact = z.double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(exact, labels, reduction="none", ignore_index=-100)
    plain.sum().backward()
    losses, kept = cross_entropy_rows(z.clone(), labels, -100, False)
    torch.testing.assert_close(losses.double(), plain.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(kept, z)
    wide = torch.empty_strided((5, V), (V + 3, 1), dtype=dtype).copy_(z)
    losses, dz = cross_entropy_rows(wide, labels, -100, True)
    torch.testing.assert_close(losses.double(), plain.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dz.double(), exact.grad, rtol=tolerance, atol=tolerance)
print("equal")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ckda.models.loss_kernel import BLOCK, NUM_WARPS, rows_kernel
for dtype in ("bf16", "fp32"):
    for needs in (True, False):
        signature = {"logits": f"*{dtype}", "labels": "*i64", "losses": "*fp32", "stride": "i32", "V": "i32"}
        signature |= dict.fromkeys(("IGNORED", "NEEDS", "BLOCK"), "constexpr")
        source = ASTSource(rows_kernel, signature, {"IGNORED": -100, "NEEDS": needs, "BLOCK": BLOCK})
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS})
        assert built.asm["cubin"]
print("built")
"""


@pytest.mark.parametrize(("code", "interpret", "said"), [(KERNEL, "1", "equal"), (COMPILED, "0", "built")])
def test_the_kernel_in_the_interpreter_and_for_hopper(code, interpret, said):
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said
