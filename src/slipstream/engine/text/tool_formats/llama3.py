"""Llama 3.1's tool format: a JSON object with "name" and "parameters". Calls are the whole
answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.engine.text.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer


class Llama3Json(ToolFormat):
    name = "llama3_json"
    markers = ("<|python_tag|>",)
    other = r"[^{<\s](?s:.*)"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|python_tag|>" in template or (
            "<|start_header_id|>" in template and '"parameters"' in template
        )

    def call(self, tool: Tool, writer: Writer) -> str:
        begin = '{"name": ' + json.dumps(tool.name) + ', "parameters": '
        return f'{writer.text(begin)} {writer.schema(tool.parameters)} "}}"'

    def between(self, writer: Writer) -> str | None:
        return '"; "'

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin = ""
        while True:
            if (yield from parser.opens_with("<|python_tag|>")):
                begin = "<|python_tag|>"
            yield from parser.spaces(parser.content)
            if (yield from parser.peek()) != "{" or not (yield from parser.call_object(begin)):
                break
            if not (yield from parser.opens_with(";")):
                return
            begin = ""
