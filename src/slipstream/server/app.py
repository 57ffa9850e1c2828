"""The HTTP application: routes, and the layers around them.

RequestLog (id, log line, count, unforeseen errors) > ApiKeys (401) > routes: strict body -> prompt tokens -> engine -> deltas
"""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.server import chat, completions, docs_page, ollama, openapi
from slipstream.server.auth import ApiKeys
from slipstream.server.embeddings import RERANK_PATHS, SCORE_PATHS, PooledRoute, embeddings, rerank, score
from slipstream.server.errors import ApiError, ClientDisconnected, answer_error
from slipstream.server.generation import GenerationRoute
from slipstream.server.health import Probes
from slipstream.server.metrics import Metrics
from slipstream.server.models import Models
from slipstream.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from slipstream.server.record import RequestLog
from slipstream.server.sleep import Sleeping
from slipstream.server.state import Engine, ServerSettings, ServerState, Shortener
from slipstream.server.tokens import Tokens


def create_app(engine: Engine, settings: ServerSettings, shortener: Shortener | None = None) -> Starlette:
    """The app around a running engine; `shortener` shortens prompts. Its ServerState is at `app.state.server`."""
    names = settings.served_model_names or (engine.model_name,)
    state = ServerState(engine, settings, Metrics(names[0]), shortener)
    probes, models, tokens = Probes(state), Models(state), Tokens(state)
    document = openapi.document(__version__, has_keys=bool(settings.api_keys))
    description, page = msgspec.json.encode(document), docs_page.page(document)

    async def describe(request: Request) -> Response:
        return Response(description, media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def version(request: Request) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("docs")  # a browser
        text = f"Slipstream {__version__} serves {', '.join(state.model_names)}: OpenAI's API at /v1, all of it at /docs\n"
        return Response(text, media_type="text/plain")

    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    app = Starlette(
        routes=[
            Route("/v1/completions", GenerationRoute(state, CompletionRequest, completions.prepare), methods=["POST"]),
            Route("/v1/chat/completions", GenerationRoute(state, ChatRequest, chat.prepare), methods=["POST"]),
            Route("/v1/embeddings", PooledRoute(state, EmbeddingRequest, embeddings), methods=["POST"]),
            *(Route(path, PooledRoute(state, RerankRequest, rerank), methods=["POST"]) for path in RERANK_PATHS),
            *(Route(path, PooledRoute(state, ScoreRequest, score), methods=["POST"]) for path in SCORE_PATHS),
            Route("/v1/models", models.list),
            Route("/v1/models/{id:path}", models.get),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/version", version),
            Route("/ping", probes.health, methods=["GET", "POST"]),
            Route("/live", probes.live),
            Route("/ready", probes.ready),
            Route("/health", probes.health),
            Route("/metrics", probes.metrics),
            Route("/", root),
            Route("/openapi.json", describe),
            Route("/docs", docs),
            *Sleeping(state).routes(),
            *ollama.routes(state),
        ],
        middleware=[
            Middleware(RequestLog, metrics=state.metrics),
            *([cors] if settings.cors_origins else []),  # outside the keys: a browser asks first, without one
            Middleware(ApiKeys, keys=settings.api_keys),
        ],
        exception_handlers=dict.fromkeys((ApiError, SlipstreamError, ClientDisconnected, HTTPException), answer_error),
    )
    app.router.redirect_slashes = False  # /v1/models/ is an unknown route, not a redirect that drops the body
    app.state.server = state
    return app
