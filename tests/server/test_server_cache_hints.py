"""What bodies say about the return of their sessions, and what `usage` says was read and written."""

from __future__ import annotations

import pytest
from msgspec import Raw

from slipstream.server.answers.cache_hints import breakpoints, cache_hints
from slipstream.server.openai.protocol import ChatRequest, Message
from slipstream.types import CacheHints

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


def test_priority_weighs_a_session_and_is_bounded():
    weights = [cache_hints(body(), priority).weight for priority in (-(2**31), -1, 0, 1, 2**31)]
    assert weights == [2.0, 2.0, 1.0, 0.5, 0.5]


def test_breakpoints_are_shares_of_the_prompt_with_their_times_to_live():
    hour, plain = Raw(b'{"type":"ephemeral","ttl":"1h"}'), Raw(b'{"type":"ephemeral"}')
    text = {"text": Raw(b"x" * 10)}
    assert breakpoints(
        [text | {"cache_control": hour}, text, text | {"cache_control": plain}, text]
    ) == (
        (0.25, 3600.0),
        (0.75, 300.0),
    )
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
