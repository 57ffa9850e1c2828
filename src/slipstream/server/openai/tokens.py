"""POST /tokenize and /detokenize, and the rendering of chat messages into tokens, which chat
completions share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.processor import in_thread_if_long
from slipstream.engine.vision.pictures import PreparedPicture, with_pictures
from slipstream.errors import ContextLengthError
from slipstream.server.answers.changing_lines import in_order
from slipstream.server.answers.media import read_pictures
from slipstream.server.http.errors import bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.replies import json_response
from slipstream.server.openai.models import require_model
from slipstream.server.openai.protocol import (
    DetokenizeRequest,
    Message,
    PicturePart,
    TokenizeRequest,
    message_dict,
)
from slipstream.server.state import ServerState, TokenizerProtocol
from slipstream.types import Prompt, TokensPrompt

_MAX_CHARS_PER_TOKEN = 128
"""Characters of a text for each token of the context. A longer text can't fit, and is refused
before it is tokenised."""


async def pictured_tokens(
    state: ServerState,
    messages: list[Message],
    /,
    *,
    add_generation_prompt: bool = True,
    **given: Any,
) -> tuple[list[int], list[PreparedPicture]]:
    """The prompt's tokens with the placeholders of its pictures, and the pictures. `given` are
    `template_tokens`'s other arguments."""
    parts = list[PicturePart]()
    plain = [message_dict(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]
    if state.settings.changing_lines == "dates":
        plain = in_order(plain)
    pictures = await read_pictures(state, parts)
    tokens = await template_tokens(
        state, plain, add_generation_prompt=add_generation_prompt, pictures=pictures, **given
    )
    return tokens, pictures


async def template_tokens(
    state: ServerState,
    plain: list[dict[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    any_length: bool = False,
    pictures: Sequence[PreparedPicture] = (),
    **variables: Any,
) -> list[int]:
    """The tokens of messages rendered by the chat template, which gets `variables`. The template
    writes special tokens itself, so by default the tokenizer adds none."""
    tokenizer = _tokenizer(state, "messages")

    def tokens() -> list[int]:
        text = tokenizer.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, **variables
        )
        if pictures:
            vision = state.engine.description.spec.vision
            assert vision is not None
            text = with_pictures(text, pictures, vision)
        return _encode(
            state,
            tokenizer,
            text,
            "messages",
            add_special_tokens=add_special_tokens,
            any_length=any_length,
        )

    # Tools and calls are rendered, too.
    return await in_thread_if_long(tokens, len(msgspec.json.encode((plain, variables))), tokenizer)


async def text_prompt(
    state: ServerState, text: str, *, add_special_tokens: bool = True, any_length: bool = False
) -> Prompt:
    """A prompt for the engine: `text` itself, or its tokens if no special tokens are to be
    added."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None or add_special_tokens:
        return text
    encoding = partial(
        _encode, state, tokenizer, text, "prompt", add_special_tokens=False, any_length=any_length
    )
    return TokensPrompt(prompt_token_ids=await in_thread_if_long(encoding, len(text), tokenizer))


def _encode(
    state: ServerState,
    tokenizer: TokenizerProtocol,
    text: str,
    param: str,
    *,
    add_special_tokens: bool,
    any_length: bool = False,
) -> list[int]:
    limit = state.engine.config.model.max_model_len
    if len(text) > limit * _MAX_CHARS_PER_TOKEN and not any_length:
        raise ContextLengthError(
            f"{param} make {len(text)} characters, far more than the context of {limit} tokens; shorten them",
            field=param,
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _tokenizer(state: ServerState, param: str) -> TokenizerProtocol:
    if state.engine.tokenizer is None:
        raise bad_request(
            f"{param}: this server runs without a tokenizer; send token ids to /v1/completions",
            param,
        )
    return state.engine.tokenizer


class Tokens:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def tokenize(self, request: Request) -> Response:
        state = self.state
        body = await read_as(TokenizeRequest, request, state)
        if body.model is not None:
            require_model(state, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            if body.add_generation_prompt is not None:
                raise bad_request(
                    "add_generation_prompt is for messages; leave it out", "add_generation_prompt"
                )
            tokenizer, special = _tokenizer(state, "prompt"), body.add_special_tokens is not False
            encoding = partial(
                _encode, state, tokenizer, body.prompt, "prompt", add_special_tokens=special
            )
            tokens = await in_thread_if_long(encoding, len(body.prompt), tokenizer)
        elif body.add_special_tokens:
            raise bad_request(
                "messages get their special tokens from the chat template; leave it out",
                "add_special_tokens",
            )
        else:
            tokenizer = _tokenizer(state, "messages")
            begins = body.add_generation_prompt is not False
            tokens, _ = await pictured_tokens(state, body.messages, add_generation_prompt=begins)
        strings = (
            [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        )
        limit = state.engine.config.model.max_model_len
        answer = {
            "count": len(tokens),
            "max_model_len": limit,
            "tokens": tokens,
            "token_strs": strings,
        }
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        state = self.state
        body = await read_as(DetokenizeRequest, request, state)
        if body.model is not None:
            require_model(state, body.model)
        tokenizer = _tokenizer(state, "tokens")
        for token in body.tokens:
            if token >= tokenizer.vocab_size:
                raise bad_request(
                    f"{token} is not a token id of this model (0 … {tokenizer.vocab_size - 1})",
                    "tokens",
                )
        decoding = partial(
            tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        text = await in_thread_if_long(decoding, len(body.tokens))
        return json_response({"prompt": text})
