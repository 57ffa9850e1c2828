"""MiniMax M3's tool format: XML elements, named like arguments and like members of objects; items
of lists are named `item`. A mark precedes each tag."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from slipstream.engine.text.tool_formats.base import (
    CallSection,
    Parser,
    Script,
    Tool,
    Writer,
    drop,
    is_name,
)
from slipstream.engine.text.tool_formats.values import (
    NOTES,
    ArgumentsInParts,
    alternatives,
    is_text,
    properties,
    schema_of,
    text_rule,
    typed,
    with_defs,
)

MARK = "]<]minimax[>["
TAG, INVOKE, INVOKE_END = f"{MARK}<", f"{MARK}<invoke name=", "/invoke"

MAX_NESTING = 8
"""Maximum nesting of elements in a grammar. Deeper values are JSON."""

MAX_DEPTH = 32
"""Maximum nesting of elements in the parser. Deeper ones are text."""

_PLAIN = {"type", "items", "properties", "required", "additionalProperties", "$defs", "definitions"}

Element: TypeAlias = "str | list[tuple[str, Element]]"


class MiniMaxM3(CallSection):
    name = "minimax_m3"
    trigger, end = f"{TAG}tool_call>", f"{TAG}/tool_call>"
    markers = (MARK,)
    gap = "LINE?"
    think = "<mm:think>", "</mm:think>"

    @classmethod
    def matches(cls, template: str) -> bool:
        return MARK in template

    def call(self, tool: Tool, writer: Writer) -> str:
        writer.rules["LINE"] = r"/\n/"

        def argument(name: str, schema: Mapping[str, Any]) -> str:
            return f"{self._element(name, schema, writer, f'{tool.name}.{name}', 1)} LINE?"

        head = writer.text(f'{INVOKE}"{tool.name}">')
        arguments = properties(tool, argument, self)
        return f"LINE? {head} LINE? {arguments} {writer.text(f'{TAG}{INVOKE_END}>')}"

    def _element(
        self, name: str, schema: Mapping[str, Any], writer: Writer, where: str, depth: int
    ) -> str:
        """Grammar of an element for a schema. Values that can't be expressed by tags are JSON inside the element."""
        end, parts = f"{TAG}/{name}>", alternatives(schema)
        defs = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        writer.count(64)  # definitions are written again for each value
        part = parts[0] if len(parts) == 1 and depth < MAX_NESTING else {}
        kind, plain = part.get("type"), not set(part) - _PLAIN - NOTES
        if is_text(schema):
            value = text_rule(schema, writer, where, end)
        elif plain and kind == "array" and isinstance(part.get("items"), dict):
            items = with_defs(part["items"], defs)
            item = self._element("item", items, writer, where, depth + 1)
            value = f"(LINE? {item})* LINE? {writer.text(end)}"
        elif plain and kind == "object" and part.get("properties"):
            inner = properties(
                Tool(where, {**defs, **part}),
                lambda key, of: (
                    f"LINE? {self._element(key, of, writer, f'{where}.{key}', depth + 1)}"
                ),
                self,
            )
            value = f"{inner} LINE? {writer.text(end)}"
        else:
            value = f"{writer.schema(schema)} {writer.text(end)}"
        return f"{writer.text(f'{TAG}{name}>')} {value}"

    def carries(self, name: str, depth: int = 0) -> bool:
        is_end = name in ("", "invoke", "tool_call") or name.startswith("/")
        return not is_end and name == name.strip() and ">" not in name

    def whole(self, calls: str, writer: Writer) -> str:
        return super().whole(f"{calls} LINE?", writer)

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        while opening := (yield from parser.until((self.trigger, INVOKE), parser.content)):
            in_section = opening == self.trigger
            if in_section and not (yield from parser.opens_with(INVOKE)):
                parser.refuse(opening)
                continue
            opening = (opening if in_section else "") + INVOKE
            while (yield from self._call(parser, tools, opening)):
                opening = INVOKE
                if not (yield from parser.opens_with(INVOKE)):
                    yield from parser.opens_with(self.end)
                    break

    def _call(
        self, parser: Parser, tools: Sequence[Tool], opening: str
    ) -> Generator[None, None, bool]:
        """Parse a call after the beginning of its tag. False if it is none or was truncated."""
        head = list[str]()
        closed = yield from parser.until((">",), head.append)
        name = "".join(head).strip().strip("\"'")
        if not closed or not is_name(name):
            parser.refuse(opening, "".join(head) + closed)
            return False
        call = ArgumentsInParts(parser, tools, name)
        given = dict[str, Any]()
        while True:
            found = yield from self._next(parser)
            if found is None:
                return False
            key, value = found
            if key.startswith("/"):
                call.end()
                if key != INVOKE_END:
                    parser.put_back(f"{TAG}{key}>")
                return True
            schema = schema_of(tools, name, key)
            if key not in given:
                given[key] = made = _value(value, schema)
                call.add_value(key, made)

    def _next(self, parser: Parser) -> Generator[None, None, tuple[str, Element] | None]:
        """Parse the next element, or return the name of an end tag, with its slash. Text before it is dropped. None at the
        end of the answer."""
        # (name, text pieces, children) of open elements
        opened = list[tuple[str, list[str], list[tuple[str, Element]]]]()
        while True:
            name = list[str]()
            if not (yield from parser.until((TAG,), opened[-1][1].append if opened else drop)):
                return None
            if not (yield from parser.until((">",), name.append)):
                return None
            key = "".join(name).strip()
            if not key.startswith("/"):
                opened.append((key, [], []))
                continue
            if not opened:
                return key, ""
            ends_all = key in (INVOKE_END, "/tool_call")  # the model forgot to close elements
            if ends_all:
                parser.put_back(f"{TAG}{key}>")
            while True:
                key, text, parts = opened.pop()
                value: Element = parts or "".join(text)
                if not opened:
                    return key, value
                if len(opened) <= MAX_DEPTH:
                    opened[-1][2].append((key, value))
                if not ends_all:
                    break


def _value(element: Element, schema: Mapping[str, Any]) -> Any:
    """An element's value according to its schema."""
    defs = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    kinds = [part for part in alternatives(schema) if part.get("type") in ("array", "object")]
    kind = kinds[0] if kinds else {}
    if isinstance(element, str):
        if kind and not element.strip() and not is_text(schema):
            return [] if kind["type"] == "array" else {}
        return typed(element, schema)
    if kind.get("type") == "array" or (not kind and all(name == "item" for name, _ in element)):
        items = kind.get("items")
        return [_value(part, with_defs(items, defs)) for _, part in element]
    found, known = dict[str, Any](), kind.get("properties") or {}
    for name, part in element:
        value = _value(part, with_defs(known.get(name), defs))
        if name not in found:
            found[name] = value
        else:  # a repeated name means a list
            found[name] = [
                *(found[name] if isinstance(found[name], list) else [found[name]]),
                value,
            ]
    return found
