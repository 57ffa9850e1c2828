"""Answers made of consecutive blocks: reasoning, text and function calls.

The common part of /v1/responses and /v1/messages. A block has a beginning, pieces and an end. A
subclass formats the events of a stream; an unstreamed answer is built from the same blocks. There
is one choice. Its text is parsed as it arrives, streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from slipstream.engine.text.tool_formats.base import Arguments, BeginCall, Content, Event, Reasoning
from slipstream.engine.text.tools import Reading, is_cut
from slipstream.outputs import CompletionOutput, PositionLogprobs
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.openai.chat import ReasoningTokens, read_events


@dataclass(slots=True)
class ContentBlock:
    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""  # the called function's
    id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)  # of a text block

    @property
    def text(self) -> str:
        """The block's text; for a call, its arguments as JSON."""
        return "".join(self.pieces)


class BlockAnswer(Answer):
    kind = chunk_kind = id_prefix = ""
    is_plain = False

    def __init__(self, reading: Reading | None, *args: Any) -> None:
        super().__init__(*args)
        self.parser = None if reading is None else reading.parser()
        self.blocks: list[ContentBlock] = []
        self.stop_reason: str | int | None = None  # the stop string or token that ended the answer
        self._reasoning = ReasoningTokens.of(self, reading)
        self._events: list[bytes] = []
        self._untold_logprobs: list[PositionLogprobs] = []
        self.ended = False  # everything was read, so the next block to close is the last
        self._opened = self._closed = False

    # --- Written by subclasses -----------------------------------------------------------

    def opening(self) -> bytes:
        """The first events of a stream."""
        raise NotImplementedError

    def begin(self, block: ContentBlock) -> bytes:
        raise NotImplementedError

    def more(self, block: ContentBlock, text: str, logprobs: Sequence[PositionLogprobs]) -> bytes:
        raise NotImplementedError

    def close(self, block: ContentBlock) -> bytes:
        raise NotImplementedError

    # --- Reading -------------------------------------------------------------------------

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    def note(self, delta: CompletionOutput, now: float) -> None:
        super().note(delta, now)
        if self.stream and not self._opened:
            self._opened = True
            self._events.append(self.opening())
        events: list[Event] = []
        if self.parser is not None:
            reason = delta.finish_reason
            is_last = reason is not None
            events = read_events(self.parser, delta.text, last=is_last, cut=is_cut(reason))
        elif delta.text:
            events = [Content(delta.text)]
        self._untold_logprobs += delta.logprobs or ()
        for i, event in enumerate(events):
            self._read(event, is_last=i == len(events) - 1)
        if self._reasoning is not None:
            self._reasoning.note(delta)
        last = self.blocks[-1] if self.blocks else None
        if (
            last is not None
            and last.kind == "text"
            and self._untold_logprobs
            and delta.finish_reason is not None
        ):
            # adds log-probabilities of tokens without text, such as the end token
            self._add(last, "")
        if delta.finish_reason is not None:
            self.stop_reason, self.ended = delta.stop_reason, True
            self._close()

    def _read(self, event: Event, *, is_last: bool) -> None:
        kind: Literal["reasoning", "text", "call"] = "text"
        if isinstance(event, Reasoning):
            kind = "reasoning"
        elif isinstance(event, BeginCall | Arguments):
            kind = "call"
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != kind or isinstance(event, BeginCall):
            self._close()
            last = ContentBlock(
                kind, len(self.blocks), event.name if isinstance(event, BeginCall) else ""
            )
            # Derived from the request's id: the same if another replica resumes the answer.
            last.id = blake2b(f"{self.record.id} {last.index}".encode(), digest_size=12).hexdigest()
            self.blocks.append(last)
            self._closed = False
            self._add_event(self.begin, last)
        if isinstance(event, BeginCall):
            return
        self._add(last, event.text, with_logprobs=is_last)

    def _add(self, block: ContentBlock, text: str, *, with_logprobs: bool = True) -> None:
        logprobs: list[PositionLogprobs] = []
        if with_logprobs:
            logprobs, self._untold_logprobs = self._untold_logprobs, []
        block.pieces.append(text)
        if block.kind == "text":
            block.logprobs += logprobs
        self._add_event(self.more, block, text, logprobs)

    def _close(self) -> None:
        if self.blocks and not self._closed:
            self._closed = True
            self._add_event(self.close, self.blocks[-1])

    def _add_event(self, write: Any, *args: Any) -> None:
        if self.stream:
            self._events.append(write(*args))

    # --- Sending -------------------------------------------------------------------------

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The events written since the last call."""
        events, self._events = b"".join(self._events), []
        return events


def sse(kind: str, data: dict[str, Any]) -> bytes:
    """A named server-sent event. Its data repeat the name as `type`."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **data}) + b"\n\n"
