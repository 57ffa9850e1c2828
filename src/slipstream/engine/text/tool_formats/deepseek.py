"""DeepSeek's two: of V3 and R1, with the arguments in a fence of JSON, and of V3.1, without."""

from __future__ import annotations

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

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3(ToolFormat):
    name = "deepseek_v3"
    markers = (CALLS, CALLS_END, CALL, SEP, CALL_END)
    trigger = CALLS

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS in template and "```json" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        head = writer.texts(CALL, "function", SEP, f"{tool.name}\n```json\n")
        return f"{head} {writer.schema(tool.parameters)} {writer.texts(chr(10) + '```', CALL_END)}"

    def between(self, writer: Writer) -> str | None:
        return '"\\n"?'

    def whole(self, calls: str, writer: Writer) -> str:
        return f"{calls} {writer.text(CALLS_END)}"

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (CALLS,)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until((CALLS,), parser.content)):
            while (yield from parser.until((CALL, CALLS_END), drop)) == CALL:
                head = list[str]()
                marker = yield from parser.until(("{", CALL_END), head.append)
                text = "".join(head)
                name = self.function("".join(text.split("```json")[0]))
                if not marker or not is_name(name):
                    parser.refuse(CALL, text + marker)
                    continue
                parser.begin_call(name)
                if marker == "{":
                    yield from parser.value_after("{", parser.arguments)
                else:
                    parser.arguments("{}")

    def function(self, head: str) -> str:
        """Name of a function, from the text between the beginning of its call and its arguments."""
        return head.rpartition(SEP)[2].strip()


class DeepSeekV31(DeepSeekV3):
    name = "deepseek_v31"

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS in template and "```json" not in template

    def call(self, tool: Tool, writer: Writer) -> str:
        return f"{writer.texts(CALL, tool.name, SEP)} {writer.schema(tool.parameters)} {writer.text(CALL_END)}"

    def function(self, head: str) -> str:
        return head.removesuffix(SEP).strip()
