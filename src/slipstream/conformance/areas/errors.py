"""Checks of errors: status, the protocol's format, and the words by which clients recognize them."""

from __future__ import annotations

from typing import Any

import httpx

from slipstream.conformance.areas.framing import ALL
from slipstream.conformance.protocols.base import Ask, Body
from slipstream.conformance.registry import FailedError, UnsupportedError, check, expect
from slipstream.conformance.session import SHAPE_ERRORS, CheckSession

SHORT = Ask(prompt="Hi", max_tokens=3)
TOKENS_UNKNOWN = 200_000
"""Length of a prompt in words that no context is expected to hold, if the server names none."""


def read_error(session: CheckSession, reply: httpx.Response, *statuses: int) -> tuple[str, str]:
    """Read the message and field of an error that must have one of these statuses."""
    found = reply.status_code
    expect(
        found in statuses, f"HTTP {found}, not {' or '.join(map(str, statuses))}: {reply.text[:80]}"
    )
    try:
        return session.protocol.error(reply.json())
    except SHAPE_ERRORS:
        raise FailedError(f"the error's shape: {reply.text[:150]}") from None


async def named(session: CheckSession, body: Body, field: str) -> None:
    """Check that the error of this body names the field."""
    message, param = read_error(session, await session.post(body), 400, 422)
    expect(
        field in f"{message} {param}", f"the error of {field} doesn't name it: {message[:100]!r}"
    )


@check("errors.model", *ALL)
async def unknown_models_are_404(session: CheckSession) -> None:
    """A model that isn't served is a 404 that names it, streamed or not."""
    for stream in (False, True):
        body = session.body(SHORT, stream=stream) | {"model": "no-such-model"}
        message, _ = read_error(session, await session.post(body), 404)
        expect("no-such-model" in message, f"the error doesn't name the model: {message[:100]!r}")


@check("errors.type", *ALL)
async def wrong_types_name_the_field(session: CheckSession) -> None:
    """A field of a wrong type is a 400 (or 422) that names it."""
    body = session.body(SHORT)
    if session.protocol.name == "ollama":
        await named(session, body | {"options": {"temperature": "hot"}}, "temperature")
        await named(session, body | {"options": {"num_predict": "many"}}, "num_predict")
    else:
        await named(session, body | {"temperature": "hot"}, "temperature")
        await named(
            session, body | {session.protocol.max_tokens: "many"}, session.protocol.max_tokens
        )


@check("errors.range", "chat", "completions", "responses", "messages")
async def values_out_of_range_name_the_field(session: CheckSession) -> None:
    """A temperature below 0 and a negative limit are a 400 (or 422) that names the field."""
    body = session.body(SHORT)
    await named(session, body | {"temperature": -1}, "temperature")
    await named(session, body | {session.protocol.max_tokens: -5}, session.protocol.max_tokens)


@check("errors.missing", *ALL)
async def a_missing_prompt_names_the_field(session: CheckSession) -> None:
    """A body without messages, prompt or input is a 400 (or 422) that names it."""
    field = session.protocol.prompt_field
    body = {name: value for name, value in session.body(SHORT).items() if name != field}
    if session.protocol.name == "ollama":
        raise UnsupportedError("Ollama loads the model if there are no messages")
    await named(session, body, field)


@check("errors.role", "chat", "responses", "messages")
async def unknown_roles_are_refused(session: CheckSession) -> None:
    """A message of an unknown role, or of none, is a 400 (or 422)."""
    for wrong in ({"role": "wizard", "content": "Hi"}, {"content": "Hi"}):
        body = session.body(SHORT) | {session.protocol.prompt_field: [wrong]}
        read_error(session, await session.post(body), 400, 422)


@check("errors.json", *ALL)
async def broken_json_is_400(session: CheckSession) -> None:
    """A body that is no JSON is a 400 (or 422) of the protocol's shape."""
    for text in (b'{"model": ', b"[]", b"\xff\xfe"):
        read_error(session, await session.post(text), 400, 422)


@check("errors.too_long", "chat", "completions", "responses", "messages")
async def long_prompts_are_refused_in_known_words(session: CheckSession) -> str:
    """A prompt beyond the context is a 400 in words by which clients know to shorten it, streamed
    or not."""
    words = "word " * (session.context * 2 if session.context else TOKENS_UNKNOWN)
    for stream in (False, True):
        reply = await session.post(session.body(SHORT.but(prompt=words), stream=stream))
        message, _ = read_error(session, reply, 400, 413)
        known = session.protocol.long_prompt_words
        expect(any(w in reply.text for w in known), f"no known words: {message[:150]!r}")
    return message[:60]


@check("errors.key", *ALL)
async def wrong_keys_are_401(session: CheckSession) -> None:
    """A wrong key and no key are a 401 of the protocol's shape, where the server asks for one."""
    if not session.endpoint.api_key:
        raise UnsupportedError("no --api-key was given")
    path, body = session.protocol.path, session.body(SHORT)
    for key in ("not-the-key", None):
        reply = await session.request("POST", path, body, session.protocol.headers(key))
        if reply.status_code == 200:
            raise UnsupportedError("the server asks for no key")
        read_error(session, reply, 401, 403)


@check("errors.method", *ALL)
async def other_methods_are_refused(session: CheckSession) -> None:
    """DELETE on the route is a 405 (or 404), and the server goes on."""
    reply: Any = await session.request("DELETE", session.protocol.path)
    expect(reply.status_code in (404, 405), f"HTTP {reply.status_code}")
    await session.whole(SHORT)
