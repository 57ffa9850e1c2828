"""Hints of a body about the return of its session (docs/agents.md): names, times to live, ends, priority."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from slipstream.types import CacheHints

MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Fields of a block or tool by which a client marks the end of a prefix: Anthropic's and OpenAI's."""

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
        ttl_s=seconds_of(_text(body.prompt_cache_retention)) or _ttl(body.prompt_cache_options),
        weight=URGENT if priority < 0 else LATER if priority > 0 else 1.0,
        breakpoints=breakpoints or chat_breakpoints(body),
        ends=bool(body.end_of_branch),
        calls=offers,
        call_tokens=call_tokens if offers else (),
    )


def breakpoints(parts: Sequence[Mapping[str, Raw]]) -> Breakpoints:
    """The breakpoints (`cache_control`) of blocks and tools that are not parsed yet, in the order of the prompt. The share of
    the prompt before one is that of the characters. A `ttl` of its own is "5m"."""
    sizes = [sum(len(bytes(v)) for k, v in part.items() if k not in MARKS) for part in parts]
    found, total, so_far = list[tuple[float, float]](), max(1, sum(sizes)), 0
    for part, size in zip(parts, sizes, strict=True):
        so_far += size
        given = next((part[name] for name in MARKS if name in part), None)
        if given is None or bytes(given) == b"null":
            continue
        if (seconds := _ttl(given, "5m")) is not None:
            found.append((so_far / total, seconds))
    return tuple(found[-MAX_BREAKPOINTS:])


def chat_breakpoints(body: Any) -> Breakpoints:
    """The same of a chat's messages. Few have any."""
    contents = [message.content for message in getattr(body, "messages", ())]
    listed = [part for content in contents if isinstance(content, list) for part in content]
    if not any(name in part for part in listed for name in MARKS):
        return ()
    parts = list[Mapping[str, Raw]]()
    for content in contents:
        parts += content if isinstance(content, list) else [{"text": Raw((content or "").encode())}]
    return breakpoints(parts)


def seconds_of(ttl: Any) -> float | None:
    """Seconds of a time to live: "in_memory", or minutes or hours such as "5m" and "24h", a day at most. Others: none."""
    if ttl == "in_memory":
        return 300.0
    found = re.fullmatch(r"(\d{1,4})([mh])", ttl) if isinstance(ttl, str) else None
    return (
        None if found is None else min(86400.0, int(found[1]) * {"m": 60.0, "h": 3600.0}[found[2]])
    )


def _ttl(given: Raw, default: str | None = None) -> float | None:
    """Seconds of the `ttl` of an object that is not parsed yet."""
    control = msgspec.json.decode(given) if bytes(given) else None
    return seconds_of((isinstance(control, dict) and control.get("ttl")) or default)


def _text(given: Raw | str | None) -> str | None:
    """The string of a field that takes any JSON."""
    if isinstance(given, Raw):
        given = msgspec.json.decode(given) if bytes(given) else None
    return given if isinstance(given, str) else None
