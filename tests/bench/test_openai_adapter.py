"""The OpenAI adapter: its event reader at any cut of the bytes, and its manners against a server that has none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.adapters.openai import Endpoint, Events, OpenAIEndpoint, Splitter
from slipstream.bench.load import Burst, MeasuredAnswer, run_load
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError, EngineError
from tests.support.waiting import free_port

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
    splitter = Splitter()
    return [event.decode() for piece in pieces for event in splitter.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_the_cuts(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert read(STREAM[a:b] for a, b in pairwise(edges)) == WANTED


def test_an_endless_event_is_refused():
    with pytest.raises(EngineError, match="16 MiB"):
        read([b"data: " + b"x" * 2**20] * 20)


@pytest.mark.parametrize(("event", "tokens", "usage", "cached"), [
    ({"choices": [{"text": "x"}]}, 1, None, 0),
    ({"choices": [{"text": ""}]}, 0, None, 0),
    ({"choices": []}, 0, None, 0),
    ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, 0, (3, 4), 0),
    ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2}}}, 0, (3, 4), 2),
    ({"choices": [{"text": "x"}], "usage": None, "error": None}, 1, None, 0),
])  # fmt: skip
def test_an_event_counts_its_tokens_and_usage(event, tokens, usage, cached):
    answer = MeasuredAnswer()
    Events(answer).feed(b"data: " + json.dumps(event).encode() + b"\n\n", 7.0)
    assert answer == MeasuredAnswer(
        times=[7.0] * tokens,
        num_tokens=tokens,
        usage=usage,
        cached_tokens=cached,
        counts_cached=cached > 0,
    )


@pytest.mark.parametrize(
    ("choice", "tokens", "kept"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, 0, ([], [], [])),
        ({"delta": {"content": "x"}}, 1, ([], ["x"], [""])),
        ({"delta": {"reasoning_content": "y"}}, 1, ([], [""], ["y"])),
        ({"delta": {"reasoning": "z", "content": None}}, 1, ([], [""], ["z"])),
        ({"text": "", "token_ids": [4, 5]}, 2, ([4, 5], [], [])),
        ({"text": "", "token_ids": []}, 0, ([], [], [])),
        ({"text": "x"}, 1, ([], [], [])),
    ],
)
def test_what_an_answer_says_is_kept_where_it_is_wanted(choice, tokens, kept):
    """A chat's text, and token ids, which need not have a text."""
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    answer = MeasuredAnswer(keeps=True)
    Events(answer).feed(event, 7.0)
    assert answer.num_tokens == tokens
    assert len(answer.times) == min(tokens, 1)
    assert (answer.token_ids, answer.text, answer.reasoning) == kept
    other = MeasuredAnswer()
    Events(other).feed(event, 7.0)
    assert (other.token_ids, other.text, other.reasoning) == ([], [], [])


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"usage": {}}', b'{"error": {"message": "full"}}', b'{"error": "full"}']
)
def test_broken_events_are_an_error(data):
    with pytest.raises(EngineError):
        Events(MeasuredAnswer()).feed(b"data: " + data + b"\n\n", 0.0)


async def test_figures_of_a_scripted_timeline(monkeypatch):
    """Sent at 100 s; text at 101, 103 and (two events at once) 103.5, empty text at 102, and the usage says five tokens."""

    def event(text):
        return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"

    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\ndata: [DONE]\n\n'
    script = [
        (101.0, event("a")),
        (102.0, event("")),
        (103.0, event("b")[:9]),
        (103.0, event("b")[9:]),
        (103.5, event("c") + event("d")),
        (104.0, usage),
    ]

    class Scripted:
        async def ask(self, request, answer):
            events = Events(answer)
            for now, data in script:
                events.feed(data, now)
            assert events.ended

    monkeypatch.setattr("slipstream.bench.load.time.monotonic", lambda: 100.0)
    (record,) = await run_load(Scripted(), [REQUEST], Burst())
    assert (record.ttft_s, record.e2e_s, record.tpot_s) == (1.0, 3.5, 2.5 / 4)
    assert (record.gaps_s, record.worst_gap_s) == ((2.0, 0.5, 0.0), 2.0)
    assert (record.input_tokens, record.output_tokens) == (7, 5)


@contextlib.asynccontextmanager
async def server(answer):
    """An HTTP server that gives every request the same bytes and then closes the connection."""
    bodies = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
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
    return (
        f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        + body
    )


GOOD = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}},
    )
)
REQUEST = BenchRequest(prompt_token_ids=(1, 2), output_tokens=5, prompt="text")


def of(url, **settings):
    return OpenAIEndpoint(Endpoint(url=url, model="m", **settings))


async def ask(answer, **settings):
    async with server(answer) as (url, bodies), of(url + "/v1/", **settings) as endpoint:
        (record,) = await run_load(endpoint, [REQUEST], Burst())
    return record, bodies


async def test_a_good_answer():
    record, bodies = await ask(http(GOOD + b"data: [DONE]\n\n"), api_key="the-key")
    assert record.error is None
    assert (record.input_tokens, record.output_tokens, len(record.gaps_s)) == (2, 5, 1)
    ((head, body),) = bodies
    assert b"POST /v1/completions " in head
    assert b"Bearer the-key" in head
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == (
        [1, 2],
        5,
        True,
        0,
    )


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
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + GOOD, "broke off"),
        (b"", "without an answer"),
        (b"no HTTP at all\r\n\r\n", "no HTTP answer"),
    ],
)
async def test_bad_answers_are_failed_requests(answer, word):
    record, _ = await ask(answer)
    assert not record.ok
    assert word in record.error


async def test_vocabulary_sizes_are_read_from_the_list_of_models():
    listed = b'{"data": [{"id": "x", "root": "a"}, {"id": "y", "vocab_size": 9}, {"id": "z", "meta": {"n_vocab": 7}}]}'
    async with server(http(listed)) as (url, _), of(url) as endpoint:
        found = [(model.id, model.num_token_ids) for model in await endpoint.served_models()]
        assert found == [("x", None), ("y", 9), ("z", 7)]


async def test_a_server_without_a_list_of_models_is_refused():
    async with server(http(b"[]")) as (url, _), of(url) as endpoint:
        with pytest.raises(EngineError, match="does not answer like"):
            await endpoint.served_models()


async def test_a_port_without_a_server_is_named():
    async with of(f"http://127.0.0.1:{free_port()}") as endpoint:
        with pytest.raises(EngineError, match="no server listens at 127"):
            await endpoint.served_models()


def test_a_url_needs_its_scheme():
    with pytest.raises(ConfigError, match="http://"):
        Endpoint(url="localhost:8000")


async def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew():
    """The first answer may be kept alive, but the server closes it."""
    answer = http(GOOD + b"data: [DONE]\n\n").replace(b"connection: close\r\n", b"")
    async with server(answer) as (url, bodies), of(url) as endpoint:
        for _ in range(3):
            (record,) = await run_load(endpoint, [REQUEST], Burst())
            assert record.error is None
    assert len(bodies) == 3


async def test_a_connection_that_is_being_closed_is_not_used():
    async with server(http(GOOD + b"data: [DONE]\n\n")) as (url, bodies), of(url) as endpoint:
        await endpoint.connect()
        endpoint._idle[0].reusable = True
        endpoint._idle[0]._transport.close()  # `connection_lost` is called later
        answer = MeasuredAnswer()
        await endpoint.ask(REQUEST, answer)
    assert answer.num_tokens == 2
    assert len(bodies) == 1
