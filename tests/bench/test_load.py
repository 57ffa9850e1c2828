"""Arrivals and the load generator, against an engine whose behaviour is known."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.load import (
    Burst,
    ClosedLoop,
    Gamma,
    Poisson,
    Ramp,
    parse_arrivals,
    run_load,
    send_times,
)
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError, EngineOverloadedError


class Echo:
    """Answers with the tokens asked for, each after a turn of the event loop; counts how many are in flight."""

    def __init__(self, *, fails=(), usage=None, silent=()):
        self.fails, self.usage, self.silent = fails, usage, silent
        self.in_flight = self.most = 0
        self.order = []

    async def ask(self, request, answer, /):
        number = request.prompt_token_ids[0]
        self.order.append(number)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for i in range(request.output_tokens):
                await asyncio.sleep(0)
                if number in self.fails and i == 1:
                    raise EngineOverloadedError("full")
                if number not in self.silent:
                    answer.add(time.monotonic(), 1)
                    answer.cached_tokens = i
            answer.usage = self.usage
        finally:
            self.in_flight -= 1


def requests(count, output_tokens=3):
    return [
        BenchRequest(prompt_token_ids=(i, 0), output_tokens=output_tokens) for i in range(count)
    ]


async def test_burst_sends_all_at_once():
    engine = Echo()
    seen = []
    records = await run_load(engine, requests(20), Burst(), on_done=seen.append)
    assert engine.most == 20
    assert seen == list(range(1, 21))
    assert [(r.input_tokens, r.output_tokens, len(r.gaps_s), r.cached_tokens) for r in records] == [
        (2, 3, 2, 2)
    ] * 20
    for r in records:
        assert r.sent <= r.first_token <= r.last_token
        assert sum(r.gaps_s) == pytest.approx(r.last_token - r.first_token)


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_gaps_have_the_rate_and_the_spread(cv):
    times = send_times(Gamma(rate=4.0, cv=cv), 20_000, 3)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25 * cv, rel=0.05)


@pytest.mark.parametrize("users", [1, 3, 50])
async def test_closed_loop_has_so_many_in_flight(users):
    engine = Echo()
    records = await run_load(engine, requests(10), ClosedLoop(concurrency=users))
    assert engine.most == min(users, 10)
    assert sorted(engine.order) == list(range(10))
    assert len(records) == 10


async def test_a_failure_is_recorded_and_stops_nothing():
    engine = Echo(fails=(1,), silent=(2,))
    records = await run_load(engine, requests(4), Burst())
    assert [r.ok for r in records] == [True, False, False, True]
    assert records[1].error == "EngineOverloadedError: full"
    assert [r.refused for r in records] == [False, True, False, False]
    assert engine.in_flight == 0


async def test_the_engines_count_goes_before_ours():
    (record,) = await run_load(Echo(usage=(7, 9)), requests(1), Burst())
    assert (record.input_tokens, record.output_tokens) == (7, 9)


async def test_open_arrivals_send_everything():
    engine = Echo()
    records = await run_load(engine, requests(30), Poisson(rate=3000.0), seed=3)
    assert all(r.ok for r in records)
    assert sorted(engine.order) == list(range(30))


def test_poisson_has_its_rate_and_its_spread():
    times = send_times(Poisson(rate=5.0), 4000, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential: as wide as its mean
    assert times[0] == 0.0
    assert times == send_times(Poisson(rate=5.0), 4000, seed=1)
    assert times != send_times(Poisson(rate=5.0), 4000, seed=2)


def test_ramp_counts_follow_the_rate():
    times = send_times(Ramp(start_rate=10, end_rate=50, duration_s=100), 8000, seed=1)
    in_first, in_second = sum(t < 50 for t in times), sum(50 <= t < 100 for t in times)
    assert in_first == pytest.approx((10 + 30) / 2 * 50, rel=0.1)
    assert in_second == pytest.approx((30 + 50) / 2 * 50, rel=0.1)
    after = [t for t in times if t >= 100]
    assert len(after) / (after[-1] - 100) == pytest.approx(50, rel=0.1)


@given(
    start=st.floats(0, 100),
    end=st.floats(0.01, 100),
    duration=st.floats(0.01, 100),
    seed=st.integers(0, 9),
)
def test_ramp_times_only_grow(start, end, duration, seed):
    times = send_times(Ramp(start_rate=start, end_rate=end, duration_s=duration), 50, seed)
    assert all(math.isfinite(t) for t in times)
    assert all(a <= b + 1e-6 for a, b in pairwise(times))


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("burst", Burst()),
        ("closed:8", ClosedLoop(concurrency=8)),
        ("poisson:2.5", Poisson(rate=2.5)),
        ("ramp:0:10:60", Ramp(start_rate=0, end_rate=10, duration_s=60)),
    ],
)
def test_arrivals_are_parsed_from_text(text, arrivals):
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "burst:1",
        "closed",
        "closed:0",
        "closed:1.5",
        "closed:inf",
        "poisson:0",
        "poisson:nan",
        "ramp:1:2",
    ],
)
def test_wrong_arrivals_are_refused(text):
    with pytest.raises(ConfigError, match="arrivals"):
        parse_arrivals(text)
