"""Sends requests at once, in a closed loop or at random times, and times what comes back.

A time is taken when this process receives a delta: what a client sees.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

from slipstream.bench.metrics import RequestRecord
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: `num_tokens` tokens; `usage` is the engine's own count (input, output), sent once.

    Where an endpoint does not say how many tokens a piece of text is, `num_tokens` is 1 and `usage` puts the sum right.
    """

    num_tokens: int = 0
    usage: tuple[int, int] | None = None
    cached_tokens: int = 0


class StreamingEngine(Protocol):
    """What the load is sent to."""

    def stream(self, request: BenchRequest, /) -> AsyncGenerator[Delta, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """All at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`concurrency` users, each of whom sends the next request when the last is answered."""

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent users: exponential gaps, `rate` requests a second on average."""

    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Poisson whose rate grows linearly from `start_rate` to `end_rate` over `duration_s`, and stays there."""

    start_rate: float
    end_rate: float
    duration_s: float


Arrivals: TypeAlias = Burst | ClosedLoop | Poisson | Ramp


def parse_arrivals(text: str) -> Arrivals:
    """`burst`, `closed:8`, `poisson:2.5`, `ramp:1:10:60` (from 1 to 10 a second over 60 s)."""
    kind, *values = text.split(":")
    try:
        numbers = [float(v) for v in values]
        ok = all(math.isfinite(n) and n >= 0 for n in numbers)
        match kind, numbers:
            case "burst", []:
                return Burst()
            case "closed", [n] if ok and n >= 1 and n == int(n):
                return ClosedLoop(concurrency=int(n))
            case "poisson", [rate] if ok and rate > 0:
                return Poisson(rate=rate)
            case "ramp", [start, end, seconds] if ok and end > 0 and seconds > 0:
                return Ramp(start_rate=start, end_rate=end, duration_s=seconds)
    except ValueError:
        pass  # no numbers: told below
    raise ConfigError(
        f"arrivals={text!r} is not burst, closed:USERS, poisson:RATE or ramp:FROM:TO:SECONDS", field="arrivals"
    )


def send_times(arrivals: Burst | Poisson | Ramp, count: int, seed: int) -> list[float]:
    """Seconds from the start of the run at which each request is sent."""
    rng = random.Random(seed)
    if isinstance(arrivals, Burst):
        return [0.0] * count
    expected, times = 0.0, []
    for _ in range(count):
        times.append(_when(arrivals, expected))
        expected += rng.expovariate(1.0)
    return times


def _when(arrivals: Poisson | Ramp, expected: float) -> float:
    """The time by which `expected` requests come on average: the inverse of the rate's integral."""
    if isinstance(arrivals, Poisson):
        return expected / arrivals.rate
    start, end, duration = arrivals.start_rate, arrivals.end_rate, arrivals.duration_s
    in_ramp = (start + end) / 2 * duration
    if expected >= in_ramp:
        return duration + (expected - in_ramp) / end
    slope = (end - start) / duration
    # start·t + slope·t²/2 = expected, in the form that is stable for small slopes
    root = math.sqrt(start * start + 2 * slope * expected)
    return 2 * expected / (start + root) if expected else 0.0


async def run_load(
    engine: StreamingEngine,
    requests: Sequence[BenchRequest],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[RequestRecord]:
    """Send all requests; a record of each, in their order. A request that fails is recorded and stops nothing."""
    records: list[RequestRecord | None] = [None] * len(requests)
    done = 0

    async def ask(index: int) -> None:
        nonlocal done
        records[index] = await measure(engine, requests[index])
        done += 1
        on_done(done)

    if isinstance(arrivals, ClosedLoop):
        indices = iter(range(len(requests)))

        async def user() -> None:
            for index in indices:
                await ask(index)

        await asyncio.gather(*(user() for _ in range(min(arrivals.concurrency, len(requests)))))
    else:
        begin = time.monotonic()

        async def at(index: int, offset: float) -> None:
            delay = begin + offset - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            await ask(index)

        await asyncio.gather(*(at(i, t) for i, t in enumerate(send_times(arrivals, len(requests), seed))))
    return [record for record in records if record is not None]


async def measure(engine: StreamingEngine, request: BenchRequest) -> RequestRecord:
    """Send one request and time its answer."""
    arrived: list[float] = []
    count, cached = 0, 0
    usage: tuple[int, int] | None = None
    error: str | None = None
    sent = time.monotonic()
    try:
        async with aclosing(engine.stream(request)) as deltas:
            async for delta in deltas:
                if delta.num_tokens:
                    arrived.append(time.monotonic())
                    count += delta.num_tokens
                usage = delta.usage or usage
                cached = max(cached, delta.cached_tokens)
    except Exception as exc:  # whatever an engine or a network does wrong is a failed request
        error = f"{type(exc).__name__}: {exc}"
    n_in, n_out = usage or (len(request.prompt_token_ids), count)
    return RequestRecord(
        input_tokens=n_in,
        output_tokens=n_out,
        sent=sent,
        first_token=arrived[0] if arrived else None,
        last_token=arrived[-1] if arrived else None,
        gaps_s=tuple(b - a for a, b in pairwise(arrived)),
        cached_tokens=cached,
        error=error,
    )
