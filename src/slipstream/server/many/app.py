"""The application of a server with several models.

A route that uses a model exists once here, as a `Dispatch`, and once for each model, over that
model's engine. `Dispatch` reads the model's name, loads the model through `ModelSlots`, and passes
the request to the model's route. From there on it is handled as in a server with one model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from slipstream.engine.process.core_operations import Health
from slipstream.errors import EngineDeadError
from slipstream.params.lora_request import LoRARequest
from slipstream.server.app import make_app, make_state, model_routes
from slipstream.server.http.auth import check_model, forbidden
from slipstream.server.http.errors import bad_request, shutting_down
from slipstream.server.http.limits import in_flight, limited, own_receive, read_body
from slipstream.server.http.record import Observers, RequestRecord
from slipstream.server.many.about import About
from slipstream.server.many.asked import Asked, named_in_form
from slipstream.server.many.slot import Slot
from slipstream.server.many.slots import ModelSlots
from slipstream.server.openai.audio import TRANSCRIPTIONS, TRANSLATIONS
from slipstream.server.openai.models import require_model
from slipstream.server.operations.metrics import Metrics
from slipstream.server.state import EngineProtocol, ServerSettings, ServerState, ShortenerProtocol

LOAD_HEADER = b"x-slipstream-model-load-ms"
"""Header of an answer that waited for its model to load: milliseconds waited."""

MAX_TRIES = 3
"""Maximum number of engines tried for a request, if each dies before it answers."""

_NEEDS_NO_ENGINE = frozenset(
    {
        *("/tokenize", "/detokenize", "/apply-template", "/props", "/slots", "/api/show"),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/responses/input_tokens"),
        *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        *("/v1/chat/completions/render", "/v1/completions/render"),
    }
)
"""Routes that a sleeping model answers, if it was loaded once."""


class ManyEngines:
    """Engine interface for the server's own routes, if each model has its own engine."""

    canary = None
    is_sleeping = False

    def __init__(self, slots: ModelSlots) -> None:
        self.slots = slots
        self.adapters: dict[str, LoRARequest] = {}

    @property
    def model_name(self) -> str:
        return next(iter(self.slots.slots), "")

    @property
    def num_requests(self) -> int:
        return sum(slot.users + len(slot.waiters) for slot in self.slots.slots.values())

    def health(self) -> Health:
        return Health(True)  # a model that can't be loaded is an error only for its requests

    async def shutdown(self, drain_s: float = 0.0) -> None:
        await self.slots.close()


def create_many_app(
    engine: EngineProtocol, settings: ServerSettings, shortener: ShortenerProtocol | None = None
) -> Starlette:
    """The app around the models of `engine`, a ManyEngines. Its ServerState is `app.state.server`; each loaded model's is in
    its slot."""
    assert shortener is None, "refused before"
    slots = cast(ManyEngines, engine).slots
    if settings.files_dir is not None and settings.batch_max_concurrent is None:
        settings = dataclasses.replace(settings, batch_max_concurrent=8)
    settings = dataclasses.replace(settings, served_model_names=tuple(slots.slots) or ("none",))
    state = make_state(engine, settings, engine.model_name)
    state.on_demand = True
    state.background.append(partial(_refuse_when_draining, state, slots))
    about = About(state, slots)
    own = {route.path: route for route in about.routes()}
    routes = [
        _dispatch(state, slots, number, route) or route
        for number, route in enumerate(model_routes(state))
        if route.path not in own
    ]
    return make_app(state, [*routes, *own.values()])


async def _refuse_when_draining(state: ServerState, slots: ModelSlots) -> None:
    """End requests' waits for models when the server stops: none would be answered after the load."""
    while not state.draining:
        await asyncio.sleep(0.1)
    slots.refuse()


def _dispatch(state: ServerState, slots: ModelSlots, number: int, route: Route) -> Route | None:
    """The route that finds the model and calls its route `number` (in `model_routes`). None for
    routes about stored answers, or about all models."""
    methods = sorted(route.methods or ())
    asks = "POST" in methods and not route.path.startswith(("/v1/responses/{id}", "/v2/repository"))
    if not asks and route.path not in _NEEDS_NO_ENGINE:
        return None
    return Route(route.path, Dispatch(state, slots, number, route.path), methods=methods)


class Dispatch:
    """The ASGI endpoint of a route that uses a model."""

    def __init__(self, state: ServerState, slots: ModelSlots, number: int, path: str) -> None:
        self.state, self.slots, self.number, self.path = state, slots, number, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.state.draining:
            raise shutting_down()
        record: RequestRecord = scope["record"]
        asked, raw = await self._read(scope, receive)
        slot = self.slots.find(asked.model)
        if slot is None:
            require_model(self.state, asked.model or "")
            raise bad_request("this server has no model; POST /api/pull fetches one", "model")
        check_model(record.key, slot.name)
        keep_alive = asked.keep_alive_s(self.path)
        unloads = keep_alive == 0 and asked.is_empty(self.path)
        if keep_alive is not None and record.key is not None and record.key.role != "admin":
            if unloads:  # like POST /models/unload
                raise forbidden(record.key, "admin")
            if keep_alive < slot.model.keep_alive_s:  # a user's key may only lengthen it
                keep_alive = slot.model.keep_alive_s
                record.hints.append("keep_alive")
        if unloads:
            await self.slots.unload(slot)
            await About.unloaded(asked.model or slot.name, self.path)(scope, receive, send)
            return
        started, waited = False, None

        async def told(message: Message) -> None:
            nonlocal started
            started = True
            if waited is not None and message["type"] == "http.response.start":
                header = (LOAD_HEADER, str(round(1000 * waited)).encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        if self.path in _NEEDS_NO_ENGINE and slot.server_state is not None:
            await slot.routes[self.number].app(scope, own_receive(raw, receive), told)
            return
        with limited(self.state, record):  # a key over its limits loads no model
            for tries_left in reversed(range(MAX_TRIES)):
                more = await self._acquire(slot, receive, record)
                if more is not None:
                    waited = record.load_s = (waited or 0.0) + more
                try:
                    prepare(slot, self.state)
                    await slot.routes[self.number].app(scope, own_receive(raw, receive), told)
                    return
                except EngineDeadError:
                    if started or not tries_left:
                        raise
                    record.num_prompt_tokens = record.num_output_tokens = 0
                    record.ttft_s = None
                finally:
                    self.slots.release(slot, keep_alive)

    async def _acquire(self, slot: Slot, receive: Receive, record: RequestRecord) -> float | None:
        """Calls `ModelSlots.acquire`. The wait ends when the client disconnects or the server stops."""
        slot.note_death()
        if slot.state == "loaded" and not slot.is_closing and not slot.waiters:
            return await self.slots.acquire(slot)  # without a wait
        async with in_flight(self.state, receive, record):
            return await self.slots.acquire(slot)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[Asked, bytes]:
        """(fields that concern the model, the body) of the request."""
        if self.path in (TRANSCRIPTIONS, TRANSLATIONS):
            return await named_in_form(Request(scope, receive), self.state.settings)
        raw = (
            b""
            if scope["method"] == "GET"
            else await read_body(scope, receive, self.state.settings)
        )
        if scope["method"] == "GET":
            return Asked(model=QueryParams(scope["query_string"]).get("model")), raw
        if "id" in scope.get("path_params", {}):
            return Asked(model=scope["path_params"]["id"]), raw
        return Asked.of(raw), raw


def prepare(slot: Slot, shared: ServerState) -> None:
    """Create the routes of a model that was loaded for the first time."""
    if slot.server_state is not None:
        return
    engine, model = slot.engine, slot.model
    assert engine is not None
    settings = dataclasses.replace(
        shared.settings, served_model_names=(*model.names, f"{slot.name}:latest"), **model.server
    )
    own, all_ = Metrics(slot.name), shared.observers
    own.limited, own.stalls = all_.metrics.limited, all_.metrics.stalls
    engine.formats = settings.formats
    slot.server_state = dataclasses.replace(
        shared,
        engine=cast(EngineProtocol, engine),
        settings=settings,
        observers=Observers(own, all_.audit, all_.telemetry),
        created=int(time.time()),
    )
    slot.routes = model_routes(slot.server_state)
