"""The tool format of Kimi K2: a section of calls, each with an id that contains the function's
name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.engine.text.tool_formats.base import (
    CallSection,
    Parser,
    Script,
    Tool,
    Writer,
    drop,
    is_name,
)

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SINGULAR, SINGULAR_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
CALL = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"


class KimiK2(CallSection):
    """Kimi K2's and K2.5's format: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>. The
    number counts the calls of a conversation."""

    name = "kimi_k2"
    markers = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    trigger, end = SECTION, SECTION_END

    @classmethod
    def matches(cls, template: str) -> bool:
        return SECTION in template

    def call(self, tool: Tool, writer: Writer) -> str:
        writer.rules["NUMBER"] = "/[0-9]{1,4}/"
        head = f"{writer.texts(CALL, f'functions.{tool.name}:')} NUMBER {writer.text(ARGUMENTS)}"
        return f"{head} {writer.schema(tool.parameters)} {writer.text(CALL_END)}"

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (SECTION, SINGULAR, CALL)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while marker := (yield from parser.until((SECTION, SINGULAR, CALL), parser.content)):
            if marker != CALL:
                marker = yield from parser.until((CALL, SECTION_END, SINGULAR_END), drop)
            while marker == CALL:
                head = list[str]()
                end = yield from parser.until((ARGUMENTS, "{", CALL_END), head.append)
                text = "".join(head)
                found = re.fullmatch(r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*", text, re.DOTALL)
                function = found[1] if found else ""
                if end == ARGUMENTS:
                    yield from parser.spaces(drop)
                if not end or not is_name(function) or (end == ARGUMENTS and parser.at_end):
                    parser.refuse(CALL, text + end)
                else:
                    parser.begin_call(function)
                    if end == "{":
                        parser.put_back(end)
                    if (yield from parser.peek()) == "{":
                        yield from parser.value(parser.arguments)
                    else:
                        parser.arguments("{}")
                marker = yield from parser.until((CALL, SECTION_END, SINGULAR_END), drop)
