"""The format of gpt-oss, harmony: messages with a header (a channel, and for calls a recipient) and a body. The
channel "analysis" is reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.engine.text.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer, drop
from slipstream.params.answer_forms import ReasoningMarkers

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, ENDS = "<|start|>", ("<|end|>", "<|call|>", "<|return|>")
_CALL = re.compile(r"to=functions\.([\w.-]{1,256})")


class Harmony(ToolFormat):
    name = "harmony"
    markers = (CHANNEL, MESSAGE, CONSTRAIN, START, *ENDS)
    call_marks = (CONSTRAIN, "<|call|>")
    reasons = True

    @classmethod
    def matches(cls, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def before(self, writer: Writer) -> str:
        to_end = writer.up_to(ENDS[0])
        writer.rules["analysis"] = (
            f"{writer.texts(CHANNEL, 'analysis', MESSAGE)} {to_end} {writer.texts(START, 'assistant')}"
        )
        return "analysis?"

    def final(self, writer: Writer) -> str:
        return writer.texts(CHANNEL, "final", MESSAGE)

    def call(self, tool: Tool, writer: Writer) -> str:
        head = writer.texts(
            CHANNEL, f"commentary to=functions.{tool.name} ", CONSTRAIN, "json", MESSAGE
        )
        return f"{head} {writer.schema(tool.parameters)}"

    def between(self, writer: Writer) -> str | None:
        return None

    def free(self, writer: Writer) -> str:
        writer.rules["ANY"] = "/(?s:.*)/"
        return f"{self.final(writer)} ANY"

    def reasoning(self, tools: Sequence[Tool]) -> ReasoningMarkers:
        return ReasoningMarkers(channels=("final", "commentary") if tools else ("final",))

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while True:
            head = list[str]()
            marker = yield from parser.until((MESSAGE,), head.append)
            text = "".join(head)
            if not marker:
                is_begun = parser.is_cut and any(m.startswith(text) for m in (CHANNEL, START))
                if CHANNEL not in text and START not in text and not is_begun:
                    parser.content(text)
                return
            call = _CALL.search(text)
            if call is not None:
                parser.begin_call(call[1])
                yield from parser.spaces(drop)
                yield from parser.value(parser.arguments)
                out = drop
            else:
                out = parser.reasoning if f"{CHANNEL}analysis" in text else parser.content
            if not (yield from parser.until((*ENDS, START), out)):
                return
