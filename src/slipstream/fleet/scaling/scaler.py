"""The autoscaler of a running fleet: takes the gateway's counts and the members' states, and gives
the number of replicas wanted.

The head calls the `Scaler` of each scaled version every `LOOK_S`. Every `interval_s` the policy
decides (`fleet/scaling/autoscaler.py`). In between, the first request that waits for a version
without replicas starts one. The scaler reads no clock and starts nothing; the head does."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.fleet.config import Autoscale, Fleet, PoolSpec, ScalingObjectives, pools
from slipstream.fleet.scaling.autoscaler import Autoscaler, FleetObservation, ScalingLimits
from slipstream.fleet.scaling.capacity import SIZES, RecentCapacity
from slipstream.hub import resolve_model
from slipstream.server.http.record import RequestRecord
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.engines import plan_engine, this_hardware
from slipstream.simulate.traffic import Workload, of_lengths, parse_workload
from slipstream.spec.description import read_spec

logger = logging.getLogger("slipstream.fleet")

LOOK_S = 0.1
ATTAINMENT = 0.99
FIRST_COLD_START_S = 60.0
"""Assumed cold start until one was measured."""


class Tally:
    """Counts a version's requests at the gateway between calls of `take`. `learn` gets the lengths
    of finished answers."""

    def __init__(self) -> None:
        self.num_arrivals = self.num_finished = self.num_met = 0
        self.objectives: ScalingObjectives | None = None  # None: attainment is not counted
        self.learn: Callable[[int, int], None] = lambda input_tokens, output_tokens: None

    def arrived(self) -> None:
        self.num_arrivals += 1

    def ended(self, record: RequestRecord, seconds: float, *, failed: bool) -> None:
        """Count a finished request. `seconds` since its arrival. An answer that is not streamed has
        no TTFT: it meets the objectives if it took no longer than a stream that meets them."""
        self.num_finished += 1
        if failed or self.objectives is None:
            return
        ttft, itl = self.objectives.ttft_s, self.objectives.itl_s
        gaps = max(0, record.num_output_tokens - 1)
        if record.ttft_s is None:
            met = ttft is None or itl is None or seconds <= ttft + gaps * itl
        else:
            met = ttft is None or record.ttft_s <= ttft
            met = met and (itl is None or gaps == 0 or seconds - record.ttft_s <= gaps * itl)
        self.num_met += met
        if record.num_prompt_tokens and record.num_output_tokens:
            self.learn(record.num_prompt_tokens, record.num_output_tokens)

    def take(self) -> tuple[int, int, int]:
        """Takes (arrivals, ends, ends within the objectives) since the last call."""
        taken = self.num_arrivals, self.num_finished, self.num_met
        self.num_arrivals = self.num_finished = self.num_met = 0
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """Present state of a pool. `cold_start_s`: median of the latest starts; None before the first."""

    num_at_gateway: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_ready: int = 0
    num_starting: int = 0
    kv_cache_usage: float = 0.0
    cold_start_s: float | None = None

    @property
    def has_requests(self) -> bool:
        return self.num_at_gateway + self.num_running + self.num_waiting > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    at: float
    before: int
    wanted: int
    why: str

    def __str__(self) -> str:
        return f"{self.before} → {self.wanted}: {self.why}"


class Scaler:
    """Autoscaler of one version. The version has exactly one pool."""

    def __init__(
        self,
        spec: PoolSpec,
        settings: Autoscale,
        objectives: ScalingObjectives,
        capacity: RecentCapacity,
    ) -> None:
        self.spec, self.settings, self.objectives, self.capacity = (
            spec,
            settings,
            objectives,
            capacity,
        )
        self.policy = Autoscaler(
            capacity.replicas_for,
            limits=ScalingLimits(
                min_replicas=spec.least, max_replicas=spec.most, idle_s=settings.idle_s
            ),
            interval_s=settings.interval_s,
            cold_start_s=settings.cold_start_s or FIRST_COLD_START_S,
            hold_s=settings.hold_s,
            attainment=ATTAINMENT,
        )
        self.began: float | None = None
        self.wanted: int | None = None  # None before the first decision
        self.last: Change | None = None
        self.num_up = self.num_down = 0
        self.last_used = 0.0
        self.waits_since: float | None = None  # time since which it waits for memory
        self._next = 0.0

    def look(self, at: float, now: PoolState, tally: Tally) -> Change | None:
        """The change to make at `at` (seconds of any monotonic clock), or None. The head performs
        it and then calls `made`."""
        if self.began is None:
            self.began, self._next = at, at + self.settings.interval_s
            tally.take()  # earlier arrivals have no known interval
        here = now.num_ready + now.num_starting
        if at < self._next:
            if here == 0 and now.num_at_gateway:
                return Change(
                    at=at,
                    before=0,
                    wanted=max(1, self.spec.least),
                    why="a request waits at the gateway",
                )
            return None
        late = at - self._next  # the machine was busy, so the interval was longer
        interval_s = self.settings.interval_s + late
        self._next = at + self.settings.interval_s
        if self.settings.cold_start_s is None and now.cold_start_s is not None:
            self.policy.expect_cold_start(now.cold_start_s)
        arrivals, finished, met = tally.take()
        numbers = dataclasses.asdict(now)
        seen = FleetObservation(
            at=at,
            interval_s=interval_s,
            num_arrivals=arrivals,
            num_finished=finished,
            num_met=met,
            **numbers,
        )
        wanted = self.wanted = self.policy.decide(seen)
        if wanted == here:
            return None
        if wanted > here:
            rate = f"{self.policy.forecast.mean():.3g} requests/s forecast"
            why = f"{rate}, {now.num_at_gateway} at the gateway, {now.num_waiting} in queues"
        elif wanted == 0:
            why = f"no request for {self.settings.idle_s:g} s"
        else:
            why = f"fewer were enough for {self.settings.hold_s:g} s"
        return Change(at=at, before=here, wanted=wanted, why=why)

    def made(self, change: Change) -> None:
        self.wanted, self.last = change.wanted, change
        if change.wanted > change.before:
            self.num_up += 1
        else:
            self.num_down += 1
        logger.info("autoscaler: %s %s", self.spec.key, change)

    def status(self, now: PoolState, at: float) -> dict[str, Any]:
        """State for `slipstream fleet status`, /fleet/status and the status page."""
        last = self.last
        return {
            "model": self.spec.model,
            "version": self.spec.version,
            "min": self.spec.least,
            "max": self.spec.most,
            "wanted": self.wanted,
            "ready": now.num_ready,
            "starting": now.num_starting,
            "requests_per_s": round(self.policy.forecast.mean(), 4),
            "cold_start_s": round(self.policy.cold_start_s, 3),
            "ups": self.num_up,
            "downs": self.num_down,
            "last": None
            if last is None
            else {"ago_s": round(at - last.at, 1), "change": str(last)},
        }


class ScalerMetrics(Collector):
    """Metrics for the gateway. `told` gives `Scaler.status` by pool."""

    def __init__(self, told: Callable[[], dict[str, dict[str, Any]]]) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        told = self._told()
        if not told:
            return
        labels = ["model_name", "version"]
        changes = CounterMetricFamily(
            "slipstream:autoscale_changes", "Changes made", labels=[*labels, "direction"]
        )
        replicas = GaugeMetricFamily(
            "slipstream:autoscale_replicas", "Replicas by state", labels=[*labels, "state"]
        )
        for one in told.values():
            of = [one["model"], one["version"]]
            changes.add_metric([*of, "up"], one["ups"])
            changes.add_metric([*of, "down"], one["downs"])
            for state in ("wanted", "ready", "starting"):
                if one[state] is not None:
                    replicas.add_metric([*of, state], one[state])
        yield changes
        yield replicas


def autoscaled(fleet: Fleet) -> dict[str, tuple[PoolSpec, Autoscale, ScalingObjectives]]:
    """The scaled pools. Each is the only pool of its version (`config.check` ensures it)."""
    found = {}
    for spec in pools(fleet):
        settings = fleet.models[spec.model].autoscale
        if settings is not None and spec.is_scaled:
            found[spec.key] = (spec, settings, settings.objectives or fleet.objectives)
    return found


def make(spec: PoolSpec, settings: Autoscale, objectives: ScalingObjectives) -> Scaler:
    """Make a scaler. This simulates for seconds, so call it in a thread. ConfigError names the
    field if the model can't be planned, or if even a single request misses the objectives."""
    where = f"models.{spec.model}.autoscale"
    limits = {"ttft_s": objectives.ttft_s, "tpot_s": objectives.itl_s}
    wanted = LatencyObjectives(
        limits={k: v for k, v in limits.items() if v is not None}, attainment=ATTAINMENT
    )
    args = spec.args
    try:
        description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
        named = settings.device
        hardware = (
            this_hardware(args.device, args.num_threads) if named is None else find_device(named)
        )
        engine = plan_engine(args, description, hardware).simulated
        sizes = tuple(n for n in SIZES if n <= max(2, spec.most))
        capacity = RecentCapacity(engine, _expected(engine.max_model_len), wanted, sizes=sizes)
    except ConfigError as error:
        field = f"{where}.objectives" if error.field == "slo" else where
        raise ConfigError(f"{field}: {error.message}", field=field) from None
    return Scaler(spec, settings, objectives, capacity)


def _expected(max_model_len: int) -> Workload:
    """Initial workload, until users' lengths are known: ShareGPT's lengths, cut to the context."""
    most = max(1, max_model_len // 2)
    lengths = [
        (min(r.input_tokens, most), min(r.output_tokens, most))
        for r in parse_workload("sharegpt").requests
    ]
    return of_lengths("sharegpt", lengths)


class ColdStarts:
    """Times of the latest starts of each pool."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def add(self, pool: str, seconds: float) -> None:
        self._seconds.setdefault(pool, deque(maxlen=5)).append(seconds)

    def median(self, pool: str) -> float | None:
        found = sorted(self._seconds.get(pool, ()))
        return found[len(found) // 2] if found else None
