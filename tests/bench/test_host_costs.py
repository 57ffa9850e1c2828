"""Measurements of the host, on an engine whose costs are known."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from slipstream.bench import host_costs
from slipstream.costs.metrics import RequestTiming
from slipstream.costs.step_cost import HostCost

STEP_S, SEQUENCE_S, AHEAD_S, REQUEST_S = 0.003, 0.0001, 0.002, 0.007


class Linear:
    """A step takes 10 ms, and 1 ms for each token."""

    host = HostCost()

    def seconds(self, shape):
        return 0.010 + 0.001 * shape.num_tokens

    def label(self, shape):
        return "measured"


@pytest.mark.parametrize(
    ("run_ahead", "expected"),
    [
        (8, (STEP_S, SEQUENCE_S, AHEAD_S, REQUEST_S)),
        (0, (STEP_S, SEQUENCE_S, 0.0, REQUEST_S)),  # one thread: no step overlaps
        (None, (0.0, 0.0, 0.0, REQUEST_S)),  # a GPU: all do, on cores of their own
    ],
)
def test_costs_are_found_again(monkeypatch, run_ahead, expected):
    def waited(count):
        return 0.0 if run_ahead is None else STEP_S + SEQUENCE_S * count

    async def run_load(engine, requests, arrivals):
        count = len(requests)
        beside = AHEAD_S if run_ahead is not None and count <= run_ahead else waited(count)
        gap = 0.010 + 0.001 * count + beside
        records = []
        for number, r in enumerate(requests):
            prompt = len(r.prompt_token_ids)
            first = REQUEST_S + 0.010 + 0.001 * prompt + waited(1)
            gaps = [gap] * (r.output_tokens - 1)
            if (
                r.output_tokens == host_costs.ANSWER
            ):  # two of 62 are late; the first prompt's next two hold the others' prompts
                gaps = [gap, *([gap + 0.015, *[gap - 0.0005] * 30] * 2)]
            if count > 1:
                gaps, first = (
                    ([gap + 0.1] * 2 + gaps, first)
                    if number == 0
                    else (gaps, first + 2 * (gap + 0.1) - 1e-9)
                )
            times = itertools.accumulate([first, *gaps])
            records.append(RequestTiming.of(prompt, 0.0, list(times)))
        return records

    monkeypatch.setattr(host_costs, "run_load", run_load)
    found = asyncio.run(
        host_costs.measure_host(None, Linear(), vocab_size=100, run_ahead=run_ahead)
    )
    assert (found.step_s, found.sequence_s, found.ahead_s, found.request_s) == pytest.approx(
        expected, abs=1e-5
    )
