"""Results of a simulated fleet, and the stopwatch for the gateway's own work."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.costs.metrics import percentile

WINDOW_S = 300.0
"""Window in which changes of a scaler's direction are counted."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Percentiles of a figure, and its maximum."""

    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Marks | None:
        if not values:
            return None
        known = sorted(values)
        p50, p90, p99 = (percentile(known, q) for q in (50, 90, 99))
        return cls(p50, p90, p99, known[-1])


@dataclass(frozen=True, slots=True)
class CallTimes:
    """CPU time of calls of one kind, in microseconds; `item_us`: per item of all calls."""

    calls: int
    p50_us: float
    p99_us: float
    mean_us: float
    item_us: float
    items: int


class Stopwatch:
    """Times of calls, in nanoseconds of CPU time."""

    def __init__(self) -> None:
        self.taken = array("q")
        self.num_items = 0

    def add(self, since: int, items: int = 1) -> None:
        self.taken.append(time.thread_time_ns() - since)
        self.num_items += items

    @property
    def times(self) -> CallTimes:
        """Quantiles and means of the calls so far. At least one call is needed."""
        taken, count = sorted(self.taken), len(self.taken)
        whole_us = sum(taken) / 1e3
        p50, p99 = (percentile(taken, q) / 1e3 for q in (50, 99))
        each = whole_us / max(1, self.num_items)
        return CallTimes(count, p50, p99, whole_us / count, each, self.num_items)


@dataclass(frozen=True, slots=True)
class TableSize:
    """A router's table of blocks."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ScalerTurns:
    """The autoscaler's changes. `timeline`: (seconds, ready, starting, wanted)."""

    ups: int
    downs: int
    started: int
    timeline: list[tuple[float, int, int, int]]
    most_reversals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """Results of one simulation. Hits are fractions of all prompt tokens; `hit_share_bound`: those
    of a single unlimited cache for all replicas."""

    requests: int
    finished: int
    refused: int
    gateways: int
    copies: int
    prompt_tokens: int
    output_tokens: int
    simulated_s: float
    wall_s: float
    processor_s: float
    hit_share: float
    hit_share_bound: float
    hit_share_predicted: float
    ttft_s: Marks | None
    tpot_s: Marks | None
    waiting_requests: Marks | None
    queued_tokens: Marks | None
    most_work_over_mean: float
    busy: float
    replica_hours: float
    most_replicas: int
    most_at_gateway: int
    taken_out: int
    gateway_busy: float
    """Fraction of a core's time that this work takes at each gateway."""
    gateway: dict[str, CallTimes]
    table: list[TableSize]
    goodput: float | None
    """Fraction of requests that met the objectives; None without objectives."""
    scaler: ScalerTurns | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStudy:
    """A simulation of a fleet file: its inputs and its results."""

    model: str
    pool: str
    device: str
    workload: str
    rates: tuple[float, ...]
    replicas: int
    seed: int
    figures: FleetFigures


def most_reversals(wanted: Sequence[tuple[float, int]], window_s: float = WINDOW_S) -> int:
    """Maximum number of reversals (up to down, or down to up) within a window."""
    turns: list[float] = []
    before, direction = None, 0
    for at, number in wanted:
        if before is not None and number != before:
            now = 1 if number > before else -1
            if direction and now != direction:
                turns.append(at)
            direction = now
        before = number
    most = first = 0
    for i, at in enumerate(turns):
        while turns[first] < at - window_s:
            first += 1
        most = max(most, i - first + 1)
    return most
