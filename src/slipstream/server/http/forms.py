"""Bodies of uploads: multipart/form-data with one file, bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from slipstream.server.http.errors import ApiError, ClientDisconnected, bad_request, storage_error

AROUND = 2**16  # maximum bytes of a body besides its file


async def read_form(
    request: Request,
    *,
    limit: int,
    option: str,
    fields: str,
    body_timeout_s: float,
    count: Callable[[int], None] = lambda received: None,
    max_fields: int = 8,
) -> list[tuple[str, UploadFile | str]]:
    """The form's fields in order. `option` names the setting of the `limit` of the file's bytes;
    `fields` are named in the error for a body that is no form. `count` is called with the bytes so
    far. ApiError: 400, 408, or 413 as soon as the file is known to be too long."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise bad_request(f"the body must be multipart/form-data, with {fields}", "file")
    message = f"the file is longer than the {limit} bytes this server takes ({option})"
    too_long = ApiError(413, message, param="file", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit + AROUND:
        raise too_long

    async def chunks() -> AsyncGenerator[bytes, None]:
        """Yields the body. Raises 408 if it is slow: each MiB may take as long as a whole body on other routes."""
        received, begun = 0, asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(begun + body_timeout_s * (1 + received / 2**20)):
                    event = await request.receive()
            except TimeoutError:
                message = f"no MiB of the body within {body_timeout_s:g} s"
                raise ApiError(
                    408, message, code="request_timeout", headers={"connection": "close"}
                ) from None
            if event["type"] == "http.disconnect":
                raise ClientDisconnected
            data = event.get("body", b"")
            received += len(data)
            if received > limit + AROUND:
                raise too_long
            count(received)
            yield data
            if not event.get("more_body", False):
                return

    try:
        parser = MultiPartParser(
            Headers(scope=request.scope), chunks(), max_files=1, max_fields=max_fields
        )
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise bad_request(f"the body is no valid multipart/form-data: {error}", "file") from None
    except OSError as error:
        raise storage_error("the file cannot be kept", error) from None
    return form.multi_items()
