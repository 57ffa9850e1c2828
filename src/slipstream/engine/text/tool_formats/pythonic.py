"""Tool formats that write calls in Python syntax: [name(key=value, …), …]."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from slipstream.engine.text.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer
from slipstream.engine.text.tool_formats.json_calls import json_calls
from slipstream.engine.text.tool_formats.literals import NAME, Literals
from slipstream.engine.text.tool_formats.values import properties


class Pythonic(ToolFormat):
    """Format of Llama 3.2 and 4. Calls are the whole answer."""

    name = "pythonic"
    begin, end = "<|python_start|>", "<|python_end|>"
    """Optional markers around the list."""
    brackets: ClassVar[tuple[str, str]] = ("[", "]")
    separator: ClassVar[str] = ", "
    markers: ClassVar[tuple[str, ...]] = (begin, end)
    other = r"[^\[<\s](?s:.*)"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "func_name1(params_name1=params_value1" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        def value(schema: Mapping[str, Any]) -> str:
            if schema.get("type") == "boolean" and len(schema) == 1:
                return '("True" | "False")'
            return writer.schema(schema)

        arguments = properties(
            tool, lambda name, schema: f"{writer.text(name + '=')} {value(schema)}", self, '", "'
        )
        return f'{writer.text(tool.name + "(")} {arguments} ")"'

    def carries(self, name: str, depth: int = 0) -> bool:
        return NAME.fullmatch(name) is not None

    def between(self, writer: Writer) -> str | None:
        return json.dumps(self.separator)

    def whole(self, calls: str, writer: Writer) -> str:
        begin, end = self.brackets
        if self.trigger:
            end += self.end
        return f"{writer.texts(begin)} {calls} {writer.texts(end)}"

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        began = yield from parser.opens_with(self.begin)
        if (yield from parser.opens_with("[")):
            if (yield from self.calls_behind(parser, tools, "[")) and (
                yield from parser.opens_with("]")
            ):
                yield from parser.opens_with(self.end)
        elif began:
            parser.refuse(self.begin)

    def calls_behind(
        self, parser: Parser, tools: Sequence[Tool], opening: str
    ) -> Generator[None, None, bool]:
        """Parse the calls that follow. False if there is none, or if other text follows the last; that is content."""
        while True:
            raw = list[str]()
            yield from parser.spaces(raw.append)
            name = yield from parser.name()
            raw.append(name)
            text = list[str]()
            if name and (yield from parser.peek()) == "(":
                yield from _parentheses(parser, text.append)
            found = _keywords("".join(text)) if text else None
            if found is None:
                more = "".join((*raw, *text))
                if text or (parser.at_end and any(t.name.startswith(name) for t in tools)):
                    parser.refuse(opening, more)
                else:
                    parser.content(opening + more)
                return False
            parser.call(name, found)
            opening = ""
            if (yield from parser.opens_with(",")):
                continue
            if self.brackets[0] or (yield from parser.opens_with("<", take=False)) or parser.at_end:
                return True


class Olmo3(Pythonic):
    """Olmo 3's format: one call per line between tags."""

    name = "olmo3"
    trigger = "<function_calls>"
    begin, end = trigger, "</function_calls>"
    brackets, separator = ("", ""), "\n"
    markers = (begin, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until((self.begin,), parser.content)):
            if (yield from self.calls_behind(parser, tools, self.begin)):
                yield from parser.opens_with(self.end)


class Lfm2(Pythonic):
    """LFM2's format: the list between special tokens. Some checkpoints write JSON there."""

    name = "lfm2"
    trigger = "<|tool_call_start|>"
    begin, end = trigger, "<|tool_call_end|>"
    markers = (begin, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return any(
            mark in template
            for mark in ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ")
        )

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.begin,)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while (yield from parser.until((self.begin,), parser.content)):
            opening = self.begin
            if (yield from parser.opens_with("[")):
                opening += "["
            if (yield from parser.opens_with("{", take=False)):
                found = yield from json_calls(parser, opening)
            else:
                found = yield from self.calls_behind(parser, tools, opening)
            if found:
                yield from parser.opens_with("]")
                yield from parser.opens_with(self.end)


def _parentheses(parser: Parser, out: Any) -> Script:
    """Pass the text from "(" to its matching ")" to `out`. Brackets in Python strings are
    skipped."""
    depth = 0
    while c := (yield from parser.char()):
        out(c)
        depth += (c in "([{") - (c in ")]}")
        if c in "\"'":
            quote, c = c, ""
            while c != quote and (c := (yield from parser.char())):
                out(c)
                if c == "\\":
                    out((yield from parser.char()))
        if not depth:
            return


def _keywords(text: str) -> dict[str, Any] | None:
    """Parse arguments written as "(a=1, b='x')"; None for anything else."""
    try:
        return Literals(text).keywords()
    except (ValueError, RecursionError):
        return None
