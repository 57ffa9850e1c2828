"""Hints: fields of a body that advise, label or edit, and are accepted without effect.

Clients send them by default and can't always omit them. A field that would change the answer is no
hint: it is applied, or refused by name. docs/agents.md lists all hints with the reason for each.
`slipstream:request_hints_total` counts those that were sent.

A struct's hints have the type `Hint`. Some fields are hints only for some models, such as an effort
that the chat template does not know: the code that finds out adds them to the request's record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

T = TypeVar("T")
_MARK = Meta(extra={"hint": True})
Hint = Annotated[T, _MARK]
AnyHint = Annotated[Raw, _MARK]
"""Type of a hint that is not parsed: any JSON is accepted."""

ABSENT = msgspec.field(default_factory=Raw)
"""Default of an optional field of unparsed JSON."""


@functools.cache
def hints_of(kind: type[Struct]) -> frozenset[str]:
    """Names of the hints among a struct's own fields."""
    fields = msgspec.structs.fields(kind)
    return frozenset(f.name for f in fields if _MARK in getattr(f.type, "__metadata__", ()))


def given_hints(body: Any, path: str = "") -> Iterator[str]:
    """Yield the names of the hints in a body and its parts, such as "tools.cache_control"."""
    if not isinstance(body, Struct):
        return
    hints = hints_of(type(body))
    if (more := getattr(body, "more_hints", None)) is not None:
        yield from more()
    for field in body.__struct_fields__:
        value = getattr(body, field)
        name = path + field
        if field == "messages":
            continue  # possibly thousands: their hints are accepted but not counted
        if field in hints:
            if _is_given(value):
                yield name
        elif isinstance(value, Struct):
            yield from given_hints(value, name + ".")
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            yield from dict.fromkeys(
                hint
                for part in value
                if isinstance(part, Struct)
                for hint in given_hints(part, name + ".")
            )


def _is_given(value: Any) -> bool:
    return value is not None and (not isinstance(value, Raw) or bytes(value) not in (b"", b"null"))
