"""Mistral's two formats: [TOOL_CALLS] and a JSON list of calls; since 2025 [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

from collections.abc import Generator

from slipstream.engine.text.tool_formats.base import Parser, Tool, Writer, drop, is_name
from slipstream.engine.text.tool_formats.json_calls import JsonList


class Mistral(JsonList):
    name = "mistral"
    trigger, end = "[TOOL_CALLS]", ""
    openings = (trigger,)
    markers = (trigger, "[ARGS]", "[CALL_ID]")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" not in template

    def whole(self, calls: str, writer: Writer) -> str:
        return f'" "? "[" {calls} "]"'

    def calls_behind(self, parser: Parser, opening: str) -> Generator[None, None, bool]:
        if (yield from parser.opens_with("[", take=False)) and not (
            yield from parser.opens_with("[ARGS]", take=False)
        ):
            return (yield from super().calls_behind(parser, opening))
        head = list[str]()
        marker = yield from parser.until(("[ARGS]", "{"), head.append)
        name = "".join(head).split("[CALL_ID]")[0].strip()
        if marker == "[ARGS]":
            yield from parser.spaces(drop)
        if marker == "{":
            parser.put_back(marker)
        # a call without arguments
        bare = marker == "[ARGS]" and parser.at_end and not parser.is_cut
        if not (marker and is_name(name)) or not (bare or (yield from parser.peek()) == "{"):
            parser.refuse(opening, "".join(head) + (marker if marker != "{" else ""))
            return False
        parser.begin_call(name)
        if bare:
            parser.arguments("{}")
        else:
            yield from parser.value(parser.arguments)
        return True


class MistralArgs(Mistral):
    name = "mistral_args"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        return f"{writer.texts(tool.name, '[ARGS]')} {writer.schema(tool.parameters)}"

    def between(self, writer: Writer) -> str | None:
        return writer.text(self.trigger)

    def whole(self, calls: str, writer: Writer) -> str:
        return calls
