"""/openapi.json, made from the structs that decode the bodies, so that it cannot disagree with them."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.server import ollama
from slipstream.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    **ollama.BODIES,
}
_GETS = {
    "/v1/models": "The models served",
    "/v1/models/{id}": "One of them",
    "/live": "200 while the server runs",
    "/ready": "200 when new requests are welcome, else 503",
    "/health": "200 when the engine works, else 503",
    "/ping": "The same as /health",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/api/tags": "The models served, as Ollama lists them",
    "/api/ps": "The models that are loaded, as Ollama lists them",
    "/api/version": "The server's version",
    "/is_sleeping": "Whether the model gave its memory back (of a server with --enable-sleep-mode, as the next two)",
    "/docs": "This description as a page",
}
_POSTS = {
    "/sleep": ("Give the model's memory back: level 1 the KV cache, level 2 the weights, too", {"level": ["1", "2"]}),
    "/wake_up": ("Take it back", {}),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(version: str, *, has_keys: bool) -> dict[str, Any]:
    (_, components) = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    answers = {
        "200": {"description": "The answer"},
        "default": {"description": "An error", "content": _json_content({"$ref": "#/components/schemas/Error"})},
    }
    paths: dict[str, Any] = {}
    for path, kind in _BODIES.items():
        content = _json_content({"$ref": f"#/components/schemas/{kind.__name__}"})
        operation = {"requestBody": {"required": True, "content": content}, "responses": answers}
        paths[path] = {"post": {"summary": kind.__doc__, **operation}}
    for path, summary in _GETS.items():
        parameters = (
            [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}] if "{id}" in path else []
        )
        paths[path] = {"get": {"summary": summary, "parameters": parameters, "responses": answers}}
    for path, (summary, query) in _POSTS.items():
        parameters = [{"name": n, "in": "query", "schema": {"type": "string", "enum": some}} for n, some in query.items()]
        paths[path] = {"post": {"summary": summary, "parameters": parameters, "responses": answers}}
    scheme = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": version},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}, **scheme},
        "security": [{"key": []}] if has_keys else [],
    }


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
