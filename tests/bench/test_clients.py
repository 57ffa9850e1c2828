"""Client processes: each request is sent once, at its time or in turn, and what the clients used is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from slipstream.bench.adapters.openai import Endpoint
from slipstream.bench.client import cpu_shares
from slipstream.bench.clients import ClientLoad, Clients, num_clients
from slipstream.bench.load import Burst, ClosedLoop, Poisson, Ramp, send_times
from slipstream.bench.workload import BenchRequest
from slipstream.errors import EngineError


class Server:
    """Answers /v1/completions with as many events as tokens are wanted; `refuses` holds first token ids answered with 429."""

    def __init__(self, *, refuses=(), hold_s=0.0):
        self.refuses, self.hold_s = refuses, hold_s
        self.order, self.arrived = [], []
        self.in_flight = self.most = self.num_connections = 0

    async def serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (
                    int(x.split(b":")[1])
                    for x in head.split(b"\r\n")
                    if x.startswith(b"content-length")
                )
                await self.answer(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    async def answer(self, body, writer):
        number = body["prompt"][0]
        self.order.append(number)
        self.arrived.append(asyncio.get_running_loop().time())
        if number in self.refuses:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull")
            return
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(self.hold_s)
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"]
        events.append(
            {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": body["max_tokens"]}}
        )
        data = (
            b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            + b"data: [DONE]\n\n"
        )
        self.in_flight -= 1
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
            % (len(data), data)
        )


@contextlib.asynccontextmanager
async def clients_of(server, count):
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        async with await Clients.start(count) as clients:
            yield clients, Endpoint(url=url, model="m")
    finally:
        listener.close()


def requests(count):
    return [BenchRequest(prompt_token_ids=(i, 0), output_tokens=1 + i % 3) for i in range(count)]


async def test_each_request_is_sent_once_and_its_record_is_at_its_place():
    server, seen = Server(refuses=(4,)), []
    async with clients_of(server, 3) as (clients, endpoint):
        for arrivals in (Burst(), ClosedLoop(concurrency=4), Poisson(rate=500.0)):
            server.order.clear()
            records, load = await clients.run(endpoint, requests(20), arrivals, on_done=seen.append)
            assert sorted(server.order) == list(range(20))
            assert [r.output_tokens for r in records if r.ok] == [
                1 + i % 3 for i in range(20) if i != 4
            ]
            assert (records[4].refused, records[4].error) == (
                True,
                "EngineOverloadedError: HTTP 429: full",
            )
            assert [r.ok for r in records].count(False) == 1
            assert load.num_clients == 3
            assert load.cpu > 0
    assert all(0 <= n <= 20 for n in seen)


async def test_the_users_of_a_closed_loop_take_turns_across_clients():
    server = Server(hold_s=0.02)
    async with clients_of(server, 2) as (clients, endpoint):
        records, _ = await clients.run(endpoint, requests(30), ClosedLoop(concurrency=5))
        assert all(r.ok for r in records)
        assert server.most <= 5
        assert server.num_connections <= 5  # they stay open
        assert sorted(server.order) == list(range(30))
        assert all(
            number <= place + 4 for place, number in enumerate(server.order)
        )  # those before it are on their way
        server.most = 0
        await clients.run(endpoint, requests(3), ClosedLoop(concurrency=1))
        assert server.most == 1


async def test_requests_come_no_sooner_than_at_their_times():
    server = Server()
    async with clients_of(server, 2) as (clients, endpoint):
        begin = time.monotonic()
        records, _ = await clients.run(endpoint, requests(20), Poisson(rate=50.0), seed=5)
    wanted = send_times(Poisson(rate=50.0), 20, 5)
    assert all(r.sent >= begin + at for r, at in zip(records, wanted, strict=True))


async def test_a_client_that_ends_is_an_error():
    async with clients_of(Server(), 2) as (clients, endpoint):
        clients._processes[1].kill()
        await clients._processes[1].wait()
        with pytest.raises(EngineError, match="client process"):
            await clients.run(endpoint, requests(4), Burst())


def test_shares_of_a_core_are_between_samples_that_are_apart():
    samples = [(10.0, 3.0), (11.0, 3.25), (12.0, 4.0), (12.01, 4.01), (13.0, 4.2)]
    assert cpu_shares(samples) == pytest.approx((0.4, 0.75))
    assert cpu_shares([(10.0, 3.0), (10.1, 3.05)]) == pytest.approx((0.5, 0.5))


def test_a_busy_client_is_told():
    assert ClientLoad(num_clients=2, cpu=0.5, busiest=0.8).warning() is None
    assert "95%" in ClientLoad(num_clients=2, cpu=0.5, busiest=0.95).warning()


@pytest.mark.parametrize(
    ("arrivals", "count", "wanted"),
    [
        (ClosedLoop(concurrency=1024), 2000, 8),
        (ClosedLoop(concurrency=64), 2000, 1),
        (Burst(), 300, 3),
        (Poisson(rate=40.0), 2000, 2),
        (Ramp(start_rate=1.0, end_rate=41.0, duration_s=9.0), 2000, 3),
        (Poisson(rate=0.1), 10, 1),
    ],
)
def test_number_of_clients(monkeypatch, arrivals, count, wanted):
    monkeypatch.setattr("slipstream.bench.clients.available_cores", lambda: 16)
    assert num_clients(arrivals, count) == wanted
    monkeypatch.setattr("slipstream.bench.clients.available_cores", lambda: 4)
    assert num_clients(arrivals, count) == min(wanted, 2)
