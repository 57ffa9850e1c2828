"""Prompts in the forms that users pass. No torch."""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypeAlias, TypedDict


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
