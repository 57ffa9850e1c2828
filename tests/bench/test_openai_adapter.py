"""The OpenAI adapter: its event reader at any cut of the bytes, and its manners against a server that has none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.adapters.openai import OpenAIEndpoint, events, parse
from slipstream.bench.load import Burst, Delta, run_load
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError, EngineError

STREAM = (
    ": a comment\r\n"
    'data: {"choices": [{"text": "a\u2028b\u0085c"}]}\r\n\r\n'
    'event: x\ndata:{"choices": [{"text": ""}]}\n\n'
    "data: first\ndata: second\n\n"
    "data: third\r\ndata: fourth\r\n\r\n"
    "\n\n"
    "data: cr\r\r"
    "data: [DONE]\n\n"
    "data: no end"
).encode()
WANTED = [
    '{"choices": [{"text": "a\u2028b\u0085c"}]}',
    '{"choices": [{"text": ""}]}',
    "first\nsecond",
    "third\nfourth",
    "cr",
    "[DONE]",
]


def read(pieces):
    async def chunks():
        for piece in pieces:
            yield piece

    async def collect():
        return [event.decode() async for event in events(chunks())]

    return asyncio.run(collect())


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_the_cuts(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert read(STREAM[a:b] for a, b in pairwise(edges)) == WANTED


def test_an_endless_event_is_refused():
    with pytest.raises(EngineError, match="16 MiB"):
        read([b"data: " + b"x" * 2**20] * 20)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        ({"choices": [{"text": "x"}]}, Delta(num_tokens=1)),
        ({"choices": [{"text": ""}]}, None),
        ({"choices": []}, None),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, Delta(usage=(3, 4))),
        (
            {
                "choices": [],
                "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
            },
            Delta(usage=(3, 4), cached_tokens=2),
        ),
        ({"choices": [{"text": "x"}], "usage": None, "error": None}, Delta(num_tokens=1)),
    ],
)
def test_parse(event, delta):
    assert parse(json.dumps(event).encode()) == delta


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"usage": {}}', b'{"error": {"message": "full"}}', b'{"error": "full"}']
)
def test_parse_refuses(data):
    with pytest.raises(EngineError):
        parse(data)


@contextlib.asynccontextmanager
async def server(answer):
    """An HTTP server that gives every request the same bytes and then closes the connection."""
    bodies = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        bodies.append((head, json.loads(await reader.readexactly(length[0])) if length else None))
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", bodies
    finally:
        listener.close()


def http(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


GOOD = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}},
    )
)
REQUEST = BenchRequest(prompt_token_ids=(1, 2), output_tokens=5, prompt="text")


async def ask(answer, **settings):
    async with server(answer) as (url, bodies), OpenAIEndpoint(url + "/v1/", "m", **settings) as endpoint:
        (record,) = await run_load(endpoint, [REQUEST], Burst())
    return record, bodies


async def test_a_good_answer():
    record, bodies = await ask(http(GOOD + b"data: [DONE]\n\n"), api_key="the-key")
    assert record.error is None
    assert (record.input_tokens, record.output_tokens, len(record.gaps_s)) == (2, 5, 1)
    ((head, body),) = bodies
    assert b"POST /v1/completions " in head
    assert b"Bearer the-key" in head
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([1, 2], 5, True, 0)


async def test_text_and_no_extension():
    _, ((_, body),) = await ask(http(GOOD + b"data: [DONE]\n\n"), send_text=True, ignore_eos=False)
    assert body["prompt"] == "text"
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (http(b'{"error": {"message": "slow down"}}', "429 Too Many Requests"), "429"),
        (http(GOOD), "DONE"),
        (http(GOOD + b'data: {"error": {"message": "the engine died"}}\n\n'), "the engine died"),
        (http(b"data: nonsense\n\n"), "nonsense"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + GOOD, "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
        (b"no HTTP at all\r\n\r\n", "RemoteProtocolError"),
    ],
)
async def test_bad_answers_are_failed_requests(answer, word):
    record, _ = await ask(answer)
    assert not record.ok
    assert word in record.error


async def test_served_models():
    async with server(http(b'{"data": [{"id": "x"}, {"id": "y"}]}')) as (url, _), OpenAIEndpoint(url, "") as endpoint:
        assert await endpoint.served_models() == ["x", "y"]
    async with server(http(b"[]")) as (url, _), OpenAIEndpoint(url, "") as endpoint:
        with pytest.raises(EngineError, match="does not answer like"):
            await endpoint.served_models()


def test_a_url_needs_its_scheme():
    with pytest.raises(ConfigError, match="http://"):
        OpenAIEndpoint("localhost:8000", "m")
