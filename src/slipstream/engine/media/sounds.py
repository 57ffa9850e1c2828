"""Prepares sounds of prompts for the engine: decodes them within limits, computes spectrograms, and hashes them. No torch.

A sound becomes one piece per window, in one run of tokens. A piece's data are the spectrogram's frames, float32 in native
byte order.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.audio.sound import as_samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.media.prepared import KEY_BYTES, MediaPiece, MediaProcessor, PreparedMedia
from slipstream.engine.threads.fair_threads import NUM_CORES, FairThreads
from slipstream.errors import RequestError
from slipstream.spec.media.audio import FRAMES_PER_STATE, HOP, SAMPLE_RATE
from slipstream.spec.media.sound import SoundSpec


class SoundProcessor(MediaProcessor):
    """Prepares sounds for one model: a file's bytes, samples at 16 kHz, or (samples, rate)."""

    spec: SoundSpec

    def __init__(self, sound: SoundSpec, most: int) -> None:
        self.spec, self.most = sound, most
        count = min(8, NUM_CORES)
        self._pool = FairThreads("sounds", count + 1, per_client=count)

    def submit(self, source: Any, detail: str = "auto") -> Future[PreparedMedia]:
        return self._pool.submit(partial(self.prepare, source))

    def prepare(self, source: Any) -> PreparedMedia:
        """Prepares a sound. RequestError (field "file" or "audio") if it is invalid."""
        sound, audio = self.spec, self.spec.audio
        samples = as_samples(source, max_s=audio.window_s * (sound.most_windows or 1))
        count = sound.num_states(len(samples))
        if count < sound.pool:
            shortest = ((sound.pool - 1) * FRAMES_PER_STATE * HOP + 1) / SAMPLE_RATE
            raise RequestError(
                f"the sound is shorter than {shortest:.3f} s, which gives no token; leave it out, or send a longer one",
                field="audio",
            )
        windows = -(-len(samples) // audio.num_samples)
        whole = np.pad(samples, (0, windows * audio.num_samples - len(samples)))
        frames = log_mel(whole, audio.num_mel_bins).T
        pieces = tuple(self._piece(x, count) for x in np.split(frames, windows))
        return PreparedMedia(sound.prompt.text([piece.num_tokens for piece in pieces]), pieces)

    def _piece(self, frames: npt.NDArray[np.float32], count: int) -> MediaPiece:
        """The frames of the first `count` states of a window, plus one, which the last state's convolution reads."""
        own = frames[: count * FRAMES_PER_STATE + 1]
        own = np.pad(own, ((0, count * FRAMES_PER_STATE + 1 - len(own)), (0, 0)))
        raw = np.ascontiguousarray(own, np.float32).tobytes()
        key = blake2b(raw, digest_size=KEY_BYTES, person=b"sound").digest()
        return MediaPiece(1, count // self.spec.pool, key, len(own), own.shape[1], raw)
