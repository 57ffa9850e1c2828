"""Decodes audio files to samples at 16 kHz. No torch.

1. WAV is read here: PCM of 8 to 32 bits, and floats. Other formats (FLAC, MP3, Ogg) need soundfile (the extra audio).
2. Channels are averaged. Other rates are resampled by a windowed sinc.
3. The length in the file's header is checked before anything is decoded; too long files are refused.
"""

from __future__ import annotations

import io
import math
import struct
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError
from slipstream.spec.media.audio import SAMPLE_RATE

Samples: TypeAlias = npt.NDArray[np.float32]

MAX_RATE = 768_000
MIN_RATE = 1_000
CROSSINGS = 24
"""Zero crossings of the resampling filter on each side. Its error is then below 16 bits' noise."""
BETA = 9.0
ROLLOFF = 0.945
"""Fraction of the lower rate's band that the filter passes."""
MAX_PHASES = 1024
"""Maximum number of subsample phases with separate filters. Rates that need more, such as 767,999
Hz, interpolate between NUM_PHASES filters: a full table would take gigabytes."""
NUM_PHASES = 512
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def decode_audio(data: bytes, *, max_s: float) -> Samples:
    """Samples of an audio file. RequestError (field `file`) if it can't be read, or is longer than `max_s` seconds."""
    if not data:
        raise _refused("is empty")
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        channels, rate = _wav(data, max_s)
    else:
        channels, rate = _by_soundfile(data, max_s)
    if not channels.size:
        raise _refused("has no samples")
    mono = channels.mean(axis=1, dtype=np.float32) if channels.shape[1] > 1 else channels[:, 0]
    if not np.isfinite(mono).all():
        raise _refused("has samples that are no finite numbers")
    return resampled(mono, rate)


def read_samples(given: Any) -> Samples:
    """`as_samples`, also for paths, with a limit of one day."""
    if isinstance(given, (str, PathLike)):
        try:
            given = Path(given).read_bytes()
        except OSError as error:
            raise RequestError(f"the audio file can't be read: {error}", field="audio") from error
    return as_samples(given, max_s=86_400.0)


def as_samples(given: Any, *, max_s: float) -> Samples:
    """Samples of a file's bytes, of (array, rate), or of an array at 16 kHz, as in vLLM. Floats are
    in −1 … 1; integers are divided by the range of their dtype, int16 or int32."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return decode_audio(bytes(given), max_s=max_s)
    rate = SAMPLE_RATE
    if isinstance(given, tuple) and len(given) == 2:
        given, rate = given
    try:
        found = np.asarray(given)
        samples = found.astype(np.float32, casting="same_kind")  # no complex numbers
    except (TypeError, ValueError):
        found = samples = np.empty(0, np.float32)
    if samples.ndim != 1 or not samples.size:
        raise RequestError(
            "audio is a file's bytes, or an array of samples, or (samples, rate)", field="audio"
        )
    samples = samples / _scale(found)
    if not np.isfinite(samples).all():
        raise RequestError("audio has samples that are no finite numbers", field="audio")
    if wrong := _refusal(len(samples), rate, max_s):
        raise RequestError(f"audio {wrong}", field="audio")
    return resampled(samples, int(rate))


def _scale(found: npt.NDArray[Any]) -> np.float32:
    """Divisor of samples by their dtype. RequestError for integer dtypes that audio doesn't use."""
    if found.dtype.kind not in "iub" or not found.any():
        return np.float32(1)
    if found.dtype.name not in ("int16", "int32"):
        raise RequestError(
            f"audio has whole numbers of type {found.dtype.name}, whose range is not known; give floats from -1 to 1, or an "
            "array of int16 or int32",
            field="audio",
        )
    return np.float32(2.0 ** (8 * found.dtype.itemsize - 1))


def resampled(samples: Samples, rate: int) -> Samples:
    """The sound resampled to 16 kHz."""
    if rate == SAMPLE_RATE:
        return np.ascontiguousarray(samples, np.float32)
    shared = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // shared, rate // shared
    filters, half = _filters(up, down)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (half, half + down + 1))
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        # Output phase + i · up is at input position (phase · down) // up + i · down, plus a fraction of a sample.
        start, own = phase * down // up, len(range(phase, count, up))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)[start::down][:own]
        out[phase::up] = windows @ _filter(filters, phase * down % up, up)
    return out


def _filter(filters: Samples, part: int, up: int) -> Samples:
    """The filter for the phase part / up of a sample, interpolated if the table doesn't have it."""
    at, rest = divmod(part * (len(filters) - 1), up)
    found: Samples = filters[at]
    if rest:
        weight = np.float32(rest / up)
        found = found * (1 - weight) + filters[at + 1] * weight
    return found


@lru_cache(maxsize=8)
def _filters(up: int, down: int) -> tuple[Samples, int]:
    """(filters [phases + 1, 2 · half + 1] for equidistant phases from 0 to 1, half)."""
    num_phases = up if up <= MAX_PHASES else NUM_PHASES
    cutoff = ROLLOFF * min(1.0, up / down)  # relative to the input's band
    half = math.ceil(CROSSINGS / cutoff)
    offsets = np.arange(-half, half + 1)[None] - np.linspace(0.0, 1.0, num_phases + 1)[:, None]
    window = np.i0(BETA * np.sqrt(np.maximum(0.0, 1.0 - (offsets / (half + 1)) ** 2))) / np.i0(BETA)
    filters = np.sinc(cutoff * offsets) * cutoff * window
    return (filters / filters.sum(axis=1, keepdims=True)).astype(np.float32), half


def _wav(data: bytes, max_s: float) -> tuple[Samples, int]:
    """Samples [N, channels] and the rate."""
    at, form = 12, None
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if name == b"fmt " and size >= 16 and at + size <= len(data):
            kind, num_channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, at)
            if kind == _EXTENSIBLE and size >= 26:
                kind = int.from_bytes(data[at + 24 : at + 26], "little")
            form = kind, num_channels, rate, bits
        elif name == b"data":
            if form is None:
                raise _refused("is a WAV without a format before its data")
            # a stream's header may state too large a size
            return _pcm(data[at : at + size], *form, max_s)
        at += size + size % 2
    raise _refused("is a WAV without data")


def _pcm(
    data: bytes, kind: int, num_channels: int, rate: int, bits: int, max_s: float
) -> tuple[Samples, int]:
    width = bits // 8
    if (kind, bits) not in ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)):  # fmt: skip
        raise _refused(f"is a WAV of format {kind} with {bits} bits; send 16-bit PCM")
    if not 1 <= num_channels <= 64:
        raise _refused(f"is a WAV with {num_channels} channels")
    count = len(data) // (width * num_channels)
    _check(count, rate, max_s)
    raw = data[: count * width * num_channels]
    if kind == _FLOAT:
        values = np.frombuffer(raw, f"<f{width}").astype(np.float32)
    elif bits == 8:
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128.0) / 128.0
    elif bits == 24:
        wide = np.zeros((count * num_channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2.0**31
    else:
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2.0 ** (bits - 1)
    return values.reshape(count, num_channels), rate


def _by_soundfile(data: bytes, max_s: float) -> tuple[Samples, int]:
    try:
        import soundfile
    except (ImportError, OSError):
        raise _refused(
            "is no WAV, and other formats need soundfile on the server: the extra audio"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file.frames, file.samplerate, max_s)
            most = int(max_s * file.samplerate) + 1  # headers may be wrong
            found: Samples = file.read(most, dtype="float32", always_2d=True)
            _check(len(found), file.samplerate, max_s)
            return found, int(file.samplerate)
    except RequestError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise _refused(f"can't be read ({reason}); send WAV, FLAC, MP3 or Ogg") from None


def _check(count: int, rate: Any, max_s: float) -> None:
    if wrong := _refusal(count, rate, max_s):
        raise _refused(wrong)


def _refusal(count: int, rate: Any, max_s: float) -> str | None:
    """Error message for a sound's rate or length; None if both are valid."""
    is_number = isinstance(rate, (int, float, np.integer)) and not isinstance(rate, bool)
    if not is_number or not MIN_RATE <= rate <= MAX_RATE:
        return f"has a rate of {rate!r} Hz; from {MIN_RATE} to {MAX_RATE} are supported"
    if count <= max_s * rate:
        return None
    return f"is {count / rate:.1f} s long, and at most {max_s:g} s are taken; send it in parts"


def _refused(why: str) -> RequestError:
    return RequestError(f"the audio file {why}", field="file")
