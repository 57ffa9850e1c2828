"""Tool formats with a section of calls, each with a header: DeepSeek V3 and R1 (arguments in a JSON
code fence), DeepSeek V3.1 (no fence), PLaMo 3."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from slipstream.engine.text.tool_formats.base import (
    CallSection,
    Parser,
    Script,
    Tool,
    Writer,
    drop,
    is_name,
)

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class HeadedCalls(CallSection):
    """Base of formats with a section of calls, each with a header that names the function, and JSON arguments."""

    call_tag: ClassVar[tuple[str, str]]
    head: ClassVar[tuple[str, ...]]
    """Texts from the call's tag to its arguments. {name} stands for the function's name."""
    foot: ClassVar[tuple[str, ...]] = ()
    """Texts between the arguments and the call's closing tag."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def call(self, tool: Tool, writer: Writer) -> str:
        begin, end = self.call_tag
        head = writer.texts(begin, *(part.replace("{name}", tool.name) for part in self.head))
        return f"{head} {writer.schema(tool.parameters)} {writer.texts(*self.foot, end)}"

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        call, call_end = self.call_tag
        while (yield from parser.until((self.trigger,), parser.content)):
            while (yield from parser.until((call, self.end), drop)) == call:
                head = list[str]()
                marker = yield from parser.until(("{", call_end), head.append)
                text = "".join(head)
                name = self.function(text)
                if not marker or not is_name(name):
                    parser.refuse(call, text + marker)
                    continue
                parser.begin_call(name)
                if marker == "{":
                    yield from parser.value_after("{", parser.arguments)
                else:
                    parser.arguments("{}")

    @abstractmethod
    def function(self, head: str) -> str:
        """A function's name, from the text between the call's beginning and its arguments."""


class DeepSeekV3(HeadedCalls):
    name = "deepseek_v3"
    markers = (CALLS, CALLS_END, CALL, SEP, CALL_END)
    trigger, end, call_tag = CALLS, CALLS_END, (CALL, CALL_END)
    head: ClassVar[tuple[str, ...]] = ("function", SEP, "{name}\n```json\n")
    foot: ClassVar[tuple[str, ...]] = ("\n```",)

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS in template and "```json" in template

    def function(self, head: str) -> str:
        return head.split("```json")[0].rpartition(SEP)[2].strip()


class DeepSeekV31(DeepSeekV3):
    name = "deepseek_v31"
    head, foot = ("{name}", SEP), ()

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS in template and "```json" not in template

    def function(self, head: str) -> str:
        return head.split("```json")[0].removesuffix(SEP).strip()


def _plamo(text: str) -> str:
    return f"<|plamo:{text}:plamo|>"


class Plamo3(HeadedCalls):
    """PLaMo 3's format: the function's name has its own tag."""

    name = "plamo3"
    trigger, end = _plamo("begin_tool_requests"), _plamo("end_tool_requests")
    call_tag = _plamo("begin_tool_request"), _plamo("end_tool_request")
    name_tag: ClassVar[tuple[str, str]] = (_plamo("begin_tool_name"), _plamo("end_tool_name"))
    head = (
        *(name_tag[0], "{name}", name_tag[1], _plamo("begin_tool_arguments")),
        *("<|plamo:constrain|>", "json", "<|plamo:msg|>"),
    )
    foot = (_plamo("end_tool_arguments"),)
    markers = (
        *(
            trigger,
            end,
            *call_tag,
            *name_tag,
            *foot,
            "<|plamo:tag|>",
            "<|plamo:begin_",
            "<|plamo:end_",
        ),
        *("<|plamo:constrain|>", "<|plamo:msg|>", ":plamo|>"),
    )
    wraps = ("<|plamo:tag|>",)
    think = _plamo("begin_think"), _plamo("end_think")

    def final(self, writer: Writer) -> str:
        return ""

    def function(self, head: str) -> str:
        begin, end = self.name_tag
        return head.partition(begin)[2].partition(end)[0].strip()
