"""The three probes and the metrics route.

/live    200 while the event loop runs; restart the server when it does not answer
/ready   200 when new requests are welcome; 503 while the server drains, sleeps or has no engine
/health  200 when the engine answers and, if requests wait, steps; 503 with the reason otherwise;
         with the result of the checkpoint's canary at the start, if it has one
"""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from slipstream.errors import EngineError
from slipstream.messages.stats import EngineStats
from slipstream.server.http.errors import ApiError, shutting_down, unavailable
from slipstream.server.http.replies import json_response
from slipstream.server.operations.metrics import Metrics
from slipstream.server.state import ServerState

_STATS_TIMEOUT_S = 2.0  # a scrape must not hang with the engine


class Probes:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def live(self, request: Request) -> Response:
        return _ok("alive")

    async def ready(self, request: Request) -> Response:
        require_ready(self.state)
        return _ok("ready")

    async def health(self, request: Request) -> Response:
        _require_health(self.state)
        canary = self.state.engine.canary
        return _ok("healthy") if canary is None else _ok("healthy", canary=canary)

    async def metrics(self, request: Request) -> Response:
        stats, metrics = await engine_stats(self.state), await all_metrics(self.state)
        return Response(metrics.render(stats), headers={"content-type": CONTENT_TYPE_LATEST})


def canary_ok(state: ServerState) -> bool | None:
    """Whether the model's outputs are right, by the checkpoint's canary at the start and the checks
    since. None: there were none."""
    canary = state.engine.canary
    found = [canary and canary.ok, *(check.ok for check in state.checks)]
    known = [ok for ok in found if ok is not None]
    return all(known) if known else None


def require_ready(state: ServerState) -> None:
    """Raise ApiError (503) if new requests are refused."""
    if state.draining:
        raise shutting_down()
    if state.engine.is_sleeping:
        raise unavailable("the model sleeps; POST /wake_up wakes it", "engine_asleep")
    _require_health(state)


def is_ready(state: ServerState) -> bool:
    """Whether new requests are accepted."""
    try:
        require_ready(state)
        return True
    except ApiError:
        return False


def _require_health(state: ServerState) -> None:
    health = state.engine.health()
    if not health.ok:
        raise unavailable(f"the engine is not healthy: {health.reason}", "engine_unhealthy")


async def engine_stats(state: ServerState) -> EngineStats | None:
    """The engine's current numbers; None if it is down or hangs."""
    try:
        # not `wait_for`: before Python 3.12 it hides a cancellation that comes with the result
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            return await state.engine.stats()
    except (EngineError, TimeoutError):
        return None


async def all_metrics(state: ServerState) -> Metrics:
    """The sum of all front ends' counts. ApiError (503) if one does not answer."""
    metrics = state.metrics
    if state.totals is not None:
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                found = await state.totals(metrics.counts())
        except TimeoutError:  # a sum without the others would decrease
            raise unavailable(
                "another front end did not send its counts", "metrics_unavailable"
            ) from None
        own, metrics = metrics, Metrics(metrics.model_name)
        metrics.more = own.more
        for counts in found:
            metrics.add(counts)
    if state.watch is not None:
        metrics.findings = Counter(
            (metrics.model_name, f["cause"]) for f in state.watch.findings if f["ended"] is None
        )
    return metrics


def _ok(status: str, **more: object) -> Response:
    return json_response({"status": status, **more})
