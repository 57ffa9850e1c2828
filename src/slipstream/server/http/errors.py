"""Error answers, in OpenAI's shape or in that of the route's protocol.

OpenAI's shape is {"error": {"message", "type", "param", "code"}}.

  400 invalid_request_error   `param` names the field; code context_length_exceeded: prompt too long
  401 invalid_request_error   code invalid_api_key
  404, 405, 408, 413          unknown route or model, wrong method, body too slow or too long
  409 invalid_request_error   code conflict: an update or a pause is in progress
  429 rate_limit_error        the engine's queue or the server is full; see Retry-After
  503 service_unavailable     draining, or the engine process died or sleeps
  507 server_error            the disk is full; code disk_full
  500 server_error            a fault of ours; the log has the details, the message has none
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
from collections.abc import Callable, Mapping, Set
from typing import TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from slipstream.errors import (
    ConflictError,
    ContextLengthError,
    EngineAsleepError,
    EngineDeadError,
    EngineDownError,
    EngineKilledError,
    EngineOverloadedError,
    RequestError,
    SlipstreamError,
)

logger = logging.getLogger("slipstream.server")

RETRY_AFTER_S = 1
"""Retry-After in seconds of a full server: space is free after a few steps of the engine."""

ERROR_CODE_HEADER = b"x-slipstream-error-code"
"""Header with an error's code, for a fleet's gateway: not every protocol's shape has one."""

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client disconnected. Only the log and the metrics show it."""


class ApiError(Exception):
    """An error to answer with. `kind` is OpenAI's `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.lengths: tuple[int, int | None, int] | None = None  # as `ContextLengthError` has them

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def named_message(self) -> str:
        """The message with the field's name, for protocols whose errors are plain text."""
        return (
            self.message
            if self.param is None or self.param in self.message
            else f"{self.param}: {self.message}"
        )


class ClientDisconnected(Exception):  # noqa: N818 - nothing went wrong
    """The client disconnected, so there is no answer to send."""


Shape: TypeAlias = Callable[[ApiError, str], bytes]
"""Formats an error's body for a protocol other than OpenAI's; the second argument is the request's
id."""

SHAPES: dict[str, Shape] = {}
"""Error formats by the first part of a path, such as `/api`. Each protocol's module registers its
own."""


def error_body(scope: Scope, error: ApiError) -> bytes:
    """The body of an error, in the format of the route's protocol."""
    path = scope["path"]
    shape = next(
        (s for begin, s in SHAPES.items() if path == begin or path.startswith(begin + "/")), None
    )
    return error.body() if shape is None else shape(error, scope["record"].id)


def response_to(scope: Scope, error: ApiError) -> Response:
    """The error response to a request, in the format of its route's protocol."""
    headers = error.headers
    if error.code is not None and scope.get("from_gateway", False):
        headers = {**headers, ERROR_CODE_HEADER.decode(): error.code}
    return Response(error_body(scope, error), error.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def storage_error(message: str, error: OSError) -> ApiError:
    """Returns the error for a failed write: 507 if the disk is full, otherwise 503."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, f"{message}: {error.strerror}", kind="server_error", code="disk_full")
    return unavailable(f"{message}: {error.strerror}", "storage_failed")


def revoked_key() -> ApiError:
    message = "the API key of this request was revoked or has expired"
    return ApiError(401, message, code="invalid_api_key")


def shutting_down() -> ApiError:
    return unavailable("the server is shutting down; send the request to another", "shutting_down")


def as_api_error(exc: Exception) -> ApiError:
    """The error to answer with, for an exception."""
    match exc:
        case ApiError():
            return exc
        case ContextLengthError():
            error = bad_request(exc.message, exc.field, "context_length_exceeded")
            error.lengths = exc.lengths
            return error
        case ConflictError():
            return ApiError(409, exc.message, param=exc.field, code="conflict")
        case RequestError():
            return bad_request(exc.message, exc.field)
        case EngineOverloadedError():
            return overloaded(exc.message)
        case EngineAsleepError():
            return unavailable(exc.message, "engine_asleep")
        case EngineDownError():
            return unavailable(exc.message, "engine_down")
        case EngineKilledError():
            return unavailable(exc.message, "engine_killed")
        case EngineDeadError():
            return unavailable(exc.message, "engine_dead")
        case HTTPException():
            names = {404: "unknown route; see /openapi.json", 405: "wrong method for this route"}
            message = names.get(exc.status_code, exc.detail)
            return ApiError(
                exc.status_code, message, code=_CODES.get(exc.status_code), headers=exc.headers
            )
        case SlipstreamError():
            return ApiError(500, exc.message, kind="server_error", code="engine_error")
        case _:
            return ApiError(
                500,
                "internal error; the server's log has the details",
                kind="server_error",
                code="internal",
            )


FIELDS: set[str] = set()
"""Names of all fields of bodies, filled by `protocol`. Logs show no other names, which would be a
client's text."""

_CODES = {404: "unknown_route", 405: "method_not_allowed"}


async def answer_error(request: Request, exc: Exception) -> Response:
    """The app's handler of exceptions that are answers. RequestLog handles the others."""
    if isinstance(exc, ClientDisconnected):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(exc, HTTPException) and exc.status_code in (404, 405):
        exc = _no_route(request, exc)
    return response_to(request.scope, noted(request.scope, exc))


def wrong_method(methods: Set[str]) -> ApiError:
    """A 405 that names the route's `methods`."""
    allowed = ", ".join(sorted(methods - {"HEAD"}))
    message = f"wrong method for this route; it takes {allowed}"
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})


def _no_route(request: Request, exc: HTTPException) -> ApiError:
    """A 405 with the path's methods, or a 404 with the most similar route. It repeats nothing of
    the client's text."""
    path = request.scope["path"]
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    methods = {
        method
        for route in routes
        if route.path_regex.match(path)
        for method in route.methods or ("GET", "POST")
    }
    if methods:
        return wrong_method(methods)
    known = sorted({route.path for route in routes if "{" not in route.path} - {"/"})
    known = [name for name in known if not name.startswith("/fleet/")]  # a gateway's own
    asked = path.rstrip("/")[:100]
    # /v1 is missing or doubled
    twice = [name for name in known if name.startswith("/v1/") and asked.endswith(name)]
    near = twice + [name for name in known if asked and name.endswith(asked)]
    near = sorted(near, key=len)[-1:] or difflib.get_close_matches(asked, known, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "see /openapi.json"
    return ApiError(404, f"unknown route; {hint}", code="unknown_route")


def noted(scope: Scope, exc: Exception) -> ApiError:
    """The error to answer with. Records it in the request's record, and internal errors in the log."""
    error = as_api_error(exc)
    if error.status == 500 and isinstance(exc, SlipstreamError):
        logger.error("request failed: %s", exc)
    record = scope["record"]
    record.error = error.code or error.kind
    if error.param is not None:
        known = all(part in FIELDS for part in re.sub(r"\[\d+\]", "", error.param).split("."))
        record.param = error.param if known else "unknown"
    return error
