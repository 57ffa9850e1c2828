"""Hints of a body about the return of its session (docs/agents.md): names, times to live, ends, priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from slipstream.types import CacheHints

TTLS_S = {"in_memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 86400.0}
"""Seconds of the values of `prompt_cache_retention`, and of a `ttl` of `cache_control`. Others have no effect."""

URGENT, LATER = 2.0, 0.5
"""Weights of requests with a priority below 0 and above it."""

Breakpoints: TypeAlias = tuple[tuple[float, float], ...]

MAX_BREAKPOINTS = 4
"""Number of breakpoints that count, the last ones. Anthropic takes no more."""

MAX_NAME = 512
"""Number of characters of a `prompt_cache_key` that count."""


def cache_hints(
    body: Any, priority: int, call_tokens: tuple[int, ...] = (), breakpoints: Breakpoints = ()
) -> CacheHints:
    """Hints of an OpenAI body, or of one that was made of another's. The other arguments: see `CacheHints`."""
    offers = bool(getattr(body, "tools", None)) and getattr(body, "tool_choice", None) != "none"
    return CacheHints(
        session=(_text(body.prompt_cache_key) or "")[:MAX_NAME],
        ttl_s=TTLS_S.get(_text(body.prompt_cache_retention) or ""),
        weight=URGENT if priority < 0 else LATER if priority > 0 else 1.0,
        breakpoints=breakpoints,
        ends=bool(body.end_of_branch),
        calls=offers,
        call_tokens=call_tokens if offers else (),
    )


def breakpoints(parts: Sequence[Mapping[str, Raw]]) -> Breakpoints:
    """The breakpoints (`cache_control`) of blocks and tools that are not parsed yet, in the order of the prompt. The share of
    the prompt before one is that of the characters. A `ttl` of its own is "5m"."""
    sizes = [sum(len(bytes(v)) for k, v in part.items() if k != "cache_control") for part in parts]
    found, total, so_far = list[tuple[float, float]](), max(1, sum(sizes)), 0
    for part, size in zip(parts, sizes, strict=True):
        so_far += size
        given = part.get("cache_control")
        if given is None or bytes(given) == b"null":
            continue
        control = msgspec.json.decode(given)
        ttl = (isinstance(control, dict) and control.get("ttl")) or "5m"
        if ttl in TTLS_S:
            found.append((so_far / total, TTLS_S[ttl]))
    return tuple(found[-MAX_BREAKPOINTS:])


def _text(given: Raw | str | None) -> str | None:
    """The string of a field that takes any JSON."""
    if isinstance(given, Raw):
        given = msgspec.json.decode(given) if bytes(given) else None
    return given if isinstance(given, str) else None
