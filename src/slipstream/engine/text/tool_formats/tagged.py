"""Formats whose calls are tags, with one for each argument: Qwen3-Coder's and those like it."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

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

Tags: TypeAlias = tuple[str, str, str]
"""A tag's beginning, the end of its head, and its end."""


class Tagged(ToolFormat):
    """Common part of the formats. The parser takes calls without the
    section around them, too, if they are of tools that are offered: models forget its opening."""

    end: ClassVar[str]
    several: ClassVar[bool] = False
    """Whether a section holds all calls, or each call has its own."""
    function: ClassVar[Tags]
    argument: ClassVar[Tags]
    line: ClassVar[str] = "\n"
    """Text between calls, and between them and the section's markers."""
    breaks: ClassVar[tuple[str, str]] = ("\n", "\n")
    """Text after the head of a function, and after each argument."""
    padding: ClassVar[str] = ""
    """Text around a value."""

    # --- Grammar --------------------------------------------------------------------------------------------------------

    def call(self, tool: Tool, writer: Writer) -> str:
        begin, named, end = self.argument
        stop = self.padding + end

        def argument(name: str, schema: Mapping[str, Any]) -> str:
            is_string = is_text(schema)
            head = writer.text(f"{begin}{name}{self.attributes(is_string)}{named}{self.padding}")
            value = (
                text_rule(schema, writer, f"{tool.name}.{name}", stop)
                if is_string
                else f"{writer.schema(schema)} {writer.text(stop)}"
            )
            return f"{head} {value} {writer.texts(self.breaks[1])}"

        tag = self.function[0] if self.end else ""  # without a section the trigger is the tag
        head = writer.text(f"{tag}{tool.name}{self.function[1]}{self.breaks[0]}")
        return f"{head} {properties(tool, argument, self.name)} {writer.text(self.function[2])}"

    def attributes(self, is_string: bool) -> str:
        """Attributes of an argument, written after its name."""
        return ""

    def between(self, writer: Writer) -> str | None:
        if self.several:
            return writer.text(self.line)
        return writer.texts(self.line, self.end, self.line, self.trigger, self.line)

    def whole(self, calls: str, writer: Writer) -> str:
        # The line and the end are two words of the grammar: the line may go before a call, too.
        return f"{writer.texts(self.line)} {calls} {writer.texts(self.line, self.end)}"

    # --- Parser ---------------------------------------------------------------------------------------------------------

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin, known = self.function[0].rstrip('"'), {tool.name for tool in tools}
        while marker := (yield from parser.until((self.trigger, begin), parser.content)):
            in_section = marker != begin
            if in_section and not (yield from parser.opens_with(begin)):
                if not (yield from parser.opens_with("{", take=False)):
                    parser.refuse(marker)
                elif (yield from parser.call_object(marker)):
                    yield from parser.until((self.end,), drop)
                continue
            marker = (marker if in_section else "") + begin
            while (yield from self._call(parser, tools, marker, None if in_section else known)):
                marker = begin
                if not (yield from parser.opens_with(begin)):
                    if in_section:
                        yield from parser.until((self.end,), drop)
                    else:
                        yield from parser.opens_with(self.end)
                    break

    def _call(
        self, parser: Parser, tools: Sequence[Tool], opening: str, known: set[str] | None
    ) -> Generator[None, None, bool]:
        """Read a call, after the beginning of its tag. False: it is none, or was cut."""
        head = list[str]()
        closed = yield from parser.until((self.function[1].lstrip('"'),), head.append)
        name, _ = _head("".join(head))
        if not closed or not is_name(name) or (known is not None and name not in known):
            parser.refuse(opening, "".join(head) + closed)
            return False
        call = ArgumentsInParts(parser, tools, name)
        begin, named, _ = self.argument
        begin, named = begin.rstrip('"'), named.lstrip('"')
        while True:
            ends = (self.function[2], self.end) if self.end else (self.function[2],)
            marker = yield from parser.until((begin, *ends), drop)
            if not marker:
                return False
            if marker != begin:
                break
            head, value = [], list[str]()
            yield from parser.until((named,), head.append)
            if not (yield from self._value(parser, value.append)):
                return False
            key, attributes = _head("".join(head))
            call.add(key, self.read("".join(value)), _is_string(attributes))
        call.end()
        if marker != self.function[2]:
            parser.put_back(marker)
        return True

    def _value(self, parser: Parser, out: Any) -> Generator[None, None, bool]:
        """Text up to the end of an argument's tag, or of the call if the model forgot it. False: it was cut."""
        end, closing, text = self.argument[2], self.function[2], ""
        ends = (end, self.end) if self.end else (end,)
        while True:
            part = list[str]()
            marker = yield from parser.until(ends, part.append)
            text += "".join(part)
            if not marker:
                return False
            if marker == self.end and text.rstrip().endswith(closing):
                text = text.rstrip().removesuffix(closing)
                parser.put_back(closing + marker)
            elif marker == self.end:
                text += marker  # text that looks like it
                continue
            out(text)
            return True

    def read(self, value: str) -> str:
        """The value without what the template writes around it."""
        return value.removeprefix(self.padding).removesuffix(self.padding)


def _head(text: str) -> tuple[str, str]:
    """A tag's name, in quotes or not, and its other attributes."""
    text = text.strip()
    if text[:1] in ('"', "'") and text[0] in text[1:]:
        name, _, attributes = text[1:].partition(text[0])
        return name, attributes
    return text, ""


def _is_string(attributes: str) -> bool | None:
    """The type that an argument's tag tells, if any: whether it is a string."""
    found = re.search(r'string\s*=\s*"?(true|false)', attributes)
    return None if found is None else found[1] == "true"


class Qwen3Coder(Tagged):
    """Qwen3-Coder's, Qwen 3.5's, Nemotron 3's, MiMo V2's and Step 3.5's."""

    name = "qwen3_coder"
    trigger, end = "<tool_call>", "</tool_call>"
    markers = (trigger, end)
    function = ("<function=", ">", "</function>")
    argument = ("<parameter=", ">", "</parameter>")
    padding = "\n"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return [f"<tool_call>{line}<function=" for line in ("\n", "")]


class SeedOss(Tagged):
    name = "seed_oss"
    trigger, end = "<seed:tool_call>", "</seed:tool_call>"
    markers = (trigger, end)
    function, argument = Qwen3Coder.function, Qwen3Coder.argument

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.trigger,)


class Invocations(Tagged):
    """Calls of several functions in a section, with names in attributes."""

    several = True
    function = ('<invoke name="', '">', "</invoke>")
    argument = ('<parameter name="', '">', "</parameter>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.trigger,)


class MiniMaxM2(Invocations):
    name = "minimax_m2"
    trigger, end = "<minimax:tool_call>", "</minimax:tool_call>"
    markers = (trigger, end)


class Dots(Invocations):
    name = "dots"
    trigger, end = "<dots_function_call>", "</dots_function_call>"
    markers = (trigger, end)


class MiniCpm5(Invocations):
    """Calls without a section. Texts may stand in CDATA."""

    name = "minicpm5"
    trigger, end = '<function name="', ""
    several, line = False, ""
    markers = ("</function>", "</param>")
    function = ('<function name="', '">', "</function>")
    argument = ('<param name="', '">', "</param>")
    breaks = ("", "")

    @classmethod
    def matches(cls, template: str) -> bool:
        return '<function name="' in template and '<param name="' in template

    def read(self, value: str) -> str:
        return value.removeprefix("<![CDATA[").removesuffix("]]>")


def _dsml(section: str, mark: str = "｜DSML｜") -> tuple[str, str, Tags, Tags]:
    return (
        f"<{mark}{section}>",
        f"</{mark}{section}>",
        (f'<{mark}invoke name="', '">', f"</{mark}invoke>"),
        (f'<{mark}parameter name="', ">", f"</{mark}parameter>"),
    )


class DeepSeekV32(Invocations):
    """DeepSeek's tags of V3.2. An argument tells whether it is a string."""

    name = "deepseek_v32"
    trigger, end, function, argument = _dsml("function_calls")
    markers = ("｜DSML｜",)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "DSML" in template and "function_calls>" in template

    def attributes(self, is_string: bool) -> str:
        return f'" string="{"true" if is_string else "false"}"'


class DeepSeekV4(DeepSeekV32):
    name = "deepseek_v4"
    trigger, end, function, argument = _dsml("tool_calls")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "DSML" in template and "tool_calls>" in template


class DeepSeekV41(DeepSeekV32):
    name = "deepseek_v41"
    trigger, end, function, argument = _dsml("calls", "｜DSML｜ ")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "DSML" in template and re.search(r"[｜}'\" ]calls>", template) is not None


class Step3(Invocations):
    """The format of Step 3. Step 3.5 writes Qwen3-Coder's."""

    name = "step3"
    trigger, end = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    function = (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        '">',
        "</steptml:invoke><｜tool_call_end｜>",
    )
    argument = ('<steptml:parameter name="', '">', "</steptml:parameter>")
    markers = (trigger, end, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    breaks = ("", "")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<steptml:invoke" in template
