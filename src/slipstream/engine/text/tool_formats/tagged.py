"""Tool formats with a tag for each call and one for each argument: Qwen3-Coder and others."""

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
    alternatives,
    is_text,
    properties,
    text_rule,
)
from slipstream.params.answer_forms import ReasoningMarkers

Tags: TypeAlias = tuple[str, str, str]
"""Opening of a tag, end of its header, and closing tag."""


class Tagged(ToolFormat):
    """Base of these formats. The parser also accepts calls without the section around them, if the
    request offers these tools, because models forget its opening."""

    end: ClassVar[str]
    several: ClassVar[bool] = False
    """Whether one section contains all calls; otherwise each call has its own."""
    function: ClassVar[Tags]
    argument: ClassVar[Tags]
    line: ClassVar[str] = "\n"
    """Text between calls, and between them and the section's markers."""
    breaks: ClassVar[tuple[str, str]] = ("\n", "\n")
    """Text after a function's header, and after each argument."""
    padding: ClassVar[str] = ""
    """Text around a value."""

    # --- Grammar --------------------------------------------------------------------------------------------------------

    def call(self, tool: Tool, writer: Writer) -> str:
        begin, named, end = self.argument
        stop = self.padding + end

        def argument(name: str, schema: Mapping[str, Any]) -> str:
            is_string = is_text(schema)
            key = self.escape(name) + self.attributes(schema)
            head = writer.text(f"{begin}{key}{named}{self.padding}")
            value = (
                text_rule(schema, writer, f"{tool.name}.{name}", stop)
                if is_string
                else f"{writer.schema(schema)} {writer.text(stop)}"
            )
            return f"{head} {value} {writer.texts(self.breaks[1])}"

        tag = self.function[0] if self.end else ""  # without a section, the trigger is the tag
        head = self.named(f"{tag}{tool.name}", f"{self.function[1]}{self.breaks[0]}", writer)
        return f"{head} {properties(tool, argument, self)} {writer.text(self.function[2])}"

    def named(self, begin: str, end: str, writer: Writer) -> str:
        """Grammar of a tag's header: its opening, the name, and the end of the header."""
        return writer.text(begin + end)

    def attributes(self, schema: Mapping[str, Any]) -> str:
        """Attributes of an argument's tag, written after its name."""
        return ""

    def escape(self, name: str) -> str:
        """An argument's name as written in its tag."""
        return name

    def unescape(self, name: str) -> str:
        return name

    def carries(self, name: str, depth: int = 0) -> bool:
        begin, named, _ = self.argument
        quote, end = begin[len(begin.rstrip('"')) :], named.lstrip('"')
        written = f"{quote}{self.escape(name)}{self.attributes({})}{named}"
        head, _, rest = written.partition(end)
        return not rest and self.unescape(_head(head)[0]) == name

    def between(self, writer: Writer) -> str | None:
        if self.several:
            return writer.text(self.line)
        return writer.texts(self.line, self.end, self.line, self.trigger, self.line)

    def whole(self, calls: str, writer: Writer) -> str:
        # The line break and the end are separate terminals, because a line break may also precede a call.
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
        """Parse a call after the beginning of its tag. False if it is none or was truncated."""
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
            call.add(self.unescape(key), self.read("".join(value)), _is_string(attributes))
        call.end()
        if marker != self.function[2]:
            parser.put_back(marker)
        return True

    def _value(self, parser: Parser, out: Any) -> Generator[None, None, bool]:
        """Pass text to `out` up to the end of an argument's tag, or of the call if the model forgot the tag. False if it was
        truncated."""
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
                text += marker  # text that looks like the marker
                continue
            out(text)
            return True

    def read(self, value: str) -> str:
        """The value without the padding that the template writes around it."""
        return value.removeprefix(self.padding).removesuffix(self.padding)


def _head(text: str) -> tuple[str, str]:
    """A tag's name, quoted or not, and its other attributes."""
    text = text.strip()
    if text[:1] in ('"', "'") and text[0] in text[1:]:
        name, _, attributes = text[1:].partition(text[0])
        return name, attributes
    return text, ""


def _is_string(attributes: str) -> bool | None:
    """Whether an argument's tag declares it a string; None if the tag has no type."""
    found = re.search(r'(?:string|type)\s*=\s*"?(\w+)', attributes)
    return None if found is None else found[1] in ("true", "string")


class Qwen3Coder(Tagged):
    """The format of Qwen3-Coder, Qwen 3.5, Nemotron 3, MiMo V2 and Step 3.5."""

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
    """Base of formats with a section of calls in which names are attributes."""

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
    """MiniCPM 5's format: calls without a section. Strings may be in CDATA."""

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
    """DeepSeek V3.2's format. An argument's tag says whether it is a string."""

    name = "deepseek_v32"
    trigger, end, function, argument = _dsml("function_calls")
    markers = ("｜DSML｜",)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "DSML" in template and "function_calls>" in template

    def attributes(self, schema: Mapping[str, Any]) -> str:
        return f'" string="{"true" if is_text(schema) else "false"}"'


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
    """Step 3's format. (Step 3.5 has Qwen3-Coder's.)"""

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


class KimiK3(Invocations):
    """Kimi K3's format: channels between three special tokens. An argument's tag has its type."""

    name = "kimi_k3"
    trigger, end = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    function = ('<|open|>call tool="', '"<|sep|>', "<|close|>call<|sep|>")
    argument = ('<|open|>argument key="', "<|sep|>", "<|close|>argument<|sep|>")
    line, breaks = "", ("", "")
    wraps = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    think = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    markers = ("<|open|>", "<|close|>", "<|sep|>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return all(marker in template for marker in cls.markers)

    def named(self, begin: str, end: str, writer: Writer) -> str:
        writer.rules["NUMBER"] = "/[0-9]{1,4}/"
        head = begin + '" index="'
        return f"{writer.text(head)} NUMBER {writer.text(end)}"

    def whole(self, calls: str, writer: Writer) -> str:
        return f"{super().whole(calls, writer)} ({writer.text(self.wraps[-1])})?"

    def attributes(self, schema: Mapping[str, Any]) -> str:
        kinds = {part.get("type") for part in alternatives(schema)}
        kind = "string" if is_text(schema) else kinds.pop() if len(kinds) == 1 else "object"
        return f'" type="{"number" if kind == "integer" else kind or "object"}"'

    def escape(self, name: str) -> str:
        return name.replace("&", "&amp;").replace('"', "&quot;")

    def unescape(self, name: str) -> str:
        return name.replace("&quot;", '"').replace("&amp;", "&")


class Muse(Invocations):
    """Muse's format: messages with a recipient, as in harmony. A message to a function is its call.
    A message without a recipient is text in Muse Glimmer and reasoning in Muse."""

    name = "muse"
    reasons = True
    trigger = ""
    section: ClassVar[tuple[str, str]] = ("<atem:function_calls>", "</atem:function_calls>")
    end = section[1]
    function = ('<atem:invoke name="', '">', "</atem:invoke>")
    argument = ('<atem:parameter name="', '">', "</atem:parameter>")
    message: ClassVar[str] = "<|message|>"
    ends: ClassVar[tuple[str, ...]] = ("<|eom|>", "<|eot|>", "<|start|>")
    markers = (message, *ends)
    call_marks = (function[2],)
    thoughts: ClassVar[tuple[str, ...]] = ("", "self")
    texts: ClassVar[tuple[str, ...]] = ("user", "commentary")
    unread: ClassVar[tuple[str, ...]] = ("developer",)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<atem:invoke" in template

    def reasoning(self, tools: Sequence[Tool]) -> ReasoningMarkers:
        return ReasoningMarkers(begin=f"to=self{self.message}", end=self.ends[0])

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return ()

    def before(self, writer: Writer) -> str:
        thoughts = f"{writer.texts(' to=self', self.message)} {writer.up_to(self.ends[0])}"
        writer.rules["thoughts"] = f"{thoughts} {writer.texts('<|start|>', 'assistant')}"
        return "thoughts?"

    def final(self, writer: Writer) -> str:
        return writer.texts(" to=user", self.message)

    def free(self, writer: Writer) -> str:
        writer.rules["ANY"] = "/(?s:.*)/"
        return f"{self.final(writer)} ANY"

    def call(self, tool: Tool, writer: Writer) -> str:
        head = writer.texts(f" to={tool.name}", self.message, f"{self.section[0]}\n")
        return f"{head} {super().call(tool, writer)} {writer.text(chr(10) + self.end)}"

    def between(self, writer: Writer) -> str | None:
        return writer.texts("<|eom|>", "<|start|>", "assistant")

    def whole(self, calls: str, writer: Writer) -> str:
        return calls

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin = self.function[0].rstrip('"')
        while True:
            head = list[str]()
            marker = yield from parser.until((self.message,), head.append)
            text = "".join(head)
            if not marker:
                heads = (" to=", "to=", "<|start|>")
                is_begun = parser.is_cut and any(h.startswith(text[: len(h)]) for h in heads)
                if "<|start|>" not in text and not is_begun:
                    parser.content(text)
                return
            found = re.search(r"to=([\w.-]+)\s*$", text)
            to = found[1] if found else ""
            if to not in (*self.thoughts, *self.texts, *self.unread):
                marker = yield from parser.until((begin, *self.ends), drop)
                while marker == begin:
                    yield from self._call(parser, tools, marker, None)
                    marker = yield from parser.until((begin, *self.ends), drop)
            else:
                known = parser.reasoning if to in self.thoughts else parser.content
                out = drop if to in self.unread else known
                marker = yield from parser.until(self.ends, out)
            if not marker:
                return
            if marker == "<|start|>":
                parser.put_back(marker)


class MuseGlimmer(Muse):
    name = "muse_glimmer"
    thoughts, texts, unread = ("self",), ("", "user"), ()

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<atem:invoke" in template and "MuseGlimmer" in template
