"""Metrics of all engines of a fleet, by model, for the gateway's /metrics.

Totals count from the fleet's start and include replicas that are gone, because a total that
decreases would look like a restart. Other metrics cover the present replicas: sums of counts, means
of shares and rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.messages.stats import EngineStats
from slipstream.server.operations.metrics import TOTALS

if TYPE_CHECKING:
    from slipstream.fleet.gateway.forward import Forwarder
    from slipstream.fleet.gateway.members import Members

_MEANS = frozenset(
    {
        "kv_cache_usage",
        "host_bytes_per_s",
        "disk_bytes_per_s",
        "prefill_tokens_per_s",
        "rank_imbalance",
    }
)
_MOST = frozenset({"last_step_age_s", "uptime_s", "block_size"})
_NAMES = frozenset({"names_on_device", "waiting_adapters"})


def of_engines(members: Members) -> dict[str, EngineStats | None]:
    """Metrics by model; None if no replica reports."""
    found: dict[str, EngineStats | None] = {}
    for name, versions in members.models.items():
        replicas = [r for v in versions for r in v.replicas.values() if r.load is not None]
        there = [r.load.stats for r in replicas if r.load is not None and r.load.stats is not None]
        is_heard = any(r.heard for r in replicas)
        gone = members.gone.get(name)
        found[name] = summed(there, [] if gone is None else [gone]) if there and is_heard else None
    return found


def summed(there: Sequence[EngineStats], gone: Sequence[EngineStats] = ()) -> EngineStats:
    """Combined metrics of the running engines `there`, plus the totals of those that ended (`gone`). At
    least one engine is required."""
    found: EngineStats = _sum([*there], [*gone])
    return found


def _sum(there: list[Any], gone: list[Any]) -> Any:
    made = {}
    for field in dataclasses.fields((there or gone)[0]):
        now = [value for part in there if (value := getattr(part, field.name)) is not None]
        before = [value for part in gone if (value := getattr(part, field.name)) is not None]
        made[field.name] = _joined(field.name, now, before)
    return type((there or gone)[0])(**made)


def _joined(name: str, now: list[Any], gone: list[Any]) -> Any:
    first = next(iter((*now, *gone)), None)
    if first is None or dataclasses.is_dataclass(first):
        return None if first is None else _sum(now, gone)
    if name == "expert_load":
        by_layer: dict[int, list[int]] = {}
        for layer, counts in (one for load in (*now, *gone) for one in load):
            by_layer[layer] = [
                a + b for a, b in zip_longest(by_layer.get(layer, ()), counts, fillvalue=0)
            ]
        return tuple((layer, tuple(counts)) for layer, counts in sorted(by_layer.items()))
    if name in _NAMES:
        return tuple(dict.fromkeys(one for names in now for one in names))
    if isinstance(first, tuple):
        return tuple(map(sum, zip_longest(*now, *gone, fillvalue=0)))
    if isinstance(first, bool):
        return bool(now) and all(now)
    if isinstance(first, str):
        return first if {*now} == {first} else ""
    if name in _MEANS:
        return sum(now) / len(now) if now else 0.0
    if name in _MOST:
        return max(now, default=0)
    return sum(now) + (sum(gone) if name in TOTALS else 0)


class FleetMetrics(Collector):
    """Replicas by state, and the forwarder's counters."""

    def __init__(self, members: Members, forwarder: Forwarder) -> None:
        self._members, self._forwarder = members, forwarder

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily(
            "slipstream:fleet_replicas", "Replicas by state", labels=["model_name", "state"]
        )
        for name, versions in self._members.models.items():
            states = [
                version.state_of(replica)
                for version in versions
                for replica in version.replicas.values()
            ]
            for state in ("serving", "draining", "silent", "out"):
                replicas.add_metric([name, state], states.count(state))
        yield replicas
        events = CounterMetricFamily(
            "slipstream:fleet_events", "What became of requests at the gateway", labels=["event"]
        )
        for event, number in self._forwarder.counts.items():
            events.add_metric([event], number)
        yield events
