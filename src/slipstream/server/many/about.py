"""Routes about the models of a server: lists, states, metrics, loading, fetching, removing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.errors import DownloadError, SlipstreamError
from slipstream.hub import FetchOptions, local_path
from slipstream.hub.listing import CachedModel, find_models, remove_model
from slipstream.messages.stats import EngineStats
from slipstream.server.answers.generation import encode
from slipstream.server.http.auth import check_model
from slipstream.server.http.decoding import register
from slipstream.server.http.errors import ApiError, bad_request, shutting_down
from slipstream.server.http.limits import counted, in_flight, read_as
from slipstream.server.http.replies import json_response, utc_time
from slipstream.server.many.slot import Slot
from slipstream.server.many.slots import ModelSlots
from slipstream.server.ollama.routes import model_entry
from slipstream.server.openai.models import anthropic_card, anthropic_list, require_model
from slipstream.server.operations.health import engine_stats
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.status import (
    ReplicaStatus,
    ServerStatus,
    StatusMemory,
    page_route,
    replica_status,
    shared_fields,
)
from slipstream.server.state import ServerState

_YEARS_S = 100 * 365.25 * 86400
"""Expiry that Ollama reports for a model that stays for ever, in seconds."""

_LOCAL = ("127.0.0.1", "localhost", "::1")
_SHOWN = {"loaded": "ready", "loading": "starting", "unloading": "draining", "asleep": "sleeping"}


class ModelBody(Struct, kw_only=True):
    """A model, by Ollama's or llama.cpp's field"""

    model: str = ""
    name: str = ""
    stream: bool = True

    @property
    def given(self) -> str:
        if not (found := self.model or self.name):
            raise bad_request("model is missing", "model")
        return found


register(ModelBody)


class About:
    def __init__(self, state: ServerState, slots: ModelSlots) -> None:
        self.state, self.slots = state, slots
        self._fetching = FairThreads("fetching", 2, per_client=1)
        self._removing = FairThreads("removing", 1, per_client=1)
        self._memory = StatusMemory(self.status)
        state.metrics.more.append(self._families)
        state.background.append(self._memory.run)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list),
            Route("/models", self.list),
            Route("/models/load", counted(self.state, self.load), methods=["POST"]),
            Route("/models/unload", self.unload, methods=["POST"]),
            Route("/v1/models/{id:path}", self.get),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.ps),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
            Route("/metrics", self.metrics),
            page_route("status"),
            page_route("chat"),
            self._memory.route(),
            Route("/findings", self.findings),
        ]

    def _slot(self, name: str) -> Slot:
        if (slot := self.slots.find(name)) is None:
            require_model(self.state, name)
            raise AssertionError("a name that is served has a slot")
        return slot

    # --- OpenAI, Anthropic, llama.cpp ---------------------------------------------------

    async def list(self, request: Request) -> Response:
        slots = self.slots.slots.values()
        if "anthropic-version" in request.headers:
            return json_response(anthropic_list([*map(self._anthropic_card, slots)]))
        return json_response({"object": "list", "data": [*map(self._card, slots)]})

    async def get(self, request: Request) -> Response:
        slot = self._slot(request.path_params["id"])
        is_anthropic = "anthropic-version" in request.headers
        return json_response((self._anthropic_card if is_anthropic else self._card)(slot))

    def _anthropic_card(self, slot: Slot) -> dict[str, Any]:
        return anthropic_card(slot.name, self.state.created, _context(slot))

    def _card(self, slot: Slot) -> dict[str, Any]:
        slot.note_death()
        value = "unloaded" if slot.state == "asleep" else slot.state  # clients wait for this value
        return {
            "id": slot.name,
            "object": "model",
            "created": self.state.created,
            "owned_by": "slipstream",
            "max_model_len": _context(slot),
            "vocab_size": slot.model.description.spec.vocab_size,
            "status": {
                "value": value,
                "failed": bool(slot.failure),
            },  # as llama.cpp's router has it
        }

    async def load(self, request: Request) -> Response:
        body = await read_as(ModelBody, request, self.state)
        slot, record = self._slot(body.given), request.scope["record"]
        check_model(record.key, slot.name)
        async with in_flight(self.state, request.receive, record):
            await self.slots.acquire(slot)
        self.slots.release(slot)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        body = await read_as(ModelBody, request, self.state)
        slot = self._slot(body.given)
        check_model(request.scope["record"].key, slot.name)
        await self.slots.unload(slot)
        return json_response({"success": True})

    # --- Ollama -------------------------------------------------------------------------

    @staticmethod
    def unloaded(name: str, path: str) -> Response:
        """Ollama's answer to a body without a prompt and `keep_alive` 0."""
        empty: dict[str, Any] = (
            {"message": {"role": "assistant", "content": ""}}
            if path == "/api/chat"
            else {"response": ""}
        )
        about = {"model": name, "created_at": utc_time(time.time())}
        return json_response({**about, **empty, "done": True, "done_reason": "unload"})

    async def tags(self, request: Request) -> Response:
        return json_response({"models": [*map(self._entry, self.slots.slots.values())]})

    async def ps(self, request: Request) -> Response:
        found, now, mono = [], time.time(), time.monotonic()
        for slot in self.slots.slots.values():
            slot.note_death()
            if slot.state != "loaded" or slot.engine is None:
                continue
            left = slot.keep_alive_s if slot.expires_at is None else slot.expires_at - mono
            on_gpu = slot.engine.config.device.info.is_cuda
            own = {
                "size": slot.held_bytes,
                "size_vram": slot.held_bytes if on_gpu else 0,
                "expires_at": utc_time(now + min(left, _YEARS_S)),
                "context_length": _context(slot),
            }
            found.append(self._entry(slot) | own)
        return json_response({"models": found})

    def _entry(self, slot: Slot) -> dict[str, Any]:
        return model_entry(slot.name, slot.model.description, self.state.created)

    async def pull(self, request: Request) -> Response:
        body = await read_as(ModelBody, request, self.state)
        self._may_change()
        if local_path(body.given) is not None:
            raise bad_request(
                f"{body.given!r} is a path of the server's machine; serve it by the command line",
                "model",
            )
        lines = self._pulled(body.given)
        if body.stream:
            return StreamingResponse(_as_lines(lines), media_type="application/x-ndjson")
        return json_response([line async for line in lines][-1])

    async def _pulled(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Fetch a model and serve it. Yields Ollama's objects about the progress."""
        yield {"status": "pulling manifest"}
        if self.slots.find(name) is None:
            sizes = [0, 0]

            def note(done: int, total: int) -> None:
                sizes[:] = done, total

            fetch = partial(self.slots.describe, name, name, FetchOptions(progress=note))
            work = asyncio.ensure_future(self._fetching.run(fetch))
            try:
                told = None
                while not (await asyncio.wait([work], timeout=0.2))[0]:
                    if self.state.draining:
                        raise shutting_down()
                    if sizes[1] and told != sizes:
                        told = list(sizes)
                        about = {"status": f"pulling {name}", "digest": "", "completed": told[0]}
                        yield {**about, "total": told[1]}
                model = await work
            except DownloadError as error:
                raise ApiError(404, error.message, param="model", code="model_not_found") from None
            self.slots.add(model)
            self._names_changed()
        yield {"status": "success"}

    async def delete(self, request: Request) -> Response:
        """Remove a model from the server and from the machine's cache. 400 for a model served from
        a path, or whose files other served models use."""
        body = await read_as(ModelBody, request, self.state)
        self._may_change()
        slot = self._slot(body.given)
        model, folder = slot.model.args.model, slot.model.args.download_dir
        if local_path(model) is not None:
            raise bad_request(
                f"{slot.name!r} is served from a path of the server's machine; remove the files there",
                "model",
            )
        await self.slots.remove(slot)
        self._names_changed()

        others = [other.model.args.model for other in self.slots.slots.values()]

        def remove() -> None:
            needed = {found.path for other in others for found in _cached(other, folder)}
            for found in _cached(model, folder):
                if found.path not in needed:
                    remove_model(found, folder)

        try:
            await self._removing.run(remove)
        except DownloadError as error:  # it is being fetched, or must not be removed
            raise ApiError(409, error.message, param="model", code="model_in_use") from None
        return Response()

    def _may_change(self) -> None:
        """ApiError (403) on a server without keys that others can reach: from other machines, or
        through web pages in this machine's browser. The role was checked by `auth`."""
        settings = self.state.settings
        is_open = (
            settings.host not in _LOCAL
            or "*" in settings.allowed_hosts
            or not {"*", "localhost"}.isdisjoint(settings.cors_origins)
        )
        if not self.state.keys and is_open:
            raise ApiError(
                403,
                "models are fetched and removed only with an admin's key (--keys-file) where others reach the server",
                kind="permission_error",
                code="permission_denied",
            )

    def _names_changed(self) -> None:
        names = tuple(self.slots.slots) or ("none",)
        self.state.settings = dataclasses.replace(self.state.settings, served_model_names=names)

    # --- Operations ---------------------------------------------------------------------

    async def _stats(self) -> dict[str, EngineStats | None]:
        """Statistics of each loaded engine; None for one that does not answer."""
        up = [slot for slot in self.slots.slots.values() if slot.is_up and slot.server_state]
        found = await asyncio.gather(*(engine_stats(s.server_state) for s in up if s.server_state))
        return {slot.name: stats for slot, stats in zip(up, found, strict=True)}

    def _counts(self) -> dict[str, Metrics]:
        slots = self.slots.slots.values()
        return {s.name: s.server_state.metrics for s in slots if s.server_state is not None}

    async def metrics(self, request: Request) -> Response:
        metrics, stats = self.state.metrics, await self._stats()
        metrics.by_model = self._counts()
        return Response(metrics.render_all(stats), headers={"content-type": CONTENT_TYPE_LATEST})

    def _families(self) -> Iterator[Metric]:
        slots = [*self.slots.slots.values()]
        label = ["model_name"]
        state = GaugeMetricFamily(
            "slipstream:model_state",
            "1 for the state that the model is in",
            labels=[*label, "state"],
        )
        memory = GaugeMetricFamily("slipstream:model_memory_bytes", "Memory held", labels=label)
        waiting = GaugeMetricFamily(
            "slipstream:model_requests_waiting", "Requests that wait for the model", labels=label
        )
        counts = (
            ("model_loads", "Times the model was loaded", "num_loads"),
            ("model_unloads", "Times it was unloaded", "num_unloads"),
            ("model_load_failures", "Loads that failed", "num_failures"),
            ("model_load_seconds", "Time of the loads", "load_s"),
        )
        for slot in slots:
            slot.note_death()
            for name in ("unloaded", "loading", "loaded", "unloading", "asleep"):
                state.add_metric([slot.name, name], float(slot.state == name))
            memory.add_metric([slot.name], slot.held_bytes)
            waiting.add_metric([slot.name], len(slot.waiters))
        yield from (state, memory, waiting)
        for name, text, field in counts:
            family = CounterMetricFamily(f"slipstream:{name}", text, labels=label)
            for slot in slots:
                family.add_metric([slot.name], getattr(slot, field))
            yield family
        text = "Memory for all models (--models-memory)"
        yield GaugeMetricFamily(
            "slipstream:models_memory_limit_bytes", text, self.slots.memory_bytes
        )
        text = "Requests that waited longer than --models-wait"
        yield CounterMetricFamily("slipstream:model_wait_timeouts", text, self.slots.num_timeouts)

    async def status(self) -> ServerStatus:
        stats, sums = await self._stats(), Metrics("")
        for own in self._counts().values():
            sums.add(own.counts())
        sums.responses = self.state.metrics.responses
        slots = self.slots.slots.values()
        replicas = [
            replica_status(slot.name, "ready", stats[slot.name])
            if slot.name in stats
            else ReplicaStatus(name=slot.name, state=_SHOWN.get(slot.state, slot.state))
            for slot in slots
        ]
        return ServerStatus(
            models=[slot.name for slot in slots],
            num_in_flight=self.state.load.num_requests,
            replicas=replicas,
            **shared_fields(self.state, sums, itl=sums.itl),
        )

    async def findings(self, request: Request) -> Response:
        raise ApiError(404, "a server of several models has no detector", code="no_detector")


def _cached(name: str, folder: str | None) -> list[CachedModel]:
    try:
        return find_models(name, folder)
    except DownloadError:  # served from a path, or already gone
        return []


async def _as_lines(lines: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Stream of JSON lines; an error comes as the last one."""
    try:
        async for line in lines:
            yield encode(line) + b"\n"
    except (ApiError, SlipstreamError) as error:
        yield encode({"error": error.message}) + b"\n"


def _context(slot: Slot) -> int:
    """The model's maximum context: the engine's, if it was loaded once."""
    return (
        slot.model.max_model_len if slot.engine is None else slot.engine.config.model.max_model_len
    )
