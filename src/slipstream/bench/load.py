"""Sends requests at once, in a closed loop or at random times, and records when tokens arrive.

A time is recorded when this process receives a delta, as seen by a client."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeAlias

from slipstream.bench.workload import BenchRequest
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError, EngineOverloadedError


@dataclass(slots=True)
class MeasuredAnswer:
    """The received parts of an answer. `usage`: the engine's own count (input, output), if it gives
    one.

    If an endpoint does not give the number of tokens of a delta, the delta counts as one token, and
    `usage` corrects the sum. With `keeps` its content is stored for the next turn: token ids if the
    endpoint returns them, and a chat's text and reasoning."""

    times: list[float] = field(default_factory=list)  # of each received delta
    num_tokens: int = 0
    usage: tuple[int, int] | None = None
    cached_tokens: int = 0
    counts_cached: bool = False  # whether the endpoint reports the number of cached tokens
    keeps: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, now: float, num_tokens: int) -> None:
        self.times.append(now)
        self.num_tokens += num_tokens


class StreamingEngine(Protocol):
    """An engine to send the load to."""

    async def ask(self, request: BenchRequest, answer: MeasuredAnswer, /) -> None:
        """Send a request, and return when the answer is complete. Every failure raises an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Arrivals of all requests at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Arrivals from `concurrency` users, each of whom sends the next request when the last one is
    answered."""

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Arrivals from independent users: exponential gaps, `rate` requests per second on average."""

    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Poisson arrivals whose rate grows linearly from `start_rate` to `end_rate` over `duration_s`,
    and stays there."""

    start_rate: float
    end_rate: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gamma-distributed gaps: `rate` requests per second on average; `cv` is the gaps' standard
    deviation divided by their mean. 1 is Poisson, above 1 comes in bursts, below 1 more evenly."""

    rate: float
    cv: float


OnRecord: TypeAlias = Callable[[int, RequestTiming], None]
OpenArrivals: TypeAlias = Burst | Poisson | Ramp | Gamma
Arrivals: TypeAlias = OpenArrivals | ClosedLoop


def parse_arrivals(text: str) -> Arrivals:
    """Parse `burst`, `closed:8`, `poisson:2.5`, `gamma:2.5:2` (2.5 a second in bursts) or
    `ramp:1:10:60` (from 1 to 10 a second over 60 s)."""
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
            case "gamma", [rate, cv] if ok and rate > 0 and cv > 0:
                return Gamma(rate=rate, cv=cv)
            case "ramp", [start, end, seconds] if ok and end > 0 and seconds > 0:
                return Ramp(start_rate=start, end_rate=end, duration_s=seconds)
    except ValueError:
        pass  # not numbers: reported below
    raise ConfigError(
        f"arrivals={text!r} is not burst, closed:USERS, poisson:RATE, gamma:RATE:CV or ramp:FROM:TO:SECONDS",
        field="arrivals",
    )


def send_times(arrivals: OpenArrivals, count: int, seed: int) -> list[float]:
    """Seconds from the start of the run at which each request is sent."""
    rng = random.Random(seed)
    if isinstance(arrivals, Burst):
        return [0.0] * count
    expected, times = 0.0, []
    if isinstance(arrivals, Gamma):
        shape = arrivals.cv**-2
        gaps = (rng.gammavariate(shape, 1 / (shape * arrivals.rate)) for _ in range(count - 1))
        return list(itertools.accumulate(gaps, initial=0.0))[:count]
    for _ in range(count):
        times.append(_when(arrivals, expected))
        expected += rng.expovariate(1.0)
    return times


def _when(arrivals: Poisson | Ramp, expected: float) -> float:
    """Time by which `expected` requests have arrived on average: the inverse of the rate's
    integral."""
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
) -> list[RequestTiming]:
    """Send all requests. Returns a record of each, in their order. A failed request is recorded,
    and the others continue."""
    records: dict[int, RequestTiming] = {}

    def on_record(index: int, record: RequestTiming) -> None:
        records[index] = record
        on_done(len(records))

    indices = range(len(requests))
    if isinstance(arrivals, ClosedLoop):
        await send_in_turn(
            engine, requests, iter(indices), min(arrivals.concurrency, len(requests)), on_record
        )
    else:
        times = zip(indices, send_times(arrivals, len(requests), seed), strict=True)
        await send_at(engine, requests, times, time.monotonic(), on_record)
    return [records[i] for i in indices]


async def send_in_turn(
    engine: StreamingEngine,
    requests: Sequence[BenchRequest],
    indices: Iterator[int],
    num_users: int,
    on_record: OnRecord,
) -> None:
    """Send requests from `num_users` users, each of whom takes the next of `indices` when the last
    answer is complete."""

    async def user() -> None:
        for index in indices:
            on_record(index, await measure(engine, requests[index]))

    await asyncio.gather(*(user() for _ in range(num_users)))


async def send_at(
    engine: StreamingEngine,
    requests: Sequence[BenchRequest],
    times: Iterable[tuple[int, float]],
    begin: float,
    on_record: OnRecord,
) -> None:
    """Send each request at its time: seconds after `begin`, a time of `time.monotonic()`."""

    async def at(index: int, offset: float) -> None:
        delay = begin + offset - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        on_record(index, await measure(engine, requests[index]))

    await asyncio.gather(*(at(index, offset) for index, offset in times))


async def measure(
    engine: StreamingEngine, request: BenchRequest, answer: MeasuredAnswer | None = None
) -> RequestTiming:
    """Send one request and record the times of its answer, in `answer` if the caller passes one."""
    answer, error, refused = answer or MeasuredAnswer(), None, False
    sent = time.monotonic()
    try:
        await engine.ask(request, answer)
    except Exception as exc:  # every failure of an engine or a network is a failed request
        error, refused = f"{type(exc).__name__}: {exc}", isinstance(exc, EngineOverloadedError)
    times = answer.times
    n_in, n_out = answer.usage or (len(request.prompt_token_ids), answer.num_tokens)
    return RequestTiming(
        input_tokens=n_in,
        output_tokens=n_out,
        sent=sent,
        first_token=times[0] if times else None,
        last_token=times[-1] if times else None,
        gaps_s=tuple(b - a for a, b in pairwise(times)),
        cached_tokens=answer.cached_tokens,
        error=error,
        refused=refused,
    )
