"""Pictures of a request: from data URIs, or fetched from hosts that the server's settings name. Nothing else is fetched.

A fetch follows no redirect and uses no proxy. It is bounded by a picture's bytes and by FETCH_S seconds. Its errors reveal
nothing about the host that answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from slipstream.engine.pictures import MAX_FILE_BYTES, PreparedPicture, from_data_uri
from slipstream.errors import RequestError
from slipstream.server.errors import bad_request
from slipstream.server.protocol import PicturePart
from slipstream.server.state import ServerState

FETCH_S = 10.0
_SHOWN = 80


async def read_pictures(state: ServerState, parts: Sequence[PicturePart]) -> list[PreparedPicture]:
    """The pictures, ready for a prompt. A 400 names the part that can't be one."""
    if not parts:
        return []
    try:
        state.engine.check_pictures(len(parts))
    except RequestError as error:
        raise bad_request(error.message, parts[0].path.removesuffix(".image_url")) from error
    tasks = [asyncio.create_task(_read(state, part)) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _read(state: ServerState, part: PicturePart) -> PreparedPicture:
    if is_fetched := part.url[:5].lower() != "data:":
        check_host(part.url, state.settings.allowed_media_hosts, part.path)
    try:
        data = (
            await asyncio.to_thread(fetched, part.url, part.path)
            if is_fetched
            else from_data_uri(part.url)
        )
        return await state.engine.prepare_picture(data, part.detail)
    except RequestError as error:
        where = f"{part.path}.{'detail' if error.field == 'detail' else 'url'}"
        raise bad_request(error.message, where) from error


def check_host(url: str, allowed: Sequence[str], path: str) -> None:
    """A 400 if the URL's host is not an allowed one. A host without a port stands for its scheme's own."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").lower()
    except ValueError:
        raise bad_request(f"{url[:_SHOWN]!r} is no URL", path) from None
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.username is not None
        or parts.password is not None
    ):
        raise bad_request(
            f"{url[:_SHOWN]!r} is neither a data: URI nor a plain http or https URL", path
        )
    if not allowed:
        raise bad_request(
            "this server fetches no pictures (--allowed-media-hosts names none); send a data: URI",
            path,
        )
    host = f"[{host}]" if ":" in host else host
    own = {80: "http", 443: "https"}.get(port or 0) == parts.scheme or port is None
    names = (
        {f"{host}:{port}"}
        if not own
        else {host, f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"}
    )
    if not names & {name.lower() for name in allowed}:
        raise bad_request(f"this server fetches no pictures from {host!r}; send a data: URI", path)


def fetched(url: str, path: str) -> bytes:
    """What a URL answers with 200. Blocking."""
    parts, end = urlsplit(url), time.monotonic() + FETCH_S
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=FETCH_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=FETCH_S)
    timer: threading.Timer | None = None
    try:
        connection.connect()
        # What answers byte by byte, in its head or later, keeps within every bound of one read: time is over for all of it.
        timer = threading.Timer(max(0.0, end - time.monotonic()), _cut, (connection.sock,))
        timer.start()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            more = ", a redirect, which is not followed" if 300 <= answer.status < 400 else ""
            raise bad_request(f"the picture's host answered {answer.status}{more}", path)
        data = bytearray()
        while piece := answer.read1(2**16):
            data += piece
            if len(data) > MAX_FILE_BYTES:
                raise bad_request(f"the picture has more than {MAX_FILE_BYTES} bytes", path)
        if time.monotonic() >= end:
            raise TimeoutError
        return bytes(data)
    except (OSError, http.client.HTTPException, UnicodeError, ValueError):
        raise bad_request(
            f"the picture can't be fetched from {parts.hostname!r} within {FETCH_S:g} s", path
        ) from None
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's, which belongs to the reader
