"""Ollama's routes, for its clients.

/api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, /api/show, /api/version.

A body is translated into this server's chat, completion or embedding, and answered like one. The
differences:

1. A stream is lines of JSON, and the default. An error is {"error": "text"}.
2. A name may end with ":latest".
3. Options about loading a model are accepted without effect, because the server's start decides
   them. So are `num_ctx`, and with one model `keep_alive` (`server.many`).
4. A body without a prompt or messages is a request to load the model.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from slipstream.engine.requests.pooled import check_dimensions, refuse_classifier, rows
from slipstream.params.sampling import SamplingParams
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.hints import given_hints
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.answers.tools import calls_tools, chat_template, reasons
from slipstream.server.http.decoding import decode
from slipstream.server.http.errors import SHAPES, bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response, utc_time
from slipstream.server.ollama.answers import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer
from slipstream.server.ollama.bodies import (
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    known_name,
)
from slipstream.server.openai import chat, completions
from slipstream.server.openai.embeddings import PooledRoute, embed
from slipstream.server.openai.models import require_model
from slipstream.server.openai.pooled_bodies import Pooled
from slipstream.server.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from slipstream.server.state import ServerState
from slipstream.spec.description import ModelDescription
from slipstream.spec.stored.safetensors import weight_bytes

SHAPES["/api"] = lambda error, _: encode({"error": error.message})


async def _prepare(
    state: ServerState,
    body: ChatRequest | CompletionRequest,
    record: RequestRecord,
    *,
    answer: type[OllamaAnswer],
) -> Answer:
    if not (body.messages if isinstance(body, ChatRequest) else body.prompt):
        loaded = answer(None, state, body, [], SamplingParams(), record)
        loaded.stream = False
        return loaded
    if isinstance(body, ChatRequest):
        return await chat.prepare(state, body, record, answer=answer, cuts_max_tokens=True)
    return await completions.prepare(
        state, body, record, answer=partial(answer, None), max_tokens=None
    )


class _Generate(GenerationRoute):
    def __init__(
        self, state: ServerState, body: type[OllamaBody], answer: type[OllamaAnswer]
    ) -> None:
        super().__init__(state, GenerationRequest, partial(_prepare, answer=answer))
        self.body = body

    def read(self, raw: bytes, scope: Scope) -> GenerationRequest:
        body = decode(self.body, raw)
        hints = given_hints(body)
        scope["record"].hints += [
            h for h in hints if not (h == "keep_alive" and self.state.on_demand)
        ]
        return body.translated(self.state)


class _Embed(PooledRoute):
    def read(self, raw: bytes) -> OllamaPooled:
        body = decode(OllamaEmbedRequest, raw)
        texts = [body.input] if isinstance(body.input, str) else body.input
        texts = [] if texts == [""] else texts  # Ollama computes no vector for it
        cut = -1 if body.truncate else None
        name = known_name(self.state, body.model)
        return OllamaPooled(
            model=name,
            texts=texts,
            dimensions=body.dimensions,
            truncate_prompt_tokens=cut,
            cache_salt=body.cache_salt,
        )


class _OneEmbedding(PooledRoute):
    def read(self, raw: bytes) -> OllamaPooled:
        body = decode(OllamaEmbeddingsRequest, raw)
        return OllamaPooled(
            model=known_name(self.state, body.model),
            texts=[body.prompt] if body.prompt else [],
            dimensions=None,
            truncate_prompt_tokens=-1,
            cache_salt=body.cache_salt,
        )


class OllamaPooled(Pooled, kw_only=True):
    texts: list[str]
    dimensions: int | None


async def _embeddings(
    state: ServerState, body: OllamaPooled, record: RequestRecord
) -> dict[str, Any]:
    refuse_classifier(state.engine.description)
    check_dimensions(state.engine.description, body.dimensions)
    answer = await embed(state, body.texts, body, "input", record)
    record.num_prompt_tokens = tokens = sum(map(len, answer.prompt_token_ids))
    total = round((time.monotonic() - record.start) * 1e9)
    found = rows(answer, body.dimensions).tolist() if body.texts else []
    load = round(record.load_s * 1e9)
    about = {"total_duration": total, "load_duration": load, "prompt_eval_count": tokens}
    return {"model": body.model, "embeddings": found, **about}


async def _embedding(
    state: ServerState, body: OllamaPooled, record: RequestRecord
) -> dict[str, Any]:
    found = (await _embeddings(state, body, record))["embeddings"]
    return {"embedding": found[0] if found else []}


OLLAMA_VERSION = "0.13.0"
"""Version of Ollama whose API this is. Editors require one that supports tools."""


class _OllamaInfo:
    """Routes about the served models."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def tags(self, request: Request) -> Response:
        return json_response({"models": [self._model(name) for name in self.state.model_names]})

    async def ps(self, request: Request) -> Response:
        """List the loaded models: all of them, or none while the server sleeps."""
        engine, years = self.state.engine, 100 * 365.25 * 86400
        models = (
            [] if engine.is_sleeping else [self._model(name) for name in self.state.model_names]
        )
        on_gpu = engine.config.device.info.is_cuda
        own = {
            "expires_at": utc_time(self.state.created + years),
            "context_length": engine.config.model.max_model_len,
        }
        return json_response(
            {
                "models": [
                    model | own | {"size_vram": model["size"] if on_gpu else 0} for model in models
                ]
            }
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": OLLAMA_VERSION})

    async def show(self, request: Request) -> Response:
        state = self.state
        body = await read_as(OllamaShowRequest, request, state)
        if not (body.model or body.name):
            raise bad_request("`model` is missing: name the model to show", "model")
        require_model(state, known_name(state, body.model or body.name))
        description, template = state.engine.description, chat_template(state)
        spec, kind = description.spec, description.family.model_type
        answer = {
            "template": template,
            "details": _details(description),
            "model_info": {
                "general.architecture": kind,
                "general.parameter_count": spec.num_parameters,
                f"{kind}.context_length": state.engine.config.model.max_model_len,
                f"{kind}.embedding_length": spec.hidden_size,
                f"{kind}.block_count": len(spec.layers),
            },
            "capabilities": _capabilities(state, template),
            "modified_at": utc_time(state.created),
        }
        return json_response(answer)

    def _model(self, name: str) -> dict[str, Any]:
        return model_entry(name, self.state.engine.description, self.state.created)


def model_entry(name: str, description: ModelDescription, created: float) -> dict[str, Any]:
    """A model as Ollama lists it."""
    path = description.path
    return {
        "name": name,
        "model": name,
        "modified_at": utc_time(created),
        "size": path.stat().st_size if path.is_file() else weight_bytes(path),
        "digest": "",
        "details": _details(description),
    }


def _details(description: ModelDescription) -> dict[str, Any]:
    family = description.family.model_type
    return {
        "parent_model": "",
        "format": description.format,
        "family": family,
        "families": [family],
        "parameter_size": f"{description.spec.num_parameters / 1e6:.1f}M",
        "quantization_level": description.scheme or description.gguf_type or description.dtype,
    }


def _capabilities(state: ServerState, template: str) -> list[str]:
    spec = state.engine.description.spec
    if not spec.generates:
        return ["embedding"]
    return (
        ["completion"]
        + ["tools"] * calls_tools(state)
        + ["vision"] * spec.sees
        + ["audio"] * spec.hears
        + ["thinking"] * reasons(state, template)
    )


def routes(state: ServerState) -> list[Route]:
    about = _OllamaInfo(state)

    return [
        Route("/api/chat", _Generate(state, OllamaChatRequest, OllamaChatAnswer), methods=["POST"]),
        Route(
            "/api/generate",
            _Generate(state, OllamaGenerateRequest, OllamaGenerateAnswer),
            methods=["POST"],
        ),
        Route("/api/embed", _Embed(state, Pooled, _embeddings), methods=["POST"]),
        Route("/api/embeddings", _OneEmbedding(state, Pooled, _embedding), methods=["POST"]),
        Route("/api/show", about.show, methods=["POST"]),
        Route("/api/tags", about.tags),
        Route("/api/ps", about.ps),
        Route("/api/version", about.version),
    ]
