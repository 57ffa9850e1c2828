"""Ollama's chat API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slipstream.conformance.protocols.base import (
    Ask,
    Body,
    ParsedAnswer,
    ParsedCall,
    Protocol,
    StreamEvent,
    Usage,
    number,
    read_ndjson,
)
from slipstream.conformance.registry import expect


class Ollama(Protocol):
    """Ollama's chat API: `POST /api/chat`. Arguments of calls are objects, and calls may have no
    ids."""

    name, path, media_type = "ollama", "/api/chat", "application/x-ndjson"
    max_tokens = "num_predict"

    def read_events(self, raw: bytes) -> list[StreamEvent]:
        return read_ndjson(raw)

    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        options: Body = {"num_predict": ask.max_tokens, "temperature": ask.temperature}
        if ask.seed is not None:
            options["seed"] = ask.seed
        if ask.stop:
            options["stop"] = list(ask.stop)
        body: Body = {
            "model": model,
            "messages": [{"role": "user", "content": ask.prompt}, *ask.history],
            "options": options,
            "stream": stream,
        }
        if ask.tools is not None:
            functions = [
                {"name": name, "description": name, "parameters": schema}
                for name, schema in ask.tools.items()
            ]
            body["tools"] = [{"type": "function", "function": f} for f in functions]
        if ask.schema is not None:
            body["format"] = ask.schema
        if ask.think:
            body["think"] = True
        return body | ask.extra

    def read(self, body: Any) -> ParsedAnswer:
        expect(body["done"] is True, "the answer is not `done`")
        message = body["message"]
        calls = tuple(
            ParsedCall(call.get("id") or "", call["function"]["name"], json.dumps(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        )  # fmt: skip
        has_usage = "eval_count" in body
        reason = body["done_reason"]
        return ParsedAnswer(
            text=message["content"],
            reasoning=message.get("thinking") or "",
            calls=calls,
            finish="tools" if calls and reason == "stop" else reason,
            usage=Usage(number(body, "prompt_eval_count") or 0, number(body, "eval_count") or 0)
            if has_usage
            else None,
            raw=message,
        )

    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        message: Body = {"role": "assistant", "content": ""}
        for data in (event.data for event in events):
            part = data["message"]
            message["content"] += part.get("content") or ""
            if part.get("thinking"):
                message["thinking"] = message.get("thinking", "") + part["thinking"]
            if part.get("tool_calls"):
                message["tool_calls"] = [*message.get("tool_calls", []), *part["tool_calls"]]
        return self.read({**events[-1].data, "message": message})

    def order(self, events: Sequence[StreamEvent]) -> None:
        done = [event.data["done"] for event in events]
        expect(done == [False] * (len(done) - 1) + [True], "`done` is true once, in the last line")
        expect(all("error" not in event.data for event in events), "a line has an error")
        expect(all(e.data.get("model") and e.data.get("created_at") for e in events),
               "a line has no `model` or `created_at`")  # fmt: skip
        missing = {"eval_count", "prompt_eval_count", "total_duration"} - events[-1].data.keys()
        expect(not missing, f"the last line has no {', '.join(sorted(missing))}")

    def error(self, body: Any) -> tuple[str, str]:
        expect(isinstance(body["error"], str), f"the error's shape: {body!r}")
        return body["error"], ""

    def turn(self, answer: ParsedAnswer) -> list[Any]:
        return [answer.raw]

    def results(self, calls: Sequence[ParsedCall], texts: Sequence[str]) -> list[Any]:
        pairs = zip(calls, texts, strict=True)
        return [{"role": "tool", "tool_name": call.name, "content": text} for call, text in pairs]

    def called(self, calls: Sequence[ParsedCall], reasoning: str = "") -> list[Any]:
        thought = {"thinking": reasoning} if reasoning else {}
        written = [
            {"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in calls
        ]
        return [{"role": "assistant", "content": "", "tool_calls": written} | thought]
