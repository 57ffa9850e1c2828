"""Prompts in the forms that users pass. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any, NotRequired, Required, TypeAlias, TypedDict

from slipstream.errors import RequestError
from slipstream.params.options import RequestOptions


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]  # cached prefixes are shared only with prompts of the same salt


class TextPrompt(TypedDict):
    """A text prompt, in vLLM's form. It may name languages, for models that translate."""

    prompt: str
    source_language: NotRequired[str]
    target_language: NotRequired[str]
    cache_salt: NotRequired[str]


class MediaPrompt(TypedDict, total=False):
    """A prompt with images or audio, in vLLM's form: text or tokens, and {"image": an image or a
    list of images}.

    An image is a file's bytes, a PIL image, or an array uint8 [height, width, 3]. The prompt has
    the model's placeholder for each. A model with audio input accepts {"audio": one or a list}, a
    speech model one: a file's bytes, samples at 16 kHz, or (samples, rate), of one window at most.
    """

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Required[dict[str, Any]]


Prompt: TypeAlias = str | list[int] | TokensPrompt | TextPrompt | MediaPrompt


def plain_prompt(prompt: Any, options: RequestOptions) -> tuple[Any, RequestOptions]:
    """A prompt without the keys of vLLM's that are None, and its options with its `cache_salt`. RequestError if this is no
    text, or differs from that of the options."""
    plain = {key: value for key, value in prompt.items() if value is not None} or dict(prompt)
    if "cache_salt" not in plain:
        return plain, options
    salt = plain.pop("cache_salt")
    if not isinstance(salt, str) or not salt:
        raise RequestError("cache_salt must be a text that is not empty", field="cache_salt")
    if options.cache_salt not in ("", salt):
        raise RequestError("the prompt and its options differ in cache_salt", field="cache_salt")
    return plain, dataclasses.replace(options, cache_salt=salt)


def no_prompt(given: Any) -> RequestError:
    """The error about what is no prompt."""
    got = (
        f"a dict of {', '.join(map(str, given))}"
        if given and isinstance(given, dict)
        else type(given).__name__
    )
    return RequestError(
        f'a prompt is a string, {{"prompt": "…"}} or {{"prompt_token_ids": [...]}}, got {got}',
        field="prompt",
    )
