"""Fields of a request about its model, read before the model is loaded."""

from __future__ import annotations

import math
import re
from typing import Any

from msgspec import Raw, Struct
from starlette.datastructures import UploadFile
from starlette.requests import Request

from slipstream.server.http.decoding import decode, decode_raw, register
from slipstream.server.http.errors import bad_request
from slipstream.server.http.forms import read_form
from slipstream.server.openai.audio import MAX_FIELDS
from slipstream.server.state import ServerSettings

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_FOR_EVER_S = 1e12  # longer times, even integers too large for a float, mean for ever
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)")


def parse_keep_alive(value: Any) -> float | None:
    """Seconds of a `keep_alive` as in Ollama: a number of seconds, or a text such as "5m" or
    "1h30m". Negative: for ever (infinite). None: invalid."""
    if isinstance(value, str):
        sign, text = (-1, value[1:]) if value[:1] == "-" else (1, value)
        parts = _PART.findall(text)
        if text.isascii() and text.isdecimal():
            value = sign * float(text)
        elif parts and "".join(map("".join, parts)) == text:
            value = sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return math.inf if value < 0 or value > _FOR_EVER_S else float(value)


class Asked(Struct, kw_only=True):
    """Fields of any body that tell the model, how long it stays loaded, and whether there is work."""

    model: str | None = None
    keep_alive: Raw = Raw(b"null")
    prompt: Raw = Raw(b'""')
    messages: Raw = Raw(b"[]")
    images: Raw = Raw(b"null")

    @classmethod
    def of(cls, raw: bytes) -> Asked:
        return decode(cls, raw)

    def keep_alive_s(self, path: str) -> float | None:
        """Seconds for which the model stays loaded after the request; None: as configured. Only
        Ollama's routes have this field."""
        if not path.startswith("/api/") or bytes(self.keep_alive) == b"null":
            return None
        found = parse_keep_alive(decode_raw(self.keep_alive, "keep_alive"))
        if found is None:
            raise bad_request(
                'keep_alive must be a number of seconds or a duration such as "5m"; -1 keeps the model',
                "keep_alive",
            )
        return found

    def is_empty(self, path: str) -> bool:
        """Whether an Ollama body only requests to load or unload the model."""
        if path == "/api/chat":
            return not decode_raw(self.messages, "messages")
        return path == "/api/generate" and not decode_raw(self.prompt, "prompt")


register(Asked)


async def named_in_form(request: Request, settings: ServerSettings) -> tuple[Asked, bytes]:
    """Reads the field `model` of a form with an audio file, and the whole body."""
    chunks = list[bytes]()
    receive = request.receive

    async def kept() -> Any:
        message = await receive()
        chunks.append(message.get("body", b""))
        return message

    form = await read_form(
        Request(request.scope, kept),
        limit=settings.max_audio_bytes,
        option="--max-audio-bytes",
        fields="file and model",
        body_timeout_s=settings.body_timeout_s,
        max_fields=MAX_FIELDS,
    )
    model = None
    for name, value in form:
        if isinstance(value, UploadFile):
            await value.close()
        elif name == "model":
            model = value
    return Asked(model=model), b"".join(chunks)
