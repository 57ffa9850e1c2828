"""Tool formats with one tag for an argument's key and one for its value: GLM, Hunyuan 3 and 4, K2 Horizon."""

from __future__ import annotations

import functools
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

Tag: TypeAlias = tuple[str, str]


def _tag(name: str, suffix: str = "") -> Tag:
    return f"<{name}{suffix}>", f"</{name}{suffix}>"


class Glm(ToolFormat):
    """GLM's format: <tool_call>name, then <arg_key>key</arg_key> and <arg_value>value</arg_value> for each argument.
    GLM 4.5 and 4.6 write line breaks between them, 4.7 and 5 don't. Ling 3 and Laguna write it, too."""

    name = "glm"
    section: ClassVar[Tag] = ("", "")
    """Markers around all calls."""
    call_tag, key_tag, value_tag = _tag("tool_call"), _tag("arg_key"), _tag("arg_value")
    separator: ClassVar[str] = ""
    """Text after the function's name."""
    trigger = call_tag[0]
    markers: ClassVar[tuple[str, ...]] = (*call_tag, *key_tag, *value_tag)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<arg_key>" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        writer.rules["LINE"] = r"/\n/"
        begin, end = self.value_tag

        def argument(name: str, schema: Mapping[str, Any]) -> str:
            key = f"{writer.text(name.join(self.key_tag))} LINE? {writer.text(begin)}"
            if is_text(schema):
                return f"{key} {text_rule(schema, writer, f'{tool.name}.{name}', end)} LINE?"
            return f"{key} {writer.schema(schema)} {writer.text(end)} LINE?"

        arguments = properties(tool, argument, self)
        head = writer.text(tool.name + self.separator)
        return f"{head} LINE? {arguments} {writer.text(self.call_tag[1])}"

    def carries(self, name: str, depth: int = 0) -> bool:
        return name == name.strip() and self.key_tag[1] not in name

    def between(self, writer: Writer) -> str | None:
        return f"LINE? {writer.text(self.call_tag[0])}"

    def whole(self, calls: str, writer: Writer) -> str:
        begin, end = self.section
        if not begin:
            return calls
        return f"LINE? {writer.text(self.call_tag[0])} {calls} LINE? {writer.text(end)}"

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        if self.section[0]:
            return (self.trigger,)
        heads = ("\n", self.key_tag[0], self.call_tag[1])
        return [f"{self.trigger}{tool.name}{head}" for tool in tools for head in heads]

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin, section = self.call_tag[0], self.section[0]
        openings = (section, begin) if section else (begin,)
        while opening := (yield from parser.until(openings, parser.content)):
            if opening == section:
                if not (yield from parser.opens_with(begin)):
                    parser.refuse(opening)
                    continue
                opening += begin
            while (yield from self._call(parser, tools, opening)):
                opening = begin
                if not (yield from parser.opens_with(begin)):
                    if section:
                        yield from parser.opens_with(self.section[1])
                    break

    def _call(
        self, parser: Parser, tools: Sequence[Tool], opening: str
    ) -> Generator[None, None, bool]:
        """Parse a call after its opening tag. False if it is none or was truncated."""
        key_begin, end = self.key_tag[0], self.call_tag[1]
        if (yield from parser.opens_with("{", take=False)):
            if not (yield from parser.call_object(opening)):
                return False
            yield from parser.until((end,), drop)
            return True
        head = list[str]()
        marker = yield from parser.until((key_begin, end), head.append)
        function = "".join(head).strip().removesuffix(self.separator).strip()
        if not (marker and is_name(function)):
            begun = function.partition("<")[0].strip()
            if marker or not begun or is_name(begun):
                parser.refuse(opening, "".join(head) + marker)
            else:
                parser.content(opening + "".join(head))
            return False
        call = ArgumentsInParts(parser, tools, function)
        while marker == key_begin:
            name, value = list[str](), list[str]()
            yield from parser.until((self.key_tag[1],), name.append)
            marker = yield from parser.until((self.value_tag[0], key_begin, end), drop)
            if marker == self.value_tag[0]:
                if (yield from parser.until((self.value_tag[1],), value.append)):
                    call.add("".join(name).strip(), "".join(value))
                marker = yield from parser.until((key_begin, end), drop)
        if marker:
            call.end()
        return bool(marker)


SUFFIX = re.compile(r"</?(?:think|tool_calls?|arg_key|arg_value)(:[\w-]+)>")
"""A tag with the suffix that some checkpoints add to all tags."""

_AS_VARIABLE = re.compile(r"['\"](:[\w-]+)['\"]")


class HyV3(Glm):
    """Hunyuan 3's format: GLM's calls, in a section around all of them."""

    name = "hy_v3"
    section = _tag("tool_calls")
    separator = "<tool_sep>"
    trigger = section[0]
    markers = (*Glm.markers, *section, separator)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_sep" in template and ":opensource" not in template


class HyV4(Glm):
    """Hunyuan 4's format: Hunyuan 3's without the separator. Tags have a suffix that differs by
    checkpoint."""

    name = "hy_v4"
    section = _tag("tool_calls")
    trigger = section[0]
    markers = (*Glm.markers, *section)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_calls" in template and "<arg_key" in template and "<tool_sep" not in template

    @classmethod
    def of(cls, template: str) -> ToolFormat:
        found = SUFFIX.search(template) or _AS_VARIABLE.search(template)
        return _suffixed(cls, found[1])() if found else cls()


@functools.lru_cache(maxsize=16)
def _suffixed(form: type[Glm], suffix: str) -> type[Glm]:
    """A subclass of the format whose tags have a suffix."""
    section, call = _tag("tool_calls", suffix), _tag("tool_call", suffix)
    key, value = _tag("arg_key", suffix), _tag("arg_value", suffix)
    separator = form.separator.replace(">", f"{suffix}>")
    made = {
        "section": section,
        "call_tag": call,
        "key_tag": key,
        "value_tag": value,
        "separator": separator,
        "trigger": section[0],
        "markers": (*section, *call, *key, *value, *((separator,) if separator else ())),
        "think": _tag("think", suffix),
    }
    return type(form.__name__, (form,), made)


class HyV3Open(_suffixed(HyV3, ":opensource")):  # type: ignore[misc]
    """Hunyuan 3's format with the tag suffix of the published checkpoint."""

    name = "hy_v3_open"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_sep" in template and ":opensource" in template


class K2Horizon(Glm):
    """K2 Horizon's format. A call may be a JSON object, or each argument's tag may give its
    type."""

    name = "k2_horizon"
    section, call_tag = _tag("ifm|tool_calls"), _tag("ifm|tool_call")
    key_tag, value_tag = _tag("ifm|arg_key"), _tag("ifm|arg_value")
    trigger = section[0]
    markers = (*section, *call_tag, *key_tag, *value_tag, *_tag("ifm|arg_type"))
    think = _tag("ifm|think")

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.section[0] in template
