"""The short convolution as one node: formulas against autograd, vmap, decoding, its kernels interpreted and built for sm_90."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ckda.layers import ShortConvolution
from ckda.layers.convolution import convolve_together, short_convolution, torch_backward, torch_forward


@pytest.mark.parametrize("activate", [True, False])
@pytest.mark.parametrize("before", ["nothing", "past", "packed"])
def test_gradients(before, activate):
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    past = torch.randn(1, 3, 3, dtype=torch.float64) if before == "past" else None
    cu_seqlens = torch.tensor([0, 2, 2, 3, 6]) if before == "packed" else None

    def call(x, w):
        return short_convolution(x, w, past, cu_seqlens, activate)

    assert torch.autograd.gradcheck(call, (x, weight), check_forward_ad=True)
    by_transform = torch.func.grad(lambda *x: call(*x).sum(), (0, 1))(x.detach(), weight.detach())
    torch.testing.assert_close(by_transform, torch.autograd.grad(call(x, weight).sum(), (x, weight)))


def test_it_is_the_module_and_what_the_module_was():
    """torch's own convolution and SiLU, and a past whose gradient is wanted."""
    conv = ShortConvolution(5, 4)
    x = torch.randn(2, 9, 5)
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    plain = torch.nn.functional.conv1d(padded, conv.weight.flip(-1).unsqueeze(1), groups=5).mT
    torch.testing.assert_close(conv(x)[0], plain)
    torch.testing.assert_close(conv(x, activate=True)[0], torch.nn.functional.silu(plain))
    torch.testing.assert_close(short_convolution(x, conv.weight, activate=True), torch.nn.functional.silu(plain))
    past = torch.randn(2, 3, 5, requires_grad=True)
    y, new = conv(x[:, :2], past)
    torch.testing.assert_close(new, torch.cat([past, x], 1)[:, 2:5])
    assert torch.autograd.grad(y.sum() + new.sum(), past)[0].abs().min() > 0


def test_mapped_over_replicas():
    x, weight = torch.randn(3, 2, 7, 4, requires_grad=True), torch.randn(3, 4, 2, requires_grad=True)
    past = torch.randn(2, 1, 4)
    together = torch.vmap(lambda x, w: short_convolution(x, w, past, None, True), in_dims=(1, 0))(
        x.movedim(0, 1), weight
    )
    apart = torch.stack([short_convolution(x[r], weight[r], past, None, True) for r in range(3)])
    torch.testing.assert_close(together, apart)
    for a, b in zip(
        torch.autograd.grad(together.square().sum(), (x, weight)),
        torch.autograd.grad(apart.square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 5]])
def test_several_as_one_node(bounds):
    """From rows to heads, with the bits of each alone: results and gradients, without gradients, mapped, in forward mode."""
    inputs = [torch.randn(10, 6, requires_grad=True), torch.randn(2, 5, 6, requires_grad=True), torch.randn(2, 5, 4)]
    weights = [torch.randn(x.shape[-1], 3, requires_grad=True) for x in inputs]
    shapes, activate = [(2, 5, 2, 3), (2, 5, 6), (2, 5, 1, 4)], [True, False, True]
    cu_seqlens = None
    if bounds is not None:
        cu_seqlens = torch.tensor(bounds)
        inputs, shapes = [x.detach().flatten()[: 5 * x.shape[-1]] for x in inputs], [(1, *s[1:]) for s in shapes]
    leaves = [x for x in (*inputs, *weights) if x.requires_grad]

    def together(*tensors):
        return convolve_together(tensors[:3], tensors[3:], cu_seqlens, shapes, activate)

    def apart(*tensors):
        for x, w, shape, silu in zip(tensors[:3], tensors[3:], shapes, activate, strict=True):
            yield short_convolution(x.reshape(*shape[:2], len(w)), w, None, cu_seqlens, silu).view(shape)

    def gradients(ys):
        return torch.autograd.grad(sum(y.sin().sum() for y in ys), leaves, create_graph=True)

    found = together(*inputs, *weights)
    assert len({y.grad_fn for y in found}) == 1
    wanted = list(apart(*inputs, *weights))
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, gradients(found), gradients(wanted)))
    with torch.no_grad():
        assert all(map(torch.equal, together(*inputs, *weights), wanted))
        mapped = torch.vmap(together, in_dims=(0, None, None, *[None] * 3))(
            torch.stack([inputs[0]] * 2), *inputs[1:], *weights
        )
        assert all(torch.equal(y[1], z) for y, z in zip(mapped, wanted, strict=True))
    tensors = tuple(x.detach() for x in (*inputs, *weights))
    for a, b in zip(
        torch.func.jvp(together, tensors, tensors)[1],
        torch.func.jvp(lambda *x: tuple(apart(*x)), tensors, tensors)[1],
        strict=True,
    ):
        assert torch.equal(a, b)


_IN_INTERPRETER = """
import torch
from ckda.layers.convolution import torch_backward, torch_forward
from ckda.layers.convolution_kernels import backward, backward_all, forward, forward_all
torch.manual_seed(0)
empty = torch.empty
torch.empty = lambda *a, **k: empty(*a, **k).fill_(float("nan"))
cases = [
    # B, T, D, S, past, cu_seqlens, SiLU
    (2, 1, 5, 4, True, None, True),
    (1, 33, 130, 4, False, None, True),
    (2, 40, 3, 3, True, None, False),
    (1, 70, 6, 4, False, [0, 1, 1, 3, 34, 35, 70], True),
    (1, 35, 4, 4, True, [0, 0, 31, 33, 35], False),
    (3, 2, 4, 1, False, None, True),
    (1, 3, 4, 4, False, [0, 3], True),
]
for B, T, D, S, has_past, bounds, silu in cases:
    wide = torch.randn(B, T + 1, D + 3, dtype=torch.float64)
    x, weight = wide[:, :T, 2 : D + 2], torch.randn(D, S, dtype=torch.float64)
    dy = torch.randn(B, D, T, dtype=torch.float64).mT
    past = torch.randn(B, S - 1, D, dtype=torch.float64) if has_past else None
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    exact = torch_forward(x, weight, past, cu, silu)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        narrow = wide.to(dtype)[:, :T, 2 : D + 2], weight.to(dtype), None if past is None else past.to(dtype)
        assert narrow[0].stride(1) == D + 3
        out = forward(*narrow, cu, silu)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
        found, wanted = backward(dy.to(dtype), *narrow, cu, silu), torch_backward(dy, x, weight, past, cu, silu)
        for a, b in zip(found, wanted):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=3 * tolerance, atol=3 * tolerance)
for shape in ((0, 4, 3), (2, 0, 3)):
    x, w = torch.zeros(shape), torch.ones(3, 4)
    assert forward(x, w, None, None, True).shape == shape
    assert backward(x, x, w, None, None, True)[1].abs().max() == 0
for bounds in (None, [0, 1, 34, 35]):
    cu = None if bounds is None else torch.tensor(bounds)
    B = 2 if bounds is None else 1
    parts = [(torch.randn(B * 35, D), torch.randn(D, 4), None, cu, silu) for D, silu in ((6, True), (6, False), (130, True))]
    shapes = [(B, 35, 2, 3), (B, 35, 6), (B, 35, 13, 10)]
    dys = [torch.randn(B, 35, 3, 2).mT, *map(torch.randn, shapes[1:])]
    alone = [(x.view(B, 35, -1), *rest) for x, *rest in parts]
    for y, shape, part in zip(forward_all(parts, shapes), shapes, alone, strict=True):
        assert torch.equal(y, forward(*part).view(shape))
    found = backward_all(dys, parts)
    for i, (dy, part) in enumerate(zip(dys, alone, strict=True)):
        dx, dweight = backward(dy.reshape(part[0].shape), *part)
        assert torch.equal(found[i], dx.flatten(0, 1)) and torch.equal(found[3 + i], dweight)
x = torch.zeros(0, 6)
parts = [(x, torch.ones(6, 4), None, None, True)] * 3
assert [y.shape for y in forward_all(parts, [(2, 0, 2, 3)] * 3)] == [(2, 0, 2, 3)] * 3
assert [y.shape for y in backward_all([torch.zeros(2, 0, 2, 3)] * 3, parts)] == [(0, 6)] * 3 + [(6, 4)] * 3
print("agree")
"""

_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ckda.layers.convolution_kernels import convolution_gradient_kernel, convolution_input_kernel, convolution_output_kernel
for kernel in (convolution_output_kernel, convolution_gradient_kernel, convolution_input_kernel):
    for dtype, has_past, packed, activate in (("bf16", False, True, True), ("fp32", True, False, False)):
        fixed = {"S": 4, "BT": 32, "BD": 128, "ACTIVATE": activate, "HAS_PAST": has_past, "PACKED": packed}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        signature = {}
        for name in kernel.arg_names:
            kind = {"p_weight": "*fp32", "p_dweight": "*fp32", "p_cu": "*i32"}.get(name, f"*{dtype}")
            signature[name] = "constexpr" if name in fixed else kind if name.startswith("p_") else "i32"
        built = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
        assert built.asm["cubin"]
        assert built.metadata.shared < 100_000
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 700, 1000]])
def test_kernels_on_a_gpu(dtype, bounds):
    """Against float64: no further away than twice the plain operations in the same dtype; and the same every time."""
    B = 3 if bounds is None else 1
    x, dy = (torch.randn(B, 1000, 200, device="cuda", dtype=dtype)[..., :136] for _ in range(2))
    weight = torch.randn(136, 4, device="cuda")
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")
    x.requires_grad_()
    weight.requires_grad_()
    y = short_convolution(x, weight, None, cu_seqlens, True)
    found = (y, *torch.autograd.grad(y, (x, weight), dy))
    plain = torch_forward(x, weight, None, cu_seqlens, True)
    others = (plain, *torch.autograd.grad(plain, (x, weight), dy))
    x64, w64 = x.detach().double(), weight.detach().double()
    exact = (
        torch_forward(x64, w64, None, cu_seqlens, True),
        *torch_backward(dy.double(), x64, w64, None, cu_seqlens, True),
    )
    for a, b, c in zip(found, others, exact, strict=True):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm() + 1e-6 * c.norm()
    again = torch.autograd.grad(short_convolution(x, weight, None, cu_seqlens, True), (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(again, found[1:], strict=True))


@pytest.mark.gpu
def test_decoding_on_a_gpu():
    conv = ShortConvolution(48, 4).cuda()
    x = torch.randn(2, 9, 48, device="cuda")
    whole, (first, past) = conv(x, activate=True)[0], conv(x[:, :2], activate=True)
    steps = [first]
    for t in range(2, 9):
        y, past = conv(x[:, t : t + 1], past, activate=True)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 700, 1000]])
def test_several_on_a_gpu(bounds):
    """The bits of each alone, the first time and by the launches that were kept."""
    B = 3 if bounds is None else 1
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")
    shapes, activate = [(B, 1000, 2, 64), (B, 1000, 2, 64), (B, 1000, 3, 64)], [True, False, True]
    for _ in range(3):
        inputs = [torch.randn(B * 1000, h * w, device="cuda").bfloat16().requires_grad_() for _, _, h, w in shapes]
        weights = [torch.randn(x.shape[1], 4, device="cuda", requires_grad=True) for x in inputs]
        dys = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
        together = convolve_together(inputs, weights, cu_seqlens, shapes, activate)
        apart = [
            short_convolution(x.view(B, 1000, -1), w, None, cu_seqlens, silu).view(shape)
            for x, w, shape, silu in zip(inputs, weights, shapes, activate, strict=True)
        ]
        assert all(map(torch.equal, together, apart))
        found, wanted = (torch.autograd.grad(ys, (*inputs, *weights), dys) for ys in (together, apart))
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("taps", "dtype"), [(3, torch.float32), (4, torch.float64)])
def test_convolutions_that_are_not_alike_are_added_up_apart(
    taps: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels serve: what they write for all side by side has one number of taps and one dtype."""
    from ckda.layers import convolution

    asked: list[int] = []

    class Kernels:
        def backward_all(self, dys: Any, parts: list) -> list[torch.Tensor]:
            asked.append(len(parts))
            return [part[i] for i in (0, 1) for part in parts]

    monkeypatch.setattr(convolution, "has_kernel", lambda x: True)
    monkeypatch.setattr(convolution, "_kernels", Kernels)
    monkeypatch.setattr(convolution, "_backward", lambda dy, x, weight, *rest: (x, weight))
    x, shape = torch.randn(2, 5, 8), (2, 5, 2, 4)
    weights = [torch.randn(8, 4), torch.randn(8, taps).to(dtype)]
    with torch.no_grad():
        for pair in (weights, [weights[0]] * 2):
            found = convolution.backward_together(*[x.view(shape)] * 2, x, x, *pair, None, (shape, shape), (True, True))
            assert [each.shape for each in found] == [x.shape, x.shape, pair[0].shape, pair[1].shape]
    assert asked == [2], "once, for those that are alike"
