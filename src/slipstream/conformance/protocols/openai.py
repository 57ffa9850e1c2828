"""OpenAI's APIs for chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.conformance.protocols.base import (
    DONE,
    Ask,
    Body,
    ParsedAnswer,
    ParsedCall,
    Protocol,
    StreamEvent,
    Usage,
    number,
)
from slipstream.conformance.registry import expect

FINISH = {"tool_calls": "tools"}
LONG_PROMPT = (
    *("context_length_exceeded", "maximum context length", "exceeds the context window"),
    "exceeds the available context size",  # llama.cpp's, which clients know
)


def read_usage(body: Any) -> Usage | None:
    if not (usage := body.get("usage")):
        return None
    return Usage(
        prompt=number(usage, "prompt_tokens") or 0,
        completion=number(usage, "completion_tokens") or 0,
        total=number(usage, "total_tokens"),
        cached=number(usage, "prompt_tokens_details", "cached_tokens"),
        reasoning=number(usage, "completion_tokens_details", "reasoning_tokens"),
    )


def read_error(body: Any) -> tuple[str, str]:
    """(message, field) of `{"error": {"message", "type", "param", "code"}}`."""
    error = body["error"]
    expect(isinstance(error["message"], str) and error["type"], f"the error's shape: {error!r}")
    return f"{error['message']} {error.get('code') or ''}".strip(), error.get("param") or ""


class Completions(Protocol):
    """OpenAI's completions API: `POST /v1/completions`."""

    name, path, prompt_field = "completions", "/v1/completions", "prompt"
    long_prompt_words = LONG_PROMPT
    object_name = "text_completion"

    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        return {"prompt": ask.prompt} | self._common(ask, model, stream) | ask.extra

    def _common(self, ask: Ask, model: str, stream: bool) -> Body:
        body: Body = {"model": model, "max_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.schema is not None:
            given = {"name": "answer", "schema": ask.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": given}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def read(self, body: Any) -> ParsedAnswer:
        choice = body["choices"][0]
        return self._answer(choice["text"], "", (), choice["finish_reason"], body, body)

    def _answer(
        self,
        text: str,
        reasoning: str,
        calls: Sequence[ParsedCall],
        finish: Any,
        body: Any,
        raw: Any,
    ) -> ParsedAnswer:
        return ParsedAnswer(
            text=text,
            reasoning=reasoning,
            calls=tuple(calls),
            finish=FINISH.get(finish, finish),
            usage=read_usage(body),
            raw=raw,
        )

    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        text, finish = "", None
        last: Body = {}
        for data in (event.data for event in events if event.data != DONE):
            last = data if data.get("usage") else last
            for choice in data["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        return self._answer(text, "", (), finish, last, text)

    def order(self, events: Sequence[StreamEvent]) -> None:
        expect(events and events[-1].data == DONE, "the stream doesn't end with [DONE]")
        chunks = [event.data for event in events[:-1]]
        expect(all(isinstance(chunk, dict) for chunk in chunks), "[DONE] comes before the end")
        expect(all(event.name is None for event in events), "events have names")
        expect(len({chunk["id"] for chunk in chunks}) == 1, "the id changes within a stream")
        wrong = {chunk["object"] for chunk in chunks} - {self.object_name}
        expect(not wrong, f"object is {wrong}, not {self.object_name}")
        with_choice = [chunk for chunk in chunks if chunk["choices"]]
        finishes = [chunk["choices"][0]["finish_reason"] is not None for chunk in with_choice]
        expect(sum(finishes) == 1, f"{sum(finishes)} chunks have a finish_reason")
        expect(finishes[-1], "text comes after finish_reason")
        usages = [i for i, chunk in enumerate(chunks) if chunk.get("usage")]
        expect(usages, "stream_options.include_usage: no chunk has usage")
        expect(not chunks[-1]["choices"], "the last chunk has the usage and no choice")
        expect(usages[-1] == len(chunks) - 1, "the usage is not in the last chunk")

    def error(self, body: Any) -> tuple[str, str]:
        return read_error(body)


class Chat(Completions):
    """OpenAI's chat API: `POST /v1/chat/completions`."""

    name, path, prompt_field = "chat", "/v1/chat/completions", "messages"
    object_name = "chat.completion.chunk"

    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        messages = [{"role": "user", "content": ask.prompt}, *ask.history]
        body: Body = {"messages": messages} | self._common(ask, model, stream)
        if ask.tools is not None:
            functions = [
                {"name": name, "description": name, "parameters": schema}
                for name, schema in ask.tools.items()
            ]
            body["tools"] = [{"type": "function", "function": f} for f in functions]
        if ask.choice is not None:
            body["tool_choice"] = ask.choice
        if ask.choice == "required":
            body["parallel_tool_calls"] = False
        if ask.think:
            body["reasoning_effort"] = "low"
        return body | ask.extra

    def read(self, body: Any) -> ParsedAnswer:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [
            ParsedCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or []
        ]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return self._answer(
            message["content"] or "", reasoning, calls, choice["finish_reason"], body, message
        )

    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        text, reasoning, finish = "", "", None
        last: Body = {}
        calls: dict[int, list[str]] = {}
        for data in (event.data for event in events if event.data != DONE):
            last = data if data.get("usage") else last
            for choice in data["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
                for part in delta.get("tool_calls") or []:
                    call = calls.setdefault(part["index"], ["", "", ""])
                    function = part.get("function") or {}
                    call[0] += part.get("id") or ""
                    call[1] += function.get("name") or ""
                    call[2] += function.get("arguments") or ""
                finish = choice["finish_reason"] or finish
        found = [ParsedCall(*call) for _, call in sorted(calls.items())]
        raw: Body = {"role": "assistant", "content": text or None}
        if reasoning:
            raw["reasoning_content"] = reasoning
        if found:
            raw["tool_calls"] = self._written(found)
        return self._answer(text, reasoning, found, finish, last, raw)

    def order(self, events: Sequence[StreamEvent]) -> None:
        super().order(events)
        first = events[0].data["choices"]
        has_role = first and first[0]["delta"].get("role") == "assistant"
        expect(has_role, "the first delta has no role")

    def _written(self, calls: Sequence[ParsedCall]) -> list[Body]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def turn(self, answer: ParsedAnswer) -> list[Any]:
        return [answer.raw]

    def results(self, calls: Sequence[ParsedCall], texts: Sequence[str]) -> list[Any]:
        pairs = zip(calls, texts, strict=True)
        return [{"role": "tool", "tool_call_id": c.id, "content": text} for c, text in pairs]

    def called(self, calls: Sequence[ParsedCall], reasoning: str = "") -> list[Any]:
        thought = {"reasoning_content": reasoning} if reasoning else {}
        calls_of = {"tool_calls": self._written(calls)}
        return [{"role": "assistant", "content": None} | thought | calls_of]
