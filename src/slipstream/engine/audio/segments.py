"""Transcriptions for users: texts with their times. No torch."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionWord:
    """A word, with the space before it, and its start and end in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionSegment:
    """A piece of text with its times. Log-probabilities are the model's own, before sampling rules."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    seek: int  # the frame at which its window begins
    temperature: float
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    words: tuple[TranscriptionWord, ...] = ()

    @property
    def compression_ratio(self) -> float:
        """Ratio of the text's bytes to their number after compression. Above 2.4 the text repeats
        itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


@dataclass(frozen=True, slots=True)
class TranscriptionOutput:
    """Transcription of a sound. `language`: its English name; None if unknown."""

    text: str
    language: str | None
    duration_s: float
    segments: tuple[TranscriptionSegment, ...]
