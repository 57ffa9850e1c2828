"""Pictures and sounds as parts of a chat's messages: data URIs, base64 and the forms of OpenAI and vLLM. No torch."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from slipstream.engine.media.picture_files import MAX_FILE_BYTES, bad
from slipstream.engine.media.pictures import DetailedPicture
from slipstream.errors import RequestError

_DATA = re.compile(
    r"(?s)data:(image/[a-z0-9.+-]{1,40})?((?:;[a-z0-9=._-]{1,60})*?)(;base64)?,(.*)", re.IGNORECASE
)
_SHOWN = 80


def from_data_uri(url: str) -> bytes:
    """Bytes of an image's data: URI (RFC 2397). RequestError (field "image") if it is invalid."""
    match = _DATA.fullmatch(url)
    if match is None or match[1] is None:
        raise bad(f"{url[:_SHOWN]!r} is no data:image/… URI")
    if len(match[4]) > MAX_FILE_BYTES * 3:
        raise bad(f"it has more than {MAX_FILE_BYTES} bytes")
    if not match[3]:
        return unquote_to_bytes(match[4])
    try:
        return base64.b64decode(re.sub(r"\s", "", match[4]), validate=True)
    except (binascii.Error, ValueError):
        raise bad("the data URI's base64 is broken; encode the file's bytes again") from None


AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")


def from_base64(data: str, form: str, where: str) -> bytes:
    """The file of OpenAI's `input_audio`. RequestError (field `where`) if it is invalid or not of the format `form`."""
    if form not in AUDIO_FORMATS:
        what = f"format must be one of {', '.join(AUDIO_FORMATS)}, got {form[:_SHOWN]!r}"
        raise RequestError(what, field=f"{where}.format")
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            "the base64 is broken; send the file's bytes in standard base64, without a data: URI's head",
            field=f"{where}.data",
        ) from None
    if not found:
        raise RequestError("the audio file is empty", field=f"{where}.data")
    if (begins := audio_format(found)) != form:
        what = f"begins as {begins}" if begins else f"does not begin as {form}"
        raise RequestError(
            f"format is {form!r}, and the file {what}; send what it is", field=f"{where}.format"
        )
    return found


def audio_format(data: bytes) -> str | None:
    """The format in `AUDIO_FORMATS` that a file's first bytes indicate; None for others."""
    if data[:4] in (b"RIFF", b"RF64"):
        return "wav"
    if data[:4] == b"OggS":
        return "ogg"
    tagged = data[:3] == b"ID3" and len(data) >= 10
    size = (
        sum((byte & 127) << 7 * (3 - i) for i, byte in enumerate(data[6:10])) + 10 if tagged else 0
    )
    if data[size : size + 4] == b"fLaC":  # some writers put ID3 tags before it
        return "flac"
    # MPEG audio: eleven sync bits, then layer I to III
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06
    return "mp3" if tagged or is_frame else None


def without_media(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """(messages for a chat template, with {"type": "image"} and {"type": "audio"} instead of images and
    sounds; the images and sounds). RequestError (field "messages") for a part of another type."""
    plain, media = list[dict[str, Any]](), list[Any]()
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            plain.append(message)
            continue
        parts = []
        for k, part in enumerate(content):
            where, medium = f"messages[{i}].content[{k}]", "image"
            match part:
                case {"type": "text", "text": str()}:
                    parts.append(part)
                    continue
                case {"type": "image_url", "image_url": str() | {"url": str()} as given}:
                    media.append(_named(given, where))
                case {"type": "image_pil", "image_pil": given} | {"type": "image", "image": given}:
                    media.append(given)
                case {
                    "type": "input_audio",
                    "input_audio": {"data": str() as data, "format": str() as form},
                }:
                    media.append(from_base64(data, form, f"{where}.input_audio"))
                    medium = "audio"
                case {"type": "audio", "audio": given}:
                    media.append(given)
                    medium = "audio"
                case _:
                    kind = part.get("type") if isinstance(part, dict) else part
                    known = "text, image_url, image_pil, input_audio and audio"
                    raise RequestError(
                        f"{where}: a part of type {kind!r}; the types are {known}", field="messages"
                    )
            if message.get("role") != "user":
                what = "pictures" if medium == "image" else "sounds"
                raise RequestError(f"{where}: only a user's message has {what}", field="messages")
            parts.append({"type": medium})
        plain.append({**message, "content": parts})
    return plain, media


def _named(given: str | dict[str, Any], where: str) -> Any:
    """The image in OpenAI's `image_url`, or in vLLM's short form: the URL alone."""
    url, more = (
        (given, {})
        if isinstance(given, str)
        else (given["url"], {k: v for k, v in given.items() if k != "url"})
    )
    detail = more.pop("detail", None)
    if more:
        raise RequestError(
            f"{where}.image_url: unknown key {min(map(str, more))!r}; it has url and detail",
            field="messages",
        )
    if url[:5].lower() != "data:":
        raise RequestError(
            f"{where}: nothing is fetched here; give a data: URI or the picture", field="messages"
        )
    data = from_data_uri(url)
    return data if detail is None else DetailedPicture(data, detail)
