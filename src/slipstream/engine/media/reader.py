"""Reads images and sounds of prompts, and raises errors for those that this model doesn't accept. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np

from slipstream.config import EngineConfig
from slipstream.engine.audio.sound import as_samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.media.pictures import PictureProcessor
from slipstream.engine.media.prepared import (
    PLURAL,
    MediaProcessor,
    PreparedMedia,
    placed,
    with_media,
)
from slipstream.engine.media.sounds import SoundProcessor
from slipstream.engine.text.chat_template import TAKES_TEXT
from slipstream.errors import RequestError
from slipstream.messages.media import AudioWindow
from slipstream.params.prompts import Prompt
from slipstream.spec.description import ModelDescription
from slipstream.spec.media.medium import MediaSpec
from slipstream.spec.media.sound import SoundSpec
from slipstream.spec.media.vision import ImageProcessing, VisionSpec


def media_processor(description: ModelDescription, config: EngineConfig) -> MediaProcessor | None:
    """The processor of a prompt's images or sounds; None for a model that accepts neither."""
    spec, processing = description.spec.media, description.processing
    if config.media is None:
        return None
    if isinstance(spec, SoundSpec):
        return SoundProcessor(spec, config.media.max_inputs)
    if isinstance(spec, VisionSpec) and isinstance(processing, ImageProcessing):
        return PictureProcessor(spec, processing, config.media.max_inputs)
    return None


class MediaReader:
    """Reads the images and sounds of prompts for one model. `processor` prepares them; None if the
    model accepts none."""

    def __init__(
        self, description: ModelDescription | None, processor: MediaProcessor | None
    ) -> None:
        self.description = description
        self.processor = processor

    @property
    def spec(self) -> MediaSpec:
        """The model's media spec. RequestError if it accepts neither images nor sounds."""
        return self.processor_for(0).spec

    @property
    def name(self) -> str:
        """Key of a prompt's images, or of its sounds, in `multi_modal_data`."""
        return "image" if self.processor is None else self.processor.spec.medium

    def parted(self, prompt: Prompt) -> tuple[Prompt, Sequence[PreparedMedia]]:
        """(a prompt without its images or sounds, these). They are prepared here unless they already are."""
        given: Any = prompt
        if not isinstance(given, dict) or "multi_modal_data" not in given:
            return prompt, ()
        rest: Any = {key: value for key, value in given.items() if key != "multi_modal_data"}
        data = given["multi_modal_data"]
        if isinstance(data, dict) and set(data) == {"audio"} and self.name != "audio":
            return rest, ()
        if not isinstance(data, dict) or set(data) not in ({"image"}, {"audio"}):
            raise RequestError(
                'multi_modal_data must be {"image": a picture, or a list of them} or {"audio": a sound}',
                field="multi_modal_data",
            )
        sources = _sources(data)
        processor = self._processor_of(data, len(sources))
        if not sources:  # a placeholder in the prompt would be read as text
            text, ids = rest.get("prompt"), rest.get("prompt_token_ids")
            with_media(text if isinstance(text, str) else "", (), processor.spec)
            placed(ids if isinstance(ids, list | tuple) else (), (), processor.spec)
        return rest, processor.prepare_all(sources)

    def _processor_of(self, data: dict[str, Any], count: int) -> MediaProcessor:
        """The processor of a prompt's images or sounds. RequestError if the model accepts only the other kind."""
        (name,) = data
        if self.processor is not None and name != self.name:
            takes = "sounds, not pictures" if self.name == "audio" else "pictures, not sounds"
            raise RequestError(f"this model takes {takes}; leave them out", field=name)
        return self.processor_for(count)

    def audio_of(self, prompt: Prompt) -> AudioWindow | None:
        """The audio window of a prompt, for models that read audio. RequestError if the model and the prompt disagree about
        audio."""
        encoder = None if self.description is None else self.description.spec.encoder
        audio = None if encoder is None else encoder.audio
        data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        given = data.get("audio") if isinstance(data, dict) else None
        if audio is None:
            if given is not None and self.name != "audio":
                raise RequestError(
                    f"this model takes no audio{self._off}; leave it out", field="audio"
                )
            return None
        if given is None:
            raise RequestError(
                "this model reads audio: send it to /v1/audio/transcriptions, LLM.transcribe or as "
                'multi_modal_data={"audio": samples}',
                field="prompt",
            )
        if isinstance(given, AudioWindow):
            return given
        samples = as_samples(given, max_s=audio.window_s)
        whole = np.pad(samples, (0, audio.num_samples - len(samples)))
        made = log_mel(whole, audio.num_mel_bins)
        return AudioWindow(num_mel_bins=audio.num_mel_bins, data=made.tobytes())

    @property
    def _off(self) -> str:
        has = self.description is not None and self.description.family.media is not None
        return " with max_images=0" if has and self.processor is None else ""

    def with_prepared(self, prompts: Sequence[Prompt], processor: MediaProcessor) -> list[Prompt]:
        """The prompts, with the images or sounds of all of them prepared in parallel."""
        found: list[Any] = list(prompts)
        given = dict[int, list[Any]]()
        for i, prompt in enumerate(found):
            data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
            if isinstance(data, dict) and set(data) == {self.name}:
                given[i] = _sources(data)
                self.check_media(len(given[i]))
        ready = iter(processor.prepare_all([x for own in given.values() for x in own]))
        for i, own in given.items():
            data = {self.name: list(islice(ready, len(own)))}
            found[i] = {**found[i], "multi_modal_data": data}
        return found

    def check_media(self, count: int) -> None:
        """Raise RequestError if a prompt can't have this number of images or sounds."""
        if count:
            self.processor_for(count)

    def processor_for(self, count: int) -> MediaProcessor:
        """Processor for `count` images or sounds of a prompt. RequestError if there are too many."""
        if self.processor is None:
            has = self.description is not None and self.description.family.media is not None
            off = "pictures and sounds are off (max_images=0); leave them out"
            why = off if has else TAKES_TEXT
            raise RequestError(why, field="image")
        if count > self.processor.most:
            raise RequestError(
                f"{count} {PLURAL[self.name]}, and a prompt may have {self.processor.most} (max_images)",
                field=self.name,
            )
        return self.processor

    def picture_processor(self) -> PictureProcessor:
        """Processor of image files. RequestError if the model accepts no images."""
        if isinstance(found := self.processor_for(1), PictureProcessor):
            return found
        raise RequestError("this model takes sounds, not pictures; leave them out", field="image")


def _sources(data: dict[str, Any]) -> list[Any]:
    """List of a prompt's images or sounds. A sound may be a list of samples, or (samples, rate)."""
    ((name, given),) = data.items()
    if name == "audio":
        several = isinstance(given, list) and not isinstance(next(iter(given), None), Number)
        return given if several else [given]
    return list(given) if isinstance(given, (list, tuple)) else [given]
