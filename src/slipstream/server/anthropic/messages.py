"""Anthropic's /v1/messages and /v1/messages/count_tokens.

A body is translated into a chat (`body.py`) and answered like one. The differences:

1. An answer is a list of blocks: thinking, text, tool_use. A stream sends each block from beginning
   to end before the next.
2. Errors have Anthropic's shape, and `anthropic-version`, if sent, must be a known one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from slipstream.messages.finish_reason import FinishReason
from slipstream.outputs import PositionLogprobs
from slipstream.server.answers.blocks import BlockAnswer, ContentBlock, sse
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.route import GenerationRoute, renamed
from slipstream.server.answers.tools import written_arguments
from slipstream.server.anthropic.body import CountTokensRequest, MessagesRequest
from slipstream.server.http.errors import SHAPES, ApiError, bad_request
from slipstream.server.http.limits import counted, in_flight, read_as
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response
from slipstream.server.openai import chat
from slipstream.server.openai.models import served_model
from slipstream.server.state import ServerState

VERSIONS = ("2023-06-01", "2026-10-21")


class MessageAnswer(BlockAnswer):
    id_prefix = "msg_"

    def opening(self) -> bytes:
        return sse("message_start", {"message": self._message([], None, None, 0)})

    def begin(self, block: ContentBlock) -> bytes:
        return sse(
            "content_block_start",
            {"index": block.index, "content_block": _content(block, empty=True)},
        )

    def more(self, block: ContentBlock, text: str, logprobs: Sequence[PositionLogprobs]) -> bytes:
        kind, field = _DELTAS[block.kind]
        return sse(
            "content_block_delta", {"index": block.index, "delta": {"type": kind, field: text}}
        )

    def close(self, block: ContentBlock) -> bytes:
        return sse("content_block_stop", {"index": block.index})

    def end(self) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage(self.record.num_output_tokens)
        last = sse("message_delta", {"delta": delta, "usage": usage}) + sse("message_stop", {})
        return self._take_events() + last

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self.record.id) + b"\n\n"

    def collected(self) -> bytes:
        content = [_content(block) for block in self.blocks]
        return encode(self._message(content, *self._stop(), self.record.num_output_tokens))

    def _message(
        self, content: list[Any], reason: str | None, sequence: str | None, output: int
    ) -> dict[str, Any]:
        return {
            "id": self.identity["id"],
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(output),
            **({"context_management": {"applied_edits": []}} if self.asks_for_edits else {}),
        }

    @property
    def asks_for_edits(self) -> bool:
        """Whether the body requests edits of its conversation. None are ever made."""
        return "context_management" in self.record.hints

    def _usage(self, output: int) -> dict[str, Any]:
        cached, num_prompt = self.prompt_info[0].num_cached_tokens, self.record.num_prompt_tokens
        # only what was requested to be cached
        written = self.num_written_tokens if self.breakpoints else 0
        lives = max((s for _, s in self.breakpoints), default=0.0)
        thought = self.num_reasoning_tokens
        more = {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}
        return {
            "input_tokens": num_prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                f"ephemeral_{ttl}_input_tokens": written if (lives > 300.0) == (ttl == "1h") else 0
                for ttl in ("5m", "1h")
            },
            "cache_read_input_tokens": cached,
            "output_tokens": output,
            **more,
        }

    def _stop(self) -> tuple[str, str | None]:
        if self.finish_reason == FinishReason.LENGTH:
            ended = "model_context_window_exceeded" if self.ends_with_context else "max_tokens"
            return ended, None
        if isinstance(self.stop_reason, str):
            return "stop_sequence", self.stop_reason
        return "tool_use" if self.called else "end_turn", None


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: ContentBlock, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "call":
            return {
                "type": "tool_use",
                "id": f"toolu_{block.id}",
                "name": block.name,
                "input": written_arguments(text),
            }


def error_body(error: ApiError, request_id: str) -> bytes:
    """An error in Anthropic's format. Unknown fields and blocks, and prompts that are too long, get
    Anthropic's wording, by which clients omit the field or shorten the conversation. An error about
    `thread` gets the code on which clients resend the whole conversation."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message, place = error.named_message, (error.param or "").replace("[", ".").replace("]", "")
    if unknown := _UNKNOWN.fullmatch(error.message):
        message = f"{place}: Extra inputs are not permitted{unknown[1]}"
    elif error.message.startswith("Input tag "):
        message = f"{place.removesuffix('.type')}: {error.message}"
    if error.lengths is not None:
        prompt, asked, limit = error.lengths
        message = (
            f"prompt is too long: {prompt} tokens > {limit} maximum"
            if asked is None
            else f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {limit}, decrease input length "
            "or `max_tokens` and try again"
        )
    details: dict[str, Any] = {}
    if error.param == "thread":
        unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        details = {"details": unsupported}
    return encode(
        {
            "type": "error",
            "error": {"type": kind, "message": message, **details},
            "request_id": request_id,
        }
    )


_UNKNOWN = re.compile(r"(?s)Object contains unknown field `.*` \(in [^)]*\)(.*)")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

SHAPES["/v1/messages"] = error_body


def check_version(scope: Scope) -> None:
    given = dict(scope["headers"]).get(b"anthropic-version", b"").decode(errors="replace")
    if given and given not in VERSIONS:  # other servers accept requests without a version
        raise bad_request(
            f"the header anthropic-version must be one of {', '.join(VERSIONS)}",
            "anthropic-version",
        )


async def _prepare(state: ServerState, body: MessagesRequest, record: RequestRecord) -> Answer:
    made = body.chat(state)
    if body.ignores_thinking(state):
        record.hints.append("thinking")
    with renamed(body.param):
        made.check()
        answer = await chat.prepare(state, made, record, answer=MessageAnswer, cuts_max_tokens=True)
    assert isinstance(answer, MessageAnswer)
    answer.breakpoints = body.breakpoints
    return answer


class _Messages(GenerationRoute):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_version(scope)
        await super().__call__(scope, receive, send)


async def _count(state: ServerState, request: Request) -> Response:
    check_version(request.scope)
    body = await read_as(CountTokensRequest, request, state)
    body.check()
    body.model = served_model(state, body.model)
    made = body.chat(state)
    with renamed(body.param):
        made.check()
        async with in_flight(state, request.receive, request.scope["record"]):
            prompt = await chat.prompt_of(state, made)
    return json_response({"input_tokens": len(prompt.tokens)})


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/messages", _Messages(state, MessagesRequest, _prepare), methods=["POST"]),
        Route(
            "/v1/messages/count_tokens", counted(state, partial(_count, state)), methods=["POST"]
        ),
    ]
