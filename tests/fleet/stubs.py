"""Replicas without an engine, in the test's own process: they say numbers, and fail, hang, lie or wait as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json

import msgspec

from slipstream.engine.process.operation_messages import CacheEvents
from slipstream.messages.stats import EngineStats
from slipstream.server.operations.fleet import ReplicaLoad
from slipstream.server.operations.metrics import Metrics
from tests.fleet.running import RunningFleet

PROMPT_TOKENS = 7
"""Prompt length that every answer of a stub reports."""


class Request:
    def __init__(self, head, body):
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = dict(line.split(": ", 1) for line in lines if line)
        self.body = body
        self.cancelled = False

    @property
    def json(self):
        return json.loads(self.body)


class Stub:
    """A replica. The next token of an answer is `tokens[i]`, as "i "; it hangs before token `hang_at` until `go`."""

    def __init__(self, spec):
        self.spec, self.seen, self.num_written = spec, [], 0
        self.status, self.delay_s, self.hang_at, self.lie, self.endless = 200, 0.0, None, 0, False
        self.silent, self.token_s = False, 0.0
        self.shows_life = False  # tell once that a stream was taken and has not begun
        self.code, self.is_ready = "internal", True
        self.engine_dies_after, self.engine_code = None, "engine_dead"
        self.go = asyncio.Event()
        self.stats = EngineStats(num_running=0, num_waiting=0, num_blocks=10, num_free_blocks=10)
        self.metrics = Metrics("stub")
        self._gone = asyncio.Event()
        self._writers = set()

    async def open(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def ended(self):
        await self._gone.wait()
        return "was ended"

    async def stop(self, drain_s):
        self._gone.set()
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    def engine_down(self):
        self.status, self.code, self.is_ready, self.engine_dies_after = (
            503,
            "engine_down",
            False,
            None,
        )

    def engine_up(self):
        self.status, self.is_ready = 200, True

    @property
    def asked(self):
        """Requests for text."""
        return [r for r in self.seen if r.path in ("/v1/completions", "/fleet/resume")]

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        # RuntimeError: uvloop's, of a connection that is closed
        with contextlib.suppress(
            asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, RuntimeError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
                request = Request(head, b"")
                request.body = await reader.readexactly(
                    int(request.headers.get("content-length", 0))
                )
                if request.path == "/fleet/events":
                    await self._send_events(writer)
                    continue
                self.seen.append(request)
                answering = asyncio.create_task(self._answer(request, writer))
                left = asyncio.create_task(reader.read(1))
                await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    request.cancelled = True
                    answering.cancel()
                    break
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                answering.result()
        self._writers.discard(writer)
        writer.transport.abort()

    async def _send_events(self, writer):
        while self.silent:  # on a new connection, too: one that is heard again does not hang
            await asyncio.sleep(0.02)
        while self.silent:  # a gateway that comes again hears nothing, either
            await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        first = CacheEvents(
            number=0, block_size=16, root_key=b"r" * 16, adapters={}, stored=b"", whole=True
        )
        self._message(writer, first)
        while True:
            if not self.silent:
                load = ReplicaLoad(
                    stats=self.stats,
                    is_up=True,
                    is_ready=self.is_ready,
                    num_open=0,
                    max_model_len=1024,
                    counts=self.metrics.counts(),
                )
                self._message(writer, load)
                await writer.drain()
            await asyncio.sleep(0.05)

    def _message(self, writer, message):
        data = msgspec.msgpack.encode(message)
        self._chunk(writer, len(data).to_bytes(4, "little") + data)

    @staticmethod
    def _chunk(writer, data):
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _answer(self, request, writer):
        if self.shows_life:
            told = b"content-type: text/event-stream"
            writer.write(b"HTTP/1.1 102 Processing\r\n%b\r\n\r\n" % told)
        if self.hang_at == 0:
            await self.go.wait()
        await asyncio.sleep(self.delay_s)
        if self.status != 200:
            self._whole(
                writer, self.status, {"error": {"message": "the stub fails", "code": self.code}}
            )
            return
        body, begun = request.json, []
        if request.path == "/fleet/resume":
            begun, body = body["answer_token_ids"], body["body"]
        number = body.get("max_tokens", 8)
        told = b"x-slipstream-tokens: %d %d\r\n"
        if not body.get("stream"):
            for i in range(number):
                if i and (self.token_s or i == self.hang_at):
                    writer.write(
                        b"HTTP/1.1 102 Processing\r\n" + told % (PROMPT_TOKENS, i) + b"\r\n"
                    )
                if i == self.hang_at:
                    await self.go.wait()
                await asyncio.sleep(self.token_s)
            text = "".join(f"{i + self.lie} " for i in range(number))
            choice = {
                "index": 0,
                "text": text,
                "finish_reason": "length",
                "token_ids": [i + self.lie for i in range(number)],
            }
            answer = {"id": "x", "object": "text_completion", "choices": [choice]}
            self._whole(writer, 200, answer, told % (PROMPT_TOKENS, number))
            return
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        )
        writer.write(head + told % (PROMPT_TOKENS, len(begun)) + b"\r\n")
        for i in range(len(begun), number):
            if i == self.hang_at:
                await self.go.wait()
            await asyncio.sleep(self.token_s)
            if self.engine_dies_after is not None and i == len(begun) + self.engine_dies_after:
                error = b'{"error":{"message":"gone","code":"%b"}}' % self.engine_code.encode()
                self._chunk(writer, b"data: %b\n\n" % error)
                writer.write(b"0\r\n\r\n")
                self.engine_down()
                return
            self._event(writer, f"{i} ", i)
            await writer.drain()
        while self.endless:
            self._event(writer, "x" * 4096, 5)
            self.num_written += 4096
            await writer.drain()
        self._chunk(writer, b"data: [DONE]\n\n:e %d %d\n" % (PROMPT_TOKENS, number))
        writer.write(b"0\r\n\r\n")

    def _event(self, writer, text, token):
        event = {
            "id": "x",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": None}],
        }
        self._chunk(writer, b"data: %b\n\n:t %d\n" % (json.dumps(event).encode(), token))

    @staticmethod
    def _whole(writer, status, value, more=b""):
        data = json.dumps(value).encode()
        head = b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            len(data),
        )
        writer.write(head + more + b"\r\n" + data)


class Stubs:
    """A `Backend`."""

    def __init__(self):
        self.made = []

    async def start(self, spec, place):
        stub = Stub(spec)
        self.made.append(stub)
        await stub.open()
        return stub

    async def close(self):
        for stub in self.made:
            await stub.stop(0)


@contextlib.contextmanager
def stubbed(fleet, folder, **settings):
    """A running fleet, and its stubs in the order in which they were started."""
    backend = Stubs()
    made = RunningFleet(fleet, folder, backend=backend, **settings)
    try:
        yield made, backend.made
    finally:
        made.stop()
        assert not folder.exists(), list(folder.iterdir())


def text_of(client, number=8, prompt="Hello"):
    """Text of a stream."""
    chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=number, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks)


def numbers(number=8):
    return "".join(f"{i} " for i in range(number))
