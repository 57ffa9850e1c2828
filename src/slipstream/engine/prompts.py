"""Tokenises prompts: text, token ids, pictures. A prompt that this model can't take is a RequestError. No torch."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from itertools import chain
from operator import countOf
from typing import Any

import numpy as np

from slipstream.engine.audio.sound import as_samples
from slipstream.engine.audio.spectrogram import log_mel
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.vision.pictures import (
    PictureProcessor,
    PreparedPicture,
    expanded,
    with_pictures,
)
from slipstream.errors import ContextLengthError, RequestError
from slipstream.media import AudioWindow
from slipstream.spec.description import ModelDescription
from slipstream.spec.media.vision import VisionSpec
from slipstream.types import Prompt, SamplingParams

MAX_BORDERS = 2
"""Messages at whose beginnings a prompt's states are kept."""


class PromptReader:
    """`tokenizer` None: prompts are token ids. `pictures`: of a model that takes some."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        description: ModelDescription | None,
        pictures: PictureProcessor | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.description = description
        self.pictures = pictures

    def last(
        self, tokens: tuple[int, ...], sampling: SamplingParams, special: bool
    ) -> tuple[int, ...]:
        """The last tokens, as many as `truncate_prompt_tokens` says; the `special` ones that begin a text stay."""
        limit = sampling.truncate_prompt_tokens
        if limit == -1:
            limit = max(1, self.max_model_len - (sampling.max_tokens or 1))
        assert limit is not None
        before = self.tokenizer.prefix[:limit] if self.tokenizer is not None and special else ()
        return (
            tokens
            if len(tokens) <= limit
            else (*before, *tokens[len(tokens) - limit + len(before) :])
        )

    def borders(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Positions where the last two messages of a conversation begin, for models with recurrent states.

        A chat prompt ends with the special token that begins the answer's turn. The same token begins the other turns. The
        next request of the conversation may have another last message, so the states before it are worth keeping.
        """
        spec = None if self.description is None else self.description.spec
        if self.tokenizer is None or spec is None or not spec.is_recurrent:
            return ()
        special, found, opener = self.tokenizer.special_ids, list[int](), None
        for i in range(len(tokens) - 1, 0, -1):
            if opener is None and tokens[i] in special:
                opener = tokens[i]
            elif tokens[i] == opener:
                found.append(i)
                if len(found) == MAX_BORDERS:
                    break
        return tuple(found)

    @property
    def vision(self) -> VisionSpec:
        """RequestError if the model takes no pictures."""
        if self.pictures is None:
            has = self.description is not None and self.description.family.vision is not None
            why = "pictures are off (max_images=0)" if has else "this model takes no pictures"
            raise RequestError(f"{why}; leave them out", field="image")
        return self.pictures.vision

    def parted(self, prompt: Prompt) -> tuple[Prompt, Sequence[PreparedPicture]]:
        """A prompt without its pictures, and these. They are prepared here, if they are not yet."""
        given: Any = prompt
        if not isinstance(given, dict) or "multi_modal_data" not in given:
            return prompt, ()
        data = given["multi_modal_data"]
        if isinstance(data, dict) and set(data) == {"audio"}:
            return {key: value for key, value in given.items() if key != "multi_modal_data"}, ()  # type: ignore[return-value]
        if not isinstance(data, dict) or set(data) != {"image"}:
            raise RequestError(
                'multi_modal_data must be {"image": a picture, or a list of them} or {"audio": a sound}',
                field="multi_modal_data",
            )
        found = data["image"]
        sources = list(found) if isinstance(found, (list, tuple)) else [found]
        self.check_pictures(len(sources))
        assert self.pictures is not None
        rest: Any = {key: value for key, value in given.items() if key != "multi_modal_data"}
        return rest, self.pictures.prepare_all(sources)

    def audio_of(self, prompt: Prompt) -> AudioWindow | None:
        """The window of audio of a prompt, if the model reads audio. RequestError if only one of both is there."""
        encoder = None if self.description is None else self.description.spec.encoder
        audio = None if encoder is None else encoder.audio
        data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        given = data.get("audio") if isinstance(data, dict) else None
        if audio is None:
            if given is not None:
                raise RequestError("this model takes no audio; leave it out", field="audio")
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

    def with_prepared(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts; pictures of all of them are prepared side by side."""
        found: list[Any] = list(prompts)
        begun: dict[int, list[Any]] = {}
        for i, prompt in enumerate(found):
            data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
            if self.pictures is not None and isinstance(data, dict) and set(data) == {"image"}:
                given = data["image"]
                sources = list(given) if isinstance(given, (list, tuple)) else [given]
                self.check_pictures(len(sources))
                begun[i] = [
                    x if isinstance(x, PreparedPicture) else self.pictures.submit(x)
                    for x in sources
                ]
        try:
            for i, waiting in begun.items():
                ready = [x if isinstance(x, PreparedPicture) else x.result() for x in waiting]
                found[i] = {**found[i], "multi_modal_data": {"image": ready}}
        finally:
            for x in chain.from_iterable(begun.values()):
                if not isinstance(x, PreparedPicture):
                    x.cancel()
        return found

    def check_pictures(self, count: int) -> None:
        """RequestError if a prompt can't have so many."""
        if count and self.vision and self.pictures is not None and count > self.pictures.most:
            raise RequestError(
                f"{count} pictures, and a prompt may have {self.pictures.most} (max_images)",
                field="image",
            )

    def tokens(
        self,
        prompt: Prompt,
        add_special_tokens: bool,
        *,
        any_length: bool = False,
        pictures: Sequence[PreparedPicture] = (),
    ) -> tuple[str | None, tuple[int, ...]]:
        given: Any = prompt
        if (
            isinstance(given, dict)
            and set(given) == {"prompt"}
            and isinstance(given["prompt"], str)
        ):
            prompt = given["prompt"]  # vLLM's other way to say a text
        if isinstance(prompt, str):
            prompt = with_pictures(prompt, pictures, self.vision) if pictures else prompt
            self.check_text(prompt, any_length=any_length)
            assert self.tokenizer is not None
            text, tokens = (
                prompt,
                tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)),
            )
        elif isinstance(given, dict) and set(given) == {"prompt_token_ids"}:
            given = given["prompt_token_ids"]
            try:
                text, tokens = None, tuple(given)
            except TypeError:
                raise RequestError(
                    f"prompt_token_ids is a list of ints, got {given!r}", field="prompt_token_ids"
                ) from None
            self.check_ids("prompt_token_ids", tokens)
            tokens = expanded(tokens, pictures, self.vision, self.tokenizer) if pictures else tokens
        else:
            got = (
                f"a dict of {', '.join(map(str, given))}"
                if given and isinstance(given, dict)
                else type(prompt).__name__
            )
            raise RequestError(
                f'a prompt is a string, {{"prompt": "…"}} or {{"prompt_token_ids": [...]}}, got {got}',
                field="prompt",
            )
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        return text, tokens

    def check_text(self, text: str, *, any_length: bool = False) -> None:
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer (skip_tokenizer_init is set); pass prompt_token_ids",
                field="prompt",
            )
        # No token stands for more than a few dozen characters: a hopeless text is refused before it is tokenised.
        if len(text) > self.max_model_len * 128 and not any_length:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, far more than the context of {self.max_model_len} tokens; shorten it",
                field="prompt",
            )

    def check_ids(self, name: str, ids: Sequence[int] | dict[int, float]) -> None:
        # without a loop in Python: a step of the engine waits for the first 16,384
        if countOf(map(type, ids), int) == len(ids) and self._are_in_vocabulary(ids):
            return
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                hint = "; `tolist()` of an array gives ints" if hasattr(token, "tolist") else ""
                raise RequestError(
                    f"{name}: {token!r} is not a token id, which is an int{hint}", field=name
                )
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name}: {token!r} is not a token id of this model (0 … {self.vocab_size - 1})",
                    field=name,
                )

    def _are_in_vocabulary(self, ids: Collection[int]) -> bool:
        try:
            packed = struct.pack(f"{len(ids)}I", *ids)  # half of the time of `min` and `max`
        except struct.error:
            return False
        return int(np.frombuffer(packed, np.uint32).max(initial=0)) < self.vocab_size

    def too_long(self, num_tokens: int) -> ContextLengthError:
        return ContextLengthError(
            f"the text has {num_tokens} tokens and this model takes {self.max_model_len}; shorten it"
            + (
                " or have it cut (truncate=True; over HTTP truncate_prompt_tokens: -1)"
                if self.description and self.description.spec.is_encoder
                else ""
            ),
            field="prompt",
        )
