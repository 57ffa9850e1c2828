"""Images and sounds of a request: from data URIs, or fetched from hosts that the server's settings
allow.

A fetch follows no redirect and uses no proxy. It is limited in bytes, to FETCH_S seconds, and by a
minimum rate. Its errors reveal nothing about the host that answered. Fetches run in separate
threads, of which each client may use a few, so that slow hosts only delay that client's images.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slipstream.engine.media.parts import from_base64, from_data_uri
from slipstream.engine.media.picture_files import MAX_FILE_BYTES, MAX_REQUEST_PIXELS, PictureFile
from slipstream.engine.media.prepared import PreparedMedia
from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.errors import RequestError
from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.openai.messages import MediaPart, PicturePart, SoundPart
from slipstream.server.state import ServerState

T = TypeVar("T")

FETCH_S = 10.0
SILENCE_S = 3.0
"""Maximum seconds without data from a host. The minimum rate applies only after this time."""

MIN_BYTES_PER_S = 16_384
_SHOWN = 80
_fetches = FairThreads("fetches", 64, per_client=8)


async def read_media(state: ServerState, parts: Sequence[MediaPart]) -> list[PreparedMedia]:
    """The prepared images or sounds of a request.

    A 400 names an invalid part. Nothing is decoded before the images' total pixels are known to be
    within the limit of a request.
    """
    if not parts:
        return []
    try:
        state.engine.check_media(len(parts))
    except RequestError as error:
        raise bad_request(error.message, parts[0].path.rpartition(".")[0]) from error
    hears = state.engine.description.spec.hears
    pictures = [part for part in parts if isinstance(part, PicturePart)]
    sounds = [part for part in parts if isinstance(part, SoundPart)]
    if wrong := pictures if hears else sounds:
        takes = "sounds, not pictures" if hears else "pictures, not sounds"
        raise bad_request(f"this model takes {takes}; leave it out", wrong[0].path)
    if hears:
        return await _all(_heard(state, part) for part in sounds)
    files = await _all(_measured(state, part) for part in pictures)
    num_pixels = 0
    for part, file in zip(pictures, files, strict=True):
        num_pixels += file.num_pixels
        if num_pixels > MAX_REQUEST_PIXELS:
            raise bad_request(
                f"the pictures up to this one have {num_pixels} pixels, and a request may have {MAX_REQUEST_PIXELS} in all; "
                "make them smaller, or send fewer",
                f"{part.path}.url",
            )
    both = zip(pictures, files, strict=True)
    return await _all(_prepared(state, part, file) for part, file in both)


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all coroutines and returns their results. If one fails the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _measured(state: ServerState, part: PicturePart) -> PictureFile:
    if is_fetched := part.url[:5].lower() != "data:":
        check_host(part.url, state.settings.allowed_media_hosts, part.path)
    with _naming(part):
        data = (
            await _fetches.run(partial(fetched, part.url, part.path))
            if is_fetched
            else from_data_uri(part.url)
        )
        return await state.engine.measure_picture(data)


async def _prepared(state: ServerState, part: PicturePart, file: PictureFile) -> PreparedMedia:
    with _naming(part):
        return await state.engine.prepare_media(file, part.detail)


async def _heard(state: ServerState, part: SoundPart) -> PreparedMedia:
    most = state.settings.max_audio_bytes
    if len(part.data) * 3 // 4 > most:
        message = f"the sound has more than {most} bytes (--max-audio-bytes)"
        raise bad_request(message, f"{part.path}.data")
    try:
        data = from_base64(part.data, part.format, part.path)
    except RequestError as error:
        raise bad_request(error.message, error.field) from error
    try:
        return await state.engine.prepare_media(data)
    except RequestError as error:
        raise bad_request(error.message, f"{part.path}.data") from error


@contextmanager
def _naming(part: PicturePart) -> Iterator[None]:
    """Context manager that makes engine errors name the part of the request."""
    try:
        yield
    except RequestError as error:
        where = f"{part.path}.{'detail' if error.field == 'detail' else 'url'}"
        raise bad_request(error.message, where) from error


def check_host(url: str, allowed: Sequence[str], path: str) -> None:
    """Raise a 400 if the URL's host is not allowed. A host without a port means its scheme's
    default port."""
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
    """The body of a response with status 200; ApiError (400) otherwise. Blocks."""
    parts, end = urlsplit(url), time.monotonic() + FETCH_S
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=SILENCE_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SILENCE_S)
    timer: threading.Timer | None = None
    try:
        connection.connect()
        # A host that sends byte by byte stays within every limit on a single read, so a timer ends
        # the whole fetch.
        timer = threading.Timer(max(0.0, end - time.monotonic()), _cut, (connection.sock,))
        timer.daemon = True
        timer.start()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            more = ", a redirect, which is not followed" if 300 <= answer.status < 400 else ""
            raise bad_request(f"the picture's host answered {answer.status}{more}", path)
        data, begun = bytearray(), time.monotonic()
        while piece := answer.read1(2**16):
            data += piece
            if len(data) > MAX_FILE_BYTES:
                raise bad_request(f"the picture has more than {MAX_FILE_BYTES} bytes", path)
            if len(data) < (time.monotonic() - begun - SILENCE_S) * MIN_BYTES_PER_S:
                raise TimeoutError
        if time.monotonic() >= end:
            raise TimeoutError
        return bytes(data)
    except (OSError, http.client.HTTPException, UnicodeError, ValueError):
        raise _too_slow(parts.hostname, path) from None
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _too_slow(host: str | None, path: str) -> ApiError:
    return bad_request(
        f"the picture can't be fetched from {host!r} within {FETCH_S:g} s, or comes slower than {MIN_BYTES_PER_S} bytes a "
        "second; send a data: URI",
        path,
    )


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's, which belongs to the reader
