"""Anthropic's messages API."""

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
)
from slipstream.conformance.registry import expect

FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tools",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
CHOICES = {"required": "any", "auto": "auto", "none": "none"}
DELTAS = {"text": "text_delta", "tool_use": "input_json_delta"}


def arguments(text: str) -> Any:
    """Object that the deltas form together; the text itself, if `max_tokens` cut it off."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


class Messages(Protocol):
    """Anthropic's messages API: `POST /v1/messages`."""

    name, path = "messages", "/v1/messages"
    long_prompt_words = ("prompt is too long", "exceed context limit")

    def headers(self, api_key: str | None) -> dict[str, str]:
        key = {"x-api-key": api_key} if api_key else {}
        return {"anthropic-version": "2023-06-01"} | key

    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        body: Body = {
            "model": model,
            "messages": [{"role": "user", "content": ask.prompt}, *ask.history],
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
        }
        if ask.stop:
            body["stop_sequences"] = list(ask.stop)
        if ask.tools is not None:
            body["tools"] = [
                {"name": name, "description": name, "input_schema": schema}
                for name, schema in ask.tools.items()
            ]
        if ask.choice is not None:
            body["tool_choice"] = {"type": CHOICES[ask.choice]}
        if ask.choice == "required":
            body["tool_choice"]["disable_parallel_tool_use"] = True
        if ask.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": ask.schema}}
        if ask.think:
            body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            body["max_tokens"] = 1024 + ask.max_tokens
        if stream:
            body["stream"] = True
        return body | ask.extra

    def read(self, body: Any) -> ParsedAnswer:
        blocks = body["content"]
        usage = body.get("usage")
        cached = usage and number(usage, "cache_read_input_tokens")
        written = (usage and number(usage, "cache_creation_input_tokens")) or 0
        reason = body["stop_reason"]
        return ParsedAnswer(
            text="".join(b["text"] for b in blocks if b["type"] == "text"),
            reasoning="".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            calls=tuple(
                ParsedCall(b["id"], b["name"], json.dumps(b["input"]))
                for b in blocks
                if b["type"] == "tool_use"
            ),
            finish=FINISH.get(reason, reason),
            usage=usage
            and Usage(
                prompt=(number(usage, "input_tokens") or 0) + (cached or 0) + written,
                completion=number(usage, "output_tokens") or 0,
                cached=cached,
            ),
            raw=body,
            stopped_by=body.get("stop_sequence"),
        )

    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        body: Body = {}
        inputs: dict[int, str] = {}
        for data in (event.data for event in events):
            match data["type"]:
                case "message_start":
                    body = {**data["message"], "content": list(data["message"]["content"])}
                case "content_block_start":
                    body["content"].append(dict(data["content_block"]))
                case "content_block_delta":
                    block, delta = body["content"][data["index"]], data["delta"]
                    match delta["type"]:
                        case "text_delta":
                            block["text"] += delta["text"]
                        case "thinking_delta":
                            block["thinking"] += delta["thinking"]
                        case "signature_delta":
                            block["signature"] = delta["signature"]
                        case "input_json_delta":
                            index = data["index"]
                            inputs[index] = inputs.get(index, "") + delta["partial_json"]
                case "content_block_stop":
                    if (text := inputs.get(data["index"])) is not None:
                        body["content"][data["index"]]["input"] = arguments(text)
                case "message_delta":
                    body |= data["delta"]
                    body["usage"] = {**(body.get("usage") or {}), **(data.get("usage") or {})}
        return self.read(body)

    def order(self, events: Sequence[StreamEvent]) -> None:
        events = [event for event in events if event.data["type"] != "ping"]
        expect(all(e.name == e.data["type"] for e in events), "an event's name is not its type")
        kinds = [event.data["type"] for event in events]
        expect(kinds[0] == "message_start", f"the first event is {kinds[0]}")
        ends = ["message_delta", "message_stop"]
        expect(kinds[-2:] == ends, f"the last events are {kinds[-2:]}, not {ends}")
        expect("input_tokens" in events[0].data["message"]["usage"], "message_start has no usage")
        expect("output_tokens" in events[-2].data["usage"], "message_delta has no usage")
        current: int | None = None
        begun = 0
        block = ""
        for event in events[1:-2]:
            data = event.data
            index = data.get("index")
            if data["type"] == "content_block_start":
                expect(current is None, f"block {index} begins before block {current} ends")
                expect(index == begun, f"block {index} comes where block {begun} should")
                current, begun, block = index, begun + 1, data["content_block"]["type"]
            else:
                expect(index == current, f"{data['type']} of block {index}, which is not open")
                if data["type"] == "content_block_stop":
                    current = None
                else:
                    kind = data["delta"]["type"]
                    expect(DELTAS.get(block, kind) == kind, f"{kind} in a block of {block}")
        expect(current is None, f"block {current} does not end")

    def error(self, body: Any) -> tuple[str, str]:
        error = body["error"]
        expect(body["type"] == "error", 'the body has no "type": "error"')
        expect(isinstance(error["message"], str) and error["type"], f"the error's shape: {error!r}")
        return error["message"], ""

    def turn(self, answer: ParsedAnswer) -> list[Any]:
        return [{"role": "assistant", "content": answer.raw["content"]}]

    def results(self, calls: Sequence[ParsedCall], texts: Sequence[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def called(self, calls: Sequence[ParsedCall], reasoning: str = "") -> list[Any]:
        thought = {"type": "thinking", "thinking": reasoning, "signature": ""}
        blocks = [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in calls
        ]
        return [{"role": "assistant", "content": [*([thought] if reasoning else []), *blocks]}]
