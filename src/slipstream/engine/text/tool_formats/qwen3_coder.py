"""Qwen 3 Coder's: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, a line each."""

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


class Qwen3Coder(ToolFormat):
    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        def argument(name: str, schema: Mapping[str, Any]) -> str:
            begin, end = writer.text(f"<parameter={name}>\n"), "\n</parameter>"
            if is_text(schema):
                return f'{begin} {text_rule(schema, writer, f"{tool.name}.{name}", end)} "\\n"'
            return f'{begin} {writer.schema(schema)} {writer.text(end)} "\\n"'

        head, tail = (
            writer.text(f"\n<function={tool.name}>\n"),
            writer.texts("</function>\n", "</tool_call>"),
        )
        return f"{head} {properties(tool, argument, self.name)} {tail}"

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until(("<tool_call>",), parser.content)):
            if not (yield from parser.opens_with("<function=")):
                parser.content("<tool_call>")
                continue
            head = list[str]()
            closed = yield from parser.until((">",), head.append)
            if not (closed and is_name("".join(head))):
                parser.content("<tool_call><function=" + "".join(head) + closed)
                continue
            call = ArgumentsInParts(parser, tools, "".join(head))
            while (
                marker := (yield from parser.until(("<parameter=", "</tool_call>"), drop))
            ) == "<parameter=":
                name, value = list[str](), list[str]()
                yield from parser.until((">",), name.append)
                if (yield from parser.until(("</parameter>",), value.append)):
                    call.add("".join(name), "".join(value).removeprefix("\n").removesuffix("\n"))
            if marker:
                call.end()
