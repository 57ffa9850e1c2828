"""Regular expressions over bytes that accept what a JSON schema allows. No torch.

They accept exactly what llguidance's grammar of the schema accepts: the same whitespace, order of properties and spellings of
numbers. `SchemaUnknownError`: the schema has a keyword that this file does not translate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from slipstream.engine.grammars import regex_states
from slipstream.engine.grammars.schema_promises import draft_of

MAX_PARTS = 20_000
"""Maximum number of parts of a schema."""

MAX_NAMES = 32_768
"""Maximum characters of an object's property names for which other names are supported, too."""

MAX_TOGETHER = 32
"""Maximum number of parts in a row. Further ones are nested in the last one, which keeps the stack
of places short."""

MAX_BOUND = 10**15
"""Maximum bound of an integer that is translated."""

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_WORDS = {"title", "description", "default", "examples", "$comment", "$defs", "definitions", "readOnly"}  # fmt: skip
_KEYS = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_KNOWN = {"type", "enum", "const", "anyOf", "oneOf", "$ref"} | _WORDS | set[str]().union(*_KEYS.values())  # fmt: skip


class SchemaUnknownError(Exception):
    pass


class Expression:
    """An expression: a `set` of bytes as bits, `all` parts in sequence, `any` of several, a
    repetition (`times`), or one defined later (`later`)."""

    __slots__ = "bits", "kind", "least", "most", "parts"

    def __init__(
        self,
        kind: str,
        parts: tuple[Expression, ...] = (),
        bits: int = 0,
        least: int = 0,
        most: int | None = None,
    ) -> None:
        self.kind, self.parts, self.bits, self.least, self.most = kind, parts, bits, least, most


def _bytes(first: int, last: int) -> Expression:
    return Expression("set", bits=((1 << (last + 1)) - 1) & ~((1 << first) - 1))


def _one_of(chars: str) -> Expression:
    bits = 0
    for char in chars:
        bits |= 1 << ord(char)
    return Expression("set", bits=bits)


def _all(*parts: Expression) -> Expression:
    if len(parts) > MAX_TOGETHER:
        left = list(parts)
        while len(left) > MAX_TOGETHER:
            left[-MAX_TOGETHER:] = [Expression("all", tuple(left[-MAX_TOGETHER:]))]
        parts = tuple(left)
    return parts[0] if len(parts) == 1 else Expression("all", parts)


def _any(*parts: Expression) -> Expression:
    return parts[0] if len(parts) == 1 else Expression("any", parts)


def _times(part: Expression, least: int, most: int | None) -> Expression:
    return Expression("times", (part,), least=least, most=most)


def _text(text: str) -> Expression:
    return _all(*[Expression("set", bits=1 << byte) for byte in text.encode()])


NOTHING = Expression("all")
_MORE = _bytes(0x80, 0xBF)
_WIDE = _any(
    _all(_bytes(0xC2, 0xDF), _MORE),
    _all(_bytes(0xE0, 0xE0), _bytes(0xA0, 0xBF), _MORE),
    _all(Expression("set", bits=_bytes(0xE1, 0xEC).bits | _bytes(0xEE, 0xEF).bits), _MORE, _MORE),
    _all(_bytes(0xED, 0xED), _bytes(0x80, 0x9F), _MORE),
    _all(_bytes(0xF0, 0xF0), _bytes(0x90, 0xBF), _MORE, _MORE),
    _all(_bytes(0xF1, 0xF3), _MORE, _MORE, _MORE),
    _all(_bytes(0xF4, 0xF4), _bytes(0x80, 0x8F), _MORE, _MORE),
)
_SPACE = _one_of(" \t\n\r").bits
NARROW = _bytes(0x20, 0x7E).bits & ~_one_of('"\\').bits  # plain characters of ASCII
LEADS = _bytes(0xC2, 0xF4).bits
_DIGIT, _HEX = _bytes(48, 57), _one_of("0123456789abcdefABCDEF")
_WHOLE = _any(_text("0"), _all(_bytes(49, 57), _times(_DIGIT, 0, None)))
_MAYBE_MINUS = _times(_text("-"), 0, 1)
_INTEGER = _all(_MAYBE_MINUS, _WHOLE)
_FRACTION = _times(_all(_text("."), _times(_DIGIT, 1, None)), 0, 1)
_EXPONENT = _all(_one_of("eE"), _times(_one_of("+-"), 0, 1), _times(_DIGIT, 1, None))
_NUMBER = _all(_INTEGER, _FRACTION, _times(_EXPONENT, 0, 1))
_QUOTE = _text('"')


def _plain(text: str) -> str:
    """The text, which must need no escapes in JSON; SchemaUnknownError otherwise."""
    if any(char in '"\\' or ord(char) < 32 or ord(char) == 127 for char in text):
        raise SchemaUnknownError
    return text


def _between(low: int, high: int) -> Expression:
    """Expression of the whole numbers from `low` to `high`, in decimal digits; `low` is at least 0."""
    a, b = str(low), str(high)
    if len(a) < len(b):
        border = 10 ** len(a) - 1
        return _any(_between(low, border), _between(border + 1, high))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    if same == len(a):
        return _text(a)
    x, y, rest = int(a[same]), int(b[same]), len(a) - same - 1
    if not rest:
        return _all(*_texts(a[:same]), _bytes(48 + x, 48 + y))
    # numbers with the same leading digits: from `low` on, whole tens, up to `high`
    full = 10**rest
    parts = list[Expression]()
    low_rest, high_rest = int(a[same + 1 :]), int(b[same + 1 :])
    first, last = x + (low_rest > 0), y - (high_rest < full - 1)
    if low_rest > 0:
        parts.append(_all(_text(str(x)), _padded(low_rest, full - 1, rest)))
    if first <= last:
        parts.append(_all(_bytes(48 + first, 48 + last), _times(_DIGIT, rest, rest)))
    if high_rest < full - 1:
        parts.append(_all(_text(str(y)), _padded(0, high_rest, rest)))
    return _all(*_texts(a[:same]), _any(*parts))


def _texts(text: str) -> list[Expression]:
    return [_text(text)] if text else []


def _padded(low: int, high: int, width: int) -> Expression:
    """Expression of the numbers from `low` to `high`, written with `width` digits, leading zeros
    included."""
    a, b = f"{low:0{width}}", f"{high:0{width}}"
    if a == b:
        return _text(a)
    if width == 1:
        return _bytes(48 + low, 48 + high)
    x, y, full = int(a[0]), int(b[0]), 10 ** (width - 1)
    if x == y:
        return _all(_text(a[0]), _padded(low % full, high % full, width - 1))
    parts = [_all(_text(a[0]), _padded(low % full, full - 1, width - 1))]
    if x + 1 < y:
        parts.append(_all(_bytes(49 + x, 47 + y), _times(_DIGIT, width - 1, width - 1)))
    return _any(*parts, _all(_text(b[0]), _padded(0, high % full, width - 1)))


def _integers(low: int | None, high: int | None) -> Expression:
    """Integers within bounds, as llguidance spells them: -0 is one if the bounds admit both signs."""
    if any(bound is not None and abs(bound) > MAX_BOUND for bound in (low, high)):
        raise SchemaUnknownError
    minus = _text("-")
    if low is None:
        if high is None:
            return _INTEGER
        if high >= 0:
            return _any(_between(0, high), _integers(None, -1))
        return _all(minus, _integers(-high, None))
    if high is None:
        if low < 0:
            return _any(_integers(low, -1), _integers(0, None))
        digits = len(str(low))
        longer = _all(_bytes(49, 57), _times(_DIGIT, digits, None))
        return _any(_between(low, 10**digits - 1), longer)
    if low > high:
        raise SchemaUnknownError
    if high < 0:
        return _all(minus, _between(-high, -low))
    if low < 0:
        return _any(_all(minus, _between(0, -low)), _between(0, high))
    return _between(low, high)


class _Writer:
    """Translates a schema's parts as llguidance interprets them."""

    def __init__(self, root: dict[str, Any]) -> None:
        options = root.get("x-guidance", {})
        if draft_of(root) in ("draft-03", "draft-04"):
            raise SchemaUnknownError
        if not options.keys() <= {
            "whitespace_pattern",
            "whitespace_flexible",
            "json_allowed_escapes",
        }:
            raise SchemaUnknownError
        pattern = options.get("whitespace_pattern")
        if pattern is None:
            if options.get("whitespace_flexible") is not False:
                raise SchemaUnknownError
            self._space = NOTHING
        else:
            pattern = re.sub(r"\\x([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), pattern)
            self._space = _times(_pattern(pattern, _SPACE), 0, 1)
        escapes = options.get("json_allowed_escapes", 'nrbtf\\"u')
        short = [_one_of(escapes.replace("u", ""))]
        if "u" in escapes:  # only of control characters
            last = _any(_all(_one_of("01"), _HEX), _all(_text("7"), _one_of("fF")))
            short.append(_all(_text("u00"), last))
        self._escape = _all(_text("\\"), _any(*short))
        self._char = _any(Expression("set", bits=NARROW), _WIDE, self._escape)
        self._chars = _times(self._char, 0, None)
        self._defined, self._num_parts = dict[str, Expression](), 0
        self._value = Expression("later")
        self._value.parts = (
            _any(
                *map(_text, ("null", "true", "false")),
                _NUMBER,
                self._string({}),
                self._list(self._value, 0, None),
                self._object({}, [], self._value),
            ),
        )
        self._root = {k: v for k, v in root.items() if k not in ("x-guidance", "$schema")}
        self.whole = self._of(self._root)

    def _of(self, schema: Any) -> Expression:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise SchemaUnknownError
        if schema is True:
            return self._value
        if not isinstance(schema, dict):
            raise SchemaUnknownError
        keys = schema.keys() - _WORDS
        if not keys <= _KNOWN:
            raise SchemaUnknownError
        for one in ("$ref", "anyOf", "oneOf"):
            if one in keys:
                if len(keys) > 1:
                    raise SchemaUnknownError
                if one == "$ref":
                    return self._referred(schema[one])
                return _any(*[self._of(part) for part in schema[one]])
        if "enum" in keys or "const" in keys:
            if not keys <= {"enum", "const", "type"} or {"enum", "const"} <= keys:
                raise SchemaUnknownError
            values = schema["enum"] if "enum" in keys else [schema["const"]]
            return _any(*[self._constant(value, schema.get("type")) for value in values])
        if not keys:
            return self._value
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else list(dict.fromkeys(types))
        if any(key in keys for key in ("minimum", "maximum")) and "number" in types:
            raise SchemaUnknownError
        return _any(*[self._typed(schema, kind) for kind in types])

    def _typed(self, schema: dict[str, Any], kind: str) -> Expression:
        match kind:
            case "null":
                return _text("null")
            case "boolean":
                return _any(_text("true"), _text("false"))
            case "number":
                return _NUMBER
            case "integer":
                low, high = (schema.get(name) for name in ("minimum", "maximum"))
                if not all(bound is None or type(bound) is int for bound in (low, high)):
                    raise SchemaUnknownError
                return _integers(low, high)
            case "string":
                return self._string(schema)
            case "array":
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                return self._list(self._of(schema.get("items", True)), least, most)
            case "object":
                more = schema.get("additionalProperties", True)
                return self._object(
                    schema.get("properties", {}),
                    schema.get("required", []),
                    None if more is False else self._of(more),
                )
        raise SchemaUnknownError

    def _constant(self, value: Any, kind: Any) -> Expression:
        is_kind = {
            "string": isinstance(value, str),
            "integer": type(value) is int,
            "boolean": isinstance(value, bool),
            "null": value is None,
        }
        if not (is_kind.get(kind, False) if kind is not None else any(is_kind.values())):
            raise SchemaUnknownError
        if isinstance(value, str):
            return _text(f'"{_plain(value)}"')
        if type(value) is int:
            return _integers(value, value)
        return _text(json.dumps(value))

    def _referred(self, name: Any) -> Expression:
        if not isinstance(name, str):
            raise SchemaUnknownError
        if (found := self._defined.get(name)) is None:
            kind, _, key = name.removeprefix("#/").partition("/")
            if name == "#":
                target: Any = self._root
            elif name == f"#/{kind}/{key}" and kind in ("$defs", "definitions") and key.isalnum():
                target = self._root.get(kind, {}).get(key)
            else:
                raise SchemaUnknownError
            found = self._defined[name] = Expression("later")
            found.parts = (self._of(target),)
        return found

    def _string(self, schema: dict[str, Any]) -> Expression:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            pattern = schema["pattern"]
            if least or most is not None or pattern[:1] + pattern[-1:] != "^$" or len(pattern) < 3:
                raise SchemaUnknownError
            return _all(_QUOTE, _pattern(pattern[1:-1], within=NARROW), _QUOTE)
        if most is not None and least > most:
            raise SchemaUnknownError
        return _all(_QUOTE, _times(self._char, least, most) if least or most is not None else self._chars, _QUOTE)  # fmt: skip

    def _list(self, item: Expression, least: int, most: int | None) -> Expression:
        if most is not None and least > most:
            raise SchemaUnknownError
        space = self._space
        more = _times(
            _all(_text(","), space, item, space),
            max(0, least - 1),
            None if most is None else max(0, most - 1),
        )
        items = _times(_all(item, space, more), min(1, least), 1)
        return _all(_text("["), space, NOTHING if most == 0 else items, _text("]"))

    def _object(
        self, properties: dict[str, Any], required: Sequence[str], more: Expression | None
    ) -> Expression:
        """Returns the expression of an object. `more`: the value of other properties, None if there
        are none."""
        space, colon = self._space, _text(":")
        listed = {**properties, **{name: None for name in required if name not in properties}}
        items, needed = list[tuple[Expression, bool]](), set(required)
        for name, schema in listed.items():
            value = self._of(schema) if name in properties else more
            if value is None:
                raise SchemaUnknownError
            key = _text(f'"{_plain(name)}"')
            items.append((_all(key, space, colon, space, value, space), name in needed))
        comma = _all(_text(","), space)
        if more is not None:
            one = _all(self._other_name(list(listed)), space, colon, space, more, space)
            items.append((_all(one, _times(_all(comma, one), 0, None)), False))
        first = rest = NOTHING  # expressions of the rest: before the first property, and after one
        for item, is_required in reversed(items):
            begun = _all(item, rest)
            first = begun if is_required else _any(begun, first)
            after = _all(comma, item)
            rest = _all(after if is_required else _times(after, 0, 1), rest)
        return _all(_text("{"), space, first, _text("}"))

    def _other_name(self, names: Sequence[str]) -> Expression:
        """Expression of a property name other than the given ones."""

        def after(endings: list[str]) -> Expression:
            """Expression of a string's rest, such that the text is none of the `endings`."""
            if not endings:
                return _all(self._chars, _QUOTE)
            by_byte: dict[int, list[str]] = {}
            for ending in endings:
                if ending:
                    by_byte.setdefault(ord(ending[0]), []).append(ending[1:])
            taken = sum(1 << byte for byte in by_byte)
            others = _any(Expression("set", bits=NARROW & ~taken), _WIDE, self._escape)
            parts = [_all(others, self._chars, _QUOTE)]
            parts += [_all(Expression("set", bits=1 << byte), after(own)) for byte, own in by_byte.items()]  # fmt: skip
            return _any(*parts) if "" in endings else _any(_QUOTE, *parts)

        if sum(map(len, names)) > MAX_NAMES or not all(name.isascii() for name in names):
            raise SchemaUnknownError
        return _all(_QUOTE, after(list(names)))


_UNSURE = re.compile(r"\[\^|\\[A-Zux]|(?<!\\)\.|[^\x00-\x7f]")
"""Syntax that may match non-ASCII characters."""


def _pattern(text: str, within: int) -> Expression:
    """An ASCII-only regular expression whose characters are all in the set `within`."""
    if _UNSURE.search(text):
        raise SchemaUnknownError
    try:
        return _from_regex(regex_states.parse(text), within)
    except regex_states.UnknownSyntaxError:
        raise SchemaUnknownError from None


def _from_regex(part: regex_states.Part, within: int) -> Expression:
    kind, own = part
    if kind == "set":
        if not own or own & ~within:
            raise SchemaUnknownError
        return Expression("set", bits=own)
    if kind == "times":
        inner, least, most = own
        return _times(_from_regex(inner, within), least, most)
    parts = [_from_regex(each, within) for each in own]
    return _all(*parts) if kind == "all" else Expression(kind, tuple(parts))


def expression_of(grammar: str) -> Expression:
    """Expression of a schema given as llguidance's grammar. SchemaUnknownError if it can't be
    expressed here."""
    [part, *others] = json.loads(grammar)["grammars"]
    if others or "json_schema" not in part:
        raise SchemaUnknownError
    return _Writer(part["json_schema"]).whole
