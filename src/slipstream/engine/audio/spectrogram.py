"""Log-mel spectrograms as Whisper's feature extractor makes them. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.audio.sound import Samples
from slipstream.spec.media.audio import HOP, SAMPLE_RATE, WINDOW

FRAMES_AT_ONCE = 3000
LOWEST = 1e-10
RANGE = 8.0
"""Dynamic range in decades: values further below the maximum are clamped."""


def log_mel(samples: Samples, num_mel_bins: int) -> npt.NDArray[np.float32]:
    """Samples at 16 kHz → float32 [mels, N / HOP]: Hann windows, powers, mel bands, log10 clamped to `RANGE` decades,
    scaled.

    Frames are centred, with the sound mirrored at its ends. The last one is dropped, as Whisper does.
    """
    mode: Any = "reflect" if len(samples) > WINDOW // 2 else "symmetric"
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode=mode)
    count = len(samples) // HOP
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WINDOW) / WINDOW)
    bands = mel_bands(num_mel_bins)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:count]
    out = np.empty((num_mel_bins, count), np.float32)
    for start in range(0, count, FRAMES_AT_ONCE):
        part = np.fft.rfft(frames[start : start + FRAMES_AT_ONCE] * window)
        power = part.real**2 + part.imag**2
        out[:, start : start + len(part)] = np.log10(np.maximum(bands @ power.T, LOWEST))
    if count:
        np.maximum(out, out.max() - np.float32(RANGE), out=out)
    return (out + np.float32(4.0)) / np.float32(4.0)


@lru_cache(maxsize=4)
def mel_bands(num_mel_bins: int) -> npt.NDArray[np.float64]:
    """Triangular filters [mels, WINDOW / 2 + 1] on Slaney's mel scale up to the Nyquist frequency, each with the same
    area."""
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), num_mel_bins + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - frequencies
    triangles = np.maximum(0.0, np.minimum(-slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]))  # fmt: skip
    return np.asarray(triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None])


_LINEAR_HZ, _LINEAR_MEL = 1000.0, 15.0
_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    """Mel scale: linear up to 1 kHz, then logarithmic."""
    if hertz < _LINEAR_HZ:
        return hertz * _LINEAR_MEL / _LINEAR_HZ
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HZ) / _STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    linear = mels * _LINEAR_HZ / _LINEAR_MEL
    return np.where(mels < _LINEAR_MEL, linear, _LINEAR_HZ * np.exp(_STEP * (mels - _LINEAR_MEL)))
