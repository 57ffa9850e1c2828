"""Checks of structured output: schemas, JSON objects, regular expressions and grammars, by their answers alone."""

from __future__ import annotations

import json
import re
from typing import Any

from slipstream.conformance.areas.framing import TALKING
from slipstream.conformance.protocols.base import Ask, Body
from slipstream.conformance.registry import RefusedError, UnsupportedError, check, expect, offered
from slipstream.conformance.schemas import SCHEMAS, begins_json, faults
from slipstream.conformance.session import CheckSession

ASK = Ask(prompt="Answer with JSON about a person called Ada.", max_tokens=400)
PATTERNS = (r"[A-Z]{3}-[0-9]{4}", r"(red|green|blue), [a-f]{2,6}\.", r"https?://[a-z]{3,8}\.org")
GRAMMARS = (  # (llama.cpp's GBNF, a pattern that matches what it allows)
    ('root ::= "yes" | "no" ", since " [a-z]{1,9}', r"yes|no, since [a-z]{1,9}"),
    ('root ::= num ("+" num){1,3}\nnum ::= [0-9]{1,3}', r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}"),
)
REGEX_FIELDS: dict[str, Any] = {
    "structured_outputs": lambda pattern: {"structured_outputs": {"regex": pattern}},
    "guided_regex": lambda pattern: {"guided_regex": pattern},
    "regex": lambda pattern: {"regex": pattern},  # SGLang's
}
GRAMMAR_FIELDS: dict[str, Any] = {
    "structured_outputs": lambda grammar: {"structured_outputs": {"grammar": grammar}},
    "guided_grammar": lambda grammar: {"guided_grammar": grammar},
    "grammar": lambda grammar: {"grammar": grammar},  # llama.cpp's
}


@check("schemas.hold", *TALKING)
async def schemas_hold(session: CheckSession) -> str:
    """Answers keep to each of the schemas, as jsonschema judges them. A refused schema is no fault;
    one that is taken and broken is."""
    answers = await session.together(ASK.but(schema=schema) for schema in SCHEMAS.values())
    held, cut, refused, broken = 0, [], [], []
    for (name, schema), answer in zip(SCHEMAS.items(), answers, strict=True):
        if isinstance(answer, RefusedError):
            refused.append(name)
        elif answer.finish == "length" and begins_json(answer.text):
            cut.append(name)
        else:
            try:
                wrong = faults(json.loads(answer.text), schema)
            except json.JSONDecodeError:
                wrong = "no JSON"
            held += not wrong
            broken += [f"{name}: {answer.text[:80]!r}: {wrong}"] if wrong else []
    detail = f"{held} hold" + "".join(
        f", {len(names)} {word} ({', '.join(names)})"
        for names, word in ((refused, "refused"), (cut, "cut by max_tokens"))
        if names
    )
    if not held and not broken:
        raise UnsupportedError(detail)
    expect(not broken, f"{len(broken)} broken, {detail}: {'; '.join(broken)}")
    return detail


@check("schemas.streamed", *TALKING)
async def schemas_hold_in_streams(session: CheckSession) -> None:
    """Streamed answers keep to their schemas, too."""
    for name in ("flat", "nested", "list of objects"):
        ask = ASK.but(schema=SCHEMAS[name])
        with offered("schemas"):
            answer = await session.streamed(ask)
        if answer.finish != "length" or not begins_json(answer.text):
            try:
                wrong = faults(json.loads(answer.text), SCHEMAS[name])
            except json.JSONDecodeError:
                wrong = "no JSON"
            expect(not wrong, f"{name}: {answer.text[:80]!r}: {wrong}")


@check("schemas.json_object", "chat", "responses", "ollama")
async def json_objects_are_json(session: CheckSession) -> None:
    """The mode without a schema gives a JSON object."""
    kind = {"type": "json_object"}
    extras: dict[str, Body] = {
        "chat": {"response_format": kind},
        "responses": {"text": {"format": kind}},
        "ollama": {"format": "json"},
    }
    extra = extras[session.protocol.name]
    with offered("JSON without a schema"):
        answer = await session.whole(ASK.but(extra=extra))
    if answer.finish == "length" and begins_json(answer.text):
        raise UnsupportedError("the answer was cut by max_tokens")
    try:
        found: Any = json.loads(answer.text)
    except ValueError:
        found = None
    expect(isinstance(found, dict), f"no object: {answer.text[:80]!r}")


@check("schemas.malformed", *TALKING)
async def malformed_schemas_are_refused(session: CheckSession) -> str:
    """A schema that is none is an error of the client (4xx), neither ignored nor a crash."""
    with offered("schemas"):
        await session.whole(ASK.but(schema=SCHEMAS["boolean and null"]))
    for schema in ({"type": "nonsense"}, {"type": "object", "properties": 5}, {"$ref": "#/no"}):
        reply = await session.post(session.body(ASK.but(schema=schema)))
        status = reply.status_code
        expect(400 <= status < 500, f"{json.dumps(schema)}: HTTP {status}")
    return "3 refused"


@check("schemas.regex", "chat", "completions")
async def regexes_hold(session: CheckSession) -> str:
    """Answers match a regular expression, where a server has a field for one."""
    return await _fields(session, REGEX_FIELDS, [(p, p) for p in PATTERNS])


@check("schemas.grammar", "chat", "completions")
async def grammars_hold(session: CheckSession) -> str:
    """Answers keep to a grammar (GBNF), where a server has a field for one."""
    return await _fields(session, GRAMMAR_FIELDS, list(GRAMMARS))


async def _fields(session: CheckSession, fields: Any, cases: list[tuple[str, str]]) -> str:
    """Try each server's field. A field whose answers never match is taken as not supported, because
    many servers ignore unknown fields. One whose answers match only sometimes is a fault."""
    found, notes = [], []
    for name, field in fields.items():
        try:
            said = [
                (await session.whole(Ask(max_tokens=60, extra=field(given)))).text
                for given, _ in cases
            ]
        except RefusedError as error:
            expect(error.status < 500 or error.status == 501, f"{name}: {error}")
            notes.append(f"{name}: refused")
            continue
        pairs = zip(said, cases, strict=True)
        matched = [bool(re.fullmatch(pattern, text.strip())) for text, (_, pattern) in pairs]
        if all(matched):
            found.append(name)
        elif any(matched):
            text, (given, _) = next(
                pair
                for pair, ok in zip(zip(said, cases, strict=True), matched, strict=True)
                if not ok
            )
            expect(False, f"{name}: {text!r} doesn't keep to {given!r}")
        else:
            notes.append(f"{name}: without effect")
    if not found:
        raise UnsupportedError("; ".join(notes))
    return ", ".join(found)
