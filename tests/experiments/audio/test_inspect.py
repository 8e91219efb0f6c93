"""The modes of a continuation model: projector, ablation, ageing, on transitions that are known exactly."""

import math

import pytest
import torch

from ckda import transition
from ckda.experiments.audio.inspect import ablate, complex_projector, played, spectra, told_apart, who_counts
from ckda.experiments.audio.model import build
from ckda.experiments.audio.task import Continuation, cut, groove


def turning(turns: float, period: int = 32, K: int = 6, planes: tuple[int, int] = (1, 4)) -> torch.Tensor:
    """A CKDA transition that rotates one coordinate plane by `turns` a period and keeps the rest: two reflections."""
    alpha, k = torch.ones(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
    angle = math.pi * turns / period
    alpha[planes[0]] = -1
    k[planes[0]], k[planes[1]] = math.cos(angle), math.sin(angle)
    return transition.dense(alpha, k, 2.0)


@pytest.mark.parametrize("turns", [1, 2, 11, 15])
def test_projector_of_a_rotating_block_is_its_plane(turns):
    A = turning(turns)
    plane = torch.zeros(6, 6, dtype=torch.float64)
    plane[1, 1] = plane[4, 4] = 1
    torch.testing.assert_close(complex_projector(A), plane, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.linalg.matrix_power(A, 32), torch.eye(6, dtype=torch.float64), atol=1e-12, rtol=0)


def test_projector_is_spectral_where_the_modes_are_skew():
    """In another basis: idempotent, of rank two, commuting with A; and A on its range is the rotation."""
    torch.manual_seed(0)
    basis = torch.randn(6, 6, dtype=torch.float64)
    A = basis @ turning(3) @ torch.linalg.inv(basis)
    Pi = complex_projector(A)
    torch.testing.assert_close(Pi @ Pi, Pi, atol=1e-9, rtol=0)
    torch.testing.assert_close(A @ Pi, Pi @ A, atol=1e-9, rtol=0)
    assert torch.linalg.matrix_rank(Pi, tol=1e-9) == 2
    assert float((A @ Pi).trace()) == pytest.approx(2 * math.cos(2 * math.pi * 3 / 32))
    assert complex_projector(turning(0)).abs().max() == 0
    assert complex_projector(torch.diag(torch.tensor([1.0, -0.5, 0.2]))).abs().max() == 0


@pytest.fixture
def clock():
    """A model in float64 whose head 0 rotates coordinates 0 and 1 by 3 turns a loop in silence and keeps the others;
    all other heads read nothing."""
    torch.manual_seed(0)
    model = build("ckda").double()
    mixer, K, angle = model.mixer, 16, math.pi * 3 / 32
    with torch.no_grad():
        mixer.f_proj[1].weight.zero_()
        mixer.b_proj.weight.zero_()
        mixer.b_proj.bias.fill_(-40.0)
        mixer.b_proj.bias[0] = 40.0
        mixer.dt_bias.fill_(40.0)
        mixer.dt_bias[0] = -40.0
        mixer.k_proj.weight.zero_()
        mixer.k_proj.weight[:, -1] = 1.0
        mixer.k_proj.weight[:K, -1] = 0.0
        mixer.k_proj.weight[0, -1], mixer.k_proj.weight[1, -1] = math.cos(angle), math.sin(angle)
        mixer.k_proj.weight[:K, :-1].normal_()
        model.readout[2].weight.mul_(30)
    return model


def test_spectra_of_a_known_rotation(clock):
    heads = spectra(clock, 32)
    assert heads[0]["turns"] == pytest.approx(3, abs=1e-9)
    assert heads[0]["modulus"] == pytest.approx(1, abs=1e-9)
    assert heads[0]["beta"] == pytest.approx(2)
    assert sum(a < 0 for a in heads[0]["alpha"]) == 1
    assert all(head["turns"] is None for head in heads[1:])
    assert told_apart(heads, 32) == 32
    assert told_apart([{"modulus": 0.1, "turns": 3.0}, {"modulus": 1.0, "turns": 4.0}], 32) == 8


def test_ablation_removes_exactly_what_rotates(clock):
    """With the state's rows 0 and 1 of head 0 set to zero by hand, the model errs as the ablation says it does."""
    task = Continuation(cut(groove()))
    result = ablate(clock, task, 24)
    x, phase = task.at(torch.arange(32), 24)
    stream = clock.stream(x.double())
    with torch.no_grad():
        _, cache = clock.mixer.prefill(stream[:, :8])
        state = cache.state.clone()
        state[:, 0, :2] = 0
        mixed, _ = clock.mixer.prefill(stream[:, 8:], cache._replace(state=state))
        said = task.waveform(clock.decode(mixed, stream[:, 8:]))
    target = torch.from_numpy(task.frames)[phase[:, 8:]]
    assert result["without_complex_modes"] == pytest.approx(float((said - target).square().mean()), rel=1e-9)
    assert result["without_by_head"][0] == pytest.approx(result["without_complex_modes"], rel=1e-12)
    assert result["without_by_head"][1:] == pytest.approx([result["mse"]] * 7, rel=1e-9)
    assert result["without_complex_modes"] != pytest.approx(result["mse"], rel=1e-3)
    share = float(cache.state[:, 0, :2].square().sum() / cache.state[:, 0].square().sum())
    assert result["complex_share_by_head"] == pytest.approx([share, *[0] * 7], abs=1e-9)


def test_modes_that_do_not_decay_do_not_age(clock):
    """Real modes of eigenvalue one are the same half a loop later; an odd number of turns is not."""
    task = Continuation(cut(groove()))
    aged = who_counts(clock, task, 24)
    whole = played(clock, task, 8, 24)
    assert aged["real"] == pytest.approx({k: whole[k] for k in aged["real"]})
    assert aged["all"] == aged["pairs"]
    for shares in aged.values():
        assert sum(shares.values()) == pytest.approx(1)


# The verb ------------------------------------------------------------------------------------------------------------


def test_inspect_says_what_it_needs(tmp_path, assert_refused):
    assert_refused(["inspect", "audio", str(tmp_path / "runs/nothing.pt")], r"nothing.json is not there")
    (tmp_path / "runs").mkdir()
    (tmp_path / "audio.json").write_text('{"frames": [[0.0]]}')
    (tmp_path / "runs/ckda.json").write_text('{"seeds": [0], "shown": 0}')
    (tmp_path / "runs/ckda.pt").write_bytes(b"no weights")
    assert_refused(["inspect", "audio", str(tmp_path / "runs/ckda.pt")], "holds no weights")
