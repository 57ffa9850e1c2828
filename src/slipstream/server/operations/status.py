"""The pages /status and /chat, without external resources; /status.json, the first page's data;
/findings.

The pages hold no data of the server, so they need no key; their requests do
(`server/http/auth.py`). A fleet's gateway answers /status.json in the same shape, with all of its
replicas.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream import __version__
from slipstream.base.html import head
from slipstream.messages.stats import EngineStats
from slipstream.server.http.errors import ApiError
from slipstream.server.http.replies import json_response
from slipstream.server.operations.health import all_metrics, canary_ok, engine_stats
from slipstream.server.operations.looks import VersionCheck
from slipstream.server.operations.metrics import Histogram, Metrics
from slipstream.server.state import ServerState

_PAGES = Path(__file__).parent / "pages"
_INCLUDE = re.compile(r"<!--include (\S+)-->")
"""Comment in a page that is replaced by a file's style or script."""


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """State of a replica. Totals count from its start; None: unknown."""

    name: str
    state: str  # ready, draining, sleeping, paused, down; a gateway's also starting
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    num_preemptions: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    uptime_s: float | None = None
    canary_ok: bool | None = None  # includes the server's idle checks
    checks: dict[str, list[VersionCheck]] = {}  # results of these checks, by name


class Latency(msgspec.Struct, kw_only=True):
    """A histogram: upper bounds in seconds, the count of each, and the count above them."""

    bounds: list[float]
    counts: list[int]

    @classmethod
    def of(cls, histogram: Histogram) -> Latency:
        return cls(bounds=list(histogram.bounds), counts=list(histogram.counts))


class ServerStatus(msgspec.Struct, kw_only=True):
    """The answer of /status.json.

    `findings` is None without a detector. `responses` counts by status, from the start. `autoscale`
    is a gateway's, by pool, if its replicas are scaled automatically. `past`: with ?past=1, the
    statuses that `StatusMemory` holds.
    """

    version: str
    time: float
    models: list[str]
    num_in_flight: int  # requests
    replicas: list[ReplicaStatus]
    latency: dict[str, Latency]
    responses: dict[str, int]
    findings: list[dict[str, Any]] | None
    autoscale: dict[str, dict[str, Any]] | None = None
    past: list[ServerStatus] | None = None


def replica_status(name: str, state: str, stats: EngineStats | None, **more: Any) -> ReplicaStatus:
    """The status of a replica from its engine's numbers; None: it is down."""
    if stats is None:
        return ReplicaStatus(name=name, state="down", **more)
    return ReplicaStatus(
        name=name,
        state=state,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_cache_usage=stats.kv_cache_usage,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        num_preemptions=stats.num_preemptions,
        prompt_tokens=stats.prompt_tokens_total,
        generated_tokens=stats.generation_tokens_total,
        uptime_s=stats.uptime_s,
        **more,
    )


def shared_fields(state: ServerState, metrics: Metrics, *, itl: Histogram) -> dict[str, Any]:
    """The fields of a ServerStatus common to servers and gateways. `itl`: times between tokens."""
    responses: dict[str, int] = {}
    for (_, _, status), count in metrics.responses.items():
        responses[str(status)] = responses.get(str(status), 0) + count
    latency = {"ttft_s": metrics.ttft, "itl_s": itl, "e2e_s": metrics.e2e}
    return {
        "version": __version__,
        "time": time.time(),
        "latency": {name: Latency.of(histogram) for name, histogram in latency.items()},
        "responses": responses,
        "findings": None if state.watch is None else state.watch.findings,
    }


async def server_status(state: ServerState) -> ServerStatus:
    """The status of a server with one engine."""
    stats, metrics = await engine_stats(state), await all_metrics(state)
    if state.draining:
        doing = "draining"
    elif state.engine.is_sleeping:
        doing = "sleeping"
    else:
        doing = "ready" if state.engine.health().ok else "down"
        if doing == "ready" and stats is not None and stats.is_paused:
            doing = "paused"
    more = {
        "canary_ok": canary_ok(state),
        "checks": {check.name: check.report() for check in state.checks},
    }
    return ServerStatus(
        models=[*state.model_names, *state.engine.adapters],
        num_in_flight=state.load.num_requests,
        replicas=[replica_status(state.model_names[0], doing, stats, **more)],
        **shared_fields(state, metrics, itl=metrics.itl),
    )


@cache
def page(name: str) -> bytes:
    """The HTML of `status` or `chat`: one file that may send requests only to its own server."""
    text = (_PAGES / f"{name}.html").read_text(encoding="utf-8")
    text = _INCLUDE.sub(lambda found: (_PAGES / found[1]).read_text(encoding="utf-8"), text)
    return (head(scripts=True, connect=True) + text).encode()


def page_route(name: str) -> Route:
    async def show(request: Request) -> Response:
        return Response(page(name), media_type="text/html", headers={"cache-control": "no-cache"})

    return Route(f"/{name}", show)


ReadStatus = Callable[[], Coroutine[Any, Any, ServerStatus]]


class StatusMemory:
    """Reads the status every EVERY_S seconds and stores the last five minutes, so that /status can
    show them when opened. The server runs it (`ServerState.background`)."""

    EVERY_S = 5.0

    def __init__(self, read: ReadStatus) -> None:
        self._read = read
        self._past: deque[ServerStatus] = deque(maxlen=int(300 / self.EVERY_S))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.EVERY_S)
            with suppress(ApiError):  # another front end does not answer, so there is no status now
                now = await self._read()
                for replica in now.replicas:
                    replica.checks = {}  # checks have their own history
                self._past.append(now)

    async def answer(self, *, with_past: bool) -> ServerStatus:
        """The answer of /status.json."""
        now = await self._read()
        if with_past:
            now.past = list(self._past)
        return now

    def route(self) -> Route:
        async def show(request: Request) -> Response:
            past = request.query_params.get("past") == "1"
            return json_response(await self.answer(with_past=past))

        return Route("/status.json", show)


class StatusRoutes:
    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._memory = StatusMemory(lambda: server_status(state))
        state.background.append(self._memory.run)

    async def findings(self, request: Request) -> Response:
        if self.state.watch is None:
            raise ApiError(
                404, "this server has no detector; start it with --detect", code="no_detector"
            )
        return json_response({"findings": self.state.watch.findings})

    def routes(self) -> list[Route]:
        return [
            page_route("status"),
            page_route("chat"),
            self._memory.route(),
            Route("/findings", self.findings),
        ]
