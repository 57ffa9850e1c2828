"""A client process of a load: `python -m slipstream.bench.client FD`, started by
`slipstream.bench.clients`.

It reads messages from standard input and answers on standard output; a message is a length of 8
bytes and MessagePack. FD is a file of request numbers, 4 bytes each. All client processes share its
offset, so that each number is read by one of them: in this way the users of a closed loop take
turns across processes. Times are from `time.monotonic()`, a clock that all processes share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import uvloop

from slipstream.bench.adapters.openai import Endpoint, OpenAIEndpoint
from slipstream.bench.load import send_at, send_in_turn
from slipstream.bench.workload import BenchRequest
from slipstream.costs.metrics import RequestTiming

WATCH_S = 0.5
"""Interval in which a client measures its processor time and reports its progress."""


class RunLoad(msgspec.Struct, tag=True, kw_only=True):
    """A client's part of a load: `users` of a closed loop, or requests with times in seconds after the start."""

    endpoint: Endpoint
    requests: tuple[BenchRequest, ...]
    users: int = 0
    times: tuple[tuple[int, float], ...] = ()


class BeginLoad(msgspec.Struct, tag=True):
    at: float


class ClientReady(msgspec.Struct, tag=True):
    pass


class ClientProgress(msgspec.Struct, tag=True):
    num_done: int


class LoadDone(msgspec.Struct, tag=True, kw_only=True):
    """Result of a load. `cpu`: mean fraction of a core that the client used; `busiest`: that of its
    busiest half second."""

    records: tuple[tuple[int, RequestTiming], ...]
    cpu: float
    busiest: float


ToClient = RunLoad | BeginLoad
FromClient = ClientReady | ClientProgress | LoadDone


def frame(message: ToClient | FromClient) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(8, "little") + data


def turns(fd: int) -> Iterator[int]:
    """Numbers of requests that no other client has read."""
    while data := os.read(fd, 4):
        yield int.from_bytes(data, "little")


def reply(message: FromClient) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


async def run(job: RunLoad, begin: float, fd: int) -> LoadDone:
    records: list[tuple[int, RequestTiming]] = []
    samples: list[tuple[float, float]] = []

    def sample() -> None:
        samples.append((time.monotonic(), time.process_time()))

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            sample()
            reply(ClientProgress(len(records)))

    def on_record(index: int, record: RequestTiming) -> None:
        records.append((index, record))

    async with OpenAIEndpoint(job.endpoint) as engine:
        with contextlib.suppress(OSError, TimeoutError):  # the requests will show the error
            await engine.connect()
        await asyncio.sleep(begin - time.monotonic())
        sample()
        watcher = asyncio.create_task(watch())
        if job.users:
            await send_in_turn(engine, job.requests, turns(fd), job.users, on_record)
        else:
            await send_at(engine, job.requests, job.times, begin, on_record)
        watcher.cancel()
    sample()
    mean, busiest = cpu_shares(samples)
    return LoadDone(records=tuple(records), cpu=mean, busiest=busiest)


def cpu_shares(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and maximum fraction of a core, from samples of (time, processor time)."""
    shares = [(c - a) / (d - b) for (b, a), (d, c) in pairwise(samples) if d - b > WATCH_S / 2]
    (first, cpu_first), (last, cpu_last) = samples[0], samples[-1]
    mean = (cpu_last - cpu_first) / max(last - first, 1e-9)
    return mean, max(shares, default=mean)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its clients
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # one per connection
    decode = msgspec.msgpack.Decoder(ToClient).decode
    job: RunLoad | None = None
    gc.disable()  # a garbage collection pause would look like the server's
    while size := sys.stdin.buffer.read(8):
        message = decode(sys.stdin.buffer.read(int.from_bytes(size, "little")))
        if isinstance(message, RunLoad):
            job = message
            reply(ClientReady())
        else:
            assert job is not None
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                reply(runner.run(run(job, message.at, int(sys.argv[1]))))
            gc.collect()


if __name__ == "__main__":
    main()
