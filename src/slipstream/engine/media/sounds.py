"""Prepares sounds of prompts for the engine: decodes them within bounds, makes their spectrograms, and hashes them. No torch.

A sound becomes one piece, in one row of tokens. Its numbers are the spectrogram's frames, float32 in the machine's byte order.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from slipstream.engine.audio.sound import as_samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.media.prepared import (
    KEY_BYTES,
    MediaPiece,
    MediaProcessor,
    PreparedMedia,
)
from slipstream.engine.threads.fair_threads import NUM_CORES, FairThreads
from slipstream.errors import RequestError
from slipstream.spec.media.audio import FRAMES_PER_STATE, HOP, SAMPLE_RATE
from slipstream.spec.media.sound import SoundSpec


class SoundProcessor(MediaProcessor):
    """Reader of sounds for one model: a file's bytes, samples at 16 kHz, or (samples, rate), of one window at most."""

    spec: SoundSpec

    def __init__(self, sound: SoundSpec, most: int) -> None:
        self.spec, self.most = sound, most
        count = min(8, NUM_CORES)
        self._pool = FairThreads("sounds", count + 1, per_client=count)

    def submit(self, source: Any, detail: str = "auto") -> Future[PreparedMedia]:
        return self._pool.submit(partial(self.prepare, source))

    def prepare(self, source: Any) -> PreparedMedia:
        """Reads a sound for the prompt. RequestError (field "file" or "audio") says what is wrong
        with it."""
        sound, audio = self.spec, self.spec.audio
        samples = as_samples(source, max_s=audio.window_s)
        count = sound.num_states(len(samples))
        if count < sound.pool:
            shortest = ((sound.pool - 1) * FRAMES_PER_STATE * HOP + 1) / SAMPLE_RATE
            raise RequestError(
                f"the sound is shorter than {shortest:.3f} s, which gives no token; leave it out, or send a longer one",
                field="audio",
            )
        mel = log_mel(np.pad(samples, (0, audio.num_samples - len(samples))), audio.num_mel_bins)
        frames = mel.T[: count * FRAMES_PER_STATE + 1]  # the last one is read by its neighbour
        frames = np.pad(frames, ((0, count * FRAMES_PER_STATE + 1 - len(frames)), (0, 0)))
        raw = np.ascontiguousarray(frames, np.float32).tobytes()
        key = blake2b(raw, digest_size=KEY_BYTES, person=b"sound").digest()
        num_tokens = count // sound.pool
        piece = MediaPiece(1, num_tokens, key, len(frames), audio.num_mel_bins, raw)
        return PreparedMedia(sound.prompt.text(num_tokens), (piece,))
