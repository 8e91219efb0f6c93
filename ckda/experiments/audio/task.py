"""Periodic waveform continuation (app:waveform_continuation_details): hear half a bar, go on with the groove in silence.

A loop of 32 frames (sixteenth notes, 64 samples each) is cut at a random frame s. The model hears 8 frames and then nothing:

    step t        0       1    ...    7       8        9     ...
    input x_t   Y_s    Y_s+1   ...  Y_s+7     0        0     ...
    target        -       -    ...    -     Y_s+8    Y_s+9   ...        indices mod 32

Frames are standardised coordinate by coordinate for training; errors are measured on the waveform itself.
"""

import hashlib
import io
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckda.experiments.common.closure import closure

__all__ = [
    "BPM",
    "CUE",
    "FRAMES",
    "LENGTHS",
    "RATE",
    "SAMPLES",
    "Continuation",
    "Scores",
    "cut",
    "evaluate",
    "groove",
    "load_loop",
    "playable",
    "wav_bytes",
]

BPM, RATE = 124.0, 4096  #: beats a minute; samples a second of the rendering
FRAMES, SAMPLES, CUE = 32, 64, 8  #: frames a loop, samples a frame, frames that are heard
#: the paper's lengths, and three beyond
LENGTHS = (16, 24, 32, 40, *range(56, 265, 16), 512, 1024, 2048)
PLAY_RATE = 8192  #: of the WAV files and players

Array = NDArray[np.float64]


# The groove ----------------------------------------------------------------------------------------------------------


def _noise(num: int, seed: int) -> Array:
    """[num] white noise in [-1, 1) by an integer hash: the same on every machine and numpy version."""
    x = np.arange(num, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        x = ((x >> np.uint64(shift)) ^ x) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return x.astype(np.float64) / 2**31 - 1


def _pitch(semitones: float) -> float:
    """Frequency this many semitones above A1, 55 Hz."""
    return 55.0 * 2.0 ** (semitones / 12)


def _kick(t: Array) -> Array:
    phase = 2 * np.pi * (46 * t + 3.4 * (1 - np.exp(-t / 0.028)))
    return np.sin(phase) * np.exp(-t / 0.11)


def _hat(t: Array, seed: int, decay: float) -> Array:
    return np.diff(_noise(t.size + 1, seed)) * 0.5 * np.exp(-t / decay)


def _clap(t: Array, seed: int) -> Array:
    envelope = sum(np.where(t >= d, np.exp(-np.maximum(t - d, 0) / 0.012), 0.0) for d in (0.0, 0.011, 0.023))
    return _noise(t.size, seed) * (0.5 * envelope + 0.5 * np.exp(-t / 0.09))


def _bass(t: Array, semitones: float) -> Array:
    f = _pitch(semitones)
    tone = np.sin(2 * np.pi * f * t) + 0.45 * np.sin(4 * np.pi * f * t + 0.3) + 0.2 * np.sin(6 * np.pi * f * t)
    return tone * np.exp(-t / 0.13) * (1 - np.exp(-t / 0.004))


def _pulse(t: Array, semitones: float, duty: float) -> Array:
    phase = _pitch(semitones) * t % 1.0
    return np.where(phase < duty, 1.0, -duty / (1 - duty)) * np.exp(-t / 0.07) * (1 - np.exp(-t / 0.002))


#: two bars of sixteenths; a dot is a rest, a digit a level in ninths
_KICK = "9...9...9...9..59...9...9..49.6."
_HAT = "3.6.37614.6.37623.6.37654.6.3747"
_CLAP = "....8.......8..3....8.......8.45"
#: semitones above A1; None is a rest
_BASS = (
    *(0, None, 0, 12, None, 0, 3, None, 0, None, 7, 5, None, 3, -2, None),
    *(0, None, 0, 12, None, 0, 8, None, 5, None, 5, 17, None, 3, 2, 1),
)
_PULSE = (
    *(24, 27, None, 31, 34, None, 27, None, 24, 29, None, 31, None, 36, 34, None),
    *(24, 27, None, 32, 36, None, 27, 29, None, 29, 33, 36, None, 38, None, 26),
)


def groove() -> Array:
    """[2, n] two bars at 124 BPM, stereo, 4096 Hz: kick, hat, clap, bass and pulse. Tails wrap around: it is a loop.

    Example:
        >>> groove().shape
        (2, 15855)
    """
    num = round(FRAMES * 60 / BPM / 4 * RATE)
    stereo = np.zeros((2, num))

    def add(step: float, sound: Callable[[Array], Array], level: float, pan: float, seconds: float) -> None:
        start = step * num / FRAMES
        first = int(np.ceil(start))
        t = (np.arange(round(seconds * RATE)) + first - start) / RATE
        tone = level * sound(t) * np.minimum(1.0, (seconds - t) / 0.01).clip(0)
        for channel, gain in enumerate((np.sqrt((1 - pan) / 2), np.sqrt((1 + pan) / 2))):
            np.add.at(stereo[channel], (first + np.arange(t.size)) % num, gain * tone)

    for i in range(FRAMES):
        if _KICK[i] != ".":
            add(i, _kick, 0.09 * int(_KICK[i]), 0.0, 0.4)
        if _HAT[i] != ".":
            decay = 0.06 if i % 4 == 2 else 0.018
            add(i, lambda t, i=i, decay=decay: _hat(t, 11 + i, decay), 0.05 * int(_HAT[i]), 0.3, 0.2)  # type: ignore[misc]
        if _CLAP[i] != ".":
            add(i, lambda t, i=i: _clap(t, 101 + i), 0.05 * int(_CLAP[i]), -0.2, 0.3)  # type: ignore[misc]
        bass, pulse = _BASS[i], _PULSE[i]
        if bass is not None:
            add(i, lambda t, n=bass: _bass(t, n), 0.35, 0.0, 0.35)  # type: ignore[misc]
        if pulse is not None:
            pan, duty = (-0.5 if i % 2 else 0.5), 0.25 + 0.02 * (i % 8)
            add(i, lambda t, n=pulse, duty=duty: _pulse(t, n, duty), 0.16, pan, 0.25)  # type: ignore[misc]
    return stereo * 0.9 / np.abs(stereo).max()


def cut(stereo: Array) -> Array:
    """[channels, n] a loop -> [32, 64] frames: mean over channels, each sixteenth interpolated to 64 values.

    Example:
        >>> cut(groove()).shape
        (32, 64)
    """
    mono = np.append(stereo.mean(0), stereo[:, 0].mean())
    at = np.arange(FRAMES * SAMPLES) * (mono.size - 1) / (FRAMES * SAMPLES)
    return np.interp(at, np.arange(mono.size), mono).reshape(FRAMES, SAMPLES)


# WAV in and out ------------------------------------------------------------------------------------------------------


def load_loop(path: str | Path, bpm: float = BPM) -> Array:
    """[channels, n] two bars from a WAV file of any rate, brought to 4096 Hz as the periodic signal it is.

    Every complaint is a ValueError that says what the file is and what it may be.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, num = file.getparams()[:4]
            data = file.readframes(num)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; --wav takes a WAV file") from error
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(f"{path} is no WAV file of plain (PCM) samples: {error or 'it is empty'}") from error
    num = len(data) // (channels * width)
    if num == 0:
        raise ValueError(f"{path} holds no samples; it must hold two bars")
    seconds, wanted = num / rate, 2 * 4 * 60 / bpm
    if abs(seconds - wanted) > 0.02 * wanted:
        raise ValueError(
            f"{path} lasts {seconds:.3f} s; two bars at {bpm:g} BPM last {wanted:.3f} s (2% is forgiven). "
            f"If it is two bars of another tempo, say --bpm {480 / seconds:.1f}"
        )
    samples = _samples(data[: num * channels * width], width).reshape(num, channels).T
    if np.abs(samples).max() < 1e-4:
        raise ValueError(f"{path} is silent; there is nothing to continue")
    return _resample(samples, max(FRAMES * SAMPLES, round(seconds * RATE)))


def _samples(data: bytes, width: int) -> Array:
    """PCM of 1 to 4 bytes a sample -> [-1, 1)."""
    if width == 1:
        return np.frombuffer(data, np.uint8).astype(np.float64) / 128 - 1
    if width == 3:
        triples = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
        signed = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
        return (signed - (signed >> 23 << 24)).astype(np.float64) / 2**23
    return np.frombuffer(data, f"<i{width}").astype(np.float64) / 2 ** (8 * width - 1)


def _resample(samples: Array, num: int) -> Array:
    """[channels, n] -> [channels, num], exact for periodic signals below both Nyquist frequencies."""
    if samples.shape[1] == num:
        return samples
    spectrum = np.fft.rfft(samples, axis=1)
    return np.fft.irfft(spectrum[:, : num // 2 + 1], num, axis=1) * (num / samples.shape[1])


def playable(frames: Array, bpm: float = BPM) -> Array:
    """Frames [T, 64] -> samples at :data:`PLAY_RATE`, by linear interpolation."""
    flat = frames.reshape(-1)
    num = round(frames.shape[0] * 60 / bpm / 4 * PLAY_RATE)
    return np.interp(np.arange(num) * flat.size / num, np.arange(flat.size), flat)


def wav_bytes(samples: Array, rate: int = PLAY_RATE) -> bytes:
    """A 16-bit WAV file of samples [n] or [channels, n]; what exceeds [-1, 1] is clipped.

    Example:
        >>> wav_bytes(np.zeros(10))[:4]
        b'RIFF'
    """
    samples = np.atleast_2d(samples)
    pcm = np.nan_to_num(samples).clip(-1, 1 - 2**-15) * 2**15
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm.round().astype("<i2").T.tobytes())
    return buffer.getvalue()


# The task ------------------------------------------------------------------------------------------------------------


class Continuation:
    """Continue one loop from any of its frames.

    Args:
        frames: [32, 64] (or any [P, D]) the loop's frames. cue: how many are heard.
        balanced: draw every phase equally often in a batch (whose size must then be a multiple of P), not at random.

    Targets are phases, the index of each step's frame: what a loss or a penalty needs follows from them.

    Example:
        >>> task = Continuation(cut(groove()))
        >>> x, phase = task.batch(2, 12, torch.Generator().manual_seed(0))
        >>> x.shape, phase.shape, bool((x[:, 8:] == 0).all())
        (torch.Size([2, 12, 64]), torch.Size([2, 12]), True)
        >>> torch.equal(x[0, 3], task.standard("cpu")[phase[0, 3]])
        True
    """

    def __init__(self, frames: Array, cue: int = CUE, balanced: bool = False):
        self.frames, self.cue, self.balanced = frames, cue, balanced
        self.mean = frames.mean(0)
        self.std = np.maximum(frames.std(0), 0.01)
        self._standard: dict[str, Tensor] = {}

    @property
    def period(self) -> int:
        return self.frames.shape[0]

    def standard(self, device: str | torch.device) -> Tensor:
        """[P, D] standardised frames on this device."""
        if str(device) not in self._standard:
            self._standard[str(device)] = torch.from_numpy((self.frames - self.mean) / self.std).float().to(device)
        return self._standard[str(device)]

    def waveform(self, output: Tensor) -> Tensor:
        """Standardised frames [..., D] back to the waveform, in float64."""
        std, mean = (torch.from_numpy(x).to(output.device) for x in (self.std, self.mean))
        return output.double() * std + mean

    def at(self, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Inputs x [B, length, D] and phases [B, length] from the starting phases [B]."""
        phase = (start[:, None] + torch.arange(length, device=start.device)) % self.period
        x = self.standard(start.device)[phase]
        x[:, self.cue :] = 0
        return x, phase

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs x [size, length, D] and phases [size, length]."""
        device = generator.device
        if self.balanced:
            if size % self.period:
                raise ValueError(f"the batch is {size}; balanced phases need a multiple of {self.period}")
            return self.at(torch.arange(size, device=device) % self.period, length)
        return self.at(torch.randint(self.period, (size,), generator=generator, device=device), length)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean squared error of each replica [R] after the cue, from outputs [R, B, T, D] and phases [R, B, T]."""
        target = self.standard(output.device)[y[:, :, self.cue :]]
        return (output[:, :, self.cue :] - target).square().mean((1, 2, 3))

    def penalty(self, name: str, trace: dict[str, Tensor], y: Tensor) -> Tensor:
        """[R] one of four, from the model's trace (:meth:`ckda.experiments.audio.model.Continuer.forward`):

        closure   equal phase, equal state: within-phase variance of each head's raw readout over its energy
        defect    1 - |A|_F^2 / K of the blank-input transition A: zero exactly where A is orthogonal
        turn      |A^P - I|_F^2 / K: a period of silence is the identity
        turns     the mean of the same for 1, 4, 16 and 64 periods
        """
        if name == "closure":
            return closure(trace["o"][:, :, self.cue :], y[:, :, self.cue :], self.period)
        A = trace["A"]  # [R, H, K, K]
        K = A.shape[-1]
        if name == "defect":
            return (1 - A.square().sum((-2, -1)) / K).mean(-1)
        if name not in ("turn", "turns"):
            raise ValueError(f"there is no penalty {name!r}; there are 'closure', 'defect', 'turn' and 'turns'")
        eye = torch.eye(K, dtype=torch.float64, device=A.device)
        power = torch.linalg.matrix_power(A.double(), self.period)
        total = (power - eye).square().sum((-2, -1))
        if name == "turns":
            for _ in range(3):
                power = torch.linalg.matrix_power(power, 4)
                total = total + (power - eye).square().sum((-2, -1))
            total = total / 4
        return (total / K).mean(-1).to(A.dtype)

    def key(self) -> dict[str, Any]:
        """The frames (as a digest), the cue and how phases are drawn."""
        digest = hashlib.sha256(self.frames.astype("<f8").round(9).tobytes()).hexdigest()
        return {"frames": digest, "cue": self.cue, "balanced": self.balanced}


# Scores --------------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Errors of R replicas over all phases, on the waveform."""

    error: Tensor  #: [R, T] float64, mean squared error at each step
    signal: Tensor  #: [T] float64, mean square of the target
    heard: Tensor  #: [R, T, D] float64, the continuation from phase 0 (outputs during the cue are not scored)
    cue: int

    def mse(self, length: int) -> list[float]:
        """Mean squared error of each replica after the cue, up to this length."""
        return self.error[:, self.cue : length].mean(1).tolist()

    def snr(self, length: int) -> list[float]:
        """Signal-to-noise ratio in dB of each replica after the cue, up to this length (app:waveform_continuation_details)."""
        noise = self.error[:, self.cue : length].mean(1).clamp_min(1e-30)
        return (10 * torch.log10(self.signal[self.cue : length].mean() / noise)).tolist()


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor], task: Continuation, replicas: int, length: int, device: str, batch: int = 4
) -> Scores:
    """Run a model of R replicas, [R, B, T, D] -> [R, B, T, D], from every phase to `length`, in one pass each."""
    errors, signals, heard = [], [], None
    for start in torch.arange(task.period, device=device).split(batch):
        x, phase = task.at(start, length)
        said = task.waveform(model(x.expand(replicas, *x.shape)))
        target = torch.from_numpy(task.frames).to(device)[phase]
        heard = said[:, 0] if heard is None else heard
        errors.append((said - target).square().mean(-1).sum(1).cpu())
        signals.append(target.square().mean(-1).sum(0).cpu())
    assert heard is not None
    error, signal = torch.stack(errors).sum(0) / task.period, torch.stack(signals).sum(0) / task.period
    return Scores(error, signal, heard.cpu(), task.cue)


def best_of(values: Sequence[float]) -> int:
    """The index of the largest value."""
    return max(range(len(values)), key=values.__getitem__)
