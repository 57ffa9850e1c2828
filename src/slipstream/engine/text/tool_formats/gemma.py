"""Gemma's formats: call:name{key:value,…} between two markers; strings have special quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

from slipstream.engine.text.tool_formats.base import (
    Parser,
    Script,
    Tool,
    ToolFormat,
    Writer,
    is_name,
)
from slipstream.engine.text.tool_formats.literals import Literals
from slipstream.engine.text.tool_formats.values import (
    ArgumentsInParts,
    alternatives,
    is_text,
    properties,
    text_rule,
)
from slipstream.errors import RequestError

MAX_NESTING = 8
"""Maximum nesting of a schema's objects and lists. The grammar of a recursive schema would be infinite."""

THOUGHT, THOUGHT_END = "<|channel>thought\n", "<channel|>"


def _is_word(name: str) -> bool:
    """Whether a text without quotes would be parsed as that string."""
    return bool(Literals(name, bare=True).value() == name)


class Gemma4(ToolFormat):
    name = "gemma4"
    trigger, end = "<|tool_call>", "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    wraps: ClassVar[tuple[str, ...]] = (THOUGHT_END, "<|tool_response>")
    markers: ClassVar[tuple[str, ...]] = (trigger, end, quote, "<|channel>", *wraps)

    @classmethod
    def matches(cls, template: str) -> bool:
        return f"{cls.trigger}call:" in template

    # --- Grammar --------------------------------------------------------------------------------------------------------

    def final(self, writer: Writer) -> str:
        return ""

    def call(self, tool: Tool, writer: Writer) -> str:
        arguments = self._object(tool.parameters, writer, tool.name, 0)
        return f"{writer.text(f'call:{tool.name}')} {arguments} {writer.text(self.end)}"

    def between(self, writer: Writer) -> str | None:
        return writer.text(self.trigger)

    def _object(self, schema: Mapping[str, Any], writer: Writer, where: str, depth: int) -> str:
        # sorted as in the template
        parts = sorted((schema.get("properties") or {}).items(), key=lambda pair: pair[0].lower())
        if not parts and depth:
            return self._anything(writer)[1]

        def argument(name: str, part: Mapping[str, Any]) -> str:
            value = self._value(part, writer, f"{where}.{name}", depth + 1)
            return f"{writer.text(f'{name}:')} {value}"

        tool = Tool(where, {**schema, "properties": dict(parts)})
        pairs = properties(tool, argument, self, chr(34) + "," + chr(34), depth)
        return f'"{{" {pairs} "}}"'

    def carries(self, name: str, depth: int = 0) -> bool:
        if depth:  # parsed by `Literals`
            return re.fullmatch(r"[\w.$-][\w .$/-]*(?<! )", name) is not None and _is_word(name)
        is_begun = not name or (name[0] not in ",})" and not name.startswith(self.end))
        ends = (":", "}", self.end, '"', self.quote)
        return is_begun and name == name.strip() and not any(end in name for end in ends)

    def _value(self, schema: Mapping[str, Any], writer: Writer, where: str, depth: int) -> str:
        parts = alternatives(schema)
        writer.count(64)  # definitions are written again for each value
        if depth > MAX_NESTING or not parts:
            message = f"{where}: a schema that is nested as deeply can't be enforced in the format {self.name!r}"
            raise RequestError(message, field="tools")
        rules = [self._one(part, writer, where, depth) for part in parts]
        return f"({' | '.join(dict.fromkeys(rules))})"

    def _one(self, part: Mapping[str, Any], writer: Writer, where: str, depth: int) -> str:
        if is_text(part):
            return f"{writer.text(self.quote)} {text_rule(part, writer, where, self.quote)}"
        if "enum" in part or "const" in part:
            options = part.get("enum", [part.get("const")])
            return " | ".join(
                writer.text(f"{self.quote}{o}{self.quote}" if isinstance(o, str) else json.dumps(o))
                for o in options
            )
        match part.get("type"):
            case "object":
                return self._object(part, writer, where, depth)
            case "array":
                return self._array(part, writer, where, depth)
            case None if not {*part} & {
                "properties",
                "items",
                "minimum",
                "maximum",
                "not",
                "allOf",
            }:
                return self._anything(writer)[0]
            case None:
                raise RequestError(
                    f"{where}: a schema without a type can't be enforced in the format {self.name!r}",
                    field="tools",
                )
        return writer.schema(part)

    def _array(self, part: Mapping[str, Any], writer: Writer, where: str, depth: int) -> str:
        known = {"type", "items", "minItems", "maxItems", "$defs", "definitions"}
        notes = {"title", "description", "default", "examples"}
        if unknown := sorted({*part} - known - notes):
            message = (
                f"{where}: {unknown[0]} of a list can't be enforced in the format {self.name!r}"
            )
            raise RequestError(message, field="tools")
        defs = {k: part[k] for k in ("$defs", "definitions") if k in part}
        item = self._value({**defs, **(part.get("items") or {})}, writer, where, depth + 1)
        least, most = part.get("minItems", 0), part.get("maxItems", "")
        more = f'("," {item}){{{max(0, least - 1)},{most and most - 1}}}'
        some = f"{item} {more}" if most != 0 else ""
        return f'"[" {f"({some})" if least else f"({some})?" if some else ""} "]"'

    def _anything(self, writer: Writer) -> tuple[str, str]:
        """Adds rules for any value and for any object, and returns their names."""
        if "any_value" not in writer.rules:
            writer.rules["any_value"] = ""  # reserves the name, so that the next rule gets a number
            string = f"{writer.text(self.quote)} {writer.up_to(self.quote)}"
            writer.rules |= {
                "any_value": f'{string} | NUMBER | "true" | "false" | "null" | any_list | any_object',
                "any_list": '"[" (any_value ("," any_value)*)? "]"',
                "any_object": '"{" (any_pair ("," any_pair)*)? "}"',
                "any_pair": 'KEY ":" any_value',
                "KEY": r"/[\w.-]{1,64}/",
                "NUMBER": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?/",
            }
        return "any_value", "any_object"

    # --- Parser ---------------------------------------------------------------------------------------------------------

    def interrupts(self, tools: Sequence[Tool]) -> Sequence[str]:
        return (self.trigger,)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        bare = {f"call:{tool.name}{{": tool.name for tool in tools}
        openings = (self.trigger, THOUGHT, *bare)
        while opening := (yield from parser.until(openings, parser.content)):
            if opening == THOUGHT:
                yield from parser.until((THOUGHT_END,), parser.reasoning)
                continue
            name, raw = bare.get(opening, ""), ""
            if not name:
                for head in ("call:", ":"):  # some models forget the word
                    if not raw and (yield from parser.opens_with(head)):
                        raw = head
                name = yield from parser.name()
                raw += name
                if not is_name(name) or not (
                    (yield from parser.opens_with("{")) or (yield from parser.opens_with("("))
                ):
                    parser.refuse(opening, raw)
                    continue
            if (yield from self._arguments(parser, ArgumentsInParts(parser, tools, name))):
                yield from parser.opens_with(self.end)

    def _arguments(self, parser: Parser, call: ArgumentsInParts) -> Generator[None, None, bool]:
        """Parse arguments up to the closing bracket. False if they were truncated."""
        while True:
            while (c := (yield from parser.peek())).isspace() or c == ",":
                yield from parser.char()
            if c in ("}", ")"):
                yield from parser.char()
                call.end()
                return True
            if (yield from parser.opens_with(self.end, take=False)):  # the bracket is missing
                call.end()
                return True
            key, value = list[str](), list[str]()
            marker = yield from parser.until((":", "}", self.end), key.append)
            if marker in ("}", self.end):
                parser.put_back(marker)
                continue
            name = "".join(key).strip().removeprefix(self.quote).removesuffix(self.quote)
            if not marker or not (yield from self._raw_value(parser, value.append)):
                return False
            text = "".join(value).strip()
            try:
                if not text.startswith((self.quote, '"', "[", "{")):
                    raise ValueError
                reader = Literals(text, bare=True)
                found = reader.value()
                reader.end()
                call.add_value(name.strip('"'), found)
            except (ValueError, RecursionError):
                call.add(name.strip('"'), text)

    def _raw_value(self, parser: Parser, out: Callable[[str], None]) -> Generator[None, None, bool]:
        """Pass a value's text to `out`, up to the comma or bracket after it. False if it was
        truncated."""
        depth, before = 0, ":"
        while True:
            for quote in (self.quote, '"'):
                if before in ":,[{" and (yield from parser.opens_with(quote)):
                    out(quote)
                    if quote == '"':
                        yield from parser.rest_of_string(out)
                        closed = not parser.at_end
                    else:
                        closed = bool((yield from parser.until((quote,), out)))
                        out(quote)
                    if not closed:
                        return False
                    before = quote
            c = yield from parser.peek()
            if not c:
                return False
            if not depth and (c in ",})" or (yield from parser.opens_with(self.end, take=False))):
                return True
            depth += (c in "[{") - (c in "]}")
            out((yield from parser.char()))
            if not c.isspace():
                before = c


class FunctionGemma(Gemma4):
    name = "functiongemma"
    trigger, end = "<start_function_call>", "<end_function_call>"
    quote = "<escape>"
    markers = (trigger, end, quote)
    wraps = ()
