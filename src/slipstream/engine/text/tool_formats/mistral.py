"""Mistral's two: [TOOL_CALLS] and a JSON list of calls, and from 2025 on [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.engine.text.tool_formats.base import (
    Parser,
    Script,
    Tool,
    ToolFormat,
    Writer,
    drop,
    is_name,
)


class Mistral(ToolFormat):
    name = "mistral"
    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")  # type: ignore[misc]
    trigger = "[TOOL_CALLS]"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" not in template

    def call(self, tool: Tool, writer: Writer) -> str:
        begin = '{"name": ' + json.dumps(tool.name) + ', "arguments": '
        return f'{writer.text(begin)} {writer.schema(tool.parameters)} "}}"'

    def between(self, writer: Writer) -> str:
        return '", "'

    def whole(self, calls: str, writer: Writer) -> str:
        return f'" "? "[" {calls} "]"'

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until(("[TOOL_CALLS]",), parser.content)):
            if (yield from parser.opens_with("[")):
                begin = "[TOOL_CALLS]["
                while (yield from parser.call_object(begin)):
                    begin = ","
                    if not (yield from parser.opens_with(",")):
                        yield from parser.opens_with("]")
                        break
                continue
            yield from self._named(parser)

    def _named(self, parser: Parser) -> Script:
        head = list[str]()
        marker = yield from parser.until(("[ARGS]", "{"), head.append)
        name = "".join(head).split("[CALL_ID]")[0].strip()
        if marker == "[ARGS]":
            yield from parser.spaces(drop)
        if not (marker and is_name(name)) or (
            marker == "[ARGS]" and (yield from parser.peek()) != "{"
        ):
            parser.content("[TOOL_CALLS]" + "".join(head) + marker)
            return
        parser.begin_call(name)
        if marker == "{":
            yield from parser.value_after("{", parser.arguments)
        else:
            yield from parser.value(parser.arguments)


class MistralArgs(Mistral):
    name = "mistral_args"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        return f"{writer.texts(tool.name, '[ARGS]')} {writer.schema(tool.parameters)}"

    def between(self, writer: Writer) -> str:
        return writer.text(self.trigger)

    def whole(self, calls: str, writer: Writer) -> str:
        return calls
