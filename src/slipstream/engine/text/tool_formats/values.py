"""Arguments written one by one, as plain text or JSON, instead of one JSON object."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.engine.grammars.schema_promises import translate
from slipstream.engine.text.tool_formats.base import (
    MAX_GRAMMAR,
    Parser,
    Tool,
    ToolFormat,
    Writer,
    dumps,
)
from slipstream.errors import RequestError

NOTES = {
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
}
"""Schema keys that don't constrain a value."""


def properties(
    tool: Tool,
    write: Callable[[str, Mapping[str, Any]], str],
    form: ToolFormat,
    between: str = "",
    depth: int = 0,
) -> str:
    """The grammar of a tool's arguments in order, where optional ones may be omitted. `write` makes
    the grammar of one argument. Optional arguments whose names the format can't represent are
    always omitted. RequestError if the schema can't be expressed this way."""
    schema = tool.parameters
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    unknown = sorted(set(schema) - known - NOTES)
    if unknown or schema.get("type", "object") != "object":
        what = unknown[0] if unknown else "type"
        raise RequestError(
            f"parameters of {tool.name}: {what} can't be enforced in the format {form.name!r}",
            field="tools",
        )
    required = set(schema.get("required", ()))
    defs = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    if missing := sorted(required - set(schema.get("properties", {}))):
        raise RequestError(
            f"parameters of {tool.name}: {missing[0]} is required and has no schema", field="tools"
        )
    for name in sorted(required):
        if not form.carries(name, depth):
            raise RequestError(
                f"parameters of {tool.name}: {name!r} can't be the name of an argument in the format {form.name!r}; give it "
                "another",
                field="tools",
            )
    whole, first = "", True  # from the last to the first: each with the separator before it
    parts = [
        (name, write(name, with_defs(part, defs)))
        for name, part in schema.get("properties", {}).items()
        if form.carries(name, depth)
    ]
    if not between:
        return " ".join(f"({text})" if name in required else f"({text})?" for name, text in parts)
    texts = [
        f" ({between} {text})" if name in required else f" ({between} {text})?"
        for name, text in parts
    ]
    rest, num_characters = sum(map(len, texts)), 0
    for begin, (name, text) in enumerate(parts):
        rest -= len(texts[begin])
        num_characters += rest  # grows with the square of the number of optional arguments before the first required one
        if num_characters > MAX_GRAMMAR:
            raise RequestError(
                f"parameters of {tool.name}: its grammar is longer than {MAX_GRAMMAR} characters in the format "
                f"{form.name!r}; make more of them required, or have fewer",
                field="tools",
            )
        whole += ("" if first else " | ") + f"({text}{''.join(texts[begin + 1 :])})"
        first = False
        if name in required:
            return f"({whole})"
    return f"({whole})?" if whole else ""


def with_defs(schema: Any, defs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**defs, **schema} if isinstance(schema, dict) else defs


MAX_ALTERNATIVES = 1024
"""Maximum number of schemas examined when one is split into alternatives. A value with more is written and parsed as
JSON."""


def alternatives(schema: Any) -> list[Mapping[str, Any]]:
    """Splits a schema into simple alternatives, one of which a value must match: those of `anyOf`,
    `oneOf`, a list of types and `$ref`."""
    found, todo, seen = list[Mapping[str, Any]](), deque([(schema, 0)]), 0
    while todo:
        part, depth = todo.popleft()
        seen += 1
        if seen > MAX_ALTERNATIVES:
            return []
        if not isinstance(part, dict) or depth > 8:
            continue
        rest = {k: v for k, v in part.items() if k not in ("anyOf", "oneOf", "$ref")}
        defs = {k: part[k] for k in ("$defs", "definitions") if k in part}
        inner = [*(part.get("anyOf") or ()), *(part.get("oneOf") or ())]
        if isinstance(reference := part.get("$ref"), str):
            inner.append(_definition(reference, defs))
        if inner:
            todo += [({**rest, **one}, depth + 1) for one in inner if isinstance(one, dict)]
        elif isinstance(part.get("type"), list):
            found += [{**part, "type": kind} for kind in part["type"]]
        else:
            found.append(part)
    return found


def _definition(reference: str, defs: Mapping[str, Any]) -> Any:
    place, _, name = reference.removeprefix("#/").partition("/")
    return (defs.get(place) or {}).get(name.replace("~1", "/").replace("~0", "~"))


def _is_text(schema: Mapping[str, Any]) -> bool:
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options is not None:
        return bool(options) and all(isinstance(option, str) for option in options)
    return schema.get("type") == "string"


def _is_null(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "null" or schema.get("enum", schema.get("const", 0)) in (
        [None],
        None,
    )


def is_text(schema: Any) -> bool:
    """Whether a value is written as plain text, because its schema allows a string."""
    return any(map(_is_text, alternatives(schema)))


def text_rule(schema: Mapping[str, Any], writer: Writer, where: str, end: str) -> str:
    """The grammar of a plain-text value and of the marker `end` after it. If the schema also allows
    other types, the model writes a string or null."""
    parts = alternatives(schema)
    rules = [_text_rule(part, writer, where, end) for part in parts if _is_text(part)]
    if any(map(_is_null, parts)):
        rules.append(f'"null" {writer.text(end)}')
    return rules[0] if len(rules) == 1 else f"({' | '.join(dict.fromkeys(rules))})"


def _text_rule(schema: Mapping[str, Any], writer: Writer, where: str, end: str) -> str:
    known = {"type", "enum", "const", "pattern", "minLength", "maxLength", "$defs", "definitions"}
    unknown = sorted(set(schema) - known - NOTES)
    if unknown or ("pattern" in schema and {"minLength", "maxLength"} & set(schema)):
        what = unknown[0] if unknown else "pattern beside a length"
        raise RequestError(
            f"{where}: {what} of a text can't be enforced in this format", field="tools"
        )
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options is not None:
        written = " | ".join(json.dumps(o, ensure_ascii=False) for o in options)
        writer.count(len(written))
        return f"({written}) {writer.text(end)}"
    if "pattern" in schema:
        try:
            pattern = translate(str(schema["pattern"]))
        except ValueError as error:
            raise RequestError(f"{where}: {error}", field="tools") from None
        begins = pattern.startswith("^")
        ends = pattern.endswith("$") and _num_backslashes(pattern[:-1]) % 2 == 0
        inner = f"(?:{pattern[begins : len(pattern) - ends]})"
        inner = ("" if begins else "[^<]*") + inner + ("" if ends else "[^<]*")
        regex = f"/{inner.replace('/', chr(92) + '/')}/"
        if "<" in pattern:
            return f"{regex} {writer.text(end)}"
        name = f"TEXT_{len(writer.rules)}"
        writer.rules[name] = f"{regex} & /[^<]*/"  # otherwise it would match the marker, too
        return f"{name} {writer.text(end)}"
    if {"minLength", "maxLength"} & set(schema):
        return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/ {writer.text(end)}"
    return writer.up_to(end)


def _num_backslashes(text: str) -> int:
    """Number of backslashes at the end of `text`."""
    return len(text) - len(text.rstrip("\\"))


_WORDS = {"True": True, "False": False, "None": None}
"""Python's words, which models write instead of JSON's."""


def schema_of(tools: Sequence[Tool], function: str, name: str) -> Mapping[str, Any]:
    """Schema of an argument, including the definitions that it references."""
    schema = next((t.parameters for t in tools if t.name == function), {})
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, dict) else None
    return with_defs(own, {k: schema[k] for k in ("$defs", "definitions") if k in schema})


def value_of(
    text: str, tools: Sequence[Tool], function: str, name: str, is_string: bool | None = None
) -> Any:
    """Value of an argument that a model wrote, by its schema: a string if one is allowed, else parsed JSON,
    else the text. `is_string`: whether the model marked it as a string; used if the schema has no type."""
    return typed(text, schema_of(tools, function, name), is_string)


def typed(text: str, schema: Mapping[str, Any], is_string: bool | None = None) -> Any:
    """`value_of` for a given schema."""
    parts = alternatives(schema)
    word = text.strip()
    if any(map(_is_text, parts)):
        return None if word in ("null", "None") and any(map(_is_null, parts)) else text
    if is_string and not any({*part} - {"$defs", "definitions"} for part in parts):
        return text
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return text


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class ArgumentsInParts:
    """A call whose arguments arrive one by one. `end` is not called if the call was cut off."""

    def __init__(self, parser: Parser, tools: Sequence[Tool], function: str) -> None:
        self._parser, self._tools, self._function = parser, tools, function
        self._before = "{"
        parser.begin_call(function)

    def add(self, name: str, text: str, is_string: bool | None = None) -> None:
        """Add an argument given as the model wrote it."""
        self.add_value(name, value_of(text, self._tools, self._function, name, is_string))

    def add_value(self, name: str, value: Any) -> None:
        self._parser.arguments(f"{self._before}{dumps(name)}: {dumps(value)}")
        self._before = ", "

    def end(self) -> None:
        self._parser.arguments("{}" if self._before == "{" else "}")
