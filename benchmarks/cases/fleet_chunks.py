"""What a fleet's gateway spends on one part of a stream: its processor time, with replica and clients in other processes.

    python benchmarks/fleet.py --study chunks

The replica has no engine: it writes one event and its mark to each of `--streams` streams in turn, `--rate` of them a second,
so that each comes alone. The gateway runs in this process. Its time counts once all streams have begun, until the last event.
`floor`: the same bytes passed on by two transports that only copy, in the same minute and under the same load.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import msgspec
import uvloop

from slipstream.bench.report import print_table
from slipstream.engine.core_process import CacheEvents
from slipstream.fleet.config import check
from slipstream.fleet.head import Head
from slipstream.server.operations.fleet import ReplicaLoad
from slipstream.server.run import bind, url
from slipstream.server.state import ServerSettings
from slipstream.stats import EngineStats

_CHOICE = b'{"index":0,"text":" word","finish_reason":null,"logprobs":null}'
EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"m","choices":[%b]}\n\n:t 1234\n'
    % _CHOICE
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def framed(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return chunk(len(data).to_bytes(4, "little") + data)


async def replica(listener: socket.socket, streams: int, events: int, rate: float) -> None:
    writers: list[asyncio.StreamWriter] = []
    all_here, over = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.write(HEAD)
        if b"/fleet/events" in head:
            writer.write(
                framed(
                    CacheEvents(
                        number=0,
                        block_size=16,
                        root_key=b"r" * 16,
                        adapters={},
                        stored=b"",
                        whole=True,
                    )
                )
            )
            stats = EngineStats(num_running=0, num_waiting=0, num_blocks=10, num_free_blocks=10)
            while not over.is_set():
                writer.write(
                    framed(ReplicaLoad(stats=stats, is_up=True, num_open=0, max_model_len=1024))
                )
                await asyncio.sleep(0.5)
            return
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
        writer.write(chunk(EVENT))
        writers.append(writer)
        if len(writers) == streams:
            all_here.set()
        await over.wait()

    server = await asyncio.start_server(serve, sock=listener)
    await all_here.wait()
    await asyncio.sleep(0.5)
    part, begin = chunk(EVENT), time.monotonic()
    for number in range(events):
        for i, writer in enumerate(writers):
            due = begin + (number * streams + i) / rate
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            writer.write(part)
    await asyncio.sleep(0.5)
    for writer in writers:
        writer.write(chunk(b"data: [DONE]\n\n:e 5 %d\n" % (events + 1)) + b"0\r\n\r\n")
        await writer.drain()
    over.set()
    await asyncio.sleep(1.0)
    server.close()


async def clients(port: int, streams: int, results) -> None:
    """Tells when all have begun, and when all events were read."""
    begun = 0

    async def one() -> int:
        nonlocal begun
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = msgspec.json.encode(
            {"model": "m", "prompt": "x", "max_tokens": 1000, "stream": True}
        )
        about = b"host: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + about + body)
        found, first = 0, True
        while data := await reader.read(65536):
            if first:
                first, begun = False, begun + 1
                if begun == streams:
                    results.put("begun")
            found += data.count(b'" word"')
            if data.endswith(b"0\r\n\r\n"):
                break
        writer.close()
        return found

    results.put(sum(await asyncio.gather(*(one() for _ in range(streams)))))


def run_replica(listener, *args):
    asyncio.run(replica(listener, *args))


def run_clients(*args):
    asyncio.run(clients(*args))


class _Replica:
    def __init__(self, address: str) -> None:
        self.url = address

    async def ended(self) -> str:
        return await asyncio.Event().wait()

    async def stop(self, drain_s: float) -> None:
        pass


class _Backend:
    def __init__(self, address: str) -> None:
        self.address = address

    async def start(self, spec, place) -> _Replica:
        return _Replica(self.address)

    async def close(self) -> None:
        pass


async def measured(run, listener: socket.socket, args) -> tuple[float, int]:
    """Processor seconds of this process for all events but the first, and their number. `run` gives the port to ask."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    made = spawn.Process(
        target=run_replica, args=(listener, args.streams, args.events, args.rate), daemon=True
    )
    made.start()
    async with run as port:
        asking = spawn.Process(target=run_clients, args=(port, args.streams, results), daemon=True)
        asking.start()
        assert await asyncio.to_thread(results.get) == "begun"
        begin = time.process_time()
        number = await asyncio.to_thread(results.get)
        seconds = time.process_time() - begin
        asking.join()
    made.join()
    return seconds, number - args.streams


class Gateway:
    def __init__(self, args, address: str) -> None:
        version = {"name": "v1", "model": args.model, "engine": {"max_num_seqs": 2 * args.streams}}
        file = {"port": 0, "models": {"m": {"versions": [version]}}, "router": {"probe_s": 0}}
        self.settings = ServerSettings(port=0, served_model_names=("m",))
        self.head = Head(check(file), Path(tempfile.mkdtemp()) / "state", self.settings)
        self.head._make_backend = lambda: _Backend(address)

    async def __aenter__(self) -> int:
        self._listener, ready = bind(self.settings), asyncio.Event()
        self._running = asyncio.create_task(self.head.run(self._listener, ready.set))
        await ready.wait()
        return int(url(self.settings, self._listener).rpartition(":")[2])

    async def __aexit__(self, *_) -> None:
        self.head.stop()
        await self._running
        self._listener.close()


class Copy:
    """Passes bytes on both ways."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> int:
        port, loop = self.port, asyncio.get_running_loop()

        class Way(asyncio.Protocol):
            def __init__(self, other=None) -> None:
                self.other, self.early = other, b""

            def connection_made(self, transport) -> None:
                self.transport = transport
                if self.other is None:
                    self.opening = loop.create_task(self.open())

            async def open(self) -> None:
                _, other = await loop.create_connection(
                    lambda: Way(self.transport), "127.0.0.1", port
                )
                other.transport.write(self.early)
                self.other = other.transport

            def data_received(self, data) -> None:
                if self.other is None:
                    self.early += data
                else:
                    self.other.write(data)

        self.server = await loop.create_server(Way, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_) -> None:
        self.server.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--events", type=int, default=600)
    parser.add_argument("--rate", type=float, default=1500.0)
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    seconds: dict[str, list[float]] = {"gateway": [], "floor": []}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for number in range(2 * args.rounds):
            what = ("gateway", "floor")[number % 2]
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            way = Gateway(args, f"http://127.0.0.1:{port}") if what == "gateway" else Copy(port)
            spent, events = runner.run(measured(way, listener, args))
            assert events == args.streams * args.events, events
            seconds[what].append(spent / events * 1e6)
    found = {f"{what}_us_per_event": common.median(values) for what, values in seconds.items()}
    found["times_the_floor"] = found["gateway_us_per_event"] / found["floor_us_per_event"]
    found["load_average"] = os.getloadavg()[0]
    print_table(
        "the gateway's cost of an event",
        ["what", "value"],
        [(name, f"{value:.2f}") for name, value in found.items()],
    )
    save(results={**found, "all": seconds})
