"""Hints of a body about the return of its session (docs/agents.md): names, times to live, ends, priority."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from slipstream.types import CacheHints

TTLS_S = {"in_memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 86400.0}
"""Seconds of the values of `prompt_cache_retention`, and of a `ttl` of `cache_control`. Others have no effect."""

URGENT, LATER = 2.0, 0.5
"""Weights of requests with a priority below 0 and above it."""

MAX_NAME = 512
"""Number of characters of a `prompt_cache_key` that count."""


def cache_hints(body: Any, priority: int, call_tokens: tuple[int, ...] = ()) -> CacheHints:
    """Hints of an OpenAI body, or of one that was made of another protocol's. `call_tokens`: see `CacheHints`."""
    offers = bool(getattr(body, "tools", None)) and getattr(body, "tool_choice", None) != "none"
    return CacheHints(
        session=(_text(body.prompt_cache_key) or "")[:MAX_NAME],
        ttl_s=TTLS_S.get(_text(body.prompt_cache_retention) or ""),
        weight=URGENT if priority < 0 else LATER if priority > 0 else 1.0,
        ends=bool(body.end_of_branch),
        calls=offers,
        call_tokens=call_tokens if offers else (),
    )


def longest_ttl(parts: Iterable[Any]) -> str | None:
    """The longest `ttl` of the `cache_control` of blocks or tools that are not parsed yet. Its default is "5m"."""
    found = set()
    for part in parts:
        given = part.get("cache_control") if isinstance(part, dict) else None
        if given is None or bytes(given) == b"null":
            continue
        control = msgspec.json.decode(given)
        found.add((isinstance(control, dict) and control.get("ttl")) or "5m")
    return max(found & TTLS_S.keys(), key=TTLS_S.__getitem__, default=None)


def _text(given: Raw | str | None) -> str | None:
    """The string of a field that takes any JSON."""
    if isinstance(given, Raw):
        given = msgspec.json.decode(given) if bytes(given) else None
    return given if isinstance(given, str) else None
