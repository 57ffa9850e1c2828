"""Pictures and audio of prompts. A RequestError says what this model can't take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from numbers import Number
from typing import Any

import numpy as np

from slipstream.engine.audio.sound import as_samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.text.chat_template import TAKES_TEXT
from slipstream.engine.vision.pictures import (
    MediaProcessor,
    PictureProcessor,
    PreparedPicture,
    placed,
    with_pictures,
)
from slipstream.errors import RequestError
from slipstream.messages.media import AudioWindow
from slipstream.params.prompts import Prompt
from slipstream.spec.description import ModelDescription
from slipstream.spec.media.sound import MediaSpec


class MediaReader:
    """Reads the pictures and audio of prompts for one model. `pictures` prepares pictures; None if
    the model takes none."""

    def __init__(
        self, description: ModelDescription | None, pictures: MediaProcessor | None
    ) -> None:
        self.description = description
        self.pictures = pictures

    @property
    def vision(self) -> MediaSpec:
        """RequestError if the model takes no pictures and no sounds."""
        return self.processor_for(0).vision

    @property
    def name(self) -> str:
        """The key of a prompt's pictures, or of its sounds, in `multi_modal_data`."""
        return "image" if self.pictures is None else self.pictures.vision.medium

    def parted(self, prompt: Prompt) -> tuple[Prompt, Sequence[PreparedPicture]]:
        """A prompt without its pictures or sounds, and these. They are prepared here, if they are not yet."""
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
        if not sources:  # a place in the prompt would be read as a word
            text, ids = rest.get("prompt"), rest.get("prompt_token_ids")
            with_pictures(text if isinstance(text, str) else "", (), processor.vision)
            placed(ids if isinstance(ids, list | tuple) else (), (), processor.vision)
        return rest, processor.prepare_all(sources)

    def _processor_of(self, data: dict[str, Any], count: int) -> MediaProcessor:
        """The processor of a prompt's pictures or sounds. RequestError if the model takes the others."""
        (name,) = data
        if self.pictures is not None and name != self.name:
            takes = "sounds, not pictures" if self.name == "audio" else "pictures, not sounds"
            raise RequestError(f"this model takes {takes}; leave them out", field=name)
        return self.processor_for(count)

    def audio_of(self, prompt: Prompt) -> AudioWindow | None:
        """The window of audio of a prompt, if the model reads audio. RequestError if only one of both is there."""
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
        has = self.description is not None and self.description.family.vision is not None
        return " with max_images=0" if has and self.pictures is None else ""

    def with_prepared(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts; pictures of all of them are prepared side by side."""
        found: list[Any] = list(prompts)
        begun: dict[int, list[Any]] = {}
        for i, prompt in enumerate(found):
            data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
            if self.pictures is not None and isinstance(data, dict) and set(data) == {self.name}:
                sources = _sources(data)
                pictures = self.processor_for(len(sources))
                begun[i] = [
                    x if isinstance(x, PreparedPicture) else pictures.submit(x) for x in sources
                ]
        try:
            for i, waiting in begun.items():
                ready = [x if isinstance(x, PreparedPicture) else x.result() for x in waiting]
                found[i] = {**found[i], "multi_modal_data": {self.name: ready}}
        finally:
            for x in chain.from_iterable(begun.values()):
                if not isinstance(x, PreparedPicture):
                    x.cancel()
        return found

    def check_pictures(self, count: int) -> None:
        """Raise RequestError if a prompt can't have this number of pictures."""
        if count:
            self.processor_for(count)

    def processor_for(self, count: int) -> MediaProcessor:
        """Processor of `count` pictures of a prompt. RequestError if it can't have that many."""
        if self.pictures is None:
            has = self.description is not None and self.description.family.vision is not None
            off = "pictures and sounds are off (max_images=0); leave them out"
            why = off if has else TAKES_TEXT
            raise RequestError(why, field="image")
        if count > self.pictures.most:
            what = "sounds" if self.name == "audio" else "pictures"
            raise RequestError(
                f"{count} {what}, and a prompt may have {self.pictures.most} (max_images)",
                field=self.name,
            )
        return self.pictures

    def processor_of_files(self) -> PictureProcessor:
        """Processor of picture files. RequestError if the model takes none."""
        if isinstance(found := self.processor_for(1), PictureProcessor):
            return found
        raise RequestError("this model takes sounds, not pictures; leave them out", field="image")


def _sources(data: dict[str, Any]) -> list[Any]:
    """The pictures or sounds of a prompt. A sound may be a list of samples, or (samples, rate)."""
    ((name, given),) = data.items()
    if name == "audio":
        several = isinstance(given, list) and not isinstance(next(iter(given), None), Number)
        return given if several else [given]
    return list(given) if isinstance(given, (list, tuple)) else [given]
