"""API keys: over every route except the three probes, which say nothing but whether the server is up.

A key comes as `Authorization: Bearer KEY`, as the `openai` client sends it. Only digests are kept; all of them are
compared in constant time, so that neither a key nor which of several it was can be timed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.server.errors import ApiError

OPEN_ROUTES = frozenset({"/ping", "/live", "/ready", "/health"})


class ApiKeys:
    """ASGI middleware; without keys everything is let through."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = tuple(_digest(key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            self.digests
            and scope["type"] == "http"
            and scope["path"] not in OPEN_ROUTES
            and not self._allows(Headers(scope=scope))
        ):
            error = ApiError(
                401,
                "missing or wrong API key; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            scope["record"].error = error.code
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        return any(matches) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
