"""Tokens on their way to many clients: written at once where that can be, and together for clients that read slowly."""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import socket
import threading
from functools import partial
from threading import get_ident

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.process.core_messages import Outputs
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import TokenLogprobs
from slipstream.messages.outputs import TokenOutput
from slipstream.params.sampling import SamplingParams
from slipstream.server.app import create_app
from slipstream.server.http.decoding import decode
from slipstream.server.http.record import RequestRecord
from slipstream.server.openai.chat import ChatAnswer
from slipstream.server.openai.completions import CompletionAnswer
from slipstream.server.openai.protocol import ChatRequest, CompletionRequest
from slipstream.server.state import ServerSettings
from tests.server.stepped_engine import SteppedEngine
from tests.support.waiting import PATIENCE_S

BODY = {"model": "tiny", "stream": True, "max_tokens": 100_000}
USER, LONG = {"role": "user", "content": "x"}, "x" * 20_000
VARIABLE = {"chat_template_kwargs": {"documents": LONG}}


@pytest.fixture(scope="module")
def engine(tiny_path):
    return SteppedEngine(tiny_path)


# --- The same events, however they are written ----------------------------------------------------------------------------


def make_answer(engine, kind, **more):
    state = create_app(engine, ServerSettings(served_model_names=("tiny",))).state.server
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    prompts = (
        [{"prompt_token_ids": [5, 9]}] * 2
        if kind is CompletionAnswer
        else [{"prompt_token_ids": [5, 9]}]
    )
    given = (
        {"prompt": "x"}
        if kind is CompletionAnswer
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = decode(
        CompletionRequest if kind is CompletionAnswer else ChatRequest,
        json.dumps(BODY | given | more).encode(),
    )
    return kind(state, body, prompts, sampling, RequestRecord(id="one"))


async def told(engine, answer, steps, *, write):
    """All events of an answer whose every prompt gets the tokens of `steps`; `write` says whether a client takes one more."""
    events = []

    def take(data):
        taken = write()
        if taken:
            events.append(data)
        return taken

    async def consume():
        async for some in answer.events(take):
            events.append(some)
        events.append(answer.end() if answer.stream else answer.collected())

    before = len(engine.keys)
    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    keys = engine.keys[before:]
    assert len(keys) == len(answer.parts)
    for number, tokens in enumerate(steps):
        engine.step({key: (tokens, number == len(steps) - 1) for key in keys})
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.wait_for(task, PATIENCE_S)
    return re.sub(rb'"created":\d+,', b"", b"".join(events))


def said(events):
    """Text and finish reason of each choice, and the usage if the stream has it."""
    texts, reasons, usage = {}, {}, None
    *chunks, done = [e.removeprefix(b"data: ") for e in events.split(b"\n\n") if e]
    assert done == b"[DONE]"
    for chunk in map(json.loads, chunks):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            index = choice["index"]
            assert reasons.get(index) is None, "something came behind the end"
            texts[index] = texts.get(index, "") + text
            reasons[index] = choice["finish_reason"]
    return texts, reasons, usage


def counted(answer):
    metrics = answer.state.metrics
    counts = [sum(h.counts) for h in (metrics.ttft, metrics.itl, metrics.tpot, metrics.e2e)]
    return (
        counts,
        dict(metrics.finished),
        answer.record.num_output_tokens,
        [c.num_tokens for c in answer.choices],
    )


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
@settings(max_examples=30)
@given(data=st.data())
def test_tokens_told_one_by_one_are_the_same_events(engine, kind, data):
    ids = st.integers(0, engine.tokenizer.vocab_size - 1) | st.sampled_from(
        engine.tokenizer.encode('é😀"\\\n ')
    )
    steps = data.draw(
        st.lists(
            st.lists(ids, min_size=1, max_size=3) | ids.map(lambda i: [i]), min_size=1, max_size=20
        )
    )
    more = {"stream_options": {"include_usage": data.draw(st.booleans())}}

    async def compare():
        general = make_answer(engine, kind, **more)
        for part in general.parts:
            part.on_token = None
        expected = await told(engine, general, steps, write=lambda: True)
        short = make_answer(engine, kind, **more)
        assert await told(engine, short, steps, write=lambda: True) == expected
        assert counted(short) == counted(general)
        # A client that reads slowly now and then, and a server that lets nobody write.
        for chance in (st.booleans(), st.just(False)):
            slow = make_answer(engine, kind, **more)
            assert said(await told(engine, slow, steps, write=partial(data.draw, chance))) == said(
                expected
            )
            assert counted(slow) == counted(general)
        collected = make_answer(engine, kind, stream=False)
        whole = json.loads(
            await told(engine, collected, steps, write=lambda: pytest.fail("it is no stream"))
        )
        texts = {
            c["index"]: c.get("text", c.get("message", {}).get("content")) for c in whole["choices"]
        }
        assert texts == said(expected)[0]
        assert counted(collected) == counted(general)

    asyncio.run(compare())
    assert engine.num_requests == 0


@settings(max_examples=200)
@given(data=st.data())
def test_the_message_of_steps_keeps_each_requests_order(data):
    """One message may have the tokens of several steps."""
    logprobs = (TokenLogprobs(3, -1.0, 1),)
    output = st.builds(
        TokenOutput,
        st.sampled_from("abc"),
        st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple),
        st.sampled_from([None, None, None, FinishReason.STOP]),
        stop_token_id=st.none(),
        num_cached_tokens=st.sampled_from([0, 0, 16]),
        prompt_logprobs=st.none(),
        error=st.none(),
        logprobs=st.sampled_from([(), (), logprobs]),
        num_drafted=st.sampled_from([0, 0, 3]),
        num_accepted=st.just(0),  # never without drafts
        routed_experts=st.none(),  # never without a finish_reason
    )
    outputs = data.draw(st.lists(output, max_size=12))
    message = Outputs.of(outputs)
    ids = memoryview(message.token_ids).cast("i").tolist()
    first = [
        TokenOutput(key, (token,)) for key, token in zip(message.request_ids, ids, strict=True)
    ]
    for key in "abc":
        assert [o for o in (*first, *message.tokens) if o.request_id == key] == [
            o for o in outputs if o.request_id == key
        ]


async def test_an_app_under_another_server_says_the_same(tiny_path):
    engine = SteppedEngine(tiny_path)
    app = create_app(engine, ServerSettings(served_model_names=("tiny",)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=PATIENCE_S
    ) as client:
        asking = asyncio.create_task(
            client.post("/v1/completions", json=BODY | {"prompt": [5, 9], "max_tokens": 9})
        )
        while not engine.keys:
            await asyncio.sleep(0.001)
        ids = engine.tokenizer.encode("to and fro", add_special_tokens=False)
        for i, token in enumerate(ids):
            engine.step({engine.keys[0]: ([token], i == len(ids) - 1)})
        texts, reasons, _ = said((await asking).content)
    assert (texts, reasons) == ({0: "to and fro"}, {0: "length"})


async def test_an_answer_that_cannot_be_written_fails_alone(tiny_path):
    """An exception would be the core's death to who reads its messages, and the end of every answer."""
    engine = SteppedEngine(tiny_path)
    token = engine.tokenizer.encode("to", add_special_tokens=False)[:1]

    def write():
        raise RuntimeError("the transport is broken")

    bad, good = make_answer(engine, ChatAnswer), make_answer(engine, ChatAnswer)
    steps = [token] * 4
    with pytest.raises(RuntimeError, match="the transport is broken"):
        await told(engine, bad, steps, write=write)
    assert engine.num_requests == 0
    assert b"[DONE]" in await told(engine, good, steps, write=lambda: True)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("length", [100, 20_000])
async def test_long_texts_are_made_tokens_beside_the_loop(tiny_path, monkeypatch, route, length):
    engine, threads = SteppedEngine(tiny_path), set()
    for name in ("encode", "apply_chat_template"):
        work = getattr(engine.tokenizer, name)
        monkeypatch.setattr(
            engine.tokenizer,
            name,
            lambda *a, _work=work, **k: threads.add(get_ident()) or _work(*a, **k),
        )
    app = create_app(engine, ServerSettings(served_model_names=("tiny",)))
    text = "é" * length
    given = (
        {"prompt": text}
        if route == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=PATIENCE_S
    ) as client:
        asking = asyncio.create_task(
            client.post(f"/v1/{route}", json={"model": "tiny", "max_tokens": 1} | given)
        )
        while not engine.keys and not asking.done():
            await asyncio.sleep(0.001)
        for key in engine.keys:
            engine.step({key: ([5], True)})
        assert (await asking).status_code == (
            200 if length == 100 else 400
        )  # it is longer than the context
    assert threads
    assert (get_ident() in threads) == (length == 100)


@pytest.mark.parametrize(("path", "name", "given"), [
    ("/v1/completions", "encode", {"prompt": "x", "max_tokens": 1, "bad_words": ["x" * 1000] * 20}),
    ("/v1/chat/completions", "apply_chat_template", {"messages": [USER], "max_tokens": 1,
        **VARIABLE}),
    ("/tokenize", "encode", {"messages": [{"role": "assistant", "content": "",
        "reasoning_content": LONG}]}),
    ("/detokenize", "decode", {"tokens": [5] * 20_000}),
])  # fmt: skip
async def test_what_else_is_long_is_read_beside_the_loop(tiny_path, monkeypatch, path, name, given):
    engine, threads = SteppedEngine(tiny_path), set()
    work = getattr(engine.tokenizer, name)
    monkeypatch.setattr(
        engine.tokenizer, name, lambda *a, **k: threads.add(get_ident()) or work(*a, **k)
    )
    app = create_app(engine, ServerSettings(served_model_names=("tiny",)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=PATIENCE_S
    ) as client:
        asking = asyncio.create_task(client.post(path, json={"model": "tiny"} | given))
        while not engine.keys and not asking.done():
            await asyncio.sleep(0.001)
        for key in engine.keys:
            engine.step({key: ([5], True)})
        assert (await asking).status_code == 200
    assert threads
    assert get_ident() not in threads


# --- Over sockets -----------------------------------------------------------------------------------------------------------


class Reader:
    """A client of a stream. What it has read is in `data`."""

    def __init__(self, server, buffer=None):
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        self.socket.settimeout(PATIENCE_S)
        body = json.dumps(BODY | {"prompt": [5, 9], "max_tokens": 200}).encode()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        self.data = b""

    @property
    def ended(self):
        return self.data.endswith(b"\r\n0\r\n\r\n")

    def read(self, size=65536):
        self.data += self.socket.recv(size)

    def text(self):
        chunks, rest = [], self.data.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :][:2] == b"\r\n"
            rest = rest[int(size, 16) + 2 :]
        return said(b"".join(chunks))[0][0]


@pytest.fixture
def stepped(serve, tiny_path):
    server = serve(SteppedEngine(tiny_path), served_model_names=("tiny",))
    yield server
    server.wait_idle()


def step(server, news):
    async def on_the_loop():
        server.engine.step(news)

    server.call(on_the_loop())


def read_all(readers):
    """Reads until all have their answers."""
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
        while selector.get_map():
            found = selector.select(PATIENCE_S)
            assert found, "nothing came any more"
            for key, _ in found:
                key.data.read()
                if key.data.ended:
                    selector.unregister(key.data.socket)


def test_slow_readers_delay_nobody_and_hold_no_more_than_their_answers(stepped):
    server, engine = stepped, stepped.engine
    readers = []
    for i in range(40):
        readers.append(Reader(server, buffer=4096 if i % 8 == 0 else None))
        server.wait_for(lambda: len(engine.keys) == len(readers), "a request did not arrive")
    slow, quick = readers[::8], [reader for i, reader in enumerate(readers) if i % 8]
    keys = dict(zip(readers, engine.keys, strict=True))
    for connection in server.server.server_state.connections:  # so that little fills them
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )
    ids = engine.tokenizer.encode("a word and another ", add_special_tokens=False)
    reading = threading.Thread(target=read_all, args=[quick])
    reading.start()
    steps = 1200
    for i in range(steps):
        step(server, {key: ([ids[(i + int(key)) % len(ids)]], False) for key in keys.values()})
        if i % 300 == 0:
            for reader in slow:
                reader.read(1)
    for reader in quick:
        step(server, {keys[reader]: ([ids[0]], True)})
    reading.join(PATIENCE_S)
    assert all(reader.ended for reader in quick)

    def expected(reader):
        return engine.tokenizer.decode(
            [ids[(i + int(keys[reader])) % len(ids)] for i in range(steps)] + [ids[0]]
        )

    assert all(reader.text() == expected(reader) for reader in quick)
    # What the others have not read waits once: a full buffer of the transport, and the text behind it as one delta.
    assert engine.num_requests == len(slow)
    for connection in server.server.server_state.connections:
        assert connection.transport.get_write_buffer_size() < 100_000
    answers = [sink.answer for sink in engine._sinks.values()]
    assert all(len(answer._unsent) == 1 for answer in answers)
    assert not any(answer.can_write for answer in answers)
    for reader in slow:
        step(server, {keys[reader]: ([ids[0]], True)})
    read_all(slow)
    assert all(reader.text() == expected(reader) for reader in slow)


def test_who_leaves_while_others_are_written_to_is_cancelled(stepped):
    server, engine = stepped, stepped.engine
    readers = [Reader(server) for _ in range(3)]
    server.wait_for(lambda: len(engine.keys) == 3, "not all arrived")
    (token, *_) = engine.tokenizer.encode("word", add_special_tokens=False)
    for _ in range(5):
        step(server, {key: ([token], False) for key in engine.keys})
    readers[1].socket.close()
    server.wait_for(lambda: engine.aborted, "it was not cancelled")
    (gone,) = engine.aborted
    for last in (False, True):
        step(server, {key: ([token], last) for key in engine.keys})
    others = [readers[0], readers[2]]
    read_all(others)
    assert [reader.text() for reader in others] == [engine.tokenizer.decode([token]) * 7] * 2
    assert gone in engine.keys


def test_an_error_comes_behind_the_tokens_before_it(stepped):
    server, engine = stepped, stepped.engine
    reader = Reader(server)
    server.wait_for(lambda: engine.keys, "it did not arrive")
    ids = engine.tokenizer.encode("to and fro", add_special_tokens=False)
    for token in ids:
        step(server, {engine.keys[0]: ([token], False)})

    async def die():
        engine.core_died("gone", final=False)

    server.call(die())
    read_all([reader])
    events = [
        line.removeprefix(b"data: ")
        for line in reader.data.split(b"\n")
        if line.startswith(b"data: ")
    ]
    *chunks, error = map(json.loads, events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "to and fro"
    assert error["error"]["code"] == "engine_dead"
