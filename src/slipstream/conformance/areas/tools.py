"""Checks of tools: calls match their schemas, and the server accepts its own turns as history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slipstream.conformance.areas.framing import TALKING
from slipstream.conformance.protocols.base import Ask, ParsedAnswer, ParsedCall
from slipstream.conformance.registry import RefusedError, UnsupportedError, check, expect, offered
from slipstream.conformance.schemas import faults
from slipstream.conformance.session import CheckSession

CITY = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 12}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
PARIS = ParsedCall("call_1", "get_weather", '{"city": "Paris"}')
ROME = ParsedCall("call_2", "get_weather", '{"city": "Rome", "days": 2}')
ASKED = Ask(prompt="What is the weather in Paris?", tools=TOOLS, max_tokens=600)
AFTER = ASKED.but(max_tokens=16)


async def required(session: CheckSession) -> ParsedAnswer:
    """Request an answer that must call a tool. UnsupportedError if the protocol or server can't require it."""
    with offered("tools with a required call"):
        answer = await session.whole(ASKED.but(choice="required"))
    if not answer.calls and session.protocol.name == "ollama":
        raise UnsupportedError("Ollama's API can't demand a call, and the model made none")
    if answer.finish == "length":
        raise UnsupportedError("the call is cut by max_tokens")
    return answer


async def taken_back(session: CheckSession, history: Sequence[Any], **extra: Any) -> None:
    """Check that the server answers after this history, streamed and not."""
    ask = AFTER.but(history=tuple(history), extra=extra)
    await session.whole(ask)
    await session.streamed(ask)


async def takes_tools(session: CheckSession) -> None:
    with offered("tools"):
        await session.whole(AFTER)


@check("tools.required", *TALKING)
async def required_calls_keep_to_the_schema(session: CheckSession) -> str:
    """A required call comes, names a tool, has arguments of its schema, and an id of its own."""
    num = 0
    for prompt in (ASKED.prompt, "Note that the lamp is green.", "Weather in Rome and in Oslo?"):
        with offered("tools with a required call"):
            answer = await session.whole(ASKED.but(prompt=prompt, choice="required"))
        if not answer.calls and session.protocol.name == "ollama":
            raise UnsupportedError("Ollama's API can't demand a call, and the model made none")
        if answer.finish == "length":
            continue
        expect(answer.calls, f"no call, though one is required: {answer.text[:80]!r}")
        expect(answer.finish == "tools", f"finish is {answer.finish}")
        for call in answer.calls:
            expect(call.name in TOOLS, f"a call of {call.name!r}")
            wrong = faults(call.parsed(), TOOLS[call.name])
            expect(not wrong, f"{call.name}({call.arguments}): {wrong}")
        if session.protocol.name != "ollama":
            ids = [call.id for call in answer.calls]
            expect(all(ids) and len(set(ids)) == len(ids), f"ids of calls: {ids}")
        num += len(answer.calls)
    if not num:
        raise UnsupportedError("the calls are cut by max_tokens")
    return f"{num} calls"


@check("tools.none", "chat", "responses", "messages")
async def none_calls_nothing(session: CheckSession) -> None:
    """`tool_choice: none` gives text."""
    with offered("tool_choice: none"):
        answer = await session.whole(ASKED.but(choice="none"))
    expect(not answer.calls, f"a call of {[call.name for call in answer.calls]}")


@check("tools.round_trip", *TALKING)
async def what_it_wrote_is_taken_back(session: CheckSession) -> None:
    """A turn with calls, as a client keeps it of a whole answer and of a stream, goes back with
    results."""
    await required(session)
    for answer in (
        await session.whole(ASKED.but(choice="required")),
        await session.streamed(ASKED.but(choice="required")),
    ):
        results = session.protocol.results(answer.calls, ["sunny, 21 °C"] * len(answer.calls))
        await taken_back(session, [*session.protocol.turn(answer), *results])


@check("tools.several", *TALKING)
async def several_calls_are_taken(session: CheckSession) -> None:
    """Two calls in one turn are taken, also if their results come in the other order, and a second
    turn with calls."""
    await takes_tools(session)
    p = session.protocol
    turn = p.called([PARIS, ROME])
    await taken_back(session, [*turn, *p.results([PARIS, ROME], ["sunny", "rain"])])
    await taken_back(session, [*turn, *p.results([ROME, PARIS], ["rain", "sunny"])])
    third = ParsedCall("call_3", "note", '{"text": "sunny"}')
    both = [*turn, *p.results([PARIS, ROME], ["sunny", "rain"])]
    await taken_back(session, [*both, *p.called([third]), *p.results([third], ["ok"])])


@check("tools.broken_arguments", "chat", "responses")
async def broken_arguments_are_taken(session: CheckSession) -> None:
    """Arguments that are no JSON object, as models write them, don't end the conversation."""
    await takes_tools(session)
    for text in ('{"city": "Par', "", "null", "[1]", "{'city': 'Paris'}"):
        call = ParsedCall("call_1", "get_weather", text)
        history = session.protocol.called([call])
        try:
            await taken_back(session, [*history, *session.protocol.results([call], ["error"])])
        except RefusedError as error:
            expect(False, f"arguments {text!r}: {error}")


@check("tools.ids", "chat", "responses", "messages")
async def any_id_is_taken(session: CheckSession) -> None:
    """Ids of other servers are taken, since conversations move between them."""
    await takes_tools(session)
    for name in ("functions.get_weather:0", "toolu_01A09q90qw90lq917835lq9", "a1b2c3d4e", "7"):
        if session.protocol.name == "messages":
            name = name.replace(".", "_").replace(":", "_")  # Anthropic's own pattern
        call = ParsedCall(name, PARIS.name, PARIS.arguments)
        history = session.protocol.called([call])
        try:
            await taken_back(session, [*history, *session.protocol.results([call], ["sunny"])])
        except RefusedError as error:
            expect(False, f"id {name!r}: {error}")


@check("tools.results", *TALKING)
async def any_text_of_a_result_is_taken(session: CheckSession) -> None:
    """Results may be empty, long, no JSON, or look like markup."""
    await takes_tools(session)
    for text in ("", "{", "<tool_call>{}</tool_call>", "日本 🦜", json.dumps({"rows": [1] * 200})):
        history = session.protocol.called([PARIS])
        await taken_back(session, [*history, *session.protocol.results([PARIS], [text])])


@check("tools.reasoning_back", *TALKING)
async def reasoning_is_taken_back(session: CheckSession) -> None:
    """Reasoning next to calls, as the protocol writes it, is taken back."""
    await takes_tools(session)
    turn = session.protocol.called([PARIS], "The user asks about Paris.")
    await taken_back(session, [*turn, *session.protocol.results([PARIS], ["sunny"])])


@check("tools.stored", "responses")
async def stored_answers_are_continued(session: CheckSession) -> None:
    """`previous_response_id` goes on from a kept answer with only the calls' results."""
    await required(session)
    with offered("store"):
        first = await session.whole(ASKED.but(choice="required", extra={"store": True}))
    results = session.protocol.results(first.calls, ["sunny"] * len(first.calls))
    body = session.body(AFTER) | {"input": results or "Go on."}
    with offered("previous_response_id"):
        session.read(await session.post(body | {"previous_response_id": first.raw["id"]}))


@check("tools.not_stored", "responses")
async def items_go_back_where_nothing_is_stored(session: CheckSession) -> None:
    """A client that asks for `store: false` sends all items back, as Codex does."""
    more: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    with offered("store: false"):
        first = await session.whole(ASKED.but(choice="required", extra=more))
    results = session.protocol.results(first.calls, ["sunny"] * len(first.calls))
    await taken_back(session, [*session.protocol.turn(first), *results], **more)


@check("tools.item_reference", "responses")
async def item_references_are_resolved(session: CheckSession) -> None:
    """`item_reference` stands for an item of a kept answer, as the AI SDK sends it."""
    with offered("store"):
        first = await session.whole(ASKED.but(choice="required", extra={"store": True}))
    references = [{"type": "item_reference", "id": item["id"]} for item in first.raw["output"]]
    results = session.protocol.results(first.calls, ["sunny"] * len(first.calls))
    with offered("item_reference"):
        await session.whole(AFTER.but(history=(*references, *results)))
    await taken_back(session, [*references, *results])
