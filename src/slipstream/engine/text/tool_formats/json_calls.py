"""Formats whose calls are JSON objects with a name and arguments: one between two markers, or a list."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import ClassVar

from slipstream.engine.text.tool_formats.base import Parser, Script, Tool, ToolFormat, Writer, drop


class JsonCalls(ToolFormat):
    """Base of these formats. The grammar writes calls as the model's template does. The parser
    accepts one call, several or a list after each of `openings`."""

    end: ClassVar[str]
    openings: ClassVar[tuple[str, ...]] = ()
    """Texts with which calls begin, if not only the trigger."""
    line: ClassVar[str] = "\n"
    """Text between markers and calls."""
    is_list: ClassVar[bool] = False
    keys: ClassVar[tuple[str, str]] = ("name", "arguments")

    def call(self, tool: Tool, writer: Writer) -> str:
        name, arguments = self.keys
        begin = f'{{"{name}": {json.dumps(tool.name)}, "{arguments}": '
        return f'{writer.text(begin)} {writer.schema(tool.parameters)} "}}"'

    def between(self, writer: Writer) -> str | None:
        return '", "' if self.is_list else writer.text(f"{self.line}{self.end}\n{self._begin}")

    def whole(self, calls: str, writer: Writer) -> str:
        begin, end = ("[", "]") if self.is_list else ("", "")
        before, after = self.line + begin, end + self.line + self.end
        return f"{writer.texts(before)} {calls} {writer.texts(after)}"

    @property
    def _begin(self) -> str:
        return self.trigger + self.line

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        openings = self.openings or (self.trigger,)
        marker = yield from parser.until(openings, parser.content)
        while marker:
            found = yield from self.calls_behind(parser, marker)
            ends = (self.end,) if found and self.end else ()
            marker = yield from parser.until((*openings, *ends), drop if ends else parser.content)
            if marker in ends:
                marker = yield from parser.until(openings, parser.content)

    def calls_behind(self, parser: Parser, opening: str) -> Generator[None, None, bool]:
        """Parse the calls that follow. False if there are none: the text read is then content."""
        return (yield from json_calls(parser, opening))


def json_calls(parser: Parser, opening: str) -> Generator[None, None, bool]:
    """Parse one call, several or a list. False if there is none: the text read is then content."""
    if (yield from parser.opens_with("[")):
        opening += "["
    found = False
    while (yield from parser.call_object(opening)):
        found, opening = True, ""
        if (yield from parser.opens_with(",")) or (yield from parser.opens_with(";")):
            continue
        if not (yield from parser.opens_with("{", take=False)):
            yield from parser.opens_with("]")
            break
    return found


class Hermes(JsonCalls):
    """Hermes 2 Pro's format, also of Qwen 2.5 and 3, SmolLM 3, Granite 4, MiMo, Trinity and
    others."""

    name = "hermes"
    trigger, end = "<tool_call>", "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (trigger, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_call>" in template

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return [
            f'<tool_call>{line}{{"name": "{tool.name}"' for tool in tools for line in ("\n", "")
        ]


class Ernie45(Hermes):
    """Ernie 4.5's format: calls as in Hermes, and an answer between markers."""

    name = "ernie45"
    wraps = ("<response>", "</response>")
    markers = (*Hermes.markers, *wraps)

    @classmethod
    def matches(cls, template: str) -> bool:
        return (
            "<tool_call>" in template and "<response>" in template and "<arg_key>" not in template
        )


class LongCat(JsonCalls):
    name = "longcat"
    trigger, end = "<longcat_tool_call>", "</longcat_tool_call>"
    markers: ClassVar[tuple[str, ...]] = (trigger, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template


class InternLm(JsonCalls):
    """The format of InternLM 2 and Intern-S1."""

    name = "internlm"
    trigger, end = "<|action_start|><|plugin|>", "<|action_end|>"
    openings = (trigger, "<|action_start|> <|plugin|>")
    markers = ("<|action_start|>", "<|plugin|>", end)
    line = "\n"
    keys = ("name", "parameters")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|action_start|>" in template


class GigaChat3(JsonCalls):
    """The format of GigaChat 3: one call, which ends the answer."""

    name = "gigachat3"
    trigger, end, line = "<|function_call|>", "", ""
    openings = (trigger, "function call<|role_sep|>\n")
    wraps = ("<|message_sep|>",)
    markers: ClassVar[tuple[str, ...]] = (trigger, "<|role_sep|>", *wraps)

    @classmethod
    def matches(cls, template: str) -> bool:
        return any(opening.strip() in template for opening in cls.openings)

    def between(self, writer: Writer) -> str | None:
        return None

    def final(self, writer: Writer) -> str:
        return ""


class Granite20bFc(JsonCalls):
    """The format of Granite 20B FunctionCalling."""

    name = "granite_20b_fc"
    trigger, end, line = "<function_call>", "", " "
    markers: ClassVar[tuple[str, ...]] = (trigger,)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def between(self, writer: Writer) -> str | None:
        return writer.text(self._begin)

    def whole(self, calls: str, writer: Writer) -> str:
        return f"{writer.text(self.line)} {calls}"


class Inkling(JsonCalls):
    """Inkling's format: blocks of reasoning, text and calls in any order, each with a header, which
    may name the function."""

    name = "inkling"
    trigger, end, line = "<|content_invoke_tool_json|>", "<|end_message|>", ""
    header: ClassVar[str] = "<|message_model|>"
    think = "<|content_thinking|>", end
    wraps = (
        *("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
        *(end, "<|content_model_end_sampling|>"),
    )
    markers: ClassVar[tuple[str, ...]] = (trigger, header, think[0], *wraps)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template or cls.header in template

    def call(self, tool: Tool, writer: Writer) -> str:
        begin = f'{{"name":{json.dumps(tool.name)},"args":'
        return f'{writer.text(begin)} {writer.schema(tool.parameters)} "}}"'

    def between(self, writer: Writer) -> str | None:
        writer.rules["FUNCTION"] = r"/[\w.-]{1,256}/"
        return f"{writer.texts(self.end, self.header)} FUNCTION? {writer.text(self.trigger)}"

    def whole(self, calls: str, writer: Writer) -> str:
        return f"{calls} {writer.text(self.end)}"

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.trigger,)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        for tool in tools:  # the prompt may already contain the header's beginning
            if (yield from parser.opens_with(tool.name + self.trigger)):
                parser.put_back(self.trigger)
        kinds = (self.trigger, self.think[0], self.header)
        while marker := (yield from parser.until(kinds, parser.content)):
            if marker == self.header:
                marker = yield from parser.until((*kinds, *self.wraps), drop)
                parser.put_back(marker)
            elif marker == self.trigger:
                yield from parser.call_object(marker)
            else:
                yield from parser.until(self.wraps[-2:], parser.reasoning)


class JsonList(JsonCalls):
    is_list, line = True, ""


class Xlam(JsonList):
    """xLAM's format: a list of calls as the whole answer. Some checkpoints write it in a code
    fence, or after other models' markers."""

    name = "xlam"
    markers = ()
    other = r"[^\[\s](?s:.*)"
    begins: ClassVar[tuple[str, ...]] = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "xLAM" in template

    def whole(self, calls: str, writer: Writer) -> str:
        return f'"[" {calls} "]"'

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin = ""
        for text in self.begins:
            if not begin and (yield from parser.opens_with(text)):
                begin = text
        if (yield from parser.opens_with("[", take=False)):
            if (yield from json_calls(parser, begin)):
                for text in ("```", "</tool_call>"):
                    yield from parser.opens_with(text)
        elif begin:
            parser.refuse(begin)


class Nemotron(JsonList):
    """Format of Nemotron Nano 2 and Llama-Nemotron Super. (Nemotron 3 has Qwen3-Coder's.)"""

    name = "nemotron"
    trigger, end = "<TOOLCALL>", "</TOOLCALL>"
    markers: ClassVar[tuple[str, ...]] = (trigger, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template


class HunyuanA13b(JsonList):
    """Format of Hunyuan A13B and Jamba: a list of calls. MiniMax M1 writes the objects one after
    another, without a list."""

    name = "hunyuan_a13b"
    trigger, end = "<tool_calls>", "</tool_calls>"
    wraps = ("<answer>", "</answer>")
    markers = (trigger, end, *wraps)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template


class Granite(JsonList):
    """The format of Granite 3."""

    name = "granite"
    trigger, end = "<|tool_call|>", ""
    openings = (trigger, "<tool_call>")
    markers = openings

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template


class Phi4Mini(JsonList):
    name = "phi4_mini"
    trigger, end = "<|tool_call|>", "<|/tool_call|>"
    openings = (trigger, "functools")
    markers: ClassVar[tuple[str, ...]] = (trigger, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|tool|>" in template or cls.end in template


class Cohere(JsonList):
    """The format of Command R7B and Command A."""

    name = "cohere"
    trigger, end = "<|START_ACTION|>", "<|END_ACTION|>"
    wraps = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    markers = (trigger, end, *wraps)
    keys = ("tool_name", "parameters")

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def call(self, tool: Tool, writer: Writer) -> str:
        writer.rules["NUMBER"] = "/[0-9]{1,3}/"
        begin = f'", "tool_name": {json.dumps(tool.name)}, "parameters": '
        return f'"{{\\"tool_call_id\\": \\"" NUMBER {writer.text(begin)} {writer.schema(tool.parameters)} "}}"'


class Apertus(JsonList):
    """Apertus's format: a list of calls, each an object with one key, the function's name."""

    name = "apertus"
    trigger, end = "<|tools_prefix|>", "<|tools_suffix|>"
    markers: ClassVar[tuple[str, ...]] = (trigger, end)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.trigger in template

    def call(self, tool: Tool, writer: Writer) -> str:
        return (
            f'{writer.text(f"{{{json.dumps(tool.name)}: ")} {writer.schema(tool.parameters)} "}}"'
        )

    def calls_behind(self, parser: Parser, opening: str) -> Generator[None, None, bool]:
        raw, found = list[str](), False
        if not (yield from parser.opens_with("[")):
            parser.refuse(opening)
            return False
        opening += "["
        while (yield from parser.opens_with("{")):
            raw = ["{"]
            yield from parser.spaces(raw.append)
            key = list[str]()
            if (yield from parser.peek()) == '"':
                yield from parser.value(key.append)
            raw += key
            name = "".join(key)[1:-1]
            if not name or not (yield from parser.opens_with(":")):
                break
            yield from parser.spaces(drop)
            parser.begin_call(name)
            yield from parser.value(parser.arguments)
            found, raw = True, []
            yield from parser.opens_with("}")
            yield from parser.opens_with(",")
        if raw or not found:
            parser.refuse("" if found else opening, "".join(raw))
        else:
            yield from parser.opens_with("]")
        return found
