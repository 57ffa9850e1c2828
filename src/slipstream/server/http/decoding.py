"""Decodes request bodies: an unknown field or a wrong type is a 400 whose `param` names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import msgspec.structs
from msgspec import Raw, Struct

from slipstream.server.http.errors import FIELDS, bad_request
from slipstream.server.http.field_hints import allowed_values, likely_name
from slipstream.server.http.json_depth import MAX_DEPTH, is_too_deep

OFF = msgspec.field(default_factory=Raw)  # default of fields that must be off


def refuse_unless_off(body: Struct, off: Mapping[str, tuple[bytes, ...]], path: str = "") -> None:
    for name, allowed in off.items():
        raw = bytes(getattr(body, name))
        if raw and (len(raw) > 100 or msgspec.json.format(raw, indent=-1) not in allowed):
            only = " or ".join(value.decode() for value in allowed)
            name = body.__struct_encode_fields__[body.__struct_fields__.index(name)]
            other = getattr(body, "OTHER_NAMES", {}).get(name)
            hint = f"; here it is {other}" if other else ""
            said = f"{name} is not supported yet; leave it out or {only}{hint}"
            raise bad_request(said, path + name)


def shorten(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    return text if len(text) <= 60 else text[:60] + "…"


T = TypeVar("T", bound=Struct)
_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def register(*bodies: type[Struct], parts: tuple[type[Struct], ...] = ()) -> None:
    """Make `bodies` decodable. Errors and the log may then name their fields and those of their
    `parts`."""
    _DECODERS.update({kind: msgspec.json.Decoder(kind) for kind in bodies})
    for kind in (*bodies, *parts):
        FIELDS.update(field.encode_name for field in msgspec.structs.fields(kind))


_AT = re.compile(r"(?s)(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?\Z")
_FIELD = re.compile(r"(?s)Object (?:contains unknown|missing required) field `(.*)`\Z")

MARKS = {
    b"\x1f\x8b": "it is compressed (gzip); send it as it is",
    b"\xef\xbb\xbf": "it begins with a byte order mark; send UTF-8 without one",
    b"\xff\xfe": "it is UTF-16; send UTF-8",
}
"""First bytes of bodies that are not JSON, with cause and remedy for the error message."""


def check_depth(body: bytes, path: str = "") -> None:
    """Raise a 400 that names the field if a body is nested deeper than `MAX_DEPTH`."""
    if not is_too_deep(body):
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    name = next((name for name, raw in fields.items() if is_too_deep(b"[%b]" % bytes(raw))), None)
    param = path.rstrip(".") or None if name is None else path + name
    raise bad_request(
        f"lists and objects are nested deeper than {MAX_DEPTH} levels (in {param or 'the body'}); make it flatter",
        param,
        "invalid_json",
    )


def decode(kind: type[T], body: bytes, path: str = "") -> T:
    """Decodes a body as `kind`. A 400 names the wrong field."""
    check_depth(body, path)
    try:
        value: T = _DECODERS[kind].decode(body)
        return value
    except msgspec.ValidationError as exc:
        match = _AT.fullmatch(str(exc))
        assert match is not None
        message, where = match[1], match[2] or ""
        named = _FIELD.fullmatch(message)
        parts = [part for part in (where, named and named[1]) if part]
        param = path + ".".join(parts) if parts else path.rstrip(".") or None
        hint = ""
        if named and "unknown" in message[:24]:
            hint = likely_name(kind, where, named[1])
        elif message.startswith("Invalid enum value"):
            hint = allowed_values(kind, where)
        raise bad_request(
            f"{message} (in {param or 'the body'}){hint}", param, "invalid_field"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        told = next((text for mark, text in MARKS.items() if body.startswith(mark)), str(exc))
        raise bad_request(f"the body is not valid JSON: {told}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def decode_raw(raw: Raw | bytes, path: str) -> Any:
    """The value of a field that was left undecoded, or a 400 that names it."""
    try:
        return msgspec.json.decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(
            f"this is not valid JSON: {exc} (in {path})", path, "invalid_json"
        ) from None
