"""Authentication by API keys.

Every route needs one but the probes, which reveal only whether the server is up. A key comes as
`Authorization: Bearer KEY`, as the `openai` client sends it, or as `x-api-key: KEY`, as `anthropic`
does. There are two kinds: `--api-key`'s, which may do everything, and `--keys-file`'s, which have a
role and limits.

`--api-key`'s are kept as digests. A given key is compared with all of them in constant time, so the
time reveals neither a key nor which of several matched.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.engine.threads.fair_threads import client
from slipstream.server.http.errors import ApiError, response_to
from slipstream.server.http.keys import EVERYBODY, Key, KeyFile
from slipstream.server.state import ServerSettings

OPEN_ROUTES = frozenset(
    {
        "/",
        "/ping",
        "/live",
        "/ready",
        "/health",
        "/v2/health/live",
        "/v2/health/ready",
        "/status",
        "/chat",
        "/docs",
    }
)
"""Routes that need no key. The last three are pages without server data; they ask the user for a
key and send it with their requests."""

ADMIN_ROUTES = frozenset(
    {
        *("/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/api/pull", "/api/delete", "/models/unload"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        *("/finish_weight_update", "/abort_weight_update", "/update_weights_from_disk"),
        *("/init_weights_update_group", "/destroy_weights_update_group"),
        *("/update_weights_from_distributed", "/pause", "/resume", "/pause_generation"),
        *("/continue_generation", "/flush_cache", "/weights", "/reset_prefix_cache"),
        *("/get_world_size", "/server_info"),
    }
)
METRICS_ROUTES = frozenset({"/metrics", "/status.json", "/findings", "/version", "/fleet/status"})


class Keyring:
    """All keys of a server. Falsy if there are none; then every request is accepted."""

    def __init__(self, settings: ServerSettings) -> None:
        self._plain = tuple(map(_digest, settings.api_keys))
        self._file = None if settings.keys_file is None else KeyFile(Path(settings.keys_file))

    def __bool__(self) -> bool:
        return bool(self._plain) or self._file is not None

    def find(self, authorization: str, x_api_key: str) -> Key | None:
        """The key in one of the headers; None if the server needs none. ApiError (401) if it is
        unknown."""
        if not self:
            return None
        scheme, _, bearer = authorization.partition(" ")
        text = (bearer if scheme.lower() == "bearer" else x_api_key).strip()
        given = _digest(text)
        matches = [hmac.compare_digest(given, known) for known in self._plain]
        if any(matches):
            return self._plain_key(given)
        key = None if self._file is None else self._file.find(text)
        if key is None:
            raise ApiError(
                401,
                "missing or wrong API key; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key

    def by_id(self, id_: str) -> Key | None:
        """The key with this id, for work that outlives its request. None if it was removed."""
        found = next((known for known in self._plain if known.hex() == id_), None)
        if found is not None:
            return self._plain_key(found)
        return None if self._file is None else self._file.keys.get(id_)

    @property
    def may_change(self) -> bool:
        """Whether keys can be revoked while the server runs; only those of a file can."""
        return self._file is not None

    def is_active(self, key: Key) -> bool:
        """Whether a key is still valid. A key with a new secret counts as the same key."""
        known = self.by_id(key.id)
        return known is not None and known.state(time.time()) == "active"

    def _plain_key(self, digest: bytes) -> Key:
        """A key of `--api-key`. If it is the only one, its prefixes need no salt, since keys of a
        file have their own."""
        shares = EVERYBODY if len(self._plain) == 1 else None
        return Key(id=digest.hex(), role="admin", priority=None, share_prefixes=shares)


def check_role(key: Key, path: str) -> None:
    """Raise ApiError (403) if the key's role does not allow the route."""
    if key.role == "metrics" and path not in METRICS_ROUTES:
        raise forbidden(key, "user")
    if key.role == "user" and path in ADMIN_ROUTES:
        raise forbidden(key, "admin")
    if key.role == "user" and path in METRICS_ROUTES - {"/version"}:
        raise forbidden(key, "metrics")


def check_model(key: Key | None, model: str | None) -> None:
    """Raise ApiError (403) if the key is limited to other models."""
    if key is not None and key.models and model not in key.models:
        message = f"this key may not use the model {str(model)[:100]!r}, only {', '.join(key.models)[:500]}"
        raise ApiError(
            403, message, kind="permission_error", param="model", code="model_not_allowed"
        )


def forbidden(key: Key, needed: str) -> ApiError:
    message = f"this key has the role {key.role}; the route asks for {needed}"
    return ApiError(403, message, kind="permission_error", code="permission_denied")


class ApiKeys:
    """ASGI middleware that checks keys. Requests that the server sends to itself already have a key
    in their scope."""

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and "key" not in scope
            and self.keys
            and scope["path"] not in OPEN_ROUTES
        ):
            headers = Headers(scope=scope)
            try:
                key = self.keys.find(headers.get("authorization", ""), headers.get("x-api-key", ""))
                if key is not None:
                    check_role(key, scope["path"])
            except ApiError as error:
                scope["record"].error = error.code
                await response_to(scope, error)(scope, receive, send)
                return
            if key is not None:
                scope["record"].key = key
                client.set(key.id)
        await self.app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
