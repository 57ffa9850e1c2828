"""OpenAI's Responses API."""

from __future__ import annotations

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
from slipstream.conformance.protocols.openai import LONG_PROMPT, read_error
from slipstream.conformance.registry import FailedError, expect

ENDS = ("response.completed", "response.incomplete")
DELTAS = {  # event that ends a series of deltas: (its field, the deltas)
    "response.output_text.done": ("text", "response.output_text.delta"),
    "response.reasoning_text.done": ("text", "response.reasoning_text.delta"),
    "response.function_call_arguments.done": (
        "arguments",
        "response.function_call_arguments.delta",
    ),
}


class Responses(Protocol):
    """OpenAI's Responses API: `POST /v1/responses`."""

    name, path = "responses", "/v1/responses"
    max_tokens, prompt_field = "max_output_tokens", "input"
    long_prompt_words = LONG_PROMPT

    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        said = {"role": "user", "content": ask.prompt}
        body: Body = {
            "model": model,
            "input": [said, *ask.history] if ask.history else ask.prompt,
            "max_output_tokens": ask.max_tokens,
            "temperature": ask.temperature,
        }
        if ask.tools is not None:
            body["tools"] = [
                {"type": "function", "name": name, "description": name, "parameters": schema}
                for name, schema in ask.tools.items()
            ]
        if ask.choice is not None:
            body["tool_choice"] = ask.choice
        if ask.choice == "required":
            body["parallel_tool_calls"] = False
        if ask.schema is not None:
            given = {"type": "json_schema", "name": "answer", "schema": ask.schema, "strict": True}
            body["text"] = {"format": given}
        if ask.think:
            body["reasoning"] = {"effort": "low"}
        if stream:
            body["stream"] = True
        return body | ask.extra

    def read(self, body: Any) -> ParsedAnswer:
        text, reasoning, calls = "", "", []
        for item in body["output"]:
            match item["type"]:
                case "message":
                    text += "".join(part["text"] for part in item["content"])
                case "reasoning":
                    parts = item.get("content") or item.get("summary") or []
                    reasoning += "".join(part["text"] for part in parts)
                case "function_call":
                    calls.append(ParsedCall(item["call_id"], item["name"], item["arguments"]))
        finish = {"completed": "tools" if calls else "stop", "incomplete": "length"}
        usage = body.get("usage")
        return ParsedAnswer(
            text=text,
            reasoning=reasoning,
            calls=tuple(calls),
            finish=finish.get(body["status"], body["status"]),
            usage=usage
            and Usage(
                prompt=number(usage, "input_tokens") or 0,
                completion=number(usage, "output_tokens") or 0,
                total=number(usage, "total_tokens"),
                cached=number(usage, "input_tokens_details", "cached_tokens"),
                reasoning=number(usage, "output_tokens_details", "reasoning_tokens"),
            ),
            raw=body,
        )

    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        """Answer in the last event, with the text of the deltas."""
        for event in reversed(events):
            if event.data != "[DONE]" and event.data["type"] in ENDS:
                answer = self.read(event.data["response"])
                break
        else:
            raise FailedError(f"no event of {', '.join(ENDS)}")
        deltas = "".join(
            event.data["delta"]
            for event in events
            if event.data != "[DONE]" and event.data["type"] == "response.output_text.delta"
        )
        expect(deltas == answer.text, f"deltas give {deltas!r}, the last event {answer.text!r}")
        return answer

    def order(self, events: Sequence[StreamEvent]) -> None:
        kinds = [event.data["type"] for event in events]
        expect(kinds[0] == "response.created", f"the first event is {kinds[0]}")
        expect(kinds[-1] in ENDS, f"the last event is {kinds[-1]}")
        expect(all(e.name == e.data["type"] for e in events), "an event's name is not its type")
        numbers = [event.data.get("sequence_number") for event in events]
        first = numbers[0]
        expect(isinstance(first, int), "events have no sequence_number")
        assert isinstance(first, int)
        expect(numbers == [first + i for i in range(len(numbers))], "sequence_number has gaps")
        open_items: dict[Any, str] = {}
        parts: dict[tuple[Any, str], str] = {}
        for event in events:
            data = event.data
            kind, index = data["type"], data.get("output_index")
            if kind == "response.output_item.added":
                expect(index not in open_items, f"item {index} is added twice")
                open_items[index] = data["item"]["id"]
            elif kind == "response.output_item.done":
                opened = open_items.get(index)
                expect(opened is not None, f"item {index} ends before it is added")
                expect(opened == data["item"]["id"], f"item {index} ends with another id")
            elif index is not None:
                expect(open_items.get(index) == data["item_id"], f"{kind} of an item not added")
                if kind.endswith(".delta") and isinstance(data.get("delta"), str):
                    parts[index, kind] = parts.get((index, kind), "") + data["delta"]
                elif kind in DELTAS:
                    field, deltas = DELTAS[kind]
                    whole = parts.pop((index, deltas), "")
                    expect(whole == data[field], f"{kind}: {data[field]!r}, but deltas {whole!r}")
        expect(not parts, f"{[kind for _, kind in parts]} without their end")
        ended = {item["id"] for item in events[-1].data["response"]["output"]}
        expect(ended == set(open_items.values()), "the last event has other items than the stream")

    def error(self, body: Any) -> tuple[str, str]:
        return read_error(body)

    def turn(self, answer: ParsedAnswer) -> list[Any]:
        return list(answer.raw["output"])

    def results(self, calls: Sequence[ParsedCall], texts: Sequence[str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    def called(self, calls: Sequence[ParsedCall], reasoning: str = "") -> list[Any]:
        content = [{"type": "reasoning_text", "text": reasoning}]
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}
        items = [
            {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments}
            for c in calls
        ]
        return [*([thought] if reasoning else []), *items]
