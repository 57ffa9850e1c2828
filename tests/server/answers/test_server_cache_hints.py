"""Hints in bodies about the return of their sessions, and the cache reads and writes in `usage`."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from slipstream.params.cache_hints import CacheHints
from slipstream.server.answers.cache_hints import breakpoints, cache_hints
from slipstream.server.answers.tools import FunctionSpec, ToolSpec
from slipstream.server.openai.messages import Message, message_dict
from slipstream.server.openai.protocol import ChatRequest
from slipstream.server.openai.responses_body import ResponsesRequest, as_messages, read_items

VERSION = {"anthropic-version": "2023-06-01"}


def body(**more) -> ChatRequest:
    given = {
        name: Raw(value) if isinstance(value, bytes) else value for name, value in more.items()
    }
    return ChatRequest(messages=[Message(role="user", content="hi")], **given)


@pytest.mark.parametrize(
    ("given", "hints"),
    [
        ({}, CacheHints()),
        ({"prompt_cache_key": b'"thread"'}, CacheHints(session="thread")),
        ({"prompt_cache_retention": b'"24h"'}, CacheHints(ttl_s=86400.0)),
        ({"prompt_cache_retention": b'"in_memory"'}, CacheHints(ttl_s=300.0)),
        ({"prompt_cache_options": b'{"ttl":"12h"}'}, CacheHints(ttl_s=43200.0)),
        ({"prompt_cache_options": b'{"mode":"implicit"}'}, CacheHints()),
        ({"prompt_cache_retention": b'"forever"', "prompt_cache_key": b"7"}, CacheHints()),
        ({"end_of_branch": True}, CacheHints(ends=True)),
    ],
)
def test_fields_of_a_body_become_hints(given, hints):
    assert cache_hints(body(**given), 0) == hints


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_breakpoints_of_a_chat_count_by_position(mark):
    text = {"type": Raw(b'"text"'), "text": Raw(b'"' + b"x" * 92 + b'"')}
    said = [
        Message(role="user", content=[text | {mark: Raw(b'{"ttl":"30m"}')}]),
        Message(role="assistant", content="y" * 100),
        Message(role="user", content=None),
    ]
    assert cache_hints(ChatRequest(messages=said), 0).breakpoints == ((0.5, 1800.0),)


def test_breakpoints_of_a_chats_tools_and_whole_messages_count_by_position():
    mark, text = Raw(b'{"type":"ephemeral"}'), "x" * 100
    tool = ToolSpec(
        type="function", function=FunctionSpec(name="f", description=text), cache_control=mark
    )
    size = len(msgspec.json.encode(tool.function))
    said = [
        Message(role="system", content=text, cache_control=mark),
        Message(role="user", content=text),
    ]
    found = cache_hints(ChatRequest(messages=said, tools=[tool]), 0).breakpoints
    assert found == ((size / (size + 200), 300.0), ((size + 100) / (size + 200), 300.0))


def items_of(*parts, kind="message"):
    made = {"type": "function_call_output", "call_id": "c", "output": [*parts]}
    return [made] if kind == "output" else [{"role": "user", "content": [*parts]}]


@pytest.mark.parametrize("kind", ["message", "output"])
@pytest.mark.parametrize(
    ("options", "mark", "seconds"),
    [
        ({}, {"mode": "explicit"}, 1800.0),
        ({"ttl": "12h"}, {"mode": "explicit"}, 43200.0),
        ({"ttl": "12h"}, {"mode": "explicit", "ttl": "30m"}, 1800.0),
    ],
)
def test_breakpoints_of_items_count_by_position_with_the_requests_time_to_live(
    kind, options, mark, seconds
):
    text = {"type": "input_text", "text": "x" * 50}
    items = items_of(text, text | {"prompt_cache_breakpoint": mark}, kind=kind)
    asked = {"input": [*items, *items_of(text, text)], "prompt_cache_options": options}
    request = msgspec.json.decode(msgspec.json.encode(asked), type=ResponsesRequest)
    messages = [m for m, _ in as_messages(read_items(request.input, "input"), "input")]
    given = message_dict(messages[0], "messages[0]")
    assert given["content"] == "x" * 100, "a breakpoint changes no prompt"
    hints = cache_hints(request.chat(messages), 0)
    # The parts count with the quotes and the type of JSON; the last message is one text.
    part = len(b'"text"' + b'"' + b"x" * 50 + b'"')
    assert hints.breakpoints == ((2 * part / (2 * part + 100), seconds),)


def test_explicit_breakpoints_raise_nothing_else():
    options = b'{"mode":"explicit","ttl":"12h"}'
    assert cache_hints(body(prompt_cache_options=options), 0) == CacheHints()


def test_a_request_that_only_fills_the_cache_is_refused_by_name(tiny_server):
    asked = {"model": "smollm2", "input": "hi", "prompt_cache_options": {"prewarm": True}}
    with tiny_server.http() as http:
        error = http.post("/v1/responses", json=asked).json()["error"]
        assert error["param"] == "prompt_cache_options.prewarm"
        asked["prompt_cache_options"] = {"prewarm": False, "comparison_response_id": None}
        assert http.post("/v1/responses", json=asked | {"max_output_tokens": 2}).status_code == 200


def test_priority_weighs_a_session_and_is_bounded():
    weights = [cache_hints(body(), priority).weight for priority in (-(2**31), -1, 0, 1, 2**31)]
    assert weights == [2.0, 2.0, 1.0, 0.5, 0.5]


def test_breakpoints_are_shares_of_the_prompt_with_their_times_to_live():
    hour, plain = Raw(b'{"type":"ephemeral","ttl":"1h"}'), Raw(b'{"type":"ephemeral"}')
    text = {"text": Raw(b"x" * 10)}
    assert breakpoints(
        [text | {"cache_control": hour}, text, text | {"cache_control": plain}, text]
    ) == ((0.25, 3600.0), (0.75, 300.0))
    assert breakpoints([text, {"cache_control": plain}]) == ((1.0, 300.0),)
    assert breakpoints([text | {"cache_control": Raw(b"null")}, {}]) == ()
    assert breakpoints([text | {"cache_control": Raw(b'{"ttl":"9y"}')}]) == ()
    assert len(breakpoints([text | {"cache_control": plain}] * 9)) == 4


@pytest.mark.parametrize("ttl", [None, "5m", "1h"])
def test_anthropics_usage_says_what_was_read_and_written(tiny_server, ttl):
    control = {"type": "ephemeral", **({} if ttl is None else {"ttl": ttl})}
    text = f"The lighthouse keeper {ttl} wrote down every ship that passed. " * 8
    system = [{"type": "text", "text": text, "cache_control": control}]
    asked = {
        "model": "smollm2",
        "max_tokens": 2,
        "system": system,
        "messages": [{"role": "user", "content": "Go on."}],
        "cache_salt": f"salt {ttl}",
    }
    with tiny_server.http() as http:
        first, second = (
            http.post("/v1/messages", json=asked, headers=VERSION).json()["usage"] for _ in range(2)
        )
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] > 0
    split = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    split[f"ephemeral_{ttl or '5m'}_input_tokens"] = first["cache_creation_input_tokens"]
    assert first["cache_creation"] == split
    assert second["cache_read_input_tokens"] > 0
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert len({sum(usage[name] for name in names) for usage in (first, second)}) == 1
