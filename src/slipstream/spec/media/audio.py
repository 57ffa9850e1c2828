"""Speech models as data: the layers before an audio encoder, and the tokens and rules of Whisper's texts. No torch.

Whisper (Radford et al. 2022, arXiv:2212.04356) reads 30 seconds at a time as a log-mel spectrogram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.base.files import parse_json
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.functions import Shape

SAMPLE_RATE = 16_000
HOP, WINDOW = 160, 400
"""Samples between the starts of two spectrogram frames, and samples in a frame, at 16 kHz."""
FRAMES_PER_STATE = 2
"""Spectrogram frames per encoder state: the second convolution has stride 2."""
STATE_S = FRAMES_PER_STATE * HOP / SAMPLE_RATE
"""Seconds per encoder state. Timestamps have the same resolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSpec:
    """Two convolutions of three frames with GELU, and learned positions, before an encoder's layers.

    A window has `num_states` states of `FRAMES_PER_STATE` frames each; a frame has `num_mel_bins` values.
    `median_filter`: width, in states, of the median filter that smooths attention when word times are computed.
    """

    num_mel_bins: int
    num_states: int
    median_filter: int = 7

    @property
    def num_frames(self) -> int:
        return FRAMES_PER_STATE * self.num_states

    @property
    def num_samples(self) -> int:
        return self.num_frames * HOP

    @property
    def window_s(self) -> float:
        return self.num_states * STATE_S

    def shapes(self, encoder: str, hidden_size: int) -> dict[str, Shape]:
        """Shapes of its parameters, whose names begin with `encoder`."""
        return {
            f"{encoder}.audio.first.weight": (hidden_size, 3 * self.num_mel_bins),
            f"{encoder}.audio.first.bias": (hidden_size,),
            f"{encoder}.audio.second.weight": (hidden_size, 3 * hidden_size),
            f"{encoder}.audio.second.bias": (hidden_size,),
            f"{encoder}.positions.weight": (self.num_states, hidden_size),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSpec:
    """Special tokens of a speech model, and tokens that it never generates, from its generation config.

    A transcript consists of: `previous` and a prompt (optional), `start`, a language, a task, then
    `no_timestamps` or timestamp tokens. A monolingual model has neither `languages` nor tasks.
    """

    start: int
    end: int
    no_timestamps: int
    previous: int | None = None
    languages: Mapping[str, int]
    transcribe: int | None = None
    translate: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    max_first_timestamp: int | None = None  # in units of `STATE_S` seconds
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs of cross attention from which word times are computed."""

    @property
    def first_timestamp(self) -> int:
        """The token of time 0. Each token after it stands for `STATE_S` seconds more."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """The token whose probability indicates that there is no speech."""
        return self.no_timestamps - 1


def read_speech(
    path: Path,
    generation: Mapping[str, Any],
    *,
    start: int,
    vocab_size: int,
    audio: AudioSpec,
    heads: Sequence[int],
) -> SpeechSpec:
    """Read the special tokens of a checkpoint. `heads`: number of heads in each decoder layer.
    UnsupportedModelError names a field that is missing or malformed."""
    processing = path / "preprocessor_config.json"
    if processing.is_file():
        _check_features(parse_json(processing.read_bytes()), audio)

    def token(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise CheckpointError(
                f"generation_config.json: {name} = {value!r} is no token of {vocab_size}",
                field=name,
            )
        return value

    def tokens(name: str, values: Any) -> tuple[int, ...]:
        if not isinstance(values or [], list):
            raise CheckpointError(f"generation_config.json: {name} is no list", field=name)
        return tuple(token(name, value) for value in values or ())

    if "no_timestamps_token_id" not in generation:
        raise UnsupportedModelError(
            "generation_config.json lacks no_timestamps_token_id; take that of the original checkpoint",
            field="no_timestamps_token_id",
        )
    ends = generation.get("eos_token_id")
    languages = generation.get("lang_to_id") or {}
    tasks = generation.get("task_to_id") or {}
    if not isinstance(languages, dict) or not isinstance(tasks, dict):
        raise CheckpointError(
            "generation_config.json: lang_to_id and task_to_id are no objects", field="lang_to_id"
        )
    previous = generation.get("prev_sot_token_id")
    none = token("no_timestamps_token_id", generation["no_timestamps_token_id"])
    if none + audio.num_states + 1 >= vocab_size:
        raise CheckpointError(
            f"the vocabulary of {vocab_size} has no token for each of {audio.num_states + 1} times behind "
            f"no_timestamps_token_id = {none}",
            field="no_timestamps_token_id",
        )
    latest = generation.get("max_initial_timestamp_index")
    return SpeechSpec(
        start=start,
        end=token("eos_token_id", ends[0] if isinstance(ends, list) and ends else ends),
        no_timestamps=none,
        previous=None if previous is None else token("prev_sot_token_id", previous),
        languages={
            str(name).strip("<|>"): token("lang_to_id", value) for name, value in languages.items()
        },
        transcribe=token("task_to_id", tasks["transcribe"]) if "transcribe" in tasks else None,
        translate=token("task_to_id", tasks["translate"]) if "translate" in tasks else None,
        suppressed=tokens("suppress_tokens", generation.get("suppress_tokens")),
        suppressed_first=tokens("begin_suppress_tokens", generation.get("begin_suppress_tokens")),
        max_first_timestamp=latest if isinstance(latest, int) else None,
        alignment_heads=_alignment_heads(generation.get("alignment_heads"), heads),
    )


def _alignment_heads(given: Any, heads: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The (layer, head) pairs in `alignment_heads`. CheckpointError if one is not a head of the model."""
    try:
        found = tuple((int(layer), int(head)) for layer, head in given or ())
        fits = all(0 <= i < len(heads) and 0 <= head < heads[i] for i, head in found)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(
            f"generation_config.json: alignment_heads = {given!r} must be pairs of a layer and a head of the decoder",
            field="alignment_heads",
        )
    return found


def _check_features(config: Mapping[str, Any], audio: AudioSpec) -> None:
    """Raise UnsupportedModelError unless the spectrogram settings are Whisper's."""
    for name, only in (
        ("feature_size", audio.num_mel_bins), ("sampling_rate", SAMPLE_RATE), ("hop_length", HOP), ("n_fft", WINDOW),
        ("chunk_length", int(audio.window_s)), ("dither", 0.0), ("padding_value", 0.0), ("do_normalize", False),
    ):  # fmt: skip
        if config.get(name) not in (None, only):
            raise UnsupportedModelError(
                f"preprocessor_config.json: {name} = {config[name]!r}: only {only!r} is supported",
                field=name,
            )
