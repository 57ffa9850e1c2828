"""Protection of a server without keys against web pages that access it through a visitor's browser.

1. A foreign `Host` is refused (421). A page whose name was bound to this machine (DNS rebinding)
   sends its own name, and could read every answer. An IP address can't be such a name, and is
   always accepted.
2. A request other than GET from another origin's page is refused (403): the page could send it
   without reading the answer.
3. A body with the type of a form or plain text is refused (415). Browsers send such bodies to other
   origins without a CORS preflight. curl's `-d` also declares a form, and is accepted by its
   `User-Agent`, which a page can't set without a preflight.

With keys none of this is needed, because a page has no key. Then only names that `--allowed-hosts`
gives are checked.
"""

from __future__ import annotations

import re
import socket
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.server.http.errors import ApiError, response_to
from slipstream.server.http.rates import RATE_HEADERS
from slipstream.server.state import ServerSettings

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/?#@,\s\\]+))(?::[0-9]*)?")
LOCALHOST = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?")
"""Origins that `--cors-origin localhost` means: pages from any port of the reader's own machine."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_UPLOADS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})
_FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


class WebGuard:
    """ASGI middleware. It runs inside CORS, so that an allowed page can read why it was refused."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, has_keys: bool) -> None:
        self.app, self._has_keys = app, has_keys
        self._origins = frozenset(settings.cors_origins)
        self._checks_hosts = "*" not in settings.allowed_hosts and (
            not has_keys or bool(settings.allowed_hosts)
        )
        machine = socket.gethostname().lower()  # `getfqdn` would ask DNS
        given = [name.lower() for name in settings.allowed_hosts]
        self._hosts = {"localhost", settings.host.lower(), machine, machine.partition(".")[0]}
        self._hosts |= {name for name in given if not name.startswith("*")}
        self._domains = (".localhost", *(name[1:] for name in given if name.startswith("*.")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # otherwise the server itself sends the request
        if scope["type"] == "http" and "key" not in scope:
            headers = Headers(scope=scope)
            try:
                if self._checks_hosts:
                    self._check_host(headers)
                if not self._has_keys and scope["method"] not in _SAFE_METHODS:
                    self._check_origin(headers, scope["scheme"])
                    if scope["path"] not in _UPLOADS:
                        _check_content_type(headers)
            except ApiError as error:
                scope["record"].error = error.code
                await response_to(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """Raise a 421 for a foreign `Host`. A missing one is accepted: every browser sends one."""
        for host in headers.getlist("host"):
            if not self.is_allowed(host):
                raise ApiError(
                    421,
                    f"this server does not accept requests for the host {host[:100]!r}; "
                    "start it with --allowed-hosts NAME (allowed_hosts in a fleet's file) if it should",
                    code="host_not_allowed",
                )

    def is_allowed(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        if found[1] is not None:
            return _is_address(IPv6Address, found[1])
        name = found[2].removesuffix(".")
        return name in self._hosts or name.endswith(self._domains) or _is_address(IPv4Address, name)

    def _check_origin(self, headers: Headers, scheme: str) -> None:
        """Raise a 403 for a page of another origin. `Origin` is the page's; `Sec-Fetch-Site` may
        come without it."""
        origin = headers.get("origin")
        if "*" in self._origins or (origin is not None and origin.lower() in self._origins):
            return
        if "localhost" in self._origins and LOCALHOST.fullmatch((origin or "").lower()):
            return
        own = f"{scheme}://{headers.get('host', '')}".lower().removesuffix(
            _USUAL_PORTS.get(scheme, "/")
        )
        is_foreign = origin is not None and origin.lower() != own
        if is_foreign or headers.get("sec-fetch-site", "").lower() in ("cross-site", "same-site"):
            raise ApiError(
                403,
                f"a server without keys refuses requests of other origins' pages ({(origin or 'unknown')[:200]}); "
                "start it with --cors-origin ORIGIN (cors_origins in a fleet's file) to let that page or app ask, "
                "or with keys",
                kind="permission_error",
                code="cross_origin_request",
            )


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wraps `app` with CORS headers, so that pages of the allowed origins may read its answers. It
    wraps the key check: a preflight request has no key."""
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOCALHOST.pattern if "localhost" in settings.cors_origins else None,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
    )


def _is_address(kind: type[IPv4Address | IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except AddressValueError:
        return False
    return True


def _check_content_type(headers: Headers) -> None:
    """Raise a 415 for a body's type that a page may send. Programs that are no browser may omit the
    type."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    types = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
    is_browser = "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)
    if not is_browser and headers.get("user-agent", "").startswith("curl/"):
        return
    if any(kind in _FORMS for kind in types) or (is_browser and not any(types)):
        told = next((kind for kind in types if kind in _FORMS), "no content type")
        raise ApiError(
            415,
            f"the body must be JSON, and the request says {told}; send -H 'content-type: application/json'",
            code="unsupported_media_type",
        )
