"""The gateway: an ASGI app that answers requests about the fleet itself and forwards all others to
replicas (`forward`).

The gateway enforces the limits of keys over all replicas. It counts a request once, and reserves
its tokens before it sends the request to a replica. The replica reports how many tokens it used.
The app runs in uvicorn with the server's own connections, log and keys."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from slipstream import __version__
from slipstream.fleet.gateway.calls import Call
from slipstream.fleet.gateway.forward import Forwarder
from slipstream.fleet.gateway.members import Members
from slipstream.fleet.gateway.status import fleet_status
from slipstream.fleet.scaling.figures import FleetMetrics, of_engines
from slipstream.fleet.scaling.scaler import ScalerMetrics
from slipstream.server.batches import batches, files
from slipstream.server.http.decoding import check_depth
from slipstream.server.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ClientDisconnected,
    as_api_error,
    bad_request,
    noted,
    response_to,
    shutting_down,
    unavailable,
    wrong_method,
)
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.limits import admitted, in_flight, read_prompt_body
from slipstream.server.http.replies import greeting, json_response
from slipstream.server.kserve.routes import VERSION, Description
from slipstream.server.openai.audio import TRANSCRIPTIONS, TRANSLATIONS
from slipstream.server.openai.models import anthropic_card, anthropic_list
from slipstream.server.operations import feedback
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.status import ServerStatus, StatusMemory, page
from slipstream.server.state import ServerState

_KSERVE = re.compile(
    r"/v2/models/([^/]+(?:/[^/]+)*?)(?:/versions/\d+)?(?:/(?:infer|generate|generate_stream|ready|config))?"
)
_STORED = re.compile(r"/v1/responses/([^/]+)(?:/input_items|/cancel)?")
_MODEL_OF_FORM = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]*[; ]name="?model"?(?:;[^\r\n]*)?(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]{1,1024})\r\n--',
    re.I,
)
WITH_MODEL = {
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize"),
    *("/v1/chat/completions/render", "/v1/completions/render", "/v1/chat/completions/input_tokens"),
    *("/responses", "/responses/input_tokens", "/chat/completions/input_tokens"),
    *(
        *("/chat/completions", "/completion", "/completions", "/infill", "/apply-template"),
        *("/embeddings", "/embedding", "/v2/embed", "/reranking", "/v1/reranking"),
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        *("/classify", "/v1/classify", "/pooling", "/v1/pooling", "/embed_sparse"),
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
    ),
}
"""Paths whose body is JSON that may name a model."""

_NOT_HERE = {
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "adapters of a fleet stand in its file (engine.lora_modules); change it and use `slipstream fleet rollout`",
    ),
    **dict.fromkeys(
        ("/sleep", "/wake_up"),
        "replicas of a fleet do not sleep; use `slipstream fleet scale`, or autoscale with min: 0",
    ),
}


_OFF = {
    "/v1/files": ("files_dir", "files and batches are off", "files"),
    "/v1/batches": ("files_dir", "files and batches are off", "files"),
    "/v1/feedback": ("audit_log", "feedback is a line of the audit log", "feedback"),
}
"""Features that need a setting, by path prefix: (the setting, message if it is missing, error
code)."""


class _Peek(msgspec.Struct):
    """The fields that the gateway reads of any body."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None


_peek = msgspec.json.Decoder(_Peek)


class FleetDescription(Description):
    """Metadata of a fleet in KServe's protocol."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def index(self) -> list[dict[str, str]]:
        return [
            {"name": name, "version": VERSION, "state": "READY"}
            for name in self.gateway.members.models
        ]

    def require_ready(self) -> None:
        self.gateway.require_ready()


class Gateway:
    """The ASGI app. `state` belongs to the uvicorn server around it (`server.run.Server`)."""

    def __init__(self, members: Members, state: ServerState, metrics: Metrics) -> None:
        self.members, self.state, self.metrics = members, state, metrics
        self.forwarder = Forwarder(members, metrics)
        # by pool; set by the head
        self.autoscale_status: Callable[[], dict[str, dict[str, Any]]] = dict
        self.about = FleetDescription(self)
        self.status_memory = StatusMemory(self._read_status)
        state.background.append(self.status_memory.run)
        self._stored: list[Route] = [
            *files.routes(state),
            *batches.routes(state),
            *feedback.routes(state),
        ]
        metrics.registry.register(ScalerMetrics(lambda: self.autoscale_status()))
        metrics.registry.register(FleetMetrics(members, self.forwarder))

    async def _read_status(self) -> ServerStatus:
        return fleet_status(self.members, self.state, self.metrics, self.autoscale_status())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if not await self._own(scope, receive, send):
                await self.forward(scope, receive, send)
        except Exception as error:
            if isinstance(error, ClientDisconnected):
                scope["record"].error = "client_disconnected"
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            told = as_api_error(error)
            if told.status == 500 and not isinstance(error, ApiError):
                raise
            await response_to(scope, noted(scope, told))(scope, receive, send)

    # --- What the gateway answers itself ---------------------------------------------------------------------------------

    async def _own(self, scope: Scope, receive: Receive, send: Send) -> bool:
        path = scope["path"]
        answer: object = None
        models = self.members.models
        if path in ("/live", "/v2/health/live"):
            answer = {"status": "alive"}
        elif path in ("/health", "/ping", "/ready", "/v2/health/ready"):
            self.require_ready(also_draining=path in ("/health", "/ping"))
            answer = {"status": "healthy"}
        elif path == "/version":
            answer = {"version": __version__}
        elif path == "/" and b"text/html" not in dict(scope["headers"]).get(b"accept", b""):
            await Response(greeting(models), media_type="text/plain")(scope, receive, send)
            return True
        elif path in ("/status", "/chat"):
            await Response(page(path[1:]), media_type="text/html")(scope, receive, send)
            return True
        elif path == "/status.json":
            past = b"past=1" in scope["query_string"].split(b"&")
            answer = await self.status_memory.answer(with_past=past)
        elif path == "/fleet/status":
            answer = self.status()
        elif path == "/metrics":
            await Response(self._render_metrics(), media_type="text/plain; version=0.0.4")(
                scope, receive, send
            )
            return True
        elif path == "/findings":
            if self.state.watch is None:
                raise ApiError(
                    404,
                    "the fault detector is off; set detect: true in the fleet's file",
                    code="no_detector",
                )
            answer = {"findings": self.state.watch.findings}
        elif path in ("/v1/models", "/models"):
            answer = self._models(is_anthropic=b"anthropic-version" in dict(scope["headers"]))
        # a list of models must not start a replica of a sleeping one
        elif path in ("/api/tags", "/api/ps") and (len(models) > 1 or self._sleeps()):
            answer = {"models": [{"name": name, "model": name} for name in models]}
        elif path == "/v2/repository/index" and scope["method"] == "POST":
            answer = self.about.index()
        elif path in _NOT_HERE:
            raise ApiError(403, _NOT_HERE[path], code="not_in_a_fleet")
        elif f"{path}/".startswith(("/v1/files/", "/v1/batches/", "/v1/feedback/")):
            await self._keep(scope, receive, send)
            return True
        elif path.startswith(
            "/fleet/"
        ):  # routes for replicas; through them a client could reach every route
            raise ApiError(404, "unknown route; see /openapi.json", code="unknown_route")
        if answer is None:
            return False
        await json_response(answer)(scope, receive, send)
        return True

    def require_ready(self, *, also_draining: bool = False) -> None:
        """ApiError (503) if some model has no replica that answers, or if the gateway refuses new
        requests."""
        if self.state.draining and not also_draining:
            raise shutting_down()
        models = self.members.models.items()
        if down := [
            name
            for name, versions in models
            if not any(v.can_answer or v.is_asleep for v in versions)
        ]:
            raise unavailable(f"no replica serves {', '.join(down)}", "no_replica")

    async def _keep(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests for files and batches, which the gateway stores itself."""
        off = next((off for begin, off in _OFF.items() if scope["path"].startswith(begin)), None)
        if off is not None and getattr(self.state.settings, off[0]) is None:
            raise ApiError(
                403, f"{off[1]}; set {off[0]} in the fleet's file", code=f"{off[2]}_disabled"
            )
        methods: set[str] = set()
        for route in self._stored:
            match, more = route.matches(scope)
            if match is Match.FULL:
                await route.handle({**scope, **more}, receive, send)
                return
            if match is Match.PARTIAL:
                methods |= route.methods or set()
        if methods:
            raise wrong_method(methods)
        raise HTTPException(404)

    def _render_metrics(self) -> bytes:
        if self.state.watch is not None:
            lasting = (f for f in self.state.watch.findings if f["ended"] is None)
            # A replica's name begins with its model's; version, pool and number follow.
            self.metrics.findings = Counter(
                (f["replica"].rsplit("/", 3)[0], f["cause"]) for f in lasting
            )
        return self.metrics.render_all(of_engines(self.members))

    def _models(self, *, is_anthropic: bool) -> dict[str, object]:
        """Body of /v1/models: all models and adapters of the fleet."""
        cards: list[dict[str, object]] = []
        for name, versions in self.members.models.items():
            context = max(v.prompts.max_model_len for v in versions)
            if is_anthropic:
                cards.append(anthropic_card(name, self.state.created, context))
                continue
            about = {
                "object": "model",
                "created": self.state.created,
                "owned_by": "slipstream",
                "max_model_len": context,
            }
            cards.append({"id": name, **about})
            adapters = frozenset().union(*(v.adapters for v in versions if v.spec.share))
            cards += [{"id": adapter, **about, "parent": name} for adapter in sorted(adapters)]
        if is_anthropic:
            return anthropic_list(cards)
        return {"object": "list", "data": cards}

    def _sleeps(self) -> bool:
        """True if no model has a replica."""
        return all(v.is_asleep for versions in self.members.models.values() for v in versions)

    def status(self) -> dict[str, object]:
        counts = self.forwarder.counts
        own = {
            "in_flight": len(self.state.in_flight),
            "counts": counts,
            "autoscale": self.autoscale_status(),
        }
        return {**self.members.status(), **own}

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request and handle failures until its answer is complete. ApiError if no answer has begun."""
        raw = await read_prompt_body(self.state, scope, receive)
        path, query = scope["path"], scope.get("query_string", b"")
        name, adapter, peek = self._model_of(path, raw)
        headers = [
            b"%b: %b\r\n" % (key, value)
            for key, value in scope["headers"]
            if key
            in (
                b"content-type",
                b"accept",
                b"anthropic-version",
                b"inference-header-content-length",
            )
        ]
        target = scope["raw_path"].split(b"?")[0] + (b"?" + query if query else b"")
        streams = bool(peek.stream) or path.endswith("/generate_stream")
        if path in ("/api/chat", "/api/generate") and peek.stream is None:
            streams = True
        call = Call(
            scope, send, scope["method"].encode(), target, raw, headers, streams, adapter=adapter
        )
        own = dict(scope["headers"]).get(b"x-session-id")
        call.session = peek.prompt_cache_key or peek.user if own is None else own.decode("latin-1")
        stored = _STORED.fullmatch(path)
        call.only = self.forwarder.stored.get(
            peek.previous_response_id or (stored[1] if stored else "")
        )
        limits = (
            contextlib.nullcontext()
            if scope["method"] == "GET"
            else admitted(self.state, call.record, adapter or name)
        )
        try:
            with limits:
                async with in_flight(self.state, receive, call.record):
                    await self._answer(name, call)
        except ApiError as error:
            if not call.client.headers_sent:
                raise
            await call.client.settled()
            await self.forwarder.break_off(call, error)
        finally:
            call.client.cancel()

    async def _answer(self, name: str, call: Call) -> None:
        path, record = call.scope["path"], call.record
        version = self.members.choose_version(name, call.session or record.id, call.adapter)
        call.generates = version.prompts.generates(path)
        grant = record.grant if record.grant is not None and record.grant.counts_tokens else None
        read = await version.prompts.read(path, call.raw, call.scope, counts=grant is not None)
        call.tokens, call.prefix_salt = read.tokens, prefix_salt(record.key, read.cache_salt)
        record.num_prompt_tokens = len(call.tokens)
        if grant is not None and read.reserve is not None:
            grant.reserve(*read.reserve)
        if record.background:  # batches run when there is room, so they say nothing about traffic
            await self.forwarder.see_through(version, call)
            return
        tally = version.tally
        tally.arrived()
        try:
            await self.forwarder.see_through(version, call)
        except ApiError:
            tally.ended(record, time.monotonic() - record.start, failed=True)
            raise
        tally.ended(record, time.monotonic() - record.start, failed=False)

    def _model_of(self, path: str, raw: bytes) -> tuple[str, str | None, _Peek]:
        """(model, adapter, other fields) that a body names."""
        models, peek = self.members.models, _Peek()
        if (kserve := _KSERVE.fullmatch(path)) is not None:
            peek.model = kserve[1]
        elif path in (TRANSCRIPTIONS, TRANSLATIONS):
            found = _MODEL_OF_FORM.search(raw)
            peek.model = None if found is None else found[1].decode("utf-8", "replace")
        elif raw:
            check_depth(raw)
            try:
                peek = _peek.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if path in WITH_MODEL:
                    raise bad_request(
                        f"the body is not valid: {error}", code="invalid_json"
                    ) from None
        elif path.startswith("/v1/models/"):
            peek.model = path.removeprefix("/v1/models/")
        if peek.model is None:
            return next(iter(models)), None, peek
        return *self.find(peek.model), peek

    def find(self, name: str) -> tuple[str, str | None]:
        """(model, adapter or None) for a name that is a model's or an adapter's. ApiError (404) if
        it is neither."""
        found = self.members.find(name) or self.members.find(name.removesuffix(":latest"))
        if found is None:
            message = f"model {name[:100]!r} is not served here; the fleet serves {', '.join(self.members.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found
