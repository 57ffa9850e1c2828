"""The HTTP application: routes and middleware.

RequestLog (id, log line, count, unforeseen errors) > CORS > WebGuard (421, 403, 415) > ApiKeys
(401)
> routes: strict body -> prompt tokens -> engine -> deltas
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from slipstream import __version__
from slipstream.errors import ConfigError, SlipstreamError, install_command
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.anthropic import messages as anthropic
from slipstream.server.batches import batches, files
from slipstream.server.batches.batches import BatchStore
from slipstream.server.batches.files import FileStore
from slipstream.server.http import docs_page, openapi
from slipstream.server.http.auth import ApiKeys, Keyring
from slipstream.server.http.errors import ApiError, ClientDisconnected, answer_error
from slipstream.server.http.limits import counted
from slipstream.server.http.rates import SharedLimiter
from slipstream.server.http.record import Observers, RequestLog
from slipstream.server.http.replies import greeting, json_response
from slipstream.server.http.web_guard import WebGuard, with_cors
from slipstream.server.kserve import routes as kserve
from slipstream.server.llama import routes as llama
from slipstream.server.ollama import routes as ollama
from slipstream.server.openai import chat, completions, responses
from slipstream.server.openai.audio import TRANSCRIPTIONS, TRANSLATIONS, SpeechRoute
from slipstream.server.openai.embeddings import (
    CLASSIFY_PATHS,
    POOLING_PATHS,
    RERANK_PATHS,
    SCORE_PATHS,
    SPARSE_PATHS,
    CohereEmbedRoute,
    PooledRoute,
    classify,
    embed_sparse,
    embeddings,
    pooling,
    rerank,
    score,
)
from slipstream.server.openai.models import Models
from slipstream.server.openai.pooled_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    SparseRequest,
)
from slipstream.server.openai.protocol import ChatRequest, CompletionRequest
from slipstream.server.openai.render import Rendering
from slipstream.server.openai.response_store import ResponseStore
from slipstream.server.openai.tokens import Tokens
from slipstream.server.operations import feedback, fleet
from slipstream.server.operations.adapters import AdapterRoutes
from slipstream.server.operations.audit import AuditLog
from slipstream.server.operations.health import Probes
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.self_check import SelfCheck
from slipstream.server.operations.sleep import Sleeping
from slipstream.server.operations.status import StatusRoutes
from slipstream.server.operations.weights import WeightRoutes
from slipstream.server.state import EngineProtocol, ServerSettings, ServerState, ShortenerProtocol


def prompt_routes(state: ServerState) -> list[Route]:
    """Routes of requests whose prompts a fleet's gateway also reads."""
    return [
        Route(
            "/v1/completions",
            GenerationRoute(state, CompletionRequest, completions.prepare),
            methods=["POST"],
        ),
        Route(
            "/v1/chat/completions",
            GenerationRoute(state, ChatRequest, chat.prepare),
            methods=["POST"],
        ),
        Route("/v1/embeddings", PooledRoute(state, EmbeddingRequest, embeddings), methods=["POST"]),
        *(
            Route(path, PooledRoute(state, kind, answer), methods=["POST"])
            for paths, kind, answer in (
                (RERANK_PATHS, RerankRequest, rerank),
                (SCORE_PATHS, ScoreRequest, score),
                (CLASSIFY_PATHS, ClassifyRequest, classify),
                (POOLING_PATHS, PoolingRequest, pooling),
                (SPARSE_PATHS, SparseRequest, embed_sparse),
            )
            for path in paths
        ),
        Route(
            "/chat/completions", GenerationRoute(state, ChatRequest, chat.prepare), methods=["POST"]
        ),
        Route("/embeddings", PooledRoute(state, EmbeddingRequest, embeddings), methods=["POST"]),
        Route("/v2/embed", CohereEmbedRoute(state), methods=["POST"]),
        *llama.routes(state),
        *responses.routes(state),
        *anthropic.routes(state),
        *ollama.routes(state),
        *kserve.routes(state),
    ]


def model_routes(state: ServerState) -> list[Route]:
    """Routes that use a model. A server of several models has them once for each."""
    tokens, rendering = Tokens(state), Rendering(state)
    return [
        *prompt_routes(state),
        Route(TRANSCRIPTIONS, SpeechRoute(state, "transcribe"), methods=["POST"]),
        Route(TRANSLATIONS, SpeechRoute(state, "translate"), methods=["POST"]),
        Route("/tokenize", counted(state, tokens.tokenize), methods=["POST"]),
        Route("/detokenize", counted(state, tokens.detokenize), methods=["POST"]),
        Route("/v1/chat/completions/render", counted(state, rendering.chat), methods=["POST"]),
        Route("/v1/completions/render", counted(state, rendering.completion), methods=["POST"]),
    ]


def make_state(
    engine: EngineProtocol,
    settings: ServerSettings,
    model: str,
    shortener: ShortenerProtocol | None = None,
) -> ServerState:
    """A server's state, with keys, limits and observers. `model` is its name in the metrics."""
    lasting = settings.state_dir if settings.keys_file is not None else None
    limiter = SharedLimiter(
        shared_dir=settings.shared_dir, state_dir=lasting, slot=lambda: state.load.slot
    )
    state = ServerState(
        engine, settings, observers(settings, model), Keyring(settings), limiter, shortener
    )
    return state


def open_files(state: ServerState) -> None:
    """Open the stores of files and batches, if the settings name a folder. ConfigError if it can't
    be used."""
    if state.settings.files_dir is not None:
        state.files = FileStore(
            Path(state.settings.files_dir), max_bytes=state.settings.max_files_bytes
        )
        state.batches = BatchStore(state.files)


def observers(settings: ServerSettings, model: str) -> Observers:
    made = Observers(Metrics(model))
    if settings.audit_log is not None:
        path, how = Path(settings.audit_log), settings.audit_failure
        shared = None if settings.shared_dir is None else Path(settings.shared_dir)
        made.audit = AuditLog(
            path, max_bytes=settings.audit_max_bytes, on_failure=how, shared_dir=shared
        )
    if settings.otlp_endpoint is not None:
        try:
            from slipstream.server.operations.telemetry import Telemetry
        except ImportError:
            raise ConfigError(
                f"OpenTelemetry needs its SDK: {install_command('otel')}", field="otlp_endpoint"
            ) from None
        made.telemetry = Telemetry(settings.otlp_endpoint, server=(settings.host, settings.port))
    return made


@cache
def described(has_keys: bool, on_demand: bool, updates_weights: bool) -> tuple[bytes, str]:
    """The OpenAPI document as (JSON, HTML page). Made at the first request, because it takes as
    long as the rest of the start."""
    document = openapi.document(
        __version__, has_keys=has_keys, on_demand=on_demand, updates_weights=updates_weights
    )
    return msgspec.json.encode(document), docs_page.page(document)


def create_app(
    engine: EngineProtocol, settings: ServerSettings, shortener: ShortenerProtocol | None = None
) -> Starlette:
    """The app around a running engine; `shortener` shortens prompts. Its ServerState is
    `app.state.server`."""
    names = settings.served_model_names or (engine.model_name,)
    engine.formats = settings.formats
    state = make_state(engine, settings, names[0], shortener)
    if settings.self_check is not None:
        state.join(SelfCheck(state, settings.self_check, settings.self_check_every_s))
    probes, models = Probes(state), Models(state)
    return make_app(
        state,
        [
            *model_routes(state),
            Route("/v1/models", models.list),
            Route("/models", models.list),
            Route("/v1/models/{id:path}", models.get),
            Route("/metrics", probes.metrics),
            *StatusRoutes(state).routes(),
        ],
    )


def make_app(state: ServerState, routes: list[Route]) -> Starlette:
    """Makes the app of these routes, plus those common to all servers."""
    settings = state.settings
    if settings.max_stored_responses:
        kept = settings.state_dir or settings.shared_dir
        state.responses = ResponseStore(
            Path(kept) / "responses.sqlite" if kept else None,
            max_responses=settings.max_stored_responses,
            max_bytes=settings.max_stored_bytes,
        )
    open_files(state)
    probes, has_keys = Probes(state), bool(state.keys)
    options = has_keys, state.on_demand, settings.enable_weight_updates

    async def describe(request: Request) -> Response:
        return Response(
            (await asyncio.to_thread(described, *options))[0], media_type="application/json"
        )

    async def docs(request: Request) -> Response:
        return Response((await asyncio.to_thread(described, *options))[1], media_type="text/html")

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("docs")  # a browser
        return Response(greeting(() if has_keys else state.model_names), media_type="text/plain")

    app = Starlette(
        routes=[
            *routes,
            Route("/version", version),
            Route("/ping", probes.health, methods=["GET", "POST"]),
            Route("/live", probes.live),
            Route("/ready", probes.ready),
            Route("/health", probes.health),
            Route("/", root),
            Route("/openapi.json", describe),
            Route("/docs", docs),
            *Sleeping(state).routes(),
            *AdapterRoutes(state).routes(),
            *WeightRoutes(state).routes(),
            *files.routes(state),
            *batches.routes(state),
            *feedback.routes(state),
            *([] if settings.fleet_key is None else fleet.routes(state, lambda: app.router)),
        ],
        middleware=[
            Middleware(RequestLog, observers=state.observers),
            Middleware(with_cors, settings),
            Middleware(WebGuard, settings, has_keys=has_keys or settings.fleet_key is not None),
            Middleware(ApiKeys, keys=state.keys),
            *(
                []
                if settings.fleet_key is None
                else [Middleware(fleet.FromGateway, key=settings.fleet_key)]
            ),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, SlipstreamError, ClientDisconnected, HTTPException), answer_error
        ),
    )
    # /v1/models/ is an unknown route: a redirect would drop the body.
    app.router.redirect_slashes = False
    app.state.server = state
    return app
