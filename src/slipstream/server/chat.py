"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from slipstream.server.context import shorten
from slipstream.server.generation import Answer, encode
from slipstream.server.protocol import ChatRequest, message_dict, template_variables
from slipstream.server.record import RequestRecord
from slipstream.server.state import ServerState
from slipstream.server.token_details import choice_details, id_name, prompt_details
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
            event = self.event(index, _ROLE)
            if self.body.return_token_ids:
                event = b'data: {"prompt_token_ids":' + encode(self.prompt_info[0].token_ids) + b"," + event[7:]
            events.append(event)
        ids = b',"token_ids":' + encode(delta.token_ids) if self.body.return_token_ids and delta.token_ids else b""
        if delta.text or delta.logprobs or ids:
            logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta.logprobs))
            content = encode(delta.text)
            events.append(
                self.event(index, b'{"content":', content, b'},"logprobs":', logprobs, b',"finish_reason":null', ids, b"}")
            )
        if delta.finish_reason is not None:
            events.append(self.event(index, b'{},"logprobs":null,"finish_reason":', encode(delta.finish_reason), b"}"))
        return b"".join(events)

    def choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None if self.sampling.logprobs is None else self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **choice_details(self.body, choice),
        }

    def beside(self) -> dict[str, Any]:
        return prompt_details(self.body, self.prompt_info[0])

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any]:
        content = [{**self._entry(p.chosen), "top_logprobs": [self._entry(token) for token in p.top]} for p in positions]
        return {"content": content, "refusal": None}

    def _entry(self, token: Logprob) -> dict[str, Any]:
        name = id_name(token) if self.body.return_tokens_as_token_ids else token.token
        return {"token": name, "logprob": token.logprob, "bytes": list(token.token_bytes)}


async def prepare(
    state: ServerState, body: ChatRequest, record: RequestRecord, *, answer: type[Answer] = ChatAnswer
) -> Answer:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        state.engine.description.sampling,
        max_tokens=max_tokens,  # None: the rest of the context
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    tokenizer = state.engine.tokenizer
    variables = template_variables(body, None if tokenizer is None else tokenizer.chat_template)
    variables["add_special_tokens"] = bool(body.add_special_tokens)
    variables["any_length"] = body.truncate_prompt_tokens is not None
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.compress_prompt is None:
        tokens = await chat_tokens(state, body.messages, **variables)
        return answer(state, body, [TokensPrompt(prompt_token_ids=tokens)], sampling, record)
    plain = [message_dict(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    shorter, told = await shorten(state, plain, body.compress_prompt)
    tokens = await template_tokens(state, shorter, **variables)
    made = answer(state, body, [TokensPrompt(prompt_token_ids=tokens)], sampling, record)
    made.more_usage = {"prompt_compression": told}
    return made
