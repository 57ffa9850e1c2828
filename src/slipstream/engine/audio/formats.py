"""Transcriptions as subtitles (SubRip, WebVTT) and as OpenAI's `verbose_json`. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from slipstream.engine.audio.segments import TranscriptionSegment
from slipstream.engine.audio.transcription import Task


def subtitles(segments: Sequence[TranscriptionSegment], kind: Literal["srt", "vtt"]) -> str:
    """Writes the text of an .srt or .vtt file."""
    point, numbered = (",", True) if kind == "srt" else (".", False)
    cues = (
        f"{i}\n" * numbered
        + f"{_clock(s.start, point)} --> {_clock(s.end, point)}\n{s.text.strip()}\n\n"
        for i, s in enumerate(segments, 1)
    )
    return "WEBVTT\n\n" * (not numbered) + "".join(cues)


def verbose(
    task: Task,
    language: str | None,
    duration_s: float,
    text: str,
    segments: Sequence[TranscriptionSegment],
    granularities: Collection[str] = ("segment",),
) -> dict[str, Any]:
    """The `verbose_json` object, with the requested `granularities` ("segment", "word")."""
    made: dict[str, Any] = {
        "task": task,
        "language": "english" if task == "translate" else language,
        "duration": round(duration_s, 3),
        "text": text,
    }
    if "word" in granularities:
        words = [word for segment in segments for word in segment.words if word.text.strip()]
        made["words"] = [{"word": w.text.strip(), "start": w.start, "end": w.end} for w in words]
    if "segment" in granularities:
        made["segments"] = [_segment(i, s) for i, s in enumerate(segments)]
    return made


def _segment(index: int, s: TranscriptionSegment) -> dict[str, Any]:
    return {
        "id": index, "seek": s.seek, "start": s.start, "end": s.end, "text": s.text, "tokens": list(s.tokens),
        "temperature": s.temperature, "avg_logprob": s.avg_logprob, "compression_ratio": s.compression_ratio,
        "no_speech_prob": s.no_speech_prob,
    }  # fmt: skip


def _clock(seconds: float, point: str) -> str:
    """A time in subtitle format: hours, minutes, seconds and milliseconds."""
    ms = round(seconds * 1000)
    return (
        f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}{point}{ms % 1000:03d}"
    )
