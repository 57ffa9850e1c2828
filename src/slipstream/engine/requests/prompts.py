"""Tokenizes prompts: text, token ids, images, sounds. RequestError for a prompt that this model can't process. No torch."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from slipstream.engine.media.prepared import MediaProcessor, PreparedMedia, expanded, with_media
from slipstream.engine.media.reader import MediaReader
from slipstream.engine.requests.languages import LANGUAGES, without_languages
from slipstream.engine.requests.over_context import MAX_CHARS_PER_TOKEN, hopeless
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ContextLengthError, RequestError
from slipstream.messages.requests import pack_ids
from slipstream.params.prompts import Prompt, no_prompt
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import ModelDescription

MAX_BORDERS = 2
"""Number of last messages at whose beginnings a prompt's recurrent states are stored."""


class PromptReader:
    """Reads prompts. `tokenizer` None: prompts must be token ids. `media`: processor of images or
    sounds, for models that accept them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        description: ModelDescription | None,
        media: MediaProcessor | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.description = description
        self.media = MediaReader(description, media)

    @property
    def of_texts(self) -> Tokenizer:
        """The tokenizer, for text prompts. RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer (skip_tokenizer_init is set); pass prompt_token_ids",
                field="prompt",
            )
        return self.tokenizer

    @property
    def model(self) -> ModelDescription:
        """The model's description. RequestError if only its vocabulary is known."""
        if self.description is None:
            raise RequestError("nothing but the model's vocabulary is known", field="model")
        return self.description

    def cut(self, tokens: list[int], sampling: SamplingParams, special: bool) -> list[int]:
        """Truncates to `truncate_prompt_tokens`: the last tokens, including the `special` ones that
        begin a text; with the side `right` the first tokens."""
        limit = sampling.truncate_prompt_tokens
        if limit == -1:
            limit = max(1, self.max_model_len - (sampling.max_tokens or 1))
        if limit is None:
            return tokens
        if sampling.truncation_side == "right":
            return tokens[:limit]
        before = self.tokenizer.prefix[:limit] if self.tokenizer is not None and special else ()
        if len(tokens) <= limit:
            return tokens
        return [*before, *tokens[len(tokens) - limit + len(before) :]]

    def borders(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Positions where the last two messages of a conversation begin, for models with recurrent states; otherwise none.

        A chat prompt ends with the special token that begins the answer's turn. The same token begins the other turns. The
        conversation's next request may replace the last message, so the states before it are worth keeping.
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

    def tokens(
        self,
        prompt: Prompt,
        add_special_tokens: bool,
        *,
        any_length: bool = False,
        media: Sequence[PreparedMedia] = (),
        salt: str | None = None,
    ) -> tuple[str | None, list[int], bytes]:
        """(text of a prompt or None, token ids, packed token ids (`TokenIds`)). `salt`: see `Tokenizer.encode`."""
        given: Any = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        if isinstance(given, dict) and not {*LANGUAGES}.isdisjoint(given):
            given = without_languages(given, self.description)
        match given:
            case {"prompt": str(said), **others} if not others:
                prompt = said  # vLLM's other form of a text prompt
        if isinstance(prompt, str):
            prompt = with_media(prompt, media, self.media.spec) if media else prompt
            tokenizer = self.check_text(prompt, any_length=any_length)
            text = prompt
            add_special_tokens &= not media or self.media.spec.prompt.takes_special_tokens
            tokens = [*tokenizer.encode(prompt, add_special_tokens, salt=salt)]
            packed = pack_ids(tokens)
        elif isinstance(given, dict) and set(given) == {"prompt_token_ids"}:
            given = given["prompt_token_ids"]
            text, (tokens, packed) = None, self.read_ids("prompt_token_ids", given)
            if media:
                tokens = [*expanded(tokens, media, self.media.spec, self.tokenizer)]
                packed = pack_ids(tokens)
        else:
            raise no_prompt(given)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        return text, tokens, packed

    def check_text(self, text: str, *, any_length: bool = False) -> Tokenizer:
        """The tokenizer for a text. RequestError if there is none, or if the text is hopelessly long."""
        tokenizer = self.of_texts
        if len(text) > self.max_model_len * MAX_CHARS_PER_TOKEN and not any_length:
            raise hopeless(self.max_model_len, len(text), "prompt")
        return tokenizer

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        """Raise RequestError if not all are tokens of this model."""
        if ids:
            self.read_ids(name, [*ids])

    def read_ids(self, name: str, given: Any) -> tuple[list[int], bytes]:
        """(token ids, packed token ids (`TokenIds`)). RequestError if not all are tokens of this model."""
        import msgspec  # imported here: only counting tokens needs no messages

        # avoids a Python loop: a step of the engine waits for the first 16,384 ids
        try:
            ids = msgspec.convert(given, list[int])
            if (packed := self._in_vocabulary(ids)) is not None:
                return ids, packed
        except msgspec.ValidationError:
            try:
                ids = list(given)
            except TypeError:
                raise RequestError(f"{name} is a list of ints, got {given!r}", field=name) from None
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
        return ids, pack_ids(ids)

    def _in_vocabulary(self, ids: list[int]) -> bytes | None:
        """The ids packed; None if one is not in the vocabulary."""
        try:
            packed = struct.pack(f"{len(ids)}I", *ids)  # takes half the time of `min` and `max`
        except struct.error:
            return None
        largest = int(np.frombuffer(packed, np.uint32).max(initial=0))
        return packed if largest < self.vocab_size else None

    def too_long(self, num_tokens: int) -> ContextLengthError:
        return ContextLengthError(
            f"the text has {num_tokens} tokens and this model takes {self.max_model_len}. Please reduce"
            " the length of the input prompt"
            + (
                ", or have it cut (truncate=True; over HTTP truncate_prompt_tokens: -1)"
                if self.description and self.description.spec.is_encoder
                else ""
            ),
            field="prompt",
        )
