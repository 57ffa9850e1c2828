"""GLM 4.5's: <tool_call>name, then <arg_key>key</arg_key> and <arg_value>value</arg_value> for each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engine.text.tool_formats.base import (
    Parser,
    Script,
    Tool,
    ToolFormat,
    Writer,
    drop,
    is_name,
)
from slipstream.engine.text.tool_formats.values import (
    ArgumentsInParts,
    is_text,
    properties,
    text_rule,
)


class Glm(ToolFormat):
    name = "glm"
    markers = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    trigger = "<tool_call>"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<arg_key>" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        def argument(name: str, schema: Mapping[str, Any]) -> str:
            key = f'{writer.texts("<arg_key>", name, "</arg_key>")} "\\n" {writer.text("<arg_value>")}'
            if is_text(schema):
                return f'{key} {text_rule(schema, writer, f"{tool.name}.{name}", "</arg_value>")} "\\n"'
            return f'{key} {writer.schema(schema)} {writer.text("</arg_value>")} "\\n"'

        arguments = properties(tool, argument, self.name)
        return f"{writer.text(tool.name + chr(10))} {arguments} {writer.text('</tool_call>')}"

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until(("<tool_call>",), parser.content)):
            head = list[str]()
            marker = yield from parser.until(("<arg_key>", "</tool_call>"), head.append)
            function = "".join(head).strip()
            if not (marker and is_name(function)):
                parser.content("<tool_call>" + "".join(head) + marker)
                continue
            call = ArgumentsInParts(parser, tools, function)
            while marker == "<arg_key>":
                name, value = list[str](), list[str]()
                yield from parser.until(("</arg_key>",), name.append)
                yield from parser.until(("<arg_value>",), drop)
                if (yield from parser.until(("</arg_value>",), value.append)):
                    call.add("".join(name), "".join(value))
                marker = yield from parser.until(("<arg_key>", "</tool_call>"), drop)
            if marker:
                call.end()
