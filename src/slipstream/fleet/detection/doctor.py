"""`slipstream doctor --fleet`: watches running servers for a while, and reports what is wrong with
them.

1. Findings of a server's own detector (/status.json), if it has one.
2. Faults that are visible within a minute, without knowing what is usual: a server that does not
   answer, an engine that is down or stuck, a failed canary, errors, waiting requests, lost blocks,
   clients that do not read.
3. With three servers or more: a server whose steps take much longer than the others'.

Series that need an hour of history (`signals.py`) are only seen by a server with --detect."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from slipstream.errors import ConfigError
from slipstream.fleet.detection.causes import CAUSES
from slipstream.fleet.detection.counters import Counters, of_metrics
from slipstream.fleet.detection.observation import Observation

SLOWER = 1.5
"""Steps count as slow if they take at least this many times the median of the servers."""

FEW_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """One fault. `cause` is a name in `causes.py`, or `unreachable`. `source`: the server's own
    detector, or this command's examination."""

    url: str
    cause: str
    text: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A server's report. `error`: why it could not be read. `findings`: None if the server has no detector."""

    url: str
    error: str | None = None
    counters: Counters | None = None
    findings: Sequence[dict[str, Any]] | None = None
    models: tuple[str, ...] = ()
    canary_ok: bool | None = None


def visit(client: httpx.Client, url: str) -> Visit:
    try:
        scrape = client.get(f"{url}/metrics")
        if scrape.status_code in (401, 403):
            return Visit(url=url, error="it asks for a key: --api-key-file")
        scrape.raise_for_status()
        counters = of_metrics(scrape.text, at=time.monotonic())
        told = client.get(f"{url}/status.json").raise_for_status().json()
        return Visit(
            url=url,
            counters=counters,
            findings=told["findings"],
            models=tuple(told["models"]),
            canary_ok=next(
                (r["canary_ok"] for r in told["replicas"] if r.get("canary_ok") is not None), None
            ),
        )
    except (httpx.HTTPError, ConfigError, ValueError, KeyError, TypeError) as error:
        return Visit(url=url, error=f"{type(error).__name__}: {error}")


def examine(
    urls: Sequence[str], seconds: float, api_key: str | None
) -> tuple[list[Visit], list[Complaint]]:
    """Examine all servers twice, `seconds` apart. Returns (the last reports, the faults)."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(timeout=10.0, headers=headers, trust_env=False) as client:
        first = [visit(client, url) for url in urls]
        time.sleep(seconds)
        last = [visit(client, url) for url in urls]
    complaints = []
    seen: dict[str, Observation] = {}
    for before, now in zip(first, last, strict=True):
        if now.counters is None:
            text = f"nothing can be read: {now.error}"
            remedy = "see whether the server runs and the address is right"
            complaints.append(
                Complaint(url=now.url, cause="unreachable", text=text, remedy=remedy, source="now")
            )
            continue
        complaints += [
            as_complaint(now.url, finding)
            for finding in now.findings or ()
            if finding.get("ended") is None
        ]
        found = None if before.counters is None else now.counters.since(before.counters, now.url)
        if found is not None:
            seen[now.url] = found
            complaints += [_of(now.url, cause, text) for cause, text in wrong(found)]
        if now.canary_ok is False:
            complaints.append(
                _of(
                    now.url,
                    "quality_drift",
                    "the model's answers are off: the canary at the start failed, or a check since",
                )
            )
    complaints += [_of(url, "throttled_clock", text) for url, text in slow_among(seen)]
    return last, complaints


def as_complaint(url: str, finding: dict[str, Any]) -> Complaint:
    text = f"{finding['title']} ({'; '.join(finding['evidence'])})"
    return Complaint(
        url=url, cause=finding["cause"], text=text, remedy=finding["remedy"], source="detector"
    )


def wrong(seen: Observation) -> list[tuple[str, str]]:
    """(cause, description) of each fault that one observation shows. A pure function."""
    if not seen.is_up:
        return [("engine_down", "the engine does not answer")]
    found = []
    waiting, running, finished = (
        seen.num_waiting or 0.0,
        seen.num_running or 0.0,
        seen.num_finished or 0.0,
    )
    if (waiting or running) and (seen.step_age_s or 0.0) > 30 and not seen.num_steps:
        found.append(
            (
                "stuck_engine",
                f"no step ended for {seen.step_age_s:.0f} s, and {waiting + running:.0f} sequences wait",
            )
        )
    if (
        seen.num_errors
        and seen.num_responses
        and seen.num_errors >= max(2.0, 0.01 * seen.num_responses)
    ):
        found.append(
            (
                "failing_requests",
                f"{seen.num_errors:.0f} of {seen.num_responses:.0f} requests ended with errors",
            )
        )
    if seen.num_preemptions and seen.num_preemptions >= max(2.0, 0.05 * finished):
        found.append(
            (
                "cache_thrash",
                f"{seen.num_preemptions:.0f} sequences lost their blocks, {finished:.0f} ended",
            )
        )
    if waiting > max(4.0, running):
        found.append(("overload", f"{waiting:.0f} wait while {running:.0f} run"))
    if (seen.write_stall_s or 0.0) > 0.5 * seen.interval_s:
        found.append(
            (
                "slow_client",
                f"text waited for clients for {seen.write_stall_s:.1f} s of {seen.interval_s:.0f}",
            )
        )
    return found


def slow_among(seen: dict[str, Observation]) -> list[tuple[str, str]]:
    """(server, description) of servers with much slower steps than the others, among three or more
    under load. A pure function."""
    times = {
        url: o.step_s / o.num_steps
        for url, o in seen.items()
        if o.step_s and o.num_steps and o.num_steps >= FEW_STEPS
    }
    if len(times) < 3:
        return []
    usual = statistics.median(times.values())
    return [
        (
            url,
            f"a step takes {1e3 * time_s:.1f} ms, {time_s / usual:.1f} times the median of {len(times)} servers",
        )
        for url, time_s in times.items()
        if time_s > SLOWER * usual
    ]


def _of(url: str, cause: str, text: str) -> Complaint:
    return Complaint(url=url, cause=cause, text=text, remedy=CAUSES[cause].remedy, source="now")
