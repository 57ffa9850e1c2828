"""Llama 3's two: one JSON object with "name" and "parameters" (3.1), and a list of calls as Python writes them (3.2, 4).
In both the calls are the whole answer."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engine.text.tool_formats.base import (
    MAX_NAME,
    Parser,
    Script,
    Tool,
    ToolFormat,
    Writer,
)
from slipstream.engine.text.tool_formats.values import properties


class Llama3Json(ToolFormat):
    name = "llama3_json"
    markers = ("<|python_tag|>",)
    other = r"[^{<\s](?s:.*)"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|python_tag|>" in template or (
            "<|start_header_id|>" in template and '"parameters"' in template
        )

    def call(self, tool: Tool, writer: Writer) -> str:
        begin = '{"name": ' + json.dumps(tool.name) + ', "parameters": '
        return f'{writer.text(begin)} {writer.schema(tool.parameters)} "}}"'

    def between(self, writer: Writer) -> str:
        return '"; "'

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        begin = ""
        while True:
            if (yield from parser.opens_with("<|python_tag|>")):
                begin = "<|python_tag|>"
            yield from parser.spaces(parser.content)
            if (yield from parser.peek()) != "{" or not (
                yield from parser.call_object(begin, ("parameters", "arguments"))
            ):
                break
            if not (yield from parser.opens_with(";")):
                return
            begin = ""


class Pythonic(ToolFormat):
    name = "pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    other = r"[^\[<\s](?s:.*)"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "func_name1(params_name1=params_value1" in template

    def call(self, tool: Tool, writer: Writer) -> str:
        def value(schema: Mapping[str, Any]) -> str:
            return (
                '("True" | "False")'
                if schema.get("type") == "boolean" and len(schema) == 1
                else writer.schema(schema)
            )

        arguments = properties(
            tool,
            lambda name, schema: f"{writer.text(name + '=')} {value(schema)}",
            self.name,
            '", "',
        )
        return f'{writer.text(tool.name + "(")} {arguments} ")"'

    def between(self, writer: Writer) -> str:
        return '", "'

    def whole(self, calls: str, writer: Writer) -> str:
        return f'"[" {calls} "]"'

    def script(self, parser: Parser, tools: Sequence[Tool]) -> Script:
        began = yield from parser.opens_with("<|python_start|>")
        if not (yield from parser.opens_with("[")):
            if began:
                parser.content("<|python_start|>")
            return
        before = "["
        while True:
            raw = [before]
            yield from parser.spaces(raw.append)
            name = list[str]()
            while (
                (c := (yield from parser.peek()))
                and (c.isalnum() or c in "_.-")
                and len(name) < MAX_NAME
            ):
                name.append((yield from parser.char()))
            raw += name
            text = list[str]()
            if c == "(":
                yield from _parentheses(parser, text.append)
            raw += text
            found = _keywords("".join(text)) if name else None
            if found is None:
                parser.content("".join(raw))
                return
            parser.call("".join(name), found)
            if not (yield from parser.opens_with(",")):
                break
            before = ""
        if (yield from parser.opens_with("]")):
            yield from parser.opens_with("<|python_end|>")


def _parentheses(parser: Parser, out: Any) -> Script:
    """Pass the text from "(" to its matching ")" on to `out`. Brackets in Python strings do not
    count."""
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
    """The arguments of "(a=1, b='x')"; None if it is something else."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        found = {str(k.arg): _literal(k.value) for k in call.keywords if k.arg is not None}
        json.dumps(found)
        return found if len(found) == len(call.keywords) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_literal(k)): _literal(v)
                for k, v in zip(keys, values, strict=True)
                if k is not None
            }
        case _:
            return ast.literal_eval(node)
