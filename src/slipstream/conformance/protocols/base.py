"""Protocol-independent requests and answers, and the parsing of streams."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from slipstream.conformance.registry import FailedError, expect

Body = dict[str, Any]
DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A protocol-independent request. `history` follows the prompt, in the protocol's own items;
    `extra` are fields of the protocol, which override others. The choice "required" requires one
    call only, because small models would go on calling."""

    prompt: str = "Write a short story about a lighthouse."
    history: tuple[Any, ...] = ()
    max_tokens: int = 24
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tools: Mapping[str, Body] | None = None
    choice: str | None = None
    schema: Body | None = None
    think: bool = False
    extra: Body = field(default_factory=dict)

    def but(self, **changes: Any) -> Ask:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool. `arguments` is the text received, or the object as JSON."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> Any:
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens; None if the protocol or the server does not report them. `prompt` includes
    cached tokens."""

    prompt: int
    completion: int
    total: int | None = None
    cached: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """A protocol-independent answer. `finish` is stop, length or tools; `raw` is the body, or what
    a client assembles from the stream."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    finish: str | None
    usage: Usage | None
    raw: Any
    stopped_by: str | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """Parts that an answer and its stream must have in common. Arguments cut off by
        `max_tokens` are left out, because their form is not defined."""
        cut = self.finish == "length"
        calls = [(call.name, None if cut else call.parsed()) for call in self.calls]
        return self.text, self.reasoning, calls, self.finish


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of a stream: its name if the protocol gives one, and its JSON (or `[DONE]`)."""

    name: str | None
    data: Any


def number(body: Mapping[str, Any], *path: str) -> int | None:
    """Integer under a path of names. None if there is none; FailedError if it is not a count."""
    value: Any = body
    for name in path:
        value = (value or {}).get(name)
    if value is None:
        return None
    expect(isinstance(value, int) and value >= 0, f"usage: {'.'.join(path)} is {value!r}")
    return int(value)


def text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FailedError(f"the stream is not UTF-8: {error}") from None


def json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise FailedError(f"no JSON in a stream: {text[:80]!r}") from None


def read_sse(raw: bytes) -> list[StreamEvent]:
    """Parse the events of a text/event-stream strictly: known fields, one event between empty
    lines, an empty line after the last."""
    text = text_of(raw).replace("\r\n", "\n")
    expect(text.endswith("\n\n"), f"the stream ends within an event: {text[-80:]!r}")
    events = []
    for block in filter(None, text.split("\n\n")):
        name, data = None, []
        for line in block.strip("\n").split("\n"):
            kind, colon, value = line.partition(":")
            known = kind in ("", "data", "event", "id", "retry") and colon
            expect(known, f"no line of an event stream: {line[:80]!r}")
            if kind == "data":
                data.append(value.removeprefix(" "))
            elif kind == "event":
                name = value.strip()
        if data:
            joined = "\n".join(data)
            events.append(StreamEvent(name, DONE if joined == DONE else json_of(joined)))
    return events


def read_ndjson(raw: bytes) -> list[StreamEvent]:
    text = text_of(raw)
    expect(text.endswith("\n"), f"the stream ends within a line: {text[-80:]!r}")
    return [StreamEvent(None, json_of(line)) for line in text.split("\n") if line.strip()]


class Protocol(abc.ABC):
    """A protocol: its requests, answers, streams, turns and errors."""

    name: ClassVar[str]
    path: ClassVar[str]
    media_type: ClassVar[str] = "text/event-stream"
    max_tokens: ClassVar[str] = "max_tokens"
    prompt_field: ClassVar[str] = "messages"
    long_prompt_words: ClassVar[tuple[str, ...]] = ()
    """Texts by which clients recognize that a prompt is too long."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def read_events(self, raw: bytes) -> list[StreamEvent]:
        return read_sse(raw)

    @abc.abstractmethod
    def body(self, ask: Ask, model: str, *, stream: bool = False) -> Body:
        """Request body for `ask`."""

    @abc.abstractmethod
    def read(self, body: Any) -> ParsedAnswer:
        """Parse an answer that is not streamed. A missing part raises KeyError, TypeError or IndexError."""

    @abc.abstractmethod
    def collect(self, events: Sequence[StreamEvent]) -> ParsedAnswer:
        """Assemble an answer from a stream like a client, without checking its order."""

    @abc.abstractmethod
    def order(self, events: Sequence[StreamEvent]) -> None:
        """Raise FailedError if events are missing, or not in the protocol's order."""

    @abc.abstractmethod
    def error(self, body: Any) -> tuple[str, str]:
        """(message, name of the field or "") from an error's body."""

    def turn(self, answer: ParsedAnswer) -> list[Any]:
        """Items that represent this answer in the next request's history, as a client stores them."""
        raise NotImplementedError

    def results(self, calls: Sequence[ParsedCall], texts: Sequence[str]) -> list[Any]:
        """Items that represent these calls' results in the next request's history."""
        raise NotImplementedError

    def called(self, calls: Sequence[ParsedCall], reasoning: str = "") -> list[Any]:
        """Items of an assistant turn with these calls, not generated by the server."""
        raise NotImplementedError
