"""/openapi.json, generated from the structs that decode the bodies, so that it always agrees with
them."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.server.anthropic.body import CountTokensRequest, MessagesRequest
from slipstream.server.batches.batches import BatchRequest
from slipstream.server.kserve.routes import GenerateRequest, InferRequest
from slipstream.server.llama import routes as llama
from slipstream.server.many.about import ModelBody
from slipstream.server.ollama import bodies as ollama
from slipstream.server.openai.audio import FORMATS, TRANSCRIPTIONS, TRANSLATIONS
from slipstream.server.openai.pooled_bodies import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    SparseRequest,
)
from slipstream.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from slipstream.server.openai.responses_body import ResponseInput, ResponsesRequest
from slipstream.server.operations import weights
from slipstream.server.operations.feedback import FeedbackRequest

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/chat/completions": ChatRequest,
    "/embeddings": EmbeddingRequest,
    "/v2/embed": CohereEmbedRequest,
    "/reranking": RerankRequest,
    "/v1/reranking": RerankRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/classify": ClassifyRequest,
    "/v1/classify": ClassifyRequest,
    "/embed_sparse": SparseRequest,
    "/pooling": PoolingRequest,
    "/v1/pooling": PoolingRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponseInput,
    "/v1/batches": BatchRequest,
    "/v1/feedback": FeedbackRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v2/models/{id}/infer": InferRequest,
    "/v2/models/{id}/generate": GenerateRequest,
    "/v2/models/{id}/generate_stream": GenerateRequest,
    **ollama.BODIES,
    **llama.BODIES,
}
_GETS = {
    "/v1/models": "The models served",
    "/models": "The same as /v1/models",
    "/props": "The model and the server, as llama.cpp describes them",
    "/slots": "Places for sequences, as llama.cpp lists them",
    "/v1/models/{id}": "A model",
    "/v1/responses/{id}": "A kept answer",
    "/v1/responses/{id}/input_items": "The input of a kept answer",
    "/v1/files": "The files (with --files-dir, as all routes of files and batches)",
    "/v1/files/{id}": "A file",
    "/v1/files/{id}/content": "A file's content",
    "/v1/batches": "The batches",
    "/v1/batches/{id}": "A batch and its progress",
    "/live": "200 while the server runs",
    "/ready": "200 when new requests are welcome, else 503",
    "/health": "200 when the engine works, else 503",
    "/ping": "The same as /health",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/status": "A page: models, replicas, load, latency, findings",
    "/status.json": "The data of /status",
    "/findings": "Findings of the detector (with --detect)",
    "/chat": "A page to chat with the models",
    "/api/tags": "The models served, as Ollama lists them",
    "/api/ps": "The models that are loaded, as Ollama lists them",
    "/api/version": "The server's version",
    "/is_sleeping": "Whether the model sleeps (with --enable-sleep-mode, as /sleep and /wake_up)",
    "/v2": "The server, as KServe describes it",
    "/v2/health/live": "200 while the server runs",
    "/v2/health/ready": "200 when new requests are welcome, else 503",
    "/v2/models/{id}": "A model's tensors",
    "/v2/models/{id}/config": "A model's configuration, as Triton describes it",
    "/v2/models/{id}/ready": "200 when the model answers, else 503",
    "/docs": "This description as a page",
}
_POSTS = {
    "/sleep": (
        "Release the model's memory: level 1 the KV cache, level 2 also the weights",
        {"level": ["1", "2"]},
    ),
    "/wake_up": ("Take the model's memory again after /sleep", {}),
    "/v2/repository/index": ("The models served, as Triton lists them", {}),
    "/v1/batches/{id}/cancel": ("Cancel a batch. Its answers so far are kept", {}),
    "/v1/responses/{id}/cancel": ("Always an error: there are no answers in the background", {}),
}
_ID: dict[str, Any] = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_DELETES = {"/v1/responses/{id}": "Forget an answer", "/v1/files/{id}": "Delete a file"}
_UPLOAD = {
    "title": "Upload",
    "description": "POST /v1/files: as multipart/form-data",
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
    "additionalProperties": False,
}
_SPEECH: dict[str, Any] = {
    "file": {"type": "string", "format": "binary"},
    "model": {"type": "string"},
    "prompt": {"type": "string"},
    "response_format": {"type": "string", "enum": list(FORMATS)},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "timestamp_granularities[]": {
        "type": "array",
        "items": {"type": "string", "enum": ["segment", "word"]},
    },
    "chunking_strategy": {"type": "string", "enum": ["auto"]},
    "seed": {"type": "integer"},
    "user": {"type": "string"},
}
_FORM_SCHEMAS: dict[str, Any] = {
    "Upload": _UPLOAD,
    "Transcription": {
        "title": "Transcription",
        "type": "object",
        "required": ["file"],
        "properties": {**_SPEECH, "language": {"type": "string"}, "stream": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "Translation": {
        "title": "Translation",
        "type": "object",
        "required": ["file"],
        "properties": _SPEECH,
        "additionalProperties": False,
    },
}
_FORMS = {
    "/v1/files": ("Keep a file for a batch", "Upload"),
    TRANSCRIPTIONS: ("The text of a sound (speech models)", "Transcription"),
    TRANSLATIONS: ("The text of a sound, in English", "Translation"),
}
_TEXT = {"type": "string"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "message"],
    "properties": {"type": _TEXT, "message": _TEXT, "details": {"type": "object"}},
}
_ERRORS: dict[str, Any] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": _OPENAI_ERROR}},
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {"type": {"const": "error"}, "error": _ANTHROPIC_ERROR, "request_id": _TEXT},
    },
    "TextError": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}
_ERROR_NAMES = {
    "/v1/messages": "AnthropicError",
    **dict.fromkeys(("/api", "/v2/health", "/v2/models", "/v2/repository"), "TextError"),
}
"""Schemas by the first part of a path, as `errors.SHAPES` has their writers; others: Error."""


_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Anthropic": ("Messages, as Anthropic's clients send them", ("/v1/messages",)),
    "Ollama": ("What Ollama's clients ask", ("/api",)),
    "KServe and Triton": (
        "The Open Inference Protocol",
        ("/v2/health", "/v2/models", "/v2/repository"),
    ),
    "Rerank, score and vectors": (
        "As Cohere, Jina, TEI and vLLM have them",
        (
            *("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score"),
            *("/v1/score", "/v2/embed", "/embed_sparse", "/pooling", "/v1/pooling", "/classify"),
            "/v1/classify",
        ),
    ),
    "Weights and sleep": (
        "Adapters, memory given back, weights that a trainer changes",
        (
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"),
            *("/is_sleeping", *weights.BODIES, *weights.GETS, *weights.BODILESS),
        ),
    ),
    "Tokens": (
        "Text as tokens and back, and what the model would read",
        ("/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/completions/render"),
    ),
    "OpenAI": (
        "Chat, completions, responses, embeddings, sound, files and batches",
        (
            *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/chat/completions"),
            *("/responses", "/embeddings", "/v1/responses", "/v1/batches", "/v1/feedback"),
            *("/v1/models", "/v1/files", "/v1/audio"),
        ),
    ),
    "llama.cpp": (
        "What llama.cpp's server has besides",
        (*llama.BODIES, "/props", "/slots", "/models"),
    ),
    "Operation": (
        "Health, metrics, and pages for a browser",
        (
            *("/live", "/ready", "/health", "/ping", "/version", "/metrics", "/status"),
            *("/status.json", "/findings", "/chat", "/docs", "/v2"),
        ),
    ),
}
"""Groups of routes by name: their purpose, and the beginnings of their paths. A path belongs to the
first group that fits."""

_SHOWN = ("OpenAI", "Anthropic", "Ollama", "Rerank, score and vectors", "Tokens", "llama.cpp")


def _group(path: str) -> str:
    found = [
        name
        for name, (_, begins) in _GROUPS.items()
        if any(f"{path}/".startswith(f"{begin}/") for begin in begins)
    ]
    if not found:
        raise LookupError(f"{path} is in no group of routes: put it in _GROUPS")
    return found[0]


_ON_DEMAND: dict[str, type[msgspec.Struct]] = dict.fromkeys(
    ("/api/pull", "/api/delete", "/models/load", "/models/unload"), ModelBody
)
"""Routes of a server of several models."""


def document(
    version: str, *, has_keys: bool, on_demand: bool = False, updates_weights: bool = False
) -> dict[str, Any]:
    """The OpenAPI document. `on_demand`: of a server of several models. `updates_weights`: it has
    the routes of weights that change."""
    bodies = _BODIES | (_ON_DEMAND if on_demand else {})
    gets, posts = _GETS, _POSTS
    if updates_weights:
        bodies = bodies | weights.BODIES
        gets = gets | weights.GETS
        posts = posts | {path: (text, {}) for path, text in weights.BODILESS.items()}
    (_, components) = msgspec.json.schema_components(
        bodies.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for path, kind in bodies.items():
        content = _json_content({"$ref": f"#/components/schemas/{kind.__name__}"})
        place = {"parameters": [_ID]} if "{id}" in path else {}
        operation = {
            **place,
            "requestBody": {"required": True, "content": content},
            "responses": _answers(path),
        }
        verb = "delete" if path == "/api/delete" else "post"
        paths[path] = {verb: {"summary": kind.__doc__, **operation}}
    for verb, found in (("get", gets), ("delete", _DELETES)):
        for path, summary in found.items():
            parameters = [_ID] if "{id}" in path else []
            paths.setdefault(path, {})[verb] = {
                "summary": summary,
                "parameters": parameters,
                "responses": _answers(path),
            }
    for path, (summary, query) in posts.items():
        parameters = [_ID] if "{id}" in path else []
        parameters += [
            {"name": n, "in": "query", "schema": {"type": "string", "enum": some}}
            for n, some in query.items()
        ]
        paths[path] = {
            "post": {"summary": summary, "parameters": parameters, "responses": _answers(path)}
        }
    for path, (summary, name) in _FORMS.items():
        form = {"multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        paths.setdefault(path, {})["post"] = {
            "summary": summary,
            "requestBody": {"required": True, "content": form},
            "responses": _answers(path),
        }
    for path, verbs in paths.items():
        for operation in verbs.values():
            operation["tags"] = [_group(path)]
    order = dict.fromkeys((*_SHOWN, *_GROUPS))
    scheme = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": version},
        "tags": [{"name": name, "description": _GROUPS[name][0]} for name in order],
        "paths": paths,
        "components": {"schemas": {**components, **_FORM_SCHEMAS, **_ERRORS}, **scheme},
        "security": [{"key": []}] if has_keys else [],
    }


def _answers(path: str) -> dict[str, Any]:
    names = (n for begin, n in _ERROR_NAMES.items() if f"{path}/".startswith(f"{begin}/"))
    error = {"$ref": f"#/components/schemas/{next(names, 'Error')}"}
    return {
        "200": {"description": "The answer"},
        "default": {"description": "An error", "content": _json_content(error)},
    }


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
