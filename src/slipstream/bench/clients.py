"""Client processes that send a load together, so that a single client is not the bottleneck."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from slipstream.bench.adapters.openai import Endpoint
from slipstream.bench.client import (
    BeginLoad,
    ClientProgress,
    ClientReady,
    FromClient,
    LoadDone,
    RunLoad,
    ToClient,
    frame,
)
from slipstream.bench.load import Arrivals, Burst, ClosedLoop, Gamma, Poisson, send_times
from slipstream.bench.workload import BenchRequest
from slipstream.costs.hardware import available_cores
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import EngineError

BUSY = 0.8
"""Fraction of a core above which a client may have limited the result."""

USERS_EACH = 128
RATE_EACH = 20.0
LEAD_S = 0.25
"""Delay of the start, in seconds, after the last client is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    """CPU load of the client processes: the largest mean fraction of a core, and the largest in
    half a second."""

    num_clients: int
    cpu: float
    busiest: float

    def warning(self) -> str | None:
        if self.busiest <= BUSY:
            return None
        return (
            f"a client process used {self.busiest:.0%} of a core in its busiest half second ({self.cpu:.0%} on average): "
            "it may have bounded these figures; use more --clients, or a machine with more cores"
        )


def num_clients(arrivals: Arrivals, num_requests: int) -> int:
    """Number of client processes for a load, on at most half of the cores: the others are left to a
    server on this machine."""
    match arrivals:
        case ClosedLoop():
            wanted = arrivals.concurrency / USERS_EACH
        case Burst():
            wanted = num_requests / USERS_EACH
        case _:
            wanted = (
                arrivals.rate if isinstance(arrivals, (Poisson, Gamma)) else arrivals.end_rate
            ) / RATE_EACH
    return max(1, min(-int(-wanted // 1), available_cores() // 2))


class Clients:
    """A group of client processes, used as `async with await Clients.start(count)`."""

    def __init__(self) -> None:
        self._turns = tempfile.TemporaryFile()  # noqa: SIM115 – closed by __aexit__
        self._processes: list[asyncio.subprocess.Process] = []
        self._decode: Callable[[bytes], FromClient] = msgspec.msgpack.Decoder(FromClient).decode

    @classmethod
    async def start(cls, count: int) -> Self:
        clients = cls()
        try:
            for _ in range(count):
                clients._processes.append(await clients._spawn())
        except BaseException:
            await clients.__aexit__()
            raise
        return clients

    async def _spawn(self) -> asyncio.subprocess.Process:
        fd, pipe = self._turns.fileno(), asyncio.subprocess.PIPE
        words = (sys.executable, "-m", "slipstream.bench.client", str(fd))
        return await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, pass_fds=[fd])

    async def run(
        self,
        endpoint: Endpoint,
        requests: Sequence[BenchRequest],
        arrivals: Arrivals,
        *,
        seed: int = 0,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> tuple[list[RequestTiming], ClientLoad]:
        """Run `run_load` distributed over all clients."""
        count = len(self._processes)
        job = RunLoad(endpoint=endpoint, requests=tuple(requests))
        if isinstance(arrivals, ClosedLoop):
            self._turns.truncate(0)
            os.pwrite(
                self._turns.fileno(),
                b"".join(i.to_bytes(4, "little") for i in range(len(requests))),
                0,
            )
            os.lseek(self._turns.fileno(), 0, os.SEEK_SET)
            users = min(arrivals.concurrency, len(requests))
            jobs = [
                msgspec.structs.replace(job, users=len(range(i, users, count)))
                for i in range(count)
            ]
        else:
            times = tuple(enumerate(send_times(arrivals, len(requests), seed)))
            jobs = [msgspec.structs.replace(job, times=times[i::count]) for i in range(count)]
        progress = [0] * count

        async def finish(i: int) -> LoadDone:
            while not isinstance(message := await self._receive(i), LoadDone):
                if isinstance(message, ClientProgress):
                    progress[i] = message.num_done
                    on_done(sum(progress))
            return message

        await asyncio.gather(*(self._send(i, job) for i, job in enumerate(jobs)))
        for i in range(count):
            assert isinstance(await self._receive(i), ClientReady)
        begin = BeginLoad(time.monotonic() + LEAD_S)
        await asyncio.gather(*(self._send(i, begin) for i in range(count)))
        results = await asyncio.gather(*(finish(i) for i in range(count)))
        records = dict(pair for result in results for pair in result.records)
        load = ClientLoad(
            num_clients=count,
            cpu=max(r.cpu for r in results),
            busiest=max(r.busiest for r in results),
        )
        return [records[i] for i in range(len(requests))], load

    async def _send(self, client: int, message: ToClient) -> None:
        stdin = self._processes[client].stdin
        assert stdin is not None
        stdin.write(frame(message))
        try:
            await stdin.drain()
        except ConnectionError as error:
            raise EngineError("a client process of the benchmark ended") from error

    async def _receive(self, client: int) -> FromClient:
        stdout = self._processes[client].stdout
        assert stdout is not None
        try:
            size = int.from_bytes(await stdout.readexactly(8), "little")
            return self._decode(await stdout.readexactly(size))
        except asyncio.IncompleteReadError as error:
            raise EngineError("a client process of the benchmark ended") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        for process in self._processes:
            await process.wait()
        self._turns.close()
