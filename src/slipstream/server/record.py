"""One record a request: an id, how it went, a log line, a count. Prompts, answers and keys are never in it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.errors import as_api_error
from slipstream.server.metrics import Metrics

logger = logging.getLogger("slipstream.access")
errors = logging.getLogger("slipstream.server")

_QUIET = frozenset({"/ping", "/live", "/ready", "/health", "/metrics"})  # asked for every few seconds; logged when they fail
ROUTES = _QUIET | {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/docs",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/show",
    "/api/tags",
    "/api/version",
    "/version",
}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


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


class RequestLog:
    """ASGI middleware, the outermost: makes the record, sends its id as x-request-id, logs and counts at the end.

    Nothing outside it answers, so it is here that an exception which nobody expected becomes a 500, with its traceback
    in the log under the request's id.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope["record"] = RequestRecord()
        started, unread = False, scope.get("unread_body")

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                if unread is not None and unread():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            error = as_api_error(exc)
            record.error = error.code
            if started:  # half an answer can only be broken off, which raising does; uvicorn logs it
                raise
            errors.exception("a request failed", extra={"fields": {"id": record.id}})
            await error.response()(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        # Labels and log come from fixed sets, so no client can flood the one or forge the other.
        path, method = scope["path"], scope["method"]
        route = path if path in ROUTES else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
        method = method if method in _METHODS else "other"
        self.metrics.responses[method, route, record.status] += 1
        if route in _QUIET and record.status < 400:
            return
        fields: dict[str, object] = {"id": record.id, "method": method, "route": route, "status": record.status}
        if record.num_prompt_tokens:
            fields |= {"prompt_tokens": record.num_prompt_tokens, "output_tokens": record.num_output_tokens}
        if record.ttft_s is not None:
            fields["ttft_s"] = round(record.ttft_s, 4)
        fields["e2e_s"] = round(time.monotonic() - record.start, 4)
        if record.error is not None:
            fields["error"] = record.error
        if record.param is not None:
            fields["param"] = record.param
        logger.info("request", extra={"fields": fields})


class LogFormatter(logging.Formatter):
    """One line a record: `time level message key=value ...`, or the same as a JSON object. `more` are fields of every line."""

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
            return msgspec.json.encode({"time": stamp, "level": level, "message": message, **fields}).decode()
        return " ".join([stamp, level, message, *(f"{key}={value}" for key, value in fields.items())])
