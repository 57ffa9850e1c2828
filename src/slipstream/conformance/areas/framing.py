"""Checks of streams on the wire: lines, events and their order, characters."""

from __future__ import annotations

import json

from slipstream.conformance.protocols.base import Ask, Body
from slipstream.conformance.registry import FailedError, check, expect, offered
from slipstream.conformance.schemas import closed
from slipstream.conformance.session import SHAPE_ERRORS, CheckSession

TALKING = ("chat", "responses", "messages", "ollama")
"""Protocols with tools, schemas and reasoning."""

ALL = (*TALKING, "completions")
TEXTS = ("żółć 漢字 é", "🦜🏽 👩‍👩‍👧 🇯🇵", "नमस्ते שלום", "\U00020bb7 ﷽ Ω≈ç")
"""Texts with characters of two to four bytes, which tokens may split."""


@check("framing.lines", *ALL)
async def lines_are_well_formed(session: CheckSession) -> None:
    """The media type is right, every line belongs to the format, all of it is UTF-8 and JSON, and
    the stream ends with an event's end."""
    await session.events(Ask())


@check("framing.order", *ALL)
async def events_come_in_order(session: CheckSession) -> None:
    """Events have the protocol's order and names. One event ends the stream, and ids stay the
    same."""
    events = await session.events(Ask())
    try:
        session.protocol.order(events)
    except SHAPE_ERRORS as error:
        raise FailedError(f"an event's shape: {error!r}") from None


@check("framing.unicode", *TALKING)
async def characters_are_whole(session: CheckSession) -> str:
    """Characters whose bytes are in several tokens come whole. A schema makes the model write
    them."""
    num_streamed = 0
    for text in TEXTS:
        ask = Ask(max_tokens=500, schema=constant(text))
        with offered("a schema with a constant"):
            answer = await session.whole(ask)
        streamed = await session.streamed(ask)
        for name, one in (("whole", answer), ("streamed", streamed)):
            try:
                found = json.loads(one.text)["text"]
            except SHAPE_ERRORS:
                found = one.text
            expect(found == text, f"{name}: {found!r}, asked for {text!r}")
        num_streamed += 1
    return f"{num_streamed} texts"


def constant(text: str) -> Body:
    """Schema of an object whose `text` can only be this."""
    return closed(text={"type": "string", "enum": [text]})
