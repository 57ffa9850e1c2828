"""A request's structured outputs as a grammar of `llguidance`: a JSON schema, a regular expression,
choices, or a grammar in Lark's or llama.cpp's notation.

Compilation is limited in characters, depth (`depth.py`), symbols, lexer work, and seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from slipstream.engine.grammars.depth import (
    check_grammar,
    check_json_text,
    check_regex,
    check_schema,
    is_lark,
)
from slipstream.engine.grammars.schema_promises import promise
from slipstream.engine.text.tokenizer_parts import is_panic
from slipstream.errors import RequestError
from slipstream.params.answer_forms import StructuredOutputsParams

MAX_CHARACTERS = 256 * 1024
"""Maximum characters of a schema, a regular expression, a grammar, or of all choices together."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens. It is bounded, because a confused model writes spaces until
max_tokens."""

MAX_WHITESPACE = 1000
"""Maximum characters of a whitespace pattern that a request sets."""

_SPACE = r"(?:[ \t\n\r]|\\[tnrs ]|\\x(?:20|0[9AaDd]))"
_ONLY_SPACE = re.compile(rf"(?:{_SPACE}|\[{_SPACE}+\]|\((?:\?:)?|[)|?*+]|\{{\d+(?:,\d*)?\}})*")

T = TypeVar("T")


def compose(params: StructuredOutputsParams) -> str:
    """The request's structured outputs as a grammar for llguidance. RequestError if that is not
    possible."""
    inner = compose_inner(params)
    if params.around is None:
        return inner
    try:
        check_grammar(params.around)
    except ValueError as error:
        raise refused(str(error), "around") from None
    own = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
    return json.dumps(
        {"grammars": [{"name": "around", "lark_grammar": params.around}, {**own, "name": "answer"}]}
    )


def compose_inner(params: StructuredOutputsParams) -> str:
    name, given = given_form(params)
    text = given if isinstance(given, str) else json.dumps(given)
    if len(text) > MAX_CHARACTERS:
        raise refused(f"it has {len(text)} characters, more than {MAX_CHARACTERS}", name)
    try:
        whitespace = _whitespace(params.whitespace_pattern)
    except ValueError as error:
        raise refused(str(error), "whitespace_pattern") from None
    try:
        match name:
            case "json" | "json_object":
                check_json_text(text)
                schema = json.loads(text) if name == "json" else {"type": "object"}
                if not isinstance(schema, dict) and schema is not True:
                    raise ValueError("a schema is an object, or true")
                check_schema(schema)
                if (path := _ambiguous(schema)) is not None:
                    raise ValueError(
                        f"drafts differ in what $id beside $ref means (in the schema's {path or 'root'})"
                    )
                schema = {} if schema is True else schema
                promised = promise(schema)
                return json_grammar(json.dumps(schema), **_options(params, whitespace), **promised)
            case "regex":
                check_regex(text)
                return str(call_library(llguidance_library().LLMatcher.grammar_from_regex, text))
            case "choice":
                return str(call_library(llguidance_library().grammar_from, "choice", text))
            case _:
                check_grammar(text)
                lark = text if is_lark(text) else _from_llama_cpp(text)
                return str(call_library(llguidance_library().grammar_from, "lark", lark))
    except (ValueError, RecursionError) as error:
        raise refused(str(error), name) from None


def _from_llama_cpp(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise ValueError(f"it is no grammar as llama.cpp writes it: {error}") from None


def llguidance_library() -> Any:
    """llguidance, imported late: except in servers, importing it would take a tenth of the start-up time."""
    import llguidance

    return llguidance


@cache
def limits() -> Any:
    """Limits of a grammar's compilation, for llguidance."""
    return llguidance_library().LLParserLimits(
        max_grammar_size=250_000, initial_lexer_fuel=1_000_000, verbose_errors=False
    )


def given_form(params: StructuredOutputsParams) -> tuple[str, Any]:
    names = ("json", "regex", "choice", "grammar")
    return next(
        ((n, v) for n in names if (v := getattr(params, n)) is not None), ("json_object", "")
    )


def json_grammar(schema: str, **options: Any) -> str:
    return str(
        call_library(
            llguidance_library().LLMatcher.grammar_from_json_schema, schema, overrides=options
        )
    )


def call_library(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call llguidance and return its result. Its panics are no `Exception`; they are raised as
    ValueError."""
    try:
        return call(*args, **options)
    except BaseException as error:
        if is_panic(error):
            raise ValueError(f"the grammar's library fails: {str(error)[:300]}") from None
        raise


def _whitespace(pattern: str | None) -> str:
    r"""A pattern of whitespace as llguidance takes it, where `\s` stands for JSON's. ValueError if it may match anything else:
    the answer would be no JSON."""
    if not pattern:
        return WHITESPACE
    check_regex(pattern)
    if len(pattern) > MAX_WHITESPACE or not _ONLY_SPACE.fullmatch(pattern):
        raise ValueError(
            r"between tokens of JSON may stand only space, \t, \n and \r: write a pattern of these, \s, groups and "
            f"repetitions, of at most {MAX_WHITESPACE} characters"
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _options(params: StructuredOutputsParams, whitespace: str) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": whitespace}


def refused(message: str, name: str) -> RequestError:
    return RequestError(
        f"{name} can't be enforced: {message.strip()}", field=f"structured_outputs.{name}"
    )


def readable(message: str) -> str:
    """An error message of llguidance, or a clearer replacement."""
    if "NoExtensionBias" in message:
        return "the grammar has no end: it refers to itself before any text, or allows none; give it an alternative that ends"
    if "exceed" in message and "nest" in message:  # regex-syntax repeats the whole pattern
        return "a regular expression is nested too deeply; take out groups and repetitions"
    if "recursion limit exceeded" in message:
        return "objects and lists are nested too deeply; move inner schemas to $defs, and refer to them"
    return message


def _ambiguous(schema: Any, path: str = "") -> str | None:
    """Path of a schema part with both `$id` and `$ref`: up to draft 7 `$id` is ignored there, later `$ref` is resolved
    against it."""
    if (
        isinstance(schema, dict)
        and isinstance(schema.get("$ref"), str)
        and isinstance(schema.get("$id"), str)
    ):
        return path
    parts = ((f"{path}.{name}" if path else name, part) for name, part in inner_schemas(schema))
    return next(
        (found for name, part in parts if (found := _ambiguous(part, name)) is not None), None
    )


def inner_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schemas directly inside a schema, with their paths."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(
            value, dict
        ):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(value))
        elif key in ("items", "additionalProperties", "additionalItems") and isinstance(
            value, dict
        ):
            yield key, value
