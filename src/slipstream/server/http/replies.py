"""Response formats that several routes share: JSON answers, pages of a list, times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from slipstream import __version__
from slipstream.server.http.errors import bad_request

JSON_HEADERS = ((b"content-type", b"application/json"),)


def greeting(names: Collection[str]) -> str:
    """The text of `/` for clients other than browsers. `names` of its models: empty if
    the server has keys, because callers without one may not know them."""
    serves = f" serves {', '.join(names)}" if names else ""
    return f"Slipstream {__version__}{serves}: OpenAI's API at /v1, all of it at /docs\n"


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def send_whole(
    send: Send,
    body: bytes,
    about: Sequence[tuple[bytes, bytes]] = JSON_HEADERS,
    *,
    status: int = 200,
) -> None:
    """Send a complete response by ASGI. `about`: its headers except the length."""
    headers = [*about, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def utc_time(seconds: float) -> str:
    """A time in RFC 3339's format, UTC with Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def page_options(
    request: Request, *others: str, most: int, usual: int
) -> tuple[str | None, int, bool]:
    """Reads (after, limit, newest first) of a list request. ApiError (400) for other values.
    `others` are parameters that the route reads itself."""
    query = request.query_params
    for name in query:
        if name not in ("after", "limit", "order", *others):
            raise bad_request(f"{name[:100]!r} is not a parameter of this route", name[:100])
    limit, order = query.get("limit", str(usual)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise bad_request(f"limit must be from 1 to {most}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'", "order")
    return query.get("after"), int(limit), order == "desc"


def page_answer(found: list[dict[str, Any]], limit: int) -> Response:
    """The first `limit` items as a page. A further item in `found` shows that there are more."""
    data = found[:limit]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return json_response({"object": "list", "data": data, **ends, "has_more": len(found) > limit})
