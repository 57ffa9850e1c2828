"""Schemas for structured answers, and their validation.

Texts, lists and numbers are short, so that any model's answer ends."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

from slipstream.errors import ConfigError, install_command

WORD = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """Schema of an object without further properties. All properties are required if `required` is None."""
    names = list(properties) if required is None else required
    given = {"type": "object", "properties": properties, "required": names}
    return given | {"additionalProperties": False}


TREE = closed(value=SMALL, left={"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]})
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=WORD, age=SMALL),
    "integer bounds": closed(n={"type": "integer", "minimum": -3, "maximum": 12}),
    "exclusive bounds": closed(n={"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 7}),
    "number bounds": closed(x={"type": "number", "minimum": 0, "maximum": 1}),
    "multipleOf": closed(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}),
    "boolean and null": closed(ok={"type": "boolean"}, none={"type": "null"}),
    "enum of texts": closed(colour={"type": "string", "enum": ["red", "green", "blue"]}),
    "enum of many types": closed(value={"enum": ["a", 1, True, None]}),
    "const": closed(kind={"const": "person"}, version={"const": 2}),
    "text lengths": closed(text={"type": "string", "minLength": 3, "maxLength": 6}),
    "pattern": closed(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}),
    "format date": closed(day={"type": "string", "format": "date"}),
    "format uuid": closed(id={"type": "string", "format": "uuid"}),
    "format ipv4": closed(address={"type": "string", "format": "ipv4"}),
    "list of integers": closed(xs={"type": "array", "items": SMALL, "minItems": 2, "maxItems": 3}),
    "list of objects": closed(
        rows={"type": "array", "items": closed(id=SMALL, name=WORD), "minItems": 1, "maxItems": 2}
    ),
    "empty list": closed(xs={"type": "array", "maxItems": 0}),
    "tuple": closed(
        pair={"type": "array", "prefixItems": [WORD, SMALL], "items": False, "minItems": 2}
    ),
    "nested": closed(a=closed(b=closed(c={"type": "boolean"}, d=SMALL))),
    "optional": closed(["name"], name=WORD, nick=WORD, age=SMALL),
    "nullable": closed(name={"type": ["string", "null"], "maxLength": 12}),
    "anyOf": closed(value={"anyOf": [SMALL, {"type": "boolean"}, closed(unit=WORD)]}),
    "oneOf": closed(value={"oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, WORD]}),
    "allOf": {"allOf": [closed(name=WORD)]},
    "$ref": closed(at={"$ref": "#/$defs/place"}) | {"$defs": {"place": closed(x=SMALL, y=SMALL)}},
    "recursive $ref": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    "additionalProperties": closed(a=SMALL)
    | {"additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "odd names": closed(None, **{'a "b"': SMALL, "naïve 名": SMALL, "x/y~z\\": WORD}),
    "list at the top": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
}


def require_judge() -> None:
    """Raise ConfigError, with the remedy, if jsonschema is not installed."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ConfigError(
            f"conformance: schemas are judged by jsonschema; {install_command('conformance')}",
            field="only",
        )


def faults(value: Any, schema: dict[str, Any]) -> str:
    """Faults of a value according to jsonschema; "" if there are none."""
    import jsonschema

    judge = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return "; ".join(error.message[:120] for error in judge.iter_errors(value))


def begins_json(text: str) -> bool:
    """Whether a text is the beginning of some JSON, such as an answer that was cut off. Prose and code fences are not."""
    text = text.strip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        words = ("", "true", "false", "null", "-")
        is_open = error.msg.startswith("Unterminated string") or any(
            word.startswith(rest) for word in words
        )
        is_number = error.pos and text[error.pos - 1].isdigit()
        is_escape = "escape" in error.msg and len(text) - error.pos <= len("u0000")
        return is_open or is_escape or bool(is_number and re.fullmatch(r"\.|[eE][+-]?", rest))
    return True
