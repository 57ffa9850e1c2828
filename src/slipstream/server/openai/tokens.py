"""POST /tokenize and /detokenize, and the rendering of chat messages into tokens, which chat
completions share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.media.prepared import PreparedMedia, with_media
from slipstream.engine.requests.over_context import MAX_CHARS_PER_TOKEN, hopeless
from slipstream.engine.requests.processor import in_thread_if_long
from slipstream.params.prompts import Prompt, TokensPrompt
from slipstream.server.answers.changing_lines import in_order
from slipstream.server.answers.media import read_media
from slipstream.server.answers.tools import tool_dicts
from slipstream.server.http.errors import bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.replies import json_response
from slipstream.server.openai.messages import MediaPart, Message, Prompted, message_dict
from slipstream.server.openai.models import require_model
from slipstream.server.openai.pooled_bodies import Inputs
from slipstream.server.openai.protocol import TEMPLATE_FIELDS, DetokenizeRequest, TokenizeRequest
from slipstream.server.state import ServerState, TokenizerProtocol


class _OfMessages(Protocol):
    add_generation_prompt: Any
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None


async def tokens_with_media(
    state: ServerState,
    messages: list[Message],
    /,
    *,
    add_generation_prompt: bool = True,
    **given: Any,
) -> tuple[list[int], list[PreparedMedia]]:
    """(the prompt's tokens with placeholders, its media). `given`: the other arguments of
    `template_tokens`."""
    parts = list[MediaPart]()
    plain = [message_dict(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]
    if state.settings.changing_lines == "dates":
        plain = in_order(plain)
    media = await read_media(state, parts)
    tokens = await template_tokens(
        state, plain, add_generation_prompt=add_generation_prompt, media=media, **given
    )
    return tokens, media


async def template_tokens(
    state: ServerState,
    plain: list[dict[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    any_length: bool = False,
    media: Sequence[PreparedMedia] = (),
    **variables: Any,
) -> list[int]:
    """The tokens of messages rendered by the chat template, which gets `variables`. The template
    writes special tokens itself, so by default the tokenizer adds none."""
    tokenizer = _tokenizer(state, "messages")

    def tokens() -> list[int]:
        text = tokenizer.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, **variables
        )
        if media:
            spec = state.engine.description.spec.media
            assert spec is not None
            text = with_media(text, media, spec)
        return _encode(
            state,
            tokenizer,
            text,
            "messages",
            add_special_tokens=add_special_tokens,
            any_length=any_length,
        )

    # Tools and calls are rendered, too, so they count.
    return await in_thread_if_long(tokens, len(msgspec.json.encode((plain, variables))), tokenizer)


def message_variables(body: _OfMessages, begins: bool) -> dict[str, Any]:
    """The arguments of `template_tokens` for a body with messages. `begins`: an answer's beginning
    is added, unless the last message is to be continued."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "add_generation_prompt begins a message and continue_final_message continues one; leave one of them out"
        raise bad_request(message, "continue_final_message")
    goes_on = {"continue_final_message": True} if body.continue_final_message else {}
    if taken := TEMPLATE_FIELDS & set(body.chat_template_kwargs or ()):
        raise bad_request(
            f"chat_template_kwargs: {min(taken)} is set by the request's own fields",
            "chat_template_kwargs",
        )
    begun = begins and not body.continue_final_message
    return {**(body.chat_template_kwargs or {}), **goes_on, "add_generation_prompt": begun}


async def conversation(state: ServerState, body: Inputs) -> Prompt:
    """The tokens of a body's `messages`, which form one text."""
    if body.input is not None:
        raise bad_request("give either input or messages", "input")
    assert body.messages is not None
    plain = [message_dict(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    variables = message_variables(body, body.add_generation_prompt)
    tokens = await template_tokens(
        state,
        plain,
        add_special_tokens=bool(body.add_special_tokens),
        any_length=body.truncate_prompt_tokens is not None,
        **variables,
    )
    return TokensPrompt(prompt_token_ids=tokens)


async def without_mixes(
    state: ServerState, prompts: Sequence[Prompted], param: str, *, add_special_tokens: bool = True
) -> list[str | list[int]]:
    """The prompts, where mixes of texts and token ids are converted to ids. Special tokens are
    added only to a text at the beginning."""

    def ids(parts: list[str | int]) -> list[int]:
        found = list[int]()
        for i, part in enumerate(parts):
            begins = add_special_tokens and i == 0
            found += (
                [part]
                if isinstance(part, int)
                else _encode(
                    state, _tokenizer(state, param), part, param, add_special_tokens=begins
                )
            )
        return found

    made = list[str | list[int]]()
    for prompt in prompts:
        if isinstance(prompt, str):
            made.append(prompt)
        elif length := sum(len(part) for part in prompt if isinstance(part, str)):
            made.append(await in_thread_if_long(partial(ids, prompt), length))
        else:
            made.append([part for part in prompt if isinstance(part, int)])
    return made


async def text_tokens(state: ServerState, text: str) -> list[int]:
    """The tokens of a prompt with the tokenizer's special ones."""
    tokenizer = _tokenizer(state, "prompt")
    encoding = partial(_encode, state, tokenizer, text, "prompt", add_special_tokens=True)
    return await in_thread_if_long(encoding, len(text), tokenizer)


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
    if len(text) > limit * MAX_CHARS_PER_TOKEN and not any_length:
        raise hopeless(limit, len(text), param)
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
        if body.content is not None:
            return await self._pieces(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            for name in (
                *("add_generation_prompt", "continue_final_message"),
                *("chat_template_kwargs", "tools"),
            ):
                if getattr(body, name) not in (None, False):
                    raise bad_request(f"{name} is for messages; leave it out", name)
            tokenizer, special = _tokenizer(state, "prompt"), body.add_special_tokens is not False
            encoding = partial(
                _encode, state, tokenizer, body.prompt, "prompt", add_special_tokens=special
            )
            tokens = await in_thread_if_long(encoding, len(body.prompt), tokenizer)
        else:
            tokenizer = _tokenizer(state, "messages")
            variables = message_variables(body, body.add_generation_prompt is not False)
            if body.tools:
                if "tools" not in (tokenizer.tool_template or ""):
                    raise bad_request("this model's chat template knows no tools", "tools")
                variables["tools"] = tool_dicts(body.tools)
            variables["add_special_tokens"] = bool(body.add_special_tokens)
            tokens, _ = await tokens_with_media(state, body.messages, **variables)
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

    async def _pieces(self, body: TokenizeRequest) -> Response:
        """Answers in llama.cpp's format."""
        if body.prompt is not None or body.messages is not None:
            raise bad_request("give content, prompt or messages", "content")
        tokenizer, text = _tokenizer(self.state, "content"), body.content
        parts: list[Prompted] = [[text] if isinstance(text, str) else list(text or ())]
        (tokens,) = await without_mixes(
            self.state, parts, "content", add_special_tokens=body.add_special
        )
        if not body.with_pieces:
            return json_response({"tokens": tokens})
        made = []
        for token in tokens:
            assert isinstance(token, int)
            data = tokenizer.token_bytes(token)
            try:
                made.append({"id": token, "piece": data.decode()})
            except UnicodeDecodeError:
                made.append({"id": token, "piece": list(data)})
        return json_response({"tokens": made})

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
        return json_response({"prompt": text, "content": text})  # vLLM's name and llama.cpp's
