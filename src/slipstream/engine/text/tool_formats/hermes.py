"""Hermes 2 Pro's, which Qwen 2.5 and 3, SmolLM 3 and others write: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.engine.text.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer, drop


class Hermes(ToolFormat):
    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_call>" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        begin = '\n{"name": ' + json.dumps(tool.name) + ', "arguments": '
        return f"{writer.text(begin)} {writer.schema(tool.parameters)} {writer.texts('}' + chr(10), '</tool_call>')}"

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until(("<tool_call>",), parser.content)):
            if (yield from parser.call_object("<tool_call>")):
                yield from parser.until(("</tool_call>",), drop)
