"""The groove, WAV in and out, the continuation task and its scores."""

import math

import numpy as np
import pytest
import torch

from ckda.experiments.audio.task import (
    RATE,
    Continuation,
    closure,
    cut,
    evaluate,
    groove,
    load_loop,
    wav_bytes,
)


@pytest.fixture(scope="module")
def task():
    return Continuation(cut(groove()))


def test_the_groove_is_the_same_everywhere_and_has_32_distinct_frames(task):
    frames = task.frames
    assert np.array_equal(groove(), groove())
    distance = np.sqrt(((frames[:, None] - frames[None]) ** 2).mean(-1)) + np.eye(32)
    assert distance.min() > 0.02
    assert np.abs(groove()).max() <= 0.9 + 1e-12
    # a fingerprint: another machine or numpy must not change the sound
    assert float(np.abs(frames).sum()) == pytest.approx(263.664, abs=0.01)


def test_standardisation_is_per_coordinate(task):
    standard = task.standard("cpu").double()
    assert standard.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(standard.std(0, correction=0), torch.ones(64, dtype=torch.float64), atol=1e-5, rtol=0)
    flat = task.frames.copy()
    flat[:, 3] = 0.25
    assert Continuation(flat).std[3] == 0.01
    torch.testing.assert_close(task.waveform(task.standard("cpu")), torch.from_numpy(task.frames), atol=1e-6, rtol=0)


def test_batches_are_shifts_of_the_loop_with_a_cue(task):
    x, phase = task.batch(16, 40, torch.Generator().manual_seed(0))
    assert torch.equal(phase, (phase[:, :1] + torch.arange(40)) % 32)
    assert torch.equal(x[:, :8], task.standard("cpu")[phase[:, :8]])
    assert torch.count_nonzero(x[:, 8:]) == 0
    _, every = Continuation(task.frames, balanced=True).batch(64, 9, torch.Generator())
    assert torch.equal(every[:, 0].bincount(), torch.full((32,), 2))
    with pytest.raises(ValueError, match="multiple of 32"):
        Continuation(task.frames, balanced=True).batch(40, 9, torch.Generator())


def test_loss_ignores_the_cue(task):
    _, phase = task.batch(3, 12, torch.Generator().manual_seed(0))
    output = task.standard("cpu")[phase][None].clone()
    output[:, :, :8] = 7.0
    assert task.losses(output, phase[None]).item() == 0
    output[:, :, 8:] += 0.5
    assert task.losses(output, phase[None]).item() == pytest.approx(0.25, rel=1e-5)


def test_scores_against_their_definition(task):
    noise = 0.3

    def model(x):  # predicts the right frame plus a constant, in the standardised domain
        phase = (torch.arange(32)[:, None] + torch.arange(x.shape[2])) % 32
        starts = [int((task.standard("cpu") - row[0]).abs().sum(1).argmin()) for row in x[0]]
        return (task.standard("cpu")[phase[starts]] + noise).expand_as(x)

    scores = evaluate(model, task, 2, 40, "cpu", batch=8)
    mse = noise**2 * float((task.std**2).mean())
    assert scores.mse(40) == pytest.approx([mse, mse], rel=1e-5)
    signal = float((task.frames**2).mean())  # 32 steps after the cue from every phase: each frame equally often
    assert scores.snr(40)[0] == pytest.approx(10 * math.log10(signal / mse), abs=1e-4)


def test_penalties(task):
    phase = (torch.arange(4)[:, None] + torch.arange(40)) % 32
    turn = torch.tensor(2 * math.pi / 32)
    A = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()]).view(1, 1, 2, 2)
    o = torch.stack([(turn * phase).cos(), (turn * phase).sin()], -1)[None, :, :, None]
    trace = {"o": o, "A": A}
    for name in ("closure", "defect", "turn", "turns"):
        assert task.penalty(name, trace, phase[None]).abs().item() < 1e-5, name
    slow = {"o": o * 0.99 ** torch.arange(40).view(40, 1, 1), "A": 0.99 * A}
    for name in ("closure", "defect", "turn", "turns"):
        assert task.penalty(name, slow, phase[None]).item() > 1e-3, name
    with pytest.raises(ValueError, match="no penalty 'shape'"):
        task.penalty("shape", trace, phase[None])


def test_closure_is_relative_and_per_head():
    phase = torch.arange(8).view(1, 1, 8) % 4
    o = torch.randn(1, 1, 8, 2, 3)
    scaled = o * torch.tensor([1.0, 100.0]).view(2, 1)
    torch.testing.assert_close(closure(o, phase, 4), closure(scaled, phase, 4))


# WAV -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_any_width_comes_back(tmp_path, width):
    import wave

    loop = groove()
    scale = 2 ** (8 * width - 1)
    whole = np.round(loop.T * (scale - 1)).astype(np.int64) + (128 if width == 1 else 0)
    data = b"".join(int(v).to_bytes(width, "little", signed=width > 1) for v in whole.reshape(-1))
    with wave.open(str(tmp_path / "loop.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(data)
    np.testing.assert_allclose(cut(load_loop(tmp_path / "loop.wav")), cut(loop), atol=1.5 / scale + 1e-6)


def test_wav_of_another_rate_is_resampled(tmp_path):
    t = np.arange(round(480 / 124 * 22_050)) / 22_050
    cycles = np.array([40, 100]) / (480 / 124)
    (tmp_path / "tone.wav").write_bytes(wav_bytes(0.4 * np.sin(2 * np.pi * cycles[:, None] * t), 22_050))
    loop = load_loop(tmp_path / "tone.wav")
    assert abs(loop.shape[1] - 480 / 124 * RATE) < 1
    s = np.arange(loop.shape[1]) / loop.shape[1]
    np.testing.assert_allclose(loop[0], 0.4 * np.sin(2 * np.pi * 40 * s), atol=2e-3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no WAV file"),
        (b"not a sound", "no WAV file"),
        (wav_bytes(np.zeros(0), 8000), "holds no samples"),
        (wav_bytes(0.1 * np.ones(8000), 8000), r"lasts 1.000 s; two bars at 124 BPM last 3.871 s .* --bpm 480.0"),
        (wav_bytes(np.zeros(30_968), 8000), "silent"),
    ],
)
def test_a_bad_wav_gets_a_clear_message(tmp_path, content, says):
    (tmp_path / "loop.wav").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_loop(tmp_path / "loop.wav")


def test_a_missing_wav_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_loop(tmp_path / "nothing.wav")
