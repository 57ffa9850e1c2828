"""Rewrites a JSON schema so that answers which llguidance allows are valid for a JSON parser and a validator.

llguidance constrains an answer's text. A client parses the text, then validates the parsed value. These differ:

1. A parser reads `"\\u0061"` as the name `a`. Where additional properties are allowed next to named ones, `\\u` escapes are
   forbidden.
2. A parser rounds numbers to doubles, and llguidance reads some doubles of a schema inexactly. Exclusive bounds become
   inclusive ones of at most 15 digits.
3. ECMA-262, Python and llguidance's regular expressions have different character classes (`\\s`, `\\W`, `.`). A string
   matches a pattern only if ECMA-262 and Python agree.
4. Formats are checked by value: a date must exist, a leap second must be possible.
5. A parser keeps one of two equal names, so repeated names can't count for `minProperties`.
6. `$ref`, `$id`, `$schema` and `additionalItems` mean what the schema's draft says.

ValueError names a part that can't be rewritten. Definitions that no `$ref` reaches are ignored.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard
from urllib.parse import unquote, urldefrag, urljoin

NO_UNICODE_ESCAPES = 'nrbtf\\"'
"""The letters that may follow a backslash in a string: all of JSON's but `/` and `u`."""

MAX_INTEGER = 2**63 - 1024
"""Largest double that fits in a signed 64-bit integer. Bounds beyond it are replaced by it."""

MAX_DECIMALS = 20
"""Number of decimals of an inclusive bound that stands for an exclusive one: "above 0" begins at
1e-20."""

SHORT_STEP = 1e-4
"""Step of numbers with few decimals, which doubles distinguish from each other and from any
bound."""

MAX_ID = 2000
"""Maximum number of characters of the schema's `$id`. Each reference is resolved against it."""

_SHOWN = 20
_MAPS = {"properties", "patternProperties"}
_PARTS = {
    "anyOf",
    "oneOf",
    "allOf",
    "prefixItems",
    "items",
    "additionalProperties",
    "additionalItems",
}
_DEFINITIONS = {"$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_MERGED = {"$ref", "multipleOf"} | _MAPS | _PARTS
_LATER = {
    "const",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "prefixItems",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
}
"""Keywords that older drafts lack."""

_EVERY_NAME: tuple[dict[str, str], ...] = ({}, {"type": "string"})
"""Schemas that every name of a property fits, since names are strings."""

_DRAFT_3 = {"extends", "disallow", "divisibleBy"}


def promise(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `schema` in place, and return the options with which llguidance must compile it.
    ValueError names a part that can't be enforced."""
    if "x-guidance" in schema:
        raise ValueError(
            "x-guidance would change what is enforced; leave it out (disable_any_whitespace and whitespace_pattern say what "
            "whitespace may stand between tokens)"
        )
    walk = _Walk(schema)
    for part, path in walk.parts():
        try:
            _rewrite(part, walk)
        except ValueError as error:
            raise ValueError(f"{error}{_where(path)}") from None
        walk.has_control |= _has_control([part.get("const"), part.get("enum")])
    walk.check_references()
    if walk.merges and len(walk.factors) > 1:
        whole = [int(factor * max(f.denominator for f in walk.factors)) for factor in walk.factors]
        if math.lcm(*whole) * max(whole) >= 2**32:
            raise ValueError(
                "parts that are combined have multipleOf without a small common multiple"
            )
    if not walk.is_open:
        return {}
    if walk.has_control:
        raise ValueError(
            "const and enum have control characters, which need \\u escapes, and names of properties that may be free can't "
            "have them; set additionalProperties to false"
        )
    return {"json_allowed_escapes": NO_UNICODE_ESCAPES}


_Path = tuple["_Path", str] | None
"""Path of a part: the path of the enclosing part, and a name. Paths as strings would take gigabytes
below a part with a long name."""


def _where(path: _Path) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(name)
    return f" (in the schema's {'.'.join(reversed(names))})" if names else ""


class _Walk:
    """The parts of a schema that can be reached, and what was found in them. A `$ref` is resolved by the innermost part around
    it that has its own `$id`, here called its base."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.draft = draft_of(root)
        self._id_key = "id" if self.draft in ("draft-03", "draft-04") else "$id"
        if len(own := str(root.get(self._id_key, ""))) > MAX_ID:
            raise ValueError(f"{self._id_key} has {len(own)} characters, more than {MAX_ID}")
        self._everywhere = _has_named_reference(root)
        # a $ref to a part with another base, and its path
        self._strange: tuple[str, _Path] | None = None
        self._relative = ""  # a $ref in a part whose base is not the whole schema
        self.is_open = False  # additional property names are allowed next to named ones
        self.has_control = False
        self.merges = False  # parts are combined
        self.factors = set[Fraction]()

    def parts(self) -> Iterator[tuple[dict[str, Any], _Path]]:
        """Visit each part once, before the parts inside it, which may be changed meanwhile. Uses a
        stack instead of recursion, since schemas may be deep."""
        stack: list[tuple[Any, _Path, dict[str, Any]]] = [(self._root, None, self._root)]
        seen = set[int]()
        while stack:
            part, path, base = stack.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            base = part if self._has_id(part) else base
            if isinstance(part.get("$ref"), str):
                stack.append(self._target(part["$ref"], path, base))
            yield part, path
            inside = [(x, (path, name), base) for name, x in self._inside(part)]
            stack += reversed(inside)

    def _inside(self, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in part.items():
            if key in _MAPS or (self._everywhere and key in _DEFINITIONS):
                yield from ((f"{key}.{name}", x) for name, x in _members(value))
            elif key in _PARTS or (self._everywhere and key not in _VALUES):
                if isinstance(value, list):
                    yield from ((f"{key}[{i}]", x) for i, x in enumerate(value))
                else:
                    yield key, value

    def _has_id(self, part: dict[str, Any]) -> bool:
        own = part.get(self._id_key)
        return isinstance(own, str) and not own.startswith("#")

    def _target(
        self, reference: str, path: _Path, base: dict[str, Any]
    ) -> tuple[Any, _Path, dict[str, Any]]:
        """(part to which a `$ref` points by location, its path, its base). The part is None if
        there is no location or nothing there. llguidance treats the part as if it were in place of
        the `$ref`. That is wrong if the part has another base and contains relative references, so
        both conditions are recorded here."""
        address, fragment = urldefrag(reference)
        own = urldefrag(str(self._root.get(self._id_key, ""))).url
        is_strange = base is not self._root or urljoin(own, address) != own
        self._relative = self._relative or (reference if base is not self._root else "")
        if address and fragment and is_strange:
            self._strange = self._strange or (reference, path)
            if "//json-schema.org/" in address:
                self._relative = reference
        if (address and is_strange) or (fragment and not fragment.startswith("/")):
            return None, path, base  # it is visited like all other parts
        found: Any = base
        names = [unquote(n).replace("~1", "/").replace("~0", "~") for n in fragment.split("/")[1:]]
        for name in names:
            if isinstance(found, dict) and found is not base and self._has_id(found):
                self._strange, base = self._strange or (reference, path), found
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None, path, base  # llguidance reports it
        return found, (None, ".".join(names)) if names else None, base

    def check_references(self) -> None:
        """Raises the errors that `_target` recorded. Call it after all parts were visited."""
        if self._strange and self._relative:
            reference, path = self._strange
            raise ValueError(
                f"$ref {reference!r} names something inside a part with its own $id, and {self._relative!r} is relative "
                f"to such a part; leave out the $id, and write #/$defs/…{_where(path)}"
            )


def _members(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _has_named_reference(root: Any) -> bool:
    """Tells whether a `$ref` names an `$id` or an `$anchor` instead of a place in the schema."""
    references = (x.get("$ref") for x in _inner(root) if isinstance(x, dict))
    return any(isinstance(x, str) and x != "#" and not x.startswith("#/") for x in references)


def _keys(root: Any) -> set[str]:
    return {key for x in _inner(root) if isinstance(x, dict) for key in x}


def _inner(root: Any) -> Iterator[Any]:
    """Yields a JSON value and all values inside it."""
    stack = [root]
    while stack:
        value = stack.pop()
        yield value
        if isinstance(value, dict | list):
            stack += value.values() if isinstance(value, dict) else value


def draft_of(schema: dict[str, Any]) -> str:
    """Returns the JSON Schema draft that `$schema` names, or the latest draft if it names none."""
    found = re.fullmatch(
        r"https?://json-schema\.org/(draft-0[3467]|draft/20\d\d-\d\d)/schema#?",
        str(schema.get("$schema")),
    )
    return found[1] if found else "draft/2020-12"


def _rewrite(part: dict[str, Any], walk: _Walk) -> None:
    """Rewrites one part of the schema, but not the parts inside it."""
    if "$schema" in part and draft_of(part) != walk.draft and (found := _keys(part) & _LATER):
        raise ValueError(
            f"$schema is not that of the whole schema ({walk.draft}), and {min(found)} means something in one of them only"
        )
    if walk.draft == "draft-03" and (found := _DRAFT_3 & part.keys()):
        raise ValueError(f"{min(found)} of draft 3 is not known; write the schema in a later draft")
    if part.get("propertyNames") in _EVERY_NAME:  # zod's records have it
        del part["propertyNames"]
    walk.merges |= "allOf" in part or len(_MERGED & part.keys()) > 1
    _rewrite_numbers(part, walk)
    _rewrite_items(part)
    _rewrite_names(part, walk)
    _rewrite_strings(part)


# --- Numbers --------------------------------------------------------------------------------------------------------


def _rewrite_numbers(part: dict[str, Any], walk: _Walk) -> None:
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    whole = "integer" in types and "number" not in types
    step = part["multipleOf"] if _is_number(part.get("multipleOf")) else None
    _decimal(step or 0)
    tight: dict[str, Any] = {}
    short: dict[str, Any] = {}
    for inclusive, exclusive, sign in _BOUNDS:
        bound, strict = part.get(inclusive), part.pop(exclusive, None)
        if isinstance(strict, bool):  # of draft 4
            bound, strict = (None, bound) if strict else (bound, None)
        is_strict = _is_number(strict) and not (_is_number(bound) and bound * sign > strict * sign)
        bound = strict if is_strict else bound
        if not _is_number(bound):
            continue  # llguidance refuses anything else
        part.pop(inclusive, None)
        tight[inclusive] = _inside(bound, is_strict, sign, whole)
        few = abs(bound) < 1e15 * abs(step or SHORT_STEP) and _is_exact(bound)
        if is_strict and few and bound * sign < 0 and not whole:
            short[exclusive] = bound
            if step is not None:
                del tight[inclusive]
    if short and step is None:
        # For an inclusive bound 0.999… llguidance allows 0.90 but not 0.9, a prefix of the bound.
        # So numbers with few decimals get the exclusive bound.
        kind = {"type": part["type"]} if "type" in part else {}
        either = [{**kind, **tight}, {**kind, **tight, **short, "multipleOf": SHORT_STEP}]
        for inclusive, exclusive, _ in _BOUNDS:
            if exclusive in short:
                del either[1][inclusive]
        if isinstance(others := part.get("allOf", []), list):
            part["allOf"] = [*others, {"anyOf": either}]
    else:
        part.update(tight, **short)
    if _is_number(factor := part.get("multipleOf")) and factor:
        walk.factors.add(_factor(factor))
    listed = part["enum"] if isinstance(part.get("enum"), list) else []
    for value in _inner([listed, part.get("const")]):
        if _is_number(value) and not _is_exact(value):
            raise ValueError(f"{value!r} of const or enum has more digits than can be told apart")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: int | float) -> Decimal:
    if not abs(value) <= sys.float_info.max:  # also true for NaN
        raise ValueError(
            f"{str(value)[:_SHOWN]} is not a number of JSON, or is larger than doubles"
        )
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def _is_exact(value: int | float) -> bool:
    """Tells whether llguidance reads and writes `value` exactly: its parser rounds twice beyond
    2**53 or 10**22."""
    number = _decimal(value)
    if number == number.to_integral_value() and abs(number) >= 2**53:
        return isinstance(value, int) and abs(value) < 2**63 and float(value) == value
    digits, exponent = number.normalize().as_tuple()[1:]
    return int("".join(map(str, digits))) < 2**53 and abs(int(exponent)) <= 22


def _inside(value: int | float, strict: bool, sign: int, whole: bool) -> int | float:
    """The inclusive bound closest to `value` that llguidance reads exactly and that excludes no less
    than it. `sign`: 1 for a lower bound, −1 for an upper one."""
    bound = _decimal(value)
    if whole:
        rounded = sign * math.floor(sign * bound) if strict else sign * math.ceil(sign * bound)
        n = rounded + sign if strict else rounded
        if n * sign > MAX_INTEGER:
            raise ValueError(f"a bound of {value!r} is beyond 64 bits")
        n = max(-MAX_INTEGER, min(MAX_INTEGER, n))
        return n if abs(n) <= 2**53 else int(_double_inside(Fraction(n), False, sign))
    if not strict and _is_exact(value):
        return value
    if abs(bound) >= 2**53:
        found = _double_inside(Fraction(bound), strict, sign)
        return int(found) if abs(found) < 2**63 else found
    step = Fraction(10) ** max(-MAX_DECIMALS, bound.adjusted() - 14 if bound else -MAX_DECIMALS)
    steps = math.ceil(Fraction(bound) * sign / step)
    if strict and steps * step == Fraction(bound) * sign:
        steps += 1
    return float(steps * step * sign)


def _double_inside(bound: Fraction, strict: bool, sign: int) -> float:
    found = float(bound)
    while (difference := (Fraction(found) - bound) * sign) < 0 or (strict and not difference):
        found = math.nextafter(found, sign * math.inf)
    return found


def _factor(factor: int | float) -> Fraction:
    """Returns a `multipleOf` as an exact fraction. llguidance multiplies the number by 10 until it
    is whole; ValueError if that gives another fraction."""
    value, exponent = abs(float(factor)), 0
    while value % 1 and exponent < 30:
        value, exponent = value * 10, exponent + 1
    exact = abs(Fraction(_decimal(factor)))
    if value >= 2**32 or Fraction(int(value), 10**exponent) != exact:
        raise ValueError(f"multipleOf {factor!r} has too many digits")
    return exact


# --- Arrays and objects ---------------------------------------------------------------------------------------------


def _rewrite_items(part: dict[str, Any]) -> None:
    """Rewrite `additionalItems` for llguidance, which takes it as a sign of an older draft and
    expects `items` right before it."""
    if "additionalItems" not in part:
        return
    rest = part.pop("additionalItems")
    if not isinstance(part.get("items"), list):
        return  # without a list it has no meaning in any draft
    if "prefixItems" in part:
        raise ValueError("items is a list next to prefixItems; write the rest as items")
    after = list(part.items())
    part.clear()
    for key, value in after:
        part[key] = value
        if key == "items":
            part["additionalItems"] = rest


def _rewrite_names(part: dict[str, Any], walk: _Walk) -> None:
    names, patterns = part.get("required") or part.get("properties"), part.get("patternProperties")
    is_closed = part.get("additionalProperties") is False
    if isinstance(patterns, dict) and patterns:
        spelled = {translate(p, exact=not is_closed): schema for p, schema in patterns.items()}
        if len(spelled) < len(patterns):
            raise ValueError("two of patternProperties are alike")
        listed = [*_strings(part.get("required")), *_strings(part.get("properties"))]
        if not is_closed or any(name.endswith("\n") for name in listed):
            twins = [twin for p in spelled if (twin := _before_line_end(p)) is not None]
            spelled |= dict.fromkeys([twin for twin in twins if twin not in spelled], False)
        part["patternProperties"] = spelled
    if (names or patterns) and not (is_closed and not (names and patterns)):
        walk.is_open = True
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(set(_strings(required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least - num_required > 1 and (patterns or not is_closed):
        raise ValueError(
            f"minProperties {least}: free names may be equal, and a parser keeps one of them; name the properties in "
            "required, or allow minProperties 1"
        )


def _strings(value: Any) -> list[str]:
    return [x for x in value if isinstance(x, str)] if isinstance(value, list | dict) else []


def _before_line_end(pattern: str) -> str | None:
    """The translated pattern with a line end inserted before its final `$`. It matches the names
    that match the pattern in Python but not in ECMA-262, so that these can be excluded. None if the
    pattern doesn't end with a character and `$`."""
    found = re.fullmatch(
        r"[^|]*?(\[(?:[^\[\]\\]|\\.)+\]|\\[^a-zA-Z0-9]|[\w/-])(\+|\{[1-9]\d*(?:,\d*)?\})?\$",
        pattern,
    )
    try:
        if found is None or re.fullmatch(found[1], "\n"):
            return None
    except re.error:
        return None
    return pattern[:-1] + r"\n$"


# --- Strings --------------------------------------------------------------------------------------------------------


def _rewrite_strings(part: dict[str, Any]) -> None:
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = translate(pattern)
    if not isinstance(name := part.get("format"), str) or name not in FORMATS:
        return
    del part["format"]
    pattern, longest = FORMATS[name]
    if longest is not None and isinstance(limit := part.get("maxLength", longest), int):
        part["maxLength"] = min(longest, limit)
    if "pattern" not in part:
        part["pattern"] = pattern
    elif isinstance(both := part.setdefault("allOf", []), list):
        part["allOf"] = [*both, {"type": "string", "pattern": pattern}]


def _has_control(value: Any) -> bool:
    """Tells whether a string in `value` can only be written with a `\\u` escape."""
    return any(
        isinstance(x, str) and re.search(r"[\x00-\x07\x0b\x0e-\x1f\x7f]", x) for x in _inner(value)
    )


_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP = f"(?:[0-9][0-9]{_FOUR}|{_FOUR}00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # Python's dates have no year 0
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LEAP_SECOND = rf"23:59:60{_FRACTION}(?:[zZ]|[+\-]00:00)"
_A, _H = "[0-9A-Za-z]", "[0-9A-Za-z\\-]"
# Two hyphens at positions three and four begin an encoded name (punycode), whose rules are not a regular language.
_LABEL = f"{_A}(?:{_A}|{_H}{_A}|{_H}{{2}}{_A}|{_H}(?:{_A}{_H}|-{_A}){_H}{{0,58}}{_A})?"

FORMATS: dict[str, tuple[str, int | None]] = {
    "date": (f"^{_DATE}$", None),
    "time": (f"^(?:{_TIME}|{_LEAP_SECOND})$", None),
    "date-time": (f"^(?:{_DATE}[tT]{_TIME}|{_YEAR}-(?:06-30|12-31)[tT]{_LEAP_SECOND})$", None),
    "hostname": (rf"^{_LABEL}(?:\.{_LABEL})*$", 253),
}
"""Replacement of each format: (pattern, maximum length or None)."""


# --- Patterns -------------------------------------------------------------------------------------------------------

_ECMA_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_BOTH_SPACE = _ECMA_SPACE.replace(r"\ufeff", "")
_ANY_SPACE = _ECMA_SPACE + r"\x1c-\x1f\u0085"
_WORD, _ANY_WORD = "0-9A-Za-z_", r"_\p{L}\p{N}"
_DIGIT, _ANY_DIGIT = "0-9", r"\p{Nd}"

_SETS = {"s": (_BOTH_SPACE, _ANY_SPACE), "w": (_WORD, _ANY_WORD), "d": (_DIGIT, _ANY_DIGIT)}
"""Characters of each class letter: (those in both ECMA-262's and Python's class, those in
either)."""

_ECMA = {"s": _ECMA_SPACE, "w": _WORD, "d": _DIGIT}
_LINE = r"[^\n\r\u2028\u2029]"
_TOKEN = re.compile(
    r"\\u\{[0-9A-Fa-f]+\}|\\[pP]\{[^}]*\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\.|.", re.DOTALL
)


def translate(pattern: str, exact: bool = False) -> str:
    """Translates an ECMA-262 regular expression for llguidance. It matches what both ECMA-262 and
    Python match; with `exact`, what ECMA-262 matches. Unknown syntax is left for llguidance to
    refuse."""
    out: list[str] = []
    tokens = _TOKEN.findall(pattern)
    at = 0
    while at < len(tokens):
        token, before = tokens[at], tokens[at - 1] if at else ""
        at += 1
        if token == "[":
            at, text = _class(tokens, at, exact)
            out.append(text)
        elif token == ".":
            out.append(_LINE)
        elif _is_set(token):
            out.append(_set(token[1], exact))
        elif token == "+" and before in ("*", "+", "?", "}"):
            raise ValueError(f"a pattern has {before}+, a quantifier that ECMA-262 does not know")
        elif token == "(" and re.match(r"\?[a-z]*x", "".join(tokens[at : at + 9])):
            raise ValueError("a pattern has (?x), a flag that ECMA-262 does not know")
        elif token == r"\x":
            raise ValueError(r"a pattern has \x without two digits; write \u{…}")
        else:
            out.append(token)
    return "".join(out)


def _is_set(token: str) -> bool:
    return len(token) == 2 and token[0] == "\\" and token[1].lower() in _SETS


def _set(letter: str, exact: bool, negated: bool = False) -> str:
    """llguidance's spelling of a class letter such as `d` or `W`. With `negated` the letter is
    inside a negated class: then the larger set is the safe one."""
    both, either = (_ECMA[letter.lower()],) * 2 if exact else _SETS[letter.lower()]
    if letter.islower():
        return f"[{either if negated else both}]"
    return f"[^{both if negated else either}]"


def _class(tokens: list[str], at: int, exact: bool) -> tuple[int, str]:
    """Translates a character class. `at` is the position after its bracket. Returns the position
    after its end, and its text for llguidance, whose classes may nest and are combined by `&&`,
    `--` and `~~`."""
    negated = tokens[at : at + 1] == ["^"]
    at += negated
    try:
        end = tokens.index("]", at)
    except ValueError:
        end = len(tokens)
    if end == at:
        raise ValueError("a pattern has an empty class of characters")
    out, sets = [], set[str]()

    def add(token: str) -> str:
        if not _is_set(token):
            return _literal(token)
        sets.add(token[1])
        return _set(token[1], exact, negated)

    while at < end:
        is_range = tokens[at + 1 : at + 2] == ["-"] and at + 2 < end
        first, last = tokens[at], tokens[at + 2] if is_range else ""
        if is_range:  # next to a set, the hyphen is literal
            hyphen = r"\-" if _is_set(first) or _is_set(last) else "-"
            out.append(f"{add(first)}{hyphen}{add(last)}")
        else:
            out.append(add(first))
        at += 3 if is_range else 1
    if any(letter.upper() in sets for letter in sets if letter.islower()):
        out = [r"\x00-\x{10FFFF}"]
    return end + 1, f"[{'^' * negated}{''.join(out)}]"


def _literal(token: str) -> str:
    """Returns llguidance's spelling of one character in a class."""
    return "\\" + token if token in "[&~-^" else r"\x08" if token == r"\b" else token
