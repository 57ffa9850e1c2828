"""The record of each request: id, outcome, log line, token counts. Prompts, answers and keys are
never in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.engine.threads.fair_threads import client
from slipstream.server.http.errors import ApiError, as_api_error, response_to, unavailable
from slipstream.server.http.keys import Key
from slipstream.server.http.rates import Grant
from slipstream.server.operations.metrics import Metrics

if TYPE_CHECKING:
    from slipstream.server.answers.generation import Answer
    from slipstream.server.operations.audit import AuditLog
    from slipstream.server.operations.telemetry import Telemetry

logger = logging.getLogger("slipstream.access")
errors = logging.getLogger("slipstream.server")

TOKENS_HEADER = b"x-slipstream-tokens"
"""Header with the token counts, for a fleet's gateway (`server.operations.fleet`)."""

_TRACE = (b"traceparent", b"tracestate")
_PROBES = {
    "/ping",
    "/live",
    "/ready",
    "/health",
    "/metrics",
    "/status.json",
    "/v2/health/live",
    "/v2/health/ready",
}
_QUIET = frozenset(_PROBES)  # requested every few seconds; logged when they fail
ROUTES = _QUIET | {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/v1/models",
    "/models",
    "/chat/completions",
    "/embeddings",
    "/v2/embed",
    "/embed_sparse",
    "/pooling",
    "/v1/pooling",
    "/classify",
    "/v1/classify",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reranking",
    "/v1/reranking",
    "/completion",
    "/completions",
    "/infill",
    "/embedding",
    "/apply-template",
    "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens",
    "/responses",
    "/responses/input_tokens",
    "/props",
    "/slots",
    "/v2",
    "/v2/repository/index",
    "/v1/feedback",
    "/v1/files",
    "/v1/batches",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/openapi.json",
    "/docs",
    "/status",
    "/chat",
    "/findings",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/tags",
    "/api/ps",
    "/api/pull",
    "/api/delete",
    "/models/load",
    "/models/unload",
    "/api/version",
    "/version",
    "/fleet/events",
    "/fleet/prefill",
    "/fleet/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/abort_weight_update",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/pause",
    "/resume",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/reset_prefix_cache",
    "/get_world_size",
    "/server_info",
    "/is_paused",
    "/get_weight_version",
    "/weights",
}
PATTERNS = [
    (name, re.compile(name.replace("{id}", ".+")))
    for name in (
        "/v1/models/{id}",
        "/v1/files/{id}/content",
        "/v1/files/{id}",
        "/v1/batches/{id}/cancel",
        "/v1/batches/{id}",
        "/v1/responses/{id}/input_items",
        "/v1/responses/{id}/cancel",
        "/v1/responses/{id}",
        *(
            f"/v2/models/{{id}}/{what}"
            for what in ("ready", "config", "infer", "generate", "generate_stream")
        ),
        "/v2/models/{id}",
    )
]
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def route_of(path: str) -> str:
    """Label of a path in metrics and spans; "other" for one that no route has."""
    if path in ROUTES:
        return path
    return next((name for name, form in PATTERNS if form.fullmatch(path)), "other")


@dataclass(slots=True)
class RequestRecord:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    start: float = field(default_factory=time.monotonic)
    status: int = 500  # until an answer begins
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    error: str | None = None
    param: str | None = None  # the field that was refused
    key: Key | None = None  # the request's
    grant: Grant | None = None  # for keys with limits
    is_limited: bool = False  # the key's limits are applied, and the grant is not closed yet
    model: str | None = None  # the served name
    answer: Answer | None = None
    body: str | None = None  # for the audit log, if it gets bodies
    answers: list[str] | None = None  # texts as the model wrote them, for the same log
    finish_reasons: list[str | None] | None = None  # of `answers`
    # The client's trace headers, if spans are sent.
    trace_headers: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))  # `created` of the answer
    # fields accepted without effect (`answers.hints`)
    hints: list[str] = field(default_factory=list)
    background: bool = False  # belongs to a batch: runs after all others
    address: str = ""  # of the sender
    load_s: float = 0.0  # waited for the model to be loaded

    @property
    def owner(self) -> str:
        """Id of the key that asked, here or at a fleet's gateway; empty without keys."""
        return "" if self.key is None else self.key.id

    @property
    def client(self) -> str:
        """Client whose grammars are compiled one after the other: the key, or the address without
        keys. Empty: nobody's."""
        who = f"key {self.owner}" if self.owner else self.address and f"address {self.address}"
        return f"batch {who}" if self.background else who

    @property
    def token_counts(self) -> bytes:
        """The value of `TOKENS_HEADER`."""
        return b"%d %d" % (self.num_prompt_tokens, self.num_output_tokens)


@dataclass(slots=True)
class Observers:
    """Receivers of finished requests' records: metrics, audit log, telemetry."""

    metrics: Metrics
    audit: AuditLog | None = None
    telemetry: Telemetry | None = None

    @property
    def refuses(self) -> bool:
        """Whether requests can't be logged and so must be refused."""
        return self.audit is not None and self.audit.refuses


class RequestLog:
    """ASGI middleware, the outermost: makes the record, sends its id as x-request-id, logs and
    counts at the end.

    It turns an unexpected exception into a 500, because nothing outside it could answer. The log
    has the traceback under the request's id.
    """

    def __init__(self, app: ASGIApp, observers: Observers) -> None:
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope["record"] = RequestRecord(
            key=scope.get("key"),
            background=scope.get("background", False),
            address=(scope.get("client") or ("",))[0],
        )
        address = scope.get("client")
        client.set(record.owner or (address[0] if address else ""))
        started, unread = False, scope.get("unread_body")

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *_id_headers(scope["path"], record.id),
                ]
                if record.grant is not None and record.status < 400:  # an error has its own headers
                    message["headers"] += record.grant.headers
                if unread is not None and unread():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        if self.observers.telemetry is not None:
            record.trace_headers = {
                n.decode(): v.decode("latin-1") for n, v in scope["headers"] if n in _TRACE
            }
        try:
            if self.observers.refuses and scope["path"] not in _QUIET:
                record.error = "audit_unavailable"
                await response_to(scope, _not_audited())(scope, receive, send_with_id)
                return
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            error = as_api_error(exc)
            record.error = error.code
            # A partial answer can only be aborted, by raising; uvicorn logs it.
            if started:
                raise
            errors.exception("a request failed", extra={"fields": {"id": record.id}})
            await response_to(scope, error)(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        # Labels and log fields come from fixed sets, so no client can flood or forge them.
        route, method = route_of(scope["path"]), scope["method"]
        finish(self.observers, record, method if method in _METHODS else "other", route)


def _not_audited() -> ApiError:
    return unavailable(
        "the audit log cannot be written, and this server answers no request without it",
        "audit_unavailable",
    )


def finish(observers: Observers, record: RequestRecord, method: str, route: str) -> None:
    """Count and log a request that has ended."""
    if observers.telemetry is not None:
        observers.telemetry.ended(record, route)
    observers.metrics.responses[method, route, record.status] += 1
    observers.metrics.hints.update(record.hints)
    if route in _QUIET and record.status < 400:
        return
    fields: dict[str, object] = {
        "id": record.id,
        "method": method,
        "route": route,
        "status": record.status,
    }
    if record.num_prompt_tokens:
        fields |= {
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
        }
    if record.ttft_s is not None:
        fields["ttft_s"] = round(record.ttft_s, 4)
    fields["e2e_s"] = round(time.monotonic() - record.start, 4)
    if record.error is not None:
        fields["error"] = record.error
    if record.param is not None:
        fields["param"] = record.param
    logger.info("request", extra={"fields": fields})
    if observers.audit is not None:
        observers.audit.write(
            "request",
            **fields,
            key=record.owner or None,
            model=record.model,
            body=record.body,
            answers=record.answers,
            finish_reasons=record.finish_reasons,
        )


def _id_headers(path: str, id_: str) -> list[tuple[bytes, bytes]]:
    """OpenAI's id header, and Anthropic's on Anthropic's routes."""
    name = [(b"request-id", id_.encode())] if path.startswith("/v1/messages") else []
    return [(b"x-request-id", id_.encode()), *name]


class LogFormatter(logging.Formatter):
    """One line for each record: `time level message key=value ...`, or a JSON object. `more` are
    fields of every line."""

    def __init__(self, *, json: bool, more: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.json, self.more = json, more or {}

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        message, level = record.getMessage(), record.levelname.lower()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        fields: dict[str, object] = {**self.more, **getattr(record, "fields", {})}
        if self.json:
            return msgspec.json.encode(
                {"time": stamp, "level": level, "message": message, **fields}
            ).decode()
        return " ".join(
            [stamp, level, message, *(f"{key}={value}" for key, value in fields.items())]
        )
