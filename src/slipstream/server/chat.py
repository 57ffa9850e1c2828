"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from slipstream.server.context import shorten
from slipstream.server.generation import Answer, encode
from slipstream.server.protocol import ChatRequest, message_dict, template_variables
from slipstream.server.record import RequestRecord
from slipstream.server.state import ServerState
from slipstream.server.tokens import chat_tokens, template_tokens
from slipstream.types import CompletionOutput, Logprob, PositionLogprobs, TokensPrompt

_ROLE = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The role, once; what is new; and the finish reason in a chunk of its own."""
        choice, events = self.choices[delta.index], []
        index = b'{"index":%d,"delta":' % delta.index
        if not choice.begun:
            choice.begun = True
            events.append(self.event(index, _ROLE))
        if delta.text or delta.logprobs:
            logprobs = b"null" if delta.logprobs is None else encode(_logprobs(delta.logprobs))
            events.append(self.text_event(delta.index, encode(delta.text), logprobs))
        if delta.finish_reason is not None:
            events.append(self.event(index, b'{},"logprobs":null,"finish_reason":', encode(delta.finish_reason), b"}"))
        return b"".join(events)

    def text_event(self, index: int, text: bytes, logprobs: bytes = b"null") -> bytes:
        head = b'{"index":%d,"delta":{"content":' % index
        return self.event(head, text, b'},"logprobs":', logprobs, b',"finish_reason":null}')

    def choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None if self.sampling.logprobs is None else _logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


def _logprobs(positions: list[PositionLogprobs]) -> dict[str, Any]:
    content = [{**_entry(p.chosen), "top_logprobs": [_entry(token) for token in p.top]} for p in positions]
    return {"content": content, "refusal": None}


def _entry(token: Logprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}


async def prepare(state: ServerState, body: ChatRequest, record: RequestRecord) -> ChatAnswer:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        state.engine.description.sampling,
        max_tokens=max_tokens,  # None: the rest of the context
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tokenizer = state.engine.tokenizer
    variables = template_variables(body, None if tokenizer is None else tokenizer.chat_template)
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.compress_prompt is None:
        tokens = await chat_tokens(state, body.messages, **variables)
        return ChatAnswer(state, body, [TokensPrompt(prompt_token_ids=tokens)], sampling, record)
    plain = [message_dict(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    shorter, told = await shorten(state, plain, body.compress_prompt)
    tokens = await template_tokens(state, shorter, **variables)
    answer = ChatAnswer(state, body, [TokensPrompt(prompt_token_ids=tokens)], sampling, record)
    answer.more_usage = {"prompt_compression": told}
    return answer
