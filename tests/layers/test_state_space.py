"""Mamba-2, Mamba-3 and RWKV-7 against their recurrences, token by token in float64 and with dense matrices."""

import math

import pytest
import torch
from torch.nn.functional import normalize, silu, softplus

from ckda.layers import RWKV7, Mamba2, Mamba3

D, H, N = 12, 3, 8


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 9, D, dtype=torch.float64)


def shaken(layer):
    """The layer in float64 with every parameter moved from where it starts, so that none is hidden by a one or a zero."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer.double()


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_mamba2(x):
    layer = shaken(Mamba2(D, H, N))
    z, mixed, dt = layer.in_proj(x).split((H * N, H * N + 2 * N, H), -1)
    taps = layer.convolution.weight
    padded = torch.cat([torch.zeros_like(mixed[:, :3]), mixed], 1)
    expected = []
    S = torch.zeros(2, H, N, N, dtype=torch.float64)
    for t in range(9):
        u = silu(sum(taps[:, i] * padded[:, t + 3 - i] for i in range(4)))
        values, B, C = u[:, : H * N].view(2, H, N), u[:, H * N : H * N + N], u[:, H * N + N :]
        step = softplus(dt[:, t] + layer.dt_bias)
        a = torch.exp(-step * layer.A_log.exp())
        S = a[..., None, None] * S + (step[..., None] * B[:, None])[..., None] * values[:, :, None]
        y = torch.einsum("bhnp,bn->bhp", S, C) + layer.D[:, None] * values
        expected.append(layer.o_proj(rms(y.flatten(1) * silu(z[:, t]), layer.norm)))
    torch.testing.assert_close(layer(x), torch.stack(expected, 1), rtol=1e-10, atol=1e-12)


def test_mamba3(x):
    """By complex numbers: the pair (2 i, 2 i + 1) is one complex channel that exp(i angle) turns."""
    layer = shaken(Mamba3(D, H, N))
    z, values, B, C, dt, A, trap, angle = layer.in_proj(x).split((H * N, H * N, N, N, H, H, H, N // 4), -1)
    S, last = torch.zeros(2, H, N, N, dtype=torch.float64), None
    expected = []
    for t in range(9):
        v = values[:, t].view(2, H, N)
        key = rms(B[:, t], layer.B_norm)[:, None] + layer.B_bias
        query = rms(C[:, t], layer.C_norm)[:, None] + layer.C_bias
        step, share = softplus(dt[:, t] + layer.dt_bias), torch.sigmoid(trap[:, t])
        a = torch.exp(-step * softplus(A[:, t]).clamp_min(1e-4))
        turn = torch.exp(1j * math.pi * torch.tanh(angle[:, t])[:, None] * step[..., None])  # [B, H, N / 4]

        def turned(state, turn=turn):
            pairs = torch.view_as_complex(state[:, :, : N // 2].unflatten(2, (-1, 2)).transpose(-1, -2).contiguous())
            pairs = torch.view_as_real(pairs * turn[..., None]).transpose(-1, -2).flatten(2, 3)
            return torch.cat([pairs, state[:, :, N // 2 :]], 2)

        new = key[..., None] * v[:, :, None]
        S = a[..., None, None] * turned(S) + (share * step)[..., None, None] * new
        if last is not None:
            S = S + ((1 - share) * step * a)[..., None, None] * turned(last)
        last = new
        y = torch.einsum("bhnp,bhn->bhp", S, query) + layer.D[:, None] * v
        expected.append(layer.o_proj(y.flatten(1) * silu(z[:, t])))
    torch.testing.assert_close(layer(x), torch.stack(expected, 1), rtol=1e-10, atol=1e-12)


def test_mamba3_can_count_mod_4_and_mamba2_cannot_flip_a_sign():
    """Its transitions have eigenvalues on the whole circle; Mamba-2's are positive."""
    layer = Mamba3(D, H, N)
    with torch.no_grad():
        layer.dt_bias.fill_(math.log(math.e - 1))  # dt = 1 where nothing else is added
        layer.in_proj.weight.zero_()
        layer.in_proj.weight[-N // 4 :] = math.atanh(0.5) / D
    c = layer.coefficients(torch.ones(1, 1, D))
    torch.testing.assert_close(c["angle"], torch.full_like(c["angle"], math.pi / 2))


def test_rwkv7(x):
    layer = shaken(RWKV7(D, H, N, rank=5))
    S, before = torch.zeros(2, H, N, N, dtype=torch.float64), torch.zeros(2, D, dtype=torch.float64)
    expected = []
    for t in range(9):
        xr, xw, xk, xv, xa, xg = (x[:, t] + (before - x[:, t]) * layer.mix[i] for i in range(6))
        before = x[:, t]
        a = torch.sigmoid(layer.a_up(layer.a_down(xa)))
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(layer.w_up(torch.tanh(layer.w_down(xw)))))
        k, v, r = layer.k_proj(xk), layer.v_proj(xv), layer.r_proj(xr)
        written = k * (1 + (a - 1) * layer.replace)
        kappa = normalize((k * layer.kappa_scale).view(2, H, N), dim=-1)
        w, a, written, v, r = (y.view(2, H, N) for y in (w, a, written, v, r))
        A = torch.diag_embed(w) - torch.einsum("bhi,bhj->bhij", a * kappa, kappa)
        torch.testing.assert_close(layer.matrices(x)[:, t], A, rtol=1e-10, atol=1e-12)
        S = A @ S + torch.einsum("bhn,bhp->bhnp", written, v)
        o = torch.einsum("bhnp,bhn->bhp", S, r)
        o = torch.nn.functional.group_norm(o.flatten(1), H, layer.norm_weight, layer.norm_bias, N * 1e-5)
        o = o + ((r * written * layer.bonus.view(H, N)).sum(-1, keepdim=True) * v).flatten(1)
        expected.append(layer.o_proj(o * layer.g_up(torch.sigmoid(layer.g_down(xg)))))
    torch.testing.assert_close(layer(x), torch.stack(expected, 1), rtol=1e-10, atol=1e-12)


def test_rwkv7_is_not_gdn2(x):
    """Its decay stands beside the erasure: what is erased is not decayed first."""
    layer = shaken(RWKV7(D, H, N))
    c = layer.coefficients(x)
    beside = layer.matrices(x)
    in_front = (torch.eye(N) - (c["a"] * c["kappa"]).unsqueeze(-1) * c["kappa"].unsqueeze(-2)) @ torch.diag_embed(
        c["w"]
    )
    assert (beside - in_front).abs().max() > 0.01
