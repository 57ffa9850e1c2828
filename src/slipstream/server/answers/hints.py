"""Hints: fields of a body that advise, label or edit, which are taken without effect.

Clients send them unasked, and can't always leave them out. A field that would change the answer is not a hint: it is done,
or refused by its name. docs/agents.md has all of them with the reason. `slipstream:request_hints_total` counts
those that were sent.

A struct names its hints in `hints`. Where a field is a hint only for some models (an effort that the chat template does not
know), the code that finds out adds it to the request's record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

HINT = msgspec.field(default_factory=Raw)
"""Default of a hint that is not looked at: any JSON is taken."""


def given_hints(body: Any, path: str = "") -> Iterator[str]:
    """Yields the names of the hints that the body has, with those of its parts, such as "tools.cache_control"."""
    hints: tuple[str, ...] = getattr(body, "hints", ())
    if (more := getattr(body, "more_hints", None)) is not None:
        yield from more()
    for field in getattr(body, "__struct_fields__", ()):
        value = getattr(body, field)
        name = path + field
        if field == "messages":
            continue  # they may be thousands; hints of theirs are taken, and not counted
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
