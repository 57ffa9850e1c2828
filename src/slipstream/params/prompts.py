"""Prompts, as users give them. No torch."""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypeAlias, TypedDict


class TokensPrompt(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt that is text, as vLLM writes it. For models that translate it may name languages."""

    prompt: str
    source_language: NotRequired[str]
    target_language: NotRequired[str]


class MediaPrompt(TypedDict, total=False):
    """A prompt with pictures or sounds, as in vLLM: a text or tokens, and {"image": a picture or a list of
    pictures}.

    A picture is a file's bytes, a PIL image, or an array uint8 [height, width, 3]. The prompt has
    the model's placeholder for each. A model that hears takes {"audio": a sound or a list of them}, a speech model one sound:
    a file's bytes, samples at 16 kHz, or (samples, rate), of one window at most.
    """

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Required[dict[str, Any]]


Prompt: TypeAlias = str | TokensPrompt | TextPrompt | MediaPrompt
