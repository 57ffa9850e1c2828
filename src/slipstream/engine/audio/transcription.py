"""Transcription of one sound, window by window, to segments. No torch.

1. `Transcription.next` returns the next window's prompt and sampling parameters. `take` processes the model's
   answer. The caller runs the requests, so many transcriptions share the engine's steps.
2. A sound that fits in one window is read once. In longer ones the model writes timestamps, and the next window
   begins at the last timestamp of a finished segment, as in transformers' long-form generation.
3. The first window determines the language, if the caller gives none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.engine.audio.languages import CODES, NAMES
from slipstream.engine.audio.segments import (
    TranscriptionOutput,
    TranscriptionSegment,
    TranscriptionWord,
)
from slipstream.engine.audio.sound import Samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.audio.words import token_times, words_of
from slipstream.errors import RequestError
from slipstream.messages.media import AlignmentQuestion, AudioWindow, Matrix
from slipstream.outputs import PositionLogprobs
from slipstream.params.checks import MAX_LOGPROBS
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import ModelDescription
from slipstream.spec.media.audio import (
    FRAMES_PER_STATE,
    HOP,
    SAMPLE_RATE,
    STATE_S,
    AudioSpec,
    SpeechSpec,
)
from slipstream.spec.media.speech_rules import SpeechRules

Task: TypeAlias = Literal["transcribe", "translate"]


class TextCodec(Protocol):
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Options of a transcription. `language`: a code or a name; None: the model detects it.
    `prompt`: a text before the first one, for names and style. `timestamps`: segments have times.
    `details`: segments have log-probabilities. `words`: segments have times and words."""

    task: Task = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None
    timestamps: bool = False
    details: bool = False
    words: bool = False


def speech_of(description: ModelDescription) -> tuple[SpeechSpec, AudioSpec]:
    """(special tokens, encoder spec) of a speech model. RequestError (field `model`) for other models."""
    encoder, speech = description.spec.encoder, description.speech
    if speech is None or encoder is None or encoder.audio is None:
        raise RequestError("this model takes no audio; serve a Whisper model", field="model")
    return speech, encoder.audio


@dataclass(slots=True)
class Transcription:
    speech: SpeechSpec
    audio: AudioSpec
    tokenizer: TextCodec
    options: TranscriptionOptions
    max_model_len: int
    spectrogram: npt.NDArray[np.float32]
    num_samples: int
    language: int | None = None  # token id
    seek: int = 0
    segments: list[TranscriptionSegment] = field(default_factory=list)
    num_output_tokens: int = 0
    _head: tuple[int, ...] = ()
    _prompt_ids: tuple[int, ...] = ()
    _forced: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def begin(
        cls,
        description: ModelDescription,
        tokenizer: TextCodec | None,
        samples: Samples,
        options: TranscriptionOptions,
        max_model_len: int,
    ) -> Transcription:
        """Check the options and compute the spectrogram. RequestError names an invalid field."""
        speech, audio = speech_of(description)
        if tokenizer is None:
            raise RequestError(
                "transcriptions need a tokenizer (skip_tokenizer_init is set)", field="model"
            )
        language = _language(speech, options)
        if options.words and not speech.alignment_heads:
            raise RequestError(
                "this checkpoint's generation_config.json names no alignment_heads, which tell times of words; take the "
                "original checkpoint's",
                field="timestamp_granularities",
            )
        length = audio.num_samples
        whole = np.pad(samples, (0, max(0, length - len(samples))))
        made = cls(
            speech, audio, tokenizer, options, max_model_len, log_mel(whole, audio.num_mel_bins),
            len(samples), language,
        )  # fmt: skip
        made._head = (*made._prompt(), speech.start)
        return made

    @property
    def is_long(self) -> bool:
        return self.num_samples > self.audio.num_samples

    @property
    def writes_times(self) -> bool:
        return self.options.timestamps or self.options.words or self.is_long

    @property
    def duration_s(self) -> float:
        return self.num_samples / SAMPLE_RATE

    @property
    def is_done(self) -> bool:
        return bool(self.seek >= self.spectrogram.shape[1])

    @property
    def language_name(self) -> str | None:
        """The language's English name, as OpenAI writes it. None if not yet known."""
        codes = {token: code for code, token in self.speech.languages.items()}
        code = codes.get(self.language) if self.language is not None else None
        return ("english" if not codes else None) if code is None else NAMES.get(code, code)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def output(self) -> TranscriptionOutput:
        return TranscriptionOutput(
            self.text, self.language_name, self.duration_s, tuple(self.segments)
        )

    def next(self) -> tuple[Prompt, SamplingParams]:
        """Prompt and sampling parameters of the window at `seek`."""
        speech, o = self.speech, self.options
        task = speech.translate if o.task == "translate" else speech.transcribe
        fixed = list[tuple[int, ...]]()
        if speech.languages:
            known = self.language
            fixed.append(tuple(speech.languages.values()) if known is None else (known,))
        if task is not None:
            fixed.append((task,))
        if not self.writes_times:
            fixed.append((speech.no_timestamps,))
        # The first answer token tells whether there is speech. If that is not requested, known tokens are part of the
        # prompt.
        is_known = all(len(some) == 1 for some in fixed) and not o.details
        head = (*self._head, *(some[0] for some in fixed)) if is_known else self._head
        self._prompt_ids, self._forced = head, () if is_known else tuple(fixed)
        rules = SpeechRules(
            end=speech.end,
            no_timestamps=speech.no_timestamps,
            first_timestamp=speech.first_timestamp if self.writes_times else None,
            max_first=speech.max_first_timestamp,
            forced=self._forced,
            suppressed=speech.suppressed,
            suppressed_first=speech.suppressed_first,
        )
        sampling = SamplingParams(
            temperature=o.temperature,
            seed=o.seed,
            max_tokens=self.max_model_len - len(head),
            detokenize=False,
            logprobs=MAX_LOGPROBS if o.details else None,
            speech=rules,
        )
        prompt: Any = {
            "prompt_token_ids": list(head),
            "multi_modal_data": {"audio": self._window()},
        }
        return prompt, sampling

    def question(self, token_ids: Sequence[int]) -> AlignmentQuestion | None:
        """The question whose answer `take` needs to compute word times in the window. As in
        transformers, it omits an answer's last token."""
        num_skipped = len(self._prompt_ids) + len(self._forced)
        read = (*self._prompt_ids, *token_ids[:-1])
        if not self.options.words or len(read) <= num_skipped:
            return None
        num_frames = -(-self.num_samples // HOP) - self.seek
        return AlignmentQuestion(
            audio=self._window(),
            token_ids=read,
            num_skipped=num_skipped,
            num_states=max(1, min(num_frames // FRAMES_PER_STATE, self.audio.num_states)),
        )

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None = None,
        attention: Matrix | None = None,
    ) -> list[TranscriptionSegment]:
        """Process the window's answer, and advance. Returns its segments. `attention`: the answer to `question`."""
        self.num_output_tokens += len(token_ids)
        num_forced, speech, seek = len(self._forced), self.speech, self.seek
        if self.language is None and speech.languages and token_ids:
            self.language = token_ids[0]
        no_speech = None
        if logprobs:
            found = logprobs[0]
            sure = found[speech.no_speech].logprob if speech.no_speech in found else -np.inf
            no_speech = float(np.exp(sure))
        tokens = list(token_ids[num_forced:])
        if tokens and tokens[-1] == speech.end:
            tokens.pop()
        ends = [0.0] * (len(tokens) + 1) if attention is None else token_times(attention)
        values = None if logprobs is None else [p.chosen.logprob for p in logprobs[num_forced:]]
        num_frames = min(self.spectrogram.shape[1] - seek, self.audio.num_frames)
        parts, moved = self._parts(tokens, num_frames)
        self.seek += moved if 0 < moved <= num_frames else num_frames
        offset, new = seek / FRAMES_PER_STATE * STATE_S, list[TranscriptionSegment]()
        for begin, end, start_step, end_step in parts:
            own = tuple(tokens[begin:end])
            text = self.decoded(own)
            average = None if values is None else float(np.mean(values[begin:end] or [0.0]))
            words = list[TranscriptionWord]()
            if self.options.words:
                at = [i for i in range(begin, end) if tokens[i] < speech.end]
                spans = [(ends[i - 1] if i else 0.0, ends[i]) for i in at]
                spans = [(round(offset + a, 2), round(offset + b, 2)) for a, b in spans]
                words = words_of([tokens[i] for i in at], spans, self.decoded, self.language_name)
            first_s, last_s = (
                min(offset + n * STATE_S, self.duration_s) for n in (start_step, end_step)
            )
            new.append(
                TranscriptionSegment(
                    start=round(first_s, 3),
                    end=round(max(first_s, last_s), 3),
                    text=text,
                    tokens=own,
                    seek=seek,
                    temperature=self.options.temperature,
                    avg_logprob=average,
                    no_speech_prob=no_speech,
                    words=tuple(words),
                )
            )
        new = [s for s in new if s.text.strip()]
        self.segments += new
        return new

    def decoded(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without timestamps and special tokens."""
        return self.tokenizer.decode([t for t in tokens if t < self.speech.end])

    def beginning(self, token_ids: Sequence[int]) -> str:
        """Text of an unfinished answer. Text after a timestamp may be transcribed again by the next
        window."""
        own = token_ids[len(self._forced) :]
        return self.decoded(list(takewhile(lambda token: token < self.speech.end, own)))

    def _parts(
        self, tokens: list[int], num_frames: int
    ) -> tuple[list[tuple[int, int, int, int]], int]:
        """((first, last + 1, start, end) of each segment in the window's tokens, with times in timestamp steps; number of
        frames to advance by)."""
        first, num_steps = self.speech.first_timestamp, num_frames // FRAMES_PER_STATE
        is_time = [token >= first for token in tokens]
        cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
        times = [token - first for token in tokens if token >= first]
        if not cuts:
            end = times[-1] if times and times[-1] else num_steps
            start = times[0] if len(times) > 1 or (times and is_time[0] and times[0] < end) else 0
            return [(0, len(tokens), start, end)], num_frames
        ends_with_time = is_time[-2:] == [False, True]
        if ends_with_time:
            cuts.append(len(tokens))
        parts, begin = list[tuple[int, int, int, int]](), 0
        for cut in cuts:
            parts.append((begin, cut, tokens[begin] - first, tokens[cut - 1] - first))
            begin = cut
        # Without a final timestamp the rest is unfinished: it is transcribed again from the last timestamp on.
        moved = num_frames if ends_with_time else (tokens[begin - 1] - first) * FRAMES_PER_STATE
        return parts, moved

    def _window(self) -> AudioWindow:
        size = self.audio.num_frames
        found = self.spectrogram[:, self.seek : self.seek + size]
        found = np.pad(found, ((0, 0), (0, size - found.shape[1])))
        return AudioWindow(num_mel_bins=self.audio.num_mel_bins, data=found.tobytes())

    def _prompt(self) -> tuple[int, ...]:
        """The last tokens of the prompt, as many as fit in half of the context."""
        text = self.options.prompt.strip()
        if not text:
            return ()
        if self.speech.previous is None:
            raise RequestError(
                "prompt: this checkpoint's generation_config.json names no prev_sot_token_id; leave it out",
                field="prompt",
            )
        tokens = self.tokenizer.encode(" " + text, add_special_tokens=False)
        kept = tuple(t for t in tokens if t < self.speech.end)[-(self.max_model_len // 2 - 1) :]
        return (self.speech.previous, *kept)


def _language(speech: SpeechSpec, o: TranscriptionOptions) -> int | None:
    """Token of the requested language; None if none is requested."""
    if o.task == "translate" and speech.translate is None:
        raise RequestError("this model writes English alone; it translates nothing", field="model")
    if o.language is None:
        return None
    name = o.language.strip().lower()
    code = CODES.get(name, name)
    if not speech.languages:
        if code == "en":
            return None
        raise RequestError(f"language={o.language!r}: this model knows English alone", field="language")  # fmt: skip
    if code not in speech.languages:
        some = ", ".join(sorted(speech.languages))
        raise RequestError(
            f"language={o.language!r} is none of the model's; use a code such as 'en', of {some}",
            field="language",
        )
    return speech.languages[code]
